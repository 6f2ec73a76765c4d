"""Packages whose names load on first use, so that ``--help`` never waits for torch (PEP 562)."""

from collections.abc import Callable, Mapping
from importlib import import_module


def attach(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package.

    Parameters
    ----------
    package : str
        The package's ``__name__``.
    names : mapping from public name to the module it lives in
        A name equal to its module is the module itself.

    Examples
    --------
    >>> getter, _ = attach("muon_lab.polar", {"schedules": "schedules"})
    >>> getter("schedules").__name__
    'muon_lab.polar.schedules'
    """

    def getter(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{names[name]}")
        return module if names[name] == name else getattr(module, name)

    return getter, lambda: sorted(names)
