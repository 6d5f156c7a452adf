// The names that existing programs and saved TorchScript archives call, as thin shims over the
// force operators. CalcOps, CalcOps_cuda and CalcOps_cpu hold the same two operators, each for
// every device. They are compositions of differentiable operators, so PyTorch derives their
// gradients. After LonxunQuantum/MatPL, src/op; where that is wrong (README, "Existing programs")
// this is not.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/constant_pad_nd.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "calcops/expect.h"

namespace calcops {
namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

constexpr const char* kCalculateForce = "CalcOps::calculateForce";
constexpr const char* kCalculateVirial = "CalcOps::calculateVirial";

// The only host read of a tensor in the library: these schemas have the number of ghosts as a
// tensor.
int64_t read_nghost(const char* op, const OptTensor& nghost) {
  if (!nghost.has_value() || !nghost->defined()) return 0;
  const auto keys = nghost->key_set();
  TORCH_CHECK(!keys.has_any(
                  c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                       c10::DispatchKey::Functionalize})) &&
                  !nghost->is_meta(),
              op,
              ": expected `nghost` with a value that can be read now, got a tensor without one ",
              "(torch.compile, export, vmap); there call calcops::force or calcops::force_virial, ",
              "whose nghost is an int");
  expect(op, "nghost", nghost->numel() == 1, nghost->sym_sizes(), "of one element");
  expect(op, "nghost", at::isIntegralType(nghost->scalar_type(), /*includeBool=*/false),
         nghost->scalar_type(), "of an integer dtype");
  return nghost->item().toLong();
}

/// CalcOps::calculateForce
/// The caller's centre term plus the force of the pairs on the neighbours; [0] of the list is new.
///
/// list_neigh, dE, Ri_d: as for calcops::force.
/// F           [B, n, 3], dtype and device of dE: the centre term, usually
///             -(dE @ Ri_d) summed over the slots. It is not changed; its gradient is the identity.
/// nghost      None or an integer tensor of one element, which is read on the host; under
///             torch.compile, export and vmap use calcops::force, whose nghost is an int.
///
/// Returns a list of one tensor [B, n + nghost, 3], energy/length: F (0 for ghosts) + sum g over
/// the slots that name the atom. CalcOps_cuda and CalcOps_cpu hold the same operator.
std::vector<Tensor> calculate_force(const Tensor& list_neigh, const Tensor& dE, const Tensor& Ri_d,
                                    const Tensor& F, const OptTensor& nghost) {
  using Signature =
      std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                         const OptTensor&, c10::SymInt, bool, const OptTensor&);
  static const auto pairs = c10::Dispatcher::singleton()
                                .findSchemaOrThrow("calcops::_force_virial", "")
                                .typed<Signature>();
  const int64_t ghosts = read_nghost(kCalculateForce, nghost);
  const Tensor force =
      std::get<0>(pairs.call(list_neigh, dE, Ri_d, {}, ghosts, /*center=*/false, {}));
  const Arg centre{kCalculateForce, "F", F};
  expect_dtype_and_device(centre, {kCalculateForce, "dE", dE});
  const c10::SymInt frames = list_neigh.sym_size(0), natoms = list_neigh.sym_size(1);
  expect(kCalculateForce, "F", same_shape(F.sym_sizes(), {frames, natoms, 3}), F.sym_sizes(),
         "of shape [B, n, 3] = ", c10::SymIntArrayRef{frames, natoms, 3});
  return {force.add(ghosts == 0 ? F : at::constant_pad_nd(F, {0, 0, 0, ghosts}))};
}

/// CalcOps::calculateVirial
/// Virial and per-atom virial as rows of nine; mind the order of the arguments.
///
/// list_neigh, dE, Rij, Ri_d: as for calcops::force_virial.
/// nghost      as for CalcOps::calculateForce.
///
/// Returns the list [virial [B, 9], atom_virial [B, n + nghost, 9]], energy, W[a][b] at 3a + b.
/// CalcOps_cuda and CalcOps_cpu hold the same operator.
std::vector<Tensor> calculate_virial(const Tensor& list_neigh, const Tensor& dE, const Tensor& Rij,
                                     const Tensor& Ri_d, const OptTensor& nghost) {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt, const OptTensor&);
  static const auto force_virial = c10::Dispatcher::singleton()
                                       .findSchemaOrThrow("calcops::force_virial", "")
                                       .typed<Signature>();
  const auto [force, virial, atom_virial] =
      force_virial.call(list_neigh, dE, Ri_d, Rij, read_nghost(kCalculateVirial, nghost), {});
  return {virial.flatten(1), atom_virial.flatten(2)};
}

void define(torch::Library& m) {
  m.def(
      "calculateForce(Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor F, Tensor? nghost=None) -> "
      "Tensor[]");
  m.def(
      "calculateVirial(Tensor list_neigh, Tensor dE, Tensor Rij, Tensor Ri_d, Tensor? nghost=None) "
      "-> Tensor[]");
}

void implement(torch::Library& m) {
  m.impl("calculateForce", TORCH_FN(calculate_force));
  m.impl("calculateVirial", TORCH_FN(calculate_virial));
}

// vmap does not look for compositions, so they stand under its key too.
TORCH_LIBRARY_FRAGMENT(CalcOps, m) { define(m); }
TORCH_LIBRARY_FRAGMENT(CalcOps_cuda, m) { define(m); }
TORCH_LIBRARY_FRAGMENT(CalcOps_cpu, m) { define(m); }
TORCH_LIBRARY_IMPL(CalcOps, CompositeImplicitAutograd, m) { implement(m); }
TORCH_LIBRARY_IMPL(CalcOps_cuda, CompositeImplicitAutograd, m) { implement(m); }
TORCH_LIBRARY_IMPL(CalcOps_cpu, CompositeImplicitAutograd, m) { implement(m); }
TORCH_LIBRARY_IMPL(CalcOps, FuncTorchBatched, m) { implement(m); }
TORCH_LIBRARY_IMPL(CalcOps_cuda, FuncTorchBatched, m) { implement(m); }
TORCH_LIBRARY_IMPL(CalcOps_cpu, FuncTorchBatched, m) { implement(m); }

}  // namespace
}  // namespace calcops
