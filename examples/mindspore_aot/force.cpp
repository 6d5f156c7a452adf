// calcops::force and its gradient for MindSpore:
//
//   Force      list_neigh, dE, Ri_d, types  -> force
//   ForceGrad  grad, list_neigh, dE, Ri_d   -> gradient of dE, gradient of Ri_d
//
// The shapes are those of ops/force/force.h. Only the length of types [n + nghost] matters: it
// gives nghost. A number would not do: MindSpore infers the shapes of outputs once for each set of
// input shapes, so input shapes must determine them.
#include <calcops.h>
#include <torch/csrc/autograd/autograd.h>

#include "ms_ext.h"

extern "C" {
__attribute__((visibility("default"))) int Force(int nparam, void** params, int* ndims,
                                                 int64_t** shapes, const char** dtypes,
                                                 void* /*stream*/, void* /*extra*/) {
  return aot_operator("Force", [&] {
    TORCH_CHECK(nparam == 5, "expected 4 inputs and 1 output, got ", nparam, " together");
    const auto tensors = get_torch_tensors(nparam, params, ndims, shapes, dtypes, at::kCPU);
    const int64_t nghost = tensors[3].size(-1) - tensors[0].size(1);
    const at::Tensor force = calcops::force(tensors[0], tensors[1], tensors[2], nghost);
    expect_like("force", tensors[4], force);
    tensors[4].copy_(force);
  });
}

__attribute__((visibility("default"))) int ForceGrad(int nparam, void** params, int* ndims,
                                                     int64_t** shapes, const char** dtypes,
                                                     void* /*stream*/, void* /*extra*/) {
  return aot_operator("ForceGrad", [&] {
    TORCH_CHECK(nparam == 6, "expected 4 inputs and 2 outputs, got ", nparam, " together");
    const auto tensors = get_torch_tensors(nparam, params, ndims, shapes, dtypes, at::kCPU);
    const int64_t nghost = tensors[0].size(1) - tensors[1].size(1);
    const at::Tensor dE = tensors[2].requires_grad_(), Ri_d = tensors[3].requires_grad_();
    const at::Tensor force = calcops::force(tensors[1], dE, Ri_d, nghost);
    expect_like("gradient of dE", tensors[4], dE);
    expect_like("gradient of Ri_d", tensors[5], Ri_d);
    const auto gradients = torch::autograd::grad({force}, {dE, Ri_d}, {tensors[0]});
    tensors[4].copy_(gradients[0]);
    tensors[5].copy_(gradients[1]);
  });
}
}
