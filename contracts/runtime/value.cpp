// The functions of calcops::Value, with which sources write compositions and derivatives.
#include <string>
#include <utility>
#include <vector>

#include "checked.h"

namespace calcops {

namespace {

SymInt size_of(const Value& value) {
  const IValue& size = ivalue_of(value);
  TORCH_CHECK(size.isInt() || size.isSymInt(), "calcops::Value: expected a size, got a ",
              size.tagKind());
  return size.toSymInt();
}

}  // namespace

Value::Value(decltype(nullptr)) { new (memory_) IValue(); }
Value::Value(int64_t number) { new (memory_) IValue(number); }
Value::Value(double number) { new (memory_) IValue(number); }
Value::Value(bool flag) { new (memory_) IValue(flag); }
Value::Value(const char* text) { new (memory_) IValue(std::string(text)); }
Value::Value(const Value& other) { new (memory_) IValue(ivalue_of(other)); }
Value::~Value() { reinterpret_cast<IValue*>(memory_)->~IValue(); }

Value& Value::operator=(const Value& other) {
  reinterpret_cast<IValue&>(*this) = ivalue_of(other);
  return *this;
}

bool Value::is_none() const {
  const IValue& value = ivalue_of(*this);
  return value.isNone() || (value.isTensor() && !value.toTensor().defined());
}

bool Value::is_tensor() const { return ivalue_of(*this).isTensor(); }

// Formulas::vjp() sets a gradient that is not wanted to false.
bool Value::is_wanted() const { return !ivalue_of(*this).isBool(); }

bool Value::is_readable() const {
  const Tensor& x = ivalue_of(*this).toTensor();
  return !x.is_meta() && !x.key_set().has_any(c10::DispatchKeySet(
                             {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                              c10::DispatchKey::Functionalize}));
}

bool Value::wants_checks() const {
  return is_readable() && calcops::wants_checks(ivalue_of(*this).toTensor());
}

// The emulation of CUDA (tests/operators/cuda_on_cpu) rewrites this, so the tensor has a name.
bool Value::is_on_cuda() const {
  const Tensor& x = ivalue_of(*this).toTensor();
  return x.is_cuda();
}

int64_t Value::item() const {
  const IValue& value = ivalue_of(*this);
  if (value.isBool()) return value.toBool();
  return value.isTensor() ? value.toTensor().item().toLong() : value.toInt();
}

double Value::real() const { return ivalue_of(*this).toDouble(); }

int Value::dim() const { return int(ivalue_of(*this).toTensor().dim()); }

bool Value::equals(int64_t number) const {
  return size_of(*this).sym_eq(number).guard_bool(__FILE__, __LINE__);
}

bool Value::is_known(int64_t number) const { return size_of(*this).maybe_as_int() == number; }

bool Value::expect_equal(const Value& size) const {
  return size_of(*this).sym_eq(size_of(size)).expect_true(__FILE__, __LINE__);
}

bool Value::expect_at_least(int64_t number) const {
  return size_of(*this).sym_ge(number).expect_true(__FILE__, __LINE__);
}

bool Value::is(const char* text) const {
  const IValue& value = ivalue_of(*this);
  return value.isString() && value.toStringRef() == text;
}

Value Value::shape() const {
  return value_of(IValue(ivalue_of(*this).toTensor().sym_sizes().vec()));
}

Value Value::size(int dimension) const {
  return value_of(IValue(ivalue_of(*this).toTensor().sym_size(dimension)));
}

// A dtype is a tuple of its number, unlike a size.
Value Value::dtype() const { return dtype_of(Type(ivalue_of(*this).toTensor().scalar_type())); }

Value Value::dtype_name() const {
  return value_of(IValue(calcops::dtype_name(ivalue_of(*this).toTensor())));
}

Value Value::dtype_of(Type type) {
  return value_of(c10::ivalue::Tuple::create(IValue(scalar_type(type))));
}

bool Value::is_integral() const {
  return at::isIntegralType(ivalue_of(*this).toTensor().scalar_type(), /*includeBool=*/false);
}

Value Value::device() const { return value_of(IValue(ivalue_of(*this).toTensor().device())); }

Value Value::operator[](int i) const {
  const IValue& value = ivalue_of(*this);
  TORCH_CHECK(i >= 0 && i < length(), "calcops::Value: expected an index below ", length(),
              ", got ", i);
  if (value.isTuple()) return value_of(value.toTupleRef().elements()[i]);
  return value_of(value.toListRef()[i]);
}

int Value::length() const {
  const IValue& value = ivalue_of(*this);
  TORCH_CHECK(value.isTuple() || value.isList(), "calcops::Value: expected several results or a ",
              "list, got ", value.tagKind());
  return int(value.isTuple() ? value.toTupleRef().elements().size() : value.toListRef().size());
}

namespace {

// Return the operator of a name such as "aten::add.Tensor".
c10::OperatorHandle operator_named(const std::string& name) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const size_t dot = std::min(name.find('.'), name.size());
  const std::string base = name.substr(0, dot);
  const std::string overload = dot < name.size() ? name.substr(dot + 1) : "";
  const auto handle = dispatcher.findSchema({base, overload});
  if (handle && !handle->schema().is_mutable()) return *handle;
  std::vector<std::string> overloads;
  for (const c10::OperatorName& known : dispatcher.getAllOpNames()) {
    const auto other = dispatcher.findSchema(known);
    if (known.name == base && other && !other->schema().is_mutable())
      overloads.push_back(c10::toString(known));
  }
  std::sort(overloads.begin(), overloads.end());
  TORCH_CHECK(false, "calcops::Value::call: expected ",
              handle ? "an operator that changes no argument" : "the name of an operator", ", got ",
              name, overloads.empty() ? "" : "; its overloads are " + c10::Join(", ", overloads));
}

}  // namespace

Value Value::call_in(const char* name_space, const char* op, const Value* values, int count) {
  std::string name = op;
  if (name.find("::") == std::string::npos) name = std::string(name_space) + "::" + name;
  const c10::OperatorHandle handle = operator_named(name);
  const auto& arguments = handle.schema().arguments();
  TORCH_CHECK(size_t(count) <= arguments.size(), "calcops::Value::call: expected at most ",
              arguments.size(), " arguments of ", handle.schema(), ", got ", count);
  torch::jit::Stack stack;
  for (int i = 0; i < count; ++i) {
    const IValue& value = ivalue_of(values[i]);
    const auto expected = [&](const char* what) {
      return c10::str("calcops::Value::call: expected `", arguments[i].name(), "` of ",
                      handle.schema(), what);
    };
    TORCH_CHECK(!value.isCapsule(), expected(", got an element behind the end of the arguments, "
                                             "gradients or tangents of a function"));
    TORCH_CHECK(!value.isTensor() || value.toTensor().defined(),
                expected(", got a gradient or a tangent that is zero; ask is_none() before the "
                         "call"));
    // An int for a dtype is, for example, the dimension of another overload.
    c10::TypePtr type = arguments[i].real_type();
    if (type->kind() == c10::TypeKind::OptionalType) type = type->containedType(0);
    const bool is_dtype = type->kind() == c10::TypeKind::ScalarTypeType;
    TORCH_CHECK(!is_dtype || value.isTuple() || value.isNone(),
                expected(", a dtype such as x.dtype(), got "), value);
    stack.push_back(is_dtype && value.isTuple() ? value.toTupleRef().elements()[0] : value);
  }
  for (size_t i = count; i < arguments.size(); ++i) {
    const auto& value = arguments[i].default_value();
    TORCH_CHECK(value || arguments[i].type()->kind() == c10::TypeKind::OptionalType,
                "calcops::Value::call: expected `", arguments[i].name(), "` of ", handle.schema());
    stack.push_back(value.value_or(IValue()));
  }
  handle.callBoxed(&stack);
  if (stack.size() == 1) return value_of(std::move(stack[0]));
  return value_of(c10::ivalue::Tuple::create(std::move(stack)));
}

Value Value::list_of(const Value* values, int count) {
  const bool has_tensors = count > 0 && ivalue_of(values[0]).isTensor();
  if (has_tensors || (count > 0 && ivalue_of(values[0]).isBool())) {
    using c10::TypePtr;
    c10::impl::GenericList list(has_tensors ? TypePtr(c10::TensorType::get())
                                            : TypePtr(c10::BoolType::get()));
    for (int i = 0; i < count; ++i) list.push_back(ivalue_of(values[i]));
    return value_of(IValue(std::move(list)));
  }
  std::vector<SymInt> list;
  for (int i = 0; i < count; ++i) list.push_back(size_of(values[i]));
  return value_of(IValue(std::move(list)));
}

namespace {

// Return the text of a value for an error message.
std::string text_of(const Value& shown) {
  const IValue& value = ivalue_of(shown);
  if (value.isString()) return value.toStringRef();
  if (value.isDouble()) return digits_of(value.toDouble());
  if (!value.isTensor()) return c10::str(value);
  return c10::str(dtype_name(value.toTensor()), ' ', value.toTensor().sym_sizes());
}

// Formulas receive an undefined tensor for a gradient or a tangent that is zero.
bool is_zero(const Value& value) { return value.is_tensor() && value.is_none(); }

// Return whether a value is a float, which under tracing may be a symbol.
bool is_float(const IValue& value) { return value.isDouble() || value.isSymFloat(); }

c10::SymFloat float_of(const IValue& value) {
  return value.isInt() || value.isSymInt() ? c10::SymFloat(value.toSymInt())
                                           : value.toScalar().toSymFloat();
}

// Call an operator of PyTorch for tensors, otherwise compute with floats or with sizes.
template <class Floats, class Sizes>
Value combined(const char* name, const Value& a, const Value& b, const Floats& floats,
               const Sizes& sizes) {
  const IValue &x = ivalue_of(a), &y = ivalue_of(b);
  if (x.isTensor() || y.isTensor())
    return Value::call((std::string(name) + (y.isTensor() ? ".Tensor" : ".Scalar")).c_str(), a, b);
  if (is_float(x) || is_float(y)) return value_of(floats(float_of(x), float_of(y)));
  return value_of(sizes(size_of(a), size_of(b)));
}

}  // namespace

void refuse(const char* op, const char* argument, const char* what, const Value& got) {
  TORCH_CHECK(false, op, ": expected `", argument, "` ", what, ", got ", text_of(got));
}

void refuse(const char* op, const char* argument, const char* what, const Value& wanted,
            const Value& got) {
  refuse(op, argument, (what + (' ' + text_of(wanted))).c_str(), got);
}

Value operator+(const Value& a, const Value& b) {
  if (is_zero(a) || is_zero(b)) return is_zero(a) ? b : a;
  if (b.is_tensor() && !a.is_tensor()) return b + a;
  return combined(
      "aten::add", a, b,
      [](const c10::SymFloat& x, const c10::SymFloat& y) { return IValue(x + y); },
      [](const SymInt& x, const SymInt& y) { return IValue(sum_of(x, y)); });
}

Value operator*(const Value& a, const Value& b) {
  if (is_zero(a) || is_zero(b)) return is_zero(a) ? a : b;
  if (b.is_tensor() && !a.is_tensor()) return b * a;
  return combined(
      "aten::mul", a, b,
      [](const c10::SymFloat& x, const c10::SymFloat& y) { return IValue(x * y); },
      [](const SymInt& x, const SymInt& y) { return IValue(product_of(x, y)); });
}

Value operator-(const Value& a, const Value& b) {
  if (is_zero(a) || is_zero(b)) return is_zero(a) ? b * -1 : a;
  if (b.is_tensor() && !a.is_tensor()) return Value::call("aten::rsub.Scalar", b, a);
  return combined(
      "aten::sub", a, b,
      [](const c10::SymFloat& x, const c10::SymFloat& y) { return IValue(x - y); },
      [](const SymInt& x, const SymInt& y) { return IValue(sum_of(x, product_of(-1, y))); });
}

Value operator/(const Value& a, const Value& b) {
  if (is_zero(a)) return a;
  if (b.is_tensor() && !a.is_tensor()) return Value::call("aten::reciprocal", b) * a;
  const IValue& y = ivalue_of(b);
  const bool is_size = !a.is_tensor() && !is_float(ivalue_of(a)) && !y.isTensor() && !is_float(y);
  TORCH_CHECK(!is_size || b.expect_at_least(1),
              "calcops::Value: expected a size divided by at least 1, got ", y);
  return combined(
      "aten::div", a, b,
      [](const c10::SymFloat& x, const c10::SymFloat& y) { return IValue(x / y); },
      [](const SymInt& x, const SymInt& y) { return IValue(x / y); });
}

}  // namespace calcops
