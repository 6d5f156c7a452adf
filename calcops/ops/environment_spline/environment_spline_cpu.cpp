// CPU kernels of environment_spline. They collect the pairs of an atom, compute their numbers for
// vectors of pairs, and then add one pair after the other.
#include <calcops/memory.h>
#include <calcops/parallel.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "environment_spline/environment_spline.h"
#include "environment_spline/environment_spline_math.h"
#include "real_arrays.h"

namespace calcops::ops::environment_spline {
namespace {

constexpr int64_t kAtomsPerThread = 8;
constexpr int kSize = 8;  // pairs in a vector
typedef double Vector __attribute__((vector_size(8 * kSize)));
typedef int64_t Bits __attribute__((vector_size(8 * kSize)));

// The numbers of a pair.
enum Array {
  kX,
  kY,
  kZ,
  kSquare,   // r^2
  kS,        // s = w/r
  kSOverR,   // s/r
  kSOverRX,  // s/r times x, y and z
  kSOverRY,
  kSOverRZ,
  kSlopeOfS,       // (ds/dr)/r
  kSlopeOfSOverR,  // (d(s/r)/dr)/r
  kGridScale,      // the position in the grid is s * kGridScale + kGridShift
  kGridShift,
  kInCell,                 // the position within its cell, 0 to 1
  kWeights,                // the values of the cell's B-splines
  kSlopes = kWeights + 6,  // their derivatives
  kArrays = kSlopes + 6
};

// The numbers of kSize pairs.
struct alignas(64) Block {
  double numbers[kArrays][kSize];
  int64_t place[kSize];  // the first row of P to which the pair adds
  int64_t slot[kSize];
  int64_t kind[kSize];

  Vector& operator[](int array) { return *reinterpret_cast<Vector*>(numbers[array]); }
};

// One pair of a block.
struct Pair {
  Block& block;
  int lane;

  double& operator[](int array) const { return block.numbers[array][lane]; }
  int64_t& place() const { return block.place[lane]; }
  int64_t& slot() const { return block.slot[lane]; }
  int64_t& kind() const { return block.kind[lane]; }
};

// The pairs of an atom within the cutoff.
class Pairs {
 public:
  // Vectors compute all lanes of a block, also those without a pair. So all lanes get numbers.
  explicit Pairs(int64_t slots) : size_((slots + kSize - 1) / kSize), all_(size_) {
    for (int64_t b = 0; b < size_; ++b) {
      std::fill_n(all_.get()[b].numbers[0], kArrays * kSize, 1.0);
      std::fill_n(all_.get()[b].place, kSize, int64_t(0));
    }
  }

  uint64_t count = 0;

  Pair operator[](uint64_t j) const { return {all_.get()[j / kSize], int(j % kSize)}; }
  Block* begin() const { return all_.get(); }
  Block* end() const { return all_.get() + (count + kSize - 1) / kSize; }

 private:
  int64_t size_;
  Scratch<Block> all_;
};

// Return x^(-1/2) with a relative error of 1e-15. Newton's method begins with an estimate that is
// computed from the bits of x as an integer. GCC does not vectorise std::sqrt, which sets errno.
inline __attribute__((always_inline)) Vector inverse_root(const Vector& x) {
  const Bits estimate = 0x5FE6EB50C7B537A9 - (reinterpret_cast<Bits>(x) >> 1);
  Vector y = reinterpret_cast<Vector>(estimate);
  const Vector half = 0.5 * x;
  for (int step = 0; step < 4; ++step) y *= 1.5 - half * y * y;
  constexpr double kLeast = 1e-280;  // below it two atoms count as in one place
  return x < Vector{} + kLeast ? Vector{} + INFINITY : y;
}

// The inputs of a call, whose types are known at run time, and the constants that follow from them.
struct Call : SplineInputs<void, void> {
  // Set `pairs` to the filled slots of an atom within the cutoff. Set `wrong` to the first slot
  // whose kind does not exist, unless an earlier atom has set it.
  using Find = void (*)(const Call& call, int64_t atom, Pairs& pairs, int64_t& wrong);
  Find find;
  bool is_float32;  // Real is float, not double

  Cutoff cutoff;
  int64_t cells, rows;  // rows of P: kinds*functions
  Scratch<Kind> constants;

  template <class Real, class Index>
  explicit Call(const SplineInputs<Real, Index>& in);
  Call(const SplineInputs<void, void>& in, Find find_, bool is_float32_);
};

template <class Real, class Index>
void find(const Call& call, int64_t atom, Pairs& pairs, int64_t& wrong) {
  const int64_t begin = atom * call.slots;
  const Index* kind = static_cast<const Index*>(call.kind) + begin;
  // An Index, not an int64_t: a vector register compares more of the narrower numbers.
  const Index kinds = Index(std::min<int64_t>(call.kinds, std::numeric_limits<Index>::max()));
  int any_wrong = 0;
  for (int64_t s = 0; s < call.slots; ++s) any_wrong |= (kind[s] < -1) | (kind[s] >= kinds);
  for (int64_t s = 0; any_wrong && wrong == kNone; ++s)
    if (kind[s] < -1 || kind[s] >= kinds) wrong = begin + s;

  // Without branches, which the processor could not predict. Every slot is written to the next
  // pair, but only a filled one within the cutoff advances `count`.
  const Cutoff limit = call.cutoff;
  const int64_t slots = call.slots;
  const Real* d = static_cast<const Real*>(call.d) + 3 * begin;
  uint64_t count = 0;
  for (int64_t s = 0; s < slots; ++s, d += 3) {
    const double x = d[0], y = d[1], z = d[2], square = x * x + y * y + z * z;
    const Pair pair = pairs[count];
    pair[kX] = x, pair[kY] = y, pair[kZ] = z;
    pair[kSquare] = square;
    pair.slot() = begin + s;
    pair.kind() = kind[s];
    count += (kind[s] >= 0) & (kind[s] < kinds) & !limit.is_at_or_beyond(square);
  }
  pairs.count = count;
}

template <class Real, class Index>
Call::Call(const SplineInputs<Real, Index>& in)
    : Call({in.atoms, in.slots, in.kinds, in.functions, in.directions, in.d, in.kind, in.along,
            in.davg, in.dstd, in.grid, in.rcut_smth, in.rcut, in.spline},
           environment_spline::find<Real, Index>, sizeof(Real) == sizeof(float)) {}

Call::Call(const SplineInputs<void, void>& in, Find find_, bool is_float32_)
    : SplineInputs(in),
      find(find_),
      is_float32(is_float32_),
      cutoff{in.rcut_smth, in.rcut},
      cells(in.functions - (in.spline == Spline::kQuintic ? 5 : 3)),
      rows(in.kinds * in.functions),
      constants(in.kinds) {
  for (int64_t k = 0; k < kinds; ++k)
    constants.get()[k] = Kind(davg + 4 * k, dstd + 4 * k, grid + 2 * k, cells);
}

// Compute s = w/r and s/r of all pairs and, if kWithSlopes, their derivatives.
template <bool kWithSlopes>
void find_radial(const Cutoff& cutoff, const Pairs& pairs) {
  for (Block& block : pairs) {
    const Vector square = block[kSquare], inverse = inverse_root(square), r = square * inverse;
    constexpr int D = kWithSlopes ? 1 : 0;
    using N = Mixed<Vector, D>;
    N distance = constant<N>(r), one_over = constant<N>(inverse);
    if constexpr (kWithSlopes) {
      distance.slope = Vector{} + 1;
      one_over.slope = -inverse * inverse;
    }
    const Radial<N> f = radial<D, Vector>(distance, one_over, cutoff.rcut_smth, cutoff.rcut);
    block[kS] = *parts_of<const Vector>(&f.s);
    block[kSOverR] = *parts_of<const Vector>(&f.s_over_r);
    for (int c = 0; c < 3; ++c) block[kSOverRX + c] = block[kSOverR] * block[kX + c];
    if constexpr (kWithSlopes) {
      block[kSlopeOfS] = f.s.slope * inverse;
      block[kSlopeOfSOverR] = f.s_over_r.slope * inverse;
    }
  }
}

// Compute the place of each pair in P, and the B-splines at R[0] with, if kWithSlopes, their
// derivatives.
template <int kDegree, bool kWithSlopes>
void find_weights(const Call& call, const Pairs& pairs) {
  for (uint64_t j = 0; j < pairs.count; ++j) {
    const Pair pair = pairs[j];
    const Kind& kind = call.constants.get()[pair.kind()];
    pair[kGridScale] = kind.scale[0] * kind.cells_per_unit;
    pair[kGridShift] = -(kind.shift[0] + kind.begin) * kind.cells_per_unit;
    pair.place() = pair.kind() * call.functions;
  }
  const double cells = double(call.cells);
  Bits are_outside{};
  for (Block& block : pairs) {
    const Vector position = block[kS] * block[kGridScale] + block[kGridShift];
    const Vector inside = clamped<0, Vector>(position, 0, cells);
    are_outside |= inside != position;
    const Vector not_nan = inside == inside ? inside : Vector{};
    Bits cell = __builtin_convertvector(not_nan, Bits);
    cell = cell < call.cells - 1 ? cell : Bits{} + (call.cells - 1);
    reinterpret_cast<Bits&>(block.place) += cell;

    Vector w[kDegree + 1], slopes[kDegree + 1];
    block[kInCell] = inside - __builtin_convertvector(cell, Vector);
    basis<kDegree>(block[kInCell], w, kWithSlopes ? slopes : nullptr);
    for (int b = 0; b <= kDegree; ++b) {
      block[kWeights + b] = w[b];
      if (kWithSlopes) block[kSlopes + b] = slopes[b];
    }
  }

  // Outside the grid, the B-splines continue as straight lines.
  int64_t any_outside = 0;
  for (int lane = 0; lane < kSize; ++lane) any_outside |= are_outside[lane];
  for (uint64_t j = 0; any_outside && j < pairs.count; ++j) {
    const Pair pair = pairs[j];
    const double position = pair[kS] * pair[kGridScale] + pair[kGridShift];
    // The distance from the nearer end of the grid, negative before its beginning.
    const double beyond = position < 0 ? position : position > cells ? position - cells : 0;
    if (beyond == 0) continue;
    double w[kDegree + 1], slopes[kDegree + 1];
    basis<kDegree>(pair[kInCell], w, slopes);
    for (int b = 0; b <= kDegree; ++b) pair[kWeights + b] += beyond * slopes[b];
  }
}

inline Row row_of(const double* four) { return *reinterpret_cast<const Row*>(four); }

// Return the pair's row of the environment matrix.
inline __attribute__((always_inline)) Row environment_row(const Kind& kind, const Pair& pair) {
  const Row row{pair[kS], pair[kSOverRX], pair[kSOverRY], pair[kSOverRZ]};
  return row * row_of(kind.scale) - row_of(kind.shift);
}

// Return the numbers i, j, k and l of the eight in two rows.
template <int i, int j, int k, int l>
inline __attribute__((always_inline)) Row shuffled(const Row& a, const Row& b) {
#if __has_builtin(__builtin_shufflevector)  // GCC 12 and clang
  return __builtin_shufflevector(a, b, i, j, k, l);
#else
  typedef int64_t Places __attribute__((vector_size(32)));
  return __builtin_shuffle(a, b, Places{i, j, k, l});
#endif
}

// Transpose a matrix of four rows.
inline __attribute__((always_inline)) void transpose(Row* rows) {
  const Row even = shuffled<0, 4, 2, 6>(rows[0], rows[1]);
  const Row odd = shuffled<1, 5, 3, 7>(rows[0], rows[1]);
  const Row lower_even = shuffled<0, 4, 2, 6>(rows[2], rows[3]);
  const Row lower_odd = shuffled<1, 5, 3, 7>(rows[2], rows[3]);
  rows[0] = shuffled<0, 1, 4, 5>(even, lower_even);
  rows[1] = shuffled<0, 1, 4, 5>(odd, lower_odd);
  rows[2] = shuffled<2, 3, 6, 7>(even, lower_even);
  rows[3] = shuffled<2, 3, 6, 7>(odd, lower_odd);
}

// ---- P -----------------------------------------------------------------------------------------

template <int kDegree>
void add_pairs(const Kind* kinds, const Pairs& pairs, Row* P) {
  for (uint64_t j = 0; j < pairs.count; ++j) {
    const Pair pair = pairs[j];
    const Row R = environment_row(kinds[pair.kind()], pair);
    Row* to = P + pair.place();
#pragma GCC unroll 6
    for (int b = 0; b <= kDegree; ++b) to[b] += pair[kWeights + b] * R;
  }
}

// Write `count` rows as four columns, and set the rows to zero.
template <class Real>
void move_columns(Row* rows, int64_t count, Real* columns) {
  int64_t row = 0;
  for (; row + 4 <= count; row += 4) {
    Row four[4] = {rows[row], rows[row + 1], rows[row + 2], rows[row + 3]};
    transpose(four);
    for (int a = 0; a < 4; ++a)
      for (int l = 0; l < 4; ++l) columns[a * count + row + l] = Real(four[a][l]);
    for (int l = 0; l < 4; ++l) rows[row + l] = Row{};
  }
  for (; row < count; ++row) {
    for (int a = 0; a < 4; ++a) columns[a * count + row] = Real(rows[row][a]);
    rows[row] = Row{};
  }
}

// Add the derivatives along the D directions of each slot.
template <int kDegree, int D>
void add_derivatives(const Call& call, const Pairs& pairs, Row* P) {
  double directions[D][3];
  Row p[kDegree + 1];
  for (uint64_t j = 0; j < pairs.count; ++j) {
    const Pair pair = pairs[j];
    const double d[3] = {pair[kX], pair[kY], pair[kZ]};
    RealInput(call.along, call.is_float32).visit(3 * D * pair.slot(), [&](const auto* from) {
      std::copy_n(from, 3 * D, directions[0]);
    });
    const int64_t kind = pair.kind();
    const int64_t cell = derivative<kDegree, D>(call.constants.get()[kind], call.cutoff, call.cells,
                                                d, directions, reinterpret_cast<double*>(p));
    for (int b = 0; b <= kDegree; ++b) P[kind * call.functions + cell + b] += p[b];
  }
}

template <int kDegree, int D>
int64_t sum(const Call& call, const RealOutput& P) {
  return parallel_first(call.atoms, kAtomsPerThread, [&](int64_t begin, int64_t end) {
    Pairs pairs(call.slots);
    const Scratch<Row> rows(call.rows);
    std::fill_n(rows.get(), call.rows, Row{});
    int64_t wrong = kNone;
    for (int64_t atom = begin; atom < end; ++atom) {
      call.find(call, atom, pairs, wrong);
      if constexpr (D > 0) {
        add_derivatives<kDegree, D>(call, pairs, rows.get());
      } else {
        find_radial<false>(call.cutoff, pairs);
        find_weights<kDegree, false>(call, pairs);
        add_pairs<kDegree>(call.constants.get(), pairs, rows.get());
      }
      P.visit(4 * atom * call.rows,
              [&](auto* columns) { move_columns(rows.get(), call.rows, columns); });
    }
    return wrong;
  });
}

// ---- the gradient of <grad, P> -----------------------------------------------------------------

// Write four columns as `count` rows.
template <class Real>
void copy_columns(const Real* columns, int64_t count, Row* rows) {
  int64_t row = 0;
  for (; row + 4 <= count; row += 4) {
    Row four[4];
    for (int a = 0; a < 4; ++a) {
      const Real* column = columns + a * count + row;
      four[a] = Row{double(column[0]), double(column[1]), double(column[2]), double(column[3])};
    }
    transpose(four);
    for (int l = 0; l < 4; ++l) rows[row + l] = four[l];
  }
  for (; row < count; ++row)
    for (int a = 0; a < 4; ++a) rows[row][a] = columns[a * count + row];
}

inline __attribute__((always_inline)) double sum_of(const Row& v) {
  return (v[0] + v[2]) + (v[1] + v[3]);
}

template <int kDegree>
void differentiate_pairs(const Call& call, const Pairs& pairs, const Row* grad,
                         const RealOutput& grad_d) {
  for (uint64_t j = 0; j < pairs.count; ++j) {
    const Pair pair = pairs[j];
    const Row* from = grad + pair.place();
    Row of_R{}, of_weights{};
#pragma GCC unroll 6
    for (int b = 0; b <= kDegree; ++b) {
      of_R += pair[kWeights + b] * from[b];
      of_weights += pair[kSlopes + b] * from[b];
    }
    const Kind& kind = call.constants.get()[pair.kind()];
    of_R[0] += sum_of(of_weights * environment_row(kind, pair)) * kind.cells_per_unit;
    of_R *= row_of(kind.scale);
    const Row d{0, pair[kX], pair[kY], pair[kZ]};
    const double of_r = of_R[0] * pair[kSlopeOfS] + sum_of(of_R * d) * pair[kSlopeOfSOverR];
    const Row of_d = of_r * d + pair[kSOverR] * of_R;
    grad_d.visit(3 * pair.slot(), [&](auto* to) {
      for (int c = 0; c < 3; ++c) to[c] = of_d[c + 1];
    });
  }
}

// The upstream gradients of a kind.
struct Upstream {
  const Row* rows;
  double operator()(int64_t row, int a) const { return rows[row][a]; }
};

}  // namespace

// Where GCC inlines this instance, it fuses other products with sums, which changes the last bits.
template __attribute__((noinline)) void gradient<5, 2>(const Kind&, const Cutoff&, int64_t,
                                                       const double*, const double (*)[3],
                                                       const Upstream&, double*);

namespace {

// Write the gradient of the derivatives along D directions.
template <int kDegree, int D>
void differentiate_derivatives(const Call& call, const Pairs& pairs, const Row* grad,
                               const RealOutput& grad_d) {
  double directions[D][3], of_d[3];
  for (uint64_t j = 0; j < pairs.count; ++j) {
    const Pair pair = pairs[j];
    const double d[3] = {pair[kX], pair[kY], pair[kZ]};
    RealInput(call.along, call.is_float32).visit(3 * D * pair.slot(), [&](const auto* from) {
      std::copy_n(from, 3 * D, directions[0]);
    });
    const Upstream upstream{grad + pair.kind() * call.functions};
    gradient<kDegree, D>(call.constants.get()[pair.kind()], call.cutoff, call.cells, d, directions,
                         upstream, of_d);
    grad_d.visit(3 * pair.slot(), [&](auto* to) { std::copy_n(of_d, 3, to); });
  }
}

template <int kDegree, int D>
int64_t differentiate(const Call& call, const RealInput& grad, const RealOutput& grad_d) {
  return parallel_first(call.atoms, kAtomsPerThread, [&](int64_t begin, int64_t end) {
    Pairs pairs(call.slots);
    const Scratch<Row> rows(call.rows);
    int64_t wrong = kNone;
    for (int64_t atom = begin; atom < end; ++atom) {
      grad.visit(4 * atom * call.rows,
                 [&](const auto* columns) { copy_columns(columns, call.rows, rows.get()); });
      grad_d.set_zero(3 * atom * call.slots, 3 * call.slots);
      call.find(call, atom, pairs, wrong);
      if constexpr (D > 0) {
        differentiate_derivatives<kDegree, D>(call, pairs, rows.get(), grad_d);
      } else {
        find_radial<true>(call.cutoff, pairs);
        find_weights<kDegree, true>(call, pairs);
        differentiate_pairs<kDegree>(call, pairs, rows.get(), grad_d);
      }
    }
    return wrong;
  });
}

template <int value>
using Constant = std::integral_constant<int, value>;

// Call f(degree, D) for the splines and the directions of a call.
template <class F>
int64_t choose(const Call& call, const F& f) {
  const auto of_directions = [&](auto D) {
    return call.spline == Spline::kQuintic ? f(Constant<5>(), D) : f(Constant<3>(), D);
  };
  if (call.directions == 0) return of_directions(Constant<0>());
  if (call.directions == 1) return of_directions(Constant<1>());
  return call.directions == 2 ? of_directions(Constant<2>()) : of_directions(Constant<3>());
}

int64_t sum(const Call& call, const RealOutput& P) {
  return choose(call, [&](auto degree, auto D) { return sum<degree(), D()>(call, P); });
}

int64_t differentiate(const Call& call, const RealInput& grad, const RealOutput& grad_d) {
  return choose(call, [&](auto degree, auto D) -> int64_t {
    if constexpr (D() < kMostDirections)
      return differentiate<degree(), D()>(call, grad, grad_d);
    else
      return kNone;  // refused in environment_spline.cpp
  });
}

}  // namespace

template <class Real, class Index>
int64_t environment_spline_cpu(const SplineInputs<Real, Index>& in, Real* P) {
  return sum(Call(in), P);
}

template <class Real, class Index>
int64_t environment_spline_backward_cpu(const SplineInputs<Real, Index>& in, const Real* grad,
                                        Real* grad_d) {
  return differentiate(Call(in), grad, grad_d);
}

#define INSTANTIATE(Real, Index)                                                                  \
  template int64_t environment_spline_cpu(const SplineInputs<Real, Index>&, Real*);               \
  template int64_t environment_spline_backward_cpu(const SplineInputs<Real, Index>&, const Real*, \
                                                   Real*);
INSTANTIATE(float, int32_t)
INSTANTIATE(float, int64_t)
INSTANTIATE(double, int32_t)
INSTANTIATE(double, int64_t)
#undef INSTANTIATE

}  // namespace calcops::ops::environment_spline
