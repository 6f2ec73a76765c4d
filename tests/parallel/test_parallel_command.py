"""What is wrong with the arguments of ``python -m muon_lab.parallel`` is one sentence, and status 2."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muon_lab.parallel.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "error: a world needs a whole number of ranks, at least 1, not 0"),
        (["--ranks", "two"], "error: argument --ranks: invalid int value: 'two'"),
        (["--dim", "2"], "error: argument --dim: invalid choice: "),
        (["--layout", "owner"], "error: unrecognized arguments: --layout owner"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, message, capsys):
    try:
        status = main([*arguments, "--backend", "threads"])
    except SystemExit as left:
        status = left.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1
    assert not printed.out


def members(group):
    """Return the command lines of all processes of a group that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ProcessLookupError):
            if os.getpgid(int(path.name)) == group and (command := (path / "cmdline").read_bytes()):
                found.append(command)
    return found


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("after", [0.0, 1.0])
def test_ctrl_c_is_one_word_and_leaves_no_process(after):
    """As soon as the server is there that forks the ranks, and while they work."""
    process = subprocess.Popen(
        [sys.executable, "-m", "muon_lab.parallel", "--ranks", "2", "--repeats", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not any(b"forkserver" in command for command in members(process.pid)) and process.poll() is None:
        time.sleep(0.01)
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    for _ in range(200):
        if not members(process.pid):
            break
        time.sleep(0.05)
    assert not members(process.pid)
