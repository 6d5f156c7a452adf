// near_pairs: its contract, and the conversion of a call's views to the kernels' structs.
#include "near_pairs/near_pairs.h"

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

  An entry that does not exist is an error on the CPU. On CUDA the slot is empty, and `nearest` of
  the atom is NaN. With CALCOPS_CHECK=1 in the environment it is an error on CUDA too, but each call
  then waits for the GPU.

positions   [N, 3]; float64. Positions of the atoms.
list_neigh  [n, K]; int32; n <= N; n < 2^31 on CUDA; entries -1 or 0 <= j < N at atom, slot. The
            neighbours of the first n atoms; -1: an empty slot, anywhere.
image       [n, K]; int32; entries 0 <= s < S at atom, slot. The row of `offset` for each pair.
offset      [S, 3]; float64. Vectors that are added to the neighbour's position, such as sums of
            cell vectors.
cutoff      > 0.
slots       0 to 2^31.
near        [n, slots]; int64. The neighbours, then -1.
Rij         [n, slots, 3]; float64. The vectors r_j + offset - r_i, then 0.
count       [n]; int64. The number of pairs within the cutoff, also of those without room.
nearest     [n]; float64. The smallest |Rij|^2 in the row of the list; inf in an empty row.
)");

List list(View<const double, 2> positions, View<const int32_t, 2> list_neigh,
          View<const int32_t, 2> image, View<const double, 2> offset, double cutoff) {
  return {list_neigh.shape[0], list_neigh.shape[1], positions.data,  list_neigh.data, image.data,
          offset.data,         positions.shape[0],  offset.shape[0], cutoff};
}

int64_t cpu(View<const double, 2> positions, View<const int32_t, 2> list_neigh,
            View<const int32_t, 2> image, View<const double, 2> offset, double cutoff,
            int64_t slots, View<int64_t, 2> near, View<double, 3> Rij, View<int64_t, 1> count,
            View<double, 1> nearest) {
  return near_pairs_cpu(list(positions, list_neigh, image, offset, cutoff),
                        {slots, near.data, Rij.data, count.data, nearest.data});
}

const Kernel kCpu("near_pairs", cpu);

#ifndef CALCOPS_NO_CUDA
cudaError_t cuda(View<const double, 2> positions, View<const int32_t, 2> list_neigh,
                 View<const int32_t, 2> image, View<const double, 2> offset, double cutoff,
                 int64_t slots, View<int64_t, 2> near, View<double, 3> Rij, View<int64_t, 1> count,
                 View<double, 1> nearest, cudaStream_t stream) {
  return near_pairs_cuda(list(positions, list_neigh, image, offset, cutoff),
                         {slots, near.data, Rij.data, count.data, nearest.data}, stream);
}

const Kernel kCuda("near_pairs", cuda);
#endif

}  // namespace
}  // namespace calcops::ops::near_pairs
