// CPU kernels of environment_spline: the pairs of an atom first, some steps for vectors of them, then
// one after the other.
#include <algorithm>
#include <cstring>

#include "environment_spline/environment_spline.h"
#include "environment_spline/environment_spline_math.h"
#include "memory.h"
#include "parallel.h"

namespace calcops::ops::environment_spline {
namespace {

constexpr int64_t kAtomsPerThread = 8;
constexpr int kSize = 8;  // of a vector of pairs
typedef double Vector __attribute__((vector_size(8 * kSize)));

// The pairs of an atom within the cutoff; arrays by pair, which end with a whole vector.
class Pairs {
 public:
  static constexpr int kArrays = 10, kWeights = 12;

  explicit Pairs(int64_t slots)
      : size_((slots + kSize - 1) / kSize * kSize),
        arrays_(kArrays * size_),
        rows_(4 * size_),
        weights_(kWeights * size_),
        places_(size_),
        slots_(size_),
        kinds_(size_) {
    std::fill_n(arrays_.get(), kArrays * size_, 1.0);
  }

  int64_t count = 0;

  double* x() { return array(0); }
  double* y() { return array(1); }
  double* z() { return array(2); }
  double* square() { return array(3); }
  double* inverse() { return array(4); }
  double* s() { return array(5); }
  double* over() { return array(6); }
  double* slope_of_s() { return array(7); }
  double* slope_of_over() { return array(8); }
  double* position() { return array(9); }  // within the cell
  double* row(int64_t j) { return rows_.get() + 4 * j; }
  double* weights(int b) { return weights_.get() + b * size_; }
  double* slopes(int b) { return weights(b + kWeights / 2); }
  // The first row of P that a pair adds to, its slot and kind.
  int64_t* places() { return places_.get(); }
  int64_t* slots() { return slots_.get(); }
  int64_t* kinds() { return kinds_.get(); }

 private:
  double* array(int i) { return arrays_.get() + i * size_; }

  int64_t size_;
  Scratch<double> arrays_, rows_, weights_;
  Scratch<int64_t> places_, slots_, kinds_;
};

Vector& vector_at(double* array, int64_t j) { return *reinterpret_cast<Vector*>(array + j); }

// Of vectors, which std::sqrt is not for while it has to set errno.
#ifndef __clang__
__attribute__((optimize("no-math-errno")))
#endif
void take_inverse_roots(const double* __restrict x, int64_t count, double* __restrict root) {
  for (int64_t j = 0; j < count; ++j) root[j] = 1 / std::sqrt(x[j]);
}

// What a call computes with.
template <class Real, class Index>
struct Call {
  const SplineInputs<Real, Index>& in;
  Cutoff cutoff;
  int64_t cells, rows;  // rows of P: kinds*functions
  Scratch<Kind> kinds;

  explicit Call(const SplineInputs<Real, Index>& given)
      : in(given),
        cutoff{in.rcut_smth, in.rcut},
        cells(in.functions - (in.spline == Spline::kQuintic ? 5 : 3)),
        rows(in.kinds * in.functions),
        kinds(in.kinds) {
    for (int64_t k = 0; k < in.kinds; ++k)
      kinds.get()[k] = Kind(in.davg + 4 * k, in.dstd + 4 * k, in.grid + 2 * k, cells);
  }

  // The filled slots of an atom within the cutoff. `wrong` gets the first slot whose kind does not
  // exist.
  void find(int64_t atom, Pairs& pairs, int64_t& wrong) const {
    double *x = pairs.x(), *y = pairs.y(), *z = pairs.z(), *square = pairs.square();
    int64_t *slots = pairs.slots(), *kinds = pairs.kinds(), count = 0;
    const int64_t begin = atom * in.slots;
    const Index* kind = in.kind + begin;
    const Index kinds_end = Index(in.kinds);
    int any_wrong = 0;
    for (int64_t s = 0; s < in.slots; ++s) any_wrong |= (kind[s] < -1) | (kind[s] >= kinds_end);
    for (int64_t s = 0; any_wrong && wrong == kNone; ++s)
      if (kind[s] < -1 || kind[s] >= kinds_end) wrong = begin + s;

    // Without branches, which could not be foreseen: what is not wanted is written over.
    const Cutoff limit = cutoff;
    for (int64_t s = 0; s < in.slots; ++s) {
      const Real* d = in.d + 3 * (begin + s);
      const double dx = d[0], dy = d[1], dz = d[2], r2 = dx * dx + dy * dy + dz * dz;
      x[count] = dx, y[count] = dy, z[count] = dz;
      square[count] = r2;
      slots[count] = begin + s;
      kinds[count] = kind[s];
      count += (kind[s] >= 0) & (kind[s] < kinds_end) & !limit.ends_before(r2);
    }
    pairs.count = count;
  }
};

// w/r and w/r^2 of all pairs, and their slopes along r.
template <bool kSlopes>
void find_radial(const Cutoff& cutoff, Pairs& pairs) {
  take_inverse_roots(pairs.square(), pairs.count, pairs.inverse());
  for (int64_t j = 0; j < pairs.count; j += kSize) {
    const Vector inverse = vector_at(pairs.inverse(), j), r = vector_at(pairs.square(), j) * inverse;
    if constexpr (kSlopes) {
      const Series<Vector, 2> along{{r, Vector{} + 1}}, one_over{{inverse, -inverse * inverse}};
      const auto f = radial(along, one_over, cutoff.rcut_smth, cutoff.rcut);
      vector_at(pairs.s(), j) = f.s.c[0];
      vector_at(pairs.over(), j) = f.over.c[0];
      vector_at(pairs.slope_of_s(), j) = f.s.c[1];
      vector_at(pairs.slope_of_over(), j) = f.over.c[1];
    } else {
      const auto f = radial(Series<Vector, 1>{{r}}, Series<Vector, 1>{{inverse}},
                            cutoff.rcut_smth, cutoff.rcut);
      vector_at(pairs.s(), j) = f.s.c[0];
      vector_at(pairs.over(), j) = f.over.c[0];
    }
  }
}

// Rows of the environment matrix, and weights of the B-splines at their first numbers.
template <int kDegree, bool kSlopes, class Real, class Index>
void find_rows_and_weights(const Call<Real, Index>& call, Pairs& pairs) {
  const double cells = double(call.cells);
  bool is_outside = false;
  for (int64_t j = 0; j < pairs.count; ++j) {
    const Kind& kind = call.kinds.get()[pairs.kinds()[j]];
    double* R = pairs.row(j);
    R[0] = pairs.s()[j] * kind.slope[0] - kind.shift[0];
    R[1] = pairs.over()[j] * pairs.x()[j] * kind.slope[1] - kind.shift[1];
    R[2] = pairs.over()[j] * pairs.y()[j] * kind.slope[2] - kind.shift[2];
    R[3] = pairs.over()[j] * pairs.z()[j] * kind.slope[3] - kind.shift[3];
    const double position = (R[0] - kind.begin) * kind.per_width;
    const double inside = position < 0 ? 0 : position > cells ? cells : position;
    const double cell = cell_of(inside, cells);
    is_outside |= inside < position || inside > position;
    pairs.position()[j] = inside - cell;
    pairs.places()[j] = pairs.kinds()[j] * call.in.functions + int64_t(cell);
  }
  for (int64_t j = 0; j < pairs.count; j += kSize) {
    Vector w[kDegree + 1], slopes[kDegree + 1];
    basis<kDegree>(vector_at(pairs.position(), j), w, kSlopes ? slopes : nullptr);
    for (int b = 0; b <= kDegree; ++b) {
      vector_at(pairs.weights(b), j) = w[b];
      if (kSlopes) vector_at(pairs.slopes(b), j) = slopes[b];
    }
  }
  if (!is_outside) return;
  for (int64_t j = 0; j < pairs.count; ++j) {
    const Kind& kind = call.kinds.get()[pairs.kinds()[j]];
    const double position = (pairs.row(j)[0] - kind.begin) * kind.per_width;
    const double beyond = position < 0 ? position : position > cells ? position - cells : 0;
    double w[kDegree + 1], slopes[kDegree + 1];
    basis<kDegree>(pairs.position()[j], w, slopes);
    for (int b = 0; b <= kDegree; ++b) pairs.weights(b)[j] += beyond * slopes[b];
  }
}

// ---- P -------------------------------------------------------------------------------------------

template <int kDegree>
void add_pairs(Pairs& pairs, Row* P) {
  for (int64_t j = 0; j < pairs.count; ++j) {
    const Row R = *reinterpret_cast<const Row*>(pairs.row(j));
    Row* to = P + pairs.places()[j];
#pragma GCC unroll 6
    for (int b = 0; b <= kDegree; ++b) to[b] += pairs.weights(b)[j] * R;
  }
}

// Along the directions of each slot.
template <int kDegree, class Real, class Index>
void add_derivatives(const Call<Real, Index>& call, Pairs& pairs, Row* P) {
  const int64_t count = call.in.directions;
  double directions[kMostDirections][3];
  Row p[kDegree + 1];
  for (int64_t j = 0; j < pairs.count; ++j) {
    const double d[3] = {pairs.x()[j], pairs.y()[j], pairs.z()[j]};
    std::copy_n(call.in.along + 3 * count * pairs.slots()[j], 3 * count, directions[0]);
    const int64_t kind = pairs.kinds()[j];
    const int64_t cell =
        derivative<kDegree>(call.kinds.get()[kind], call.cutoff, call.cells, d, directions,
                            int(count), reinterpret_cast<double*>(p));
    for (int b = 0; b <= kDegree; ++b) P[kind * call.in.functions + cell + b] += p[b];
  }
}

template <int kDegree, class Real, class Index>
int64_t sum(const Call<Real, Index>& call, Real* P) {
  return parallel_first(call.in.atoms, kAtomsPerThread, [&](int64_t begin, int64_t end) {
    Pairs pairs(call.in.slots);
    const Scratch<Row> rows(call.rows);
    int64_t wrong = kNone;
    for (int64_t atom = begin; atom < end; ++atom) {
      std::fill_n(rows.get(), call.rows, Row{});
      call.find(atom, pairs, wrong);
      if (call.in.directions > 0) {
        add_derivatives<kDegree>(call, pairs, rows.get());
      } else {
        find_radial<false>(call.cutoff, pairs);
        find_rows_and_weights<kDegree, false>(call, pairs);
        add_pairs<kDegree>(pairs, rows.get());
      }
      Real* to = P + 4 * atom * call.rows;
      for (int64_t row = 0; row < call.rows; ++row)
        for (int a = 0; a < 4; ++a) to[a * call.rows + row] = Real(rows.get()[row][a]);
    }
    return wrong;
  });
}

// ---- its gradient --------------------------------------------------------------------------------

inline double sum_of(Row v) { return (v[0] + v[2]) + (v[1] + v[3]); }

template <int kDegree, class Real, class Index>
void differentiate_pairs(const Call<Real, Index>& call, Pairs& pairs, const Row* grad,
                         Real* grad_d) {
  for (int64_t j = 0; j < pairs.count; ++j) {
    const Row* from = grad + pairs.places()[j];
    Row of_R{}, of_weights{};
#pragma GCC unroll 6
    for (int b = 0; b <= kDegree; ++b) {
      of_R += pairs.weights(b)[j] * from[b];
      of_weights += pairs.slopes(b)[j] * from[b];
    }
    const Kind& kind = call.kinds.get()[pairs.kinds()[j]];
    const Row R = *reinterpret_cast<const Row*>(pairs.row(j));
    of_R[0] += sum_of(of_weights * R) * kind.per_width;
    of_R *= *reinterpret_cast<const Row*>(kind.slope);
    const Row d{0, pairs.x()[j], pairs.y()[j], pairs.z()[j]};
    const double of_r =
        of_R[0] * pairs.slope_of_s()[j] + sum_of(of_R * d) * pairs.slope_of_over()[j];
    const Row of_d = of_r * pairs.inverse()[j] * d + pairs.over()[j] * of_R;
    for (int c = 0; c < 3; ++c) grad_d[3 * pairs.slots()[j] + c] = Real(of_d[c + 1]);
  }
}

// The component c is the derivative along it.
template <int kDegree, class Real, class Index>
void differentiate_derivatives(const Call<Real, Index>& call, Pairs& pairs, const Row* grad,
                               Real* grad_d) {
  const int64_t count = call.in.directions;
  double directions[kMostDirections][3];
  Row p[kDegree + 1];
  for (int64_t j = 0; j < pairs.count; ++j) {
    const double d[3] = {pairs.x()[j], pairs.y()[j], pairs.z()[j]};
    std::copy_n(call.in.along + 3 * count * pairs.slots()[j], 3 * count, directions[0]);
    const int64_t kind = pairs.kinds()[j];
    for (int c = 0; c < 3; ++c) {
      for (int other = 0; other < 3; ++other) directions[count][other] = other == c;
      const int64_t cell =
          derivative<kDegree>(call.kinds.get()[kind], call.cutoff, call.cells, d, directions,
                              int(count + 1), reinterpret_cast<double*>(p));
      Row total{};
      for (int b = 0; b <= kDegree; ++b)
        total += p[b] * grad[kind * call.in.functions + cell + b];
      grad_d[3 * pairs.slots()[j] + c] = Real(sum_of(total));
    }
  }
}

template <int kDegree, class Real, class Index>
int64_t differentiate(const Call<Real, Index>& call, const Real* grad, Real* grad_d) {
  return parallel_first(call.in.atoms, kAtomsPerThread, [&](int64_t begin, int64_t end) {
    Pairs pairs(call.in.slots);
    const Scratch<Row> rows(call.rows);
    int64_t wrong = kNone;
    for (int64_t atom = begin; atom < end; ++atom) {
      const Real* from = grad + 4 * atom * call.rows;
      for (int64_t row = 0; row < call.rows; ++row)
        for (int a = 0; a < 4; ++a) rows.get()[row][a] = from[a * call.rows + row];
      std::fill_n(grad_d + 3 * atom * call.in.slots, 3 * call.in.slots, Real(0));
      call.find(atom, pairs, wrong);
      if (call.in.directions > 0) {
        differentiate_derivatives<kDegree>(call, pairs, rows.get(), grad_d);
        continue;
      }
      find_radial<true>(call.cutoff, pairs);
      find_rows_and_weights<kDegree, true>(call, pairs);
      differentiate_pairs<kDegree>(call, pairs, rows.get(), grad_d);
    }
    return wrong;
  });
}

}  // namespace

template <class Real, class Index>
int64_t environment_spline_cpu(const SplineInputs<Real, Index>& in, Real* P) {
  const Call<Real, Index> call(in);
  return in.spline == Spline::kQuintic ? sum<5>(call, P) : sum<3>(call, P);
}

template <class Real, class Index>
int64_t environment_spline_backward_cpu(const SplineInputs<Real, Index>& in, const Real* grad,
                                        Real* grad_d) {
  const Call<Real, Index> call(in);
  return in.spline == Spline::kQuintic ? differentiate<5>(call, grad, grad_d)
                                       : differentiate<3>(call, grad, grad_d);
}

#define INSTANTIATE(Real, Index)                                                              \
  template int64_t environment_spline_cpu(const SplineInputs<Real, Index>&, Real*);           \
  template int64_t environment_spline_backward_cpu(const SplineInputs<Real, Index>&,          \
                                                   const Real*, Real*);
INSTANTIATE(float, int32_t)
INSTANTIATE(float, int64_t)
INSTANTIATE(double, int32_t)
INSTANTIATE(double, int64_t)
#undef INSTANTIATE

}  // namespace calcops::ops::environment_spline
