"""float32 is as exact as its rounding allows, at every width.

What is quick for some sizes only, by our thresholds or by the kernels of BLAS, is to be right at
each of them. What is exact is the same layer in float64, which is held to finite differences
elsewhere.
"""

import copy

import numpy as np
import pytest
from helpers import leaves, parameter_gradients, randomise, relative_error

from npdecoder import (
    GELU,
    CrossEntropy,
    LayerNorm,
    Linear,
    ReLU,
    ScaledDotProductAttention,
    Softmax,
    TiledAttention,
    causal_mask,
    log_softmax,
    softmax,
)

WIDTHS = (*range(1, 71), 127, 128, 129, 255, 256, 257)
ROWS = ((), (1,), (3,), (2, 17))
LAYERS = {
    "Linear from": (1, lambda n: Linear(n, 1 + 7 * n % 64, rng=0)),
    "Linear to": (1, lambda n: Linear(1 + 7 * n % 64, n, rng=0)),
    "LayerNorm": (3, LayerNorm),  # of two numbers y is -1 and 1, and dx nothing but rounding
    "Softmax": (2, lambda n: Softmax()),
    "ReLU": (1, lambda n: ReLU()),
    "GELU": (1, lambda n: GELU()),
    "GELU tanh": (1, lambda n: GELU("tanh")),
}


def largest_error(layer, inputs, dy, *options):
    """Of float32 forward and backward, relative to the largest number of each array."""
    found = []
    for dtype in (np.float32, np.float64):
        one = copy.deepcopy(layer).astype(dtype)
        y, ctx = one.forward(*(x.astype(dtype) for x in inputs), *options)
        dx = one.backward(ctx, dy.astype(dtype))
        found.append([y, *leaves(dx), *parameter_gradients(one).values()])
    assert all(array.dtype == np.float32 for array in found[0])
    return max(relative_error(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    rng = np.random.default_rng(0)
    from_width, make = LAYERS[name]
    for n in WIDTHS[from_width - 1 :]:
        layer = randomise(make(n), rng).astype(np.float32)
        d_in, d_out = layer.W.shape if isinstance(layer, Linear) else (n, n)
        for rows in ROWS:
            x = rng.standard_normal((*rows, d_in), dtype=np.float32)
            dy = rng.standard_normal((*rows, d_out), dtype=np.float32)
            assert largest_error(layer, [x], dy) < 1e-5, (n, rows)


@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_functions(function):
    rng = np.random.default_rng(0)
    for n in WIDTHS:
        for rows in ROWS:
            x = 3 * rng.standard_normal((*rows, n), dtype=np.float32)
            assert relative_error(function(x), function(x.astype(np.float64))) < 1e-6, (n, rows)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy(label_smoothing):
    rng = np.random.default_rng(0)
    criterion = CrossEntropy(label_smoothing=label_smoothing)
    for V in WIDTHS[1:]:
        for rows in ROWS[1:]:
            logits = 3 * rng.standard_normal((*rows, V), dtype=np.float32)
            targets = rng.integers(0, V, rows)
            one = criterion.forward(logits, targets)
            exact = criterion.forward(logits.astype(np.float64), targets)
            assert relative_error(one[0], exact[0], 1.0) < 1e-6, (V, rows)
            dlogits = [criterion.backward(ctx) for _, ctx in (one, exact)]
            assert relative_error(*dlogits, 1.0 / targets.size) < 1e-6, (V, rows)


@pytest.mark.parametrize("layer", [ScaledDotProductAttention(), TiledAttention(causal=True)])
def test_attention(layer):
    rng = np.random.default_rng(0)
    for n in WIDTHS[1:70]:
        T, S, d_k, d_v = 2 + 11 * n % 67, 2 + 13 * n % 71, n, 1 + 5 * n % 61
        shapes = (T, d_k), (S, d_k), (S, d_v), (T, d_v)
        q, k, v, dy = (rng.standard_normal((2, *shape[:1], 3, shape[1]), dtype=np.float32)
                       .swapaxes(1, 2) for shape in shapes)  # fmt: skip
        mask = () if isinstance(layer, TiledAttention) else (causal_mask(T, S),)
        assert largest_error(layer, [q, k, v], dy, *mask) < 1e-5, (T, S, d_k, d_v)
