// The edge force operators: their contract, and the conversion of a call's views to the kernels'
// structs.
#include "edge_force/edge_force.h"

#include <calcops/no_loops.h>
#include <calcops/operator.h>

#include "force_terms.h"

namespace calcops::ops::edge_force {
namespace {

// Return the ends of the edges, sorted by atom. The contract below describes the result.
//
// It calls PyTorch's operators, which support every device and transform. Their speed is enough:
// one order serves many calls. The stable sort keeps the ends of a group in rising order.
Value edge_order(const Value* arguments) {
  // The numbers of the 2E ends and of their groups fit into int32.
  if (!(Value(int64_t(1) << 30) - arguments[0].size(1)).expect_at_least(1))
    refuse("calcops::edge_order", "edge_index", "of less than 2^30 edges", arguments[0].shape());
  const Value edge_index =
      Value::call("aten::to.dtype", arguments[0], Value::dtype_of(Type::kInt64));
  const Value& natoms = arguments[1];
  const Value is_atom =
      Value::call("aten::logical_and", Value::call("aten::ge.Scalar", edge_index, 0),
                  Value::call("aten::lt.Scalar", edge_index, natoms));
  const Value is_edge = Value::call("aten::all.dim", is_atom, /*dim=*/0, /*keepdim=*/true);

  // The ends of masked and wrong edges have the number `natoms`, so that they are sorted last.
  const Value atom_of_end =
      Value::call("aten::to.dtype",
                  Value::call("aten::flatten.using_ints",
                              Value::call("aten::where.ScalarOther", is_edge, edge_index, natoms)),
                  Value::dtype_of(sorted_type(natoms)));
  const Value sorted = Value::call("aten::sort.stable", atom_of_end, /*stable=*/true, /*dim=*/0);

  // Under vmap, all arguments of searchsorted must be batched and have rows. So the zeros derive
  // from `atom_of_end`, and both arguments have one row.
  const Value zeros = Value::call("aten::new_zeros", atom_of_end, Value::list(1, 1));
  const Value atoms = Value::call(
      "aten::add.Tensor", zeros,
      Value::call("aten::arange", natoms, atom_of_end.dtype(), nullptr, atom_of_end.device()));
  const Value rows = Value::call("aten::unsqueeze", sorted[0], 0);
  const Value group_stops = Value::call("aten::squeeze.dim",
                                        Value::call("aten::searchsorted.Tensor", rows, atoms,
                                                    /*out_int32=*/false, /*right=*/true),
                                        0);
  const Value ends = Value::call("aten::where.ScalarOther",
                                 Value::call("aten::lt.Scalar", sorted[0], natoms), sorted[1], -1);
  return Value::call("aten::to.dtype", Value::call("aten::cat", Value::list(group_stops, ends)),
                     Value::dtype_of(Type::kInt32));
}

const Composition kCompositions[] = {{"edge_order", &edge_order}};

// ---- derivatives: see force_terms.h -------------------------------------------------------------

// The operators of force_terms.h, with the arguments of a call that are no factors.
class Operators {
 public:
  static constexpr int kFactors = kUpstreams + 2;

  Operators(const Value* a, const int* at)
      : edge_index_(a[at[0]]),
        natoms_(a[at[1]]),
        batch_(at[2] < 0 ? Value() : a[at[2]]),
        nframes_(at[3] < 0 ? Value(1) : a[at[3]]),
        edge_order_(a[at[4]]) {}

  Value results(const Value* inputs, bool has_virial) const {
    return Value::call("_edge_force_virial", edge_index_, inputs[0],
                       has_virial ? inputs[1] : nullptr, natoms_, batch_, nframes_,
                       Value::list(true, has_virial, has_virial), edge_order_);
  }
  Value gradients(const Value* factors, FactorSet inputs) const {
    return Value::call("_edge_force_virial_backward", factors[0], factors[1], factors[2],
                       edge_index_, factors[3], factors[4], natoms_, batch_, nframes_,
                       Value::list(bool(inputs & 1), bool(inputs >> 1 & 1)), edge_order_);
  }

 private:
  Value edge_index_, natoms_, batch_, nframes_, edge_order_;
};

using EdgePlaces = Places<Operators::kFactors, 5>;
constexpr EdgePlaces kForce{{-1, -1, -1, 1, -1}, {0, 2, -1, -1, 3}, -1, 1, 0};
constexpr EdgePlaces kForceVirial{{-1, -1, -1, 1, 2}, {0, 3, 4, 5, 6}, -1, 3, 0};
constexpr EdgePlaces kAll{{-1, -1, -1, 1, 2}, {0, 3, 4, 5, 7}, 6, 3, 0};
constexpr EdgePlaces kBackward{{0, 1, 2, 4, 5}, {3, 6, 7, 8, 10}, 9, 2, kUpstreams};

const Derivative kDerivatives[] = {
    derivative_of<Operators, kForce>("edge_force"),
    derivative_of<Operators, kForceVirial>("edge_force_virial"),
    derivative_of<Operators, kAll>("_edge_force_virial"),
    derivative_of<Operators, kBackward>("_edge_force_virial_backward")};

// ---- checks -------------------------------------------------------------------------------------

constexpr char kName[] = "calcops::edge_force_virial";

// The CUDA kernels need the order. With CALCOPS_CHECK=1, refuse the order of another graph.
template <const EdgePlaces& op>
void make_order(Value* arguments, Value*) {
  const Value &edge_index = arguments[op.other[0]], &natoms = arguments[op.other[1]];
  Value& order = arguments[op.other[4]];
  if (order.is_none() && edge_index.is_on_cuda())
    order = Value::call("edge_order", edge_index, natoms);
  else if (!order.is_none() && order.wants_checks() &&
           !Value::call("aten::equal", order, Value::call("edge_order", edge_index, natoms)).item())
    refuse(kName, "edge_order", "of this edge_index and natoms", "that of others");
}

// Without `batch` all atoms are in frame 0, which must exist.
template <const EdgePlaces& op>
void check_frames(Value* arguments, Value* shapes) {
  const Value &natoms = arguments[op.other[1]], &batch = arguments[op.other[2]];
  const Value& nframes = arguments[op.other[3]];
  if (batch.is_none() && nframes.is_known(0) && !natoms.expect_equal(0))
    refuse(kName, "nframes", ">= 1 where `batch` is None", nframes);
  make_order<op>(arguments, shapes);
}

void check_all(Value* arguments, Value* shapes) {
  check_results(kName, "edge_vec", arguments[2], arguments[6]);
  check_frames<kAll>(arguments, shapes);
}

void check_backward(Value* arguments, Value* shapes) {
  check_vectors(kName, "edge_vec", arguments[5], arguments);
  check_frames<kBackward>(arguments, shapes);
}

const Check kChecks[] = {{"edge_force", &make_order<kForce>},
                         {"edge_force_virial", &check_frames<kForceVirial>},
                         {"_edge_force_virial", &check_all},
                         {"_edge_force_virial_backward", &check_backward}};

// ---- the contract -------------------------------------------------------------------------------

const Contract kContract(R"(
edge_force(Tensor edge_index, Tensor edge_gradient, SymInt natoms, *,
           Tensor? edge_order=None) -> Tensor force
  Force on every atom from the gradients of the energy along the edges of a graph.

  With g = edge_gradient of an edge, F_a is the sum of g over the edges with centre a, minus the sum
  of g over the edges with neighbour a.

  Differentiable to any order in edge_gradient, in reverse and forward mode. Values of a masked edge
  are never used, and every derivative there is exactly 0. Deterministic.

  An entry < -1 or >= natoms is an error on the CPU. On CUDA it makes the force on the atom at the
  edge's other end NaN, or that on atom 0 if neither entry names an atom; with CALCOPS_CHECK=1 in
  the environment, which makes each call wait for the GPU, it is an error there too.

edge_force_virial(Tensor edge_index, Tensor edge_gradient, Tensor edge_vec, SymInt natoms,
                  Tensor? batch=None, SymInt nframes=1, *,
                  Tensor? edge_order=None) -> (Tensor force, Tensor virial, Tensor atom_virial)
  Force, virial and per-atom virial from the gradients of the energy along the edges of a graph.

  With g = edge_gradient of an edge, virial[a][b] is the sum of -g[a] edge_vec[b] over the edges of
  a frame. atom_virial assigns each edge's term to the neighbour j. Stress is -virial / volume.

  Differentiable to any order in edge_gradient and edge_vec through all three outputs, in reverse
  and forward mode. Masked edges, wrong entries and determinism are as in calcops::edge_force. If an
  atom's force becomes NaN on CUDA, so do its atom_virial and the virial of its frame. A wrong frame
  in `batch` makes the virials of all frames NaN there.

edge_order(Tensor edge_index, SymInt natoms) -> Tensor
  Edges sorted by atom. Saves edge_force and edge_force_virial work on CUDA.

  Edge e has two ends: number e at its centre, number E + e at its neighbour.

  Returns int32 [natoms + 2E] in two parts. The second part [2E] groups the ends by atom, from atom
  0 on, each group in rising order. After the last group come -1 for both ends of every edge that is
  masked or wrong. The first part [natoms] says where each atom's group ends: the position in the
  second part just after it.

  E must be below 2^30. For a dynamic E, torch.export needs that bound: Dim("E", max=2**30 - 1).

_edge_force_virial(Tensor edge_index, Tensor edge_gradient, Tensor? edge_vec, SymInt natoms,
                   Tensor? batch=None, SymInt nframes=1, bool[3] output_mask=[True, True, True], *,
                   Tensor? edge_order=None) -> (Tensor force, Tensor virial, Tensor atom_virial)
  Force, virial and per-atom virial, or the force alone.

_edge_force_virial_backward(Tensor? grad_force, Tensor? grad_virial, Tensor? grad_atom_virial,
                            Tensor edge_index, Tensor edge_gradient, Tensor? edge_vec,
                            SymInt natoms, Tensor? batch=None, SymInt nframes=1,
                            bool[2] output_mask=[True, True], *,
                            Tensor? edge_order=None) -> (Tensor edge_gradient, Tensor edge_vec)
  Gradients for edge_gradient and edge_vec, from those for force, virial and atom_virial.

edge_index     [2, E]; int32 or int64; entries -1 or 0 <= i < natoms at edge.
               Row 0 is the centre i, row 1 the neighbour j, from 0; edges in any order. -1 in either
               row masks the edge.
edge_gradient  [E, 3]; float32 or float64. The derivative dE/d(edge_vec), energy/length, with
               edge_vec = r_j - r_i (plus the shift of a periodic image). The transpose of a
               contiguous [3, E] isn't copied on the CPU.
edge_vec       [E, 3]; like edge_gradient. The vector r_j - r_i (plus the shift), length.
natoms         0 to 2^40. Number of atoms in all frames, including ghosts.
batch          [natoms]; int32 or int64 read as int64; entries 0 <= frame < nframes at atom. The
               frame of each atom, in any order. None: all atoms are in frame 0. torch.vmap joins
               its items into one call if batch is given, for example as zeros.
nframes        0 to 2^40. Number of frames, at least 1 if batch is None and there are atoms.
edge_order     [natoms + 2E]; int32; E < 2^30.
               The result of edge_order(edge_index, natoms). None: each call on CUDA sorts the edges
               itself. CPU kernels ignore this argument. The order of another graph gives wrong
               forces on CUDA, or an error on either device with CALCOPS_CHECK=1.
force          [natoms, 3]; like edge_gradient. Energy/length.
virial         [nframes, 3, 3]; like edge_gradient. Energy.
atom_virial    [natoms, 3, 3]; like edge_gradient. Energy.
grad_force     [natoms, 3]; like edge_gradient.
grad_virial    [nframes, 3, 3]; like edge_gradient.
grad_atom_virial  [natoms, 3, 3]; like edge_gradient.
kernels        edge_force, edge_force_virial of _edge_force_virial
vmap           joins E, natoms, nframes
)",
                         kCompositions, kDerivatives, kChecks);

// ---- from views to the structs of edge_force.h --------------------------------------------------

template <class Number, int rank>
using In = View<const Number, rank>;
template <class Real>
using Vectors = Strided<const Real, 2, Layout::kTransposed>;

// Return whether vectors [E, 3] are the transpose of a contiguous [3, E].
template <class Real>
bool is_transposed(Vectors<Real> vectors) {
  return vectors && vectors.stride[1] != 1 && vectors.stride[0] == 1;
}

template <class Real, class Index>
EdgeInputs<Real, Index> inputs(In<Index, 2> edge_index, const Real* edge_gradient,
                               const Real* edge_vec, int64_t natoms, In<int64_t, 1> batch,
                               int64_t nframes, bool virial, In<int32_t, 1> edge_order) {
  return {natoms,   edge_index.shape[1], nframes,        virial, edge_index.data, edge_gradient,
          edge_vec, batch.data,          edge_order.data};
}

template <class Real, class Index>
int64_t cpu(In<Index, 2> edge_index, Vectors<Real> edge_gradient, Vectors<Real> edge_vec,
            int64_t natoms, In<int64_t, 1> batch, int64_t nframes, In<int32_t, 1> edge_order,
            View<Real, 2> force, View<Real, 3> virial, View<Real, 3> atom_virial) {
  EdgeInputs<Real, Index> in = inputs(edge_index, edge_gradient.data, edge_vec.data, natoms, batch,
                                      nframes, bool(virial), edge_order);
  in.gradient_is_transposed = is_transposed(edge_gradient);
  in.vec_is_transposed = is_transposed(edge_vec);
  return edge_force_cpu(in, {force.data, virial.data, atom_virial.data});
}

template <class Real, class Index>
int64_t backward_cpu(In<Real, 2> grad_force, In<Real, 3> grad_virial, In<Real, 3> grad_atom_virial,
                     In<Index, 2> edge_index, In<Real, 2> edge_gradient, In<Real, 2> edge_vec,
                     int64_t natoms, In<int64_t, 1> batch, int64_t nframes,
                     In<int32_t, 1> edge_order, View<Real, 2> grad_gradient,
                     View<Real, 2> grad_vec) {
  return edge_force_backward_cpu(inputs(edge_index, edge_gradient.data, edge_vec.data, natoms,
                                        batch, nframes, bool(edge_vec), edge_order),
                                 {grad_force.data, grad_virial.data, grad_atom_virial.data},
                                 {grad_gradient.data, grad_vec.data});
}

const Kernel kCpu("_edge_force_virial", cpu<float, int32_t>, cpu<float, int64_t>,
                  cpu<double, int32_t>, cpu<double, int64_t>);
const Kernel kBackwardCpu("_edge_force_virial_backward", backward_cpu<float, int32_t>,
                          backward_cpu<float, int64_t>, backward_cpu<double, int32_t>,
                          backward_cpu<double, int64_t>);

#ifndef CALCOPS_NO_CUDA
template <class Real, class Index>
cudaError_t cuda(In<Index, 2> edge_index, In<Real, 2> edge_gradient, In<Real, 2> edge_vec,
                 int64_t natoms, In<int64_t, 1> batch, int64_t nframes, In<int32_t, 1> edge_order,
                 View<Real, 2> force, View<Real, 3> virial, View<Real, 3> atom_virial,
                 Workspace& workspace, cudaStream_t stream) {
  const auto in = inputs(edge_index, edge_gradient.data, edge_vec.data, natoms, batch, nframes,
                         bool(virial), edge_order);
  if (!workspace.data) {
    workspace.bytes = edge_force_cuda_workspace(in);
    return cudaSuccess;
  }
  return edge_force_cuda(in, {force.data, virial.data, atom_virial.data}, workspace.data, stream);
}

template <class Real, class Index>
cudaError_t backward_cuda(In<Real, 2> grad_force, In<Real, 3> grad_virial,
                          In<Real, 3> grad_atom_virial, In<Index, 2> edge_index,
                          In<Real, 2> edge_gradient, In<Real, 2> edge_vec, int64_t natoms,
                          In<int64_t, 1> batch, int64_t nframes, In<int32_t, 1> edge_order,
                          View<Real, 2> grad_gradient, View<Real, 2> grad_vec,
                          cudaStream_t stream) {
  return edge_force_backward_cuda(inputs(edge_index, edge_gradient.data, edge_vec.data, natoms,
                                         batch, nframes, bool(edge_vec), edge_order),
                                  {grad_force.data, grad_virial.data, grad_atom_virial.data},
                                  {grad_gradient.data, grad_vec.data}, stream);
}

const Kernel kCuda("_edge_force_virial", cuda<float, int32_t>, cuda<float, int64_t>,
                   cuda<double, int32_t>, cuda<double, int64_t>);
const Kernel kBackwardCuda("_edge_force_virial_backward", backward_cuda<float, int32_t>,
                           backward_cuda<float, int64_t>, backward_cuda<double, int32_t>,
                           backward_cuda<double, int64_t>);
#endif

}  // namespace
}  // namespace calcops::ops::edge_force
