"""notebooks/first_steps.ipynb: every cell runs, the agents learn, and pictures and films are shown."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_first_steps(tmp_path):
    """Fails if a cell raises, if an agent does not learn what the text says, or if a picture or a film is missing."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    for name in ("ppo.py", "compare.py"):
        shutil.copy(ROOT / name, tmp_path)
    notebook = nbformat.read(ROOT / "notebooks/first_steps.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs before you save it"
    (tmp_path / "notebooks").mkdir()
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": tmp_path / "notebooks"}}).execute()
    printed, shown = "", []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            printed += output.get("text", "")
            shown += [kind for kind in ("image/png", "text/html") if kind in output.get("data", {})]
    assert shown == ["image/png", "text/html", "image/png", "text/html"]  # curve, film, comparison, film
    assert float(printed.split("100 episodes: ")[1].split()[0]) > 300  # a random agent has 22
    far, near = (line for line in printed.splitlines() if "gamma=" in line and "seed)" in line)
    assert "0.98" in far and "0.5" in near and float(far.split()[0]) > float(near.split()[0])
    assert float(printed.split("evaluation: ")[-1].split()[0]) > 0.9  # Catch
