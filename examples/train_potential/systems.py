"""The crystals that a model can be trained on: cell, labelling potential, settings of the model.

A system more is a line more here: train.py, deploy.py and step_time.py take elements and masses
from it.
"""

from pathlib import Path
from typing import NamedTuple

from ase import Atoms
from ase.build import bulk
from calcops.potentials import stillinger_weber
from calcops.potentials.stillinger_weber import StillingerWeber


class System(NamedTuple):
    """A crystal to learn, the potential that labels its frames, and the shape of the model."""

    cell: Atoms
    labels: StillingerWeber  # its type_names are those of the model
    model: dict  # arguments of weights.initial


kSystems = {
    "silicon": System(
        bulk("Si", "diamond", a=5.431, cubic=True),
        StillingerWeber(),
        dict(sel=[34], rcut=5.0, rcut_smth=3.6, emb=[24, 24], axis_neuron=12, fit=[48, 48]),
    ),
    # In 4.3 A lie 16 atoms of the other element and 12 of the same one.
    "gallium-nitride": System(
        bulk("GaN", "zincblende", a=4.512, cubic=True),
        StillingerWeber(Path(stillinger_weber.__file__).with_name("gallium_nitride.sw")),
        dict(sel=[18, 18], rcut=4.2, rcut_smth=3.0, emb=[24, 24], axis_neuron=12, fit=[48, 48]),
    ),
}
