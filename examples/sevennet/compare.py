"""Compare SevenNet's forces and stress with the operator's: values, derivatives, times, dynamics.

build/graph_potential/bin/python -W ignore examples/sevennet/compare.py
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
from calcops.graph.sevennet import EdgeForces, with_edge_forces
from sevenn.atom_graph_data import AtomGraphData
from sevenn.calculator import SevenNetCalculator
from sevenn.nn.force_output import ForceStressOutputFromEdge
from sevenn.train.dataload import unlabeled_atoms_to_graph
from torch_geometric.data import Batch

RESULTS = {
    "forces, eV/A": KEY.PRED_FORCE,
    "stress, eV/A^3": KEY.PRED_STRESS,
    "virials, eV": KEY.PRED_ATOMIC_VIRIAL,
}


def structures():
    """Return three structures of different sizes and elements, by name, with displaced atoms."""
    atoms_of = {
        "NaCl": bulk("NaCl", "rocksalt", 5.64, cubic=True),
        "Si": bulk("Si", cubic=True),
        "H2O": molecule("H2O", vacuum=4, pbc=True),
    }
    for seed, atoms in enumerate(atoms_of.values()):
        atoms.rattle(0.1, seed=seed)
    return atoms_of


def graph(atoms, cutoff=5.0):
    """Return SevenNet's graph of a structure."""
    return AtomGraphData.from_numpy_dict(unlabeled_atoms_to_graph(atoms, cutoff, with_shift=False))


def batch():
    """Return one graph of all structures."""
    return Batch.from_data_list([graph(atoms) for atoms in structures().values()])


def compare_values(theirs, ours):
    """Print the differences of `ours` from `theirs` for one graph of all structures.

    Print also the differences between this graph and each structure alone, both with `ours`.
    """
    for model in (theirs, ours):
        model.set_is_batch_data(True)
    their_results = theirs(batch())
    our_results = ours(batch())
    for model in (theirs, ours):
        model.set_is_batch_data(False)
    alone = [ours(graph(atoms)) for atoms in structures().values()]
    print(f"{', '.join(structures())} in one graph    largest  ours - SevenNet's  batch - alone")
    for name, key in RESULTS.items():
        values = our_results[key]
        of_each = torch.cat([result[key].view(-1, values.shape[1]) for result in alone])
        largest = values.abs().max()
        difference = (values - their_results[key]).abs().max()
        of_batch = (values - of_each).abs().max()
        print(f"  {name:24} {largest:11.4f} {difference:19.1e} {of_batch:14.1e}")


def compare_training(theirs, ours):
    """Print how far the gradients of a loss of forces and stresses are apart.

    Such a gradient contains second derivatives of the energy.
    """
    gradients = []
    for model in (theirs, ours):
        model.train().set_is_batch_data(True)
        result = model(batch())
        force_loss = result[KEY.PRED_FORCE].square().mean()
        stress_loss = result[KEY.PRED_STRESS].square().mean()
        weights = [w for w in model.parameters() if w.requires_grad]
        parts = torch.autograd.grad(force_loss + 100 * stress_loss, weights, materialize_grads=True)
        gradients.append(torch.cat([part.flatten() for part in parts]))
        model.eval().set_is_batch_data(False)
    their_gradient, our_gradient = gradients
    difference = (our_gradient - their_gradient).norm() / their_gradient.norm()
    print(
        "a loss of forces and stress, "
        f"its gradient for {len(our_gradient):,} weights: {difference:.0e} of its length apart"
    )


def compare_times(seconds):
    """Print the time of both modules for the edges of a crystal.

    The energy is a sum of products, whose gradient takes hardly any time.
    """
    data = graph(bulk("NaCl", "rocksalt", 5.64, cubic=True) * (12, 12, 12)).to_dict()
    data[KEY.EDGE_VEC].requires_grad_()
    data[KEY.ATOMIC_ENERGY] = torch.zeros(len(data[KEY.POS]))
    slope = torch.randn_like(data[KEY.EDGE_VEC])
    theirs = ForceStressOutputFromEdge(use_atomic_virial=True).eval()
    ours = EdgeForces().eval()
    theirs._is_batch_data = False
    ours._is_batch_data = False
    least = [float("inf")] * 2  # ms
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, module in enumerate((theirs, ours)):
            data[KEY.PRED_TOTAL_ENERGY] = (slope * data[KEY.EDGE_VEC]).sum()
            start = time.perf_counter()
            module(data)
            least[i] = min(least[i], 1e3 * (time.perf_counter() - start))
    print(f"{len(data[KEY.POS]):,} atoms, {len(slope):,} edges, threads: {torch.get_num_threads()}")
    print(f"  SevenNet's module {least[0]:.1f} ms, with the operator {least[1]:.1f} ms")


def run_at_constant_energy(name, model, steps):
    """Run molecular dynamics, print its energies, and return the atoms at the end."""
    atoms = structures()["NaCl"]
    atoms.calc = SevenNetCalculator(model, file_type="model_instance")
    MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=numpy.random.RandomState(0))
    Stationary(atoms)
    dynamics = VelocityVerlet(atoms, 2 * ase.units.fs)
    energies = []
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        dynamics.run(1)
        times.append(1e3 * (time.perf_counter() - start))
        energies.append(1e3 * atoms.get_total_energy() / len(atoms))
    drift = numpy.polyfit(0.002 * numpy.arange(steps), energies, 1)[0]
    spread = numpy.ptp(energies)
    fastest = min(times)
    print(
        f"  {name:18} within {spread:.3f} meV/atom, "
        f"drift {drift:+.3f} meV/atom/ps; fastest step {fastest:.0f} ms"
    )
    return atoms


def main():
    """Run the script."""
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
    their_end = run_at_constant_energy("SevenNet's", theirs, args.steps)
    our_end = run_at_constant_energy("with the operator", ours, args.steps)
    difference = abs(their_end.positions - our_end.positions).max()
    print(f"  the two ends are {difference:.1e} A apart")


if __name__ == "__main__":
    main()
