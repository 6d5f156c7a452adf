// The derivatives of warp_perspective and of the operators behind it.
//
// "The tangent" of a result is its derivative along a tangent of warp.
//
// The result is linear in the image. So calls of the operators give every derivative, except those
// of the tangent. PyTorch's operators compute these from the source (x, y) of every destination
// pixel. So they are differentiable to any order.
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

inline Value matmul(const Value& a, const Value& b) { return call("aten::matmul", a, b); }
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

// Return `number`, which a kernel computed, with the derivatives of the formula for it. The
// formula's value is not used, because it is rounded differently. Near a pixel centre, it could
// belong to other taps than the kernel's number.
inline Value with_derivatives(const Value& number, const Value& formula) {
  return number + (formula - call("aten::detach", formula));
}

// The weights of an axis's taps, and their first and second derivatives for the coordinate.
struct Weights {
  Value weight[4], first[4], second[4];  // a linear interpolation has no second

  // t and slope are the fraction and the slope of Axis (warp_perspective_math.h).
  void set(const Value& t, const Value& slope, bool is_cubic) {
    if (!is_cubic) {
      weight[0] = minus(t) + 1;
      weight[1] = t;
      first[0] = minus(slope);
      first[1] = slope;
      return;
    }
    // c[0] + c[1] t + c[2] t^2 + c[3] t^3, as in warp_perspective_math.h.
    constexpr double a = kKeys;
    constexpr double coefficients[4][4] = {
        {0, a, -2 * a, a}, {1, 0, -(a + 3), a + 2}, {0, -a, 2 * a + 3, -(a + 2)}, {0, 0, a, -a}};
    for (int k = 0; k < 4; ++k) {
      const double* c = coefficients[k];
      weight[k] = ((t * c[3] + c[2]) * t + c[1]) * t + c[0];
      first[k] = ((t * (3 * c[3]) + 2 * c[2]) * t + c[1]) * slope;
      second[k] = (t * (6 * c[3]) + 2 * c[2]) * (slope * slope);
    }
  }
};

// The arguments of one call of any of the operators.
struct Warping {
  Value image, warp, interpolation, border_mode, border_value, inverse_map;

  // `arguments` begin with `image`. There are `skipped` arguments between warp and interpolation.
  Warping(const Value* arguments, int skipped)
      : image(arguments[0]),
        warp(arguments[1]),
        interpolation(arguments[2 + skipped]),
        border_mode(arguments[3 + skipped]),
        border_value(arguments[4 + skipped]),
        inverse_map(arguments[5 + skipped]) {}

  // Return the call with another image and a border of 0.
  Warping of(const Value& other_image) const {
    Warping other = *this;
    other.image = other_image;
    other.border_value = nullptr;
    return other;
  }

  // Return the result without the constant that border_value adds. `destination` has the result's
  // shape. Its values are used only for a transparent border.
  Value linear_part(const Value& destination) const {
    const bool is_kept = border_mode.is("transparent");
    return call("warp_perspective", image, warp,
                Value::list(destination.size(-2), destination.size(-1)), interpolation, border_mode,
                nullptr, inverse_map, is_kept ? destination : Value());
  }

  Value tangent(const Value& along, const Value& height, const Value& width) const {
    return call("_warp_perspective_tangent", along, image, warp, Value::list(height, width),
                interpolation, border_mode, border_value, inverse_map);
  }

  // Return [grad_image, grad_warp].
  Value gradients(const Value& grad, bool of_image, bool of_warp) const {
    return call("_warp_perspective_backward", grad, image, warp, interpolation, border_mode,
                border_value, inverse_map, Value::list(of_image, of_warp));
  }

  Value warp_gradient(const Value& grad) const { return gradients(grad, false, true)[1]; }

  // Return whether the result's derivative for warp is 0.
  bool is_flat() const {
    return interpolation.is("nearest") || image.size(-2).equals(0) || image.size(-1).equals(0);
  }

  // Return the images [N, C, H, W] in float64. N and C are 1 if the argument lacks them.
  Value images() const {
    Value images = to_float64(image);
    for (int dim = image.dim(); dim < 4; ++dim) images = call("aten::unsqueeze", images, 0);
    return images;
  }

  // Return the matrices [N, 3, 3] in float64.
  static Value matrices(const Value& warp) {
    return warp.dim() == 2 ? call("aten::unsqueeze", to_float64(warp), 0) : to_float64(warp);
  }

  // Return border_value as [C, 1] or as one number.
  Value border(const Value& like) const {
    if (border_value.is_none() || border_value.length() == 0) return 0.0;
    if (border_value.length() == 1) return border_value[0];
    Value rows = call("aten::new_full", like, Value::list(1, 1), border_value[0]);
    for (int c = 1; c < border_value.length(); ++c)
      rows =
          call("aten::cat",
               Value::list(rows, call("aten::new_full", like, Value::list(1, 1), border_value[c])));
    return rows;
  }

  // Return the gradient for an input from those of the N items. If one input serves all items, it
  // is their sum.
  static Value for_input(const Value& items, const Value& input, int full_dim) {
    const bool serves_all = input.dim() < full_dim || input.size(0).equals(1);
    const Value sum = serves_all ? call("aten::sum.dim_IntList", items, Value::list(0)) : items;
    return call("aten::to.dtype", call("aten::reshape", sum, input.shape()), input.dtype());
  }
};

// The sources of a call's pixels as differentiable functions of warp. They give the derivatives of
// the result's tangent. `tangent` is the tangent of warp.
class Positions {
 public:
  Positions(const Warping& warping, const Value& tangent, const Value& height, const Value& width)
      : warping_(warping),
        is_inverse_(warping.inverse_map.item() != 0),
        taps_(warping.interpolation.is("cubic") ? 4 : 2) {
    const Value images = warping.images(), warps = Warping::matrices(warping.warp);
    const Value rows = images.size(2), columns = images.size(3);
    const Value batch = Dimensions(warping.image, warping.warp).N;
    const Value cells_and_scale =
        call("_warp_perspective_cells", call("aten::detach", warps), Value::list(rows, columns),
             Value::list(height, width), taps_, warping.border_mode, warping.inverse_map);
    const Value cells = cells_and_scale[0];
    const Value kernel_scale = cells_and_scale[1];
    // The scale is 0 if a matrix gives no pixel a source. The identity replaces such a matrix.
    const Value usable = call("aten::gt.Scalar", kernel_scale, 0);
    scale_ = where(usable, kernel_scale, 1.0);
    const Value identity = call("aten::eye", 3, warps.dtype(), /*layout=*/nullptr, warps.device());
    rows_ = call("aten::where.self", usable, warps, identity) * scale_;
    tangent_ = Warping::matrices(tangent) * scale_;
    const auto range = [&](const Value& count) {
      return call("aten::arange", count, warps.dtype(), /*layout=*/nullptr, warps.device());
    };
    const Value u = range(width), v = call("aten::unsqueeze", range(height), 1);
    // Its columns are (u, v, 1) of each destination pixel.
    grid_ = call("aten::flatten.using_ints",
                 call("aten::stack", Value::list(u + v * 0, v + u * 0, (u + v) * 0 + 1)), 1);

    // Return `count` of the pixels' numbers (CellNumber), beginning with `which`.
    const auto number = [&](int64_t which, int64_t count) { return narrow(cells, which, count); };
    const Value m = is_inverse_ ? rows_ : transposed(cross_rows(rows_, rows_) / 2);
    const Value p = matmul(m, grid_);
    valid_ = call("aten::ne.Scalar", number(kW, 1), 0);
    w_ = with_derivatives(where(valid_, number(kW, 1), 1.0), where(valid_, narrow(p, 2, 1), 1.0));
    xy_ = with_derivatives(number(kX, 2), where(valid_, narrow(p, 0, 2), 0.0) / w_);
    const Value slopes = number(kSlopeX, 2);
    const Value fractions = with_derivatives(number(kFractionX, 2), xy_ * slopes);
    x_.set(narrow(fractions, 0, 1), narrow(slopes, 0, 1), taps_ == 4);
    y_.set(narrow(fractions, 1, 1), narrow(slopes, 1, 1), taps_ == 4);

    const Value channels = images.size(1);
    const Value border = warping.border(warps);
    out_shape_ = Value::list(batch, channels, height * width);
    pixels_ = call("aten::expand", call("aten::flatten.using_ints", images, 2),
                   Value::list(batch, channels, rows * columns));
    for (int k = 0; k < taps_ * taps_; ++k) {
      const auto tap = [&](int which) {
        return call("aten::to.dtype", number(kTap + which, 1), Value::dtype_of(Type::kInt64));
      };
      const Value at_x = tap(k % taps_), at_y = tap(taps_ + k / taps_);
      inside_[k] = call("aten::logical_and", call("aten::ge.Scalar", at_x, 0),
                        call("aten::ge.Scalar", at_y, 0));
      const Value index = call("aten::where.ScalarOther", inside_[k], at_y * columns + at_x, 0);
      index_[k] = call("aten::expand", index, out_shape_);
      const Value values = call("aten::gather", pixels_, 2, index_[k]);
      tap_[k] = call(border.is_tensor() ? "aten::where.self" : "aten::where.ScalarOther",
                     inside_[k], values, border);
      finite_[k] = call("aten::nan_to_num", tap_[k], 0.0, 0.0, 0.0);
    }
  }

  // Return the derivative of the result's tangent where warp moves along `other`.
  Value second(const Value& other, const Value& like_shape) const {
    const Value along = Warping::matrices(other) * scale_;
    // The motions of the sources along `tangent` and along `other`.
    const Motion move = motion(tangent_), turn = motion(along);
    const Value along_x = sum(x_.first, y_.weight), along_y = sum(x_.weight, y_.first);
    const Value twist = sum(x_.first, y_.first);  // the mixed derivative for x and y
    // The derivatives of along_x and along_y where the sources move by `turn`.
    Value of_x = twist * turn.y, of_y = twist * turn.x;
    if (taps_ == 4) {
      of_x = of_x + sum(x_.second, y_.weight) * turn.x;
      of_y = of_y + sum(x_.weight, y_.second) * turn.y;
    }
    // (X, Y, W) = m (u, v, 1) are a pixel's homogeneous coordinates, and X', Y', W' their tangents.
    // move is (X' - x W', Y' - y W') / W. The direction `other` changes x, y and W. If m is an
    // adjugate, it also changes X', Y' and W', because an adjugate is not linear in warp. Together,
    // this changes move by bend / W.
    Value bend_x = minus(turn.x * move.w + move.x * turn.w);
    Value bend_y = minus(turn.y * move.w + move.y * turn.w);
    if (!is_inverse_) {
      const Value p = matmul(transposed(cross_rows(tangent_, along)), grid_);
      const Value bend = narrow(p, 0, 2) - xy_ * narrow(p, 2, 1);
      bend_x = bend_x + narrow(bend, 0, 1);
      bend_y = bend_y + narrow(bend, 1, 1);
    }
    const Value moved = of_x * move.x + of_y * move.y;
    const Value bent = (along_x * bend_x + along_y * bend_y) / w_;
    const Value out = call("aten::reshape", where(valid_, moved + bent, 0.0), like_shape);
    return call("aten::to.dtype", out, warping_.image.dtype());
  }

  // Return the gradient of sum(grad * the result's tangent) for the image.
  Value image_gradient(const Value& grad) const {
    const Motion move = motion(tangent_);
    const Value g = items(grad);
    Value sum = call("aten::zeros_like", pixels_);
    for (int k = 0; k < taps_ * taps_; ++k) {
      const int x = k % taps_, y = k / taps_;
      const Value weight =
          x_.first[x] * y_.weight[y] * move.x + x_.weight[x] * y_.first[y] * move.y;
      sum = call("aten::scatter_add", sum, 2, index_[k], where(inside_[k], g * weight, 0.0));
    }
    return Warping::for_input(sum, warping_.image, 4);
  }

  // Return the gradient of sum(grad * the result's tangent) for warp.
  Value warp_gradient(const Value& grad) const {
    const Motion move = motion(tangent_);
    const Value g = items(grad);
    const auto over_channels = [&](const Value* of_x, const Value* of_y) {
      return call("aten::sum.dim_IntList", g * sum(of_x, of_y), Value::list(1), /*keepdim=*/true);
    };
    const Value gx = over_channels(x_.first, y_.weight), gy = over_channels(x_.weight, y_.first);
    const Value twist = over_channels(x_.first, y_.first), spread = move.w / w_;
    Value of_x = twist * move.y, of_y = twist * move.x;
    if (taps_ == 4) {
      of_x = of_x + over_channels(x_.second, y_.weight) * move.x;
      of_y = of_y + over_channels(x_.weight, y_.second) * move.y;
    }
    // grad * tangent depends on warp by (x, y), by w at a fixed (x, y), and by the tangent of m.
    Value of_m = m_gradient(of_x - spread * gx, of_y - spread * gy, gx * move.x + gy * move.y);
    if (!is_inverse_)
      of_m = rows_gradient(rows_, of_m) + rows_gradient(tangent_, m_gradient(gx, gy, gx * 0));
    return Warping::for_input(of_m * scale_, warping_.warp, 3);
  }

 private:
  struct Motion {
    Value x, y, w;
  };

  Value items(const Value& grad) const {
    return where(valid_, call("aten::reshape", to_float64(grad), out_shape_), 0.0);
  }

  // Return the tangents of (x, y) and w of every pixel where warp moves along `rows`.
  Motion motion(const Value& rows) const {
    const Value m = is_inverse_ ? rows : transposed(cross_rows(rows_, rows));
    const Value p = matmul(m, grid_), w = narrow(p, 2, 1);
    const Value xy = (narrow(p, 0, 2) - xy_ * w) / w_;
    return {narrow(xy, 0, 1), narrow(xy, 1, 1), w};
  }

  // Return the gradient for m from those for x and y, as project_backward. `less_w` is subtracted
  // from the gradient for w.
  Value m_gradient(const Value& gx, const Value& gy, const Value& less_w) const {
    const Value gxy = call("aten::cat", Value::list(gx, gy), 1);
    const Value gw =
        minus(call("aten::sum.dim_IntList", gxy * xy_, Value::list(1), /*keepdim=*/true) + less_w);
    return matmul(call("aten::cat", Value::list(gxy, gw), 1) / w_, transposed(grid_));
  }

  // Return the gradient of sum(g * cross_rows(rows, q).mT) for q.
  static Value rows_gradient(const Value& rows, const Value& g) {
    const Value columns = transposed(g);
    return roll(cross(roll(rows, -2, 1), columns), 1, 1) +
           roll(cross(columns, roll(rows, -1, 1)), 2, 1);
  }

  // Return the sum of the taps, weighted by both axes. A tap of weight zero adds nothing, even if
  // it is NaN or infinite. Its weight may still have a derivative, for which such a tap counts as
  // 0.
  Value sum(const Value* of_x, const Value* of_y) const {
    Value total;
    for (int k = 0; k < taps_ * taps_; ++k) {
      const Value weight = of_x[k % taps_] * of_y[k / taps_];
      const Value is_used = call("aten::ne.Scalar", weight, 0);
      const Value term = weight * call("aten::where.self", is_used, tap_[k], finite_[k]);
      total = k == 0 ? term : total + term;
    }
    return total;
  }

  Warping warping_;
  bool is_inverse_;
  int taps_;  // along an axis
  Value valid_, scale_, rows_, tangent_, grid_, w_, xy_, pixels_, out_shape_;
  Weights x_, y_;
  Value inside_[16], index_[16], tap_[16], finite_[16];  // of each tap, row by row
};

inline void add(Value& sum, const Value& term) { sum = sum.is_none() ? term : sum + term; }

// Add the gradients of sum(grad * the result's tangent) to the wanted ones of image and warp.
inline void add_gradients(const Warping& warping, const Value& tangent, const Value& grad,
                          Value& of_image, Value& of_warp) {
  if (!of_image.is_wanted() && !of_warp.is_wanted()) return;
  if (warping.is_flat()) {
    if (of_image.is_wanted()) add(of_image, call("aten::zeros_like", warping.image));
    if (of_warp.is_wanted()) add(of_warp, call("aten::zeros_like", warping.warp));
    return;
  }
  const Positions positions(warping, tangent, grad.size(-2), grad.size(-1));
  if (of_image.is_wanted()) add(of_image, positions.image_gradient(grad));
  if (of_warp.is_wanted()) add(of_warp, positions.warp_gradient(grad));
}

// ---- warp_perspective(image, warp, dsize, interpolation, ..., destination) ----------------------

constexpr int kDestination = 7;

inline void vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Warping warping(arguments, 1);
  const Value& image = arguments[0];
  const bool of_image = gradients[0].is_wanted(), of_warp = gradients[1].is_wanted();
  if (of_image || of_warp) {
    const Value of_both = warping.gradients(upstream[0], of_image, of_warp);
    if (of_image) gradients[0] = of_both[0];
    if (of_warp) gradients[1] = of_both[1];
  }
  if (gradients[kDestination].is_wanted())
    gradients[kDestination] = warping.of(zeros(image, image.shape())).linear_part(upstream[0]);
}

inline void jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Warping warping(arguments, 1);
  const Value &image = tangents[0], &warp = tangents[1], &destination = tangents[kDestination];
  const Value like = arguments[0];
  const bool has_size = arguments[2].length() == 2;
  const Value height = has_size ? arguments[2][0] : like.size(-2);
  const Value width = has_size ? arguments[2][1] : like.size(-1);
  if (!warp.is_none()) results[0] = warping.tangent(warp, height, width);
  if (image.is_none() && destination.is_none()) return;
  // Without a transparent border there is no destination. Then only height and width are used.
  const Value& kept = arguments[kDestination];
  const Value zero = zeros(like, kept.is_none() ? Value::list(height, width) : kept.shape());
  const Warping moved = warping.of(image.is_none() ? zeros(like, like.shape()) : image);
  add(results[0], moved.linear_part(destination.is_none() ? zero : destination));
}

// ---- _warp_perspective_backward(grad, image, warp, interpolation, ..., output_mask) -------------

inline void backward_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Value &grad = arguments[0], &mask = arguments[7];
  const Warping warping(arguments + 1, 0);
  const bool of_grad = gradients[0].is_wanted();
  if (mask[0].item() && !upstream[0].is_none()) {
    const Warping moved = warping.of(upstream[0]);
    if (of_grad) add(gradients[0], moved.linear_part(zeros(grad, grad.shape())));
    if (gradients[2].is_wanted()) add(gradients[2], moved.warp_gradient(grad));
  }
  if (!mask[1].item() || upstream[1].is_none()) return;
  if (of_grad) add(gradients[0], warping.tangent(upstream[1], grad.size(-2), grad.size(-1)));
  add_gradients(warping, upstream[1], grad, gradients[1], gradients[2]);
}

inline void backward_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Value &grad = arguments[0], &mask = arguments[7];
  const Warping warping(arguments + 1, 0);
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

// ---- _warp_perspective_tangent(tangent, image, warp, dsize, ...), linear in the first two -------

inline void tangent_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Warping warping(arguments + 1, 1);
  if (gradients[0].is_wanted()) gradients[0] = warping.warp_gradient(upstream[0]);
  add_gradients(warping, arguments[0], upstream[0], gradients[1], gradients[2]);
}

inline void tangent_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Warping warping(arguments + 1, 1);
  const Value height = arguments[3][0], width = arguments[3][1];
  if (!tangents[0].is_none()) results[0] = warping.tangent(tangents[0], height, width);
  if (!tangents[1].is_none())
    add(results[0], warping.of(tangents[1]).tangent(arguments[0], height, width));
  if (tangents[2].is_none() || warping.is_flat()) return;
  const Positions positions(warping, arguments[0], height, width);
  add(results[0],
      positions.second(tangents[2], Dimensions(warping.image, warping.warp).shape(height, width)));
}

// ---- _warp_perspective_cells: no derivatives, because Positions adds those of formulas ----------

inline void cells_vjp(const Value*, const Value*, Value*) {}
inline void cells_jvp(const Value*, const Value*, Value*) {}

}  // namespace warp_derivatives

const Derivative kDerivativesOfWarp[] = {
    {"warp_perspective", warp_derivatives::vjp, warp_derivatives::jvp, "destination"}};

const Derivative kDerivativesOfDerivatives[] = {
    {"_warp_perspective_backward", warp_derivatives::backward_vjp, warp_derivatives::backward_jvp},
    {"_warp_perspective_tangent", warp_derivatives::tangent_vjp, warp_derivatives::tangent_jvp},
    {"_warp_perspective_cells", warp_derivatives::cells_vjp, warp_derivatives::cells_jvp},
};

}  // namespace calcops::ops::warp_perspective
