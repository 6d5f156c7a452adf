// How the CPU kernels go through a row of slots.
#pragma once

#include <algorithm>
#include <cstdint>

#include "force/force_math.h"

namespace calcops::ops::force {

// Empty slots come in runs, which are passed over eight at a time.
template <class Index>
int64_t next_slot(const Index* list, int64_t slot, int64_t end) {
  for (++slot; slot + 8 <= end; slot += 8) {
    Index all = -1;
    for (int k = 0; k < 8; ++k) all &= list[slot + k];
    if (all != -1) break;
  }
  return slot;
}

// Prefetches a slot's numbers. Every row ends in empty slots, after which the hardware has to find
// out anew what is being read, so each slot prefetches the one that many slots further on: its
// counterpart in the next row, unless that is too far ahead to stay in the L2 cache.
template <int kNumbers, class Real>
void prefetch(const Real* x) {
  for (int byte = 0; byte < kNumbers * int(sizeof(Real)); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(x) + byte);
}
inline int64_t slots_ahead(int64_t neighbors) { return std::min<int64_t>(neighbors, 1024); }

// R4 is a Row where the virial is wanted, a number where only the force is.
template <class Real>
void load_r4(const Real* Rij, Row& r4) {
  r4 = Row{double(Rij[0]), double(Rij[1]), double(Rij[2]), 1.0};
}
template <class Real>
void load_r4(const Real*, double& r4) {
  r4 = 1;
}

}  // namespace calcops::ops::force
