"""The layout shows the idea: names, import directions, and where dtypes change."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MODULES = sorted((ROOT / "muon_lab").rglob("*.py"))


def test_imports_point_downwards():
    pytest.importorskip("importlinter")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_no_module_is_named_for_having_no_idea():
    assert not {path.stem for path in MODULES} & {"utils", "util", "helpers", "common", "base", "misc", "core"}


def test_annotations_are_evaluated():
    """Deferred annotations hide shapes from the run-time checker."""
    assert not [path for path in MODULES if "from __future__ import annotations" in path.read_text("utf-8")]


def calls(path, *names):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
            yield ast.unparse(node.func)


def test_nothing_ambient_is_set_inside_the_library():
    setters = ("manual_seed", "set_num_threads", "set_default_dtype", "set_float32_matmul_precision", "seed")
    owners = {"running.py", "streams.py"}  # what runs a case, and a command of its own
    for path in MODULES:
        found = [call for call in calls(path, *setters) if call.startswith(("torch.", "np.random.", "random."))]
        found = [call for call in found if not call.startswith("torch.Generator(")]  # an own one is nobody else's
        assert not found or path.name in owners, (path, found)


def test_the_newton_schulz_loop_is_written_once():
    """Whoever iterates over coefficients of a schedule with matrices is the engine, its Gram form, or the reference."""
    loops = [
        path.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.For)
        and "coefficients" in ast.unparse(node.iter)
        and any(word in ast.unparse(node) for word in ("gram(", "@"))
    ]
    assert set(loops) <= {"engine.py", "gram.py", "multiprecision.py"}


def test_every_module_says_what_it_is():
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), path
