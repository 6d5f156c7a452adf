"""A potential whose forces come from torch.ops.CalcOps.calculateForce, scripted, traced and saved.

    python examples/torchscript_force/archives.py [FOLDER]      # default: build/torchscript_force

README.md beside this file shows what is printed and how the archives run in Python and in C++.
"""

import io
import sys
import warnings
from pathlib import Path

import torch

import calcops_jit  # noqa: F401 - brings torch.ops.CalcOps


class Potential(torch.nn.Module):
    """Sum over the pairs of w . tanh(Ri W), and its forces. Any float dtype, CPU and CUDA."""

    def __init__(self):
        super().__init__()
        self.W = torch.nn.Parameter(torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8).sin())
        self.w = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8, dtype=torch.float64))

    def pairs(self, list_neigh, Ri, Ri_d):
        """energy [B], dE [B,n,K,4] and F [B,n,3], the force on each atom from its own energy."""
        live = (list_neigh >= 0).flatten(2).unsqueeze(-1)
        hidden = torch.tanh(Ri @ self.W)
        energy = (hidden * self.w * live).sum((1, 2, 3))
        # Written out: traced, torch.autograd.grad would write the sizes of the example into the
        # archive.
        dE = (1 - hidden.square()) * self.w * live @ self.W.t()
        F = -(dE.flatten(2).unsqueeze(2) @ Ri_d).squeeze(2)
        return energy, dE, F

    def forward(self, list_neigh, Ri, Ri_d):
        energy, dE, F = self.pairs(list_neigh, Ri, Ri_d)
        # A list of one new tensor, hence [0]. The original wrote into F instead, which autograd
        # does not see.
        return energy, dE, torch.ops.CalcOps.calculateForce(list_neigh, dE, Ri_d, F)[0]


class WithGhosts(Potential):
    """The same with the names of existing archives: MatPL's models hold CalcOps_cuda or CalcOps_cpu
    as they were trained on the one or the other. Here both are every device's, so an archive is not
    bound to its name.
    """

    def __init__(self, operators):
        super().__init__()
        self.calculate_force = operators.calculateForce

    def forward(self, list_neigh, Ri, Ri_d, nghost):
        energy, dE, F = self.pairs(list_neigh, Ri, Ri_d)
        return energy, dE, self.calculate_force(list_neigh, dE, Ri_d, F, nghost)[0]


class CalculateForce(torch.autograd.Function):
    """As before it was an operator: a Function in Python, which no archive can hold."""

    @staticmethod
    def forward(ctx, list_neigh, dE, Ri_d, F):
        return torch.ops.CalcOps.calculateForce(list_neigh, dE, Ri_d, F)[0]


class InPython(Potential):
    def forward(self, list_neigh, Ri, Ri_d):
        energy, dE, F = self.pairs(list_neigh, Ri, Ri_d)
        return energy, dE, CalculateForce.apply(list_neigh, dE, Ri_d, F)


def frame(nghost):
    """list_neigh [1,4,1,3], Ri [1,4,3,4], Ri_d [1,4,12,3] of four atoms: numbers, no crystal."""
    list_neigh = torch.tensor([[1, 2, -1], [0, -1, 3], [3, 0, 1], [-1, 2, 2]])
    if nghost:
        list_neigh[0, 2], list_neigh[3, 0] = 4, 5
    count = torch.arange(1, 48 + 144 + 1, dtype=torch.float64).sin()
    return list_neigh.view(1, 4, 1, 3), count[:48].view(1, 4, 3, 4), count[48:].view(1, 4, 12, 3)


def save(name, archive, *inputs):
    """Saves `archive` and, in the same file, its inputs, which load.py and host.cpp read."""
    file = io.BytesIO()
    torch.save(list(inputs), file)
    torch.jit.save(archive, folder / f"{name}.pt", _extra_files={"frame": file.getvalue()})
    print(f"saved {name}.pt")


warnings.filterwarnings("ignore", message=".*torch.jit.* is deprecated")  # which README.md says
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/torchscript_force")
folder.mkdir(parents=True, exist_ok=True)
closed, ghosts = frame(0), frame(2)
save("scripted", torch.jit.script(Potential()), *closed)
save("traced", torch.jit.trace(Potential(), closed), *closed)
for name in ("CalcOps_cuda", "CalcOps_cpu"):
    model = torch.jit.script(WithGhosts(getattr(torch.ops, name)))
    save(name, model, *ghosts, torch.tensor(2))
try:
    # An older PyTorch refuses only when it saves.
    torch.jit.script(InPython()).save(folder / "in_python.pt")
except RuntimeError:
    print("refused: CalculateForce, a torch.autograd.Function in Python")
