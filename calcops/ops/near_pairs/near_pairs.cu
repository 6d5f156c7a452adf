// CUDA kernel of near_pairs: a warp packs the row of an atom, 32 slots at a time.
#include <cmath>

#include "near_pairs/near_pairs.h"

namespace calcops::ops::near_pairs {
namespace {

constexpr int kWarp = 32, kThreads = 128, kWarps = kThreads / kWarp;
constexpr unsigned kAll = 0xffffffff;

__global__ void __launch_bounds__(kThreads) near_pairs_kernel(List in, NearPairs out) {
  const int lane = threadIdx.x % kWarp;
  const int64_t i = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (i >= in.atoms) return;
  const double square = in.cutoff * in.cutoff;
  double nearest = INFINITY;
  bool is_wrong = false;
  int64_t count = 0;
  for (int64_t first = 0; first < in.slots; first += kWarp) {
    const int64_t slot = i * in.slots + first + lane;
    const int64_t j = first + lane < in.slots ? in.list_neigh[slot] : -1;
    const int64_t image = j == -1 ? 0 : in.image[slot];
    const bool exists = j >= 0 && j < in.natoms && image >= 0 && image < in.images;
    is_wrong |= j != -1 && !exists;
    double d[3] = {};
    double r2 = INFINITY;
    if (exists) {
      for (int x = 0; x < 3; ++x)
        d[x] = in.positions[3 * j + x] + in.offset[3 * image + x] - in.positions[3 * i + x];
      r2 = d[0] * d[0] + d[1] * d[1] + d[2] * d[2];
    }
    nearest = r2 < nearest ? r2 : nearest;
    const bool is_near = exists && !(r2 >= square);
    const unsigned near_lanes = __ballot_sync(kAll, is_near);
    const int64_t place = count + __popc(near_lanes & ((1u << lane) - 1));
    if (is_near && place < out.slots) {
      out.near[i * out.slots + place] = j;
      for (int x = 0; x < 3; ++x) out.Rij[3 * (i * out.slots + place) + x] = d[x];
    }
    count += __popc(near_lanes);
  }
  for (int64_t place = count + lane; place < out.slots; place += kWarp) {
    out.near[i * out.slots + place] = -1;
    for (int x = 0; x < 3; ++x) out.Rij[3 * (i * out.slots + place) + x] = 0;
  }
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const double other = __shfl_xor_sync(kAll, nearest, lanes);
    nearest = other < nearest ? other : nearest;
  }
  if (__any_sync(kAll, is_wrong)) nearest = NAN;
  if (lane == 0) {
    out.count[i] = count;
    out.nearest[i] = nearest;
  }
}

}  // namespace

cudaError_t near_pairs_cuda(const List& in, const NearPairs& out, cudaStream_t stream) {
  const int64_t blocks = (in.atoms + kWarps - 1) / kWarps;
  if (blocks > 0) near_pairs_kernel<<<unsigned(blocks), kThreads, 0, stream>>>(in, out);
  return cudaGetLastError();
}

}  // namespace calcops::ops::near_pairs
