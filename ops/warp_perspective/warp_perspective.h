// Perspective transformation of images. The contract; the mathematics is in
// warp_perspective_math.h.
//
// With m = warp, or its inverse where warp maps source to destination, destination pixel (u, v)
// shows
//
//   (X, Y, W) = m (u, v, 1),   out[v, u] = image at (x, y) = (X / W, Y / W)
//
// Pixel centres are at integers: (0, 0) is the centre of the first pixel. Coordinates are float64,
// and so is the sum over the taps, but for images of float32 and less, where it is float32. The
// order of every sum depends on sizes and matrices alone, so that the result is the same bit for
// bit, whatever the number of threads.
// Source: OpenCV's cv::warpPerspective, whose coordinates are float32 or, in older versions,
// multiples of 1/32 pixel; these are not rounded, unless `arithmetic` asks for it.
#pragma once

#include <cstdint>

#ifndef CALCOPS_NO_CUDA
#include <cuda_runtime_api.h>
#endif

namespace calcops::ops::warp_perspective {

// The parameter a of the cubic kernel: Keys, IEEE Trans. Acoust. Speech Signal Process. 29, 1153
// (1981), with OpenCV's number.
constexpr double kKeys = -0.75;

// In the order of the contract.
enum class Interpolation { kLinear, kCubic, kNearest };
enum class Border { kConstant, kReplicate, kReflect, kWrap, kReflect101, kTransparent };

// What a call samples, and how. N = batch; an image_batch or warp_batch of 1 serves all of N.
struct WarpSizes {
  int64_t batch, image_batch, warp_batch, channels;
  int64_t height, width, out_height, out_width;
  Border border;
  Interpolation interpolation;
  bool inverse_map;
};

template <class Pixel>
struct WarpInputs {
  WarpSizes sizes;
  const Pixel* image;
  int64_t image_stride[4];     // of N, C, H, W, in elements
  const double* warp;          // [warp_batch, 3, 3]
  const double* border_value;  // [C], in host memory, also for CUDA
};

template <class Real>
struct WarpGradients {
  const Real* grad;   // [N, C, h, w], the gradient of the result
  Real* grad_image;   // [image_batch, C, H, W]; nullptr: not wanted
  double* grad_warp;  // [warp_batch, 3, 3]; nullptr: not wanted
};

template <class Real>
struct WarpTangent {
  const double* warp;  // [warp_batch, 3, 3], the tangent of the matrices
  Real* out;           // [N, C, h, w], that of the result
};

// What the derivatives of a derivative have to know of a destination pixel: its source, how far
// that is from the tap before it and the slope along both axes, and the columns, then the rows, of
// its taps, -1 outside. All are 0 where there is no source.
enum CellNumber { kX, kY, kW, kFractionX, kFractionY, kSlopeX, kSlopeY, kTap };

// The taps along an axis.
constexpr int taps_of(Interpolation interpolation) {
  return interpolation == Interpolation::kCubic ? 4 : 2;
}
constexpr int cell_numbers(Interpolation interpolation) {
  return kTap + 2 * taps_of(interpolation);
}

// With Border::kTransparent, `out` holds the destination.
template <class Pixel>
void warp_perspective_cpu(const WarpInputs<Pixel>& in, Pixel* out);
// In the arithmetic of OpenCV 4: linear and nearest, of every type that OpenCV has.
template <class Pixel>
void warp_perspective_opencv4_cpu(const WarpInputs<Pixel>& in, Pixel* out);
template <class Real>
void warp_perspective_backward_cpu(const WarpInputs<Real>& in, const WarpGradients<Real>& to);
// How the result moves with the matrices.
template <class Real>
void warp_perspective_tangent_cpu(const WarpInputs<Real>& in, const WarpTangent<Real>& tangent);
// cells [warp_batch, cell_numbers, h * w]; scale [warp_batch], 0 of a matrix that has no source.
void warp_perspective_cells_cpu(const WarpSizes& sizes, const double* warp, double* cells,
                                double* scale);

#ifndef CALCOPS_NO_CUDA
cudaError_t warp_perspective_cells_cuda(const WarpSizes& sizes, const double* warp, double* cells,
                                        double* scale, cudaStream_t stream);
template <class Pixel>
cudaError_t warp_perspective_cuda(const WarpInputs<Pixel>& in, Pixel* out, cudaStream_t stream);
template <class Pixel>
cudaError_t warp_perspective_opencv4_cuda(const WarpInputs<Pixel>& in, Pixel* out,
                                          cudaStream_t stream);
// workspace: [warp_batch, 3, 3] doubles, any content.
template <class Real>
cudaError_t warp_perspective_tangent_cuda(const WarpInputs<Real>& in,
                                          const WarpTangent<Real>& tangent, void* workspace,
                                          cudaStream_t stream);
// Bytes of device memory that the backward works in; any content, 8-byte aligned.
int64_t warp_perspective_backward_cuda_workspace(const WarpSizes& sizes);
template <class Real>
cudaError_t warp_perspective_backward_cuda(const WarpInputs<Real>& in,
                                           const WarpGradients<Real>& to, void* workspace,
                                           cudaStream_t stream);
#endif

}  // namespace calcops::ops::warp_perspective
