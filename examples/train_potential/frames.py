"""Frames of a crystal to learn from: dynamics under Stillinger-Weber, all runs in one batch.

    frames = generate(kSystems["silicon"], trajectories=24, samples=10, seed=0)

This gives F = 240 frames of n = 64 atoms. The units are eV, Angstrom, amu and the unit of time that
follows (1 fs = ase.units.fs).
"""

import numpy as np
import torch
import vesin
from ase import units
from tqdm import tqdm

kTemperatures = 150, 300, 450, 600  # K
kStrain = 0.02  # of every component of the cell's deformation, at most
kSkin = 0.5  # A beyond the cutoff: a neighbour list holds until an atom has moved half of that
kTimestep = 2 * units.fs


def neighbours(positions, cells, cutoff, types=None, pbc=None):
    """list_neigh [B,n,K], -1: empty slot, and shift [B,n,K,3], what to add to r_j - r_i.

    types [B,n]: -1 where there is no atom; None: there are n. pbc [B,3]; None: periodic.
    """
    B, n, _ = positions.shape
    finder = vesin.NeighborList(cutoff=cutoff, full_list=True)
    rows = []
    for b, (points, cell) in enumerate(zip(positions.numpy(), cells.numpy())):
        count = n if types is None else int((types[b] >= 0).sum())
        periodic = True if pbc is None else pbc[b].numpy()
        i, j, S = finder.compute(
            points=points[:count], box=cell, periodic=periodic, quantities="ijS"
        )
        order = np.argsort(i, kind="stable")
        rows.append((i[order].astype(np.int64), j[order].astype(np.int64), S[order] @ cell))
    counts = np.stack([np.bincount(i, minlength=n) for i, _, _ in rows])
    slots = max(1, counts.max())
    list_neigh, shift = np.full((B, n, slots), -1), np.zeros((B, n, slots, 3))
    for b, (i, j, S) in enumerate(rows):
        slot = np.arange(len(i)) - (counts[b].cumsum() - counts[b])[i]
        list_neigh[b, i, slot], shift[b, i, slot] = j, S
    return torch.from_numpy(list_neigh), torch.from_numpy(shift)


def pair_vectors(positions, list_neigh, shift):
    """Rij [B,n,K,3]; what an empty slot holds is not used."""
    rows = list_neigh.clamp(min=0).flatten(1)[..., None].expand(-1, -1, 3)
    return positions.gather(1, rows).view(shift.shape) - positions[:, :, None] + shift


def simulate(model, atoms, positions, velocities, cells, steps, every=1, desc="NVE"):
    """Velocity Verlet of B crystals of `atoms` at constant energy; every `every` steps it yields a
    dict of types [B,n], positions, force [B,n,3], cells, virial [B,3,3], energy, kinetic [B].
    """
    masses = torch.from_numpy(atoms.get_masses())[:, None]
    types = torch.tensor([model.type_names.index(symbol) for symbol in atoms.symbols]).repeat(
        len(cells), 1
    )
    positions, velocities, listed = positions.clone(), velocities.clone(), None
    for step in tqdm(range(steps + 1), desc=desc, unit="step", disable=None):
        if step:
            positions += kTimestep * velocities
        if listed is None or (positions - listed).norm(dim=-1).max() > kSkin / 2:
            listed = positions.clone()
            list_neigh, shift = neighbours(positions, cells, model.cutoff + kSkin)
        Rij = pair_vectors(positions, list_neigh, shift)
        energy, _, force, virial, _ = model(types, list_neigh, Rij)
        half_kick = kTimestep / 2 * force / masses
        if step:
            velocities += half_kick
        if step % every == 0:
            kinetic = (masses / 2 * velocities.square()).sum((1, 2))
            state = dict(
                types=types,
                positions=positions.clone(),
                cells=cells,
                energy=energy,
                kinetic=kinetic,
            )
            yield state | dict(force=force, virial=virial)
        velocities += half_kick


def crystals(atoms, temperatures, strains, generator):
    """Positions [B,n,3], velocities, cells [B,3,3] of a perfect crystal under strains [B,3,3].

    The atoms start with twice the kinetic energy of their temperature: half of it goes into the
    springs.
    """
    deform = torch.eye(3, dtype=torch.float64) + strains
    positions, cells = (
        torch.from_numpy(atoms.positions) @ deform,
        torch.from_numpy(atoms.cell.array) @ deform,
    )
    masses = torch.from_numpy(atoms.get_masses())[:, None]
    kT = units.kB * torch.as_tensor(temperatures, dtype=torch.float64)[:, None, None]
    velocities = (2 * kT / masses).sqrt() * torch.randn(
        positions.shape, generator=generator, dtype=torch.float64
    )
    return positions, velocities - (masses * velocities).sum(1, keepdim=True) / masses.sum(), cells


def generate(system, trajectories, samples, seed, cells_each_way=2, settle=160, every=20):
    """`samples` frames of each of `trajectories`, in this order: types [F,n], positions, force
    [F,n,3], cells, virial [F,3,3], energy, kinetic [F]. The trajectories differ in temperature,
    strain and velocities; `settle` and `every`: steps.
    """
    generator = torch.Generator().manual_seed(seed)
    temperatures = [kTemperatures[i % len(kTemperatures)] for i in range(trajectories)]
    strains = kStrain * (
        2 * torch.rand(trajectories, 3, 3, generator=generator, dtype=torch.float64) - 1
    )
    atoms = system.cell.repeat(cells_each_way)
    start = crystals(atoms, temperatures, (strains + strains.mT) / 2, generator)
    steps = settle + every * (samples - 1)
    states = list(simulate(system.labels, atoms, *start, steps, every, "frames"))[-samples:]
    return {
        key: torch.stack([state[key] for state in states], 1).flatten(0, 1) for key in states[0]
    }
