// CPU kernel of warp_perspective: the result.
#if defined(__AVX512VBMI__) && !defined(__clang__)
#include <immintrin.h>
#define WARP_WINDOWS
#endif
#include "memory.h"
#include "warp_perspective/warp_perspective_rows.h"

namespace calcops::ops::warp_perspective {
namespace {

template <class Pixel>
[[gnu::noinline]] void copy_pixels(const Pixel* from, const int64_t* offset, int64_t count,
                                   Pixel* out) {
  // Large pixels are first copied to the stack, so that the stores to the result are wide. A
  // processor can queue only a few stores that wait for a cache line.
  constexpr bool kWide = sizeof(Pixel) >= 4;
  Pixel pixels[kTileWidth], *to = kWide ? pixels : out;
  for (int64_t i = 0; i < count; ++i) to[i] = from[offset[i]];
  if (kWide) std::memcpy(out, pixels, count * sizeof(Pixel));
}

// Interpolate pixels from their taps.
template <class Pixel, class Weight>
[[gnu::noinline]] void blend(const Pairs<Pixel>& pairs, const Weight* weight_x,
                             const Weight* weight_y, int64_t count, Pixel* out) {
  using Real = Number<Pixel>;
  for (int64_t i = 0; i < count; ++i) {
    const Real tap[2][2] = {{Real(pairs.above[2 * i]), Real(pairs.above[2 * i + 1])},
                            {Real(pairs.below[2 * i]), Real(pairs.below[2 * i + 1])}};
    Real x[2], y[2];
    weights_of(static_cast<Real>(weight_x[i]), 0, x);
    weights_of(static_cast<Real>(weight_y[i]), 0, y);
    out[i] = to_pixel<Pixel>(sum_taps(tap, x, y));
  }
}

template <class Vector, class From>
inline Vector load(const From* from) {
  Vector to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

#ifdef WARP_WINDOWS
// A part of the image, three rows of kColumns pixels, with all taps of kPixels neighbouring pixels.
// A mild map has such a window. Whole registers of it are loaded, and permuted to the pixels' taps.
struct Window {
  static constexpr int64_t kPixels = 16, kRows = 3;
  typedef int32_t Ints __attribute__((vector_size(64)));
  Ints column, is_low;  // the upper left taps' columns, and -1 if they are in the second row

  int64_t base;
  bool has_all;

  // `columns` is the width of the window.
  template <class Pixel>
  Window(const Plane<Pixel>& plane, const int64_t* offset, int32_t columns) {
    // Between the first and the last pixel, the offset grows by a few columns and at most a row.
    const int64_t low = std::min(offset[0], offset[kPixels - 1]);
    const int64_t high = std::max(offset[0], offset[kPixels - 1]), pitch = plane.stride_y;
    base = high - low < columns ? low : std::min(low, high - pitch);
    has_all = plane.stride_x == 1 && base >= 0 && pitch >= 2 * columns && pitch < 1 << 30 &&
              high - base < 2 * pitch &&
              base + (kRows - 1) * pitch + columns <= (plane.height - 1) * pitch + plane.width;
    if (!has_all) return;
    typedef int64_t Longs __attribute__((vector_size(64)));
    typedef int32_t Half __attribute__((vector_size(32)));
    const auto eight = [&](const int64_t* from) {
      return __builtin_convertvector(load<Longs>(from) - base, Half);
    };
    const Ints moved = __builtin_shufflevector(eight(offset), eight(offset + 8), 0, 1, 2, 3, 4, 5,
                                               6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    is_low = moved >= static_cast<int32_t>(pitch);
    column = moved - (is_low & static_cast<int32_t>(pitch));
    const Ints is_wrong = (column < 0) | (column > columns - 2);
    has_all = _mm512_movepi32_mask((__m512i)is_wrong) == 0;
  }
};
#endif

// Interpolate float32 pixels with their taps in registers. Return false if this is not possible.
#if !__has_builtin(__builtin_shufflevector)  // GCC before 12
bool blend_vectors(const Plane<float>&, const Taps<float>&, int64_t, float*) { return false; }
#else
constexpr int64_t kLanes = 8;
typedef double Doubles2 __attribute__((vector_size(16)));
typedef float Floats4 __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));

// Load two pairs of neighbouring pixels. Loads of pairs are quicker than gathers, above all on
// Zen 4.
inline Floats4 two_pairs(const float* from, const int64_t* offset) {
  double a, b;
  std::memcpy(&a, from + offset[0], sizeof a);
  std::memcpy(&b, from + offset[1], sizeof b);
  return (Floats4)Doubles2{a, b};
}

// Load the pairs at offset[0], [1], [4] and [5].
inline Floats four_pairs(const float* from, const int64_t* offset) {
  return __builtin_shufflevector(two_pairs(from, offset), two_pairs(from, offset + 4),  //
                                 0, 1, 2, 3, 4, 5, 6, 7);
}

// Blend the pixels' taps: left and right pixels of the upper and of the lower row.
template <class Vector>
inline void blend_taps(const Vector (&upper)[2], const Vector (&lower)[2], const Taps<float>& taps,
                       int64_t i, float* out) {
  const auto x = load<Vector>(taps.weight_x + i), y = load<Vector>(taps.weight_y + i);
  const Vector zero = {};
  const auto along_x = [&](const Vector& left, const Vector& right) {
    return multiply_add(x, x > 0 ? right : zero, (1 - x) * left);
  };
  const Vector top = along_x(upper[0], upper[1]), bottom = along_x(lower[0], lower[1]);
  const Vector sum = multiply_add(y, y > 0 ? bottom : zero, (1 - y) * top);
  std::memcpy(out + i, &sum, sizeof sum);
}

bool blend_vectors(const Plane<float>& plane, const Taps<float>& taps, int64_t count, float* out) {
  if (plane.stride_x != 1 || count < kLanes) return false;
  int64_t done = 0;
#ifdef WARP_WINDOWS
  for (; done + Window::kPixels <= count; done += Window::kPixels) {
    const Window window(plane, taps.offset + done, 32);
    if (!window.has_all) break;
    typedef float Wide __attribute__((vector_size(64)));
    Wide rows[3][2];
    for (int r = 0; r < 3; ++r) {
      const float* from = plane.data + window.base + r * plane.stride_y;
      const Wide head = load<Wide>(from), tail = load<Wide>(from + 16);
      for (int k = 0; k < 2; ++k) rows[r][k] = __builtin_shuffle(head, tail, window.column + k);
    }
    const auto is_low = window.is_low;
    const Wide upper[2] = {is_low ? rows[1][0] : rows[0][0], is_low ? rows[1][1] : rows[0][1]};
    const Wide lower[2] = {is_low ? rows[2][0] : rows[1][0], is_low ? rows[2][1] : rows[1][1]};
    blend_taps(upper, lower, taps, done, out);
  }
#endif
  // The last block overlaps the one before it, so that it is full.
  for (int64_t end = done + kLanes; end < count + kLanes; end += kLanes) {
    const int64_t i = std::min(end, count) - kLanes;
    Floats rows[2][2];
    for (int r = 0; r < 2; ++r) {
      const float* from = plane.data + r * plane.stride_y;
      const Floats ab = four_pairs(from, taps.offset + i);
      const Floats cd = four_pairs(from, taps.offset + i + 2);
      rows[r][0] = __builtin_shufflevector(ab, cd, 0, 2, 8, 10, 4, 6, 12, 14);
      rows[r][1] = __builtin_shufflevector(ab, cd, 1, 3, 9, 11, 5, 7, 13, 15);
    }
    blend_taps(rows[0], rows[1], taps, i, out);
  }
  return true;
}
#endif

// Read the four taps of each pixel into the bytes of a word.
void read_words(const Plane<uint8_t>& plane, const int64_t* offset, int64_t count,
                uint32_t* words) {
#ifdef WARP_WINDOWS
  typedef uint8_t Bytes __attribute__((vector_size(64)));
  for (; count >= Window::kPixels; count -= Window::kPixels) {
    const Window window(plane, offset, 64);
    if (!window.has_all) break;
    const uint8_t* from = plane.data + window.base;
    // Bytes 0 to 63 are in the upper row, bytes 64 to 127 in the lower row.
    const auto order = (Bytes)(window.column * 0x01010101 + 0x41400100);
    const auto first = load<Bytes>(from), second = load<Bytes>(from + plane.stride_y);
    const auto third = load<Bytes>(from + 2 * plane.stride_y);
    const auto upper = (Window::Ints)__builtin_shuffle(first, second, order);
    const auto lower = (Window::Ints)__builtin_shuffle(second, third, order);
    const Window::Ints taps = window.is_low ? lower : upper;
    std::memcpy(words, &taps, sizeof taps);
    offset += Window::kPixels;
    words += Window::kPixels;
  }
#endif
  const auto read = [&](const auto& pair) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* from = plane.data + offset[i];
      words[i] = pair(from) | uint32_t(pair(from + plane.stride_y)) << 16;
    }
  };
  if (plane.stride_x == 1)
    read([](const uint8_t* from) {
      uint16_t two;
      std::memcpy(&two, from, sizeof two);
      return two;
    });
  else
    read([&](const uint8_t* from) -> uint16_t { return from[0] | from[plane.stride_x] << 8; });
}

// Compute uint8 pixels in float32. Return false if the rounding of float32 may have changed a
// pixel.
//
// Values are at most 255. So an error of 2^-25 in a weight makes an error of 2^-17, and each
// operation one of at most 2^-17. The sums of the upper and the lower pair are within 2^-16. Their
// difference, its weight and the last sum add 2^-17 each: 5 * 2^-17 together.
bool blend_quickly(const uint32_t* taps, const float* weight_x, const float* weight_y,
                   int64_t count, uint8_t* out) {
  constexpr float kSure = 0.5f - 6 * 0x1p-17f;
  int32_t doubts = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float x = weight_x[i], y = weight_y[i];
    const int32_t word = static_cast<int32_t>(taps[i]);
    const auto tap = [&](int k) { return static_cast<float>(word >> 8 * k & 255); };
    const float a = tap(0), b = tap(1), c = tap(2), d = tap(3);
    const float top = fma(x, b - a, a), bottom = fma(x, d - c, c), sum = fma(y, bottom - top, top);
    const float whole = rint(sum);
    doubts |= fabs(sum - whole) > kSure ? 1 : 0;
    out[i] = static_cast<uint8_t>(static_cast<int32_t>(whole));
  }
  return doubts == 0;
}

template <class Pixel, class Fraction>
[[gnu::noinline]] void blend_cubic(const Plane<Pixel>& plane, const int64_t* offset,
                                   const Fraction* fraction_x, const Fraction* fraction_y,
                                   int64_t count, Pixel* out) {
  using Real = Number<Pixel>;
  Real of_x[1][4][kTileWidth], of_y[1][4][kTileWidth], sums[1][kTileWidth];
  for (int64_t i = 0; i < count; ++i) {
    Real x[4], y[4];
    round_weights(fraction_x[i], 0, x);
    round_weights(fraction_y[i], 0, y);
    for (int k = 0; k < 4; ++k) {
      of_x[0][k][i] = x[k];
      of_y[0][k][i] = y[k];
    }
  }
  sum_cubic(plane, offset, count, of_x, of_y, sums);
  for (int64_t i = 0; i < count; ++i) out[i] = to_pixel<Pixel>(sums[0][i]);
}

// The result of one image of the batch. Weight is the type of the taps' weights.
template <class Pixel, class Weight>
struct Result {
  const WarpInputs<Pixel>& in;
  const Homography& map;
  int64_t n;
  Pixel* out;  // at [n, 0, 0, 0]
  const WarpSizes& sizes = in.sizes;

  // Pixels of a row that are inside. Their taps serve all channels.
  struct Run {
    const RowStart* row;
    int64_t v, begin, count;
    Taps<Weight> taps;
  };

  Plane<Pixel> plane(int64_t c) const { return make_plane(in, n, c, in.border_value[c]); }
  Pixel* pixels(int64_t c, int64_t v, int64_t u) const {
    return out + output_offset(sizes, 0, c, v) + u;
  }

  void fill(int64_t v, int64_t begin, int64_t end) const {
    if (sizes.border == Border::kTransparent) return;
    for (int64_t c = 0; c < sizes.channels; ++c)
      std::fill_n(pixels(c, v, begin), end - begin, plane(c).border);
  }

  // Compute pixels which a border mode maps back into the image.
  [[gnu::noinline]] void sample_folded(const FoldedTaps& taps, int64_t v, int64_t begin,
                                       int64_t count) const {
    for (int64_t c = 0; c < sizes.channels; ++c) {
      const Plane<Pixel> from = plane(c);
      Pairs<Pixel> pairs;
      if (sizes.interpolation == Interpolation::kNearest) {
        copy_pixels(from.data, taps.offset[0], count, pixels(c, v, begin));
        continue;
      }
      for (int64_t i = 0; i < count; ++i)
        for (int k = 0; k < 2; ++k) {
          pairs.above[2 * i + k] = from.data[taps.offset[k][i]];
          pairs.below[2 * i + k] = from.data[taps.offset[2 + k][i]];
        }
      blend(pairs, taps.weight_x, taps.weight_y, count, pixels(c, v, begin));
    }
  }

  // Compute pixels at the border or beyond it.
  template <int kTaps>
  [[gnu::noinline]] void sample_edge(const RowStart& row, int64_t v, int64_t begin,
                                     int64_t end) const {
    if (kTaps == 2 && sizes.border != Border::kConstant && sizes.border != Border::kTransparent) {
      FoldedTaps taps;
      if (taps.locate(map.m, row, sizes, in.image_stride, begin, end - begin))
        return sample_folded(taps, v, begin, end - begin);
    }
    for (int64_t u = begin; u < end; ++u) {
      Source source;
      Cell<kTaps> cell{};
      const bool has_source = find_cell(map, row, u, sizes, source, cell);
      if (!has_source && sizes.border == Border::kTransparent) continue;
      for (int64_t c = 0; c < sizes.channels; ++c)
        *pixels(c, v, u) = has_source ? sample(plane(c), cell) : plane(c).border;
    }
  }

  [[gnu::noinline]] void sample_linear(const Run& run, const Plane<Pixel>& from, Pixel* to) const {
    const int64_t count = run.count;
    Pairs<Pixel> pairs;
    if constexpr (std::is_same_v<Pixel, uint8_t>) {
      uint32_t words[kTileWidth];  // a pixel's taps a b c d, a byte each
      read_words(from, run.taps.offset, count, words);
      if (blend_quickly(words, run.taps.weight_x, run.taps.weight_y, count, to)) return;
      Taps<double> exact;
      exact.locate(map.m, *run.row, run.begin, count, false, {from.stride_y, from.stride_x, 0});
      pairs.read(from, exact.offset, count);
      blend(pairs, exact.weight_x, exact.weight_y, count, to);
    } else {
      if constexpr (std::is_same_v<Pixel, float>)
        if (blend_vectors(from, run.taps, count, to)) return;
      pairs.read(from, run.taps.offset, count);
      blend(pairs, run.taps.weight_x, run.taps.weight_y, count, to);
    }
  }

  void sample_inside(const Run& run, int64_t c, int64_t step) const {
    if (run.count == 0) return;
    const Plane<Pixel> from = plane(c);
    Pixel* to = pixels(c, run.v, run.begin);
    if (c + 1 < sizes.channels) run.taps.prefetch(plane(c + 1).data, run.count, step);
    // Cubic sums of uint8 have weights of float64, linear ones of float32.
    constexpr bool kByte = std::is_same_v<Pixel, uint8_t>;
    constexpr bool kIsCubic = kByte && std::is_same_v<Weight, double>;
    constexpr bool kIsLinear = kByte && !kIsCubic;
    if (sizes.interpolation == Interpolation::kNearest) {
      copy_pixels(from.data, run.taps.offset, run.count, to);
    } else if (sizes.interpolation == Interpolation::kLinear) {
      if constexpr (!kIsCubic) sample_linear(run, from, to);
    } else if constexpr (!kIsLinear) {
      blend_cubic(from, run.taps.offset, run.taps.weight_x, run.taps.weight_y, run.count, to);
    }
  }

  // Compute a strip of rows, tile by tile. The rows of a high tile read the same lines of a rotated
  // image. Where a line of the image serves a row of the tile, the taps of few rows stay in the
  // cache.
  void compute_strip(int64_t top) const {
    const std::vector<Row> rows = rows_of_strip(map, top, sizes);
    const int64_t height = static_cast<int64_t>(rows.size());
    const double u = static_cast<double>(sizes.out_width) / 2;
    const double rise = project(map.m, rows[0].start, u + 8).y - project(map.m, rows[0].start, u).y;
    const bool is_steep = !(fabs(rise) < 1);
    const int64_t tile = is_steep ? kTileHeight : kFlatHeight, step = is_steep ? 4 : 16;
    const Scratch<Run> runs(tile);
    for (int64_t first = 0; first < height; first += tile)
      for (int64_t left = 0; left < sizes.out_width; left += kTileWidth) {
        const int64_t end = std::min(first + tile, height);
        for (int64_t i = first; i < end; ++i)
          begin_row(rows[i], top + i, left, step, runs.get()[i - first]);
        for (int64_t c = 0; c < sizes.channels; ++c)
          for (int64_t i = first; i < end; ++i) sample_inside(runs.get()[i - first], c, step);
      }
  }

  // Compute the pixels of a row of a tile that are not inside, and locate the others.
  void begin_row(const Row& row, int64_t v, int64_t left, int64_t step, Run& run) const {
    run.count = 0;
    row.visit(
        left, std::min(left + kTileWidth, sizes.out_width),
        [&](int64_t begin, int64_t end) { fill(v, begin, end); },
        [&](int64_t begin, int64_t end) {
          if (sizes.interpolation == Interpolation::kCubic)
            sample_edge<4>(row.start, v, begin, end);
          else
            sample_edge<2>(row.start, v, begin, end);
        },
        [&](int64_t begin, int64_t end) {
          // A row with a horizon may have a second run in this tile.
          for (int64_t c = 0; c < sizes.channels; ++c) sample_inside(run, c, step);
          run.row = &row.start;
          run.v = v;
          run.begin = begin;
          run.count = end - begin;
          run.taps.locate(map.m, row.start, begin, run.count,
                          sizes.interpolation == Interpolation::kNearest,
                          {in.image_stride[2], in.image_stride[3], 0});
          run.taps.prefetch(plane(0).data, run.count, step);
        });
  }
};

}  // namespace

template <class Pixel>
void warp_perspective(const WarpInputs<Pixel>& in, const Pixel* destination, Pixel* out) {
  const WarpSizes& sizes = in.sizes;
  if (destination) std::copy_n(destination, output_offset(sizes, sizes.batch, 0, 0), out);
  const std::vector<Homography> maps = make_homographies(in);
  const int64_t strips = divide_up(sizes.out_height, kTileHeight), count = sizes.batch * strips;
  if (sizes.channels == 0 || sizes.out_width == 0) return;
  prefer_large_pages(out, output_offset(sizes, sizes.batch, 0, 0));
  const int64_t strip_pixels = kTileHeight * sizes.out_width * sizes.channels;
  for_each(count, divide_up(1 << 14, strip_pixels), [&](int64_t i) {
    const int64_t n = i / strips, top = i % strips * kTileHeight;
    // A linear sum over uint8 is computed in float32, and again in float64 where that is not exact
    // enough.
    using Real = Number<Pixel>;
    using Quick = std::conditional_t<std::is_same_v<Pixel, uint8_t>, float, Real>;
    const Homography& map = map_of(maps, n);
    Pixel* to = out + output_offset(sizes, n, 0, 0);
    if (std::is_same_v<Quick, Real> || sizes.interpolation == Interpolation::kCubic)
      Result<Pixel, Real>{in, map, n, to}.compute_strip(top);
    else
      Result<Pixel, Quick>{in, map, n, to}.compute_strip(top);
  });
}

template void warp_perspective(const WarpInputs<uint8_t>&, const uint8_t*, uint8_t*);
template void warp_perspective(const WarpInputs<uint16_t>&, const uint16_t*, uint16_t*);
template void warp_perspective(const WarpInputs<int16_t>&, const int16_t*, int16_t*);
template void warp_perspective(const WarpInputs<Float16>&, const Float16*, Float16*);
template void warp_perspective(const WarpInputs<BFloat16>&, const BFloat16*, BFloat16*);
template void warp_perspective(const WarpInputs<float>&, const float*, float*);
template void warp_perspective(const WarpInputs<double>&, const double*, double*);

}  // namespace calcops::ops::warp_perspective
#undef WARP_WINDOWS
