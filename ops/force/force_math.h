// The mathematics of one pair, for the CPU and the CUDA kernel alike (formulas: force.h).
//
// With R4 = (Rij, 1) the 3 x 4 product g (x) R4 holds the pair's virial in its first three columns
// and its force in the last: one accumulator carries both, and the same layout of the upstream
// gradients, U = [gV + gAV_j | gF_j], makes the backward a product with R4 too. kColumns is 4, or 1
// where only the force is wanted.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define CALCOPS_HD __host__ __device__
#else
#define CALCOPS_HD
#endif

namespace calcops {

// g[a] = sum_c dE[c] Ri_d[c][a], or the share of kTerms of the four c
template <int kTerms = 4, class Real>
CALCOPS_HD inline void pair_force(const Real* dE, const Real* Ri_d, double* g) {
  for (int a = 0; a < 3; ++a) {
    g[a] = 0;
    for (int c = 0; c < kTerms; ++c) g[a] += double(dE[c]) * double(Ri_d[3 * c + a]);
  }
}

template <int kColumns, class Real>
CALCOPS_HD inline void load_r4(const Real* Rij, int64_t slot, double* r4) {
  for (int b = 0; b + 1 < kColumns; ++b) r4[b] = double(Rij[3 * slot + b]);
  r4[kColumns - 1] = 1;
}

// sum[a][b] += g[a] R4[b]
template <int kColumns>
CALCOPS_HD inline void add_outer(const double* g, const double* r4, double* sum) {
  for (int a = 0; a < 3; ++a)
    for (int b = 0; b < kColumns; ++b) sum[a * kColumns + b] += g[a] * r4[b];
}

// e[a] = sum_b U[a][b] R4[b] - gF_i[a]: what a change of g is worth.
template <int kColumns>
CALCOPS_HD inline void worth(const double* u, const double* r4, const double* center, double* e) {
  for (int a = 0; a < 3; ++a) {
    e[a] = -center[a];
    for (int b = 0; b < kColumns; ++b) e[a] += u[a * kColumns + b] * r4[b];
  }
}

// The pair's gradients: dE <- Ri_d e, Ri_d <- dE e, Rij <- U^T g.
template <int kTerms = 4, class Real>
CALCOPS_HD inline void gradient_dE(const Real* Ri_d, const double* e, Real* out) {
  for (int c = 0; c < kTerms; ++c) {
    double sum = 0;
    for (int a = 0; a < 3; ++a) sum += double(Ri_d[3 * c + a]) * e[a];
    out[c] = Real(sum);
  }
}

template <int kTerms = 4, class Real>
CALCOPS_HD inline void gradient_Ri_d(const Real* dE, const double* e, Real* out) {
  for (int c = 0; c < kTerms; ++c)
    for (int a = 0; a < 3; ++a) out[3 * c + a] = Real(double(dE[c]) * e[a]);
}

template <int kColumns>
CALCOPS_HD inline double gradient_Rij(const double* g, const double* u, int b) {
  double sum = 0;
  for (int a = 0; a < 3; ++a) sum += u[a * kColumns + b] * g[a];
  return sum;
}

template <int kColumns, class Real>
CALCOPS_HD inline void gradient_Rij(const double* g, const double* u, Real* out) {
  for (int b = 0; b < 3; ++b)  // without columns of its own no virial has a gradient
    out[b] = kColumns > 1 ? Real(gradient_Rij<kColumns>(g, u, b)) : Real(0);
}

}  // namespace calcops
