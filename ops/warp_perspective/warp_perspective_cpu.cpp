// CPU kernels of warp_perspective: the result, and its cells.
#include "memory.h"
#include "warp_perspective/warp_perspective_rows.h"

namespace calcops::ops::warp_perspective {
namespace {

// A tile of the destination. If the map rotates the image, the rows of a tile read the same lines
// of the image, which are then in the cache. The taps are located once for all channels.
template <class Pixel>
struct Tile {
  const WarpInputs<Pixel>& in;
  const Homography& map;
  int64_t n;            // which image of the batch
  int64_t top, bottom;  // its rows
  Pixel* out;           // the result at [n, 0, 0, 0]
  RowStart rows[kTileHeight];
  Cut cuts[kTileHeight];

  Tile(const WarpInputs<Pixel>& in, const Homography& map, int64_t n, int64_t top, int64_t bottom,
       Pixel* out)
      : in(in), map(map), n(n), top(top), bottom(bottom), out(out) {}
};

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
    const Real x = static_cast<Real>(weight_x[i]), y = static_cast<Real>(weight_y[i]), zero = 0;
    const Real a = pairs.above[2 * i], c = pairs.below[2 * i];
    const Real b = pairs.above[2 * i + 1], d = pairs.below[2 * i + 1];
    out[i] = to_pixel<Pixel>(
        interpolate(a, x > 0 ? b : zero, y > 0 ? c : zero, ((x > 0) & (y > 0)) ? d : zero, x, y));
  }
}

// Compute pixels which a border mode maps back into the image.
template <class Pixel>
[[gnu::noinline]] void sample_folded(const Tile<Pixel>& tile, const FoldedTaps& taps, int64_t v,
                                     int64_t begin, int64_t end) {
  const WarpSizes& sizes = tile.in.sizes;
  for (int64_t c = 0; c < sizes.channels; ++c) {
    const Plane<Pixel> plane = make_plane(tile.in, tile.n, c, tile.in.border_value[c]);
    Pixel* out = tile.out + output_offset(sizes, 0, c, v) + begin;
    if (sizes.interpolation == Interpolation::kNearest) {
      copy_pixels(plane.data, taps.offset[0], end - begin, out);
      continue;
    }
    Pairs<Pixel> pairs;
    for (int64_t i = 0; i < end - begin; ++i)
      for (int k = 0; k < 2; ++k) {
        pairs.above[2 * i + k] = plane.data[taps.offset[k][i]];
        pairs.below[2 * i + k] = plane.data[taps.offset[2 + k][i]];
      }
    blend(pairs, taps.weight_x, taps.weight_y, end - begin, out);
  }
}

// Compute pixels at the border or beyond it.
template <int kTaps, class Pixel>
[[gnu::noinline]] void sample_edge(const Tile<Pixel>& tile, int64_t v, int64_t begin, int64_t end) {
  const WarpSizes& sizes = tile.in.sizes;
  const RowStart& row = tile.rows[v - tile.top];
  if (kTaps == 2 && sizes.border != Border::kConstant && sizes.border != Border::kTransparent) {
    FoldedTaps taps;
    if (taps.locate(tile.map.m, row, sizes, tile.in.image_stride, begin, end - begin)) {
      sample_folded(tile, taps, v, begin, end);
      return;
    }
  }
  for (int64_t u = begin; u < end; ++u) {
    Source source;
    Cell<kTaps> cell{};
    const bool has_source = find_cell(tile.map, row, u, sizes, source, cell);
    if (!has_source && sizes.border == Border::kTransparent) continue;
    for (int64_t c = 0; c < sizes.channels; ++c) {
      const Plane<Pixel> plane = make_plane(tile.in, tile.n, c, tile.in.border_value[c]);
      tile.out[output_offset(sizes, 0, c, v) + u] = has_source ? sample(plane, cell) : plane.border;
    }
  }
}

// GCC 12 and clang have these shuffles. Older compilers use Pairs and blend().
#if __has_builtin(__builtin_shufflevector)
typedef double Doubles2 __attribute__((vector_size(16)));
typedef float Floats4 __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(32)));
constexpr int64_t kLanes = 8;

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

inline Floats load(const float* from) {
  Floats to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

// The same as Pairs and blend(), for the kLanes pixels from index i on, whose taps stay in
// registers.
inline void blend_lanes(const Plane<float>& plane, const Taps<float>& taps, int64_t i, float* out) {
  const Floats x = load(taps.weight_x + i), y = load(taps.weight_y + i), zero = {};
  const auto along_x = [&](const float* from) {
    const Floats ab = four_pairs(from, taps.offset + i), cd = four_pairs(from, taps.offset + i + 2);
    const Floats left = __builtin_shufflevector(ab, cd, 0, 2, 8, 10, 4, 6, 12, 14);
    const Floats right = __builtin_shufflevector(ab, cd, 1, 3, 9, 11, 5, 7, 13, 15);
    return multiply_add(x, x > 0 ? right : zero, (1 - x) * left);
  };
  const Floats top = along_x(plane.data), bottom = along_x(plane.data + plane.stride_y);
  const Floats sum = multiply_add(y, y > 0 ? bottom : zero, (1 - y) * top);
  std::memcpy(out, &sum, sizeof sum);
}
#endif

// Read the four taps of each pixel into the bytes of a word.
void read_words(const Plane<uint8_t>& plane, const int64_t* offset, int64_t count,
                uint32_t* words) {
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
    round_weights(fraction_x[i], x);
    round_weights(fraction_y[i], y);
    for (int k = 0; k < 4; ++k) {
      of_x[0][k][i] = x[k];
      of_y[0][k][i] = y[k];
    }
  }
  sum_cubic(plane, offset, count, of_x, of_y, sums);
  for (int64_t i = 0; i < count; ++i) out[i] = to_pixel<Pixel>(sums[0][i]);
}

// Interpolate the `count` pixels from `begin` on, which are inside. Their taps begin at index `at`.
template <class Pixel, class Weight>
[[gnu::noinline]] void sample_linear(const Tile<Pixel>& tile, const Taps<Weight>& taps,
                                     const Plane<Pixel>& plane, int64_t v, int64_t begin,
                                     int64_t at, int64_t count, Pixel* out) {
  if constexpr (std::is_same_v<Pixel, float>) {
#if __has_builtin(__builtin_shufflevector)
    if (plane.stride_x == 1 && count >= kLanes) {
      // The last block overlaps the one before it, so that it is full.
      for (int64_t end = kLanes; end < count + kLanes; end += kLanes) {
        const int64_t i = std::min(end, count) - kLanes;
        blend_lanes(plane, taps, at + i, out + i);
      }
      return;
    }
#endif
  }
  if constexpr (!std::is_same_v<Pixel, uint8_t>) {
    Pairs<Pixel> pairs;
    pairs.read(plane, taps.offset + at, count);
    blend(pairs, taps.weight_x + at, taps.weight_y + at, count, out);
  } else {
    uint32_t words[kTileWidth];  // a pixel's taps a b c d, a byte each
    read_words(plane, taps.offset + at, count, words);
    if (blend_quickly(words, taps.weight_x + at, taps.weight_y + at, count, out)) return;
    Taps<double> exact;
    Pairs<Pixel> pairs;
    Sources sources;
    sources.locate(tile.map.m, tile.rows[v - tile.top], begin, count);
    exact.locate(sources, false, {plane.stride_y, plane.stride_x, 0}, 0, count);
    pairs.read(plane, exact.offset, count);
    blend(pairs, exact.weight_x, exact.weight_y, count, out);
  }
}

// Compute a tile. The interpolation is not a template argument, because it is tested only once for
// each run of pixels.
template <class Weight, class Pixel>
void forward_rows(Tile<Pixel>&& tile) {
  Sources sources;
  Taps<Weight> taps_of_rows[kTileHeight];
  const WarpSizes& sizes = tile.in.sizes;
  const bool is_nearest = sizes.interpolation == Interpolation::kNearest;
  const bool is_cubic = sizes.interpolation == Interpolation::kCubic;
  const int64_t* stride = tile.in.image_stride;
  for (int64_t v = tile.top; v < tile.bottom; ++v) {
    const int64_t i = v - tile.top;
    tile.rows[i] = row_of(tile.map.m, static_cast<double>(v));
    tile.cuts[i] = cut_row(tile.map, tile.rows[i], sizes);
  }
  const Pixel* first = make_plane(tile.in, tile.n, 0, 0).data;
  for (int64_t left = 0; left < sizes.out_width; left += kTileWidth) {
    const int64_t right = std::min(left + kTileWidth, sizes.out_width);
    for (int64_t v = tile.top; v < tile.bottom; ++v) {
      const int64_t i = v - tile.top;
      tile.cuts[i].visit(left, right, [&](Part part, int64_t begin, int64_t end) {
        if (part == Part::kEdge)
          is_cubic ? sample_edge<4>(tile, v, begin, end) : sample_edge<2>(tile, v, begin, end);
        if (part != Part::kInside) return;
        Taps<Weight>& taps = taps_of_rows[i];
        const Strides strides(stride[2], stride[3], 0);
        const int64_t at = begin - left, count = end - begin;
        sources.locate(tile.map.m, tile.rows[i], begin, count);
        taps.locate(sources, is_nearest, strides, at, count);
        // The first channel is read when all rows of the tile are located.
        taps.prefetch(first, begin - left, end - left);
      });
    }
    for (int64_t c = 0; c < sizes.channels; ++c) {
      const Plane<Pixel> plane = make_plane(tile.in, tile.n, c, tile.in.border_value[c]);
      for (int64_t v = tile.top; v < tile.bottom; ++v) {
        Pixel* out = tile.out + output_offset(sizes, 0, c, v);
        tile.cuts[v - tile.top].visit(left, right, [&](Part part, int64_t begin, int64_t end) {
          if (part == Part::kOutside && sizes.border != Border::kTransparent)
            std::fill(out + begin, out + end, plane.border);
          if (part != Part::kInside) return;
          const int64_t at = begin - left, count = end - begin;
          const Taps<Weight>& taps = taps_of_rows[v - tile.top];
          if (c + 1 < sizes.channels) taps.prefetch(plane.data + stride[1], at, at + count);
          // uint8 has weights of float64 for a cubic sum, and of float32 for a linear one.
          constexpr bool kByte = std::is_same_v<Pixel, uint8_t>;
          constexpr bool kQuick = kByte && std::is_same_v<Weight, float>;
          if (is_nearest) {
            copy_pixels(plane.data, taps.offset + at, count, out + begin);
          } else if (is_cubic) {
            if constexpr (!kQuick)
              blend_cubic(plane, taps.offset + at, taps.weight_x + at, taps.weight_y + at, count,
                          out + begin);
          } else {
            if constexpr (kQuick || !kByte)
              sample_linear(tile, taps, plane, v, begin, at, count, out + begin);
          }
        });
      }
    }
  }
}

}  // namespace

template <class Pixel>
void warp_perspective_cpu(const WarpInputs<Pixel>& in, Pixel* out) {
  const WarpSizes& sizes = in.sizes;
  const std::vector<Homography> maps = make_homographies(in);
  const int64_t strips = divide_up(sizes.out_height, kTileHeight), count = sizes.batch * strips;
  if (sizes.channels == 0 || sizes.out_width == 0) return;
  prefer_large_pages(out, output_offset(sizes, sizes.batch, 0, 0));
  const int64_t strip_pixels = kTileHeight * sizes.out_width * sizes.channels;
  for_each(count, divide_up(1 << 14, strip_pixels), [&](int64_t i) {
    const int64_t n = i / strips, top = i % strips * kTileHeight;
    const int64_t bottom = std::min(top + kTileHeight, sizes.out_height);
    // A linear sum over uint8 is computed in float32, and again in float64 where that is not exact
    // enough.
    using Real = Number<Pixel>;
    using Quick = std::conditional_t<std::is_same_v<Pixel, uint8_t>, float, Real>;
    const Homography& map = map_of(maps, n);
    Pixel* to = out + output_offset(sizes, n, 0, 0);
    if (std::is_same_v<Quick, Real> || sizes.interpolation == Interpolation::kCubic)
      forward_rows<Real>(Tile<Pixel>(in, map, n, top, bottom, to));
    else
      forward_rows<Quick>(Tile<Pixel>(in, map, n, top, bottom, to));
  });
}

void warp_perspective_cells_cpu(const WarpSizes& sizes, const double* warp, double* cells,
                                double* scale) {
  const int64_t pixels = sizes.out_height * sizes.out_width;
  const auto store = sizes.interpolation == Interpolation::kCubic ? store_cell<4> : store_cell<2>;
  for (int64_t i = 0; i < sizes.warp_batch; ++i) {
    const Homography map = make_homography(warp + 9 * i, sizes.inverse_map);
    scale[i] = map.valid ? map.scale : 0;
    parallel_for(pixels, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p)
        store(map, sizes, p % sizes.out_width, p / sizes.out_width, pixels,
              cells + i * cell_numbers(sizes.interpolation) * pixels + p);
    });
  }
}

template void warp_perspective_cpu(const WarpInputs<uint8_t>&, uint8_t*);
template void warp_perspective_cpu(const WarpInputs<uint16_t>&, uint16_t*);
template void warp_perspective_cpu(const WarpInputs<int16_t>&, int16_t*);
template void warp_perspective_cpu(const WarpInputs<Float16>&, Float16*);
template void warp_perspective_cpu(const WarpInputs<BFloat16>&, BFloat16*);
template void warp_perspective_cpu(const WarpInputs<float>&, float*);
template void warp_perspective_cpu(const WarpInputs<double>&, double*);

}  // namespace calcops::ops::warp_perspective
