// CPU kernel of near_pairs.
#include <calcops/memory.h>
#include <calcops/parallel.h>

#include <algorithm>
#include <cmath>

#include "near_pairs/near_pairs.h"

namespace calcops::ops::near_pairs {
namespace {

constexpr int64_t kGrain = 64;  // rows for which another thread pays

// Collect a row in scratch memory: each slot is written where the next near pair belongs, and the
// next one overwrites a pair that is far. A branch would be mispredicted at every third slot.
// Return the position of a wrong entry, in list_neigh or, behind it, in image; or kNone.
int64_t fill_row(const Call& call, int64_t i, int64_t* near, double* Rij) {
  const int64_t slots = call.slots(), all = call.atoms() * slots, room = call.room;
  const int64_t natoms = call.positions.shape[0], images = call.offset.shape[0];
  const double* own = call.positions.data + 3 * i;
  const double x = own[0], y = own[1], z = own[2], square = call.cutoff * call.cutoff;
  double nearest = INFINITY;
  int64_t count = 0, wrong = kNone;
  for (int64_t slot = i * slots; slot < (i + 1) * slots; ++slot) {
    const int64_t j = call.list_neigh.data[slot];
    const int64_t image = call.image.data[slot];
    if (uint64_t(image) >= uint64_t(images)) wrong = first_of(wrong, all + slot);
    if (uint64_t(j) >= uint64_t(natoms)) {
      if (j != -1) wrong = first_of(wrong, slot);
      continue;
    }
    if (uint64_t(image) >= uint64_t(images)) continue;
    const double* r = call.positions.data + 3 * j;
    const double* offset = call.offset.data + 3 * image;
    const double dx = r[0] + offset[0] - x, dy = r[1] + offset[1] - y, dz = r[2] + offset[2] - z;
    const double r2 = dx * dx + dy * dy + dz * dz;
    near[count] = j;
    Rij[3 * count] = dx, Rij[3 * count + 1] = dy, Rij[3 * count + 2] = dz;
    nearest = r2 < nearest ? r2 : nearest;
    count += !(r2 >= square);
  }
  const int64_t kept = std::min(count, room);
  std::copy_n(near, kept, call.near.data + i * room);
  std::fill_n(call.near.data + i * room + kept, room - kept, -1);
  std::copy_n(Rij, 3 * kept, call.Rij.data + 3 * i * room);
  std::fill_n(call.Rij.data + 3 * (i * room + kept), 3 * (room - kept), 0.0);
  call.count(i) = count;
  call.nearest(i) = nearest;
  return wrong;
}

int64_t near_pairs(Call call) {
  return parallel_first(call.atoms(), kGrain, [&](int64_t begin, int64_t end) {
    const Scratch<int64_t> near_of_row(call.slots() + 1);
    const Scratch<double> Rij_of_row(3 * call.slots() + 3);
    int64_t wrong = kNone;
    for (int64_t i = begin; i < end; ++i)
      wrong = first_of(wrong, fill_row(call, i, near_of_row.get(), Rij_of_row.get()));
    return wrong;
  });
}

const Kernel kCpu("near_pairs", near_pairs);

}  // namespace
}  // namespace calcops::ops::near_pairs
