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

// The map m from destination to source.
struct Homography {
  double m[9];
  double scaled[9];  // the caller's matrix times `scale`
  double scale;      // the power of two that makes the matrix's largest entry 1..2
  bool valid;        // false if no pixel has a source: m is singular, all zero or not finite
};

CALCOPS_HD inline Homography make_homography(const double* warp, bool inverse_map) {
  Homography h;
  double largest = 0;
  bool is_finite = true;
  for (int i = 0; i < 9; ++i) {
    is_finite = is_finite && fabs(warp[i]) <= DBL_MAX;
    largest = fmax(largest, fabs(warp[i]));
  }
  h.valid = is_finite && largest > 0;
  if (!h.valid) return h;
  // A common factor of all entries has no effect on the map. With this one, products neither
  // overflow nor vanish.
  const int exponent = -ilogb(largest);
  h.scale = ldexp(1.0, exponent < 1023 ? exponent : 1023);
  for (int i = 0; i < 9; ++i) h.scaled[i] = warp[i] * h.scale;
  if (inverse_map) {
    for (int i = 0; i < 9; ++i) h.m[i] = h.scaled[i];
    return h;
  }
  // The adjugate is the inverse up to a factor. It saves the roundings of a division.
  const double* r = h.scaled;
  cross(r + 3, r + 6, h.m, 3);
  cross(r + 6, r, h.m + 1, 3);
  cross(r, r + 3, h.m + 2, 3);
  const double det = fma(r[0], h.m[0], fma(r[1], h.m[3], r[2] * h.m[6]));
  // The sum of the magnitudes of the determinant's six products bounds its rounding error.
  const double magnitude = fma(fabs(r[0]), fma(fabs(r[4]), fabs(r[8]), fabs(r[5] * r[7])),
                               fma(fabs(r[1]), fma(fabs(r[3]), fabs(r[8]), fabs(r[5] * r[6])),
                                   fabs(r[2]) * fma(fabs(r[3]), fabs(r[7]), fabs(r[4] * r[6]))));
  h.valid = fabs(det) > 8 * DBL_EPSILON * magnitude;
  return h;
}

template <class Pixel>
CALCOPS_HD inline Homography homography_of(const WarpInputs<Pixel>& in, int64_t i) {
  Homography h = make_homography(in.warp + 9 * i, in.sizes.inverse_map);
  h.valid = h.valid && in.sizes.height > 0 && in.sizes.width > 0;
  return h;
}

// Write the gradient for the caller's matrix from that for m.
CALCOPS_HD inline void homography_backward(const Homography& h, const double* grad_m,
                                           bool inverse_map, double* grad_warp) {
  for (int i = 0; i < 9; ++i) grad_warp[i] = h.valid && inverse_map ? grad_m[i] * h.scale : 0;
  if (!h.valid || inverse_map) return;
  // Column i of m is the cross product of the rows j = i + 1 and k = i + 2 (modulo 3). Its gradient
  // g adds row_k x g to that for row j, and g x row_j to that for row k.
  for (int i = 0; i < 3; ++i) {
    const int j = (i + 1) % 3, k = (i + 2) % 3;
    const double g[3] = {grad_m[i], grad_m[3 + i], grad_m[6 + i]};
    double to_j[3], to_k[3];
    cross(h.scaled + 3 * k, g, to_j, 1);
    cross(g, h.scaled + 3 * j, to_k, 1);
    for (int c = 0; c < 3; ++c) {
      grad_warp[3 * j + c] = fma(h.scale, to_j[c], grad_warp[3 * j + c]);
      grad_warp[3 * k + c] = fma(h.scale, to_k[c], grad_warp[3 * k + c]);
    }
  }
}

// Write the tangent of m from that of the caller's matrix.
CALCOPS_HD inline void homography_tangent(const Homography& h, const double* tangent,
                                          bool inverse_map, double* to) {
  double moved[9];
  for (int i = 0; i < 9; ++i) moved[i] = h.valid ? tangent[i] * h.scale : 0;
  for (int i = 0; i < 9; ++i) to[i] = moved[i];
  if (!h.valid || inverse_map) return;
  for (int i = 0; i < 3; ++i) {
    const int j = (i + 1) % 3, k = (i + 2) % 3;
    double of_j[3], of_k[3];
    cross(moved + 3 * j, h.scaled + 3 * k, of_j, 1);
    cross(h.scaled + 3 * j, moved + 3 * k, of_k, 1);
    for (int c = 0; c < 3; ++c) to[3 * c + i] = of_j[c] + of_k[c];
  }
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

// The taps along one axis of a source, after the border mode has mapped it into the image.
//
// If there are two taps and the source is at a pixel centre, the second tap has weight 0. It is
// then the pixel that follows as the coordinate grows, so that slope * (second - first) is the
// derivative from the right.
template <int kTaps>
struct Axis {
  int64_t tap[kTaps];  // columns or rows; one outside [0, size) stands for border_value
  double fraction;     // distance of the position from the last tap at or before it
  double slope;        // derivative of the position in the image for the coordinate: 1, -1 or 0
};

// Return x modulo period with the sign of x, like fmod, but faster. It is exact if x / period is
// below 2^51.
CALCOPS_HD inline double near_remainder(double x, double period) {
  const double rest = fma(-trunc(x / period), period, x);
  // The quotient may have been rounded up to an integer.
  return rest * x < 0 ? rest + copysign(period, x) : rest;
}

constexpr double kFar = 0x1p51;

// Return the position in [0, n - 1], for kWrap in [0, n), to which a border mode maps a finite
// coordinate x. Multiply `slope` by the derivative. The mode is none of kConstant and kTransparent.
// kNear: |x| is below kFar.
template <bool kNear>
CALCOPS_HD inline double fold(double x, double n, Border border, double& slope) {
  const auto modulo = [&](double period) {
    return kNear || fabs(x) < kFar ? near_remainder(x, period) : fmod(x, period);
  };
  if (border == Border::kWrap) {
    x = modulo(n);
    x = x < 0 ? x + n : x;
    if (x >= n) x = 0;  // -1e-20 + n is n
    return x;
  }
  if (border != Border::kReplicate) {
    // kReflect mirrors at -1/2 and has the period 2n. kReflect101 mirrors at 0, with 2n - 2.
    const double edge = border == Border::kReflect ? 1 : 0;
    const double period = 2 * (n - 1 + edge);
    x = period > 0 ? modulo(period) : 0;
    slope = x < 0 ? -slope : slope;
    x = x < 0 ? -edge - x : x;
    const bool is_mirrored = x > n - 1 + edge / 2;
    slope = is_mirrored ? -slope : slope;
    x = is_mirrored ? period - edge - x : x;
  }
  slope = x >= 0 && x <= n - 1 ? slope : 0;
  x = x < 0 ? 0 : x;
  return x > n - 1 ? n - 1 : x;
}

// Write the two taps at the coordinate x. Return false if there is no source.
//
// cv::borderInterpolate folds the index of each tap. For two taps, folding the coordinate gives the
// same function, and for coordinates of any size.
CALCOPS_HD inline bool locate(double x, int64_t size, Border border, bool is_nearest,
                              Axis<2>& axis) {
  const double n = static_cast<double>(size);
  axis.slope = is_nearest ? 0 : 1;
  if (is_nearest) x = rint(x);
  const bool is_inside = x >= 0 && (border == Border::kWrap ? x < n : x <= n - 1);
  if (border == Border::kConstant) {
    if (!(x >= -1 && x < n)) return false;
  } else if (!is_inside) {
    if (border == Border::kTransparent || !(fabs(x) <= DBL_MAX)) return false;
    x = fold<false>(x, n, border, axis.slope);
  }
  const double floor_x = floor(x);
  axis.tap[0] = static_cast<int64_t>(floor_x);
  axis.fraction = x - floor_x;
  const bool is_last = axis.tap[0] + 1 == size;
  const bool is_transparent = border == Border::kTransparent;
  const bool is_mirrored = axis.fraction == 0 && axis.slope < 0;
  if (is_mirrored || (is_last && (border == Border::kReflect101 || is_transparent))) {
    axis.tap[1] = axis.tap[0] > 0 ? axis.tap[0] - 1 : 0;
    // A transparent image ends here, so the derivative is that from the left.
    axis.slope = is_transparent ? -axis.slope : fabs(axis.slope);
  } else {
    axis.tap[1] = axis.tap[0] + 1;
    if (is_last && border != Border::kConstant)
      axis.tap[1] = border == Border::kWrap ? 0 : axis.tap[0];
  }
  return true;
}

// Return the index of the pixel that a border mode shows at index i, as cv::borderInterpolate.
CALCOPS_HD inline int64_t fold_index(int64_t i, int64_t size, Border border) {
  if ((i >= 0 && i < size) || border == Border::kConstant) return i;
  if (border == Border::kReplicate) return i < 0 ? 0 : size - 1;
  const bool wraps = border == Border::kWrap;
  const bool repeats_edge = wraps || border == Border::kReflect;
  if (size == 1) return 0;
  const int64_t period = wraps ? size : repeats_edge ? 2 * size : 2 * size - 2;
  const int64_t rest = (i % period + period) % period;
  const int64_t edge = repeats_edge;  // 1 if the edge's pixel is mirrored too
  return rest < size ? rest : period - edge - rest;
}

// Write the four taps at the coordinate x. Return false if there is no source.
//
// A cubic also has taps beyond the two that enclose the position. So each tap's index is folded,
// after the coordinate is brought near to the image.
CALCOPS_HD inline bool locate(double x, int64_t size, Border border, bool, Axis<4>& axis) {
  const double n = static_cast<double>(size);
  axis.slope = 1;
  if (border == Border::kConstant) {
    if (!(x > -2 && x < n + 1)) return false;
  } else if (!(x >= 0 && x <= n - 1)) {
    if (border == Border::kTransparent || !(fabs(x) <= DBL_MAX)) return false;
    if (border == Border::kReplicate) {
      if (!(x > -2 && x < n + 1)) axis.slope = 0;
      x = x < -2 ? -2 : x > n + 1 ? n + 1 : x;
    } else {
      // kReflect mirrors the edge's pixel too, kReflect101 does not.
      const double period = border == Border::kWrap      ? n
                            : border == Border::kReflect ? 2 * n
                                                         : 2 * n - 2;
      if (period == 0) axis.slope = 0;
      x = period == 0 ? 0 : fabs(x) < kFar ? near_remainder(x, period) : fmod(x, period);
    }
  }
  const double floor_x = floor(x);
  axis.fraction = x - floor_x;
  for (int k = 0; k < 4; ++k)
    axis.tap[k] = fold_index(static_cast<int64_t>(floor_x) + k - 1, size, border);
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

// Write the weights of an axis's taps at the fraction t.
CALCOPS_HD inline void weights_of(double t, double (&weight)[2]) {
  weight[0] = 1 - t;
  weight[1] = t;
}

// The same for Keys' cubic kernel. At t = 0, all weights but one are exactly 0.
CALCOPS_HD inline void weights_of(double t, double (&weight)[4]) {
  constexpr double a = kKeys;
  weight[0] = fma(fma(a, t, -2 * a), t, a) * t;
  weight[1] = fma(fma(a + 2, t, -(a + 3)) * t, t, 1.0);
  weight[2] = fma(fma(-(a + 2), t, 2 * a + 3), t, -a) * t;
  weight[3] = fma(-a, t, a) * t * t;
}

// Write the derivatives of these weights for t.
CALCOPS_HD inline void slopes_of(double t, double (&slope)[4]) {
  constexpr double a = kKeys;
  slope[0] = fma(fma(3 * a, t, -4 * a), t, a);
  slope[1] = fma(3 * (a + 2), t, -2 * (a + 3)) * t;
  slope[2] = fma(fma(-3 * (a + 2), t, 2 * (2 * a + 3)), t, -a);
  slope[3] = fma(-3 * a, t, 2 * a) * t;
}

// Write the numbers of pixel (u, v) (CellNumber), each to out[number * stride].
template <int kTaps>
CALCOPS_HD inline void store_cell(const Homography& map, const WarpSizes& sizes, int64_t u,
                                  int64_t v, int64_t stride, double* out) {
  Cell<kTaps> cell{};
  Source source{};
  bool has_source = map.valid && sizes.height > 0 && sizes.width > 0;
  if (has_source) {
    source = project(map.m, static_cast<double>(u), static_cast<double>(v));
    has_source = locate(source, sizes, sizes.border, cell);
  }
  const double numbers[kTap] = {source.x,        source.y,     source.w,    cell.x.fraction,
                                cell.y.fraction, cell.x.slope, cell.y.slope};
  for (int k = 0; k < kTap; ++k) out[k * stride] = has_source ? numbers[k] : 0;
  const auto store = [&](int first, const Axis<kTaps>& axis, int64_t size) {
    for (int k = 0; k < kTaps; ++k) {
      const bool is_inside = axis.tap[k] >= 0 && axis.tap[k] < size;
      const double tap = is_inside ? static_cast<double>(axis.tap[k]) : -1;
      out[(first + k) * stride] = has_source ? tap : 0;
    }
  };
  store(kTap, cell.x, sizes.width);
  store(kTap + kTaps, cell.y, sizes.height);
}

// One channel of one image.
template <class Pixel>
struct Plane {
  const Pixel* data;
  int64_t stride_y, stride_x, height, width;
  Pixel border;

  template <class As = double>
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

// Return the weighted sum of four taps: a and b in the upper row, c and d in the lower one.
template <class Real>
CALCOPS_HD inline Real interpolate(Real a, Real b, Real c, Real d, Real weight_x, Real weight_y) {
  const Real top = fma(weight_x, b, (1 - weight_x) * a);
  const Real bottom = fma(weight_x, d, (1 - weight_x) * c);
  return fma(weight_y, bottom, (1 - weight_y) * top);
}

// Return the pixel of the result. A tap of weight zero is not read, so that an identity map keeps
// NaN and infinity in their pixels.
template <class Pixel>
CALCOPS_HD inline Pixel sample(const Plane<Pixel>& plane, const Cell<2>& cell) {
  using Real = Number<Pixel>;
  const Axis<2>& x = cell.x;
  const Axis<2>& y = cell.y;
  const Real weight_x = static_cast<Real>(x.fraction);
  const Real weight_y = static_cast<Real>(y.fraction);
  const bool uses_right = weight_x > 0;
  const bool uses_lower = weight_y > 0;
  const auto tap = [&](bool is_used, int64_t row, int64_t column) {
    return is_used ? plane.template at<Real>(row, column) : 0;
  };
  return to_pixel<Pixel>(
      interpolate(plane.template at<Real>(y.tap[0], x.tap[0]), tap(uses_right, y.tap[0], x.tap[1]),
                  tap(uses_lower, y.tap[1], x.tap[0]),
                  tap(uses_right && uses_lower, y.tap[1], x.tap[1]), weight_x, weight_y));
}

// Return the weighted sum of 4 x 4 taps. Taps of weight zero are not used.
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

// Write the weights of an axis's taps, computed in float64 and rounded to Real.
template <class Real>
CALCOPS_HD inline void round_weights(double t, Real (&weight)[4]) {
  double exact[4];
  weights_of(t, exact);
  for (int k = 0; k < 4; ++k) weight[k] = static_cast<Real>(exact[k]);
}

template <class Real, class Pixel>
CALCOPS_HD inline void read_taps(const Plane<Pixel>& plane, const Cell<4>& cell,
                                 Real (&tap)[4][4]) {
  for (int y = 0; y < 4; ++y)
    for (int x = 0; x < 4; ++x) tap[y][x] = plane.template at<Real>(cell.y.tap[y], cell.x.tap[x]);
}

template <class Pixel>
CALCOPS_HD inline Pixel sample(const Plane<Pixel>& plane, const Cell<4>& cell) {
  using Real = Number<Pixel>;
  Real tap[4][4], weight_x[4], weight_y[4];
  read_taps(plane, cell, tap);
  round_weights(cell.x.fraction, weight_x);
  round_weights(cell.y.fraction, weight_y);
  return to_pixel<Pixel>(sum_taps(tap, weight_x, weight_y));
}

// The derivatives of an interpolated value for the position (x, y), or the tangent of a position.
struct Slope {
  double x, y;
};

// Return the derivatives for four taps, a b above c d, at the fractions x and y. Taps of weight
// zero are not used.
CALCOPS_HD inline Slope slope_of_taps(double a, double b, double c, double d, double x, double y) {
  const double bottom = y > 0 ? d - c : 0, right = x > 0 ? d - b : 0;
  return {fma(y, bottom, (1 - y) * (b - a)), fma(x, right, (1 - x) * (c - a))};
}

template <class Pixel>
CALCOPS_HD inline Slope sample_slope(const Plane<Pixel>& plane, const Cell<2>& cell) {
  const int64_t *row = cell.y.tap, *column = cell.x.tap;
  const Slope slope = slope_of_taps(plane.at(row[0], column[0]), plane.at(row[0], column[1]),
                                    plane.at(row[1], column[0]), plane.at(row[1], column[1]),
                                    cell.x.fraction, cell.y.fraction);
  return {cell.x.slope * slope.x, cell.y.slope * slope.y};
}

// The same for 4 x 4 taps.
CALCOPS_HD inline Slope slope_of_taps(const double (&tap)[4][4], double x, double y) {
  double weight_x[4], weight_y[4], slope_x[4], slope_y[4];
  weights_of(x, weight_x);
  weights_of(y, weight_y);
  slopes_of(x, slope_x);
  slopes_of(y, slope_y);
  return {sum_taps(tap, slope_x, weight_y), sum_taps(tap, weight_x, slope_y)};
}

template <class Pixel>
CALCOPS_HD inline Slope sample_slope(const Plane<Pixel>& plane, const Cell<4>& cell) {
  double tap[4][4];
  read_taps(plane, cell, tap);
  const Slope slope = slope_of_taps(tap, cell.x.fraction, cell.y.fraction);
  return {cell.x.slope * slope.x, cell.y.slope * slope.y};
}

// Return the tangent of the source (x, y) of a pixel where m moves along `tangent`. `row` is
// row_of(tangent, v) for the pixel (u, v), and reciprocal is 1 / W.
CALCOPS_HD inline Slope motion_of(const double* tangent, const RowStart& row, double x, double y,
                                  double reciprocal, double u) {
  const double w = fma(tangent[6], u, row.w);
  return {fma(-x, w, fma(tangent[0], u, row.x)) * reciprocal,
          fma(-y, w, fma(tangent[3], u, row.y)) * reciprocal};
}

// Add the share of pixel (u, v) to the gradient for m. (gx, gy) is the gradient for its source.
CALCOPS_HD inline void project_backward(const Source& s, double u, double v, double gx, double gy,
                                        double* grad_m) {
  const double g[3] = {gx / s.w, gy / s.w, -fma(gx, s.x, gy * s.y) / s.w};
  for (int row = 0; row < 3; ++row) {
    grad_m[3 * row] = fma(g[row], u, grad_m[3 * row]);
    grad_m[3 * row + 1] = fma(g[row], v, grad_m[3 * row + 1]);
    grad_m[3 * row + 2] += g[row];
  }
}

}  // namespace calcops::ops::warp_perspective
