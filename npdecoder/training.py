"""The training loop: batches in, loss down, progress on stderr; it can stop and go on later."""

from __future__ import annotations

import copy
import math
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import numpy as np

from npdecoder.core import Array, Layer, find_parameters, integer, positive_int
from npdecoder.layers.cross_entropy import CrossEntropy
from npdecoder.optim import Optimizer, Schedule, clip_if_finite
from npdecoder.replicas import Replicas, choose_threads
from npdecoder.text import Batch


def train_step(
    model: Any,
    criterion: CrossEntropy,
    optimizer: Optimizer,
    batch: Batch | Sequence[Batch],
    *,
    max_norm: float | None = None,
    rng: np.random.Generator | None = None,
) -> tuple[float, int]:
    """One update from one batch -> its loss, and how many targets that is the mean of.

    model: any Layer from batch.inputs to logits, or the Replicas of one, which share out the
    batch among their threads. max_norm: clips the gradient. rng: for dropout.
    batch: may be a list of batches, which make one update together, as if they were one batch: each
    has the share of the loss and of the gradient that its targets have of all. Only one of them is
    in memory at a time.

    Errors: FloatingPointError for a loss or a gradient that is not finite; the weights are then as
    before.
    """
    micro_batches = [batch] if isinstance(batch, Batch) else list(batch)
    if not micro_batches:
        raise ValueError("batch is an empty list: there is nothing to learn from")
    counts = [criterion.count(micro_batch.targets) for micro_batch in micro_batches]
    total, loss = sum(counts), 0.0
    replicas = model if isinstance(model, Replicas) else Replicas(model)
    for parameter in optimizer.parameters():  # also of those that are not the model's
        parameter.forget_grad()
    for n, micro_batch in enumerate(micro_batches):
        cut = _cut(micro_batch, replicas.threads)
        shares = [(criterion, share, total, share_rng)
                  for share, share_rng in zip(cut, _rngs(rng, len(cut)))]
        loss += sum(replicas.run(_share_of_loss, shares, add=n > 0))
    norm = clip_if_finite(optimizer.parameters(), math.inf if max_norm is None else max_norm)
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient norm is {norm}: try a smaller learning rate")
    optimizer.step()
    return loss, total


def _share_of_loss(
    model: Any, criterion: CrossEntropy, batch: Batch, total: int, rng: np.random.Generator | None
) -> float:
    """What batch adds to the mean over `total` targets; forward and backward."""
    logits, ctx = model.forward(*batch.inputs, rng=rng)
    loss, loss_ctx = criterion.forward(logits, batch.targets)
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss}: try a smaller learning rate")
    share = loss_ctx.count / max(total, 1)
    model.backward(ctx, criterion.backward(loss_ctx, share))
    return share * float(loss)


def _cut(batch: Batch, threads: int) -> list[Batch]:
    """The batch cut by sequences into as many batches as there are threads, if it has so many."""
    threads = max(1, min(threads, len(batch.targets)))
    *inputs, targets = (np.array_split(x, threads) for x in (*batch.inputs, batch.targets))
    return [Batch(share[:-1], share[-1]) for share in zip(*inputs, targets)]


def _rngs(
    rng: np.random.Generator | None, count: int
) -> Sequence[np.random.Generator | None]:
    """A generator for each of several threads, seeded by rng; rng itself for one."""
    if rng is None or count == 1:
        return [rng] * count
    return [np.random.default_rng(seed) for seed in rng.integers(2**63, size=count)]


def evaluate(
    model: Callable[..., Array] | Replicas, criterion: CrossEntropy, batches: Iterable[Batch]
) -> float:
    """The mean loss a target over all batches, without dropout; 0.0 if there is no target.

    model: a Layer, or any function of batch.inputs that returns logits, or the Replicas of a Layer,
    which share out each batch among their threads (each of the inputs has then one row for each
    sequence). Every target counts the same, however the batches were cut. Gradients stay as they
    are.
    """
    total, count = 0.0, 0
    for batch in batches:
        if isinstance(model, Replicas):
            shares = [(criterion, share) for share in _cut(batch, model.threads)]
            losses = model.map(_loss_and_count, shares)
        else:
            losses = [_loss_and_count(model, criterion, batch)]
        for loss, counted in losses:
            total += loss * counted
            count += counted
    return total / max(count, 1)


def _loss_and_count(
    model: Callable[..., Array], criterion: CrossEntropy, batch: Batch
) -> tuple[float, int]:
    loss, ctx = criterion.forward(model(*batch.inputs), batch.targets)
    return float(loss), ctx.count


class BatchStream:
    """Batches without end, one pass over the data after another, from a place that can be saved.

    epoch: epoch(rng) returns the batches of one pass; what it draws is from rng alone, which nobody
        else uses.

    A place is the generator as it was when the pass began, and how many batches were taken since:
    to go on from it, the pass is begun again and these are passed over.
    """

    def __init__(
        self, epoch: Callable[[np.random.Generator], Iterable[Batch]], rng: np.random.Generator
    ) -> None:
        self._epoch = epoch
        self._begin(rng, 0)

    def _begin(self, rng: np.random.Generator, taken: int) -> None:
        self._start = copy.deepcopy(rng)
        self._rng = rng
        self._batches = islice(self._epoch(rng), taken, None)
        self._taken = taken

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches, None)
        if batch is None:
            self._begin(self._rng, 0)
            batch = next(self._batches, None)
        if batch is None:
            raise ValueError("the epoch has no batches: there is nothing to train on")
        self._taken += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The place: rng, a copy of the generator at the beginning of the pass, and taken."""
        return {"rng": copy.deepcopy(self._start), "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch that came next when the state was taken.

        Errors: ValueError for a state that lacks anything.
        """
        if not isinstance(state, Mapping) or state.keys() != {"rng", "taken"}:
            raise ValueError(f"the place in the data is {state!r}, expected rng and taken")
        if not isinstance(state["rng"], np.random.Generator):
            raise ValueError(f"rng of the place in the data is {state['rng']!r}")
        self._begin(copy.deepcopy(state["rng"]), integer("taken", state["taken"], 0))


def train(
    model: Any,
    criterion: CrossEntropy,
    optimizer: Optimizer,
    batches: Iterator[Batch],
    steps: int,
    *,
    schedule: Schedule | None = None,
    max_norm: float | None = None,
    rng: np.random.Generator | None = None,
    accumulate: int = 1,
    threads: int | None = None,
    replicas: Callable[[], Replicas] | None = None,
    validate: Callable[[], float] | None = None,
    validate_every: int = 1000,
    save: Callable[[], None] | None = None,
    save_every: int = 1000,
    progress: Progress | None = None,
) -> list[float]:
    """Update the model until optimizer.steps is `steps`; returns the loss of each update made.

    An optimizer that has made updates before goes on from there: with the same schedule, batches
    and rng, a training in two parts is bit by bit the training in one.

    batches: for example a BatchStream. accumulate: how many of them make one update.
    threads: how many cores share out each batch (see Replicas, and its errors); None: as many as
        choose_threads says for the first. Another number sums the gradients in another order and
        draws another dropout; the same gives the same results.
    replicas: opens the Replicas of the model, in place of threads; called before the first update,
        when signals are looked after. They are closed at the end.
    schedule: the learning rate of update n = 1, 2, ...; None leaves optimizer.lr alone.
    validate: returns the validation loss; called after every validate_every updates and the last.
    save: called after every save_every updates and the last, and when Ctrl-C, SIGTERM or SIGHUP
        comes: the update is finished, saved, and the training ends with KeyboardInterrupt or
        SystemExit(128 + the signal's number). A second Ctrl-C ends it at once. None: these signals
        do what they did before. An OSError of a save that is not the last is a warning: there will
        be others.
    progress: shown on stderr; None: by Progress(steps), which is quiet if that is no terminal.

    Errors: FloatingPointError for a loss or a gradient that is not finite; the weights are then
    those before that step.
    """
    steps, accumulate = positive_int("steps", steps), positive_int("accumulate", accumulate)
    validate_every = positive_int("validate_every", validate_every)
    save_every = positive_int("save_every", save_every)
    progress = Progress(steps, optimizer.steps) if progress is None else progress
    losses: list[float] = []
    opened: Replicas | None = None
    with ExitStack() as stack, progress, _signals(save is not None) as received:
        while optimizer.steps < steps:
            n = optimizer.steps + 1
            if schedule is not None:
                optimizer.lr = schedule(n)
            update = list(islice(batches, accumulate))
            if len(update) < accumulate:
                raise ValueError(f"step {n}: the batches came to an end")
            if opened is None:
                opened = stack.enter_context(
                    _replicas(model, criterion, threads, update[0]) if replicas is None
                    else replicas()
                )
                if opened.threads > 1 and any(find_parameters(criterion)):
                    raise ValueError("the criterion has parameters of its own: use threads=1")
            try:
                loss, count = train_step(
                    opened, criterion, optimizer, update, max_norm=max_norm, rng=rng
                )
            except FloatingPointError as error:
                raise FloatingPointError(f"step {n}: {error}") from None
            losses.append(loss)
            progress.step(loss, count)
            due = n % save_every == 0 or n == steps
            stop = bool(received)  # looked at once: a signal that comes later waits for the next
            if save is not None and (due or stop):
                _save(save, last=stop or n == steps)
            if stop:
                break
            if validate is not None and (n % validate_every == 0 or n == steps):
                progress.validation(validate())
        if received:
            stopped = received[0] != signal.SIGINT
            raise SystemExit(128 + received[0]) if stopped else KeyboardInterrupt
    return losses


def _replicas(
    model: Any, criterion: CrossEntropy, threads: int | None, batch: Batch
) -> Replicas:
    if threads is None and any(find_parameters(criterion)):  # in other processes copies would learn
        threads = 1
    return open_replicas(model, threads, *batch.targets.shape)


def open_replicas(model: Layer, threads: int | None, batch_size: int, length: int) -> Replicas:
    """Replicas(model, threads); None: as many threads as choose_threads says, if they can be had.

    Errors: those of Replicas, but not if threads is None: then one process has to do.
    """
    if threads is not None:
        return Replicas(model, threads)
    try:
        return Replicas(model, choose_threads(model, batch_size, length))
    except (OSError, ValueError):  # nobody asked for them
        return Replicas(model)


def _save(save: Callable[[], None], last: bool) -> None:
    try:
        save()
    except OSError as error:  # a full disk may be emptied before the next
        if last:
            raise
        warnings.warn(f"not saved: {error}", UserWarning, stacklevel=3)


@contextmanager
def _signals(catch: bool) -> Iterator[list[int]]:
    """A list that takes up Ctrl-C, SIGTERM and SIGHUP while the body runs, for their effect."""
    received: list[int] = []

    def receive(signum: int, frame: Any) -> None:
        if received and signum == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(signum)

    old: dict[int, Any] = {}
    if catch and threading.current_thread() is threading.main_thread():  # Python's condition
        hangup = getattr(signal, "SIGHUP", signal.SIGTERM)  # the terminal was closed
        for wanted in {signal.SIGINT, signal.SIGTERM, hangup}:
            if signal.getsignal(wanted) is not signal.SIG_IGN:  # as nohup and & leave it
                old[wanted] = signal.signal(wanted, receive)
    try:
        yield received
    finally:
        for signum, handler in old.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


class Progress:
    """One line on stderr that is written over: step, loss, tokens/s, time left.

    total: the number of steps in all, of which `done` were made before; loss: the one shown after
    them, or None if it is not known. Quiet if stderr is not a terminal. The loss shown is a running
    mean over about 50 steps. As a context manager it ends its line, also after an error.
    """

    def __init__(self, total: int, done: int = 0, loss: float | None = None) -> None:
        self.total = total
        self.done = done
        self.steps = done
        self.tokens = 0
        self.loss = 0.0 if loss is None else loss
        self.unknown = done if loss is None else 0  # steps that the loss says nothing of
        self.validation_loss: float | None = None
        self.start = time.monotonic()
        self.shown = -math.inf
        self.live = sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> Progress:
        self.start = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live and self.steps > self.done:
            self._show()
            sys.stderr.write("\n")

    def step(self, loss: float, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.loss += (loss - self.loss) / min(self.steps - self.unknown, 50)
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
        left = seconds / max(self.steps - self.done, 1) * (self.total - self.steps)
        text = f"step {self.steps}/{self.total}  loss {self.loss:.3f}"
        if self.validation_loss is not None:
            text += f"  validation {self.validation_loss:.3f}"
        minutes, rest = divmod(round(left), 60)
        return text + f"  {self.tokens_per_second():,.0f} tokens/s  {minutes}:{rest:02d} left"

    def _show(self) -> None:
        columns = shutil.get_terminal_size().columns - 1
        sys.stderr.write("\r" + str(self)[:columns].ljust(columns))
        sys.stderr.flush()
