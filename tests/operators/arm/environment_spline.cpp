// Cases for the CPU kernels of environment_spline.
#include "environment_spline/environment_spline.h"

#include "driver.h"

namespace calcops {
using namespace ops::environment_spline;

namespace {

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

  const SplineInputs<Real, Index> in{
      n,           K,           kKinds,      functions, D,   d.data(), kind.data(), along.data(),
      davg.data(), dstd.data(), grid.data(), 0.4,       1.2, spline};
  const std::string name = type_name<Real>() + ' ' + type_name<Index>() + ' ' + std::to_string(K) +
                           ' ' + std::to_string(functions) + ' ' + std::to_string(D) + ' ' +
                           (spline == Spline::kCubic ? "cubic" : "quintic");
  results.add(name + " bad", std::vector<int64_t>{environment_spline_cpu(in, P.data())});
  results.add(name + " P", P);
  environment_spline_backward_cpu(in, grad.data(), grad_d.data());
  results.add(name + " d", grad_d);
}

}  // namespace

void run(Results& results) {
  for (const Size& size : {Size{1, 1, 6, 0}, {3, 7, 9, 1}, {40, 33, 20, 0}, {5, 9, 20, 2}})
    for (const Spline spline : {Spline::kQuintic, Spline::kCubic}) {
      run_case<float, int32_t>(results, size, spline);
      run_case<double, int64_t>(results, size, spline);
    }
}

}  // namespace calcops
