// CPU kernel of screened_repulsion.
#include <calcops/operator.h>
#include <calcops/parallel.h>

#include "screened_repulsion/screened_repulsion_math.h"

namespace calcops::ops::screened_repulsion {
namespace {

template <class Real>
int64_t repulsion(View<const Real, 3> d, View<const int64_t, 2> kind, View<const Real, 2> table,
                  View<Real, 1> energy, View<Real, 3> grad) {
  constexpr int64_t kGrain = 64;  // atoms for which another thread pays
  const int64_t slots = kind.shape[1], kinds = table.shape[0];
  return parallel_first(kind.shape[0], kGrain, [&](int64_t begin, int64_t end) {
    int64_t wrong = kNone;
    for (int64_t i = begin; i < end; ++i) {
      double sum = 0;
      for (int64_t slot = i * slots; slot < (i + 1) * slots; ++slot) {
        Real* const grad_of_pair = grad.data + 3 * slot;
        const int64_t k = kind.data[slot];
        if (uint64_t(k) < uint64_t(kinds)) {
          add_pair(table.data + kNumbers * k, d.data + 3 * slot, sum, grad_of_pair);
          continue;
        }
        grad_of_pair[0] = grad_of_pair[1] = grad_of_pair[2] = 0;
        if (k != -1) wrong = first_of(wrong, slot);
      }
      energy(i) = Real(sum);
    }
    return wrong;
  });
}

const Kernel kCpu("screened_repulsion", repulsion<float>, repulsion<double>);

}  // namespace
}  // namespace calcops::ops::screened_repulsion
