"""The training loop: one step, many steps, stopping and going on, evaluation, and the progress."""

from __future__ import annotations

import copy
import io
import itertools
import math
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from npdecoder import (
    CrossEntropy,
    Embedding,
    LanguageModel,
    LanguageModelConfig,
    Linear,
    Transformer,
    TransformerConfig,
)
from npdecoder.optim import (
    SGD,
    Adam,
    AdamW,
    Optimizer,
    clip_grad_norm,
    constant_schedule,
    decay_groups,
    noam_schedule,
)
from npdecoder.text import Batch, batches, make_batch, windows
from npdecoder.training import BatchStream, Progress, evaluate, train, train_step

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


def cut(pairs: list[PairOfIds], *sizes: int) -> list[Batch]:
    ends = np.cumsum(sizes).tolist()
    return [as_batch(pairs[end - size : end]) for size, end in zip(sizes, ends)]


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
    stream = BatchStream(
        lambda rng: batches(reversal(), 5, rng, PAD, BOS, EOS), np.random.default_rng(seed)
    )
    losses = train(
        model,
        criterion(label_smoothing=0.1),
        optimizer,
        stream,
        steps,
        **{"max_norm": 1.0, "rng": np.random.default_rng(seed + 100), **options},
    )
    return losses, model, optimizer


def limited(*given: Batch, most: int = 100) -> Iterator[Batch]:
    """These batches again and again; a loop that does not end runs into the end of them."""
    yield from itertools.islice(itertools.cycle(given), most)
    raise AssertionError(f"more than {most} batches were asked for")


def train_bigram(steps: int, model: Any = None, **options: Any) -> list[float]:
    """Train a Bigram on one batch, unless the options say otherwise."""
    model = Bigram() if model is None else model
    given = {
        "criterion": criterion(),
        "optimizer": SGD(model.parameters(), 0.1),
        "batches": limited(bigram_batch([3, 4, 5])),
    }
    return train(model, steps=steps, **{**given, **options})


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


def test_a_step_on_no_batch_is_refused() -> None:
    model = Bigram()
    before, optimizer = bits(model), SGD(model.parameters(), 0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"^batch is an empty list"):
        train_step(model, criterion(), optimizer, [])
    assert (bits(model), optimizer.steps) == (before, 0)


def test_batches_without_targets_between_others() -> None:
    batch = as_batch(reversal())
    empty = Batch(batch.inputs, np.full_like(batch.targets, PAD))
    model = transformer()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    losses = train(model, criterion(), optimizer, limited(batch, empty), 6, max_norm=1.0)
    assert np.isfinite(losses).all()
    assert losses[1::2] == [0.0] * 3
    assert losses[4] < losses[0]
    assert all(np.isfinite(p.value).all() for p in model.parameters())


# Several batches in one update


class Logits(Linear):
    """A Linear as a model: x -> logits."""

    def forward(self, x: Any, rng: Any = None) -> Any:
        return super().forward(x)


def one_update(model: Any, batch: Any, loss: CrossEntropy) -> tuple[float, int, dict[str, Any]]:
    """The loss, the count and the gradients of train_step, which leaves the weights alone."""
    value, count = train_step(model, loss, SGD(model.parameters(), 0.0), batch)
    assert type(value) is float
    return value, count, {name: p.grad.copy() for name, p in model.named_parameters()}


def assert_one_update(model: Any, parts: Any, whole: Batch, loss: CrossEntropy) -> None:
    """The parts make the same update as the whole, to 1e-14."""
    expected_loss, expected_count, expected = one_update(model, whole, loss)
    found_loss, found_count, found = one_update(model, parts, loss)
    assert found_loss == pytest.approx(expected_loss, rel=0, abs=1e-14)
    assert found_count == expected_count
    for name, grad in expected.items():
        np.testing.assert_allclose(found[name], grad, rtol=0, atol=1e-14, err_msg=name)
        assert grad.any()


def ignored(batch: Batch) -> Batch:
    return Batch(batch.inputs, np.full_like(batch.targets, PAD))


def test_the_loss_of_micro_batches_is_no_mean_of_means() -> None:
    """One target in the first, three in the second: the first would count three times too much."""
    model = Logits(2, 2, bias=False, dtype=np.float64)
    model.W.value = np.transpose([[0.1, -0.2], [0.3, 0.4]])
    first = Batch((np.array([[1.0, 0.0]]),), np.array([0]))
    second = Batch((np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 0.0]]),), np.array([1, 1, 0]))
    whole = Batch((np.concatenate([first.inputs[0], second.inputs[0]]),), np.array([0, 1, 1, 0]))
    row = np.array([-0.35929594966624856, 0.16609230316164802])
    for parts in ([first, second], [second, first], (first, second), whole, [whole]):
        loss, count, grads = one_update(model, parts, CrossEntropy())
        assert loss == pytest.approx(0.629935684553802, rel=0, abs=1e-14)
        assert count == 4
        np.testing.assert_allclose(grads["W"].T, [row, -row], rtol=0, atol=1e-14)
    means = [one_update(model, part, CrossEntropy()) for part in (first, second)]
    assert np.mean([loss for loss, *_ in means]) == pytest.approx(0.6860034128, abs=1e-9)
    wrong = np.mean([grads["W"].T[0] for *_, grads in means], axis=0)
    assert wrong == pytest.approx([-0.4228, 0.1107], abs=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("sizes", [(24,), (1, 23), (7, 7, 7, 3), (5, 1, 2, 16), (1,) * 24])
def test_micro_batches_are_one_batch(sizes: tuple[int, ...], smoothing: float) -> None:
    """Sentences of unequal lengths, padded less in the parts than in the whole."""
    model, pairs = transformer(dtype=np.float64), reversal()
    loss = criterion(label_smoothing=smoothing)
    parts = cut(pairs, *sizes)
    assert_one_update(model, parts, as_batch(pairs), loss)
    empty = ignored(parts[0])
    assert_one_update(model, [empty, *parts, empty], as_batch(pairs), loss)
    between = [batch for part in parts for batch in (part, empty)]
    assert_one_update(model, between, as_batch(pairs), loss)


def test_ignored_targets_of_micro_batches_do_not_count() -> None:
    rng = np.random.default_rng(0)
    model = Logits(3, 5, rng=1, dtype=np.float64)
    x, targets = rng.standard_normal((11, 3)), rng.integers(1, 5, 11)
    targets[[0, 1, 2, 4, 9]] = PAD
    whole = Batch((x,), targets)
    for edges in ([0, 3, 11], [0, 1, 4, 11], [0, 5, 10, 11], range(12)):
        parts = [Batch((x[a:b],), targets[a:b]) for a, b in itertools.pairwise(edges)]
        assert_one_update(model, parts, whole, criterion())
        assert one_update(model, parts, criterion())[1] == 6


def test_one_batch_is_computed_as_ever() -> None:
    """Bit for bit: alone, in a list, and written out."""
    batch = as_batch(reversal())
    results = []
    for update in ("written out", batch, [batch]):
        model, loss = transformer(dropout=0.3), criterion(label_smoothing=0.1)
        optimizer = SGD(model.parameters(), 0.1, 0.9, 0.01)
        rng, losses = np.random.default_rng(5), []
        for _ in range(3):
            if update == "written out":
                optimizer.zero_grad()
                logits, ctx = model.forward(*batch.inputs, rng=rng)
                value, loss_ctx = loss.forward(logits, batch.targets)
                model.backward(ctx, loss.backward(loss_ctx))
                clip_grad_norm(optimizer.parameters(), 0.5)
                optimizer.step()
                losses.append((float(value), loss_ctx.count))
            else:
                losses.append(train_step(model, loss, optimizer, update, max_norm=0.5, rng=rng))
        results.append((losses, bits(model)))
    assert results[0] == results[1] == results[2]


def test_micro_batches_are_clipped_together_and_drop_out_one_after_the_other() -> None:
    first, second = cut(reversal(), 20, 4)
    model, other = (transformer(dropout=0.3, dtype=np.float64) for _ in range(2))
    rng, other_rng = (np.random.default_rng(3) for _ in range(2))
    train_step(model, criterion(), SGD(model.parameters(), 0.1), [first, second], max_norm=0.1,
               rng=rng)
    counts = [criterion().count(batch.targets) for batch in (first, second)]
    for batch, count in zip((first, second), counts):
        logits, ctx = other.forward(*batch.inputs, rng=other_rng)
        _, loss_ctx = criterion().forward(logits, batch.targets)
        other.backward(ctx, criterion().backward(loss_ctx, count / sum(counts)))
    assert clip_grad_norm(other.parameters(), 0.1) > 0.1
    for p, q in zip(model.parameters(), other.parameters()):
        np.testing.assert_allclose(p.grad, q.grad, rtol=0, atol=1e-14)
    assert rng.bit_generator.state == other_rng.bit_generator.state


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_later_micro_batch_that_is_not_finite(value: float) -> None:
    model = Bigram()
    before = bits(model)
    with pytest.raises(FloatingPointError, match="the loss is"):
        train_step(model, Bad(2, value), SGD(model.parameters(), 0.1),
                   [bigram_batch([3, 4]), bigram_batch([4, 5])])
    assert bits(model) == before


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_accumulate_takes_that_many_batches_for_an_update(accumulate: int) -> None:
    parts = cut(reversal(), 5, 1, 2, 9, 3, 4)
    model, other = transformer(), transformer()
    taken: list[int] = []

    def stream() -> Iterator[Batch]:
        for i, batch in enumerate(limited(*parts)):
            taken.append(i)
            yield batch

    optimizer, other_optimizer = (AdamW(m.parameters(), 0.01) for m in (model, other))
    losses = train(model, criterion(), optimizer, stream(), 4, accumulate=accumulate, max_norm=0.5)
    assert len(losses) == optimizer.steps == 4
    assert len(taken) == 4 * accumulate
    source = itertools.cycle(parts)
    for loss in losses:
        together = list(itertools.islice(source, accumulate))
        assert loss == train_step(other, criterion(), other_optimizer, together, max_norm=0.5)[0]
    assert bits(model) == bits(other)


# Many steps


def test_training_learns() -> None:
    model, batch = transformer(d_model=16), as_batch(reversal())
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    losses = train(model, criterion(), optimizer, itertools.repeat(batch), 150, max_norm=1.0)
    assert len(losses) == 150
    assert all(type(loss) is float for loss in losses)
    assert losses[-1] < 0.5 * losses[0]
    assert evaluate(model, criterion(), [batch]) < losses[0] / 2


def test_the_losses_are_those_of_single_steps() -> None:
    model, other = transformer(), transformer()
    optimizer, other_optimizer = (SGD(m.parameters(), 0.1, 0.9) for m in (model, other))
    cut = [as_batch(reversal()[i : i + 6]) for i in range(0, 24, 6)]
    losses = train(model, criterion(), optimizer, limited(*cut), 10, max_norm=0.5)
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
    train(model, criterion(label_smoothing=0.1), optimizer, limited(as_batch(reversal())), 3,
          schedule=lambda n: np.float64(0.1) / n, max_norm=np.float64(0.5),
          rng=np.random.default_rng(0))
    arrays = [a for a in optimizer.state_dict().values() if isinstance(a, np.ndarray)]
    arrays += [a for p in model.parameters() for a in (p.value, p.grad)]
    assert len(arrays) == 3 * len(model.parameters())
    assert {array.dtype for array in arrays} == {np.dtype(dtype)}


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("make", [SGD, Adam, AdamW])
def test_the_row_of_padding_gets_no_gradient_and_only_weight_decay_moves_it(
    make: Any, weight_decay: float
) -> None:
    """Three steps with momentum. SGD and AdamW shrink it; Adam moves each number by lr."""
    model, pairs = transformer(dropout=0.1, dtype=np.float64), reversal()
    options = {"momentum": 0.9} if make is SGD else {}
    optimizer = make(model.parameters(), 0.01, weight_decay=weight_decay, **options)
    before = {name: p.value.copy() for name, p in model.named_parameters()}
    for _ in range(3):
        batch = as_batch(pairs)
        assert all((ids == PAD).any() for ids in (*batch.inputs, batch.targets))
        train_step(model, criterion(), optimizer, batch, rng=np.random.default_rng(0))
        assert not model.source_embedding.W.grad[PAD].any()
        assert not model.target_embedding.W.grad[PAD].any()
    for name in ("source_embedding.W", "target_embedding.W"):
        row, was = dict(model.named_parameters())[name].value[PAD], before[name][PAD]
        others = dict(model.named_parameters())[name].value[3:]
        assert (others != before[name][3:]).all()
        if weight_decay == 0.0:
            assert np.array_equal(row, was)
        elif make is AdamW:
            np.testing.assert_allclose(row, was * (1.0 - 0.01 * weight_decay) ** 3, rtol=1e-14)
        elif make is SGD:
            assert (np.abs(row) < np.abs(was)).all()
        else:
            assert (np.abs(row - was) > 0.02).all()


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


@pytest.mark.parametrize(("steps", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError),
                                              (True, TypeError)])
@pytest.mark.parametrize("own_progress", [False, True])
def test_bad_steps(steps: Any, error: type[Exception], own_progress: bool) -> None:
    model = Bigram()
    with pytest.raises(error, match="steps"):
        train(model, criterion(), SGD(model.parameters(), 0.1), limited(bigram_batch([3, 4])),
              steps, progress=Progress(1) if own_progress else None)


@pytest.mark.parametrize("name", ["validate_every", "save_every", "accumulate"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError),
                                              (True, TypeError), (None, TypeError)])
def test_other_counts_are_checked(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        train_bigram(3, validate=lambda: 0.0, save=lambda: None, **{name: value})


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

    def stream() -> Iterator[Batch]:
        for batch in limited(bigram_batch([3, 4, 5])):
            seen.append(bits(model))
            yield batch

    optimizer = SGD(model.parameters(), 0.1, 0.9)
    with pytest.raises(FloatingPointError, match=r"step 3\b"):
        train(model, Bad(3, value), optimizer, stream(), 8, max_norm=max_norm)
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


# Batches without end: a stream of passes over the data

IDS = np.random.default_rng(17).integers(1, 11, 61)


def eager(rng: np.random.Generator) -> Iterable[Batch]:
    """A pass of 5 batches, all of whose numbers are drawn at its beginning."""
    return windows(IDS, 4, 3, rng)


def lazy(rng: np.random.Generator) -> Iterable[Batch]:
    """A pass of 3 to 6 batches, each drawn when it is asked for."""
    for _ in range(rng.integers(3, 7)):
        ids = rng.integers(1, 11, (2, 5))
        yield Batch((ids[:, :-1],), ids[:, 1:])


def listed(rng: np.random.Generator) -> Iterable[Batch]:
    """A pass of 4 batches in a list, always the same."""
    return [bigram_batch([i, i + 1]) for i in range(4)]


EPOCHS = [eager, lazy, listed]


def take(stream: Iterator[Batch], count: int) -> list[list[Any]]:
    return [
        [array.tolist() for array in (*inputs, targets)]
        for inputs, targets in itertools.islice(stream, count)
    ]


@pytest.mark.parametrize("epoch", EPOCHS)
def test_a_stream_is_one_pass_after_another(epoch: Callable[..., Iterable[Batch]]) -> None:
    stream = BatchStream(epoch, np.random.default_rng(3))
    assert iter(stream) is stream
    rng = np.random.default_rng(3)
    expected = [batch for _ in range(5) for batch in epoch(rng)]
    assert take(stream, len(expected)) == take(iter(expected), len(expected))
    first, second = take(iter(epoch(np.random.default_rng(3))), 9), take(stream, 9)
    assert (second[: len(first)] == first) == (epoch is listed)  # passes differ if they draw


@pytest.mark.parametrize("epoch", EPOCHS)
def test_a_stream_goes_on_from_any_place(epoch: Callable[..., Iterable[Batch]]) -> None:
    """Before the first batch, within a pass, at its end, and after the first of the next."""
    whole = take(BatchStream(epoch, np.random.default_rng(3)), 24)
    for place in range(20):
        stream = BatchStream(epoch, np.random.default_rng(3))
        take(stream, place)
        state = stream.state_dict()
        fresh = BatchStream(epoch, np.random.default_rng(99))
        take(fresh, 2)
        fresh.load_state_dict(state)
        saved_again = fresh.state_dict()
        assert take(fresh, 24 - place) == whole[place:]
        assert take(stream, 24 - place) == whole[place:]  # which asking for the state left alone
        fresh.load_state_dict(saved_again)
        assert take(fresh, 24 - place) == whole[place:]


@pytest.mark.parametrize("epoch", EPOCHS)
def test_the_state_of_a_stream_is_a_copy(epoch: Callable[..., Iterable[Batch]]) -> None:
    stream = BatchStream(epoch, np.random.default_rng(3))
    take(stream, 2)
    state, same = stream.state_dict(), stream.state_dict()
    expected = take(stream, 9)
    assert state.keys() == {"rng", "taken"}
    assert (type(state["taken"]), state["taken"]) == (int, 2)
    for _ in range(2):  # neither going on from it nor drawing from what it holds changes it
        fresh = BatchStream(epoch, np.random.default_rng(0))
        fresh.load_state_dict(state)
        assert take(fresh, 9) == expected
    assert state["rng"].bit_generator.state == same["rng"].bit_generator.state
    fresh.load_state_dict(state)
    state["rng"].random(7)
    assert take(fresh, 9) == expected
    fresh.load_state_dict(same)
    fresh.state_dict()["rng"].random(7)
    assert take(fresh, 9) == expected


def test_the_taken_batches_are_counted_within_their_pass() -> None:
    stream = BatchStream(listed, np.random.default_rng(0))
    counts = []
    for _ in range(9):
        counts.append(stream.state_dict()["taken"])
        take(stream, 1)
    assert counts == [0, 1, 2, 3, 4, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (None, ValueError, "place in the data"),
        ([], ValueError, "place in the data"),
        ({}, ValueError, "place in the data"),
        ({"taken": 1}, ValueError, "rng"),
        ({"rng": np.random.default_rng(0)}, ValueError, "taken"),
        ({"rng": np.random.default_rng(0), "taken": 1, "more": 2}, ValueError, "place in the data"),
        ({"rng": 7, "taken": 1}, ValueError, "rng"),
        ({"rng": None, "taken": 1}, ValueError, "rng"),
        ({"rng": np.random.default_rng(0), "taken": -1}, ValueError, "taken"),
        ({"rng": np.random.default_rng(0), "taken": 1.0}, TypeError, "taken"),
        ({"rng": np.random.default_rng(0), "taken": True}, TypeError, "taken"),
        ({"rng": np.random.default_rng(0), "taken": None}, TypeError, "taken"),
    ],
)
def test_a_bad_place_is_refused_and_changes_nothing(
    state: Any, error: type[Exception], words: str
) -> None:
    stream, same = (BatchStream(eager, np.random.default_rng(3)) for _ in range(2))
    take(stream, 2)
    with pytest.raises(error, match=words):
        stream.load_state_dict(state)
    assert take(stream, 9) == take(same, 11)[2:]


def test_a_pass_without_batches() -> None:
    stream = BatchStream(lambda rng: [], np.random.default_rng(0))
    for _ in range(2):
        with pytest.raises(ValueError, match="no batches"):
            next(stream)
    once = iter([bigram_batch([3, 4])])  # used up after the first pass
    model = Bigram()
    optimizer = SGD(model.parameters(), 0.1)
    stream = BatchStream(lambda rng: once, np.random.default_rng(0))
    with pytest.raises(ValueError, match="no batches"):
        train_bigram(3, model, optimizer=optimizer, batches=stream)
    assert optimizer.steps == 1


def test_batches_that_come_to_an_end() -> None:
    """An error that says so: StopIteration would end a loop around the training in silence."""
    model = Bigram()
    optimizer = SGD(model.parameters(), 0.1)
    given = [bigram_batch([3, 4])] * 3
    with pytest.raises(ValueError, match="batches"):
        train_bigram(3, model, optimizer=optimizer, batches=iter(given), accumulate=2)
    assert optimizer.steps == 1  # and none of the one that is left


# Training in two parts


def sgd(model: Any) -> Optimizer:
    return SGD(model.parameters(), 1.0, momentum=0.9, weight_decay=0.01)


def adam(model: Any) -> Optimizer:
    return Adam(model.parameters(), 1.0, betas=(0.8, 0.95), weight_decay=0.01)


def adamw(model: Any) -> Optimizer:
    return AdamW(decay_groups(model.parameters(), 0.1), 1.0)


class Run:
    """A small language model with dropout, and all that its training changes."""

    def __init__(self, make: Callable[[Any], Optimizer], epoch: Any, seed: int = 0) -> None:
        config = LanguageModelConfig(
            11, d_model=8, num_heads=2, num_layers=1, max_len=6, dropout=0.3, pad_id=PAD
        )
        self.model = LanguageModel(config, seed)
        self.optimizer = make(self.model)
        self.stream = BatchStream(epoch, np.random.default_rng((seed, 1)))
        self.rng = np.random.default_rng((seed, 2))
        self.rates: list[float] = []

    def train(self, steps: int, **options: Any) -> list[float]:
        noam = noam_schedule(8, 4, factor=0.1)

        def schedule(n: int) -> float:
            self.rates.append(noam(n))
            return self.rates[-1]

        return train(self.model, criterion(label_smoothing=0.1), self.optimizer, self.stream, steps,
                     schedule=schedule, max_norm=0.3, rng=self.rng, **options)

    def go_on_from(self, other: Run, forget: str = "") -> None:
        for name in {"model", "optimizer", "stream"} - {forget}:
            getattr(self, name).load_state_dict(getattr(other, name).state_dict())
        if forget != "rng":
            self.rng = copy.deepcopy(other.rng)

    def bits(self) -> dict[str, Any]:
        found: dict[str, Any] = bits(self.model)
        found |= {k: np.asarray(v).tobytes() for k, v in self.optimizer.state_dict().items()}
        found |= {"rng": self.rng.bit_generator.state, "taken": self.stream.state_dict()["taken"]}
        found["pass"] = self.stream.state_dict()["rng"].bit_generator.state
        return found


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("epoch", [eager, lazy])
@pytest.mark.parametrize("make", [sgd, adam, adamw])
def test_a_training_in_two_parts_is_the_training_in_one(
    make: Callable[[Any], Optimizer], epoch: Any, accumulate: int
) -> None:
    """Bit for bit, wherever it is cut, by the same objects and by new ones from its state."""
    whole = Run(make, epoch)
    losses = whole.train(10, accumulate=accumulate)
    assert len(set(losses)) == 10
    for at in (1, 5, 9):
        first = Run(make, epoch)
        begun = first.train(at, accumulate=accumulate)
        second = Run(make, epoch, seed=7)
        second.go_on_from(first)
        for run, rates in (first, whole.rates), (second, whole.rates[at:]):
            rest = run.train(10, accumulate=accumulate)
            assert begun + rest == losses
            assert run.rates == rates
            assert run.bits() == whole.bits()


@pytest.mark.parametrize("forgotten", ["model", "optimizer", "stream", "rng"])
def test_each_part_of_the_state_is_needed(forgotten: str) -> None:
    """The comparison above can fail: it does if any one of them begins anew."""
    whole, first, second = (Run(adam, eager) for _ in range(3))
    losses = whole.train(10)
    first.train(6)
    second.go_on_from(first, forget=forgotten)
    if forgotten == "optimizer":
        second.optimizer.steps = 6
    assert second.train(10) != losses[6:]
    assert bits(second.model) != bits(whole.model)


def test_nothing_is_left_to_do() -> None:
    """steps counts the updates in all, so that a finished training makes none."""
    model = Bigram()
    optimizer = SGD(model.parameters(), 0.1)
    assert len(train_bigram(5, model, optimizer=optimizer)) == 5
    before = bits(model)
    refused = limited(bigram_batch([3, 4]), most=0)
    for steps in (5, 3):
        assert train_bigram(steps, model, optimizer=optimizer, batches=refused) == []
    assert (optimizer.steps, bits(model)) == (5, before)


# Saving


class Saves:
    """A small training that notes down when it saves."""

    def __init__(self) -> None:
        self.model = Bigram()
        self.optimizer = SGD(self.model.parameters(), 0.1)
        self.at: list[int] = []

    def save(self) -> None:
        self.at.append(self.optimizer.steps)

    def train(self, steps: int, **options: Any) -> list[float]:
        return train_bigram(steps, self.model, optimizer=self.optimizer,
                            **{"save": self.save, **options})


@pytest.mark.parametrize(
    ("steps", "every", "at"),
    [(10, 3, [3, 6, 9, 10]), (10, 5, [5, 10]), (4, 1, [1, 2, 3, 4]), (4, 100, [4]), (1, 1, [1])],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_when_it_saves(steps: int, every: int, at: list[int], accumulate: int) -> None:
    run = Saves()
    run.train(steps, save_every=every, accumulate=accumulate)
    assert run.at == at


def test_when_a_training_in_two_parts_saves() -> None:
    run = Saves()
    run.train(5, save_every=4)
    run.train(13, save_every=4)
    assert run.at == [4, 5, 8, 12, 13]


def test_what_is_saved_is_the_update_and_its_place() -> None:
    """Not the one before: weights, losses, batches taken and the running loss belong together."""
    run = Run(adam, eager)
    progress = Progress(7)
    seen: list[Any] = []
    run.train(7, accumulate=2, save_every=3, progress=progress,
              save=lambda: seen.append((run.bits(), progress.loss)))
    for (saved, loss), steps in zip(seen, (3, 6, 7), strict=True):
        other = Run(adam, eager)
        progress = Progress(7)
        other.train(steps, accumulate=2, progress=progress)
        assert saved == other.bits()
        assert loss == progress.loss


def test_a_validation_that_fails_loses_nothing() -> None:
    """What was learnt is saved before validation begins, which takes long."""
    run = Saves()

    def validate() -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.train(10, save_every=2, validate=validate, validate_every=4)
    assert run.at == [2, 4]


def test_a_save_that_fails_is_a_warning_and_the_last_one_an_error() -> None:
    """A full disk may be emptied before the next save: the updates are not thrown away."""
    run, at = Saves(), []

    def save() -> None:
        at.append(run.optimizer.steps)
        raise OSError("no space")

    with (
        pytest.warns(UserWarning, match="not saved: no space"),
        pytest.raises(OSError, match="no space"),
    ):
        run.train(10, save=save, save_every=3)
    assert at == [3, 6, 9, 10]


def test_an_error_of_save_that_is_no_matter_of_the_disk_ends_the_training() -> None:
    run = Saves()

    def save() -> None:
        raise ValueError("not stored exactly")

    with pytest.raises(ValueError, match="exactly"):
        run.train(10, save=save, save_every=3)
    assert run.optimizer.steps == 3


# Ctrl-C and SIGTERM


ENDS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}
both = pytest.mark.parametrize("signum", ENDS)


class Uncaught(BaseException):
    """A signal that the training did not catch."""


def uncaught(signum: int, frame: Any) -> None:
    raise Uncaught(signum)


@pytest.fixture
def handlers() -> Iterator[None]:
    """uncaught handles both signals; whatever the test does, it must do so afterwards."""
    before = {signum: signal.signal(signum, uncaught) for signum in ENDS}
    yield
    after = {signum: signal.signal(signum, handler) for signum, handler in before.items()}
    assert after == dict.fromkeys(ENDS, uncaught)


def sending(places: dict[int, int]) -> Iterator[Batch]:
    """Batches; batch n = 1, 2, ... comes with the signal places[n]."""
    for n, batch in enumerate(limited(bigram_batch([3, 4, 5])), start=1):
        if n in places:
            signal.raise_signal(places[n])
        yield batch


def assert_ended(signum: int, run: Callable[[], Any]) -> None:
    with pytest.raises((*ENDS.values(), Uncaught)) as error:
        run()
    assert type(error.value) is ENDS[signal.Signals(signum)]
    if signum == signal.SIGTERM:
        assert error.value.code == 143


@pytest.mark.usefixtures("handlers")
@both
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("save_every", [1, 3, 100])
def test_a_signal_lets_the_update_end_and_saves_it_once(
    signum: int, accumulate: int, save_every: int
) -> None:
    run = Saves()
    place = {2 * accumulate + 1: signum}  # of the first batch of the third update
    assert_ended(signum, lambda: run.train(
        10, accumulate=accumulate, batches=sending(place), save_every=save_every
    ))
    assert run.optimizer.steps == 3
    assert run.at == ([1, 2, 3] if save_every == 1 else [3])
    whole = Saves()
    whole.train(3, accumulate=accumulate)
    assert bits(run.model) == bits(whole.model)
    run.train(10, accumulate=accumulate)
    whole.train(10, accumulate=accumulate)
    assert bits(run.model) == bits(whole.model)


@pytest.mark.usefixtures("handlers")
@both
@pytest.mark.parametrize(("at", "saved"), [(1, [1]), (4, [2, 4])])
def test_a_signal_in_the_first_and_in_the_last_update(
    signum: int, at: int, saved: list[int]
) -> None:
    run = Saves()
    validated: list[int] = []

    def validate() -> float:
        validated.append(run.optimizer.steps)
        return 1.0

    options = {"batches": sending({at: signum}), "validate": validate}
    assert_ended(signum, lambda: run.train(4, save_every=2, **options))
    assert run.optimizer.steps == at
    assert run.at == saved
    assert validated == []


@pytest.mark.usefixtures("handlers")
@both
@pytest.mark.parametrize("save_every", [1, 3, 4, 100])
@pytest.mark.parametrize("at", [2, 4])
def test_a_signal_during_validation(signum: int, save_every: int, at: int) -> None:
    """In the middle and at the end: the update it ends with is saved, and no update twice."""
    run = Saves()

    def validate() -> float:
        if run.optimizer.steps == at:
            signal.raise_signal(signum)
        return 1.0

    assert_ended(signum, lambda: run.train(
        4, validate=validate, validate_every=2, save_every=save_every
    ))
    assert run.optimizer.steps - at in ((0, 1) if at == 2 else (0,))
    assert run.at[-1] == run.optimizer.steps
    assert len(set(run.at)) == len(run.at)


@pytest.mark.usefixtures("handlers")
@both
@pytest.mark.parametrize("at", [2, 4])
def test_a_signal_while_it_saves(signum: int, at: int) -> None:
    run = Saves()

    def save() -> None:
        run.save()
        if run.optimizer.steps == at:
            signal.raise_signal(signum)

    assert_ended(signum, lambda: run.train(4, save=save, save_every=2))
    assert run.optimizer.steps - at in ((0, 1) if at == 2 else (0,))
    assert run.at[-1] == run.optimizer.steps
    assert len(set(run.at)) == len(run.at)


@contextmanager
def signal_at_line(signum: int, at: int) -> Iterator[list[int]]:
    """Send the signal before train executes its line number `at`; the numbers of those it did."""
    lines: list[int] = []

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is not train.__code__:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == at:
                signal.raise_signal(signum)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


@pytest.mark.usefixtures("handlers")
@both
def test_at_whatever_line_a_signal_comes_what_was_learnt_is_saved(signum: int) -> None:
    """Before the first line that is executed, before the second, and so on to the last."""
    ended = []
    for at in itertools.count(1):
        run = Saves()
        try:
            with signal_at_line(signum, at) as lines:
                run.train(3, save_every=100)
        except (*ENDS.values(), Uncaught) as error:
            ended.append(type(error))
        if run.optimizer.steps > 0:
            assert run.at == [run.optimizer.steps], f"line {lines[-1]}"
        if len(lines) < at:
            break
    assert ended.count(ENDS[signal.Signals(signum)]) > 20
    assert ended.count(Uncaught) < 12  # before the handlers are there, and after they were


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("first", ENDS)
def test_a_second_ctrl_c_ends_it_at_once(first: int) -> None:
    run = Saves()
    places = {5: first, 6: signal.SIGINT}  # within the third update
    assert_ended(signal.SIGINT, lambda: run.train(10, accumulate=2, batches=sending(places)))
    assert run.optimizer.steps == 2
    assert run.at == []


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("first", ENDS)
def test_a_further_sigterm_changes_nothing(first: int) -> None:
    run = Saves()
    places = {5: first, 6: signal.SIGTERM}
    assert_ended(first, lambda: run.train(10, accumulate=2, batches=sending(places)))
    assert run.optimizer.steps == 3
    assert run.at == [3]


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("where", ["nowhere", "batches", "loss", "validate", "save"])
def test_the_handlers_are_restored_however_it_ends(where: str) -> None:
    """The fixture looks; in between they are others."""
    run = Saves()
    inside: list[Any] = []

    def fail(place: str) -> None:
        inside.append({signal.getsignal(each) for each in ENDS})
        if place == where:
            raise ZeroDivisionError

    def stream() -> Iterator[Batch]:
        for batch in limited(bigram_batch([3, 4])):
            fail("batches")
            yield batch

    options: dict[str, Any] = {"criterion": Bad(2, math.nan)} if where == "loss" else {}
    try:
        run.train(3, batches=stream(), validate=lambda: fail("validate"), save=lambda: fail("save"),
                  save_every=1, validate_every=1, **options)
        assert where == "nowhere"
    except (ZeroDivisionError, FloatingPointError):
        assert where != "nowhere"
    assert inside
    assert all(uncaught not in found for found in inside)


@pytest.mark.usefixtures("handlers")
@both
def test_without_save_the_signals_are_left_alone(signum: int) -> None:
    run = Saves()
    inside: list[Any] = []

    def validate() -> float:
        inside.append({signal.getsignal(each) for each in ENDS})
        return 1.0

    run.train(3, save=None, validate=validate, validate_every=1)
    assert inside == [{uncaught}] * 3
    run = Saves()
    with pytest.raises(Uncaught):
        run.train(10, save=None, batches=sending({3: signum}))
    assert run.optimizer.steps == 2


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("ignored_one", ENDS)
def test_an_ignored_signal_stays_ignored(ignored_one: int) -> None:
    """As nohup and & leave it; the other one is caught."""
    (other,) = ENDS.keys() - {ignored_one}
    signal.signal(ignored_one, signal.SIG_IGN)
    run = Saves()
    inside: list[Any] = []

    def validate() -> float:
        inside.append(signal.getsignal(ignored_one))
        return 1.0

    try:
        run.train(4, batches=sending({2: ignored_one}), validate=validate, validate_every=2)
        assert_ended(other, lambda: run.train(10, batches=sending({1: ignored_one, 3: other})))
        assert inside == [signal.SIG_IGN] * 2
        assert signal.getsignal(ignored_one) is signal.SIG_IGN
    finally:
        signal.signal(ignored_one, uncaught)
    assert run.optimizer.steps == 7
    assert run.at == [4, 7]


@pytest.mark.usefixtures("handlers")
def test_a_default_handler_is_restored_too() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        stream = sending({3: signal.SIGTERM})
        assert_ended(signal.SIGTERM, lambda: Saves().train(10, batches=stream))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        for signum in ENDS:
            signal.signal(signum, uncaught)


@pytest.mark.usefixtures("handlers")
def test_another_thread_trains_and_saves_without_handlers() -> None:
    """Python allows them in the main thread alone."""
    run = Saves()
    inside: list[Any] = []

    def validate() -> float:
        inside.append({signal.getsignal(each) for each in ENDS})
        return 1.0

    thread = threading.Thread(
        target=lambda: run.train(4, save_every=3, validate=validate, validate_every=2)
    )
    thread.start()
    thread.join()
    assert run.at == [3, 4]
    assert inside == [{uncaught}] * 2


# Evaluation

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


def test_a_progress_that_goes_on_shows_what_one_without_a_break_does() -> None:
    losses = np.random.default_rng(0).random(100).tolist()
    for done in (0, 1, 30, 49, 50, 70):
        whole, first = Progress(100), Progress(100)
        for i, loss in enumerate(losses):
            if i == done:
                second = Progress(100, done, first.loss)
            (first if i < done else second).step(loss, 1)
            whole.step(loss, 1)
        assert second.loss == whole.loss
        assert (second.done, second.steps) == (done, 100)
        assert str(second).startswith(f"step 100/100  loss {whole.loss:.3f}")


def test_the_time_left_is_that_of_the_steps_made_now(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("npdecoder.training.time.monotonic", lambda: clock[0])
    with Progress(1000, 900, 3.0) as progress:
        for _ in range(10):
            clock[0] += 2.0
            progress.step(3.0, 5000)
        assert str(progress) == "step 910/1000  loss 3.000  2,500 tokens/s  3:00 left"


def test_the_loss_shown_of_a_training_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the updates made now: it knows of no others, and must not mix in a 0."""
    model = Bigram()
    optimizer = SGD(model.parameters(), 0.1)
    train_bigram(60, model, optimizer=optimizer)
    terminal = on_a_terminal(monkeypatch)
    losses = train_bigram(64, model, optimizer=optimizer)
    lines = [line for line in terminal.getvalue().strip().split("\r") if line]
    assert "step 61/64" in lines[0]
    shown = [float(re.findall(r"loss (\d+\.\d+)", line)[0]) for line in lines]
    assert shown[0] == pytest.approx(losses[0], abs=6e-4)
    assert min(losses) - 6e-4 <= shown[-1] <= max(losses) + 6e-4


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
    stream = BatchStream(lambda rng: [], np.random.default_rng(0))
    with pytest.raises(ValueError, match="no batches"):
        train_bigram(3, batches=stream)
    assert terminal.getvalue() == ""


def test_no_line_where_nothing_was_left_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Bigram()
    optimizer = SGD(model.parameters(), 0.1)
    train_bigram(5, model, optimizer=optimizer)
    terminal = on_a_terminal(monkeypatch)
    assert train_bigram(5, model, optimizer=optimizer) == []
    assert train_bigram(3, model, optimizer=optimizer) == []
    assert terminal.getvalue() == ""
