"""%%operator in real kernels, as a notebook's user meets it, and the example notebook, executed
afresh."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

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
    """A notebook that is being worked in."""

    def __init__(self, folder: Path, **environment):
        self.folder, self.notebook = folder, nbformat.v4.new_notebook()
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
        """What a cell prints and displays, and its error as it is shown."""
        cell = nbformat.v4.new_code_cell(source)
        self.notebook.cells.append(cell)
        self.client.execute_cell(cell, len(self.notebook.cells) - 1)
        of = lambda kind: [output for output in cell.outputs if output.output_type == kind]  # noqa: E731
        return SimpleNamespace(
            out="".join(o.text for o in of("stream") if o.name == "stdout"),
            err="".join(o.text for o in of("stream") if o.name == "stderr"),
            displayed=[output.data for output in of("display_data")],
            error="\n".join("\n".join(o.traceback) for o in of("error")),
            outputs=cell.outputs,
        )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cells")


@pytest.fixture(scope="module")
def kernel(cache):
    """A notebook in which CELL was run."""
    with Kernel(cache, CALCOPS_CACHE=str(cache / "cache")) as kernel:
        kernel.first = kernel.run("%load_ext calcops_jit\nimport torch, calcops_jit")
        kernel.cell = kernel.run(CELL)
        yield kernel


def test_a_cell_becomes_handles_under_the_operators_names_and_the_notebooks_folder_stays_as_it_was(
    kernel, cache
):
    assert kernel.first.outputs == []
    assert kernel.cell.out == "mine::scaled(Tensor x) -> Tensor\n", kernel.cell
    assert kernel.run(
        "held = scaled; print(scaled is torch.ops.mine.scaled, scaled(torch.ones(2)))"
    ).out == ("True tensor([2., 2.])\n")
    assert [path.name for path in cache.iterdir()] == ["cache"]


def test_progress_is_one_output_that_ends_as_one_line(kernel):
    assert len(kernel.cell.displayed) == 1
    assert kernel.cell.err == ""
    assert list(kernel.cell.displayed[0]) == ["text/plain"]
    assert re.fullmatch(r"built mine in [\d.]+ s", kernel.cell.displayed[0]["text/plain"])


def test_help_shows_the_options(kernel):
    kernel.run("%%operator?")
    (payload,) = kernel.payload
    usage = "%operator [--cuda] [--cflags CFLAGS] [--ldflags LDFLAGS] [--verbose]"
    for words in (usage, "\n  name ", "Build the cell as calcops_jit.load"):
        assert words in payload["data"]["text/plain"]


def test_a_compile_error_points_at_the_cells_own_line_and_leaves_the_kernel_that_was_live(
    kernel, cache
):
    wrong = CELL.replace("x.mul(2)", "y.mul(2)")
    assert (
        wrong.splitlines()[1:][3] == "at::Tensor scaled(const at::Tensor& x) { return y.mul(2); }"
    )
    shown = kernel.run(wrong).error
    log = re.search(r"  log: (.*)$", shown)
    assert Path(log[1]).is_relative_to(cache)
    caret = " " * len("at::Tensor scaled(const at::Tensor& x) { return ") + "^"
    assert shown == (
        "BuildError: cannot build mine: error at cell:4:49\n"
        "  cell:4:49: error: ‘y’ was not declared in this scope\n"
        "      4 | at::Tensor scaled(const at::Tensor& x) { return y.mul(2); }\n"
        f"        | {caret}\n"
        "  fix: correct cell:4:49\n"
        f"  log: {log[1]}"
    )
    # The cell that failed is forgotten: what is live is what reload() looks at.
    assert kernel.run("print(held(torch.ones(1)), calcops_jit.reload())").out == "tensor([2.]) []\n"


def test_another_schema_is_refused_with_the_difference(kernel):
    shown = kernel.run(CELL.replace("(Tensor x)", "(Tensor x, *, int times=1)")).error
    assert shown == (
        "BuildError: cannot reload mine: a signature changed, so nothing was exchanged\n"
        "  mine::scaled\n"
        "    + *\n"
        "    + int times=1\n"
        "  fix: restart Python, or give the operator another name"
    )
    assert (
        kernel.run("print(scaled(torch.ones(1)), calcops_jit.reload())").out == "tensor([2.]) []\n"
    )


def test_a_wrong_magic_line_says_what_is_expected(kernel):
    assert "the following arguments are required: name" in kernel.run("%%operator\nint").err
    assert "unrecognized arguments: --fast" in kernel.run("%%operator mine --fast\nint").err
    assert "expected `name` of letters, digits and _ . -" in kernel.run("%%operator a/b\nint").error


def test_an_edited_cell_is_called_through_every_handle_and_another_notebook_is_warm_and_undisturbed(
    kernel, cache
):
    with Kernel(cache, CALCOPS_CACHE=str(cache / "cache")) as other:
        other.run("%load_ext calcops_jit\nimport torch, calcops_jit")
        warm = other.run(CELL)
        assert (warm.out, warm.err, warm.displayed) == (
            "mine::scaled(Tensor x) -> Tensor\n",
            "",
            [],
        )
        edited = kernel.run(CELL.replace("mul(2)", "mul(3)"))
        assert edited.error == ""
        assert "built mine" in edited.displayed[0]["text/plain"]
        assert kernel.run("print(held(torch.ones(1)), held is scaled)").out == "tensor([3.]) True\n"
        assert (
            other.run("print(calcops_jit.reload(), scaled(torch.ones(1)))").out
            == "[] tensor([2.])\n"
        )
        back = kernel.run(CELL)
        assert (back.out, back.displayed) == ("mine::scaled(Tensor x) -> Tensor\n", [])
        assert kernel.run("print(held(torch.ones(1)))").out == "tensor([2.])\n"


def test_a_header_beside_the_notebook_is_found_and_one_that_is_nowhere_has_a_cells_option(kernel):
    kernel.run("open('beside.h', 'w').write('#define FACTOR 2\\n')")
    cell = CELL.replace("%%operator mine\n", '%%operator mine\n#include "beside.h"\n').replace(
        "2", "FACTOR", 1
    )
    assert kernel.run(cell).error == ""
    assert "FACTOR" in cell
    assert kernel.run("print(scaled(torch.ones(1)))").out == "tensor([2.])\n"
    kernel.run("open('beside.h', 'w').write('#define FACTOR 5\\n'); calcops_jit.reload()")
    assert kernel.run("print(scaled(torch.ones(1)))").out == "tensor([5.])\n"
    error = kernel.run(
        CELL.replace("%%operator mine\n", '%%operator mine\n#include "nowhere.h"\n')
    ).error
    assert "belongs in --cflags=-I..." in error
    assert "extra_include_paths" not in error


def test_the_options_are_those_of_load(monkeypatch):
    from _calcops_jit.live import notebook

    calls, pushed = [], []
    library = SimpleNamespace(operators={})
    monkeypatch.setattr(
        notebook.requests, "foreign", lambda *args, **options: calls.append((args, options))
    )
    monkeypatch.setattr(notebook.library, "obtain", lambda request: library)
    monkeypatch.setattr(notebook, "get_ipython", lambda: SimpleNamespace(push=pushed.append))
    notebook.operator("one --cflags='-O2 -DA=\"b c\"' --ldflags=-lm --verbose", "int a;\n")
    notebook.operator("two --cuda --cflags=-lineinfo", "int b;\n")
    (one, first), (two, second) = calls
    assert one[0] == "one"
    assert one[1].endswith("/cell.cpp")
    assert Path(one[1]).read_text() == "int a;\n"
    assert first == {
        "extra_cflags": ["-iquote", os.getcwd(), "-O2", "-DA=b c"],
        "extra_ldflags": ["-lm"],
        "verbose": True,
    }
    assert two[0] == "two"
    assert two[1].endswith("/cell.cu")
    assert Path(two[1]).read_text() == "int b;\n"
    assert second == {
        "extra_cuda_cflags": [f"-I{os.getcwd()}", "-lineinfo"],
        "extra_ldflags": [],
        "verbose": False,
    }
    assert pushed == [{}, {}]


def test_the_cells_of_a_kernel_that_was_killed_go_with_the_next_one(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "CALCOPS_BUILD": "0",
        "TMPDIR": str(tmp_path),
    }
    for end in ("os._exit(0)", "os._exit(0)", ""):
        command = [
            sys.executable,
            "-c",
            f"import os\nfrom _calcops_jit.live import notebook\n{end}",
        ]
        subprocess.run(command, env=environment, check=True)
        assert len(list(tmp_path.glob("calcops-cells-*"))) == bool(end)


# ---- the example ---------------------------------------------------------------------------------


def told(cell) -> list[str]:
    """What must be the same whenever it is executed: not the times that builds take, not
    pictures."""
    if "timing" in cell.metadata.get("tags", []):
        return []
    return [o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout"] + [
        o.data["text/plain"] for o in cell.outputs if o.output_type == "execute_result"
    ]


def pictures(cell):
    import base64
    import io

    from matplotlib import image

    data = [o.data["image/png"] for o in cell.outputs if "image/png" in o.get("data", {})]
    return [image.imread(io.BytesIO(base64.b64decode(png)))[..., :3] for png in data]


def test_the_example_gives_what_it_was_committed_with(tmp_path):
    pytest.importorskip("matplotlib")
    committed, fresh = nbformat.read(EXAMPLE, as_version=4), nbformat.read(EXAMPLE, as_version=4)
    for cell in fresh.cells:
        cell.outputs = [] if cell.cell_type == "code" else None
    # The cells are compiled afresh; the operators of the library are where this process has them.
    import calcops_jit

    environment = os.environ | {"PYTHONPATH": str(ROOT), "CALCOPS_CACHE": str(tmp_path / "cache")}
    environment["CALCOPS_CACHE_READONLY"] = str(Path(calcops_jit.library_path()).parents[2])
    client = nbclient.NotebookClient(fresh, timeout=900, kernel_name="python3")
    with client.setup_kernel(env=environment, cwd=str(tmp_path)):
        for i, cell in enumerate(fresh.cells):
            client.execute_cell(cell, i)
    for before, after in zip(committed.cells, fresh.cells):
        if before.cell_type == "code":
            assert told(after) == told(before)
            assert len(pictures(after)) == len(pictures(before))
            for old, new in zip(pictures(before), pictures(after)):
                assert old.shape == new.shape
                assert abs(old - new).mean() < 0.02
                assert new.std() > 0.1
