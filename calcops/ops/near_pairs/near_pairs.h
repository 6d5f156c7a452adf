// The pairs of a neighbour list that are within the cutoff now. The contract is in near_pairs.cpp.
//
//   Rij = r_j + offset - r_i
//
// A list with a skin holds for many steps, and only the pairs within the cutoff count in each of
// them. One pass finds these, and packs them into rows without gaps.
#pragma once

#include <cstdint>

#ifndef CALCOPS_NO_CUDA
#include <cuda_runtime_api.h>
#endif

namespace calcops::ops::near_pairs {

struct List {
  int64_t atoms, slots;       // n, K
  const double* positions;    // [N, 3], N >= n
  const int32_t* list_neigh;  // [n, K], -1 in empty slots
  const int32_t* image;       // [n, K]
  const double* offset;       // [S, 3]
  int64_t natoms, images;     // N, S
  double cutoff;
};

// Rows of `slots` pairs. `count` and `nearest` are those of all pairs of the list.
struct NearPairs {
  int64_t slots;
  int64_t* near;    // [n, slots], -1 after the last pair
  double* Rij;      // [n, slots, 3], 0 after the last pair
  int64_t* count;   // [n]
  double* nearest;  // [n]
};

// Return the position of a wrong entry, in list_neigh or, n*K further, in image; or kNone.
int64_t near_pairs_cpu(const List& in, const NearPairs& out);

#ifndef CALCOPS_NO_CUDA
cudaError_t near_pairs_cuda(const List& in, const NearPairs& out, cudaStream_t stream);
#endif

}  // namespace calcops::ops::near_pairs
