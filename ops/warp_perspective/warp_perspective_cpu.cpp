// CPU kernel of warp_perspective: the result.
#include <calcops/memory.h>

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

// The sources of the pixels of a row that are inside. At a distance d from the first of them,
//
//   x = x(0) + slope_x * d / (1 + bend * d)
//
// because X(d) - x(0) * W(d) is linear in d and 0 at d = 0. This has half the operations of
// project(), and errors of some ulps. So it serves weights of float32 alone.
struct Path {
  int64_t begin;
  double x, y, slope_x, slope_y, bend;
  bool is_accurate;

  Path(const double* m, const Row& row, const WarpSizes& sizes, const Strides& strides)
      : begin(row.inside.begin) {
    const Source first = project(m, row.start, static_cast<double>(begin));
    const double reciprocal = 1 / first.w;
    x = first.x;
    y = first.y;
    slope_x = fma(-x, m[6], m[0]) * reciprocal;
    slope_y = fma(-y, m[6], m[3]) * reciprocal;
    bend = m[6] * reciprocal;
    // Near the horizon, errors grow with the ratio of W at both ends. Otherwise they are less than
    // 2^-33 in an image of 2^15 x 2^15 pixels.
    const double count = static_cast<double>(row.inside.end - begin);
    const double ratio = fma(bend, count, 1.0), last = (count - 1) / fma(bend, count - 1, 1.0);
    is_accurate = ratio > 0.25 && ratio < 4 && fabs(slope_x) + fabs(slope_y) < kFar &&
                  std::max(sizes.height, sizes.width) <= 1 << 15 &&
                  strides.x + strides.y < 1 << 29 &&
                  is_within(x, fma(last, slope_x, x), sizes.width) &&
                  is_within(y, fma(last, slope_y, y), sizes.height);
  }

  // Return true if errors and the rounding of locate() keep the taps of a row in the image. The
  // coordinates of a row are between those of its ends.
  static bool is_within(double first, double last, int64_t size) {
    return std::min(first, last) >= 0x1p-30 &&
           std::max(first, last) <= static_cast<double>(size - 1) - 0x1p-30;
  }

  // Find the taps of the `count` pixels from u on. Adding kFixed rounds a coordinate to a multiple
  // of 2^-32, so that pixel centres remain pixel centres. The low 32 bits are then the fraction.
  [[gnu::noinline]] void locate(int64_t u, int64_t count, const Strides& strides,
                                Taps<float>& taps) const {
    constexpr double kFixed = 0x1.8p20;
    const auto whole = [](double position) {
      return bits_of<double>(bits_of<int64_t>(position) & ~int64_t{0xffffffff});
    };
    const double first_x = x + kFixed, first_y = y + kFixed;
    const double first_offset = strides.first - kFixed * (strides.x + strides.y);
    const double first_d = static_cast<double>(u - begin);
    const int n = static_cast<int>(count), half = (n + 1) / 2;
    // Two pixels share a division, which takes as long as all else. They have a loop of their own,
    // because a processor's scheduler holds few operations that wait for a division.
    double quotient[kTileWidth];
    for (int i = 0; i < half; ++i) {
      const double d = first_d + i, e = d + half;
      const double a = fma(bend, d, 1.0), b = fma(bend, e, 1.0), reciprocal = 1 / (a * b);
      quotient[i] = d * b * reciprocal;
      quotient[half + i] = e * a * reciprocal;
    }
    for (int i = 0; i < n; ++i) {
      const double at_x = fma(quotient[i], slope_x, first_x), whole_x = whole(at_x);
      const double at_y = fma(quotient[i], slope_y, first_y), whole_y = whole(at_y);
      taps.offset[i] = to_int64(fma(whole_y, strides.y, fma(whole_x, strides.x, first_offset)));
      taps.weight_x[i] = static_cast<float>(at_x - whole_x);
      taps.weight_y[i] = static_cast<float>(at_y - whole_y);
    }
  }
};

// Write the weighted sums of pixels' taps. `above` has the upper two taps of each pixel.
template <class Real>
[[gnu::noinline]] void sum_pairs(const Real* above, const Real* below, const Real* weight_x,
                                 const Real* weight_y, int64_t count, Real* sums) {
  for (int64_t i = 0; i < count; ++i) {
    const Real tap[2][2] = {{above[2 * i], above[2 * i + 1]}, {below[2 * i], below[2 * i + 1]}};
    Real x[2], y[2];
    weights_of(weight_x[i], 0, x);
    weights_of(weight_y[i], 0, y);
    sums[i] = sum_taps(tap, x, y);
  }
}

template <class Pixel, class Real>
[[gnu::noinline]] void convert(const Pixel* from, int64_t count, Real* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = Real(from[i]);
}

// Interpolate pixels from their taps.
template <class Pixel, class Real = Number<Pixel>>
[[gnu::noinline]] void blend(const Pairs<Pixel>& pairs, const Real* weight_x, const Real* weight_y,
                             int64_t count, Pixel* out) {
  if constexpr (std::is_same_v<Pixel, Real>) {
    sum_pairs(pairs.above, pairs.below, weight_x, weight_y, count, out);
  } else {
    Real above[2 * kTileWidth], below[2 * kTileWidth], sums[kTileWidth];
    convert(pairs.above, 2 * count, above);
    convert(pairs.below, 2 * count, below);
    sum_pairs(above, below, weight_x, weight_y, count, sums);
    for (int64_t i = 0; i < count; ++i) out[i] = to_pixel<Pixel>(sums[i]);
  }
}

template <class Vector, class From>
inline Vector load(const From* from) {
  Vector to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

// Interpolate float32 pixels with their taps in registers. Return false if this is not possible.
#if !__has_builtin(__builtin_shufflevector)  // GCC before 12
bool blend_vectors(const Plane<float>&, const Taps<float>&, int64_t, float*) { return false; }
#else
constexpr int64_t kLanes = 8;
typedef double Pairs4 __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));

bool blend_vectors(const Plane<float>& plane, const Taps<float>& taps, int64_t count, float* out) {
  if (plane.stride_x != 1 || count < kLanes) return false;
  const float* const lines[2] = {plane.data, plane.data + plane.stride_y};
  // The last block overlaps the one before it, so that it is full.
  for (int64_t end = kLanes; end < count + kLanes; end += kLanes) {
    const int64_t i = std::min(end, count) - kLanes;
    const int64_t* offset = taps.offset + i;
    Floats rows[2][2];  // the left and the right taps of the upper and of the lower row
    for (int r = 0; r < 2; ++r) {
      // Loads of pairs of pixels are quicker than gathers, above all on Zen 4.
      const auto pair = [&](int k) { return load<double>(lines[r] + offset[k]); };
      const auto ab = (Floats)Pairs4{pair(0), pair(1), pair(4), pair(5)};
      const auto cd = (Floats)Pairs4{pair(2), pair(3), pair(6), pair(7)};
      rows[r][0] = __builtin_shufflevector(ab, cd, 0, 2, 8, 10, 4, 6, 12, 14);
      rows[r][1] = __builtin_shufflevector(ab, cd, 1, 3, 9, 11, 5, 7, 13, 15);
    }
    const auto x = load<Floats>(taps.weight_x + i), y = load<Floats>(taps.weight_y + i);
    const Floats zero = {};
    const auto along_x = [&](const Floats& left, const Floats& right) {
      return multiply_add(x, x > 0 ? right : zero, (1 - x) * left);
    };
    const Floats top = along_x(rows[0][0], rows[0][1]), bottom = along_x(rows[1][0], rows[1][1]);
    const Floats sum = multiply_add(y, y > 0 ? bottom : zero, (1 - y) * top);
    std::memcpy(out + i, &sum, sizeof sum);
  }
  return true;
}
#endif

// Read the taps a b c d of each pixel into the bytes of a word, four pixels at a time.
void read_words(const Plane<uint8_t>& plane, const int64_t* offset, int64_t count,
                uint32_t* words) {
  // Inserted into a register, pairs need neither shifts nor a store each.
  typedef uint16_t Pairs8 __attribute__((vector_size(16)));
  const auto read = [&](const auto& pair) {
    for (int64_t i = 0; i < count; i += 4) {
      Pairs8 pairs = {};
#pragma GCC unroll 4
      for (int64_t k = 0; k < 4; ++k) {
        const uint8_t* from = plane.data + offset[i + k];
        pairs[2 * k] = pair(from);
        pairs[2 * k + 1] = pair(from + plane.stride_y);
      }
      std::memcpy(words + i, &pairs, sizeof pairs);
    }
  };
  if (plane.stride_x == 1)
    read([](const uint8_t* from) { return load<uint16_t>(from); });
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
  constexpr float kInt32 = 0x1.8p23f;  // rounds a number to an integer, which is in the low bits
  int32_t worst = 0;                   // the largest distance from an integer, as bits
  for (int64_t i = 0; i < count; ++i) {
    const float x = weight_x[i], y = weight_y[i];
    const int32_t word = static_cast<int32_t>(taps[i]);
    const auto tap = [&](int k) { return static_cast<float>(word >> 8 * k & 255); };
    const float a = tap(0), b = tap(1), c = tap(2), d = tap(3);
    const float top = fma(x, b - a, a), bottom = fma(x, d - c, c), sum = fma(y, bottom - top, top);
    const float whole = sum + kInt32;
    worst = std::max(worst, bits_of<int32_t>(fabs(sum - (whole - kInt32))));
    out[i] = static_cast<uint8_t>(bits_of<int32_t>(whole));
  }
  return worst <= bits_of<int32_t>(kSure);
}

template <class Pixel, class Real = Number<Pixel>>
[[gnu::noinline]] void blend_cubic(const Plane<Pixel>& plane, const int64_t* offset,
                                   const Real* fraction_x, const Real* fraction_y, int64_t count,
                                   Pixel* out) {
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

// Return sum_taps(). Not inlined, so that it is compiled for each Number, not for each Pixel.
template <int kTaps, class Real>
[[gnu::noinline]] Real sum_of_pixel(const Real (&tap)[kTaps][kTaps], const Real (&x)[kTaps],
                                    const Real (&y)[kTaps]) {
  return sum_taps(tap, x, y);
}

// The result of one image of the batch. Weight is the type of the taps' weights.
template <class Pixel, class Weight>
struct Result {
  const WarpInputs<Pixel>& in;
  const Homography& map;
  int64_t n;
  Pixel* out;  // at [n, 0, 0, 0]
  const WarpSizes& sizes = in.sizes;
  const Strides strides{in.image_stride[2], in.image_stride[3], 0};

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
    Number<Pixel> weight_x[kTileWidth], weight_y[kTileWidth];
    if (sizes.interpolation != Interpolation::kNearest) {
      std::copy_n(taps.weight_x, count, weight_x);
      std::copy_n(taps.weight_y, count, weight_y);
    }
    for (int64_t c = 0; c < sizes.channels; ++c) {
      const Plane<Pixel> from = plane(c);
      if (sizes.interpolation == Interpolation::kNearest) {
        copy_pixels(from.data, taps.offset[0], count, pixels(c, v, begin));
        continue;
      }
      Pairs<Pixel> pairs;
      for (int64_t i = 0; i < count; ++i)
        for (int k = 0; k < 2; ++k) {
          pairs.above[2 * i + k] = from.data[taps.offset[k][i]];
          pairs.below[2 * i + k] = from.data[taps.offset[2 + k][i]];
        }
      blend(pairs, weight_x, weight_y, count, pixels(c, v, begin));
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
      if (!find_cell(map, row, u, sizes, source, cell)) {
        fill(v, u, u + 1);
        continue;
      }
      Number<Pixel> x[kTaps], y[kTaps], tap[kTaps][kTaps];
      round_weights(cell.x.fraction, 0, x);
      round_weights(cell.y.fraction, 0, y);
      for (int64_t c = 0; c < sizes.channels; ++c) {
        read_taps(plane(c), cell, tap);
        *pixels(c, v, u) = to_pixel<Pixel>(sum_of_pixel(tap, x, y));
      }
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
      exact.locate(map.m, *run.row, run.begin, count, false, strides);
      pairs.read(from, exact.offset, count);
      blend(pairs, exact.weight_x, exact.weight_y, count, to);
    } else {
      if constexpr (std::is_same_v<Pixel, float>)
        if (blend_vectors(from, run.taps, count, to)) return;
      pairs.read(from, run.taps.offset, count);
      blend(pairs, run.taps.weight_x, run.taps.weight_y, count, to);
    }
  }

  void sample_inside(const Run& run, int64_t c, bool is_steep) const {
    if (run.count == 0) return;
    const Plane<Pixel> from = plane(c);
    Pixel* to = pixels(c, run.v, run.begin);
    if (c + 1 < sizes.channels) run.taps.prefetch(plane(c + 1), run.count, is_steep);
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
    std::vector<Path> paths;
    for (const Row& row : rows) paths.emplace_back(map.m, row, sizes, strides);
    const int64_t height = static_cast<int64_t>(rows.size());
    const double u = static_cast<double>(sizes.out_width) / 2;
    const double rise = project(map.m, rows[0].start, u + 8).y - project(map.m, rows[0].start, u).y;
    const bool is_steep = !(fabs(rise) < 1);
    const int64_t tile = is_steep ? kTileHeight : kFlatHeight;
    const Scratch<Run> runs(tile);
    for (int64_t first = 0; first < height; first += tile)
      for (int64_t left = 0; left < sizes.out_width; left += kTileWidth) {
        const int64_t end = std::min(first + tile, height);
        for (int64_t i = first; i < end; ++i)
          begin_row(rows[i], paths[i], top + i, left, is_steep, runs.get()[i - first]);
        for (int64_t c = 0; c < sizes.channels; ++c)
          for (int64_t i = first; i < end; ++i) sample_inside(runs.get()[i - first], c, is_steep);
      }
  }

  // Compute the pixels of a row of a tile that are not inside, and locate the others.
  void begin_row(const Row& row, const Path& path, int64_t v, int64_t left, bool is_steep,
                 Run& run) const {
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
          for (int64_t c = 0; c < sizes.channels; ++c) sample_inside(run, c, is_steep);
          run.row = &row.start;
          run.v = v;
          run.begin = begin;
          run.count = end - begin;
          const bool is_quick = sizes.interpolation == Interpolation::kLinear && path.is_accurate;
          if constexpr (std::is_same_v<Weight, float>)
            if (is_quick) path.locate(begin, run.count, strides, run.taps);
          if (!is_quick || !std::is_same_v<Weight, float>)
            run.taps.locate(map.m, row.start, begin, run.count,
                            sizes.interpolation == Interpolation::kNearest, strides);
          // read_words() reads whole blocks.
          std::fill_n(run.taps.offset + run.count, -run.count & 3, run.taps.offset[run.count - 1]);
          run.taps.prefetch(plane(0), run.count, is_steep);
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
