"""A contract is read completely or refused. read_contracts.cpp reads the contracts of this file."""

import re
from pathlib import Path

import pytest

import calcops_jit

ROOT = Path(calcops_jit.__file__).parent


def contract(line="", n="", **lines):
    """Return a contract of f(Tensor x[, <n>]) -> Tensor y. `line` replaces that of x."""
    schema = f"f(Tensor x{', ' + n if n else ''}) -> Tensor y"
    return "\n".join([schema, f"x  {line or '[N]; float64.'}", *entries(lines), "y  [N]; like x."])


def entries(lines):
    return [f"{name}  {line}" for name, line in lines.items()]


def tensors(schema, **lines):
    return "\n".join([schema, *entries(lines)])


OPTIONAL = {
    f"an optional {kind} with a clause": (
        f"composition f\nf(Tensor x, {kind}? k) -> Tensor\nx  [N]; float64.\nk  {clause}.",
        f"but its type in f is {kind}?",
    )
    for kind, clause in [("bool", ">= 0"), ("str", '"a" or "b"')]
}
COPY = "f(Tensor x) -> Tensor y\nx  [N]; float64.\ny  [N]; like x."

# Contracts that are right.
RIGHT = {
    "a negative range": contract(n="int k", k="-5 to 5."),
    "a decimal bound of a float": contract(n="float t", t="> 0.5."),
    "a small bound": contract(n="float t", t="> 0.0015."),
    "bounds with exponents": contract(n="float t", t="-1E+3 to 1.5e-6."),
    "a limit between sizes": contract("[N, K]; float64; K <= N; 2K < 3*N + 1; 1 <= N on CUDA."),
    "a multiple": contract("[N]; float64; N % 4 == 0 on CUDA."),
    "two bounds": contract(n="float t", t="> 0; < 1."),
    "a power": contract(n="int k", k="0 to 10^6."),
    "strings with commas, full stops and semicolons": contract(
        n="str s", s='"a, b", "c; d" or "e. f". Text.'
    ),
    "a lower limit of a size": contract("[N]; float64; N >= 1."),
    "two limits": contract("[N]; float64; N >= 1; N < 2^40."),
    "another shape of as many numbers": contract("[N] or [N, 1]; float64."),
    "a sum that sets one size": contract("[N + 1]; float64."),
    "a size that comes later": tensors(
        "f(Tensor x, int n) -> Tensor y", x="[n, 2n + 1]; float64.", n=">= 0.", y="[n]; like x."
    ),
    "like a later line": tensors(
        "f(Tensor x, Tensor z) -> Tensor y", x="[N]; like z.", z="[N]; float32.", y="[N]; like z."
    ),
    "leading dimensions": contract("[..., N]; float64."),
    "entries before the shape": contract("entries 0 <= j < N at row; [N]; int64."),
    "text only": contract(n="float t", t="Not a clause. As this."),
    "no full stop": contract("[N]; float64"),
    "a schema of many lines": "f(Tensor\n  x)\n  -> Tensor y\nx [N]; float64.\ny [N]; like x.",
    "a result of which only the gradient is given": tensors(
        "f_backward(Tensor grad_y, Tensor x) -> Tensor x", x="[N]; float64.", grad_y="[N]; like x."
    ),
    "optional numbers of a composition": "composition f\n"
    "f(Tensor x, int? a, str? b) -> Tensor\nx  [N]; float64.\na  Text.\nb  Text.",
    "vmap with an optional tensor that cannot be joined": tensors(
        "f(Tensor x, Tensor? z=None) -> Tensor y",
        x="[N, M]; float64.",
        z="[N + M]; like x.",
        y="[N]; like x.",
        vmap="joins N",
    ),
    "a schema whose parenthesis begins a line": COPY.replace("x)", "x\n)", 1),
    "text that begins with a letter that is not ASCII": contract(
        "[N]; float64. Écart.", n="float t", t="Σ of x."
    ),
    "a result of which an optional argument has the dtypes": tensors(
        "f(Tensor k, Tensor? x=None) -> Tensor y",
        k="[N]; int32.",
        x="[N]; like y.",
        y="[N]; float32 or float64.",
    ),
    "defaults that are no names": contract(
        n="""str s="vmap", str t='is', bool b=True""", s='"vmap" or "b".', t='"is".', b="Text."
    ),
    "kernels that take an optional number": tensors(
        "f(Tensor x, int a, float b) -> Tensor y\ng(Tensor x, int? a, float? b) -> Tensor y",
        x="[N]; float64.",
        a="> 0.",
        b="> 0.",
        y="[N]; like x.",
        kernels="f of g",
    ),
    "kernels of an operator with a namespace": tensors(
        "mine::f(Tensor x) -> Tensor y\nmine::g(Tensor x) -> Tensor y",
        x="[N]; float64.",
        y="[N]; like x.",
        kernels="mine::f of mine::g",
    ),
    "an upper limit for CUDA": contract("[N]; float64; N*N < 2^31 on CUDA."),
    "tabs": "\t\n" + contract("[N]; float64.").replace("  ", "\t"),
    "a dtype that only an optional tensor has": tensors(
        "f(Tensor k, Tensor? x) -> Tensor y",
        k="[N]; int32.",
        x="[N]; float32 or float64.",
        y="[N]; like x.",
    ),
}

# Contracts that are wrong, and what their errors say: {line of the tensor x: message}.
WRONG_TENSORS = {
    "[N]; float64. N >= 2.": "text that reads like a clause in `N >= 2`",
    "[N]; float64. in units of 10000 Å or so.": "got `in units of 10000 Å`",
    "[N]; float64. constant.": "text begins with a capital letter, got `constant.`",
    "[N, 2.5]; float64.": "expected an integer in `[N, 2.5]`",
    "[N]; float64; not float16.": "got `not` in `not float16`",
    "[N]; flaot32.": "got `flaot32`, which may mean float32 in `flaot32`",
    "flaot32; [N].": "got `flaot32`, which may mean float32 in `flaot32`",
    "[N]; float32 or double.": "expected a dtype, got `double`, which may mean float64",
    "[N]; int64; entires 0 <= j < N.": "got `entires`, which may mean entries",
    "[N]; complex64.": "expected a clause of a tensor, got `complex64` in `complex64`",
    "[N]; uint32.": "got `uint32`, which may mean int64",
    "[2N, N]; float64.": "determine N; write N before it or in a line above",
    "[N, 2M]; float64.": "determine M; write M before it or in a line above, or add an argument `int M`",
    "[N]; float64; N < 5 on cuda.": "expected `CUDA`, got `cuda`",
    "[N]; float32 read as float128.": "expected a dtype, got `float128`",
    "[N]; int64 read as int32.": "expected integers read as int64",
    "[N]; int64 read as float64.": "expected integers read as int64",
    "[N]; float64; N <= 2.5.": "expected sizes or an integer, as in N >= 1 in `N <= 2.5`",
    "[N]; float64; N == 4.": "equal sizes have the same name, and `==` is for N % 4 == 0",
    "[N]; float64; N % 4 = 0.": "expected `==`, got `=`",
    "[N]; float64; N % 4 == 1.": "expected `0`, got `1`",
    "[N]; float64; N % 0 == 0.": "expected a number above 0 behind `%`",
    "[N]; float64; N % M == 0.": "expected a number, got `M`",
    "[N]; float64; N <= M.": "has the size M",
    "[N]; int64; entries 1 <= j < N at row.": "expected `0 <=`, since entries count from 0",
    "[N]; int64; entries 0 < j < N at row.": "expected `<=`, got `<`",
    "[N]; int64; entries 0 <= j <= N at row.": "expected `<`, got `<=`",
    "[N]; float32; float64.": "a second clause of the same kind in `float64`",
    "[N][K]; float64.": "got `[` in `[N][K]`   legal: [N, 3] or [N, 3, 1] |",
    "[N; float64.": "expected `]`, got `;`",
    "[N]; float64; N × 2.": "expected `<`, `<=`, `>` or `>=`, got `×`",
    "[N]; float64 or float64.": "the same twice",
    "[N]; float64; > 0.": "a clause of the kind `bounds`",
    "[N]; float64; N < 2^40N.": "got `N` in `N < 2^40N`",
    "[N]; float64; N < 5 rows.": "expected `;`, or the full stop that ends the clauses, got `rows`",
    "[N]; float64. float32.": "text begins with a capital letter",
    "[N]; float64. [N, 3].": "text begins with a capital letter",
    "[N]; like x.": "`like` is for a tensor that has dtypes",
    "[N]; like z.": "no tensor is named z",
    "[N].": "expected its dtype",
    "[N]; float64; entries 0 <= j < N at row.": "entries are integers",
    "[N]; uint8; entries -1 or 0 <= j < N at row.": "-1 is no entry of an unsigned dtype",
    "[N]; int64; entries 0 <= j < N at frame, row.": "more positions behind `at` than dimensions",
    "[N + N]; float64.": "a dimension of [N + N] cannot determine N",
    "[2N]; float64.": "cannot determine N",
    "[N + M]; float64.": "cannot determine N, M",
    "[N]; int64; entries 0 <= j < M at row.": "has the size M",
    "[N]; float64; N*M < 2^40.": "has the size M",
    "[N, 3] or [M]; float64.": "lacks N",
    "[N] or [N, 1, 1, 1, 1, 1, 1, 1, 1]; float64.": "more than 8 dimensions",
    "[N*9223372036854775807*2]; float64.": "a number is too large",
    "[N or 1]; float64.": "expected `]`, got `or`",
    "[N, ...]; float64.": "expected `...` as the first dimension, as in [..., N] in `[N, ...]`",
    "[..., ...]; float64.": "expected `...` as the first dimension",
    "[..., N] or [N]; float64.": "expected one shape, since it has `...`",
    "[N] or [...]; float64.": "expected one shape, since it has `...`",
    "[2*...]; float64.": "expected a size, such as N, 3, 2N or N + M, got `...`",
    "any; float64.": "expected `shape`, got `;`",
    "any shape or [N]; float64.": "expected `;`, or the full stop that ends the clauses, got `or`",
}
# {argument: its line: message}
WRONG_NUMBERS = {
    "int k: 0 to 2^64.": "line 3: `k`: a number is too large",
    "int k: 0 to 2^80.": "a number is too large",
    "int k: 0 to 99999999999999999999.": "a number is too large",
    "int k: 0 to 2^3^4.": "got `^` in `0 to 2^3^4`",
    "int k: 5 to 2.": "expected the lower number first in `5 to 2`",
    "int k: > 0.5.": "expected integers, got 0.5",
    "int k: 0 to five.": "expected a number, got `five`",
    "int k: 0 to 5; 1 where absent.": "a second clause of the same kind in `1 where absent`",
    "float t: > 1e-.": "got `e` in `> 1e-`",
    "float t: < 2^2.5.": "expected an integer",
    "float t: > 1.2.3.": "expected an integer",
    "int k=7: 0 to 5.": "its own default 7",
    "float t=0.0: > 0.": "its own default 0",
    'str s="c": "a" or "b".': "refuses its own default",
    "float t: < 1e999.": "a number is too large",
    "int k: 0 to 1e6.": "expected integers, got 1e6",
    'str s: one of "a" or "b".': 'legal: [N, 3] | 0 to 2^40 | > 0 | "a" or "b"',
    "int k: one of 1, 2 or 3.": "got `one` in `one of 1, 2 or 3`",
    "int[2] s: (h, w), both >= 1.": "got `(` in `(h, w), both >= 1`",
    'str s: "a" or "b.': 'expected a string in quotation marks, got `"b.`',
    'str s: "a" or "a".': "the same twice",
    "float t: not a clause.": "text that begins with a capital letter, got `not`",
    "int k: like x.": "`k`: a clause of the kind `like`, but its type in f is int",
    'int k: "a" or "b".': "a clause of the kind `strings`",
    "int k: (h, w).": "got `(` in `(h, w)`",
    "float t: > 0. and < 1.": "text begins with a capital letter, got `and < 1.`",
    "int k: 5.": "expected `to`",
    "int k: N > 0.": "text that reads like a clause in `N > 0`",
    "int k: >= 0. 0 to 5.": "text begins with a capital letter, got `0 to 5.`",
    'str s: "a" or "b". "c".': "text begins with a capital letter",
    'str] s: "a" or "b".': "expected ident but found",
    "int? k: > 0.5.": "expected integers, got 0.5",
    "bool? k: Text.": "write a default that means none, such as False",
    "str? k: Text.": "kernels take no str? `k`; write a default that means none",
    "int k: <= N.": "| n <= N, in the line of a tensor",
    "bool k: 0 to 1.": "its type in f is bool, which has text only",
    "float k: float32.": "which has clauses of the kind bounds only",
    "float k: [0, 1].": "which has clauses of the kind bounds only, such as 0 to 1",
    "float k: in [0, 1].": "got `in` in `in [0, 1]`",
    "float? k=1: Text.": "the default of `k` is no float?; write 1.0",
    "bool k=1: Text.": "`f`: the default of `k` is no bool",
    "int k=1, float t: > 0.": "`f`: arguments without a default come first",
    "float lambda: > 0.": "`f`: `lambda` is a keyword of Python; write `lambda_`",
    "float kernels: > 0.": "`f`: no argument or result is named kernels",
    "float vmap: > 0.": "`f`: no argument or result is named vmap",
    "int? N: >= 1.": "`N`: a size of a shape has this name, so its type is int, but in f it is int?",
    "float N: > 1.": "so its type is int, but in f it is float",
    "int[] N: Text.": "so its type is int, but in f it is int[]",
    "Tensor N: [N]; like x.": "so its type is int, but in f it is Tensor",
    "Scalar k: Text.": "kernels take no Scalar `k`",
    "Tensor[] k: Text.": "kernels take no Tensor[] `k`",
}
# A contract, with bars between its lines, and below it the message.
WRONG_CONTRACTS = """
f(Tensor x, Tensor e) -> Tensor y | x [N]; float64. | e any shape; int64; entries 0 <= j < N at row. | y [N]; like x.
    `at` names the dimensions of entries
f(Tensor w, Tensor? x=None) -> Tensor x | w [N]; float64. | x [N]; like w.
    a result is always there
f(Tensor x) -> Tensor y | x [N]; int64. entries 0 <= j < N at row. | y [N]; like x.
    text begins with a capital letter, got `entries 0 <= j < N a`
f(Tensor x, Tensor? e) -> Tensor y | x [N]; float64. | e any shape; int64; entries 0 <= j < N; 0 where absent. | y [N]; like x.
    got `where` in `0 where absent`
f.a(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x.
    expected a name without a point
f(Tensor x, ...) -> Tensor y | x [N]; float64. | y [N]; like x.
    and no `...`
f(Tensor x) -> () | x [N]; float64.
    expected a result
f(Tensor x, int k) -> Tensor y | x [N]; float64. | k only where m is "a". | y [N]; like x.
    expected a clause, or text that begins with a capital letter, got `only`
f(Tensor x, int k) -> Tensor y | x [N]; float64; N < 2^3 where k is large. | k >= 0. | y [N]; like x.
    expected `;`, or the full stop that ends the clauses, got `where`
f(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x. | linaer y(x)
    expected a clause, or text that begins with a capital letter, got `y`
f(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x. | z [N]; float64.
    line 4: `z`: no operator has it as an argument or a result
f(Tensor x, int k) -> Tensor y | x [N]; float64. | y [N]; like x.
    no line describes its argument `k`
f(Tensor x) -> Tensor z | x [N]; float64.
    no line describes its result `z`
f(Tensor x) -> Tensor | x [N]; float64. | y [N]; like x.
    its results have names
f(Tensor x) -> Tensor y | y [N]; like x.
    line 1: `f`: no line describes its argument `x`
is(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x.
    line 1: `is`: `is` is a keyword of Python; write `is_`
mine::in(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x.
    line 1: `mine::in`: `in` is a keyword of Python
f(Tensor x, float None) -> Tensor y | x [N]; float64. | None > 0. | y [N]; like x.
    expected ident but found 'None'
g(Tensor x, int N) -> Tensor y | f(Tensor x, int? N) -> Tensor y | x [N]; float64. | N >= 1. | y [N]; like x.
    line 4: `N`: a size of a shape has this name, so its type is int, but in f it is int?
f(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x; >= 0.
    line 3: `y`: a clause of the kind `bounds`, but its type in f is Tensor
f(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x; "a" or "b".
    line 3: `y`: a clause of the kind `strings`, but its type in f is Tensor
f(Tensor x) -> Tensor y | x [N]; float32 or float64. | y [N]; float32 or float64.
    line 3: `y`: no argument of f selects one of its dtypes; write one dtype, or `like x`
f(Tensor x) -> Tensor y | g(Tensor x, Tensor w) -> Tensor y | x [N]; int64. | w [N]; float32 or float64. | y [N]; like w.
    line 5: `y`: no argument of f selects one of its dtypes; write one dtype, or `like x`
f(Tensor x) -> Tensor y | f(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x.
    line 2: `f`: a second schema
f(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x. | x [N]; float64.
    line 4: `x`: a second line
f(Tensor x) -> Tensor y | x[N]; float64. | y [N]; like x.
    line 2: `x[N];`: expected a name, and a space behind it
f(Tensor x) -> Tensor y | x: [N]; float64. | y [N]; like x.
    line 2: `x:`: expected a name, and a space behind it
f(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x. | vmap joins N | vmap joins N
    line 5: `vmap`: a second line
x [N]; float64.
    expected a schema
f(Tensor x, Tensor z) -> Tensor y | x [N]; like z. | z [N]; float64. | y [N]; like x.
    `y`: `like` is for a tensor that has dtypes
f(Tensor x, int k) -> Tensor y | x [N]; like k. | k >= 0. | y [N]; like x.
    no tensor is named k
f(Tensor x) -> Tensor y | x [N]; float64. | y [...]; like x.
    no argument that is always given has the size `...` in f
f(Tensor x, Tensor? z) -> Tensor y | x [N]; float64. | z [..., N]; like x. | y [...]; like x.
    no argument that is always given has the size `...` in f
f(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x. | vmap joins ...
    no tensor above has the size ...
f(Tensor x) -> Tensor y | x [N]; float64. | y [M]; like x.
    no argument that is always given has the size M in f
f(Tensor x, Tensor? z) -> Tensor y | x [N]; float64. | z [M]; like x. | y [M]; like x.
    has the size M
f(Tensor x) -> Tensor y | g(Tensor x, Tensor z) -> Tensor y | x [N]; float64. | z [M]; like x. | y [M]; like x.
    has the size M in f
f(Tensor x, Tensor z) -> Tensor y | x [N + M]; float64. | z [M]; like x. | y [N]; like x.
    cannot determine N, M; write it below the line of `z`, which has M
f(Tensor x) -> Tensor y | x [N]; float64. | y [N] or [N, 1]; like x.
    a result has one shape
f(Tensor x) -> int | x [N]; float64.
    kernels return no int, only Tensor
f(Tensor(a!) x) -> Tensor y | x [N]; float64. | y [N]; like x.
    write Tensor and return a new tensor instead of Tensor(a!)
f(Tensor x) -> Tensor(a!) y | x [N]; float64. | y [N]; like x.
    write Tensor and return a new tensor instead of Tensor(a!)
f(Tensor(a) x) -> Tensor(a) | x [N]; float64.
    write Tensor and return a new tensor instead of Tensor(a)
f(Tensor x, Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x.
    two arguments `x`
f(Tensor x) | x [N]; float64.
    expected `-> ` and the results
f(int n) -> Tensor y | n >= 0. | y [n]; float64.
    expected a Tensor that is always given
f(Tensor? x) -> Tensor y | x [N]; float64. | y []; float64.
    expected a Tensor that is always given
f(Tensor x, Tensor k) -> Tensor y | g(Tensor x, Tensor? k) -> Tensor y | x [N]; float64. | k [N]; like x. | y [N]; like x. | kernels g of f
    line 6: `kernels`: g cannot use those of f: they need `k`, which may be absent
f(Tensor x) -> Tensor y | g(Tensor x, bool[1] output_mask) -> Tensor y | x [N]; float64. | y [N]; like x. | kernels g of f
    not all results are wanted, and f has no output_mask
f(Tensor x) -> (Tensor y, Tensor z) | g(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x. | z [N]; like x. | kernels g of f
    not all results are wanted, and f has no output_mask
f(Tensor x) -> (Tensor y, Tensor z) | g(Tensor x) -> Tensor z | x [N]; float64. | y [N]; like x. | z [N]; like x. | kernels g of f
    its results are not the first ones of these
f(Tensor x, int N=3) -> Tensor y | g(Tensor x) -> Tensor y | x [N]; float64. | N >= 1. | y [N]; like x. | kernels g of f
    they need `N`, which is a size of its tensors
f(Tensor x, int k) -> Tensor y | g(Tensor x) -> Tensor y | x [N]; float64. | k >= 1. | y [N]; like x. | kernels g of f
    they need `k`, which has no default
f(Tensor x) -> Tensor y | g(Tensor x, int k) -> Tensor y | x [N]; float64. | k >= 1. | y [N]; like x. | kernels g of f
    they do not take `k`
f(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x. | kernels f of f
    they are its own
f(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x. | kernels f of g
    no schema names g
f(Tensor x) -> Tensor y | g(Tensor x) -> Tensor y | h(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x. | kernels f of g; f of h
    a second time f
f(Tensor x) -> Tensor y | g(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x. | kernels f, g
    expected `of`, got the end in `f, g`
f(Tensor x, int k) -> Tensor y | g(Tensor x, float k) -> Tensor y | x [N]; float64. | k > 0. | y [N]; like x. | kernels f of g
    f cannot use those of g: they take `k` as float
f(Tensor x, int? k) -> Tensor y | g(Tensor x, float? k) -> Tensor y | x [N]; float64. | k > 0. | y [N]; like x. | kernels f of g
    f cannot use those of g: they take `k` as float?
f(Tensor x) -> Tensor y | g(Tensor x) -> Tensor y | h(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x. | kernels f of g; g of h
    the kernels of g are those of h; write `f of h`
f(Tensor x) -> Tensor y | g(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x. | kernels f of g | kernels g of f
    line 6: `kernels`: a second line, where `;` would continue the first one
f(Tensor x) -> Tensor y |   kernels f of g | g(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x.
    line 2: documentation that reads like the line of `kernels`; write that line in the first
f(Tensor x) -> Tensor y |   kernels  on CUDA. | x [N]; float64. | y [N]; like x.
    line 2: documentation that reads like the line of `kernels`
f(Tensor x) -> Tensor y |   vmap joins N | x [N]; float64. | y [N]; like x.
    line 2: documentation that reads like the line of `vmap`
f(Tensor x) -> Tensor y |   y  = 2 x | x [N]; float64. | y [N]; like x.
    or begin the documentation's with another word
f(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x. | vmap joins M
    no tensor above has the size M
f(Tensor x) -> Tensor y | x [N]; float64. | y [N]; like x. | vmap N
    expected `joins`, got `N`
"""


def wrong_contracts():
    yield from OPTIONAL.values()
    yield "  x  [N]; float64.", "at the line's beginning"
    yield (
        tensors(
            f"f({', '.join(f'Tensor x{i}' for i in range(30))}) -> Tensor y",
            **{f"x{i}": "[N]; float64." for i in range(30)},
        ),
        "line 26: `x24`: more than 24 lines",
    )
    yield (
        contract(f"[{', '.join(f'N{i}' for i in range(30))}]; float64."),
        "line 2: `x`: more than 24 sizes",
    )
    for line, message in WRONG_TENSORS.items():
        yield contract(line), message
    for argument, message in WRONG_NUMBERS.items():
        schema, _, line = argument.partition(": ")
        name = schema.split()[-1].partition("=")[0]
        yield contract(n=schema, **{name: line}), message
    lines = WRONG_CONTRACTS.strip().splitlines()
    for text, message in zip(lines[::2], lines[1::2], strict=True):
        yield text.replace(" | ", "\n"), message.strip()


README = (ROOT / "contracts" / "README.md").read_text()
PAGE = README[README.index("# Contracts\n") : README.index("## Derivatives\n")]
RIGHT |= {
    f"example {i + 1} of the README": text
    for i, text in enumerate(re.findall(r"```text\n(.+?)\n```", PAGE, re.S))
}


def kernel(name, contract=COPY, op="f", more=""):
    return f"kernel {op} {name}\n{more}{contract}"


RIGHT_KERNELS = {
    "kernels of another operator": kernel(
        "with_int",
        tensors(
            "f(Tensor x, int k=1) -> Tensor y\ng(Tensor x) -> Tensor y",
            x="[N]; float64.",
            k=">= 0.",
            y="[N]; like x.",
            kernels="g of f",
        ),
    ),
    "a copy": kernel("copy"),
    "an enumeration": kernel("with_choice", contract(n="str s", s='"a" or "b".')),
    "two types": kernel(
        "copy", COPY.replace("float64", "float32 or float64"), more="kernel f copy_float\n"
    ),
}

WRONG_KERNELS = {
    "an operator without kernels": (kernel("copy", COPY.replace("\n", "\ng(Tensor x) -> Tensor y\n", 1)), "no kernel of g"),
    "a double for an int": (kernel("with_double", contract(n="int k", k=">= 0.")), "parameter 2: expected int64_t for `k`, got double"),
    "an int64_t for a float": (kernel("with_int", contract(n="float k", k=">= 0.")), "expected double for `k`, got int64_t"),
    "a bool for a str": (kernel("with_bool", contract(n="str k", k='"a" or "b".')), "expected enum class for `k`, got bool"),
    "an int64_t for an int?": (kernel("with_int", contract(n="int? k", k=">= 0.")), "expected const int64_t* for `k`, got int64_t"),
    "an int64_t for a SymInt[]": (kernel("with_int", contract(n="SymInt[] k", k="Text.")), "expected List<int64_t> for `k`"),
    "a View for an int": (kernel("with_view", contract(n="int k", k=">= 0.")), "expected int64_t for `k`, got View<const float64, 1>"),
    "an enumeration without strings": (kernel("with_choice", contract(n="str k", k="Text.")), "`k`: expected the allowed strings"),
    "an int64_t for a Tensor": (kernel("with_int", contract(n="Tensor k", k="[N]; like x.")), "expected View<const float64, 1> for `k`, got int64_t"),
    "too few parameters": (kernel("copy", contract(n="int k", k=">= 0.")), "2 parameters for 3 arguments and results"),
    "too many parameters": (kernel("with_int"), "3 parameters for 2 arguments and results"),
    "more than 24 parameters": (kernel("many"), "25 parameters for 2 arguments and results, at most 24"),
    "another rank": (kernel("of_matrix"), "expected View<const float64, 1> for `x`, got View<const float64, 2>"),
    "an argument that is written": (kernel("writes_argument"), "expected View<const float64, 1> for `x`, got View<float64, 1>"),
    "a result that is read": (kernel("reads_result"), "expected View<float64, 1> for `y`, got View<const float64, 1>"),
    "a result with strides": (kernel("strided_result"), "expected View<float64, 1> for `y`, got Strided<float64, 1>"),
    "a workspace on the CPU": (kernel("with_workspace"), "a Workspace& is for CUDA kernels"),
    "a workspace in the wrong place": (kernel("workspace_first"), "3 parameters for 2"),
    "a stream in the wrong place": (kernel("stream_first"), "3 parameters for 2"),
    "a position without entries": (kernel("position"), "no argument has entries"),
    "a double for a float16": (kernel("copy", COPY.replace("float64", "float16")), "expected View<const float32, 1> for `x`, got View<const float64, 1>"),
    "a type that the contract excludes": (kernel("copy_int"), "expected View<const float64, 1> for `x`, got View<const int64, 1>"),
    "two types that are alike": (kernel("mixed", COPY.replace("float64", "float32 or float64")), "expected View<float32, 1> for `y`, got View<float64, 1>"),
}  # fmt: skip


@pytest.fixture(scope="module")
def read_contracts():
    """Return the library that reads contracts."""
    source = Path(__file__).parent / "read_contracts.cpp"
    include = ROOT / "contracts" / "runtime"
    return calcops_jit.load("read_contracts", [source], extra_include_paths=[include])


@pytest.fixture(scope="module")
def read(read_contracts):
    """Return the function that reads a contract and returns "ok" or the error."""
    return read_contracts.read


@pytest.mark.parametrize("case", [*RIGHT, *RIGHT_KERNELS])
def test_a_right_contract_is_read(case, read):
    assert read({**RIGHT, **RIGHT_KERNELS}[case]) == "ok"


CLAUSES = [
    *(
        "[N, 3]",
        "[...]",
        "[N] or [N, 1]",
        "with K = T*M",
        "any shape",
        "float64",
        "int32 or int64 read as int64",
    ),
    *("like x", "constant", "entries 0 <= j < N at edge", "entries -1 or 0 <= j < N"),
    *(
        "K <= N",
        "N % 4 == 0",
        "> 1e-6",
        "N >= 1",
        "n*K < 2^32 on CUDA",
        "N > 3",
        "N ≤ 3",
        "0 to 5",
        "-5 to 2^40",
        "> 0",
        "<= 2.5",
    ),
    *('"a" or "b"', '"a", "b" or "c"', "vmap joins N"),
]
# Where a clause could be lost in a line of the argument `k` or `x`.
PLACES = {
    "behind the full stop": lambda clause: contract(f"[N]; float64. {clause}."),
    "below the full stop": lambda clause: contract(f"[N]; float64.\n   {clause}."),
    "behind a sentence": lambda clause: contract(f"[N]; float64. Text of two words. {clause}."),
    "behind a semicolon": lambda clause: contract(f"[N]; float64. The rows; {clause}."),
    "between sentences": lambda clause: contract(f"[N]; float64. Rows. {clause}. More text."),
    "behind the text of a number": lambda clause: contract(n="float k", k=f"Text. {clause}."),
    "behind a bound": lambda clause: contract(n="float k", k=f"> 1. {clause}."),
    "in the documentation": lambda clause: contract().replace("\nx ", f"\n  x  {clause}.\nx ", 1),
    "below a summary": lambda clause: contract().replace(
        "\nx ", f"\n  Sum.\n\n\tx\t{clause}\nx ", 1
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_no_clause_is_lost_in_text(place, read):
    for clause in CLAUSES:
        for written in clause, clause[0].upper() + clause[1:]:
            assert read(PLACES[place](written)) != "ok", written


TEXTS = [
    "Distances, of pairs such as (i, j) or [3, 4].",
    'One of 2 or 3 rows. "nearest" rounds to 1e-7; the rest do not.',
    "A number between 0.5 and 2. Any number of it, unlike x.",
    "Up to 5 rows, from row 3 to the last. It is 3 times as large.",
]
DOCUMENTATIONS = [
    "The rows of x, and y = 2*x.\n\n  x is read twice, and y is like x.\n  y = 2*x, so x > 0.",
    'For x in [0, 1], or\n  x "as" it is.\n\n  x\n  y\n  vmap is quick.',
    "Runs the\n  kernels of another operator.",
]


def test_text_and_documentation_that_read_like_prose_are_accepted(read):
    for text in TEXTS:
        assert read(contract(f"[N]; float64. {text}")) == "ok"
    for text in DOCUMENTATIONS:
        assert read(contract().replace("\nx ", f"\n  {text}\nx ", 1)) == "ok"


@pytest.mark.parametrize("indentation", [" ", "  ", "\t", "        "])
def test_documentation_loses_the_indentation_of_its_first_line(indentation, read_contracts):
    lines = ["Summary.", "", "A list", "  of rows,", "", "and its end."]
    documentation = "\n".join(line and indentation + line for line in lines)
    text = contract().replace("\nx ", f"\n{documentation}\nx ", 1)
    assert read_contracts.details(text) == "\n".join(lines[2:])


@pytest.mark.parametrize("text, message", [*wrong_contracts(), *WRONG_KERNELS.values()])
def test_a_wrong_contract_is_refused_with_its_line_and_reason(text, message, read):
    answer = read(text).replace("\n", " ")
    assert answer.startswith("line ")
    assert message in answer
