// CPU kernels of warp_perspective: the derivatives.
//
// The slopes, and the gradient for the matrix, which is a sum over them, walk through the
// destination as the result does. The gradient for the image is computed tile by tile of the image.
// A tile takes the rows of the destination one after the other, and adds the pixels that have taps
// in the tile. The sums are in float64. Their order depends on sizes and matrices alone.
#include <limits>
#include <utility>

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

// The order of a derivative of the image for x and for y.
struct Order {
  int x, y;
};

// Compute the weights of taps from their fractions, or derivatives of them.
template <int kTaps>
void fill_weights(const double* fraction, int order, int64_t count,
                  double (&weight)[kTaps][kTileWidth]) {
  for (int64_t i = 0; i < count; ++i) {
    double weights[kTaps];
    weights_of(fraction[i], order, weights);
    for (int k = 0; k < kTaps; ++k) weight[k][i] = weights[k];
  }
}

// The sources of a run of pixels of one part of a row. A pixel without a source has the reciprocal
// 0.
template <int kTaps>
struct Positions {
  double x[kTileWidth], y[kTileWidth];
  double reciprocal[kTileWidth];  // 1 / W

  void locate(const Homography& map, const RowStart& row, const WarpSizes& sizes,
              const int64_t* stride, bool is_inside, int64_t u, int64_t count) {
    count_ = count;
    is_inside_ = is_inside;
    if (!is_inside_) {
      for (int64_t i = 0; i < count; ++i) {
        Source source;
        const bool has_source = find_cell(map, row, u + i, sizes, source, cells_[i] = {});
        x[i] = has_source ? source.x : 0;
        y[i] = has_source ? source.y : 0;
        reciprocal[i] = has_source ? 1 / source.w : 0;
      }
      return;
    }
    const double first = static_cast<double>(u);
    for (int i = 0; i < static_cast<int>(count); ++i) {
      const Source source = project(map.m, row, first + i);
      x[i] = source.x;
      y[i] = source.y;
      reciprocal[i] = 1 / source.w;
    }
    taps_.locate(map.m, row, u, count, false, {stride[2], stride[3], 0});
  }

  // Write derivatives of a channel at the sources.
  template <int kSums, class Real>
  [[gnu::noinline]] void find_slopes(const Plane<Real>& plane, const Order (&orders)[kSums],
                                     double (&slopes)[kSums][kTileWidth]) {
    if (!is_inside_) {
      for (int k = 0; k < kSums; ++k)
        for (int64_t i = 0; i < count_; ++i)
          slopes[k][i] = reciprocal[i] != 0
                             ? interpolate<double>(plane, cells_[i], orders[k].x, orders[k].y)
                             : 0;
      return;
    }
    double of_x[kSums][kTaps][kTileWidth], of_y[kSums][kTaps][kTileWidth];
    for (int k = 0; k < kSums; ++k) {
      fill_weights(taps_.weight_x, orders[k].x, count_, of_x[k]);
      fill_weights(taps_.weight_y, orders[k].y, count_, of_y[k]);
    }
    if constexpr (kTaps == 4) {
      sum_cubic(plane, taps_.offset, count_, of_x, of_y, slopes);
    } else {
      Pairs<Real> pairs;
      pairs.read(plane, taps_.offset, count_);
      for (int k = 0; k < kSums; ++k)
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
  Taps<double> taps_;              // of pixels that are inside
  Cell<kTaps> cells_[kTileWidth];  // of other pixels
};

// The share of a strip of rows in the gradient for m.
template <int kTaps, class Real>
struct MatrixGradient {
  const WarpInputs<Real>& in;
  const WarpGradients<Real>& to;
  const Homography& map;
  int64_t n;
  double grad_m[9] = {};
  Positions<kTaps> positions = {};

  void add(const RowStart& row, int64_t v, bool is_inside, int64_t begin, int64_t count) {
    positions.locate(map, row, in.sizes, in.image_stride, is_inside, begin, count);
    double grad_x[kTileWidth] = {}, grad_y[kTileWidth] = {}, slopes[2][kTileWidth];
    const auto [order_x, order_y] = std::make_pair(in.sizes.order_x, in.sizes.order_y);
    for (int64_t c = 0; c < in.sizes.channels; ++c) {
      const Real* grad = to.grad + output_offset(in.sizes, n, c, v) + begin;
      positions.find_slopes(make_plane(in, n, c, in.border_value[c]),
                            {{order_x + 1, order_y}, {order_x, order_y + 1}}, slopes);
      for (int64_t i = 0; i < count; ++i) {
        grad_x[i] = fma(grad[i], slopes[0][i], grad_x[i]);
        grad_y[i] = fma(grad[i], slopes[1][i], grad_y[i]);
      }
    }
    // As project_backward: row k of m receives g[k] times u, v and 1.
    double g[3][kTileWidth], along_u[3][kTileWidth];
    const double first = static_cast<double>(begin);
    for (int i = 0; i < static_cast<int>(count); ++i) {
      const double reciprocal = positions.reciprocal[i];
      // The gradient of a pixel without a source may be NaN.
      g[0][i] = reciprocal != 0 ? grad_x[i] * reciprocal : 0;
      g[1][i] = reciprocal != 0 ? grad_y[i] * reciprocal : 0;
      g[2][i] = -fma(g[0][i], positions.x[i], g[1][i] * positions.y[i]);
      for (int k = 0; k < 3; ++k) along_u[k][i] = g[k][i] * (first + i);
    }
    for (int k = 0; k < 3; ++k) {
      const double sum = sum_of(g[k], count);
      grad_m[3 * k] += sum_of(along_u[k], count);
      grad_m[3 * k + 1] = fma(sum, static_cast<double>(v), grad_m[3 * k + 1]);
      grad_m[3 * k + 2] += sum;
    }
  }
};

// The slopes of a strip of rows of the result. Pixels without a source keep their values.
template <int kTaps>
struct ResultSlope {
  const WarpInputs<double>& in;
  double* out;
  const Homography& map;
  int64_t n;
  Positions<kTaps> positions = {};

  void add(const RowStart& row, int64_t v, bool is_inside, int64_t begin, int64_t count) {
    positions.locate(map, row, in.sizes, in.image_stride, is_inside, begin, count);
    double slopes[1][kTileWidth];
    for (int64_t c = 0; c < in.sizes.channels; ++c) {
      positions.find_slopes(make_plane(in, n, c, in.border_value[c]),
                            {{in.sizes.order_x, in.sizes.order_y}}, slopes);
      std::copy_n(slopes[0], count, out + output_offset(in.sizes, n, c, v) + begin);
    }
  }
};

// Call strip.add(row, v, is_inside, begin, count) for the pixels of a strip of rows, from `top` on,
// that may have a source.
template <class Strip>
void visit_strip(Strip& strip, int64_t top) {
  const WarpSizes& sizes = strip.in.sizes;
  const std::vector<Row> rows = rows_of_strip(strip.map, top, sizes);
  for (int64_t left = 0; left < sizes.out_width; left += kTileWidth) {
    int64_t v = top;
    for (const Row& row : rows) {
      const auto add = [&](bool is_inside) {
        return [&, is_inside](int64_t begin, int64_t end) {
          strip.add(row.start, v, is_inside, begin, end - begin);
        };
      };
      row.visit(
          left, std::min(left + kTileWidth, sizes.out_width), [](int64_t, int64_t) {}, add(false),
          add(true));
      ++v;
    }
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

template <class Real>
void matrix_gradient(const WarpInputs<Real>& in, const WarpGradients<Real>& to,
                     const std::vector<Homography>& maps) {
  const WarpSizes& sizes = in.sizes;
  const int64_t strips = divide_up(sizes.out_height, kTileHeight);
  std::vector<double> parts(sizes.batch * strips * 9);
  // A nearest pixel does not move.
  const bool moves = sizes.interpolation != Interpolation::kNearest;
  for_each(moves ? sizes.batch * strips : 0, 1, [&](int64_t i) {
    const int64_t n = i / strips;
    if (!map_of(maps, n).valid) return;
    with_taps(sizes, [&](auto taps) {
      MatrixGradient<taps, Real> strip{in, to, map_of(maps, n), n};
      visit_strip(strip, i % strips * kTileHeight);
      std::copy_n(strip.grad_m, 9, parts.data() + 9 * i);
    });
  });
  for (int64_t w = 0; w < sizes.warp_batch; ++w) {
    double grad_m[9] = {};
    for (int64_t n = w; n < sizes.batch; n += sizes.warp_batch)
      for (int64_t i = n * strips; i < (n + 1) * strips; ++i)
        for (int k = 0; k < 9; ++k) grad_m[k] += parts[9 * i + k];
    homography_backward(maps[w], grad_m, sizes.inverse_map, to.grad_warp + 9 * w);
  }
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
template <class Real>
struct ImageTile {
  static constexpr int64_t kChannels = 4;
  const WarpInputs<Real>& in;
  const WarpGradients<Real>& to;
  int64_t top, left, height, width, channel, channels;
  int64_t margin = static_cast<int64_t>(2 * reach_of(in.sizes));
  int64_t pitch = width + 2 * margin, plane = pitch * (height + 2 * margin);
  // [channels, height + 2 margin, width + 2 margin]
  std::vector<double> sums = std::vector<double>(channels * plane);
  Taps<double> taps = {};

  double* sum_at(int64_t c, int64_t y, int64_t x) {
    return sums.data() + c * plane + (y - top + margin) * pitch + x - left + margin;
  }

  template <int kTaps>
  void add_cell(const Cell<kTaps>& cell, const Real* grad) {
    double weight_x[kTaps], weight_y[kTaps];
    weights_of(cell.x.fraction, in.sizes.order_x, weight_x);
    weights_of(cell.y.fraction, in.sizes.order_y, weight_y);
    for (int k = 0; k < kTaps * kTaps; ++k) {
      const int64_t y = cell.y.tap[k / kTaps], x = cell.x.tap[k % kTaps];
      const double weight = weight_y[k / kTaps] * weight_x[k % kTaps];
      if (y < top || y >= top + height || x < left || x >= left + width || weight == 0) continue;
      for (int64_t c = 0; c < channels; ++c) {
        double& sum = *sum_at(c, y, x);
        sum = fma(weight, static_cast<double>(grad[c * in.sizes.out_height * in.sizes.out_width]),
                  sum);
      }
    }
  }

  // Add pixels one by one.
  [[gnu::noinline]] void add_edge(const Homography& map, const RowStart& row, const Real* grad,
                                  int64_t begin, int64_t end) {
    with_taps(in.sizes, [&](auto taps) {
      for (int64_t u = begin; u < end; ++u) {
        Source source;
        Cell<taps> cell;
        if (find_cell(map, row, u, in.sizes, source, cell)) add_cell(cell, grad + u);
      }
    });
  }

  template <int kTaps>
  void add_taps(const Real* grad, int64_t count, const double (&weight_x)[kTaps][kTileWidth],
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
  [[gnu::noinline]] void add_inside(const Homography& map, const RowStart& row, const Real* grad,
                                    Interval pixels) {
    const bool is_nearest = in.sizes.interpolation == Interpolation::kNearest;
    const Strides strides(pitch, 1, (top - margin) * pitch + left - margin);
    for (int64_t u = pixels.begin; u < pixels.end; u += kTileWidth) {
      const int64_t count = std::min(kTileWidth, pixels.end - u);
      taps.locate(map.m, row, u, count, is_nearest, strides);
      with_taps(in.sizes, [&](auto along) {
        double weight_x[along][kTileWidth], weight_y[along][kTileWidth];
        if (!is_nearest) {
          fill_weights(taps.weight_x, in.sizes.order_x, count, weight_x);
          fill_weights(taps.weight_y, in.sizes.order_y, count, weight_y);
        }
        for (int64_t channel = 0; channel < channels; ++channel) {
          const Real* g = grad + channel * in.sizes.out_height * in.sizes.out_width + u;
          double* to = sums.data() + channel * plane;
          if (!is_nearest)
            add_taps(g, count, weight_x, weight_y, to);
          else
            for (int64_t i = 0; i < count; ++i) to[taps.offset[i]] += g[i];
        }
      });
    }
  }

  // Add the pixels of a row that have taps in the tile. All inside are in the box, and the others
  // in a part of the row whose box of `boxes` meets the tile.
  void add_row(const Homography& map, const Row& row, const Box& box, const Box* boxes,
               const Box& own, const Real* grad) {
    Interval near = in_box(map.m, row.start, in.sizes.out_width, row.sign, box, Doubt::kPossible);
    near.begin = std::max(near.begin, row.inside.begin);
    near.end = std::min(near.end, row.inside.end);
    if (!near.empty()) add_inside(map, row.start, grad, near);
    const auto skip = [](int64_t, int64_t) {};
    for (int64_t left = 0; left < in.sizes.out_width; left += kTileWidth, ++boxes)
      if (meet(*boxes, own))
        row.visit(
            left, std::min(left + kTileWidth, in.sizes.out_width), skip,
            [&](int64_t begin, int64_t end) { add_edge(map, row.start, grad, begin, end); }, skip);
  }

  void store(int64_t image) {
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t y = top; y < top + height; ++y) {
        const double* from = sum_at(c, y, left);
        Real* out =
            to.grad_image +
            ((image * in.sizes.channels + channel + c) * in.sizes.height + y) * in.sizes.width +
            left;
        for (int64_t x = 0; x < width; ++x) out[x] = static_cast<Real>(from[x]);
      }
  }
};

// Return a box around the taps of a tile of the result.
template <int kTaps>
Box taps_of_tile(const WarpSizes& sizes, const Homography& map, const std::vector<Row>& rows,
                 int64_t left, int64_t right) {
  const double reach = reach_of(sizes);
  Box box = kNowhere;
  const auto at_inside = [&](const Row& row, int64_t begin, int64_t end) {
    // x and y only rise or only fall along a row where W keeps its sign.
    for (const int64_t u : {begin, end - 1}) {
      const Source source = project(map.m, row.start, static_cast<double>(u));
      box = around(box, {source.x - reach, source.x + reach, source.y - reach, source.y + reach});
    }
  };
  const auto at_edge = [&](const Row& row, int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      Source source;
      Cell<kTaps> cell{};
      if (!find_cell(map, row.start, u, sizes, source, cell)) continue;
      for (int k = 0; k < kTaps; ++k) {
        const double x = static_cast<double>(cell.x.tap[k]), y = static_cast<double>(cell.y.tap[k]);
        box = around(box, {x, x, y, y});
      }
    }
  };
  for (const Row& row : rows)
    row.visit(
        left, right, [](int64_t, int64_t) {},
        [&](int64_t begin, int64_t end) { at_edge(row, begin, end); },
        [&](int64_t begin, int64_t end) { at_inside(row, begin, end); });
  return box;
}

// Return these boxes for the tiles of all results, [batch, strips, across].
std::vector<Box> find_boxes(const WarpSizes& sizes, const std::vector<Homography>& maps) {
  const int64_t strips = divide_up(sizes.out_height, kTileHeight);
  const int64_t across = divide_up(sizes.out_width, kTileWidth);
  std::vector<Box> boxes(sizes.batch * strips * across);
  for_each(sizes.batch * strips, 1, [&](int64_t i) {
    const Homography& map = map_of(maps, i / strips);
    const std::vector<Row> rows = rows_of_strip(map, i % strips * kTileHeight, sizes);
    for (int64_t x = 0; x < across; ++x) {
      const int64_t left = x * kTileWidth, right = std::min(left + kTileWidth, sizes.out_width);
      with_taps(sizes, [&](auto taps) {
        boxes[i * across + x] = taps_of_tile<taps>(sizes, map, rows, left, right);
      });
    }
  });
  return boxes;
}

template <class Real>
void image_gradient(const WarpInputs<Real>& in, const WarpGradients<Real>& to,
                    const std::vector<Homography>& maps) {
  const WarpSizes& sizes = in.sizes;
  if (sizes.width == 0) return;
  const std::vector<Box> boxes_of_tiles = find_boxes(sizes, maps);
  const int64_t strips = divide_up(sizes.out_height, kTileHeight);
  // The sums of a tile stay in the cache. Its channels share the search for the taps.
  constexpr int64_t kSums = 1 << 15, kAcross = 256;
  const int64_t channels = std::clamp<int64_t>(sizes.channels, 1, ImageTile<Real>::kChannels);
  const int64_t height = kSums / (kAcross * channels);
  const int64_t across = divide_up(sizes.width, kAcross), down = divide_up(sizes.height, height);
  const int64_t groups = divide_up(sizes.channels, channels), tiles = across * down;
  const int64_t out_across = divide_up(sizes.out_width, kTileWidth);
  const double reach = reach_of(sizes);
  for_each(sizes.image_batch * groups * tiles, 1, [&](int64_t i) {
    const int64_t image = i / (groups * tiles), channel = i / tiles % groups * channels;
    const int64_t top = i % tiles / across * height, left = i % across * kAcross;
    ImageTile<Real> tile{in,
                         to,
                         top,
                         left,
                         std::min(height, sizes.height - top),
                         std::min(kAcross, sizes.width - left),
                         channel,
                         std::min(channels, sizes.channels - channel)};
    const double left_end = static_cast<double>(left), top_end = static_cast<double>(top);
    const double right_end = static_cast<double>(left + tile.width);
    const double bottom_end = static_cast<double>(top + tile.height);
    // The sources that have a tap in the tile. For kNearest, the taps may also be beside it.
    const Box box{left_end - reach, right_end - 1 + reach, top_end - reach, bottom_end - 1 + reach};
    const Box own{left_end, right_end - 1, top_end, bottom_end - 1};
    for (int64_t n = image; n < sizes.batch; n += sizes.image_batch)
      for (int64_t strip = 0; strip < strips; ++strip) {
        const Box* boxes = boxes_of_tiles.data() + (n * strips + strip) * out_across;
        if (std::none_of(boxes, boxes + out_across, [&](const Box& b) { return meet(b, own); }))
          continue;
        const Homography& map = map_of(maps, n);
        int64_t v = strip * kTileHeight;
        for (const Row& row : rows_of_strip(map, v, sizes)) {
          tile.add_row(map, row, box, boxes, own, to.grad + output_offset(sizes, n, channel, v++));
        }
      }
    tile.store(image);
  });
}

}  // namespace

template <class Real>
void warp_perspective_backward(const WarpInputs<Real>& in, const WarpGradients<Real>& to) {
  const std::vector<Homography> maps = make_homographies(in);
  if (to.grad_warp) matrix_gradient(in, to, maps);
  if (to.grad_image) image_gradient(in, to, maps);
}

void warp_perspective_slope(const WarpInputs<double>& in, double* out) {
  const WarpSizes& sizes = in.sizes;
  const std::vector<Homography> maps = make_homographies(in);
  const int64_t strips = divide_up(sizes.out_height, kTileHeight);
  std::fill_n(out, output_offset(sizes, sizes.batch, 0, 0), 0);
  for_each(sizes.batch * strips, 1, [&](int64_t i) {
    const Homography& map = map_of(maps, i / strips);
    if (!map.valid) return;
    with_taps(sizes, [&](auto taps) {
      ResultSlope<taps> strip{in, out, map, i / strips};
      visit_strip(strip, i % strips * kTileHeight);
    });
  });
}

template void warp_perspective_backward(const WarpInputs<float>&, const WarpGradients<float>&);
template void warp_perspective_backward(const WarpInputs<double>&, const WarpGradients<double>&);

}  // namespace calcops::ops::warp_perspective
