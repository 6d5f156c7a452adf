"""examples/hosted_notebook.ipynb: its cells after the installation give the outputs that it shows."""

import os

import pytest
from programs import ROOT

import calcops_jit

nbclient = pytest.importorskip("nbclient", reason="runs the notebook")
nbformat = pytest.importorskip("nbformat", reason="reads the notebook")
pytest.importorskip("ipykernel", reason="runs the cells")
pytest.importorskip("vesin", reason="a cell uses calcops.ase")

NOTEBOOK = ROOT / "examples" / "hosted_notebook.ipynb"


def results(cells):
    """Return what cells print and return, but not how long a build took."""
    texts = []
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "stream":
                texts.append(output.text)
            elif output.output_type == "execute_result":
                texts.append(output.data["text/plain"])
    return [text for text in texts if not text.startswith("PyTorch 2")]


def test_the_hosted_notebook_installs_this_version_and_gives_its_committed_outputs(tmp_path):
    committed = nbformat.read(NOTEBOOK, as_version=4)
    installation, *cells = [cell for cell in committed.cells if cell.cell_type == "code"]
    wheel = f"calcops-{calcops_jit.__version__}-py3-none-any.whl"
    assert installation.source == f"%pip install -q ./{wheel}[ase]"

    executed = nbformat.v4.new_notebook(cells=[cell.copy() for cell in cells])
    client = nbclient.NotebookClient(executed, timeout=900, kernel_name="python3")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with client.setup_kernel(env=environment, cwd=str(tmp_path)):
        for i, cell in enumerate(executed.cells):
            cell.outputs = []
            client.execute_cell(cell, i)
    assert results(executed.cells) == results(cells)
    assert results(cells)
