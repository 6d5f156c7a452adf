// CPU kernels of warp_perspective: the derivatives.
//
// The derivatives for the matrix walk through the destination as the result does. The gradient is a
// sum over the pixels; forward mode gives a number for each pixel. The gradient for the image is
// computed tile by tile of the image. A tile takes the rows of the destination one after the other,
// and adds the pixels that have taps in the tile. The sums are in float64. Their order depends on
// sizes and matrices alone.
#include <limits>

#include "memory.h"
#include "warp_perspective/warp_perspective_rows.h"

namespace calcops::ops::warp_perspective {
namespace {

// ---- the matrix ---------------------------------------------------------------------------------

// A sum in eight lanes, so that it can be vectorised.
class Sum {
 public:
  void add(const double* values, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
      for (int64_t k = 0; k < kLanes; ++k) lanes_[k] += values[i + k];
    for (int64_t k = 0; i < count; ++i, ++k) lanes_[k] += values[i];
  }
  double total() const {
    double sum = 0;
    for (double lane : lanes_) sum += lane;
    return sum;
  }

 private:
  static constexpr int64_t kLanes = 8;
  double lanes_[kLanes] = {};
};

// The sources and the taps of a run of pixels that are inside.
struct Positions : Sources {
  Taps<double> taps;
  double reciprocal[kTileWidth];  // 1 / W

  void locate(const double* m, const RowStart& row, const int64_t* stride, int64_t u,
              int64_t count) {
    Sources::locate(m, row, u, count);
    taps.locate(*this, false, {stride[2], stride[3], 0}, 0, count);
    const double first = static_cast<double>(u);
    for (int64_t i = 0; i < count; ++i) reciprocal[i] = 1 / fma(m[6], first + kColumns.u[i], row.w);
  }

  // The same as slope_of_taps() of 4 x 4 taps, in the same order. The four columns of a pixel are a
  // vector.
  template <class Real>
  [[gnu::noinline]] void cubic_slopes(const Plane<Real>& plane, int64_t count, double* along_x,
                                      double* along_y) const {
    typedef double Four __attribute__((vector_size(4 * sizeof(double))));
    double of_x[2][4][kTileWidth], of_y[2][4][kTileWidth];  // the weights, their derivatives
    for (int i = 0; i < static_cast<int>(count); ++i) {
      double weight[4], slope[4];
      const auto store = [&](double fraction, double (&to)[2][4][kTileWidth]) {
        weights_of(fraction, weight);
        slopes_of(fraction, slope);
        for (int k = 0; k < 4; ++k) {
          to[0][k][i] = weight[k];
          to[1][k][i] = slope[k];
        }
      };
      store(taps.weight_x[i], of_x);
      store(taps.weight_y[i], of_y);
    }
    double down[2][kTileWidth][4];
    for (int64_t i = 0; i < count; ++i) {
      const Real* from = plane.data + taps.offset[i] - plane.stride_y - plane.stride_x;
      Four sum[2] = {};
      for (int y = 0; y < 4; ++y, from += plane.stride_y) {
        const Four row = read_four<Four>(from, plane.stride_x);
        for (int which = 0; which < 2; ++which) {
          const Four weight = of_y[which][y][i] - Four{};
          sum[which] = multiply_add(weight, weight != 0 ? row : Four{}, sum[which]);
        }
      }
      std::memcpy(down[0][i], &sum[0], sizeof sum[0]);
      std::memcpy(down[1][i], &sum[1], sizeof sum[1]);
    }
    const auto across = [&](const double (&of_x)[4][kTileWidth],
                            const double (&down)[kTileWidth][4], double* along) {
      for (int64_t i = 0; i < count; ++i) {
        double sum = 0;
        for (int x = 0; x < 4; ++x) {
          const double weight = of_x[x][i];
          sum = fma(weight, weight != 0 ? down[i][x] : 0, sum);
        }
        along[i] = sum;
      }
    };
    across(of_x[1], down[0], along_x);
    across(of_x[0], down[1], along_y);
  }

  // Call visit(i, slope) with the slope of the plane at each pixel.
  template <class Real, class Visit>
  void slopes(const Plane<Real>& plane, bool is_cubic, int64_t count, const Visit& visit) const {
    if (is_cubic) {
      double along_x[kTileWidth], along_y[kTileWidth];
      cubic_slopes(plane, count, along_x, along_y);
      for (int64_t i = 0; i < count; ++i) visit(i, Slope{along_x[i], along_y[i]});
      return;
    }
    Pairs<Real> pairs;
    pairs.read(plane, taps.offset, count);
    for (int64_t i = 0; i < count; ++i)
      visit(i, slope_of_taps(pairs.above[2 * i], pairs.above[2 * i + 1], pairs.below[2 * i],
                             pairs.below[2 * i + 1], taps.weight_x[i], taps.weight_y[i]));
  }
};

// The share of a strip of rows in the gradient for m.
template <class Real>
struct MatrixGradient {
  const WarpInputs<Real>& in;
  const WarpGradients<Real>& to;
  const Homography& map;
  int64_t n;
  const bool is_cubic = in.sizes.interpolation == Interpolation::kCubic;
  double grad_m[9] = {};
  Positions positions;

  MatrixGradient(const WarpInputs<Real>& in, const WarpGradients<Real>& to, const Homography& map,
                 int64_t n)
      : in(in), to(to), map(map), n(n) {}

  template <int kTaps>
  [[gnu::noinline]] void add_edge(const RowStart& row, int64_t v, int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      Source source;
      Cell<kTaps> cell{};
      if (!find_cell(map, row, u, in.sizes, source, cell)) continue;
      double gx = 0, gy = 0;
      for (int64_t c = 0; c < in.sizes.channels; ++c) {
        const double g = to.grad[output_offset(in.sizes, n, c, v) + u];
        const Slope slope = sample_slope(make_plane(in, n, c, in.border_value[c]), cell);
        gx = fma(g, slope.x, gx);
        gy = fma(g, slope.y, gy);
      }
      project_backward(source, static_cast<double>(u), static_cast<double>(v), gx, gy, grad_m);
    }
  }

  void add_inside(const RowStart& row, int64_t v, int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    positions.locate(map.m, row, in.image_stride, begin, count);
    double grad_x[kTileWidth] = {}, grad_y[kTileWidth] = {};
    for (int64_t c = 0; c < in.sizes.channels; ++c) {
      const Real* grad = to.grad + output_offset(in.sizes, n, c, v) + begin;
      positions.slopes(make_plane(in, n, c, in.border_value[c]), is_cubic, count,
                       [&](int64_t i, const Slope& slope) {
                         grad_x[i] = fma(grad[i], slope.x, grad_x[i]);
                         grad_y[i] = fma(grad[i], slope.y, grad_y[i]);
                       });
    }
    // As project_backward: row k of m receives g[k] times u, v and 1.
    double g[3][kTileWidth], along_u[3][kTileWidth];
    const double first = static_cast<double>(begin);
    for (int i = 0; i < static_cast<int>(count); ++i) {
      g[0][i] = grad_x[i] * positions.reciprocal[i];
      g[1][i] = grad_y[i] * positions.reciprocal[i];
      g[2][i] = -fma(g[0][i], positions.x[i], g[1][i] * positions.y[i]);
      for (int k = 0; k < 3; ++k) along_u[k][i] = g[k][i] * (first + i);
    }
    for (int k = 0; k < 3; ++k) {
      Sum sum, sum_u;
      sum.add(g[k], count);
      sum_u.add(along_u[k], count);
      grad_m[3 * k] += sum_u.total();
      grad_m[3 * k + 1] = fma(sum.total(), static_cast<double>(v), grad_m[3 * k + 1]);
      grad_m[3 * k + 2] += sum.total();
    }
  }
};

// Call strip.add_inside(row, v, begin, end) and strip.add_edge<taps>(...) for the pixels of a strip
// of rows, from `top` on, that may have a source.
template <class Strip>
void visit_strip(Strip& strip, const WarpSizes& sizes, int64_t top) {
  const int64_t bottom = std::min(top + kTileHeight, sizes.out_height);
  const bool cubic = sizes.interpolation == Interpolation::kCubic;
  RowStart rows[kTileHeight];
  Cut cuts[kTileHeight];
  for (int64_t v = top; v < bottom; ++v) {
    rows[v - top] = row_of(strip.map.m, static_cast<double>(v));
    cuts[v - top] = cut_row(strip.map, rows[v - top], sizes);
  }
  for (int64_t left = 0; left < sizes.out_width; left += kTileWidth)
    for (int64_t v = top; v < bottom; ++v)
      cuts[v - top].visit(left, std::min(left + kTileWidth, sizes.out_width),
                          [&](Part part, int64_t begin, int64_t end) {
                            const RowStart& row = rows[v - top];
                            if (part == Part::kInside)
                              strip.add_inside(row, v, begin, end);
                            else if (part == Part::kEdge)
                              cubic ? strip.template add_edge<4>(row, v, begin, end)
                                    : strip.template add_edge<2>(row, v, begin, end);
                          });
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
    MatrixGradient<Real> strip(in, to, map_of(maps, n), n);
    if (!strip.map.valid) return;
    visit_strip(strip, sizes, i % strips * kTileHeight);
    std::copy_n(strip.grad_m, 9, parts.data() + 9 * i);
  });
  for (int64_t w = 0; w < sizes.warp_batch; ++w) {
    double grad_m[9] = {};
    for (int64_t n = w; n < sizes.batch; n += sizes.warp_batch)
      for (int64_t i = n * strips; i < (n + 1) * strips; ++i)
        for (int k = 0; k < 9; ++k) grad_m[k] += parts[9 * i + k];
    homography_backward(maps[w], grad_m, sizes.inverse_map, to.grad_warp + 9 * w);
  }
}

// The tangent of a strip of rows of the result. `moved` is the tangent of m. The caller has set the
// rows to 0, which remains in pixels without a source.
template <class Real>
struct ResultTangent {
  const WarpInputs<Real>& in;
  Real* out;
  const Homography& map;
  double moved[9];
  int64_t n;
  const bool is_cubic = in.sizes.interpolation == Interpolation::kCubic;
  Positions positions;

  ResultTangent(const WarpInputs<Real>& in, const WarpTangent<Real>& tangent, const Homography& map,
                int64_t n)
      : in(in), out(tangent.out), map(map), n(n) {
    const double* warp = tangent.warp + (in.sizes.warp_batch == 1 ? 0 : 9 * n);
    homography_tangent(map, warp, in.sizes.inverse_map, moved);
  }

  template <int kTaps>
  [[gnu::noinline]] void add_edge(const RowStart& row, int64_t v, int64_t begin, int64_t end) {
    const RowStart of_moved = row_of(moved, static_cast<double>(v));
    for (int64_t u = begin; u < end; ++u) {
      Source source;
      Cell<kTaps> cell{};
      if (!find_cell(map, row, u, in.sizes, source, cell)) continue;
      const Slope motion =
          motion_of(moved, of_moved, source.x, source.y, 1 / source.w, static_cast<double>(u));
      for (int64_t c = 0; c < in.sizes.channels; ++c) {
        const Slope slope = sample_slope(make_plane(in, n, c, in.border_value[c]), cell);
        out[output_offset(in.sizes, n, c, v) + u] = along(slope, motion);
      }
    }
  }

  void add_inside(const RowStart& row, int64_t v, int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    positions.locate(map.m, row, in.image_stride, begin, count);
    const RowStart of_moved = row_of(moved, static_cast<double>(v));
    double motion_x[kTileWidth], motion_y[kTileWidth];
    const double first = static_cast<double>(begin);
    for (int i = 0; i < static_cast<int>(count); ++i) {
      const Slope motion = motion_of(moved, of_moved, positions.x[i], positions.y[i],
                                     positions.reciprocal[i], first + i);
      motion_x[i] = motion.x;
      motion_y[i] = motion.y;
    }
    for (int64_t c = 0; c < in.sizes.channels; ++c) {
      Real* to = out + output_offset(in.sizes, n, c, v) + begin;
      positions.slopes(
          make_plane(in, n, c, in.border_value[c]), is_cubic, count,
          [&](int64_t i, const Slope& slope) { to[i] = along(slope, {motion_x[i], motion_y[i]}); });
    }
  }

 private:
  static Real along(const Slope& slope, const Slope& motion) {
    return static_cast<Real>(fma(slope.x, motion.x, slope.y * motion.y));
  }
};

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

bool is_in(const Box& box, const Source& source) {
  return source.x >= box.left && source.x <= box.right && source.y >= box.top &&
         source.y <= box.bottom;
}

inline void add_two(const double* values, double* sums) {
  typedef double Doubles2 __attribute__((vector_size(16)));
  Doubles2 a, b;
  std::memcpy(&a, values, sizeof a);
  std::memcpy(&b, sums, sizeof b);
  b += a;
  std::memcpy(sums, &b, sizeof b);
}

// A tile of the gradient for one image, for some of its channels. It has a margin of rows and
// columns that belong to other tiles, so that pixels near its edge need no test.
template <class Real>
struct ImageTile {
  static constexpr int64_t kChannels = 4;
  const WarpInputs<Real>& in;
  const WarpGradients<Real>& to;
  int64_t top, left, height, width, channel, channels;
  int64_t margin, pitch, plane;
  std::vector<double> sums;  // [channels, height + 2 margin, width + 2 margin]
  Sources sources;
  Taps<double> taps;

  double* sum_at(int64_t c, int64_t y, int64_t x) {
    return sums.data() + c * plane + (y - top + margin) * pitch + x - left + margin;
  }

  template <int kTaps>
  void add_cell(const Cell<kTaps>& cell, const Real* grad) {
    double weight_x[kTaps], weight_y[kTaps];
    weights_of(cell.x.fraction, weight_x);
    weights_of(cell.y.fraction, weight_y);
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

  // Add pixels one by one: only those whose source is in plain_box(), or only the others.
  [[gnu::noinline]] void add_edge(const Homography& map, const RowStart& row, const Real* grad,
                                  Interval pixels, bool is_plain) {
    if (in.sizes.interpolation == Interpolation::kCubic)
      add_cells<4>(map, row, grad, pixels, is_plain);
    else
      add_cells<2>(map, row, grad, pixels, is_plain);
  }

  template <int kTaps>
  void add_cells(const Homography& map, const RowStart& row, const Real* grad, Interval pixels,
                 bool is_plain) {
    const Box box = plain_box(in.sizes);
    for (int64_t u = pixels.begin; u < pixels.end; ++u) {
      Source source;
      Cell<kTaps> cell{};
      if (find_cell(map, row, u, in.sizes, source, cell) && is_in(box, source) == is_plain)
        add_cell(cell, grad + u);
    }
  }

  void add_cubic(const Real* grad, int64_t count, double* to) {
    for (int64_t i = 0; i < count; ++i) {
      double weight_x[4], weight_y[4];
      weights_of(taps.weight_x[i], weight_x);
      weights_of(taps.weight_y[i], weight_y);
      double* sum = to + taps.offset[i] - pitch - 1;
      for (int y = 0; y < 4; ++y, sum += pitch) {
        const double along_y = weight_y[y] != 0 ? weight_y[y] * grad[i] : 0;
        for (int x = 0; x < 4; ++x) sum[x] += weight_x[x] != 0 ? weight_x[x] * along_y : 0;
      }
    }
  }

  // Add pixels whose taps are all in the tile or its margin.
  void add_inside(const Homography& map, const RowStart& row, const Real* grad, Interval pixels) {
    const bool is_nearest = in.sizes.interpolation == Interpolation::kNearest;
    double above[2 * kTileWidth], below[2 * kTileWidth];
    const Strides strides(pitch, 1, (top - margin) * pitch + left - margin);
    for (int64_t u = pixels.begin; u < pixels.end; u += kTileWidth) {
      const int64_t count = std::min(kTileWidth, pixels.end - u);
      sources.locate(map.m, row, u, count);
      taps.locate(sources, is_nearest, strides, 0, count);
      for (int64_t channel = 0; channel < channels; ++channel) {
        const Real* g = grad + channel * in.sizes.out_height * in.sizes.out_width + u;
        double* to = sums.data() + channel * plane;
        if (is_nearest) {
          for (int64_t i = 0; i < count; ++i) to[taps.offset[i]] += g[i];
          continue;
        }
        if (in.sizes.interpolation == Interpolation::kCubic) {
          add_cubic(g, count, to);
          continue;
        }
        // A tap of weight zero receives nothing, even if the gradient is NaN.
        for (int64_t i = 0; i < count; ++i) {
          const double x = taps.weight_x[i], y = taps.weight_y[i], value = g[i];
          const double upper = value * (1 - y), lower = y > 0 ? value * y : 0;
          above[2 * i] = upper * (1 - x);
          above[2 * i + 1] = x > 0 ? upper * x : 0;
          below[2 * i] = lower * (1 - x);
          below[2 * i + 1] = x > 0 ? lower * x : 0;
        }
        // Neighbours often share a tap, and each addition to it waits for the one before. So pixels
        // that follow each other here are kStep apart.
        constexpr int64_t kStep = 16;
        for (int64_t first = 0; first < std::min(kStep, count); ++first)
          for (int64_t i = first; i < count; i += kStep) {
            double* sum = to + taps.offset[i];
            add_two(above + 2 * i, sum);
            add_two(below + 2 * i, sum + pitch);
          }
      }
    }
  }

  // Add the pixels of a row whose source is in the box.
  [[gnu::noinline]] void add_row(const Homography& map, int64_t v, const Box& box,
                                 const Real* grad) {
    const RowStart row = row_of(map.m, static_cast<double>(v));
    const RowCutter cutter(map.m, row, in.sizes.out_width);
    int64_t done = 0;  // a pixel at the horizon may be possible on both sides, but is added once
    for (int side = 0; side < cutter.sides(); ++side) {
      Interval all = cutter.in_box(box, side, Doubt::kPossible);
      Interval sure = cutter.in_box(box, side, Doubt::kSure);
      all.begin = std::max(all.begin, done);
      if (all.empty()) continue;
      sure.begin = std::max(sure.begin, all.begin);
      if (sure.empty()) sure = {all.begin, all.begin};
      add_edge(map, row, grad, {all.begin, sure.begin}, true);
      add_inside(map, row, grad, sure);
      add_edge(map, row, grad, {sure.end, all.end}, true);
      done = all.end;
    }
  }

  // Add the pixels of a row that a border mode maps back into the image.
  void add_folded(const Homography& map, int64_t v, const std::vector<Box>& tiles, int64_t strip,
                  const Box& own, const Real* grad) {
    const RowStart row = row_of(map.m, static_cast<double>(v));
    const Cut cut = cut_row(map, row, in.sizes);
    const int64_t across = divide_up(in.sizes.out_width, kTileWidth);
    for (int64_t x = 0; x < across; ++x)
      if (meet(tiles[strip * across + x], own))
        cut.visit(x * kTileWidth, std::min((x + 1) * kTileWidth, in.sizes.out_width),
                  [&](Part part, int64_t begin, int64_t end) {
                    if (part == Part::kEdge) add_edge(map, row, grad, {begin, end}, false);
                  });
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

// The boxes of the image that parts of the destination touch. A tile of the image selects by them
// the rows that it adds. `rows` and `row_strips` (of kTileHeight rows) are around the sources
// in plain_box(). `tiles` and `tile_strips` are around the taps of all other sources.
struct Touches {
  std::vector<Box> rows, row_strips, tiles, tile_strips;
};

// Return a box around the taps of a row's sources in plain_box().
Box plain_sources(const WarpSizes& sizes, const Homography& map, const RowStart& row) {
  const RowCutter cutter(map.m, row, sizes.out_width);
  Box box = kNowhere;
  const double reach = reach_of(sizes);
  for (int side = 0; side < cutter.sides(); ++side) {
    const Interval all = cutter.in_box(plain_box(sizes), side, Doubt::kPossible);
    const Interval sure = cutter.side(side, Doubt::kSure);
    // Where W surely keeps its sign, x and y only rise or only fall along a row. There the first
    // and the last pixel are enough.
    const int64_t begin = std::max(all.begin, sure.begin), last = std::min(all.end, sure.end) - 1;
    for (int64_t u = all.begin; u < all.end; u = begin <= u && u < last ? last : u + 1) {
      const Source source = project(map.m, row, static_cast<double>(u));
      if (fabs(source.x) <= DBL_MAX && fabs(source.y) <= DBL_MAX)
        box = around(box, {source.x - reach, source.x + reach, source.y - reach, source.y + reach});
    }
  }
  return box;
}

// Return a box around the taps of the row's other sources, for the pixels left <= u < right.
template <int kTaps>
Box folded_taps(const WarpSizes& sizes, const Homography& map, const RowStart& row, const Cut& cut,
                int64_t left, int64_t right) {
  const Box plain = plain_box(sizes);
  Box box = kNowhere;
  cut.visit(left, right, [&](Part part, int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end && part == Part::kEdge; ++u) {
      Source source;
      Cell<kTaps> cell{};
      if (!find_cell(map, row, u, sizes, source, cell) || is_in(plain, source)) continue;
      for (int k = 0; k < kTaps; ++k) {
        const double x = static_cast<double>(cell.x.tap[k]), y = static_cast<double>(cell.y.tap[k]);
        box = around(box, {x, x, y, y});
      }
    }
  });
  return box;
}

Touches find_touches(const WarpSizes& sizes, const std::vector<Homography>& maps) {
  const int64_t strips = divide_up(sizes.out_height, kTileHeight);
  const int64_t across =
      sizes.border == Border::kConstant ? 0 : divide_up(sizes.out_width, kTileWidth);
  const auto folded =
      sizes.interpolation == Interpolation::kCubic ? folded_taps<4> : folded_taps<2>;
  Touches touches;
  touches.rows.resize(sizes.batch * sizes.out_height, kNowhere);
  touches.row_strips.resize(sizes.batch * strips, kNowhere);
  touches.tiles.resize(sizes.batch * strips * across, kNowhere);
  touches.tile_strips.resize(sizes.batch * strips, kNowhere);
  for_each(sizes.batch * strips, 1, [&](int64_t i) {
    const int64_t n = i / strips, top = i % strips * kTileHeight;
    const Homography& map = map_of(maps, n);
    if (!map.valid) return;
    for (int64_t v = top; v < std::min(top + kTileHeight, sizes.out_height); ++v) {
      const RowStart row = row_of(map.m, static_cast<double>(v));
      Box& box = touches.rows[n * sizes.out_height + v] = plain_sources(sizes, map, row);
      touches.row_strips[i] = around(touches.row_strips[i], box);
      if (across == 0) continue;
      const Cut cut = cut_row(map, row, sizes);
      for (int64_t x = 0; x < across; ++x) {
        Box& tile = touches.tiles[i * across + x];
        tile = around(tile, folded(sizes, map, row, cut, x * kTileWidth,
                                   std::min((x + 1) * kTileWidth, sizes.out_width)));
        touches.tile_strips[i] = around(touches.tile_strips[i], tile);
      }
    }
  });
  return touches;
}

template <class Real>
void image_gradient(const WarpInputs<Real>& in, const WarpGradients<Real>& to,
                    const std::vector<Homography>& maps) {
  const WarpSizes& sizes = in.sizes;
  if (sizes.width == 0) return;
  const Touches touches = find_touches(sizes, maps);
  const int64_t strips = divide_up(sizes.out_height, kTileHeight);
  // The sums of a tile stay in the cache. Its channels share the search for the taps.
  constexpr int64_t kSums = 1 << 15, kColumns = 256;
  const int64_t channels = std::clamp<int64_t>(sizes.channels, 1, ImageTile<Real>::kChannels);
  const int64_t height = kSums / (kColumns * channels);
  const int64_t across = divide_up(sizes.width, kColumns), down = divide_up(sizes.height, height);
  const int64_t groups = divide_up(sizes.channels, channels), tiles = across * down;
  const Box plain = plain_box(sizes);
  const double reach = reach_of(sizes);
  for_each(sizes.image_batch * groups * tiles, 1, [&](int64_t i) {
    const int64_t image = i / (groups * tiles), channel = i / tiles % groups * channels;
    const int64_t top = i % tiles / across * height, left = i % across * kColumns;
    ImageTile<Real> tile{in,
                         to,
                         top,
                         left,
                         std::min(height, sizes.height - top),
                         std::min(kColumns, sizes.width - left),
                         channel,
                         std::min(channels, sizes.channels - channel),
                         static_cast<int64_t>(2 * reach) - 1,
                         {},
                         {},
                         {},
                         {},
                         {}};
    tile.pitch = tile.width + 2 * tile.margin;
    tile.plane = tile.pitch * (tile.height + 2 * tile.margin);
    tile.sums.resize(tile.channels * tile.plane);
    const double left_end = static_cast<double>(left), top_end = static_cast<double>(top);
    const double right_end = static_cast<double>(left + tile.width);
    const double bottom_end = static_cast<double>(top + tile.height);
    // The sources that have a tap in the tile. For kNearest, the taps may also be beside it.
    const Box box{
        std::max(left_end - reach, plain.left), std::min(right_end - 1 + reach, plain.right),
        std::max(top_end - reach, plain.top), std::min(bottom_end - 1 + reach, plain.bottom)};
    const Box own{left_end, right_end - 1, top_end, bottom_end - 1};
    for (int64_t n = image; n < sizes.batch; n += sizes.image_batch)
      for (int64_t strip = 0; strip < strips; ++strip) {
        const bool has_plain = meet(touches.row_strips[n * strips + strip], box);
        const bool has_folded = meet(touches.tile_strips[n * strips + strip], own);
        if (!has_plain && !has_folded) continue;
        const int64_t end = std::min((strip + 1) * kTileHeight, sizes.out_height);
        for (int64_t v = strip * kTileHeight; v < end; ++v) {
          const Real* grad = to.grad + output_offset(sizes, n, channel, v);
          if (has_plain && meet(touches.rows[n * sizes.out_height + v], box))
            tile.add_row(map_of(maps, n), v, box, grad);
          if (has_folded)
            tile.add_folded(map_of(maps, n), v, touches.tiles, (n * strips + strip), own, grad);
        }
      }
    tile.store(image);
  });
}

}  // namespace

template <class Real>
void warp_perspective_backward_cpu(const WarpInputs<Real>& in, const WarpGradients<Real>& to) {
  const std::vector<Homography> maps = make_homographies(in);
  if (to.grad_warp) matrix_gradient(in, to, maps);
  if (to.grad_image) image_gradient(in, to, maps);
}

template <class Real>
void warp_perspective_tangent_cpu(const WarpInputs<Real>& in, const WarpTangent<Real>& tangent) {
  const WarpSizes& sizes = in.sizes;
  const std::vector<Homography> maps = make_homographies(in);
  const int64_t strips = divide_up(sizes.out_height, kTileHeight);
  const bool moves = sizes.interpolation != Interpolation::kNearest;
  prefer_large_pages(tangent.out, output_offset(sizes, sizes.batch, 0, 0));
  for_each(sizes.batch * strips, 1, [&](int64_t i) {
    const int64_t n = i / strips, top = i % strips * kTileHeight;
    const int64_t rows = std::min(kTileHeight, sizes.out_height - top);
    for (int64_t c = 0; c < sizes.channels; ++c)
      std::fill_n(tangent.out + output_offset(sizes, n, c, top), rows * sizes.out_width, Real(0));
    ResultTangent<Real> strip(in, tangent, map_of(maps, n), n);
    if (moves && strip.map.valid) visit_strip(strip, sizes, top);
  });
}

template void warp_perspective_backward_cpu(const WarpInputs<float>&, const WarpGradients<float>&);
template void warp_perspective_backward_cpu(const WarpInputs<double>&,
                                            const WarpGradients<double>&);
template void warp_perspective_tangent_cpu(const WarpInputs<float>&, const WarpTangent<float>&);
template void warp_perspective_tangent_cpu(const WarpInputs<double>&, const WarpTangent<double>&);

}  // namespace calcops::ops::warp_perspective
