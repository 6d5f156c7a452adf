// The mathematics of one edge, shared by the CPU and the CUDA kernels (formulas: edge_force.h).
//
// p = -g is the force that the edge puts on its neighbour. With V = (v, 1), the outer product
// p (x) V has the edge's virial in its first three columns and its force in the last. So three rows
// of four numbers for each atom hold both. For the force alone, V is 1 and a row is one number.
#pragma once

#include <calcops/numbers.h>

#include <cstdint>
#include <type_traits>

namespace calcops::ops::edge_force {

template <class Real>
CALCOPS_HD_INLINED inline Row row_of(const Real* x, double last) {
  return Row{double(x[0]), double(x[1]), double(x[2]), last};
}

// Return V: a Row, or the number 1 for the force alone.
template <class R, class Real>
CALCOPS_HD_INLINED inline R columns_of(const Real* v) {
  if constexpr (std::is_same_v<R, Row>)
    return row_of(v, 1);
  else
    return 1;
}

// Return the last number of a row: the force.
CALCOPS_HD_INLINED inline double& last_column(double& row) { return row; }
#ifdef __CUDACC__
CALCOPS_HD_INLINED inline double& last_column(Row& row) { return row[3]; }
#else  // Clang binds no reference to an element of a vector type
CALCOPS_HD_INLINED inline double last_column(const Row& row) { return row[3]; }
#endif

// Add p (x) V to the sums of an edge's neighbour.
template <class R, class Real>
CALCOPS_HD_INLINED inline void add_to_neighbor(const Real* g, const R& V, R* sum) {
  for (int a = 0; a < 3; ++a) sum[a] -= double(g[a]) * V;
}

// Add the force -p to the sums of an edge's centre.
template <class R, class Real>
CALCOPS_HD_INLINED inline void add_to_center(const Real* g, R* sum) {
  for (int a = 0; a < 3; ++a) last_column(sum[a]) += double(g[a]);
}

// Return element k = 3a + b of U = gV + gAV: the sum of the upstream gradients for the virial of
// the frame and that of the atom. Either may be nullptr.
template <class Real>
CALCOPS_HD_INLINED inline double upstream_at(const Real* gV, const Real* gAV, int k) {
  return (gV ? double(gV[k]) : 0) + (gAV ? double(gAV[k]) : 0);
}

// Write the gradient for g: gF_i - gF_j - U v. The upstream gradients gF_i and gF_j, gV and gAV may
// be nullptr. Without gV and gAV, so may v.
template <class Real>
CALCOPS_HD_INLINED inline void edge_gradient_backward(const Real* gF_i, const Real* gF_j,
                                                      const Real* gV, const Real* gAV,
                                                      const Real* v, Real* out) {
  for (int a = 0; a < 3; ++a) {
    double sum = gF_i ? double(gF_i[a]) - double(gF_j[a]) : 0;
    if (gV || gAV)
      for (int b = 0; b < 3; ++b) sum -= upstream_at(gV, gAV, 3 * a + b) * double(v[b]);
    out[a] = Real(sum);
  }
}

// Write the gradient for v: -U^T g.
template <class Real>
CALCOPS_HD_INLINED inline void edge_vec_backward(const Real* gV, const Real* gAV, const Real* g,
                                                 Real* out) {
  for (int b = 0; b < 3; ++b) {
    double sum = 0;
    for (int a = 0; a < 3; ++a) sum -= upstream_at(gV, gAV, 3 * a + b) * double(g[a]);
    out[b] = Real(sum);
  }
}

// Write the wanted gradients of edge e from i to j. `frame` is that of j; it is used only if
// upstream.virial is given.
template <class Inputs, class Upstream, class Gradients>
CALCOPS_HD_INLINED inline void edge_backward(const Inputs& in, const Upstream& upstream,
                                             const Gradients& out, int64_t e, int64_t i, int64_t j,
                                             int64_t frame) {
  const auto gF = upstream.force;
  const auto gV = upstream.virial ? upstream.virial + 9 * frame : nullptr;
  const auto gAV = upstream.atom_virial ? upstream.atom_virial + 9 * j : nullptr;
  if (out.edge_gradient)
    edge_gradient_backward(gF ? gF + 3 * i : nullptr, gF ? gF + 3 * j : nullptr, gV, gAV,
                           in.edge_vec ? in.edge_vec + 3 * e : nullptr, out.edge_gradient + 3 * e);
  if (out.edge_vec) edge_vec_backward(gV, gAV, in.edge_gradient + 3 * e, out.edge_vec + 3 * e);
}

}  // namespace calcops::ops::edge_force
