// How the CPU kernels of warp_perspective walk through a result. Each row is cut into parts. Nearly
// all pixels have all taps inside the image. They are computed without a test, in loops that the
// compiler vectorises.
#pragma once

// Without this, GCC does not vectorise a loop with floor or a comparison, because these may raise a
// floating-point exception.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")
#endif

#include <calcops/parallel.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "warp_perspective/warp_perspective.h"
#include "warp_perspective/warp_perspective_math.h"

namespace calcops::ops::warp_perspective {

// Call f(i) for i = 0, 1, ... count - 1 in parallel, at least `grain` of them for each thread. A
// thread takes the next i when it is done with one, because the calls take different times.
template <class F>
void for_each(int64_t count, int64_t grain, const F& f) {
  int64_t next = 0;  // not std::atomic, because <atomic> is slow to compile
  const auto take = [&] { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); };
  parallel_for(count, grain, [&](int64_t, int64_t) {
    for (int64_t i = take(); i < count; i = take()) f(i);
  });
}

template <class Pixel>
std::vector<Homography> make_homographies(const WarpInputs<Pixel>& in) {
  std::vector<Homography> maps(in.sizes.warp_batch);
  for (int64_t i = 0; i < in.sizes.warp_batch; ++i) maps[i] = homography_of(in, i);
  return maps;
}

inline const Homography& map_of(const std::vector<Homography>& maps, int64_t n) {
  return maps[maps.size() == 1 ? 0 : n];
}

// Of a tile of the destination. Rows of a flat tile would not share the lines of a rotated image.
constexpr int64_t kTileWidth = 128, kTileHeight = 64, kFlatHeight = 8;

struct Interval {
  int64_t begin, end;

  bool empty() const { return begin >= end; }
};

// Reduce `kept` to the pixels u where slope * u + start >= 0.
inline void clip(double slope, double start, Interval& kept) {
  if (kept.empty()) return;
  const bool at_begin = fma(slope, static_cast<double>(kept.begin), start) >= 0;
  const bool at_end = fma(slope, static_cast<double>(kept.end - 1), start) >= 0;
  if (at_begin && at_end) return;
  const double root = -start / slope;  // used only if it is between begin and end
  if (at_end)
    kept.begin = static_cast<int64_t>(ceil(root));
  else
    kept.end = at_begin ? static_cast<int64_t>(floor(root)) + 1 : kept.begin;
}

// Source positions with left <= x <= right and top <= y <= bottom.
struct Box {
  double left, right, top, bottom;
};

// Rounding decides whether some pixels at the ends of an interval belong to it. kSure leaves them
// out, kPossible keeps them.
enum class Doubt { kSure, kPossible };

// Return the pixels u of a row, 0 <= u < n, whose W has the sign of `sign` (1 or -1) and whose
// source is in the box.
//
// The coordinate X / W is at least `left` where sign * (X - left * W) >= 0, which is linear in u.
// So each of the box's edges, and the sign, leaves an interval. X, Y and W have one rounding each,
// a root three. The slack is 2^-48 of the largest number, as much as 32 roundings. DBL_MIN keeps it
// from being 0 where all numbers are 0: a source exactly on the box's edge is then not sure.
[[gnu::noinline]] inline Interval in_box(const double* m, const RowStart& row, int64_t n,
                                         double sign, const Box& box, Doubt doubt) {
  const auto slack = [&](double slope, double start) {
    const double most = fma(fabs(slope), static_cast<double>(n), fabs(start));
    return (doubt == Doubt::kSure ? -1 : 1) * fma(0x1p-48, most, DBL_MIN);
  };
  const double of_w = slack(m[6], row.w);
  Interval kept{0, n};
  clip(sign * m[6], fma(sign, row.w, of_w), kept);
  const auto keep = [&](double s, double edge, double slope, double start) {
    clip(s * fma(-edge, m[6], slope),
         fma(s, fma(-edge, row.w, start), fma(fabs(edge), of_w, slack(slope, start))), kept);
  };
  keep(sign, box.left, m[0], row.x);
  keep(-sign, box.right, m[0], row.x);
  keep(sign, box.top, m[3], row.y);
  keep(-sign, box.bottom, m[3], row.y);
  return kept;
}

// Return the positions at most `beyond` outside the image.
inline Box image_box(const WarpSizes& sizes, double beyond) {
  return {-beyond, static_cast<double>(sizes.width) - 1 + beyond, -beyond,
          static_cast<double>(sizes.height) - 1 + beyond};
}

// Return how far a tap may be from the source.
inline double reach_of(const WarpSizes& sizes) {
  return sizes.interpolation == Interpolation::kCubic ? 2 : 1;
}

// Return positions whose taps are all in the image. For kNearest the box could be 0.5 pixels larger
// than the image; 0.25 is surely inside.
inline Box inside_box(const WarpSizes& sizes) {
  return image_box(sizes,
                   sizes.interpolation == Interpolation::kNearest ? 0.25 : 1 - reach_of(sizes));
}

// Return the positions whose taps are not folded back into the image: with a constant border all
// that have a tap in the image, with other borders those inside.
inline Box plain_box(const WarpSizes& sizes) {
  return sizes.border == Border::kConstant ? image_box(sizes, reach_of(sizes)) : inside_box(sizes);
}

// A row of the result. The pixels that are not in `shown` have no tap in the image, or no source.
// All taps of the pixels in `inside` are in the image. The others are computed one by one.
struct Row {
  RowStart start;
  double sign;  // of W in the middle of the row; a pixel with the other sign is not in `inside`
  Interval shown{0, 0}, inside{0, 0};

  [[gnu::noinline]] Row(const Homography& map, int64_t v, const WarpSizes& sizes)
      : start(row_of(map.m, static_cast<double>(v))) {
    const int64_t n = sizes.out_width;
    if (!map.valid) return;
    const double last = fma(map.m[6], static_cast<double>(n - 1), start.w);
    sign = start.w + last < 0 ? -1 : 1;
    const bool has_horizon = !(start.w * last > 0), is_constant = sizes.border == Border::kConstant;
    shown = {0, n};
    // Beyond this box, a constant or a transparent border shows nothing of the image.
    if (!has_horizon && (is_constant || sizes.border == Border::kTransparent))
      shown = in_box(map.m, start, n, sign, is_constant ? plain_box(sizes) : image_box(sizes, 0.5),
                     Doubt::kPossible);
    inside = in_box(map.m, start, n, sign, inside_box(sizes), Doubt::kSure);
  }

  // Call at_outside, at_edge and at_inside, each with (begin, end), for the parts of [left, right).
  template <class Outside, class Edge, class Inside>
  void visit(int64_t left, int64_t right, const Outside& at_outside, const Edge& at_edge,
             const Inside& at_inside) const {
    const auto visit_until = [&](int64_t end, const auto& f) {
      end = std::min(end, right);
      if (left < end) f(left, end);
      left = std::max(left, end);
    };
    visit_until(shown.begin, at_outside);
    if (!inside.empty()) {
      visit_until(inside.begin, at_edge);
      visit_until(inside.end, at_inside);
    }
    visit_until(shown.end, at_edge);
    visit_until(right, at_outside);
  }
};

// Return the rows of a strip of the result, which begins with row `top`.
inline std::vector<Row> rows_of_strip(const Homography& map, int64_t top, const WarpSizes& sizes) {
  std::vector<Row> rows;
  rows.reserve(kTileHeight);
  for (int64_t v = top; v < std::min(top + kTileHeight, sizes.out_height); ++v)
    rows.emplace_back(map, v, sizes);
  return rows;
}

// Write the source and the taps of a single pixel. Return false if it has no source. Not inlined:
// it is long, and the pixels inside have loops of their own.
template <int kTaps>
[[gnu::noinline]] bool find_cell(const Homography& map, const RowStart& row, int64_t u,
                                 const WarpSizes& sizes, Source& source, Cell<kTaps>& cell) {
  source = project(map.m, row, static_cast<double>(u));
  return locate(source, sizes, sizes.border, cell);
}

template <class Bits, class Number>
inline Bits bits_of(Number x) {
  Bits bits;
  static_assert(sizeof bits == sizeof x);
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Return n for x = kInt64 + n, where n is an integer and |n| < 2^51. Unlike a conversion of double
// to int64_t, this is vectorised on all processors.
constexpr double kInt64 = 0x1.8p52;

inline int64_t to_int64(double x) {
  constexpr int64_t kBits = 0x4338000000000000;  // of kInt64
  return bits_of<int64_t>(x) - kBits;
}

// The distances between neighbouring taps in memory. `first` is the offset of position (0, 0), to
// which kInt64 is added.
struct Strides {
  double y, x, first;

  Strides(int64_t y, int64_t x, int64_t origin)
      : y(static_cast<double>(y)),
        x(static_cast<double>(x)),
        first(kInt64 - static_cast<double>(origin)) {}
};

// The taps of a run of pixels: the offset of each pixel's upper left tap, and the weights of the
// right and the lower taps. These are also the source's distances from the upper left tap.
template <class Real>
struct Taps {
  int64_t offset[kTileWidth];
  Real weight_x[kTileWidth], weight_y[kTileWidth];

  // Prefetch a channel's taps. Inlined, because GCC removes a call that only prefetches.
  template <class Pixel>
  [[gnu::always_inline]] void prefetch(const Plane<Pixel>& plane, int64_t count,
                                       bool is_steep) const {
    for (int64_t i = 0; i < count; i += is_steep ? 4 : 16) {
      __builtin_prefetch(plane.data + offset[i]);
      // Where the map is steep, the lower tap is the upper tap of another row of the tile.
      if (!is_steep) __builtin_prefetch(plane.data + offset[i] + plane.stride_y);
    }
  }

  // Find the taps of the `count` pixels from u on, which are all inside.
  void locate(const double* m, const RowStart& row, int64_t u, int64_t count, bool is_nearest,
              const Strides& strides) {
    is_nearest ? put<true>(m, row, u, count, strides) : put<false>(m, row, u, count, strides);
  }

 private:
  template <bool kNearest>
  [[gnu::noinline]] void put(const double* m, const RowStart& row, int64_t u, int64_t count,
                             const Strides& strides) {
    const double first = static_cast<double>(u);
    // An int is converted to float64 by one instruction on all processors.
    for (int i = 0; i < static_cast<int>(count); ++i) {
      const Source source = project(m, row, first + i);
      const double x = kNearest ? rint(source.x) : floor(source.x);
      const double y = kNearest ? rint(source.y) : floor(source.y);
      offset[i] = to_int64(fma(y, strides.y, fma(x, strides.x, strides.first)));
      if (kNearest) continue;
      weight_x[i] = static_cast<Real>(source.x - x);
      weight_y[i] = static_cast<Real>(source.y - y);
    }
  }
};

// The taps of pixels that are inside. A pixel's taps are a b above c d. `above` has a and b of each
// pixel, `below` has c and d.
template <class Pixel>
struct Pairs {
  Pixel above[2 * kTileWidth], below[2 * kTileWidth];

  void read(const Plane<Pixel>& plane, const int64_t* offset, int64_t count) {
    const Pixel* next = plane.data + plane.stride_y;
    if (plane.stride_x == 1) {
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(above + 2 * i, plane.data + offset[i], 2 * sizeof(Pixel));
        std::memcpy(below + 2 * i, next + offset[i], 2 * sizeof(Pixel));
      }
    } else {
      for (int64_t i = 0; i < count; ++i)
        for (int64_t k = 0; k < 2; ++k) {
          above[2 * i + k] = plane.data[offset[i] + k * plane.stride_x];
          below[2 * i + k] = next[offset[i] + k * plane.stride_x];
        }
    }
  }
};

#pragma GCC diagnostic ignored "-Wpsabi"  // no vector is passed to another compilation unit
// Return fma(a, b, c) of each number. A compiler need not fuse a * b + c.
template <class Vector>
inline Vector multiply_add(const Vector& a, const Vector& b, const Vector& c) {
  Vector sum;
  for (size_t k = 0; k < sizeof a / sizeof a[0]; ++k) sum[k] = fma(a[k], b[k], c[k]);
  return sum;
}

// Return four pixels of a row as numbers.
template <class Four, class Pixel>
inline Four read_four(const Pixel* from, int64_t stride) {
  Four four = {};
  if constexpr (std::is_arithmetic_v<Pixel>) {
    if (stride == 1) {
      typedef Pixel Pixels __attribute__((vector_size(4 * sizeof(Pixel))));
      Pixels pixels;
      std::memcpy(&pixels, from, sizeof pixels);
      return __builtin_convertvector(pixels, Four);
    }
  }
  for (int x = 0; x < 4; ++x) four[x] = from[x * stride];
  return four;
}

// Write weighted sums of the 4 x 4 taps of pixels that are inside, as sum_taps() and in the same
// order. of_x and of_y have the weights of each sum. The four columns of a pixel are a vector;
// number - Four{} is a vector of four equal numbers.
template <class Pixel, class Real, int kSums>
[[gnu::noinline]] void sum_cubic(const Plane<Pixel>& plane, const int64_t* offset, int64_t count,
                                 const Real (&of_x)[kSums][4][kTileWidth],
                                 const Real (&of_y)[kSums][4][kTileWidth],
                                 Real (&sums)[kSums][kTileWidth]) {
  typedef Real Four __attribute__((vector_size(4 * sizeof(Real))));
  Real down[kSums][kTileWidth][4];
  for (int64_t i = 0; i < count; ++i) {
    const Pixel* from = plane.data + offset[i] - plane.stride_y - plane.stride_x;
    Four sum[kSums] = {};
#pragma GCC unroll 4
    for (int y = 0; y < 4; ++y, from += plane.stride_y) {
      const Four row = read_four<Four>(from, plane.stride_x);
      for (int k = 0; k < kSums; ++k) {
        const Four weight = of_y[k][y][i] - Four{};
        sum[k] = multiply_add(weight, weight != 0 ? row : Four{}, sum[k]);
      }
    }
    for (int k = 0; k < kSums; ++k) std::memcpy(down[k][i], &sum[k], sizeof sum[k]);
  }
  for (int k = 0; k < kSums; ++k)
    for (int64_t i = 0; i < count; ++i) {
      Real sum = 0;
      for (int x = 0; x < 4; ++x) {
        const Real weight = of_x[k][x][i];
        sum = fma(weight, weight != 0 ? down[k][i][x] : 0, sum);
      }
      sums[k][i] = sum;
    }
}

// The taps of pixels at any position, for a border mode that repeats the image.
struct FoldedTaps {
  int64_t offset[4][kTileWidth];  // of a b above c d, or of the nearest tap alone
  double weight_x[kTileWidth], weight_y[kTileWidth];

  // Locate the `count` pixels from u on, at most kTileWidth. Return false if one of them has no
  // source or a very distant one. The caller then locates each pixel by find_cell().
  [[gnu::noinline]] bool locate(const double* m, const RowStart& row, const WarpSizes& sizes,
                                const int64_t* stride, int64_t u, int64_t count) {
    double x[kTileWidth], y[kTileWidth], second_x[kTileWidth], second_y[kTileWidth];
    const int n = static_cast<int>(count);
    for (int i = 0; i < n; ++i) {
      const Source source = project(m, row, static_cast<double>(u) + i);
      x[i] = source.x;
      y[i] = source.y;
    }
    int64_t any_far = 0;  // not a bool: as wide as a double, so that the loop is vectorised
    for (int i = 0; i < n; ++i) any_far |= fabs(x[i]) < kFar && fabs(y[i]) < kFar ? 0 : 1;
    if (any_far) return false;
    locate_axis(sizes, sizes.width, n, x, second_x, weight_x);
    locate_axis(sizes, sizes.height, n, y, second_y, weight_y);
    const double along_y = static_cast<double>(stride[2]), along_x = static_cast<double>(stride[3]);
    if (sizes.interpolation == Interpolation::kNearest) {
      for (int i = 0; i < n; ++i)
        offset[0][i] = to_int64(fma(y[i], along_y, fma(x[i], along_x, kInt64)));
      return true;
    }
    for (int i = 0; i < n; ++i) {
      const double left = fma(x[i], along_x, kInt64), right = fma(second_x[i], along_x, kInt64);
      offset[0][i] = to_int64(fma(y[i], along_y, left));
      offset[1][i] = to_int64(fma(y[i], along_y, right));
      offset[2][i] = to_int64(fma(second_y[i], along_y, left));
      offset[3][i] = to_int64(fma(second_y[i], along_y, right));
    }
    return true;
  }

 private:
  static void locate_axis(const WarpSizes& sizes, int64_t size, int count, double* x,
                          double* second, double* weight) {
    if (sizes.interpolation == Interpolation::kNearest)
      for (int i = 0; i < count; ++i) x[i] = rint(x[i]);
    // The border mode is a constant of each loop, so that the compiler vectorises it.
    const auto fold_all = [&](auto border) {
      const double n = static_cast<double>(size);
      for (int i = 0; i < count; ++i) {
        double tap[2];
        weight[i] = find_taps(x[i], n, decltype(border)::value, tap);
        x[i] = tap[0];
        second[i] = tap[1];
      }
    };
    if (sizes.border == Border::kReplicate)
      fold_all(std::integral_constant<Border, Border::kReplicate>());
    else if (sizes.border == Border::kWrap)
      fold_all(std::integral_constant<Border, Border::kWrap>());
    else if (sizes.border == Border::kReflect)
      fold_all(std::integral_constant<Border, Border::kReflect>());
    else
      fold_all(std::integral_constant<Border, Border::kReflect101>());
  }
};

}  // namespace calcops::ops::warp_perspective
