"""torch.compile and FakeTensorMode never use what they have traced of an operator's old code.

A trace contains derivative formulas, compositions, shapes and dtypes. PyTorch keeps traces in a
process and in caches on disk, and knows an operator only by its name.
"""

import pytest
from checkout import Checkout

# The gradient is 2 VERSION x.
FORMULA = r"""
#include <calcops/operator.h>
#include "version.h"
using calcops::Value;
const calcops::Derivative derivatives[] = {
    {"energy", [](const Value* arguments, const Value* upstream, Value* gradients) {
       gradients[0] = upstream[0] * arguments[0] * (2.0 * VERSION);
     }}};
const calcops::Contract contract(R"(
energy(Tensor x) -> Tensor y
x  [N]; float64.
y  [N]; like x.
)", derivatives);
void energy(calcops::View<const double, 1> x, calcops::View<double, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = VERSION * x(i) * x(i);
}
const calcops::Kernel kernel("energy", energy);
"""
# It takes seconds to compile. So the test edits version.cpp.
REGISTRATION = r"""
#include <ATen/Operators.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
int version();
namespace {
struct Function : torch::autograd::Function<Function> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return at::_ops::clone::call(x, std::nullopt);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list upstream) {
    return {at::_ops::mul_Scalar::call(upstream[0], version())};
  }
};
at::Tensor function(const at::Tensor& x) { return at::_ops::clone::call(x, std::nullopt); }
at::Tensor with_gradient(const at::Tensor& x) { return Function::apply(x); }
at::Tensor composed(const at::Tensor& x) { return at::_ops::mul_Scalar::call(x, version()); }
at::Tensor shaped(const at::Tensor& x) {
  const auto type = version() == 1 ? at::kFloat : at::kDouble;
  return at::_ops::new_ones::call(x, {version()}, type, {}, {}, {});
}
}  // namespace
TORCH_LIBRARY(traced, m) {
  m.def("function(Tensor x) -> Tensor");
  m.def("shaped(Tensor x) -> Tensor");
  m.def("composed(Tensor x) -> Tensor", composed);
  m.def("switched(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(traced, CompositeImplicitAutograd, m) {
  if (version() == 1) m.impl("switched", composed);
}
TORCH_LIBRARY_IMPL(traced, CPU, m) {
  m.impl("function", function);
  m.impl("shaped", shaped);
  if (version() > 1) m.impl("switched", shaped);
}
TORCH_LIBRARY_IMPL(traced, Meta, m) {
  m.impl("function", function);
  m.impl("shaped", shaped);
  if (version() > 1) m.impl("switched", shaped);
}
TORCH_LIBRARY_IMPL(traced, Autograd, m) { m.impl("function", with_gradient); }
"""
SCRIPT = """
import sys, torch, calcops_jit
backend, *edit = sys.argv[1:]
if backend == "inductor":  # no kernels for g++ to compile
    import torch._inductor.config

    if hasattr(torch._inductor.config, "fallback_by_default"):  # PyTorch 2.11
        torch._inductor.config.fallback_by_default = True
flags = "-O0 -DAT_PER_OPERATOR_HEADERS"
traced = calcops_jit.load("traced", ["{shared}/registration.cpp", "version.cpp"], flags)
mine = calcops_jit.load("mine", "energy.cpp", "-O0")
x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)

def function(x):
    return mine.energy(x), traced.function(x), traced.composed(x), traced.shaped(x)

def results(function):
    *results, shaped = function(x)
    gradients = [torch.autograd.grad(result, x, retain_graph=True)[0].item() for result in results]
    return [result.item() for result in results], gradients, shaped.shape, shaped.dtype

def write(version):
    open("version.h", "w").write(f"#define VERSION {{version}}")
    open("version.cpp", "w").write(f"int version() {{{{ return {{version}}; }}}}")

def check():
    assert results(compiled) == results(function), (results(compiled), results(function))
    print(int(results(function)[1][0]))

compiled = torch.compile(function, backend=backend, fullgraph=True)
check()
for version in edit:
    earlier = compiled(x)
    write(version)
    assert calcops_jit.reload() == ["traced", "mine"]
    check()
    torch.autograd.grad(sum(earlier[:3]), x)  # a graph of the earlier code still has a backward
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a checkout with two projects that have the same names and different versions."""
    checkout = Checkout(tmp_path_factory.mktemp("compile"), has_runtime=True)
    checkout.put("shared/registration.cpp", REGISTRATION)
    return checkout


def outputs(checkout, backend, project, *edit):
    """Return the gradients of the energy in one process: at first, and after each edit."""
    cwd = checkout.project / f"{project}_{backend}"
    variables = {"CALCOPS_BUILD": "0"}
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(checkout.project / f"compiled_{backend}")
    script = SCRIPT.format(shared=checkout.project / "shared")
    child = checkout.run(script, arguments=(backend, *edit), cwd=cwd, **variables)
    assert child.code == 0, child.err
    return child.out.split()


def put_project(checkout, name, version):
    checkout.put(f"{name}/energy.cpp", FORMULA)
    checkout.put(f"{name}/version.h", f"#define VERSION {version}\n")
    checkout.put(f"{name}/version.cpp", f"int version() {{ return {version}; }}\n")


def test_compiled_code_is_traced_again_after_an_edit(checkout):
    put_project(checkout, "first_aot_eager", 1)
    assert outputs(checkout, "aot_eager", "first", "2", "3") == ["6", "12", "18"]


def test_compiled_code_on_disk_belongs_to_the_code_of_the_operators(checkout):
    put_project(checkout, "first_inductor", 1)
    put_project(checkout, "second_inductor", 5)
    assert outputs(checkout, "inductor", "first", "2") == ["6", "12"]
    assert outputs(checkout, "inductor", "first") == ["12"]  # in a new process
    assert outputs(checkout, "inductor", "second") == ["30"]  # of the same names


def test_the_users_tag_of_the_compile_caches_is_kept_and_every_thread_has_the_loaders(checkout):
    checkout.put("tag/mine.cpp", "int mine;\n")
    script = """
import calcops_jit, threading, torch
config = torch.compiler.config
print(config.cache_key_tag)
calcops_jit.load("mine", "mine.cpp")
tag = config.cache_key_tag
tags = []
thread = threading.Thread(target=lambda: tags.append(config.cache_key_tag))
thread.start()
thread.join()
with config.patch(cache_key_tag="user's"):
    tags.append(config.cache_key_tag)
config.cache_key_tag = "other"
config.cache_key_tag = config.cache_key_tag  # as who saves and restores it
tags.append(config.cache_key_tag)
print(tags == [tag, f"user's{tag}", f"other{tag}"], len(tag) > 30)
open("mine.cpp", "w").write("int other;")
calcops_jit.reload()
print(config.cache_key_tag not in tags)
"""
    child = checkout.run(script, cwd=checkout.project / "tag", CALCOPS_BUILD="0")
    assert child.out.splitlines() == ["", "True True", "True"], child.err


def test_a_library_is_exchanged_while_another_thread_imports_inductor(checkout):
    put_project(checkout, "imported", 1)
    script = """
import os, sys, torch, types, calcops_jit
mine = calcops_jit.load("mine", "energy.cpp", "-O0")
x = torch.ones(2, dtype=torch.float64)
print(mine.energy.default(x).dtype)
name = "torch._inductor.decomposition"
sys.modules[name] = types.ModuleType(name)  # as it is at the beginning of the import
open("version.h", "w").write("#define VERSION 2")
print(calcops_jit.reload())
"""
    child = checkout.run(script, cwd=checkout.project / "imported", CALCOPS_BUILD="0")
    assert child.out.splitlines() == ["torch.float64", "['mine']"], child.err


def test_watch_resets_the_compiler_in_the_main_thread_between_calls(checkout):
    put_project(checkout, "watched", 1)
    script = """
import os, time, torch, calcops_jit
mine = calcops_jit.load("mine", "energy.cpp", "-O0")
compiled = torch.compile(lambda x: mine.energy(x) + 1, backend="aot_eager", dynamic=True)

def gradient(count):
    x = torch.full((count,), 3.0, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(compiled(x).sum(), x)[0][0].item()

stop = calcops_jit.watch(0.05)
for version in range(2, 8):
    open("version.h~", "w").write(f"#define VERSION {version}")
    os.rename("version.h~", "version.h")
    end = time.monotonic() + 60
    while set(map(gradient, range(2, 7))) != {6 * version} and time.monotonic() < end:
        pass  # sizes that are compiled after the edit are right before the others
    print(*set(map(gradient, range(2, 7))))
stop()
"""
    child = checkout.run(script, cwd=checkout.project / "watched", CALCOPS_BUILD="0")
    assert child.out.splitlines() == [f"{6.0 * version}" for version in range(2, 8)], child.err


def test_a_build_during_a_compilation_does_not_wait_for_a_reset_of_the_compiler(checkout):
    """Its child is forked from a thread, and has the pending reset and a lock of its parent."""
    put_project(checkout, "pending", 1)
    checkout.put("pending/other.cpp", "int other;\n")
    script = """
import threading, torch._dynamo, calcops_jit
calcops_jit.load("mine", "energy.cpp", "-O0")

def work():
    open("version.h", "w").write("#define VERSION 2")
    print(calcops_jit.reload())
    calcops_jit.load("other", "other.cpp")
    print("loaded")

thread = threading.Thread(target=work, daemon=True)
with torch._dynamo.convert_frame.compile_lock:
    thread.start()
    thread.join(60)
"""
    child = checkout.run(script, cwd=checkout.project / "pending", CALCOPS_BUILD="0")
    assert child.out.splitlines() == ["['mine']", "loaded"], child.err


KERNELS_OF_ANOTHER = r"""
#include <ATen/Operators.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
namespace {
struct Tenfold : torch::autograd::Function<Tenfold> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return at::_ops::mul_Scalar::call(x.detach(), 10);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list upstream) {
    return {at::_ops::mul_Scalar::call(upstream[0], 10)};
  }
};
at::Tensor tenfold(const at::Tensor& x) { return Tenfold::apply(x); }
}  // namespace
TORCH_LIBRARY_IMPL(traced, AutogradCPU, m) { m.impl("switched", tenfold); }
"""


def test_kernels_that_another_library_adds_are_traced(checkout):
    put_project(checkout, "extended", 1)
    checkout.put("extended/more.cpp", KERNELS_OF_ANOTHER)
    script = f"""
import torch, calcops_jit
flags = "-O0 -DAT_PER_OPERATOR_HEADERS"
sources = ["{checkout.project}/shared/registration.cpp", "version.cpp"]
traced = calcops_jit.load("traced", sources, flags)
compiled = torch.compile(lambda x: traced.switched(x) + 1, backend="aot_eager")
x = torch.ones(1, requires_grad=True)

def results(function):
    (gradient,) = torch.autograd.grad(function(x), x)
    return function(x).item(), gradient.item()

print(*results(compiled))
calcops_jit.load("more", "more.cpp", flags)
print(*results(compiled))
print(results(lambda x: traced.switched(x) + 1) == results(compiled))
"""
    child = checkout.run(script, cwd=checkout.project / "extended", CALCOPS_BUILD="0")
    assert child.out.splitlines() == ["2.0 1.0", "11.0 10.0", "True"], child.err


def test_a_composition_that_became_a_kernel_is_traced_as_a_kernel(checkout):
    script = f"""
import torch, calcops_jit
from torch.fx.experimental.proxy_tensor import make_fx
sources = ["{checkout.project}/shared/registration.cpp", "version.cpp"]
traced = calcops_jit.load("traced", sources, "-O0 -DAT_PER_OPERATOR_HEADERS")

def targets():
    graph = make_fx(traced.switched, tracing_mode="symbolic")(torch.ones(1)).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]

for version in (1, 2, 1):
    open("version.cpp", "w").write(f"int version() {{{{ return {{version}}; }}}}")
    calcops_jit.reload()
    print(*targets(), traced.switched(torch.ones(1, device="meta")).shape[0])
"""
    # The child has inductor's table of compositions.
    script = script.replace("import torch,", "import torch._inductor.decomposition, torch,")
    script = script.replace(
        "    print(",
        """\
    if version == 2:
        compiled = torch.compile(traced.switched, fullgraph=True)
        assert compiled(torch.ones(1)).shape == (2,)
    print(""",
    )
    checkout.put("switched/version.cpp", "int version() { return 1; }\n")
    child = checkout.run(script, cwd=checkout.project / "switched", CALCOPS_BUILD="0")
    lines = ["aten.mul.Scalar 1", "traced.switched.default 2", "aten.mul.Scalar 1"]
    assert child.out.splitlines() == lines, child.err
