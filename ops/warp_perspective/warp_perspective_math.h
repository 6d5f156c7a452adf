// The mathematics of one pixel, shared by the CPU and the CUDA kernels (terms: warp_perspective.h).
//
// Every sum of products is an explicit fma. Otherwise each compiler would choose which products to
// fuse, and the kernels would compute different coordinates.
#pragma once

#include <math.h>  // unlike <cmath>, has fma of float32 in the global namespace

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "float16.h"
#include "warp_perspective/warp_perspective.h"

namespace calcops::ops::warp_perspective {

CALCOPS_HD inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Return the position in memory of the first pixel of a row of the result.
CALCOPS_HD inline int64_t output_offset(const WarpSizes& sizes, int64_t n, int64_t c, int64_t v) {
  return ((n * sizes.channels + c) * sizes.out_height + v) * sizes.out_width;
}

// The type in which the taps are summed. Their weights are computed in float64 and rounded to it.
// A linear interpolation in float32 of an image in [0, 1] has at most eight roundings of 2^-25.
template <class Pixel>
using Number =
    std::conditional_t<std::is_integral_v<Pixel> || std::is_same_v<Pixel, double>, double, float>;

// Return a number as a pixel, as cv::saturate_cast does. An integer is rounded half to even and
// clamped; NaN becomes the smallest one.
template <class Pixel>
CALCOPS_HD inline Pixel to_pixel(Number<Pixel> value) {
  if constexpr (std::is_integral_v<Pixel>) {
    // Not std::numeric_limits, whose functions are for the host only.
    constexpr int range = 1 << 8 * sizeof(Pixel);
    constexpr double least = std::is_signed_v<Pixel> ? -range / 2 : 0;
    constexpr double largest = least + range - 1;
    value = value > least ? value : least;
    value = value < largest ? value : largest;
    return static_cast<Pixel>(static_cast<int>(rint(value)));
  } else {
    return static_cast<Pixel>(value);
  }
}

// Write the cross product a x b to out[0], out[stride] and out[2 * stride].
CALCOPS_HD inline void cross(const double* a, const double* b, double* out, int stride) {
  out[0] = fma(a[1], b[2], -(a[2] * b[1]));
  out[stride] = fma(a[2], b[0], -(a[0] * b[2]));
  out[2 * stride] = fma(a[0], b[1], -(a[1] * b[0]));
}

// The map m from destination to source, with a factor of all entries, which has no effect on the
// map: warp itself if inverse_map, otherwise its adjugate. That is the inverse without the
// roundings of a division.
//
// The largest entry of m is made 1..2. Before warp is inverted, so is the largest entry in each of
// its rows and columns. So no product overflows or vanishes, whatever the units of the coordinates.
// All these factors are powers of two, which change no bit of the map.
struct Homography {
  double m[9];
  int row[3], column[3];  // warp[r][c] is multiplied by 2^(row[r] + column[c])
  int common;             // and m[r][c] by 2^(column[r] + row[c] + common)
  bool valid;             // false if no pixel has a source: m is singular, all zero or not finite

  // Write `from`, a matrix like warp, with the factors of warp.
  CALCOPS_HD void scale_warp(const double* from, double* to) const {
    for (int i = 0; i < 9; ++i) to[i] = ldexp(from[i], row[i / 3] + column[i % 3]);
  }
  // Return the product of m[r][c] and its factor, or of such a number.
  CALCOPS_HD double scaled(double of_m, int r, int c) const {
    return ldexp(of_m, column[r] + row[c] + common);
  }
};

constexpr int kOfZero = -10000;  // less than the exponent of any number

// Return the largest exponent of three numbers, of which number k is multiplied by 2^added[k].
CALCOPS_HD inline int largest_exponent(const double* x, int stride, const int* added) {
  int largest = kOfZero;
  for (int k = 0; k < 3; ++k) {
    const double number = x[k * stride];
    const int exponent = number != 0 ? ilogb(number) + added[k] : largest;
    largest = exponent > largest ? exponent : largest;
  }
  return largest;
}

// Write the adjugate of r. Return false if r is singular, or so near to it that rounding decides.
CALCOPS_HD inline bool find_adjugate(const double* r, double* adjugate) {
  cross(r + 3, r + 6, adjugate, 3);
  cross(r + 6, r, adjugate + 1, 3);
  cross(r, r + 3, adjugate + 2, 3);
  const double det = fma(r[0], adjugate[0], fma(r[1], adjugate[3], r[2] * adjugate[6]));
  // The sum of the magnitudes of the determinant's six products bounds its rounding error.
  const double magnitude = fma(fabs(r[0]), fma(fabs(r[4]), fabs(r[8]), fabs(r[5] * r[7])),
                               fma(fabs(r[1]), fma(fabs(r[3]), fabs(r[8]), fabs(r[5] * r[6])),
                                   fabs(r[2]) * fma(fabs(r[3]), fabs(r[7]), fabs(r[4] * r[6]))));
  return fabs(det) > 8 * DBL_EPSILON * magnitude;
}

CALCOPS_HD inline Homography make_homography(const double* warp, bool inverse_map) {
  Homography h{};
  bool is_zero = true;
  bool is_finite = true;
  for (int i = 0; i < 9; ++i) {
    is_zero = is_zero && warp[i] == 0;
    is_finite = is_finite && fabs(warp[i]) <= DBL_MAX;
  }
  h.valid = is_finite && !is_zero;
  if (!h.valid) return h;
  double scaled[9], adjugate[9];
  const double* unscaled = warp;
  if (!inverse_map) {
    for (int c = 0; c < 3; ++c) h.column[c] = -largest_exponent(warp + c, 3, h.row);
    for (int r = 0; r < 3; ++r) h.row[r] = -largest_exponent(warp + 3 * r, 1, h.column);
    h.scale_warp(warp, scaled);
    h.valid = find_adjugate(scaled, adjugate);
    if (!h.valid) return h;
    unscaled = adjugate;
  }
  int largest = kOfZero;
  for (int r = 0; r < 3; ++r) {
    const int of_row = largest_exponent(unscaled + 3 * r, 1, h.row) + h.column[r];
    largest = of_row > largest ? of_row : largest;
  }
  h.common = -largest;
  for (int i = 0; i < 9; ++i) h.m[i] = h.scaled(unscaled[i], i / 3, i % 3);
  return h;
}

template <class Pixel>
CALCOPS_HD inline Homography homography_of(const WarpInputs<Pixel>& in, int64_t i) {
  Homography h = make_homography(in.warp + 9 * i, in.sizes.inverse_map);
  h.valid = h.valid && in.sizes.height > 0 && in.sizes.width > 0;
  return h;
}

// Write the tangent of m where the caller's matrix moves along `right`. It is linear in `left` too,
// which is the caller's matrix: column i of m is the cross product of the rows j = i + 1 and
// k = i + 2 (modulo 3). If inverse_map, it is `right` alone.
CALCOPS_HD inline void homography_tangent(const Homography& h, const double* left,
                                          const double* right, bool inverse_map, double* moved) {
  for (int i = 0; i < 9 && inverse_map; ++i) moved[i] = h.scaled(right[i], i / 3, i % 3);
  if (inverse_map) return;
  double p[9], q[9];
  h.scale_warp(left, p);
  h.scale_warp(right, q);
  for (int i = 0; i < 3; ++i) {
    const int j = (i + 1) % 3, k = (i + 2) % 3;
    double of_k[3], of_j[3];
    cross(p + 3 * j, q + 3 * k, of_k, 1);
    cross(q + 3 * j, p + 3 * k, of_j, 1);
    for (int c = 0; c < 3; ++c) moved[3 * c + i] = h.scaled(of_k[c] + of_j[c], c, i);
  }
}

// Write the gradient for `right` from that for its homography_tangent(). For left = `warp`, it is
// the gradient for the caller's matrix from that for m.
CALCOPS_HD inline void homography_backward(const Homography& h, const double* left,
                                           const double* grad_m, bool inverse_map,
                                           double* grad_right) {
  double g[9], of_scaled[9] = {};
  for (int i = 0; i < 9; ++i) g[i] = h.valid ? h.scaled(grad_m[i], i / 3, i % 3) : 0;
  for (int i = 0; i < 9; ++i) grad_right[i] = g[i];
  if (!h.valid || inverse_map) return;
  double rows[9];
  h.scale_warp(left, rows);
  // The gradient g of column i adds row_k x g to that for row j, and g x row_j to that for row k.
  for (int i = 0; i < 3; ++i) {
    const int j = (i + 1) % 3, k = (i + 2) % 3;
    const double column[3] = {g[i], g[3 + i], g[6 + i]};
    double to_j[3], to_k[3];
    cross(rows + 3 * k, column, to_j, 1);
    cross(column, rows + 3 * j, to_k, 1);
    for (int c = 0; c < 3; ++c) {
      of_scaled[3 * j + c] += to_j[c];
      of_scaled[3 * k + c] += to_k[c];
    }
  }
  h.scale_warp(of_scaled, grad_right);
}

// (X, Y, W) of the first pixel of a row of the destination, u = 0.
struct RowStart {
  double x, y, w;
};

CALCOPS_HD inline RowStart row_of(const double* m, double v) {
  return {fma(m[1], v, m[2]), fma(m[4], v, m[5]), fma(m[7], v, m[8])};
}

// The source of a destination pixel. Neither x nor y is finite if w is 0.
struct Source {
  double x, y, w;
};

// Return a / w, given 1 / w, which serves both coordinates. One correction makes the quotient right
// to an ulp, and exact if a float64 can hold it. So pixel centres remain pixel centres.
CALCOPS_HD inline double divide(double a, double w, double reciprocal) {
  const double quotient = a * reciprocal;
  return fma(fma(-quotient, w, a), reciprocal, quotient);
}

CALCOPS_HD_INLINED inline Source project(const double* m, const RowStart& row, double u) {
  const double w = fma(m[6], u, row.w);
  const double reciprocal = 1 / w;
  return {divide(fma(m[0], u, row.x), w, reciprocal), divide(fma(m[3], u, row.y), w, reciprocal),
          w};
}

CALCOPS_HD inline Source project(const double* m, double u, double v) {
  return project(m, row_of(m, v), u);
}

// The taps along one axis of a source: columns or rows of the image, from one end to the other. One
// outside [0, size) stands for border_value.
template <int kTaps>
struct Axis {
  int64_t tap[kTaps];
  double fraction;  // the position between the two middle taps: 0 is the first, 1 the second one
};

// Beyond, coordinates are reduced by fmod. fold_index() is exact below it.
constexpr double kFar = 0x1p51;

// Return the period of a border mode that repeats an image of n pixels. kReflect mirrors the pixel
// at the edge too, kReflect101 does not.
CALCOPS_HD inline double period_of(double n, Border border) {
  return border == Border::kWrap ? n : border == Border::kReflect ? 2 * n : 2 * n - 2;
}

// Return the index of the pixel that a border mode shows at index i, as cv::borderInterpolate. All
// numbers are integers. They are float64, so that loops are vectorised.
CALCOPS_HD inline double fold_index(double i, double n, Border border) {
  if ((i >= 0 && i < n) || border == Border::kConstant) return i;
  if (border == Border::kReplicate) return i < 0 ? 0 : n - 1;
  const double period = period_of(n, border), edge = border == Border::kReflect ? 1 : 0;
  const double rest = period > 0 ? fma(-floor(i / period), period, i) : 0;
  return border == Border::kWrap || rest < n ? rest : period - edge - rest;
}

// Write the taps at the coordinate x, whose magnitude is below kFar, and return the fraction. If
// all taps are the same pixel, it is 0, so that the result is exactly that pixel.
template <int kTaps, class Index>
CALCOPS_HD inline double find_taps(double x, double n, Border border, Index (&tap)[kTaps]) {
  const double first = floor(x);
  bool is_one_pixel = true;
  for (int k = 0; k < kTaps; ++k) {
    tap[k] = static_cast<Index>(fold_index(first + (k + 1 - kTaps / 2), n, border));
    is_one_pixel = is_one_pixel & (tap[k] == tap[0]);
  }
  return is_one_pixel ? 0 : x - first;
}

// Write the taps at the coordinate x. Return false if there is no source.
template <int kTaps>
CALCOPS_HD inline bool locate(double x, int64_t size, Border border, bool is_nearest,
                              Axis<kTaps>& axis) {
  const double n = static_cast<double>(size);
  if (is_nearest) x = rint(x);
  if (border == Border::kConstant) {
    // At x = -2, a cubic shows the border alone.
    if (!(x >= -kTaps / 2 && x < n - 1 + kTaps / 2) || x == -2) return false;
  } else if (border == Border::kTransparent) {
    if (!(x >= 0 && x <= n - 1)) return false;
  } else {
    if (!(fabs(x) <= DBL_MAX)) return false;
    if (!(fabs(x) < kFar) && border != Border::kReplicate) {
      const double period = period_of(n, border);
      x = period > 0 ? fmod(x, period) : 0;
    }
  }
  axis.fraction = find_taps(x, n, border, axis.tap);
  // A transparent image ends at its last pixel, so the derivative there is that from the left.
  if (kTaps == 2 && border == Border::kTransparent && x == n - 1 && size > 1) {
    axis.tap[1] = axis.tap[0];
    axis.tap[0] = axis.tap[1] - 1;
    axis.fraction = 1;
  }
  return true;
}

template <int kTaps>
struct Cell {
  Axis<kTaps> x, y;
};

// Write the taps of a source. Return false if there is no source.
template <int kTaps>
CALCOPS_HD inline bool locate(const Source& source, const WarpSizes& sizes, Border border,
                              Cell<kTaps>& cell) {
  const bool is_nearest = sizes.interpolation == Interpolation::kNearest;
  return locate(source.x, sizes.width, border, is_nearest, cell.x) &&
         locate(source.y, sizes.height, border, is_nearest, cell.y);
}

// Write the weights of an axis's taps at the fraction t, or their derivative of an order for t.
template <class Real>
CALCOPS_HD inline void weights_of(Real t, int order, Real (&weight)[2]) {
  weight[0] = order == 0 ? 1 - t : order == 1 ? -1 : 0;
  weight[1] = order == 0 ? t : order == 1 ? 1 : 0;
}

// The same for Keys' cubic kernel. At t = 0, all weights but one are exactly 0.
CALCOPS_HD_INLINED inline void weights_of(double t, int order, double (&weight)[4]) {
  constexpr double a = kKeys;
  if (order == 0) {
    weight[0] = fma(fma(a, t, -2 * a), t, a) * t;
    weight[1] = fma(fma(a + 2, t, -(a + 3)) * t, t, 1.0);
    weight[2] = fma(fma(-(a + 2), t, 2 * a + 3), t, -a) * t;
    weight[3] = fma(-a, t, a) * t * t;
  } else if (order == 1) {
    weight[0] = fma(fma(3 * a, t, -4 * a), t, a);
    weight[1] = fma(3 * (a + 2), t, -2 * (a + 3)) * t;
    weight[2] = fma(fma(-3 * (a + 2), t, 2 * (2 * a + 3)), t, -a);
    weight[3] = fma(-3 * a, t, 2 * a) * t;
  } else {
    // Of order 2: c[0] + c[1] t. Of order 3: c[1].
    constexpr double c[4][2] = {{-4 * a, 6 * a},
                                {-2 * (a + 3), 6 * (a + 2)},
                                {2 * (2 * a + 3), -6 * (a + 2)},
                                {2 * a, -6 * a}};
    for (int k = 0; k < 4; ++k)
      weight[k] = order == 2 ? fma(c[k][1], t, c[k][0]) : order == 3 ? c[k][1] : 0;
  }
}

// One channel of one image.
template <class Pixel>
struct Plane {
  const Pixel* data;
  int64_t stride_y, stride_x, height, width;
  Pixel border;

  template <class As>
  CALCOPS_HD As at(int64_t y, int64_t x) const {
    const bool is_inside = y >= 0 && y < height && x >= 0 && x < width;
    return static_cast<As>(is_inside ? data[y * stride_y + x * stride_x] : border);
  }
};

template <class Pixel>
CALCOPS_HD inline Plane<Pixel> make_plane(const WarpInputs<Pixel>& in, int64_t n, int64_t c,
                                          double border) {
  const int64_t image = in.sizes.image_batch == 1 ? 0 : n;
  return {in.image + image * in.image_stride[0] + c * in.image_stride[1],
          in.image_stride[2],
          in.image_stride[3],
          in.sizes.height,
          in.sizes.width,
          to_pixel<Pixel>(static_cast<Number<Pixel>>(border))};
}

// Return the weighted sum of a pixel's taps. A tap of weight zero is not used, so that an identity
// map keeps NaN and infinity in their pixels.
template <class Real>
CALCOPS_HD inline Real sum_taps(const Real (&tap)[2][2], const Real (&x)[2], const Real (&y)[2]) {
  const auto sum = [](const Real(&weight)[2], Real first, Real second) {
    return fma(weight[1], weight[1] != 0 ? second : 0, weight[0] * (weight[0] != 0 ? first : 0));
  };
  return sum(y, sum(x, tap[0][0], tap[0][1]), sum(x, tap[1][0], tap[1][1]));
}

template <class Real>
CALCOPS_HD inline Real sum_taps(const Real (&tap)[4][4], const Real (&weight_x)[4],
                                const Real (&weight_y)[4]) {
  Real down[4] = {}, sum = 0;
  for (int y = 0; y < 4; ++y)
    for (int x = 0; x < 4; ++x) {
      const bool is_used = (weight_x[x] != 0) & (weight_y[y] != 0);
      down[x] = fma(weight_y[y], is_used ? tap[y][x] : 0, down[x]);
    }
  for (int x = 0; x < 4; ++x) sum = fma(weight_x[x], down[x], sum);
  return sum;
}

// The same for a fraction in float64 and weights of another type.
template <class Real>
CALCOPS_HD inline void round_weights(double t, int order, Real (&weight)[2]) {
  weights_of(static_cast<Real>(t), order, weight);
}

template <class Real>
CALCOPS_HD inline void round_weights(double t, int order, Real (&weight)[4]) {
  double exact[4];
  weights_of(t, order, exact);
  for (int k = 0; k < 4; ++k) weight[k] = static_cast<Real>(exact[k]);
}

template <class Real, class Pixel, int kTaps>
CALCOPS_HD inline void read_taps(const Plane<Pixel>& plane, const Cell<kTaps>& cell,
                                 Real (&tap)[kTaps][kTaps]) {
  for (int y = 0; y < kTaps; ++y)
    for (int x = 0; x < kTaps; ++x)
      tap[y][x] = plane.template at<Real>(cell.y.tap[y], cell.x.tap[x]);
}

// Return the interpolated value, or its derivative of an order for x and y.
template <class Real, class Pixel, int kTaps>
CALCOPS_HD inline Real interpolate(const Plane<Pixel>& plane, const Cell<kTaps>& cell, int order_x,
                                   int order_y) {
  Real tap[kTaps][kTaps], weight_x[kTaps], weight_y[kTaps];
  read_taps(plane, cell, tap);
  round_weights(cell.x.fraction, order_x, weight_x);
  round_weights(cell.y.fraction, order_y, weight_y);
  return sum_taps(tap, weight_x, weight_y);
}

template <class Pixel, int kTaps>
CALCOPS_HD inline Pixel sample(const Plane<Pixel>& plane, const Cell<kTaps>& cell) {
  return to_pixel<Pixel>(interpolate<Number<Pixel>>(plane, cell, 0, 0));
}

// The motion of the source (x, y) of a pixel where m moves along a tangent, and W' / W.
struct Motion {
  double x, y, spread;
};

// `moved` is the tangent of m, and `row` is its row_of().
CALCOPS_HD inline Motion motion_of(const double* moved, const RowStart& row, double u, double x,
                                   double y, double reciprocal) {
  const double spread = fma(moved[6], u, row.w) * reciprocal;
  return {fma(-x, spread, fma(moved[0], u, row.x) * reciprocal),
          fma(-y, spread, fma(moved[3], u, row.y) * reciprocal), spread};
}

// Return the derivative along a motion. An axis along which nothing moves has no share, even if its
// slope is NaN.
CALCOPS_HD inline double slope_along(double slope_x, double slope_y, double x, double y) {
  return fma(x, x != 0 ? slope_x : 0, y * (y != 0 ? slope_y : 0));
}

// Add the share of pixel (u, v) to the gradient for m. `g` is the gradient for its motion.
CALCOPS_HD inline void motion_backward(const Source& s, double u, double v, const Motion& g,
                                       double* grad_m) {
  const double to[3] = {g.x / s.w, g.y / s.w, (g.spread - fma(g.x, s.x, g.y * s.y)) / s.w};
  for (int row = 0; row < 3; ++row) {
    grad_m[3 * row] = fma(to[row], u, grad_m[3 * row]);
    grad_m[3 * row + 1] = fma(to[row], v, grad_m[3 * row + 1]);
    grad_m[3 * row + 2] += to[row];
  }
}

}  // namespace calcops::ops::warp_perspective
