// What the source of an operator includes. An operator is a contract, which is text, and kernels,
// which are functions of the schema's arguments and then the results. The runtime reads the
// contract once and registers the operator for all devices, derivatives and vmap. It checks every
// call against the contract, allocates the results and runs the kernel for the call's number types.
// Neither this header nor a kernel includes PyTorch's headers. contracts/README.md has examples.
#pragma once

#include <cstdint>
#ifdef CALCOPS_CHECK_INDICES
#include <cstdio>
#include <type_traits>
#endif

#ifdef __CUDACC__
#include <cuda_runtime_api.h>
#define CALCOPS_INLINE __host__ __device__ __forceinline__
#else
#define CALCOPS_INLINE inline
#endif

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace calcops {

// How the numbers of a tensor lie in memory. A tensor that lies otherwise is copied for the kernel.
// With kTransposed it is contiguous, or its last two dimensions are exchanged.
enum class Layout : int8_t { kContiguous, kTransposed, kStrided };

// The first index of a kernel's call that is out of bounds. Only a library that is compiled with
// CALCOPS_CHECK_INDICES finds it. Kernels may run in threads, where an exception would end the
// process. So the kernel goes on, and the runtime raises the error.
struct WrongIndex {
  static constexpr int kMost = 8;
  bool is_set = false;
  bool is_data = false;  // the index of `data`, not those of a view
  int parameter = 0;     // its position among the kernel's
  int rank = 0;          // of the view
  int64_t index[kMost] = {}, shape[kMost] = {};
  // Prints the error, because the kernel may crash or never end.
  void (*print)(const WrongIndex& wrong) = nullptr;
};

#ifdef CALCOPS_CHECK_INDICES
// A pointer to the numbers of a tensor that checks data[i].
template <class Number>
struct CheckedPointer {
  Number* pointer;
  int64_t count = 0;  // of numbers
  WrongIndex* record = nullptr;
  int parameter = -1;

  CALCOPS_INLINE CheckedPointer(Number* pointer_ = nullptr) : pointer(pointer_) {}
  // View<const float, 1>{y.data, ...} for a View<float, 2> y
  CALCOPS_INLINE CheckedPointer(const CheckedPointer<std::remove_const_t<Number>>& other)
      : pointer(other.pointer),
        count(other.count),
        record(other.record),
        parameter(other.parameter) {}
  CALCOPS_INLINE operator Number*() const { return pointer; }

  // A template, because an int fits the pointer's own operator better.
  template <class Index>
  CALCOPS_INLINE Number& operator[](Index i) const {
    const int64_t index = int64_t(i);
    if (!record || (index >= 0 && index < count)) return pointer[i];
    return wrong(true, &index, &count, 1);
  }

  // Record an index and return a number that stands for its target.
  CALCOPS_INLINE Number& wrong(bool is_data, const int64_t* index, const int64_t* shape,
                               int rank) const {
#ifdef __CUDA_ARCH__
    printf("calcops: index out of bounds of the kernel's parameter %d:", parameter + 1);
    for (int d = 0; d < rank; ++d) printf(" %lld", static_cast<long long>(index[d]));
    printf("%s\n", is_data ? " of data" : "");
    __trap();
    return *pointer;
#else
    if (!__atomic_exchange_n(&record->is_set, true, __ATOMIC_RELAXED)) {
      record->is_data = is_data;
      record->parameter = parameter;
      record->rank = rank < WrongIndex::kMost ? rank : WrongIndex::kMost;
      for (int d = 0; d < record->rank; ++d) {
        record->index[d] = index[d];
        record->shape[d] = shape[d];
      }
      record->print(*record);
    }
    static thread_local std::remove_const_t<Number> target;
    return target = 0;
#endif
  }
};
#endif

// A tensor. If `data` is nullptr, the argument is absent or the gradient is not wanted. Its shape
// is the first one in the contract.
template <class Number, int rank, Layout layout = Layout::kStrided>
struct Strided {
#ifdef CALCOPS_CHECK_INDICES
  CheckedPointer<Number> data;
#else
  Number* data;
#endif
  int64_t shape[rank > 0 ? unsigned(rank) : 1];
  int64_t stride[rank > 0 ? unsigned(rank) : 1];  // in elements

  CALCOPS_INLINE explicit operator bool() const { return data != nullptr; }

  template <class... Index>
  CALCOPS_INLINE Number& operator()(Index... index) const {
    static_assert(sizeof...(index) == rank, "a view takes one index for each dimension");
#ifdef CALCOPS_CHECK_INDICES
    const int64_t indices[] = {int64_t(index)..., 0};  // a scalar has none
    bool is_right = data.pointer;
    for (int d = 0; d < rank; ++d) is_right &= indices[d] >= 0 && indices[d] < shape[d];
    if (data.record && !is_right) return data.wrong(false, indices, shape, rank);
#endif
    int64_t position = 0;
    int dimension = 0;
    if constexpr (layout == Layout::kContiguous)
      ((position = position * shape[dimension++] + index), ...);
    else
      ((position += stride[dimension++] * index), ...);
    return data[position];
  }
};

// A contiguous tensor.
template <class Number, int rank>
using View = Strided<Number, rank, Layout::kContiguous>;

// The values of an argument int[] or float[].
template <class Number>
struct List {
  const Number* data;
  int64_t size;
};

// Device memory of a CUDA kernel. The kernel is called twice. In the first call `data` is nullptr,
// and the kernel only sets `bytes`.
struct Workspace {
  void* data;
  int64_t bytes;
};

// ---- the interface of kernels and the runtime ---------------------------------------------------

// The numbers are those of PyTorch's ScalarType.
enum class Type : int8_t {
  kNone = -1,
  kUInt8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kBool = 11,
  kBFloat16 = 15,
  kUInt16 = 27
};

// A parameter of a kernel.
struct Parameter {
  enum Kind : int8_t {
    kTensor,
    kInt,
    kFloat,
    kBool,
    kChoice,
    kInts,
    kFloats,
    kOptionalInt,
    kOptionalFloat,
    kWorkspace,
    kStream
  };
  Kind kind;
  Type type = Type::kNone;
  int8_t rank = 0;
  bool is_written = false;
  Layout layout = Layout::kContiguous;
};

// The value of a parameter.
struct Slot {
  void* data;  // of a number, not nullptr if it is given
  const int64_t *shape, *stride;
  int64_t integer;  // also a bool, a choice's number or the size of a list
  double real;
};

// The result of a kernel's run.
struct Outcome {
  int64_t wrong = -1;           // the position of a wrong entry, or -1
  const char* error = nullptr;  // a CUDA error
};

struct KernelEntry {
  const char *op, *name_space;
  const Parameter* parameters;
  int count;
  bool checks_entries;  // its function does not return void
  // The slot behind those of the parameters has a WrongIndex.
  Outcome (*run)(void (*function)(), const Slot* slots);
  void (*function)();
  bool (*is_capturing)(void* stream);  // nullptr without CUDA
  const char* file;
  int line;
  bool checks_indices;  // of its views
};
void add_kernel(const KernelEntry& kernel);

// An array of static storage.
template <class Item>
struct Items {
  const Item* data = nullptr;
  int count = 0;
  const Item* begin() const { return data; }
  const Item* end() const { return data + count; }
};

struct ContractEntry {
  const char *text, *name_space;
  const char* without_cuda;  // why this build has no CUDA; nullptr: it has
  const char* file;
  int line;
  Items<struct Composition> compositions{};
  Items<struct Derivative> derivatives{};
  Items<struct Check> checks{};
};
void add_contract(const ContractEntry& contract);

template <class Number>
struct TypeOf {
  static constexpr Type value = Type::kNone;
};
// clang-format off
template <> struct TypeOf<bool> { static constexpr Type value = Type::kBool; };
template <> struct TypeOf<uint8_t> { static constexpr Type value = Type::kUInt8; };
template <> struct TypeOf<uint16_t> { static constexpr Type value = Type::kUInt16; };
template <> struct TypeOf<int8_t> { static constexpr Type value = Type::kInt8; };
template <> struct TypeOf<int16_t> { static constexpr Type value = Type::kInt16; };
template <> struct TypeOf<int32_t> { static constexpr Type value = Type::kInt32; };
template <> struct TypeOf<int64_t> { static constexpr Type value = Type::kInt64; };
template <> struct TypeOf<float> { static constexpr Type value = Type::kFloat32; };
template <> struct TypeOf<double> { static constexpr Type value = Type::kFloat64; };
template <class T> struct TypeOf<const T> : TypeOf<T> {};
template <class T> struct IsConst { static constexpr bool value = false; };
template <class T> struct IsConst<const T> { static constexpr bool value = true; };
// clang-format on

// The kinds of parameters that are no tensors. An enumeration is the number of a string among the
// contract's allowed values.
template <class P>
constexpr Parameter::Kind kKindOf = Parameter::kChoice;
// clang-format off
template <> inline constexpr Parameter::Kind kKindOf<int64_t> = Parameter::kInt;
template <> inline constexpr Parameter::Kind kKindOf<double> = Parameter::kFloat;
template <> inline constexpr Parameter::Kind kKindOf<bool> = Parameter::kBool;
template <> inline constexpr Parameter::Kind kKindOf<List<int64_t>> = Parameter::kInts;
template <> inline constexpr Parameter::Kind kKindOf<List<double>> = Parameter::kFloats;
template <> inline constexpr Parameter::Kind kKindOf<const int64_t*> = Parameter::kOptionalInt;
template <> inline constexpr Parameter::Kind kKindOf<const double*> = Parameter::kOptionalFloat;
template <> inline constexpr Parameter::Kind kKindOf<Workspace&> = Parameter::kWorkspace;
template <> inline constexpr Parameter::Kind kKindOf<CUstream_st*> = Parameter::kStream;
// clang-format on

// The description of a parameter of type P, and its value from a slot.
template <class P>
struct Pass {
  static constexpr Parameter parameter{kKindOf<P>};
  static_assert(__is_enum(P) || kKindOf<P> != Parameter::kChoice,
                "a kernel takes View, Strided, int64_t, double, const pointers to these, bool, "
                "an enumeration, List, Workspace&, cudaStream_t and structs of these, but no int, "
                "size_t, float or const View&");
  static P from(const Slot& slot) {
    if constexpr (kKindOf<P> == Parameter::kFloat)
      return slot.real;
    else if constexpr (kKindOf<P> == Parameter::kStream)
      return static_cast<P>(slot.data);
    else if constexpr (kKindOf<P> == Parameter::kWorkspace)
      return *static_cast<Workspace*>(slot.data);
    else if constexpr (kKindOf<P> == Parameter::kOptionalInt)
      return slot.data ? &slot.integer : nullptr;
    else if constexpr (kKindOf<P> == Parameter::kOptionalFloat)
      return slot.data ? &slot.real : nullptr;
    else if constexpr (kKindOf<P> == Parameter::kInts || kKindOf<P> == Parameter::kFloats)
      return {static_cast<decltype(P::data)>(slot.data), slot.integer};
    else
      return P(slot.integer);
  }
};

template <class Number, int rank, Layout layout>
struct Pass<Strided<Number, rank, layout>> {
  static_assert(TypeOf<Number>::value != Type::kNone,
                "a view has numbers of bool, uint8_t, uint16_t, int8_t, int16_t, int32_t, int64_t, "
                "float or double");
  static constexpr Parameter parameter{Parameter::kTensor, TypeOf<Number>::value, rank,
                                       !IsConst<Number>::value, layout};
  static Strided<Number, rank, layout> from(const Slot& slot) {
    Strided<Number, rank, layout> tensor{};
    tensor.data = static_cast<Number*>(slot.data);
    for (int d = 0; d < rank && slot.data; ++d) {
      tensor.shape[d] = slot.shape[d];
      tensor.stride[d] = slot.stride[d];
    }
    return tensor;
  }
};

inline Outcome outcome_of(int64_t wrong) { return {wrong}; }

// Error is cudaError_t. cudaGetErrorString is found by argument-dependent lookup, so that this
// header needs no CUDA.
template <class Error>
Outcome outcome_of(Error error) {
  return {-1, error == 0 ? nullptr : cudaGetErrorString(error)};
}

#ifdef CALCOPS_CHECK_INDICES
template <class Number, int rank, Layout layout>
void watch(Strided<Number, rank, layout>& tensor, int parameter, WrongIndex* record) {
  tensor.data.record = record;
  tensor.data.parameter = parameter;
  int64_t last = 0;
  bool is_empty = !tensor.data;
  for (int d = 0; d < rank; ++d) {
    last += (tensor.shape[d] - 1) * tensor.stride[d];
    is_empty |= tensor.shape[d] == 0;
  }
  tensor.data.count = is_empty ? 0 : last + 1;
}
template <class Value>
void watch(const Value&, int, WrongIndex*) {}
#endif

// A parameter may also be a struct whose members are parameters, in the order of the schema. A
// Member becomes a value of any type, so that braces of Members fill a struct.
template <class Source>
struct Member {
  Source& source;
  template <class P>
  operator P() const {
    return source.template next<P>();
  }
};
struct AnyMember {
  template <class P>
  operator P() const;
};

// The number of a struct's members: one less than the fewest that braces do not accept.
template <class Struct, class = void, class... Members>
struct MembersOf {
  static constexpr int count = int(sizeof...(Members)) - 1;
};
template <class Struct, class... Members>
struct MembersOf<Struct, decltype(void(Struct{Members()...})), Members...>
    : MembersOf<Struct, void, Members..., AnyMember> {};

template <class P>
constexpr bool kIsStruct = __is_class(P) && kKindOf<P> == Parameter::kChoice;
template <class Number, int rank, Layout layout>
constexpr bool kIsStruct<Strided<Number, rank, layout>> = false;

// The number of parameters that P stands for.
template <class P>
constexpr int count_of() {
  if constexpr (kIsStruct<P>) {
    static_assert(
        __is_aggregate(P) && MembersOf<P>::count > 0,
        "a kernel's struct has public members, no references, no base and no constructor");
    return MembersOf<P>::count;
  } else {
    return 1;
  }
}

template <class Struct, class Source, class... Members>
Struct filled(Source& source, Members... members) {
  if constexpr (sizeof...(Members) < count_of<Struct>())
    return filled<Struct>(source, members..., Member<Source>{source});
  else
    return Struct{members...};
}

// Writes the descriptions of parameters.
struct Describer {
  Parameter* to;

  template <class P>
  void describe() {
    if constexpr (kIsStruct<P>)
      filled<P>(*this);
    else
      *to++ = Pass<P>::parameter;
  }
  template <class P>
  P next() {
    static_assert(!kIsStruct<P>,
                  "a member of a kernel's struct is a parameter, not another struct");
    describe<P>();
    return P{};
  }
};

// Reads the values of parameters.
struct Reader {
  const Slot* from;
  const Slot* end;
  int count = 0;

  template <class P>
  P next() {
    if constexpr (kIsStruct<P>) {
      return filled<P>(*this);
    } else {
      P value = Pass<P>::from(*from++);
#ifdef CALCOPS_CHECK_INDICES
      watch(value, count, static_cast<WrongIndex*>(end->data));
#endif
      ++count;
      return value;
    }
  }
};

template <class Result, class... P>
struct Caller {
  static_assert(__is_same(Result, void) || __is_same(Result, int64_t) || __is_enum(Result),
                "a kernel returns void or int64_t on the CPU, and cudaError_t on CUDA");
  using Function = Result (*)(P...);
  static constexpr int kCount = (count_of<P>() + ... + 0);

  static const Parameter* parameters() {
    static Parameter all[unsigned(kCount)];
    Describer describer{all};
    (describer.describe<P>(), ...);
    return all;
  }

  static Outcome run(void (*function)(), const Slot* slots) {
    Reader reader{slots, slots + kCount};
    // Braces evaluate their elements in order, which parentheses do not.
    return Run{reinterpret_cast<Function>(function), reader.next<P>()...}.outcome;
  }

 private:
  struct Run {
    Outcome outcome;
    Run(Function function, P... values) {
      if constexpr (__is_same(Result, void))
        function(values...);
      else
        outcome = outcome_of(function(values...));
    }
  };
};

// ---- compositions -------------------------------------------------------------------------------

// A value of PyTorch: a tensor, a number (under tracing a symbol), a string, a list, or none.
class Value {
 public:
  Value() : Value(nullptr) {}
  Value(decltype(nullptr));
  Value(int64_t number);
  Value(int number) : Value(int64_t(number)) {}
  Value(double number);
  Value(bool flag);
  Value(const char* text);
  Value(const Value& other);
  Value& operator=(const Value& other);
  ~Value();

  // Call an operator, such as "aten::ge.Scalar". A name without a namespace is one of this library.
  // Arguments that are left out are their defaults.
  template <class... Values>
  static Value call(const char* op, const Values&... values) {
    const Value list[sizeof...(values) + 1] = {values...};
    return call_in(library_namespace(), op, list, int(sizeof...(values)));
  }
  template <class... Values>
  static Value list(const Values&... values) {
    const Value list[] = {values...};
    return list_of(list, int(sizeof...(values)));
  }
  static Value list_of(const Value* values, int count);

  bool is_none() const;
  bool is_tensor() const;
  bool is_wanted() const;  // whether a formula must compute this gradient
  // Whether a tensor's elements can be read now. Meta tensors and those under tracing or vmap
  // cannot.
  bool is_readable() const;
  // Whether CALCOPS_CHECK=1, and a tensor's elements can be read and compared now.
  bool wants_checks() const;
  bool is_on_cuda() const;  // of a tensor
  int64_t item() const;     // a tensor's only element, a number, or a flag as 0 or 1
  double real() const;      // a float
  Value shape() const;
  Value size(int dimension) const;
  Value dtype() const;
  Value dtype_name() const;
  static Value dtype_of(Type type);
  bool is_integral() const;
  Value device() const;
  int dim() const;                      // number of dimensions of a tensor
  bool equals(int64_t number) const;    // of a size; under tracing, this becomes a guard
  bool is_known(int64_t number) const;  // of a size; false for a symbol
  // Whether a size is as expected. Under tracing, this becomes an assertion of the graph.
  bool expect_equal(const Value& size) const;
  bool expect_at_least(int64_t number) const;
  bool is(const char* text) const;  // of a string
  Value operator[](int i) const;    // result i of an operator with several, or item i of a list
  int length() const;               // of a list

  // Operands are tensors, numbers and sizes. The quotient of two sizes is rounded down, as in C++.
  friend Value operator+(const Value& a, const Value& b);
  friend Value operator-(const Value& a, const Value& b);
  friend Value operator*(const Value& a, const Value& b);
  friend Value operator/(const Value& a, const Value& b);

 private:
  static constexpr const char* library_namespace();
  static Value call_in(const char* name_space, const char* op, const Value* values, int count);

  alignas(8) unsigned char memory_[16];  // of PyTorch's IValue
};

// Throw "op: expected `argument` what, got ...". Of a tensor, the error shows dtype and shape.
[[noreturn]] void refuse(const char* op, const char* argument, const char* what, const Value& got);
// Throw "op: expected `argument` what wanted, got ...".
[[noreturn]] void refuse(const char* op, const char* argument, const char* what,
                         const Value& wanted, const Value& got);

// An operator that calls others. It needs no more for devices, derivatives and vmap. Its arguments
// are checked before the call.
struct Composition {
  const char* op;
  Value (*function)(const Value* arguments);
};

// Checks what a contract cannot say, for calls with data and under tracing. It runs when the
// contract's own checks are done.
struct Check {
  const char* op;
  // Throws by refuse(). Sets the shapes of the results whose contract says `any shape`, as lists
  // of sizes. It may also give a tensor that is absent.
  void (*function)(Value* arguments, Value* result_shapes);
};

// The derivatives of an operator by formulas that call operators. These have derivatives too, so
// the operator has derivatives to any order. A gradient or tangent that is left unset is zero.
// Formulas also receive such zeros: is_none() is true for them, and +, -, * and / accept them.
struct Derivative {
  const char* op;
  // Sets the gradients for the arguments from those for the results. A gradient for which
  // is_wanted() is false may be left unset.
  void (*vjp)(const Value* arguments, const Value* upstream, Value* gradients);
  // Sets the tangents of the results from those of the arguments. nullptr: forward mode is an
  // error.
  void (*jvp)(const Value* arguments, const Value* tangents, Value* results) = nullptr;
  // The argument whose values no derivative needs, so that it may be changed in place afterwards.
  const char* unused = nullptr;
};

// ---- registration -------------------------------------------------------------------------------

#ifdef CALCOPS_CHECK_INDICES
constexpr bool kChecksIndices = true;
#else
constexpr bool kChecksIndices = false;
#endif

#ifdef TORCH_EXTENSION_NAME
#define CALCOPS_TEXT_OF(name) #name
#define CALCOPS_TEXT(name) CALCOPS_TEXT_OF(name)
constexpr const char* kNamespace = CALCOPS_TEXT(TORCH_EXTENSION_NAME);
#else
constexpr const char* kNamespace = "calcops";
#endif

constexpr const char* Value::library_namespace() { return kNamespace; }

// Registers the operators of a contract. Their namespace is the library's name, unless their schema
// has one. The text is followed by arrays of static storage: Compositions, Derivatives and Checks.
struct Contract {
  // A text and its place in a source.
  struct Text {
    // Other names than those of the members, for -Wshadow.
    Text(const char* words, const char* path = __builtin_FILE(), int row = __builtin_LINE())
        : text(words), file(path), line(row) {}
    const char *text, *file;
    int line;
  };

  template <class... Part, unsigned long... count>
  explicit Contract(Text text, const Part (&... parts)[count]) {
#ifdef CALCOPS_NO_CUDA
    const char* without_cuda = CALCOPS_NO_CUDA;
#else
    const char* without_cuda = nullptr;
#endif
    ContractEntry entry{text.text, kNamespace, without_cuda, text.file, text.line};
    (add(entry, Items<Part>{parts, int(count)}), ...);
    add_contract(entry);
  }

 private:
  static void add(ContractEntry& entry, Items<Composition> parts) { entry.compositions = parts; }
  static void add(ContractEntry& entry, Items<Derivative> parts) { entry.derivatives = parts; }
  static void add(ContractEntry& entry, Items<Check> parts) { entry.checks = parts; }
};

// Registers the kernels of an operator on one device, one for each combination of number types.
// They run on CUDA if their last parameter is a cudaStream_t, otherwise on the CPU. The type that
// they return says who checks index entries (contracts/README.md).
struct Kernel {
  template <class... Functions>
  explicit Kernel(Contract::Text op, Functions*... functions) {
    (add(op, functions), ...);
  }

 private:
  template <class Result, class... P>
  static void add(const Contract::Text& op, Result (*function)(P...)) {
    using Call = Caller<Result, P...>;
    KernelEntry entry{op.text,
                      kNamespace,
                      Call::parameters(),
                      Call::kCount,
                      !__is_same(Result, void),
                      &Call::run,
                      reinterpret_cast<void (*)()>(function),
                      nullptr,
                      op.file,
                      op.line,
                      kChecksIndices};
#ifdef CUDART_VERSION
    entry.is_capturing = [](void* stream) {
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      cudaStreamIsCapturing(static_cast<CUstream_st*>(stream), &status);
      return status != cudaStreamCaptureStatusNone;
    };
#endif
    add_kernel(entry);
  }
};

}  // namespace calcops
