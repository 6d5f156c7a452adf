"""Silicon: a potential written in PyTorch whose forces and stress come from CalcOps.

    python examples/quickstart.py [--cells 8] [--steps 200] [--out build/quickstart]

The energy of the Stillinger-Weber potential is ordinary torch code on per-pair descriptors Ri; autograd gives
dE/dRi, and calcops_jit.force_virial turns that into forces, virial and stress. The script checks them against
autograd through the positions and against central differences, runs 200 fs of molecular dynamics, and at last
straightens a photograph with calcops_jit.warp_perspective. That takes some twenty seconds on two cores and prints
the paths of two pictures, and before them a table that begins

    perfect crystal                                -4.336600  eV/atom; -2 epsilon = -4.3366
    forces against autograd                          3.1e-16  relative

Units: eV, Angstrom, amu and the unit of time that follows (1 fs = ase.units.fs).
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import vesin
from ase import units
from ase.build import bulk
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from skimage import data
from tqdm import tqdm

import calcops_jit

# F. H. Stillinger and T. A. Weber, Phys. Rev. B 31, 5262 (1985), in the notation of LAMMPS's Si.sw.
kEpsilon, kSigma, kCut = 2.1683, 2.0951, 1.80 * 2.0951  # eV, A, A
kA, kB, kP, kQ = 7.049556277, 0.6022245584, 4, 0
kLambda, kGamma, kCosTheta0 = 21.0, 1.20, -1 / 3
kLattice = 5.4309  # A
kSkin = 0.5  # A beyond the cutoff: a neighbour list holds until an atom has moved half of that


def describe(Rij):
    """Ri [B,n,K,4] = (1/r, x/r^2, y/r^2, z/r^2) of each pair and Ri_d [B,n,K,4,3], its derivative for atom i."""
    r2 = Rij.square().sum(-1, keepdim=True)
    Ri = torch.cat([r2.rsqrt(), Rij / r2], -1)
    outer = Rij[..., :, None] * Rij[..., None, :] / r2[..., None].square()
    # Rij = r_j - r_i, so the derivative for atom i is minus that for Rij.
    Ri_d = torch.cat([(Rij / r2**1.5)[..., None, :], 2 * outer - torch.eye(3).to(Rij) / r2[..., None]], -2)
    return Ri, Ri_d


def atom_energies(Ri):
    """Energy of each atom [B,n]: half of its pair terms and the three-body terms it is the centre of."""
    inverse, direction = Ri[..., 0], Ri[..., 1:] / Ri[..., :1]
    # From 0.001 A before the cutoff on, exp(sigma / gap) is 0 in double precision, and so are its derivatives.
    gap = (1 / inverse - kCut).clamp(max=-1e-3)
    s = kSigma * inverse
    pair = kA * kEpsilon * (kB * s**kP - s**kQ) * torch.exp(kSigma / gap)
    h = torch.exp(kGamma * kSigma / gap)
    cosine = direction @ direction.mT  # [B,n,K,K], the angle at atom i between its neighbours j and k
    triple = kLambda * kEpsilon * h[..., :, None] * h[..., None, :] * (cosine - kCosTheta0).square()
    return pair.sum(-1) / 2 + triple.triu(1).sum((-1, -2))


class StillingerWeber(torch.nn.Module):
    """The interface all CalcOps examples share; nothing here but atom_energies() knows the potential."""

    def forward(self, types, list_neigh, Rij, nghost=0):
        """-> energy [B], atom_energy [B,n], force [B,n+nghost,3], virial [B,3,3], atom_virial [B,n+nghost,3,3]"""
        Ri, Ri_d = describe(Rij)
        Ri.requires_grad_()
        atom_energy = atom_energies(Ri)
        (dE,) = torch.autograd.grad(atom_energy.sum(), Ri)
        force, virial, atom_virial = calcops_jit.force_virial(list_neigh, dE, Ri_d.flatten(2, 3), Rij, nghost)
        return atom_energy.detach().sum(-1), atom_energy.detach(), force, virial, atom_virial


def neighbours(positions, cell):
    """list_neigh [1,n,K] and shift [1,n,K,3], the lattice vector to add to r_j - r_i; -1 marks an empty slot."""
    finder = vesin.NeighborList(cutoff=kCut + kSkin, full_list=True)
    i, j, S = finder.compute(points=positions.numpy(), box=cell.numpy(), periodic=True, quantities="ijS")
    order = np.argsort(i, kind="stable")
    i, j, S = (torch.from_numpy(a[order].astype(np.int64)) for a in (i, j, S))
    count = torch.bincount(i, minlength=len(positions))
    slot = torch.arange(len(i)) - (count.cumsum(0) - count)[i]
    list_neigh = torch.full((1, len(positions), int(count.max())), -1)
    list_neigh[0, i, slot] = j
    shift = torch.zeros(*list_neigh.shape, 3, dtype=positions.dtype)
    shift[0, i, slot] = S.to(cell) @ cell
    return list_neigh, shift


def pair_vectors(positions, list_neigh, shift):
    """Rij [1,n,K,3]; an empty slot gets a vector beyond the cutoff, where every term of the energy is zero."""
    Rij = positions[list_neigh.clamp(min=0)] - positions[:, None] + shift
    return Rij.where((list_neigh >= 0)[..., None], torch.tensor([2 * kCut, 0, 0], dtype=Rij.dtype))


def force_virial_in_torch(list_neigh, dE, Ri_d, Rij):
    """What calcops_jit.force_virial computes, in torch's own operators; relies on dE = 0 in empty slots."""
    B, n, K = list_neigh.shape
    g = (dE[..., None, :] @ Ri_d.view(B, n, K, 4, 3)).squeeze(-2)  # the force of pair (i,j) on j
    w = torch.einsum("bnka,bnkc->bnkac", g, Rij)
    rows = (list_neigh.clamp(min=0) + n * torch.arange(B)[:, None, None]).flatten()
    force = (-g.sum(2)).view(-1, 3).index_add_(0, rows, g.view(-1, 3)).view(B, n, 3)
    atom_virial = w.new_zeros(B * n, 3, 3).index_add_(0, rows, w.view(-1, 3, 3)).view(B, n, 3, 3)
    return force, w.sum((1, 2)), atom_virial


def milliseconds(functions, arguments, repeats=50):
    """The least time of each function; they take turns, so that a busy machine is equally busy for all."""
    times = np.empty((repeats, len(functions)))
    for turn in times:
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function(*arguments)
            turn[i] = 1e3 * (time.perf_counter() - start)
    return times.min(0)


def compare(model, atoms, row):
    """Prints what the operators give for `atoms` beside independent ways to the same numbers."""
    positions, cell = torch.from_numpy(atoms.positions), torch.from_numpy(atoms.cell.array)
    list_neigh, shift = neighbours(positions, cell)

    def energies_at(positions):
        return atom_energies(describe(pair_vectors(positions, list_neigh, shift))[0])

    Rij = pair_vectors(positions, list_neigh, shift)
    _, _, (force,), (virial,), _ = model(None, list_neigh, Rij)
    stress = -virial / atoms.get_volume()
    leaf = positions.clone().requires_grad_()
    (autograd,) = torch.autograd.grad(energies_at(leaf).sum(), leaf)

    h = 1e-4  # A; the energies of single atoms are subtracted, so that nothing cancels in a large sum
    differences = []
    for atom, axis in [(0, 0), (len(atoms) // 2, 1), (len(atoms) - 1, 2)]:
        step = torch.zeros_like(positions)
        step[atom, axis] = h
        slope = (energies_at(positions + step) - energies_at(positions - step)).sum() / (2 * h)
        differences.append((force[atom, axis] + slope).abs())

    Ri, Ri_d = describe(Rij)
    (dE,) = torch.autograd.grad(atom_energies(Ri.requires_grad_()).sum(), Ri)
    arguments = list_neigh, dE, Ri_d.flatten(2, 3), Rij
    ours, torchs = milliseconds([calcops_jit.force_virial, force_virial_in_torch], arguments)
    size = f"{len(atoms)} atoms x {list_neigh.shape[2]} slots"

    row("forces against autograd", (force + autograd).abs().max() / autograd.abs().max(), ".1e", "relative")
    row("forces against differences", max(differences), ".1e", f"eV/A, of up to {force.abs().max():.2f}")
    row("sum of forces", force.sum(0).abs().max(), ".1e", "eV/A")
    row("stress xx, yy, zz", stress.diagonal() / units.GPa, "+.4f", "GPa")
    row("stress yz, xz, xy", stress[[1, 0, 0], [2, 2, 1]] / units.GPa, "+.4f", "GPa")
    row("stress, asymmetry", (stress - stress.T).abs().max() / units.GPa, ".1e", "GPa")
    row("force_virial, CalcOps", ours, ".2f", f"ms for {size}")
    row("force_virial, plain torch", torchs, ".2f", f"ms, {torchs / ours:.1f} times as long")


def simulate(model, atoms, steps, row):
    """Velocity Verlet at constant energy from rest -> time [fs], potential and kinetic energy [eV/atom]."""
    dt, mass = 1.0 * units.fs, torch.from_numpy(atoms.get_masses())[:, None]
    positions, cell = torch.from_numpy(atoms.positions.copy()), torch.from_numpy(atoms.cell.array)
    velocities, listed, trace = torch.zeros_like(positions), torch.full_like(positions, torch.inf), []
    for step in tqdm(range(steps + 1), desc="NVE", unit="step", disable=None):
        positions += dt * velocities
        if (positions - listed).norm(dim=1).max() > kSkin / 2:
            listed, (list_neigh, shift) = positions.clone(), neighbours(positions, cell)
        energy, _, (force,), _, _ = model(None, list_neigh, pair_vectors(positions, list_neigh, shift))
        half_kick = dt / 2 * force / mass
        if step:
            velocities += half_kick
        trace.append((step, energy.item() / len(atoms), (mass * velocities**2).sum().item() / 2 / len(atoms)))
        velocities += half_kick
    time_fs, potential, kinetic = np.array(trace).T
    total, half = potential + kinetic, len(trace) // 2
    drift = total[half:].mean() - total[:half].mean()
    row("NVE, total energy", np.ptp(total) * 1e3, ".4f", "meV/atom between its extremes")
    row("NVE, drift", drift * 1e3, "+.4f", "meV/atom, mean of the 2nd half - mean of the 1st")
    row("NVE, temperature", 2 / 3 * kinetic[half:].mean() / units.kB, ".0f", "K, mean of the 2nd half")
    return time_fs, potential, kinetic


def plot_energies(path, time_fs, potential, kinetic, title):
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    above = potential + 2 * kEpsilon  # the perfect crystal has -2 epsilon
    for energy, label in [(above, "potential"), (kinetic, "kinetic"), (above + kinetic, "total")]:
        left.plot(time_fs, energy * 1e3, label=label)
    left.set(xlabel="time / fs", ylabel="meV/atom above the perfect crystal", ylim=(0, None), title=title)
    left.legend()
    right.plot(time_fs, 2 / 3 * kinetic / units.kB, color="tab:orange")
    right.set(xlabel="time / fs", ylabel="temperature / K", ylim=(0, None), title="from displaced atoms at rest")
    figure.savefig(path, dpi=120)


def homography(source, target):
    """The 3x3 matrix that takes four points (x, y) of `source` to those of `target`."""
    rows = []
    for (x, y), (u, v) in zip(source, target):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
    solution = np.linalg.solve(np.array(rows, dtype=float), np.array(target, dtype=float).ravel())
    return torch.from_numpy(np.append(solution, 1).reshape(3, 3))


def straighten():
    """A page of notes, photographed at a slant (scikit-image's data.text()), seen from straight above."""
    photograph = torch.from_numpy(data.text())  # uint8 [172, 448]
    # A stretch of one line of writing, between two of the page's ruled lines, and where it belongs.
    slanted = [(155, 15), (360, 95), (260, 130), (65, 40)]
    upright = [(40, 110), (640, 110), (640, 210), (40, 210)]
    matrix = homography(slanted, upright)
    straight = calcops_jit.warp_perspective(photograph, matrix, dsize=(344, 680), border_value=[255.0])
    return slanted, upright, photograph, straight


def plot_photograph(path, slanted, upright, photograph, straight):
    figure = Figure(figsize=(12, 3), layout="constrained")
    axes = figure.subplots(1, 2, width_ratios=[image.shape[1] / image.shape[0] for image in (photograph, straight)])
    titles = "as photographed", "warp_perspective"
    for axis, image, corners, title in zip(axes, (photograph, straight), (slanted, upright), titles):
        axis.imshow(image, cmap="gray", vmin=0, vmax=255)
        axis.add_patch(Polygon(corners, fill=False, edgecolor="tab:red"))
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=8, help="cubic cells along each side, 8 atoms each")
    parser.add_argument("--steps", type=int, default=200, help="steps of 1 fs")
    parser.add_argument("--out", type=Path, default=Path("build/quickstart"), help="folder of the pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    def row(name, value, form, note):
        print(f"{name:<28}{'  '.join(format(float(v), form) for v in np.atleast_1d(value)):>28}  {note}")

    model = StillingerWeber()
    atoms = bulk("Si", "diamond", a=kLattice, cubic=True).repeat(options.cells)
    positions, cell = torch.from_numpy(atoms.positions), torch.from_numpy(atoms.cell.array)
    list_neigh, shift = neighbours(positions, cell)
    energy, *_ = model(None, list_neigh, pair_vectors(positions, list_neigh, shift))
    row("perfect crystal", energy / len(atoms), ".6f", f"eV/atom; -2 epsilon = {-2 * kEpsilon:.4f}")

    atoms.rattle(stdev=0.055, seed=0)  # some 300 K once half of it is kinetic
    compare(model, atoms, row)
    trace = simulate(model, atoms, options.steps, row)

    energies, photograph = options.out / "energies.png", options.out / "photograph.png"
    plot_energies(energies, *trace, title=f"{len(atoms)} Si atoms, Stillinger-Weber, NVE")
    plot_photograph(photograph, *straighten())
    print(energies.resolve(), photograph.resolve(), sep="\n")


if __name__ == "__main__":
    main()
