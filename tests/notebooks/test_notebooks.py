"""Notebooks are stored without outputs, and run."""

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(request.param, as_version=4)


def test_is_stored_without_outputs(notebook):
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        assert cell.id


@pytest.mark.slow
def test_runs(notebook, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
