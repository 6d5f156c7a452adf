// Cases for the CPU kernel of density_net.
#include "driver.h"

namespace calcops {
namespace {

template <class Real>
void run_case(Results& results, int64_t F, int64_t K) {
  constexpr int64_t kAtoms = 50, kHarmonics = 9, kRadials = 7, kInvariants = 3, kNets = 2;
  constexpr int64_t kTerms = 6;
  const std::vector<int32_t> factors = {0, 0, -1, -1, 1, 2, 3,  -1, 4, 4, 5, 5,
                                        8, 7, 6,  -1, 3, 3, -1, -1, 2, 1, 1, 0};
  const std::vector<int32_t> invariant = {0, 1, 2, 1, 0, 2};
  std::vector<int64_t> net(kAtoms);
  for (int64_t i = 0; i < kAtoms; ++i) net[i] = i % 3 - 1;
  Random random;
  const auto radial = random.numbers<Real>(kAtoms * kRadials);
  const auto A = random.numbers<Real>(kHarmonics * kAtoms * F);
  const auto coefficient = random.numbers<Real>(kTerms);
  const auto w_radial = random.numbers<Real>(kNets * kRadials * K);
  const auto w_angular = random.numbers<Real>(kNets * kInvariants * F * K);
  const auto b0 = random.numbers<Real>(kNets * K), w1 = random.numbers<Real>(kNets * K);
  const auto bias = random.numbers<Real>(kNets);
  std::vector<Real> energy(kAtoms), grad_radial(kAtoms * kRadials);
  std::vector<Real> grad_A(kHarmonics * kAtoms * F);
  call("density_net", {{radial, {kAtoms, kRadials}},
                       {A, {kHarmonics, kAtoms, F}},
                       {net, {kAtoms}},
                       {factors, {kTerms, 4}},
                       {invariant, {kTerms}},
                       {coefficient, {kTerms}},
                       {w_radial, {kNets, kRadials, K}},
                       {w_angular, {kNets, kInvariants, F, K}},
                       {b0, {kNets, K}},
                       {w1, {kNets, K}},
                       {bias, {kNets}},
                       {energy, {kAtoms}},
                       {grad_radial, {kAtoms, kRadials}},
                       {grad_A, {kHarmonics, kAtoms, F}}});
  const std::string name = type_name<Real>() + ' ' + std::to_string(F) + ' ' + std::to_string(K);
  results.add("energy " + name, energy);
  results.add("grad_radial " + name, grad_radial);
  results.add("grad_A " + name, grad_A);
}

}  // namespace

void run(Results& results) {
  for (const int64_t F : {1, 5, 13}) {
    run_case<float>(results, F, 4 * F + 1);
    run_case<double>(results, F, 4 * F + 1);
  }
}

}  // namespace calcops
