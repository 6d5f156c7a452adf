"""What a build read, as the build tools themselves report it, and the closure which that makes."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import time

from . import inputs

_HAS_INCLUDE = rb"__has_include(?:_next)?\s*\(\s*[<\"]([^>\"\n]+)[>\"]"


class Reads:
    """Of a build in `staging`, finished or not.

    units: {object: files that its compiler read}, in the order of the sources; libraries: files that were linked;
    search: folders in which headers are looked for, in order; tools: the files that are the toolchain."""

    def __init__(self, request: inputs.Request, staging: str, ninja: str):
        self._request, self._staging = request, staging
        plan = inputs.text_of(f"{staging}/build.ninja")  # nothing, if torch gave up before it wrote one
        deps = _output([ninja, "-t", "deps"], staging)
        read = dict(re.findall(r"^(\S+): #deps.*\n((?:    .+\n)*)", deps, re.MULTILINE))
        targets = re.findall(r"^build (\S+): (?:cuda_)?compile ", plan, re.MULTILINE)
        self.units = {target: self._foreign(map(str.strip, read.get(target, "").splitlines())) for target in targets}
        self.libraries = self._linked()
        cflags = re.search(r"^cflags = (.*)$", plan, re.MULTILINE)
        self.search = self._searched(cflags[1].replace("$$", "$") if cflags else "")
        self.tools = self._toolchain()

    def _foreign(self, paths) -> set[str]:
        """Without what the build itself made in its staging folder."""
        outside = (p for p in paths if os.path.isabs(p) and not p.startswith(self._staging))
        return {inputs.real_path(p) if "/.." in p else p for p in outside if os.path.isfile(p)}

    def _linked(self) -> set[str]:
        loaded = re.findall(r"^LOAD (/.+)$", inputs.text_of(f"{self._staging}/link.map"), re.MULTILINE)
        torch_folder = self._request.unfold("@torch")
        # torch's own libraries are named by its version; they are too large to read.
        return self._foreign(path for path in loaded if not os.path.realpath(path).startswith(torch_folder))

    def _searched(self, cflags: str) -> list[str]:
        said = ask_compiler(*shlex.split(cflags), "-E", "-v", "-x", "c++", os.devnull)
        listed = re.search(r"search starts here:\n(.*)End of search list", said, re.DOTALL)
        found = (line.strip() for line in listed[1].splitlines() if line.startswith(" ")) if listed else ()
        return [inputs.real_path(folder) if "/.." in folder else folder for folder in found]

    def _toolchain(self) -> set[str]:
        """What CXX names and, where that is a script or ccache, what it names and what really compiles."""
        tools = set(self._request.tools)
        for part in ("cc1plus", "as", "ld"):
            if found := shutil.which(ask_compiler(f"-print-prog-name={part}").strip()):
                tools.add(os.path.realpath(found))
        for script in list(tools):
            with open(script, "rb") as file:
                text = file.read(65536)
            if text.startswith(b"#!"):
                words = set(re.findall(r"[\w./+-]+", text.decode(errors="replace")))
                tools |= {os.path.realpath(found) for w in words if "/" in w and (found := shutil.which(w))}
        if self._request.cuda.build:
            home = os.path.realpath(self._request.cuda.home)
            parts = ("bin/cudafe++", "bin/ptxas", "bin/fatbinary", "bin/nvcc.profile", "nvvm/bin/cicc")
            tools |= {f"{home}/{part}" for part in parts if os.path.exists(f"{home}/{part}")}
            if host := shutil.which(os.environ.get("CC") or "c++"):
                tools.add(os.path.realpath(host))
        return tools


class Recorder:
    """Makes closures of what compilers read; what they have in common is looked at once.

    `search`: the folders in which they look for headers, in order."""

    def __init__(self, request: inputs.Request, search: list[str]):
        self._request, self._search, self._now = request, search, time.time_ns()
        self._listed: dict[str, set[str] | None] = {}

    def closure(self, paths: set[str]) -> inputs.Closure:
        request = self._request
        entries: dict[str, tuple[bytes, str]] = {}
        probed: set[str] = set()
        own: dict[str, None] = {}  # folders of the project's own files: a quoted include looks there first
        for path in sorted(paths):
            folded = request.fold(path)
            stamp = self._stamp(path)
            content, names = (_content if stamp != inputs.YOUNG else _content.__wrapped__)(path, stamp)
            entries[folded] = stamp, content
            probed |= names
            if folded.startswith("@root"):
                own[os.path.dirname(path)] = None
        order = list(dict.fromkeys([*own, *self._search]))
        for path in paths:
            probed.update(path[len(folder) + 1 :] for folder in order if path.startswith(folder + "/"))
        missing: dict[str, set[str]] = {}
        for name in probed:
            for folder in order:
                below = None if f"{folder}/{name}" in paths else self._first_missing(folder, name)
                if below is None:
                    break
                missing.setdefault(below[0], set()).add(below[1])
        absent = {
            request.fold(folder): [self._stamp(folder).hex(), "\n".join(sorted(names))]
            for folder, names in sorted(missing.items())
        }
        return inputs.Closure.of(entries, [request.fold(t) for t in request.tools], absent)

    def _stamp(self, path: str) -> bytes:
        return inputs.settled(inputs.stamp_of(path), self._now) or inputs.YOUNG

    def _first_missing(self, folder: str, name: str) -> tuple[str, str] | None:
        """(existing folder, name in it) that must appear before folder/name can; None: folder/name is there."""
        while self._names(folder) is None:
            folder, _, above = folder.rpartition("/")
            name = f"{above}/{name}"
        first, _, rest = name.partition("/")
        if first not in self._names(folder):
            return folder, first
        if rest and self._names(f"{folder}/{first}") is not None:
            return self._first_missing(f"{folder}/{first}", rest)
        return None

    def _names(self, folder: str) -> set[str] | None:
        """What is in a folder; None: it is none."""
        if folder not in self._listed:
            try:
                self._listed[folder] = {".", "..", *os.listdir(folder or "/")}
            except OSError:
                self._listed[folder] = None
        return self._listed[folder]


@functools.cache  # of use where a process reloads
def _content(path: str, stamp: bytes) -> tuple[str, set[str]]:
    """A file's digest and the names that it asks for with __has_include."""
    with open(path, "rb") as file:
        content = file.read()
    asks = re.findall(_HAS_INCLUDE, content) if b"\0" not in content else ()
    return inputs.digest(content), {name.decode(errors="replace") for name in asks}


def ask_compiler(*question: str) -> str:
    """What the compiler says of itself. In a process that reloads it is asked once, unless it was exchanged."""
    words = inputs.compiler_words()
    variables = tuple(os.environ.get(name) for name in (*inputs.COMPILER_VARIABLES, "PATH"))
    return _answer(inputs.stamp_of(shutil.which(words[0]) or ""), variables, *words, *question)


@functools.cache
def _answer(stamp: bytes, variables: tuple, *command: str) -> str:
    return _output(list(command))


def _output(command: list[str], folder: str = "/") -> str:
    environment = os.environ | {"LC_ALL": "C.UTF-8", "LD_PRELOAD": ""}  # a sanitizer's is for this process
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace")
    return done.stdout + done.stderr
