"""The examples as a whole: READMEs of one form, a table of all, unique names of modules, CUDA."""

import collections
import re
import sys
from pathlib import Path

import pytest
from programs import ROOT, run

from _calcops_jit import cuda

EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir() and any(path.glob("*.py")))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_readme_begins_with_its_subject_then_build_run_and_expected_output(folder):
    lines = (folder / "README.md").read_text().splitlines()
    assert lines[0].startswith("# ")
    assert lines[1] == ""
    assert lines[2][:1].isalnum() or lines[2].startswith("`")
    places = []
    for words in ("Build", "Run|Build and run", "Expected output"):
        numbers = [n for n, line in enumerate(lines) if re.match(rf"\*\*({words})", line)]
        assert numbers, f"no line begins with **{words}"
        places.append(numbers[0])
    assert places == sorted(places)
    assert places[0] <= 10


def test_every_example_is_in_the_table_and_module_names_are_unique():
    table = (EXAMPLES / "README.md").read_text()
    for path in [*FOLDERS, *EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]:
        assert f"({path.name}" in table, path
    fixed = {"setup", "__init__", "__main__"}  # names that setuptools and Python prescribe
    names = collections.Counter(path.stem for path in EXAMPLES.rglob("*.py"))
    for name in fixed:
        names.pop(name, None)
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.long
@pytest.mark.skipif(not cuda.find_toolkit()[0], reason="no nvcc for this PyTorch")
@pytest.mark.parametrize(
    "source, words",
    {
        "identity_conv/identity_conv.cu": "sm_90",
        # This library has no kernels. It calls ATen's, which need libc10_cuda.so.
        "mindspore_aot/leaky_relu.cu": "LeakyRelu LeakyReluGrad libc10_cuda.so",
    }.items(),
)
def test_a_cuda_source_builds_without_a_gpu(source, words):
    program = (
        f"import calcops_jit; print(calcops_jit.load('example', ['{EXAMPLES / source}']).path)"
    )
    # CALCOPS_BUILD: do not compile the project's operators for 9.0.
    variables = {"CALCOPS_CUDA": "0", "TORCH_CUDA_ARCH_LIST": "9.0", "CALCOPS_BUILD": "0"}
    library = run(sys.executable, "-c", program, **variables).stdout.strip()
    assert all(word.encode() in Path(library).read_bytes() for word in words.split())
