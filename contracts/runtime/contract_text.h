// Reads contracts into structs. contracts/README.md describes their language.
// contract_proofs.h proves what these structs promise.
//
// Every character of a clause is consumed by the grammar below, one function for each clause.
// Otherwise the contract is refused with the line, the clause and the nearest legal form.
#pragma once

#include <algorithm>
#include <cctype>
#include <charconv>
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
// The most dimensions of a tensor.
constexpr size_t kMostDimensions = 8;

// A Sum is a sum of Products of sizes, such as n + 2*nghost. A size is its number in Text::sizes.
// `...` is a size, too: the product of the leading dimensions.
struct Product {
  int64_t factor;
  std::vector<int> sizes;
  bool operator==(const Product& other) const {
    return factor == other.factor && sizes == other.sizes;
  }
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

// `n*K < 2^32 on CUDA`, `K <= N` or `N % 4 == 0`
struct Limit {
  Sum sum, bound;
  Compare compare = Compare::kLess;
  int64_t divisor = 0;  // of `N % 4 == 0`, whose bound is 0
  std::string text;     // without `on CUDA`
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
  bool any_shape = false;    // `any shape`
  bool has_leading = false;  // `[..., N]`
  int whole = -1;            // `with K = T*M`: the size K
  Sum parts;                 // and the product T*M
  std::vector<Type> types;
  std::string type_text;
  Type read_as = Type::kNone;  // `read as`: the type that kernels receive
  std::string like;            // `like x`
  int group = -1;              // the line whose dtypes it has: its own or that of `like`
  bool is_constant = false;    // it has no derivative
  Entries entries;
  std::vector<Limit> limits;

  // Numbers, strings and lists
  int size = -1;  // the size that an integer is
  std::vector<Bound> bounds;
  std::vector<std::string> choices;  // the allowed strings

  bool is_tensor() const { return any_shape || !shapes.empty(); }
  bool has_entries() const { return !entries.text.empty(); }
};

// name(arguments) -> results, and the text below it.
struct Schema {
  std::string text, name, summary, details;
  int number = 0;  // of its line in the contract
};

// `kernels  force of _force_virial`
struct Sharing {
  std::string user, owner;  // operators
  int number = 0;           // of the line in the contract
};

struct Text {
  std::vector<Schema> schemas;
  std::vector<Line> lines;
  std::vector<std::string> sizes;
  std::vector<Sharing> sharings;
  uint32_t joined = 0;  // sizes along which vmap concatenates its items, a bit each
  int leading = -1;     // the size `...`

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

// An error in a line of a contract.
struct Mistake : std::runtime_error {
  Mistake(int number, const std::string& what) : std::runtime_error(what), number(number) {}
  int number;
};

constexpr std::pair<Type, const char*> kTypeNames[] = {
    {Type::kBool, "bool"},       {Type::kUInt8, "uint8"},     {Type::kUInt16, "uint16"},
    {Type::kInt8, "int8"},       {Type::kInt16, "int16"},     {Type::kInt32, "int32"},
    {Type::kInt64, "int64"},     {Type::kFloat16, "float16"}, {Type::kBFloat16, "bfloat16"},
    {Type::kFloat32, "float32"}, {Type::kFloat64, "float64"}};

inline Type type_named(const std::string& name) {
  for (const auto& [type, known] : kTypeNames)
    if (name == known) return type;
  return Type::kNone;
}

inline std::string name_of(Type type) {
  for (const auto& [known, name] : kTypeNames)
    if (type == known) return name;
  return "";
}

inline bool is_floating(Type type) { return name_of(type).find("float") != std::string::npos; }

// Return the number of characters to insert, remove or replace that turns one word into another.
inline size_t edits_between(const std::string& from, const std::string& to) {
  std::vector<size_t> row(to.size() + 1);  // from the first i characters to the first k
  for (size_t k = 0; k < row.size(); ++k) row[k] = k;
  for (size_t i = 1; i <= from.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t k = 1; k < row.size(); ++k) {
      const size_t replaced = diagonal + (from[i - 1] != to[k - 1]);
      diagonal = row[k];
      row[k] = std::min({replaced, row[k] + 1, row[k - 1] + 1});
    }
  }
  return row.back();
}

// Return the word of the language that a wrong word probably means, or "".
inline std::string word_meant_by(const std::string& wrong) {
  static constexpr std::pair<const char*, const char*> kOfC[] = {
      {"float", "float32"}, {"double", "float64"}, {"int", "int32"},
      {"long", "int64"},    {"uint32", "int64"},   {"half", "float16"}};
  for (const auto& [word, type] : kOfC)
    if (wrong == word) return type;
  std::vector<std::string> words = {"like", "entries", "constant"};
  for (const auto& [type, name] : kTypeNames) words.push_back(name);
  std::string nearest;
  size_t least = 3;
  for (const std::string& word : words)
    if (const size_t edits = edits_between(wrong, word);
        edits < least && 2 * edits <= std::min(word.size(), wrong.size())) {
      nearest = word;
      least = edits;
    }
  return nearest;
}

// Return whether a word is a keyword of Python, which neither calls nor the code of torch.compile
// can have as a name. True, False and None may be defaults, and PyTorch refuses them as names.
inline bool is_keyword(const std::string& word) {
  static constexpr const char* kKeywords[] = {
      "and",    "as",   "assert", "async",  "await",  "break",   "class",    "continue",
      "def",    "del",  "elif",   "else",   "except", "finally", "for",      "from",
      "global", "if",   "import", "in",     "is",     "lambda",  "nonlocal", "not",
      "or",     "pass", "raise",  "return", "try",    "while",   "with",     "yield"};
  return std::find(std::begin(kKeywords), std::end(kKeywords), word) != std::end(kKeywords);
}

class Reader {
 public:
  explicit Reader(const std::string& text) : source_(text + '\n') {}

  Text read() {
    end_ = std::min(source_.find_first_not_of(" \t\r\n"), source_.size());
    while (end_ < source_.size()) {
      begin_ = end_;
      number_ = line_number(begin_);
      // Indented and empty lines continue a line. So does the `)` of a schema.
      do end_ = next_line(end_);
      while (is_space(source_[end_]) || source_[end_] == ')');
      name_ = source_.substr(begin_, source_.find_first_of(" \t\r(\n", begin_) - begin_);
      if (begin_ > 0 && source_[begin_ - 1] != '\n')
        fail("expected a schema or the name of an argument at the line's beginning");
      const bool is_schema = source_[begin_ + name_.size()] == '(';
      if (!is_schema && !std::all_of(name_.begin(), name_.end(), is_name_part))
        fail("expected a name, and a space behind it");
      is_schema ? read_schema() : read_entry();
      tokens_.clear();
    }
    name_.clear();
    for (const auto& [begin, end] : documentation_) check_documentation(begin, end);
    if (text_.schemas.empty()) fail("expected a schema, such as twice(Tensor x) -> Tensor y");
    return std::move(text_);
  }

 private:
  struct Token {
    enum Kind { kEnd, kName, kNumber, kString, kSign } kind;
    std::string text;
    size_t begin, end;  // positions in the source
  };

  // ---- errors -----------------------------------------------------------------------------------

  // Raise an error. Within a clause, quote it.
  [[noreturn]] void fail(const std::string& what, const std::string& advice = "") const {
    std::string clause;
    if (!tokens_.empty()) {
      size_t last = clause_;
      while (tokens_[last].kind != Token::kEnd && tokens_[last].text != ";") ++last;
      const size_t begin = tokens_[clause_].begin;
      clause = " in `" + joined(source_.substr(begin, tokens_[last].begin - begin)) + '`' + advice;
    }
    throw Mistake(number_, (name_.empty() ? "" : '`' + name_ + "`: ") + what + clause);
  }

  // Raise an error for the next token. Quote it, and the nearest legal form of the clause. Where a
  // clause or a dtype is expected, `is_word`, propose the word that was meant.
  [[noreturn]] void expected(const std::string& what, bool is_word = false) const {
    const Token& next = peek();
    std::string got = "the end";
    if (next.kind != Token::kEnd)
      got = '`' + source_.substr(next.begin, next.end - next.begin) + '`';
    const std::string meant = is_word ? word_meant_by(next.text) : "";
    if (!meant.empty()) got += ", which may mean " + meant;
    fail("expected " + what + ", got " + got, std::string("\n  legal: ") + form_);
  }

  // ---- tokens -----------------------------------------------------------------------------------

  static bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)); }
  // Return whether text may begin with a byte: a capital letter, or a letter that is not ASCII.
  // 0xc2 and 0xe2 begin signs such as ± and ≤.
  static bool begins_text(char c) {
    const unsigned char byte = static_cast<unsigned char>(c);
    return std::isupper(byte) || (byte >= 0xc3 && byte != 0xe2);
  }
  static bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)); }
  static bool is_name_part(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
  }

  static std::string trimmed(std::string text) {
    while (!text.empty() && is_space(text.back())) text.pop_back();
    return text;
  }

  // Return text with single spaces instead of line ends and indentation.
  static std::string joined(const std::string& text) {
    std::string line;
    for (const char c : text)
      if (!is_space(c))
        line += c;
      else if (!line.empty() && line.back() != ' ')
        line += ' ';
    return trimmed(line);
  }

  size_t next_line(size_t from) const { return source_.find('\n', from) + 1; }

  int line_number(size_t at) const {
    return 1 + int(std::count(source_.begin(), source_.begin() + ptrdiff_t(at), '\n'));
  }

  size_t skip_spaces(size_t at) const {
    while (at < end_ && is_space(source_[at])) ++at;
    return at;
  }

  // Return the token at a position. The last one is the full stop that ends the clauses.
  Token token_at(size_t at) const {
    size_t end = at + 1;
    if (at == end_ || (source_[at] == '.' && is_space(source_[end])))
      return {Token::kEnd, "", at, end};
    const char first = source_[at];
    Token::Kind kind = Token::kSign;
    if (is_digit(first)) {
      kind = Token::kNumber;
      while (is_digit(source_[end]) || (source_[end] == '.' && is_digit(source_[end + 1]))) ++end;
      const size_t sign = end + 1;
      const bool has_exponent = source_[end] == 'e' || source_[end] == 'E';
      const bool has_sign = has_exponent && (source_[sign] == '-' || source_[sign] == '+');
      if (has_exponent && is_digit(source_[sign + has_sign])) {
        end = sign + has_sign;
        while (is_digit(source_[end])) ++end;
      }
    } else if (is_name_part(first)) {
      kind = Token::kName;
      while (is_name_part(source_[end])) ++end;
    } else if (first == '"') {
      end = source_.find_first_of("\"\n", end);
      if (source_[end] == '"') return {Token::kString, text(at + 1, end), at, end + 1};
    } else if ((first == '<' || first == '>' || first == '=') && source_[end] == '=') {
      ++end;
    } else if (source_.compare(at, 3, "...") == 0) {
      end += 2;
    } else {
      while ((source_[end] & 0xc0) == 0x80) ++end;  // of a character of several bytes
    }
    return {kind, text(at, end), at, end};
  }

  std::string text(size_t begin, size_t end) const { return source_.substr(begin, end - begin); }

  const Token& peek() const { return tokens_[next_]; }

  bool is_next(const char* sign) const {
    return peek().kind != Token::kString && peek().text == sign;
  }

  bool accept(const char* sign) {
    if (!is_next(sign)) return false;
    ++next_;
    return true;
  }

  void require(const char* sign) {
    if (!accept(sign)) expected('`' + std::string(sign) + '`');
  }

  std::string take(Token::Kind kind, const char* what) {
    if (peek().kind != kind) expected(what);
    return tokens_[next_++].text;
  }

  std::string take_name(const char* what) { return take(Token::kName, what); }

  // Read a name such as `force` or `mine::force`.
  std::string take_operator(const char* what) {
    std::string name = take_name(what);
    if (accept(":")) {
      require(":");
      name += "::" + take_name(what);
    }
    return name;
  }

  // Return the text from a token to the last one that was taken.
  std::string text_from(size_t token) const {
    return joined(text(tokens_[token].begin, tokens_[next_ - 1].end));
  }

  // Read items between commas or `or`. item() reads one.
  template <class Item>
  void read_list(const Item& item) {
    do item();
    while (accept(",") ? (accept("or"), true) : accept("or"));
  }

  template <class Number>
  Number number_in(const std::string& digits) const {
    Number number = 0;
    const char* const end = digits.data() + digits.size();
    const auto [read, error] = std::from_chars(digits.data(), end, number);
    if (error != std::errc()) fail("a number is too large");
    if (read != end) fail("expected an integer");  // such as 2.5
    return number;
  }

  int64_t product(int64_t a, int64_t b) const {
    if (__builtin_mul_overflow(a, b, &a)) fail("a number is too large");
    return a;
  }

  // Read a number such as 12, -5, 2^40, 0.5 or 1e-6.
  Bound take_number(Compare compare) {
    Bound number{compare};
    const size_t begin = next_;
    const int sign = accept("-") ? -1 : 1;
    const std::string digits = take(Token::kNumber, "a number");
    number.whole = digits.find_first_of(".eE") == std::string::npos;
    if (number.whole) {
      const int64_t base = number_in<int64_t>(digits);
      number.integer = sign * base;
      if (accept("^")) {
        int64_t power = number_in<int64_t>(take(Token::kNumber, "a power"));
        if (base < 2 || power < 1) fail("expected a power of 2 or more");
        while (--power > 0) number.integer = product(number.integer, base);
      }
      number.real = double(number.integer);
    } else {
      number.real = sign * number_in<double>(digits);
    }
    number.text = text_from(begin);
    return number;
  }

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
    Product factors{1, {}};
    do {
      if (peek().kind == Token::kNumber) {
        factors.factor = product(factors.factor, number_in<int64_t>(tokens_[next_++].text));
        const bool is_joined =
            peek().kind == Token::kName && peek().begin == tokens_[next_ - 1].end;
        if (!is_joined) continue;  // not 4K
      }
      factors.sizes.push_back(size_named(take_name("a size, such as N, 3, 2N or N + M")));
    } while (accept("*"));
    return factors;
  }

  // Read a sum such as `n + 2*nghost` or `4K - 1`.
  Sum take_sum() {
    Sum sum{take_product()};
    while (is_next("+") || is_next("-")) {
      const int sign = accept("-") ? -1 : 1;
      if (sign > 0) require("+");
      sum.push_back(take_product());
      sum.back().factor *= sign;
    }
    return sum;
  }

  // ---- lines ------------------------------------------------------------------------------------

  // Read a schema, which PyTorch parses, and the indented text below it.
  void read_schema() {
    const size_t arrow = source_.find("->", begin_);
    if (arrow >= end_) fail("expected `-> ` and the results behind the arguments");
    size_t results = source_.find_first_not_of(" \n", arrow + 2);
    if (results < end_ && source_[results] == '(') results = source_.find(')', results);
    const size_t stop = results < end_ ? next_line(results) : end_;

    check_names(stop);
    documentation_.emplace_back(stop, end_);
    std::string documentation;
    size_t indentation = std::string::npos;  // of the first line
    for (size_t at = stop; at < end_; at = next_line(at)) {
      const std::string line = text(at, next_line(at));
      const size_t first = line.find_first_not_of(" \t\r\n");
      if (indentation == std::string::npos) indentation = first;
      documentation += first < line.size() ? line.substr(std::min(indentation, first)) : "\n";
    }
    const size_t end = documentation.find("\n\n");
    const std::string details = end == std::string::npos ? "" : documentation.substr(end + 2);
    for (const Schema& other : text_.schemas)
      if (other.name == name_) fail("a second schema");
    text_.schemas.push_back({joined(text(begin_, stop)), name_,
                             joined(documentation.substr(0, end)), trimmed(details), number_});
  }

  // Raise an error if a schema, which ends at `stop`, has a name that cannot be used.
  void check_names(size_t stop) const {
    for (size_t at = begin_; at < stop; at = skip_spaces(at)) {
      const Token token = token_at(at);
      at = token.end;
      if (token.text == "'") at = std::min(source_.find('\'', at), stop) + 1;  // a string
      if (token.kind != Token::kName) continue;
      if (is_keyword(token.text))
        fail('`' + token.text + "` is a keyword of Python; write `" + token.text + "_`");
      if (is_of_operators(token.text) && token.begin > begin_)
        fail("no argument or result is named " + token.text + ", which begins a line of its own");
    }
  }

  // Return whether a line with a name is no argument's.
  static bool is_of_operators(const std::string& name) {
    return name == "kernels" || name == "vmap";
  }

  // Read the line of an argument or a result, or `kernels` or `vmap`.
  void read_entry() {
    const bool has_operators = is_of_operators(name_);
    size_t at = skip_spaces(begin_ + name_.size());
    if (has_operators || (at < end_ && !begins_text(source_[at]))) {
      do {
        tokens_.push_back(token_at(skip_spaces(at)));
        at = tokens_.back().end;
      } while (tokens_.back().kind != Token::kEnd);
    }
    next_ = clause_ = 0;
    if (has_operators) {
      name_ == "vmap" ? read_vmap() : read_kernels();
    } else {
      if (text_.line(name_) >= 0) fail("a second line");
      if (text_.lines.size() == kMost) fail("more than " + std::to_string(kMost) + " lines");
      Line& line = text_.lines.emplace_back();
      line.name = name_;
      line.text = trimmed(text(begin_, end_));
      line.number = number_;
      if (!tokens_.empty()) do {
          clause_ = next_;
          read_clause(line);
        } while (accept(";"));
    }
    if (!tokens_.empty() && peek().kind != Token::kEnd)
      expected("`;`, or the full stop that ends the clauses");
    tokens_.clear();
    check_text(skip_spaces(at));
  }

  void read_kernels() {
    form_ = "force, force_virial of _force_virial";
    if (!text_.sharings.empty()) fail("a second line, where `;` would continue the first one,");
    do {
      clause_ = next_;
      std::vector<std::string> users;
      read_list([&] { add_new(users, take_operator("an operator")); });
      require("of");
      const std::string owner = take_operator("the operator that has the kernels");
      for (const std::string& user : users) text_.sharings.push_back({user, owner, number_});
    } while (accept(";"));
  }

  void read_vmap() {
    form_ = "joins N, M";
    if (text_.joined) fail("a second line");
    require("joins");
    read_list([&] {
      const std::string name = accept("...") ? "..." : take_name("a size");
      if (text_.size(name) < 0) fail("no tensor above has the size " + name);
      text_.joined |= 1u << text_.size(name);
    });
  }

  // Raise an error if text reads like a clause, so that no clause is taken for text.
  void check_text(size_t at) {
    if (at < end_ && !begins_text(source_[at])) {
      size_t end = std::min(at + 20, end_);
      while ((source_[end] & 0xc0) == 0x80) ++end;  // of a character of several bytes
      fail("text begins with a capital letter, got `" + joined(text(at, end)) + '`');
    }
    while (at < end_) {
      tokens_.push_back(token_at(at));
      at = skip_spaces(tokens_.back().end);
    }
    tokens_.resize(tokens_.size() + 3, {Token::kEnd, "", end_, end_});
    for (next_ = clause_ = 0; next_ + 3 < tokens_.size(); ++next_) {
      if ((next_ == clause_ && begins_clause()) || is_comparison() || is_range())
        fail("text that reads like a clause",
             "\n  Clauses end at the first full stop. Text has no <, > or ==, and no `1 to 5`."
             "\n  No sentence of it begins like a clause, for example with `entries` or `like`.");
      if (peek().kind == Token::kEnd || is_next(";")) clause_ = next_ + 1;
    }
    tokens_.clear();
  }

  // Return whether the next tokens begin a clause other than a limit or bounds.
  bool begins_clause() const {
    std::string word = peek().text;
    if (peek().kind == Token::kString) {
      const Token& second = tokens_[next_ + 1];
      return second.kind == Token::kEnd || second.text == "," || second.text == "or";
    }
    std::transform(word.begin(), word.end(), word.begin(),
                   [](unsigned char c) { return char(std::tolower(c)); });
    for (const char* const begin : {"[", "like", "entries", "constant", "vmap"})
      if (word == begin) return true;
    if (word == "with") return tokens_[next_ + 2].text == "=";  // with K = T*M
    return type_named(word) != Type::kNone || (word == "any" && tokens_[next_ + 1].text == "shape");
  }

  bool is_comparison() const {
    for (const char* const sign : {"<", "<=", ">", ">=", "==", "≤", "≥"})
      if (is_next(sign)) return true;
    return false;
  }

  // Return whether the next tokens are like `1 to 5`.
  bool is_range() const {
    const Token& end = tokens_[next_ + 2];
    return peek().kind == Token::kNumber && tokens_[next_ + 1].text == "to" &&
           (end.kind == Token::kNumber || end.text == "-");
  }

  // Raise an error if a line of a schema's documentation is another line of the contract.
  void check_documentation(size_t at, size_t end) {
    for (; at < end; at = next_line(at)) {
      end_ = next_line(at);
      const Token name = token_at(skip_spaces(at));
      const bool has_operators = is_of_operators(name.text);
      if (!has_operators && text_.line(name.text) < 0) continue;
      size_t next = name.end;
      for (tokens_.clear(); tokens_.size() < 3; next = tokens_.back().end)
        tokens_.push_back(token_at(skip_spaces(next)));
      next_ = 0;
      const std::string gap = text(name.end, tokens_[0].begin);
      const bool is_column = gap.size() > 1 || gap == "\t";
      const bool is_clause =
          has_operators ? is_next("joins") || is_operator(peek().text) : begins_clause();
      if (tokens_[0].kind != Token::kEnd && (is_column || (!gap.empty() && is_clause))) {
        number_ = line_number(at);
        tokens_.clear();
        fail("documentation that reads like the line of `" + name.text +
             "`; write that line in the first column, or begin the documentation's with another "
             "word");
      }
    }
    tokens_.clear();
  }

  bool is_operator(const std::string& name) const {
    return std::any_of(text_.schemas.begin(), text_.schemas.end(),
                       [&](const Schema& schema) { return schema.name == name; });
  }

  // ---- clauses ----------------------------------------------------------------------------------

  void read_clause(Line& line) {
    const Token next = peek();
    const bool is_name = next.kind == Token::kName, is_number = next.kind == Token::kNumber;
    const bool is_bound = next.text[0] == '<' || next.text[0] == '>';
    // A name alone is no limit.
    const Token& second = tokens_[next_ + (next.kind != Token::kEnd)];
    const bool is_sum = is_name && second.kind == Token::kSign && second.text != ";";
    const auto is = [&](bool condition, const char* kind, const char* form) {
      if (!condition) return false;
      form_ = form;
      if (kind != std::string("limit") && !is_bound &&
          std::count(line.clauses.begin(), line.clauses.end(), kind))
        fail("a second clause of the same kind");
      line.clauses.push_back(kind);
      return true;
    };
    if (is(is_next("["), "shape",
           "[N, 3] or [N, 3, 1] | [B, K] or [B, T, M] with K = T*M | [..., K]"))
      read_shapes(line);
    else if (is(accept("any"), "shape", "any shape"))
      read_any_shape(line);
    else if (is(accept("like"), "like", "like x"))
      line.like = take_name("the name of a tensor");
    else if (is(accept("entries"), "entries", "entries -1 or 0 <= j < n at row, slot"))
      read_entries(line);
    else if (is(accept("constant"), "constant", "constant"))
      line.is_constant = true;
    else if (is(is_name && type_named(next.text) != Type::kNone, "dtype",
                "float32 or float64 | int32 or int64 read as int64"))
      read_types(line);
    else if (is(next.kind == Token::kString, "strings", "\"a\", \"b\" or \"c\""))
      read_list(
          [&] { add_new(line.choices, take(Token::kString, "a string in quotation marks")); });
    else if (is(line.is_tensor() && (is_sum || is_number), "limit",
                "N >= 1 | K <= N | N % 4 == 0 | n*K < 2^32 on CUDA"))
      read_limit(line);
    else if (is(is_number || is_next("-"), "bounds", "0 to 2^40"))
      read_range(line);
    else if (is(is_bound, "bounds", "> 0 | <= 2.5 | > 1e-6 | n <= N, in the line of a tensor"))
      line.bounds.push_back(take_bound());
    else
      fail_unknown(line);
  }

  template <class Item>
  void add_new(std::vector<Item>& list, const Item& item) const {
    if (std::find(list.begin(), list.end(), item) != list.end()) fail("the same twice");
    list.push_back(item);
  }

  void read_any_shape(Line& line) {
    require("shape");
    line.any_shape = true;
    line.shape_text = "of any shape";
  }

  // Read `[B, n, K] or [B, n, T, M] with K = T*M`, or `[..., K]`.
  void read_shapes(Line& line) {
    const size_t begin = next_;
    read_list([&] {
      require("[");
      Shape shape;
      if (is_next("...")) line.has_leading = true;
      if (!accept("]")) do
          shape.push_back(accept("...") ? leading(shape) : take_sum());
        while (accept(",") || (require("]"), false));
      if (shape.size() > kMostDimensions) fail("more than 8 dimensions");
      line.shapes.push_back(shape);
    });
    if (line.has_leading && line.shapes.size() > 1) fail("expected one shape, since it has `...`");
    line.shape_text = text_from(begin);
    if (!accept("with")) return;
    if (line.shapes.size() < 2) fail("`with` is for another shape");
    line.whole = size_named(take_name("a size"));
    require("=");
    line.parts = take_sum();
  }

  // Return the dimension `...` of a shape that is empty so far.
  Sum leading(const Shape& shape) {
    if (!shape.empty()) fail("expected `...` as the first dimension, as in [..., N]");
    text_.leading = size_named("...");
    return {Product{1, {text_.leading}}};
  }

  // Read `int32 or int64 read as int64`.
  void read_types(Line& line) {
    const size_t begin = next_;
    read_list([&] { add_new(line.types, take_dtype()); });
    line.type_text = text_from(begin);
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
    if (type == Type::kNone) expected("a dtype", true);
    ++next_;
    return type;
  }

  // Read `entries -1 or 0 <= j < n + nghost at frame, atom, slot`.
  void read_entries(Line& line) {
    const size_t begin = next_;
    if (accept("-")) {
      require("1");
      require("or");
      line.entries.may_be_none = true;
    }
    if (!accept("0")) expected("`0 <=`, since entries count from 0");
    require("<=");
    take_name("a name for an entry");
    require("<");
    const size_t bound = next_;
    line.entries.below = take_sum();
    line.entries.bound = text_from(bound);
    line.entries.text = text_from(begin);
    if (accept("at")) do
        line.entries.positions.push_back(take_name("the name of a dimension"));
      while (accept(","));
  }

  // Read `n*K < 2^32 on CUDA`, `K <= N` or `N % 4 == 0`.
  void read_limit(Line& line) {
    Limit limit;
    const size_t begin = next_;
    limit.sum = take_sum();
    if (accept("%")) {
      limit.divisor = number_in<int64_t>(take(Token::kNumber, "a number"));
      if (limit.divisor == 0) fail("expected a number above 0 behind `%`");
      require("==");
      require("0");
      limit.bound = {Product{0, {}}};
    } else {
      if (is_next("==")) fail("equal sizes have the same name, and `==` is for N % 4 == 0");
      limit.compare = take_compare();
      limit.bound = take_limit_bound();
    }
    limit.text = text_from(begin);
    if (accept("on")) {
      require("CUDA");
      limit.on_cuda = true;
    }
    line.limits.push_back(std::move(limit));
  }

  // Read the sizes or the number behind the sign of a limit.
  Sum take_limit_bound() {
    const Token &number = peek(), &second = tokens_[next_ + (number.kind != Token::kEnd)];
    const bool is_joined = second.kind == Token::kName && second.begin == number.end;
    if (number.kind == Token::kName || second.text == "*" || is_joined) return take_sum();
    const Bound bound = take_number(Compare::kLess);
    if (!bound.whole) fail("expected sizes or an integer, as in N >= 1");
    return {Product{bound.integer, {}}};
  }

  Bound take_bound() {
    const Compare compare = take_compare();
    return take_number(compare);
  }

  Compare take_compare() {
    if (accept("<=")) return Compare::kAtMost;
    if (accept(">=")) return Compare::kAtLeast;
    if (accept("<")) return Compare::kLess;
    if (accept(">")) return Compare::kMore;
    expected("`<`, `<=`, `>` or `>=`");
  }

  [[noreturn]] void fail_unknown(const Line& line) {
    form_ = line.is_tensor()
                ? "float32 or float64 | like x | entries 0 <= i < n at row | n < 2^30 | constant"
                : "[N, 3] | 0 to 2^40 | > 0 | \"a\" or \"b\"";
    expected(line.is_tensor() ? "a clause of a tensor"
                              : "a clause, or text that begins with a capital letter",
             true);
  }

  // Read `0 to 2^40`.
  void read_range(Line& line) {
    line.bounds.push_back(take_number(Compare::kAtLeast));
    require("to");
    line.bounds.push_back(take_number(Compare::kAtMost));
    if (line.bounds[0].real > line.bounds[1].real) fail("expected the lower number first");
  }

  const std::string source_;
  size_t begin_ = 0, end_ = 0;    // of the line that is read, with those that continue it
  int number_ = 1;                // of this line
  std::string name_;              // of this line or schema
  std::vector<Token> tokens_;     // of its clauses
  size_t next_ = 0, clause_ = 0;  // the next token, and the first one of the clause
  const char* form_ = "";         // a legal form of the clause
  // Begin and end of each schema's documentation.
  std::vector<std::pair<size_t, size_t>> documentation_;
  Text text_;
};

}  // namespace contract
}  // namespace calcops
