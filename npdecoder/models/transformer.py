"""Transformer: source and target ids to logits, by an Encoder and a Decoder."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from npdecoder.blocks.decoder import Decoder, DecoderContext
from npdecoder.blocks.encoder import Encoder, EncoderContext
from npdecoder.core import Array, as_ids, as_sequences, construction_rng
from npdecoder.layers.embedding import Embedding, Unembedding, UnembeddingContext
from npdecoder.layers.linear import Linear, LinearContext
from npdecoder.masks import as_mask, combine_masks
from npdecoder.models.config import TransformerConfig
from npdecoder.models.token_model import EmbedContext, TokenModel, as_batch, make_positions


class EncodeContext(NamedTuple):
    embed: EmbedContext
    encoder: EncoderContext


class DecodeContext(NamedTuple):
    embed: EmbedContext
    decoder: DecoderContext
    output: LinearContext | UnembeddingContext


class TransformerContext(NamedTuple):
    encode: EncodeContext
    decode: DecodeContext


class Transformer(TokenModel):
    """logits = output(decoder(embed(target_ids), encoder(embed(source_ids)))).

    config: a TransformerConfig. rng: a Generator or an int, the seed of all initial weights (see
    Linear, Embedding, LayerNorm, LearnedPositions). dtype: of the weights and all that is computed.

    It makes its own masks: padding (pad_id) is hidden in the source, for the encoder and the
    cross-attention, and in the target, which is causal besides. Positions count the tokens that are
    not padding, so that padding on the left changes nothing.

    Source: Vaswani et al. 2017, 3.1, figure 1. softmax(logits[:, t]) is the distribution of the
    token after target_ids[:, t].
    """

    def __init__(
        self,
        config: TransformerConfig,
        rng: np.random.Generator | int | None = 0,
        *,
        dtype: DTypeLike = np.float32,
    ) -> None:
        if not isinstance(config, TransformerConfig):
            raise TypeError(f"config is a {type(config).__name__}, expected a TransformerConfig")
        super().__init__(config)
        rng = construction_rng(rng)
        self.config = c = config
        tie = c.tie_embeddings
        options = {"rng": rng, "dtype": dtype, **c.stack_options()}

        self.source_embedding = Embedding(
            c.source_vocab_size, c.d_model, c.scale_embeddings, rng=rng, dtype=dtype
        )
        self.target_embedding = self.source_embedding
        if tie not in ("source_target", "all"):
            self.target_embedding = Embedding(
                c.target_vocab_size, c.d_model, c.scale_embeddings, rng=rng, dtype=dtype
            )
        self.source_positions = make_positions(c, rng, dtype)
        self.target_positions = make_positions(c, rng, dtype)
        self.encoder = Encoder(c.num_encoder_layers, **options)
        self.decoder = Decoder(c.num_decoder_layers, cross_attention=c.cross_attention, **options)
        self.output: Linear | Unembedding
        if tie in ("target_output", "all"):
            self.output = Unembedding(self.target_embedding, c.output_bias)
        else:
            vocab_size = c.target_vocab_size
            self.output = Linear(c.d_model, vocab_size, c.output_bias, rng=rng, dtype=dtype)

    def forward(
        self,
        source_ids: ArrayLike,
        target_ids: ArrayLike,
        source_mask: ArrayLike | None = None,
        target_mask: ArrayLike | None = None,
        rng: np.random.Generator | None = None,
    ) -> tuple[Array, TransformerContext]:
        """source_ids (B, S), target_ids (B, T) -> logits (B, T, target_vocab_size).

        Teacher forcing: target_ids are the targets shifted right, logits[:, t] is about the next.
        source_mask: hides source positions besides the padding, from all that reads the source; it
        masks keys, (1, S) or (B, 1, 1, S). target_mask: hides target positions besides padding and
        future, (T, T) or 4 dimensions. rng: applies dropout.

        Errors: TypeError and IndexError for bad ids; ValueError for shapes, masks and lengths.
        """
        source_ids, target_ids = self._check_ids(source_ids, target_ids)
        B, T = target_ids.shape
        as_mask("target_mask", target_mask, (B, self.num_heads, T, T))  # an error before any work
        # 1. encode
        memory, encode = self.encode(source_ids, source_mask, rng)
        # 2. decode
        logits, decode = self.decode(target_ids, memory, source_ids, source_mask, target_mask, rng)
        return logits, TransformerContext(encode, decode)

    def backward(self, ctx: TransformerContext, dy: ArrayLike) -> tuple[()]:
        """dy (B, T, target_vocab_size), the gradient of the logits -> (): ids have no gradient."""
        # 2. decode
        dmemory = self.decode_backward(ctx.decode, dy)
        # 1. encode
        return self.encode_backward(ctx.encode, dmemory)

    def encode(
        self,
        source_ids: ArrayLike,
        source_mask: ArrayLike | None = None,
        rng: np.random.Generator | None = None,
    ) -> tuple[Array, EncodeContext]:
        """source_ids (B, S) -> memory (B, S, d_model)."""
        c = self.config
        source_ids = as_batch("source_ids", source_ids, c.source_vocab_size, c)
        keep = self.source_mask(source_ids, source_mask)
        x, embed = self.embed(source_ids, self.source_embedding, self.source_positions, rng)
        memory, encoder = self.encoder.forward(x, keep, rng)
        return memory, EncodeContext(embed, encoder)

    def encode_backward(self, ctx: EncodeContext, dmemory: ArrayLike) -> tuple[()]:
        """dmemory (B, S, d_model) -> ()."""
        dx = self.encoder.backward(ctx.encoder, dmemory)
        return self.embed_backward(ctx.embed, dx, self.source_embedding, self.source_positions)

    def decode(
        self,
        target_ids: ArrayLike,
        memory: ArrayLike,
        source_ids: ArrayLike,
        source_mask: ArrayLike | None = None,
        target_mask: ArrayLike | None = None,
        rng: np.random.Generator | None = None,
    ) -> tuple[Array, DecodeContext]:
        """target_ids (B, T), memory (B, S, d_model) of source_ids -> logits (B, T, V)."""
        source_ids, target_ids = self._check_ids(source_ids, target_ids)
        memory = as_sequences("memory", memory, self.config.d_model, self.source_embedding.W.dtype)
        if memory.shape[:2] != source_ids.shape:
            shapes = f"memory {memory.shape} and source_ids {source_ids.shape}"
            raise ValueError(f"{shapes}: expected (B, S, d_model) and (B, S)")
        memory_keep = self.source_mask(source_ids, source_mask)
        target_keep = self._causal_mask("target_mask", target_ids, target_mask)
        # 1. embed
        x, embed = self.embed(target_ids, self.target_embedding, self.target_positions, rng)
        # 2. decode
        y, decoder = self.decoder.forward(x, memory, target_keep, memory_keep, rng)
        # 3. one logit a word
        logits, output = self.output.forward(y)
        return logits, DecodeContext(embed, decoder, output)

    def decode_backward(self, ctx: DecodeContext, dy: ArrayLike) -> Array:
        """dy (B, T, target_vocab_size) -> dmemory (B, S, d_model)."""
        # 3.
        dstack = self.output.backward(ctx.output, dy)  # type: ignore[arg-type]
        # 2.
        dx, dmemory = self.decoder.backward(ctx.decoder, dstack)
        # 1.
        self.embed_backward(ctx.embed, dx, self.target_embedding, self.target_positions)
        return np.asarray(dmemory)

    def source_mask(self, source_ids: ArrayLike, mask: ArrayLike | None = None) -> Array | None:
        """The keys of the source that may be attended to, (B, 1, 1, S); None: all of them."""
        source_ids = as_ids("source_ids", source_ids, self.config.source_vocab_size)
        if source_ids.ndim != 2:
            raise ValueError(f"source_ids has shape {source_ids.shape}, expected (B, S)")
        B, S = source_ids.shape
        keep = as_mask("source_mask", mask, (B, 1, 1, S))
        return combine_masks(self._padding_mask(source_ids), keep)

    def _check_ids(
        self, source_ids: ArrayLike, target_ids: ArrayLike
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        c = self.config
        source_ids = as_batch("source_ids", source_ids, c.source_vocab_size, c)
        target_ids = as_batch("target_ids", target_ids, c.target_vocab_size, c)
        if len(source_ids) != len(target_ids):
            raise ValueError(
                f"source_ids {source_ids.shape} and target_ids {target_ids.shape}: expected (B, S) "
                f"and (B, T) of one batch"
            )
        return source_ids, target_ids
