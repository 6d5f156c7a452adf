"""calcops::tabulated_sum against plain PyTorch: values, derivatives of every order, empty slots,
numbers outside the grid, transforms, errors."""

import math

import pytest
import torch
from reference import assert_equal_lists, opcheck

import calcops_jit

tabulated_sum = calcops_jit.tabulated_sum
# For two kinds: cells of 0.5 from 0 to 2, and of 1 to 5; cells of 0.25 from -1 to 0.5, and no other.
GRID = torch.tensor([[0.0, 0.5, 2.0, 1.0, 5.0], [-1.0, 0.25, 0.5, 1.0, 0.5]], dtype=torch.float64)
CELLS = [7, 6]
ENDS = [(0.0, 5.0), (-1.0, 0.5)]
M_OF_BLOCKS = 1, 7, 8, 9, 16, 33, 100  # parts of a block of functions, whole ones, and both


def begins_of(kind):
    lower, width, upper, wide, end = GRID[kind].tolist()
    fine = [lower + i * width for i in range(round((upper - lower) / width))]
    return fine + [upper + i * wide for i in range(round((end - upper) / wide))]


def functions(kind, x, table, order=0):
    """g [..., M] and its derivatives by autograd, in plain PyTorch: a Horner scheme."""
    begins = torch.tensor(begins_of(kind), dtype=x.dtype)
    lower, upper = ENDS[kind]
    inside = x.clamp(lower, upper)
    cell = (torch.searchsorted(begins, inside.detach().contiguous(), right=True) - 1).clamp(min=0)
    c = table[kind][cell]  # [..., 6, M]
    t = (inside.detach() - begins[cell])[..., None]

    def polynomial(order):
        terms = range(order, 6)
        factors = [math.perm(k, order) for k in terms]
        return sum(f * c[..., k, :] * t ** (k - order) for f, k in zip(factors, terms))

    beyond = (x - inside)[..., None]
    is_inside = (x == inside)[..., None]
    if order == 0:
        return polynomial(0) + beyond * polynomial(1)
    if order == 1:
        return polynomial(1) + 0 * beyond
    return polynomial(order) * is_inside if order < 6 else torch.zeros_like(c[..., 0, :])


def reference(x, R, kind, table, order=0):
    g = torch.zeros(*x.shape, table.shape[-1], dtype=x.dtype)
    for k in range(len(CELLS)):
        g = torch.where((kind == k)[..., None], functions(k, x, table, order), g)
    R = torch.where((kind < 0)[..., None], 0, R)
    return torch.einsum("isa,ism->iam", R, g)


def inputs(n=5, K=9, M=33, dtype=torch.float64, seed=0, index=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(2, max(CELLS), 6, M, dtype=torch.float64)
    for k, cells in enumerate(CELLS):
        table[k, :cells] = torch.randn(cells, 6, M, dtype=torch.float64, generator=generator)
    kind = torch.randint(-1, 2, (n, K), generator=generator).to(index)
    # Beyond both ends, too.
    x = 8 * torch.rand(n, K, dtype=torch.float64, generator=generator) - 2
    R = torch.randn(n, K, 4, dtype=torch.float64, generator=generator)
    return x.to(dtype), R.to(dtype), kind, table.to(dtype), GRID


def smooth_inputs(n=3, K=4, M=5):
    """One kind whose cells are all parts of one polynomial, so that finite differences may cross
    from cell to cell; inside the grid."""
    generator = torch.Generator().manual_seed(1)
    polynomial = torch.randn(6, M, dtype=torch.float64, generator=generator) / 5
    grid = torch.tensor([[-1.0, 0.5, 1.0, 1.0, 3.0]], dtype=torch.float64)
    table = torch.zeros(1, 6, 6, M, dtype=torch.float64)
    for cell, begin in enumerate([-1.0, -0.5, 0.0, 0.5, 1.0, 2.0]):
        for k in range(6):
            for j in range(k, 6):  # (t + begin)^j
                table[0, cell, k] += math.comb(j, k) * begin ** (j - k) * polynomial[j]
    x = 3 * torch.rand(n, K, dtype=torch.float64, generator=generator) - 0.9
    R = torch.randn(n, K, 4, dtype=torch.float64, generator=generator)
    kind = torch.tensor([[0, -1, 0, 0], [0, 0, 0, -1], [-1, 0, 0, 0]])[:n, :K]
    return x.requires_grad_(), R.requires_grad_(), kind, table, grid


@pytest.mark.parametrize("M", M_OF_BLOCKS)
@pytest.mark.parametrize("order", range(8))
def test_values_of_every_order_are_those_of_the_polynomials(M, order):
    x, R, kind, table, grid = inputs(M=M)
    expected = reference(x, R, kind, table, order)
    torch.testing.assert_close(
        tabulated_sum(x, R, kind, table, grid, order), expected, rtol=1e-12, atol=1e-11
    )


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("M", M_OF_BLOCKS)
def test_gradients_are_those_of_autograd(M, index):
    x, R, kind, table, grid = inputs(M=M, index=index)
    upstream = torch.randn(5, 4, M, dtype=torch.float64)
    leaves = [x.clone().requires_grad_(), R.clone().requires_grad_()]
    ours = torch.autograd.grad(tabulated_sum(*leaves, kind, table, grid), leaves, upstream)
    (of_R,) = torch.autograd.grad(reference(x, leaves[1], kind, table), leaves[1:], upstream)
    of_x = torch.einsum("ism,isa,iam->is", slopes(x, kind, table), R, upstream)
    torch.testing.assert_close(ours[1], of_R, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(ours[0], of_x, rtol=1e-11, atol=1e-10)


def slopes(x, kind, table):
    g = torch.zeros(*x.shape, table.shape[-1], dtype=x.dtype)
    for k in range(len(CELLS)):
        g = torch.where((kind == k)[..., None], functions(k, x, table, 1), g)
    return g


def test_derivatives_of_first_and_second_order_in_both_modes_and_of_the_third():
    x, R, kind, table, grid = smooth_inputs()

    def of(x, R):
        return tabulated_sum(x, R, kind, table, grid)

    assert torch.autograd.gradcheck(of, (x, R), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(of, (x, R), check_fwd_over_rev=True)

    def slope(x, R):
        upstream = torch.linspace(-1, 1, 4 * 5, dtype=torch.float64).view(4, 5)
        value = (of(x, R) * upstream).sum()
        return torch.autograd.grad(value, (x, R), create_graph=True)

    assert torch.autograd.gradgradcheck(slope, (x, R))


def test_an_empty_slot_adds_nothing_whatever_it_holds():
    x, R, kind, table, grid = inputs()
    empty = kind < 0
    leaves = [t.clone().requires_grad_() for t in (x, R)]
    T = tabulated_sum(*leaves, kind, table, grid)
    clean = torch.autograd.grad(T.square().sum(), leaves)
    dirty = [t.clone() for t in (x, R)]
    for t in dirty:
        t[empty] = math.nan
    dirty = [t.requires_grad_() for t in dirty]
    T_dirty = tabulated_sum(*dirty, kind, table, grid)
    assert torch.equal(T, T_dirty)
    grads = torch.autograd.grad(T_dirty.square().sum(), dirty, create_graph=True)
    assert_equal_lists(grads, clean)
    assert all((grad[empty] == 0).all() for grad in grads)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), dirty)
    assert all((grad[empty] == 0).all() and grad.isfinite().all() for grad in second)
    tangents = [
        torch.ones_like(t).masked_fill(empty.view(5, 9, *[1] * (t.dim() - 2)), math.nan)
        for t in dirty
    ]
    _, along = torch.func.jvp(
        lambda *t: tabulated_sum(*t, kind, table, grid), tuple(dirty), tuple(tangents)
    )
    assert along.isfinite().all()


def test_the_order_of_empty_slots_changes_no_bit():
    x, R, kind, table, grid = inputs(K=40)
    order = torch.argsort((kind < 0).int(), dim=1, stable=True)
    moved = [
        torch.gather(x, 1, order),
        R.gather(1, order[..., None].expand(-1, -1, 4)),
        kind.gather(1, order),
    ]
    assert torch.equal(tabulated_sum(*moved, table, grid), tabulated_sum(x, R, kind, table, grid))


def test_float32_sums_in_float64():
    x, R, kind, table, grid = inputs(n=3, K=400, M=20)
    exact = tabulated_sum(x, R, kind, table, grid)
    single = tabulated_sum(x.float(), R.float(), kind, table.float(), grid)
    assert single.dtype == torch.float32
    rounded = tabulated_sum(
        x.float().double(), R.float().double(), kind, table.float().double(), grid
    )
    assert (single - rounded).abs().max() < 2e-6 * exact.abs().max()


def test_not_a_number_stays_one_and_the_ends_are_inside():
    x, R, kind, table, grid = inputs(n=1, K=2)
    kind[:] = 0
    x[0] = torch.tensor([math.nan, 1.0])
    assert tabulated_sum(x, R, kind, table, grid).isnan().all()
    for end, cell, t in ((0.0, 0, 0.0), (5.0, 6, 1.0), (2.0, 4, 0.0), (0.5, 1, 0.0)):
        x[0] = end
        powers = t ** torch.arange(6, dtype=torch.float64)
        g = torch.einsum("k,km->m", powers, table[0, cell])
        expected = torch.einsum("a,m->am", R[0].sum(0), g)
        torch.testing.assert_close(tabulated_sum(x, R, kind, table, grid)[0], expected)


def test_sizes_of_zero():
    for n, K, M in ((0, 3, 5), (3, 0, 5), (3, 4, 0)):
        x, R, kind, table, grid = inputs(n=n, K=K, M=M)
        leaves = [x.requires_grad_(), R.requires_grad_()]
        T = tabulated_sum(*leaves, kind, table, grid)
        assert T.shape == (n, 4, M) and not T.any()
        assert not any(g.any() for g in torch.autograd.grad(T.sum(), leaves))


def test_strides_and_threads_change_no_bit():
    x, R, kind, table, grid = inputs(n=200)
    expected = tabulated_sum(x, R, kind, table, grid)
    apart = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, R, kind)]
    assert not apart[0].is_contiguous()
    assert torch.equal(tabulated_sum(*apart, table, grid), expected)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(tabulated_sum(x, R, kind, table, grid), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("chunk", [None, 2])
def test_vmap_over_atoms_with_one_table_and_with_a_table_each(chunk):
    x, R, kind, table, grid = inputs(n=6)
    x, R, kind = (t.view(3, 2, *t.shape[1:]) for t in (x, R, kind))
    expected = torch.stack([tabulated_sum(*item, table, grid) for item in zip(x, R, kind)])
    found = torch.vmap(tabulated_sum, (0, 0, 0, None, None), chunk_size=chunk)(
        x, R, kind, table, grid
    )
    assert torch.equal(found, expected)
    tables = torch.stack([table, 2 * table, 3 * table])
    expected = torch.stack([tabulated_sum(*item, grid) for item in zip(x, R, kind, tables)])
    found = torch.vmap(tabulated_sum, (0, 0, 0, 0, None))(x, R, kind, tables, grid)
    assert torch.equal(found, expected)


def test_vmap_of_vmap_with_a_table_of_the_outer_one():
    x, R, kind, table, grid = inputs(n=12)
    x, R, kind = (t.view(2, 3, 2, *t.shape[1:]) for t in (x, R, kind))
    tables = torch.stack([table, 3 * table])
    inner = torch.vmap(tabulated_sum, (0, 0, 0, None, None))
    expected = [inner(*each, grid) for each in zip(x, R, kind, tables)]
    found = torch.vmap(inner, (0, 0, 0, 0, None))(x, R, kind, tables, grid)
    assert torch.equal(found, torch.stack(expected))


def test_jacobians_of_both_modes_agree():
    x, R, kind, table, grid = inputs(n=1, M=6)

    def of(x):
        return tabulated_sum(x, R, kind, table, grid)

    torch.testing.assert_close(torch.func.jacrev(of)(x), torch.func.jacfwd(of)(x))


def test_opcheck_compile_and_export_with_dynamic_sizes():
    x, R, kind, table, grid = inputs(K=4, M=6)
    leaves = x.requires_grad_(), R.requires_grad_()
    opcheck(torch.ops.calcops.tabulated_sum.default, (*leaves, kind, table, grid))
    upstream = torch.randn(5, 4, 6, dtype=torch.float64)
    opcheck(
        torch.ops.calcops._tabulated_sum_backward.default,
        (upstream, *leaves, kind, table, grid, 0, [True, True]),
    )
    compiled = torch.compile(tabulated_sum, fullgraph=True, dynamic=True)
    grads = [
        torch.autograd.grad(f(*leaves, kind, table, grid).square().sum(), leaves)
        for f in (compiled, tabulated_sum)
    ]
    assert_equal_lists(*grads)

    class Module(torch.nn.Module):
        def forward(self, x, R, kind, table, grid):
            return tabulated_sum(x, R, kind, table, grid)

    n, K = torch.export.Dim("n"), torch.export.Dim("K")
    sizes = {
        "x": {0: n, 1: K},
        "R": {0: n, 1: K},
        "kind": {0: n, 1: K},
        "table": None,
        "grid": None,
    }
    arguments = x.detach(), R.detach(), kind, table, grid
    program = torch.export.export(Module(), arguments, dynamic_shapes=sizes)
    other = inputs(n=8, K=3, M=6, seed=5)
    assert torch.equal(program.module()(*other), tabulated_sum(*other))


def changed(**changes):
    arguments = dict(zip(("x", "R", "kind", "table", "grid"), inputs()))
    return arguments | changes


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"x": torch.zeros(5, 9, dtype=torch.int64)}, "expected `x` float32 or float64, got Long"),
        ({"R": torch.zeros(5, 9, 3, dtype=torch.float64)}, "expected `R` of shape [n, K, 4]"),
        ({"R": torch.zeros(5, 9, 4)}, "expected `R`"),
        ({"kind": torch.zeros(5, 8, dtype=torch.int64)}, "expected `kind` of shape [n, K]"),
        ({"kind": torch.zeros(5, 9)}, "expected `kind` int32 or int64, got"),
        ({"table": torch.zeros(2, 7, 5, 33, dtype=torch.float64)}, "expected `table` of shape"),
        ({"grid": torch.zeros(3, 5, dtype=torch.float64)}, "expected `grid` of shape [kinds, 5]"),
        ({"grid": torch.zeros(2, 5)}, "expected `grid`"),
        ({"order": -1}, "expected `order`"),
        ({"kind": torch.full((5, 9), 2)}, "expected `kind` entries -1 or 0 <= kind < kinds"),
        ({"kind": torch.full((5, 9), -2)}, "expected `kind` entries -1 or 0 <= kind < kinds"),
    ],
)
def test_wrong_input_is_an_error_that_names_it(changes, words):
    with pytest.raises(RuntimeError) as error:
        tabulated_sum(**changed(**changes))
    assert "calcops::tabulated_sum: " in str(error.value) and words in str(error.value), error.value


@pytest.mark.parametrize("name", ["table", "grid"])
def test_a_gradient_of_what_has_none_is_an_error(name):
    arguments = changed()
    arguments[name].requires_grad_()
    T = tabulated_sum(**arguments)
    with pytest.raises(RuntimeError, match=f"expected `{name}` that requires no gradient"):
        T.sum().backward()


def test_whatever_the_grid_holds_no_other_memory_is_read():
    x, R, kind, table, _ = inputs()
    for value in (0.0, math.nan, math.inf, -1e300):
        grid = torch.full((2, 5), value, dtype=torch.float64)
        leaves = [t.clone().requires_grad_() for t in (x, R)]
        tabulated_sum(*leaves, kind, table, grid).sum().backward()
