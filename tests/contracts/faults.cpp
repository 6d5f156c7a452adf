// Small operators as users write them. Compiled with -DFAULTS, each has one fault. Without it, all
// are right. test_faults.py tests both with the contract test; bench/compare_opcheck.py shows what
// PyTorch's own checks find.
//
// operator          fault                                                       found by
// row_squares       the last block of four reads beyond the end of x            memory
// row_sums          returns early for rows of no numbers: sums are not written  written
// softplus          the second derivative has the wrong sign                    second
// scaled_rows       the gradient for scale is a mean where it must be a sum     reverse
// squared_distance  forward mode forgets the tangent of b                       forward
// median            sorts its argument in place                                 written
// total             adds the threads' sums, so the last bits depend on threads  threads
// bond_energy       multiplies empty slots by 0, which keeps their NaN          empty_slots
// running_sum       joins the items of vmap: one continues the sum of another   vmap
// inverse_root      float32 has three digits, by a fast inverse square root     precision
// column_sums       takes any strides, but ignores the one of the columns       layouts
// nonnegative       the result is shorter in a call with data than on meta      meta
#include <calcops/operator.h>
#include <calcops/parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <vector>

using calcops::Check;
using calcops::Contract;
using calcops::Derivative;
using calcops::Kernel;
using calcops::Strided;
using calcops::Value;
using calcops::View;

// The gradient for x [N, K] from the one for sums of its rows, [N].
Value for_rows(const Value& upstream) { return Value::call("aten::unsqueeze", upstream, -1); }

// ---- memory -------------------------------------------------------------------------------------

const Derivative kRowSquaresDerivatives[] = {
    {"row_squares", [](const Value* arguments, const Value* upstream, Value* gradients) {
       gradients[0] = for_rows(upstream[0]) * arguments[0] * 2;
     }}};

const Contract kRowSquares(R"(
row_squares(Tensor x) -> Tensor square
  The sum of squares of each row.
x       [N, K]; float32 or float64.
square  [N]; like x.
)",
                           kRowSquaresDerivatives);

template <class Real>
void row_squares(View<const Real, 2> x, View<Real, 1> square) {
  for (int64_t i = 0; i < x.shape[0]; ++i) {
    double sum = 0;
    for (int64_t begin = 0; begin < x.shape[1]; begin += 4) {
      const int64_t count = std::min<int64_t>(4, x.shape[1] - begin);
      Real block[4];
#ifdef FAULTS
      std::copy_n(&x(i, begin), 4, block);
#else
      std::copy_n(&x(i, begin), count, block);
#endif
      for (int64_t k = 0; k < count; ++k) sum += double(block[k]) * block[k];
    }
    square(i) = Real(sum);
  }
}
const Kernel kRowSquaresCpu("row_squares", row_squares<float>, row_squares<double>);

// ---- an element that is not written -------------------------------------------------------------

const Derivative kRowSumsDerivatives[] = {
    {"row_sums", [](const Value* arguments, const Value* upstream, Value* gradients) {
       gradients[0] = Value::call("aten::expand", for_rows(upstream[0]), arguments[0].shape());
     }}};

const Contract kRowSums(R"(
row_sums(Tensor x) -> Tensor sum
  The sum of each row.
x    [N, K]; float64.
sum  [N]; like x.
)",
                        kRowSumsDerivatives);

void row_sums(View<const double, 2> x, View<double, 1> sum) {
#ifdef FAULTS
  if (x.shape[0] * x.shape[1] == 0) return;
#endif
  for (int64_t i = 0; i < x.shape[0]; ++i) {
    sum(i) = 0;
    for (int64_t k = 0; k < x.shape[1]; ++k) sum(i) += x(i, k);
  }
}
const Kernel kRowSumsCpu("row_sums", row_sums);

// ---- a second derivative ------------------------------------------------------------------------

const Derivative kSoftplusDerivatives[] = {
    {"softplus",
     [](const Value* arguments, const Value* upstream, Value* gradients) {
       gradients[0] = upstream[0] * Value::call("_logistic", arguments[0]);
     }},
    {"_logistic", [](const Value* arguments, const Value* upstream, Value* gradients) {
       const Value y = Value::call("_logistic", arguments[0]);
#ifdef FAULTS
       gradients[0] = upstream[0] * y * (y - 1);
#else
       gradients[0] = upstream[0] * y * (1 - y);
#endif
     }}};

const Contract kSoftplus(R"(
softplus(Tensor x) -> Tensor y
  log(1 + exp(x)) of each number.
_logistic(Tensor x) -> Tensor y
  The derivative of softplus.
x  [...]; float64.
y  [...]; like x.
)",
                         kSoftplusDerivatives);

void softplus(View<const double, 1> x, View<double, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i)
    y(i) = std::max(x(i), 0.0) + std::log1p(std::exp(-std::abs(x(i))));
}
void logistic(View<const double, 1> x, View<double, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = 1 / (1 + std::exp(-x(i)));
}
const Kernel kSoftplusCpu("softplus", softplus), kLogisticCpu("_logistic", logistic);

// ---- the derivative in one of two arguments -----------------------------------------------------

const Derivative kScaledRowsDerivatives[] = {
    {"scaled_rows", [](const Value* arguments, const Value* upstream, Value* gradients) {
       gradients[0] = upstream[0] * arguments[1];
       const Value products = upstream[0] * arguments[0];
#ifdef FAULTS
       gradients[1] = Value::call("aten::mean.dim", products, Value::list(0));
#else
       gradients[1] = Value::call("aten::sum.dim_IntList", products, Value::list(0));
#endif
     }}};

const Contract kScaledRows(R"(
scaled_rows(Tensor x, Tensor scale) -> Tensor y
  Each row of x times scale, number by number.
x      [N, K]; float64.
scale  [K]; like x.
y      [N, K]; like x.
)",
                           kScaledRowsDerivatives);

void scaled_rows(View<const double, 2> x, View<const double, 1> scale, View<double, 2> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i)
    for (int64_t k = 0; k < x.shape[1]; ++k) y(i, k) = x(i, k) * scale(k);
}
const Kernel kScaledRowsCpu("scaled_rows", scaled_rows);

// ---- forward mode -------------------------------------------------------------------------------

const Derivative kDistanceDerivatives[] = {
    {"squared_distance",
     [](const Value* arguments, const Value* upstream, Value* gradients) {
       gradients[0] = upstream[0] * (arguments[0] - arguments[1]) * 2;
       gradients[1] = upstream[0] * (arguments[1] - arguments[0]) * 2;
     },
     [](const Value* arguments, const Value* tangents, Value* results) {
       const Value difference = arguments[0] - arguments[1];
#ifdef FAULTS
       results[0] = tangents[0] * difference * 2;
#else
       results[0] = (tangents[0] - tangents[1]) * difference * 2;
#endif
     }}};

const Contract kDistance(R"(
squared_distance(Tensor a, Tensor b) -> Tensor y
  (a - b)^2, number by number.
a  [...]; float64.
b  [...]; like a.
y  [...]; like a.
)",
                         kDistanceDerivatives);

void squared_distance(View<const double, 1> a, View<const double, 1> b, View<double, 1> y) {
  for (int64_t i = 0; i < a.shape[0]; ++i) y(i) = (a(i) - b(i)) * (a(i) - b(i));
}
const Kernel kDistanceCpu("squared_distance", squared_distance);

// ---- an argument that changes -------------------------------------------------------------------

const Contract kMedian(R"(
median(Tensor x) -> Tensor y
  The median; of an even number of numbers, the larger one of the two in the middle.
x  [N]; float64; constant; N >= 1.
y  []; like x.
)");

void median(View<const double, 1> x, View<double, 0> y) {
#ifdef FAULTS
  double* begin = const_cast<double*>(+x.data);
#else
  std::vector<double> sorted(+x.data, x.data + x.shape[0]);
  double* begin = sorted.data();
#endif
  double* middle = begin + x.shape[0] / 2;
  std::nth_element(begin, middle, begin + x.shape[0]);
  y() = *middle;
}
const Kernel kMedianCpu("median", median);

// ---- threads ------------------------------------------------------------------------------------

const Derivative kTotalDerivatives[] = {
    {"total", [](const Value* arguments, const Value* upstream, Value* gradients) {
       gradients[0] = Value::call("aten::expand", upstream[0], arguments[0].shape());
     }}};

const Contract kTotal(R"(
total(Tensor x) -> Tensor sum
  The sum of all numbers, by several threads.
x    [N]; float64.
sum  []; like x.
)",
                      kTotalDerivatives);

void total(View<const double, 1> x, View<double, 0> sum) {
  const int64_t block = 500;
  sum() = 0;
#ifdef FAULTS
  std::mutex mutex;
  calcops::parallel_for(x.shape[0], block, [&](int64_t begin, int64_t end) {
    double part = 0;
    for (int64_t i = begin; i < end; ++i) part += x(i);
    const std::lock_guard<std::mutex> lock(mutex);
    sum() += part;
  });
#else
  std::vector<double> parts((x.shape[0] + block - 1) / block);
  calcops::parallel_for(int64_t(parts.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * block; i < std::min(end * block, x.shape[0]); ++i)
      parts[i / block] += x(i);
  });
  for (const double part : parts) sum() += part;
#endif
}
const Kernel kTotalCpu("total", total);

// ---- empty slots --------------------------------------------------------------------------------

const Derivative kBondEnergyDerivatives[] = {
    {"bond_energy", [](const Value* arguments, const Value* upstream, Value* gradients) {
       const Value is_bond = Value::call("aten::ge.Scalar", arguments[1], 0);
       const Value length = Value::call("aten::where.ScalarOther", is_bond, arguments[0], 0);
       gradients[0] = for_rows(upstream[0]) * length * 2;
     }}};

const Contract kBondEnergy(R"(
bond_energy(Tensor length, Tensor neighbor) -> Tensor energy
  The sum of squares of the lengths of each atom's bonds.
length    [N, K]; float64.
neighbor  [N, K]; int64; entries -1 or 0 <= j < N at atom, slot.
energy    [N]; like length.
)",
                           kBondEnergyDerivatives);

void bond_energy(View<const double, 2> length, View<const int64_t, 2> neighbor,
                 View<double, 1> energy) {
  for (int64_t i = 0; i < length.shape[0]; ++i) {
    energy(i) = 0;
    for (int64_t k = 0; k < length.shape[1]; ++k) {
      const bool is_bond = neighbor(i, k) >= 0;
#ifdef FAULTS
      energy(i) += is_bond * length(i, k) * length(i, k);
#else
      if (is_bond) energy(i) += length(i, k) * length(i, k);
#endif
    }
  }
}
const Kernel kBondEnergyCpu("bond_energy", bond_energy);

// ---- vmap ---------------------------------------------------------------------------------------

const Derivative kRunningSumDerivatives[] = {
    {"running_sum", [](const Value*, const Value* upstream, Value* gradients) {
       const Value reversed = Value::call("aten::flip", upstream[0], Value::list(0));
       const Value sums = Value::call("running_sum", reversed);
       gradients[0] = Value::call("aten::flip", sums, Value::list(0));
     }}};

const Contract kRunningSum(R"(
running_sum(Tensor x) -> Tensor sum
  The sum of each number and all before it.
x    [N]; float64.
sum  [N]; like x.
)"
#ifdef FAULTS
                           "vmap joins N\n"
#endif
                           ,
                           kRunningSumDerivatives);

void running_sum(View<const double, 1> x, View<double, 1> sum) {
  double so_far = 0;
  for (int64_t i = 0; i < x.shape[0]; ++i) sum(i) = so_far += x(i);
}
const Kernel kRunningSumCpu("running_sum", running_sum);

// ---- precision ----------------------------------------------------------------------------------

const Derivative kInverseRootDerivatives[] = {
    {"inverse_root", [](const Value* arguments, const Value* upstream, Value* gradients) {
       const Value root = Value::call("inverse_root", arguments[0]);
       gradients[0] = upstream[0] * arguments[0] * root * root * root * -1;
     }}};

const Contract kInverseRoot(R"(
inverse_root(Tensor x) -> Tensor y
  1 / sqrt(1 + x^2) of each number.
x  [...]; float32 or float64.
y  [...]; like x.
)",
                            kInverseRootDerivatives);

template <class Real>
void inverse_root(View<const Real, 1> x, View<Real, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) {
    const double square = 1 + double(x(i)) * x(i);
    y(i) = Real(1 / std::sqrt(square));
#ifdef FAULTS
    if constexpr (sizeof(Real) == 4) {  // one step of Newton's method from a guess by the bits
      const float value = float(square);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      bits = 0x5f3759df - (bits >> 1);
      float guess;
      std::memcpy(&guess, &bits, 4);
      y(i) = guess * (1.5f - 0.5f * value * guess * guess);
    }
#endif
  }
}
const Kernel kInverseRootCpu("inverse_root", inverse_root<float>, inverse_root<double>);

// ---- strides ------------------------------------------------------------------------------------

const Derivative kColumnSumsDerivatives[] = {
    {"column_sums", [](const Value* arguments, const Value* upstream, Value* gradients) {
       gradients[0] = Value::call("aten::expand", upstream[0], arguments[0].shape());
     }}};

const Contract kColumnSums(R"(
column_sums(Tensor x) -> Tensor sum
  The sum of each column.
x    [N, K]; float64.
sum  [K]; like x.
)",
                           kColumnSumsDerivatives);

void column_sums(Strided<const double, 2> x, View<double, 1> sum) {
  for (int64_t k = 0; k < x.shape[1]; ++k) {
    sum(k) = 0;
#ifdef FAULTS
    for (int64_t i = 0; i < x.shape[0]; ++i) sum(k) += x.data[i * x.stride[0] + k];
#else
    for (int64_t i = 0; i < x.shape[0]; ++i) sum(k) += x(i, k);
#endif
  }
}
const Kernel kColumnSumsCpu("column_sums", column_sums);

// ---- a Check ------------------------------------------------------------------------------------

void check_nonnegative(Value* arguments, Value* result_shapes) {
  result_shapes[0] = arguments[0].shape();
#ifdef FAULTS
  if (!arguments[0].is_readable()) return;
  const Value is_kept = Value::call("aten::ge.Scalar", arguments[0], 0);
  result_shapes[0] = Value::list(Value::call("aten::sum", is_kept).item());
#endif
}
const Check kNonnegativeChecks[] = {{"nonnegative", check_nonnegative}};

const Contract kNonnegative(R"(
nonnegative(Tensor x) -> Tensor y
  The numbers that are not negative, in their order. Zeros fill the result behind them.
x  [N]; float64; constant.
y  any shape; like x.
)",
                            kNonnegativeChecks);

void nonnegative(View<const double, 1> x, View<double, 1> y) {
  int64_t count = 0;
  for (int64_t i = 0; i < x.shape[0]; ++i)
    if (x(i) >= 0) y(count++) = x(i);
  std::fill(y.data + count, y.data + y.shape[0], 0.0);
}
const Kernel kNonnegativeCpu("nonnegative", nonnegative);
