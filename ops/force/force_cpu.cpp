// The CPU kernel of force, virial and per-atom virial.
#include <calcops/memory.h>
#include <calcops/parallel.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "force/force.h"
#include "force/force_math.h"
#include "force/force_slots.h"

namespace calcops::ops::force {
namespace {

void subtract_force(Row& sum, double force) { sum[3] -= force; }
void subtract_force(double& sum, double force) { sum -= force; }

// One task's part of a frame: a run of centre atoms. Each task sums its pairs into rows of its own.
// These are then added in the order of the tasks, so the bits do not depend on the threads.
template <class R4>
struct Part {
  R4* sums;  // [n+m][3]; only the rows first <= j < last are set
  int64_t first, last;
  int64_t bad;  // position of the first wrong entry, or kNone; `sums` are set only with kNone
};

// Return the number of tasks into which a frame is divided. More tasks balance the work better but
// cost memory and additions. The number determines the order of sums, so it depends on the sizes
// alone, not on types or on the wanted results. The tasks' rows take at most an eighth of the
// memory of float64 inputs, or a quarter of that of float32 ones.
int64_t tasks_per_frame(int64_t natoms, int64_t rows, int64_t neighbors) {
  constexpr int64_t kSlotsPerTask = 1 << 12, kMaxTasks = 8;
  constexpr int64_t kSlotBytes = 19 * sizeof(double), kRowBytes = 3 * sizeof(Row);
  const int64_t slots = natoms * neighbors;
  const int64_t fit = slots * kSlotBytes / 8 / (std::max<int64_t>(rows, 1) * kRowBytes);
  return std::clamp<int64_t>(std::min(slots / kSlotsPerTask, fit), 1, kMaxTasks);
}

// Set part.first and part.last to the smallest range that has all atoms in the list, or part.bad to
// the position of the first wrong entry. An unsigned -1 is the largest number and -1 + 1 is 0, so
// that empty slots change neither the minimum nor the maximum, and nothing overflows.
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
  part.bad = kNone;
  if (end <= limit) return;
  for (part.bad = 0; Unsigned(Unsigned(list[part.bad]) + 1) <= limit;) ++part.bad;
}

// Sum the pairs of the centre atoms begin <= i < end of a frame into `part`.
template <class R4, class Real, class Index>
void sum_pairs(const ForceInputs<Real, Index>& in, int64_t frame, int64_t begin, int64_t end,
               Part<R4>& part) {
  const int64_t rows = in.natoms + in.nghost, first_slot = frame * in.natoms * in.neighbors;
  const Index* list = in.list_neigh + first_slot;
  const Real *dE = in.dE + 4 * first_slot, *Ri_d = in.Ri_d + 12 * first_slot;
  const Real* Rij = in.virial ? in.Rij + 3 * first_slot : nullptr;
  const int64_t begin_slot = begin * in.neighbors, ahead = slots_ahead(in.neighbors);
  find_rows(list + begin_slot, end * in.neighbors - begin_slot, rows, part);
  if (part.bad != kNone) {
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

// Write the results of the atoms begin <= j < end of a frame. Return the sum of their rows.
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

// Write all results. Return the position of the first wrong entry, or kNone.
template <class R4, class Real, class Index>
int64_t force_of(const ForceInputs<Real, Index>& in, const ForceOutputs<Real>& out) {
  const int64_t rows = in.natoms + in.nghost;
  const int64_t tasks = tasks_per_frame(in.natoms, rows, in.neighbors);
  const Scratch<R4> sums(in.frames * tasks * rows * 3);
  std::vector<Part<R4>> parts(in.frames * tasks);
  parallel_for(in.frames * tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t share = t % tasks;
      parts[t].sums = sums.get() + t * rows * 3;
      sum_pairs(in, t / tasks, in.natoms * share / tasks, in.natoms * (share + 1) / tasks,
                parts[t]);
    }
  });
  for (const Part<R4>& part : parts)
    if (part.bad != kNone) return part.bad;

  constexpr int64_t kRowsPerTask = 512;
  const int64_t blocks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  std::vector<std::array<R4, 3>> totals(in.frames * blocks);
  parallel_for(in.frames * blocks, 1, [&](int64_t begin, int64_t end) {
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
  return kNone;
}

}  // namespace

template <class Real, class Index>
int64_t force_cpu(const ForceInputs<Real, Index>& in, const ForceOutputs<Real>& out) {
  return in.virial ? force_of<Row>(in, out) : force_of<double>(in, out);
}

#define INSTANTIATE(Real, Index) \
  template int64_t force_cpu(const ForceInputs<Real, Index>&, const ForceOutputs<Real>&);
INSTANTIATE(float, int32_t)
INSTANTIATE(float, int64_t)
INSTANTIATE(double, int32_t)
INSTANTIATE(double, int64_t)
#undef INSTANTIATE

}  // namespace calcops::ops::force
