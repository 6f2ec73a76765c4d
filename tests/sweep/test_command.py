"""The command line: what it prints, what it refuses, and with which exit status."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

REPOSITORY = Path(__file__).parent.parent.parent


def rows_of(output):
    return [json.loads(line, parse_constant=pytest.fail) for line in output.splitlines()]


# --- it answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
def test_blockwise_error_of_gaussian_matrices_is_the_known_constant(sweep, dim):
    status, out, err = sweep(
        *("blockwise --source gaussian --rows 128 --cols 512 --tp 1 2 4 8 --method svd --seed 0 1 2 --json").split(),
        *("--dim", dim, "--jobs", 1),
    )
    assert (status, err) == (0, "")
    relative, cosine = (
        {1: {2: 0.53, 4: 1.24, 8: 1.13}, 0: {2: 0.19, 4: 0.23, 8: 0.24}}[dim],
        {1: {2: 0.96, 4: 0.87, 8: 0.93}, 0: {2: 0.983, 4: 0.975, 8: 0.971}}[dim],
    )
    rows = rows_of(out)
    assert len(rows) == 12
    for row in rows:
        assert row["study"] == "blockwise"
        assert row["outcome"] == "ok"
        if row["tp"] == 1:
            assert row["relative"] <= 1e-12
        else:
            assert row["relative"] == pytest.approx(relative[row["tp"]], abs=0.05)
            assert row["cosine"] == pytest.approx(cosine[row["tp"]], abs=0.02)
        assert row["sigma_max"] <= row["bound"] * (1 + 1e-12)
        assert row["bound"] == pytest.approx(row["tp"] ** 0.5)


@pytest.mark.slow
def test_the_overview_says_what_to_look_at(sweep, tmp_path):
    status, out, _ = sweep()
    assert status == 0
    assert out.count("cases, ") == 3
    tables = sorted(tmp_path.glob("runs/overview/*/table.parquet"))
    assert [path.parent.name for path in tables] == ["blockwise", "conditioning", "orthogonalization"]
    look = out.strip().splitlines()[-1]
    assert look.startswith("Look at ")
    for path in look.removeprefix("Look at ").split(", "):
        assert (tmp_path / path).stat().st_size > 1000
        assert (tmp_path / path).with_suffix(".pdf").exists()


def test_a_second_run_measures_nothing_and_says_so(sweep, small):
    assert "4 of them measured now" in sweep(*small)[1]
    assert "0 of them measured now" in sweep(*small)[1]
    assert "4 of them measured now" in sweep(*small, "--fresh")[1]


def test_more_values_measure_only_what_is_new(sweep, small):
    sweep(*small)
    status, out, _ = sweep(*small[:-5], "--tp", "1", "2", "4", "--jobs", "1")
    assert status == 0
    assert "6 cases, 2 of them measured now" in out


def test_list_names_studies_and_experiments(sweep, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    status, out, _ = sweep("--list")
    assert status == 0
    for name in ("orthogonalization", "blockwise", "schedules", "speed", "experiments/blockwise_error/sweep.toml"):
        assert name in out


def test_dry_run_counts_shows_and_estimates(sweep, small, tmp_path):
    status, out, _ = sweep(*small, "--dry-run")
    assert status == 0
    assert "4 cases of study 'blockwise', about" in out
    assert "Gflop" in out
    assert out.count("source=gaussian") == 3
    assert not (tmp_path / "runs").exists()
    assert len(rows_of(sweep(*small, "--dry-run", "--json")[1])) == 4
    sweep(*small)
    assert "4 are there already" in sweep(*small, "--dry-run")[1]


def test_quiet_prints_nothing(sweep, small):
    assert sweep(*small, "--quiet") == (0, "", "")


@pytest.mark.parametrize("words", ["--help", "blockwise --help", "--list", "--dry-run", "speed --dry-run"])
def test_help_list_and_dry_run_never_import_torch(words):
    code = f"import sys; sys.argv[1:] = {words.split()!r}; from muon_lab.sweep.__main__ import main; status = main(); "
    code += "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(status)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout) > 100


# --- the user's own matrices ------------------------------------------------------------------------------------------


@pytest.fixture
def matrices(tmp_path):
    path = tmp_path / "mine.npz"
    rng = np.random.default_rng(0)
    np.savez(path, up=rng.standard_normal((8, 16)), down=rng.standard_normal((16, 8)), bias=np.ones(4))
    return path


def test_own_matrices_are_measured_by_name(sweep, matrices):
    status, out, err = sweep("blockwise", "--matrices", matrices, "--tp", 2, "--dim", 0, "--json", "--jobs", 1)
    assert status == 0
    assert {row["matrix"] for row in rows_of(out)} == {"up", "down"}
    assert {(row["rows"], row["cols"]) for row in rows_of(out)} == {(8, 16), (16, 8)}
    assert "bias" in err
    status, out, _ = sweep(
        *("blockwise", "--matrices", matrices, "--source", "file:u*", "gaussian", "--rows", 8, "--cols", 16),
        *("--tp", 2, "--dim", 0, "--json", "--jobs", 1),
    )
    assert [row["source"] for row in rows_of(out)] == ["file", "gaussian"]


def test_a_matrix_that_is_not_selected_does_no_harm(sweep, tmp_path):
    np.savez(tmp_path / "mixed.npz", w=np.eye(4), counts=np.ones((2, 2), np.int64), bad=np.full((2, 2), np.nan))
    status, out, _ = sweep(*"blockwise --matrices mixed.npz --source file:w --json --jobs 1".split())
    assert status == 0
    assert {row["matrix"] for row in rows_of(out)} == {"w"}


def test_many_skipped_arrays_are_one_note(sweep, tmp_path):
    np.savez(tmp_path / "model.npz", w=np.eye(4), **{f"bias{i}": np.ones(3) for i in range(40)})
    status, _, err = sweep(*"blockwise --matrices model.npz --json --jobs 1".split())
    assert status == 0
    assert "38 more arrays are no matrices" in err
    assert len(err.splitlines()) == 3


def test_a_changed_file_is_measured_again(sweep, matrices):
    command = ("blockwise", "--matrices", matrices, "--tp", 2, "--dim", 0, "--jobs", 1)
    assert "2 of them measured now" in sweep(*command)[1]
    assert "0 of them measured now" in sweep(*command)[1]
    np.savez(matrices, up=np.eye(8, 16), down=np.eye(16, 8))
    assert "2 of them measured now" in sweep(*command)[1]


def test_the_overview_takes_own_matrices(sweep, matrices):
    status, _, _ = sweep("--matrices", matrices, "--jobs", 1, "--quiet")
    assert status == 0
    table = pl.read_parquet("runs/overview/blockwise/table.parquet")
    assert set(table["matrix"]) == {"up", "down"}


# --- it refuses -------------------------------------------------------------------------------------------------------


def bad_files(folder):
    np.savez(folder / "inf.npz", bad=np.array([[1.0, np.inf]]), good=np.eye(2))
    np.savez(folder / "int.npz", counts=np.ones((2, 2), np.int64))
    np.savez(folder / "flat.npz", bias=np.ones(4))
    (folder / "torn.safetensors").write_bytes(b"\x10\x00\x00\x00")
    (folder / "notes.txt").write_text("no matrices")
    torch.save({"w": torch.eye(2), "f": Path}, folder / "pickle.pt")
    (folder / "key.toml").write_text('study = "blockwise"\n[axis]\ntp = [2]\n')
    (folder / "axis.toml").write_text('study = "blockwise"\n[axes]\ntpp = [2]\n')
    (folder / "value.toml").write_text('study = "blockwise"\n[axes]\ntp = ["two"]\n')
    (folder / "study.toml").write_text('study = "blockwize"\n')
    (folder / "broken.toml").write_text("study = \n")
    (folder / "zip.toml").write_text('study = "blockwise"\n[[zip]]\nrows = [1, 2]\ncols = [1]\n')
    (folder / "zipped.toml").write_text('study = "blockwise"\n[[zip]]\nrows = [8, 9]\ncols = [3, 4]\n')
    (folder / "twice.toml").write_text('study = "blockwise"\n[axes]\ntp = [1]\n[[zip]]\ntp = [1, 2]\n')
    (folder / "twozips.toml").write_text('study = "blockwise"\n[[zip]]\ncols = [1]\n[[zip]]\ncols = [1]\nrows = [1]\n')
    (folder / "empty.toml").write_text('study = "blockwise"\n[[exclude]]\ntp = [1, 2, 4, 8]\n')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("blockwize", "unknown study 'blockwize': did you mean 'blockwise'?"),
        ("blockwise --tpp 2", "study 'blockwise' has no axis --tpp: did you mean --tp?"),
        ("blockwise --tp two", "--tp takes whole numbers, not 'two'"),
        ("blockwise --tp 0", "tensor-parallel ranks, must be a whole number of at least 1, not 0"),
        ("blockwise --tp", "--tp needs at least one value"),
        ("blockwise --dim 2", "must be 0 (rows) or 1 (columns), not 2"),
        ("blockwise --method quntic", "unknown method 'quntic': did you mean 'quintic'?"),
        ("blockwise --dtype float23", "unknown dtype 'float23': did you mean 'float32'?"),
        ("blockwise --method cubic5 --steps 4", "'cubic5' has exactly 5 steps, by its source; 4 were asked for"),
        ("blockwise --source gausian", "unknown source 'gausian': did you mean 'gaussian'?"),
        ("blockwise --source recordd", "did you mean 'recorded'?"),
        ("blockwise --source recorded:nothing*", "nothing*"),
        ("blockwise --source gaussian --rows 0", "at least 1 row and 1 column"),
        ("blockwise --source file", "give one with --matrices FILE"),
        ("blockwise extra", "'extra' does not belong here"),
        ("blockwise --jobs many", "--jobs takes a whole number from 0, not 'many'"),
        ("blockwise --json yes", "--json takes no value, but got 'yes'"),
        ("blockwise --out", "--out takes one value, but got 0"),
        ("--tp 2", "--tp is an axis of a study: name the study first"),
        ("--jsn", "the overview has no option --jsn: did you mean --json?"),
        ("orthogonalization --shape 8by8", "shape must be ROWSxCOLS"),
        ("orthogonalization --spectrum geometric(0.5)", "geometric"),
        ("schedules --sigma 2", "sigma must lie above 0 and at most at 1, not 2.0"),
        ("speed --matrices inf.npz", "study 'speed' takes no matrices"),
        ("speed --peer torhc", "unknown peer 'torhc': did you mean 'torch'?"),
        ("speed --repeats 0", "repeats must be at least 1, not 0"),
        ("blockwise --matrices mising.npz", "mising.npz"),
        ("blockwise --matrices inf.npz", "bad"),
        ("blockwise --matrices int.npz", "int64"),
        ("blockwise --matrices flat.npz", "flat.npz"),
        ("blockwise --matrices torn.safetensors", "torn.safetensors"),
        ("blockwise --matrices notes.txt", ".safetensors"),
        ("blockwise --matrices pickle.pt", "pickle.pt"),
        ("blockwise --matrices int.npz --source gaussian --rows 4 --cols 4", "none of its values is file"),
        ("blockwise --matrices int.npz --source file:c*", "int64"),
        ("blockwise --tp 1 --tp 2", "--tp is given twice"),
        ("zipped.toml --rows 4", "run together: with rows give cols too"),
        ("twice.toml", "axis 'tp' stands more than once"),
        ("twozips.toml", "axis 'cols' stands more than once"),
        ("experiments/blockwise/sweep.toml", "there is no experiment file"),
        ("key.toml", "unknown key 'axis': did you mean 'axes'?"),
        ("axis.toml", "study 'blockwise' has no axis 'tpp': did you mean 'tp'?"),
        ("value.toml", "axis 'tp' takes whole numbers, not 'two'"),
        ("study.toml", "unknown study 'blockwize': did you mean 'blockwise'?"),
        ("broken.toml", "broken.toml is not valid TOML"),
        ("zip.toml", "need equally many values"),
        ("empty.toml", "has no point"),
        ("blockwise --out notes.txt/x", "cannot write to"),
        ("blockwise --cluster tcp://127.0.0.1:9 --source gaussian", "Dask"),
    ],
)
def test_what_does_not_exist_is_refused_in_one_sentence(sweep, tmp_path, command, sentence):
    bad_files(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    status, out, err = sweep(*command.split())
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.startswith("muon_lab.sweep: ")
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before or "--cluster" in command


def test_a_case_that_errors_is_a_row_and_exit_status_one(sweep, small, monkeypatch, tmp_path):
    from muon_lab.parallel import layouts

    def broken(*args, **kwargs):
        raise RuntimeError("the network is down")

    monkeypatch.setattr(layouts, "blockwise", broken)
    status, out, err = sweep(*small, "--json")
    assert status == 1
    assert {(row["outcome"], row["note"]) for row in rows_of(out)} == {("error", "RuntimeError: the network is down")}
    assert "the network is down" in err
    status, _, err = sweep(*small, "--strict")
    assert status == 1
    assert "stopped at the first error: RuntimeError: the network is down" in err
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    status, out, _ = sweep(*small)
    assert status == 0
    assert "4 of them measured now" in out


def test_notes_of_rows_reach_the_user_once(sweep):
    status, out, err = sweep(
        *"blockwise --source gaussian --rows 8 --cols 8 --method quintic --steps 6 --tp 1 2 --json --jobs 1".split()
    )
    assert status == 0
    assert all("collapses at 6 steps" in row["note"] for row in rows_of(out))
    assert err.count("collapses at 6 steps") == 1


def test_a_missing_peer_is_named_and_left_out(sweep, monkeypatch):
    from muon_lab.studies import peers

    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "pytorch_optimizer" else name)
    words = "speed --shape 16x16 --method simple --repeats 1 --json --peer".split()
    status, out, err = sweep(*words, "lab", "pytorch_optimizer")
    assert status == 0
    assert [row["peer"] for row in rows_of(out)] == ["lab"]
    assert "peer 'pytorch_optimizer' is missing: pip install -e '.[peers]' adds it" in err
    status, _, err = sweep(*words, "pytorch_optimizer")
    assert status == 2
    assert "is missing" in err


def test_an_exclude_that_matches_nothing_is_noted(sweep, tmp_path):
    (tmp_path / "e.toml").write_text('study = "schedules"\n[axes]\nsteps = [5]\n[[exclude]]\nsteps = [99]\n')
    _, _, err = sweep("e.toml", "--dry-run")
    assert "leaves nothing out: {'steps': (99,)}" in err


def test_an_experiment_is_named_after_its_folder_from_wherever_it_is_run(sweep, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/sweep.toml").write_text('study = "schedules"\n[axes]\nmethod = ["taylor"]\nsteps = [5]\n')
    monkeypatch.chdir(tmp_path / "mine")
    assert sweep("sweep.toml", "--jobs", 1, "--quiet")[0] == 0
    assert (tmp_path / "mine/runs/mine/table.parquet").exists()


def test_the_folder_of_an_experiment_stands_for_its_file(sweep, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "sweep.toml").write_text(
        'study = "schedules"\n[axes]\nmethod = ["quintic"]\nsteps = [4]\nsigma = [0.01]\n'
    )
    said = sweep(folder, "--dry-run")
    assert said == sweep(folder / "sweep.toml", "--dry-run")
    assert said[0] == 0
    assert said[1].startswith("mine: 1 cases of study 'schedules'")
    assert "or of its folder" in sweep(tmp_path, "--dry-run")[2]  # which holds none


def test_an_example_of_ones_own_experiment_runs(sweep, tmp_path):
    (tmp_path / "mine.toml").write_text(OWN)
    status, out, _ = sweep("mine.toml", "--dry-run", "--json")
    cases = rows_of(out)
    assert status == 0
    assert {(case["tp"], case["rows"], case["cols"]) for case in cases} == {(2, 64, 256), (4, 64, 256), (2, 128, 128)}


OWN = """question = "Do wide matrices lose more to blocks?"
study = "blockwise"
axes = { source = ["gaussian"], tp = [2, 4] }
[[zip]]
rows = [64, 128]
cols = [256, 128]
[[exclude]]
tp = [4]
rows = [128]
"""


@pytest.mark.parametrize("words", [("--list",), ("blockwise", "--help")])
def test_a_reader_that_has_seen_enough_is_no_error(words):
    command = [sys.executable, "-m", "muon_lab.sweep", *words]
    answer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    answer.stdout.close()
    said = answer.stderr.read()
    answer.stderr.close()
    assert (answer.wait(), said) == (0, b"")


def test_a_machine_that_cannot_say_its_cores_or_fork_still_runs(sweep, small, monkeypatch):
    import os

    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert sweep(*small[:-2], "--quiet")[0] == 0


def test_an_interruption_before_the_first_case_is_one_sentence(sweep, small, monkeypatch):
    from muon_lab.sweep import __main__

    def interrupted(request):
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__, "_planned", interrupted)
    assert sweep(*small) == (130, "", "muon_lab.sweep: interrupted before the first case\n")


def test_the_dry_run_estimates_by_the_pace_of_the_rows_that_are_there(sweep, small, tmp_path):
    sweep(*small, "--quiet")
    log = tmp_path / "runs/blockwise/cases.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(line | {"seconds": 7.0} if "key" in line else line) + "\n" for line in lines))
    words = [word for word in small if word not in ("1", "2", "--tp", "--jobs")]
    out = sweep(*words, "--tp", "1", "2", "4", "8", "--dry-run")[1]
    assert "4 are there already, the others take about 28 s" in out
