"""Under what a row was measured: versions, machine, threads. No clock, no host, no user, no path."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "scipy")


def measured() -> dict[str, Any]:
    """Return what bits depend on; called in the process that measures."""
    import numpy as np
    import torch

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        **source(),
        "python": platform.python_version(),
        **{name: installed(name) for name in PACKAGES},
        "cpu": cpu(),
        "blas": {"numpy": f"{blas['name']} {blas['version']}", "torch": _torch_blas(torch.__config__.show())},
        "threads": torch.get_num_threads(),
        "device": "cpu",
    }


def source() -> dict[str, Any]:
    """Return the version of the package, and its commit where it lies in its own git checkout; None for unknown."""
    return {"muon_lab": installed("muon-lab"), "commit": _git("rev-parse", "HEAD"), "dirty": _dirty()}


def installed(package: str) -> str | None:
    """Return the installed version of a package without its local tag, or None."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def cpu() -> str:
    """Return the model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _torch_blas(config: str) -> str:
    names = [part.partition("=")[2] for part in config.replace(",", "\n").split("\n") if "BLAS_INFO=" in part]
    return names[0] if names else "unknown"


def _dirty() -> bool | None:
    status = _git("status", "--porcelain", "--untracked-files=no", ".")
    return None if status is None else bool(status)


def _git(*arguments: str) -> str | None:
    """Return what git says of the checkout that this package is tracked in, or None without one."""
    folder = Path(__file__).parent.parent
    for command in (("ls-files", "--error-unmatch", "__init__.py"), arguments):
        try:
            answer = subprocess.run(
                ["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if answer.returncode:
            return None
    return answer.stdout.strip()
