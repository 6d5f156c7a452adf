// CUDA kernel of density_net: a block computes an atom. Its threads share the invariants, then the
// neurons, then the gradients. Every sum has a fixed order.
#include <calcops/launch.h>

#include <cmath>

#include "density_net/density_net.h"

namespace calcops::ops::density_net {
namespace {

constexpr int kThreads = 128;
constexpr int kMostInvariants = 1024, kMostNeurons = 512;  // as in the contract

template <class Real>
__global__ void __launch_bounds__(kThreads) density_net_kernel(Call<Real> call) {
  __shared__ double q[kMostInvariants];  // [P, F], then their gradients
  __shared__ double hidden[kMostNeurons];
  __shared__ double share[kMostNeurons];  // of the energy
  const int64_t i = blockIdx.x, F = call.functions(), K = call.neurons();
  const int64_t PF = call.invariants() * F;
  const int64_t t = call.net(i);
  const bool is_wrong = t < -1 || t >= call.nets(), is_atom = t >= 0 && !is_wrong;
  const auto A = [&](int64_t h, int64_t f) {
    return double(call.A.data[(h * call.atoms() + i) * F + f]);
  };
  // A factor of a term; a wrong one is NaN.
  const auto factor = [&](int64_t term, int place, int64_t f) {
    const int64_t h = call.factors.data[kFactors * term + place];
    return h == -1 ? 1.0 : h < 0 || h >= call.harmonics() ? double(NAN) : A(h, f);
  };

  for (int64_t pf = threadIdx.x; pf < PF; pf += kThreads) {
    double sum = 0;
    for (int64_t term = 0; term < call.terms(); ++term) {
      const int64_t p = call.invariant(term);
      if (p < 0 || p >= call.invariants()) sum = NAN;
      if (p != pf / F) continue;
      double product = call.coefficient(term);
      for (int place = 0; place < kFactors; ++place) product *= factor(term, place, pf % F);
      sum += product;
    }
    q[pf] = sum;
  }
  __syncthreads();

  for (int64_t k = threadIdx.x; k < K && is_atom; k += kThreads) {
    double sum = -call.b0.data[t * K + k];
    for (int64_t r = 0; r < call.radials(); ++r)
      sum += call.radial.data[i * call.radials() + r] *
             call.w_radial.data[(t * call.radials() + r) * K + k];
    for (int64_t pf = 0; pf < PF; ++pf) sum += q[pf] * call.w_angular.data[(t * PF + pf) * K + k];
    const double value = tanh(sum), w1 = call.w1.data[t * K + k];
    share[k] = w1 * value;
    hidden[k] = w1 * (1 - value * value);
  }
  __syncthreads();

  if (threadIdx.x == 0) {
    double energy = is_wrong ? double(NAN) : 0.0;
    for (int64_t k = 0; k < K && is_atom; ++k) energy += share[k];
    call.energy(i) = Real(is_atom ? energy - call.bias(t) : energy);
  }
  const auto take_back = [&](const Real* weights) {
    double sum = 0;
    for (int64_t k = 0; k < K && is_atom; ++k) sum += hidden[k] * weights[k];
    return sum;
  };
  for (int64_t r = threadIdx.x; r < call.radials(); r += kThreads)
    call.grad_radial.data[i * call.radials() + r] =
        Real(take_back(call.w_radial.data + (t * call.radials() + r) * K));
  for (int64_t pf = threadIdx.x; pf < PF; pf += kThreads)
    q[pf] = take_back(call.w_angular.data + (t * PF + pf) * K);
  __syncthreads();

  for (int64_t hf = threadIdx.x; hf < call.harmonics() * F; hf += kThreads) {
    const int64_t h = hf / F, f = hf % F;
    double sum = 0;
    for (int64_t term = 0; term < call.terms() && is_atom; ++term)
      for (int place = 0; place < kFactors; ++place) {
        if (call.factors.data[kFactors * term + place] != h) continue;
        const int64_t p = call.invariant(term);
        if (p < 0 || p >= call.invariants()) continue;
        double product = call.coefficient(term) * q[p * F + f];
        for (int other = 0; other < kFactors; ++other)
          if (other != place) product *= factor(term, other, f);
        sum += product;
      }
    call.grad_A.data[(h * call.atoms() + i) * F + f] = Real(sum);
  }
}

template <class Real>
cudaError_t density_net(Call<Real> call, cudaStream_t stream) {
  return launch(density_net_kernel<Real>, call.atoms(), kThreads, stream, call);
}

const Kernel kCuda("density_net", density_net<float>, density_net<double>);

}  // namespace
}  // namespace calcops::ops::density_net
