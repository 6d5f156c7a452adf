"""Random calls of the force operators: the reference's numbers, or an error of the documented form.

Each call begins as a right one, of any sizes, types, strides and device. Then most have one
argument changed. A call that was not changed must succeed. One that succeeds must have the results
of the reference, and one that fails must name one of the arguments: "calcops::op: expected
`argument` ..., got ...".
"""

import random
import re

import pytest
import reference
import torch
from test_edge_force import reference_force_virial

import calcops_jit

DTYPES = [torch.float32, torch.float64]
INDICES = [torch.int32, torch.int64]
OTHER_DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    *DTYPES,
    *INDICES,
]
ENTRIES = [-1, 0, 1, -2, -(2**31), 2**31 - 1, 5, 6, 2**62]
COUNTS = [-(2**63), -1, 0, 1, 2**41, 2**63 - 1]


def strided(x, draw):
    """The same tensor, laid out in memory in any way."""
    way = draw.choice(["rows", "rows", "columns", "every second", "with an offset"])
    if way == "columns" and x.dim() > 1:
        return x.mT.contiguous().mT
    if way == "every second" and x.dim() > 0:
        return x.repeat_interleave(2, -1)[..., ::2]
    if way == "with an offset":
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) if x.numel() else x
    return x


def neighbour_list(draw, seed):
    frames, natoms, nghost, neighbors = (
        draw.choice(sizes) for sizes in ([0, 1, 2], [0, 1, 3, 9], [0, 2], [0, 1, 4, 6])
    )
    list_neigh, dE, Ri_d, Rij = (
        reference.pairs(
            frames, natoms, nghost, neighbors, draw.choice(DTYPES), draw.choice(INDICES), seed=seed
        )
        if natoms + nghost
        else reference.pairs(frames, 0, 1, neighbors, seed=seed)
    )
    size = frames, natoms, neighbors
    if draw.random() < 0.3 and neighbors % 2 == 0:
        list_neigh = list_neigh.view(frames, natoms, 2, neighbors // 2)
    dE = dE.reshape(
        draw.choice(
            [(*size, 4), (frames, natoms, 1, 4 * neighbors), (frames, natoms, 4 * neighbors)]
        )
    )
    Ri_d = Ri_d.reshape(draw.choice([(frames, natoms, 4 * neighbors, 3), (*size, 4, 3)]))
    return dict(list_neigh=list_neigh, dE=dE, Ri_d=Ri_d, Rij=Rij, nghost=nghost)


def edges(draw, seed):
    natoms, count, frames = (
        draw.choice([0, 1, 2, 7]),
        draw.choice([0, 1, 2, 30, 65]),
        draw.choice([1, 2, 9]),
    )
    found = reference.graph(
        natoms, count, frames, draw.choice(DTYPES), draw.choice(INDICES), seed=seed
    )
    return dict(
        zip(
            ("edge_index", "edge_gradient", "edge_vec", "natoms", "batch", "nframes"),
            found,
            strict=True,
        )
    )


def index_reference(list_neigh, nghost=0):
    """neighbor_index by counting."""
    frames, rows = len(list_neigh), list_neigh.shape[1] + nghost
    results = []
    for frame in list_neigh.flatten(1).tolist():
        slots = [[s for s, j in enumerate(frame) if j == row] for row in range(rows)]
        ends = [sum(map(len, slots[: row + 1])) for row in range(rows)]
        named = sum(slots, [])
        results.append(ends + named + [-1] * (len(frame) - len(named)))
    width = rows + list_neigh.shape[1:].numel()
    return torch.tensor(results, dtype=torch.int32).reshape(frames, width)


def order_reference(edge_index, natoms):
    right = ((edge_index >= 0) & (edge_index < natoms)).all(0)
    ends = torch.where(right, edge_index.long(), -1).reshape(1, 1, -1)
    return (
        index_reference(ends, natoms - 1)[0]
        if natoms
        else torch.full((ends.numel(),), -1, dtype=torch.int32)
    )


def doubled(values):
    return {
        k: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
        for k, x in values.items()
    }


def pairs_reference(list_neigh, dE, Ri_d, Rij=None, nghost=0, center=True, **_):
    in_range = (list_neigh >= -1) & (list_neigh < list_neigh.shape[1] + nghost)
    assert in_range.all(), "a wrong entry that no error names"
    frames, natoms = list_neigh.shape[:2]
    size = frames, natoms, list_neigh.shape[2:].numel()
    given = (
        list_neigh.reshape(size),
        dE.reshape(*size, 4),
        Ri_d.reshape(frames, natoms, 4 * size[2], 3),
    )
    Rij = Ri_d.new_zeros(*size, 3) if Rij is None else Rij
    return reference.force_virial(*given, Rij, nghost, center)


def edges_reference(edge_index, edge_gradient, natoms, edge_vec=None, batch=None, nframes=1, **_):
    assert ((edge_index >= -1) & (edge_index < natoms)).all(), "a wrong entry that no error names"
    edge_vec = torch.zeros_like(edge_gradient) if edge_vec is None else edge_vec
    if natoms == 0:  # one_hot cannot count classes there
        return (
            edge_vec.new_zeros(0, 3),
            edge_vec.new_zeros(nframes, 3, 3),
            edge_vec.new_zeros(0, 3, 3),
        )
    return reference_force_virial(edge_index, edge_gradient, edge_vec, natoms, batch, nframes)


def compat_force(F, nghost=None, **given):
    ghosts = 0 if nghost is None else int(nghost)
    force = pairs_reference(**given, nghost=ghosts, center=False)[0]
    return force + torch.nn.functional.pad(F, (0, 0, 0, ghosts))


def compat_virial(nghost=None, **given):
    _, virial, atom_virial = pairs_reference(**given, nghost=0 if nghost is None else int(nghost))
    return virial.flatten(1), atom_virial.flatten(2)


# What draws the arguments, and what computes the results from them.
OPERATORS = {
    "force": (neighbour_list, lambda **given: pairs_reference(**given)[0]),
    "force_virial": (neighbour_list, pairs_reference),
    "neighbor_index": (neighbour_list, index_reference),
    "edge_force": (edges, lambda **given: edges_reference(**given)[0]),
    "edge_force_virial": (edges, edges_reference),
    "edge_order": (edges, order_reference),
    "calculateForce": (neighbour_list, compat_force),
    "calculateVirial": (neighbour_list, compat_virial),
}


def right_arguments(name, draw, seed):
    """Those of the schema, and now and then one that may be left out."""
    given = OPERATORS[name][0](draw, seed)
    if name.startswith("calculate"):
        frames, natoms = given["list_neigh"].shape[:2]
        given["F"] = torch.ones(frames, natoms, 3, dtype=given["dE"].dtype)
        nghost = torch.tensor(given["nghost"], dtype=draw.choice([torch.int32, torch.int64]))
        given["nghost"] = (
            None if nghost == 0 and draw.random() < 0.5 else nghost.reshape(draw.choice([(), (1,)]))
        )
    if name in ("force", "force_virial"):
        index = index_reference(given["list_neigh"], given["nghost"])
        given["neighbor_index"] = draw.choice([None, index])
    if name in ("edge_force", "edge_force_virial"):
        given["edge_order"] = draw.choice(
            [None, order_reference(given["edge_index"], given["natoms"])]
        )
    if draw.random() < 0.3 and "batch" in given:
        given |= dict(batch=None, nframes=1)
    names = [argument.name for argument in getattr(calcops_jit, name).default._schema.arguments]
    return {
        k: strided(x, draw) if torch.is_tensor(x) else x for k, x in given.items() if k in names
    }


def change(given, draw):
    """Changes one argument, perhaps to one that is as right."""
    name = draw.choice(sorted(given))
    value = given[name]
    if not torch.is_tensor(value):
        if value is not None:
            given[name] = draw.choice(COUNTS)
        return
    way = draw.choice(["none", "dtype", "shape", "dimension", "device", "entry", "entry"])
    if way == "none":
        value = None
    elif way == "dtype":
        value = value.to(draw.choice(OTHER_DTYPES))
    elif way == "shape" and value.dim():
        dimension = draw.randrange(value.dim())
        value = (
            value.repeat_interleave(2, dimension)
            if draw.random() < 0.5
            else value.narrow(dimension, 0, 0)
        )
    elif way == "dimension":
        value = value.unsqueeze(0) if draw.random() < 0.5 or not value.dim() else value.flatten()
    elif way == "device":
        value = value.to("meta")
    elif way == "entry" and value.numel() and value.dtype in INDICES:
        value = value.clone(memory_format=torch.contiguous_format)
        entry = draw.choice(ENTRIES)
        if value.dtype == torch.int64 or -(2**31) <= entry < 2**31:
            value.view(-1)[draw.randrange(value.numel())] = entry
    given[name] = value


def tensors(results):
    return [results] if torch.is_tensor(results) else list(results)


def check(name, seed):
    draw = random.Random(f"{name} {seed}")
    given = right_arguments(name, draw, seed)
    changed = draw.random() < 0.6
    if changed:
        change(given, draw)
    elif draw.random() < 0.2 and not name.startswith("calculate"):
        given = {k: x.to("meta") if torch.is_tensor(x) else x for k, x in given.items()}
        results = tensors(getattr(calcops_jit, name)(**given))
        masked = ("list_neigh", "edge_index")
        real = {
            k: torch.full_like(x, -1 if k in masked else 0, device="cpu")
            if torch.is_tensor(x)
            else x
            for k, x in given.items()
        }
        assert [x.shape for x in results] == [
            x.shape for x in tensors(getattr(calcops_jit, name)(**real))
        ]
        return
    try:
        results = tensors(getattr(calcops_jit, name)(**given))
    except RuntimeError as error:
        assert changed, error
        line = str(error).splitlines()[0]
        found = re.match(r"(?:calcops|CalcOps)::_?\w+: expected `(\w+)` .*, got ", line)
        assert found and found[1] in given, (
            f"{line}\n{ {k: getattr(x, 'shape', x) for k, x in given.items()} }"
        )
        return
    if any(x.is_meta for x in results):
        return
    expected = tensors(OPERATORS[name][1](**doubled(given)))
    for ours, theirs in zip(results, expected, strict=True):
        tolerance = 1e-5 if ours.dtype == torch.float32 else 1e-11
        torch.testing.assert_close(
            ours, theirs.to(ours.dtype), rtol=tolerance, atol=tolerance, equal_nan=True
        )


def check_all(name, first, count):
    for seed in range(first, first + count):
        try:
            check(name, seed)
        except Exception as error:
            raise AssertionError(f"check({name!r}, {seed}): {error}") from error


@pytest.mark.parametrize("name", OPERATORS)
def test_any_call_gives_the_references_numbers_or_names_an_argument(name, one_thread):
    check_all(name, 0, 500)


@pytest.mark.long
@pytest.mark.parametrize("name", OPERATORS)
def test_many_calls_give_the_references_numbers_or_name_an_argument(name, one_thread):
    check_all(name, 500, 50_000)
