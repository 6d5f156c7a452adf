"""Debuggers and profilers find a loaded library's code: its name is a file that other processes can
open."""
# ruff: noqa: F811 - pytest's fixtures are imported and then named as arguments

import re
import shutil
import subprocess

import pytest
from checkout import Checkout, the_zygote, wait_for

KERNEL = """
extern "C" __attribute__((visibility("default"))) int kernel(int atoms) {
  int pairs = 2 * atoms;
  return pairs;
}
extern "C" __attribute__((visibility("default"))) void spin(int n) {
  for (volatile int i = 0; i < n; ++i) {}
}
"""
SCRIPT = """
import calcops_jit, ctypes, os, sys, time
library = calcops_jit.load("slow", "slow.cpp", extra_cflags=["-O0", "-g"])
kernel = ctypes.CDLL(library.path).kernel
mapped = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "slow" in line}
print(mapped == {library.path}, flush=True)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    checkout = Checkout(the_zygote(), tmp_path_factory.mktemp("debug"))
    (checkout.path.parent / "slow.cpp").write_text(KERNEL)
    return checkout


def test_the_library_is_mapped_as_the_file_that_stays_in_the_cache_when_it_is_built_and_when_it_is_found(
    checkout,
):
    for _ in range(2):
        child = checkout.run(SCRIPT, CALCOPS_BUILD="0")
        assert child.out == "True\n", child.err


@pytest.mark.skipif(shutil.which("gdb") is None, reason="no gdb")
def test_gdb_stops_in_a_kernel_and_shows_its_line_and_arguments(checkout):
    waiting = "while not os.path.exists('stop'):\n    kernel(21)\n    time.sleep(0.02)\n"
    child = checkout.start(SCRIPT + waiting, CALCOPS_BUILD="0")
    try:
        wait_for(lambda: child.out, 60)
        # Only this library's symbols: PyTorch's take gdb half a minute.
        commands = [
            "sharedlibrary slow",
            "break kernel",
            "continue",
            "info args",
            "info source",
            "backtrace 1",
        ]
        attach = ["gdb", "-nx", "--batch", "-iex", "set auto-solib-add off", "-p", str(child.pid)]
        words = [word for command in commands for word in ("-ex", command)]
        try:
            told = subprocess.run([*attach, *words], capture_output=True, text=True, timeout=120)
        finally:
            (checkout.path.parent / "stop").touch()
            child.wait()
    finally:
        (checkout.path.parent / "stop").unlink()
    if "ptrace: Operation not permitted" in told.stderr:
        pytest.skip("this system does not let a process be debugged")
    assert re.search(r"kernel \(atoms=21\) at \S*slow\.cpp:3", told.stdout), (
        told.stdout + told.stderr
    )
    assert "atoms = 21" in told.stdout
    assert "int pairs = 2 * atoms;" in told.stdout


def test_a_backtrace_names_the_file_and_the_function(checkout):
    """Symbolisers, such as PyTorch's with TORCH_SYMBOLIZE_MODE=addr2line, open the file that it
    names."""
    backtrace = "ctypes.CDLL(None).backtrace_symbols_fd((ctypes.c_void_p * 1)(address), 1, 1)"
    script = f"{SCRIPT}address = ctypes.cast(kernel, ctypes.c_void_p).value\n{backtrace}"
    child = checkout.run(script, CALCOPS_BUILD="0")
    assert re.search(rf"^{checkout.cache}/\S+/slow\.so\(kernel", child.out, re.MULTILINE), (
        child.out + child.err
    )


@pytest.mark.skipif(shutil.which("perf") is None, reason="no perf")
def test_perf_names_the_function_that_takes_the_time(checkout):
    work = "end = time.time() + 2\nwhile time.time() < end:\n    spin(10_000_000)\n"
    data = checkout.path.parent / "perf.data"
    waiting = (
        "spin = ctypes.CDLL(library.path).spin\nwhile not os.path.exists('go'):\n"
        "    time.sleep(0.02)\n"
    )
    child = checkout.start(SCRIPT + waiting + work, CALCOPS_BUILD="0")
    wait_for(lambda: child.out, 60)
    record = ["perf", "record", "-e", "cpu-clock", "-o", str(data), "-p", str(child.pid)]
    with subprocess.Popen(record, stderr=subprocess.PIPE, text=True) as perf:
        (checkout.path.parent / "go").touch()
        child.wait()
        said = perf.communicate()[1]
    if perf.returncode:
        pytest.skip(f"perf cannot record here: {said.strip()[:200]}")
    report = ["perf", "report", "-i", str(data), "--stdio", "--sort", "dso,symbol"]
    told = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    assert re.search(r"slow\.so\s+\[\.\] spin", told), told
