// Cases for the CPU kernels of force.
#include "force/force.h"

#include "driver.h"

namespace calcops {
using namespace ops::force;

namespace {

struct Size {
  int64_t frames, natoms, nghost, neighbors;
};

template <class Real, class Index>
class Cases {
 public:
  Cases(Results& results, const Size& size)
      : results_(results),
        in_{size.frames, size.natoms, size.nghost, size.neighbors, true, true, {}, {}, {}, {}, {}},
        slots_(size.frames * size.natoms * size.neighbors),
        rows_(size.frames * (size.natoms + size.nghost)),
        name_(type_name<Real>() + ' ' + type_name<Index>() + ' ' + std::to_string(slots_)),
        list_(slots_),
        dE_(random_.numbers<Real>(4 * slots_)),
        Ri_d_(random_.numbers<Real>(12 * slots_)),
        Rij_(random_.numbers<Real>(3 * slots_)) {
    for (int64_t s = 0; s < slots_; ++s) {
      const bool is_empty = random_.below(3) == 0 || s % 97 < 8;
      list_[s] = is_empty ? -1 : Index(random_.below(size.natoms + size.nghost));
      if (!is_empty) continue;
      const Real nan = std::numeric_limits<Real>::quiet_NaN();  // never used
      std::fill_n(&dE_[4 * s], 4, nan);
      std::fill_n(&Ri_d_[12 * s], 12, nan);
      std::fill_n(&Rij_[3 * s], 3, nan);
    }
    in_.list_neigh = list_.data();
    in_.dE = dE_.data();
    in_.Ri_d = Ri_d_.data();
    in_.Rij = Rij_.data();
  }

  void run() {
    for (const bool center : {true, false})
      for (const bool virial : {true, false}) forward(center, virial);
    in_.center = true;
    for (const int upstream : {1, 2, 4, 7})
      for (const int wanted : {7, 1, 6}) backward(upstream, wanted);
    if (slots_ == 0) return;
    list_[slots_ / 2] = Index(in_.natoms + in_.nghost);
    forward(true, true);
  }

 private:
  void forward(bool center, bool virial) {
    in_.center = center;
    in_.virial = virial;
    std::vector<Real> force(3 * rows_), total(9 * in_.frames), of_atoms(9 * rows_);
    const int64_t bad = force_cpu(in_, {force.data(), total.data(), of_atoms.data()});
    const std::string name = name_ + (center ? " center" : "") + (virial ? " virial" : "");
    results_.add(name + " bad", std::vector<int64_t>{bad});
    if (bad >= 0) return;
    results_.add(name + " force", force);
    results_.add(name + " sum", total);
    results_.add(name + " of atoms", of_atoms);
  }

  void backward(int upstream, int wanted) {
    in_.virial = upstream & 6;
    const auto gF = random_.numbers<Real>(3 * rows_), gV = random_.numbers<Real>(9 * in_.frames),
               gAV = random_.numbers<Real>(9 * rows_);
    std::vector<Real> dE(4 * slots_), Ri_d(12 * slots_), Rij(3 * slots_);
    const int64_t bad =
        force_backward_cpu(in_,
                           {upstream & 1 ? gF.data() : nullptr, upstream & 2 ? gV.data() : nullptr,
                            upstream & 4 ? gAV.data() : nullptr},
                           {wanted & 1 ? dE.data() : nullptr, wanted & 2 ? Ri_d.data() : nullptr,
                            wanted & 4 && in_.virial ? Rij.data() : nullptr});
    const std::string name =
        name_ + " backward " + std::to_string(upstream) + std::to_string(wanted);
    results_.add(name + " bad", std::vector<int64_t>{bad});
    results_.add(name + " dE", dE);
    results_.add(name + " Ri_d", Ri_d);
    results_.add(name + " Rij", Rij);
  }

  Results& results_;
  Random random_;
  ForceInputs<Real, Index> in_;
  int64_t slots_, rows_;
  std::string name_;
  std::vector<Index> list_;
  std::vector<Real> dE_, Ri_d_, Rij_;
};

}  // namespace

void run(Results& results) {
  // Several tasks share a frame of the last case.
  for (const Size& size : {Size{1, 0, 0, 3}, {1, 1, 1, 1}, {3, 7, 2, 5}, {2, 150, 40, 61}}) {
    Cases<float, int32_t>(results, size).run();
    Cases<float, int64_t>(results, size).run();
    Cases<double, int32_t>(results, size).run();
    Cases<double, int64_t>(results, size).run();
  }
}

}  // namespace calcops
