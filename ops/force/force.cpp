// The force operators: their contract, and the way from a call to the kernels.
#include <calcops/operator.h>

#include "force/force.h"

namespace calcops::ops::force {
namespace {

// Composed of PyTorch's operators: it is made once for many calls, and they know every device and
// transform. The stable sort keeps the slots of a row in order.
Value neighbor_index(const Value* arguments) {
  const Value& list_neigh = arguments[0];
  const Value rows = list_neigh.size(1) + arguments[1];  // n + nghost
  const Value list =
      Value::call("aten::to.dtype", Value::call("aten::flatten.using_ints", list_neigh, 1),
                  Value::dtype_of(Type::kInt64));
  const Value is_named = Value::call("aten::logical_and", Value::call("aten::ge.Scalar", list, 0),
                                     Value::call("aten::lt.Scalar", list, rows));
  const Value names = Value::call("aten::where.ScalarOther", is_named, list, rows);
  const Value sorted = Value::call("aten::sort.stable", names, /*stable=*/true, /*dim=*/1);
  // Rows of zeros like `names`: under vmap searchsorted wants all of its tensors mapped.
  const Value all = Value::call(
      "aten::add.Tensor", Value::call("aten::new_zeros", names, Value::list(list_neigh.size(0), 1)),
      Value::call("aten::arange", rows, names.dtype(), nullptr, names.device()));
  const Value ends = Value::call("aten::searchsorted.Tensor", sorted[0], all,
                                 /*out_int32=*/false, /*right=*/true);
  const Value slots = Value::call("aten::where.ScalarOther",
                                  Value::call("aten::lt.Scalar", sorted[0], rows), sorted[1], -1);
  return Value::call("aten::to.dtype", Value::call("aten::cat", Value::list(ends, slots), 1),
                     Value::dtype_of(Type::kInt32));
}

const Composition kCompositions[] = {{"neighbor_index", &neighbor_index}};

const Contract kContract(R"(
force(Tensor list_neigh, Tensor dE, Tensor Ri_d, SymInt nghost=0, *,
      Tensor? neighbor_index=None) -> Tensor
  Force on every atom from a neighbour list, dE/dRi and dRi/dr.

  F_a = sum g over the slots that name atom a, minus sum g over a's own slots, with
  g = sum_c dE[c] Ri_d[c, :]. Rows of ghosts are to be added to the atoms they are images of.

  Differentiable to any order in dE and Ri_d, in reverse and in forward mode. What an empty slot
  holds in dE and Ri_d is never used, and every derivative there is exactly 0. Deterministic. An
  entry < -1 or >= n + nghost is an error on the CPU; on CUDA the row of its centre atom becomes
  NaN, and with CALCOPS_CHECK=1 in the environment (which synchronises) it is an error too.

force_virial(Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor Rij, SymInt nghost=0, *,
             Tensor? neighbor_index=None) -> (Tensor force, Tensor virial, Tensor atom_virial)
  Force, virial and per-atom virial from a neighbour list, dE/dRi, dRi/dr and pair vectors.

  virial[a][b] = sum g[a] Rij[b] over all pairs; atom_virial gives each pair's term to the neighbour
  j. Stress = -virial / volume.

  Differentiable to any order in dE, Ri_d and Rij through all three outputs, in reverse and in
  forward mode. Empty slots, wrong entries and determinism: as for calcops::force.

neighbor_index(Tensor list_neigh, SymInt nghost=0) -> Tensor
  Slots sorted by the atom that they name. Saves force and force_virial work on CUDA.

  Returns int32 [B, n + nghost + n*K], n*K < 2^31: first, for each atom j, where its part of what
  follows ends; then the slots i*K + s that name atom 0, those that name atom 1 and so on, each in
  rising order, and -1 for every slot that names none.

_force_virial(Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor? Rij, SymInt nghost, bool center, *,
              Tensor? neighbor_index=None) -> (Tensor, Tensor, Tensor)
  Both; without `center` what the pairs do to the neighbours alone.

_force_virial_backward(Tensor? grad_force, Tensor? grad_virial, Tensor? grad_atom_virial,
                       Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor? Rij, SymInt nghost,
                       bool center=True, bool[3] output_mask=[True, True, True], *,
                       Tensor? neighbor_index=None) -> (Tensor, Tensor, Tensor)
  Their gradients for dE, Ri_d and Rij.

list_neigh   [B, n, K] or [B, n, T, M] with K = T*M; int32 or int64;
             entries -1 or 0 <= j < n + nghost at frame, atom, slot;
             n*K < 2^31 slots a frame in neighbor_index;
             n*K < 2^32 slots a frame on CUDA. 0-based index of the neighbour within the frame:
             0 <= j < n a local atom, n <= j < n + nghost a ghost. -1 marks an empty slot, anywhere
             in a row. An atom may be named more than once, and may name itself (a periodic image).
dE           [B, n, K, 4], [B, n, 1, 4K] or [B, n, 4K]; float32 or float64. dE_tot/dRi, energy.
Ri_d         [B, n, 4K, 3] or [B, n, K, 4, 3]; like dE. dRi/dr_i, the derivative for the centre
             atom, 1/length.
Rij          [B, n, K, 3]; like dE. r_j - r_i, length.
nghost       0 to 2^40. Number of ghost atoms.
neighbor_index  [B, n + nghost + n*K] from neighbor_index(list_neigh, nghost); int32. Or None. Saves
             CUDA the work of finding out who names whom; the CPU has no use for it. Results are the
             same bit for bit. One of another list gives wrong forces on CUDA; with CALCOPS_CHECK=1
             it is an error on either device.
center       true where absent.
force        [B, n + nghost, 3]; like dE. Energy/length.
virial       [B, 3, 3]; like dE. Energy.
atom_virial  [B, n + nghost, 3, 3]; like dE. Energy.
linear       force(dE, Ri_d) + virial(dE, Ri_d, Rij) + atom_virial(dE, Ri_d, Rij)
vmap         joins B
)",
                         kCompositions);

// ---- from views to the structs of force.h -------------------------------------------------------

template <class Number, int rank>
using In = View<const Number, rank>;

template <class Real, class Index>
ForceInputs<Real, Index> inputs(In<Index, 3> list_neigh, In<Real, 4> dE, In<Real, 4> Ri_d,
                                In<Real, 4> Rij, int64_t nghost, bool center,
                                In<int32_t, 2> neighbor_index) {
  const auto [frames, natoms, neighbors] = list_neigh.shape;
  return {frames,  natoms,    nghost,   neighbors,          center, bool(Rij), list_neigh.data,
          dE.data, Ri_d.data, Rij.data, neighbor_index.data};
}

template <class Real, class Index>
int64_t cpu(In<Index, 3> list_neigh, In<Real, 4> dE, In<Real, 4> Ri_d, In<Real, 4> Rij,
            int64_t nghost, bool center, In<int32_t, 2> neighbor_index, View<Real, 3> force,
            View<Real, 3> virial, View<Real, 4> atom_virial) {
  return force_cpu(inputs<Real>(list_neigh, dE, Ri_d, Rij, nghost, center, neighbor_index),
                   {force.data, virial.data, atom_virial.data});
}

template <class Real, class Index>
int64_t backward_cpu(In<Real, 3> grad_force, In<Real, 3> grad_virial, In<Real, 4> grad_atom_virial,
                     In<Index, 3> list_neigh, In<Real, 4> dE, In<Real, 4> Ri_d, In<Real, 4> Rij,
                     int64_t nghost, bool center, In<int32_t, 2> neighbor_index,
                     View<Real, 4> grad_dE, View<Real, 4> grad_Ri_d, View<Real, 4> grad_Rij) {
  return force_backward_cpu(inputs<Real>(list_neigh, dE, Ri_d, Rij, nghost, center, neighbor_index),
                            {grad_force.data, grad_virial.data, grad_atom_virial.data},
                            {grad_dE.data, grad_Ri_d.data, grad_Rij.data});
}

const Kernel kCpu("_force_virial", cpu<float, int32_t>, cpu<float, int64_t>, cpu<double, int32_t>,
                  cpu<double, int64_t>);
const Kernel kBackwardCpu("_force_virial_backward", backward_cpu<float, int32_t>,
                          backward_cpu<float, int64_t>, backward_cpu<double, int32_t>,
                          backward_cpu<double, int64_t>);

#ifndef CALCOPS_NO_CUDA
template <class Real, class Index>
cudaError_t cuda(In<Index, 3> list_neigh, In<Real, 4> dE, In<Real, 4> Ri_d, In<Real, 4> Rij,
                 int64_t nghost, bool center, In<int32_t, 2> neighbor_index, View<Real, 3> force,
                 View<Real, 3> virial, View<Real, 4> atom_virial, Workspace& workspace,
                 cudaStream_t stream) {
  const auto in = inputs<Real>(list_neigh, dE, Ri_d, Rij, nghost, center, neighbor_index);
  if (!workspace.data) {
    workspace.bytes = force_cuda_workspace(in);
    return cudaSuccess;
  }
  return force_cuda(in, {force.data, virial.data, atom_virial.data}, workspace.data, stream);
}

template <class Real, class Index>
cudaError_t backward_cuda(In<Real, 3> grad_force, In<Real, 3> grad_virial,
                          In<Real, 4> grad_atom_virial, In<Index, 3> list_neigh, In<Real, 4> dE,
                          In<Real, 4> Ri_d, In<Real, 4> Rij, int64_t nghost, bool center,
                          In<int32_t, 2> neighbor_index, View<Real, 4> grad_dE,
                          View<Real, 4> grad_Ri_d, View<Real, 4> grad_Rij, cudaStream_t stream) {
  return force_backward_cuda(
      inputs<Real>(list_neigh, dE, Ri_d, Rij, nghost, center, neighbor_index),
      {grad_force.data, grad_virial.data, grad_atom_virial.data},
      {grad_dE.data, grad_Ri_d.data, grad_Rij.data}, stream);
}

const Kernel kCuda("_force_virial", cuda<float, int32_t>, cuda<float, int64_t>,
                   cuda<double, int32_t>, cuda<double, int64_t>);
const Kernel kBackwardCuda("_force_virial_backward", backward_cuda<float, int32_t>,
                           backward_cuda<float, int64_t>, backward_cuda<double, int32_t>,
                           backward_cuda<double, int64_t>);
#endif

}  // namespace
}  // namespace calcops::ops::force
