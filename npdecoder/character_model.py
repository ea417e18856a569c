"""CharacterModel: a LanguageModel with its characters, from text to text, in one file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from npdecoder.checkpoint import DAMAGE, Checkpoint, load_checkpoint, save_checkpoint
from npdecoder.decoding import generate
from npdecoder.files import PathLike
from npdecoder.models import LanguageModel
from npdecoder.text import Characters

KIND = "language model of characters"


class CharacterModel:
    """model, and its characters, as many as the vocab_size of its config."""

    def __init__(self, model: LanguageModel, characters: Characters) -> None:
        if len(characters) != model.config.vocab_size:
            raise ValueError(f"{len(characters)} characters, but the model has a vocabulary of "
                             f"{model.config.vocab_size}")
        self.model = model
        self.characters = characters

    def generate(self, prompt: str, **options: Any) -> Iterator[str]:
        """The characters that follow the prompt, one by one; options: those of decoding.generate.

        Errors: ValueError for an empty prompt and for characters that the model does not know.
        """
        if not prompt:
            raise ValueError("the prompt is empty: give at least one character")
        ids = generate(self.model, self.characters.encode(prompt), **options)
        return (self.characters.characters[i] for i in ids)

    def save(self, path: PathLike, **training: Any) -> None:
        """Write one file, as save_checkpoint does.

        training: its optimizer, rng, step, and `extra`, what else a training needs to go on.
        """
        extra = {"kind": KIND, "characters": self.characters.characters}
        extra["training"] = training.pop("extra", None)
        save_checkpoint(path, self.model, extra=extra, **training)

    @classmethod
    def load(cls, path: PathLike) -> CharacterModel:
        """Read what save wrote.

        Errors: FileNotFoundError; ValueError for a file that is damaged or not of this kind.
        """
        return cls.from_checkpoint(path, load_checkpoint(path))

    @classmethod
    def from_checkpoint(cls, path: PathLike, checkpoint: Checkpoint) -> CharacterModel:
        extra = checkpoint.extra
        if not isinstance(extra, dict) or extra.get("kind") != KIND:
            raise ValueError(f"{path} is not a {KIND}")
        try:
            return cls(checkpoint.model, Characters(extra["characters"]))
        except DAMAGE as error:
            raise ValueError(f"{path} is not a whole {KIND}: {error}") from error
