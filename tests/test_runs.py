"""Runs: a training in one file that stops and goes on, and what of the file is needed for that."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npdecoder import CrossEntropy, LanguageModel, LanguageModelConfig
from npdecoder.character_model import CharacterModel
from npdecoder.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from npdecoder.optim import SGD, AdamW, Optimizer, cosine_schedule, decay_groups
from npdecoder.runs import FREE, Run, resumed_options
from npdecoder.text import Batch, Characters, windows
from npdecoder.training import BatchStream

TEXT = "the cat sat on the mat and ate the rat. " * 5
OPTIONS = {
    "steps": 12, "seed": 3, "max_norm": 0.5, "accumulate": 2, "validate_every": 4, "save_every": 5,
    "lr": 0.05, "d_ff": None,
}  # fmt: skip
IDS = Characters.build(TEXT).encode(TEXT)


def epoch(rng: np.random.Generator) -> Any:
    """A pass of 6 batches."""
    return windows(IDS, 8, 4, rng)


def sgd(model: Any) -> Optimizer:
    return SGD(model.parameters(), 0.05, momentum=0.9)


def adamw(model: Any) -> Optimizer:
    return AdamW(decay_groups(model.parameters(), 0.1), 0.05)


def begun(
    out: Path, make: Callable[[Any], Optimizer] = adamw, data: str = TEXT, **options: Any
) -> Run:
    """A run from its beginning: a small model of characters, with dropout."""
    characters = Characters.build(TEXT)
    config = LanguageModelConfig(
        len(characters), d_model=8, num_heads=2, num_layers=1, max_len=8, dropout=0.2
    )
    product = CharacterModel(LanguageModel(config, 0), characters)
    options = {**OPTIONS, **options}
    return Run(product, str(out), options, make(product.model), epoch, data)


def resumed(
    out: Path, checkpoint: Checkpoint | None = None, data: str = TEXT, **given: Any
) -> Run:
    """The run in the file out, or in the checkpoint."""
    checkpoint = load_checkpoint(out) if checkpoint is None else checkpoint
    options = resumed_options(str(out), checkpoint, given)
    product = CharacterModel.from_checkpoint(out, checkpoint)
    return Run(product, str(out), options, sgd(product.model), epoch, data, checkpoint)


def train(run: Run, stop_at: int | None = None) -> list[int]:
    """Train as the command line does; where validations came. stop_at: the update of a SIGTERM."""
    validated: list[int] = []
    stream = run.batches

    class Stopping:
        """The stream, with a signal at the first batch of that update."""

        def __iter__(self) -> Iterator[Batch]:
            return self

        def __next__(self) -> Batch:
            if run.optimizer.steps + 1 == stop_at:
                signal.raise_signal(signal.SIGTERM)
            return next(stream)

        def state_dict(self) -> dict[str, Any]:
            return stream.state_dict()

    def validate() -> float:
        validated.append(run.optimizer.steps)
        return 1.0

    run.batches = Stopping()  # type: ignore[assignment]
    schedule = cosine_schedule(run.options["lr"], run.options["steps"], 3)
    if stop_at is None:
        run.train(CrossEntropy(), schedule, validate)
    else:
        with pytest.raises(SystemExit):
            run.train(CrossEntropy(), schedule, validate)
        assert run.optimizer.steps == stop_at
    return validated


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("stop_at", [1, 3, 6, 11, 12])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(
    tmp_path: Path, make: Callable[[Any], Optimizer], stop_at: int
) -> None:
    """Equal files hold equal weights, moments, generators, places in the data and losses.

    The third update ends with the first pass over the data; the others end within one.
    """
    whole, out = tmp_path / "whole.npz", tmp_path / "stopped.npz"
    run = begun(whole, make)
    assert train(run) == [4, 8, 12]
    first = begun(out, make)
    before = train(first, stop_at)
    assert load_checkpoint(out).step == stop_at
    second = resumed(out)
    assert second.progress.done == second.progress.steps == second.optimizer.steps == stop_at
    assert second.progress.loss == first.progress.loss
    assert type(second.optimizer) is type(run.optimizer)
    assert before + train(second) == ([4, 8] if stop_at == 12 else [4, 8, 12])
    assert second.progress.loss == run.progress.loss != 0.0
    if stop_at == 12:  # there was nothing left to do
        second.save()
    assert out.read_bytes() == whole.read_bytes()


def test_what_is_saved(tmp_path: Path) -> None:
    out = tmp_path / "m.npz"
    run = begun(out)
    train(run)
    checkpoint = load_checkpoint(out)
    training = checkpoint.extra["training"]
    assert training.keys() == {"options", "data", "batches", "loss"}
    assert training["options"] == OPTIONS
    assert TEXT not in str(checkpoint.extra)
    assert training["loss"] == run.progress.loss
    assert checkpoint.step == checkpoint.optimizer.steps == 12
    assert not any(p.has_grad for p in checkpoint.model.parameters())
    for name, array in run.product.model.state_dict().items():
        assert np.array_equal(checkpoint.model.state_dict()[name], array)
    assert CharacterModel.load(out).characters.characters == run.product.characters.characters


def test_saving_changes_nothing(tmp_path: Path) -> None:
    files = []
    for name, every in (("one.npz", 1), ("two.npz", 1000)):
        run = begun(tmp_path / name, save_every=every, validate_every=1000)
        train(run)
        run.options["save_every"] = 0  # of the files compared
        run.save()
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]


def test_dropout_and_batches_have_generators_of_their_own(tmp_path: Path) -> None:
    """And both depend on the seed, so that runs of different seeds differ."""
    runs = [begun(tmp_path / "m.npz", seed=seed) for seed in (3, 3, 4)]
    rngs = [rng for run in runs for rng in (run.rng, run.batches.state_dict()["rng"])]
    drawn = [rng.random() for rng in rngs]
    assert drawn[:2] == drawn[2:4]
    assert len(set(drawn)) == 4


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Checkpoint]:
    """A run that was stopped after its fifth update, and its checkpoint."""
    out = tmp_path_factory.mktemp("stopped") / "m.npz"
    train(begun(out), stop_at=5)
    return out, load_checkpoint(out)


def changed(checkpoint: Checkpoint, *path: str, **new: Any) -> Checkpoint:
    """The checkpoint without the entry of extra at this path, or with new=... in its place."""
    extra = copy.deepcopy(checkpoint.extra)
    owner, (*above, last) = extra, path
    for key in above:
        owner = owner[key]
    del owner[last]
    if new:
        owner[last] = new["new"]
    return checkpoint._replace(extra=extra)


@pytest.mark.parametrize(
    "path",
    [
        ("training",),
        ("training", "options"),
        ("training", "data"),
        ("training", "batches"),
        ("training", "batches", "rng"),
        ("training", "batches", "taken"),
        ("training", "loss"),
    ],
    ids=".".join,
)
def test_every_entry_of_the_training_is_needed(
    stopped: tuple[Path, Checkpoint], path: tuple[str, ...]
) -> None:
    """Nothing of it begins anew in silence, whether it is not there or nothing."""
    out, checkpoint = stopped
    resumed(out, checkpoint)
    before = out.read_bytes()
    for damaged in (changed(checkpoint, *path), changed(checkpoint, *path, new=None)):
        with pytest.raises(ValueError, match=r"m\.npz .*resumed"):
            resumed(out, damaged)
    assert (out.read_bytes(), os.listdir(out.parent)) == (before, ["m.npz"])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("training",), "x"),
        (("training",), []),
        (("training", "options"), 7),
        (("training", "options"), "ab"),
        (("training", "data"), "0" * 64),
        (("training", "batches"), []),
        (("training", "batches", "rng"), 7),
        (("training", "batches", "taken"), -1),
        (("training", "batches", "taken"), 1.5),
        (("training", "loss"), "x"),
        (("training", "loss"), []),
    ],
)
def test_entries_that_cannot_be(
    stopped: tuple[Path, Checkpoint], path: tuple[str, ...], value: Any
) -> None:
    out, checkpoint = stopped
    with pytest.raises(ValueError, match=r"m\.npz .*resumed"):
        resumed(out, changed(checkpoint, *path, new=value))


@pytest.mark.parametrize("name", ["optimizer", "rng"])
def test_optimizer_and_generator_are_needed(stopped: tuple[Path, Checkpoint], name: str) -> None:
    out, checkpoint = stopped
    with pytest.raises(ValueError, match=r"m\.npz .*resumed: .*no optimizer or no generator"):
        resumed(out, checkpoint._replace(**{name: None}))


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "d_ff"])
def test_every_stored_option_that_is_used_is_needed(
    stopped: tuple[Path, Checkpoint], name: str
) -> None:
    out, checkpoint = stopped
    before = out.read_bytes()
    with pytest.raises((ValueError, KeyError), match=name):
        train(resumed(out, changed(checkpoint, "training", "options", name)))
    assert out.read_bytes() == before


def test_fewer_steps_than_were_made_are_refused(stopped: tuple[Path, Checkpoint]) -> None:
    out, checkpoint = stopped
    assert resumed(out, checkpoint, steps=5).progress.done == 5
    with pytest.raises(ValueError, match=r"m\.npz .*it has made 5 updates, more than --steps 4"):
        resumed(out, checkpoint, steps=4)


def test_another_text_is_refused(stopped: tuple[Path, Checkpoint]) -> None:
    out, _ = stopped
    for text in (TEXT[:-1], TEXT + ".", TEXT.upper(), ""):
        with pytest.raises(ValueError, match=r"m\.npz cannot be resumed: the text is not the one"):
            resumed(out, data=text)


def test_a_file_without_a_training(tmp_path: Path) -> None:
    out = tmp_path / "m.npz"
    run = begun(out)
    run.product.save(out)
    with pytest.raises(ValueError, match=r"m\.npz holds no training"):
        resumed_options(str(out), load_checkpoint(out), {})
    for extra in (None, 7, "x", [], {}, {"training": None}):
        save_checkpoint(out, run.product.model, extra=extra)
        with pytest.raises(ValueError, match=r"m\.npz holds no training"):
            resumed_options(str(out), load_checkpoint(out), {"steps": 3})


def test_options_that_were_given_again(stopped: tuple[Path, Checkpoint]) -> None:
    out, checkpoint = stopped

    def options(**given: Any) -> dict[str, Any]:
        return resumed_options(str(out), checkpoint, given)

    assert options() == options(**OPTIONS) == OPTIONS
    for name, value in OPTIONS.items():
        assert options(**{name: value}) == OPTIONS
        other = 4 if value is None else value + 1
        if name in FREE:
            assert options(**{name: other}) == {**OPTIONS, name: other}
        else:
            option = f"--{name.replace('_', '-')}"
            with pytest.raises(ValueError, match=rf"{option} is {other}, .*began with {value}"):
                options(**{name: other})
    assert checkpoint.extra["training"]["options"] == OPTIONS


def test_what_is_free_may_change_and_is_then_kept(stopped: tuple[Path, Checkpoint]) -> None:
    assert set(FREE) == {"steps", "validate_every", "save_every"}
    out, checkpoint = stopped
    run = resumed(out, copy.deepcopy(checkpoint), steps=7, validate_every=3)
    run.out = str(out.with_name("longer.npz"))
    assert run.progress.total == 7
    assert train(run) == [6, 7]
    longer = load_checkpoint(run.out)
    os.unlink(run.out)
    assert longer.step == 7
    assert longer.extra["training"]["options"] == {**OPTIONS, "steps": 7, "validate_every": 3}


def test_the_stream_of_a_run_is_that_of_its_seed(tmp_path: Path) -> None:
    run = begun(tmp_path / "m.npz")
    other = BatchStream(epoch, np.random.default_rng((OPTIONS["seed"], 2)))
    for _ in range(9):
        assert np.array_equal(next(run.batches).targets, next(other).targets)
