"""Pre-LN against Post-LN, measured: gradients at the start, and training with and without warm-up.

    python examples/pre_vs_post_norm.py                  a few minutes
    python examples/pre_vs_post_norm.py --quick          half a minute, coarser
    python examples/pre_vs_post_norm.py --picture out.png     (needs matplotlib)

    Pre-LN:   x + f(norm(x))        and one LayerNorm after the last layer
    Post-LN:  norm(x + f(x))

The article that npdecoder follows says that Pre-LN lets gradients through better, keeps the scale
of the layers' outputs more even, takes larger learning rates and needs no warm-up. Xiong et al.
2020 ("On Layer Normalization in the Transformer Architecture", theorem 1) say of the start: the
gradient of the last layer's feed-forward keeps its size in Post-LN however deep the stack is, and
falls like depth ** -0.5 in Pre-LN. This program measures all that, and prints the claims beside the
numbers; the verdicts are computed from them.

What is measured: LanguageModel, a decoder stack without cross-attention. It has one residual path
from the words to the loss, like the stack of the theorem. In an encoder-decoder each decoder layer
also sends a gradient to the encoder, and there would be two depths to vary. It reads a line of the
phrase book, English then Chinese, and is to predict the Chinese.

How this differs from the paper: the weights are Xavier's, and only Pre-LN has a final norm, as
there (a third stack shows what that norm does). But the proof simplifies where this does not: it
has one head whose attention starts out uniform, and its constants fit d_ff = d_model, where d_ff is
4 d_model here (a fourth stack shows the other). And the paper trains with Adam above
all; here it is SGD with momentum, without clipping, which would hide a divergence. Adam divides by
the gradient's size, SGD does not: what is said about learning rates here is said about SGD.
"""

# ruff: noqa: E402  (the environment comes before NumPy)

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Threads of BLAS gain nothing on matrices as small as these, and on a busy machine cost tenfold.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np

from npdecoder import (
    SGD,
    CrossEntropy,
    LanguageModel,
    LanguageModelConfig,
    console,
    constant_schedule,
    phrase_book,
    target_mask,
)
from npdecoder.text import Vocabulary, pad, tokenize

STACKS: dict[str, dict[str, Any]] = {
    "Post-LN": {"norm": "post"},
    "Pre-LN": {"norm": "pre"},
    "Pre-LN, no final norm": {"norm": "pre", "final_norm": False},
}
NARROW = "Post-LN, d_ff = d_model"  # measured at the largest depth only
PAD = Vocabulary.pad_id


@dataclass(frozen=True)
class Setting:
    # at the start
    depths: tuple[int, ...] = (2, 4, 6, 8, 12, 16, 24)
    seeds: int = 16
    d_model: int = 64
    sentences: int = 32
    # training
    train_depth: int = 6
    train_d_model: int = 32
    train_seeds: int = 3
    updates: int = 300
    warmup: int = 100
    batch: int = 16
    rates: tuple[float, ...] = (0.01, 0.03, 0.05, 0.1, 0.3, 1.0)
    # both
    num_heads: int = 4
    seed: int = 0


FULL = Setting()
QUICK = Setting(
    depths=(2, 6, 12, 18, 24), seeds=4, sentences=16,
    train_seeds=1, updates=120, warmup=40, rates=(0.03, 0.1, 0.3),
)  # fmt: skip


# --- The data: lines of the phrase book ---------------------------------------------------------


class Book:
    """Lines "<bos> english <eos> chinese <eos>", of which the Chinese and its <eos> are targets."""

    def __init__(self) -> None:
        pairs = [(tokenize(a), tokenize(b)) for a, b in phrase_book.split()[0]]
        self.vocabulary = Vocabulary.build(a + b for a, b in pairs)
        self.lines: list[tuple[list[int], list[int]]] = []
        for english, chinese in pairs:
            source, target = self.vocabulary.encode(english), self.vocabulary.encode(chinese)
            line = [Vocabulary.bos_id, *source, Vocabulary.eos_id, *target, Vocabulary.eos_id]
            targets = [*([PAD] * (len(source) + 1)), *target, Vocabulary.eos_id]
            self.lines.append((line[:-1], targets))

    def batch(self, size: int, rng: np.random.Generator) -> tuple[Any, Any]:
        """ids and targets, both (B, T); PAD is no target."""
        chosen = [self.lines[i] for i in rng.choice(len(self.lines), size, replace=False)]
        return pad([ids for ids, _ in chosen], PAD), pad([targets for _, targets in chosen], PAD)

    def frequency_loss(self) -> float:
        """The loss of one who knows how frequent each word is, and nothing else."""
        counts = np.bincount([i for _, targets in self.lines for i in targets if i != PAD])
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())


def make_model(book: Book, setting: Setting, depth: int, d_model: int, seed: int, **options: Any):
    config = LanguageModelConfig(
        len(book.vocabulary), d_model=d_model, num_heads=setting.num_heads, num_layers=depth,
        pad_id=PAD, max_len=64, **options,
    )  # fmt: skip
    return LanguageModel(config, seed)


# --- At the start: one forward, one backward ----------------------------------------------------


class Start(NamedTuple):
    """Of one stack before its first update; an entry a layer, the first layer first."""

    feed_forward: Any  # |dLoss/dW| of linear2, whose output is the layer's last summand
    layer: Any  # the norm of the gradients of all parameters of the layer
    scale: Any  # root mean square of the layer's output, over the tokens that are not padding


def measure_start(model: LanguageModel, ids: Any, targets: Any) -> Start:
    criterion = CrossEntropy(ignore_index=PAD)
    model.zero_grad()
    logits, ctx = model.forward(ids)
    _, loss_ctx = criterion.forward(logits, targets)
    model.backward(ctx, criterion.backward(loss_ctx))
    layers = model.decoder.layers
    return Start(
        np.array([norm_of([layer.feed_forward.linear2.W]) for layer in layers]),
        np.array([norm_of(layer.parameters()) for layer in layers]),
        np.array([np.sqrt(np.mean(x[ids != PAD] ** 2)) for x in outputs(model, ids)[1:]]),
    )


def norm_of(parameters: Sequence[Any]) -> float:
    return float(np.sqrt(sum(float((p.grad.astype(np.float64) ** 2).sum()) for p in parameters)))


def outputs(model: LanguageModel, ids: Any) -> list[Any]:
    """The input of the stack and the output of each of its layers, (B, T, d_model) each."""
    keep = target_mask(ids, PAD)
    xs = [model.positions(model.embedding(ids))]
    for layer in model.decoder.layers:
        xs.append(layer(xs[-1], None, keep))
    return xs


def starts(book: Book, setting: Setting) -> Iterator[tuple[str, int, Start]]:
    """(stack, depth, a Start whose arrays are (seeds, depth))."""
    narrow = {"norm": "post", "d_ff": setting.d_model}
    for name, options in {**STACKS, NARROW: narrow}.items():
        for depth in setting.depths if name in STACKS else (max(setting.depths),):
            of_seeds = []
            for seed in range(setting.seed, setting.seed + setting.seeds):
                model = make_model(book, setting, depth, setting.d_model, seed, **options)
                ids, targets = book.batch(setting.sentences, np.random.default_rng([seed, 1]))
                of_seeds.append(measure_start(model, ids, targets))
            yield name, depth, Start(*(np.array(arrays) for arrays in zip(*of_seeds)))


class Fit(NamedTuple):
    mean: float
    spread: float  # standard deviation over the seeds
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.spread:.2f}"


def exponent(depths: Sequence[int], values: Any) -> Fit:
    """The e of values ~ depth ** e by least squares of the logarithms; values (seeds, depths)."""
    slopes = np.polyfit(np.log(depths), np.log(values).T, 1)[0]
    spread = float(slopes.std(ddof=1)) if len(slopes) > 1 else 0.0
    return Fit(float(slopes.mean()), spread, len(slopes))


# --- Training -----------------------------------------------------------------------------------


class Trained(NamedTuple):
    loss: float  # the mean of the last tenth of the updates; inf if a loss was not finite
    scale: Any  # (layers,) root mean square of each layer's output, after the last update


def train_one(
    book: Book, setting: Setting, norm: str, rate: float, warmup: int, seed: int
) -> Trained:
    model = make_model(book, setting, setting.train_depth, setting.train_d_model, seed, norm=norm)
    criterion = CrossEntropy(ignore_index=PAD)
    optimizer = SGD(model.parameters(), rate, momentum=0.9)
    schedule = constant_schedule(rate, warmup)
    rng = np.random.default_rng([seed, 2])  # all runs of a seed read the same batches
    losses = []
    with np.errstate(all="ignore"):  # a diverging run overflows: that is its result
        for n in range(1, setting.updates + 1):
            ids, targets = book.batch(setting.batch, rng)
            model.zero_grad()
            logits, ctx = model.forward(ids)
            loss, loss_ctx = criterion.forward(logits, targets)
            if not np.isfinite(loss):
                return Trained(float("inf"), np.full(setting.train_depth, np.nan))
            losses.append(float(loss))
            model.backward(ctx, criterion.backward(loss_ctx))
            optimizer.lr = schedule(n)
            optimizer.step()
        scale = measure_start(model, *book.batch(setting.sentences, rng)).scale
    return Trained(float(np.mean(losses[-max(1, setting.updates // 10) :])), scale)


Training = dict[tuple[str, int], dict[float, list[Trained]]]  # (norm, warmup) -> rate -> seeds


def trainings(setting: Setting) -> list[tuple[str, int, float, int]]:
    seeds = range(setting.seed, setting.seed + setting.train_seeds)
    return [
        (norm, warmup, rate, seed)
        for norm in ("post", "pre")
        for warmup in (0, setting.warmup)
        for rate in setting.rates
        for seed in seeds
    ]


# --- What the numbers say -----------------------------------------------------------------------


class Result(NamedTuple):
    setting: Setting
    start: dict[str, dict[int, Start]]  # stack -> depth
    training: Training
    frequency_loss: float  # of word frequencies alone
    even_loss: float  # of guessing all words alike: log V


class Claim(NamedTuple):
    source: str
    claim: str
    measured: str
    verdict: str


def last_gradients(result: Result, stack: str) -> Any:
    """(seeds, depths): of the last layer's linear2.W."""
    return np.stack([s.feed_forward[:, -1] for s in result.start[stack].values()], axis=1)


def last_scales(result: Result, stack: str) -> Any:
    return np.stack([s.scale[:, -1] for s in result.start[stack].values()], axis=1)


def deep_half(result: Result) -> slice:
    """The deeper depths, at least three: a law for large depths is fitted there."""
    count = len(result.setting.depths)
    return slice(max(0, min(count // 2, count - 3)), None)


def fits(result: Result, values: Any) -> tuple[Fit, Fit]:
    """The exponents over all depths, and over the deeper half."""
    depths, deep = list(result.start["Pre-LN"]), deep_half(result)
    return exponent(depths, values), exponent(depths[deep], values[:, deep])


TOLERANCE = 0.1  # of an exponent


def near(fit: Fit, claimed: float) -> bool | None:
    """Whether the exponent is within 0.1 of the claim; None if two standard errors, added to
    that, leave it open."""
    error = 2 * fit.spread / np.sqrt(fit.seeds)
    distance = abs(fit.mean - claimed)
    if TOLERANCE - error < distance <= TOLERANCE + error:
        return None
    return bool(distance <= TOLERANCE)


class Ratio:
    """A ratio over the seeds: the geometric mean, and the extremes."""

    def __init__(self, of_seeds: Any) -> None:
        self.mean = float(np.exp(np.log(of_seeds).mean()))
        self.extremes = float(of_seeds.min()), float(of_seeds.max())
        self.range = self.extremes[1] / self.extremes[0]

    def __str__(self) -> str:
        low, high = self.extremes
        return f"{self.mean:.2f} ({low:.2f} to {high:.2f})"


def unevenness(per_layer: Any) -> float:
    """Largest over smallest layer, each a geometric mean over the seeds; per_layer (seeds, N)."""
    mean = np.exp(np.log(per_layer).mean(axis=0))
    return float(mean.max() / mean.min())


def best_runs(result: Result, norm: str) -> list[Trained]:
    """The runs of the rate and warm-up whose mean loss is lowest, one a seed."""
    runs = [of_rate for (of, _), by_rate in result.training.items() if of == norm
            for of_rate in by_rate.values()]  # fmt: skip
    return min(runs, key=lambda of_rate: np.mean([run.loss for run in of_rate]))


def either(a: bool, b: bool, on: str) -> str:
    """One verdict of two."""
    return verdict(a) if a == b else f"depends on {on}"


def start_claims(result: Result) -> list[Claim]:
    deepest = max(result.start["Post-LN"])
    post, pre = result.start["Post-LN"][deepest], result.start["Pre-LN"][deepest]
    all_post, deep_post = fits(result, last_gradients(result, "Post-LN"))
    all_pre, deep_pre = fits(result, last_gradients(result, "Pre-LN"))
    product = last_gradients(result, "Pre-LN") * last_scales(result, "Pre-LN")
    all_product, _ = fits(result, product)
    all_bare, _ = fits(result, last_gradients(result, "Pre-LN, no final norm"))
    bottom_post, bottom_pre, bottom_narrow = (
        Ratio(s.feed_forward[:, 0] / s.feed_forward[:, -1])
        for s in (post, pre, result.start[NARROW][deepest])
    )
    uneven_post, uneven_pre = unevenness(post.feed_forward), unevenness(pre.feed_forward)
    scale_post, scale_pre = unevenness(post.scale), unevenness(pre.scale)
    trained_post, trained_pre = (
        unevenness(np.array([run.scale for run in best_runs(result, norm)]))
        for norm in ("post", "pre")
    )
    return [
        Claim(
            "paper", "Post-LN: the last feed-forward's gradient does not depend on the depth "
            "(exponent 0)",
            f"{deep_post} over the deeper half of the depths, {all_post} over all",
            verdict(near(deep_post, 0.0)),
        ),
        Claim(
            "paper", "Pre-LN: it falls like depth ** -0.5",
            f"{deep_pre} over the deeper half of the depths, {all_pre} over all",
            verdict(near(deep_pre, -0.5)),
        ),
        Claim(
            "paper", "Pre-LN: the cause is the final norm, which divides by the grown scale of "
            "the last layer's output",
            f"gradient * that scale: {all_product}; gradient without the final norm: {all_bare}",
            verdict(near(all_product, 0.0) if all_bare.mean > all_pre.mean + 0.2 else False),
        ),
        Claim(
            "article", "Post-LN: the gradient decays on its way down",
            f"first layer's / last layer's at depth {deepest} (seeds from, to): {bottom_post}; "
            f"with d_ff = d_model {bottom_narrow}; decay: below 0.50",
            either(bottom_post.mean < 0.5, bottom_narrow.mean < 0.5, "d_ff"),
        ),
        Claim(
            "article", "Pre-LN: the gradient does not vanish in the lower layers",
            f"first / last: {bottom_pre}", verdict(bottom_pre.mean > 0.5),
        ),
        Claim(
            "article", "Pre-LN: gradients propagate more stably, taken as: more even over the "
            "layers",
            f"largest / smallest layer: {uneven_pre:.1f}, Post-LN {uneven_post:.1f}",
            verdict(uneven_pre < uneven_post),
        ),
        Claim(
            "article", "the same, taken as: less different from seed to seed",
            f"first / last, largest over smallest seed: {bottom_pre.range:.1f}, "
            f"Post-LN {bottom_post.range:.1f}",
            verdict(bottom_pre.range < bottom_post.range),
        ),
        Claim(
            "article", "Pre-LN: the layers' outputs are of more even scale; in Post-LN bottom and "
            "top differ much",
            f"largest / smallest layer at the start: {scale_pre:.2f}, Post-LN {scale_post:.2f}; "
            f"trained (at the best rate of each): {trained_pre:.2f}, {trained_post:.2f}",
            either(scale_pre < scale_post, trained_pre < trained_post, "training"),
        ),
    ]  # fmt: skip


def verdict(agrees: bool | None) -> str:
    return "open" if agrees is None else "agrees" if agrees else "DIFFERS"


class Outcome(NamedTuple):
    loss: float  # mean over the seeds
    diverged: int  # of the seeds: a loss was not finite, or is no better than guessing evenly
    learnt: int  # of the seeds: at least a tenth below the loss of word frequencies


def outcome(result: Result, key: tuple[str, int], rate: float) -> Outcome:
    losses = np.array([run.loss for run in result.training[key][rate]])
    diverged = int((losses >= result.even_loss).sum())
    return Outcome(
        float(losses.mean()), diverged, int((losses < 0.9 * result.frequency_loss).sum())
    )


def learnt_rates(result: Result, key: tuple[str, int]) -> list[float]:
    """The rates at which every seed learns."""
    return [rate for rate in result.setting.rates
            if outcome(result, key, rate).learnt == result.setting.train_seeds]  # fmt: skip


def training_claims(result: Result) -> list[Claim]:
    warmup = result.setting.warmup
    keys = {name: (name.split()[0], warmup * name.endswith("warm"))
            for name in ("post", "post warm", "pre", "pre warm")}  # fmt: skip
    learnt = {name: learnt_rates(result, key) for name, key in keys.items()}
    best = {
        name: min(outcome(result, key, rate).loss for rate in result.setting.rates)
        for name, key in keys.items()
    }
    top = {name: max(rates, default=0.0) for name, rates in learnt.items()}
    counts = [(rate, *(outcome(result, keys[name], rate).learnt for name in ("post warm", "post")))
              for rate in result.setting.rates]  # fmt: skip
    rescued = [f"{rate:g} ({warm} seeds, not {cold})" for rate, warm, cold in counts if warm > cold]
    return [
        Claim(
            "article", "Pre-LN takes larger learning rates",
            f"largest that learns, without warm-up: {rates([top['pre']])}, "
            f"Post-LN {rates([top['post']])}",
            verdict(top["pre"] > top["post"]),
        ),
        Claim(
            "article", "Post-LN must have a warm-up",
            f"without it, learns at {rates(learnt['post'])} (best loss {best['post']:.2f}); with "
            f"it, at {rates(learnt['post warm'])} ({best['post warm']:.2f})",
            verdict(None if not learnt["post"] and not learnt["post warm"]
                    else not learnt["post"]),
        ),
        Claim(
            "both", "warm-up lets Post-LN learn where it does not without",
            f"rates at which more seeds learn with it: {', '.join(rescued) or 'none'}",
            verdict(bool(rescued)),
        ),
        Claim(
            "both", "warm-up brings Post-LN further",
            f"best loss {best['post warm']:.2f} with it, {best['post']:.2f} without",
            verdict(None if not learnt["post"] and not learnt["post warm"]
                    else best["post warm"] < 0.9 * best["post"]),
        ),
        Claim(
            "both", "Pre-LN needs no warm-up",
            f"best loss without {best['pre']:.2f}, with {best['pre warm']:.2f}; largest rate "
            f"without {rates([top['pre']])}, with {rates([top['pre warm']])}",
            verdict(bool(learnt["pre"]) and best["pre"] <= 1.1 * best["pre warm"]
                    and top["pre"] >= top["pre warm"]),
        ),
        Claim(
            "both", "Pre-LN without warm-up does as well as Post-LN with it",
            f"best loss {best['pre']:.2f}, Post-LN with warm-up {best['post warm']:.2f}",
            verdict(best["pre"] <= 1.1 * best["post warm"]),
        ),
    ]  # fmt: skip


def rates(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values if value) or "none"


# --- Tables -------------------------------------------------------------------------------------


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(
            zip(row, widths))).rstrip()
        for row in rows
    )


def mean_spread(values: Any) -> str:
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=min(1, len(values) - 1)):.2f}"


def depth_table(result: Result) -> str:
    head = ["last gradient", "first/last", "last scale"]
    rows = [["depth", *(head * 2), "last gradient"]]
    for depth in result.setting.depths:
        row = [str(depth)]
        for name in ("Post-LN", "Pre-LN"):
            start = result.start[name][depth]
            row += [
                mean_spread(start.feed_forward[:, -1]),
                f"{np.mean(start.feed_forward[:, 0] / start.feed_forward[:, -1]):.2f}",
                f"{np.mean(start.scale[:, -1]):.2f}",
            ]
        row.append(mean_spread(result.start["Pre-LN, no final norm"][depth].feed_forward[:, -1]))
        rows.append(row)
    text = table(rows)
    line = text.splitlines()[0]
    places = [i for i in range(len(line)) if line.startswith("last gradient", i)]
    names = ""
    for place, name in zip(places, ("Post-LN", "Pre-LN", "no final norm")):
        names = names.ljust(place) + name
    return f"{names}\n{text}"


def layer_table(result: Result) -> str:
    """Every layer of the deepest stacks."""
    depth = max(result.setting.depths)
    rows = [["layer", *(f"{name} {what}" for name in ("Post-LN", "Pre-LN")
                        for what in ("W2", "all", "scale"))]]  # fmt: skip
    for i in range(depth):
        row = [str(i + 1)]
        for name in ("Post-LN", "Pre-LN"):
            row += [f"{np.mean(a[:, i]):.2f}" for a in result.start[name][depth]]
        rows.append(row)
    return table(rows)


def exponent_table(result: Result) -> str:
    deep = list(result.setting.depths)[deep_half(result)]
    rows = [["exponent of the depth", "all depths", f"depths {deep[0]} to {deep[-1]}"]]
    for name in STACKS:
        both = fits(result, last_gradients(result, name))
        rows.append([f"last gradient, {name}", *map(str, both)])
    for name in ("Post-LN", "Pre-LN"):
        rows.append([f"last scale, {name}", *map(str, fits(result, last_scales(result, name)))])
    return table(rows)


def growth(result: Result) -> tuple[float, float, float]:
    """a, b and R2 of: Pre-LN's last scale ** 2 = a + b * depth, mean over the seeds."""
    depths = np.array(result.setting.depths, float)
    squares = (last_scales(result, "Pre-LN").astype(np.float64) ** 2).mean(axis=0)
    b, a = np.polyfit(depths, squares, 1)
    residual = ((squares - a - b * depths) ** 2).sum() / ((squares - squares.mean()) ** 2).sum()
    return float(a), float(b), float(1 - residual)


def growth_text(result: Result) -> str:
    a, b, r2 = growth(result)
    return (
        f"Pre-LN's last scale ** 2 is {a:.2f} + {b:.2f} * depth (R2 {r2:.3f}): each layer adds its "
        "share to what the words brought. Where that first part weighs little, the scale is like "
        "depth ** 0.5, and the gradient, which the final norm divides by it, like depth ** -0.5."
    )


def training_table(result: Result) -> str:
    setting = result.setting
    warm = f"warm-up {setting.warmup}"
    rows = [["rate", "Post-LN", f"Post-LN, {warm}", "Pre-LN", f"Pre-LN, {warm}"]]
    for rate in setting.rates:
        row = [f"{rate:g}"]
        for norm in ("post", "pre"):
            for warmup in (0, setting.warmup):
                loss, diverged, learnt = outcome(result, (norm, warmup), rate)
                if diverged:
                    row.append(f"{diverged}/{setting.train_seeds} diverged")
                else:
                    row.append(f"{loss:.2f} {learnt}/{setting.train_seeds}")
        rows.append(row)
    return table(rows)


def claims_table(claims: Sequence[Claim], width: int = 98) -> str:
    """Claims and measurements side by side, wrapped."""
    columns = (8, 36, width - 8 - 36 - 8 - 6, 8)
    def lines(cells: Sequence[str]) -> list[str]:
        wrapped = [textwrap.wrap(cell, w) or [""] for cell, w in zip(cells, columns)]
        height = max(map(len, wrapped))
        padded = [cell + [""] * (height - len(cell)) for cell in wrapped]
        return ["  ".join(c.ljust(w) for c, w in zip(row, columns)).rstrip()
                for row in zip(*padded)]  # fmt: skip

    out = lines(("from", "claim", "measured here", "verdict"))
    out.append("  ".join("-" * w for w in columns))
    for claim in claims:
        out += [*lines(claim), ""]
    return "\n".join(out[:-1])


def wrap(text: str) -> str:
    return textwrap.fill(text, 98)


def report(result: Result) -> str:
    s = result.setting
    deepest = max(s.depths)
    claims = start_claims(result) + training_claims(result)
    agree, differ = (sum(c.verdict == word for c in claims) for word in ("agrees", "DIFFERS"))
    parts = [
        "Pre-LN against Post-LN, in decoder stacks without cross-attention",
        "",
        wrap(
            f"AT THE START: d_model {s.d_model}, {s.num_heads} heads, Xavier weights, {s.seeds} "
            f"seeds (mean ± standard deviation), loss over {s.sentences} lines. Last gradient: "
            "norm of dLoss/dW of the last layer's linear2. First/last: the first layer's over it. "
            "Last scale: root mean square of what the last layer puts out, before a final norm."
        ),
        "",
        depth_table(result),
        "",
        exponent_table(result),
        "",
        wrap(growth_text(result)),
        "",
        wrap(f"Every layer at depth {deepest}: gradient of linear2.W (W2), of all parameters, and "
             "scale of the output."),
        "",
        layer_table(result),
        "",
        wrap(
            f"TRAINING: depth {s.train_depth}, d_model {s.train_d_model}, {s.updates} updates of "
            f"{s.batch} lines by SGD with momentum 0.9 (the paper: above all Adam), no clipping, "
            f"{s.train_seeds} seed(s). Mean loss of the last {max(1, s.updates // 10)} updates, "
            f"without warm-up and with {s.warmup} updates of it, and how many seeds have learnt: "
            f"are a tenth below the loss of word frequencies, {result.frequency_loss:.2f}. "
            f"Diverged: not finite, or no better than guessing evenly, {result.even_loss:.2f}."
        ),
        "",
        training_table(result),
        "",
        wrap(
            f"THE CLAIMS: {agree} of {len(claims)} agree with what was measured here, {differ} "
            f"differ. Exponents agree within {TOLERANCE}; open: the seeds do not decide it, or "
            "nothing has learnt. Those on training are about SGD and "
            f"{s.updates} updates here."
        ),
        "",
        claims_table(claims),
    ]
    return "\n".join(parts)


# --- Picture ------------------------------------------------------------------------------------


def draw(result: Result, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    setting = result.setting
    colours = {"Post-LN": "tab:red", "Pre-LN": "tab:blue", "Pre-LN, no final norm": "tab:cyan"}
    figure, ((a, b), (c, e)) = plt.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    for name, colour in colours.items():
        values = last_gradients(result, name)
        a.errorbar(setting.depths, values.mean(0), values.std(0), color=colour, marker="o",
                   label=f"{name}: {fits(result, values)[0]}")  # fmt: skip
    a.set(xscale="log", yscale="log", xlabel="depth", ylabel="|dLoss/dW2|",
          title="last layer's gradient, and its exponent")  # fmt: skip
    a.set_xticks(setting.depths, [str(depth) for depth in setting.depths])
    a.minorticks_off()
    for axis, field, title in ((b, "feed_forward", "gradient of W2 in each layer"),
                               (c, "scale", "scale of each layer's output")):  # fmt: skip
        for name in ("Post-LN", "Pre-LN"):
            for depth in setting.depths:
                values = getattr(result.start[name][depth], field).mean(0)
                axis.plot(range(1, depth + 1), values, color=colours[name], alpha=0.7,
                          label=name if depth == max(setting.depths) else None)  # fmt: skip
        axis.set(xlabel="layer", title=title)
    for (norm, warmup), by_rate in result.training.items():
        name = "Post-LN" if norm == "post" else "Pre-LN"
        losses = [min(float(np.mean([run.loss for run in by_rate[r]])), 1.2 * result.even_loss)
                  for r in setting.rates]  # fmt: skip
        e.plot(setting.rates, losses, color=colours[name], marker="o",
               linestyle="--" if warmup else "-",
               label=f"{name}, {f'warm-up {warmup}' if warmup else 'no warm-up'}")  # fmt: skip
    e.axhline(result.even_loss, color="grey", linewidth=0.8, label="guessing evenly")
    e.axhline(result.frequency_loss, color="grey", linestyle=":", label="word frequencies")
    e.set(xscale="log", xlabel="learning rate",
          title=f"loss after {setting.updates} updates")  # fmt: skip
    e.set_xticks(setting.rates, [f"{rate:g}" for rate in setting.rates])
    e.minorticks_off()
    for axis in (a, b, c, e):
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# --- The program --------------------------------------------------------------------------------


class Progress:
    """One line on stderr, if that is a terminal."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.start = total, 0, time.monotonic()
        self.live = sys.stderr is not None and sys.stderr.isatty()

    def step(self, what: str) -> None:
        self.done += 1
        if self.live:
            seconds = time.monotonic() - self.start
            sys.stderr.write(f"\r{self.done}/{self.total}  {what}  {seconds:.0f} s\x1b[K")
            sys.stderr.write("\n" if self.done == self.total else "")
            sys.stderr.flush()


def measure(setting: Setting) -> Result:
    book = Book()
    runs = trainings(setting)
    progress = Progress(len(STACKS) * len(setting.depths) + 1 + len(runs))
    start: dict[str, dict[int, Start]] = {name: {} for name in (*STACKS, NARROW)}
    for name, depth, of_depth in starts(book, setting):
        start[name][depth] = of_depth
        progress.step(f"start: {name}, depth {depth}")
    training: Training = {}
    for norm, warmup, rate, seed in runs:
        run = train_one(book, setting, norm, rate, warmup, seed)
        training.setdefault((norm, warmup), {}).setdefault(rate, []).append(run)
        progress.step(f"training: {norm}, rate {rate:g}, warm-up {warmup}")
    even_loss = float(np.log(len(book.vocabulary)))
    return Result(setting, start, training, book.frequency_loss(), even_loss)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Pre-LN against Post-LN: gradients and scales at the start, training with and "
        "without warm-up, and the claims about them beside what was measured.",
        epilog="Example: python examples/pre_vs_post_norm.py --quick --picture norms.png",
    )
    parser.add_argument("--quick", action="store_true", help="smaller and coarser: half a minute")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--train-depth", type=int, default=FULL.train_depth, metavar="N",
                        help="layers of the stacks that are trained (default: %(default)s)")
    parser.add_argument("--picture", metavar="FILE.png", help="draw the result (needs matplotlib)")
    args = parser.parse_args(argv)
    console.prepare(sys.stdout)  # it may lack the sign ±
    if args.train_depth < 1 or args.seed < 0:
        parser.error("--train-depth must be at least 1, --seed at least 0")
    if args.picture:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--picture needs matplotlib: pip install matplotlib")
    base = QUICK if args.quick else FULL
    setting = dataclasses.replace(base, seed=args.seed, train_depth=args.train_depth)
    result = measure(setting)
    print(report(result))
    if args.picture:
        draw(result, args.picture)
        print(f"\npicture: {args.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
