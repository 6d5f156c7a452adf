// How the CPU kernels walk through a row of slots.
#pragma once

#include <algorithm>
#include <cstdint>

#include "force/force_math.h"

namespace calcops::ops::force {

// Return the slot at which to go on after the empty one at `slot`. All slots that are passed over
// are empty. Empty slots come in runs, which are skipped eight at a time.
template <class Index>
int64_t next_slot(const Index* list, int64_t slot, int64_t end) {
  for (++slot; slot + 8 <= end; slot += 8) {
    Index all = -1;
    for (int k = 0; k < 8; ++k) all &= list[slot + k];
    if (all != -1) break;
  }
  return slot;
}

// Prefetch the numbers of one slot.
template <int kNumbers, class Real>
void prefetch(const Real* x) {
  for (int byte = 0; byte < kNumbers * int(sizeof(Real)); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(x) + byte);
}

// Return how many slots ahead to prefetch. Rows end in empty slots, after which the hardware's own
// prefetching starts anew. So each slot prefetches its counterpart in the next row, or a nearer
// slot if that one is too far ahead to stay in the L2 cache.
inline int64_t slots_ahead(int64_t neighbors) { return std::min<int64_t>(neighbors, 1024); }

// Load R4: a Row if the virial is wanted, or the number 1 for the force alone.
template <class Real>
void load_r4(const Real* Rij, Row& r4) {
  r4 = Row{double(Rij[0]), double(Rij[1]), double(Rij[2]), 1.0};
}
template <class Real>
void load_r4(const Real*, double& r4) {
  r4 = 1;
}

}  // namespace calcops::ops::force
