"""TokenModel: what models of token ids share, from ids to vectors with positions, and the masks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from npdecoder.core import Array, Layer, as_ids
from npdecoder.layers.dropout import Dropout, DropoutContext
from npdecoder.layers.embedding import Embedding, EmbeddingContext
from npdecoder.layers.positions import (
    LearnedContext,
    LearnedPositions,
    SinusoidalContext,
    SinusoidalPositions,
)
from npdecoder.masks import as_mask, causal_mask, combine_masks, padding_mask
from npdecoder.models.config import ModelConfig


class EmbedContext(NamedTuple):
    embedding: EmbeddingContext
    positions: SinusoidalContext | LearnedContext
    dropout: DropoutContext


class TokenModel(Layer):
    """Base class of the models; it has no parameters of its own."""

    def __init__(self, config: ModelConfig) -> None:
        self.pad_id = config.pad_id
        self.num_heads = config.num_heads
        rate = config.dropout if config.position_dropout is None else config.position_dropout
        self.position_dropout = Dropout(rate)

    def embed(
        self,
        ids: NDArray[np.intp],
        embedding: Embedding,
        positions: SinusoidalPositions | LearnedPositions,
        rng: np.random.Generator | None,
        at: NDArray[np.intp] | None = None,
    ) -> tuple[Array, EmbedContext]:
        """ids (B, T) -> x (B, T, d_model): embedding, plus position, with dropout.

        at (B, T): the positions; None: those of sequences that begin with ids.
        """
        if at is None and self.pad_id is not None and (ids == self.pad_id).any():
            at = token_positions(ids != self.pad_id)
        e, embedding_ctx = embedding.forward(ids)
        e_p, positions_ctx = positions.forward(e, at)
        x, dropout_ctx = self.position_dropout.forward(e_p, rng)
        return x, EmbedContext(embedding_ctx, positions_ctx, dropout_ctx)

    def embed_backward(
        self,
        ctx: EmbedContext,
        dx: Array,
        embedding: Embedding,
        positions: SinusoidalPositions | LearnedPositions,
    ) -> tuple[()]:
        de_p = self.position_dropout.backward(ctx.dropout, dx)
        de = positions.backward(ctx.positions, de_p)  # type: ignore[arg-type]
        return embedding.backward(ctx.embedding, de)

    def _padding_mask(self, ids: NDArray[np.intp]) -> Array | None:
        """(B, 1, 1, S), or None where there is no padding to hide."""
        if self.pad_id is None or not (ids == self.pad_id).any():
            return None
        return padding_mask(ids, self.pad_id)

    def _causal_mask(self, name: str, ids: NDArray[np.intp], mask: ArrayLike | None) -> Array:
        """What position may attend to which: the past, without padding, as far as mask allows."""
        B, T = ids.shape
        user_mask = as_mask(name, mask, (B, self.num_heads, T, T))
        keep = combine_masks(self._padding_mask(ids), causal_mask(T))
        return np.asarray(combine_masks(keep, user_mask))


def make_positions(
    config: ModelConfig, rng: np.random.Generator, dtype: DTypeLike
) -> SinusoidalPositions | LearnedPositions:
    if config.positions == "sinusoidal":
        return SinusoidalPositions(config.d_model, config.max_len)
    return LearnedPositions(config.max_len, config.d_model, rng=rng, dtype=dtype)


def token_positions(real: NDArray[np.bool_]) -> NDArray[np.intp]:
    """(B, T): how many real tokens stand before each; real (B, T) is False for padding."""
    positions: NDArray[np.intp] = np.maximum(np.cumsum(real, axis=1) - 1, 0)
    return positions


def as_batch(name: str, ids: ArrayLike, vocab_size: int, config: ModelConfig) -> NDArray[np.intp]:
    """ids (B, T) as intp.

    Errors: those of as_ids; ValueError for another rank, and for more tokens that are not padding
    than max_len.
    """
    array = as_ids(name, ids, vocab_size)
    if array.ndim != 2:
        raise ValueError(f"{name} has shape {array.shape}, expected (B, T)")
    longest = array.shape[1]
    if longest > config.max_len and config.pad_id is not None:
        longest = int((array != config.pad_id).sum(axis=1).max(initial=0))
    if longest > config.max_len:
        raise ValueError(f"{name} has {longest} positions, more than max_len {config.max_len}")
    return array
