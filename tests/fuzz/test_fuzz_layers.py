"""Every layer, and the functions beside them, with hostile arguments."""

import numpy as np
import reference as ref
from hostile import FRACTIONS, INTEGERS, NUMBERS, SIZES, WORDS, bad_types, fuzz, without

from npdecoder import (
    GELU,
    CrossEntropy,
    Dropout,
    Embedding,
    LayerNorm,
    LearnedPositions,
    Linear,
    ReLU,
    ScaledDotProductAttention,
    SinusoidalPositions,
    Softmax,
    TiledAttention,
    Unembedding,
    causal_mask,
    log_softmax,
    padding_mask,
    softmax,
    target_mask,
)

MANY = (3, 60, 31)  # numbers, of which layers have quicker ways to compute


@fuzz
def test_linear(s):
    leading, d_in, d_out = s.shape(), s.size(), s.size()
    s.sizes(d_in=d_in, d_out=d_out)
    s.flag("bias")
    s.make()
    s.of_any_kind()
    s.floats("x", (*leading, d_in))
    s.gradient("dy", (*leading, d_out))
    return s.layer(Linear, lambda w, a: ref.linear(w, a["x"]), rows=len(leading))


@fuzz
def test_embedding(s):
    leading, vocab_size, d_model = s.shape(), s.size(3, 1, 7), s.size()
    s.sizes(vocab_size=vocab_size, d_model=d_model)
    scale = s.flag("scale")
    s.make()
    s.of_any_kind(sick=False)
    s.ids("ids", leading, vocab_size)
    s.gradient("dy", (*leading, d_model))
    factor = d_model**0.5 if scale else 1.0
    return s.layer(Embedding, lambda w, a: w["W"][a["ids"]] * factor)


@fuzz
def test_unembedding(s):
    leading, vocab_size, d_model = s.shape(), s.size(3, 1, 7), s.size()
    s.any_dtype()
    embedding = Embedding(vocab_size, d_model, s.pick(True, False), dtype=s.dtype)
    s.option("embedding", embedding, [(embedding.W, TypeError), (None, TypeError), (3, TypeError),
                                      (embedding.W.value, TypeError)])  # fmt: skip
    s.flag("bias")
    s.of_any_kind()
    s.floats("x", (*leading, d_model))
    s.gradient("dy", (*leading, vocab_size))

    def formula(w, a):
        return ref.linear(w, a["x"], ref.swapped(w["W"], 0, 1))

    return s.layer(Unembedding, formula, rows=len(leading))


def draw_positions(s, B, T, max_len):
    shape = s.pick((T,), (B, T), None)
    if shape is None:
        return s.give("positions", None, [(np.zeros((B, T + 1), int), ValueError)])
    x = s.array(s.rng.integers(0, max_len, shape), s.pick("int64", "uint8", "int32", "uint64"))
    full = np.zeros((B, T), int)
    bad = [(full + 0.0, TypeError), (full > 0, TypeError), (full[None], ValueError),
           (full.astype(str), TypeError), ([[0], [0, 0]], ValueError)]  # fmt: skip
    if full.size:
        bad += [(full - 1, ValueError), (full + max_len, ValueError)]
    if B > 1 and T > 0:
        bad += [(full[:1], ValueError), (np.zeros((B, 1 + (T == 1)), int), ValueError)]
    return s.give("positions", x, bad)


@fuzz
def test_sinusoidal_positions(s):
    B, T, d_model = s.length(), s.length(), s.size(2, 4, 6)
    max_len = T + s.size(1, 3)
    s.sizes(d_model=d_model, max_len=max_len)
    s.spoil("d_model", [(3, ValueError), (1, ValueError)], "make")
    s.any_dtype()
    s.of_any_kind()
    x = s.own_floats("x", (B, T, d_model), lambda: [
        (np.zeros((B, max_len + 1, d_model)), ValueError), (np.zeros((B, d_model)), ValueError),
        (np.zeros((B, T, d_model + 1)), ValueError), (np.zeros((1, B, T, d_model)), ValueError)],
        words="x|positions")  # fmt: skip
    draw_positions(s, B, T, max_len)
    s.gradient("dy", np.shape(x))

    def formula(w, a):
        at = np.arange(T) if a["positions"] is None else a["positions"]
        return a["x"] + ref.sinusoids(max_len, d_model)[at]

    return s.layer(SinusoidalPositions, formula, rows=2)


@fuzz
def test_learned_positions(s):
    B, T, d_model = s.length(), s.length(), s.size()
    max_len = T + s.size(1, 3)
    s.sizes(max_len=max_len, d_model=d_model)
    s.make()
    s.of_any_kind()
    x = s.floats("x", (B, T, d_model), rank=3)
    s.spoil("x", [(np.zeros((B, max_len + 1, d_model)), ValueError)], words="x|positions")
    draw_positions(s, B, T, max_len)
    s.gradient("dy", np.shape(x))

    def formula(w, a):
        return a["x"] + w["P"][np.arange(T) if a["positions"] is None else a["positions"]]

    return s.layer(LearnedPositions, formula, rows=2)


def draw_axis(s, rank):
    bad = [(rank, ValueError), (-rank - 1, ValueError), (1.5, TypeError), ("x", TypeError)]
    return s.give("axis", s.pick(*range(-rank, rank)), bad)


def softmax_call(s, function, formula):
    s.any_dtype()
    s.of_any_kind("huge", sick=False)
    shape = MANY if s.pick(False, True) else s.shape(1)
    x = s.own_floats("x", shape)
    axis = draw_axis(s, len(shape))
    right = formula(ref.Tape().var(np.asarray(x)), axis).value
    return s.call(function, lambda **_: right)


@fuzz
def test_softmax_function(s):
    return softmax_call(s, softmax, ref.softmax)


@fuzz
def test_log_softmax_function(s):
    def formula(x, axis):
        return ref.swapped(ref.log_softmax(ref.swapped(x, axis, -1)), axis, -1)

    return softmax_call(s, log_softmax, formula)


def own_layer(s, cls, formula, shape, rows, bad=(), kinds=()):
    s.any_dtype()
    s.of_any_kind(*kinds)
    s.own_floats("x", shape, bad)
    s.gradient("dy", shape)
    return s.layer(cls, formula, rows=rows)


@fuzz
def test_softmax(s):
    shape = MANY if s.pick(False, True) else s.shape(1)
    return own_layer(s, Softmax, lambda w, a: ref.softmax(a["x"]), shape, len(shape) - 1,
                     lambda: [(s.dtype.type(1.0), ValueError)], ["huge"])  # fmt: skip


@fuzz
def test_relu(s):
    shape = s.shape()
    return own_layer(s, ReLU, lambda w, a: ref.relu(a["x"]), shape, len(shape),
                     kinds=["huge"])  # fmt: skip


@fuzz
def test_gelu(s):
    shape, word = s.shape(), s.pick("none", "tanh")
    s.option("approximate", word, WORDS)
    formula = ref.gelu if word == "none" else ref.gelu_tanh
    return own_layer(s, GELU, lambda w, a: formula(a["x"]), shape, len(shape))


@fuzz
def test_dropout_of_all_or_nothing(s):
    shape = s.shape()
    p = s.option("p", s.pick(0, 0.0, 1.0, np.float32(1), 0.5), FRACTIONS)
    if p == 0.5:
        s.give("rng", None)
    else:
        s.generator()
    return own_layer(s, Dropout, lambda w, a: ref.dropped(a["x"], p, a["rng"]), shape, len(shape))


@fuzz
def test_dropout_of_some(s):
    """What is kept is divided by 1 - p, in forward and backward alike."""
    p = s.option("p", s.number(0.1, 0.9), FRACTIONS)
    s.any_dtype()
    shape, kept = s.shape(), np.zeros(0)
    s.own_floats("x", shape)
    s.give("rng", np.random.default_rng(0), [(0, TypeError)])
    s.gradient("dy", shape)

    def forward(layer, x, rng):
        nonlocal kept
        y, ctx = layer.forward(x, rng=rng)
        kept = np.asarray(y != 0, np.float64)
        return y, ctx

    return s.layer(Dropout, lambda w, a: a["x"] * (kept / (1.0 - p)), forward=forward)


@fuzz
def test_layer_norm(s):
    leading, d_model = s.shape(), s.size(2, 3, 1, 5, 8)
    s.sizes(d_model=d_model)
    eps = s.option("eps", s.pick(1e-5, 1e-3, 1, np.float32(0.5)), NUMBERS)
    s.flag("bias")
    s.make(rng=False)
    s.of_any_kind()
    s.floats("x", (*leading, d_model))
    s.gradient("dy", (*leading, d_model))
    return s.layer(LayerNorm, lambda w, a: ref.layer_norm(w, a["x"], float(eps)), rows=len(leading))


def attention_call(s, cls, causal=False):
    leading, T, S = s.shape(0, 2), s.length(), s.length()
    if s.pick(*[False] * 7, True):
        leading, T, S = (2, 2), 37, 35
    d_k, d_v = s.size(), s.size(3, 1, 2, 0)
    p = s.option("dropout", s.pick(0.0, 0.0, 1.0), FRACTIONS)
    s.any_dtype()
    s.of_any_kind()
    other = np.float32 if s.dtype == np.float64 else np.float64

    def bad(*shape):
        return [(np.zeros(shape, other), TypeError), (np.zeros((*shape, 2), s.dtype), ValueError),
                (np.zeros((2, *shape), s.dtype), ValueError), (s.dtype.type(1), ValueError),
                (np.zeros((*shape[:-2], shape[-2] + 2, shape[-1] + 1), s.dtype), ValueError),
                (np.zeros([n + 1 for n in leading] + list(shape[-2:]), s.dtype), ValueError)
                if leading else (np.zeros(shape[-1], s.dtype), ValueError)]  # fmt: skip

    for name, shape in (("q", (T, d_k)), ("k", (S, d_k)), ("v", (S, d_v))):
        s.own_floats(name, (*leading, *shape), bad(*leading, *shape))
    s.spoil("q", [(np.zeros((*leading, T, d_k + 1), s.dtype), ValueError)])
    for name, d in (("k", d_k), ("v", d_v)):
        s.spoil(name, [(np.zeros((*leading, S + 1, d), s.dtype), ValueError)])
    if len(leading) == 2:
        s.mask("mask", *leading, T, S)
    else:
        mask = s.pick(None, "causal")
        s.give("mask", mask and causal_mask(T, S), [(np.ones((T, S), int), TypeError)])
    s.generator()
    s.gradient("dy", (*leading, T, d_v))
    past = np.arange(S)[None, :] <= np.arange(T)[:, None] + S - T

    def formula(w, a):
        mask = ref.both(past, a["mask"]) if causal else a["mask"]
        return ref.attention(a["q"], a["k"], a["v"], mask, p, a["rng"])

    return s.layer(cls, formula, rows=len(leading))


@fuzz
def test_scaled_dot_product_attention(s):
    return attention_call(s, ScaledDotProductAttention)


@fuzz
def test_tiled_attention(s):
    s.option("tile", s.pick(2, 1, 3, np.int8(5), 128), SIZES)
    return attention_call(s, TiledAttention, s.flag("causal"))


@fuzz
def test_cross_entropy(s):
    leading, V = s.shape(), s.size(3, 2, 1, 7)
    ignored = s.option("ignore_index", s.pick(None, -1, -100, 0, V + 5, np.int8(2)),
                       without(SIZES, None, 0, -1))  # fmt: skip
    e = s.option("label_smoothing", s.pick(0.0, 0.1, 1, 0.5), FRACTIONS)
    s.any_dtype()
    s.of_any_kind(sick=False)
    s.own_floats("logits", (*leading, V), lambda: [
        (np.zeros((*leading, V, 1)), ValueError), (np.zeros((2, *leading, V)), ValueError),
        (np.zeros((*leading, 0)), ValueError), (1.0, ValueError)])  # fmt: skip
    targets = s.rng.integers(0, V, leading)
    dtype = s.pick("int64", "int16", "int32")
    if ignored is not None:
        targets = np.where(s.rng.random(leading) < 0.4, ignored, targets)
    targets = s.array(targets, dtype)

    def bad():
        wrong = np.asarray(targets)
        found = [(wrong.astype(float), TypeError), (wrong.astype(bool), TypeError),
                 (wrong[None], ValueError), (np.zeros((*leading, 2), int), ValueError),
                 (None, (TypeError, ValueError)), ([[0], [0, 1]], ValueError)]  # fmt: skip
        if wrong.size:
            found += [(np.full_like(wrong, value), IndexError) for value in (-3, V)
                      if value != ignored]  # fmt: skip
        return found

    s.give("targets", targets, bad)
    dloss = s.pick(1.0, -0.5, 2, np.float32(0.25))
    s.give("dloss", dloss, [(np.ones(3), ValueError), ([1.0], ValueError), ("1", TypeError),
                            (None, TypeError), (1j, TypeError)], "backward")  # fmt: skip

    def forward(layer, logits, targets):
        loss, ctx = layer.forward(logits, targets)
        counted = np.asarray(targets) != ignored if ignored is not None else np.ones(leading)
        assert ctx.count == layer.count(targets) == np.count_nonzero(counted)
        return np.asarray(loss).reshape(1).astype(s.dtype), ctx

    def formula(w, a):
        return ref.cross_entropy(a["logits"], a["targets"], ignored, float(e))

    return s.layer(CrossEntropy, formula, forward=forward)


# Masks


@fuzz
def test_causal_mask(s):
    T, S = s.length(), s.length()
    S = s.pick(S, None)
    bad = without(SIZES, 0)
    s.give("T", s.pick(int, np.int8)(T), bad)
    s.give("S", S, without(bad, None))
    width = T if S is None else S

    def expected(T, S):
        keep = np.zeros((T, width), bool)
        for t in range(int(T)):
            for key in range(width):
                keep[t, key] = key <= t + width - T
        return keep

    return s.call(causal_mask, expected)


def masks_call(s, function, causal):
    B, T, pad_id = s.length(), s.length(), s.pick(0, None, 2, -1, np.int8(1))
    ids = s.array(s.rng.integers(0, 5, (B, T)), s.pick(*INTEGERS))
    s.give("ids", ids, lambda: [
        *bad_types(ids), (np.zeros((B, T)), TypeError), (np.ones((B, T), bool), TypeError),
        ([0], ValueError), (np.zeros((1, B, T), int), ValueError), (3, ValueError)])  # fmt: skip
    s.give("pad_id", pad_id, without(SIZES, None, 0, -1))

    def expected(ids, pad_id):
        keep = np.ones((B, 1, T if causal else 1, T), bool)
        for b in range(B):
            for key in range(T):
                for t in range(keep.shape[2]):
                    real = pad_id is None or np.asarray(ids)[b, key] != pad_id
                    keep[b, 0, t, key] = real and (not causal or key <= t)
        return keep

    return s.call(function, expected)


@fuzz
def test_padding_mask(s):
    return masks_call(s, padding_mask, causal=False)


@fuzz
def test_target_mask(s):
    return masks_call(s, target_mask, causal=True)
