r"""The one iteration engine: an odd polynomial schedule, applied to a matrix through its Gram matrix.

.. math:: A = X X^T, \qquad X \leftarrow a X + (b A + c A^2) X

with X wide (m ≤ n) and divided by its Frobenius norm at the start. A new coefficient set is a `Schedule`, a new number
format an `Arithmetic`, a new layout a function from orthogonalizer to orthogonalizer: this loop stays the only one.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.arithmetic import Arithmetic, Exact, check_arithmetic, unit
from muon_lab.polar import starts
from muon_lab.polar.schedules import Schedule, ScheduleWarning

Orthogonalizer = Callable[[Float[Tensor, "*batch m n"]], Float[Tensor, "*batch m n"]]

#: Unit roundoffs by which a singular value may start, and be pushed by the first products, above its exact value. With
#: a reach of three no rank-1 matrix escaped, with one of a third 1 in 20 did.
ROUNDINGS = 2

#: What a schedule does to a leading singular value outside the range that it is made for.
TURNS = "turns the leading singular direction around", "the schedule's image is negative"
ESCAPES = "may let the leading singular value run away, up to NaN", "rounding can lift it out of the schedule's reach"


@dataclass(frozen=True)
class NewtonSchulz:
    """The orthogonalizer that `newton_schulz` returns; two with the same fields are equal."""

    schedule: Schedule
    arithmetic: Arithmetic | tuple[Arithmetic, ...]
    start: str

    def __call__(self, G: Tensor) -> Float[Tensor, "*batch m n"]:
        """Return the approximate polar factor of each matrix."""
        for X in self.iterates(G):
            last = X
        return last.to(G.dtype).contiguous()

    def iterates(self, G: Tensor) -> Iterator[Float[Tensor, "*batch m n"]]:
        """Yield the normalised matrix, then one more after each step, in the arithmetic's own dtype."""
        scale, policies = starts.get(self.start), self._policies
        X = enter(G, policies[0])
        yield leave(X, G)
        if X.numel() == 0:
            return
        for step, ((a, b, c), arithmetic) in enumerate(zip(self.schedule.coefficients, policies, strict=True)):
            if arithmetic is not policies[max(step - 1, 0)]:
                X = arithmetic.store(X, X.dtype)
            A = arithmetic.gram(X)
            if step == 0:
                X, A = begin(X, A, scale, self.schedule, arithmetic)
            if c:
                X = arithmetic.matmul(arithmetic.square(A, alpha=c, beta=b), X, beta=a, C=X)
            else:
                X = arithmetic.matmul(A, X, alpha=b, beta=a, C=X)
            yield leave(X, G)

    @cached_property
    def _policies(self) -> tuple[Arithmetic, ...]:
        """The arithmetic of every step."""
        return self.arithmetic if isinstance(self.arithmetic, tuple) else (self.arithmetic,) * self.schedule.steps


def newton_schulz(
    schedule: Schedule,
    arithmetic: Arithmetic | Sequence[Arithmetic] = Exact(),  # noqa: B008 (a value)
    start: str = "frobenius",
) -> NewtonSchulz:
    r"""Return the orthogonalizer that applies a schedule in an arithmetic.

    The result of :math:`G = U \Sigma V^T` is :math:`U p(\Sigma / \|\Sigma\|) V^T`, an approximation of the polar factor
    :math:`U V^T`. It does not depend on the scale of G (entries from 1e-30 to 1e30 in float32), zero gives zero, null
    directions stay null, and a transposed, strided or expanded input gives the same bits.

    Parameters
    ----------
    schedule : Schedule
        From `schedules.get`, or your own.
    arithmetic : Arithmetic or sequence of Arithmetic
        How numbers are kept and multiplied; `Exact` by default. A sequence has one for each step.
    start : str
        What the matrix is divided by, after its Frobenius norm: one of `starts.known`.

    Returns
    -------
    NewtonSchulz
        A callable from a matrix ``(*batch, m, n)`` of any floating dtype to a new one of the same shape and dtype.
        Every matrix of a batch is normalised and iterated on its own. The input is never changed. It is a value:
        ``.schedule``, ``.arithmetic`` and ``.start`` tell what it was made of.

    Raises
    ------
    ValueError
        For what is no schedule, no arithmetic (`check_arithmetic`) or not one for each step, and for an unknown start;
        when called with fewer than two axes, with a dtype that is not real floating point, or with entries that are not
        finite.

    Warns
    -----
    ScheduleWarning
        If a matrix is so close to rank 1 that the schedule turns its leading direction around (`aol`), or that rounding
        may lift its leading singular value beyond the schedule's reach, from where it runs away (`Schedule.reach`:
        `cans`, `polar_express_raw`, any minimax design without safety). The default of Muon, `quintic`, has no need.

    References
    ----------
    K. Jordan et al., *Muon: An optimizer for hidden layers in neural networks*, 2024.
    N. J. Higham, *Functions of Matrices*, SIAM 2008, section 8.3.

    Examples
    --------
    >>> import torch
    >>> from muon_lab import polar
    >>> orthogonalize = polar.newton_schulz(polar.schedules.get("polar_express"))
    >>> G = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
    >>> orthogonalize(G).round(decimals=3)
    tensor([[1., 0., 0.],
            [0., 1., 0.]])
    >>> orthogonalize.schedule.name, orthogonalize.arithmetic, orthogonalize.start
    ('polar_express', Exact(dtype=None), 'frobenius')
    """
    check_schedule(schedule)
    starts.get(start)
    return NewtonSchulz(schedule, _checked(arithmetic, schedule), start)


def iterates(
    schedule: Schedule,
    arithmetic: Arithmetic | Sequence[Arithmetic] = Exact(),  # noqa: B008 (a value)
    start: str = "frobenius",
) -> Callable[[Float[Tensor, "*batch m n"]], Iterator[Float[Tensor, "*batch m n"]]]:
    """Return the map from a matrix to its iterates: the normalised matrix, then one more after each step.

    The iterates are in the arithmetic's own dtype. For the step at which something happens, and for nothing else:
    the last one is what `newton_schulz` returns.

    Examples
    --------
    >>> import torch
    >>> from muon_lab import polar
    >>> [round(float(X), 4) for X in polar.iterates(polar.schedules.get("simple", 3))(torch.tensor([[-7.0]]))]
    [-1.0, -0.701, -1.1136, -0.7207]
    """
    return newton_schulz(schedule, arithmetic, start).iterates


def enter(G: Tensor, arithmetic: Arithmetic) -> Float[Tensor, "*flat p q"]:
    """Return the matrix to iterate on: wide, with at most one batch axis, of Frobenius norm 1 (or 0) and stored.

    Raises
    ------
    ValueError
        As `newton_schulz`.
    """
    check(G)
    X = G.mT if _tall(G) else G
    X = (X.flatten(0, -3) if X.ndim > 3 else X).contiguous()  # the order of sums must not depend on strides
    if G.numel() == 0:
        return torch.zeros_like(X)
    norm = arithmetic.norm(X)
    if not torch.isfinite(norm).all():
        raise not_finite(G)
    return arithmetic.store(unit(X, norm), G.dtype)


def leave(X: Float[Tensor, "*flat p q"], G: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """Return a working matrix in the orientation and with the batch axes of the input."""
    return (X.mT if _tall(G) else X).reshape(G.shape)


def begin(
    X: Float[Tensor, "*flat p q"],
    A: Float[Tensor, "*flat p p"],
    scale: starts.Start | None,
    schedule: Schedule,
    arithmetic: Arithmetic,
) -> tuple[Float[Tensor, "*flat p q"], Float[Tensor, "*flat p p"]]:
    """Return the first iterate and its Gram matrix after the start; warn if the schedule is not made for them."""
    if scale is not None:
        rows = scale(A)
        X = arithmetic.store(X * rows, X.dtype)
        A = arithmetic.store(A * rows * rows.mT, A.dtype)
    if schedule.headroom < 1:
        _warn_beyond(schedule.headroom, A, schedule, TURNS)
    reach = schedule.reach / (1 + ROUNDINGS * arithmetic.roundoff(X.dtype))
    if reach < 1:
        _warn_beyond(reach, A, schedule, ESCAPES)
    return X, A


def check_schedule(schedule: Schedule) -> None:
    """Raise ``ValueError`` for what is not a schedule."""
    if not isinstance(schedule, Schedule):
        raise ValueError(f"schedule must be a Schedule, such as schedules.get('quintic'), not {schedule!r}")


def _checked(arithmetic: Arithmetic | Sequence[Arithmetic], schedule: Schedule) -> Arithmetic | tuple[Arithmetic, ...]:
    """Return one arithmetic, or the tuple of one a step; raise ``ValueError`` for anything else."""
    if isinstance(arithmetic, str) or not isinstance(arithmetic, Sequence):
        check_arithmetic(arithmetic)
        return arithmetic
    if len(arithmetic) != schedule.steps:
        raise ValueError(f"one arithmetic a step: {schedule.steps} are needed, {len(arithmetic)} were given")
    for step, one in enumerate(arithmetic):
        check_arithmetic(one, f"arithmetic of step {step}")
    return tuple(arithmetic)


def _tall(G: Float[Tensor, "*batch m n"]) -> bool:
    return G.shape[-2] > G.shape[-1]


def check(G: Tensor) -> None:
    """Raise ``ValueError`` unless G has the axes and the dtype of a matrix that can be orthogonalized."""
    if not isinstance(G, Tensor):
        raise ValueError(f"the matrix to orthogonalize must be a torch tensor, not {type(G).__name__}")
    if G.ndim < 2:
        raise ValueError(f"the matrix to orthogonalize needs at least 2 axes, but has shape {tuple(G.shape)}")
    if not G.is_floating_point():
        raise ValueError(f"the matrix to orthogonalize must be real floating point, but is {G.dtype}")


def not_finite(G: Tensor) -> ValueError:
    """Return the error that says how many entries of G are not finite."""
    bad = int((~torch.isfinite(G)).sum())
    return ValueError(f"the matrix to orthogonalize must be finite, but {bad} of its {G.numel()} entries are not")


def _warn_beyond(limit: float, A: Float[Tensor, "*batch m m"], schedule: Schedule, said: tuple[str, str]) -> None:
    """Warn that a leading singular value, by the Gram matrix A of the start, is above what the schedule is made for."""
    if _exceeds(A, limit**2):
        warnings.warn(
            f"schedule {schedule.name!r} {said[0]}: it starts above {limit:.7g} (a matrix of nearly rank 1), where "
            f"{said[1]}",
            ScheduleWarning,
            stacklevel=4,
        )


def _exceeds(A: Float[Tensor, "*batch m m"], limit: float) -> bool:
    r"""Return whether a leading eigenvalue is above a limit, in any of some Gram matrices.

    With :math:`\|A^k\|_F^2 = \sum_i \lambda_i^{2k}`, most are cleared, or not, without an eigenvalue:
    :math:`(\|A^4\|_F / \|A^2\|_F)^{1/2} \le \lambda_1 \le \|A^4\|_F^{1/4} \le \|A\|_F`.
    """
    A = A.reshape(-1, *A.shape[-2:])
    A = A if A.dtype == torch.float64 else A.float()
    A = A[torch.linalg.matrix_norm(A) > limit]
    if not A.numel():
        return False
    square = A @ A
    two, four = (torch.linalg.matrix_norm(power) for power in (square, square @ square))
    if ((four / two).sqrt() > limit).any():
        return True
    suspects = A[four**0.25 > limit]
    return bool(suspects.numel()) and bool((torch.linalg.matrix_norm(suspects, 2) > limit).any())
