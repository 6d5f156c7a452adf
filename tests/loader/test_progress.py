"""The progress that a build prints: one line on a terminal, lines in a log. test_notebook.py has
the one of a cell."""

import ast
import itertools
import re

from checkout import CALL, CONTRACT, Checkout, wait_for

# Runs a build with stderr on a terminal of 100 columns, and prints each state of its line.
ON_A_TERMINAL = r"""
import fcntl, os, struct, sys, termios, threading, time
master, slave = os.openpty()
fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
os.dup2(slave, 2)
raw = []
def copy():
    while piece := os.read(master, 65536).decode(errors="replace"):
        raw.append(piece)
threading.Thread(target=copy, daemon=True).start()
import calcops_jit
time.sleep(0.5)
print(repr("".join(raw).replace("\r\n", "\n")))
"""


def test_a_build_on_a_terminal_redraws_one_line_that_names_each_unit_with_its_number(checkout):
    name = "a_unit_with_a_name_that_is_too_long_for_a_terminal" + "_of_a_hundred_columns" * 4
    checkout.write(f"ops/tiny/{name}.cpp", "int one() { return 1; }\n")
    checkout.write("ops/tiny/zwei.cpp", "int two() { return 2; }\n")
    hook = checkout.hook('case "$*" in *" -c "*) sleep 0.7;; esac')
    child = checkout.run(ON_A_TERMINAL, **hook)
    assert child.code == 0, child.err
    lines, _, rest = ast.literal_eval(child.out).partition("\n")
    assert rest == ""  # there is one line, which ends with the outcome
    *states, last = [state for state in lines.split("\r") if state.strip()]
    assert re.fullmatch(r"calcops_jit: built calcops in [\d.]+ s\s*", last)
    assert max(map(len, states)) <= 100
    assert "building calcops (first time only) " in states[0]
    for state, following in itertools.pairwise(states):
        assert state != following
    for words in ("building calcops", "a_unit_with_a_name", "tiny", "zwei"):
        assert any(words in state for state in states), states
    counts = [re.search(r"\[(\d+)/(\d+)\]", state) for state in states]
    finished = [int(count[1]) for count in counts if count]
    assert finished == sorted(finished)
    assert len(set(finished)) >= 3


def test_a_failed_build_on_a_terminal_leaves_only_the_error(checkout):
    checkout.write("ops/tiny/tiny.cpp", "int f( {")
    child = checkout.run(ON_A_TERMINAL)
    shown = [line.rpartition("\r")[2].strip() for line in ast.literal_eval(child.out).split("\n")]
    shown = [line for line in shown if line]
    assert shown[0].startswith("calcops_jit: cannot build calcops: error at ")


def test_a_library_whose_contract_is_refused_is_not_built(tmp_path):
    checkout = Checkout(tmp_path, has_runtime=True)
    checkout.put("mine.cpp", CONTRACT.format(name="f", factor=1).replace("like x", "like z"))
    script = "import calcops_jit; calcops_jit.load('mine', 'mine.cpp')"
    child = checkout.run(script, cwd=checkout.project, CALCOPS_BUILD="0")
    assert "building mine" in child.err
    assert "built mine" not in child.err
    assert child.err.rstrip().endswith("\n  fix: correct the contract or the registration")


def test_a_build_in_a_log_prints_whole_lines_from_its_begin_on(checkout):
    checkout.slow.touch()
    child = checkout.start()
    wait_for(lambda: "building calcops" in child.err)
    wait_for(checkout.is_compiling)
    checkout.slow.unlink()
    child.wait()
    first, *_, last = child.err.splitlines()
    assert "\r" not in child.err
    assert first.startswith("calcops_jit: building calcops ")
    assert re.fullmatch(r"calcops_jit: built calcops in [\d.]+ s", last)
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert "tiny.h" in checkout.run().err.splitlines()[0]  # what caused the build


def test_a_build_starts_no_thread_which_an_interrupt_could_leave_behind(checkout):
    script = f"import threading; threading.Thread.start = None\n{CALL}"
    assert checkout.answer(script=script) == 1
