import numpy as np
import pytest
from helpers import (
    assert_close,
    assert_gradients,
    distinct_primes,
    plain_feed_forward,
    randomise,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import GELU, FeedForward, ReLU

activations = st.sampled_from(["relu", "gelu", "gelu_tanh"])


@given(
    sizes=distinct_primes(4, 7),
    rank=st.integers(1, 3),
    activation=activations,
    bias=st.booleans(),
    dropout=st.sampled_from([0.0, 0.3]),
    seed=seeds,
)
def test_gradients(sizes, rank, activation, bias, dropout, seed):
    rng = np.random.default_rng(seed)
    d_model, d_ff, *leading = sizes
    layer = FeedForward(d_model, d_ff, activation, bias, dropout, dtype=np.float64)
    x = rng.standard_normal((*leading[: rank - 1], d_model))
    assert_gradients(randomise(layer, rng), x, rng=rng)


@given(sizes=distinct_primes(4), activation=activations, bias=st.booleans(), seed=seeds)
def test_equals_the_plain_function(sizes, activation, bias, seed):
    rng = np.random.default_rng(seed)
    layer = FeedForward(sizes[2], sizes[3], activation, bias, 0.5, dtype=np.float64)
    x = rng.standard_normal(sizes[:3])
    assert_close(randomise(layer, rng)(x), plain_feed_forward(layer, x))


@pytest.mark.parametrize(
    ("word", "activation"), [("relu", ReLU()), ("gelu", GELU()), ("gelu_tanh", GELU("tanh"))]
)
def test_the_word_names_the_activation(word, activation):
    layer, x = FeedForward(3, 5, word, rng=0), np.linspace(-3, 3, 12).reshape(4, 3)
    expected = layer.linear2(activation(layer.linear1(x)))
    np.testing.assert_array_equal(layer(x), expected)


def test_sizes_and_weights():
    layer = FeedForward(6, rng=0)
    assert layer.linear1.W.shape == (6, 24)
    assert layer.linear2.W.shape == (24, 6)
    assert (layer.linear1.W.value.T != layer.linear2.W.value).any()
    assert len(FeedForward(6, 3, bias=False).parameters()) == 2


def test_dropout_stands_between_the_linears():
    layer = FeedForward(3, 50, dropout=0.5, rng=0)
    _, ctx = layer.forward(np.ones((2, 5, 3)), np.random.default_rng(0))
    assert ctx.dropout.keep.shape == (2, 5, 50)
    dropped = ctx.linear2.x[~ctx.dropout.keep]
    assert len(dropped)
    assert (dropped == 0).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"activation": "swish"}, ValueError,
         "activation is 'swish', expected one of 'relu', 'gelu', 'gelu_tanh'"),
        ({"d_ff": 0}, ValueError, "d_ff is 0"),
        ({"d_ff": 2.5}, TypeError, "d_ff is 2.5"),
        ({"dropout": -0.1}, ValueError, "dropout is -0.1"),
    ],
)  # fmt: skip
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        FeedForward(6, **options)
    with pytest.raises(ValueError, match=r"^d_model is 0"):
        FeedForward(0)
