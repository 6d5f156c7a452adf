// Cases for the CPU kernels of warp_perspective.
#include "warp_perspective/warp_perspective.h"

#include <algorithm>

#include "driver.h"

namespace calcops {
using namespace ops::warp_perspective;

namespace {

// Maps from a result to its source: turned and tilted, enlarged, shifted by whole pixels, far
// outside, with a horizon that crosses the result, and singular.
constexpr double kMaps[][9] = {
    {0.83, -0.41, 7.3, 0.37, 0.92, -5.1, 1.1e-3, -7e-4, 1},
    {0.11, 0, 2, 0, 0.13, 1, 0, 0, 1},
    {1, 0, 3, 0, 1, -2, 0, 0, 1},
    {1, 0, 1e6, 0, 1, -1e6, 0, 0, 1},
    {1, 0.2, -9, 0.1, 1, 4, 0.02, -0.03, 0.5},
    {1, 2, 3, 2, 4, 6, 0, 0, 1},
};

template <class Pixel>
std::vector<Pixel> draw(Random& random, int64_t count) {
  std::vector<Pixel> pixels(count);
  for (Pixel& pixel : pixels)
    pixel = std::is_floating_point_v<Pixel> ? Pixel(random.number()) : Pixel(random.below(256));
  return pixels;
}

std::string name_of(const WarpSizes& sizes) {
  return ' ' + std::to_string(sizes.channels) + 'x' + std::to_string(sizes.width) + " to " +
         std::to_string(sizes.out_width) + " border " + std::to_string(int(sizes.border)) +
         " interpolation " + std::to_string(int(sizes.interpolation)) +
         (sizes.inverse_map ? " inverse" : "");
}

template <class Pixel>
void run_case(Results& results, const WarpSizes& sizes, bool channels_last) {
  Random random;
  const int64_t C = sizes.channels, H = sizes.height, W = sizes.width;
  const auto image = draw<Pixel>(random, sizes.image_batch * C * H * W);
  const std::vector<double> border(C, 77);
  WarpInputs<Pixel> in{sizes, image.data(), {C * H * W, H * W, W, 1}, kMaps[0], border.data()};
  if (channels_last) {
    const int64_t strides[] = {C * H * W, 1, W * C, C};
    std::copy_n(strides, 4, in.image_stride);
  }
  if (sizes.image_batch == 1) in.image_stride[0] = 0;
  const std::string name =
      type_name<Pixel>() + name_of(sizes) + (channels_last ? " channels last" : "");
  const int64_t pixels = sizes.batch * C * sizes.out_height * sizes.out_width;
  std::vector<Pixel> out(pixels);
  warp_perspective<Pixel>(in, nullptr, out.data());
  results.add(name, out);
  if constexpr (std::is_floating_point_v<Pixel>) {
    const auto grad = draw<Pixel>(random, pixels);
    std::vector<Pixel> grad_image(image.size());
    std::vector<double> grad_warp(9 * sizes.warp_batch);
    warp_perspective_backward<Pixel>(in, {grad.data(), grad_image.data(), grad_warp.data()});
    results.add(name + " grad_image", grad_image);
    results.add(name + " grad_warp", grad_warp);
  }
}

void run_motion(Results& results, const WarpSizes& sizes) {
  WarpSizes of_motion = sizes;
  of_motion.batch = sizes.warp_batch;
  of_motion.image_batch = 1;
  of_motion.channels = 3;
  const WarpInputs<double> in{of_motion, nullptr, {}, kMaps[0], nullptr};
  std::vector<double> motion(sizes.warp_batch * 3 * sizes.out_height * sizes.out_width);
  std::vector<double> gradient(sizes.warp_batch * 9);
  warp_perspective_motion(in, kMaps[0], kMaps[0], motion.data());
  results.add("motion" + name_of(sizes), motion);
  warp_perspective_motion_backward(in, motion.data(), kMaps[0], gradient.data());
  results.add("motion_backward" + name_of(sizes), gradient);
}

}  // namespace

void run(Results& results) {
  constexpr int64_t kMapCount = sizeof(kMaps) / sizeof(*kMaps);
  for (const Border border : {Border::kConstant, Border::kReplicate, Border::kReflect,
                              Border::kWrap, Border::kReflect101, Border::kTransparent})
    for (const Interpolation interpolation :
         {Interpolation::kNearest, Interpolation::kLinear, Interpolation::kCubic}) {
      const bool nearest = interpolation == Interpolation::kNearest;
      // An image wider than a tile under all maps, and a small image of three channels under one.
      const WarpSizes wide{kMapCount, 1,      kMapCount,     1,   40, 90, 17,
                           140,       border, interpolation, true};
      const WarpSizes small{2, 2, 1, 3, 9, 11, 17, 13, border, interpolation, nearest};
      for (const WarpSizes& sizes : {wide, small}) {
        run_case<uint8_t>(results, sizes, /*channels_last=*/true);
        for (const bool channels_last : {false, true}) {
          run_case<float>(results, sizes, channels_last);
          run_case<double>(results, sizes, channels_last);
        }
        if (!nearest) run_motion(results, sizes);
      }
      run_case<uint8_t>(results, wide, /*channels_last=*/false);
    }
}

}  // namespace calcops
