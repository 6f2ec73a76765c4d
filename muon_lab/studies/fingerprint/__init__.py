"""Which Muon is this? An unknown optimizer takes a few synthetic steps, and what it does to them says what it is.

Nothing is read from the source of the optimizer. Its steps are compared with each other (a mixture of two gradients
with one gradient, a scaled gradient with itself) and with what the lab's own polynomials would have done.

Examples
--------
>>> import torch
>>> from muon_lab.studies import fingerprint
>>> card = fingerprint.examine(fingerprint.Subject(torch.optim.Muon))
>>> card.findings["schedule"].said
'simple, 5 steps, the same as deepseekv4, 5 steps'
>>> card.findings["iteration"].value
'bf16'
>>> "scale='shape_scaling'" in str(card.setting)
True
"""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.studies.fingerprint.card import Card, Finding
    from muon_lab.studies.fingerprint.examination import examine
    from muon_lab.studies.fingerprint.setting import Setting
    from muon_lab.studies.fingerprint.subject import Subject, load

__all__ = ["Card", "Finding", "Setting", "Subject", "examine", "load"]
__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        **dict.fromkeys(("Card", "Finding"), "card"),
        "Setting": "setting",
        "examine": "examination",
        **dict.fromkeys(("Subject", "load"), "subject"),
    },
)
