// Cases for the CPU kernel of near_pairs.
#include "driver.h"

namespace calcops {

void run(Results& results) {
  constexpr int64_t kAtoms = 70, kSlots = 33, kImages = 3;
  Random random;
  const auto positions = random.numbers<double>(3 * kAtoms);
  const auto offset = random.numbers<double>(3 * kImages);
  std::vector<int32_t> list_neigh(kAtoms * kSlots), image(kAtoms * kSlots);
  for (int64_t slot = 0; slot < kAtoms * kSlots; ++slot) {
    list_neigh[slot] = int32_t(7 * slot % (kAtoms + 1)) - 1;
    image[slot] = int32_t(slot % kImages);
  }
  for (const int64_t slots : {0, 5, 33}) {
    std::vector<int64_t> near(kAtoms * slots), count(kAtoms);
    std::vector<double> Rij(3 * kAtoms * slots), nearest(kAtoms);
    call("near_pairs", {{positions, {kAtoms, 3}},
                        {list_neigh, {kAtoms, kSlots}},
                        {image, {kAtoms, kSlots}},
                        {offset, {kImages, 3}},
                        1.5,
                        slots,
                        {near, {kAtoms, slots}},
                        {Rij, {kAtoms, slots, 3}},
                        {count, {kAtoms}},
                        {nearest, {kAtoms}}});
    const std::string name = std::to_string(slots);
    results.add("near " + name, near);
    results.add("count " + name, count);
    results.add("Rij " + name, Rij);
    results.add("nearest " + name, nearest);
  }
}

}  // namespace calcops
