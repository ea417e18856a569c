"""Decoding: from a model's logits to sequences of ids."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from npdecoder.core import as_ids, positive_int
from npdecoder.models.transformer import Transformer


def greedy_decode(
    model: Transformer,
    source_ids: ArrayLike,
    *,
    bos_id: int,
    eos_id: int | None,
    max_new_tokens: int | None = None,
) -> list[list[int]]:
    """source_ids (B, S) -> for each item the ids generated, without BOS and EOS.

    From BOS on, the most probable token is appended (among equals the lowest id) until it is EOS
    (eos_id None: there is none) or there are max_new_tokens, by default and at most as many as the
    model has positions for. Each step is a full forward pass of the decoder over what there is; the
    source is encoded once.

    Errors: ValueError for NaN logits; TypeError or IndexError for a bos_id or eos_id that is no
    target id; those of model.encode for source_ids.
    """
    for name, value in ("bos_id", bos_id), ("eos_id", eos_id):
        if value is not None:
            as_ids(name, value, model.config.target_vocab_size)
    max_len = model.config.max_len
    limit = max_len if max_new_tokens is None else positive_int("max_new_tokens", max_new_tokens)
    memory, _ = model.encode(source_ids)
    B = len(memory)
    ids = np.full((B, 1), bos_id, np.intp)
    ended = np.zeros(B, np.bool_)
    while ids.shape[1] <= min(limit, max_len) and not ended.all():
        logits, _ = model.decode(ids, memory, source_ids)
        last = logits[:, -1]
        if np.isnan(last).any():
            raise ValueError(f"the logits of token {ids.shape[1]} are NaN: there is no best token")
        # an item that has ended goes on with EOS, which the others cannot see
        best = last.argmax(axis=-1)
        if eos_id is not None:
            best = np.where(ended, eos_id, best)
            ended |= best == eos_id
        ids = np.concatenate([ids, best[:, None]], axis=1)
    generated = [row[1:].tolist() for row in ids]
    return [row[: row.index(eos_id)] if eos_id in row else row for row in generated]
