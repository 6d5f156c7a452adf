// Cases for the CPU kernels of environment_spline.
#include "driver.h"

namespace calcops {
namespace {

enum Spline { kQuintic, kCubic };  // as in the contract

struct Size {
  int64_t atoms, slots, functions, directions;
};

template <class Real, class Index>
void run_case(Results& results, const Size& size, Spline spline) {
  constexpr int64_t kKinds = 2;
  const auto [n, K, functions, D] = size;
  Random random;
  std::vector<Real> d = random.numbers<Real>(3 * n * K),
                    along = random.numbers<Real>(3 * n * K * D);
  const auto grad = random.numbers<Real>(4 * n * kKinds * functions);
  std::vector<Index> kind(n * K);
  for (Index& each : kind) each = Index(random.below(kKinds + 1)) - 1;
  const std::vector<double> davg{0.1, 0, 0, 0, 0.2, 0.01, 0.02, -0.03};
  const std::vector<double> dstd{0.5, 0.25, 0.25, 0.25, 0.5, 0.3, 0.3, 0.2};
  // The first numbers of the rows lie inside the grid and beyond both of its ends.
  const std::vector<double> grid{0.5, 6, 1, 4};
  std::vector<Real> P(4 * n * kKinds * functions), grad_d(3 * n * K);

  const std::vector<Argument> in{{d, {n, K, 3}},
                                 {kind, {n, K}},
                                 {davg, {kKinds, 4}},
                                 {dstd, {kKinds, 4}},
                                 {grid, {kKinds, 2}},
                                 functions,
                                 0.4,
                                 1.2,
                                 int64_t(spline),
                                 {along, {n, K, D, 3}}};
  std::vector<Argument> forward = in, backward = in;
  forward.push_back({P, {n, 4, kKinds, functions}});
  backward.insert(backward.begin(), {grad, {n, 4, kKinds, functions}});
  backward.push_back({grad_d, {n, K, 3}});
  const std::string name = type_name<Real>() + ' ' + type_name<Index>() + ' ' + std::to_string(K) +
                           ' ' + std::to_string(functions) + ' ' + std::to_string(D) + ' ' +
                           (spline == kCubic ? "cubic" : "quintic");
  results.add(name + " bad", std::vector<int64_t>{call("_environment_spline_along", forward)});
  results.add(name + " P", P);
  call("_environment_spline_backward", backward);
  results.add(name + " d", grad_d);
}

}  // namespace

void run(Results& results) {
  for (const Size& size : {Size{1, 1, 6, 0}, {3, 7, 9, 1}, {40, 33, 20, 0}, {5, 9, 20, 2}})
    for (const Spline spline : {kQuintic, kCubic}) {
      run_case<float, int32_t>(results, size, spline);
      run_case<double, int64_t>(results, size, spline);
    }
}

}  // namespace calcops
