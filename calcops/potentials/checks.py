"""What save() of package.py checks: a model before it is written, and the written file.

Every host relies on finite results, on energies that go to zero at the cutoff, and on messages that
pass no more layers than declared. The written file has to compute what its model does, also for
numbers of frames, atoms, ghosts and slots other than those with which it was made.
"""

import sympy
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

kResults = ("energy", "atom_energy", "force", "virial", "atom_virial")

# Frames, atoms, ghosts and slots of the systems for which a file is compared with its model.
kSizes = [(1, 1, 0, 1), (1, 13, 5, 9), (3, 20, 0, 17)]


def systems_for(model, dtype, device, one_frame=False):
    """Return arguments of a model, dicts by name, for systems of the sizes above.

    Atoms are near the points of a grid. One atom has no neighbours, and another one none within the
    cutoff. The rows of the others have pairs beyond it, too, and images of the atom itself. An atom
    alone has its own image as its neighbour. Empty slots hold NaN.

    Args:
        model: a Potential.
        dtype: of the pair vectors.
        device: of all tensors.
        one_frame: True for a model that may take no more.
    """
    return [
        system_of(model, 1 if one_frame else frames, natoms, nghost, slots, dtype, device)
        for frames, natoms, nghost, slots in kSizes
    ]


def system_of(model, frames, natoms, nghost, slots, dtype, device):
    """Return arguments of a model, a dict by name, for a system of this size."""
    n = natoms + nghost
    generator = torch.Generator().manual_seed(n)
    side = torch.arange(round(n ** (1 / 3)) + 1, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side, side)
    grid = grid[torch.randperm(len(grid), generator=generator)[:n]]
    moves = torch.rand(frames, n, 3, generator=generator, dtype=torch.float64) / 5
    x = 0.45 * model.cutoff * (grid + moves)

    distances = torch.cdist(x[:, :natoms], x)
    own = torch.arange(natoms)
    distances[:, own, own] = 0.9 * model.cutoff  # to an image of the atom itself
    nearest = distances.argsort(-1)[..., : min(slots, getattr(model, "neighbors", 0) or slots)]
    Rij = x.gather(1, nearest.flatten(1)[..., None].expand(-1, -1, 3)).view(*nearest.shape, 3)
    Rij -= x[:, :natoms, None]
    Rij[..., 0] += 0.9 * model.cutoff * (nearest == own[:, None]).double()

    is_pair = distances.gather(-1, nearest) < 1.2 * model.cutoff
    if natoms > 1:
        is_pair &= torch.rand(is_pair.shape, generator=generator) < 0.9
        is_pair[:, natoms // 2] = False
        Rij[:, natoms - 1] *= 5  # of the atom with no neighbour within the cutoff
    Rij = Rij.where(is_pair[..., None], torch.nan)

    system = {
        "types": torch.randint(len(model.type_names), (n,), generator=generator).to(device),
        "list_neigh": nearest.where(is_pair, -1).to(device),
        "Rij": Rij.to(device, dtype),
        "nghost": nghost,
    }
    if getattr(model, "layers", 1) > 1:
        system["owned"] = (torch.arange(natoms) <= natoms // 2).to(device)
    return system


def size_of(system):
    """Return the size of a system in words."""
    frames, natoms, slots = system["list_neigh"].shape
    return f"{frames} frames, {natoms} atoms, {system['nghost']} ghosts and {slots} slots"


def check_finite(results, what):
    """Raise ValueError if a result of a model is not finite.

    Args:
        results: those of potential.py.
        what: the system, for the message.
    """
    for k in (1, 2, 4, 3, 0):  # what names an atom comes first
        index = (~results[k].isfinite()).nonzero()
        if len(index):
            first = index[0].tolist()
            value = results[k][tuple(first)].item()
            atom = f"atom {first[1]} of " if kResults[k].startswith(("atom", "force")) else ""
            raise ValueError(
                f"expected finite results of the model, got {kResults[k]} {value} of "
                f"{atom}frame {first[0]} with {what}"
            )


def call(model, system):
    """Return the results of a model for a system."""
    types, list_neigh, Rij, nghost, *owned = system.values()
    return model(types, list_neigh, Rij, nghost, **({"owned": owned[0]} if owned else {}))


class Precision(TorchDispatchMode):
    """Records `eps` of the coarsest floating type of the tensors that a model computes.

    A model in float64 may have nets in float32.
    """

    eps = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Call a function and look at its results."""
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.eps = max(self.eps, torch.finfo(x.dtype).eps)
        return results


def results_for(model, systems):
    """Return the results of a model for each system, and how far those of a file may differ.

    The latter is relative to the largest value: half of the digits have to agree, since sums have
    another order in a file.

    Raises:
        ValueError: the results are not finite.
    """
    results = []
    precision = Precision()
    for system in systems:
        with precision:
            results.append(call(model, system))
        check_finite(results[-1], size_of(system))
    return results, precision.eps**0.5


def check_file(package, systems, expected, tolerance):
    """Raise ValueError if a file computes something else than its model.

    Args:
        package: the loaded file.
        systems: its arguments.
        expected: the results of the model for each system.
        tolerance: relative to the largest value of a result.
    """
    for system, of_model in list(zip(systems, expected)) * 2:  # TorchScript optimises a second call
        try:
            of_file = call(package.call, system)
        except RuntimeError as error:
            raise ValueError(
                f"expected a file for any size, got one that fails for {size_of(system)}: {error}"
            ) from error
        for k, name in enumerate(kResults):
            difference = (of_file[k] - of_model[k]).abs().max().item()
            largest = max(results[k].abs().max().item() for results in expected)
            if not difference <= tolerance * largest:  # or NaN
                raise ValueError(
                    f"expected a file that computes what its model does, got {name} that differ "
                    f"by {difference:.1e} of {largest:.1e} for {size_of(system)}"
                )


def compiled_parts(model):
    """Return a hint that names a part of a model that torch.jit compiled; empty if it has none."""
    compiled = [
        name for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)
    ]
    if not compiled:
        return ""
    return (
        f": torch.jit compiled {compiled[0]}, which fixes sizes in a trace; "
        "write an archive (.pt), or give a model without compiled parts"
    )


def check_sizes(graph, model):
    """Raise ValueError if a traced graph holds only for some numbers of atoms, ghosts or slots.

    torch.export and AOTInductor drop conditions on sizes under which the graph was traced, so such
    a package would compute nonsense at other sizes, or read beyond its memory.

    Args:
        graph: of make_fx, with types and list_neigh as the first inputs.
        model: a Potential, from which the graph was traced.
    """
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    symbols = [size.node._expr for size in (*inputs[0].shape, *inputs[1].shape)]
    words = sympy.symbols("all_atoms frames atoms slots", integer=True, positive=True)
    most = getattr(model, "neighbors", 0) or 10**4
    # PyTorch has conditions of its own that a size is neither 0 nor 1: check_file compares those.
    others = [
        (4, 2, 3, min(2, most)),
        (30, 5, 13, min(9, most)),
        (130, 11, 101, min(31, most)),
        # Each size large for itself: the operators limit products of sizes.
        (10**6, 2, 10**5, min(50, most)),
        (130, 10**4, 101, min(9, most)),
        (130, 2, 101, most),
    ]
    for guard in inputs[0].fake_mode.shape_env.guards:
        for sizes in others:
            if guard.expr.subs(dict(zip(symbols, sizes))) == sympy.false:
                condition = guard.expr.subs(dict(zip(symbols, words)))
                place = guard.sloc.framework_loc
                if not isinstance(place, str):
                    place = f"{place.filename}:{place.lineno}"
                raise ValueError(
                    "expected a model for any number of atoms, ghosts and slots, got one whose "
                    f"trace holds only for {condition}, as {place} has it{compiled_parts(model)}"
                )


def check_cutoff(model, device, is_smooth):
    """Raise ValueError if an energy depends on pairs beyond the cutoff, empty slots or their order.

    Such a result would depend on the list, which changes with the skin and the number of ranks.

    Args:
        model: a Potential in float64.
        device: of the model.
        is_smooth: True to check that a pair just inside the cutoff changes nothing, either.
    """
    ntypes = len(model.type_names)
    n = min(max(5, ntypes), 30)
    moves = torch.rand(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 5
    side = torch.arange(round(n ** (1 / 3)) + 1, dtype=torch.float64)
    x = 0.4 * model.cutoff * (torch.cartesian_prod(side, side, side)[:n] + moves)
    types = (torch.arange(n) % ntypes).to(device)
    neighbours = (torch.cdist(x, x) + 1e9 * torch.eye(n)).argsort(-1)[:, :4]
    more = torch.arange(n).expand(n, n)  # pairs of all types
    if getattr(model, "neighbors", 0):
        more = more[:, : max(1, model.neighbors - 4)]
    direction = torch.tensor([0.48, 0.6, 0.64], dtype=torch.float64)

    def energies(what, distance=None, is_reversed=False):
        """Return energies with more slots for every atom.

        They are empty, or hold pairs of all types at this distance, in cutoffs; 0: no more slots.
        """
        slots = torch.full_like(more, -1) if distance is None else more
        vectors = (distance or 1e3) * model.cutoff * direction.expand(*more.shape, 3)
        list_neigh = torch.cat([neighbours, slots], 1)[None]
        Rij = torch.cat([x[neighbours] - x[:, None], vectors], 1)[None]
        if distance == 0:
            list_neigh = list_neigh[..., :4]
            Rij = Rij[:, :, :4]
        if is_reversed:
            list_neigh = list_neigh.flip(-1)
            Rij = Rij.flip(-2)
        results = model(types, list_neigh.to(device), Rij.to(device), 0)
        check_finite(results, what)
        return results[1]

    without = energies(f"{n} atoms", 0)
    size = without.abs().sum().clamp(min=1e-300)
    distances = {
        "an empty slot": None,
        "a pair just beyond the cutoff": 1 + 1e-9,
        "a pair far beyond the cutoff": 1.7,
    }
    if is_smooth:
        distances["a pair just inside the cutoff"] = 1 - 1e-9
    for what, distance in distances.items():
        changed = energies(what, distance)
        change = (changed - without).abs().sum()
        tolerance = 1e-6 if "inside" in what else 1e-12
        if not change <= tolerance * size:  # or NaN
            raise ValueError(
                f"expected energies that go to zero at the cutoff {model.cutoff:g}, "
                f"got ones that {what} changes by {change.item():.1e}: "
                "multiply what a pair adds by an envelope such as "
                "torch.where(r < cutoff, (1 - (r / cutoff) ** 2) ** 2, 0)"
            )
    change = (energies("slots in another order", is_reversed=True) - without).abs().sum()
    if not change <= 1e-6 * size:  # of float32 nets, or NaN
        raise ValueError(
            "expected energies for slots in any order, "
            f"got ones that another order changes by {change.item():.1e}"
        )


def check_layers(model, device):
    """Raise ValueError if an energy depends on atoms farther away than model.layers messages.

    The energy of a chain of atoms has to be the sum of its parts: each atom alone on a rank, with
    the rows that LAMMPS gives to it, those of atoms fewer than `layers` steps away.

    Args:
        model: a Potential in float64.
        device: of the model.
    """
    # A message goes one or two atoms along the chain, which is longer than all of its steps.
    n = 4 * model.layers + 4
    x = torch.rand(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 10
    x[:, 0] += 0.45 * torch.arange(n)
    types = torch.arange(n) // 2 % len(model.type_names)  # pairs of equal types, too
    is_near = torch.cdist(x, x) < 1  # also for the atom itself
    # Atoms k steps apart are connected by power k of the matrix, and not by lower ones.
    steps = torch.zeros(n, n, dtype=torch.int64)
    for k in range(model.layers):
        steps += torch.linalg.matrix_power(is_near.double(), k) == 0
    list_neigh = torch.arange(n).where(is_near & ~torch.eye(n, dtype=torch.bool), -1)
    Rij = model.cutoff * (x - x[:, None])

    def atom_energies(types, list_neigh, Rij, owned=None):
        inputs = types.to(device), list_neigh[None].to(device), Rij[None].to(device)
        return model(*inputs, len(types) - len(list_neigh), owned=owned)[1]

    whole = atom_energies(types, list_neigh, Rij)
    sum_of_parts = torch.zeros((), dtype=torch.float64, device=device)
    for steps_away in steps:
        order = steps_away.argsort(stable=True)  # the atom itself comes first
        rows = order[: (steps_away < model.layers).sum()]
        number = order.argsort()
        part_list = number[list_neigh[rows]].where(list_neigh[rows] >= 0, -1)
        owned = (torch.arange(len(rows)) == 0).to(device)
        sum_of_parts += atom_energies(types[order], part_list, Rij[rows], owned).sum()
    difference = (whole.sum() - sum_of_parts).abs()
    if not difference <= 1e-12 * whole.abs().sum():  # or NaN
        raise ValueError(
            f"expected the energy of an atom to come by at most layers={model.layers} messages, "
            "each to the atom in row 0 of edge_index from that in row 1, "
            f"got energies that atoms farther away change by {difference.item():.1e}"
        )
