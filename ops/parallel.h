// Loops over PyTorch's threads, for the CPU kernels. ATen/Parallel.h has the same, but is slow to
// compile.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <cstdint>
#include <exception>

namespace at {
int get_num_threads();  // as declared in ATen/Parallel.h: what torch.set_num_threads has set
}

namespace calcops {

// Out of line, so that the two calls below are compiled once.
template <class F>
[[gnu::noinline]] void run_part(const F& f, int64_t begin, int64_t end) {
  f(begin, end);
}

// f(begin, end) for parts of 0, 1, ... count - 1, one a thread and none shorter than `grain`.
// Within another parallel loop there is one part. An exception reaches the caller when all parts
// are done.
template <class F>
void parallel_for(int64_t count, [[maybe_unused]] int64_t grain, const F& f) {
#ifdef _OPENMP
  if (count > grain && !omp_in_parallel() && at::get_num_threads() > 1) {
    std::exception_ptr problem;
// Without a num_threads clause, which makes libgomp start its threads anew (pytorch issue 32008).
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

// A place in a list, or kNone.
constexpr int64_t kNone = -1;

// The first of two places. As an unsigned number kNone is the largest.
inline int64_t first_of(int64_t a, int64_t b) {
  return int64_t(std::min(uint64_t(a), uint64_t(b)));
}

// The first place of those that f(begin, end) gives for each part.
template <class F>
int64_t parallel_first(int64_t count, int64_t grain, const F& f) {
  int64_t first = kNone;
  parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    const int64_t found = f(begin, end);
#pragma omp critical(calcops)
    first = first_of(first, found);
  });
  return first;
}

}  // namespace calcops
