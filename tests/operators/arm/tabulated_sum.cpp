// Cases for the CPU kernels of tabulated_sum.
#include "driver.h"

namespace calcops {
namespace {

struct Size {
  int64_t atoms, slots, functions;
};

template <class Real, class Index>
void run_case(Results& results, const Size& size, int64_t order) {
  constexpr int64_t kKinds = 2, kCells = 5;
  const auto [n, K, M] = size;
  Random random;
  std::vector<Real> x = random.numbers<Real>(n * K), R = random.numbers<Real>(4 * n * K);
  const auto table = random.numbers<Real>(kKinds * kCells * 6 * M);
  const auto grad = random.numbers<Real>(4 * n * M);
  std::vector<Index> kind(n * K);
  for (Index& each : kind) each = Index(random.below(kKinds + 1)) - 1;
  // The grid has cells of two widths. Some numbers lie beyond its ends.
  const std::vector<double> grid{-0.75, 0.25, -0.25, 0.5, 0.75, -0.5, 0.25, 0.75, 1, 0.75};
  std::vector<Real> T(4 * n * M), of_x(n * K), of_R(4 * n * K);

  const std::vector<Argument> in{{x, {n, K}},         {R, {n, K, 4}},
                                 {kind, {n, K}},      {table, {kKinds, kCells, 6, M}},
                                 {grid, {kKinds, 5}}, order};
  std::vector<Argument> forward = in, backward = in;
  forward.push_back({T, {n, 4, M}});
  backward.insert(backward.begin(), {grad, {n, 4, M}});
  backward.push_back({of_x, {n, K}});
  backward.push_back({of_R, {n, K, 4}});
  const std::string name = type_name<Real>() + ' ' + type_name<Index>() + ' ' + std::to_string(K) +
                           ' ' + std::to_string(M) + ' ' + std::to_string(order);
  results.add(name + " bad", std::vector<int64_t>{call("tabulated_sum", forward)});
  results.add(name + " T", T);
  call("_tabulated_sum_backward", backward);
  results.add(name + " x", of_x);
  results.add(name + " R", of_R);
}

}  // namespace

void run(Results& results) {
  for (const Size& size : {Size{1, 1, 1}, {3, 7, 5}, {40, 33, 100}})
    for (const int64_t order : {0, 1, 2}) {
      run_case<float, int32_t>(results, size, order);
      run_case<double, int64_t>(results, size, order);
    }
}

}  // namespace calcops
