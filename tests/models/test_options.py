"""Every option of every constructor has an effect, and all pairs of options work together."""

import inspect
from dataclasses import fields
from itertools import combinations

import numpy as np
import pytest
from helpers import randomise
from hypothesis import given, settings
from hypothesis import strategies as st

from npdecoder import (
    CrossEntropy,
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    LanguageModel,
    LanguageModelConfig,
    Layer,
    Transformer,
    TransformerConfig,
    gradcheck,
)

# Other values than those that the builders below start from

STACK = {
    "d_ff": 5,
    "d_k": 5,
    "d_v": 5,
    "norm": "post",
    "norm_bias": False,
    "norm_eps": 0.5,
    "attention_bias": True,
    "feed_forward_bias": False,
    "activation": "gelu",
    "dropout": 0.5,
    "attention_dropout": 0.5,
}
MODEL = {
    **STACK,
    "final_norm": False,
    "output_bias": False,
    "position_dropout": 0.5,
    "pad_id": None,
    "positions": "learned",
    "scale_embeddings": False,
    "tie_embeddings": "target_output",
    "d_model": 24,
    "num_heads": 2,
    "num_layers": 1,
    "vocab_size": 14,
}
IDS = np.array([[5, 7, 9, 0], [1, 2, 0, 3]])


def language_model(**options):
    start = {"vocab_size": 13, "d_model": 12, "num_heads": 3, "num_layers": 2, "pad_id": 0}
    options = {**start, "dropout": 0.1, "max_len": 11, **options}
    return LanguageModel(LanguageModelConfig(**options), 0, dtype=np.float64), (IDS,)


def tied_language_model(**options):
    return language_model(**{"tie_embeddings": "target_output", **options})


def block(make, *inputs):
    def build(**options):
        options = {"d_model": 12, "num_heads": 3, "dropout": 0.1, **options}
        return make(rng=0, dtype=np.float64, **options), inputs

    return build


X, MEMORY = np.random.default_rng(1).standard_normal((2, 2, 4, 12))
ONE_OF_EACH = {"num_layers": 1, "final_norm": False}
CROSS = {"cross_attention": "none"}
BUILDERS = {
    "LanguageModel": (language_model, MODEL),
    "LanguageModel, tied": (tied_language_model, {**MODEL, "tie_embeddings": "none"}),
    "EncoderLayer": (block(EncoderLayer, X), STACK),
    "DecoderLayer": (block(DecoderLayer, X, MEMORY), STACK),
    "Encoder": (block(lambda **o: Encoder(o.pop("num_layers", 2), **o), X), STACK | ONE_OF_EACH),
    "Decoder": (
        block(lambda **o: Decoder(o.pop("num_layers", 2), **o), X, MEMORY),
        STACK | ONE_OF_EACH,
    ),
}


def outcome(build, options):
    """What can differ: names and shapes, and the outputs with and without dropout."""
    layer, inputs = build(**options)
    rng = np.random.default_rng(0)
    shapes = [(name, p.shape) for name, p in layer.named_parameters()]
    for parameter in layer.parameters():
        parameter.value += 0.3 * rng.standard_normal(parameter.shape)
    return shapes, (layer(*inputs), layer(*inputs, rng=np.random.default_rng(0)))


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, (_, options) in BUILDERS.items() for name in options]
)
def test_an_option_has_an_effect(kind, name):
    build, options = BUILDERS[kind]
    shapes, outputs = outcome(build, {name: options[name]})
    old_shapes, old_outputs = outcome(build, {})
    assert shapes != old_shapes or any(
        a.shape != b.shape or np.abs(a - b).max() > 1e-6 for a, b in zip(outputs, old_outputs)
    )


def test_every_option_is_tried():
    """max_len is tried in the tests of lengths, cross_attention in those of the decoder."""
    assert {*MODEL, "max_len"} == {field.name for field in fields(LanguageModelConfig)}
    for layer in EncoderLayer, DecoderLayer:
        parameters = inspect.signature(layer).parameters
        given = {"d_model", "num_heads", "rng", "dtype", "cross_attention"}
        assert set(STACK) == set(parameters) - given


# All pairs of the options of an encoder-decoder and of a decoder-only model

CHOICES = {
    "norm": ["pre", "post"],
    "final_norm": [None, True, False],
    "cross_attention": ["per_layer", "shared", "none"],
    "activation": ["relu", "gelu", "gelu_tanh"],
    "norm_bias": [True, False],
    "attention_bias": [True, False],
    "feed_forward_bias": [True, False],
    "output_bias": [True, False],
    "positions": ["sinusoidal", "learned"],
    "scale_embeddings": [True, False],
    "tie_embeddings": ["none", "target_output", "source_target", "all"],
    "d_k": [None, 3],
    "d_v": [None, 5],
    "pad_id": [None, 0],
    "dropout": [0.0, 0.3],
}


def possible(case):
    return case["cross_attention"] != "none" or case["tie_embeddings"] in ("none", "target_output")


def pairs(case):
    return set(combinations(case.items(), 2))


def all_pairs():
    """Cases, drawn until every possible pair of choices is in one: the best of many each time."""
    rng = np.random.default_rng(0)

    def draw():
        while True:
            case = {name: c[rng.integers(len(c))] for name, c in CHOICES.items()}
            if possible(case):
                return case

    missing = set().union(*(pairs(draw()) for _ in range(3000)))
    cases = []
    while missing:
        case = max((draw() for _ in range(60)), key=lambda case: len(pairs(case) & missing))
        if pairs(case) & missing:
            cases.append(case)
            missing -= pairs(case)
    return cases


CASES = all_pairs()


def test_every_pair_is_possible_but_those_of_one_embedding():
    covered = set().union(*(pairs(case) for case in CASES))
    every = {
        ((a, x), (b, y))
        for a, b in combinations(CHOICES, 2)
        for x in CHOICES[a]
        for y in CHOICES[b]
    }
    assert every - covered == {
        (("cross_attention", "none"), ("tie_embeddings", tie)) for tie in ("source_target", "all")
    }


class LossOf(Layer):
    """A model and its loss as one layer."""

    def __init__(self, model):
        self.model, self.criterion = model, CrossEntropy(ignore_index=0)

    def forward(self, *ids, rng=None):
        *inputs, targets = ids
        logits, model = self.model.forward(*inputs, rng=rng)
        loss, criterion = self.criterion.forward(logits, targets)
        return loss, (model, criterion)

    def backward(self, ctx, dloss):
        model, criterion = ctx
        return self.model.backward(model, self.criterion.backward(criterion, dloss))


def check(case, seed):
    """The directional gradcheck of a whole model: random weights, padding, S != T."""
    rng = np.random.default_rng(seed)
    options = {"d_model": 6, "num_heads": 2, "d_ff": 7, "max_len": 11, "norm_eps": 0.01, **case}
    if case["cross_attention"] == "none":
        del options["cross_attention"]
        model = LanguageModel(LanguageModelConfig(13, num_layers=2, **options), rng)
    else:
        layers = {"num_encoder_layers": 2, "num_decoder_layers": 2}
        model = Transformer(TransformerConfig(13, 13, **layers, **options), rng)
    randomise(model.astype(np.float64), rng)
    source, target, targets = (rng.integers(0, 13, (3, n)) for n in (7, 5, 5))
    source[0, :2] = target[1, -2:] = 0
    inputs = (target, targets) if isinstance(model, LanguageModel) else (source, target, targets)
    report = gradcheck(LossOf(model), *inputs, mode="directional", step=1e-4, seed=seed, rng=seed)
    assert report.max_relative_error < 1e-6, f"{case}\n{report}"
    assert len(report.rows) == len(model.parameters())


@pytest.mark.parametrize("number", range(len(CASES)))
def test_gradients_of_every_pair_of_options(number):
    check(CASES[number], number)


@settings(max_examples=15)
@given(
    case=st.fixed_dictionaries({n: st.sampled_from(c) for n, c in CHOICES.items()}).filter(
        possible
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_gradients_of_any_combination(case, seed):
    check(case, seed)
