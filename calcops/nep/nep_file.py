"""Files nep.txt of GPUMD: neuroevolution potentials of versions 3 and 4.

    file = read("nep.txt")
    write(file, "own.txt")

A file has a head of lines with keywords, then a number a line: the nets, the energies that are
subtracted, the coefficients c of the radial functions, and the factors of the descriptor. MatPL
writes an energy for each type, GPUMD a single one.

Source of the format: GPUMD's documentation, https://gpumd.org, "nep.txt"; order of the numbers:
NEP_CPU; MatPL's energies: `get_nn_params` of src/model/nep_net.py and `apply_ann_one_layer` of its
nep_cpu.cpp, commit 907cced of https://github.com/LonxunQuantum/MatPL. None of them is needed here.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

# Kinds of models that are no energy of the nets and the universal ZBL alone.
kOthers = {
    "dipole": "a dipole",
    "polarizability": "a polarizability",
    "charge": "charges (qNEP)",
    "temperature": "a temperature",
}
kInvariants = "q_222", "q_1111", "q_112", "q_123", "q_233", "q_134"
kDigits = set("0123456789.eE+-")  # of a number; Python reads 1_0, inf and other digits, too

# GPUMD's limits: parse_* of src/main_nep/parameters.cu and src/force/nep.cu, commit d98135d.
# NEP_CPU has arrays of these sizes, and writes beyond them without a check (src/nep_utilities.h).
kMostNeurons = 120
kMostFunctions = 12, 8  # n_max of the radial and the angular part
kMostBasis = 16, 12  # basis_size
kMostNeighbours = 819
kMostOuter = 4.0  # A, of the ZBL

kSaturated = -20.0  # the b0 of a neuron without inputs: its tanh is 1 in float64
kDensest = 0.18  # atoms in A^3, more than in diamond


@dataclass
class NepFile:
    """The contents of a nep.txt with T types. F and basis are those of a part of the descriptor.

    Attributes:
        version: 3, one net for all types, or 4, a net for each.
        type_names: T chemical symbols.
        zbl: the inner and the outer cutoff of the universal ZBL, or None.
        cutoffs: [T, 2], the radial and the angular cutoff of each type. Those of a pair are the
            means of its types'.
        l_max: of the angular part, 1 to 4.
        has_q222, has_q1111: whether the angular part has these invariants.
        w0: [nets, neurons, dim], b0, w1: [nets, neurons].
        bias: [nets], energies that are subtracted.
        c: the coefficients [T, T, basis, F] of the radial and the angular part, for the types of
            the centre and of the neighbour.
        scale: [dim], the factors of the descriptor.
        neighbours: the most neighbours of an atom within the radial and the angular cutoff, for
            which GPUMD takes memory; None: those in diamond.
    """

    version: int
    type_names: list
    zbl: tuple | None
    cutoffs: np.ndarray
    l_max: int
    has_q222: bool
    has_q1111: bool
    w0: np.ndarray
    b0: np.ndarray
    w1: np.ndarray
    bias: np.ndarray
    c: tuple
    scale: np.ndarray
    neighbours: tuple | None = None

    def of_types(self, names):
        """Return the file of these types alone, in their order.

        Raises:
            ValueError: the file lacks a type, or a name occurs twice.
        """
        missing = [name for name in names if name not in self.type_names]
        if missing or len(set(names)) < len(names) or not names:
            raise ValueError(
                f"expected different types of {' '.join(self.type_names)}, got {' '.join(names)}"
            )
        own = [self.type_names.index(name) for name in names]
        nets = own if len(self.w0) > 1 else [0]
        return replace(
            self,
            type_names=list(names),
            cutoffs=self.cutoffs[own],
            w0=self.w0[nets],
            b0=self.b0[nets],
            w1=self.w1[nets],
            bias=self.bias[nets],
            c=tuple(c[own][:, own] for c in self.c),
        )


def read(path):
    """Return the NepFile of a nep.txt.

    Raises:
        ValueError: the file is no nep.txt, or a model that is not supported.
    """
    path = Path(path)
    try:
        return _read([line.split() for line in path.read_text().splitlines() if line.strip()])
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path}: {error}") from None


def write(file, path):
    """Write a NepFile as a nep.txt, which GPUMD and NEP_CPU read, too.

    They have one energy for all types. Energies of types become a neuron without inputs.

    Raises:
        ValueError: the model is larger than GPUMD and NEP_CPU can run.
    """
    file = _folded(file)
    n_max = [c.shape[3] - 1 for c in file.c]
    basis_size = [c.shape[2] - 1 for c in file.c]
    check_limits(file.w0.shape[1], n_max, basis_size)
    T = len(file.type_names)
    word = f"nep{file.version}" + ("_zbl" if file.zbl else "")
    lines = [f"{word} {T} {' '.join(file.type_names)}"]
    if file.zbl:
        lines.append(_line("zbl", file.zbl))
    are_equal = (file.cutoffs == file.cutoffs[0]).all()
    cutoffs = file.cutoffs[0] if are_equal else file.cutoffs.flatten()
    volumes = 4 / 3 * np.pi * file.cutoffs.max(0) ** 3
    neighbours = file.neighbours or np.ceil(kDensest * volumes)
    lines.append(_line("cutoff", [*cutoffs, *np.minimum(neighbours, kMostNeighbours)]))
    lines.append(_line("n_max", n_max))
    lines.append(_line("basis_size", basis_size))
    lines.append(_line("l_max", [file.l_max, 2 * file.has_q222, int(file.has_q1111)]))
    lines.append(_line("ANN", [file.w0.shape[1], 0]))
    for net in zip(file.w0, file.b0, file.w1):
        lines += [repr(float(number)) for part in net for number in part.flatten()]
    lines.append(repr(float(file.bias[0])))
    for c in file.c:
        lines += [repr(float(number)) for number in c.transpose(3, 2, 0, 1).flatten()]
    lines += [repr(float(number)) for number in file.scale]
    Path(path).write_text("\n".join(lines) + "\n")


def check_limits(neurons, n_max, basis_size):
    """Raise ValueError if GPUMD and NEP_CPU cannot run a model of these sizes.

    Args:
        neurons: of a net, with the one by which `write` gives types energies of their own.
        n_max: two numbers, of the radial and the angular part.
        basis_size: two numbers.
    """
    if neurons > kMostNeurons:
        raise ValueError(
            f"expected at most {kMostNeurons} neurons, as GPUMD and NEP_CPU run, got {neurons}"
        )
    for name, numbers, most in (
        ("n_max", n_max, kMostFunctions),
        ("basis_size", basis_size, kMostBasis),
    ):
        if numbers[0] > most[0] or numbers[1] > most[1]:
            raise ValueError(
                f"expected {name} of at most {most[0]} {most[1]}, as GPUMD and NEP_CPU run, "
                f"got {numbers[0]} {numbers[1]}"
            )


def _folded(file):
    """Return a NepFile with one energy for all types. A neuron without inputs has the others."""
    if (file.bias == file.bias[0]).all():
        return file
    mean = file.bias.mean()
    return replace(
        file,
        w0=np.concatenate([file.w0, np.zeros_like(file.w0[:, :1])], 1),
        b0=np.concatenate([file.b0, np.full_like(file.b0[:, :1], kSaturated)], 1),
        w1=np.concatenate([file.w1, (mean - file.bias)[:, None]], 1),
        bias=np.full_like(file.bias, mean),
    )


def _unfolded(file):
    """Return a NepFile without neurons that have no inputs. Their energies are in the bias."""
    is_constant = (file.w0 == 0).all((0, 2))
    if is_constant.all():  # a net has at least one neuron
        return file
    constants = (file.w1 * np.tanh(-file.b0))[:, is_constant].sum(1)
    return replace(
        file,
        w0=file.w0[:, ~is_constant],
        b0=file.b0[:, ~is_constant],
        w1=file.w1[:, ~is_constant],
        bias=file.bias - constants,
    )


def _line(keyword, numbers):
    return " ".join([keyword, *(f"{number:.17g}" for number in numbers)])


def _read(lines):
    lines = iter(lines)
    first = next(lines, [""])
    version, has_zbl = _kind(first[0])
    T = _count(first[1]) if len(first) > 1 else 0
    type_names = first[2:]
    if T < 1 or len(type_names) != T:
        raise ValueError(f"expected {T} types in the first line, got {' '.join(first)}")
    if len(set(type_names)) < T:
        raise ValueError(f"expected different types in the first line, got {' '.join(first)}")

    zbl = _zbl(_numbers(lines, "zbl")) if has_zbl else None
    cutoffs, neighbours = _cutoffs(_numbers(lines, "cutoff"), T)
    if zbl and zbl[1] > cutoffs.min():
        raise ValueError(
            f"expected `zbl` within the angular cutoff of {cutoffs.min():g}, got {zbl[1]:g}: "
            "energies would jump there"
        )
    functions = [number + 1 for number in _counts(lines, "n_max", 2)]
    basis = [number + 1 for number in _counts(lines, "basis_size", 2)]
    l_max, has_q222, has_q1111 = _invariants(_counts(lines, "l_max"))
    neurons, layers = _counts(lines, "ANN", 2)
    if neurons == 0 or layers != 0:
        raise ValueError(f"expected `ANN <neurons> 0`, got {neurons} {layers}")
    dim = functions[0] + functions[1] * (l_max + has_q222 + has_q1111)

    lines = list(lines)
    wrong = next((line for line in lines if len(line) > 1), None)
    if wrong:
        raise ValueError(f"expected a number a line after the head, got {' '.join(wrong)}")
    numbers = np.array([_number(line[0]) for line in lines])
    nets = T if version == 4 else 1
    size_of_c = sum(T * T * f * b for f, b in zip(functions, basis))
    expected = nets * (dim + 2) * neurons + 1 + size_of_c + dim
    # A file of MatPL has an energy for each type.
    biases = nets if len(numbers) == expected + nets - 1 else 1
    if len(numbers) != expected + biases - 1:
        raise ValueError(f"expected {expected} numbers after the head, got {len(numbers)}")
    sizes = [nets * (dim + 2) * neurons, biases, *(T * T * f * b for f, b in zip(functions, basis))]
    of_nets, bias, *c, scale = np.split(numbers, np.cumsum(sizes))
    of_nets = of_nets.reshape(nets, (dim + 2) * neurons)
    w0, b0, w1 = np.split(of_nets, [dim * neurons, (dim + 1) * neurons], axis=1)
    # In the file, coefficients are in the order of functions, basis, centre, neighbour.
    c = [part.reshape(f, b, T, T).transpose(2, 3, 1, 0) for part, f, b in zip(c, functions, basis)]
    file = NepFile(
        version,
        type_names,
        zbl,
        cutoffs,
        l_max,
        has_q222,
        has_q1111,
        w0.reshape(nets, neurons, dim),
        b0,
        w1,
        np.broadcast_to(bias, nets),
        tuple(c),
        scale,
        neighbours,
    )
    return _unfolded(file)


def _kind(word):
    """Return the version and whether there is a ZBL, from the first word of a file."""
    name, *options = word.split("_")
    for option in options:
        for other, what in kOthers.items():
            if option.startswith(other):
                raise ValueError(f"{word} has {what}, which is not supported")
    if name in ("nep", "nep5"):
        raise ValueError(f"{word} is a NEP{name[3:] or 2}, which is not supported")
    if name not in ("nep3", "nep4") or options not in ([], ["zbl"]):
        raise ValueError(f"expected nep3, nep3_zbl, nep4 or nep4_zbl, got {word!r}")
    return int(name[3:]), bool(options)


def _number(word):
    """Return the finite number of a word in decimal digits."""
    if not set(word) <= kDigits or not math.isfinite(number := float(word)):
        raise ValueError(f"expected a finite number, got {word!r}")
    return number


def _count(word):
    """Return the integer from 0 on of a word."""
    number = _number(word)
    if not (number >= 0 and number.is_integer()):
        raise ValueError(f"expected an integer from 0 on, got {word!r}")
    return int(number)


def _words(lines, keyword, count=None):
    """Return the words after a keyword, which the next line begins with."""
    line = next(lines, [""])
    if line[0] != keyword or (count is not None and len(line) != count + 1):
        numbers = f" and {count} numbers" if count else ""
        raise ValueError(f"expected a line of `{keyword}`{numbers}, got {' '.join(line)}")
    return line[1:]


def _numbers(lines, keyword):
    """Return the numbers after a keyword, which the next line begins with."""
    return [_number(word) for word in _words(lines, keyword)]


def _counts(lines, keyword, count=None):
    """Return the integers from 0 on after a keyword, which the next line begins with."""
    return [_count(word) for word in _words(lines, keyword, count)]


def _zbl(numbers):
    if numbers[:2] == [0, 0]:
        raise ValueError("a flexible ZBL is not supported")
    if len(numbers) == 3:
        raise ValueError("a ZBL with cutoffs for each type is not supported")
    if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1] <= kMostOuter:
        raise ValueError(f"expected `zbl` with 0 <= inner < outer <= {kMostOuter:g}, got {numbers}")
    return tuple(numbers)


def _cutoffs(numbers, T):
    """Return the cutoffs [T, 2], and the most neighbours within them or None.

    Old files and some of MatPL's have two cutoffs alone.
    """
    if len(numbers) not in (2, 4, 2 * T + 2):
        raise ValueError(
            f"expected a line of `cutoff` and 2, 4 or {2 * T + 2} numbers, got {len(numbers)}"
        )
    neighbours = tuple(numbers[-2:]) if len(numbers) > 2 else None
    if neighbours and not all(number > 0 and number.is_integer() for number in neighbours):
        raise ValueError(f"expected numbers of neighbours in `cutoff`, got {neighbours}")
    cutoffs = np.array(numbers[:-2] if neighbours else numbers).reshape(-1, 2)
    if not (cutoffs > 0).all() or (cutoffs[:, 1] > cutoffs[:, 0]).any():
        raise ValueError(f"expected radial >= angular > 0 in `cutoff`, got {cutoffs.tolist()}")
    return np.broadcast_to(cutoffs, (T, 2)), neighbours


def _invariants(numbers):
    """Return l_max and whether there are q_222 and q_1111. An old file has a 2 for q_222."""
    l_max, *flags = numbers or [0]
    if not 1 <= l_max <= 4:
        raise ValueError(f"expected `l_max` from 1 to 4, got {l_max}")
    if len(flags) < 2 or flags[0] not in (0, 1, 2) or flags[1] not in (0, 1):
        raise ValueError(f"expected `l_max` with flags for q_222 and q_1111, got {flags}")
    for name, flag in zip(kInvariants[2:], flags[2:]):
        if flag:
            raise ValueError(f"the invariants {name} are not supported")
    if flags[0] and l_max < 2:
        raise ValueError("q_222 needs an `l_max` of 2 or more")
    return l_max, flags[0] > 0, flags[1] > 0
