// CUDA kernel of near_pairs: a warp packs the row of an atom, 32 slots at a time.
#include <calcops/launch.h>

#include <cmath>

#include "near_pairs/near_pairs.h"

namespace calcops::ops::near_pairs {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr unsigned kAll = 0xffffffff;

__global__ void __launch_bounds__(kThreads) near_pairs_kernel(Call call) {
  const int64_t slots = call.slots(), room = call.room;
  const int lane = threadIdx.x % kWarp;
  const int64_t i = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (i >= call.atoms()) return;
  const double square = call.cutoff * call.cutoff;
  double nearest = INFINITY;
  bool is_wrong = false;
  int64_t count = 0;
  for (int64_t first = 0; first < slots; first += kWarp) {
    const int64_t slot = i * slots + first + lane;
    const int64_t j = first + lane < slots ? call.list_neigh.data[slot] : -1;
    const int64_t image = j == -1 ? 0 : call.image.data[slot];
    const bool exists =
        j >= 0 && j < call.positions.shape[0] && image >= 0 && image < call.offset.shape[0];
    is_wrong |= j != -1 && !exists;
    double d[3] = {};
    double r2 = INFINITY;
    if (exists) {
      for (int x = 0; x < 3; ++x)
        d[x] = call.positions.data[3 * j + x] + call.offset.data[3 * image + x] -
               call.positions.data[3 * i + x];
      r2 = d[0] * d[0] + d[1] * d[1] + d[2] * d[2];
    }
    nearest = r2 < nearest ? r2 : nearest;
    const bool is_near = exists && !(r2 >= square);
    const unsigned near_lanes = __ballot_sync(kAll, is_near);
    const int64_t place = count + __popc(near_lanes & ((1u << lane) - 1));
    if (is_near && place < room) {
      call.near.data[i * room + place] = j;
      for (int x = 0; x < 3; ++x) call.Rij.data[3 * (i * room + place) + x] = d[x];
    }
    count += __popc(near_lanes);
  }
  for (int64_t place = count + lane; place < room; place += kWarp) {
    call.near.data[i * room + place] = -1;
    for (int x = 0; x < 3; ++x) call.Rij.data[3 * (i * room + place) + x] = 0;
  }
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const double other = __shfl_xor_sync(kAll, nearest, lanes);
    nearest = other < nearest ? other : nearest;
  }
  if (__any_sync(kAll, is_wrong)) nearest = NAN;
  if (lane == 0) {
    call.count(i) = count;
    call.nearest(i) = nearest;
  }
}

cudaError_t near_pairs(Call call, cudaStream_t stream) {
  return launch(near_pairs_kernel, blocks_for(call.atoms(), kWarps), kThreads, stream, call);
}

const Kernel kCuda("near_pairs", near_pairs);

}  // namespace
}  // namespace calcops::ops::near_pairs
