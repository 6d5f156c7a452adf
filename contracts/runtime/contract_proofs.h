// Proves when a contract is loaded that its operators can be called: each size is set before it is
// used, each name exists, and each kernel fits its schema.
#pragma once

#include <torch/library.h>

#include <array>
#include <map>

#include "contract_text.h"

namespace calcops {
namespace contract {

enum class Kind {
  kTensor,
  kInt,
  kFloat,
  kBool,
  kString,
  kInts,
  kFloats,
  kOptionalInt,
  kOptionalFloat,
  kMask,
  kOther
};

inline bool is_optional(const c10::Argument& argument) {
  return argument.type()->kind() == c10::TypeKind::OptionalType;
}

inline Kind kind_of(const c10::Argument& argument) {
  // In the order of Kind.
  static constexpr const char* kTypes[] = {"Tensor", "int",     "float", "bool",   "str",
                                           "int[]",  "float[]", "int?",  "float?", "bool[]"};
  const bool optional = is_optional(argument);
  std::string type = (optional ? argument.type()->containedType(0) : argument.type())->str();
  if (optional && type != "Tensor" && type.back() != ']') type += '?';
  return Kind(std::find(std::begin(kTypes), std::end(kTypes), type) - kTypes);
}

// What the contract says about one operator.
struct Signature {
  Schema schema;
  c10::FunctionSchema parsed;
  std::vector<Kind> kinds{};          // of each argument
  std::array<int, kMost> argument{};  // of each line: its position in the schema, or -1
  std::vector<int> lines{};           // of each argument: its line; output_mask has -1
  std::vector<int> result_lines{};    // the gradient of an argument has the argument's line
  int mask = -1;                      // the position of output_mask, or -1
  bool is_composition = false;
  // The position in the contract of the operator whose kernels it uses: its own, or another one.
  size_t owner = 0;
  // The lines of arguments, in the order in which a call checks them.
  std::vector<int> numbers{}, tensors{}, strings{};

  bool has(int line) const { return argument[line] >= 0; }
  // Of a line that is an argument.
  Kind kind(int line) const { return kinds[argument[line]]; }
  const c10::Argument& at_line(int line) const { return parsed.arguments()[argument[line]]; }
  bool may_be_absent(int line) const { return is_optional(at_line(line)); }
};

// Return whether sizes are no symbols. Where they are not, integers are compared and computed with
// directly, because SymInt's operators take several times as long.
inline bool are_integers(const c10::SymInt& a, const c10::SymInt& b) {
  return !a.is_heap_allocated() && !b.is_heap_allocated();
}

// Compare numbers, or sizes. A comparison of symbols becomes an assertion of the graph.
inline bool is_below(double a, double b) { return a < b; }
inline bool is_at_most(double a, double b) { return a <= b; }
inline bool is_below(const c10::SymInt& a, const c10::SymInt& b) {
  if (are_integers(a, b)) return a.as_int_unchecked() < b.as_int_unchecked();
  return a.sym_lt(b).expect_true(__FILE__, __LINE__);
}
inline bool is_at_most(const c10::SymInt& a, const c10::SymInt& b) {
  if (are_integers(a, b)) return a.as_int_unchecked() <= b.as_int_unchecked();
  return a.sym_le(b).expect_true(__FILE__, __LINE__);
}
inline bool is_equal(const c10::SymInt& a, const c10::SymInt& b) {
  if (are_integers(a, b)) return a.as_int_unchecked() == b.as_int_unchecked();
  return a.sym_eq(b).expect_true(__FILE__, __LINE__);
}

// Return whether a number is within a bound.
template <class Number>
bool meets(Compare compare, const Number& a, const Number& bound) {
  if (compare == Compare::kLess) return is_below(a, bound);
  if (compare == Compare::kAtMost) return is_at_most(a, bound);
  return compare == Compare::kMore ? is_below(bound, a) : is_at_most(bound, a);
}

class Prover {
 public:
  // `composed` has the names of the compositions.
  Prover(Text& text, const std::vector<std::string>& composed) : text_(text) {
    is_used_.resize(text_.lines.size());
    for (const Schema& schema : text_.schemas) read_operator(schema, composed);
    resolve_groups();
    for (Signature& op : operators) read_results(op);
    for (size_t i = 0; i < text_.lines.size(); ++i)
      if (!is_used_[i]) fail(text_.lines[i], "no operator has it as an argument or a result");
    for (Signature& op : operators) check_sizes(op);
    for (size_t i = 0; i < operators.size(); ++i) operators[i].owner = i;
    for (const Sharing& sharing : text_.sharings) share_kernels(sharing);
  }

  std::vector<Signature> operators;

 private:
  [[noreturn]] static void fail(const Line& line, const std::string& what) {
    throw Mistake(line.number, "`" + line.name + "`: " + what);
  }
  [[noreturn]] static void fail(const Schema& schema, const std::string& what) {
    throw Mistake(schema.number, "`" + schema.name + "`: " + what);
  }

  std::string names(uint32_t sizes) const {
    std::string list;
    for (size_t i = 0; i < text_.sizes.size(); ++i)
      if (sizes >> i & 1)
        list += (list.empty() ? "" : ", ") + (int(i) == text_.leading ? "`...`" : text_.sizes[i]);
    return list;
  }

  // ---- dtypes -----------------------------------------------------------------------------------

  // Find the line that has the dtypes of each tensor: its own or that of `like`.
  void resolve_groups() {
    for (size_t i = 0; i < text_.lines.size(); ++i) {
      Line& line = text_.lines[i];
      if (!line.is_tensor()) continue;
      const bool is_like = !line.like.empty();
      if (is_like && !line.types.empty()) fail(line, "has dtypes and `like`");
      line.group = is_like ? text_.line(line.like) : int(i);
      if (line.group < 0 || !text_.lines[line.group].is_tensor())
        fail(line, "no tensor is named " + line.like);
      const Line& root = text_.lines[line.group];
      if (root.types.empty() && is_like)
        fail(line, "`like` is for a tensor that has dtypes, such as float32 or float64");
      if (root.types.empty())
        fail(line, "expected its dtype, such as float32 or float64, or like x");
      line.read_as = root.read_as;
      if (line.has_entries()) check_entries(line, root.types);
    }
  }

  static void check_entries(const Line& line, const std::vector<Type>& types) {
    for (const Type type : types) {
      if (is_floating(type) || type == Type::kBool) fail(line, "entries are integers");
      if (line.entries.may_be_none && (type == Type::kUInt8 || type == Type::kUInt16))
        fail(line, "-1 is no entry of an unsigned dtype");
    }
    const size_t positions = line.entries.positions.size();
    if (line.any_shape && positions > 0)
      fail(line, "`at` names the dimensions of entries, and any shape has any number of them");
    if (!line.any_shape && positions > line.shapes[0].size())
      fail(line, "more positions behind `at` than dimensions");
  }

  // ---- arguments and results --------------------------------------------------------------------

  // Raise an error if a line has a clause that does not apply to its argument, or lacks one.
  void check_clauses(const Signature& op, const Line& line, const c10::Argument& argument) const {
    // Of each Kind.
    static constexpr const char* kAllowed[] = {"shape dtype like entries limit constant",
                                               "bounds",
                                               "bounds",
                                               "",
                                               "strings",
                                               "",
                                               "",
                                               "bounds",
                                               "bounds",
                                               "",
                                               ""};
    const Kind kind = kind_of(argument);
    const std::string allowed = kAllowed[int(kind)];
    for (const std::string& clause : line.clauses)
      if (allowed.find(clause) == std::string::npos)
        fail(line, "a clause of the kind `" + clause + "`, but its type in " + op.schema.name +
                       " is " + argument.real_type()->str() + ", which has " +
                       (allowed.empty() ? "text" : "clauses of the kind " + allowed) + " only" +
                       (allowed == "bounds" ? ", such as 0 to 1" : ""));
    if (kind == Kind::kTensor && !line.is_tensor() && !op.is_composition)
      fail(line, "expected its shape, such as [N, 3]");
    if (kind == Kind::kString && line.choices.empty() && !op.is_composition)
      fail(line, "expected the allowed strings, such as \"a\" or \"b\"");
    for (const Bound& bound : line.bounds)
      if ((kind == Kind::kInt || kind == Kind::kOptionalInt) && !bound.whole)
        fail(line, "expected integers, got " + bound.text);
  }

  // Raise an error if a line refuses its argument's default. Kernels receive it unchecked where
  // another operator that lacks the argument uses them.
  static void check_default(const Schema& schema, const Line& line, const c10::Argument& argument) {
    const auto& value = argument.default_value();
    if (!value || value->isNone()) return;
    const bool lacks_point = kind_of(argument) == Kind::kOptionalFloat && value->isInt();
    if (!value->type()->isSubtypeOf(*argument.type()))
      fail(schema, "the default of `" + line.name + "` is no " + argument.real_type()->str() +
                       (lacks_point ? c10::str("; write ", *value, ".0") : ""));
    bool is_ok = line.choices.empty() ||
                 std::count(line.choices.begin(), line.choices.end(), value->toStringRef()) > 0;
    for (const Bound& bound : line.bounds)
      is_ok &= value->isInt() ? meets<c10::SymInt>(bound.compare, value->toInt(), bound.integer)
                              : meets(bound.compare, value->toDouble(), bound.real);
    if (!is_ok) fail(line, c10::str("refuses its own default ", *value));
  }

  // Let PyTorch parse a schema.
  static c10::FunctionSchema parsed(const Schema& schema) {
    try {
      return torch::schema(schema.text.c_str());
    } catch (const c10::Error& error) {
      const std::string what = error.what_without_backtrace();
      if (what.find("follows default argument") != std::string::npos)
        fail(schema, "arguments without a default come first");
      throw Mistake(schema.number, what);
    } catch (const std::exception& error) {  // PyTorch 2.10's parser has an error of its own
      throw Mistake(schema.number, error.what());
    }
  }

  static void check_alias(const Schema& schema, const c10::Argument& argument) {
    if (argument.alias_info())
      fail(schema,
           "an operator changes no argument and returns none; write Tensor and return a "
           "new tensor instead of " +
               argument.real_type()->str() + '(' + (argument.alias_info()->isWrite() ? "a!" : "a") +
               ")");
  }

  void read_operator(const Schema& schema, const std::vector<std::string>& composed) {
    Signature op{schema, parsed(schema)};
    if (op.parsed.is_vararg() || op.parsed.is_varret() || !op.parsed.overload_name().empty())
      fail(schema, "expected a name without a point, and no `...`");
    if (op.parsed.returns().empty()) fail(schema, "expected a result");
    op.is_composition = std::count(composed.begin(), composed.end(), schema.name) > 0;
    op.argument.fill(-1);
    for (const c10::Argument& argument : op.parsed.arguments()) {
      const std::string type = argument.real_type()->str();
      const Kind kind = kind_of(argument);
      op.kinds.push_back(kind);
      check_alias(schema, argument);
      if (argument.name() == "output_mask" && kind == Kind::kMask) {
        op.mask = int(op.lines.size());
        op.lines.push_back(-1);
        if (argument.N() != int(op.parsed.returns().size()))
          fail(schema, "output_mask has one bool for each result");
        continue;
      }
      const int i = text_.line(argument.name());
      if (i < 0) fail(schema, "no line describes its argument `" + argument.name() + "`");
      if (!op.is_composition && (kind == Kind::kOther || kind == Kind::kMask))
        fail(schema, "kernels take no " + type + " `" + argument.name() + "`; " +
                         (type == "bool?" || type == "str?"
                              ? "write a default that means none, such as False or \"none\""
                              : "the types are Tensor, Tensor?, int, int?, SymInt, float, float?, "
                                "bool, str, int[] and float[]"));
      if (op.has(i)) fail(schema, "two arguments `" + argument.name() + "`");
      is_used_[i] = true;
      op.argument[i] = int(op.lines.size());
      op.lines.push_back(i);
      Line& line = text_.lines[i];
      check_clauses(op, line, argument);
      check_default(schema, line, argument);
      const int size = text_.size(line.name);
      if (size >= 0 && kind != Kind::kInt)
        fail(line, "a size of a shape has this name, so its type is int, but in " + schema.name +
                       " it is " + argument.real_type()->str());
      line.size = size;
    }
    operators.push_back(std::move(op));
  }

  // Find the line of each result. One that is also an argument is the gradient for it.
  void read_results(Signature& op) {
    const Schema& schema = op.schema;
    for (const c10::Argument& result : op.parsed.returns()) {
      const int i = text_.line(result.name());
      check_alias(schema, result);
      if (op.is_composition && i < 0) continue;  // it makes its results itself
      if (kind_of(result) != Kind::kTensor || is_optional(result))
        fail(schema, "kernels return no " + result.real_type()->str() + ", only Tensor");
      if (result.name().empty()) fail(schema, "its results have names, as in -> Tensor y");
      if (i < 0) fail(schema, "no line describes its result `" + result.name() + "`");
      const Line& line = text_.lines[i];
      if (std::count(op.result_lines.begin(), op.result_lines.end(), i))
        fail(schema, "two results `" + line.name + "`");
      op.result_lines.push_back(i);
      is_used_[i] = true;
      if (op.has(i)) {
        if (op.may_be_absent(i) && op.mask < 0)
          fail(line, "a result is always there, and this argument may be absent");
        continue;
      }
      if (!line.is_tensor()) fail(line, "expected the shape of a result, such as [N, 3]");
      check_clauses(op, line, result);
      if (line.shapes.size() > 1) fail(line, "a result has one shape");
      if (!op.is_composition && (line.has_entries() || !line.limits.empty() || line.is_constant))
        fail(line, "entries, limits and `constant` are for arguments");
      if (!op.is_composition && !has_one_dtype(op, line))
        fail(line, "no argument of " + schema.name +
                       " selects one of its dtypes; "
                       "write one dtype, or `like x` for an argument x");
    }
  }

  // Return whether a call determines the dtype of a result.
  bool has_one_dtype(const Signature& op, const Line& result) const {
    if (text_.lines[result.group].types.size() == 1) return true;
    return std::any_of(op.lines.begin(), op.lines.end(),
                       [&](int i) { return i >= 0 && text_.lines[i].group == result.group; });
  }

  // ---- sizes ------------------------------------------------------------------------------------

  // Return the sizes that are known once a tensor was checked. `known` are known before. A
  // dimension may set one size, if it has the form n + ... with known other sizes.
  uint32_t known_after(const Signature& op, const Line& line, uint32_t known) const {
    uint32_t common = line.any_shape ? known : ~0u;
    for (const Shape& shape : line.shapes) {
      uint32_t after = known;
      for (const Sum& dim : shape) after |= set_by(op, line, dim, after);
      if (line.whole >= 0 && !(sizes_of(line.parts) & ~after)) after |= 1u << line.whole;
      if (const uint32_t lacks = sizes_of(line.shapes[0]) & ~after)
        fail(line, "a shape of " + line.shape_text + " lacks " + names(lacks));
      common &= after;
    }
    return common;
  }

  // Return the size that a dimension sets, as a bit.
  uint32_t set_by(const Signature& op, const Line& line, const Sum& dim, uint32_t known) const {
    const uint32_t unknown = sizes_of(dim) & ~known;
    int products = 0;
    bool is_alone = false;
    for (const Product& product : dim) {
      if (!(sizes_of(Sum{product}) & unknown)) continue;
      ++products;
      is_alone = product.factor == 1 && product.sizes.size() == 1;
    }
    if (unknown && (products != 1 || !is_alone))
      fail(line, "a dimension of " + line.shape_text + " cannot determine " + names(unknown) +
                     place_for(op, line, unknown));
    return unknown;
  }

  // Return where to write a line whose dimensions cannot determine sizes.
  std::string place_for(const Signature& op, const Line& line, uint32_t unknown) const {
    for (size_t i = 0; i < text_.lines.size(); ++i) {
      const Line& other = text_.lines[i];
      if (&other == &line || !op.has(int(i)) || op.may_be_absent(int(i))) continue;
      for (const Shape& shape : other.shapes)
        for (const Sum& dim : shape)
          if (bare(dim) >= 0 && unknown >> bare(dim) & 1)
            return "; write it below the line of `" + other.name + "`, which has " +
                   text_.sizes[bare(dim)];
    }
    return advice(unknown, "before it or in a line above");
  }

  // Return how an operator gets sizes that no dimension sets.
  std::string advice(uint32_t unknown, const std::string& place) const {
    if (text_.leading >= 0 && unknown >> text_.leading & 1) return "";
    const std::string size = text_.sizes[size_t(__builtin_ctz(unknown))];
    return "; write " + size + ' ' + place + ", or add an argument `int " + size + '`';
  }

  // Prove that a call sets each size before it uses it, and sort the lines into the order of a
  // call.
  void check_sizes(Signature& op) {
    uint32_t known = 0;
    for (size_t i = 0; i < text_.lines.size(); ++i) {
      const Line& line = text_.lines[i];
      const Kind kind = op.has(int(i)) ? op.kind(int(i)) : Kind::kOther;
      const int size = text_.size(line.name);
      if (size >= 0 && kind == Kind::kInt) known |= 1u << size;
      const bool is_optional = kind == Kind::kOptionalInt || kind == Kind::kOptionalFloat;
      if (kind == Kind::kInt || kind == Kind::kFloat || is_optional) op.numbers.push_back(int(i));
      if (kind == Kind::kString) op.strings.push_back(int(i));
    }
    // The sizes of tensors that are always given are set first, then those of optional ones.
    for (const bool optional : {false, true})
      for (size_t i = 0; i < text_.lines.size(); ++i) {
        const Line& line = text_.lines[i];
        if (!line.is_tensor() || !op.has(int(i)) || op.may_be_absent(int(i)) != optional) continue;
        op.tensors.push_back(int(i));
        const uint32_t own = known_after(op, line, known);
        if (!optional) known = own;
      }
    // Entries and limits are checked when all sizes are set.
    for (const int i : op.tensors) {
      const Line& line = text_.lines[i];
      uint32_t used = sizes_of(line.entries.below);
      for (const Limit& limit : line.limits) used |= sizes_of(limit.sum) | sizes_of(limit.bound);
      require_known(op, line, used & ~known_after(op, line, known));
    }
    for (const int i : op.result_lines)
      if (!op.has(i) && !text_.lines[i].any_shape)
        require_known(op, text_.lines[i], sizes_of(text_.lines[i].shapes[0]) & ~known);
    if (!op.is_composition && (op.tensors.empty() || op.may_be_absent(op.tensors[0])))
      fail(op.schema, "expected a Tensor that is always given, whose device selects the kernel");
  }

  void require_known(const Signature& op, const Line& line, uint32_t unknown) const {
    if (unknown)
      fail(line, "no argument that is always given has the size " + names(unknown) + " in " +
                     op.schema.name + advice(unknown, "in the shape of a Tensor"));
  }

  // ---- kernels of another operator --------------------------------------------------------------

  // Let an operator use the kernels of another one. Raise an error if it cannot.
  void share_kernels(const Sharing& sharing) {
    const auto refuse = [&](const std::string& what) {
      throw Mistake(sharing.number, "`kernels`: " + what);
    };
    const auto position = [&](const std::string& name) {
      for (size_t i = 0; i < operators.size(); ++i)
        if (operators[i].schema.name == name) return i;
      refuse("no schema names " + name);
      return size_t(0);
    };
    const size_t user = position(sharing.user), owner = position(sharing.owner);
    if (operators[user].owner != user) refuse("a second time " + sharing.user);
    const std::string hindrance = hindrance_of(operators[user], operators[owner]);
    if (!hindrance.empty())
      refuse(sharing.user + " cannot use those of " + sharing.owner + ": " + hindrance);
    for (const Sharing& other : text_.sharings)
      if (other.user == sharing.owner)
        refuse("the kernels of " + sharing.owner + " are those of " + other.owner + "; write `" +
               sharing.user + " of " + other.owner + '`');
    operators[user].owner = owner;
  }

  // Return whether kernels that take the second kind can be given the first one.
  static bool converts(Kind from, Kind to) {
    return from == to || (from == Kind::kInt && to == Kind::kOptionalInt) ||
           (from == Kind::kFloat && to == Kind::kOptionalFloat);
  }

  // Return why an operator cannot use the kernels of another one, or "".
  std::string hindrance_of(const Signature& op, const Signature& other) const {
    if (op.is_composition || other.is_composition) return "a composition has no kernels";
    if (&op == &other) return "they are its own";
    const auto &results = op.result_lines, &others = other.result_lines;
    if (results.size() > others.size() ||
        !std::equal(results.begin(), results.end(), others.begin()))
      return "its results are not the first ones of these";
    const bool computes_all = op.mask < 0 && results.size() == others.size();
    if (!computes_all && other.mask < 0)
      return "not all results are wanted, and " + other.schema.name + " has no output_mask";
    uint32_t sizes = 0;  // that the tensors of `op` have
    for (const int i : op.tensors)
      for (const Shape& shape : text_.lines[i].shapes) sizes |= sizes_of(shape);
    for (int i = 0; i < int(text_.lines.size()); ++i) {
      const Line& line = text_.lines[i];
      if (!other.has(i)) {
        if (op.has(i)) return "they do not take `" + line.name + '`';
      } else if (op.has(i)) {
        if (op.may_be_absent(i) && !other.may_be_absent(i))
          return "they need `" + line.name + "`, which may be absent";
        if (!converts(op.kind(i), other.kind(i)))
          return "they take `" + line.name + "` as " + other.at_line(i).real_type()->str();
      } else {
        const bool is_optional = other.kind(i) == Kind::kTensor && other.may_be_absent(i);
        if (!other.at_line(i).default_value() && !is_optional)
          return "they need `" + line.name + "`, which has no default";
        // The default may be another number than the tensors' size.
        if (line.size >= 0 && sizes >> line.size & 1)
          return "they need `" + line.name + "`, which is a size of its tensors";
      }
    }
    return "";
  }

  Text& text_;
  std::vector<bool> is_used_;
};

// ---- kernels ------------------------------------------------------------------------------------

// A kernel and how it is called.
struct BoundKernel : KernelEntry {
  std::map<int, Type> types{};  // of the groups of dtypes
  bool is_cuda = false, has_workspace = false;
};

// Return a parameter as in C++, but with the contract's name of a dtype.
inline std::string text_of(const Parameter& parameter) {
  // Of each kind.
  static constexpr const char* kKinds[] = {"",
                                           "int64_t",
                                           "double",
                                           "bool",
                                           "enum class",
                                           "List<int64_t>",
                                           "List<double>",
                                           "const int64_t*",
                                           "const double*",
                                           "Workspace&",
                                           "cudaStream_t"};
  if (parameter.kind != Parameter::kTensor) return kKinds[parameter.kind];
  return std::string(parameter.layout == Layout::kContiguous ? "View<" : "Strided<") +
         (parameter.is_written ? "" : "const ") + name_of(parameter.type) + ", " +
         std::to_string(parameter.rank) + '>';
}

// Kernels have no such numbers in C++. Their tensors are widened to float32.
inline bool is_half(Type type) { return type == Type::kFloat16 || type == Type::kBFloat16; }

// Compare a kernel's parameters with the arguments and results of its operator.
inline BoundKernel bind(const Text& text, const Signature& op, const KernelEntry& entry) {
  // Of each Kind.
  static constexpr Parameter::Kind kWanted[] = {
      Parameter::kTensor, Parameter::kInt,         Parameter::kFloat,
      Parameter::kBool,   Parameter::kChoice,      Parameter::kInts,
      Parameter::kFloats, Parameter::kOptionalInt, Parameter::kOptionalFloat};
  const auto fail = [&](const std::string& what) {
    throw Mistake(op.schema.number, "a kernel of `" + op.schema.name + "`: " + what);
  };
  BoundKernel kernel{entry};
  size_t count = size_t(kernel.count);
  const auto ends_with = [&](Parameter::Kind kind) {
    const bool is_last = count > 0 && kernel.parameters[count - 1].kind == kind;
    count -= is_last;
    return is_last;
  };
  kernel.is_cuda = ends_with(Parameter::kStream);
  kernel.has_workspace = ends_with(Parameter::kWorkspace);
  if (kernel.has_workspace && !kernel.is_cuda)
    fail("a Workspace& is for CUDA kernels, whose last parameter is a cudaStream_t");
  std::vector<int> lines = op.lines;
  if (op.mask >= 0) lines.erase(lines.begin() + op.mask);
  const size_t arguments = lines.size();
  lines.insert(lines.end(), op.result_lines.begin(), op.result_lines.end());
  if (count != lines.size() || size_t(kernel.count) > kMost)
    fail(std::to_string(count) + " parameters for " + std::to_string(lines.size()) +
         " arguments and results, at most " + std::to_string(kMost));
  const bool has_entries = std::any_of(op.tensors.begin(), op.tensors.end(),
                                       [&](int i) { return text.lines[i].has_entries(); });
  if (kernel.checks_entries && !kernel.is_cuda && !has_entries)
    fail("it returns the position of a wrong entry, and no argument has entries");

  for (size_t p = 0; p < count; ++p) {
    const Parameter& got = kernel.parameters[p];
    const Line& line = text.lines[lines[p]];
    const bool is_result = p >= arguments;
    const Kind kind = is_result ? Kind::kTensor : op.kind(lines[p]);
    Parameter wanted{kWanted[int(kind)]};
    if (kind == Kind::kTensor) {
      const std::vector<Type>& allowed = text.lines[line.group].types;
      const auto is_allowed = [&](Type type) {
        return std::count(allowed.begin(), allowed.end(), type);
      };
      const bool is_widened =
          got.type == Type::kFloat32 && std::any_of(allowed.begin(), allowed.end(), is_half);
      wanted.type = line.read_as != Type::kNone          ? line.read_as
                    : is_allowed(got.type) || is_widened ? got.type
                    : is_half(allowed[0])                ? Type::kFloat32
                                                         : allowed[0];
      wanted.type = kernel.types.insert({line.group, wanted.type}).first->second;
      wanted.rank = line.any_shape ? std::clamp<int8_t>(got.rank, 1, kMostDimensions)
                                   : int8_t(line.shapes[0].size());
      wanted.is_written = is_result;
      wanted.layout = is_result ? Layout::kContiguous : got.layout;
    }
    if (text_of(got) != text_of(wanted))
      fail("parameter " + std::to_string(p + 1) + ": expected " + text_of(wanted) + " for `" +
           line.name + "`, got " + text_of(got));
  }
  return kernel;
}

}  // namespace contract
}  // namespace calcops
