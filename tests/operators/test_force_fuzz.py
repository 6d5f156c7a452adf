"""Random calls of the force operators give the reference's results or a documented error."""

import functools

import pytest
import reference
import torch
from fuzz import DTYPES, INDICES, check_calls
from reference import index_reference, order_reference
from test_edge_force import reference_force_virial

import calcops_jit


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
    return {key: value for key, value in arguments.items() if key in names}


def check_operator(name, numbers):
    arguments = functools.partial(valid_arguments, name)
    check_calls(getattr(calcops_jit, name), arguments, OPERATORS[name][1], numbers)


@pytest.mark.parametrize("name", OPERATORS)
def test_any_call_gives_the_references_results_or_names_an_argument(name, one_thread):
    check_operator(name, range(200))


@pytest.mark.long
@pytest.mark.parametrize("name", OPERATORS)
def test_many_calls_give_the_references_results_or_name_an_argument(name, one_thread):
    check_operator(name, range(200, 50_000))
