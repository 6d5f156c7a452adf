import os
import re
import tempfile
import time
import venv
from collections import Counter
from pathlib import Path

# Let idle OpenMP threads sleep. By default they spin and take processor time from the other
# workers: a test of four seconds then takes fifty.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Temporary files of compilers and examples go into a folder that the first pytest process deletes
# when it ends. Its workers use the same folder. pytest's own folders stay in the usual place. The
# folder is made before torch is imported, so that it is deleted after multiprocessing has removed
# its own files from it.
if "PYTEST_DEBUG_TEMPROOT" not in os.environ:
    _temporary = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.gettempdir()
    os.environ["TMPDIR"] = tempfile.tempdir = _temporary.name
    os.chmod(_temporary.name, 0o711)  # some tests become another user
    # torch.compile reuses what it compiled in earlier runs.
    inductor_cache = Path(__file__).parent.parent / ".pytest_cache" / "inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache))

import pytest  # noqa: E402
import torch  # noqa: E402
from checkout import Checkout  # noqa: E402
from kernels import EMULATED, Emulated, OnGpu, write_kernels_that_ran  # noqa: E402
from reference import DEVICES  # noqa: E402

# ---- which tests are slow ------------------------------------------------------------------------

# A line "seconds name" for each test function whose cases together take more than two seconds, and
# for each shared fixture that takes as long. `pytest --write-slow` measures the tests that it runs
# and keeps the lines of others. `make check` leaves out these tests and all that use such fixtures.
# The files that take longest begin first.
SLOW = Path(__file__).with_name("slow.txt")
_measured_seconds = Counter()
_folder_seconds = Counter()


def _name(path, test):
    """Return the name that slow.txt has for a test or fixture: without the case in brackets."""
    return re.sub(r"\[.*", "", f"{Path(path).name}::{test}", flags=re.DOTALL)


def _slow_seconds():
    lines = map(str.split, SLOW.read_text().splitlines())
    return {name: float(seconds) for seconds, name in lines}


def pytest_addoption(parser):
    parser.addoption(
        "--write-slow",
        action="store_true",
        help="measure which tests are slow, and write tests/slow.txt",
    )


def _needs_gpu(item):
    """Return True for a test that runs kernels, asks for a GPU or has the device "cuda"."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    is_on_cuda = any(isinstance(x, str) and x == "cuda" for x in parameters)
    return is_on_cuda or bool({"gpu", "kernels"} & set(item.fixturenames))


def pytest_collection_modifyitems(items):
    slow = _slow_seconds()
    file_seconds = Counter()
    for name, seconds in slow.items():
        file_seconds[name.partition("::")[0]] += seconds
    for item in items:
        test = item.nodeid.partition("::")[2]
        names = {_name(item.path, name) for name in (test, *item.fixturenames)}
        if slow.keys() & names:
            item.add_marker(pytest.mark.slow)
        if _needs_gpu(item):
            item.add_marker(pytest.mark.gpu)
    # These fork, and a fork has no backward pass once PyTorch has threads for devices.
    first = "faults testing density environment_spline tabulated_sum warp_perspective_calls".split()
    names_of_first = [f"test_{name}.py" for name in first]
    items.sort(
        key=lambda item: (item.path.name not in names_of_first, -file_seconds[item.path.name])
    )


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Time each shared fixture. pytest_runtest_logreport reads the seconds from the report."""
    begin = time.perf_counter()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            seconds = time.perf_counter() - begin
            item = request._pyfuncitem
            item.user_properties.append((_name(item.path, fixturedef.argname), seconds))


def pytest_runtest_logreport(report):
    path, _, test = report.nodeid.partition("::")
    # The later reports of a test repeat the properties of its setup: count them once.
    fixtures = dict(report.user_properties) if report.when == "setup" else {}
    _measured_seconds[_name(path, test)] += report.duration - sum(fixtures.values())
    _measured_seconds.update(fixtures)
    _folder_seconds[os.path.dirname(path) or "."] += report.duration


def pytest_terminal_summary(terminalreporter):
    """Print how long the tests of each folder took, as a sum over the workers."""
    terminalreporter.section("seconds by folder, of all workers")
    total = sum(_folder_seconds.values()) or 1
    for folder, seconds in _folder_seconds.most_common():
        terminalreporter.write_line(f"{seconds:7.0f} s {seconds / total:4.0%}  {folder}")


def pytest_sessionfinish(session):
    if EMULATED:
        write_kernels_that_ran()
    if session.config.getoption("write_slow") and "PYTEST_XDIST_WORKER" not in os.environ:
        seconds = _slow_seconds() | _measured_seconds
        lines = [f"{seconds[name]:.1f} {name}\n" for name in sorted(seconds) if seconds[name] > 2]
        SLOW.write_text("".join(lines))


# ---- fixtures ------------------------------------------------------------------------------------


@pytest.fixture(params=DEVICES)
def device(request):
    """Return each device of this machine."""
    return request.param


@pytest.fixture
def gpu():
    """Return the device "cuda", on which the test computes."""
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    return "cuda"


@pytest.fixture
def kernels():
    """Return the function that runs CUDA kernels; see kernels.py."""
    if EMULATED:
        return Emulated()
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU; test_cuda_on_cpu.py runs this in the emulation")
    return OnGpu()


@pytest.fixture
def checkout(tmp_path):
    """Return a copy of the loader that a test may edit and build with."""
    return Checkout(tmp_path)


@pytest.fixture
def environment(tmp_path):
    """Return the Python of a fresh virtual environment that imports this one's PyTorch."""
    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    return tmp_path / "venv/bin/python"


@pytest.fixture
def without_vmap_fallback():
    """Turn off PyTorch's loop over the batch for operators without a batching rule."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


@pytest.fixture
def one_thread():
    """Compute on one thread: with small tensors, threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
