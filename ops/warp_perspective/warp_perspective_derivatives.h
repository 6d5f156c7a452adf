// The derivatives of warp_perspective and of its backward operator.
//
// The result is linear in the image, so the two operators give every derivative but those of a
// derivative along warp. These follow from the position (x, y) of every destination pixel, written
// in ATen operators, which are differentiable to any order themselves.
#pragma once

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_cross.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <array>
#include <vector>

#include "calcops/autograd.h"
#include "warp_perspective/warp_perspective.h"
#include "warp_perspective/warp_perspective_checks.h"

namespace calcops {

// Row i is the sum of the cross products p_j x q_k and q_j x p_k, j, k = i+1, i+2: linear in p and
// in q, and twice the cofactors where they are the same.
inline Tensor cross_rows(const Tensor& p, const Tensor& q) {
  return at::linalg_cross(p.roll(-1, 1), q.roll(-2, 1))
      .add(at::linalg_cross(q.roll(-1, 1), p.roll(-2, 1)));
}

// The kernel's number with the derivatives of the formula for it. Rounding differs between the two,
// and at a pixel centre the difference decides which pixels are seen.
inline Tensor with_derivatives(const Tensor& number, const Tensor& formula) {
  return number.add(formula.sub(formula.detach()));
}

// The weights of an axis's taps and their derivatives with respect to the coordinate.
struct Weights {
  tensor_list weight, first, second;  // the second of a linear interpolation is zero, and left out

  Weights() = default;
  // t: how far the position is from the tap before it; slope: of it in the coordinate.
  Weights(const Tensor& t, const Tensor& slope, Interpolation interpolation) {
    if (interpolation != Interpolation::kCubic) {
      weight = {t.neg().add(1), t};
      first = {slope.neg(), slope};
      return;
    }
    // c[0] + c[1] t + c[2] t^2 + c[3] t^3, as in warp_perspective_math.h.
    constexpr double a = kKeys;
    constexpr double coefficients[4][4] = {
        {0, a, -2 * a, a}, {1, 0, -(a + 3), a + 2}, {0, -a, 2 * a + 3, -(a + 2)}, {0, 0, a, -a}};
    for (const double (&c)[4] : coefficients) {
      weight.push_back(t.mul(c[3]).add(c[2]).mul(t).add(c[1]).mul(t).add(c[0]));
      first.push_back(t.mul(3 * c[3]).add(2 * c[2]).mul(t).add(c[1]).mul(slope));
      second.push_back(t.mul(6 * c[3]).add(2 * c[2]).mul(slope.square()));
    }
  }
};

inline void add(Tensor& sum, const Tensor& term) { sum = sum.defined() ? sum.add(term) : term; }

// Of N images and matrices as tensors of float64: image [N or 1, C, H W], warp [N or 1, 3, 3],
// border [C, 1], cells and scale as _warp_perspective_cells gives them, the result [N, C, h w].
class Positions {
 public:
  Positions(const Tensor& image, const SymInt& width, const Tensor& warp, const Tensor& border,
            const SymInt& batch, const Tensor& cells, const Tensor& scale, const SymInt& out_height,
            const SymInt& out_width, Interpolation interpolation, bool inverse_map)
      : inverse_map_(inverse_map), taps_(taps_of(interpolation)) {
    const auto number = [&](int64_t which, int64_t count = 1) {
      return cells.narrow(1, which, count);
    };
    const Tensor usable = scale.gt(0);
    scale_ = at::where(usable, scale, 1.0);
    rows_ = at::where(usable, warp, at::eye(3, warp.options())).mul(scale_);
    const Tensor u = at::arange(out_width, warp.options());
    const Tensor v = at::arange(out_height, warp.options()).unsqueeze(1);
    grid_ = at::stack({u.add(v.mul(0)), v.add(u.mul(0)), u.add(v).mul(0).add(1)}).flatten(1);

    const Tensor m = inverse_map_ ? rows_ : cross_rows(rows_, rows_).div(2).mT();
    const Tensor p = m.matmul(grid_);
    valid_ = number(kW).ne(0);
    w_ = with_derivatives(at::where(valid_, number(kW), 1.0),
                          at::where(valid_, p.narrow(1, 2, 1), 1.0));
    xy_ = with_derivatives(number(kX, 2), at::where(valid_, p.narrow(1, 0, 2), 0.0).div(w_));
    const Tensor slopes = number(kSlopeX, 2);
    const Tensor fractions = with_derivatives(number(kFractionX, 2), xy_.mul(slopes));
    const auto along = [&](int64_t axis) {
      return Weights(fractions.narrow(1, axis, 1), slopes.narrow(1, axis, 1), interpolation);
    };
    x_ = along(0);
    y_ = along(1);

    const SymInt channels = image.sym_size(1);
    pixels_ = image.expand_symint({batch, channels, image.sym_size(2)});
    for (int k = 0; k < taps_ * taps_; ++k) {
      const Tensor at_x = number(kTap + k % taps_).to(at::kLong),
                   at_y = number(kTap + taps_ + k / taps_).to(at::kLong);
      inside_.push_back(at_x.ge(0).logical_and(at_y.ge(0)));
      index_.push_back(at::where(inside_[k], at_y.mul(width).add(at_x), 0)
                           .expand_symint({batch, channels, grid_.sym_size(1)}));
      tap_.push_back(at::where(inside_[k], pixels_.gather(2, index_[k]), border));
      finite_.push_back(tap_[k].nan_to_num(0, 0, 0));
    }
  }

  // How the tangent of the result along `tangent` [N or 1, 3, 3] moves with warp along `other`.
  Tensor second(const Tensor& tangent, const Tensor& other) const {
    const Motion move = motion(tangent), turn = motion(other);
    const Tensor along_x = sum(x_.first, y_.weight), along_y = sum(x_.weight, y_.first);
    const Tensor twist = sum(x_.first, y_.first);
    Tensor of_x = twist.mul(turn.y), of_y = twist.mul(turn.x);
    if (!x_.second.empty()) {
      of_x = of_x.add(sum(x_.second, y_.weight).mul(turn.x));
      of_y = of_y.add(sum(x_.weight, y_.second).mul(turn.y));
    }
    // move = (X' - x W', Y' - y W') / W, of which x, y and W move with `other`, and so do X', Y',
    // W' where m is an adjugate.
    Tensor bend_x = turn.x.mul(move.w).add(move.x.mul(turn.w)).neg();
    Tensor bend_y = turn.y.mul(move.w).add(move.y.mul(turn.w)).neg();
    if (!inverse_map_) {
      const Tensor p = cross_rows(tangent.mul(scale_), other.mul(scale_)).mT().matmul(grid_);
      const Tensor bend = p.narrow(1, 0, 2).sub(xy_.mul(p.narrow(1, 2, 1)));
      bend_x = bend_x.add(bend.narrow(1, 0, 1));
      bend_y = bend_y.add(bend.narrow(1, 1, 1));
    }
    const Tensor moved = of_x.mul(move.x).add(of_y.mul(move.y));
    const Tensor bent = along_x.mul(bend_x).add(along_y.mul(bend_y)).div(w_);
    return at::where(valid_, moved.add(bent), 0.0);
  }

  // The gradients of sum(grad * tangent of the result) for each of the N images and matrices.
  Tensor image_gradient(const Tensor& grad, const Tensor& tangent) const {
    const Motion move = motion(tangent);
    const Tensor g = at::where(valid_, grad, 0.0);
    Tensor sum = at::zeros_like(pixels_);
    for (int k = 0; k < taps_ * taps_; ++k) {
      const int x = k % taps_, y = k / taps_;
      const Tensor weight =
          x_.first[x].mul(y_.weight[y]).mul(move.x).add(x_.weight[x].mul(y_.first[y]).mul(move.y));
      sum = sum.scatter_add(2, index_[k], at::where(inside_[k], g.mul(weight), 0.0));
    }
    return sum;
  }

  Tensor warp_gradient(const Tensor& grad, const Tensor& tangent) const {
    const Motion move = motion(tangent);
    const Tensor g = at::where(valid_, grad, 0.0);
    const auto over_channels = [&](const tensor_list& of_x, const tensor_list& of_y) {
      return g.mul(sum(of_x, of_y)).sum(1, true);
    };
    const Tensor gx = over_channels(x_.first, y_.weight), gy = over_channels(x_.weight, y_.first);
    const Tensor twist = over_channels(x_.first, y_.first), spread = move.w.div(w_);
    Tensor of_x = twist.mul(move.y), of_y = twist.mul(move.x);
    if (!x_.second.empty()) {
      of_x = of_x.add(over_channels(x_.second, y_.weight).mul(move.x));
      of_y = of_y.add(over_channels(x_.weight, y_.second).mul(move.y));
    }
    // What moves grad * jvp: (x, y), w at a fixed (x, y), and the tangent of m.
    const Tensor of_m = m_gradient(of_x.sub(spread.mul(gx)), of_y.sub(spread.mul(gy)),
                                   gx.mul(move.x).add(gy.mul(move.y)));
    const Tensor of_tangent = m_gradient(gx, gy, at::zeros_like(gx));
    Tensor out = of_m;
    if (!inverse_map_)
      out = rows_gradient(rows_, of_m).add(rows_gradient(tangent.mul(scale_), of_tangent));
    return out.mul(scale_);
  }

 private:
  struct Motion {
    Tensor x, y, w;
  };

  // How (x, y) and w of every pixel move where warp moves along `tangent`.
  Motion motion(const Tensor& tangent) const {
    const Tensor rows = tangent.mul(scale_), m = inverse_map_ ? rows : cross_rows(rows_, rows).mT();
    const Tensor p = m.matmul(grid_), w = p.narrow(1, 2, 1);
    const Tensor xy = p.narrow(1, 0, 2).sub(xy_.mul(w)).div(w_);
    return {xy.narrow(1, 0, 1), xy.narrow(1, 1, 1), w};
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

  // Of the taps by weights of both axes. One of weight zero is not used, but its weight may have a
  // derivative.
  Tensor sum(const tensor_list& of_x, const tensor_list& of_y) const {
    Tensor total;
    for (int k = 0; k < taps_ * taps_; ++k) {
      const Tensor weight = of_x[k % taps_].mul(of_y[k / taps_]);
      add(total, weight.mul(at::where(weight.ne(0), tap_[k], finite_[k])));
    }
    return total;
  }

  bool inverse_map_;
  int taps_;  // along an axis
  Tensor valid_, scale_, rows_, grid_, w_, xy_, pixels_;
  Weights x_, y_;
  tensor_list inside_, index_, tap_, finite_;  // of each tap, row by row
};

using Mask = std::array<bool, 2>;

inline Tensor zeros(const Tensor& like, c10::SymIntArrayRef sizes) {
  return at::zeros({}, like.options()).expand_symint(sizes);
}

// warp_perspective without the constant that border_value adds. `destination` has the result's
// shape; only a transparent border keeps any of it.
inline Tensor linear_part(const Call& call, const Tensor& image, const Tensor& destination) {
  const SymInt dsize[] = {destination.sym_size(-2), destination.sym_size(-1)};
  const bool kept = call["border_mode"].toStringView() == "transparent";
  return call.of(kWarp)
      .with("image", image)
      .with("dsize", c10::SymIntArrayRef(dsize))
      .with("border_value", c10::IValue())
      .with("destination", kept ? c10::IValue(destination) : c10::IValue())
      .run()[0];
}

// The result's tangent along one of warp.
inline Tensor tangent_of(const Call& call, const Tensor& tangent, const SymInt& height,
                         const SymInt& width) {
  const SymInt dsize[] = {height, width};
  return call.of(kTangent)
      .with("tangent", tangent)
      .with("dsize", c10::SymIntArrayRef(dsize))
      .run()[0];
}

// What moves the result's tangent along one of warp, for a call of any of the operators.
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
    if (const c10::IValue& value = call["border_value"]; !value.isNone()) {
      const std::vector<double> values = value.toDoubleVector();
      const SymInt each = values.size() == 1 ? shape.channels : SymInt(1);
      for (size_t c = 0; c < values.size(); ++c) border.narrow_symint(0, c, each).fill_(values[c]);
    }
    return {image_batch(image).to(at::kDouble).flatten(2),
            shape.width,
            matrices,
            border,
            shape.batch,
            cells[0],
            cells[1],
            height,
            width,
            interpolation_of(kWarp, call["interpolation"].toStringView()),
            call["inverse_map"].toBool()};
  }

  Tensor items(const Tensor& grad) const {
    return grad.to(at::kDouble).reshape_symint({shape.batch, shape.channels, height * width});
  }

  // How that tangent moves with warp along `other`.
  Tensor second(const Tensor& other) const {
    const c10::SymDimVector out = shape.out(height, width);
    if (is_flat()) return at::zeros_symint(out, image.options());
    const Tensor moved = positions().second(tangent, warp_batch(other).to(at::kDouble));
    return moved.reshape_symint(out).to(image.scalar_type());
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
inline tensor_list gradients(const Call& call, const Tensor& grad, Mask mask) {
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
    expect(kWarp, "image", c10::isFloatingType(type) || !differentiated[1], type,
           "of a floating dtype where `warp` has a derivative");
    const bool opencv4 = call["arithmetic"].toStringView() == "opencv4";
    for (size_t i = 0; i < differentiated.size(); ++i)
      expect(kWarp, "arithmetic", !opencv4 || !differentiated[i], "\"opencv4\"",
             "\"exact\" where `", call.op.schema().arguments()[i].name(), "` has a derivative");
  }

  // What is copied from the destination needs it no more.
  bool depends_on(size_t argument) const override { return argument != kDestination; }

  tensor_list vjp(const Call& call, const tensor_list& upstream,
                  const std::vector<bool>& wanted) const override {
    const Tensor image = call.tensor("image");
    tensor_list out;
    if (wanted[0] || wanted[1]) out = gradients(call, upstream[0], {wanted[0], wanted[1]});
    out.resize(wanted.size());
    if (wanted[kDestination])
      out[kDestination] = linear_part(call, zeros(image, image.sym_sizes()), upstream[0]);
    return out;
  }

  tensor_list jvp(const Call& call, const tensor_list& tangents) const override {
    const Tensor &image = tangents[0], &warp = tangents[1], &destination = tangents[kDestination];
    const Tensor like = call.tensor("image");
    const Shape shape = check_inputs(kWarp, like, call.tensor("warp"));
    const auto dsize = size_of_result(kWarp, call["dsize"].toSymIntVector(), shape);
    Tensor out;
    if (image.defined() || destination.defined()) {
      out = linear_part(
          call, image.defined() ? image : zeros(like, like.sym_sizes()),
          destination.defined() ? destination : zeros(like, shape.out(dsize[0], dsize[1])));
    }
    if (warp.defined()) add(out, tangent_of(call, warp, dsize[0], dsize[1]));
    return {out};
  }

 private:
  static constexpr size_t kDestination = 7;  // among the arguments
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
      if (wanted[0]) add(out[0], linear_part(call, image, zeros(grad, grad.sym_sizes())));
      if (wanted[2])
        add(out[2], gradients(without_border(call).with("image", image), grad, {false, true})[1]);
    }
    if (mask[1] && upstream[1].defined()) {
      const AlongWarp moved = along(call, upstream[1]);
      if (wanted[0])
        add(out[0], tangent_of(call, upstream[1], grad.sym_size(-2), grad.sym_size(-1)));
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
  static Call without_border(const Call& call) { return call.with("border_value", c10::IValue()); }
};

// Of _warp_perspective_tangent(tangent, image, warp, dsize, ...), linear in the first two.
struct OfTangent final : Derivatives {
  static AlongWarp along(const Call& call) {
    const std::vector<SymInt> dsize = call["dsize"].toSymIntVector();
    return {call, call.tensor("tangent"), dsize[0], dsize[1]};
  }

  tensor_list vjp(const Call& call, const tensor_list& upstream,
                  const std::vector<bool>& wanted) const override {
    const Tensor& grad = upstream[0];
    tensor_list out(wanted.size());
    if (wanted[0]) out[0] = gradients(call, grad, {false, true})[1];
    if (!wanted[1] && !wanted[2]) return out;
    const AlongWarp moved = along(call);
    if (wanted[1]) out[1] = moved.image_gradient(grad);
    if (wanted[2]) out[2] = moved.warp_gradient(grad);
    return out;
  }

  tensor_list jvp(const Call& call, const tensor_list& tangents) const override {
    Tensor out;
    if (tangents[0].defined()) out = call.with("tangent", tangents[0]).run()[0];
    if (tangents[1].defined())
      add(out, call.with("image", tangents[1]).with("border_value", c10::IValue()).run()[0]);
    if (tangents[2].defined()) add(out, along(call).second(tangents[2]));
    return {out};
  }
};

// The cells of a call are constants: what moves them is in Positions.
struct OfCells final : Derivatives {
  tensor_list vjp(const Call&, const tensor_list&, const std::vector<bool>& wanted) const override {
    return tensor_list(wanted.size());
  }
  tensor_list jvp(const Call&, const tensor_list&) const override { return tensor_list(2); }
};

inline const OfWarp kOfWarp;
inline const OfBackward kOfBackward;
inline const OfTangent kOfTangent;
inline const OfCells kOfCells;

}  // namespace calcops
