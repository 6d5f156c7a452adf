// The derivatives of warp_perspective and of the operators behind it.
//
// The result is linear in the image. Where warp moves along a tangent, the source (x, y) of each
// pixel moves, so the result changes by slope_x * x' + slope_y * y'. The operator
// _warp_perspective_slope gives the slopes, and _warp_perspective_backward the gradients of results
// and slopes. PyTorch's operators compute the motion (x', y'). Slopes of slopes are slopes of a
// higher order, so these operators give derivatives to any order.
#pragma once

#include <calcops/operator.h>

#include "warp_perspective/warp_perspective.h"

namespace calcops::ops::warp_perspective {

constexpr char kOp[] = "calcops::warp_perspective";

// The dimensions of one call's image and warp. N is 1 where both lack it.
struct Dimensions {
  Value N = 1, C = 1, H, W;
  bool has_N, has_C;

  Dimensions(const Value& image, const Value& warp) {
    const int rank = image.dim(), warp_rank = warp.dim();
    if (rank < 2 || rank > 4)
      refuse(kOp, "image", "of shape [N or 1, C, H, W], [C, H, W] or [H, W]", image.shape());
    has_N = rank == 4 || warp_rank == 3;
    has_C = rank > 2;
    H = image.size(-2);
    W = image.size(-1);
    if (has_C) C = image.size(-3);
    if (rank == 4) N = image.size(0);
    bool is_ok = (warp_rank == 2 || warp_rank == 3) && warp.size(-2).expect_equal(3) &&
                 warp.size(-1).expect_equal(3);
    if (is_ok && warp_rank == 3) {
      const Value count = warp.size(0);
      // A guard is needed only if neither size is known.
      if (rank < 4 || N.is_known(1) || (!count.is_known(1) && N.equals(1)))
        N = count;
      else
        is_ok = count.is_known(1) || count.equals(1) || count.expect_equal(N);
    }
    if (is_ok) return;
    const char* const what = "of shape [N or 1, 3, 3] or [3, 3]";
    if (rank < 4 || N.equals(1)) refuse(kOp, "warp", what, warp.shape());
    refuse(kOp, "warp", "of shape [N or 1, 3, 3] or [3, 3], [N] =", Value::list(N), warp.shape());
  }

  // Return the shape of a result.
  Value shape(const Value& height, const Value& width) const {
    if (has_N && has_C) return Value::list(N, C, height, width);
    if (has_N) return Value::list(N, height, width);
    return has_C ? Value::list(C, height, width) : Value::list(height, width);
  }
};

namespace warp_derivatives {

inline Value call(const char* op, const Value& a) { return Value::call(op, a); }

template <class... Values>
Value call(const char* op, const Value& a, const Values&... others) {
  return Value::call(op, a, others...);
}

inline Value to_float64(const Value& x) {
  return call("aten::to.dtype", x, Value::dtype_of(Type::kFloat64));
}

inline Value where(const Value& condition, const Value& x, double otherwise) {
  return call("aten::where.ScalarOther", condition, x, otherwise);
}

inline Value narrow(const Value& x, int64_t from, int64_t count) {
  return call("aten::narrow", x, 1, from, count);
}

inline Value reshape(const Value& x, const Value& shape) { return call("aten::reshape", x, shape); }

inline Value to_dtype_of(const Value& x, const Value& other) {
  return call("aten::to.dtype", x, other.dtype());
}

inline Value transposed(const Value& x) { return call("aten::transpose.int", x, -2, -1); }
inline Value minus(const Value& x) { return call("aten::neg", x); }

inline Value roll(const Value& x, int64_t shift, int64_t dimension) {
  return call("aten::roll", x, Value::list(shift), Value::list(dimension));
}

// Cross products along the last dimension.
inline Value cross(const Value& a, const Value& b) { return call("aten::linalg_cross", a, b); }

// Return zeros of a shape that take the memory of one number.
inline Value zeros(const Value& like, const Value& shape) {
  return call("aten::expand", call("aten::new_zeros", like, Value::list(1)), shape);
}

// Return the matrix whose row i is p_j x q_k + q_j x p_k, where j = i + 1 and k = i + 2 (modulo 3)
// and p_j is row j of p. It is linear in p and in q. With p = q it is twice the matrix of
// cofactors.
inline Value cross_rows(const Value& p, const Value& q) {
  return cross(roll(p, -1, 1), roll(q, -2, 1)) + cross(roll(q, -1, 1), roll(p, -2, 1));
}

// The arguments of one call of any of the operators.
struct Warping {
  Value image, warp, interpolation, border_mode, border_value, inverse_map;
  Value order_x = 0, order_y = 0;

  // `arguments` begin with `image`. There are `skipped` arguments between warp and interpolation.
  Warping(const Value* arguments, int skipped, bool has_order)
      : image(arguments[0]),
        warp(arguments[1]),
        interpolation(arguments[2 + skipped]),
        border_mode(arguments[3 + skipped]),
        border_value(arguments[4 + skipped]),
        inverse_map(arguments[5 + skipped]) {
    if (!has_order) return;
    order_x = arguments[6 + skipped];
    order_y = arguments[7 + skipped];
  }

  // Return the call with another image and a border of 0.
  Warping of(const Value& other_image) const {
    Warping other = *this;
    other.image = other_image;
    other.border_value = nullptr;
    return other;
  }

  // Return the call for a derivative of this one for x or y, in float64.
  Warping derivative(int of_x, int of_y) const {
    Warping other = *this;
    other.image = to_float64(image);
    other.warp = to_float64(warp);
    other.order_x = order_x + of_x;
    other.order_y = order_y + of_y;
    return other;
  }

  // Return the result for a float64 image, or its derivative of the call's order.
  Value slope(const Value& height, const Value& width) const {
    return call("_warp_perspective_slope", image, warp, Value::list(height, width), interpolation,
                border_mode, border_value, inverse_map, order_x, order_y);
  }

  // Return the result without the constant that border_value adds. `destination` has the result's
  // shape. Its values are used only for a transparent border.
  Value linear_part(const Value& destination) const {
    const Value height = destination.size(-2), width = destination.size(-1);
    if (!order_x.equals(0) || !order_y.equals(0)) return of(image).slope(height, width);
    const bool is_kept = border_mode.is("transparent");
    return call("warp_perspective", image, warp, Value::list(height, width), interpolation,
                border_mode, nullptr, inverse_map, is_kept ? destination : Value());
  }

  // Return [grad_image, grad_warp].
  Value gradients(const Value& grad, bool of_image, bool of_warp) const {
    return call("_warp_perspective_backward", grad, image, warp, interpolation, border_mode,
                border_value, inverse_map, order_x, order_y, Value::list(of_image, of_warp));
  }

  Value warp_gradient(const Value& grad) const { return gradients(grad, false, true)[1]; }

  // Return whether the result's derivative for warp is 0.
  bool is_flat() const {
    return interpolation.is("nearest") || image.size(-2).equals(0) || image.size(-1).equals(0);
  }

  // Return matrices as [N, 3, 3] in float64.
  static Value matrices(const Value& warp) {
    return warp.dim() == 2 ? call("aten::unsqueeze", to_float64(warp), 0) : to_float64(warp);
  }
};

// The motion of the sources of a call's pixels where warp moves along `tangent`, as a
// differentiable function of both.
class Motion {
 public:
  Value x, y;  // [N, 1, h, w]

  Motion(const Warping& warping, const Value& tangent, const Value& height, const Value& width)
      : warp_(warping.warp),
        is_inverse_(warping.inverse_map.item() != 0),
        batch_(Dimensions(warping.image, warping.warp)),
        shape_(batch_.shape(height, width)),
        full_shape_(Value::list(batch_.N, batch_.C, height, width)) {
    const Value warps = Warping::matrices(warp_);
    const Value sources_and_scale =
        call("_warp_perspective_sources", call("aten::detach", warps),
             Value::list(batch_.H, batch_.W), Value::list(height, width), warping.interpolation,
             warping.border_mode, warping.inverse_map);
    const Value sources = sources_and_scale[0];
    const Value kernel_scale = sources_and_scale[1];
    // The scale is 0 if a matrix gives no pixel a source. The identity replaces such a matrix.
    const Value usable = call("aten::gt.Scalar", kernel_scale, 0);
    scale_ = where(usable, kernel_scale, 1.0);
    const Value identity = call("aten::eye", 3, warps.dtype(), /*layout=*/nullptr, warps.device());
    rows_ = call("aten::where.self", usable, warps, identity) * scale_;
    tangent_ = Warping::matrices(tangent) * scale_;
    const auto range = [&](const Value& count) {
      return call("aten::arange", count, warps.dtype(), /*layout=*/nullptr, warps.device());
    };
    u_ = range(width);
    v_ = range(height);

    // The values are those of the kernel, for which the taps are certain. The formulas give the
    // derivatives.
    const auto with_derivatives = [](const Value& number, const Value& formula) {
      return number + (formula - call("aten::detach", formula));
    };
    const Value numbers = reshape(sources, Value::list(sources.size(0), 3, height, width));
    const Value w = narrow(numbers, 2, 1);
    valid_ = call("aten::ne.Scalar", w, 0);
    const Value p = pixels(is_inverse_ ? rows_ : transposed(cross_rows(rows_, rows_) / 2));
    w_ = with_derivatives(where(valid_, w, 1.0), narrow(p, 2, 1));
    xy_ = with_derivatives(narrow(numbers, 0, 2), narrow(p, 0, 2) / w_);

    // (X', Y', W') is the tangent of m (u, v, 1).
    const Value moved = pixels(is_inverse_ ? tangent_ : transposed(cross_rows(rows_, tangent_)));
    spread_ = where(valid_, narrow(moved, 2, 1) / w_, 0.0);
    const Value xy = where(valid_, narrow(moved, 0, 2) / w_ - xy_ * spread_, 0.0);
    x = narrow(xy, 0, 1);
    y = narrow(xy, 1, 1);
  }

  // Return a result as [N, C, h, w], with 0 for pixels without a source.
  Value items(const Value& result) const {
    return where(valid_, reshape(to_float64(result), full_shape_), 0.0);
  }

  // Return the result of items().
  Value result(const Value& items) const { return reshape(items, shape_); }

  // Return the gradient of sum(gx * x + gy * y) for warp. The motion is (X' - x W', Y' - y W') / W.
  Value warp_gradient(const Value& gx, const Value& gy) const {
    Value of_rows = m_gradient(minus(spread_ * gx), minus(spread_ * gy), gx * x + gy * y);
    if (!is_inverse_)
      of_rows = rows_gradient(rows_, of_rows) + rows_gradient(tangent_, m_gradient(gx, gy, gx * 0));
    // If one matrix serves all items, its gradient is their sum.
    const bool serves_all = warp_.dim() == 2 || warp_.size(0).equals(1);
    const Value sum = serves_all ? call("aten::sum.dim_IntList", of_rows, Value::list(0)) : of_rows;
    return reshape(sum * scale_, warp_.shape());
  }

 private:
  // Return m (u, v, 1) of each pixel of the result, [N, 3, h, w].
  Value pixels(const Value& m) const {
    const Value entries = call("aten::unsqueeze", m, 3);
    const auto column = [&](int k) { return call("aten::narrow", entries, 2, k, 1); };
    return (column(0) * u_ + column(2)) + column(1) * call("aten::unsqueeze", v_, 1);
  }

  // Return the gradient for m from those for the source's x and y, as project_backward. `less_w` is
  // subtracted from the gradient for W.
  Value m_gradient(const Value& gx, const Value& gy, const Value& less_w) const {
    const Value gxy = call("aten::cat", Value::list(gx, gy), 1);
    const Value gw =
        minus(call("aten::sum.dim_IntList", gxy * xy_, Value::list(1), /*keepdim=*/true) + less_w);
    const Value g = call("aten::cat", Value::list(gxy, gw), 1) / w_;
    const auto sum = [](const Value& values, int dimension, bool keepdim) {
      return call("aten::sum.dim_IntList", values, Value::list(dimension), keepdim);
    };
    const Value columns = sum(g, 2, false), rows = sum(g, 3, false);
    return call(
        "aten::cat",
        Value::list(sum(columns * u_, 2, true), sum(rows * v_, 2, true), sum(columns, 2, true)), 2);
  }

  // Return the gradient of sum(g * cross_rows(rows, q).mT) for q.
  static Value rows_gradient(const Value& rows, const Value& g) {
    const Value columns = transposed(g);
    return roll(cross(roll(rows, -2, 1), columns), 1, 1) +
           roll(cross(columns, roll(rows, -1, 1)), 2, 1);
  }

  Value warp_;
  bool is_inverse_;
  Dimensions batch_;
  Value shape_, full_shape_, valid_, scale_, rows_, tangent_, u_, v_, w_, xy_, spread_;
};

inline void add(Value& sum, const Value& term) { sum = sum.is_none() ? term : sum + term; }

// Add the derivative of the call's result along a tangent of warp.
inline void add_tangent(const Warping& warping, const Value& tangent, const Value& height,
                        const Value& width, Value& sum) {
  if (warping.is_flat()) return;
  const Motion motion(warping, tangent, height, width);
  const Value along_x = warping.derivative(1, 0).slope(height, width);
  const Value along_y = warping.derivative(0, 1).slope(height, width);
  const Value items = motion.items(along_x) * motion.x + motion.items(along_y) * motion.y;
  add(sum, to_dtype_of(motion.result(items), warping.image));
}

// Add the gradients of sum(grad * that derivative) to the wanted ones of image and warp.
inline void add_gradients(const Warping& warping, const Value& tangent, const Value& grad,
                          Value& of_image, Value& of_warp) {
  const bool wants_image = of_image.is_wanted(), wants_warp = of_warp.is_wanted();
  if (!wants_image && !wants_warp) return;
  if (warping.is_flat()) {
    if (wants_image) add(of_image, call("aten::zeros_like", warping.image));
    if (wants_warp) add(of_warp, call("aten::zeros_like", warping.warp));
    return;
  }
  const Value height = grad.size(-2), width = grad.size(-1);
  const Motion motion(warping, tangent, height, width);
  const Value g = motion.items(grad);
  Value to_image, to_warp;  // float64
  const auto add_along = [&](const Warping& derivative, const Value& step) {
    const Value both = derivative.gradients(motion.result(g * step), wants_image, wants_warp);
    if (wants_image) add(to_image, both[0]);
    if (!wants_warp) return Value();
    add(to_warp, both[1]);
    const Value slope = motion.items(derivative.slope(height, width));
    return call("aten::sum.dim_IntList", g * slope, Value::list(1), /*keepdim=*/true);
  };
  const Value gx = add_along(warping.derivative(1, 0), motion.x);
  const Value gy = add_along(warping.derivative(0, 1), motion.y);
  if (wants_image) add(of_image, to_dtype_of(to_image, warping.image));
  if (wants_warp) add(of_warp, to_dtype_of(to_warp + motion.warp_gradient(gx, gy), warping.warp));
}

// ---- warp_perspective(image, warp, dsize, interpolation, ..., destination) ----------------------

constexpr int kDestination = 7;

// Set the wanted gradients of image and warp.
inline void set_gradients(const Warping& warping, const Value& upstream, Value* gradients) {
  const bool of_image = gradients[0].is_wanted(), of_warp = gradients[1].is_wanted();
  if (!of_image && !of_warp) return;
  const Value of_both = warping.gradients(upstream, of_image, of_warp);
  if (of_image) gradients[0] = of_both[0];
  if (of_warp) gradients[1] = of_both[1];
}

inline void vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Warping warping(arguments, 1, false);
  const Value& image = arguments[0];
  set_gradients(warping, upstream[0], gradients);
  if (gradients[kDestination].is_wanted())
    gradients[kDestination] = warping.of(zeros(image, image.shape())).linear_part(upstream[0]);
}

inline void jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Warping warping(arguments, 1, false);
  const Value &image = tangents[0], &warp = tangents[1], &destination = tangents[kDestination];
  const Value like = arguments[0];
  const bool has_size = arguments[2].length() == 2;
  const Value height = has_size ? arguments[2][0] : like.size(-2);
  const Value width = has_size ? arguments[2][1] : like.size(-1);
  if (!warp.is_none()) add_tangent(warping, warp, height, width, results[0]);
  if (image.is_none() && destination.is_none()) return;
  // Without a transparent border there is no destination. Then only height and width are used.
  const Value& kept = arguments[kDestination];
  const Value zero = zeros(like, kept.is_none() ? Value::list(height, width) : kept.shape());
  const Warping moved = warping.of(image.is_none() ? zeros(like, like.shape()) : image);
  add(results[0], moved.linear_part(destination.is_none() ? zero : destination));
}

// ---- _warp_perspective_backward(grad, image, warp, interpolation, ..., output_mask) -------------

constexpr int kMask = 9;

inline void backward_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Value &grad = arguments[0], &mask = arguments[kMask];
  const Warping warping(arguments + 1, 0, true);
  const bool of_grad = gradients[0].is_wanted();
  if (mask[0].item() && !upstream[0].is_none()) {
    const Warping moved = warping.of(upstream[0]);
    if (of_grad) add(gradients[0], moved.linear_part(zeros(grad, grad.shape())));
    if (gradients[2].is_wanted()) add(gradients[2], moved.warp_gradient(grad));
  }
  if (!mask[1].item() || upstream[1].is_none()) return;
  if (of_grad) add_tangent(warping, upstream[1], grad.size(-2), grad.size(-1), gradients[0]);
  add_gradients(warping, upstream[1], grad, gradients[1], gradients[2]);
}

inline void backward_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Value &grad = arguments[0], &mask = arguments[kMask];
  const Warping warping(arguments + 1, 0, true);
  const bool of_image = mask[0].item(), of_warp = mask[1].item();
  if (!tangents[0].is_none()) {
    const Value of_both = warping.gradients(tangents[0], of_image, of_warp);
    if (of_image) results[0] = of_both[0];
    if (of_warp) results[1] = of_both[1];
  }
  if (!tangents[1].is_none() && of_warp)
    add(results[1], warping.of(tangents[1]).warp_gradient(grad));
  // False marks a gradient that is not wanted, as in Value::is_wanted().
  if (!of_image) results[0] = false;
  if (!of_warp) results[1] = false;
  if (!tangents[2].is_none()) add_gradients(warping, tangents[2], grad, results[0], results[1]);
}

// ---- _warp_perspective_slope(pixels, warp, dsize, interpolation, ..., order_x, order_y) ---------

inline void slope_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  set_gradients(Warping(arguments, 1, true), upstream[0], gradients);
}

inline void slope_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Warping warping(arguments, 1, true);
  const Value height = arguments[2][0], width = arguments[2][1];
  if (!tangents[0].is_none()) results[0] = warping.of(tangents[0]).slope(height, width);
  if (!tangents[1].is_none()) add_tangent(warping, tangents[1], height, width, results[0]);
}

// ---- _warp_perspective_sources: no derivatives, because Motion adds those of formulas -----------

inline void sources_vjp(const Value*, const Value*, Value*) {}
inline void sources_jvp(const Value*, const Value*, Value*) {}

}  // namespace warp_derivatives

const Derivative kDerivativesOfWarp[] = {
    {"warp_perspective", warp_derivatives::vjp, warp_derivatives::jvp, "destination"}};

const Derivative kDerivativesOfDerivatives[] = {
    {"_warp_perspective_backward", warp_derivatives::backward_vjp, warp_derivatives::backward_jvp},
    {"_warp_perspective_slope", warp_derivatives::slope_vjp, warp_derivatives::slope_jvp},
    {"_warp_perspective_sources", warp_derivatives::sources_vjp, warp_derivatives::sources_jvp},
};

}  // namespace calcops::ops::warp_perspective
