"""reload and watch replace a library in a running process: all of it or nothing. Every handle then
calls the new one."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from checkout import ANSWER, CONTRACT, HERE, Checkout, wait_for

# The functions that the scripts below share. `call` calls the operator of the library `mine`.
SCRIPT = r"""
import calcops_jit, ctypes, os, sys, threading, time, torch
from pathlib import Path
source = Path("mine.cpp")
contract = source.read_text()
one = torch.ones(1, dtype=torch.float64)
mine = calcops_jit.load("mine", "mine.cpp", extra_cflags=["-O0"])
call = lambda: mine.scaled(one).item()
def edit(factor):
    source.write_text(contract.replace("1 * x(i)", f"{factor} * x(i)"))
def reload_error():
    try:
        calcops_jit.reload()
    except calcops_jit.BuildError as error:
        return str(error)
    raise SystemExit("no error")
"""


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path, has_runtime=True)


@pytest.fixture
def reloading(checkout):
    checkout.put("mine.cpp", CONTRACT.format(name="scaled", factor=1))
    return checkout


def output(checkout, script: str, **options) -> list[str]:
    options = {"cwd": checkout.project, "CALCOPS_BUILD": "0"} | options
    child = checkout.run(SCRIPT + script, **options)
    assert child.code == 0, child.err
    assert "verriding" not in child.err  # PyTorch's warning about a second registration
    return child.out.splitlines()


def test_every_handle_reaches_the_new_kernel_and_going_back_compiles_nothing(reloading):
    script = r"""
packet = mine.scaled
overload = torch.ops.mine.scaled.default
scripted = torch.jit.CompilationUnit("def f(x):\n  return torch.ops.mine.scaled(x)\n").f
compiled = torch.compile(lambda x: torch.ops.mine.scaled(x) * 1, backend="eager", fullgraph=True)
def results():
    return [handle(one).item() for handle in (packet, overload, scripted, compiled)]
print(results(), calcops_jit.reload())
first = mine.path
edit(2)
print(calcops_jit.reload(), results(), mine.path != first)
edit(1)
print(calcops_jit.reload(), results(), mine.path == first)
edit(2)
print(calcops_jit.reload(), results(), packet is torch.ops.mine.scaled is mine.scaled)
edit(3)
print(calcops_jit.load("mine", "mine.cpp", "-O0") is mine, results())
"""
    assert output(reloading, script) == [
        "[1.0, 1.0, 1.0, 1.0] []",
        "['mine'] [2.0, 2.0, 2.0, 2.0] True",
        "['mine'] [1.0, 1.0, 1.0, 1.0] True",
        "['mine'] [2.0, 2.0, 2.0, 2.0] True",
        "True [3.0, 3.0, 3.0, 3.0]",
    ]
    assert reloading.compiled() == 3


def test_an_operator_is_an_attribute_at_each_moment_of_a_reload(reloading):
    script = r"""
present = set()
def trace(frame, event, argument):
    present.add(hasattr(mine, "scaled") and hasattr(mine, "path"))
    return trace
edit(2)
sys.settrace(trace)
calcops_jit.reload()
sys.settrace(None)
print(present, call())
"""
    assert output(reloading, script) == ["{True} 2.0"]


def test_reload_exchanges_the_projects_operators_too(checkout):
    checkout.write("ops/tiny/tiny.cpp", CONTRACT.format(name="scaled", factor=1))
    script = f"""
import calcops_jit, torch
from pathlib import Path
one = torch.ones(1, dtype=torch.float64)
print(calcops_jit.scaled(one).item(), calcops_jit.scaled is torch.ops.calcops.scaled)
source = Path({str(checkout.path / "ops/tiny/tiny.cpp")!r})
source.write_text(source.read_text().replace("1 * x(i)", "2 * x(i)"))
print(calcops_jit.reload(), calcops_jit.scaled(one).item())
source.with_name("more.cpp").write_text(source.read_text().replace("scaled", "more"))
print(calcops_jit.reload(), calcops_jit.more(one).item(), "more" in dir(calcops_jit))
"""
    child = checkout.run(script)
    assert child.out == "1.0 True\n['calcops'] 2.0\n['calcops'] 2.0 True\n", child.err


def test_an_import_that_failed_is_repaired_by_reload(checkout):
    checkout.write("ops/tiny/tiny.cpp", "int f( {")
    script = f"""
import calcops_jit, ctypes
from pathlib import Path
Path({str(checkout.path / "ops/tiny/tiny.cpp")!r}).write_text(
    'extern "C" __attribute__((visibility("default"))) int answer() {{ return 3; }}')
print(calcops_jit.reload(), ctypes.CDLL(calcops_jit.library_path()).answer())
"""
    child = checkout.run(script)
    assert child.out == "['calcops'] 3\n", child.err


def test_a_failing_build_keeps_the_old_kernel_and_others_are_exchanged(reloading):
    reloading.put("other.cpp", CONTRACT.format(name="other", factor=1))
    script = r"""
other = calcops_jit.load("other", "other.cpp")
text = Path("other.cpp").read_text()
source.write_text(contract.replace("1 * x(i)", "1 * x(i"))
Path("other.cpp").write_text(text.replace("1 * x(i)", "4 * x(i)"))
print(reload_error().splitlines()[0], call(), other.other(one).item())
edit(3)
print(calcops_jit.reload(), call())
source.unlink()
print(calcops_jit.reload(), call())
"""
    failed, repaired, gone = output(reloading, script)
    line = reloading.project.joinpath("mine.cpp").name
    assert re.search(rf"cannot build mine: .*{line}:\d+:\d+ 1.0 4.0$", failed)
    assert repaired == "['mine'] 3.0"
    assert gone == "[] 3.0"


def test_a_library_stays_if_its_sources_are_gone(checkout):
    checkout.put("temporary/first.cpp", "int one() { return 1; }\n")
    checkout.put("mine.cpp", ANSWER.format("return 1;"))
    script = """
import calcops_jit, shutil
first = calcops_jit.load("first", "temporary/first.cpp")
mine = calcops_jit.load("mine", "mine.cpp")
shutil.rmtree("temporary")
with open("mine.cpp", "a") as source:
    source.write("// edited")
print(calcops_jit.reload(), calcops_jit.reload())
"""
    child = checkout.run(script, cwd=checkout.project, CALCOPS_BUILD="0")
    assert child.out == "['mine'] []\n", child.err


def test_a_changed_schema_is_refused_with_the_difference_and_nothing_is_exchanged(reloading):
    """The library has two operators, of which only the second one changes its schema."""
    first = CONTRACT.format(name="scaled", factor=1)
    second = CONTRACT.format(name="second", factor=1).partition("operator.h>")[2]
    second = second.replace("cpu(", "second_cpu(").replace("contract(", "second_contract(")
    changed = (
        second.replace("Tensor x", "Tensor z").replace("x [N]", "z [N]").replace("like x", "like z")
    )
    reloading.put("mine.cpp", first + second)
    reloading.put("changed.cpp", first.replace("1 * x", "2 * x") + changed)
    script = r"""
edit(5)
calcops_jit.reload()
source.write_text(Path("changed.cpp").read_text())
print(reload_error(), call(), sep="\n")
edit(3)
print(calcops_jit.reload(), call())
"""
    *error, last, again = output(reloading, script)
    text = "\n".join(error)
    assert error[0].startswith("cannot reload mine"), text
    for words in "- mine::second(Tensor x)", "+ mine::second(Tensor z)":
        assert text.count(words) == 1, text  # and not once for each earlier version
    assert "restart Python" in error[-1]
    assert (last, again) == ("5.0", "['mine'] 3.0")


def test_an_operator_that_is_gone_is_an_error_until_it_returns(reloading):
    both = """
#include <calcops/operator.h>
const calcops::Contract contract(R"(
scaled(Tensor x) -> Tensor y
old(Tensor x) -> Tensor y
x [N]; float64.
y [N]; like x.
)");
void scaled(calcops::View<const double, 1>, calcops::View<double, 1> y) { y(0) = FACTOR; }
const calcops::Kernel cpu("scaled", scaled), cpu_old("old", scaled);
"""
    without = both.replace("old(Tensor x) -> Tensor y\n", "").replace(
        ', cpu_old("old", scaled)', ""
    )
    reloading.put("both.cpp", both)
    reloading.put("without.cpp", without)
    script = r"""
def use(name, factor):
    source.write_text(Path(name).read_text().replace("FACTOR", str(factor)))
    return calcops_jit.reload()
def error_of(function):
    try:
        function()
    except (AttributeError, RuntimeError) as error:
        return str(error)
use("both.cpp", 1)
old, overload = mine.old, torch.ops.mine.old.default
compiled = torch.compile(lambda x: torch.ops.mine.old(x), backend="eager")
print(old(one).item(), overload(one).item(), compiled(one).item())
for factor in 2, 3:
    print(use("without.cpp", factor), call(), sorted(mine.operators), hasattr(mine, "old"))
    print(error_of(lambda: mine.old).splitlines()[0].replace(mine.path, "..."))
    Path("other.cpp").write_text("#include <calcops/operator.h>\n")
    calcops_jit.load(f"other{factor}", "other.cpp")
    print(error_of(lambda: mine.nosuch).splitlines()[0].replace(mine.path, "..."))
    for call_old in (old, overload, compiled, torch.func.vmap(old)):
        for x in (one, one.to("meta"), one.clone().requires_grad_()):
            message = error_of(lambda: call_old(x.expand(1, 1)))
            assert "mine::old" in message, message
for name, factor in (("both.cpp", 1), ("without.cpp", 2), ("both.cpp", 4)):
    use(name, factor)
print(old(one).item(), mine.old is old, overload(one).item(), compiled(one).item())
text = Path("both.cpp").read_text().replace("FACTOR", "5")
source.write_text(text.replace("old(Tensor x)", "old(Tensor z)").replace("x [N]", "x [N]; float64.\nz [N]"))
print(reload_error().splitlines()[0])
"""
    lines = output(reloading, script)
    gone = ["no operator `old` in ...", "no operator `nosuch` in ..."]
    assert lines == [
        "1.0 1.0 1.0",
        "['mine'] 2.0 ['scaled'] False",
        *gone,
        "['mine'] 3.0 ['scaled'] False",
        *gone,
        "4.0 True 4.0 4.0",
        "cannot reload mine: a schema changed, so nothing was exchanged",
    ]


# It takes seconds to compile, because of PyTorch's headers. So the test edits the version, which is
# in a source of its own.
REGISTRATION = """
#include <ATen/core/Tensor.h>
#include <torch/library.h>
int version();
namespace {
at::Tensor scaled(const at::Tensor& x) { return x.mul(version()); }
at::Tensor by_value(at::Tensor x) { return x.mul(100); }
}  // namespace
TORCH_LIBRARY(registered, m) {
  m.set_python_module("somebody.registrations");
  m.def("scaled(Tensor x) -> Tensor");
  if (version() == 1) return;
  m.def("other() -> int", []() -> int64_t { return 7; });
  m.def("scaled.by(Tensor x, int n) -> Tensor", [](at::Tensor x, int64_t n) { return x.mul(n); });
}
TORCH_LIBRARY_IMPL(registered, CPU, m) {
  if (version() < 3) m.impl("scaled", TORCH_FN(scaled));
  else m.impl("scaled", TORCH_FN(by_value));
}
TORCH_LIBRARY_IMPL(registered, Meta, m) {
  if (version() == 1) m.impl("registered::scaled", TORCH_FN(scaled));
}
"""


def test_torch_library_kernels_are_exchanged_retired_and_refused(reloading):
    """A kernel that is gone is not called, a new operator or overload is callable, and another C++
    signature is refused."""
    reloading.put("registration.cpp", REGISTRATION)
    reloading.put("version.cpp", "int version() { return 1; }\n")
    script = r"""
sources = ["registration.cpp", "version.cpp"]
mine = calcops_jit.load("registered", sources, "-O0 -DAT_PER_OPERATOR_HEADERS")
meta = torch.ones(2, device="meta", dtype=torch.float64)
print(call(), mine.scaled(meta).shape, hasattr(mine, "other"))
version = Path("version.cpp")
version.write_text("int version() { return 2; }")
handle = mine.scaled
print(calcops_jit.reload(), call(), mine.other(), handle(one, 9).item(), handle.overloads())
compiled = torch.compile(lambda x: handle(x, 8), backend="eager", fullgraph=True)
scripted = torch.jit.CompilationUnit("def f(x):\n  return torch.ops.registered.scaled(x, 6)\n").f
print(compiled(one).item(), scripted(one).item(), mine.scaled is handle)
try:
    mine.scaled(meta)
except NotImplementedError as error:
    print("somebody.registrations" in str(error), mine.path in torch.ops.loaded_libraries)
version.write_text("int version() { return 3; }")
print(reload_error(), call(), sep="\n")
version.write_text("int version() { return 1; }")
calcops_jit.reload()
for gone in (lambda: torch.ops.registered.other(), lambda: handle(one, 9)):
    try:
        gone()
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""
    lines = output(reloading, script)
    first, second, of_overload, third, *error, last, gone, gone_overload = lines
    assert first == "1.0 torch.Size([2]) False"
    assert second == "['registered'] 2.0 7 9.0 ['default', 'by']"
    assert of_overload == "8.0 6.0 True"
    assert third == "True True"
    text = "\n".join(error)
    assert text.startswith("cannot register registered, nothing was exchanged")
    for words in "registered::scaled", "at::Tensor (at::Tensor const&)", "at::Tensor (at::Tensor)":
        assert words in text
    assert last == "2.0"
    assert "registered::other" in gone
    assert "registered::scaled.by" in gone_overload


def test_sources_without_a_common_folder_and_behind_a_link_are_followed(checkout, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "value.cpp").write_text("int value() { return 1; }\n")
    for release in 1, 2:
        checkout.put(f"release{release}/factor.h", f"#define FACTOR {release}\n")
        text = '#include "factor.h"\nint value();\n'
        text += ANSWER.format("return value() * FACTOR;")
        checkout.put(f"release{release}/mine.cpp", text)
    (checkout.project / "current").symlink_to("release1")
    script = f"""
import calcops_jit, ctypes, os, shutil
other = {str(elsewhere / "value.cpp")!r}
library = calcops_jit.load("mine", ["current/mine.cpp", other])
answer = lambda: ctypes.CDLL(library.path).answer()
print(answer())
open(other, "w").write("int value() {{ return 5; }}")
print(calcops_jit.reload(), answer())
os.symlink("release2", "new")
os.rename("new", "current")
shutil.rmtree("release1")
print(calcops_jit.reload(), answer())
"""
    child = checkout.run(script, cwd=checkout.project, CALCOPS_BUILD="0")
    assert child.out == "1\n['mine'] 5\n['mine'] 10\n", child.err


HELPER = """
import subprocess
def build_helper(value):
    Path("helper.c").write_text(f"int helper() {{ return {value}; }}")
    command = "gcc -shared -fPIC helper.c -o libhelper.so.new && mv libhelper.so.new libhelper.so"
    subprocess.run(command, shell=True, check=True)
def load_with_helper(name):
    flags = [f"-L{os.getcwd()}", "-lhelper", f"-Wl,-rpath,{os.getcwd()}"]
    return calcops_jit.load(name, "helped.cpp", extra_ldflags=flags)
"""
CALLS_HELPER = (
    'extern "C" int helper();\n'
    + CONTRACT.format(name="helped", factor="helper()")
    + 'extern "C" __attribute__((visibility("default"))) int helper2() { return 2 * helper(); }\n'
)


def test_a_linked_shared_library_that_was_built_again_needs_a_restart(reloading):
    reloading.put("helped.cpp", CALLS_HELPER)
    script = r"""
build_helper(1)
helped = load_with_helper("helped")
print(helped.helped(one).item())
build_helper(2)
print(reload_error(), helped.helped(one).item(), sep="\n")
"""
    first, *error, last = output(reloading, HELPER + script)
    assert (first, last) == ("1.0", "1.0")
    assert "libhelper.so" in error[0]
    assert "restart Python" in error[-1]
    again = script.partition("build_helper(2)")[0].replace("build_helper(1)", "")
    assert output(reloading, HELPER + again) == ["2.0"]


def test_a_linked_shared_library_of_a_name_that_is_loaded_already_is_an_error(reloading):
    for folder in "one", "two":
        reloading.put(f"{folder}/helped.cpp", CALLS_HELPER.replace("helped", folder))
    script = r"""
def load(name):
    os.chdir(name)
    build_helper(len(os.listdir("..")))
    library = load_with_helper(name)
    os.chdir("..")
    return library
first = load("one")
try:
    load("two")
except calcops_jit.BuildError as error:
    print("two/libhelper.so" in str(error), "restart Python" in str(error))
"""
    assert output(reloading, HELPER + script) == ["True True"]


@pytest.mark.parametrize("flag", ["helped.path", "helped"])
def test_a_library_that_is_linked_with_another_one_follows_it(reloading, flag):
    text = 'extern "C" __attribute__((visibility("default"))) int helper() { return 1; }\n'
    reloading.put("helped.cpp", CONTRACT.format(name="helped", factor="1") + text)
    reloading.put("user.cpp", CALLS_HELPER.replace("helped", "used"))
    script = rf"""
def load():
    helped = calcops_jit.load("helped", "helped.cpp")
    return helped, calcops_jit.load("user", "user.cpp", extra_ldflags=[{flag}])
helped, user = load()
print(user.used(one).item())
text = Path("helped.cpp").read_text()
for value in 2, 3:
    Path("helped.cpp").write_text(text.replace("return 1", f"return {{value}}"))
    if value == 2:
        print(calcops_jit.reload())
    print(load() == (helped, user), user.used(one).item())
"""
    assert output(reloading, script) == ["1.0", "['helped', 'user']", "True 2.0", "True 3.0"]


# ---- watch ---------------------------------------------------------------------------------------


def test_watch_reloads_on_save_and_survives_errors_of_any_kind(reloading):
    script = r"""
stop = calcops_jit.watch(0.05)
def wait_for_factor(factor):
    end = time.monotonic() + 60
    while call() != factor and time.monotonic() < end:
        time.sleep(0.02)
    print(call())
def wait_for_file(name):
    while not os.path.exists(name):
        time.sleep(0.02)
edit(2)
wait_for_factor(2)
edit("wrong")
wait_for_file("a compile error is printed")
compiler = os.environ["CXX"]
os.environ["CXX"] = "g++ '"
edit(3)
wait_for_file("another error is printed")
os.environ["CXX"] = compiler
edit(4)
wait_for_factor(4)
stop()
print([thread.name for thread in threading.enumerate()])
"""
    child = reloading.start(SCRIPT + script, cwd=reloading.project, CALCOPS_BUILD="0")
    wait_for(lambda: "fix: correct" in child.err)
    (reloading.project / "a compile error is printed").touch()
    wait_for(lambda: "No closing quotation" in child.err)
    (reloading.project / "another error is printed").touch()
    assert child.wait().out.splitlines() == ["2.0", "4.0", "['MainThread']"], child.err
    assert child.err.count("reloaded mine") == 2
    assert "Traceback" not in child.err


def test_watch_sees_a_link_to_another_release(checkout):
    for release in 1, 2:
        checkout.put(f"release{release}/mine.cpp", ANSWER.format(f"return {release};"))
    (checkout.project / "current").symlink_to("release1")
    script = """
import calcops_jit, ctypes, os, time
mine = calcops_jit.load("mine", "current/mine.cpp")
stop = calcops_jit.watch(0.05)
time.sleep(0.5)
os.symlink("release2", "new")
os.rename("new", "current")
end = time.monotonic() + 20
while ctypes.CDLL(mine.path).answer() != 2 and time.monotonic() < end:
    time.sleep(0.02)
print(ctypes.CDLL(mine.path).answer())
stop()
"""
    child = checkout.run(script, cwd=checkout.project, CALCOPS_BUILD="0")
    assert child.out == "2\n", child.err


@pytest.mark.parametrize("header", ["new.h", "../include/new.h"])
def test_watch_sees_a_header_that_is_created_after_the_build_that_includes_it(reloading, header):
    reloading.put("inner/other.h", "")
    reloading.put("include/other.h", "")
    name = header.removeprefix("../include/")
    script = SCRIPT.replace('calcops_jit.load("mine", "mine.cpp", extra_cflags=["-O0"])', "None")
    script += rf"""
mine = calcops_jit.load("mine", "mine.cpp", "-O0", extra_include_paths="include")
stop = calcops_jit.watch(0.05)
source.write_text('#include "{name}"\n' + contract.replace("1 * x(i)", "NEW * x(i)"))
while not os.path.exists("an error is printed"):
    time.sleep(0.02)
Path("{header.removeprefix("../")}").write_text("#define NEW 2")
end = time.monotonic() + 60
while call() != 2 and time.monotonic() < end:
    time.sleep(0.02)
print(call())
stop()
"""
    child = reloading.start(script, cwd=reloading.project, CALCOPS_BUILD="0")
    wait_for(lambda: "a header is missing" in child.err)
    (reloading.project / "an error is printed").touch()
    assert child.wait().out == "2.0\n", child.err


# ---- threads, memory, other hosts ----------------------------------------------------------------

# A call that begins after reload() returned must use that generation or a newer one.
GENERATIONS = """
is_finished = False
newest = 1
errors = []
calls = [0] * 4
def work(thread):
    while not is_finished:
        expected = newest
        result = mine.scaled(one).item()
        if result < expected:
            errors.append((expected, result))
        calls[thread] += 1
        time.sleep(0.001)  # lets the main thread run
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
for thread in threads:
    thread.start()
def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
for generation in range(2, COUNT + 2):
    edit(generation)
    assert calcops_jit.reload() == ["mine"]
    newest = generation
    if generation == 3:
        before = resident_bytes()
is_finished = True
for thread in threads:
    thread.join()
growth = (resident_bytes() - before) / (COUNT - 2)
print(errors, min(calls) > 0, growth - os.path.getsize(mine.path))
"""


def generations(checkout, count: int) -> float:
    """Return the memory that a generation takes beyond the size of its library, in bytes."""
    (line,) = output(checkout, GENERATIONS.replace("COUNT", str(count)))
    errors, every_thread_called, growth = re.fullmatch(r"(.*) (\w+) (-?[\d.e+-]+)", line).groups()
    assert (errors, every_thread_called) == ("[]", "True")
    return float(growth)


def test_calls_of_four_threads_reach_the_newest_kernel_during_five_reloads(reloading):
    generations(reloading, 5)


@pytest.mark.long
def test_memory_grows_by_the_libraries_alone_during_200_reloads(reloading):
    beyond = generations(reloading, 200)
    print(f"memory per generation beyond its library: {beyond / 1024:.0f} KiB")
    assert beyond < 64 * 1024  # the records of a registration take memory, too


def test_torch_loads_two_libraries_of_one_namespace_without_the_loader(reloading):
    script = r"""
first = mine.path
edit(2)
calcops_jit.reload()
print(first, mine.path, sep="\n")
"""
    paths = output(reloading, script)
    assert len(set(paths)) == 2
    script = f"""
import torch
for path in {paths!r}:
    torch.ops.load_library(path)
    print(torch.ops.mine.scaled(torch.ones(1, dtype=torch.float64)).item())
"""
    child = reloading.run(script)
    assert (child.code, child.out) == (0, "1.0\n2.0\n"), child.err
    # PyTorch's own registrations must not land in the library.
    command = ["nm", "-DC", "--defined-only", paths[0]]
    exported = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert exported
    assert "torch::Library::_" not in exported


@pytest.mark.long
def test_the_backward_of_an_older_graph_calls_the_new_kernel(checkout):
    shutil.rmtree(checkout.path / "ops")
    for header in (HERE / "ops").glob("*.h"):
        checkout.write(f"ops/{header.name}", header.read_text())
    shutil.copytree(HERE / "ops" / "force", checkout.path / "ops" / "force")
    kernels = Path(checkout.path, "ops/force/force_backward_cpu.cpp")
    script = rf"""
import calcops_jit, torch
from pathlib import Path
list_neigh = torch.tensor([[[0, 1, -1, 0]]])
torch.manual_seed(0)
dE = torch.rand(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
Ri_d = torch.rand(1, 1, 16, 3, dtype=torch.float64)
force = calcops_jit.force(list_neigh, dE, Ri_d, 1)
centre = force[:, 0].sum()  # one atom, because the sum over all atoms is zero
(old,) = torch.autograd.grad(centre, dE, retain_graph=True)
kernels = Path({str(kernels)!r})
text = kernels.read_text()
call = "matrix_times_column<4>(Ri_d + 12 * s, e, to_dE + 4 * s);"
assert call in text
scale = "for (int c = 0; c < 4; ++c) to_dE[4 * s + c] *= -2;"
kernels.write_text(text.replace(call, "{{ " + call + " " + scale + " }}"))
assert calcops_jit.reload() == ["calcops"]
(new,) = torch.autograd.grad(centre, dE)
print(old.abs().sum().item() > 0, torch.equal(new, -2 * old))
"""
    child = checkout.run(script)
    assert child.out == "True True\n", child.err
