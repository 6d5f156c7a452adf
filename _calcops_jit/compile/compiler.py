"""One build in a private folder: compile edited sources, cache objects, link, record inputs."""

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
from . import dependency_files, diagnosis, expected_inputs, jobs, precompiled, recording, toolchain
from .plan import Plan

# Runs ninja, and ends ninja and its compilers as soon as this process ends. The standard input is a
# pipe from this process: reading from it returns when the process has ended in any way. A signal
# handler could not do this, because the program may have its own handlers, and SIGKILL has none.
_SUPERVISED = """
exec 3<&0 < /dev/null
{ read -r _ <&3; kill -s TERM -- -$$; } > /dev/null 2>&1 &
exec 3<&-
exec "$@"
"""


class OutOfMemory(Exception):
    """A compiler was killed while others ran at the same time."""


def build(
    request: Request, slot: str, staging: str, alone: bool = False
) -> tuple[str, closure.Closure]:
    """Compile the sources whose objects are not cached, and link all objects.

    Every new object is cached, also if the build fails.

    Args:
        request: what to build.
        slot: the library's folder in the cache.
        staging: the private folder of this build.
        alone: run one compiler at a time.

    Returns:
        The library's path and its closure.

    Raises:
        BuildError: the library cannot be built.
        closure.Changed: a source was saved meanwhile.
        OutOfMemory: the build may succeed with `alone`.
    """
    ninja = find_ninja()
    for problem in diagnosis.foresee(request, ninja):
        raise problem.error(f"cannot build {request.name}")
    contents = expected_inputs.by_include_lines(request)
    runtime = _runtime_for(request, contents.values())
    expected = set(contents)
    try:
        return _Build(request, slot, staging, runtime, expected, alone).run(ninja)
    except _NeedsRuntime as needed:  # a macro hides what _runtime_for() searches for
        return _Build(request, slot, staging, [str(needed)], expected, alone).run(ninja)


def _runtime_for(request: Request, texts: Iterable[bytes]) -> list[str]:
    """Return the units of RUNTIMES that sources and headers with these texts seem to need."""
    if not request.sources:  # only a wheel's objects are linked, and these have contracts
        return [RUNTIME]
    text = b"\n".join(texts)
    if re.search(rb"#[ \t]*include[ \t]*[<\"]calcops/", text):
        return [RUNTIME]
    if not re.search(rb"TORCH_LIBRARY|\bclass_\s*<", text):
        return []
    # RUNTIME implements TORCH_LIBRARY, too. If the cache has only RUNTIME, nothing is compiled.
    if _is_cached(request, RUNTIME) and not _is_cached(request, REGISTRY):
        return [RUNTIME]
    return [REGISTRY]


def _is_cached(request: Request, source: str) -> bool:
    """Return True if the cache has the object of a source."""
    generation = store.find(request.unit(source))
    if generation:
        os.close(generation.fd)
    return generation is not None


class _NeedsRuntime(Exception):
    """Objects refer to a unit of RUNTIMES that was not linked. The message is the unit's path."""


class _Build:
    """One build in the private folder `staging`."""

    def __init__(
        self,
        request: Request,
        slot: str,
        staging: str,
        runtime: list[str],
        expected: set[str],
        alone: bool,
    ):
        """Copy objects from the cache, plan the commands, and read the expected inputs.

        `runtime` are the units of RUNTIMES that are linked, and `expected` the files that the
        compilers will probably read. The other arguments are those of build().
        """
        self._request = request
        self._slot = slot
        self._staging = staging
        self._alone = alone
        self._sources = [*runtime, *request.sources]
        self._cached: dict[str, closure.Closure] = {}  # {object from the cache: its closure}
        # {source to compile: whether it was compiled before and then edited}.
        self._uncached: dict[str, bool] = {}
        for source in self._sources:
            reasons: list[str] = []
            generation = store.find(request.unit(source), reasons)
            if generation:
                name = f"cached.{len(self._cached)}.o"
                _copy(generation, f"{staging}/{name}")
                self._cached[name] = generation.manifest.closure
            else:
                # A reason means that the cache has an object from before an edit.
                self._uncached[source] = bool(reasons)

        self._plan = self._make_plan()
        self._objects = [*self._cached, *self._plan.units.values()]
        self._quick_linker = toolchain.quick_linker(request)
        # The compiler command may be CXX='g++ @file'.
        command = shlex.join(request.compiler)
        self._command_files = expected_inputs.in_flags(request, command)
        self._flag_files = {
            kind: expected_inputs.in_flags(request, flags) | self._command_files
            for kind, flags in self._plan.flags.items()
        }
        self._before = recording.Before(staging, expected.union(*self._flag_files.values()))

    def _make_plan(self) -> Plan:
        sources = list(self._uncached)
        cached = list(self._cached)
        number = 1 if self._alone else jobs.number(self._request.environment)
        try:
            return Plan.of(self._request, self._staging, sources, cached, number)
        except errors.BuildError:
            raise
        except Exception as error:  # torch refuses a GPU architecture, for example
            what = f"cannot build {self._request.name}"
            raise diagnosis.explain(what, str(error), self._request) from None

    def run(self, ninja: str) -> tuple[str, closure.Closure]:
        """Build the library. Return its path and its closure."""
        plan = self._plan
        # store.find() checks precompiled headers here, after `_before` read the inputs. So every
        # change of a header after the check is noticed.
        preambles = precompiled.Preambles(self._request, self._staging, self._uncached)
        with contextlib.closing(preambles):
            plan.preambles = preambles.used
            failure = self._compile_and_link(ninja)

        recorder = self._recorder(self._request, plan.flags["cflags"])
        closures, changed = self._cache_objects(recorder)
        if failure:
            raise self._error(failure)
        if changed:
            raise changed
        preambles.start(
            self._request, self._slot, plan.flags["cflags"], plan.environment, plan.jobs
        )
        closures.append(self._closure_of_link(recorder))
        # Plan.write() gives the library the name of the private folder.
        library = f"{self._staging}/{os.path.basename(self._staging)}"
        return library, closure.merged([*self._cached.values(), *closures])

    def _recorder(self, request: Request, cflags: str) -> recording.Recorder:
        return recording.Recorder(request, toolchain.search(request, cflags), self._before)

    def _compile_and_link(self, ninja: str) -> str:
        """Run ninja, with the quick linker if there is one. Return its output if it fails."""
        reading = threading.Thread(
            target=recording.read_ahead, args=(self._request, self._cached.values()), daemon=True
        )
        reading.start()
        plan = self._plan
        ldflags = plan.flags["ldflags"]
        plan.flags["ldflags"] = f"{ldflags} {self._quick_linker}"
        failure = _run(ninja, plan, self._request, self._staging)
        # GNU ld links again in two cases: the quick linker failed (diagnosis.py knows the messages
        # of GNU ld), or the two linkers may make different libraries.
        if self._quick_linker and not self._is_final(failure):
            plan.flags["ldflags"] = ldflags
            failure = _run(ninja, plan, self._request, self._staging)
        reading.join()
        return failure

    def _is_final(self, failure: str) -> bool:
        """Return True if GNU ld would have the same result as the quick linker.

        This holds, too, if a compiler failed, so that an object is missing.
        """
        if failure:
            targets = self._plan.units.values()
            return not all(os.path.exists(f"{self._staging}/{target}") for target in targets)
        return dependency_files.is_plain_link(self._staging, self._objects)

    def _cache_objects(
        self, recorder: recording.Recorder
    ) -> tuple[list[closure.Closure], closure.Changed | None]:
        """Put every object that was compiled into the cache, even if others failed.

        Returns:
            The objects' closures, and a Changed if an input was saved meanwhile.
        """
        request = self._request
        plan = self._plan
        if not plan.units:
            return [], None
        log = closure.text_of(f"{self._staging}/.ninja_log")
        finished = set(re.findall(r"\t([^\t]+)\t\w+$", log, re.MULTILINE))

        flags = plan.flags["cflags"]
        tools = toolchain.tools(request, flags, "cc1plus", "as") | toolchain.cuda_tools(request)
        unrun = toolchain.unrun(request, flags, "cc1plus", "as")
        others = tools | self._flag_files["cflags"] | self._flag_files["cuda_cflags"]

        closures: list[closure.Closure] = []
        changed = None
        for source, target in plan.units.items():
            if target not in finished:
                continue
            unit = request.unit(source)
            read, is_complete = dependency_files.of_unit(request, self._staging, source, target)
            try:
                if source in RUNTIMES:  # whose own flags name no files
                    of_runtime = self._recorder(unit, plan.runtime_cflags)
                    others_of_runtime = tools | self._command_files
                    inputs = of_runtime.closure(read, others_of_runtime, is_complete, unrun)
                else:
                    inputs = recorder.closure(read, others, is_complete, unrun)
            except closure.Changed as error:
                changed = error
                continue
            closures.append(inputs)
            unit_slot = store.slot_path(os.path.dirname(self._slot), unit)
            store.publish(unit_slot, self._staging, f"{self._staging}/{target}", unit, inputs)
        return closures, changed

    def _closure_of_link(self, recorder: recording.Recorder) -> closure.Closure:
        request = self._request
        flags = self._plan.flags["ldflags"]
        linker = toolchain.linker(flags)
        linked = dependency_files.of_link(request, self._staging, self._objects)
        linked |= self._flag_files["ldflags"] | toolchain.tools(request, flags, linker)
        unused = toolchain.unlinked(request, flags, linked)
        unused += toolchain.unrun(request, flags, "collect2", linker)
        return recorder.closure(set(), linked, unused=unused)

    def _error(self, output: str) -> Exception:
        """Return the exception for a failed build. Write its output to a log."""
        undefined = "\n".join(re.findall(r"undefined (?:reference|symbol).*", output))
        if "calcops::" in undefined and RUNTIME not in self._sources:
            return _NeedsRuntime(RUNTIME)
        if "calcops_jit::" in undefined and not set(RUNTIMES).intersection(self._sources):
            return _NeedsRuntime(REGISTRY)
        problem = diagnosis.judge(output, self._request)
        if problem and problem.cause.startswith(diagnosis.KILLED) and not self._alone:
            return OutOfMemory()
        log = f"{self._slot}/failed.log"
        with contextlib.suppress(OSError), open(log, "w", encoding="utf-8") as file:
            file.write(output)
        what = f"cannot build {self._request.name}"
        return diagnosis.explain(what, output, self._request, log)


def _run(ninja: str, plan: Plan, request: Request, staging: str) -> str:
    """Run ninja. Return the output of ninja and the compilers if they fail, else ""."""
    plan.write(request, staging)
    command = ["/bin/sh", "-c", _SUPERVISED, "sh", ninja, "-v", "-j", str(plan.jobs)]
    output = []
    with subprocess.Popen(
        command,
        cwd=staging,
        env=plan.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        process_group=0,  # Ctrl-C interrupts only this process, which then kills ninja
    ) as process:
        try:
            for line in process.stdout:
                output.append(line)
                if request.verbose:
                    # A closed stream must not fail a build.
                    with contextlib.suppress(OSError, ValueError):
                        print(line, end="", flush=True)
        except BaseException:
            process.kill()  # the compilers are ended with the private folder
            raise
    if process.returncode == 0:
        return ""
    return "".join(output) or f"ninja ended with {process.returncode}"


def _copy(generation: store.Generation, path: str) -> None:
    """Copy an object from the cache to `path`, and close it."""
    with open(generation.fd, "rb") as source, open(path, "wb") as target:
        source.seek(0)
        shutil.copyfileobj(source, target)


def progress(staging: str, seconds: float) -> tuple[str, float]:
    """Return (a line of progress, the finished fraction) of the build in the folder `staging`."""
    plan = closure.text_of(f"{staging}/build.ninja")
    targets = re.findall(r"^build (\S+):", plan, re.MULTILINE)
    log = closure.text_of(f"{staging}/.ninja_log")
    built = re.findall(r"^\d+\t\d+\t\d+\t(.+)\t", log, re.MULTILINE)
    waiting = [target for target in targets if target not in built]
    name = ""
    if len(waiting) > 1:
        name = waiting[0].removesuffix(".o") + " "
    elif waiting:
        name = "linking "  # the library is the last target
    if not targets:  # build.ninja is not written yet
        return f"[0/?] {seconds:.0f} s", 0.0
    done = len(targets) - len(waiting)
    return f"[{done}/{len(targets)}] {name}{seconds:.0f} s", done / len(targets)


def find_ninja() -> str | None:
    """Return the path of ninja: on PATH, in the folder of this Python, or in its wheel."""
    folders = [sysconfig.get_path("scripts"), os.path.dirname(sys.executable)]
    with contextlib.suppress(ImportError):
        from ninja import BIN_DIR

        folders.append(BIN_DIR)
    return shutil.which("ninja") or shutil.which("ninja", path=os.pathsep.join(folders))
