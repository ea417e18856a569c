"""DecoderLayer: masked self-attention, cross-attention and feed-forward, each on a residual path;
Decoder: a stack of them.

cross_attention says where the keys and values of the memory come from:
    "per_layer"  every layer projects the memory itself (Vaswani et al. 2017)
    "shared"     the Decoder projects it once, for all layers (the articles' S1): a layer takes the
                 pair (K, V) as its memory
    "none"       there is no memory: a decoder-only stack, of layers with two sublayers
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from npdecoder.blocks.cache import DecoderState, KeyValueCache
from npdecoder.blocks.feed_forward import FeedForward, FeedForwardContext
from npdecoder.blocks.multi_head_attention import (
    AttendContext,
    MemoryAttention,
    MemoryProjection,
    MultiHeadAttention,
    MultiHeadAttentionContext,
    ProjectContext,
)
from npdecoder.blocks.residual import LeaveContext, Residual
from npdecoder.core import (
    Array,
    Layer,
    as_array,
    as_gradient,
    as_sequences,
    construction_rng,
    dropout_rng,
    flag,
    fraction,
    non_negative,
    one_of,
    positive_int,
    rectangular,
)
from npdecoder.layers.layer_norm import LayerNorm, LayerNormContext
from npdecoder.masks import as_mask

CROSS_ATTENTION = ("per_layer", "shared", "none")


class CrossAttentionContext(NamedTuple):
    enter: LayerNormContext | None
    attention: MultiHeadAttentionContext | AttendContext
    leave: LeaveContext


class DecoderLayerContext(NamedTuple):
    enter1: LayerNormContext | None
    self_attention: MultiHeadAttentionContext
    leave1: LeaveContext
    cross: CrossAttentionContext | None
    enter_last: LayerNormContext | None
    feed_forward: FeedForwardContext
    leave_last: LeaveContext


class DecoderLayer(Layer):
    """Pre-LN:   x1 = x  + self_attention(norm1(x), target_mask)
              x2 = x1 + cross_attention(norm2(x1), memory, memory_mask)
              y  = x2 + feed_forward(norm3(x2))
    Post-LN has each norm after its sum. Without cross-attention the second line is not there, and
    the feed-forward's norm is norm2.

    cross_attention: "per_layer" (memory is an array), "shared" (memory is the pair (K, V) that was
    projected before; no W_k and W_v here) or "none". The other options are those of EncoderLayer.

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
        cross_attention: str = "per_layer",
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
        one_of("cross_attention", cross_attention, CROSS_ATTENTION)
        norm_eps, norm_bias = non_negative("norm_eps", norm_eps), flag("norm_bias", norm_bias)
        attention_bias = flag("attention_bias", attention_bias)
        feed_forward_bias = flag("feed_forward_bias", feed_forward_bias)
        dropout = fraction("dropout", dropout)
        if attention_dropout is None:
            attention_dropout = dropout
        attention_dropout = fraction("attention_dropout", attention_dropout)
        attention_options = (d_model, num_heads, d_k, d_v, attention_bias, attention_dropout)
        norm_options = (d_model, norm_eps, norm_bias)

        self.self_attention = MultiHeadAttention(*attention_options, rng=rng, dtype=dtype)
        self.cross_attention: MultiHeadAttention | MemoryAttention | None = None
        if cross_attention == "per_layer":
            self.cross_attention = MultiHeadAttention(*attention_options, rng=rng, dtype=dtype)
        elif cross_attention == "shared":
            self.cross_attention = MemoryAttention(*attention_options, rng=rng, dtype=dtype)
        self.feed_forward = FeedForward(
            d_model, d_ff, activation, feed_forward_bias, dropout, rng=rng, dtype=dtype
        )
        self.norm1 = LayerNorm(*norm_options, dtype=dtype)
        self.norm2 = LayerNorm(*norm_options, dtype=dtype)
        self.residual1 = Residual(self.norm1, norm, dropout)
        self.residual2 = Residual(self.norm2, norm, dropout)
        if self.cross_attention is not None:
            self.norm3 = LayerNorm(*norm_options, dtype=dtype)
            self.residual3 = Residual(self.norm3, norm, dropout)
        self.residual_last = self.residual2 if self.cross_attention is None else self.residual3

    def forward(
        self,
        x: ArrayLike,
        memory: ArrayLike | tuple[Array, Array] | None = None,
        target_mask: ArrayLike | None = None,
        memory_mask: ArrayLike | None = None,
        rng: np.random.Generator | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Array, DecoderLayerContext]:
        """x (B, T, d_model) and memory -> y (B, T, d_model).

        memory: (B, S, d_model); if shared, the pair K (B, h, S, d_k), V (B, h, S, d_v).
        target_mask: (T, T) or 4 dimensions, for the self-attention (causality is a mask like any
        other: None makes everything visible). memory_mask: (T, S) or 4 dimensions. In both True =
        may attend, or floats, added to the scores.
        cache: for decoding. x are the T positions after those in it, target_mask is
        (T, cache.length + T), and memory is the pair (K, V), whether shared or not.

        Errors: ValueError for shapes that do not fit, and for a memory where none is used, or none
        where one is.
        """
        gamma = self.norm1.gamma.value
        x = as_sequences("x", x, len(gamma), gamma.dtype)
        memory, target_mask, memory_mask = self._check(x, memory, target_mask, memory_mask, cache)
        dropout_rng(rng)
        # 1. self-attention
        h1, enter1 = self.residual1.enter(x)
        s1, self_attention = self.self_attention.forward(h1, h1, h1, target_mask, rng, cache)
        x1, leave1 = self.residual1.leave(x, s1, rng)
        # 2. cross-attention
        x2, cross = self._cross_forward(x1, memory, memory_mask, rng)
        # 3. feed-forward
        h3, enter_last = self.residual_last.enter(x2)
        s3, feed_forward = self.feed_forward.forward(h3, rng)
        y, leave_last = self.residual_last.leave(x2, s3, rng)
        return y, DecoderLayerContext(
            enter1, self_attention, leave1, cross, enter_last, feed_forward, leave_last
        )

    def backward(self, ctx: DecoderLayerContext, dy: ArrayLike) -> Any:
        """dy (B, T, d_model) -> (dx, dmemory); if shared (dx, dK, dV); dx without cross-attention.

        The same calls, in reverse. x1 and x2 go past a sublayer and through it: their gradients are
        the sum of both ways.
        """
        dy = as_gradient("dy", dy, ctx.feed_forward.linear1.x.shape, self.norm1.gamma.dtype)
        self.self_attention.refuse_cached(ctx.self_attention)
        # 3. feed-forward
        dx2_past, ds3 = self.residual_last.leave_backward(ctx.leave_last, dy)
        dh3 = self.feed_forward.backward(ctx.feed_forward, ds3)
        dx2 = dx2_past + self.residual_last.enter_backward(ctx.enter_last, dh3)
        # 2. cross-attention
        dx1, *dmemory = self._cross_backward(ctx.cross, dx2)
        # 1. self-attention
        dx_past, ds1 = self.residual1.leave_backward(ctx.leave1, dx1)
        dquery, dkey, dvalue = self.self_attention.backward(ctx.self_attention, ds1)
        dh1 = dquery + dkey
        dh1 += dvalue
        dx = dx_past + self.residual1.enter_backward(ctx.enter1, dh1)
        return (dx, *dmemory) if dmemory else dx

    def _cross_forward(
        self, x1: Array, memory: Any, mask: ArrayLike | None, rng: np.random.Generator | None
    ) -> tuple[Array, CrossAttentionContext | None]:
        if self.cross_attention is None:
            return x1, None
        attention: MultiHeadAttentionContext | AttendContext
        h2, enter = self.residual2.enter(x1)
        if isinstance(memory, tuple):  # projected before
            K, V = memory
            s2, attention = self.cross_attention.attend(h2, K, V, mask, rng)
        else:
            assert isinstance(self.cross_attention, MultiHeadAttention)
            s2, attention = self.cross_attention.forward(h2, memory, memory, mask, rng)
        x2, leave = self.residual2.leave(x1, s2, rng)
        return x2, CrossAttentionContext(enter, attention, leave)

    def _cross_backward(self, ctx: CrossAttentionContext | None, dx2: Array) -> tuple[Array, ...]:
        """dx2 -> dx1, and beside it dmemory, or dK and dV, or nothing."""
        if self.cross_attention is None or ctx is None:
            return (dx2,)
        dx1_past, ds2 = self.residual2.leave_backward(ctx.leave, dx2)
        if isinstance(ctx.attention, AttendContext):
            dh2, *dmemory = self.cross_attention.attend_backward(ctx.attention, ds2)
        else:
            dh2, dkey, dvalue = self.cross_attention.backward(ctx.attention, ds2)  # type: ignore[arg-type]
            dmemory = [dkey + dvalue]  # memory was key and value at once
        dx1 = dx1_past + self.residual2.enter_backward(ctx.enter, dh2)
        return (dx1, *dmemory)

    def _check(
        self, x: Array, memory: Any, target_mask: Any, memory_mask: Any, cache: KeyValueCache | None
    ) -> tuple[Any, Array | None, Array | None]:
        """memory and the masks as arrays that fit x, or an error in the names of forward."""
        (B, T, d_model), h = x.shape, self.self_attention.num_heads
        past = 0 if cache is None else cache.length
        target_mask = as_mask("target_mask", target_mask, (B, h, T, past + T))
        if self.cross_attention is None:
            if memory is not None or memory_mask is not None:
                raise ValueError("memory or memory_mask was given, but there is no cross-attention")
            return None, target_mask, None
        if memory is None:
            raise ValueError("memory is None, but there is cross-attention")
        if isinstance(self.cross_attention, MultiHeadAttention) and cache is None:
            memory = as_sequences("memory", memory, d_model, x.dtype)
            if len(memory) != B:
                raise ValueError(f"x {x.shape} and memory {memory.shape}: expected one batch")
            S = memory.shape[1]
        else:
            memory, S = self._check_pair(memory, B, h)
        return memory, target_mask, as_mask("memory_mask", memory_mask, (B, h, T, S))

    def _check_pair(self, memory: Any, B: int, h: int) -> tuple[tuple[Array, Array], int]:
        """The pair (K, V) of shared memory as arrays, and its length S."""
        assert self.cross_attention is not None
        W_q, W_o = self.cross_attention.W_q.W.value, self.cross_attention.W_o.W.value
        if not isinstance(memory, tuple) or len(memory) != 2:
            raise ValueError("memory is not the pair (K, V) of keys and values, projected before")
        K = as_array("memory K", memory[0], W_q.dtype)
        V = as_array("memory V", memory[1], W_q.dtype)
        S = K.shape[2] if K.ndim == 4 else 0
        expected = (B, h, S, W_q.shape[1] // h), (B, h, S, W_o.shape[0] // h)
        if (K.shape, V.shape) != expected:
            raise ValueError(f"memory (K, V) has shapes {K.shape}, {V.shape}, expected {expected}")
        return (K, V), S


class DecoderContext(NamedTuple):
    project: ProjectContext | None
    layers: list[DecoderLayerContext]
    norm: LayerNormContext | None


class Decoder(Layer):
    """num_layers DecoderLayers, each with its own weights, and a final LayerNorm `norm`.

    final_norm: whether there is one; None: only if norm is "pre", whose layers end without.
    cross_attention "shared": the Decoder owns the one MemoryProjection.
    options: those of DecoderLayer.
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        d_k: int | None = None,
        d_v: int | None = None,
        cross_attention: str = "per_layer",
        norm: str = "pre",
        final_norm: bool | None = None,
        norm_bias: bool = True,
        norm_eps: float = 1e-5,
        attention_bias: bool = False,
        rng: np.random.Generator | int | None = None,
        dtype: DTypeLike = np.float32,
        **options: Any,
    ) -> None:
        rng = construction_rng(rng)
        one_of("cross_attention", cross_attention, CROSS_ATTENTION)
        attention_bias = flag("attention_bias", attention_bias)
        options |= {"norm": norm, "norm_bias": norm_bias, "norm_eps": norm_eps, "dtype": dtype}
        options |= {"d_k": d_k, "d_v": d_v, "attention_bias": attention_bias}
        self.memory_projection: MemoryProjection | None = None
        if cross_attention == "shared":
            self.memory_projection = MemoryProjection(
                d_model, num_heads, d_k, d_v, attention_bias, rng=rng, dtype=dtype
            )
        self.layers = [
            DecoderLayer(
                d_model, num_heads, d_ff, cross_attention=cross_attention, rng=rng, **options
            )
            for _ in range(positive_int("num_layers", num_layers))
        ]
        final_norm = norm == "pre" if final_norm is None else flag("final_norm", final_norm)
        self.norm = LayerNorm(d_model, norm_eps, norm_bias, dtype=dtype) if final_norm else None

    def forward(
        self,
        x: ArrayLike,
        memory: ArrayLike | None = None,
        target_mask: ArrayLike | None = None,
        memory_mask: ArrayLike | None = None,
        rng: np.random.Generator | None = None,
    ) -> tuple[Array, DecoderContext]:
        """x (B, T, d_model), memory (B, S, d_model) -> y (B, T, d_model).

        Masks and errors: as in DecoderLayer, for every layer.
        """
        project = None
        layer_memory: Any = memory
        if self.memory_projection is not None:
            if memory is None:
                raise ValueError("memory is None, but there is cross-attention")
            gamma = self.layers[0].norm1.gamma.value
            x = as_sequences("x", x, len(gamma), gamma.dtype)
            memory = as_sequences("memory", memory, len(gamma), gamma.dtype)
            if len(memory) != len(x):
                raise ValueError(f"x {x.shape} and memory {memory.shape}: expected one batch")
            (B, T, _), S, h = x.shape, memory.shape[1], self.memory_projection.num_heads
            target_mask = as_mask("target_mask", target_mask, (B, h, T, T))
            memory_mask = as_mask("memory_mask", memory_mask, (B, h, T, S))
            dropout_rng(rng)
            layer_memory, project = self.memory_projection.forward(memory)
        layers = []
        for layer in self.layers:
            x, ctx = layer.forward(x, layer_memory, target_mask, memory_mask, rng)
            layers.append(ctx)
        norm = None
        if self.norm is not None:
            x, norm = self.norm.forward(x)
        return np.asarray(x), DecoderContext(project, layers, norm)

    def new_state(self, memory: ArrayLike | None = None) -> DecoderState:
        """A state without positions for `extend`; it holds K and V of memory (B, S, d_model)."""
        crossing = self.layers[0].cross_attention is not None
        if (memory is not None) != crossing:
            what = "None, but there is" if crossing else "given, but there is no"
            raise ValueError(f"memory is {what} cross-attention")
        if memory is None:
            return DecoderState([None] * len(self.layers))
        if self.memory_projection is not None:
            return DecoderState([self.memory_projection(memory)] * len(self.layers))
        projections = [cast(MultiHeadAttention, layer.cross_attention) for layer in self.layers]
        return DecoderState([project.project(memory, memory)[0] for project in projections])

    def extend(
        self,
        state: DecoderState,
        x: ArrayLike,
        target_mask: ArrayLike | None = None,
        memory_mask: ArrayLike | None = None,
    ) -> Array:
        """x (B, T, d_model), the T positions after those in state, which takes them up -> y.

        y (B, T, d_model) are the last T rows of what forward returns for all positions under a
        causal mask. target_mask: of the scores (B, h, T, state.length + T); causality inside x is
        the caller's, as everywhere (causal_mask(T, state.length + T)). No gradient, no dropout.

        Errors: as in DecoderLayer; state is then unchanged.
        """
        _ = state.length  # an error if it is broken
        for layer, cache, memory in zip(self.layers, state.caches, state.memory):
            x, _ = layer.forward(x, memory, target_mask, memory_mask, cache=cache)
        return np.asarray(x if self.norm is None else self.norm(x))

    def backward(self, ctx: DecoderContext, dy: ArrayLike) -> Any:
        """dy (B, T, d_model) -> (dx, dmemory), or dx without cross-attention.

        Every layer reads the same memory. A small change of it changes the loss through each layer
        l, by δL = sum_l dmemory_l . δmemory = (sum_l dmemory_l) . δmemory: its gradient is the sum
        of the layers' gradients. With shared keys and values the same holds for K and V; these are
        one function of the memory, whose backward is linear in dK and dV, so that the sums go back
        through it once: the same as going back for each layer and adding up.
        """
        dx = rectangular("dy", dy)
        if self.norm is not None and ctx.norm is not None:
            dx = self.norm.backward(ctx.norm, dx)
        dmemory: list[Array] = []  # one array, or dK and dV, or none
        for layer, layer_ctx in zip(reversed(self.layers), reversed(ctx.layers)):
            grads = layer.backward(layer_ctx, dx)
            dx, *parts = grads if isinstance(grads, tuple) else (grads,)
            dmemory = [a + b for a, b in zip(dmemory, parts)] if dmemory else parts
        if self.memory_projection is not None and ctx.project is not None:
            dmemory = [self.memory_projection.backward(ctx.project, (dmemory[0], dmemory[1]))]
        return (dx, *dmemory) if dmemory else dx
