"""Debuggers and profilers find the code of a loaded library, because its name in the process is a
file that they can open."""

import re
import shutil
import subprocess

import pytest
from checkout import Checkout, wait_for

KERNEL = """
extern "C" __attribute__((visibility("default"))) int kernel(int atoms) {
  int pairs = 2 * atoms;
  return pairs;
}
"""
SCRIPT = """
import calcops_jit, ctypes, os, sys, time
library = calcops_jit.load("slow", "slow.cpp", extra_cflags=["-O0", "-g"])
kernel = ctypes.CDLL(library.path).kernel
mappings = [line for line in open("/proc/self/maps") if "slow" in line]
mapped_files = {line.split(maxsplit=5)[5].strip() for line in mappings}
print(mapped_files == {library.path}, flush=True)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    checkout = Checkout(tmp_path_factory.mktemp("debug"))
    (checkout.path.parent / "slow.cpp").write_text(KERNEL)
    return checkout


def test_a_built_and_a_cached_library_are_mapped_from_their_file_in_the_cache(checkout):
    for _ in range(2):
        child = checkout.run(SCRIPT, CALCOPS_BUILD="0")
        assert child.out == "True\n", child.err


@pytest.mark.long
@pytest.mark.skipif(shutil.which("gdb") is None, reason="no gdb")
def test_gdb_stops_in_a_kernel_and_shows_its_line_and_arguments(checkout):
    calls = """
while not os.path.exists('stop'):
    kernel(21)
    time.sleep(0.02)
"""
    child = checkout.start(SCRIPT + calls, CALCOPS_BUILD="0")
    try:
        wait_for(lambda: child.out, 60)
        # gdb reads the symbols of this library only. Those of PyTorch take half a minute.
        commands = [
            "sharedlibrary slow",
            "break kernel",
            "continue",
            "info args",
            "info source",
            "backtrace 1",
        ]
        attach = ["gdb", "-nx", "--batch", "-iex", "set auto-solib-add off", "-p", str(child.pid)]
        for command in commands:
            attach += ["-ex", command]
        try:
            gdb = subprocess.run(attach, capture_output=True, text=True, timeout=120)
        finally:
            (checkout.path.parent / "stop").touch()
            child.wait()
    finally:
        (checkout.path.parent / "stop").unlink()
    if "ptrace: Operation not permitted" in gdb.stderr:
        pytest.skip("this system does not let a process be debugged")
    frame = re.search(r"kernel \(atoms=21\) at \S*slow\.cpp:3", gdb.stdout)
    assert frame, gdb.stdout + gdb.stderr
    assert "atoms = 21" in gdb.stdout
    assert "int pairs = 2 * atoms;" in gdb.stdout
