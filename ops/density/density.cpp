// density: its contract, its derivatives, and the conversion of a call's views to the kernels'
// structs.
#include "density/density.h"

#include <calcops/operator.h>

#include <stdexcept>
#include <string>

namespace calcops::ops::density {
namespace {

// ---- derivatives --------------------------------------------------------------------------------
//
// A(d, C; v_1 ... v_D) is the D-th derivative of the sums along the directions v_1 ... v_D, whose
// order has no effect. It is linear in the table C and in each direction. Three operators give
// every derivative: _density_along computes A, _density_backward grad_d <grad, A>, and
// _density_table_backward grad_C <grad, A>. They are enough because of two facts:
//
// - The derivative of A(d, C; v_1 ... v_D) along v is A(d, C; v_1 ... v_D, v).
// - A is linear in C and in v_i. So the derivative along a tangent of one of them is A with the
//   tangent in its place, and the gradient for v_i is that for d of A without v_i.

enum Argument { kD, kKind, kTable, kGrid, kHarmonics, kDirections };

[[noreturn]] void refuse_order() {
  throw std::invalid_argument(
      "calcops::density: expected derivatives in `d` up to third order, got a higher one");
}

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
    if (count_ == kMostDirections) refuse_order();
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

// Calls A and its gradients with the arguments of a call, but with another table and directions.
class Sums {
 public:
  explicit Sums(const Value* arguments) : a_(arguments) {}

  Value along(const Value& table, const Value& directions) const {
    return Value::call("_density_along", a_[kD], a_[kKind], table, a_[kGrid], a_[kHarmonics],
                       directions);
  }
  Value gradient(const Value& grad, const Value& table, const Value& directions) const {
    return Value::call("_density_backward", grad, a_[kD], a_[kKind], table, a_[kGrid],
                       a_[kHarmonics], directions);
  }
  Value table_gradient(const Value& grad, const Value& directions) const {
    return Value::call("_density_table_backward", grad, a_[kD], a_[kKind], a_[kTable], a_[kGrid],
                       a_[kHarmonics], directions);
  }

 private:
  const Value* a_;
};

void add(Value& sum, const Value& term) { sum = sum.is_tensor() ? sum + term : term; }

void refuse_grid(const Value* arguments, const Value* gradients) {
  if (gradients[kGrid].is_wanted())
    refuse("calcops::density", "grid", "that requires no gradient", arguments[kGrid]);
}

// Set the gradients of <grad, A(d, table; v)> for d, the table if it is an argument, and v.
void differentiate(const Value* arguments, const Value& grad, const Value& table,
                   const Directions& v, Value* gradients) {
  const Sums sums(arguments);
  if (gradients[kD].is_wanted()) gradients[kD] = sums.gradient(grad, table, v.all());
  if (v.count() == 0 || !gradients[kDirections].is_wanted()) return;
  Value all;
  for (int i = 0; i < v.count(); ++i) {
    const Value one =
        Value::call("aten::unsqueeze", sums.gradient(grad, table, v.without(i).all()), 2);
    all = all.is_tensor() ? Value::call("aten::cat", Value::list(all, one), 2) : one;
  }
  gradients[kDirections] = all;
}

void vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  refuse_grid(arguments, gradients);
  const Sums sums(arguments);
  if (gradients[kD].is_wanted())
    gradients[kD] = sums.gradient(upstream[0], arguments[kTable], Value());
  if (gradients[kTable].is_wanted()) gradients[kTable] = sums.table_gradient(upstream[0], Value());
}

void jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Sums sums(arguments);
  if (!tangents[kD].is_none())
    add(results[0], sums.along(arguments[kTable], Directions(Value()).with(tangents[kD])));
  if (!tangents[kTable].is_none()) add(results[0], sums.along(tangents[kTable], Value()));
}

// Add derivative(v') to the tangent, for d that moves along a tangent and for each direction that
// is replaced by its own.
template <class Derivative>
void add_along_tangents(const Value* arguments, const Value* tangents, const Derivative& derivative,
                        Value& result) {
  const Directions v(arguments[kDirections]);
  if (!tangents[kD].is_none()) add(result, derivative(v.with(tangents[kD])));
  if (tangents[kDirections].is_none()) return;
  for (int i = 0; i < v.count(); ++i) add(result, derivative(v.replaced(i, tangents[kDirections])));
}

void along_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  refuse_grid(arguments, gradients);
  const Directions v(arguments[kDirections]);
  differentiate(arguments, upstream[0], arguments[kTable], v, gradients);
  if (gradients[kTable].is_wanted())
    gradients[kTable] = Sums(arguments).table_gradient(upstream[0], v.all());
}

void along_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Sums sums(arguments);
  add_along_tangents(
      arguments, tangents, [&](const Value& v) { return sums.along(arguments[kTable], v); },
      results[0]);
  if (!tangents[kTable].is_none())
    add(results[0], sums.along(tangents[kTable], arguments[kDirections]));
}

// The inner product of grad_d <grad, A(d, C; v)> with its upstream gradient u is the number
// <grad, A(d, C; v, u)>. This function differentiates that number.
void backward_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Value& grad = arguments[0];
  const Value& u = upstream[0];
  const Value* a = arguments + 1;
  Value* of_a = gradients + 1;
  refuse_grid(a, of_a);
  const Sums sums(a);
  const Directions v(a[kDirections]);
  if (gradients[0].is_wanted()) gradients[0] = sums.along(a[kTable], v.with(u));
  if (of_a[kD].is_wanted()) of_a[kD] = sums.gradient(grad, a[kTable], v.with(u));
  if (of_a[kTable].is_wanted()) of_a[kTable] = sums.table_gradient(grad, v.with(u));
  if (v.count() == 0 || !of_a[kDirections].is_wanted()) return;
  Value all;
  for (int i = 0; i < v.count(); ++i) {
    const Value one =
        Value::call("aten::unsqueeze", sums.gradient(grad, a[kTable], v.without(i).with(u)), 2);
    all = all.is_tensor() ? Value::call("aten::cat", Value::list(all, one), 2) : one;
  }
  of_a[kDirections] = all;
}

void backward_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Value* a = arguments + 1;
  const Value* tangents_of_a = tangents + 1;
  const Sums sums(a);
  if (!tangents[0].is_none())
    add(results[0], sums.gradient(tangents[0], a[kTable], a[kDirections]));
  add_along_tangents(
      a, tangents_of_a, [&](const Value& v) { return sums.gradient(arguments[0], a[kTable], v); },
      results[0]);
  if (!tangents_of_a[kTable].is_none())
    add(results[0], sums.gradient(arguments[0], tangents_of_a[kTable], a[kDirections]));
}

// The inner product of grad_C <grad, A(d, C; v)> with its upstream gradient u is the number
// <grad, A(d, u; v)>. It does not depend on C.
void table_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Value* a = arguments + 1;
  refuse_grid(a, gradients + 1);
  const Directions v(a[kDirections]);
  if (gradients[0].is_wanted()) gradients[0] = Sums(a).along(upstream[0], v.all());
  differentiate(a, arguments[0], upstream[0], v, gradients + 1);
}

void table_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Value* a = arguments + 1;
  const Sums sums(a);
  if (!tangents[0].is_none()) add(results[0], sums.table_gradient(tangents[0], a[kDirections]));
  add_along_tangents(
      a, tangents + 1, [&](const Value& v) { return sums.table_gradient(arguments[0], v); },
      results[0]);
}

const Derivative kDerivatives[] = {{"density", vjp, jvp},
                                   {"_density_along", along_vjp, along_jvp},
                                   {"_density_backward", backward_vjp, backward_jvp}};
const Derivative kTableDerivatives[] = {{"_density_table_backward", table_vjp, table_jvp}};

// ---- the contract -------------------------------------------------------------------------------

const Contract kContract(R"(
density(Tensor d, Tensor kind, Tensor table, Tensor grid, SymInt harmonics) -> Tensor
  Sums over neighbours of tabulated functions of the distance times spherical harmonics.

  These are the projections of the density of neighbours with which NEP, ACE and SNAP describe an
  atom:

    A[l^2 + l + m][i][f] = sum of g_f(|d|; kind) Y_lm(d / |d|) over the slots of atom i

  Each kind of pair has F functions g_f of the distance. They are quintic splines with B - 5 cells
  of equal width between the two distances in `grid`. table[kind][b][f] is the coefficient of the
  B-spline b. Below the grid the splines continue as straight lines, so a grid usually begins at 0.

  Y_lm are the real spherical harmonics, orthonormal on the unit sphere: Y_00 = (4 pi)^(-1/2), and
  Y_1-1, Y_10 and Y_11 are (3 / 4 pi)^(1/2) times y/r, z/r and x/r. m > 0 has cos(m phi), m < 0 has
  sin(|m| phi), without the sign (-1)^m.

  An empty slot and a pair at the end of its grid or beyond add exactly nothing, whatever values
  they have, and their gradients are exactly 0. Functions that do not vanish at the end of the grid
  jump to 0 there. Two atoms in one place make the sums of their atom NaN.

  Differentiable in `d` up to third order and in `table` to any order, in reverse and in forward
  mode; not in `grid`. Deterministic: computed in float64 and summed in the order of the slots; the
  gradient for `table` is summed in blocks of atoms that depend on the sizes alone.

  A kind that does not exist is an error on the CPU. On CUDA the sums of its atom become NaN. With
  CALCOPS_CHECK=1 in the environment it is an error on CUDA too, but each call then waits for the
  GPU.

_density_along(Tensor d, Tensor kind, Tensor table, Tensor grid, SymInt harmonics,
               Tensor? directions=None) -> Tensor
  The D-th derivative of the sums along D directions. Each slot has directions of its own.

_density_backward(Tensor grad_result, Tensor d, Tensor kind, Tensor table, Tensor grid,
                  SymInt harmonics, Tensor? directions=None) -> Tensor d
  Gradient for d, from that for the sums or for their derivative along `directions`. Without
  `directions`, it has the meaning of edge_gradient in edge_force.

d            [n, K, 3]; float32 or float64; n < 2^31 on CUDA; n*K < 2^32 on CUDA.
             Vectors from each atom to its neighbours, in any order.
kind         [n, K]; int32 or int64; entries -1 or 0 <= kind < kinds at atom, slot. The kind of
             each pair, such as the types of both atoms; -1: an empty slot, anywhere.
table        [kinds, B, F]; like d. Coefficients of the splines; B is at least 6.
grid         [kinds, 2]; float32 or float64 read as float64. First and last distance of the cells,
             0 <= first < last, for each kind. The last is the cutoff.
harmonics    1, 4, 9, 16 or 25. The number (l_max + 1)^2 of harmonics.
directions   [n, K, D, 3]; like d; D < 4. Directions of the derivative.
result       [harmonics, n, F]; like d.
vmap         joins n
)",
                         kDerivatives);

// A contract of its own: each item of a batch has a gradient of its own, so vmap cannot join them.
const Contract kTableContract(R"(
_density_table_backward(Tensor grad_result, Tensor d, Tensor kind, Tensor table, Tensor grid,
                        SymInt harmonics, Tensor? directions=None) -> Tensor table
  Gradient for the table, from that for the sums or for their derivative along `directions`.

d            [n, K, 3]; float32 or float64; n < 2^31 on CUDA; n*K < 2^32 on CUDA.
kind         [n, K]; int32 or int64; entries -1 or 0 <= kind < kinds at atom, slot.
table        [kinds, B, F]; like d.
grid         [kinds, 2]; float32 or float64 read as float64.
harmonics    1, 4, 9, 16 or 25.
directions   [n, K, D, 3]; like d; D < 4.
result       [harmonics, n, F]; like d.
)",
                              kTableDerivatives);

// ---- from views to the structs of density.h -----------------------------------------------------

template <class Number, int rank>
using In = View<const Number, rank>;

template <class Real, class Index>
DensityInputs<Real, Index> inputs(In<Real, 3> d, In<Index, 2> kind, In<Real, 3> table,
                                  In<double, 2> grid, int64_t harmonics,
                                  In<Real, 4> directions = {}) {
  int64_t l = 0;
  while ((l + 1) * (l + 1) < harmonics) ++l;
  if ((l + 1) * (l + 1) != harmonics)
    throw std::invalid_argument("calcops::density: expected `harmonics` 1, 4, 9, 16 or 25, got " +
                                std::to_string(harmonics));
  if (table.shape[1] < 6)
    throw std::invalid_argument(
        "calcops::density: expected `table` of shape [kinds, B, F] with B >= 6, got B = " +
        std::to_string(table.shape[1]));
  return {d.shape[0],
          d.shape[1],
          table.shape[0],
          table.shape[1],
          table.shape[2],
          harmonics,
          directions ? directions.shape[2] : 0,
          d.data,
          kind.data,
          directions.data,
          table.data,
          grid.data};
}

template <class Real, class Index>
int64_t cpu(In<Real, 3> d, In<Index, 2> kind, In<Real, 3> table, In<double, 2> grid,
            int64_t harmonics, View<Real, 3> A) {
  return density_cpu(inputs(d, kind, table, grid, harmonics), A.data);
}

template <class Real, class Index>
int64_t along_cpu(In<Real, 3> d, In<Index, 2> kind, In<Real, 3> table, In<double, 2> grid,
                  int64_t harmonics, In<Real, 4> directions, View<Real, 3> A) {
  return density_cpu(inputs(d, kind, table, grid, harmonics, directions), A.data);
}

template <class Real, class Index>
int64_t backward_cpu(In<Real, 3> grad, In<Real, 3> d, In<Index, 2> kind, In<Real, 3> table,
                     In<double, 2> grid, int64_t harmonics, In<Real, 4> directions,
                     View<Real, 3> grad_d) {
  if (directions && directions.shape[2] == kMostDirections) refuse_order();
  return density_backward_cpu(inputs(d, kind, table, grid, harmonics, directions), grad.data,
                              grad_d.data);
}

template <class Real, class Index>
int64_t table_cpu(In<Real, 3> grad, In<Real, 3> d, In<Index, 2> kind, In<Real, 3> table,
                  In<double, 2> grid, int64_t harmonics, In<Real, 4> directions,
                  View<Real, 3> grad_table) {
  return density_table_backward_cpu(inputs(d, kind, table, grid, harmonics, directions), grad.data,
                                    grad_table.data);
}

const Kernel kCpu("density", cpu<float, int32_t>, cpu<float, int64_t>, cpu<double, int32_t>,
                  cpu<double, int64_t>);
const Kernel kAlongCpu("_density_along", along_cpu<float, int32_t>, along_cpu<float, int64_t>,
                       along_cpu<double, int32_t>, along_cpu<double, int64_t>);
const Kernel kBackwardCpu("_density_backward", backward_cpu<float, int32_t>,
                          backward_cpu<float, int64_t>, backward_cpu<double, int32_t>,
                          backward_cpu<double, int64_t>);
const Kernel kTableCpu("_density_table_backward", table_cpu<float, int32_t>,
                       table_cpu<float, int64_t>, table_cpu<double, int32_t>,
                       table_cpu<double, int64_t>);

#ifndef CALCOPS_NO_CUDA
template <class Real, class Index>
cudaError_t cuda(In<Real, 3> d, In<Index, 2> kind, In<Real, 3> table, In<double, 2> grid,
                 int64_t harmonics, View<Real, 3> A, cudaStream_t stream) {
  return density_cuda(inputs(d, kind, table, grid, harmonics), A.data, stream);
}

template <class Real, class Index>
cudaError_t along_cuda(In<Real, 3> d, In<Index, 2> kind, In<Real, 3> table, In<double, 2> grid,
                       int64_t harmonics, In<Real, 4> directions, View<Real, 3> A,
                       cudaStream_t stream) {
  return density_cuda(inputs(d, kind, table, grid, harmonics, directions), A.data, stream);
}

template <class Real, class Index>
cudaError_t backward_cuda(In<Real, 3> grad, In<Real, 3> d, In<Index, 2> kind, In<Real, 3> table,
                          In<double, 2> grid, int64_t harmonics, In<Real, 4> directions,
                          View<Real, 3> grad_d, cudaStream_t stream) {
  if (directions && directions.shape[2] == kMostDirections) refuse_order();
  return density_backward_cuda(inputs(d, kind, table, grid, harmonics, directions), grad.data,
                               grad_d.data, stream);
}

template <class Real, class Index>
cudaError_t table_cuda(In<Real, 3> grad, In<Real, 3> d, In<Index, 2> kind, In<Real, 3> table,
                       In<double, 2> grid, int64_t harmonics, In<Real, 4> directions,
                       View<Real, 3> grad_table, Workspace& workspace, cudaStream_t stream) {
  return density_table_backward_cuda(inputs(d, kind, table, grid, harmonics, directions), grad.data,
                                     grad_table.data, workspace.data, &workspace.bytes, stream);
}

const Kernel kCuda("density", cuda<float, int32_t>, cuda<float, int64_t>, cuda<double, int32_t>,
                   cuda<double, int64_t>);
const Kernel kAlongCuda("_density_along", along_cuda<float, int32_t>, along_cuda<float, int64_t>,
                        along_cuda<double, int32_t>, along_cuda<double, int64_t>);
const Kernel kBackwardCuda("_density_backward", backward_cuda<float, int32_t>,
                           backward_cuda<float, int64_t>, backward_cuda<double, int32_t>,
                           backward_cuda<double, int64_t>);
const Kernel kTableCuda("_density_table_backward", table_cuda<float, int32_t>,
                        table_cuda<float, int64_t>, table_cuda<double, int32_t>,
                        table_cuda<double, int64_t>);
#endif

}  // namespace
}  // namespace calcops::ops::density
