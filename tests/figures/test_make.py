import importlib.util
import json
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import polars as pl
import pytest

ROOT = Path(__file__).parents[2]


def schedules():
    points = list(product(("simple", "taylor"), (1, 2, 3, 4, 5), (1e-3, 1e-2, 0.1, 1.0)))
    noise = np.random.default_rng(0).uniform(0, 1, (4, len(points)))
    table = pl.DataFrame(points, schema=["method", "steps", "sigma"], orient="row")
    return table.with_columns(pl.lit("ok").alias("outcome"), *map(pl.Series, ("image", "worst", "low", "high"), noise))


def blockwise():
    table = pl.DataFrame([*product((0, 1), (1, 2), (0, 1))], schema=["dim", "tp", "seed"], orient="row")
    facts = {"source": "gaussian", "matrix": None, "method": "svd", "steps": None, "dtype": "float64", "outcome": "ok"}
    facts |= {"layout": "blockwise", "cut": "even"}
    return table.with_columns(
        *(pl.lit(value).alias(name) for name, value in facts.items()),
        relative=pl.col("tp") / 10 + pl.col("seed") / 100,
        sigma_max=pl.col("tp").sqrt(),
        bound=pl.col("tp").sqrt(),
    )


@pytest.fixture
def project(tmp_path):
    (tmp_path / "paper_figures").mkdir()
    for name in ("make", "fig_schedules", "fig_blockwise_error"):
        shutil.copy(ROOT / "paper_figures" / f"{name}.py", tmp_path / "paper_figures")
    for name, table in {"schedules": schedules(), "blockwise_error": blockwise()}.items():
        (tmp_path / "experiments" / name).mkdir(parents=True)
        table.write_parquet(tmp_path / "experiments" / name / "table.parquet")
    return tmp_path


@pytest.fixture
def make(project):
    spec = importlib.util.spec_from_file_location("make_of_a_copy", project / "paper_figures" / "make.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def states(text):
    return {line.split()[0]: line.split()[1] for line in text.splitlines()[1:]}


def test_what_is_stale_is_rebuilt_and_nothing_else(make, project, capsys):
    assert make.main([]) == 0
    assert states(capsys.readouterr().out) == {"blockwise_error": "rebuilt", "schedules": "rebuilt"}
    assert make.main([]) == 0
    assert states(capsys.readouterr().out) == {"blockwise_error": "fresh", "schedules": "fresh"}
    schedules().head(30).write_parquet(project / "experiments/schedules/table.parquet")
    assert make.main([]) == 0
    assert states(capsys.readouterr().out) == {"blockwise_error": "fresh", "schedules": "rebuilt"}
    script = project / "paper_figures/fig_blockwise_error.py"
    script.write_text(script.read_text() + "\n")
    assert make.main(["--only", "blockwise_error"]) == 0
    assert states(capsys.readouterr().out) == {"blockwise_error": "rebuilt"}
    (project / "paper_figures/out/schedules.png").unlink()
    assert make.main([]) == 0
    assert states(capsys.readouterr().out) == {"blockwise_error": "fresh", "schedules": "rebuilt"}
    assert set(json.loads((project / "paper_figures/out/stamps.json").read_text())) == {"blockwise_error", "schedules"}


def test_the_table_says_where_a_figure_comes_from(make, capsys):
    make.main(["--only", "schedules"])
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row == ["schedules", "rebuilt", "experiments/schedules/table.parquet", "experiments/schedules/sweep.toml"]


def test_check_passes_on_what_was_built_and_writes_nothing(make, project, capsys):
    make.main([])
    before = {path: path.stat().st_mtime_ns for path in (project / "paper_figures/out").iterdir()}
    assert make.main(["--check"]) == 0
    assert capsys.readouterr().err == ""
    assert {path: path.stat().st_mtime_ns for path in (project / "paper_figures/out").iterdir()} == before


def test_check_notices_one_changed_byte_and_its_remedy_works(make, project, capsys):
    make.main([])
    path = project / "paper_figures/out/schedules.pdf"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    capsys.readouterr()
    assert make.main(["--check"]) == 1
    output = capsys.readouterr()
    assert states(output.out) == {"blockwise_error": "same", "schedules": "differs"}
    (sentence,) = output.err.splitlines()
    assert sentence.startswith("paper_figures/out/schedules.pdf differs")
    command = sentence.partition(": run ")[2]
    assert command == "rm -f paper_figures/out/schedules.pdf && python paper_figures/make.py --only schedules"
    path.unlink()
    assert make.main(["--only", "schedules"]) == 0
    assert make.main(["--check"]) == 0


def test_check_notices_what_is_missing_and_what_belongs_to_no_figure(make, project, capsys):
    make.main([])
    out = project / "paper_figures/out"
    (out / "schedules.png").rename(out / "old.png")
    capsys.readouterr()
    assert make.main(["--check"]) == 1
    missing, extra = capsys.readouterr().err.splitlines()
    assert missing.startswith("paper_figures/out/schedules.png is missing")
    assert extra == "paper_figures/out/old.png belongs to no figure: remove it"


@pytest.mark.parametrize("arguments", [[], ["--check"]])
def test_a_missing_table_is_one_sentence(arguments, make, project, capsys):
    (project / "experiments/schedules/table.parquet").unlink()
    assert make.main([*arguments, "--only", "schedules"]) == 2
    assert capsys.readouterr().err == (
        "experiments/schedules/table.parquet is missing: "
        "make it by python -m muon_lab.sweep experiments/schedules/sweep.toml\n"
    )


@pytest.mark.parametrize("content", [b"no table", b""])
def test_a_broken_table_is_one_sentence(content, make, project, capsys):
    (project / "experiments/schedules/table.parquet").write_bytes(content)
    assert make.main(["--only", "schedules"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("experiments/schedules/table.parquet is no Parquet table")


def test_a_table_of_another_study_is_one_sentence(make, project, capsys):
    blockwise().write_parquet(project / "experiments/schedules/table.parquet")
    assert make.main(["--only", "schedules"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("fig_schedules.py: table lacks the columns sigma, image")


def test_an_unknown_figure_names_the_nearest(make, capsys):
    assert make.main(["--only", "schedule"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("unknown figure 'schedule': did you mean 'schedules'?")


def test_every_script_declares_tables_and_a_caption(make):
    for path in make.Paper(ROOT / "paper_figures").scripts().values():
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert all(relative.startswith("experiments/") for relative in module.TABLES.values())
        assert len(module.CAPTION.split()) > 20


def test_a_script_run_by_itself_draws_its_figure(project):
    command = [sys.executable, "-W", "error", project / "paper_figures/fig_schedules.py"]
    subprocess.run(command, check=True, cwd=project, capture_output=True)
    out = project / "paper_figures/out"
    assert sorted(path.name for path in out.iterdir()) == [
        "schedules.pdf",
        "schedules.png",
        "schedules.txt",
        "stamps.json",
    ]


def test_committed_figures_are_what_their_committed_tables_give(make):
    """Bytes depend on the versions of matplotlib and its libraries: `make.py --check` compares them in the gate."""
    paper = make.Paper(ROOT / "paper_figures")
    for name, path in paper.scripts().items():
        script = make.load(path)
        for suffix in make.SUFFIXES:
            assert (paper.out / f"{name}{suffix}").is_file()
        assert all(paper.table(relative).is_file() for relative in script.tables.values())
        assert (paper.out / f"{name}.txt").read_text("utf-8").strip() == script.caption.strip()
    assert make.leftovers(paper) == []
