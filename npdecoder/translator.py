"""Translator: a Transformer with the vocabularies of both sides, from text to text, in one file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from npdecoder.checkpoint import DAMAGE, Checkpoint, load_checkpoint, save_checkpoint
from npdecoder.core import Array
from npdecoder.decoding import beam_search, greedy_decode
from npdecoder.files import PathLike
from npdecoder.models import Transformer
from npdecoder.text import PairOfIds, Vocabulary, detokenize, make_batch, pad, tokenize

KIND = "translator"


class Alignment(NamedTuple):
    """Which source token each target token looked at.

    A[t, s]: the weight of source token s when target token t was chosen, the mean over the heads of
    the last layer's cross-attention. Both end with <eos>.
    """

    source_tokens: list[str]  # S
    target_tokens: list[str]  # T
    A: Array  # (T, S)


class Translator:
    """model, source_vocabulary, target_vocabulary, whose sizes are those of the model's config."""

    def __init__(
        self, model: Transformer, source_vocabulary: Vocabulary, target_vocabulary: Vocabulary
    ) -> None:
        sizes = len(source_vocabulary), len(target_vocabulary)
        expected = model.config.source_vocab_size, model.config.target_vocab_size
        if sizes != expected:
            raise ValueError(f"vocabularies of {sizes} tokens, but the model has {expected}")
        self.model = model
        self.source_vocabulary = source_vocabulary
        self.target_vocabulary = target_vocabulary

    def translate(self, texts: Sequence[str], beam_size: int = 1) -> list[str]:
        """Each text's translation, its tokens separated by spaces.

        beam_size: 1 is greedy decoding, more is beam search with a length penalty of 1.

        Errors: ValueError for a text without tokens or with more than the model has positions for.
        Warns of words that are not in the vocabulary, which are read as <unk>.
        """
        if isinstance(texts, str):
            raise TypeError("texts is a string, expected a list of strings")
        outputs = self.translate_ids(self._encode(texts), beam_size)
        return [detokenize(tokens) for tokens in outputs]

    def translate_ids(
        self, sources: Sequence[Sequence[int]], beam_size: int = 1
    ) -> list[list[str]]:
        """The target tokens for each source, a list of ids without EOS."""
        vocabulary = self.target_vocabulary
        eos_id = self.source_vocabulary.eos_id
        ids = pad([[*source, eos_id] for source in sources], self.source_vocabulary.pad_id)
        special = {"bos_id": vocabulary.bos_id, "eos_id": vocabulary.eos_id}
        if beam_size == 1:
            outputs = greedy_decode(self.model, ids, **special)
        else:
            found = beam_search(self.model, ids, beam_size=beam_size, **special)
            outputs = [hypotheses[0].ids for hypotheses in found]
        return [vocabulary.decode(output) for output in outputs]

    def align(self, text: str, beam_size: int = 1) -> Alignment:
        """The cross-attention of text and its translation."""
        (source,) = self._encode([text])
        (target,) = self.translate_ids([source], beam_size)
        batch = self.batch([(source, self.target_vocabulary.encode(target, warn=False))])
        source_ids, target_ids = batch.inputs
        target_ids = target_ids[:, : self.model.config.max_len]  # longer if EOS never came
        _, ctx = self.model.forward(source_ids, target_ids)
        cross: Any = ctx.decode.decoder.layers[-1].cross
        attend = getattr(cross.attention, "attend", cross.attention)
        source_tokens = [self.source_vocabulary.tokens[i] for i in source_ids[0]]
        target_tokens = [*target, "<eos>"][: target_ids.shape[1]]
        return Alignment(source_tokens, target_tokens, attend.attention.A[0].mean(axis=0))

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[PairOfIds]:
        """Pairs of texts as pairs of ids; unknown words become <unk> without a warning."""
        return [
            (
                self.source_vocabulary.encode(tokenize(source), warn=False),
                self.target_vocabulary.encode(tokenize(target), warn=False),
            )
            for source, target in pairs
        ]

    def batch(self, pairs: Sequence[PairOfIds]) -> Any:
        v = self.source_vocabulary
        return make_batch(pairs, v.pad_id, v.bos_id, v.eos_id)

    def exact_match(self, pairs: Sequence[tuple[str, str]], batch_size: int = 64) -> float:
        """The share of distinct sources whose translation equals a reference, token by token."""
        references: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
        for source, target in pairs:
            references.setdefault(tuple(tokenize(source)), set()).add(tuple(tokenize(target)))
        sources = sorted(references, key=len)
        right = 0
        for start in range(0, len(sources), batch_size):
            chunk = sources[start : start + batch_size]
            ids = [self.source_vocabulary.encode(tokens, warn=False) for tokens in chunk]
            for tokens, output in zip(chunk, self.translate_ids(ids)):
                right += tuple(output) in references[tokens]
        return right / max(len(sources), 1)

    def save(self, path: PathLike, **training: Any) -> None:
        """Write one file, as save_checkpoint does.

        training: its optimizer, rng, step, and `extra`, what else a training needs to go on.
        """
        extra = {
            "kind": KIND,
            "source_tokens": self.source_vocabulary.tokens[4:],
            "target_tokens": self.target_vocabulary.tokens[4:],
            "training": training.pop("extra", None),
        }
        save_checkpoint(path, self.model, extra=extra, **training)

    @classmethod
    def load(cls, path: PathLike) -> Translator:
        """Read what save wrote, in the dtype that it was saved in.

        Errors: FileNotFoundError; ValueError for a file that is damaged or not of this kind.
        """
        return cls.from_checkpoint(path, load_checkpoint(path))

    @classmethod
    def from_checkpoint(cls, path: PathLike, checkpoint: Checkpoint) -> Translator:
        extra = checkpoint.extra
        if not isinstance(extra, dict) or extra.get("kind") != KIND:
            raise ValueError(f"{path} is not a {KIND}")
        try:
            source = Vocabulary(extra["source_tokens"])
            target = Vocabulary(extra["target_tokens"])
            return cls(checkpoint.model, source, target)
        except DAMAGE as error:
            raise ValueError(f"{path} is not a whole {KIND}: {error}") from error

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        longest = self.model.config.max_len - 1  # and EOS
        tokens = [tokenize(text) for text in texts]
        for text, words in zip(texts, tokens):
            if not words:
                raise ValueError(f"the text {text!r} has no words")
            if len(words) > longest:
                raise ValueError(f"a text has {len(words)} tokens, the model takes {longest}")
        return [self.source_vocabulary.encode(words) for words in tokens]
