"""Live reload: a library is exchanged for a newer one in a running process, under every handle to
it."""

import re
import shutil
import subprocess

import pytest
from checkout import HERE, Checkout, the_zygote, wait_for

# Registration and arithmetic are units of their own: the one takes seconds to compile, the other a
# moment.
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

# What the scripts below share: edit(), and a plain call.
SCRIPT = r"""
import calcops_jit, contextlib, os, sys, threading, time, torch
from pathlib import Path
ops = Path(calcops_jit.__file__).parent / "ops"
one = torch.ones(1)
call = lambda: calcops_jit.scaled(one).item()
def edit(factor, file="scaled/factor.cpp"):
    (ops / file).write_text(f"double factor() {{ return {factor}; }}\n")
def refused():
    try:
        calcops_jit.reload()
    except calcops_jit.BuildError as error:
        return str(error)
    raise SystemExit("it was not refused")
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Checkout(the_zygote(), tmp_path_factory.mktemp("reload"))


@pytest.fixture
def reloading(shared):
    """A checkout with one operator, `scaled`; its registration is compiled once for all tests."""
    checkout = shared
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
packet, overload = calcops_jit.scaled, torch.ops.calcops.scaled.default
scripted = torch.jit.CompilationUnit("def f(x):\n  return torch.ops.calcops.scaled(x)\n").f
compiled = torch.compile(lambda x: torch.ops.calcops.scaled(x) + 1, backend="eager", fullgraph=True)
handles = lambda: [packet(one).item(), overload(one).item(), scripted(one).item(), compiled(one).item() - 1]
print(handles(), calcops_jit.reload())
first = calcops_jit.library_path()
edit(2)
print(calcops_jit.reload(), handles(), calcops_jit.library_path() != first)
edit(1)
print(calcops_jit.reload(), handles(), calcops_jit.library_path() == first)
edit(2)
print(calcops_jit.reload(), handles(), packet is torch.ops.calcops.scaled is calcops_jit.scaled)
"""
    child = reloading.run(SCRIPT + script)
    assert child.out.splitlines() == [
        "[1.0, 1.0, 1.0, 1.0] []",
        "['calcops'] [2.0, 2.0, 2.0, 2.0] True",
        "['calcops'] [1.0, 1.0, 1.0, 1.0] True",
        "['calcops'] [2.0, 2.0, 2.0, 2.0] True",
    ], child.err
    assert reloading.compiled() == 3  # both units, then the second once more
    assert "verriding" not in child.err


def test_a_failing_build_keeps_the_old_kernel_and_raises(reloading):
    script = r"""
(ops / "scaled/factor.cpp").write_text("double factor() { return }")
print(refused().splitlines()[0], call())
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
print(refused(), call(), sep="\n")
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


def test_a_kernel_that_is_gone_is_not_called_and_a_new_operator_is_there(reloading):
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


def test_what_load_loaded_is_reloaded_too(reloading, tmp_path):
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


def test_watch_reloads_on_save_and_survives_a_mistake(reloading, tmp_path):
    script = r"""
stop = calcops_jit.watch(0.05)
def until(factor):
    end = time.monotonic() + 30
    while call() != factor and time.monotonic() < end:
        time.sleep(0.02)
    print(call())
edit(2)
until(2)
edit("wrong")
while not os.path.exists("seen"):
    time.sleep(0.02)
edit(3)
until(3)
stop()
print([thread.name for thread in threading.enumerate()])
"""
    child = reloading.start(SCRIPT + script, cwd=tmp_path)
    wait_for(lambda: "fix: correct" in child.err, 60)
    (tmp_path / "seen").touch()
    assert child.wait().out.splitlines() == ["2.0", "3.0", "['MainThread']"], child.err
    assert child.err.count("calcops_jit: reloaded calcops\n") == 2


# A call that begins after reload() returned must use that generation or a newer one.
GENERATIONS = """
done, returned, wrong, calls = False, 1, [], [0] * 4
def work(thread):
    while not done:
        expected = returned
        if (got := calcops_jit.scaled(one).item()) < expected:
            wrong.append((expected, got))
        calls[thread] += 1
        time.sleep(0.001)  # or they keep the interpreter to themselves
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
for thread in threads:
    thread.start()
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096
start = time.perf_counter()
for generation in range(2, COUNT + 2):
    edit(generation)
    assert calcops_jit.reload() == ["calcops"]
    returned = generation
    if generation == 3:
        before = resident()
done = True
for thread in threads:
    thread.join()
size = os.path.getsize(calcops_jit.library_path())
print(wrong, min(calls) > 0, (resident() - before) / (COUNT - 2) - size)
print(f"{COUNT} generations, {sum(calls)} calls, {(time.perf_counter() - start) / COUNT:.2f} s each", file=sys.stderr)
"""


def generations(checkout, count: int) -> float:
    """Returns the bytes that a generation takes beyond the size of its library."""
    child = checkout.run(SCRIPT + GENERATIONS.replace("COUNT", str(count)))
    assert child.code == 0, child.err
    wrong, called, growth = re.fullmatch(r"(.*) (\w+) (-?[\d.e+-]+)\n", child.out).groups()
    print(child.err.splitlines()[-1])
    assert wrong == "[]"
    assert called == "True"
    return float(growth)


def test_five_generations_while_four_threads_call(reloading):
    generations(reloading, 5)


@pytest.mark.long
def test_200_generations_while_four_threads_call_and_memory_grows_by_the_libraries(reloading):
    beyond = generations(reloading, 200)
    print(f"memory per generation beyond its library: {beyond / 1024:.0f} KiB")
    assert beyond < 64 * 1024  # the records of a registration; the library is 224 KiB


def test_a_plain_dlopen_registers_at_once_and_a_second_library_of_the_namespace_does_no_harm(
    reloading,
):
    script = r"""
first = calcops_jit.library_path()
edit(2)
calcops_jit.reload()
print(first, calcops_jit.library_path(), sep="\n")
"""
    paths = output(reloading, script)
    assert len(set(paths)) == 2
    plain = "import torch\nfor path in (0, 1):\n  torch.ops.load_library(PATHS[path])\n" + (
        "  print(torch.ops.calcops.scaled(torch.ones(1)).item())\n"
    )
    child = reloading.run(plain.replace("PATHS", repr(paths)))
    assert (child.code, child.out) == (0, "1.0\n2.0\n"), child.err
    exported = subprocess.run(
        ["nm", "-DC", "--defined-only", paths[0]], capture_output=True, text=True
    ).stdout
    assert "calcops_jit_commit" in exported
    assert "torch::Library::_" not in exported


@pytest.mark.long
def test_a_graph_that_was_built_before_reaches_the_new_backward_kernel(checkout):
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
centre = force[:, 0].sum()  # the sum over all atoms is zero
(old,) = torch.autograd.grad(centre, dE, retain_graph=True)
kernels = ops / "force/force_backward_cpu.cpp"
text = kernels.read_text()
call = "matrix_times_column<4>(Ri_d + 12 * s, e, to_dE + 4 * s);"
assert call in text
kernels.write_text(text.replace(call, "{ " + call + " for (int c = 0; c < 4; ++c) to_dE[4 * s + c] *= -2; }"))
assert calcops_jit.reload() == ["calcops"]
(new,) = torch.autograd.grad(centre, dE)
print(old.abs().sum().item() > 0, torch.equal(new, -2 * old))
"""
    assert output(checkout, script) == ["True True"]
