"""EncoderLayer: self-attention and feed-forward, each on a residual path; Encoder: a stack."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from npdecoder.blocks.feed_forward import FeedForward, FeedForwardContext
from npdecoder.blocks.multi_head_attention import MultiHeadAttention, MultiHeadAttentionContext
from npdecoder.blocks.residual import LeaveContext, Residual
from npdecoder.core import (
    Array,
    Layer,
    as_gradient,
    as_sequences,
    construction_rng,
    dropout_rng,
    flag,
    fraction,
    non_negative,
    positive_int,
    rectangular,
)
from npdecoder.layers.layer_norm import LayerNorm, LayerNormContext
from npdecoder.masks import as_mask


class EncoderLayerContext(NamedTuple):
    enter1: LayerNormContext | None
    self_attention: MultiHeadAttentionContext
    leave1: LeaveContext
    enter2: LayerNormContext | None
    feed_forward: FeedForwardContext
    leave2: LeaveContext


class EncoderLayer(Layer):
    """Pre-LN: x1 = x + self_attention(norm1(x)), y = x1 + feed_forward(norm2(x1)).
    Post-LN: x1 = norm1(x + self_attention(x)), y = norm2(x1 + feed_forward(x1)).

    d_model, num_heads, d_ff (None: 4 d_model), d_k and d_v (None: d_model / num_heads): sizes
    norm: "pre" or "post"; norm_bias: whether the norms have a beta; norm_eps
    attention_bias, feed_forward_bias: whether their Linears have a b
    activation: "relu", "gelu" (erf form) or "gelu_tanh"
    dropout: the rate inside the feed-forward and before each residual sum
    attention_dropout: the rate on the attention weights; None: the same as dropout
    rng, dtype: of the initial weights; see Linear and LayerNorm

    Sources: Vaswani et al. 2017, 3.1 (post); Xiong et al. 2020 (pre).
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        d_k: int | None = None,
        d_v: int | None = None,
        norm: str = "pre",
        norm_bias: bool = True,
        norm_eps: float = 1e-5,
        attention_bias: bool = False,
        feed_forward_bias: bool = True,
        activation: str = "relu",
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        rng: np.random.Generator | int | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        rng = construction_rng(rng)
        norm_eps, norm_bias = non_negative("norm_eps", norm_eps), flag("norm_bias", norm_bias)
        attention_bias = flag("attention_bias", attention_bias)
        feed_forward_bias = flag("feed_forward_bias", feed_forward_bias)
        dropout = fraction("dropout", dropout)
        if attention_dropout is None:
            attention_dropout = dropout
        attention_dropout = fraction("attention_dropout", attention_dropout)
        self.self_attention = MultiHeadAttention(
            d_model, num_heads, d_k, d_v, attention_bias, attention_dropout, rng=rng, dtype=dtype
        )
        self.feed_forward = FeedForward(
            d_model, d_ff, activation, feed_forward_bias, dropout, rng=rng, dtype=dtype
        )
        self.norm1 = LayerNorm(d_model, norm_eps, norm_bias, dtype=dtype)
        self.norm2 = LayerNorm(d_model, norm_eps, norm_bias, dtype=dtype)
        self.residual1 = Residual(self.norm1, norm, dropout)
        self.residual2 = Residual(self.norm2, norm, dropout)

    def forward(
        self, x: ArrayLike, mask: ArrayLike | None = None, rng: np.random.Generator | None = None
    ) -> tuple[Array, EncoderLayerContext]:
        """x (B, T, d_model) -> y (B, T, d_model). mask: (T, T) or 4 dimensions, True =
        may attend, or floats, added to the scores; None: all is seen.
        """
        gamma = self.norm1.gamma.value
        x = as_sequences("x", x, len(gamma), gamma.dtype)
        (B, T, _), h = x.shape, self.self_attention.num_heads
        mask = as_mask("mask", mask, (B, h, T, T))
        dropout_rng(rng)
        # 1. self-attention
        h1, enter1 = self.residual1.enter(x)
        s1, self_attention = self.self_attention.forward(h1, h1, h1, mask, rng)
        x1, leave1 = self.residual1.leave(x, s1, rng)
        # 2. feed-forward
        h2, enter2 = self.residual2.enter(x1)
        s2, feed_forward = self.feed_forward.forward(h2, rng)
        y, leave2 = self.residual2.leave(x1, s2, rng)
        return y, EncoderLayerContext(enter1, self_attention, leave1, enter2, feed_forward, leave2)

    def backward(self, ctx: EncoderLayerContext, dy: ArrayLike) -> Array:
        """dy (B, T, d_model) -> dx (B, T, d_model): the same calls, in reverse.

        x1 goes two ways, past the sublayer and through it: its gradient is the sum of both. h1 is
        query, key and value at once: the sum of three.
        """
        dy = as_gradient("dy", dy, ctx.feed_forward.linear1.x.shape, self.norm1.gamma.dtype)
        # 2. feed-forward
        dx1_past, ds2 = self.residual2.leave_backward(ctx.leave2, dy)
        dh2 = self.feed_forward.backward(ctx.feed_forward, ds2)
        dx1 = dx1_past + self.residual2.enter_backward(ctx.enter2, dh2)
        # 1. self-attention
        dx_past, ds1 = self.residual1.leave_backward(ctx.leave1, dx1)
        dquery, dkey, dvalue = self.self_attention.backward(ctx.self_attention, ds1)
        dh1 = dquery + dkey
        dh1 += dvalue
        dx = dx_past + self.residual1.enter_backward(ctx.enter1, dh1)
        return dx


class EncoderContext(NamedTuple):
    layers: list[EncoderLayerContext]
    norm: LayerNormContext | None


class Encoder(Layer):
    """num_layers EncoderLayers, each with its own weights, and a final LayerNorm `norm`.

    final_norm: whether there is one; None: only if norm is "pre", whose layers end without.
    options: those of EncoderLayer.
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        norm: str = "pre",
        final_norm: bool | None = None,
        norm_bias: bool = True,
        norm_eps: float = 1e-5,
        rng: np.random.Generator | int | None = None,
        dtype: DTypeLike = np.float32,
        **options: Any,
    ) -> None:
        rng = construction_rng(rng)
        options |= {"norm": norm, "norm_bias": norm_bias, "norm_eps": norm_eps, "dtype": dtype}
        self.layers = [
            EncoderLayer(d_model, num_heads, d_ff, rng=rng, **options)
            for _ in range(positive_int("num_layers", num_layers))
        ]
        final_norm = norm == "pre" if final_norm is None else flag("final_norm", final_norm)
        self.norm = LayerNorm(d_model, norm_eps, norm_bias, dtype=dtype) if final_norm else None

    def forward(
        self, x: ArrayLike, mask: ArrayLike | None = None, rng: np.random.Generator | None = None
    ) -> tuple[Array, EncoderContext]:
        """x (B, S, d_model) -> memory (B, S, d_model). mask: every layer's, see EncoderLayer."""
        layers = []
        for layer in self.layers:
            x, ctx = layer.forward(x, mask, rng)
            layers.append(ctx)
        norm = None
        if self.norm is not None:
            x, norm = self.norm.forward(x)
        return np.asarray(x), EncoderContext(layers, norm)

    def backward(self, ctx: EncoderContext, dy: ArrayLike) -> Array:
        """dy (B, S, d_model) -> dx (B, S, d_model)."""
        dx = rectangular("dy", dy)
        if self.norm is not None and ctx.norm is not None:
            dx = self.norm.backward(ctx.norm, dx)
        for layer, layer_ctx in zip(reversed(self.layers), reversed(ctx.layers)):
            dx = layer.backward(layer_ctx, dx)
        return dx
