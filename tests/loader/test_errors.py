"""A build that fails says why: the cause, a line that shows it, and a command that helps. Each test
makes a fault and looks for these words; the sentences around them may change."""

import os
import re
import shutil

import pytest
from checkout import ANSWER, Checkout, is_message

from _calcops_jit.messages import explain

LOADED = ANSWER.format("return 1;")
NO_NINJA = """
import shutil
def which(name, *arguments, real=shutil.which, **options):
    return None if name == "ninja" else real(name, *arguments, **options)
shutil.which = which
"""


@pytest.fixture(scope="module")
def shared_checkout(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("errors"))


@pytest.fixture
def checkout(shared_checkout, tmp_path):
    shared_checkout.project = tmp_path
    shared_checkout.compiled()
    return shared_checkout


def build_error(
    checkout, source: str, preamble: str = "", name: str = "mine.cpp", **options
) -> str:
    """Return the message of the error of loading a source. Its log has the tools' output."""
    # The comment makes the source another one than those of other tests, which are in the cache.
    checkout.put(name, f"{source}// {checkout.project.name}\n")
    variables = {key: options.pop(key) for key in list(options) if key.isupper()}
    options = {"sources": [name]} | options
    script = f"""{preamble}
import calcops_jit
try:
    calcops_jit.load("mine", **{options!r})
except calcops_jit.BuildError as error:
    print(error)
"""
    child = checkout.run(script, cwd=checkout.project, CALCOPS_BUILD="0", **variables)
    assert child.code == 0, child.err
    assert is_message(child.out), child.out + child.err
    assert re.match(r"cannot (build|load) mine", child.out)
    if log := re.search(r"^  log: (.*)", child.out, re.MULTILINE):
        with open(log[1]) as file:
            assert file.read()
    return child.out


def fix_of(message: str) -> str:
    return re.search(r"^  fix: (.*)", message, re.MULTILINE)[1]


# ---- faults of sources ---------------------------------------------------------------------------

# {fault: (source, options of load, words of the message, words of the fix)}
SOURCES = {
    "a syntax error": (
        "int f() {\n  return 1\n}\n",
        {},
        ["error at {dir}/mine.cpp:2:11", "expected ‘;’", "2 |   return 1"],
        "correct {dir}/mine.cpp:2:11",
    ),
    "a missing header": (
        "#include <nosuch/header.h>\n",
        {},
        ["nosuch/header.h"],
        "extra_include_paths",
    ),
    "an unknown flag of the linker": (
        LOADED,
        {"extra_ldflags": ["-fno-such-flag"]},
        ["-fno-such-flag"],
        "take -fno-such-flag out of the flags",
    ),
    "a library that is not there": (
        LOADED,
        {"extra_ldflags": ["-lnosuch"]},
        ["nosuch"],
        "libnosuch",
    ),
    "an undefined function": (
        "int missing_one();\nint g() { return missing_one(); }\n",
        {},
        ["nowhere defined", "missing_one"],
        "extra_ldflags",
    ),
    "an undefined function at link": (
        "int missing_one();\nint g() { return missing_one(); }\n",
        {"extra_ldflags": ["-Wl,-z,defs"]},
        ["nowhere defined", "missing_one"],
        "extra_ldflags",
    ),
    "an unknown flag": (
        LOADED,
        {"extra_cflags": ["-fno-such-flag"]},
        ["-fno-such-flag"],
        "-fno-such-flag",
    ),
}


@pytest.mark.parametrize("fault", SOURCES)
def test_the_error_of_a_wrong_source_or_flag_names_cause_and_fix(checkout, fault):
    source, options, words, fix = SOURCES[fault]
    folder = checkout.project.resolve()
    checkout.put("other.cpp", "int twice() { return 1; }\n")
    options = {name: [word.format(dir=folder) for word in value] for name, value in options.items()}
    message = build_error(checkout, source, **options)
    for word in words:
        assert word.format(dir=folder) in message, message
    assert fix.format(dir=folder) in fix_of(message), message
    assert not checkout.libraries("mine")


TWICE = "at::Tensor twice(const at::Tensor& x) { return x + x; }\n"
FRAGMENT = 'TORCH_LIBRARY_FRAGMENT(mine, m) { m.def("twice(Tensor x) -> Tensor"); }\n'
VIEW = "calcops::View<float, 1> view;\n"


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_error_of_a_missing_include_of_pytorch_names_the_header(checkout, compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    headers = {TWICE: "torch/types.h", FRAGMENT: "torch/library.h", VIEW: "calcops/operator.h"}
    for source, header in headers.items():
        output = checkout.project / "output"
        checkout.put("plain.cpp", source)
        command = f"{compiler} -c {checkout.project}/plain.cpp -o /dev/null 2> {output}"
        assert os.system(command) != 0
        text = output.read_text().replace("plain.cpp", "mine.cpp")
        hook = checkout.hook(f'case "$*" in *mine.cpp*) cat {output} >&2; exit 1;; esac')
        output.write_text(text)
        message = build_error(checkout, source, **hook)
        fix = fix_of(message)
        assert "#include <" in fix, message
        assert header in fix or (source is TWICE and "ATen" in fix), message


def test_an_error_in_the_runtime_is_shown_by_the_build_that_compiles_it(checkout):
    checkout.put("mine.cpp", "#include <calcops/operator.h>\n")
    hook = checkout.hook(
        'case "$*" in *" -c "*/runtime/runtime.cpp*)'
        ' echo "runtime.cpp:7:1: error: wrong word" >&2; exit 1;; esac'
    )
    new = {"CALCOPS_CACHE": checkout.project / "cache", "MAX_JOBS": "2", "CALCOPS_BUILD": "0"}
    script = 'import calcops_jit\ncalcops_jit.load("mine", "mine.cpp")'
    child = checkout.run(script, cwd=checkout.project, **hook, **new)
    assert "cannot build runtime: error at runtime.cpp:7:1" in child.err


def test_the_header_that_a_compiler_proposes_is_the_fix():
    output = """mine.cpp:1:19: error: ‘vector’ is not a member of ‘std’
    1 | void f() { std::vector<int> x; }
mine.cpp:1:1: note: ‘std::vector’ is defined in header ‘<vector>’; did you forget to ‘#include <vector>’?
"""
    assert fix_of(str(explain("cannot build mine", output))) == "write above: #include <vector>"


def test_the_warnings_about_a_source_are_printed_after_its_build(checkout):
    checkout.put("mine.cpp", "static int f() {\n  int x = 1;\n  x;\n}\nint g() { return f(); }\n")
    script = 'import calcops_jit\ncalcops_jit.load("mine", "mine.cpp")'
    child = checkout.run(script, cwd=checkout.project, CALCOPS_BUILD="0")
    assert re.search(r"built mine in .*\ncalcops_jit: \S+mine\.cpp:4:1: warning: ", child.err)


# {fault: (header, source, words of the message, words of the fix)}
LED_TO = {
    "a template of the standard library": (
        "",
        "#include <algorithm>\n#include <vector>\nstruct Plain {};\n"
        "void sort(std::vector<Plain>& x) {\n  std::sort(x.begin(), x.end());\n}\n",
        ["error at {dir}/mine.cpp:5", "/include/c++/"],
        "correct {dir}/mine.cpp:5",
    ),
    "a template of one's own": (
        "template <class T> T twice(T x) {\n  return x.twice();\n}\n",
        '#include "mine.h"\nint f() {\n  return twice(3);\n}\n',
        ["error at {dir}/mine.h:2", "{dir}/mine.cpp:3"],
        "correct {dir}/mine.h:2{any} or {dir}/mine.cpp:3",
    ),
    "a plain error before one in a template": (
        "",
        "#include <algorithm>\n#include <vector>\nstruct Plain {};\nint f() { return nothing; }\n"
        "void sort(std::vector<Plain>& x) {\n  std::sort(x.begin(), x.end());\n}\n",
        ["error at {dir}/mine.cpp:4"],
        "correct {dir}/mine.cpp:4{any}$",
    ),
    "a header of a package": (
        "int h() {\n  return nothing;\n}\n",
        '// a comment\n#include "site-packages/mine.h"\n',
        ["error at {dir}/mine.cpp:2", "{dir}/site-packages/mine.h:2"],
        "correct {dir}/mine.cpp:2",
    ),
    "a wrong number of indices": (
        "",
        "#include <calcops/operator.h>\ndouble f(calcops::View<const double, 2> x) {\n"
        "  return x(1);\n}\n",
        [": return x(1);\n  static assertion failed: a view takes one index for each dimension\n"],
        "correct {dir}/mine.cpp:3",
    ),
    "a parameter of type float": (
        "",
        "#include <calcops/operator.h>\nvoid f(float, calcops::View<double, 1>) {}\n"
        'const calcops::Kernel cpu("f", f);\n',
        [
            'mine.cpp:3:{any}: const calcops::Kernel cpu("f", f);',
            "but no int, size_t, float or const View&",
        ],
        "correct {dir}/mine.cpp:3",
    ),
    "a result of type int": (
        "",
        "#include <calcops/operator.h>\nint f(calcops::View<double, 1>) { return 0; }\n"
        'const calcops::Kernel cpu("f", f);\n',
        [
            "static assertion failed: a kernel returns void or int64_t on the CPU, and cudaError_t on"
        ],
        "correct {dir}/mine.cpp:3",
    ),
}


@pytest.mark.parametrize("fault", LED_TO)
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_error_in_a_header_names_the_line_of_the_user_that_led_to_it(checkout, compiler, fault):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    header, source, words, fix = LED_TO[fault]
    checkout.put("mine.h", header)
    checkout.put("site-packages/mine.h", header)
    message = build_error(checkout, source, CXX=compiler)
    for word in words:
        pattern = re.escape(word).replace(r"\{dir\}", str(checkout.project.resolve()))
        assert re.search(pattern.replace(r"\{any\}", "[0-9]*"), message), message
    pattern = fix.format(dir=checkout.project.resolve(), any="[:0-9]*")
    assert re.match(pattern, fix_of(message)), message


OPERATOR = """#include <calcops/operator.h>
template <class Real>
void twice(calcops::View<const Real, 1>, calcops::View<Real, 1>) {}
"""
# {mistake: (a line of a source, cause, words of the fix)}
MISTAKES = {
    "a kernel without types": (
        'const calcops::Kernel cpu("twice", twice);',
        "a Kernel takes the operator's name and functions",
        "f<float>, f<double>",
    ),
    "a kernel that is a lambda": (
        'const calcops::Kernel cpu("f", [](calcops::View<double, 1>) {});',
        "a Kernel takes the operator's name and functions",
        "a lambda needs a +",
    ),
    "a kernel without a name": (
        'const calcops::Kernel("twice", twice<float>);',
        "an object needs a name",
        "calcops::Kernel cpu(",
    ),
    "a contract of several texts": (
        'const calcops::Contract contract("", 3);',
        "a Contract takes a text and arrays",
        'contract(R"(...)")',
    ),
    "a contract without quotation marks": (
        "const calcops::Contract contract(f(Tensor x) -> Tensor y);",
        "C++ does not know the type Tensor",
        'R"(...)"',
    ),
    "a contract that does not end": (
        'const calcops::Contract contract(R"(f(Tensor x) -> Tensor y");',
        "a contract does not end",
        'end it with )"',
    ),
    "a pointer with checks": (
        "auto* f(calcops::View<double, 1> x) { auto* data = x.data; return data; }",
        "with checks, data is no plain pointer",
        "write +x.data",
    ),
    "a cast with checks": (
        "auto f(calcops::View<int, 1> x) { return reinterpret_cast<char*>(x.data); }",
        "with checks, data is no plain pointer",
        "write +x.data",
    ),
    "a view without its namespace": ("void g(View<const double, 1> x) {}", "error at ", "correct "),
    "a mistake before others": (
        'void g() { nothing(); }\nconst calcops::Kernel cpu("twice", twice);',
        "error at ",
        "correct ",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_error_of_a_mistake_in_an_operator_has_its_line_and_its_cause(
    checkout, compiler, mistake
):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    line, cause, fix = MISTAKES[mistake]
    check = "checks" in mistake
    message = build_error(checkout, f"{OPERATOR}{line}\n", CXX=compiler, check=check)
    title, place, *quoted = message.splitlines()
    assert title.startswith(f"cannot build mine: {cause}")
    assert f"{checkout.project.resolve()}/mine.cpp:4:" in place
    assert line.partition("\n")[0] in quoted[0]
    assert fix in fix_of(message)
    assert "declared void" not in message


def test_a_cuda_error_without_its_source_shows_the_line(checkout):
    source = checkout.put("mine.cu", "int f();\nconst int i = f(;\n")
    error = explain("cannot build mine", f"{source}(2): error: expected an expression\n")
    assert "\n  const int i = f(;\n" in str(error)


def test_the_error_in_a_template_of_a_cuda_source_names_the_line_that_led_to_it(checkout):
    """nvcc names that line in words."""
    output = """/x/mine.h(3): error: expression must have class type but it has type "int"
    return x.nothing();
           ^
          detected during instantiation of "int g(T) [with T=int]" at line 7 of /x/mine.cu
"""
    path = checkout.put("output", output)
    hook = checkout.hook(f'case "$*" in *mine.cpp*) cat {path} >&2; exit 1;; esac')
    message = build_error(checkout, LOADED, **hook)
    assert fix_of(message) == "correct /x/mine.h(3) or /x/mine.cu:7"


ABORTED = """
#include <cstdio>
#include <cstdlib>
struct Wrong {
  Wrong() {
    fputs("what():  the reason\\nException raised from f at mine.cpp:3\\n", stderr);
    for (int i = 0; i < 20; ++i) fputs("frame of a stack\\n", stderr);
    abort();
  }
} wrong;
"""


def test_the_error_of_an_initialiser_has_pytorchs_words_but_not_its_stack(checkout):
    message = build_error(checkout, ABORTED)
    assert "what():  the reason" in message
    assert "frame of a stack" not in message


# ---- faults of the machine -----------------------------------------------------------------------

# {fault: (what the compiler prints, words of the message, words of the fix)}
OUTPUTS = {
    "killed for memory": (
        "c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.",
        "memory",
        "MAX_JOBS=1",
    ),
    "disk full": (
        "/tmp/ccWsDJTm.s: Assembler messages:\n/tmp/ccWsDJTm.s: Fatal error: can't write 11 bytes to "
        "section .text of a.o: 'No space left on device'",
        "the disk is full",
        "CALCOPS_CACHE=",
    ),
    "an old standard of C++": (
        "/torch/ATen/ATen.h:9:2: error: #error C++20 or later compatible compiler is required to "
        "use ATen.\n    9 | #error C++20 or later compatible compiler is required to use ATen.",
        "PyTorch needs a newer C++",
        "take -std=... out",
    ),
    "an old standard of C++ for nvcc": (
        '/torch/intrusive_ptr.h(775): error: namespace "std" has no member "strong_ordering"',
        "PyTorch needs a newer C++",
        "take -std=... out",
    ),
    "a compiler that nvcc does not know": (
        "/cuda/include/crt/host_config.h:137:2: error: #error -- unsupported GNU version! gcc "
        "versions later than 15 are not supported!",
        "nvcc does not support",
        "export CC=g++-15",
    ),
    "an old GPU": (
        "nvcc fatal   : Unsupported gpu architecture 'compute_60'",
        "does not support the GPU",
        "leave compute_60 out of TORCH_CUDA_ARCH_LIST",
    ),
    "an old libstdc++": (
        "/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /x/mine.so)",
        "an older library",
        "LD_PRELOAD=$(c++ -print-file-name=libstdc++.so.6)",
    ),
    "a linker killed for memory": (
        "collect2: fatal error: ld terminated with signal 9 [Killed]",
        "memory",
        "MAX_JOBS=1",
    ),
    "a part of nvcc killed for memory": (
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "memory",
        "MAX_JOBS=1",
    ),
    "a missing header of Python for clang": (
        "In file included from /x/mine.cpp:1:\n/x/site-packages/torch/include/python_headers.h:12:10:"
        " fatal error: 'Python.h' file not found\n#include <Python.h>\n         ^~~~~~~~~~",
        "Python's headers are missing",
        "python3-dev",
    ),
    "a missing header for clang": (
        "/x/mine.cpp:1:10: fatal error: 'nosuch.h' file not found",
        "a header is missing",
        "'*/nosuch.h'",
    ),
    "an error in a header of the compiler alone": (
        "/usr/include/c++/11/bits/std_function.h:435:145: error: parameter packs not expanded",
        "error at /usr/include",
        "failed.",
    ),
    "an unknown standard for clang": (
        "error: invalid value 'c++26' in '-std=c++26'\n" + "note: use 'c++98' for ...\n" * 9,
        "invalid value 'c++26'",
        "failed.",
    ),
    "a shared library that is not found": (
        "libmine3.so: cannot open shared object file: No such file or directory",
        "was not found",
        "-Wl,-rpath,",
    ),
    "a variable with the name of a namespace of PyTorch": (
        "/x/mine.cpp:1:26: error: ‘at’ was not declared in this scope\n"
        "    1 | int g(int* x) { return x[at]; }",
        "error at /x/mine.cpp:1:26",
        "correct /x/mine.cpp:1:26",
    ),
    "a misspelt macro of PyTorch": (
        "/x/mine.cpp:3:22: error: expected constructor or type conversion before ‘(’ token\n"
        "    3 | TORCH_LIBRARY_FRAGMNT(ns, m) { }",
        "error at /x/mine.cpp:3:22",
        "correct /x/mine.cpp:3:22",
    ),
    "words of a fault in a source": (
        "/x/mine.cpp:3:5: error: expected ‘;’\n    3 |  f() // out of memory\n      |     ^",
        "error at /x/mine.cpp:3:5",
        "correct /x/mine.cpp:3:5",
    ),
    "words of a fault in a source that clang prints": (
        "/x/mine.cpp:3:5: error: expected ';'\nf() // No space left on device\n   ^",
        "error at /x/mine.cpp:3:5",
        "correct /x/mine.cpp:3:5",
    ),
    "something else": ("what nobody expected", "what nobody expected", "failed."),
}


@pytest.mark.parametrize("fault", OUTPUTS)
def test_the_output_of_a_failed_compiler_becomes_cause_and_fix(checkout, fault):
    output, words, fix = OUTPUTS[fault]
    path = checkout.put("output", f"{output}\n")
    hook = checkout.hook(f'case "$*" in *mine.cpp*) cat {path} >&2; exit 1;; esac')
    message = build_error(checkout, LOADED, **hook)
    assert words in message
    assert fix in fix_of(message)


# {fault: (variables, preamble, words of the message, words of the fix)}. No compiler starts.
FORESEEN = {
    "no compiler": ({"CXX": None, "PATH": "/nowhere"}, "", "C++ compiler", "install"),
    "a compiler that is not there": ({"CXX": "no-such-g++"}, "", "no-such-g++", "unset CXX"),
    "no ninja": ({}, NO_NINJA, "no ninja", "pip install ninja"),
    "no nvcc": (
        {"CUDA_HOME": "/nowhere", "PATH": "/usr/bin:/bin"},
        "import os, torch; torch.version.cuda = '13.2'; real = os.access\n"
        "os.access = lambda path, mode: not path.endswith('nvcc') and real(path, mode)\n",
        "no nvcc",
        "cuda-toolkit[nvcc]==13.2.*",
    ),
}


@pytest.mark.parametrize("fault", FORESEEN)
def test_a_fault_known_beforehand_is_reported_before_a_compiler_starts(checkout, fault):
    variables, preamble, words, fix = FORESEEN[fault]
    name = "mine.cu" if fault == "no nvcc" else "mine.cpp"
    values = {key: value and value.format(dir=checkout.project) for key, value in variables.items()}
    message = build_error(checkout, LOADED, preamble, name, **values)
    assert words in message
    assert fix in fix_of(message)
    assert not checkout.log.exists() or " -c " not in checkout.log.read_text()
