import numpy as np
import pytest
from helpers import assert_equal, assert_gradients, distinct_primes, seeds
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import Dropout


def generator(seed=0):
    return np.random.default_rng(seed)


@given(
    sizes=distinct_primes(3, 7), p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), seed=seeds
)
def test_gradients(sizes, p, seed):
    rng = generator(seed)
    assert_gradients(Dropout(p), rng.standard_normal(sizes), rng=rng)


@given(p=st.sampled_from([0.1, 0.25, 0.5, 0.9]), seed=seeds)
def test_zeros_and_kept_entries(p, seed):
    rng = generator(seed)
    x = rng.uniform(1, 2, (100, 1000))
    y, ctx = Dropout(p).forward(x, rng)
    kept = y != 0
    assert abs((~kept).mean() - p) < 0.01
    np.testing.assert_array_equal(y[kept], (x / (1 - p))[kept])
    assert abs(y.mean() / x.mean() - 1) < 0.01 / (1 - p)
    dy = rng.uniform(1, 2, x.shape)
    dx = Dropout(p).backward(ctx, dy)
    np.testing.assert_array_equal(dx[kept], (dy / (1 - p))[kept])
    assert (dx[~kept] == 0).all()


def test_p_1_gives_zeros():
    x = np.array([1.0, -2.0, np.inf, np.nan])
    y, ctx = Dropout(1.0).forward(x, generator())
    np.testing.assert_array_equal(y, np.zeros(4))
    np.testing.assert_array_equal(Dropout(1.0).backward(ctx, np.ones(4)), np.zeros(4))


def test_inference_is_the_identity():
    layer, x = Dropout(0.5), np.arange(6.0)
    before = layer(x)
    dropped = layer(x, generator())
    after = layer(x)
    np.testing.assert_array_equal(before, x)
    np.testing.assert_array_equal(after, x)
    assert (dropped == 0).any()
    assert layer.p == 0.5
    np.testing.assert_array_equal(Dropout(0.0)(x, generator()), x)


def test_nan_and_inf_stay_at_their_place():
    x = np.ones(1000)
    x[[3, 500]] = np.nan, np.inf
    y = Dropout(0.5)(x, generator())
    assert np.isfinite(np.delete(y, [3, 500])).all()


def test_same_state_same_mask_whatever_else_is_random():
    layer, x = Dropout(0.5), np.ones((7, 11))
    np.random.seed(1)  # noqa: NPY002  (it must not matter)
    first = layer(x, generator(3))
    np.random.seed(2)  # noqa: NPY002
    assert_equal(layer(x, generator(3)), first)
    assert (layer(x, generator(4)) != first).any()
    rng = generator(3)
    assert_equal(layer(x, rng), first)
    assert (layer(x, rng) != first).any()
    for dtype in np.float32, np.longdouble:
        assert_equal(layer(x.astype(dtype), generator(3)), first)


def test_one_instance_called_many_times_before_backward():
    layer, x, rng = Dropout(0.5), np.ones(50), generator()
    calls = [layer.forward(x, rng) for _ in range(3)]
    assert any((calls[0][0] != y).any() for y, _ in calls)
    for y, ctx in calls:
        np.testing.assert_array_equal(layer.backward(ctx, np.ones(50)), y)


@pytest.mark.parametrize("p", [1.5, -0.1, np.nan, np.inf])
def test_p_is_checked(p):
    with pytest.raises(ValueError, match=r"^p is"):
        Dropout(p)


@pytest.mark.parametrize("rng", [0, 3, np.int64(3), True, np.random.RandomState(0), "0"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_rng_must_be_a_generator(p, rng):
    with pytest.raises(TypeError, match=r"^rng is .* numpy.random.Generator"):
        Dropout(p)(np.ones(3), rng)
