// Perspective transformation of images. The contract is in warp_perspective.cpp, the mathematics in
// warp_perspective_math.h.
//
// The matrix m is warp if inverse_map, otherwise the inverse of warp. The pixel (u, v) of the
// destination (the result) has its source at the position (x, y) of the image:
//
//   (X, Y, W) = m (u, v, 1),   out[v, u] = image at (x, y) = (X / W, Y / W)
//
// Where m moves along a tangent m', (X', Y', W') = m' (u, v, 1), and the source moves by
//
//   (x', y') = ((X', Y') - W' (x, y)) / W
//
// The motion of a pixel is (x', y', W' / W), and 0 if it has no source.
//
// The taps are the pixels of the image near the source, whose weighted sum is the result. Pixel
// centres are at integers: (0, 0) is the centre of the first pixel. Coordinates are float64. The
// sum over the taps is float32 for images of float32, float16 and bfloat16, otherwise float64. The
// order of every sum depends on sizes and matrices alone. So the result is the same bit for bit,
// whatever the number of threads.
//
// Source: OpenCV's cv::warpPerspective. Its coordinates are float32 or, in older versions,
// multiples of 1/32 pixel.
#pragma once

#include <calcops/operator.h>

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

// The sizes and options of a call. N = batch; image_batch and warp_batch are N, or 1 if one image
// or one matrix serves all.
struct WarpSizes {
  int64_t batch, image_batch, warp_batch, channels;
  int64_t height, width, out_height, out_width;
  Border border;
  Interpolation interpolation;
  bool inverse_map;
  // Derivatives use the interpolated value's derivative of this order for the source's x and y.
  int order_x = 0, order_y = 0;
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

// [N, 3, h, w]. If one motion serves all results, its stride for N is 0.
using Motions = Strided<const double, 4>;

// Copy `destination` to `out`, if it is given, and write the pixels that have a source. Each
// function has an overload for CUDA. If its workspace has no memory, it only sets the size.
template <class Pixel>
void warp_perspective(const WarpInputs<Pixel>& in, const Pixel* destination, Pixel* out);
template <class Real>
void warp_perspective_backward(const WarpInputs<Real>& in, const WarpGradients<Real>& to);
// Write the derivative of the result along a motion.
template <class Real>
void warp_perspective_slope(const WarpInputs<Real>& in, const Motions& motion, Real* out);
// Write the motion for the tangents of m that homography_tangent() gives.
void warp_perspective_motion(const WarpInputs<double>& in, const double* left, const double* right,
                             double* motion);
// Write the gradient for `right` from that for the motion.
void warp_perspective_motion_backward(const WarpInputs<double>& in, const double* grad_motion,
                                      const double* left, double* grad_right);

#ifndef CALCOPS_NO_CUDA
template <class Pixel>
cudaError_t warp_perspective(const WarpInputs<Pixel>& in, const Pixel* destination, Pixel* out,
                             Workspace& workspace, cudaStream_t stream);
template <class Real>
cudaError_t warp_perspective_backward(const WarpInputs<Real>& in, const WarpGradients<Real>& to,
                                      Workspace& workspace, cudaStream_t stream);
template <class Real>
cudaError_t warp_perspective_slope(const WarpInputs<Real>& in, const Motions& motion, Real* out,
                                   Workspace& workspace, cudaStream_t stream);
cudaError_t warp_perspective_motion(const WarpInputs<double>& in, const double* left,
                                    const double* right, double* motion, Workspace& workspace,
                                    cudaStream_t stream);
cudaError_t warp_perspective_motion_backward(const WarpInputs<double>& in,
                                             const double* grad_motion, const double* left,
                                             double* grad_right, Workspace& workspace,
                                             cudaStream_t stream);
#endif

}  // namespace calcops::ops::warp_perspective
