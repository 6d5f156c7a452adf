// warp_perspective as PyTorch sees it: checks, devices, derivatives, registration.
#include "warp_perspective/warp_perspective.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "autograd.h"
#include "expect.h"
#include "kernel.h"
#include "warp_perspective/warp_perspective_positions.h"

namespace calcops {
namespace {

using at::Tensor;
using c10::IValue;
using c10::SymInt;
using Doubles = std::optional<at::ArrayRef<double>>;
using Mask = std::array<bool, 2>;
using Two = std::tuple<Tensor, Tensor>;

constexpr const char* kWarp = "calcops::warp_perspective";
constexpr const char* kBackward = "calcops::_warp_perspective_backward";
constexpr const char* kCells = "calcops::_warp_perspective_cells";

// ---- checks, the same for every device ----------------------------------------------------------

Border border_of(const char* op, std::string_view border_mode) {
  if (border_mode == "constant") return Border::kConstant;
  if (border_mode == "replicate") return Border::kReplicate;
  if (border_mode == "reflect") return Border::kReflect;
  if (border_mode == "wrap") return Border::kWrap;
  if (border_mode == "reflect_101") return Border::kReflect101;
  expect(op, "border_mode", false, c10::str('"', border_mode, '"'),
         "\"constant\", \"replicate\", \"reflect\", \"wrap\" or \"reflect_101\"");
  return {};
}

bool is_nearest(const char* op, std::string_view interpolation) {
  expect(op, "interpolation", interpolation == "nearest" || interpolation == "linear",
         c10::str('"', interpolation, '"'), "\"linear\" or \"nearest\"");
  return interpolation == "nearest";
}

void check_dsize(const char* op, c10::SymIntArrayRef dsize) {
  expect(op, "dsize",
         dsize.size() == 2 ? dsize[0].sym_ge(0).sym_and(dsize[1].sym_ge(0)) : c10::SymBool(false),
         dsize, "(height, width), both >= 0");
}

// [N, C, H, W] and [N, 3, 3], N and C being 1 where they are absent.
Tensor image_batch(const Tensor& image) {
  return image.dim() == 2   ? image.unsqueeze(0).unsqueeze(0)
         : image.dim() == 3 ? image.unsqueeze(0)
                            : image;
}

Tensor warp_batch(const Tensor& warp) { return warp.dim() == 2 ? warp.unsqueeze(0) : warp; }

// The gradient of an input from those of the N items, which one input may serve together.
Tensor for_input(const Tensor& items, const SymInt& batch, const Tensor& input) {
  const bool one_each = items.sym_size(0).sym_eq(batch).guard_bool(__FILE__, __LINE__);
  return (one_each ? items : items.sum(0))
      .reshape_symint(input.sym_sizes())
      .to(input.scalar_type());
}

struct Shape {
  SymInt batch, image_batch, warp_batch, channels, height, width;
  bool has_batch, has_channels;

  c10::SymDimVector out(const SymInt& height, const SymInt& width) const {
    c10::SymDimVector sizes;
    if (has_batch) sizes.push_back(batch);
    if (has_channels) sizes.push_back(channels);
    sizes.push_back(height);
    sizes.push_back(width);
    return sizes;
  }
};

void check_matrix(const char* op, const Tensor& warp) {
  expect_dtype({op, "warp", warp}, {at::kFloat, at::kDouble}, "of dtype float32 or float64");
  expect(op, "warp",
         warp.dim() == 2 || warp.dim() == 3
             ? warp.sym_size(-2).sym_eq(3).sym_and(warp.sym_size(-1).sym_eq(3))
             : c10::SymBool(false),
         warp.sym_sizes(), "of shape [3, 3] or [N, 3, 3]");
}

Shape check_inputs(const char* op, const Tensor& image, const Tensor& warp) {
  expect_dtype({op, "image", image}, {at::kByte, at::kFloat, at::kDouble},
               "of dtype uint8, float32 or float64");
  expect(op, "image", image.dim() >= 2 && image.dim() <= 4, image.sym_sizes(),
         "of shape [H, W], [C, H, W] or [N, C, H, W]");
  check_matrix(op, warp);
  expect_device({op, "warp", warp}, {op, "image", image});

  Shape shape;
  shape.has_batch = image.dim() == 4 || warp.dim() == 3;
  shape.has_channels = image.dim() >= 3;
  shape.image_batch = image.dim() == 4 ? image.sym_size(0) : SymInt(1);
  shape.warp_batch = warp.dim() == 3 ? warp.sym_size(0) : SymInt(1);
  shape.channels = shape.has_channels ? image.sym_size(-3) : SymInt(1);
  shape.height = image.sym_size(-2);
  shape.width = image.sym_size(-1);
  // A batch whose size is not known cannot be asked whether it is 1; with one matrix it need not
  // be.
  const c10::SymBool one_image = shape.image_batch.sym_eq(1);
  if (shape.warp_batch.maybe_as_int() == 1) {
    shape.batch = shape.image_batch;
    return shape;
  }
  expect(op, "warp",
         one_image.sym_or(shape.warp_batch.sym_eq(1))
             .sym_or(shape.warp_batch.sym_eq(shape.image_batch)),
         warp.sym_sizes(), "with N = 1 or that of `image`, ", shape.image_batch);
  shape.batch = one_image.guard_bool(__FILE__, __LINE__) ? shape.warp_batch : shape.image_batch;
  return shape;
}

// ---- the kernels --------------------------------------------------------------------------------

// One call's inputs as the kernels take them, and what they point into.
struct Arguments {
  Tensor image, warp;
  WarpSizes sizes;
  std::vector<double> border_value;

  template <class Pixel>
  WarpInputs<Pixel> inputs() const {
    return {sizes,
            image.const_data_ptr<Pixel>(),
            {image.stride(0), image.stride(1), image.stride(2), image.stride(3)},
            warp.const_data_ptr<double>(),
            border_value.data()};
  }
};

// Checks what is left to check; nothing where there is nothing to compute.
std::optional<Arguments> arguments_of(const char* op, const Tensor& image, const Tensor& warp,
                                      const Shape& shape, const SymInt& out_height,
                                      const SymInt& out_width, std::string_view interpolation,
                                      std::string_view border_mode, const Doubles& border_value,
                                      bool inverse_map) {
  const bool nearest = is_nearest(op, interpolation);
  const Border border = border_of(op, border_mode);
  std::vector<double> values = border_value ? border_value->vec() : std::vector<double>();
  const SymInt count = static_cast<int64_t>(values.size());
  expect(op, "border_value", count.sym_le(1).sym_or(count.sym_eq(shape.channels)),
         c10::str(count, " values"), "of one value or one for each of ", shape.channels,
         " channels");
  if (image.is_meta()) return std::nullopt;
  values.resize(shape.channels.expect_int(), values.size() == 1 ? values[0] : 0);
  return Arguments{
      image_batch(image),
      warp.to(at::kDouble).contiguous(),
      {shape.batch.expect_int(), shape.image_batch.expect_int(), shape.warp_batch.expect_int(),
       shape.channels.expect_int(), shape.height.expect_int(), shape.width.expect_int(),
       out_height.expect_int(), out_width.expect_int(), border, nearest, inverse_map},
      std::move(values)};
}

template <class Function>
void with_pixel(at::ScalarType type, Function function) {
  if (type == at::kByte) return function(uint8_t());
  type == at::kFloat ? function(float()) : function(double());
}

Tensor warp_perspective(const Tensor& image, const Tensor& warp, c10::SymIntArrayRef dsize,
                        std::string_view interpolation, std::string_view border_mode,
                        Doubles border_value, bool inverse_map) {
  const Shape shape = check_inputs(kWarp, image, warp);
  check_dsize(kWarp, dsize);
  const auto from = arguments_of(kWarp, image, warp, shape, dsize[0], dsize[1], interpolation,
                                 border_mode, border_value, inverse_map);
  Tensor out = at::empty_symint(shape.out(dsize[0], dsize[1]), image.options());
  if (!from) return out;
  with_pixel(image.scalar_type(), [&](auto pixel) {
    using Pixel = decltype(pixel);
    const auto in = from->inputs<Pixel>();
    Pixel* to = out.mutable_data_ptr<Pixel>();
    if (image.is_cpu()) return warp_perspective_cpu(in, to);
#ifndef CALCOPS_NO_CUDA
    launch(image, 0,
           [&](void*, cudaStream_t stream) { return warp_perspective_cuda(in, to, stream); });
#endif
  });
  return out;
}

// Gradients of image and warp; one that is not wanted has no elements.
Two warp_perspective_backward(const Tensor& grad, const Tensor& image, const Tensor& warp,
                              std::string_view interpolation, std::string_view border_mode,
                              Doubles border_value, bool inverse_map, Mask mask) {
  const Shape shape = check_inputs(kBackward, image, warp);
  expect_dtype({kBackward, "image", image}, {at::kFloat, at::kDouble},
               "of dtype float32 or float64");
  expect_dtype_and_device({kBackward, "grad", grad}, {kBackward, "image", image});
  expect(kBackward, "grad", grad.dim() >= 2, grad.sym_sizes(), "of the result's shape");
  const SymInt height = grad.sym_size(-2), width = grad.sym_size(-1);
  const c10::SymDimVector out_shape = shape.out(height, width);
  expect(kBackward, "grad", same_shape(grad.sym_sizes(), out_shape), grad.sym_sizes(), "of shape ",
         c10::SymIntArrayRef(out_shape));
  const auto from = arguments_of(kBackward, image, warp, shape, height, width, interpolation,
                                 border_mode, border_value, inverse_map);
  const auto make = [&](bool wanted, const Tensor& like, at::ScalarType type) {
    return wanted ? at::empty_symint(like.sym_sizes(), like.options().dtype(type))
                  : at::empty({0}, like.options());
  };
  const Tensor grad_image = make(mask[0], image, image.scalar_type());
  const Tensor grad_warp = make(mask[1], warp, from ? at::kDouble : warp.scalar_type());
  if (!from) return {grad_image, grad_warp};
  const Tensor upstream = grad.contiguous();
  with_pixel(image.scalar_type(), [&](auto pixel) {
    using Real = std::conditional_t<std::is_same_v<decltype(pixel), float>, float, double>;
    const auto in = from->inputs<Real>();
    const WarpGradients<Real> to{read<Real>(upstream), write<Real>(grad_image, mask[0]),
                                 write<double>(grad_warp, mask[1])};
    if (image.is_cpu()) return warp_perspective_backward_cpu(in, to);
#ifndef CALCOPS_NO_CUDA
    launch(image, warp_perspective_backward_cuda_workspace(in.sizes),
           [&](void* workspace, cudaStream_t stream) {
             return warp_perspective_backward_cuda(in, to, workspace, stream);
           });
#endif
  });
  return {grad_image, grad_warp.to(warp.scalar_type())};
}

// Where the pixels of the result come from, in the numbers that the kernels see (CellNumber), and
// the factor by which they take each matrix, 0 for one that cannot be used.
Two warp_perspective_cells(const Tensor& warp, c10::SymIntArrayRef size, c10::SymIntArrayRef dsize,
                           std::string_view border_mode, bool inverse_map) {
  check_matrix(kCells, warp);
  expect(kCells, "warp", warp.dim() == 3, warp.sym_sizes(), "of shape [N, 3, 3]");
  check_dsize(kCells, size);
  check_dsize(kCells, dsize);
  const Border border = border_of(kCells, border_mode);
  const SymInt batch = warp.sym_size(0);
  const auto options = warp.options().dtype(at::kDouble);
  const Tensor cells = at::empty_symint({batch, kCellNumbers, dsize[0] * dsize[1]}, options),
               scale = at::empty_symint({batch, 1, 1}, options);
  if (warp.is_meta()) return {cells, scale};
  const int64_t count = batch.expect_int();
  const WarpSizes sizes{count,
                        1,
                        count,
                        1,
                        size[0].expect_int(),
                        size[1].expect_int(),
                        dsize[0].expect_int(),
                        dsize[1].expect_int(),
                        border,
                        /*nearest=*/false,
                        inverse_map};
  const Tensor matrices = warp.to(at::kDouble).contiguous();
  const double* from = read<double>(matrices);
  double *to = write<double>(cells, true), *to_scale = write<double>(scale, true);
  if (warp.is_cpu()) {
    warp_perspective_cells_cpu(sizes, from, to, to_scale);
  } else {
#ifndef CALCOPS_NO_CUDA
    launch(warp, 0, [&](void*, cudaStream_t stream) {
      return warp_perspective_cells_cuda(sizes, from, to, to_scale, stream);
    });
#endif
  }
  return {cells, scale};
}

// ---- derivatives --------------------------------------------------------------------------------
// The result is linear in the image, so that the two operators give every derivative but those of
// a derivative along warp, which are in warp_perspective_positions.h.

void add(Tensor& sum, const Tensor& term) { sum = sum.defined() ? sum.add(term) : term; }

// warp_perspective without the constant that border_value adds.
Tensor linear_part(const Call& call, const Tensor& image, const SymInt& height,
                   const SymInt& width) {
  const SymInt dsize[] = {height, width};
  return call.of(kWarp)
      .with("image", image)
      .with("dsize", c10::SymIntArrayRef(dsize))
      .with("border_value", IValue())
      .run()[0];
}

// The derivative along a tangent of warp, and its own, for a call of either operator.
struct AlongWarp {
  const Call& call;
  Tensor image, warp, tangent;
  Shape shape;
  SymInt height, width;

  AlongWarp(const Call& call, const Tensor& tangent, const SymInt& height, const SymInt& width)
      : call(call),
        image(call.tensor("image")),
        warp(call.tensor("warp")),
        tangent(warp_batch(tangent).to(at::kDouble)),
        shape(check_inputs(kWarp, image, warp)),
        height(height),
        width(width) {}

  // Nothing moves with warp.
  bool is_flat() const {
    return call["interpolation"].toStringView() == "nearest" ||
           shape.height.sym_eq(0).sym_or(shape.width.sym_eq(0)).guard_bool(__FILE__, __LINE__);
  }

  Positions positions() const {
    const Tensor matrices = warp_batch(warp).to(at::kDouble);
    const SymInt size[] = {shape.height, shape.width}, dsize[] = {height, width};
    const tensor_list cells = call.of(kCells)
                                  .with("warp", matrices.detach())
                                  .with("size", c10::SymIntArrayRef(size))
                                  .with("dsize", c10::SymIntArrayRef(dsize))
                                  .run();
    Tensor border = at::zeros_symint({shape.channels, 1}, matrices.options());
    if (const IValue& value = call["border_value"]; !value.isNone()) {
      const std::vector<double> values = value.toDoubleVector();
      const SymInt each = values.size() == 1 ? shape.channels : SymInt(1);
      for (size_t c = 0; c < values.size(); ++c) border.narrow_symint(0, c, each).fill_(values[c]);
    }
    return {image_batch(image).to(at::kDouble).flatten(2),
            matrices,
            border,
            shape.batch,
            cells[0],
            cells[1],
            height,
            width,
            call["inverse_map"].toBool()};
  }

  Tensor items(const Tensor& grad) const {
    return grad.to(at::kDouble).reshape_symint({shape.batch, shape.channels, height * width});
  }

  Tensor jvp() const {
    const c10::SymDimVector out = shape.out(height, width);
    if (is_flat()) return at::zeros_symint(out, image.options());
    return positions().jvp(tangent).reshape_symint(out).to(image.scalar_type());
  }

  Tensor image_gradient(const Tensor& grad) const {
    if (is_flat()) return at::zeros_like(image);
    return for_input(positions().image_gradient(items(grad), tangent), shape.image_batch, image);
  }

  Tensor warp_gradient(const Tensor& grad) const {
    if (is_flat()) return at::zeros_like(warp);
    return for_input(positions().warp_gradient(items(grad), tangent), shape.warp_batch, warp);
  }
};

// [grad_image, grad_warp], undefined where not wanted.
tensor_list gradients(const Call& call, const Tensor& grad, Mask mask) {
  tensor_list out = call.of(kBackward).with("grad", grad).with("output_mask", mask).run();
  for (size_t i = 0; i < mask.size(); ++i)
    if (!mask[i]) out[i] = Tensor();
  return out;
}

// Of warp_perspective(image, warp, dsize, ...).
struct OfWarp final : Derivatives {
  // What rounds to integers has no derivative, and must not drop it without a word.
  void check(const Call& call, const std::vector<bool>& differentiated) const override {
    const at::ScalarType type = call.tensor("image").scalar_type();
    expect(kWarp, "image", type != at::kByte || !differentiated[1], type,
           "of dtype float32 or float64 where `warp` has a derivative");
  }

  tensor_list vjp(const Call& call, const tensor_list& upstream,
                  const std::vector<bool>& wanted) const override {
    tensor_list out = gradients(call, upstream[0], {wanted[0], wanted[1]});
    out.resize(wanted.size());
    return out;
  }

  tensor_list jvp(const Call& call, const tensor_list& tangents) const override {
    const std::vector<SymInt> dsize = call["dsize"].toSymIntVector();
    Tensor out;
    if (tangents[0].defined()) add(out, linear_part(call, tangents[0], dsize[0], dsize[1]));
    if (tangents[1].defined()) add(out, AlongWarp(call, tangents[1], dsize[0], dsize[1]).jvp());
    return {out};
  }
};

// Of _warp_perspective_backward(grad, image, warp, ...).
struct OfBackward final : Derivatives {
  static AlongWarp along(const Call& call, const Tensor& tangent) {
    const Tensor grad = call.tensor("grad");
    return {call, tangent, grad.sym_size(-2), grad.sym_size(-1)};
  }

  tensor_list vjp(const Call& call, const tensor_list& upstream,
                  const std::vector<bool>& wanted) const override {
    const c10::List<bool> mask = call["output_mask"].toBoolList();
    const Tensor grad = call.tensor("grad");
    tensor_list out(wanted.size());
    if (mask[0] && upstream[0].defined()) {
      const Tensor& image = upstream[0];
      if (wanted[0]) add(out[0], linear_part(call, image, grad.sym_size(-2), grad.sym_size(-1)));
      if (wanted[2])
        add(out[2], gradients(without_border(call).with("image", image), grad, {false, true})[1]);
    }
    if (mask[1] && upstream[1].defined()) {
      const AlongWarp moved = along(call, upstream[1]);
      if (wanted[0]) add(out[0], moved.jvp());
      if (wanted[1]) add(out[1], moved.image_gradient(grad));
      if (wanted[2]) add(out[2], moved.warp_gradient(grad));
    }
    return out;
  }

  tensor_list jvp(const Call& call, const tensor_list& tangents) const override {
    const c10::List<bool> list = call["output_mask"].toBoolList();
    const Mask mask{list[0], list[1]};
    const Tensor grad = call.tensor("grad");
    tensor_list out(2);
    if (tangents[0].defined()) out = gradients(call, tangents[0], mask);
    if (tangents[1].defined() && mask[1])
      add(out[1],
          gradients(without_border(call).with("image", tangents[1]), grad, {false, true})[1]);
    if (tangents[2].defined()) {
      const AlongWarp moved = along(call, tangents[2]);
      if (mask[0]) add(out[0], moved.image_gradient(grad));
      if (mask[1]) add(out[1], moved.warp_gradient(grad));
    }
    return out;
  }

 private:
  static Call without_border(const Call& call) { return call.with("border_value", IValue()); }
};

// The cells of a call are constants: what moves them is in Positions.
struct OfCells final : Derivatives {
  tensor_list vjp(const Call&, const tensor_list&, const std::vector<bool>& wanted) const override {
    return tensor_list(wanted.size());
  }
  tensor_list jvp(const Call&, const tensor_list&) const override { return tensor_list(2); }
};

const OfWarp kOfWarp;
const OfBackward kOfBackward;
const OfCells kOfCells;

// ---- vmap and registration ----------------------------------------------------------------------

// vmap folds its dimension into N, which image and warp get both.
void vmap_items(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call{op, torch::jit::pop(*stack, op.schema().arguments().size())};
  const bool backward = call.has("grad");
  const Tensor image = call.tensor("image"), warp = call.tensor("warp");
  const Shape shape = check_inputs(backward ? kBackward : kWarp, image, warp);
  const auto items = [&](const Tensor& tensor) {
    c10::SymDimVector sizes(tensor.sym_sizes());
    sizes[0] = shape.batch;
    return tensor.expand_symint(sizes);
  };
  call["image"] = items(image_batch(image));
  call["warp"] = items(warp_batch(warp));
  if (backward) {
    const Tensor grad = call.tensor("grad");
    call["grad"] =
        grad.reshape_symint({shape.batch, shape.channels, grad.sym_size(-2), grad.sym_size(-1)});
  }
  stack->insert(stack->end(), call.arguments.begin(), call.arguments.end());
  vmap(vmap_folded, op, stack);
  if (!backward) {
    const Tensor out = torch::jit::pop(*stack).toTensor();
    stack->push_back(out.reshape_symint(shape.out(out.sym_size(-2), out.sym_size(-1))));
    return;
  }
  const c10::List<bool> mask = call["output_mask"].toBoolList();
  const auto found = torch::jit::pop(*stack, 2);
  stack->push_back(mask[0] ? for_input(found[0].toTensor(), shape.image_batch, image) : found[0]);
  stack->push_back(mask[1] ? for_input(found[1].toTensor(), shape.warp_batch, warp) : found[1]);
}

TORCH_LIBRARY_FRAGMENT(calcops, m) {
  define<&warp_perspective, kOfWarp, vmap_items>(
      m,
      "warp_perspective(Tensor image, Tensor warp, SymInt[2] dsize=[8, 8], str "
      "interpolation=\"linear\", str border_mode=\"constant\", float[]? border_value=None, "
      "bool inverse_map=False) -> Tensor");
  define<&warp_perspective_backward, kOfBackward, vmap_items>(
      m,
      "_warp_perspective_backward(Tensor grad, Tensor image, Tensor warp, str interpolation, "
      "str border_mode, float[]? border_value, bool inverse_map, bool[2] output_mask) -> "
      "(Tensor, Tensor)");
  define<&warp_perspective_cells, kOfCells>(
      m,
      "_warp_perspective_cells(Tensor warp, SymInt[2] size, SymInt[2] dsize, str border_mode, "
      "bool inverse_map) -> (Tensor, Tensor)");
}

}  // namespace
}  // namespace calcops
