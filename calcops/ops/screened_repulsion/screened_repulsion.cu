// CUDA kernel of screened_repulsion: a thread computes an atom.
#include "screened_repulsion/screened_repulsion.h"
#include "screened_repulsion/screened_repulsion_math.h"

namespace calcops::ops::screened_repulsion {
namespace {

constexpr int kThreads = 128;

template <class Real>
__global__ void __launch_bounds__(kThreads) repulsion_kernel(Pairs<Real> in, Repulsion<Real> out) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= in.atoms) return;
  double energy = 0;
  for (int64_t slot = i * in.slots; slot < (i + 1) * in.slots; ++slot) {
    const int64_t kind = in.kind[slot];
    Real* const grad = out.grad + 3 * slot;
    grad[0] = grad[1] = grad[2] = 0;
    if (kind >= 0 && kind < in.kinds)
      add_pair(in.table + kNumbers * kind, in.d + 3 * slot, energy, grad);
    else if (kind != -1)
      energy = NAN;
  }
  out.energy[i] = Real(energy);
}

}  // namespace

template <class Real>
cudaError_t screened_repulsion_cuda(const Pairs<Real>& in, const Repulsion<Real>& out,
                                    cudaStream_t stream) {
  const int64_t blocks = (in.atoms + kThreads - 1) / kThreads;
  if (blocks > 0) repulsion_kernel<<<unsigned(blocks), kThreads, 0, stream>>>(in, out);
  return cudaGetLastError();
}

template cudaError_t screened_repulsion_cuda(const Pairs<float>&, const Repulsion<float>&,
                                             cudaStream_t);
template cudaError_t screened_repulsion_cuda(const Pairs<double>&, const Repulsion<double>&,
                                             cudaStream_t);

}  // namespace calcops::ops::screened_repulsion
