// What the CPU kernels of density have in common: they compute the numbers of an atom's pairs, and
// convert rows and planes.
#include <cstring>
#include <stdexcept>
#include <string>

#include "density/density_pairs.h"
#include "find_pairs.h"

namespace calcops::ops::density {

[[noreturn]] void refuse_grid(const double* grid, int64_t kinds) {
  int64_t k = 0;
  while (k + 1 < kinds && grid[2 * k] >= 0 && grid[2 * k + 1] > grid[2 * k] &&
         grid[2 * k + 1] < INFINITY)
    ++k;
  throw std::runtime_error("calcops_models::density: expected `grid` 0 <= first < last, got " +
                           std::to_string(grid[2 * k]) + " and " + std::to_string(grid[2 * k + 1]) +
                           " of kind " + std::to_string(k));
}

void Call::set_constants(const double* grid) {
  const double cells = double(rows - 5);
  // Without branches, so that GCC vectorizes the loop: 89 elements have 7,921 kinds.
  int wrong = 0, other_cutoffs = 0, other_begins = 0;
  for (int64_t k = 0; k < kinds; ++k) {
    const double first = grid[2 * k], last = grid[2 * k + 1];
    wrong |= !(first >= 0) | !(last > first) | !(last < INFINITY);
    finder.square_of_cutoff()[k] = last * last;
    begin.get()[k] = first;
    cells_per_unit.get()[k] = cells / (last - first);
    other_cutoffs |= last != grid[1];
    other_begins |= first != 0;
  }
  if (wrong) refuse_grid(grid, kinds);
  finder.have_one_cutoff = !other_cutoffs;
  begin_at_zero = !other_begins;
  const int64_t size = table_size() - tail_begin;
  table.visit(tail_begin, [&](const auto* from) {
    std::memset(tail.get(), 0, (size + padded) * sizeof *from);
    if (size > 0) std::memcpy(tail.get(), from, size * sizeof *from);
  });
}

template <bool kWithSlopes, int D>
void fill(const Call& call, const Pairs& pairs, Block<D>* blocks) {
  using N = typename Block<D>::N;
  for (int64_t j = 0; j < pairs.count; j += kWidth, ++blocks) {
    Block<D>& block = *blocks;
    const int64_t* kind = pairs.kind() + j;
    std::copy_n(pairs.slot() + j, kWidth, block.slot);
    N d[3];
    for (int c = 0; c < 3; ++c) d[c] = constant<N>(load<Vector>(pairs.x(c) + j));
    call.along.visit(0, [&](const auto* along) {
      for (int c = 0; c < 3; ++c)
        for (int i = 0; i < D; ++i)
          for (int l = 0; l < kWidth; ++l)
            parts_of<Vector>(d + c)[1 << i][l] = along[3 * (D * block.slot[l] + i) + c];
    });
    N square;
    if constexpr (D == 0)
      square = load<Vector>(pairs.square() + j);
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

template void fill<false>(const Call&, const Pairs&, Block<0>*);
template void fill<false>(const Call&, const Pairs&, Block<1>*);
template void fill<false>(const Call&, const Pairs&, Block<2>*);
template void fill<false>(const Call&, const Pairs&, Block<3>*);
template void fill<true>(const Call&, const Pairs&, Block<0>*);
template void fill<true>(const Call&, const Pairs&, Block<1>*);
template void fill<true>(const Call&, const Pairs&, Block<2>*);

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
                    int64_t size, int64_t begin, const RealResults& planes) {
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

void planes_to_rows(const Reals& planes, int64_t row_size, int64_t count, int64_t harmonics,
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

using calcops::PairFinder, calcops::Pairs;
template void PairFinder::find<float, int32_t>(const PairFinder&, int64_t, Pairs&, int64_t&);
template void PairFinder::find<float, int64_t>(const PairFinder&, int64_t, Pairs&, int64_t&);
template void PairFinder::find<double, int32_t>(const PairFinder&, int64_t, Pairs&, int64_t&);
template void PairFinder::find<double, int64_t>(const PairFinder&, int64_t, Pairs&, int64_t&);
