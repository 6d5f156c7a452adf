// CPU kernels of warp_perspective: the result, and its cells.
#include "memory.h"
#include "warp_perspective/warp_perspective_rows.h"

namespace calcops {
namespace {

// The destination is computed in tiles: a map that turns the image finds its source lines in the
// cache again, and what the first channel learns serves them all.
template <class Pixel>
struct Tile {
  // uint8 is summed in float32, and again in float64 where that leaves a doubt.
  using Weight = std::conditional_t<std::is_same_v<Pixel, uint8_t>, float, Number<Pixel>>;
  const WarpInputs<Pixel>& in;
  const Homography& map;
  int64_t n, top, bottom;  // of the image, and its rows
  Pixel* out;              // that of [n, 0, 0, 0]
  Row rows[kTileHeight];
  Cut cuts[kTileHeight];
  Taps<Weight> taps[kTileHeight];

  Tile(const WarpInputs<Pixel>& in, const Homography& map, int64_t n, int64_t top, int64_t bottom,
       Pixel* out)
      : in(in), map(map), n(n), top(top), bottom(bottom), out(out) {}
};

// Pixels which a border mode maps back into the image.
template <class Pixel>
void sample_folded(const Tile<Pixel>& tile, const FoldedTaps& taps, int64_t v, int64_t begin,
                   int64_t end) {
  using Real = Number<Pixel>;
  const WarpSizes& sizes = tile.in.sizes;
  for (int64_t c = 0; c < sizes.channels; ++c) {
    const Plane<Pixel> plane = make_plane(tile.in, tile.n, c, tile.in.border_value[c]);
    Pixel* out = tile.out + output_offset(sizes, 0, c, v) + begin;
    Pixel tap[4][kTileWidth];
    for (int64_t i = 0; i < end - begin; ++i)
      for (int k = 0; k < 4; ++k) tap[k][i] = plane.data[taps.offset[k][i]];
    for (int64_t i = 0; i < end - begin; ++i) {
      const Real x = static_cast<Real>(taps.weight_x[i]), y = static_cast<Real>(taps.weight_y[i]);
      const Real a = tap[0][i], b = tap[1][i], c = tap[2][i], d = tap[3][i], zero = 0;
      out[i] = to_pixel<Pixel>(
          interpolate(a, x > 0 ? b : zero, y > 0 ? c : zero, ((x > 0) & (y > 0)) ? d : zero, x, y));
    }
  }
}

// Pixels at the border, or beyond it.
template <class Pixel>
void sample_edge(const Tile<Pixel>& tile, int64_t v, int64_t begin, int64_t end) {
  const WarpSizes& sizes = tile.in.sizes;
  FoldedTaps taps;
  if (sizes.border != Border::kConstant && taps.locate(tile.map.m, tile.rows[v - tile.top], sizes,
                                                       tile.in.image_stride, begin, end - begin)) {
    sample_folded(tile, taps, v, begin, end);
    return;
  }
  for (int64_t u = begin; u < end; ++u) {
    Source source;
    Cell cell{};
    const bool found = find_cell(tile.map, tile.rows[v - tile.top], u, sizes, source, cell);
    for (int64_t c = 0; c < sizes.channels; ++c) {
      const Plane<Pixel> plane = make_plane(tile.in, tile.n, c, tile.in.border_value[c]);
      tile.out[output_offset(sizes, 0, c, v) + u] = found ? sample(plane, cell) : plane.border;
    }
  }
}

template <class Pixel, class Real>
void blend(const Pairs<Pixel>& pairs, const Real* weight_x, const Real* weight_y, int64_t count,
           Pixel* out) {
  for (int64_t i = 0; i < count; ++i) {
    const Real x = weight_x[i], y = weight_y[i], zero = 0;
    const Real a = pairs.above[2 * i], c = pairs.below[2 * i];
    const Real b = pairs.above[2 * i + 1], d = pairs.below[2 * i + 1];
    out[i] = to_pixel<Pixel>(
        interpolate(a, x > 0 ? b : zero, y > 0 ? c : zero, ((x > 0) & (y > 0)) ? d : zero, x, y));
  }
}

#if __has_builtin(__builtin_shufflevector)  // GCC 12 and clang; without it Pairs and blend do it
                                            // all
#pragma GCC diagnostic ignored "-Wpsabi"    // these vectors do not leave the unit
typedef double Doubles2 __attribute__((vector_size(16)));
typedef float Floats4 __attribute__((vector_size(16)));
typedef float Floats8 __attribute__((vector_size(32)));

// Two pairs of neighbours.
inline Floats4 two_pairs(const float* p, const float* q) {
  double a, b;
  std::memcpy(&a, p, sizeof a);
  std::memcpy(&b, q, sizeof b);
  return (Floats4)Doubles2{a, b};
}

template <class Vector>
Vector load(const float* from) {
  Vector to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

// Each number's fma: an expression a * b + c need not be one.
inline Floats8 multiply_add(Floats8 a, Floats8 b, Floats8 c) {
  Floats8 sum;
  for (int k = 0; k < 8; ++k) sum[k] = fma(a[k], b[k], c[k]);
  return sum;
}

// What Pairs and blend do, for eight pixels whose taps do not leave the registers.
inline void blend_eight(const float* above, const float* below, const int64_t* offset,
                        const float* weight_x, const float* weight_y, float* out) {
  struct Two {
    Floats8 left, right;
  };
  const auto split = [&](const float* from) -> Two {
    const Floats4 p = two_pairs(from + offset[0], from + offset[1]),
                  q = two_pairs(from + offset[2], from + offset[3]),
                  r = two_pairs(from + offset[4], from + offset[5]),
                  s = two_pairs(from + offset[6], from + offset[7]);
    const Floats8 pr = __builtin_shufflevector(p, r, 0, 1, 2, 3, 4, 5, 6, 7),
                  qs = __builtin_shufflevector(q, s, 0, 1, 2, 3, 4, 5, 6, 7);
    return {__builtin_shufflevector(pr, qs, 0, 2, 8, 10, 4, 6, 12, 14),
            __builtin_shufflevector(pr, qs, 1, 3, 9, 11, 5, 7, 13, 15)};
  };
  const Floats8 x = load<Floats8>(weight_x), y = load<Floats8>(weight_y), zero = {};
  const auto along_x = [&](const Two& taps) {
    return multiply_add(x, x > 0 ? taps.right : zero, (1 - x) * taps.left);
  };
  const Floats8 top = along_x(split(above)), bottom = along_x(split(below));
  const Floats8 sum = multiply_add(y, y > 0 ? bottom : zero, (1 - y) * top);
  std::memcpy(out, &sum, sizeof sum);
}
#endif

// In float32. False if that may have decided how a pixel is rounded. With values up to 255 a
// weight, wrong by 2^-25, makes an error of 2^-17, and every operation one of 2^-17 at most: the
// upper and the lower pair are within 2^-16; their difference, its weight and the last sum add
// 2^-17 each. That is 5 * 2^-17 together.
bool blend_quickly(const Pairs<uint8_t>& pairs, const float* weight_x, const float* weight_y,
                   int64_t first, int64_t count, uint8_t* out) {
  constexpr float kSure = 0.5f - 6 * 0x1p-17f;
  int32_t doubts = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float x = weight_x[first + i], y = weight_y[first + i];
    const uint8_t *above = pairs.above + 2 * first, *below = pairs.below + 2 * first;
    const float a = above[2 * i], b = above[2 * i + 1], c = below[2 * i], d = below[2 * i + 1];
    const float top = fma(x, b - a, a), bottom = fma(x, d - c, c), sum = fma(y, bottom - top, top);
    const float whole = rint(sum);
    doubts |= fabs(sum - whole) > kSure ? 1 : 0;
    out[i] = static_cast<uint8_t>(static_cast<int32_t>(whole));
  }
  return doubts == 0;
}

template <bool kNearest, class Pixel>
void sample_inside(const Tile<Pixel>& tile, const Plane<Pixel>& plane, int64_t v, int64_t left,
                   int64_t begin, int64_t end, Pixel* out) {
  const auto& taps = tile.taps[v - tile.top];
  const int64_t at = begin - left, count = end - begin;
  if (kNearest) {
    for (int64_t i = 0; i < count; ++i) out[i] = plane.data[taps.offset[at + i]];
    return;
  }
#if __has_builtin(__builtin_shufflevector)
  if constexpr (std::is_same_v<Pixel, float>) {
    if (plane.stride_x == 1 && count >= 8) {
      const float* below = plane.data + plane.stride_y;
      for (int64_t i = 0; i < count; i = i + 8 < count ? std::min(i + 8, count - 8) : count)
        blend_eight(plane.data, below, taps.offset + at + i, taps.weight_x + at + i,
                    taps.weight_y + at + i, out + i);
      return;
    }
  }
#endif
  Pairs<Pixel> pairs;
  pairs.read(plane, taps.offset + at, count);
  if constexpr (!std::is_same_v<Pixel, uint8_t>) {
    blend(pairs, taps.weight_x + at, taps.weight_y + at, count, out);
  } else {
    constexpr int64_t kGroup = 32;
    for (int64_t i = 0; i < count; i += kGroup) {
      const int64_t n = std::min(kGroup, count - i);
      if (blend_quickly(pairs, taps.weight_x + at, taps.weight_y + at, i, n, out + i)) continue;
      Taps<double> exact;
      Pairs<Pixel> group;
      exact.template locate<false>(tile.map.m, tile.rows[v - tile.top],
                                   {plane.stride_y, plane.stride_x, 0}, begin + i, 0, n);
      group.read(plane, exact.offset, n);
      blend(group, exact.weight_x, exact.weight_y, n, out + i);
    }
  }
}

template <bool kNearest, class Pixel>
void forward_rows(Tile<Pixel>& tile) {
  const WarpSizes& sizes = tile.in.sizes;
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
        if (part == Part::kEdge) sample_edge(tile, v, begin, end);
        if (part != Part::kInside) return;
        auto& taps = tile.taps[i];
        taps.template locate<kNearest>(tile.map.m, tile.rows[i], {stride[2], stride[3], 0}, begin,
                                       begin - left, end - begin);
        // The first channel is read when all rows of the tile are located. Four rows touch much the
        // same lines of the cache.
        if (v % 4 == 0)
          for (int64_t k = begin - left; k < end - left; k += 4)
            __builtin_prefetch(first + taps.offset[k]);
      });
    }
    for (int64_t c = 0; c < sizes.channels; ++c) {
      const Plane<Pixel> plane = make_plane(tile.in, tile.n, c, tile.in.border_value[c]);
      for (int64_t v = tile.top; v < tile.bottom; ++v) {
        Pixel* out = tile.out + output_offset(sizes, 0, c, v);
        tile.cuts[v - tile.top].visit(left, right, [&](Part part, int64_t begin, int64_t end) {
          if (part == Part::kOutside)
            std::fill(out + begin, out + end, plane.border);
          else if (part == Part::kInside)
            sample_inside<kNearest>(tile, plane, v, left, begin, end, out + begin);
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
    Tile<Pixel> tile(in, map_of(maps, n), n, top, bottom, out + output_offset(sizes, n, 0, 0));
    sizes.nearest ? forward_rows<true>(tile) : forward_rows<false>(tile);
  });
}

void warp_perspective_cells_cpu(const WarpSizes& sizes, const double* warp, double* cells,
                                double* scale) {
  const int64_t pixels = sizes.out_height * sizes.out_width;
  for (int64_t i = 0; i < sizes.warp_batch; ++i) {
    const Homography map = make_homography(warp + 9 * i, sizes.inverse_map);
    scale[i] = map.valid ? map.scale : 0;
    parallel_for(pixels, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p)
        store_cell(map, sizes, p % sizes.out_width, p / sizes.out_width, pixels,
                   cells + i * kCellNumbers * pixels + p);
    });
  }
}

template void warp_perspective_cpu(const WarpInputs<uint8_t>&, uint8_t*);
template void warp_perspective_cpu(const WarpInputs<uint16_t>&, uint16_t*);
template void warp_perspective_cpu(const WarpInputs<int16_t>&, int16_t*);
template void warp_perspective_cpu(const WarpInputs<float>&, float*);
template void warp_perspective_cpu(const WarpInputs<double>&, double*);

}  // namespace calcops
