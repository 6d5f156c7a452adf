// Operators as users write them, for ../test_calcops_jit_contract.py.
#include <calcops/operator.h>

#include <algorithm>
#include <cmath>
#include <numeric>

using calcops::Contract;
using calcops::Derivative;
using calcops::Kernel;
using calcops::List;
using calcops::Strided;
using calcops::Value;
using calcops::View;

// ---- a pair potential, with derivatives by a formula --------------------------------------------

// The derivative of a derivative is one of the next order.
Value slope(const Value* arguments) {
  return Value::call("pair_energy", arguments[0], arguments[1], arguments[2], arguments[3] + 1);
}

const Derivative kPairDerivatives[] = {
    {"pair_energy",
     [](const Value* arguments, const Value* upstream, Value* gradients) {
       gradients[0] = upstream[0] * slope(arguments);
     },
     [](const Value* arguments, const Value* tangents, Value* results) {
       results[0] = tangents[0] * slope(arguments);
     }}};

const Contract kPairEnergy(R"(
pair_energy(Tensor r, float epsilon, float sigma=1.0, SymInt order=0) -> Tensor
  Lennard-Jones energy of each pair, or its derivative of any order.
r        [N]; float32 or float64. Distance.
epsilon  Depth of the well.
sigma    Distance at which the energy is zero.
order    0 to 100. Of the derivative in r.
energy   [N]; like r.
)",
                           kPairDerivatives);

template <class Real>
void pair_energy(View<const Real, 1> r, double epsilon, double sigma, int64_t order,
                 View<Real, 1> energy) {
  for (int64_t i = 0; i < r.shape[0]; ++i) {
    double repulsion = std::pow(sigma / r(i), 12), attraction = std::pow(sigma / r(i), 6);
    for (int64_t k = 0; k < order; ++k) {
      repulsion *= -double(12 + k) / r(i);
      attraction *= -double(6 + k) / r(i);
    }
    energy(i) = Real(4 * epsilon * (repulsion - attraction));
  }
}
const Kernel kPairEnergyCpu("pair_energy", pair_energy<float>, pair_energy<double>);

// ---- a gather, with all derivatives -------------------------------------------------------------

const Contract kGather(R"(
gather_rows(Tensor x, Tensor index) -> Tensor
_gather_rows_backward(Tensor? grad_rows, Tensor x, Tensor index,
                      bool[1] output_mask=[True]) -> Tensor
x       [N, C]; float32 or float64.
index   [M]; int32 or int64; entries 0 <= i < N at row.
rows    [M, C]; like x.
linear  rows(x)
)");

template <class Real, class Index>
void gather_rows(View<const Real, 2> x, View<const Index, 1> index, View<Real, 2> rows) {
  for (int64_t i = 0; i < index.shape[0]; ++i)
    for (int64_t c = 0; c < x.shape[1]; ++c) rows(i, c) = x(index(i), c);
}

template <class Real, class Index>
void gather_backward(View<const Real, 2> grad, View<const Real, 2> x, View<const Index, 1> index,
                     View<Real, 2> grad_x) {
  std::fill_n(grad_x.data, x.shape[0] * x.shape[1], Real(0));
  for (int64_t i = 0; i < index.shape[0]; ++i)
    for (int64_t c = 0; c < x.shape[1]; ++c) grad_x(index(i), c) += grad(i, c);
}
const Kernel kGatherCpu("gather_rows", gather_rows<float, int32_t>, gather_rows<float, int64_t>,
                        gather_rows<double, int32_t>, gather_rows<double, int64_t>);
const Kernel kGatherBackwardCpu("_gather_rows_backward", gather_backward<float, int32_t>,
                                gather_backward<float, int64_t>, gather_backward<double, int32_t>,
                                gather_backward<double, int64_t>);

// ---- a stencil, a reduction with two results, an optional tensor and a list ---------------------

const Contract kSums(R"(
differences(Tensor x) -> Tensor step
  x[i + 1] - x[i].
moments(Tensor x) -> (Tensor mean, Tensor variance)
weighted_total(Tensor x, Tensor? weight=None, float[] powers=[1.0]) -> Tensor total
x         [N]; float64.
weight    [N]; like x.
powers    One number for each term.
step      [N - 1]; like x.
mean      []; like x.
variance  []; like x.
total     []; like x.
)");

void differences(View<const double, 1> x, View<double, 1> step) {
  for (int64_t i = 0; i < step.shape[0]; ++i) step(i) = x(i + 1) - x(i);
}

void moments(View<const double, 1> x, View<double, 0> mean, View<double, 0> variance) {
  const double count = double(x.shape[0]);
  mean() = std::accumulate(x.data, x.data + x.shape[0], 0.0) / count;
  variance() = 0;
  for (int64_t i = 0; i < x.shape[0]; ++i) variance() += (x(i) - mean()) * (x(i) - mean()) / count;
}

void weighted_total(View<const double, 1> x, View<const double, 1> weight, List<double> powers,
                    View<double, 0> total) {
  total() = 0;
  for (int64_t i = 0; i < x.shape[0]; ++i)
    for (int64_t p = 0; p < powers.size; ++p)
      total() += (weight ? weight(i) : 1) * powers.data[p] * x(i);
}
const Kernel kDifferencesCpu("differences", differences);
const Kernel kMomentsCpu("moments", moments);
const Kernel kTotalCpu("weighted_total", weighted_total);

// ---- a sort by key, a histogram, strides, a string ----------------------------------------------

const Contract kOrder(R"(
order(Tensor key) -> Tensor
key    [N]; int32 or int64.
place  [N]; int64.
)");

template <class Key>
void order(View<const Key, 1> key, View<int64_t, 1> place) {
  std::iota(place.data, place.data + key.shape[0], 0);
  std::stable_sort(place.data, place.data + key.shape[0],
                   [&](int64_t a, int64_t b) { return key(a) < key(b); });
}
const Kernel kOrderCpu("order", order<int32_t>, order<int64_t>);

const Contract kHistogram(R"(
histogram(Tensor bin, SymInt bins) -> Tensor
bin    [N]; int64; entries 0 <= b < bins at item.
bins   0 to 2^40.
count  [bins]; int64.
)");

void histogram(View<const int64_t, 1> bin, int64_t bins, View<int64_t, 1> count) {
  std::fill_n(count.data, bins, 0);
  for (int64_t i = 0; i < bin.shape[0]; ++i) ++count(bin(i));
}
const Kernel kHistogramCpu("histogram", histogram);

const Contract kTrace(R"(
diagonal_sum(Tensor x, str how="sum") -> Tensor
x      [N, N]; float64; any strides.
how    "sum" or "mean".
value  []; like x.
)");

void diagonal_sum(Strided<const double, 2> x, const char* how, View<double, 0> value) {
  value() = 0;
  for (int64_t i = 0; i < x.shape[0]; ++i) value() += x(i, i);
  if (how[0] == 'm') value() /= double(x.shape[0]);
}
const Kernel kDiagonalCpu("diagonal_sum", diagonal_sum);

// ---- dimensions that may be absent or 1, a list of sizes, conditions ----------------------------

const Derivative kScaledDerivatives[] = {
    {"scaled", [](const Value* arguments, const Value* upstream, Value* gradients) {
       if (gradients[0].is_wanted())
         gradients[0] = Value::call("scaled", upstream[0], arguments[1]);
     }}};

const Contract kScaled(R"(
scaled(Tensor image, Tensor gain, SymInt[2] size=[], float[]? offset=None, str mode="plain",
       Tensor? mask=None, Tensor? bias=None) -> Tensor
  The upper left part of an image times the gain of its item.
image   [N or 1, C, H, W], [C, H, W] or [H, W]; any strides; uint8, float16, float32 or float64;
        not float16 or uint8 where mode is "masked"; W < 100 columns where mode is "masked".
gain    [N or 1] or []; like image.
size    (h, w), both >= 0, or empty for (H, W).
offset  one or C values. Is added.
mode    "plain", "rounded" or "masked"; "rounded" without derivative.
mask    the shape of part; like image; only where mode is "masked".
bias    [N, C] or [C]; like image. Is added.
part    [N, C, h, w], [C, h, w], [N, h, w] or [h, w]; like image.
vmap    joins N
)",
                       kScaledDerivatives);

enum class Mode { kPlain, kRounded, kMasked };

template <class Real>
void scaled(Strided<const Real, 4> image, View<const Real, 1> gain, List<int64_t>,
            List<double> offset, Mode mode, View<const Real, 4> mask, View<const Real, 2> bias,
            View<Real, 4> part) {
  const auto [items, channels, height, width] = part.shape;
  for (int64_t n = 0; n < items; ++n)
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t y = 0; y < height; ++y)
        for (int64_t x = 0; x < width; ++x) {
          double value = double(image(image.shape[0] == 1 ? 0 : n, c, y, x));
          value *= double(gain(gain.shape[0] == 1 ? 0 : n));
          if (offset.size > 0) value += offset.data[offset.size == 1 ? 0 : c];
          if (bias) value += double(bias(n, c));
          if (mode == Mode::kRounded) value = std::nearbyint(value);
          if (mode == Mode::kMasked) value *= double(mask(n, c, y, x));
          part(n, c, y, x) = Real(value);
        }
}
const Kernel kScaledCpu("scaled", scaled<uint8_t>, scaled<float>, scaled<double>);
