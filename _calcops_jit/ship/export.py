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
    """Write the folder, after a build for `isa`, which request.processor_flag() takes.

    Raises BuildError if there is no such build, or if its library cannot be loaded here.
    """
    request = requests.own(isa=isa)
    built = library.obtain(request)
    release = torch.__version__.partition("+")[0]
    is_new = tuple(map(int, release.split(".")[:2])) >= (2, 13)
    words = {
        "version": __version__,
        "release": release,
        "torch": os.path.dirname(torch.__file__),
        "standard": "20" if is_new else "17",
        "libraries": "-ltorch_cuda -ltorch_cpu -lc10"
        if request.cuda.build
        else "-ltorch_cpu -lc10",
    }
    files = {"lib/libcalcops.so": Path(built.path).read_bytes()}
    for target, template in _TEXTS.items():
        text = (Path(__file__).parent / template).read_text()
        files[target] = re.sub("@(\\w+)@", lambda match: words[match[1]], text).encode()
    for name, content in files.items():
        os.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
        store.write_whole(f"{folder}/{name}", content)
