"""Translator: a Transformer with the vocabularies of both sides, from text to text, in one file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from npdecoder.checkpoint import load_weights, save_weights
from npdecoder.core import Array
from npdecoder.decoding import greedy_decode
from npdecoder.models import Transformer, TransformerConfig
from npdecoder.text import PairOfIds, Vocabulary, detokenize, make_batch, pad, tokenize

META = "npdecoder.json"  # the entry of the file that is not a weight: config, vocabularies, version
VERSION = 1


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

    def translate(self, texts: Sequence[str]) -> list[str]:
        """Each text's translation by greedy decoding, its tokens separated by spaces.

        Errors: ValueError for a text without tokens or with more than the model has positions for.
        Warns of words that are not in the vocabulary, which are read as <unk>.
        """
        if isinstance(texts, str):
            raise TypeError("texts is a string, expected a list of strings")
        return [detokenize(tokens) for tokens in self.translate_ids(self._encode(texts))]

    def translate_ids(self, sources: Sequence[Sequence[int]]) -> list[list[str]]:
        """The target tokens for each source, a list of ids without EOS."""
        vocabulary = self.target_vocabulary
        eos_id = self.source_vocabulary.eos_id
        ids = pad([[*source, eos_id] for source in sources], self.source_vocabulary.pad_id)
        outputs = greedy_decode(
            self.model, ids, bos_id=vocabulary.bos_id, eos_id=vocabulary.eos_id
        )
        return [vocabulary.decode(output) for output in outputs]

    def align(self, text: str) -> Alignment:
        """The cross-attention of text and its translation."""
        (source,) = self._encode([text])
        (target,) = self.translate_ids([source])
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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights, config and vocabularies to one .npz file, as save_weights does."""
        meta = {
            "format": "npdecoder translator",
            "version": VERSION,
            "config": dataclasses.asdict(self.model.config),
            "source_tokens": self.source_vocabulary.tokens[4:],
            "target_tokens": self.target_vocabulary.tokens[4:],
        }
        text = json.dumps(meta, ensure_ascii=False).encode()
        save_weights(path, {META: np.frombuffer(text, np.uint8), **self.model.state_dict()})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Translator:
        """Read what save wrote, in the dtype that it was saved in.

        Errors: FileNotFoundError; ValueError for a file that is damaged or not of this kind.
        """
        arrays = load_weights(path)
        try:
            meta = json.loads(arrays.pop(META).tobytes())
            if meta["format"] != "npdecoder translator" or meta["version"] != VERSION:
                raise ValueError(f"it is {meta['format']!r}, version {meta['version']}")
            config = TransformerConfig(**meta["config"])
            source = Vocabulary(meta["source_tokens"])
            target = Vocabulary(meta["target_tokens"])
            dtype = np.result_type(*arrays.values(), np.float32)  # of float16: in float32
            model = Transformer(config, dtype=dtype)
            model.load_state_dict(arrays)
            return cls(model, source, target)
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,  # of JSON in JSON in JSON ...
            MemoryError,  # of sizes that no file of weights has
        ) as error:
            raise ValueError(f"{path} is not a translator saved by npdecoder: {error}") from error

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        longest = self.model.config.max_len - 1  # and EOS
        tokens = [tokenize(text) for text in texts]
        for text, words in zip(texts, tokens):
            if not words:
                raise ValueError(f"the text {text!r} has no words")
            if len(words) > longest:
                raise ValueError(f"a text has {len(words)} tokens, the model takes {longest}")
        return [self.source_vocabulary.encode(words) for words in tokens]
