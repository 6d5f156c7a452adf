"""reload and watch replace a library in a running process. Every handle then calls the new one."""

import re
import shutil
import subprocess

import pytest
from checkout import HERE, Checkout, the_zygote, wait_for

# The registration takes seconds to compile, so it is a unit of its own. Tests edit the unit with
# the factor, which takes a moment.
REGISTRATION = """
#include <ATen/core/Tensor.h>
#include <torch/library.h>

double factor();

namespace {
at::Tensor scaled(const at::Tensor& x) { return x.mul(factor()); }
int64_t one(int64_t x) { return x; }
void define(torch::Library& m) {
  m.def("scaled(Tensor x) -> Tensor");
  m.def("_same(int x) -> int", &one);
}
}  // namespace

TORCH_LIBRARY(calcops, m) { define(m); }
TORCH_LIBRARY_IMPL(calcops, CPU, m) { m.impl("scaled", TORCH_FN(scaled)); }
TORCH_LIBRARY_IMPL(calcops, Meta, m) { m.impl("calcops::scaled", TORCH_FN(scaled)); }
"""
FACTOR = "double factor() {{ return {}; }}\n"

# The functions that the scripts below share.
SCRIPT = r"""
import calcops_jit, contextlib, os, sys, threading, time, torch
from pathlib import Path
ops = Path(calcops_jit.__file__).parent / "ops"
one = torch.ones(1)
call = lambda: calcops_jit.scaled(one).item()
def edit(factor, file="scaled/factor.cpp"):
    (ops / file).write_text(f"double factor() {{ return {factor}; }}\n")
def reload_error():
    try:
        calcops_jit.reload()
    except calcops_jit.BuildError as error:
        return str(error)
    raise SystemExit("no error")
"""


@pytest.fixture(scope="module")
def shared_checkout(tmp_path_factory):
    return Checkout(the_zygote(), tmp_path_factory.mktemp("reload"))


@pytest.fixture
def reloading(shared_checkout):
    """Return a checkout with the operator `scaled`. All tests share its compiled registration."""
    checkout = shared_checkout
    shutil.rmtree(checkout.path / "ops")
    checkout.write("ops/scaled/scaled.cpp", REGISTRATION)
    checkout.write("ops/scaled/factor.cpp", FACTOR.format(1))
    return checkout


def output(checkout, script: str, **options) -> list[str]:
    child = checkout.run(SCRIPT + script, **options)
    assert child.code == 0, child.err
    return child.out.splitlines()


def test_every_handle_reaches_the_new_kernel_and_going_back_compiles_nothing(reloading):
    script = r"""
packet = calcops_jit.scaled
overload = torch.ops.calcops.scaled.default
scripted = torch.jit.CompilationUnit("def f(x):\n  return torch.ops.calcops.scaled(x)\n").f
compiled = torch.compile(lambda x: torch.ops.calcops.scaled(x) * 1, backend="eager", fullgraph=True)
def results():
    return [handle(one).item() for handle in (packet, overload, scripted, compiled)]
print(results(), calcops_jit.reload())
first = calcops_jit.library_path()
edit(2)
print(calcops_jit.reload(), results(), calcops_jit.library_path() != first)
edit(1)
print(calcops_jit.reload(), results(), calcops_jit.library_path() == first)
edit(2)
print(calcops_jit.reload(), results(), packet is torch.ops.calcops.scaled is calcops_jit.scaled)
"""
    child = reloading.run(SCRIPT + script)
    assert child.out.splitlines() == [
        "[1.0, 1.0, 1.0, 1.0] []",
        "['calcops'] [2.0, 2.0, 2.0, 2.0] True",
        "['calcops'] [1.0, 1.0, 1.0, 1.0] True",
        "['calcops'] [2.0, 2.0, 2.0, 2.0] True",
    ], child.err
    assert reloading.compiled() == 3  # both units, and the second unit again
    assert "verriding" not in child.err  # PyTorch's warning about a second registration


def test_a_failing_build_keeps_the_old_kernel_and_raises(reloading):
    script = r"""
(ops / "scaled/factor.cpp").write_text("double factor() { return }")
print(reload_error().splitlines()[0], call())
edit(3)
print(calcops_jit.reload(), call())
"""
    source = reloading.path / "ops/scaled/factor.cpp"
    assert output(reloading, script) == [
        f"cannot build calcops: error at {source}:1:26 1.0",
        "['calcops'] 3.0",
    ]


def test_changed_schemas_and_signatures_are_refused_and_nothing_is_exchanged(reloading):
    script = r"""
edit(2)
source = ops / "scaled/scaled.cpp"
text = source.read_text().replace("scaled(Tensor x)", "scaled(Tensor x, *, int times=1)")
source.write_text(text.replace("const at::Tensor& x", "at::Tensor x"))
print(reload_error(), call(), sep="\n")
"""
    assert output(reloading, script) == [
        "cannot reload calcops: a signature changed, so nothing was exchanged",
        "  calcops::scaled",
        "    + *",
        "    + int times=1",
        "  calcops::scaled in C++",
        "    - at::Tensor const&",
        "    + at::Tensor",
        "  fix: restart Python, or give the operator another name",
        "1.0",
    ]


def test_a_kernel_that_is_gone_is_not_called_and_a_new_operator_is_callable(reloading):
    script = r"""
meta = torch.ones(2, device="meta")
print(calcops_jit.scaled(meta).shape, hasattr(calcops_jit, "other"))
source = ops / "scaled/scaled.cpp"
text = source.read_text().replace('m.impl("calcops::scaled", TORCH_FN(scaled));', "")
other = 'm.def("other() -> int", []() -> int64_t { return 7; });'
source.write_text(text.replace('m.def("_same', other + 'm.def("_same'))
edit(2)
print(calcops_jit.reload(), call(), calcops_jit.other())
try:
    calcops_jit.scaled(meta)
except NotImplementedError:
    print("no Meta kernel")
"""
    assert output(reloading, script) == [
        "torch.Size([2]) False",
        "['calcops'] 2.0 7",
        "no Meta kernel",
    ]


def test_reload_includes_libraries_of_load(reloading, tmp_path):
    (tmp_path / "mine.cpp").write_text(REGISTRATION.replace("calcops", "mine"))
    (tmp_path / "factor.cpp").write_text(FACTOR.format(5))
    script = rf"""
sources = [{str(tmp_path / "mine.cpp")!r}, {str(tmp_path / "factor.cpp")!r}]
mine = calcops_jit.load("mine", sources)
before = mine.scaled(one).item()
edit(6, sources[1])
print(before, calcops_jit.reload(), mine.scaled(one).item(), torch.ops.mine.scaled(one).item())
edit(7, sources[1])
print(calcops_jit.load("mine", sources) is mine, mine.scaled(one).item())
"""
    assert output(reloading, script, CALCOPS_BUILD="0") == ["5.0 ['mine'] 6.0 6.0", "True 7.0"]


def test_watch_reloads_on_save_and_survives_a_compile_error(reloading, tmp_path):
    script = r"""
stop = calcops_jit.watch(0.05)
def wait_for_factor(factor):
    end = time.monotonic() + 30
    while call() != factor and time.monotonic() < end:
        time.sleep(0.02)
    print(call())
edit(2)
wait_for_factor(2)
edit("wrong")
while not os.path.exists("error_is_printed"):
    time.sleep(0.02)
edit(3)
wait_for_factor(3)
stop()
print([thread.name for thread in threading.enumerate()])
"""
    child = reloading.start(SCRIPT + script, cwd=tmp_path)
    wait_for(lambda: "fix: correct" in child.err, 60)
    (tmp_path / "error_is_printed").touch()
    assert child.wait().out.splitlines() == ["2.0", "3.0", "['MainThread']"], child.err
    assert child.err.count("calcops_jit: reloaded calcops\n") == 2


# A call that begins after reload() returned must use that generation or a newer one.
GENERATIONS = """
is_finished = False
newest = 1
errors = []
calls = [0] * 4
def work(thread):
    while not is_finished:
        expected = newest
        result = calcops_jit.scaled(one).item()
        if result < expected:
            errors.append((expected, result))
        calls[thread] += 1
        time.sleep(0.001)  # lets the main thread run
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
for thread in threads:
    thread.start()
def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
start = time.perf_counter()
for generation in range(2, COUNT + 2):
    edit(generation)
    assert calcops_jit.reload() == ["calcops"]
    newest = generation
    if generation == 3:
        before = resident_bytes()
is_finished = True
for thread in threads:
    thread.join()
size = os.path.getsize(calcops_jit.library_path())
print(errors, min(calls) > 0, (resident_bytes() - before) / (COUNT - 2) - size)
seconds = (time.perf_counter() - start) / COUNT
print(f"{COUNT} generations, {sum(calls)} calls, {seconds:.2f} s each", file=sys.stderr)
"""


def generations(checkout, count: int) -> float:
    """Return the memory that a generation takes beyond the size of its library, in bytes."""
    child = checkout.run(SCRIPT + GENERATIONS.replace("COUNT", str(count)))
    assert child.code == 0, child.err
    errors, every_thread_called, growth = re.fullmatch(
        r"(.*) (\w+) (-?[\d.e+-]+)\n", child.out
    ).groups()
    print(child.err.splitlines()[-1])
    assert errors == "[]"
    assert every_thread_called == "True"
    return float(growth)


def test_calls_of_four_threads_reach_the_newest_kernel_during_five_reloads(reloading):
    generations(reloading, 5)


@pytest.mark.long
def test_memory_grows_by_the_libraries_alone_during_200_reloads(reloading):
    beyond = generations(reloading, 200)
    print(f"memory per generation beyond its library: {beyond / 1024:.0f} KiB")
    # The records of a registration take memory, too. The library has 224 KiB.
    assert beyond < 64 * 1024


def test_torch_loads_two_libraries_of_one_namespace_without_the_loader(reloading):
    script = r"""
first = calcops_jit.library_path()
edit(2)
calcops_jit.reload()
print(first, calcops_jit.library_path(), sep="\n")
"""
    paths = output(reloading, script)
    assert len(set(paths)) == 2
    script = f"""
import torch
for path in {paths!r}:
    torch.ops.load_library(path)
    print(torch.ops.calcops.scaled(torch.ones(1)).item())
"""
    child = reloading.run(script)
    assert (child.code, child.out) == (0, "1.0\n2.0\n"), child.err
    command = ["nm", "-DC", "--defined-only", paths[0]]
    exported = subprocess.run(command, capture_output=True, text=True).stdout
    assert "calcops_jit_commit" in exported
    assert "torch::Library::_" not in exported


@pytest.mark.long
def test_the_backward_of_an_older_graph_calls_the_new_kernel(checkout):
    shutil.rmtree(checkout.path / "ops")
    for header in (HERE / "ops").glob("*.h"):
        checkout.write(f"ops/{header.name}", header.read_text())
    shutil.copytree(HERE / "ops" / "force", checkout.path / "ops" / "force")
    script = r"""
list_neigh = torch.tensor([[[0, 1, -1, 0]]])
torch.manual_seed(0)
dE = torch.rand(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
Ri_d = torch.rand(1, 1, 16, 3, dtype=torch.float64)
force = calcops_jit.force(list_neigh, dE, Ri_d, 1)
centre = force[:, 0].sum()  # one atom, because the sum over all atoms is zero
(old,) = torch.autograd.grad(centre, dE, retain_graph=True)
kernels = ops / "force/force_backward_cpu.cpp"
text = kernels.read_text()
call = "matrix_times_column<4>(Ri_d + 12 * s, e, to_dE + 4 * s);"
assert call in text
scale = "for (int c = 0; c < 4; ++c) to_dE[4 * s + c] *= -2;"
kernels.write_text(text.replace(call, "{ " + call + " " + scale + " }"))
assert calcops_jit.reload() == ["calcops"]
(new,) = torch.autograd.grad(centre, dE)
print(old.abs().sum().item() > 0, torch.equal(new, -2 * old))
"""
    assert output(checkout, script) == ["True True"]
