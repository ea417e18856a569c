"""DecodingState: a model reads token ids piece by piece, each piece once."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from npdecoder.core import Array, as_ids
from npdecoder.masks import causal_mask
from npdecoder.models import LanguageModel, Transformer
from npdecoder.models.token_model import as_batch, token_positions


class DecodingState:
    """What a model has read of a batch of sequences: the keys and values of every layer.

        state = DecodingState(model)                    # of a LanguageModel
        state = DecodingState(model, source_ids)        # of a Transformer, which encodes them once
        logits = state.prompt(ids)                      # (B, T) -> (B, V): what comes after them
        logits = state.extend(more_ids)                 # and so on

    The logits are those that a full forward pass over all ids so far has at its last position, to
    rounding; only they are computed. A prompt may come in pieces of any lengths. Prompts of unequal
    lengths are padded on the LEFT with the model's pad_id: positions count real tokens. (Padded on
    the right, the last position is a pad, and the logits say what comes after a pad.)

    source_mask: as in Transformer.forward. The state is for weights that do not change.

    Errors: TypeError for another model, ValueError for a Transformer without source_ids or a
    LanguageModel with them.
    """

    def __init__(
        self,
        model: Transformer | LanguageModel,
        source_ids: ArrayLike | None = None,
        source_mask: ArrayLike | None = None,
    ) -> None:
        self.model = model
        self._memory_mask: Array | None = None
        if isinstance(model, Transformer):
            if source_ids is None:
                raise ValueError("source_ids is None, but a Transformer reads a source")
            self._vocab_size = model.config.target_vocab_size
            self._embedding, self._positions = model.target_embedding, model.target_positions
            memory, _ = model.encode(source_ids, source_mask)
            self._memory_mask = model.source_mask(source_ids, source_mask)
            self._decoder = model.decoder.new_state(memory)
            self.batch_size: int | None = len(memory)
        elif isinstance(model, LanguageModel):
            if source_ids is not None or source_mask is not None:
                raise ValueError("a LanguageModel reads no source: give its prompt to prompt(ids)")
            self._vocab_size = model.config.vocab_size
            self._embedding, self._positions = model.embedding, model.positions
            self._decoder = model.decoder.new_state()
            self.batch_size = None  # known with the prompt
        else:
            raise TypeError(f"model is a {type(model).__name__}, "
                            "expected a Transformer or a LanguageModel")
        self._real = np.ones((self.batch_size or 0, 0), np.bool_)  # (B, length): not padding
        self._sources = np.arange(self.batch_size or 0)  # (B,): which source each row reads
        self._whole = True

    @property
    def length(self) -> int:
        """How many ids a row were read, padding included.

        Errors: ValueError if a call was interrupted: the state is lost then.
        """
        length = self._decoder.length
        if length != self._real.shape[1] or not self._whole:
            raise ValueError("the state was left half extended by an error: make a new one")
        return length

    @property
    def counts(self) -> Array:
        """(B,): how many of them were not padding; the next token's position."""
        return self._real.sum(axis=1)

    def prompt(self, ids: ArrayLike) -> Array:
        """ids (B, T), the first ids -> logits (B, V).

        Errors: ValueError for a state that has read something already (make a new one for another
        prompt), and for no ids; those of extend.
        """
        if self.length:
            raise ValueError(
                f"the state has read {self.length} ids: make a new one, or extend this one"
            )
        return self._read(ids)

    def extend(self, ids: ArrayLike) -> Array:
        """ids (B, T), the ids after those before -> logits (B, V).

        Errors: ValueError for a state without a prompt, no ids, another batch size, and more tokens
        than max_len; TypeError and IndexError for bad ids. The state is then as before.
        """
        if not self.length:
            raise ValueError("the state has read nothing: begin with prompt(ids)")
        return self._read(ids)

    def select(self, rows: ArrayLike) -> None:
        """Sequence i becomes a copy of what was sequence rows[i]: drop, repeat or reorder them."""
        _ = self.length  # an error if it is broken
        rows = as_ids("rows", rows, self.batch_size or 0)
        if rows.ndim != 1:
            raise ValueError(f"rows has shape {rows.shape}, expected (n,)")
        if np.array_equal(rows, np.arange(self.batch_size or 0)):
            return
        self._whole = False  # until all of it is exchanged
        sources = self._sources[rows]
        # in a beam search sequences of one source change places: its keys and values stay
        self._decoder.select(rows, memory=not np.array_equal(sources, self._sources))
        if self._memory_mask is not None and len(self._memory_mask) > 1:
            self._memory_mask = self._memory_mask[rows]
        self._real, self._sources, self.batch_size = self._real[rows], sources, len(rows)
        self._whole = True

    def _read(self, ids: ArrayLike) -> Array:
        model, config = self.model, self.model.config
        ids = as_batch("ids", ids, self._vocab_size, config)
        B, T = ids.shape
        if self.batch_size not in (None, B):
            raise ValueError(f"ids has shape {ids.shape}, expected ({self.batch_size}, T)")
        if T == 0:
            raise ValueError("ids has no column: begin with at least one id, such as BOS")
        new = np.ones(ids.shape, np.bool_) if config.pad_id is None else ids != config.pad_id
        before = self._real if self.length else np.ones((B, 0), np.bool_)
        real = np.concatenate([before, new], axis=1)
        most = int(real.sum(axis=1).max(initial=0))
        if most > config.max_len:
            raise ValueError(f"{most} positions with those before, more than max_len "
                             f"{config.max_len}")

        at = token_positions(real)[:, -T:]
        x, _ = model.embed(ids, self._embedding, self._positions, None, at)
        keep = None
        if T > 1 or not real.all():
            keep = causal_mask(T, real.shape[1]) & real[:, None, None, :]
        y = model.decoder.extend(self._decoder, x, keep, self._memory_mask)
        if self.batch_size is None:
            self._sources = np.zeros(B, np.intp)  # there are none to tell apart
        self._real, self.batch_size = real, B
        return np.asarray(model.output(y[:, -1]))
