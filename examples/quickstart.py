"""Silicon in a hundred lines: its energy in PyTorch, its forces and its stress from CalcOps.

python examples/quickstart.py       # prints within seconds, and draws build/quickstart/silicon.png
cohesive energy  -4.336600 eV/atom; -2 epsilon = -4.3366
forces           off those of plain autograd by 2e-15 of up to 7.8 eV/A
pressure         off -dE/dV by 4e-15 of 10.6 GPa
bulk modulus     101.42 GPa; published: 101.4, E. R. Cowley, PRL 60, 2379 (1988)
"""

import os

import torch
from ase import units
from ase.build import bulk
from calcops.potentials.neighbours import neighbours
from matplotlib import pyplot as plt

import calcops_jit

# F. H. Stillinger and T. A. Weber, Phys. Rev. B 31, 5262 (1985), in the notation of LAMMPS's Si.sw.
kEpsilon, kSigma, kCut, kLattice = 2.1683, 2.0951, 1.80 * 2.0951, 5.43095  # eV, A, A, A
kA, kB, kLambda, kGamma, kCosine = 7.049556277, 0.6022245584, 21.0, 1.20, -1 / 3


def lists_of(atoms):
    """1. The list: list_neigh [1,n,K], -1 in empty slots; shift [1,n,K,3], what to add to r_j."""
    positions, cell = torch.tensor(atoms.positions), torch.tensor(atoms.cell.array)
    return neighbours(positions[None], cell[None], kCut + 0.5)


def pair_vectors(list_neigh, shift, positions, deformation):
    """2. Rij = r_j - r_i [B,n,K,3], deformed; empty slots get a vector beyond the cutoff."""
    Rij = (positions[list_neigh.clamp(min=0)] - positions[:, None] + shift) @ deformation
    return Rij.where((list_neigh >= 0)[..., None], 2 * kCut)


def describe(Rij):
    """3. The descriptor Ri [B,n,K,4] = (r, x, y, z), and Ri_d [B,n,K,4,3] = dRi/dr_i."""
    r = Rij.norm(dim=-1, keepdim=True)
    by_rj = torch.cat([(Rij / r)[..., None, :], torch.eye(3).to(Rij).expand(*Rij.shape, 3)], -2)
    return torch.cat([r, Rij], -1), -by_rj  # Rij = r_j - r_i, hence the minus


def atom_energies(Ri):
    """4. The energy of each atom [B,n]: half of its pairs, and the triples around it."""
    r, direction = Ri[..., 0], Ri[..., 1:] / Ri[..., :1]
    gap = (r - kCut).clamp(max=-1e-3)  # exp(sigma / gap) is 0 from there on
    pair = kA * kEpsilon * (kB * (kSigma / r) ** 4 - 1) * torch.exp(kSigma / gap)
    h = torch.exp(kGamma * kSigma / gap)
    angle = (direction @ direction.mT - kCosine).square()  # [B,n,K,K], at i between j and k
    triple = kLambda * kEpsilon * h[..., :, None] * h[..., None, :] * angle
    return pair.sum(-1) / 2 + triple.triu(1).sum((-1, -2))


def evaluate(list_neigh, Rij):
    """5. dE = dE/dRi by autograd; from it, force [B,n,3] and virial [B,3,3] by the operator."""
    Ri, Ri_d = describe(Rij)
    energy = atom_energies(Ri.requires_grad_()).sum(-1)
    (dE,) = torch.autograd.grad(energy.sum(), Ri, create_graph=True)
    force, virial, _ = calcops_jit.force_virial(list_neigh, dE, Ri_d.flatten(2, 3), Rij)
    return energy, force, virial


if __name__ == "__main__":
    # Displaced atoms: forces by the operator, and by autograd through the positions.
    eye = torch.eye(3, dtype=torch.float64)
    atoms = bulk("Si", "diamond", a=kLattice, cubic=True).repeat(6)
    atoms.rattle(0.1, seed=0)
    lists, x = lists_of(atoms), torch.from_numpy(atoms.positions).requires_grad_()
    energy, force, _ = evaluate(lists[0], pair_vectors(*lists, x, eye))
    (slope,) = torch.autograd.grad(energy.sum(), x)
    off, largest = (force[0] + slope).abs().max(), slope.abs().max()
    # A perfect crystal, stretched by s in 61 frames: pressure and its derivative by s.
    atoms = bulk("Si", "diamond", a=kLattice, cubic=True)
    lists, x = lists_of(atoms), torch.from_numpy(atoms.positions)
    s = torch.linspace(-0.03, 0.03, 61, dtype=torch.float64, requires_grad=True)
    Rij = pair_vectors(*lists, x, (1 + s)[:, None, None, None] * eye)
    energy, _, virial = evaluate(lists[0].expand(61, -1, -1), Rij)
    volume = atoms.get_volume() * (1 + s) ** 3
    pressure = virial.diagonal(dim1=1, dim2=2).sum(1) / (3 * volume) / units.GPa
    dE, dP = (torch.autograd.grad(y.sum(), s, retain_graph=True)[0] for y in (energy, pressure))
    p = (-dE * (1 + s) / (3 * volume) / units.GPa).detach()  # -dE/dV
    a, P, B = kLattice * (1 + s.detach()), pressure.detach(), -dP[30] / 3
    print(f"cohesive energy  {energy[30] / len(atoms):.6f} eV/atom; -2 epsilon = -4.3366")
    print(f"forces           off those of plain autograd by {off:.0e} of up to {largest:.1f} eV/A")
    print(f"pressure         off -dE/dV by {(P - p).abs().max():.0e} of {P[0]:.1f} GPa")
    print(f"bulk modulus     {B:.2f} GPa; published: 101.4, E. R. Cowley, PRL 60, 2379 (1988)")
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(a, p, "-", a[::5], P[::5], "o")
    axes.set(title="silicon under pressure", xlabel="lattice constant / Å", ylabel="pressure / GPa")
    axes.legend(["-dE/dV", "trace of the virial / 3V"])
    os.makedirs("build/quickstart", exist_ok=True)
    figure.savefig("build/quickstart/silicon.png", dpi=120)
    print(os.path.abspath("build/quickstart/silicon.png"))
