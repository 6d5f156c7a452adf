"""`python -m calcops_jit export`: a folder with the built operators for C++ programs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from .. import __version__, requests
from ..cache import store
from ..live import library

_TEXTS = {  # {file in the folder: template in this package}
    "include/calcops.h": "../include/calcops.h",
    "lib/pkgconfig/calcops.pc": "templates/calcops.pc",
    "lib/cmake/calcops/calcops-config.cmake": "templates/calcops-config.cmake",
}


def write(folder: str, isa: str) -> None:
    """Build the operators for `isa`, an argument of request.processor_flag(), and write the folder.

    BuildError: the library cannot be built, or cannot be loaded here.
    """
    request = requests.own(isa=isa)
    built = library.obtain(request)
    release = torch.__version__.partition("+")[0]
    needs_cpp20 = tuple(map(int, release.split(".")[:2])) >= (2, 13)
    libraries = "-ltorch_cpu -lc10"
    if request.cuda.build:
        libraries = f"-ltorch_cuda {libraries}"
    words = {
        "version": __version__,
        "release": release,
        "torch": os.path.dirname(torch.__file__),
        "standard": "20" if needs_cpp20 else "17",
        "libraries": libraries,
    }
    files = {"lib/libcalcops.so": Path(built.path).read_bytes()}
    for target, template in _TEXTS.items():
        text = (Path(__file__).parent / template).read_text()
        files[target] = re.sub("@(\\w+)@", lambda match: words[match[1]], text).encode()
    for name, content in files.items():
        os.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
        store.write_whole(f"{folder}/{name}", content)
