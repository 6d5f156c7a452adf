"""SevenNet's forces and stress beside the operator's: values, derivatives, times, and dynamics.

build/graph_potential/bin/python -W ignore examples/graph_potential/compare.py
"""

import argparse
import copy
import time

import ase.units
import numpy
import sevenn._keys as KEY
import torch
from ase.build import bulk, molecule
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary
from ase.md.verlet import VelocityVerlet
from sevenn.atom_graph_data import AtomGraphData
from sevenn.calculator import SevenNetCalculator
from sevenn.nn.force_output import ForceStressOutputFromEdge
from sevenn.train.dataload import unlabeled_atoms_to_graph
from sevennet import EdgeForces, with_edge_forces
from torch_geometric.data import Batch

RESULTS = {
    "forces, eV/A": KEY.PRED_FORCE,
    "stress, eV/A^3": KEY.PRED_STRESS,
    "virials, eV": KEY.PRED_ATOMIC_VIRIAL,
}


def structures():
    """Three of other sizes and elements, off their equilibria."""
    water = molecule("H2O", vacuum=4, pbc=True)
    found = {
        "NaCl": bulk("NaCl", "rocksalt", 5.64, cubic=True),
        "Si": bulk("Si", cubic=True),
        "H2O": water,
    }
    for seed, atoms in enumerate(found.values()):
        atoms.rattle(0.1, seed=seed)
    return found


def graph(atoms, cutoff=5.0):
    return AtomGraphData.from_numpy_dict(unlabeled_atoms_to_graph(atoms, cutoff, with_shift=False))


def batch():
    return Batch.from_data_list([graph(atoms) for atoms in structures().values()])


def compare_values(theirs, ours):
    """Three structures in one graph by both, and each alone."""
    for model in (theirs, ours):
        model.set_is_batch_data(True)
    a, b = theirs(batch()), ours(batch())
    for model in (theirs, ours):
        model.set_is_batch_data(False)
    alone = [ours(graph(atoms)) for atoms in structures().values()]
    print(f"{', '.join(structures())} in one graph    largest  ours - SevenNet's  batch - alone")
    for name, key in RESULTS.items():
        each = torch.cat([x[key].view(-1, b[key].shape[1]) for x in alone])
        largest, apart, moved = (x.abs().max() for x in (b[key], b[key] - a[key], b[key] - each))
        print(f"  {name:24} {largest:11.4f} {apart:19.1e} {moved:14.1e}")


def compare_training(theirs, ours):
    """A loss of forces and stresses: its gradient is a second derivative of the energy."""
    gradients = []
    for model in (theirs, ours):
        model.train().set_is_batch_data(True)
        result = model(batch())
        loss = (
            result[KEY.PRED_FORCE].square().mean() + 100 * result[KEY.PRED_STRESS].square().mean()
        )
        weights = [w for w in model.parameters() if w.requires_grad]
        found = torch.autograd.grad(loss, weights, materialize_grads=True)
        gradients.append(torch.cat([x.flatten() for x in found]))
        model.eval().set_is_batch_data(False)
    a, b = gradients
    apart = (b - a).norm() / a.norm()
    print(
        "a loss of forces and stress, "
        f"its gradient for {len(a):,} weights: {apart:.0e} of its length apart"
    )


def compare_times(seconds):
    """The two modules on a crystal's edges, where the energy's own gradient costs one product."""
    data = graph(bulk("NaCl", "rocksalt", 5.64, cubic=True) * (12, 12, 12)).to_dict()
    data[KEY.EDGE_VEC].requires_grad_()
    data[KEY.ATOMIC_ENERGY] = torch.zeros(len(data[KEY.POS]))
    slope, best = torch.randn_like(data[KEY.EDGE_VEC]), [float("inf")] * 2
    theirs, ours = ForceStressOutputFromEdge(use_atomic_virial=True).eval(), EdgeForces().eval()
    theirs._is_batch_data = ours._is_batch_data = False
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, module in enumerate((theirs, ours)):
            data[KEY.PRED_TOTAL_ENERGY] = (slope * data[KEY.EDGE_VEC]).sum()
            start = time.perf_counter()
            module(data)
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    print(f"{len(data[KEY.POS]):,} atoms, {len(slope):,} edges, threads: {torch.get_num_threads()}")
    print("  SevenNet's module {:.1f} ms, with the operator {:.1f} ms".format(*best))


def run_at_constant_energy(name, model, steps):
    """Returns the atoms as they are at the end."""
    atoms = structures()["NaCl"]
    atoms.calc = SevenNetCalculator(model, file_type="model_instance")
    MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=numpy.random.RandomState(0))
    Stationary(atoms)
    dynamics, energies, times = VelocityVerlet(atoms, 2 * ase.units.fs), [], []
    for _ in range(steps):
        start = time.perf_counter()
        dynamics.run(1)
        times.append(1e3 * (time.perf_counter() - start))
        energies.append(1e3 * atoms.get_total_energy() / len(atoms))
    drift = numpy.polyfit(0.002 * numpy.arange(steps), energies, 1)[0]
    spread, fastest = numpy.ptp(energies), min(times)
    print(
        f"  {name:18} within {spread:.3f} meV/atom, "
        f"drift {drift:+.3f} meV/atom/ps; fastest step {fastest:.0f} ms"
    )
    return atoms


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="of 2 fs at constant energy")
    parser.add_argument("--seconds", type=float, default=3, help="of timing")
    args = parser.parse_args()
    theirs = SevenNetCalculator("7net-0", device="cpu", compute_atomic_virial=True).model
    ours = with_edge_forces(copy.deepcopy(theirs))
    compare_values(theirs, ours)
    compare_training(theirs, ours)
    compare_times(args.seconds)
    print(f"NaCl, 8 atoms, {args.steps} steps of 2 fs from 300 K, total energy:")
    ends = [
        run_at_constant_energy(*one, args.steps)
        for one in (("SevenNet's", theirs), ("with the operator", ours))
    ]
    apart = abs(ends[0].positions - ends[1].positions).max()
    print(f"  the two ends are {apart:.1e} A apart")


if __name__ == "__main__":
    main()
