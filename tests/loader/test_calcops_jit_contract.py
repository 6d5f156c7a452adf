"""Operators that users write as a contract in text and plain functions (contracts/operators.cpp).
They behave like built-in operators, and a wrong contract is an error that names the line."""

import re
from pathlib import Path

import pytest
import torch
from reference import opcheck

import calcops_jit

SOURCE = Path(__file__).resolve().parent / "contracts" / "operators.cpp"
float64 = {"dtype": torch.float64}


@pytest.fixture(scope="module")
def mine():
    return calcops_jit.load("contracts", [SOURCE])


def test_a_source_with_a_contract_needs_no_header_of_pytorch(mine):
    assert not re.search(r"(torch|ATen|c10)/", SOURCE.read_text())
    assert torch.ops.contracts.gather_rows is mine.gather_rows


def test_each_dtype_calls_the_kernel_of_its_type(mine):
    r = torch.tensor([1.0, 2 ** (1 / 6)], **float64)
    for dtype in torch.float64, torch.float32:
        energy = mine.pair_energy(r.to(dtype), 2.0)
        assert energy.dtype == dtype
        torch.testing.assert_close(
            energy, torch.tensor([0.0, -2.0], dtype=dtype), rtol=0, atol=1e-6
        )
    with pytest.raises(
        RuntimeError, match="^contracts::pair_energy: expected `r` float32 or float64, got Int"
    ):
        mine.pair_energy(r.int(), 1.0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_linear_operator_has_derivatives_of_every_order(mine, dtype):
    x = torch.randn(4, 3, requires_grad=True, **float64)
    index = torch.tensor([1, 1, 3], dtype=dtype)

    def gather(x):
        return mine.gather_rows(x, index)

    assert torch.equal(gather(x), x[index])
    assert torch.autograd.gradcheck(gather, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: gather(x) ** 2, x, check_fwd_over_rev=True)
    opcheck(mine.gather_rows, (x, index), {})


def test_the_backward_of_an_operator_without_derivatives_is_refused(mine):
    step = mine.differences(torch.ones(2, requires_grad=True, **float64))
    with pytest.raises(
        RuntimeError, match="derivative for contracts::differences is not implemented"
    ):
        step.sum().backward()


def test_a_formula_gives_derivatives_of_every_order(mine):
    r = (torch.rand(6, **float64) + 1).requires_grad_()

    def energy(r):
        return mine.pair_energy(r, 0.7, 1.1)

    assert torch.autograd.gradcheck(energy, r, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(energy, r, check_fwd_over_rev=True)
    opcheck(mine.pair_energy, (r, 0.7), {})

    def reference(r):
        return 4 * 0.7 * ((1.1 / r) ** 12 - (1.1 / r) ** 6)

    def derivative(function):
        return torch.func.grad(lambda r: function(r).sum())

    actual, expected = energy, reference
    for _ in range(3):
        actual, expected = derivative(actual), derivative(expected)
        torch.testing.assert_close(actual(r), expected(r))
    mapped = torch.vmap(derivative(energy))(torch.stack([r, r + 1]))
    torch.testing.assert_close(mapped[1], derivative(reference)(r + 1))


def test_the_formula_of_the_readme_works_also_without_forward_mode(tmp_path):
    readme = (SOURCE.parents[3] / "contracts" / "README.md").read_text()
    blocks = re.findall(r"```c\+\+\n(.+?)```", readme, re.S)
    text = next(block for block in blocks if '"square"' in block)
    source = tmp_path / "square.cpp"
    source.write_text(text)
    square = calcops_jit.load("of_the_formula", [source]).square
    x = torch.randn(5, requires_grad=True, **float64)
    assert torch.autograd.gradcheck(square, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(square, x, check_fwd_over_rev=True)

    # Remove the derivative's second function, which is for forward mode.
    begin = text.index(",\n     [](const Value* arguments, const Value* tangents")
    end = text.index("}};")
    source.write_text(text[:begin] + text[end:])
    square = calcops_jit.load("of_half_a_formula", [source]).square
    assert torch.autograd.gradgradcheck(square, x)
    message = "of_half_a_formula::square: its derivative has no formula for forward"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(square, (x.detach(),), (x.detach(),))


def test_vmap_equals_calls_for_each_item_also_where_items_cannot_be_joined(mine):
    x, index = torch.randn(5, 4, 3), torch.tensor([1, 3])
    assert torch.equal(torch.vmap(lambda x: mine.gather_rows(x, index))(x), x[:, index])
    assert torch.equal(
        torch.vmap(mine.pair_energy, (0, None))(x[0], 1.0),
        mine.pair_energy(x[0].flatten(), 1.0).view(4, 3),
    )


def test_vmap_joins_items_with_a_shared_first_dimension_into_one_call(mine):
    """The graph has one call for all items. One call for each item would be five."""
    r = torch.rand(5, 7) + 1
    graph = torch.fx.experimental.proxy_tensor.make_fx(
        torch.vmap(lambda r: mine.pair_energy(r, 1.0))
    )(r)
    calls = [node for node in graph.graph.nodes if "pair_energy" in str(node.target)]
    assert len(calls) == 1
    assert torch.equal(graph(r), mine.pair_energy(r.flatten(), 1.0).view(5, 7))


def test_results_have_the_shapes_that_the_contract_states(mine):
    x = torch.arange(5.0, **float64) ** 2
    assert torch.equal(mine.differences(x), x.diff())
    mean, variance = mine.moments(x)
    torch.testing.assert_close((mean, variance), (x.mean(), x.var(unbiased=False)))
    assert mine.differences(x.to("meta")).shape == (4,)
    assert mine.differences(x[:1]).shape == (0,)
    with pytest.raises(
        RuntimeError, match=r"expected `x` large enough for a result \[N - 1\], got \[0\]"
    ):
        mine.differences(x[:0])
    opcheck(mine.moments, (x,), {})


def test_optional_tensors_and_lists_may_be_absent(mine):
    x = torch.arange(5.0, **float64)
    assert mine.weighted_total(x) == 10
    assert mine.weighted_total(x, weight=x, powers=[1, 2]) == 90
    with pytest.raises(RuntimeError, match=r"expected `weight` of shape \[N\] = \[5\], got \[4\]"):
        mine.weighted_total(x, weight=x[1:])


def test_entries_are_checked_before_the_kernel_runs(mine):
    with pytest.raises(
        RuntimeError, match="expected `index` entries 0 <= i < N = 4, got 7 at row 1$"
    ):
        mine.gather_rows(torch.ones(4, 2), torch.tensor([3, 7]))
    with pytest.raises(
        RuntimeError, match="expected `bin` entries 0 <= b < bins = 2, got -1 at item 0$"
    ):
        mine.histogram(torch.tensor([-1]), 2)
    with pytest.raises(RuntimeError, match="expected `bins` >= 0, got -1$"):
        mine.histogram(torch.tensor([0]), -1)
    assert mine.histogram(torch.tensor([0, 2, 2]), 4).tolist() == [1, 0, 2, 0]
    assert mine.order(torch.tensor([3, 1, 2])).tolist() == [1, 2, 0]


def test_a_kernel_receives_strides_and_strings(mine):
    x = torch.randn(3, 3, **float64)
    assert mine.diagonal_sum(x.T) == mine.diagonal_sum(x) == x.diagonal().sum()
    torch.testing.assert_close(mine.diagonal_sum(x, how="mean"), x.diagonal().mean())
    with pytest.raises(RuntimeError, match='expected `how` "sum" or "mean", got "maximum"'):
        mine.diagonal_sum(x, how="maximum")


def test_a_compiled_function_takes_sizes_as_symbols(mine):
    compiled = torch.compile(
        lambda x: mine.differences(x) * 2, fullgraph=True, dynamic=True, backend="eager"
    )
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    for size in 5, 9:
        x = torch.randn(size, **float64)
        assert torch.equal(compiled(x), x.diff() * 2)
    assert counters["unique_graphs"] == before + 1


def test_help_shows_the_contract(mine):
    expected = """\
contracts::gather_rows(Tensor x, Tensor index) -> Tensor

x       [N, C]; float32 or float64.
index   [M]; int32 or int64; entries 0 <= i < N at row.

Returns
rows    [M, C]; like x."""
    # The contract has no summary, which leaves an additional blank line.
    assert mine.gather_rows.__doc__.replace("\n\n\n", "\n\n") == expected


# The text of operators.cpp, the mistake that replaces it, and the message. The mistakes that need no
# kernel are in test_calcops_jit_contract_text.py.
MISTAKES = {
    "a clause that is not in the language": (
        "bins   0 to 2^40.",
        "bins   about 2^40.",
        "line 4: `bins`: expected a clause, or text that begins with a capital letter, got `about`",
    ),
    "a kernel that no contract names": (
        '"order", o',
        '"ordre", o',
        "a kernel of wrong::ordre, which no contract names",
    ),
    "a number type without a kernel": ("order<int32_t>, ", "", "no kernel of order for key int32"),
    "two kernels of the same types": (
        "order<int32_t>, ",
        "order<int32_t>, order<int32_t>, ",
        "two kernels of order take the same types",
    ),
    "a derivative of an unknown operator": (
        'kPairDerivatives[] = {\n    {"pair_energy",',
        'kPairDerivatives[] = {\n    {"pair_energies",',
        "a derivative of pair_energies, which no schema names",
    ),
    "an unused argument that the operator lacks": (
        "results[0] = tangents[0] * slope(arguments);\n     }}};",
        'results[0] = tangents[0] * slope(arguments);\n     }, "ordre"}};',
        "a derivative of pair_energy names `ordre`, which is no argument",
    ),
    "a view of another rank": (
        "View<const Key, 1> key, View<int64_t, 1> place) {",
        "View<const Key, 1> key, View<int64_t, 2> place) {",
        "expected 1 dimensions for the result `place`, got 2",
    ),
    "a workspace of a CPU kernel": (
        "View<const double, 1> x, View<double, 1> total) {",
        "View<const double, 1> x, View<double, 1> total, calcops::Workspace&) {",
        "a Workspace& is for CUDA kernels",
    ),
    "a double for an int": (
        "View<const int64_t, 1> bin, int64_t bins,",
        "View<const int64_t, 1> bin, double bins,",
        "expected int64_t for the SymInt `bins`, got double",
    ),
    "an operator in two contracts": (
        "histogram(Tensor bin, SymInt bins) -> Tensor\n",
        "order(Tensor bin, SymInt bins) -> Tensor\n",
        "order has another contract at",
    ),
    "shapes that no check sets": (
        "kScaledDerivatives, kScaledChecks);",
        "kScaledDerivatives);",
        "a Check of scaled must set the shape of `part`",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_contract_is_refused_and_its_line_is_named(mistake, tmp_path):
    correct, wrong, message = MISTAKES[mistake]
    text = SOURCE.read_text()
    assert text.count(correct) == 1
    source = tmp_path / "wrong.cpp"
    source.write_text(text.replace(correct, wrong))
    with pytest.raises(calcops_jit.BuildError) as error:
        calcops_jit.load("wrong", [source])
    assert message in str(error.value)


def test_the_notebook_cell_of_the_loaders_readme_builds_and_computes(tmp_path):
    readme = (Path(calcops_jit.__file__).parent / "_calcops_jit" / "README.md").read_text()
    cell = re.search(r"```c\+\+\n%%operator mine\n(.+?)```", readme, re.S)[1]
    source = tmp_path / "cell.cpp"
    source.write_text(cell)
    mine = calcops_jit.load("of_the_readme", [source])
    assert mine.twice(torch.tensor([1.0, 2.0])).tolist() == [2, 4]
