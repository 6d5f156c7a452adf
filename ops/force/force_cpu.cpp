// CPU kernels of the force operators.
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "force/force.h"
#include "force/force_math.h"
#include "memory.h"

namespace calcops {
namespace {

constexpr int64_t kNoBadEntry = -1;

int64_t first_of(int64_t a, int64_t b) {
  if (a == kNoBadEntry || b == kNoBadEntry) return std::max(a, b);
  return std::min(a, b);
}

// Empty slots come in runs, which are passed over eight at a time.
template <class Index>
int64_t next_slot(const Index* list, int64_t slot, int64_t end) {
  for (++slot; slot + 8 <= end; slot += 8) {
    Index all = -1;
    for (int k = 0; k < 8; ++k) all &= list[slot + k];
    if (all != -1) break;
  }
  return slot;
}

// Prefetches a slot's numbers. Every row ends in empty slots, after which the hardware has to find
// out anew what is being read, so each slot prefetches the one that many slots further on: its
// counterpart in the next row, unless that is too far ahead to stay in the L2 cache.
template <int kNumbers, class Real>
void prefetch(const Real* x) {
  for (int byte = 0; byte < kNumbers * int(sizeof(Real)); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(x) + byte);
}
int64_t slots_ahead(int64_t neighbors) { return std::min<int64_t>(neighbors, 1024); }

// R4 is a Row where the virial is wanted, a number where only the force is.
template <class Real>
void load_r4(const Real* Rij, Row& r4) {
  r4 = Row{double(Rij[0]), double(Rij[1]), double(Rij[2]), 1.0};
}
template <class Real>
void load_r4(const Real*, double& r4) {
  r4 = 1;
}

void subtract_force(Row& sum, double force) { sum[3] -= force; }
void subtract_force(double& sum, double force) { sum -= force; }

// One task's share of a frame: a run of centre atoms, whose pairs are summed into rows of the
// task's own. They are added in the order of the tasks, so the bits do not depend on the threads.
template <class R4>
struct Part {
  R4* sums;             // [n+m][3], of which the task has set
  int64_t first, last;  // first <= j < last
  int64_t bad;          // position of the first entry that names no atom; then there are no sums
};

// More tasks share the work better and cost more memory and additions. The number may depend on the
// sizes alone; together they take an eighth of the inputs at most.
template <class Real>
int64_t tasks_per_frame(int64_t natoms, int64_t rows, int64_t neighbors) {
  constexpr int64_t kSlotsPerTask = 1 << 12, kMaxTasks = 8;
  constexpr int64_t kSlotBytes = 19 * sizeof(Real), kRowBytes = 3 * sizeof(Row);
  const int64_t slots = natoms * neighbors;
  const int64_t fit = slots * kSlotBytes / 8 / (std::max<int64_t>(rows, 1) * kRowBytes);
  return std::clamp<int64_t>(std::min(slots / kSlotsPerTask, fit), 1, kMaxTasks);
}

// Sets the least range of rows that has all those in the list, or the position of its first bad
// entry. As unsigned numbers -1 is the largest and its successor 0, so nothing can overflow.
template <class R4, class Index>
void find_rows(const Index* list, int64_t slots, int64_t rows, Part<R4>& part) {
  using Unsigned = std::make_unsigned_t<Index>;
  const auto limit = Unsigned(std::min(uint64_t(rows), uint64_t(Unsigned(-1) / 2) + 1));
  Unsigned first = limit, end = 0;
  for (int64_t s = 0; s < slots; ++s) {
    first = std::min(first, Unsigned(list[s]));
    end = std::max(end, Unsigned(Unsigned(list[s]) + 1));
  }
  part.first = int64_t(first);
  part.last = int64_t(end);
  part.bad = kNoBadEntry;
  if (end <= limit) return;
  for (part.bad = 0; Unsigned(Unsigned(list[part.bad]) + 1) <= limit;) ++part.bad;
}

template <class R4, class Real, class Index>
void sum_pairs(const ForceInputs<Real, Index>& in, int64_t frame, int64_t begin, int64_t end,
               Part<R4>& part) {
  const int64_t rows = in.natoms + in.nghost, first_slot = frame * in.natoms * in.neighbors;
  const Index* list = in.list_neigh + first_slot;
  const Real *dE = in.dE + 4 * first_slot, *Ri_d = in.Ri_d + 12 * first_slot;
  const Real* Rij = in.virial ? in.Rij + 3 * first_slot : nullptr;
  const int64_t begin_slot = begin * in.neighbors, ahead = slots_ahead(in.neighbors);
  find_rows(list + begin_slot, end * in.neighbors - begin_slot, rows, part);
  if (part.bad != kNoBadEntry) {
    part.bad += first_slot + begin_slot;
    return;
  }
  part.first = std::min(part.first, begin);
  part.last = std::max(part.last, end);
  R4* const sums = part.sums;
  std::fill(sums + 3 * part.first, sums + 3 * part.last, R4{});

  for (int64_t i = begin; i < end; ++i) {
    Triple center{};
    const int64_t row_end = (i + 1) * in.neighbors;
    for (int64_t s = i * in.neighbors; s < row_end;) {
      const int64_t j = list[s];
      if (j < 0) {
        s = next_slot(list, s, row_end);
        continue;
      }
      prefetch<4>(dE + 4 * (s + ahead));
      prefetch<12>(Ri_d + 12 * (s + ahead));
      if (in.virial) prefetch<3>(Rij + 3 * (s + ahead));
      const Triple g = row_times_matrix<4>(dE + 4 * s, Ri_d + 12 * s);
      R4 r4;
      load_r4(Rij + 3 * s, r4);
      center = center + g;
      add_pair(g, r4, sums + 3 * j);
      ++s;
    }
    if (in.center)
      for (int a = 0; a < 3; ++a) subtract_force(sums[3 * i + a], center[a]);
  }
}

template <class Real>
void write_row(const Row* sum, int64_t row, const ForceOutputs<Real>& out) {
  for (int a = 0; a < 3; ++a) {
    out.force[3 * row + a] = Real(sum[a][3]);
    for (int b = 0; b < 3; ++b) out.atom_virial[9 * row + 3 * a + b] = Real(sum[a][b]);
  }
}
template <class Real>
void write_row(const double* sum, int64_t row, const ForceOutputs<Real>& out) {
  for (int a = 0; a < 3; ++a) out.force[3 * row + a] = Real(sum[a]);
}

// Writes the rows begin <= j < end of a frame and returns their sum.
template <class R4, class Real>
std::array<R4, 3> add_parts(const Part<R4>* parts, int64_t tasks, int64_t begin, int64_t end,
                            int64_t frame_row, const ForceOutputs<Real>& out) {
  std::array<R4, 3> total{};
  for (int64_t j = begin; j < end; ++j) {
    R4 sum[3] = {};
    for (int64_t t = 0; t < tasks; ++t) {
      if (j < parts[t].first || j >= parts[t].last) continue;
      for (int a = 0; a < 3; ++a) sum[a] = sum[a] + parts[t].sums[3 * j + a];
    }
    write_row(sum, frame_row + j, out);
    for (int a = 0; a < 3; ++a) total[a] = total[a] + sum[a];
  }
  return total;
}

template <class R4, class Real, class Index>
int64_t force_of(const ForceInputs<Real, Index>& in, const ForceOutputs<Real>& out) {
  const int64_t rows = in.natoms + in.nghost;
  const int64_t tasks = tasks_per_frame<Real>(in.natoms, rows, in.neighbors);
  const auto sums = scratch<R4>(in.frames * tasks * rows * 3);
  std::vector<Part<R4>> parts(in.frames * tasks);
  at::parallel_for(0, in.frames * tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t share = t % tasks;
      parts[t].sums = sums.get() + t * rows * 3;
      sum_pairs(in, t / tasks, in.natoms * share / tasks, in.natoms * (share + 1) / tasks,
                parts[t]);
    }
  });
  for (const Part<R4>& part : parts)
    if (part.bad != kNoBadEntry) return part.bad;

  constexpr int64_t kRowsPerTask = 512;
  const int64_t blocks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  std::vector<std::array<R4, 3>> totals(in.frames * blocks);
  at::parallel_for(0, in.frames * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t frame = t / blocks, row = t % blocks * kRowsPerTask;
      totals[t] = add_parts(&parts[frame * tasks], tasks, row, std::min(row + kRowsPerTask, rows),
                            frame * rows, out);
    }
  });

  // A frame's virial is the sum of its atoms'.
  if constexpr (std::is_same_v<R4, Row>) {
    for (int64_t frame = 0; frame < in.frames; ++frame) {
      Row virial[3] = {};
      for (int64_t t = frame * blocks; t < (frame + 1) * blocks; ++t)
        for (int a = 0; a < 3; ++a) virial[a] = virial[a] + totals[t][a];
      for (int k = 0; k < 9; ++k) out.virial[9 * frame + k] = Real(virial[k / 3][k % 3]);
    }
  }
  return kNoBadEntry;
}

// U of every row of every frame: gF alone without a virial's gradient, and a number to fill it up.
template <bool kVirial>
constexpr int64_t kUpstream = kVirial ? 12 : 4;

template <bool kVirial, class Real, class Index>
Scratch<double> pack_upstream(const ForceInputs<Real, Index>& in,
                              const ForceUpstream<Real>& upstream) {
  const int64_t rows = in.natoms + in.nghost;
  auto packed = scratch<double>(in.frames * rows * kUpstream<kVirial>);
  at::parallel_for(0, in.frames * rows, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      double* u = packed.get() + row * kUpstream<kVirial>;
      if constexpr (kVirial) {
        const Real* gV = upstream.virial ? upstream.virial + row / rows * 9 : nullptr;
        const Real* gAV = upstream.atom_virial ? upstream.atom_virial + row * 9 : nullptr;
        for (int a = 0; a < 3; ++a)
          for (int b = 0; b < 3; ++b)
            u[3 * b + a] = (gV ? double(gV[3 * a + b]) : 0) + (gAV ? double(gAV[3 * a + b]) : 0);
      }
      double* gF = kVirial ? u + 9 : u;
      for (int a = 0; a < 3; ++a) gF[a] = upstream.force ? double(upstream.force[3 * row + a]) : 0;
      if (!kVirial) gF[3] = 0;
    }
  });
  return packed;
}

// The gradients of one centre atom's slots.
template <bool kVirial, class Real, class Index>
int64_t backward_atom(const ForceInputs<Real, Index>& in, const double* packed, int64_t atom,
                      const ForceGradients<Real>& out) {
  const int64_t rows = in.natoms + in.nghost, end = (atom + 1) * in.neighbors;
  const double* const frame_U = packed + atom / in.natoms * rows * kUpstream<kVirial>;
  const Index* const list = in.list_neigh;
  const Real *const dE = in.dE, *const Ri_d = in.Ri_d, *const Rij = in.Rij;
  Real *const to_dE = out.dE, *const to_Ri_d = out.Ri_d, *const to_Rij = out.Rij;
  Triple center{};
  if (in.center)
    center = matrix_row(frame_U + atom % in.natoms * kUpstream<kVirial>, kVirial ? 3 : 0);
  int64_t bad = kNoBadEntry;
  const int64_t ahead = slots_ahead(in.neighbors);
  for (int64_t s = atom * in.neighbors; s < end;) {
    const int64_t j = list[s];
    if (j < 0 || j >= rows) {
      if (j != -1) bad = first_of(bad, s);
      const int64_t next = next_slot(list, s, end), count = next - s;
      if (to_dE) std::fill_n(to_dE + 4 * s, 4 * count, Real(0));
      if (to_Ri_d) std::fill_n(to_Ri_d + 12 * s, 12 * count, Real(0));
      if (to_Rij) std::fill_n(to_Rij + 3 * s, 3 * count, Real(0));
      s = next;
      continue;
    }
    if (to_Ri_d || to_Rij) prefetch<4>(dE + 4 * (s + ahead));
    if (to_dE || to_Rij) prefetch<12>(Ri_d + 12 * (s + ahead));
    if (kVirial) prefetch<3>(Rij + 3 * (s + ahead));
    const double* U = frame_U + j * kUpstream<kVirial>;
    Triple e;
    if constexpr (kVirial) {
      Row r4;
      load_r4(Rij + 3 * s, r4);
      e = row_times_matrix<4>(r4, U) - center;
    } else {
      e = matrix_row(U, 0) - center;
    }
    if (to_dE) matrix_times_column<4>(Ri_d + 12 * s, e, to_dE + 4 * s);
    if (to_Ri_d) outer_product<4>(dE + 4 * s, e, to_Ri_d + 12 * s);
    if (to_Rij) {
      if constexpr (kVirial)
        matrix_times_column<3>(U, row_times_matrix<4>(dE + 4 * s, Ri_d + 12 * s), to_Rij + 3 * s);
      else
        std::fill_n(to_Rij + 3 * s, 3, Real(0));
    }
    ++s;
  }
  return bad;
}

template <bool kVirial, class Real, class Index>
int64_t backward_of(const ForceInputs<Real, Index>& in, const ForceUpstream<Real>& upstream,
                    const ForceGradients<Real>& out) {
  const auto packed = pack_upstream<kVirial>(in, upstream);
  const int64_t slots = in.frames * in.natoms * in.neighbors;
  prefer_large_pages(out.dE, 4 * slots);
  prefer_large_pages(out.Ri_d, 12 * slots);
  prefer_large_pages(out.Rij, 3 * slots);
  constexpr int64_t kSlotsPerTask = 1 << 13;
  const int64_t grain = std::max<int64_t>(1, kSlotsPerTask / std::max<int64_t>(in.neighbors, 1));
  return at::parallel_reduce(
      0, in.frames * in.natoms, grain, kNoBadEntry,
      [&](int64_t begin, int64_t end, int64_t bad) {
        for (int64_t atom = begin; atom < end; ++atom)
          bad = first_of(bad, backward_atom<kVirial>(in, packed.get(), atom, out));
        return bad;
      },
      first_of);
}

}  // namespace

template <class Real, class Index>
int64_t force_cpu(const ForceInputs<Real, Index>& in, const ForceOutputs<Real>& out) {
  return in.virial ? force_of<Row>(in, out) : force_of<double>(in, out);
}

template <class Real, class Index>
int64_t force_backward_cpu(const ForceInputs<Real, Index>& in, const ForceUpstream<Real>& upstream,
                           const ForceGradients<Real>& out) {
  const bool virial = upstream.virial || upstream.atom_virial;
  return virial ? backward_of<true>(in, upstream, out) : backward_of<false>(in, upstream, out);
}

#define INSTANTIATE(Real, Index)                                                                   \
  template int64_t force_cpu(const ForceInputs<Real, Index>&, const ForceOutputs<Real>&);          \
  template int64_t force_backward_cpu(const ForceInputs<Real, Index>&, const ForceUpstream<Real>&, \
                                      const ForceGradients<Real>&);
INSTANTIATE(float, int32_t)
INSTANTIATE(float, int64_t)
INSTANTIATE(double, int32_t)
INSTANTIATE(double, int64_t)
#undef INSTANTIATE

}  // namespace calcops
