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
    plain_attention,
    randomise,
    run,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import MemoryAttention, MemoryProjection, MultiHeadAttention, causal_mask
from npdecoder.blocks.multi_head_attention import merge_heads, split_heads

masks = st.sampled_from(MASKS)
rates = st.sampled_from([0.0, 0.3])


def draw(rng, sizes, d_model=6, bias=True, dropout=0.0, make=MultiHeadAttention):
    """An attention of random weights, and its query, key and value."""
    B, h, T, S, d_k, d_v = sizes
    layer = make(d_model, h, d_k, d_v, bias, dropout, dtype=np.float64)
    query = rng.standard_normal((B, T, d_model))
    key, value = rng.standard_normal((2, B, S, d_model))
    return randomise(layer, rng), query, key, value


@given(sizes=distinct_primes(6), bias=st.booleans(), mask=masks, dropout=rates, seed=seeds)
def test_gradients(sizes, bias, mask, dropout, seed):
    rng = np.random.default_rng(seed)
    layer, *inputs = draw(rng, sizes, 17, bias, dropout)
    mask = draw_mask(mask, rng, *sizes[:4])
    assert_gradients(layer, *inputs, mode="directional", mask=mask, rng=rng)


@few(10)
@given(
    sizes=st.permutations([2, 3, 4, 5]), bias=st.booleans(), mask=masks, dropout=rates, seed=seeds
)
def test_gradients_entry_by_entry(sizes, bias, mask, dropout, seed):
    rng = np.random.default_rng(seed)
    B, T, S, d_v = sizes
    sizes = B, 2, T, S, 3, d_v
    layer, *inputs = draw(rng, sizes, 6, bias, dropout)
    assert_gradients(layer, *inputs, mask=draw_mask(mask, rng, *sizes[:4]), rng=rng)


@given(sizes=distinct_primes(6), bias=st.booleans(), mask=masks, dropout=rates, seed=seeds)
def test_gradients_of_the_two_parts(sizes, bias, mask, dropout, seed):
    rng = np.random.default_rng(seed)
    B, h, _, S, d_k, d_v = sizes
    layer, query, memory, _ = draw(rng, sizes, 4, bias, dropout, MemoryAttention)
    K, V = rng.standard_normal((B, h, S, d_k)), rng.standard_normal((B, h, S, d_v))
    mask = draw_mask(mask, rng, *sizes[:4])
    assert_gradients(layer, query, K, V, mode="directional", mask=mask, rng=rng)
    projection = MemoryProjection(4, h, d_k, d_v, bias, dtype=np.float64)
    assert_gradients(randomise(projection, rng), memory, mode="directional")


@given(sizes=distinct_primes(6), bias=st.booleans(), mask=masks, seed=seeds)
def test_equals_the_plain_functions(sizes, bias, mask, seed):
    rng = np.random.default_rng(seed)
    layer, query, key, _ = draw(rng, sizes, 4, bias)
    mask = draw_mask(mask, rng, *sizes[:4])
    assert_close(layer(query, key, key, mask), plain_attention(layer, query, key, mask))


def loop_over_items_and_heads(layer, query, key, value, mask, dy):
    """One item and one head at a time: forward, and all gradients (without biases)."""
    B, T, d_model = query.shape
    S, h = key.shape[1], layer.num_heads
    W = {name: getattr(layer, name).W.value for name in ("W_q", "W_k", "W_v", "W_o")}
    d_k, d_v = W["W_q"].shape[1] // h, W["W_v"].shape[1] // h
    mask = np.broadcast_to(True if mask is None else mask, (B, h, T, S))
    y = np.zeros((B, T, d_model))
    dquery, dkey, dvalue = np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)
    dW = {name: np.zeros_like(array) for name, array in W.items()}
    for b in range(B):
        for i in range(h):
            narrow, wide = slice(i * d_k, (i + 1) * d_k), slice(i * d_v, (i + 1) * d_v)
            q, k = query[b] @ W["W_q"][:, narrow], key[b] @ W["W_k"][:, narrow]
            v, W_o = value[b] @ W["W_v"][:, wide], W["W_o"][wide]
            e = np.where(mask[b, i], np.exp(q @ k.T / d_k**0.5), 0.0)
            A = e / np.maximum(e.sum(axis=1, keepdims=True), 1e-300)
            y[b] += A @ v @ W_o
            dcontext = dy[b] @ W_o.T
            dA = dcontext @ v.T
            dS = np.stack([(np.diag(a) - np.outer(a, a)) @ g for a, g in zip(A, dA)]) / d_k**0.5
            dq, dk, dv = dS @ k, dS.T @ q, A.T @ dcontext
            dW["W_o"][wide] += (A @ v).T @ dy[b]
            dW["W_q"][:, narrow] += query[b].T @ dq
            dW["W_k"][:, narrow] += key[b].T @ dk
            dW["W_v"][:, wide] += value[b].T @ dv
            dquery[b] += dq @ W["W_q"][:, narrow].T
            dkey[b] += dk @ W["W_k"][:, narrow].T
            dvalue[b] += dv @ W["W_v"][:, wide].T
    return y, (dquery, dkey, dvalue), {f"{name}.W": grad for name, grad in dW.items()}


boolean_masks = st.sampled_from([kind for kind in MASKS if kind != "float"])


@given(sizes=distinct_primes(6), mask=boolean_masks, seed=seeds)
def test_equals_a_loop_over_items_and_heads(sizes, mask, seed):
    rng = np.random.default_rng(seed)
    layer, *inputs = draw(rng, sizes, 4, bias=False)
    check_against_loop(layer, inputs, draw_mask(mask, rng, *sizes[:4]), rng)


@pytest.mark.parametrize("h", [1, 2])
def test_equals_a_loop_with_another_mask_for_each_item(h):
    rng = np.random.default_rng(0)
    layer, *inputs = draw(rng, (3, h, 4, 4, 2, 5), 6, bias=False)
    check_against_loop(layer, inputs, rng.random((3, 1, 4, 4)) < 0.6, rng)


def check_against_loop(layer, inputs, mask, rng):
    dy = rng.standard_normal(inputs[0].shape)
    found = run(layer, inputs, {"mask": mask}, dy)
    expected = loop_over_items_and_heads(layer, *inputs, mask, dy)
    for one, other in zip(found, expected):
        assert_close(one, other)


def test_merge_order():
    v = np.array([[[[1, 2], [3, 4]], [[5, 6], [7, 8]]]])
    merged = merge_heads(v)
    np.testing.assert_array_equal(merged, [[[1, 2, 5, 6], [3, 4, 7, 8]]])
    np.testing.assert_array_equal(split_heads(merged, 2), v)


@pytest.mark.parametrize(("d_k", "d_v"), [(None, None), (2, None), (None, 5), (2, 5)])
def test_widths(d_k, d_v):
    layer = MultiHeadAttention(6, 2, d_k, d_v, bias=True)
    assert layer.W_q.W.shape == layer.W_k.W.shape == (6, 2 * (d_k or 3))
    assert layer.W_v.W.shape == (6, 2 * (d_v or 3))
    assert layer.W_o.W.shape == (2 * (d_v or 3), 6)
    names = [name for name, _ in layer.named_parameters()]
    assert names == [f"W_{x}.{p}" for x in "qkvo" for p in "Wb"]
    assert len(MultiHeadAttention(6, 2).parameters()) == 4


def test_initial_weights_are_independent():
    weights = [p.value for p in MultiHeadAttention(6, 2, rng=0).parameters()]
    for i, a in enumerate(weights):
        for b in weights[:i]:
            assert (a != b).any()
            assert not np.shares_memory(a, b)


@given(sizes=distinct_primes(6), mask=masks, seed=seeds)
def test_project_and_attend_are_the_whole(sizes, mask, seed):
    rng = np.random.default_rng(seed)
    layer, query, key, value = draw(rng, sizes, 4)
    mask = draw_mask(mask, rng, *sizes[:4])
    y, ctx = layer.forward(query, key, value, mask)
    (K, V), project = layer.project(key, value)
    output, attend = layer.attend(query, K, V, mask)
    assert_equal(output, y)
    dy = rng.standard_normal(y.shape)
    dquery, dK, dV = layer.attend_backward(attend, dy)
    dkey, dvalue = layer.project_backward(project, dK, dV)
    assert_equal((dquery, dkey, dvalue), layer.backward(ctx, dy))


def test_one_projection_under_two_attentions():
    """Shared keys and values: their gradients add up, and go back through the projection once."""
    rng = np.random.default_rng(0)
    projection = randomise(MemoryProjection(6, 2, 3, 5, dtype=np.float64), rng)
    attentions = [
        randomise(MemoryAttention(6, 2, 3, 5, dtype=np.float64), rng) for _ in range(2)
    ]
    query, memory = rng.standard_normal((2, 3, 6)), rng.standard_normal((2, 7, 6))
    dys = rng.standard_normal((2, 2, 3, 6))
    (K, V), project = projection.forward(memory)
    grads = []
    for attention, dy in zip(attentions, dys):
        _, ctx = attention.attend(query, K, V)
        grads.append(attention.attend_backward(ctx, dy)[1:])
    dmemory = projection.backward(project, tuple(a + b for a, b in zip(*grads)))

    expected = np.zeros_like(memory)
    expected_W_k = np.zeros_like(projection.W_k.W.value)
    for attention, dy in zip(attentions, dys):
        whole = MultiHeadAttention(6, 2, 3, 5, dtype=np.float64)
        whole.load_state_dict({**projection.state_dict(), **attention.state_dict()})
        _, (_, dkey, dvalue), dW = run(whole, (query, memory, memory), {}, dy)
        expected += dkey + dvalue
        expected_W_k += dW["W_k.W"]
    assert_close(dmemory, expected)
    assert_close(projection.W_k.W.grad, expected_W_k)


def test_future_does_not_move_a_bit():
    rng = np.random.default_rng(0)
    layer, x, *_ = draw(rng, (2, 3, 7, 7, 4, 5))
    before = layer(x, x, x, causal_mask(7))
    for t in range(1, 7):
        moved = x.copy()
        moved[:, t:] = 100 * rng.standard_normal(moved[:, t:].shape)
        after = layer(moved, moved, moved, causal_mask(7))
        assert_equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any()


@pytest.mark.parametrize("B", [2, 3])
def test_items_of_a_batch_do_not_meet(B):
    rng = np.random.default_rng(0)
    layer, x, *_ = draw(rng, (B, 2, 3, 3, 4, 5))
    moved = x.copy()
    moved[1] += 1
    assert_equal(layer(moved, moved, moved)[0], layer(x, x, x)[0])
    assert (layer(moved, moved, moved)[1] != layer(x, x, x)[1]).any()


@pytest.mark.parametrize("where", [np.s_[0], np.s_[:, :, 1], np.s_[:, 1]])
def test_what_sees_nothing(where):
    """An item, a query, a head that sees nothing: exactly zero context, finite gradients."""
    rng = np.random.default_rng(0)
    layer, *inputs = draw(rng, (2, 3, 5, 7, 4, 6), bias=False)
    mask = rng.random((2, 3, 5, 7)) < 0.7
    mask[..., 0] = True
    mask[where] = False
    with np.errstate(all="raise"):
        y, ctx = layer.forward(*inputs, mask)
        dquery, dkey, dvalue = layer.backward(ctx, np.ones_like(y))
    assert (ctx.attend.attention.A[where] == 0).all()
    context = ctx.attend.W_o.x.reshape(2, 5, 3, 6).swapaxes(1, 2)
    assert (context[where] == 0).all()
    blind = ~mask.any(axis=(1, 3))  # (B, T): no head sees anything
    assert (y[blind] == 0).all()
    assert (dquery[blind] == 0).all()
    assert np.isfinite(dkey).all()
    assert np.isfinite(dvalue).all()
    assert all(np.isfinite(p.grad).all() for p in layer.parameters())


def arrays(query=(2, 5, 6), key=(2, 7, 6), value=(2, 7, 6)):
    return np.zeros(query), np.zeros(key), np.zeros(value)


BAD_SHAPES = [
    ({"query": (1, 5, 6)}, r"query \(1, 5, 6\) and key \(2, 7, 6\)"),
    ({"key": (1, 7, 6), "value": (1, 7, 6)}, r"query \(2, 5, 6\) and key \(1, 7, 6\)"),
    ({"value": (1, 7, 6)}, r"key \(2, 7, 6\) and value \(1, 7, 6\)"),
    ({"value": (2, 5, 6)}, r"key \(2, 7, 6\) and value \(2, 5, 6\)"),
    ({"value": (2, 1, 6)}, r"key \(2, 7, 6\) and value \(2, 1, 6\)"),
    ({"query": (2, 5, 1)}, r"^query has shape \(2, 5, 1\)"),
    ({"key": (2, 7, 5)}, r"^key has shape \(2, 7, 5\)"),
    ({"value": (2, 7, 1)}, r"^value has shape \(2, 7, 1\)"),
    ({"query": (5, 6)}, r"^query .*\(5, 6\)"),
    ({"query": (2, 3, 5, 6)}, r"^query .*\(2, 3, 5, 6\)"),
    ({"query": (2, 6), "key": (2, 6), "value": (2, 6)}, r"has shape \(2, 6\).*batch first"),
    ({"query": ()}, r"^query .*\(\)"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD_SHAPES)
def test_shapes_are_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(6, 3)(*arrays(**wrong))


@pytest.mark.parametrize("shape", [(7,), (2, 5, 7), (3, 5, 7), (5, 5), (7, 5), (2, 2, 5, 7)])
def test_a_mask_that_does_not_fit(shape):
    with pytest.raises(ValueError, match=r"^mask has shape .*expected 2 dimensions \(5, 7\)"):
        MultiHeadAttention(6, 3)(*arrays(), np.ones(shape, bool))


def test_an_integer_mask_is_refused():
    with pytest.raises(TypeError, match=r"^mask has dtype .*astype\(bool\)"):
        MultiHeadAttention(6, 3)(*arrays(), np.ones((5, 7), int))


@pytest.mark.parametrize("make", [MultiHeadAttention, MemoryAttention, MemoryProjection])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((6, 4), ValueError, "d_model 6 is not divisible by num_heads 4"),
        ((6, 4, 2), ValueError, "d_model 6 is not divisible by num_heads 4"),
        ((6, 4, None, 2), ValueError, "d_model 6 is not divisible by num_heads 4"),
        ((6, 0), ValueError, "num_heads is 0"),
        ((0, 2), ValueError, "d_model is 0"),
        ((6, 2, 0), ValueError, "d_k is 0"),
        ((6, 2, 3, -1), ValueError, "d_v is -1"),
        ((6, 2, 3.0), TypeError, "d_k is 3.0"),
    ],
)
def test_sizes_are_checked(make, arguments, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make(*arguments)
    assert MultiHeadAttention(6, 4, 2, 3).W_q.W.shape == (6, 8)


@pytest.mark.parametrize(
    ("K", "V", "message"),
    [
        ((1, 3, 7, 4), (2, 3, 7, 6), r"K \(1, 3, 7, 4\): expected K \(2, 3, S, 4\)"),
        ((2, 3, 7, 4), (2, 1, 7, 6), r"V \(2, 1, 7, 6\): expected V \(2, 3, S, 6\)"),
        ((2, 3, 7, 6), (2, 3, 7, 4), r"K \(2, 3, 7, 6\)"),
        ((2, 7, 12), (2, 3, 7, 6), r"K \(2, 7, 12\)"),
        ((2, 3, 7, 4), (2, 3, 5, 6), "same length S"),
    ],
)
def test_projected_memory_is_checked(K, V, message):
    layer = MemoryAttention(5, 3, 4, 6)
    with pytest.raises(ValueError, match=message):
        layer(np.zeros((2, 5, 5)), np.zeros(K), np.zeros(V))


def test_dropout_is_checked():
    for p in 1.5, -0.1, np.nan:
        with pytest.raises(ValueError, match=r"^dropout is"):
            MultiHeadAttention(6, 2, dropout=p)
