// Reads contracts into structs. contracts/README.md describes their language.
// contract_proofs.h proves what these structs promise.
//
// Every character of a clause is consumed by the grammar below, one function for each clause.
// Otherwise the contract is refused with the line, the clause and the nearest legal form.
#pragma once

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "calcops/operator.h"

namespace calcops {
namespace contract {

// The most lines and the most sizes of a contract, and the most parameters of a kernel. Sets of
// sizes are bits of a uint32_t.
constexpr size_t kMost = 24;
// The most dimensions of a tensor.
constexpr size_t kMostDimensions = 8;

// A Sum is a sum of Products of sizes, such as n + 2*nghost. A size is its number in Text::sizes.
// The sizes of a product are sorted.
struct Product {
  int64_t factor;
  std::vector<int> sizes;
};
using Sum = std::vector<Product>;
using Shape = std::vector<Sum>;

// Return the size if a sum is one size alone, otherwise -1.
inline int bare(const Sum& sum) {
  const bool is_bare = sum.size() == 1 && sum[0].factor == 1 && sum[0].sizes.size() == 1;
  return is_bare ? sum[0].sizes[0] : -1;
}

inline uint32_t sizes_of(const Sum& sum) {
  uint32_t sizes = 0;
  for (const Product& product : sum)
    for (const int size : product.sizes) sizes |= 1u << size;
  return sizes;
}

inline uint32_t sizes_of(const Shape& shape) {
  uint32_t sizes = 0;
  for (const Sum& dim : shape) sizes |= sizes_of(dim);
  return sizes;
}

enum class Compare { kLess, kAtMost, kMore, kAtLeast };

// `> 0` or `<= 2^40`
struct Bound {
  Compare compare;
  int64_t integer = 0;
  double real = 0;
  std::string text{};  // the number, as written
  bool whole = true;   // an integer
};

// `n*K < 2^32 on CUDA` or `cells >= 1`
struct Limit {
  Sum sum;
  Bound bound;
  std::string text;
  bool on_cuda = false;
};

// `entries -1 or 0 <= j < n + nghost at frame, atom, slot`
struct Entries {
  std::string text, bound;             // up to ` at `, and what follows `<`
  bool may_be_none = false;            // -1 is allowed
  Sum below;                           // the upper bound
  std::vector<std::string> positions;  // names of the last dimensions
};

// The line of one argument or result.
struct Line {
  std::string name;
  std::string text;                  // as written, for help()
  int number = 0;                    // of the line in the contract
  std::vector<std::string> clauses;  // the kind of each: "shape", "dtype" ...

  // Tensors
  std::vector<Shape> shapes;
  std::string shape_text;
  bool any_shape = false;  // `[...]`
  int whole = -1;          // `with K = T*M`: the size K
  Sum parts;               // and the product T*M
  std::vector<Type> types;
  std::string type_text;
  Type read_as = Type::kNone;  // `read as`: the type that kernels receive
  std::string like;            // `like x`
  int group = -1;              // the line whose dtypes it has: its own or that of `like`
  bool is_constant = false;    // it has no derivative
  bool has_entries = false;
  Entries entries;
  std::vector<Limit> limits;

  // Numbers, strings and lists
  int size = -1;  // the size that an integer is
  std::vector<Bound> bounds;
  std::vector<std::string> choices;  // the allowed strings

  bool is_tensor() const { return any_shape || !shapes.empty(); }
};

enum class Kind { kTensor, kInt, kFloat, kBool, kString, kInts, kFloats, kMask, kOther };

struct Argument {
  std::string name, type;  // `type` for errors
  Kind kind = Kind::kOther;
  int length = 0;  // of the type bool[3]; otherwise 0
  bool optional = false, has_default = false;
};

// name(arguments) -> results, and the text below it. The Prover adds the arguments and results.
struct Schema {
  std::string text, name, summary, details;
  int number = 0;
  std::vector<Argument> arguments, results;
};

struct Text {
  std::vector<Schema> schemas;
  std::vector<Line> lines;
  std::vector<std::string> sizes;
  std::vector<std::string> joined;  // sizes along which vmap concatenates its items
  int vmap_number = 0;              // of this line; 0: there is none

  // Return the number of the line with a name, or -1.
  int line(const std::string& name) const {
    for (size_t i = 0; i < lines.size(); ++i)
      if (lines[i].name == name) return int(i);
    return -1;
  }

  // Return the number of the size with a name, or -1.
  int size(const std::string& name) const {
    const auto known = std::find(sizes.begin(), sizes.end(), name);
    return known == sizes.end() ? -1 : int(known - sizes.begin());
  }
};

// An error in a contract.
struct Mistake : std::runtime_error {
  Mistake(int number, const std::string& what)
      : std::runtime_error("line " + std::to_string(number) + ": " + what) {}
};

// In the order of Type.
constexpr const char* kTypeNames[] = {"",        "bool",     "uint8",   "uint16",
                                      "int8",    "int16",    "int32",   "int64",
                                      "float16", "bfloat16", "float32", "float64"};

inline Type type_named(const std::string& name) {
  const auto known = std::find(std::begin(kTypeNames) + 1, std::end(kTypeNames), name);
  return known == std::end(kTypeNames) ? Type::kNone : Type(known - std::begin(kTypeNames));
}

inline std::string name_of(Type type) { return kTypeNames[int(type)]; }

inline bool is_floating(Type type) { return type >= Type::kFloat16; }

class Reader {
 public:
  explicit Reader(const std::string& text) : source_(text + "\n"), limit_(source_.size()) {}

  Text read() {
    while (at_ < source_.size()) {
      const std::string line = source_.substr(at_, line_end(at_) - at_);
      name_.clear();
      clause_ = std::string::npos;
      limit_ = source_.size();
      if (is_blank(line)) {
        at_ = line_end(at_) + 1;
      } else if (is_space(line[0])) {
        fail("expected a schema or the name of an argument at the line's beginning");
      } else {
        line[std::min(line.find_first_of(" ("), line.size() - 1)] == '(' ? read_schema()
                                                                         : read_entry();
      }
    }
    if (text_.schemas.empty()) fail("expected a schema, such as twice(Tensor x) -> Tensor");
    return std::move(text_);
  }

 private:
  struct Token {
    enum Kind { kEnd, kName, kNumber, kString, kSign } kind;
    std::string text;
    size_t begin, end;  // positions in the source
  };

  // ---- errors -----------------------------------------------------------------------------------

  int line_number(size_t position) const {
    return 1 + int(std::count(source_.begin(), source_.begin() + std::min(position, limit_), '\n'));
  }

  [[noreturn]] void fail(const std::string& what, const std::string& advice = "") const {
    const std::string clause = clause_text();
    throw Mistake(line_number(at_), (name_.empty() ? "" : "`" + name_ + "`: ") + what +
                                        (clause.empty() ? "" : " in `" + clause + "`" + advice));
  }

  // Raise an error for the next token. Within a clause, quote it and the nearest legal form.
  [[noreturn]] void expected(const std::string& what) const {
    size_t end = std::min(at_, limit_);
    if (end < limit_ && !is_space(source_[end])) ++end;
    if (end < limit_ && source_[end] == '=') ++end;  // of <= and >=
    // The rest of a word, or of a character of several bytes.
    while (end < limit_ && ((is_name_part(source_[end - 1]) && is_name_part(source_[end])) ||
                            (source_[end] & 0xc0) == 0x80))
      ++end;
    const std::string got = source_.substr(at_, end - at_);
    std::string error = "expected " + what + ", got ";
    error += got.empty() || is_blank(got) ? "the end" : "`" + got + "`";
    fail(error, std::string("\n  legal: ") + form_);
  }

  // Return the clause that is being read, up to its semicolon or full stop.
  std::string clause_text() const {
    bool in_string = false;
    size_t end = clause_;
    for (; end < limit_; ++end) {  // npos: no clause is read
      if (source_[end] == '"') in_string = !in_string;
      if (!in_string && (source_[end] == ';' || is_stop(end))) break;
    }
    return clause_ < limit_ ? joined(source_.substr(clause_, end - clause_)) : "";
  }

  // ---- tokens -----------------------------------------------------------------------------------

  static bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)); }
  static bool is_capital(char c) { return std::isupper(static_cast<unsigned char>(c)); }
  static bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)); }
  static bool is_name_part(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
  }
  static bool is_blank(const std::string& text) {
    return std::all_of(text.begin(), text.end(), is_space);
  }

  // Return text with single spaces instead of line ends and indentation.
  static std::string joined(const std::string& text) {
    std::string line;
    for (const char c : text)
      if (!is_space(c))
        line += c;
      else if (!line.empty() && line.back() != ' ')
        line += ' ';
    while (!line.empty() && line.back() == ' ') line.pop_back();
    return line;
  }

  size_t line_end(size_t from) const { return std::min(source_.find('\n', from), source_.size()); }

  // Return whether the full stop that ends the clauses is at a position.
  bool is_stop(size_t at) const {
    return source_[at] == '.' && (at + 1 >= limit_ || is_space(source_[at + 1]));
  }

  // Advance to the next token and return it. It is not consumed.
  Token peek() {
    while (at_ < limit_ && is_space(source_[at_])) ++at_;
    size_t end = at_;
    const auto token = [&](Token::Kind kind) {
      return Token{kind, source_.substr(at_, end - at_), at_, end};
    };
    if (at_ == limit_ || (clause_ != std::string::npos && is_stop(at_))) return token(Token::kEnd);
    if (is_digit(source_[at_])) {
      while (is_digit(source_[end]) || (source_[end] == '.' && is_digit(source_[end + 1]))) ++end;
      return token(Token::kNumber);
    }
    if (is_name_part(source_[at_])) {
      while (end < limit_ && is_name_part(source_[end])) ++end;
      return token(Token::kName);
    }
    if (source_[at_] == '"') {
      end = source_.find_first_of("\"\n", at_ + 1);
      if (end >= limit_ || source_[end] == '\n') expected("a closing quotation mark");
      const size_t begin = at_;
      return {Token::kString, source_.substr(begin + 1, end - begin - 1), begin, end + 1};
    }
    for (const char* sign : {"...", "->", "<=", ">=", "::"})
      if (source_.compare(at_, std::char_traits<char>::length(sign), sign) == 0) {
        end += std::char_traits<char>::length(sign);
        return token(Token::kSign);
      }
    if (std::string("[](),;+-*^<>=?.!").find(source_[at_]) == std::string::npos)
      expected("a name, a number, a string or a sign");
    ++end;
    return token(Token::kSign);
  }

  bool is_next(const std::string& text) {
    const Token token = peek();
    return token.kind != Token::kString && token.text == text;
  }

  bool accept(const std::string& text) {
    if (!is_next(text)) return false;
    at_ = peek().end;
    return true;
  }

  void require(const std::string& text) {
    if (!accept(text)) expected("`" + text + "`");
  }

  std::string take(Token::Kind kind, const char* what) {
    const Token token = peek();
    if (token.kind != kind) expected(what);
    at_ = token.end;
    return token.text;
  }

  std::string take_name(const char* what) { return take(Token::kName, what); }

  // Read items between commas or `or`. item() reads one.
  template <class Item>
  void read_list(const Item& item) {
    do item();
    while (accept(",") ? (accept("or"), true) : accept("or"));
  }

  int64_t integer_in(const std::string& digits) const {
    int64_t number = 0;
    const char* const end = digits.data() + digits.size();
    const auto [read, error] = std::from_chars(digits.data(), end, number);
    if (error != std::errc()) fail("a number is too large");
    if (read != end) fail("expected an integer");  // such as 2.5
    return number;
  }

  // Read a number such as 12, -5, 2^40 or 0.5.
  Bound take_number(Compare compare) {
    Bound number{compare};
    peek();
    const size_t begin = at_;
    const int sign = accept("-") ? -1 : 1;
    std::string digits = take(Token::kNumber, "a number");
    const size_t point = digits.find('.');
    number.whole = point == std::string::npos;
    if (!number.whole) digits.erase(point, 1);
    const int64_t base = number.integer = integer_in(digits);
    if (number.whole && accept("^")) {
      const int64_t power = integer_in(take(Token::kNumber, "a power"));
      if (base < 2 || power < 1 || power > 62) fail("a number is too large, or no power of 2");
      for (int64_t k = 1; k < power; ++k)
        if (__builtin_mul_overflow(number.integer, base, &number.integer))
          fail("a number is too large");
    }
    number.integer *= sign;
    number.real = double(number.integer);
    if (!number.whole) number.real /= std::pow(10, digits.size() - point);
    number.text = joined(text_from(begin));
    return number;
  }

  std::string text_from(size_t begin) const { return source_.substr(begin, at_ - begin); }

  // ---- sizes ------------------------------------------------------------------------------------

  int size_named(const std::string& name) {
    const int known = text_.size(name);
    if (known >= 0) return known;
    if (text_.sizes.size() == kMost) fail("more than " + std::to_string(kMost) + " sizes");
    text_.sizes.push_back(name);
    return int(text_.sizes.size()) - 1;
  }

  // Read a product such as `3`, `4K` or `n*K`.
  Product take_product() {
    Product product{1, {}};
    do {
      if (peek().kind == Token::kNumber) {
        const int64_t factor = integer_in(take(Token::kNumber, "a number"));
        if (__builtin_mul_overflow(product.factor, factor, &product.factor))
          fail("a product is too large");
        if (!is_name_part(source_[at_])) continue;  // not 4K
      }
      product.sizes.push_back(size_named(take_name("a size, such as N, 3, 2N or N + M")));
    } while (accept("*"));
    std::sort(product.sizes.begin(), product.sizes.end());
    return product;
  }

  // Read a sum such as `n + 2*nghost` or `4K - 1`.
  Sum take_sum() {
    Sum sum{take_product()};
    while (is_next("+") || is_next("-")) {
      const bool is_less = accept("-");
      if (!is_less) require("+");
      sum.push_back(take_product());
      if (is_less) sum.back().factor = -sum.back().factor;
    }
    return sum;
  }

  // ---- lines ------------------------------------------------------------------------------------

  // Read a schema, which the Prover parses, and the indented text below it.
  void read_schema() {
    Schema schema;
    schema.number = line_number(at_);
    const size_t begin = at_, arrow = source_.find("->", at_);
    schema.name = source_.substr(begin, source_.find('(', begin) - begin);
    name_ = schema.name;
    if (arrow == std::string::npos) fail("expected `-> ` and the results behind the arguments");
    at_ = std::min(source_.find_first_not_of(" \n", arrow + 2), source_.size() - 1);
    at_ = source_[at_] == '(' ? std::min(source_.find(')', at_), source_.size() - 1) + 1
                              : line_end(at_);
    schema.text = joined(text_from(begin));
    if (!is_blank(source_.substr(at_, line_end(at_) - at_)))
      expected("the end of the line behind the results");

    std::string documentation;
    for (at_ = line_end(at_) + 1; at_ < source_.size(); at_ = line_end(at_) + 1) {
      const std::string line = source_.substr(at_, line_end(at_) - at_);
      if (!is_blank(line) && !is_space(line[0])) break;
      documentation += (line.size() > 2 ? line.substr(2) : "") + "\n";
    }
    const size_t end = documentation.find("\n\n");
    schema.summary = joined(documentation.substr(0, end));
    schema.details = end == std::string::npos ? "" : documentation.substr(end + 2);
    while (!schema.details.empty() && schema.details.back() == '\n') schema.details.pop_back();
    for (const Schema& other : text_.schemas)
      if (other.name == schema.name) throw Mistake(schema.number, "a second schema of " + name_);
    text_.schemas.push_back(std::move(schema));
  }

  // Read the line of an argument or a result, or `vmap`.
  void read_entry() {
    const size_t begin = at_;
    const int number = line_number(at_);
    const std::string name = take_name("a schema or the name of an argument");
    name_ = name;
    limit_ = line_end(at_);
    while (limit_ + 1 < source_.size() && is_space(source_[limit_ + 1]) &&
           !is_blank(source_.substr(limit_ + 1, line_end(limit_ + 1) - limit_ - 1)))
      limit_ = line_end(limit_ + 1);
    if (at_ < limit_ && !is_space(source_[at_])) expected("a space behind the name");
    const std::string written = source_.substr(begin, limit_ - begin);

    clause_ = at_;
    peek();
    clause_ = at_;
    form_ = "joins N, M";
    if (name == "vmap") {
      if (text_.vmap_number) fail("a second line `vmap`");
      text_.vmap_number = number;
      require("joins");
      do add_new(text_.joined, take_name("a size"));
      while (accept(","));
    } else {
      if (text_.line(name) >= 0) fail("a second line for " + name);
      if (text_.lines.size() == kMost) fail("more than " + std::to_string(kMost) + " lines");
      Line& line = text_.lines.emplace_back();
      line.name = name;
      line.text = written;
      line.number = number;
      const bool is_text = at_ == limit_ || is_capital(source_[at_]);
      if (!is_text) do {
          peek();
          clause_ = at_;
          read_clause(line);
        } while (accept(";"));
      if (is_text) return skip_text();
    }
    if (peek().kind != Token::kEnd) expected("`;`, or the full stop that ends the clauses");
    if (at_ < limit_) ++at_;
    skip_text();
  }

  // Skip the text of a line. It begins with a capital letter and is no formula, so that no clause
  // is taken for text.
  void skip_text() {
    clause_ = std::string::npos;
    while (at_ < limit_ && is_space(source_[at_])) ++at_;
    if (at_ < limit_ && !is_capital(source_[at_]))
      fail("text begins with a capital letter, got `" +
           joined(source_.substr(at_, std::min<size_t>(limit_ - at_, 20))) + "`");
    while (at_ < limit_ && is_name_part(source_[at_])) ++at_;
    while (at_ < limit_ && is_space(source_[at_])) ++at_;
    if (at_ < limit_ && std::string("<>=*^[]").find(source_[at_]) != std::string::npos)
      fail("expected a clause, or text that is no formula");
    at_ = limit_ + 1;
  }

  // ---- clauses ----------------------------------------------------------------------------------

  void read_clause(Line& line) {
    const Token next = peek();
    const bool is_name = next.kind == Token::kName, is_number = next.kind == Token::kNumber;
    std::string kind;
    const auto is = [&](bool condition, const char* name, const char* form) {
      if (condition) kind = name;
      if (condition) form_ = form;
      return condition;
    };
    if (is(is_next("["), "shape", "[N, 3] or [N, 3, 1] | [B, K] or [B, T, M] with K = T*M | [...]"))
      read_shapes(line);
    else if (is(accept("like"), "like", "like x"))
      line.type_text = "like " + (line.like = take_name("the name of a tensor"));
    else if (is(accept("entries"), "entries", "entries -1 or 0 <= j < n at row, slot"))
      read_entries(line);
    else if (is(accept("constant"), "constant", "constant"))
      line.is_constant = true;
    else if (is(is_name && type_named(next.text) != Type::kNone, "dtype",
                "float32 or float64 | int32 or int64 read as int64"))
      read_types(line);
    else if (is(next.kind == Token::kString, "strings", "\"a\", \"b\" or \"c\""))
      read_list([&] { add_new(line.choices, take(Token::kString, "a string")); });
    else if (is(line.is_tensor() && (is_name || is_number), "limit", "N >= 1 | n*K < 2^32 on CUDA"))
      read_limit(line);
    else if (is(is_number || is_next("-"), "bounds", "0 to 2^40"))
      read_range(line);
    else if (is(next.text[0] == '<' || next.text[0] == '>', "bounds", "> 0 | <= 2.5"))
      line.bounds.push_back(take_bound());
    else
      fail_unknown(line);
    if (kind != "limit" && std::count(line.clauses.begin(), line.clauses.end(), kind))
      fail("a second clause of the same kind");
    line.clauses.push_back(kind);
  }

  template <class Item>
  void add_new(std::vector<Item>& list, const Item& item) const {
    if (std::find(list.begin(), list.end(), item) != list.end()) fail("the same twice");
    list.push_back(item);
  }

  // Read `[B, n, K] or [B, n, T, M] with K = T*M`, or `[...]`.
  void read_shapes(Line& line) {
    const size_t begin = at_;
    read_list([&] {
      require("[");
      Shape shape;
      if (accept("...")) {
        line.any_shape = true;
        require("]");
        return;
      }
      if (!accept("]")) do
          shape.push_back(take_sum());
        while (accept(",") || (require("]"), false));
      if (shape.size() > kMostDimensions) fail("more than 8 dimensions");
      line.shapes.push_back(shape);
    });
    if (line.any_shape && !line.shapes.empty()) fail("[...] is every shape, so it stands alone");
    line.shape_text = joined(text_from(begin));
    if (!accept("with")) return;
    if (line.shapes.size() < 2) fail("`with` is for another shape");
    line.whole = size_named(take_name("a size"));
    require("=");
    line.parts = take_sum();
  }

  // Read `int32 or int64 read as int64`.
  void read_types(Line& line) {
    const size_t begin = at_;
    read_list([&] { add_new(line.types, take_dtype()); });
    line.type_text = joined(text_from(begin));
    if (!accept("read")) return;
    require("as");
    line.read_as = take_dtype();
    // Every number must fit.
    bool is_ok = line.read_as == Type::kInt64 || line.read_as == Type::kFloat64;
    for (const Type type : line.types) is_ok &= is_floating(type) == is_floating(line.read_as);
    if (!is_ok) fail("expected integers read as int64, or floats read as float64");
  }

  Type take_dtype() {
    const Type type = peek().kind == Token::kName ? type_named(peek().text) : Type::kNone;
    if (type == Type::kNone) expected("a dtype");
    take_name("a dtype");
    return type;
  }

  // Read `entries -1 or 0 <= j < n + nghost at frame, atom, slot`.
  void read_entries(Line& line) {
    peek();
    const size_t begin = at_;
    line.has_entries = true;
    if (accept("-")) {
      require("1");
      require("or");
      line.entries.may_be_none = true;
    }
    if (!accept("0")) expected("`0 <=`, since entries count from 0");
    require("<=");
    take_name("a name for an entry");
    require("<");
    peek();
    const size_t bound = at_;
    line.entries.below = take_sum();
    line.entries.bound = joined(text_from(bound));
    line.entries.text = joined(text_from(begin));
    if (accept("at")) do
        line.entries.positions.push_back(take_name("the name of a dimension"));
      while (accept(","));
  }

  // Read `n*K < 2^32 on CUDA`.
  void read_limit(Line& line) {
    Limit limit;
    peek();
    const size_t begin = at_;
    limit.sum = take_sum();
    limit.bound = take_bound();
    if (!limit.bound.whole) fail("expected sizes and then an integer, as in N >= 1");
    if (accept("on")) {
      require("CUDA");
      limit.on_cuda = true;
    }
    limit.text = joined(text_from(begin));
    line.limits.push_back(std::move(limit));
  }

  Bound take_bound() {
    if (accept("<=")) return take_number(Compare::kAtMost);
    if (accept(">=")) return take_number(Compare::kAtLeast);
    if (accept("<")) return take_number(Compare::kLess);
    if (accept(">")) return take_number(Compare::kMore);
    expected("`<`, `<=`, `>` or `>=`");
  }

  [[noreturn]] void fail_unknown(const Line& line) {
    form_ = line.is_tensor()
                ? "float32 or float64 | like x | entries 0 <= i < n at row | n < 2^30 | constant"
                : "[N, 3] | 0 to 2^40 | > 0 | \"a\" or \"b\"";
    expected(line.is_tensor() ? "a clause of a tensor"
                              : "a clause, or text that begins with a capital letter");
  }

  // Read `0 to 2^40`.
  void read_range(Line& line) {
    line.bounds.push_back(take_number(Compare::kAtLeast));
    require("to");
    line.bounds.push_back(take_number(Compare::kAtMost));
    if (line.bounds[0].real > line.bounds[1].real) fail("expected the lower number first");
  }

  const std::string source_;
  size_t at_ = 0;                      // what is read next
  size_t limit_;                       // the end of the line that is read
  size_t clause_ = std::string::npos;  // the beginning of the clause; npos: none is read
  const char* form_ = "";              // a legal form of the clause
  std::string name_;                   // of the line or the schema
  Text text_;
};

}  // namespace contract
}  // namespace calcops
