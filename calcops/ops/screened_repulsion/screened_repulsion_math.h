// The energy of a pair and its derivative, once for the CPU and the CUDA kernel.
#pragma once

#include <calcops/numbers.h>

#include <cmath>

namespace calcops::ops::screened_repulsion {

constexpr int kNumbers = 10;  // of a kind: inner, outer, a1, b1, a2, b2, a3, b3, a4, b4

// Add the energy of a pair at a vector d to `energy`, and write its gradient for d to `grad`. `row`
// is that of the pair's kind.
template <class Real>
CALCOPS_HD inline void add_pair(const Real* row, const Real* d, double& energy, Real* grad) {
  const double x = d[0], y = d[1], z = d[2], r2 = x * x + y * y + z * z;
  const double inner = row[0], outer = row[1];
  grad[0] = grad[1] = grad[2] = 0;
  if (r2 >= outer * outer) return;
  const double r = std::sqrt(r2);
  double sum = 0, slope = 0;  // of the four exponentials
  for (int k = 2; k < kNumbers; k += 2) {
    const double b = row[k + 1], term = row[k] * std::exp(-b * r);
    sum += term;
    slope -= b * term;
  }
  double factor = 1, factor_slope = 0;
  if (r > inner) {
    constexpr double kPi = 3.14159265358979323846;
    const double angle = kPi * (r - inner) / (outer - inner);
    factor = (1 + std::cos(angle)) / 2;
    factor_slope = -std::sin(angle) * kPi / (2 * (outer - inner));
  }
  energy += sum / r * factor;
  const double of_r = ((slope - sum / r) * factor + sum * factor_slope) / r;
  grad[0] = Real(of_r * x / r), grad[1] = Real(of_r * y / r), grad[2] = Real(of_r * z / r);
}

}  // namespace calcops::ops::screened_repulsion
