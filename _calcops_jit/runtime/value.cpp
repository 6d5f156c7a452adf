// The functions of calcops::Value, with which sources write compositions and derivatives.
#include <string>
#include <utility>
#include <vector>

#include "operators.h"

namespace calcops {
Value::Value(decltype(nullptr)) : value_(new IValue()) {}
Value::Value(int64_t number) : value_(new IValue(number)) {}
Value::Value(double number) : value_(new IValue(number)) {}
Value::Value(bool flag) : value_(new IValue(flag)) {}
Value::Value(const char* text) : value_(new IValue(std::string(text))) {}
Value::Value(const Value& other) : value_(new IValue(ivalue_of(other))) {}
Value::~Value() { delete static_cast<IValue*>(value_); }

Value& Value::operator=(const Value& other) {
  *static_cast<IValue*>(value_) = ivalue_of(other);
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

int64_t Value::item() const {
  const IValue& value = ivalue_of(*this);
  if (value.isBool()) return value.toBool();
  return value.isTensor() ? value.toTensor().item().toLong() : value.toInt();
}

int Value::dim() const { return int(ivalue_of(*this).toTensor().dim()); }

bool Value::equals(int64_t number) const {
  return ivalue_of(*this).toSymInt().sym_eq(number).guard_bool(__FILE__, __LINE__);
}

bool Value::is(const char* text) const { return ivalue_of(*this).toStringRef() == text; }

Value Value::shape() const {
  return value_of(IValue(ivalue_of(*this).toTensor().sym_sizes().vec()));
}

Value Value::size(int dimension) const {
  return value_of(IValue(ivalue_of(*this).toTensor().sym_size(dimension)));
}

Value Value::dtype() const { return value_of(IValue(ivalue_of(*this).toTensor().scalar_type())); }

Value Value::dtype_name() const {
  return value_of(IValue(c10::toString(ivalue_of(*this).toTensor().scalar_type())));
}

Value Value::dtype_of(Type type) { return value_of(IValue(scalar_type(type))); }

bool Value::is_integral() const {
  return at::isIntegralType(ivalue_of(*this).toTensor().scalar_type(), /*includeBool=*/false);
}

Value Value::device() const { return value_of(IValue(ivalue_of(*this).toTensor().device())); }

Value Value::operator[](int i) const {
  const IValue& value = ivalue_of(*this);
  if (value.isTuple()) return value_of(value.toTupleRef().elements()[i]);
  if (value.isBoolList()) return bool(value.toBoolList()[i]);
  if (value.isDoubleList()) return value.toDoubleVector()[i];
  return value_of(IValue(value.toSymIntVector()[i]));
}

int Value::length() const { return int(ivalue_of(*this).toListRef().size()); }

Value Value::call_in(const char* name_space, const char* op, const Value* values, int count) {
  std::string name = op;
  if (name.find("::") == std::string::npos) name = std::string(name_space) + "::" + name;
  const size_t dot = name.find('.');
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      name.substr(0, dot).c_str(), dot == std::string::npos ? "" : name.substr(dot + 1).c_str());
  const auto& arguments = handle.schema().arguments();
  torch::jit::Stack stack;
  for (int i = 0; i < count; ++i) stack.push_back(ivalue_of(values[i]));
  for (size_t i = count; i < arguments.size(); ++i)
    stack.push_back(arguments[i].default_value().value_or(IValue()));
  handle.callBoxed(&stack);
  if (stack.size() == 1) return value_of(std::move(stack[0]));
  return value_of(c10::ivalue::Tuple::create(std::move(stack)));
}

Value Value::list_of(const Value* values, int count) {
  if (count > 0 && ivalue_of(values[0]).isTensor()) {
    c10::List<Tensor> list;
    for (int i = 0; i < count; ++i) list.push_back(ivalue_of(values[i]).toTensor());
    return value_of(IValue(std::move(list)));
  }
  if (count > 0 && ivalue_of(values[0]).isBool()) {
    c10::List<bool> list;
    for (int i = 0; i < count; ++i) list.push_back(ivalue_of(values[i]).toBool());
    return value_of(IValue(std::move(list)));
  }
  std::vector<SymInt> list;
  for (int i = 0; i < count; ++i) list.push_back(ivalue_of(values[i]).toSymInt());
  return value_of(IValue(std::move(list)));
}

void refuse(const char* op, const char* argument, const char* what, const Value& got) {
  const IValue& value = ivalue_of(got);
  TORCH_CHECK(false, op, ": expected `", argument, "` ", what, ", got ",
              value.isString() ? value.toStringRef() : c10::str(value));
}

Value operator+(const Value& a, const Value& b) {
  const IValue &x = ivalue_of(a), &y = ivalue_of(b);
  if (x.isTensor())
    return Value::call(y.isTensor() ? "aten::add.Tensor" : "aten::add.Scalar", a, b);
  if (y.isTensor()) return b + a;
  if (x.isDouble() || y.isDouble()) return x.toScalar().toDouble() + y.toScalar().toDouble();
  return value_of(IValue(x.toSymInt() + y.toSymInt()));
}

Value operator*(const Value& a, const Value& b) {
  const IValue &x = ivalue_of(a), &y = ivalue_of(b);
  if (x.isTensor())
    return Value::call(y.isTensor() ? "aten::mul.Tensor" : "aten::mul.Scalar", a, b);
  if (y.isTensor()) return b * a;
  if (x.isDouble() || y.isDouble()) return x.toScalar().toDouble() * y.toScalar().toDouble();
  return value_of(IValue(x.toSymInt() * y.toSymInt()));
}

Value operator-(const Value& a, const Value& b) {
  const IValue &x = ivalue_of(a), &y = ivalue_of(b);
  if (x.isTensor())
    return Value::call(y.isTensor() ? "aten::sub.Tensor" : "aten::sub.Scalar", a, b);
  if (y.isTensor()) return Value::call("aten::rsub.Scalar", b, a);
  if (x.isDouble() || y.isDouble()) return x.toScalar().toDouble() - y.toScalar().toDouble();
  return value_of(IValue(x.toSymInt() - y.toSymInt()));
}

Value operator/(const Value& a, const Value& b) {
  const IValue& y = ivalue_of(b);
  return Value::call(y.isTensor() ? "aten::div.Tensor" : "aten::div.Scalar", a, b);
}

}  // namespace calcops
