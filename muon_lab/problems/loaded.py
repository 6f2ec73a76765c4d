"""The user's own matrices, from the files in which people keep them.

Three kinds of file are read, told apart by their extension: ``.safetensors``, ``.npz``, and what ``torch.save`` writes
(``.pt``, ``.pth``, ``.bin``, ``.ckpt``): weights, whole checkpoints, optimizer states. Nested dicts and lists are
flattened to dotted names such as ``state.0.momentum_buffer``. Nothing is executed: NumPy files are read without
pickles, torch files with ``weights_only=True``.

A matrix is a two-dimensional array of float64, float32, float16 or bfloat16 without infinities and NaNs, and keeps its
dtype. Arrays of other dimensions are left out with a note; matrices of other numbers are refused by name, since leaving
them out silently would change what is measured. Values that are no tensors (step counts, learning rates) are ignored.

Listing ``.safetensors`` and ``.npz`` files needs no torch, and one matrix at a time is in memory.
"""

import difflib
import hashlib
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import safetensors

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    Matrix: TypeAlias = Float[Tensor, "rows cols"]
else:  # importing this module must not import torch, and shapes are checked by hand below
    Matrix = Any

DTYPES = ("float64", "float32", "float16", "bfloat16")
"""What a matrix may be made of. Eight-bit floats mean nothing without the scales that are stored apart from them."""

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
"""The format's names of dtypes (https://huggingface.co/docs/safetensors, "Format") and torch's."""

BFLOAT16_EXPONENT = 0x7F80
"""The eight exponent bits of a bfloat16; all set means infinity or NaN."""


@dataclass(frozen=True)
class Entry:
    """One matrix of a file: its name, shape and dtype (torch's name of it)."""

    name: str
    rows: int
    cols: int
    dtype: str


@dataclass(frozen=True)
class Catalogue:
    """What a pattern selects from a file.

    Parameters
    ----------
    entries : tuple of Entry
        The matrices, in the order of the file, all of them finite.
    notes : tuple of str
        One sentence for every selected array that is not a matrix and was left out.
    sha256 : str
        Hexadecimal SHA-256 of the file.
    """

    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    sha256: str


def catalogue(path: str | Path, pattern: str = "*") -> Catalogue:
    """List the matrices of a file and check that each is usable.

    Parameters
    ----------
    path : str or Path
        A ``.safetensors``, ``.npz``, ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` file.
    pattern : str
        A name, or a pattern with ``*``, ``?`` and ``[...]``.

    Raises
    ------
    ValueError
        If the file is missing, of an unknown kind or damaged, if the pattern selects no matrix, or if a selected matrix
        is not of a floating-point dtype or not finite.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = Path(folder.name) / "layers.npz"
    >>> np.savez(path, up=np.ones((4, 2), np.float32), bias=np.zeros(4))
    >>> listed = catalogue(path)
    >>> listed.entries
    (Entry(name='up', rows=4, cols=2, dtype='float32'),)
    >>> listed.notes
    ("'bias' was left out: its shape is (4,), a matrix has two dimensions",)
    >>> folder.cleanup()
    """
    path = Path(path)
    entries, notes = [], []
    with _opened(path) as file:
        for name in selected(file.names, pattern, str(path)):
            stored = file.stored(name)
            if len(stored.shape) == 2:
                entries.append(_checked(path, stored))
            else:
                notes.append(f"{name!r} was left out: its shape is {stored.shape}, a matrix has two dimensions")
    if not entries:
        raise ValueError(
            f"{path}: pattern {pattern!r} must select a matrix, got only arrays of other shapes: {notes[0]}"
        )
    with path.open("rb") as raw:
        return Catalogue(tuple(entries), tuple(notes), hashlib.file_digest(raw, "sha256").hexdigest())


def matrix(path: str | Path, name: str) -> Matrix:
    """Read one matrix, in the dtype of the file.

    Parameters
    ----------
    path : str or Path
        The file.
    name : str
        The exact name of an entry of :func:`catalogue`.

    Raises
    ------
    ValueError
        As :func:`catalogue`, and if the name is not that of a matrix.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = Path(folder.name) / "layers.npz"
    >>> np.savez(path, up=np.ones((4, 2), np.float32))
    >>> matrix(path, "up").shape
    torch.Size([4, 2])
    >>> folder.cleanup()
    """
    path = Path(path)
    with _opened(path) as file:
        if name not in file.names:
            raise ValueError(f"{path} has no array named {name!r}{nearest_names(name, file.names)}")
        stored = file.stored(name)
        if len(stored.shape) != 2:
            raise ValueError(f"{path}: {name!r} must be a matrix, with two dimensions, got the shape {stored.shape}")
        _checked(path, stored)
        return stored.tensor()


def load(path: str | Path, pattern: str = "*") -> tuple[dict[str, Matrix], tuple[str, ...]]:
    """Read all matrices that a pattern selects, and the notes about what was left out.

    Parameters and errors are those of :func:`catalogue`.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = Path(folder.name) / "layers.npz"
    >>> np.savez(path, up=np.ones((4, 2)), bias=np.zeros(4))
    >>> matrices, notes = load(path)
    >>> list(matrices), len(notes)
    (['up'], 1)
    >>> folder.cleanup()
    """
    path = Path(path)
    listed = catalogue(path, pattern)
    with _opened(path) as file:
        return {entry.name: file.stored(entry.name).tensor() for entry in listed.entries}, listed.notes


def selected(names: Sequence[str], pattern: str, where: str) -> tuple[str, ...]:
    """Choose the names that equal a pattern or match it, in their order.

    Raises
    ------
    ValueError
        If there are none; the message says ``where``, and which names are nearest.

    Examples
    --------
    >>> selected(["blocks.0.up", "blocks.0.down", "head"], "blocks.*", "the model")
    ('blocks.0.up', 'blocks.0.down')
    """
    chosen = tuple(name for name in names if name == pattern or fnmatchcase(name, pattern))
    if not chosen:
        raise ValueError(
            f"{where}: pattern {pattern!r} selects none of the {len(names)} names{nearest_names(pattern, names)}"
        )
    return chosen


def safetensors_header(file: BufferedIOBase) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file, and where in the file its data begin.

    The format is eight bytes with the length of the header (little-endian), the header as JSON, then the data.

    Raises
    ------
    ValueError
        If the bytes end early or the header is no JSON object.
    """
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    header = file.read(length) if len(prefix) == 8 and length < 2**32 else b""  # the library's own limit is 100 MB
    try:
        fields = json.loads(header)
    except ValueError as error:
        raise ValueError("a safetensors file must begin with its header, got bytes that are none") from error
    if not isinstance(fields, dict):
        raise ValueError("the header of a safetensors file must be a JSON object, got something else")
    return fields, 8 + length


@dataclass(frozen=True)
class _Stored:
    """One array of an open file: what is known of it, and how to count its bad entries and to read it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nonfinite: Callable[[], int]
    tensor: Callable[[], Matrix]


@dataclass(frozen=True)
class _File:
    """An open file: the names of its arrays and access to one of them."""

    names: Sequence[str]
    stored: Callable[[str], _Stored]


def _checked(path: Path, stored: _Stored) -> Entry:
    """Refuse a matrix that cannot be measured."""
    if stored.dtype not in DTYPES:
        raise ValueError(
            f"{path}: {stored.name!r} has dtype {stored.dtype}, a matrix needs one of {', '.join(DTYPES)} "
            "(a pattern can leave it out)"
        )
    if bad := stored.nonfinite():
        raise ValueError(
            f"{path}: {bad} of the {stored.shape[0] * stored.shape[1]} entries of {stored.name!r} are not finite, a "
            "matrix needs finite entries (a pattern can leave it out)"
        )
    return Entry(stored.name, stored.shape[0], stored.shape[1], stored.dtype)


def nearest_names(wanted: str, names: Sequence[str]) -> str:
    """End a sentence with the most similar names, if there are any."""
    similar = difflib.get_close_matches(wanted, names, n=3, cutoff=0.0)
    return f", the nearest are {', '.join(map(repr, similar))}" if similar else ", since there are none"


@contextmanager
def _opened(path: Path) -> Iterator[_File]:
    """Open a file of any known kind."""
    if path.is_dir():
        raise ValueError(f"path must be a file of matrices, got the folder {path}")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"path must end in one of {' '.join(_READERS)}, got {path}")
    if not path.exists():
        beside = [other.name for other in path.parent.iterdir() if other.is_file()] if path.parent.is_dir() else []
        raise ValueError(f"there is no file {path}{nearest_names(path.name, beside) if beside else ''}")
    with reader(path) as file:
        yield file


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever a library raises about a damaged file into one sentence."""
    try:
        yield
    except Exception as error:  # damaged files make the readers raise nearly anything, from KeyError to zlib.error
        reason = (str(error).splitlines() or [""])[0].split(". ")[0]
        raise ValueError(
            f"{path} could not be read as {path.suffix.lower()}: {type(error).__name__} {reason}"
        ) from error


@contextmanager
def _safetensors(path: Path) -> Iterator[_File]:
    with _reading(path):
        with safetensors.safe_open(path, framework="np"):  # checks that header and data belong together
            pass
        with path.open("rb") as raw:
            header, start = safetensors_header(raw)
    header.pop("__metadata__", None)

    def stored(name: str) -> _Stored:
        shape = tuple(header[name]["shape"])
        dtype = SAFETENSORS_DTYPES.get(header[name]["dtype"], header[name]["dtype"])
        offset = start + header[name]["data_offsets"][0]

        def nonfinite() -> int:
            if dtype == "bfloat16":
                words = np.fromfile(path, "<u2", count=shape[0] * shape[1], offset=offset)
                return int(np.count_nonzero((words & BFLOAT16_EXPONENT) == BFLOAT16_EXPONENT))
            return _nonfinite(np.fromfile(path, np.dtype(dtype), count=shape[0] * shape[1], offset=offset))

        def tensor() -> Matrix:
            with safetensors.safe_open(path, framework="pt") as file:
                return file.get_tensor(name)

        return _Stored(name, shape, dtype, nonfinite, tensor)

    yield _File(list(header), stored)


@contextmanager
def _npz(path: Path) -> Iterator[_File]:
    with path.open("rb") as raw:  # opened here, since numpy.load leaves files that it cannot read open
        with _reading(path):
            archive = np.load(raw, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(f"{path} must be an archive of named arrays, as numpy.savez writes, got a single array")
        with archive:
            yield _File(archive.files, partial(_zipped, path, archive))


def _zipped(path: Path, archive: Any, name: str) -> _Stored:
    with _reading(path):
        array = archive[name]

    def tensor() -> Matrix:
        import torch

        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))

    return _Stored(name, array.shape, array.dtype.name, lambda: _nonfinite(array), tensor)


@contextmanager
def _torch(path: Path) -> Iterator[_File]:
    tensors: dict[str, Any] = {}
    for name, tensor in _flattened("", _unpickled(path)):
        if name in tensors:
            raise ValueError(f"{path} must give every tensor a name of its own, got {name!r} twice")
        tensors[name] = tensor

    def stored(name: str) -> _Stored:
        import torch

        tensor = tensors[name]
        if tensor.is_meta or tensor.layout is not torch.strided:
            raise ValueError(
                f"{path}: {name!r} must be a dense tensor with data, got layout {tensor.layout} on {tensor.device} "
                "(a pattern can leave it out)"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        return _Stored(name, tuple(tensor.shape), dtype, lambda: int((~tensor.isfinite()).sum()), lambda: tensor)

    yield _File(list(tensors), stored)


def _nonfinite(array: npt.NDArray[Any]) -> int:
    return array.size - int(np.count_nonzero(np.isfinite(array)))


def _unpickled(path: Path) -> object:
    """Load a torch file without executing anything, mapped rather than read where its format allows."""
    import torch

    with _reading(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pickle protocols and TorchScript archives: they load or they raise
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError as error:
            refused = re.search(r"(?:GLOBAL|class) (\S+)", str(error))
            cause, given = error, refused.group(1) if refused else "a pickle that torch.save did not write"
    raise ValueError(
        f"{path} must hold only tensors, numbers, strings, dicts and lists, as a state_dict does, since anything else "
        f"would run code when it is read, got {given}"
    ) from cause


def _flattened(prefix: str, value: object, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Name the tensors inside nested dicts and lists by the path that leads to them."""
    import torch

    if isinstance(value, torch.Tensor):
        yield prefix or "tensor", value.detach()
    elif isinstance(value, dict | list | tuple) and id(value) not in above:  # a pickle may contain itself
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flattened(f"{prefix}.{key}" if prefix else str(key), inner, (*above, id(value)))


_READERS: dict[str, Callable[[Path], AbstractContextManager[_File]]] = {
    ".safetensors": _safetensors,
    ".npz": _npz,
    ".pt": _torch,
    ".pth": _torch,
    ".bin": _torch,
    ".ckpt": _torch,
}
