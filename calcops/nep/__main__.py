"""Convert a nep.txt of GPUMD to a package (.pt2) or an archive (.pt).

calcops nep nep.txt si.pt2
"""

import argparse
from pathlib import Path

import torch
from calcops.nep.model import kCells, load
from calcops.potentials.package import save


def main():
    """Run the program."""
    parser = argparse.ArgumentParser(prog="calcops nep", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a nep.txt of version 3 or 4")
    parser.add_argument("output", type=Path, help=".pt2 or .pt")
    parser.add_argument("--types", nargs="+", metavar="Si", help="only these types, in this order")
    parser.add_argument("--cells", type=int, default=kCells, help="cells of each radial spline")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of a package"
    )
    parser.add_argument("--float32", action="store_true", help="write a float32 model")
    options = parser.parse_args()
    if options.cells < 4:
        raise ValueError(f"expected --cells of at least 4, got {options.cells}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("expected a GPU for --device cuda, got none")
    if not options.output.parent.is_dir():
        raise ValueError(f"expected the folder of {options.output}, got none")
    model = load(options.model, options.types, options.cells)
    dtype = torch.float32 if options.float32 else torch.float64
    save(model, options.output, dtype, options.device)
    print(f"{options.output}: {' '.join(model.type_names)} within {model.cutoff:g} A")


if __name__ == "__main__":
    from calcops.__main__ import renamed

    renamed("nep")
