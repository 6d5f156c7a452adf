// screened_repulsion: its contract.
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

  Computed in float64. Not differentiable, because it's a gradient itself. An empty slot adds
  nothing, whatever d has there. Coincident atoms have a gradient of NaN.

  A kind that doesn't exist is an error on the CPU. On CUDA the energy of its atom becomes NaN; with
  CALCOPS_CHECK=1, which makes each call wait for the GPU, it's an error there too.

d       [n, K, 3]; float32 or float64; n < 2^31 on CUDA. Vectors from each atom to its neighbours.
kind    [n, K]; int64; entries -1 or 0 <= kind < kinds at atom, slot. The kind of each pair, such as
        both types; -1: an empty slot, anywhere.
table   [kinds, 10]; like d. For each kind: inner, outer, a1, b1, a2, b2, a3, b3, a4, b4. Lengths
        are in the unit of d.
energy  [n]; like d.
grad    [n, K, 3]; like d. The gradient of the sum of the energies for d.
)");

}  // namespace
}  // namespace calcops::ops::screened_repulsion
