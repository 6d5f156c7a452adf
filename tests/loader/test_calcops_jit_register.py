"""The registration of operators and classes: several libraries side by side, conflicts of names,
and libraries that PyTorch refuses."""

import pytest
from checkout import Checkout, the_zygote

CLASS = """
#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace {
struct Counter : torch::CustomClassHolder {
  explicit Counter(int64_t start) : value(start) {}
  int64_t next() { return value += 1; }
  int64_t value;
};
}  // namespace

TORCH_LIBRARY(counting, m) {
  m.class_<Counter>("Counter")
      .def(torch::init<int64_t>())
      .def("next", &Counter::next)
      .def_static("twice", [](int64_t x) { return x * 2; })
      .def_readwrite("value", &Counter::value)
      .def_pickle([](const c10::intrusive_ptr<Counter>& self) { return self->value; },
                  [](int64_t value) { return c10::make_intrusive<Counter>(value); });
  m.def("path(int x) -> int", [](int64_t x) { return x * 2; });
  m.def("advance(__torch__.torch.classes.counting.Counter c) -> int",
        [](const c10::intrusive_ptr<Counter>& c) { return c->next(); });
}
"""
ONE = """
#include <torch/library.h>
TORCH_LIBRARY_FRAGMENT({0}, m) {{ m.def("one() -> int", []() -> int64_t {{ return {1}; }}); }}
"""
SCRIPT = """
import calcops_jit, copy, os, pickle, sys, torch
from pathlib import Path
def load(name, *sources):
    flags = ["-O0", "-DAT_PER_OPERATOR_HEADERS"]
    return calcops_jit.load(name, [str(source) for source in sources], flags)
def error_of(function):
    try:
        function()
    except calcops_jit.BuildError as error:
        return str(error)
    raise SystemExit("no error")
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return Checkout(the_zygote(), tmp_path_factory.mktemp("register"))


def output(checkout, script: str, folder, **options) -> list[str]:
    child = checkout.run(SCRIPT + script, cwd=folder, **{"CALCOPS_BUILD": "0"} | options)
    assert child.code == 0, child.err
    return child.out.splitlines()


def test_a_torchbind_class_is_loaded_and_its_reload_is_refused(checkout, tmp_path):
    (tmp_path / "counting.cpp").write_text(CLASS)
    script = """
source = Path("counting.cpp")
text = source.read_text()
counting = load("counting", source)
Counter = torch.classes.counting.Counter
old = Counter(10)
print(old.next(), counting.advance(old), old.value, Counter.twice(4), counting.path(3))
source.write_text(text.replace("value += 1", "value += 100").replace("x * 2", "x * 3"))
print(error_of(calcops_jit.reload))
print(old.next(), Counter(10).next(), copy.deepcopy(old).value, counting.path(3))
source.write_text(text)
print(calcops_jit.reload(), counting.path(3))
"""
    assert output(checkout, script, tmp_path) == [
        "11 12 12 8 6",
        "cannot register counting: a TorchBind class cannot be exchanged",
        "  Custom class with name __torch__.torch.classes.counting.Counter is already registered.",
        "  fix: restart Python",
        "13 11 13 6",
        "[] 6",
    ]


def test_operators_hide_attributes_of_a_library_and_handles_can_be_copied_and_pickled(
    checkout, tmp_path
):
    (tmp_path / "counting.cpp").write_text(CLASS)
    script = """
counting = load("counting", "counting.cpp")
print(counting.path is torch.ops.counting.path, os.path.isfile(counting))
print(sorted(counting.operators))
module = torch.nn.Module()
module.handle = counting.path
module.overload = counting.advance.default
module.library = counting
for twin in (copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
    assert twin.handle is counting.path
    assert twin.overload is counting.advance.default
    assert twin.library is counting
add = torch.ops.aten.add
assert copy.copy(add) is add
assert pickle.loads(pickle.dumps(add)) is add
Path("model").write_bytes(pickle.dumps(module))
"""
    assert output(checkout, script, tmp_path) == ["True True", "['advance', 'path']"]
    script = """
module = pickle.loads(Path("model").read_bytes())
print(module.handle(4), module.library.path(4))
"""
    assert output(checkout, script, tmp_path) == ["8 8"]


def test_two_packages_may_share_a_library_name_but_not_an_operator(checkout, tmp_path):
    sources = {"a": ONE.format("a", 1), "b": ONE.format("b", 2), "c": ONE.format("a", 3)}
    for folder, text in sources.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ops.cpp").write_text(text)
    script = """
a = load("ops", "a/ops.cpp")
b = load("ops", "b/ops.cpp")
print(a.one(), b.one(), a is b, load("ops", "a/ops.cpp") is a)
print(error_of(lambda: load("ops", "c/ops.cpp")), a.one())
Path("c/ops.cpp").write_text(Path("a/ops.cpp").read_text())
print(error_of(lambda: load("ops", "c/ops.cpp")).splitlines()[0], calcops_jit.reload())
Path("c/ops.cpp").write_text(Path("b/ops.cpp").read_text())
Path("b/ops.cpp").write_text("int moved;")
print(calcops_jit.reload(), load("ops", "c/ops.cpp").one(), hasattr(b, "one"))
"""
    assert output(checkout, script, tmp_path) == [
        "1 2 False True",
        "cannot load ops: a::one is there already",
        f"  ops of {tmp_path}/a has it",
        f"  registered at {tmp_path}/a/ops.cpp:3",
        f"  ops of {tmp_path}/c would take its place",
        "  fix: load only one of the two, or give one another namespace 1",
        "cannot load ops: a::one is there already []",
        "['ops'] 2 False",
    ]


HALF = """
#include <torch/library.h>
TORCH_LIBRARY_FRAGMENT(half, m) {
  m.def("one() -> int", []() -> int64_t { return 1; });
  m.def("two(int x) -> int");
  const auto key = c10::DispatchKey::CompositeExplicitAutograd;
  m.impl("two", torch::dispatch(key, [](double x) { return x; }));
}
"""


def test_a_library_that_pytorch_refuses_leaves_nothing_registered(checkout, tmp_path):
    """The kernel of the second operator does not fit its schema. PyTorch refuses it after it has
    registered the first operator."""
    (tmp_path / "half.cpp").write_text(HALF)
    script = """
print(error_of(lambda: load("half", "half.cpp")).splitlines()[0], hasattr(torch.ops.half, "one"))
source = Path("half.cpp")
source.write_text(source.read_text().replace("double x", "int64_t x"))
half = load("half", "half.cpp")
print(half.one(), half.two(2))
"""
    error, answers = output(checkout, script, tmp_path)
    assert error.startswith("cannot ")
    assert error.endswith(" False")
    assert answers == "1 2"


def test_a_library_that_torch_loaded_is_used_and_another_copy_is_an_error(checkout, tmp_path):
    (tmp_path / "ops.cpp").write_text(ONE.format("a", 1))
    (path,) = output(checkout, "print(os.fspath(load('ops', 'ops.cpp')))", tmp_path)
    torch_first = f"""
torch.ops.load_library({path!r})
a = load('ops', 'ops.cpp')
print(torch.ops.a.one(), a.one())
"""
    assert output(checkout, torch_first, tmp_path) == ["1 1"]
    torch_second = f"""
a = load('ops', 'ops.cpp')
torch.ops.load_library({path!r})
print(torch.ops.a.one(), a.one())
"""
    assert output(checkout, torch_second, tmp_path) == ["1 1"]
    copied_library = f"""
import shutil
shutil.copy({path!r}, "copy.so")
torch.ops.load_library("copy.so")
print(error_of(lambda: load("ops", "ops.cpp")).splitlines()[0], torch.ops.a.one())
"""
    assert output(checkout, copied_library, tmp_path) == [
        "cannot load ops: a::one is there already 1"
    ]


@pytest.mark.parametrize(
    "statement, end",
    [("throw 1", "by SIGABRT"), ("*(volatile int*)0 = 1", "by SIGSEGV"), ("exit(3)", "(3)")],
)
def test_an_initialiser_that_ends_the_process_is_refused_and_the_old_library_stays(
    checkout, tmp_path, statement, end
):
    source = tmp_path / "tiny.cpp"
    source.write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 1; }\n'
    )
    wrong = f"#include <cstdlib>\nstruct Wrong {{ Wrong() {{ {statement}; }} }} wrong;\n"
    script = f"""
tiny = load("tiny", "tiny.cpp")
first = tiny.path
with open("tiny.cpp", "a") as source:
    source.write({wrong!r})
print(error_of(calcops_jit.reload).splitlines()[0], tiny.path == first)
print([line for line in open("/proc/self/maps") if "deleted" in line and "tiny" in line])
"""
    assert output(checkout, script, tmp_path) == [
        f"cannot load tiny: a static initialiser ends the process {end} True",
        "[]",
    ]


TWO_LIBRARIES = """
import ctypes
for text in ("first", "second"):
    declaration = 'extern "C" __attribute__((visibility("default"))) const char* name()'
    Path(f"{text}.cpp").write_text(f'{declaration} {{ return "{text}"; }}')
def name(path):
    function = ctypes.CDLL(path).name
    function.restype = ctypes.c_char_p
    return function().decode()
"""


def test_a_load_with_closed_or_no_free_descriptors_never_returns_another_library(
    checkout, tmp_path
):
    script = f"""{TWO_LIBRARIES}
from _calcops_jit.live import loading
from _calcops_jit.request import Request
first = load("first", "first.cpp")
os.closerange(3, 256)  # as a daemon does
second = load("second", "second.cpp")
print(name(first.path), name(second.path))
request = Request(name="x", root="/", sources=(), cflags=())
for library in (first.path, second.path):  # a library in memory without a file
    os.closerange(3, 256)
    fd = os.memfd_create("x")
    os.write(fd, Path(library).read_bytes())
    function = loading.link_in("/nowhere", fd, request).name
    function.restype = ctypes.c_char_p
    print(function().decode())
descriptors = []
try:
    while True:
        descriptors.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    error = error_of(lambda: load("first", "first.cpp"))
    for fd in descriptors:
        os.close(fd)
print(error.splitlines()[0], "Too many open files" in error, "fix: ulimit -n" in error)
"""
    assert output(checkout, script, tmp_path) == [
        "first second",
        "first",
        "second",
        "cannot load first True True",
    ]


STABLE = """
#include <torch/csrc/stable/library.h>
static void same(StableIValue*, uint64_t, uint64_t) {}
STABLE_TORCH_LIBRARY_FRAGMENT(stable, m) { m.def("same(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(stable, CompositeExplicitAutograd, m) { m.impl("same", &same); }
"""


def test_a_library_of_the_stable_abi_is_loaded_and_its_reload_is_refused(checkout, tmp_path):
    (tmp_path / "stable.cpp").write_text(STABLE)
    script = """
library = load("stable", "stable.cpp")
print(library.same(torch.ones(1)).item())
Path("stable.cpp").write_text(Path("stable.cpp").read_text() + "int more;")
print(error_of(calcops_jit.reload), library.same(torch.ones(1)).item())
"""
    result, first, second, *_, last = output(checkout, script, tmp_path)
    assert result == "1.0"
    assert first == "cannot reload stable"
    assert "STABLE_TORCH_LIBRARY" in second
    assert last == "  fix: restart Python 1.0"


def test_the_registry_is_compiled_once_for_all_libraries_even_behind_a_macro(checkout, tmp_path):
    macro = "#include <torch/library.h>\n#define OPERATORS(ns) TORCH_LIBRARY_FRAGMENT(ns, m)\n"
    (tmp_path / "system").mkdir()
    (tmp_path / "system/operators.h").write_text(macro)
    for name in ("first", "second"):
        definition = 'm.def("one() -> int", []() -> int64_t { return 1; });'
        text = f"#include <operators.h>\nOPERATORS({name}) {{ {definition} }}\n"
        (tmp_path / f"{name}.cpp").write_text(text)
    checkout.log.unlink(missing_ok=True)
    (tmp_path / "ops/third").mkdir(parents=True)
    (tmp_path / "ops/third/third.cpp").write_text(ONE.format("third", 3))
    script = """
from _calcops_jit import requests
from _calcops_jit.live import library
third = library.obtain(requests.own(os.path.abspath("ops"), "third"))
print([load(name, f"{name}.cpp").one() for name in ("first", "second")], third.one())
"""
    cache = tmp_path / "cache"
    variables = {"CPATH": tmp_path / "system", "CALCOPS_CACHE": cache}
    assert output(checkout, script, tmp_path, **variables) == ["[1, 1] 3"]
    commands = [line for line in checkout.log.read_text().splitlines() if " -c " in line]
    for name in ("first", "second", "third", "registry"):
        assert sum(f"/{name}.cpp " in command for command in commands) == 1
    assert len(list(cache.glob("unit-registry.cpp-*"))) == 1
    # Only contracts need runtime.cpp.
    assert not any("/runtime.cpp " in command for command in commands)


def test_a_cached_runtime_of_contracts_also_serves_torch_library(checkout, tmp_path):
    contract = """
#include <calcops/operator.h>
const calcops::Contract contract(R"(
twice(Tensor x) -> Tensor
x [N]; float64.
y [N]; like x.
)");
void twice(calcops::View<const double, 1> x, calcops::View<double, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = 2 * x(i);
}
const calcops::Kernel cpu("twice", twice);
"""
    (tmp_path / "first.cpp").write_text(contract)
    (tmp_path / "second.cpp").write_text(ONE.format("second", 2))
    checkout.log.unlink(missing_ok=True)
    script = """
x = torch.ones(1, dtype=torch.float64)
print(load("first", "first.cpp").twice(x).item(), load("second", "second.cpp").one())
"""
    cache = tmp_path / "cache"
    assert output(checkout, script, tmp_path, CALCOPS_CACHE=cache) == ["2.0 2"]
    assert list(cache.glob("unit-runtime.cpp-*"))
    assert not list(cache.glob("unit-registry.cpp-*"))


def test_a_new_header_before_torch_library_recompiles_the_registry_for_all_projects(
    checkout, tmp_path
):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.cpp").write_text(ONE.format(name, 1))
    headers = tmp_path / "one/include"
    (headers / "torch").mkdir(parents=True)

    def registries_compiled(name):
        checkout.log.unlink(missing_ok=True)
        script = f'print(load("{name}", "{tmp_path}/{name}/{name}.cpp").one())'
        variables = {"CPATH": headers, "CALCOPS_CACHE": tmp_path / "cache"}
        assert output(checkout, script, tmp_path, **variables) == ["1"]
        commands = checkout.log.read_text().splitlines()
        return sum(" -c " in line and "/registry.cpp " in line for line in commands)

    assert registries_compiled("one") == 1
    (headers / "torch/library.h").write_text("#include_next <torch/library.h>\n")
    assert registries_compiled("two") == 1
    assert registries_compiled("one") == 0
