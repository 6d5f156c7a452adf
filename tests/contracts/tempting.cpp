// Right operators, of which a careless check of closeness would say that they are wrong.
//
// scaled           its gradient is one of PyTorch's sums, of thousands of terms that cancel
// squashed         its gradient has bfloat16 numbers whose difference is small
// zscore           float32 rounds the mean, which the exact result does not depend on
// largest_row_sum  equal rows share the gradient, unless a sum is rounded differently
// normalised       a sum near zero enlarges each rounding
// both_long        of 150 draws, one fits the limits
#include <calcops/operator.h>
#include <calcops/parallel.h>

#include <cmath>

using calcops::Kernel;
using calcops::Value;
using calcops::View;

namespace {

Value row_sums(const Value& x) {
  return Value::call("aten::sum.dim_IntList", x, Value::list(-1), /*keepdim=*/true);
}

const calcops::Composition compositions[] = {
    {"largest_row_sum",
     [](const Value* a) {
       return Value::call("aten::amax", row_sums(a[0]), Value::list(0), /*keepdim=*/true);
     }},
    {"normalised", [](const Value* a) { return a[0] / row_sums(a[0]); }},
};

const calcops::Derivative derivatives[] = {
    {"scaled",
     [](const Value* a, const Value* upstream, Value* gradients) {
       gradients[0] = upstream[0] * a[1];
       gradients[1] = Value::call("aten::sum", upstream[0] * a[0]);
     }},
    {"squashed",
     [](const Value* a, const Value* upstream, Value* gradients) {
       const Value y = Value::call("squashed", a[0]);
       gradients[0] = upstream[0] * (Value(1) - y * y);
     }},
};

const calcops::Contract contract(R"(
scaled(Tensor x, Tensor scale) -> Tensor y
squashed(Tensor h) -> Tensor z
zscore(Tensor r) -> Tensor s
largest_row_sum(Tensor m) -> Tensor top
normalised(Tensor m) -> Tensor n
both_long(Tensor p, Tensor q) -> Tensor count
x      [N, K]; float32 or float64.
scale  []; like x.
y      [N, K]; like x.
h      [...]; bfloat16, float32 or float64.
z      [...]; like h.
r      [N, K]; float32 or float64; K >= 2.
s      [N, K]; like r.
m      [N, K]; float32 or float64; N >= 1; K >= 1.
top    [1, 1]; like m.
n      [N, K]; like m.
p      [A, B]; float64; constant; A >= 100; B >= A.
q      [B]; float64; constant.
count  []; float64.
)",
                                 derivatives, compositions);

template <class Real>
void scaled(View<const Real, 2> x, View<const Real, 0> scale, View<Real, 2> y) {
  for (int64_t i = 0; i < x.shape[0] * x.shape[1]; ++i) y.data[i] = x.data[i] * scale();
}
const Kernel scaled_cpu("scaled", scaled<float>, scaled<double>);

template <class Real>
void squashed(View<const Real, 1> h, View<Real, 1> z) {
  for (int64_t i = 0; i < h.shape[0]; ++i) z(i) = std::tanh(h(i));
}
const Kernel squashed_cpu("squashed", squashed<float>, squashed<double>);

template <class Real>
void zscore(View<const Real, 2> r, View<Real, 2> s) {
  const int64_t count = r.shape[1];
  for (int64_t i = 0; i < r.shape[0]; ++i) {
    Real mean = 0, variance = 0;
    for (int64_t k = 0; k < count; ++k) mean += r(i, k) / Real(count);
    for (int64_t k = 0; k < count; ++k) variance += (r(i, k) - mean) * (r(i, k) - mean);
    const Real deviation = std::sqrt(variance / Real(count));
    for (int64_t k = 0; k < count; ++k) s(i, k) = (r(i, k) - mean) / deviation;
  }
}
const Kernel zscore_cpu("zscore", zscore<float>, zscore<double>);

void both_long(View<const double, 2> p, View<const double, 1>, View<double, 0> count) {
  count() = double(p.shape[0]);
}
const Kernel both_long_cpu("both_long", both_long);

}  // namespace
