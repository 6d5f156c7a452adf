// near_pairs: its contract.
//
// A list with a skin holds for many steps, and only the pairs within the cutoff count in each of
// them. One pass finds these, and packs them into rows without gaps.
#include <calcops/no_loops.h>
#include <calcops/operator.h>

namespace calcops::ops::near_pairs {
namespace {

const Contract kContract(R"(
near_pairs(Tensor positions, Tensor list_neigh, Tensor image, Tensor offset, float cutoff,
           SymInt slots) -> (Tensor near, Tensor Rij, Tensor count, Tensor nearest)
  The pairs of a neighbour list with a skin that are within the cutoff now, and their vectors.

  A pair of the list is in the result if |Rij| < cutoff, or if Rij is NaN. Pairs keep their order.
  A row has room for `slots` pairs. If an atom has more, `count` says so, and the last pairs are
  missing: call again with more slots.

  Not differentiable.

  An entry that doesn't exist is an error on the CPU. On CUDA the slot is empty and the atom's
  `nearest` is NaN; with CALCOPS_CHECK=1, which makes each call wait for the GPU, it's an error
  there too.

positions   [N, 3]; float64. Positions of the atoms.
list_neigh  [n, K]; int32; n <= N; n < 2^31 on CUDA; entries -1 or 0 <= j < N at atom, slot. The
            neighbours of the first n atoms; -1: an empty slot, anywhere.
image       [n, K]; int32; entries 0 <= s < S at atom, slot. The row of `offset` for each pair.
offset      [S, 3]; float64. Vectors that are added to a neighbour's position, such as sums of
            cell vectors.
cutoff      > 0.
slots       0 to 2^31.
near        [n, slots]; int64. The neighbours, then -1.
Rij         [n, slots, 3]; float64. The vectors r_j + offset - r_i, then 0.
count       [n]; int64. The number of pairs within the cutoff, including those without room.
nearest     [n]; float64. The smallest |Rij|^2 in the row of the list; inf in an empty row.
)");

}  // namespace
}  // namespace calcops::ops::near_pairs
