// CPU kernel of screened_repulsion.
#include <calcops/parallel.h>

#include "screened_repulsion/screened_repulsion.h"
#include "screened_repulsion/screened_repulsion_math.h"

namespace calcops::ops::screened_repulsion {

template <class Real>
int64_t screened_repulsion_cpu(const Pairs<Real>& in, const Repulsion<Real>& out) {
  constexpr int64_t kGrain = 64;  // atoms for which another thread pays
  return parallel_first(in.atoms, kGrain, [&](int64_t begin, int64_t end) {
    int64_t wrong = kNone;
    for (int64_t i = begin; i < end; ++i) {
      double energy = 0;
      for (int64_t slot = i * in.slots; slot < (i + 1) * in.slots; ++slot) {
        Real* const grad = out.grad + 3 * slot;
        const int64_t kind = in.kind[slot];
        if (uint64_t(kind) < uint64_t(in.kinds)) {
          add_pair(in.table + kNumbers * kind, in.d + 3 * slot, energy, grad);
          continue;
        }
        grad[0] = grad[1] = grad[2] = 0;
        if (kind != -1) wrong = first_of(wrong, slot);
      }
      out.energy[i] = Real(energy);
    }
    return wrong;
  });
}

template int64_t screened_repulsion_cpu(const Pairs<float>&, const Repulsion<float>&);
template int64_t screened_repulsion_cpu(const Pairs<double>&, const Repulsion<double>&);

}  // namespace calcops::ops::screened_repulsion
