// Cases for the CPU kernel of screened_repulsion.
#include "driver.h"

namespace calcops {
namespace {

template <class Real>
void run_case(Results& results) {
  constexpr int64_t kAtoms = 40, kSlots = 9;
  Random random;
  const auto d = random.numbers<Real>(3 * kAtoms * kSlots);
  const std::vector<Real> table = {Real(0.4), 2, 10, 3, 5, 1, 3, Real(0.4), 1, Real(0.2)};
  std::vector<int64_t> kind(kAtoms * kSlots);
  for (int64_t slot = 0; slot < kAtoms * kSlots; ++slot) kind[slot] = slot % 5 == 0 ? -1 : 0;
  std::vector<Real> energy(kAtoms), grad(3 * kAtoms * kSlots);
  call("screened_repulsion", {{d, {kAtoms, kSlots, 3}},
                              {kind, {kAtoms, kSlots}},
                              {table, {1, 10}},
                              {energy, {kAtoms}},
                              {grad, {kAtoms, kSlots, 3}}});
  results.add("energy " + type_name<Real>(), energy);
  results.add("grad " + type_name<Real>(), grad);
}

}  // namespace

void run(Results& results) {
  run_case<float>(results);
  run_case<double>(results);
}

}  // namespace calcops
