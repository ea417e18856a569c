import numpy as np
import pytest
from helpers import assert_close, assert_gradients, distinct_primes, randomise, seeds
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import LayerNorm


@given(
    sizes=distinct_primes(3),
    rank=st.integers(1, 3),
    bias=st.booleans(),
    eps=st.sampled_from([1e-5, 1e-3, 0.5]),
    seed=seeds,
)
def test_gradients(sizes, rank, bias, eps, seed):
    rng = np.random.default_rng(seed)
    d_model, *leading = sizes
    layer = randomise(LayerNorm(d_model, eps, bias, dtype=np.float64), rng)
    x = rng.standard_normal((*leading[: rank - 1], d_model)) + 1.5
    assert_gradients(layer, x)


def test_randomised_gamma_is_far_from_one():
    gamma = randomise(LayerNorm(50), np.random.default_rng(0)).gamma.value
    assert gamma.std() > 0.3


@given(sizes=distinct_primes(3), bias=st.booleans(), seed=seeds)
def test_definition(sizes, bias, seed):
    rng = np.random.default_rng(seed)
    layer = randomise(LayerNorm(sizes[-1], 1e-3, bias, dtype=np.float64), rng)
    x = rng.standard_normal(sizes)
    x_hat = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, ddof=0, keepdims=True) + 1e-3)
    expected = layer.gamma.value * x_hat + (layer.beta.value if bias else 0.0)
    assert_close(layer(x), expected)


VALUES = [
    ([1, 0, 0, 0], 1e-5, [1.7320046213947808] + [-0.5773348737982603] * 3),
    ([0, 0.02], 1e-3, [-0.30151134457776363, 0.30151134457776363]),
    ([1234] * 4, 1e-5, [0] * 4),
    ([7], 1e-5, [0]),
]


@pytest.mark.parametrize(("x", "eps", "expected"), VALUES)
def test_values(x, eps, expected):
    layer = LayerNorm(len(x), eps, dtype=np.float64)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-10)


def test_gradient_of_a_constant_row():
    layer = LayerNorm(4, dtype=np.float64)
    with np.errstate(all="raise"):
        y, ctx = layer.forward([1234.0] * 4)
        dx = layer.backward(ctx, np.array([1.0, 2, 3, 5]))
    expected = [
        -553.3985905294663,
        -237.17082451262843,
        79.05694150420948,
        711.5124735378853,
    ]
    np.testing.assert_allclose(dx, expected, rtol=1e-10)
    assert (y == 0).all()
    np.testing.assert_array_equal(layer.beta.grad, [1, 2, 3, 5])
    np.testing.assert_array_equal(layer.gamma.grad, [0, 0, 0, 0])


@pytest.mark.parametrize(
    "x",
    [[40000, 40001, 40002, 40003], 10000 + np.arange(16) * 1e-3, 1e6 + np.arange(4.0)],
)
def test_mean_far_larger_than_the_spread_in_float32(x):
    x = np.array(x, np.float32)
    narrow, wide = LayerNorm(len(x)), LayerNorm(len(x), dtype=np.float64)
    y, ctx = narrow.forward(x)
    y_wide, ctx_wide = wide.forward(x)
    np.testing.assert_allclose(y, y_wide, atol=1e-5)
    dy = np.random.default_rng(0).standard_normal(len(x))
    assert_close(narrow.backward(ctx, dy), wide.backward(ctx_wide, dy), 1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 5)])
def test_mean_far_larger_than_the_spread_at_every_width(batch, dtype):
    """BLAS sums the columns of a product in more than one order: a row needs one mean."""
    rng = np.random.default_rng(0)
    for n in range(2, 41):
        norm = LayerNorm(n, dtype=dtype)
        x = (3e4 + rng.standard_normal((*batch, n))).astype(dtype)
        centred = x.astype(np.float64) - x.astype(np.float64).mean(axis=-1, keepdims=True)
        expected = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + norm.eps)
        np.testing.assert_allclose(norm(x), expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(norm(np.full_like(x, 314_000)), 0.0, rtol=0, atol=1e-5)


def test_values_of_rows_with_a_huge_mean():
    y = LayerNorm(4)(np.array([40000, 40001, 40002, 40003], np.float32))
    expected = 1.3416354199689269, 0.447211806656309
    np.testing.assert_allclose(y, [-expected[0], -expected[1], *expected[::-1]], atol=1e-5)
    y = LayerNorm(16)(np.array(10000 + np.arange(16) * 1e-3, np.float32))
    np.testing.assert_allclose(y[[0, -1]], [-1.3313333517, 1.3313333517], atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shift_changes_nothing(dtype):
    rng = np.random.default_rng(0)
    layer = randomise(LayerNorm(7).astype(dtype), rng)
    x = (rng.integers(-64, 64, (3, 7)) / 16).astype(dtype)  # x + 2000 is exact
    tolerance = 1e-5 if dtype is np.float32 else 1e-12
    assert_close(layer(x + dtype(2000)), layer(x), tolerance)


def test_rows_that_overflow_come_out_as_beta():
    """The documented limit: float32 squares of 1e30 are inf."""
    layer = LayerNorm(4)
    layer.beta.value = np.array([1, 2, 3, 4])
    with np.errstate(over="ignore"):
        y = layer(np.array([[1e30, -1e30, 0, 2e30], [1, 0, 0, 0]], np.float32))
    np.testing.assert_array_equal(y[0], [1, 2, 3, 4])
    np.testing.assert_allclose(y[1, 0], 1 + 1.7320046, rtol=1e-6)


def test_a_nan_row_stays_alone():
    x = np.array([[1.0, np.nan, 2.0], [3.0, 1.0, 2.0]])
    y = LayerNorm(3, dtype=np.float64)(x)
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()


def test_beta_and_gamma_have_their_own_gradients():
    layer = randomise(LayerNorm(3, dtype=np.float64), np.random.default_rng(0))
    x, dy = np.random.default_rng(1).standard_normal((2, 2, 5, 3))
    y, ctx = layer.forward(x)
    layer.backward(ctx, dy)
    x_hat = (y - layer.beta.value) / layer.gamma.value
    assert_close(layer.beta.grad, dy.sum(axis=(0, 1)))
    assert_close(layer.gamma.grad, (dy * x_hat).sum(axis=(0, 1)))


def test_initial_weights():
    layer = LayerNorm(5)
    assert (layer.gamma.value == 1).all()
    assert (layer.beta.value == 0).all()
    assert LayerNorm(5, bias=False).beta is None
    assert [name for name, _ in LayerNorm(5, bias=False).named_parameters()] == ["gamma"]


@pytest.mark.parametrize("eps", [-1e-5, np.inf, np.nan])
def test_eps_is_checked(eps):
    with pytest.raises(ValueError, match=r"^eps is"):
        LayerNorm(3, eps)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4), (2, 3, 1)])
def test_width_is_checked(shape):
    with pytest.raises(ValueError, match=r"^x has shape .*expected \(\.\.\., 3\)"):
        LayerNorm(3)(np.zeros(shape))
