"""Named matrices and what is known of them. NumPy float64, and independent of the package."""

import numpy as np


def orthonormal(n, k, seed):
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, k)))
    return q * np.where(np.diag(r) < 0, -1.0, 1.0)


def with_singular_values(m, n, sigma, seed=0):
    """Return an m×n matrix with the given singular values."""
    k = len(sigma)
    return (orthonormal(m, k, seed) * np.asarray(sigma, float)) @ orthonormal(n, k, seed + 1000).T


def polar_factor(G):
    """Return U Vᵀ of a thin SVD (null space filled)."""
    u, _, vt = np.linalg.svd(np.asarray(G, float), full_matrices=False)
    return u @ vt


def through_svd(G, function):
    """Return the exact result of a schedule that acts on normalised singular values."""
    G = np.asarray(G, float)
    largest = np.abs(G).max(initial=0.0)
    if largest == 0:
        return np.zeros_like(G)
    u, s, vt = np.linalg.svd(G / largest, full_matrices=False)
    return (u * function(s / np.linalg.norm(s))) @ vt


def distance(A, B):
    """Return the relative Frobenius distance of A to B."""
    return float(np.linalg.norm(np.asarray(A, float) - B) / np.linalg.norm(B))


#: Shapes that break careless code: square, wide, tall, one row, one column, one entry.
SHAPES = [(6, 6), (4, 9), (9, 4), (1, 7), (7, 1), (1, 1), (5, 17), (33, 7)]
