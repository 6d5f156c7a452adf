"""Files nep.txt of GPUMD: neuroevolution potentials of versions 3 and 4.

    file = read("nep.txt")
    write(file, "own.txt")

A file has a head of lines with keywords, then one number per line: the nets, the energies that are
subtracted, the coefficients c of the radial functions, the factors of the descriptor, and the
parameters of a flexible ZBL. MatPL writes an energy for each type, GPUMD a single one.

Source of the format: GPUMD's documentation, https://gpumd.org, "nep.txt"; order of the numbers:
NEP_CPU; MatPL's energies: `get_nn_params` of src/model/nep_net.py and `apply_ann_one_layer` of its
nep_cpu.cpp, commit 907cced of https://github.com/LonxunQuantum/MatPL. None of them is needed here.
"""

import itertools
import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

kElements = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se "
    "Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy "
    "Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu"
).split()
# Kinds of models that are no energy of the nets and a ZBL alone.
kOthers = {
    "dipole": "a dipole",
    "polarizability": "a polarizability",
    "charge": "charges (qNEP)",
    "vdw": "a van der Waals energy",
    "temperature": "a temperature",
}
kTriples = "112", "123", "233", "134"  # the invariants of third order beside q_222
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
        zbl: None, or the inner and the outer cutoff of the universal ZBL. A third number is the
            factor of covalent radii of a typewise cutoff. A flexible ZBL is an array [T, T, 10],
            for each pair of types inner and outer cutoff and four times a and b of a exp(-b x).
        cutoffs: [T, 2], the radial and the angular cutoff of each type. Those of a pair are the
            means of its types'.
        l_max: of the angular part, 1 to 4.
        has_q222, has_q1111: whether the angular part has these invariants.
        triples: those of kTriples that it has, in this order.
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
    zbl: tuple | np.ndarray | None
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
    triples: tuple = ()

    def of_types(self, names):
        """Return the file of these types alone, in their order.

        Raises:
            ValueError: the file lacks a type, or a name occurs twice.
        """
        missing = [name for name in names if name not in self.type_names]
        if missing:
            types = " ".join(self.type_names) if len(self.type_names) < 10 else "the file"
            raise ValueError(f"expected types of {types}, got {' '.join(missing)}")
        if len(set(names)) < len(names) or not names:
            raise ValueError(f"expected different types, got {' '.join(names)}")
        own = [self.type_names.index(name) for name in names]
        nets = own if len(self.w0) > 1 else [0]
        return replace(
            self,
            type_names=list(names),
            zbl=self.zbl[own][:, own] if isinstance(self.zbl, np.ndarray) else self.zbl,
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
        ValueError: the file is no nep.txt, or a model that is not supported. The message names the
            line.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = _Lines(file)
        try:
            return _read(lines)
        except ValueError as error:
            raise ValueError(f"{path}, line {lines.number}: {error}") from None


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
    word = f"nep{file.version}" + ("_zbl" if file.zbl is not None else "")
    lines = [f"{word} {T} {' '.join(file.type_names)}"]
    is_flexible = isinstance(file.zbl, np.ndarray)
    if file.zbl is not None:
        lines.append(_line("zbl", (0, 0) if is_flexible else file.zbl))
    are_equal = (file.cutoffs == file.cutoffs[0]).all()
    cutoffs = file.cutoffs[0] if are_equal else file.cutoffs.flatten()
    volumes = 4 / 3 * np.pi * file.cutoffs.max(0) ** 3
    neighbours = file.neighbours or np.ceil(kDensest * volumes)
    lines.append(_line("cutoff", [*cutoffs, *np.minimum(neighbours, kMostNeighbours)]))
    lines.append(_line("n_max", n_max))
    lines.append(_line("basis_size", basis_size))
    # NEP_CPU ignores further flags after the 2 by which older programs know q_222.
    of_triples = [int(triple in file.triples) for triple in kTriples] if file.triples else []
    q222 = file.has_q222 * (1 if file.triples else 2)
    lines.append(_line("l_max", [file.l_max, q222, file.has_q1111, *of_triples]))
    lines.append(_line("ANN", [file.w0.shape[1], 0]))
    for net in zip(file.w0, file.b0, file.w1):
        lines += [repr(float(number)) for part in net for number in part.flatten()]
    lines.append(repr(float(file.bias[0])))
    for c in file.c:
        lines += [repr(float(number)) for number in c.transpose(3, 2, 0, 1).flatten()]
    lines += [repr(float(number)) for number in file.scale]
    if is_flexible:
        of_pairs = file.zbl[np.triu_indices(T)]
        lines += [repr(float(number)) for number in of_pairs.flatten()]
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


class _Lines:
    """The words of the lines of a file that have any. `number` is that of the last line."""

    def __init__(self, file):
        self.file = file
        self.number = 0

    def __iter__(self):
        for line in self.file:
            self.number += 1
            words = line.split()
            if words:
                yield words

    def next(self):
        """Return the words of the next line, or an empty one at the end of the file."""
        return next(iter(self), [""])

    def numbers(self, counts):
        """Return the numbers in the rest of the file, one per line, as many as one of `counts`."""
        head = self.number
        with warnings.catch_warnings(action="ignore"):  # if there are none
            try:
                numbers = np.loadtxt(self.file, comments=None, ndmin=2)
            except ValueError:
                numbers = np.empty((0, 0))
        if numbers.shape[1] == 1 and len(numbers) in counts and np.isfinite(numbers).all():
            return numbers[:, 0]
        count = sum(1 for _ in self.numbers_after(head))
        raise ValueError(f"expected {counts[0]} numbers after the head, got {count}")

    def numbers_after(self, head):
        """Read again, slowly, and yield the numbers after the line `head`."""
        self.file.seek(0)
        self.number = 0
        for words in self:
            if self.number <= head:
                continue
            if len(words) > 1:
                raise ValueError(
                    f"expected one number per line after the head, got {' '.join(words)}"
                )
            yield _number(words[0])


def _read(lines):
    first = lines.next()
    version, has_zbl = _kind(first[0])
    T = _count(first[1]) if len(first) > 1 else 0
    type_names = first[2:]
    if T < 1 or len(type_names) != T:
        raise ValueError(f"expected {T} types in the first line, got {' '.join(first)}")
    if len(set(type_names)) < T:
        raise ValueError(f"expected different types in the first line, got {' '.join(first)}")
    unknown = [name for name in type_names if name not in kElements]
    if unknown:
        raise ValueError(f"expected symbols of elements, such as Si, got {' '.join(unknown)}")

    zbl = _zbl(_numbers(lines, "zbl")) if has_zbl else None
    line_of_zbl = lines.number
    cutoffs, neighbours = _cutoffs(_numbers(lines, "cutoff"), T)
    if zbl and zbl[1] > cutoffs.min():
        lines.number = line_of_zbl
        raise ValueError(
            f"expected `zbl` within the angular cutoff of {cutoffs.min():g}, got {zbl[1]:g}: "
            "energies would jump there"
        )
    functions = [number + 1 for number in _counts(lines, "n_max", 2)]
    basis = [number + 1 for number in _counts(lines, "basis_size", 2)]
    l_max, has_q222, has_q1111, triples = _invariants(_counts(lines, "l_max"))
    neurons, layers = _counts(lines, "ANN", 2)
    if neurons == 0 or layers != 0:
        raise ValueError(f"expected `ANN <neurons> 0`, got {neurons} {layers}")
    dim = functions[0] + functions[1] * (l_max + has_q222 + has_q1111 + len(triples))

    nets = T if version == 4 else 1
    size_of_nets = nets * (dim + 2) * neurons
    sizes_of_c = [T * T * f * b for f, b in zip(functions, basis)]
    pairs = T * (T + 1) // 2 if zbl == (0, 0) else 0
    expected = size_of_nets + 1 + sum(sizes_of_c) + dim + 10 * pairs
    head = lines.number
    # A file of MatPL has an energy for each type.
    numbers = lines.numbers((expected, expected + nets - 1))
    biases = len(numbers) - expected + 1
    ends = np.cumsum([size_of_nets, biases, *sizes_of_c, dim])
    of_nets, bias, *c, scale, of_zbl = np.split(numbers, ends)
    of_nets = of_nets.reshape(nets, (dim + 2) * neurons)
    w0, b0, w1 = np.split(of_nets, [dim * neurons, (dim + 1) * neurons], axis=1)
    # In the file, coefficients are in the order of functions, basis, centre, neighbour.
    c = [part.reshape(f, b, T, T).transpose(2, 3, 1, 0) for part, f, b in zip(c, functions, basis)]
    if pairs:
        of_zbl = of_zbl.reshape(pairs, 10)
        first_wrong = _wrong_pair(of_zbl, cutoffs[:, 1].min())
        if first_wrong is not None:
            before = len(numbers) - of_zbl.size + 10 * first_wrong
            next(itertools.islice(lines.numbers_after(head), before, None))
            raise ValueError(
                "expected 0 <= inner < outer <= the angular cutoff of "
                f"{cutoffs[:, 1].min():g} in the flexible ZBL of each two types, "
                f"got {of_zbl[first_wrong, :2].tolist()}"
            )
        zbl = np.empty((T, T, 10))
        one, other = np.triu_indices(T)
        zbl[one, other] = zbl[other, one] = of_zbl
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
        triples,
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
    line = lines.next()
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
    """Return the numbers after `zbl`. Those of a flexible ZBL are 0 and 0."""
    if len(numbers) in (2, 3) and numbers[:2] == [0, 0]:
        return 0, 0
    if len(numbers) not in (2, 3) or not 0 <= numbers[0] < numbers[1] <= kMostOuter:
        raise ValueError(f"expected `zbl` with 0 <= inner < outer <= {kMostOuter:g}, got {numbers}")
    if len(numbers) == 3 and numbers[2] <= 0:
        raise ValueError(f"expected `zbl` with a factor of radii above 0, got {numbers[2]:g}")
    return tuple(numbers)


def _wrong_pair(of_zbl, cutoff):
    """Return the first pair of types whose flexible ZBL [pairs, 10] has wrong cutoffs, or None."""
    inner, outer = of_zbl[:, :2].T
    is_wrong = ~((inner >= 0) & (inner < outer) & (outer <= cutoff))
    return int(is_wrong.argmax()) if is_wrong.any() else None


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
    """Return l_max, whether there are q_222 and q_1111, and the further invariants.

    GPUMD writes a 2 for q_222.
    """
    l_max, *flags = numbers or [0]
    if not 1 <= l_max <= 4:
        raise ValueError(f"expected `l_max` from 1 to 4, got {l_max}")
    are_valid = 2 <= len(flags) <= 2 + len(kTriples) and max(flags[:1]) <= 2 and max(flags[1:]) <= 1
    if not are_valid:
        raise ValueError(
            f"expected `l_max` with flags for q_222, q_1111, q_{', q_'.join(kTriples)}, got {flags}"
        )
    triples = tuple(triple for triple, flag in zip(kTriples, flags[2:]) if flag)
    for triple in (("222",) if flags[0] else ()) + triples:
        if l_max < int(triple[-1]):
            raise ValueError(f"q_{triple} needs an `l_max` of {triple[-1]} or more, got {l_max}")
    return l_max, flags[0] > 0, flags[1] > 0, triples
