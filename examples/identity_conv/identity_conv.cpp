// my_ops::identity_conv_op(x), the class my_ops.IdentityConvClass(channels) and an operator that
// takes an object of it: all give back a copy of x, of any dtype and layout. The kernel for CUDA is
// in identity_conv.cu, which is built where there is a GPU.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <string>
#include <tuple>

namespace {

at::Tensor identity_conv_cpu(const at::Tensor& x) { return at::clone(x); }

// All that torch.compile and torch.export want of a plain operator: no fake in Python.
at::Tensor identity_conv_meta(const at::Tensor& x) { return at::empty_like(x); }

struct IdentityConvClass : torch::CustomClassHolder {
  explicit IdentityConvClass(int64_t channels) : channels_(channels) {}

  // Through the dispatcher, which knows the device; so this file names none, and autograd and
  // tracing see the operator.
  at::Tensor forward(const at::Tensor& x) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("my_ops::identity_conv_op", "")
                               .typed<at::Tensor(const at::Tensor&)>();
    return op.call(x);
  }

  int64_t get_channels() const { return channels_; }

  // What torch.export makes the fake object from: pairs of a name and a value.
  std::tuple<std::tuple<std::string, int64_t>> obj_flatten() const {
    return {{"channels", channels_}};
  }

  int64_t channels_;
};

// The device's kernel is chosen inside. For torch.export see custom_ops.py.
at::Tensor identity_conv_object(const c10::intrusive_ptr<IdentityConvClass>& obj,
                                const at::Tensor& x) {
  return obj->forward(x);
}

}  // namespace

TORCH_LIBRARY(my_ops, m) {
  m.class_<IdentityConvClass>("IdentityConvClass")
      .def(torch::init<int64_t>(), "", {torch::arg("channels")})
      .def("forward", &IdentityConvClass::forward)
      .def("get_channels", &IdentityConvClass::get_channels)
      .def("__obj_flatten__", &IdentityConvClass::obj_flatten)
      .def_pickle(
          [](const c10::intrusive_ptr<IdentityConvClass>& self) { return self->channels_; },
          [](int64_t channels) { return c10::make_intrusive<IdentityConvClass>(channels); });
  m.def("identity_conv_op(Tensor x) -> Tensor");
  m.def(
      "identity_conv_object(__torch__.torch.classes.my_ops.IdentityConvClass obj, Tensor x) -> "
      "Tensor");
}
TORCH_LIBRARY_IMPL(my_ops, CPU, m) { m.impl("identity_conv_op", &identity_conv_cpu); }
TORCH_LIBRARY_IMPL(my_ops, Meta, m) { m.impl("identity_conv_op", &identity_conv_meta); }
TORCH_LIBRARY_IMPL(my_ops, CompositeExplicitAutograd, m) {
  m.impl("identity_conv_object", &identity_conv_object);
}
