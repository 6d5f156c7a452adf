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

namespace calcops {

/// calcops::warp_perspective
/// Perspective transformation of an image by a 3 x 3 matrix, as cv2.warpPerspective.
///
/// image          [H, W], [C, H, W] or [N, C, H, W]; uint8, uint16, int16, float16, bfloat16,
///                float32 or float64; any strides.
/// warp           [3, 3] or [N, 3, 3]; float32 or float64. Maps (x, y, 1) of the source to the
///                destination; only its ratios matter.
/// dsize          (height, width) of the result - unlike cv2's, which is (width, height). Left out:
///                the image's, as cv2's.
/// interpolation  "linear", "cubic" (Keys' kernel with a = -0.75) or "nearest" (half to even).
/// border_mode    what lies outside the image a b c d:  "constant" v v|a b c d|v v,
///                "replicate" a a|a b c d|d d,  "reflect" b a|a b c d|d c,
///                "reflect_101" c b|a b c d|c b,  "wrap" c d|a b c d|a b,  "transparent": a pixel
///                whose source is outside keeps the value it has in `destination`.
/// border_value   v: a float for all channels, or a list with one for each; None or [] is 0. It
///                becomes image's dtype.
/// inverse_map    warp maps the destination to the source (cv2.WARP_INVERSE_MAP).
/// destination    with "transparent", and only then: of the result's shape, image's dtype; it is
///                copied, not written to.
/// arithmetic     "exact", or "opencv4" for the bits of OpenCV 4.
///
/// Returns [h, w], [C, h, w] or [N, C, h, w] like image, with image's dtype. Integers are the
/// exact value rounded half to even; float32 is within 2.4e-7 of it for images in [0, 1], within
/// 1e-6 if cubic. N of image and of warp must be equal or one of them 1 or absent; an image without
/// N under N matrices gives [N, h, w] or [N, C, h, w].
///
/// Where W is 0, a coordinate is not finite, warp is singular and has to be inverted, warp is zero
/// or not finite, or the image has no pixels, the result is border_value, or destination, and the
/// gradients are exactly 0. A tap of weight zero is not used: an identity map keeps NaN and
/// infinity in their pixels.
///
/// Differentiable to any order in a floating image, in warp and in destination, in reverse and in
/// forward mode; "nearest" is piecewise constant, its gradient to warp is 0. At a pixel centre,
/// where "linear" has a kink, the slope is the one for a growing x or y, whatever the border mode;
/// with "transparent", in the last column or row, the one for a falling x or y. Deterministic on
/// the CPU and on CUDA; derivatives beyond the first run through ATen and follow
/// torch.use_deterministic_algorithms. Autocast changes nothing.
///
/// "opencv4" gives what the wheels of OpenCV 4.9 to 4.12 for x86-64 give, on every processor: it
/// rounds a position to 1/32 pixel and sums in OpenCV's order, takes a pixel to (0, 0) where W is 0
/// or warp cannot be inverted, uses taps of weight zero, and makes the least pixel of a
/// border_value that no int32 holds. (Later versions round some calls otherwise:
/// tests/opencv4_reference.py.) "linear" and "nearest" of any dtype but float16 and bfloat16,
/// height and width below 32767; not differentiable: a derivative is refused.

// The parameter a of the cubic kernel: Keys, IEEE Trans. Acoust. Speech Signal Process. 29, 1153
// (1981), with OpenCV's number.
constexpr double kKeys = -0.75;

enum class Interpolation { kNearest, kLinear, kCubic };
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

}  // namespace calcops
