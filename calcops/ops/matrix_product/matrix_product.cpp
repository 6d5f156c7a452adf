// matrix_product: its contract and its derivatives.
#include <calcops/no_loops.h>
#include <calcops/operator.h>

namespace calcops::ops::matrix_product {
namespace {

// The gradient for the weights is a small matrix, and its elements are sums over all rows. torch.mm
// is fast at that. The kernels here are for results of many rows.
void vjp(const Value* arguments, const Value* upstream, Value* gradients) {
  const Value transposed = Value::call("aten::t", arguments[1]);
  if (gradients[0].is_wanted())
    gradients[0] = Value::call("matrix_product", upstream[0], transposed);
  if (gradients[1].is_wanted())
    gradients[1] = Value::call("aten::mm", Value::call("aten::t", arguments[0]), upstream[0]);
}

void jvp(const Value* arguments, const Value* tangents, Value* results) {
  if (!tangents[0].is_none()) results[0] = Value::call("matrix_product", tangents[0], arguments[1]);
  if (tangents[1].is_none()) return;
  const Value term = Value::call("matrix_product", arguments[0], tangents[1]);
  results[0] = results[0] + term;
}

const Derivative kDerivatives[] = {{"matrix_product", vjp, jvp}};

const Contract kContract(R"(
matrix_product(Tensor x, Tensor weights) -> Tensor result
  Product of a matrix of many rows by a small one, x @ weights, as in layers of neural nets.

  Made for CPUs: the CUDA kernel is a plain tiled one.

  Differentiable to any order in both, in reverse and forward mode. Each result is summed in the
  dtype of x and in the order of K, so its bits depend neither on other rows nor on the number of
  threads. The gradient for the weights, a sum over all rows, comes from torch.mm.

x        [N, K]; float32 or float64; N*M < 2^40 on CUDA. The matrix of many rows.
weights  [K, M]; like x. The small matrix. It should fit into the processor's cache.
result   [N, M]; like x.
vmap     joins N
)",
                         kDerivatives);

}  // namespace
}  // namespace calcops::ops::matrix_product
