// CPU kernels of warp_perspective: the derivatives.
//
// The slopes, and the gradient for the matrix, which is a sum over them, walk through the
// destination as the result does. The gradient for the image is computed tile by tile of the image.
// A tile takes the rows of the destination one after the other, and adds the pixels that have taps
// in the tile. The sums are in float64. Their order depends on sizes and matrices alone.
#include <calcops/either.h>

#include <limits>

#include "warp_perspective/warp_perspective_rows.h"

namespace calcops::ops::warp_perspective {
namespace {

// ---- the matrix ---------------------------------------------------------------------------------

// Return the sum of the values, in eight lanes, so that the loop is vectorised.
double sum_of(const double* values, int64_t count) {
  constexpr int64_t kLanes = 8;
  double lanes[kLanes] = {}, sum = 0;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t k = 0; k < kLanes; ++k) lanes[k] += values[i + k];
  for (int64_t k = 0; i < count; ++i, ++k) lanes[k] += values[i];
  for (double lane : lanes) sum += lane;
  return sum;
}

// Compute the weights of taps from their fractions, or derivatives of them.
template <int kTaps>
[[gnu::noinline]] void fill_weights(const double* fraction, int order, int64_t count,
                                    double (&weight)[kTaps][kTileWidth]) {
  for (int64_t i = 0; i < count; ++i) {
    double weights[kTaps];
    weights_of(fraction[i], order, weights);
    for (int k = 0; k < kTaps; ++k) weight[k][i] = weights[k];
  }
}

// Call f(std::integral_constant<int, the number of taps along an axis>()).
template <class F>
void with_taps(const WarpSizes& sizes, const F& f) {
  if (sizes.interpolation == Interpolation::kCubic)
    f(std::integral_constant<int, 4>());
  else
    f(std::integral_constant<int, 2>());
}

// The sources of a run of pixels of one part of a row. A pixel without a source has the reciprocal
// 0.
struct Positions {
  double x[kTileWidth], y[kTileWidth];
  double reciprocal[kTileWidth];  // 1 / W

  // `stride` is nullptr if no image is read. Then there are no taps.
  [[gnu::noinline]] void locate(const WarpSizes& sizes, const int64_t* stride,
                                const Homography& map, const RowStart& row, bool is_inside,
                                int64_t u, int64_t count) {
    count_ = count;
    is_inside_ = is_inside;
    if (!is_inside_) {
      with_taps(sizes, [&](auto taps) {
        for (int64_t i = 0; i < count; ++i) {
          Source source;
          const bool has_source = find_cell(map, row, u + i, sizes, source, cell_at<taps>(i) = {});
          x[i] = has_source ? source.x : 0;
          y[i] = has_source ? source.y : 0;
          reciprocal[i] = has_source ? 1 / source.w : 0;
        }
      });
      return;
    }
    const double first = static_cast<double>(u);
    for (int i = 0; i < static_cast<int>(count); ++i) {
      const Source source = project(map.m, row, first + i);
      x[i] = source.x;
      y[i] = source.y;
      reciprocal[i] = 1 / source.w;
    }
    if (stride) taps_.locate(map.m, row, u, count, false, {stride[2], stride[3], 0});
  }

  // Write the derivatives of a channel for x and for y at the sources.
  template <class Real>
  void find_slopes(const WarpSizes& sizes, const Plane<Real>& plane,
                   double (&slopes)[2][kTileWidth]) const {
    with_taps(sizes, [&](auto taps) { find_slopes_of<taps>(sizes, plane, slopes); });
  }

 private:
  template <int kTaps>
  Cell<kTaps>& cell_at(int64_t i) {
    if constexpr (kTaps == 4)
      return cubic_[i];
    else
      return linear_[i];
  }

  template <int kTaps, class Real>
  [[gnu::noinline]] void find_slopes_of(const WarpSizes& sizes, const Plane<Real>& plane,
                                        double (&slopes)[2][kTileWidth]) const {
    const int order_x[2] = {sizes.order_x + 1, sizes.order_x};
    const int order_y[2] = {sizes.order_y, sizes.order_y + 1};
    if (!is_inside_) {
      const auto& cells = [&]() -> const auto& {
        if constexpr (kTaps == 4)
          return cubic_;
        else
          return linear_;
      }();
      for (int k = 0; k < 2; ++k)
        for (int64_t i = 0; i < count_; ++i)
          slopes[k][i] =
              reciprocal[i] != 0 ? interpolate<double>(plane, cells[i], order_x[k], order_y[k]) : 0;
      return;
    }
    double of_x[2][kTaps][kTileWidth], of_y[2][kTaps][kTileWidth];
    for (int k = 0; k < 2; ++k) {
      fill_weights(taps_.weight_x, order_x[k], count_, of_x[k]);
      fill_weights(taps_.weight_y, order_y[k], count_, of_y[k]);
    }
    if constexpr (kTaps == 4) {
      sum_cubic(plane, taps_.offset, count_, of_x, of_y, slopes);
    } else {
      Pairs<Real> pairs;
      pairs.read(plane, taps_.offset, count_);
      for (int k = 0; k < 2; ++k)
        for (int64_t i = 0; i < count_; ++i) {
          const double tap[2][2] = {{pairs.above[2 * i], pairs.above[2 * i + 1]},
                                    {pairs.below[2 * i], pairs.below[2 * i + 1]}};
          slopes[k][i] =
              sum_taps(tap, {of_x[k][0][i], of_x[k][1][i]}, {of_y[k][0][i], of_y[k][1][i]});
        }
    }
  }

 private:
  int64_t count_;
  bool is_inside_;
  Taps<double> taps_;  // of pixels that are inside
  // Of other pixels.
  Cell<2> linear_[kTileWidth];
  Cell<4> cubic_[kTileWidth];
};

// Call visit(positions, n, v, begin, count) for all pixels of the results that may have a source.
// The parts of a strip of rows follow each other in one thread. `stride` is that of the image, or
// nullptr if the taps are not needed.
template <class Visit>
void visit_results(const WarpSizes& sizes, const int64_t* stride,
                   const std::vector<Homography>& maps, const Visit& visit) {
  const int64_t strips = divide_up(sizes.out_height, kTileHeight);
  for_each(sizes.batch * strips, 1, [&](int64_t i) {
    const int64_t n = i / strips, top = i % strips * kTileHeight;
    const Homography& map = map_of(maps, n);
    if (!map.valid) return;
    const std::vector<Row> rows = rows_of_strip(map, top, sizes);
    Positions positions;
    for (int64_t left = 0; left < sizes.out_width; left += kTileWidth) {
      int64_t v = top;
      for (const Row& row : rows) {
        const auto visit_part = [&](bool is_inside) {
          return [&, is_inside](int64_t begin, int64_t end) {
            positions.locate(sizes, stride, map, row.start, is_inside, begin, end - begin);
            visit(positions, n, v, begin, end - begin);
          };
        };
        row.visit(
            left, std::min(left + kTileWidth, sizes.out_width), [](int64_t, int64_t) {},
            visit_part(false), visit_part(true));
        ++v;
      }
    }
  });
}

// Add to the gradient for m that of a part of row v, which begins at u = `begin`. g[k][i] is the
// gradient for number k of the motion of pixel i.
[[gnu::noinline]] void add_motions(const Positions& positions, int64_t v, int64_t begin,
                                   int64_t count, double (&g)[3][kTileWidth], double* grad_m) {
  // As motion_backward: row k of m receives g[k] times u, v and 1.
  double along_u[3][kTileWidth];
  const double first = static_cast<double>(begin);
  for (int i = 0; i < static_cast<int>(count); ++i) {
    const double reciprocal = positions.reciprocal[i];
    // The gradient of a pixel without a source may be NaN.
    for (int k = 0; k < 3; ++k) g[k][i] = reciprocal != 0 ? g[k][i] * reciprocal : 0;
    g[2][i] -= fma(g[0][i], positions.x[i], g[1][i] * positions.y[i]);
    for (int k = 0; k < 3; ++k) along_u[k][i] = g[k][i] * (first + i);
  }
  for (int k = 0; k < 3; ++k) {
    const double sum = sum_of(g[k], count);
    grad_m[3 * k] += sum_of(along_u[k], count);
    grad_m[3 * k + 1] = fma(sum, static_cast<double>(v), grad_m[3 * k + 1]);
    grad_m[3 * k + 2] += sum;
  }
}

// Write the gradient for `right` of homography_tangent(). find(positions, n, v, begin, count, grad)
// adds the gradient for the motion of each pixel of a part of a row.
template <class Real, class Find>
void sum_motions(const WarpInputs<Real>& in, const double* left, double* grad_right,
                 const Find& find) {
  const WarpSizes& sizes = in.sizes;
  const std::vector<Homography> maps = make_homographies(in);
  const int64_t strips = divide_up(sizes.out_height, kTileHeight);
  std::vector<double> parts(sizes.batch * strips * 9);
  const auto visit = [&](const Positions& positions, int64_t n, int64_t v, int64_t begin,
                         int64_t count) {
    double g[3][kTileWidth] = {};
    find(positions, n, v, begin, count, g);
    add_motions(positions, v, begin, count, g, &parts[9 * (n * strips + v / kTileHeight)]);
  };
  // A nearest pixel does not move.
  if (sizes.interpolation != Interpolation::kNearest)
    visit_results(sizes, in.image ? in.image_stride : nullptr, maps, visit);
  for (int64_t w = 0; w < sizes.warp_batch; ++w) {
    double grad_m[9] = {};
    for (int64_t n = w; n < sizes.batch; n += sizes.warp_batch)
      for (int64_t i = n * strips; i < (n + 1) * strips; ++i)
        for (int k = 0; k < 9; ++k) grad_m[k] += parts[9 * i + k];
    homography_backward(maps[w], left + 9 * w, grad_m, sizes.inverse_map, grad_right + 9 * w);
  }
}

template <class Real>
void matrix_gradient(const WarpInputs<Real>& in, const Real* grad, double* grad_warp) {
  sum_motions(in, in.warp, grad_warp,
              [&](const Positions& positions, int64_t n, int64_t v, int64_t begin, int64_t count,
                  double (&sums)[3][kTileWidth]) __attribute__((noinline)) {
                double slopes[2][kTileWidth];
                for (int64_t c = 0; c < in.sizes.channels; ++c) {
                  const Real* g = grad + output_offset(in.sizes, n, c, v) + begin;
                  positions.find_slopes(in.sizes, make_plane(in, n, c, in.border_value[c]), slopes);
                  for (int k = 0; k < 2; ++k)
                    for (int64_t i = 0; i < count; ++i)
                      sums[k][i] = fma(g[i], slopes[k][i], sums[k][i]);
                }
              });
}

// ---- the image ----------------------------------------------------------------------------------

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Box kNowhere{kInfinity, -kInfinity, kInfinity, -kInfinity};  // an empty box

bool meet(const Box& a, const Box& b) {
  return a.left <= b.right && a.right >= b.left && a.top <= b.bottom && a.bottom >= b.top;
}

Box around(const Box& a, const Box& b) {
  return {std::min(a.left, b.left), std::max(a.right, b.right), std::min(a.top, b.top),
          std::max(a.bottom, b.bottom)};
}

// A tile of the gradient for one image, for some of its channels. It has a margin of rows and
// columns that belong to other tiles, so that pixels near its edge need no test.
struct ImageTile {
  const WarpSizes& sizes;
  const Reals& grad;
  int64_t top, left, height, width, channels;
  int64_t margin = static_cast<int64_t>(2 * reach_of(sizes));
  int64_t pitch = width + 2 * margin, plane = pitch * (height + 2 * margin);
  int64_t grad_plane = sizes.out_height * sizes.out_width;
  // [channels, height + 2 margin, width + 2 margin]
  std::vector<double> sums = std::vector<double>(channels * plane);
  Taps<double> taps = {};

  double* sum_at(int64_t c, int64_t y, int64_t x) {
    return sums.data() + c * plane + (y - top + margin) * pitch + x - left + margin;
  }

  // Add pixels one by one.
  [[gnu::noinline]] void add_edge(const Homography& map, const RowStart& row, int64_t at,
                                  int64_t begin, int64_t end) {
    with_taps(sizes, [&](auto along) {
      for (int64_t u = begin; u < end; ++u) {
        Source source;
        Cell<along> cell;
        if (!find_cell(map, row, u, sizes, source, cell)) continue;
        double weight_x[along], weight_y[along];
        weights_of(cell.x.fraction, sizes.order_x, weight_x);
        weights_of(cell.y.fraction, sizes.order_y, weight_y);
        for (int k = 0; k < along * along; ++k) {
          const int64_t y = cell.y.tap[k / along], x = cell.x.tap[k % along];
          const double weight = weight_y[k / along] * weight_x[k % along];
          const bool is_mine = y >= top && y < top + height && x >= left && x < left + width;
          for (int64_t c = 0; c < channels && is_mine && weight != 0; ++c) {
            double& sum = *sum_at(c, y, x);
            sum = fma(weight, grad[at + c * grad_plane + u], sum);
          }
        }
      }
    });
  }

  template <int kTaps>
  void add_taps(const double* grad, int64_t count, const double (&weight_x)[kTaps][kTileWidth],
                const double (&weight_y)[kTaps][kTileWidth], double* to) {
    // A tap of weight zero receives nothing, even if the gradient is NaN.
    double shares[kTaps][kTileWidth][kTaps];
    for (int y = 0; y < kTaps; ++y)
      for (int64_t i = 0; i < count; ++i) {
        const double along_y = weight_y[y][i] != 0 ? weight_y[y][i] * grad[i] : 0;
        for (int x = 0; x < kTaps; ++x)
          shares[y][i][x] = weight_x[x][i] != 0 ? weight_x[x][i] * along_y : 0;
      }
    // Neighbours often share a tap, and each addition to it waits for the one before. So pixels
    // that follow each other here are kStep apart.
    constexpr int64_t kStep = 16;
    for (int64_t first = 0; first < std::min(kStep, count); ++first)
      for (int64_t i = first; i < count; i += kStep) {
        double* sum = to + taps.offset[i] - (kTaps / 2 - 1) * (pitch + 1);
        for (int y = 0; y < kTaps; ++y, sum += pitch)
          for (int x = 0; x < kTaps; ++x) sum[x] += shares[y][i][x];
      }
  }

  // Add pixels whose taps are all in the image, and in the tile or its margin.
  [[gnu::noinline]] void add_inside(const Homography& map, const RowStart& row, int64_t at,
                                    Interval pixels) {
    const bool is_nearest = sizes.interpolation == Interpolation::kNearest;
    double numbers[kTileWidth];
    const Strides strides(pitch, 1, (top - margin) * pitch + left - margin);
    for (int64_t u = pixels.begin; u < pixels.end; u += kTileWidth) {
      const int64_t count = std::min(kTileWidth, pixels.end - u);
      taps.locate(map.m, row, u, count, is_nearest, strides);
      // The nearest pixel is the first of two taps.
      if (is_nearest) std::fill_n(taps.weight_x, count, 0), std::fill_n(taps.weight_y, count, 0);
      with_taps(sizes, [&](auto along) {
        double weight_x[along][kTileWidth], weight_y[along][kTileWidth];
        fill_weights(taps.weight_x, sizes.order_x, count, weight_x);
        fill_weights(taps.weight_y, sizes.order_y, count, weight_y);
        for (int64_t c = 0; c < channels; ++c)
          add_taps(grad.read(at + c * grad_plane + u, count, numbers), count, weight_x, weight_y,
                   sums.data() + c * plane);
      });
    }
  }

  // Add the pixels of a row that have taps in the tile. All inside are in the box, and the others
  // in a part of the row whose box of `boxes` meets the tile.
  void add_row(const Homography& map, const Row& row, const Box& box, const Box* boxes,
               const Box& own, int64_t at) {
    Interval near = in_box(map.m, row.start, sizes.out_width, row.sign, box, Doubt::kPossible);
    near.begin = std::max(near.begin, row.inside.begin);
    near.end = std::min(near.end, row.inside.end);
    if (!near.empty()) add_inside(map, row.start, at, near);
    const auto skip = [](int64_t, int64_t) {};
    const auto at_edge = [&](int64_t begin, int64_t end) {
      add_edge(map, row.start, at, begin, end);
    };
    for (int64_t left = 0; left < sizes.out_width; left += kTileWidth, ++boxes)
      if (meet(*boxes, own))
        row.visit(left, std::min(left + kTileWidth, sizes.out_width), skip, at_edge, skip);
  }
};

// Return a box around the taps of each tile of the results, [batch, strips, across].
std::vector<Box> find_boxes(const WarpSizes& sizes, const std::vector<Homography>& maps) {
  const int64_t strips = divide_up(sizes.out_height, kTileHeight);
  const int64_t across = divide_up(sizes.out_width, kTileWidth);
  const double reach = reach_of(sizes);
  std::vector<Box> boxes(sizes.batch * strips * across, kNowhere);
  for_each(sizes.batch * strips, 1, [&](int64_t i) {
    const Homography& map = map_of(maps, i / strips);
    for (const Row& row : rows_of_strip(map, i % strips * kTileHeight, sizes))
      for (int64_t x = 0; x < across; ++x) {
        Box& box = boxes[i * across + x];
        const auto at_inside = [&](int64_t begin, int64_t end) {
          // x and y only rise or only fall along a row where W keeps its sign.
          for (const int64_t u : {begin, end - 1}) {
            const Source at = project(map.m, row.start, static_cast<double>(u));
            box = around(box, {at.x - reach, at.x + reach, at.y - reach, at.y + reach});
          }
        };
        const auto at_edge = [&](int64_t begin, int64_t end) {
          with_taps(sizes, [&](auto taps) {
            for (int64_t u = begin; u < end; ++u) {
              Source source;
              Cell<taps> cell;
              if (!find_cell(map, row.start, u, sizes, source, cell)) continue;
              for (int k = 0; k < taps; ++k) {
                const auto tap_x = static_cast<double>(cell.x.tap[k]);
                const auto tap_y = static_cast<double>(cell.y.tap[k]);
                box = around(box, {tap_x, tap_x, tap_y, tap_y});
              }
            }
          });
        };
        const int64_t left = x * kTileWidth, right = std::min(left + kTileWidth, sizes.out_width);
        row.visit(left, right, [](int64_t, int64_t) {}, at_edge, at_inside);
      }
  });
  return boxes;
}

void image_gradient(const WarpSizes& sizes, const std::vector<Homography>& maps, const Reals& grad,
                    const RealResults& grad_image) {
  if (sizes.width == 0) return;
  const std::vector<Box> boxes_of_tiles = find_boxes(sizes, maps);
  const int64_t strips = divide_up(sizes.out_height, kTileHeight);
  const int64_t out_across = divide_up(sizes.out_width, kTileWidth);
  // The sums of a tile stay in the cache. Its channels share the search for the taps.
  constexpr int64_t kSums = 1 << 15, kAcross = 256, kChannels = 4;
  const int64_t channels = std::clamp<int64_t>(sizes.channels, 1, kChannels);
  const int64_t height = kSums / (kAcross * channels);
  const int64_t across = divide_up(sizes.width, kAcross), down = divide_up(sizes.height, height);
  const int64_t groups = divide_up(sizes.channels, channels), tiles = across * down;
  for_each(sizes.image_batch * groups * tiles, 1, [&](int64_t i) {
    const int64_t image = i / (groups * tiles), channel = i / tiles % groups * channels;
    const int64_t top = i % tiles / across * height, left = i % across * kAcross;
    ImageTile tile{sizes,
                   grad,
                   top,
                   left,
                   std::min(height, sizes.height - top),
                   std::min(kAcross, sizes.width - left),
                   std::min(channels, sizes.channels - channel)};
    const Box own{static_cast<double>(left), static_cast<double>(left + tile.width - 1),
                  static_cast<double>(top), static_cast<double>(top + tile.height - 1)};
    // The sources that have a tap in the tile. For kNearest, the taps may also be beside it.
    const double reach = reach_of(sizes);
    const Box box{own.left - reach, own.right + reach, own.top - reach, own.bottom + reach};
    for (int64_t n = image; n < sizes.batch; n += sizes.image_batch)
      for (int64_t strip = 0; strip < strips; ++strip) {
        const Box* boxes = boxes_of_tiles.data() + (n * strips + strip) * out_across;
        const auto meets = [&](const Box& other) { return meet(other, own); };
        if (std::none_of(boxes, boxes + out_across, meets)) continue;
        const Homography& map = map_of(maps, n);
        int64_t v = strip * kTileHeight;
        for (const Row& row : rows_of_strip(map, v, sizes))
          tile.add_row(map, row, box, boxes, own, output_offset(sizes, n, channel, v++));
      }
    for (int64_t c = 0; c < tile.channels; ++c)
      for (int64_t y = top; y < top + tile.height; ++y) {
        const int64_t row = (image * sizes.channels + channel + c) * sizes.height + y;
        const double* from = tile.sum_at(c, y, left);
        grad_image.write(row * sizes.width + left, from, tile.width);
      }
  });
}

}  // namespace

template <class Real>
void warp_perspective_backward(const WarpInputs<Real>& in, const WarpGradients<Real>& to) {
  if (to.grad_warp) matrix_gradient(in, to.grad, to.grad_warp);
  if (to.grad_image) image_gradient(in.sizes, make_homographies(in), to.grad, to.grad_image);
}

template <class Real>
void warp_perspective_slope(const WarpInputs<Real>& in, const Motions& motion, Real* out) {
  const WarpSizes& sizes = in.sizes;
  std::fill_n(out, output_offset(sizes, sizes.batch, 0, 0), 0);
  visit_results(sizes, in.image_stride, make_homographies(in),
                [&](const Positions& positions, int64_t n, int64_t v, int64_t begin,
                    int64_t count) __attribute__((noinline)) {
                  double step[2][kTileWidth], slopes[2][kTileWidth];
                  for (int k = 0; k < 2; ++k)
                    for (int64_t i = 0; i < count; ++i) step[k][i] = motion(n, k, v, begin + i);
                  for (int64_t c = 0; c < sizes.channels; ++c) {
                    positions.find_slopes(sizes, make_plane(in, n, c, in.border_value[c]), slopes);
                    Real* to = out + output_offset(sizes, n, c, v) + begin;
                    for (int64_t i = 0; i < count; ++i)
                      to[i] = static_cast<Real>(
                          slope_along(slopes[0][i], slopes[1][i], step[0][i], step[1][i]));
                  }
                });
}

void warp_perspective_motion(const WarpInputs<double>& in, const double* left, const double* right,
                             double* motion) {
  const WarpSizes& sizes = in.sizes;
  const std::vector<Homography> maps = make_homographies(in);
  std::vector<double> moved(9 * sizes.batch);
  for (int64_t n = 0; n < sizes.batch; ++n)
    homography_tangent(maps[n], left + 9 * n, right + 9 * n, sizes.inverse_map, &moved[9 * n]);
  std::fill_n(motion, output_offset(sizes, sizes.batch, 0, 0), 0);
  visit_results(sizes, nullptr, maps,
                [&](const Positions& positions, int64_t n, int64_t v, int64_t begin, int64_t count)
                    __attribute__((noinline)) {
                      const double* const tangent = &moved[9 * n];
                      const RowStart row = row_of(tangent, static_cast<double>(v));
                      double* const to = motion + output_offset(sizes, n, 0, v) + begin;
                      const int64_t plane = sizes.out_height * sizes.out_width;
                      const double first = static_cast<double>(begin);
                      for (int i = 0; i < static_cast<int>(count); ++i) {
                        const Motion of_pixel = motion_of(tangent, row, first + i, positions.x[i],
                                                          positions.y[i], positions.reciprocal[i]);
                        to[i] = of_pixel.x;
                        to[plane + i] = of_pixel.y;
                        to[2 * plane + i] = of_pixel.spread;
                      }
                    });
}

void warp_perspective_motion_backward(const WarpInputs<double>& in, const double* grad_motion,
                                      const double* left, double* grad_right) {
  sum_motions(in, left, grad_right,
              [&](const Positions&, int64_t n, int64_t v, int64_t begin, int64_t count,
                  double (&grad)[3][kTileWidth]) {
                for (int k = 0; k < 3; ++k)
                  std::copy_n(grad_motion + output_offset(in.sizes, n, k, v) + begin, count,
                              grad[k]);
              });
}

template void warp_perspective_backward(const WarpInputs<float>&, const WarpGradients<float>&);
template void warp_perspective_backward(const WarpInputs<double>&, const WarpGradients<double>&);
template void warp_perspective_slope(const WarpInputs<float>&, const Motions&, float*);
template void warp_perspective_slope(const WarpInputs<double>&, const Motions&, double*);

}  // namespace calcops::ops::warp_perspective
