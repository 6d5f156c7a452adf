"""Files nep.txt of GPUMD: neuroevolution potentials of versions 3 and 4.

    file = read("nep.txt")
    write(file, "own.txt")

A file has a head of lines with keywords, then a number a line: the nets, the coefficients c of the
radial functions, and the factors of the descriptor.

Source of the format: GPUMD's documentation, https://gpumd.org, "nep.txt"; order of the numbers:
NEP_CPU. Neither program is needed here.
"""

from dataclasses import dataclass
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
        bias: an energy that is subtracted.
        c: the coefficients [T, T, basis, F] of the radial and the angular part, for the types of
            the centre and of the neighbour.
        scale: [dim], the factors of the descriptor.
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
    bias: float
    c: tuple
    scale: np.ndarray

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
        return NepFile(
            self.version,
            list(names),
            self.zbl,
            self.cutoffs[own],
            self.l_max,
            self.has_q222,
            self.has_q1111,
            self.w0[nets],
            self.b0[nets],
            self.w1[nets],
            self.bias,
            tuple(c[own][:, own] for c in self.c),
            self.scale,
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

    The numbers that GPUMD takes for the sizes of its neighbour lists are those of a dense metal.
    """
    T = len(file.type_names)
    word = f"nep{file.version}" + ("_zbl" if file.zbl else "")
    lines = [f"{word} {T} {' '.join(file.type_names)}"]
    if file.zbl:
        lines.append(_line("zbl", file.zbl))
    are_equal = (file.cutoffs == file.cutoffs[0]).all()
    cutoffs = file.cutoffs[0] if are_equal else file.cutoffs.flatten()
    sizes = [int(0.5 * cutoff**3) + 20 for cutoff in file.cutoffs.max(0)]
    lines.append(_line("cutoff", [*cutoffs, *sizes]))
    lines.append(_line("n_max", [c.shape[3] - 1 for c in file.c]))
    lines.append(_line("basis_size", [c.shape[2] - 1 for c in file.c]))
    lines.append(_line("l_max", [file.l_max, 2 * file.has_q222, int(file.has_q1111)]))
    lines.append(_line("ANN", [file.w0.shape[1], 0]))
    for net in zip(file.w0, file.b0, file.w1):
        lines += [repr(float(number)) for part in net for number in part.flatten()]
    lines.append(repr(float(file.bias)))
    for c in file.c:
        lines += [repr(float(number)) for number in c.transpose(3, 2, 0, 1).flatten()]
    lines += [repr(float(number)) for number in file.scale]
    Path(path).write_text("\n".join(lines) + "\n")


def _line(keyword, numbers):
    return " ".join([keyword, *(f"{number:.17g}" for number in numbers)])


def _read(lines):
    lines = iter(lines)
    first = next(lines, [""])
    version, has_zbl = _kind(first[0])
    T = int(first[1]) if len(first) > 1 else 0
    type_names = first[2:]
    if T < 1 or len(type_names) != T:
        raise ValueError(f"expected {T} types in the first line, got {' '.join(first)}")
    if len(set(type_names)) < T:
        raise ValueError(f"expected different types in the first line, got {' '.join(first)}")

    zbl = _zbl(_numbers(lines, "zbl")) if has_zbl else None
    cutoffs = _cutoffs(_numbers(lines, "cutoff"), T)
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
    numbers = np.array([float(line[0]) for line in lines])
    nets = T if version == 4 else 1
    sizes = [nets * (dim + 2) * neurons, 1, *(T * T * f * b for f, b in zip(functions, basis)), dim]
    if len(numbers) != sum(sizes):
        raise ValueError(f"expected {sum(sizes)} numbers after the head, got {len(numbers)}")
    if not np.isfinite(numbers).all():
        raise ValueError("expected finite numbers, got NaN or infinity")
    of_nets, bias, *c, scale = np.split(numbers, np.cumsum(sizes)[:-1])
    of_nets = of_nets.reshape(nets, (dim + 2) * neurons)
    w0, b0, w1 = np.split(of_nets, [dim * neurons, (dim + 1) * neurons], axis=1)
    # In the file, coefficients are in the order of functions, basis, centre, neighbour.
    c = [part.reshape(f, b, T, T).transpose(2, 3, 1, 0) for part, f, b in zip(c, functions, basis)]
    return NepFile(
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
        float(bias[0]),
        tuple(c),
        scale,
    )


def _kind(word):
    """Return the version and whether there is a ZBL, from the first word of a file."""
    name, *options = word.split("_")
    for option in options:
        for other, what in kOthers.items():
            if option.startswith(other):
                raise ValueError(f"{word} has {what}, which is not supported")
    if name not in ("nep3", "nep4") or options not in ([], ["zbl"]):
        raise ValueError(f"expected nep3, nep3_zbl, nep4 or nep4_zbl, got {word!r}")
    return int(name[3:]), bool(options)


def _numbers(lines, keyword, count=None):
    """Return the numbers after a keyword, which the next line begins with."""
    line = next(lines, [""])
    if line[0] != keyword or (count is not None and len(line) != count + 1):
        numbers = f" and {count} numbers" if count else ""
        raise ValueError(f"expected a line of `{keyword}`{numbers}, got {' '.join(line)}")
    return [float(number) for number in line[1:]]


def _counts(lines, keyword, count=None):
    """Return what _numbers returns, as integers from 0 on."""
    numbers = _numbers(lines, keyword, count)
    if not all(number >= 0 and number.is_integer() for number in numbers):
        raise ValueError(f"expected integers from 0 on in `{keyword}`, got {numbers}")
    return [int(number) for number in numbers]


def _zbl(numbers):
    if numbers[:2] == [0, 0]:
        raise ValueError("a flexible ZBL is not supported")
    if len(numbers) == 3:
        raise ValueError("a ZBL with cutoffs for each type is not supported")
    if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1] <= 2.5:
        raise ValueError(f"expected `zbl` with 0 <= inner < outer <= 2.5, got {numbers}")
    return tuple(numbers)


def _cutoffs(numbers, T):
    """Return the cutoffs [T, 2]. Two more numbers are GPUMD's sizes of neighbour lists."""
    if len(numbers) not in (4, 2 * T + 2):
        raise ValueError(f"expected a line of `cutoff` and 4 or {2 * T + 2} numbers")
    cutoffs = np.array(numbers[:-2]).reshape(-1, 2)
    if not (np.isfinite(cutoffs) & (cutoffs > 0)).all() or (cutoffs[:, 1] > cutoffs[:, 0]).any():
        raise ValueError(f"expected radial >= angular > 0 in `cutoff`, got {cutoffs.tolist()}")
    return np.broadcast_to(cutoffs, (T, 2))


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
