r"""Gradients and momenta recorded from a real training run.

A :class:`Recording` says everything that a run depends on: the model, the optimizer, the data order, and what to keep.
Training the small GPT of :mod:`muon_lab.problems.models` on the text of :mod:`muon_lab.problems.text` then gives, at
step :math:`t = 1, 2, \dots` and for each hidden matrix,

.. math:: G_t = \nabla L(W_{t-1}), \qquad M_t = \beta M_{t-1} + (1 - \beta) G_t, \quad M_0 = 0,

the gradient and the momentum as Muon keeps it, in float32. What is kept becomes a :class:`Stream`: the bytes of a
safetensors file, whose entries are called ``{kind}/{step}/{layer}``, for instance
``gradient/200/blocks.0.attention.qkv``. Equal recordings give equal bytes on one machine with one number of threads.

One stream is part of the package (:func:`committed`), so that every study can run on real matrices without training.
This command made it, and its provenance says so::

    python -m muon_lab.problems.streams --out FILE

Reading a stream's names and shapes needs no torch.
"""

import argparse
import hashlib
import importlib.resources
import io
import json
import os
import platform
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import product
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias

from muon_lab.problems import loaded

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from muon_lab.problems.models import GPTConfig

    Matrix: TypeAlias = Float[Tensor, "rows cols"]
else:  # importing this module must not import torch
    Matrix = GPTConfig = Any

KINDS = ("gradient", "momentum")
"""What is recorded of a layer."""

RECORDER = 1
"""Version of the recorder; a change of what a recording gives, or of its bytes, is a new version."""


_SIZES = ("width", "depth", "heads", "context", "vocabulary", "ratio")

_HELP = {
    "lr": "learning rate of AdamW",
    "betas": "both decays of AdamW",
    "weight_decay": "weight decay of AdamW",
    "batch": "sequences a step",
    "beta": "decay of the recorded momentum",
    "steps": "steps at which to record",
    "seed": "seeds the weights and the order of the data",
    "kinds": "what to record",
    "layers": "patterns of layers",
    "omit": "patterns of entries KIND/STEP/LAYER to leave out",
}


def _default_model() -> GPTConfig:
    from muon_lab.problems.models import GPTConfig

    return GPTConfig()


@dataclass(frozen=True)
class Recording:
    r"""Everything that a recorded stream depends on, besides the text.

    The optimizer is AdamW [1]_ on all parameters, at a constant learning rate.

    Parameters
    ----------
    model : GPTConfig
        Sizes of the model.
    lr, betas, weight_decay : float, pair of floats, float
        Settings of AdamW. With a rate of 3e-3 the default model reaches about 1.7 nats per byte in 200 steps.
    batch : int
        Sequences a step, each of the model's full context.
    beta : float
        Decay :math:`\beta` of the recorded momentum; it plays no part in the training.
    steps : tuple of int
        Steps at which to record, counted from 1, increasing; training ends after the last.
    seed : int
        Seeds the weights and then the order of the data.
    kinds : tuple of str
        Some of :data:`KINDS`.
    layers : tuple of str
        Patterns of the layers to record, by parameter name without ``.weight``; each must match one.
    omit : tuple of str
        Patterns of entry names ``{kind}/{step}/{layer}`` that are left out all the same.

    Raises
    ------
    ValueError
        If a value is outside its range.

    References
    ----------
    .. [1] Loshchilov, Hutter, *Decoupled Weight Decay Regularization* (2019), algorithm 2.

    Examples
    --------
    >>> Recording(steps=(10, 5))
    Traceback (most recent call last):
    ValueError: Recording: steps must be increasing integers from 1, got (10, 5)
    """

    model: GPTConfig = field(default_factory=_default_model)
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    batch: int = 8
    beta: float = 0.95
    steps: tuple[int, ...] = (20, 200)
    seed: int = 0
    kinds: tuple[str, ...] = KINDS
    layers: tuple[str, ...] = ("blocks.0.*", "blocks.3.*")
    omit: tuple[str, ...] = ("gradient/20/*",)  # keeps the committed file below 3 MB

    def __post_init__(self) -> None:
        for name, default in _defaults(self).items():
            if isinstance(default, tuple) and not isinstance(value := getattr(self, name), tuple):
                raise ValueError(f"Recording: {name} must be a tuple, got {value!r}")
        ranges = {
            "lr": (0 < self.lr < float("inf"), "a positive number"),
            "betas": (len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)"),
            "weight_decay": (0 <= self.weight_decay < float("inf"), "a number of at least 0"),
            "batch": (isinstance(self.batch, int) and self.batch >= 1, "an integer of at least 1"),
            "beta": (0 <= self.beta < 1, "a number in [0, 1)"),
            "steps": (_increasing(self.steps), "increasing integers from 1"),
            "seed": (isinstance(self.seed, int) and 0 <= self.seed < 2**63, "an integer in [0, 2^63)"),
            "kinds": (self.kinds and {*self.kinds} <= {*KINDS}, f"some of {', '.join(KINDS)}"),
            "layers": (len(self.layers) > 0, "at least one pattern"),
        }
        for name, (fits, needed) in ranges.items():
            if not fits:
                raise ValueError(f"Recording: {name} must be {needed}, got {getattr(self, name)!r}")

    def canonical(self) -> str:
        """All settings as JSON with sorted keys: equal recordings, equal text."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)


@dataclass(frozen=True)
class Entry:
    """One matrix of a stream: what it is, of which layer, at which step, and its shape."""

    name: str
    kind: str
    step: int
    layer: str
    rows: int
    cols: int


@dataclass(frozen=True, repr=False)
class Stream:
    """Recorded matrices, held as the bytes of a safetensors file.

    Iteration gives the entries, by kind, step and layer; ``stream[name]`` is the matrix of one, a fresh float32 tensor.

    Parameters
    ----------
    content : bytes
        The file.

    Raises
    ------
    ValueError
        If the bytes are no such file.

    Examples
    --------
    >>> stream = committed()
    >>> stream.select("momentum/200/*.qkv")[0]
    Entry(name='momentum/200/blocks.0.attention.qkv', kind='momentum', step=200, layer='blocks.0.attention.qkv', rows=288, cols=96)
    >>> stream["gradient/200/blocks.3.mlp.down"].shape
    torch.Size([96, 384])
    """  # noqa: E501 (the printed entry)

    content: bytes

    def __post_init__(self) -> None:
        header, start = self._header
        for name, entry in header.items():
            match entry:
                case {"dtype": "F32", "shape": [int(rows), int(cols)], "data_offsets": [int(begin), int(end)]}:
                    whole = end - begin == 4 * rows * cols and begin >= 0 and start + end <= len(self.content)
                case _:
                    whole = False
            if not whole or name.split("/")[0] not in KINDS or not re.fullmatch(r"\w+/\d+/.+", name):
                raise ValueError(
                    f"content: {name!r} must be a whole float32 matrix named KIND/STEP/LAYER, got {entry} in a file of "
                    f"{len(self.content)} bytes"
                )

    @cached_property
    def _file(self) -> tuple[dict[str, Any], int]:
        return loaded.safetensors_header(io.BytesIO(self.content))

    @cached_property
    def _header(self) -> tuple[dict[str, Any], int]:
        fields, start = self._file
        return {name: entry for name, entry in fields.items() if name != "__metadata__"}, start

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The matrices, by kind, step and layer."""
        header, _ = self._header
        named = []
        for name, entry in header.items():
            kind, step, layer = name.split("/", 2)
            named.append(Entry(name, kind, int(step), layer, *entry["shape"]))
        return tuple(sorted(named, key=lambda entry: (entry.kind, entry.step, _natural(entry.layer))))

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Where the matrices come from: command, recording, losses, SHA-256 of the text, versions."""
        metadata, _ = self._file
        found: dict[str, Any] = json.loads(metadata.get("__metadata__", {}).get("provenance", "{}"))
        return found

    @cached_property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the file."""
        return hashlib.sha256(self.content).hexdigest()

    def select(self, pattern: str) -> tuple[Entry, ...]:
        """Choose the entries whose names match a pattern with ``*``, ``?`` and ``[...]``.

        Raises
        ------
        ValueError
            If there are none; the message names the nearest.
        """
        chosen = {*loaded.selected([entry.name for entry in self.entries], pattern, "stream")}
        return tuple(entry for entry in self.entries if entry.name in chosen)

    def __getitem__(self, name: str) -> Matrix:
        import torch

        header, start = self._header
        if name not in header:
            raise ValueError(f"stream has no matrix named {name!r}{loaded.nearest_names(name, list(header))}")
        begin, end = header[name]["data_offsets"]
        raw = bytearray(self.content[start + begin : start + end])  # a copy: the bytes of the stream never change
        return torch.frombuffer(raw, dtype=torch.float32).reshape(header[name]["shape"])

    def __contains__(self, name: object) -> bool:
        return name in self._header[0]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __repr__(self) -> str:
        width = max([4, *(len(entry.name) for entry in self.entries)])
        rows = [f"{entry.name:{width}}  {entry.rows:5} × {entry.cols}" for entry in self.entries]
        return "\n".join([f"Stream of {len(self)} matrices, SHA-256 {self.sha256}", *rows])


def committed() -> Stream:
    """Read the stream that is part of the package: first and last block of the default model, early and late.

    Nothing is trained, and nothing but :meth:`Stream.__getitem__` imports torch.

    Examples
    --------
    >>> stream = committed()
    >>> len(stream), {entry.step for entry in stream} == {20, 200}
    (24, True)
    """
    return Stream(importlib.resources.files("muon_lab.problems").joinpath("data", "gpt.safetensors").read_bytes())


def recorded(recording: Recording, cache: str | Path | EllipsisType | None = ...) -> Stream:
    """Train the model and keep what the recording asks for, or read it where that was done before.

    The file of a recording is named by the SHA-256 of its settings, of the text and of the recorder's version, and
    appears whole or not at all, so that several processes may record into one folder.

    Parameters
    ----------
    recording : Recording
        What to train and what to keep.
    cache : folder, optional
        Where recorded streams are kept: :func:`cache_folder` unless given; None records afresh and keeps nothing.

    Raises
    ------
    ValueError
        If a pattern of the recording matches no layer or leaves nothing, if training gives a number that is not finite,
        or if the kept file is damaged.

    Examples
    --------
    >>> from muon_lab.problems.models import GPTConfig
    >>> tiny = GPTConfig(width=8, depth=1, heads=2, context=8)
    >>> recorded(Recording(tiny, steps=(2,), layers=("*.out",), omit=()), cache=None).entries
    (Entry(name='gradient/2/blocks.0.attention.out', kind='gradient', step=2, layer='blocks.0.attention.out', rows=8, cols=8), Entry(name='momentum/2/blocks.0.attention.out', kind='momentum', step=2, layer='blocks.0.attention.out', rows=8, cols=8))
    """  # noqa: E501 (the printed entries)
    if cache is None:
        return Stream(_record(recording, _silent))
    folder = cache_folder() if isinstance(cache, EllipsisType) else Path(cache)
    path = folder / f"{key(recording)}.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, _record(recording, _silent))
    try:
        return Stream(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} must be a recorded stream, got a damaged file, to be deleted: {error}") from error


def cache_folder() -> Path:
    """Folder of recorded streams: ``muon_lab/streams`` in ``XDG_CACHE_HOME``, else in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "muon_lab" / "streams"


def key(recording: Recording) -> str:
    """SHA-256 of all that decides what a recording gives: its settings, the text, the recorder's version."""
    from muon_lab.problems import text

    return hashlib.sha256(f"{RECORDER}\n{text.corpus().sha256}\n{recording.canonical()}".encode()).hexdigest()


def command(recording: Recording) -> str:
    """Write the command that makes a recording; settings at their defaults are not mentioned.

    Examples
    --------
    >>> command(Recording(seed=1, steps=(5, 50)))
    'python -m muon_lab.problems.streams --out FILE --steps 5 50 --seed 1'
    """
    words = ["python", "-m", "muon_lab.problems.streams", "--out", "FILE"]
    for settings in (recording.model, recording):
        for name, default in _defaults(settings).items():
            value = getattr(settings, name)
            if value != default:
                values = value if isinstance(value, tuple) else (value,)
                words += [_flag(name), *(shlex.quote(str(each)) for each in values)]
    return " ".join(words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Record a stream into a file, as the command line asks: 0 all well, 2 bad arguments, 130 interrupted."""
    given = vars(_parser().parse_args(arguments))
    out: Path = given.pop("out")
    try:
        if not out.parent.is_dir():
            raise ValueError(f"--out must lie in an existing folder, got {out}")
        recording = _recording(given)
        import torch

        torch.set_num_threads(1)  # the bits of a recording depend on their number; this is a program, not the library
        stream = Stream(_record(recording, _shown if sys.stderr.isatty() else _silent))
        _write(out, stream.content)
    except (ValueError, OSError) as error:
        print(f"streams: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"{out}: {len(stream)} matrices, {len(stream.content)} bytes, SHA-256 {stream.sha256}")
    return 0


def _record(recording: Recording, progress: Callable[[int, int, float], None]) -> bytes:
    """Train, and give the bytes of the stream; ``progress`` hears of step, last step and loss."""
    import torch
    from safetensors.torch import save

    from muon_lab.problems import models, text

    if recording.model.vocabulary < text.VOCABULARY:
        raise ValueError(
            f"Recording: model must have a vocabulary of at least {text.VOCABULARY}, one token a byte, "
            f"got {recording.model.vocabulary}"
        )
    corpus = text.corpus()
    generator = torch.Generator().manual_seed(recording.seed)
    model = models.GPT(recording.model, generator)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recording.lr, betas=recording.betas, weight_decay=recording.weight_decay
    )
    weights = {name.removesuffix(".weight"): weight for name, weight in models.matrices(model).items()}
    layers = {name for pattern in recording.layers for name in loaded.selected([*weights], pattern, "layers")}
    wanted = {
        (kind, step, layer)
        for kind, step, layer in product(recording.kinds, recording.steps, layers)
        if not any(fnmatchcase(_name(kind, step, layer), pattern) for pattern in recording.omit)
    }
    if not wanted:
        raise ValueError(f"Recording: omit must leave something to record, got {recording.omit!r}")

    momenta = {layer: torch.zeros_like(weights[layer]) for layer in layers}
    kept, losses = {}, {}
    batches = text.batches(corpus.train, recording.batch, recording.model.context, generator)
    for step, (inputs, targets) in zip(range(1, recording.steps[-1] + 1), batches, strict=False):
        optimizer.zero_grad()
        loss = model.loss(inputs, targets)
        if not loss.isfinite():
            raise ValueError(
                f"Recording: lr must keep the training finite, got {recording.lr} and a loss of {loss} at step {step}"
            )
        loss.backward()
        for layer, momentum in momenta.items():
            gradient = weights[layer].grad
            assert gradient is not None
            momentum.lerp_(gradient, 1 - recording.beta)
            for kind, value in zip(KINDS, (gradient, momentum), strict=True):
                if (kind, step, layer) in wanted:
                    kept[_name(kind, step, layer)] = value.clone()
        if step in recording.steps:
            losses[str(step)] = loss.item()
        optimizer.step()
        progress(step, recording.steps[-1], loss.item())
    provenance = {
        "command": command(recording),
        "losses": losses,
        "python": platform.python_version(),
        "recorder": RECORDER,
        "recording": json.loads(recording.canonical()),
        "text_sha256": corpus.sha256,
        "torch": torch.__version__,
    }
    # One key alone: the library writes several in random order, and the bytes would differ from run to run.
    return save(kept, metadata={"provenance": json.dumps(provenance, sort_keys=True, allow_nan=False)})


def _increasing(steps: tuple[int, ...]) -> bool:
    whole = all(isinstance(step, int) and step >= 1 for step in steps)
    return len(steps) > 0 and whole and list(steps) == sorted({*steps})


def _name(kind: str, step: int, layer: str) -> str:
    return f"{kind}/{step}/{layer}"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts block 2 before block 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _silent(step: int, last: int, loss: float) -> None:
    """Report nothing."""


def _shown(step: int, last: int, loss: float) -> None:
    """Report on one line of the terminal."""
    print(f"\rstep {step}/{last}  {loss:.3f} nats per byte", end="\n" if step == last else "", file=sys.stderr)


def _write(path: Path, content: bytes) -> None:
    """Write a file so that it appears whole or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(name).chmod(0o644)  # mkstemp's files are for their owner alone
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _defaults(settings: Any) -> dict[str, Any]:
    """Defaults of a dataclass by field, without the model, whose default is made when it is needed."""
    return {each.name: each.default for each in fields(settings) if each.default is not MISSING}


def _parser() -> argparse.ArgumentParser:
    """Make the command line; unset options stay unset, so the defaults stand in the dataclasses alone."""
    parser = argparse.ArgumentParser(
        prog="python -m muon_lab.problems.streams",
        description="Train the small GPT on Python's documentation and record gradients and momenta of its layers.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="safetensors file to write")
    model = parser.add_argument_group("model (defaults: models.GPTConfig)")
    for name in _SIZES:
        model.add_argument(_flag(name), type=int, metavar="N")
    recording = parser.add_argument_group("recording")
    for name, default in _defaults(Recording).items():
        sample = default[0] if isinstance(default, tuple) else default
        count = 2 if name == "betas" else "*" if name == "omit" else "+" if isinstance(default, tuple) else None
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        metavar = {int: "N", float: "X", str: "PATTERN"}[type(sample)]
        choices = KINDS if name == "kinds" else None
        recording.add_argument(
            _flag(name),
            type=type(sample),
            nargs=count,
            choices=choices,
            metavar=None if choices else metavar,
            help=f"{_HELP[name]} (default: {shown})",
        )
    return parser


def _recording(given: Mapping[str, Any]) -> Recording:
    """Make the recording that the command line describes."""
    from muon_lab.problems.models import GPTConfig

    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    sizes = {name: settings.pop(name) for name in _SIZES if name in settings}
    return Recording(GPTConfig(**sizes), **settings)


if __name__ == "__main__":
    sys.exit(main())
