// CPU kernels of tabulated_sum. They collect the pairs of an atom, then sum blocks of functions,
// whose sums stay in registers.
#include <algorithm>
#include <cstring>

#include "memory.h"
#include "parallel.h"
#include "tabulated_sum/tabulated_sum.h"
#include "tabulated_sum/tabulated_sum_math.h"

namespace calcops::ops::tabulated_sum {
namespace {

constexpr int64_t kAtomsPerThread = 8;

// A block of functions.
template <class Real>
struct Block {
  typedef Real type __attribute__((vector_size(64), aligned(sizeof(Real))));
  static constexpr int kSize = 64 / sizeof(Real);
};
template <class Real>
using Vector = typename Block<Real>::type;

// Load a block of numbers. With kIsWhole == false, M is less than a block: load `count` numbers,
// followed by zeros.
template <bool kIsWhole, class Real>
inline __attribute__((always_inline)) Vector<Real> load(const Real* from, int64_t count) {
  if constexpr (kIsWhole) {
    return *reinterpret_cast<const Vector<Real>*>(from);
  } else {
    Vector<Real> block{};
    std::memcpy(&block, from, count * sizeof(Real));
    return block;
  }
}

// A filled slot: its coefficients in the table, and their weights for the derivatives of g of
// `order` and of the next one.
template <class Real>
struct alignas(64) Pair {
  Real w[kPowers], next[kPowers], R[4];
  const Real* coefficients;
  int64_t slot;
};

// Write the pairs of an atom and return their number. Set `wrong` to the first slot whose kind does
// not exist, unless an earlier atom has set it.
template <class Real, class Index>
int64_t find_pairs(const SumInputs<Real, Index>& in, int64_t atom, bool gradient, Pair<Real>* pairs,
                   int64_t& wrong) {
  int64_t count = 0;
  const int64_t begin = atom * in.slots;
  for (int64_t slot = begin; slot < begin + in.slots; ++slot) {
    const int64_t kind = in.kind[slot];
    if (uint64_t(kind) >= uint64_t(in.kinds)) {
      if (kind != -1 && wrong == kNone) wrong = slot;
      continue;
    }
    Pair<Real>& pair = pairs[count++];
    double w[kPowers], next[kPowers];
    const int64_t cell = weights(in.grid + 5 * kind, in.cells, double(in.x[slot]), in.order, w,
                                 gradient ? next : nullptr);
    for (int k = 0; k < kPowers; ++k) {
      pair.w[k] = Real(w[k]);
      if (gradient) pair.next[k] = Real(next[k]);
    }
    for (int a = 0; a < 4; ++a) pair.R[a] = in.R[4 * slot + a];
    pair.coefficients = in.table + (kind * in.cells + cell) * kPowers * in.functions;
    pair.slot = slot;
  }
  return count;
}

// Write T [4, M] for the functions m, m + 1, ... of a block.
template <bool kIsWhole, class Real>
void sum_block(const Pair<Real>* pairs, int64_t count, int64_t M, int64_t m, Real* T) {
  constexpr int kSize = Block<Real>::kSize;
  const int64_t size = kIsWhole ? kSize : M;
  double total[4][kSize] = {};
  for (int64_t first = 0; first < count; first += kPart) {
    Vector<Real> sum[4] = {};
    for (int64_t j = first; j < std::min(first + kPart, count); ++j) {
      const Pair<Real>& pair = pairs[j];
      const Real* c = pair.coefficients + m;
      Vector<Real> g = pair.w[0] * load<kIsWhole>(c, size);
#pragma GCC unroll 5
      for (int k = 1; k < kPowers; ++k) g += pair.w[k] * load<kIsWhole>(c + k * M, size);
#pragma GCC unroll 4
      for (int a = 0; a < 4; ++a) sum[a] += pair.R[a] * g;
    }
    for (int a = 0; a < 4; ++a)
      for (int l = 0; l < kSize; ++l) total[a][l] += sum[a][l];
  }
  for (int a = 0; a < 4; ++a)
    for (int l = 0; l < size; ++l) T[a * M + m + l] = Real(total[a][l]);
}

// Return the first function of the block from m on. The last block ends with the last function, so
// it repeats some functions of the block before.
template <class Real>
int64_t begin_of(int64_t m, int64_t M) {
  return std::max<int64_t>(std::min<int64_t>(m, M - Block<Real>::kSize), 0);
}

template <class Real>
double sum_of(const Vector<Real>& block) {
  double sum = 0;
  for (int l = 0; l < Block<Real>::kSize; ++l) sum += block[l];
  return sum;
}

// The upstream gradient of a block of functions.
template <class Real>
struct Upstream {
  Vector<Real> row[4];
};

// Copy an atom's upstream gradient [4, M] block by block. Functions that a block repeats get 0, so
// that they count once.
template <class Real>
void copy_by_blocks(const Real* grad, int64_t M, Upstream<Real>* blocks) {
  constexpr int kSize = Block<Real>::kSize;
  for (int64_t m = 0; m < M; m += kSize, ++blocks) {
    const int64_t begin = begin_of<Real>(m, M);
    for (int a = 0; a < 4; ++a)
      for (int l = 0; l < kSize; ++l) {
        const bool is_repeated = begin + l < m;
        blocks->row[a][l] = is_repeated || begin + l >= M ? Real(0) : grad[a * M + begin + l];
      }
  }
}

// Write the gradients of one pair. The table is larger than the cache, so the next pair's
// coefficients are prefetched.
template <bool kIsWhole, class Real>
void differentiate(const Pair<Real>& pair, const Pair<Real>& next_pair, int64_t M,
                   const Upstream<Real>* upstream, const SumGradients<Real>& out) {
  constexpr int kSize = Block<Real>::kSize;
  Vector<Real> of_x{}, of_R[4] = {};
  for (int64_t m = 0; m < M; m += kSize, ++upstream) {
    const int64_t begin = begin_of<Real>(m, M), size = kIsWhole ? kSize : M;
    Vector<Real> g{}, slope{};
#pragma GCC unroll 6
    for (int k = 0; k < kPowers; ++k) {
      const Vector<Real> c = load<kIsWhole>(pair.coefficients + k * M + begin, size);
      __builtin_prefetch(next_pair.coefficients + k * M + begin);
      g += pair.w[k] * c;
      slope += pair.next[k] * c;
    }
    Vector<Real> along{};
#pragma GCC unroll 4
    for (int a = 0; a < 4; ++a) {
      of_R[a] += upstream->row[a] * g;
      along += pair.R[a] * upstream->row[a];
    }
    of_x += along * slope;
  }
  if (out.x) out.x[pair.slot] = Real(sum_of<Real>(of_x));
  for (int a = 0; a < 4 && out.R; ++a) out.R[4 * pair.slot + a] = Real(sum_of<Real>(of_R[a]));
}

}  // namespace

template <class Real, class Index>
int64_t tabulated_sum_cpu(const SumInputs<Real, Index>& in, Real* T) {
  const int64_t M = in.functions;
  const auto sum = M < Block<Real>::kSize ? sum_block<false, Real> : sum_block<true, Real>;
  return parallel_first(in.atoms, kAtomsPerThread, [&](int64_t begin, int64_t end) {
    const Scratch<Pair<Real>> pairs(in.slots);
    int64_t wrong = kNone;
    for (int64_t atom = begin; atom < end; ++atom) {
      const int64_t count = find_pairs(in, atom, /*gradient=*/false, pairs.get(), wrong);
      for (int64_t m = 0; m < M; m += Block<Real>::kSize)
        sum(pairs.get(), count, M, begin_of<Real>(m, M), T + 4 * atom * M);
    }
    return wrong;
  });
}

template <class Real, class Index>
int64_t tabulated_sum_backward_cpu(const SumInputs<Real, Index>& in, const Real* grad,
                                   const SumGradients<Real>& out) {
  const int64_t M = in.functions, size = Block<Real>::kSize;
  const auto pass_back = M < size ? differentiate<false, Real> : differentiate<true, Real>;
  return parallel_first(in.atoms, kAtomsPerThread, [&](int64_t begin, int64_t end) {
    const Scratch<Pair<Real>> pairs(in.slots);
    const Scratch<Upstream<Real>> blocks((M + size - 1) / size);
    int64_t wrong = kNone;
    for (int64_t atom = begin; atom < end; ++atom) {
      const int64_t first = atom * in.slots;
      if (out.x) std::fill_n(out.x + first, in.slots, Real(0));
      if (out.R) std::fill_n(out.R + 4 * first, 4 * in.slots, Real(0));
      const int64_t count = find_pairs(in, atom, /*gradient=*/true, pairs.get(), wrong);
      copy_by_blocks(grad + 4 * atom * M, M, blocks.get());
      for (int64_t j = 0; j < count; ++j)
        pass_back(pairs.get()[j], pairs.get()[std::min(j + 1, count - 1)], M, blocks.get(), out);
    }
    return wrong;
  });
}

#define INSTANTIATE(Real, Index)                                                          \
  template int64_t tabulated_sum_cpu(const SumInputs<Real, Index>&, Real*);               \
  template int64_t tabulated_sum_backward_cpu(const SumInputs<Real, Index>&, const Real*, \
                                              const SumGradients<Real>&);
INSTANTIATE(float, int32_t)
INSTANTIATE(float, int64_t)
INSTANTIATE(double, int32_t)
INSTANTIATE(double, int64_t)
#undef INSTANTIATE

}  // namespace calcops::ops::tabulated_sum
