// CUDA kernel of screened_repulsion: a thread computes an atom.
#include <calcops/launch.h>
#include <calcops/operator.h>

#include "screened_repulsion/screened_repulsion_math.h"

namespace calcops::ops::screened_repulsion {
namespace {

constexpr int kThreads = 128;

template <class Real>
__global__ void __launch_bounds__(kThreads)
    repulsion_kernel(View<const Real, 3> d, View<const int64_t, 2> kind, View<const Real, 2> table,
                     View<Real, 1> energy, View<Real, 3> grad) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, slots = kind.shape[1];
  if (i >= kind.shape[0]) return;
  double sum = 0;
  for (int64_t slot = i * slots; slot < (i + 1) * slots; ++slot) {
    const int64_t k = kind.data[slot];
    Real* const grad_of_pair = grad.data + 3 * slot;
    grad_of_pair[0] = grad_of_pair[1] = grad_of_pair[2] = 0;
    if (k >= 0 && k < table.shape[0])
      add_pair(table.data + kNumbers * k, d.data + 3 * slot, sum, grad_of_pair);
    else if (k != -1)
      sum = NAN;
  }
  energy(i) = Real(sum);
}

template <class Real>
cudaError_t repulsion(View<const Real, 3> d, View<const int64_t, 2> kind, View<const Real, 2> table,
                      View<Real, 1> energy, View<Real, 3> grad, cudaStream_t stream) {
  const int64_t blocks = blocks_for(kind.shape[0], kThreads);
  return launch(repulsion_kernel<Real>, blocks, kThreads, stream, d, kind, table, energy, grad);
}

const Kernel kCuda("screened_repulsion", repulsion<float>, repulsion<double>);

}  // namespace
}  // namespace calcops::ops::screened_repulsion
