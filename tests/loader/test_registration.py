"""The registration of operators and classes: several libraries side by side, conflicts of names,
libraries that PyTorch refuses, and code that ends the process when it is loaded."""

import re

import pytest
from checkout import ANSWER, CONTRACT, Checkout

SCRIPT = """
import calcops_jit, copy, ctypes, os, sys, time, torch
from pathlib import Path
one = torch.ones(1, dtype=torch.float64)
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
def shared_checkout(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("register"), has_runtime=True)


@pytest.fixture
def checkout(shared_checkout, tmp_path):
    shared_checkout.project = tmp_path
    return shared_checkout


def output(checkout, script: str, **options) -> list[str]:
    options = {"cwd": checkout.project, "CALCOPS_BUILD": "0"} | options
    child = checkout.run(SCRIPT + script, **options)
    assert child.code == 0, child.err
    return child.out.splitlines()


# ---- names ---------------------------------------------------------------------------------------


def test_operators_hide_attributes_of_a_library_and_handles_can_be_copied(checkout):
    checkout.put("mine.cpp", CONTRACT.format(name="path", factor=2))
    script = """
mine = load("mine", "mine.cpp")
print(mine.path is torch.ops.mine.path, os.path.isfile(mine), list(mine.operators))
module = torch.nn.Module()
module.handle = mine.path
module.overload = mine.path.default
module.library = mine
for twin in (copy.copy(module), copy.deepcopy(module)):
    assert twin.handle is mine.path
    assert twin.overload is mine.path.default
    assert twin.library is mine
add = torch.ops.aten.add
assert copy.copy(add) is add
"""
    assert output(checkout, script) == ["True True ['path']"]
    assert "contracts/runtime" not in checkout.log.read_text()  # compiled once for all libraries


def test_an_argument_may_have_the_name_of_a_python_keyword(checkout):
    source = """#include <torch/library.h>
TORCH_LIBRARY(keyword, m) { m.def("scaled(Tensor x, float lambda) -> Tensor"); }
"""
    checkout.put("keyword.cpp", source)
    script = "print(load('keyword', 'keyword.cpp').scaled.__doc__)"
    assert output(checkout, script) == ["keyword::scaled(Tensor x, float lambda) -> Tensor"]


def test_the_error_of_a_kernel_that_no_contract_names_has_its_line(checkout):
    source = CONTRACT.format(name="twice", factor=2).replace('cpu("twice"', 'cpu("twise"')
    path = checkout.put("mine.cpp", source).resolve()
    line = next(i for i, text in enumerate(source.splitlines(), 1) if "twise" in text)
    title, place, fix = output(checkout, "print(error_of(lambda: load('mine', 'mine.cpp')))")
    assert place == f"  {path}:{line}: a kernel of mine::twise, which no contract names"
    assert fix == "  fix: correct the contract or the registration"


def contract(name: str, factor: int, namespace: str = "shared") -> str:
    """Return a source with an operator of a namespace."""
    text = CONTRACT.format(name="scaled", factor=factor)
    for part in "scaled(Tensor", 'scaled"':
        text = text.replace(part, f"{namespace}::{part.replace('scaled', name)}")
    return text


@pytest.mark.parametrize("name", ["name", "__init__"])
def test_an_operator_of_the_name_of_an_attribute_of_pytorch_is_an_error(checkout, name):
    checkout.put("mine.cpp", contract(name, 2))
    title, *_ = output(checkout, "print(error_of(lambda: load('mine', 'mine.cpp')))")
    assert title == f"cannot register mine: torch.ops has no place for an operator `shared::{name}`"


@pytest.mark.parametrize("namespace", ["aten", "higher_order", "load_library", "__file__"])
def test_an_operator_in_a_namespace_of_pytorch_is_an_error(checkout, namespace):
    checkout.put("mine.cpp", contract("scaled", 2, namespace))
    title, *_ = output(checkout, "print(error_of(lambda: load('mine', 'mine.cpp')))")
    assert title.endswith(f"torch.ops has no place for an operator `{namespace}::scaled`")


def test_a_library_builds_beside_an_operator_whose_name_pytorch_cannot_read(checkout):
    checkout.put("mine.cpp", CONTRACT.format(name="twice", factor=2))
    script = """
foreign = torch.library.Library("is", "FRAGMENT")
foreign.define("f(Tensor x) -> Tensor")
print(load("mine", "mine.cpp").twice(one).item())
"""
    assert output(checkout, script) == ["2.0"]


def test_the_error_of_an_unknown_operator_lists_the_operators(checkout):
    checkout.put("mine.cpp", CONTRACT.format(name="twice", factor=2))
    script = """
mine = load("mine", "mine.cpp")
assert not hasattr(mine, "nosuch")
try:
    mine.nosuch
except AttributeError as error:
    print(error)
"""
    text = "\n".join(output(checkout, script))
    for words in "nosuch", "mine.so", "twice":
        assert words in text


def test_two_packages_may_share_a_library_name_but_not_an_operator(checkout):
    for folder, name, factor in ("a", "one", 1), ("b", "two", 2), ("c", "one", 3):
        checkout.put(f"{folder}/ops.cpp", CONTRACT.format(name=name, factor=factor))
    script = """
a = load("ops", "a/ops.cpp")
b = load("ops", "b/ops.cpp")
print(a.one(one).item(), b.two(one).item(), a is b, load("ops", "a/ops.cpp") is a)
print(error_of(lambda: load("ops", "c/ops.cpp")))
print(a.one(one).item())
Path("c/ops.cpp").write_text(Path("b/ops.cpp").read_text())
Path("b/ops.cpp").write_text("int moved;")
print(calcops_jit.reload(), load("ops", "c/ops.cpp").two(one).item(), hasattr(b, "two"))
"""
    first, *error, last, moved = output(checkout, script)
    assert first == "1.0 2.0 False True"
    text = "\n".join(error)
    assert error[0].startswith("cannot load ops")
    assert "fix: " in error[-1]
    for words in "ops::one", f"{checkout.project}/a", f"{checkout.project}/c":
        assert words in text
    assert last == "1.0"
    assert moved == "['ops'] 2.0 False"


def test_a_compiled_function_calls_the_library_that_takes_over_an_operator(checkout):
    checkout.put("a.cpp", contract("moved", 2))
    checkout.put("b.cpp", contract("moved", 7))
    script = """
a = load("a", "a.cpp")
compiled = torch.compile(lambda x: torch.ops.shared.moved(x), backend="eager")
print(compiled(one).item())
Path("a.cpp").write_text("int moved;")
calcops_jit.reload()
try:
    compiled(one)
except RuntimeError as error:
    print("shared::moved" in str(error))
load("b", "b.cpp")
print(torch.ops.shared.moved(one).item(), compiled(one).item())
"""
    assert output(checkout, script) == ["2.0", "True", "7.0 7.0"]


def test_a_library_cannot_return_to_an_operator_that_another_library_has_by_now(checkout):
    for name, factor in ("first", 2), ("second", 3):
        checkout.put(f"{name}.cpp", contract(name, factor))
    checkout.put("a.cpp", contract("first", 2))
    checkout.put("b.cpp", contract("first", 7))
    script = """
a = load("a", "a.cpp")
Path("a.cpp").write_text(Path("second.cpp").read_text())
calcops_jit.reload()
load("b", "b.cpp")
Path("a.cpp").write_text(Path("first.cpp").read_text())
print(error_of(calcops_jit.reload))
print(torch.ops.shared.first(one).item(), a.second(one).item())
"""
    *error, last = output(checkout, script)
    assert error[0] == "cannot load a: shared::first is there already"
    assert error[1] == f"  b of {checkout.project.resolve()} has it"
    assert not any("a.cpp" in line for line in error)  # the line of the kernel that is gone
    assert last == "7.0 3.0"


def test_a_library_that_torch_loaded_is_used_and_another_copy_is_an_error(checkout):
    checkout.put("ops.cpp", CONTRACT.format(name="one", factor=1))
    (path,) = output(checkout, "print(os.fspath(load('ops', 'ops.cpp')))")
    loads = ["a = load('ops', 'ops.cpp')", f"torch.ops.load_library({path!r})"]
    call = "print(torch.ops.ops.one(one).item(), a.one(one).item())"
    for order in loads, loads[::-1]:
        assert output(checkout, "\n".join([*order, call])) == ["1.0 1.0"]
    copied_library = f"""
import shutil
shutil.copy({path!r}, "copy.so")
torch.ops.load_library("copy.so")
print(error_of(lambda: load("ops", "ops.cpp")).splitlines()[0], torch.ops.ops.one(one).item())
"""
    (line,) = output(checkout, copied_library)
    assert line.startswith("cannot load ops")
    assert "ops::one" in line
    assert line.endswith(" 1.0")


# ---- what PyTorch refuses or keeps ---------------------------------------------------------------

# These sources take seconds to compile, because of PyTorch's headers. So they stay as they are, and
# the tests edit edited.cpp beside them.

# The kernel of the second operator does not fit a schema with an integer. PyTorch refuses it after
# it has registered the first operator.
HALF = """
#include <torch/library.h>
const char* schema();
TORCH_LIBRARY_FRAGMENT(half, m) {
  m.def("one() -> int", []() -> int64_t { return 1; });
  m.def(schema());
  const auto key = c10::DispatchKey::CompositeExplicitAutograd;
  m.impl("two", torch::dispatch(key, [](double x) { return x; }));
}
"""
SCHEMA = 'const char* schema() { return "two(int x) -> float"; }\n'
CLASS = """
#include <torch/library.h>
int step();
namespace {
struct Counter : torch::CustomClassHolder {
  explicit Counter(int64_t start) : value(start) {}
  int64_t next() { return value += step(); }
  int64_t value;
};
}  // namespace
TORCH_LIBRARY(counting, m) {
  m.class_<Counter>("Counter").def(torch::init<int64_t>()).def("next", &Counter::next)
      .def_readwrite("value", &Counter::value)
      .def_pickle([](const c10::intrusive_ptr<Counter>& self) { return self->value; },
                  [](int64_t value) { return c10::make_intrusive<Counter>(value); });
  m.def("advance(__torch__.torch.classes.counting.Counter c) -> int",
        [](const c10::intrusive_ptr<Counter>& c) { return c->next(); });
}
"""


def test_a_library_that_pytorch_refuses_leaves_nothing_registered(checkout):
    checkout.put("half.cpp", HALF)
    checkout.put("edited.cpp", SCHEMA)
    script = """
sources = ("half.cpp", "edited.cpp")
print(error_of(lambda: load("half", *sources)).splitlines()[0], hasattr(torch.ops.half, "one"))
edited = Path("edited.cpp")
edited.write_text(edited.read_text().replace("int x", "float x"))
half = load("half", *sources)
print(half.one(), half.two(2.5))
"""
    error, answers = output(checkout, script)
    assert error.startswith("cannot ")
    assert error.endswith(" False")
    assert answers == "1 2.5"


def test_a_torchbind_class_is_loaded_and_its_reload_is_refused(checkout):
    checkout.put("counting.cpp", CLASS)
    checkout.put("edited.cpp", "int step() { return 1; }\n")
    script = """
source = Path("edited.cpp")
text = source.read_text()
counting = load("counting", "counting.cpp", source)
Counter = torch.classes.counting.Counter
old = Counter(10)
print(old.next(), counting.advance(old), old.value)
source.write_text(text.replace("1", "100"))
print(error_of(calcops_jit.reload))
print(old.next(), Counter(10).next(), copy.deepcopy(old).value)
source.write_text(text)
print(calcops_jit.reload(), counting.advance(old))
"""
    child = checkout.run(SCRIPT + script, cwd=checkout.project, CALCOPS_BUILD="0")
    first, *error, second, last = child.out.splitlines()
    assert (first, second, last) == ("11 12 12", "13 11 13", "[] 14")
    text = "\n".join(error)
    for words in "counting", "Custom class", "counting.Counter", "fix: restart Python":
        assert words in text


# ---- static initialisers -------------------------------------------------------------------------


PARALLEL = """
static int count() {
  int n = 0;
#pragma omp parallel for reduction(+ : n)
  for (int i = 0; i < 1000; ++i) ++n;
  return n;
}
static const int n = count();
"""


def test_an_initialiser_may_use_openmp_after_the_program_has_used_it(checkout):
    checkout.put("many.cpp", PARALLEL + ANSWER.format("return n;"))
    script = """
import signal
signal.alarm(30)
torch.set_num_threads(2)
torch.rand(1_000_000).sin()
many = calcops_jit.load("many", "many.cpp", "-fopenmp", extra_ldflags="-fopenmp")
print(ctypes.CDLL(many.path).answer())
"""
    assert output(checkout, script) == ["1000"]


def test_an_initialiser_that_ends_the_process_is_refused_and_the_old_library_stays(checkout):
    """It throws, crashes or exits. A daemon that it leaves behind holds nobody up."""
    ends = [
        "throw 1",
        "*(volatile int*)0 = 1",
        "exit(3)",
        "if (fork() == 0) { sleep(30); _exit(0); }",
    ]
    script = f"""
tiny = load("tiny", "tiny.cpp")
first = tiny.path
text = Path("tiny.cpp").read_text()
for end in {ends[:3]!r}:
    Path("tiny.cpp").write_text(f"{{text}}struct Wrong {{{{ Wrong() {{{{ {{end}}; }}}} }}}} wrong;")
    print(error_of(calcops_jit.reload).splitlines()[0], tiny.path == first)
print([line for line in open("/proc/self/maps") if "deleted" in line and "tiny" in line])
Path("tiny.cpp").write_text(f"{{text}}struct Daemon {{{{ Daemon() {{{{ {{ {ends[3]!r} }} }}}} }}}} started;")
start = time.monotonic()
print(calcops_jit.reload(), time.monotonic() - start < 15)
"""
    includes = "#include <cstdlib>\n#include <unistd.h>\n"
    checkout.put("tiny.cpp", includes + ANSWER.format("return 1;"))
    *refused, maps, last = output(checkout, script)
    assert len(refused) == 3
    for line in refused:
        assert line.startswith("cannot load tiny: a static initialiser ends the process")
        assert line.endswith(" True")
    assert "SIGABRT" in refused[0]
    assert "SIGSEGV" in refused[1]
    assert (maps, last) == ("[]", "['tiny'] True")


def test_a_load_with_closed_or_no_free_descriptors_never_returns_another_library(checkout):
    for name, value in ("first", 1), ("second", 2):
        checkout.put(f"{name}.cpp", ANSWER.format(f"return {value};"))
    script = """
first = load("first", "first.cpp")
os.closerange(3, 256)  # as a daemon does
second = load("second", "second.cpp")
print([ctypes.CDLL(library.path).answer() for library in (first, second)])
descriptors = []
try:
    while True:
        descriptors.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    error = error_of(lambda: load("first", "first.cpp"))
    for fd in descriptors:
        os.close(fd)
print(error.splitlines()[0], "Too many open files" in error)
"""
    answers, error = output(checkout, script)
    assert answers == "[1, 2]"
    assert error.startswith("cannot ")
    assert error.endswith(" True")


def test_a_copy_of_sources_with_torch_library_is_not_compiled(checkout):
    """The macro contains the path of its file, as __FILE__, but the library does not."""
    source = """#include <torch/library.h>
TORCH_LIBRARY(copied, m) { m.def("f(int x) -> int", [](int64_t x) { return x + 1; }); }
"""
    for folder in "one", "two":
        checkout.put(f"{folder}/copied.cpp", source)
        checkout.compiled()
        assert output(checkout, f"print(load('copied', '{folder}/copied.cpp').f(1))") == ["2"]
    assert checkout.compiled() == 0


# ---- registration without the loader -------------------------------------------------------------

# Two ways to register that the loader cannot see before they happen.
DIRECT = """
#include <ATen/core/op_registration/op_registration.h>
#include <torch/csrc/stable/library.h>
int version();
static auto registry = c10::RegisterOperators().op(
    "direct::first() -> int", []() -> int64_t { return version(); });
void second(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = torch::stable::detail::from(int64_t(10 * version()));
}
STABLE_TORCH_LIBRARY(direct_stable, m) { m.def("second() -> int"); }
STABLE_TORCH_LIBRARY_IMPL(direct_stable, CompositeExplicitAutograd, m) { m.impl("second", &second); }
"""
DIRECT_SCRIPT = """
def write(version):
    Path("version.cpp").write_text(f"int version() {{ return {version}; }}")
def load_direct(name="direct"):
    return load(name, "direct.cpp", "version.cpp")
def call(library):
    return library.first(), library.second()
"""


def test_a_library_that_registers_without_the_loader_needs_a_restart_also_if_it_is_cached(checkout):
    checkout.put("direct.cpp", DIRECT)
    script = """
write(2)
direct = load_direct()
print(call(direct), direct.first is torch.ops.direct.first, direct.second.__doc__)
"""
    assert output(checkout, DIRECT_SCRIPT + script) == [
        "(2, 20) True direct_stable::second() -> int"
    ]
    script = """
write(1)
direct = load_direct()
for version in (2, 3):  # one that is cached, and a new one
    write(version)
    print(error_of(calcops_jit.reload))
    print(call(direct))
write(1)
print(calcops_jit.reload(), call(direct))
"""
    *lines, last = output(checkout, DIRECT_SCRIPT + script)
    assert "cannot load direct" in lines[0]
    assert sum("restart Python" in line for line in lines) == 2
    assert lines.count("(1, 10)") == 2
    assert last == "[] (1, 10)"


def test_an_operator_of_another_library_without_the_loader_is_an_error_also_if_it_is_cached(
    checkout,
):
    checkout.put("direct.cpp", DIRECT)
    load = "write(1)\nload_direct('another')\nprint('loaded')\n"
    script = "write(1)\ndirect = load_direct()\nprint(error_of(lambda: load_direct('another')))\n"
    for _ in "compiled", "cached":
        lines = output(checkout, DIRECT_SCRIPT + script + "print(call(direct))")
        assert re.match("cannot load another: .* register", "".join(lines))
        assert "frame #" not in "".join(lines)
        assert "restart Python" in lines[-2]
        assert lines[-1] == "(1, 10)"
        assert output(checkout, DIRECT_SCRIPT + load) == ["loaded"]


# The loader delays the operator, but not its kernel.
STABLE_KERNEL = """
#include <torch/csrc/stable/library.h>
#include <torch/library.h>
int version();
void kernel(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = torch::stable::detail::from(int64_t(version()));
}
TORCH_LIBRARY(half, m) { m.def("held() -> int"); }
STABLE_TORCH_LIBRARY_IMPL(half, CompositeExplicitAutograd, m) { m.impl("held", &kernel); }
"""


def test_a_kernel_that_is_registered_without_the_loader_needs_a_restart_too(checkout):
    checkout.put("half.cpp", STABLE_KERNEL)
    script = """
def write(version):
    Path("version.cpp").write_text(f"int version() {{ return {version}; }}")
write(2)
half = load("half", "half.cpp", "version.cpp")
write(1)
print("restart Python" in error_of(calcops_jit.reload), half.held())
"""
    assert output(checkout, script) == ["True 2"]


def test_operators_of_a_linked_library_are_not_those_of_the_library(checkout):
    """Otherwise a process that has loaded the linked library could not load the other one."""
    checkout.put("direct.cpp", DIRECT)
    checkout.put("mine.cpp", CONTRACT.format(name="twice", factor=2))
    script = """
write(1)
path = load_direct().path
os.symlink(path, "libdirect.so")
flags = ["-Wl,--no-as-needed", f"-L{os.getcwd()}", "-ldirect", f"-Wl,-rpath,{os.getcwd()}"]
if sys.argv[1:]:
    mine = calcops_jit.load("mine", "mine.cpp", extra_ldflags=flags)
    print(mine.twice(one).item(), list(mine.operators))
"""
    output(checkout, DIRECT_SCRIPT + script)
    (checkout.project / "libdirect.so").rename(checkout.project / "again.so")
    build = 'import sys; sys.argv.append("-")\n'
    script = script.replace("path = load_direct().path", 'path = "again.so"')
    alone = output(checkout, build + DIRECT_SCRIPT + script)
    (checkout.project / "libdirect.so").unlink()
    script = script.replace("write(1)", "write(1)\nload_direct()")
    assert alone == output(checkout, build + DIRECT_SCRIPT + script) == ["2.0 ['twice']"]


# ---- one name, other arguments -------------------------------------------------------------------


def test_other_flags_or_sources_make_another_library_unless_an_operator_has_the_same_name(checkout):
    first, second = (CONTRACT.format(name=f"scaled{head}", factor="FACTOR") for head in (1, 2))
    checkout.put("mine.cpp", f"#if HEAD == 1\n{first}\n#else\n{second}\n#endif\n")
    checkout.put("other.cpp", CONTRACT.format(name="other", factor=5))
    script = """
def load(source, head, factor):
    flags = [f"-DHEAD={head}", f"-DFACTOR={factor}"]
    return calcops_jit.load("mine", source, flags)
first, second = load("mine.cpp", 1, 10), load("mine.cpp", 2, 20)
other = load("other.cpp", 2, 20)
print(first is second, first.scaled1(one).item(), second.scaled2(one).item())
print(list(first.operators), list(second.operators), list(other.operators))
print(load("mine.cpp", 1, 10) is first, calcops_jit.reload())
print(error_of(lambda: load("mine.cpp", 2, 30)))
print(second.scaled2(one).item())
Path("mine.cpp").write_text(Path("mine.cpp").read_text().replace("FACTOR *", "-FACTOR *"))
print(calcops_jit.reload(), first.scaled1(one).item(), second.scaled2(one).item())
"""
    lines = output(checkout, script)
    assert lines[:3] == ["False 10.0 20.0", "['scaled1'] ['scaled2'] ['other']", "True []"]
    *error, old, last = lines[3:]
    assert "mine::scaled2" in error[0]
    assert "-DFACTOR=20" in error[1]
    assert "-DFACTOR=30" in error[1]
    assert "another name" in error[-1]
    assert old == "20.0"
    assert last == "['mine', 'mine'] -10.0 -20.0"


# ---- pickle --------------------------------------------------------------------------------------


def test_a_pickled_library_is_loaded_in_another_process(checkout):
    checkout.put("mine.cpp", CONTRACT.format(name="twice", factor=2))
    script = """
import pickle
mine = load("mine", "mine.cpp")
module = torch.nn.Module()
module.library = mine
module.handle = mine.twice
text = pickle.dumps((mine, module))
print(pickle.loads(text)[0] is mine)
Path("pickle").write_bytes(text)
"""
    assert output(checkout, script) == ["True"]
    script = """
import pickle
mine, module = pickle.loads(Path("pickle").read_bytes())
print(mine.twice(one).item(), module.library is mine, module.handle is torch.ops.mine.twice)
"""
    assert output(checkout, script) == ["2.0 True True"]
    (checkout.project / "mine.cpp").unlink()
    script = """
import pickle
mine, module = pickle.loads(Path("pickle").read_bytes())
print(error_of(lambda: mine.twice(one)))
print(error_of(lambda: module.handle(one)))
"""
    for line in output(checkout, script):
        assert "cannot unpickle mine" in line
        assert "mine.cpp" in line


def test_an_old_pickle_leaves_the_checks_of_a_loaded_library_as_they_are(checkout):
    checkout.put("mine.cpp", CONTRACT.format(name="twice", factor=2))
    script = """
import pickle
checked = calcops_jit.load("mine", "mine.cpp", check=True)
path = checked.path
text = pickle.dumps(checked.twice)
mine = calcops_jit.load("mine", "mine.cpp")
unchecked_path = mine.path
print(pickle.loads(text) is mine.twice, mine.path == unchecked_path, path == unchecked_path)
Path("mine.cpp").write_text(Path("mine.cpp").read_text().replace("2 *", "3 *"))
print(pickle.loads(text)(one).item())
"""
    assert output(checkout, script) == ["True True False", "3.0"]


def test_a_pickled_handle_is_loaded_in_another_process(checkout):
    checkout.put("mine.cpp", CONTRACT.format(name="twice", factor=2))
    script = """
import copy, pickle
handle = load("mine", "mine.cpp").twice
overload = handle.default
print(copy.copy(handle) is handle, pickle.loads(pickle.dumps(overload)) is overload)
Path("pickle").write_bytes(pickle.dumps((handle, overload, torch.ops.aten.add)))
"""
    assert output(checkout, script) == ["True True"]
    script = """
import pickle
handle, overload, add = pickle.loads(Path("pickle").read_bytes())
print(handle(one).item(), overload(one).item(), add is torch.ops.aten.add)
"""
    assert output(checkout, script) == ["2.0 2.0 True"]
    checkout.put("mine.cpp", CONTRACT.format(name="other", factor=2))
    script = """
import pickle
handle, overload, add = pickle.loads(Path("pickle").read_bytes())
print(error_of(lambda: handle(one)))
"""
    assert "cannot unpickle mine::twice" in output(checkout, script)[0]


# ---- what a library does to its process ----------------------------------------------------------


def test_a_library_that_is_linked_with_fast_math_keeps_denormal_numbers(checkout):
    checkout.put("mine.cpp", ANSWER.format("return 1;"))
    script = """
for flag in "-ffast-math", "-Ofast", "-funsafe-math-optimizations":
    calcops_jit.load("mine", "mine.cpp", extra_ldflags=[flag])
    print(5e-324 * float(one) > 0, (torch.tensor(1e-310, dtype=torch.float64) * one).item() > 0)
"""
    assert output(checkout, script) == ["True True"] * 3
