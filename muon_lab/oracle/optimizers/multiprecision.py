r"""The same rules in as many digits as asked for, entry by entry, as judges of the float64 trajectories.

For matrices of a few rows and a few steps. Nothing here is shared with the float64 rules but their hyperparameters:
sums are written out, a schedule is run as the literal iteration instead of on singular values, and every float, of a
gradient or a hyperparameter, stands for the binary fraction that it is.

The rank of a momentum is that of exact arithmetic: `Muon.roundoff` is not used.
"""

from collections.abc import Callable, Iterable
from typing import Any

from mpmath import mp

from muon_lab.oracle import eigen
from muon_lab.oracle import multiprecision as exact
from muon_lab.oracle.optimizers.adam import AdamW
from muon_lab.oracle.optimizers.muon import AdaptiveMuon, Muon
from muon_lab.oracle.optimizers.soap import RMS_EPS, SOAP

#: The fields of a float64 state, as mpmath matrices or integers.
State = dict[str, Any]


def trajectory(rule: Any, W: Any, gradients: Iterable[Any], digits: int) -> list[State]:
    """Return the state after each gradient, in about `digits` digits.

    Parameters
    ----------
    rule : AdamW, Muon, AdaptiveMuon or SOAP
        The hyperparameters.
    W : rows of numbers, array of shape (m, n), or mpmath matrix
        The first weight.
    gradients : iterable of the same, or None
        A gradient that is missing or not finite changes nothing.
    digits : int
        Decimal digits, at least 1.

    Returns
    -------
    list of dict
        One a gradient, under the names of the fields of the float64 state, vectors as columns.

    Raises
    ------
    ValueError
        If `digits` is below 1.
    TypeError
        If the rule is none of these.

    Examples
    --------
    >>> states = trajectory(AdamW(lr=0.5, eps=1e-12), [[0]], [[[-3]], [[float("inf")]]], digits=30)
    >>> [mp.nstr(state["W"][0, 0], 15) for state in states]
    ['0.499999999999833', '0.499999999999833']
    """
    if digits < 1:
        raise ValueError(f"trajectory: digits is {digits}, needed at least 1")
    steps: dict[type, Callable[..., State]] = {AdamW: _adamw, Muon: _muon, AdaptiveMuon: _adaptive, SOAP: _soap}
    if type(rule) not in steps:
        known = ", ".join(cls.__name__ for cls in steps)
        raise TypeError(f"trajectory: rule is of type {type(rule).__name__}, needed one of {known}")
    with mp.workdps(digits + exact.GUARD):
        state: State = {"W": _read(W)}
        states = []
        for rows in gradients:
            G = None if rows is None else _read(rows)
            if G is not None and all(mp.isfinite(g) for g in G):
                state = steps[type(rule)](rule, state, G, digits)
            states.append(state)
        return states


def _adamw(rule: AdamW, state: State, G: Any, digits: int) -> State:
    W, G = _decayed(rule, state["W"], G)
    t = state.get("step", 0) + 1
    M, V, U = _adam(rule, state.get("M", 0 * G), state.get("V", 0 * G), G, t)
    return {"W": W - mp.mpf(rule.lr) * U, "step": t, "M": M, "V": V}


def _muon(rule: Muon, state: State, G: Any, digits: int) -> State:
    W, G = _decayed(rule, state["W"], G)
    M, C = _momentum(rule, state.get("M", 0 * G), G)
    D = _direction(rule, C, digits)
    return {"W": W - mp.mpf(rule.lr) * mp.mpf(rule.extra) * _scale(rule.scale, C, D) * D, "M": M}


def _adaptive(rule: AdaptiveMuon, state: State, G: Any, digits: int) -> State:
    muon, beta, eps = rule.muon, mp.mpf(rule.beta2), mp.mpf(rule.eps)
    W, G = _decayed(muon, state["W"], G)
    M, C = _momentum(muon, state.get("M", 0 * G), G)
    D = _direction(muon, C, digits)
    m, n = D.rows, D.cols
    if rule.second_moment == "adamuon":
        now = _entries(lambda d: d * d, D)
    elif rule.second_moment == "namo":
        now = mp.matrix([[_norm(G) ** 2]])
    elif m >= n:
        now = mp.matrix([[mp.fsum(D[i, j] ** 2 for j in range(n)) / n] for i in range(m)])
    else:
        now = mp.matrix([[mp.fsum(D[i, j] ** 2 for i in range(m)) / m for j in range(n)]])
    V = beta * state.get("V", 0 * now) + (1 - beta) * now
    if rule.second_moment == "adamuon":
        U = _entries(lambda d, v: d / (mp.sqrt(v) + eps), D, V)
    elif rule.second_moment == "namo":
        U = _norm(C) / (mp.sqrt(V[0, 0]) + eps) * D
    else:
        U = mp.matrix(m, n)
        for i in range(m):
            for j in range(n):
                U[i, j] = D[i, j] / mp.sqrt(max(V[i, 0] if m >= n else V[0, j], eps))
        U = _norm(D) / max(_norm(U), eps) * U
    return {"W": W - mp.mpf(muon.lr) * mp.mpf(muon.extra) * _scale(muon.scale, C, D) * U, "M": M, "V": V}


def _soap(rule: SOAP, state: State, G: Any, digits: int) -> State:
    m, n = G.rows, G.cols
    if "seen" not in state:
        zeros = {"M": mp.zeros(m, n), "V": mp.zeros(m, n), "L": mp.zeros(m), "R": mp.zeros(n)}
        bases = {"Q_L": mp.eye(m), "Q_R": mp.eye(n), "Lambda_L": mp.zeros(m, 1), "Lambda_R": mp.zeros(n, 1)}
        state = {"W": state["W"], "step": 0, "seen": 0, **zeros, **bases}
    first = state["seen"] == 0
    if rule.order == "lagged" and not first:
        state = _soap_update(rule, state, G)
    state = _soap_factors(rule, state, G)
    number = state["step"] + (rule.order == "current")  # of the Adam step to which this refresh belongs
    if first or number % rule.frequency == 0:
        state = _soap_refresh(rule, state, first, digits)
    if rule.order == "current" and not (first and rule.first_step == "skip"):
        state = _soap_update(rule, state, G)
    return state


def _soap_factors(rule: SOAP, state: State, G: Any) -> State:
    m, n, t = G.rows, G.cols, state["seen"] + 1
    weight = 1 - mp.mpf(rule.shampoo_beta)  # of the new gradient
    if rule.correct_shampoo_bias:
        weight = weight / (1 - mp.mpf(rule.shampoo_beta) ** t)
    A, B = mp.eye(n), mp.eye(m)  # what stands between the gradient and its transpose
    if rule.kl:
        A = _inverse(state["Lambda_R"], state["Q_R"], mp.mpf(rule.eps)) / n
        B = _inverse(state["Lambda_L"], state["Q_L"], mp.mpf(rule.eps)) / m
    L, R = mp.zeros(m), mp.zeros(n)
    for i in range(m):
        for j in range(m):
            now = mp.fsum(G[i, k] * A[k, l] * G[j, l] for k in range(n) for l in range(n))  # noqa: E741
            L[i, j] = state["L"][i, j] + weight * (now - state["L"][i, j])
    for i in range(n):
        for j in range(n):
            now = mp.fsum(G[k, i] * B[k, l] * G[l, j] for k in range(m) for l in range(m))  # noqa: E741
            R[i, j] = state["R"][i, j] + weight * (now - state["R"][i, j])
    return {**state, "seen": t, "L": L, "R": R}


def _soap_refresh(rule: SOAP, state: State, first: bool, digits: int) -> State:
    V, M = state["V"], _between(state["Q_L"].T, state["M"], state["Q_R"].T)
    new = dict(state)
    for side, K in (("L", state["L"]), ("R", state["R"])):
        Q = state["Q_" + side]
        if rule.second_moment == "permuted":
            order = _by_rayleigh_quotient(K, Q)
            Q = _columns(Q, order)
            V = _columns(V.T, order).T if side == "L" else _columns(V, order)
        if first or rule.eigenbasis == "eigh":
            values, new_basis = eigen.exactly(K, digits)
        else:
            new_basis = _iterated(K, Q, rule.power_steps)
            if rule.second_moment != "permuted":
                new_basis = _columns(new_basis, _by_rayleigh_quotient(K, new_basis))
            values = mp.matrix([_rayleigh_quotient(K, new_basis, i) for i in range(K.rows)])
        if rule.second_moment == "rotated":
            overlap = _entries(lambda s: s * s, Q.T * new_basis)
            V = overlap.T * V if side == "L" else V * overlap
        new["Q_" + side], new["Lambda_" + side] = new_basis, values
    return {**new, "M": _between(new["Q_L"], M, new["Q_R"]), "V": V}


def _soap_update(rule: SOAP, state: State, G: Any) -> State:
    W, G = _decayed(rule, state["W"], G)
    t = state["step"] + 1
    M, V, U = _adam(rule, state["M"], state["V"], _between(state["Q_L"], G, state["Q_R"]), t)
    U = _between(state["Q_L"].T, U, state["Q_R"].T)
    if rule.max_rms is not None:
        rms = _norm(U) / mp.sqrt(U.rows * U.cols)
        U = min(mp.mpf(1), mp.mpf(rule.max_rms) / (rms + mp.mpf(RMS_EPS))) * U
    return {**state, "W": W - mp.mpf(rule.lr) * U, "step": t, "M": M, "V": V}


def _adam(rule: AdamW | SOAP, M: Any, V: Any, G: Any, t: int) -> tuple[Any, Any, Any]:
    """Return the new averages and the update of step t."""
    b1, b2, eps = mp.mpf(rule.betas[0]), mp.mpf(rule.betas[1]), mp.mpf(rule.eps)
    now, ahead, second = (1 - b1**t, 1 - b1 ** (t + 1), 1 - b2**t) if rule.correct_bias else (1, 1, 1)
    M = _entries(lambda m, g: m + (1 - b1) * (g - m), M, G)
    V = _entries(lambda v, g: v + (1 - b2) * (g * g - v), V, G)

    def update(m: Any, v: Any, g: Any) -> Any:
        top = b1 * m / ahead + (1 - b1) * g / now if rule.nesterov else m / now
        return top / (mp.sqrt(v / second) + eps)

    return M, V, _entries(update, M, V, G)


def _decayed(rule: AdamW | Muon | SOAP, W: Any, G: Any) -> tuple[Any, Any]:
    """Return the weight and the gradient after decay."""
    lr, decay = mp.mpf(rule.lr), mp.mpf(rule.weight_decay)
    if rule.decay == "l2":
        return W, G + decay * W
    return W - {"decoupled": lr * decay, "independent": decay, "palm": lr**2 * decay}[rule.decay] * W, G


def _momentum(rule: Muon, M: Any, G: Any) -> tuple[Any, Any]:
    """Return the buffer and the candidate."""
    mu = mp.mpf(rule.momentum)
    weight = 1 - mu if rule.form == "average" else mp.mpf(1)
    M = mu * M + weight * G
    return M, mu * M + weight * G if rule.nesterov else M


def _direction(rule: Muon, C: Any, digits: int) -> Any:
    """Return the polar factor on the range of C, or what the literal iteration makes of C."""
    if rule.coefficients is None:
        return exact.polar(C, digits).U
    return exact.newton_schulz(C, rule.coefficients, digits)


def _scale(mode: str, C: Any, D: Any) -> Any:
    """Return the factor of the direction."""
    m, n = mp.mpf(C.rows), mp.mpf(C.cols)
    if mode == "nuclear_norm":
        return mp.fsum(c * d for c, d in zip(C, D, strict=True))
    squares = {"none": 1, "spectral": max(m, n), "match_rms_adamw": max(m, n) / 25, "unit_rms_norm": m / n}
    return mp.sqrt({**squares, "shape_scaling": max(1, m / n)}[mode])


def _inverse(values: Any, Q: Any, floor: Any) -> Any:
    """Return the inverse of a factor whose values are kept above a floor."""
    A = mp.zeros(Q.rows)
    for k in range(Q.cols):
        A += Q[:, k] * Q[:, k].T / max(values[k], floor)
    return A


def _iterated(K: Any, Q: Any, steps: int) -> Any:
    """Return the basis after some products and decompositions with a nonnegative diagonal of R."""
    for _ in range(steps):
        Q, R = mp.qr(K * Q)
        for j in range(Q.cols):
            Q[:, j] = -Q[:, j] if R[j, j] < 0 else Q[:, j]
    return Q


def _rayleigh_quotient(K: Any, Q: Any, i: int) -> Any:
    """Return q^T K q for column i."""
    return mp.fsum(Q[k, i] * K[k, j] * Q[j, i] for k in range(K.rows) for j in range(K.rows))


def _by_rayleigh_quotient(K: Any, Q: Any) -> list[int]:
    """Return the order in which the quotients descend, equal ones as they are."""
    return sorted(range(Q.cols), key=lambda i: -_rayleigh_quotient(K, Q, i))


def _columns(A: Any, order: list[int]) -> Any:
    """Return the columns in another order."""
    B = mp.matrix(A.rows, A.cols)
    for to, column in enumerate(order):
        B[:, to] = A[:, column]
    return B


def _between(P: Any, X: Any, Q: Any) -> Any:
    """Return P^T X Q, sum by sum."""
    Y = mp.matrix(P.cols, Q.cols)
    for i in range(P.cols):
        for j in range(Q.cols):
            Y[i, j] = mp.fsum(P[k, i] * X[k, l] * Q[l, j] for k in range(X.rows) for l in range(X.cols))  # noqa: E741
    return Y


def _entries(function: Callable[..., Any], *matrices: Any) -> Any:
    """Return the matrix of function values."""
    first = matrices[0]
    return mp.matrix([[function(*(A[i, j] for A in matrices)) for j in range(first.cols)] for i in range(first.rows)])


def _norm(A: Any) -> Any:
    """Return the Frobenius norm."""
    return mp.sqrt(mp.fsum(a * a for a in A))


def _read(rows: Any) -> Any:
    """Return an mpmath matrix of exact numbers."""
    return mp.matrix([list(row) for row in (rows.tolist() if hasattr(rows, "tolist") else rows)])
