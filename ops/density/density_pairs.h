// The pairs of an atom, as the CPU kernels of density compute them: vectors of pairs, their
// B-splines, harmonics and splines.
#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "density/density.h"
#include "density/density_math.h"
#include "memory.h"
#include "parallel.h"

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

template <class V, class Real>
struct LooseOf {
  static constexpr int kCount = sizeof(V) / sizeof(double);
  typedef Real type __attribute__((vector_size(kCount * sizeof(Real)), aligned(sizeof(Real))));
};

// Load a vector of numbers from any address.
template <class V, class Real>
CALCOPS_HD_INLINED inline V load(const Real* from) {
  using Loose = typename LooseOf<V, Real>::type;
  return __builtin_convertvector(*reinterpret_cast<const Loose*>(from), V);
}

// Store the first `count` numbers of a vector.
template <class V, class Real>
CALCOPS_HD_INLINED inline void store(const V& v, Real* to, int64_t count) {
  using Loose = typename LooseOf<V, Real>::type;
  if (count >= kWidth)
    *reinterpret_cast<Loose*>(to) = __builtin_convertvector(v, Loose);
  else
    for (int64_t l = 0; l < count; ++l) to[l] = Real(v[l]);
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

// Return x^(-1/2) with a relative error of 1e-15, by Newton's method. Without an instruction for an
// estimate, it begins with one that is computed from the bits of x as an integer. GCC does not
// vectorise std::sqrt, which sets errno.
CALCOPS_HD_INLINED inline Vector inverse_root(const Vector& x) {
#ifdef __AVX512F__
  Vector y = _mm512_maskz_rsqrt14_pd(255, x);
  constexpr int kSteps = 2;
#else
  const Bits estimate = 0x5FE6EB50C7B537A9 - (reinterpret_cast<Bits>(x) >> 1);
  Vector y = reinterpret_cast<Vector>(estimate);
  constexpr int kSteps = 4;
#endif
  const Vector half = 0.5 * x;
  for (int step = 0; step < kSteps; ++step) y *= 1.5 - half * y * y;
  constexpr double kLeast = 1e-280;  // below it two atoms count as in one place
  return x < Vector{} + kLeast ? Vector{} + INFINITY : y;
}

// ---- a call -------------------------------------------------------------------------------------

class Neighbours;

// The inputs of a call without the type of `kind`, and the constants that follow from them.
template <class Real>
struct Call {
  int64_t atoms, slots, kinds, rows, functions, harmonics, directions;
  const Real *d, *along, *table;
  const void* kind;
  void (*find)(const Call& call, int64_t atom, Neighbours& neighbours, int64_t& wrong);

  int64_t padded;  // functions, rounded up to whole vectors
  double cells;
  bool have_one_cutoff, begin_at_zero;
  Scratch<double> square_of_cutoff;  // [kinds + 1], from kind -1 on
  Scratch<double> begin, cells_per_unit;
  // A pair reads six rows of the table in whole vectors, beyond the last function. So that it does
  // not read beyond the end, a pair at place `tail_begin` or later reads a copy.
  int64_t tail_begin;
  Scratch<Real> tail;

  template <class Index>
  explicit Call(const DensityInputs<Real, Index>& in);

  CALCOPS_HD_INLINED inline const Real* coefficients(int64_t place) const {
    return place < tail_begin ? table + place : tail.get() + (place - tail_begin);
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

#ifdef __AVX512F__
// Load kWidth triples (x, y, z) as vectors of x, of y and of z.
template <class Real>
CALCOPS_HD_INLINED inline void load_triples(const Real* from, Vector* v) {
  const Vector a = load<Vector>(from), b = load<Vector>(from + 8), c = load<Vector>(from + 16);
  const Bits of_ab[3] = {
      {0, 3, 6, 9, 12, 15, 0, 0}, {1, 4, 7, 10, 13, 0, 0, 0}, {2, 5, 8, 11, 14, 0, 0, 0}};
  const Bits with_c[3] = {
      {0, 1, 2, 3, 4, 5, 10, 13}, {0, 1, 2, 3, 4, 8, 11, 14}, {0, 1, 2, 3, 4, 9, 12, 15}};
  for (int k = 0; k < 3; ++k) {
    v[k] = _mm512_permutex2var_pd(a, (__m512i)of_ab[k], b);
    v[k] = _mm512_permutex2var_pd(v[k], (__m512i)with_c[k], c);
  }
}
#endif

// Set `neighbours` to the filled slots of an atom within their cutoffs. Set `wrong` to the first
// slot whose kind does not exist, unless an earlier atom has set it.
template <class Real, class Index>
void find(const Call<Real>& call, int64_t atom, Neighbours& neighbours, int64_t& wrong) {
  const int64_t begin = atom * call.slots, slots = call.slots;
  const Index* kind = static_cast<const Index*>(call.kind) + begin;
  const Index kinds = Index(std::min<int64_t>(call.kinds, std::numeric_limits<Index>::max()));
  int any_wrong = 0;
  for (int64_t s = 0; s < slots; ++s) any_wrong |= (kind[s] < -1) | (kind[s] >= kinds);
  neighbours.count = 0;
  if (any_wrong) {
    for (int64_t s = 0; wrong == kNone; ++s)
      if (kind[s] < -1 || kind[s] >= kinds) wrong = begin + s;
    return;
  }
  double *x = neighbours.x(0), *y = neighbours.x(1), *z = neighbours.x(2);
  double* square = neighbours.square();
  int64_t *slot = neighbours.slot(), *kind_of = neighbours.kind();
  const double* limits = call.square_of_cutoff.get() + 1;
  const Real* d = call.d + 3 * begin;
  // Without branches, which the processor could not predict. Every slot is written to the next
  // pair, but only a filled one within the cutoff advances `count`. NaN is within.
  int64_t count = 0, s = 0;
#ifdef __AVX512F__
  for (; s + kWidth <= slots; s += kWidth, d += 3 * kWidth) {
    Vector v[3];
    load_triples(d, v);
    const Vector r2 = v[0] * v[0] + v[1] * v[1] + v[2] * v[2];
    const Bits kinds_of = load<Bits>(kind + s);
    Vector limit = Vector{} + limits[0];
    if (!call.have_one_cutoff)
      limit = _mm512_mask_i64gather_pd(limit, 255, (__m512i)kinds_of, limits, 8);
    const __mmask8 is_near =
        _mm512_cmp_pd_mask(r2, limit, _CMP_NGE_UQ) & ~_mm512_movepi64_mask((__m512i)kinds_of);
    for (int c = 0; c < 3; ++c)
      store<Vector>(_mm512_maskz_compress_pd(is_near, v[c]), neighbours.x(c) + count, kWidth);
    store<Vector>(_mm512_maskz_compress_pd(is_near, r2), square + count, kWidth);
    const Bits slots_of = Bits{0, 1, 2, 3, 4, 5, 6, 7} + (begin + s);
    store((Bits)_mm512_maskz_compress_epi64(is_near, (__m512i)slots_of), slot + count, kWidth);
    store((Bits)_mm512_maskz_compress_epi64(is_near, (__m512i)kinds_of), kind_of + count, kWidth);
    count += __builtin_popcount(is_near);
  }
#endif
  for (; s < slots; ++s, d += 3) {
    const double r2 = double(d[0]) * d[0] + double(d[1]) * d[1] + double(d[2]) * d[2];
    x[count] = d[0], y[count] = d[1], z[count] = d[2];
    square[count] = r2;
    slot[count] = begin + s;
    kind_of[count] = kind[s];
    count += (kind[s] >= 0) & !(r2 >= limits[kind[s]]);
  }
  neighbours.count = count;
  // Lanes of the last vector without a pair get the numbers of the first pair.
  for (int64_t j = count; count > 0 && j < rounded(count); ++j) {
    x[j] = x[0], y[j] = y[0], z[j] = z[0];
    square[j] = square[0];
    slot[j] = slot[0];
    kind_of[j] = kind_of[0];
  }
}

template <class Real>
template <class Index>
Call<Real>::Call(const DensityInputs<Real, Index>& in)
    : atoms(in.atoms),
      slots(in.slots),
      kinds(in.kinds),
      rows(in.rows),
      functions(in.functions),
      harmonics(in.harmonics),
      directions(in.directions),
      d(in.d),
      along(in.along),
      table(in.table),
      kind(in.kind),
      find(density::find<Real, Index>),
      padded(rounded(in.functions)),
      cells(double(in.rows - 5)),
      have_one_cutoff(true),
      begin_at_zero(true),
      square_of_cutoff(kinds + 1),
      begin(kinds),
      cells_per_unit(kinds),
      tail_begin(std::max<int64_t>(kinds * rows * functions - 5 * functions - padded + 1, 0)),
      tail(kinds * rows * functions - tail_begin + padded) {
  square_of_cutoff.get()[0] = 0;
  for (int64_t k = 0; k < kinds; ++k) {
    const double first = in.grid[2 * k], last = in.grid[2 * k + 1];
    if (!(first >= 0 && last > first && last < INFINITY))
      throw std::runtime_error("calcops::density: expected `grid` 0 <= first < last, got " +
                               std::to_string(first) + " and " + std::to_string(last) +
                               " of kind " + std::to_string(k));
    square_of_cutoff.get()[k + 1] = last * last;
    begin.get()[k] = first;
    cells_per_unit.get()[k] = cells / (last - first);
    have_one_cutoff &= last == in.grid[1];
    begin_at_zero &= first == 0;
  }
  const int64_t size = kinds * rows * functions - tail_begin;
  if (table) std::copy_n(table + tail_begin, size, tail.get());
  std::fill_n(tail.get() + size, padded, Real(0));
}

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

template <bool kWithSlopes, int D, class Real>
void fill(const Call<Real>& call, const Neighbours& neighbours, Block<D>* blocks) {
  using N = typename Block<D>::N;
  for (int64_t j = 0; j < neighbours.count; j += kWidth, ++blocks) {
    Block<D>& block = *blocks;
    const int64_t* kind = neighbours.kind() + j;
    std::copy_n(neighbours.slot() + j, kWidth, block.slot);
    N d[3];
    for (int c = 0; c < 3; ++c) {
      d[c] = constant<N>(load<Vector>(neighbours.x(c) + j));
      for (int i = 0; i < D; ++i)
        for (int l = 0; l < kWidth; ++l)
          parts_of<Vector>(d + c)[1 << i][l] = call.along[3 * (D * block.slot[l] + i) + c];
    }
    N square;
    if constexpr (D == 0)
      square = load<Vector>(neighbours.square() + j);
    else
      square = d[0] * d[0] + d[1] * d[1] + d[2] * d[2];
    block.inverse = expand_inverse_root<D>(square, inverse_root(*parts_of<Vector>(&square)));
    for (int c = 0; c < 3; ++c) block.unit[c] = d[c] * block.inverse;

    Vector begin, cells_per_unit;
    if (call.kinds == 1) {
      begin = Vector{} + call.begin.get()[0];
      cells_per_unit = Vector{} + call.cells_per_unit.get()[0];
    } else {
      for (int l = 0; l < kWidth; ++l) {
        begin[l] = call.begin.get()[kind[l]];
        cells_per_unit[l] = call.cells_per_unit.get()[kind[l]];
      }
    }
    const N position = (square * block.inverse - begin) * cells_per_unit;
    const Vector place = *parts_of<const Vector>(&position);
    const Vector not_below = place > 0.0 ? place : Vector{};  // 0 also for NaN
    Bits cell = __builtin_convertvector(not_below, Bits);
    const Bits last = Bits{} + (call.rows - 6);
    cell = cell < last ? cell : last;
    store((load<Bits>(kind) * call.rows + cell) * call.functions, block.place, kWidth);

    find_weights<D>(position, __builtin_convertvector(cell, Vector), cells_per_unit,
                    call.begin_at_zero, block.weights, kWithSlopes ? block.slopes : nullptr);
  }
}

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

// The factors N_q of a row, from l = 1 on.
struct Norms {
  alignas(64) double of_row[rounded(24)];
  double of_zero = norm(0);
  Norms() {
    for (int q = 1; q < 25; ++q) of_row[q - 1] = norm(q);
  }
};

// Write the rows [count][kSize] of `count` pairs of atom and function, times N_q, to the planes
// from the pair `begin` on. A plane has `size` of them.
template <int L, class Real>
void rows_to_planes(const double* rows, int64_t count, int64_t harmonics, int64_t size,
                    int64_t begin, Real* planes) {
  const Norms norms;
  constexpr int kSize = RowOf<L>::kSize;
  for (int64_t i = 0; i < count; i += kWidth)
    for (int v = 0; v < kSize; v += kWidth) {
      Vector some[kWidth];
#pragma GCC unroll 8
      for (int l = 0; l < kWidth; ++l) some[l] = at(rows + (i + l) * kSize + v);
      transpose(some);
#pragma GCC unroll 8
      for (int l = 0; l < kWidth; ++l)
        if (v + l + 1 < harmonics)
          store(some[l] * norms.of_row[v + l], planes + (v + l + 1) * size + begin + i, count - i);
    }
}

// The reverse: read rows, times N_q, from planes.
template <int L, class Real>
void planes_to_rows(const Real* planes, int64_t count, int64_t harmonics, int64_t size,
                    int64_t begin, double* rows) {
  const Norms norms;
  constexpr int kSize = RowOf<L>::kSize;
  for (int64_t i = 0; i < count; i += kWidth)
    for (int v = 0; v < kSize; v += kWidth) {
      Vector some[kWidth];
#pragma GCC unroll 8
      for (int l = 0; l < kWidth; ++l) {
        some[l] = Vector{};
        if (v + l + 1 >= harmonics) continue;
        const Real* from = planes + (v + l + 1) * size + begin + i;
        if (count - i >= kWidth)
          some[l] = load<Vector>(from);
        else
          for (int64_t k = 0; k < count - i; ++k) some[l][k] = from[k];
        some[l] *= norms.of_row[v + l];
      }
      transpose(some);
#pragma GCC unroll 8
      for (int l = 0; l < kWidth; ++l) at(rows + (i + l) * kSize + v) = some[l];
    }
}

// ---- choosing a kernel --------------------------------------------------------------------------

template <int value>
using Constant = std::integral_constant<int, value>;

// Call f(L, D) for the l_max and the directions of a call. With directions, the kernels are
// compiled for a few L only, and the harmonics beyond those of the call are left out.
template <class Real, class F>
int64_t choose(const Call<Real>& call, const F& f) {
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
