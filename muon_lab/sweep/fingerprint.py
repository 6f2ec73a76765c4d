"""``python -m muon_lab.sweep fingerprint``: which Muon is this?"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields

from muon_lab.nearest import nearest
from muon_lab.sweep import arguments

PROGRAM = f"{arguments.PROGRAM} fingerprint"

#: Columns of a printed card: those of the terminal, within these.
NARROWEST, WIDEST = 60, 120

DESCRIPTION = f"""Which Muon is this? A few synthetic steps of an optimizer tell its schedule and number format, its
scale, momentum, weight decay and eps, and what it does to extreme gradients; beside them stands the nearest setting of
optim.Muon, with the difference that remains.

{PROGRAM} --optimizer torch.optim.Muon --kwargs nesterov=false ns_steps=6

{PROGRAM} --optimizer pytorch_optimizer.Muon --kwargs ns_coeffs=polar_express --json"""


@dataclass(frozen=True)
class Options:
    """What is examined."""

    optimizer: str = "torch.optim.Muon"
    """Dotted path of a subclass of torch.optim.Optimizer."""
    kwargs: tuple[str, ...] = ()
    """Arguments of its constructor as key=value: Python literals, true, false, none, torch dtypes, or plain text."""
    adapter: str = "auto"
    """How it takes parameters: a list (parameters), a group with use_muon=True (groups), whichever of them its
    constructor accepts (auto), or the dotted path of a function of class, parameters and arguments."""
    json: bool = False
    """Print the card as one JSON object on standard output, and nothing else there."""


def run(given: Sequence[str]) -> None:
    """Examine the optimizer that a command line names, and print its card.

    Raises
    ------
    Help
        If help was asked for.
    ValueError
        If there is no such optimizer, or it cannot be made or stepped; one sentence.
    """
    known = [option.name for option in fields(Options)]
    for word in given:
        name = word.partition("=")[0].lstrip("-")
        if word.startswith("--") and name not in ("help", *known):
            raise ValueError(f"fingerprint has no option --{name}: did you mean --{nearest(name, known)}?")
    options: Options = arguments.with_tyro(given, Options, Options(), PROGRAM, DESCRIPTION)
    from muon_lab.studies.fingerprint import Subject, examine, subject

    named = [subject.keyword(text) for text in options.kwargs]
    if len(dict(named)) < len(named):
        raise ValueError(f"--kwargs names an argument twice: {' '.join(options.kwargs)}")
    cls, adapter = subject.load(options.optimizer), subject.adapter_named(options.adapter)
    found = examine(Subject(cls, dict(named), adapter, options.optimizer))
    width = min(max(shutil.get_terminal_size((WIDEST, 24)).columns, NARROWEST), WIDEST)
    print(json.dumps(found.data(), allow_nan=False) if options.json else found.text(width))
