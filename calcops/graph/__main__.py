"""Write a MACE or a SevenNet model to a file for LAMMPS, ASE and C++ programs.

calcops graph mace my.model mace.pt       # what MACE's training writes
calcops graph sevennet 7net-0 7net-0.pt   # a name of SevenNet's, or a checkpoint
"""

import argparse
from pathlib import Path

import torch
from calcops.potentials.package import save


def load_mace(name, head):
    """Return the Mace of a file that MACE's training wrote."""
    from calcops.graph.package_mace import Mace

    model = torch.load(name, map_location="cpu", weights_only=False)
    return Mace(model, head)


def load_sevennet(name, head):
    """Return the SevenNet of a checkpoint, or of a name that SevenNet knows."""
    from calcops.graph.package_sevennet import SevenNet
    from sevenn.util import load_checkpoint

    if head is not None:
        raise ValueError(f"expected --head for MACE's models only, got {head}")
    return SevenNet(load_checkpoint(name).build_model())


def load(kind, name, head):
    """Return the Mace or SevenNet of a file or name.

    Raises:
        ValueError: the file is no such model.
    """
    loaders = {"mace": load_mace, "sevennet": load_sevennet}
    try:
        return loaders[kind](name, head)
    except (ImportError, OSError, ValueError):
        raise
    except Exception as error:  # of torch.load and of what it finds, such as TorchScript
        raise ValueError(
            f"expected a model that the training of {kind} wrote, got {name}, which cannot be read "
            f"as one: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error


def main():
    """Read the command line; write the file."""
    parser = argparse.ArgumentParser(prog="calcops graph", description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["mace", "sevennet"])
    parser.add_argument("model", help="the model's file, or a name for SevenNet")
    parser.add_argument("file", type=Path, help="the file to write, ending in .pt")
    parser.add_argument("--head", help="which head of a MACE model with several")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    options = parser.parse_args()
    model = load(options.kind, options.model, options.head)
    save(model, options.file, dtype=getattr(torch, options.dtype), **model.about)


if __name__ == "__main__":
    from calcops.__main__ import renamed

    renamed("graph")
