import math

import numpy as np
import pytest
from helpers import assert_close, assert_gradients, distinct_primes, randomise, seeds
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import LearnedPositions, SinusoidalPositions


def draw_positions(kind, rng, B, T, max_len):
    if kind == "none":
        return None
    return rng.integers(0, max_len, (T,) if kind == "(T,)" else (B, T))


position_kinds = st.sampled_from(["none", "(T,)", "(B, T)"])


@given(sizes=distinct_primes(3, 7), extra=st.integers(0, 3), kind=position_kinds, seed=seeds)
def test_gradients_of_learned(sizes, extra, kind, seed):
    rng = np.random.default_rng(seed)
    B, T, d_model = sizes
    layer = randomise(LearnedPositions(T + extra, d_model, dtype=np.float64), rng)
    positions = draw_positions(kind, rng, B, T, T + extra)
    assert_gradients(layer, rng.standard_normal((B, T, d_model)), positions)


@given(sizes=distinct_primes(3, 7), kind=position_kinds, seed=seeds)
def test_gradients_of_sinusoidal(sizes, kind, seed):
    rng = np.random.default_rng(seed)
    B, T, half = sizes
    layer = SinusoidalPositions(2 * half, 17)
    positions = draw_positions(kind, rng, B, T, 17)
    assert_gradients(layer, rng.standard_normal((B, T, 2 * half)), positions)


@given(sizes=distinct_primes(3), kind=position_kinds, seed=seeds)
def test_rows_are_added_where_the_positions_say(sizes, kind, seed):
    rng = np.random.default_rng(seed)
    B, T, half = sizes
    x = rng.standard_normal((B, T, 2 * half))
    positions = draw_positions(kind, rng, B, T, 19)
    where = np.broadcast_to(np.arange(T) if positions is None else positions, (B, T))
    learned = LearnedPositions(19, 2 * half, rng=0, dtype=np.float64)
    sinusoidal = SinusoidalPositions(2 * half, 19)
    for layer, P in (learned, learned.P.value), (sinusoidal, sinusoidal.P):
        y = layer(x, positions)
        for b in range(B):
            for t in range(T):
                np.testing.assert_array_equal(y[b, t], x[b, t] + P[where[b, t]])


def test_repeated_positions_add_up():
    layer = LearnedPositions(4, 1, dtype=np.float64)
    _, ctx = layer.forward(np.zeros((2, 3, 1)), [[0, 0, 3], [1, 0, 0]])
    layer.backward(ctx, np.array([1.0, 2, 4, 8, 16, 32]).reshape(2, 3, 1))
    np.testing.assert_array_equal(layer.P.grad[:, 0], [1 + 2 + 16 + 32, 8, 0, 4])


def test_values():
    P = SinusoidalPositions(4, 3)(np.zeros((1, 3, 4)))[0]
    expected = [
        [0, 1, 0, 1],
        [0.8414709848, 0.5403023059, 0.0099998333, 0.9999500004],
        [0.9092974268, -0.4161468365, 0.0199986667, 0.9998000067],
    ]
    np.testing.assert_allclose(P, expected, rtol=0, atol=1e-10)


@given(half=st.integers(1, 20), position=st.integers(0, 4999))
def test_sines_and_cosines(half, position):
    P = SinusoidalPositions(2 * half, position + 1).P[position]
    for i in range(half):
        angle = position / 10000 ** (2 * i / (2 * half))
        assert abs(P[2 * i] - math.sin(angle)) < 1e-12
        assert abs(P[2 * i + 1] - math.cos(angle)) < 1e-12


def test_float32_holds_far_positions():
    layer = SinusoidalPositions(64, 5000)
    at = np.array([4999])
    narrow = layer(np.zeros((1, 1, 64), np.float32), at)
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, layer(np.zeros((1, 1, 64)), at), rtol=0, atol=1e-6)


@pytest.mark.parametrize("layer", [SinusoidalPositions(4, 3), LearnedPositions(3, 4, rng=0)])
def test_positions_run_over_the_sequence_not_the_batch(layer):
    for B in 2, 3:
        y = layer(np.zeros((B, 3, 4), np.float32))
        assert (y[0] == y[1]).all()
        assert all((y[0, t] != y[0, t + 1]).any() for t in range(2))


def test_initial_weights():
    P = LearnedPositions(1000, 64, rng=0, dtype=np.float64).P.value
    assert abs(P.std() - 1 / 8) < 0.01 / 8
    assert abs(P.mean()) < 0.01 / 8
    assert SinusoidalPositions(4, 3).num_parameters() == 0


@pytest.mark.parametrize("d_model", [1, 5])
def test_an_odd_width_has_no_sinusoids(d_model):
    with pytest.raises(ValueError, match=f"^d_model is {d_model}, expected an even number"):
        SinusoidalPositions(d_model, 3)
    assert LearnedPositions(3, d_model).P.shape == (3, d_model)


LAYERS = [SinusoidalPositions(4, 3), LearnedPositions(3, 4, rng=0)]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("shape", "positions", "error", "message"),
    [
        ((2, 4, 4), None, ValueError, "x has 4 positions, more than max_len 3"),
        ((2, 2, 4), [2, 3], ValueError, r"positions\[1\] is 3, .*max_len"),
        ((2, 2, 4), [[0, 1], [-1, 0]], ValueError, r"positions\[1, 0\] is -1, .*max_len"),
        ((2, 2, 4), [0, 1, 2], ValueError, r"positions has shape \(3,\)"),
        ((2, 2, 4), [[0, 1]], ValueError, r"positions has shape \(1, 2\)"),
        ((2, 3, 4), [[0], [1]], ValueError, r"positions has shape \(2, 1\)"),
        ((2, 2, 4), 1, ValueError, r"positions has shape \(\)"),
        ((2, 2, 4), [0.0, 1.0], TypeError, "positions has dtype float64"),
        ((2, 2, 4), [False, True], TypeError, "positions has dtype bool"),
        ((2, 4), None, ValueError, r"x has shape \(2, 4\), expected \(B, T, 4\)"),
        ((1, 2, 2, 4), None, ValueError, r"x has shape .* expected \(B, T, 4\)"),
        ((2, 2, 3), None, ValueError, r"x has shape .*4\)"),
    ],
)
def test_bad_input(layer, shape, positions, error, message):
    with pytest.raises(error, match=f"^{message}"):
        layer(np.zeros(shape, np.float32), positions)


@pytest.mark.parametrize("layer_class", [SinusoidalPositions, LearnedPositions])
@pytest.mark.parametrize("sizes", [(0, 2), (2, 0)])
def test_sizes_are_checked(layer_class, sizes):
    with pytest.raises(ValueError, match=r"^(d_model|max_len) is 0"):
        layer_class(*sizes)


def test_longest_sequence_is_taken():
    for layer in LAYERS:
        assert_close(layer(np.ones((1, 3, 4), np.float32))[0, 2], 1 + layer_row(layer, 2), 1e-6)


def layer_row(layer, position):
    P = layer.P if isinstance(layer, SinusoidalPositions) else layer.P.value
    return P[position]
