"""One build: torch.utils.cpp_extension.load in a folder that stays, in a child process.

ninja compiles only what was edited. It compares times, which is not enough: a header can change and
have an older time. So the objects of files whose contents changed are removed before ninja runs. If
anything else changed, such as the compiler or a header that appeared, the folder is emptied.

    <entry>/build.<machine>.<digest of the sources' folder>/
        .unfinished          exists while a build runs; it outlives a killed one
        .objects             from which contents the objects were compiled
        c++                  the compiler's command, a script
        build.ninja, *.o     of torch and ninja
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil

import torch

from . import cache
from .cache import Build
from .child import Child, Ended, end_with_compilers
from .compile import (
    LINKER_DEPENDENCIES,
    compile_and_link,
    dependencies,
    files_of,
    foresee,
    jobs,
    linked,
    targets,
)
from .inputs import Changed, Inputs, digest, inputs_of, paths_in_flags, place_of, state_of
from .messages import Progress, explain, report, say, warnings_of
from .registration import described
from .request import SHADOW, Request, runtime

_KEPT = 4  # folders of builds in an entry


def built(request: Request, reasons: list[str]) -> Build:
    """Build a library, once for all processes.

    `reasons` say why the last build does not fit; the first is shown while the compilers run.
    BuildError: it cannot be built or loaded.
    """
    try:
        with cache.locked_entry(request) as entry:
            # Another process may have built it meanwhile.
            return cache.find(request, reasons) or _built_in(entry, request, reasons)
    except OSError as error:
        raise explain(f"cannot build {request.name}", str(error)) from None


def _built_in(entry: str, request: Request, reasons: list[str]) -> Build:
    """Build a library in a locked entry, load it in a child, and publish it."""
    for cause, evidence, fix in foresee(request):
        raise report(f"cannot build {request.name}: {cause}", [evidence], fix)
    choice = request.cuda
    if choice.gpus and not choice.build:
        reason = f"{choice.reason}: {choice.fix}"
        say(f"{choice.gpus[0]} is here, but {reason}; building for the CPU")
    occasion = reasons[0].rpartition("/")[2] if reasons else "first time only"
    title = f"building {request.name} ({occasion})"
    folder = _folder(request, entry)
    log = _log(folder)
    with (
        Child(lambda: _build(request, entry), log) as child,
        Progress(title, lambda: progress(folder)) as shown,
    ):
        try:
            product, inputs = child.result(shown.update)
        except Ended as end:
            what = f"cannot build {request.name}: the building process {end}"
            raise report(what, [], f"less {log}", log) from None
        finally:
            if request.verbose:
                with open(log, errors="replace") as file:
                    print(file.read(), end="", flush=True)
        warnings = [] if request.is_own else warnings_of(log)
        registered = _registered(request, product, inputs, log)
        build = cache.publish(entry, product, request, inputs, registered)
        shown.outcome = f"built {request.name} in {shown.seconds():.1f} s"
    for line in warnings:
        say(line.replace(request.sources[0], "cell") if request.is_cell else line)
    cache.remove(log)
    return build


def _registered(request: Request, product: str, inputs: Inputs, log: str) -> dict:
    """Load a library in a child process. Return what it registers, for its manifest."""
    if product.endswith(".a"):
        return {}

    def load() -> dict:
        return described(request, product, inputs)

    def load_in_child() -> dict:
        torch.set_num_threads(1)  # the parent's OpenMP threads do not exist in a child
        return load()

    if torch.cuda.is_initialized():  # a child cannot use its parent's CUDA
        return load()
    with Child(load_in_child, log) as child:
        try:
            return child.result()
        except Ended as end:
            with open(log, encoding="utf-8", errors="replace") as file:
                lines = file.read().partition("\nException raised from")[0].splitlines()[-8:]
            what = f"cannot load {request.name}: a static initialiser {end}"
            fix = "do what may fail in a function that is called later"
            unknown = report(what, lines, fix)
            raise explain(f"cannot load {request.name}", "\n".join(lines), "", unknown) from None


def progress(folder: str) -> str:
    """Return a line of progress of the build in a folder."""
    names: list[str] = []
    awaited = ""
    with contextlib.suppress(OSError):  # the child may remove a file
        names = targets(folder)
        if os.path.isfile(f"{folder}/.unfinished"):  # a FIFO would block
            with open(f"{folder}/.unfinished") as file:
                awaited = file.read()
    if not names:  # build.ninja is not written yet
        return f"[0/?] {awaited}".rstrip()
    waiting = [name for name in names if not os.path.exists(f"{folder}/{name}")]
    name = waiting[0].removesuffix(".o") if len(waiting) > 1 else awaited or "linking"
    return f"[{len(names) - len(waiting)}/{len(names)}] {name}"


# ---- in the child --------------------------------------------------------------------------------


def _build(request: Request, entry: str) -> tuple[str, Inputs]:
    """Compile what changed, and link. Return (path of what was built, inputs)."""
    end_with_compilers()
    try:
        folder = _fresh(_folder(request, entry))
        for _ in range(3):
            # Another thread may have changed variables while this build waited for a lock. Each
            # round begins with the variables in the request's facts.
            os.environ.clear()
            os.environ.update(request.environment)
            is_runtime = request.product.endswith(".a")
            linked_with = None if is_runtime else _runtime(request, folder)
            archives = [f"{folder}/{os.path.basename(linked_with.path)}"] if linked_with else []
            product, inputs = _compile(request, folder, archives)
            try:
                inputs.check(request)  # no file was saved meanwhile
                inputs.place = place_of(product, inputs, request)
                if linked_with:
                    inputs = inputs.merged(linked_with.inputs)
                return product, inputs
            except Changed as change:
                evidence = str(change)
    except OSError as error:
        raise explain(f"cannot build {request.name}", str(error)) from None
    what = f"cannot build {request.name}: its sources changed again and again meanwhile"
    fix = "wait until nothing writes to them, and use letters and digits in their paths"
    raise report(what, [evidence], fix)


def _folder(request: Request, entry: str) -> str:
    """Return the folder of builds.

    Each checkout has its own, so that a switch compiles little. Each machine has its own, because
    it may not see another machine's lock on a network file system. All containers of a machine have
    the same boot id.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        machine = digest(file.read().encode())[:8]
    return f"{entry}/build.{machine}.{digest(os.fsencode(request.root))[:8]}"


def _log(folder: str) -> str:
    """Return the path of the compilers' output in the last build that failed."""
    return f"{os.path.dirname(folder)}/failed.{folder.rpartition('/build.')[2]}.log"


def _fresh(folder: str) -> str:
    """Make a folder of builds. If a build was killed in it, it is a new one.

    Compilers of the killed build may still run. They write to the old folder, which has another
    name then, and hurt nobody.
    """
    with contextlib.suppress(FileNotFoundError):
        names = set(os.listdir(folder)) if os.path.isdir(folder) else {".unfinished"}
        if ".unfinished" in names or not all(os.path.isfile(f"{folder}/{n}") for n in names):
            os.rename(folder, f"{folder}.killed.{os.urandom(4).hex()}")
    machine = folder.rpartition(".")[0]
    others = glob.glob(f"{glob.escape(os.path.dirname(folder))}/build.*")
    others.sort(key=cache.last_use, reverse=True)
    os.makedirs(folder, exist_ok=True)
    os.utime(folder)
    for i, other in enumerate(path for path in others if path != folder):
        is_mine = other.startswith(f"{machine}.")
        # Another machine may build in its folder.
        is_needed = i < _KEPT - 1 or (not is_mine and os.path.exists(f"{other}/.unfinished"))
        if ".killed." in other or not is_needed:
            cache.remove(other)
            cache.remove(_log(other))
    return folder


def _runtime(request: Request, folder: str) -> Build:
    """Return the runtime. If it must be compiled, so are the sources meanwhile.

    A thread would not do. It would fork while this one holds a lock, and nobody would release the
    lock in the child.
    """
    if jobs(request) == 1 or cache.find(runtime()):
        return _copied_runtime(folder)
    with Child(lambda: _copied_runtime(folder), os.devnull) as child:
        _compile(request, folder, [])
        _mark(folder, "runtime")
        return child.result()


def _copied_runtime(folder: str) -> Build:
    """Return the runtime, and copy it to a folder, because `clean` may remove it."""
    build = built(runtime(), [])
    shutil.copyfile(build.path, f"{folder}/{os.path.basename(build.path)}")
    return build


def _compile(request: Request, folder: str, archives: list[str]) -> tuple[str, Inputs]:
    """Run torch and ninja, and link with the runtime. Return (path of what was built, inputs)."""
    before, objects = _up_to_date(request, folder)
    for path in {*request.sources, *paths_in_flags(request)}:
        before[path] = state_of(path)
    _mark(folder)
    failure = ""
    try:
        product = compile_and_link(request, folder, archives)
    except Exception as error:  # torch refuses a GPU architecture, for example
        failure = str(error)
    for target, files in dependencies(folder).items():
        # Also of an object with the same bytes: its headers may have been read in other places.
        objects[target] = [state_of(f"{folder}/{target}"), files]
    objects[LINKER_DEPENDENCIES] = ["", [f"{SHADOW}/hidden.map", *linked(folder)]]
    read = set().union(*(files for _, files in objects.values()))
    # The runtime has inputs of its own, which merged() adds.
    read = {path for path in read if not path.startswith(f"{folder}/")}
    inputs = inputs_of(request, read, before, os.stat(f"{folder}/.unfinished").st_ctime_ns)
    # After a failure, too, because some sources may have been compiled.
    fields = {"facts": request.facts, "inputs": vars(inputs), "objects": objects}
    cache.write_checked(f"{folder}/.objects", fields)
    cache.remove(f"{folder}/.unfinished")
    if failure:
        log = _log(folder)
        with open(log, encoding="utf-8", errors="replace") as file:
            output = file.read()
        raise explain(f"cannot build {request.name}", f"{output}\n{failure}", log)
    return product, inputs


def _up_to_date(request: Request, folder: str) -> tuple[dict[str, str], dict[str, list]]:
    """Remove the objects whose inputs have other contents than when they were compiled.

    Return ({file: its state} of the other inputs of the last build, {object: [its state, the files
    that were read for it]} of the objects that stay).
    """
    states: dict[str, str] = {}
    objects: dict[str, list] = {}
    changed: set[str] = set()
    with contextlib.suppress(*cache.UNFIT):
        fields = cache.read_checked(f"{folder}/.objects")
        last = Inputs(**fields["inputs"])
        last.check_others(request)
        changed.update(last.changed_files(request))
        read = set().union(*(files for _, files in fields["objects"].values()))
        # Otherwise any object may be outdated: a response file has changed, or a header that
        # __has_include tests is gone.
        if changed <= read and all(map(os.path.isfile, changed)):
            states = {request.unfold(path): state for path, state in last.files.items()}
            states |= {path: state_of(path) for path in changed}
            objects = fields["objects"]
    for path in files_of(folder, ".o"):
        target = os.path.basename(path)
        state, files = objects.get(target, ("", []))
        if state != state_of(path) or changed.intersection(files):
            os.unlink(path)
            objects.pop(target, None)
    # torch reads build.ninja, which may be damaged. A product is there if it could not be loaded.
    # (library.cpp has library.o and library.d.)
    products = glob.glob(f"{glob.escape(folder)}/library.{'[0-9a-f]' * 8}")
    for path in [f"{folder}/build.ninja", *products]:
        cache.remove(path)
    return states, objects


def _mark(folder: str, awaited: str = "") -> None:
    """Write the file that exists while a build runs. It has what is waited for, if not ninja."""
    with open(f"{folder}/.unfinished", "w") as file:
        file.write(awaited)
