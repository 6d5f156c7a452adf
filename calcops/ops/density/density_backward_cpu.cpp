// CPU kernel of density: the gradient for d. Vectors of functions compute the splines. All else is
// computed in vectors of pairs.
#include "density/density_pairs.h"

namespace calcops::ops::density {
namespace {

// For kSome harmonics q, write to h[q] and slope[q] the sums over f of B[f][q] g[f] and of
// B[f][q] slopes[f]. Rows of B have kSize numbers. h and slope are strided by kParts.
template <int kSome, int kSize, int kParts>
CALCOPS_HD_INLINED inline void contract_some(const double* B, int64_t functions, const Vector* g,
                                             const Vector* slopes, Vector* h, Vector* slope) {
  Vector a[kSome] = {}, b[kSome] = {};
  for (int64_t f = 0; f < functions; ++f, B += kSize) {
#pragma GCC unroll 12
    for (int q = 0; q < kSome; ++q) {
      a[q] += B[q] * g[f];
      b[q] += B[q] * slopes[f];
    }
  }
#pragma GCC unroll 12
  for (int q = 0; q < kSome; ++q) {
    h[q * kParts] = a[q];
    slope[q * kParts] = b[q];
  }
}

// The same for the harmonics from kFirst on.
template <int kFirst, int kCount, int kSize, int kParts>
CALCOPS_HD_INLINED inline void contract(const double* B, int64_t functions, const Vector* g,
                                        const Vector* slopes, Vector* h, Vector* slope) {
  if constexpr (kFirst < kCount) {
    constexpr int kSome = std::min(kCount - kFirst, kPairsOfSumsAtOnce);
    contract_some<kSome, kSize, kParts>(B + kFirst, functions, g, slopes, h + kFirst * kParts,
                                        slope + kFirst * kParts);
    contract<kFirst + kSome, kCount, kSize, kParts>(B, functions, g, slopes, h, slope);
  }
}

// Compute the splines of a block of pairs, G [part][padded], and their derivatives for r.
template <class Real, bool kWithValues, int D>
void find_splines(const Call& call, const Block<D>& block, Vector* G, Vector* slopes) {
  for_vectors(call.functions, [&](int64_t v, auto like) __attribute__((always_inline)) {
    using V = decltype(like);
    constexpr int kParts = Block<D>::kParts;
#pragma GCC unroll 1
    for (int l = 0; l < kWidth; ++l) {
      V rows[6];
      load_rows(call.coefficients<Real>(block.place[l]) + v, call.functions, rows);
      for (int p = 0; p < kParts; ++p) {
        const int64_t place = p * call.padded + v + l;
        if (kWithValues) *reinterpret_cast<V*>(G + place) = weighted(block, false, p, l, rows);
        *reinterpret_cast<V*>(slopes + place) = weighted(block, true, p, l, rows);
      }
    }
    for (int p = 0; p < kParts; ++p) {
      if (kWithValues) transpose(G + p * call.padded + v);
      transpose(slopes + p * call.padded + v);
    }
  });
}

// Return in `of_d` the gradient for d of a block of pairs.
template <int L, int D>
CALCOPS_HD_INLINED inline void differentiate(const Call& call, const Block<D>& block,
                                             const double* B, const double* B_zero, Vector* G,
                                             Vector* slopes, typename Block<D>::N* of_d) {
  using N = typename Block<D>::N;
  constexpr int kSize = RowOf<L>::kSize, kCount = RowOf<L>::kCount, kParts = Block<D>::kParts;
  const auto find_all =
      call.is_float32 ? find_splines<float, (L > 0), D> : find_splines<double, (L > 0), D>;
  find_all(call, block, G, slopes);
  N of_r;
  for (int p = 0; p < kParts; ++p) {
    Vector sum{};
    for (int64_t f = 0; f < call.functions; ++f) sum += B_zero[f] * slopes[p * call.padded + f];
    parts_of<Vector>(&of_r)[p] = sum;
  }
  constexpr int kHarmonics = kCount > 0 ? kCount : 1;
  N h[kHarmonics], slope[kHarmonics];
  for (int p = 0; p < kParts; ++p)
    contract<0, kCount, kSize, kParts>(B, call.functions, G + p * call.padded,
                                       slopes + p * call.padded, parts_of<Vector>(h) + p,
                                       parts_of<Vector>(slope) + p);
  find_gradient<L>(block.unit, block.inverse, h, slope, of_r, of_d);
}

template <int L, int D>
int64_t gradient(const Call& call, const Reals& grad, const RealResults& grad_d) {
  constexpr int kSize = RowOf<L>::kSize, kParts = Block<D>::kParts;
  const int64_t F = call.functions;
  const double norm_of_zero = norm(0);
  return parallel_first(call.atoms, kAtomsAtOnce, [&](int64_t begin, int64_t end) {
    Pairs pairs(call.slots);
    const Scratch<Block<D>> blocks(pairs.size() / kWidth);
    const Scratch<double> rows(rounded(kAtomsAtOnce * F) * kSize), B_zero(F);
    const Scratch<Vector> G(kParts * call.padded), slopes(kParts * call.padded);
    int64_t wrong = kNone;
    for (int64_t atom = begin; atom < end; ++atom) {
      grad_d.set_zero(3 * atom * call.slots, 3 * call.slots);
      const int64_t place = (atom - begin) % kAtomsAtOnce;
      if (L > 0 && place == 0)
        planes_to_rows(grad, kSize, std::min(end - atom, kAtomsAtOnce) * F, call.harmonics,
                       call.atoms * F, atom * F, rows.get());
      for (int64_t f = 0; f < F; ++f) B_zero.get()[f] = grad[atom * F + f] * norm_of_zero;
      call.finder.find(atom, pairs, wrong);
      fill<true>(call, pairs, blocks.get());
      for (int64_t b = 0; b < blocks_of(pairs); ++b) {
        const Block<D>& block = blocks.get()[b];
        typename Block<D>::N of_d[3];
        differentiate<L>(call, block, rows.get() + place * F * kSize, B_zero.get(), G.get(),
                         slopes.get(), of_d);
        const int64_t some = std::min<int64_t>(kWidth, pairs.count - b * kWidth);
        grad_d.visit(0, [&](auto* to) {
          for (int64_t l = 0; l < some; ++l)
            for (int c = 0; c < 3; ++c)
              to[3 * block.slot[l] + c] = parts_of<Vector>(of_d + c)[kParts - 1][l];
        });
      }
    }
    return wrong;
  });
}

template <class Real, class Index>
int64_t density_backward(View<const Real, 3> grad, DensityInputs<Real, Index> in,
                         View<Real, 3> grad_d) {
  const Call call(in);
  return choose(call, [&](auto L, auto D) -> int64_t {
    if constexpr (D() < kMostDirections)
      return gradient<L(), D()>(call, Reals(grad.data), RealResults(grad_d.data));
    return kNone;  // refused in density.cpp
  });
}

const Kernel kCpu("_density_backward", density_backward<float, int32_t>,
                  density_backward<float, int64_t>, density_backward<double, int32_t>,
                  density_backward<double, int64_t>);

}  // namespace
}  // namespace calcops::ops::density
