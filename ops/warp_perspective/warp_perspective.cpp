// warp_perspective as PyTorch sees it: checks, devices, derivatives, registration.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "calcops/autograd.h"
#include "calcops/expect.h"
#include "calcops/kernel.h"
#include "float16.h"
#include "warp_perspective/warp_perspective.h"
#include "warp_perspective/warp_perspective_checks.h"
#include "warp_perspective/warp_perspective_derivatives.h"

namespace calcops {
namespace {

using Doubles = std::optional<at::ArrayRef<double>>;
using Two = std::tuple<Tensor, Tensor>;

// ---- the kernels --------------------------------------------------------------------------------

// One call's inputs as the kernels take them, and what they point into.
struct Arguments {
  Tensor image, warp;
  WarpSizes sizes;
  std::vector<double> border_value;

  template <class Pixel>
  WarpInputs<Pixel> inputs() const {
    return {sizes,
            static_cast<const Pixel*>(image.const_data_ptr()),
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
  const Interpolation how = interpolation_of(op, interpolation);
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
       out_height.expect_int(), out_width.expect_int(), border, how, inverse_map},
      std::move(values)};
}

template <class Function>
void with_pixel(at::ScalarType type, Function function) {
  if (type == at::kByte) return function(uint8_t());
  if (type == at::kUInt16) return function(uint16_t());
  if (type == at::kShort) return function(int16_t());
  if (type == at::kHalf) return function(Float16());
  if (type == at::kBFloat16) return function(BFloat16());
  type == at::kFloat ? function(float()) : function(double());
}

Tensor warp_perspective(const Tensor& image, const Tensor& warp, c10::SymIntArrayRef given_size,
                        std::string_view interpolation, std::string_view border_mode,
                        Doubles border_value, bool inverse_map,
                        const std::optional<Tensor>& destination, std::string_view arithmetic) {
  const Shape shape = check_inputs(kWarp, image, warp);
  const auto dsize = size_of_result(kWarp, given_size, shape);
  const auto from = arguments_of(kWarp, image, warp, shape, dsize[0], dsize[1], interpolation,
                                 border_mode, border_value, inverse_map);
  check_destination(kWarp, destination.value_or(Tensor()), image, shape, dsize,
                    border_of(kWarp, border_mode));
  const bool opencv4 = is_opencv4(kWarp, arithmetic);
  if (opencv4) check_opencv4(kWarp, image, shape, interpolation);
  Tensor out = destination ? destination->clone(at::MemoryFormat::Contiguous)
                           : at::empty_symint(shape.out(dsize[0], dsize[1]), image.options());
  if (!from) return out;
  with_pixel(image.scalar_type(), [&](auto pixel) {
    using Pixel = decltype(pixel);
    const auto in = from->inputs<Pixel>();
    Pixel* to = static_cast<Pixel*>(out.mutable_data_ptr());
    if constexpr (std::is_arithmetic_v<Pixel>) {
      if (opencv4 && image.is_cpu()) return warp_perspective_opencv4_cpu(in, to);
    }
    if (image.is_cpu()) return warp_perspective_cpu(in, to);
#ifndef CALCOPS_NO_CUDA
    launch(image, 0, [&](void*, cudaStream_t stream) {
      if constexpr (std::is_arithmetic_v<Pixel>) {
        if (opencv4) return warp_perspective_opencv4_cuda(in, to, stream);
      }
      return warp_perspective_cuda(in, to, stream);
    });
#endif
  });
  return out;
}

// Gradients of image and warp; one that is not wanted has no elements.
Two warp_perspective_backward(const Tensor& grad, const Tensor& image, const Tensor& warp,
                              std::string_view interpolation, std::string_view border_mode,
                              Doubles border_value, bool inverse_map, Mask mask) {
  const Shape shape = check_inputs(kBackward, image, warp);
  const at::ScalarType type = image.scalar_type();
  expect(kBackward, "image", c10::isFloatingType(type), type, "of a floating dtype");
  expect_dtype_and_device({kBackward, "grad", grad}, {kBackward, "image", image});
  expect(kBackward, "grad", grad.dim() >= 2, grad.sym_sizes(), "of the result's shape");
  const SymInt height = grad.sym_size(-2), width = grad.sym_size(-1);
  const c10::SymDimVector out_shape = shape.out(height, width);
  expect(kBackward, "grad", same_shape(grad.sym_sizes(), out_shape), grad.sym_sizes(), "of shape ",
         c10::SymIntArrayRef(out_shape));
  // The kernels read float32 and float64; narrower images are widened for them.
  const at::ScalarType wide = type == at::kDouble ? at::kDouble : at::kFloat;
  const auto from = arguments_of(kBackward, image.to(wide), warp, shape, height, width,
                                 interpolation, border_mode, border_value, inverse_map);
  const auto make = [&](bool wanted, const Tensor& like, at::ScalarType type) {
    return wanted ? at::empty_symint(like.sym_sizes(), like.options().dtype(type))
                  : at::empty({0}, like.options().dtype(type));
  };
  const Tensor grad_image = make(mask[0], image, from ? wide : type);
  const Tensor grad_warp = make(mask[1], warp, from ? at::kDouble : warp.scalar_type());
  if (!from) return {grad_image, grad_warp};
  const Tensor upstream = grad.to(wide).contiguous();
  const auto run = [&](auto real) {
    using Real = decltype(real);
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
  };
  wide == at::kFloat ? run(float()) : run(double());
  return {grad_image.to(type), grad_warp.to(warp.scalar_type())};
}

// How the result moves with warp along a tangent of its shape and dtype.
Tensor warp_perspective_tangent(const Tensor& tangent, const Tensor& image, const Tensor& warp,
                                c10::SymIntArrayRef dsize, std::string_view interpolation,
                                std::string_view border_mode, Doubles border_value,
                                bool inverse_map) {
  const Shape shape = check_inputs(kTangent, image, warp);
  const at::ScalarType type = image.scalar_type();
  expect(kTangent, "image", c10::isFloatingType(type), type, "of a floating dtype");
  expect_dtype_and_device({kTangent, "tangent", tangent}, {kTangent, "warp", warp});
  expect(kTangent, "tangent", same_shape(tangent.sym_sizes(), warp.sym_sizes()),
         tangent.sym_sizes(), "of shape ", warp.sym_sizes());
  check_dsize(kTangent, dsize);
  const at::ScalarType wide = type == at::kDouble ? at::kDouble : at::kFloat;
  const auto from = arguments_of(kTangent, image.to(wide), warp, shape, dsize[0], dsize[1],
                                 interpolation, border_mode, border_value, inverse_map);
  const Tensor out =
      at::empty_symint(shape.out(dsize[0], dsize[1]), image.options().dtype(from ? wide : type));
  if (!from) return out;
  const Tensor matrices = tangent.to(at::kDouble).contiguous();
  const auto run = [&](auto real) {
    using Real = decltype(real);
    const auto in = from->inputs<Real>();
    const WarpTangent<Real> along{read<double>(matrices), write<Real>(out, true)};
    if (image.is_cpu()) return warp_perspective_tangent_cpu(in, along);
#ifndef CALCOPS_NO_CUDA
    launch(image, 9 * in.sizes.warp_batch * int64_t(sizeof(double)),
           [&](void* workspace, cudaStream_t stream) {
             return warp_perspective_tangent_cuda(in, along, workspace, stream);
           });
#endif
  };
  wide == at::kFloat ? run(float()) : run(double());
  return out.to(type);
}

// Where the pixels of the result come from, in the numbers that the kernels see (CellNumber), and
// the factor by which they take each matrix, 0 for one that cannot be used.
Two warp_perspective_cells(const Tensor& warp, c10::SymIntArrayRef size, c10::SymIntArrayRef dsize,
                           std::string_view interpolation, std::string_view border_mode,
                           bool inverse_map) {
  check_matrix(kCells, warp);
  expect(kCells, "warp", warp.dim() == 3, warp.sym_sizes(), "of shape [N, 3, 3]");
  check_dsize(kCells, size);
  check_dsize(kCells, dsize);
  const Interpolation how = interpolation_of(kCells, interpolation);
  const Border border = border_of(kCells, border_mode);
  const SymInt batch = warp.sym_size(0), pixels = dsize[0] * dsize[1];
  const auto options = warp.options().dtype(at::kDouble);
  const Tensor cells = at::empty_symint({batch, cell_numbers(how), pixels}, options),
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
                        how,
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

// ---- vmap and registration ----------------------------------------------------------------------

// vmap folds its dimension into N, which image and warp get both.
void vmap_items(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call{op, torch::jit::pop(*stack, op.schema().arguments().size())};
  const bool backward = call.has("grad"), along = call.has("tangent");
  const Tensor image = call.tensor("image"), warp = call.tensor("warp");
  const Shape shape = check_inputs(backward ? kBackward : along ? kTangent : kWarp, image, warp);
  if (!backward && !along) {
    const auto dsize = size_of_result(kWarp, call["dsize"].toSymIntVector(), shape);
    check_destination(kWarp, call.tensor("destination"), image, shape, dsize,
                      border_of(kWarp, call["border_mode"].toStringView()));
  }
  const auto items = [&](const Tensor& tensor) {
    c10::SymDimVector sizes(tensor.sym_sizes());
    sizes[0] = shape.batch;
    return tensor.expand_symint(sizes);
  };
  call["image"] = items(image_batch(image));
  call["warp"] = items(warp_batch(warp));
  if (along) call["tangent"] = items(warp_batch(call.tensor("tangent")));
  const char* of_result = backward ? "grad" : "destination";
  if (const Tensor tensor = along ? Tensor() : call.tensor(of_result); tensor.defined())
    call[of_result] = tensor.reshape_symint(
        {shape.batch, shape.channels, tensor.sym_size(-2), tensor.sym_size(-1)});
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
      "warp_perspective(Tensor image, Tensor warp, SymInt[2] dsize=[], str "
      "interpolation=\"linear\", str border_mode=\"constant\", float[1]? border_value=None, "
      "bool inverse_map=False, Tensor? destination=None, str arithmetic=\"exact\") -> Tensor");
  define<&warp_perspective_backward, kOfBackward, vmap_items>(
      m,
      "_warp_perspective_backward(Tensor grad, Tensor image, Tensor warp, str interpolation, "
      "str border_mode, float[1]? border_value, bool inverse_map, bool[2] output_mask) -> "
      "(Tensor, Tensor)");
  define<&warp_perspective_tangent, kOfTangent, vmap_items>(
      m,
      "_warp_perspective_tangent(Tensor tangent, Tensor image, Tensor warp, SymInt[2] dsize, "
      "str interpolation, str border_mode, float[]? border_value, bool inverse_map) -> Tensor");
  define<&warp_perspective_cells, kOfCells>(
      m,
      "_warp_perspective_cells(Tensor warp, SymInt[2] size, SymInt[2] dsize, str interpolation, "
      "str border_mode, bool inverse_map) -> (Tensor, Tensor)");
}

}  // namespace
}  // namespace calcops
