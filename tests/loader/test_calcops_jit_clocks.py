"""Inputs that change during their compile, on file systems whose clock is ahead, behind or coarse.
The second part tests what a build does to its own process and to its compilers."""

import os
import shutil
import signal

import pytest
from checkout import CALL, in_cache, wait_for

# Changes os.stat for the operators' files: `{shifted}` is their time. `{device}` is added to the
# number of their file system, so that they seem to lie on another one.
CLOCK = """
import os
class ShiftedStat:
    def __init__(self, status): self.status = status
    def __getattr__(self, name):
        value = getattr(self.status, name)
        if name == "st_dev": return value + {device}
        return {shifted} if name in ("st_mtime_ns", "st_ctime_ns") else value
def stat(path, *a, dir_fd=None, real=os.stat, **k):
    status = real(path, *a, dir_fd=dir_fd, **k)
    folder = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{{dir_fd}}")
    return ShiftedStat(status) if "/checkout/ops" in f"{{folder}}/{{path}}" else status
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
def test_a_header_saved_during_its_compile_is_compiled_again_with_any_clock(checkout, clock):
    checkout.slow.touch()
    child = checkout.start(clock + CALL)
    wait_for(lambda: compiling(checkout))
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 5\n")
    checkout.slow.unlink()
    child.wait()
    assert (child.code, child.out) == (0, "5\n"), child.err
    assert checkout.compiled() == 2, child.err


def test_a_header_behind_a_macro_saved_during_its_compile_is_compiled_again(checkout):
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


def test_a_header_that_appears_before_another_during_a_compile_is_used(checkout):
    # The header appears after the compiler has looked for it and before the compiler ends.
    late = checkout.path / "ops/tiny/tiny/tiny.h"
    add = f"[ -e {late} ] || {{ mkdir -p {late.parent}; echo '#define ANSWER 7' > {late}; }}"
    compile_command = f'{shutil.which("c++")} "$@"'
    compile_then_add = f'{compile_command} || exit; case "$*" in *" -c "*) {add};; esac'
    text = checkout.compiler.read_text()
    checkout.compiler.write_text(text.replace(f"exec {compile_command}", compile_then_add))
    child = checkout.run()
    assert (child.code, child.out) == (0, "7\n"), child.err
    assert checkout.compiled() == 2, child.err


# The loader trusts the time of a file after two checks that were more than a tick of the clock
# apart. The time between the processes of a test depends on how busy the machine is, so these
# scripts decide what the loader takes it for.
IS_LONG_AGO = "import _calcops_jit.cache.closure as c; c.is_long_ago = lambda _: {}\n"
SOON = IS_LONG_AGO.format(False)
LATER = IS_LONG_AGO.format(True)


def test_a_change_within_one_tick_of_a_coarse_clock_is_noticed(checkout):
    assert checkout.run(COARSE + SOON + CALL).out == "1\n"
    # Writing in place keeps the inode, and the coarse clock shows the same time.
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert checkout.run(COARSE + SOON + CALL).out == "2\n"


def test_the_time_of_a_file_is_trusted_if_seen_twice_with_a_pause_between(checkout):
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


# ---- the process of a build and its compilers ----------------------------------------------------


def test_a_build_keeps_the_environment_while_other_threads_change_it(checkout):
    script = f"""
import os, sys, threading
before = dict(os.environ)
changes = []
end = threading.Event()
def change_other_variables():
    while not end.is_set():
        for i in range(50):
            os.environ[f'OTHER_{{i}}'] = '1'
        for i in range(50):
            os.environ.pop(f'OTHER_{{i}}')
def watch():
    while not end.is_set():
        names = [name for name in list(os.environ) if not name.startswith('OTHER_')]
        now = {{name: os.environ.get(name) for name in names}}
        if now != before:
            changes.append(now)
threads = [threading.Thread(target=change_other_variables), threading.Thread(target=watch)]
sys.setswitchinterval(1e-4)
for thread in threads:
    thread.start()
try:
    {CALL}
finally:
    end.set()
for thread in threads:
    thread.join()
print(changes[:1])
"""
    child = checkout.run(script)
    assert (child.code, child.out) == (0, "1\n[]\n"), child.err


def test_compilers_get_no_input_and_no_descriptors(checkout):
    descriptors = checkout.path.parent / "descriptors"
    text = checkout.compiler.read_text()
    checkout.compiler.write_text(
        text.replace("#!/bin/sh\n", f"#!/bin/sh\nls -l /proc/self/fd >> {descriptors}\n")
    )
    file = checkout.write("file", "")
    script = f"""
import os
os.dup2(os.open({str(file)!r}, os.O_RDWR), 0)
os.set_inheritable(os.dup(0), True)
{CALL}
"""
    assert checkout.run(script).out == "1\n"
    assert str(file) not in descriptors.read_text()
    assert "0 -> /dev/null" in descriptors.read_text()


def test_the_environment_of_every_compiler_names_its_staging_folder(checkout):
    log = checkout.path.parent / "folders"
    text = checkout.compiler.read_text()
    checkout.compiler.write_text(
        text.replace("#!/bin/sh\n", f'#!/bin/sh\necho "$CALCOPS_STAGING $PWD" >> {log}\n')
    )
    assert checkout.answer() == 1
    folders = [line.split(" ") for line in log.read_text().splitlines() if line.startswith("/")]
    assert len(folders) == 2  # of a compile and of a link
    assert all(staging == working for staging, working in folders)


def test_interrupting_a_build_ends_its_compilers(checkout):
    checkout.slow.touch()
    # A shell ignores SIGINT in a background process, and Python then leaves the signal ignored.
    child = checkout.start(
        f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{CALL}"
    )
    wait_for(lambda: compiling(checkout))
    os.kill(child.pid, signal.SIGINT)
    child.wait()
    assert "KeyboardInterrupt" in child.err
    assert in_cache(checkout) == []
