"""Signals, FIFOs, daemons and errors that stop a process or a build. No process hangs, and none is
left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import CALL, in_cache, wait_for

from _calcops_jit.live import trial


def _with_default_signals():
    """Restore the default signals. A process under nohup ignores SIGHUP, and a background job
    ignores SIGINT."""
    for number in signal.SIGHUP, signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def builder(checkout):
    """Yield a process that waits for a compiler. It is not forked by checkout.py's zygote, because
    the zygote's children print tracebacks."""
    checkout.slow.touch()
    environment = os.environ | {"CALCOPS_CACHE": str(checkout.cache), "CXX": str(checkout.compiler)}
    command = [sys.executable, "-c", "import calcops_jit"]
    options = {"cwd": checkout.path, "env": environment, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        command, **options, start_new_session=True, preexec_fn=_with_default_signals
    )
    wait_for(lambda: checkout.log.exists() and " -c " in checkout.log.read_text(), 60)
    yield process
    checkout.slow.unlink()
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT])
def test_a_signal_that_ends_a_build_ends_its_compilers(checkout, builder, number):
    assert in_cache(checkout)
    builder.send_signal(number)
    errors = builder.communicate(timeout=60)[1]
    wait_for(lambda: not in_cache(checkout), 10)
    assert len(errors.splitlines()) <= 14, errors
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)


def test_a_header_that_became_a_fifo_is_named_without_waiting(checkout):
    assert checkout.answer() == 1
    header = checkout.path / "ops/tiny/tiny.h"
    header.unlink()
    os.mkfifo(header)
    for cache in (checkout.cache, checkout.path.parent / "clean"):
        child = checkout.start(CALL, CALCOPS_CACHE=cache)
        try:
            wait_for(lambda child=child: "no regular file" in child.err, 30)
        finally:
            child.kill()
            child.wait()
        assert f"fix: rm {header}" in child.err


def test_a_trial_ends_with_its_child_although_a_daemon_holds_the_pipe():
    def daemon_and_answer() -> dict:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        return {"operators": ["mine::answer"]}

    with open(os.devnull, "w") as output:
        start = time.monotonic()
        result, code = trial._in_child(daemon_and_answer, output.fileno())
    assert result == {"operators": ["mine::answer"]}
    assert code == 0
    assert time.monotonic() - start < 15


def test_watch_reports_an_error_of_any_kind_and_goes_on(checkout):
    header = checkout.path / "ops/tiny/tiny.h"
    script = f"""
import calcops_jit, ctypes, os, time
from pathlib import Path
header = Path({str(header)!r})
compiler = os.environ["CXX"]
stop = calcops_jit.watch(0.05)
os.environ["CXX"] = "g++ '"
header.write_text("#define ANSWER 2\\n")
while not os.path.exists("seen"):
    time.sleep(0.02)
os.environ["CXX"] = compiler
header.write_text("#define ANSWER 33\\n")
end = time.monotonic() + 60
answer = lambda: ctypes.CDLL(calcops_jit.library_path()).answer()
while answer() != 33 and time.monotonic() < end:
    time.sleep(0.02)
print(answer())
stop()
"""
    child = checkout.start(script, cwd=checkout.path.parent, CXX=checkout.compiler)
    wait_for(lambda: "closing quotation" in child.err, 60)
    Path(checkout.path.parent, "seen").touch()
    assert child.wait().out == "33\n", child.err
    assert "Traceback" not in child.err
