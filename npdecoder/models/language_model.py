"""LanguageModel: ids to the logits of what comes next, by a decoder-only stack (like GPT)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from npdecoder.blocks.decoder import Decoder, DecoderContext
from npdecoder.core import Array, construction_rng
from npdecoder.layers.embedding import Embedding, Unembedding, UnembeddingContext
from npdecoder.layers.linear import Linear, LinearContext
from npdecoder.models.config import LanguageModelConfig
from npdecoder.models.token_model import EmbedContext, TokenModel, as_batch, make_positions


class LanguageModelContext(NamedTuple):
    embed: EmbedContext
    decoder: DecoderContext
    output: LinearContext | UnembeddingContext


class LanguageModel(TokenModel):
    """logits = output(decoder(embed(ids))), the decoder without cross-attention.

    config: a LanguageModelConfig. rng: a Generator or an int, the seed of all initial weights (see
    Linear, Embedding, LayerNorm, LearnedPositions). dtype: of the weights and all that is computed.

    It makes its own mask, causal and without padding (pad_id). Positions count the tokens that are
    not padding, so that padding on the left changes nothing.

    Source: Radford et al. 2018, section 3.1; with norm="pre", Radford et al. 2019, section 2.3.
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        rng: np.random.Generator | int | None = 0,
        *,
        dtype: DTypeLike = np.float32,
    ) -> None:
        if not isinstance(config, LanguageModelConfig):
            raise TypeError(f"config is a {type(config).__name__}, expected a LanguageModelConfig")
        super().__init__(config)
        rng = construction_rng(rng)
        self.config = c = config
        options = {"rng": rng, "dtype": dtype, **c.stack_options()}
        self.embedding = Embedding(
            c.vocab_size, c.d_model, c.scale_embeddings, rng=rng, dtype=dtype
        )
        self.positions = make_positions(c, rng, dtype)
        self.decoder = Decoder(c.num_layers, cross_attention="none", **options)
        self.output: Linear | Unembedding
        if c.tie_embeddings == "target_output":
            self.output = Unembedding(self.embedding, c.output_bias)
        else:
            self.output = Linear(c.d_model, c.vocab_size, c.output_bias, rng=rng, dtype=dtype)

    def forward(
        self, ids: ArrayLike, mask: ArrayLike | None = None, rng: np.random.Generator | None = None
    ) -> tuple[Array, LanguageModelContext]:
        """ids (B, T) -> logits (B, T, vocab_size); logits[:, t] is about the id after ids[:, t].

        mask: hides positions besides padding and future, (T, T) or 4 dimensions. rng: for dropout.

        Errors: TypeError and IndexError for bad ids; ValueError for shapes, masks and lengths.
        """
        ids = as_batch("ids", ids, self.config.vocab_size, self.config)
        keep = self._causal_mask("mask", ids, mask)
        # 1. embed
        x, embed = self.embed(ids, self.embedding, self.positions, rng)
        # 2. decode
        y, decoder = self.decoder.forward(x, None, keep, None, rng)
        # 3. one logit a word
        logits, output = self.output.forward(y)
        return logits, LanguageModelContext(embed, decoder, output)

    def backward(self, ctx: LanguageModelContext, dy: ArrayLike) -> tuple[()]:
        """dy (B, T, vocab_size), the gradient of the logits -> (): ids have no gradient."""
        # 3.
        dstack = self.output.backward(ctx.output, dy)  # type: ignore[arg-type]
        # 2.
        dx = self.decoder.backward(ctx.decoder, dstack)
        # 1.
        return self.embed_backward(ctx.embed, dx, self.embedding, self.positions)
