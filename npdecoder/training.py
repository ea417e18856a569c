"""The training loop: batches in, loss down, progress on stderr."""

from __future__ import annotations

import math
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from npdecoder.core import Array, positive_int
from npdecoder.layers.cross_entropy import CrossEntropy
from npdecoder.optim import Optimizer, Schedule, clip_grad_norm
from npdecoder.text import Batch


def train_step(
    model: Any,
    criterion: CrossEntropy,
    optimizer: Optimizer,
    batch: Batch,
    *,
    max_norm: float | None = None,
    rng: np.random.Generator | None = None,
) -> tuple[float, int]:
    """One update from one batch -> its loss, and how many targets that is the mean of.

    model: any Layer from batch.inputs to logits. max_norm: clips the gradient. rng: for dropout.

    Errors: FloatingPointError for a loss or a gradient that is not finite; the weights are then as
    before.
    """
    optimizer.zero_grad()
    logits, ctx = model.forward(*batch.inputs, rng=rng)
    loss, loss_ctx = criterion.forward(logits, batch.targets)
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss}: try a smaller learning rate")
    model.backward(ctx, criterion.backward(loss_ctx))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a norm that is not finite: see below
        norm = clip_grad_norm(optimizer.parameters(), math.inf if max_norm is None else max_norm)
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient norm is {norm}: try a smaller learning rate")
    optimizer.step()
    return float(loss), loss_ctx.count


def evaluate(
    model: Callable[..., Array], criterion: CrossEntropy, batches: Iterable[Batch]
) -> float:
    """The mean loss a target over all batches, without dropout; 0.0 if there is no target.

    model: a Layer, or any function of batch.inputs that returns logits. Every target counts the
    same, however the batches were cut.
    """
    total, count = 0.0, 0
    for batch in batches:
        loss, ctx = criterion.forward(model(*batch.inputs), batch.targets)
        total += float(loss) * ctx.count
        count += ctx.count
    return total / max(count, 1)


def train(
    model: Any,
    criterion: CrossEntropy,
    optimizer: Optimizer,
    epoch: Callable[[], Iterable[Batch]],
    steps: int,
    *,
    schedule: Schedule | None = None,
    max_norm: float | None = None,
    rng: np.random.Generator | None = None,
    validate: Callable[[], float] | None = None,
    validate_every: int = 1000,
    progress: Progress | None = None,
) -> list[float]:
    """Update the model `steps` times; returns the loss of each step.

    epoch: called for one pass over the data after another, returns its batches.
    schedule: the learning rate of update n = 1, 2, ...; None leaves optimizer.lr alone.
    validate: returns the validation loss; called after every validate_every updates and the last.
    progress: shown on stderr; None: by Progress(steps), which is quiet if that is no terminal.

    Errors: ValueError for an epoch without batches; FloatingPointError for a loss or a gradient
    that is not finite; the weights are then those before that step.
    """
    steps = positive_int("steps", steps)
    validate_every = positive_int("validate_every", validate_every)
    progress = Progress(steps) if progress is None else progress
    losses: list[float] = []
    with progress:
        for batch in _endless(epoch):
            if schedule is not None:
                optimizer.lr = schedule(len(losses) + 1)
            try:
                loss, count = train_step(
                    model, criterion, optimizer, batch, max_norm=max_norm, rng=rng
                )
            except FloatingPointError as error:
                raise FloatingPointError(f"step {len(losses) + 1}: {error}") from None
            losses.append(loss)
            progress.step(loss, count)
            if validate is not None and (
                len(losses) % validate_every == 0 or len(losses) == steps
            ):
                progress.validation(validate())
            if len(losses) == steps:
                return losses
    raise AssertionError("_endless ended")


def _endless(epoch: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
    while True:
        batch = None
        for batch in epoch():
            yield batch
        if batch is None:
            raise ValueError("the epoch has no batches: there is nothing to train on")


class Progress:
    """One line on stderr that is written over: step, loss, tokens/s, time left.

    total: the number of steps to come. Quiet if stderr is not a terminal. The loss shown is a
    running mean over about 50 steps. As a context manager it ends its line, also after an error.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.steps = 0
        self.tokens = 0
        self.loss = 0.0
        self.validation_loss: float | None = None
        self.start = time.monotonic()
        self.shown = -math.inf
        self.live = sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> Progress:
        self.start = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live and self.steps:
            self._show()
            sys.stderr.write("\n")

    def step(self, loss: float, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.loss += (loss - self.loss) / min(self.steps, 50)
        now = time.monotonic()
        if self.live and now - self.shown >= 0.2:
            self.shown = now
            self._show()

    def validation(self, loss: float) -> None:
        self.validation_loss = loss

    def tokens_per_second(self) -> float:
        """Target tokens a second so far."""
        return self.tokens / max(time.monotonic() - self.start, 1e-9)

    def __str__(self) -> str:
        seconds = time.monotonic() - self.start
        left = seconds / max(self.steps, 1) * (self.total - self.steps)
        text = f"step {self.steps}/{self.total}  loss {self.loss:.3f}"
        if self.validation_loss is not None:
            text += f"  validation {self.validation_loss:.3f}"
        minutes, rest = divmod(round(left), 60)
        return text + f"  {self.tokens_per_second():,.0f} tokens/s  {minutes}:{rest:02d} left"

    def _show(self) -> None:
        columns = shutil.get_terminal_size().columns - 1
        sys.stderr.write("\r" + str(self)[:columns].ljust(columns))
        sys.stderr.flush()
