// CPU kernel of density_net. Threads share blocks of atoms. The invariants of a block are computed
// for all its atoms and functions together, then each atom has its net.
#include <calcops/memory.h>
#include <calcops/parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "density_net/density_net.h"

namespace calcops::ops::density_net {
namespace {

constexpr int64_t kLanes = 128;  // numbers of a row of A in a block, about
constexpr int kRows = 4;         // rows of weights that one pass over the neurons takes

// The tanh of 0 <= x, exact to a few roundings also where it is small. GCC vectorizes it, other
// than that of the C library. tanh x = e / (e + 2) with e = exp(2x) - 1 = 2^k (exp(r) - 1) + 2^k -
// 1, where 2x = k log 2 + r.
inline double tanh_of(double x) {
  const double y = std::min(2 * std::fabs(x), 44.0);  // the tanh is 1 beyond 22
  constexpr double kLog2High = 0x1.62e42fefa3800p-1, kLog2Low = 0x1.ef35793c76730p-45;
  constexpr double kRound = 0x1.8p52;  // adding it rounds to an integer in the last bits
  const double shifted = y * 0x1.71547652b82fep+0 + kRound;
  const double k = shifted - kRound;
  const double r = (y - k * kLog2High) - k * kLog2Low;  // |r| <= log(2) / 2
  double series = 1.0 / 6227020800;                     // r^13 / 13!
  series = series * r + 1.0 / 479001600;
  series = series * r + 1.0 / 39916800;
  series = series * r + 1.0 / 3628800;
  series = series * r + 1.0 / 362880;
  series = series * r + 1.0 / 40320;
  series = series * r + 1.0 / 5040;
  series = series * r + 1.0 / 720;
  series = series * r + 1.0 / 120;
  series = series * r + 1.0 / 24;
  series = series * r + 1.0 / 6;
  series = series * r + 0.5;
  series = series * r * r + r;
  int64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52;  // of 2^k: the shift drops what kRound has above the integer
  double power;
  std::memcpy(&power, &bits, sizeof power);
  const double e = power * series + (power - 1);
  return std::copysign(e / (e + 2), x);
}

template <class Real>
class Block {
 public:
  explicit Block(const Call<Real>& call)
      : call_(call),
        atoms_(std::max<int64_t>(1, kLanes / std::max<int64_t>(1, call.functions()))),
        A_((call.harmonics() + 1) * atoms_ * call.functions()),
        grad_A_((call.harmonics() + 1) * atoms_ * call.functions()),
        q_((call.invariants() + 1) * atoms_ * call.functions()),
        grad_q_((call.invariants() + 1) * atoms_ * call.functions()),
        hidden_(call.neurons()) {}

  int64_t atoms() const { return atoms_; }

  void compute(int64_t begin, int64_t end) {
    begin_ = begin;
    lanes_ = (end - begin) * call_.functions();
    for (int64_t h = 0; h < call_.harmonics(); ++h)
      std::copy_n(call_.A.data + (h * call_.atoms() + begin) * call_.functions(), lanes_,
                  A_.get() + h * lanes_);
    std::fill_n(q_.get(), call_.invariants() * lanes_, 0.0);
    for (int64_t term = 0; term < call_.terms(); ++term) add_term(term);
    for (int64_t i = begin; i < end; ++i) compute_net(i);
    std::fill_n(grad_A_.get(), call_.harmonics() * lanes_, 0.0);
    for (int64_t term = 0; term < call_.terms(); ++term) add_gradients(term);
    for (int64_t h = 0; h < call_.harmonics(); ++h)
      for (int64_t i = begin; i < end; ++i) write_gradients(h, i);
  }

 private:
  // The rows of a block that a term multiplies, and their number.
  int rows_of(int64_t term, int64_t rows[kFactors]) const {
    int count = 0;
    for (int f = 0; f < kFactors; ++f)
      if (call_.factors.data[kFactors * term + f] >= 0)
        rows[count++] = call_.factors.data[kFactors * term + f];
    return count;
  }

  void add_term(int64_t term) {
    int64_t rows[kFactors];
    const int count = rows_of(term, rows);
    const double* factors[kFactors];
    for (int f = 0; f < count; ++f) factors[f] = A_.get() + rows[f] * lanes_;
    double* const q = q_.get() + call_.invariant(term) * lanes_;
    add_product(q, call_.coefficient(term), factors, count);
  }

  // Each factor's gradient is the product of the others and of the invariant's gradient.
  void add_gradients(int64_t term) {
    int64_t rows[kFactors];
    const int count = rows_of(term, rows);
    for (int factor = 0; factor < count; ++factor) {
      const double* factors[kFactors] = {grad_q_.get() + call_.invariant(term) * lanes_};
      int others = 1;
      for (int f = 0; f < count; ++f)
        if (f != factor) factors[others++] = A_.get() + rows[f] * lanes_;
      double* const grad = grad_A_.get() + rows[factor] * lanes_;
      add_product(grad, call_.coefficient(term), factors, others);
    }
  }

  // Add c times the product of rows to a row.
  void add_product(double* to, double c, const double* const factors[], int count) const {
    const double *a = factors[0], *b = factors[1], *d = factors[2], *e = factors[3];
    if (count == 0)
      for (int64_t x = 0; x < lanes_; ++x) to[x] += c;
    if (count == 1)
      for (int64_t x = 0; x < lanes_; ++x) to[x] += c * a[x];
    if (count == 2)
      for (int64_t x = 0; x < lanes_; ++x) to[x] += c * a[x] * b[x];
    if (count == 3)
      for (int64_t x = 0; x < lanes_; ++x) to[x] += c * a[x] * b[x] * d[x];
    if (count == 4)
      for (int64_t x = 0; x < lanes_; ++x) to[x] += c * a[x] * b[x] * d[x] * e[x];
  }

  // The sums of a row that is no atom may be NaN, and so would be their gradients.
  void write_gradients(int64_t h, int64_t i) const {
    Real* const to = call_.grad_A.data + (h * call_.atoms() + i) * call_.functions();
    if (call_.net(i) < 0) {
      std::fill_n(to, call_.functions(), Real(0));
      return;
    }
    const double* const from = grad_A_.get() + h * lanes_ + (i - begin_) * call_.functions();
    for (int64_t f = 0; f < call_.functions(); ++f) to[f] = Real(from[f]);
  }

  void compute_net(int64_t i) {
    const int64_t t = call_.net(i), first = (i - begin_) * call_.functions();
    Real* const grad_radial = call_.grad_radial.data + i * call_.radials();
    if (t < 0) {
      call_.energy(i) = 0;
      std::fill_n(grad_radial, call_.radials(), Real(0));
      return;
    }
    const int64_t K = call_.neurons();
    double* const hidden = hidden_.get();
    for (int64_t k = 0; k < K; ++k) hidden[k] = -call_.b0.data[t * K + k];
    const Real* const w_radial = call_.w_radial.data + t * call_.radials() * K;
    const Real* const w_angular =
        call_.w_angular.data + t * call_.invariants() * call_.functions() * K;
    add_layer(call_.radial.data + i * call_.radials(), w_radial, call_.radials());
    for (int64_t p = 0; p < call_.invariants(); ++p)
      add_layer(q_.get() + p * lanes_ + first, w_angular + p * call_.functions() * K,
                call_.functions());

    const Real* const w1 = call_.w1.data + t * K;
    double energy = -call_.bias(t);
#pragma omp simd
    for (int64_t k = 0; k < K; ++k) hidden[k] = tanh_of(hidden[k]);
    for (int64_t k = 0; k < K; ++k) energy += w1[k] * hidden[k];
    for (int64_t k = 0; k < K; ++k) hidden[k] = w1[k] * (1 - hidden[k] * hidden[k]);
    call_.energy(i) = Real(energy);

    take_back(w_radial, call_.radials(), grad_radial);
    for (int64_t p = 0; p < call_.invariants(); ++p)
      take_back(w_angular + p * call_.functions() * K, call_.functions(),
                grad_q_.get() + p * lanes_ + first);
  }

  // Add x @ weights to the hidden layer, for `count` numbers x.
  template <class Number>
  void add_layer(const Number* x, const Real* weights, int64_t count) {
    const int64_t K = call_.neurons();
    double* const hidden = hidden_.get();
    for (; count >= kRows; count -= kRows, x += kRows, weights += kRows * K) {
      const double a = x[0], b = x[1], c = x[2], d = x[3];
#pragma omp simd
      for (int64_t k = 0; k < K; ++k)
        hidden[k] +=
            a * weights[k] + b * weights[K + k] + c * weights[2 * K + k] + d * weights[3 * K + k];
    }
    for (; count > 0; --count, ++x, weights += K) {
      const double a = x[0];
#pragma omp simd
      for (int64_t k = 0; k < K; ++k) hidden[k] += a * weights[k];
    }
  }

  // Write weights @ (the gradients of the hidden layer), `count` numbers.
  template <class Number>
  void take_back(const Real* weights, int64_t count, Number* to) const {
    const int64_t K = call_.neurons();
    const double* const hidden = hidden_.get();
    for (; count >= kRows; count -= kRows, to += kRows, weights += kRows * K) {
      double a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
      for (int64_t k = 0; k < K; ++k) {
        a += hidden[k] * weights[k], b += hidden[k] * weights[K + k];
        c += hidden[k] * weights[2 * K + k], d += hidden[k] * weights[3 * K + k];
      }
      to[0] = Number(a), to[1] = Number(b), to[2] = Number(c), to[3] = Number(d);
    }
    for (; count > 0; --count, ++to, weights += K) {
      double a = 0;
#pragma omp simd reduction(+ : a)
      for (int64_t k = 0; k < K; ++k) a += hidden[k] * weights[k];
      to[0] = Number(a);
    }
  }

  const Call<Real>& call_;
  const int64_t atoms_;
  const Scratch<double> A_, grad_A_, q_, grad_q_, hidden_;  // [H or P, lanes_], and [K]
  int64_t begin_ = 0, lanes_ = 0;
};

template <class Real>
int64_t wrong_entry(const Call<Real>& call) {
  const int64_t numbers = kFactors * call.terms();
  for (int64_t i = 0; i < call.atoms(); ++i)
    if (call.net(i) < -1 || call.net(i) >= call.nets()) return i;
  for (int64_t f = 0; f < numbers; ++f)
    if (call.factors.data[f] < -1 || call.factors.data[f] >= call.harmonics())
      return call.atoms() + f;
  for (int64_t term = 0; term < call.terms(); ++term)
    if (uint64_t(call.invariant(term)) >= uint64_t(call.invariants()))
      return call.atoms() + numbers + term;
  return kNone;
}

template <class Real>
int64_t density_net(Call<Real> call) {
  const int64_t wrong = wrong_entry(call);
  if (wrong != kNone) return wrong;
  const int64_t size = Block<Real>(call).atoms();
  parallel_for((call.atoms() + size - 1) / size, 1, [&](int64_t begin, int64_t end) {
    Block<Real> block(call);
    for (int64_t b = begin; b < end; ++b)
      block.compute(b * size, std::min(b * size + size, call.atoms()));
  });
  return kNone;
}

const Kernel kCpu("density_net", density_net<float>, density_net<double>);

}  // namespace
}  // namespace calcops::ops::density_net
