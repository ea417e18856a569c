import copy
import re

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
    leaves,
    measured,
    run,
    seeds,
    walk,
)
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import ScaledDotProductAttention, causal_mask
from npdecoder.layers.dropout import DropoutContext
from npdecoder.layers.tiled_attention import TiledAttention

plain = ScaledDotProductAttention()
tiles = st.integers(1, 14)  # the largest length drawn is 13
masks = st.sampled_from(MASKS)
each_end = pytest.mark.parametrize("causal", [False, True])


def draw(rng, sizes, dtype=np.float64):
    """q, k, v and dy, read-only."""
    B, h, T, S, d_k, d_v = sizes
    shapes = (B, h, T, d_k), (B, h, S, d_k), (B, h, S, d_v), (B, h, T, d_v)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    for array in arrays:
        array.setflags(write=False)
    *qkv, dy = arrays
    return qkv, dy


def both_ways(layer, qkv, dy, **keywords):
    """The context, dq, dk and dv."""
    return leaves(run(layer, qkv, keywords, dy)[:2])


def assert_near(found, expected, tolerance=1e-12):
    """Within an absolute tolerance; NaN where NaN is expected."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def with_causal(mask, T, S):
    """The dense mask that stands for causal=True and this one."""
    keep = causal_mask(T, S)
    if mask is None:
        return keep
    return mask & keep if mask.dtype == bool else np.where(keep, mask, -np.inf)


# The same as ScaledDotProductAttention


@few(100)
@given(
    sizes=distinct_primes(6), rank=st.integers(2, 4), tile=tiles, causal=st.booleans(), mask=masks,
    seed=seeds,
)  # fmt: skip
def test_equals_attention_without_tiles(sizes, rank, tile, causal, mask, seed):
    rng = np.random.default_rng(seed)
    qkv, dy = draw(rng, sizes)
    mask = draw_mask(mask, rng, *sizes[:4])
    if rank < 4:  # fewer leading axes: (h, T, d_k), or (T, d_k) alone
        first = (0,) * (4 - rank)
        qkv, dy = [x[first] for x in qkv], dy[first]
        if mask is not None and mask.ndim == 4:
            mask = np.broadcast_to(mask, sizes[:4])[first]
    if mask is not None:
        mask.setflags(write=False)
    dense = with_causal(mask, *sizes[2:4]) if causal else mask
    expected = both_ways(plain, qkv, dy, mask=dense)
    assert_near(both_ways(TiledAttention(causal=causal, tile=tile), qkv, dy, mask=mask), expected)


@each_end
def test_equals_attention_without_tiles_at_a_length_of_2048(causal):
    rng = np.random.default_rng(0)
    qkv, dy = draw(rng, (1, 1, 2048, 2048, 16, 16))
    mask = (np.arange(2048) < 2000)[None, None, None, :]
    dense = with_causal(mask, 2048, 2048) if causal else mask
    expected = both_ways(plain, qkv, dy, mask=dense)
    assert_near(both_ways(TiledAttention(causal=causal), qkv, dy, mask=mask), expected)


@each_end
@pytest.mark.parametrize(
    "sizes",
    [(0, 3, 5, 7, 4, 6), (2, 0, 5, 7, 4, 6), (2, 3, 0, 7, 4, 6), (2, 3, 5, 0, 4, 6),
     (2, 3, 0, 0, 4, 6), (2, 3, 1, 7, 4, 6), (2, 3, 5, 1, 4, 6), (2, 3, 1, 1, 4, 6),
     (2, 3, 7, 7, 1, 1)],
)  # fmt: skip
def test_lengths_of_none_and_one(sizes, causal):
    qkv, dy = draw(np.random.default_rng(0), sizes)
    expected = both_ways(plain, qkv, dy, mask=causal_mask(*sizes[2:4]) if causal else None)
    assert_near(both_ways(TiledAttention(causal=causal, tile=3), qkv, dy), expected)


@pytest.mark.parametrize("tile", [2, 3, 8])
@pytest.mark.parametrize(
    "shape", [(5, 7), (1, 7), (5, 1), (1, 1), (2, 3, 5, 7), (2, 1, 1, 7), (1, 3, 5, 1)]
)
@pytest.mark.parametrize("dtype", [bool, float])
def test_masks_broadcast_to_the_scores(shape, tile, dtype):
    rng = np.random.default_rng(0)
    qkv, dy = draw(rng, (2, 3, 5, 7, 4, 6))
    mask = rng.random(shape) < 0.5 if dtype is bool else rng.standard_normal(shape)
    expected = both_ways(plain, qkv, dy, mask=mask)
    assert_near(both_ways(TiledAttention(tile=tile), qkv, dy, mask=mask), expected)


def test_strided_inputs():
    """As split_heads gives them: (B, T, h d) seen as (B, h, T, d)."""
    qkv, dy = draw(np.random.default_rng(0), (2, 7, 3, 3, 4, 6))
    qkv, dy = [x.swapaxes(1, 2) for x in qkv], dy.swapaxes(1, 2)
    assert_near(both_ways(TiledAttention(tile=2), qkv, dy), both_ways(plain, qkv, dy))


@pytest.mark.parametrize(
    ("T", "S", "expected"),
    [(2, 5, [3.75, 6.2]), (1, 5, [6.2]), (3, 2, [0, 1, 1.5]), (2, 2, [1, 1.5])],
)
@pytest.mark.parametrize("tile", [1, 2, 7])
def test_causal_values(T, S, expected, tile):
    """Aligned at the last key: the queries come after S - T keys that were there before."""
    v = 2.0 ** np.arange(5)[:S, None]
    context = TiledAttention(causal=True, tile=tile)(np.zeros((T, 1)), np.zeros((S, 1)), v)
    np.testing.assert_allclose(context[:, 0], expected, rtol=1e-14)


@pytest.mark.parametrize(("T", "S", "count"), [(12, 12, 10), (11, 14, 14), (14, 5, 3), (12, 3, 1)])
def test_tiles_that_no_query_may_see_are_left_out(T, S, count):
    seen = []

    class Watched(TiledAttention):
        def _scores(self, q, k, mask, i, j):
            seen.append((i, j))
            return super()._scores(q, k, mask, i, j)

    qkv, dy = draw(np.random.default_rng(0), (2, 1, T, S, 4, 3))
    both_ways(Watched(causal=True, tile=3), qkv, dy)
    assert seen[:count] == seen[count:], "backward computes those of forward again"
    keep = causal_mask(T, S)
    assert all(keep[i, j].any() for i, j in seen)


# Gradients


@few(30)
@given(
    sizes=distinct_primes(6), tile=tiles, causal=st.booleans(), mask=masks,
    p=st.sampled_from([0.0, 0.3]), seed=seeds,
)  # fmt: skip
def test_gradients(sizes, tile, causal, mask, p, seed):
    rng = np.random.default_rng(seed)
    mask = draw_mask(mask, rng, *sizes[:4])
    qkv, _ = draw(rng, sizes)
    layer = TiledAttention(p, causal, tile)
    assert_gradients(layer, *qkv, mode="directional", mask=mask, rng=rng)


@pytest.mark.parametrize("mask", ["none", "blind rows", "float"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@each_end
def test_gradients_entry_by_entry(mask, p, causal):
    rng = np.random.default_rng(0)
    sizes = 2, 1, 3, 5, 4, 7
    mask = draw_mask(mask, rng, *sizes[:4])
    qkv, _ = draw(rng, sizes)
    assert_gradients(TiledAttention(p, causal, 2), *qkv, mask=mask, rng=rng)


def test_backward_leaves_the_context_as_it_is_and_repeats_itself():
    rng = np.random.default_rng(0)
    layer = TiledAttention(0.3, causal=True, tile=3)
    qkv, dy = draw(rng, (2, 3, 5, 7, 4, 6))
    _, ctx = layer.forward(*qkv, rng=rng)
    for _, value in walk(ctx):
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    first = layer.backward(ctx, dy)
    other, _ = draw(rng, (2, 3, 11, 13, 4, 6))
    layer.forward(*other, rng=rng)
    assert_equal(layer.backward(ctx, dy), first)


# Dropout


def drawn_tile_by_tile(rng, p, tile, scores_shape):
    """keep (B, h, T, S), of what the layer draws from a generator in this state."""
    seed = int(copy.deepcopy(rng).integers(2**63))
    keep = np.ones(scores_shape, bool)
    for t in range(0, scores_shape[2], tile):
        for s in range(0, scores_shape[3], tile):
            here = keep[:, :, t : t + tile, s : s + tile]
            generator = np.random.Generator(np.random.PCG64([seed, t, s]))
            here[...] = generator.random(here.shape, np.float32) >= p
    return keep


@few(50)
@given(
    sizes=distinct_primes(6), tile=tiles, causal=st.booleans(), mask=masks,
    p=st.sampled_from([0.1, 0.5]), seed=seeds,
)  # fmt: skip
def test_dropout_equals_attention_without_tiles_and_the_same_weights_dropped(
    sizes, tile, causal, mask, p, seed
):
    rng = np.random.default_rng(seed)
    qkv, dy = draw(rng, sizes)
    mask = draw_mask(mask, rng, *sizes[:4])
    keep = drawn_tile_by_tile(rng, p, tile, sizes[:4])

    _, ctx = plain.forward(*qkv, with_causal(mask, *sizes[2:4]) if causal else mask)
    A_dropped = ctx.A * keep / (1 - p)
    dropped = DropoutContext(keep, keep.shape, dy.dtype)
    ctx = ctx._replace(A_dropped=A_dropped, dropout=dropped)
    expected = A_dropped @ qkv[2], *ScaledDotProductAttention(p).backward(ctx, dy)
    assert_near(
        both_ways(TiledAttention(p, causal, tile), qkv, dy, mask=mask, rng=rng), expected
    )


def test_dropout_does_not_depend_on_what_is_masked():
    rng = np.random.default_rng(0)
    qkv, dy = draw(rng, (2, 3, 7, 11, 4, 6))
    by_option = both_ways(TiledAttention(0.3, causal=True, tile=4), qkv, dy, rng=rng)
    by_mask = both_ways(TiledAttention(0.3, tile=4), qkv, dy, mask=causal_mask(7, 11), rng=rng)
    assert_near(by_option, by_mask)


def test_generator_in_the_same_state_gives_the_same():
    qkv, dy = draw(np.random.default_rng(0), (2, 3, 5, 7, 4, 6))
    layer = TiledAttention(0.3, tile=4)
    one, same, other = (
        both_ways(layer, qkv, dy, rng=np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert_equal(one, same)
    assert all((a != b).any() for a, b in zip(one, other))


def test_one_integer_is_drawn_where_dropout_happens_and_nothing_elsewhere():
    qkv, _ = draw(np.random.default_rng(0), (2, 3, 5, 7, 4, 6))
    rng, twin = np.random.default_rng(1), np.random.default_rng(1)
    context = TiledAttention(tile=2)(*qkv, rng=rng)
    assert rng.bit_generator.state == twin.bit_generator.state
    assert_equal(context, TiledAttention(0.3, tile=2)(*qkv))
    TiledAttention(0.3, tile=2)(*qkv, rng=rng)
    twin.integers(2**63)
    assert rng.bit_generator.state == twin.bit_generator.state


def test_dropout_of_everything():
    rng = np.random.default_rng(0)
    qkv, dy = draw(rng, (2, 3, 5, 7, 4, 6))
    layer = TiledAttention(1.0, tile=2)
    assert not any(x.any() for x in both_ways(layer, qkv, dy, rng=rng))
    assert layer(*qkv).any()


# What sees nothing, and numbers that are hard


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("where", [np.s_[:, :, 1], np.s_[:, 1], np.s_[2], np.s_[...]])
def test_what_sees_nothing_is_exactly_zero(where, p, form):
    """A row of every item, a head, an item, everything; and whole tiles of other rows."""
    rng = np.random.default_rng(0)
    qkv, dy = draw(rng, (3, 2, 5, 7, 4, 6))
    keep = rng.random((3, 2, 5, 7)) < 0.8
    keep[:, :, 2, :4] = False
    keep[:, :, 3, 2:] = False
    keep[..., 4, 2:4] = False
    keep[where] = False
    mask = keep if form == "bool" else np.where(keep, 0.0, -np.inf)
    with np.errstate(all="raise"):
        layer = TiledAttention(p, tile=2)
        context, dq, dk, dv = both_ways(layer, qkv, dy, mask=mask, rng=rng)
    assert all((x[where] == 0).all() for x in (context, dq))
    assert all(np.isfinite(x).all() for x in (context, dq, dk, dv))
    nothing_sees = ~keep.any(axis=-2)
    assert (dk[nothing_sees] == 0).all()
    assert (dv[nothing_sees] == 0).all()


def test_causal_queries_before_the_first_key_are_exactly_zero():
    qkv, dy = draw(np.random.default_rng(0), (2, 3, 7, 4, 5, 6))
    context, dq, _, _ = both_ways(TiledAttention(causal=True, tile=2), qkv, dy)
    assert all((x[:, :, :3] == 0).all() for x in (context, dq))
    assert all((x[:, :, 3:] != 0).any(axis=-1).all() for x in (context, dq[:, :, 1:]))


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("key", [0, 3, 6])
def test_a_row_with_nan_or_inf_is_nan_alone(number, key):
    rng = np.random.default_rng(0)
    qkv, dy = draw(rng, (2, 3, 5, 7, 4, 6))
    bias = rng.standard_normal((2, 3, 5, 7))
    bias[:, :, 1, key] = number
    expected = both_ways(plain, qkv, dy, mask=bias)
    found = both_ways(TiledAttention(tile=2), qkv, dy, mask=bias)
    assert_near(found, expected)
    for x in found[:2]:
        assert np.isnan(x[:, :, 1]).all()
        assert np.isfinite(np.delete(x, 1, axis=2)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble])
@pytest.mark.parametrize("mask", [None, "bool", np.float16, np.float64, np.longdouble])
def test_dtype_is_kept_and_computed_in(dtype, mask):
    rng = np.random.default_rng(0)
    qkv, dy = draw(rng, (2, 3, 5, 7, 4, 6), dtype)
    if mask is not None:
        mask = rng.random((5, 7)) < 0.5 if mask == "bool" else rng.random((5, 7)).astype(mask)
    for p in 0.0, 0.3:
        layer = TiledAttention(p, causal=True, tile=3)
        context, ctx = layer.forward(*qkv, mask, rng)
        arrays = context, ctx.m, ctx.Z, *layer.backward(ctx, dy)
        assert {x.dtype for x in arrays} == {np.dtype(dtype)}
    expected = both_ways(plain, qkv, dy, mask=mask)
    found = both_ways(TiledAttention(tile=3), qkv, dy, mask=mask)
    assert_close(found, expected, 50 * np.finfo(dtype).eps)


@each_end
def test_scores_of_ten_thousand_in_float32(causal):
    """Of whole numbers: the scores, near 10,000 or -10,000, have no rounding."""
    rng = np.random.default_rng(0)
    (_, _, v), dy = draw(rng, (2, 3, 5, 7, 4, 6), np.float32)
    q, k = (rng.integers(-2, 3, (2, 3, n, 4)).astype(np.float32) for n in (5, 7))
    q[..., 0] = 100 * rng.choice([-1, 1], (2, 3, 5))
    k[..., 0] = 200 * rng.choice([-1, 1], (2, 3, 7))
    found = both_ways(TiledAttention(causal=causal, tile=2), (q, k, v), dy)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    expected = both_ways(plain, wide, dy, mask=causal_mask(5, 7) if causal else None)
    assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("bias", [1e9, -1e9, 1e12])
def test_a_large_bias_of_all_keys_is_no_matter(bias):
    """exp(S - log-sum) would lose the weights in rounding; whole numbers keep the scores exact."""
    rng = np.random.default_rng(0)
    (_, _, v), dy = draw(rng, (2, 3, 5, 7, 4, 6))
    q, k = (rng.integers(-2, 3, (2, 3, n, 4)).astype(float) for n in (5, 7))
    layer = TiledAttention(tile=3)
    biased = both_ways(layer, (q, k, v), dy, mask=np.full((5, 7), bias))
    assert_near(biased, both_ways(plain, (q, k, v), dy))


@pytest.mark.parametrize("lowest", [-1e9, np.finfo(np.float32).min, np.finfo(np.float64).min])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_finite_bias_that_blocks(lowest, dtype):
    qkv, dy = draw(np.random.default_rng(0), (2, 3, 5, 7, 4, 6), dtype)
    keep = np.tri(5, 7, dtype=bool)
    layer = TiledAttention(tile=2)
    blocked = both_ways(layer, qkv, dy, mask=np.where(keep, 0.0, lowest))
    assert_equal(blocked, both_ways(layer, qkv, dy, mask=keep))


# Memory


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_memory_is_far_below_that_of_the_scores(p):
    T = 4096
    rng = np.random.default_rng(0)
    qkv, dy = draw(rng, (1, 1, T, T, 4, 4), np.float32)
    mask = np.ones((1, 1, 1, T), bool)
    layer = TiledAttention(p, causal=True)
    with measured() as memory:
        _, ctx = layer.forward(*qkv, mask, rng)
        layer.backward(ctx, dy)
    assert memory.peak < T * T * 4 / 30
    assert all(np.size(value) <= 4 * T for _, value in walk(ctx) if isinstance(value, np.ndarray))


# Errors


def shapes(q=(2, 3, 5, 4), k=(2, 3, 7, 4), v=(2, 3, 7, 6)):
    return np.zeros(q), np.zeros(k), np.zeros(v)


NARROW = [x.astype(np.float16) for x in shapes()]
MIXED = [shapes()[0].astype(np.float32), *shapes()[1:]]


@pytest.mark.parametrize(
    ("qkv", "keywords"),
    [
        (shapes(q=(1, 3, 5, 4)), {}),
        (shapes(v=(2, 1, 7, 6)), {}),
        (shapes(q=(4,)), {}),
        (shapes(q=(2, 3, 5, 6)), {}),
        (shapes(q=(2, 3, 5, 0), k=(2, 3, 7, 0)), {}),
        (shapes(v=(2, 3, 5, 6)), {}),
        (NARROW, {}),
        (MIXED, {}),
        (shapes(), {"mask": np.ones((7, 5), bool)}),
        (shapes(), {"mask": np.ones((2, 5, 7), bool)}),
        (shapes(), {"mask": np.ones((2, 2, 5, 7))}),
        (shapes(), {"mask": np.ones((5, 7), int)}),
        (shapes(), {"rng": 5}),
    ],
)
def test_the_errors_are_those_of_attention_without_tiles(qkv, keywords):
    with pytest.raises((TypeError, ValueError)) as expected:
        plain(*qkv, **keywords)
    with pytest.raises(expected.type, match=f"^{re.escape(str(expected.value))}$"):
        TiledAttention()(*qkv, **keywords)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tile": 0}, ValueError, "^tile is 0"),
        ({"tile": 2.0}, TypeError, "^tile is 2.0"),
        ({"tile": True}, TypeError, "^tile is True"),
        ({"dropout": 1.5}, ValueError, "^dropout is 1.5"),
        ({"dropout": float("nan")}, ValueError, "^dropout is nan"),
    ],
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        TiledAttention(**options)


def test_the_gradient_is_checked():
    layer = TiledAttention()
    _, ctx = layer.forward(*shapes())
    with pytest.raises(ValueError, match=r"^dy has shape \(2, 3, 5, 1\), expected \(2, 3, 5, 6\)"):
        layer.backward(ctx, np.ones((2, 3, 5, 1)))
