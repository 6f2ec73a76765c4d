"""What is wrong with the arguments of ``python -m muon_lab.parallel`` is one sentence, and status 2."""

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
