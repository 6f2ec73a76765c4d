import os
import stat
import subprocess
import sys
from hashlib import sha256

import polars as pl
import pytest
from matplotlib.figure import Figure

from muon_lab import figures
from muon_lab.figures import save

SCRIPT = """
import sys
import polars as pl
from muon_lab import figures
from muon_lab.figures import save

save.save(figures.draw("blockwise", pl.read_parquet(sys.argv[1])), sys.argv[2])
"""


def table():
    points = [(dim, tp, f"gradient/200/{layer}") for dim in (0, 1) for tp in (1, 2, 4) for layer in "abc"]
    return pl.DataFrame(
        {
            "source": "recorded",
            "matrix": [name for _, _, name in points],
            "dim": [dim for dim, _, _ in points],
            "tp": [tp for _, tp, _ in points],
            "layout": "blockwise",
            "cut": "even",
            "method": "svd",
            "steps": pl.Series([None] * len(points), dtype=pl.Int64),
            "dtype": "float64",
            "outcome": "ok",
            "relative": [0.1 * tp + 0.01 * index for index, (_, tp, _) in enumerate(points)],
            "sigma_max": [tp**0.5 for _, tp, _ in points],
            "bound": [tp**0.5 for _, tp, _ in points],
        }
    )


def digests(paths):
    return [sha256(path.read_bytes()).hexdigest() for path in paths]


def test_bytes_are_the_same_in_another_process_on_another_day_in_another_place(tmp_path):
    table().write_parquet(tmp_path / "table.parquet")
    worlds = [
        {"TZ": "UTC", "PYTHONHASHSEED": "1", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "SOURCE_DATE_EPOCH": "0"},
        {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "2", "MPLBACKEND": "pdf"},
    ]
    found = []
    for index, world in enumerate(worlds):
        stem = tmp_path / str(index)
        command = [sys.executable, "-W", "error", "-c", SCRIPT, tmp_path / "table.parquet", stem]
        subprocess.run(command, check=True, env=os.environ | world)
        found.append(digests([stem.with_suffix(".pdf"), stem.with_suffix(".png")]))
    assert found[0] == found[1]


def test_a_figure_can_be_saved_twice(tmp_path):
    figure = figures.draw("blockwise", table())
    assert digests(save.save(figure, tmp_path / "a")) == digests(save.save(figure, tmp_path / "b"))


def test_a_changed_number_changes_the_bytes(tmp_path):
    changed = table().with_columns(relative=pl.col("relative") * 1.01)
    before, after = (save.save(figures.draw("blockwise", one), tmp_path / "a") for one in (table(), table()))
    assert before == after
    same = digests(before)
    assert all(
        old != new
        for old, new in zip(same, digests(save.save(figures.draw("blockwise", changed), tmp_path / "a")), strict=True)
    )


def test_no_day_and_no_program_in_the_files(tmp_path):
    pdf, png = save.save(Figure(), tmp_path / "empty")
    assert not any(word in pdf.read_bytes() for word in (b"CreationDate", b"Producer", b"Creator"))
    assert b"Software" not in png.read_bytes()


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    pdf, _ = save.save(Figure(), tmp_path / "kept")
    before = pdf.read_bytes()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(save.os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        save.save(figures.draw("blockwise", table()), tmp_path / "kept")
    assert pdf.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.pdf", "kept.png"]


def test_folders_are_made_and_others_may_read(tmp_path):
    pdf, png = save.save(Figure(), tmp_path / "new" / "folder" / "a.b")
    assert (pdf.name, png.name) == ("a.b.pdf", "a.b.png")
    assert stat.S_IMODE(png.stat().st_mode) == 0o644


def test_an_edge_that_is_zero_but_for_rounding_changes_no_byte(tmp_path):
    """Backgrounds of parts would be drawn from -1e-15 or 1e-15, as the layout ends up: written as -0 and 0."""
    found = set()
    for edge in (-1e-15, 1e-15):
        figure = Figure(figsize=(2, 2))
        part = figure.subfigures(1, 2)[0]
        part.subplots().plot([0, 1])
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        part.bbox_relative.p0 = (edge, edge)
        found.add(save.save(figure, tmp_path / "part")[0].read_bytes())
    assert len(found) == 1
