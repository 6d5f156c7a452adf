"""Contracts at the limits of their language: many sizes, many parameters, and entries of a tensor
that lacks a dimension under vmap."""

import pytest
import torch

import calcops_jit

MANY = 40  # more than the 32 bits in which the runtime remembers sizes


def contract_of(text: str, kernels: str = "") -> str:
    return f"""
#include <calcops/operator.h>
using calcops::View;
const calcops::Contract contract(R"(
{text}
)");
{kernels}
"""


def refusal(source_text, folder) -> str:
    source = folder / "limits.cpp"
    source.write_text(source_text)
    with pytest.raises(calcops_jit.BuildError) as error:
        calcops_jit.load("limits", [source])
    return str(error.value)


def test_a_contract_of_too_many_sizes_is_refused_at_its_line(tmp_path):
    sizes = ", ".join(f"N{i}" for i in range(MANY))
    text = f"first(Tensor x) -> Tensor\nx  [{sizes}]; float64.\ny  [N0]; like x."
    assert "contract, line 3: more than 24 sizes" in refusal(contract_of(text), tmp_path)


def test_a_contract_of_too_many_lines_is_refused_at_its_line(tmp_path):
    arguments = ", ".join(f"Tensor x{i}" for i in range(MANY))
    lines = "\n".join(f"x{i}  [N]; float64." for i in range(MANY))
    text = f"first({arguments}) -> Tensor\n{lines}\ny  [N]; float64."
    assert "contract, line 27: more than 24 lines" in refusal(contract_of(text), tmp_path)


def test_a_kernel_of_too_many_parameters_is_refused(tmp_path):
    inputs = [f"x{i}" for i in range(18)]
    results = [f"y{i}" for i in range(6)]
    tensors = ", ".join(f"Tensor {name}" for name in inputs)
    upstream = ", ".join(f"Tensor grad_{name}" for name in results)
    types = "(" + ", ".join(["Tensor"] * 6) + ")"
    lines = "\n".join(f"{name}  [N]; float64." for name in inputs + results)
    terms = " + ".join(f"y{i}(x{i})" for i in range(6))
    text = f"""six({tensors}) -> {types}
_six_backward({upstream}, {tensors}, bool[6] output_mask) -> {types}
{lines}
linear  {terms}"""
    read = ", ".join(["View<const double, 1>"] * 18)
    read_upstream = ", ".join(["View<const double, 1>"] * 6)
    written = ", ".join(["View<double, 1>"] * 6)
    kernels = f"""
void six({read}, {written}) {{}}
void backward({read_upstream}, {read}, {written}) {{}}
const calcops::Kernel cpu("six", six);
const calcops::Kernel backward_cpu("_six_backward", backward);
"""
    message = "a kernel of _six_backward has 30 parameters, more than 24"
    assert message in refusal(contract_of(text, kernels), tmp_path)


PICKED = contract_of(
    """picked(Tensor table, Tensor index) -> Tensor
  Rows of a table.
table  [M, C]; float64.
index  [P or 1, N, K] or [N, K]; int64; entries 0 <= j < M at set, row, slot.
rows   [P, N, K, C] or [N, K, C]; like table.
vmap   joins N, M""",
    """
void picked(View<const double, 2> table, View<const int64_t, 3> index, View<double, 4> rows) {
  const auto [P, N, K, C] = rows.shape;
  for (int64_t i = 0; i < P * N * K; ++i)
    for (int64_t c = 0; c < C; ++c) rows.data[C * i + c] = table(index.data[i], c);
}
const calcops::Kernel cpu("picked", picked);
""",
)


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    source = tmp_path_factory.mktemp("picked") / "picked.cpp"
    source.write_text(PICKED)
    return calcops_jit.load("picked", [source])


@pytest.mark.parametrize("shape", [(3, 4), (1, 3, 4)])
def test_vmap_shifts_the_entries_of_a_tensor_that_lacks_a_dimension(mine, shape):
    tables = torch.randn(5, 7, 2, dtype=torch.float64)
    indices = torch.randint(7, (5, *shape))
    expected = [mine.picked(table, index) for table, index in zip(tables, indices)]
    assert torch.equal(torch.vmap(mine.picked)(tables, indices), torch.stack(expected))


def test_derivatives_call_an_operator_of_a_short_name(tmp_path):
    """C++ stores up to 15 characters of a string in the string itself, and not on the heap."""
    text = """f(Tensor x) -> Tensor
_f_backward(Tensor grad_y, Tensor x, bool[1] output_mask=[True]) -> Tensor
x  [N]; float64.
y  [N]; like x.
linear  y(x)"""
    kernels = """
void f(View<const double, 1> x, View<double, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = 2 * x(i);
}
void backward(View<const double, 1> grad_y, View<const double, 1>, View<double, 1> grad_x) {
  f(grad_y, grad_x);
}
const calcops::Kernel cpu("f", f);
const calcops::Kernel backward_cpu("_f_backward", backward);
"""
    source = tmp_path / "s.cpp"
    source.write_text(contract_of(text, kernels))
    s = calcops_jit.load("s", [source])
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(s.f, x)
