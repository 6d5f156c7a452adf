// The operator with which bench_force.py compares the force operators. It only reads and writes the
// same bytes.
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <vector>

namespace {

using at::Tensor;

// Return the sum of x. With 64 independent sums, memory bandwidth alone limits the speed.
template <class Number>
Number sum(const Number* x, int64_t count) {
  Number sums[64] = {};
  int64_t k = 0;
  for (; k + 64 <= count; k += 64)
    for (int lane = 0; lane < 64; ++lane) sums[lane] += x[k + lane];
  for (; k < count; ++k) sums[0] += x[k];
  return std::accumulate(sums, sums + 64, Number(0));
}

template <class Number>
void read(const Tensor& x) {
  const auto* numbers = static_cast<const Number*>(x.const_data_ptr());
  at::parallel_for(0, x.numel(), 1 << 12, [&](int64_t begin, int64_t end) {
    const Number total = sum(numbers + begin, end - begin);
    if (total == Number(0.123)) std::abort();  // so that the compiler keeps the sum
  });
}

template <class Number>
void write(const Tensor& x) {
  Number* numbers = x.mutable_data_ptr<Number>();
  at::parallel_for(0, x.numel(), 1 << 12, [&](int64_t begin, int64_t end) {
    std::fill(numbers + begin, numbers + end, Number(1));
  });
}

// Read the tensors `in`, and return written tensors of the shapes and dtypes of `out_like`.
std::vector<Tensor> read_write(at::TensorList in, at::TensorList out_like) {
  for (const Tensor& x : in) {
    TORCH_CHECK(x.is_contiguous());
    x.scalar_type() == at::kDouble ? read<double>(x) : read<float>(x);  // int32 is as wide as float
  }
  std::vector<Tensor> out;
  for (const Tensor& like : out_like) {
    out.push_back(at::empty_like(like));
    like.scalar_type() == at::kDouble ? write<double>(out.back()) : write<float>(out.back());
  }
  return out;
}

TORCH_LIBRARY_FRAGMENT(yardsticks, m) {
  m.def("read_write(Tensor[] input, Tensor[] out_like) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(yardsticks, CPU, m) { m.impl("read_write", TORCH_FN(read_write)); }

}  // namespace
