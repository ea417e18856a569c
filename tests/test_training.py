"""The training loop: one step, many steps, evaluation, and the line on stderr."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from npdecoder import CrossEntropy, Embedding, Transformer, TransformerConfig
from npdecoder.optim import SGD, constant_schedule
from npdecoder.text import Batch, batches, make_batch
from npdecoder.training import Progress, evaluate, train, train_step

PAD, BOS, EOS = 0, 1, 2
V = 9
PairOfIds = tuple[list[int], list[int]]


def reversal(count: int = 24, seed: int = 0) -> list[PairOfIds]:
    """Pairs whose target is the source read backwards."""
    rng = np.random.default_rng(seed)
    sources = [rng.integers(3, V, rng.integers(1, 6)).tolist() for _ in range(count)]
    return [(source, source[::-1]) for source in sources]


def as_batch(pairs: list[PairOfIds]) -> Batch:
    return make_batch(pairs, PAD, BOS, EOS)


def transformer(seed: int = 0, dtype: Any = np.float32, **options: Any) -> Transformer:
    sizes = {"d_model": 8, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config = TransformerConfig(V, V, **{**sizes, "pad_id": PAD, "max_len": 12, **options})
    return Transformer(config, seed, dtype=dtype)


class Bigram(Embedding):
    """The smallest model: a token's row of the table is the logits of the next one."""

    def __init__(self) -> None:
        super().__init__(V, V, rng=0, dtype=np.float64)

    def forward(self, ids: Any, rng: Any = None) -> Any:
        return super().forward(ids)


def bigram_batch(*rows: list[int]) -> Batch:
    ids = np.array(rows)
    return Batch((ids[:, :-1],), ids[:, 1:])


def criterion(**options: Any) -> CrossEntropy:
    return CrossEntropy(ignore_index=PAD, **options)


def bits(model: Any) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in model.state_dict().items()}


def run(seed: int = 0, steps: int = 12, **options: Any) -> tuple[list[float], Any, SGD]:
    """Train a Transformer with dropout on the reversal."""
    model = transformer(seed, dropout=0.2)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    rng = np.random.default_rng(seed)
    losses = train(
        model,
        criterion(label_smoothing=0.1),
        optimizer,
        lambda: batches(reversal(), 5, rng, PAD, BOS, EOS),
        steps,
        **{"max_norm": 1.0, "rng": rng, "progress": None, **options},
    )
    return losses, model, optimizer


def limited(batch: Batch, most: int = 100) -> Callable[[], Iterator[Batch]]:
    """An epoch of this batch again and again; a loop that does not end runs into its end."""

    def epoch() -> Iterator[Batch]:
        for _ in range(most):
            yield batch
        raise AssertionError(f"more than {most} batches were asked for")

    return epoch


# One step


@pytest.mark.parametrize("options", [{}, {"norm": "post"}, {"tie_embeddings": "all"}])
def test_a_step_lowers_the_loss(options: dict[str, Any]) -> None:
    model, batch = transformer(**options), as_batch(reversal())
    optimizer = SGD(model.parameters(), 0.05)
    for _ in range(5):
        before = evaluate(model, criterion(), [batch])
        loss, count = train_step(model, criterion(), optimizer, batch)
        assert type(loss) is float
        assert loss == before  # the loss is that before the update
        assert count == int((batch.targets != PAD).sum())
        assert evaluate(model, criterion(), [batch]) < before
    assert optimizer.steps == 5


def test_a_step_is_lr_times_the_gradient() -> None:
    model, batch = Bigram(), bigram_batch([3, 4, 5, 3], [4, 4, PAD, PAD])
    before = model.W.value.copy()
    model.W.grad = np.full((V, V), 7.0)  # left over from elsewhere
    loss, count = train_step(model, criterion(), SGD(model.parameters(), 0.5), batch)
    assert count == 4
    p = np.exp(before) / np.exp(before).sum(axis=1, keepdims=True)
    pairs = [(3, 4), (4, 5), (5, 3), (4, 4)]
    expected = np.zeros((V, V))
    for a, b in pairs:
        expected[a] += (p[a] - np.eye(V)[b]) / 4
    np.testing.assert_allclose(model.W.value, before - 0.5 * expected, rtol=0, atol=1e-14)
    assert loss == pytest.approx(-np.mean([np.log(p[a, b]) for a, b in pairs]), abs=1e-14)


@pytest.mark.parametrize("max_norm", [1e-3, 0.1, 1e6, math.inf])
def test_max_norm_clips_the_gradient(max_norm: float) -> None:
    def norm(max_norm: float | None) -> float:
        model = transformer()
        train_step(model, criterion(), SGD(model.parameters(), 0.1), as_batch(reversal()),
                   max_norm=max_norm)
        return math.sqrt(sum(float((p.grad.astype(float) ** 2).sum()) for p in model.parameters()))

    free = norm(None)
    assert free > 0.2
    assert norm(max_norm) == pytest.approx(min(free, max_norm), rel=1e-5)


def test_dropout_comes_from_rng_alone() -> None:
    def loss(rng: np.random.Generator | None) -> float:
        model = transformer(dropout=0.5)
        return train_step(model, criterion(), SGD(model.parameters(), 0.1), as_batch(reversal()),
                          rng=rng)[0]

    assert loss(None) == loss(None) == evaluate(
        transformer(dropout=0.5), criterion(), [as_batch(reversal())]
    )
    assert loss(np.random.default_rng(1)) == loss(np.random.default_rng(1)) != loss(None)
    assert loss(np.random.default_rng(1)) != loss(np.random.default_rng(2))


def test_a_batch_without_targets_changes_nothing() -> None:
    """Fault B21: 0/0. The weights stay as they are, clipping and dropout included."""
    model = transformer(dropout=0.1)
    empty = as_batch(reversal())
    empty = Batch(empty.inputs, np.full_like(empty.targets, PAD))
    optimizer = SGD(model.parameters(), 0.1)
    before = bits(model)
    with np.errstate(all="raise"):
        loss, count = train_step(model, criterion(), optimizer, empty, max_norm=1.0,
                                 rng=np.random.default_rng(0))
    assert (loss, count) == (0.0, 0)
    assert bits(model) == before
    assert all(not p.grad.any() for p in model.parameters())


def test_batches_without_targets_between_others() -> None:
    batch = as_batch(reversal())
    empty = Batch(batch.inputs, np.full_like(batch.targets, PAD))
    model = transformer()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    losses = train(model, criterion(), optimizer, lambda: [batch, empty], 6, max_norm=1.0)
    assert np.isfinite(losses).all()
    assert losses[1::2] == [0.0] * 3
    assert losses[4] < losses[0]
    assert all(np.isfinite(p.value).all() for p in model.parameters())


# Many steps


def test_training_learns() -> None:
    model, batch = transformer(d_model=16), as_batch(reversal())
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    losses = train(model, criterion(), optimizer, lambda: [batch], 150, max_norm=1.0)
    assert len(losses) == 150
    assert all(type(loss) is float for loss in losses)
    assert losses[-1] < 0.5 * losses[0]
    assert evaluate(model, criterion(), [batch]) < losses[0] / 2


def test_the_losses_are_those_of_single_steps() -> None:
    model, other = transformer(), transformer()
    optimizer, other_optimizer = (SGD(m.parameters(), 0.1, 0.9) for m in (model, other))
    cut = [as_batch(reversal()[i : i + 6]) for i in range(0, 24, 6)]
    losses = train(model, criterion(), optimizer, lambda: cut, 10, max_norm=0.5)
    expected = [
        train_step(other, criterion(), other_optimizer, cut[i % 4], max_norm=0.5)[0]
        for i in range(10)
    ]
    assert losses == expected
    assert bits(model) == bits(other)


def test_equal_seeds_give_equal_runs() -> None:
    (losses, model, optimizer), (again, model2, optimizer2) = run(3), run(3)
    assert losses == again
    assert bits(model) == bits(model2)
    state, state2 = optimizer.state_dict(), optimizer2.state_dict()
    assert all(np.array_equal(state[name], state2[name]) for name in state)
    other, model3, _ = run(4)
    assert not set(other) & set(losses)
    assert bits(model3) != bits(model)


def test_validation_and_progress_do_not_change_the_run() -> None:
    losses, model, _ = run()
    validated, model2, _ = run(
        validate=lambda: evaluate(transformer(9), criterion(), [as_batch(reversal())]),
        validate_every=2,
        progress=Progress(12),
    )
    assert losses == validated
    assert bits(model) == bits(model2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_dtype_stays(dtype: Any) -> None:
    """Fault B43: a NumPy scalar makes float64 of float32."""
    model = transformer(dtype=dtype, dropout=0.1)
    optimizer = SGD(model.parameters(), np.float64(0.1), momentum=0.9, weight_decay=0.01)
    train(model, criterion(label_smoothing=0.1), optimizer, lambda: [as_batch(reversal())], 3,
          schedule=lambda n: np.float64(0.1) / n, max_norm=np.float64(0.5),
          rng=np.random.default_rng(0))
    arrays = [a for a in optimizer.state_dict().values() if isinstance(a, np.ndarray)]
    arrays += [a for p in model.parameters() for a in (p.value, p.grad)]
    assert len(arrays) == 3 * len(model.parameters())
    assert {array.dtype for array in arrays} == {np.dtype(dtype)}


def test_the_schedule_counts_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault B25: update n uses schedule(n), n = 1, 2, ..."""
    model = Bigram()
    optimizer = SGD(model.parameters(), 123.0)
    asked: list[int] = []
    used: list[float] = []

    def schedule(n: int) -> float:
        asked.append(n)
        return 0.1 / n

    step = optimizer.step
    monkeypatch.setattr(optimizer, "step", lambda: (used.append(optimizer.lr), step()))
    train(model, criterion(), optimizer, limited(bigram_batch([3, 4, 5])), 5, schedule=schedule)
    assert asked == [1, 2, 3, 4, 5]
    assert used == [0.1 / n for n in asked]


def test_the_warm_up_uses_its_first_value() -> None:
    model = Bigram()
    before = model.W.value.copy()
    optimizer = SGD(model.parameters(), 1.0)
    train(model, criterion(), optimizer, limited(bigram_batch([3, 4])), 1,
          schedule=constant_schedule(1.0, warmup=4))
    np.testing.assert_allclose(model.W.value, before - 0.25 * model.W.grad, rtol=0, atol=1e-15)


def test_without_a_schedule_the_lr_stays() -> None:
    model = Bigram()
    optimizer = SGD(model.parameters(), 0.3)
    train(model, criterion(), optimizer, limited(bigram_batch([3, 4])), 3)
    assert optimizer.lr == 0.3
    assert optimizer.steps == 3


@pytest.mark.parametrize(
    ("steps", "every", "at"),
    [(10, 3, [3, 6, 9, 10]), (10, 5, [5, 10]), (10, 1, list(range(1, 11))), (4, 100, [4]),
     (1, 1, [1])],
)
def test_when_validation_comes(steps: int, every: int, at: list[int]) -> None:
    model = Bigram()
    optimizer = SGD(model.parameters(), 0.1)
    seen: list[int] = []

    def validate() -> float:
        seen.append(optimizer.steps)
        return float(len(seen))

    progress = Progress(steps)
    losses = train(model, criterion(), optimizer, limited(bigram_batch([3, 4])), steps,
                   validate=validate, validate_every=every, progress=progress)
    assert seen == at
    assert progress.validation_loss == len(at)
    assert len(losses) == steps


def test_epochs_follow_one_another() -> None:
    model = Bigram()
    epochs: list[int] = []

    def epoch() -> Iterable[Batch]:
        epochs.append(len(epochs))
        return iter([bigram_batch([3, 4]), bigram_batch([4, 5]), bigram_batch([5, 3])])

    losses = train(model, criterion(), SGD(model.parameters(), 0.1), epoch, 7)
    assert len(losses) == 7
    assert epochs == [0, 1, 2]


def test_an_empty_epoch() -> None:
    model = Bigram()
    optimizer = SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="no batches"):
        train(model, criterion(), optimizer, lambda: [], 3)
    once = iter([bigram_batch([3, 4])])  # used up after the first epoch
    with pytest.raises(ValueError, match="no batches"):
        train(model, criterion(), optimizer, lambda: once, 3)
    assert optimizer.steps == 1


@pytest.mark.parametrize(("steps", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError),
                                              (True, TypeError)])
@pytest.mark.parametrize("own_progress", [False, True])
def test_bad_steps(steps: Any, error: type[Exception], own_progress: bool) -> None:
    model = Bigram()
    with pytest.raises(error, match="steps"):
        train(model, criterion(), SGD(model.parameters(), 0.1), limited(bigram_batch([3, 4])),
              steps, progress=Progress(1) if own_progress else None)


@pytest.mark.parametrize("every", [0, -1])
def test_a_bad_validate_every(every: int) -> None:
    model = Bigram()
    with pytest.raises(ValueError, match="validate_every"):
        train(model, criterion(), SGD(model.parameters(), 0.1), limited(bigram_batch([3, 4])), 3,
              validate=lambda: 0.0, validate_every=every)


class Bad(CrossEntropy):
    """From call `at` on the loss, and with it the gradient, is `value`."""

    def __init__(self, at: int, value: float) -> None:
        super().__init__(ignore_index=PAD)
        self.calls, self.at, self.value = 0, at, value

    def forward(self, logits: Any, targets: Any) -> Any:
        self.calls += 1
        loss, ctx = super().forward(logits, targets)
        return (loss if self.calls < self.at else self.value), ctx

    def backward(self, ctx: Any, dloss: float = 1.0) -> Any:
        dlogits = super().backward(ctx, dloss)
        return dlogits if self.calls < self.at else dlogits * np.nan


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_loss_that_is_not_finite(value: float, max_norm: float | None) -> None:
    """It stops the run at once, and the weights are those from before that step."""
    model = Bigram()
    seen: list[dict[str, bytes]] = []

    def epoch() -> Iterator[Batch]:
        for _ in range(10):
            seen.append(bits(model))
            yield bigram_batch([3, 4, 5])

    with pytest.raises(FloatingPointError, match=r"step 3\b"):
        train(model, Bad(3, value), SGD(model.parameters(), 0.1, 0.9), epoch, 8, max_norm=max_norm)
    assert len(seen) == 3
    assert seen[2] != seen[1]
    assert np.isfinite(model.W.value).all()
    assert bits(model) == seen[2]


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_an_infinite_gradient_of_a_finite_loss(max_norm: float | None) -> None:
    """The weights stay: an update would make them infinite, and only the next loss would tell."""

    class Overflowing(CrossEntropy):
        def backward(self, ctx: Any, dloss: float = 1.0) -> Any:
            return super().backward(ctx, dloss) * np.inf

    model = Bigram()
    before = bits(model)
    with pytest.raises(FloatingPointError, match="gradient norm"), np.errstate(invalid="ignore"):
        train_step(
            model,
            Overflowing(),
            SGD(model.parameters(), 0.1, 0.9),
            bigram_batch([3, 4, 5]),
            max_norm=max_norm,
        )
    assert bits(model) == before


# Evaluation


def cut(pairs: list[PairOfIds], *sizes: int) -> list[Batch]:
    ends = np.cumsum(sizes).tolist()
    return [as_batch(pairs[end - size : end]) for size, end in zip(sizes, ends)]


@pytest.mark.parametrize("sizes", [(24,), (1, 23), (5, 1, 2, 16), (1,) * 24])
def test_every_target_counts_the_same(sizes: tuple[int, ...]) -> None:
    """Fault B23: a mean of means."""
    model, pairs = transformer(dtype=np.float64), reversal()
    one = np.float64(evaluate(model, criterion(), [as_batch(pairs)]))
    assert evaluate(model, criterion(), cut(pairs, *sizes)) == pytest.approx(one, abs=1e-12)
    total = count = 0.0
    for source, target in pairs:
        logits = model(np.array([[*source, EOS]]), np.array([[BOS, *target]]))[0]
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        total -= log_p[np.arange(len(target) + 1), [*target, EOS]].sum()
        count += len(target) + 1
    assert one == pytest.approx(total / count, abs=1e-12)


def test_evaluation_of_nothing_is_zero() -> None:
    model, batch = transformer(), as_batch(reversal())
    ignored = Batch(batch.inputs, np.full_like(batch.targets, PAD))
    assert evaluate(model, criterion(), []) == 0.0
    assert evaluate(model, criterion(), [ignored]) == 0.0
    assert evaluate(model, criterion(), [as_batch([])]) == 0.0
    expected = evaluate(model, criterion(), [batch])
    assert evaluate(model, criterion(), iter([ignored, batch, ignored])) == expected > 0


def test_evaluation_takes_a_function_and_changes_nothing() -> None:
    model, batch = transformer(dropout=0.9), as_batch(reversal())
    before = bits(model)
    loss = evaluate(model, criterion(), [batch])
    assert type(loss) is float
    assert loss == evaluate(model, criterion(), [batch])
    assert loss == evaluate(lambda *ids: model(*ids), criterion(), [batch])
    assert bits(model) == before
    assert all(p._grad is None for p in model.parameters())


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in place of stderr, and a clock that goes on by a second each time it is read.

    (No fixture: pytest puts its own stderr back before the test begins.)
    """
    stream = Terminal()
    seconds = iter(range(10**6))
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("npdecoder.training.time.monotonic", lambda: float(next(seconds)))
    return stream


def train_bigram(steps: int, **options: Any) -> Any:
    model = Bigram()
    return train(model, options.pop("criterion", criterion()), SGD(model.parameters(), 0.1),
                 limited(bigram_batch([3, 4, 5])), steps, **options)


def test_progress_is_quiet_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    train_bigram(5)
    train_bigram(5, progress=Progress(5), validate=lambda: 1.0)
    with pytest.raises(FloatingPointError):
        train_bigram(5, criterion=Bad(3, math.nan))
    assert capsys.readouterr() == ("", "")


def test_progress_without_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert len(train_bigram(5)) == 5


def test_progress_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = on_a_terminal(monkeypatch)
    losses = train_bigram(4, validate=lambda: 1.25, validate_every=2)
    text = terminal.getvalue()
    assert text.endswith("\n")
    assert text.count("\n") == 1
    first, *_, last = [line for line in text.strip().split("\r") if line]
    assert "step 1/4" in first
    assert f"{losses[0]:.3f}" in first
    assert re.search(r"[\d,]+ tokens/s", first)
    assert re.search(r"\d+:\d\d left", first)
    assert "validation" not in first
    assert "step 4/4" in last
    assert f"{np.mean(losses):.3f}" in last
    assert "validation 1.250" in last
    assert "0:00 left" in last
    assert capsys.readouterr().out == ""


def test_progress_counts_tokens_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("npdecoder.training.time.monotonic", lambda: clock[0])
    with Progress(1000) as progress:
        for _ in range(100):
            clock[0] += 2.0
            progress.step(3.0, 5000)
        assert progress.tokens_per_second() == 2500.0
        assert str(progress) == "step 100/1000  loss 3.000  2,500 tokens/s  30:00 left"


def test_the_loss_shown_is_a_running_mean() -> None:
    progress = Progress(100)
    for loss in (1.0, 2.0, 6.0):
        progress.step(loss, 1)
    assert progress.loss == pytest.approx(3.0)
    for _ in range(1000):
        progress.step(0.5, 1)
    assert progress.loss == pytest.approx(0.5, abs=1e-3)


def test_the_line_is_not_written_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    clock = [0.0]
    monkeypatch.setattr("npdecoder.training.time.monotonic", lambda: clock[0])
    with Progress(1000) as progress:
        for _ in range(1000):
            clock[0] += 0.001
            progress.step(1.0, 1)
    assert 2 <= terminal.getvalue().count("\r") <= 12


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_the_line_ends_after_an_error(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    terminal = on_a_terminal(monkeypatch)

    def validate() -> float:
        raise error

    with pytest.raises(error):
        train_bigram(10, validate=validate, validate_every=3)
    assert terminal.getvalue().endswith("\n")
    assert terminal.getvalue().count("\n") == 1
    assert "step 3/10" in terminal.getvalue()


def test_no_line_where_there_was_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    with pytest.raises(ValueError, match="no batches"):
        train(Bigram(), criterion(), SGD(Bigram().parameters(), 0.1), lambda: [], 3)
    assert terminal.getvalue() == ""
