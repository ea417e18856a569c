"""The worked example: "I love you" -> "我 爱 你", every number of it.

A Transformer that is small enough for paper (d_model 4, 2 heads, d_ff 16, one layer each, Post-LN)
reads [2, 5, 3] and <s> 我 爱 = [1, 7, 4] and is to say 我 爱 你 = [7, 4, 6].

    python examples/worked_example.py                         all of it
    python examples/worked_example.py --part backward         one part: forward, backward or train
    python examples/worked_example.py --write-weights my.json
    python examples/worked_example.py --weights my.json       with your own numbers

The model runs once, forward and backward, by model.forward and model.backward. What is printed is
in the ctx that forward returns, or is what the layers of the model return when they are called
again on what is there. The file reads in the order of the page.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npdecoder import (
    SGD,
    CrossEntropy,
    FeedForward,
    LayerNorm,
    MultiHeadAttention,
    Parameter,
    Transformer,
    causal_mask,
    greedy_decode,
    log_softmax,
    softmax,
)
from npdecoder.blocks.multi_head_attention import merge_heads, split_heads
from npdecoder.console import left, prepare, right, shown, width
from npdecoder.traced import WORKED_EXAMPLE, worked_example_model

Array = NDArray[Any]

SOURCE, DECODER_INPUT, TARGETS = [[2, 5, 3]], [[1, 7, 4]], [[7, 4, 6]]
SOURCE_WORDS = {2: "I", 5: "love", 3: "you"}
TARGET_WORDS = {1: "<s>", 7: "我", 4: "爱", 6: "你"}
BOS, UNUSED = 1, 0  # the article has no end token: 0 stands for one, and no target is 0
DEFAULT_WEIGHTS = WORKED_EXAMPLE
PAGE = 100  # columns

# What the article prints for the positions 0, 1, 2, and for embedding + position
ARTICLE_POSITIONS = [[0.0, 1.0, 0.0, 1.0], [0.8, 0.5, 0.1, 1.0], [0.9, -0.4, 0.2, 1.0]]
ARTICLE_SUMS = [[0.1, 1.3, -0.2, 1.5], [1.6, 0.4, 0.5, 0.7], [0.7, 0.2, 0.3, 1.7]]


def make_model() -> Transformer:
    """The article's model (see npdecoder/traced.py), without its dropout of 0.1, which would make
    every run another one; float64, so that the fourth decimal is right.
    """
    return worked_example_model()


def words_of(ids: Sequence[int], words: Mapping[int, str]) -> list[str]:
    return [words.get(int(i), f"[{int(i)}]") for i in ids]


# The page


class Page:
    """Prints headings and matrices, and keeps every matrix under its full name.

    arrays: name -> array, such as "encoder.layers.0.self_attention.S"; a gradient has its d before
    the last piece, or before the parameter: "encoder.layers.0.self_attention.dW_q.W".
    """

    def __init__(self, decimals: int = 4, visible: bool = True) -> None:
        self.decimals = decimals
        self.visible = visible
        self.arrays: dict[str, Array] = {}
        self.path = ""

    def write(self, text: str = "") -> None:
        if self.visible:
            print(shown(text))

    def title(self, text: str) -> None:
        self.write("=" * PAGE)
        self.write(text)
        self.write("=" * PAGE)
        self.write()

    def step(self, number: int, text: str, path: str = "") -> None:
        """A numbered heading; path: the layer of the model that the step is about."""
        self.path = path
        self.write(f"{number:>2}  {text}" + (f"   [{path}]" if path else ""))
        self.write("-" * PAGE)

    def say(self, text: str) -> None:
        for line in textwrap.wrap(text, PAGE - 10):
            self.write(f"    {line}")
        self.write()

    def article(self, text: str) -> None:
        """A place where the article is wrong."""
        for line in textwrap.wrap(text, PAGE - 16):
            self.write(f"    ! {line}")
        self.write()

    def matrices(self, *blocks: tuple[Any, ...]) -> None:
        """Blocks (name, formula, array[, row labels[, column labels]]), as many a line as fit."""
        waiting = [self._block(*block) for block in blocks]
        while waiting:
            taken = [waiting.pop(0)]
            columns = _columns(taken[0])
            while waiting and columns + 4 + _columns(waiting[0]) <= PAGE - 4:
                columns += 4 + _columns(waiting[0])
                taken.append(waiting.pop(0))
            for line in _beside(taken):
                self.write(f"    {line}".rstrip())
            self.write()

    def _block(
        self,
        name: str,
        formula: str,
        array: Array,
        rows: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
    ) -> tuple[list[str], list[str]]:
        """The lines above the numbers, and those with them."""
        array = np.asarray(array)
        self.arrays[f"{self.path}.{name}"] = array
        title = f"{name} = {formula}" if formula else name
        body = array[0] if array.ndim > 2 else array  # the batch is one sentence
        heads = list(body) if body.ndim == 3 else [np.atleast_2d(body)]
        rows = list(rows) if rows is not None else [""] * heads[0].shape[0]
        # a matrix of 16 columns in two halves, one above the other
        wide = heads[0].shape[1] if heads[0].shape[1] <= 10 else 8
        top, lines = [f"{title}  {_shape(array)}"], []
        for start in range(0, heads[0].shape[1], wide):
            part = [self._cells(head[:, start : start + wide]) for head in heads]
            labels = None if columns is None else list(columns[start : start + wide])
            if labels is None and wide < heads[0].shape[1]:
                labels = [f"[{i}]" for i in range(start, start + wide)]
            header, numbers = _grid(part, rows, labels, len(heads) > 1)
            if start == 0:
                top += header
            lines += numbers if start == 0 else header + numbers
        return top, lines

    def _cells(self, matrix: Array) -> list[list[str]]:
        if matrix.dtype == bool:
            return [["True" if cell else "False" for cell in row] for row in matrix]
        # given numbers, such as weights, are shown as they were written; all others in full
        given = self.decimals > 2 and _few_decimals(matrix)
        decimals = 2 if given else self.decimals
        return [[_number(float(cell), decimals) for cell in row] for row in matrix]


def _few_decimals(matrix: Array) -> bool:
    return bool(np.isfinite(matrix).all() and (np.round(matrix, 2) == matrix).all())


def _number(x: float, decimals: int) -> str:
    """x as a person rounds it: a tie goes up, and zero has no sign."""
    text = f"{x + math.copysign(1e-14, x) * max(1.0, abs(x)):.{decimals}f}"
    return text if float(text) != 0.0 else text.lstrip("-")


def _shape(array: Array) -> str:
    return "(" + ", ".join(map(str, array.shape)) + ("," if array.ndim == 1 else "") + ")"


def _columns(block: tuple[list[str], list[str]]) -> int:
    return max(width(line) for lines in block for line in lines)


def _grid(
    parts: list[list[list[str]]], rows: list[str], labels: list[str] | None, heads: bool
) -> tuple[list[str], list[str]]:
    """Header and lines of one matrix, or of several side by side: the heads of an attention."""
    rows = [shown(row) for row in rows]
    labels = None if labels is None else [shown(label) for label in labels]
    first = max(map(width, rows))
    cell = max([width(c) for part in parts for row in part for c in row]
               + [width(label) for label in labels or []])
    inner = (cell + 2) * len(parts[0][0]) - 2
    margin = " " * (first + 2 * (first > 0))
    header = []
    if heads:
        names = [left(f"head {i + 1}", inner) for i in range(len(parts))]
        header.append(margin + " | ".join(names).rstrip())
    if labels is not None:
        texts = ["  ".join(right(label, cell) for label in labels) for _ in parts]
        header.append(margin + " | ".join(texts))
    lines = []
    for i, row in enumerate(rows):
        texts = ["  ".join(right(c, cell) for c in part[i]) for part in parts]
        lines.append(left(row, len(margin)) + " | ".join(texts))
    return header, lines


def _beside(blocks: list[tuple[list[str], list[str]]]) -> list[str]:
    """Blocks side by side, titles in one line, first rows of numbers in one line."""
    widths = [_columns(block) for block in blocks]
    above = max(len(top) for top, _ in blocks)
    below = max(len(lines) for _, lines in blocks)
    padded = [
        [top[0], *[""] * (above - len(top)), *top[1:], *lines, *[""] * (below - len(lines))]
        for top, lines in blocks
    ]
    return [
        "    ".join(left(line, n) for line, n in zip(lines, widths)) for lines in zip(*padded)
    ]


# Forward: the steps 1 to 13, read from ctx


def forward_part(page: Page, model: Transformer, ctx: Any, logits: Array, loss: float) -> None:
    source, target = words_of(SOURCE[0], SOURCE_WORDS), words_of(DECODER_INPUT[0], TARGET_WORDS)
    encoder, decoder = model.encoder.layers[0], model.decoder.layers[0]
    enc, dec = ctx.encode.encoder.layers[0], ctx.decode.decoder.layers[0]

    page.title("FORWARD")
    page.say("A row is a token. Shapes are (batch, tokens, width), or with heads (batch, heads, "
             "tokens, width), and the batch is one sentence. The weights are given, with as few "
             "decimals as they have; all others are computed. In [brackets] stands the layer's "
             "name: with it before theirs, its weights are named in the file of --weights.")

    page.step(1, "Source embedding and positions", "source_embedding")
    embed_forward(page, model.source_embedding, model.source_positions, SOURCE, "x", source)
    page.article(
        "The article prints 0.1 and 0.2 as the third number of positions 1 and 2. It is "
        "sin(pos / 100): sin(0.01) = 0.0100, sin(0.02) = 0.0200. So its sums are off there too: "
        "0.5 for love and 0.3 for you, where the embeddings that it prints give 0.4100 and 0.1200. "
        "Its other numbers are right, to the one decimal that it prints:"
    )
    page.matrices(
        ("wrong P", "as the article prints it", np.array(ARTICLE_POSITIONS), source),
        ("wrong x", "as the article prints it", np.array(ARTICLE_SUMS), source),
    )

    path = "encoder.layers.0"
    page.step(2, "Encoder: self-attention, all words visible", f"{path}.self_attention")
    attention_forward(page, encoder.self_attention, enc.self_attention, "x", "x", source, source)
    sequence_first(page, encoder.self_attention, enc.self_attention)
    page.step(3, "Encoder: add and norm", f"{path}.norm1")
    x, s = enc.self_attention.attend.W_q.x, enc.self_attention.attend.W_o.x
    norm_forward(page, encoder.norm1, enc.leave1.norm, x + encoder.self_attention.W_o(s),
                 ("r1", "x + s1", "x1"), source)
    page.step(4, "Encoder: feed-forward, each word by itself", f"{path}.feed_forward")
    feed_forward_forward(page, encoder.feed_forward, enc.feed_forward, ("x1", "s2"), source)
    page.step(5, "Encoder: add and norm; the result is the memory", f"{path}.norm2")
    x, s = enc.feed_forward.linear1.x, enc.feed_forward.linear2.x
    norm_forward(page, encoder.norm2, enc.leave2.norm, x + encoder.feed_forward.linear2(s),
                 ("r2", "x1 + s2", "memory"), source)

    page.step(6, "Target embedding and positions", "target_embedding")
    embed_forward(page, model.target_embedding, model.target_positions, DECODER_INPUT, "y", target)
    page.say("Teacher forcing: the decoder is given the target, shifted right by one. It is to say "
             "我 where it sees <s>, 爱 where it sees <s> 我, 你 where it sees <s> 我 爱.")
    page.article(
        "爱 has the id 7 in one place of the article, and 4 in its sentence [1, 7, 4], where 7 is "
        "我. Two words cannot share a row of the table: here 我 = 7 and 爱 = 4."
    )

    path = "decoder.layers.0"
    page.step(7, "Decoder: masked self-attention, nobody sees the future", f"{path}.self_attention")
    attention_forward(page, decoder.self_attention, dec.self_attention, "y", "y", target, target,
                      causal_mask(3))
    inverted_mask(page, dec.self_attention, target)
    page.step(8, "Decoder: add and norm", f"{path}.norm1")
    x, s = dec.self_attention.attend.W_q.x, dec.self_attention.attend.W_o.x
    norm_forward(page, decoder.norm1, dec.leave1.norm, x + decoder.self_attention.W_o(s),
                 ("r1", "y + s1", "y1"), target)
    page.step(9, "Decoder: cross-attention, the target asks the source", f"{path}.cross_attention")
    attention_forward(page, decoder.cross_attention, dec.cross.attention, "y1", "memory",
                      target, source)
    page.step(10, "Decoder: add and norm", f"{path}.norm2")
    x, s = dec.cross.attention.attend.W_q.x, dec.cross.attention.attend.W_o.x
    norm_forward(page, decoder.norm2, dec.cross.leave.norm, x + decoder.cross_attention.W_o(s),
                 ("r2", "y1 + s2", "y2"), target)
    page.step(11, "Decoder: feed-forward", f"{path}.feed_forward")
    feed_forward_forward(page, decoder.feed_forward, dec.feed_forward, ("y2", "s3"), target)
    page.step(12, "Decoder: add and norm", f"{path}.norm3")
    x, s = dec.feed_forward.linear1.x, dec.feed_forward.linear2.x
    norm_forward(page, decoder.norm3, dec.leave_last.norm, x + decoder.feed_forward.linear2(s),
                 ("r3", "y2 + s3", "y3"), target)

    vocabulary = words_of(range(10), TARGET_WORDS)
    page.step(13, "Output: one logit a word of the vocabulary", "output")
    weights(page, {"W": model.output.W, "b": model.output.b}, columns=vocabulary)
    page.matrices(("logits", "y3 W + b", logits, target, vocabulary))
    page.step(14, "Probabilities and loss", "loss")
    p, targets = softmax(logits), np.array(TARGETS)
    picked = np.take_along_axis(log_softmax(logits), targets[..., None], axis=-1)
    page.matrices(("p", "softmax(logits)", p, target, vocabulary))
    page.matrices(("log p", "of the right word", picked,
                   [f"{a} -> {b}" for a, b in zip(target, words_of(TARGETS[0], TARGET_WORDS))]))
    page.article("The article gives 你 no id, and so no target for the third place: 6 is ours.")
    page.arrays["loss"] = np.array(loss)
    page.write(f"    loss = -mean(log p) = {loss:.{page.decimals}f}    (even odds would give "
               f"ln 10 = {math.log(10):.{page.decimals}f})")
    said = words_of(logits[0].argmax(axis=-1), TARGET_WORDS)
    page.write(f"    the most probable words: {' '.join(said)}")
    page.write()


def embed_forward(
    page: Page, embedding: Any, positions: Any, ids: list[list[int]], letter: str, tokens: list[str]
) -> None:
    E = embedding(ids)
    page.say(f"ids {ids} = {' '.join(tokens)}. Each takes its row of the table W "
             f"{_shape(embedding.W.value)}, and its position adds a row of sines and cosines.")
    page.matrices(
        ("E", "W[ids]", E, [f"{token} = {i}" for token, i in zip(tokens, ids[0])]),
        ("P", "sin, cos of pos and of pos / 100", positions.P[:3], ["pos 0", "pos 1", "pos 2"]),
        (letter, "E + P", positions(E), tokens),
    )


def weights(
    page: Page, parameters: Mapping[str, Parameter | None], columns: Sequence[str] | None = None
) -> None:
    page.matrices(*((name, "", p.value, None, columns) for name, p in parameters.items() if p))


def attention_forward(
    page: Page,
    attention: MultiHeadAttention,
    ctx: Any,
    query: str,
    memory: str,
    rows: list[str],
    columns: list[str],
    mask: Array | None = None,
) -> None:
    """query and memory: the names of what asks and of what is asked; ctx: what forward returned."""
    inner = ctx.attend.attention
    Q, K, V, A = inner.q, inner.k, inner.v, inner.A
    d_k = Q.shape[-1]
    output = {"x": "s1", "y": "s1", "y1": "s2"}[query]

    linears = {n: getattr(attention, n) for n in ("W_q", "W_k", "W_v", "W_o")}
    weights(page, {f"{n}.W": linear.W for n, linear in linears.items()})
    weights(page, {f"{n}.b": linear.b for n, linear in linears.items()})
    page.matrices(
        ("Q", f"split({query} W_q + b)", Q, rows),
        ("K", f"split({memory} W_k + b)", K, columns),
        ("V", f"split({memory} W_v + b)", V, columns),
    )
    S = Q @ K.swapaxes(-1, -2) / math.sqrt(d_k)
    page.matrices(("S", f"Q K^T / sqrt({d_k})", S, rows, columns))
    if mask is not None:
        S_masked = np.where(mask, S, -np.inf)
        page.matrices(("mask", "True: may attend", mask, rows, columns))
        page.matrices(("S_masked", "S, -inf where not", S_masked, rows, columns))
    page.matrices(
        ("A", "softmax(S_masked)" if mask is not None else "softmax(S)", A, rows, columns),
        ("context", "A V", A @ V, rows),
        ("merged", "heads side by side", ctx.attend.W_o.x, rows),
        (output, "merged W_o + b", attention.W_o(ctx.attend.W_o.x), rows),
    )


def norm_forward(
    page: Page, norm: LayerNorm, ctx: Any, r: Array, names: tuple[str, str, str], rows: list[str]
) -> None:
    name, formula, y = names
    mean, var = r.mean(axis=-1, keepdims=True), r.var(axis=-1, keepdims=True)
    beta = np.zeros_like(norm.gamma.value) if norm.beta is None else norm.beta.value
    page.matrices((name, formula, r, rows), ("mean", "", mean), ("var", "", var))
    page.matrices(("rstd", "1 / sqrt(var + 1e-5)", ctx.rstd),
                  ("x_hat", f"({name} - mean) rstd", ctx.x_hat, rows))
    page.matrices(("gamma", "", norm.gamma.value), ("beta", "", beta),
                  (y, "gamma x_hat + beta", norm.gamma.value * ctx.x_hat + beta, rows))


def feed_forward_forward(
    page: Page, feed_forward: FeedForward, ctx: Any, names: tuple[str, str], rows: list[str]
) -> None:
    x, s = names
    first, second = feed_forward.linear1, feed_forward.linear2
    weights(page, {"linear1.W": first.W, "linear1.b": first.b})
    page.matrices(("hidden", f"{x} W + b of linear1", first(ctx.linear1.x), rows))
    page.matrices(("active", "max(hidden, 0)", ctx.linear2.x, rows))
    weights(page, {"linear2.W": second.W, "linear2.b": second.b})
    page.matrices((s, "active W + b of linear2", second(ctx.linear2.x), rows))


def sequence_first(page: Page, attention: MultiHeadAttention, ctx: Any) -> None:
    """What becomes of the article's (3, 1, 4)."""
    x = ctx.attend.W_q.x.swapaxes(0, 1)
    _, wrong = attention.forward(x, x, x)
    A = wrong.attend.attention.A
    page.article(
        f"The article's program turns its input to {_shape(x)}, length first, but its attention "
        "takes the batch first, as here: it would see three sentences of one word each. Called so, "
        f"this attention gives A of shape {_shape(A)}, with {np.count_nonzero(A == 1.0)} of "
        f"{A.size} weights exactly 1: no word sees another. Right is {_shape(ctx.attend.W_q.x)}."
    )


def inverted_mask(page: Page, ctx: Any, tokens: list[str]) -> None:
    """What becomes of the article's mask of 0 and -inf, of which its attention hides the 0."""
    q, k = ctx.attend.attention.q, ctx.attend.attention.k
    S = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    helper = np.where(causal_mask(3), 0.0, -np.inf)
    page.article(
        "The article's picture marks what may be seen by 1, its helper by 0 (and the future by "
        "-inf), and its attention hides what is == 0: that hides the past and shows the future. "
        "The weights would be these, of three equal ones in the last row, which sees nothing. (As "
        "it stands, its program does not come so far: with the length first, its mask (3, 3) "
        "spreads the scores (3, 2, 1, 1) to (3, 2, 3, 3), which fit its values no more, and it "
        "stops here.)"
    )
    page.matrices(("wrong A", "softmax(S, -1e9 where helper == 0)",
                   softmax(np.where(helper == 0, -1e9, S)), tokens, tokens))


# Backward: the same steps in reverse, by the layers' own backward


def backward_part(page: Page, model: Transformer, ctx: Any, loss_ctx: Any) -> None:
    """Adds every gradient to the parameters, as model.backward does."""
    source, target = words_of(SOURCE[0], SOURCE_WORDS), words_of(DECODER_INPUT[0], TARGET_WORDS)
    vocabulary = words_of(range(10), TARGET_WORDS)
    encoder, decoder = model.encoder.layers[0], model.decoder.layers[0]
    enc, dec = ctx.encode.encoder.layers[0], ctx.decode.decoder.layers[0]

    page.title("BACKWARD: the same steps from 14 to 1")
    page.say("dx is dloss/dx and has the shape of x. Where x went two ways, dx is the sum of both.")

    page.step(14, "Probabilities and loss", "loss")
    dlogits = CrossEntropy().backward(loss_ctx)
    page.matrices(("dlogits", "(p - onehot) / 3", dlogits, target, vocabulary))

    page.step(13, "Output", "output")
    dy3 = model.output.backward(ctx.decode.output, dlogits)
    page.matrices(("dW", "y3^T dlogits", model.output.W.grad, None, vocabulary))
    page.matrices(("db", "sum of dlogits", model.output.b.grad, None, vocabulary))
    page.matrices(("dy3", "dlogits W^T", dy3, target))

    path = "decoder.layers.0"
    page.step(12, "Decoder: add and norm", f"{path}.norm3")
    dr3 = norm_backward(page, decoder.norm3, dec.leave_last.norm, dy3, ("y3", "r3"), target)
    page.say("r3 = y2 + s3: dr3 goes both ways, to s3 as ds3 and past the feed-forward to y2.")
    page.step(11, "Decoder: feed-forward", f"{path}.feed_forward")
    dh = feed_forward_backward(page, decoder.feed_forward, dec.feed_forward, dr3, "s3", target)
    dy2 = dr3 + dh
    page.matrices(("dy2", "dr3 + dinput", dy2, target))
    page.step(10, "Decoder: add and norm", f"{path}.norm2")
    dr2 = norm_backward(page, decoder.norm2, dec.cross.leave.norm, dy2, ("y2", "r2"), target)
    page.step(9, "Decoder: cross-attention", f"{path}.cross_attention")
    dquery, dkey, dvalue = attention_backward(
        page, decoder.cross_attention, dec.cross.attention, dr2, "s2", target, source
    )
    dy1, dmemory = dr2 + dquery, dkey + dvalue
    page.matrices(("dy1", "dr2 + dquery", dy1, target),
                  ("dmemory", "dkey + dvalue", dmemory, source))
    page.say("dquery belongs to the decoder, dkey and dvalue to the memory: dmemory waits for "
             "step 5.")
    page.step(8, "Decoder: add and norm", f"{path}.norm1")
    dr1 = norm_backward(page, decoder.norm1, dec.leave1.norm, dy1, ("y1", "r1"), target)
    page.step(7, "Decoder: masked self-attention", f"{path}.self_attention")
    parts = attention_backward(
        page, decoder.self_attention, dec.self_attention, dr1, "s1", target, target
    )
    dy = dr1 + (parts[0] + parts[1] + parts[2])
    page.matrices(("dy", "dr1 + dquery + dkey + dvalue", dy, target))
    page.step(6, "Target embedding and positions", "target_embedding")
    embed_backward(page, model.target_embedding, ctx.decode.embed, dy, "y", TARGET_WORDS)

    path = "encoder.layers.0"
    page.step(5, "Encoder: add and norm, from dmemory on", f"{path}.norm2")
    dr2 = norm_backward(page, encoder.norm2, enc.leave2.norm, dmemory, ("memory", "r2"), source)
    page.step(4, "Encoder: feed-forward", f"{path}.feed_forward")
    dh = feed_forward_backward(page, encoder.feed_forward, enc.feed_forward, dr2, "s2", source)
    dx1 = dr2 + dh
    page.matrices(("dx1", "dr2 + dinput", dx1, source))
    page.step(3, "Encoder: add and norm", f"{path}.norm1")
    dr1 = norm_backward(page, encoder.norm1, enc.leave1.norm, dx1, ("x1", "r1"), source)
    page.step(2, "Encoder: self-attention", f"{path}.self_attention")
    parts = attention_backward(
        page, encoder.self_attention, enc.self_attention, dr1, "s1", source, source
    )
    dx = dr1 + (parts[0] + parts[1] + parts[2])
    page.matrices(("dx", "dr1 + dquery + dkey + dvalue", dx, source))
    page.step(1, "Source embedding and positions", "source_embedding")
    embed_backward(page, model.source_embedding, ctx.encode.embed, dx, "x", SOURCE_WORDS)


def norm_backward(
    page: Page, norm: LayerNorm, ctx: Any, dy: Array, names: tuple[str, str], rows: list[str]
) -> Array:
    y, r = names
    dr = norm.backward(ctx, dy)
    dx_hat = dy * norm.gamma.value
    page.matrices(("dgamma", f"sum of d{y} x_hat", norm.gamma.grad),
                  ("dbeta", f"sum of d{y}", norm.beta.grad))
    page.matrices(
        ("dx_hat", f"d{y} gamma", dx_hat, rows),
        ("m1", "mean(dx_hat)", dx_hat.mean(axis=-1, keepdims=True)),
    )
    page.matrices(
        ("m2", "mean(dx_hat x_hat)", np.mean(dx_hat * ctx.x_hat, axis=-1, keepdims=True)),
        (f"d{r}", "rstd (dx_hat - m1 - x_hat m2)", dr, rows),
    )
    return dr


def feed_forward_backward(
    page: Page, feed_forward: FeedForward, ctx: Any, ds: Array, s: str, rows: list[str]
) -> Array:
    first, second = feed_forward.linear1, feed_forward.linear2
    dactive = second.backward(ctx.linear2, ds)
    dhidden = feed_forward.activation.backward(ctx.activation, dactive)
    dinput = first.backward(ctx.linear1, dhidden)
    page.matrices((f"d{s}", f"dr{s[1:]}", ds, rows))
    page.matrices(("dlinear2.W", f"active^T d{s}", second.W.grad),
                  ("dlinear2.b", f"sum of d{s}", second.b.grad))
    page.matrices(("dactive", f"d{s} W^T of linear2", dactive, rows))
    page.matrices(("dhidden", "dactive where hidden > 0", dhidden, rows))
    page.matrices(("dlinear1.W", "input^T dhidden", first.W.grad))
    page.matrices(("dlinear1.b", "sum of dhidden", first.b.grad))
    page.matrices(("dinput", "dhidden W^T of linear1", dinput, rows))
    return dinput


def attention_backward(
    page: Page,
    attention: MultiHeadAttention,
    ctx: Any,
    ds: Array,
    s: str,
    rows: list[str],
    columns: list[str],
) -> tuple[Array, Array, Array]:
    """ds, the gradient of the attention's output -> dquery, dkey, dvalue."""
    inner, layer = ctx.attend.attention, attention.attention
    heads, root = attention.num_heads, f"sqrt({inner.q.shape[-1]})"
    dmerged = attention.W_o.backward(ctx.attend.W_o, ds)
    dcontext = split_heads(dmerged, heads)
    dA = dcontext @ inner.v.swapaxes(-1, -2)
    dS = layer.softmax.backward(inner.softmax, dA)
    dQ, dK, dV = layer.backward(inner, dcontext)
    dquery = attention.W_q.backward(ctx.attend.W_q, merge_heads(dQ))
    dvalue = attention.W_v.backward(ctx.project.W_v, merge_heads(dV))
    dkey = attention.W_k.backward(ctx.project.W_k, merge_heads(dK))

    page.matrices(
        (f"d{s}", f"dr{s[1:]}", ds, rows),
        ("dmerged", f"d{s} W_o^T", dmerged, rows),
        ("dcontext", "split(dmerged)", dcontext, rows),
        ("dV", "A^T dcontext", dV, columns),
        ("dA", "dcontext V^T", dA, rows, columns),
        ("dS", "A (dA - sum(dA A))", dS, rows, columns),
        ("dQ", f"dS K / {root}", dQ, rows),
        ("dK", f"dS^T Q / {root}", dK, columns),
    )
    page.matrices(
        ("dW_q.W", "query^T dQ", attention.W_q.W.grad),
        ("dW_k.W", "key^T dK", attention.W_k.W.grad),
        ("dW_v.W", "value^T dV", attention.W_v.W.grad),
        ("dW_o.W", f"merged^T d{s}", attention.W_o.W.grad),
        ("dW_q.b", "sum of dQ", attention.W_q.b.grad),
        ("dW_k.b", "sum of dK", attention.W_k.b.grad),
        ("dW_v.b", "sum of dV", attention.W_v.b.grad),
        ("dW_o.b", f"sum of d{s}", attention.W_o.b.grad),
    )
    if s == "s2":  # said once, at the first attention of the way back
        page.say("dW_k.b is zero, always: a bias of the keys adds the same number to all scores of "
                 "a query, and softmax does not see it. So, too, each row of dS sums to zero.")
    page.matrices(
        ("dquery", "dQ W_q^T", dquery, rows),
        ("dkey", "dK W_k^T", dkey, columns),
        ("dvalue", "dV W_v^T", dvalue, columns),
    )
    return dquery, dkey, dvalue


def embed_backward(
    page: Page, embedding: Any, ctx: Any, dx: Array, letter: str, words: Mapping[int, str]
) -> None:
    embedding.backward(ctx.embedding, dx)
    page.say(f"P is constant, so dE = d{letter}, and each row goes to the row of its id. The words "
             "that do not occur get nothing.")
    labels = [f"{i} {words.get(i, '')}" for i in range(len(embedding.W.grad))]
    page.matrices(("dW", f"the rows of d{letter}, by id", embedding.W.grad, labels))


# The proof that the page shows the model's own gradients


def gradients(model: Transformer) -> dict[str, Array]:
    return {name: parameter.grad.copy() for name, parameter in model.named_parameters()}


def compare(page: Page, by_steps: dict[str, Array], by_model: dict[str, Array]) -> None:
    """Errors: RuntimeError if a gradient of the page is not the one of model.backward."""
    worst = max(
        float(np.abs(by_steps[name] - g).max() / max(np.abs(g).max(), 1.0))
        for name, g in by_model.items()
    )
    count = sum(g.size for g in by_model.values())
    if not worst <= 1e-12:
        raise RuntimeError(f"the gradients shown differ from model.backward's by {worst}")
    page.write(f"    Compared with model.backward: {len(by_model)} parameters, {count} "
               f"numbers, largest difference {worst:.1e}.")
    page.write()


# Training


def train_part(page: Page, model: Transformer, lr: float, max_steps: int) -> int | None:
    """SGD until the three words are right; returns how many steps that took, or None."""
    criterion, optimizer = CrossEntropy(), SGD(model.parameters(), lr=lr)
    page.title(f"TRAIN: each weight moves by -{lr:g} times its gradient, until 我 爱 你 is right")
    right_words = TARGETS[0]
    names = words_of(right_words, TARGET_WORDS)
    rows = [["step", "loss", *(f"p({name})" for name in names), "forced", "greedy"]]
    found = None
    for step in range(max_steps + 1):
        model.zero_grad()
        logits, ctx = model.forward(SOURCE, DECODER_INPUT)
        loss, loss_ctx = criterion.forward(logits, TARGETS)
        if not math.isfinite(loss):
            break
        p = softmax(logits)[0, range(3), right_words]
        forced = [int(i) for i in logits[0].argmax(axis=-1)]
        said = greedy_decode(model, SOURCE, bos_id=BOS, eos_id=UNUSED, max_new_tokens=3)[0]
        done = forced == right_words and said == right_words
        if step <= 20 or step % 10 == 0 or done:
            rows.append([str(step), f"{loss:.{page.decimals}f}",
                         *(f"{x:.{page.decimals}f}" for x in p),
                         " ".join(words_of(forced, TARGET_WORDS)),
                         " ".join(words_of(said, TARGET_WORDS))])
        if done:
            found = step
            break
        model.backward(ctx, criterion.backward(loss_ctx))
        before = model.output.b.value.copy()
        optimizer.step()
        if step == 0:
            page.path = "output"
            columns = words_of(range(10), TARGET_WORDS)
            page.say("The first step, of one parameter, output.b:")
            page.matrices(
                ("b", "", before, None, columns),
                ("db", "", model.output.b.grad, None, columns),
                ("b_new", f"b - {lr:g} db", model.output.b.value, None, columns),
            )
    page.say("p(...) is the probability of the right word, given the right words before it. Under "
             "forced stand the most probable words then (teacher forcing); under greedy the "
             "model's own words, each fed back to it, from <s> on.")
    cells = [[shown(cell) for cell in row] for row in rows]
    columns = [max(map(width, column)) for column in zip(*cells)]
    sides = [right] * (len(columns) - 2) + [left, left]  # numbers, and words
    for row in cells:
        filled = [side(cell, n) for side, cell, n in zip(sides, row, columns)]
        page.write("    " + "   ".join(filled).rstrip())
    page.write()
    if found is None:
        page.write(f"    Not right after {step} steps, the loss is {loss:.4f}. "
                   "Try another --lr, or more --max-steps.")
    else:
        page.write(f"    After {found} steps both say {' '.join(names)}.")
    page.write()
    return found


# The file of weights


def read_weights(path: str | Path, model: Transformer) -> list[str]:
    """Set the parameters that the file names; returns their names.

    Errors: ValueError that says what is wrong with the file; OSError.
    """
    def no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} stands there twice")
        return dict(pairs)

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        entries = json.loads(text, object_pairs_hook=no_name_twice)
    except ValueError as error:  # also of JSON and of UTF-8
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: expected an object, {{parameter name: numbers}}")
    parameters, arrays, problems = dict(model.named_parameters()), {}, []
    for name, numbers in entries.items():
        if name not in parameters:
            problems.append(f"{name} is no parameter")
            continue
        try:
            arrays[name] = np.array(numbers, dtype=np.float64)
        except (TypeError, ValueError):
            problems.append(f"{name} is not a matrix of numbers with rows of one length")
            continue
        if arrays[name].shape != parameters[name].shape:
            problems.append(f"{name} has shape {_shape(arrays[name])}, "
                            f"expected {_shape(parameters[name].value)}")
        elif not (np.abs(arrays[name]) <= 1e6).all():  # nor NaN
            problems.append(f"{name} holds something that is no number up to a million")
    if problems:
        known = "\n  ".join(f"{name} {_shape(p.value)}" for name, p in parameters.items())
        raise ValueError(f"{path}: {'; '.join(problems)}.\nThe parameters are:\n  {known}")
    for name, array in arrays.items():
        parameters[name].value = array
    return list(arrays)


def write_weights(path: str | Path, model: Transformer) -> None:
    """The weights as JSON, one row a line, rounded to two decimals."""

    def line(row: Array) -> str:
        return "[" + ", ".join(json.dumps(round(float(x), 2) + 0.0) for x in row) + "]"

    entries = []
    for name, p in model.named_parameters():
        rows = [line(row) for row in np.atleast_2d(p.value)]
        matrix = "[\n    " + ",\n    ".join(rows) + "\n  ]" if p.value.ndim == 2 else rows[0]
        entries.append(f"  {json.dumps(name)}: {matrix}")
    with open(path, "x", encoding="utf-8") as file:  # never over weights that somebody has edited
        file.write("{\n" + ",\n".join(entries) + "\n}\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="A Transformer small enough for paper translates 'I love you': every number of "
        "its forward\npass, every gradient, and SGD until the three Chinese words are right.",
        epilog="""\
to compare with your own paper:
  1. --write-weights my.json      writes the weights, one matrix row a line, two decimals at most
  2. change in my.json what you like, and delete what you do not care about: a parameter that is
     not named keeps its value
  3. --weights my.json            prints the page of these numbers
A matrix W has a row for each input and a column for each output: y = x W + b.
The page is 100 columns wide: python examples/worked_example.py | less -S""",
    )
    parser.add_argument("--part", choices=["all", "forward", "backward", "train"], default="all",
                        help="what to print (default: all)")
    parser.add_argument("--weights", metavar="FILE", help="a JSON file of your own weights, of all "
                        "parameters or some")
    parser.add_argument("--write-weights", metavar="FILE", help="write the weights that the page "
                        "starts with, rounded to 2 decimals, and print nothing else")
    parser.add_argument("--decimals", type=int, choices=range(1, 13), default=4, metavar="N",
                        help="decimals of the computed numbers (default: 4)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument("--max-steps", type=int, default=1000, metavar="N",
                        help="stop training after so many steps (default: 1000)")
    options = parser.parse_args(arguments)
    if not 0.0 < options.lr < math.inf or options.max_steps < 0:
        parser.error("--lr must be above 0, and --max-steps not below")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    prepare(sys.stdout)
    prepare(sys.stderr)
    model = make_model()
    try:
        if options.weights is not None:
            changed = read_weights(options.weights, model)
        if options.write_weights is not None:
            write_weights(options.write_weights, model)
            print(shown(f"{len(model.parameters())} parameters in {options.write_weights}"))
            return 0
    except (OSError, ValueError) as error:
        print(shown(f"error: {error}"), file=sys.stderr)
        return 2

    def page(part: str) -> Page:
        return Page(options.decimals, visible=options.part in ("all", part))

    print(shown('THE WORKED EXAMPLE: "I love you" -> "我 爱 你"'))
    print("d_model 4, 2 heads of 2, d_ff 16, 1 + 1 layers, vocabulary 10, Post-LN, "
          f"{model.num_parameters()} numbers to train")
    if options.weights is not None:
        print(shown(f"{len(changed)} of {len(model.parameters())} parameters from "
                    f"{options.weights}"))
    print()

    logits, ctx = model.forward(SOURCE, DECODER_INPUT)
    loss, loss_ctx = CrossEntropy().forward(logits, TARGETS)
    forward_part(page("forward"), model, ctx, logits, loss)
    model.zero_grad()
    backward_page = page("backward")
    backward_part(backward_page, model, ctx, loss_ctx)
    by_steps = gradients(model)
    model.zero_grad()
    model.backward(ctx, CrossEntropy().backward(loss_ctx))
    compare(backward_page, by_steps, gradients(model))
    if options.part in ("all", "train"):
        train_part(page("train"), model, options.lr, options.max_steps)
    return 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # | less, which was left: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
