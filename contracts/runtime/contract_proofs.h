// Proves when a contract is loaded that its operators can be called: each size is set before it is
// used, each name exists, each derivative has its arguments, and each kernel fits its schema.
#pragma once

#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>

#include "contract_text.h"

namespace calcops {
namespace contract {

constexpr size_t kMostResults = 6;

// What the contract says about one operator.
struct Signature {
  Schema schema;
  c10::FunctionSchema parsed;
  std::array<int, kMost> argument{};  // of each line: its position in the schema, or -1
  std::vector<int> lines{};           // of each argument: its line; output_mask has -1
  std::vector<int> result_lines{};    // the gradient of an argument has the argument's line
  int mask = -1;                      // the position of output_mask, or -1
  bool is_composition = false;
  // The lines of arguments, in the order in which a call checks them.
  std::vector<int> numbers{}, tensors{}, strings{};

  const Argument& at_line(int line) const { return schema.arguments[argument[line]]; }
  bool has(int line) const { return argument[line] >= 0; }
  // Return the lines of the arguments that kernels receive.
  std::vector<int> kernel_lines() const {
    std::vector<int> received = lines;
    if (mask >= 0) received.erase(received.begin() + mask);
    return received;
  }
  bool is_result(int line) const {
    return std::find(result_lines.begin(), result_lines.end(), line) != result_lines.end();
  }
};

// How a kernel is called.
struct Binding {
  std::vector<std::pair<int, Type>> types;  // of the groups of dtypes
  bool is_cuda = false, has_workspace = false;
};

struct Proved {
  Text text;
  std::vector<Signature> operators;
};

class Prover {
 public:
  // `composed` has the names of the compositions.
  Prover(Text text, const std::vector<std::string>& composed) : text_(std::move(text)) {
    is_used_.resize(text_.lines.size());
    resolve_groups();
    for (const Schema& schema : text_.schemas) read_operator(schema, composed);
    for (Signature& op : ops_) read_results(op);
    for (size_t i = 0; i < text_.lines.size(); ++i)
      if (!is_used_[i])
        fail(text_.lines[i].number,
             "`" + text_.lines[i].name + "` is no argument and no result of an operator");
    for (Signature& op : ops_) check_sizes(op);
    if (text_.vmap_number) check_vmap();
  }

  Proved proved() && { return {std::move(text_), std::move(ops_)}; }

 private:
  [[noreturn]] static void fail(int number, const std::string& what) {
    throw Mistake(number, what);
  }
  [[noreturn]] static void fail(const Line& line, const std::string& what) {
    fail(line.number, "`" + line.name + "`: " + what);
  }
  [[noreturn]] static void fail(const Signature& op, const std::string& what) {
    fail(op.schema.number, "`" + op.schema.name + "`: " + what);
  }

  std::string names(uint32_t sizes) const {
    std::string list;
    for (size_t i = 0; i < text_.sizes.size(); ++i)
      if (sizes >> i & 1) list += (list.empty() ? "" : ", ") + text_.sizes[i];
    return list;
  }

  // ---- dtypes -----------------------------------------------------------------------------------

  // Follow `like` to the line that has dtypes.
  void resolve_groups() {
    for (size_t i = 0; i < text_.lines.size(); ++i) {
      Line& line = text_.lines[i];
      if (!line.is_tensor()) continue;
      int at = int(i);
      for (size_t steps = 0; !text_.lines[at].like.empty(); ++steps) {
        if (!text_.lines[at].types.empty()) fail(line, "has dtypes and `like`");
        const std::string& like = text_.lines[at].like;
        at = text_.line(like);
        if (at < 0 || !text_.lines[at].is_tensor()) fail(line, "no tensor is named " + like);
        if (steps == text_.lines.size())
          fail(line, "`like " + line.like + "` leads back to itself");
      }
      const Line& root = text_.lines[at];
      if (root.types.empty())
        fail(root, "expected its dtype, such as float32 or float64, or like x");
      line.group = at;
      line.read_as = root.read_as;
      if (!line.has_entries) continue;
      for (const Type type : root.types) {
        if (is_floating(type) || type == Type::kBool) fail(line, "entries are integers");
        if (line.entries.may_be_none && (type == Type::kUInt8 || type == Type::kUInt16))
          fail(line, "-1 is no entry of an unsigned dtype");
      }
      if (!line.any_shape && line.entries.positions.size() > line.shapes[0].size())
        fail(line, "more positions behind `at` than dimensions");
    }
  }

  bool may_be_integer(int i) const {
    const auto& types = text_.lines[text_.lines[i].group].types;
    return std::any_of(types.begin(), types.end(),
                       [](Type type) { return !is_floating(type) && type != Type::kBool; });
  }

  // ---- arguments and results --------------------------------------------------------------------

  // Raise an error if a line has a clause that does not apply to its argument, or lacks one.
  void check_clauses(const Signature& op, const Line& line, const Argument& argument) const {
    // Of each Kind.
    static constexpr const char* kAllowed[] = {"shape dtype like entries limit constant",
                                               "bounds",
                                               "bounds",
                                               "",
                                               "strings",
                                               "",
                                               "",
                                               "",
                                               ""};
    for (const std::string& clause : line.clauses)
      if (!std::strstr(kAllowed[int(argument.kind)], clause.c_str()))
        fail(line, "a clause of the kind `" + clause + "`, but in " + op.schema.name +
                       " the argument is a " + argument.type);
    if (argument.kind == Kind::kTensor && !line.is_tensor() && !op.is_composition)
      fail(line, "expected its shape, such as [N, 3]");
    if (line.any_shape && !line.entries.positions.empty())
      fail(line, "`at` names the dimensions of entries, and [...] has any number of them");
    for (const Bound& bound : line.bounds)
      if (argument.kind == Kind::kInt && !bound.whole)
        fail(line, "expected integers, got " + bound.text);
  }

  // Raise an error if a line refuses its argument's default. Kernels receive it unchecked where
  // another operator that lacks the argument uses them.
  static void check_default(const Line& line, const Argument& argument, const c10::IValue& value) {
    const auto meets = [](Compare compare, auto a, auto b) {
      return compare == Compare::kLess     ? a < b
             : compare == Compare::kAtMost ? a <= b
             : compare == Compare::kMore   ? a > b
                                           : a >= b;
    };
    bool is_ok = argument.kind != Kind::kString || line.choices.empty() ||
                 std::count(line.choices.begin(), line.choices.end(), value.toStringRef()) > 0;
    for (const Bound& bound : line.bounds)
      is_ok &= argument.kind == Kind::kInt ? meets(bound.compare, value.toInt(), bound.integer)
                                           : meets(bound.compare, value.toDouble(), bound.real);
    if (!is_ok) fail(line, c10::str("refuses its own default ", value));
  }

  static Kind kind_of(const std::string& type, bool optional) {
    // In the order of Kind.
    static constexpr const char* kTypes[] = {"Tensor", "int",   "float",   "bool",
                                             "str",    "int[]", "float[]", "bool[]"};
    const auto known = Kind(std::find(std::begin(kTypes), std::end(kTypes), type) - kTypes);
    const bool is_number = known >= Kind::kInt && known <= Kind::kString;
    return optional && is_number ? Kind::kOther : known;
  }

  // Return an argument or a result as PyTorch parsed it.
  static Argument argument_of(const Schema& schema, const c10::Argument& parsed) {
    Argument argument{parsed.name(), parsed.real_type()->str()};
    const auto fail_here = [&](const std::string& what) {
      fail(schema.number, "`" + schema.name + "`: " + what);
    };
    if (parsed.alias_info())
      fail_here(argument.type + "(a!) would be changed; return a result instead");
    argument.length = parsed.N().value_or(0);
    argument.optional = parsed.type()->kind() == c10::TypeKind::OptionalType;
    argument.kind =
        kind_of((argument.optional ? parsed.type()->containedType(0) : parsed.type())->str(),
                argument.optional);
    const auto& value = parsed.default_value();
    argument.has_default = value.has_value();
    if (!value) return argument;
    // PyTorch reads the default 1E3 of an int as 1.
    const std::string is_read = ' ' + argument.name + '=' + c10::str(*value);
    const bool is_misread = argument.kind == Kind::kInt &&
                            schema.text.find(is_read + ',') == std::string::npos &&
                            schema.text.find(is_read + ')') == std::string::npos;
    if (is_misread || !value->type()->isSubtypeOf(*parsed.type()))
      fail_here("the default of `" + argument.name + "` is no " + argument.type);
    return argument;
  }

  // Let PyTorch parse a schema.
  static c10::FunctionSchema parsed(const Schema& schema) {
    try {
      return torch::schema(schema.text.c_str());
    } catch (const c10::Error& error) {
      fail(schema.number, error.what_without_backtrace());
    } catch (const std::exception& error) {  // PyTorch 2.10's parser has an error of its own
      fail(schema.number, error.what());
    }
  }

  void read_operator(const Schema& schema, const std::vector<std::string>& composed) {
    Signature op{schema, parsed(schema)};
    for (const c10::Argument& argument : op.parsed.arguments())
      op.schema.arguments.push_back(argument_of(op.schema, argument));
    for (const c10::Argument& result : op.parsed.returns())
      op.schema.results.push_back(argument_of(op.schema, result));
    if (op.parsed.is_vararg() || op.parsed.is_varret() || !op.parsed.overload_name().empty())
      fail(op, "expected a name without a point, and no `...`");
    if (op.schema.results.empty()) fail(op, "expected a result");
    const std::string& name = op.schema.name;
    op.is_composition = std::find(composed.begin(), composed.end(), name) != composed.end();
    op.argument.fill(-1);
    for (size_t i = 0; i < op.schema.arguments.size(); ++i) {
      const Argument& argument = op.schema.arguments[i];
      if (argument.name == "output_mask" && argument.kind == Kind::kMask) {
        op.mask = int(i);
        op.lines.push_back(-1);
        if (argument.length != int(op.schema.results.size()))
          fail(op, "output_mask has one bool for each result");
        continue;
      }
      const int line = text_.line(argument.name);
      if (line < 0) fail(op, "no line describes its argument `" + argument.name + "`");
      if (!op.is_composition && (argument.kind == Kind::kOther || argument.kind == Kind::kMask))
        fail(op, "kernels take no " + argument.type + " `" + argument.name +
                     "`; the types are Tensor, Tensor?, int, SymInt, float, bool, str, int[] and "
                     "float[]");
      if (op.has(line)) fail(op, "two arguments `" + argument.name + "`");
      is_used_[line] = true;
      op.argument[line] = int(i);
      op.lines.push_back(line);
      check_clauses(op, text_.lines[line], argument);
      if (argument.has_default)
        check_default(text_.lines[line], argument, *op.parsed.arguments()[i].default_value());
      if (argument.kind == Kind::kInt) text_.lines[line].size = text_.size(argument.name);
    }
    ops_.push_back(std::move(op));
  }

  // Find the line of each result. One that is also an argument is the gradient for it.
  void read_results(Signature& op) {
    const auto& results = op.schema.results;
    if (results.size() > kMostResults) fail(op, "more than 6 results");
    for (const Argument& result : results) {
      const int line = text_.line(result.name);
      if (op.is_composition && line < 0) continue;  // it makes its results itself
      if (result.kind != Kind::kTensor || result.optional)
        fail(op, "kernels return no " + result.type + ", only Tensor");
      if (result.name.empty()) fail(op, "its results have names, as in -> Tensor y");
      if (line < 0) fail(op, "no line describes its result `" + result.name + "`");
      const Line& described = text_.lines[line];
      if (!described.is_tensor()) fail(described, "expected the shape of a result, such as [N, 3]");
      if (op.is_result(line)) fail(op, "two results `" + described.name + "`");
      if (op.has(line) && op.at_line(line).optional && op.mask < 0)
        fail(described, "a result is always there, and this argument may be absent");
      if (!op.has(line) && described.shapes.size() > 1) fail(described, "a result has one shape");
      if (!op.is_composition && !op.has(line) &&
          (described.has_entries || !described.limits.empty() || described.is_constant))
        fail(described, "entries, limits and `constant` are for arguments");
      op.result_lines.push_back(line);
      is_used_[line] = true;
    }
  }

  // ---- sizes ------------------------------------------------------------------------------------

  // Return the sizes that are known once a tensor of one shape was checked. `known` are known
  // before. A dimension may set one size, if it has the form n + ... with known other sizes.
  uint32_t known_after(const Line& line, const Shape& shape, uint32_t known) const {
    for (const Sum& dim : shape) {
      const uint32_t unknown = sizes_of(dim) & ~known;
      if (!unknown) continue;
      int products = 0;
      bool is_alone = false;
      for (const Product& product : dim) {
        if (!(sizes_of(Sum{product}) & unknown)) continue;
        ++products;
        is_alone = product.factor == 1 && product.sizes.size() == 1;
      }
      if (products != 1 || !is_alone)
        fail(line, "a dimension of " + line.shape_text + " cannot determine " + names(unknown));
      known |= unknown;
    }
    if (line.whole >= 0 && !(sizes_of(line.parts) & ~known)) known |= 1u << line.whole;
    return known;
  }

  // Prove that a call sets each size before it uses it, and sort the lines into the order of a
  // call.
  void check_sizes(Signature& op) {
    uint32_t known = 0;
    for (size_t i = 0; i < text_.lines.size(); ++i) {
      const Line& line = text_.lines[i];
      const Kind kind = op.has(int(i)) ? op.at_line(int(i)).kind : Kind::kOther;
      const int size = text_.size(line.name);
      if (size >= 0 && kind == Kind::kInt) {
        if (!is_never_negative(line)) fail(line, "a size has a lower limit, such as >= 0");
        known |= 1u << size;
      }
      if (size >= 0 && (kind == Kind::kFloat || kind == Kind::kBool || kind == Kind::kString))
        fail(line, "it is no integer, and a shape names it");
      if ((kind == Kind::kInt || kind == Kind::kFloat) && !line.bounds.empty())
        op.numbers.push_back(int(i));
      if (kind == Kind::kString && !line.choices.empty()) op.strings.push_back(int(i));
    }
    // The sizes of tensors that are always given are set first, then those of optional ones.
    for (const bool optional : {false, true})
      for (size_t i = 0; i < text_.lines.size(); ++i) {
        const Line& line = text_.lines[i];
        if (!line.is_tensor() || !op.has(int(i)) || op.at_line(int(i)).optional != optional)
          continue;
        op.tensors.push_back(int(i));
        const uint32_t own = check_tensor(line, known);
        if (!optional) known = own;
      }
    // Entries and limits are checked when all sizes are set.
    for (const int i : op.tensors) {
      const Line& line = text_.lines[i];
      uint32_t used = sizes_of(line.entries.below);
      for (const Limit& limit : line.limits) used |= sizes_of(limit.sum);
      if (const uint32_t unknown = used & ~check_tensor(line, known))
        fail(line, "no argument that is always given has the size " + names(unknown));
    }
    for (const int i : op.result_lines) {
      if (op.has(i)) continue;
      const Line& line = text_.lines[i];
      for (const Shape& shape : line.shapes)
        if (const uint32_t unknown = sizes_of(shape) & ~known)
          fail(line, "no argument that is always given has the size " + names(unknown) + " in " +
                         op.schema.name);
      check_result_dtype(op, i);
    }
    if (!op.is_composition && op.tensors.empty()) fail(op, "a kernel has a tensor as an argument");
    if (!op.is_composition && op.at_line(op.tensors[0]).optional)
      fail(op, "one tensor is always given");
  }

  static bool is_never_negative(const Line& line) {
    return std::any_of(line.bounds.begin(), line.bounds.end(), [](const Bound& bound) {
      return (bound.compare == Compare::kAtLeast && bound.integer >= 0) ||
             (bound.compare == Compare::kMore && bound.integer >= -1);
    });
  }

  // Check the shapes of a tensor. Return the sizes that are known behind it.
  uint32_t check_tensor(const Line& line, uint32_t known) const {
    if (line.any_shape) return known;
    uint32_t common = ~0u;
    for (const Shape& shape : line.shapes) {
      const uint32_t after = known_after(line, shape, known);
      if (const uint32_t lacks = sizes_of(line.shapes[0]) & ~after)
        fail(line, "a shape of " + line.shape_text + " lacks " + names(lacks));
      common &= after;
    }
    return common;
  }

  // Prove that a result's dtype is known: one of its group is given, or it has only one.
  void check_result_dtype(const Signature& op, int result) const {
    const int group = text_.lines[result].group;
    if (text_.lines[group].types.size() == 1) return;
    for (const int line : op.tensors)
      if (text_.lines[line].group == group && !op.at_line(line).optional) return;
    fail(text_.lines[result],
         "no argument that is always given has its dtype in " + op.schema.name);
  }

  // ---- vmap -------------------------------------------------------------------------------------

  // Return the dimension of a shape that vmap joins; -1: none.
  int joined_dimension(const Shape& shape) const {
    int joined = -1;
    for (size_t d = 0; d < shape.size(); ++d)
      if (is_joined(bare(shape[d]))) joined = int(d);
    return joined;
  }

  bool is_joined(int size) const {
    return size >= 0 && std::count(text_.joined.begin(), text_.joined.end(), text_.sizes[size]) > 0;
  }

  // Prove that the items of vmap can be joined.
  void check_vmap() const {
    uint32_t joined = 0;
    for (const std::string& name : text_.joined) {
      if (text_.size(name) < 0) fail(text_.vmap_number, "`vmap`: no tensor has the size " + name);
      joined |= 1u << text_.size(name);
    }
    for (size_t i = 0; i < text_.lines.size(); ++i) {
      const Line& line = text_.lines[i];
      bool is_result = false, may_be_absent = false;
      for (const Signature& op : ops_) {
        is_result |= !op.is_composition && op.is_result(int(i));
        may_be_absent |= op.has(int(i)) && op.at_line(int(i)).optional;
      }
      if (!line.is_tensor()) continue;
      const int d = line.any_shape ? -1 : joined_dimension(line.shapes[0]);
      if (d < 0 && is_result) fail(line, "vmap joins none of its dimensions");
      for (const Shape& shape : line.shapes) {
        if (joined_dimension(shape) != d)
          fail(line, "vmap joins another dimension in another shape");
        for (size_t k = 0; k < shape.size(); ++k)
          // Where an optional tensor such as [N + M] is given, a call is made for each item.
          if (int(k) != d && (sizes_of(shape[k]) & joined) && !(d < 0 && may_be_absent))
            fail(line, "vmap can join one dimension, which is one size");
      }
      if (line.has_entries && (sizes_of(line.entries.below) & joined) &&
          bare(line.entries.below) < 0)
        fail(line, "vmap cannot shift entries below " + line.entries.bound);
    }
    for (const Signature& op : ops_) {
      const auto is_shifted = [&](int i) { return is_joined(bare(text_.lines[i].entries.below)); };
      if (op.is_composition || std::none_of(op.tensors.begin(), op.tensors.end(), is_shifted))
        continue;
      for (const int i : op.result_lines)
        if (may_be_integer(i))
          fail(text_.lines[i],
               "vmap shifts entries, and this result of integers might name the shifted rows; "
               "leave `vmap` out, then each item is a call");
    }
  }

  Text text_;
  std::vector<Signature> ops_;
  std::vector<bool> is_used_;
};

// ---- kernels ------------------------------------------------------------------------------------

// Return a parameter as in C++, but with the contract's name of a dtype.
inline std::string text_of(const Parameter& parameter) {
  // Of each kind.
  static constexpr const char* kKinds[] = {
      "",           "int64_t",       "double",       "bool",       "const char*",
      "enum class", "List<int64_t>", "List<double>", "Workspace&", "cudaStream_t"};
  if (parameter.kind != Parameter::kTensor) return kKinds[parameter.kind];
  return std::string(parameter.layout == Layout::kContiguous ? "View<" : "Strided<") +
         (parameter.is_written ? "" : "const ") + name_of(parameter.type) + ", " +
         std::to_string(parameter.rank) + '>';
}

// Compare a kernel's parameters with the arguments and results of its operator.
inline Binding bind(const Text& text, const Signature& op, const KernelEntry& kernel) {
  // Of each Kind.
  static constexpr Parameter::Kind kWanted[] = {
      Parameter::kTensor, Parameter::kInt,  Parameter::kFloat, Parameter::kBool,
      Parameter::kString, Parameter::kInts, Parameter::kFloats};
  const auto fail = [&](const std::string& what) {
    throw Mistake(op.schema.number, "a kernel of `" + op.schema.name + "`: " + what);
  };
  Binding binding;
  size_t count = size_t(kernel.count);
  const auto ends_with = [&](Parameter::Kind kind) {
    const bool does = count > 0 && kernel.parameters[count - 1].kind == kind;
    count -= does;
    return does;
  };
  binding.is_cuda = ends_with(Parameter::kStream);
  binding.has_workspace = ends_with(Parameter::kWorkspace);
  if (binding.has_workspace && !binding.is_cuda)
    fail("a Workspace& is for CUDA kernels, whose last parameter is a cudaStream_t");
  std::vector<int> lines = op.kernel_lines();
  const size_t arguments = lines.size();
  lines.insert(lines.end(), op.result_lines.begin(), op.result_lines.end());
  if (count != lines.size() || size_t(kernel.count) > kMost)
    fail(std::to_string(count) + " parameters for " + std::to_string(lines.size()) +
         " arguments and results, at most " + std::to_string(kMost));
  const bool has_entries = std::any_of(op.tensors.begin(), op.tensors.end(),
                                       [&](int i) { return text.lines[i].has_entries; });
  if (kernel.checks_entries && !binding.is_cuda && !has_entries)
    fail("it returns the position of a wrong entry, and no argument has entries");

  std::map<int, Type> types;  // of the groups of dtypes
  for (size_t p = 0; p < count; ++p) {
    const Parameter& got = kernel.parameters[p];
    const Line& line = text.lines[lines[p]];
    const bool is_result = p >= arguments;
    const Kind kind = is_result ? Kind::kTensor : op.at_line(lines[p]).kind;
    Parameter wanted{kWanted[int(kind)]};
    if (kind == Kind::kString && got.kind == Parameter::kChoice && !line.choices.empty())
      wanted.kind = Parameter::kChoice;
    if (kind == Kind::kTensor) {
      const std::vector<Type>& allowed = text.lines[line.group].types;
      const auto is_allowed = [&](Type type) {
        return std::count(allowed.begin(), allowed.end(), type);
      };
      const bool is_widened =
          got.type == Type::kFloat32 && (is_allowed(Type::kFloat16) || is_allowed(Type::kBFloat16));
      wanted.type = line.read_as != Type::kNone          ? line.read_as
                    : is_allowed(got.type) || is_widened ? got.type
                                                         : allowed[0];
      wanted.type = types.insert({line.group, wanted.type}).first->second;
      wanted.rank = line.any_shape ? std::min<int8_t>(got.rank, kMostDimensions)
                                   : int8_t(line.shapes[0].size());
      wanted.is_written = is_result;
      wanted.layout = is_result ? Layout::kContiguous : got.layout;
    }
    if (text_of(got) != text_of(wanted))
      fail("parameter " + std::to_string(p + 1) + ": expected " + text_of(wanted) + " for `" +
           line.name + "`, got " + text_of(got));
  }
  binding.types.assign(types.begin(), types.end());
  return binding;
}

// Return whether an operator without kernels can use those of another one: its results are the
// first ones of that, and each of its arguments is one of that. That may have more, if these are
// optional tensors or have defaults. Its output_mask allows for results that are not computed.
inline bool may_use_kernels_of(const Text& text, const Signature& op, const Signature& other) {
  if (op.result_lines.empty() || other.result_lines.size() < op.result_lines.size()) return false;
  if (!std::equal(op.result_lines.begin(), op.result_lines.end(), other.result_lines.begin()))
    return false;
  const bool computes_all = op.mask < 0 && op.result_lines.size() == other.result_lines.size();
  if (!computes_all && other.mask < 0) return false;
  uint32_t sizes = 0;  // that the tensors of `op` have
  for (const int i : op.tensors)
    for (const Shape& shape : text.lines[i].shapes) sizes |= sizes_of(shape);
  for (int i = 0; i < int(op.argument.size()); ++i) {
    if (op.has(i) && !other.has(i)) return false;
    if (!other.has(i)) continue;
    const Argument& more = other.at_line(i);
    if (op.has(i)) {
      if (op.at_line(i).optional && !more.optional) return false;
      continue;
    }
    if (!more.has_default && !(more.kind == Kind::kTensor && more.optional)) return false;
    // A default may be another number than the tensors' size.
    const int size = more.kind == Kind::kInt ? text.size(more.name) : -1;
    if (size >= 0 && sizes >> size & 1) return false;
  }
  return true;
}

}  // namespace contract
}  // namespace calcops
