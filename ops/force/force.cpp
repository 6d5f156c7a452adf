// The force operators: their contract, and the conversion of a call's views to the kernels'
// structs.
#include "force/force.h"

#include <calcops/no_loops.h>
#include <calcops/operator.h>

#include "force_terms.h"

namespace calcops::ops::force {
namespace {

// Return the slots, sorted by the atom that they name. The contract below describes the result.
//
// It calls PyTorch's operators, which support every device and transform. Their speed is enough:
// one index serves many calls. The stable sort keeps the slots of a group in rising order.
Value neighbor_index(const Value* arguments) {
  const Value& list_neigh = arguments[0];
  // The numbers of the slots are int32.
  Value slots_a_frame = list_neigh.size(1) * list_neigh.size(2);
  if (list_neigh.dim() == 4) slots_a_frame = slots_a_frame * list_neigh.size(3);
  if (!(Value(int64_t(1) << 31) - slots_a_frame).expect_at_least(1))
    refuse("calcops::neighbor_index", "list_neigh", "of less than 2^31 slots a frame",
           slots_a_frame);
  const Value atom_count = list_neigh.size(1) + arguments[1];  // n + nghost
  const Value entries =
      Value::call("aten::to.dtype", Value::call("aten::flatten.using_ints", list_neigh, 1),
                  Value::dtype_of(Type::kInt64));
  const Value is_atom = Value::call("aten::logical_and", Value::call("aten::ge.Scalar", entries, 0),
                                    Value::call("aten::lt.Scalar", entries, atom_count));

  // Empty slots and wrong entries have the number `atom_count`, so that they are sorted last.
  const Value atom_of_slot = Value::call(
      "aten::to.dtype", Value::call("aten::where.ScalarOther", is_atom, entries, atom_count),
      Value::dtype_of(sorted_type(atom_count)));
  const Value sorted = Value::call("aten::sort.stable", atom_of_slot, /*stable=*/true, /*dim=*/1);

  // Under vmap, all arguments of searchsorted must be batched, so the zeros derive from
  // `atom_of_slot`.
  const Value zeros =
      Value::call("aten::new_zeros", atom_of_slot, Value::list(list_neigh.size(0), 1));
  const Value atoms = Value::call("aten::add.Tensor", zeros,
                                  Value::call("aten::arange", atom_count, atom_of_slot.dtype(),
                                              nullptr, atom_of_slot.device()));
  const Value group_stops = Value::call("aten::searchsorted.Tensor", sorted[0], atoms,
                                        /*out_int32=*/false, /*right=*/true);
  const Value slots =
      Value::call("aten::where.ScalarOther", Value::call("aten::lt.Scalar", sorted[0], atom_count),
                  sorted[1], -1);
  return Value::call("aten::to.dtype", Value::call("aten::cat", Value::list(group_stops, slots), 1),
                     Value::dtype_of(Type::kInt32));
}

const Composition kCompositions[] = {{"neighbor_index", &neighbor_index}};

// ---- derivatives: see force_terms.h -------------------------------------------------------------

// The operators of force_terms.h, with the arguments of a call that are no factors.
class Operators {
 public:
  static constexpr int kFactors = kUpstreams + 3;

  Operators(const Value* a, const int* at)
      : list_neigh_(a[at[0]]),
        nghost_(a[at[1]]),
        center_(at[2] < 0 ? Value(true) : a[at[2]]),
        neighbor_index_(a[at[3]]) {}

  Value results(const Value* inputs, bool has_virial) const {
    return Value::call("_force_virial", list_neigh_, inputs[0], inputs[1],
                       has_virial ? inputs[2] : nullptr, nghost_, center_,
                       Value::list(true, has_virial, has_virial), neighbor_index_);
  }
  Value gradients(const Value* factors, FactorSet inputs) const {
    const Value mask = Value::list(bool(inputs & 1), bool(inputs >> 1 & 1), bool(inputs >> 2 & 1));
    return Value::call("_force_virial_backward", factors[0], factors[1], factors[2], list_neigh_,
                       factors[3], factors[4], factors[5], nghost_, center_, mask, neighbor_index_);
  }

 private:
  Value list_neigh_, nghost_, center_, neighbor_index_;
};

using ListPlaces = Places<Operators::kFactors, 4>;
constexpr ListPlaces kForce{{-1, -1, -1, 1, 2, -1}, {0, 3, -1, 4}, -1, 1, 0};
constexpr ListPlaces kForceVirial{{-1, -1, -1, 1, 2, 3}, {0, 4, -1, 5}, -1, 3, 0};
constexpr ListPlaces kAll{{-1, -1, -1, 1, 2, 3}, {0, 4, 5, 7}, 6, 3, 0};
constexpr ListPlaces kBackward{{0, 1, 2, 4, 5, 6}, {3, 7, 8, 10}, 9, 3, kUpstreams};

const Derivative kDerivatives[] = {derivative_of<Operators, kForce>("force"),
                                   derivative_of<Operators, kForceVirial>("force_virial"),
                                   derivative_of<Operators, kAll>("_force_virial"),
                                   derivative_of<Operators, kBackward>("_force_virial_backward")};

constexpr char kName[] = "calcops::force_virial";

// With CALCOPS_CHECK=1, refuse the index of another list.
template <const ListPlaces& op>
void check_index(Value* arguments, Value*) {
  const Value &list_neigh = arguments[op.other[0]], &nghost = arguments[op.other[1]];
  const Value& index = arguments[op.other[3]];
  if (index.is_none() || !index.wants_checks()) return;
  const Value own = Value::call("neighbor_index", list_neigh, nghost);
  if (!Value::call("aten::equal", index, own).item())
    refuse(kName, "neighbor_index", "of this list_neigh and nghost", "that of others");
}

void check_all(Value* arguments, Value* shapes) {
  check_results(kName, "Rij", arguments[3], arguments[6]);
  check_index<kAll>(arguments, shapes);
}

void check_backward(Value* arguments, Value* shapes) {
  check_vectors(kName, "Rij", arguments[6], arguments);
  check_index<kBackward>(arguments, shapes);
}

const Check kChecks[] = {{"force", &check_index<kForce>},
                         {"force_virial", &check_index<kForceVirial>},
                         {"_force_virial", &check_all},
                         {"_force_virial_backward", &check_backward}};

// ---- the contract -------------------------------------------------------------------------------

const Contract kContract(R"(
force(Tensor list_neigh, Tensor dE, Tensor Ri_d, SymInt nghost=0, *,
      Tensor? neighbor_index=None) -> Tensor force
  Force on every atom from a neighbour list, dE/dRi and dRi/dr.

  Each filled slot pairs the row's atom with the atom that the slot names. The pair puts the force
  g = sum_c dE[c] Ri_d[c, :] on the named atom, and -g on the row's atom. F_a is the sum of g over
  the slots that name atom a, minus the sum of g over the slots in row a. Adding the force on a
  ghost to the atom that it mirrors is left to the caller.

  Differentiable to any order in dE and Ri_d, in reverse and forward mode. Values of dE and Ri_d in
  an empty slot are never used, and every derivative there is exactly 0. Deterministic.

  A list entry < -1 or >= n + nghost is an error on the CPU. On CUDA it makes the force on the row's
  atom NaN; with CALCOPS_CHECK=1 in the environment, which makes each call wait for the GPU, it is
  an error there too.

force_virial(Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor Rij, SymInt nghost=0, *,
             Tensor? neighbor_index=None) -> (Tensor force, Tensor virial, Tensor atom_virial)
  Force, virial and per-atom virial from a neighbour list, dE/dRi, dRi/dr and pair vectors.

  g is the force of a pair, as in calcops::force. virial[a][b] is the sum of g[a] Rij[b] over all
  pairs of a frame. atom_virial assigns each pair's term to the neighbour j. Stress is
  -virial / volume.

  Differentiable to any order in dE, Ri_d and Rij through all three outputs, in reverse and forward
  mode. Empty slots, wrong entries and determinism are as in calcops::force. If an atom's force
  becomes NaN on CUDA, so do its atom_virial and the virial of its frame.

neighbor_index(Tensor list_neigh, SymInt nghost=0) -> Tensor
  Slots sorted by the atom that they name. Saves force and force_virial work on CUDA.

  Slot s of row i has the number i*K + s.

  Returns int32 [B, n + nghost + n*K] in two parts. The second part [B, n*K] groups the slots by the
  atom that they name, from atom 0 on, each group in rising order. After the last group comes a -1
  for every slot that names no atom. The first part [B, n + nghost] says where each atom's group
  ends: the position in the second part just after it.

_force_virial(Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor? Rij, SymInt nghost,
              bool center=True, bool[3] output_mask=[True, True, True], *,
              Tensor? neighbor_index=None) -> (Tensor force, Tensor virial, Tensor atom_virial)
  Force, virial and per-atom virial, or the force alone. Without `center`, atoms receive no force
  from their own rows.

_force_virial_backward(Tensor? grad_force, Tensor? grad_virial, Tensor? grad_atom_virial,
                       Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor? Rij, SymInt nghost,
                       bool center=True, bool[3] output_mask=[True, True, True], *,
                       Tensor? neighbor_index=None) -> (Tensor dE, Tensor Ri_d, Tensor Rij)
  Gradients for dE, Ri_d and Rij, from those for force, virial and atom_virial.

list_neigh   [B, n, K] or [B, n, T, M] with K = T*M; int32 or int64;
             entries -1 or 0 <= j < n + nghost at frame, atom, slot;
             n*K < 2^32 on CUDA. Index of the neighbour within the frame, from 0:
             the n local atoms, then the nghost ghosts. -1 marks an empty slot, anywhere in a row.
             A row may name an atom several times, even its own (a periodic image).
dE           [B, n, K, 4], [B, n, 1, 4K] or [B, n, 4K]; float32 or float64. The derivative
             dE_tot/dRi, energy.
Ri_d         [B, n, 4K, 3] or [B, n, K, 4, 3]; like dE. The derivative dRi/dr_i for the centre
             atom, 1/length.
Rij          [B, n, K, 3]; like dE. The vector r_j - r_i, length.
nghost       0 to 2^40. Number of ghost atoms.
neighbor_index  [B, n + nghost + n*K]; int32; n*K < 2^31.
             The result of neighbor_index(list_neigh, nghost), or None. It saves CUDA kernels the
             search for the slots that name an atom; CPU kernels ignore it. Results are the same bit
             for bit with and without it. The index of another list gives wrong forces on CUDA, or
             an error on either device with CALCOPS_CHECK=1.
center       Whether atoms receive force from their own rows.
force        [B, n + nghost, 3]; like dE. Energy/length.
virial       [B, 3, 3]; like dE. Energy.
atom_virial  [B, n + nghost, 3, 3]; like dE. Energy.
grad_force   [B, n + nghost, 3]; like dE.
grad_virial  [B, 3, 3]; like dE.
grad_atom_virial  [B, n + nghost, 3, 3]; like dE.
kernels      force, force_virial of _force_virial
vmap         joins B
)",
                         kCompositions, kDerivatives, kChecks);

// ---- from views to the structs of force.h -------------------------------------------------------

template <class Number, int rank>
using In = View<const Number, rank>;

template <class Real, class Index>
ForceInputs<Real, Index> inputs(In<Index, 3> list_neigh, In<Real, 4> dE, In<Real, 4> Ri_d,
                                In<Real, 4> Rij, int64_t nghost, bool center, bool virial,
                                In<int32_t, 2> neighbor_index) {
  const auto [frames, natoms, neighbors] = list_neigh.shape;
  return {frames,  natoms,    nghost,   neighbors,          center, virial, list_neigh.data,
          dE.data, Ri_d.data, Rij.data, neighbor_index.data};
}

template <class Real, class Index>
int64_t cpu(In<Index, 3> list_neigh, In<Real, 4> dE, In<Real, 4> Ri_d, In<Real, 4> Rij,
            int64_t nghost, bool center, In<int32_t, 2> neighbor_index, View<Real, 3> force,
            View<Real, 3> virial, View<Real, 4> atom_virial) {
  return force_cpu(
      inputs<Real>(list_neigh, dE, Ri_d, Rij, nghost, center, bool(virial), neighbor_index),
      {force.data, virial.data, atom_virial.data});
}

template <class Real, class Index>
int64_t backward_cpu(In<Real, 3> grad_force, In<Real, 3> grad_virial, In<Real, 4> grad_atom_virial,
                     In<Index, 3> list_neigh, In<Real, 4> dE, In<Real, 4> Ri_d, In<Real, 4> Rij,
                     int64_t nghost, bool center, In<int32_t, 2> neighbor_index,
                     View<Real, 4> grad_dE, View<Real, 4> grad_Ri_d, View<Real, 4> grad_Rij) {
  return force_backward_cpu(
      inputs<Real>(list_neigh, dE, Ri_d, Rij, nghost, center, bool(Rij), neighbor_index),
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
  const auto in =
      inputs<Real>(list_neigh, dE, Ri_d, Rij, nghost, center, bool(virial), neighbor_index);
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
      inputs<Real>(list_neigh, dE, Ri_d, Rij, nghost, center, bool(Rij), neighbor_index),
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
