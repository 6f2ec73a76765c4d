"""Trying all layouts from the command line."""

import os
import subprocess
import sys

import pytest
import torch

from muon_lab import polar
from muon_lab.parallel import trial, worlds
from muon_lab.parallel.__main__ import main


@pytest.mark.parametrize(("dim", "ranks"), [(0, 2), (1, 3), (0, 1)])
def test_every_layout_sends_what_its_closed_form_says(dim, ranks):
    found = trial.run(trial.Trial(40, 24, dim, repeats=1), ranks, "threads")
    assert len(found) == ranks
    for layouts in found:
        assert all(each.sent == each.asked for each in layouts.values())
        assert layouts["duplicated"].bit_equal
        assert layouts["owner"].bit_equal
        assert layouts["distributed"].apart < 1e-5
        assert layouts["gram"].apart < 1e-4
    blockwise = found[0]["blockwise"]
    assert (blockwise.error > 0.1, blockwise.bit_equal) == ((False, True) if ranks == 1 else (True, False))


@pytest.mark.parametrize("matrices", [1, 3])
def test_lists_of_matrices_are_updated_each_for_itself(matrices):
    """Owners have two, one or no matrix; `duplicated` and `owner` give the bits of one rank, the others its numbers."""
    tried, generator = trial.Trial(24, 8), torch.Generator().manual_seed(1)
    G = torch.randn(matrices, 24, 8, generator=generator)
    single = polar.newton_schulz(polar.schedules.get("quintic", 5))
    whole = [single(one) for one in G]

    def program(world):
        cut = tried.placement(world.size)
        shards = [cut.shard(one, world.rank) for one in G]
        return {name: make(world, cut)(shards) for name, make in trial.made(tried).items()}

    found = worlds.run(program, 2)
    for name in ("duplicated", "owner", "distributed", "gram"):
        joined = [torch.cat(parts) for parts in zip(*(rank[name] for rank in found), strict=True)]
        assert len(joined) == matrices
        if name in ("duplicated", "owner"):
            assert all(torch.equal(one, other) for one, other in zip(joined, whole, strict=True))
        assert all(float((one - other).norm()) < 1e-4 for one, other in zip(joined, whole, strict=True))


def test_the_command_prints_a_line_a_layout(capsys):
    assert main(["--backend", "threads", "--ranks", "2", "--rows", "32", "--cols", "8", "--repeats", "1"]) == 0
    first, head, *lines = capsys.readouterr().out.splitlines()
    assert first == "32×8 float32, rows over 2 ranks (threads), 5 steps of quintic"
    assert "sent KiB" in head
    assert [line.split()[0] for line in lines] == ["duplicated", "owner", "distributed", "gram", "blockwise"]
    assert lines[-1].split()[2] == "0.0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "error: rows must be at least 1, not 0"),
        (["--backend", "glo"], "error: backend of a world must be one of threads, gloo, nccl, not 'glo'"),
        (["--schedule", "quintc"], "error: unknown schedule 'quintc': did you mean 'quintic'?"),
        (["--ranks", "-1", "--backend", "threads"], "error: a world needs a whole number of ranks, at least 1, not -1"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_wrong_bytes_are_told(monkeypatch, capsys):
    """The negative control: a closed form that is off by one byte."""
    right = trial.asked
    monkeypatch.setattr(trial, "asked", lambda *arguments: right(*arguments) + 1)
    assert main(["--backend", "threads", "--ranks", "2", "--rows", "16", "--cols", "8", "--repeats", "1"]) == 1
    assert "sent other bytes" in capsys.readouterr().err


@pytest.mark.world
@pytest.mark.slow
def test_it_runs_under_torchrun():
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launched, "-m", "muon_lab.parallel", "--rows", "64", "--cols", "16", "--repeats", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("duplicated") == 1
    assert "rows over 4 ranks (gloo)" in answer.stdout
