"""What a build read, as the build tools themselves report it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess

from . import inputs


class Reads:
    """Of a build in `staging`, finished or not.

    units: {object: files that its compiler read}, in the order of the sources; libraries: files that were linked;
    search: folders in which headers are looked for, in order; tools: the files that are the toolchain."""

    def __init__(self, request: inputs.Request, staging: str, ninja: str):
        self._request, self._staging = request, staging
        self._compiler = inputs.compiler_words()
        try:
            with open(f"{staging}/build.ninja") as file:
                plan = file.read()
        except FileNotFoundError:  # torch gave up before it wrote one
            plan = ""
        deps = _output([ninja, "-t", "deps"], staging)
        self.units = {}
        for target in re.findall(r"^build (\S+): (?:cuda_)?compile ", plan, re.MULTILINE):
            if block := re.search(rf"^{re.escape(target)}: #deps.*\n((?:    .+\n)*)", deps, re.MULTILINE):
                self.units[target] = self._foreign(line.strip() for line in block[1].splitlines())
            else:
                self.units[target] = set()
        self.libraries = self._linked()
        cflags = re.search(r"^cflags = (.*)$", plan, re.MULTILINE)
        self.search = self._searched(cflags[1].replace("$$", "$") if cflags else "")
        self.tools = self._toolchain()

    def _foreign(self, paths) -> set[str]:
        """Without what the build itself made in its staging folder."""
        outside = (p for p in paths if os.path.isabs(p) and not p.startswith(self._staging))
        return {inputs.real_path(p) if "/.." in p else p for p in outside if os.path.isfile(p)}

    def _linked(self) -> set[str]:
        loaded = []
        with contextlib.suppress(OSError), open(f"{self._staging}/link.map", errors="replace") as file:
            loaded = re.findall(r"^LOAD (/.+)$", file.read(), re.MULTILINE)
        torch_folder = self._request.unfold("@torch")
        # torch's own libraries are named by its version; they are too large to read.
        return self._foreign(path for path in loaded if not os.path.realpath(path).startswith(torch_folder))

    def _searched(self, cflags: str) -> list[str]:
        query = [*self._compiler, *shlex.split(cflags), "-E", "-v", "-x", "c++", os.devnull]
        listed = re.search(
            r"search starts here:\n(.*)End of search list", _output(query, self._staging), re.DOTALL
        )
        found = (line.strip() for line in listed[1].splitlines() if line.startswith(" ")) if listed else ()
        return [inputs.real_path(folder) if "/.." in folder else folder for folder in found]

    def _toolchain(self) -> set[str]:
        """What CXX names and, where that is a script or ccache, what it names and what really compiles."""
        tools = set(self._request.tools)
        for part in ("cc1plus", "as", "ld"):
            answer = _output([*self._compiler, f"-print-prog-name={part}"], self._staging)
            if found := shutil.which(answer.strip()):
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


def _output(command: list[str], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    return done.stdout + done.stderr
