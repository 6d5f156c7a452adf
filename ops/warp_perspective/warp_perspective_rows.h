// How the CPU kernels of warp_perspective go through a result. Each row is cut once, so that the
// pixels whose taps all lie inside the image, nearly all of them, are computed without a test, in
// loops that the compiler vectorises.
#pragma once

// Without it GCC would not vectorise a loop with floor or a comparison in it, for fear of a
// floating-point exception.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "warp_perspective/warp_perspective.h"
#include "warp_perspective/warp_perspective_math.h"
#ifdef __AVX512F__
#include "warp_perspective/warp_perspective_avx512.h"
#endif

namespace calcops::ops::warp_perspective {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// f(i) for 0, 1, ... count - 1, at least `grain` of them for each thread. A thread takes the next
// one when it is done with one: strips and tiles that show little of the image are quick.
template <class F>
void for_each(int64_t count, int64_t grain, const F& f) {
  std::atomic<int64_t> next{0};
  parallel_for(count, grain, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) f(i);
  });
}

inline int64_t output_offset(const WarpSizes& sizes, int64_t n, int64_t c, int64_t v) {
  return ((n * sizes.channels + c) * sizes.out_height + v) * sizes.out_width;
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

struct Interval {
  int64_t begin, end;

  bool empty() const { return begin >= end; }
};

// Keeps the pixels u where slope * u + start >= 0.
inline void clip(double slope, double start, Interval& kept) {
  if (kept.empty()) return;
  const bool at_begin = fma(slope, static_cast<double>(kept.begin), start) >= 0;
  const bool at_end = fma(slope, static_cast<double>(kept.end - 1), start) >= 0;
  if (at_begin && at_end) return;
  const double root = -start / slope;  // between the two, or of no use
  if (at_end)
    kept.begin = static_cast<int64_t>(ceil(root));
  else
    kept.end = at_begin ? static_cast<int64_t>(floor(root)) + 1 : kept.begin;
}

// Source positions with left <= x <= right and top <= y <= bottom.
struct Box {
  double left, right, top, bottom;
};

// Rounding decides about some pixels at the end of an interval: kSure leaves them out.
enum class Doubt { kSure, kPossible };

// Cuts intervals out of a row of n pixels.
class RowCutter {
 public:
  RowCutter(const double* m, const RowStart& row, int64_t n) : m_(m), row_(row), n_(n) {
    const double last = fma(m[6], static_cast<double>(n - 1), row.w);
    first_sign_ = row.w < 0 ? -1 : 1;
    sides_ = row.w * last > 0 ? 1 : 2;
  }

  // 2 where the horizon, beyond which W has the other sign, crosses or touches the row.
  int sides() const { return sides_; }

  // The pixels whose W has the sign of a side, counted from the left.
  Interval side(int side, Doubt doubt) const {
    Interval kept{0, n_};
    const double sign = side == 0 ? first_sign_ : -first_sign_;
    clip(sign * m_[6], fma(sign, row_.w, rounding(doubt, m_[6], row_.w)), kept);
    return kept;
  }

  // Those of them whose source is in the box.
  [[gnu::noinline]] Interval in_box(const Box& box, int side, Doubt doubt) const {
    const double sign = side == 0 ? first_sign_ : -first_sign_;
    const double of_w = rounding(doubt, m_[6], row_.w);
    Interval kept = this->side(side, doubt);
    const auto keep = [&](double s, double edge, double slope, double start) {
      const double slack = fma(fabs(edge), of_w, rounding(doubt, slope, start));
      clip(s * fma(-edge, m_[6], slope), fma(s, fma(-edge, row_.w, start), slack), kept);
    };
    keep(sign, box.left, m_[0], row_.x);
    keep(-sign, box.right, m_[0], row_.x);
    keep(sign, box.top, m_[3], row_.y);
    keep(-sign, box.bottom, m_[3], row_.y);
    return kept;
  }

 private:
  // X, Y and W have one rounding, a coordinate has three and a root has three: 2^-48 of the largest
  // number in each of them, 32 roundings, is more than they make together.
  // DBL_MIN is for zeros, of which nothing is rounded: what ends at the last row is not before it.
  double rounding(Doubt doubt, double slope, double start) const {
    const double most = fma(fabs(slope), static_cast<double>(n_), fabs(start));
    return (doubt == Doubt::kSure ? -1 : 1) * fma(0x1p-48, most, DBL_MIN);
  }

  const double* m_;
  RowStart row_;
  int64_t n_;
  double first_sign_;
  int sides_;
};

// The parts of a row, from left to right, each from the end of that before it.
enum class Part { kOutside, kEdge, kInside };

struct Cut {
  static constexpr int kParts = 9;
  int64_t end[kParts];

  // W is positive on one side of the horizon and negative on the other.
  static Part kind(int part) {
    constexpr Part kinds[4] = {Part::kOutside, Part::kEdge, Part::kInside, Part::kEdge};
    return kinds[part % 4];
  }

  // visit(kind, begin, end) for what of the parts is in [left, right).
  template <class Visit>
  void visit(int64_t left, int64_t right, const Visit& visit) const {
    for (int part = 0; part < kParts && left < right; ++part)
      if (end[part] > left) {
        const int64_t stop = std::min(end[part], right);
        visit(kind(part), left, stop);
        left = stop;
      }
  }
};

// The positions at most `beyond` outside of the image.
inline Box image_box(const WarpSizes& sizes, double beyond) {
  return {-beyond, static_cast<double>(sizes.width) - 1 + beyond, -beyond,
          static_cast<double>(sizes.height) - 1 + beyond};
}

// How far a tap may be from its source.
inline double reach_of(const WarpSizes& sizes) {
  return sizes.interpolation == Interpolation::kCubic ? 2 : 1;
}

// Where all taps are in the image; half a pixel more would be the end for a nearest one.
inline Box inside_box(const WarpSizes& sizes) {
  return image_box(sizes,
                   sizes.interpolation == Interpolation::kNearest ? 0.25 : 1 - reach_of(sizes));
}

// Where the taps of a source are those of the image around it: everywhere for a constant border,
// inside the image for those that repeat it.
inline Box plain_box(const WarpSizes& sizes) {
  return sizes.border == Border::kConstant ? image_box(sizes, reach_of(sizes)) : inside_box(sizes);
}

[[gnu::noinline]] inline Cut cut_row(const Homography& map, const RowStart& row,
                                     const WarpSizes& sizes) {
  Cut cut;
  const int64_t n = sizes.out_width;
  std::fill_n(cut.end, Cut::kParts, map.valid ? 0 : n);
  if (!map.valid) return cut;
  const bool repeats = sizes.border != Border::kConstant && sizes.border != Border::kTransparent;
  const Box inside = inside_box(sizes);
  const Box shown = sizes.border == Border::kConstant ? plain_box(sizes) : image_box(sizes, 0.5);
  const RowCutter cutter(map.m, row, n);
  int64_t last = 0;
  for (int side = 0; side < cutter.sides(); ++side) {
    const Interval in = cutter.in_box(inside, side, Doubt::kSure);
    const Interval all = repeats ? Interval{0, side + 1 == cutter.sides() ? n : in.end}
                                 : cutter.in_box(shown, side, Doubt::kPossible);
    const int64_t ends[4] = {all.begin, in.begin, in.end, all.end};
    for (int k = 0; k < 4; ++k) {
      const bool empty = k == 1 || k == 2 ? in.empty() : all.empty();
      cut.end[4 * side + k] = last = std::max(last, empty ? 0 : ends[k]);
    }
  }
  if (cutter.sides() == 1) std::fill_n(cut.end + 4, 4, last);
  cut.end[8] = n;
  return cut;
}

// Where a single pixel comes from. Out of line: it is long, and the loops over many are elsewhere.
template <int kTaps>
[[gnu::noinline]] bool find_cell(const Homography& map, const RowStart& row, int64_t u,
                                 const WarpSizes& sizes, Source& source, Cell<kTaps>& cell) {
  source = project(map.m, row, static_cast<double>(u));
  return locate(source, sizes, sizes.border, cell);
}

// n where x = kInt64 + n with an integer n below 2^51. Unlike a conversion, this can be vectorised
// everywhere.
constexpr double kInt64 = 0x1.8p52;

inline int64_t to_int64(double x) {
  constexpr int64_t kBits = 0x4338000000000000;  // of kInt64
  int64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits - kBits;
}

constexpr int64_t kTileWidth = 128, kTileHeight = 16;

// How far apart taps are, and the offset of the first pixel.
struct Strides {
  double y, x, first;

  Strides(int64_t y, int64_t x, int64_t origin)
      : y(static_cast<double>(y)),
        x(static_cast<double>(x)),
        first(kInt64 - static_cast<double>(origin)) {}
};

// What a run of pixels has to know of its taps: the offset of the one above and left of the source,
// and the weights of those on the right and below, which are how far away the source is, too.
template <class Real>
struct Taps {
  int64_t offset[kTileWidth];
  Real weight_x[kTileWidth], weight_y[kTileWidth];

  // Every eighth of a run's taps: nearly every line of the cache that it touches.
  template <class Pixel>
  void prefetch(const Pixel* plane, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; i += 8) __builtin_prefetch(plane + offset[i]);
  }

  template <bool kNearest>
  void put(int64_t i, const Source& source, const Strides& strides) {
    const double x = kNearest ? rint(source.x) : floor(source.x);
    const double y = kNearest ? rint(source.y) : floor(source.y);
    offset[i] = to_int64(fma(y, strides.y, fma(x, strides.x, strides.first)));
    if (kNearest) return;
    weight_x[i] = static_cast<Real>(source.x - x);
    weight_y[i] = static_cast<Real>(source.y - y);
  }

#ifdef __AVX512F__
  // The same for those of eight pixels that are kept.
  template <bool kNearest>
  void put(int64_t i, __mmask8 kept, __m512d x, __m512d y, const Strides& strides) {
    constexpr int kRounding =
        (kNearest ? _MM_FROUND_TO_NEAREST_INT : _MM_FROUND_TO_NEG_INF) | _MM_FROUND_NO_EXC;
    const auto all = [](double x) { return _mm512_set1_pd(x); };
    const __m512d whole_x = _mm512_maskz_roundscale_pd(0xff, x, kRounding),
                  whole_y = _mm512_maskz_roundscale_pd(0xff, y, kRounding);
    const __m512d sum = _mm512_fmadd_pd(
        whole_y, all(strides.y), _mm512_fmadd_pd(whole_x, all(strides.x), all(strides.first)));
    const __m512i integers =
        _mm512_sub_epi64(_mm512_castpd_si512(sum), _mm512_castpd_si512(all(kInt64)));
    _mm512_mask_storeu_epi64(offset + i, kept, integers);
    if (kNearest) return;
    store(weight_x + i, kept, _mm512_sub_pd(x, whole_x));
    store(weight_y + i, kept, _mm512_sub_pd(y, whole_y));
  }
#endif

  // For the `count` pixels from u on, which are all inside; their numbers are at [at] and on.
  template <bool kNearest>
  [[gnu::noinline]] void locate(const double* m, const RowStart& row, const Strides& strides,
                                int64_t u, int64_t at, int64_t count) {
    const double first = static_cast<double>(u);
#ifdef __AVX512F__
    Projection8 projection(m, row, first);
    for (int64_t i = 0; i < count; i += 8) {
      __m512d x, y, reciprocal;
      projection.next(x, y, reciprocal);
      put<kNearest>(at + i, first_lanes<__mmask8>(count - i), x, y, strides);
    }
#else
    for (int i = 0; i < static_cast<int>(count); ++i)
      put<kNearest>(at + i, project(m, row, first + i), strides);
#endif
  }
};

// The taps a b / c d of pixels that have all of them in the image: a b of all, and c d of all.
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

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors do not leave the unit
// Each number's fma: an expression a * b + c need not be one.
template <class Vector>
inline Vector multiply_add(const Vector& a, const Vector& b, const Vector& c) {
  Vector sum;
  for (size_t k = 0; k < sizeof a / sizeof a[0]; ++k) sum[k] = fma(a[k], b[k], c[k]);
  return sum;
}

// Four pixels of a row as numbers.
template <class Four, class Pixel>
inline Four read_four(const Pixel* from, int64_t stride) {
  Four four;
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

// The taps of pixels anywhere, for a border mode that repeats the image.
struct FoldedTaps {
  int64_t offset[4][kTileWidth];  // a b / c d, or the nearest alone
  double weight_x[kTileWidth], weight_y[kTileWidth];

  // False where one of the `count` pixels from u on, at most kTileWidth, has no source or one that
  // is very far away: they are left to locate().
  [[gnu::noinline]] bool locate(const double* m, const RowStart& row, const WarpSizes& sizes,
                                const int64_t* stride, int64_t u, int64_t count) {
    double x[kTileWidth], y[kTileWidth], second_x[kTileWidth], second_y[kTileWidth];
    const double first = static_cast<double>(u);
    const int n = static_cast<int>(count);
    int64_t far = 0;  // as wide as a double
    for (int i = 0; i < n; ++i) {
      const Source s = project(m, row, first + i);
      x[i] = s.x;
      y[i] = s.y;
      far |= fabs(s.x) < kFar && fabs(s.y) < kFar ? 0 : 1;
    }
    if (far) return false;
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
    const auto fold_all = [&](auto border) {
      const double n = static_cast<double>(size);
      const double after_last = decltype(border)::value == Border::kWrap ? 0 : n - 1;
      for (int i = 0; i < count; ++i) {
        double slope = 1;
        const double at = fold<true>(x[i], n, decltype(border)::value, slope), first = floor(at);
        second[i] = first + 1 < n ? first + 1 : after_last;
        weight[i] = at - first;
        x[i] = first;
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
