// The force operators as PyTorch sees them: checks, devices, derivatives, registration.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

#include "autograd.h"
#include "expect.h"
#include "force/force.h"
#include "kernel.h"

namespace calcops {
namespace {

using at::Tensor;
using c10::SymInt;
using OptTensor = std::optional<Tensor>;
using Mask = std::array<bool, 3>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

constexpr const char* kForce = "calcops::force";
constexpr const char* kForceVirial = "calcops::force_virial";
constexpr const char* kPairs = "calcops::_force_virial";
constexpr const char* kPairsBackward = "calcops::_force_virial_backward";
constexpr const char* kNeighborIndex = "calcops::neighbor_index";

// Their derivatives: forces are linear in dE and in Ri_d, virials in dE, in Ri_d and in Rij.
const Multilinear kDerivatives(kPairs, kPairsBackward,
                               {{"grad_force", "dE", "Ri_d"},
                                {"grad_virial", "dE", "Ri_d", "Rij"},
                                {"grad_atom_virial", "dE", "Ri_d", "Rij"}});

// ---- checks, the same for every device ----------------------------------------------------------

struct Sizes {
  SymInt frames, natoms, rows, neighbors;  // B, n, n + nghost, K
};

Sizes check_list(const char* op, const Tensor& list_neigh, const SymInt& nghost) {
  expect_dtype({op, "list_neigh", list_neigh}, {at::kInt, at::kLong}, "int32 or int64");
  expect(op, "list_neigh", list_neigh.dim() == 3 || list_neigh.dim() == 4, list_neigh.sym_sizes(),
         "of shape [B, n, K] or [B, n, T, M]");
  expect(op, "nghost", nghost.sym_ge(0), nghost, ">= 0");
  // Beyond, sizes in bytes leave 64 bits. A symbol gets no guard for what cannot be.
  const int64_t known = nghost.maybe_as_int().value_or(0);
  expect(op, "nghost", known <= int64_t(1) << 40, known, "of at most 2^40");
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
  if (list_neigh.is_cuda())
    expect(op, "list_neigh", (n * K).sym_lt(int64_t(1) << 32), n * K,
           "of less than 2^32 slots a frame on CUDA");
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
  expect_dtype_and_device({kPairsBackward, name, gradient}, {kPairsBackward, "dE", dE});
  expect(kPairsBackward, name, same_shape(gradient.sym_sizes(), shape), gradient.sym_sizes(),
         "of shape ", shape);
}

// ---- the kernels --------------------------------------------------------------------------------

// Composed of PyTorch's operators: it is made once for many calls, and they know every device and
// transform. The stable sort keeps the slots of a row in order.
Tensor neighbor_index(const Tensor& list_neigh, SymInt nghost) try {
  const Sizes sizes = check_list(kNeighborIndex, list_neigh, nghost);
  const SymInt slots = sizes.natoms * sizes.neighbors;
  expect(kNeighborIndex, "list_neigh", slots.sym_lt(int64_t(1) << 31), slots,
         "of less than 2^31 slots a frame");
  const Tensor narrow = list_neigh.flatten(1);
  const Tensor list = holds(narrow, sizes.rows) ? narrow : narrow.to(at::kLong);
  const Tensor named = list.ge(0).logical_and(list.lt(sizes.rows));
  const auto [names, order] = at::where(named, list, c10::Scalar(sizes.rows))
                                  .sort(/*stable=*/true, 1, /*descending=*/false);
  // Counted, since under vmap searchsorted warns or has no rule.
  const Tensor index = names.to(at::kLong);
  const Tensor ends = at::zeros_symint({sizes.frames, sizes.rows + 1}, index.options())
                          .scatter_add(1, index, at::ones_like(index))
                          .cumsum(1)
                          .narrow_symint(1, 0, sizes.rows);
  return at::cat({ends, at::where(names.lt(sizes.rows), order, -1)}, 1).to(at::kInt);
} catch (...) {
  rethrow(kNeighborIndex, "nghost", nghost);
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
            read<Index>(list_neigh),
            read<Real>(dE),
            read<Real>(Ri_d),
            read<Real>(Rij),
            read<int32_t>(neighbor_index)};
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
    if (!contents_are_checked(list_neigh)) return;
    if (list_neigh.is_cuda()) {
      const Tensor bad = list_neigh.lt(-1).logical_or(list_neigh.ge(natoms + nghost));
      const Tensor positions = bad.flatten().nonzero();
      if (positions.numel() > 0) expect_entries(positions[0].item<int64_t>());
    }
    if (neighbor_index.defined())
      TORCH_CHECK(at::equal(neighbor_index, calcops::neighbor_index(list_neigh, nghost)), op,
                  ": expected `neighbor_index` of this list_neigh and nghost, got that of others");
  }
};

// Force, virial and atom_virial; without Rij the last two are undefined.
Three sum_pairs(const char* op, const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d,
                const Tensor& Rij, const SymInt& nghost, const OptTensor& neighbor_index,
                bool center) try {
  const Tensor index = neighbor_index.value_or(Tensor());
  const Sizes sizes = check_inputs(op, list_neigh, dE, Ri_d, Rij, nghost, index);
  const SymInt &B = sizes.frames, &rows = sizes.rows;
  const bool virial = Rij.defined();
  const auto make = [&](bool wanted, c10::SymIntArrayRef shape) {
    return wanted ? at::empty_symint(shape, dE.options()) : Tensor();
  };
  const Tensor force = make(true, {B, rows, 3}), total = make(virial, {B, 3, 3}),
               atom_virial = make(virial, {B, rows, 3, 3});
  if (dE.is_meta()) return {force, total, atom_virial};
  const Contiguous from(op, list_neigh, dE, Ri_d, Rij, index, sizes, nghost, center);
  from.check_contents();
  with_types(dE, list_neigh, [&](auto real, auto index) {
    using Real = decltype(real);
    const auto in = from.inputs<Real, decltype(index)>();
    const ForceOutputs<Real> to{write<Real>(force, true), write<Real>(total, virial),
                                write<Real>(atom_virial, virial)};
    if (dE.is_cpu()) return from.expect_entries(force_cpu(in, to));
#ifndef CALCOPS_NO_CUDA
    launch(dE, force_cuda_workspace(in), [&](void* workspace, cudaStream_t stream) {
      return force_cuda(in, to, workspace, stream);
    });
#endif
  });
  return {force, total, atom_virial};
} catch (...) {
  rethrow(op, "nghost", nghost);
}

Tensor force(const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d, SymInt nghost,
             const OptTensor& neighbor_index) {
  return std::get<0>(
      sum_pairs(kForce, list_neigh, dE, Ri_d, Tensor(), nghost, neighbor_index, true));
}

Three force_virial(const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d,
                   const Tensor& Rij, SymInt nghost, const OptTensor& neighbor_index) {
  // Python's None is an undefined tensor.
  expect(kForceVirial, "Rij", Rij.defined(), "none", "of shape [B, n, K, 3]");
  return sum_pairs(kForceVirial, list_neigh, dE, Ri_d, Rij, nghost, neighbor_index, true);
}

// Both of them, and with center = false what the pairs do to the neighbours alone. A result that is
// not wanted has no elements.
Three force_virial_of_pairs(const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d,
                            const OptTensor& Rij, SymInt nghost, bool center,
                            const OptTensor& neighbor_index) {
  auto [force, virial, atom_virial] = sum_pairs(
      kPairs, list_neigh, dE, Ri_d, Rij.value_or(Tensor()), nghost, neighbor_index, center);
  if (!virial.defined()) {
    virial = at::empty({0}, dE.options());
    atom_virial = at::empty({0}, dE.options());
  }
  return {force, virial, atom_virial};
}

// Gradients of dE, Ri_d and Rij; one that is not wanted has no elements.
Three force_virial_backward(const OptTensor& grad_force, const OptTensor& grad_virial,
                            const OptTensor& grad_atom_virial, const Tensor& list_neigh,
                            const Tensor& dE, const Tensor& Ri_d, const OptTensor& pair_vectors,
                            SymInt nghost, bool center, Mask output_mask,
                            const OptTensor& neighbor_index) {
  const Tensor Rij = pair_vectors.value_or(Tensor()), gF = contiguous(grad_force),
               gV = contiguous(grad_virial), gAV = contiguous(grad_atom_virial);
  const Sizes sizes = check_inputs(kPairsBackward, list_neigh, dE, Ri_d, Rij, nghost,
                                   neighbor_index.value_or(Tensor()));
  const SymInt &B = sizes.frames, &rows = sizes.rows;
  check_upstream("grad_force", gF, dE, {B, rows, 3});
  check_upstream("grad_virial", gV, dE, {B, 3, 3});
  check_upstream("grad_atom_virial", gAV, dE, {B, rows, 3, 3});
  expect(kPairsBackward, "Rij", Rij.defined() || !(gV.defined() || gAV.defined() || output_mask[2]),
         "none", "where a virial or Rij has a gradient");
  const auto make = [&](bool wanted, const Tensor& like) {
    return wanted ? at::empty_symint(like.sym_sizes(), like.options())
                  : at::empty({0}, dE.options());
  };
  const Tensor to_dE = make(output_mask[0], dE), to_Ri_d = make(output_mask[1], Ri_d),
               to_Rij = make(output_mask[2], Rij);
  if (dE.is_meta()) return {to_dE, to_Ri_d, to_Rij};
  const Contiguous from(kPairsBackward, list_neigh, dE, Ri_d, Rij, Tensor(), sizes, nghost, center);
  from.check_contents();
  with_types(dE, list_neigh, [&](auto real, auto index) {
    using Real = decltype(real);
    const auto in = from.inputs<Real, decltype(index)>();
    const ForceUpstream<Real> upstream{read<Real>(gF), read<Real>(gV), read<Real>(gAV)};
    const ForceGradients<Real> to{write<Real>(to_dE, output_mask[0]),
                                  write<Real>(to_Ri_d, output_mask[1]),
                                  write<Real>(to_Rij, output_mask[2])};
    if (dE.is_cpu()) return from.expect_entries(force_backward_cpu(in, upstream, to));
#ifndef CALCOPS_NO_CUDA
    launch(dE, 0, [&](void*, cudaStream_t stream) {
      return force_backward_cuda(in, upstream, to, stream);
    });
#endif
  });
  return {to_dE, to_Ri_d, to_Rij};
}

// ---- registration -------------------------------------------------------------------------------

TORCH_LIBRARY_FRAGMENT(calcops, m) {
  define<&force, kDerivatives>(
      m,
      "force(Tensor list_neigh, Tensor dE, Tensor Ri_d, SymInt nghost=0, *, "
      "Tensor? neighbor_index=None) -> Tensor");
  define<&force_virial, kDerivatives>(
      m,
      "force_virial(Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor Rij, SymInt nghost=0, *, "
      "Tensor? neighbor_index=None) -> (Tensor force, Tensor virial, Tensor atom_virial)");
  define<&force_virial_of_pairs, kDerivatives>(
      m,
      "_force_virial(Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor? Rij, SymInt nghost, "
      "bool center, *, Tensor? neighbor_index=None) -> (Tensor, Tensor, Tensor)");
  define<&force_virial_backward, kDerivatives>(
      m,
      "_force_virial_backward(Tensor? grad_force, Tensor? grad_virial, Tensor? grad_atom_virial, "
      "Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor? Rij, SymInt nghost, bool center=True, "
      "bool[3] output_mask=[True, True, True], *, Tensor? neighbor_index=None) -> "
      "(Tensor, Tensor, Tensor)");
  define<&neighbor_index>(m, "neighbor_index(Tensor list_neigh, SymInt nghost=0) -> Tensor");
}

}  // namespace
}  // namespace calcops
