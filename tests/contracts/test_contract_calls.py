"""Calls of the operators of operators.cpp: what is checked, what vmap and derivatives do by
default, and the values of compositions."""

from pathlib import Path

import calcops.ops
import pytest
import torch
from programs import blocks
from reference import opcheck
from torch.func import jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import calcops_jit

SOURCE = Path(__file__).resolve().parent / "operators.cpp"
float64 = {"dtype": torch.float64}


@pytest.fixture(scope="module")
def mine():
    return calcops_jit.load("contracts", [SOURCE])


# ---- sizes, dtypes and entries -------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_size_below_64_bits_never_wraps(mine, device):
    x = torch.arange(8.0, device=device, **float64)
    assert mine.trimmed(x, 3, 2).shape == (3,)
    for before, after in ((2**63 - 1, 2**63 - 1), (2**62 + 1, 2**62 + 1)):
        with pytest.raises(RuntimeError, match="trimmed: expected `.*` "):
            mine.trimmed(x, before, after)


def test_a_result_like_an_absent_tensor_comes_from_the_kernel_of_its_dtype(mine):
    assert mine.numbers(torch.tensor([300.0, 7e4], **float64)).tolist() == [300, 70000]


def test_an_error_quotes_at_most_eight_entries_of_a_position(mine):
    pairs = torch.zeros(1000, 2, dtype=torch.int64)
    pairs[:, 1] = 9
    with pytest.raises(RuntimeError, match=r"got \((9, ){8}\.\.\.\) at slot 1$"):
        mine.rows(torch.ones(3, **float64), pairs)


@pytest.mark.parametrize("shape", [(5, 4, 3), (5, 3, 4)])
def test_vmap_joins_only_the_shape_that_a_kernel_sees(mine, shape):
    x = torch.randn(shape, **float64)
    expected = torch.stack([mine.norms(item) for item in x])
    torch.testing.assert_close(vmap(mine.norms)(x), expected)


@pytest.mark.parametrize("shape", [(2, 6), (2, 3, 2)])
def test_vmap_joins_no_size_that_is_a_part_of_another(mine, shape):
    z, table = torch.randn(4, 3, **float64), torch.ones(shape, **float64)
    assert torch.equal(vmap(mine.split, (0, None))(z, table), z * 6)


# ---- numbers that may be absent ------------------------------------------------------------------


def test_a_kernel_receives_an_absent_number_as_a_null_pointer(mine):
    x = torch.tensor([-3.0, 0.0, 9.0], **float64)
    assert mine.clipped(x).tolist() == [-3, 0, 9]
    assert mine.clipped(x, -1.5).tolist() == [-1.5, 0, 9]
    assert mine.clipped(x, most=4).tolist() == [-3, 0, 4]
    assert mine.clipped(x, -0.0, 0).tolist() == [0, 0, 0]
    assert vmap(lambda x: mine.clipped(x, most=4))(x).tolist() == [-3, 0, 4]
    opcheck(mine.clipped, (x, None, 4), {})
    for arguments, message in [
        (dict(least=-100.0), "`least` > -100, got -100"),
        (dict(most=101), "`most` of at most 100, got 101"),
    ]:
        with pytest.raises(RuntimeError, match=f"contracts::clipped: expected {message}"):
            mine.clipped(x, **arguments)


# ---- leading dimensions --------------------------------------------------------------------------

OF_ANY_RANK = {
    "one dimension": torch.randn(5, **float64),
    "three dimensions": torch.randn(2, 5, 3, **float64),
    "ten dimensions": torch.randn([1, 2] * 5, **float64),
    "a scalar": torch.randn((), **float64),
    "no elements": torch.randn(2, 0, 3, **float64),
    "a transposed tensor": torch.randn(4, 3, **float64).T,
    "an expanded tensor": torch.randn(3, 1, **float64).expand(3, 4),
    "a tensor with gaps": torch.randn(4, 6, **float64)[:, ::2],
}


@pytest.mark.parametrize("case", OF_ANY_RANK)
def test_leading_dimensions_are_one_dimension_of_the_kernel(mine, case):
    x = OF_ANY_RANK[case]
    assert torch.equal(mine.squared(x), x * x)
    assert torch.equal(mine.plus(x), x + 1)
    assert torch.equal(mine.plus(x, x.clone()), x + x)
    assert mine.squared(x.to("meta")).shape == x.shape
    if x.dim() > 0:
        row = x[..., :4]
        torch.testing.assert_close(mine.row_lengths(row), row.norm(dim=-1))
    if x.dim() > 1:
        torch.testing.assert_close(mine.columns(x), x.sum(-2))


def test_the_error_of_an_entry_counts_each_leading_dimension(mine):
    values, place = torch.randn(5, **float64), torch.randint(5, (2, 3, 4))
    assert torch.equal(mine.taken(values, place), values[place])
    place[1, 2, 3] = 5
    with pytest.raises(
        RuntimeError, match="`place` entries 0 <= j < N = 5, got 5 at dimension 0 1, item 2, slot 3"
    ):
        mine.taken(values, place)


def test_other_leading_dimensions_are_refused(mine):
    def message(function, *shapes):
        with pytest.raises(RuntimeError) as error:
            function(*(torch.ones(shape, **float64) for shape in shapes))
        return str(error.value).partition(": ")[2]

    of_shape = "expected `shift` of shape [...] ="
    assert message(mine.plus, (2, 5), (2, 4)) == f"{of_shape} [2, 5], got [2, 4]"
    assert message(mine.plus, (2, 5), (10,)) == f"{of_shape} [2, 5], got [10]"
    assert message(mine.plus, (), (1,)) == f"{of_shape} [], got [1]"
    assert message(mine.row_lengths, ()) == "expected `row` of shape [..., K], got []"
    assert message(mine.row_lengths, (2, 5)) == "expected `row` with K <= 4, got [2, 5]"
    assert message(mine.columns, (3,)) == "expected `image` of shape [..., H, W], got [3]"


def test_derivatives_compile_and_export_take_leading_dimensions(mine):
    x = torch.randn(2, 3, requires_grad=True, **float64)
    assert torch.autograd.gradcheck(mine.squared, x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(mine.squared, x)
    opcheck(mine.squared, (x,), {})
    opcheck(mine.row_lengths, (torch.randn(2, 2, 3, **float64),), {})

    class Model(torch.nn.Module):
        def forward(self, x):
            return mine.plus(mine.squared(x), x)

    compiled = torch.compile(Model(), fullgraph=True, dynamic=True, backend="eager")
    sizes = {0: torch.export.Dim("rows")}
    program = torch.export.export(Model(), (x.detach(),), dynamic_shapes=(sizes,)).module()
    for rows in 4, 7:
        x = torch.randn(rows, 3, **float64)
        assert torch.equal(compiled(x), x * x + x)
        assert torch.equal(program(x), x * x + x)


@pytest.mark.parametrize("name", ["squared", "row_lengths", "plus"])
def test_vmap_joins_leading_dimensions_to_one_call(mine, name):
    function = getattr(mine, name)
    x = torch.randn(5, 2, 3, **float64)
    for dimension in 0, 1:
        actual = vmap(function, dimension)(x)
        assert torch.equal(actual, torch.stack([function(item) for item in x.unbind(dimension)]))
    graph = make_fx(vmap(function))(x)
    assert sum("contracts" in str(node.target) for node in graph.graph.nodes) == 1
    assert vmap(function)(x[:0]).shape == function(x)[:0].shape


def test_vmap_separates_items_that_have_no_common_leading_dimensions(mine):
    x, values = torch.randn(4, 2, 3, **float64), torch.randn(2, 5, **float64)
    assert torch.equal(vmap(mine.columns)(x), x.sum(-2))
    assert torch.equal(vmap(mine.plus, (0, None))(x, x[0]), x + x[0])
    place = torch.randint(5, (3, 4))
    assert torch.equal(vmap(mine.taken, (0, None))(values, place), values[:, place])
    with pytest.raises(RuntimeError, match=r"of shape \[...\] = \[2, 3\], got \[1, 3\]"):
        vmap(mine.plus)(x, x[:, :1])


# ---- a Check -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 5), (2, 6, 5)])
def test_a_check_determines_the_shape_of_a_result(mine, shape):
    image, gain = torch.randn(shape, **float64), torch.tensor(0.3, **float64)
    for input in (image, image.mT.contiguous().mT, image.to("meta")):
        actual = mine.scaled(input, gain.to(input.device))
        assert actual.shape == shape
        assert actual.is_contiguous()
        assert input.is_meta or torch.equal(actual, image * gain)
    assert torch.equal(mine.scaled(image, gain, [2, 4]), image[..., :2, :4] * gain)
    assert torch.equal(
        vmap(mine.scaled, (0, None))(torch.stack([image] * 3), gain)[1], image * gain
    )
    opcheck(mine.scaled, (image, gain, [2, 4]), {})


def test_a_compiled_function_with_a_check_accepts_other_sizes(mine):
    def doubled(image, gain):
        return mine.scaled(image, gain) * 2

    compiled = torch.compile(doubled, fullgraph=True, dynamic=True, backend="eager")
    for items in 3, 5:
        image, gain = torch.randn(items, 6, 5), torch.tensor(2.0)
        assert torch.equal(compiled(image, gain), doubled(image, gain))


def test_a_kernel_of_float32_serves_float16(mine):
    image, gain = torch.randn(4, 5).half(), torch.tensor(0.3).half()
    actual = mine.scaled(image, gain)
    assert actual.dtype == torch.float16
    assert torch.equal(actual, (image.float() * gain.float()).half())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(size=[3, -1]), "`size` of numbers >= 0, got [3, -1]"),
        (dict(image=torch.ones(5)), "`image` of shape [C, H, W] or [H, W], got [5]"),
        (dict(mode="bright"), '`mode` "plain" or "rounded", got "bright"'),
        (dict(gain=torch.ones(1)), "`gain` of shape [] = [], got [1]"),
        (dict(gain=torch.tensor(1)), "`gain` of dtype float32 like `image`, got int64"),
        (
            dict(size=[2**40, 2**40]),
            "`size` for which memory suffices, got [1099511627776, 1099511627776]",
        ),
    ],
)
def test_what_a_check_refuses_names_the_argument(mine, arguments, message):
    with pytest.raises(RuntimeError) as error:
        mine.scaled(**(dict(image=torch.ones(2, 4, 5), gain=torch.tensor(1.0)) | arguments))
    assert str(error.value) == f"contracts::scaled: expected {message}"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unset", "must set the shape of `any`, a list of sizes, got a None"),
        ("number", "must set the shape of `any`, a list of sizes, got a Int"),
        ("needless", "must not set the shape of `own`, a list of sizes, got a"),
    ],
)
def test_a_check_that_sets_a_wrong_shape_is_an_error(mine, name, message, device):
    with pytest.raises(RuntimeError, match=f"contracts::{name}: its Check {message}"):
        getattr(mine, name)(torch.ones(4, device=device, **float64))


# ---- numbers and sizes ---------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(shift=-6), "`shift` >= -5, got -6"),
        (dict(shift=6), "`shift` of at most 5, got 6"),
        (dict(t=0.5), "`t` > 0.5, got 0.5"),
        (dict(u=2.0), "`u` < 2, got 2"),
        (dict(u=2.0000001), "`u` < 2, got 2.0000001"),
        (dict(u=1e-6), "`u` > 1e-6, got 1e-06"),
        (dict(t=float("nan")), "`t` > 0.5, got nan"),
        (dict(x=torch.ones(1, **float64)), "`x` with N >= 2, got [1]"),
        (dict(x=torch.ones(6, **float64)), "`x` with N <= 5, got [6]"),
    ],
)
def test_bounds_are_checked(mine, arguments, message, device):
    arguments = dict(x=torch.ones(3, **float64)) | arguments
    arguments["x"] = arguments["x"].to(device)
    with pytest.raises(RuntimeError) as error:
        mine.limited(**arguments)
    assert str(error.value) == f"contracts::limited: expected {message}"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_limits_between_sizes_and_multiples_are_checked(mine, device):
    x = torch.ones(3, device=device, **float64)
    for shape, message in [
        ((4, 5), "K <= M, got [4, 5]"),
        ((6, 2), "M % 4 == 0, got [6, 2]"),
        ((4, 3), "K < N = 3, got [4, 3]"),
    ]:
        with pytest.raises(RuntimeError) as error:
            mine.narrow(torch.ones(shape, device=device, **float64), x)
        assert str(error.value) == f"contracts::narrow: expected `table` with {message}"
    assert mine.narrow(torch.ones(4, 2, device=device, **float64), x).shape == (3,)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_error_of_a_limit_shows_the_size_that_is_limited(mine, device):
    row = torch.ones(3, 8, device=device, **float64)
    assert mine.even(row, 2).shape == (3,)
    with pytest.raises(RuntimeError, match=r"expected `columns` with 1 <= K, got \[3, 0\]$"):
        mine.even(row[:, :0], 2)
    with pytest.raises(RuntimeError, match="expected `columns` with M % 2 == 0, got 3$"):
        mine.even(row, 3)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("columns", "n", "message"),
    [
        (1, 2, r"`row` large enough for a result \[..., K - 2\], got \[5, 1\]$"),
        (2, 0, r"`n` large enough for a result \[n - 1\], got 0$"),
        (2, 4, r"`n` small enough for a result \[3 - n\], got 4$"),
    ],
)
def test_a_result_of_a_negative_size_names_the_argument(mine, columns, n, message, device):
    x, row = (torch.ones(shape, device=device, **float64) for shape in (7, (5, columns)))
    with pytest.raises(RuntimeError, match="contracts::less: expected " + message):
        mine.less(x, row, n)


def test_a_result_may_have_a_size_of_zero(mine):
    x, row = torch.ones(7, **float64), torch.ones(5, 2, **float64)
    assert [rest.shape for rest in mine.less(x, row, 1)] == [(5, 0), (0,), (2,)]


def test_limits_between_sizes_hold_in_a_compiled_graph_and_for_each_item(mine):
    compiled = torch.compile(mine.narrow, fullgraph=True, dynamic=True, backend="eager")
    x = torch.ones(5, **float64)
    for rows in 4, 8:
        assert torch.equal(compiled(torch.ones(rows, 3, **float64), x), x)
    with pytest.raises(RuntimeError):
        compiled(torch.ones(10, 3, **float64), x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_number_that_a_shape_names_is_never_negative(mine, device):
    x = torch.ones(1, device=device, **float64)
    assert mine.repeated(x, 3).shape == (3,)
    with pytest.raises(RuntimeError, match="repeated: expected `count` >= 0, got -1$"):
        mine.repeated(x, -1)


def test_numbers_at_their_bounds_are_accepted(mine):
    x = torch.ones(5, **float64)
    for arguments in (dict(shift=-5), dict(shift=5), dict(t=0.6), dict(u=1.9)):
        assert torch.equal(mine.limited(x, **arguments), x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_product_of_sizes_that_overflows_is_an_error(mine, device):
    x = torch.ones(1, device=device, **float64)
    assert mine.outer(x, 3, 10**6).shape == (3 * 10**6,)
    message = "expected `m` for which memory suffices, got 8589934592"
    with pytest.raises(RuntimeError, match=message):
        mine.outer(x, 2**31, 2**33)
    with pytest.raises(RuntimeError, match="`m` of at most 10.18, got"):
        mine.outer(x, 1, 10**18 + 1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_entries_of_a_small_dtype_are_compared_with_the_bound_itself(mine, dtype):
    x = torch.arange(300.0, **float64)
    index = torch.arange(100, dtype=dtype)
    assert torch.equal(mine.picked(x, index), x[:100])
    assert torch.equal(mine.picked(x, index[:, None]), x[:100])
    with pytest.raises(RuntimeError, match="0 <= i < N = 5, got 7 at dimension 0 7$"):
        mine.picked(x[:5], torch.full((10,), 3, dtype=dtype).scatter(0, torch.tensor(7), 7))


def test_an_error_of_many_entries_quotes_one_of_them(mine):
    index = torch.full((100_000,), 9, dtype=torch.int32)
    with pytest.raises(RuntimeError) as error:
        mine.picked(torch.ones(5, **float64), index)
    assert str(error.value).endswith("entries 0 <= i < N = 5, got 9 at dimension 0 0")


# ---- vmap ----------------------------------------------------------------------------------------


def test_vmap_without_a_line_calls_once_an_item(mine):
    x = torch.randn(3, 5, **float64)
    assert torch.equal(vmap(mine.running_sum)(x), x.cumsum(1))


@pytest.mark.parametrize("shape", [(3, 4), (1, 3), (0, 2)])
def test_vmap_shifts_entries_to_the_rows_of_their_item(mine, shape):
    tables = torch.randn(5, 7, 2, **float64)
    indices = torch.randint(-1, 7, (5, *shape))
    expected = [mine.looked_up(table, index) for table, index in zip(tables, indices)]
    assert torch.equal(vmap(mine.looked_up)(tables, indices), torch.stack(expected))
    indices[1].fill_(7)  # would name row 0 of the next item
    if indices.numel() > 0:
        with pytest.raises(RuntimeError, match="expected `index` entries -1 or 0 <= j < M"):
            vmap(mine.looked_up)(tables, indices)


@pytest.mark.parametrize(
    ("dtype", "items", "rows", "calls"),
    [
        (torch.int32, 3, 4, 1),
        (torch.uint8, 3, 4, 1),
        (torch.uint8, 2, 190, 2),  # joined, the entries would exceed uint8
        (torch.int32, 3, 190, 3),  # and the rows the limit of 200
    ],
)
def test_vmap_joins_items_where_their_dtype_and_the_limits_allow_it(
    mine, dtype, items, rows, calls
):
    next = torch.stack([torch.randperm(rows) for _ in range(items)]).to(dtype)
    graph = make_fx(vmap(mine.next_row))(next, next)
    assert sum("next_row" in str(node.target) for node in graph.graph.nodes) == calls
    back = graph(next, next)
    expected = torch.stack([mine.next_row(item) for item in next])
    assert torch.equal(back, expected)
    assert torch.equal(vmap(mine.next_row)(next), expected)  # without `second`, once an item


@pytest.mark.parametrize("entry", [3, -2, 9])
def test_the_error_of_a_joined_call_has_the_numbers_of_its_item(mine, entry):
    next = torch.zeros(4, 3, dtype=torch.int32)
    next[2, 1] = entry
    message = f"next_row: expected `next` entries 0 <= j < N = 3, got {entry} at row 1$"
    with pytest.raises(RuntimeError, match=message):
        vmap(mine.next_row)(next, next)


def test_limits_of_a_joined_size_are_those_of_one_item(mine):
    with pytest.raises(RuntimeError, match=r"`next` with N >= 2, got \[1\]"):
        vmap(mine.next_row)(*[torch.zeros(3, 1, dtype=torch.int32)] * 2)
    with pytest.raises(RuntimeError, match=r"`next` with N <= 200, got \[201\]"):
        vmap(mine.next_row)(*[torch.zeros(3, 201, dtype=torch.int32)] * 2)


@pytest.mark.parametrize("offset", [None, torch.arange(7.0, **float64)])
@pytest.mark.parametrize("rows", [[], [1]])
def test_vmap_calls_once_an_item_where_an_argument_is_that_of_one_item(mine, rows, offset):
    x, index = torch.randn(3, 2, **float64), torch.tensor(rows, dtype=torch.int64)
    expected = torch.stack([mine.marked(item, index, offset) for item in x])
    assert torch.equal(vmap(lambda x: mine.marked(x, index, offset))(x), expected)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("summed", [5]), ("row_sums", [5, 5]), ("steps", [6]), ("copied", [5]), ("below", [5])],
)
def test_vmap_calls_once_an_item_where_a_contract_cannot_join_them(mine, name, shape):
    """The result lacks the size, two dimensions have it, a sum has it, entries have it in a sum,
    or a result of integers might name shifted rows."""
    x = torch.randint(0, 5, (3, *shape))
    if name in ("summed", "row_sums", "steps"):
        x = torch.randn(3, *shape, **float64)
    more = [2] if name == "below" else []

    def call(x):
        return getattr(mine, name)(x, *more)

    assert torch.equal(vmap(call)(x), torch.stack([call(item) for item in x]))


def test_vmap_calls_once_an_item_where_no_entries_tie_a_joined_size_to_the_result(mine):
    z, code = torch.randn(2, 3, **float64), torch.randn(2, 4, **float64)
    expected = (z[:, :, None] - code[:, None, :]).abs().amin(2)
    assert torch.equal(vmap(mine.nearest)(z, code), expected)
    assert torch.equal(vmap(mine.raised, (0, None))(z, 5), z + 5)


def test_vmap_joins_a_size_that_entries_tie_to_the_result(mine):
    tables, indices = torch.randn(5, 7, 2, **float64), torch.randint(-1, 7, (5, 3, 4))
    graph = make_fx(vmap(mine.looked_up))(tables, indices)
    assert sum("looked_up" in str(node.target) for node in graph.graph.nodes) == 1


def test_a_result_like_an_absent_tensor_has_the_first_dtype(mine):
    next = torch.tensor([1, 0])
    assert mine.default_type(next).dtype == torch.float32
    assert mine.default_type(next).tolist() == [1, 0]
    assert mine.default_type(next, torch.ones(2, **float64)).dtype == torch.float64


def test_a_check_of_a_joined_operator_refuses_one_item(mine):
    index = torch.tensor([0])
    with pytest.raises(RuntimeError, match=r"marked: expected `x` of two rows, got float64 \[1\]"):
        vmap(mine.marked, (0, None))(torch.zeros(3, 1, **float64), index)


def test_a_compiled_call_selects_the_shape_that_an_eager_call_selects(mine):
    """After two calls, the last two sizes are symbols and the first one is 4."""

    def size(x):
        return x.new_full((1,), mine.leading(x).shape[0])  # aot_eager computes it from x's sizes

    compiled = torch.compile(size, fullgraph=True, backend="aot_eager")
    for shape in [(4, 5, 6), (4, 7, 8), (4, 6, 4), (4, 4, 7), (4, 4, 4)]:
        x = torch.zeros(shape, **float64)
        assert torch.equal(compiled(x), size(x))


def test_an_absent_index_tensor_has_no_positions(mine):
    next, second = torch.zeros(2, 3, dtype=torch.int32)
    second[1] = 5
    with pytest.raises(RuntimeError, match="`second` entries 0 <= j < N = 3, got 5 at row 1$"):
        mine.next_row(next, second, wrong=True)


def test_a_kernel_that_returns_a_right_position_is_told_what_to_return(mine):
    next = torch.zeros(3, dtype=torch.int32)
    message = "return the position of a wrong entry, or -1 if all are right, got 4$"
    with pytest.raises(RuntimeError, match=message):
        mine.next_row(next, next, wrong=True)
    with pytest.raises(RuntimeError, match=message):
        mine.next_row(next, wrong=True)


def test_another_shape_may_have_eight_dimensions(mine):
    x = torch.rand(1, 1, 1, 1, 1, 3, 4, **float64)
    torch.testing.assert_close(mine.total(x), x.sum())
    torch.testing.assert_close(mine.total(x[..., None]), x.sum())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_another_shape_of_fewer_numbers_is_refused_on_every_device(mine, device):
    with pytest.raises(
        RuntimeError, match=r"shapes \[N, 3\] or \[N\] of `x` differ in their number"
    ):
        mine.unequal(torch.ones(6, device=device, **float64))


@pytest.mark.parametrize("name", ["running_sum", "matrix_product", "gather_rows", "pair_energy"])
def test_vmap_over_no_items_gives_no_items(mine, name):
    x = torch.randn(0, 5, **float64, requires_grad=True)
    if name == "matrix_product":
        x = torch.randn(0, 5, 4, **float64, requires_grad=True)
        weights = torch.randn(4, 3, **float64)
        result = vmap(calcops.ops.library.matrix_product, (0, None))(x, weights)
        assert result.shape == vmap(torch.mm, (0, None))(x, weights).shape == (0, 5, 3)
    elif name == "gather_rows":
        x = torch.randn(0, 5, 2, **float64, requires_grad=True)
        result = vmap(mine.gather_rows, (0, None))(x, torch.tensor([1, 4, 2]))
        assert result.shape == (0, 3, 2)
    elif name == "pair_energy":
        result = vmap(mine.pair_energy, (0, None))(x, 1.0)
        assert result.shape == (0, 5)
    else:
        result = vmap(mine.running_sum)(x.detach())
        assert result.shape == (0, 5)
        return
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert gradient.shape == x.shape


# ---- derivatives ---------------------------------------------------------------------------------


def test_derivatives_call_an_operator_of_a_short_name(mine):
    """C++ stores up to 15 characters of a string in the string itself, and not on the heap."""
    x = torch.randn(3, **float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(mine.f, x)


def test_the_gradient_of_an_optional_tensor_is_refused_where_it_is_absent(mine):
    x, w = (torch.rand(4, **float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(mine.halved, (x, w))
    assert torch.autograd.gradcheck(mine.halved, x)
    backward = torch.ops.contracts._halved_backward
    of_x, of_w = backward(x, x, None, [True, False])
    assert torch.equal(of_x, x / 2)
    assert of_w.shape == (0,)
    with pytest.raises(RuntimeError, match="expected `w` where its gradient is wanted, got none"):
        backward(x, x, None, [True, True])


def test_a_zero_tangent_in_a_call_is_an_error_and_never_an_absent_argument(mine):
    x = torch.rand(4, **float64)
    jvp(mine.halved, (x, x), (x, x))
    with pytest.raises(RuntimeError, match="expected `w` of contracts::halved.*ask is_none()"):
        jvp(lambda x: mine.halved(x, x.detach()), (x,), (x,))


def test_a_result_of_integers_beside_one_of_floats_has_no_derivative(mine):
    x = torch.randn(4, **float64, requires_grad=True)
    y, sign = mine.doubled(x)
    assert (y.requires_grad, sign.requires_grad) == (True, False)
    assert torch.autograd.gradgradcheck(lambda x: mine.doubled(x)[0], x)
    (y, sign), (tangent, _) = jvp(mine.doubled, (x.detach(),), (torch.ones_like(x),))
    assert (tangent.tolist(), sign.dtype) == ([2] * 4, torch.int64)


def test_a_result_like_integers_beside_one_of_floats_has_no_derivative(mine):
    x, index = torch.randn(4, **float64, requires_grad=True), torch.arange(4)
    y, following = mine.stepped(x, index)
    assert (y.requires_grad, following.requires_grad) == (True, False)
    assert torch.autograd.gradcheck(lambda x: mine.stepped(x, index)[0], x, check_forward_ad=True)


def test_a_batched_argument_that_the_caller_expanded_has_a_gradient_for_each_item(mine):
    x, weights = torch.randn(3, 5, 4, **float64), torch.randn(4, 2, **float64)
    weights = weights.expand(3, 4, 2).requires_grad_()
    upstream = torch.randn(3, 5, 2, **float64)
    actual, expected = (
        torch.autograd.grad(vmap(product)(x, weights), weights, upstream)
        for product in (calcops.ops.library.matrix_product, torch.mm)
    )
    torch.testing.assert_close(actual, expected)


def test_a_constant_has_no_derivative_in_any_mode(mine):
    x, phase = torch.rand(4, **float64), torch.rand(4, **float64)
    number = torch.tensor(3.0, **float64)
    with pytest.raises(RuntimeError, match="`wave_number` that requires no gradient"):
        mine.waves(x, number.requires_grad_(), phase)[0].sum().backward()
    number = number.detach()
    with pytest.raises(RuntimeError, match="`wave_number` that has no tangent"):
        jvp(lambda number: mine.waves(x, number, phase), (number,), (number,))


def test_gradients_and_tangents_that_are_zero_are_added_and_multiplied(mine):
    x, phase = (torch.rand(4, **float64, requires_grad=True) for _ in range(2))
    number = torch.tensor(3.0, **float64)
    sine, cosine = mine.waves(x, number, phase)
    (gradient,) = torch.autograd.grad(sine.sum(), x, retain_graph=True)
    torch.testing.assert_close(gradient, 3 * (3 * x + phase).cos())
    (gradient,) = torch.autograd.grad(cosine.sum(), x)
    torch.testing.assert_close(gradient, -3 * (3 * x + phase).sin())
    x, phase = x.detach(), phase.detach()
    _, (of_sine, of_cosine) = jvp(lambda x: mine.waves(x, number, phase), (x,), (x,))
    torch.testing.assert_close(of_sine, 3 * x * (3 * x + phase).cos())
    torch.testing.assert_close(of_cosine, -3 * x * (3 * x + phase).sin())
    compiled = torch.compile(
        lambda x: mine.waves(x, number, phase)[1].sum(), fullgraph=True, backend="aot_eager"
    )
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(gradient, -3 * (3 * x + phase).sin())


def test_a_result_that_is_rounded_to_integers_has_no_derivative(mine):
    image = torch.ones(1, 1, dtype=torch.uint8)
    assert mine.scaled(image, torch.tensor(3, dtype=torch.uint8)) == 3


def test_a_number_as_a_gradient_is_an_error(mine):
    with pytest.raises(RuntimeError, match="negated: expected tensors from the formula of its"):
        mine.negated(torch.ones(2, requires_grad=True, **float64)).sum().backward()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (0, "mistaken: expected the formula of its derivative to set .* got index 2"),
        (1, "mistaken: expected the formula of its derivative to set .* got index 1"),
        (2, r"expected `other` of aten::mul.Scalar.* got an element behind the end of the"),
        (3, r"expected `other` of aten::mul.Scalar.* got an element behind the end of the"),
        (4, r"expected `memory_format` of aten::clone.* got an element behind the end of the"),
        (5, "mistaken: a negative distance"),
        (6, "mistaken: its source threw what is no std::exception"),
    ],
)
def test_a_mistake_in_a_formula_or_in_its_kernels_is_an_error(mine, mistake, message):
    x = torch.ones(2, requires_grad=True, **float64)
    y = mine.mistaken(x, mistake)
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()
    with pytest.raises(RuntimeError, match=message):
        jvp(lambda x: mine.mistaken(x, mistake), (x.detach(),), (x.detach(),))


# ---- Value ---------------------------------------------------------------------------------------


def test_values_divide_by_tensors_and_sizes(mine):
    x = torch.rand(5, **float64) + 1
    assert torch.equal(mine.inverse(x), 1 / x)
    assert torch.equal(mine.halves(x), x[:2])
    assert torch.equal(mine.dimension(x, 0), x * 5)


@pytest.mark.parametrize(("a", "b"), [(-(2**63), -1), (5, 0)])
def test_a_size_is_divided_by_positive_sizes(mine, a, b):
    x = torch.ones(2, **float64)
    assert torch.equal(mine.quotient(x, 7, 2), x * 3)
    with pytest.raises(RuntimeError, match=f"expected a size divided by at least 1, got {b}"):
        mine.quotient(x, a, b)


def test_a_composition_computes_with_floats_and_takes_any_string(mine):
    x = torch.ones(2, **float64)
    assert torch.equal(mine.real_number(x, 0.75), x * (1 / 1.75))
    assert mine.plain_string(x, "one").tolist() == [1, 1]
    assert mine.plain_string(x, "any other").tolist() == [0, 0]


def test_a_size_times_a_float_stays_a_symbol_under_export(mine):
    class Model(torch.nn.Module):
        def forward(self, x):
            return mine.per_number(x)

    dynamic = {0: torch.export.Dim("N", min=2)}
    exported = torch.export.export(Model(), (torch.ones(5, **float64),), dynamic_shapes=(dynamic,))
    for n in 5, 8:
        assert exported.module()(torch.ones(n, **float64))[0] == (n + 1) / (n - 0.5)


def test_a_composition_takes_optional_numbers_and_strings(mine):
    x = torch.ones(2, **float64)
    assert torch.equal(mine.is_given(x, 3, "text"), x)
    assert torch.equal(mine.is_given(x, 3, None), x * 0)


def test_a_composition_may_have_several_results(mine):
    x = torch.rand(5, **float64)
    mean, variance = mine.both(x)
    torch.testing.assert_close((mean, variance), (x.mean(), x.var(unbiased=False)))


@pytest.mark.parametrize("name", ["one_of_two", "no_result"])
def test_a_composition_returns_the_results_of_its_schema(mine, name):
    with pytest.raises(RuntimeError, match=f"{name}: its composition must return the results"):
        getattr(mine, name)(torch.ones(5, **float64))


def test_a_product_of_values_that_overflows_is_an_error(mine):
    x = torch.ones(1, **float64)
    assert mine.huge(x, 2) == 2**41
    with pytest.raises(RuntimeError, match="huge: expected `a` for which memory suffices, got"):
        mine.huge(x, 2**30)


def test_a_value_that_is_no_size_is_named(mine):
    with pytest.raises(RuntimeError, match="calcops::Value: expected a size, got a Bool"):
        mine.flag_as_size(torch.ones(2, **float64))


@pytest.mark.parametrize("index", [9, -1])
def test_an_index_beyond_a_list_of_values_is_an_error(mine, index):
    with pytest.raises(RuntimeError, match=f"expected an index below 1, got {index}"):
        mine.dimension(torch.ones(2, **float64), index)


def test_too_many_values_for_an_operator_are_an_error(mine):
    with pytest.raises(RuntimeError, match=r"at most 1 arguments of aten::neg\(Tensor self\)"):
        mine.too_many(torch.ones(2, **float64))


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (0, r"expected `dtype` of aten::sum\(.*, a dtype such as x.dtype\(\), got 1$"),
        (1, "changes no argument, got aten::exp_; its overloads are.* aten::exp_|aten::exp_$"),
        (2, "got aten::pow; its overloads are .*aten::pow.Tensor_Scalar"),
        (3, "got an element behind the end of the arguments"),
    ],
)
def test_a_wrong_call_of_a_composition_is_an_error(mine, which, message):
    x = torch.ones(2, **float64)
    with pytest.raises(RuntimeError, match=message):
        mine.wrong_call(x, which)
    assert x.tolist() == [1, 1]


def test_a_check_that_sets_more_shapes_than_results_is_an_error(mine):
    with pytest.raises(RuntimeError, match="its Check to set 1 shapes, got index 1$"):
        mine.too_many_shapes(torch.ones(2, **float64))


# ---- the contract of docs/compared_with_others.md ------------------------------------------------

REGION_MEANS = """
#include <calcops/operator.h>
const calcops::Contract contract(R"(%s)");

template <class Real, class Index>
void means(calcops::View<const Real, 4> input, calcops::View<const Index, 1> image,
           calcops::View<Real, 2> mean) {
  const auto [images, channels, height, width] = input.shape;
  for (int64_t k = 0; k < image.shape[0]; ++k)
    for (int64_t c = 0; c < channels; ++c) {
      double sum = 0;
      for (int64_t p = 0; p < height * width; ++p) sum += input(image(k), c, p / width, p %% width);
      mean(k, c) = Real(sum / double(height * width));
    }
}
const calcops::Kernel cpu("region_means", means<float, int32_t>, means<float, int64_t>,
                          means<double, int32_t>, means<double, int64_t>);
"""


def test_the_contract_that_is_compared_with_other_libraries_refuses_a_wrong_image(tmp_path):
    contract, message = blocks("docs/compared_with_others.md", "text")
    source = tmp_path / "region_means.cpp"
    source.write_text(REGION_MEANS % contract)
    region_means = calcops_jit.load("mine", [source]).region_means
    input = torch.arange(8.0).view(2, 1, 2, 2)
    assert region_means(input, torch.tensor([1, 0])).tolist() == [[5.5], [1.5]]
    with pytest.raises(RuntimeError) as error:
        region_means(input, torch.tensor([0, 1000000]))
    assert str(error.value) == message.strip()
