"""Many processes that build, import and clean at once, and processes that end at any moment. No
process hangs, loads half a library, or leaves something behind."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkout import ANSWER, CALL, compiler, processes_in, wait_for

from _calcops_jit import cache

# ---- several processes ---------------------------------------------------------------------------


def test_eight_processes_at_once_compile_once(checkout):
    children = [checkout.start() for _ in range(8)]
    assert [(child.wait().code, child.out) for child in children] == [(0, "1\n")] * 8
    assert checkout.compiled() == 1
    assert sum("built calcops" in child.err for child in children) == 1


# A thread computes the compiler of a request while the process forks. The child does so, too.
FORK_WHILE_A_THREAD_COMPUTES = """
import os, signal, threading
from _calcops_jit import request
inside, forked = threading.Event(), threading.Event()
def words_of(name):
    inside.set()
    forked.wait()
    return []
request.words_of = words_of
threading.Thread(target=lambda: request.Request().compiler).start()
inside.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    request.words_of = lambda name: []
    assert request.Request().compiler == ["c++"]
    os._exit(0)
status = os.waitpid(pid, 0)[1]
forked.set()
raise SystemExit(status)
"""


def test_a_forked_child_waits_for_no_thread_of_its_parent():
    """Two threads may load libraries. One forks while the other one computes."""
    assert subprocess.run([sys.executable, "-c", FORK_WHILE_A_THREAD_COMPUTES]).returncode == 0


# A thread imports a module of the build as long as the build runs.
IMPORT_DURING_A_BUILD = """
import importlib.machinery, signal, sys, threading, torch
import calcops_jit
name = {name!r}
for module in name, "torch.utils.cpp_extension":
    sys.modules.pop(module, None)
    vars(torch.utils).pop(module.rpartition(".")[2], None)
is_imported, is_built = threading.Event(), threading.Event()
class SlowLoader:
    @staticmethod
    def create_module(spec):
        return None
    @staticmethod
    def exec_module(module):
        is_imported.set()
        is_built.wait()
class Finder:
    @staticmethod
    def find_spec(module, path, target=None):
        if module == name and not is_imported.is_set():
            return importlib.machinery.ModuleSpec(name, SlowLoader)
sys.meta_path.insert(0, Finder)
thread = threading.Thread(target=importlib.import_module, args=[name])
thread.start()
is_imported.wait()
signal.alarm(30)
calcops_jit.load("mine", "mine.cpp")
is_built.set()
thread.join()
print("built")
"""


@pytest.mark.parametrize(
    "name", ["torch.utils.cpp_extension", "torch.utils._cpp_extension_versioner"]
)
def test_a_build_does_not_wait_for_the_import_of_another_thread(checkout, name):
    checkout.put("mine.cpp", "int one() { return 1; }\n")
    script = IMPORT_DURING_A_BUILD.format(name=name)
    child = checkout.run(script, cwd=checkout.project, CALCOPS_BUILD="0")
    assert (child.code, child.out) == (0, "built\n"), child.err


# While the sources are compiled, the compiling thread holds a lock.
COMPILE_WITH_A_LOCK = """
import os, sys, threading, time
from _calcops_jit import build
lock, marker = threading.Lock(), sys.argv[1]
def compile_and_link(request, folder, archives):
    with lock:
        if request.product.endswith(".a"):
            open(marker, "w").close()
        time.sleep(1)
    deadline = time.monotonic() + 20
    while not os.path.exists(marker) and time.monotonic() < deadline:
        time.sleep(0.01)
    raise RuntimeError("no compiler")
build.compile_and_link = compile_and_link
import calcops_jit
"""


def test_the_runtime_is_built_while_the_sources_are_compiled_with_a_lock(tmp_path):
    marker = tmp_path / "marker"
    command = [sys.executable, "-c", COMPILE_WITH_A_LOCK, marker]
    environment = os.environ | {"CALCOPS_CACHE": str(tmp_path / "cache"), "MAX_JOBS": "2"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "no compiler" in result.stderr
    assert marker.exists()


def test_a_waiter_says_so_at_little_cost_and_builds_when_the_builder_is_killed(checkout):
    checkout.slow.touch()
    builder = checkout.start()
    wait_for(checkout.is_compiling)
    waiter = checkout.start()
    wait_for(lambda: "waiting for another process, which builds calcops" in waiter.err)
    spent = seconds_spent(waiter.pid)
    builder.kill()
    wait_for(lambda: "building calcops" in waiter.err)
    assert seconds_spent(waiter.pid) - spent < 0.5
    checkout.slow.unlink()
    builder.wait()
    assert waiter.wait().out == "1\n"


def seconds_spent(pid: int) -> float:
    """Return the CPU time of a process in seconds."""
    # The numbers follow the name of the program, which is in parentheses and may have spaces.
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = numbers[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_an_import_does_not_wait_for_the_compilers_of_a_killed_builder(checkout):
    checkout.slow.touch()
    builder = checkout.start()
    wait_for(checkout.is_compiling)
    builder.kill()
    # The killed process is a zombie until wait() below. The next import must take it for dead.
    wait_for(lambda: is_ended(builder))
    after = checkout.start()
    wait_for(lambda: checkout.log.read_text().count("tiny.cpp") >= 2)
    assert "waiting" not in after.err
    builder.wait()
    checkout.slow.unlink()
    assert after.wait().out == "1\n"
    wait_for(lambda: not processes_in(checkout.cache))
    assert checkout.answer() == 1


# The first compiler waits after its work, and writes its object again while the next build links.
LATE_OBJECT = """
case "$*" in
*" -c "*tiny.cpp*)
  if mkdir {folder}/first; then
    {compiler} "$@"
    cp tiny.o {folder}/first
    touch {folder}/waits
    for _ in $(seq 2000); do [ -e {folder}/links ] && break; sleep 0.02; done
    cp {folder}/first/tiny.o tiny.o
    touch {folder}/has-written
    exit
  fi;;
*" -shared "*)
  touch {folder}/links
  for _ in $(seq 2000); do [ -e {folder}/has-written ] && break; sleep 0.02; done;;
esac
"""


def test_a_compiler_of_a_killed_build_writes_no_object_of_the_next_build(checkout, tmp_path):
    """Both processes of the build are killed at once, so that nothing ends their compiler."""
    text = LATE_OBJECT.format(folder=tmp_path, compiler=shutil.which("c++"))
    hook = checkout.hook(text)
    builder = checkout.start(**hook)
    wait_for((tmp_path / "waits").exists)
    os.kill(builder.pid, signal.SIGSTOP)
    children = Path(f"/proc/{builder.pid}/task/{builder.pid}/children").read_text()
    for pid in map(int, children.split()):
        os.kill(pid, signal.SIGKILL)
    builder.kill()
    builder.wait()
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert checkout.answer(**hook) == 2


PROCESSES = 10
LATER_PROCESSES = 2


def is_ended(child) -> bool:
    """Return True if the process is a zombie, as it is from its end until Child.wait()."""
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def edit_and_kill(checkout, number: int, chance: random.Random, moment: float) -> None:
    """Kill some importers of a new library, and check all of them."""
    checkout.write("ops/tiny/tiny.h", f"#define ANSWER {number}\n")
    checkout.compiled()
    before = set(checkout.libraries())
    children = [checkout.start() for _ in range(PROCESSES)]
    time.sleep(chance.uniform(0, moment))
    count = PROCESSES if chance.random() < 0.3 else chance.randint(1, PROCESSES - 1)
    victims = chance.sample(children, count)
    for victim in victims:
        victim.kill()  # the pid of an ended child stays its own until wait()
    children += [checkout.start() for _ in range(LATER_PROCESSES)]
    for child in children:
        wait_for(lambda child=child: is_ended(child), 120)
        child.wait()
        is_killed = child in victims and child.code == -signal.SIGKILL
        assert child.out == f"{number}\n" or (is_killed and child.out == ""), child.err
        assert child.code == 0 or is_killed, child.err
    # Only a builder that was killed may have compiled in vain.
    assert checkout.compiled() <= 1 + len(victims)
    assert len(set(checkout.libraries()) - before) == 1
    wait_for(lambda: not processes_in(checkout.cache))


def check_rounds(checkout, rounds: int, moment: float) -> None:
    """Kill importers in many rounds. The cache then has the files of as many undisturbed builds."""
    files = []
    for number in 1, 2, 3:
        checkout.write("ops/tiny/tiny.h", f"#define ANSWER {number}\n")
        assert checkout.answer() == number
        files.append(len(checkout.files()))
    assert files[2] - files[1] == files[1] - files[0]
    growth = files[1] - files[0]

    seed = time.time_ns()
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(4, rounds + 4):
        edit_and_kill(checkout, number, chance, moment)
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 0\n")
    assert checkout.answer() == 0  # a build removes the remains of killed ones
    if rounds <= 4:  # the cache keeps eight libraries
        assert len(checkout.files()) == files[-1] + growth * (rounds + 1)


def test_killed_importers_leave_nothing_behind(checkout):
    check_rounds(checkout, 3, moment=1.5)


@pytest.mark.long
def test_killed_importers_leave_nothing_behind_in_200_rounds(checkout):
    check_rounds(checkout, 200, moment=1.5)


# ---- the end of a build --------------------------------------------------------------------------


def _with_default_signals():
    """Restore the default signals. A process under nohup ignores SIGHUP, and a background job
    ignores SIGINT."""
    for number in signal.SIGHUP, signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)


def start_interpreter(checkout, script: str) -> subprocess.Popen:
    """Start a new interpreter. A child of the zygote has no end of an interpreter."""
    variables = {"CALCOPS_CACHE": checkout.cache, "CXX": compiler()}
    variables |= {"TEST_LOG": checkout.log, "TEST_SLOW": checkout.slow}
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=checkout.path,
        env=os.environ | {name: str(value) for name, value in variables.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_with_default_signals,
    )


def test_a_signal_ends_a_build_at_once_and_the_next_one_is_sound(checkout):
    for number in signal.SIGTERM, signal.SIGINT:
        checkout.slow.touch()
        checkout.log.unlink(missing_ok=True)
        builder = start_interpreter(checkout, "import calcops_jit")
        wait_for(checkout.is_compiling)
        builder.send_signal(number)
        errors = builder.communicate(timeout=30)[1]
        assert builder.returncode == -number
        assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
        wait_for(lambda: not processes_in(checkout.cache))
    checkout.slow.unlink()
    assert checkout.answer() == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_signal_ends_an_initialiser_that_does_not_end(checkout, number):
    text = "volatile int one = 1;\nint wait() { while (one) {} return 0; }\nint never = wait();\n"
    checkout.put("mine.cpp", text)
    script = "import calcops_jit; calcops_jit.load('mine', 'mine.cpp')"
    child = checkout.start(script, cwd=checkout.project, CALCOPS_BUILD="0")

    def is_loaded():
        for pid in processes_in(checkout.cache.parent):
            with contextlib.suppress(OSError):  # it has ended
                if "/library." in Path(f"/proc/{pid}/maps").read_text():
                    return True
        return False

    wait_for(is_loaded)
    try:
        os.kill(child.pid, number)
        wait_for(lambda: not set(processes_in(checkout.cache.parent)) - {child.pid}, 20)
        assert child.wait().code != 0
    finally:
        for pid in processes_in(checkout.cache.parent):
            os.kill(pid, signal.SIGKILL)


# Ctrl-C arrives when flock() has just locked.
INTERRUPT_FLOCK = """
import calcops_jit, fcntl, signal
def flock(fd, operation, real=fcntl.flock):
    real(fd, operation)
    fcntl.flock = real
    raise KeyboardInterrupt
fcntl.flock = flock
try:
    calcops_jit.load("mine", "mine.cpp")
except KeyboardInterrupt:
    print("interrupted")
signal.alarm(30)
calcops_jit.load("mine", "mine.cpp")
"""


def test_an_interrupt_leaves_no_lock_behind(checkout):
    checkout.put("mine.cpp", "int one() { return 1; }\n")
    child = checkout.run(INTERRUPT_FLOCK, cwd=checkout.project, CALCOPS_BUILD="0")
    assert (child.code, child.out) == (0, "interrupted\n"), child.err
    assert "waiting" not in child.err


# Ctrl-C arrives when the child has just begun.
INTERRUPT_FORK = """
import calcops_jit, os, signal
def fork(real=os.fork):
    pid = real()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGINT)
    return pid
os.fork = fork
pid = os.getpid()
try:
    calcops_jit.load("mine", "mine.cpp")
except (KeyboardInterrupt, calcops_jit.BuildError) as error:
    print(os.getpid() == pid, type(error).__name__, flush=True)
"""


def test_an_interrupted_child_does_not_go_on_with_the_program_which_is_interrupted(checkout):
    checkout.put("mine.cpp", "int one() { return 1; }\n")
    child = checkout.run(INTERRUPT_FORK, cwd=checkout.project, CALCOPS_BUILD="0")
    assert child.out == "True KeyboardInterrupt\n", child.err


# Ctrl-C arrives while the process waits for the end of its child.
INTERRUPT_WAIT = """
import calcops_jit, os
calcops_jit.load("first", "mine.cpp")  # with the runtime
def waitpid(pid, options, real=os.waitpid):
    if os.getpgid(pid) != pid:  # `c++ --version`
        return real(pid, options)
    os.waitpid = real
    raise KeyboardInterrupt
os.waitpid = waitpid
try:
    calcops_jit.load("mine", "mine.cpp")
except KeyboardInterrupt:
    print("interrupted")
os.waitpid(-1, os.WNOHANG)  # ChildProcessError: there is no child
"""


def test_an_interrupt_at_the_end_of_a_child_leaves_no_zombie(checkout):
    checkout.put("mine.cpp", "int one() { return 1; }\n")
    child = checkout.run(INTERRUPT_WAIT, cwd=checkout.project, CALCOPS_BUILD="0")
    assert child.out == "interrupted\n", child.err
    assert "ChildProcessError" in child.err


# gevent replaces sockets by ones that do not block.
PIPES_THAT_DO_NOT_BLOCK = """
import calcops_jit, os
from _calcops_jit import child
def Pipe(real=child.Pipe):
    ends = real()
    for end in ends:
        os.set_blocking(end.fileno(), False)
    return ends
child.Pipe = Pipe
print(calcops_jit.load("mine", "mine.cpp").operators)
"""


def test_a_build_works_with_sockets_that_do_not_block(checkout):
    checkout.put("mine.cpp", "int one() { return 1; }\n")
    child = checkout.run(PIPES_THAT_DO_NOT_BLOCK, cwd=checkout.project, CALCOPS_BUILD="0")
    assert child.out == "{}\n", child.err


# The daemon inherits the pipe to this process.
DAEMON = """
#include <signal.h>
#include <unistd.h>
static int start() {
  if (fork() == 0) {
    setsid();
    sleep(20);
    _exit(0);
  }
  return raise(SIGSEGV);
}
static int value = start();
"""


def test_a_crash_is_seen_while_a_daemon_of_the_initialiser_goes_on(checkout):
    checkout.put("mine.cpp", DAEMON)
    begin = time.monotonic()
    child = checkout.load()
    assert "a static initialiser ends the process by SIGSEGV" in child.err
    assert time.monotonic() - begin < 15


FAIL_IN_ASYNCIO = """
import asyncio, calcops_jit, signal
async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print, "SIGTERM")
    try:
        calcops_jit.load("mine", "mine.cpp")
    except calcops_jit.BuildError:
        print("failed")
    await asyncio.sleep(0.2)
asyncio.run(main())
"""


def test_the_signal_that_ends_a_child_reaches_no_handler_of_asyncio(checkout):
    """The runtime is still compiled when the source has failed."""
    checkout.put("mine.cpp", "int wrong(;")
    slow = checkout.hook('case "$*" in *" -c "*/contracts/runtime/*) sleep 3;; esac')
    variables = {"CALCOPS_BUILD": "0", "MAX_JOBS": "2"} | slow
    assert checkout.run(FAIL_IN_ASYNCIO, cwd=checkout.project, **variables).out == "failed\n"


def test_an_interpreter_that_ends_while_a_thread_builds_ends_without_an_error(checkout):
    assert checkout.answer() == 1
    checkout.compiled()
    checkout.slow.touch()
    script = f"""
import calcops_jit, time
from pathlib import Path
end = calcops_jit.watch(0.05)
Path({str(checkout.path / "ops/tiny/tiny.h")!r}).write_text('#define ANSWER 2')
log = Path({str(checkout.log)!r})
while not (log.exists() and " -c " in log.read_text()):
    time.sleep(0.01)
print('end')
"""
    process = start_interpreter(checkout, script)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "end\n"), err
    assert "Error" not in err
    assert "cannot build" not in err
    checkout.slow.unlink()
    wait_for(lambda: not processes_in(checkout.cache))
    assert checkout.answer() == 2


# ---- what a build does to its process and to its compilers ---------------------------------------


def test_a_build_keeps_the_environment_while_other_threads_use_and_change_it(checkout):
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


# A thread changes a variable while the build waits for a lock.
CHANGE_A_VARIABLE = """
import calcops_jit, ctypes, fcntl, glob, os, threading, time
def load():
    global library
    library = calcops_jit.load("mine", "mine.cpp")
load()
with open("mine.cpp", "a") as source:
    source.write("// edited")
lock = open(glob.glob(os.environ["CALCOPS_CACHE"] + "/mine-*/lock")[0], "r+")
fcntl.flock(lock, fcntl.LOCK_EX)
is_waiting = threading.Event()
from _calcops_jit import messages
messages.say = lambda text: is_waiting.set()
thread = threading.Thread(target=load)
thread.start()
is_waiting.wait(20)
os.environ["CPATH"] = os.path.abspath("two")
lock.close()
thread.join()
print(ctypes.CDLL(library.path).answer())
load()
print(ctypes.CDLL(library.path).answer())
"""


def test_a_build_uses_the_variables_of_the_time_before_it_waited_for_a_lock(checkout):
    for folder, value in ("one", 1), ("two", 2):
        checkout.put(f"{folder}/value.h", f"#define VALUE {value}\n")
    checkout.put("mine.cpp", "#include <value.h>\n" + ANSWER.format("return VALUE;"))
    variables = {"CPATH": checkout.project / "one", "CALCOPS_BUILD": "0"}
    child = checkout.run(CHANGE_A_VARIABLE, cwd=checkout.project, **variables)
    assert child.out == "1\n2\n", child.err


def test_a_source_that_is_saved_during_a_build_is_built_again_by_a_compiler_of_two_words(checkout):
    source = checkout.put("mine.cpp", ANSWER.format("return 1;"))
    folder = checkout.path.parent / "saved"
    save = f"mkdir {folder} && sed -i s/1/2/ {source}"
    hook = checkout.hook(f'case "$*" in *" -c "*mine.cpp*) [ -e {folder} ] || ({save});; esac')
    assert checkout.loaded(CXX=f"{compiler()} -g0", **hook) == 2


def test_compilers_get_no_input_and_no_descriptors(checkout, tmp_path):
    hook = checkout.hook(f"ls -l /proc/self/fd >> {tmp_path}/descriptors")
    file = checkout.put("file", "")
    open_file = f"""
import os
os.dup2(os.open({str(file)!r}, os.O_RDWR), 0)
os.set_inheritable(os.dup(0), True)
{CALL}
"""
    assert checkout.run(open_file, **hook).out == "1\n"
    descriptors = (tmp_path / "descriptors").read_text()
    assert str(file) not in descriptors
    assert "0 -> /dev/null" in descriptors


# ---- cleaning ------------------------------------------------------------------------------------

USE = f"{CALL}\nimport sys, time, os\nsys.stdout.flush()"


def test_clean_empties_the_cache_but_for_builds_and_what_is_foreign(checkout, tmp_path):
    """A process that uses a removed library goes on."""
    wait = "\nend = time.monotonic() + 60"
    wait += "\nwhile not os.path.exists('stop') and time.monotonic() < end: time.sleep(0.02)"
    user = checkout.start(f"{USE}{wait}\n{CALL}", cwd=tmp_path)
    wait_for(lambda: user.out)
    foreign = checkout.cache / "data-0123456789abcdef/notes"
    foreign.mkdir(parents=True)
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    checkout.compiled()
    checkout.slow.touch()
    builder = checkout.start()
    wait_for(checkout.is_compiling)
    clean = checkout.main("clean")
    assert clean.code == 0, clean.err
    checkout.slow.unlink()
    assert builder.wait().out == "2\n", builder.err
    (tmp_path / "stop").touch()
    assert user.wait().out == "1\n1\n", user.err

    clean = checkout.main("clean")
    assert str(checkout.cache) in clean.err
    assert checkout.libraries() == []
    assert foreign.exists()
    size = sum(path.stat().st_size for path in checkout.cache.rglob("*") if path.is_file())
    assert size < 10_000  # locks may stay


def test_imports_work_while_other_processes_clean(checkout):
    """Every library that a process finds may be gone at the next moment."""
    checkout.write("ops/tiny/tiny.cpp", "static int unused;\n")
    cleaning = """
import contextlib, io, runpy, sys, time
sys.argv = ["", "clean"]
for _ in range(8):
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        runpy.run_module("calcops_jit", run_name="__main__")
    time.sleep(0.1)
"""
    importing = "import calcops_jit; print(bool(calcops_jit.library_path()))"
    cleaner = checkout.start(cleaning)
    children = []
    for _ in range(3):
        children += [checkout.start(importing) for _ in range(2)]
        time.sleep(0.2)
    for child in children:
        child.wait()
        assert (child.code, child.out) == (0, "True\n"), child.err
        assert "cannot" not in child.err
    assert cleaner.wait().code == 0, cleaner.err


def test_the_cache_keeps_eight_builds_of_a_library(checkout):
    """The ones that were used last stay."""
    for value in range(1, 11):
        checkout.write("ops/tiny/tiny.h", f"#define ANSWER {value}\n")
        assert checkout.answer() == value
    assert len(checkout.libraries()) <= 8
    checkout.compiled()
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 9\n")
    assert (checkout.answer(), checkout.compiled()) == (9, 0)


# Begins a script that runs on another machine, which does not see this one's locks.
ON_MACHINE = """
import builtins, fcntl, io
fcntl.flock = lambda fd, operation: None
def open(path, mode="r", *arguments, real=builtins.open, **options):
    if path == "/proc/sys/kernel/random/boot_id":
        return io.StringIO({name!r})
    return real(path, mode, *arguments, **options)
builtins.open = open
"""


def folders_of_builds(checkout) -> list[Path]:
    return sorted(path for path in checkout.cache.glob("calcops-*/build.*") if path.is_dir())


def test_machines_that_do_not_see_each_others_locks_build_in_folders_of_their_own(checkout):
    checkout.slow.touch()
    children = [checkout.start(ON_MACHINE.format(name=name) + CALL) for name in ("one", "two")]
    wait_for(lambda: checkout.log.exists() and checkout.log.read_text().count("tiny.cpp") >= 2)
    assert len(folders_of_builds(checkout)) == 2
    checkout.slow.unlink()
    for child in children:
        assert (child.wait().code, child.out) == (0, "1\n"), child.err
    assert len(checkout.libraries()) == 1


@pytest.mark.parametrize("other", ["builds", "is damaged"])
def test_a_build_takes_the_place_of_one_that_appears_at_the_same_moment(
    other, tmp_path, monkeypatch
):
    """A machine that does not see the lock publishes just before the rename."""
    product = tmp_path / "build" / "new.so"
    product.parent.mkdir()
    product.write_text("library")
    rename = os.rename

    def rename_after_the_other(old, new):
        if Path(new).parent == tmp_path and not Path(new).exists():
            if other == "builds":
                Path(new).mkdir()
                Path(new, "tiny.so").write_text("library of the other machine")
            else:
                Path(new).write_text("")
            monkeypatch.setattr(os, "rename", rename)
        rename(old, new)

    monkeypatch.setattr(os, "rename", rename_after_the_other)
    request = SimpleNamespace(product="tiny.so", facts={})
    build = cache.publish(str(tmp_path), str(product), request, SimpleNamespace(), {})
    assert Path(build.path).read_text() == "library"


def test_containers_of_one_machine_share_a_folder_and_four_folders_stay(checkout):
    for i in range(6):
        checkout.write("ops/tiny/tiny.h", f"#define ANSWER {i}\n")
        child = checkout.run(ON_MACHINE.format(name="one") + CALL)
        assert child.out == f"{i}\n", child.err
    assert len(folders_of_builds(checkout)) == 1
    for i in range(6):
        checkout.write("ops/tiny/tiny.h", f"#define ANSWER {10 + i}\n")
        child = checkout.run(ON_MACHINE.format(name=f"restarted {i}") + CALL)
        assert child.out == f"{10 + i}\n", child.err
    assert len(folders_of_builds(checkout)) == 4


def test_a_folder_in_which_another_machine_builds_is_not_removed(checkout, tmp_path):
    waits = tmp_path / "waits"
    waits.touch()
    hook = checkout.hook(
        f'case "$*" in *" -c "*tiny.cpp*) while [ -e {waits} ]; do sleep 0.02; done;; esac'
    )
    builder = checkout.start(ON_MACHINE.format(name="builder") + CALL, **hook)
    wait_for(checkout.is_compiling)
    (folder,) = folders_of_builds(checkout)
    for i in range(6):
        checkout.write("ops/tiny/tiny.h", f"#define ANSWER {10 + i}\n")
        checkout.run(ON_MACHINE.format(name=f"other {i}") + CALL)
    assert folder in folders_of_builds(checkout)
    waits.unlink()
    assert builder.wait().out == "15\n", builder.err
