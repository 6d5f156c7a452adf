// CUDA kernels of warp_perspective.
//
// Forward: a thread a destination pixel, for up to 16 channels.
// Gradient of the image: nothing is scattered, so there is nothing to order. A block owns a tile of
// the image and goes through the tiles of the destination, in their order, whose bounding box meets
// it; each thread adds what falls on its own pixel, in the order of the destination's pixels. The
// price is a search: every pixel of the image looks at all 256 pixels of about 5 tiles where the
// map is near scale 1, and at the whole destination where everything falls into one tile. Gradient
// of warp: sums of tiles by a tree, then of all tiles by a tree.
#include <algorithm>
#include <limits>

#include "warp_perspective/warp_perspective.h"
#include "warp_perspective/warp_perspective_math.h"

namespace calcops {
namespace {

constexpr int kTileWidth = 32, kTileHeight = 8, kThreads = kTileWidth * kTileHeight;

__host__ __device__ inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One block an item; what exceeds the grid's limit is left to the kernels' loops.
unsigned blocks_for(int64_t items) {
  return static_cast<unsigned>(std::min<int64_t>(items, std::numeric_limits<int32_t>::max()));
}

// An image or a result cut into tiles of a block's size.
struct Tiles {
  int64_t across, count;

  __host__ __device__ Tiles(int64_t height, int64_t width)
      : across(divide_up(width, kTileWidth)), count(across * divide_up(height, kTileHeight)) {}

  __device__ int64_t left(int64_t tile) const { return tile % across * kTileWidth; }
  __device__ int64_t top(int64_t tile) const { return tile / across * kTileHeight; }
};

__device__ inline int64_t thread_x() { return threadIdx.x % kTileWidth; }
__device__ inline int64_t thread_y() { return threadIdx.x / kTileWidth; }

// The channels of one launch, with their border values, which kernel arguments have room for.
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

// The homography of item n in shared memory, for all threads of the block.
template <class Pixel>
__device__ void load_homography(const WarpInputs<Pixel>& in, int64_t n, Homography& shared) {
  __syncthreads();
  if (threadIdx.x == 0) shared = homography_of(in, in.sizes.warp_batch == 1 ? 0 : n);
  __syncthreads();
}

template <class Pixel>
__device__ bool find_cell(const WarpInputs<Pixel>& in, const Homography& map, int64_t u, int64_t v,
                          Source& source, Cell& cell) {
  if (!map.valid || u >= in.sizes.out_width || v >= in.sizes.out_height) return false;
  source = project(map.m, static_cast<double>(u), static_cast<double>(v));
  return locate(source, in.sizes, cell);
}

constexpr int64_t kChannelsPerThread = 16;

template <class Pixel>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(WarpInputs<Pixel> in, Pixel* out, Channels channels) {
  __shared__ Homography map;
  const WarpSizes& sizes = in.sizes;
  const Tiles tiles(sizes.out_height, sizes.out_width);
  const int64_t groups = divide_up(channels.count, kChannelsPerThread);
  const int64_t items = sizes.batch * tiles.count * groups;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t n = item / (tiles.count * groups), tile = item / groups % tiles.count;
    const int64_t begin = item % groups * kChannelsPerThread;
    const int64_t end =
        begin + kChannelsPerThread < channels.count ? begin + kChannelsPerThread : channels.count;
    const int64_t u = tiles.left(tile) + thread_x(), v = tiles.top(tile) + thread_y();
    load_homography(in, n, map);
    Source source;
    Cell cell;
    const bool has_source = find_cell(in, map, u, v, source, cell);
    if (u >= sizes.out_width || v >= sizes.out_height) continue;
    for (int64_t c = begin; c < end; ++c) {
      const Plane<Pixel> plane = make_plane(in, n, channels.first + c, channels.border[c]);
      out[((n * sizes.channels + channels.first + c) * sizes.out_height + v) * sizes.out_width +
          u] = to_pixel<Pixel>(has_source ? sample(plane, cell) : plane.border);
    }
  }
}

// What the first pass of the backward learns of a tile of the destination: the box of the pixels of
// the image that it touches (none where last < first), and its share of the gradient of m.
struct TileSummary {
  int64_t first_x, last_x, first_y, last_y;
  double grad_m[9];
};

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// shared[0 .. kThreads) is combined into shared[0] by a tree.
template <class T, class Combine>
__device__ inline T reduce_block(T value, T* shared, Combine combine) {
  __syncthreads();
  shared[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half)
      shared[threadIdx.x] = combine(shared[threadIdx.x], shared[threadIdx.x + half]);
  }
  __syncthreads();
  return shared[0];
}

struct Least {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a < b ? a : b; }
};
struct Most {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a < b ? b : a; }
};
struct Sum {
  __device__ double operator()(double a, double b) const { return a + b; }
};

template <class Real>
__global__ void __launch_bounds__(kThreads)
    summarize_kernel(WarpInputs<Real> in, WarpGradients<Real> to, Channels channels,
                     TileSummary* summaries) {
  __shared__ Homography map;
  __shared__ int64_t bounds[kThreads];
  __shared__ double sums[kThreads];
  const WarpSizes& sizes = in.sizes;
  const Tiles tiles(sizes.out_height, sizes.out_width);
  for (int64_t item = blockIdx.x; item < sizes.batch * tiles.count; item += gridDim.x) {
    const int64_t n = item / tiles.count, tile = item % tiles.count;
    const int64_t u = tiles.left(tile) + thread_x(), v = tiles.top(tile) + thread_y();
    load_homography(in, n, map);
    Source source;
    Cell cell;
    const bool has_source = find_cell(in, map, u, v, source, cell);
    TileSummary& summary = summaries[item];
    if (channels.first == 0) {
      const int64_t first_x =
          reduce_block(has_source ? Least()(cell.x.first, cell.x.second) : kNone, bounds, Least());
      const int64_t last_x =
          reduce_block(has_source ? Most()(cell.x.first, cell.x.second) : -kNone, bounds, Most());
      const int64_t first_y =
          reduce_block(has_source ? Least()(cell.y.first, cell.y.second) : kNone, bounds, Least());
      const int64_t last_y =
          reduce_block(has_source ? Most()(cell.y.first, cell.y.second) : -kNone, bounds, Most());
      if (threadIdx.x == 0) {
        summary.first_x = first_x;
        summary.last_x = last_x;
        summary.first_y = first_y;
        summary.last_y = last_y;
      }
    }
    if (!to.grad_warp) continue;
    double grad_m[9] = {};
    if (has_source) {
      double gx = 0, gy = 0;
      for (int64_t c = 0; c < channels.count; ++c) {
        const double g =
            to.grad[((n * sizes.channels + channels.first + c) * sizes.out_height + v) *
                        sizes.out_width +
                    u];
        const Slope slope =
            sample_slope(make_plane(in, n, channels.first + c, channels.border[c]), cell);
        gx = fma(g, slope.x, gx);
        gy = fma(g, slope.y, gy);
      }
      project_backward(source, static_cast<double>(u), static_cast<double>(v), gx, gy, grad_m);
    }
    for (int k = 0; k < 9; ++k) {
      const double sum = reduce_block(grad_m[k], sums, Sum());
      if (threadIdx.x == 0) summary.grad_m[k] = sum + (channels.first == 0 ? 0 : summary.grad_m[k]);
    }
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads)
    warp_gradient_kernel(WarpInputs<Real> in, double* grad_warp, const TileSummary* summaries) {
  __shared__ double sums[kThreads];
  const WarpSizes& sizes = in.sizes;
  const Tiles tiles(sizes.out_height, sizes.out_width);
  for (int64_t i = blockIdx.x; i < sizes.warp_batch; i += gridDim.x) {
    // All of N where one matrix serves it.
    const int64_t count = (sizes.warp_batch == 1 ? sizes.batch : 1) * tiles.count;
    double grad_m[9] = {};
    for (int64_t k = threadIdx.x; k < count; k += kThreads)
      for (int e = 0; e < 9; ++e) grad_m[e] += summaries[i * tiles.count + k].grad_m[e];
    for (int e = 0; e < 9; ++e) grad_m[e] = reduce_block(grad_m[e], sums, Sum());
    if (threadIdx.x == 0)
      homography_backward(homography_of(in, i), grad_m, sizes.inverse_map, grad_warp + 9 * i);
  }
}

constexpr int kChannelsPerBlock = 4;
constexpr int kNowhere = -1;

// A tap's place within a tile that begins at `begin`, kNowhere outside of it or without weight.
__device__ inline int place(int64_t index, double weight, int64_t begin, int extent) {
  return weight > 0 && index >= begin && index < begin + extent ? static_cast<int>(index - begin)
                                                                : kNowhere;
}

struct alignas(16) Places {
  int first_x, second_x, first_y, second_y;
};

template <class Real>
__global__ void __launch_bounds__(kThreads)
    image_gradient_kernel(WarpInputs<Real> in, WarpGradients<Real> to,
                          const TileSummary* summaries) {
  __shared__ Homography map;
  __shared__ bool meets[kThreads];
  __shared__ Places places[kThreads];
  __shared__ double weight_x[kThreads], weight_y[kThreads], grads[kThreads][kChannelsPerBlock];
  const WarpSizes& sizes = in.sizes;
  const Tiles out_tiles(sizes.out_height, sizes.out_width), tiles(sizes.height, sizes.width);
  const int64_t groups = divide_up(sizes.channels, kChannelsPerBlock);
  const int64_t items = sizes.image_batch * groups * tiles.count;
  const int x = static_cast<int>(thread_x()), y = static_cast<int>(thread_y());
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t image = item / (groups * tiles.count), tile = item % tiles.count;
    const int64_t first_channel = item / tiles.count % groups * kChannelsPerBlock;
    const int64_t left = tiles.left(tile), top = tiles.top(tile);
    double sums[kChannelsPerBlock] = {};
    for (int64_t n = image; n < sizes.batch; n += sizes.image_batch) {
      load_homography(in, n, map);
      for (int64_t base = 0; base < out_tiles.count; base += kThreads) {
        bool meet = false;
        if (base + threadIdx.x < out_tiles.count) {
          const TileSummary& s = summaries[n * out_tiles.count + base + threadIdx.x];
          meet = s.first_x < left + kTileWidth && s.last_x >= left &&
                 s.first_y < top + kTileHeight && s.last_y >= top;
        }
        if (!__syncthreads_or(meet)) continue;
        meets[threadIdx.x] = meet;
        __syncthreads();
        for (int t = 0; t < kThreads; ++t) {
          if (!meets[t]) continue;
          const int64_t u = out_tiles.left(base + t) + thread_x();
          const int64_t v = out_tiles.top(base + t) + thread_y();
          Source source;
          Cell cell;
          Places mine{kNowhere, kNowhere, kNowhere, kNowhere};
          const bool has_source = find_cell(in, map, u, v, source, cell);
          if (has_source)
            mine = {place(cell.x.first, 1 - cell.x.weight, left, kTileWidth),
                    place(cell.x.second, cell.x.weight, left, kTileWidth),
                    place(cell.y.first, 1 - cell.y.weight, top, kTileHeight),
                    place(cell.y.second, cell.y.weight, top, kTileHeight)};
          __syncthreads();
          places[threadIdx.x] = mine;
          if (has_source) {
            weight_x[threadIdx.x] = cell.x.weight;
            weight_y[threadIdx.x] = cell.y.weight;
            for (int c = 0; c < kChannelsPerBlock && first_channel + c < sizes.channels; ++c)
              grads[threadIdx.x][c] =
                  to.grad[((n * sizes.channels + first_channel + c) * sizes.out_height + v) *
                              sizes.out_width +
                          u];
          }
          __syncthreads();
          for (int k = 0; k < kThreads; ++k) {
            const Places at = places[k];
            if ((at.first_x != x && at.second_x != x) || (at.first_y != y && at.second_y != y))
              continue;
            const double along_x =
                (at.first_x == x ? 1 - weight_x[k] : 0) + (at.second_x == x ? weight_x[k] : 0);
            const double along_y =
                (at.first_y == y ? 1 - weight_y[k] : 0) + (at.second_y == y ? weight_y[k] : 0);
            for (int c = 0; c < kChannelsPerBlock && first_channel + c < sizes.channels; ++c)
              sums[c] = fma(along_y * along_x, grads[k][c], sums[c]);
          }
        }
        __syncthreads();
      }
    }
    if (left + x >= sizes.width || top + y >= sizes.height) continue;
    for (int c = 0; c < kChannelsPerBlock && first_channel + c < sizes.channels; ++c)
      to.grad_image[((image * sizes.channels + first_channel + c) * sizes.height + top + y) *
                        sizes.width +
                    left + x] = static_cast<Real>(sums[c]);
  }
}

// A thread has a pixel, or after the last of them the scale, of one matrix.
__global__ void __launch_bounds__(kThreads)
    cells_kernel(WarpSizes sizes, const double* warp, double* cells, double* scale) {
  const int64_t pixels = sizes.out_height * sizes.out_width, items = pixels + 1;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t item = int64_t(blockIdx.x) * kThreads + threadIdx.x; item < sizes.warp_batch * items;
       item += step) {
    const int64_t i = item / items, p = item % items;
    const Homography map = make_homography(warp + 9 * i, sizes.inverse_map);
    if (p == pixels)
      scale[i] = map.valid ? map.scale : 0;
    else
      store_cell(map, sizes, p % sizes.out_width, p / sizes.out_width, pixels,
                 cells + i * kCellNumbers * pixels + p);
  }
}

}  // namespace

cudaError_t warp_perspective_cells_cuda(const WarpSizes& sizes, const double* warp, double* cells,
                                        double* scale, cudaStream_t stream) {
  const int64_t items = sizes.warp_batch * (sizes.out_height * sizes.out_width + 1);
  if (items > 0)
    cells_kernel<<<blocks_for(divide_up(items, kThreads)), kThreads, 0, stream>>>(sizes, warp,
                                                                                  cells, scale);
  return cudaGetLastError();
}

template <class Pixel>
cudaError_t warp_perspective_cuda(const WarpInputs<Pixel>& in, Pixel* out, cudaStream_t stream) {
  const WarpSizes& sizes = in.sizes;
  const int64_t tiles = sizes.batch * Tiles(sizes.out_height, sizes.out_width).count;
  for (int64_t first = 0; first < sizes.channels && tiles > 0; first += Channels::kMost) {
    const Channels channels = channels_from(in, first);
    const unsigned blocks = blocks_for(tiles * divide_up(channels.count, kChannelsPerThread));
    forward_kernel<<<blocks, kThreads, 0, stream>>>(in, out, channels);
  }
  return cudaGetLastError();
}

int64_t warp_perspective_backward_cuda_workspace(const WarpSizes& sizes) {
  const int64_t tiles = sizes.batch * Tiles(sizes.out_height, sizes.out_width).count;
  return tiles * static_cast<int64_t>(sizeof(TileSummary));
}

template <class Real>
cudaError_t warp_perspective_backward_cuda(const WarpInputs<Real>& in,
                                           const WarpGradients<Real>& to, void* workspace,
                                           cudaStream_t stream) {
  const WarpSizes& sizes = in.sizes;
  TileSummary* summaries = static_cast<TileSummary*>(workspace);
  const int64_t tiles = sizes.batch * Tiles(sizes.out_height, sizes.out_width).count;
  for (int64_t first = 0; (first == 0 || (first < sizes.channels && to.grad_warp)) && tiles > 0;
       first += Channels::kMost)
    summarize_kernel<<<blocks_for(tiles), kThreads, 0, stream>>>(in, to, channels_from(in, first),
                                                                 summaries);
  if (to.grad_warp && sizes.warp_batch > 0)
    warp_gradient_kernel<<<blocks_for(sizes.warp_batch), kThreads, 0, stream>>>(in, to.grad_warp,
                                                                                summaries);
  const int64_t items = sizes.image_batch * divide_up(sizes.channels, kChannelsPerBlock) *
                        Tiles(sizes.height, sizes.width).count;
  if (to.grad_image && items > 0)
    image_gradient_kernel<<<blocks_for(items), kThreads, 0, stream>>>(in, to, summaries);
  return cudaGetLastError();
}

template cudaError_t warp_perspective_cuda(const WarpInputs<uint8_t>&, uint8_t*, cudaStream_t);
template cudaError_t warp_perspective_cuda(const WarpInputs<float>&, float*, cudaStream_t);
template cudaError_t warp_perspective_cuda(const WarpInputs<double>&, double*, cudaStream_t);
template cudaError_t warp_perspective_backward_cuda(const WarpInputs<float>&,
                                                    const WarpGradients<float>&, void*,
                                                    cudaStream_t);
template cudaError_t warp_perspective_backward_cuda(const WarpInputs<double>&,
                                                    const WarpGradients<double>&, void*,
                                                    cudaStream_t);

}  // namespace calcops
