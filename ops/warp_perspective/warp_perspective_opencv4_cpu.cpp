// CPU kernel of warp_perspective in the arithmetic of OpenCV 4.
#include "memory.h"
#include "warp_perspective/warp_perspective_rows.h"

// Included after warp_perspective_rows.h, whose pragma then holds for this file, too. GCC does not
// inline functions of other options.
#include "warp_perspective/warp_perspective_opencv4.h"

namespace calcops::ops::warp_perspective {
namespace {

// A run of at most kTileWidth pixels of one block's row: their positions, and whether all of a
// pixel's taps are in the image.
struct Run {
  int64_t count;
  int x[kTileWidth], y[kTileWidth], step_x[kTileWidth], step_y[kTileWidth];
  int64_t offset[kTileWidth];  // of the first tap
  bool inside[kTileWidth];

  template <bool kNearest>
  [[gnu::noinline]] void locate(const double* m, const opencv4::Block& block, int first,
                                const WarpSizes& sizes, const int64_t* stride) {
    const int width = static_cast<int>(sizes.width) - (kNearest ? 0 : 1),
              height = static_cast<int>(sizes.height) - (kNearest ? 0 : 1);
    for (int i = 0; i < static_cast<int>(count); ++i) {
      const opencv4::Position at = opencv4::position_of<kNearest>(m, block, first + i);
      x[i] = at.x;
      y[i] = at.y;
      step_x[i] = at.step_x;
      step_y[i] = at.step_y;
      offset[i] = at.y * stride[2] + at.x * stride[3];
      inside[i] = (at.x >= 0) & (at.x < width) & (at.y >= 0) & (at.y < height);
    }
  }

  opencv4::Position position(int64_t i) const { return {x[i], y[i], step_x[i], step_y[i]}; }
};

template <bool kNearest, class Pixel>
[[gnu::noinline]] void sample_inside(const Plane<Pixel>& plane, const Run& run, int64_t begin,
                                     int64_t end, Pixel* out) {
  if (kNearest) {
    for (int64_t i = begin; i < end; ++i) out[i] = plane.data[run.offset[i]];
    return;
  }
  Pairs<Pixel> pairs;
  pairs.read(plane, run.offset + begin, end - begin);
  for (int64_t i = begin; i < end; ++i) {
    const Pixel *above = pairs.above + 2 * (i - begin), *below = pairs.below + 2 * (i - begin);
    out[i] =
        opencv4::interpolate(above[0], above[1], below[0], below[1], run.step_x[i], run.step_y[i]);
  }
}

template <bool kNearest, class Pixel>
void sample_run(const Plane<Pixel>& plane, Border border, const Run& run, Pixel* out) {
  for (int64_t begin = 0, end; begin < run.count; begin = end) {
    const bool inside = run.inside[begin];
    for (end = begin + 1; end < run.count && run.inside[end] == inside;) ++end;
    if (inside) {
      sample_inside<kNearest>(plane, run, begin, end, out);
    } else {
      for (int64_t i = begin; i < end; ++i)
        opencv4::sample<kNearest>(plane, border, run.position(i), out[i]);
    }
  }
}

template <bool kNearest, class Pixel>
void forward_row(const WarpInputs<Pixel>& in, const double* m, int64_t n, int64_t v, Pixel* out) {
  const WarpSizes& sizes = in.sizes;
  const int64_t width = opencv4::block_width(sizes);
  Run run;
  for (int64_t left = 0; left < sizes.out_width; left += width) {
    const int64_t pixels = std::min(width, sizes.out_width - left);
    const opencv4::Block block = opencv4::block_of(m, left, v, pixels);
    for (int64_t first = 0; first < pixels; first += kTileWidth) {
      run.count = std::min(kTileWidth, pixels - first);
      run.locate<kNearest>(m, block, static_cast<int>(first), sizes, in.image_stride);
      for (int64_t c = 0; c < sizes.channels; ++c)
        sample_run<kNearest>(opencv4::make_plane(in, n, c, in.border_value[c]), sizes.border, run,
                             out + output_offset(sizes, n, c, v) + left + first);
    }
  }
}

}  // namespace

template <class Pixel>
void warp_perspective_opencv4_cpu(const WarpInputs<Pixel>& in, Pixel* out) {
  const WarpSizes& sizes = in.sizes;
  const bool nearest = sizes.interpolation == Interpolation::kNearest;
  std::vector<double> maps(9 * sizes.warp_batch);
  for (int64_t i = 0; i < sizes.warp_batch; ++i)
    opencv4::make_map(in.warp + 9 * i, sizes.inverse_map, maps.data() + 9 * i);
  prefer_large_pages(out, output_offset(sizes, sizes.batch, 0, 0));
  const int64_t grain = divide_up(1 << 14, std::max<int64_t>(sizes.out_width * sizes.channels, 1));
  parallel_for(sizes.batch * sizes.out_height, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = i / sizes.out_height, v = i % sizes.out_height;
      const double* m = maps.data() + (sizes.warp_batch == 1 ? 0 : 9 * n);
      nearest ? forward_row<true>(in, m, n, v, out) : forward_row<false>(in, m, n, v, out);
    }
  });
}

template void warp_perspective_opencv4_cpu(const WarpInputs<uint8_t>&, uint8_t*);
template void warp_perspective_opencv4_cpu(const WarpInputs<uint16_t>&, uint16_t*);
template void warp_perspective_opencv4_cpu(const WarpInputs<int16_t>&, int16_t*);
template void warp_perspective_opencv4_cpu(const WarpInputs<float>&, float*);
template void warp_perspective_opencv4_cpu(const WarpInputs<double>&, double*);

}  // namespace calcops::ops::warp_perspective
