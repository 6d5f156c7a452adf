// What bench_force_cuda.py measures the force operators against: the same sums by atomics, whose
// bits change from run to run, fused in one kernel and as the two scatters that programs write
// after a matmul. One frame, int32, no ghosts, right entries; the sums are taken in the type of the
// inputs.
#include <ATen/core/Tensor.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace {

using at::Tensor;

template <class Real>
struct Pairs {
  int64_t natoms, neighbors;
  const int32_t* list;
  const Real *dE, *Ri_d, *Rij;
  Real *force, *atom_virial;
};

constexpr unsigned kThreads = 256;

template <class Real>
__device__ Real pair_force(const Pairs<Real>& in, int64_t slot, int a) {
  Real g = 0;
  for (int c = 0; c < 4; ++c) g += in.dE[4 * slot + c] * in.Ri_d[12 * slot + 3 * c + a];
  return g;
}

// A thread a slot and component, as the original operators have it.
template <class Real>
__global__ void scatter_force(Pairs<Real> in) {
  const int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x, slot = k / 3, a = k % 3;
  if (slot >= in.natoms * in.neighbors || in.list[slot] < 0) return;
  atomicAdd(in.force + 3 * in.list[slot] + a, pair_force(in, slot, int(a)));
}

template <class Real>
__global__ void scatter_virial(Pairs<Real> in) {
  const int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x, slot = k / 9, ab = k % 9;
  if (slot >= in.natoms * in.neighbors || in.list[slot] < 0) return;
  atomicAdd(in.atom_virial + 9 * in.list[slot] + ab,
            pair_force(in, slot, int(ab / 3)) * in.Rij[3 * slot + ab % 3]);
}

// A warp a centre atom, four lanes a pair, as force.cu reads them.
template <class Real>
__global__ void fused_atomics(Pairs<Real> in) {
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (i >= in.natoms) return;
  const unsigned lane = threadIdx.x % 32, c = lane % 4;
  Real center[3] = {};
  for (int64_t begin = 0; begin < in.neighbors; begin += 8) {
    const int64_t s = begin + lane / 4, slot = i * in.neighbors + s;
    const int32_t j = s < in.neighbors ? in.list[slot] : -1;
    Real g[3] = {};
    if (j >= 0)
      for (int a = 0; a < 3; ++a) {
        g[a] = in.dE[4 * slot + c] * in.Ri_d[12 * slot + 3 * c + a];
        center[a] += g[a];
      }
    for (int a = 0; a < 3; ++a)
      for (int lanes = 1; lanes < 4; lanes *= 2) g[a] += __shfl_xor_sync(~0u, g[a], lanes);
    if (j < 0) continue;
    for (int a = 0; a < 3; ++a) {
      if (c == 3)
        atomicAdd(in.force + 3 * int64_t(j) + a, g[a]);
      else
        atomicAdd(in.atom_virial + 9 * int64_t(j) + 3 * a + c, g[a] * in.Rij[3 * slot + c]);
    }
  }
  for (int a = 0; a < 3; ++a) {
    for (int lanes = 16; lanes > 0; lanes /= 2) center[a] += __shfl_xor_sync(~0u, center[a], lanes);
    if (lane == 0) atomicAdd(in.force + 3 * i + a, -center[a]);
  }
}

template <class Real>
void launch(void (*kernel)(Pairs<Real>), const Pairs<Real>& in, int64_t threads) {
  kernel<<<unsigned((threads + kThreads - 1) / kThreads), kThreads, 0,
           c10::cuda::getCurrentCUDAStream()>>>(in);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class Real>
void add(bool fused, const Tensor& list, const Tensor& dE, const Tensor& Ri_d, const Tensor& Rij,
         const Tensor& force, const Tensor& atom_virial) {
  const int64_t natoms = list.size(1), neighbors = list.size(2), slots = natoms * neighbors;
  const Pairs<Real> in{natoms,
                       neighbors,
                       list.const_data_ptr<int32_t>(),
                       dE.const_data_ptr<Real>(),
                       Ri_d.const_data_ptr<Real>(),
                       Rij.const_data_ptr<Real>(),
                       force.mutable_data_ptr<Real>(),
                       atom_virial.mutable_data_ptr<Real>()};
  if (fused) return launch(fused_atomics<Real>, in, natoms * 32);
  launch(scatter_force<Real>, in, slots * 3);
  launch(scatter_virial<Real>, in, slots * 9);
}

// `force` has the centre's part already where the scatters are apart.
std::tuple<Tensor, Tensor, Tensor> atomics(const Tensor& list, const Tensor& dE, const Tensor& Ri_d,
                                           const Tensor& Rij, const std::optional<Tensor>& center) {
  const int64_t natoms = list.size(1);
  const Tensor force = center ? center->clone() : at::zeros({1, natoms, 3}, dE.options());
  const Tensor atom_virial = at::zeros({1, natoms, 3, 3}, dE.options());
  dE.scalar_type() == at::kFloat ? add<float>(!center, list, dE, Ri_d, Rij, force, atom_virial)
                                 : add<double>(!center, list, dE, Ri_d, Rij, force, atom_virial);
  return {force, atom_virial.sum(1), atom_virial};
}

TORCH_LIBRARY_FRAGMENT(yardsticks, m) {
  m.def(
      "atomics(Tensor list, Tensor dE, Tensor Ri_d, Tensor Rij, Tensor? center=None) -> "
      "(Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(yardsticks, CUDA, m) { m.impl("atomics", TORCH_FN(atomics)); }

}  // namespace
