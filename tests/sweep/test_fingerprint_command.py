"""``python -m muon_lab.sweep fingerprint``: a card, one JSON object, or one sentence."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent


def test_a_card_is_printed(sweep, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    status, out, err = sweep("fingerprint", "--kwargs", "nesterov=false", "momentum=0.8")
    assert (status, err) == (0, "")
    assert out.startswith("torch.optim.Muon(nesterov=False, momentum=0.8)\n")
    for line in ("schedule         simple, 5 steps", "momentum         0.8;", "    optim.Muon("):
        assert line in out
    assert max(map(len, out.splitlines())) <= 120


def test_a_card_is_as_wide_as_the_terminal(sweep, monkeypatch):
    words = ("fingerprint", "--optimizer", "torch.optim.AdamW", "--kwargs", "lr=0.1")
    monkeypatch.setenv("COLUMNS", "60")
    _, narrow, _ = sweep(*words)
    monkeypatch.setenv("COLUMNS", "300")
    _, wide, _ = sweep(*words)
    assert 50 < max(map(len, narrow.splitlines())) <= 60 < max(map(len, wide.splitlines())) <= 120
    assert narrow.split() == wide.split()


def test_json_is_one_strict_object(sweep):
    status, out, err = sweep("fingerprint", "--optimizer", "torch.optim.SGD", "--kwargs", "lr=0.1", "--json")
    assert (status, err) == (0, "")
    card = json.loads(out, parse_constant=pytest.fail)
    assert card["optimizer"] == "torch.optim.SGD"
    assert card["kwargs"] == {"lr": 0.1}
    assert card["nearest"] is None
    assert card["findings"]["schedule"]["known"]


def test_help_comes_without_torch():
    code = "import sys; sys.argv[1:] = ['fingerprint', '--help']; from muon_lab.sweep.__main__ import main; main(); "
    code += "assert 'torch' not in sys.modules"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert answer.returncode == 0, answer.stderr
    assert "--optimizer" in answer.stdout


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("--optimizer torch.optim.Moun", "did you mean torch.optim.Muon?"),
        ("--optimizer nowhere.Muon", "there is no module 'nowhere'"),
        ("--optimizer torch.nn.Linear", "is no subclass of torch.optim.Optimizer"),
        ("--optimizer torch.optim.Muon --kwargs lr=-1", "torch.optim.Muon refuses to be made with lr=-1"),
        ("--optimizer torch.optim.Muon --kwargs spelled=1", "refuses to be made with spelled=1: TypeError"),
        ("--optimizer torch.optim.LBFGS", "torch.optim.LBFGS takes no step on a float32 matrix"),
        ("--kwargs lr", "--kwargs takes key=value, not 'lr'"),
        ("--kwargs lr=1 lr=2", "--kwargs names an argument twice"),
        ("--adapter nothing", "unknown adapter 'nothing'"),
        ("--optimiser torch.optim.Muon", "no option --optimiser: did you mean --optimizer?"),
    ],
)
def test_bad_arguments_are_one_sentence(sweep, command, sentence):
    status, out, err = sweep("fingerprint", *command.split())
    assert (status, out) == (2, "")
    assert err.startswith("muon_lab.sweep: ")
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
