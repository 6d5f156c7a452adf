// CPU kernels of the edge force operators.
#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "edge_force/edge_force.h"
#include "edge_force/edge_force_math.h"

namespace calcops {
namespace {

constexpr int64_t kNone = -1;

int64_t first_of(int64_t a, int64_t b) {
  if (a == kNone || b == kNone) return std::max(a, b);
  return std::min(a, b);
}

// Whether an atom's index is neither -1 nor that of an atom.
bool is_wrong(int64_t atom, int64_t atoms) { return atom < -1 || atom >= atoms; }

// One task's share of the edges, summed into rows of the task's own. They are added in the order of
// the tasks, so the bits do not depend on the threads.
struct Part {
  std::unique_ptr<double[]> sums;  // [last - first][3][columns]
  int64_t first = 0, last = 0;     // the atoms that the task's edges name
  int64_t bad = kNone;
};

// More tasks share the work better and cost more memory and additions. The number may depend on the
// sizes alone; together they take an eighth of the inputs at most.
template <class Real, class Index>
int64_t count_tasks(const EdgeInputs<Real, Index>& in, int64_t row_bytes) {
  constexpr int64_t kEdgesPerTask = 1 << 12, kMaxTasks = 8;
  const int64_t edge_bytes = 6 * sizeof(Real) + 2 * sizeof(Index);
  const int64_t fit = in.edges * edge_bytes / 8 / (std::max<int64_t>(in.atoms, 1) * row_bytes);
  return std::clamp<int64_t>(std::min(in.edges / kEdgesPerTask, fit), 1, kMaxTasks);
}

// The least range of atoms that has all those of the edges [begin, end).
template <class Real, class Index>
void find_range(const EdgeInputs<Real, Index>& in, int64_t begin, int64_t end, Part& part) {
  using Unsigned = std::make_unsigned_t<Index>;  // -1 is the largest
  Unsigned first = Unsigned(std::min<uint64_t>(in.atoms, Unsigned(-1)));
  Index last = -1;
  for (int row = 0; row < 2; ++row) {
    const Index* names = in.edge_index + row * in.edges;
    for (int64_t e = begin; e < end; ++e) {
      first = std::min(first, Unsigned(names[e]));
      last = std::max(last, names[e]);
    }
  }
  part.first = int64_t(first);
  part.last = last < in.atoms ? int64_t(last) + 1 : in.atoms;
}

template <bool kVirial, class Real, class Index>
void sum_edges(const EdgeInputs<Real, Index>& in, int64_t begin, int64_t end, Part& part) {
  constexpr int64_t kRow = 3 * kColumns<kVirial>;
  find_range(in, begin, end, part);
  const int64_t rows = std::max<int64_t>(part.last - part.first, 0);
  part.sums.reset(new double[rows * kRow]());
  double* const sums = part.sums.get() - part.first * kRow;
  const Index *centers = in.edge_index, *neighbors = in.edge_index + in.edges;
  // Edges often come by their centre: its sum is kept until another one comes.
  int64_t current = kNone;
  double center[3] = {};
  const auto flush = [&] {
    if (current == kNone) return;
    double* sum = sums + current * kRow;
    for (int a = 0; a < 3; ++a) {
      sum[(a + 1) * kColumns<kVirial> - 1] += center[a];
      center[a] = 0;
    }
  };
  for (int64_t e = begin; e < end; ++e) {
    const int64_t i = centers[e], j = neighbors[e];
    if (uint64_t(i) >= uint64_t(in.atoms) || uint64_t(j) >= uint64_t(in.atoms)) {
      if (part.bad == kNone && (is_wrong(i, in.atoms) || is_wrong(j, in.atoms))) part.bad = e;
      continue;
    }
    if (i != current) {
      flush();
      current = i;
    }
    const Real* g = in.edge_gradient + 3 * e;
    add_to_center<false>(g, center);
    add_to_neighbor<kVirial>(g, kVirial ? in.edge_vec + 3 * e : nullptr, sums + j * kRow);
  }
  flush();
}

template <bool kVirial, class Real, class Index>
int64_t force_of(const EdgeInputs<Real, Index>& in, const EdgeOutputs<Real>& out) {
  constexpr int n = kColumns<kVirial>, kRow = 3 * n;
  const int64_t tasks = count_tasks(in, kRow * sizeof(double));
  std::vector<Part> parts(tasks);
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      sum_edges<kVirial>(in, in.edges * t / tasks, in.edges * (t + 1) / tasks, parts[t]);
  });

  at::parallel_for(0, in.atoms, 2048, [&](int64_t begin, int64_t end) {
    for (int64_t atom = begin; atom < end; ++atom) {
      double sum[kRow] = {};
      for (const Part& part : parts) {
        if (atom < part.first || atom >= part.last) continue;
        const double* share = part.sums.get() + (atom - part.first) * kRow;
        for (int k = 0; k < kRow; ++k) sum[k] += share[k];
      }
      for (int a = 0; a < 3; ++a) {
        out.force[3 * atom + a] = Real(sum[n * a + n - 1]);
        for (int b = 0; b < n - 1; ++b)
          out.atom_virial[9 * atom + 3 * a + b] = Real(sum[n * a + b]);
      }
    }
  });

  int64_t bad = kNone;
  for (const Part& part : parts) bad = first_of(bad, part.bad);
  if (!kVirial) return bad;
  // A frame's virial is the sum over its atoms, part by part.
  std::vector<double> virial(9 * in.frames);
  for (const Part& part : parts)
    for (int64_t atom = part.first; atom < part.last; ++atom) {
      const int64_t frame = in.batch ? in.batch[atom] : 0;
      if (frame < 0 || frame >= in.frames) continue;
      const double* share = part.sums.get() + (atom - part.first) * kRow;
      for (int a = 0; a < 3; ++a)
        for (int b = 0; b < n - 1; ++b) virial[9 * frame + 3 * a + b] += share[n * a + b];
    }
  for (size_t k = 0; k < virial.size(); ++k) out.virial[k] = Real(virial[k]);
  return bad;
}

// The first atom whose frame does not exist, counted from E.
template <class Real, class Index>
int64_t find_lost_atom(const EdgeInputs<Real, Index>& in) {
  if (!in.batch) return in.atoms > 0 && in.frames < 1 ? in.edges : kNone;
  for (int64_t atom = 0; atom < in.atoms; ++atom)
    if (in.batch[atom] < 0 || in.batch[atom] >= in.frames) return in.edges + atom;
  return kNone;
}

}  // namespace

template <class Real, class Index>
int64_t edge_force_cpu(const EdgeInputs<Real, Index>& in, const EdgeOutputs<Real>& out) {
  if (!in.virial) return force_of<false>(in, out);
  if (const int64_t lost = find_lost_atom(in); lost != kNone) return lost;
  return force_of<true>(in, out);
}

template <class Real, class Index>
int64_t edge_force_backward_cpu(const EdgeInputs<Real, Index>& in,
                                const EdgeUpstream<Real>& upstream,
                                const EdgeGradients<Real>& out) {
  if (upstream.virial)
    if (const int64_t lost = find_lost_atom(in); lost != kNone) return lost;
  const Index *centers = in.edge_index, *neighbors = in.edge_index + in.edges;
  return at::parallel_reduce(
      0, in.edges, 1 << 12, kNone,
      [&](int64_t begin, int64_t end, int64_t bad) {
        for (int64_t e = begin; e < end; ++e) {
          const int64_t i = centers[e], j = neighbors[e];
          if (uint64_t(i) >= uint64_t(in.atoms) || uint64_t(j) >= uint64_t(in.atoms)) {
            if (is_wrong(i, in.atoms) || is_wrong(j, in.atoms)) bad = first_of(bad, e);
            if (out.edge_gradient) std::fill_n(out.edge_gradient + 3 * e, 3, Real(0));
            if (out.edge_vec) std::fill_n(out.edge_vec + 3 * e, 3, Real(0));
            continue;
          }
          const Real* gF = upstream.force;
          const Real* gV =
              upstream.virial ? upstream.virial + 9 * (in.batch ? in.batch[j] : 0) : nullptr;
          const Real* gAV = upstream.atom_virial ? upstream.atom_virial + 9 * j : nullptr;
          if (out.edge_gradient)
            edge_gradient_backward(gF ? gF + 3 * i : nullptr, gF ? gF + 3 * j : nullptr, gV, gAV,
                                   in.edge_vec ? in.edge_vec + 3 * e : nullptr,
                                   out.edge_gradient + 3 * e);
          if (out.edge_vec)
            edge_vec_backward(gV, gAV, in.edge_gradient + 3 * e, out.edge_vec + 3 * e);
        }
        return bad;
      },
      first_of);
}

#define INSTANTIATE(Real, Index)                                                             \
  template int64_t edge_force_cpu(const EdgeInputs<Real, Index>&, const EdgeOutputs<Real>&); \
  template int64_t edge_force_backward_cpu(const EdgeInputs<Real, Index>&,                   \
                                           const EdgeUpstream<Real>&, const EdgeGradients<Real>&);
INSTANTIATE(float, int32_t)
INSTANTIATE(float, int64_t)
INSTANTIATE(double, int32_t)
INSTANTIATE(double, int64_t)
#undef INSTANTIATE

}  // namespace calcops
