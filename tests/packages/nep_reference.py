"""Make small NEP models from random numbers, and write them with NEP_CPU's results.

    python tests/packages/nep_reference.py NEP_CPU FOLDER

NEP_CPU is a checkout of https://github.com/brucefan1983/NEP_CPU, of which this compiles src/. The
script fills FOLDER with <case>.txt, which are nep.txt files, and with numbers.json.

numbers.json has the frames of each case, and the energies, forces and virials of their atoms. The
cells of the frames are smaller than the sphere of the cutoff.

tests/packages/nep_models holds these files, with results of NEP_CPU's commit 7319bdc.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

# Reads a model's path and a frame, and prints energies, forces and virials in NEP_CPU's order.
PROGRAM = r"""
#include "nep.h"
#include <cstdio>
#include <iostream>
int main(int, char** argv) {
  NEP nep;
  nep.init_from_file(argv[1], false);
  int n;
  std::cin >> n;
  std::vector<int> types(n);
  std::vector<double> box(9), x(3 * n), energy(n), force(3 * n), virial(9 * n);
  for (int& t : types) std::cin >> t;
  for (double& number : box) std::cin >> number;
  for (double& number : x) std::cin >> number;
  nep.compute(types, box, x, energy, force, virial);
  for (auto* numbers : {&energy, &force, &virial})
    for (double number : *numbers) std::printf("%.17g\n", number);
}
"""
# {case: (first word, types, lines of the head, functions of both parts, invariants of a function)}
CASES = {
    "nep3": (
        "nep3",
        "Te Pb",
        "cutoff 4.5 3.5 99 99|n_max 2 1|basis_size 4 3|l_max 4 2 0|ANN 6 0",
        5,
    ),
    "nep3_zbl": (
        "nep3_zbl",
        "C",
        "zbl 1 2|cutoff 4 4 99 99|n_max 3 2|basis_size 5 4|l_max 4 2 1|ANN 5 0",
        6,
    ),
    "nep4": ("nep4", "Si", "cutoff 5 4 99 99|n_max 4 4|basis_size 8 8|l_max 4 0 0|ANN 8 0", 4),
    "nep4_flags": (
        "nep4",
        "Ga N",
        "cutoff 4.2 3.7 99 99|n_max 2 2|basis_size 4 4|l_max 3 1 1 0 0|ANN 4 0",
        5,
    ),
    "nep4_types": (
        "nep4_zbl",
        "Ag Cu Al",
        "zbl 0.8 1.9|cutoff 4.6 3.2 4 4 3.9 3.9 99 99|n_max 4 4|basis_size 6 7|l_max 4 2 1|ANN 7 0",
        6,
    ),
}


def write_model(path, first, types, head, invariants, random):
    """Write a nep.txt of random numbers. The descriptor and the energies are of order 1."""
    types = types.split()
    lines = [f"{first} {len(types)} {' '.join(types)}", *head.split("|")]
    values = {line.split()[0]: [int(float(v)) for v in line.split()[1:]] for line in lines[1:]}
    functions = [n + 1 for n in values["n_max"]]
    basis = [n + 1 for n in values["basis_size"]]
    neurons = values["ANN"][0]
    dim = functions[0] + functions[1] * invariants
    nets = len(types) if first.startswith("nep4") else 1
    numbers = []
    for _ in range(nets):
        numbers += list(random.normal(0, 1 / np.sqrt(dim), neurons * dim))
        numbers += list(random.normal(0, 0.5, 2 * neurons))
    numbers.append(random.normal())
    for f, b in zip(functions, basis):
        numbers += list(random.normal(0, 0.5, f * b * len(types) ** 2))
    numbers += list(random.uniform(0.1, 0.4, dim))
    path.write_text("\n".join([*lines, *(f"{number:15.7e}" for number in numbers)]) + "\n")
    return len(types)


def frames(T, random):
    """Yield positions [n, 3], types [n] and cell [3, 3] of disturbed crystals, one of them dense."""
    for size in (2.4, 1.7):
        sites = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), -1).reshape(-1, 3)[:20]
        cell = size * np.array([[3, 0, 0], [0.4, 3.1, 0], [-0.2, 0.5, 2.9]])
        positions = sites @ (cell / 3) + random.normal(0, 0.08 * size, (len(sites), 3))
        yield positions, random.integers(0, T, len(sites)), cell


def main():
    checkout, folder = map(Path, sys.argv[1:])
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    results = {}
    with tempfile.TemporaryDirectory() as build:
        (Path(build) / "run.cpp").write_text(PROGRAM)
        sources = [
            checkout / "src" / f"{name}.cpp" for name in ("nep", "ewald_nep", "neighbor_nep")
        ]
        command = ["g++", "-O2", f"-I{checkout / 'src'}", f"{build}/run.cpp", *sources]
        subprocess.run([*command, "-o", f"{build}/run"], check=True)
        for case, about in CASES.items():
            path = folder / f"{case}.txt"
            T = write_model(path, *about, random)
            results[case] = []
            for positions, types, cell in frames(T, random):
                numbers = [len(types), *types, *cell.T.flatten(), *positions.T.flatten()]
                text = " ".join(
                    map(
                        repr,
                        (float(v) if i > len(types) else int(v) for i, v in enumerate(numbers)),
                    )
                )
                done = subprocess.run(
                    [f"{build}/run", path], input=text, capture_output=True, text=True, check=True
                )
                values = np.array(done.stdout.split(), float)
                energy, force, virial = np.split(values, np.cumsum([len(types), 3 * len(types)]))
                results[case].append(
                    {
                        "types": types.tolist(),
                        "positions": positions.tolist(),
                        "cell": cell.tolist(),
                        "energy": energy.tolist(),
                        "force": force.reshape(3, -1).T.tolist(),
                        "virial": virial.reshape(9, -1).T.tolist(),
                    }
                )
    (folder / "numbers.json").write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
