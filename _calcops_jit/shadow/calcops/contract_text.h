// Parses contracts into structs. ops/README.md, "Contracts", describes their language. This file is
// independent of PyTorch. ../../runtime registers PyTorch operators from these structs. Other code
// could register operators of another framework from them.
#pragma once

#include <cctype>
#include <cstdint>
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

// A Sum is a sum of Products of sizes, such as n + 2*nghost. A size is its number in Text::sizes.
struct Product {
  int64_t factor = 1;
  std::vector<int> sizes;
};
using Sum = std::vector<Product>;
using Shape = std::vector<Sum>;

// Return the size if a sum is one size alone, otherwise -1.
inline int bare(const Sum& sum) {
  const bool is_bare = sum.size() == 1 && sum[0].factor == 1 && sum[0].sizes.size() == 1;
  return is_bare ? sum[0].sizes[0] : -1;
}

inline bool operator==(const Product& a, const Product& b) {
  return a.factor == b.factor && a.sizes == b.sizes;
}

// Return for each dimension of `seen` its number in the shape `given`, or -1 if `given` lacks it:
// 0, -1, 1 for seen = [N, H, W] and given = [N, W]. Empty if `given` has other dimensions.
inline std::vector<int> dimensions_of(const Shape& seen, const Shape& given) {
  std::vector<int> from;
  size_t next = 0;
  for (const Sum& dim : seen)
    from.push_back(next < given.size() && given[next] == dim ? int(next++) : -1);
  return next == given.size() ? from : std::vector<int>();
}

// `in force, force_virial` or `where arithmetic is "opencv4"`
struct Condition {
  std::vector<std::string> in;  // operators, or arguments that must be given; empty: no condition
  std::string argument;         // it must have the value `choice`; "": no condition
  std::string choice;
};

// `n*K < 2^32 slots a frame on CUDA` or `n*K < 2^31 slots a frame in neighbor_index`
struct Limit {
  Sum sum;
  int64_t below;
  std::string number, unit;
  bool on_cuda;
  Condition when;
};

// `not float16 or bfloat16 where arithmetic is "opencv4"`
struct Exclusion {
  std::vector<Type> types;
  std::vector<std::string> choices;
  Condition when;
};

// `entries -1 or 0 <= j < n + nghost at frame, atom, slot`
struct Entries {
  std::string text;                    // up to ` at `
  bool may_be_none = false;            // -1 is allowed
  Sum below;                           // the upper bound
  std::vector<std::string> positions;  // names of the last dimensions
};

// The line of one argument or result.
struct Line {
  std::string name;
  std::string text;  // as written, for help()
  int number = 0;    // of the line in the contract

  // Tensors. A set of sizes is a uint32_t with a bit for each.
  std::vector<Shape> shapes;
  std::string shape_text;
  std::vector<int> names;             // the sizes in the shapes, in order
  std::vector<uint32_t> shape_sizes;  // the sizes of each shape
  std::vector<uint32_t> lacks;        // for each shape: sizes of the first shape that it lacks
  uint32_t some_sizes = 0;            // sizes that some shapes have and others lack
  uint32_t or_one = 0;                // sizes of dimensions such as `N or 1`
  int shape_of = -1;                  // `the shape of x`: the line of x
  int whole = -1;                     // `with K = T*M`: the size K
  Sum parts;                          // and the product T*M
  std::vector<Type> types;
  std::string type_text;
  int like = -1;                     // `like x`: the line of x
  Type read_as = Type::kNone;        // `read as`: the type that kernels receive
  std::string made_by;               // `from op(x, y)`: the operator
  std::vector<std::string> made_of;  // and its arguments
  bool made_on_cuda = false;         // `made where absent on CUDA`
  bool in_columns = false;           // `in rows or columns`
  bool has_entries = false;
  Entries entries;
  std::vector<Limit> limits;

  std::vector<Exclusion> exclusions;
  Condition only;  // `only where`: if it is met the argument must be given, otherwise absent

  // Numbers, strings and lists
  int size = -1;  // the size that a number is
  bool has_bounds = false;
  int64_t least = 0, most = 0;
  std::string most_text;
  std::vector<std::string> choices;
  std::vector<std::string> without_derivative;  // choices
  int64_t absent = 0;         // `1 where absent`: the value if an operator lacks the argument
  std::vector<int> items;     // `(h, w), both >= 0, or empty for (H, W)`: the sizes h and w,
  std::vector<int> if_empty;  // and the sizes H and W
  std::string items_text;
  int count_or_one = -1;  // `one or C values`: the size C

  bool is_tensor() const { return !shapes.empty(); }
};

// name(arguments) -> results, and the text below it.
struct Schema {
  std::string text, name, summary, details;
  int number;
};

// A term of the line `linear`, such as result(x, y).
struct Term {
  std::string result;
  std::vector<std::string> factors;
};

// A parsed contract.
struct Text {
  std::vector<Schema> schemas;
  std::vector<Line> lines;
  std::vector<std::string> sizes;
  std::vector<Term> terms;
  std::vector<int> joined;  // sizes along which vmap concatenates its items
  bool says_vmap = false;   // there is a line `vmap`
  uint32_t gaps = 0;        // sizes that are 1 if no argument has a dimension for them, a bit each

  // Return the number of the line with a name, or -1.
  int line(const std::string& name) const {
    for (size_t i = 0; i < lines.size(); ++i)
      if (lines[i].name == name) return int(i);
    return -1;
  }

  // Return the number of the size with a name, or -1.
  int size(const std::string& name) const {
    for (size_t i = 0; i < sizes.size(); ++i)
      if (sizes[i] == name) return int(i);
    return -1;
  }
};

// An error in a contract.
struct Mistake : std::runtime_error {
  Mistake(int number, const std::string& what)
      : std::runtime_error("line " + std::to_string(number) + ": " + what) {}
};

// ---- pieces of text -----------------------------------------------------------------------------

inline std::string strip(const std::string& text) {
  const size_t first = text.find_first_not_of(" \n"), last = text.find_last_not_of(" \n");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

inline bool begins(const std::string& text, const std::string& with) {
  return text.compare(0, with.size(), with) == 0;
}

// Return the parts of a text between separators, without the spaces around them.
inline std::vector<std::string> split(const std::string& text, const std::string& by) {
  std::vector<std::string> parts;
  size_t from = 0;
  for (size_t to = text.find(by); to != std::string::npos; to = text.find(by, from)) {
    parts.push_back(strip(text.substr(from, to - from)));
    from = to + by.size();
  }
  parts.push_back(strip(text.substr(from)));
  return parts;
}

// Return the items of "a, b or c".
inline std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> items;
  for (const std::string& part : split(text, ","))
    for (const std::string& item : split(part, " or ")) items.push_back(item);
  return items;
}

// Return the text between the first `open` and the `close` that follows it, or "".
inline std::string between(const std::string& text, char open, char close) {
  const size_t from = text.find(open), to = text.find(close, from + 1);
  return to == std::string::npos ? "" : text.substr(from + 1, to - from - 1);
}

inline bool is_name(const std::string& text) {
  if (text.empty() || std::isdigit(static_cast<unsigned char>(text[0]))) return false;
  for (const char c : text)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_') return false;
  return true;
}

inline Type type_named(const std::string& name) {
  struct Known {
    const char* name;
    Type type;
  };
  for (const Known& known :
       {Known{"bool", Type::kBool}, Known{"uint8", Type::kUInt8}, Known{"uint16", Type::kUInt16},
        Known{"int8", Type::kInt8}, Known{"int16", Type::kInt16}, Known{"int32", Type::kInt32},
        Known{"int64", Type::kInt64}, Known{"float16", Type::kFloat16},
        Known{"bfloat16", Type::kBFloat16}, Known{"float32", Type::kFloat32},
        Known{"float64", Type::kFloat64}})
    if (name == known.name) return known.type;
  return Type::kNone;
}

// ---- the parser ---------------------------------------------------------------------------------

class Reader {
 public:
  explicit Reader(const std::string& text) : lines_(split_lines(text)) {}

  Text read() {
    while (at_ < lines_.size()) {
      const std::string& line = lines_[at_];
      const size_t name_end = line.find_first_not_of(
          "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:");
      if (strip(line).empty()) {
        ++at_;
      } else if (line[0] == ' ') {
        fail("expected a schema or the name of an argument at the line's beginning");
      } else if (name_end != std::string::npos && name_end > 0 && line[name_end] == '(') {
        read_schema();
      } else {
        read_entry(line.substr(0, name_end));
      }
    }
    if (text_.schemas.empty()) fail("expected a schema, such as twice(Tensor x) -> Tensor");
    // Clauses may use sizes that later lines name, so they are read when all lines are known.
    for (const Pending& pending : pending_) read_clauses(pending);
    for (Line& line : text_.lines) complete(line);
    for (const auto& [number, condition] : conditions_) {
      number_ = number;
      check_condition(condition);
    }
    check_names();
    return std::move(text_);
  }

 private:
  // A line whose clauses are not read yet.
  struct Pending {
    size_t line;
    std::string clauses;
  };

  static std::vector<std::string> split_lines(const std::string& text) {
    std::vector<std::string> lines;
    size_t from = 0;
    for (size_t to = text.find('\n'); to != std::string::npos; to = text.find('\n', from)) {
      lines.push_back(text.substr(from, to - from));
      from = to + 1;
    }
    lines.push_back(text.substr(from));
    return lines;
  }

  [[noreturn]] void fail(const std::string& what) const { throw Mistake(number_, what); }

  // Return the indented and empty lines from here on, and advance beyond them.
  std::string take_indented(size_t indent) {
    std::string taken;
    for (; at_ < lines_.size() && (strip(lines_[at_]).empty() || lines_[at_][0] == ' '); ++at_)
      taken += (lines_[at_].size() > indent ? lines_[at_].substr(indent) : "") + "\n";
    return taken;
  }

  void read_schema() {
    Schema schema;
    schema.number = number_ = int(at_) + 1;
    schema.text = strip(lines_[at_++]);
    // A schema goes on in the next lines until its results are complete.
    const auto is_whole = [&] {
      const size_t arrow = schema.text.rfind("->");
      return arrow != std::string::npos && arrow + 2 < schema.text.size() &&
             (schema.text.find('(', arrow) == std::string::npos || schema.text.back() == ')');
    };
    while (!is_whole()) {
      if (at_ == lines_.size() || strip(lines_[at_]).empty())
        fail("expected `-> ` and the results behind the arguments of " + schema.text);
      schema.text += " " + strip(lines_[at_++]);
    }
    schema.name = schema.text.substr(0, schema.text.find('('));
    const std::string documentation = take_indented(2);
    const size_t end = documentation.find("\n\n");
    schema.summary = strip(documentation.substr(0, end));
    schema.details = end == std::string::npos ? "" : documentation.substr(end + 2);
    while (!schema.details.empty() && schema.details.back() == '\n') schema.details.pop_back();
    text_.schemas.push_back(std::move(schema));
  }

  void read_entry(const std::string& name) {
    number_ = int(at_) + 1;
    if (!is_name(name)) fail("expected a schema or the name of an argument, got " + lines_[at_]);
    std::string written = lines_[at_++] + "\n";
    for (; at_ < lines_.size() && !lines_[at_].empty() && lines_[at_][0] == ' '; ++at_)
      written += lines_[at_] + "\n";
    written.pop_back();

    std::string body;
    for (const std::string& part : split_lines(written.substr(name.size())))
      body += strip(part) + " ";
    // The clauses end with the first full stop.
    const size_t stop = body.find(". ");
    const std::string clauses = strip(body.substr(0, stop));
    if (name == "linear") return read_linear(clauses);
    if (name == "vmap") {
      text_.says_vmap = true;
      if (!begins(clauses, "joins ")) fail("expected `vmap  joins` and sizes, got " + clauses);
      joined_ = clauses.substr(6);
      joined_number_ = number_;
      return;
    }

    if (text_.line(name) >= 0) fail("a second line for " + name);
    if (text_.lines.size() == kMost) fail("more than " + std::to_string(kMost) + " lines");
    Line line;
    line.name = name;
    line.text = written;
    line.number = number_;
    pending_.push_back({text_.lines.size(), clauses});
    // Shapes, lists of sizes and numbers with bounds name sizes.
    if (begins(clauses, "[")) {
      for (const std::string& dim : dims_of(clauses)) name_sizes(without_or_one(dim));
    } else if (begins(clauses, "(")) {
      for (const std::string& item : split(between(clauses, '(', ')'), ",")) name_sizes(item);
    } else if (!clauses.empty() &&
               (std::isdigit(static_cast<unsigned char>(clauses[0])) || begins(clauses, ">= "))) {
      name_sizes(name);
    }
    text_.lines.push_back(std::move(line));
  }

  // Read `force(dE, Ri_d) + virial(dE, Ri_d, Rij)`.
  void read_linear(const std::string& clauses) {
    for (const std::string& part : split(clauses, "+")) {
      Term term{strip(part.substr(0, part.find('('))), split(between(part, '(', ')'), ",")};
      if (!is_name(term.result) || part.empty() || part.back() != ')' || term.factors[0].empty())
        fail("expected result(x, y) + ..., got " + part);
      text_.terms.push_back(std::move(term));
    }
    linear_number_ = number_;
  }

  // Return the dimensions of all shapes in a clause.
  static std::vector<std::string> dims_of(const std::string& clause) {
    std::vector<std::string> dims;
    for (size_t at = 0; (at = clause.find('[', at)) != std::string::npos; ++at) {
      const std::string inside = between(clause.substr(at), '[', ']');
      if (strip(inside).empty()) continue;
      for (const std::string& dim : split(inside, ",")) dims.push_back(dim);
    }
    return dims;
  }

  static constexpr const char* kOrOne = " or 1";

  // Return a dimension such as "N or 1" without " or 1".
  static std::string without_or_one(const std::string& dim) {
    const size_t at = dim.size() < 5 ? std::string::npos : dim.size() - 5;
    return at != std::string::npos && dim.substr(at) == kOrOne ? dim.substr(0, at) : dim;
  }

  // Return "N - 1" as "N +-1", so that a sum can be split at its plus signs.
  static std::string spelled_with_plus(std::string sum) {
    for (size_t at = 0; (at = sum.find(" - ", at)) != std::string::npos; at += 2)
      sum.replace(at, 3, " +-");
    return sum;
  }

  // Add the names in a sum to the sizes.
  void name_sizes(const std::string& sum) {
    for (const std::string& part : split(spelled_with_plus(sum), "+"))
      for (const std::string& factor : split(part, "*")) {
        const size_t letter = factor.find_first_not_of("-0123456789");
        if (letter == std::string::npos) continue;
        const std::string name = factor.substr(letter);
        if (!is_name(name)) fail("expected a size, such as N, 3, 2N or N + M, got " + sum);
        if (text_.size(name) >= 0) continue;
        if (text_.sizes.size() == kMost) fail("more than " + std::to_string(kMost) + " sizes");
        text_.sizes.push_back(name);
      }
  }

  // Read `12` or `2^40`.
  int64_t number_in(const std::string& text) const {
    const auto power = split(text, "^");
    for (const std::string& digits : power)
      if (digits.empty() || digits.find_first_not_of("0123456789") != std::string::npos ||
          digits.size() > 18)
        fail("expected a number such as 12 or 2^40, got " + text);
    return power.size() == 2 ? int64_t(1) << std::stoi(power[1]) : std::stoll(power[0]);
  }

  Sum sum_in(const std::string& text) const {
    Sum sum;
    for (std::string part : split(spelled_with_plus(text), "+")) {
      Product product;
      if (begins(part, "-")) {
        product.factor = -1;
        part = part.substr(1);
      }
      for (const std::string& factor : split(part, "*")) {
        const size_t letter = factor.find_first_not_of("0123456789");
        if (letter != 0) product.factor *= number_in(factor.substr(0, letter));
        if (letter == std::string::npos) continue;
        const int size = text_.size(factor.substr(letter));
        if (size < 0) fail("no tensor has the size " + factor.substr(letter) + " of " + text);
        product.sizes.push_back(size);
      }
      sum.push_back(std::move(product));
    }
    return sum;
  }

  void read_clauses(const Pending& pending) {
    Line& line = text_.lines[pending.line];
    number_ = line.number;
    for (const std::string& clause : split(pending.clauses, ";")) {
      if (begins(clause, "[")) {
        read_shapes(line, clause);
      } else if (begins(clause, "like ")) {
        line.type_text = clause;
        line.like = text_.line(clause.substr(5));
        if (line.like < 0) fail("no line for `" + clause.substr(5) + "` of `" + clause + "`");
      } else if (type_named(split_list(clause)[0]) != Type::kNone) {
        read_types(line, clause);
      } else if (begins(clause, "entries ")) {
        read_entries(line, clause.substr(8));
      } else if (clause == "any strides") {
        continue;  // for the reader: a kernel's Strided parameter takes them
      } else if (begins(clause, "the shape of ")) {
        line.shape_of = text_.line(clause.substr(13));
        if (line.shape_of < 0) fail("no line for `" + clause.substr(13) + "` of `" + clause + "`");
      } else if (begins(clause, "not ")) {
        read_exclusion(line, clause.substr(4));
      } else if (begins(clause, "only ")) {
        std::string rest = clause;
        line.only = take_condition(rest);
      } else if (begins(clause, "(")) {
        read_items(line, clause);
      } else if (begins(clause, "one or ")) {
        const auto words = split(clause, " ");
        line.count_or_one = words.size() == 4 && words[3] == "values" ? text_.size(words[2]) : -1;
        if (line.count_or_one < 0) fail("expected `one or N values`, got " + clause);
      } else if (begins(clause, "\"") && clause.find(" without derivative") != std::string::npos) {
        line.without_derivative = strings_in(clause);
      } else if (begins(clause, "\"")) {
        line.choices = strings_in(clause);
      } else if (clause.find(" where absent") != std::string::npos) {
        const std::string value = split(clause, " ")[0];
        const bool is_flag = value == "true" || value == "false";
        line.absent = is_flag ? value == "true" : number_in(value);
      } else if (line.is_tensor() && clause.find(" < ") != std::string::npos) {
        read_limit(line, clause);
      } else if (text_.size(line.name) >= 0 && !line.is_tensor()) {
        read_bounds(line, clause);
      } else if (line.is_tensor()) {
        fail("`" + line.name + "`: cannot read `" + clause + "`");
      }
    }
  }

  // Copy what a line takes from another one, which may come later.
  void complete(Line& line) {
    number_ = line.number;
    if (line.shape_of >= 0) {
      const Line& other = text_.lines[line.shape_of];
      line.shapes = other.shapes;
      line.shape_text = other.shape_text;
      line.names = other.names;
      line.shape_sizes = other.shape_sizes;
      line.lacks = other.lacks;
      line.some_sizes = other.some_sizes;
      line.or_one = other.or_one;
    }
    if (line.like >= 0) line.read_as = text_.lines[line.like].read_as;
    if (line.is_tensor() && line.types.empty() && line.like < 0)
      fail("`" + line.name + "`: expected its dtype, such as float32 or float64, or like x");
  }

  static std::vector<std::string> strings_in(const std::string& clause) {
    std::vector<std::string> strings;
    for (const std::string& each : split_list(clause)) strings.push_back(between(each, '"', '"'));
    return strings;
  }

  // Remove `in op` or `where argument is "choice"` from a clause's end, and return it.
  Condition take_condition(std::string& clause) {
    Condition condition;
    if (const size_t where = clause.rfind("where "); where != std::string::npos) {
      const std::string tail = clause.substr(where + 6);
      condition.argument = tail.substr(0, tail.find(' '));
      condition.choice = between(tail, '"', '"');
      clause = strip(clause.substr(0, where));
    } else if (const size_t in = clause.rfind(" in "); in != std::string::npos) {
      condition.in = split(clause.substr(in + 4), ",");
      clause = clause.substr(0, in);
    }
    conditions_.push_back({number_, condition});
    return condition;
  }

  // Raise an error if a condition names what does not exist. Called when all lines are known.
  void check_condition(const Condition& when) const {
    for (const std::string& name : when.in) {
      bool is_known = text_.line(name) >= 0;
      for (const Schema& schema : text_.schemas) is_known |= schema.name == name;
      if (!is_known) fail("no operator or argument is named " + name);
    }
    if (when.argument.empty()) return;
    const int line = text_.line(when.argument);
    if (line < 0) fail("no line for `" + when.argument + "`");
    for (const std::string& choice : text_.lines[line].choices)
      if (choice == when.choice) return;
    fail("`" + when.argument + "` is never \"" + when.choice + '"');
  }

  // Read `float16 or bfloat16 where arithmetic is "opencv4"`.
  void read_exclusion(Line& line, std::string clause) {
    Exclusion exclusion;
    exclusion.when = take_condition(clause);
    if (begins(clause, "\"")) {
      exclusion.choices = strings_in(clause);
    } else {
      for (const std::string& name : split_list(clause)) {
        exclusion.types.push_back(type_named(name));
        if (exclusion.types.back() == Type::kNone)
          fail("`" + line.name + "`: no dtype is named " + name);
      }
    }
    line.exclusions.push_back(std::move(exclusion));
  }

  // Read `(h, w), both >= 0, or empty for (H, W)`.
  void read_items(Line& line, const std::string& clause) {
    const size_t empty = clause.find(", or empty for ");
    line.items_text = clause.substr(0, empty);
    for (const std::string& name : split(between(clause, '(', ')'), ","))
      line.items.push_back(text_.size(name));
    if (empty == std::string::npos) return;
    for (const std::string& name : split(between(clause.substr(empty), '(', ')'), ",")) {
      line.if_empty.push_back(text_.size(name));
      if (line.if_empty.back() < 0) fail("no tensor has the size " + name + " of " + clause);
    }
    if (line.if_empty.size() != line.items.size())
      fail("`" + line.name + "`: expected as many sizes where it is empty, got " + clause);
  }

  // Read `[B, n, K] or [B, n, T, M] with K = T*M`.
  void read_shapes(Line& line, const std::string& clause) {
    size_t at = 0;
    while ((at = clause.find('[', at)) != std::string::npos) {
      const std::string inside = between(clause.substr(at), '[', ']');
      at = clause.find(']', at);
      if (at == std::string::npos) fail("`" + line.name + "`: expected a ] in " + clause);
      Shape shape;
      uint32_t sizes = 0;
      if (!strip(inside).empty())
        for (const std::string& dim : split(inside, ",")) {
          shape.push_back(sum_in(without_or_one(dim)));
          if (without_or_one(dim) == dim) continue;
          if (bare(shape.back()) < 0) fail("expected a size before `or 1`, got " + dim);
          line.or_one |= 1u << bare(shape.back());
        }
      for (const Sum& dim : shape)
        for (const Product& product : dim)
          for (const int size : product.sizes) {
            add_name(line, size);
            sizes |= 1u << size;
          }
      line.shapes.push_back(std::move(shape));
      line.shape_sizes.push_back(sizes);
    }

    uint32_t any = 0, every = ~0u;
    for (const uint32_t sizes : line.shape_sizes) {
      any |= sizes;
      every &= sizes;
    }
    line.some_sizes = any & ~every;
    for (size_t k = 0; k < line.shapes.size(); ++k) {
      const bool is_part = !dimensions_of(line.shapes[0], line.shapes[k]).empty();
      line.lacks.push_back(is_part ? line.shape_sizes[0] & ~line.shape_sizes[k] : 0);
    }
    text_.gaps |= line.some_sizes | line.or_one;

    // The rest of the clause: `with`, `from` or `in rows or columns`.
    const size_t last = clause.rfind(']') + 1;
    line.shape_text = clause.substr(0, last);
    std::string tail = strip(clause.substr(last));
    if (const size_t made = tail.find(", made where absent on CUDA"); made != std::string::npos) {
      line.made_on_cuda = true;
      tail = tail.substr(0, made);
    }
    if (begins(tail, "with ")) {
      const auto sides = split(tail.substr(5), "=");
      if (sides.size() != 2) fail("expected `with K = T*M`, got " + tail);
      line.whole = text_.size(sides[0]);
      line.parts = sum_in(sides[1]);
      if (line.whole < 0) fail("no tensor has the size " + sides[0]);
    } else if (begins(tail, "from ")) {
      line.shape_text = clause.substr(0, clause.find(", made where"));
      line.made_by = tail.substr(5, tail.find('(') - 5);
      line.made_of = split(between(tail, '(', ')'), ",");
    } else if (tail == "in rows or columns") {
      line.in_columns = true;
    } else if (!tail.empty()) {
      fail("`" + line.name + "`: cannot read `" + tail + "` behind the shape");
    }
  }

  static void add_name(Line& line, int size) {
    for (const int known : line.names)
      if (known == size) return;
    line.names.push_back(size);
  }

  // Read `int32 or int64 read as int64`.
  void read_types(Line& line, const std::string& clause) {
    const auto parts = split(clause, " read as ");
    line.type_text = parts[0];
    for (const std::string& name : split_list(parts[0])) {
      const Type type = type_named(name);
      if (type == Type::kNone) fail("`" + line.name + "`: no dtype is named " + name);
      line.types.push_back(type);
    }
    if (parts.size() > 1) line.read_as = type_named(parts[1]);
  }

  // Read `-1 or 0 <= j < n + nghost at frame, atom, slot`.
  void read_entries(Line& line, const std::string& clause) {
    const auto parts = split(clause, " at ");
    const size_t below = parts[0].rfind("< ");
    if (below == std::string::npos) fail("expected entries 0 <= j < n, got " + clause);
    line.has_entries = true;
    line.entries.text = parts[0];
    line.entries.may_be_none = begins(parts[0], "-1 or ");
    line.entries.below = sum_in(parts[0].substr(below + 2));
    if (parts.size() > 1) line.entries.positions = split(parts[1], ",");
    if (line.entries.positions.size() > line.shapes[0].size())
      fail("`" + line.name + "` has fewer dimensions than positions: " + parts[1]);
  }

  // Read `n*K < 2^32 slots a frame on CUDA`.
  void read_limit(Line& line, const std::string& clause) {
    const size_t sign = clause.find(" < ");
    Limit limit;
    limit.sum = sum_in(clause.substr(0, sign));
    std::string tail = clause.substr(sign + 3);
    const size_t cuda = tail.rfind(" on CUDA");
    limit.on_cuda = cuda != std::string::npos;
    if (limit.on_cuda) tail = tail.substr(0, cuda);
    limit.when = take_condition(tail);
    limit.number = tail.substr(0, tail.find(' '));
    limit.below = number_in(limit.number);
    limit.unit = strip(tail.substr(limit.number.size()));
    line.limits.push_back(std::move(limit));
  }

  // Read `0 to 2^40` or `>= 0`.
  void read_bounds(Line& line, const std::string& clause) {
    line.size = text_.size(line.name);
    line.has_bounds = true;
    line.most = INT64_MAX;
    if (begins(clause, ">= ")) {
      line.least = number_in(clause.substr(3));
      return;
    }
    const auto ends = split(clause, " to ");
    if (ends.size() != 2)
      fail("`" + line.name + "`: expected bounds such as 0 to 2^40, got " + clause);
    line.least = number_in(ends[0]);
    line.most = number_in(ends[1]);
    line.most_text = ends[1];
  }

  // Raise an error if `linear` or `vmap` names what does not exist.
  void check_names() {
    number_ = linear_number_;
    for (const Term& term : text_.terms) {
      if (text_.line(term.result) < 0) fail("no line for the result `" + term.result + "`");
      for (const std::string& factor : term.factors)
        if (text_.line(factor) < 0)
          fail("no line for the factor `" + factor + "` of " + term.result);
    }
    number_ = joined_number_;
    if (text_.says_vmap)
      for (const std::string& name : split(joined_, ",")) {
        text_.joined.push_back(text_.size(name));
        if (text_.joined.back() < 0) fail("no tensor has the size `" + name + "` that vmap joins");
      }
  }

  std::vector<std::string> lines_;
  size_t at_ = 0;
  int number_ = 1, linear_number_ = 1, joined_number_ = 1;
  Text text_;
  std::vector<Pending> pending_;
  std::string joined_;
  std::vector<std::pair<int, Condition>> conditions_;  // each with the number of its line
};

}  // namespace contract
}  // namespace calcops
