"""The pair style `calcops` of LAMMPS, a plugin that runs what calcops.potentials saves.

python -m calcops.lammps build
"""
