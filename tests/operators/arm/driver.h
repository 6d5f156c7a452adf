// A program that calls one operator's CPU kernel, without PyTorch:
//
//   driver write FILE      writes the kernel's results for inputs that are equal on every machine
//   driver compare FILE    compares the results with those of another machine; the exit status is 1
//                          if a number differs by more than its tolerance
//
// The tolerance of a float64 is 1e-13, relative to itself or to the root mean square of its array.
// That of a float32 is an ulp of these. Integers must be equal.
//
// run() in an operator's file calls its kernels and passes their results to Results::add.
#pragma once

#include <calcops/operator.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace at {
int get_num_threads() { return 2; }  // for parallel.h: the kernel runs in two threads
}  // namespace at

namespace calcops {

class Results {
 public:
  explicit Results(const char* theirs) : compares_(theirs != nullptr) {
    if (theirs) file_.open(theirs, std::ios::binary);
  }

  template <class Number>
  void add(const std::string& name, const std::vector<Number>& numbers) {
    const int64_t size = sizeof(Number) * numbers.size();
    const std::string label = name + ' ' + std::to_string(size) + '\n';
    kept_.append(label).append(reinterpret_cast<const char*>(numbers.data()), size);
    if (!compares_) return;
    std::string theirs(label.size(), '\0');
    std::vector<Number> their_numbers(numbers.size());
    file_.read(theirs.data(), theirs.size());
    file_.read(reinterpret_cast<char*>(their_numbers.data()), size);
    if (!file_ || theirs != label) return fail(name, "is not what the file has: write it anew");
    compare(name, numbers, their_numbers);
  }

  // Prints a line about the comparison. Returns true if all numbers are within their tolerances.
  bool report() {
    if (file_.peek() != EOF) fail("the end", "is not that of the file: write it anew");
    std::printf("%lld numbers, %lld with other bits, %.2g of the bound apart at most\n",
                static_cast<long long>(count_), static_cast<long long>(other_bits_), worst_);
    return failures_ == 0;
  }

  const std::string& kept() const { return kept_; }

 private:
  template <class Number>
  void compare(const std::string& name, const std::vector<Number>& a,
               const std::vector<Number>& b) {
    double squares = 0;
    for (const Number x : b) squares += std::isfinite(double(x)) ? double(x) * double(x) : 0;
    const double typical = b.empty() ? 0 : std::sqrt(squares / b.size());
    const double tolerance = std::is_same_v<Number, double>  ? 1e-13
                             : std::is_same_v<Number, float> ? std::numeric_limits<float>::epsilon()
                                                             : 0;
    for (size_t k = 0; k < a.size(); ++k) {
      ++count_;
      if (std::memcmp(&a[k], &b[k], sizeof(Number)) == 0) continue;
      ++other_bits_;
      const double difference = std::abs(double(a[k]) - double(b[k]));
      const double part = difference / (tolerance * std::max(std::abs(double(b[k])), typical));
      if (difference == 0 || part <= 1)
        worst_ = std::max(worst_, difference == 0 ? 0 : part);
      else if (!(std::isnan(double(a[k])) && std::isnan(double(b[k]))))
        fail(name, '[' + std::to_string(k) + "]: " + text(a[k]) + ", not " + text(b[k]));
    }
  }

  template <class Number>
  static std::string text(Number number) {
    std::ostringstream out;
    out.precision(17);
    out << double(number);
    return out.str();
  }

  void fail(const std::string& name, const std::string& what) {
    constexpr int kMostLines = 10;
    if (++failures_ <= kMostLines) std::printf("%s %s\n", name.c_str(), what.c_str());
  }

  bool compares_;
  std::ifstream file_;
  std::string kept_;
  int64_t count_ = 0, other_bits_ = 0, failures_ = 0;
  double worst_ = 0;
};

// Random numbers that are equal on every machine.
class Random {
 public:
  int64_t below(int64_t count) { return int64_t(bits_() % uint64_t(count)); }
  double number() { return double(bits_() >> 11) * 0x1p-52 - 1; }  // from -1 to 1
  template <class Number>
  std::vector<Number> numbers(int64_t count) {
    std::vector<Number> drawn(count);
    for (Number& x : drawn) x = Number(number());
    return drawn;
  }

 private:
  std::mt19937_64 bits_{20};
};

template <class Number>
std::string type_name() {
  const char* kind = std::is_floating_point_v<Number> ? "float"
                     : std::is_signed_v<Number>       ? "int"
                                                      : "uint";
  return kind + std::to_string(8 * sizeof(Number));
}

// ---- the runtime's part: kernels register themselves, and are called by their number types
// --------

inline std::vector<KernelEntry>& registered_kernels() {
  static std::vector<KernelEntry> kernels;
  return kernels;
}
void add_kernel(const KernelEntry& kernel) { registered_kernels().push_back(kernel); }

// An argument of a kernel: a number, or a tensor that is the memory of a vector.
struct Argument {
  Slot slot{};
  Type type = Type::kNone;
  std::vector<int64_t> shape;

  template <class Number, class = std::enable_if_t<std::is_integral_v<Number>>>
  Argument(Number number) {
    slot.integer = int64_t(number);
  }
  Argument(double number) { slot.real = number; }
  template <class Number>
  Argument(const std::vector<Number>& numbers, std::vector<int64_t> shape_)
      : type(TypeOf<Number>::value), shape(std::move(shape_)) {
    slot.data = const_cast<Number*>(numbers.data());
  }
};

// Call the kernel of `op` for the arguments' types. Return the position of a wrong entry, or -1.
inline int64_t call(const std::string& op, std::vector<Argument> arguments) {
  for (const KernelEntry& kernel : registered_kernels()) {
    bool fits = op == kernel.op && kernel.count == int(arguments.size());
    for (int k = 0; fits && k < kernel.count; ++k)
      fits = kernel.parameters[k].type == arguments[k].type;
    if (!fits) continue;
    std::vector<Slot> slots;
    for (const Argument& argument : arguments) {
      slots.push_back(argument.slot);
      // Kernels of contiguous tensors do not read the strides.
      slots.back().shape = slots.back().stride = argument.shape.data();
    }
    return kernel.run(kernel.function, slots.data()).wrong;
  }
  std::fprintf(stderr, "%s has no kernel for these types\n", op.c_str());
  std::exit(2);
}

void run(Results& results);  // the operator's cases

}  // namespace calcops

int main(int count, char** words) {
  const std::string what = count == 3 ? words[1] : "";
  if (what != "write" && what != "compare") {
    std::fprintf(stderr, "usage: %s write|compare FILE\n", words[0]);
    return 2;
  }
  calcops::Results results(what == "compare" ? words[2] : nullptr);
  calcops::run(results);
  if (what == "compare") return results.report() ? 0 : 1;
  std::ofstream file(words[2], std::ios::binary);
  file << results.kept();
  return file.flush() ? 0 : 1;
}
