// CPU kernels of warp_perspective.
#include <algorithm>
#include <limits>
#include <vector>

#include "parallel.h"
#include "warp_perspective/warp_perspective.h"
#include "warp_perspective/warp_perspective_math.h"

namespace calcops {
namespace {

// The destination is walked in tiles, so that a map that turns the image finds its source lines in
// the cache again.
constexpr int64_t kTileHeight = 8, kTileWidth = 128;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Tile {
  int64_t n, top, bottom, left, right;
};

struct Tiles {
  int64_t across, per_image, count, height, width;

  explicit Tiles(const WarpSizes& sizes)
      : across(divide_up(sizes.out_width, kTileWidth)),
        per_image(across * divide_up(sizes.out_height, kTileHeight)),
        count(sizes.batch * per_image),
        height(sizes.out_height),
        width(sizes.out_width) {}

  Tile operator[](int64_t i) const {
    const int64_t top = i % per_image / across * kTileHeight, left = i % across * kTileWidth;
    return {i / per_image, top, std::min(top + kTileHeight, height), left,
            std::min(left + kTileWidth, width)};
  }
};

int64_t output_offset(const WarpSizes& sizes, int64_t n, int64_t c, int64_t v) {
  return ((n * sizes.channels + c) * sizes.out_height + v) * sizes.out_width;
}

template <class Pixel>
std::vector<Homography> make_homographies(const WarpInputs<Pixel>& in) {
  std::vector<Homography> maps(in.sizes.warp_batch);
  for (int64_t i = 0; i < in.sizes.warp_batch; ++i) maps[i] = homography_of(in, i);
  return maps;
}

const Homography& map_of(const std::vector<Homography>& maps, int64_t n) {
  return maps[maps.size() == 1 ? 0 : n];
}

// A run of a row whose taps all lie inside the image, which is nearly every run: no border has to
// be thought of, and the loops are plain enough for the compiler to vectorise.
struct InnerRun {
  int64_t offset[kTileWidth];
  double weight_x[kTileWidth], weight_y[kTileWidth];

  template <bool kNearest>
  bool locate(const double* m, const WarpSizes& sizes, const int64_t* stride, int64_t v,
              int64_t left, int64_t count) {
    const double reach = kNearest ? 0 : 1;
    const double last_x = static_cast<double>(sizes.width) - 1 - reach;
    const double last_y = static_cast<double>(sizes.height) - 1 - reach;
    const int64_t stride_y = stride[2], stride_x = stride[3];
    int64_t outside = 0;  // as wide as a double, so that the loop vectorises
    for (int64_t i = 0; i < count; ++i) {
      Source s = project(m, static_cast<double>(left + i), static_cast<double>(v));
      if (kNearest) s = {rint(s.x), rint(s.y), s.w};
      const double x = floor(s.x), y = floor(s.y);
      const bool ok = (x >= 0) & (x <= last_x) & (y >= 0) & (y <= last_y);
      outside |= ok ? 0 : 1;
      const int64_t column = static_cast<int64_t>(ok ? x : 0),
                    row = static_cast<int64_t>(ok ? y : 0);
      offset[i] = row * stride_y + column * stride_x;
      weight_x[i] = s.x - x;
      weight_y[i] = s.y - y;
    }
    return outside == 0;
  }

  template <bool kNearest, class Pixel>
  void sample(const Plane<Pixel>& plane, int64_t count, Pixel* out) const {
    if (kNearest) {
      for (int64_t i = 0; i < count; ++i) out[i] = plane.data[offset[i]];
      return;
    }
    const int64_t stride_y = plane.stride_y, stride_x = plane.stride_x;
    Pixel a[kTileWidth], b[kTileWidth], c[kTileWidth], d[kTileWidth];
    for (int64_t i = 0; i < count; ++i) {
      const Pixel* tap = plane.data + offset[i];
      const bool right = weight_x[i] > 0, below = weight_y[i] > 0;
      a[i] = tap[0];
      b[i] = right ? tap[stride_x] : Pixel(0);
      c[i] = below ? tap[stride_y] : Pixel(0);
      d[i] = right & below ? tap[stride_y + stride_x] : Pixel(0);
    }
    for (int64_t i = 0; i < count; ++i)
      out[i] = to_pixel<Pixel>(interpolate(a[i], b[i], c[i], d[i], weight_x[i], weight_y[i]));
  }
};

// A run that meets the border, or pixels without a source.
template <class Pixel>
void forward_outer_run(const WarpInputs<Pixel>& in, const Homography& map, const Tile& tile,
                       int64_t v, Pixel* out) {
  const WarpSizes& sizes = in.sizes;
  for (int64_t u = tile.left; u < tile.right; ++u) {
    Cell cell{};
    const bool has_source =
        map.valid &&
        locate(project(map.m, static_cast<double>(u), static_cast<double>(v)), sizes, cell);
    for (int64_t c = 0; c < sizes.channels; ++c) {
      const Plane<Pixel> plane = make_plane(in, tile.n, c, in.border_value[c]);
      out[output_offset(sizes, tile.n, c, v) + u] =
          to_pixel<Pixel>(has_source ? sample(plane, cell) : plane.border);
    }
  }
}

template <bool kNearest, class Pixel>
void forward_tile(const WarpInputs<Pixel>& in, const Homography& map, const Tile& tile,
                  Pixel* out) {
  const int64_t count = tile.right - tile.left;
  InnerRun runs[kTileHeight];
  bool inside[kTileHeight];
  for (int64_t v = tile.top; v < tile.bottom; ++v) {
    const int64_t i = v - tile.top;
    inside[i] = map.valid &&
                runs[i].locate<kNearest>(map.m, in.sizes, in.image_stride, v, tile.left, count);
    if (!inside[i]) forward_outer_run(in, map, tile, v, out);
  }
  for (int64_t c = 0; c < in.sizes.channels; ++c) {
    const Plane<Pixel> plane = make_plane(in, tile.n, c, in.border_value[c]);
    for (int64_t v = tile.top; v < tile.bottom; ++v)
      if (inside[v - tile.top])
        runs[v - tile.top].sample<kNearest>(
            plane, count, out + output_offset(in.sizes, tile.n, c, v) + tile.left);
  }
}

// What the first pass of the backward learns of a tile: its share of the gradient of m, and which
// rows of the image it touches (none where last < first).
struct TileSummary {
  double grad_m[9] = {};
  int64_t first = std::numeric_limits<int64_t>::max(), last = -1;
};

// visit(u, v, source, cell) for every pixel of the tile that has a source.
template <class Visit>
void for_each_cell(const WarpSizes& sizes, const Homography& map, const Tile& tile, Visit visit) {
  if (!map.valid) return;
  for (int64_t v = tile.top; v < tile.bottom; ++v)
    for (int64_t u = tile.left; u < tile.right; ++u) {
      const Source source = project(map.m, static_cast<double>(u), static_cast<double>(v));
      Cell cell{};
      if (locate(source, sizes, cell)) visit(u, v, source, cell);
    }
}

template <class Real>
TileSummary summarize(const WarpInputs<Real>& in, const WarpGradients<Real>& to,
                      const Homography& map, const Tile& tile) {
  TileSummary summary;
  std::vector<Plane<Real>> planes;
  for (int64_t c = 0; c < in.sizes.channels; ++c)
    planes.push_back(make_plane(in, tile.n, c, in.border_value[c]));
  const int64_t stride = in.sizes.out_height * in.sizes.out_width;
  for_each_cell(in.sizes, map, tile,
                [&](int64_t u, int64_t v, const Source& source, const Cell& cell) {
                  summary.first = std::min({summary.first, cell.y.first, cell.y.second});
                  summary.last = std::max({summary.last, cell.y.first, cell.y.second});
                  if (!to.grad_warp) return;
                  const Real* grad = to.grad + output_offset(in.sizes, tile.n, 0, v) + u;
                  double gx = 0, gy = 0;
                  for (int64_t c = 0; c < in.sizes.channels; ++c) {
                    const double g = grad[c * stride];
                    const Slope slope = sample_slope(planes[c], cell);
                    gx = fma(g, slope.x, gx);
                    gy = fma(g, slope.y, gy);
                  }
                  project_backward(source, static_cast<double>(u), static_cast<double>(v), gx, gy,
                                   summary.grad_m);
                });
  return summary;
}

// The rows [top, bottom) of some channels of one image's gradient. A band takes what the tiles give
// it in the order of the tiles and of their pixels: how the image is cut into bands does not show.
template <class Real>
void backward_band(const WarpInputs<Real>& in, const WarpGradients<Real>& to, const Tiles& tiles,
                   const std::vector<TileSummary>& summaries, const std::vector<Homography>& maps,
                   int64_t image, int64_t first_channel, int64_t channels, int64_t top,
                   int64_t bottom) {
  const WarpSizes& sizes = in.sizes;
  const int64_t height = bottom - top, width = sizes.width;
  const int64_t stride = sizes.out_height * sizes.out_width;
  std::vector<double> sums(channels * height * width);
  for (int64_t n = image; n < sizes.batch; n += sizes.image_batch)
    for (int64_t i = n * tiles.per_image; i < (n + 1) * tiles.per_image; ++i) {
      if (summaries[i].last < top || summaries[i].first >= bottom) continue;
      const auto scatter = [&](int64_t u, int64_t v, const Source&, const Cell& cell) {
        const Real* grad = to.grad + output_offset(sizes, n, first_channel, v) + u;
        const int64_t rows[2] = {cell.y.first, cell.y.second},
                      columns[2] = {cell.x.first, cell.x.second};
        const double weight_y[2] = {1 - cell.y.weight, cell.y.weight},
                     weight_x[2] = {1 - cell.x.weight, cell.x.weight};
        for (int y = 0; y < 2; ++y) {
          if (rows[y] < top || rows[y] >= bottom || !(weight_y[y] > 0)) continue;
          for (int x = 0; x < 2; ++x) {
            if (columns[x] < 0 || columns[x] >= width || !(weight_x[x] > 0)) continue;
            for (int64_t c = 0; c < channels; ++c) {
              double& sum = sums[(c * height + rows[y] - top) * width + columns[x]];
              sum = fma(weight_y[y] * weight_x[x], static_cast<double>(grad[c * stride]), sum);
            }
          }
        }
      };
      for_each_cell(sizes, map_of(maps, n), tiles[i], scatter);
    }
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t i = 0; i < height * width; ++i)
      to.grad_image[((image * sizes.channels + first_channel + c) * sizes.height + top) * width +
                    i] = static_cast<Real>(sums[c * height * width + i]);
}

}  // namespace

template <class Pixel>
void warp_perspective_cpu(const WarpInputs<Pixel>& in, Pixel* out) {
  const std::vector<Homography> maps = make_homographies(in);
  const Tiles tiles(in.sizes);
  parallel_for(tiles.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tiles[i];
      const auto forward =
          in.sizes.nearest ? forward_tile<true, Pixel> : forward_tile<false, Pixel>;
      forward(in, map_of(maps, tile.n), tile, out);
    }
  });
}

template <class Real>
void warp_perspective_backward_cpu(const WarpInputs<Real>& in, const WarpGradients<Real>& to) {
  const WarpSizes& sizes = in.sizes;
  const std::vector<Homography> maps = make_homographies(in);
  const Tiles tiles(sizes);
  std::vector<TileSummary> summaries(tiles.count);
  parallel_for(tiles.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tiles[i];
      summaries[i] = summarize(in, to, map_of(maps, tile.n), tile);
    }
  });

  for (int64_t w = 0; w < sizes.warp_batch && to.grad_warp; ++w) {
    double grad_m[9] = {};
    for (int64_t n = w; n < sizes.batch; n += sizes.warp_batch)
      for (int64_t i = n * tiles.per_image; i < (n + 1) * tiles.per_image; ++i)
        for (int k = 0; k < 9; ++k) grad_m[k] += summaries[i].grad_m[k];
    homography_backward(maps[w], grad_m, sizes.inverse_map, to.grad_warp + 9 * w);
  }
  if (!to.grad_image || sizes.width == 0) return;

  // About 16 bands share an image's work; 4 channels share the search for the coordinates and keep
  // a band's sums within the cache.
  constexpr int64_t kBands = 16, kMinBandHeight = 16, kChannels = 4;
  const int64_t band_height = std::max(divide_up(sizes.height, kBands), kMinBandHeight);
  const int64_t bands = divide_up(sizes.height, band_height);
  const int64_t groups = divide_up(sizes.channels, kChannels);
  parallel_for(sizes.image_batch * groups * bands, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t image = i / (groups * bands), channel = i / bands % groups * kChannels;
      const int64_t top = i % bands * band_height;
      backward_band(in, to, tiles, summaries, maps, image, channel,
                    std::min(kChannels, sizes.channels - channel), top,
                    std::min(top + band_height, sizes.height));
    }
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
template void warp_perspective_cpu(const WarpInputs<float>&, float*);
template void warp_perspective_cpu(const WarpInputs<double>&, double*);
template void warp_perspective_backward_cpu(const WarpInputs<float>&, const WarpGradients<float>&);
template void warp_perspective_backward_cpu(const WarpInputs<double>&,
                                            const WarpGradients<double>&);

}  // namespace calcops
