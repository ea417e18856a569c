"""Mistakes that hand-written Transformers make, each one planted, measured and caught.

    python examples/pitfalls.py            all of them
    python examples/pitfalls.py 7          number 7 (or several numbers)
    python examples/pitfalls.py --list     the table of contents

Each comes with its wrong code, what that does to the numbers, the check that sees it (run here and
now), a usual habit of testing that does not, and the right way. They were found in the articles
that npdecoder follows ("walkthrough", "part 6", "Pre-LN article"), or in the "field": in public
NumPy Transformers and in bug reports.

How this file is made: the code under a line of dashes is the mistake; the function after it plants
the mistake and returns facts, and its decorator has the text, in which every {name} is a fact.
tests/examples/test_pitfalls.py asserts all of them. It needs NumPy and npdecoder.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from npdecoder import (
    SGD,
    CrossEntropy,
    Decoder,
    DecoderLayer,
    Dropout,
    Embedding,
    Encoder,
    LanguageModel,
    LanguageModelConfig,
    Layer,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    ScaledDotProductAttention,
    SinusoidalPositions,
    Softmax,
    Unembedding,
    causal_mask,
    gradcheck,
    softmax,
)
from npdecoder.blocks import Residual
from npdecoder.blocks.multi_head_attention import merge_heads, split_heads
from npdecoder.layers.softmax import SoftmaxContext

WIDTH = 98

# Sizes of which no two are equal: B sequences, T targets, S sources, width d, h heads. Equal sizes
# are the first habit that hides mistakes.
B, T, S, d, h = 3, 5, 7, 6, 2
F64 = {"dtype": np.float64}
STACK = {"d_model": d, "num_heads": h, "d_ff": 11, "cross_attention": "none", "rng": 0, **F64}


# --- What a check says --------------------------------------------------------------------------


class Check(NamedTuple):
    ok: bool
    output: str  # one or two lines


def by_gradcheck(layer: Any, *inputs: Any, **keywords: Any) -> Check:
    """npdecoder.gradcheck, and of its table the head and the worst row."""
    try:
        report = gradcheck(layer, *inputs, **keywords)
    except (ValueError, TypeError) as error:
        return Check(False, f"gradcheck: {type(error).__name__}: {error}")
    if report.ok:
        lines = str(report).splitlines()
        return Check(True, f"gradcheck: {lines[-1]}, largest error {report.max_relative_error:.0e}")
    worst = max(report.rows, key=lambda row: (not row.ok, row.relative_error))
    _, head, *table, total = str(report).splitlines()
    notes = [line for line in table if line.startswith("    ")]
    row = [line for line in table if line not in notes][report.rows.index(worst)]
    name = 38 if worst.index is None else 28  # the column of names, made as narrow as it can be
    name = slice(len(row[:name].rstrip()), name)
    head, row = (line[: max(6, name.start)] + line[name.stop :] for line in (head, row))
    of = f"({total.removesuffix(' tensors failed')})"
    return Check(False, f"{head}\n{row} {of}" if not worst.note else f"{row} {of}\n{worst.note}")


def by_equality(what: str, a: Any, b: Any, tolerance: float = 1e-10) -> Check:
    difference = float(np.max(np.abs(np.asarray(a, float) - np.asarray(b, float))))
    return by_property(f"{what} (largest difference {difference:.2g})", difference <= tolerance)


def by_property(what: str, ok: Any) -> Check:
    return Check(bool(ok), f"test: {what}: {'ok' if ok else 'FAIL'}")


def by_shape(y: Any, x: Any) -> Check:
    return by_property(f"shape {np.shape(y)} as expected, all finite",
                       np.shape(y) == np.shape(x) and np.isfinite(y).all())


def by_causality(f: Callable[[Any], Any], x: Any) -> Check:
    """The last token may not change what comes out before it."""
    changed = x.copy()
    changed[:, -1] += 1.0
    moved = float(np.abs(f(changed) - f(x))[:, :-1].max(initial=0.0))
    return by_property(f"x[:, -1] += 1 leaves y[:, :-1] as it was (moves by {moved:.2g})",
                       moved <= 1e-12)


def by_items(f: Callable[[Any], Any], x: Any) -> Check:
    """A batch must give what its items give one by one."""
    alone = np.concatenate([f(item[None]) for item in x])
    return by_equality("the batch equals its items one by one", f(x), alone)


# --- What the mistakes are made of --------------------------------------------------------------


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def upstream(y: Any) -> Any:
    """A random gradient for the output y, of another stream than any input."""
    return normal(*np.shape(y), seed=1)


def randomise(layer: Any, seed: int = 0) -> Any:
    """Random values for every parameter, gammas and biases too: initial values hide mistakes."""
    rng = np.random.default_rng(seed)
    for name, parameter in layer.named_parameters():
        parameter.value = rng.standard_normal(parameter.shape) * 0.5 + name.endswith("gamma")
    return layer


def size_ratio(a: Any, b: Any) -> float:
    return float(np.linalg.norm(a) / np.linalg.norm(b))


def losses(step: Callable[[], float], updates: int) -> tuple[float, float]:
    """The first and the last loss of a small training."""
    all_losses = [step() for _ in range(updates)]
    return all_losses[0], all_losses[-1]


@dataclass(frozen=True)
class Pitfall:
    title: str
    where: str  # the article it was found in, or "field"
    wrong: tuple[Any, ...]  # the code to print
    effect: str  # what it does to the numbers
    habit: str  # the habit of testing that hides it, in a few words
    hides: str  # how
    right: str
    run: Callable[[], dict[str, Any]]
    # of the facts that run returns, these are Checks:
    #   caught  sees the mistake: not ok; also, if there, as well
    #   blind   another test that everyone would trust, but which is ok (not always there)
    #   hidden  the mistake again, tested by the habit: ok
    #   mended  what caught it, on the right code: ok


PITFALLS: list[Pitfall] = []


def pitfall(
    title: str, where: str, *wrong: Any, effect: str, habit: str, hides: str, right: str
) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    def add(run: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        PITFALLS.append(Pitfall(title, where, wrong, effect, habit, hides, right, run))
        return run

    return add


# --- Stacks of layers ---------------------------------------------------------------------------


def one_instance(num_layers):
    stack = Decoder(num_layers, **STACK)
    layer = DecoderLayer(**STACK)
    stack.layers = [layer for _ in range(num_layers)]  # wrong: one layer, num_layers times
    return stack


@pitfall(
    "One layer object in every place of a stack",
    "part 6: its blocks share one attention and one feed-forward",
    one_instance,
    effect="A stack of 3 holds {held} numbers where it should hold {wanted}: one layer, run three "
    "times, and nothing warns.",
    habit="shapes only; one layer",
    hides="The article's own test looks at the shape of the output. A stack of one layer hides it "
    "too; and gradcheck must pass: weights may be shared, and their gradients are right.",
    right="Make each layer anew: [DecoderLayer(...) for _ in range(N)], as Decoder does.",
)
def shared_instance():
    x, one = normal(B, T, d), Decoder(1, **STACK)
    final = one.norm.gamma.size + one.norm.beta.size
    wanted = 3 * (one.num_parameters() - final) + final

    def check(stack, wanted=wanted):
        count, found = len(stack.layers), stack.num_parameters()
        return by_property(f"{count} layer(s) hold {wanted} numbers (found {found})",
                           found == wanted)

    wrong = one_instance(3)
    return {
        "held": wrong.num_parameters(),
        "wanted": wanted,
        "caught": check(wrong),
        "blind": by_gradcheck(randomise(wrong), x, mode="directional"),
        "hidden": by_shape(wrong(x), x),
        "hidden_one": check(one_instance(1), one.num_parameters()),
        "mended": check(Decoder(3, **STACK)),
    }


# ----


def deep_copies(num_layers):
    stack = Decoder(num_layers, **STACK)
    first = stack.layers[0]
    stack.layers = [copy.deepcopy(first) for _ in range(num_layers)]  # wrong: all start equal
    return stack


@pitfall(
    "Layers made by deepcopy",
    "Pre-LN article",
    deep_copies,
    effect="Three layers, {distinct} set of weights: the random draw is made once and copied. The "
    "gradients do differ (the first layer's from the last's by {apart:.0%}), and so training parts "
    "them; but the start is not the one that the initialisation was worked out for.",
    habit="counting parameters",
    hides="There are as many numbers as there should be, in separate arrays.",
    right="Build N layers from one generator: rng = default_rng(seed); [Layer(rng=rng) for ...].",
)
def deepcopy_stack():
    def check(stack):
        first, *others = [layer.feed_forward.linear1.W.value for layer in stack.layers]
        return by_property("no two layers start with the same weights",
                           not any(np.array_equal(first, other) for other in others))

    wrong, right = deep_copies(3), Decoder(3, **STACK)
    y, ctx = wrong.forward(normal(B, T, d))
    wrong.backward(ctx, upstream(y))
    first, last = (wrong.layers[i].feed_forward.linear1.W for i in (0, -1))
    distinct = {layer.feed_forward.linear1.W.value.tobytes() for layer in wrong.layers}
    return {
        "distinct": len(distinct),
        "apart": float(np.linalg.norm(first.grad - last.grad) / np.linalg.norm(last.grad)),
        "caught": check(wrong),
        "blind": by_gradcheck(wrong, normal(B, T, d), mode="directional"),
        "hidden": by_property(f"3 layers hold {right.num_parameters()} numbers",
                              wrong.num_parameters() == right.num_parameters()),
        "mended": check(right),
    }


# --- Masks --------------------------------------------------------------------------------------


def look_ahead(T):
    return np.triu(np.ones((T, T), bool), k=1)  # True = blocked
    # wrong where True means "may attend", and where 1 means "keep"


@pitfall(
    "A mask of the other polarity",
    "part 6 has True = blocked, the other two 1 = keep: each is wrong in the other's code",
    look_ahead,
    effect="Every position sees its future alone: with T = 3, token 0 gives {first:.0%} of its "
    "attention to itself, token 1 gives {answer:.0%} to token 2, the very one that it is to "
    "predict, and the last token, which has no future, gets a context of {last}.",
    habit="shapes only",
    hides="All shapes are right and all numbers finite. gradcheck must pass as well: a mask is a "
    "constant, and the derivative of the wrong function is right.",
    right="One polarity everywhere, and a causality test. npdecoder: bool, True = may attend; "
    "0 and 1 are refused ({refusal}).",
)
def polarity():
    layer, x = randomise(MultiHeadAttention(d, h, **F64)), normal(B, 3, d)

    def attend(mask):
        return lambda x: layer(x, x, x, mask)

    _, ctx = layer.forward(x, x, x, look_ahead(3))
    try:
        attend(look_ahead(3).astype(int))(x)
        refusal = "not refused"
    except TypeError as error:
        refusal = type(error).__name__
    return {
        "first": float(ctx.attend.attention.A[..., 0, 0].max()),
        "answer": float(ctx.attend.attention.A[..., 1, 2].min()),
        "last": float(np.abs(attend(look_ahead(3))(x)[:, -1]).max()),
        "refusal": refusal,
        "caught": by_causality(attend(look_ahead(3)), x),
        "blind": by_gradcheck(layer, x, x, x, mask=look_ahead(3)),
        "hidden": by_shape(attend(look_ahead(3))(x), x),
        "mended": by_causality(attend(~look_ahead(3)), x),
    }


# ----


def square_mask(T):
    return np.where(np.tri(T, dtype=bool), 0.0, -np.inf)  # 0 = visible, -inf = hidden


def masked_weights(scores, mask):
    return softmax(np.where(mask == 0, -1e9, scores))  # wrong: 0 was "visible"


@pitfall(
    "A mask of 0 and -inf, tested with == 0",
    "walkthrough: its helper makes one kind of mask, its attention reads another",
    square_mask,
    masked_weights,
    effect="The test turns the mask round. With T = 3, query 0 gives {future:.0%} of its weight to "
    "keys 1 and 2; query 2, from which every key is now hidden, spreads it evenly: {last}.",
    habit="rows sum to 1; T = 1",
    hides="Every row of weights still sums to 1. T = 1 hides it as well: one key gets all.",
    right="A float mask is added: softmax(scores + mask). A boolean one chooses: "
    "np.where(keep, scores, -np.inf).",
)
def zero_and_minus_inf():
    scores = normal(3, 3)
    wrong = masked_weights(scores, square_mask(3))

    def check(A):
        leak = float(np.triu(A, k=1).max())
        return by_property(f"no weight above the diagonal (largest {leak:.2f})", leak == 0.0)

    return {
        "future": float(wrong[0, 1:].sum()),
        "last": wrong[2],
        "caught": check(wrong),
        "hidden": by_equality("every row of weights sums to 1", wrong.sum(axis=-1), np.ones(3)),
        "hidden_one": by_equality("T = 1: equal to softmax(scores + mask)",
                                  masked_weights(scores[:1, :1], square_mask(1)),
                                  softmax(scores[:1, :1] + square_mask(1))),
        "mended": check(softmax(scores + square_mask(3))),
    }


# ----


class PlainSoftmax(Softmax):
    def forward(self, x):
        e = np.exp(x - x.max(axis=-1, keepdims=True))  # wrong: -inf - (-inf) is NaN
        y = e / e.sum(axis=-1, keepdims=True)
        return y, SoftmaxContext(y)


@pitfall(
    "A query that may attend to nothing",
    "Pre-LN article: -inf, and no guard",
    PlainSoftmax,
    effect="Its row is NaN. Leaving that row out of the loss does not help: 0 * NaN is NaN, and "
    "{bad_dk:.0%} of dk and {bad_dv:.0%} of dv are NaN. In a batch of {B} with one such query, "
    "{bad_W:.0%} of the gradient of W_k is: one padded sentence spoils the update for all.",
    habit="causal masks only",
    hides="Under a square causal mask every query sees itself, and no row is empty.",
    right="An empty row gets weights, context and gradients of exactly zero (npdecoder's softmax "
    "adds 1 to a sum that is 0).",
)
def nothing_visible():
    q, k, v = np.eye(2)[None], np.array([[[1.0, 0], [0, 1], [1, 1]]]), np.array([[[1.0], [2], [4]]])
    keep = np.array([[True, True, False], [False, False, False]])
    row_0_only = np.array([[[1.0], [0.0]]])  # the gradient of a loss without row 1

    def attention(softmax_layer):
        layer = ScaledDotProductAttention()
        layer.softmax = softmax_layer
        return layer

    def check(layer):
        y, ctx = layer.forward(q, k, v, keep)
        finite = [bool(np.isfinite(a).all()) for a in (y, *layer.backward(ctx, row_0_only))]
        return by_property(f"y, dq, dk, dv are finite {finite}", all(finite))

    x, batch, one_blind = normal(B, h, T, d), normal(B, T, d), np.ones((B, 1, T, T), bool)
    one_blind[1, :, 0] = False
    multi_head = MultiHeadAttention(d, h, rng=0, **F64)
    multi_head.attention = attention(PlainSoftmax())
    dy = upstream(batch)
    dy[1, 0] = 0.0  # a loss without the query that sees nothing
    with np.errstate(invalid="ignore"):
        multi_head.backward(multi_head.forward(batch, batch, batch, one_blind)[1], dy)
        wrong, right = attention(PlainSoftmax()), attention(Softmax())
        _, ctx = wrong.forward(q, k, v, keep)
        _, dk, dv = wrong.backward(ctx, row_0_only)
        return {
            "bad_dk": float(np.isnan(dk).mean()),
            "bad_dv": float(np.isnan(dv).mean()),
            "B": B,
            "bad_W": float(np.isnan(multi_head.W_k.W.grad).mean()),
            "caught": check(wrong),
            "also": by_gradcheck(wrong, q, k, v, mask=keep),
            "hidden": by_equality("equal to npdecoder under a causal mask",
                                  wrong(x, x, x, causal_mask(T)), right(x, x, x, causal_mask(T))),
            "mended": check(right),
        }


# ----


def nearly_minus_inf(scores, keep):
    scores = np.where(keep, scores, scores.dtype.type(-1e9))  # wrong: -1e9 is a number
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@pitfall(
    "-1e9 for minus infinity",
    "walkthrough",
    nearly_minus_inf,
    effect="Half precision ends at 65504: there -1e9 is {half}, and a query that sees nothing is "
    "NaN again. In float32 and float64 it silently sees all that it must not: over hidden values "
    "1, 2, 4 its context is {mean:.3f}, their mean.",
    habit="rows that see something",
    hides="Where a query sees at least one key, exp(-1e9) is exactly 0 and nothing differs.",
    right="-inf, and zeros for the query that sees nothing.",
)
def minus_1e9():
    keep, none = np.array([[True, True, False]]), np.zeros((1, 3), bool)
    scores, v = np.array([[0.3, -1.2, 0.8]]), np.array([[1.0], [2.0], [4.0]])

    def check(weights, kind):
        A = weights(scores.astype(kind), none)
        return by_property(f"nothing visible in {np.dtype(kind)}: weights {numbers(A[0])} are zero",
                           (A == 0).all())

    def right(scores, keep):
        return softmax(np.where(keep, scores, -np.inf))

    with np.errstate(over="ignore", invalid="ignore"):
        return {
            "half": float(np.float16(-1e9)),
            "mean": float((nearly_minus_inf(scores, none) @ v)[0, 0]),
            "caught": check(nearly_minus_inf, np.float64),
            "also": check(nearly_minus_inf, np.float16),
            "hidden": by_equality("equal to -inf where a key is visible",
                                  nearly_minus_inf(scores, keep), right(scores, keep)),
            "mended": check(right, np.float64),
        }


# ----


def top_left(T, S):
    return np.tri(T, S, dtype=bool)  # wrong for S > T: query 0 is not the first token


@pitfall(
    "The causal triangle at the wrong corner",
    "field: decoding with cached keys",
    top_left,
    effect="Two new queries over five keys, equal scores, values 1 2 4 8 16: the contexts are "
    "{wrong_out} where {right_out} are right. The newest token sees two of five.",
    habit="T = S",
    hides="In a square both corners are one.",
    right="np.tri(T, S, k=S - T): the last query stands at the last key. npdecoder.causal_mask.",
)
def triangle_corner():
    zeros, v = np.zeros((5, 1)), np.array([[1.0], [2], [4], [8], [16]])
    attention, x = ScaledDotProductAttention(), normal(T, d)

    def check(mask, new):
        whole = attention(x, x, x, mask(T, T))
        chunk = attention(x[-new:], x, x, mask(new, T))
        return by_equality(f"the last {new} queries alone equal the whole", chunk, whole[-new:])

    return {
        "wrong_out": attention(zeros[:2], zeros, v, top_left(2, 5))[:, 0],
        "right_out": attention(zeros[:2], zeros, v, causal_mask(2, 5))[:, 0],
        "caught": check(top_left, 2),
        "hidden": check(top_left, T),
        "mended": check(causal_mask, 2),
    }


# --- Attention ----------------------------------------------------------------------------------


def sequence_first(attention, x):
    x = x.swapaxes(0, 1)  # (T, B, d)
    y = attention(x, x, x)  # wrong: this attention takes (B, T, d), and mixes the items
    return y.swapaxes(0, 1)


@pitfall(
    "Attention across the batch",
    "walkthrough: its example transposes to (T, B, d), its attention reads (B, T, d)",
    sequence_first,
    effect="Position by position, the items of the batch attend to each other: a change in item 1 "
    "moves item 0 by {leak:.2g}, and a change in token 4 moves token 0 by {within}: within a "
    "sequence nothing is read.",
    habit="B = 1",
    hides="The walkthrough's batch has one sentence. Each token then attends to itself alone, and "
    "passes the test of items and even that of causality, without any mask.",
    right="Batch first everywhere, and a batch must equal its items one by one.",
)
def across_the_batch():
    layer, x = randomise(MultiHeadAttention(d, h, **F64)), normal(B, T, d)

    def wrong(x):
        return sequence_first(layer, x)

    def moved(index, of):
        changed = x.copy()
        changed[index] += 1.0
        return float(np.abs(wrong(changed) - wrong(x))[of].max())

    return {
        "leak": moved(1, 0),
        "within": moved((0, 4), (0, 0)),
        "caught": by_items(wrong, x),
        "hidden": by_items(wrong, x[:1]),
        "hidden_causality": by_causality(wrong, x[:1]),
        "mended": by_items(lambda x: layer(x, x, x), x),
    }


# ----


class ScaledByTheModel(ScaledDotProductAttention):
    def forward(self, q, k, v, mask=None, rng=None):
        h = q.shape[1]
        return super().forward(q / math.sqrt(h), k, v, mask, rng)  # wrong

    def backward(self, ctx, dy):
        dq, dk, dv = super().backward(ctx, dy)
        return dq / math.sqrt(ctx.q.shape[1]), dk, dv


@pitfall(
    "Scores divided by sqrt(d_model)",
    "field",
    ScaledByTheModel,
    effect="q / sqrt(h), and then / sqrt(d_k), is / sqrt(d_model). Attention is too even: with 8 "
    "heads of width 64 and random q and k, "
    "over 16 keys, the largest weight of a query is {wrong_max:.2f} on average instead of "
    "{right_max:.2f}.",
    habit="one head",
    hides="At h = 1, d_k is d_model. And gradcheck cannot see it at any h: forward and backward "
    "agree on the wrong function.",
    right="1 / sqrt(d_k), the width of a head; compare with eq. 1 of Vaswani et al., written out.",
)
def scale():
    def definition(q, k, v):
        scores = np.einsum("bhti,bhsi->bhts", q, k) / q.shape[-1] ** 0.5
        weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
        return np.einsum("bhts,bhsj->bhtj", weights, v)

    def check(layer, heads):
        q, k, v = normal(B, heads, T, 4), normal(B, heads, S, 4), normal(B, heads, S, 3)
        return by_equality(f"h = {heads}: equal to eq. 1", layer(q, k, v), definition(q, k, v))

    wrong, right = ScaledByTheModel(), ScaledDotProductAttention()
    q, k = normal(1, 8, 32, 64), normal(1, 8, 16, 64)
    return {
        "wrong_max": float(wrong.forward(q, k, k)[1].A.max(axis=-1).mean()),
        "right_max": float(right.forward(q, k, k)[1].A.max(axis=-1).mean()),
        "caught": check(wrong, h),
        "blind": by_gradcheck(wrong, normal(B, h, T, 4), normal(B, h, S, 4), normal(B, h, S, 3)),
        "hidden": check(wrong, 1),
        "mended": check(right, h),
    }


# ----


class MergeByReshape(Layer):
    def forward(self, x):
        B, h, T, width = x.shape
        return x.reshape(B, T, h * width), x.shape  # wrong: x.swapaxes(1, 2) must come first

    def backward(self, ctx, dy):
        return dy.reshape(ctx)


@pitfall(
    "Heads merged without a transpose",
    "field",
    MergeByReshape,
    effect="Two heads of [[1,2],[3,4]] and [[5,6],[7,8]] become {wrong} in place of {right}: "
    "token 0 gets head 0 of both tokens. Later tokens leak into earlier ones, past any mask.",
    habit="one head",
    hides="At h = 1 the transpose does nothing. gradcheck passes at any h: a reshape undoes the "
    "reshape.",
    right="x.swapaxes(1, 2).reshape(B, T, h * width), and a causality test on two heads.",
)
def merge():
    two_heads = np.arange(1.0, 9.0).reshape(1, 2, 2, 2)

    def attend(merge, num_heads):
        def f(x):
            q = split_heads(x, num_heads)
            return merge(ScaledDotProductAttention()(q, q, q, causal_mask(T)))

        return f

    wrong, x = MergeByReshape(), normal(B, T, d)
    return {
        "wrong": wrong(two_heads)[0],
        "right": merge_heads(two_heads)[0],
        "caught": by_causality(attend(wrong, h), x),
        "blind": by_gradcheck(wrong, normal(B, h, T, 3)),
        "hidden": by_causality(attend(wrong, 1), x),
        "mended": by_causality(attend(merge_heads, h), x),
    }


# ----


def crossed(attention, x, memory):
    return attention(memory, memory, x)  # wrong: (query, key, value) is (x, memory, memory)


@pitfall(
    "Cross-attention with Q and K from the encoder, V from the decoder",
    "field",
    crossed,
    effect="The encoder asks and the decoder answers. At S = T it runs: one changed target token "
    "moves the outputs of {moved} of {T} targets, where a query should move its own alone.",
    habit="S = T",
    hides="Shapes are all right at S = T; at S != T the key and the value do not fit together.",
    right="attention(x, memory, memory), tested at S != T, and each query by itself.",
)
def crossed_sources():
    layer, x, memory = randomise(MultiHeadAttention(d, h, **F64)), normal(B, T, d), normal(B, S, d)
    square = memory[:, :T]

    def runs(f):
        try:
            return by_property(f"runs at S = {S}, T = {T}", f(layer, x, memory).shape == x.shape)
        except ValueError as error:
            return Check(False, f"ValueError at S = {S}, T = {T}: {error}")

    changed = x.copy()
    changed[:, 0] += 1.0
    moved = np.abs(crossed(layer, changed, square) - crossed(layer, x, square)).max(axis=(0, 2)) > 0
    return {
        "moved": int(moved.sum()),
        "T": T,
        "caught": runs(crossed),
        "hidden": by_shape(crossed(layer, x, square), x),
        "mended": runs(lambda layer, x, memory: layer(x, memory, memory)),
    }


# ----


class GradientsSwapped(DecoderLayer):
    def backward(self, ctx, dy):
        dx, dmemory = super().backward(ctx, dy)
        return dmemory, dx  # wrong: forward takes (x, memory)


@pitfall(
    "Cross-attention's gradients in the wrong order",
    "field",
    GradientsSwapped,
    effect="The decoder gets the encoder's gradient and the encoder the decoder's. At S = T it "
    "runs, with dx wrong by {error:.0%}.",
    habit="S = T",
    hides="At S = T both gradients have one shape, and a test of shapes is content.",
    right="Gradients in the order of forward's arguments, checked by numbers at S != T.",
)
def gradients_swapped():
    options = {"d_model": d, "num_heads": h, "d_ff": 11, **F64}
    wrong, right = randomise(GradientsSwapped(**options)), randomise(DecoderLayer(**options))
    x, square = normal(B, T, d), normal(B, T, d) + 0.5
    y, ctx = right.forward(x, square)
    dy = upstream(y)
    dx, dmemory = wrong.backward(ctx, dy)
    true_dx, _ = right.backward(ctx, dy)
    return {
        "error": float(np.linalg.norm(dx - true_dx) / np.linalg.norm(true_dx)),
        "caught": by_gradcheck(wrong, x, square, mode="directional"),
        "also": by_gradcheck(wrong, x, normal(B, S, d), mode="directional"),
        "hidden": by_property(f"dx {dx.shape} and dmemory {dmemory.shape} have the right shapes",
                              dx.shape == x.shape and dmemory.shape == square.shape),
        "mended": by_gradcheck(right, x, square, mode="directional"),
    }


# ----


def pair_index(max_len, d_model):
    i = np.arange(d_model // 2)
    angle = np.arange(max_len)[:, None] / 10000 ** (i / d_model)  # wrong: 2 * i / d_model
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(max_len, d_model)


@pitfall(
    "The exponent of the sinusoidal positions",
    "walkthrough: its code is right, but the digits it prints fit this formula",
    pair_index,
    effect="At d_model 4 the third component of positions 1 and 2 is {wrong} (printed as 0.1 and "
    "0.2) where {right} are right. The longest wave has {short:.0f} positions, not {long:.0f}.",
    habit="position 0; d_model 2",
    hides="Position 0 is 0 1 0 1 whatever the exponent is, and the first pair has i = 0.",
    right="10000 ** (2 * i / d_model) for the pair i; look at the last pair, at a late position.",
)
def position_exponent():
    right = SinusoidalPositions(4, 3).P
    wrong = pair_index(3, 4)
    return {
        "wrong": wrong[1:, 2],
        "right": right[1:, 2],
        "short": float(2 * np.pi / np.arcsin(wrong[1, 2])),
        "long": float(2 * np.pi / np.arcsin(right[1, 2])),
        "caught": by_equality("the last pair is that of Vaswani et al., 3.5", wrong[:, 2:],
                              right[:, 2:]),
        "hidden": by_equality("position 0 is right", wrong[0], right[0]),
        "hidden_pair": by_equality("d_model 2 is right", pair_index(9, 2),
                                   SinusoidalPositions(2, 9).P),
        "mended": by_equality(
            "the last pair, by the formula", right[:, 2],
            np.sin(np.arange(3) / 10000 ** (2 * 1 / 4))
        ),
    }


# --- LayerNorm and softmax ----------------------------------------------------------------------


class EpsOutside(Layer):
    eps = 1e-3

    def forward(self, x):
        xc = x - x.mean(axis=-1, keepdims=True)
        sigma = np.sqrt((xc * xc).mean(axis=-1, keepdims=True))
        return xc / (sigma + self.eps), (xc, sigma)  # wrong: sqrt(var + eps)

    def backward(self, ctx, dy):
        xc, sigma = ctx
        dsigma = -(dy * xc).sum(axis=-1, keepdims=True) / (sigma + self.eps) ** 2
        dxc = dy / (sigma + self.eps) + dsigma * xc / (sigma * xc.shape[-1])  # 0 / 0
        return dxc - dxc.mean(axis=-1, keepdims=True)


@pitfall(
    "LayerNorm with eps outside the root",
    "Pre-LN article: sigma + eps in its prose, sqrt(var + eps) in its code",
    EpsOutside,
    effect="On a constant row sigma is 0, where its root has no slope: dx is {nans:.0%} NaN. Small "
    "rows come out larger: [0, 0.02] with eps 1e-3 gives {wrong} instead of {right}.",
    habit="rows of spread 1",
    hides="On standard normal rows with eps 1e-5 both forms agree to 4 digits, and gradcheck "
    "passes: the derivative is right wherever there is one.",
    right="1 / sqrt(var + eps) is smooth everywhere; test a constant row and a tiny one.",
)
def eps_outside():
    def check(layer):
        _, ctx = layer.forward(np.full((1, 4), 1234.0))
        dx = layer.backward(ctx, np.array([[1.0, 2, 3, 5]]))
        return by_property(f"a constant row has a finite gradient {numbers(dx[0])}",
                           np.isfinite(dx).all())

    wrong, small, x = EpsOutside(), np.array([[0.0, 0.02]]), normal(B, T, 7)
    usual = EpsOutside()
    usual.eps = 1e-5
    with np.errstate(invalid="ignore"):
        _, ctx = wrong.forward(np.ones((1, 4)))
        return {
            "nans": float(np.isnan(wrong.backward(ctx, np.ones((1, 4)))).mean()),
            "wrong": wrong(small)[0],
            "right": LayerNorm(2, eps=1e-3, **F64)(small)[0],
            "caught": check(wrong),
            "blind": by_gradcheck(wrong, x),
            "hidden": by_equality("equal to LayerNorm on normal rows", usual(x),
                                  LayerNorm(7, **F64)(x), tolerance=1e-4),
            "mended": check(LayerNorm(4, **F64)),
        }


# ----


class GammaOutside(LayerNorm):
    def backward(self, ctx, dy):
        x_hat, rstd = ctx
        self.gamma.grad += (dy * x_hat).sum(axis=(0, 1))
        self.beta.grad += dy.sum(axis=(0, 1))
        sums = dy.mean(-1, keepdims=True) + x_hat * (dy * x_hat).mean(-1, keepdims=True)
        return self.gamma.value * rstd * (dy - sums)  # wrong: the sums are of dy * gamma


@pitfall(
    "LayerNorm backward with gamma left out of the sums",
    "field",
    GammaOutside,
    effect="With gammas spread by 0.5 around 1, dx is wrong by {error:.0%}; with a spread of 0.05, "
    "by {small:.0%}. Training moves gamma, and the error grows with it.",
    habit="gamma = 1",
    hides="gamma starts at 1, where the formula is exact: a layer fresh from its constructor "
    "passes.",
    right="dx_hat = dy * gamma first, then rstd * (dx_hat - mean(dx_hat) - x_hat * mean(dx_hat * "
    "x_hat)). Random gammas in every test.",
)
def gamma_outside():
    x, wrong, right = normal(B, T, 7), *(randomise(c(7, **F64)) for c in (GammaOutside, LayerNorm))

    def error(spread):
        gamma = 1.0 + spread * normal(7)
        layers = GammaOutside(7, **F64), LayerNorm(7, **F64)
        for layer in layers:
            layer.gamma.value = gamma
        dx, true_dx = (layer.backward(layer.forward(x)[1], upstream(x)) for layer in layers)
        return float(np.linalg.norm(dx - true_dx) / np.linalg.norm(true_dx))

    return {
        "error": error(0.5),
        "small": error(0.05),
        "caught": by_gradcheck(wrong, x),
        "hidden": by_gradcheck(GammaOutside(7, **F64), x),
        "mended": by_gradcheck(right, x),
    }


# ----


class SameForBeta(LayerNorm):
    def backward(self, ctx, dy):
        dgamma = (dy * ctx.x_hat).sum(axis=(0, 1))
        self.gamma.grad += dgamma
        self.beta.grad += dgamma  # wrong: dy.sum(axis=(0, 1))
        dx_hat = dy * self.gamma.value
        sums = dx_hat.mean(-1, keepdims=True)
        sums = sums + ctx.x_hat * (dx_hat * ctx.x_hat).mean(-1, keepdims=True)
        return ctx.rstd * (dx_hat - sums)


@pitfall(
    "dbeta = dgamma",
    "field",
    SameForBeta,
    effect="beta is moved along gamma's slope, not its own: the cosine between the two is "
    "{cosine:.2f} here.",
    habit="checking dx only",
    hides="dx is right, dgamma too, and dbeta has the right shape.",
    right="dbeta = sum of dy, dgamma = sum of dy * x_hat; check every parameter, beta too.",
)
def same_for_beta():
    wrong, x = randomise(SameForBeta(7, **F64)), normal(B, T, 7)
    dy, rows = upstream(x), {row.name: row for row in gradcheck(wrong, x).rows}
    dgamma = (dy * wrong.forward(x)[1].x_hat).sum(axis=(0, 1))
    dbeta = dy.sum(axis=(0, 1))
    return {
        "cosine": float(dgamma @ dbeta / np.linalg.norm(dgamma) / np.linalg.norm(dbeta)),
        "caught": by_gradcheck(wrong, x),
        "hidden": by_property(f"dx by finite differences (error {rows['x'].relative_error:.0e})",
                              rows["x"].ok),
        "hidden_gamma": by_property("dgamma by finite differences, and dbeta has the shape "
                                    f"{rows['beta'].shape}",
                                    rows["gamma"].ok and np.isfinite(rows["beta"].analytic)),
        "mended": by_gradcheck(randomise(LayerNorm(7, **F64)), x),
    }


# ----


class DividedByTheBatch(Softmax):
    def backward(self, ctx, dy):
        y = ctx.y
        return y * (dy - (dy * y).sum(axis=-1, keepdims=True)) / len(y)  # wrong: / len(y)


@pitfall(
    "Softmax backward divided by the batch size",
    "field",
    DividedByTheBatch,
    effect="dx is {ratio:.3f} times what it should be, 1/B at B = {B}: the mean over the batch is "
    "the loss's, and already in dy. In attention dq is {dq:.3f} times and dv {dv:.3f} times right, "
    "so that no learning rate mends both.",
    habit="dy = ones; B = 1",
    hides="A row of softmax sums to 1, so dy = ones has gradient 0 and 0/B is 0. B = 1 hides it "
    "too.",
    right="y * (dy - sum(dy * y)), a row by itself; random dy, B > 1.",
)
def softmax_over_batch():
    wrong, right, x, dy = DividedByTheBatch(), Softmax(), normal(B, 7), normal(B, 7, seed=1)
    _, ctx = right.forward(x)
    attention, q = ScaledDotProductAttention(), normal(B, h, T, d)
    _, attention_ctx = attention.forward(q, q, q)
    true_dq, _, true_dv = attention.backward(attention_ctx, upstream(q))
    attention.softmax = wrong
    dq, _, dv = attention.backward(attention_ctx, upstream(q))
    ones = np.ones_like(x)
    return {
        "B": B,
        "ratio": size_ratio(wrong.backward(ctx, dy), right.backward(ctx, dy)),
        "dq": size_ratio(dq, true_dq),
        "dv": size_ratio(dv, true_dv),
        "caught": by_gradcheck(wrong, x),
        "hidden": by_equality("dy = ones: dx is that of the right code",
                              wrong.backward(ctx, ones), right.backward(ctx, ones)),
        "hidden_one": by_gradcheck(wrong, x[:1]),
        "mended": by_gradcheck(right, x),
    }


# --- Residual paths and dropout -----------------------------------------------------------------


class SkipDropped(Residual):
    def leave_backward(self, ctx, dy):
        dskip, ds = super().leave_backward(ctx, dy)
        return 0.0 * dskip, ds  # wrong: y = x + s sends dy both ways


def with_residual(residual_class, norm, num_layers=1):
    """An encoder whose residual paths are of this class."""
    encoder = Encoder(num_layers, d, h, 11, norm=norm, final_norm=False, rng=0, **F64)
    for layer in encoder.layers:
        layer.residual1 = residual_class(layer.norm1, norm, 0.0)
        layer.residual2 = residual_class(layer.norm2, norm, 0.0)
    return encoder


def block(residual_class, norm):
    return randomise(with_residual(residual_class, norm)).layers[0]


@pitfall(
    "The skip's gradient dropped",
    "field",
    SkipDropped,
    effect="Only the path through the sublayers is left. Under 6 Pre-LN layers, the gradient that "
    "reaches x is {ratio:.2g} of the right one in size.",
    habit="one block's top parameters",
    hides="The last sublayer's gradients (linear2 here) do not pass any skip, and are right.",
    right="Where a value goes two ways its gradient is a sum: dx = dy + (the way through).",
)
def skip_dropped():
    x = normal(B, T, d)

    def dx(residual_class):
        encoder = with_residual(residual_class, "pre", 6)
        y, ctx = encoder.forward(x)
        return encoder.backward(ctx, upstream(y))

    report = gradcheck(block(SkipDropped, "pre"), x, mode="directional")
    top = [row for row in report.rows if "linear2" in row.name]
    return {
        "ratio": size_ratio(dx(SkipDropped), dx(Residual)),
        "caught": by_gradcheck(block(SkipDropped, "pre"), x, mode="directional"),
        "hidden": by_property(f"linear2.W and .b by finite differences ({len(top)} tensors)",
                              len(top) == 2 and all(row.ok for row in top)),
        "mended": by_gradcheck(block(Residual, "pre"), x, mode="directional"),
    }


# ----


class SkipThroughTheNorm(Residual):
    def leave_backward(self, ctx, dy):
        self.dskip, ds = super().leave_backward(ctx, dy)
        return 0.0 * self.dskip, ds

    def enter_backward(self, ctx, dh):
        return super().enter_backward(ctx, self.dskip + dh)  # wrong if Pre-LN


@pitfall(
    "The skip's gradient sent through the norm",
    "field; the Pre-LN article's prose also lets it flow through LayerNorm",
    SkipThroughTheNorm,
    effect="As if y were norm(x) + f(norm(x)). dx of one Pre-LN block is wrong by {error:.0%}. A "
    "norm's backward takes out the mean: every row of dx sums to 0 (up to {sum:.0e}), where the "
    "right ones sum to up to {right_sum:.1f}.",
    habit="Post-LN only",
    hides="In y = norm(x + f(x)) the skip does go through the norm. The same code is right there.",
    right="Pre-LN: dx = dy + norm.backward(dh). The skip never meets the norm.",
)
def skip_through_the_norm():
    x = normal(B, T, d)

    def dx(residual_class):
        encoder = with_residual(residual_class, "pre")
        y, ctx = encoder.forward(x)
        return encoder.backward(ctx, upstream(y))

    wrong, right = dx(SkipThroughTheNorm), dx(Residual)
    return {
        "error": float(np.linalg.norm(wrong - right) / np.linalg.norm(right)),
        "sum": float(np.abs(wrong.sum(axis=-1)).max()),
        "right_sum": float(np.abs(right.sum(axis=-1)).max()),
        "caught": by_gradcheck(block(SkipThroughTheNorm, "pre"), x, mode="directional"),
        "hidden": by_gradcheck(block(SkipThroughTheNorm, "post"), x, mode="directional"),
        "mended": by_gradcheck(block(Residual, "pre"), x, mode="directional"),
    }


# ----


class RememberingDropout(Layer):
    def __init__(self, p):
        self.p, self.scale = p, 1.0

    def forward(self, x, rng=None):
        if rng is not None:
            self.scale = (rng.random(x.shape) >= self.p) / (1 - self.p)  # wrong: on the layer
        return x * self.scale, None

    def backward(self, ctx, dy):
        return dy * self.scale  # the mask of the last call, whichever call this undoes


class ThreeTimes(Layer):
    """x -> dropout(linear(x)), three times, with one dropout."""

    def __init__(self, dropout):
        self.dropout = dropout
        self.linears = [Linear(d, d, rng=i, **F64) for i in range(3)]

    def forward(self, x, rng=None):
        ctx = []
        for linear in self.linears:
            x, of_linear = linear.forward(x)
            x, of_dropout = self.dropout.forward(x, rng)
            ctx.append((of_linear, of_dropout))
        return x, ctx

    def backward(self, ctx, dy):
        for linear, (of_linear, of_dropout) in zip(self.linears[::-1], ctx[::-1]):
            dy = linear.backward(of_linear, self.dropout.backward(of_dropout, dy))
        return dy


@pitfall(
    "One dropout instance used three times",
    "field",
    RememberingDropout,
    effect="backward applies the third call's mask to all three: {other:.0%} of the entries of the "
    "first two have another mask than in forward, and dx is wrong by {error:.0%}.",
    habit="p = 0; a single use",
    hides="Without dropout (inference, p = 0) there is no mask to confuse, and a gradcheck without "
    "rng passes. So does a single use.",
    right="The mask belongs to the call: return it in ctx. Then one instance may be used anywhere; "
    "check with gradcheck(..., rng=seed).",
)
def one_dropout():
    wrong, right, x = ThreeTimes(RememberingDropout(0.5)), ThreeTimes(Dropout(0.5)), normal(B, T, d)

    def dx(layer, dy):
        _, ctx = layer.forward(x, np.random.default_rng(0))
        return layer.backward(ctx, dy), ctx

    dy = upstream(x)
    wrong_dx, _ = dx(wrong, dy)
    right_dx, ctx = dx(right, dy)
    masks = [of_dropout.keep for _, of_dropout in ctx]
    return {
        "other": float(np.mean([mask != masks[2] for mask in masks[:2]])),
        "error": float(np.linalg.norm(wrong_dx - right_dx) / np.linalg.norm(right_dx)),
        "caught": by_gradcheck(wrong, x, rng=0),
        "hidden": by_gradcheck(wrong, x),
        "hidden_single": by_gradcheck(RememberingDropout(0.5), x, rng=0),
        "mended": by_gradcheck(right, x, rng=0),
    }


# ----


class SplitByAccident(Layer):
    """y = x + linear(x)."""

    def __init__(self):
        self.linear = Linear(d, d, rng=0, **F64)

    def forward(self, x):
        y, ctx = self.linear.forward(x)
        return x + y, ctx

    def backward(self, ctx, dy):
        dx, *_ = self.linear.backward(ctx, dy)  # wrong: it returns one array, no tuple
        return dy + dx


class KeptWhole(SplitByAccident):
    def backward(self, ctx, dy):
        return dy + self.linear.backward(ctx, dy)


@pitfall(
    "One gradient unpacked as if it were a tuple",
    "field",
    SplitByAccident,
    effect="Python splits the array along its first axis, the batch: dx is item 0's gradient, and "
    "by broadcasting all {B} items get it. Items 1 and 2 are wrong by {error:.0%}; no shape is.",
    habit="B = 1",
    hides="At B = 1 item 0 is all there is, and dy + dx broadcasts to the right numbers.",
    right="backward returns one array for one argument and a tuple for several: unpack only what "
    "forward took several of; test at B > 1.",
)
def unpacked():
    wrong, right, x = SplitByAccident(), KeptWhole(), normal(B, T, d)
    dy = upstream(x)
    dx, true_dx = (layer.backward(layer.forward(x)[1], dy)[1:] for layer in (wrong, right))
    return {
        "B": B,
        "error": float(np.linalg.norm(dx - true_dx) / np.linalg.norm(true_dx)),
        "caught": by_gradcheck(wrong, x),
        "blind": by_shape(wrong.backward(wrong.forward(x)[1], dy), x),
        "hidden": by_gradcheck(wrong, x[:1]),
        "mended": by_gradcheck(right, x),
    }


# --- Embedding, output and loss -----------------------------------------------------------------


class RepeatsLost(Embedding):
    def backward(self, ctx, dy):
        self.W.grad[ctx.ids] += dy  # wrong: of an id that comes twice, one row counts
        return ()


@pitfall(
    "dW[ids] += dy",
    "field",
    RepeatsLost,
    effect="NumPy reads all rows, adds, and writes them back, one over the other. For ids "
    "[[1,1,3],[1,0,1]] and dy = 1 .. 12, row 1 of dW is {wrong} in place of {right}: of its four "
    "uses, the last.",
    habit="distinct ids",
    hides="np.arange(V) as ids has no repeats.",
    right="np.add.at(dW, ids, dy), or one_hot(ids).T @ dy; test with ids that repeat.",
)
def repeats_lost():
    ids, dy = np.array([[1, 1, 3], [1, 0, 1]]), np.arange(1.0, 13.0).reshape(2, 3, 2)

    def row_1(layer_class):
        layer = layer_class(4, 2, **F64)
        layer.backward(layer.forward(ids)[1], dy)
        return layer.W.grad[1]

    return {
        "wrong": row_1(RepeatsLost),
        "right": row_1(Embedding),
        "caught": by_gradcheck(RepeatsLost(4, 2, rng=0, **F64), ids),
        "hidden": by_gradcheck(RepeatsLost(4, 2, rng=0, **F64), np.arange(4)),
        "mended": by_gradcheck(Embedding(4, 2, rng=0, **F64), ids),
    }


# ----


class HeadForgotten(Layer):
    """logits = W[ids] @ W.T: one table W, used twice."""

    def __init__(self, vocab_size, d_model):
        self.embedding = Embedding(vocab_size, d_model, rng=0, **F64)

    def forward(self, ids):
        x, ctx = self.embedding.forward(ids)
        return x @ self.embedding.W.value.T, (ctx, x)

    def backward(self, ctx, dlogits):
        dx = dlogits @ self.embedding.W.value
        return self.embedding.backward(ctx[0], dx)  # wrong: W is used in logits too


class HeadKept(HeadForgotten):
    def backward(self, ctx, dlogits):
        self.embedding.W.grad += dlogits.T @ ctx[1]
        return super().backward(ctx, dlogits)


@pitfall(
    "The tied output's gradient dropped",
    "field",
    HeadForgotten,
    effect="W has two uses and gets the gradient of one: for ids 0 1, targets 1 2, row 2 of dW is "
    "{wrong} in place of {right}: a word that is only a target gets no gradient at all.",
    habit="the loss falls",
    hides="It falls from {start:.2f} to {end:.2f} in 50 updates of a table of 9 words, each of "
    "them an input too: half a gradient may still point downhill.",
    right="W.grad += dlogits.T @ x beside the embedding's own += . npdecoder: Unembedding.",
)
def head_forgotten():
    criterion = CrossEntropy()

    def step(layer, ids, targets, lr):
        layer.zero_grad()
        logits, ctx = layer.forward(ids)
        loss, loss_ctx = criterion.forward(logits, targets)
        layer.backward(ctx, criterion.backward(loss_ctx))
        layer.embedding.W.value -= lr * layer.embedding.W.grad
        return float(loss)

    def made(layer_class):
        layer = layer_class(3, 2)
        layer.embedding.W.value = np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
        step(layer, ids, np.array([1, 2]), lr=0.0)
        return layer

    ids, words = np.array([0, 1]), np.arange(9)
    wrong, right, trained = made(HeadForgotten), made(HeadKept), HeadForgotten(9, 6)
    start, end = losses(lambda: step(trained, words, np.roll(words, 1), lr=0.5), 50)
    return {
        "wrong": wrong.embedding.W.grad[2],
        "right": right.embedding.W.grad[2],
        "start": start,
        "end": end,
        "caught": by_gradcheck(wrong, ids),
        "hidden": by_property(f"the loss falls ({start:.2f} to {end:.2f})", end < start - 0.5),
        "mended": by_gradcheck(right, ids),
    }


# ----


class OffByT(CrossEntropy):
    def backward(self, ctx, dloss=1.0):
        p = np.exp(ctx.log_p)  # (B, T, V)
        onehot = ctx.targets[..., None] == np.arange(p.shape[-1])
        return dloss * (p - onehot) / len(p)  # wrong: forward is the mean over B * T targets


@pitfall(
    "Cross-entropy off by a factor T",
    "field",
    OffByT,
    effect="The gradient is {ratio:.0f} times that of the loss that is printed, at T = {T}: the "
    "learning rate is in truth T times what it says, and changes with the length of the batch.",
    habit="T = 1",
    hides="One target an item: the mean over B is the mean over B * T.",
    right="Divide the gradient by what the loss was divided by, N counted targets.",
)
def off_by_t():
    logits, targets = normal(B, T, 7), np.random.default_rng(0).integers(0, 7, (B, T))
    wrong, right = OffByT(), CrossEntropy()
    _, ctx = right.forward(logits, targets)
    return {
        "T": T,
        "ratio": size_ratio(wrong.backward(ctx), right.backward(ctx)),
        "caught": by_gradcheck(wrong, logits, targets),
        "hidden": by_gradcheck(wrong, logits[:, :1], targets[:, :1]),
        "mended": by_gradcheck(right, logits, targets),
    }


# ----


class MeanOverPadding(CrossEntropy):
    def forward(self, logits, targets):
        loss, ctx = super().forward(logits, targets)
        N = ctx.targets.size  # wrong: ctx.count, without the ignored
        return loss * ctx.count / N, ctx._replace(count=N)


@pitfall(
    "The mean over ignored targets",
    "field",
    MeanOverPadding,
    effect="The same sentence, padded from 2 to 5 tokens, has loss {padded:.3f} instead of "
    "{alone:.3f}: a sentence counts less the longer its neighbours are.",
    habit="no padding",
    hides="Without ignored targets N is the count. With them gradcheck still passes: forward and "
    "backward divide by the same wrong N.",
    right="N counts the targets that are not ignored; padding must not change the loss.",
)
def mean_over_padding():
    logits, targets = normal(1, 5, 7), np.array([[3, 1, -1, -1, -1]])
    wrong, right = MeanOverPadding(-1), CrossEntropy(-1)

    def loss(criterion, length):
        return float(criterion.forward(logits[:, :length], targets[:, :length])[0])

    def check(criterion):
        return by_equality("padding leaves the loss as it was", loss(criterion, 5),
                           loss(criterion, 2))

    return {
        "padded": loss(wrong, 5),
        "alone": loss(wrong, 2),
        "caught": check(wrong),
        "blind": by_gradcheck(wrong, logits, targets),
        "hidden": by_equality("equal to CrossEntropy without padding", loss(wrong, 2),
                              loss(right, 2)),
        "mended": check(right),
    }


# --- Optimizers ---------------------------------------------------------------------------------


class OneByOne:
    def __init__(self, layers, lr):
        self.parameters = [p for layer in layers for p in layer.parameters()]  # wrong if tied
        self.lr = lr

    def step(self):
        for p in self.parameters:
            p.value -= self.lr * p.grad


@pitfall(
    "A tied parameter updated twice",
    "field",
    OneByOne,
    effect="The table that embedding and output share is in the list twice. Value 1, gradient 1, "
    "learning rate 0.1: after one update it is {wrong:.1f} instead of {right:.1f}. The table "
    "learns at twice the rate of all else.",
    habit="untied weights",
    hides="Without sharing, every parameter is in the list once.",
    right="Go by identity: {{id(p): p for p in parameters}}.values(). npdecoder's optimizers do.",
)
def updated_twice():
    def after(optimizer_class, tied):
        embedding = Embedding(3, 2, **F64)
        layers = [embedding, Unembedding(embedding) if tied else Linear(2, 3, **F64)]
        for layer in layers:
            for p in layer.parameters():
                p.value, p.grad = np.ones(p.shape), np.ones(p.shape)
        optimizer_class(layers, lr=0.1).step()
        return float(embedding.W.value[0, 0])

    def sgd(layers, lr):
        return SGD([p for layer in layers for p in layer.parameters()], lr)

    def check(optimizer_class, tied):
        return by_equality("value - lr * grad after one update", after(optimizer_class, tied), 0.9)

    return {
        "wrong": after(OneByOne, True),
        "right": after(sgd, True),
        "caught": check(OneByOne, True),
        "hidden": check(OneByOne, False),
        "mended": check(sgd, True),
    }


# ----


def update_by_name(values, grads, lr):
    for name in values:
        if name in grads:  # wrong: a name without a gradient is skipped in silence
            values[name] -= lr * grads[name]


@pitfall(
    "An optimizer whose names do not match",
    "field",
    update_by_name,
    effect="The weights are called decoder.layers.0..., the gradients decoder.layer0...: "
    "{moved} of {total} parameters move, none of them in a layer: the rest stays random.",
    habit="the loss falls",
    hides="It falls from {start:.2f} to {end:.2f} in 30 updates, by the embedding and the output "
    "alone.",
    right="Keep value and gradient in one object (Parameter), or demand equal key sets; test that "
    "every parameter with a gradient moves.",
)
def names_that_differ():
    ids = np.random.default_rng(0).integers(0, 4, (B, T))
    targets = np.roll(ids, -1, axis=1)
    criterion = CrossEntropy()

    def fresh():
        return LanguageModel(
            LanguageModelConfig(9, d_model=d, num_heads=h, num_layers=2, d_ff=11), 0, **F64
        )

    def by_name(model):
        values = {name: p.value for name, p in model.named_parameters()}
        grads = {name.replace("layers.", "layer"): p.grad for name, p in model.named_parameters()}
        update_by_name(values, grads, 0.5)

    def by_parameter(model):
        SGD(model.parameters(), 0.5).step()

    def step(model, update):
        def run():
            model.zero_grad()
            logits, ctx = model.forward(ids)
            loss, loss_ctx = criterion.forward(logits, targets)
            model.backward(ctx, criterion.backward(loss_ctx))
            update(model)
            return float(loss)

        return run

    def moved(update):
        model = fresh()
        before = model.state_dict()
        step(model, update)()
        after = model.state_dict()
        with_gradient = [n for n, p in model.named_parameters() if np.abs(p.grad).max() > 1e-12]
        return [n for n in with_gradient if not np.array_equal(before[n], after[n])], with_gradient

    def check(update):
        movers, with_gradient = moved(update)
        return by_property(f"all {len(with_gradient)} parameters with a gradient move "
                           f"({len(movers)} do)", movers == with_gradient)

    start, end = losses(step(fresh(), by_name), 30)
    movers, with_gradient = moved(by_name)
    return {
        "moved": len(movers),
        "total": len(with_gradient),
        "in_layers": sum("layers" in name for name in movers),
        "start": start,
        "end": end,
        "caught": check(by_name),
        "hidden": by_property(f"the loss falls ({start:.2f} to {end:.2f})", end < start - 0.5),
        "mended": check(by_parameter),
    }


# --- Printing -----------------------------------------------------------------------------------


def numbers(a: Any) -> str:
    """An array as [1, 1.5] or [[1, 2], [3, 4]], with four digits."""
    if np.ndim(a) == 0:
        return f"{float(a):.4g}"
    return "[" + ", ".join(numbers(item) for item in a) + "]"


def filled(text: str, facts: dict[str, Any]) -> str:
    shown = {name: numbers(f) if isinstance(f, np.ndarray) else f for name, f in facts.items()}
    return text.format(**shown)


def code(pieces: Sequence[Any]) -> str:
    return "\n\n".join(inspect.getsource(piece).rstrip() for piece in pieces)


def paragraph(label: str, text: str) -> str:
    """Text beside a label; lines of a check's output are kept as they are."""
    lines = text.splitlines()
    if len(lines) == 1:
        lines = textwrap.wrap(text, WIDTH - 13, break_on_hyphens=False)
    first, *rest = lines
    return "\n".join([f"    {label:8} {first}", *(" " * 13 + line for line in rest)])


def report(number: int, facts: dict[str, Any] | None = None) -> str:
    """What is printed of pitfall number 1, 2, ..."""
    p = PITFALLS[number - 1]
    facts = p.run() if facts is None else facts
    head = f"{number}. {p.title}"
    parts = [head, "-" * len(head), textwrap.indent(code(p.wrong), "    | ", lambda line: True)]
    parts += ["", paragraph("found in", p.where), paragraph("effect", filled(p.effect, facts))]
    for name, label in (("caught", "seen by"), ("also", "and by"), ("blind", "not by")):
        if name in facts:
            parts.append(paragraph(label, facts[name].output))
    parts.append(paragraph("hidden", f"by the habit: {p.habit}. {filled(p.hides, facts)}"))
    hidden = [check for name, check in facts.items() if name.startswith("hidden")]
    parts += [paragraph("", check.output) for check in hidden]
    parts.append(paragraph("right", filled(p.right, facts)))
    parts.append(paragraph("", facts["mended"].output))
    return "\n".join(line.rstrip() for line in parts)


def contents() -> str:
    return "\n".join(f"{i:4}. {p.title}" for i, p in enumerate(PITFALLS, 1))


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Which habit hides which pitfall, and what gradcheck can and cannot see."""
    habits: dict[str, list[int]] = {}
    for number, p in enumerate(PITFALLS, 1):
        for habit in p.habit.split("; "):
            habits.setdefault(habit, []).append(number)
    seen = [i for i, facts in enumerate(results, 1) if gradcheck_sees(facts)]
    unseen = [i for i in range(1, len(results) + 1) if i not in seen]
    lines = ["What hides what", "---------------"]
    lines += [f"    {habit:28} {', '.join(map(str, hidden))}" for habit, hidden in habits.items()]
    text = (
        f"gradcheck sees {len(seen)} of {len(results)}: {', '.join(map(str, seen))}. It cannot see "
        f"the others, {', '.join(map(str, unseen))}: their derivative is right, or there is none, "
        "and the function is wrong. Tests of causality, of items one by one, of padding, of "
        "counts, and a definition written out find those."
    )
    return "\n".join([*lines, "", *textwrap.wrap(text, WIDTH, break_on_hyphens=False)])


def gradcheck_sees(facts: dict[str, Any]) -> bool:
    """Whether a failing gradcheck is among its checks (its output then shows gradcheck's table)."""
    checks = [facts[name] for name in ("caught", "also") if name in facts]
    return any(c.output.startswith(("gradcheck", "tensor")) and not c.ok for c in checks)


INTRODUCTION = f"""\
{{count}} mistakes of hand-written Transformers: the wrong code, what it does to the numbers, the
check that sees it (run now, its output printed), a habit of testing that hides it, the right way.
x is (B, T, d) with B = {B}, T = {T}, S = {S}, d = {d}, h = {h} heads unless said otherwise.
gradcheck compares backward with differences of forward, and prints the tensor that is worst,
where in it, and how many of the tensors failed.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Mistakes that hand-written Transformers make, each planted, measured and "
        "caught. Without a number: all of them.",
        epilog="Example: python examples/pitfalls.py 7",
    )
    parser.add_argument(
        "number", nargs="*", type=int, help=f"which to show, 1 to {len(PITFALLS)} (see --list)"
    )
    parser.add_argument("--list", action="store_true", help="print the table of contents only")
    args = parser.parse_args(argv)
    for number in args.number:
        if not 1 <= number <= len(PITFALLS):
            parser.error(f"there is no number {number}, only 1 to {len(PITFALLS)}")

    if args.list:
        print(contents())
    elif args.number:
        print("\n\n".join(report(number) for number in args.number))
    else:
        print(INTRODUCTION.format(count=len(PITFALLS)))
        print(contents())
        results = []
        for number, p in enumerate(PITFALLS, 1):
            results.append(p.run())
            print(f"\n\n{report(number, results[-1])}", flush=True)
        print(f"\n\n{summary(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
