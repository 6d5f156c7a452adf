// CPU kernels of environment_spline. They collect the pairs of an atom, compute their numbers for
// vectors of pairs, and then add one pair after the other.
#include <calcops/either.h>
#include <calcops/memory.h>
#include <calcops/parallel.h>

#include <algorithm>
#include <type_traits>

#include "environment_spline/environment_spline.h"
#include "environment_spline/environment_spline_math.h"
#include "find_pairs.h"

namespace calcops::ops::environment_spline {
namespace {

constexpr int64_t kAtomsPerThread = 8;
constexpr int kSize = Pairs::kPadding;  // pairs in a vector
typedef double Vector __attribute__((vector_size(8 * kSize)));
typedef int64_t Bits __attribute__((vector_size(8 * kSize)));

// The numbers of a pair beside those of Pairs.
enum Array {
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

  Vector& operator[](int array) { return *reinterpret_cast<Vector*>(numbers[array]); }
};

// One pair of a block.
struct Pair {
  Block& block;
  int lane;

  double& operator[](int array) const { return block.numbers[array][lane]; }
  int64_t& place() const { return block.place[lane]; }
};

// The pairs of an atom within the cutoff, with their numbers.
class Neighbours : public Pairs {
 public:
  explicit Neighbours(int64_t slots) : Pairs(slots), blocks_(size() / kSize) {}

  Pair operator[](uint64_t j) const { return {blocks_.get()[j / kSize], int(j % kSize)}; }
  Block* begin() const { return blocks_.get(); }
  Block* end() const { return blocks_.get() + padded_count() / kSize; }

 private:
  Scratch<Block> blocks_;
};

// The inputs of a call, whose types are known at run time, and the constants that follow from them.
struct Call {
  int64_t atoms, slots, functions, directions;
  Reals along;
  PairFinder finder;
  Cutoff cutoff;
  Spline spline;
  int64_t cells, rows;  // rows of P: kinds*functions
  Scratch<Kind> constants;

  template <class Real, class Index>
  explicit Call(const SplineInputs<Real, Index>& in)
      : atoms(in.atoms()),
        slots(in.slots()),
        functions(in.functions),
        directions(in.directions()),
        along(in.along.data),
        finder(in.d, in.kind, in.kinds()),
        cutoff{in.rcut_smth, in.rcut},
        spline(in.spline),
        cells(in.functions - (in.spline == Spline::kQuintic ? 5 : 3)),
        rows(in.kinds() * in.functions),
        constants(in.kinds()) {
    std::fill_n(finder.square_of_cutoff(), in.kinds(), in.rcut * in.rcut);
    for (int64_t k = 0; k < in.kinds(); ++k)
      constants.get()[k] =
          Kind(in.davg.data + 4 * k, in.dstd.data + 4 * k, in.grid.data + 2 * k, cells);
  }
};

// Compute s = w/r and s/r of all pairs and, if kWithSlopes, their derivatives.
template <bool kWithSlopes>
void find_radial(const Cutoff& cutoff, const Neighbours& pairs) {
  int64_t first = 0;
  for (Block& block : pairs) {
    const auto square = load<Vector>(pairs.square() + first);
    const Vector inverse = inverse_root(square), r = square * inverse;
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
    for (int c = 0; c < 3; ++c)
      block[kSOverRX + c] = block[kSOverR] * load<Vector>(pairs.x(c) + first);
    if constexpr (kWithSlopes) {
      block[kSlopeOfS] = f.s.slope * inverse;
      block[kSlopeOfSOverR] = f.s_over_r.slope * inverse;
    }
    first += kSize;
  }
}

// Compute the place of each pair in P, and the B-splines at R[0] with, if kWithSlopes, their
// derivatives.
template <int kDegree, bool kWithSlopes>
void find_weights(const Call& call, const Neighbours& pairs) {
  for (int64_t j = 0; j < pairs.padded_count(); ++j) {
    const Pair pair = pairs[j];
    const int64_t number = pairs.kind()[j];
    const Kind& kind = call.constants.get()[number];
    pair[kGridScale] = kind.scale[0] * kind.cells_per_unit;
    pair[kGridShift] = -(kind.shift[0] + kind.begin) * kind.cells_per_unit;
    pair.place() = number * call.functions;
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
  for (int64_t j = 0; any_outside && j < pairs.count; ++j) {
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

// ---- P -----------------------------------------------------------------------------------------

template <int kDegree>
void add_pairs(const Kind* kinds, const Neighbours& pairs, Row* P) {
  for (int64_t j = 0; j < pairs.count; ++j) {
    const Pair pair = pairs[j];
    const Row R = environment_row(kinds[pairs.kind()[j]], pair);
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
void add_derivatives(const Call& call, const Neighbours& pairs, Row* P) {
  double directions[D][3];
  Row p[kDegree + 1];
  for (int64_t j = 0; j < pairs.count; ++j) {
    const double d[3] = {pairs.x(0)[j], pairs.x(1)[j], pairs.x(2)[j]};
    call.along.visit(3 * D * pairs.slot()[j],
                     [&](const auto* from) { std::copy_n(from, 3 * D, directions[0]); });
    const int64_t kind = pairs.kind()[j];
    const int64_t cell = derivative<kDegree, D>(call.constants.get()[kind], call.cutoff, call.cells,
                                                d, directions, reinterpret_cast<double*>(p));
    for (int b = 0; b <= kDegree; ++b) P[kind * call.functions + cell + b] += p[b];
  }
}

template <int kDegree, int D>
int64_t sum(const Call& call, const RealResults& P) {
  return parallel_first(call.atoms, kAtomsPerThread, [&](int64_t begin, int64_t end) {
    Neighbours pairs(call.slots);
    const Scratch<Row> rows(call.rows);
    std::fill_n(rows.get(), call.rows, Row{});
    int64_t wrong = kNone;
    for (int64_t atom = begin; atom < end; ++atom) {
      call.finder.find(atom, pairs, wrong);
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

template <int kDegree>
void differentiate_pairs(const Call& call, const Neighbours& pairs, const Row* grad,
                         const RealResults& grad_d) {
  for (int64_t j = 0; j < pairs.count; ++j) {
    const Pair pair = pairs[j];
    const Row* from = grad + pair.place();
    Row of_R{}, of_weights{};
#pragma GCC unroll 6
    for (int b = 0; b <= kDegree; ++b) {
      of_R += pair[kWeights + b] * from[b];
      of_weights += pair[kSlopes + b] * from[b];
    }
    const Kind& kind = call.constants.get()[pairs.kind()[j]];
    of_R[0] += sum_of(of_weights * environment_row(kind, pair)) * kind.cells_per_unit;
    of_R *= row_of(kind.scale);
    const Row d{0, pairs.x(0)[j], pairs.x(1)[j], pairs.x(2)[j]};
    const double of_r = of_R[0] * pair[kSlopeOfS] + sum_of(of_R * d) * pair[kSlopeOfSOverR];
    const Row of_d = of_r * d + pair[kSOverR] * of_R;
    grad_d.visit(3 * pairs.slot()[j], [&](auto* to) {
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
void differentiate_derivatives(const Call& call, const Neighbours& pairs, const Row* grad,
                               const RealResults& grad_d) {
  double directions[D][3], of_d[3];
  for (int64_t j = 0; j < pairs.count; ++j) {
    const double d[3] = {pairs.x(0)[j], pairs.x(1)[j], pairs.x(2)[j]};
    call.along.visit(3 * D * pairs.slot()[j],
                     [&](const auto* from) { std::copy_n(from, 3 * D, directions[0]); });
    const Upstream upstream{grad + pairs.kind()[j] * call.functions};
    gradient<kDegree, D>(call.constants.get()[pairs.kind()[j]], call.cutoff, call.cells, d,
                         directions, upstream, of_d);
    grad_d.visit(3 * pairs.slot()[j], [&](auto* to) { std::copy_n(of_d, 3, to); });
  }
}

template <int kDegree, int D>
int64_t differentiate(const Call& call, const Reals& grad, const RealResults& grad_d) {
  return parallel_first(call.atoms, kAtomsPerThread, [&](int64_t begin, int64_t end) {
    Neighbours pairs(call.slots);
    const Scratch<Row> rows(call.rows);
    int64_t wrong = kNone;
    for (int64_t atom = begin; atom < end; ++atom) {
      grad.visit(4 * atom * call.rows,
                 [&](const auto* columns) { copy_columns(columns, call.rows, rows.get()); });
      grad_d.set_zero(3 * atom * call.slots, 3 * call.slots);
      call.finder.find(atom, pairs, wrong);
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

template <class Real, class Index>
int64_t environment_spline(SplineInputs<Real, Index> in, View<Real, 4> P) {
  const Call call(in);
  return choose(call,
                [&](auto degree, auto D) { return sum<degree(), D()>(call, RealResults(P.data)); });
}

template <class Real, class Index>
int64_t environment_spline_backward(View<const Real, 4> grad, SplineInputs<Real, Index> in,
                                    View<Real, 3> grad_d) {
  const Call call(in);
  return choose(call, [&](auto degree, auto D) -> int64_t {
    if constexpr (D() < kMostDirections)
      return differentiate<degree(), D()>(call, Reals(grad.data), RealResults(grad_d.data));
    else
      return kNone;  // refused in environment_spline.cpp
  });
}

const Kernel kCpu("_environment_spline_along", environment_spline<float, int32_t>,
                  environment_spline<float, int64_t>, environment_spline<double, int32_t>,
                  environment_spline<double, int64_t>);
const Kernel kBackwardCpu("_environment_spline_backward",
                          environment_spline_backward<float, int32_t>,
                          environment_spline_backward<float, int64_t>,
                          environment_spline_backward<double, int32_t>,
                          environment_spline_backward<double, int64_t>);

}  // namespace
}  // namespace calcops::ops::environment_spline
