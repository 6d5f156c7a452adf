// The arithmetic of OpenCV 4 for one pixel, shared by the CPU and the CUDA kernels (terms:
// warp_perspective.h).
//
// A position is computed in float64 and rounded to 1/32 pixel. Its whole part is an int16. The
// weights of the four taps are multiples of 1/1024. uint8 is summed exactly and rounded half up.
// uint16, int16 and float32 are summed in float32, float64 in float64, from the first tap to the
// last. Every product is rounded before it is added.
//
// Source: modules/imgproc/src/imgwarp.cpp of OpenCV 4.12, warpPerspective and remap;
// modules/core/src/lapack.cpp, invert. tests/operators/opencv4_reference.py lists the versions and
// processors that compute otherwise.
#pragma once

#include <climits>

#include "warp_perspective/warp_perspective_math.h"

namespace calcops::ops::warp_perspective {
namespace opencv4 {

// Return the rounded product a * b. A compiler may fuse a plain a * b with the sum into which it
// goes. It may not fuse this fma. Without FP_FAST_FMA the processor has no fma to fuse into.
template <class Real>
CALCOPS_HD inline Real multiply(Real a, Real b) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<Real, float>)
    return __fmul_rn(a, b);
  else
    return __dmul_rn(a, b);
#elif defined(FP_FAST_FMA)
  return fma(a, b, static_cast<Real>(-0.0));
#else
  return a * b;
#endif
}

// Write the map m from destination to source. A matrix that cannot be inverted gives m = 0, so that
// every source is (0, 0).
CALCOPS_HD inline void make_map(const double* warp, bool inverse_map, double* m) {
  if (inverse_map) {
    for (int k = 0; k < 9; ++k) m[k] = warp[k];
    return;
  }
  for (int row = 0; row < 3; ++row)
    for (int column = 0; column < 3; ++column) {
      const double *next = warp + (column + 1) % 3 * 3, *last = warp + (column + 2) % 3 * 3;
      const int i = (row + 1) % 3, j = (row + 2) % 3;
      m[3 * row + column] = multiply(next[i], last[j]) - multiply(next[j], last[i]);
    }
  const double det = multiply(warp[0], m[0]) + multiply(warp[1], m[3]) + multiply(warp[2], m[6]);
  for (int k = 0; k < 9; ++k) m[k] = det != 0 ? multiply(m[k], 1 / det) : 0;
}

// Return the width of OpenCV's blocks. OpenCV computes (X, Y, W) from (u, v) only for the first
// pixel of a block's row. For the other pixels it adds multiples of m's first column to those
// numbers.
CALCOPS_HD inline int64_t block_width(const WarpSizes& sizes) {
  const int64_t rows = sizes.out_height < 16 ? sizes.out_height : 16;
  return 1024 / rows < sizes.out_width ? 1024 / rows : sizes.out_width;
}

// A row of a block.
struct Block {
  RowStart first;  // (X, Y, W) of the first pixel
  int64_t whole;   // number of pixels in whole groups of 16
};

CALCOPS_HD inline Block block_of(const double* m, int64_t u, int64_t v, int64_t pixels) {
  const double x = static_cast<double>(u), y = static_cast<double>(v);
  const auto at = [&](const double* r) { return multiply(r[0], x) + multiply(r[1], y) + r[2]; };
  return {{at(m), at(m + 3), at(m + 6)}, pixels / 16 * 16};
}

// Return the nearest int. OpenCV rounds NaN and too large numbers to the least int where it
// computes sixteen pixels at once (is_in_group), and to the largest int in the remaining pixels.
CALCOPS_HD inline int nearest_int(double x, bool is_in_group) {
  constexpr double least = INT_MIN;
  constexpr double largest = INT_MAX;
  const double beyond = ((x < least) | is_in_group) ? least : largest;
  x = x >= least ? x : beyond;
  x = x <= largest ? x : largest;
  return static_cast<int>(rint(x));
}

CALCOPS_HD inline int as_int16(int x) {
  return x < INT16_MIN ? INT16_MIN : x > INT16_MAX ? INT16_MAX : x;
}

constexpr int kSteps = 32;             // of 1/32 pixel
constexpr int kOne = kSteps * kSteps;  // sum of the weights of a pixel's taps

// The upper left tap, or the nearest one, and the distance from there to the source in steps.
struct Position {
  int x, y, step_x, step_y;
};

template <bool kNearest>
CALCOPS_HD inline Position position_of(const double* m, const Block& block, int i) {
  const double u = i, w = block.first.w + multiply(m[6], u);
  const double scale = w != 0 ? (kNearest ? 1 : kSteps) / w : 0;
  const bool is_in_group = i < block.whole;
  const int x = nearest_int((block.first.x + multiply(m[0], u)) * scale, is_in_group);
  const int y = nearest_int((block.first.y + multiply(m[3], u)) * scale, is_in_group);
  if (kNearest) return {as_int16(x), as_int16(y), 0, 0};
  // Division by 32 and its remainder, towards minus infinity.
  return {as_int16(x >> 5), as_int16(y >> 5), x & (kSteps - 1), y & (kSteps - 1)};
}

// Return the position of pixel (u, v).
template <bool kNearest>
CALCOPS_HD inline Position position_of(const double* m, const WarpSizes& sizes, int64_t u,
                                       int64_t v) {
  const int64_t width = block_width(sizes), left = u / width * width;
  const int64_t rest = sizes.out_width - left;
  return position_of<kNearest>(m, block_of(m, left, v, rest < width ? rest : width),
                               static_cast<int>(u - left));
}

// Return a border value as a pixel, as cv::saturate_cast does: in an integer image, a value that no
// int can hold becomes the smallest pixel.
template <class Pixel>
CALCOPS_HD inline Pixel border_pixel(double value) {
  if constexpr (std::is_integral_v<Pixel>) value = value < INT_MAX + 0.5 ? value : INT_MIN;
  return to_pixel<Pixel>(static_cast<Number<Pixel>>(value));
}

template <class Pixel>
CALCOPS_HD inline Plane<Pixel> make_plane(const WarpInputs<Pixel>& in, int64_t n, int64_t c,
                                          double border) {
  Plane<Pixel> plane = warp_perspective::make_plane(in, n, c, border);
  plane.border = border_pixel<Pixel>(border);
  return plane;
}

// The type in which the taps are summed.
template <class Pixel>
using Sum = std::conditional_t<std::is_same_v<Pixel, uint8_t>, int32_t,
                               std::conditional_t<std::is_same_v<Pixel, double>, double, float>>;

// The weights of four taps, a b above c d. Integer weights are multiplied by 1024. OpenCV
// multiplies them by 32768, and has 32767, 0, 0 and 1 at a position without a fraction. No uint8
// pixel differs by that.
template <class Real>
struct Weights {
  Real a, b, c, d;

  CALCOPS_HD Weights(int step_x, int step_y) {
    const Real one = std::is_integral_v<Real> ? 1 : static_cast<Real>(1.0 / kOne);
    const auto of = [&](int x, int y) { return static_cast<Real>(x * y) * one; };
    a = of(kSteps - step_x, kSteps - step_y);
    b = of(step_x, kSteps - step_y);
    c = of(kSteps - step_x, step_y);
    d = of(step_x, step_y);
  }
};

template <class Pixel>
CALCOPS_HD inline Sum<Pixel> times(Pixel tap, Sum<Pixel> weight) {
  if constexpr (std::is_integral_v<Sum<Pixel>>)
    return tap * weight;
  else
    return multiply(static_cast<Sum<Pixel>>(tap), weight);
}

template <class Pixel>
CALCOPS_HD inline Pixel interpolate(Pixel a, Pixel b, Pixel c, Pixel d, int step_x, int step_y) {
  const Weights<Sum<Pixel>> weights(step_x, step_y);
  const Sum<Pixel> sum =
      times(a, weights.a) + times(b, weights.b) + times(c, weights.c) + times(d, weights.d);
  if constexpr (std::is_integral_v<Sum<Pixel>>)
    return static_cast<Pixel>((sum + kOne / 2) >> 10);
  else
    return to_pixel<Pixel>(sum);
}

// Return the weighted mean of the taps that are in the image. With kTransparent, this is the pixel
// if its first tap is in the last column or row. `right` and `below` are nullptr if they are
// outside.
template <class Pixel>
CALCOPS_HD inline Pixel interpolate_inside(Pixel a, const Pixel* right, const Pixel* below,
                                           int step_x, int step_y) {
  using Real = Sum<Pixel>;
  const Weights<Real> weights(step_x, step_y);
  Real sum = 0, total = weights.a;
  sum += times(a, weights.a);
  const auto add = [&](const Pixel* tap, Real weight) {
    if (!tap) return;
    sum += times(*tap, weight);
    total += weight;
  };
  add(right, weights.b);
  add(below, weights.c);
  if constexpr (std::is_integral_v<Real>) {
    constexpr int kUnit = 1 << 15;
    const int mean = static_cast<int>(static_cast<float>(sum) * kUnit / static_cast<float>(total));
    return static_cast<Pixel>((mean + kUnit / 2) >> 15);
  } else {
    return to_pixel<Pixel>(sum / total);
  }
}

// Write a pixel at any position. Return false, and write nothing, if the border mode keeps it.
template <bool kNearest, class Pixel>
CALCOPS_HD inline bool sample(const Plane<Pixel>& plane, Border border, const Position& at,
                              Pixel& out) {
  const int64_t width = plane.width, height = plane.height;
  const auto is_outside = [](int64_t i, int64_t size) { return i < 0 || i >= size; };
  const bool is_transparent = border == Border::kTransparent;
  if (is_transparent && (is_outside(at.x, width) || is_outside(at.y, height))) return false;
  if (is_transparent || width == 0 || height == 0) border = Border::kConstant;
  const int64_t left = fold_index(at.x, width, border), above = fold_index(at.y, height, border);
  const auto tap = [&](int64_t x, int64_t y) { return plane.template at<Pixel>(y, x); };
  if (kNearest) {
    out = tap(left, above);
    return true;
  }
  const int64_t right = fold_index(at.x + 1, width, border);
  const int64_t below = fold_index(at.y + 1, height, border);
  const Pixel a = tap(left, above), b = tap(right, above);
  const Pixel c = tap(left, below), d = tap(right, below);
  const bool lacks_right = is_outside(right, width), lacks_below = is_outside(below, height);
  if (is_transparent && (lacks_right || lacks_below))
    out = interpolate_inside(a, lacks_right ? nullptr : &b, lacks_below ? nullptr : &c, at.step_x,
                             at.step_y);
  else if ((is_outside(left, width) && lacks_right) || (is_outside(above, height) && lacks_below))
    out = plane.border;
  else
    out = interpolate(a, b, c, d, at.step_x, at.step_y);
  return true;
}

}  // namespace opencv4
}  // namespace calcops::ops::warp_perspective
