// The pairs within the cutoff among the slots of an atom, for CPU kernels.
#pragma once

#include <calcops/memory.h>
#include <calcops/operator.h>

namespace calcops {

// The pairs of an atom. Places beyond the last pair, up to a multiple of kPadding, have the numbers
// of the first one.
class Pairs {
 public:
  static constexpr int kPadding = 8;

  int64_t count = 0;

  explicit Pairs(int64_t slots)
      : size_(rounded(slots) + kPadding), numbers_(4 * size_), slot_(size_), kind_(size_) {}

  int64_t size() const { return size_; }
  int64_t padded_count() const { return rounded(count); }
  double* x(int c) const { return numbers_.get() + c * size_; }  // component c of their vectors
  double* square() const { return x(3); }                        // of the distance
  int64_t* slot() const { return slot_.get(); }
  int64_t* kind() const { return kind_.get(); }

 private:
  static int64_t rounded(int64_t n) { return (n + kPadding - 1) / kPadding * kPadding; }

  int64_t size_;
  Scratch<double> numbers_;
  Scratch<int64_t> slot_, kind_;
};

// Finds the pairs of an atom. The types of its arrays are known at run time, so that the kernels
// that use it are compiled once and not for each type.
class PairFinder {
 public:
  // The cutoffs are to be set.
  template <class Real, class Index>
  PairFinder(View<const Real, 3> d, View<const Index, 2> kind, int64_t kinds)
      : find_(find<Real, Index>),
        d_(d.data),
        kind_(kind.data),
        slots_(kind.shape[1]),
        kinds_(kinds),
        squares_(kinds + 2) {  // find reads that of kind 0, also if there is none
    squares_.get()[0] = 0;
  }

  bool have_one_cutoff = true;
  // The square of the cutoff of each kind.
  double* square_of_cutoff() const { return squares_.get() + 1; }

  // Set `pairs` to the filled slots of an atom within their cutoffs. Set `wrong` to the first slot
  // whose kind does not exist, unless an earlier atom has set it.
  void find(int64_t atom, Pairs& pairs, int64_t& wrong) const { find_(*this, atom, pairs, wrong); }

 private:
  // Defined in find_pairs.h.
  template <class Real, class Index>
  static void find(const PairFinder& all, int64_t atom, Pairs& pairs, int64_t& wrong);

  void (*find_)(const PairFinder& all, int64_t atom, Pairs& pairs, int64_t& wrong);
  const void *d_, *kind_;  // [n, K, 3] and [n, K]
  int64_t slots_, kinds_;
  Scratch<double> squares_;  // from kind -1 on
};

}  // namespace calcops
