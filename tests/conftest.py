import os
import re
import tempfile
import time
import venv
from collections import Counter
from pathlib import Path

# Threads that wait for work sleep. Spinning, as they do by default, they take the processors of the
# other workers and of whatever else runs: a test of four seconds then takes fifty.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What compilers and examples leave behind goes with the process that was started first. pytest's
# own folders stay where they are looked for. (Made before torch is imported, it goes after what
# multiprocessing removes at exit.)
if "PYTEST_DEBUG_TEMPROOT" not in os.environ:
    _temporary = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.gettempdir()
    os.environ["TMPDIR"] = tempfile.tempdir = _temporary.name
    os.chmod(_temporary.name, 0o711)  # some tests become another user
    # What torch.compile has compiled already.
    kept = Path(__file__).parent.parent / ".pytest_cache" / "inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))

import pytest  # noqa: E402
import torch  # noqa: E402
from checkout import Checkout, the_zygote  # noqa: E402
from kernels import Emulated, OnGpu  # noqa: E402
from reference import DEVICES  # noqa: E402

# In a process that test_cuda_on_cpu.py starts: the file for the names of the kernels that ran.
EMULATED = os.environ.get("CALCOPS_EMULATED")

# ---- which tests are slow ------------------------------------------------------------------------

# "seconds name" of each test function that takes longer than two seconds, all its cases together,
# and of each shared fixture that does; `pytest --write-slow` measures what it runs and keeps the
# rest. `make check` leaves out these tests and those that use these fixtures, and the files that
# take longest because of them begin first.
SLOW = Path(__file__).with_name("slow.txt")
_spent = Counter()


def _name(path, test):
    return re.sub(r"\[.*", "", f"{Path(path).name}::{test}", flags=re.DOTALL)


def _slow():
    return {name: float(number) for number, name in map(str.split, SLOW.read_text().splitlines())}


def pytest_addoption(parser):
    parser.addoption(
        "--write-slow",
        action="store_true",
        help="measure anew which tests are slow: tests/slow.txt",
    )


def pytest_collection_modifyitems(items):
    seconds, files = _slow(), Counter()
    for name, number in seconds.items():
        files[name.partition("::")[0]] += number
    for item in items:
        names = (item.nodeid.partition("::")[2], *item.fixturenames)
        if seconds.keys() & {_name(item.path, name) for name in names}:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: -files[item.path.name])


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    begin = time.perf_counter()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            item = request._pyfuncitem
            item.user_properties.append(
                (_name(item.path, fixturedef.argname), time.perf_counter() - begin)
            )


def pytest_runtest_logreport(report):
    path, _, test = report.nodeid.partition("::")
    shared = sum(seconds for _, seconds in report.user_properties) if report.when == "setup" else 0
    _spent[_name(path, test)] += report.duration - shared
    if shared:
        _spent.update(dict(report.user_properties))


def pytest_sessionfinish(session):
    if EMULATED:
        with open(EMULATED, "w") as file:
            print(*torch.ops.cuda_on_cpu.entered(), file=file)
    if session.config.getoption("write_slow") and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = [
            f"{seconds:.1f} {name}\n"
            for name, seconds in sorted((_slow() | _spent).items())
            if seconds > 2
        ]
        SLOW.write_text("".join(lines))


# ---- fixtures ------------------------------------------------------------------------------------


@pytest.fixture(params=DEVICES)
def device(request):
    """Every device that is here; in the emulation the one that is emulated, with tensors of the
    CPU."""
    if not EMULATED:
        yield request.param
        return
    with Emulated.on():
        yield request.param


@pytest.fixture
def kernels():
    """What runs CUDA kernels; see kernels.py."""
    if EMULATED:
        return Emulated()
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU; test_cuda_on_cpu.py runs this in the emulation")
    return OnGpu()


@pytest.fixture
def checkout(tmp_path):
    """A copy of the loader that a test may edit and build with."""
    return Checkout(the_zygote(), tmp_path)


@pytest.fixture
def environment(tmp_path):
    """A fresh virtual environment whose Python also finds what the one here has, PyTorch above
    all."""
    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    return tmp_path / "venv/bin/python"


@pytest.fixture
def one_thread():
    """Computes on one thread, unless the test says otherwise: small tensors only make threads wait
    for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
