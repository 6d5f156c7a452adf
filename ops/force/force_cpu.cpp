// CPU kernels of the force operators.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "force/force.h"
#include "force/force_math.h"

namespace calcops {
namespace {

constexpr int64_t kNoBadEntry = -1;

// One task's share of a frame: a run of centre atoms, whose pairs are summed into a buffer of the
// task's own. Buffers are added in the order of the tasks, so the bits do not depend on the
// threads.
struct Buffer {
  struct Free {
    void operator()(double* p) const { std::free(p); }
  };
  std::unique_ptr<double, Free> sums;  // [n+m][3][kColumns], zero outside [first, last)
  int64_t first, last;
  double virial[9];
  int64_t bad;
};

// More tasks share the work better and cost more memory and additions; the number may depend on the
// sizes alone. 8 buffers of 96 bytes an atom stay below a tenth of the inputs from K = 50 on.
int64_t tasks_per_frame(int64_t natoms, int64_t neighbors) {
  constexpr int64_t kSlotsPerTask = 1 << 14, kMaxTasks = 8;
  return std::clamp<int64_t>(natoms * neighbors / kSlotsPerTask, 1, kMaxTasks);
}

int64_t first_of(int64_t a, int64_t b) {
  if (a == kNoBadEntry || b == kNoBadEntry) return std::max(a, b);
  return std::min(a, b);
}

template <int kColumns, class Real, class Index>
void sum_pairs(const ForceInputs<Real, Index>& in, int64_t frame, int64_t begin, int64_t end,
               Buffer& buffer) {
  const int64_t rows = in.natoms + in.nghost, width = 3 * kColumns;
  // calloc hands out fresh pages as zeros: what a task does not touch costs nothing.
  buffer.sums.reset(static_cast<double*>(std::calloc(std::max<int64_t>(rows * width, 1), 8)));
  if (!buffer.sums) throw std::bad_alloc();
  double* sums = buffer.sums.get();
  int64_t first = rows, last = 0;
  std::fill_n(buffer.virial, 9, 0.0);
  buffer.bad = kNoBadEntry;

  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = (frame * in.natoms + i) * in.neighbors;
    double center[width] = {};
    for (int64_t s = row; s < row + in.neighbors; ++s) {
      const int64_t j = in.list_neigh[s];
      if (j == -1) continue;
      if (j < 0 || j >= rows) {
        buffer.bad = first_of(buffer.bad, s);
        continue;
      }
      double g[3], r4[kColumns];
      pair_force(in.dE + 4 * s, in.Ri_d + 12 * s, g);
      load_r4<kColumns>(in.Rij, s, r4);
      add_outer<kColumns>(g, r4, center);
      add_outer<kColumns>(g, r4, sums + j * width);
      first = std::min(first, j);
      last = std::max(last, j + 1);
    }
    for (int a = 0; a < 3; ++a) {
      if (in.center)
        sums[i * width + a * kColumns + kColumns - 1] -= center[a * kColumns + kColumns - 1];
      for (int b = 0; b + 1 < kColumns; ++b) buffer.virial[3 * a + b] += center[a * kColumns + b];
    }
  }
  buffer.first = std::min(first, begin);
  buffer.last = std::max(last, end);
}

template <int kColumns, class Real>
void add_buffers(const Buffer* buffers, int64_t tasks, int64_t begin, int64_t end, int64_t offset,
                 const ForceOutputs<Real>& out) {
  for (int64_t j = begin; j < end; ++j) {
    double sum[3 * kColumns] = {};
    for (int64_t t = 0; t < tasks; ++t) {
      if (j < buffers[t].first || j >= buffers[t].last) continue;
      const double* part = buffers[t].sums.get() + j * 3 * kColumns;
      for (int k = 0; k < 3 * kColumns; ++k) sum[k] += part[k];
    }
    for (int a = 0; a < 3; ++a) {
      out.force[3 * (offset + j) + a] = Real(sum[a * kColumns + kColumns - 1]);
      for (int b = 0; b + 1 < kColumns; ++b)
        out.atom_virial[9 * (offset + j) + 3 * a + b] = Real(sum[a * kColumns + b]);
    }
  }
}

template <int kColumns, class Real, class Index>
int64_t force_columns(const ForceInputs<Real, Index>& in, const ForceOutputs<Real>& out) {
  const int64_t rows = in.natoms + in.nghost;
  const int64_t tasks = tasks_per_frame(in.natoms, in.neighbors);
  std::vector<Buffer> buffers(in.frames * tasks);
  at::parallel_for(0, in.frames * tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t part = t % tasks;
      sum_pairs<kColumns>(in, t / tasks, in.natoms * part / tasks, in.natoms * (part + 1) / tasks,
                          buffers[t]);
    }
  });

  constexpr int64_t kRowsPerTask = 512;
  const int64_t blocks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  at::parallel_for(0, in.frames * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t frame = t / blocks, block = t % blocks * kRowsPerTask;
      add_buffers<kColumns>(&buffers[frame * tasks], tasks, block,
                            std::min(block + kRowsPerTask, rows), frame * rows, out);
    }
  });

  int64_t bad = kNoBadEntry;
  for (int64_t frame = 0; frame < in.frames; ++frame) {
    double virial[9] = {};
    for (int64_t t = frame * tasks; t < (frame + 1) * tasks; ++t) {
      for (int k = 0; k < 9; ++k) virial[k] += buffers[t].virial[k];
      bad = first_of(bad, buffers[t].bad);
    }
    if (kColumns > 1) std::copy_n(virial, 9, out.virial + 9 * frame);
  }
  return bad;
}

template <int kColumns, class Real, class Index>
int64_t backward_columns(const ForceInputs<Real, Index>& in, const ForceUpstream<Real>& upstream,
                         const ForceGradients<Real>& out) {
  const int64_t rows = in.natoms + in.nghost;
  constexpr int64_t kSlotsPerTask = 1 << 13;
  const int64_t grain = std::max<int64_t>(1, kSlotsPerTask / std::max<int64_t>(in.neighbors, 1));
  const auto backward_atom = [&](int64_t atom) {
    const int64_t frame = atom / in.natoms, i = atom % in.natoms;
    const Real* gF = upstream.force ? upstream.force + frame * rows * 3 : nullptr;
    const Real* gAV = upstream.atom_virial ? upstream.atom_virial + frame * rows * 9 : nullptr;
    double gV[9] = {}, center[3] = {};
    if (upstream.virial) std::copy_n(upstream.virial + 9 * frame, 9, gV);
    if (gF && in.center) std::copy_n(gF + 3 * i, 3, center);
    int64_t bad = kNoBadEntry;
    for (int64_t s = atom * in.neighbors; s < (atom + 1) * in.neighbors; ++s) {
      const int64_t j = in.list_neigh[s];
      if (j < 0 || j >= rows) {
        if (j != -1) bad = first_of(bad, s);
        if (out.dE) std::fill_n(out.dE + 4 * s, 4, Real(0));
        if (out.Ri_d) std::fill_n(out.Ri_d + 12 * s, 12, Real(0));
        if (out.Rij) std::fill_n(out.Rij + 3 * s, 3, Real(0));
        continue;
      }
      double u[3 * kColumns], r4[kColumns], e[3];
      for (int a = 0; a < 3; ++a) {
        for (int b = 0; b + 1 < kColumns; ++b)
          u[a * kColumns + b] = gV[3 * a + b] + (gAV ? double(gAV[9 * j + 3 * a + b]) : 0.0);
        u[a * kColumns + kColumns - 1] = gF ? double(gF[3 * j + a]) : 0.0;
      }
      load_r4<kColumns>(in.Rij, s, r4);
      worth<kColumns>(u, r4, center, e);
      if (out.dE) gradient_dE(in.Ri_d + 12 * s, e, out.dE + 4 * s);
      if (out.Ri_d) gradient_Ri_d(in.dE + 4 * s, e, out.Ri_d + 12 * s);
      if (out.Rij) {
        double g[3];
        pair_force(in.dE + 4 * s, in.Ri_d + 12 * s, g);
        gradient_Rij<kColumns>(g, u, out.Rij + 3 * s);
      }
    }
    return bad;
  };
  return at::parallel_reduce(
      0, in.frames * in.natoms, grain, kNoBadEntry,
      [&](int64_t begin, int64_t end, int64_t bad) {
        for (int64_t atom = begin; atom < end; ++atom) bad = first_of(bad, backward_atom(atom));
        return bad;
      },
      first_of);
}

}  // namespace

template <class Real, class Index>
int64_t force_cpu(const ForceInputs<Real, Index>& in, const ForceOutputs<Real>& out) {
  return in.virial ? force_columns<4>(in, out) : force_columns<1>(in, out);
}

template <class Real, class Index>
int64_t force_backward_cpu(const ForceInputs<Real, Index>& in, const ForceUpstream<Real>& upstream,
                           const ForceGradients<Real>& out) {
  const bool virial = upstream.virial || upstream.atom_virial;
  return virial ? backward_columns<4>(in, upstream, out) : backward_columns<1>(in, upstream, out);
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
