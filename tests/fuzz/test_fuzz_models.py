"""Every block and model, and the configs, with hostile arguments."""

import dataclasses

import numpy as np
import reference as ref
from hostile import FRACTIONS, NO_ARRAYS, NOT_FLAGS, NUMBERS, SIZES, WORDS, fuzz, without

from npdecoder import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    FeedForward,
    LanguageModel,
    LanguageModelConfig,
    MemoryAttention,
    MemoryProjection,
    MultiHeadAttention,
    Transformer,
    TransformerConfig,
)


def draw_widths(s, multiple=1):
    """d_model, num_heads, d_k and d_v, all of them options."""
    h = s.size(2, 1, 3)
    d_k, d_v = s.pick(None, 2, 3), s.pick(None, 1, 5)
    d_model = multiple * (h * s.size(2, 1, 4) if None in (d_k, d_v) else s.size(3, 1, 5))
    s.sizes(d_model=d_model, num_heads=h)
    if h > 1 and None in (d_k, d_v):
        s.spoil("d_model", [(h * d_model + 1, ValueError)], "make", "d_model|num_heads")
    s.option("d_k", d_k, without(SIZES, None))
    s.option("d_v", d_v, without(SIZES, None))
    return d_model, h, d_k or d_model // h, d_v or d_model // h


def draw_rate(s, name, *others):
    """One that needs no luck: nothing is dropped, or everything."""
    bad = without(FRACTIONS, None) if others else FRACTIONS
    return s.option(name, s.pick(0.0, 0.0, 0.0, 1.0, *others), bad)


def draw_layer_options(s, multiple=1):
    d_model, h, d_k, d_v = draw_widths(s, multiple)
    s.option("d_ff", s.pick(None, 3, 1), without(SIZES, None))
    s.option("norm", s.pick("pre", "post"), WORDS)
    s.option("norm_eps", s.pick(1e-5, 0.1, 1), NUMBERS)
    s.option("activation", s.pick("relu", "gelu", "gelu_tanh"), WORDS)
    for name in ("norm_bias", "attention_bias", "feed_forward_bias"):
        s.flag(name)
    draw_rate(s, "dropout")
    draw_rate(s, "attention_dropout", None)
    return d_model, h, d_k, d_v


def draw_stack_options(s):
    sizes = draw_layer_options(s)
    num_layers = s.size(1, 2)
    s.sizes(num_layers=num_layers)
    s.option("final_norm", s.pick(None, True, False), without(NOT_FLAGS, None))
    s.spoil("layers", [(2, TypeError)], "make")  # no such option
    return sizes, num_layers


def options(s):
    """Those drawn so far, as the formulas take them."""
    return {name: value for name, value in s.arguments["make"].items()
            if name not in ("rng", "dtype")}  # fmt: skip


def draw_sizes(s):
    return s.length(), s.length(), s.length()


# Blocks


@fuzz
def test_feed_forward(s):
    leading, d_model = s.shape(), s.size(3, 1, 4)
    s.sizes(d_model=d_model)
    s.option("d_ff", s.pick(None, 5, 1), without(SIZES, None))
    activation = s.option("activation", s.pick("relu", "gelu", "gelu_tanh"), WORDS)
    s.flag("bias")
    p = draw_rate(s, "dropout")
    s.make()
    s.of_any_kind()
    s.floats("x", (*leading, d_model))
    s.generator()
    s.gradient("dy", (*leading, d_model))

    def formula(w, a):
        return ref.feed_forward(w, a["x"], activation, p, a["rng"])

    return s.layer(FeedForward, formula, rows=len(leading))


@fuzz
def test_multi_head_attention(s):
    d_model, h, _, _ = draw_widths(s)
    s.flag("bias")
    p = draw_rate(s, "dropout")
    s.make()
    s.of_any_kind()
    B, T, S = draw_sizes(s)
    s.floats("query", (B, T, d_model), rank=3, batch=B)
    s.floats("key", (B, S, d_model), rank=3, batch=B)
    s.floats("value", (B, S, d_model), rank=3, batch=B)
    s.spoil("value", [(np.zeros((B, S + 1, d_model)), ValueError)])
    s.mask("mask", B, h, T, S)
    s.generator()
    s.gradient("dy", (B, T, d_model))

    def formula(w, a):
        K, V = ref.project(w, a["key"], a["value"], h)
        return ref.attend(w, a["query"], K, V, h, a["mask"], p, a["rng"])

    return s.layer(MultiHeadAttention, formula, rows=1)


@fuzz
def test_memory_projection(s):
    d_model, h, d_k, d_v = draw_widths(s)
    s.flag("bias")
    s.make()
    s.of_any_kind()
    B, S = s.length(), s.length()
    s.floats("memory", (B, S, d_model), rank=3)
    s.gradient("dK", (B, h, S, d_k))
    s.gradient("dV", (B, h, S, d_v))
    return s.layer(
        MemoryProjection, lambda w, a: ref.project(w, a["memory"], a["memory"], h),
        backward=lambda layer, ctx, dK, dV: layer.backward(ctx, (dK, dV)), rows=1,
    )  # fmt: skip


@fuzz
def test_memory_attention(s):
    d_model, h, d_k, d_v = draw_widths(s)
    s.flag("bias")
    p = draw_rate(s, "dropout")
    s.make()
    s.of_any_kind()
    B, T, S = draw_sizes(s)
    s.floats("query", (B, T, d_model), rank=3, batch=B)
    s.floats("K", (B, h, S, d_k), rank=4, batch=B)
    s.floats("V", (B, h, S, d_v), rank=4, batch=B)
    s.spoil("V", [(np.zeros((B, h, S + 1, d_v)), ValueError)], words="V|value")
    s.mask("mask", B, h, T, S)
    s.generator()
    s.gradient("dy", (B, T, d_model))

    def formula(w, a):
        return ref.attend(w, a["query"], a["K"], a["V"], h, a["mask"], p, a["rng"])

    return s.layer(MemoryAttention, formula, rows=1)


@fuzz
def test_encoder_layer(s):
    d_model, h, _, _ = draw_layer_options(s)
    o = options(s)
    s.make()
    s.of_any_kind()
    B, T = s.length(), s.length()
    s.floats("x", (B, T, d_model), rank=3)
    s.mask("mask", B, h, T, T)
    s.generator()
    s.gradient("dy", (B, T, d_model))
    return s.layer(EncoderLayer, lambda w, a: ref.block(w, a["x"], o, a["mask"], rng=a["rng"]),
                   rows=1)  # fmt: skip


@fuzz
def test_encoder(s):
    (d_model, h, _, _), num_layers = draw_stack_options(s)
    o = options(s)
    s.make()
    s.of_any_kind()
    B, T = s.length(), s.length()
    s.floats("x", (B, T, d_model), rank=3)
    s.mask("mask", B, h, T, T)
    s.generator()
    s.gradient("dy", (B, T, d_model))

    def formula(w, a):
        return ref.stack(w, a["x"], num_layers, o, a["mask"], rng=a["rng"])

    return s.layer(Encoder, formula, rows=1)


def draw_decoder_inputs(s, crossing, d_model, h):
    """x, memory and their masks, rng and dy -> B and S."""
    B, T, S = draw_sizes(s)
    # of two batches that differ either may be named
    s.floats("x", (B, T, d_model), rank=3, batch=B if crossing else None,
             words="x|memory|target_mask" if crossing else None)  # fmt: skip
    s.mask("target_mask", B, h, T, T)
    if crossing:
        s.mask("memory_mask", B, h, T, S)
    else:
        s.spoil("memory", [(np.zeros((B, S, d_model)), ValueError)])
        s.spoil("memory_mask", [(np.ones((T, S), bool), ValueError)])
    s.generator()
    s.gradient("dy", (B, T, d_model))
    return B, S


@fuzz
def test_decoder_layer(s):
    d_model, h, d_k, d_v = draw_layer_options(s)
    o = options(s)
    where = s.option("cross_attention", s.pick("per_layer", "shared", "none"), WORDS)
    s.make()
    s.of_any_kind()
    B, S = draw_decoder_inputs(s, where != "none", d_model, h)
    if where == "per_layer":
        s.floats("memory", (B, S, d_model), rank=3, batch=B)
    elif where == "shared":
        K = s.floats("K", (B, h, S, d_k), rank=4, batch=B, words="memory K|memory")
        V = s.floats("V", (B, h, S, d_v), rank=4, batch=B, words="memory V|memory")
        s.spoil("V", [(np.zeros((B, h, S + 1, d_v)), ValueError)], words="memory")
        s.spoil("memory", [(None, ValueError), ([K, V], ValueError), ((K,), ValueError),
                           (np.zeros((B, S, d_model)), ValueError), (3, ValueError)])  # fmt: skip

    def forward(layer, K=None, V=None, **inputs):
        memory = {} if K is None and V is None else {"memory": (K, V)}
        return layer.forward(**{**memory, **inputs})

    def formula(w, a):
        memory = (a["K"], a["V"]) if where == "shared" else a.get("memory")
        cross = where != "none" and ref.cross_to(memory, h, a["memory_mask"], a["rng"])
        return ref.block(w, a["x"], o, a["target_mask"], cross or None, a["rng"])

    return s.layer(DecoderLayer, formula, forward=forward, rows=1)


@fuzz
def test_decoder(s):
    (d_model, h, _, _), num_layers = draw_stack_options(s)
    o = options(s)
    where = s.option("cross_attention", s.pick("per_layer", "shared", "none"), WORDS)
    s.make()
    s.of_any_kind()
    B, S = draw_decoder_inputs(s, where != "none", d_model, h)
    if where != "none":
        s.floats("memory", (B, S, d_model), rank=3, batch=B)

    def formula(w, a):
        return ref.stack(w, a["x"], num_layers, o, a["target_mask"], a.get("memory"),
                         a.get("memory_mask"), a["rng"])  # fmt: skip

    return s.layer(Decoder, formula, rows=1)


# Models


def draw_config(s):
    """The fields that both configs have -> all fields drawn so far, and the longest sequence."""
    positions = s.option("positions", s.pick("sinusoidal", "learned"), WORDS)
    draw_layer_options(s, multiple=2 if positions == "sinusoidal" else 1)
    for name in ("norm_bias", "attention_bias", "feed_forward_bias"):
        s.spoil(name, NOT_FLAGS, "make")
    for name in ("output_bias", "scale_embeddings"):
        s.option(name, s.pick(True, False, np.bool_(True)), NOT_FLAGS)
    s.option("final_norm", s.pick(None, True, False), without(NOT_FLAGS, None))
    draw_rate(s, "position_dropout", None)
    max_len = s.size(5, 3)
    s.sizes(max_len=max_len)
    return max_len


def draw_pad_id(s, vocab_size):
    bad = [*without(SIZES, 0, None), (vocab_size, ValueError)]
    return s.option("pad_id", s.pick(None, 0, np.int8(1), 2), bad)


def draw_transformer_config(s):
    max_len = draw_config(s)
    s.option("cross_attention", s.pick("per_layer", "shared"), [*WORDS, ("none", ValueError)])
    tie = s.option("tie_embeddings", s.pick("none", "target_output", "source_target", "all"), WORDS)
    one = tie in ("source_target", "all")
    V_source, V_target = (7, 7) if one else (7, 5)
    s.sizes(source_vocab_size=V_source, target_vocab_size=V_target)
    if one:
        s.spoil("target_vocab_size", [(6, ValueError)], "make", "tie_embeddings")
    s.sizes(num_encoder_layers=1, num_decoder_layers=s.size(1, 2))
    draw_pad_id(s, V_target)
    return V_source, V_target, max_len


def draw_language_model_config(s):
    max_len = draw_config(s)
    s.option("tie_embeddings", s.pick("none", "target_output"), [*WORDS, ("all", ValueError)])
    s.sizes(vocab_size=5, num_layers=s.size(1, 2))
    draw_pad_id(s, 5)
    return 5, max_len


def draw_ids(s, name, B, length, size, max_len, batch=None):
    too_long = np.full((B, max_len + 1), size - 1)  # which is never padding
    bad = [(np.zeros(length, int), ValueError), (np.zeros((1, B, length), int), ValueError),
           (3, ValueError)]  # fmt: skip
    if B:
        bad.append((too_long, ValueError))
    if batch is not None:
        bad += [(np.ones((n, length), int), ValueError) for n in (0, 1, 4) if n != B]
    return s.ids(name, (B, length), size, bad)


def transformer(rng, dtype, **fields):
    return Transformer(TransformerConfig(**fields), rng=rng, dtype=dtype)


def language_model(rng, dtype, **fields):
    return LanguageModel(LanguageModelConfig(**fields), rng=rng, dtype=dtype)


@fuzz
def test_transformer(s):
    V_source, V_target, max_len = draw_transformer_config(s)
    c = options(s)
    s.make()
    B, S, T = s.length(), s.pick(2, 3, 1, 0), s.pick(2, 3, 1, 0)
    draw_ids(s, "source_ids", B, S, V_source, max_len, batch=B)
    draw_ids(s, "target_ids", B, T, V_target, max_len, batch=B)
    s.mask("source_mask", B, c["num_heads"], T, S, keys_only=True)
    s.mask("target_mask", B, c["num_heads"], T, T)
    s.generator()
    s.gradient("dy", (B, T, V_target))

    def formula(w, a):
        return ref.transformer(w, a["source_ids"], a["target_ids"], c, a["source_mask"],
                               a["target_mask"], a["rng"])  # fmt: skip

    return s.layer(transformer, formula)


@fuzz
def test_decode_after_another_encoder(s):
    """Transformer.decode, of any memory."""
    V_source, V_target, max_len = draw_transformer_config(s)
    c = options(s)
    s.make()
    s.of_any_kind(sick=False)
    B, S, T = s.length(), s.pick(2, 3, 1, 0), s.pick(2, 3, 1, 0)
    draw_ids(s, "target_ids", B, T, V_target, max_len, batch=B)
    s.floats("memory", (B, S, int(c["d_model"])), rank=3, batch=B)
    draw_ids(s, "source_ids", B, S, V_source, max_len, batch=B)
    s.mask("source_mask", B, c["num_heads"], T, S, keys_only=True)
    s.mask("target_mask", B, c["num_heads"], T, T)
    s.generator()
    s.gradient("dy", (B, T, V_target))

    def formula(w, a):
        return ref.decode(w, a["target_ids"], a["memory"], a["source_ids"], c, a["source_mask"],
                          a["target_mask"], a["rng"])  # fmt: skip

    return s.layer(
        transformer, formula,
        forward=lambda model, **inputs: model.decode(**inputs),
        backward=lambda model, ctx, dy: model.decode_backward(ctx, dy),
    )  # fmt: skip


@fuzz
def test_source_mask(s):
    """Transformer.source_mask: the keys that are real and allowed, or None where all are."""
    pad_id = s.pick(None, 0, 1)
    config = TransformerConfig(7, 5, d_model=4, num_heads=2, num_encoder_layers=1,
                               num_decoder_layers=1, pad_id=pad_id)  # fmt: skip
    model = Transformer(config, rng=0)
    B, S = s.length(), s.length()
    ids = s.ids("source_ids", (B, S), 7, [(np.zeros(S, int), ValueError), (3, ValueError),
                                          (np.zeros((1, B, S), int), ValueError)])  # fmt: skip
    s.mask("mask", B, 2, 1, S, keys_only=True)

    def native(mask):
        return mask if mask is None or mask.dtype == bool else mask.astype(np.float64)

    def function(source_ids, mask):
        return {"keep": [native(model.source_mask(source_ids, mask))]}

    def expected(source_ids, mask):
        mask = native(None if mask is None else np.asarray(mask))
        keep = ref.real(np.asarray(ids).astype(int), {"pad_id": pad_id})[:, None, None, :]
        return {"keep": [mask if keep.all() else ref.both(keep, mask)]}

    s.bad = [(place, name, bad, "source_mask|mask" if name == "mask" else words)
             for place, name, bad, words in s.bad]  # fmt: skip
    return s.call(function, expected)


@fuzz
def test_language_model(s):
    V, max_len = draw_language_model_config(s)
    c = options(s)
    s.make()
    B, T = s.length(), s.pick(2, 3, 1, 0)
    draw_ids(s, "ids", B, T, V, max_len)
    s.mask("mask", B, c["num_heads"], T, T)
    s.generator()
    s.gradient("dy", (B, T, V))

    def formula(w, a):
        return ref.language_model(w, a["ids"], c, a["mask"], a["rng"])

    return s.layer(language_model, formula)


def config_call(s, config):
    """The fields come back as plain values of Python."""
    fields = s.arguments["forward"] = s.arguments.pop("make")
    s.arguments["make"] = {}
    s.bad = [("forward", name, bad, words) for _, name, bad, words in s.bad]
    s.spoil("layers", [(2, TypeError)])
    plain = {name: value.item() if isinstance(value, np.generic) else value
             for name, value in fields.items()}  # fmt: skip

    def values(**fields):
        found = dataclasses.asdict(config(**fields))
        assert not any(isinstance(value, np.generic) for value in found.values())
        return {name: found[name] for name in plain}

    return s.call(values, lambda **_: plain)


@fuzz
def test_transformer_config(s):
    draw_transformer_config(s)
    return config_call(s, TransformerConfig)


@fuzz
def test_language_model_config(s):
    draw_language_model_config(s)
    return config_call(s, LanguageModelConfig)


@fuzz
def test_models_of_no_config(s):
    model = s.pick(Transformer, LanguageModel)
    config = TransformerConfig(5, 5, d_model=4, num_heads=1, num_encoder_layers=1,
                               num_decoder_layers=1)  # fmt: skip
    other = LanguageModelConfig(5, d_model=4, num_heads=1, num_layers=1)
    right, wrong = (config, other) if model is Transformer else (other, config)
    s.give("config", right, [(wrong, TypeError), *((bad, TypeError) for bad, _ in NO_ARRAYS)])
    return s.call(lambda config: model(config, rng=0).config == config, lambda config: True)
