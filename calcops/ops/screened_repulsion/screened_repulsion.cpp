// screened_repulsion: its contract, and the conversion of a call's views to the kernels' structs.
#include "screened_repulsion/screened_repulsion.h"

#include <calcops/no_loops.h>
#include <calcops/operator.h>

namespace calcops::ops::screened_repulsion {
namespace {

const Contract kContract(R"(
screened_repulsion(Tensor d, Tensor kind, Tensor table) -> (Tensor energy, Tensor grad)
  Screened Coulomb repulsion of close pairs, such as that of Ziegler, Biersack and Littmark (ZBL).

  The energy of an atom is the sum over its slots of

    (a1 exp(-b1 r) + a2 exp(-b2 r) + a3 exp(-b3 r) + a4 exp(-b4 r)) / r s(r),  r = |d|

  where s is 1 up to the inner cutoff, 0 from the outer one on, and between them
  (1 + cos(pi (r - inner) / (outer - inner))) / 2.

  Computed in float64. Not differentiable, because it is a gradient itself. An empty slot adds nothing, whatever d has
  there. Two atoms in one place have a gradient of NaN.

  A kind that does not exist is an error on the CPU. On CUDA the energy of its atom becomes NaN.
  With CALCOPS_CHECK=1 in the environment it is an error on CUDA too, but each call then waits for
  the GPU.

d       [n, K, 3]; float32 or float64; n < 2^31 on CUDA. Vectors from each atom to its neighbours.
kind    [n, K]; int64; entries -1 or 0 <= kind < kinds at atom, slot. The kind of each pair, such as
        the types of both atoms; -1: an empty slot, anywhere.
table   [kinds, 10]; like d. For each kind: inner, outer, a1, b1, a2, b2, a3, b3, a4, b4. Lengths
        have the unit of d.
energy  [n]; like d.
grad    [n, K, 3]; like d. The gradient of the sum of the energies for d.
)");

template <class Real>
Pairs<Real> pairs(View<const Real, 3> d, View<const int64_t, 2> kind, View<const Real, 2> table) {
  return {kind.shape[0], kind.shape[1], table.shape[0], d.data, kind.data, table.data};
}

template <class Real>
int64_t cpu(View<const Real, 3> d, View<const int64_t, 2> kind, View<const Real, 2> table,
            View<Real, 1> energy, View<Real, 3> grad) {
  return screened_repulsion_cpu(pairs(d, kind, table), Repulsion<Real>{energy.data, grad.data});
}

const Kernel kCpu("screened_repulsion", cpu<float>, cpu<double>);

#ifndef CALCOPS_NO_CUDA
template <class Real>
cudaError_t cuda(View<const Real, 3> d, View<const int64_t, 2> kind, View<const Real, 2> table,
                 View<Real, 1> energy, View<Real, 3> grad, cudaStream_t stream) {
  return screened_repulsion_cuda(pairs(d, kind, table), Repulsion<Real>{energy.data, grad.data},
                                 stream);
}

const Kernel kCuda("screened_repulsion", cuda<float>, cuda<double>);
#endif

}  // namespace
}  // namespace calcops::ops::screened_repulsion
