// The pairs of an atom, as the CPU kernels of density compute them: vectors of pairs, their
// B-splines and splines.
#pragma once

#include <calcops/memory.h>
#include <calcops/parallel.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "density/density.h"
#include "density/density_math.h"
#include "real_arrays.h"

namespace calcops::ops::density {

// ---- vectors ------------------------------------------------------------------------------------

// Numbers in a register, and sums and pairs of sums that fit into the registers together.
#if defined(__AVX512F__)
constexpr int kWidth = 8, kSumsAtOnce = 27, kPairsOfSumsAtOnce = 12;
#elif defined(__AVX__)
constexpr int kWidth = 4, kSumsAtOnce = 12, kPairsOfSumsAtOnce = 6;
#elif defined(__aarch64__)
constexpr int kWidth = 2, kSumsAtOnce = 24, kPairsOfSumsAtOnce = 12;
#else
constexpr int kWidth = 2, kSumsAtOnce = 12, kPairsOfSumsAtOnce = 6;
#endif
typedef double Vector __attribute__((vector_size(8 * kWidth)));
typedef int64_t Bits __attribute__((vector_size(8 * kWidth)));

constexpr int64_t rounded(int64_t count) { return (count + kWidth - 1) / kWidth * kWidth; }

CALCOPS_HD_INLINED inline Vector& at(double* numbers) {
  return *reinterpret_cast<Vector*>(numbers);
}
CALCOPS_HD_INLINED inline const Vector& at(const double* numbers) {
  return *reinterpret_cast<const Vector*>(numbers);
}

// Exchange the blocks of kSpan numbers above and below the diagonal in two rows of a matrix.
template <int kSpan, int... lane>
CALCOPS_HD_INLINED inline void exchange(Vector& a, Vector& b, std::integer_sequence<int, lane...>) {
  const Vector first = a, second = b;
#if __has_builtin(__builtin_shufflevector)  // GCC 12 and clang
  a = __builtin_shufflevector(first, second, (lane & kSpan ? lane - kSpan + kWidth : lane)...);
  b = __builtin_shufflevector(first, second, (lane & kSpan ? lane + kWidth : lane + kSpan)...);
#else
  a = __builtin_shuffle(first, second, Bits{(lane & kSpan ? lane - kSpan + kWidth : lane)...});
  b = __builtin_shuffle(first, second, Bits{(lane & kSpan ? lane + kWidth : lane + kSpan)...});
#endif
}

// Transpose a matrix of kWidth rows.
template <int kSpan = 1>
CALCOPS_HD_INLINED inline void transpose(Vector* rows) {
  if constexpr (kSpan < kWidth) {
#pragma GCC unroll 8
    for (int i = 0; i < kWidth; ++i)
      if (!(i & kSpan))
        exchange<kSpan>(rows[i], rows[i + kSpan], std::make_integer_sequence<int, kWidth>());
    transpose<2 * kSpan>(rows);
  }
}

// ---- a call -------------------------------------------------------------------------------------

class Neighbours;

// The inputs of a call, whose types are known at run time, and the constants that follow from them.
struct Call : DensityInputs<void, void> {
  // Set `neighbours` to the filled slots of an atom within their cutoffs. Set `wrong` to the first
  // slot whose kind does not exist, unless an earlier atom has set it.
  using Find = void (*)(const Call& call, int64_t atom, Neighbours& neighbours, int64_t& wrong);
  Find find;
  bool is_float32;  // Real is float, not double

  int64_t padded;  // functions, rounded up to whole vectors
  double cells;
  bool have_one_cutoff, begin_at_zero;
  Scratch<double> square_of_cutoff;  // [kinds + 1], from kind -1 on
  Scratch<double> begin, cells_per_unit;
  // A pair reads six rows of the table in whole vectors, beyond the last function. So that it does
  // not read beyond the end, a pair at place `tail_begin` or later reads a copy.
  int64_t tail_begin;
  Scratch<double> tail;  // its numbers have the table's type

  template <class Real, class Index>
  explicit Call(const DensityInputs<Real, Index>& in);
  Call(const DensityInputs<void, void>& in, Find find_, bool is_float32_);

  int64_t table_size() const { return kinds * rows * functions; }

  template <class Real>
  CALCOPS_HD_INLINED inline const Real* coefficients(int64_t place) const {
    return place < tail_begin ? static_cast<const Real*>(table) + place
                              : reinterpret_cast<const Real*>(tail.get()) + (place - tail_begin);
  }
};

// The pairs of an atom within the cutoff.
class Neighbours {
 public:
  int64_t count = 0;

  explicit Neighbours(int64_t slots)
      : size_(rounded(slots) + kWidth), numbers_(4 * size_), slot_(size_), kind_(size_) {}

  int64_t size() const { return size_; }
  int64_t blocks() const { return rounded(count) / kWidth; }
  double* x(int c) const { return numbers_.get() + c * size_; }
  double* square() const { return numbers_.get() + 3 * size_; }
  int64_t* slot() const { return slot_.get(); }
  int64_t* kind() const { return kind_.get(); }

 private:
  int64_t size_;
  Scratch<double> numbers_;
  Scratch<int64_t> slot_, kind_;
};

// ---- numbers of pairs ---------------------------------------------------------------------------

// The numbers of kWidth pairs, with their derivatives along D directions.
template <int D>
struct alignas(64) Block {
  using N = Mixed<Vector, D>;
  static constexpr int kParts = 1 << D;

  N unit[3], inverse;     // d/r and 1/r
  N weights[6];           // of the coefficients, for the value of a spline
  N slopes[6];            // the same for its derivative for r
  int64_t place[kWidth];  // of the first coefficient in the table
  int64_t slot[kWidth];

  // Return the weight k of pair l, part p.
  double weight(bool is_slope, int k, int p, int l) const {
    return reinterpret_cast<const double*>(is_slope ? slopes
                                                    : weights)[(k * kParts + p) * kWidth + l];
  }
};

// Compute the blocks of an atom's neighbours.
template <bool kWithSlopes, int D>
void fill(const Call& call, const Neighbours& neighbours, Block<D>* blocks);

// ---- splines ------------------------------------------------------------------------------------

typedef double Half __attribute__((vector_size(4 * kWidth < 16 ? 16 : 4 * kWidth)));

// Call f(v, V()) for each vector of functions, where v is its first function and V is Vector or, if
// that is enough for the last functions, Half.
template <class F>
CALCOPS_HD_INLINED inline void for_vectors(int64_t functions, const F& f) {
  constexpr int kHalf = sizeof(Half) / sizeof(double);
  int64_t v = 0;
  for (; functions - v > kHalf; v += kWidth) f(v, Vector());
  if (v < functions) f(v, Half());
}

// Return part p of the splines of a vector of functions of pair l, from their coefficients.
template <class V, int D>
CALCOPS_HD_INLINED inline V weighted(const Block<D>& block, bool is_slope, int p, int l,
                                     const V* rows) {
  V sum = block.weight(is_slope, 0, p, l) * rows[0];
#pragma GCC unroll 5
  for (int k = 1; k < 6; ++k) sum += block.weight(is_slope, k, p, l) * rows[k];
  return sum;
}

template <class V, class Real>
CALCOPS_HD_INLINED inline void load_rows(const Real* coefficients, int64_t functions, V* rows) {
#pragma GCC unroll 6
  for (int k = 0; k < 6; ++k) rows[k] = load<V>(coefficients + k * functions);
}

// ---- between planes and rows --------------------------------------------------------------------
//
// The results and their gradients have the harmonics first: planes [harmonics, n, F]. The kernels
// compute with rows of harmonics of an atom and function, from l = 1 on. A row has whole vectors.

template <int L>
struct RowOf {
  static constexpr int kCount = (L + 1) * (L + 1) - 1;
  static constexpr int kSize = int(rounded(kCount));
};

constexpr int64_t kAtomsAtOnce = 8;

// Write the rows [count][row_size] of `count` pairs of atom and function, times N_q, to the planes
// from the pair `begin` on. A plane has `size` of them.
void rows_to_planes(const double* rows, int64_t row_size, int64_t count, int64_t harmonics,
                    int64_t size, int64_t begin, const RealOutput& planes);

// The reverse: read rows, times N_q, from planes.
void planes_to_rows(const RealInput& planes, int64_t row_size, int64_t count, int64_t harmonics,
                    int64_t size, int64_t begin, double* rows);

// ---- choosing a kernel --------------------------------------------------------------------------

template <int value>
using Constant = std::integral_constant<int, value>;

// Call f(L, D) for the l_max and the directions of a call. With directions, the kernels are
// compiled for a few L only, and the harmonics beyond those of the call are left out.
template <class F>
int64_t choose(const Call& call, const F& f) {
  if (call.directions == 0) {
    if (call.harmonics == 1) return f(Constant<0>(), Constant<0>());
    if (call.harmonics == 4) return f(Constant<1>(), Constant<0>());
    if (call.harmonics == 9) return f(Constant<2>(), Constant<0>());
    if (call.harmonics == 16) return f(Constant<3>(), Constant<0>());
    return f(Constant<4>(), Constant<0>());
  }
  if (call.directions == 1)
    return call.harmonics == 1 ? f(Constant<0>(), Constant<1>()) : f(Constant<4>(), Constant<1>());
  if (call.directions == 2) return f(Constant<4>(), Constant<2>());
  return f(Constant<4>(), Constant<3>());
}

}  // namespace calcops::ops::density
