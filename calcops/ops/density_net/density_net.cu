// CUDA kernel of density_net: a block computes an atom. Its threads share the invariants, then the
// neurons, then the gradients. Every sum has a fixed order.
#include <cmath>

#include "density_net/density_net.h"

namespace calcops::ops::density_net {
namespace {

constexpr int kThreads = 128;
constexpr int kMostInvariants = 1024, kMostNeurons = 512;  // as in the contract

template <class Real>
__global__ void __launch_bounds__(kThreads)
    density_net_kernel(Inputs<Real> in, NetResults<Real> out) {
  __shared__ double q[kMostInvariants];  // [P, F], then their gradients
  __shared__ double hidden[kMostNeurons];
  __shared__ double share[kMostNeurons];  // of the energy
  const int64_t i = blockIdx.x, F = in.functions, K = in.neurons, PF = in.invariants * F;
  const int64_t t = in.net[i];
  const bool is_wrong = t < -1 || t >= in.nets, is_atom = t >= 0 && !is_wrong;
  const auto A = [&](int64_t h, int64_t f) { return double(in.A[(h * in.atoms + i) * F + f]); };
  // A factor of a term; a wrong one is NaN.
  const auto factor = [&](int64_t term, int place, int64_t f) {
    const int64_t h = in.factors[kFactors * term + place];
    return h == -1 ? 1.0 : h < 0 || h >= in.harmonics ? double(NAN) : A(h, f);
  };

  for (int64_t pf = threadIdx.x; pf < PF; pf += kThreads) {
    double sum = 0;
    for (int64_t term = 0; term < in.terms; ++term) {
      const int64_t p = in.invariant[term];
      if (p < 0 || p >= in.invariants) sum = NAN;
      if (p != pf / F) continue;
      double product = in.coefficient[term];
      for (int place = 0; place < kFactors; ++place) product *= factor(term, place, pf % F);
      sum += product;
    }
    q[pf] = sum;
  }
  __syncthreads();

  for (int64_t k = threadIdx.x; k < K && is_atom; k += kThreads) {
    double sum = -in.b0[t * K + k];
    for (int64_t r = 0; r < in.radials; ++r)
      sum += in.radial[i * in.radials + r] * in.w_radial[(t * in.radials + r) * K + k];
    for (int64_t pf = 0; pf < PF; ++pf) sum += q[pf] * in.w_angular[(t * PF + pf) * K + k];
    const double value = tanh(sum), w1 = in.w1[t * K + k];
    share[k] = w1 * value;
    hidden[k] = w1 * (1 - value * value);
  }
  __syncthreads();

  if (threadIdx.x == 0) {
    double energy = is_wrong ? double(NAN) : 0.0;
    for (int64_t k = 0; k < K && is_atom; ++k) energy += share[k];
    out.energy[i] = Real(is_atom ? energy - in.bias[t] : energy);
  }
  const auto take_back = [&](const Real* weights) {
    double sum = 0;
    for (int64_t k = 0; k < K && is_atom; ++k) sum += hidden[k] * weights[k];
    return sum;
  };
  for (int64_t r = threadIdx.x; r < in.radials; r += kThreads)
    out.grad_radial[i * in.radials + r] = Real(take_back(in.w_radial + (t * in.radials + r) * K));
  for (int64_t pf = threadIdx.x; pf < PF; pf += kThreads)
    q[pf] = take_back(in.w_angular + (t * PF + pf) * K);
  __syncthreads();

  for (int64_t hf = threadIdx.x; hf < in.harmonics * F; hf += kThreads) {
    const int64_t h = hf / F, f = hf % F;
    double sum = 0;
    for (int64_t term = 0; term < in.terms && is_atom; ++term)
      for (int place = 0; place < kFactors; ++place) {
        if (in.factors[kFactors * term + place] != h) continue;
        const int64_t p = in.invariant[term];
        if (p < 0 || p >= in.invariants) continue;
        double product = in.coefficient[term] * q[p * F + f];
        for (int other = 0; other < kFactors; ++other)
          if (other != place) product *= factor(term, other, f);
        sum += product;
      }
    out.grad_A[(h * in.atoms + i) * F + f] = Real(sum);
  }
}

}  // namespace

template <class Real>
cudaError_t density_net_cuda(const Inputs<Real>& in, const NetResults<Real>& out,
                             cudaStream_t stream) {
  if (in.atoms > 0) density_net_kernel<<<unsigned(in.atoms), kThreads, 0, stream>>>(in, out);
  return cudaGetLastError();
}

template cudaError_t density_net_cuda(const Inputs<float>&, const NetResults<float>&, cudaStream_t);
template cudaError_t density_net_cuda(const Inputs<double>&, const NetResults<double>&,
                                      cudaStream_t);

}  // namespace calcops::ops::density_net
