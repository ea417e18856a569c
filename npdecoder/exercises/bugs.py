"""Find the bug: a layer with one mistake, a training that succeeds all the same, and the key.

The mistakes were found in public NumPy Transformers. Each is a subclass of a layer of npdecoder
(planted.py); the same seed has the same bug and the same text.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from npdecoder.blocks import DecoderLayer, Residual
from npdecoder.core import Array, find_layers
from npdecoder.exercises import planted
from npdecoder.exercises.catalogue import randomise
from npdecoder.gradcheck import GradcheckReport, gradcheck
from npdecoder.layers import CrossEntropy, Dropout, Embedding
from npdecoder.models import LanguageModel, LanguageModelConfig
from npdecoder.optim import SGD

UPDATES, EVERY = 120, 15  # of the training, and between two lines of its curve
MODEL = LanguageModelConfig(8, d_model=16, num_heads=2, num_layers=1, max_len=12,
                            tie_embeddings="target_output", attention_dropout=0.0)  # fmt: skip
BAR = 24  # characters of the curve's longest bar
IGNORED = -1
WIDTH = 96

Checked = tuple[Any, tuple[Array, ...], dict[str, Any]]  # a layer, its inputs, its keywords


class Bug(NamedTuple):
    """right, wrong: the layer and its copy with the mistake. shown: the methods to read.

    case: an input for a gradcheck, and a layer for it, of the class given or with it as a part.
    key: what is wrong; others: what might be. derivation: the line that tells. use: how the layer
    is used, where that matters. lr: of the training.
    """

    right: Any
    wrong: Any
    shown: tuple[str, ...]
    case: Callable[[Any, np.random.Generator], Checked]
    key: str
    derivation: str
    others: tuple[str, ...]
    use: str = ""
    lr: float = 0.05


class Puzzle(NamedTuple):
    seed: int
    bug: Bug
    candidates: dict[str, str]  # by letter
    key: str  # the letter


def puzzle(seed: int) -> Puzzle:
    """The bug of this seed, and its candidates in an order of their own."""
    bug = BUGS[seed % len(BUGS)]
    rng = np.random.default_rng([seed, 7])
    order = rng.permutation([bug.key, *bug.others])
    candidates = dict(zip("ABCDEFGH", map(str, order)))
    key = next(letter for letter, text in candidates.items() if text == bug.key)
    return Puzzle(seed, bug, candidates, key)


def show(puzzle: Puzzle) -> str:
    """What the reader gets to see: the code, the training, gradcheck without hints, the choice."""
    bug = puzzle.bug
    name = bug.right.__name__
    what = "forward and backward" if len(bug.shown) > 1 else "backward"
    parts = [
        textwrap.fill(
            f"Somebody's {name}. All is as in {_file(bug)} (but for the checks of arguments); only "
            f"in {what} there is one mistake:", WIDTH,
        ),
        textwrap.indent(source(bug), "    | ", lambda line: True),
        *([textwrap.fill(bug.use, WIDTH)] if bug.use else []),
        "A language model with it learns to repeat what it read three characters before; beside "
        "it the\nsame model, data and seed with the right layer. The loss after so many updates:",
        chart(*(training(bug, layer) for layer in (bug.wrong, bug.right))),
        "gradcheck, with random weights:",
        textwrap.indent(str(report(bug, bug.wrong)), "    "),
        "What is the mistake?",
        "\n".join(
            textwrap.fill(text, WIDTH, initial_indent=f"    {letter}. ", subsequent_indent=" " * 7)
            for letter, text in puzzle.candidates.items()
        ),
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in part.split("\n")) for part in parts)


def answer(puzzle: Puzzle) -> str:
    bug = puzzle.bug
    key = textwrap.fill(f"{puzzle.key}. {bug.key}", WIDTH, subsequent_indent="   ")
    lines = textwrap.indent(textwrap.dedent(bug.derivation).strip("\n"), "    ")
    return f"{key}\n\n{lines}\n\nThe right code: {_file(bug)}, class {bug.right.__name__}"


def _file(bug: Bug) -> str:
    return f"{bug.right.__module__.replace('.', '/')}.py"


def source(bug: Bug) -> str:
    """The methods with the mistake, as they stand in planted.py."""
    methods = [inspect.getsource(getattr(bug.wrong, name)) for name in bug.shown]
    return "\n".join(textwrap.dedent(method) for method in methods).rstrip()


# The symptoms


def report(bug: Bug, layer: Any) -> GradcheckReport:
    """gradcheck of one of the two layers, under the right one's name, and without hints."""
    checked, inputs, keywords = bug.case(layer, np.random.default_rng(5))
    found = gradcheck(checked, *inputs, **keywords)
    title = found.title.replace(bug.wrong.__name__, bug.right.__name__)
    return GradcheckReport(title, found.rows)


def training(bug: Bug, layer: Any) -> list[float]:
    """The losses of a small training with one of the two layers."""
    config = replace(MODEL, dropout=0.2 if bug.right is Dropout else 0.0)
    model = LanguageModel(config, 0, dtype=np.float64)
    criterion = (layer if bug.right is CrossEntropy else CrossEntropy)(IGNORED)
    plant(model, bug.right, layer)
    optimizer = SGD(model.parameters(), lr=bug.lr, momentum=0.9)
    rng = np.random.default_rng(1)
    text = np.tile(rng.integers(0, 8, (16, 3)), 4)
    ids, targets = text[:, :-1], text[:, 1:].copy()
    targets[:, :2] = IGNORED  # before the first repetition nothing can be known
    losses = []
    for update in range(UPDATES + 1):
        if update % EVERY == 0:
            losses.append(float(criterion.forward(model(ids), targets)[0]))
        model.zero_grad()
        logits, ctx = model.forward(ids, rng=rng)
        _, loss_ctx = criterion.forward(logits, targets)
        model.backward(ctx, criterion.backward(loss_ctx))
        optimizer.step()
    return losses


def plant(model: Any, right: Any, layer: Any) -> None:
    """Make every part of the class `right` in a model one of the class `layer`."""
    if right is Dropout:
        _one_dropout(model, layer)
        return
    for _, part in find_layers(model):
        if type(part) is right:
            part.__class__ = layer  # it has the same attributes, and other methods


def _one_dropout(model: Any, layer: Any) -> None:
    """One instance for all residual paths (as is right if the mask is in ctx)."""
    paths = [part for _, part in find_layers(model) if isinstance(part, Residual)]
    one = layer(paths[0].dropout.p)
    for path in paths:
        path.dropout = one


def chart(wrong: list[float], right: list[float]) -> str:
    longest = max(*wrong, *right)
    lines = [f"    {'':>6}  {'this one':{BAR + 6}}  the right one"]
    for i, pair in enumerate(zip(wrong, right)):
        bars = [f"{loss:5.2f} {'#' * round(BAR * loss / longest)}" for loss in pair]
        lines.append(f"    {EVERY * i:6}  {bars[0]:{BAR + 6}}  {bars[1]}")
    return "\n".join(lines)


# The cases of gradcheck


def _of_rows(layer: Any, rng: np.random.Generator) -> Checked:
    checked = layer(5, dtype=np.float64)
    randomise(checked, rng)
    return checked, (rng.standard_normal((3, 2, 5)),), {}


def _of_softmax(layer: Any, rng: np.random.Generator) -> Checked:
    return layer(), (rng.standard_normal((3, 2, 5)),), {}


def _of_attention(layer: Any, rng: np.random.Generator) -> Checked:
    B, h, T, S, d = 2, 3, 2, 5, 4
    inputs = [rng.standard_normal((B, h, n, d)) for n in (T, S, S)]
    return layer(), tuple(inputs), {}


def _of_decoder_layer(layer: Any, rng: np.random.Generator) -> Checked:
    return _decoder_layer(layer, 0.0, rng)


def _of_dropout(layer: Any, rng: np.random.Generator) -> Checked:
    checked, inputs, keywords = _decoder_layer(DecoderLayer, 0.5, rng)
    _one_dropout(checked, layer)
    return checked, inputs, {**keywords, "rng": 3}


def _decoder_layer(layer: Any, dropout: float, rng: np.random.Generator) -> Checked:
    checked = layer(4, 2, 3, cross_attention="none", dropout=dropout, attention_dropout=0.0,
                    activation="gelu", rng=rng, dtype=np.float64)  # fmt: skip
    randomise(checked, rng)
    # directional: element by element it would take seconds
    return checked, (rng.standard_normal((2, 3, 4)),), {"mode": "directional"}


def _of_unembedding(layer: Any, rng: np.random.Generator) -> Checked:
    checked = layer(Embedding(7, 5, rng=rng, dtype=np.float64), bias=True)
    return checked, (rng.standard_normal((3, 2, 5)),), {}


def _of_cross_entropy(layer: Any, rng: np.random.Generator) -> Checked:
    targets = rng.integers(0, 7, (2, 5))
    targets[0, 2:] = IGNORED
    return layer(IGNORED), (rng.standard_normal((2, 5, 7)), targets), {}


# What the layers get wrong, the true and the merely plausible. Of each list one is the key.

_LAYER_NORM = (
    "gamma is left out of the two means over the row: they are of dy, not of dy * gamma",
    "beta gets the gradient of gamma",
    "the mean of dx_hat is not taken away: mean(x) is treated as a constant",
    "gamma's gradient is averaged over the rows, where it should be summed",
    "rstd is treated as a constant: the term with x_hat is missing",
)
_SOFTMAX = (
    "it is divided by the number of sequences, which the loss has done already",
    "each y is differentiated by its own x alone: the sum over the row is missing",
    "the sum goes over the batch, where it should go over the row",
    "the two terms have the wrong sign",
    "it is that of log-softmax",
)
_ATTENTION = (
    "the gradients of the scores are divided by sqrt(d_model), where forward divides by sqrt(d_k)",
    "the gradients of key and value are returned in each other's place",
    "the softmax is gone back through as if each weight depended on its own score alone",
    "dk lacks a transpose",
    "dv is made with the scores, where it should be made with the weights",
)
_DECODER_LAYER = (
    "the gradient that goes past the self-attention is dropped",
    "the gradient that goes past a sublayer is sent through its norm",
    "the self-attention gets the gradient of the output, past the feed-forward alone",
    "of the three gradients of query, key and value one is left out",
    "the two sublayers are gone back through in the wrong order",
)
_DROPOUT = (
    "it uses the mask of the last call for every call",
    "it does not divide by 1 - p",
    "it keeps with probability p, where it should drop with probability p",
    "it draws another mask than forward",
    "it drops in inference too",
)
_UNEMBEDDING = (
    "the gradient of W is dropped: only what the embedding adds to it is left",
    "the gradient of W is transposed",
    "dx lacks the bias",
    "the gradient of W overwrites what the embedding has added",
    "b's gradient is averaged over the positions, where it should be summed",
)
_CROSS_ENTROPY = (
    "it is divided by the number of sequences, where the loss is the mean over all targets counted",
    "it is divided by the number of all targets, where the loss is the mean over those counted",
    "ignored targets are not left out",
    "the 1 is taken from every class, where it should be taken from the target's alone",
    "it is that of the probabilities, not of the logits",
)


def _bug(wrong: Any, case: Callable[[Any, np.random.Generator], Checked], lines: tuple[str, ...],
         number: int, derivation: str, **options: Any) -> Bug:  # fmt: skip
    """The bug whose key is this one of the lines."""
    shown = tuple(name for name in ("forward", "backward") if name in vars(wrong))
    others = tuple(line for i, line in enumerate(lines) if i != number)
    return Bug(wrong.__mro__[1], wrong, shown, case, lines[number], derivation, others, **options)


BUGS: tuple[Bug, ...] = (
    _bug(planted.GammaOutside, _of_rows, _LAYER_NORM, 0, """
        dx_hat = dy * gamma
        dxc = rstd * (dx_hat - x_hat * (dx_hat * x_hat).mean(axis=-1, keepdims=True))
        dx = dxc - dxc.mean(axis=-1, keepdims=True)

        y = gamma x_hat + beta comes last, so it is undone first, and all means are of dx_hat. With
        gamma = 1, as in a new layer, dy and dx_hat are the same: a test of a new layer passes.
    """),
    _bug(planted.SkipDropped, _of_decoder_layer, _DECODER_LAYER, 0, """
        dx = dx_past + self.residual1.enter_backward(ctx.enter1, dh1)

        x1 = x + self_attention(norm1(x)): x goes two ways, and its gradient is the sum of both. The
        gradients of this layer's own parameters are all right; what lies below gets too little.
    """),
    _bug(planted.OffByT, _of_cross_entropy, _CROSS_ENTROPY, 0, """
        dlogits = dloss / count * (p - onehot)        where the target is counted

        loss = -1/N sum log_p[target], N = count. Divided by B, the gradient is N/B times as large:
        the learning rate is not what it says, and changes with the length of the sequences.
    """, lr=0.01),
    _bug(planted.ScaledByTheModel, _of_attention, _ATTENTION, 0, """
        dq = dS @ k / sqrt(d_k)
        dk = dS.T @ q / sqrt(d_k)

        S = q k^T / sqrt(d_k), d_k the width of one head. The h heads together are as wide as the
        model, h d_k, and with one head the two are the same: a test with one head passes.
    """),
    _bug(planted.HeadForgotten, _of_unembedding, _UNEMBEDDING, 0, """
        dW = dy.T @ x                                  summed over all positions
        self.W.grad += dW

        logits = x W^T + b depends on W too. W is one Parameter in two places, and its gradient is
        the sum of what both add: the embedding adds only to the rows of the ids that were read.
    """),
    _bug(planted.OverTheBatch, _of_softmax, _SOFTMAX, 0, """
        dx = y * (dy - (dy * y).sum(axis=-1, keepdims=True))

        Only the numbers of one row meet in it. The mean over the batch is the loss's, and is in dy
        already. With dy = ones dx is 0, and 0/B is 0: a test with ones, or with B = 1, passes.
    """),
    _bug(planted.SkipThroughTheNorm, _of_decoder_layer, _DECODER_LAYER, 1, """
        dx1 = dx1_past + self.residual2.enter_backward(ctx.enter_last, dh2)
        dx = dx_past + self.residual1.enter_backward(ctx.enter1, dh1)

        x1 = x + self_attention(norm1(x)): what goes past does not meet the norm. In Post-LN,
        x1 = norm1(x + self_attention(x)), it does, and the same code is right.
    """),
    _bug(planted.MaskOfTheLastCall, _of_dropout, _DROPOUT, 0, """
        dx = dy * keep / (1 - p), with the keep of the call that is undone: ctx.keep

        self.keep is overwritten by the next call of the same instance, before backward comes. Where
        each instance is called once the code is right: a test of one Dropout alone passes.
    """, use="One instance of it, with p = 0.5 (in the training 0.2), stands at the end of both "
             "sublayers of a layer. gradcheck draws the same masks at every call of forward."),
    _bug(planted.SameForBeta, _of_rows, _LAYER_NORM, 1, """
        dgamma = (dy * x_hat).reshape(-1, len(gamma)).sum(axis=0)
        dbeta = dy.reshape(-1, len(gamma)).sum(axis=0)

        y = gamma x_hat + beta: a change of beta changes y by as much, one of gamma by x_hat times
        as much. dx and dgamma are right: a test of these two passes.
    """),
    _bug(planted.KeyForValue, _of_attention, _ATTENTION, 1, """
        return dq, dk, dv

        The gradients come in the order of forward's arguments (q, k, v). Where d_k = d_v all shapes
        are right in either order: a test of shapes passes.
    """),
    _bug(planted.MeanOverIgnored, _of_cross_entropy, _CROSS_ENTROPY, 1, """
        dlogits = dloss / count * (p - onehot)        where the target is counted

        loss = -1/N sum log_p[target], N the targets counted. Divided by all, the gradient is too
        small, the more so the more is ignored: a test without ignored targets passes.
    """),
)  # fmt: skip
