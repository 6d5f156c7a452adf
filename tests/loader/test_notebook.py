"""The magic %%operator in running notebooks, and the example notebook, executed again."""

import base64
import io
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkout import CONTRACT, HERE, cache_with_runtime, clean_environment, compiler
from programs import blocks

import calcops_jit

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

EXAMPLE = HERE / "examples" / "edit_and_run.ipynb"
CELL = "%%operator mine" + CONTRACT.format(name="scaled", factor=2)


class Kernel:
    """A running notebook."""

    def __init__(self, folder: Path, **more_variables: str):
        self.folder = folder
        self.notebook = nbformat.v4.new_notebook()
        self.client = nbclient.NotebookClient(
            self.notebook,
            timeout=900,
            allow_errors=True,
            kernel_name="python3",
            on_cell_executed=self._executed,
        )
        variables = {"PYTHONPATH": str(HERE), "CALCOPS_BUILD": "0", "CXX": compiler()}
        variables |= {"CALCOPS_CACHE": str(folder / "cache")}
        variables |= {"TEST_LOG": os.devnull, "TEST_SLOW": "", "TEST_HOOK": ""}
        self.environment = clean_environment() | variables | more_variables

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
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    shutil.copytree(cache_with_runtime(), folder / "cache")
    return folder


@pytest.fixture(scope="module")
def kernel(folder):
    """Yield a running notebook in which CELL was run. `one` is a tensor."""
    with Kernel(folder) as kernel:
        kernel.first = kernel.run("import torch, calcops_jit\n%load_ext calcops_jit")
        kernel.cell = kernel.run(CELL)
        kernel.run("one = torch.ones(1, dtype=torch.float64); handle = scaled")
        yield kernel


def test_a_cell_defines_its_operators_and_writes_nothing_beside_the_notebook(kernel, folder):
    assert kernel.first.outputs == []
    assert kernel.cell.out == "mine::scaled(Tensor x) -> Tensor y\n", kernel.cell
    result = kernel.run("print(scaled is torch.ops.mine.scaled, scaled(one).item())")
    assert result.out == "True 2.0\n"
    assert [path.name for path in folder.iterdir()] == ["cache"]


def test_the_import_registers_the_magic_also_after_a_failed_build(folder):
    with Kernel(folder, CALCOPS_BUILD="1", CXX="nowhere") as failing:
        assert "cannot build calcops" in failing.run("import calcops_jit").err
        failing.run("%%operator?")
        assert "Build the cell" in failing.payload[0]["data"]["text/plain"]


def test_the_progress_of_a_cell_is_one_output_that_ends_as_one_line(kernel):
    assert len(kernel.cell.displayed) == 1
    assert kernel.cell.err == ""
    assert list(kernel.cell.displayed[0]) == ["text/plain"]
    assert re.fullmatch(r"built mine in [\d.]+ s", kernel.cell.displayed[0]["text/plain"])


def test_the_help_of_the_magic_shows_its_options(kernel):
    kernel.run("%%operator?")
    (payload,) = kernel.payload
    for words in (
        "--cuda",
        "--cflags CFLAGS",
        "--ldflags LDFLAGS",
        "--check",
        "--verbose",
        "name",
        "Build the cell",
    ):
        assert words in payload["data"]["text/plain"]


def test_the_help_of_an_operator_shows_its_arguments_and_nothing_of_its_class(kernel):
    kernel.run("scaled?")
    text = re.sub(r"\x1b\[\d+m", "", kernel.payload[0]["data"]["text/plain"])
    assert "Signature:   scaled(x)\n" in text
    assert "mine::scaled(Tensor x) -> Tensor y" in text
    for word in "_P", "Call signature", "Class docstring", "generic":
        assert word not in text


def test_a_compile_error_names_the_line_of_the_editor_and_keeps_the_loaded_kernel(kernel, folder):
    wrong = CELL.replace("2 * x(i)", "2 * unknown(i)")
    (number,) = [i for i, line in enumerate(wrong.splitlines(), 1) if "unknown" in line]
    error = kernel.run(wrong).error
    log = re.search(r"  log: (.*)$", error)
    assert Path(log[1]).is_relative_to(folder)
    assert error.startswith(f"BuildError: cannot build mine: error at cell:{number}:")
    assert "‘unknown’ was not declared" in error
    assert "y(i) = 2 * unknown(i);" in error
    assert re.search(rf"fix: correct cell:{number}:\d+\n", error)
    # reload() compares with the loaded library and not with the cell that failed.
    result = kernel.run("print(handle(one).item(), calcops_jit.reload())")
    assert result.out == "2.0 []\n"


def test_another_schema_is_refused_with_the_difference(kernel):
    changed = (
        CELL.replace("Tensor x", "Tensor z").replace("x [N]", "z [N]").replace("like x", "like z")
    )
    error = kernel.run(changed).error
    assert error.startswith("BuildError: cannot reload mine")
    changes = "- mine::scaled(Tensor x)", "+ mine::scaled(Tensor z)"
    for words in (*changes, "fix: restart Python"):
        assert words in error
    result = kernel.run("print(scaled(one).item(), calcops_jit.reload())")
    assert result.out == "2.0 []\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "the following arguments are required: name"),
        ("mine yours", "unrecognized arguments: yours"),
        ("mine --fast", "unrecognized arguments: --fast"),
        ("mine --cflags='-O2", "No closing quotation"),
        ("-h", "%%operator? shows all options"),
    ],
)
def test_the_error_of_a_wrong_magic_line_is_one_sentence(kernel, line, words):
    result = kernel.run(f"%%operator {line}\nint")
    assert result.error == ""
    assert words in result.err
    assert len(result.err.splitlines()) == 1


def test_the_error_of_a_wrong_name_is_one_sentence(kernel):
    error = kernel.run("%%operator 1a\nint").error
    assert error.startswith("BuildError: calcops_jit.load: expected `name` ")
    assert error.endswith(", got '1a'")


def cell_of(library: str, *operators: str) -> str:
    """Return a cell with several operators."""
    cell = f"%%operator {library}"
    for name in operators:
        text = CONTRACT.format(name=name, factor=2)
        cell += text.replace("contract(", f"contract_{name}(").replace("cpu(", f"cpu_{name}(")
    return cell


def test_a_name_that_means_something_else_in_the_notebook_is_kept(kernel):
    kernel.run("tripled, builtin = 3, sum")
    result = kernel.run(cell_of("names", "sum", "tripled", "free"))
    assert "torch.ops.names.sum" in result.out
    assert "torch.ops.names.tripled" in result.out
    assert "torch.ops.names.free" not in result.out
    state = "print(sum is builtin, tripled, free is torch.ops.names.free)"
    assert kernel.run(state).out == "True 3 True\n"


def test_a_name_stays_that_of_its_cell_when_another_library_has_it(kernel):
    kernel.run(cell_of("one_library", "shared"))
    assert "torch.ops.other_library.shared" in kernel.run(cell_of("other_library", "shared")).out
    assert kernel.run("print(shared is torch.ops.one_library.shared)").out == "True\n"


def test_a_cell_without_an_operator_says_so(kernel):
    assert "plain registers no operator\n" in kernel.run("%%operator plain\nint one;").err
    kernel.run("open('plain.cpp', 'w').write('int two;')")
    result = kernel.run("calcops_jit.load('plain_file', 'plain.cpp')")
    assert "plain_file registers no operator\n" in result.err


def test_the_cell_of_an_unpickled_operator_replaces_its_library(kernel, folder):
    cell = cell_of("stored", "kept_in_file")
    with Kernel(folder) as other:
        other.run("import calcops_jit, pickle, shutil, torch")
        other.run(cell)
        other.run("text = pickle.dumps(kept_in_file)")
        other.run("open('stored', 'wb').write(text)")
        kernel.run("import pickle\nwith open('stored', 'rb') as file: stored = pickle.load(file)")
        assert kernel.run("print(stored(one).item())").out == "2.0\n"
        assert kernel.run(cell.replace("2 * x(i)", "3 * x(i)")).error == ""
        assert kernel.run("print(stored(one).item())").out == "3.0\n"


# Sends the notebook's own process what the stop button sends, a second later.
STOP = """import os, signal, threading
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
"""


def test_the_stop_button_ends_a_build(kernel):
    kernel.run(STOP)
    error = kernel.run("%%operator stopped\n#include <torch/extension.h>").error
    assert "KeyboardInterrupt" in error


def test_an_operator_of_a_cell_works_in_a_spawned_worker_or_raises_an_error_there(kernel):
    """A worker that ends while it unpickles would let the pool wait for ever."""
    kernel.run("""
import multiprocessing, shutil
def called_in_worker(operator):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.starmap_async(operator, [(one,)]).get(timeout=100)[0].item()
""")
    kernel.run(cell_of("pickled", "sent"))
    assert kernel.run("print(called_in_worker(sent))").out == "2.0\n"
    kernel.run(cell_of("unpickled", "lost"))
    kernel.run("from _calcops_jit import library")
    kernel.run("shutil.rmtree(library._cell('unpickled')._request.root)")
    error = kernel.run("called_in_worker(lost)").error
    assert error.startswith("BuildError: cannot unpickle unpickled::lost: ")


def test_a_long_line_of_an_error_has_its_end_and_no_path_of_the_cell(kernel):
    error = kernel.run(CELL.replace("x.shape[0]", "x.size(0)")).error
    message = next(line for line in error.splitlines() if "has no member" in line)
    assert message.startswith("  cell:")
    assert message.endswith("has no member named ‘size’")


def test_check_makes_an_index_out_of_bounds_an_error_and_keeps_the_handles(kernel):
    wrong = CELL.replace("2 * x(i)", "2 * x(i + 1)")
    kernel.run(wrong.replace("%%operator mine", "%%operator mine --check"))
    error = kernel.run("handle(one)").error
    assert "expected the kernel to stay within the argument `x` of shape [1], got x(1)" in error
    kernel.run(CELL)
    assert kernel.run("print(scaled is handle, scaled(one).item())").out == "True 2.0\n"


def test_an_edited_cell_reaches_every_handle_and_no_other_notebook(kernel, folder):
    with Kernel(folder) as other:
        other.run("import torch, calcops_jit")
        warm = other.run(CELL)
        assert warm.out == "mine::scaled(Tensor x) -> Tensor y\n"
        assert (warm.err, warm.displayed) == ("", [])

        edited = kernel.run(CELL.replace("2 * x(i)", "3 * x(i)"))
        assert edited.error == ""
        assert "built mine" in edited.displayed[0]["text/plain"]
        result = kernel.run("print(handle(one).item(), handle is scaled)")
        assert result.out == "3.0 True\n"
        one = "torch.ones(1, dtype=torch.float64)"
        result = other.run(f"print(calcops_jit.reload(), scaled({one}).item())")
        assert result.out == "[] 2.0\n"

        back = kernel.run(CELL)
        assert (back.out, back.displayed) == ("mine::scaled(Tensor x) -> Tensor y\n", [])
        assert kernel.run("print(handle(one).item())").out == "2.0\n"


def test_a_cell_with_pytorchs_macros_comes_from_the_cache_in_another_notebook(kernel, folder):
    """TORCH_LIBRARY and the check name the cell's file, which is in a temporary folder."""
    cell = "%%operator plain\n#include <torch/library.h>\n"
    cell += 'void f(bool x) { TORCH_CHECK(x, "no"); }\n'
    cell += 'TORCH_LIBRARY_FRAGMENT(plain, m) { m.def("f", f); }'
    assert "built plain" in kernel.run(cell).displayed[0]["text/plain"]
    with Kernel(folder) as other:
        other.run("import torch, calcops_jit")
        warm = other.run(cell)
        assert (warm.error, warm.err, warm.displayed) == ("", "", [])


def cell_with_header(name: str) -> str:
    """Return a cell whose operator multiplies by FACTOR from a header in the notebook's folder."""
    first, _, text = cell_of(name, name).partition("\n")
    return f'{first}\n#include "factor.h"\n{text.replace("2 * x(i)", "FACTOR * x(i)")}'


def test_a_header_is_found_in_a_folder_of_any_name(kernel, folder):
    for i, name in enumerate(["a b", "(1)", "it's", "ü", "$x", 'a"b', "a,b;c", "-Ix y"]):
        (folder / name).mkdir()
        (folder / name / "factor.h").write_text(f"#define FACTOR {i}")
        kernel.run(f"import os\nos.chdir({str(folder / name)!r})")
        assert kernel.run(cell_with_header(f"any{i}")).error == "", name
        assert kernel.run(f"print(any{i}(one).item())").out == f"{i}.0\n"
    kernel.run("os.chdir('..')")


def test_a_change_of_the_folder_compiles_a_cell_again_only_if_its_headers_differ(kernel, folder):
    for name, factor in ("first", 3), ("same", 3), ("other", 4), ("none", None):
        (folder / name).mkdir()
        if factor:
            (folder / name / "factor.h").write_text(f"#define FACTOR {factor}")
    cell = cell_with_header("moving")
    kernel.run("%cd first")
    assert "built moving" in kernel.run(cell).displayed[0]["text/plain"]
    kernel.run("%cd ../same")
    assert kernel.run(cell).displayed == []
    kernel.run("%cd ../other")
    assert "built moving" in kernel.run(cell).displayed[0]["text/plain"]
    assert kernel.run("print(moving(one).item())").out == "4.0\n"
    kernel.run("%cd ../none")
    assert "factor.h" in kernel.run(cell).error
    kernel.run("%cd ..")


def test_a_header_beside_the_notebook_is_found_and_a_missing_one_names_cflags(kernel):
    def cell(name, *flags, header="beside.h"):
        first, _, text = CELL.partition("\n")
        text = text.replace("2 * x(i)", "FACTOR * x(i)").replace("scaled", name)
        line = " ".join([f"%%operator {name}", *flags])
        return f'{line}\n#include "{header}"\n{text}'

    kernel.run("open('beside.h', 'w').write('#define FACTOR 2\\n')")
    assert kernel.run(cell("beside")).error == ""
    assert kernel.run("print(beside(one).item())").out == "2.0\n"
    kernel.run("open('beside.h', 'w').write('#define FACTOR 5\\n'); calcops_jit.reload()")
    assert kernel.run("print(beside(one).item())").out == "5.0\n"
    error = kernel.run(cell("nowhere", header="nowhere.h")).error
    assert "nowhere.h" in error
    # Flags reach the compiler and the linker.
    flags = ("--cflags='-DFACTOR=7 -DMORE'", "--cflags=-DANOTHER", "--ldflags=-lm")
    assert kernel.run(cell("flags", *flags, header="cstdint")).error == ""
    assert kernel.run("print(flags(one).item())").out == "7.0\n"
    error = kernel.run(
        cell("linked", "--cflags=-DFACTOR=1", "--ldflags=-lnosuch", header="cstdint")
    ).error
    assert "nosuch" in error


def test_a_cell_for_cuda_needs_a_pytorch_with_cuda(kernel):
    kernel.run("version, torch.version.cuda = torch.version.cuda, None")
    error = kernel.run("%%operator gpu --cuda\n__global__ void kernel() {}").error
    assert "this PyTorch is not for CUDA" in error
    kernel.run("torch.version.cuda = version")


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


@pytest.mark.long
def test_the_example_notebook_gives_its_committed_outputs(tmp_path):
    pytest.importorskip("matplotlib")
    committed = nbformat.read(EXAMPLE, as_version=4)
    executed = nbformat.read(EXAMPLE, as_version=4)
    for cell in executed.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    # The cells are compiled again. CalcOps' own operators come from the cache of this process.
    own = Path(calcops_jit.library_path()).parents[1]
    for slot in [own, *own.parent.glob("*runtime*")]:
        shutil.copytree(slot, tmp_path / "cache" / slot.name)
    environment = os.environ | {"PYTHONPATH": str(HERE), "CALCOPS_CACHE": str(tmp_path / "cache")}
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


def test_the_cell_of_the_front_page_is_tested_and_defines_its_operator(kernel):
    pytest.importorskip("hypothesis")
    (cell,) = blocks("README.md", "cpp")
    text = kernel.run(cell.replace("%%operator mine", "%%operator front"))
    assert re.search(r"^front::twice: \d+ calls, \d+ checks", text.out, re.MULTILINE), text
    assert "42." in kernel.run("print(twice(torch.tensor([21.0]).double()))").out


def test_a_cell_with_test_is_tested_by_its_contract(kernel):
    pytest.importorskip("hypothesis")
    kernel.run("one.exp().sum()")
    text = kernel.run(CELL.replace("%%operator mine", "%%operator tested --test"))
    assert re.search(r"^tested::scaled: \d+ calls, \d+ checks", text.out, re.MULTILINE), text
