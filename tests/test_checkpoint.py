"""Checkpoints: what comes back, what is refused, and trainings that stop and go on bit by bit."""

from __future__ import annotations

import copy
import dataclasses
import enum
import os
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import few, randomise
from hypothesis import given
from hypothesis import strategies as st
from test_files import ARRAYS, NPZ_ALONE

import npdecoder
from npdecoder import (
    SGD,
    Adam,
    AdamW,
    CrossEntropy,
    LanguageModel,
    LanguageModelConfig,
    Linear,
    Parameter,
    Transformer,
    TransformerConfig,
    clip_grad_norm,
    decay_groups,
    load_checkpoint,
    load_weights,
    noam_schedule,
    save_checkpoint,
    save_weights,
)
from npdecoder.checkpoint import BIT_GENERATORS, META
from npdecoder.files import SUFFIXES, json_array, json_value
from npdecoder.text import batches, make_batch
from npdecoder.training import BatchStream, train

PAD, BOS, EOS = 0, 1, 2
V = 11


def transformer(seed: int = 0, dtype: Any = np.float32, **options: Any) -> Transformer:
    options = {"source_vocab_size": V, "target_vocab_size": V, "d_model": 8, "num_heads": 2,
               "num_encoder_layers": 1, "num_decoder_layers": 1, "pad_id": PAD, "max_len": 12,
               **options}  # fmt: skip
    model = Transformer(TransformerConfig(**options), seed, dtype=dtype)
    return randomise(model, np.random.default_rng(seed))


def language_model(seed: int = 0, dtype: Any = np.float32, **options: Any) -> LanguageModel:
    options = {"vocab_size": V, "d_model": 8, "num_heads": 2, "num_layers": 1, "max_len": 12,
               **options}  # fmt: skip
    model = LanguageModel(LanguageModelConfig(**options), seed, dtype=dtype)
    return randomise(model, np.random.default_rng(seed))


def set_gradients(model: Any, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        parameter.grad = rng.standard_normal(parameter.shape)


def update(model: Any, optimizer: Any, seed: int, times: int = 3) -> None:
    """Updates with random gradients, which stay."""
    for i in range(times):
        set_gradients(model, seed + i)
        optimizer.step()


def generator(name: str = "PCG64", seed: int = 0) -> np.random.Generator:
    """In the middle of its numbers: half of the last 64 bits waits to be used."""
    rng = np.random.Generator(getattr(np.random, name)(seed))
    rng.standard_normal(7)
    rng.integers(0, 10, dtype=np.uint32)
    return rng


def assert_same(a: Any, b: Any) -> None:
    """Equal to the last bit: types, order of keys, dtypes, signs of zeros, generators."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b):
            assert_same(one, other)
    elif isinstance(a, np.random.Generator):
        assert_same(a.bit_generator.state, b.bit_generator.state)
    elif isinstance(a, (np.ndarray, np.generic)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.char in "gG":  # of which some bytes mean nothing
            np.testing.assert_array_equal(a, b)
        else:
            assert a.tobytes() == b.tobytes()
    elif isinstance(a, float):
        assert a.hex() == b.hex()
    else:
        assert a == b


def contents(model: Any, optimizer: Any = None) -> dict[str, Any]:
    """All that the two hold, to be compared."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {
        "model": type(model).__name__,
        "config": dataclasses.asdict(model.config),
        "values": {name: p.value.copy() for name, p in model.named_parameters()},
        "gradients": {name: p.grad.copy() for name, p in model.named_parameters()},
    }
    if optimizer is not None:
        held["optimizer"] = type(optimizer).__name__
        held["groups"] = [[names[id(p)] for p in g.parameters] for g in optimizer.groups]
        held["state"] = optimizer.state_dict()
    return held


@pytest.fixture(params=SUFFIXES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"c{request.param}"


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    return tmp_path / "c.npz"


# Models

SIZES = {"d_model": 10, "num_heads": 5, "d_ff": 7, "d_k": 3, "d_v": 1, "max_len": 5}
BOTH: dict[str, dict[str, Any]] = {  # options of both models
    "default": {},
    "post": {"norm": "post", "final_norm": True, "norm_bias": False, "norm_eps": 1e-3},
    "biases": {"attention_bias": True, "feed_forward_bias": False, "output_bias": False},
    "learned positions": {"positions": "learned", "scale_embeddings": False, "pad_id": 4},
    "output tied": {"tie_embeddings": "target_output"},
    "dropout": {"dropout": 0.1 + 0.2, "attention_dropout": 0.0, "position_dropout": 1 / 3},
    "GELU": {"activation": "gelu"},
    "GELU by tanh": {"activation": "gelu_tanh", "final_norm": False},
    "NumPy numbers": {"d_ff": np.int16(6), "dropout": np.float32(0.1), "norm_bias": np.False_},
}
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{f"transformer, {name}": (transformer, options) for name, options in BOTH.items()},
    "transformer, sizes": (transformer, {
        "source_vocab_size": 13, "target_vocab_size": 17, "num_encoder_layers": 2,
        "num_decoder_layers": 3, **SIZES,
    }),
    "transformer, shared memory": (transformer, {"cross_attention": "shared", "pad_id": None}),
    "transformer, inputs tied": (transformer, {"tie_embeddings": "source_target"}),
    "transformer, all tied": (transformer, {"tie_embeddings": "all", "output_bias": False}),
    **{f"language model, {name}": (language_model, options) for name, options in BOTH.items()},
    "language model, sizes": (language_model, {"vocab_size": 13, "num_layers": 3, **SIZES}),
}  # fmt: skip


@pytest.mark.parametrize("config", [TransformerConfig, LanguageModelConfig])
def test_every_option_is_among_these(config: Any) -> None:
    wanted = transformer if config is TransformerConfig else language_model
    given = {name for make, options in MODELS.values() if make is wanted for name in options}
    assert given == {field.name for field in dataclasses.fields(config)}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back(path: Path, name: str) -> None:
    make, options = MODELS[name]
    model = make(3, **options)
    save_checkpoint(path, model)
    loaded = load_checkpoint(path)
    assert loaded[1:] == (None, None, 0, None)
    assert loaded.model is not model
    assert loaded.model.config == model.config
    assert_same(contents(loaded.model), contents(model))
    inputs = [np.array([[4, 6, 5, 2], [7, 2, 0, 0]])] * (2 if make is transformer else 1)
    assert_same(loaded.model(*inputs), model(*inputs))


@pytest.mark.parametrize("make", [transformer, language_model])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble])
def test_a_dtype_comes_back(path: Path, make: Any, dtype: Any) -> None:
    if np.dtype(dtype).itemsize > 8 and path.suffix == ".safetensors":
        with pytest.raises(ValueError, match=r"model\.\w+\.W .*\.npz"):
            save_checkpoint(path, make(dtype=dtype))
        assert os.listdir(path.parent) == []
        return
    model = make(dtype=dtype)
    for parameter in model.parameters():
        parameter.value /= 3  # numbers that no narrower dtype holds
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    update(model, optimizer, 1)
    save_checkpoint(path, model, optimizer)
    loaded = load_checkpoint(path)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {np.dtype(dtype)}
    assert_same(contents(*loaded[:2]), contents(model, optimizer))


def test_every_parameter_may_have_a_dtype_of_its_own(path: Path) -> None:
    model = transformer()
    for parameter in model.parameters()[::3]:
        parameter.astype(np.float64)
        parameter.value /= 3
    optimizer = Adam(model.parameters())
    update(model, optimizer, 1)
    save_checkpoint(path, model, optimizer)
    loaded = load_checkpoint(path)
    assert_same(contents(*loaded[:2]), contents(model, optimizer))
    update(model, optimizer, 9)
    update(*loaded[:2], 9)
    assert_same(contents(*loaded[:2]), contents(model, optimizer))


TIES = {
    "target_output": ["output.W is target_embedding.W"],
    "source_target": ["source_embedding.W is target_embedding.W"],
    "all": ["output.W is target_embedding.W", "source_embedding.W is target_embedding.W"],
}


@pytest.mark.parametrize("tie", TIES)
def test_tied_parameters_are_still_one(path: Path, tie: str) -> None:
    model = transformer(tie_embeddings=tie)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    update(model, optimizer, 1)
    save_checkpoint(path, model, optimizer)
    loaded = load_checkpoint(path)
    for one, other in (claim.split(" is ") for claim in TIES[tie]):
        layers = (getattr(loaded.model, name.removesuffix(".W")) for name in (one, other))
        assert next(layers).W is next(layers).W
    assert loaded.model.num_parameters() == model.num_parameters()
    W = loaded.model.target_embedding.W
    assert sum(parameter is W for parameter in loaded.optimizer.parameters()) == 1
    update(model, optimizer, 5)
    update(*loaded[:2], 5)
    assert_same(contents(*loaded[:2]), contents(model, optimizer))


# Optimizers


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda m: SGD(m.parameters(), 0.1),
    "SGD with weight decay": lambda m: SGD(m.parameters(), 1 / 3, weight_decay=0.01),
    "SGD with momentum": lambda m: SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=0.01),
    "SGD in groups, one with momentum": lambda m: SGD(
        [
            {"params": m.decoder.parameters(), "lr": 0.03},
            {"params": m.encoder.parameters(), "momentum": 0.8, "lr": 0.0},
        ],
        lr=0.1,
    ),
    "SGD of some, backwards": lambda m: SGD(m.decoder.parameters()[::-1], 0.1, momentum=0.5),
    "SGD of one parameter": lambda m: SGD(m.output.W, 0.1, momentum=0.5),
    "Adam": lambda m: Adam(m.parameters(), weight_decay=0.1),
    "Adam in groups": lambda m: Adam(
        [
            {"params": m.encoder.parameters(), "betas": (0.5, 0.75), "eps": 1e-3},
            {"params": m.decoder.parameters(), "lr": 1 / 3, "weight_decay": 0.1},
        ],
        lr=0.7,
        betas=(0.0, 0.9),
    ),
    "AdamW": lambda m: AdamW(m.parameters(), lr=0.01),
    "AdamW in groups": lambda m: AdamW(
        [{**group, "lr": 0.1 * (i + 1)} for i, group in enumerate(decay_groups(m.parameters(), 1))],
        lr=0.3,
        eps=1e-6,
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_optimizer_goes_on(path: Path, name: str, dtype: Any) -> None:
    model = transformer(dtype=dtype)
    optimizer = OPTIMIZERS[name](model)
    update(model, optimizer, 1)
    optimizer.lr = 0.1 + 0.2  # another than it was made with
    save_checkpoint(path, model, optimizer, None, 3)
    before = contents(model, optimizer)
    loaded = load_checkpoint(str(path))
    assert loaded.step == loaded.optimizer.steps == 3
    assert_same(contents(*loaded[:2]), before)
    for times in (1, 4):
        update(model, optimizer, 50, times)
        update(*loaded[:2], 50, times)
        assert_same(contents(*loaded[:2]), contents(model, optimizer))
    save_checkpoint(path, loaded.model, loaded.optimizer)
    assert_same(contents(*load_checkpoint(path)[:2]), contents(model, optimizer))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_has_made_no_update(path: Path, name: str) -> None:
    model = transformer()
    optimizer = OPTIMIZERS[name](model)
    save_checkpoint(path, model, optimizer)
    loaded = load_checkpoint(path)
    assert_same(contents(*loaded[:2]), contents(model, optimizer))
    ours = {id(parameter) for parameter in loaded.model.parameters()}
    assert {id(parameter) for parameter in loaded.optimizer.parameters()} <= ours


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_whose_model_was_converted(path: Path, name: str) -> None:
    """Its own arrays follow at the next update: the file has them as the update would."""
    model = transformer()
    optimizer = OPTIMIZERS[name](model)
    update(model, optimizer, 1)
    model.astype(np.float64)
    save_checkpoint(path, model, optimizer)
    loaded = load_checkpoint(path)
    update(model, optimizer, 5)
    update(*loaded[:2], 5)
    assert_same(contents(*loaded[:2]), contents(model, optimizer))


# Gradients


def test_gradients_come_back_and_zeros_take_no_room(path: Path) -> None:
    model = language_model()
    save_checkpoint(path, model)
    without = path.read_bytes()
    set_gradients(model)
    save_checkpoint(path, model)
    assert path.read_bytes() != without
    assert_same(contents(load_checkpoint(path).model), contents(model))
    model.output.W.zero_grad()
    model.output.b.grad = np.zeros(V)
    model.output.b.grad[3] = np.nan
    save_checkpoint(path, model)
    assert "grad.output.W" not in load_weights(path)
    assert_same(contents(load_checkpoint(path).model), contents(model))
    model.zero_grad()
    save_checkpoint(path, model)
    assert path.read_bytes() == without


def test_a_save_between_two_parts_of_an_update(path: Path) -> None:
    """Gradients add up over micro-batches: the sum so far is in the file."""
    rng = np.random.default_rng(3)
    parts = [make_batch(pairs[:4], PAD, BOS, EOS) for pairs in (PAIRS, PAIRS[4:], PAIRS[8:])]
    criterion = CrossEntropy(ignore_index=PAD)
    model = transformer(dropout=0.3)
    optimizer = SGD(model.parameters(), 0.5, momentum=0.9)
    update(model, optimizer, 1)
    optimizer.zero_grad()

    def add(model: Any, rng: Any, part: Any) -> None:
        logits, ctx = model.forward(*part.inputs, rng=rng)
        _, loss_ctx = criterion.forward(logits, part.targets)
        model.backward(ctx, criterion.backward(loss_ctx, 1 / len(parts)))

    add(model, rng, parts[0])
    save_checkpoint(path, model, optimizer, rng)
    whole, resumed = (model, optimizer, rng), load_checkpoint(path)[:3]
    for one, its_optimizer, its_rng in (whole, resumed):
        for part in parts[1:]:
            add(one, its_rng, part)
        assert clip_grad_norm(one.parameters(), 0.1) > 0.1
        its_optimizer.step()
    assert_same(contents(*resumed[:2]), contents(*whole[:2]))


# Generators and the step


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_generators_go_on(path: Path, name: str) -> None:
    rng, other = generator(name), generator(name, 1)
    before = copy.deepcopy(rng.bit_generator.state)
    if name != "MT19937":  # which makes 32 bits at a time
        assert before["has_uint32"] == 1
    save_checkpoint(path, language_model(), rng=rng, extra=[other, {"again": other}])
    assert_same(rng.bit_generator.state, before)
    loaded = load_checkpoint(path)
    assert_same(loaded.rng, rng)
    for one, two in ((rng, loaded.rng), (other, loaded.extra[0])):
        for _ in range(2):
            assert_same(one.integers(0, 10, 3, np.uint32), two.integers(0, 10, 3, np.uint32))
            assert_same(one.standard_normal(1000), two.standard_normal(1000))
            assert_same(one.random(5, np.float32), two.random(5, np.float32))
            assert_same(one.permutation(20), two.permutation(20))
    assert_same(loaded.extra[1]["again"], generator(name, 1))  # each has its own numbers


def test_the_step_comes_back(path: Path) -> None:
    for step in (0, 1, 10**6, 2**70, np.int64(7)):
        save_checkpoint(path, language_model(), step=step)
        assert_same(load_checkpoint(path).step, int(step))


# Extra

VALUES: dict[str, Any] = {
    "None": None,
    "bool": [True, False],
    "int": [0, -1, 2**31, 2**63, -(2**64), 10**100, 7**4000],
    "float": [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 5e-324, 0.1 + 0.2, 1e16, 1e308],
    "like others": [1, 1.0, True, "1", "True", "NaN", "null", "npdecoder.array"],
    "text": ["", "我爱你", "a\0", "\0", "\U0001f600", "e\u0301", '"\\\n\u2028\x7f', "x" * 70_000],
    "half a surrogate pair": ["\ud800", "\udc00x", "x\udfff", "\ude00\ud83d"],
    "empty": [[], {}, [[]], {"": {}}],
    "order": {"b": 1, "a": 2, "c": {"z": 1, "y": 2, "x": 3}, "B": 4},
    "keys": {"": 1, "\0": 2, "\ud800": 3, "我": 4, "a.b": 5, "npdecoder": 6, "NPDECODER.array": 7},
    "nested": {"a": [{"b": [[], {"c": [None, {"d": -0.0}]}]}, 1.5], "e": {"f": {"g": {}}}},
    "deep": [[[[[[[[[[[[[[[[[[[[[[[[["bottom"]]]]]]]]]]]]]]]]]]]]]]]]],
    "generators": {"a": [generator(name, 5) for name in BIT_GENERATORS]},
    "arrays": {name: np.array(array, array.dtype.newbyteorder("="), order="C")
               for name, array in ARRAYS.items()},
    "keys that quote": {"a": {"b": np.ones(1)}, "a']['b": np.ones(2), 'a"]["b': np.ones(3),
                        "a'\"": [np.ones(4)], "0": np.ones(5), "a\\']['b": np.ones(6),
                        "\ud800": np.ones(7), "\\ud800": np.ones(8), "\0": np.ones(9)},
    "names of others": {"model": {"output.W": np.ones(2)}, "rng": generator("MT19937", 9),
                        "optimizer.lr": np.float64(3.0), "grad.output.W": np.zeros(1),
                        "extra['a']": np.ones(3), "__metadata__": np.ones(4)},
    "NumPy numbers": [np.float32(0.1), np.float64(-0.0), np.float16(2.5), np.int8(-5), np.bool_(1),
                      np.uint64(2**64 - 1), np.array(3), np.array(True), np.float64("nan")],
}  # fmt: skip
VALUES_OF_NPZ: dict[str, Any] = {
    "arrays": {name: array.astype(array.dtype.newbyteorder("="))
               for name, array in NPZ_ALONE.items()},
    "NumPy numbers": [np.longdouble(1) / 3, np.complex64(1 - 2j), np.str_("我"), np.bytes_(b"ab"),
                      np.datetime64("2017-06-12"), np.timedelta64(3, "ms"),
                      np.array([(1, 2.5)], [("x", "i4"), ("y", "f8")])[0]],
}  # fmt: skip


def assert_comes_back(path: Path, extra: Any) -> None:
    save_checkpoint(path, language_model(), extra=extra)
    assert_same(load_checkpoint(path).extra, extra)


@pytest.mark.parametrize("name", VALUES)
def test_extra_comes_back(path: Path, name: str) -> None:
    assert_comes_back(path, VALUES[name])
    assert_comes_back(path, {"a": [VALUES[name], 1], "b": VALUES[name]})


@pytest.mark.parametrize("name", VALUES_OF_NPZ)
def test_extra_that_npz_alone_can_store(npz: Path, name: str) -> None:
    assert_comes_back(npz, VALUES_OF_NPZ[name])
    items = VALUES_OF_NPZ[name]
    for item in items.values() if isinstance(items, dict) else items:
        with pytest.raises(ValueError, match=r"^extra\['a'\]\[1\] .*safetensors"):
            save_checkpoint(npz.with_suffix(".safetensors"), language_model(),
                            extra={"a": [None, item]})  # fmt: skip
    assert os.listdir(npz.parent) == [npz.name]


@few(15)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda values: st.lists(values, max_size=4)
        | st.dictionaries(st.text(max_size=5), values, max_size=4),
        max_leaves=20,
    )
)
def test_any_extra_comes_back(tmp_path_factory: Any, extra: Any) -> None:
    assert_comes_back(tmp_path_factory.mktemp("any") / "c.npz", extra)


def test_two_halves_of_a_surrogate_pair_are_not_the_character(path: Path) -> None:
    pair, character = "\ud83d\ude00", "\U0001f600"
    assert_comes_back(path, [pair, character, f"a{pair}{character}"])
    assert_comes_back(path, {pair: 1, character: 2})
    assert_comes_back(path, {pair: np.ones(1), character: np.ones(2)})


def test_a_big_endian_array_comes_back_in_native_order(path: Path) -> None:
    array = np.arange(5, dtype=">f8")[::-2]
    save_checkpoint(path, language_model(), extra={"a": array})
    assert_same(load_checkpoint(path).extra, {"a": array.astype(float)})
    assert array.dtype.byteorder == (">" if sys.byteorder == "little" else "=")


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


class Number(float):
    pass


class Bits(np.random.PCG64):
    pass


class Random(np.random.Generator):
    pass


REFUSED: dict[str, tuple[Any, str]] = {  # and where it is
    "tuple": ({"a": [0, (1, 2)]}, "extra['a'][1]"),
    "tuple, of all": ((1, 2), "extra"),
    "set": ([{1, 2}], "extra[0]"),
    "bytes": ({"我": b"ab"}, "extra['我']"),
    "bytearray": ([bytearray(b"ab")], "extra[0]"),
    "object": ({"a": {"b": object()}}, "extra['a']['b']"),
    "function": ([None, len], "extra[1]"),
    "lambda": ([lambda: 0], "extra[0]"),
    "class": ([int], "extra[0]"),
    "complex": ([1j], "extra[0]"),
    "ordered dict": ({"a": OrderedDict(b=1)}, "extra['a']"),
    "enum": ([Colour.RED], "extra[0]"),
    "a kind of str": ([Text("a")], "extra[0]"),
    "a kind of float": ([Number(1)], "extra[0]"),
    "path": ([Path("a")], "extra[0]"),
    "RandomState": ([np.random.RandomState(0)], "extra[0]"),
    "bit generator": ([np.random.PCG64(0)], "extra[0]"),
    "seed": ([np.random.SeedSequence(0)], "extra[0]"),
    "a kind of Generator": ([Random(np.random.PCG64(0))], "extra[0]"),
    "a kind of bit generator": ([np.random.Generator(Bits(0))], "extra[0]"),
    "Parameter": ([Parameter(np.ones(1))], "extra[0]"),
    "model": ({"a": language_model()}, "extra['a']"),
    "int as a key": ({"a": {1: 2}}, "extra['a']"),
    "None as a key": ({None: 2}, "extra"),
    "bytes as a key": ({b"a": 2}, "extra"),
    "a kind of str as a key": ({Text("a"): 2}, "extra"),
    "our key": ({"a": [{"npdecoder.array": "model.output.W"}]}, "extra['a'][0]"),
    "our prefix": ({"npdecoder.": 1}, "extra"),
    "objects": ({"a": np.array([1, None])}, "extra['a']"),
    "objects in a record": ([np.zeros(1, [("x", object)])], "extra[0]"),
    "mask": ({"a": np.ma.array([1.0, 2.0], mask=[True, False])}, "extra['a']"),
    "masked": ([np.ma.masked], "extra[0]"),
}


@pytest.fixture
def old(path: Path) -> Iterator[Path]:
    """A path with a checkpoint that the test must leave as it is."""
    save_checkpoint(path, language_model(), extra="old")
    before = path.read_bytes()
    yield path
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_be_read_back_is_refused(old: Path, name: str) -> None:
    extra, place = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(place)} "):
        save_checkpoint(old, language_model(1), extra=extra)


def test_a_value_that_contains_itself_is_refused(old: Path) -> None:
    around: dict[str, Any] = {"a": []}
    around["a"].append(around)
    for extra in (around, around["a"]):
        with pytest.raises(ValueError, match="extra contains itself"):
            save_checkpoint(old, language_model(1), extra=extra)


@pytest.mark.parametrize(
    "value",
    [np.rec.array([(1, 2.0)]), np.str_("a\0"), np.bytes_(b"a\0"), 10**5000],
    ids=["record array", "text that ends in NUL", "bytes that end in NUL", "huge"],
)
def test_values_that_are_hard_to_store(npz: Path, value: Any) -> None:
    """They come back exactly, or an error says where they are."""
    save_checkpoint(npz, language_model())
    before = npz.read_bytes()
    try:
        save_checkpoint(npz, language_model(1), extra={"a": [value]})
    except (TypeError, ValueError) as error:
        assert npz.read_bytes() == before
        assert re.match(r"extra\['a'\]\[0\] ", str(error))  # noqa: PT017
    else:
        assert_same(load_checkpoint(npz).extra, {"a": [value]})


# What is refused besides


class OurTransformer(Transformer):
    pass


class OurSGD(SGD):
    pass


MODELS_OF_OTHER_CLASSES: dict[str, Callable[[], Any]] = {
    "a kind of Transformer": lambda: OurTransformer(transformer().config),
    "layer": lambda: Linear(2, 3),
    "part of a model": lambda: transformer().encoder,
    "None": lambda: None,
    "number": lambda: 3,
    "state dict": lambda: transformer().state_dict(),
    "path": lambda: "model.npz",
}
OPTIMIZERS_OF_OTHER_CLASSES: dict[str, Callable[[Any], Any]] = {
    "a kind of SGD": lambda model: OurSGD(model.parameters(), 0.1),
    "model": lambda model: model,
    "generator": lambda model: np.random.default_rng(0),
    "number": lambda model: 0.1,
    "class": lambda model: SGD,
    "state dict": lambda model: SGD(model.parameters(), 0.1).state_dict(),
}


@pytest.mark.parametrize("name", MODELS_OF_OTHER_CLASSES)
def test_models_of_other_classes_are_refused(old: Path, name: str) -> None:
    with pytest.raises(TypeError, match=r"^model is a .*Transformer or LanguageModel"):
        save_checkpoint(old, MODELS_OF_OTHER_CLASSES[name]())


@pytest.mark.parametrize("name", OPTIMIZERS_OF_OTHER_CLASSES)
def test_optimizers_of_other_classes_are_refused(old: Path, name: str) -> None:
    model = language_model()
    with pytest.raises(TypeError, match=r"^optimizer is a .*SGD or Adam or AdamW"):
        save_checkpoint(old, model, OPTIMIZERS_OF_OTHER_CLASSES[name](model))


def test_an_optimizer_of_other_parameters_is_refused(old: Path) -> None:
    model, other = language_model(), language_model()
    for parameters in (other.parameters(), [*model.parameters(), Parameter(np.ones(1))]):
        with pytest.raises(ValueError, match="parameters that the model does not have"):
            save_checkpoint(old, model, SGD(parameters, 0.1))


@pytest.mark.parametrize("rng", [np.random.RandomState(0), 0, np.random.PCG64(0), "rng", False])
def test_generators_of_other_kinds_are_refused(old: Path, rng: Any) -> None:
    with pytest.raises(TypeError, match="rng is "):
        save_checkpoint(old, language_model(), rng=rng)


@pytest.mark.parametrize("rng", [Random(np.random.PCG64(0)), np.random.Generator(Bits(0))])
def test_generators_that_could_not_be_made_again_are_refused(old: Path, rng: Any) -> None:
    with pytest.raises(TypeError, match="rng is "):
        save_checkpoint(old, language_model(), rng=rng)


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", None, float("nan")])
def test_a_step_that_is_no_count_is_refused(old: Path, step: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="step is "):
        save_checkpoint(old, language_model(), step=step)


def test_saving_changes_nothing_in_memory(path: Path) -> None:
    model = transformer()
    optimizer = AdamW(model.parameters())
    update(model, optimizer, 1)
    rng, extra = generator(), {"a": [np.arange(3), generator("Philox")], "b": -0.0}
    before = copy.deepcopy((contents(model, optimizer), rng, extra))
    save_checkpoint(path, model, optimizer, rng, 3, extra)
    assert_same((contents(model, optimizer), rng, extra), before)
    with pytest.raises(TypeError):
        save_checkpoint(path, model, optimizer, rng, 3, [extra, b""])
    assert_same((contents(model, optimizer), rng, extra), before)


def test_loading_twice_gives_two_of_everything(path: Path) -> None:
    model = transformer()
    optimizer = Adam(model.parameters())
    update(model, optimizer, 1)
    save_checkpoint(path, model, optimizer, generator(), 1, [np.arange(3), generator()])
    first, second = load_checkpoint(path), load_checkpoint(path)
    update(*first[:2], 5)
    first.rng.random()
    first.extra[0][:] = 9
    first.extra[1].random()
    assert_same(contents(*second[:2]), contents(model, optimizer))
    assert_same([second.rng, *second.extra], [generator(), np.arange(3), generator()])


def test_equal_trainings_make_equal_files(path: Path) -> None:
    model = transformer()
    optimizer = AdamW(decay_groups(model.parameters(), 0.1))
    update(model, optimizer, 1)
    rest = (generator("MT19937"), 3, {"b": [np.arange(3)], "a": generator()})
    save_checkpoint(path, model, optimizer, *rest)
    first = path.read_bytes()
    save_checkpoint(path, *load_checkpoint(path))
    assert path.read_bytes() == first


# Files that lack something, or hold something else

Place = tuple[Any, ...]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any]:
    """The arrays and the JSON of a file in which nothing is superfluous."""
    path = tmp_path_factory.mktemp("whole") / "c.npz"
    model = language_model(tie_embeddings="target_output", dropout=0.3, pad_id=4, norm="post")
    groups = decay_groups(model.parameters(), 0.1)
    optimizer = AdamW([{**group, "lr": 0.1 * (i + 1)} for i, group in enumerate(groups)], lr=0.3)
    update(model, optimizer, 1)
    extra = {"kind": np.int8(3), "data": [{"rng": generator("MT19937")}, {"W": np.ones((2, 3))}]}
    save_checkpoint(path, model, optimizer, generator(), 3, extra)
    arrays = load_weights(path)
    meta = json_value(arrays.pop(META))
    return arrays, meta


def write(path: Path, arrays: dict[str, Any], meta: Any) -> None:
    save_weights(path, {**arrays, META: json_array(meta)})


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Where the keys of all dicts are, at any depth."""
    if isinstance(value, dict):
        for key in value:
            yield (*at, key)
            yield from places(value[key], (*at, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from places(item, (*at, i))


def holder(meta: Any, place: Place) -> Any:
    for key in place[:-1]:
        meta = meta[key]
    return meta


def refused(path: Path, match: str = "") -> None:
    """One ValueError that names the path."""
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{match}") as caught:
        load_checkpoint(path)
    assert type(caught.value) is ValueError


def taken_in_silence(path: Path, arrays: dict[str, Any], metas: dict[Any, Any]) -> list[Any]:
    """Which of these files load, though they must not."""
    silent = []
    for name, meta in metas.items():
        write(path, arrays, meta)
        try:
            load_checkpoint(path)
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            silent.append(name)
    return silent


def without(meta: Any, place: Place) -> Any:
    meta = copy.deepcopy(meta)
    del holder(meta, place)[place[-1]]
    return meta


def test_the_file_that_the_next_tests_change_is_right(path: Path, whole: Any) -> None:
    write(path, *whole)
    loaded = load_checkpoint(path)
    assert loaded.step == loaded.optimizer.steps == 3
    assert any(name.startswith("grad.") for name in whole[0])
    assert len(list(places(whole[1]))) > 50


@pytest.mark.parametrize("start", ["model.", "grad.", "optimizer.", "extra"])
def test_a_file_that_lacks_an_array(npz: Path, whole: Any, start: str) -> None:
    """None is replaced by zeros, or by what it would be at the start."""
    arrays, meta = whole
    names = [name for name in arrays if name.startswith(start)]
    assert names
    silent = []
    for name in names:
        write(npz, {n: array for n, array in arrays.items() if n != name}, meta)
        try:
            load_checkpoint(npz)
        except ValueError as error:
            assert str(npz) in str(error)  # noqa: PT017
        else:
            silent.append(name)
    assert not silent


@pytest.mark.parametrize("start", ["model", "optimizer", "rng", "extra", ""])
def test_a_file_that_lacks_a_key(npz: Path, whole: Any, start: str) -> None:
    arrays, meta = whole
    lacking = {
        place: without(meta, place)
        for place in places(meta)
        if (place[0] == start and len(place) > 1) or (not start and len(place) == 1)
    }
    assert lacking
    assert taken_in_silence(npz, arrays, lacking) == []


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_a_generator_that_lacks_anything(npz: Path, name: str) -> None:
    save_checkpoint(npz, language_model(), rng=generator(name))
    arrays = load_weights(npz)
    meta = json_value(arrays.pop(META))
    lacking = {place: without(meta, place) for place in places(meta) if place[0] == "rng"}
    assert len(lacking) > 4
    assert taken_in_silence(npz, arrays, lacking) == []
    for one in [one for one in arrays if one.startswith("rng")]:
        write(npz, {n: array for n, array in arrays.items() if n != one}, meta)
        refused(npz)


CONFIG, NUMBERS, RNG = ("model", "config"), ("optimizer", "numbers"), ("rng", "npdecoder.rng")
NAN, INF = float("nan"), float("inf")
WRONG: list[tuple[Place, list[Any]]] = [  # where, and what must not be there
    (("format",), ["another", None, 1]),
    (("version",), [2, "1", None, 0]),
    (("model",), [None, [], "LanguageModel", {}]),
    (("model", "class"), ["Transformer", "Encoder", "SGD", "object", "", None, [], {}]),
    (CONFIG, [None, [], {}, "x"]),
    ((*CONFIG, "d_model"), [10, 0, -8, "8", None, 8.0, 10**14]),
    ((*CONFIG, "num_heads"), [3, 0, None]),
    ((*CONFIG, "vocab_size"), [12, -1, None, "11"]),
    ((*CONFIG, "num_layers"), [2, 0, None]),
    ((*CONFIG, "max_len"), [10**16, 0, None]),
    ((*CONFIG, "norm"), ["middle", None, []]),
    ((*CONFIG, "norm_bias"), [False, None, 1]),
    ((*CONFIG, "dropout"), [2, -0.5, None, "0.3", NAN]),
    ((*CONFIG, "tie_embeddings"), ["none", "all", None]),
    ((*CONFIG, "positions"), ["learned", "rotary"]),
    ((*CONFIG, "unknown"), [1, None]),
    (("optimizer",), [{}, [], 1, "SGD"]),
    (("optimizer", "class"), ["SGD", "Optimizer", "object", None, [], {}]),
    (("optimizer", "groups"), [None, {}, [], [[]], [["embedding.W"]], [["nothing"]], "x"]),
    (("optimizer", "groups", 0), [[], ["embedding.W"] * 2, "embedding.W", None]),
    (("optimizer", "groups", 1), [["embedding.W"], ["nothing"]]),
    (NUMBERS, [None, [], {}, "x"]),
    ((*NUMBERS, "lr"), [-1.0, NAN, INF, None, "0.1", [], True]),
    ((*NUMBERS, "steps"), [-1, 1.5, None, "3"]),
    ((*NUMBERS, "unknown"), [1.0]),
    ((*NUMBERS, "group.0.beta1"), [1.0, -0.5, None, "x"]),
    ((*NUMBERS, "group.0.lr_scale"), [-1.0, INF, None]),
    ((*NUMBERS, "group.2.beta1"), [0.5]),
    (("rng",), [1, [], "rng", {}, {"npdecoder.rng": None}, {"npdecoder.rng": {}}]),
    ((*RNG, "bit_generator"), ["MT19937", "RandomState", "seed", "", None, [], {}]),
    ((*RNG, "state"), [None, {}, 1]),
    ((*RNG, "state", "state"), [None, "1", 2**200]),
    (("step",), [-1, 1.5, "3", None, True, [], {}]),
    (("extra",), [None, [], {"npdecoder.array": "nothing"}, {"npdecoder.number": []}]),
]


@pytest.mark.parametrize(
    ("place", "values"), WRONG, ids=[".".join(map(str, place)) for place, _ in WRONG]
)
def test_a_file_with_a_wrong_value(npz: Path, whole: Any, place: Place, values: Any) -> None:
    arrays, meta = whole
    metas = {}
    for i, value in enumerate(values):
        metas[i, repr(value)] = changed = copy.deepcopy(meta)
        holder(changed, place)[place[-1]] = value
    assert taken_in_silence(npz, arrays, metas) == []


@pytest.mark.parametrize(
    ("name", "place"), [("MT19937", ("state", "pos")), ("Philox", ("buffer_pos",))]
)
def test_a_generator_whose_place_is_outside_its_numbers(
    npz: Path, name: str, place: Place
) -> None:
    """NumPy would read on from there, whatever stands in the memory."""
    save_checkpoint(npz, language_model(), rng=generator(name))
    arrays = load_weights(npz)
    meta = json_value(arrays.pop(META))
    metas = {}
    for value in (-1, -(2**31), 1000, 2**31 - 1):
        metas[value] = changed = copy.deepcopy(meta)
        holder(changed, (*RNG, *place))[place[-1]] = value
    assert taken_in_silence(npz, arrays, metas) == []


@pytest.mark.parametrize("name", ["MT19937", "Philox", "SFC64"])
@pytest.mark.parametrize("length", [0, 1, 3, 1000])
def test_a_generator_whose_arrays_are_too_short_or_long(
    npz: Path, name: str, length: int
) -> None:
    save_checkpoint(npz, language_model(), rng=generator(name))
    whole = load_weights(npz)
    names = [name for name in whole if name.startswith("rng")]
    assert names
    for one in names:
        save_weights(npz, {**whole, one: np.resize(whole[one], length)})
        refused(npz)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.embedding.W", np.ones((8, 11), np.float32)),
        ("model.embedding.W", np.ones((11, 8), int)),
        ("model.embedding.W", np.ones((11, 8), np.float16)),
        ("model.embedding.W", np.array("text")),
        ("model.output.c", np.ones(11, np.float32)),
        ("grad.embedding.W", np.ones((1, 8), np.float32)),
        ("grad.embedding.W", np.array("text")),
        ("grad.output.c", np.ones(11, np.float32)),
        ("optimizer.m.0", np.ones((8, 11), np.float32)),
        ("optimizer.m.0", np.ones((11, 8), int)),
        ("optimizer.m.99", np.ones((11, 8), np.float32)),
        ("optimizer.momentum.0", np.ones((11, 8), np.float32)),
        ("optimizer.lr", np.array(0.1)),
        ("extra['other']", np.ones(3)),
        ("other", np.ones(3)),
        ("", np.ones(3)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.dtype} {value.shape}",
)
def test_a_file_with_a_wrong_array(npz: Path, whole: Any, name: str, value: Any) -> None:
    arrays, meta = whole
    write(npz, {**arrays, name: value}, meta)
    refused(npz)


def test_a_gradient_of_no_parameter(npz: Path, whole: Any) -> None:
    """Also where the file's own list of gradients has it."""
    arrays, meta = whole
    changed = copy.deepcopy(meta)
    changed["model"]["gradients"].append("output.c")
    write(npz, {**arrays, "grad.output.c": np.ones(11, np.float32)}, changed)
    refused(npz, r"unexpected gradients output\.c$")


@pytest.mark.parametrize(
    "raw",
    [b"", b"null", b"3", b"[]", b"{}", b"not JSON", b"\xff\xfe\x00", b"[" * 100_000, b'{"a":' * 999,
     b"__import__('os').mkdir('made')"],
    ids=lambda raw: ascii(raw[:10]),
)  # fmt: skip
def test_json_that_describes_no_checkpoint(path: Path, whole: Any, raw: bytes) -> None:
    save_weights(path, {**whole[0], META: np.frombuffer(raw, np.uint8)})
    refused(path)


def test_files_of_another_kind(path: Path, whole: Any) -> None:
    save_weights(path, whole[0])
    refused(path, "weights alone")
    save_weights(path, {})
    refused(path)
    save_weights(path, {META: np.array(0.5)})
    refused(path)
    path.write_text("a text\n")
    refused(path)
    write(path, whole[0], {**whole[1], "version": 2})
    refused(path, "version 2")
    write(path, whole[0], {**whole[1], "format": "something else"})
    refused(path, "something else")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        load_checkpoint(path)
    with pytest.raises(ValueError, match=r"\.npz or \.safetensors"):
        load_checkpoint(path.with_suffix(".txt"))


# A training in two parts is bit by bit the training in one


def pairs_to_reverse() -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(0)
    sources = [rng.integers(3, V, rng.integers(1, 6)).tolist() for _ in range(26)]
    return [(source, source[::-1]) for source in sources]


PAIRS = pairs_to_reverse()  # 7 batches of 4: update 5 is in the middle, 8 begins the next epoch

TRAINED_BY: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda m: SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda m: AdamW(decay_groups(m.parameters(), 0.01)),
}


def batch_stream(rng: np.random.Generator) -> BatchStream:
    return BatchStream(lambda rng: batches(PAIRS, 4, rng, PAD, BOS, EOS), rng)


class Run:
    """A training with all that decides about its numbers."""

    def __init__(self, optimizer: str = "SGD") -> None:
        self.model = transformer(dropout=0.3)
        self.optimizer = TRAINED_BY[optimizer](self.model)
        self.rng = np.random.default_rng(1)
        self.stream = batch_stream(np.random.default_rng(2))
        self.losses: list[float] = []
        self.rates: list[float] = []

    def train(self, until: int) -> Run:
        noam = noam_schedule(self.model.config.d_model, warmup=4)

        def schedule(n: int) -> float:
            self.rates.append(noam(n))
            return noam(n)

        self.losses += train(
            self.model, CrossEntropy(ignore_index=PAD, label_smoothing=0.1), self.optimizer,
            self.stream, until, schedule=schedule, max_norm=0.5, rng=self.rng,
        )  # fmt: skip
        return self

    def save(self, path: Path) -> None:
        extra = {
            "stream": self.stream.state_dict(),
            "losses": self.losses,
            "rates": self.rates,
        }
        save_checkpoint(path, self.model, self.optimizer, self.rng, self.optimizer.steps, extra)

    @classmethod
    def load(cls, path: Path) -> Run:
        run = cls()
        run.model, run.optimizer, run.rng, step, extra = load_checkpoint(path)
        run.stream = batch_stream(np.random.default_rng(99))
        run.stream.load_state_dict(extra["stream"])
        run.losses, run.rates = extra["losses"], extra["rates"]
        assert len(run.losses) == step
        return run

    def contents(self) -> dict[str, Any]:
        return {
            **contents(self.model, self.optimizer),
            "rng": self.rng,
            "stream": self.stream.state_dict(),
            "losses": self.losses,
            "rates": self.rates,
        }


def go_on(path: str, until: str) -> None:
    """What the other process does."""
    Run.load(Path(path)).train(int(until)).save(Path(path))


@pytest.mark.parametrize("optimizer", TRAINED_BY)
def test_a_training_that_goes_on_in_another_process(path: Path, optimizer: str) -> None:
    at_once = Run(optimizer).train(10)
    run = Run(optimizer).train(5)
    assert run.stream.state_dict()["taken"] == 5  # in the middle of an epoch
    run.save(path)
    folders = Path(npdecoder.__file__).parents[1], Path(__file__).parent
    program = "import sys, test_checkpoint; test_checkpoint.go_on(*sys.argv[1:])"
    subprocess.run(
        [sys.executable, "-c", program, str(path), "10"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        check=True,
        timeout=120,
    )
    resumed = Run.load(path)
    assert len(at_once.losses) == 10
    assert len(set(at_once.losses)) == len(set(at_once.rates)) == 10
    assert_same(resumed.contents(), at_once.contents())


@pytest.mark.parametrize("optimizer", TRAINED_BY)
def test_a_training_that_stops_after_every_update(path: Path, optimizer: str) -> None:
    at_once, run = Run(optimizer), Run(optimizer)
    for until in range(1, 17):  # over two ends of an epoch
        at_once.train(until)
        run.train(until).save(path)
        run = Run.load(path)
        assert_same(run.contents(), at_once.contents())


def test_what_a_resumed_training_would_lose_shows(path: Path) -> None:
    """Or the tests above would compare what makes no difference."""
    at_once = Run().train(10)
    Run().train(5).save(path)
    for change in (
        lambda run: setattr(run, "rng", np.random.default_rng(1)),
        lambda run: setattr(run, "stream", batch_stream(np.random.default_rng(2))),
        lambda run: setattr(run, "optimizer", TRAINED_BY["SGD"](run.model)),
        lambda run: run.model.output.b.value.fill(0),
    ):
        run = Run.load(path)
        change(run)
        run.train(10 if run.optimizer.steps else 5)
        assert run.losses != at_once.losses
