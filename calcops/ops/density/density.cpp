// density: its contract, its derivatives, and the conversion of a call's views to the kernels'
// structs.
#include "density/density.h"

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

const Check kChecks[] = {{"density", check_harmonics<0>},
                         {"_density_along", check_harmonics<0>},
                         {"_density_backward", check_harmonics<1>}};
const Check kTableChecks[] = {{"_density_table_backward", check_harmonics<1>}};

// ---- the contract -------------------------------------------------------------------------------

const Contract kContract(R"(
density(Tensor d, Tensor kind, Tensor table, Tensor grid, SymInt harmonics) -> Tensor result
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
               Tensor? directions=None) -> Tensor result
  The D-th derivative of the sums along D directions. Each slot has directions of its own.

_density_backward(Tensor grad_result, Tensor d, Tensor kind, Tensor table, Tensor grid,
                  SymInt harmonics, Tensor? directions=None) -> Tensor d
  Gradient for d, from that for the sums or for their derivative along `directions`. Without
  `directions`, it has the meaning of edge_gradient in edge_force.

d            [n, K, 3]; float32 or float64; n < 2^31 on CUDA; n*K < 2^32 on CUDA.
             Vectors from each atom to its neighbours, in any order.
kind         [n, K]; int32 or int64; entries -1 or 0 <= kind < kinds at atom, slot. The kind of
             each pair, such as the types of both atoms; -1: an empty slot, anywhere.
table        [kinds, B, F]; like d; B >= 6. Coefficients of the splines.
grid         [kinds, 2]; float32 or float64 read as float64; constant. First and last distance of
             the cells for each kind, from 0 in rising order. The last is the cutoff.
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

// ---- from views to the structs of density.h -----------------------------------------------------

template <class Number, int rank>
using In = View<const Number, rank>;

template <class Real, class Index>
DensityInputs<Real, Index> inputs(In<Real, 3> d, In<Index, 2> kind, In<Real, 3> table,
                                  In<double, 2> grid, int64_t harmonics,
                                  In<Real, 4> directions = {}) {
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
int64_t along_cpu(In<Real, 3> d, In<Index, 2> kind, In<Real, 3> table, In<double, 2> grid,
                  int64_t harmonics, In<Real, 4> directions, View<Real, 3> A) {
  return density_cpu(inputs(d, kind, table, grid, harmonics, directions), A.data);
}

template <class Real, class Index>
int64_t backward_cpu(In<Real, 3> grad, In<Real, 3> d, In<Index, 2> kind, In<Real, 3> table,
                     In<double, 2> grid, int64_t harmonics, In<Real, 4> directions,
                     View<Real, 3> grad_d) {
  if (directions) expect_order(kName, directions.shape[2], kMostDirections - 1);
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
cudaError_t along_cuda(In<Real, 3> d, In<Index, 2> kind, In<Real, 3> table, In<double, 2> grid,
                       int64_t harmonics, In<Real, 4> directions, View<Real, 3> A,
                       cudaStream_t stream) {
  return density_cuda(inputs(d, kind, table, grid, harmonics, directions), A.data, stream);
}

template <class Real, class Index>
cudaError_t backward_cuda(In<Real, 3> grad, In<Real, 3> d, In<Index, 2> kind, In<Real, 3> table,
                          In<double, 2> grid, int64_t harmonics, In<Real, 4> directions,
                          View<Real, 3> grad_d, cudaStream_t stream) {
  if (directions) expect_order(kName, directions.shape[2], kMostDirections - 1);
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
