"""What libraries register: side by side, under one another's names, with classes, and when it goes
wrong."""
# ruff: noqa: F811 - pytest's fixtures are imported and then named as arguments

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
    return calcops_jit.load(name, [str(source) for source in sources], ["-O0", "-DAT_PER_OPERATOR_HEADERS"])
def refused(act):
    try:
        act()
    except calcops_jit.BuildError as error:
        return str(error)
    raise SystemExit("it was not refused")
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return Checkout(the_zygote(), tmp_path_factory.mktemp("register"))


def output(checkout, script: str, folder, **options) -> list[str]:
    child = checkout.run(SCRIPT + script, cwd=folder, **{"CALCOPS_BUILD": "0"} | options)
    assert child.code == 0, child.err
    return child.out.splitlines()


def test_a_class_is_loaded_and_one_that_was_edited_is_refused(checkout, tmp_path):
    (tmp_path / "counting.cpp").write_text(CLASS)
    script = """
source = Path("counting.cpp")
text = source.read_text()
counting = load("counting", source)
Counter = torch.classes.counting.Counter
old = Counter(10)
print(old.next(), counting.advance(old), old.value, Counter.twice(4), counting.path(3))
source.write_text(text.replace("value += 1", "value += 100").replace("x * 2", "x * 3"))
print(refused(calcops_jit.reload))
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


def test_an_operator_comes_first_handles_and_libraries_are_copied_and_pickled(checkout, tmp_path):
    (tmp_path / "counting.cpp").write_text(CLASS)
    script = """
counting = load("counting", "counting.cpp")
print(counting.path is torch.ops.counting.path, os.path.isfile(counting), sorted(counting.operators))
module = torch.nn.Module()
module.handle, module.overload, module.library = counting.path, counting.advance.default, counting
for twin in (copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
    print(twin.handle is counting.path, twin.overload is counting.advance.default, twin.library is counting)
print(copy.copy(torch.ops.aten.add) is pickle.loads(pickle.dumps(torch.ops.aten.add)) is torch.ops.aten.add)
Path("model").write_bytes(pickle.dumps(module))
"""
    printed = output(checkout, script, tmp_path)
    assert printed == ["True True ['advance', 'path']", *["True True True"] * 3, "True"]
    script = (
        "module = pickle.loads(Path('model').read_bytes()); print(module.handle(4), "
        "module.library.path(4))"
    )
    assert output(checkout, script, tmp_path) == ["8 8"]


def test_two_packages_may_use_one_name_but_not_one_operator(checkout, tmp_path):
    for folder, text in {
        "a": ONE.format("a", 1),
        "b": ONE.format("b", 2),
        "c": ONE.format("a", 3),
    }.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ops.cpp").write_text(text)
    script = """
a = load("ops", "a/ops.cpp")
b = load("ops", "b/ops.cpp")
print(a.one(), b.one(), a is b, load("ops", "a/ops.cpp") is a)
print(refused(lambda: load("ops", "c/ops.cpp")), a.one())
Path("c/ops.cpp").write_text(Path("a/ops.cpp").read_text())
print(refused(lambda: load("ops", "c/ops.cpp")).splitlines()[0], calcops_jit.reload())
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
        "['ops'] 2 False",  # the refused library holds no reference to it
    ]


HALF = """
#include <torch/library.h>
TORCH_LIBRARY_FRAGMENT(half, m) {
  m.def("one() -> int", []() -> int64_t { return 1; });
  m.def("two(int x) -> int");
  m.impl("two", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, [](double x) { return x; }));
}
"""


def test_a_library_that_pytorch_refuses_leaves_nothing_registered(checkout, tmp_path):
    """The kernel does not fit its schema, which PyTorch notices when the first operator is
    registered already."""
    (tmp_path / "half.cpp").write_text(HALF)
    script = """
print(refused(lambda: load("half", "half.cpp")).splitlines()[0], hasattr(torch.ops.half, "one"))
source = Path("half.cpp")
source.write_text(source.read_text().replace("double x", "int64_t x"))
half = load("half", "half.cpp")
print(half.one(), half.two(2))
"""
    refusal, right = output(checkout, script, tmp_path)
    assert refusal.startswith("cannot ")
    assert refusal.endswith(" False")
    assert right == "1 2"


def test_what_was_loaded_by_torch_itself_is_taken_as_it_is_and_another_copy_of_it_is_refused(
    checkout, tmp_path
):
    (tmp_path / "ops.cpp").write_text(ONE.format("a", 1))
    script = "a = load('ops', 'ops.cpp'); print(os.fspath(a))"
    (path,) = output(checkout, script, tmp_path)
    plain = f"""
torch.ops.load_library({path!r})
a = load('ops', 'ops.cpp')
print(torch.ops.a.one(), a.one())
"""
    assert output(checkout, plain, tmp_path) == ["1 1"]
    after = f"""
a = load('ops', 'ops.cpp')
torch.ops.load_library({path!r})
print(torch.ops.a.one(), a.one())
"""
    assert output(checkout, after, tmp_path) == ["1 1"]
    copied = f"import shutil; shutil.copy({path!r}, 'copy.so'); torch.ops.load_library('copy.so')\n"
    copied += "print(refused(lambda: load('ops', 'ops.cpp')).splitlines()[0], torch.ops.a.one())"
    assert output(checkout, copied, tmp_path) == ["cannot load ops: a::one is there already 1"]


@pytest.mark.parametrize(
    "statement, end",
    [("throw 1", "by SIGABRT"), ("*(volatile int*)0 = 1", "by SIGSEGV"), ("exit(3)", "(3)")],
)
def test_an_initialiser_that_ends_the_process_is_refused_and_what_was_live_goes_on(
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
print(refused(calcops_jit.reload).splitlines()[0], tiny.path == first, calcops_jit.load.__name__)
print([line for line in open("/proc/self/maps") if "deleted" in line and "tiny" in line])
"""
    assert output(checkout, script, tmp_path) == [
        f"cannot load tiny: a static initialiser ends the process {end} True load",
        "[]",
    ]


TWO = """
for name in ("first", "second"):
    Path(f"{name}.cpp").write_text(f'extern "C" __attribute__((visibility("default"))) const char* name() '
                                   f'{{ return "{name}"; }}')
import ctypes
def name(path):
    function = ctypes.CDLL(path).name
    function.restype = ctypes.c_char_p
    return function().decode()
"""


def test_with_every_descriptor_closed_and_with_none_left_it_is_never_another_librarys_code(
    checkout, tmp_path
):
    script = f"""{TWO}
from _calcops_jit.live import loading
from _calcops_jit.request import Request
first = load("first", "first.cpp")
os.closerange(3, 256)  # as a daemon does
second = load("second", "second.cpp")
print(name(first.path), name(second.path))
request = Request(name="x", root="/", sources=(), cflags=())
for library in (first.path, second.path):  # from memory
    os.closerange(3, 256)
    fd = os.memfd_create("x")
    os.write(fd, Path(library).read_bytes())
    function = loading.link_in("/nowhere", fd, request).name
    function.restype = ctypes.c_char_p
    print(function().decode())
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    error = refused(lambda: load("first", "first.cpp"))
    [os.close(fd) for fd in taken]
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


def test_a_library_of_the_stable_interface_is_loaded_and_its_reload_is_refused_with_a_word(
    checkout, tmp_path
):
    (tmp_path / "stable.cpp").write_text(STABLE)
    script = """
library = load("stable", "stable.cpp")
print(library.same(torch.ones(1)).item())
Path("stable.cpp").write_text(Path("stable.cpp").read_text() + "int more;")
print(refused(calcops_jit.reload), library.same(torch.ones(1)).item())
"""
    first, *refusal, last = output(checkout, script, tmp_path)
    assert first == "1.0"
    assert refusal[0] == "cannot reload stable"
    assert "STABLE_TORCH_LIBRARY" in refusal[1]
    assert last == "  fix: restart Python 1.0"


def test_the_runtime_is_compiled_once_for_all_libraries_also_where_a_macro_hides_that_it_is_needed(
    checkout, tmp_path
):
    macro = "#include <torch/library.h>\n#define OPERATORS(ns) TORCH_LIBRARY_FRAGMENT(ns, m)\n"
    (tmp_path / "system").mkdir()
    (tmp_path / "system/operators.h").write_text(macro)
    for name in ("first", "second"):
        text = (
            f'#include <operators.h>\nOPERATORS({name}) {{ m.def("one() -> int", []() '
            f"-> int64_t {{ return 1; }}); }}\n"
        )
        (tmp_path / f"{name}.cpp").write_text(text)
    checkout.log.unlink(missing_ok=True)
    (tmp_path / "ops/third").mkdir(parents=True)
    (tmp_path / "ops/third/third.cpp").write_text(ONE.format("third", 3))
    script = """
from _calcops_jit import requests; from _calcops_jit.live import library
third = library.obtain(requests.own(os.path.abspath("ops"), "third"))
print([load(name, f"{name}.cpp").one() for name in ("first", "second")], third.one())
"""
    empty = tmp_path / "cache"
    assert output(checkout, script, tmp_path, CPATH=tmp_path / "system", CALCOPS_CACHE=empty) == [
        "[1, 1] 3"
    ]
    compiled = [line for line in checkout.log.read_text().splitlines() if " -c " in line]
    counts = {
        name: sum(f"/{name}.cpp " in line for line in compiled)
        for name in ("first", "second", "third", "registry")
    }
    assert set(counts.values()) == {1}, counts
    assert len(list(empty.glob("unit-registry.cpp-*"))) == 1
    assert not any("/runtime.cpp " in line for line in compiled), "only contracts need it"


def test_where_the_runtime_of_contracts_is_kept_it_serves_torch_library_too(checkout, tmp_path):
    contract = (
        "#include <calcops/operator.h>\n"
        'const calcops::Contract contract(R"(\ntwice(Tensor x) -> Tensor\nx [N]; float64.\n'
        'y [N]; like x.\n)");\n'
        "void twice(calcops::View<const double, 1> x, calcops::View<double, 1> y) {\n"
        "  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = 2 * x(i);\n}\n"
        'const calcops::Kernel cpu("twice", twice);\n'
    )
    (tmp_path / "first.cpp").write_text(contract)
    (tmp_path / "second.cpp").write_text(ONE.format("second", 2))
    checkout.log.unlink(missing_ok=True)
    script = """
x = torch.ones(1, dtype=torch.float64)
print(load("first", "first.cpp").twice(x).item(), load("second", "second.cpp").one())
"""
    empty = tmp_path / "cache"
    assert output(checkout, script, tmp_path, CALCOPS_CACHE=empty) == ["2.0 2"]
    assert list(empty.glob("unit-runtime.cpp-*"))
    assert not list(empty.glob("unit-registry.cpp-*"))


def test_a_header_that_appears_in_one_project_counts_for_the_runtime_of_another(checkout, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.cpp").write_text(ONE.format(name, 1))
    headers = tmp_path / "one/include"
    (headers / "torch").mkdir(parents=True)

    def registries_compiled(name):
        checkout.log.unlink(missing_ok=True)
        script = f'print(load("{name}", "{tmp_path}/{name}/{name}.cpp").one())'
        assert output(
            checkout, script, tmp_path, CPATH=headers, CALCOPS_CACHE=tmp_path / "cache"
        ) == ["1"]
        return sum(
            " -c " in line and "/registry.cpp " in line
            for line in checkout.log.read_text().splitlines()
        )

    assert registries_compiled("one") == 1
    (headers / "torch/library.h").write_text("#include_next <torch/library.h>\n")
    assert registries_compiled("two") == 1
    assert registries_compiled("one") == 0
