"""What the command line trains: a run that is saved to one file, can be stopped, and goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from npdecoder.character_model import CharacterModel
from npdecoder.checkpoint import DAMAGE, Checkpoint
from npdecoder.core import Layer
from npdecoder.layers import CrossEntropy
from npdecoder.optim import Optimizer, Schedule
from npdecoder.replicas import Replicas
from npdecoder.text import Batch
from npdecoder.training import BatchStream, Progress, open_replicas, train
from npdecoder.translator import Translator

FREE = ("steps", "validate_every", "save_every")  # options that may change in a resumed run


class Run:
    """product: what is trained and saved, with its model; out: the file; options: of the run.

    epoch: of a BatchStream. data: the text that the run learns from, of which a fingerprint is
    kept. checkpoint: None to begin, or that of a run to go on with, whose optimizer and generators
    are taken over. threads: of train(), chosen for batches of this shape (B, T) if None; the file
    knows nothing of them.

    model: what is trained; while train() is at work its Replicas, for evaluate().
    """

    def __init__(
        self,
        product: Translator | CharacterModel,
        out: str,
        options: Mapping[str, Any],
        optimizer: Optimizer,
        epoch: Callable[[np.random.Generator], Iterable[Batch]],
        data: str,
        checkpoint: Checkpoint | None = None,
        threads: int | None = 1,
        batch_shape: tuple[int, int] = (1, 1),
    ) -> None:
        self.product, self.out, self.options = product, out, dict(options)
        self.model: Layer | Replicas = product.model
        self.optimizer, self.threads, self.batch_shape = optimizer, threads, batch_shape
        self.data = fingerprint(data)
        self.rng = np.random.default_rng((options["seed"], 1))  # of dropout
        self.batches = BatchStream(epoch, np.random.default_rng((options["seed"], 2)))
        loss = 0.0
        if checkpoint is not None:
            refuse_other_text(out, checkpoint, self.data)
            loss = self._resume(checkpoint)
        self.progress = Progress(self.options["steps"], self.optimizer.steps, loss)

    def _resume(self, checkpoint: Checkpoint) -> float:
        try:
            training = checkpoint.extra["training"]
            if checkpoint.optimizer is None or checkpoint.rng is None:
                raise ValueError("it has no optimizer or no generator")
            if checkpoint.optimizer.steps > self.options["steps"]:
                raise ValueError(f"it has made {checkpoint.optimizer.steps} updates, more than "
                                 f"--steps {self.options['steps']}")
            self.batches.load_state_dict(training["batches"])
            self.optimizer, self.rng = checkpoint.optimizer, checkpoint.rng
            return float(training["loss"])
        except DAMAGE as error:
            raise ValueError(f"{self.out} cannot be resumed: {error}") from error

    def save(self) -> None:
        self.optimizer.zero_grad()  # of a finished update: nothing to store
        self.product.save(
            self.out,
            optimizer=self.optimizer,
            rng=self.rng,
            step=self.optimizer.steps,
            extra={
                "options": self.options,
                "data": self.data,
                "batches": self.batches.state_dict(),
                "loss": self.progress.loss,
            },
        )

    def train(
        self, criterion: CrossEntropy, schedule: Schedule, validate: Callable[[], float] | None
    ) -> None:
        o = self.options
        try:
            train(
                self.product.model,
                criterion,
                self.optimizer,
                self.batches,
                o["steps"],
                schedule=schedule,
                max_norm=o["max_norm"],
                rng=self.rng,
                accumulate=o["accumulate"],
                replicas=self._open_replicas,
                validate=validate,
                validate_every=o["validate_every"],
                save=self.save,
                save_every=o["save_every"],
                progress=self.progress,
            )
        finally:
            self.model = self.product.model

    def _open_replicas(self) -> Replicas:
        self.model = open_replicas(self.product.model, self.threads, *self.batch_shape)
        return self.model

    def validation_loss(self, validate: Callable[[], float]) -> float:
        """That after the last update, once more from validate if no update was made here."""
        last = self.progress.validation_loss
        return validate() if last is None else last


def fingerprint(data: str) -> str:
    return hashlib.sha256(data.encode("utf-8", "surrogatepass")).hexdigest()


def refuse_other_text(path: str, checkpoint: Checkpoint, data: str) -> None:
    """Raise a ValueError if the run did not begin with the text of this fingerprint."""
    try:
        same = checkpoint.extra["training"]["data"] == data
    except DAMAGE:
        same = False
    if not same:
        raise ValueError(f"{path} cannot be resumed: the text is not the one that it began with")


def resumed_options(path: str, checkpoint: Checkpoint, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the run began with; those of FREE may be given anew.

    Errors: ValueError for any other option that is given and differs, and for a file that no
    training wrote.
    """
    try:
        options = dict(checkpoint.extra["training"]["options"])
    except DAMAGE:
        raise ValueError(f"{path} holds no training that could be resumed") from None
    for name, value in given.items():
        if name not in FREE and value != options.get(name):
            raise ValueError(f"--{name.replace('_', '-')} is {value}, but the run in {path} began "
                             f"with {options.get(name)}: leave it out")
    return {**options, **given}
