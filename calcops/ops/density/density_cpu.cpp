// CPU kernels of density: the sums. Vectors of pairs compute the harmonics, vectors of functions
// the splines. The products of both are summed in vectors of harmonics.
#include "density/density_pairs.h"

namespace calcops::ops::density {
namespace {

// Add to A [kFunctions][kSize] the products of the splines G [pairs][stride] and the harmonics Y
// [pairs][kSize] of `pairs` pairs.
template <int kSize, int kFunctions>
void add_products(const double* G, int64_t stride, const double* Y, int64_t pairs, double* A) {
  constexpr int kVectors = kSize / kWidth;
  Vector sums[kFunctions][kVectors];
#pragma GCC unroll 27
  for (int f = 0; f < kFunctions; ++f)
#pragma GCC unroll 12
    for (int v = 0; v < kVectors; ++v) sums[f][v] = at(A + f * kSize + v * kWidth);
  for (int64_t j = 0; j < pairs; ++j, G += stride, Y += kSize) {
    Vector y[kVectors];
#pragma GCC unroll 12
    for (int v = 0; v < kVectors; ++v) y[v] = at(Y + v * kWidth);
#pragma GCC unroll 27
    for (int f = 0; f < kFunctions; ++f)
#pragma GCC unroll 12
      for (int v = 0; v < kVectors; ++v) sums[f][v] += G[f] * y[v];
  }
#pragma GCC unroll 27
  for (int f = 0; f < kFunctions; ++f)
#pragma GCC unroll 12
    for (int v = 0; v < kVectors; ++v) at(A + f * kSize + v * kWidth) = sums[f][v];
}

// Return add_products for `functions` functions, at most kMost.
using Products = void (*)(const double*, int64_t, const double*, int64_t, double*);
template <int kSize, int kMost>
Products products_of(int64_t functions) {
  if constexpr (kMost > 1)
    if (functions < kMost) return products_of<kSize, kMost - 1>(functions);
  return add_products<kSize, kMost>;
}

// Compute the harmonics of pairs as rows Y [part][pair][kSize]. A part has `size` pairs.
template <int L, int D>
void find_harmonics(const Block<D>* blocks, int64_t count, int64_t size, double* Y) {
  using N = typename Block<D>::N;
  constexpr int kSize = RowOf<L>::kSize, kCount = RowOf<L>::kCount;
  for (int64_t b = 0; b < count; ++b) {
    N values[kSize];
    for (int q = kCount; q < kSize; ++q) values[q] = N{};
    const N* unit = blocks[b].unit;
    Harmonics<L, N>(unit[0], unit[1], unit[2]).values(values);
#pragma GCC unroll 1
    for (int p = 0; p < Block<D>::kParts; ++p)
#pragma GCC unroll 12
      for (int v = 0; v < kSize; v += kWidth) {
        Vector some[kWidth];
#pragma GCC unroll 8
        for (int l = 0; l < kWidth; ++l) some[l] = parts_of<Vector>(values + v + l)[p];
        transpose(some);
#pragma GCC unroll 8
        for (int l = 0; l < kWidth; ++l) at(Y + (p * size + b * kWidth + l) * kSize + v) = some[l];
      }
  }
}

// Compute the splines of pairs as rows G [part][pair][padded], if G is not nullptr, and the sums
// `totals` [padded] of their last parts.
template <class Real, int D>
void find_splines(const Call& call, const Block<D>* blocks, int64_t count, int64_t size, double* G,
                  double* totals) {
  constexpr int kParts = Block<D>::kParts;
  for_vectors(call.functions, [&](int64_t v, auto like) __attribute__((always_inline)) {
    using V = decltype(like);
    V total{};
    double* to = G + v;
    for (int64_t j = 0; j < count; ++j, to += call.padded) {
      const Block<D>& block = blocks[j / kWidth];
      const int l = int(j % kWidth);
      V rows[6];
      load_rows(call.coefficients<Real>(block.place[l]) + v, call.functions, rows);
      for (int p = 0; p < kParts; ++p) {
        const V g = weighted(block, false, p, l, rows);
        if (G) *reinterpret_cast<V*>(to + p * size * call.padded) = g;
        if (p == kParts - 1) total += g;
      }
    }
    *reinterpret_cast<V*>(totals + v) = total;
  });
}

template <int L, int D>
int64_t sum(const Call& call, const RealResults& A) {
  constexpr int kSize = RowOf<L>::kSize, kParts = Block<D>::kParts;
  constexpr int kTile =
      kSize > 0 ? std::max(1, std::min(9, kSumsAtOnce * kWidth / std::max(1, kSize))) : 1;
  const int64_t F = call.functions, tiles = (F + kTile - 1) / kTile;
  const double norm_of_zero = norm(0);
  return parallel_first(call.atoms, kAtomsAtOnce, [&](int64_t begin, int64_t end) {
    Pairs pairs(call.slots);
    const int64_t size = pairs.size();
    const Scratch<Block<D>> blocks(size / kWidth);
    const Scratch<double> G(kParts * size * call.padded), Y(kParts * size * kSize);
    const Scratch<double> totals(call.padded), rows(rounded(kAtomsAtOnce * F) * kSize);
    int64_t wrong = kNone;
    for (int64_t atom = begin; atom < end; ++atom) {
      call.finder.find(atom, pairs, wrong);
      const int64_t count = pairs.count;
      fill<false>(call, pairs, blocks.get());
      double* splines = L > 0 ? G.get() : nullptr;
      if (call.is_float32)
        find_splines<float>(call, blocks.get(), count, size, splines, totals.get());
      else
        find_splines<double>(call, blocks.get(), count, size, splines, totals.get());
      A.visit(atom * F, [&](auto* to) {
        for (int64_t f = 0; f < F; ++f) to[f] = totals.get()[f] * norm_of_zero;
      });
      if constexpr (L > 0) {
        find_harmonics<L>(blocks.get(), blocks_of(pairs), size, Y.get());
        const int64_t place = (atom - begin) % kAtomsAtOnce;
        double* to = rows.get() + place * F * kSize;
        std::fill_n(to, F * kSize, 0.0);
        for (int64_t t = 0; t < tiles; ++t) {
          const int64_t first = F * t / tiles, some = F * (t + 1) / tiles - first;
          const Products add = products_of<kSize, kTile>(some);
          // The product rule: the part of a product along all directions is the sum over the parts
          // of one factor times the other factor's part along the other directions.
          for (int p = 0; p < kParts; ++p)
            add(G.get() + p * size * call.padded + first, call.padded,
                Y.get() + (kParts - 1 - p) * size * kSize, count, to + first * kSize);
        }
        if (place == kAtomsAtOnce - 1 || atom == end - 1)
          rows_to_planes(rows.get(), kSize, (place + 1) * F, call.harmonics, call.atoms * F,
                         (atom - place) * F, A);
      }
    }
    return wrong;
  });
}

template <class Real, class Index>
int64_t density(DensityInputs<Real, Index> in, View<Real, 3> A) {
  const Call call(in);
  return choose(call, [&](auto L, auto D) { return sum<L(), D()>(call, RealResults(A.data)); });
}

const Kernel kCpu("_density_along", density<float, int32_t>, density<float, int64_t>,
                  density<double, int32_t>, density<double, int64_t>);

}  // namespace
}  // namespace calcops::ops::density
