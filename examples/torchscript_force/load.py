"""Runs a saved potential in a Python that knows nothing of CalcOps but the file of its library.

    python examples/torchscript_force/load.py ARCHIVE [cpu|cuda] [OPERATOR_LIBRARY]

It prints what host.cpp, its twin, prints.
"""

import argparse
import io
import warnings

import torch

parser = argparse.ArgumentParser(usage=__doc__.splitlines()[2].strip())
parser.add_argument("archive")
parser.add_argument("device", nargs="?", default="cpu")
parser.add_argument("library", nargs="?")
options = parser.parse_args()
if options.library:
    torch.ops.load_library(options.library)  # before the archive, which names its operators

warnings.filterwarnings("ignore", message=".*torch.jit.* is deprecated")  # which README.md says
files = {"frame": ""}
model = torch.jit.load(options.archive, map_location=options.device, _extra_files=files)
inputs = [value.to(options.device) for value in torch.load(io.BytesIO(files["frame"]))]
list_neigh, Ri_d = inputs[0], inputs[2]
Ri = inputs[1].requires_grad_()

# TorchScript rewrites its graph during the first calls; the third is as all that follow.
for _ in range(3):
    energy, dE, force = model(*inputs)
    (first,) = torch.autograd.grad(force.square().sum(), Ri, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), Ri)

# The same operator without the archive.
direct = torch.ops.calcops.force(list_neigh, dE, Ri_d, force.shape[1] - list_neigh.shape[1])


def show(name, row):
    print(f"{name:<8}", *(f"{value:18.11g}" for value in row.tolist()))


show("energy", energy)
for row in force[0]:
    show("force", row)
show("first", torch.stack([first.sum(), first.norm()]))
show("second", torch.stack([second.sum(), second.norm()]))
show("direct", direct[0, 0])
