// warp_perspective as PyTorch sees it: checks, devices, derivatives, registration.
#include "warp_perspective/warp_perspective.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_cross.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <array>
#include <cfloat>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "autograd.h"
#include "expect.h"

#ifndef CALCOPS_NO_CUDA
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace calcops {
namespace {

using at::Tensor;
using c10::SymInt;
using Doubles = std::optional<at::ArrayRef<double>>;
using Mask = std::array<bool, 2>;
using Two = std::tuple<Tensor, Tensor>;

constexpr const char* kWarp = "calcops::warp_perspective";
constexpr const char* kBackward = "calcops::_warp_perspective_backward";

// ---- checks, the same for every device ----------------------------------------------------------

struct Options {
  std::string interpolation, border_mode;
  std::vector<double> border_value;  // none is 0
  bool inverse_map;

  template <class Visit>
  void visit(Visit&& visit) {
    visit(interpolation);
    visit(border_mode);
    visit(border_value);
    visit(inverse_map);
  }

  bool nearest() const { return interpolation == "nearest"; }
  Doubles value() const { return border_value.empty() ? std::nullopt : Doubles(border_value); }
  // The part that is linear in the image.
  Options without_value() const { return {interpolation, border_mode, {}, inverse_map}; }
};

Options make_options(std::string_view interpolation, std::string_view border_mode,
                     const Doubles& border_value, bool inverse_map) {
  return {std::string(interpolation), std::string(border_mode),
          border_value ? border_value->vec() : std::vector<double>(), inverse_map};
}

Border border_of(const char* op, const std::string& border_mode) {
  if (border_mode == "constant") return Border::kConstant;
  if (border_mode == "replicate") return Border::kReplicate;
  if (border_mode == "reflect") return Border::kReflect;
  if (border_mode == "wrap") return Border::kWrap;
  if (border_mode == "reflect_101") return Border::kReflect101;
  expect(op, "border_mode", false, '"' + border_mode + '"',
         "\"constant\", \"replicate\", \"reflect\", \"wrap\" or \"reflect_101\"");
  return {};
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

Shape check_inputs(const char* op, const Tensor& image, const Tensor& warp,
                   const Options& options) {
  expect_dtype({op, "image", image}, {at::kByte, at::kFloat, at::kDouble},
               "of dtype uint8, float32 or float64");
  expect(op, "image", image.dim() >= 2 && image.dim() <= 4, image.sym_sizes(),
         "of shape [H, W], [C, H, W] or [N, C, H, W]");
  expect_dtype({op, "warp", warp}, {at::kFloat, at::kDouble}, "of dtype float32 or float64");
  expect_device({op, "warp", warp}, {op, "image", image});
  expect(op, "warp",
         warp.dim() == 2 || warp.dim() == 3
             ? warp.sym_size(-2).sym_eq(3).sym_and(warp.sym_size(-1).sym_eq(3))
             : c10::SymBool(false),
         warp.sym_sizes(), "of shape [3, 3] or [N, 3, 3]");

  Shape shape;
  shape.has_batch = image.dim() == 4 || warp.dim() == 3;
  shape.has_channels = image.dim() >= 3;
  shape.image_batch = image.dim() == 4 ? image.sym_size(0) : SymInt(1);
  shape.warp_batch = warp.dim() == 3 ? warp.sym_size(0) : SymInt(1);
  shape.channels = shape.has_channels ? image.sym_size(-3) : SymInt(1);
  shape.height = image.sym_size(-2);
  shape.width = image.sym_size(-1);
  const c10::SymBool one_image = shape.image_batch.sym_eq(1);
  expect(op, "warp",
         one_image.sym_or(shape.warp_batch.sym_eq(1))
             .sym_or(shape.warp_batch.sym_eq(shape.image_batch)),
         warp.sym_sizes(), "with N = 1 or that of `image`, ", shape.image_batch);
  shape.batch = one_image.guard_bool(__FILE__, __LINE__) ? shape.warp_batch : shape.image_batch;

  expect(op, "interpolation", options.nearest() || options.interpolation == "linear",
         '"' + options.interpolation + '"', "\"linear\" or \"nearest\"");
  border_of(op, options.border_mode);
  const SymInt values = static_cast<int64_t>(options.border_value.size());
  expect(op, "border_value", values.sym_le(1).sym_or(values.sym_eq(shape.channels)),
         c10::str(values, " values"), "of one value or one for each of ", shape.channels,
         " channels");
  return shape;
}

// ---- the kernels --------------------------------------------------------------------------------

// One call's inputs as the kernels take them, and what they point into.
struct Arguments {
  Tensor image, warp;
  WarpSizes sizes;
  std::vector<double> border_value;

  Arguments(const char* op, const Tensor& image, const Tensor& warp, const Shape& shape,
            const SymInt& out_height, const SymInt& out_width, const Options& options)
      : image(calcops::image_batch(image)),
        warp(warp.to(at::kDouble).contiguous()),
        sizes{shape.batch.expect_int(),
              shape.image_batch.expect_int(),
              shape.warp_batch.expect_int(),
              shape.channels.expect_int(),
              shape.height.expect_int(),
              shape.width.expect_int(),
              out_height.expect_int(),
              out_width.expect_int(),
              border_of(op, options.border_mode),
              options.nearest(),
              options.inverse_map},
        border_value(options.border_value) {
    border_value.resize(sizes.channels, border_value.size() == 1 ? border_value[0] : 0);
  }

  template <class Pixel>
  WarpInputs<Pixel> inputs() const {
    return {sizes,
            image.const_data_ptr<Pixel>(),
            {image.stride(0), image.stride(1), image.stride(2), image.stride(3)},
            warp.const_data_ptr<double>(),
            border_value.data()};
  }
};

template <class Function>
void with_pixel(at::ScalarType type, Function function) {
  if (type == at::kByte) return function(uint8_t());
  type == at::kFloat ? function(float()) : function(double());
}

Tensor forward(const Tensor& image, const Tensor& warp, c10::SymIntArrayRef dsize,
               const Options& options) {
  const Shape shape = check_inputs(kWarp, image, warp, options);
  expect(kWarp, "dsize",
         dsize.size() == 2 ? dsize[0].sym_ge(0).sym_and(dsize[1].sym_ge(0)) : c10::SymBool(false),
         dsize, "(height, width), both >= 0");
  Tensor out = at::empty_symint(shape.out(dsize[0], dsize[1]), image.options());
  if (image.is_meta()) return out;
  const Arguments arguments(kWarp, image, warp, shape, dsize[0], dsize[1], options);
  with_pixel(image.scalar_type(), [&](auto pixel) {
    using Pixel = decltype(pixel);
    const auto in = arguments.inputs<Pixel>();
    if (image.is_cpu()) return warp_perspective_cpu(in, out.mutable_data_ptr<Pixel>());
#ifndef CALCOPS_NO_CUDA
    const c10::DeviceGuard guard(image.device());
    C10_CUDA_CHECK(warp_perspective_cuda(in, out.mutable_data_ptr<Pixel>(),
                                         c10::cuda::getCurrentCUDAStream()));
#endif
  });
  return out;
}

// Gradients of image and warp; one that is not wanted has no elements.
Two backward(const Tensor& grad, const Tensor& image, const Tensor& warp, const Options& options,
             Mask mask) {
  const Shape shape = check_inputs(kBackward, image, warp, options);
  expect_dtype({kBackward, "image", image}, {at::kFloat, at::kDouble},
               "of dtype float32 or float64");
  expect_dtype_and_device({kBackward, "grad", grad}, {kBackward, "image", image});
  expect(kBackward, "grad", grad.dim() >= 2, grad.sym_sizes(), "of the result's shape");
  const SymInt height = grad.sym_size(-2), width = grad.sym_size(-1);
  const c10::SymDimVector out_shape = shape.out(height, width);
  expect(kBackward, "grad", same_shape(grad.sym_sizes(), out_shape), grad.sym_sizes(), "of shape ",
         c10::SymIntArrayRef(out_shape));
  const Tensor grad_image = mask[0] ? at::empty_symint(image.sym_sizes(), image.options())
                                    : at::empty({0}, image.options());
  const Tensor grad_warp =
      mask[1] ? at::empty_symint(
                    warp.sym_sizes(),
                    warp.options().dtype(warp.is_meta() ? warp.scalar_type() : at::kDouble))
              : at::empty({0}, warp.options());
  if (image.is_meta()) return {grad_image, grad_warp};
  const Arguments arguments(kBackward, image, warp, shape, height, width, options);
  const Tensor upstream = grad.contiguous();
  with_pixel(image.scalar_type(), [&](auto pixel) {
    using Real = std::conditional_t<std::is_same_v<decltype(pixel), float>, float, double>;
    const auto in = arguments.inputs<Real>();
    const WarpGradients<Real> to{upstream.const_data_ptr<Real>(),
                                 mask[0] ? grad_image.mutable_data_ptr<Real>() : nullptr,
                                 mask[1] ? grad_warp.mutable_data_ptr<double>() : nullptr};
    if (image.is_cpu()) return warp_perspective_backward_cpu(in, to);
#ifndef CALCOPS_NO_CUDA
    const c10::DeviceGuard guard(image.device());
    const Tensor workspace = at::empty({warp_perspective_backward_cuda_workspace(in.sizes)},
                                       image.options().dtype(at::kByte));
    C10_CUDA_CHECK(warp_perspective_backward_cuda(in, to, workspace.mutable_data_ptr(),
                                                  c10::cuda::getCurrentCUDAStream()));
#endif
  });
  return {grad_image, grad_warp.to(warp.scalar_type())};
}

// ---- through the dispatcher ---------------------------------------------------------------------

Tensor call_warp(const Tensor& image, const Tensor& warp, c10::SymIntArrayRef dsize,
                 const Options& options) {
  using Signature = Tensor(const Tensor&, const Tensor&, c10::SymIntArrayRef, std::string_view,
                           std::string_view, Doubles, bool);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(kWarp, "").typed<Signature>();
  return op.call(image, warp, dsize, options.interpolation, options.border_mode, options.value(),
                 options.inverse_map);
}

tensor_list call_backward(const Tensor& grad, const Tensor& image, const Tensor& warp,
                          const Options& options, Mask mask) {
  using Signature = Two(const Tensor&, const Tensor&, const Tensor&, std::string_view,
                        std::string_view, Doubles, bool, Mask);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(kBackward, "").typed<Signature>();
  auto [grad_image, grad_warp] =
      op.call(grad, image, warp, options.interpolation, options.border_mode, options.value(),
              options.inverse_map, mask);
  return {mask[0] ? grad_image : Tensor(), mask[1] ? grad_warp : Tensor()};
}

// ---- derivatives along warp ---------------------------------------------------------------------
// The result is linear in the image, so the two operators give every derivative but those of a
// derivative along warp. These follow here from the position (x, y) of every destination pixel,
// written in ATen operators, which are differentiable to any order themselves. Tensors are float64,
// [N, channels, pixels].

// One axis of the positions, as Axis of warp_perspective_math.h; weight is differentiable.
struct Taps {
  Tensor first, second, weight, slope;

  Taps() = default;
  Taps(Tensor x, int64_t size, Border border) : slope(at::ones_like(x)) {
    if (border == Border::kWrap) {
      x = x.remainder(size);
      x = at::where(x.lt(size), x, 0.0);
    } else if (border != Border::kConstant) {
      if (border != Border::kReplicate) {
        const double edge = border == Border::kReflect ? 1 : 0, period = 2 * (size - 1 + edge);
        x = period > 0 ? x.fmod(period) : at::zeros_like(x);
        const Tensor below = x.lt(0);
        x = at::where(below, x.neg().sub(edge), x);
        const Tensor above = x.gt(size - 1 + edge / 2);
        x = at::where(above, x.neg().add(period - edge), x);
        slope = slope.masked_fill(below.logical_xor(above), -1);
      }
      slope = slope.masked_fill(x.lt(0).logical_or(x.gt(size - 1)), 0);
      x = x.clamp(0, size - 1);
    }
    weight = x.sub(x.floor());
    first = x.floor().to(at::kLong);
    second = first.add(1);
    if (border == Border::kWrap) second = second.remainder(size);
    if (border != Border::kWrap && border != Border::kConstant) second = second.clamp_max(size - 1);
  }
};

// Row i is the sum of the cross products p_j x q_k and q_j x p_k, j, k = i+1, i+2: linear in p and
// in q, and twice the cofactors where they are the same.
Tensor cross_rows(const Tensor& p, const Tensor& q) {
  return at::linalg_cross(p.roll(-1, 1), q.roll(-2, 1))
      .add(at::linalg_cross(q.roll(-1, 1), p.roll(-2, 1)));
}

class Positions {
 public:
  Positions(const Tensor& image, const Tensor& warp, const SymInt& out_height,
            const SymInt& out_width, const Options& options)
      : image_(image),
        warp_(warp),
        shape_(check_inputs(kWarp, image, warp, options)),
        out_(shape_.out(out_height, out_width)),
        border_(border_of(kWarp, options.border_mode)),
        inverse_map_(options.inverse_map),
        height_(shape_.height.guard_int(__FILE__, __LINE__)),
        width_(shape_.width.guard_int(__FILE__, __LINE__)),
        flat_(options.nearest() || height_ == 0 || width_ == 0) {
    if (flat_) return;
    // The matrix as make_homography has it.
    const Tensor given = warp_batch(warp).to(at::kDouble);
    const Tensor largest = given.detach().abs().amax({1, 2}, /*keepdim=*/true);
    valid_ = largest.isfinite().logical_and(largest.gt(0));
    scale_ = at::where(valid_, largest, 1.0).log2().floor().neg().exp2();
    rows_ = at::where(valid_, given, at::eye(3, given.options())).mul(scale_);
    Tensor m = rows_;
    if (!inverse_map_) {
      m = cross_rows(rows_, rows_).div(2).mT();
      const Tensor det = rows_.select(1, 0).mul(m.select(2, 0)).sum(1);
      const Tensor r = rows_.abs(), shifted = r.roll(-1, 2), twice = r.roll(-2, 2);
      const Tensor magnitude = r.select(1, 0)
                                   .mul(shifted.select(1, 1)
                                            .mul(twice.select(1, 2))
                                            .add(twice.select(1, 1).mul(shifted.select(1, 2))))
                                   .sum(1);
      valid_ = valid_.logical_and(det.abs().gt(magnitude.mul(8 * DBL_EPSILON)).view({-1, 1, 1}));
    }

    const Tensor u = at::arange(out_width, given.options());
    const Tensor v = at::arange(out_height, given.options()).unsqueeze(1);
    grid_ = at::stack({u.add(v.mul(0)), v.add(u.mul(0)), u.add(v).mul(0).add(1)}).flatten(1);
    const Tensor p = m.matmul(grid_), position = p.narrow(1, 0, 2).div(p.narrow(1, 2, 1));
    valid_ = valid_.logical_and(position.isfinite().all(1, /*keepdim=*/true));
    if (border_ == Border::kConstant)
      for (const auto& [axis, size] : {std::pair(0, width_), {1, height_}}) {
        const Tensor x = position.narrow(1, axis, 1);
        valid_ = valid_.logical_and(x.gt(-1)).logical_and(x.lt(size));
      }
    w_ = at::where(valid_, p.narrow(1, 2, 1), 1.0);
    xy_ = at::where(valid_, p.narrow(1, 0, 2), 0.0).div(w_);
    x_ = Taps(xy_.narrow(1, 0, 1), width_, border_);
    y_ = Taps(xy_.narrow(1, 1, 1), height_, border_);

    pixels_ = image_batch(image)
                  .to(at::kDouble)
                  .flatten(2)
                  .expand_symint({shape_.batch, shape_.channels, shape_.height * shape_.width});
    Tensor border = at::zeros_symint({shape_.channels, 1}, given.options());
    const SymInt each = options.border_value.size() == 1 ? shape_.channels : SymInt(1);
    for (size_t c = 0; c < options.border_value.size(); ++c)
      border.narrow_symint(0, c, each).fill_(options.border_value[c]);
    const auto tap = [&](const Tensor& row, const Tensor& column) {
      return at::where(inside(row, column), pixels_.gather(2, index(row, column)), border);
    };
    const Tensor a = tap(y_.first, x_.first), b = tap(y_.first, x_.second),
                 c = tap(y_.second, x_.first), d = tap(y_.second, x_.second);
    slope_x_ = b.sub(a).lerp(d.sub(c), y_.weight).mul(x_.slope);
    slope_y_ = c.sub(a).lerp(d.sub(b), x_.weight).mul(y_.slope);
    twist_ = a.sub(b).sub(c).add(d).mul(x_.slope).mul(y_.slope);
  }

  // The tangent of the result where warp moves along `tangent`.
  Tensor jvp(const Tensor& tangent) const {
    if (flat_) return at::zeros_symint(out_, image_.options());
    const Motion move = motion(tangent);
    const Tensor out = slope_x_.mul(move.x).add(slope_y_.mul(move.y));
    return at::where(valid_, out, 0.0).reshape_symint(out_).to(image_.scalar_type());
  }

  // The gradients of sum(grad * jvp(tangent)).
  Tensor image_gradient(const Tensor& grad, const Tensor& tangent) const {
    if (flat_) return at::zeros_like(image_);
    const Motion move = motion(tangent);
    const Tensor g = upstream(grad), x = move.x.mul(x_.slope), y = move.y.mul(y_.slope);
    const Tensor right = x_.weight, left = right.neg().add(1), below = y_.weight,
                 above = below.neg().add(1);
    Tensor sum = at::zeros_like(pixels_);
    const auto add = [&](const Tensor& row, const Tensor& column, const Tensor& weight) {
      sum = sum.scatter_add(2, index(row, column),
                            at::where(inside(row, column), g.mul(weight), 0.0));
    };
    add(y_.first, x_.first, above.mul(x).add(left.mul(y)).neg());
    add(y_.first, x_.second, above.mul(x).sub(right.mul(y)));
    add(y_.second, x_.first, left.mul(y).sub(below.mul(x)));
    add(y_.second, x_.second, below.mul(x).add(right.mul(y)));
    return for_input(sum, shape_.image_batch, image_);
  }

  Tensor warp_gradient(const Tensor& grad, const Tensor& tangent) const {
    if (flat_) return at::zeros_like(warp_);
    const Motion move = motion(tangent);
    const Tensor g = upstream(grad);
    const Tensor gx = g.mul(slope_x_).sum(1, true), gy = g.mul(slope_y_).sum(1, true);
    const Tensor twist = g.mul(twist_).sum(1, true), spread = move.w.div(w_);
    // What moves grad * jvp: (x, y), w at a fixed (x, y), and the tangent of m.
    const Tensor of_m =
        m_gradient(twist.mul(move.y).sub(spread.mul(gx)), twist.mul(move.x).sub(spread.mul(gy)),
                   gx.mul(move.x).add(gy.mul(move.y)));
    const Tensor of_tangent = m_gradient(gx, gy, at::zeros_like(gx));
    Tensor out = of_m;
    if (!inverse_map_)
      out = rows_gradient(rows_, of_m).add(rows_gradient(scaled(tangent), of_tangent));
    return for_input(out.mul(scale_), shape_.warp_batch, warp_);
  }

 private:
  struct Motion {
    Tensor x, y, w;
  };

  Tensor scaled(const Tensor& tangent) const {
    return warp_batch(tangent).to(at::kDouble).mul(scale_);
  }

  // How (x, y) and w of every pixel move where warp moves along `tangent`.
  Motion motion(const Tensor& tangent) const {
    const Tensor rows = scaled(tangent), m = inverse_map_ ? rows : cross_rows(rows_, rows).mT();
    const Tensor p = m.matmul(grid_), w = p.narrow(1, 2, 1);
    const Tensor xy = p.narrow(1, 0, 2).sub(xy_.mul(w)).div(w_);
    return {xy.narrow(1, 0, 1), xy.narrow(1, 1, 1), w};
  }

  Tensor upstream(const Tensor& grad) const {
    const Tensor g =
        grad.to(at::kDouble).reshape_symint({shape_.batch, shape_.channels, grid_.sym_size(1)});
    return at::where(valid_, g, 0.0);
  }

  // The gradient of m from those of x and y, less one of w; see project_backward.
  Tensor m_gradient(const Tensor& gx, const Tensor& gy, const Tensor& less_w) const {
    const Tensor gxy = at::cat({gx, gy}, 1), gw = gxy.mul(xy_).sum(1, true).add(less_w).neg();
    return at::cat({gxy, gw}, 1).div(w_).matmul(grid_.t());
  }

  // The gradient of sum(g * cross_rows(rows, q).mT) with respect to q.
  static Tensor rows_gradient(const Tensor& rows, const Tensor& g) {
    const Tensor columns = g.mT();
    return at::linalg_cross(rows.roll(-2, 1), columns)
        .roll(1, 1)
        .add(at::linalg_cross(columns, rows.roll(-1, 1)).roll(2, 1));
  }

  Tensor inside(const Tensor& row, const Tensor& column) const {
    return row.ge(0)
        .logical_and(row.lt(height_))
        .logical_and(column.ge(0))
        .logical_and(column.lt(width_));
  }

  Tensor index(const Tensor& row, const Tensor& column) const {
    const Tensor flat = row.clamp(0, height_ - 1).mul(width_).add(column.clamp(0, width_ - 1));
    return flat.expand_symint({shape_.batch, shape_.channels, grid_.sym_size(1)});
  }

  Tensor image_, warp_;
  Shape shape_;
  c10::SymDimVector out_;
  Border border_;
  bool inverse_map_;
  int64_t height_, width_;
  bool flat_;  // nothing moves with warp
  Tensor valid_, scale_, rows_, grid_, w_, xy_;
  Taps x_, y_;
  Tensor pixels_, slope_x_, slope_y_, twist_;
};

void add(Tensor& sum, const Tensor& term) { sum = sum.defined() ? sum.add(term) : term; }

// One call of warp_perspective; inputs: image, warp.
struct Forward {
  static constexpr const char* kNode = "WarpPerspectiveBackward";
  SymInt height, width;
  Options options;

  template <class Visit>
  void visit(Visit&& visit) {
    visit(height);
    visit(width);
    options.visit(visit);
  }

  tensor_list forward(const tensor_list& in) const {
    return {call_warp(in[0], in[1], {height, width}, options)};
  }

  tensor_list backward(const tensor_list& upstream, const tensor_list& in,
                       const std::vector<bool>& needed) const {
    return call_backward(upstream[0], in[0], in[1], options, {needed[0], needed[1]});
  }

  tensor_list jvp(const tensor_list& tangents, const tensor_list& in) const {
    Tensor out;
    if (tangents[0].defined())
      add(out, call_warp(tangents[0], in[1], {height, width}, options.without_value()));
    if (tangents[1].defined())
      add(out, Positions(in[0], in[1], height, width, options).jvp(tangents[1]));
    return {out};
  }
};

// One call of _warp_perspective_backward; inputs: grad, image, warp.
struct Backward {
  static constexpr const char* kNode = "WarpPerspectiveBackwardBackward";
  Options options;
  Mask mask;

  template <class Visit>
  void visit(Visit&& visit) {
    options.visit(visit);
    for (bool& wanted : mask) visit(wanted);
  }

  Positions positions(const tensor_list& in) const {
    return {in[1], in[2], in[0].sym_size(-2), in[0].sym_size(-1), options};
  }

  tensor_list forward(const tensor_list& in) const {
    tensor_list out = call_backward(in[0], in[1], in[2], options, mask);
    for (Tensor& gradient : out)
      if (!gradient.defined()) gradient = in[0].new_empty({0});
    return out;
  }

  tensor_list backward(const tensor_list& upstream, const tensor_list& in,
                       const std::vector<bool>& needed) const {
    tensor_list out(3);
    if (mask[0] && upstream[0].defined()) {
      const Tensor& image = upstream[0];
      if (needed[0])
        add(out[0], call_warp(image, in[2], {in[0].sym_size(-2), in[0].sym_size(-1)},
                              options.without_value()));
      if (needed[2])
        add(out[2], call_backward(in[0], image, in[2], options.without_value(), {false, true})[1]);
    }
    if (mask[1] && upstream[1].defined()) {
      const Positions at = positions(in);
      if (needed[0]) add(out[0], at.jvp(upstream[1]));
      if (needed[1]) add(out[1], at.image_gradient(in[0], upstream[1]));
      if (needed[2]) add(out[2], at.warp_gradient(in[0], upstream[1]));
    }
    return out;
  }

  tensor_list jvp(const tensor_list& tangents, const tensor_list& in) const {
    tensor_list out(2);
    if (tangents[0].defined()) out = call_backward(tangents[0], in[1], in[2], options, mask);
    if (tangents[1].defined() && mask[1])
      add(out[1],
          call_backward(in[0], tangents[1], in[2], options.without_value(), {false, true})[1]);
    if (tangents[2].defined()) {
      const Positions at = positions(in);
      if (mask[0]) add(out[0], at.image_gradient(in[0], tangents[2]));
      if (mask[1]) add(out[1], at.warp_gradient(in[0], tangents[2]));
    }
    return out;
  }
};

// ---- registration -------------------------------------------------------------------------------

Tensor warp_kernel(const Tensor& image, const Tensor& warp, c10::SymIntArrayRef dsize,
                   std::string_view interpolation, std::string_view border_mode,
                   Doubles border_value, bool inverse_map) {
  return forward(image, warp, dsize,
                 make_options(interpolation, border_mode, border_value, inverse_map));
}

Two backward_kernel(const Tensor& grad, const Tensor& image, const Tensor& warp,
                    std::string_view interpolation, std::string_view border_mode,
                    Doubles border_value, bool inverse_map, Mask output_mask) {
  return backward(grad, image, warp,
                  make_options(interpolation, border_mode, border_value, inverse_map), output_mask);
}

Tensor warp_autograd(const Tensor& image, const Tensor& warp, c10::SymIntArrayRef dsize,
                     std::string_view interpolation, std::string_view border_mode,
                     Doubles border_value, bool inverse_map) {
  // What rounds to integers has no derivative, and must not drop it without a word.
  expect(kWarp, "image",
         image.scalar_type() != at::kByte || !(torch::autograd::compute_requires_grad(warp) ||
                                               torch::autograd::isFwGradDefined(warp)),
         image.scalar_type(), "of dtype float32 or float64 where `warp` has a derivative");
  expect(kWarp, "dsize", dsize.size() == 2, dsize, "(height, width), both >= 0");
  return differentiable(
      Forward{dsize[0], dsize[1],
              make_options(interpolation, border_mode, border_value, inverse_map)},
      {image, warp})[0];
}

Two backward_autograd(const Tensor& grad, const Tensor& image, const Tensor& warp,
                      std::string_view interpolation, std::string_view border_mode,
                      Doubles border_value, bool inverse_map, Mask output_mask) {
  tensor_list out = differentiable(
      Backward{make_options(interpolation, border_mode, border_value, inverse_map), output_mask},
      {grad, image, warp});
  return {out[0], out[1]};
}

// vmap folds its dimension into N, which image and warp get both.
Tensor items(const Tensor& tensor, const SymInt& batch) {
  c10::SymDimVector sizes(tensor.sym_sizes());
  sizes[0] = batch;
  return tensor.expand_symint(sizes);
}

Tensor warp_vmap(const Tensor& image, const Tensor& warp, c10::SymIntArrayRef dsize,
                 std::string_view interpolation, std::string_view border_mode, Doubles border_value,
                 bool inverse_map) {
  const Options options = make_options(interpolation, border_mode, border_value, inverse_map);
  const Shape shape = check_inputs(kWarp, image, warp, options);
  const Tensor out =
      fold_vmap(Forward{dsize[0], dsize[1], options},
                {items(image_batch(image), shape.batch), items(warp_batch(warp), shape.batch)})[0];
  return out.reshape_symint(shape.out(dsize[0], dsize[1]));
}

Two backward_vmap(const Tensor& grad, const Tensor& image, const Tensor& warp,
                  std::string_view interpolation, std::string_view border_mode,
                  Doubles border_value, bool inverse_map, Mask output_mask) {
  const Options options = make_options(interpolation, border_mode, border_value, inverse_map);
  const Shape shape = check_inputs(kBackward, image, warp, options);
  const Tensor upstream =
      grad.reshape_symint({shape.batch, shape.channels, grad.sym_size(-2), grad.sym_size(-1)});
  const tensor_list out = fold_vmap(
      Backward{options, output_mask},
      {upstream, items(image_batch(image), shape.batch), items(warp_batch(warp), shape.batch)});
  return {output_mask[0] ? for_input(out[0], shape.image_batch, image) : out[0],
          output_mask[1] ? for_input(out[1], shape.warp_batch, warp) : out[1]};
}

TORCH_LIBRARY_FRAGMENT(calcops, m) {
  m.def(
      "warp_perspective(Tensor image, Tensor warp, SymInt[2] dsize=[8, 8], str "
      "interpolation=\"linear\", str border_mode=\"constant\", float[]? border_value=None, "
      "bool inverse_map=False) -> Tensor");
  m.def(
      "_warp_perspective_backward(Tensor grad, Tensor image, Tensor warp, str interpolation, "
      "str border_mode, float[]? border_value, bool inverse_map, bool[2] output_mask) -> "
      "(Tensor, Tensor)");
}

void impl_kernels(torch::Library& m) {
  m.impl("warp_perspective", TORCH_FN(warp_kernel));
  m.impl("_warp_perspective_backward", TORCH_FN(backward_kernel));
}

TORCH_LIBRARY_IMPL(calcops, CPU, m) { impl_kernels(m); }
TORCH_LIBRARY_IMPL(calcops, Meta, m) { impl_kernels(m); }
TORCH_LIBRARY_IMPL(calcops, CUDA, m) {
#ifdef CALCOPS_NO_CUDA
  for (const char* op : {kWarp, kBackward})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&built_without_cuda>());
#else
  impl_kernels(m);
#endif
}
TORCH_LIBRARY_IMPL(calcops, Autograd, m) {
  m.impl("warp_perspective", TORCH_FN(warp_autograd));
  m.impl("_warp_perspective_backward", TORCH_FN(backward_autograd));
}
TORCH_LIBRARY_IMPL(calcops, FuncTorchBatched, m) {
  m.impl("warp_perspective", TORCH_FN(warp_vmap));
  m.impl("_warp_perspective_backward", TORCH_FN(backward_vmap));
}

}  // namespace
}  // namespace calcops
