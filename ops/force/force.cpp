// The force operators as PyTorch sees them: checks, devices, derivatives, registration.
#include "force/force.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <tuple>

#include "autograd.h"
#include "expect.h"

#ifndef CALCOPS_NO_CUDA
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace calcops {
namespace {

using at::Tensor;
using c10::SymInt;
using OptTensor = std::optional<Tensor>;
using Mask = std::array<bool, 3>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

constexpr const char* kForce = "calcops::force";
constexpr const char* kNeighborForce = "calcops::_neighbor_force";
constexpr const char* kForceVirial = "calcops::force_virial";
constexpr const char* kNeighborIndex = "calcops::neighbor_index";
constexpr const char* kBackward = "calcops::_force_virial_backward";

// ---- checks, the same for every device ----------------------------------------------------------

struct Sizes {
  SymInt frames, natoms, rows, neighbors;  // B, n, n + nghost, K
};

Sizes check_list(const char* op, const Tensor& list_neigh, const SymInt& nghost) {
  expect_dtype({op, "list_neigh", list_neigh}, {at::kInt, at::kLong}, "int32 or int64");
  expect(op, "list_neigh", list_neigh.dim() == 3 || list_neigh.dim() == 4, list_neigh.sym_sizes(),
         "of shape [B, n, K] or [B, n, T, M]");
  expect(op, "nghost", nghost.sym_ge(0), nghost, ">= 0");
  const SymInt B = list_neigh.sym_size(0), n = list_neigh.sym_size(1);
  const SymInt K = list_neigh.dim() == 3 ? list_neigh.sym_size(2)
                                         : list_neigh.sym_size(2) * list_neigh.sym_size(3);
  return {B, n, n + nghost, K};
}

Sizes check_inputs(const char* op, const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d,
                   const Tensor& Rij, const SymInt& nghost, const Tensor& neighbor_index) {
  const Arg list{op, "list_neigh", list_neigh}, energy{op, "dE", dE};
  const Sizes sizes = check_list(op, list_neigh, nghost);
  const SymInt &B = sizes.frames, &n = sizes.natoms, &K = sizes.neighbors;

  expect_dtype(energy, {at::kFloat, at::kDouble}, "float32 or float64");
  expect_device(energy, list);
  const bool row = dE.dim() == 4 && dE.sym_size(2) == 1;
  expect(op, "dE",
         dE.dim() == 3 ? same_shape(dE.sym_sizes(), {B, n, K * 4})
         : row         ? same_shape(dE.sym_sizes(), {B, n, 1, K * 4})
                       : same_shape(dE.sym_sizes(), {B, n, K, 4}),
         dE.sym_sizes(), "of shape [B, n, K, 4], [B, n, 1, 4K] or [B, n, 4K], [B, n, K] = ",
         c10::SymIntArrayRef{B, n, K});

  expect_dtype_and_device({op, "Ri_d", Ri_d}, energy);
  expect(op, "Ri_d",
         Ri_d.dim() == 5 ? same_shape(Ri_d.sym_sizes(), {B, n, K, 4, 3})
                         : same_shape(Ri_d.sym_sizes(), {B, n, K * 4, 3}),
         Ri_d.sym_sizes(),
         "of shape [B, n, 4K, 3] or [B, n, K, 4, 3], [B, n, K] = ", c10::SymIntArrayRef{B, n, K});
  if (Rij.defined()) {
    expect_dtype_and_device({op, "Rij", Rij}, energy);
    expect(op, "Rij", same_shape(Rij.sym_sizes(), {B, n, K, 3}), Rij.sym_sizes(),
           "of shape [B, n, K, 3], [B, n, K] = ", c10::SymIntArrayRef{B, n, K});
  }
  if (neighbor_index.defined()) {
    const Arg index{op, "neighbor_index", neighbor_index};
    expect_dtype(index, {at::kInt}, "int32");
    expect_device(index, list);
    expect(op, "neighbor_index", same_shape(neighbor_index.sym_sizes(), {B, sizes.rows + n * K}),
           neighbor_index.sym_sizes(),
           "of shape [B, n + nghost + n*K] from neighbor_index(list_neigh, nghost), [B, n, K, "
           "nghost] = ",
           c10::SymIntArrayRef{B, n, K, nghost});
  }
  return sizes;
}

void check_upstream(const char* name, const Tensor& gradient, const Tensor& dE,
                    c10::SymIntArrayRef shape) {
  if (!gradient.defined()) return;
  expect_dtype_and_device({kBackward, name, gradient}, {kBackward, "dE", dE});
  expect(kBackward, name, same_shape(gradient.sym_sizes(), shape), gradient.sym_sizes(),
         "of shape ", shape);
}

// ---- the kernels --------------------------------------------------------------------------------

template <class Function>
void with_types(const Tensor& list_neigh, const Tensor& dE, Function function) {
  const auto with_index = [&](auto real) {
    list_neigh.scalar_type() == at::kInt ? function(real, int32_t()) : function(real, int64_t());
  };
  dE.scalar_type() == at::kFloat ? with_index(float()) : with_index(double());
}

template <class Real>
Real* pointer(const Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr<Real>() : nullptr;
}

Tensor contiguous(const Tensor& tensor) { return tensor.defined() ? tensor.contiguous() : tensor; }

// Composed of PyTorch's operators: it is made once for many calls, and they know every device and
// transform. The stable sort keeps the slots of a row in order.
Tensor make_neighbor_index(const Tensor& list_neigh, const SymInt& nghost) {
  const Sizes sizes = check_list(kNeighborIndex, list_neigh, nghost);
  const SymInt slots = sizes.natoms * sizes.neighbors;
  expect(kNeighborIndex, "list_neigh", slots.sym_lt(int64_t(1) << 31), slots,
         "of less than 2^31 slots a frame");
  const Tensor list = list_neigh.flatten(1);
  const Tensor named = list.ge(0).logical_and(list.lt(sizes.rows));
  const auto [names, order] = at::where(named, list, c10::Scalar(sizes.rows))
                                  .sort(/*stable=*/true, 1, /*descending=*/false);
  const Tensor rows =
      at::arange(sizes.rows, names.options()).expand_symint({sizes.frames, sizes.rows});
  const Tensor ends = at::searchsorted(names, rows.contiguous(),
                                       /*out_int32=*/true, /*right=*/true);
  const Tensor named_slots = at::where(names.lt(sizes.rows), order, -1).to(at::kInt);
  return at::cat({ends, named_slots}, 1);
}

// One call's inputs, contiguous, and the struct of pointers into them.
struct Contiguous {
  const char* op;
  Tensor list_neigh, dE, Ri_d, Rij, neighbor_index;
  int64_t frames, natoms, neighbors, nghost;
  bool center;

  Contiguous(const char* op, const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d,
             const Tensor& Rij, const Tensor& neighbor_index, const Sizes& sizes,
             const SymInt& nghost, bool center)
      : op(op),
        list_neigh(list_neigh.contiguous()),
        dE(dE.contiguous()),
        Ri_d(Ri_d.contiguous()),
        Rij(contiguous(Rij)),
        neighbor_index(contiguous(neighbor_index)),
        frames(sizes.frames.expect_int()),
        natoms(sizes.natoms.expect_int()),
        neighbors(sizes.neighbors.expect_int()),
        nghost(nghost.expect_int()),
        center(center) {}

  template <class Real, class Index>
  ForceInputs<Real, Index> inputs() const {
    return {frames,
            natoms,
            nghost,
            neighbors,
            center,
            /*virial=*/Rij.defined(),
            list_neigh.const_data_ptr<Index>(),
            dE.const_data_ptr<Real>(),
            Ri_d.const_data_ptr<Real>(),
            Rij.defined() ? Rij.const_data_ptr<Real>() : nullptr,
            neighbor_index.defined() ? neighbor_index.const_data_ptr<int32_t>() : nullptr};
  }

  void expect_entries(int64_t bad) const {
    if (bad < 0) return;
    const int64_t atom = bad / neighbors;
    TORCH_CHECK(false, op,
                ": expected `list_neigh` entries -1 or 0 <= j < n + nghost = ", natoms + nghost,
                ", got ", list_neigh.flatten()[bad].item<int64_t>(), " at frame ", atom / natoms,
                ", atom ", atom % natoms, ", slot ", bad % neighbors);
  }

  // What CALCOPS_CHECK=1 asks for, at the price of a synchronisation on CUDA.
  void check_contents() const {
    const char* wanted = std::getenv("CALCOPS_CHECK");
    if (!wanted || std::strcmp(wanted, "1") != 0) return;
#ifndef CALCOPS_NO_CUDA
    if (list_neigh.is_cuda()) {
      if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None)
        return;
      const Tensor bad = list_neigh.lt(-1).logical_or(list_neigh.ge(natoms + nghost));
      const Tensor positions = bad.flatten().nonzero();
      if (positions.numel() > 0) expect_entries(positions[0].item<int64_t>());
    }
#endif
    if (neighbor_index.defined())
      TORCH_CHECK(at::equal(neighbor_index, make_neighbor_index(list_neigh, nghost)), op,
                  ": expected `neighbor_index` of this list_neigh and nghost, got that of others");
  }
};

// What the keys CPU, CUDA and Meta hold: [force] or [force, virial, atom_virial].
tensor_list forward(const char* op, const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d,
                    const Tensor& Rij, const SymInt& nghost, const Tensor& neighbor_index,
                    bool center) {
  const Sizes sizes = check_inputs(op, list_neigh, dE, Ri_d, Rij, nghost, neighbor_index);
  const SymInt &B = sizes.frames, &rows = sizes.rows;
  tensor_list out = {at::empty_symint({B, rows, 3}, dE.options())};
  if (Rij.defined()) {
    out.push_back(at::empty_symint({B, 3, 3}, dE.options()));
    out.push_back(at::empty_symint({B, rows, 3, 3}, dE.options()));
  }
  if (dE.is_meta()) return out;
  const Contiguous from(op, list_neigh, dE, Ri_d, Rij, neighbor_index, sizes, nghost, center);
  from.check_contents();
  with_types(list_neigh, dE, [&](auto real, auto index) {
    using Real = decltype(real);
    const auto in = from.inputs<Real, decltype(index)>();
    const ForceOutputs<Real> to{pointer<Real>(out[0]), in.virial ? pointer<Real>(out[1]) : nullptr,
                                in.virial ? pointer<Real>(out[2]) : nullptr};
    if (dE.is_cpu()) return from.expect_entries(force_cpu(in, to));
#ifndef CALCOPS_NO_CUDA
    const c10::DeviceGuard guard(dE.device());
    const Tensor workspace = at::empty({force_cuda_workspace(in)}, dE.options().dtype(at::kByte));
    C10_CUDA_CHECK(
        force_cuda(in, to, workspace.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream()));
#endif
  });
  return out;
}

// Gradients of dE, Ri_d and Rij; one that is not wanted has no elements.
tensor_list backward(const Tensor& grad_force, const Tensor& grad_virial,
                     const Tensor& grad_atom_virial, const Tensor& list_neigh, const Tensor& dE,
                     const Tensor& Ri_d, const Tensor& Rij, const SymInt& nghost, bool center,
                     Mask mask) {
  const Sizes sizes = check_inputs(kBackward, list_neigh, dE, Ri_d, Rij, nghost, Tensor());
  const SymInt &B = sizes.frames, &rows = sizes.rows;
  check_upstream("grad_force", grad_force, dE, {B, rows, 3});
  check_upstream("grad_virial", grad_virial, dE, {B, 3, 3});
  check_upstream("grad_atom_virial", grad_atom_virial, dE, {B, rows, 3, 3});
  const bool virial = grad_virial.defined() || grad_atom_virial.defined();
  expect(kBackward, "Rij", Rij.defined() || !(virial || mask[2]), "none",
         "where a virial or Rij has a gradient");
  tensor_list out;
  for (const auto& [wanted, input] : {std::pair(mask[0], dE), {mask[1], Ri_d}, {mask[2], Rij}})
    out.push_back(wanted ? at::empty_symint(input.sym_sizes(), input.options())
                         : at::empty({0}, dE.options()));
  if (dE.is_meta()) return out;
  const Contiguous from(kBackward, list_neigh, dE, Ri_d, Rij, Tensor(), sizes, nghost, center);
  from.check_contents();
  const Tensor gF = contiguous(grad_force), gV = contiguous(grad_virial),
               gAV = contiguous(grad_atom_virial);
  with_types(list_neigh, dE, [&](auto real, auto index) {
    using Real = decltype(real);
    const auto in = from.inputs<Real, decltype(index)>();
    const ForceUpstream<Real> upstream{pointer<Real>(gF), pointer<Real>(gV), pointer<Real>(gAV)};
    const ForceGradients<Real> to{mask[0] ? pointer<Real>(out[0]) : nullptr,
                                  mask[1] ? pointer<Real>(out[1]) : nullptr,
                                  mask[2] ? pointer<Real>(out[2]) : nullptr};
    if (dE.is_cpu()) return from.expect_entries(force_backward_cpu(in, upstream, to));
#ifndef CALCOPS_NO_CUDA
    const c10::DeviceGuard guard(dE.device());
    C10_CUDA_CHECK(force_backward_cuda(in, upstream, to, c10::cuda::getCurrentCUDAStream()));
#endif
  });
  return out;
}

// ---- derivatives --------------------------------------------------------------------------------
// The force is linear in dE and in Ri_d, the virial in dE, in Ri_d and in Rij, and the backward in
// each upstream and in the same inputs. So every derivative of either operator is a sum of calls of
// the two with one argument replaced; where Rij is replaced the force takes no part.

OptTensor optional(const Tensor& tensor) {
  return tensor.defined() ? OptTensor(tensor) : std::nullopt;
}

Tensor undefined_if_none(const OptTensor& tensor) { return tensor.value_or(Tensor()); }

template <class Signature>
auto dispatched(const char* op) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(op, "").typed<Signature>();
}

// Through the dispatcher: [force], or [force, virial, atom_virial] where Rij is defined.
tensor_list call_forward(const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d,
                         const Tensor& Rij, const SymInt& nghost, const Tensor& neighbor_index,
                         bool center) {
  using Force = Tensor(const Tensor&, const Tensor&, const Tensor&, SymInt, const OptTensor&);
  using NeighborForce = Tensor(const Tensor&, const Tensor&, const Tensor&, SymInt);
  using ForceVirial =
      Three(const Tensor&, const Tensor&, const Tensor&, const Tensor&, SymInt, const OptTensor&);
  static const auto force = dispatched<Force>(kForce);
  static const auto neighbor_force = dispatched<NeighborForce>(kNeighborForce);
  static const auto force_virial = dispatched<ForceVirial>(kForceVirial);
  if (!Rij.defined() && !center) return {neighbor_force.call(list_neigh, dE, Ri_d, nghost)};
  const OptTensor index = optional(neighbor_index);
  if (!Rij.defined()) return {force.call(list_neigh, dE, Ri_d, nghost, index)};
  auto [F, W, atom_W] = force_virial.call(list_neigh, dE, Ri_d, Rij, nghost, index);
  if (!center) F = neighbor_force.call(list_neigh, dE, Ri_d, nghost);
  return {F, W, atom_W};
}

tensor_list call_backward(const tensor_list& upstream, const Tensor& list_neigh, const Tensor& dE,
                          const Tensor& Ri_d, const Tensor& Rij, const SymInt& nghost, bool center,
                          Mask mask) {
  using Signature = Three(const OptTensor&, const OptTensor&, const OptTensor&, const Tensor&,
                          const Tensor&, const Tensor&, const OptTensor&, SymInt, bool, Mask);
  static const auto op = dispatched<Signature>(kBackward);
  auto [dE_grad, Ri_d_grad, Rij_grad] =
      op.call(optional(upstream[0]), optional(upstream[1]), optional(upstream[2]), list_neigh, dE,
              Ri_d, optional(Rij), nghost, center, mask);
  return {dE_grad, Ri_d_grad, Rij_grad};
}

// sums[i] += terms[i] where wanted, undefined tensors being zero.
void add(tensor_list& sums, const tensor_list& terms, Mask wanted = {true, true, true}) {
  for (size_t i = 0; i < terms.size(); ++i)
    if (wanted[i] && terms[i].defined())
      sums[i] = sums[i].defined() ? sums[i].add(terms[i]) : terms[i];
}

// One call of force, _neighbor_force or force_virial; inputs: list_neigh, dE, Ri_d, Rij,
// neighbor_index.
struct Forward {
  static constexpr const char* kNode = "ForceBackward";
  SymInt nghost;
  bool center;

  template <class Visit>
  void visit(Visit&& visit) {
    visit(nghost);
    visit(center);
  }

  tensor_list forward(const tensor_list& in) const {
    return call_forward(in[0], in[1], in[2], in[3], nghost, in[4], center);
  }

  tensor_list backward(const tensor_list& upstream, const tensor_list& in,
                       const std::vector<bool>& needed) const {
    tensor_list gradients(3), padded = upstream;
    padded.resize(3);
    const Mask mask{needed[1], needed[2], needed[3]};
    add(gradients, call_backward(padded, in[0], in[1], in[2], in[3], nghost, center, mask), mask);
    return {Tensor(), gradients[0], gradients[1], gradients[2], Tensor()};
  }

  tensor_list jvp(const tensor_list& tangents, const tensor_list& in) const {
    tensor_list out(3);
    const Tensor &list_neigh = in[0], &dE = in[1], &Ri_d = in[2], &Rij = in[3], &index = in[4];
    if (tangents[1].defined())
      add(out, call_forward(list_neigh, tangents[1], Ri_d, Rij, nghost, index, center));
    if (tangents[2].defined())
      add(out, call_forward(list_neigh, dE, tangents[2], Rij, nghost, index, center));
    if (tangents[3].defined())
      add(out, call_forward(list_neigh, dE, Ri_d, tangents[3], nghost, index, center),
          {false, true, true});
    return out;
  }
};

// One call of _force_virial_backward; inputs: its three upstreams, list_neigh, dE, Ri_d, Rij.
struct Backward {
  static constexpr const char* kNode = "ForceVirialBackwardBackward";
  SymInt nghost;
  bool center;
  Mask mask;

  template <class Visit>
  void visit(Visit&& visit) {
    visit(nghost);
    visit(center);
    for (bool& wanted : mask) visit(wanted);
  }

  tensor_list forward(const tensor_list& in) const {
    return call_backward({in[0], in[1], in[2]}, in[3], in[4], in[5], in[6], nghost, center, mask);
  }

  tensor_list backward(const tensor_list& upstream, const tensor_list& in,
                       const std::vector<bool>& needed) const {
    const tensor_list first{in[0], in[1], in[2]}, virial_only{Tensor(), in[1], in[2]};
    const Tensor &list_neigh = in[3], &dE = in[4], &Ri_d = in[5], &Rij = in[6];
    const bool virial = needed[1] || needed[2];
    const Tensor pair_vectors = virial ? Rij : Tensor();
    tensor_list to_upstreams(3), to_inputs(3);
    if (mask[0] && upstream[0].defined()) {
      if (needed[0] || virial)
        add(to_upstreams,
            call_forward(list_neigh, upstream[0], Ri_d, pair_vectors, nghost, Tensor(), center));
      if (const Mask wanted{false, needed[5], needed[6]}; needed[5] || needed[6])
        add(to_inputs,
            call_backward(first, list_neigh, upstream[0], Ri_d, Rij, nghost, center, wanted),
            wanted);
    }
    if (mask[1] && upstream[1].defined()) {
      if (needed[0] || virial)
        add(to_upstreams,
            call_forward(list_neigh, dE, upstream[1], pair_vectors, nghost, Tensor(), center));
      if (const Mask wanted{needed[4], false, needed[6]}; needed[4] || needed[6])
        add(to_inputs,
            call_backward(first, list_neigh, dE, upstream[1], Rij, nghost, center, wanted), wanted);
    }
    if (mask[2] && upstream[2].defined()) {
      if (virial)
        add(to_upstreams, call_forward(list_neigh, dE, Ri_d, upstream[2], nghost, Tensor(), center),
            {false, true, true});
      if (const Mask wanted{needed[4], needed[5], false}; needed[4] || needed[5])
        add(to_inputs,
            call_backward(virial_only, list_neigh, dE, Ri_d, upstream[2], nghost, center, wanted),
            wanted);
    }
    return {to_upstreams[0], to_upstreams[1], to_upstreams[2], Tensor(),
            to_inputs[0],    to_inputs[1],    to_inputs[2]};
  }

  tensor_list jvp(const tensor_list& tangents, const tensor_list& in) const {
    const tensor_list first{in[0], in[1], in[2]}, virial_only{Tensor(), in[1], in[2]};
    const Tensor &list_neigh = in[3], &dE = in[4], &Ri_d = in[5], &Rij = in[6];
    tensor_list out(3);
    const auto add_call = [&](const tensor_list& upstream, const Tensor& dE, const Tensor& Ri_d,
                              const Tensor& Rij, Mask wanted) {
      for (int i = 0; i < 3; ++i) wanted[i] = wanted[i] && mask[i];
      add(out, call_backward(upstream, list_neigh, dE, Ri_d, Rij, nghost, center, wanted), wanted);
    };
    if (tangents[0].defined() || tangents[1].defined() || tangents[2].defined())
      add_call({tangents[0], tangents[1], tangents[2]}, dE, Ri_d, Rij, {true, true, true});
    if (tangents[4].defined()) add_call(first, tangents[4], Ri_d, Rij, {false, true, true});
    if (tangents[5].defined()) add_call(first, dE, tangents[5], Rij, {true, false, true});
    if (tangents[6].defined()) add_call(virial_only, dE, Ri_d, tangents[6], {true, true, false});
    return out;
  }
};

// ---- registration -------------------------------------------------------------------------------

Tensor force(const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d, SymInt nghost,
             const OptTensor& neighbor_index) {
  return forward(kForce, list_neigh, dE, Ri_d, Tensor(), nghost, undefined_if_none(neighbor_index),
                 true)[0];
}

Tensor neighbor_force(const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d,
                      SymInt nghost) {
  return forward(kNeighborForce, list_neigh, dE, Ri_d, Tensor(), nghost, Tensor(), false)[0];
}

Three three(tensor_list&& list) { return {list[0], list[1], list[2]}; }

// Python's None is an undefined tensor.
const Tensor& given_Rij(const Tensor& Rij) {
  expect(kForceVirial, "Rij", Rij.defined(), "none", "of shape [B, n, K, 3]");
  return Rij;
}

Three force_virial(const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d,
                   const Tensor& Rij, SymInt nghost, const OptTensor& neighbor_index) {
  return three(forward(kForceVirial, list_neigh, dE, Ri_d, given_Rij(Rij), nghost,
                       undefined_if_none(neighbor_index), true));
}

Tensor neighbor_index(const Tensor& list_neigh, SymInt nghost) {
  return make_neighbor_index(list_neigh, nghost);
}

Three force_virial_backward(const OptTensor& grad_force, const OptTensor& grad_virial,
                            const OptTensor& grad_atom_virial, const Tensor& list_neigh,
                            const Tensor& dE, const Tensor& Ri_d, const OptTensor& Rij,
                            SymInt nghost, bool center, Mask output_mask) {
  return three(backward(undefined_if_none(grad_force), undefined_if_none(grad_virial),
                        undefined_if_none(grad_atom_virial), list_neigh, dE, Ri_d,
                        undefined_if_none(Rij), nghost, center, output_mask));
}

// The same four signatures once more, over what autograd.h does with a call (Autograd, vmap).
template <tensor_list (*transform)(Forward, const tensor_list&),
          tensor_list (*transform_backward)(Backward, const tensor_list&)>
void impl_transform(torch::Library& m) {
  m.impl("force",
         [](const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d, SymInt nghost,
            const OptTensor& neighbor_index) -> Tensor {
           return transform(Forward{std::move(nghost), true},
                            {list_neigh, dE, Ri_d, Tensor(), undefined_if_none(neighbor_index)})[0];
         });
  m.impl(
      "_neighbor_force",
      [](const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d, SymInt nghost) -> Tensor {
        return transform(Forward{std::move(nghost), false},
                         {list_neigh, dE, Ri_d, Tensor(), Tensor()})[0];
      });
  m.impl("force_virial",
         [](const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d, const Tensor& Rij,
            SymInt nghost, const OptTensor& neighbor_index) -> Three {
           return three(transform(
               Forward{std::move(nghost), true},
               {list_neigh, dE, Ri_d, given_Rij(Rij), undefined_if_none(neighbor_index)}));
         });
  m.impl(
      "_force_virial_backward",
      [](const OptTensor& grad_force, const OptTensor& grad_virial,
         const OptTensor& grad_atom_virial, const Tensor& list_neigh, const Tensor& dE,
         const Tensor& Ri_d, const OptTensor& Rij, SymInt nghost, bool center,
         Mask output_mask) -> Three {
        return three(transform_backward(
            Backward{std::move(nghost), center, output_mask},
            {undefined_if_none(grad_force), undefined_if_none(grad_virial),
             undefined_if_none(grad_atom_virial), list_neigh, dE, Ri_d, undefined_if_none(Rij)}));
      });
}

void impl_kernels(torch::Library& m) {
  m.impl("force", TORCH_FN(force));
  m.impl("_neighbor_force", TORCH_FN(neighbor_force));
  m.impl("force_virial", TORCH_FN(force_virial));
  m.impl("_force_virial_backward", TORCH_FN(force_virial_backward));
}

TORCH_LIBRARY_FRAGMENT(calcops, m) {
  m.def(
      "force(Tensor list_neigh, Tensor dE, Tensor Ri_d, SymInt nghost=0, *, "
      "Tensor? neighbor_index=None) -> Tensor");
  m.def("neighbor_index(Tensor list_neigh, SymInt nghost=0) -> Tensor");
  m.def("_neighbor_force(Tensor list_neigh, Tensor dE, Tensor Ri_d, SymInt nghost=0) -> Tensor");
  m.def(
      "force_virial(Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor Rij, SymInt nghost=0, *, "
      "Tensor? neighbor_index=None) -> (Tensor force, Tensor virial, Tensor atom_virial)");
  m.def(
      "_force_virial_backward(Tensor? grad_force, Tensor? grad_virial, Tensor? grad_atom_virial, "
      "Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor? Rij, SymInt nghost, bool center, "
      "bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(calcops, CompositeImplicitAutograd, m) {
  m.impl("neighbor_index", TORCH_FN(neighbor_index));
}
TORCH_LIBRARY_IMPL(calcops, CPU, m) { impl_kernels(m); }
TORCH_LIBRARY_IMPL(calcops, Meta, m) { impl_kernels(m); }
TORCH_LIBRARY_IMPL(calcops, CUDA, m) {
#ifdef CALCOPS_NO_CUDA
  for (const char* op : {kForce, kNeighborForce, kForceVirial, kBackward})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&built_without_cuda>());
#else
  impl_kernels(m);
#endif
}
TORCH_LIBRARY_IMPL(calcops, Autograd, m) { impl_transform<differentiable, differentiable>(m); }
TORCH_LIBRARY_IMPL(calcops, FuncTorchBatched, m) {
  impl_transform<fold_vmap, fold_vmap>(m);
  m.impl("neighbor_index", TORCH_FN(neighbor_index));
}

}  // namespace
}  // namespace calcops
