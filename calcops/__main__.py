"""The command `calcops`: convert, train and check interatomic potentials.

    calcops nep nep.txt si.pt2          # or: python -m calcops nep nep.txt si.pt2
    calcops check si.pt2 silicon.cif

A module of another package is imported only by the command that needs it.
"""

import argparse
import importlib
import sys

# {command: (its module, what it does, what installs the packages that it needs)}
kCommands = {
    "nep": (
        "calcops.nep.__main__",
        "write a nep.txt of GPUMD to a file for ASE, LAMMPS and C++",
        "pip install 'calcops[nep]'",
    ),
    "deepmd": (
        "calcops.deepmd.import_deepmd",
        "write a model of DeePMD-kit to such a file",
        "pip install 'calcops[deepmd]'",
    ),
    "graph": (
        "calcops.graph.__main__",
        "write a MACE or SevenNet model to such a file",
        "pip install mace-torch, or sevenn for a SevenNet model",
    ),
    "train": (
        "calcops.train.__main__",
        "train a NEP or a Deep Potential on your own frames",
        "pip install 'calcops[train]'",
    ),
    "lammps": (
        "calcops.lammps.__main__",
        "compile the pair style for a LAMMPS",
        "pip install ./calcops/lammps in a checkout of CalcOps",
    ),
    "check": (
        "calcops.check",
        "check the energies, forces and stress of any ASE calculator",
        "pip install 'calcops[ase]' matplotlib",
    ),
}


def main(words=None):
    """Run a command.

    Args:
        words: the command and its arguments; None: those of this process.
    """
    words = sys.argv[1:] if words is None else words
    lines = [f"  {name:8}{summary}" for name, (_, summary, _) in kCommands.items()]
    parser = argparse.ArgumentParser(
        prog="calcops",
        usage="calcops COMMAND ...",
        description="\n".join(["Commands:", *lines]),
        epilog="`calcops COMMAND --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=kCommands, metavar="COMMAND", help=argparse.SUPPRESS)
    name = parser.parse_args(words[:1] or ["--help"]).command
    module, _, installation = kCommands[name]
    sys.argv = [f"calcops {name}", *words[1:]]
    try:
        importlib.import_module(module).main()
    except ModuleNotFoundError as error:
        message = f"expected the module {error.name}, got none: {installation}"
        parser.exit(2, f"calcops {name}: {message}\n")
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"calcops {name}: {error}")


def renamed(name):
    """Run the command of this process, which was called by its old spelling; print the new one.

    Args:
        name: the command.
    """
    print(f"`calcops {name}` is the new spelling of this command", file=sys.stderr)
    main([name, *sys.argv[1:]])


if __name__ == "__main__":
    main()
