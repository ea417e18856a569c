"""PyTorch's state dicts and files: numbers, names, round trips, damaged and hostile files.

make_torch_files.py wrote torch_files/*.pt. What it says a tensor holds is said here again.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import measured
from hypothesis import given, settings
from hypothesis import strategies as st

from npdecoder import (
    Decoder,
    DecoderLayer,
    Embedding,
    Encoder,
    EncoderLayer,
    FeedForward,
    LanguageModel,
    LanguageModelConfig,
    Layer,
    LayerNorm,
    LearnedPositions,
    Linear,
    MemoryAttention,
    MemoryProjection,
    MultiHeadAttention,
    Parameter,
    ReLU,
    Transformer,
    TransformerConfig,
    Unembedding,
    interop,
)
from npdecoder.interop import load_torch_state_dict, read_torch_file, torch_state_dict

FOLDER = Path(__file__).with_name("torch_files")
SIZES = (4, 2, 7)  # d_model, num_heads, d_ff
D = SIZES[0]
V_SOURCE, V_TARGET, MAX_LEN, PAD = 11, 13, 9, 2
PRE = {"norm": "pre", "activation": "relu", "attention_bias": True}
POST = {"norm": "post", "activation": "gelu", "attention_bias": True}
NO_BIASES = {"attention_bias": False, "feed_forward_bias": False, "norm_bias": False}
CONFIG: dict[str, Any] = {
    "d_model": 4, "num_heads": 2, "d_ff": 7, "num_encoder_layers": 1, "num_decoder_layers": 2,
    "final_norm": True, "attention_bias": True, "pad_id": PAD, "max_len": MAX_LEN,
}
NAMES = {
    "source_embedding": "src_emb",
    "target_embedding": "tgt_emb",
    "encoder": "transformer.encoder",
    "decoder": "transformer.decoder",
    "output": "generator",
}
TIED = {"norm": "post", "tie_embeddings": "all", "output_bias": False, "positions": "learned",
        "scale_embeddings": False}
TIED_NAMES = {**NAMES, "source_positions.weight": "pos", "target_positions.weight": "pos"}
LANGUAGE_MODEL_NAMES = {"embedding": "wte", "positions": "wpe", "decoder": "stack",
                        "output": "head"}


def transformer(**options: Any) -> Transformer:
    target = V_SOURCE if options.get("tie_embeddings") in ("all", "source_target") else V_TARGET
    return Transformer(TransformerConfig(V_SOURCE, target, **{**CONFIG, **options}))


def tied_translator() -> Transformer:  # whose one vocabulary is the target's
    return Transformer(TransformerConfig(V_TARGET, V_TARGET, **{**CONFIG, **TIED}))


def language_model(**options: Any) -> LanguageModel:
    options = {"activation": "gelu", "scale_embeddings": False, "positions": "learned",
               "attention_bias": True, "max_len": MAX_LEN, **options}
    return LanguageModel(
        LanguageModelConfig(V_TARGET, d_model=4, num_heads=2, d_ff=7, num_layers=2, **options)
    )


# file: the layer that is the same, and names
MODULES: dict[str, tuple[Callable[[], Layer], dict[str, str] | None]] = {
    "linear": (lambda: Linear(5, 3), None),
    "layer_norm": (lambda: LayerNorm(5), None),
    "embedding": (lambda: Embedding(7, 5), None),
    "attention": (lambda: MultiHeadAttention(4, 2, bias=True), None),
    "attention_no_bias": (lambda: MultiHeadAttention(4, 2), None),
    "encoder_layer_pre": (lambda: EncoderLayer(*SIZES, **PRE), None),
    "encoder_layer_post": (lambda: EncoderLayer(*SIZES, **POST), None),
    "decoder_layer_pre": (lambda: DecoderLayer(*SIZES, **PRE), None),
    "decoder_layer_post": (lambda: DecoderLayer(*SIZES, **POST), None),
    "encoder_pre": (lambda: Encoder(2, *SIZES, **PRE), None),
    "encoder_post": (lambda: Encoder(2, *SIZES, **POST), None),
    "decoder_pre": (lambda: Decoder(2, *SIZES, **PRE), None),
    "decoder_post": (lambda: Decoder(2, *SIZES, **POST), None),
    "encoder_no_biases": (lambda: Encoder(1, *SIZES, **NO_BIASES), None),
    "transformer_pre": (lambda: transformer(norm="pre"), NAMES),
    "transformer_post": (lambda: transformer(norm="post"), NAMES),
    "transformer_tied": (tied_translator, TIED_NAMES),
    "language_model": (language_model, LANGUAGE_MODEL_NAMES),
}
# and layers beside these, whose state dicts are only written and read here
LAYERS: dict[str, Callable[[], Layer]] = {
    **{name: make for name, (make, _) in MODULES.items()},
    "linear without bias": lambda: Linear(5, 3, bias=False),
    "linear of one column": lambda: Linear(5, 1),  # its transpose is contiguous too
    "layer norm without bias": lambda: LayerNorm(5, bias=False),
    "learned positions": lambda: LearnedPositions(9, 4),
    "feed-forward": lambda: FeedForward(4, 7),
    "unembedding": lambda: Unembedding(Embedding(7, 5), bias=True),
    "one head": lambda: MultiHeadAttention(3, 1),
    "default layer": lambda: DecoderLayer(4, 2),
    "decoder-only layer": lambda: DecoderLayer(*SIZES, cross_attention="none"),
    "decoder without cross-attention": lambda: Decoder(2, *SIZES, cross_attention="none"),
    "tied output": lambda: transformer(tie_embeddings="target_output"),
    "tied sources": lambda: transformer(tie_embeddings="source_target", positions="learned"),
    "tied language model": lambda: language_model(tie_embeddings="target_output"),
    "longdouble": lambda: Linear(2, 3).astype(np.longdouble),
    "float64": lambda: EncoderLayer(4, 2).astype(np.float64),
}


def read(name: str) -> dict[str, Any]:
    return read_torch_file(FOLDER / f"{name}.pt")


def randomised(layer: Layer, seed: int = 0) -> Layer:
    rng = np.random.default_rng(seed)
    for parameter in layer.parameters():
        parameter.value = rng.standard_normal(parameter.shape).astype(parameter.dtype)
    return layer


def assert_equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """The same names, dtypes, shapes and numbers."""
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        assert a[name].shape == b[name].shape, name


def assert_refused(
    layer: Layer, mapping: Any, *words: str, error: type[Exception] = ValueError,
    names: dict[str, str] | None = None,
) -> str:
    """Loading raises an error with these words, and leaves every parameter as it was."""
    before = {name: parameter.value.tobytes() for name, parameter in layer.named_parameters()}
    with pytest.raises(error) as caught:
        load_torch_state_dict(layer, mapping, names)
    for word in words:
        assert word in str(caught.value)
    after = {name: parameter.value.tobytes() for name, parameter in layer.named_parameters()}
    assert after == before
    return str(caught.value)


# The numbers of PyTorch


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_pytorch_runs_here(name: str) -> None:
    make, names = MODULES[name]
    file, layer = read(name), make().astype(np.float64)
    load_torch_state_dict(layer, file["state"], names)
    y = layer(**file["in"])
    if "transformer" in name:  # logits at padding mean nothing
        real = file["in"]["target_ids"] != PAD
        y, file["y"] = y[real], file["y"][real]
    assert y.dtype == np.float64
    assert y.shape == file["y"].shape
    np.testing.assert_allclose(y, file["y"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", MODULES)
def test_what_came_from_pytorch_goes_back_bit_by_bit(name: str) -> None:
    make, names = MODULES[name]
    state = read(name)["state"]
    layer = make().astype(np.float64)
    load_torch_state_dict(layer, state, names)
    back = torch_state_dict(layer, names)
    for extra in back.keys() - state.keys():  # biases that neither side has
        assert extra.endswith("bias")
        assert not back.pop(extra).any()
    assert back.keys() == state.keys()
    assert_equal({name: back[name] for name in state}, state)


def test_every_file_is_used() -> None:
    files = {file.stem for file in FOLDER.glob("*.pt")}
    used = {*MODULES, *TENSOR_FILES, *REFUSED, "checkpoint", "refused_kdim", "refused_bias_kv"}
    assert used == files
    assert sum(file.stat().st_size for file in FOLDER.glob("*.pt")) < 400_000


# Names


def test_names_and_layout() -> None:
    layer = randomised(DecoderLayer(*SIZES, attention_bias=True))
    state = torch_state_dict(layer)
    assert {name: array.shape for name, array in state.items()} == {
        "self_attn.in_proj_weight": (12, 4), "self_attn.in_proj_bias": (12,),
        "self_attn.out_proj.weight": (4, 4), "self_attn.out_proj.bias": (4,),
        "linear1.weight": (7, 4), "linear1.bias": (7,),
        "linear2.weight": (4, 7), "linear2.bias": (4,),
        "norm1.weight": (4,), "norm1.bias": (4,), "norm2.weight": (4,), "norm2.bias": (4,),
        "multihead_attn.in_proj_weight": (12, 4), "multihead_attn.in_proj_bias": (12,),
        "multihead_attn.out_proj.weight": (4, 4), "multihead_attn.out_proj.bias": (4,),
        "norm3.weight": (4,), "norm3.bias": (4,),
    }
    ours = layer.state_dict()
    packed = state["multihead_attn.in_proj_weight"]
    for index, W in enumerate(("W_q", "W_k", "W_v")):
        rows = slice(4 * index, 4 * index + 4)
        np.testing.assert_array_equal(packed[rows], ours[f"cross_attention.{W}.W"].T)
        np.testing.assert_array_equal(
            state["self_attn.in_proj_bias"][rows], ours[f"self_attention.{W}.b"]
        )
    np.testing.assert_array_equal(state["linear1.weight"], ours["feed_forward.linear1.W"].T)


def test_names_of_a_transformer_and_of_a_part() -> None:
    names = list(torch_state_dict(transformer()))
    assert "encoder.layers.0.self_attn.in_proj_weight" in names
    assert "decoder.layers.1.multihead_attn.out_proj.bias" in names
    assert {"encoder.norm.weight", "decoder.norm.bias"} < set(names)
    assert {"source_embedding.weight", "target_embedding.weight", "output.bias"} < set(names)
    model = randomised(transformer(positions="learned"))
    renamed = torch_state_dict(model, {"": "m", "output": "m.head", "output.bias": "b",
                                       "encoder.layers.0.norm1": "n", "decoder.norm": ""})
    assert {"m.source_embedding.weight", "m.encoder.layers.0.linear1.weight", "m.head.weight",
            "b", "n.weight", "n.bias", "m.source_positions.weight", "weight"} < set(renamed)
    state = torch_state_dict(model)
    part = {name: array for name, array in state.items() if name.startswith("encoder.")}
    encoder = Encoder(1, *SIZES, attention_bias=True)
    load_torch_state_dict(encoder, part, {"": "encoder"})
    assert_equal(encoder.state_dict(), model.encoder.state_dict())


@pytest.mark.parametrize("names", [{"encode": "x"}, {"enc": "x"}, {"encoder.layer": "x"},
                                   {"encoder.layers.7": "x"}, {"output.weight.x": "x"}])
def test_names_of_no_part(names: dict[str, str]) -> None:
    model = transformer()
    message = assert_refused(model, torch_state_dict(model), repr(next(iter(names))),
                             "source_embedding, target_embedding", names=names)
    with pytest.raises(ValueError, match="no part of Transformer") as caught:
        torch_state_dict(model, names)
    assert str(caught.value) == message


def test_names_that_are_no_strings() -> None:
    names: Any = {"weight": None}
    assert_refused(Linear(2, 2), {}, "names['weight'] is None", error=TypeError, names=names)


def test_the_example_of_the_docstring() -> None:
    text = load_torch_state_dict.__doc__ or ""
    start = text.index("names = {")
    scope: dict[str, Any] = {}
    exec(text[start:text.index("}", start) + 1], {}, scope)
    assert scope["names"] == NAMES


# Round trips


@pytest.mark.parametrize("name", LAYERS)
def test_round_trip(name: str) -> None:
    layer, other = randomised(LAYERS[name](), 0), randomised(LAYERS[name](), 1)
    state = torch_state_dict(layer)
    load_torch_state_dict(other, state)
    assert_equal(layer.state_dict(), other.state_dict())
    assert_equal(torch_state_dict(other), state)


@pytest.mark.parametrize("name", LAYERS)
def test_copies_and_never_aliases(name: str) -> None:
    layer = randomised(LAYERS[name]())
    before, state = layer.state_dict(), torch_state_dict(layer)
    for array in state.values():
        assert type(array) is np.ndarray
        assert array.flags.c_contiguous
        assert array.flags.writeable
        for parameter in layer.parameters():
            assert not np.shares_memory(array, parameter.value)
    load_torch_state_dict(layer, state)
    for array in state.values():
        array += 1
    assert_equal(layer.state_dict(), before)


def test_the_parameters_stay_the_same_arrays() -> None:
    layer = MultiHeadAttention(4, 2)
    values = [parameter.value for parameter in layer.parameters()]
    load_torch_state_dict(layer, torch_state_dict(randomised(MultiHeadAttention(4, 2))))
    assert all(a is p.value for a, p in zip(values, layer.parameters()))


def test_a_mapping_of_views_of_the_parameters_themselves() -> None:
    layer = randomised(MultiHeadAttention(3, 1))
    W_q, W_k, W_v = (W.W.value.copy() for W in (layer.W_q, layer.W_k, layer.W_v))
    packed = np.concatenate([W_q.T, W_k.T, W_v.T])
    load_torch_state_dict(
        layer, {"in_proj_weight": packed, "out_proj.weight": layer.W_q.W.value}
    )
    np.testing.assert_array_equal(layer.W_o.W.value, W_q.T)
    np.testing.assert_array_equal(layer.W_q.W.value, W_q)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", "g"])
@pytest.mark.parametrize("own", [np.float32, np.float64])
def test_floats_of_any_width(dtype: str, own: type) -> None:
    weight = np.array([[0.1, -2.5, 3.0], [7.0, 1 / 3, 1e-3]]).astype(dtype)
    layer = Linear(3, 2, dtype=own)
    load_torch_state_dict(layer, {"weight": weight, "bias": np.zeros(2, dtype)})
    assert layer.W.dtype == own
    np.testing.assert_array_equal(layer.W.value, weight.T.astype(own))


def test_lists_and_read_only_and_strided_arrays() -> None:
    weight = np.arange(12.0).reshape(4, 3)[::2]
    weight.setflags(write=False)
    layer = Linear(3, 2)
    load_torch_state_dict(layer, {"weight": weight, "bias": [1.0, 2.0]})
    np.testing.assert_array_equal(layer.W.value, weight.T)
    np.testing.assert_array_equal(layer.b.value, [1, 2])


def test_nan_goes_both_ways() -> None:
    layer = transformer(tie_embeddings="all", output_bias=False)
    layer.target_embedding.W.value[1, 2] = np.nan
    other = transformer(tie_embeddings="all", output_bias=False)
    load_torch_state_dict(other, torch_state_dict(layer))
    assert_equal(other.state_dict(), layer.state_dict())


# Biases that are absent here


def test_absent_biases_are_exported_as_zeros_and_loaded_if_zero_or_absent() -> None:
    layer = randomised(Encoder(1, *SIZES, **NO_BIASES))
    state = torch_state_dict(layer)
    biases = [name for name in state if name.endswith("bias")]
    assert len(biases) == 7
    assert state["layers.0.self_attn.in_proj_bias"].shape == (12,)
    assert not any(state[name].any() for name in biases)
    other = Encoder(1, *SIZES, **NO_BIASES)
    load_torch_state_dict(other, {n: a for n, a in state.items() if n not in biases})
    assert_equal(other.state_dict(), layer.state_dict())


@pytest.mark.parametrize("value", [1e-30, -1.0, np.nan, np.inf])
def test_absent_biases_that_are_not_zero_there(value: float) -> None:
    layer = Encoder(1, *SIZES, **NO_BIASES)
    state = torch_state_dict(layer)
    for name in ("layers.0.self_attn.in_proj_bias", "layers.0.norm2.bias", "norm.bias"):
        spoilt = {**state, name: state[name].copy()}
        spoilt[name][-1] = value
        assert_refused(layer, spoilt, f"{name} is not zero, but there is no such bias here")
    spoilt = {n: a + 1 if n.endswith("bias") else a for n, a in state.items()}
    message = assert_refused(layer, spoilt)
    assert message.count("is not zero") == 7


def test_biases_that_are_absent_there() -> None:
    state = read("attention_no_bias")["state"]
    layer = MultiHeadAttention(4, 2, bias=True)
    assert_refused(layer, state, "missing in_proj_bias; missing out_proj.bias")


# Tied parameters


def test_tied_parameters_have_all_their_names() -> None:
    model = randomised(transformer(tie_embeddings="all"))
    state = torch_state_dict(model)
    table = state["source_embedding.weight"]
    assert table.shape == (11, 4)
    for name in ("target_embedding.weight", "output.weight"):
        np.testing.assert_array_equal(state[name], table)
        assert not np.shares_memory(state[name], table)


@pytest.mark.parametrize("name", ["source_embedding", "target_embedding", "output"])
def test_tied_arrays_that_differ(name: str) -> None:
    model = randomised(transformer(tie_embeddings="all"))
    state = torch_state_dict(model)
    state[f"{name}.weight"][3, 1] += 1e-3
    assert_refused(model, state, "differs from another name", "source_embedding.W")


def test_one_name_of_a_tied_parameter_is_enough() -> None:
    model = randomised(transformer(tie_embeddings="all"))
    state = torch_state_dict(model)
    for kept in ("source_embedding", "target_embedding", "output"):
        others = {"source_embedding", "target_embedding", "output"} - {kept}
        part = {name: a for name, a in state.items()
                if name not in {f"{other}.weight" for other in others}}
        assert len(part) == len(state) - 2
        other = transformer(tie_embeddings="all")
        load_torch_state_dict(other, part)
        assert_equal(other.state_dict(), model.state_dict())
    part.pop("output.weight")
    assert_refused(other, part, "missing source_embedding.weight; missing target_embedding.weight;"
                                " missing output.weight")


def test_two_parameters_under_one_name() -> None:
    names = {"source_positions": "pos", "target_positions": "pos"}
    model = randomised(transformer(positions="learned"))
    with pytest.raises(ValueError, match=r"pos\.weight would be the name of two parameters"):
        torch_state_dict(model, names)
    model.target_positions.P.value = model.source_positions.P.value
    state = torch_state_dict(model, names)
    other = transformer(positions="learned")
    load_torch_state_dict(other, state, names)
    assert_equal(other.state_dict(), model.state_dict())
    assert other.source_positions.P is not other.target_positions.P


def test_a_layer_that_stands_in_a_stack_twice() -> None:
    stack = randomised(Encoder(2, *SIZES))
    stack.layers[1] = stack.layers[0]
    state = torch_state_dict(stack)
    load_torch_state_dict(stack, state)
    state["layers.1.linear2.bias"][0] += 1
    assert_refused(stack, state, "layers.1.linear2.bias differs")


# State dicts that do not fit


def test_one_error_lists_everything() -> None:
    layer = randomised(EncoderLayer(*SIZES, attention_bias=True))
    state = torch_state_dict(layer)
    state["linear1.weight"] = state["linear1.weight"].T
    state["norm1.bias"] = np.float32(3.0)
    del state["norm2.weight"], state["self_attn.in_proj_bias"]
    state["weight.foo"] = state["linear1.weight.foo"] = np.zeros(2)
    assert_refused(
        layer, state, "EncoderLayer", "missing self_attn.in_proj_bias; missing norm2.weight",
        "unexpected weight.foo; unexpected linear1.weight.foo",
        "misshapen linear1.weight: expected (7, 4), got (4, 7)",
        "misshapen norm1.bias: expected (4,), got ()",
    )


@pytest.mark.parametrize("shape", [(4, 3), (12,), (1, 4), (3, 1), (1, 3, 4), ()])
def test_shapes_do_not_broadcast(shape: tuple[int, ...]) -> None:
    state = {"weight": np.ones(shape), "bias": np.ones(3)}
    assert_refused(Linear(4, 3), state, f"misshapen weight: expected (3, 4), got {shape}")


def test_every_removed_or_added_name_is_seen() -> None:
    layer = randomised(transformer())
    state = torch_state_dict(layer)
    for name in state:
        rest = {other: array for other, array in state.items() if other != name}
        assert_refused(layer, rest, f"missing {name}")
        assert_refused(layer, {**state, f"{name}.x": np.ones(1)}, f"unexpected {name}.x")
        assert_refused(layer, {**state, name: state[name][:-1]}, f"misshapen {name}")


def test_a_prefix() -> None:
    layer = Linear(2, 2)
    state = {f"model.{name}": array for name, array in torch_state_dict(layer).items()}
    assert_refused(layer, state, "missing weight", "missing bias", "unexpected model.weight")
    load_torch_state_dict(layer, state, {"": "model"})
    assert_refused(layer, {}, "missing weight; missing bias")


@pytest.mark.parametrize("bad", [np.ones((3, 2), int), np.ones((3, 2), bool), np.full((3, 2), "a"),
                                 np.full((3, 2), None), np.ones((3, 2), complex)])
def test_arrays_that_hold_no_floats(bad: Any) -> None:
    layer = Linear(2, 3)
    assert_refused(layer, {"weight": bad, "bias": np.ones(3)}, "weight holds", error=TypeError)
    assert_refused(Linear(2, 3, bias=False), {"weight": np.ones((3, 2)), "bias": np.zeros(3, int)},
                   "bias holds int64", error=TypeError)


def test_overflow_and_the_last_array_at_fault() -> None:
    layer = randomised(Encoder(2, *SIZES))
    state = {name: array.astype(np.float64) for name, array in torch_state_dict(layer).items()}
    state["norm.bias"][1] = 1e300
    assert_refused(layer, {name: a + 1 if "bias" not in name else a for name, a in state.items()},
                   "overflows float32")


@pytest.mark.parametrize("mapping", [None, [1.0], "model.pt", np.ones(3)])
def test_no_mapping(mapping: Any) -> None:
    assert_refused(Linear(2, 2), mapping, type(mapping).__name__, "read_torch_file",
                   error=TypeError)


def test_a_nested_checkpoint() -> None:
    checkpoint = read("checkpoint")
    layer = Linear(3, 2)
    assert_refused(layer, checkpoint, "model is a mapping itself: give mapping['model']",
                   "unexpected epoch")
    load_torch_state_dict(layer, checkpoint["model"])
    np.testing.assert_array_equal(layer.W.value, checkpoint["model"]["weight"].T)


@pytest.mark.parametrize(("file", "words"), [
    ("refused_kdim", ("missing in_proj_weight", "unexpected q_proj_weight", "kdim and vdim")),
    ("refused_bias_kv", ("unexpected bias_k; unexpected bias_v", "add_bias_kv")),
])
def test_attention_without_counterpart(file: str, words: tuple[str, ...]) -> None:
    assert_refused(MultiHeadAttention(4, 2, bias=True), read(file), *words)


def test_final_norms_that_do_not_match() -> None:
    state = torch_state_dict(Encoder(1, *SIZES, final_norm=True))
    assert_refused(Encoder(1, *SIZES, final_norm=False), state, "unexpected norm.weight",
                   "final_norm=True")
    state = torch_state_dict(transformer(final_norm=False))
    assert_refused(transformer(), state, "missing encoder.norm.weight", "final_norm=True")
    message = assert_refused(transformer(), {**torch_state_dict(transformer()), "x": np.ones(1)})
    assert "final_norm" not in message


# Layers that PyTorch cannot represent


class Odd(Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.gate = Parameter(np.ones(3, np.float32))


CANNOT: dict[str, tuple[Callable[[], Layer], type[Exception], str]] = {
    "d_k": (lambda: MultiHeadAttention(4, 2, d_k=3), ValueError,
            "d_k 3 and d_v 2; in PyTorch both are d_model / num_heads, 4 / 2"),
    "d_v": (lambda: Encoder(1, 4, 2, d_v=1), ValueError, "layers.0.self_attn has d_k 2 and d_v 1"),
    "both": (lambda: DecoderLayer(4, 2, d_k=4, d_v=4), ValueError, "self_attn has d_k 4 and d_v 4"),
    "shared": (lambda: transformer(cross_attention="shared"), ValueError,
               "decoder.layers.0.multihead_attn has shared memory keys and values"),
    "memory attention": (lambda: MemoryAttention(4, 2), ValueError, "MemoryAttention has shared"),
    "memory projection": (lambda: MemoryProjection(4, 2), ValueError, "MemoryProjection has"),
    "own parameters": (Odd, ValueError, "Odd has parameters that PyTorch has no place for: gate"),
    "own layer": (lambda: _own_layer(), TypeError, "OwnLayer"),
}


def _own_layer() -> Layer:
    class OwnLayer(Layer):
        def __init__(self) -> None:
            self.linear = Linear(2, 2)

    return OwnLayer()


@pytest.mark.parametrize("name", CANNOT)
def test_layers_that_cannot_be_represented(name: str) -> None:
    make, error, words = CANNOT[name]
    layer = make()
    with pytest.raises(error) as caught:
        torch_state_dict(layer)
    assert words in str(caught.value)
    assert_refused(layer, {}, words, error=error)


def test_a_layer_without_parameters_has_an_empty_state_dict() -> None:
    assert torch_state_dict(ReLU()) == {}
    load_torch_state_dict(ReLU(), {})
    assert_refused(ReLU(), {"weight": np.ones(1)}, "unexpected weight")


# Files: every kind of tensor

GRID = np.arange(24, dtype=np.float32).reshape(4, 6)
SPECIAL = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 1.5, -2.0, 3e38])
KINDS = {
    **{name: np.array([0, 1, 2, 100], name) for name in (
        "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
        "complex64", "complex128", "uint16", "uint32", "uint64")},
    "bfloat16": np.float32([0, 1, 2, 100]),
    "grid": GRID,
    "transposed": GRID.T,
    "strided": GRID[1::2, ::3],
    "row": GRID[2],
    "offset": GRID[1:, 2:5],
    "shared": GRID,
    "permuted": np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(2, 0, 1),
    "expanded": np.float32([[1, 1, 1], [2, 2, 2]]),
    "0-d": np.float32(2.5),
    "0-d view": np.float32(23),
    "empty": np.zeros(0, np.float32),
    "no rows": np.zeros((0, 3), np.float32),
    "no columns": np.zeros((4, 0), np.float32),
    "parameter": np.float32([1, 2]),
    "frozen": np.float32([3]),
    "special float32": SPECIAL,
    "special float16": np.float16([0.0, -0.0, np.inf, -np.inf, np.nan, 1.5, -2.0, np.inf]),
    # 3e38 rounded to 8 bits of significand
    "special bfloat16": np.append(SPECIAL[:-1], np.float32(2.0**127 * (1 + 98 / 128))),
    "我": np.float32([1]),
}
TENSOR_FILES = ("tensors", "tensors_protocol_4", "tensors_big_endian")


@pytest.mark.parametrize("file", TENSOR_FILES)
def test_tensors(file: str) -> None:
    arrays = read(file)
    assert type(arrays) is dict
    assert arrays.keys() == KINDS.keys()
    for name, expected in KINDS.items():
        array = arrays[name]
        assert type(array) is np.ndarray
        assert array.dtype == expected.dtype, name
        assert array.dtype.isnative
        assert array.shape == np.shape(expected), name
        np.testing.assert_array_equal(array, expected, err_msg=name)
        if array.dtype.kind == "f":
            number = ~np.isnan(array)
            np.testing.assert_array_equal(np.signbit(array)[number], np.signbit(expected)[number])
        assert not array.flags.writeable
    assert np.shares_memory(arrays["shared"], arrays["transposed"])
    assert np.shares_memory(arrays["row"], arrays["grid"])


def test_all_kinds_can_be_copied_and_used() -> None:
    arrays = {name: array.copy() for name, array in read("tensors").items()}
    arrays["grid"] += 1
    np.testing.assert_array_equal(arrays["shared"], GRID)


def test_a_nested_checkpoint_keeps_its_nesting() -> None:
    value = read("checkpoint")
    assert {k: value[k] for k in ("epoch", "loss", "done", "name", "best", "shape", "sizes",
                                  "large", "negative", "empty")} == {
        "epoch": 3, "loss": 0.25, "done": False, "name": "run 1", "best": None, "shape": (2, 3),
        "sizes": [1, (2, 3)], "large": 2**70, "negative": -5, "empty": [{}, [], ()]}
    assert type(value["model"]) is dict
    assert {name: array.shape for name, array in value["model"].items()} == {
        "weight": (2, 3), "bias": (2,)}
    state = value["optimizer"]["state"]
    assert list(state) == [0, 1]
    assert float(state[0]["step"]) == 1.0
    assert state[0]["exp_avg"].shape == (2, 3)
    assert value["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("make", [str, Path, os.fsencode])
def test_paths(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    path = tmp_path / os.fsdecode("我 爱 %s {0}.bin".encode())
    shutil.copy(FOLDER / "linear.pt", path)
    assert read_torch_file(make(str(path)))["y"].shape == (2, 3)


# Files that are refused

REFUSED = {
    "refused_legacy": "the format of torch.save before 1.6",
    "refused_torch_script": "a TorchScript archive",
    "refused_module": "'torch.nn.modules.linear.Linear'",
    "refused_tensor": "holds one tensor, expected a mapping",
    "refused_float8": "'torch.float8_e4m3fn'",
    "refused_sparse": "'torch._utils._rebuild_sparse_tensor'",
    "refused_conjugate": "torch._utils._rebuild_tensor_v2 with arguments that are refused",
    "refused_dtype": "'torch.float32'",
    "refused_device": "'torch.device'",
    "refused_storage": "storage '0'",
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="refused_") as caught:
        read(name)
    assert REFUSED[name] in str(caught.value)
    assert str(caught.value).startswith(str(FOLDER / f"{name}.pt"))


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_torch_file(tmp_path / "none.pt")
    with pytest.raises(OSError, match=r"directory|denied"):
        read_torch_file(tmp_path)


def test_files_that_are_not_of_torch_save(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    np.savez(tmp_path / "x.npz", W=np.ones(3))
    for data, words in (
        (b"", "no file of torch.save"),
        (b"hello", "no file of torch.save"),
        (b"\x89HDF\r\n", "no file of torch.save"),
        (pickle.dumps({"W": [1.0]}, 2), "no file of torch.save"),
        ((tmp_path / "x.npz").read_bytes(), "no data.pkl"),
        (zipped({}, folder=None), "no data.pkl"),
    ):
        path.write_bytes(data)
        assert_unreadable(path, words)


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    data, path = (FOLDER / "linear.pt").read_bytes(), tmp_path / "x.pt"
    for length in [*range(0, len(data), 29), 3, 4, len(data) - 1]:
        path.write_bytes(data[:length])
        assert_unreadable(path, "no file of torch.save" if length < 4 else "cut off or damaged")


def assert_unreadable(path: Path, *words: str) -> str:
    with pytest.raises(ValueError, match=r"\.pt: ") as caught:
        read_torch_file(path)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


@given(data=st.data())
@settings(max_examples=300)
def test_damage_is_a_value_error_or_goes_unseen(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Bytes changed in the pickle, whose checksum is then made right again, or in the archive."""
    name = data.draw(st.sampled_from(["checkpoint", "tensors", "tensors_protocol_4"]))
    original = (FOLDER / f"{name}.pt").read_bytes()
    records = unzipped(original)
    in_pickle = data.draw(st.booleans())
    raw = bytearray(records["data.pkl"] if in_pickle else original)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damage") / "x.pt"
    path.write_bytes(zipped({**records, "data.pkl": bytes(raw)}) if in_pickle else bytes(raw))
    with contextlib.suppress(ValueError):
        assert type(read_torch_file(path)) is dict


# Hostile files


def unzipped(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def zipped(records: Mapping[str, bytes], folder: str | None = "x", compression: int = 0) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(f"{folder}/{name}" if folder else name, data)
    return file.getvalue()


def with_pickle(tmp_path: Path, data: bytes, **records: bytes) -> Path:
    path = tmp_path / "x.pt"
    storages = {f"data/{key}": raw for key, raw in records.items()}
    path.write_bytes(zipped({"data.pkl": data, "version": b"3\n", **storages}))
    return path


class Call:
    """Pickles as a call of function with arguments."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def asm(*parts: Any) -> bytes:
    """A pickle of these parts."""
    return b"\x80\x02" + ops(*parts) + b"."


def ops(*parts: Any) -> bytes:
    """Opcodes: bytes are opcodes, strings push themselves, and ints too."""
    out = b""
    for part in parts:
        if isinstance(part, str):
            raw = part.encode()
            part = b"X" + struct.pack("<I", len(raw)) + raw
        elif isinstance(part, int):
            raw = part.to_bytes(part.bit_length() // 8 + 1, "little", signed=True)
            part = b"\x8a" + bytes([len(raw)]) + raw
        out += part
    return out


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


TENSOR = name("torch._utils", "_rebuild_tensor_v2")
FLOATS = name("torch", "FloatStorage")
ORDERED = name("collections", "OrderedDict") + b")R"
MARKER = "touched"


def storage(key: str = "0", length: Any = 4, kind: bytes = FLOATS) -> bytes:
    return ops(b"(", "storage", kind, key, "cpu", length, b"tQ")


def tuple_of(*numbers: Any) -> bytes:
    return ops(b"(", *numbers, b"t")


def tensor(offset: Any = 0, size: Any = (4,), stride: Any = (1,), of: bytes | None = None) -> bytes:
    """The opcodes of {"x": the tensor}."""
    size, stride = (x if isinstance(x, bytes) else tuple_of(*x) for x in (size, stride))
    of = storage() if of is None else of
    return asm(b"}", "x", TENSOR, b"(", of, offset, size, stride, b"\x89", ORDERED, b"tRs")


FOUR = np.arange(4, dtype=np.float32).tobytes()


def test_the_assembled_pickle_is_read(tmp_path: Path) -> None:
    """What the hostile files below change is right before."""
    x = read_torch_file(with_pickle(tmp_path, tensor(), **{"0": FOUR}))["x"]
    np.testing.assert_array_equal(x, np.float32([0, 1, 2, 3]))
    data = tensor(offset=1, size=(2, 2), stride=(1, 0))
    x = read_torch_file(with_pickle(tmp_path, data, **{"0": FOUR}))["x"]
    np.testing.assert_array_equal(x, np.float32([[1, 1], [2, 2]]))


def traps(marker: str) -> dict[str, tuple[bytes, str]]:
    """Pickles that touch the file marker when they are unpickled, and what must be refused."""
    write = f"open({marker!r}, 'w').close()"
    system = f'"{sys.executable}" -c "{write}"'
    posix = os.system.__module__
    traps: dict[str, tuple[bytes, str]] = {}
    for protocol in range(6):
        for label, call, refused in (
            ("system", Call(os.system, system), f"'{posix}.system'"),
            ("eval", Call(eval, write), ".eval'"),
            ("exec", Call(exec, write), ".exec'"),
            ("getattr", Call(Call(getattr, os, "system"), system), ".getattr'"),
            ("open", Call(open, marker, "w"), ".open'"),
        ):
            if label == "getattr":
                continue  # a module cannot be pickled: assembled below
            for kind, value in ("value", {"x": call}), ("key", {"y": [(call,)]}), ("top", call):
                data = pickle.dumps(value, protocol)
                # protocols 0 and 1 write opcodes that torch.save does not
                traps[f"{label} {kind} {protocol}"] = data, refused if protocol > 1 else "refused"

    builtin = name("builtins", "getattr")
    eval_ = name("builtins", "eval")
    traps |= {
        "getattr chain": (asm(
            builtin, name("builtins", "__import__"), "os", b"\x85R", "system", b"\x86R", system,
            b"\x85R"), "'builtins.getattr'"),
        "import": (asm(name("builtins", "__import__"), "os", b"\x85R"), "'builtins.__import__'"),
        "STACK_GLOBAL": (asm("builtins", "eval", b"\x93", write, b"\x85R"), "'builtins.eval'"),
        "STACK_GLOBAL of a dotted name": (asm(
            "collections", "OrderedDict.fromkeys", b"\x93", write, b"\x85R"),
            "'collections.OrderedDict.fromkeys'"),
        "STACK_GLOBAL from the memo": (asm(
            "builtins", b"\x94", "eval", b"\x94", b"0", b"0", b"h\x00h\x01\x93", write, b"\x85R"),
            "POP"),
        "memo": (asm(
            "builtins", b"q\x05", "eval", b"q\x06", b"\x86", b"h\x05h\x06\x93", write, b"\x85R"),
            "'builtins.eval'"),
        "INST": (asm(b"(", write, b"ibuiltins\neval\n"), "INST"),
        "OBJ": (asm(b"(", eval_, write, b"o"), "'builtins.eval'"),
        "OBJ of a known class": (asm(b"(", name("collections", "OrderedDict"), b"o"), "OBJ"),
        "NEWOBJ": (asm(name("subprocess", "Popen"), system, b"\x85\x81"), "'subprocess.Popen'"),
        "NEWOBJ of a known class": (asm(
            name("collections", "OrderedDict"), b")\x81"), "NEWOBJ"),
        "NEWOBJ_EX": (asm(name("torch", "Size"), b")}\x92"), "NEWOBJ_EX"),
        "an extension": (asm(b"\x82\x01", write, b"\x85R"), "EXT1"),
        "BUILD": (asm(ORDERED, b"}", "__setstate__", eval_, b"sb"), "'builtins.eval'"),
        "a submodule": (asm(name("torch._utils", "os.system"), system, b"\x85R"), "os.system'"),
        "torch.load": (asm(name("torch", "load"), "x", b"\x85R"), "'torch.load'"),
        "torch hub": (asm(name("torch.hub", "load"), "x", b"\x85R"), "'torch.hub.load'"),
        "codecs": (asm(name("_codecs", "encode"), "x", b"\x85R"), "'_codecs.encode'"),
        "numpy": (asm(name("numpy.core.multiarray", "scalar"), "x", b"\x85R"), "multiarray.scalar"),
        "this package": (asm(name("npdecoder.interop", "read_torch_file"), "x", b"\x85R"),
                         "'npdecoder.interop.read_torch_file'"),
        "line breaks": (asm(name("builtins eval", "x"), b")R"), "'builtins.eval x'"),
    }
    return traps


TRAPS = list(traps("unused"))


@pytest.mark.parametrize("trap", TRAPS)
def test_hostile_pickles_run_nothing(
    tmp_path: Path, trap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, refused = traps(MARKER)[trap]
    assert_unreadable(with_pickle(tmp_path, data), refused)
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.mark.parametrize("trap", [
    "system value 2", "eval value 0", "exec top 4", "open value 3", "getattr chain", "STACK_GLOBAL",
    "memo", "INST", "STACK_GLOBAL from the memo",
])
def test_the_traps_work(tmp_path: Path, trap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value = pickle.loads(traps(MARKER)[trap][0])
    if "open" in trap:
        value["x"].close()
    assert os.listdir(tmp_path) == [MARKER]


def call(function: bytes, *args: Any) -> bytes:
    """{"x": what the call returns}"""
    return asm(b"}", "x", function, b"(", *args, b"tRs")


V3 = name("torch._utils", "_rebuild_tensor_v3")
UNTYPED = name("torch.storage", "UntypedStorage")
SIZE = name("torch", "Size")
PARAMETER = name("torch._utils", "_rebuild_parameter")
PARTS = (0, tuple_of(4), tuple_of(1), b"\x89", ORDERED)
A_TENSOR = ops(TENSOR, b"(", storage(), *PARTS, b"tR")
CALLED = "with arguments that are refused"
NO_STORAGE = "a persistent id that is no storage"
LEFT = "is refused: it is no tensor"

ODD = {
    "OrderedDict of a list": (call(name("collections", "OrderedDict"), b"]"), CALLED),
    "OrderedDict of a dict": (call(name("collections", "OrderedDict"), b"}"), CALLED),
    "arguments in a list": (
        asm(b"}", "x", name("collections", "OrderedDict"), b"]Rs"), "list for arguments"),
    "no arguments": (call(TENSOR), CALLED),
    "Size of a list": (call(SIZE, b"]"), CALLED),
    "Size of a string": (call(SIZE, "abc"), CALLED),
    "Size of strings": (call(SIZE, tuple_of("abc")), CALLED),
    "Size of True": (call(SIZE, b"\x88\x85"), CALLED),
    "a storage is called": (call(FLOATS, 10**15), "calls torch.FloatStorage " + CALLED),
    "a dtype is called": (call(name("torch", "uint16")), "calls torch.uint16 " + CALLED),
    "a string is called": (call(ops("torch.Size"), tuple_of(1)), "str for a function"),
    "a dict is called": (call(b"}"), "dict for a function"),
    "a tensor is called": (call(A_TENSOR), "ndarray for a function"),
    "a parameter of no tensor": (call(PARAMETER, "x", b"\x88", ORDERED), CALLED),
    "a parameter of 4 arguments": (call(PARAMETER, "x", b"\x88", ORDERED, b"}"), CALLED),
    "a tensor of a string": (tensor(of=ops("0")), CALLED),
    "a tensor of a class": (tensor(of=FLOATS), CALLED),
    "a tensor of a tensor": (call(TENSOR, A_TENSOR, *PARTS), CALLED),
    "7 arguments": (call(TENSOR, storage(), *PARTS, b"}"), CALLED),
    "a typed tensor of bytes": (tensor(of=storage("0", 16, UNTYPED)), CALLED),
    "bytes of a known type": (call(V3, storage(), *PARTS, name("torch", "uint16")), CALLED),
    "bytes of no type": (call(V3, storage("0", 16, UNTYPED), *PARTS, FLOATS), CALLED),
    "bytes of a type in text": (
        call(V3, storage("0", 16, UNTYPED), *PARTS, "torch.uint16"), CALLED),
    "a persistent id that is a string": (asm("0", b"Q"), NO_STORAGE),
    "a persistent id of text": (asm(b"P0\n"), "PERSID"),
    "a persistent id of another kind": (
        asm(b"(", "module", FLOATS, "0", "cpu", 4, b"tQ"), NO_STORAGE),
    "a persistent id of no class": (
        asm(b"(", "storage", "torch.FloatStorage", "0", "cpu", 4, b"tQ"), NO_STORAGE),
    "a persistent id of a function": (
        asm(b"(", "storage", TENSOR, "0", "cpu", 16, b"tQ"), NO_STORAGE),
    "a persistent id of 4 parts": (asm(b"(", "storage", FLOATS, "0", "cpu", b"tQ"), NO_STORAGE),
    "a number as key": (asm(b"(", "storage", FLOATS, 0, "cpu", 4, b"tQ"), NO_STORAGE),
    "the key of another record": (tensor(of=storage("../data.pkl")), "'../data.pkl' is missing"),
    "no such storage": (tensor(of=storage("1")), "storage '1' is missing"),
    "a storage said to be longer": (tensor(of=storage("0", 5)), "16 bytes, expected 20 bytes"),
    "a storage said to be shorter": (tensor(of=storage("0", 3)), "16 bytes, expected 12 bytes"),
    "a storage said to be endless": (tensor(of=storage("0", 2**62)), "is of 16 bytes, expected"),
    "a storage of negative length": (tensor(of=storage("0", -4)), "expected -16 bytes"),
    "a name is left": (asm(b"}", "x", FLOATS, b"s"), "torch.FloatStorage, which " + LEFT),
    "a name is left in a list": (asm(b"}", "x", b"]", b"]", FLOATS, b"aas"), LEFT),
    "a name is left in a tuple": (asm(b"}", "x", FLOATS, b"\x85\x85s"), LEFT),
    "a storage is left": (asm(b"}", "x", storage(), b"s"), "storage '0', which " + LEFT),
    "a name as key": (asm(b"}", FLOATS, "x", b"s"), "Name for a key"),
    "a tuple as key": (asm(b"}", b")", "x", b"s"), "tuple for a key"),
    "a list as key": (asm(b"}", b"]", "x", b"s"), "list for a key"),
    "append to a tuple": (asm(b"}", "x", b")", "x", b"as"), "tuple for APPEND"),
    "append to a dict": (asm(b"}", b"(", "x", b"e"), "dict for APPENDS"),
    "an item of a list": (asm(b"}", "x", b"]", 1, b"a", 0, "x", b"ss"), "list for SETITEM"),
    "an item of a tensor": (asm(b"}", "x", A_TENSOR, 0, 1, b"ss"), "ndarray for SETITEM"),
    "items without a value": (asm(b"}", b"(", "x", b"u"), "a key has no value"),
    "attributes of a list": (asm(b"}", "x", b"]", b"}", b"bs"), "list for BUILD"),
    "attributes of a tensor": (asm(b"}", "x", A_TENSOR, b"}bs"), "ndarray for BUILD"),
    "attributes of a function": (asm(TENSOR, b"}", "__code__", "x", b"sb"), "Name for BUILD"),
    "attributes of a class": (asm(FLOATS, b"N}", "__call__", "x", b"s\x86b"), "Name for BUILD"),
    "an empty stack": (asm(b"R"), "the stack is empty"),
    "an empty stack for STOP": (asm(), "the stack is empty"),
    "an empty stack for BINPUT": (asm(b"q\x00"), "damaged"),
    "an empty stack for a list": (asm(b"a"), "the stack is empty"),
    "no mark": (asm(b"t"), "damaged"),
    "a mark above the stack": (asm("x", "y", b"(", b"\x86", b"\x85", b"t", b"t"), "damaged"),
    "no such memo": (asm(b"h\x07"), "damaged"),
    "bytes": (asm(b"C\x01a"), "SHORT_BINBYTES"),
    "a bytearray": (asm(b"\x96" + struct.pack("<Q", 1) + b"a"), "BYTEARRAY8"),
    "a buffer": (asm(b"\x97"), "NEXT_BUFFER"),
    "a set": (asm(b"\x8f"), "EMPTY_SET"),
    "old text": (asm(b"U\x01a"), "SHORT_BINSTRING"),
    "a list at the top": (asm(b"]"), "holds one list, expected a mapping"),
    "nothing": (asm(b"N"), "holds one NoneType, expected a mapping"),
    "no STOP": (asm(b"}")[:-1], "its pickle is damaged"),
    "no pickle": (b"hello", "damaged"),
    "an empty pickle": (b"", "its pickle is damaged"),
    "an unknown opcode": (asm(b"\xff"), "its pickle is damaged"),
    "broken UTF-8": (asm(b"X\x01\x00\x00\x00\xff"), "its pickle is damaged"),
}


@pytest.mark.parametrize("label", ODD)
def test_odd_pickles(tmp_path: Path, label: str) -> None:
    data, words = ODD[label]
    before = dict(vars(interop))
    assert_unreadable(with_pickle(tmp_path, data, **{"0": FOUR}), words)
    assert vars(interop) == before


PAST, NONE, NO_ARRAY = "past the end of its storage '0'", "that is none", "no array can have"
SIZES_THAT_LIE = {
    "too long": ({"size": (5,)}, PAST),
    "too far": ({"offset": 1}, PAST),
    "a stride too large": ({"stride": (2,)}, PAST),
    "one row too many": ({"size": (3, 2), "stride": (2, 1)}, PAST),
    "an endless offset": ({"offset": 2**62}, PAST),
    "an offset that wraps": ({"offset": 2**64 - 1}, PAST),
    "an offset beyond int64": ({"offset": 2**80}, PAST),
    "an endless size": ({"size": (2**62,)}, PAST),
    "an endless stride": ({"size": (2,), "stride": (2**62,)}, PAST),
    "a product that wraps": ({"size": (2**32, 2**32), "stride": (2**32, 1)}, PAST),
    "a size of bytes that wraps": ({"size": (2**62,), "stride": (0,)}, NO_ARRAY),
    "a size beyond int64": ({"size": (2**70,), "stride": (0,)}, NO_ARRAY),
    "a negative offset": ({"offset": -1}, NONE),
    "a negative size": ({"size": (-1,)}, NONE),
    "a negative stride": ({"offset": 3, "stride": (-1,)}, NONE),
    "two sizes, one stride": ({"size": (2, 2)}, NONE),
    "one size, two strides": ({"stride": (1, 1)}, NONE),
    "too many axes": ({"size": (1,) * 100, "stride": (1,) * 100}, NONE),
    "a string": ({"offset": "1"}, NONE),
    "a bool": ({"offset": b"\x88"}, NONE),
    "a size that is a list": ({"size": b"]"}, NONE),
    "a size of strings": ({"size": ("4",)}, NONE),
    "a stride that is a number": ({"stride": ops(1)}, NONE),
    "an empty tensor of endless shape": ({"size": (0, 2**62, 9), "stride": (1, 1, 1)}, NO_ARRAY),
    "an empty tensor, too large": ({"size": (0, 2**70), "stride": (1, 1)}, NO_ARRAY),
}


@pytest.mark.parametrize("label", SIZES_THAT_LIE)
def test_sizes_that_lie(tmp_path: Path, label: str) -> None:
    arguments, words = SIZES_THAT_LIE[label]
    path = with_pickle(tmp_path, tensor(**arguments), **{"0": FOUR})
    assert words in assert_unreadable_in_little_memory(path)


@pytest.mark.parametrize(("offset", "size", "stride"), [
    (0, (5, 0), (1, 1)), (0, (0,), (1,)), (0, (0, 5), (5, 1)), (7, (0,), (1,)), (0, (2, 0), (9, 9)),
])
def test_empty_tensors(tmp_path: Path, offset: int, size: Any, stride: Any) -> None:
    data = tensor(offset, size, stride, of=storage("0", 0))
    x = read_torch_file(with_pickle(tmp_path, data, **{"0": b""}))["x"]
    assert x.shape == size
    assert x.dtype == np.float32


def test_a_step_that_is_never_taken_may_be_any_number(tmp_path: Path) -> None:
    data = tensor(offset=3, size=(1, 1), stride=(2**80, 7))
    x = read_torch_file(with_pickle(tmp_path, data, **{"0": FOUR}))["x"]
    np.testing.assert_array_equal(x, [[3.0]])


def assert_unreadable_in_little_memory(path: Path) -> str:
    with measured() as memory:
        message = assert_unreadable(path)
    assert memory.peak < 2_000_000
    return message


def test_a_tensor_expanded_beyond_all_memory_takes_none(tmp_path: Path) -> None:
    path = with_pickle(tmp_path, tensor(size=(2**40, 4), stride=(0, 1)), **{"0": FOUR})
    with measured() as memory:
        state = read_torch_file(path)
        assert state["x"].shape == (2**40, 4)
        with pytest.raises(ValueError, match="misshapen weight"):
            load_torch_state_dict(Linear(4, 3), {"weight": state["x"], "bias": np.zeros(3)})
    assert memory.peak < 2_000_000


BOMBS = {
    "a string said to be endless": asm(b"\x8d" + struct.pack("<Q", 2**40) + b"x"),
    "a string said to be long": asm(b"X" + struct.pack("<I", 2**31 - 1) + b"x"),
    "bytes said to be endless": asm(b"\x8e" + struct.pack("<Q", 2**40) + b"x"),
    "a number said to be long": asm(b"\x8b" + struct.pack("<i", 2**31 - 1) + b"x"),
    "a frame said to be endless": asm(b"\x95" + struct.pack("<Q", 2**60) + b"x"),
    "a memo of two thousand million": asm(b"]r\xff\xff\xff\x7f", b"0"),
    "lists in lists": b"\x80\x02]" + b"]" * 20_000 + b"a" * 20_000 + b".",
    "tuples of tuples": asm(b")", b"2" * 10),
    # 2**60 paths through 60 lists of the same list twice; a name at the bottom
    "one list in a thousand places": asm(
        FLOATS, b"\x85", *(b"q\x00h\x00\x86" for _ in range(60))),
    "a list in itself": asm(b"]q\x00h\x00a"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickle_bombs(tmp_path: Path, bomb: str) -> None:
    path = with_pickle(tmp_path, BOMBS[bomb])
    with measured() as memory:
        assert_unreadable(path)
    assert memory.peak < 20_000_000


def test_a_memo_of_large_numbers_works(tmp_path: Path) -> None:
    path = with_pickle(tmp_path, asm(b"}r\xff\xff\xff\x7f", "x", b"j\xff\xff\xff\x7fs"))
    value = read_torch_file(path)
    assert value["x"] is value


def test_compressed_records(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    records = {"data.pkl": tensor(of=storage("0", 10_000_000)), "data/0": bytes(40_000_000)}
    path.write_bytes(zipped(records, compression=zipfile.ZIP_DEFLATED))
    assert "compressed" in assert_unreadable_in_little_memory(path)


def test_records_said_to_be_longer_than_the_file(tmp_path: Path) -> None:
    """The sizes in the archive's directory, and in the pickle, are those of a gigabyte."""
    path, length = tmp_path / "x.pt", 2**30
    data = bytearray(zipped({"data.pkl": tensor(of=storage("0", length // 4)), "data/0": FOUR}))
    entry = data.rindex(b"PK\x01\x02")
    for claim, words in ((16, length), "compressed"), ((length, length), "longer than the file"):
        data[entry + 20:entry + 28] = struct.pack("<II", *claim)
        path.write_bytes(data)
        assert words in assert_unreadable_in_little_memory(path)


def test_records_that_overlap(tmp_path: Path) -> None:
    """Many names for the one record: the directory is small, what it names is large."""
    path = tmp_path / "x.pt"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/data.pkl", asm(b"}"))
        archive.writestr("x/data/0", bytes(10_000))
        for key in range(1, 9):
            info = zipfile.ZipInfo(f"x/data/{key}")
            last = archive.infolist()[1]
            for field in ("CRC", "compress_size", "file_size", "header_offset"):
                setattr(info, field, getattr(last, field))
            archive.filelist.append(info)
            archive.NameToInfo[info.filename] = info
    path.write_bytes(file.getvalue())
    assert_unreadable(path, "longer than the file")


def test_too_little_memory_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(interop._Reader, "_array", out_of_memory)
    with pytest.raises(MemoryError):
        read("linear")


def test_a_wrong_checksum_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    data = zipped({"data.pkl": tensor(), "data/0": FOUR})
    path.write_bytes(data.replace(FOUR, FOUR[::-1]))
    assert_unreadable(path, "damaged", "CRC")


def test_an_unknown_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(zipped({"data.pkl": tensor(), "data/0": FOUR, "byteorder": b"middle"}))
    assert_unreadable(path, "b'middle'")


def test_bool_bytes_that_are_neither_0_nor_1(tmp_path: Path) -> None:
    data = tensor(of=storage("0", 4, name("torch", "BoolStorage")))
    x = read_torch_file(with_pickle(tmp_path, data, **{"0": b"\x00\x01\x02\xff"}))["x"]
    assert x.tobytes() == b"\x00\x01\x01\x01"


def test_an_ordered_dict_and_its_metadata(tmp_path: Path) -> None:
    value = OrderedDict(a=1, b=2)
    value._metadata = {"x": 1}  # type: ignore[attr-defined]
    got = read_torch_file(with_pickle(tmp_path, pickle.dumps(value, 2)))
    assert got == {"a": 1, "b": 2}
    assert type(got) is dict
