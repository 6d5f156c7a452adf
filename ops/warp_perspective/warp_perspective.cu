// CUDA kernels of warp_perspective.
//
// A thread computes a pixel of the result. For the gradient for the image, it adds to the pixel's
// taps by atomic additions of integers, which give the same bits in any order. For the gradient for
// the matrix, a tree sums each tile's pixels, and another one all tiles.
#include <calcops/launch.h>

#include <algorithm>

#include "warp_perspective/warp_perspective.h"
#include "warp_perspective/warp_perspective_math.h"

namespace calcops::ops::warp_perspective {
namespace {

constexpr int kTileWidth = 32, kTileHeight = 8, kThreads = kTileWidth * kTileHeight;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffff;

__device__ inline int64_t thread_index() { return int64_t(blockIdx.x) * kThreads + threadIdx.x; }

// The tiles of the results. A block computes one of them.
CALCOPS_HD inline int64_t tiles_of_one(const WarpSizes& sizes) {
  return divide_up(sizes.out_width, kTileWidth) * divide_up(sizes.out_height, kTileHeight);
}

int64_t tiles_of(const WarpSizes& sizes) { return sizes.batch * tiles_of_one(sizes); }

template <class Pixel>
__global__ void __launch_bounds__(kThreads) map_kernel(WarpInputs<Pixel> in, Homography* maps) {
  const int64_t i = thread_index();
  if (i < in.sizes.warp_batch) maps[i] = homography_of(in, i);
}

// Find the homographies, and return run(maps, memory) with memory of zeros behind them. If the
// workspace has no memory yet, only set its size.
template <class Pixel, class Run>
cudaError_t with_maps(const WarpInputs<Pixel>& in, int64_t bytes, Workspace& workspace,
                      cudaStream_t stream, const Run& run) {
  const int64_t count = in.sizes.warp_batch;
  if (!workspace.data) {
    workspace.bytes = count * int64_t(sizeof(Homography)) + bytes;
    return cudaSuccess;
  }
  Homography* const maps = static_cast<Homography*>(workspace.data);
  if (bytes > 0) cudaMemsetAsync(maps + count, 0, bytes, stream);
  cudaError_t error = cudaGetLastError();
  if (!error)
    error = launch(map_kernel<Pixel>, blocks_for(count, kThreads), kThreads, stream, in, maps);
  return error ? error : run(maps, static_cast<void*>(maps + count));
}

// The pixel (u, v) of result n that a thread computes.
template <int kTaps>
struct Target {
  int64_t n, u, v;
  bool is_in_result, has_source;
  Source source;
  Cell<kTaps> cell;

  __device__ Target(const WarpSizes& sizes, const Homography* maps) {
    const int64_t tiles = tiles_of_one(sizes), across = divide_up(sizes.out_width, kTileWidth);
    const int64_t tile = blockIdx.x % tiles;
    n = blockIdx.x / tiles;
    u = tile % across * kTileWidth + threadIdx.x % kTileWidth;
    v = tile / across * kTileHeight + threadIdx.x / kTileWidth;
    is_in_result = u < sizes.out_width && v < sizes.out_height;
    const Homography& map = maps[sizes.warp_batch == 1 ? 0 : n];
    has_source = is_in_result && map.valid;
    if (!has_source) return;
    source = project(map.m, static_cast<double>(u), static_cast<double>(v));
    has_source = locate(source, sizes, sizes.border, cell);
  }
};

// The channels of one launch, with their border values.
struct Channels {
  static constexpr int kMost = 16;
  int64_t first, end;
  double border[kMost];

  template <class Pixel>
  __device__ Plane<Pixel> plane(const WarpInputs<Pixel>& in, int64_t n, int64_t c) const {
    return make_plane(in, n, c, border[c - first]);
  }
};

// Call run(channels) for all channels. Return its first error.
template <class Pixel, class Run>
cudaError_t for_channels(const WarpInputs<Pixel>& in, const Run& run) {
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; !error && first < in.sizes.channels; first += Channels::kMost) {
    Channels channels{first, std::min(first + Channels::kMost, in.sizes.channels), {}};
    std::copy(in.border_value + first, in.border_value + channels.end, channels.border);
    error = run(channels);
  }
  return error;
}

// Launch one of two kernels with a thread for each pixel of the results.
template <class... Parameters, class... Arguments>
cudaError_t launch_for_pixels(const WarpSizes& sizes, cudaStream_t stream,
                              void (*linear)(Parameters...), void (*cubic)(Parameters...),
                              const Arguments&... arguments) {
  const auto kernel = sizes.interpolation == Interpolation::kCubic ? cubic : linear;
  return launch(kernel, tiles_of(sizes), kThreads, stream, arguments...);
}

template <int kTaps, class Pixel>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(WarpInputs<Pixel> in, const Homography* maps, Channels channels, Pixel* out) {
  const Target<kTaps> p(in.sizes, maps);
  if (!p.is_in_result) return;
  if (!p.has_source && in.sizes.border == Border::kTransparent) return;
  for (int64_t c = channels.first; c < channels.end; ++c) {
    const Plane<Pixel> plane = channels.plane(in, p.n, c);
    out[output_offset(in.sizes, p.n, c, p.v) + p.u] =
        p.has_source ? sample(plane, p.cell) : plane.border;
  }
}

// ---- motions and slopes -------------------------------------------------------------------------

template <int kTaps, class Real>
__global__ void __launch_bounds__(kThreads)
    slope_kernel(WarpInputs<Real> in, const Homography* maps, Channels channels, Motions motion,
                 Real* out) {
  const WarpSizes& sizes = in.sizes;
  const Target<kTaps> p(sizes, maps);
  if (!p.is_in_result) return;
  for (int64_t c = channels.first; c < channels.end; ++c) {
    Real& to = out[output_offset(sizes, p.n, c, p.v) + p.u];
    to = 0;
    if (!p.has_source) continue;
    const Plane<Real> plane = channels.plane(in, p.n, c);
    to = static_cast<Real>(
        slope_along(interpolate<double>(plane, p.cell, sizes.order_x + 1, sizes.order_y),
                    interpolate<double>(plane, p.cell, sizes.order_x, sizes.order_y + 1),
                    motion(p.n, 0, p.v, p.u), motion(p.n, 1, p.v, p.u)));
  }
}

// Write the tangent of each m.
__global__ void __launch_bounds__(kThreads)
    tangent_kernel(WarpSizes sizes, const Homography* maps, const double* left, const double* right,
                   double* moved) {
  const int64_t i = 9 * thread_index();
  if (i < 9 * sizes.warp_batch)
    homography_tangent(maps[i / 9], left + i, right + i, sizes.inverse_map, moved + i);
}

template <int kTaps>
__global__ void __launch_bounds__(kThreads)
    motion_kernel(WarpSizes sizes, const Homography* maps, const double* moved, double* motion) {
  const Target<kTaps> p(sizes, maps);
  if (!p.is_in_result) return;
  Motion of_pixel{0, 0, 0};
  if (p.has_source) {
    const RowStart row = row_of(moved + 9 * p.n, static_cast<double>(p.v));
    of_pixel = motion_of(moved + 9 * p.n, row, static_cast<double>(p.u), p.source.x, p.source.y,
                         1 / p.source.w);
  }
  const double parts[3] = {of_pixel.x, of_pixel.y, of_pixel.spread};
  for (int k = 0; k < 3; ++k) motion[output_offset(sizes, p.n, k, p.v) + p.u] = parts[k];
}

// ---- the gradient for the matrix ----------------------------------------------------------------

using Nine = double[9];

// Add each tile's share of the gradient for m to sums [batch][tiles]. `grad` is the gradient of the
// result or of the motion, whose channels are its three numbers.
template <int kTaps, bool kOfMotion, class Real>
__global__ void __launch_bounds__(kThreads)
    tile_gradient_kernel(WarpInputs<Real> in, const Homography* maps, Channels channels,
                         const Real* grad, Nine* sums) {
  __shared__ Nine parts[kWarps];
  const WarpSizes& sizes = in.sizes;
  const Target<kTaps> p(sizes, maps);
  double grad_m[9] = {}, g[3] = {};
  if (p.has_source) {
    for (int64_t c = channels.first; c < channels.end; ++c) {
      const double of_pixel = grad[output_offset(sizes, p.n, c, p.v) + p.u];
      if (!kOfMotion) {
        const Plane<Real> plane = channels.plane(in, p.n, c);
        for (int axis = 0; axis < 2; ++axis)
          g[axis] = fma(of_pixel,
                        interpolate<double>(plane, p.cell, sizes.order_x + (axis == 0),
                                            sizes.order_y + (axis == 1)),
                        g[axis]);
      } else {
        g[c] = of_pixel;
      }
    }
    motion_backward(p.source, static_cast<double>(p.u), static_cast<double>(p.v),
                    {g[0], g[1], g[2]}, grad_m);
  }
  const double sum = sum_of_block(grad_m, parts);
  if (threadIdx.x < 9) sums[blockIdx.x][threadIdx.x] += sum;
}

__global__ void __launch_bounds__(kThreads)
    matrix_gradient_kernel(WarpSizes sizes, const Homography* maps, const Nine* sums,
                           const double* left, double* grad_right) {
  __shared__ Nine parts[kWarps], totals[1];
  const int64_t i = blockIdx.x;
  // The tiles of one image, or of all if one matrix serves all.
  const int64_t count = (sizes.warp_batch == 1 ? sizes.batch : 1) * tiles_of_one(sizes);
  double grad_m[9] = {};
  for (int64_t k = threadIdx.x; k < count; k += kThreads)
    for (int e = 0; e < 9; ++e) grad_m[e] += sums[i * count + k][e];
  const double sum = sum_of_block(grad_m, parts);
  if (threadIdx.x < 9) totals[0][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0)
    homography_backward(maps[i], left + 9 * i, totals[0], sizes.inverse_map, grad_right + 9 * i);
}

// `sums` has zeros for each tile.
template <bool kOfMotion, class Real>
cudaError_t launch_matrix_gradient(const WarpInputs<Real>& in, const Homography* maps,
                                   const Real* grad, Nine* sums, const double* left,
                                   double* grad_right, cudaStream_t stream) {
  const WarpSizes& sizes = in.sizes;
  cudaError_t error = cudaSuccess;
  // A nearest pixel does not move.
  if (sizes.interpolation != Interpolation::kNearest)
    error = for_channels(in, [&](const Channels& channels) {
      return launch_for_pixels(sizes, stream, tile_gradient_kernel<2, kOfMotion, Real>,
                               tile_gradient_kernel<4, kOfMotion, Real>, in, maps, channels, grad,
                               sums);
    });
  if (!error)
    error = launch(matrix_gradient_kernel, sizes.warp_batch, kThreads, stream, sizes, maps, sums,
                   left, grad_right);
  return error;
}

// ---- the gradient for the image -----------------------------------------------------------------

using Bits = unsigned long long;

// Exact sums of float64 numbers below 2^(62 - exponent), one for each pixel: numbers of 128 bits in
// two's complement, in units of 2^-(64 + exponent). Their halves are two arrays, because a warp's
// additions to neighbouring pixels then touch a third of the sectors that structs would take.
struct ExactSums {
  Bits* low;
  Bits* high;
  // Two bits for each of 16 pixels: +infinity was added, -infinity was added. NaN sets both.
  uint32_t* special;

  static int64_t bytes_for(int64_t pixels) {
    return 2 * pixels * int64_t(sizeof(Bits)) + divide_up(pixels, 16) * int64_t(sizeof(uint32_t));
  }

  __device__ void add(int64_t pixel, double x, int exponent) const {
    if (!(fabs(x) <= DBL_MAX)) {
      const uint32_t flags = x > 0 ? 1 : x < 0 ? 2 : 3;
      atomicOr(special + pixel / 16, flags << (2 * (pixel % 16)));
      return;
    }
    const double magnitude = ldexp(fabs(x), exponent), whole = floor(magnitude);
    auto above = static_cast<Bits>(whole);
    auto below = static_cast<Bits>((magnitude - whole) * 0x1p64);
    if (x < 0) negate(below, above);
    const Bits before = atomicAdd(low + pixel, below);
    atomicAdd(high + pixel, above + (before + below < before ? 1 : 0));
  }

  __device__ double value(int64_t pixel, int exponent) const {
    const uint32_t flags = special[pixel / 16] >> (2 * (pixel % 16)) & 3;
    if (flags != 0) return flags == 1 ? HUGE_VAL : flags == 2 ? -HUGE_VAL : HUGE_VAL - HUGE_VAL;
    Bits below = low[pixel], above = high[pixel];
    const bool is_negative = above >> 63 != 0;
    if (is_negative) negate(below, above);
    const double magnitude = ldexp(static_cast<double>(above), -exponent) +
                             ldexp(static_cast<double>(below), -64 - exponent);
    return is_negative ? -magnitude : magnitude;
  }

 private:
  __device__ static void negate(Bits& below, Bits& above) {
    below = ~below + 1;
    above = ~above + (below == 0 ? 1 : 0);
  }
};

// Return the exponent of the sums of a plane of the image. The largest of the gradients that it
// receives is a float64 with these bits. A pixel's weights sum up to less than 2^10.
__device__ inline int exponent_of(Bits largest, const WarpSizes& sizes) {
  double x;
  memcpy(&x, &largest, sizeof x);
  const double pixels = static_cast<double>(sizes.batch * sizes.out_height * sizes.out_width);
  return 62 - 10 - (ilogb(pixels) + 1) - (x > 0 ? ilogb(x) + 1 : 0);
}

// Find the largest gradient that each plane [image_batch, C] of the image receives.
template <int kTaps, class Real>
__global__ void __launch_bounds__(kThreads)
    largest_kernel(WarpSizes sizes, const Homography* maps, const Real* grad, Bits* largest) {
  const Target<kTaps> p(sizes, maps);
  for (int64_t c = 0; c < sizes.channels; ++c) {
    double x = p.has_source ? fabs(double(grad[output_offset(sizes, p.n, c, p.v) + p.u])) : 0;
    if (!(x <= DBL_MAX)) x = 0;
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmax(x, __shfl_xor_sync(kAllLanes, x, lanes));
    // Numbers that are not negative have the order of their bits.
    Bits bits;
    memcpy(&bits, &x, sizeof bits);
    Bits& of_plane = largest[(sizes.image_batch == 1 ? 0 : p.n) * sizes.channels + c];
    if (threadIdx.x % 32 == 0 && bits > of_plane) atomicMax(&of_plane, bits);
  }
}

template <int kTaps, class Real>
__global__ void __launch_bounds__(kThreads)
    add_kernel(WarpSizes sizes, const Homography* maps, const Real* grad, const Bits* largest,
               ExactSums sums) {
  const Target<kTaps> p(sizes, maps);
  if (!p.has_source) return;
  double weight_x[kTaps], weight_y[kTaps];
  weights_of(p.cell.x.fraction, sizes.order_x, weight_x);
  weights_of(p.cell.y.fraction, sizes.order_y, weight_y);
  for (int64_t c = 0; c < sizes.channels; ++c) {
    const int64_t plane = (sizes.image_batch == 1 ? 0 : p.n) * sizes.channels + c;
    const double g = grad[output_offset(sizes, p.n, c, p.v) + p.u];
    const int exponent = exponent_of(largest[plane], sizes);
    for (int k = 0; k < kTaps * kTaps; ++k) {
      const int64_t y = p.cell.y.tap[k / kTaps], x = p.cell.x.tap[k % kTaps];
      const double weight = weight_y[k / kTaps] * weight_x[k % kTaps];
      if (y < 0 || y >= sizes.height || x < 0 || x >= sizes.width || weight == 0) continue;
      sums.add((plane * sizes.height + y) * sizes.width + x, weight * g, exponent);
    }
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads)
    round_kernel(WarpSizes sizes, const Bits* largest, ExactSums sums, Real* grad_image) {
  const int64_t pixels = sizes.height * sizes.width, i = thread_index();
  if (i >= sizes.image_batch * sizes.channels * pixels) return;
  grad_image[i] = static_cast<Real>(sums.value(i, exponent_of(largest[i / pixels], sizes)));
}

}  // namespace

template <class Pixel>
cudaError_t warp_perspective(const WarpInputs<Pixel>& in, const Pixel* destination, Pixel* out,
                             Workspace& workspace, cudaStream_t stream) {
  const WarpSizes& sizes = in.sizes;
  return with_maps(in, 0, workspace, stream, [&](const Homography* maps, void*) {
    const size_t bytes = output_offset(sizes, sizes.batch, 0, 0) * sizeof(Pixel);
    if (destination && bytes > 0)
      cudaMemcpyAsync(out, destination, bytes, cudaMemcpyDeviceToDevice, stream);
    const cudaError_t error = cudaGetLastError();
    if (error) return error;
    return for_channels(in, [&](const Channels& channels) {
      return launch_for_pixels(sizes, stream, forward_kernel<2, Pixel>, forward_kernel<4, Pixel>,
                               in, maps, channels, out);
    });
  });
}

template <class Real>
cudaError_t warp_perspective_slope(const WarpInputs<Real>& in, const Motions& motion, Real* out,
                                   Workspace& workspace, cudaStream_t stream) {
  const WarpSizes& sizes = in.sizes;
  return with_maps(in, 0, workspace, stream, [&](const Homography* maps, void*) {
    return for_channels(in, [&](const Channels& channels) {
      return launch_for_pixels(sizes, stream, slope_kernel<2, Real>, slope_kernel<4, Real>, in,
                               maps, channels, motion, out);
    });
  });
}

cudaError_t warp_perspective_motion(const WarpInputs<double>& in, const double* left,
                                    const double* right, double* motion, Workspace& workspace,
                                    cudaStream_t stream) {
  const WarpSizes& sizes = in.sizes;
  const int64_t bytes = sizes.warp_batch * int64_t(sizeof(Nine));
  return with_maps(in, bytes, workspace, stream, [&](const Homography* maps, void* memory) {
    double* const moved = static_cast<double*>(memory);
    const int64_t blocks = blocks_for(sizes.warp_batch, kThreads);
    const cudaError_t error =
        launch(tangent_kernel, blocks, kThreads, stream, sizes, maps, left, right, moved);
    if (error) return error;
    return launch_for_pixels(sizes, stream, motion_kernel<2>, motion_kernel<4>, sizes, maps, moved,
                             motion);
  });
}

cudaError_t warp_perspective_motion_backward(const WarpInputs<double>& in,
                                             const double* grad_motion, const double* left,
                                             double* grad_right, Workspace& workspace,
                                             cudaStream_t stream) {
  const int64_t bytes = tiles_of(in.sizes) * int64_t(sizeof(Nine));
  return with_maps(in, bytes, workspace, stream, [&](const Homography* maps, void* memory) {
    return launch_matrix_gradient<true>(in, maps, grad_motion, static_cast<Nine*>(memory), left,
                                        grad_right, stream);
  });
}

template <class Real>
cudaError_t warp_perspective_backward(const WarpInputs<Real>& in, const WarpGradients<Real>& to,
                                      Workspace& workspace, cudaStream_t stream) {
  const Real* const grad = to.grad;
  Real* const grad_image = to.grad_image;
  const WarpSizes& sizes = in.sizes;
  const int64_t tiles = tiles_of(sizes), planes = sizes.image_batch * sizes.channels;
  const int64_t pixels = grad_image ? planes * sizes.height * sizes.width : 0;
  const int64_t bytes =
      tiles * int64_t(sizeof(Nine)) + planes * int64_t(sizeof(Bits)) + ExactSums::bytes_for(pixels);
  return with_maps(in, bytes, workspace, stream, [&](const Homography* maps, void* memory) {
    Nine* const of_tiles = static_cast<Nine*>(memory);
    Bits* const largest = reinterpret_cast<Bits*>(of_tiles + tiles);
    Bits* const low = largest + planes;
    const ExactSums sums{low, low + pixels, reinterpret_cast<uint32_t*>(low + 2 * pixels)};
    cudaError_t error = cudaSuccess;
    if (to.grad_warp)
      error =
          launch_matrix_gradient<false>(in, maps, grad, of_tiles, in.warp, to.grad_warp, stream);
    if (error || pixels == 0) return error;
    error = launch_for_pixels(sizes, stream, largest_kernel<2, Real>, largest_kernel<4, Real>,
                              sizes, maps, grad, largest);
    if (!error)
      error = launch_for_pixels(sizes, stream, add_kernel<2, Real>, add_kernel<4, Real>, sizes,
                                maps, grad, largest, sums);
    if (!error)
      error = launch(round_kernel<Real>, blocks_for(pixels, kThreads), kThreads, stream, sizes,
                     largest, sums, grad_image);
    return error;
  });
}

template cudaError_t warp_perspective(const WarpInputs<uint8_t>&, const uint8_t*, uint8_t*,
                                      Workspace&, cudaStream_t);
template cudaError_t warp_perspective(const WarpInputs<uint16_t>&, const uint16_t*, uint16_t*,
                                      Workspace&, cudaStream_t);
template cudaError_t warp_perspective(const WarpInputs<int16_t>&, const int16_t*, int16_t*,
                                      Workspace&, cudaStream_t);
template cudaError_t warp_perspective(const WarpInputs<Float16>&, const Float16*, Float16*,
                                      Workspace&, cudaStream_t);
template cudaError_t warp_perspective(const WarpInputs<BFloat16>&, const BFloat16*, BFloat16*,
                                      Workspace&, cudaStream_t);
template cudaError_t warp_perspective(const WarpInputs<float>&, const float*, float*, Workspace&,
                                      cudaStream_t);
template cudaError_t warp_perspective(const WarpInputs<double>&, const double*, double*, Workspace&,
                                      cudaStream_t);
template cudaError_t warp_perspective_backward(const WarpInputs<float>&,
                                               const WarpGradients<float>&, Workspace&,
                                               cudaStream_t);
template cudaError_t warp_perspective_slope(const WarpInputs<float>&, const Motions&, float*,
                                            Workspace&, cudaStream_t);
template cudaError_t warp_perspective_backward(const WarpInputs<double>&,
                                               const WarpGradients<double>&, Workspace&,
                                               cudaStream_t);
template cudaError_t warp_perspective_slope(const WarpInputs<double>&, const Motions&, double*,
                                            Workspace&, cudaStream_t);

}  // namespace calcops::ops::warp_perspective
