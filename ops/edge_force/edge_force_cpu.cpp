// CPU kernels of the edge force operators.
#include <calcops/either.h>
#include <calcops/memory.h>
#include <calcops/parallel.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "edge_force/edge_force.h"
#include "edge_force/edge_force_math.h"

namespace calcops::ops::edge_force {
namespace {

// Return whether an index is neither -1 nor that of an atom.
bool is_wrong(int64_t atom, int64_t atoms) { return atom < -1 || atom >= atoms; }

// Prefetch the cache lines of row `row`, which need not exist.
template <class Item>
inline void prefetch(const Item* rows, int64_t row) {
  const uintptr_t first = uintptr_t(rows) + uint64_t(row) * sizeof(Item);
  for (size_t byte = 0; byte < sizeof(Item); byte += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(first + byte), /*write=*/1);
}

// An atom's sums over the edges of which it is the centre, and over those of which it is the
// neighbour. They fill whole cache lines.
template <class R>
struct alignas(64) AtomSums {
  Row center;
  R neighbor[3];
};

constexpr int64_t kBlock = 64;  // atoms

// One task's part of the edges. Each task sums its edges into rows of its own. These are then added
// in the order of the tasks, so the bits do not depend on the threads.
template <class R>
struct Part {
  AtomSums<R>* sums;    // [N], set in the blocks of atoms that the task's edges name
  bool* is_set;         // [blocks]
  int64_t bad = kNone;  // the first edge with a wrong entry
};

// Return the number of tasks. More tasks balance the work better but cost memory and additions. The
// number determines the order of sums, so it depends on the sizes alone, not on types or on the
// wanted results. With kEdgesPerAtom the tasks' rows take at most half of the inputs' memory.
int64_t count_tasks(int64_t atoms, int64_t edges) {
  constexpr int64_t kEdgesPerTask = 1 << 12, kEdgesPerAtom = 8;
  const int64_t most =
      std::min(edges / kEdgesPerTask, edges / (kEdgesPerAtom * std::max<int64_t>(atoms, 1)));
  if (most >= 8) return 8;
  if (most >= 4) return 4;
  return most >= 2 ? 2 : 1;
}

// Not inlined: it runs rarely, and the loop over edges needs the registers.
template <class R>
__attribute__((noinline)) void set_block(Part<R>& part, int64_t block, int64_t atoms) {
  const int64_t begin = block * kBlock, end = std::min(begin + kBlock, atoms);
  std::fill(part.sums + begin, part.sums + end, AtomSums<R>{});
  part.is_set[block] = true;
}

// The inputs of a call, of any types.
struct Inputs {
  int64_t atoms, edges, frames;
  Indices edge_index;
  Reals edge_gradient, edge_vec;
  const int64_t* batch;
  bool gradient_is_transposed, vec_is_transposed;
};

struct Outputs {
  RealResults force, virial, atom_virial;
};

// Return the rows [begin, end) of x [E, 3]. If x is transposed, they are copied to `buffer`.
template <class Real>
const Real* rows_of(const Real* x, bool is_transposed, int64_t edges, int64_t begin, int64_t end,
                    Real* buffer) {
  if (!is_transposed) return x + 3 * begin;
  for (int64_t e = begin; e < end; ++e)
    for (int a = 0; a < 3; ++a) buffer[3 * (e - begin) + a] = x[a * edges + e];
  return buffer;
}

// Sum the edges begin <= e < end into `part`. Only this loop is compiled for each combination of
// types: with numbers that are converted beforehand, it would take twice as long.
template <class R, class Real, class Index>
void sum_edges(const Inputs& in, const Index* edge_index, const Real* edge_gradient,
               const Real* edge_vec, int64_t begin, int64_t end, Part<R>& part) {
  const int64_t atoms = in.atoms;
  const Index *centers = edge_index, *neighbors = edge_index + in.edges;
  AtomSums<R>* const sums = part.sums;
  const bool* const is_set = part.is_set;
  // Edges are often sorted by their centre. So its sum is added to memory only when the next edge
  // has another centre.
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
        rows_of(edge_gradient, in.gradient_is_transposed, in.edges, first, last, gradient_rows);
    const Real* v = rows_of(edge_vec, in.vec_is_transposed, in.edges, first, last, vec_rows);
    for (int64_t e = first; e < last; ++e, g += 3, v += 3) {
      constexpr int64_t kAhead = 32;  // atoms of unsorted edges are seldom in the cache
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

// The sum of the virials of a run of atoms of one frame.
struct FrameShare {
  int64_t frame;
  Row virial[3];
};

// Write the results of the atoms begin <= atom < end. Return the shares of their frames' virials.
// Atoms that no edge names are left out, so that they need no share.
template <class R>
std::vector<FrameShare> add_parts(const Inputs& in, const std::vector<Part<R>>& parts,
                                  int64_t begin, int64_t end, const Outputs& out) {
  std::vector<FrameShare> shares;
  for (int64_t atom = begin; atom < end; ++atom) {
    Row center{};
    R sum[3] = {};
    bool is_named = false;
    for (const Part<R>& part : parts) {
      if (!part.is_set[atom / kBlock]) continue;
      is_named = true;
      center += part.sums[atom].center;
      for (int a = 0; a < 3; ++a) sum[a] += part.sums[atom].neighbor[a];
    }
    double force[3], virial[9];
    for (int a = 0; a < 3; ++a) force[a] = center[a] + last_column(sum[a]);
    out.force.write(3 * atom, force, 3);
    if constexpr (std::is_same_v<R, Row>) {
      for (int k = 0; k < 9; ++k) virial[k] = sum[k / 3][k % 3];
      out.atom_virial.write(9 * atom, virial, 9);
      if (!is_named) continue;
      const int64_t frame = in.batch ? in.batch[atom] : 0;
      if (shares.empty() || shares.back().frame != frame) shares.push_back({frame, {}});
      for (int a = 0; a < 3; ++a) shares.back().virial[a] += sum[a];
    }
  }
  return shares;
}

// Write each frame's virial: the sum of its shares, in their order. The memory that this needs
// grows with the number of shares, not with that of frames.
void add_shares(const std::vector<std::vector<FrameShare>>& pieces, int64_t frames,
                const RealResults& virial) {
  std::vector<const FrameShare*> shares;
  for (const auto& piece : pieces)
    for (const FrameShare& share : piece) shares.push_back(&share);
  const auto by_frame = [](const FrameShare* a, const FrameShare* b) {
    return a->frame < b->frame;
  };
  if (!std::is_sorted(shares.begin(), shares.end(), by_frame))
    std::stable_sort(shares.begin(), shares.end(), by_frame);

  virial.set_zero(0, 9 * frames);
  for (size_t k = 0; k < shares.size();) {
    const int64_t frame = shares[k]->frame;
    Row sum[3] = {};
    for (; k < shares.size() && shares[k]->frame == frame; ++k)
      for (int a = 0; a < 3; ++a) sum[a] += shares[k]->virial[a];
    double numbers[9];
    for (int ab = 0; ab < 9; ++ab) numbers[ab] = sum[ab / 3][ab % 3];
    virial.write(9 * frame, numbers, 9);
  }
}

// Write all results. Return the first edge with a wrong entry, or kNone.
template <class R>
int64_t force_of(const Inputs& in, const Outputs& out) {
  const int64_t tasks = count_tasks(in.atoms, in.edges);
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
      in.edge_index.visit(0, [&](const auto* edge_index) {
        in.edge_gradient.visit(0, [&](const auto* edge_gradient) {
          sum_edges(in, edge_index, edge_gradient, in.edge_vec.as(edge_gradient),
                    in.edges * t / tasks, in.edges * (t + 1) / tasks, parts[t]);
        });
      });
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

  if constexpr (std::is_same_v<R, Row>) add_shares(shares, in.frames, out.virial);
  return kNone;
}

// The same as force_of, for few edges among very many atoms. The atoms that the edges name are
// numbered anew, so that only these need memory for sums.
template <class R>
int64_t sparse_force_of(const Inputs& in, const Outputs& out) {
  std::vector<int64_t> named;  // in rising order, each once
  for (int64_t e = 0; e < in.edges; ++e) {
    const int64_t i = in.edge_index[e], j = in.edge_index[in.edges + e];
    if (is_wrong(i, in.atoms) || is_wrong(j, in.atoms)) return e;
    if (i < 0 || j < 0) continue;
    named.push_back(i);
    named.push_back(j);
  }
  std::sort(named.begin(), named.end());
  named.erase(std::unique(named.begin(), named.end()), named.end());

  const auto number_of = [&](int64_t atom) {
    return std::lower_bound(named.begin(), named.end(), atom) - named.begin();
  };
  std::vector<int64_t> edge_index(2 * in.edges, kNone), batch;
  for (int64_t e = 0; e < in.edges; ++e) {
    const int64_t i = in.edge_index[e], j = in.edge_index[in.edges + e];
    if (i < 0 || j < 0) continue;
    edge_index[e] = number_of(i);
    edge_index[in.edges + e] = number_of(j);
  }
  if (in.batch)
    for (const int64_t atom : named) batch.push_back(in.batch[atom]);
  Inputs renumbered = in;
  renumbered.atoms = named.size();
  renumbered.edge_index = edge_index.data();
  renumbered.batch = in.batch ? batch.data() : nullptr;
  constexpr bool kVirial = std::is_same_v<R, Row>;
  std::vector<double> force(3 * named.size()), atom_virial(kVirial ? 9 * named.size() : 0);
  force_of<R>(renumbered, {force.data(), out.virial, atom_virial.data()});

  const auto spread = [&](const std::vector<double>& rows, int64_t width, const RealResults& to) {
    to.set_zero(0, width * in.atoms);
    for (size_t k = 0; k < named.size(); ++k) to.write(width * named[k], &rows[width * k], width);
  };
  spread(force, 3, out.force);
  if (kVirial) spread(atom_virial, 9, out.atom_virial);
  return kNone;
}

template <class R>
int64_t sum_forces(const Inputs& in, const Outputs& out) {
  constexpr int64_t kFew = 1 << 16, kAtomsPerEdge = 8;
  const bool is_sparse = in.atoms > kFew && in.atoms / kAtomsPerEdge > in.edges;
  return is_sparse ? sparse_force_of<R>(in, out) : force_of<R>(in, out);
}

// Return E plus the first atom whose frame does not exist, or kNone.
int64_t find_wrong_frame(const int64_t* batch, int64_t atoms, int64_t edges, int64_t frames) {
  if (!batch) return kNone;
  for (int64_t atom = 0; atom < atoms; ++atom)
    if (batch[atom] < 0 || batch[atom] >= frames) return edges + atom;
  return kNone;
}

}  // namespace

template <class Real, class Index>
int64_t edge_force_cpu(const EdgeInputs<Real, Index>& in, const EdgeOutputs<Real>& out) {
  const Inputs inputs{in.atoms,
                      in.edges,
                      in.frames,
                      in.edge_index,
                      in.edge_gradient,
                      in.edge_vec,
                      in.batch,
                      in.gradient_is_transposed,
                      in.vec_is_transposed};
  const Outputs outputs{out.force, out.virial, out.atom_virial};
  if (!in.virial) return sum_forces<double>(inputs, outputs);
  const int64_t wrong = find_wrong_frame(in.batch, in.atoms, in.edges, in.frames);
  return wrong != kNone ? wrong : sum_forces<Row>(inputs, outputs);
}

template <class Real, class Index>
int64_t edge_force_backward_cpu(const EdgeInputs<Real, Index>& in,
                                const EdgeUpstream<Real>& upstream,
                                const EdgeGradients<Real>& out) {
  if (upstream.virial) {
    const int64_t wrong = find_wrong_frame(in.batch, in.atoms, in.edges, in.frames);
    if (wrong != kNone) return wrong;
  }
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

}  // namespace calcops::ops::edge_force
