import math

import numpy as np
import pytest
from helpers import assert_close, assert_gradients, distinct_primes, seeds
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import GELU, ReLU
from npdecoder.layers import erf


@given(
    layer=st.sampled_from([ReLU(), GELU(), GELU("tanh")]),
    sizes=distinct_primes(3, 7),
    rank=st.integers(0, 3),
    seed=seeds,
)
def test_gradients(layer, sizes, rank, seed):
    x = np.random.default_rng(seed).standard_normal(sizes[:rank])
    assert_gradients(layer, 2 * np.asarray(x))


def test_relu():
    x = np.array([-2.0, -0.0, 0.0, 1e-300, 3.0, np.inf, -np.inf])
    y, ctx = ReLU().forward(x)
    np.testing.assert_array_equal(y, [0, 0, 0, 1e-300, 3, np.inf, 0])
    np.testing.assert_array_equal(ReLU().backward(ctx, np.full(7, 5.0)), [0, 0, 0, 5, 5, 5, 0])


# x: exact GELU and its slope; tanh GELU and its slope
GELU_VALUES = {
    "none": {
        -3: -0.00404969409489031,
        -1: -0.15865525393145702,
        1: 0.841344746068543,
        2: 1.9544997361036416,
    },
    "tanh": {
        -3: -0.0036373920817729943,
        -1: -0.15880800939172324,
        1: 0.8411919906082768,
        2: 1.954597694087775,
    },
}


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_gelu_values(form):
    x, expected = zip(*GELU_VALUES[form].items())
    np.testing.assert_allclose(GELU(form)(np.array(x, float)), expected, rtol=0, atol=1e-12)


def exact_gelu(x):
    return x * math.erfc(-x / math.sqrt(2)) / 2


def exact_slope(x):
    density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return math.erfc(-x / math.sqrt(2)) / 2 + x * density


def tanh_gelu(x):
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def tanh_slope(x):
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    du = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return (1 + math.tanh(u)) / 2 + x / 2 * (1 - math.tanh(u) ** 2) * du


@pytest.mark.parametrize(
    ("form", "value", "slope"),
    [("none", exact_gelu, exact_slope), ("tanh", tanh_gelu, tanh_slope)],
)
def test_gelu_and_its_slope_against_the_math_module(form, value, slope):
    x = np.linspace(-12, 12, 4801)
    y, ctx = GELU(form).forward(x)
    dx = GELU(form).backward(ctx, np.ones_like(x))
    np.testing.assert_allclose(y, [value(float(t)) for t in x], rtol=0, atol=1e-14)
    np.testing.assert_allclose(dx, [slope(float(t)) for t in x], rtol=0, atol=1e-14)


def test_the_two_forms_differ_as_known():
    x = np.linspace(-6, 6, 12001)
    gap = np.abs(GELU()(x) - GELU("tanh")(x))
    assert abs(gap.max() - 4.7324e-4) < 1e-8
    assert abs(abs(x[gap.argmax()]) - 2.699) < 2e-3


@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gelu_far_out(form, dtype):
    far = np.array([60.0, 1e3, 1e30, np.finfo(dtype).max], dtype)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        y, ctx = GELU(form).forward(np.concatenate([far, -far]))
        dx = GELU(form).backward(ctx, np.ones(8, dtype))
    np.testing.assert_array_equal(y, np.concatenate([far, 0 * far]))
    np.testing.assert_array_equal(dx, [1] * 4 + [0] * 4)


def test_gelu_in_float32_is_close_to_float64():
    x = np.linspace(-8, 8, 2001).astype(np.float32)
    for form in "none", "tanh":
        y, ctx = GELU(form).forward(x)
        wide, wide_ctx = GELU(form).forward(x.astype(np.float64))
        np.testing.assert_allclose(y, wide, rtol=0, atol=1e-6)
        dy = np.ones_like(x)
        slopes = GELU(form).backward(ctx, dy), GELU(form).backward(wide_ctx, dy)
        np.testing.assert_allclose(*slopes, rtol=0, atol=2e-6)


def test_gelu_of_nan_is_nan_alone():
    for form in "none", "tanh":
        y = GELU(form)(np.array([np.nan, 1.0]))
        assert np.isnan(y[0])
        assert y[1] == GELU(form)(np.array([1.0]))[0]


def test_unknown_form_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"^approximate is 'erf', expected one of 'none', 'tanh'"):
        GELU("erf")


@given(st.lists(st.floats(-10, 10), min_size=1))
def test_erf_against_the_math_module(points):
    expected = [math.erf(x) for x in points]
    np.testing.assert_allclose(erf(np.array(points)), expected, rtol=0, atol=1e-14)


def test_erf_at_many_points():
    tiny = 10.0 ** -np.arange(0, 308, 3.5)
    huge = 10.0 ** np.arange(0, 308, 3.5)
    edges = [0.0, 5e-324, 2.9999999, 3.0, 5.9, 6.0, 26.0, 27.3, 30.0, np.inf]
    x = np.concatenate([np.linspace(0, 7, 70001), tiny, huge, edges])
    x = np.concatenate([x, -x])
    y = erf(x)
    expected = np.array([math.erf(t) for t in x.tolist()])
    assert np.abs(y - expected).max() <= 1e-14
    assert np.abs(y).max() == 1.0
    assert np.isnan(erf(np.nan))


def test_erf_is_odd_and_keeps_the_dtype():
    x = np.linspace(0, 4, 101)
    np.testing.assert_array_equal(erf(-x), -erf(x))
    narrow = erf(x.astype(np.float32))
    assert narrow.dtype == np.float32
    assert_close(narrow, erf(x), 5e-7)
