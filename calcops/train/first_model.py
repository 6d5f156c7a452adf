"""The model that a training begins with: a new one, or one that was trained before."""

import torch
from calcops.deepmd.deep_potential import DeepPotential, load_npz
from calcops.nep.nep_file import read
from calcops.train.datasets import elements_of, frames_of
from calcops.train.nep_parameters import TrainedNep, new_nep
from calcops.train.pairs import Pairs
from calcops.train.trainer import Data, Squares
from calcops.train.weights import initial, standardise

kMargin = 1.5  # of sel, in units of the largest number of neighbours in the frames


def first_model(images, options):
    """Return the model for a training on these frames, and their Pairs.

    Args:
        images: the labelled frames.
        options: those of the command. --start names a model, whose energies are shifted to those of
            the frames. Without it the model is new.

    Raises:
        ValueError: the frames, the options or the file of --start are wrong.
    """
    if options.start:
        return started(images, options)
    type_names = elements_of(images)
    frames = frames_of(images, type_names)
    pairs = Pairs(frames, sources_of(images), len(type_names), options.cutoff, options.smooth)
    if not pairs.counts.any():
        raise ValueError(
            f"expected neighbours within --cutoff {options.cutoff:g} A, got none at all"
        )
    if options.model == "nep":
        return new_nep(frames, pairs, type_names, options), pairs
    sel = options.sel or [int(kMargin * count) + 1 for count in pairs.most]
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
    model = DeepPotential(weights | {"shortest": pairs.shortest}, type_names)
    standardise(model, pairs)
    model.shift(frames["types"], frames["energy"])
    return model, pairs


def started(images, options):
    """Return the model of --start, with the energies of the frames, and the Pairs of the frames."""
    if options.model == "nep":
        file = read_nep(options.start)
        frames = frames_of(images, file.type_names)
        cutoff = file.cutoffs.max()
        pairs = Pairs(frames, sources_of(images), len(file.type_names), cutoff, 0.7 * cutoff)
        model = TrainedNep(file, frames, pairs)
        shift_energies(model, Data(frames, model))
        return model, pairs
    model = load_start(options.start)
    frames = frames_of(images, model.type_names)
    pairs = pairs_of(images, model)
    shift_energies(model, Data(frames, model))
    shortest = torch.from_numpy(pairs.shortest)
    known = model.shortest
    model.shortest = shortest if known is None else torch.minimum(known, shortest)
    return model, pairs


def read_nep(path):
    """Return the NepFile of --start.

    Raises:
        ValueError: there is no such file, or it is no nep.txt.
    """
    if not path.is_file():
        raise ValueError(f"expected a model, got {path}")
    return read(path)


def pairs_of(images, model):
    """Return the Pairs of frames within the cutoff of a model."""
    frames = frames_of(images, model.type_names)
    smooth = getattr(model, "rcut_smth", 0.7 * model.cutoff)  # where a Deep Potential's s(r) bends
    return Pairs(frames, sources_of(images), len(model.type_names), model.cutoff, smooth)


def sources_of(images):
    """Return the name of each frame in messages."""
    return [image.info.get("source", f"frame {number}") for number, image in enumerate(images)]


def load_start(path):
    """Return the model of a file: .npz, or a file of DeePMD-kit.

    Raises:
        ValueError: there is no such file, or it is not a model.
    """
    if not path.exists():
        raise ValueError(f"expected a model, got {path}")
    if path.suffix == ".npz":
        try:
            model = load_npz(path)
        except (KeyError, OSError, ValueError) as error:
            raise ValueError(
                f"expected the weights of a Deep Potential, got {path}: {error}"
            ) from None
    else:
        from calcops.deepmd.import_deepmd import load

        model = load(path)
    model.set_tables()  # those of a file cannot be trained
    return model


@torch.no_grad()
def shift_energies(model, data):
    """Shift each type's energy, so that the model's energies come nearest to the frames'."""
    squares = Squares(model)
    differences = []
    for numbers in data.parts():
        with torch.enable_grad():
            (_, error), *_ = squares.differences(*data[numbers])
        differences.append(-error.cpu() * data.natoms[numbers])
    model.shift(data.frames["types"], torch.cat(differences))
