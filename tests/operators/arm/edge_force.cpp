// Cases for the CPU kernels of edge_force.
#include "edge_force/edge_force.h"

#include <algorithm>

#include "driver.h"

namespace calcops {
using namespace ops::edge_force;

namespace {

struct Size {
  int64_t atoms, edges, frames;
};

template <class Real, class Index>
class Cases {
 public:
  Cases(Results& results, const Size& size, bool by_center)
      : results_(results),
        in_{size.atoms, size.edges, size.frames, true, {}, {}, {}, {}, {}},
        name_(type_name<Real>() + ' ' + type_name<Index>() + ' ' + std::to_string(size.edges)),
        edges_(2 * size.edges),
        gradient_(random_.numbers<Real>(3 * size.edges)),
        vec_(random_.numbers<Real>(3 * size.edges)),
        batch_(size.atoms) {
    for (int64_t atom = 0; atom < size.atoms; ++atom) batch_[atom] = random_.below(size.frames);
    for (Index& end : edges_) end = Index(random_.below(size.atoms));
    if (by_center) std::sort(edges_.begin(), edges_.begin() + size.edges);
    name_ += by_center ? " by center" : "";
    for (int64_t e = 3; e < size.edges; e += 5) {
      edges_[e + size.edges * random_.below(2)] = -1;
      const Real nan = std::numeric_limits<Real>::quiet_NaN();  // never used
      std::fill_n(&gradient_[3 * e], 3, nan);
      std::fill_n(&vec_[3 * e], 3, nan);
    }
    in_.edge_index = edges_.data();
    in_.edge_gradient = gradient_.data();
    in_.edge_vec = vec_.data();
  }

  void run() {
    for (const bool in_batches : {true, false}) {
      in_.batch = in_batches ? batch_.data() : nullptr;
      for (const bool virial : {true, false}) forward(virial);
      for (const int upstream : {1, 2, 4, 7}) backward(upstream);
    }
    if (in_.edges == 0) return;
    edges_[in_.edges / 2] = Index(in_.atoms);
    forward(true);
  }

 private:
  void forward(bool virial) {
    in_.virial = virial;
    std::vector<Real> force(3 * in_.atoms), total(9 * in_.frames), of_atoms(9 * in_.atoms);
    const int64_t bad = edge_force_cpu(in_, {force.data(), total.data(), of_atoms.data()});
    const std::string name = name_ + (in_.batch ? " batch" : "") + (virial ? " virial" : "");
    results_.add(name + " bad", std::vector<int64_t>{bad});
    if (bad >= 0) return;
    results_.add(name + " force", force);
    results_.add(name + " sum", total);
    results_.add(name + " of atoms", of_atoms);
  }

  void backward(int upstream) {
    in_.virial = upstream & 6;
    const auto gF = random_.numbers<Real>(3 * in_.atoms),
               gV = random_.numbers<Real>(9 * in_.frames),
               gAV = random_.numbers<Real>(9 * in_.atoms);
    std::vector<Real> gradient(3 * in_.edges), vec(3 * in_.edges);
    const int64_t bad = edge_force_backward_cpu(
        in_,
        {upstream & 1 ? gF.data() : nullptr, upstream & 2 ? gV.data() : nullptr,
         upstream & 4 ? gAV.data() : nullptr},
        {gradient.data(), in_.virial ? vec.data() : nullptr});
    const std::string name =
        name_ + (in_.batch ? " batch" : "") + " backward " + std::to_string(upstream);
    results_.add(name + " bad", std::vector<int64_t>{bad});
    results_.add(name + " edge_gradient", gradient);
    results_.add(name + " edge_vec", vec);
  }

  Results& results_;
  Random random_;
  EdgeInputs<Real, Index> in_;
  std::string name_;
  std::vector<Index> edges_;
  std::vector<Real> gradient_, vec_;
  std::vector<int64_t> batch_;
};

template <class Real, class Index>
void run_cases(Results& results) {
  // Two tasks share the last case.
  for (const Size& size : {Size{3, 0, 1}, {2, 1, 1}, {150, 999, 4}, {200, 9000, 3}})
    for (const bool by_center : {true, false}) Cases<Real, Index>(results, size, by_center).run();
}

}  // namespace

void run(Results& results) {
  run_cases<float, int32_t>(results);
  run_cases<float, int64_t>(results);
  run_cases<double, int32_t>(results);
  run_cases<double, int64_t>(results);
}

}  // namespace calcops
