// environment_spline: its contract and its derivatives.
#include <calcops/no_loops.h>
#include <calcops/operator.h>

#include "directions.h"

namespace calcops::ops::environment_spline {
namespace {

// ---- derivatives: see directions.h --------------------------------------------------------------

constexpr char kName[] = "calcops_models::environment_spline";
enum Argument {
  kD,
  kKind,
  kDavg,
  kDstd,
  kGrid,
  kFunctions,
  kRcutSmth,
  kRcut,
  kSpline,
  kDirections
};

// Return P(d; v) with the arguments of a call, but other directions.
Value along(const Value* a, const Directions& v) {
  expect_order(kName, v.count(), kMostDirections);
  return Value::call("_environment_spline_along", a[kD], a[kKind], a[kDavg], a[kDstd], a[kGrid],
                     a[kFunctions], a[kRcutSmth], a[kRcut], a[kSpline], v.all());
}

// Return grad_d <grad, P(d; v)>.
Value gradient(const Value& grad, const Value* a, const Directions& v) {
  expect_order(kName, v.count(), kMostDirections - 1);
  return Value::call("_environment_spline_backward", grad, a[kD], a[kKind], a[kDavg], a[kDstd],
                     a[kGrid], a[kFunctions], a[kRcutSmth], a[kRcut], a[kSpline], v.all());
}

// The operator environment_spline has no directions, _environment_spline_along has.
template <bool kHasDirections>
Directions directions_of(const Value* a) {
  return kHasDirections ? Directions(a[kDirections]) : Directions();
}

template <bool kHasDirections>
void vjp(const Value* a, const Value* upstream, Value* gradients) {
  differentiate(directions_of<kHasDirections>(a), gradients[kD], gradients + kDirections,
                [&](const Directions& v) { return gradient(upstream[0], a, v); });
}

template <bool kHasDirections>
void jvp(const Value* a, const Value* tangents, Value* results) {
  add_along_tangents(
      directions_of<kHasDirections>(a), tangents[kD], tangents + kDirections,
      [&](const Directions& v) { return along(a, v); }, results[0]);
}

// The inner product of grad_d <grad, P(d; v)> with its upstream gradient u is the number
// <grad, P(d; v, u)>. This function differentiates that number.
void backward_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Value &grad = arguments[0], &u = upstream[0];
  const Value* a = arguments + 1;
  const Directions v(a[kDirections]);
  if (gradients[0].is_wanted()) gradients[0] = along(a, v.with(u));
  differentiate(v, gradients[1 + kD], gradients + 1 + kDirections,
                [&](const Directions& w) { return gradient(grad, a, w.with(u)); });
}

void backward_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Value* a = arguments + 1;
  const Directions v(a[kDirections]);
  if (!tangents[0].is_none()) add(results[0], gradient(tangents[0], a, v));
  add_along_tangents(
      v, tangents[1 + kD], tangents + 1 + kDirections,
      [&](const Directions& w) { return gradient(arguments[0], a, w); }, results[0]);
}

const Derivative kDerivatives[] = {{"environment_spline", vjp<false>, jvp<false>},
                                   {"_environment_spline_along", vjp<true>, jvp<true>},
                                   {"_environment_spline_backward", backward_vjp, backward_jvp}};

// `first` is the position of d.
template <int first>
void check_cutoff(Value* arguments, Value*) {
  const Value &rcut_smth = arguments[first + kRcutSmth], &rcut = arguments[first + kRcut];
  if (!(rcut.real() > rcut_smth.real())) refuse(kName, "rcut", "> `rcut_smth` =", rcut_smth, rcut);
}

void check_backward(Value* arguments, Value* shapes) {
  check_cutoff<1>(arguments, shapes);
  expect_order(kName, Directions(arguments[1 + kDirections]).count(), kMostDirections - 1);
}

const Check kChecks[] = {{"environment_spline", check_cutoff<0>},
                         {"_environment_spline_along", check_cutoff<0>},
                         {"_environment_spline_backward", check_backward}};

// ---- the contract -------------------------------------------------------------------------------

const Contract kContract(R"(
environment_spline(Tensor d, Tensor kind, Tensor davg, Tensor dstd, Tensor grid, SymInt functions,
                   float rcut_smth, float rcut, str spline="quintic") -> Tensor result
  Sums over neighbours of environment-matrix rows times B-splines, for spline embedding nets.

  The switch w(r) is 1 up to rcut_smth. From there to rcut it is (1 - u)^3 (1 + 3u + 6u^2) with
  u = (r - rcut_smth) / (rcut - rcut_smth). With r = |d| and s = w(r)/r, each slot has the row
  R = (s (1, d/r) - davg) / dstd, as in DeePMD-kit's se_e2_a. The result is

    P[i][a][kind][b] = sum of R[a] B_b(R[0]) over the slots of atom i that have this kind

  B_b are uniform B-splines, which continue as straight lines outside the grid.

  P gives the sums for an embedding net: if the net's M outputs are splines of R[0] with the
  coefficients C [kinds*functions, M], then P.flatten(2) @ C [n, 4, M] are the sums of R[a] times
  these outputs. Nothing of the size n*K*M is stored. On a CPU,
  matrix_product(P.view(-1, len(C)), C).view(n, 4, M) is often faster.

  Empty slots and pairs at rcut or beyond add exactly nothing, whatever their values, and their
  gradients are exactly 0. (In DeePMD-kit an empty slot has the row R = -davg/dstd; here the caller
  adds its term.) Coincident atoms make the sums of their kind NaN or infinite.

  Differentiable up to third order in d, in reverse and forward mode; not in davg, dstd and grid.
  Deterministic: computed in float64 and summed in the order of the slots.

  A kind that doesn't exist is an error on the CPU. On CUDA the sums of its atom become NaN; with
  CALCOPS_CHECK=1, which makes each call wait for the GPU, it's an error there too.

_environment_spline_along(Tensor d, Tensor kind, Tensor davg, Tensor dstd, Tensor grid,
                          SymInt functions, float rcut_smth, float rcut, str spline="quintic",
                          Tensor? directions=None) -> Tensor result
  The D-th derivative of the sums along D directions. Each slot has directions of its own.

_environment_spline_backward(Tensor grad_result, Tensor d, Tensor kind, Tensor davg, Tensor dstd,
                             Tensor grid, SymInt functions, float rcut_smth, float rcut, str spline,
                             Tensor? directions=None) -> Tensor d
  Gradient for d, from that for the sums or for their derivative along `directions`. Without
  `directions`, it has the meaning of edge_gradient in edge_force.

d           [n, K, 3]; float32 or float64; n < 2^31 on CUDA; n*K < 2^32 on CUDA.
            Vectors from each atom to its neighbours, in any order.
kind        [n, K]; int32 or int64; entries -1 or 0 <= kind < kinds at atom, slot. The kind of each
            pair, such as the neighbour's type or both types; -1: an empty slot, anywhere.
davg        [kinds, 4]; float32 or float64 read as float64; constant. Mean of the rows,
            subtracted in R (below).
dstd        [kinds, 4]; float32 or float64 read as float64; constant. Standard deviation of
            the rows, the divisor in R (below).
grid        [kinds, 2]; float32 or float64 read as float64; constant. First and last value of
            R[0] in the cells of the B-splines, for each kind. There are (functions - 5)
            cells of equal width, or (functions - 3) if `spline` is "cubic".
functions   6 to 2^20. Number of B-splines of each kind.
rcut_smth   >= 0. Distance at which the switch w begins to fall.
rcut        Cutoff distance, at which w is 0. It is larger than rcut_smth.
spline      "quintic" or "cubic". The B-splines have four or two continuous derivatives.
directions  [n, K, D, 3]; like d; D < 4. Directions of the derivative.
result      [n, 4, kinds, functions]; like d.
grad_result [n, 4, kinds, functions]; like d.
kernels     environment_spline of _environment_spline_along
vmap        joins n
)",
                         kDerivatives, kChecks);

}  // namespace
}  // namespace calcops::ops::environment_spline
