#include <calcops/operator.h>

const calcops::Contract contract(R"(
weighted_sum(Tensor x, Tensor weights) -> Tensor y
  Sum of each row of x, weighted.
x        [B, N]; float32 or float64.
weights  [N]; like x.
y        [B]; like x.
)");

template <class Real>
void weighted_sum(calcops::View<const Real, 2> x, calcops::View<const Real, 1> weights,
                  calcops::View<Real, 1> y) {
  for (int64_t b = 0; b < x.shape[0]; ++b) {
    double sum = 0;
    for (int64_t i = 0; i < x.shape[1]; ++i) sum += double(x(b, i)) * weights(i);
    y(b) = Real(sum);
  }
}
const calcops::Kernel cpu("weighted_sum", weighted_sum<float>, weighted_sum<double>);
