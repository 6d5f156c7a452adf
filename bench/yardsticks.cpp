// Operators with which bench_force.py compares the force operators. read_write only reads and
// writes the same bytes. empty_force_virial only allocates the outputs. private_buffers computes
// the same results without a fixed order of additions.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "force/force_math.h"

namespace {

using at::Tensor;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Three empty_force_virial(const Tensor& list_neigh, const Tensor& dE, const Tensor&, const Tensor&,
                         c10::SymInt nghost, const std::optional<Tensor>&) {
  const int64_t B = list_neigh.size(0), rows = list_neigh.size(1) + nghost.expect_int();
  return {at::empty({B, rows, 3}, dE.options()), at::empty({B, 3, 3}, dE.options()),
          at::empty({B, rows, 3, 3}, dE.options())};
}

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

// force_virial with as few instructions as possible: each thread adds to a buffer of its own. So
// the order of the additions depends on the number of threads. It supports one frame, int32, no
// ghosts and valid entries.
template <class Real>
Three private_buffers_of(const Tensor& list, const Tensor& dE, const Tensor& Ri_d,
                         const Tensor& Rij) {
  using calcops::Row;
  const int64_t natoms = list.size(1), neighbors = list.size(2);
  const int threads = at::get_num_threads();
  const Tensor buffers = at::empty({threads, natoms, 3, 4}, dE.options().dtype(at::kDouble));
  Row* const all = reinterpret_cast<Row*>(buffers.mutable_data_ptr<double>());
  auto out = empty_force_virial(list, dE, Ri_d, Rij, 0, {});
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    const int32_t* names = list.const_data_ptr<int32_t>();
    const Real *e = dE.const_data_ptr<Real>(), *d = Ri_d.const_data_ptr<Real>(),
               *r = Rij.const_data_ptr<Real>();
    for (int64_t t = first; t < last; ++t) {
      Row* const sums = all + t * natoms * 3;
      std::fill_n(sums, natoms * 3, Row{});
      for (int64_t i = natoms * t / threads; i < natoms * (t + 1) / threads; ++i) {
        calcops::ops::force::Triple center{};
        for (int64_t s = i * neighbors; s < (i + 1) * neighbors; ++s) {
          const int64_t j = names[s];
          if (j < 0) continue;
          const auto g = calcops::ops::force::row_times_matrix<4>(e + 4 * s, d + 12 * s);
          const Row r4{double(r[3 * s]), double(r[3 * s + 1]), double(r[3 * s + 2]), 1.0};
          center += g;
          calcops::ops::force::add_pair(g, r4, sums + 3 * j);
        }
        for (int a = 0; a < 3; ++a) sums[3 * i + a][3] -= center[a];
      }
    }
  });
  std::vector<Row> virials(3 * threads);
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      for (int64_t j = natoms * t / threads; j < natoms * (t + 1) / threads; ++j)
        for (int a = 0; a < 3; ++a) {
          Row total{};
          for (int64_t k = 0; k < threads; ++k) total += all[(k * natoms + j) * 3 + a];
          virials[3 * t + a] += total;
          std::get<0>(out).template mutable_data_ptr<Real>()[3 * j + a] = Real(total[3]);
          for (int b = 0; b < 3; ++b)
            std::get<2>(out).template mutable_data_ptr<Real>()[9 * j + 3 * a + b] = Real(total[b]);
        }
  });
  for (int k = 0; k < 9; ++k) {
    double total = 0;
    for (int t = 0; t < threads; ++t) total += virials[3 * t + k / 3][k % 3];
    std::get<1>(out).template mutable_data_ptr<Real>()[k] = Real(total);
  }
  return out;
}

Three private_buffers(const Tensor& list, const Tensor& dE, const Tensor& Ri_d, const Tensor& Rij) {
  return dE.scalar_type() == at::kFloat ? private_buffers_of<float>(list, dE, Ri_d, Rij)
                                        : private_buffers_of<double>(list, dE, Ri_d, Rij);
}

TORCH_LIBRARY_FRAGMENT(yardsticks, m) {
  m.def(
      "empty_force_virial(Tensor list_neigh, Tensor dE, Tensor Ri_d, Tensor Rij, SymInt nghost=0, "
      "*, Tensor? neighbor_index=None) -> (Tensor force, Tensor virial, Tensor atom_virial)");
  m.def("read_write(Tensor[] input, Tensor[] out_like) -> Tensor[]");
  m.def(
      "private_buffers(Tensor list, Tensor dE, Tensor Ri_d, Tensor Rij) -> "
      "(Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(yardsticks, CPU, m) {
  m.impl("empty_force_virial", TORCH_FN(empty_force_virial));
  m.impl("read_write", TORCH_FN(read_write));
  m.impl("private_buffers", TORCH_FN(private_buffers));
}

}  // namespace
