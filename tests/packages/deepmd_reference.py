"""Let DeePMD-kit train small models of type se_e2_a, and write them with its results.

    python tests/packages/deepmd_reference.py FOLDER

This needs deepmd-kit[torch]. It trains each model for two steps, and fills FOLDER with <case>.pth,
.pt, .dp and .yaml, with compressed .pth, and with numbers.json.

numbers.json has the results of deepmd.infer.DeepPot for two structures: energies, forces and
virials, in total and of each atom. One structure is periodic, and its cell is smaller than the
sphere of the cutoff. The other is a cluster.

tests/packages/deepmd_models holds these files as written by deepmd-kit 3.2.0. Most cases are there
in one format only.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import deepmd
import numpy as np
from deepmd.infer import DeepPot
from deepmd.main import main

WATER = {"type_map": ["O", "H"], "sel": [12, 24]}
SILICON = {"type_map": ["Si"], "sel": [24]}
# {case: (types of the model, options of the descriptor, options of the fitting net)}
CASES = {
    "pairs": (WATER, {"type_one_side": False, "resnet_dt": True}, {"resnet_dt": True}),
    "one_side": (
        WATER,
        {"type_one_side": True, "activation_function": "gelu"},
        {"resnet_dt": False, "activation_function": "silu"},
    ),
    "silicon": (
        SILICON,
        {"set_davg_zero": True, "activation_function": "sigmoid"},
        {"atom_ener": [-1.5], "activation_function": "softplus"},
    ),
    "kinks": (SILICON, {"activation_function": "relu"}, {"activation_function": "relu6"}),
    "linear": (WATER, {"activation_function": "linear"}, {}),
    "float32": (WATER, {"precision": "float32"}, {"precision": "float32"}),
}
# `dp compress` writes .pth files of these cases. Their tables have wide cells. DeePMD-kit makes
# wrong tables of nets with resnet_dt, so `compressed_dt` is a case of its own.
COMPRESSED = {
    "compressed": (WATER, {"type_one_side": False}, {}),
    "compressed_one_side": (WATER, {"activation_function": "gelu"}, {}),
    "compressed_dt": (SILICON, {"resnet_dt": True}, {}),
}


def structures(names):
    """Yield positions [n, 3], types [n] and a cell or None, of a crystal and of a cluster."""
    random = np.random.default_rng(0)
    types = np.array([0, 1, 1] * 6 if len(names) == 2 else [0] * 12)
    sites = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), -1).reshape(-1, 3)[
        : len(types)
    ]
    cell = np.array([[5.4, 0, 0], [0.7, 5.6, 0], [-0.4, 0.9, 5.2]])
    for periodic in (True, False):
        positions = sites @ (cell / 3) + random.normal(0, 0.2, (len(types), 3))
        yield positions, types, cell if periodic else None


def train(kind, descriptor, fitting):
    """Write model.ckpt.pt into the working folder.

    The labels are random. After two steps, the weights are nearly the initial ones.
    """
    random = np.random.default_rng(1)
    Path("data/set.000").mkdir(parents=True)
    positions, types, cell = next(structures(kind["type_map"]))
    Path("data/type.raw").write_text("\n".join(map(str, types)))
    Path("data/type_map.raw").write_text("\n".join(kind["type_map"]))
    frames = positions + random.normal(0, 0.1, (3, *positions.shape))
    data = {
        "coord": frames,
        "box": np.tile(cell, (3, 1, 1)),
        "energy": random.normal(-30, 1, (3, 1)),
    }
    data["force"] = random.normal(size=frames.shape)
    for name, values in data.items():
        np.save(f"data/set.000/{name}.npy", values.reshape(3, -1))
    common = {
        "type": "se_e2_a",
        "rcut": 3.0,
        "rcut_smth": 0.8,
        "neuron": [3, 6, 6],
        "axis_neuron": 3,
        "seed": 1,
    }
    settings = {
        "model": {
            "type_map": kind["type_map"],
            "descriptor": {**common, "sel": kind["sel"], **descriptor},
            "fitting_net": {"neuron": [6, 6], "seed": 2, **fitting},
        },
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 5},
        "loss": {"type": "ener"},
        "training": {
            "training_data": {"systems": ["data"], "batch_size": 1},
            "numb_steps": 2,
            "seed": 3,
        },
    }
    Path("input.json").write_text(json.dumps(settings))
    main(["--pt", "train", "input.json", "--skip-neighbor-stat"])


def evaluate(path, kind):
    """Yield the results of a model for each structure, as in numbers.json."""
    for positions, types, cell in structures(kind["type_map"]):
        box = None if cell is None else cell.reshape(1, 9)
        energy, force, virial, atom_energy, atom_virial = DeepPot(path).eval(
            positions.reshape(1, -1), box, types, atomic=True
        )
        result = {"energy": energy[0, 0], "atom_energy": atom_energy[0, :, 0], "force": force[0]}
        result |= {"virial": virial.reshape(3, 3), "atom_virial": atom_virial.reshape(-1, 3, 3)}
        result |= {"positions": positions, "types": types}
        result = {key: np.asarray(value).tolist() for key, value in result.items()}
        yield result | {"cell": None if cell is None else cell.tolist()}


if __name__ == "__main__":
    folder = Path(sys.argv[1]).absolute()
    numbers = {"deepmd-kit": deepmd.__version__}
    folder.mkdir(parents=True, exist_ok=True)
    for name, (kind, *options) in COMPRESSED.items():
        with tempfile.TemporaryDirectory() as temporary:
            os.chdir(temporary)
            train(kind, *options)
            main(["--pt", "freeze", "-c", "model.ckpt.pt", "-o", "frozen.pth"])
            compressed = str(folder / f"{name}.pth")
            files = ["-i", "frozen.pth", "-o", compressed, "-t", "input.json"]
            main(["--pt", "compress", *files, "--step", "0.5", "--extrapolate", "2"])
            os.chdir(folder)
        numbers[name] = list(evaluate(compressed, kind))
    for name, (kind, *options) in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            os.chdir(temporary)
            train(kind, *options)
            frozen = str(folder / f"{name}.pth")
            main(["--pt", "freeze", "-c", "model.ckpt.pt", "-o", frozen])
            (folder / f"{name}.pt").write_bytes(Path("model.ckpt.pt").read_bytes())
            os.chdir(folder)
        for ending in (".dp", ".yaml"):
            main(["convert-backend", frozen, f"{name}{ending}"])
        numbers[name] = list(evaluate(frozen, kind))
    (folder / "numbers.json").write_text(json.dumps(numbers) + "\n")
