import math

import numpy as np
import pytest
from helpers import assert_close, assert_gradients, distinct_primes, seeds
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import Softmax, log_softmax, softmax

INF, NAN = math.inf, math.nan


@given(sizes=distinct_primes(4, 7), rank=st.integers(1, 4), masked=st.booleans(), seed=seeds)
def test_gradients(sizes, rank, masked, seed):
    rng = np.random.default_rng(seed)
    x = 3 * rng.standard_normal(sizes[:rank])
    assert_gradients(Softmax(), x)
    if masked:  # -inf cannot be moved by a step: the finite entries' gradients hold beside it
        x[..., 0] = -INF
        y, ctx = Softmax().forward(x)
        dy = rng.standard_normal(x.shape)
        dx = Softmax().backward(ctx, dy)
        assert (y[..., 0] == 0).all()
        assert (dx[..., 0] == 0).all()
        _, rest = Softmax().forward(x[..., 1:])
        assert_close(dx[..., 1:], Softmax().backward(rest, dy[..., 1:]))


@given(sizes=distinct_primes(3), axis=st.integers(-3, 2), seed=seeds)
def test_definition_along_any_axis(sizes, axis, seed):
    x = np.random.default_rng(seed).standard_normal(sizes)
    expected = np.exp(x) / np.exp(x).sum(axis=axis, keepdims=True)
    assert_close(softmax(x, axis), expected, 1e-14)
    assert_close(log_softmax(x, axis), np.log(expected), 1e-14)


VALUES = [
    (softmax, np.float64, [1000, 1000, -1000], [0.5, 0.5, 0]),
    (softmax, np.float32, [1e38, -1e38, 0], [1, 0, 0]),
    (softmax, np.float32, [3e38, -3e38, 0], [1, 0, 0]),
    (softmax, np.float64, [-INF, 0, 1], [0, 0.2689414213699951, 0.7310585786300049]),
    (softmax, np.float64, [-INF, -INF], [0, 0]),
    (log_softmax, np.float64, [1000, 0], [0, -1000]),
    (log_softmax, np.float64, [-INF, 0], [-INF, 0]),
    (log_softmax, np.float64, [-INF, -INF], [-INF, -INF]),
    (log_softmax, np.float32, [3e38, 0], [0, -3e38]),
]


@pytest.mark.parametrize(("function", "dtype", "x", "expected"), VALUES)
def test_values_out_of_range(function, dtype, x, expected):
    with np.errstate(all="raise"):
        y = function(np.array(x, dtype))
    assert y.dtype == dtype
    np.testing.assert_allclose(y, np.array(expected, dtype), rtol=1e-10)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_a_nan_or_inf_row_is_nan_and_the_others_are_not(function, bad):
    x = np.array([[0.0, 1.0, 2.0], [0.0, bad, 1.0], [5.0, 5.0, 5.0]])
    with np.errstate(all="raise"):
        y = function(x)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], function(x[[0, 2]]))


@given(sizes=distinct_primes(2), seed=seeds, shift=st.sampled_from([1e4, -1e4]))
def test_shift_changes_nothing(sizes, seed, shift):
    x = np.random.default_rng(seed).integers(-8, 8, sizes) / 4  # exact after the shift too
    np.testing.assert_array_equal(softmax(x + shift), softmax(x))
    np.testing.assert_array_equal(log_softmax(x + shift), log_softmax(x))


def test_log_softmax_is_finite_where_softmax_rounds_to_zero():
    assert softmax([0.0, 800.0])[0] == 0.0
    assert log_softmax([0.0, 800.0])[0] == -800.0


def test_rows_do_not_meet():
    """A batch has the gradients of its rows: nothing is divided by their number."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 7, 5))
    _, ctx = Softmax().forward(x)
    dx = Softmax().backward(ctx, dy)
    for n in range(7):
        _, row = Softmax().forward(x[n])
        y = softmax(x[n])
        jacobian = np.diag(y) - np.outer(y, y)
        assert_close(Softmax().backward(row, dy[n]), jacobian @ dy[n])
        assert_close(dx[n], jacobian @ dy[n])


def test_row_without_entries():
    for shape in (3, 0), (0, 3), (0,):
        assert softmax(np.zeros(shape)).shape == shape
        assert log_softmax(np.zeros(shape)).shape == shape


def test_a_single_number_has_no_last_axis():
    with pytest.raises(ValueError, match=r"^x has shape \(\), expected \(\.\.\., n\)"):
        Softmax().forward(np.array(1.0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble])
@pytest.mark.parametrize(("function", "value"), [(softmax, 1.0), (log_softmax, 0.0)])
def test_a_single_number_keeps_its_dtype(function, value, dtype):
    """Before NumPy 2 a float32 number and a Python number make a float64."""
    for x in (dtype(3), np.array(3, dtype)):
        y = function(x)
        assert (y.dtype, y.shape) == (dtype, ())
        assert y == value


@pytest.mark.parametrize("dtype", [np.float16, np.int64, bool, complex])
@pytest.mark.parametrize("function", [softmax, log_softmax, Softmax()])
def test_other_dtypes_are_refused(function, dtype):
    with pytest.raises(TypeError, match=f"^x has dtype {np.dtype(dtype)}"):
        function(np.ones(3, dtype))
