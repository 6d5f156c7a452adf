// The mathematics of one edge, for the CPU and the CUDA kernel alike (formulas: edge_force.h).
//
// With p = -g, the force that the edge puts on its neighbour, and V = (v, 1) the product p (x) V
// holds the edge's virial in its first three columns and its force in the last: one sum of 3 x 4
// numbers an atom carries both.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define CALCOPS_HD __host__ __device__
#else
#define CALCOPS_HD __attribute__((always_inline))
#endif

namespace calcops {

// Columns of an atom's sum: virial and force, or the force alone.
template <bool kVirial>
constexpr int kColumns = kVirial ? 4 : 1;

// What an edge does to an atom: to its neighbour p (x) V, to its centre -p in the last column.
template <bool kVirial, class Real>
CALCOPS_HD inline void add_to_neighbor(const Real* g, const Real* v, double* sum) {
  constexpr int n = kColumns<kVirial>;
  double column[n];
  for (int b = 0; b < n - 1; ++b) column[b] = double(v[b]);
  column[n - 1] = 1;
  for (int a = 0; a < 3; ++a)
    for (int b = 0; b < n; ++b) sum[n * a + b] -= double(g[a]) * column[b];
}

template <bool kVirial, class Real>
CALCOPS_HD inline void add_to_center(const Real* g, double* sum) {
  constexpr int n = kColumns<kVirial>;
  for (int a = 0; a < 3; ++a) sum[n * a + n - 1] += double(g[a]);
}

// The gradient of the frame's and the atom's virial together, U = gV + gAV, at [a][b].
template <class Real>
CALCOPS_HD inline double upstream_at(const Real* gV, const Real* gAV, int k) {
  return (gV ? double(gV[k]) : 0) + (gAV ? double(gAV[k]) : 0);
}

// The gradient of g: gF_i - gF_j - U v. gF, gV and gAV may be absent; v where U is not.
template <class Real>
CALCOPS_HD inline void edge_gradient_backward(const Real* gF_i, const Real* gF_j, const Real* gV,
                                              const Real* gAV, const Real* v, Real* out) {
  for (int a = 0; a < 3; ++a) {
    double sum = gF_i ? double(gF_i[a]) - double(gF_j[a]) : 0;
    if (gV || gAV)
      for (int b = 0; b < 3; ++b) sum -= upstream_at(gV, gAV, 3 * a + b) * double(v[b]);
    out[a] = Real(sum);
  }
}

// The gradient of v: -U^T g.
template <class Real>
CALCOPS_HD inline void edge_vec_backward(const Real* gV, const Real* gAV, const Real* g,
                                         Real* out) {
  for (int b = 0; b < 3; ++b) {
    double sum = 0;
    for (int a = 0; a < 3; ++a) sum -= upstream_at(gV, gAV, 3 * a + b) * double(g[a]);
    out[b] = Real(sum);
  }
}

}  // namespace calcops
