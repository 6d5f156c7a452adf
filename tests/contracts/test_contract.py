"""Operators that users write as a contract in text and plain functions (operators.cpp).
They behave like built-in operators, and a wrong contract is an error that names the line."""

import re
import time
from pathlib import Path

import pytest
import torch
from reference import opcheck

import calcops_jit

SOURCE = Path(__file__).resolve().parent / "operators.cpp"
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
        RuntimeError, match="^contracts::pair_energy: expected `r` float32 or float64, got int32"
    ):
        mine.pair_energy(r.int(), 1.0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_operator_and_its_backward_have_derivatives_of_every_order(mine, dtype):
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
    readme = (SOURCE.parents[2] / "contracts" / "README.md").read_text()
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
contracts::gather_rows(Tensor x, Tensor index) -> Tensor rows

x          [N, C]; float32 or float64.
index      [M]; int32 or int64; entries 0 <= i < N at row.

Returns
rows       [M, C]; like x."""
    # The contract has no summary, which leaves an additional blank line.
    assert mine.gather_rows.__doc__.replace("\n\n\n", "\n\n") == expected


# An operator in few lines, so that each of its mistakes compiles in a moment.
DOUBLED = """
#include <calcops/operator.h>
using namespace calcops;

const Contract contract(R"(
doubled(Tensor x) -> Tensor y
x  [N]; float32 or float64.
y  [N]; like x.
)");

template <class Real>
void doubled(View<const Real, 1> x, View<Real, 1> y) {
  for (int64_t i = 0; i < x.shape[0]; ++i) y(i) = 2 * x(i);
}
const Kernel cpu("doubled", doubled<float>, doubled<double>);
"""

# A text of this operator, the mistake that replaces it, and the message. The mistakes that need
# neither derivatives, checks nor another contract are in test_contract_text.py.
MISTAKES = {
    "a clause that is not in the language": (
        "[N]; like x.",
        "about N.",
        "wrong.cpp:14: contract: `y`: expected a clause, or text that begins with a capital letter, got `about`",
    ),
    "a kernel that no contract names": (
        '"doubled", doubled<float>',
        '"double", doubled<float>',
        "a kernel of wrong::double, which no contract names",
    ),
    "kernels without any contract": (
        DOUBLED[DOUBLED.index("const Contract") : DOUBLED.index("template")],
        "",
        "wrong.cpp:15: a kernel of wrong::doubled, which no contract names",
    ),
    "an operator without kernels": (
        "doubled(Tensor x) -> Tensor y\n",
        "doubled(Tensor x) -> Tensor y\nhalved(Tensor x) -> Tensor z\nz  [N]; like x.\n",
        'wrong.cpp:13: contract: no kernel of halved; add: const calcops::Kernel cpu("halved", function)',
    ),
    "kernels beside those of another operator": (
        "doubled(Tensor x) -> Tensor y\n",
        "doubled(Tensor x) -> Tensor y\nhalved(Tensor x) -> Tensor y\nkernels  doubled of halved\n",
        "doubled has kernels, and the line `kernels` gives it those of halved",
    ),
    "a dtype that no kernel takes": (
        "doubled<float>, ",
        "",
        "contract: no kernel of doubled on the CPU takes float32 `x`",
    ),
    "two dtypes that no kernel takes together": (
        "template <class Real>",
        """const Contract mixed("mixed(Tensor x, Tensor i) -> Tensor y\\n"
                     "x [N]; float32 or float64.\\ni [N]; int32 or int64.\\ny [N]; like x.");
template <class Real, class Integer>
void mix(View<const Real, 1>, View<const Integer, 1>, View<Real, 1>) {}
const Kernel mixed_cpu("mixed", mix<float, int32_t>, mix<double, int64_t>);
template <class Real>""",
        "no kernel of mixed on the CPU takes float32 `x` and int64 `i`",
    ),
    "float32 beside float16, which has a kernel of its own": (
        "template <class Real>",
        """struct Half {
  uint16_t bits;
};
template <>
struct calcops::TypeOf<Half> {
  static constexpr Type value = Type::kFloat16;
};
const Contract halves("half(Tensor x) -> Tensor y\\nx [N]; float16 or float32.\\ny [N]; like x.");
void half(View<const Half, 1>, View<Half, 1>) {}
const Kernel half_cpu("half", half);
template <class Real>""",
        "no kernel of half on the CPU takes float32 `x`",
    ),
    "kernels of an operator that has those of another one": (
        "doubled(Tensor x) -> Tensor y\n",
        "doubled(Tensor x) -> Tensor y\nhalved(Tensor x) -> Tensor y\nf(Tensor x) -> Tensor y\n"
        "kernels  f of halved; halved of doubled\n",
        "the kernels of halved are those of doubled; write `f of doubled`",
    ),
    "kernels that rely on a check which the other operator lacks": (
        'y  [N]; like x.\n)");',
        'y  [N]; like x.\nhalved(Tensor x) -> Tensor y\nkernels  halved of doubled\n)", check_of_doubled);',
        "wrong.cpp:15: contract: halved uses the kernels of doubled, so it needs a Check",
    ),
    "two kernels of the same types": (
        "doubled<float>, ",
        "doubled<float>, doubled<float>, ",
        "two kernels of doubled take the same types",
    ),
    "a derivative of an unknown operator": (
        ')");',
        ')", derivatives);',
        "a derivative of halved, which no schema names",
    ),
    "an unused argument that the operator lacks": (
        ')");',
        ')", unused);',
        "a derivative of doubled names `z`, which is no argument",
    ),
    "a float as the default of an int": (
        "doubled(Tensor x) -> Tensor y\n",
        "doubled(Tensor x, int k=.5) -> Tensor y\nk  >= 0.\n",
        "wrong.cpp:12: contract: `doubled`: the default of `k` is no int",
    ),
    "two checks of an operator": (')");', ')", checks);', "two checks of doubled"),
    "an operator in two contracts": (
        "template <class Real>",
        'const Contract again("doubled(Tensor x) -> Tensor y\\nx [N]; float64.\\ny [N]; float64.");\n'
        "template <class Real>",
        "wrong.cpp:17, line 1 of the text: contract: wrong::doubled has another contract at",
    ),
    "shapes that no check sets": (
        "[N]; like x.",
        "any shape; like x.",
        "a Check of doubled must set the shape of `y`",
    ),
    "shapes that no check examines": (
        "[N]; float32 or float64.\ny  [N];",
        "any shape; float32 or float64.\ny  [];",
        "a Check of doubled must examine the shape of `x`",
    ),
}
PARTS = """
void vjp(const Value*, const Value*, Value*) {}
void check(Value*, Value*) {}
const Derivative derivatives[] = {{"halved", vjp}};
const Derivative unused[] = {{"doubled", vjp, nullptr, "z"}};
const Check checks[] = {{"doubled", check}, {"doubled", check}}, check_of_doubled[] = {{"doubled", check}};
"""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_contract_is_refused_and_its_line_is_named(mistake, tmp_path_factory):
    correct, wrong, message = MISTAKES[mistake]
    assert DOUBLED.count(correct) == 1
    begin, contract = DOUBLED.split("\nconst Contract")
    text = f"{begin}{PARTS}\nconst Contract{contract}"
    source = tmp_path_factory.getbasetemp() / "wrong.cpp"
    source.write_text(text.replace(correct, wrong))
    with pytest.raises(calcops_jit.BuildError) as error:
        calcops_jit.load("wrong", [source])
    assert message in str(error.value)
    source.write_text(text)
    corrected = calcops_jit.load("wrong", [source])
    assert corrected.doubled(torch.ones(2)).tolist() == [2, 2]


STRUCTS = {
    "a struct in a struct": (
        "struct Q { In x; }; struct P { Q q; };",
        "a member of a kernel's struct is a parameter, not another struct",
    ),
    "a base": (
        "struct Q { In x; }; struct P : Q {};",
        "a member of a kernel's struct is a parameter, not another struct",
    ),
    "a private member": (
        "class P { public: In x; private: int64_t n; };",
        "a kernel's struct has public members",
    ),
    "a constructor": ("struct P { P() {} In x; };", "a kernel's struct has public members"),
    "a reference": ("struct P { const In& x; };", "a kernel's struct has public members"),
    "an int": ("struct P { In x; int n; };", "but no int"),
}


@pytest.mark.parametrize("kind", STRUCTS)
def test_a_struct_that_does_not_stand_for_parameters_is_an_error_of_the_compiler(kind, tmp_path):
    struct, message = STRUCTS[kind]
    source = tmp_path / "struct.cpp"
    begin = DOUBLED.partition("template <class Real>")[0].replace("float32 or float64", "float64")
    source.write_text(
        f"{begin}\nusing In = View<const double, 1>;\n{struct}\n"
        'void doubled(P p, View<double, 1> y) {}\nconst Kernel cpu("doubled", doubled);\n'
    )
    with pytest.raises(calcops_jit.BuildError, match=re.escape(message)):
        calcops_jit.load("struct", [source])


def test_a_library_whose_tensors_have_many_independent_dtypes_loads_quickly(tmp_path):
    names = [f"x{i}" for i in range(16)]
    arguments = ", ".join(f"Tensor {name}" for name in names)
    lines = "\n".join(f"{name}  []; float16, bfloat16 or float32." for name in names)
    source = tmp_path / "many.cpp"
    source.write_text(f"""#include <calcops/operator.h>
const calcops::Contract contract(R"(
many({arguments}) -> Tensor y
{lines}
y  []; like x0.
)");
using In = calcops::View<const float, 0>;
void many({", ".join(["In"] * 16)}, calcops::View<float, 0> y) {{ y() = 1; }}
const calcops::Kernel cpu("many", many);
""")
    begin = time.monotonic()
    many = calcops_jit.load("many", [source]).many
    assert time.monotonic() - begin < 30  # all combinations take minutes
    half, single = torch.tensor(0.0).half(), torch.tensor(0.0)
    assert many(half, *[single] * 15).dtype == torch.float16


@pytest.mark.parametrize(("name", "namespace"), [("my.op", "of_point"), ("my-op", "of_hyphen")])
def test_a_library_whose_name_is_no_namespace_needs_one_in_its_contract(name, namespace, tmp_path):
    source = tmp_path / "doubled.cpp"
    source.write_text(DOUBLED)
    message = "expected a namespace of letters, digits and _, got `my[.-]op`; rename the library"
    with pytest.raises(calcops_jit.BuildError, match=message):
        calcops_jit.load(name, [source])
    text = DOUBLED.replace("doubled(Tensor", f"{namespace}::doubled(Tensor")
    source.write_text(text.replace('"doubled"', f'"{namespace}::doubled"'))
    assert calcops_jit.load(name, [source]).doubled(torch.ones(2)).tolist() == [2, 2]


def test_the_notebook_cell_of_the_loaders_readme_builds_and_computes(tmp_path):
    readme = (Path(calcops_jit.__file__).parent / "_calcops_jit" / "README.md").read_text()
    cell = re.search(r"```c\+\+\n%%operator mine\n(.+?)```", readme, re.S)[1]
    source = tmp_path / "cell.cpp"
    source.write_text(cell)
    mine = calcops_jit.load("of_the_readme", [source])
    assert mine.twice(torch.tensor([1.0, 2.0])).tolist() == [2, 4]


def test_the_histogram_of_the_readme_counts(tmp_path):
    readme = (SOURCE.parents[2] / "contracts" / "README.md").read_text()
    contract = re.search(r"```text\n(histogram.+?)```", readme, re.S)[1]
    kernel = re.search(r"```c\+\+\n(template <class Index>.+?)```", readme, re.S)[1]
    source = tmp_path / "histogram.cpp"
    begin = "#include <calcops/operator.h>\nconst calcops::Contract contract"
    source.write_text(f'{begin}(R"(\n{contract})");\n{kernel}')
    histogram = calcops_jit.load("histogram_of_the_readme", source).histogram
    for dtype in torch.int32, torch.int64:
        bins = torch.tensor([0, 2, -1, 2], dtype=dtype)
        assert histogram(bins, 4).tolist() == [1, 0, 2, 0]
    with pytest.raises(RuntimeError, match="`bin` entries -1 or 0 <= b < bins = 2, got 2"):
        histogram(bins, 2)


WEIGHTED_SUM = """
void weighted_sum(View<const double, 2> x, View<const double, 2> weights, View<double, 1> sum) {
  for (int64_t i = 0; i < x.shape[0]; ++i) {
    sum(i) = 0;
    for (int64_t k = 0; k < x.shape[1]; ++k) sum(i) += weights(i, k) * x(i, k);
  }
}
void weighted_sum_backward(View<const double, 1> grad, View<const double, 2> x,
                           View<const double, 2> weights, View<double, 2> grad_x,
                           View<double, 2> grad_weights) {
  for (int64_t i = 0; i < x.shape[0]; ++i)
    for (int64_t k = 0; k < x.shape[1]; ++k) {
      if (grad_x) grad_x(i, k) = grad(i) * weights(i, k);
      if (grad_weights) grad_weights(i, k) = grad(i) * x(i, k);
    }
}
const Kernel kernels[] = {Kernel("weighted_sum", weighted_sum),
                          Kernel("_weighted_sum_backward", weighted_sum_backward)};
"""


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_the_gradient_by_a_second_operator_of_the_readme_is_right(wanted, tmp_path_factory):
    readme = (SOURCE.parents[2] / "contracts" / "README.md").read_text()
    contract = re.search(r"```text\n(weighted_sum.+?)```", readme, re.S)[1]
    contract = contract.replace("float32 or float64", "float64")
    formula = re.search(r"```c\+\+\n(\[\]\(const Value.+?)```", readme, re.S)[1]
    source = tmp_path_factory.getbasetemp() / "weighted_sum.cpp"
    source.write_text(
        "#include <calcops/operator.h>\nusing namespace calcops;\n"
        f'const Derivative derivatives[] = {{{{"weighted_sum", {formula}}}}};\n'
        f'const Contract contract(R"(\n{contract})", derivatives);\n{WEIGHTED_SUM}'
    )
    weighted_sum = calcops_jit.load("weighted_sum_of_the_readme", source).weighted_sum
    x, weights = (torch.randn(4, 3, **float64).requires_grad_(is_wanted) for is_wanted in wanted)
    assert torch.autograd.gradcheck(weighted_sum, (x, weights))
