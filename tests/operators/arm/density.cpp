// Cases for the CPU kernels of density.
#include "driver.h"

namespace calcops {
namespace {

struct Size {
  int64_t atoms, slots, rows, functions, harmonics, directions;
};

template <class Real, class Index>
void run_case(Results& results, const Size& size) {
  constexpr int64_t kKinds = 2;
  const auto [n, K, rows, functions, harmonics, D] = size;
  Random random;
  std::vector<Real> d = random.numbers<Real>(3 * n * K);
  const auto along = random.numbers<Real>(3 * n * K * D);
  const auto table = random.numbers<Real>(kKinds * rows * functions);
  const auto grad = random.numbers<Real>(harmonics * n * functions);
  std::vector<Index> kind(n * K);
  for (Index& each : kind) each = Index(random.below(kKinds + 1)) - 1;
  // Distances are below the second grid, in both and beyond the first.
  const std::vector<double> grid{0, 1.2, 0.5, 2};
  std::vector<Real> A(harmonics * n * functions), grad_d(3 * n * K), grad_table(table.size());

  const std::vector<Argument> in{
      {d, {n, K, 3}},      {kind, {n, K}}, {table, {kKinds, rows, functions}},
      {grid, {kKinds, 2}}, harmonics,      {along, {n, K, D, 3}}};
  std::vector<Argument> forward = in, backward = in, of_table = in;
  forward.push_back({A, {harmonics, n, functions}});
  for (auto* arguments : {&backward, &of_table})
    arguments->insert(arguments->begin(), {grad, {harmonics, n, functions}});
  backward.push_back({grad_d, {n, K, 3}});
  of_table.push_back({grad_table, {kKinds, rows, functions}});
  const std::string name = type_name<Real>() + ' ' + type_name<Index>() + ' ' + std::to_string(K) +
                           ' ' + std::to_string(functions) + ' ' + std::to_string(harmonics) + ' ' +
                           std::to_string(D);
  results.add(name + " bad", std::vector<int64_t>{call("_density_along", forward)});
  results.add(name + " A", A);
  call("_density_table_backward", of_table);
  results.add(name + " table", grad_table);
  if (D == 3) return;  // the most
  call("_density_backward", backward);
  results.add(name + " d", grad_d);
}

}  // namespace

void run(Results& results) {
  for (const Size& size : {Size{1, 1, 6, 1, 1, 0},
                           {9, 7, 9, 5, 25, 0},
                           {40, 33, 20, 9, 16, 0},
                           {3, 9, 20, 11, 9, 0},
                           {3, 9, 20, 3, 4, 0},
                           {3, 9, 20, 3, 1, 1},
                           {5, 9, 20, 5, 25, 1},
                           {5, 9, 20, 2, 25, 3}}) {
    run_case<float, int32_t>(results, size);
    run_case<double, int64_t>(results, size);
  }
}

}  // namespace calcops
