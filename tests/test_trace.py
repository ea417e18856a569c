"""Trace: all that the derivations name, as it was computed, and layers that know nothing of it."""

from __future__ import annotations

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import randomise

from npdecoder import (
    CrossEntropy,
    Dropout,
    LanguageModel,
    LanguageModelConfig,
    Layer,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    Parameter,
    Trace,
    Transformer,
    TransformerConfig,
    load_weights,
)

SIZES = {"d_model": 6, "num_heads": 2, "d_ff": 7}
LAYERS = {"num_encoder_layers": 1, "num_decoder_layers": 2}
SOURCE, TARGET = [[2, 5, 3, 1], [4, 1, 0, 0]], [[1, 7, 4], [1, 2, 0]]
WANTED = [[7, 4, 6], [2, 5, 0]]


def model_of(**options: Any) -> Transformer:
    config = TransformerConfig(9, 8, pad_id=0, **SIZES, **LAYERS, **options)
    return randomise(Transformer(config, 0, dtype=np.float64), np.random.default_rng(0))


def run(model: Any, cls: type[Trace] = Trace) -> tuple[Trace, Any, Any]:
    criterion = CrossEntropy(ignore_index=0)
    with cls(model, criterion=criterion) as trace:
        logits, ctx = model.forward(SOURCE, TARGET)
        _, loss_ctx = criterion.forward(logits, WANTED)
        model.backward(ctx, criterion.backward(loss_ctx))
    return trace, logits, ctx


@pytest.mark.parametrize("options", [
    {}, {"norm": "post"}, {"cross_attention": "shared"}, {"tie_embeddings": "target_output"},
])  # fmt: skip
def test_the_context_of_every_layer_is_in_the_trace(options: dict[str, Any]) -> None:
    trace, logits, ctx = run(model_of(**options))
    attention = ctx.decode.decoder.layers[1].self_attention.attend.attention
    found = trace["decoder.layers.1.self_attention.attention"]
    for name in ("q", "k", "v", "A", "A_dropped"):
        np.testing.assert_array_equal(found[name], getattr(attention, name))
    np.testing.assert_array_equal(trace["output"]["logits" if "tie_embeddings" in options else "y"],
                                  logits)
    np.testing.assert_array_equal(trace[""]["logits"], logits)
    feed_forward = ctx.decode.decoder.layers[0].feed_forward
    np.testing.assert_array_equal(
        trace["decoder.layers.0.feed_forward.linear2"]["x"], feed_forward.linear2.x
    )


# What each backward's derivation names must be there to be looked at: a local of that name
NAMED = {
    "decoder.layers.0.self_attention.attention": "S S_masked A A_dropped context dA_dropped dv dA "
    "dS dq dk",
    "decoder.layers.0.cross_attention.attention": "S A context dA dS",
    "decoder.layers.0.norm1": "x_hat rstd y dy dx",
    "decoder.layers.0.feed_forward.linear1": "x y dy dx dW db",
    "decoder.layers.0.self_attention": "Q K V context output dcontext dQ dK dV dquery dkey dvalue",
    "decoder.layers.0": "x1 x2 y dx2 dx1 dx",
    "encoder.layers.0.self_attention.attention.softmax": "y dy dx",
    "source_embedding": "ids y dy dW",
    "criterion": "log_p loss dlogits",
}


@pytest.mark.parametrize("layer", NAMED)
def test_what_the_derivations_name_is_found_by_name(layer: str) -> None:
    trace, _, _ = run(model_of())
    found = trace[layer]
    assert not [name for name in NAMED[layer].split() if name not in found], sorted(found)


def test_the_calls_come_in_their_order_and_each_backward_undoes_a_forward() -> None:
    trace, _, _ = run(model_of())
    assert [call.index for call in trace] == list(range(len(trace)))
    forwards = [call.layer for call in trace if call.method == "forward" and call.layer]
    backwards = [call.layer for call in trace if call.method == "backward" and call.layer]
    assert forwards[0] == "source_embedding"
    assert sorted(forwards) == sorted(backwards)
    directions = [call.direction for call in trace]
    first_backward = directions.index("backward")
    assert set(directions[:first_backward]) == {"forward"}
    assert set(directions[first_backward:]) == {"backward"}
    for call in trace:
        if call.parent is not None:
            assert trace.calls[call.parent].depth == call.depth - 1


def test_inputs_are_those_of_the_call_even_where_the_name_is_bound_anew() -> None:
    trace, _, _ = run(model_of())
    encoder = next(c for c in trace if c.layer == "encoder" and c.method == "forward")
    embedded = next(c for c in trace if c.layer == "encoder.layers.0" and c.method == "forward")
    np.testing.assert_array_equal(encoder.inputs["x"], embedded.inputs["x"])
    assert not np.array_equal(encoder.values["output"], encoder.inputs["x"])


def test_parameter_gradients_are_what_the_call_left_in_grad() -> None:
    model = model_of()
    trace, _, _ = run(model)
    grads = {name: p.grad for name, p in model.named_parameters()}
    for name in ("decoder.layers.1.self_attention.W_q", "encoder.norm", "output"):
        for attribute in vars(dict(trace.names)[name]):
            if f"{name}.{attribute}" in grads:
                np.testing.assert_array_equal(
                    trace[name][f"d{attribute}"], grads[f"{name}.{attribute}"]
                )


def test_arrays_are_copies_and_the_numbers_are_those_without_a_trace() -> None:
    model, plain = model_of(), model_of()
    trace, logits, _ = run(model)
    before = {name: array.copy() for name, array in trace["decoder.layers.0"].items()}
    expected, plain_ctx = plain.forward(SOURCE, TARGET)
    np.testing.assert_array_equal(logits, expected)
    criterion = CrossEntropy(ignore_index=0)
    plain.backward(plain_ctx, criterion.backward(criterion.forward(expected, WANTED)[1]))
    for a, b in zip(model.parameters(), plain.parameters()):
        np.testing.assert_array_equal(a.grad, b.grad)
    logits[...] = 0.0
    for parameter in model.parameters():
        parameter.value = np.zeros(parameter.shape)
    for name, array in trace["decoder.layers.0"].items():
        np.testing.assert_array_equal(array, before[name])


def test_nothing_is_recorded_before_and_after_and_the_old_profiler_comes_back() -> None:
    seen: list[str] = []

    def profiler(frame: Any, event: str, arg: Any) -> None:
        seen.append(event)

    layer = Linear(2, 3, rng=0)
    layer(np.ones((1, 2), np.float32))
    old = sys.getprofile()
    sys.setprofile(profiler)
    try:
        with Trace(layer) as trace:
            layer(np.ones((1, 2), np.float32))
        assert sys.getprofile() is profiler
        layer(np.ones((1, 2), np.float32))
    finally:
        sys.setprofile(old)
    assert seen
    assert len(trace) == 1


def test_an_error_in_a_layer_leaves_the_calls_that_ended_and_restores_the_profiler() -> None:
    model, old = model_of(), sys.getprofile()
    with pytest.raises(IndexError), Trace(model) as trace:
        model(SOURCE, [[99, 1, 1], [1, 1, 1]])
    assert sys.getprofile() is old
    assert all(call.layer != "decoder" for call in trace)


def test_other_layers_of_the_same_class_are_not_recorded() -> None:
    mine, other = LayerNorm(3, dtype=np.float64), LayerNorm(3, dtype=np.float64)
    with Trace(mine) as trace:
        other(np.ones((2, 3)))
        mine(np.arange(6.0).reshape(2, 3))
    assert [call.layer for call in trace] == [""]


def test_a_layer_used_twice_has_two_calls_and_the_last_one_by_name() -> None:
    linear = Linear(2, 2, rng=0, dtype=np.float64)
    with Trace(linear) as trace:
        linear(np.ones((1, 2)))
        linear(np.zeros((3, 2)))
    assert len(trace) == 2
    np.testing.assert_array_equal(trace[""]["x"], np.zeros((3, 2)))


def test_a_students_own_layer_is_traced_too() -> None:
    class Scale:
        def __init__(self) -> None:
            self.a = Parameter([2.0])

        def forward(self, x: Any) -> Any:
            doubled = x * 2.0
            y = doubled * self.a.value
            return y, (x, doubled)

        def backward(self, ctx: Any, dy: Any) -> Any:
            self.a.grad += (dy * ctx[1]).sum(keepdims=True)
            dx = dy * self.a.value * 2.0
            return dx

    layer = Scale()
    with Trace(layer) as trace:
        y, ctx = layer.forward(np.array([3.0]))
        layer.backward(ctx, np.ones_like(y))
    found = trace[""]
    assert {name: float(found[name][0]) for name in ("x", "doubled", "y", "dy", "dx", "da")} == {
        "x": 3.0, "doubled": 6.0, "y": 12.0, "dy": 1.0, "dx": 4.0, "da": 6.0,
    }  # fmt: skip


class Elsewhere(Trace):
    """Each event is worked on in another thread.

    While a profile function runs, debuggers and coverage see nothing; in the other thread they do.
    """

    def __enter__(self) -> Trace:
        self.thread = ThreadPoolExecutor(1)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.thread.shutdown()

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        self.thread.submit(super()._profile, frame, event, arg).result()


@pytest.mark.parametrize("options", [{}, {"norm": "post", "cross_attention": "shared"}])
def test_all_that_is_recorded_is_in_the_frames(options: dict[str, Any]) -> None:
    """Whatever thread reads them, the calls are the same."""
    (trace, *_), (other, *_) = run(model_of(**options)), run(model_of(**options), Elsewhere)
    assert len(trace) == len(other) > 50
    for call, same in zip(trace, other):
        for field in dataclasses.fields(call):
            found, expected = getattr(same, field.name), getattr(call, field.name)
            if field.name == "outputs":
                found, expected = dict(enumerate(found)), dict(enumerate(expected))
            if isinstance(expected, dict):
                assert list(found) == list(expected)
                for name, array in expected.items():
                    np.testing.assert_array_equal(found[name], array, err_msg=name)
            else:
                assert found == expected, field.name


@pytest.mark.parametrize("cls", [Trace, Elsewhere])
def test_a_context_of_one_array_has_no_fields(cls: type[Trace]) -> None:
    """It is the forward's, under its name there."""
    class Square:
        def forward(self, x: Any) -> Any:
            return x**2, x

        def backward(self, ctx: Any, dy: Any) -> Any:
            dx = 2.0 * ctx * dy
            return dx

    layer = Square()
    with cls(layer) as trace:
        layer.backward(layer.forward(np.array([3.0]))[1], np.array([5.0]))
    assert [{name: float(x[0]) for name, x in call.arrays().items()} for call in trace] == [
        {"x": 3.0, "output": 9.0}, {"dy": 5.0, "dx": 30.0},
    ]  # fmt: skip


def test_an_unknown_name_is_told_the_known_ones() -> None:
    trace, _, _ = run(model_of())
    with pytest.raises(KeyError, match=r"decoder\.layers\.7.*decoder\.layers\.0"):
        trace["decoder.layers.7"]


def test_dropout_shows_its_mask() -> None:
    layer = Dropout(0.5)
    with Trace(layer) as trace:
        layer.forward(np.ones((4, 5)), rng=np.random.default_rng(0))
    assert trace[""]["keep"].dtype == np.bool_


def test_the_table_names_every_call_and_array() -> None:
    trace, _, _ = run(model_of())
    lines = str(trace).splitlines()
    assert max(map(len, lines)) <= 80
    for call in trace:
        arrow = "->" if call.direction == "forward" else "<-"
        assert any(line.startswith(f"{call.index} {arrow} ") for line in lines)
    assert sum(line.split()[0] == "dS" for line in lines) == 5  # 1 encoder, 2 x 2 decoder


def test_every_array_is_saved_and_comes_back(tmp_path: Path) -> None:
    trace, _, _ = run(model_of())
    trace.save(tmp_path / "t.npz")
    loaded = load_weights(tmp_path / "t.npz")
    assert len(loaded) == sum(len(call.arrays()) for call in trace)
    call = next(c for c in trace if c.layer.endswith("attention.attention"))
    np.testing.assert_array_equal(
        loaded[f"{call.index:04d}.{call.layer}.forward.A"], call.values["A"]
    )


def test_a_language_model_and_project_and_attend() -> None:
    model = LanguageModel(LanguageModelConfig(7, d_model=4, num_heads=2, num_layers=1), 0)
    with Trace(model) as trace:
        logits, ctx = model.forward([[1, 2, 3]])
        model.backward(ctx, np.ones_like(logits))
    assert {"S", "dS"} <= trace["decoder.layers.0.self_attention.attention"].keys()
    attention = MultiHeadAttention(4, 2, rng=0)
    with Trace(attention) as trace:
        (K, V), _ = attention.project(np.ones((1, 3, 4)), np.ones((1, 3, 4)))
        attention.attend(np.ones((1, 2, 4)), K, V)
    assert [call.method for call in trace if not call.layer] == ["project", "attend"]


def test_a_layer_without_calls_has_an_empty_trace() -> None:
    with Trace(Layer()) as trace:
        pass
    assert len(trace) == 0
    assert str(trace).count("\n") == 0
