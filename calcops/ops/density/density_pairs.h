// The numbers of an atom's pairs, as the CPU kernels of density compute them: vectors of pairs,
// their B-splines and splines.
#pragma once

#include <calcops/either.h>
#include <calcops/memory.h>
#include <calcops/parallel.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "density/density.h"
#include "density/density_math.h"
#include "pairs.h"
#include "simd.h"

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
inline int64_t blocks_of(const Pairs& pairs) { return rounded(pairs.count) / kWidth; }

CALCOPS_HD_INLINED inline Vector& at(double* numbers) {
  return *reinterpret_cast<Vector*>(numbers);
}
CALCOPS_HD_INLINED inline const Vector& at(const double* numbers) {
  return *reinterpret_cast<const Vector*>(numbers);
}

// ---- a call -------------------------------------------------------------------------------------

// The inputs of a call, whose types are known at run time, and the constants that follow from them.
struct Call {
  int64_t atoms, slots, kinds, rows, functions, harmonics, directions;
  Reals table, along;
  bool is_float32;  // the type of both
  PairFinder finder;

  int64_t padded;  // functions, rounded up to whole vectors
  bool begin_at_zero = true;
  Scratch<double> begin, cells_per_unit;  // of each kind
  // A pair reads six rows of the table in whole vectors, beyond the last function. So that it does
  // not read beyond the end, a pair at place `tail_begin` or later reads a copy.
  int64_t tail_begin;
  Scratch<double> tail;  // its numbers have the table's type

  template <class Real, class Index>
  explicit Call(const DensityInputs<Real, Index>& in)
      : atoms(in.atoms()),
        slots(in.slots()),
        kinds(in.kinds()),
        rows(in.rows()),
        functions(in.functions()),
        harmonics(in.harmonics),
        directions(in.directions()),
        table(in.table.data),
        along(in.along.data),
        is_float32(sizeof(Real) == sizeof(float)),
        finder(in.d, in.kind, kinds),
        padded(rounded(functions)),
        begin(kinds),
        cells_per_unit(kinds),
        tail_begin(std::clamp<int64_t>(table_size() - 5 * functions - padded + 1, 0, table_size())),
        tail(table_size() - tail_begin + padded) {
    set_constants(in.grid.data);
  }

  int64_t table_size() const { return kinds * rows * functions; }

  template <class Real>
  CALCOPS_HD_INLINED inline const Real* coefficients(int64_t place) const {
    return place < tail_begin ? table.as(static_cast<const Real*>(nullptr)) + place
                              : reinterpret_cast<const Real*>(tail.get()) + (place - tail_begin);
  }

 private:
  void set_constants(const double* grid);
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

// Compute the blocks of an atom's pairs.
template <bool kWithSlopes, int D>
void fill(const Call& call, const Pairs& pairs, Block<D>* blocks);

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
                    int64_t size, int64_t begin, const RealResults& planes);

// The reverse: read rows, times N_q, from planes.
void planes_to_rows(const Reals& planes, int64_t row_size, int64_t count, int64_t harmonics,
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
