"""The model that a training begins with: a new one, or one that was trained before."""

import numpy as np
import torch
from calcops.train.datasets import elements_of, frames_of
from calcops.train.deep_potential import DeepPotential, load_npz
from calcops.train.neighbours import neighbours
from calcops.train.trainer import Data
from calcops.train.weights import initial, least_energies, standardise

kSample = 100  # frames of which davg and dstd are taken


def first_model(images, options):
    """Return the model for a training on these frames.

    Args:
        images: the labelled frames.
        options: those of the command. --start names a model, whose energies are shifted to those of
            the frames. Without it the model is new.

    Raises:
        ValueError: the frames, the options or the file of --start are wrong.
    """
    if options.start:
        model = load_start(options.start)
        frames = frames_of(images, model.type_names)
        shift_energies(model, Data(frames, model))
        return model
    type_names = elements_of(images)
    frames = frames_of(images, type_names)
    largest = most_neighbours(frames, len(type_names), options.cutoff, images)
    sel = options.sel or [max(1, int(1.1 * count) + 1) for count in largest]
    if len(sel) != len(type_names):
        raise ValueError(f"expected --sel for each of {' '.join(type_names)}, got {sel}")
    weights = initial(
        sel=sel,
        rcut=options.cutoff,
        rcut_smth=options.smooth,
        emb=options.embedding,
        axis_neuron=options.axis,
        fit=options.fitting,
        seed=options.seed,
    )
    model = DeepPotential(weights, type_names)
    sample = {key: value[:kSample] for key, value in frames.items()}
    types, _, _, kind, R, _, energy, _, _ = Data(sample, model)[:]
    standardise(model, types, kind, R, energy)
    model.bias_atom_e[:] = least_energies(frames["types"], frames["energy"], len(type_names))
    return model


def most_neighbours(frames, ntypes, cutoff, images):
    """Return the largest number of neighbours of each type [T] within the cutoff.

    Raises:
        ValueError: an atom has none.
    """
    largest = np.zeros(ntypes, int)
    for b, image in enumerate(images):
        frame = {key: value[b : b + 1] for key, value in frames.items()}
        list_neigh, _ = neighbours(
            frame["positions"], frame["cells"], cutoff, frame["types"], frame["pbc"]
        )
        is_alone = (list_neigh[0, : len(image)] >= 0).sum(-1) == 0
        if is_alone.any():
            raise ValueError(
                f"expected neighbours within --cutoff {cutoff:g} A of every atom, got none of atom "
                f"{is_alone.nonzero()[0].item()} in {image.info['source']}"
            )
        types = torch.where(list_neigh >= 0, frame["types"][0][list_neigh.clamp(min=0)], -1)
        for t in range(ntypes):
            largest[t] = max(largest[t], (types == t).sum(-1).max().item())
    return largest


def load_start(path):
    """Return the model of a file: .npz, or a file of DeePMD-kit.

    Raises:
        ValueError: there is no such file, or it is not a model.
    """
    if not path.exists():
        raise ValueError(f"expected a model, got {path}")
    if path.suffix == ".npz":
        try:
            return load_npz(path)
        except (KeyError, OSError, ValueError) as error:
            raise ValueError(
                f"expected the weights of a Deep Potential, got {path}: {error}"
            ) from None
    from calcops.deepmd.import_deepmd import load

    model = load(path)
    model.set_tables()  # those of a file cannot be trained
    return model


@torch.no_grad()
def shift_energies(model, data):
    """Shift each type's energy, so that the model's energies come nearest to the frames'."""
    differences = []
    for b in range(len(data)):
        types, *environment, energy, _, _ = data[b : b + 1]
        with torch.enable_grad():
            predicted = model.evaluate(types, *environment, 0, False)[0]
        differences.append(energy - predicted)
    types = data.frames["types"]
    model.bias_atom_e += least_energies(types, torch.cat(differences), len(model.sel))
