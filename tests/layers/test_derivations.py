"""The "In NumPy:" lines that end each derivation are code: they are run, and must give what
backward returns and adds."""

import importlib
import inspect
import math
import pkgutil
import sys
import textwrap

import numpy as np
import pytest
from helpers import assert_close, leaves, random_like, randomise, run

import npdecoder.layers
from npdecoder import (
    GELU,
    CrossEntropy,
    Dropout,
    Embedding,
    Layer,
    LayerNorm,
    LearnedPositions,
    Linear,
    Parameter,
    ReLU,
    ScaledDotProductAttention,
    SinusoidalPositions,
    Softmax,
    TiledAttention,
    Unembedding,
)


def layer_classes():
    """Every Layer that a module of npdecoder.layers defines."""
    for info in pkgutil.iter_modules(npdecoder.layers.__path__):
        module = importlib.import_module(f"npdecoder.layers.{info.name}")
        for value in vars(module).values():
            if (
                inspect.isclass(value)
                and issubclass(value, Layer)
                and value.__module__ == module.__name__
            ):
                yield value


def normal(*shape):
    return np.random.default_rng(shape).standard_normal(shape)


def generator():
    return np.random.default_rng(7)


IDS = np.array([[1, 1, 4, 0], [4, 1, 1, 2], [1, 4, 4, 1]])
TARGETS = np.array([[1, -1, 4, 0], [4, 1, -1, 2], [1, 4, 4, -1]])
QKV = normal(2, 3, 5, 4), normal(2, 3, 7, 4), normal(2, 3, 7, 6)
KEEP = np.random.default_rng(0).random((2, 1, 5, 7)) < 0.6
KEEP[0, :, 2] = False
WIDE = {"dtype": np.float64}

CASES = [
    (Linear(3, 5, **WIDE), (normal(2, 7, 3),), {}),
    (Linear(3, 5, bias=False, **WIDE), (normal(3),), {}),
    (Embedding(5, 3, scale=True, **WIDE), (IDS,), {}),
    (Unembedding(Embedding(5, 3, scale=True, **WIDE), bias=True), (normal(2, 7, 3),), {}),
    (Unembedding(Embedding(5, 3, **WIDE)), (normal(7, 3),), {}),
    (SinusoidalPositions(4, 7), (normal(2, 5, 4),), {}),
    (LearnedPositions(7, 4, **WIDE), (normal(2, 5, 4),), {}),
    (LearnedPositions(7, 4, **WIDE), (normal(3, 4, 4), IDS), {}),
    (Softmax(), (normal(2, 3, 5),), {}),
    (LayerNorm(7, 0.1, **WIDE), (normal(2, 3, 7),), {}),
    (LayerNorm(7, bias=False, **WIDE), (normal(7),), {}),
    (ReLU(), (normal(2, 3),), {}),
    (GELU(), (normal(2, 3),), {}),
    (GELU("tanh"), (normal(2, 3),), {}),
    (Dropout(0.3), (normal(5, 7),), {"rng": generator()}),
    (ScaledDotProductAttention(), QKV, {"mask": KEEP}),
    (ScaledDotProductAttention(0.3), QKV, {"mask": KEEP, "rng": generator()}),
    (TiledAttention(tile=3), QKV, {"mask": KEEP}),
    (TiledAttention(0.3, causal=True, tile=3), QKV, {"mask": KEEP, "rng": generator()}),
    (CrossEntropy(), (normal(3, 4, 5), IDS), {}),
    (CrossEntropy(-1, label_smoothing=0.3), (normal(3, 4, 5), TARGETS), {}),
]


def derivation(layer_class):
    """The block of code after "In NumPy:" in the docstring of backward."""
    _, mark, block = inspect.getdoc(layer_class.backward).partition("In NumPy:\n")
    assert mark, f"{layer_class.__name__}.backward has no lines In NumPy"
    return textwrap.dedent(block)


def test_every_layer_has_a_derivation_and_a_case():
    classes = set(layer_classes())
    assert len(classes) >= 11
    assert {type(layer) for layer, _, _ in CASES} == classes
    for layer_class in classes:
        assert "Derivation" in layer_class.backward.__doc__
        assert derivation(layer_class).strip()


def with_locals(function, *arguments):
    """What the function returns, and its local variables as it returns."""
    local = {}

    def profile(frame, event, _):
        if event == "return" and frame.f_code is function.__code__:
            local.update(frame.f_locals)

    sys.setprofile(profile)
    try:
        return function(*arguments), local
    finally:
        sys.setprofile(None)


def test_the_named_intermediates_are_looked_at():
    layer = LayerNorm(7, **WIDE)
    y, ctx = layer.forward(normal(3, 7))
    _, local = with_locals(layer.backward, ctx, np.ones_like(y))
    assert {"dx_hat", "dxc", "dx"} <= set(local)


@pytest.mark.parametrize(("layer", "inputs", "keywords"), CASES, ids=lambda v: type(v).__name__)
def test_lines_in_numpy_give_what_backward_gives(layer, inputs, keywords):
    randomise(layer, np.random.default_rng(1))
    y, ctx = layer.forward(*inputs, **keywords)
    dy = random_like(y, np.random.default_rng(2))
    returned, local = with_locals(layer.backward, ctx, dy)
    returned = leaves(returned)

    namespace = {"np": np, "math": math, "self": layer, "dy": dy, "dloss": dy}
    parameters = {}
    for name, value in vars(layer).items():
        if isinstance(value, Parameter):
            parameters[name] = value
            value = value.value
        namespace[name] = value
    namespace |= ctx._asdict()
    before = set(namespace)
    exec(derivation(type(layer)), namespace)

    names = (
        [f"d{name}" for name in inspect.signature(layer.forward).parameters]
        if len(inputs) > 1
        else ["dx"]
    )
    outputs = [name for name, x in zip(names, inputs) if np.asarray(x).dtype.kind == "f"]
    assert len(outputs) == len(returned), "one line for each returned array"
    assert not set(outputs) & before
    for name, array in zip(outputs, returned):
        assert_close(namespace[name], array)
    for name in (set(namespace) - before) & set(local):  # dx_hat, dxc, dA, dS, ...
        assert_close(namespace[name], local[name])
    for name, parameter in parameters.items():
        assert_close(namespace[f"d{name}"], parameter.grad)


def test_the_comparison_can_fail():
    layer = randomise(LayerNorm(3, **WIDE), np.random.default_rng(1))
    x, dy = normal(2, 5, 3)
    _, dx, _ = run(layer, (x,), {}, dy)
    x_hat, rstd = layer.forward(x)[1]
    names = {"np": np, "dy": dy, "x_hat": x_hat, "rstd": rstd, "gamma": np.ones(3)}
    exec(derivation(LayerNorm), names)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(names["dx"], dx)
