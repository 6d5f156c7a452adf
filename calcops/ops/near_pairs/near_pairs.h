// The arguments of a call of near_pairs. The contract is in near_pairs.cpp.
#pragma once

#include <calcops/numbers.h>
#include <calcops/operator.h>

namespace calcops::ops::near_pairs {

struct Call {
  View<const double, 2> positions;
  View<const int32_t, 2> list_neigh, image;
  View<const double, 2> offset;
  double cutoff;
  int64_t room;  // of a row of results
  View<int64_t, 2> near;
  View<double, 3> Rij;
  View<int64_t, 1> count;
  View<double, 1> nearest;

  CALCOPS_HD int64_t atoms() const { return list_neigh.shape[0]; }
  CALCOPS_HD int64_t slots() const { return list_neigh.shape[1]; }
};

}  // namespace calcops::ops::near_pairs
