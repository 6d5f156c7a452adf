// CUDA kernels of warp_perspective.
//
// Result: a thread computes a destination pixel, for up to 16 channels.
// Gradient for the image: a block owns a tile of the image and visits the tiles of the destination
// that touch it, in a fixed order. Each thread adds to its own pixel, in the order of the
// destination's pixels, so the sums need no atomics. Each tile of the destination has a box around
// its taps, 32 boxes have a larger box, and so on. A block finds its tiles by testing some dozens
// of boxes. If all taps are in one tile, its block adds the whole destination.
// Gradient for warp: a tree sums each tile's pixels, then another one all tiles.
#include <algorithm>
#include <limits>

#include "warp_perspective/warp_perspective.h"
#include "warp_perspective/warp_perspective_math.h"

namespace calcops::ops::warp_perspective {
namespace {

constexpr int kTileWidth = 32, kTileHeight = 8, kThreads = kTileWidth * kTileHeight;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffff;

// The tiles of an image or a result. A tile has one pixel for each thread of a block.
struct Tiles {
  int64_t across, down, count;

  __host__ __device__ Tiles(int64_t height, int64_t width)
      : across(divide_up(width, kTileWidth)),
        down(divide_up(height, kTileHeight)),
        count(across * down) {}
};

// If there are many tiles, a block computes a run of them, so that it seldom needs a new
// homography.
struct Runs {
  int64_t tiles, each, blocks;

  explicit Runs(int64_t tiles)
      : tiles(tiles),
        each(std::clamp<int64_t>(tiles / 8192, 1, 16)),
        blocks(divide_up(tiles, each)) {}
};

// Call visit(n, x, y) for the tiles of a run; x and y count tiles.
template <class Visit>
__device__ inline void visit_run(const Runs& runs, int64_t run, const Tiles& tiles, Visit visit) {
  const int64_t first = run * runs.each;
  int64_t n = first / tiles.count, y = first % tiles.count / tiles.across, x = first % tiles.across;
  for (int64_t k = 0; k < runs.each && first + k < runs.tiles; ++k) {
    visit(n, x, y);
    if (++x < tiles.across) continue;
    x = 0;
    if (++y < tiles.down) continue;
    y = 0;
    ++n;
  }
}

__device__ inline int64_t thread_x() { return threadIdx.x % kTileWidth; }
__device__ inline int64_t thread_y() { return threadIdx.x / kTileWidth; }

// The channels of one launch with their border values, as many as fit into kernel arguments.
struct Channels {
  static constexpr int kMost = 256;
  int64_t first, count;
  double border[kMost];
};

template <class Pixel>
Channels channels_from(const WarpInputs<Pixel>& in, int64_t first) {
  Channels channels{first, std::min<int64_t>(in.sizes.channels - first, Channels::kMost), {}};
  for (int64_t c = 0; c < channels.count; ++c) channels.border[c] = in.border_value[first + c];
  return channels;
}

// Not inlined, so that the kernels do not need its registers, which only one thread uses.
__device__ __attribute__((noinline)) void prepare(const double* warp, bool inverse_map,
                                                  Homography* map) {
  *map = make_homography(warp, inverse_map);
}

// The homography of an image, in shared memory for all threads of the block.
class SharedHomography {
 public:
  template <class Pixel>
  __device__ const Homography& of(const WarpInputs<Pixel>& in, int64_t n) {
    const int64_t matrix = in.sizes.warp_batch == 1 ? 0 : n;
    if (matrix == loaded_) return room_;
    __syncthreads();
    if (threadIdx.x == 0) prepare(in.warp + 9 * matrix, in.sizes.inverse_map, &room_);
    __syncthreads();
    loaded_ = matrix;
    return room_;
  }

  __device__ explicit SharedHomography(Homography& room) : room_(room) {}

 private:
  Homography& room_;
  int64_t loaded_ = -1;
};

// Write a pixel's source and taps. `border` is sizes.border, as a constant if the caller has one.
template <int kTaps>
__device__ inline bool find_cell(const WarpSizes& sizes, Border border, const Homography& map,
                                 int64_t u, int64_t v, Source& source, Cell<kTaps>& cell) {
  if (!map.valid || sizes.height == 0 || sizes.width == 0) return false;
  if (u >= sizes.out_width || v >= sizes.out_height) return false;
  source = project(map.m, static_cast<double>(u), static_cast<double>(v));
  return locate(source, sizes, border, cell);
}

constexpr int64_t kChannelsPerThread = 16;

// kBorder is kConstant, kReplicate, or kReflect, which stands for all other border modes.
template <Border kBorder, int kTaps, class Pixel>
__global__ void __launch_bounds__(kThreads, kTaps == 2 ? 4 : 2)
    forward_kernel(WarpInputs<Pixel> in, Pixel* out, Channels channels, Runs runs) {
  __shared__ Homography room;
  SharedHomography shared(room);
  const WarpSizes& sizes = in.sizes;
  const Border border = kBorder == Border::kReflect ? sizes.border : kBorder;
  const int64_t begin = blockIdx.x / runs.blocks * kChannelsPerThread;
  const int64_t end =
      begin + kChannelsPerThread < channels.count ? begin + kChannelsPerThread : channels.count;
  const Tiles tiles(sizes.out_height, sizes.out_width);
  visit_run(runs, blockIdx.x % runs.blocks, tiles, [&](int64_t n, int64_t x, int64_t y) {
    const int64_t u = x * kTileWidth + thread_x(), v = y * kTileHeight + thread_y();
    const Homography& map = shared.of(in, n);
    Source source;
    Cell<kTaps> cell;
    const bool has_source = find_cell(sizes, border, map, u, v, source, cell);
    if (u >= sizes.out_width || v >= sizes.out_height) return;
    if (!has_source && border == Border::kTransparent) return;
    for (int64_t c = begin; c < end; ++c) {
      const Plane<Pixel> plane = make_plane(in, n, channels.first + c, channels.border[c]);
      out[output_offset(sizes, n, channels.first + c, v) + u] =
          has_source ? sample(plane, cell) : plane.border;
    }
  });
}

// ---- the backward -------------------------------------------------------------------------------

// A box of the image's pixels; empty if last < first.
struct Box {
  int64_t first_x, last_x, first_y, last_y;

  __device__ bool meets(const Box& other) const {
    return first_x <= other.last_x && last_x >= other.first_x && first_y <= other.last_y &&
           last_y >= other.first_y;
  }
};
constexpr int64_t kFarthest = std::numeric_limits<int64_t>::max();

__device__ inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
__device__ inline int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

__device__ inline Box around(const Box& a, const Box& b) {
  return {least(a.first_x, b.first_x), most(a.last_x, b.last_x), least(a.first_y, b.first_y),
          most(a.last_y, b.last_y)};
}

// Return the box around the boxes of all lanes of a warp.
__device__ inline Box around_warp(Box box) {
  for (int lanes = 16; lanes > 0; lanes /= 2)
    box = around(box, {__shfl_xor_sync(kAllLanes, box.first_x, lanes),
                       __shfl_xor_sync(kAllLanes, box.last_x, lanes),
                       __shfl_xor_sync(kAllLanes, box.first_y, lanes),
                       __shfl_xor_sync(kAllLanes, box.last_y, lanes)});
  return box;
}

// The boxes of one image of the batch. Level 0 has a box for each tile of the destination, and each
// further level a box for 4 x 8 boxes of the level below.
struct Pyramid {
  static constexpr int kLevels = 3, kAcross = 4, kDown = 8;
  int64_t across[kLevels], down[kLevels], begin[kLevels], count;

  __host__ __device__ Pyramid(int64_t out_height, int64_t out_width) : count(0) {
    const Tiles tiles(out_height, out_width);
    for (int level = 0; level < kLevels; ++level) {
      across[level] = level == 0 ? tiles.across : divide_up(across[level - 1], kAcross);
      down[level] = level == 0 ? tiles.down : divide_up(down[level - 1], kDown);
      begin[level] = count;
      count += across[level] * down[level];
    }
  }

  // Return the box at (x, y) of a level; outside, an empty one.
  __device__ Box at(const Box* boxes, int level, int64_t x, int64_t y) const {
    if (x >= across[level] || y >= down[level])
      return {kFarthest, -kFarthest, kFarthest, -kFarthest};
    return boxes[begin[level] + y * across[level] + x];
  }
  // Of the 32 boxes below the box at (x, y) of a level, return the one of this lane.
  __device__ Box below(const Box* boxes, int level, int64_t x, int64_t y) const {
    const unsigned lane = threadIdx.x % 32;
    return at(boxes, level - 1, x * kAcross + lane % kAcross, y * kDown + lane / kAcross);
  }
};

// Device memory of the backward.
struct Memory {
  Box* boxes;         // [batch][pyramid's count]
  double (*sums)[9];  // [batch][tiles], each tile's share of the gradient for m
  int64_t bytes;

  Memory(void* memory, const WarpSizes& sizes) {
    const int64_t count =
        sizes.batch * Pyramid(sizes.out_height, sizes.out_width).count * int64_t(sizeof(Box));
    boxes = static_cast<Box*>(memory);
    sums = reinterpret_cast<double (*)[9]>(reinterpret_cast<uintptr_t>(memory) + count);
    bytes = count +
            sizes.batch * Tiles(sizes.out_height, sizes.out_width).count * int64_t(sizeof(*sums));
  }
};

// Sum nine numbers over a block by a tree. Return the sum of number k to thread k < 9.
__device__ inline double sum_block(double (&numbers)[9], double (*parts)[9]) {
  for (int k = 0; k < 9; ++k)
    for (int lanes = 16; lanes > 0; lanes /= 2)
      numbers[k] += __shfl_xor_sync(kAllLanes, numbers[k], lanes);
  __syncthreads();  // all threads have read `parts`
  if (threadIdx.x % 32 == 0)
    for (int k = 0; k < 9; ++k) parts[threadIdx.x / 32][k] = numbers[k];
  __syncthreads();
  double sum = 0;
  if (threadIdx.x < 9)
    for (int warp = 0; warp < kWarps; ++warp) sum += parts[warp][threadIdx.x];
  return sum;
}

template <int kTaps>
__device__ inline Box box_of(const Cell<kTaps>& cell) {
  Box box{cell.x.tap[0], cell.x.tap[0], cell.y.tap[0], cell.y.tap[0]};
  for (int k = 1; k < kTaps; ++k)
    box = around(box, {cell.x.tap[k], cell.x.tap[k], cell.y.tap[k], cell.y.tap[k]});
  return box;
}

template <int kTaps, class Real>
__global__ void __launch_bounds__(kThreads, 2)
    summarize_kernel(WarpInputs<Real> in, WarpGradients<Real> to, Channels channels, Runs runs,
                     Memory work) {
  __shared__ Homography room;
  __shared__ Box boxes[kWarps];
  __shared__ double parts[kWarps][9];
  SharedHomography shared(room);
  const WarpSizes& sizes = in.sizes;
  const Tiles tiles(sizes.out_height, sizes.out_width);
  const Pyramid pyramid(sizes.out_height, sizes.out_width);
  visit_run(runs, blockIdx.x, tiles, [&](int64_t n, int64_t x, int64_t y) {
    const int64_t u = x * kTileWidth + thread_x(), v = y * kTileHeight + thread_y();
    const Homography& map = shared.of(in, n);
    Source source;
    Cell<kTaps> cell;
    const bool has_source = find_cell(sizes, sizes.border, map, u, v, source, cell);
    if (channels.first == 0 && to.grad_image) {
      const Box box = around_warp(has_source ? box_of(cell)
                                             : Box{kFarthest, -kFarthest, kFarthest, -kFarthest});
      __syncthreads();  // all threads have read `boxes`
      if (threadIdx.x % 32 == 0) boxes[threadIdx.x / 32] = box;
      __syncthreads();
      if (threadIdx.x == 0) {
        Box all = box;
        for (int warp = 1; warp < kWarps; ++warp) all = around(all, boxes[warp]);
        work.boxes[n * pyramid.count + y * tiles.across + x] = all;
      }
    }
    if (!to.grad_warp) return;
    double grad_m[9] = {};
    // A nearest pixel does not move.
    if (has_source && sizes.interpolation != Interpolation::kNearest) {
      double gx = 0, gy = 0;
      for (int64_t c = 0; c < channels.count; ++c) {
        const double g = to.grad[output_offset(sizes, n, channels.first + c, v) + u];
        const Plane<Real> plane = make_plane(in, n, channels.first + c, channels.border[c]);
        gx = fma(g, interpolate<double>(plane, cell, sizes.order_x + 1, sizes.order_y), gx);
        gy = fma(g, interpolate<double>(plane, cell, sizes.order_x, sizes.order_y + 1), gy);
      }
      project_backward(source, static_cast<double>(u), static_cast<double>(v), gx, gy, grad_m);
    }
    const double sum = sum_block(grad_m, parts);
    double* sums = work.sums[n * tiles.count + y * tiles.across + x];
    if (threadIdx.x < 9) sums[threadIdx.x] = sum + (channels.first == 0 ? 0 : sums[threadIdx.x]);
  });
}

// Write the boxes of a level from those of the level below, a warp for each box.
__global__ void __launch_bounds__(kThreads)
    combine_kernel(WarpSizes sizes, int level, Memory work) {
  const Pyramid pyramid(sizes.out_height, sizes.out_width);
  const int64_t across = pyramid.across[level], count = across * pyramid.down[level];
  const int64_t item = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (item >= sizes.batch * count) return;
  Box* boxes = work.boxes + item / count * pyramid.count;
  const int64_t k = item % count;
  const Box box = around_warp(pyramid.below(boxes, level, k % across, k / across));
  if (threadIdx.x % 32 == 0) boxes[pyramid.begin[level] + k] = box;
}

template <class Real>
__global__ void __launch_bounds__(kThreads)
    warp_gradient_kernel(WarpInputs<Real> in, double* grad_warp, Memory work) {
  __shared__ double parts[kWarps][9], sums[9];
  const WarpSizes& sizes = in.sizes;
  const int64_t tiles = Tiles(sizes.out_height, sizes.out_width).count, i = blockIdx.x;
  // The tiles of one image, or of all if one matrix serves all.
  const int64_t count = (sizes.warp_batch == 1 ? sizes.batch : 1) * tiles;
  double grad_m[9] = {};
  for (int64_t k = threadIdx.x; k < count; k += kThreads)
    for (int e = 0; e < 9; ++e) grad_m[e] += work.sums[i * tiles + k][e];
  const double sum = sum_block(grad_m, parts);
  if (threadIdx.x < 9) sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0)
    homography_backward(homography_of(in, i), sums, sizes.inverse_map, grad_warp + 9 * i);
}

constexpr int kChannelsPerBlock = 4;
constexpr int kNowhere = -1;

// Return a tap's place in the tile from `begin` on. Outside, or without weight, it is kNowhere.
__device__ inline int place(int64_t index, double weight, int64_t begin, int extent) {
  return weight != 0 && index >= begin && index < begin + extent ? static_cast<int>(index - begin)
                                                                 : kNowhere;
}

template <int kTaps>
struct alignas(16) Places {
  int x[kTaps], y[kTaps];
};

// Remove the lowest bit of a mask, and return its number.
__device__ inline int take_lowest(unsigned& mask) {
  const int bit = __ffs(int(mask)) - 1;
  mask &= mask - 1;
  return bit;
}

template <int kTaps, class Real>
__global__ void __launch_bounds__(kThreads, 2)
    image_gradient_kernel(WarpInputs<Real> in, WarpGradients<Real> to, Memory work) {
  __shared__ Homography room;
  __shared__ Places<kTaps> places[kThreads];
  __shared__ double fraction_x[kThreads], fraction_y[kThreads], grads[kThreads][kChannelsPerBlock];
  // Bit k % 32 of hits[k / 32][p]: pixel k of the destination's tile has a tap at pixel p of this
  // tile.
  __shared__ unsigned hits[kWarps][kThreads];
  SharedHomography shared(room);
  const WarpSizes& sizes = in.sizes;
  const Tiles tiles(sizes.height, sizes.width);
  const Pyramid pyramid(sizes.out_height, sizes.out_width);
  const int64_t groups = divide_up(sizes.channels, kChannelsPerBlock), item = blockIdx.x;
  const int64_t image = item / (groups * tiles.count), tile = item % tiles.count;
  const int64_t first_channel = item / tiles.count % groups * kChannelsPerBlock;
  const int64_t left = tile % tiles.across * kTileWidth, top = tile / tiles.across * kTileHeight;
  const Box own{left, left + kTileWidth - 1, top, top + kTileHeight - 1};
  const int x = int(thread_x()), y = int(thread_y());
  const unsigned thread = threadIdx.x, lane = thread % 32;
  const int channels = sizes.channels - first_channel < kChannelsPerBlock
                           ? int(sizes.channels - first_channel)
                           : kChannelsPerBlock;
  double sums[kChannelsPerBlock] = {};
  for (int warp = 0; warp < kWarps; ++warp) hits[warp][thread] = 0;

  // Add the tile at (tile_x, tile_y) of the destination.
  const auto add_tile = [&](int64_t n, int64_t tile_x, int64_t tile_y) {
    const int64_t u = tile_x * kTileWidth + x, v = tile_y * kTileHeight + y;
    const Homography& map = shared.of(in, n);
    Source source;
    Cell<kTaps> cell;
    Places<kTaps> mine;
    double weight_x[kTaps], weight_y[kTaps];
    const bool has_source = find_cell(sizes, sizes.border, map, u, v, source, cell);
    if (has_source) {
      weights_of(cell.x.fraction, sizes.order_x, weight_x);
      weights_of(cell.y.fraction, sizes.order_y, weight_y);
    }
    bool in_columns = false, in_rows = false;
    for (int k = 0; k < kTaps; ++k) {
      mine.x[k] = has_source ? place(cell.x.tap[k], weight_x[k], left, kTileWidth) : kNowhere;
      mine.y[k] = has_source ? place(cell.y.tap[k], weight_y[k], top, kTileHeight) : kNowhere;
      in_columns = in_columns || mine.x[k] != kNowhere;
      in_rows = in_rows || mine.y[k] != kNowhere;
    }
    __syncthreads();  // all threads have read the shared memory of the tile before
    if (in_columns && in_rows) {
      for (int k = 0; k < kTaps * kTaps; ++k) {
        const int at_x = mine.x[k % kTaps], at_y = mine.y[k / kTaps];
        if (at_x == kNowhere || at_y == kNowhere) continue;
        unsigned* word = &hits[thread / 32][at_y * kTileWidth + at_x];
        atomicOr(word, 1u << lane);
      }
      places[thread] = mine;
      fraction_x[thread] = cell.x.fraction;
      fraction_y[thread] = cell.y.fraction;
      for (int c = 0; c < channels; ++c)
        grads[thread][c] = to.grad[output_offset(sizes, n, first_channel + c, v) + u];
    }
    __syncthreads();
#pragma unroll 1
    for (int warp = 0; warp < kWarps; ++warp) {
      unsigned mask = hits[warp][thread];
      if (mask == 0) continue;
      hits[warp][thread] = 0;
      while (mask != 0) {
        const int k = 32 * warp + take_lowest(mask);
        const Places<kTaps> at = places[k];
        weights_of(fraction_x[k], sizes.order_x, weight_x);
        weights_of(fraction_y[k], sizes.order_y, weight_y);
        double along_x = 0, along_y = 0;
        for (int tap = 0; tap < kTaps; ++tap) {
          along_x += at.x[tap] == x ? weight_x[tap] : 0;
          along_y += at.y[tap] == y ? weight_y[tap] : 0;
        }
        for (int c = 0; c < kChannelsPerBlock; ++c)
          if (c < channels) sums[c] = fma(along_y * along_x, grads[k][c], sums[c]);
      }
    }
  };

  // Every warp computes the same masks, so no barrier is needed to share them.
  for (int64_t n = image; n < sizes.batch; n += sizes.image_batch) {
    const Box* boxes = work.boxes + n * pyramid.count;
    const int64_t across = pyramid.across[2], count = across * pyramid.down[2];
    for (int64_t base = 0; base < count; base += 32) {
      const int64_t k = base + lane;
      const Box high = pyramid.at(boxes, 2, k % across, k / across);
      unsigned highs = __ballot_sync(kAllLanes, own.meets(high));
      while (highs != 0) {
        const int64_t at = base + take_lowest(highs), x2 = at % across, y2 = at / across;
        unsigned middles = __ballot_sync(kAllLanes, own.meets(pyramid.below(boxes, 2, x2, y2)));
        while (middles != 0) {
          const int middle = take_lowest(middles);
          const int64_t x1 = x2 * Pyramid::kAcross + middle % Pyramid::kAcross;
          const int64_t y1 = y2 * Pyramid::kDown + middle / Pyramid::kAcross;
          unsigned lows = __ballot_sync(kAllLanes, own.meets(pyramid.below(boxes, 1, x1, y1)));
          while (lows != 0) {
            const int low = take_lowest(lows);
            add_tile(n, x1 * Pyramid::kAcross + low % Pyramid::kAcross,
                     y1 * Pyramid::kDown + low / Pyramid::kAcross);
          }
        }
      }
    }
  }
  if (left + x >= sizes.width || top + y >= sizes.height) return;
  for (int c = 0; c < kChannelsPerBlock; ++c) {
    if (c >= channels) break;
    to.grad_image[((image * sizes.channels + first_channel + c) * sizes.height + top + y) *
                      sizes.width +
                  left + x] = static_cast<Real>(sums[c]);
  }
}

// ---- the slopes ---------------------------------------------------------------------------------

template <int kTaps>
__global__ void __launch_bounds__(kThreads, 2)
    slope_kernel(WarpInputs<double> in, double* out, Channels channels, Runs runs) {
  __shared__ Homography room;
  SharedHomography shared(room);
  const WarpSizes& sizes = in.sizes;
  const Tiles tiles(sizes.out_height, sizes.out_width);
  visit_run(runs, blockIdx.x, tiles, [&](int64_t n, int64_t x, int64_t y) {
    const int64_t u = x * kTileWidth + thread_x(), v = y * kTileHeight + thread_y();
    const Homography& map = shared.of(in, n);
    Source source;
    Cell<kTaps> cell;
    const bool has_source = find_cell(sizes, sizes.border, map, u, v, source, cell);
    if (u >= sizes.out_width || v >= sizes.out_height) return;
    for (int64_t c = 0; c < channels.count; ++c) {
      const Plane<double> plane = make_plane(in, n, channels.first + c, channels.border[c]);
      out[output_offset(sizes, n, channels.first + c, v) + u] =
          has_source ? interpolate<double>(plane, cell, sizes.order_x, sizes.order_y) : 0;
    }
  });
}

// Return the blocks of a launch. If a grid may not have so many, return 0, whose launch fails.
unsigned grid_of(int64_t blocks) {
  return blocks <= std::numeric_limits<int32_t>::max() ? static_cast<unsigned>(blocks) : 0;
}

template <Border kBorder, int kTaps, class Pixel>
void launch_forward(const WarpInputs<Pixel>& in, Pixel* out, int64_t first_channel,
                    cudaStream_t stream) {
  const Channels channels = channels_from(in, first_channel);
  const Runs runs(in.sizes.batch * Tiles(in.sizes.out_height, in.sizes.out_width).count);
  const unsigned blocks = grid_of(runs.blocks * divide_up(channels.count, kChannelsPerThread));
  forward_kernel<kBorder, kTaps><<<blocks, kThreads, 0, stream>>>(in, out, channels, runs);
}

// Write sources and scale. For each matrix, one thread computes each pixel, and another the scale.
template <int kTaps>
__global__ void __launch_bounds__(kThreads)
    sources_kernel(WarpSizes sizes, const double* warp, double* sources, double* scale) {
  const int64_t pixels = sizes.out_height * sizes.out_width, items = pixels + 1;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t item = int64_t(blockIdx.x) * kThreads + threadIdx.x; item < sizes.warp_batch * items;
       item += step) {
    const int64_t i = item / items, p = item % items;
    const Homography map = make_homography(warp + 9 * i, sizes.inverse_map);
    if (p == pixels)
      scale[i] = map.valid ? map.scale : 0;
    else
      store_source<kTaps>(map, sizes, p % sizes.out_width, p / sizes.out_width, pixels,
                          sources + 3 * i * pixels + p);
  }
}

}  // namespace

cudaError_t warp_perspective_sources(const WarpSizes& sizes, const double* warp, double* sources,
                                     double* scale, cudaStream_t stream) {
  const int64_t items = sizes.warp_batch * (sizes.out_height * sizes.out_width + 1);
  const unsigned blocks = grid_of(divide_up(items, kThreads));
  const bool cubic = sizes.interpolation == Interpolation::kCubic;
  const auto kernel = cubic ? sources_kernel<4> : sources_kernel<2>;
  if (items > 0) kernel<<<blocks, kThreads, 0, stream>>>(sizes, warp, sources, scale);
  return cudaGetLastError();
}

template <class Pixel>
cudaError_t warp_perspective(const WarpInputs<Pixel>& in, const Pixel* destination, Pixel* out,
                             cudaStream_t stream) {
  const WarpSizes& sizes = in.sizes;
  const size_t bytes = output_offset(sizes, sizes.batch, 0, 0) * sizeof(Pixel);
  if (destination && bytes > 0) {
    const cudaError_t error =
        cudaMemcpyAsync(out, destination, bytes, cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return error;
  }
  const bool empty = sizes.batch == 0 || sizes.out_height == 0 || sizes.out_width == 0;
  const bool cubic = sizes.interpolation == Interpolation::kCubic;
  for (int64_t first = 0; first < sizes.channels && !empty; first += Channels::kMost) {
    if (cubic)
      launch_forward<Border::kReflect, 4>(in, out, first, stream);
    else if (sizes.border == Border::kConstant)
      launch_forward<Border::kConstant, 2>(in, out, first, stream);
    else if (sizes.border == Border::kReplicate)
      launch_forward<Border::kReplicate, 2>(in, out, first, stream);
    else
      launch_forward<Border::kReflect, 2>(in, out, first, stream);
  }
  return cudaGetLastError();
}

int64_t warp_perspective_backward_workspace(const WarpSizes& sizes) {
  return Memory(nullptr, sizes).bytes;
}

template <int kTaps, class Real>
void launch_backward(const WarpInputs<Real>& in, const WarpGradients<Real>& to, const Memory& work,
                     cudaStream_t stream) {
  const WarpSizes& sizes = in.sizes;
  const Runs runs(sizes.batch * Tiles(sizes.out_height, sizes.out_width).count);
  for (int64_t first = 0;
       (first == 0 || (first < sizes.channels && to.grad_warp)) && runs.tiles > 0;
       first += Channels::kMost)
    summarize_kernel<kTaps><<<grid_of(runs.blocks), kThreads, 0, stream>>>(
        in, to, channels_from(in, first), runs, work);
  if (to.grad_warp && sizes.warp_batch > 0)
    warp_gradient_kernel<<<grid_of(sizes.warp_batch), kThreads, 0, stream>>>(in, to.grad_warp,
                                                                             work);
  const int64_t items = sizes.image_batch * divide_up(sizes.channels, kChannelsPerBlock) *
                        Tiles(sizes.height, sizes.width).count;
  if (to.grad_image && items > 0) {
    const Pyramid pyramid(sizes.out_height, sizes.out_width);
    for (int level = 1; level < Pyramid::kLevels && runs.tiles > 0; ++level) {
      const int64_t boxes = sizes.batch * pyramid.across[level] * pyramid.down[level];
      combine_kernel<<<grid_of(divide_up(boxes, kWarps)), kThreads, 0, stream>>>(sizes, level,
                                                                                 work);
    }
    image_gradient_kernel<kTaps><<<grid_of(items), kThreads, 0, stream>>>(in, to, work);
  }
}

template <class Real>
cudaError_t warp_perspective_backward(const WarpInputs<Real>& in, const WarpGradients<Real>& to,
                                      void* workspace, cudaStream_t stream) {
  const Memory work(workspace, in.sizes);
  if (in.sizes.interpolation == Interpolation::kCubic)
    launch_backward<4>(in, to, work, stream);
  else
    launch_backward<2>(in, to, work, stream);
  return cudaGetLastError();
}

cudaError_t warp_perspective_slope(const WarpInputs<double>& in, double* out, cudaStream_t stream) {
  const WarpSizes& sizes = in.sizes;
  const Runs runs(sizes.batch * Tiles(sizes.out_height, sizes.out_width).count);
  const bool cubic = sizes.interpolation == Interpolation::kCubic;
  const auto kernel = cubic ? slope_kernel<4> : slope_kernel<2>;
  for (int64_t first = 0; first < sizes.channels && runs.tiles > 0; first += Channels::kMost)
    kernel<<<grid_of(runs.blocks), kThreads, 0, stream>>>(in, out, channels_from(in, first), runs);
  return cudaGetLastError();
}

template cudaError_t warp_perspective(const WarpInputs<uint8_t>&, const uint8_t*, uint8_t*,
                                      cudaStream_t);
template cudaError_t warp_perspective(const WarpInputs<uint16_t>&, const uint16_t*, uint16_t*,
                                      cudaStream_t);
template cudaError_t warp_perspective(const WarpInputs<int16_t>&, const int16_t*, int16_t*,
                                      cudaStream_t);
template cudaError_t warp_perspective(const WarpInputs<Float16>&, const Float16*, Float16*,
                                      cudaStream_t);
template cudaError_t warp_perspective(const WarpInputs<BFloat16>&, const BFloat16*, BFloat16*,
                                      cudaStream_t);
template cudaError_t warp_perspective(const WarpInputs<float>&, const float*, float*, cudaStream_t);
template cudaError_t warp_perspective(const WarpInputs<double>&, const double*, double*,
                                      cudaStream_t);
template cudaError_t warp_perspective_backward(const WarpInputs<float>&,
                                               const WarpGradients<float>&, void*, cudaStream_t);
template cudaError_t warp_perspective_backward(const WarpInputs<double>&,
                                               const WarpGradients<double>&, void*, cudaStream_t);

}  // namespace calcops::ops::warp_perspective
