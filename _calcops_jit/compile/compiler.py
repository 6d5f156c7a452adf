"""One build in a private folder: compile what changed, keep objects, link, record inputs."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterable

from .. import errors
from ..cache import closure, store
from ..request import REGISTRY, RUNTIME, RUNTIMES, Request
from . import compiler_reads, diagnosis, jobs, precompiled, recording, toolchain
from .plan import Plan

# Runs ninja, and ends it and its compilers when this process ends in any way: only then does the
# pipe that is its standard input end. A signal handler would be a second one in somebody else's
# program, and SIGKILL has none.
_SUPERVISED = """
exec 3<&0 < /dev/null
{ read -r _ <&3; kill -s TERM -- -$$; } > /dev/null 2>&1 &
exec 3<&-
exec "$@"
"""


class OutOfMemory(Exception):
    """A compiler was killed while others ran beside it."""


def build(
    request: Request, slot: str, staging: str, alone: bool = False
) -> tuple[str, closure.Closure]:
    """Compiles what changed and links it, in the folder `staging`: (the library, what it was made
    from).

    alone   one compiler at a time

    BuildError: it cannot be built. closure.Changed: a source was saved meanwhile. OutOfMemory: it
    may work `alone`. Whatever happens, each object that was compiled is kept, and not compiled
    again.
    """
    ninja = find_ninja()
    for problem in diagnosis.foresee(request, ninja):
        raise problem.error(f"cannot build {request.name}")
    texts = compiler_reads.foreseen(request)
    # Objects of a wheel have contracts.
    runtime = _foreseen_runtime(texts.values()) if request.sources else [RUNTIME]
    if runtime == [REGISTRY] and _is_kept(request, RUNTIME) and not _is_kept(request, REGISTRY):
        runtime = [RUNTIME]  # which serves TORCH_LIBRARY, too
    try:
        return _build(
            request, [*runtime, *request.sources], set(texts), slot, staging, ninja, alone
        )
    except _NeedsRuntime as needed:  # a macro in somebody's headers registers operators
        return _build(
            request, [str(needed), *request.sources], set(texts), slot, staging, ninja, alone
        )


def _foreseen_runtime(texts: Iterable[bytes]) -> list[str]:
    """Return the runtime that the sources need, as far as their texts show it."""
    text = b"\n".join(texts)
    if re.search(rb"#[ \t]*include[ \t]*[<\"]calcops/", text):
        return [RUNTIME]
    return [REGISTRY] if re.search(rb"TORCH_LIBRARY|\bclass_\s*<", text) else []


def _is_kept(request: Request, source: str) -> bool:
    """Return True if the cache has the object of a source."""
    found = store.find(request.unit(source))
    if found:
        os.close(found.fd)
    return found is not None


class _NeedsRuntime(Exception):
    """Objects refer to a unit of RUNTIMES that was not linked. The message is its path."""


def _build(request, sources, foreseen, slot, staging, ninja, alone) -> tuple[str, closure.Closure]:
    reasons: dict[str, list[str]] = {source: [] for source in sources}
    found = {source: store.find(request.unit(source), reasons[source]) for source in sources}
    kept = {
        _copy(generation, staging): generation.manifest.closure
        for generation in found.values()
        if generation
    }
    fresh = [source for source in sources if not found[source]]
    plan = _plan(
        request, staging, fresh, list(kept), 1 if alone else jobs.number(request.environment)
    )
    ldflags, quick = plan.flags["ldflags"], toolchain.quick_linker(request)
    plan.flags["ldflags"] += f" {quick}"
    # CXX='g++ @flags', for one.
    of_compiler = compiler_reads.named(request, shlex.join(request.compiler))
    named = {
        kind: compiler_reads.named(request, text) | of_compiler for kind, text in plan.flags.items()
    }
    before = recording.Before(staging, foreseen.union(*named.values()))
    # After `before`, so that no header can change unseen between the look at it and the end of the
    # build.
    edited = {source: bool(reasons[source]) for source in fresh}
    with contextlib.closing(precompiled.Preambles(request, staging, edited)) as preambles:
        plan.preambles = preambles.used
        ahead = threading.Thread(
            target=recording.read_ahead, args=(request, kept.values()), daemon=True
        )
        ahead.start()
        said = _run(ninja, plan, request, staging)
        if (
            said
            and quick
            and all(os.path.exists(f"{staging}/{target}") for target in plan.units.values())
        ):
            plan.flags["ldflags"] = ldflags
            # By GNU ld, whose messages diagnosis.py knows.
            said = _run(ninja, plan, request, staging)
        elif (
            not said
            and quick
            and not compiler_reads.is_plain_link(staging, [*kept, *plan.units.values()])
        ):
            plan.flags["ldflags"] = ldflags
            said = _run(ninja, plan, request, staging)
    ahead.join()
    recorder = recording.Recorder(request, toolchain.search(request, plan.flags["cflags"]), before)
    recorders = {source: recorder for source in plan.units}
    for runtime in set(RUNTIMES).intersection(plan.units):
        search = toolchain.search(request, plan.runtime_cflags)
        recorders[runtime] = recording.Recorder(request.unit(runtime), search, before)
    closures, changed = _keep(
        request, slot, staging, plan, recorders, named["cflags"] | named["cuda_cflags"]
    )
    if said:
        raise _judge(request, slot, said, alone, sources)
    if changed:
        raise changed
    preambles.start(request, slot, plan.flags["cflags"], plan.environment, plan.jobs)
    linked = (
        compiler_reads.of_link(request, staging, [*kept, *plan.units.values()]) | named["ldflags"]
    )
    linker = toolchain.linker(plan.flags["ldflags"])
    linked |= toolchain.tools(request, plan.flags["ldflags"], linker)
    library = f"{staging}/{os.path.basename(staging)}"
    unused = toolchain.unlinked(request, plan.flags["ldflags"], linked)
    unused += toolchain.unrun(request, plan.flags["ldflags"], "collect2", linker)
    of_link = recorder.closure(set(), linked, unused=unused)
    return library, closure.merged([*kept.values(), *closures, of_link])


def _plan(request: Request, staging: str, fresh: list[str], kept: list[str], number: int) -> Plan:
    try:
        return Plan.of(request, staging, fresh, kept, number)
    except errors.BuildError:
        raise
    except Exception as error:  # torch's own, about a GPU architecture for one
        raise diagnosis.explain(f"cannot build {request.name}", str(error), request) from None


def _run(ninja: str, plan: Plan, request: Request, staging: str) -> str:
    """Runs ninja: what it and the compilers say if they fail, else ""."""
    plan.write(request, staging)
    command = ["/bin/sh", "-c", _SUPERVISED, "sh", ninja, "-v", "-j", str(plan.jobs)]
    said = []
    with subprocess.Popen(
        command,
        cwd=staging,
        env=plan.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        process_group=0,  # Ctrl-C ends this process, and that ends what it has started
    ) as process:
        try:
            for line in process.stdout:
                said.append(line)
                if request.verbose:
                    # A closed stream must not fail a build.
                    with contextlib.suppress(OSError, ValueError):
                        print(line, end="", flush=True)
        except BaseException:
            process.kill()  # the compilers are ended with the private folder
            raise
    return "".join(said) or f"ninja ended with {process.returncode}" if process.returncode else ""


def _keep(
    request: Request,
    slot: str,
    staging: str,
    plan: Plan,
    recorders: dict[str, recording.Recorder],
    flagged: set[str],
) -> tuple[list[closure.Closure], closure.Changed | None]:
    """Keeps every object that was compiled, even if others failed: (their closures, the Changed of
    one whose input was saved meanwhile).

    recorders   for each source
    flagged     files that the flags name
    """
    if not plan.units:
        return [], None
    tools = toolchain.tools(request, plan.flags["cflags"], "cc1plus", "as") | toolchain.cuda_tools(
        request
    )
    unrun = toolchain.unrun(request, plan.flags["cflags"], "cc1plus", "as")
    log = closure.text_of(f"{staging}/.ninja_log")
    finished = set(re.findall(r"\t([^\t]+)\t\w+$", log, re.MULTILINE))
    closures, changed = [], None
    for source, target in plan.units.items():
        if target not in finished:
            continue
        read, told = compiler_reads.of_unit(request, staging, source, target)
        try:
            others = tools | (set() if source in RUNTIMES else flagged)
            closures.append(recorders[source].closure(read, others, told, unrun))
        except closure.Changed as error:
            changed = error
        else:
            unit = request.unit(source)
            place = store.slot_path(os.path.dirname(slot), unit)
            store.publish(place, staging, f"{staging}/{target}", unit, closures[-1])
    return closures, changed


def _judge(request: Request, slot: str, said: str, alone: bool, sources: list[str]) -> Exception:
    """What to raise for a failed build, whose output is written to a log."""
    undefined = "\n".join(re.findall(r"undefined (?:reference|symbol).*", said))
    if "calcops::" in undefined and RUNTIME not in sources:
        return _NeedsRuntime(RUNTIME)
    if "calcops_jit::" in undefined and not set(RUNTIMES).intersection(sources):
        return _NeedsRuntime(REGISTRY)
    problem = diagnosis.judge(said, request)
    if problem and problem.cause.startswith(diagnosis.KILLED) and not alone:
        return OutOfMemory()
    log = f"{slot}/failed.log"
    with contextlib.suppress(OSError), open(log, "w", encoding="utf-8") as file:
        file.write(said)
    return diagnosis.explain(f"cannot build {request.name}", said, request, log)


def _copy(found: store.Generation, staging: str) -> str:
    """Copies a kept object into the private folder, under a name that needs no quotes."""
    name = f"kept.{found.fd}.o"
    with open(found.fd, "rb") as source, open(f"{staging}/{name}", "wb") as target:
        source.seek(0)
        shutil.copyfileobj(source, target)
    return name


def progress(staging: str, seconds: float) -> tuple[str, float]:
    """Return (a line of progress, the finished fraction) of the build in the folder `staging`."""
    targets = re.findall(r"^build (\S+):", closure.text_of(f"{staging}/build.ninja"), re.MULTILINE)
    built = re.findall(
        r"^\d+\t\d+\t\d+\t(.+)\t", closure.text_of(f"{staging}/.ninja_log"), re.MULTILINE
    )
    waiting = [target for target in targets if target not in built]
    name = ""
    if len(waiting) > 1:
        name = waiting[0].removesuffix(".o") + " "
    elif waiting:
        name = "linking "  # the library is the last target
    done = len(targets) - len(waiting)
    return f"[{done}/{len(targets) or '?'}] {name}{seconds:.0f} s", done / (len(targets) or 1)


def find_ninja() -> str | None:
    """Return the path of ninja: on PATH, in the folder of this Python, or in its wheel."""
    folders = [sysconfig.get_path("scripts"), os.path.dirname(sys.executable)]
    with contextlib.suppress(ImportError):
        from ninja import BIN_DIR

        folders.append(BIN_DIR)
    return shutil.which("ninja") or shutil.which("ninja", path=os.pathsep.join(folders))
