"""Exports of models as files of metatomic, which its engines and its ASE calculator load.

A file has the energies of atoms; the engine differentiates them.

    export(load("nep.txt", ["Na", "Cl"]), "nacl.pt", "extensions")
"""

# metatomic compares annotations with those of typing.
# ruff: noqa: UP006, UP035, UP045

import copy
import shutil
from pathlib import Path
from typing import Dict, List, Optional

import torch
from ase.data import atomic_numbers
from calcops.ase.calculator import place_of, types_of_elements
from calcops.potentials.pair_search import slots_in_rows
from metatensor.torch import Labels, TensorBlock, TensorMap
from metatomic.torch import (
    AtomisticModel,
    ModelCapabilities,
    ModelMetadata,
    ModelOutput,
    NeighborListOptions,
    System,
)


class Energies(torch.nn.Module):
    """Energies of atoms, which an engine differentiates.

    Args:
        model: a module with the interface of potentials/potential.py.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("type_of", types_of_elements(model.type_names))
        self.options = NeighborListOptions(cutoff=model.cutoff, full_list=True, strict=True)

    def requested_neighbor_lists(self) -> List[NeighborListOptions]:
        """Return the lists that an engine has to make."""
        return [self.options]

    def forward(
        self,
        systems: List[System],
        outputs: Dict[str, ModelOutput],
        selected_atoms: Optional[Labels] = None,
    ) -> Dict[str, TensorMap]:
        """Return "energy" of systems or of atoms, those that are selected."""
        results: Dict[str, TensorMap] = {}
        if "energy" not in outputs:
            return results
        values: list[torch.Tensor] = []
        samples: list[torch.Tensor] = []
        for number, system in enumerate(systems):
            energies = self.energies(system)
            atoms = torch.arange(len(energies), device=energies.device)
            if selected_atoms is not None:
                is_own = selected_atoms.column("system") == number
                atoms = selected_atoms.column("atom")[is_own].long()
            values.append(energies[atoms])
            samples.append(torch.stack([torch.full_like(atoms, number), atoms], 1))

        energy = torch.cat(values).unsqueeze(1)
        sample = torch.cat(samples)
        names = ["system", "atom"]
        if outputs["energy"].sample_kind == "system":
            zeros = energy.new_zeros(len(systems), 1)
            energy = zeros.index_add(0, sample[:, 0], energy)
            sample = torch.arange(len(systems), device=energy.device).unsqueeze(1)
            names = ["system"]
        zero = torch.zeros(1, 1, dtype=torch.int32, device=energy.device)
        block = TensorBlock(
            values=energy,
            samples=Labels(names, sample.int()),
            components=torch.jit.annotate(List[Labels], []),
            properties=Labels("energy", zero),
        )
        results["energy"] = TensorMap(Labels("_", zero), [block])
        return results

    def energies(self, system: System):
        """Return the energies [n] of a system's atoms, differentiable in its pair vectors."""
        types = self.type_of[system.types.long()]
        pairs = system.get_neighbor_list(self.options)
        order = torch.argsort(pairs.samples.column("first_atom"), stable=True)
        i = pairs.samples.column("first_atom").long()[order]
        j = pairs.samples.column("second_atom").long()[order]
        vectors = pairs.values.squeeze(-1)[order]

        natoms = len(system)
        slot, count = slots_in_rows(i, natoms)
        slots = max(1, int(count.max().item()))
        list_neigh = torch.full((1, natoms, slots), -1, device=i.device)
        list_neigh[0, i, slot] = j
        Rij = vectors.new_zeros(natoms * slots, 3).index_copy(0, i * slots + slot, vectors)
        results = self.model(types, list_neigh, Rij.view(1, natoms, slots, 3), 0, True)
        return results[1][0]


def export(model, path, extensions=None, metadata=None):
    """Write a model as a file of metatomic.

    Args:
        model: a module with the interface of potentials/potential.py, in eV and A, that TorchScript
            can compile, such as a Nep or a StillingerWeber.
        path: of the file, which ends with .pt.
        extensions: a folder to which the libraries of the operators are copied. An engine without
            this machine's cache needs it as its extensions directory.
        metadata: a ModelMetadata with a name, authors and references.

    Raises:
        ValueError: the model is a package, or has other units or no elements.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError("expected a module, got a package")
    if model.units != "metal":
        raise ValueError(f'expected a model with units "metal", got {model.units}')
    types_of_elements(model.type_names)  # refuses others
    _, dtype = place_of(model)
    capabilities = ModelCapabilities(
        outputs={"energy": ModelOutput(unit="eV", sample_kind="atom")},
        atomic_types=[atomic_numbers[name] for name in model.type_names],
        interaction_range=getattr(model, "layers", 1) * model.cutoff,
        length_unit="angstrom",
        supported_devices=["cuda", "cpu"],
        dtype=str(dtype).removeprefix("torch."),
    )
    # to() computes all tables of a Nep. metatomic's eval() would forget them if they were not
    # compiled, and it changes the parameters.
    frozen = copy.deepcopy(model).requires_grad_(False).eval().to(dtype)
    compiled = torch.jit.script(frozen)
    exported = AtomisticModel(Energies(compiled).eval(), metadata or ModelMetadata(), capabilities)
    exported.save(path)
    if extensions is None:
        return
    # metatomic looks for a library by its path below this folder, too. Its own copying takes only
    # libraries of Python's folders.
    for library in torch.ops.loaded_libraries:
        copied = Path(extensions) / library.lstrip("/")
        if "calcops" in copied.name:
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library, copied)
