"""gradcheck_all checks every public layer, block and model, with options drawn from its seed."""

import functools

import numpy as np
import pytest

import npdecoder
from npdecoder import Layer, gradcheck_all, models
from npdecoder.gradcheck_all import CASES, Draw

SEEDS = (0, 1)


@functools.cache
def run(seed):
    return tuple(gradcheck_all.gradcheck_all(seed))


def public_layers():
    exported = (getattr(npdecoder, name) for name in npdecoder.__all__)
    return {
        cls.__name__
        for cls in exported
        if isinstance(cls, type) and issubclass(cls, Layer) and cls is not Layer
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_every_public_layer_block_and_model_is_checked_once(seed):
    names = [checked.name for checked in run(seed)]
    assert len(names) == len(set(names))
    assert set(names) == public_layers()


@pytest.mark.parametrize("seed", SEEDS)
def test_all_are_right(seed):
    for checked in run(seed):
        assert checked.report.ok, f"{checked.name} {checked.options}\n{checked.report}"
        assert checked.report.max_relative_error < 1e-6


@pytest.mark.parametrize("seed", SEEDS)
def test_each_report_is_of_the_layer_it_is_named_after(seed):
    for checked in run(seed):
        assert f"gradcheck of {checked.name}:" in str(checked.report)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_parameter_and_float_input_is_checked(seed):
    for checked in run(seed):
        case = CASES[checked.name]
        layer, inputs, _ = case(Draw(np.random.default_rng([seed, *checked.name.encode()])))
        names = [row.name for row in checked.report.rows]
        parameters = [name for name, _ in layer.named_parameters()]
        floats = [x for x in leaves(inputs) if np.asarray(x).dtype.kind == "f"]
        assert len(names) == len(floats) + len(parameters)
        assert names[len(floats) :] == parameters


def leaves(value):
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [] if value is None else [value]


@pytest.mark.parametrize("seed", SEEDS)
def test_small_layers_are_checked_element_by_element(seed):
    for checked in run(seed):
        if hasattr(models, checked.name):
            continue
        assert all(row.index is not None for row in checked.report.rows), checked.name


@pytest.mark.parametrize("seed", SEEDS)
def test_no_gradient_is_checked_where_it_is_all_zero_by_construction(seed):
    """A check of zeros against zeros proves little: at most a few may be so (p = 1, key biases)."""
    rows = [row for checked in run(seed) for row in checked.report.rows]
    zero = [row for row in rows if max(abs(row.analytic), abs(row.numeric)) < 1e-9]
    assert len(zero) <= 0.1 * len(rows)


def facts(checked):
    return checked.name, checked.options, checked.report.rows


@pytest.mark.parametrize("seed", SEEDS)
def test_the_seed_alone_decides(seed, monkeypatch):
    """Not what was drawn for the layers before: a failure can be looked at alone."""
    slow = ("Encoder", "Decoder")
    again = {name: case for name, case in reversed(CASES.items()) if name not in slow}
    monkeypatch.setattr(gradcheck_all, "CASES", again)
    expected = {checked.name: facts(checked) for checked in run(seed)}
    for checked in gradcheck_all.gradcheck_all(seed):
        assert facts(checked) == expected[checked.name]


def test_another_seed_draws_other_options_sizes_and_weights():
    first, second = run(0), run(1)
    assert [c.options for c in first] != [c.options for c in second]
    for a, b in zip(first, second):
        assert a.report.rows != b.report.rows
    shapes = [[[row.shape for row in c.report.rows] for c in checks] for checks in (first, second)]
    assert shapes[0] != shapes[1]


def options_over(seeds):
    """Every (layer, option, choice) that these seeds draw, without the checks themselves."""
    drawn = set()
    for seed in seeds:
        for name, case in CASES.items():
            draw = Draw(np.random.default_rng([seed, *name.encode()]))
            case(draw)
            drawn |= {(name, option, choice) for option, choice in draw.chosen.items()}
    return drawn


def test_seeds_reach_the_options_that_change_a_backward():
    drawn = options_over(range(30))
    for name in ("EncoderLayer", "Encoder", "DecoderLayer", "Decoder", "Transformer"):
        for option, choices in {
            "norm": ("pre", "post"),
            "norm_bias": (True, False),
            "attention_bias": (True, False),
            "feed_forward_bias": (True, False),
            "activation": ("relu", "gelu", "gelu_tanh"),
        }.items():
            assert {(name, option, choice) for choice in choices} <= drawn
        assert any(n == name and o == "dropout" and c > 0 for n, o, c in drawn)
    for name, choices in {
        "DecoderLayer": ("per_layer", "shared", "none"),
        "Decoder": ("per_layer", "shared", "none"),
        "Transformer": ("per_layer", "shared"),
    }.items():
        assert {(name, "cross_attention", choice) for choice in choices} <= drawn
    for choice in ("none", "target_output", "source_target", "all"):
        assert ("Transformer", "tie_embeddings", choice) in drawn
    for choice in ("sinusoidal", "learned"):
        assert ("Transformer", "positions", choice) in drawn


def test_it_would_notice_a_wrong_layer(monkeypatch):
    """The numbers of this file come from the layers of the package, not from copies of them."""
    right = npdecoder.LayerNorm.backward
    monkeypatch.setattr(
        npdecoder.LayerNorm, "backward", lambda self, ctx, dy: 1.001 * right(self, ctx, dy)
    )
    wanted = ("Linear", "LayerNorm", "EncoderLayer")
    monkeypatch.setattr(gradcheck_all, "CASES", {name: CASES[name] for name in wanted})
    verdicts = {checked.name: checked.report.ok for checked in gradcheck_all.gradcheck_all(0)}
    assert verdicts == {"Linear": True, "LayerNorm": False, "EncoderLayer": False}
