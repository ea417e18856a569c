import math

import numpy as np
import pytest
from helpers import (
    MASKS,
    assert_close,
    assert_equal,
    assert_gradients,
    distinct_primes,
    draw_mask,
    few,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import ScaledDotProductAttention, causal_mask

attention = ScaledDotProductAttention()


def draw_qkv(rng, sizes):
    B, h, T, S, d_k, d_v = sizes
    q = rng.standard_normal((B, h, T, d_k))
    return q, rng.standard_normal((B, h, S, d_k)), rng.standard_normal((B, h, S, d_v))


def loop_attention(q, k, v, mask, dy):
    """One item, one head, one query at a time, with the Jacobian of softmax written out."""
    B, h, T, d_k = q.shape
    S = k.shape[2]
    full = np.broadcast_to(True if mask is None else mask, (B, h, T, S))
    context, dq, dk, dv = np.zeros_like(dy), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(B):
        for i in range(h):
            for t in range(T):
                row = full[b, i, t]
                scores = np.array([q[b, i, t] @ k[b, i, s] / math.sqrt(d_k) for s in range(S)])
                scores = scores + row if row.dtype.kind == "f" else scores
                seen = np.isfinite(scores) if row.dtype.kind == "f" else row
                a = np.zeros(S)
                a[seen] = np.exp(scores[seen]) / np.exp(scores[seen]).sum()
                context[b, i, t] = a @ v[b, i]
                da = v[b, i] @ dy[b, i, t]
                ds = (np.diag(a) - np.outer(a, a)) @ da
                dq[b, i, t] += ds @ k[b, i] / math.sqrt(d_k)
                dk[b, i] += np.outer(ds, q[b, i, t]) / math.sqrt(d_k)
                dv[b, i] += np.outer(a, dy[b, i, t])
    return context, dq, dk, dv


@few(30)
@given(
    sizes=distinct_primes(6), rank=st.integers(2, 4), mask=st.sampled_from(MASKS),
    p=st.sampled_from([0.0, 0.3]), seed=seeds,
)  # fmt: skip
def test_gradients(sizes, rank, mask, p, seed):
    rng = np.random.default_rng(seed)
    mask = draw_mask(mask, rng, *sizes[:4])
    inputs = draw_qkv(rng, sizes)
    if rank < 4:  # fewer leading axes: (h, T, d_k), or (T, d_k) alone
        first = (0,) * (4 - rank)
        inputs = tuple(x[first] for x in inputs)
        if mask is not None and mask.ndim == 4:
            mask = np.broadcast_to(mask, sizes[:4])[first]
    layer = ScaledDotProductAttention(p)
    assert_gradients(layer, *inputs, mode="directional", mask=mask, rng=rng)


@given(sizes=distinct_primes(6), mask=st.sampled_from(MASKS), seed=seeds)
def test_equals_a_loop_over_items_heads_and_queries(sizes, mask, seed):
    rng = np.random.default_rng(seed)
    mask = draw_mask(mask, rng, *sizes[:4])
    q, k, v = draw_qkv(rng, sizes)
    context, ctx = attention.forward(q, k, v, mask)
    dy = rng.standard_normal(context.shape)
    expected = loop_attention(q, k, v, mask, dy)
    assert_close((context, *attention.backward(ctx, dy)), expected)


@given(mask=st.sampled_from(MASKS), p=st.sampled_from([0.0, 0.3]), seed=seeds)
@few(10)
def test_gradients_entry_by_entry(mask, p, seed):
    rng = np.random.default_rng(seed)
    sizes = 2, 1, 3, 5, 4, 7
    mask = draw_mask(mask, rng, *sizes[:4])
    layer = ScaledDotProductAttention(p)
    assert_gradients(layer, *draw_qkv(rng, sizes), mask=mask, rng=rng)


def test_fully_masked_row_values():
    q, k, v = [[[1.0, 0], [0, 1]]], [[[1.0, 0], [0, 1], [1, 1]]], [[[1.0], [2], [4]]]
    keep = np.array([[True, True, False], [False, False, False]])
    with np.errstate(all="raise"):
        context, ctx = attention.forward(q, k, v, keep)
        dq, dk, dv = attention.backward(ctx, np.ones((1, 2, 1)))
    slope = 0.156398596545
    expected = (
        [[[1.330238450673], [0]]],
        [[[-slope, slope], [0, 0]]],
        [[[-slope, 0], [slope, 0], [0, 0]]],
        [[[0.669761549327], [0.330238450673], [0]]],
    )
    for found, wanted in zip((context, dq, dk, dv), expected):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-15)
    assert not any(x[0, 1].any() for x in (context, dq, ctx.A)), "exactly zero"

    # a loss on row 0 only, and row 0 alone, give the same
    row0 = attention.backward(ctx, np.array([[[1.0], [0]]]))
    assert_equal(row0, (dq, dk, dv))
    alone, alone_ctx = attention.forward(np.array(q)[:, :1], k, v, keep[:1])
    assert_equal(alone[0, 0], context[0, 0])
    dq0, dk0, dv0 = attention.backward(alone_ctx, np.ones((1, 1, 1)))
    assert_close((dq0[0, 0], dk0, dv0), (dq[0, 0], dk, dv), 1e-15)


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("where", [np.s_[:, :, 1], np.s_[:, 1], np.s_[2], np.s_[...]])
def test_what_sees_nothing_is_exactly_zero(where, p, form):
    """A row of every item, a head, an item, everything."""
    rng = np.random.default_rng(0)
    q, k, v = draw_qkv(rng, (3, 2, 5, 7, 4, 6))
    keep = rng.random((3, 2, 5, 7)) < 0.8
    keep[..., 0] = True
    keep[where] = False
    mask = keep if form == "bool" else np.where(keep, 0.0, -np.inf)
    layer = ScaledDotProductAttention(p)
    with np.errstate(all="raise"):
        context, ctx = layer.forward(q, k, v, mask, rng)
        dq, dk, dv = layer.backward(ctx, rng.standard_normal(context.shape))
    for array in context, ctx.A, ctx.A_dropped, dq:
        assert (array[where] == 0).all()
    assert all(np.isfinite(x).all() for x in (context, ctx.A, dq, dk, dv))
    nothing_sees = ~keep.any(axis=-2)
    assert (dk[nothing_sees] == 0).all()
    assert (dv[nothing_sees] == 0).all()
    assert_close(ctx.A.sum(axis=-1), keep.any(axis=-1).astype(float))


def test_mask_polarity():
    q = k = np.zeros((1, 2, 2))
    v = [[[1.0], [3]]]
    keep = np.array([[True, False], [True, True]])
    np.testing.assert_array_equal(attention(q, k, v, keep)[0, :, 0], [1, 2])
    np.testing.assert_array_equal(attention(q, k, v, ~keep)[0, :, 0], [3, 0])
    bias = np.where(keep, 0.0, -np.inf)
    np.testing.assert_array_equal(attention(q, k, v, bias)[0, :, 0], [1, 2])


@given(sizes=distinct_primes(6), seed=seeds)
def test_boolean_and_additive_mask_agree_exactly(sizes, seed):
    rng = np.random.default_rng(seed)
    inputs = draw_qkv(rng, sizes)
    keep = draw_mask("blind rows", rng, *sizes[:4])
    bias = np.where(keep, 0.0, -np.inf)
    outcomes = []
    for mask in keep, bias, bias.astype(np.float32), bias.astype(np.float16):
        context, ctx = attention.forward(*inputs, mask)
        outcomes.append((context, *attention.backward(ctx, np.ones_like(context))))
    for outcome in outcomes[1:]:
        assert_equal(outcome, outcomes[0])


@pytest.mark.parametrize(
    ("T", "S", "expected"),
    [(2, 5, [3.75, 6.2]), (1, 5, [6.2]), (3, 2, [0, 1, 1.5]), (2, 2, [1, 1.5])],
)
def test_causal_values(T, S, expected):
    """Aligned at the last key: the queries come after S - T keys that were there before."""
    v = 2.0 ** np.arange(5)[:S, None]
    context = attention(np.zeros((T, 1)), np.zeros((S, 1)), v, causal_mask(T, S))
    np.testing.assert_allclose(context[:, 0], expected, rtol=1e-14)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_prompt_in_chunks(chunk):
    rng = np.random.default_rng(0)
    q, k, v = draw_qkv(rng, (2, 3, 7, 7, 4, 5))
    whole = attention(q, k, v, causal_mask(7))
    for start in range(7):
        stop = min(start + chunk, 7)
        mask = causal_mask(stop - start, stop)
        part = attention(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], mask)
        assert_close(part, whole[:, :, start:stop])


def test_future_does_not_move_a_bit():
    rng = np.random.default_rng(0)
    q, k, v = draw_qkv(rng, (2, 3, 7, 7, 4, 5))
    before = attention(q, k, v, causal_mask(7))
    for t in range(1, 7):
        q2, k2, v2 = (x.copy() for x in (q, k, v))
        for x in q2, k2, v2:
            x[:, :, t:] = 100 * rng.standard_normal(x[:, :, t:].shape)
        after = attention(q2, k2, v2, causal_mask(7))
        assert_equal(after[:, :, :t], before[:, :, :t])
        assert (after[:, :, t] != before[:, :, t]).any()


def test_scores_are_divided_by_the_root_of_d_k():
    q, k = np.full((1, 4), 2.0), np.array([[1.0] * 4, [0.0] * 4])
    context, ctx = attention.forward(q, k, np.eye(2))
    assert_close(ctx.A[0, 0], 1 / (1 + math.exp(-8 / 2)))
    assert_close(context[0], ctx.A[0])


def test_weights_are_dropped_after_softmax():
    rng = np.random.default_rng(0)
    q, k, v = draw_qkv(rng, (2, 3, 5, 7, 4, 6))
    layer = ScaledDotProductAttention(0.5)
    context, ctx = layer.forward(q, k, v, rng=rng)
    assert_close(ctx.A.sum(axis=-1), np.ones((2, 3, 5)))
    kept = ctx.A_dropped != 0
    assert 0.3 < kept.mean() < 0.7
    assert_close(ctx.A_dropped[kept], 2 * ctx.A[kept])
    assert_close(context, ctx.A_dropped @ v)
    assert_equal(layer(q, k, v), attention(q, k, v))


def test_nan_in_the_value_of_a_masked_key_spreads():
    """The documented limit: 0 * NaN is NaN."""
    v = np.array([[np.nan], [1.0]])
    context = attention(np.zeros((1, 1)), np.zeros((2, 1)), v, [[False, True]])
    assert np.isnan(context).all()


def test_no_key_at_all():
    q, k, v = np.ones((2, 3, 4)), np.ones((2, 0, 4)), np.ones((2, 0, 5))
    for mask in None, np.ones((3, 0), bool), np.zeros((2, 3, 0)):
        context, ctx = attention.forward(q, k, v, mask)
        assert_equal(context, np.zeros((2, 3, 5)))
        dq, dk, dv = attention.backward(ctx, context)
        assert_equal((dq, dk, dv), (np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)))


def shapes(q=(2, 3, 5, 4), k=(2, 3, 7, 4), v=(2, 3, 7, 6)):
    return np.zeros(q), np.zeros(k), np.zeros(v)


BAD_SHAPES = [
    ({"q": (1, 3, 5, 4)}, r"q \(1, 3, 5, 4\), k \(2, 3, 7, 4\)"),
    ({"q": (2, 1, 5, 4)}, r"q \(2, 1, 5, 4\)"),
    ({"k": (1, 3, 7, 4)}, r"k \(1, 3, 7, 4\)"),
    ({"v": (2, 1, 7, 6)}, r"v \(2, 1, 7, 6\)"),
    ({"q": (3, 5, 4)}, r"q \(3, 5, 4\)"),
    ({"q": (4,)}, r"q \(4,\)"),
    ({"q": (2, 3, 5, 6)}, "width d_k"),
    ({"q": (2, 3, 5, 1)}, "width d_k"),
    ({"q": (2, 3, 5, 0), "k": (2, 3, 7, 0)}, "width d_k"),
    ({"v": (2, 3, 5, 6)}, "same length S"),
    ({"v": (2, 3, 1, 6)}, "same length S"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD_SHAPES)
def test_shapes_are_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        attention(*shapes(**wrong))


@pytest.mark.parametrize(
    "shape",
    [(5,), (), (3, 5, 7), (2, 5, 7), (1, 1, 1), (7, 5), (5, 5), (2, 3, 7, 5), (3, 3, 5, 7),
     (2, 2, 5, 7), (1, 2, 3, 5, 7)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [bool, float])
def test_a_mask_that_does_not_fit(shape, dtype):
    with pytest.raises(ValueError, match=r"^mask has shape .*expected 2 dimensions"):
        attention(*shapes(), np.ones(shape, dtype))


@pytest.mark.parametrize(
    "shape", [(5, 7), (1, 7), (5, 1), (1, 1), (2, 3, 5, 7), (2, 1, 1, 7), (1, 3, 5, 1)]
)
def test_masks_broadcast_to_the_scores(shape):
    rng = np.random.default_rng(0)
    q, k, v = draw_qkv(rng, (2, 3, 5, 7, 4, 6))
    mask = rng.random(shape) < 0.5
    full = np.broadcast_to(mask, (2, 3, 5, 7)).copy()
    assert_equal(attention(q, k, v, mask), attention(q, k, v, full))


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int8])
def test_an_integer_mask_is_refused(dtype):
    with pytest.raises(TypeError, match=r"^mask has dtype .*astype\(bool\)"):
        attention(*shapes(), np.ones((5, 7), dtype))


@pytest.mark.parametrize("mask", [np.ones((5, 7), complex), np.full((5, 7), "x")])
def test_a_mask_of_something_else_is_refused(mask):
    with pytest.raises(TypeError, match=r"^mask has dtype"):
        attention(*shapes(), mask)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_dtypes_are_checked(which):
    inputs = dict(zip("qkv", shapes()))
    narrow = {**inputs, which: inputs[which].astype(np.float16)}
    with pytest.raises(TypeError, match=f"^{which} has dtype float16"):
        attention(**narrow)
    mixed = {**inputs, which: inputs[which].astype(np.float32)}
    with pytest.raises(TypeError, match=r"q, k, v have dtypes"):
        attention(**mixed)


@pytest.mark.parametrize("lowest", [-1e9, np.finfo(np.float32).min, np.finfo(np.float64).min])
def test_a_finite_bias_that_blocks(lowest):
    """-inf is the clean way; the largest finite numbers, which other code uses, do as well."""
    q, k, v = draw_qkv(np.random.default_rng(0), (2, 3, 5, 7, 4, 6))
    keep = np.tri(5, 7, dtype=bool)
    for dtype in np.float64, np.float32:
        inputs = [x.astype(dtype) for x in (q, k, v)]
        assert_equal(attention(*inputs, np.where(keep, 0.0, lowest)), attention(*inputs, keep))
