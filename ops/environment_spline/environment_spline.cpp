// environment_spline: its contract, its derivatives, and the conversion of a call's views to the
// kernels' structs.
#include "environment_spline/environment_spline.h"

#include <calcops/operator.h>

namespace calcops::ops::environment_spline {
namespace {

// ---- derivatives --------------------------------------------------------------------------------
//
// P(d; v_1 ... v_D) is the D-th derivative of the sums P(d) along the directions v_1 ... v_D. Their
// order has no effect. Two operators give every derivative: _environment_spline_along computes
// P(d; v_1 ... v_D), and _environment_spline_backward computes grad_d <grad, P(d; v_1 ... v_D)>.
// They are enough because of two facts:
//
// - The derivative of P(d; v_1 ... v_D) along v is P(d; v_1 ... v_D, v).
// - P(d; v_1 ... v_D) is linear in v_i. So the gradient of <grad, P(d; v_1 ... v_D)> for v_i is
//   grad_d <grad, P(d; the other directions)>.

enum Argument { kD, kKind, kDavg, kDstd, kGrid, kFunctions, kRcutSmth, kRcut, kSpline, kAlong };

// The directions [n, K, D, 3] of a call; D = 0 where the call has none.
class Directions {
 public:
  // Under tracing, size(2) is a symbol. It can be compared with a number, but not read.
  explicit Directions(const Value& all) : all_(all) {
    if (!all.is_none())
      while (!all.size(2).equals(count_)) ++count_;
  }

  int count() const { return count_; }
  const Value& all() const { return all_; }

  // Return these directions and another one [n, K, 3].
  Value with(const Value& direction) const {
    const Value one = Value::call("aten::unsqueeze", direction, 2);
    return count_ > 0 ? Value::call("aten::cat", Value::list(all_, one), 2) : one;
  }

  // Return all directions but the i-th.
  Directions without(int i) const {
    if (count_ == 1) return Directions(Value());
    const Value before = Value::call("aten::narrow", all_, 2, 0, i);
    const Value after = Value::call("aten::narrow", all_, 2, i + 1, count_ - 1 - i);
    return Directions(Value::call("aten::cat", Value::list(before, after), 2));
  }

  // Return the directions with the i-th replaced by the i-th tangent, which comes last.
  Value replaced(int i, const Value& tangents) const {
    return without(i).with(Value::call("aten::select.int", tangents, 2, i));
  }

 private:
  Value all_;
  int count_ = 0;
};

// Calls P and its gradient with the arguments of a call, but with other directions.
class Sums {
 public:
  explicit Sums(const Value* arguments) : a_(arguments) {}

  // Return P(d; directions).
  Value along(const Value& directions) const {
    return Value::call("_environment_spline_along", a_[kD], a_[kKind], a_[kDavg], a_[kDstd],
                       a_[kGrid], a_[kFunctions], a_[kRcutSmth], a_[kRcut], a_[kSpline],
                       directions);
  }

  // Return grad_d <grad, P(d; directions)>.
  Value gradient(const Value& grad, const Value& directions) const {
    return Value::call("_environment_spline_backward", grad, a_[kD], a_[kKind], a_[kDavg],
                       a_[kDstd], a_[kGrid], a_[kFunctions], a_[kRcutSmth], a_[kRcut], a_[kSpline],
                       directions);
  }

 private:
  const Value* a_;
};

void add(Value& sum, const Value& term) { sum = sum.is_tensor() ? sum + term : term; }

// Return the gradients for all directions [n, K, D, 3]. gradient(i) is that for the i-th [n, K, 3].
template <class Gradient>
Value join_gradients(const Directions& directions, const Gradient& gradient) {
  Value all;
  for (int i = 0; i < directions.count(); ++i) {
    const Value one = Value::call("aten::unsqueeze", gradient(i), 2);
    all = all.is_tensor() ? Value::call("aten::cat", Value::list(all, one), 2) : one;
  }
  return all;
}

void vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  if (gradients[kD].is_wanted()) gradients[kD] = Sums(arguments).gradient(upstream[0], Value());
}

void jvp(const Value* arguments, const Value* tangents, Value* results) {
  if (tangents[kD].is_none()) return;
  results[0] = Sums(arguments).along(Directions(Value()).with(tangents[kD]));
}

void along_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Sums sums(arguments);
  const Directions v(arguments[kAlong]);
  if (gradients[kD].is_wanted()) gradients[kD] = sums.gradient(upstream[0], v.all());
  if (gradients[kAlong].is_wanted())
    gradients[kAlong] =
        join_gradients(v, [&](int i) { return sums.gradient(upstream[0], v.without(i).all()); });
}

void along_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Sums sums(arguments);
  const Directions v(arguments[kAlong]);
  if (!tangents[kD].is_none()) add(results[0], sums.along(v.with(tangents[kD])));
  if (tangents[kAlong].is_none()) return;
  for (int i = 0; i < v.count(); ++i) add(results[0], sums.along(v.replaced(i, tangents[kAlong])));
}

// The operator _environment_spline_backward(grad, d, ..., v) returns the gradient of
// <grad, P(d; v)> for d. The inner product of this gradient with its upstream gradient u is the
// number <grad, P(d; v, u)>. This function differentiates that number.
void backward_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Value& grad = arguments[0];
  const Value& u = upstream[0];
  const Value* sums_arguments = arguments + 1;
  Value* sums_gradients = gradients + 1;
  const Sums sums(sums_arguments);
  const Directions v(sums_arguments[kAlong]);
  if (gradients[0].is_wanted()) gradients[0] = sums.along(v.with(u));
  if (sums_gradients[kD].is_wanted()) sums_gradients[kD] = sums.gradient(grad, v.with(u));
  if (v.count() > 0 && sums_gradients[kAlong].is_wanted())
    sums_gradients[kAlong] =
        join_gradients(v, [&](int i) { return sums.gradient(grad, v.without(i).with(u)); });
}

void backward_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Value& grad = arguments[0];
  const Value* sums_arguments = arguments + 1;
  const Value* sums_tangents = tangents + 1;
  const Sums sums(sums_arguments);
  const Directions v(sums_arguments[kAlong]);
  if (!tangents[0].is_none()) add(results[0], sums.gradient(tangents[0], v.all()));
  if (!sums_tangents[kD].is_none()) add(results[0], sums.gradient(grad, v.with(sums_tangents[kD])));
  if (sums_tangents[kAlong].is_none()) return;
  for (int i = 0; i < v.count(); ++i)
    add(results[0], sums.gradient(grad, v.replaced(i, sums_tangents[kAlong])));
}

const Derivative kDerivatives[] = {
    {"environment_spline", vjp, jvp, nullptr, Derivative::kNone},
    {"_environment_spline_along", along_vjp, along_jvp, nullptr, Derivative::kNone},
    {"_environment_spline_backward", backward_vjp, backward_jvp, nullptr, Derivative::kNone}};

// ---- the contract -------------------------------------------------------------------------------

const Contract kContract(R"(
environment_spline(Tensor d, Tensor kind, Tensor davg, Tensor dstd, Tensor grid, SymInt functions,
                   float rcut_smth, float rcut, str spline="quintic") -> Tensor
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

  Differentiable up to order 15 in d, in reverse and in forward mode; not in davg, dstd and grid.
  Deterministic: computed in float64 and summed in the order of the slots.

  A kind that does not exist is an error on the CPU. On CUDA the sums of its atom become NaN. With
  CALCOPS_CHECK=1 in the environment it is an error on CUDA too, but each call then waits for the
  GPU.

_environment_spline_along(Tensor d, Tensor kind, Tensor davg, Tensor dstd, Tensor grid,
                          SymInt functions, float rcut_smth, float rcut, str spline,
                          Tensor directions) -> Tensor
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
rcut        > rcut_smth. Cutoff distance, at which w is 0.
spline      "quintic" or "cubic". The B-splines have four or two continuous derivatives.
directions  [n, K, D, 3]; like d; D < 16. Directions of the derivative.
result      [n, 4, kinds, functions]; like d.
vmap        joins n
)",
                         kDerivatives);

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
int64_t cpu(In<Real, 3> d, In<Index, 2> kind, In<double, 2> davg, In<double, 2> dstd,
            In<double, 2> grid, int64_t functions, double rcut_smth, double rcut, Spline spline,
            View<Real, 4> P) {
  return environment_spline_cpu(
      inputs(d, kind, davg, dstd, grid, functions, rcut_smth, rcut, spline), P.data);
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
  return environment_spline_backward_cpu(
      inputs(d, kind, davg, dstd, grid, functions, rcut_smth, rcut, spline, directions), grad.data,
      grad_d.data);
}

const Kernel kCpu("environment_spline", cpu<float, int32_t>, cpu<float, int64_t>,
                  cpu<double, int32_t>, cpu<double, int64_t>);
const Kernel kAlongCpu("_environment_spline_along", along_cpu<float, int32_t>,
                       along_cpu<float, int64_t>, along_cpu<double, int32_t>,
                       along_cpu<double, int64_t>);
const Kernel kBackwardCpu("_environment_spline_backward", backward_cpu<float, int32_t>,
                          backward_cpu<float, int64_t>, backward_cpu<double, int32_t>,
                          backward_cpu<double, int64_t>);

#ifndef CALCOPS_NO_CUDA
template <class Real, class Index>
cudaError_t cuda(In<Real, 3> d, In<Index, 2> kind, In<double, 2> davg, In<double, 2> dstd,
                 In<double, 2> grid, int64_t functions, double rcut_smth, double rcut,
                 Spline spline, View<Real, 4> P, cudaStream_t stream) {
  return environment_spline_cuda(
      inputs(d, kind, davg, dstd, grid, functions, rcut_smth, rcut, spline), P.data, stream);
}

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
  return environment_spline_backward_cuda(
      inputs(d, kind, davg, dstd, grid, functions, rcut_smth, rcut, spline, directions), grad.data,
      grad_d.data, stream);
}

const Kernel kCuda("environment_spline", cuda<float, int32_t>, cuda<float, int64_t>,
                   cuda<double, int32_t>, cuda<double, int64_t>);
const Kernel kAlongCuda("_environment_spline_along", along_cuda<float, int32_t>,
                        along_cuda<float, int64_t>, along_cuda<double, int32_t>,
                        along_cuda<double, int64_t>);
const Kernel kBackwardCuda("_environment_spline_backward", backward_cuda<float, int32_t>,
                           backward_cuda<float, int64_t>, backward_cuda<double, int32_t>,
                           backward_cuda<double, int64_t>);
#endif

}  // namespace
}  // namespace calcops::ops::environment_spline
