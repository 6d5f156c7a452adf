"""One compile in a private folder, what it read, and how many compilers may run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping

from . import cache, diagnosis, inputs, reads
from .plan import Plan


class OutOfMemory(Exception):
    """A compiler was killed while others ran beside it."""


def compile_library(
    request: inputs.Request, slot: str, staging: str, alone: bool = False
) -> tuple[str, inputs.Closure]:
    """Compiles what changed and links, in `staging`; gives the library and its closure.

    BuildError when that fails; inputs.Changed when a source was saved meanwhile; OutOfMemory when it is worth
    trying `alone`. Whichever it is, every unit that was compiled is kept: it is not compiled again."""
    ninja = find_ninja()
    for problem in diagnosis.foresee(request, ninja):
        raise diagnosis.explain(f"cannot build {request.name}", problem, request)
    looked_up = {source: cache.find(request.unit(source)) for source in request.sources}
    kept = [found for found in looked_up.values() if found]
    fresh = [source for source, found in looked_up.items() if not found]
    objects = [_bring(found, staging) for found in kept]
    plan = _plan(request, staging, fresh, objects, 1 if alone else jobs(request.environment))
    named = {kind: reads.named(request, text) for kind, text in plan.flags.items()}
    compiling, linking = named["cflags"] | named["cuda_cflags"], named["ldflags"]
    foreseen = reads.foreseen(request, fresh, plan.flags["cflags"])
    before = reads.Before(staging, foreseen | compiling | linking)
    said = _run(ninja, plan, request, staging)
    if "--dependency-file" in said:
        said = _run(ninja, plan, request, staging, reads.LINKED_BEFORE_2_35)
    failure = said and _failure(said, request, slot, alone)
    recorder = reads.Recorder(request, reads.search(request, plan.flags["cflags"]), before)
    closures = [found.manifest.closure for found in kept]
    tools = reads.tools(request, plan.flags["cflags"], "cc1plus", "as") | reads.cuda_tools(request) if fresh else set()
    finished = re.findall(r"\t([^\t]+)\t\w+$", inputs.text_of(f"{staging}/.ninja_log"), re.MULTILINE)
    for source, target in plan.units.items():
        if target not in finished:
            continue
        try:
            read, told = reads.of_unit(request, staging, source, target)
            closures.append(recorder.closure(read, compiling | tools, told))
        except inputs.Changed as changed:
            failure = failure or changed
        else:
            unit = request.unit(source)
            place = cache.slot_path(os.path.dirname(slot), unit)
            cache.publish(place, staging, f"{staging}/{target}", unit, closures[-1])
    if failure:
        raise failure
    linked = reads.of_link(request, staging, [*objects, *plan.units.values()])
    linked |= linking | reads.tools(request, plan.flags["ldflags"], reads.linker(plan.flags["ldflags"]))
    return f"{staging}/{os.path.basename(staging)}", inputs.merged([*closures, recorder.closure(set(), linked)])


def _plan(request: inputs.Request, staging: str, fresh: list[str], objects: list[str], jobs: int) -> Plan:
    try:
        return Plan.of(request, staging, fresh, objects, jobs)
    except diagnosis.BuildError:
        raise
    except Exception as error:  # torch's, of a GPU's architecture for one
        raise diagnosis.explain(f"cannot build {request.name}", str(error), request) from None


def _failure(said: str, request: inputs.Request, slot: str, alone: bool) -> Exception:
    with contextlib.suppress(OSError), open(f"{slot}/failed.log", "w", encoding="utf-8") as file:
        file.write(said)
    failure = diagnosis.explain(f"cannot build {request.name}", said, request, f"{slot}/failed.log")
    return OutOfMemory() if not alone and diagnosis.KILLED in str(failure) else failure


def _run(ninja: str, plan: Plan, request: inputs.Request, staging: str, linked: str = reads.LINKED) -> str:
    """What ninja and the compilers say if they fail."""
    plan.write(request, staging, linked)
    command = [ninja, "-v", "-j", str(plan.jobs)]
    said = []
    with subprocess.Popen(
        command,
        cwd=staging,
        env=plan.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        process_group=0,  # Ctrl-C is for this process, which then ends what it has started
    ) as process:
        try:
            for line in process.stdout:
                said.append(line)
                if request.verbose:
                    with contextlib.suppress(OSError, ValueError):  # a closed stream must not fail a build
                        print(line, end="", flush=True)
        except BaseException:
            process.kill()  # and the compilers, with the staging folder
            raise
    return "".join(said) or f"ninja ended with {process.returncode}" if process.returncode else ""


def _bring(found: cache.Generation, staging: str) -> str:
    """A kept object into the staging folder, where its name needs no quoting."""
    name = f"kept.{found.fd}.o"
    with open(found.fd, "rb") as source, open(f"{staging}/{name}", "wb") as target:
        source.seek(0)
        shutil.copyfileobj(source, target)
    return name


def find_ninja() -> str | None:
    """ninja on PATH, beside this Python (whose folder is not on PATH when only it is called), or in its wheel."""
    folders = [sysconfig.get_path("scripts"), os.path.dirname(sys.executable)]
    with contextlib.suppress(ImportError):
        from ninja import BIN_DIR

        folders.append(BIN_DIR)
    return shutil.which("ninja") or shutil.which("ninja", path=os.pathsep.join(folders))


def jobs(environment: Mapping[str, str] = os.environ) -> int:
    """How many compilers may run: MAX_JOBS, or processors and free memory for 1.5 GB each, within the cgroups."""
    if (asked := environment.get("MAX_JOBS", "")).isdigit():
        return int(asked)
    processors, free = cgroup_limits()
    if available := re.search(r"MemAvailable:\s+(\d+)", inputs.text_of("/proc/meminfo")):
        free = min(free, int(available[1]) * 1024)
    return max(1, int(min(len(os.sched_getaffinity(0)), processors, free / 1.5e9, 1024)))


def cgroup_limits(mounted: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> tuple[float, float]:
    """(processors, bytes) that the control groups, of version 2 or 1, leave to this process; inf: no limit."""
    processors = free = float("inf")
    for line in inputs.text_of(own).splitlines():
        _, controllers, group = line.split(":", 2)
        parts = [part for part in group.split("/") if part]
        for depth in range(len(parts) + 1):  # each group above limits, too; a container sees only some
            folder = "/".join([mounted, *filter(None, [controllers]), *parts[:depth]])
            quota = _numbers(f"{folder}/cpu.max") or _numbers(f"{folder}/cpu.cfs_quota_us")
            period = quota[1:] or _numbers(f"{folder}/cpu.cfs_period_us")
            if quota and period and quota[0] > 0:
                processors = min(processors, quota[0] / period[0])
            limit = _numbers(f"{folder}/memory.max") or _numbers(f"{folder}/memory.limit_in_bytes")
            used = _numbers(f"{folder}/memory.current") or _numbers(f"{folder}/memory.usage_in_bytes")
            if limit and used:  # pages of files count as used, but the kernel gives them up
                files = re.search(r"^(?:total_)?inactive_file (\d+)$", inputs.text_of(f"{folder}/memory.stat"), re.M)
                free = min(free, limit[0] - used[0] + int(files[1] if files else 0))
    return processors, free


def _numbers(path: str) -> list[int]:
    """Of a control group's file; none where it says "max" or does not exist."""
    with contextlib.suppress(ValueError):
        return [int(word) for word in inputs.text_of(path).split()]
    return []
