// density: its contract and its derivatives.
#include <calcops/no_loops.h>
#include <calcops/operator.h>

#include "directions.h"

namespace calcops::ops::density {
namespace {

// ---- derivatives: see directions.h --------------------------------------------------------------
//
// The sums A(d, C; v_1 ... v_D) are linear in the table C, too. A third operator computes
// grad_C <grad, A>: _density_table_backward.

constexpr char kName[] = "calcops_models::density";
enum Argument { kD, kKind, kTable, kGrid, kHarmonics, kDirections };

// A and its gradients, with the arguments of a call but another table and other directions.
class Sums {
 public:
  explicit Sums(const Value* arguments) : a_(arguments) {}

  Value along(const Value& table, const Directions& v) const {
    expect_order(kName, v.count(), kMostDirections);
    return Value::call("_density_along", a_[kD], a_[kKind], table, a_[kGrid], a_[kHarmonics],
                       v.all());
  }
  Value gradient(const Value& grad, const Value& table, const Directions& v) const {
    expect_order(kName, v.count(), kMostDirections - 1);
    return Value::call("_density_backward", grad, a_[kD], a_[kKind], table, a_[kGrid],
                       a_[kHarmonics], v.all());
  }
  Value table_gradient(const Value& grad, const Directions& v) const {
    expect_order(kName, v.count(), kMostDirections);
    return Value::call("_density_table_backward", grad, a_[kD], a_[kKind], a_[kTable], a_[kGrid],
                       a_[kHarmonics], v.all());
  }

 private:
  const Value* a_;
};

// The operator density has no directions, _density_along has.
template <bool kHasDirections>
Directions directions_of(const Value* a) {
  return kHasDirections ? Directions(a[kDirections]) : Directions();
}

template <bool kHasDirections>
void vjp(const Value* a, const Value* upstream, Value* gradients) {
  const Sums sums(a);
  const Directions v = directions_of<kHasDirections>(a);
  differentiate(v, gradients[kD], gradients + kDirections,
                [&](const Directions& w) { return sums.gradient(upstream[0], a[kTable], w); });
  if (gradients[kTable].is_wanted()) gradients[kTable] = sums.table_gradient(upstream[0], v);
}

template <bool kHasDirections>
void jvp(const Value* a, const Value* tangents, Value* results) {
  const Sums sums(a);
  const Directions v = directions_of<kHasDirections>(a);
  add_along_tangents(
      v, tangents[kD], tangents + kDirections,
      [&](const Directions& w) { return sums.along(a[kTable], w); }, results[0]);
  if (!tangents[kTable].is_none()) add(results[0], sums.along(tangents[kTable], v));
}

// The inner product of grad_d <grad, A(d, C; v)> with its upstream gradient u is the number
// <grad, A(d, C; v, u)>. This function differentiates that number.
void backward_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Value &grad = arguments[0], &u = upstream[0];
  const Value* a = arguments + 1;
  Value* of_a = gradients + 1;
  const Sums sums(a);
  const Directions v(a[kDirections]);
  if (gradients[0].is_wanted()) gradients[0] = sums.along(a[kTable], v.with(u));
  if (of_a[kTable].is_wanted()) of_a[kTable] = sums.table_gradient(grad, v.with(u));
  differentiate(v, of_a[kD], of_a + kDirections,
                [&](const Directions& w) { return sums.gradient(grad, a[kTable], w.with(u)); });
}

void backward_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Value& grad = arguments[0];
  const Value* a = arguments + 1;
  const Value* of_a = tangents + 1;
  const Sums sums(a);
  const Directions v(a[kDirections]);
  if (!tangents[0].is_none()) add(results[0], sums.gradient(tangents[0], a[kTable], v));
  add_along_tangents(
      v, of_a[kD], of_a + kDirections,
      [&](const Directions& w) { return sums.gradient(grad, a[kTable], w); }, results[0]);
  if (!of_a[kTable].is_none()) add(results[0], sums.gradient(grad, of_a[kTable], v));
}

// The inner product of grad_C <grad, A(d, C; v)> with its upstream gradient u is the number
// <grad, A(d, u; v)>. It does not depend on C.
void table_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Value &grad = arguments[0], &u = upstream[0];
  const Value* a = arguments + 1;
  Value* of_a = gradients + 1;
  const Sums sums(a);
  const Directions v(a[kDirections]);
  if (gradients[0].is_wanted()) gradients[0] = sums.along(u, v);
  differentiate(v, of_a[kD], of_a + kDirections,
                [&](const Directions& w) { return sums.gradient(grad, u, w); });
}

void table_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Value* a = arguments + 1;
  const Sums sums(a);
  const Directions v(a[kDirections]);
  if (!tangents[0].is_none()) add(results[0], sums.table_gradient(tangents[0], v));
  add_along_tangents(
      v, tangents[1 + kD], tangents + 1 + kDirections,
      [&](const Directions& w) { return sums.table_gradient(arguments[0], w); }, results[0]);
}

const Derivative kDerivatives[] = {{"density", vjp<false>, jvp<false>},
                                   {"_density_along", vjp<true>, jvp<true>},
                                   {"_density_backward", backward_vjp, backward_jvp}};
const Derivative kTableDerivatives[] = {{"_density_table_backward", table_vjp, table_jvp}};

// `first` is the position of d.
template <int first>
void check_harmonics(Value* arguments, Value*) {
  const Value& harmonics = arguments[first + kHarmonics];
  for (const int number : {1, 4, 9, 16, 25})
    if (harmonics.equals(number)) return;
  refuse(kName, "harmonics", "1, 4, 9, 16 or 25", harmonics);
}

void check_backward(Value* arguments, Value* shapes) {
  check_harmonics<1>(arguments, shapes);
  expect_order(kName, Directions(arguments[1 + kDirections]).count(), kMostDirections - 1);
}

const Check kChecks[] = {{"density", check_harmonics<0>},
                         {"_density_along", check_harmonics<0>},
                         {"_density_backward", check_backward}};
const Check kTableChecks[] = {{"_density_table_backward", check_harmonics<1>}};

// ---- the contract -------------------------------------------------------------------------------

const Contract kContract(R"(
density(Tensor d, Tensor kind, Tensor table, Tensor grid, SymInt harmonics) -> Tensor result
  Sums over neighbours of tabulated functions of the distance times spherical harmonics.

  NEP, ACE and SNAP describe an atom by these projections of its neighbours' density:

    A[l^2 + l + m][i][f] = sum of g_f(|d|; kind) Y_lm(d / |d|) over the slots of atom i

  Each kind of pair has F functions g_f of the distance. They are quintic splines with B - 5 cells
  of equal width between the two distances in `grid`. table[kind][b][f] is the coefficient of
  B-spline b. Below the grid the splines continue as straight lines, so a grid usually begins at 0.

  Y_lm are the real spherical harmonics, orthonormal on the unit sphere: Y_00 = (4 pi)^(-1/2), and
  Y_1-1, Y_10 and Y_11 are (3 / 4 pi)^(1/2) times y/r, z/r and x/r. m > 0 has cos(m phi), m < 0 has
  sin(|m| phi), without the sign (-1)^m.

  Empty slots and pairs at the end of their grid or beyond add exactly nothing, whatever their
  values, and their gradients are exactly 0. Functions that don't vanish at the end of the grid jump
  to 0 there. Coincident atoms make that atom's sums NaN.

  Differentiable in `d` up to third order and in `table` to any order, in reverse and forward mode;
  not in `grid`. Deterministic: computed in float64 and summed in the order of the slots; the
  gradient for `table` is summed in blocks of atoms that depend only on the sizes.

  A kind that doesn't exist is an error on the CPU. On CUDA the sums of its atom become NaN; with
  CALCOPS_CHECK=1, which makes each call wait for the GPU, it's an error there too.

_density_along(Tensor d, Tensor kind, Tensor table, Tensor grid, SymInt harmonics,
               Tensor? directions=None) -> Tensor result
  The D-th derivative of the sums along D directions. Each slot has directions of its own.

_density_backward(Tensor grad_result, Tensor d, Tensor kind, Tensor table, Tensor grid,
                  SymInt harmonics, Tensor? directions=None) -> Tensor d
  Gradient for d, from that for the sums or for their derivative along `directions`. Without
  `directions`, it has the meaning of edge_gradient in edge_force.

d            [n, K, 3]; float32 or float64; n < 2^31 on CUDA; n*K < 2^32 on CUDA.
             Vectors from each atom to its neighbours, in any order.
kind         [n, K]; int32 or int64; entries -1 or 0 <= kind < kinds at atom, slot. The kind of
             each pair, such as the neighbour's type or both types; -1: an empty slot, anywhere.
table        [kinds, B, F]; like d; B >= 6. Coefficients of the splines.
grid         [kinds, 2]; float32 or float64 read as float64; constant. First and last distance of
             the cells for each kind, rising and not negative. The last is the cutoff.
harmonics    1 to 25. The number (l_max + 1)^2 of harmonics: 1, 4, 9, 16 or 25.
directions   [n, K, D, 3]; like d; D < 4. Directions of the derivative.
result       [harmonics, n, F]; like d.
grad_result  [harmonics, n, F]; like d.
kernels      density of _density_along
vmap         joins n
)",
                         kDerivatives, kChecks);

// A contract of its own: each item of a batch has a gradient of its own, so vmap cannot join them.
const Contract kTableContract(R"(
_density_table_backward(Tensor grad_result, Tensor d, Tensor kind, Tensor table, Tensor grid,
                        SymInt harmonics, Tensor? directions=None) -> Tensor table
  Gradient for the table, from that for the sums or for their derivative along `directions`.

d            [n, K, 3]; float32 or float64; n < 2^31 on CUDA; n*K < 2^32 on CUDA.
kind         [n, K]; int32 or int64; entries -1 or 0 <= kind < kinds at atom, slot.
table        [kinds, B, F]; like d; B >= 6.
grid         [kinds, 2]; float32 or float64 read as float64; constant.
harmonics    1 to 25.
directions   [n, K, D, 3]; like d; D < 4.
grad_result  [harmonics, n, F]; like d.
)",
                              kTableDerivatives, kTableChecks);

}  // namespace
}  // namespace calcops::ops::density
