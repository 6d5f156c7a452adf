// tabulated_sum: its contract, its derivatives, and the conversion of a call's views to the
// kernels' structs.
#include "tabulated_sum/tabulated_sum.h"

#include <calcops/no_loops.h>
#include <calcops/operator.h>

namespace calcops::ops::tabulated_sum {
namespace {

// ---- derivatives --------------------------------------------------------------------------------
//
// T(order; x, R) is the operator's result. It is linear in R, and its derivative along dx is
// T(order + 1; x, R dx). So the derivatives of the operator and of its gradient operator are calls
// of these two, with `order` or `order + 1`.

// The arguments of the operator. Those of its gradient operator are the upstream gradient, then
// these, then the output mask.
enum Argument { kX, kR, kKind, kTable, kGrid, kOrder, kArguments };

// Calls the operator and its gradient with the arguments of a call, but with another R or order.
class Sum {
 public:
  explicit Sum(const Value* arguments) : arguments_(arguments), order_(arguments[kOrder]) {}

  Sum of_next_order() const {
    Sum sum(*this);
    sum.order_ = order_ + 1;
    return sum;
  }

  Value of(const Value& R) const {
    return Value::call("tabulated_sum", arguments_[kX], R, arguments_[kKind], arguments_[kTable],
                       arguments_[kGrid], order_);
  }

  // Return the gradients for x and R, or only for one of them.
  Value gradients(const Value& grad, const Value& R, bool of_x = true, bool of_R = true) const {
    return Value::call("_tabulated_sum_backward", grad, arguments_[kX], R, arguments_[kKind],
                       arguments_[kTable], arguments_[kGrid], order_, Value::list(of_x, of_R));
  }

  // Return each row times the number of its slot. Empty slots give 0, even if their values are NaN.
  Value scaled(const Value& rows, const Value& numbers) const {
    const Value is_empty = Value::call("aten::lt.Scalar", arguments_[kKind], 0);
    const Value product = rows * Value::call("aten::unsqueeze", numbers, -1);
    return Value::call("aten::masked_fill.Scalar", product,
                       Value::call("aten::unsqueeze", is_empty, -1), 0);
  }

  // Return a * b of each slot, and 0 for empty slots.
  Value product(const Value& a, const Value& b) const {
    const Value is_empty = Value::call("aten::lt.Scalar", arguments_[kKind], 0);
    return Value::call("aten::masked_fill.Scalar", a * b, is_empty, 0);
  }

 private:
  const Value* arguments_;
  Value order_;
};

void vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const bool of_x = gradients[kX].is_wanted(), of_R = gradients[kR].is_wanted();
  if (!of_x && !of_R) return;
  const Value of_both = Sum(arguments).gradients(upstream[0], arguments[kR], of_x, of_R);
  if (of_x) gradients[kX] = of_both[0];
  if (of_R) gradients[kR] = of_both[1];
}

void jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Sum sum(arguments);
  if (!tangents[kR].is_none()) results[0] = sum.of(tangents[kR]);
  if (!tangents[kX].is_none())
    results[0] = results[0] + sum.of_next_order().of(sum.scaled(arguments[kR], tangents[kX]));
}

// The operator _tabulated_sum_backward(grad, x, R, ...) returns the gradients of
// <grad, T(order; x, R)> for x and R. Their inner product with the upstream gradients u_x and u_R
// is the number <grad, T(order; x, u_R) + T(order + 1; x, R u_x)>. This function differentiates it.
void backward_vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Value& grad = arguments[0];
  const Value* sum_arguments = arguments + 1;
  Value* sum_gradients = gradients + 1;
  const bool of_grad = gradients[0].is_wanted();
  const bool of_x = sum_gradients[kX].is_wanted();
  const bool of_R = sum_gradients[kR].is_wanted();
  const Sum sum(sum_arguments);
  const Value &mask = arguments[1 + kArguments], &u_x = upstream[0], &u_R = upstream[1];
  if (mask[1].item() && !u_R.is_none()) {
    if (of_grad) gradients[0] = gradients[0] + sum.of(u_R);
    if (of_x) sum_gradients[kX] = sum_gradients[kX] + sum.gradients(grad, u_R, true, false)[0];
  }
  if (!mask[0].item() || u_x.is_none()) return;
  const Value R = sum.scaled(sum_arguments[kR], u_x);
  if (of_grad) gradients[0] = gradients[0] + sum.of_next_order().of(R);
  if (!of_x && !of_R) return;
  const Value of_both = sum.of_next_order().gradients(grad, R, of_x, of_R);
  if (of_x) sum_gradients[kX] = sum_gradients[kX] + of_both[0];
  if (of_R) sum_gradients[kR] = sum_gradients[kR] + sum.scaled(of_both[1], u_x);
}

void backward_jvp(const Value* arguments, const Value* tangents, Value* results) {
  const Value& grad = arguments[0];
  const Value& mask = arguments[1 + kArguments];
  const Value* sum_arguments = arguments + 1;
  const Value* sum_tangents = tangents + 1;
  const bool of_x = mask[0].item(), of_R = mask[1].item();
  const Sum sum(sum_arguments);
  if (!tangents[0].is_none()) {
    const Value of_both = sum.gradients(tangents[0], sum_arguments[kR], of_x, of_R);
    if (of_x) results[0] = results[0] + of_both[0];
    if (of_R) results[1] = results[1] + of_both[1];
  }
  if (!sum_tangents[kR].is_none() && of_x)
    results[0] = results[0] + sum.gradients(grad, sum_tangents[kR], true, false)[0];
  if (!sum_tangents[kX].is_none()) {
    const Value of_both = sum.of_next_order().gradients(grad, sum_arguments[kR], of_x, of_R);
    if (of_x) results[0] = results[0] + sum.product(of_both[0], sum_tangents[kX]);
    if (of_R) results[1] = results[1] + sum.scaled(of_both[1], sum_tangents[kX]);
  }
}

const Derivative kDerivatives[] = {{"tabulated_sum", vjp, jvp},
                                   {"_tabulated_sum_backward", backward_vjp, backward_jvp}};

// ---- the contract -------------------------------------------------------------------------------

const Contract kContract(R"(
tabulated_sum(Tensor x, Tensor R, Tensor kind, Tensor table, Tensor grid,
              SymInt order=0) -> Tensor result
  Sums over neighbours of tabulated functions, such as compressed embedding nets.

  Each kind of pair has M functions g_m, piecewise polynomials of degree 5. Outside the grid they
  continue as straight lines, on which an infinite x counts as 1e30. The result is
  T[i][a][m] = sum_s R[i][s][a] g_m(x[i][s]). Nothing of the size n*K*M is stored.

  Differentiable to any order in x and R, in reverse and forward mode; not in table and grid. An
  empty slot adds exactly nothing, whatever its values, and its gradients are exactly 0.
  Deterministic: blocks of slots are summed in the order of the slots, and the blocks' sums are
  added in float64.

  A kind that doesn't exist is an error on the CPU. On CUDA the sums of its atom become NaN; with
  CALCOPS_CHECK=1, which makes each call wait for the GPU, it's an error there too.

_tabulated_sum_backward(Tensor grad_result, Tensor x, Tensor R, Tensor kind, Tensor table,
                        Tensor grid, SymInt order, bool[2] output_mask) -> (Tensor x, Tensor R)
  Gradients for x and R, from that for the result. A gradient that is not wanted has no elements.

x       [n, K]; float32 or float64; n < 2^31 on CUDA; n*K < 2^32 on CUDA. Argument of
        the functions, such as the smoothed inverse distance of each neighbour.
R       [n, K, 4]; like x. The rows that are summed, such as those of the environment matrix.
kind    [n, K]; int32 or int64; entries -1 or 0 <= kind < kinds at atom, slot. The kind of each
        pair, such as the neighbour's type or both types; -1: an empty slot, anywhere.
table   [kinds, cells, 6, M]; like x; constant; cells >= 1. In a cell
        g_m(x) = sum_k table[kind][cell][k][m] t^k, where t is the distance of x from the cell's
        beginning.
grid    [kinds, 5]; float64; constant. Each kind's cells are in two parts, each with cells of equal
        width: where the first part begins, its cell width and end, and the second part's cell
        width and end. Each part has a whole number of cells. If both ends are equal, there is no
        second part.
order   0 to 2^40. The sums are over the derivative of g_m of this order.
result  [n, 4, M]; like x.
grad_result  [n, 4, M]; like x.
vmap    joins n
)",
                         kDerivatives);

}  // namespace
}  // namespace calcops::ops::tabulated_sum
