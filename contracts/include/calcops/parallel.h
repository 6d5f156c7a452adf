// Parallel loops on PyTorch's threads, for the CPU kernels. ATen/Parallel.h has them too, but is
// slow to compile.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <cstdint>
#include <exception>

namespace at {
int get_num_threads();  // as in ATen/Parallel.h: the number set by torch.set_num_threads
}

namespace calcops {

// Not inlined, so that the loop is compiled once for the two calls below.
template <class F>
[[gnu::noinline]] void run_part(const F& f, int64_t begin, int64_t end) {
  f(begin, end);
}

// Divide 0, 1, ... count - 1 into parts and call f(begin, end) for each part in a thread of its
// own. There are at most count / grain parts, rounded up. Within another parallel loop there is one
// part. If a part throws, an exception is rethrown when all parts are done.
template <class F>
void parallel_for(int64_t count, [[maybe_unused]] int64_t grain, const F& f) {
#ifdef _OPENMP
  if (count > grain && !omp_in_parallel() && at::get_num_threads() > 1) {
    std::exception_ptr problem;
// A num_threads clause would make libgomp start its threads anew (pytorch issue 32008).
#pragma omp parallel
    {
      const int64_t parts = std::min<int64_t>(omp_get_num_threads(), (count + grain - 1) / grain);
      const int64_t share = (count + parts - 1) / parts, begin = omp_get_thread_num() * share;
      if (begin < count) {
        try {
          run_part(f, begin, std::min(begin + share, count));
        } catch (...) {
#pragma omp critical(calcops)
          problem = std::current_exception();
        }
      }
    }
    if (problem) std::rethrow_exception(problem);
    return;
  }
#endif
  if (count > 0) run_part(f, 0, count);
}

// Stands for a position in a list where there is none.
constexpr int64_t kNone = -1;

// Return the first of two positions. kNone is the largest unsigned number, so it comes last.
inline int64_t first_of(int64_t a, int64_t b) {
  return int64_t(std::min(uint64_t(a), uint64_t(b)));
}

// Return the first of the positions that f(begin, end) returns for the parts, or kNone.
template <class F>
int64_t parallel_first(int64_t count, int64_t grain, const F& f) {
  int64_t first = kNone;
  parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    const int64_t first_in_part = f(begin, end);
#pragma omp critical(calcops)
    first = first_of(first, first_in_part);
  });
  return first;
}

}  // namespace calcops
