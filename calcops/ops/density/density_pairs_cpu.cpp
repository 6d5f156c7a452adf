// What the CPU kernels of density have in common: they find the pairs of an atom, compute the
// numbers of these pairs, and convert rows and planes.
#include "density/density_pairs.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace calcops::ops::density {
namespace {

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

template <class Real, class Index>
void find(const Call& call, int64_t atom, Neighbours& neighbours, int64_t& wrong) {
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
  const Real* d = static_cast<const Real*>(call.d) + 3 * begin;
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

}  // namespace

template <class Real, class Index>
Call::Call(const DensityInputs<Real, Index>& in)
    : Call({in.atoms, in.slots, in.kinds, in.rows, in.functions, in.harmonics, in.directions, in.d,
            in.kind, in.along, in.table, in.grid},
           density::find<Real, Index>, sizeof(Real) == sizeof(float)) {}

template Call::Call(const DensityInputs<float, int32_t>&);
template Call::Call(const DensityInputs<float, int64_t>&);
template Call::Call(const DensityInputs<double, int32_t>&);
template Call::Call(const DensityInputs<double, int64_t>&);

[[noreturn]] void refuse_grid(const double* grid, int64_t kinds) {
  int64_t k = 0;
  while (k + 1 < kinds && grid[2 * k] >= 0 && grid[2 * k + 1] > grid[2 * k] &&
         grid[2 * k + 1] < INFINITY)
    ++k;
  throw std::runtime_error("calcops_models::density: expected `grid` 0 <= first < last, got " +
                           std::to_string(grid[2 * k]) + " and " + std::to_string(grid[2 * k + 1]) +
                           " of kind " + std::to_string(k));
}

Call::Call(const DensityInputs<void, void>& in, Find find_, bool is_float32_)
    : DensityInputs(in),
      find(find_),
      is_float32(is_float32_),
      padded(rounded(in.functions)),
      cells(double(in.rows - 5)),
      have_one_cutoff(true),
      begin_at_zero(true),
      square_of_cutoff(kinds + 1),
      begin(kinds),
      cells_per_unit(kinds),
      tail_begin(std::clamp<int64_t>(table_size() - 5 * functions - padded + 1, 0, table_size())),
      tail(table_size() - tail_begin + padded) {
  square_of_cutoff.get()[0] = 0;
  // Without branches, so that GCC vectorizes the loop: 89 elements have 7,921 kinds.
  int wrong = 0, other_cutoffs = 0, other_begins = 0;
  for (int64_t k = 0; k < kinds; ++k) {
    const double first = in.grid[2 * k], last = in.grid[2 * k + 1];
    wrong |= !(first >= 0) | !(last > first) | !(last < INFINITY);
    square_of_cutoff.get()[k + 1] = last * last;
    begin.get()[k] = first;
    cells_per_unit.get()[k] = cells / (last - first);
    other_cutoffs |= last != in.grid[1];
    other_begins |= first != 0;
  }
  if (wrong) refuse_grid(in.grid, kinds);
  have_one_cutoff = !other_cutoffs;
  begin_at_zero = !other_begins;
  const int64_t size = table_size() - tail_begin;
  RealInput(table, is_float32).visit(tail_begin, [&](const auto* from) {
    std::memset(tail.get(), 0, (size + padded) * sizeof *from);
    if (table) std::memcpy(tail.get(), from, size * sizeof *from);
  });
}

template <bool kWithSlopes, int D>
void fill(const Call& call, const Neighbours& neighbours, Block<D>* blocks) {
  using N = typename Block<D>::N;
  for (int64_t j = 0; j < neighbours.count; j += kWidth, ++blocks) {
    Block<D>& block = *blocks;
    const int64_t* kind = neighbours.kind() + j;
    std::copy_n(neighbours.slot() + j, kWidth, block.slot);
    N d[3];
    for (int c = 0; c < 3; ++c) d[c] = constant<N>(load<Vector>(neighbours.x(c) + j));
    RealInput(call.along, call.is_float32).visit(0, [&](const auto* along) {
      for (int c = 0; c < 3; ++c)
        for (int i = 0; i < D; ++i)
          for (int l = 0; l < kWidth; ++l)
            parts_of<Vector>(d + c)[1 << i][l] = along[3 * (D * block.slot[l] + i) + c];
    });
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

template void fill<false>(const Call&, const Neighbours&, Block<0>*);
template void fill<false>(const Call&, const Neighbours&, Block<1>*);
template void fill<false>(const Call&, const Neighbours&, Block<2>*);
template void fill<false>(const Call&, const Neighbours&, Block<3>*);
template void fill<true>(const Call&, const Neighbours&, Block<0>*);
template void fill<true>(const Call&, const Neighbours&, Block<1>*);
template void fill<true>(const Call&, const Neighbours&, Block<2>*);

// ---- between planes and rows --------------------------------------------------------------------

namespace {

// The factors N_q of a row, from l = 1 on.
struct Norms {
  alignas(64) double of_row[rounded(24)];
  double of_zero = norm(0);
  Norms() {
    for (int q = 1; q < 25; ++q) of_row[q - 1] = norm(q);
  }
};

}  // namespace

void rows_to_planes(const double* rows, int64_t row_size, int64_t count, int64_t harmonics,
                    int64_t size, int64_t begin, const RealOutput& planes) {
  static const Norms norms;
  for (int64_t i = 0; i < count; i += kWidth)
    for (int64_t v = 0; v < row_size; v += kWidth) {
      Vector some[kWidth];
#pragma GCC unroll 8
      for (int l = 0; l < kWidth; ++l) some[l] = at(rows + (i + l) * row_size + v);
      transpose(some);
#pragma GCC unroll 8
      for (int l = 0; l < kWidth; ++l)
        if (v + l + 1 < harmonics)
          planes.visit((v + l + 1) * size + begin + i,
                       [&](auto* to) { store(some[l] * norms.of_row[v + l], to, count - i); });
    }
}

void planes_to_rows(const RealInput& planes, int64_t row_size, int64_t count, int64_t harmonics,
                    int64_t size, int64_t begin, double* rows) {
  static const Norms norms;
  for (int64_t i = 0; i < count; i += kWidth)
    for (int64_t v = 0; v < row_size; v += kWidth) {
      Vector some[kWidth];
#pragma GCC unroll 8
      for (int l = 0; l < kWidth; ++l) {
        some[l] = Vector{};
        if (v + l + 1 >= harmonics) continue;
        planes.visit((v + l + 1) * size + begin + i, [&](const auto* from) {
          if (count - i >= kWidth)
            some[l] = load<Vector>(from);
          else
            for (int64_t k = 0; k < count - i; ++k) some[l][k] = from[k];
        });
        some[l] *= norms.of_row[v + l];
      }
      transpose(some);
#pragma GCC unroll 8
      for (int l = 0; l < kWidth; ++l) at(rows + (i + l) * row_size + v) = some[l];
    }
}

}  // namespace calcops::ops::density
