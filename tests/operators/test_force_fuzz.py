"""Random calls of the force operators give the reference's results or a documented error.

A call begins as a valid one, with random sizes, dtypes, strides and device. In most calls one
argument is then changed. An unchanged call must succeed. A call that succeeds must have the
reference's results. One that fails must name an argument: "calcops::op: expected `argument` ...,
got ...".
"""

import random
import re

import pytest
import reference
import torch
from reference import index_reference, order_reference
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
    """Return the same values with random strides, or shifted by one element in memory."""
    way = draw.choice(["rows", "rows", "columns", "every second", "with an offset"])
    if way == "columns" and x.dim() > 1:
        return x.mT.contiguous().mT
    if way == "every second" and x.dim() > 0:
        return x.repeat_interleave(2, -1)[..., ::2]
    if way == "with an offset":
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) if x.numel() else x
    return x


def neighbour_list(draw, seed):
    frames = draw.choice([0, 1, 2])
    natoms = draw.choice([0, 1, 3, 9])
    nghost = draw.choice([0, 2])
    neighbors = draw.choice([0, 1, 4, 6])
    if natoms + nghost:
        dtype = draw.choice(DTYPES)
        inputs = reference.pairs(
            frames, natoms, nghost, neighbors, dtype, draw.choice(INDICES), seed=seed
        )
    else:  # randint needs an atom to choose
        inputs = reference.pairs(frames, 0, 1, neighbors, seed=seed)
    list_neigh, dE, Ri_d, Rij = inputs
    size = frames, natoms
    if draw.random() < 0.3 and neighbors % 2 == 0:
        list_neigh = list_neigh.view(*size, 2, neighbors // 2)
    dE_shapes = [(*size, neighbors, 4), (*size, 1, 4 * neighbors), (*size, 4 * neighbors)]
    Ri_d_shapes = [(*size, 4 * neighbors, 3), (*size, neighbors, 4, 3)]
    dE = dE.reshape(draw.choice(dE_shapes))
    Ri_d = Ri_d.reshape(draw.choice(Ri_d_shapes))
    return dict(list_neigh=list_neigh, dE=dE, Ri_d=Ri_d, Rij=Rij, nghost=nghost)


def edges(draw, seed):
    natoms = draw.choice([0, 1, 2, 7])
    count = draw.choice([0, 1, 2, 30, 65])
    frames = draw.choice([1, 2, 9])
    dtype = draw.choice(DTYPES)
    values = reference.graph(natoms, count, frames, dtype, draw.choice(INDICES), seed=seed)
    names = ("edge_index", "edge_gradient", "edge_vec", "natoms", "batch", "nframes")
    return dict(zip(names, values, strict=True))


def doubled(values):
    def widened(x):
        return x.double() if torch.is_tensor(x) and x.is_floating_point() else x

    return {name: widened(value) for name, value in values.items()}


def pairs_reference(list_neigh, dE, Ri_d, Rij=None, nghost=0, center=True, **_):
    in_range = (list_neigh >= -1) & (list_neigh < list_neigh.shape[1] + nghost)
    assert in_range.all(), "a wrong entry that no error names"
    frames, natoms = list_neigh.shape[:2]
    neighbors = list_neigh.shape[2:].numel()
    list_neigh = list_neigh.reshape(frames, natoms, neighbors)
    dE = dE.reshape(frames, natoms, neighbors, 4)
    Ri_d = Ri_d.reshape(frames, natoms, 4 * neighbors, 3)
    Rij = Ri_d.new_zeros(frames, natoms, neighbors, 3) if Rij is None else Rij
    return reference.force_virial(list_neigh, dE, Ri_d, Rij, nghost, center)


def edges_reference(edge_index, edge_gradient, natoms, edge_vec=None, batch=None, nframes=1, **_):
    assert ((edge_index >= -1) & (edge_index < natoms)).all(), "a wrong entry that no error names"
    edge_vec = torch.zeros_like(edge_gradient) if edge_vec is None else edge_vec
    if natoms == 0:  # one_hot of the reference needs an atom
        shapes = (0, 3), (nframes, 3, 3), (0, 3, 3)
        return tuple(edge_vec.new_zeros(shape) for shape in shapes)
    return reference_force_virial(edge_index, edge_gradient, edge_vec, natoms, batch, nframes)


def compat_force(F, nghost=None, **arguments):
    ghosts = 0 if nghost is None else int(nghost)
    force = pairs_reference(**arguments, nghost=ghosts, center=False)[0]
    return force + torch.nn.functional.pad(F, (0, 0, 0, ghosts))


def compat_virial(nghost=None, **arguments):
    ghosts = 0 if nghost is None else int(nghost)
    _, virial, atom_virial = pairs_reference(**arguments, nghost=ghosts)
    return virial.flatten(1), atom_virial.flatten(2)


# {operator: (function that draws its arguments, reference)}
OPERATORS = {
    "force": (neighbour_list, lambda **arguments: pairs_reference(**arguments)[0]),
    "force_virial": (neighbour_list, pairs_reference),
    "neighbor_index": (neighbour_list, index_reference),
    "edge_force": (edges, lambda **arguments: edges_reference(**arguments)[0]),
    "edge_force_virial": (edges, edges_reference),
    "edge_order": (edges, order_reference),
    "calculateForce": (neighbour_list, compat_force),
    "calculateVirial": (neighbour_list, compat_virial),
}


def valid_arguments(name, draw, seed):
    """Return valid arguments of an operator. Optional ones may be None."""
    arguments = OPERATORS[name][0](draw, seed)
    if name.startswith("calculate"):
        frames, natoms = arguments["list_neigh"].shape[:2]
        arguments["F"] = torch.ones(frames, natoms, 3, dtype=arguments["dE"].dtype)
        nghost = torch.tensor(arguments["nghost"], dtype=draw.choice([torch.int32, torch.int64]))
        if nghost == 0 and draw.random() < 0.5:
            arguments["nghost"] = None
        else:
            arguments["nghost"] = nghost.reshape(draw.choice([(), (1,)]))
    if name in ("force", "force_virial"):
        index = index_reference(arguments["list_neigh"], arguments["nghost"])
        arguments["neighbor_index"] = draw.choice([None, index])
    if name in ("edge_force", "edge_force_virial"):
        order = order_reference(arguments["edge_index"], arguments["natoms"])
        arguments["edge_order"] = draw.choice([None, order])
    if draw.random() < 0.3 and "batch" in arguments:
        arguments |= dict(batch=None, nframes=1)
    names = [argument.name for argument in getattr(calcops_jit, name).default._schema.arguments]
    return {
        key: strided(value, draw) if torch.is_tensor(value) else value
        for key, value in arguments.items()
        if key in names
    }


def change(arguments, draw):
    """Change one argument. The call may stay valid."""
    name = draw.choice(sorted(arguments))
    value = arguments[name]
    if not torch.is_tensor(value):
        if value is not None:
            arguments[name] = draw.choice(COUNTS)
        return
    way = draw.choice(["none", "dtype", "shape", "dimension", "device", "entry", "entry"])
    if way == "none":
        value = None
    elif way == "dtype":
        value = value.to(draw.choice(OTHER_DTYPES))
    elif way == "shape" and value.dim():
        dimension = draw.randrange(value.dim())
        doubled = value.repeat_interleave(2, dimension)
        value = doubled if draw.random() < 0.5 else value.narrow(dimension, 0, 0)
    elif way == "dimension":
        value = value.unsqueeze(0) if draw.random() < 0.5 or not value.dim() else value.flatten()
    elif way == "device":
        value = value.to("meta")
    elif way == "entry" and value.numel() and value.dtype in INDICES:
        value = value.clone(memory_format=torch.contiguous_format)
        entry = draw.choice(ENTRIES)
        if value.dtype == torch.int64 or -(2**31) <= entry < 2**31:
            value.view(-1)[draw.randrange(value.numel())] = entry
    arguments[name] = value


def tensors(results):
    return [results] if torch.is_tensor(results) else list(results)


def check_meta(operator, arguments):
    """Compare the shapes of the results for meta tensors with those for zeros and empty lists."""
    on_meta = {}
    on_cpu = {}
    for name, value in arguments.items():
        on_meta[name] = on_cpu[name] = value
        if torch.is_tensor(value):
            fill = -1 if name in ("list_neigh", "edge_index") else 0
            on_meta[name] = value.to("meta")
            on_cpu[name] = torch.full_like(value, fill)
    shapes = [x.shape for x in tensors(operator(**on_meta))]
    assert shapes == [x.shape for x in tensors(operator(**on_cpu))]


def check(name, seed):
    operator = getattr(calcops_jit, name)
    draw = random.Random(f"{name} {seed}")
    arguments = valid_arguments(name, draw, seed)
    is_changed = draw.random() < 0.6
    if is_changed:
        change(arguments, draw)
    elif draw.random() < 0.2 and not name.startswith("calculate"):
        check_meta(operator, arguments)
        return
    try:
        results = tensors(operator(**arguments))
    except RuntimeError as error:
        assert is_changed, error
        line = str(error).splitlines()[0]
        argument = re.match(r"(?:calcops|CalcOps)::_?\w+: expected `(\w+)` .*, got ", line)
        shapes = {key: getattr(value, "shape", value) for key, value in arguments.items()}
        assert argument, f"{line}\n{shapes}"
        assert argument[1] in arguments, f"{line}\n{shapes}"
        return
    if any(x.is_meta for x in results):
        return
    expected = tensors(OPERATORS[name][1](**doubled(arguments)))
    for result, value in zip(results, expected, strict=True):
        tolerance = 1e-5 if result.dtype == torch.float32 else 1e-11
        torch.testing.assert_close(
            result, value.to(result.dtype), rtol=tolerance, atol=tolerance, equal_nan=True
        )


def check_all(name, first, count):
    for seed in range(first, first + count):
        try:
            check(name, seed)
        except Exception as error:
            raise AssertionError(f"check({name!r}, {seed}): {error}") from error


@pytest.mark.parametrize("name", OPERATORS)
def test_any_call_gives_the_references_results_or_names_an_argument(name, one_thread):
    check_all(name, 0, 200)


@pytest.mark.long
@pytest.mark.parametrize("name", OPERATORS)
def test_many_calls_give_the_references_results_or_name_an_argument(name, one_thread):
    check_all(name, 200, 50_000)
