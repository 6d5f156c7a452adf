// Operators as users write them, for test_contract*.py.
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
pair_energy(Tensor r, float epsilon, float sigma=1.0, SymInt order=0) -> Tensor energy
  Lennard-Jones energy of each pair, or its derivative of any order.
r        [N]; float32 or float64. Distance.
epsilon  Depth of the well.
sigma    Distance at which the energy is zero.
order    0 to 100. Of the derivative in r.
energy   [N]; like r.
vmap     joins N
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

// ---- a gather, whose derivatives call a second operator -----------------------------------------

const Derivative kGatherDerivatives[] = {
    {"gather_rows",
     [](const Value* arguments, const Value* upstream, Value* gradients) {
       gradients[0] = Value::call("_gather_rows_backward", upstream[0], arguments[0], arguments[1]);
     },
     [](const Value* arguments, const Value* tangents, Value* results) {
       results[0] = Value::call("gather_rows", tangents[0], arguments[1]);
     }},
    {"_gather_rows_backward",
     [](const Value* arguments, const Value* upstream, Value* gradients) {
       gradients[0] = Value::call("gather_rows", upstream[0], arguments[2]);
     },
     [](const Value* arguments, const Value* tangents, Value* results) {
       if (!tangents[0].is_none())
         results[0] = Value::call("_gather_rows_backward", tangents[0], arguments[1], arguments[2]);
     }}};

const Contract kGather(R"(
gather_rows(Tensor x, Tensor index) -> Tensor rows
_gather_rows_backward(Tensor grad_rows, Tensor x, Tensor index) -> Tensor x
x          [N, C]; float32 or float64.
index      [M]; int32 or int64; entries 0 <= i < N at row.
rows       [M, C]; like x.
grad_rows  [M, C]; like x.
)",
                       kGatherDerivatives);

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
order(Tensor key) -> Tensor place
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
histogram(Tensor bin, SymInt bins) -> Tensor count
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
diagonal_sum(Tensor x, str how="sum") -> Tensor value
x      [N, N]; float64. With any strides.
how    "sum" or "mean".
value  []; like x.
)");

enum class How { kSum, kMean };

void diagonal_sum(Strided<const double, 2> x, How how, View<double, 0> value) {
  value() = 0;
  for (int64_t i = 0; i < x.shape[0]; ++i) value() += x(i, i);
  if (how == How::kMean) value() /= double(x.shape[0]);
}
const Kernel kDiagonalCpu("diagonal_sum", diagonal_sum);

// ---- shapes that a Check determines -------------------------------------------------------------

const Derivative kScaledDerivatives[] = {
    {"scaled", [](const Value* arguments, const Value* upstream, Value* gradients) {
       gradients[0] = Value::call("scaled", upstream[0], arguments[1]);
     }}};

// The part has the size `size`, or that of the image.
void check_scaled(Value* arguments, Value* result_shapes) {
  const Value &image = arguments[0], &size = arguments[2];
  if (image.dim() < 2 || image.dim() > 3)
    calcops::refuse("contracts::scaled", "image", "of shape [C, H, W] or [H, W]", image.shape());
  const bool is_given = size.length() > 0;
  const Value height = is_given ? size[0] : image.size(-2);
  const Value width = is_given ? size[1] : image.size(-1);
  if (!height.expect_at_least(0) || !width.expect_at_least(0))
    calcops::refuse("contracts::scaled", "size", "of numbers >= 0", size);
  result_shapes[0] =
      image.dim() == 3 ? Value::list(image.size(0), height, width) : Value::list(height, width);
}

const calcops::Check kScaledChecks[] = {{"scaled", check_scaled}};

const Contract kScaled(R"(
scaled(Tensor image, Tensor gain, SymInt[2] size=[], str mode="plain") -> Tensor part
  The upper left part of an image times a gain, with zeros where there is no image.
image   any shape; uint8, float16, float32 or float64. Of shape [C, H, W] or [H, W].
gain    []; like image.
size    Height and width of the part. Empty: those of the image.
mode    "plain" or "rounded".
part    any shape; like image.
)",
                       kScaledDerivatives, kScaledChecks);

enum class Mode { kPlain, kRounded };

template <class Real>
void scaled(Strided<const Real, 3> image, View<const Real, 0> gain, List<int64_t>, Mode mode,
            View<Real, 3> part) {
  const auto [channels, height, width] = part.shape;
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t y = 0; y < height; ++y)
      for (int64_t x = 0; x < width; ++x) {
        const bool is_inside = y < image.shape[1] && x < image.shape[2];
        const double value = is_inside ? double(image(c, y, x)) * double(gain()) : 0;
        part(c, y, x) = Real(mode == Mode::kRounded ? std::nearbyint(value) : value);
      }
}
const Kernel kScaledCpu("scaled", scaled<uint8_t>, scaled<float>, scaled<double>);

// ---- rows that depend on one another ------------------------------------------------------------

const Contract kRunning(R"(
running_sum(Tensor x) -> Tensor total
x      [N]; float64.
total  [N]; like x.
)");

void running_sum(View<const double, 1> x, View<double, 1> total) {
  std::partial_sum(x.data, x.data + x.shape[0], total.data);
}
const Kernel kRunningCpu("running_sum", running_sum);

// ---- entries that vmap shifts -------------------------------------------------------------------

const Contract kLookUp(R"(
looked_up(Tensor table, Tensor index) -> Tensor rows
table  [M, C]; float64.
index  [N, K]; int64; entries -1 or 0 <= j < M at row, slot.
rows   [N, K, C]; like table.
vmap   joins N, M
)");

void looked_up(View<const double, 2> table, View<const int64_t, 2> index, View<double, 3> rows) {
  for (int64_t i = 0; i < index.shape[0] * index.shape[1]; ++i)
    for (int64_t c = 0; c < table.shape[1]; ++c)
      rows.data[i * table.shape[1] + c] = index.data[i] < 0 ? 0 : table(index.data[i], c);
}
const Kernel kLookUpCpu("looked_up", looked_up);

// ---- tensors of any number of dimensions --------------------------------------------------------

const Derivative kSquaredDerivatives[] = {
    {"squared",
     [](const Value* arguments, const Value* upstream, Value* gradients) {
       gradients[0] = Value::call("_squared_backward", upstream[0], arguments[0]);
     }},
    {"_squared_backward", [](const Value* arguments, const Value* upstream, Value* gradients) {
       gradients[0] = upstream[0] * arguments[1] * 2;
       gradients[1] = upstream[0] * arguments[0] * 2;
     }}};

const Contract kElementwise(R"(
squared(Tensor x) -> Tensor y
_squared_backward(Tensor grad_y, Tensor x) -> Tensor x
plus(Tensor x, Tensor? shift=None) -> Tensor y
row_lengths(Tensor row) -> Tensor length
columns(Tensor image) -> Tensor sums
taken(Tensor values, Tensor place) -> Tensor picked
x       [...]; float32 or float64.
y       [...]; like x.
grad_y  [...]; like x.
shift   [...]; like x.
row     [..., K]; float64; K <= 4.
length  [...]; float64.
image   [..., H, W]; float64.
sums    [..., W]; float64.
values  [N]; float64.
place   [..., K]; int64; entries 0 <= j < N at item, slot.
picked  [..., K]; float64.
vmap    joins ..., H
)",
                            kSquaredDerivatives);

template <class Real>
void squared(View<const Real, 1> x, View<Real, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = x(i) * x(i);
}

template <class Real>
void squared_backward(View<const Real, 1> grad_y, View<const Real, 1> x, View<Real, 1> grad_x) {
  for (int64_t i = 0; i < x.shape[0]; ++i) grad_x(i) = 2 * grad_y(i) * x(i);
}

template <class Real>
void plus(View<const Real, 1> x, View<const Real, 1> shift, View<Real, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = x(i) + (shift ? shift(i) : 1);
}

void row_lengths(Strided<const double, 2> row, View<double, 1> length) {
  for (int64_t i = 0; i < row.shape[0]; ++i) {
    length(i) = 0;
    for (int64_t k = 0; k < row.shape[1]; ++k) length(i) += row(i, k) * row(i, k);
    length(i) = std::sqrt(length(i));
  }
}

void columns(View<const double, 3> image, View<double, 2> sums) {
  const auto [items, height, width] = image.shape;
  for (int64_t i = 0; i < items; ++i)
    for (int64_t x = 0; x < width; ++x) {
      sums(i, x) = 0;
      for (int64_t y = 0; y < height; ++y) sums(i, x) += image(i, y, x);
    }
}

void taken(View<const double, 1> values, View<const int64_t, 2> place, View<double, 2> picked) {
  for (int64_t i = 0; i < place.shape[0] * place.shape[1]; ++i)
    picked.data[i] = values(place.data[i]);
}
const Kernel kSquaredCpu("squared", squared<float>, squared<double>);
const Kernel kSquaredBackwardCpu("_squared_backward", squared_backward<float>,
                                 squared_backward<double>);
const Kernel kPlusCpu("plus", plus<float>, plus<double>);
const Kernel kRowLengthsCpu("row_lengths", row_lengths), kColumnsCpu("columns", columns);
const Kernel kTakenCpu("taken", taken);

// Entries of small dtypes, and limits of one item's size.
const Contract kNext(R"(
next_row(Tensor next, Tensor? second=None, bool wrong=False) -> Tensor back
next    [N]; uint8 or int32; entries 0 <= j < N at row; N >= 2; N <= 200.
second  [N]; like next; entries 0 <= j < N at row.
wrong   Whether the kernel reports a position behind the entries of `next`.
back    [N]; float64. Is 1 where two steps lead back to the row, otherwise 0.
vmap    joins N
)");

template <class Index>
int64_t next_row(View<const Index, 1> next, View<const Index, 1>, bool wrong,
                 View<double, 1> back) {
  const int64_t rows = next.shape[0];
  for (int64_t i = 0; i < rows; ++i) {
    if (next(i) < 0 || next(i) >= rows) return i;
    back(i) = next(next(i)) == i;
  }
  return wrong ? rows + 1 : -1;
}
const Kernel kNextCpu("next_row", next_row<uint8_t>, next_row<int32_t>);

// Seven dimensions in two shapes.
const Contract kSeven(R"(
total(Tensor x) -> Tensor sum
x    [A, B, C, D, E, F, G] or [A, B, C, D, E, F, G, 1]; float64.
sum  []; like x.
)");

void total(View<const double, 7> x, View<double, 0> sum) {
  sum() = std::accumulate(x.data, x.data + x.shape[5] * x.shape[6], 0.0);
}
const Kernel kTotalOfSevenCpu("total", total);

// Arguments that vmap cannot join: they have the size or the rows of one item. A Check allows
// sizes from 2 on.
const calcops::Check kMarkedChecks[] = {{"marked", [](Value* arguments, Value*) {
                                           const Value& x = arguments[0];
                                           if (!x.size(0).expect_at_least(2))
                                             refuse("contracts::marked", "x", "of two rows", x);
                                         }}};
const Contract kMarked(R"(
marked(Tensor x, Tensor index, Tensor? offset=None) -> Tensor y
  x, plus the first numbers of offset, with 9 at the rows of index.
x       [N]; float64.
index   [M]; int64; entries 0 <= i < N at row.
offset  [N + P]; like x.
y       [N]; like x.
vmap    joins N
)",
                       kMarkedChecks);

void marked(View<const double, 1> x, View<const int64_t, 1> index, View<const double, 1> offset,
            View<double, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = x(i) + (offset ? offset(i) : 0);
  for (int64_t i = 0; i < index.shape[0]; ++i) y(index(i)) = 9;
}
const Kernel kMarkedCpu("marked", marked);

// Items that vmap cannot join. Each is a call.
const Contract kSeparate(R"(
summed(Tensor x) -> Tensor sum
row_sums(Tensor table) -> Tensor sums
steps(Tensor longer) -> Tensor step
copied(Tensor next) -> Tensor after
below(Tensor end, int m) -> Tensor share
default_type(Tensor next, Tensor? x=None) -> Tensor other
x       [N]; float32 or float64.
sum     []; like x.
table   [N, M]; float64.
sums    [N]; float64.
longer  [N + 1]; float64.
step    [N]; float64.
next    [N]; int64; entries 0 <= j < N at row.
after   [N]; like next.
m       0 to 9.
end     [N]; int64; entries 0 <= j < N + m at row.
share   [N]; float64.
other   [N]; like x.
vmap    joins N, M
)");

void row_sums(View<const double, 2> table, View<double, 1> sums) {
  const auto [rows, columns] = table.shape;
  for (int64_t i = 0; i < rows; ++i)
    sums(i) = std::accumulate(&table(i, 0), &table(i, 0) + columns, 0.0);
}

template <class Real>
void summed(View<const Real, 1> x, View<Real, 0> sum) {
  sum() = std::accumulate(x.data, x.data + x.shape[0], Real(0));
}

void copied(View<const int64_t, 1> next, View<int64_t, 1> after) {
  std::copy_n(next.data, next.shape[0], after.data);
}

void below(View<const int64_t, 1> end, int64_t m, View<double, 1> share) {
  for (int64_t i = 0; i < end.shape[0]; ++i) share(i) = double(end(i)) / double(end.shape[0] + m);
}

template <class Real>
void default_type(View<const int64_t, 1> next, View<const Real, 1>, View<Real, 1> other) {
  std::copy_n(next.data, next.shape[0], other.data);
}
const Kernel kSummedCpu("summed", summed<float>, summed<double>), kRowSumsCpu("row_sums", row_sums);
const Kernel kStepsCpu("steps", differences), kCopiedCpu("copied", copied);
const Kernel kBelowCpu("below", below);
const Kernel kDefaultTypeCpu("default_type", default_type<double>, default_type<float>);

// Two joined sizes, of which no entries tie one to the result.
const Contract kUntied(R"(
nearest(Tensor z, Tensor code) -> Tensor distance
  Distance to the nearest code.
raised(Tensor z, int M) -> Tensor distance
z         [...]; float64.
code      [M]; float64.
M         0 to 99.
distance  [...]; like z.
vmap      joins ..., M
)");

void nearest(View<const double, 1> z, View<const double, 1> code, View<double, 1> distance) {
  for (int64_t i = 0; i < z.shape[0]; ++i) {
    distance(i) = INFINITY;
    for (int64_t k = 0; k < code.shape[0]; ++k)
      distance(i) = std::min(distance(i), std::abs(z(i) - code(k)));
  }
}

void raised(View<const double, 1> z, int64_t m, View<double, 1> distance) {
  for (int64_t i = 0; i < z.shape[0]; ++i) distance(i) = z(i) + double(m);
}
const Kernel kNearestCpu("nearest", nearest), kRaisedCpu("raised", raised);

// Two shapes with different numbers of elements.
const Contract kUnequal(R"(
unequal(Tensor x) -> Tensor y
x  [N, 3] or [N]; float64.
y  [N]; like x.
)");

void unequal(View<const double, 2>, View<double, 1>) {}
const Kernel kUnequalCpu("unequal", unequal);

// Results that an argument other than the first one makes negative, and limits of sizes that the
// tensor's shape does not show.
const Contract kLess(R"(
less(Tensor x, Tensor row, int n) -> (Tensor fewer, Tensor before, Tensor room)
even(Tensor columns, int M) -> Tensor total
x        [N]; float64.
n        Of numbers.
row      [..., K]; float64.
columns  [..., K]; float64; 1 <= K; M % 2 == 0.
fewer    [..., K - 2]; float64.
before   [n - 1]; float64.
room     [3 - n]; float64.
M        0 to 99.
total    [...]; float64.
)");

void less(View<const double, 1>, View<const double, 2>, int64_t, View<double, 2>, View<double, 1>,
          View<double, 1>) {}
void even(View<const double, 2>, int64_t, View<double, 1>) {}
const Kernel kLessCpu("less", less), kEvenCpu("even", even);

// Two shapes of one rank. A size sets which one it is.
const Contract kLeading(R"(
leading(Tensor x) -> Tensor first
x      [A, B, 4] or [4, A, B]; float64.
first  [A]; like x.
)");

void leading(View<const double, 3> x, View<double, 1> first) {
  std::fill_n(first.data, first.shape[0], double(x.shape[0]));
}
const Kernel kLeadingCpu("leading", leading);

// ---- checks that set a wrong shape --------------------------------------------------------------

const calcops::Check kWrongChecks[] = {
    {"unset", [](Value*, Value*) {}},
    {"number", [](Value*, Value* shapes) { shapes[0] = 5; }},
    {"needless", [](Value*, Value* shapes) { shapes[0] = Value::list(7); }}};

const Contract kWrong(R"(
unset(Tensor x) -> Tensor any
number(Tensor x) -> Tensor any
needless(Tensor x) -> Tensor own
x    [N]; float64.
any  any shape; like x.
own  [N]; like x.
)",
                      kWrongChecks);
const Kernel kUnsetCpu("unset", running_sum), kNumberCpu("number", running_sum);
const Kernel kNeedlessCpu("needless", running_sum);

// ---- derivatives: an operator of a short name, two results, a constant --------------------------

const Derivative kShortDerivatives[] = {
    {"f", [](const Value*, const Value* upstream, Value* gradients) {
       gradients[0] = Value::call("f", upstream[0]);
     }}};

const Contract kShort(R"(
f(Tensor x) -> Tensor y
x  [N]; float64.
y  [N]; like x.
)",
                      kShortDerivatives);

void f(View<const double, 1> x, View<double, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = 2 * x(i);
}
const Kernel kShortCpu("f", f);

// The gradient of an optional tensor, which output_mask selects, and a call with a tangent that may
// be zero.
const Derivative kMaskedDerivatives[] = {
    {"halved",
     [](const Value* arguments, const Value* upstream, Value* gradients) {
       const Value wanted = Value::list(gradients[0].is_wanted(), gradients[1].is_wanted());
       const Value all =
           Value::call("_halved_backward", upstream[0], arguments[0], arguments[1], wanted);
       for (int i = 0; i < 2; ++i)
         if (gradients[i].is_wanted()) gradients[i] = all[i];
     },
     [](const Value*, const Value* tangents, Value* results) {
       results[0] = Value::call("halved", tangents[0], tangents[1]);
     }}};

const Contract kMasked(R"(
halved(Tensor x, Tensor? w=None) -> Tensor y
_halved_backward(Tensor grad_y, Tensor x, Tensor? w, bool[2] output_mask) -> (Tensor x, Tensor w)
x       [N]; float64.
w       [N]; like x.
y       [N]; like x.
grad_y  [N]; like x.
)",
                       kMaskedDerivatives);

using In = View<const double, 1>;
using Out = View<double, 1>;

void halved(In x, In w, Out y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = (x(i) + (w ? w(i) : 0)) / 2;
}
void halved_backward(In grad_y, In, In, Out grad_x, Out grad_w) {
  for (const Out grad : {grad_x, grad_w})
    for (int64_t i = 0; grad && i < grad_y.shape[0]; ++i) grad(i) = grad_y(i) / 2;
}
const Kernel kHalvedCpu("halved", halved), kHalvedBackwardCpu("_halved_backward", halved_backward);

// The formulas use each upstream gradient and tangent without asking whether it is given.
const Derivative kWavesDerivatives[] = {
    {"waves",
     [](const Value* arguments, const Value* upstream, Value* gradients) {
       const Value waves = Value::call("waves", arguments[0], arguments[1], arguments[2]);
       gradients[0] = (upstream[0] * waves[1] - upstream[1] * waves[0]) * arguments[1];
     },
     [](const Value* arguments, const Value* tangents, Value* results) {
       const Value waves = Value::call("waves", arguments[0], arguments[1], arguments[2]);
       const Value along = tangents[0] * arguments[1] + tangents[2];
       results[0] = along * waves[1];
       results[1] = along * waves[0] * -1;
     }}};

const Contract kWaves(R"(
waves(Tensor x, Tensor wave_number, Tensor phase) -> (Tensor sine, Tensor cosine)
x            [N]; float64.
wave_number  []; float64; constant.
phase        [N]; float64.
sine         [N]; float64.
cosine       [N]; float64.
)",
                      kWavesDerivatives);

void waves(View<const double, 1> x, View<const double, 0> wave_number, View<const double, 1> phase,
           View<double, 1> sine, View<double, 1> cosine) {
  for (int64_t i = 0; i < x.shape[0]; ++i) {
    sine(i) = std::sin(x(i) * wave_number() + phase(i));
    cosine(i) = std::cos(x(i) * wave_number() + phase(i));
  }
}
const Kernel kWavesCpu("waves", waves);

// A formula that gives a number in the place of a gradient.
const Derivative kNumberDerivatives[] = {
    {"negated", [](const Value*, const Value*, Value* gradients) { gradients[0] = 2; }}};

const Contract kNegated(R"(
negated(Tensor x) -> Tensor y
x  [N]; float64.
y  [N]; like x.
)",
                        kNumberDerivatives);

void negated(View<const double, 1> x, View<double, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = -x(i);
}
const Kernel kNegatedCpu("negated", negated);

// Formulas with a wrong index, and exceptions that are no std::exception.
void mistaken(const Value* arguments, const Value* upstream, Value* derivatives) {
  switch (arguments[1].item()) {
    case 0:
      derivatives[2] = upstream[0];
      break;
    case 1:
      derivatives[1] = upstream[0];
      break;
    case 2:
      derivatives[0] = upstream[2] * arguments[0];
      break;
    case 3:
      derivatives[0] = upstream[0] * arguments[2];
      break;
    case 4:
      derivatives[0] = Value::call("aten::clone", upstream[0], upstream[2]);
      break;
    case 5:
      throw "a negative distance";
    default:
      derivatives[0] = Value::call("mistaken", upstream[0], 7);
  }
}

const Derivative kMistakenDerivatives[] = {{"mistaken", mistaken, mistaken}};

const Contract kMistaken(R"(
mistaken(Tensor x, int mistake) -> Tensor y
x        [N]; float64.
mistake  The number of a mistake.
y        [N]; like x.
)",
                         kMistakenDerivatives);

void copy_or_throw(View<const double, 1> x, int64_t mistake, View<double, 1> y) {
  if (mistake == 7) throw 7;
  std::copy_n(x.data, x.shape[0], y.data);
}
const Kernel kMistakenCpu("mistaken", copy_or_throw);

// ---- numbers, small dtypes and products of sizes ------------------------------------------------

const Contract kLimited(R"(
limited(Tensor x, int shift=0, float t=1.0, float u=1.0) -> Tensor y
narrow(Tensor table, Tensor x) -> Tensor y
x      [N]; float64; N >= 2; N <= 5.
shift  -5 to 5.
t      > 0.5.
u      < 2; > 1e-6.
y      [N]; like x.
table  [M, K]; float64; K <= M; M % 4 == 0; K < N.
)");

const Contract kPicked(R"(
picked(Tensor x, Tensor index) -> Tensor rows
x      [N]; float64.
index  [M] or [M, 1]; int8, uint8 or int32; entries 0 <= i < N.
rows   [M]; like x.

repeated(Tensor x, int count) -> Tensor copies
count   Of copies.
copies  [count]; like x.

outer(Tensor x, SymInt n, SymInt m) -> Tensor table
n      0 to 2^40.
m      0 to 10^18.
table  [n*m]; like x.
)");

void limited(View<const double, 1> x, int64_t, double, double, View<double, 1> y) {
  std::copy_n(x.data, x.shape[0], y.data);
}

template <class Index>
void picked(View<const double, 1> x, View<const Index, 1> index, View<double, 1> rows) {
  for (int64_t i = 0; i < index.shape[0]; ++i) rows(i) = x(index(i));
}

void outer(View<const double, 1>, int64_t, int64_t, View<double, 1>) {}
void narrow(View<const double, 2>, View<const double, 1> x, View<double, 1> y) {
  std::copy_n(x.data, x.shape[0], y.data);
}
const Kernel kLimitedCpu("limited", limited), kNarrowCpu("narrow", narrow);
const Kernel kPickedCpu("picked", picked<int8_t>, picked<uint8_t>, picked<int32_t>);
void repeated(View<const double, 1>, int64_t, View<double, 1>) {}
const Kernel kOuterCpu("outer", outer), kRepeatedCpu("repeated", repeated);

// ---- numbers that may be absent -----------------------------------------------------------------

const Contract kClipped(R"(
clipped(Tensor x, float? least=None, int? most=None) -> Tensor y
x      [...]; float64.
least  > -100.
most   <= 100.
y      [...]; like x.
)");

void clipped(View<const double, 1> x, const double* least, const int64_t* most, View<double, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) {
    y(i) = least ? std::max(x(i), *least) : x(i);
    if (most) y(i) = std::min(y(i), double(*most));
  }
}
const Kernel kClippedCpu("clipped", clipped);

// ---- compositions -------------------------------------------------------------------------------

Value inverse(const Value* arguments) { return 1 / arguments[0]; }
Value is_given(const Value* arguments) {
  return arguments[0] * int64_t(!arguments[1].is_none()) * int64_t(!arguments[2].is_none());
}
Value dimension(const Value* arguments) {
  return arguments[0] * arguments[0].shape()[int(arguments[1].item())];
}
Value too_many(const Value* arguments) { return Value::call("aten::neg", arguments[0], 1, 2); }
Value both(const Value* arguments) { return Value::call("moments", arguments[0]); }
Value no_result(const Value*) { return nullptr; }
Value flag_as_size(const Value* arguments) { return arguments[0] * (Value(true) + 1); }
Value huge(const Value* arguments) { return arguments[0] * (arguments[1] * (int64_t(1) << 40)); }

Value halves(const Value* arguments) {
  return Value::call("aten::narrow", arguments[0], 0, 0, arguments[0].size(0) / 2);
}
Value quotient(const Value* arguments) { return arguments[0] * (arguments[1] / arguments[2]); }
Value plain_string(const Value* arguments) { return arguments[0] * arguments[1].is("one"); }
Value real_number(const Value* arguments) {
  const Value& width = arguments[1];
  return arguments[0] * (1 / (width * 2.0 + width - 0.5));
}

Value per_number(const Value* arguments) {
  const Value count = arguments[0].size(0);
  return arguments[0] * ((count * 2.0 + 1.0 - count) / (count - 0.5));
}

Value wrong_call(const Value* arguments) {
  const int64_t which = arguments[1].item();
  if (which == 0) return Value::call("aten::sum", arguments[0], 1);
  if (which == 1) return Value::call("aten::exp_", arguments[0]);
  if (which == 2) return Value::call("aten::pow", arguments[0], 2);
  return Value::call("aten::abs", arguments[3]);
}

const calcops::Composition kCompositions[] = {{"wrong_call", wrong_call},
                                              {"per_number", per_number},
                                              {"inverse", inverse},
                                              {"is_given", is_given},
                                              {"dimension", dimension},
                                              {"too_many", too_many},
                                              {"both", both},
                                              {"one_of_two", both},
                                              {"no_result", no_result},
                                              {"huge", huge},
                                              {"flag_as_size", flag_as_size},
                                              {"halves", halves},
                                              {"quotient", quotient},
                                              {"plain_string", plain_string},
                                              {"real_number", real_number}};

const Contract kComposed(R"(
inverse(Tensor x) -> Tensor
is_given(Tensor x, int? number, str? text) -> Tensor
dimension(Tensor x, int d) -> Tensor
per_number(Tensor x) -> Tensor
wrong_call(Tensor x, int which) -> Tensor
too_many(Tensor x) -> Tensor
both(Tensor x) -> (Tensor, Tensor)
one_of_two(Tensor x) -> Tensor
no_result(Tensor x) -> Tensor
flag_as_size(Tensor x) -> Tensor
huge(Tensor x, int a) -> Tensor
halves(Tensor x) -> Tensor
quotient(Tensor x, int a, int b) -> Tensor
plain_string(Tensor x, str how) -> Tensor
real_number(Tensor x, float width) -> Tensor
x       [N]; float64.
a       Text.
b       Text.
how     Text.
width   Text.
d       Text.
which   Text.
number  Text.
text    Text.
)",
                         kCompositions);

// What an attack on the runtime found.
namespace {

const Contract kAttacked(R"(
trimmed(Tensor values, SymInt before, SymInt after) -> Tensor rest
norms(Tensor points) -> Tensor lengths
split(Tensor z, Tensor table) -> Tensor product
numbers(Tensor values, Tensor? like=None) -> Tensor copy
rows(Tensor values, Tensor pairs) -> Tensor sums
values  [N]; float64.
before  >= 0.
after   >= 0.
rest    [N - before - after]; like values.
points  [P, 3] or [3, P]; float64.
lengths [P]; like points.
z       [T]; float64.
table   [B, K] or [B, T, M] with K = T*M; float64.
product [T]; like z.
like    [N]; int64 or int8.
copy    [N]; like like.
pairs   [A, R]; int64; entries 0 <= j < N at slot.
sums    [R]; like values.
vmap    joins P, T
)");

void trimmed(View<const double, 1> values, int64_t before, int64_t, View<double, 1> rest) {
  std::copy_n(&values(before), rest.shape[0], rest.data);
}

void norms(View<const double, 2> points, View<double, 1> lengths) {
  for (int64_t i = 0; i < lengths.shape[0]; ++i)
    lengths(i) = std::hypot(points(i, 0), points(i, 1), points(i, 2));
}

void split(View<const double, 1> z, View<const double, 2> table, View<double, 1> product) {
  for (int64_t i = 0; i < z.shape[0]; ++i) product(i) = z(i) * double(table.shape[1]);
}

template <class Integer>
void numbers(View<const double, 1> values, View<const Integer, 1>, View<Integer, 1> copy) {
  std::copy_n(values.data, values.shape[0], copy.data);
}

void rows(View<const double, 1>, View<const int64_t, 2>, View<double, 1>) {}

const Kernel kTrimmedCpu("trimmed", trimmed), kNormsCpu("norms", norms), kSplitCpu("split", split);
const Kernel kNumbersCpu("numbers", numbers<int8_t>, numbers<int64_t>), kRowsCpu("rows", rows);

const Derivative kOfDoubled[] = {
    {"doubled", [](const Value*, const Value* up, Value* gradients) { gradients[0] = up[0] * 2; },
     [](const Value*, const Value* tangents, Value* results) { results[0] = tangents[0] * 2; }}};

const Contract kTwoDtypes(R"(
doubled(Tensor x) -> (Tensor y, Tensor sign)
x     [N]; float64.
y     [N]; like x.
sign  [N]; int64.
)",
                          kOfDoubled);

void doubled(View<const double, 1> x, View<double, 1> y, View<int64_t, 1> sign) {
  for (int64_t i = 0; i < x.shape[0]; ++i) {
    y(i) = 2 * x(i);
    sign(i) = x(i) < 0 ? -1 : 1;
  }
}
const Kernel kDoubledCpu("doubled", doubled);

const Derivative kOfStepped[] = {
    {"stepped",
     [](const Value* arguments, const Value* up, Value* gradients) {
       gradients[0] = up[0] * arguments[0] * 2;
     },
     [](const Value* arguments, const Value* tangents, Value* results) {
       results[0] = tangents[0] * arguments[0] * 2;
     }}};

const Contract kWithIndices(R"(
stepped(Tensor x, Tensor index) -> (Tensor y, Tensor next)
x      [N]; float64.
index  [N]; int32 or int64.
y      [N]; like x.
next   [N]; like index.
)",
                            kOfStepped);

template <class Integer>
void stepped(View<const double, 1> x, View<const Integer, 1> index, View<double, 1> y,
             View<Integer, 1> next) {
  for (int64_t i = 0; i < x.shape[0]; ++i) {
    y(i) = x(i) * x(i);
    next(i) = index(i) + 1;
  }
}
const Kernel kSteppedCpu("stepped", stepped<int32_t>, stepped<int64_t>);

void set_too_many(Value* arguments, Value* result_shapes) {
  result_shapes[0] = arguments[0].shape();
  result_shapes[1] = arguments[0].shape();
}
const calcops::Check kTooManyShapes[] = {{"too_many_shapes", set_too_many}};

const Contract kShapes(R"(
too_many_shapes(Tensor x) -> Tensor y
x  any shape; float64.
y  any shape; like x.
)",
                       kTooManyShapes);

void too_many_shapes(View<const double, 1>, View<double, 1>) {}
const Kernel kTooManyShapesCpu("too_many_shapes", too_many_shapes);

}  // namespace
