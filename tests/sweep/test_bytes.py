"""The table is the same, byte for byte, however it came about."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from muon_lab import studies
from muon_lab.sweep import executors, tables

COMMAND = (
    *("blockwise", "--source", "gaussian", "geometric(100)", "--rows", "48", "--cols", "96", "--seed", *"01234"),
    *("--tp", "1", "2", "4", "--method", "svd", "simple", "--dtype", "float64", "float32"),
)


def digest(folder):
    return hashlib.sha256((folder / "table.parquet").read_bytes()).hexdigest()


def start(folder, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "muon_lab.sweep", *COMMAND, "--out", str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(folder, *words):
    process = start(folder, *words)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return digest(folder)


def lines(folder):
    log = folder / "cases.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def wait_for_lines(folder, process, count):
    deadline = time.monotonic() + 100
    while lines(folder) < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert process.poll() is None, "the sweep ended before it could be interrupted"


def group_ends(number):
    """Return whether all processes of a group end within 20 s; one that nobody has waited for yet counts as ended."""
    for _ in range(200):
        if not any(group == number and state != "Z" for state, group in processes()):
            return True
        time.sleep(0.1)
    return False


def processes():
    """Yield state and group of every process."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            yield state, int(group)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return finish(tmp_path_factory.mktemp("whole"), "--jobs", "1")


@pytest.mark.slow
def test_one_worker_and_two_give_the_same_bytes(whole, tmp_path):
    assert finish(tmp_path, "--jobs", "2") == whole


@pytest.mark.slow
@pytest.mark.parametrize(("jobs", "after"), [("1", 2), ("1", 30), ("2", 5), ("2", 50)])
def test_a_killed_sweep_resumes_to_the_same_bytes(whole, tmp_path, jobs, after):
    process = start(tmp_path, "--jobs", jobs)
    wait_for_lines(tmp_path, process, after)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    with (tmp_path / "cases.jsonl").open("ab") as log:
        log.write(b'{"study": "blockwise", "key": "0123')  # as if killed while writing
    assert finish(tmp_path, "--jobs", "1") == whole
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_says_how_to_resume_and_leaves_no_process(whole, tmp_path, jobs):
    process = start(tmp_path, "--jobs", jobs)
    wait_for_lines(tmp_path, process, 3)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command resumes there" in err
    assert "Traceback" not in err
    assert group_ends(process.pid)
    assert finish(tmp_path, "--jobs", "1") == whole


@pytest.mark.slow
@pytest.mark.parametrize(("started", "after"), [(2, 0.1), (3, 0.1), (3, 0.5), (4, 0.0), (5, 0.01)])
def test_ctrl_c_while_workers_start_leaves_no_traceback(tmp_path, started, after):
    """The processes are the command, what tracks its resources, the server that forks, and two workers."""
    process = start(tmp_path, "--jobs", "2")
    while sum(group == process.pid for _, group in processes()) < started and process.poll() is None:
        time.sleep(0.001)
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert group_ends(process.pid)


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path):
    process = start(tmp_path, "--jobs", "2")
    wait_for_lines(tmp_path, process, 3)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert group_ends(process.pid)


@pytest.mark.slow
def test_a_dask_cluster_gives_the_same_bytes(whole, tmp_path):
    pytest.importorskip("distributed")
    script = tmp_path / "cluster.py"
    script.write_text(
        "import sys\n"
        "from distributed import LocalCluster\n"
        "from muon_lab.sweep.__main__ import main\n"
        "if __name__ == '__main__':\n"
        "    with LocalCluster(n_workers=2, threads_per_worker=1, host='127.0.0.1', dashboard_address=None) as c:\n"
        "        sys.exit(main([*sys.argv[1:], '--cluster', c.scheduler_address]))\n"
    )
    command = [sys.executable, str(script), *COMMAND, "--out", str(tmp_path / "out")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert digest(tmp_path / "out") == whole


def test_provenance_is_inside_and_names_no_place(sweep, small, tmp_path):
    sweep(*small, "--quiet")
    path = tmp_path / "runs/blockwise/table.parquet"
    provenance = tables.read_provenance(path)
    assert provenance["experiment"]["axes"]["rows"] == [8]
    assert provenance["version"] == studies.get("blockwise").version
    (measured,) = provenance["measured"]
    assert set(measured) >= {"torch", "numpy", "scipy", "python", "cpu", "blas", "threads", "commit", "dirty", "device"}
    assert measured["threads"] == 1
    text = json.dumps(provenance)
    for place in (str(Path.home()), str(tmp_path), os.uname().nodename):
        assert place not in text
    table = pl.read_parquet(path)
    assert "seconds" not in table.columns
    assert table.columns[:2] == ["study", "key"]


@pytest.mark.world
def test_a_library_leaves_ctrl_c_to_the_processes_of_its_caller():
    """The server that forks is shared with them, and only a command of the lab may have it shielded."""
    with executors.local(2) as pool:
        pool.submit(os.getpid).result()
    with multiprocessing.get_context("forkserver").Pool(1) as theirs:
        assert signal.SIGINT not in theirs.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, []))
