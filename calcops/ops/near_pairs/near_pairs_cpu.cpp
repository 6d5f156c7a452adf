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
// Return the position of a wrong entry, or kNone.
int64_t fill_row(const List& in, int64_t i, int64_t* near, double* Rij, const NearPairs& out) {
  const double x = in.positions[3 * i], y = in.positions[3 * i + 1], z = in.positions[3 * i + 2];
  const double square = in.cutoff * in.cutoff;
  double nearest = INFINITY;
  int64_t count = 0, wrong = kNone;
  for (int64_t slot = i * in.slots; slot < (i + 1) * in.slots; ++slot) {
    const int64_t j = in.list_neigh[slot];
    const int64_t image = in.image[slot];
    if (uint64_t(image) >= uint64_t(in.images)) wrong = first_of(wrong, in.atoms * in.slots + slot);
    if (uint64_t(j) >= uint64_t(in.natoms)) {
      if (j != -1) wrong = first_of(wrong, slot);
      continue;
    }
    if (uint64_t(image) >= uint64_t(in.images)) continue;
    const double* r = in.positions + 3 * j;
    const double* offset = in.offset + 3 * image;
    const double dx = r[0] + offset[0] - x, dy = r[1] + offset[1] - y, dz = r[2] + offset[2] - z;
    const double r2 = dx * dx + dy * dy + dz * dz;
    near[count] = j;
    Rij[3 * count] = dx, Rij[3 * count + 1] = dy, Rij[3 * count + 2] = dz;
    nearest = r2 < nearest ? r2 : nearest;
    count += !(r2 >= square);
  }
  const int64_t kept = std::min(count, out.slots);
  std::copy_n(near, kept, out.near + i * out.slots);
  std::fill_n(out.near + i * out.slots + kept, out.slots - kept, -1);
  std::copy_n(Rij, 3 * kept, out.Rij + 3 * i * out.slots);
  std::fill_n(out.Rij + 3 * (i * out.slots + kept), 3 * (out.slots - kept), 0.0);
  out.count[i] = count;
  out.nearest[i] = nearest;
  return wrong;
}

}  // namespace

int64_t near_pairs_cpu(const List& in, const NearPairs& out) {
  return parallel_first(in.atoms, kGrain, [&](int64_t begin, int64_t end) {
    const Scratch<int64_t> near(in.slots + 1);
    const Scratch<double> Rij(3 * in.slots + 3);
    int64_t wrong = kNone;
    for (int64_t i = begin; i < end; ++i)
      wrong = first_of(wrong, fill_row(in, i, near.get(), Rij.get(), out));
    return wrong;
  });
}

}  // namespace calcops::ops::near_pairs
