"""The number of compilers that run at once, the limits of control groups, and doctor."""

import json
import os
import shutil

import pytest

from _calcops_jit.compile import jobs

MAIN = "import runpy; runpy.run_module('calcops_jit', run_name='__main__', alter_sys=True)"


def test_jobs_stay_within_the_processors_of_this_process():
    assert 1 <= jobs.number() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "group", "expected"),
    [
        (
            {"cpu.max": "150000 100000", "memory.max": "5000", "memory.current": "4000"},
            "0::/",
            (1.5, 1000),
        ),
        (
            {"cpu.max": "max 100000", "a/cpu.max": "50000 100000", "memory.max": "max"},
            "0::/a/b",
            (0.5, None),
        ),
        (
            {
                "memory.max": "5000",
                "memory.current": "4900",
                "memory.stat": "anon 1\ninactive_file 900\n",
            },
            "0::/",
            (None, 1000),
        ),
        ({}, "0::/", (None, None)),
    ],
)
def test_the_limits_of_control_groups_are_found(tmp_path, files, group, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(group + "\n")
    limits = jobs.cgroup_limits(str(tmp_path), str(tmp_path / "own"))
    assert limits == tuple(float("inf") if limit is None else limit for limit in expected)


def test_a_compile_that_was_killed_for_memory_is_tried_again_alone(checkout):
    checkout.write("ops/second/second.cpp", "int second() { return 2; }\n")
    # The compiler fails if another one is running: only one can make this folder.
    running = checkout.path.parent / "running"
    checkout.compiler.write_text(f"""#!/bin/sh
case "$*" in *" -c "*)
  echo "$@" >> {checkout.log}
  if ! mkdir {running}; then
    echo "c++: fatal error: Killed signal terminated program cc1plus" >&2
    exit 1
  fi
  sleep 0.5
esac
{shutil.which("c++")} "$@"; code=$?
rmdir {running} 2> /dev/null
exit $code
""")
    child = checkout.run()
    assert (child.code, child.out) == (0, "1\n"), child.err
    assert "trying again with one at a time" in child.err
    assert checkout.compiled() == 3  # two units, one of them twice


def test_doctor_reports_no_failure_if_a_build_works_also_as_json(checkout):
    for arguments in (["doctor"], ["doctor", "--json"]):
        child = checkout.run(MAIN, arguments=arguments, CALCOPS_CUDA="0")
        assert child.code == 0, child.out + child.err
    findings = {finding["what"]: finding for finding in json.loads(child.out)}
    assert findings["operators"]["evidence"] == "not built yet"
    assert findings["CUDA"] == {
        "what": "CUDA",
        "verdict": "note",
        "evidence": "CALCOPS_CUDA=0 was set",
        "fix": "unset CALCOPS_CUDA",
    }
    assert checkout.answer(CALCOPS_CUDA="0") == 1
    child = checkout.run(MAIN, arguments=["doctor"], CALCOPS_CUDA="0")
    assert f"ok    operators          {checkout.libraries()[0]}\n" in child.out


@pytest.mark.parametrize(
    ("environment", "messages"),
    [
        (
            {"CXX": "no-such-g++"},
            ["fail  no C++ compiler", "`no-such-g++` is not on PATH", "fix: unset CXX"],
        ),
        ({"CXX": "false"}, ["fail  the C++ compiler does not run", "fix: unset CXX"]),
        (
            {"CALCOPS_CUDA": "maybe"},
            ["fail  CUDA", "expected CALCOPS_CUDA 0 or 1, got 'maybe'", "fix: unset"],
        ),
    ],
)
def test_doctor_names_the_cause_of_a_build_that_would_fail(checkout, environment, messages):
    child = checkout.run(MAIN, arguments=["doctor"], **environment)
    assert (child.code, child.err) == (1, "")
    for message in messages:
        assert message in child.out
