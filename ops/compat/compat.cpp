// Two operators under the names that existing programs and saved TorchScript archives call
// (LonxunQuantum/MatPL, src/op). The namespaces CalcOps, CalcOps_cuda and CalcOps_cpu hold the same
// two, for every device. Both only call differentiable operators, so PyTorch derives their
// gradients.
#include <calcops/operator.h>

namespace calcops::ops::compat {
namespace {

// Return the number of ghosts. These schemas take it as a tensor, which is read on the host. So a
// tensor on CUDA makes the host wait for the GPU.
int64_t read_nghost(const char* op, const Value& nghost) {
  if (nghost.is_none()) return 0;
  if (!nghost.is_readable())
    refuse(op, "nghost", "with a value that can be read now",
           "a tensor without one (torch.compile, export, vmap); there call calcops::force or "
           "calcops::force_virial, whose nghost is an int");
  if (Value::call("aten::sym_numel", nghost).item() != 1)
    refuse(op, "nghost", "of one element", nghost.shape());
  if (!nghost.is_integral()) refuse(op, "nghost", "of an integer dtype", nghost.dtype_name());
  return nghost.item();
}

// (list_neigh, dE, Ri_d, F, nghost)
Value calculate_force(const Value* arguments) {
  const int64_t nghost = read_nghost("CalcOps::calculateForce", arguments[4]);
  const Value pairs =
      Value::call("calcops::_force_virial", arguments[0], arguments[1], arguments[2],
                  /*Rij=*/nullptr, nghost, /*center=*/false,
                  /*output_mask=*/Value::list(true, false, false));
  const Value F = arguments[3];
  const Value center =
      nghost == 0 ? F : Value::call("aten::constant_pad_nd", F, Value::list(0, 0, 0, nghost));
  return Value::list(Value::call("aten::add.Tensor", pairs[0], center));
}

// (list_neigh, dE, Rij, Ri_d, nghost)
Value calculate_virial(const Value* arguments) {
  const int64_t nghost = read_nghost("CalcOps::calculateVirial", arguments[4]);
  const Value results = Value::call("calcops::force_virial", arguments[0], arguments[1],
                                    arguments[3], arguments[2], nghost);
  return Value::list(Value::call("aten::flatten.using_ints", results[1], 1),
                     Value::call("aten::flatten.using_ints", results[2], 2));
}

const Composition kCompositions[] = {
    {"CalcOps::calculateForce", &calculate_force},
    {"CalcOps_cuda::calculateForce", &calculate_force},
    {"CalcOps_cpu::calculateForce", &calculate_force},
    {"CalcOps::calculateVirial", &calculate_virial},
    {"CalcOps_cuda::calculateVirial", &calculate_virial},
    {"CalcOps_cpu::calculateVirial", &calculate_virial},
};

const Contract kContract(R"(
CalcOps::calculateForce(Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor F,
                        Tensor? nghost=None) -> Tensor[]
  Force on every atom: the caller's centre term plus the forces of the pairs on the neighbours.

  Returns a list of one tensor, [force [B, n + nghost, 3]], energy/length. The force on an atom is F
  (0 for ghosts) plus the sum of g over the slots that name the atom, with g as in calcops::force.
  The tensor shares no memory with F. CalcOps_cuda and CalcOps_cpu hold the same operator.

CalcOps_cuda::calculateForce(Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor F,
                             Tensor? nghost=None) -> Tensor[]
CalcOps_cpu::calculateForce(Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor F,
                            Tensor? nghost=None) -> Tensor[]

CalcOps::calculateVirial(Tensor list_neigh, Tensor dE, Tensor Rij, Tensor Ri_d,
                         Tensor? nghost=None) -> Tensor[]
  Virial and per-atom virial as rows of nine. Rij comes before Ri_d, unlike in force_virial.

  Returns the list [virial [B, 9], atom_virial [B, n + nghost, 9]], energy. Element [a][b] of a
  virial is at position 3a + b of its row. CalcOps_cuda and CalcOps_cpu hold the same operator.

CalcOps_cuda::calculateVirial(Tensor list_neigh, Tensor dE, Tensor Rij, Tensor Ri_d,
                              Tensor? nghost=None) -> Tensor[]
CalcOps_cpu::calculateVirial(Tensor list_neigh, Tensor dE, Tensor Rij, Tensor Ri_d,
                             Tensor? nghost=None) -> Tensor[]

list_neigh  [B, n, K] or [B, n, T, M] with K = T*M; int32 or int64. As in calcops::force.
dE          [B, n, K, 4], [B, n, 1, 4K] or [B, n, 4K]; float32 or float64. The derivative
            dE_tot/dRi, energy.
Ri_d        [B, n, 4K, 3] or [B, n, K, 4, 3]; like dE. The derivative dRi/dr_i for the centre
            atom, 1/length.
Rij         [B, n, K, 3]; like dE. The vector r_j - r_i, length.
F           [B, n, 3]; like dE. The centre term, usually -(dE @ Ri_d) summed over the slots. It
            isn't changed.
nghost      None or an integer tensor of one element, which is read on the host. Under
            torch.compile, export and vmap, call calcops::force or calcops::force_virial instead,
            whose nghost is an int.
)",
                         kCompositions);

}  // namespace
}  // namespace calcops::ops::compat
