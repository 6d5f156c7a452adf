// Cases for the CPU kernel of matrix_product.
#include "driver.h"

namespace calcops {
namespace {

struct Size {
  int64_t rows, terms, columns;
};

template <class Real>
void run_case(Results& results, const Size& size) {
  const auto [N, K, M] = size;
  Random random;
  const auto x = random.numbers<Real>(N * K), weights = random.numbers<Real>(K * M);
  std::vector<Real> y(N * M);
  call("matrix_product", {{x, {N, K}}, {weights, {K, M}}, {y, {N, M}}});
  results.add(type_name<Real>() + ' ' + std::to_string(N) + ' ' + std::to_string(M), y);
}

}  // namespace

void run(Results& results) {
  for (const Size& size : {Size{1, 1, 1}, {7, 3, 5}, {100, 2, 33}, {50, 2, 100}}) {
    run_case<float>(results, size);
    run_case<double>(results, size);
  }
}

}  // namespace calcops
