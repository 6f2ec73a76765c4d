r"""How far X is from the polar factor P of G, without computing P: two numbers that the distance lies between.

For m <= n (a tall pair is transposed) let q be a symmetric positive definite matrix near :math:`(X X^T)^{-1/2}`, and
measure what it leaves over:

.. math:: W = q X, \qquad \Psi = I - W W^T, \qquad B = W G^T = M + N / 2, \qquad J = G - B^T W,

with M symmetric and :math:`N = B - B^T`. W is the direction of X, and X is :math:`T W` with :math:`T = q^{-1}`. The
distance then has three parts: the radial one, :math:`X - W`, seen in :math:`X X^T - I`; a rotation, seen in N; and a
tilt of the row space, seen in J.

Theorem
-------
Let :math:`\psi = \|\Psi\|_F < 1` and let M be positive definite with smallest eigenvalue :math:`\lambda`. Then G has
full rank, :math:`\sigma_{\min}(G) \ge h = \lambda / \sqrt{1 + \psi}`, and with :math:`F = P W^T - I` and the part Z of
W outside the row space of P:

1. :math:`\|X - P\|_F^2 = \|X - W\|_F^2 + \|T^{1/2} (W - P)\|_F^2 - \operatorname{tr}((T - I) \Psi)`, with the middle
   term between the extreme eigenvalues of T times :math:`\|W - P\|_F^2`.
2. :math:`\|W - P\|_F^2 = \|F\|_F^2 + \|Z\|_F^2`, and :math:`\|Z\|_F` is :math:`\sqrt{1 \pm \psi}` times the norm
   :math:`\zeta` of the sines of the angles between the two row spaces.
3. :math:`H F + F B = -N - P J^T` with :math:`H = (G G^T)^{1/2}`, hence :math:`\|F\|_F \le (\|N\|_F + \|P J^T\|_F) /
   (h + \lambda)` and :math:`\|P J^T\|_F \le \zeta \|J\|_F + \|B\|_2 \psi / \sqrt{1 - \psi}`.
4. :math:`\zeta \le \|J\|_F / h`, and :math:`\zeta \le \sqrt{1 + \psi} \|B^{-T} J\|_F`.
5. If :math:`K` is any skew matrix and :math:`R = N - M K - K M`, then :math:`F = -K + \Delta` with :math:`(h + \lambda)
   \|\Delta\|_F \le \|R\|_F + \|H F\|_F \|K\|_2 + \|N K - K N\|_F / 2 + \|P J^T\|_F` and :math:`\|H F\|_F \le
   (1 + \|F\|_2 / 2) \|N\|_F + \|P J^T\|_F`.

Proof. (1) Expand; :math:`X X^T = T (I - \Psi) T`. (2) The two parts of W are orthogonal; W and its own polar factor
have the same row space. (3) :math:`H P = G`, so both sides are :math:`B^T - B - P (I - W^T W) G^T`. In
:math:`\langle F, H F + F B \rangle` the skew part of B drops out, which leaves at least :math:`(h + \lambda)
\|F\|_F^2`. J splits into its part outside the row space of W, :math:`H P (I - \Pi)`, and the part inside, where
:math:`J W^T = B^T \Psi`. And :math:`x^T M x \le \|x\| \|W G^T x\|` gives h. (4) :math:`P (I - \Pi) = H^{-1} G (I -
\Pi)`, and :math:`B = (W P^T) H` gives :math:`H^{-1} = (W P^T)^T B^{-T}`. (5) Put -K + Δ into (3) and
:math:`H = M - N / 2 - H F`, which is :math:`H P W^T = B^T`; in the eigenbases of H and M, :math:`H F` is the right side
of :math:`H F + F M = -N - P J^T - F N / 2` times factors below 1.

Bound and estimate
------------------
(3) and (4) hold for errors of any size, but charge an error along a large singular value as if it were along the
smallest. (5) is the remedy: K solves the Lyapunov equation :math:`M K + K M = N`, and what it leaves is of second
order. So the bounds close up, to a relative width of a few :math:`\|N\|_F / \sigma_{\min}`, as long as that ratio is
below 1; beyond it they open to (3) and (4), and to the triangle inequality. The estimate is the first-order distance
itself: K in place of -F, :math:`M^{-1} J` in place of :math:`P (I - \Pi)`. It is no bound.

Where M is not certain to be positive definite, nothing above holds: W may point against G. Then the bounds are those
that every partial isometry P of the possible ranks obeys (the triangle inequality, and the distance of the singular
values of X to 0 and 1), and full rank is looked for in :math:`G G^T`. If it is not found there either, the rank is
undecided, `Certificate.smallest` is 0, and the bounds hold whether a doubtful direction counts or not.

Rounding
--------
Products along the long side are computed in a chosen dtype, everything on m × m matrices in float64. Each of the former
enters the bounds with its worst case (`bounds.rounded_gemm`); of the latter, the residuals of inverses and equations
are computed instead of trusted (`enclosures`), and `bounds.UNCOUNTED` covers a few roundings of norms. q may be
anything: it is W, as rounded, that is measured.

References
----------
Higham, *Functions of Matrices* (2008), sections 6.7 and 8.2; Li, *New perturbation bounds for the unitary polar
factor*, SIAM J. Matrix Anal. Appl. 16 (1995), of which (3) is a form with computable right side; Rump, *Verification of
positive definiteness*, BIT 46 (2006).
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from muon_lab.measure.bounds import UNCOUNTED, gemm, rounded_gemm, unit_roundoff
from muon_lab.measure.enclosures import (
    U64,
    Interval,
    Inverse,
    conjugate_gradients,
    diagonal,
    eye,
    inner,
    inverse,
    inverse_root,
    norm,
    of,
    positive,
    root,
    size,
    spectral,
)
from muon_lab.oracle.polar import ROUNDINGS, ROUNDOFF

#: An X with an entry above this gets no more than the triangle inequality; below it no product leaves float32.
CEILING: Final = 2.0**24

#: Inner length of a float32 product; longer ones are sums of such products in float64, so that their error stays put.
SLICE: Final = 256


class Certificate(NamedTuple):
    r"""What is known of X, each a float64 tensor with the batch axes.

    Attributes
    ----------
    orthogonality : tensor
        :math:`\|X X^T - I\|_F / \sqrt m`, on the short side m as all of these: the radial error, twice over.
    asymmetry : tensor
        :math:`\|W G^T - G W^T\|_F / 2 \|G\|_F`: the rotation.
    tilt : tensor
        :math:`\|G - (G W^T) W\|_F / \|G\|_F`: what part of G lies outside the row space of X; 0 for a square matrix.
    smallest : tensor
        A lower bound on :math:`\sigma_{\min}(G) / \|G\|_F`, or 0 where the rank of G is undecided.
    lower, upper : tensor
        :math:`\|X - P\|_F / \|P\|_F` is between them. A zero matrix G has P = 0, and both are :math:`\|X\|_F`.
    estimate : tensor
        The same to first order in rotation and tilt, drawn into the bounds. It is no bound. Directions in which G is
        rounding, or X below 1e-8 of its size, count as outside the range of G, and all that X has there as error.
    spectral_lower, spectral_upper : tensor
        :math:`\|X - P\|_2` is between them.
    """

    orthogonality: Float[Tensor, "*batch"]
    asymmetry: Float[Tensor, "*batch"]
    tilt: Float[Tensor, "*batch"]
    smallest: Float[Tensor, "*batch"]
    lower: Float[Tensor, "*batch"]
    upper: Float[Tensor, "*batch"]
    estimate: Float[Tensor, "*batch"]
    spectral_lower: Float[Tensor, "*batch"]
    spectral_upper: Float[Tensor, "*batch"]


def certify(
    X: Tensor,
    G: Tensor,
    *,
    steps: int | None = None,
    dtype: torch.dtype = torch.float64,
    roundoff: float = ROUNDOFF,
    operand: float = 0.0,
) -> Certificate:
    r"""Enclose the distance of X to the polar factor of G, by products and m × m factorizations.

    Eight products along the long side (five for a square matrix), about forty of m × m matrices, and two m × m
    eigendecompositions or `steps` of iterations; no singular value decomposition. It is meant for devices on which
    products are cheap: on a CPU it takes one to five times as long as the decomposition would.

    Parameters
    ----------
    X, G : tensor of shape (*batch, m, n)
        The update and what it was computed from: finite, of any floating dtype. The scale of G does not matter; a
        power of two in it changes no bit.
    steps : int or None
        How the two m × m equations are solved: by eigenvectors (None), or by so many steps of iterations made of
        products and Cholesky factors alone, which suits a GPU: `enclosures.inverse_root` for q (8 steps serve singular
        values of X from 1e-3 on) and `enclosures.conjugate_gradients` for K. The bounds hold for any number; they are
        wide with too few. Without eigenvectors there is no estimate where the theorem does not apply: it is `upper`.
    dtype : torch.dtype
        Of the products along the long side, float64 or float32.
    roundoff : float
        Unit roundoff of the numbers that G was stored in, as for `oracle.polar.polar`: where the smallest singular
        value is not certified to be above their noise, the rank counts as undecided.
    operand : float
        Unit roundoff of the operands of a product on this device, where it is not that of `dtype`:
        ``bounds.unit_roundoff("tf32")`` for a GPU that is allowed TF32.

    Returns
    -------
    Certificate
        On the device of X.

    Raises
    ------
    ValueError
        If X and G differ in shape or device, are no batch of matrices of real floating-point numbers, or have entries
        that are not finite; or if `steps` is below 1 or `dtype` neither float64 nor float32.

    Examples
    --------
    >>> G = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> X = torch.tensor([[0.9, 0.02, 0.0], [-0.02, 0.9, 0.02]])  # shrunk by 0.1, turned and tilted by 0.02
    >>> found = certify(X, G)
    >>> [f"{float(value):.4f}" for value in (found.lower, (X - G.sign()).norm() / 2**0.5, found.upper)]
    ['0.1026', '0.1030', '0.1039']
    """
    _check(X, G, steps, dtype)
    if X.numel() == 0:
        nothing = torch.zeros(X.shape[:-2], dtype=torch.float64, device=X.device)
        return Certificate(*[nothing] * len(Certificate._fields))
    if X.shape[-2] > X.shape[-1]:
        X, G = X.mT, G.mT
    wider = max(X.dtype.itemsize, G.dtype.itemsize) > dtype.itemsize
    products = _Products(dtype, max(operand, unit_roundoff(str(dtype)) if wider else 0.0))
    G = _scaled(G).to(dtype)
    noise = _noise(G, roundoff)
    tame = X.abs().amax(dim=(-2, -1)) <= CEILING
    split = _split(torch.where(of(tame), X, 0).to(dtype), products, steps)
    turn = _turn(split, G, products, steps, noise)
    length, scale = size(X), norm(G)
    known = turn.known & tame & (scale > 0)
    bounds, smallest = _by_theorem(split, turn, length), turn.smallest
    if not bool(known.all()):
        rank, singular = _rank(G, products, noise)
        anyway = _anyway(split, length, tame, rank)
        bounds = _Bounds(*(torch.where(known, a, b) for a, b in zip(bounds, anyway, strict=True)))
        smallest = torch.where(known, smallest, singular)
    return _certificate(split, turn, bounds, smallest, length, scale, tame)


@dataclass(frozen=True)
class _Products:
    """Products along the long side, with their worst case relative to the Frobenius norms of the two factors."""

    dtype: torch.dtype
    operand: float

    @property
    def eps(self) -> float:
        """Unit roundoff of the dtype."""
        return unit_roundoff(str(self.dtype))

    def gram(self, A: Float[Tensor, "*batch p n"], B: Float[Tensor, "*batch q n"]) -> Float[Tensor, "*batch p q"]:
        """Return A Bᵀ in float64, from slices of the long side that the dtype can sum."""
        if self.dtype == torch.float64:
            return A @ B.mT
        slices = zip(A.split(SLICE, dim=-1), B.split(SLICE, dim=-1), strict=True)
        return torch.stack([(a @ b.mT).double() for a, b in slices]).sum(dim=0)

    def left(self, q: Float[Tensor, "*batch p m"], A: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch p n"]:
        """Return q A in the dtype."""
        return q.to(self.dtype) @ A

    def gram_error(self, n: int) -> float:
        """Bound the error of `gram`, the float64 sum of the slices included."""
        length = n if self.dtype == torch.float64 else min(n, SLICE)
        return rounded_gemm(length, self.operand, self.eps, 0.0) + 2 * gemm(-(-n // length), U64)

    def left_error(self, m: int) -> float:
        """Bound the error of `left`, rounding q to the dtype and one more addition included."""
        return rounded_gemm(m + 1, max(self.operand, self.eps), self.eps, 0.0)


@dataclass(frozen=True)
class _Split:
    """The direction W of X, and X - W between bounds: the radial part of the distance."""

    W: Tensor  # (*batch, m, n), rows orthonormal up to psi
    T: Tensor  # (*batch, m, m), about the inverse of q
    gram: Tensor  # X Xᵀ
    gram_error: Tensor
    rest: Tensor  # (X - W) (X - W)ᵀ
    sound: Tensor  # whether the bounds below hold
    psi: Tensor
    slip: Tensor  # at least ‖X - q⁻¹ W‖
    radial: Interval
    spectral: Interval
    stretch: Interval  # the eigenvalues of q⁻¹


@dataclass(frozen=True)
class _Overlap:
    """B = W Gᵀ = M + N / 2 up to an error, and the inverse of M."""

    B: Tensor
    M: Tensor
    N: Tensor
    error: Tensor
    largest: Tensor  # at least ‖B‖_2
    inverse: Inverse  # of M as computed

    @property
    def least(self) -> Float[Tensor, "*batch"]:
        """At most the smallest eigenvalue of M, and 0 where that is not certain to be positive."""
        return (self.inverse.least - self.error).clamp(min=0)


@dataclass(frozen=True)
class _FirstOrder:
    """The solution of M K + K M = N with the inverse of M, and in the columns of U what range and sign M has."""

    K: Tensor
    inverse: Tensor
    U: Tensor
    kept: Tensor  # (*batch, m), 1 in the range of G and 0 outside
    sign: Tensor  # (*batch, m), -1 where W points against G


@dataclass(frozen=True)
class _Turn:
    """W - P between bounds: the rotation F within the row space, the sines of the angles out of it."""

    known: Tensor  # whether G has full rank and the bounds below hold
    smallest: Tensor
    asymmetry: Tensor
    tilt: Tensor
    rotation: Interval
    rotation_spectral: Tensor
    sines: Interval
    sines_spectral: Tensor
    estimate: Tensor


def _split(X: Float[Tensor, "*batch m n"], products: _Products, steps: int | None) -> _Split:
    """Find q, and measure how far W = q X is from orthonormal and from X."""
    m, n = X.shape[-2:]
    total, unit = norm(X), products.gram_error(n)
    gram = products.gram(X, X)
    q = inverse_root(gram, UNCOUNTED * products.eps * norm(gram), steps).to(products.dtype).double()
    W = products.left(q, X)
    psi = norm(eye(gram) - products.gram(W, W)) + unit * norm(W).square()
    moved = products.left_error(m) * norm(q) * total  # at least ‖W - q X‖
    narrow = root(1 - psi)
    E = X - W
    rest, length = products.gram(E, E), norm(E)
    cast = products.operand * total + 2 * products.eps * length  # X and E, rounded to the dtype
    hidden = unit * length.square() + m * n * torch.finfo(products.dtype).tiny
    below, above = spectral(rest)
    low, high = root(below - hidden) - cast, root(above + hidden) + cast
    longest = (1 + high / narrow) / (1 - moved / narrow)  # (T - I) W = X - W + T (W - q X)
    slip = longest * moved
    return _Split(
        W=W,
        T=(gram @ q + q @ gram) / 2,
        gram=gram,
        gram_error=unit * total.square(),
        rest=rest,
        sound=positive(q) & (psi < 0.5) & (moved < 0.5 * narrow),
        psi=psi,
        slip=slip,
        radial=((length - cast - slip).clamp(min=0), length + cast + slip),
        spectral=((low - slip).clamp(min=0), high + slip),
        stretch=((1 - (high + slip) / narrow).clamp(min=0), longest),
    )


def _overlap(split: _Split, G: Float[Tensor, "*batch m n"], products: _Products) -> _Overlap:
    """Multiply W and G, and certify the smallest eigenvalue of the symmetric part."""
    B = products.gram(split.W, G).to(products.dtype).double()
    error = (products.gram_error(G.shape[-1]) + products.eps) * norm(split.W) * norm(G)
    M, N = (B + B.mT) / 2, B - B.mT
    return _Overlap(B, M, N, error, spectral(M)[1] + norm(N) / 2 + error, inverse(M))


@dataclass(frozen=True)
class _Tilt:
    """J = G - Bᵀ W and what solving with M makes of it, as norms with their errors; zero for a square matrix."""

    outside: Tensor  # ‖J‖
    outside_error: Tensor
    solved: Tensor  # ‖M⁻¹ J‖
    solved_error: Tensor
    solved_spectral: Tensor
    gram: Tensor  # M⁻¹ J Jᵀ M⁻¹


def _tilt(
    split: _Split, overlap: _Overlap, inverse: Tensor, G: Float[Tensor, "*batch m n"], products: _Products
) -> _Tilt:
    """Measure what part of G lies outside the row space of W."""
    m, n = G.shape[-2:]
    if m == n:
        zero = torch.zeros_like(split.psi)
        return _Tilt(zero, zero, zero, zero, zero, torch.zeros_like(split.gram))
    J = G - products.left(overlap.B.mT, split.W)
    Z = products.left(inverse, J)
    unit, gram = products.left_error(m), products.gram(Z, Z)
    return _Tilt(
        outside=norm(J),
        outside_error=unit * (norm(overlap.B) * norm(split.W) + norm(G)),
        solved=norm(Z),
        solved_error=unit * norm(inverse) * norm(J),
        solved_spectral=root(spectral(gram)[1] + products.gram_error(n) * norm(Z).square()),
        gram=gram,
    )


def _turn(
    split: _Split,
    G: Float[Tensor, "*batch m n"],
    products: _Products,
    steps: int | None,
    noise: Float[Tensor, "*batch"],
) -> _Turn:
    """Bound the distance of W to the polar factor by parts 3 to 5 of the theorem."""
    overlap = _overlap(split, G, products)
    smallest = overlap.least / (1 + split.psi).sqrt()
    known = split.sound & (smallest > noise)
    seen = noise + UNCOUNTED * products.eps * norm(G)
    first = _by_steps(overlap, known, steps) if steps else _by_eigenvectors(overlap, known, seen)
    tilt = _tilt(split, overlap, first.inverse, G, products)
    estimate = _first_order_distance(split, first, tilt.gram)
    sines = _sines_above(split, overlap, tilt, tilt.solved)
    rotation, rotation_spectral = _rotation(split, overlap, tilt, sines, first.K)
    return _Turn(
        known=known,
        smallest=smallest,
        asymmetry=norm(overlap.N) / 2,
        tilt=tilt.outside,
        rotation=rotation,
        rotation_spectral=rotation_spectral,
        sines=(_sines_below(split, overlap, tilt, rotation_spectral), sines),
        sines_spectral=_sines_above(split, overlap, tilt, tilt.solved_spectral).clamp(max=1),
        estimate=torch.where(known, estimate, math.inf) if steps else estimate,
    )


def _sines_above(
    split: _Split, overlap: _Overlap, tilt: _Tilt, solved: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Return the smaller of the two bounds of part 4, the second in the norm in which M⁻¹ J is given."""
    wide = (1 + split.psi).sqrt()
    solved = solved + tilt.solved_error + tilt.outside_error / overlap.least
    left = (1 - overlap.inverse.residual) * (1 - _pull(overlap))
    sharp = torch.where(left > 0, wide * solved / left, math.inf)
    coarse = wide * (tilt.outside + tilt.outside_error) / overlap.least
    return torch.minimum(coarse, sharp).clamp(max=math.sqrt(overlap.M.shape[-1]))


def _sines_below(
    split: _Split, overlap: _Overlap, tilt: _Tilt, rotation_spectral: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Bound the sines from below, by the same quantities: P (I - Π) = H⁻¹ J = (I + F) B⁻ᵀ J."""
    inside = tilt.outside_error + (overlap.error + overlap.largest * split.psi) / root(1 - split.psi)
    grown = 1 + overlap.inverse.residual
    solved = (tilt.solved - tilt.solved_error) / grown - inside / overlap.least
    sharp = (1 - rotation_spectral).clamp(min=0) * solved / (1 + _pull(overlap))
    return torch.maximum(sharp, (tilt.outside - inside) / _largest(split, overlap, tilt)).clamp(min=0)


def _pull(overlap: _Overlap) -> Float[Tensor, "*batch"]:
    """Bound ‖M⁻¹ (M - Bᵀ)‖, by which solving with Bᵀ differs from solving with M."""
    left = 1 - overlap.inverse.residual
    skew = norm(overlap.inverse.matrix @ overlap.N) / 2 / left
    return torch.where(left > 0, skew + overlap.error / overlap.least, math.inf)


def _leak(split: _Split, overlap: _Overlap) -> Float[Tensor, "*batch"]:
    """Bound the part of J within the row space of W."""
    return overlap.largest * split.psi / root(1 - split.psi)


def _largest(split: _Split, overlap: _Overlap, tilt: _Tilt) -> Float[Tensor, "*batch"]:
    """Bound the spectral norm of G = Bᵀ W + J."""
    outside = tilt.outside + tilt.outside_error + _leak(split, overlap)
    return overlap.largest * (1 + split.psi).sqrt() + outside


def _rotation(
    split: _Split, overlap: _Overlap, tilt: _Tilt, sines: Float[Tensor, "*batch"], K: Float[Tensor, "*batch m m"]
) -> tuple[Interval, Float[Tensor, "*batch"]]:
    """Return ‖F‖_F between the bounds of parts 3 and 5, and a bound on ‖F‖_2."""
    M, N, error, m = overlap.M, overlap.N, overlap.error, overlap.M.shape[-1]
    wide = (1 + split.psi).sqrt()
    gap = overlap.least * (1 + 1 / wide)
    skew, turned = norm(N) + 2 * error, norm(K)
    turned_2 = root(spectral(K @ K.mT)[1])
    outside = sines.clamp(max=1) * (tilt.outside + tilt.outside_error) + _leak(split, overlap)
    coarse = ((skew + outside) / gap).clamp(max=2 * math.sqrt(2 * m))  # ‖P Wᵀ‖ + ‖I‖, and psi is below 1
    small = UNCOUNTED * gemm(m, U64) * norm(M) * turned
    left = norm(N - M @ K - K @ M) + small + 2 * error * (1 + 3 * turned_2)
    second = ((1 + coarse.clamp(max=3) / 2) * skew + outside) * turned_2 + norm(N @ K - K @ N) / 2
    off = (left + second + outside) / gap
    above = torch.minimum(coarse, turned + off)
    below = torch.maximum(turned - off, (skew - 4 * error) / (2 * _largest(split, overlap, tilt)))
    return (below.clamp(min=0), above), torch.minimum(above, turned_2 + off)


def _by_steps(overlap: _Overlap, known: Bool[Tensor, "*batch"], steps: int) -> _FirstOrder:
    """Solve M K + K M = N by conjugate gradients, where M is positive definite."""
    identity, everything = eye(overlap.M), torch.ones_like(overlap.M[..., 0])
    M, N = torch.where(of(known), overlap.M, identity), torch.where(of(known), overlap.N, 0.0)
    return _FirstOrder(conjugate_gradients(M, N, steps), overlap.inverse.matrix, identity, everything, everything)


def _by_eigenvectors(overlap: _Overlap, known: Bool[Tensor, "*batch"], noise: Float[Tensor, "*batch"]) -> _FirstOrder:
    """Solve M K + K M = N in the eigenbasis of M, where M has anything to divide by."""
    values, U = torch.linalg.eigh(overlap.M)
    kept = torch.linalg.vector_norm(overlap.B @ U, dim=-2) > noise[..., None]
    weight = values.abs()
    weight = torch.where(kept, weight.maximum(U64 * weight.amax(dim=-1, keepdim=True)), 0.0)
    sums = weight[..., :, None] + weight[..., None, :]
    K = U @ torch.where(sums > 0, U.mT @ overlap.N @ U / sums, 0.0) @ U.mT
    pseudo = (U * torch.where(weight > 0, 1 / weight, 0.0)[..., None, :]) @ U.mT
    inverse = torch.where(of(known), overlap.inverse.matrix, pseudo)
    return _FirstOrder((K - K.mT) / 2, inverse, U, kept.double(), torch.where(values < 0, -1.0, 1.0).double())


def _first_order_distance(split: _Split, first: _FirstOrder, tilt: Tensor) -> Float[Tensor, "*batch"]:
    r"""Return part 1 of the theorem with K for -F, relative.

    Direction by direction the ratio of what is turned away to what is left is the tangent t of an angle, and the
    squared distance :math:`2 - 2 \cos`, which is t² to first order and at most 2 however large t. Outside the range of
    G the polar factor has nothing, and all that X has there is error.
    """
    S = first.K @ first.K.mT + tilt
    tangent = diagonal(S, first.U)
    cosine = (1 + tangent).rsqrt()
    saturated = (2 * tangent / ((1 + tangent) * (1 + cosine))).sum(dim=-1) / tangent.sum(dim=-1)
    turned = inner(split.T, S) * torch.where(tangent.sum(dim=-1) > 0, saturated, 1.0)
    flipped = 4 * ((1 - first.sign) / 2 * first.kept * cosine * diagonal(split.T, first.U)).sum(dim=-1)
    radial = first.kept * diagonal(split.rest, first.U) + (1 - first.kept) * diagonal(split.gram, first.U)
    rank = first.kept.sum(dim=-1)
    return root(radial.sum(dim=-1) + turned + flipped) / root(rank).clamp(min=1)


class _Bounds(NamedTuple):
    """Bounds on ‖X - P‖, Frobenius (relative) and spectral."""

    lower: Tensor
    upper: Tensor
    spectral_lower: Tensor
    spectral_upper: Tensor


def _by_theorem(split: _Split, turn: _Turn, length: Float[Tensor, "*batch"]) -> _Bounds:
    """Put parts 1 and 2 together."""
    m, psi, slip = split.gram.shape[-1], split.psi, split.slip
    narrow, wide = root(1 - psi), (1 + psi).sqrt()
    below = turn.rotation[0].square() + (narrow * turn.sines[0]).square()
    above = turn.rotation[1].square() + (wide * turn.sines[1]).square()
    cross = split.radial[1] * psi / narrow  # |tr((T - I) Psi)|
    low = root(split.radial[0].square() + split.stretch[0] * below - cross) - slip
    high = root(split.radial[1].square() + split.stretch[1] * above + cross) + slip
    high = torch.minimum(high, length + math.sqrt(m))
    strain = split.spectral[0] / wide - split.stretch[1] * (1 - narrow) - slip  # of the singular values alone
    turned = root(turn.rotation_spectral.square() + (wide * turn.sines_spectral).square())
    return _Bounds(
        lower=low / math.sqrt(m),
        upper=high / math.sqrt(m),
        spectral_lower=torch.maximum(strain, low / math.sqrt(m)),
        spectral_upper=torch.minimum(split.spectral[1] + turned, high),
    )


def _anyway(split: _Split, length: Tensor, tame: Tensor, rank: Tensor) -> _Bounds:
    r"""Return what holds for every partial isometry of at least the rank; of rank 0, all of X is error.

    Its singular values are 0 and 1, so :math:`\sum_i \min(s_i, |s_i - 1|)^2` is in the way, and :math:`|s^4 - s^2|` is
    at most :math:`\max(3/8, s_1^2 (1 + s_1))` times that minimum.
    """
    m, n = split.W.shape[-2:]
    slack = UNCOUNTED * m * n * U64  # of the norms, as in `_certificate`
    below, above = spectral(split.gram)
    shortest = torch.where(tame, root(below - split.gram_error), length / math.sqrt(m))
    longest = torch.where(tame, root(above + split.gram_error), length)
    off = norm(split.gram @ split.gram - split.gram) - split.gram_error * (1 + 2 * norm(split.gram))
    off = torch.where(tame, off, 0.0) / (longest.square() * (1 + longest)).clamp(min=3 / 8)
    least = length / root(rank).clamp(min=1)
    too_long, too_short = length * (1 - slack) / math.sqrt(m) - 1, 1 - least * (1 + slack)
    low = torch.maximum(torch.maximum(too_long, too_short), off / math.sqrt(m))
    return _Bounds(
        lower=torch.where(rank > 0, low, length),
        upper=torch.where(rank > 0, 1 + least, length),
        spectral_lower=torch.where(rank > 0, torch.maximum(shortest - 1, 1 - longest), shortest),
        spectral_upper=torch.where(rank > 0, 1 + longest, longest),
    )


def _rank(G: Float[Tensor, "*batch m n"], products: _Products, noise: Float[Tensor, "*batch"]) -> Interval:
    r"""Return a lower bound on the rank of G, and one on the smallest singular value that is 0 unless the rank is full.

    From :math:`A = G G^T`, which squares what it says of the smallest; :math:`\operatorname{tr}(A)^2 \le r \|A\|_F^2`.
    """
    m, n = G.shape[-2:]
    A = products.gram(G, G)
    square = norm(G).square()
    error = products.gram_error(n) * square
    singular = root(inverse(A).least - error)
    singular = torch.where(singular > noise, singular, 0.0)
    above = (square - m * noise.square()).clamp(min=0)
    rank = torch.where(square > 0, (above / (norm(A) + error)).square().clamp(min=1, max=m), 0.0)
    return torch.where(singular > 0, float(m), rank), singular


def _certificate(
    split: _Split, turn: _Turn, bounds: _Bounds, smallest: Tensor, length: Tensor, scale: Tensor, tame: Tensor
) -> Certificate:
    """Divide by the norm of G, and allow for the rounding of the norms."""
    m, n = split.W.shape[-2:]
    zero = scale == 0
    slack = UNCOUNTED * m * n * U64 * (~zero).double()
    lower, upper = bounds.lower.clamp(min=0) * (1 - slack), bounds.upper * (1 + slack)
    orthogonality = torch.where(tame, norm(split.gram - eye(split.gram)), length.square()) / math.sqrt(m)
    return Certificate(
        orthogonality=orthogonality.clamp(max=torch.finfo(torch.float64).max),
        asymmetry=torch.where(zero, 0.0, turn.asymmetry / scale),
        tilt=torch.where(zero, 0.0, turn.tilt / scale),
        smallest=torch.where(zero, 0.0, smallest / scale * (1 - slack)),
        lower=lower,
        upper=upper,
        estimate=turn.estimate.clamp(lower, upper),
        spectral_lower=bounds.spectral_lower.clamp(min=0) * (1 - slack),
        spectral_upper=bounds.spectral_upper * (1 + slack),
    )


def _noise(G: Float[Tensor, "*batch m n"], roundoff: float) -> Float[Tensor, "*batch"]:
    """Return what a singular value must exceed to count, as `oracle.polar.polar` with the norm of G for the largest."""
    m, n = G.shape[-2:]
    spread = (math.sqrt(m) + math.sqrt(n)) / math.sqrt(m * n)
    return max(2 * n * U64, ROUNDINGS * roundoff * spread) * norm(G)


def _scaled(G: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """Return G over the power of two that brings its largest entry into [1, 2): by division, which is exact."""
    G = G if G.dtype == torch.float64 else G.float()
    largest = G.abs().amax(dim=(-2, -1), keepdim=True)
    return G / torch.where(largest > 0, largest / (2 * torch.frexp(largest).mantissa), 1.0)


def _check(X: Tensor, G: Tensor, steps: int | None, dtype: torch.dtype) -> None:
    """Say what is wrong with the arguments."""
    for name, A in (("X", X), ("G", G)):
        if not isinstance(A, Tensor) or A.ndim < 2 or not A.is_floating_point():
            given = f"of {A.dtype}, shape {tuple(A.shape)}" if isinstance(A, Tensor) else f"a {type(A).__name__}"
            raise ValueError(f"certify: {name} is {given}, needed a tensor (..., m, n) of real floating-point numbers")
        bad = int((~torch.isfinite(A)).sum())
        if bad:
            raise ValueError(f"certify: {bad} of the {A.numel()} entries of {name} are not finite, needed all finite")
    if X.shape != G.shape or X.device != G.device:
        raise ValueError(
            f"certify: X has shape {tuple(X.shape)} on {X.device} and G {tuple(G.shape)} on {G.device}, "
            "needed one shape on one device"
        )
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"certify: dtype is {dtype}, needed torch.float64 or torch.float32")
    if steps is not None and steps < 1:
        raise ValueError(f"certify: steps is {steps}, needed at least 1, or None for eigendecompositions")
