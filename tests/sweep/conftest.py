"""Small experiments and a way to run the command line in this process."""

import pytest

from muon_lab.sweep.__main__ import main


@pytest.fixture
def sweep(tmp_path, capsys, monkeypatch):
    """Run a command line in an empty folder; return exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        status = main([str(word) for word in words])
        return (status, *capsys.readouterr())

    return run


SMALL = ("blockwise", "--source", "gaussian", "--rows", "8", "--cols", "32", "--tp", "1", "2", "--jobs", "1")


@pytest.fixture
def small():
    return SMALL
