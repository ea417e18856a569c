import numpy as np
import pytest
from helpers import (
    MASKS,
    assert_close,
    assert_equal,
    assert_gradients,
    distinct_primes,
    draw_mask,
    dropout_places,
    few,
    layer_options,
    plain_layer,
    plain_norm,
    randomise,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import Encoder, EncoderLayer

masks = st.sampled_from(MASKS)


@few(5)
@given(sizes=st.permutations([2, 3, 4, 5]), options=layer_options, mask=masks, seed=seeds)
def test_gradients_of_a_layer(sizes, options, mask, seed):
    rng = np.random.default_rng(seed)
    B, T, d_k, d_v = sizes
    layer = EncoderLayer(6, 2, 7, d_k=d_k, d_v=d_v, dtype=np.float64, **options)
    x = rng.standard_normal((B, T, 6))
    mask = draw_mask(mask, rng, B, 2, T, T)
    assert_gradients(randomise(layer, rng), x, mask=mask, rng=rng)


@given(
    sizes=distinct_primes(6),
    options=layer_options,
    final_norm=st.sampled_from([True, False, None]),
    mask=masks,
    seed=seeds,
)
def test_gradients_of_a_stack(sizes, options, final_norm, mask, seed):
    rng = np.random.default_rng(seed)
    B, T, h, d_k, d_v, d_ff = sizes
    options |= {"d_k": d_k, "d_v": d_v, "final_norm": final_norm, "dtype": np.float64}
    stack = randomise(Encoder(2, 6, h, d_ff, **options), rng)
    mask = draw_mask(mask, rng, B, h, T, T)
    x = rng.standard_normal((B, T, 6))
    assert_gradients(stack, x, mode="directional", mask=mask, rng=rng)


@given(
    sizes=distinct_primes(6),
    options=layer_options,
    final_norm=st.sampled_from([True, False, None]),
    mask=masks,
    seed=seeds,
)
def test_equals_the_plain_functions(sizes, options, final_norm, mask, seed):
    rng = np.random.default_rng(seed)
    B, T, h, d_k, d_v, d_ff = sizes
    options |= {"d_k": d_k, "d_v": d_v, "final_norm": final_norm, "dtype": np.float64}
    stack = randomise(Encoder(2, 6, h, d_ff, **options), rng)
    mask = draw_mask(mask, rng, B, h, T, T)
    x = expected = rng.standard_normal((B, T, 6))
    for layer in stack.layers:
        expected = plain_layer(layer, expected, options["norm"], mask)
    assert (stack.norm is None) == (final_norm is False or (final_norm is None and
                                                            options["norm"] == "post"))
    if stack.norm is not None:
        expected = plain_norm(stack.norm, expected)
    assert_close(stack(x, mask), expected)


def test_both_sides_are_seen():
    stack = Encoder(2, 6, 2, rng=0, dtype=np.float64)
    x = np.random.default_rng(0).standard_normal((2, 5, 6))
    before = stack(x)
    for t in range(5):
        moved = x.copy()
        moved[0, t] += np.arange(6)
        after = stack(moved)
        assert (after[0] != before[0]).any(axis=-1).all(), "every position sees every other"
        assert_equal(after[1], before[1])


def test_a_masked_position_reaches_no_other():
    stack = Encoder(2, 6, 2, rng=0, dtype=np.float64)
    x = np.random.default_rng(0).standard_normal((2, 5, 6))
    mask = np.ones((2, 1, 1, 5), bool)
    mask[0, ..., 3] = False
    moved = x.copy()
    moved[0, 3] = 1e3
    keep = np.arange(5) != 3
    assert_equal(stack(moved, mask)[:, keep], stack(x, mask)[:, keep])


def test_layers_start_with_weights_of_their_own():
    stack = Encoder(3, 6, 2, attention_bias=True, rng=0)
    matrices = [p.value for p in stack.parameters() if p.value.ndim == 2]
    assert len(matrices) == 3 * 6
    for i, a in enumerate(matrices):
        assert not any(a.shape == b.shape and (a == b).all() for b in matrices[:i])
    arrays = [p.value for p in stack.parameters()]
    for i, a in enumerate(arrays):
        assert not any(np.shares_memory(a, b) for b in arrays[:i])


def test_names():
    names = [name for name, _ in Encoder(2, 6, 2).named_parameters()]
    layer = [f"self_attention.W_{x}.W" for x in "qkvo"]
    layer += [f"feed_forward.linear{n}.{p}" for n in (1, 2) for p in "Wb"]
    layer += [f"norm{n}.{p}" for n in (1, 2) for p in ("gamma", "beta")]
    expected = [f"layers.{i}.{name}" for i in (0, 1) for name in layer]
    assert names == [*expected, "norm.gamma", "norm.beta"]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_places_of_dropout(norm):
    def places(**options):
        layer = EncoderLayer(6, 2, norm=norm, **options)
        _, ctx = layer.forward(np.ones((2, 3, 6)), rng=np.random.default_rng(0))
        return set(dropout_places(ctx))

    weights = {"self_attention.attend.attention.dropout"}
    others = {"leave1.dropout", "feed_forward.dropout", "leave2.dropout"}
    assert places() == set()
    assert places(attention_dropout=0.5) == weights
    assert places(dropout=0.5, attention_dropout=0.0) == others
    assert places(dropout=0.5) == weights | others


def test_attention_dropout_has_its_own_rate():
    layer = EncoderLayer(6, 2, dropout=0.1, attention_dropout=0.7)
    assert layer.self_attention.attention.dropout.p == 0.7
    assert layer.feed_forward.dropout.p == layer.residual1.dropout.p == 0.1
    assert EncoderLayer(6, 2, dropout=0.1).self_attention.attention.dropout.p == 0.1


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_norm_eps_reaches_every_norm(norm):
    stack = Encoder(2, 6, 2, norm=norm, final_norm=True, norm_eps=0.5, norm_bias=False)
    norms = [stack.norm, *(n for layer in stack.layers for n in (layer.norm1, layer.norm2))]
    assert len(norms) == 5
    assert all(n.eps == 0.5 and n.beta is None for n in norms)


@pytest.mark.parametrize("make", [EncoderLayer, lambda *a, **k: Encoder(2, *a, **k)])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"norm": "middle"}, ValueError, "norm is 'middle', expected one of 'pre', 'post'"),
        ({"activation": "tanh"}, ValueError, "activation is 'tanh', expected one of 'relu'"),
        ({"dropout": 1.5}, ValueError, "dropout is 1.5"),
        ({"dropout": np.nan}, ValueError, "dropout is nan"),
        ({"attention_dropout": -0.1}, ValueError, "attention_dropout is -0.1"),
        ({"norm_eps": -1.0}, ValueError, "(norm_)?eps is -1.0"),
        ({"num_heads": 4}, ValueError, "d_model 6 is not divisible by num_heads 4"),
        ({"d_ff": 0}, ValueError, "d_ff is 0"),
        ({"d_k": 0}, ValueError, "d_k is 0"),
    ],
)
def test_options_are_checked(make, options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make(**{"d_model": 6, "num_heads": 2, **options})


def test_the_number_of_layers_is_checked():
    for number, error in (0, ValueError), (1.0, TypeError), (True, TypeError):
        with pytest.raises(error, match=r"^num_layers is"):
            Encoder(number, 6, 2)


@pytest.mark.parametrize("block", [EncoderLayer(6, 3, rng=0), Encoder(2, 6, 3, rng=0)])
@pytest.mark.parametrize(
    ("shape", "mask", "error", "message"),
    [
        ((5, 6), None, ValueError, r"x has shape \(5, 6\).*batch first"),
        ((2, 3, 5, 6), None, ValueError, r"x has shape \(2, 3, 5, 6\)"),
        ((2, 5, 7), None, ValueError, r"x has shape \(2, 5, 7\)"),
        ((2, 5, 6), np.ones((2, 5, 5), bool), ValueError, r"mask has shape \(2, 5, 5\)"),
        ((2, 5, 6), np.ones((3, 5, 5), bool), ValueError, r"mask has shape \(3, 5, 5\)"),
        ((2, 5, 6), np.ones((5,), bool), ValueError, r"mask has shape \(5,\)"),
        ((2, 5, 6), np.ones((5, 4), bool), ValueError, r"mask has shape \(5, 4\)"),
        ((2, 5, 6), np.ones((5, 5), int), TypeError, "mask has dtype int"),
    ],
)
def test_bad_input(block, shape, mask, error, message):
    with pytest.raises(error, match=f"^{message}"):
        block(np.zeros(shape, np.float32), mask)


def test_dy_is_checked():
    for block in EncoderLayer(6, 2), Encoder(2, 6, 2, norm="post"):
        _, ctx = block.forward(np.ones((2, 3, 6)))
        for shape in (2, 3, 5), (1, 3, 6), (2, 1, 6), (3, 6), ():
            with pytest.raises(ValueError, match=r"dy has shape"):
                block.backward(ctx, np.zeros(shape))
