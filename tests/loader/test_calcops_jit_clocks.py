"""Inputs that change while they are compiled, on file systems whose clock is ahead, behind or
coarse; and what a build leaves alone in the process that asks for it."""

import os
import shutil
import signal

import pytest
from checkout import CALL, in_cache, wait_for

# What os.stat says of the operators' files, as if another machine had them, `{ahead}` seconds ahead
# of this one.
CLOCK = """
import os
class Elsewhere:
    def __init__(self, status): self.status = status
    def __getattr__(self, name):
        value = getattr(self.status, name)
        if name == "st_dev": return value + {device}
        return {shifted} if name in ("st_mtime_ns", "st_ctime_ns") else value
def stat(path, *a, dir_fd=None, real=os.stat, **k):
    status = real(path, *a, dir_fd=dir_fd, **k)
    folder = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{{dir_fd}}")
    return Elsewhere(status) if "/checkout/ops" in f"{{folder}}/{{path}}" else status
os.stat = stat
"""
AHEAD = CLOCK.format(device=1, shifted="value + 3600 * 10**9")
BEHIND = CLOCK.format(device=1, shifted="value - 3600 * 10**9")
BEHIND_HERE = CLOCK.format(device=0, shifted="value - 3600 * 10**9")
COARSE = CLOCK.format(device=1, shifted="10**18")
MACRO = '#define HEADER "tiny/tiny.h"\n#include HEADER\n'


def compiling(checkout) -> bool:
    return checkout.log.exists() and " -c " in checkout.log.read_text()


def test_sources_on_a_disk_whose_clock_is_ahead_are_built_once(checkout):
    child = checkout.run(AHEAD + CALL)
    assert (child.code, child.out) == (0, "1\n"), child.err
    assert checkout.compiled() == 1, child.err
    child = checkout.run(AHEAD + CALL)
    assert (child.code, child.out, child.err) == (0, "1\n", "")


@pytest.mark.parametrize(
    "clock", [AHEAD, BEHIND, BEHIND_HERE, COARSE], ids=["ahead", "behind", "behind here", "coarse"]
)
def test_what_was_saved_during_its_compile_is_compiled_again_whatever_its_clock_says(
    checkout, clock
):
    checkout.slow.touch()
    child = checkout.start(clock + CALL)
    wait_for(lambda: compiling(checkout))
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 5\n")
    checkout.slow.unlink()
    child.wait()
    assert (child.code, child.out) == (0, "5\n"), child.err
    assert checkout.compiled() == 2, child.err


def test_a_header_that_nobody_foresaw_is_compiled_again_where_only_its_clock_could_tell(checkout):
    source = checkout.path / "ops/tiny/tiny.cpp"
    source.write_text(MACRO + source.read_text().partition("\n")[2])
    checkout.slow.touch()
    child = checkout.start(BEHIND + CALL)
    wait_for(lambda: compiling(checkout))
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 5\n")
    checkout.slow.unlink()
    child.wait()
    assert (child.code, child.out) == (0, "5\n"), child.err
    assert checkout.compiled() == 2, child.err


def test_a_header_that_came_before_another_while_that_was_compiled_is_seen(checkout):
    # The header appears after the compiler has looked for it and before the compiler ends.
    late = checkout.path / "ops/tiny/tiny/tiny.h"
    make = f"[ -e {late} ] || {{ mkdir -p {late.parent}; echo '#define ANSWER 7' > {late}; }}"
    real = f'exec {shutil.which("c++")} "$@"'
    text = checkout.compiler.read_text()
    then = f'{real.removeprefix("exec ")} || exit; case "$*" in *" -c "*) {make};; esac'
    checkout.compiler.write_text(text.replace(real, then))
    child = checkout.run()
    assert (child.code, child.out) == (0, "7\n"), child.err
    assert checkout.compiled() == 2, child.err


# Whether less or more time passed between two looks than a clock takes to tick, however busy this
# machine is.
SOON, LATER = (
    f"import _calcops_jit.cache.closure as c; c.is_long_ago = lambda _: {long}\n"
    for long in (False, True)
)


def test_a_change_within_a_tick_of_a_clock_that_is_behind_is_seen(checkout):
    assert checkout.run(COARSE + SOON + CALL).out == "1\n"
    # In place, so that it leaves the same stat.
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert checkout.run(COARSE + SOON + CALL).out == "2\n"


def test_a_stat_counts_once_it_was_seen_twice_with_time_between(checkout):
    assert checkout.run(BEHIND + SOON + CALL).out == "1\n"
    manifest = next(path for path in checkout.cache.glob("calcops-*/*/manifest"))
    young = manifest.read_bytes()
    assert checkout.run(BEHIND + SOON + CALL).out == "1\n"
    assert manifest.read_bytes() == young
    assert checkout.run(BEHIND + LATER + CALL).out == "1\n"
    assert manifest.read_bytes() != young
    settled = manifest.read_bytes()
    assert checkout.run(BEHIND + LATER + CALL).out == "1\n"
    assert manifest.read_bytes() == settled


# ---- the process that asks -----------------------------------------------------------------------


def test_a_build_leaves_the_environment_alone_and_bears_that_others_change_it(checkout):
    script = f"""
import os, sys, threading
before, done, seen = dict(os.environ), threading.Event(), []
def others():
    while not done.is_set():
        for i in range(50): os.environ[f'OTHER_{{i}}'] = '1'
        for i in range(50): os.environ.pop(f'OTHER_{{i}}')
def watch():
    while not done.is_set():
        names = [name for name in list(os.environ) if not name.startswith('OTHER_')]
        now = {{name: os.environ.get(name) for name in names}}
        if now != before: seen.append(now)
threads = [threading.Thread(target=f) for f in (others, watch)]
sys.setswitchinterval(1e-4)
for thread in threads: thread.start()
try:
    {CALL}
finally:
    done.set()
for thread in threads: thread.join()
print(seen[:1])
"""
    child = checkout.run(script)
    assert (child.code, child.out) == (0, "1\n[]\n"), child.err


def test_compilers_get_no_input_and_no_descriptors(checkout):
    found = checkout.path.parent / "descriptors"
    text = checkout.compiler.read_text()
    checkout.compiler.write_text(
        text.replace("#!/bin/sh\n", f"#!/bin/sh\nls -l /proc/self/fd >> {found}\n")
    )
    kept = checkout.write("kept", "")
    script = f"""
import os
os.dup2(os.open({str(kept)!r}, os.O_RDWR), 0)
os.set_inheritable(os.dup(0), True)
{CALL}
"""
    assert checkout.run(script).out == "1\n"
    assert str(kept) not in found.read_text()
    assert "0 -> /dev/null" in found.read_text()


def test_every_process_of_a_build_names_its_staging_folder(checkout):
    found = checkout.path.parent / "marked"
    text = checkout.compiler.read_text()
    checkout.compiler.write_text(
        text.replace("#!/bin/sh\n", f'#!/bin/sh\necho "$CALCOPS_STAGING $PWD" >> {found}\n')
    )
    assert checkout.answer() == 1
    marked = [line.split(" ") for line in found.read_text().splitlines() if line.startswith("/")]
    # A compile and a link.
    assert len(marked) == 2
    assert all(folder == working for folder, working in marked)


def test_interrupting_a_build_ends_its_compilers(checkout):
    checkout.slow.touch()
    # A shell starts what it puts into the background with the signal ignored, and Python then
    # leaves it so.
    child = checkout.start(
        f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{CALL}"
    )
    wait_for(lambda: compiling(checkout))
    os.kill(child.pid, signal.SIGINT)
    child.wait()
    assert "KeyboardInterrupt" in child.err
    assert in_cache(checkout) == []
