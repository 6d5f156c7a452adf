"""The loader as a user meets it: import, rebuild, cache, errors."""

import copy
import inspect
import os
import re
from pathlib import Path

from checkout import CALL, in_cache, stages, wait_for

import calcops_jit

# ---- import --------------------------------------------------------------------------------------


def test_a_build_needs_no_setuptools(checkout):
    """PyTorch's part that chooses the flags imports it, for the sake of setup.py."""
    child = checkout.run(f"import sys; sys.modules['setuptools'] = None\n{CALL}")
    assert (child.code, child.out) == (0, "1\n"), child.err


def test_the_second_import_starts_no_process_prints_nothing_and_leaves_cuda_alone(checkout):
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


def test_the_first_import_prints_progress_within_a_second_and_says_when_it_is_done(checkout):
    checkout.slow.touch()
    child = checkout.start()
    wait_for(lambda: "building calcops [0/" in child.err)
    # By a processor: the machine may be busy with other things.
    assert seconds_spent(child.pid) < 1.0
    checkout.slow.unlink()
    child.wait()
    assert re.fullmatch(
        r"calcops_jit: building calcops \[0/\?\] 0 s\ncalcops_jit: built calcops in [\d.]+ s\n",
        child.err,
    )


def test_calcops_build_0_imports_without_building_and_the_operators_say_so(checkout):
    child = checkout.run(
        "import calcops_jit; print('imported'); calcops_jit.force", CALCOPS_BUILD="0"
    )
    assert child.code == 1
    assert child.out == "imported\n"
    assert "CALCOPS_BUILD=0; python -m calcops_jit build" in child.err
    assert not checkout.cache.exists()


def test_as_main_it_builds_only_when_asked(checkout):
    main = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
    where = checkout.run(main, arguments=["where"])
    assert where.code == 0
    assert "not built yet" in where.out
    assert str(checkout.cache) in where.out
    assert not checkout.cache.exists()
    assert checkout.run(main).code == 2
    assert not checkout.cache.exists()
    build = checkout.run(main, arguments=["build"])
    assert build.out.strip() == str(checkout.libraries()[0])
    assert checkout.run(main, arguments=["clean"]).code == 0
    assert checkout.libraries() == []


def test_the_key_for_ci_changes_with_a_header_and_not_with_a_place(checkout, tmp_path):
    main = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"
    key = lambda: checkout.run(main, arguments=["where", "--key"]).out  # noqa: E731
    first = key()
    assert re.fullmatch(r"calcops-[0-9a-f]{20}\n", first)
    checkout.path = checkout.path.rename(tmp_path / "moved")
    assert key() == first
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert key() != first


def test_another_system_is_refused_in_one_line(checkout):
    for system, machine in (("darwin", "arm64"), ("linux", "riscv64")):
        other = (
            f"import platform, sys; sys.platform, platform.machine = {system!r}, "
            f"lambda: {machine!r}"
        )
        child = checkout.run(f"{other}\nimport calcops_jit")
        expected = (
            "ImportError: calcops_jit: expected Linux on x86-64 or aarch64, got "
            f"{system} on {machine}"
        )
        assert child.err.splitlines()[-1] == expected


# ---- rebuild or not ------------------------------------------------------------------------------


def test_a_changed_header_rebuilds_and_going_back_does_not(checkout):
    assert checkout.answer() == 1
    assert checkout.compiled() == 1
    header = checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    os.utime(header, (0, 0))  # an older time is a change too
    assert checkout.answer() == 2
    assert checkout.compiled() == 1
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 1\n")
    assert checkout.answer() == 1
    assert checkout.compiled() == 0


def test_a_header_that_newly_matches_has_include_rebuilds(checkout):
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


def test_a_new_header_that_is_found_first_rebuilds(checkout):
    assert checkout.answer() == 1
    assert checkout.compiled() == 1
    # Beside the source comes before -I.
    checkout.write("ops/tiny/tiny/tiny.h", "#define ANSWER 4\n")
    assert checkout.answer() == 4
    assert checkout.compiled() == 1


def test_a_new_operator_folder_is_found(checkout):
    assert checkout.answer() == 1
    assert checkout.compiled() == 1
    checkout.write("ops/second/second.cpp", "int second() { return 2; }\n")
    assert checkout.answer() == 1
    assert checkout.compiled() == 1


def test_only_what_changed_is_compiled_also_after_a_failed_build(checkout):
    checkout.write("ops/second/second.cpp", "int second() { return 2; }\n")
    assert checkout.answer() == 1
    assert checkout.compiled() == 2
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert checkout.answer() == 2
    assert checkout.compiled() == 1
    checkout.write("ops/a/a.cpp", "int a() { return 0; }\n")
    checkout.write("ops/second/second.cpp", "int second() { return }\n")
    assert "cannot build" in checkout.run(MAX_JOBS="1").err
    checkout.compiled()
    checkout.write("ops/second/second.cpp", "int second() { return 3; }\n")
    assert checkout.answer() == 2
    assert checkout.compiled() == 1


def test_touch_and_move_and_another_folder_compile_nothing(checkout, tmp_path):
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


def test_other_flags_in_the_environment_and_another_compiler_rebuild(checkout):
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


# ---- many processes, and dead ones ---------------------------------------------------------------


def test_eight_processes_at_once_compile_once(checkout):
    children = [checkout.start() for _ in range(8)]
    assert [(child.wait().code, child.out) for child in children] == [(0, "1\n")] * 8
    assert checkout.compiled() == 1
    assert sum("built calcops" in child.err for child in children) == 1


def test_a_killed_builder_leaves_nothing_that_the_next_import_waits_for(checkout):
    checkout.slow.touch()
    builder = checkout.start()
    wait_for(lambda: checkout.log.exists() and " -c " in checkout.log.read_text())
    builder.kill()
    assert len(in_cache(checkout)) >= 2  # ninja and the compiler outlive it
    after = checkout.start()  # before the killed process is reaped: a zombie counts as dead
    wait_for(
        lambda: (
            len(list(checkout.cache.glob("*/stage.*"))) == 1
            and f".{after.pid}." in str(stages(checkout))
        )
    )
    assert "waiting" not in after.err
    # The others are killed.
    wait_for(lambda: set(in_cache(checkout)) == set(in_cache(checkout, f".{after.pid}.")))
    builder.wait()
    checkout.slow.unlink()
    assert after.wait().out == "1\n"
    assert stages(checkout) == []


def test_a_waiter_says_whom_it_waits_for_and_takes_over(checkout):
    checkout.slow.touch()
    builder = checkout.start()
    wait_for(lambda: checkout.log.exists() and " -c " in checkout.log.read_text())
    waiter = checkout.start()
    wait_for(lambda: "waiting" in waiter.err)
    assert re.fullmatch(
        (
            rf"calcops_jit: waiting for pid {builder.pid} on {os.uname().nodename}, "
            r"which builds calcops \(\d+ s\)\n"
        ),
        waiter.err,
    )
    spent = seconds_spent(waiter.pid)
    builder.kill()
    wait_for(lambda: "building calcops [0/?]" in waiter.err)
    assert seconds_spent(waiter.pid) - spent < 0.5
    checkout.slow.unlink()
    builder.wait()
    assert waiter.wait().out == "1\n"


def seconds_spent(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_inspect_shows_the_names_and_defaults_of_the_schema():
    text = "(list_neigh, dE, Ri_d, nghost=0, *, neighbor_index=None)"
    assert str(inspect.signature(calcops_jit.force)) == text
    assert (
        str(inspect.signature(calcops_jit.calculateForce))
        == "(list_neigh, dE, Ri_d, F, nghost=None)"
    )
    assert str(inspect.signature(copy.copy(calcops_jit.force))) == text
