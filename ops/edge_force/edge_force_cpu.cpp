// CPU kernels of the edge force operators.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "edge_force/edge_force.h"
#include "edge_force/edge_force_math.h"
#include "memory.h"
#include "parallel.h"

namespace calcops {
namespace {

// Whether an atom's index is neither -1 nor that of an atom.
bool is_wrong(int64_t atom, int64_t atoms) { return atom < -1 || atom >= atoms; }

// Prefetches the cache lines of row `row`, which need not exist.
template <class Item>
CALCOPS_HD inline void prefetch(const Item* rows, int64_t row) {
  const uintptr_t first = uintptr_t(rows) + uint64_t(row) * sizeof(Item);
  for (size_t byte = 0; byte < sizeof(Item); byte += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(first + byte), /*write=*/1);
}

// An atom's force as a centre and what it has as a neighbour, summed apart, in whole cache lines.
template <class R>
struct alignas(64) AtomSums {
  Row center;
  R neighbor[3];
};

// One task's share of the edges, summed into rows of the task's own. They are added in the order of
// the tasks, so the bits do not depend on the threads.
template <class R>
struct Part {
  AtomSums<R>* sums;  // [N], set in the blocks of atoms that the task's edges name
  bool* is_set;       // [blocks]
  int64_t bad = kNone;
};
constexpr int64_t kBlock = 64;

// More tasks share the work better and cost more memory and additions. The number may depend on the
// sizes alone; together they take a quarter of the inputs at most.
template <class R, class Real, class Index>
int64_t count_tasks(const EdgeInputs<Real, Index>& in) {
  constexpr int64_t kEdgesPerTask = 1 << 12, kEdgeBytes = 6 * sizeof(Real) + 2 * sizeof(Index);
  const int64_t sums_bytes = std::max<int64_t>(in.atoms, 1) * sizeof(AtomSums<R>);
  const int64_t most = std::min(in.edges / kEdgesPerTask, in.edges * kEdgeBytes / 4 / sums_bytes);
  return most >= 8 ? 8 : most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// Not inlined: it is rare, and the loop over edges has better use for its registers.
template <class R>
__attribute__((noinline)) void set_block(Part<R>& part, int64_t block, int64_t atoms) {
  const int64_t begin = block * kBlock, end = std::min(begin + kBlock, atoms);
  std::fill(part.sums + begin, part.sums + end, AtomSums<R>{});
  part.is_set[block] = true;
}

// The rows [begin, end) of x [E, 3], in `buffer` where x is transposed.
template <class Real>
const Real* rows_of(const Real* x, bool is_transposed, int64_t edges, int64_t begin, int64_t end,
                    Real* buffer) {
  if (!is_transposed) return x + 3 * begin;
  for (int64_t e = begin; e < end; ++e)
    for (int a = 0; a < 3; ++a) buffer[3 * (e - begin) + a] = x[a * edges + e];
  return buffer;
}

template <class R, class Real, class Index>
void sum_edges(const EdgeInputs<Real, Index>& in, int64_t begin, int64_t end, Part<R>& part) {
  const int64_t atoms = in.atoms;
  const Index *centers = in.edge_index, *neighbors = in.edge_index + in.edges;
  AtomSums<R>* const sums = part.sums;
  const bool* const is_set = part.is_set;
  // Edges often come by their centre: its sum is kept until another one comes.
  int64_t current = kNone;
  Row center{};
  const auto flush = [&] {
    if (current != kNone) sums[current].center += center;
    center = Row{};
  };
  constexpr int64_t kRows = 64;
  Real gradient_rows[3 * kRows], vec_rows[3 * kRows];
  for (int64_t first = begin; first < end; first += kRows) {
    const int64_t last = std::min(first + kRows, end);
    const Real* g =
        rows_of(in.edge_gradient, in.gradient_is_transposed, in.edges, first, last, gradient_rows);
    const Real* v = rows_of(in.edge_vec, in.vec_is_transposed, in.edges, first, last, vec_rows);
    for (int64_t e = first; e < last; ++e, g += 3, v += 3) {
      constexpr int64_t kAhead = 32;  // edges that come by no order name atoms beyond the cache
      const int64_t next = std::min(e + kAhead, end - 1);
      prefetch(sums, centers[next]);
      prefetch(sums, neighbors[next]);
      const int64_t i = centers[e], j = neighbors[e];
      if (__builtin_expect(uint64_t(i) >= uint64_t(atoms) || uint64_t(j) >= uint64_t(atoms),
                           false)) {
        if (part.bad == kNone && (is_wrong(i, atoms) || is_wrong(j, atoms))) part.bad = e;
        continue;
      }
      if (!is_set[j / kBlock]) set_block(part, j / kBlock, atoms);
      if (i != current) {
        flush();
        if (!is_set[i / kBlock]) set_block(part, i / kBlock, atoms);
        current = i;
      }
      center += row_of(g, 0);
      add_to_neighbor(g, columns_of<R>(v), sums[j].neighbor);
    }
  }
  flush();
}

// What the atoms that follow one another give to one frame.
struct FrameShare {
  int64_t frame;
  Row virial[3];
};

// Writes the atoms begin <= atom < end.
template <class R, class Real, class Index>
std::vector<FrameShare> add_parts(const EdgeInputs<Real, Index>& in,
                                  const std::vector<Part<R>>& parts, int64_t begin, int64_t end,
                                  const EdgeOutputs<Real>& out) {
  std::vector<FrameShare> shares;
  for (int64_t atom = begin; atom < end; ++atom) {
    Row center{};
    R sum[3] = {};
    for (const Part<R>& part : parts) {
      if (!part.is_set[atom / kBlock]) continue;
      center += part.sums[atom].center;
      for (int a = 0; a < 3; ++a) sum[a] += part.sums[atom].neighbor[a];
    }
    for (int a = 0; a < 3; ++a) out.force[3 * atom + a] = Real(center[a] + last_column(sum[a]));
    if constexpr (std::is_same_v<R, Row>) {
      for (int k = 0; k < 9; ++k) out.atom_virial[9 * atom + k] = Real(sum[k / 3][k % 3]);
      const int64_t frame = in.batch ? in.batch[atom] : 0;
      if (shares.empty() || shares.back().frame != frame) shares.push_back({frame, {}});
      for (int a = 0; a < 3; ++a) shares.back().virial[a] += sum[a];
    }
  }
  return shares;
}

template <class R, class Real, class Index>
int64_t force_of(const EdgeInputs<Real, Index>& in, const EdgeOutputs<Real>& out) {
  const int64_t tasks = count_tasks<R>(in);
  const int64_t blocks = (in.atoms + kBlock - 1) / kBlock;
  const Scratch<AtomSums<R>> sums(tasks * in.atoms);
  const Scratch<bool> is_set(tasks * blocks);
  prefer_large_pages(sums.get(), tasks * in.atoms);
  std::vector<Part<R>> parts(tasks);
  parallel_for(tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      parts[t].sums = sums.get() + t * in.atoms;
      parts[t].is_set = is_set.get() + t * blocks;
      std::fill_n(parts[t].is_set, blocks, false);
      sum_edges(in, in.edges * t / tasks, in.edges * (t + 1) / tasks, parts[t]);
    }
  });
  for (const Part<R>& part : parts)
    if (part.bad != kNone) return part.bad;

  constexpr int64_t kAtomsPerTask = 512;
  const int64_t pieces = (in.atoms + kAtomsPerTask - 1) / kAtomsPerTask;
  std::vector<std::vector<FrameShare>> shares(pieces);
  parallel_for(pieces, 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      shares[t] =
          add_parts(in, parts, t * kAtomsPerTask, std::min((t + 1) * kAtomsPerTask, in.atoms), out);
  });

  if constexpr (std::is_same_v<R, Row>) {
    std::vector<double> virial(9 * in.frames);
    for (const auto& piece : shares)
      for (const FrameShare& share : piece)
        for (int k = 0; k < 9; ++k) virial[9 * share.frame + k] += share.virial[k / 3][k % 3];
    for (size_t k = 0; k < virial.size(); ++k) out.virial[k] = Real(virial[k]);
  }
  return kNone;
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
  if (!in.virial) return force_of<double>(in, out);
  if (const int64_t lost = find_lost_atom(in); lost != kNone) return lost;
  return force_of<Row>(in, out);
}

template <class Real, class Index>
int64_t edge_force_backward_cpu(const EdgeInputs<Real, Index>& in,
                                const EdgeUpstream<Real>& upstream,
                                const EdgeGradients<Real>& out) {
  if (upstream.virial)
    if (const int64_t lost = find_lost_atom(in); lost != kNone) return lost;
  const Index *centers = in.edge_index, *neighbors = in.edge_index + in.edges;
  return parallel_first(in.edges, 1 << 12, [&](int64_t begin, int64_t end) {
    int64_t bad = kNone;
    for (int64_t e = begin; e < end; ++e) {
      const int64_t i = centers[e], j = neighbors[e];
      if (uint64_t(i) >= uint64_t(in.atoms) || uint64_t(j) >= uint64_t(in.atoms)) {
        if (is_wrong(i, in.atoms) || is_wrong(j, in.atoms)) bad = first_of(bad, e);
        if (out.edge_gradient) std::fill_n(out.edge_gradient + 3 * e, 3, Real(0));
        if (out.edge_vec) std::fill_n(out.edge_vec + 3 * e, 3, Real(0));
        continue;
      }
      edge_backward(in, upstream, out, e, i, j, upstream.virial && in.batch ? in.batch[j] : 0);
    }
    return bad;
  });
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
