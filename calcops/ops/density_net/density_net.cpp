// density_net: its contract.
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

  Each invariant q[p][f] is a polynomial in the sums A[h][f]: each term is its coefficient times up
  to four sums. NEPs have such energies.

  Computed in float64. Not differentiable, because it's a gradient itself: it gives a potential
  energies and forces in one pass. calcops.nep trains with the same formula in PyTorch.

  A net or an invariant that doesn't exist is an error on the CPU. On CUDA the energy of its atom,
  or of all atoms, becomes NaN; with CALCOPS_CHECK=1, which makes each call wait for the GPU, it's
  an error there too.

radial       [n, R]; float32 or float64; n < 2^31 on CUDA.
A            [H, n, F]; like radial. The results of `density`.
net          [n]; int64; entries -1 or 0 <= k < N. The net of each atom; -1: no atom, so energy
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

}  // namespace
}  // namespace calcops::ops::density_net
