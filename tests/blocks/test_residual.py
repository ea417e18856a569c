import numpy as np
import pytest
from helpers import assert_close, assert_gradients, distinct_primes, plain_norm, randomise, seeds
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import Layer, LayerNorm, Linear
from npdecoder.blocks import Residual


class Path(Layer):
    """A Residual around one Linear."""

    def __init__(self, d_model, place, dropout=0.0):
        self.sublayer = Linear(d_model, d_model, dtype=np.float64)
        self.norm = LayerNorm(d_model, dtype=np.float64)
        self.residual = Residual(self.norm, place, dropout)

    def forward(self, x, rng=None):
        h, enter = self.residual.enter(x)
        s, sublayer = self.sublayer.forward(h)
        y, leave = self.residual.leave(x, s, rng)
        return y, (enter, sublayer, leave)

    def backward(self, ctx, dy):
        enter, sublayer, leave = ctx
        dx, ds = self.residual.leave_backward(leave, dy)
        return dx + self.residual.enter_backward(enter, self.sublayer.backward(sublayer, ds))


places = st.sampled_from(["pre", "post"])


@given(sizes=distinct_primes(3, 7), place=places, p=st.sampled_from([0.0, 0.3, 1.0]), seed=seeds)
def test_gradients(sizes, place, p, seed):
    rng = np.random.default_rng(seed)
    path = randomise(Path(sizes[-1], place, p), rng)
    assert_gradients(path, rng.standard_normal(sizes), rng=rng)


@given(sizes=distinct_primes(3), seed=seeds)
def test_places_of_the_norm(sizes, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(sizes)
    pre, post = (randomise(Path(sizes[-1], place), rng) for place in ("pre", "post"))
    assert_close(pre(x), x + pre.sublayer(plain_norm(pre.norm, x)))
    assert_close(post(x), plain_norm(post.norm, x + post.sublayer(x)))


def test_the_skip_of_pre_ln_is_untouched():
    """With a sublayer of zeros the gradient comes back as it is, past the norm and the dropout."""
    rng = np.random.default_rng(0)
    path = Path(5, "pre", dropout=0.5)
    path.sublayer.W.value[...] = 0.0
    x, dy = rng.standard_normal((2, 2, 3, 5))
    y, ctx = path.forward(x, rng)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(path.backward(ctx, dy), dy)


def test_dropout_is_on_the_sublayer_not_on_the_skip():
    path = Path(50, "pre", dropout=1.0)
    x = np.ones((2, 3, 50))
    np.testing.assert_array_equal(path(x, np.random.default_rng(0)), x)


def test_unknown_place():
    with pytest.raises(ValueError, match=r"^norm is 'Pre', expected one of 'pre', 'post'"):
        Residual(LayerNorm(3), "Pre", 0.0)
