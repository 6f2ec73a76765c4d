"""Published implementations beside which the lab is timed; each is optional."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from muon_lab.nearest import unknown
from muon_lab.studies import methods
from muon_lab.studies.study import LeftOut

if TYPE_CHECKING:
    from torch import Tensor

    from muon_lab.polar import Orthogonalizer


@dataclass(frozen=True)
class Peer:
    """A published implementation: what it needs, what it can do, and how it is called."""

    name: str
    package: str
    install: str
    admits: Callable[[str, str], str | None]
    build: Callable[[str, int | None, str], "Orthogonalizer"]


def known() -> tuple[str, ...]:
    """Return the values of the axis `peer`."""
    return tuple(_PEERS)


def settle(peer: str, method: str, dtype: str) -> None:
    """Check that a peer is here and can do what is asked; raises ``ValueError`` or `LeftOut`."""
    if peer not in _PEERS:
        raise unknown("peer", peer, _PEERS)
    entry = _PEERS[peer]
    if find_spec(entry.package) is None:
        raise LeftOut(f"peer {peer!r} is missing: {entry.install}")
    reason = entry.admits(method, dtype)
    if reason:
        raise LeftOut(f"peer {peer!r} {reason}")


def build(peer: str, method: str, steps: int | None, dtype: str) -> "Orthogonalizer":
    """Return a peer's orthogonalizer."""
    return _PEERS[peer].build(method, steps, dtype)


def _anything(method: str, dtype: str) -> str | None:
    return None


def _torch_admits(method: str, dtype: str) -> str | None:
    if (method, dtype) == ("simple", "bfloat16"):
        return None
    return "iterates in bfloat16, one triple at every step: it is timed for method simple and dtype bfloat16 alone"


def _torch(method: str, steps: int | None, dtype: str) -> "Orthogonalizer":
    from torch.optim import _muon

    from muon_lab.polar import schedules

    schedule = schedules.get(method, steps)

    def orthogonalize(G: "Tensor") -> "Tensor":
        return _muon._zeropower_via_newtonschulz(G, schedule.coefficients[0], schedule.steps, 1e-7)

    return orthogonalize


def _schedules_alone(method: str, dtype: str) -> str | None:
    exact = method in methods.EXACT
    return "has none of the lab's exact methods, forms and starts" if exact or ":" in method else None


def _pytorch_optimizer(function: str) -> Callable[[str, int | None, str], "Orthogonalizer"]:
    def build(method: str, steps: int | None, dtype: str) -> "Orthogonalizer":
        from pytorch_optimizer.optimizer.utils import matrix

        from muon_lab.polar import schedules

        schedule = schedules.get(method, steps)

        def orthogonalize(G: "Tensor") -> "Tensor":
            return getattr(matrix, function)(
                G, schedule.steps, weights=schedule.coefficients, dtype=methods.dtype_named(dtype)
            )

        return orthogonalize

    return build


_INSTALL = "pip install -e '.[peers]' adds it"

_PEERS = {
    peer.name: peer
    for peer in (
        Peer("lab", "muon_lab", "", _anything, methods.build),
        Peer("torch", "torch", "torch.optim.Muon came with torch 2.9", _torch_admits, _torch),
        Peer(
            "pytorch_optimizer",
            "pytorch_optimizer",
            _INSTALL,
            _schedules_alone,
            _pytorch_optimizer("zero_power_via_newton_schulz_5"),
        ),
        Peer(
            "pytorch_optimizer_gram",
            "pytorch_optimizer",
            _INSTALL,
            _schedules_alone,
            _pytorch_optimizer("zero_power_via_gram_newton_schulz"),
        ),
    )
}
