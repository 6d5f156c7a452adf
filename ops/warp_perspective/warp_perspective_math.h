// The mathematics of one pixel, for the CPU and the CUDA kernel alike (contract:
// warp_perspective.h).
//
// Every sum of products is an explicit fma, so that no compiler may contract an expression in its
// own way: both kernels see the same coordinates bit for bit.
#pragma once

#include <math.h>  // unlike <cmath>, has fma of float32 in the global namespace

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "warp_perspective/warp_perspective.h"

#ifdef __CUDACC__
#define CALCOPS_HD __host__ __device__
#else
#define CALCOPS_HD
#endif

namespace calcops {

// What an image is sampled in. The weights are computed in float64 and rounded to this: for
// float32, eight roundings of 2^-25 at most lie between the result and the exact one, where the
// image is in [0, 1].
template <class Pixel>
using Number = std::conditional_t<std::is_same_v<Pixel, float>, float, double>;

// cv::saturate_cast from double: for an integer half to even, clamped; NaN gives the least one.
template <class Pixel>
CALCOPS_HD inline Pixel to_pixel(double value) {
  if constexpr (std::is_integral_v<Pixel>) {
    // std::numeric_limits has functions for the host alone.
    constexpr int range = 1 << 8 * sizeof(Pixel);
    constexpr double least = std::is_signed_v<Pixel> ? -range / 2 : 0, largest = least + range - 1;
    value = value > least ? value : least;
    value = value < largest ? value : largest;
    return static_cast<Pixel>(static_cast<int>(rint(value)));
  } else {
    return static_cast<Pixel>(value);
  }
}

CALCOPS_HD inline void cross(const double* a, const double* b, double* out, int stride) {
  out[0] = fma(a[1], b[2], -(a[2] * b[1]));
  out[stride] = fma(a[2], b[0], -(a[0] * b[2]));
  out[2 * stride] = fma(a[0], b[1], -(a[1] * b[0]));
}

// The map from destination to source: (x, y) = (X / W, Y / W), (X, Y, W) = m (u, v, 1).
struct Homography {
  double m[9];
  double scaled[9];  // the caller's matrix times `scale`, a power of two that makes its largest
                     // entry 1..2
  double scale;
  bool valid;  // false where no pixel has a source: singular, all zero or not finite
};

CALCOPS_HD inline Homography make_homography(const double* warp, bool inverse_map) {
  Homography h;
  double largest = 0;
  bool finite = true;
  for (int i = 0; i < 9; ++i) {
    finite = finite && fabs(warp[i]) <= DBL_MAX;
    largest = fmax(largest, fabs(warp[i]));
  }
  h.valid = finite && largest > 0;
  if (!h.valid) return h;
  // A homography has no scale of its own; without one, products neither overflow nor vanish.
  const int exponent = -ilogb(largest);
  h.scale = ldexp(1.0, exponent < 1023 ? exponent : 1023);
  for (int i = 0; i < 9; ++i) h.scaled[i] = warp[i] * h.scale;
  if (inverse_map) {
    for (int i = 0; i < 9; ++i) h.m[i] = h.scaled[i];
    return h;
  }
  // The adjugate is the inverse up to scale, without the rounding of a division by the determinant.
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

// The gradient of the caller's matrix from that of `m`.
CALCOPS_HD inline void homography_backward(const Homography& h, const double* grad_m,
                                           bool inverse_map, double* grad_warp) {
  for (int i = 0; i < 9; ++i) grad_warp[i] = h.valid && inverse_map ? grad_m[i] * h.scale : 0;
  if (!h.valid || inverse_map) return;
  // Column i of m is the cross product of the rows j, k = i+1, i+2: for its gradient g, row j
  // receives row_k x g and row k receives g x row_j.
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

// (X, Y, W) of the first pixel of a row of the destination.
struct Row {
  double x, y, w;
};

CALCOPS_HD inline Row row_of(const double* m, double v) {
  return {fma(m[1], v, m[2]), fma(m[4], v, m[5]), fma(m[7], v, m[8])};
}

// Where a destination pixel comes from. Neither coordinate is finite where w is 0.
struct Source {
  double x, y, w;
};

// One reciprocal serves both quotients. One correction takes them to within an ulp, and to the
// exact quotient where that is a float64: pixel centres stay pixel centres.
CALCOPS_HD inline double divide(double a, double w, double reciprocal) {
  const double quotient = a * reciprocal;
  return fma(fma(-quotient, w, a), reciprocal, quotient);
}

CALCOPS_HD inline Source project(const double* m, const Row& row, double u) {
  const double w = fma(m[6], u, row.w), reciprocal = 1 / w;
  return {divide(fma(m[0], u, row.x), w, reciprocal), divide(fma(m[3], u, row.y), w, reciprocal),
          w};
}

CALCOPS_HD inline Source project(const double* m, double u, double v) {
  return project(m, row_of(m, v), u);
}

// One axis of a source position: two taps, the weight of the second and the derivative of the
// position in the image with respect to the coordinate. A tap outside [0, size) is border_value.
struct Axis {
  int64_t first, second;
  double weight, slope;
};

// x modulo period, with the sign of x, as fmod, which is slow: exact as well, where x / period is
// below 2^51.
CALCOPS_HD inline double near_remainder(double x, double period) {
  const double rest = fma(-trunc(x / period), period, x);
  // The quotient may have been rounded up to an integer.
  return rest * x < 0 ? rest + copysign(period, x) : rest;
}

constexpr double kFar = 0x1p51;

// A finite coordinate outside of [0, n - 1] as a border mode other than constant maps it there, for
// wrap to [0, n); `slope` becomes the derivative. kNear: x is below kFar.
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
    // reflect is even about -1/2 and has period 2n, reflect_101 is even about 0 with period 2n - 2
    const double edge = border == Border::kReflect ? 1 : 0;
    const double period = 2 * (n - 1 + edge);
    x = period > 0 ? modulo(period) : 0;
    slope = x < 0 ? -slope : slope;
    x = x < 0 ? -edge - x : x;
    const bool far_half = x > n - 1 + edge / 2;
    slope = far_half ? -slope : slope;
    x = far_half ? period - edge - x : x;
  }
  slope = x >= 0 && x <= n - 1 ? slope : 0;
  x = x < 0 ? 0 : x;
  return x > n - 1 ? n - 1 : x;
}

// cv::borderInterpolate folds the index of each tap; folding the coordinate gives the same function
// for coordinates of any size. False where both taps are border_value.
CALCOPS_HD inline bool locate(double x, int64_t size, Border border, bool nearest, Axis& axis) {
  const double n = static_cast<double>(size);
  axis.slope = nearest ? 0 : 1;
  if (nearest) x = rint(x);
  if (border == Border::kConstant) {
    if (!(x > -1 && x < n)) return false;
  } else if (!(fabs(x) <= DBL_MAX)) {
    return false;
  } else if (!(x >= 0 && (border == Border::kWrap ? x < n : x <= n - 1))) {
    x = fold<false>(x, n, border, axis.slope);
  }
  const double floor_x = floor(x);
  axis.first = static_cast<int64_t>(floor_x);
  axis.second = axis.first + 1;
  axis.weight = x - floor_x;
  if (axis.second == size && border != Border::kConstant)
    axis.second = border == Border::kWrap ? 0 : axis.first;
  return true;
}

struct Cell {
  Axis x, y;
};

CALCOPS_HD inline bool locate(const Source& source, const WarpSizes& sizes, Cell& cell) {
  return locate(source.x, sizes.width, sizes.border, sizes.nearest, cell.x) &&
         locate(source.y, sizes.height, sizes.border, sizes.nearest, cell.y);
}

// The numbers of a cell, each at out[number * stride].
CALCOPS_HD inline void store_cell(const Homography& map, const WarpSizes& sizes, int64_t u,
                                  int64_t v, int64_t stride, double* out) {
  Cell cell{};
  Source source{};
  bool found = map.valid && sizes.height > 0 && sizes.width > 0;
  if (found) {
    source = project(map.m, static_cast<double>(u), static_cast<double>(v));
    found = locate(source, sizes, cell);
  }
  const int64_t rows[2] = {cell.y.first, cell.y.second}, columns[2] = {cell.x.first, cell.x.second};
  const double numbers[kTap] = {source.x,      source.y,     source.w,    cell.x.weight,
                                cell.y.weight, cell.x.slope, cell.y.slope};
  for (int k = 0; k < kTap; ++k) out[k * stride] = found ? numbers[k] : 0;
  for (int k = 0; k < 4; ++k) {
    const int64_t row = rows[k / 2], column = columns[k % 2];
    const bool inside = row >= 0 && row < sizes.height && column >= 0 && column < sizes.width;
    out[(kTap + k) * stride] = !found   ? 0
                               : inside ? static_cast<double>(row * sizes.width + column)
                                        : -1;
  }
}

// One channel of one image.
template <class Pixel>
struct Plane {
  const Pixel* data;
  int64_t stride_y, stride_x, height, width;
  Pixel border;

  template <class As = double>
  CALCOPS_HD As at(int64_t y, int64_t x) const {
    const bool inside = y >= 0 && y < height && x >= 0 && x < width;
    return static_cast<As>(inside ? data[y * stride_y + x * stride_x] : border);
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
          to_pixel<Pixel>(border)};
}

// Weighted sum of the taps a b / c d.
template <class Real>
CALCOPS_HD inline Real interpolate(Real a, Real b, Real c, Real d, Real weight_x, Real weight_y) {
  const Real top = fma(weight_x, b, (1 - weight_x) * a);
  const Real bottom = fma(weight_x, d, (1 - weight_x) * c);
  return fma(weight_y, bottom, (1 - weight_y) * top);
}

// A tap of weight zero is not read: an identity map keeps NaN and infinity in their pixels.
template <class Pixel>
CALCOPS_HD inline Pixel sample(const Plane<Pixel>& plane, const Cell& cell) {
  using Real = Number<Pixel>;
  const Axis &x = cell.x, &y = cell.y;
  const Real weight_x = static_cast<Real>(x.weight), weight_y = static_cast<Real>(y.weight);
  const bool right = weight_x > 0, below = weight_y > 0;
  const auto tap = [&](bool used, int64_t row, int64_t column) {
    return used ? plane.template at<Real>(row, column) : 0;
  };
  return to_pixel<Pixel>(interpolate(plane.template at<Real>(y.first, x.first),
                                     tap(right, y.first, x.second), tap(below, y.second, x.first),
                                     tap(right && below, y.second, x.second), weight_x, weight_y));
}

// Its derivatives with respect to the position, from the right at a pixel centre.
struct Slope {
  double x, y;
};

template <class Pixel>
CALCOPS_HD inline Slope sample_slope(const Plane<Pixel>& plane, const Cell& cell) {
  const double a = plane.at(cell.y.first, cell.x.first), b = plane.at(cell.y.first, cell.x.second),
               c = plane.at(cell.y.second, cell.x.first),
               d = plane.at(cell.y.second, cell.x.second);
  const double bottom = cell.y.weight > 0 ? d - c : 0, right = cell.x.weight > 0 ? d - b : 0;
  return {cell.x.slope * fma(cell.y.weight, bottom, (1 - cell.y.weight) * (b - a)),
          cell.y.slope * fma(cell.x.weight, right, (1 - cell.x.weight) * (c - a))};
}

// Adds to grad_m what one destination pixel (u, v) gives: (gx, gy) is the gradient of its position.
CALCOPS_HD inline void project_backward(const Source& s, double u, double v, double gx, double gy,
                                        double* grad_m) {
  const double g[3] = {gx / s.w, gy / s.w, -fma(gx, s.x, gy * s.y) / s.w};
  for (int row = 0; row < 3; ++row) {
    grad_m[3 * row] = fma(g[row], u, grad_m[3 * row]);
    grad_m[3 * row + 1] = fma(g[row], v, grad_m[3 * row + 1]);
    grad_m[3 * row + 2] += g[row];
  }
}

}  // namespace calcops
