// The CPU kernel of the gradients of force, virial and per-atom virial.
#include <calcops/memory.h>
#include <calcops/parallel.h>

#include <algorithm>

#include "force/force.h"
#include "force/force_math.h"
#include "force/force_slots.h"

namespace calcops::ops::force {
namespace {

// Numbers of U (force_math.h) for one atom. Without a virial's gradient these are gF and a fourth
// number, which fills the register.
template <bool kVirial>
constexpr int64_t kUpstream = kVirial ? 12 : 4;

// Write U of every atom of every frame.
template <bool kVirial, class Real, class Index>
void pack_upstream(const ForceInputs<Real, Index>& in, const ForceUpstream<Real>& upstream,
                   double* packed) {
  const int64_t rows = in.natoms + in.nghost;
  parallel_for(in.frames * rows, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      double* u = packed + row * kUpstream<kVirial>;
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
}

// Write the gradients of one centre atom's slots. Return the first slot with a wrong entry.
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
  int64_t bad = kNone;
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
  const Scratch<double> packed(in.frames * (in.natoms + in.nghost) * kUpstream<kVirial>);
  pack_upstream<kVirial>(in, upstream, packed.get());
  const int64_t slots = in.frames * in.natoms * in.neighbors;
  prefer_large_pages(out.dE, 4 * slots);
  prefer_large_pages(out.Ri_d, 12 * slots);
  prefer_large_pages(out.Rij, 3 * slots);
  constexpr int64_t kSlotsPerTask = 1 << 13;
  const int64_t grain = std::max<int64_t>(1, kSlotsPerTask / std::max<int64_t>(in.neighbors, 1));
  return parallel_first(in.frames * in.natoms, grain, [&](int64_t begin, int64_t end) {
    int64_t bad = kNone;
    for (int64_t atom = begin; atom < end; ++atom)
      bad = first_of(bad, backward_atom<kVirial>(in, packed.get(), atom, out));
    return bad;
  });
}

}  // namespace

template <class Real, class Index>
int64_t force_backward_cpu(const ForceInputs<Real, Index>& in, const ForceUpstream<Real>& upstream,
                           const ForceGradients<Real>& out) {
  const bool virial = upstream.virial || upstream.atom_virial;
  return virial ? backward_of<true>(in, upstream, out) : backward_of<false>(in, upstream, out);
}

#define INSTANTIATE(Real, Index)                                                                   \
  template int64_t force_backward_cpu(const ForceInputs<Real, Index>&, const ForceUpstream<Real>&, \
                                      const ForceGradients<Real>&);
INSTANTIATE(float, int32_t)
INSTANTIATE(float, int64_t)
INSTANTIATE(double, int32_t)
INSTANTIATE(double, int64_t)
#undef INSTANTIATE

}  // namespace calcops::ops::force
