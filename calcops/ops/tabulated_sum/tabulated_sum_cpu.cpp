// CPU kernels of tabulated_sum. They collect the pairs of an atom, then go through the functions in
// blocks of one vector. The coefficients of a pair are read once, in the order of the memory.
#include <calcops/memory.h>
#include <calcops/parallel.h>

#include <algorithm>
#include <cstring>

#include "simd.h"
#include "tabulated_sum/tabulated_sum.h"
#include "tabulated_sum/tabulated_sum_math.h"

namespace calcops::ops::tabulated_sum {
namespace {

constexpr int64_t kAtomsPerThread = 8;

// A block of functions.
template <class Real>
struct Block {
  static constexpr int kSize = 64 / sizeof(Real);
};
template <class Real>
using Vector = typename LooseVector<Real, 64>::type;

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

// Broadcast a number to a block.
template <class Real>
inline __attribute__((always_inline)) Vector<Real> all(Real number) {
  return number - Vector<Real>{};
}

// Four rows of a block of functions: of T, or of its upstream gradient.
template <class Real>
struct Rows {
  Vector<Real> row[4];
};

// Return the first function of the block from m on. The last block ends with the last function, so
// it repeats some functions of the block before.
template <class Real>
int64_t begin_of(int64_t m, int64_t M) {
  return std::max<int64_t>(std::min<int64_t>(m, M - Block<Real>::kSize), 0);
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
  const int64_t begin = atom * in.slots();
  for (int64_t slot = begin; slot < begin + in.slots(); ++slot) {
    const int64_t kind = in.kind.data[slot];
    if (uint64_t(kind) >= uint64_t(in.kinds())) {
      if (kind != -1 && wrong == kNone) wrong = slot;
      continue;
    }
    Pair<Real>& pair = pairs[count++];
    double w[kPowers], next[kPowers];
    const int64_t cell = weights(in.grid.data + 5 * kind, in.cells(), double(in.x.data[slot]),
                                 in.order, w, gradient ? next : nullptr);
    for (int k = 0; k < kPowers; ++k) {
      pair.w[k] = Real(w[k]);
      if (gradient) pair.next[k] = Real(next[k]);
    }
    for (int a = 0; a < 4; ++a) pair.R[a] = in.R.data[4 * slot + a];
    pair.coefficients = in.table.data + (kind * in.cells() + cell) * kPowers * in.functions();
    pair.slot = slot;
  }
  return count;
}

// Return sum_k w[k] c[k] for the coefficients c of a block. If kIsValue, w[0] is 1.
template <bool kIsValue, class Real>
inline __attribute__((always_inline)) Vector<Real> weighted(const Vector<Real>* c,
                                                            const Vector<Real>* w) {
  Vector<Real> sum = kIsValue ? c[0] : w[0] * c[0];
#pragma GCC unroll 5
  for (int k = 1; k < kPowers; ++k) sum += w[k] * c[k];
  return sum;
}

// ---- T -----------------------------------------------------------------------------------------

// Add kCount pairs to the sums of all blocks. Pairs that are added together share the loads and
// stores of the sums.
template <int kCount, bool kIsValue, bool kIsWhole, class Real>
void add_pairs(const Pair<Real>* pairs, int64_t M, Rows<Real>* sums) {
  constexpr int kSize = Block<Real>::kSize;
  const int64_t size = kIsWhole ? kSize : M;
  Vector<Real> w[kCount][kPowers], R[kCount][4];
#pragma GCC unroll 2
  for (int j = 0; j < kCount; ++j) {
#pragma GCC unroll 6
    for (int k = 0; k < kPowers; ++k) w[j][k] = all(pairs[j].w[k]);
#pragma GCC unroll 4
    for (int a = 0; a < 4; ++a) R[j][a] = all(pairs[j].R[a]);
  }
  for (int64_t m = 0; m < M; m += kSize, ++sums) {
    Rows<Real> sum = *sums;
#pragma GCC unroll 2
    for (int j = 0; j < kCount; ++j) {
      const Real* coefficients = pairs[j].coefficients + begin_of<Real>(m, M);
      Vector<Real> c[kPowers];
#pragma GCC unroll 6
      for (int k = 0; k < kPowers; ++k) c[k] = load<kIsWhole>(coefficients + k * M, size);
      const Vector<Real> g = weighted<kIsValue, Real>(c, w[j]);
#pragma GCC unroll 4
      for (int a = 0; a < 4; ++a) sum.row[a] += R[j][a] * g;
    }
    *sums = sum;
  }
}

// Write T [4, M] of one atom.
template <bool kIsValue, bool kIsWhole, class Real>
void sum_pairs(const Pair<Real>* pairs, int64_t count, int64_t M, Rows<Real>* sums, double* totals,
               Real* T) {
  constexpr int kSize = Block<Real>::kSize;
  const int64_t blocks = (M + kSize - 1) / kSize;
  std::fill_n(totals, 4 * blocks * kSize, 0.0);
  for (int64_t first = 0; first < count; first += kPart) {
    std::fill_n(sums, blocks, Rows<Real>{});
    const int64_t end = std::min(first + kPart, count);
    int64_t j = first;
    for (; j + 2 <= end; j += 2) add_pairs<2, kIsValue, kIsWhole>(pairs + j, M, sums);
    if (j < end) add_pairs<1, kIsValue, kIsWhole>(pairs + j, M, sums);
    const Real* numbers = reinterpret_cast<const Real*>(sums);
    for (int64_t i = 0; i < 4 * blocks * kSize; ++i) totals[i] += numbers[i];
  }
  for (int64_t m = 0; m < M; m += kSize) {
    const int64_t begin = begin_of<Real>(m, M), size = kIsWhole ? kSize : M;
    for (int a = 0; a < 4; ++a, totals += kSize)
      for (int l = 0; l < size; ++l) T[a * M + begin + l] = Real(totals[l]);
  }
}

// ---- gradients ---------------------------------------------------------------------------------

// Return the sum of a block's numbers, in float64.
template <class Real>
inline __attribute__((always_inline)) double sum_of(const Vector<Real>& block) {
  constexpr int kSize = Block<Real>::kSize;
  typedef double Lanes __attribute__((vector_size(kSize * sizeof(double))));
  const Lanes lanes = __builtin_convertvector(block, Lanes);
  Row rows[kSize / 4];
  std::memcpy(rows, &lanes, sizeof rows);
  Row sum = rows[0];
#pragma GCC unroll 4
  for (int l = 1; l < kSize / 4; ++l) sum += rows[l];
  return calcops::sum_of(sum);
}

// Copy an atom's upstream gradient [4, M] block by block. Functions that a block repeats get 0, so
// that they count once.
template <bool kIsWhole, class Real>
void copy_by_blocks(const Real* grad, int64_t M, Rows<Real>* blocks) {
  constexpr int kSize = Block<Real>::kSize;
  for (int64_t m = 0; m < M; m += kSize, ++blocks) {
    const int64_t begin = begin_of<Real>(m, M), size = kIsWhole ? kSize : M;
    for (int a = 0; a < 4; ++a) {
      blocks->row[a] = load<kIsWhole>(grad + a * M + begin, size);
      for (int64_t l = 0; l < m - begin; ++l) blocks->row[a][l] = 0;
    }
  }
}

// Write the gradients of one pair. The table is larger than the cache, so the next pair's
// coefficients are prefetched.
template <bool kIsValue, bool kIsWhole, class Real>
void differentiate(const Pair<Real>& pair, const Pair<Real>& next_pair, int64_t M,
                   const Rows<Real>* upstream, const SumGradients<Real>& out) {
  constexpr int kSize = Block<Real>::kSize;
  const int64_t size = kIsWhole ? kSize : M;
  Vector<Real> w[kPowers], next[kPowers], R[4], of_x{}, of_R[4] = {};
#pragma GCC unroll 6
  for (int k = 0; k < kPowers; ++k) {
    w[k] = all(pair.w[k]);
    next[k] = all(pair.next[k]);
  }
#pragma GCC unroll 4
  for (int a = 0; a < 4; ++a) R[a] = all(pair.R[a]);
  for (int64_t m = 0; m < M; m += kSize, ++upstream) {
    const int64_t begin = begin_of<Real>(m, M);
    Vector<Real> c[kPowers];
#pragma GCC unroll 6
    for (int k = 0; k < kPowers; ++k) {
      c[k] = load<kIsWhole>(pair.coefficients + k * M + begin, size);
      __builtin_prefetch(next_pair.coefficients + k * M + begin);
    }
    const Vector<Real> g = weighted<kIsValue, Real>(c, w);
    // The derivative of a value has no weight for c[0], and 1 for c[1].
    Vector<Real> slope = kIsValue ? c[1] : next[0] * c[0] + next[1] * c[1];
#pragma GCC unroll 4
    for (int k = 2; k < kPowers; ++k) slope += next[k] * c[k];
    Vector<Real> along{};
#pragma GCC unroll 4
    for (int a = 0; a < 4; ++a) {
      of_R[a] += upstream->row[a] * g;
      along += R[a] * upstream->row[a];
    }
    of_x += along * slope;
  }
  if (out.x) out.x.data[pair.slot] = Real(sum_of<Real>(of_x));
  for (int a = 0; a < 4 && out.R; ++a) out.R.data[4 * pair.slot + a] = Real(sum_of<Real>(of_R[a]));
}

template <class Real, class Index>
int64_t sum(SumInputs<Real, Index> in, View<Real, 3> T) {
  const int64_t M = in.functions();
  const bool is_whole = M >= Block<Real>::kSize;
  const auto write = !is_whole       ? sum_pairs<false, false, Real>
                     : in.order == 0 ? sum_pairs<true, true, Real>
                                     : sum_pairs<false, true, Real>;
  return parallel_first(in.atoms(), kAtomsPerThread, [&](int64_t begin, int64_t end) {
    const Scratch<Pair<Real>> pairs(in.slots());
    const Scratch<Rows<Real>> sums(M / Block<Real>::kSize + 1);
    const Scratch<double> totals(4 * (M + Block<Real>::kSize));
    int64_t wrong = kNone;
    for (int64_t atom = begin; atom < end; ++atom) {
      const int64_t count = find_pairs(in, atom, /*gradient=*/false, pairs.get(), wrong);
      write(pairs.get(), count, M, sums.get(), totals.get(), T.data + 4 * atom * M);
    }
    return wrong;
  });
}

template <class Real, class Index>
int64_t backward(View<const Real, 3> grad, SumInputs<Real, Index> in, SumGradients<Real> out) {
  const int64_t M = in.functions();
  const bool is_whole = M >= Block<Real>::kSize;
  const auto copy = is_whole ? copy_by_blocks<true, Real> : copy_by_blocks<false, Real>;
  const auto pass_back = !is_whole       ? differentiate<false, false, Real>
                         : in.order == 0 ? differentiate<true, true, Real>
                                         : differentiate<false, true, Real>;
  return parallel_first(in.atoms(), kAtomsPerThread, [&](int64_t begin, int64_t end) {
    const Scratch<Pair<Real>> scratch(in.slots());
    const Scratch<Rows<Real>> upstream(M / Block<Real>::kSize + 1);
    Pair<Real>* pairs = scratch.get();
    int64_t wrong = kNone;
    for (int64_t atom = begin; atom < end; ++atom) {
      const int64_t first = atom * in.slots();
      if (out.x) std::fill_n(out.x.data + first, in.slots(), Real(0));
      if (out.R) std::fill_n(out.R.data + 4 * first, 4 * in.slots(), Real(0));
      const int64_t count = find_pairs(in, atom, /*gradient=*/true, pairs, wrong);
      copy(grad.data + 4 * atom * M, M, upstream.get());
      for (int64_t j = 0; j < count; ++j)
        pass_back(pairs[j], pairs[std::min(j + 1, count - 1)], M, upstream.get(), out);
    }
    return wrong;
  });
}

const Kernel kSumCpu("tabulated_sum", sum<float, int32_t>, sum<float, int64_t>,
                     sum<double, int32_t>, sum<double, int64_t>);
const Kernel kBackwardCpu("_tabulated_sum_backward", backward<float, int32_t>,
                          backward<float, int64_t>, backward<double, int32_t>,
                          backward<double, int64_t>);

}  // namespace
}  // namespace calcops::ops::tabulated_sum
