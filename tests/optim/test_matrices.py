"""Views: every parameter comes back as it was, and what does not fit is refused by name."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.optim.matrices import FLATTENED, STACKED, TRANSPOSED, View, check_parameter, fused

CASES = {
    "matrix": (FLATTENED, (4, 3), ((1, 4, 3),)),
    "row": (FLATTENED, (1, 5), ((1, 1, 5),)),
    "empty": (FLATTENED, (0, 5), ((1, 0, 5),)),
    "convolution": (FLATTENED, (8, 4, 3, 3), ((1, 8, 36),)),
    "transposed": (TRANSPOSED, (3, 4), ((1, 4, 3),)),
    "transposed convolution": (View(rows=(1,)), (3, 4, 2, 2), ((1, 4, 12),)),
    "kernel of JAX": (View(rows=(-1,)), (3, 3, 5, 7), ((1, 7, 45),)),
    "two axes of rows": (View(rows=(0, 1)), (2, 3, 5), ((1, 6, 5),)),
    "experts": (STACKED, (3, 6, 4), ((3, 6, 4),)),
    "experts stored (in, out)": (View(batch=(0,), rows=(2,)), (3, 6, 4), ((3, 4, 6),)),
    "layers of experts": (View(batch=(0, 1), rows=(2,)), (2, 3, 6, 4), ((6, 6, 4),)),
    "experts last": (View(batch=(-1,)), (6, 4, 3), ((3, 6, 4),)),
    "qkv": (fused(4, 2, 2), (8, 3), ((1, 4, 3), (1, 2, 3), (1, 2, 3))),
    "qkv with gate": (fused(8, 8, 2, 2), (20, 6), ((1, 8, 6), (1, 8, 6), (1, 2, 6), (1, 2, 6))),
    "query groups": (fused(4, 1, 1, groups=3), (18, 5), ((1, 12, 5), (1, 3, 5), (1, 3, 5))),
    "heads": (View(head=2), (6, 5), ((3, 2, 5),)),
    "heads of qkv": (fused(4, 2, 2, head=2), (8, 3), ((2, 2, 3), (1, 2, 3), (1, 2, 3))),
    "heads of groups": (fused(4, 2, 2, groups=2, head=2), (16, 3), ((4, 2, 3), (2, 2, 3), (2, 2, 3))),
    "fused experts": (View(batch=(0,), rows=(1,), blocks=(4, 2)), (3, 6, 5), ((3, 4, 5), (3, 2, 5))),
}
every_case = pytest.mark.parametrize(("view", "shape", "shapes"), CASES.values(), ids=CASES.keys())


def numbered(shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@every_case
def test_the_round_trip_is_exact(view, shape, shapes):
    X = numbered(shape)
    parts = view.parts(X)
    assert view.shapes(shape) == shapes == tuple(tuple(part.shape) for part in parts)
    assert torch.equal(view.whole(parts, shape), X)


@every_case
def test_strides_do_not_matter(view, shape, shapes):
    X = numbered(shape)
    strided = X.permute(*reversed(range(X.ndim))).contiguous().permute(*reversed(range(X.ndim)))
    assert not X.numel() or min(shape) == 1 or not strided.is_contiguous()
    for part, same in zip(view.parts(X), view.parts(strided), strict=True):
        assert torch.equal(part, same)
    assert torch.equal(view.whole(view.parts(strided), shape), X)


def test_flattening_puts_the_rest_into_the_columns():
    X = numbered((4, 3, 2, 2))
    assert torch.equal(FLATTENED.parts(X)[0][0], X.flatten(1))


def test_rows_of_a_block_from_all_groups_form_one_matrix():
    """Rows are numbered: two groups of [q q k v]."""
    X = torch.arange(8.0)[:, None]
    queries, keys, values = fused(2, 1, 1, groups=2).parts(X)
    assert [p.flatten().tolist() for p in (queries, keys, values)] == [[0, 1, 4, 5], [2, 6], [3, 7]]


def test_heads_are_consecutive_rows():
    X = torch.arange(8.0)[:, None]
    queries, keys = fused(4, 2, head=2).parts(X[:6])
    assert queries.flatten(1).tolist() == [[0, 1], [2, 3]]
    assert keys.flatten(1).tolist() == [[4, 5]]
    grouped, _ = fused(2, 2, groups=2, head=2).parts(X)
    assert grouped.flatten(1).tolist() == [[0, 1], [4, 5]]


def test_a_stack_is_cut_along_its_first_axis():
    X = numbered((3, 2, 5))
    assert torch.equal(STACKED.parts(X)[0], X)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_any_fused_rows_come_back(blocks, groups, head, columns):
    view = fused(*(head * block for block in blocks), groups=groups, head=head)
    X = numbered((groups * head * sum(blocks), columns))
    assert torch.equal(view.whole(view.parts(X), X.shape), X)
    assert sum(count * m for count, m, _ in view.shapes(X.shape)) == len(X)


def test_a_view_of_another_part_order_does_not_come_back():
    X = numbered((8, 3))
    q, k, v = fused(4, 2, 2).parts(X)
    assert not torch.equal(fused(4, 2, 2).whole((q, v, k), X.shape), X)


def test_a_view_is_a_value():
    assert fused(4, 2, 2) == View(blocks=(4, 2, 2))
    assert len({FLATTENED, View(), STACKED}) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fused(4, 0), "needed positive integers"),
        (lambda: View(head=0), "needed positive integers"),
        (lambda: View(rows=()), "one for the rows"),
        (lambda: View(batch=(0,), rows=(0,)), "needed different axes"),
        (lambda: View(groups=2), "groups is 2 without blocks"),
        (lambda: fused(4, 3, head=2), r"blocks are \(4, 3\), needed multiples of head = 2"),
        (lambda: STACKED.shapes((3,), "w"), "w has 1 axes"),
        (lambda: STACKED.shapes((3, 4), "w"), "w has 2 axes, needed one for the columns"),
        (lambda: View(rows=(1, -1)).shapes((3, 4), "w"), "w has 2 axes, needed one for the columns .* all different"),
        (lambda: fused(8, 2, 2).shapes((20, 6), "qkv"), r"qkv has 20 rows .* needed 8 \+ 2 \+ 2 = 12"),
        (lambda: fused(4, 1, 1, groups=3).shapes((20, 6), "qkv"), r"needed 3 times 4 \+ 1 \+ 1 = 18"),
        (lambda: View(head=3).shapes((20, 6), "w"), "w has 20 rows .* needed a multiple of head = 3"),
        (lambda: check_parameter(torch.ones(()), None, "gain"), r"gain has shape \(\), needed a matrix"),
        (lambda: check_parameter(torch.ones(5), FLATTENED, "bias"), r"bias has shape \(5,\), needed a matrix"),
        (lambda: check_parameter(torch.ones(2, 3, 4), None, "w"), r"w has shape \(2, 3, 4\) and no view"),
        (lambda: check_parameter(torch.ones(2, 3) * 1j, None, "w"), "w has dtype torch.complex64"),
        (lambda: check_parameter(torch.ones(2, 3, dtype=torch.int32), None, "w"), "w has dtype torch.int32"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
