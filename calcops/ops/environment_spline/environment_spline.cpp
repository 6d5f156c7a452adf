// environment_spline: its contract, its derivatives, and the conversion of a call's views to the
// kernels' structs.
#include "environment_spline/environment_spline.h"

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

const Check kChecks[] = {{"environment_spline", check_cutoff<0>},
                         {"_environment_spline_along", check_cutoff<0>},
                         {"_environment_spline_backward", check_cutoff<1>}};

// ---- the contract -------------------------------------------------------------------------------

const Contract kContract(R"(
environment_spline(Tensor d, Tensor kind, Tensor davg, Tensor dstd, Tensor grid, SymInt functions,
                   float rcut_smth, float rcut, str spline="quintic") -> Tensor result
  Sums over neighbours of environment-matrix rows times B-splines, for spline embedding nets.

  The switch w(r) is 1 up to rcut_smth. From there to rcut it is (1 - u)^3 (1 + 3u + 6u^2) with
  u = (r - rcut_smth) / (rcut - rcut_smth). With r = |d| and s = w(r)/r, each slot has the row
  R = (s (1, d/r) - davg) / dstd, as in DeePMD-kit's se_e2_a. The result is

    P[i][a][kind][b] = sum of R[a] B_b(R[0]) over the slots of atom i that have this kind

  B_b are uniform B-splines. Outside the grid they continue as straight lines.

  The sums for an embedding net follow from P. Let the net's M outputs be splines of R[0], with the
  coefficients C [kinds*functions, M]. Then P.flatten(2) @ C [n, 4, M] are the sums of R[a] times
  these outputs. Nothing of the size n*K*M is stored. On a CPU,
  matrix_product(P.view(-1, len(C)), C).view(n, 4, M) is often faster.

  An empty slot and a pair at rcut or beyond add exactly nothing, whatever values they have, and
  their gradients are exactly 0. (In DeePMD-kit an empty slot has the row R = -davg/dstd. Here the
  caller adds its term.) Two atoms in one place make the sums of their kind NaN or infinite.

  Differentiable up to third order in d, in reverse and in forward mode; not in davg, dstd and grid.
  Deterministic: computed in float64 and summed in the order of the slots.

  A kind that does not exist is an error on the CPU. On CUDA the sums of its atom become NaN. With
  CALCOPS_CHECK=1 in the environment it is an error on CUDA too, but each call then waits for the
  GPU.

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
            pair, such as the neighbour's type; -1: an empty slot, anywhere.
davg        [kinds, 4]; float32 or float64 read as float64; constant. Mean of the rows,
            subtracted in R (below).
dstd        [kinds, 4]; float32 or float64 read as float64; constant. Standard deviation of
            the rows, the divisor in R (below).
grid        [kinds, 2]; float32 or float64 read as float64; constant. First and last value of
            R[0] that the cells of the B-splines cover, for each kind. There are (functions - 5)
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

// ---- from views to the structs of environment_spline.h ------------------------------------------

template <class Number, int rank>
using In = View<const Number, rank>;

template <class Real, class Index>
SplineInputs<Real, Index> inputs(In<Real, 3> d, In<Index, 2> kind, In<double, 2> davg,
                                 In<double, 2> dstd, In<double, 2> grid, int64_t functions,
                                 double rcut_smth, double rcut, Spline spline,
                                 In<Real, 4> along = {}) {
  return {d.shape[0], d.shape[1], davg.shape[0], functions, along ? along.shape[2] : 0,
          d.data,     kind.data,  along.data,    davg.data, dstd.data,
          grid.data,  rcut_smth,  rcut,          spline};
}

template <class Real, class Index>
int64_t along_cpu(In<Real, 3> d, In<Index, 2> kind, In<double, 2> davg, In<double, 2> dstd,
                  In<double, 2> grid, int64_t functions, double rcut_smth, double rcut,
                  Spline spline, In<Real, 4> directions, View<Real, 4> P) {
  return environment_spline_cpu(
      inputs(d, kind, davg, dstd, grid, functions, rcut_smth, rcut, spline, directions), P.data);
}

template <class Real, class Index>
int64_t backward_cpu(In<Real, 4> grad, In<Real, 3> d, In<Index, 2> kind, In<double, 2> davg,
                     In<double, 2> dstd, In<double, 2> grid, int64_t functions, double rcut_smth,
                     double rcut, Spline spline, In<Real, 4> directions, View<Real, 3> grad_d) {
  if (directions) expect_order(kName, directions.shape[2], kMostDirections - 1);
  return environment_spline_backward_cpu(
      inputs(d, kind, davg, dstd, grid, functions, rcut_smth, rcut, spline, directions), grad.data,
      grad_d.data);
}

const Kernel kAlongCpu("_environment_spline_along", along_cpu<float, int32_t>,
                       along_cpu<float, int64_t>, along_cpu<double, int32_t>,
                       along_cpu<double, int64_t>);
const Kernel kBackwardCpu("_environment_spline_backward", backward_cpu<float, int32_t>,
                          backward_cpu<float, int64_t>, backward_cpu<double, int32_t>,
                          backward_cpu<double, int64_t>);

#ifndef CALCOPS_NO_CUDA
template <class Real, class Index>
cudaError_t along_cuda(In<Real, 3> d, In<Index, 2> kind, In<double, 2> davg, In<double, 2> dstd,
                       In<double, 2> grid, int64_t functions, double rcut_smth, double rcut,
                       Spline spline, In<Real, 4> directions, View<Real, 4> P,
                       cudaStream_t stream) {
  return environment_spline_cuda(
      inputs(d, kind, davg, dstd, grid, functions, rcut_smth, rcut, spline, directions), P.data,
      stream);
}

template <class Real, class Index>
cudaError_t backward_cuda(In<Real, 4> grad, In<Real, 3> d, In<Index, 2> kind, In<double, 2> davg,
                          In<double, 2> dstd, In<double, 2> grid, int64_t functions,
                          double rcut_smth, double rcut, Spline spline, In<Real, 4> directions,
                          View<Real, 3> grad_d, cudaStream_t stream) {
  if (directions) expect_order(kName, directions.shape[2], kMostDirections - 1);
  return environment_spline_backward_cuda(
      inputs(d, kind, davg, dstd, grid, functions, rcut_smth, rcut, spline, directions), grad.data,
      grad_d.data, stream);
}

const Kernel kAlongCuda("_environment_spline_along", along_cuda<float, int32_t>,
                        along_cuda<float, int64_t>, along_cuda<double, int32_t>,
                        along_cuda<double, int64_t>);
const Kernel kBackwardCuda("_environment_spline_backward", backward_cuda<float, int32_t>,
                           backward_cuda<float, int64_t>, backward_cuda<double, int32_t>,
                           backward_cuda<double, int64_t>);
#endif

}  // namespace
}  // namespace calcops::ops::environment_spline
