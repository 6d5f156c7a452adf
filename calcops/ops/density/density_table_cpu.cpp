// CPU kernel of density: the gradient for the table. Vectors of pairs compute the gradients for the
// splines, vectors of functions add them to the rows of the table.
#include "density/density_pairs.h"

namespace calcops::ops::density {
namespace {

// Add the pairs of an atom to the table's rows [padded].
template <int L, int D>
void add_pairs(const Call& call, const Pairs& pairs, const Block<D>* blocks, const double* B,
               const double* B_zero, Vector* C, double* table) {
  using N = typename Block<D>::N;
  constexpr int kSize = RowOf<L>::kSize, kCount = RowOf<L>::kCount, kParts = Block<D>::kParts;
  const int64_t F = call.functions;
  for (int64_t j = 0; j < pairs.count; j += kWidth, ++blocks) {
    const Block<D>& block = *blocks;
    N Y[kCount + 1];
    if constexpr (L > 0) Harmonics<L, N>(block.unit[0], block.unit[1], block.unit[2]).values(Y);
    const int64_t some = std::min<int64_t>(kWidth, pairs.count - j);
    for (int p = 0; p < kParts; ++p) {
      // C[f] is the gradient for part p of the spline f. The other factor of the product has the
      // other directions. The harmonic of l = 0 has no derivatives.
      for (int64_t f = 0; f < F; ++f) {
        Vector sum = Vector{} + (p == kParts - 1 ? B_zero[f] : 0.0);
        for (int q = 0; q < kCount; ++q)
          sum += B[f * kSize + q] * parts_of<Vector>(Y + q)[kParts - 1 - p];
        C[f] = sum;
      }
      for (int64_t v = 0; v < call.padded; v += kWidth) {
        transpose(C + v);
        for (int64_t l = 0; l < some; ++l) {
          double* to = table + block.place[l] / F * call.padded + v;
          for (int k = 0; k < 6; ++k)
            at(to + k * call.padded) += block.weight(false, k, p, int(l)) * C[v + l];
        }
      }
      std::fill(C + F, C + call.padded, Vector{});
    }
  }
}

// The number of parts into which the atoms are divided, each with sums of its own. It does not
// depend on the number of threads, so that the bits of the result do not. A part has at least as
// many slots as a table has rows.
int64_t parts_of_atoms(const Call& call) {
  constexpr int64_t kMost = 16;
  const int64_t rows = std::max<int64_t>(call.kinds * call.rows, 1);
  return std::max<int64_t>(1, std::min({kMost, call.atoms, call.atoms * call.slots / rows}));
}

template <int L, int D>
int64_t gradient(const Call& call, const Reals& grad, const RealResults& grad_table) {
  constexpr int kSize = RowOf<L>::kSize;
  const int64_t F = call.functions, rows = call.kinds * call.rows, parts = parts_of_atoms(call);
  const Scratch<double> sums(parts * rows * call.padded);
  const double norm_of_zero = norm(0);
  const int64_t wrong = parallel_first(parts, 1, [&](int64_t first_part, int64_t end_part) {
    Pairs pairs(call.slots);
    const Scratch<Block<D>> blocks(pairs.size() / kWidth);
    const Scratch<double> B(rounded(F) * kSize), B_zero(F);
    const Scratch<Vector> C(call.padded);
    std::fill_n(C.get(), call.padded, Vector{});
    int64_t wrong = kNone;
    for (int64_t part = first_part; part < end_part; ++part) {
      double* table = sums.get() + part * rows * call.padded;
      std::fill_n(table, rows * call.padded, 0.0);
      const int64_t end = call.atoms * (part + 1) / parts;
      for (int64_t atom = call.atoms * part / parts; atom < end; ++atom) {
        if constexpr (L > 0)
          planes_to_rows(grad, kSize, F, call.harmonics, call.atoms * F, atom * F, B.get());
        for (int64_t f = 0; f < F; ++f) B_zero.get()[f] = grad[atom * F + f] * norm_of_zero;
        call.finder.find(atom, pairs, wrong);
        fill<false>(call, pairs, blocks.get());
        add_pairs<L>(call, pairs, blocks.get(), B.get(), B_zero.get(), C.get(), table);
      }
    }
    return wrong;
  });
  parallel_for(rows, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t f = 0; f < F; ++f) {
        double total = 0;
        for (int64_t part = 0; part < parts; ++part)
          total += sums.get()[(part * rows + i) * call.padded + f];
        grad_table.visit(i * F + f, [&](auto* to) { *to = total; });
      }
  });
  return wrong;
}

template <class Real, class Index>
int64_t density_table_backward(View<const Real, 3> grad, DensityInputs<Real, Index> in,
                               View<Real, 3> grad_table) {
  const Call call(in);
  return choose(call, [&](auto L, auto D) {
    return gradient<L(), D()>(call, Reals(grad.data), RealResults(grad_table.data));
  });
}

const Kernel kCpu("_density_table_backward", density_table_backward<float, int32_t>,
                  density_table_backward<float, int64_t>, density_table_backward<double, int32_t>,
                  density_table_backward<double, int64_t>);

}  // namespace
}  // namespace calcops::ops::density
