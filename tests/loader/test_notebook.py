"""The magic %%operator in running notebooks, and the example notebook, executed again."""

import base64
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import calcops_jit

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "edit_and_run.ipynb"
CELL = """%%operator mine
#include <ATen/core/Tensor.h>
#include <torch/library.h>

at::Tensor scaled(const at::Tensor& x) { return x.mul(2); }

TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) { m.def("scaled(Tensor x) -> Tensor", &scaled); }
"""


class Kernel:
    """A running notebook."""

    def __init__(self, folder: Path, **environment):
        self.folder = folder
        self.notebook = nbformat.v4.new_notebook()
        self.client = nbclient.NotebookClient(
            self.notebook,
            timeout=900,
            allow_errors=True,
            kernel_name="python3",
            on_cell_executed=self._executed,
        )
        variables = {k: v for k, v in os.environ.items() if not k.startswith("CALCOPS_")}
        self.environment = variables | {"PYTHONPATH": str(ROOT), "CALCOPS_BUILD": "0"} | environment

    def __enter__(self):
        self.context = self.client.setup_kernel(env=self.environment, cwd=str(self.folder))
        self.context.__enter__()
        return self

    def __exit__(self, *exception):
        return self.context.__exit__(*exception)

    def _executed(self, execute_reply, **_):
        self.payload = execute_reply["content"]["payload"]

    def run(self, source: str) -> SimpleNamespace:
        """Execute a cell. Return what it prints and displays, and its error as the user sees it."""
        cell = nbformat.v4.new_code_cell(source)
        self.notebook.cells.append(cell)
        self.client.execute_cell(cell, len(self.notebook.cells) - 1)

        def outputs(kind):
            return [output for output in cell.outputs if output.output_type == kind]

        return SimpleNamespace(
            out="".join(o.text for o in outputs("stream") if o.name == "stdout"),
            err="".join(o.text for o in outputs("stream") if o.name == "stderr"),
            displayed=[output.data for output in outputs("display_data")],
            error="\n".join("\n".join(o.traceback) for o in outputs("error")),
            outputs=cell.outputs,
        )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cells")


@pytest.fixture(scope="module")
def kernel(cache):
    """Yield a running notebook in which CELL was run."""
    with Kernel(cache, CALCOPS_CACHE=str(cache / "cache")) as kernel:
        kernel.first = kernel.run("%load_ext calcops_jit\nimport torch, calcops_jit")
        kernel.cell = kernel.run(CELL)
        yield kernel


def test_a_cell_defines_its_operators_and_writes_nothing_beside_the_notebook(kernel, cache):
    assert kernel.first.outputs == []
    assert kernel.cell.out == "mine::scaled(Tensor x) -> Tensor\n", kernel.cell
    result = kernel.run(
        "handle = scaled; print(scaled is torch.ops.mine.scaled, scaled(torch.ones(2)))"
    )
    assert result.out == "True tensor([2., 2.])\n"
    assert [path.name for path in cache.iterdir()] == ["cache"]


def test_the_progress_of_a_cell_is_one_output_that_ends_as_one_line(kernel):
    assert len(kernel.cell.displayed) == 1
    assert kernel.cell.err == ""
    assert list(kernel.cell.displayed[0]) == ["text/plain"]
    assert re.fullmatch(r"built mine in [\d.]+ s", kernel.cell.displayed[0]["text/plain"])


def test_the_help_of_the_magic_shows_its_options(kernel):
    kernel.run("%%operator?")
    (payload,) = kernel.payload
    usage = "%operator [--cuda] [--cflags CFLAGS] [--ldflags LDFLAGS] [--verbose]"
    for words in (usage, "\n  name ", "Build the cell as calcops_jit.load"):
        assert words in payload["data"]["text/plain"]


def test_a_compile_error_names_the_line_of_the_cell_and_keeps_the_loaded_kernel(kernel, cache):
    wrong = CELL.replace("x.mul(2)", "y.mul(2)")
    error = kernel.run(wrong).error
    log = re.search(r"  log: (.*)$", error)
    assert Path(log[1]).is_relative_to(cache)
    caret = " " * len("at::Tensor scaled(const at::Tensor& x) { return ") + "^"
    assert error == (
        "BuildError: cannot build mine: error at cell:4:49\n"
        "  cell:4:49: error: ‘y’ was not declared in this scope\n"
        "      4 | at::Tensor scaled(const at::Tensor& x) { return y.mul(2); }\n"
        f"        | {caret}\n"
        "  fix: correct cell:4:49\n"
        f"  log: {log[1]}"
    )
    # reload() compares with the loaded library and not with the cell that failed.
    assert (
        kernel.run("print(handle(torch.ones(1)), calcops_jit.reload())").out == "tensor([2.]) []\n"
    )


def test_another_schema_is_refused_with_the_difference(kernel):
    error = kernel.run(CELL.replace("(Tensor x)", "(Tensor x, *, int times=1)")).error
    assert error == (
        "BuildError: cannot reload mine: a signature changed, so nothing was exchanged\n"
        "  mine::scaled\n"
        "    + *\n"
        "    + int times=1\n"
        "  fix: restart Python, or give the operator another name"
    )
    result = kernel.run("print(scaled(torch.ones(1)), calcops_jit.reload())")
    assert result.out == "tensor([2.]) []\n"


def test_the_error_of_a_wrong_magic_line_says_what_is_expected(kernel):
    assert "the following arguments are required: name" in kernel.run("%%operator\nint").err
    assert "unrecognized arguments: --fast" in kernel.run("%%operator mine --fast\nint").err
    assert "expected `name` of letters, digits and _ . -" in kernel.run("%%operator a/b\nint").error


def test_an_edited_cell_reaches_every_handle_and_no_other_notebook(kernel, cache):
    with Kernel(cache, CALCOPS_CACHE=str(cache / "cache")) as other:
        other.run("%load_ext calcops_jit\nimport torch, calcops_jit")
        warm = other.run(CELL)
        assert warm.out == "mine::scaled(Tensor x) -> Tensor\n"
        assert (warm.err, warm.displayed) == ("", [])

        edited = kernel.run(CELL.replace("mul(2)", "mul(3)"))
        assert edited.error == ""
        assert "built mine" in edited.displayed[0]["text/plain"]
        result = kernel.run("print(handle(torch.ones(1)), handle is scaled)")
        assert result.out == "tensor([3.]) True\n"
        result = other.run("print(calcops_jit.reload(), scaled(torch.ones(1)))")
        assert result.out == "[] tensor([2.])\n"

        back = kernel.run(CELL)
        assert (back.out, back.displayed) == ("mine::scaled(Tensor x) -> Tensor\n", [])
        assert kernel.run("print(handle(torch.ones(1)))").out == "tensor([2.])\n"


def test_a_header_beside_the_notebook_is_found_and_a_missing_one_names_cflags(kernel):
    kernel.run("open('beside.h', 'w').write('#define FACTOR 2\\n')")
    cell = CELL.replace("%%operator mine\n", '%%operator mine\n#include "beside.h"\n')
    cell = cell.replace("mul(2)", "mul(FACTOR)")
    assert kernel.run(cell).error == ""
    assert kernel.run("print(scaled(torch.ones(1)))").out == "tensor([2.])\n"
    kernel.run("open('beside.h', 'w').write('#define FACTOR 5\\n'); calcops_jit.reload()")
    assert kernel.run("print(scaled(torch.ones(1)))").out == "tensor([5.])\n"
    cell = CELL.replace("%%operator mine\n", '%%operator mine\n#include "nowhere.h"\n')
    error = kernel.run(cell).error
    assert "belongs in --cflags=-I..." in error
    assert "extra_include_paths" not in error


def test_options_of_the_magic_become_options_of_load(monkeypatch):
    from _calcops_jit.live import notebook

    calls = []
    variables = []

    def foreign(*arguments, **options):
        calls.append((arguments, options))

    library = SimpleNamespace(operators={})
    monkeypatch.setattr(notebook.requests, "foreign", foreign)
    monkeypatch.setattr(notebook.library, "obtain", lambda request: library)
    monkeypatch.setattr(notebook, "get_ipython", lambda: SimpleNamespace(push=variables.append))
    notebook.operator("one --cflags='-O2 -DA=\"b c\"' --ldflags=-lm --verbose", "int a;\n")
    notebook.operator("two --cuda --cflags=-lineinfo", "int b;\n")

    (name, source), options = calls[0]
    assert name == "one"
    assert source.endswith("/cell.cpp")
    assert Path(source).read_text() == "int a;\n"
    assert options == {
        "extra_cflags": ["-iquote", os.getcwd(), "-O2", "-DA=b c"],
        "extra_ldflags": ["-lm"],
        "verbose": True,
    }

    (name, source), options = calls[1]
    assert name == "two"
    assert source.endswith("/cell.cu")
    assert Path(source).read_text() == "int b;\n"
    assert options == {
        "extra_cuda_cflags": [f"-I{os.getcwd()}", "-lineinfo"],
        "extra_ldflags": [],
        "verbose": False,
    }
    assert variables == [{}, {}]


def test_the_next_notebook_removes_the_cells_of_a_killed_one(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "CALCOPS_BUILD": "0",
        "TMPDIR": str(tmp_path),
    }
    # os._exit ends Python without cleaning up, as a kill does.
    for end, folders in (("os._exit(0)", 1), ("os._exit(0)", 1), ("", 0)):
        script = f"import os\nfrom _calcops_jit.live import notebook\n{end}"
        subprocess.run([sys.executable, "-c", script], env=environment, check=True)
        assert len(list(tmp_path.glob("calcops-cells-*"))) == folders


# ---- the example ---------------------------------------------------------------------------------


def texts(cell) -> list[str]:
    """Return the texts that are the same at each execution: no times, and no pictures."""
    if "timing" in cell.metadata.get("tags", []):
        return []
    streams = [output for output in cell.outputs if output.output_type == "stream"]
    results = [output for output in cell.outputs if output.output_type == "execute_result"]
    printed = [output.text for output in streams if output.name == "stdout"]
    return printed + [output.data["text/plain"] for output in results]


def pictures(cell):
    """Return the pictures of a cell as arrays with three colours."""
    from matplotlib import image

    data = [o.data["image/png"] for o in cell.outputs if "image/png" in o.get("data", {})]
    return [image.imread(io.BytesIO(base64.b64decode(png)))[..., :3] for png in data]


def test_the_example_notebook_gives_its_committed_outputs(tmp_path):
    pytest.importorskip("matplotlib")
    committed = nbformat.read(EXAMPLE, as_version=4)
    executed = nbformat.read(EXAMPLE, as_version=4)
    for cell in executed.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    # The cells are compiled again. CalcOps' own operators come from the cache of this process.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CALCOPS_CACHE": str(tmp_path / "cache")}
    environment["CALCOPS_CACHE_READONLY"] = str(Path(calcops_jit.library_path()).parents[2])
    client = nbclient.NotebookClient(executed, timeout=900, kernel_name="python3")
    with client.setup_kernel(env=environment, cwd=str(tmp_path)):
        for i, cell in enumerate(executed.cells):
            client.execute_cell(cell, i)
    for before, after in zip(committed.cells, executed.cells):
        if before.cell_type == "code":
            assert texts(after) == texts(before)
            assert len(pictures(after)) == len(pictures(before))
            for old, new in zip(pictures(before), pictures(after)):
                assert old.shape == new.shape
                assert abs(old - new).mean() < 0.02
                assert new.std() > 0.1
