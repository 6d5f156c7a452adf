"""A compile error inside a header of PyTorch, the standard library or another package is reported
at the line of the project that caused it."""

import pytest

from _calcops_jit.compile import diagnosis
from _calcops_jit.request import Request

# For each case: a compiler's output, the line of the project that caused the error, and the error.
OUTPUTS = {
    "g++ and torch": (
        """In file included from /torch/include/torch/library.h:62,
                 from {root}/mine.cpp:1:
/torch/include/ATen/core/op_registration/infer_schema.h: In instantiation of ‘constexpr int checkStaticTypes()’:
/torch/include/ATen/core/op_registration/infer_schema.h:51:28:   required from ‘createFunctionSchema() [T = int]’
/torch/include/torch/library.h:659:17:   required from ‘torch::Library& torch::Library::def(Name&&, Func&&) &’
{root}/mine.cpp:4:8:   required from here
    4 |   m.def("scale(Tensor x, int times) -> Tensor", &scale);
      |   ~~~~~^~~~~~~
/torch/include/ATen/infer_schema.h:65:60:   in ‘constexpr’ expansion of ‘createArguments<const at::Tensor&, int>()’
/torch/include/ATen/infer_schema.h:38:21: error: static assertion failed: Only int8_t, int64_t and bool are supported
   38 |  static_assert(std::conjunction_v<
{root}/mine.cpp:9:8:   required from here
/torch/include/ATen/infer_schema.h:38:21: error: another
""",
        4,
        (
            "ATen/infer_schema.h:38:21: error: static assertion failed: Only int8_t, "
            "int64_t and bool are supported"
        ),
    ),
    "a macro": (
        """{root}/mine.cpp: In function ‘void f(int)’:
/torch/include/c10/util/Exception.h:512:20: error: no match for ‘operator<<’
  512 |     ss << t;
/torch/include/c10/macros/Macros.h:10:3: note: in expansion of macro ‘C10_UNLIKELY’
{root}/mine.cpp:5:3: note: in expansion of macro ‘TORCH_CHECK’
""",
        5,
        "c10/util/Exception.h:512:20: error: no match for ‘operator<<’",
    ),
    "clang++": (
        """In file included from {root}/mine.cpp:1:
In file included from /usr/bin/../lib/gcc/x86_64-linux-gnu/12/../../../../include/c++/12/memory:76:
/usr/bin/../lib/gcc/x86_64-linux-gnu/12/../../../../include/c++/12/bits/unique_ptr.h:1065:34: error: no matching \
constructor for initialization of 'Grid'
    {{ return unique_ptr<_Tp>(new _Tp(std::forward<_Args>(__args)...)); }}
                                 ^   ~~~~~~~~~~~~~~~~~~~~~~~~~~~
{root}/mine.cpp:4:15: note: in instantiation of function template specialization 'std::make_unique<Grid>' requested here
  return std::make_unique<Grid>("a");
              ^
{root}/mine.cpp:2:8: note: candidate constructor not viable
""",
        4,
        "bits/unique_ptr.h:1065:34: error: no matching constructor for initialization of 'Grid'",
    ),
    "nvcc": (
        """/cuda/include/dev.h(1): error: no operator "*" matches these operands
            operand types are: S * int
  template <class T> __attribute__((device)) void inner(T* x) {{ x[0] = x[0] * 2; }}
                                                                            ^
          detected during:
            instantiation of "void inner(T *) [with T=S]" at line 2
            instantiation of "void scale(T *) [with T=S]" at line 4 of {root}/mine.cpp

1 error detected in the compilation of "{root}/mine.cpp".
""",
        4,
        'dev.h(1): error: no operator "*" matches these operands',
    ),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_an_error_in_a_foreign_header_is_reported_at_the_causing_line_of_the_project(
    tmp_path, case
):
    source = tmp_path / "mine.cpp"
    source.write_text("".join(f"line {number}\n" for number in range(1, 10)))
    request = Request(name="mine", root=str(tmp_path), sources=(str(source),), cflags=())
    output, line, error = OUTPUTS[case]
    output = output.format(root=tmp_path)
    message = str(diagnosis.explain("cannot build mine", output, request, "/log"))
    assert message == (
        f"cannot build mine: error at {source}:{line}\n"
        f"  {error}\n"
        f"  {source}:{line}: led to it\n"
        f"    {line} | line {line}\n"
        f"  fix: correct {source}:{line}\n"
        "  log: /log"
    )


def test_the_fix_of_an_error_without_a_line_of_the_project_is_to_read_the_log(tmp_path):
    request = Request(name="mine", root=str(tmp_path), sources=(), cflags=())
    output = "/usr/include/a.h:1:2: error: b\n"
    message = str(diagnosis.explain("cannot build mine", output, request, "/log"))
    assert message.endswith("  fix: less /log\n  log: /log")
