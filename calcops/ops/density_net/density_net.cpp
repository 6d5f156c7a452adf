// density_net: its contract, and the conversion of a call's views to the kernels' structs.
#include "density_net/density_net.h"

#include <calcops/no_loops.h>
#include <calcops/operator.h>

namespace calcops::ops::density_net {
namespace {

const Contract kContract(R"(
density_net(Tensor radial, Tensor A, Tensor net, Tensor factors, Tensor invariant,
            Tensor coefficient, Tensor w_radial, Tensor w_angular, Tensor b0, Tensor w1,
            Tensor bias) -> (Tensor energy, Tensor grad_radial, Tensor grad_A)
  Energies of nets that take invariants of density's sums, with their gradients for the sums.

  The net of an atom has one hidden layer:

    E = sum_k w1[k] tanh(sum_r radial[r] w_radial[r][k] + sum_pf q[p][f] w_angular[p][f][k] - b0[k])
        - bias

  Each invariant q[p][f] is a polynomial of the sums A[h][f]: each term is its coefficient times up
  to four sums. NEPs have such energies.

  Computed in float64. Not differentiable, because it is a gradient itself. It gives a potential its energies and forces
  in one pass; calcops.nep trains with the same formula in PyTorch.

  A net or an invariant that does not exist is an error on the CPU. On CUDA the energy of its atom,
  or of all atoms, becomes NaN. With CALCOPS_CHECK=1 in the environment it is an error on CUDA too,
  but each call then waits for the GPU.

radial       [n, R]; float32 or float64; n < 2^31 on CUDA.
A            [H, n, F]; like radial. The results of `density`.
net          [n]; int64; entries -1 or 0 <= k < N. The net of each atom; -1: no atom, whose energy
             and gradients are 0.
factors      [M, 4]; int32; entries -1 or 0 <= h < H at term, place. The sums that a term
             multiplies; -1: none.
invariant    [M]; int32; entries 0 <= p < P. The invariant to which a term belongs.
coefficient  [M]; like radial.
w_radial     [N, R, K]; like radial; N >= 1; K <= 512 on CUDA.
w_angular    [N, P, F, K]; like radial; P*F <= 1024 on CUDA.
b0           [N, K]; like radial.
w1           [N, K]; like radial.
bias         [N]; like radial.
energy       [n]; like radial.
grad_radial  [n, R]; like radial.
grad_A       [H, n, F]; like radial.
)");

template <class Real>
Inputs<Real> inputs(View<const Real, 2> radial, View<const Real, 3> A, View<const int64_t, 1> net,
                    View<const int32_t, 2> factors, View<const int32_t, 1> invariant,
                    View<const Real, 1> coefficient, View<const Real, 3> w_radial,
                    View<const Real, 4> w_angular, View<const Real, 2> b0, View<const Real, 2> w1,
                    View<const Real, 1> bias) {
  return {A.shape[1],       A.shape[2],   A.shape[0],     radial.shape[1],  w_angular.shape[1],
          factors.shape[0], b0.shape[0],  b0.shape[1],    radial.data,      A.data,
          net.data,         factors.data, invariant.data, coefficient.data, w_radial.data,
          w_angular.data,   b0.data,      w1.data,        bias.data};
}

template <class Real>
int64_t cpu(View<const Real, 2> radial, View<const Real, 3> A, View<const int64_t, 1> net,
            View<const int32_t, 2> factors, View<const int32_t, 1> invariant,
            View<const Real, 1> coefficient, View<const Real, 3> w_radial,
            View<const Real, 4> w_angular, View<const Real, 2> b0, View<const Real, 2> w1,
            View<const Real, 1> bias, View<Real, 1> energy, View<Real, 2> grad_radial,
            View<Real, 3> grad_A) {
  return density_net_cpu(
      inputs(radial, A, net, factors, invariant, coefficient, w_radial, w_angular, b0, w1, bias),
      NetResults<Real>{energy.data, grad_radial.data, grad_A.data});
}

const Kernel kCpu("density_net", cpu<float>, cpu<double>);

#ifndef CALCOPS_NO_CUDA
template <class Real>
cudaError_t cuda(View<const Real, 2> radial, View<const Real, 3> A, View<const int64_t, 1> net,
                 View<const int32_t, 2> factors, View<const int32_t, 1> invariant,
                 View<const Real, 1> coefficient, View<const Real, 3> w_radial,
                 View<const Real, 4> w_angular, View<const Real, 2> b0, View<const Real, 2> w1,
                 View<const Real, 1> bias, View<Real, 1> energy, View<Real, 2> grad_radial,
                 View<Real, 3> grad_A, cudaStream_t stream) {
  return density_net_cuda(
      inputs(radial, A, net, factors, invariant, coefficient, w_radial, w_angular, b0, w1, bias),
      NetResults<Real>{energy.data, grad_radial.data, grad_A.data}, stream);
}

const Kernel kCuda("density_net", cuda<float>, cuda<double>);
#endif

}  // namespace
}  // namespace calcops::ops::density_net
