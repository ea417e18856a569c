import numpy as np
import pytest
from helpers import assert_close, assert_gradients, distinct_primes, randomise, seeds
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import Linear


@given(sizes=distinct_primes(4, 7), rank=st.integers(1, 3), bias=st.booleans(), seed=seeds)
def test_gradients(sizes, rank, bias, seed):
    rng = np.random.default_rng(seed)
    d_in, d_out, *leading = sizes
    layer = randomise(Linear(d_in, d_out, bias, dtype=np.float64), rng)
    assert_gradients(layer, rng.standard_normal((*leading[: rank - 1], d_in)))


@given(sizes=distinct_primes(4), seed=seeds)
def test_output_is_the_sum_over_the_inputs_plus_bias(sizes, seed):
    rng = np.random.default_rng(seed)
    B, T, d_in, d_out = sizes
    layer = randomise(Linear(d_in, d_out, dtype=np.float64), rng)
    x = rng.standard_normal((B, T, d_in))
    expected = np.einsum("bti,ij->btj", x, layer.W.value) + layer.b.value
    assert_close(layer(x), expected)


def test_initial_weights():
    layer = Linear(300, 200, rng=0, dtype=np.float64)
    a = (6 / 500) ** 0.5
    W = layer.W.value
    assert W.shape == (300, 200)
    assert np.abs(W).max() <= a
    assert np.abs(W).max() > 0.99 * a
    assert abs(W.mean()) < 0.01 * a
    assert abs(W.std() - a / 3**0.5) < 0.01 * a
    assert (layer.b.value == 0).all()
    assert Linear(3, 2, bias=False).b is None


def test_initial_weights_do_not_depend_on_the_dtype():
    wide, narrow = Linear(3, 2, rng=5, dtype=np.float64), Linear(3, 2, rng=5)
    np.testing.assert_array_equal(wide.W.value.astype(np.float32), narrow.W.value)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4), (3, 4)])
def test_width_is_checked(shape):
    with pytest.raises(ValueError, match=r"^x has shape .*expected \(\.\.\., 3\)"):
        Linear(3, 2)(np.zeros(shape))


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ((0, 2), ValueError, "d_in"),
        ((3, -1), ValueError, "d_out"),
        ((3.0, 2), TypeError, "d_in"),
        ((3, True), TypeError, "d_out"),
        (("3", 2), TypeError, "d_in"),
    ],
)
def test_sizes_are_checked(arguments, error, name):
    with pytest.raises(error, match=rf"^{name} is"):
        Linear(*arguments)


def test_ragged_lists_and_bad_seeds_name_the_argument():
    with pytest.raises(ValueError, match=r"^x is no rectangular array"):
        Linear(3, 2)([[1.0, 2.0, 3.0], [1.0, 2.0]])
    with pytest.raises(TypeError, match=r"^rng is 1\.5"):
        Linear(3, 2, rng=1.5)
    with pytest.raises(ValueError, match=r"^rng is -1"):
        Linear(3, 2, rng=-1)
