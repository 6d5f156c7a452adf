"""What a user sees of the loader: imports, rebuilds, several processes at once."""

import copy
import inspect
import os
import re
from pathlib import Path

from checkout import CALL, in_cache, stages, wait_for

import calcops_jit

# ---- import --------------------------------------------------------------------------------------


MAIN = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"


def test_a_build_needs_no_setuptools(checkout):
    """A build takes flags from torch.utils.cpp_extension. That module imports setuptools, so the
    loader gives it a stand-in."""
    child = checkout.run(f"import sys; sys.modules['setuptools'] = None\n{CALL}")
    assert (child.code, child.out) == (0, "1\n"), child.err


def test_the_second_import_starts_no_process_prints_nothing_and_does_not_initialize_cuda(checkout):
    assert checkout.answer() == 1
    child = checkout.run(
        """
import sys, threading
started = []
names = ('subprocess.Popen', 'os.system', 'os.exec', 'os.posix_spawn', 'os.fork')
sys.addaudithook(lambda event, _: started.append(event) if event in names else None)
import calcops_jit, torch
calcops_jit.library_path()
unwanted = {'torch.utils.cpp_extension', 'setuptools'} & set(sys.modules)
print(started, unwanted, torch.cuda.is_initialized(), threading.active_count())
"""
    )
    assert (child.code, child.out, child.err) == (0, "[] set() False 1\n", "")


def test_the_first_import_prints_progress_within_a_second_and_reports_its_end(checkout):
    checkout.slow.touch()
    child = checkout.start()
    wait_for(lambda: "building calcops [0/" in child.err)
    # CPU time, because the machine may be busy with other processes.
    assert seconds_spent(child.pid) < 1.0
    checkout.slow.unlink()
    child.wait()
    assert re.fullmatch(
        r"calcops_jit: building calcops \[0/\?\] 0 s\ncalcops_jit: built calcops in [\d.]+ s\n",
        child.err,
    )


def test_calcops_build_0_imports_without_building_and_an_operator_names_the_command(checkout):
    child = checkout.run(
        "import calcops_jit; print('imported'); calcops_jit.force", CALCOPS_BUILD="0"
    )
    assert child.code == 1
    assert child.out == "imported\n"
    assert "CALCOPS_BUILD=0; python -m calcops_jit build" in child.err
    assert not checkout.cache.exists()


def test_python_m_calcops_jit_builds_only_with_the_command_build(checkout):
    where = checkout.run(MAIN, arguments=["where"])
    assert where.code == 0
    assert "not built yet" in where.out
    assert str(checkout.cache) in where.out
    assert not checkout.cache.exists()

    assert checkout.run(MAIN).code == 2
    assert not checkout.cache.exists()

    build = checkout.run(MAIN, arguments=["build"])
    assert build.out.strip() == str(checkout.libraries()[0])
    assert checkout.run(MAIN, arguments=["clean"]).code == 0
    assert checkout.libraries() == []


def test_where_key_changes_with_a_header_and_not_with_the_folder(checkout, tmp_path):
    def key():
        return checkout.run(MAIN, arguments=["where", "--key"]).out

    first = key()
    assert re.fullmatch(r"calcops-[0-9a-f]{20}\n", first)
    checkout.path = checkout.path.rename(tmp_path / "moved")
    assert key() == first
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert key() != first


def test_an_unsupported_system_or_processor_is_refused_in_one_line(checkout):
    for system, machine in (("darwin", "arm64"), ("linux", "riscv64")):
        script = f"""
import platform, sys
sys.platform = {system!r}
platform.machine = lambda: {machine!r}
import calcops_jit
"""
        child = checkout.run(script)
        expected = (
            "ImportError: calcops_jit: expected Linux on x86-64 or aarch64, got "
            f"{system} on {machine}"
        )
        assert child.err.splitlines()[-1] == expected


def test_inspect_shows_the_names_and_defaults_of_the_schema():
    def signature(operator):
        return str(inspect.signature(operator))

    expected = "(list_neigh, dE, Ri_d, nghost=0, *, neighbor_index=None)"
    assert signature(calcops_jit.force) == expected
    assert signature(copy.copy(calcops_jit.force)) == expected
    assert signature(calcops_jit.calculateForce) == "(list_neigh, dE, Ri_d, F, nghost=None)"


# ---- rebuilds ------------------------------------------------------------------------------------


def test_a_changed_header_causes_a_rebuild_and_going_back_does_not(checkout):
    assert checkout.answer() == 1
    assert checkout.compiled() == 1
    header = checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    os.utime(header, (0, 0))  # a header with an older time has changed, too
    assert checkout.answer() == 2
    assert checkout.compiled() == 1
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 1\n")
    assert checkout.answer() == 1
    assert checkout.compiled() == 0


def test_a_new_header_that_has_include_tests_causes_a_rebuild(checkout):
    checkout.write(
        "ops/tiny/tiny.h",
        (
            '#if __has_include("tiny/special.h")\n#include "tiny/special.h"\n#else\n'
            "#define ANSWER 1\n#endif\n"
        ),
    )
    assert checkout.answer() == 1
    assert checkout.compiled() == 1
    checkout.write("ops/tiny/special.h", "#define ANSWER 3\n")
    assert checkout.answer() == 3
    assert checkout.compiled() == 1


def test_a_new_header_that_is_found_first_causes_a_rebuild(checkout):
    assert checkout.answer() == 1
    assert checkout.compiled() == 1
    # The compiler searches the source's own folder before those of -I.
    checkout.write("ops/tiny/tiny/tiny.h", "#define ANSWER 4\n")
    assert checkout.answer() == 4
    assert checkout.compiled() == 1


def test_a_new_operator_folder_is_found(checkout):
    assert checkout.answer() == 1
    assert checkout.compiled() == 1
    checkout.write("ops/second/second.cpp", "int second() { return 2; }\n")
    assert checkout.answer() == 1
    assert checkout.compiled() == 1


def test_only_changed_units_are_compiled_even_after_a_failed_build(checkout):
    checkout.write("ops/second/second.cpp", "int second() { return 2; }\n")
    assert checkout.answer() == 1
    assert checkout.compiled() == 2
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert checkout.answer() == 2
    assert checkout.compiled() == 1
    checkout.write("ops/a/a.cpp", "int a() { return 0; }\n")
    checkout.write("ops/second/second.cpp", "int second() { return }\n")
    assert "cannot build" in checkout.run(MAX_JOBS="1").err
    checkout.compiled()  # begin a new count
    checkout.write("ops/second/second.cpp", "int second() { return 3; }\n")
    assert checkout.answer() == 2
    assert checkout.compiled() == 1


def test_touching_or_moving_the_files_or_the_cache_compiles_nothing(checkout, tmp_path):
    assert checkout.answer() == 1
    assert checkout.compiled() == 1
    for file in (checkout.path / "ops").rglob("*.*"):
        file.touch()
    assert checkout.answer() == 1
    assert checkout.compiled() == 0
    checkout.path = checkout.path.rename(tmp_path / "moved elsewhere")
    assert checkout.answer() == 1
    assert checkout.compiled() == 0
    link = tmp_path / "link"
    link.symlink_to(checkout.path)
    checkout.path = link
    assert checkout.answer(cwd="/", LC_ALL="C", HOME=tmp_path, MAX_JOBS="1") == 1
    assert checkout.compiled() == 0
    checkout.cache = checkout.cache.rename(tmp_path / "moved cache")
    assert checkout.answer() == 1
    assert checkout.compiled() == 0


def test_another_variable_of_the_compiler_or_another_compiler_causes_a_rebuild(checkout):
    assert checkout.answer() == 1
    assert checkout.compiled() == 1
    assert checkout.answer(CPATH="/nowhere") == 1
    assert checkout.compiled() == 1
    with open(checkout.compiler, "a") as script:
        script.write("# a new release\n")
    assert checkout.answer() == 1
    assert checkout.compiled() == 1
    assert checkout.answer() == 1
    assert checkout.compiled() == 0


def test_without_a_compiler_a_cached_library_is_used(checkout):
    assert checkout.answer() == 1
    assert checkout.answer(CXX="g++-that-was-removed") == 1


def test_a_source_saved_during_its_compile_is_compiled_again(checkout):
    checkout.slow.touch()
    child = checkout.start()
    wait_for(lambda: checkout.log.exists() and " -c " in checkout.log.read_text())
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 5\n")
    checkout.slow.unlink()
    child.wait()
    assert (child.code, child.out) == (0, "5\n")
    assert checkout.answer() == 5


# ---- several processes ---------------------------------------------------------------------------


def test_eight_processes_at_once_compile_once(checkout):
    children = [checkout.start() for _ in range(8)]
    assert [(child.wait().code, child.out) for child in children] == [(0, "1\n")] * 8
    assert checkout.compiled() == 1
    assert sum("built calcops" in child.err for child in children) == 1


def test_an_import_does_not_wait_for_the_compilers_of_a_killed_builder(checkout):
    checkout.slow.touch()
    builder = checkout.start()
    wait_for(lambda: checkout.log.exists() and " -c " in checkout.log.read_text())
    builder.kill()
    assert len(in_cache(checkout)) >= 2  # ninja and the compiler outlive it
    # The killed process is a zombie until wait() below. The next import must take it for dead.
    after = checkout.start()
    wait_for(lambda: len(stages(checkout)) == 1 and f".{after.pid}." in str(stages(checkout)))
    assert "waiting" not in after.err
    # The next import kills the processes of the dead builder, so only its own stay in the cache.
    wait_for(lambda: set(in_cache(checkout)) == set(in_cache(checkout, f".{after.pid}.")))
    builder.wait()
    checkout.slow.unlink()
    assert after.wait().out == "1\n"
    assert stages(checkout) == []


def test_a_waiter_names_the_builder_and_builds_when_it_is_killed(checkout):
    checkout.slow.touch()
    builder = checkout.start()
    wait_for(lambda: checkout.log.exists() and " -c " in checkout.log.read_text())
    waiter = checkout.start()
    wait_for(lambda: "waiting" in waiter.err)
    pattern = (
        rf"calcops_jit: waiting for pid {builder.pid} on {os.uname().nodename}, "
        r"which builds calcops \(\d+ s\)\n"
    )
    assert re.fullmatch(pattern, waiter.err)
    spent = seconds_spent(waiter.pid)
    builder.kill()
    wait_for(lambda: "building calcops [0/?]" in waiter.err)
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
