"""MultiHeadAttention, in two parts, project and attend.

    project(key, value)  -> K, V      W_k and W_v, heads split
    attend(query, K, V)  -> output    W_q, scaled dot-product attention in each head, W_o

MemoryProjection is the first part alone, MemoryAttention the second: with shared memory keys and
values a decoder owns one MemoryProjection, and each of its layers a MemoryAttention. Cached
decoding projects new positions only and attends to all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from npdecoder.blocks.cache import KeyValueCache
from npdecoder.core import (
    Array,
    Layer,
    as_array,
    as_gradient,
    as_sequences,
    construction_rng,
    dropout_rng,
    positive_int,
)
from npdecoder.layers.attention import AttentionContext, ScaledDotProductAttention
from npdecoder.layers.linear import Linear, LinearContext
from npdecoder.masks import as_mask


class ProjectContext(NamedTuple):
    W_k: LinearContext
    W_v: LinearContext


class AttendContext(NamedTuple):
    W_q: LinearContext
    attention: AttentionContext
    W_o: LinearContext


class MultiHeadAttentionContext(NamedTuple):
    project: ProjectContext
    attend: AttendContext


class MemoryProjection(Layer):
    """K = split(key W_k), V = split(value W_v): W_k (d_model, h d_k), W_v (d_model, h d_v).

    forward(memory) projects one memory as both key and value. Initial weights: see Linear.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_k: int | None = None,
        d_v: int | None = None,
        bias: bool = False,
        *,
        rng: np.random.Generator | int | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        rng = construction_rng(rng)
        d_k, d_v = head_widths(d_model, num_heads, d_k, d_v)
        self.num_heads = num_heads
        self.W_k = Linear(d_model, num_heads * d_k, bias, rng=rng, dtype=dtype)
        self.W_v = Linear(d_model, num_heads * d_v, bias, rng=rng, dtype=dtype)

    def forward(self, memory: ArrayLike) -> tuple[tuple[Array, Array], ProjectContext]:
        """memory (B, S, d_model) -> (K, V): K (B, h, S, d_k), V (B, h, S, d_v)."""
        W_k = self.W_k.W.value
        memory = as_sequences("memory", memory, len(W_k), W_k.dtype)
        return self.project(memory, memory)

    def backward(self, ctx: ProjectContext, dy: tuple[ArrayLike, ArrayLike]) -> Array:
        """dy = (dK, dV) -> dmemory (B, S, d_model): memory is used twice, its gradients add up."""
        dkey, dvalue = self.project_backward(ctx, *dy)
        return dkey + dvalue

    def project(
        self, key: ArrayLike, value: ArrayLike
    ) -> tuple[tuple[Array, Array], ProjectContext]:
        """key, value (B, S, d_model) -> (K, V): K (B, h, S, d_k), V (B, h, S, d_v)."""
        return self._project(*self._check_project(key, value))

    def _project(self, key: Array, value: Array) -> tuple[tuple[Array, Array], ProjectContext]:
        keys, W_k = self.W_k.forward(key)
        values, W_v = self.W_v.forward(value)
        K = split_heads(keys, self.num_heads)
        V = split_heads(values, self.num_heads)
        return (K, V), ProjectContext(W_k, W_v)

    def project_backward(
        self, ctx: ProjectContext, dK: ArrayLike, dV: ArrayLike
    ) -> tuple[Array, Array]:
        """dK (B, h, S, d_k), dV (B, h, S, d_v) -> dkey, dvalue (B, S, d_model)."""
        dK, dV = self._check_dK_dV(ctx, dK, dV)
        dvalue = self.W_v.backward(ctx.W_v, merge_heads(dV))
        dkey = self.W_k.backward(ctx.W_k, merge_heads(dK))
        return dkey, dvalue

    def _check_dK_dV(
        self, ctx: ProjectContext, dK: ArrayLike, dV: ArrayLike
    ) -> tuple[Array, Array]:
        W_k, W_v, h = self.W_k.W.value, self.W_v.W.value, self.num_heads
        B, S, _ = ctx.W_k.x.shape
        dK = as_gradient("dK", dK, (B, h, S, W_k.shape[1] // h), W_k.dtype)
        dV = as_gradient("dV", dV, (B, h, S, W_v.shape[1] // h), W_k.dtype)
        return dK, dV

    def _check_project(self, key: ArrayLike, value: ArrayLike) -> tuple[Array, Array]:
        W_k = self.W_k.W.value
        key = as_sequences("key", key, len(W_k), W_k.dtype)
        value = as_sequences("value", value, len(W_k), W_k.dtype)
        if key.shape != value.shape:
            raise ValueError(
                f"key {key.shape} and value {value.shape}: expected the same batch and length"
            )
        return key, value


class MemoryAttention(Layer):
    """output = merge(attention(split(query W_q), K, V)) W_o, for K and V projected before.

    W_q (d_model, h d_k), W_o (h d_v, d_model). dropout: the rate on the attention weights. Initial
    weights: see Linear.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_k: int | None = None,
        d_v: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        rng: np.random.Generator | int | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        rng = construction_rng(rng)
        d_k, d_v = head_widths(d_model, num_heads, d_k, d_v)
        self.num_heads = num_heads
        self.W_q = Linear(d_model, num_heads * d_k, bias, rng=rng, dtype=dtype)
        self.W_o = Linear(num_heads * d_v, d_model, bias, rng=rng, dtype=dtype)
        self.attention = ScaledDotProductAttention(dropout)

    def forward(
        self,
        query: ArrayLike,
        K: ArrayLike,
        V: ArrayLike,
        mask: ArrayLike | None = None,
        rng: np.random.Generator | None = None,
    ) -> tuple[Array, AttendContext]:
        """query (B, T, d_model), K (B, h, S, d_k), V (B, h, S, d_v) -> output (B, T, d_model)."""
        return self.attend(query, K, V, mask, rng)

    def backward(self, ctx: AttendContext, dy: ArrayLike) -> tuple[Array, Array, Array]:
        """dy (B, T, d_model) -> dquery, dK, dV."""
        return self.attend_backward(ctx, dy)

    def attend(
        self,
        query: ArrayLike,
        K: ArrayLike,
        V: ArrayLike,
        mask: ArrayLike | None = None,
        rng: np.random.Generator | None = None,
    ) -> tuple[Array, AttendContext]:
        """query (B, T, d_model), K (B, h, S, d_k), V (B, h, S, d_v) -> output (B, T, d_model).

        mask: bool, True = may attend, or float, added to the scores; (T, S) or 4 dimensions that
        broadcast to (B, h, T, S).
        """
        query, K, V = self._check_attend(query, K, V)
        mask = as_mask("mask", mask, (*K.shape[:2], query.shape[1], K.shape[2]))
        return self._attend(query, K, V, mask, rng)

    def _attend(
        self, query: Array, K: Array, V: Array, mask: Array | None, rng: np.random.Generator | None
    ) -> tuple[Array, AttendContext]:
        # 1. queries, head by head
        queries, W_q = self.W_q.forward(query)
        Q = split_heads(queries, self.num_heads)
        # 2. attention in every head
        context, attention = self.attention.forward(Q, K, V, mask, rng)
        # 3. heads side by side, mixed by W_o
        output, W_o = self.W_o.forward(merge_heads(context))
        return output, AttendContext(W_q, attention, W_o)

    def attend_backward(self, ctx: AttendContext, dy: ArrayLike) -> tuple[Array, Array, Array]:
        """dy (B, T, d_model) -> dquery (B, T, d_model), dK (B, h, S, d_k), dV (B, h, S, d_v)."""
        # 3.
        dcontext = split_heads(self.W_o.backward(ctx.W_o, dy), self.num_heads)
        # 2.
        dQ, dK, dV = self.attention.backward(ctx.attention, dcontext)
        # 1.
        dquery = self.W_q.backward(ctx.W_q, merge_heads(dQ))
        return dquery, dK, dV

    def _check_attend(
        self, query: ArrayLike, K: ArrayLike, V: ArrayLike
    ) -> tuple[Array, Array, Array]:
        W_q, W_o = self.W_q.W.value, self.W_o.W.value
        query = as_sequences("query", query, len(W_q), W_q.dtype)
        K, V = as_array("K", K, W_q.dtype), as_array("V", V, W_q.dtype)
        h, B = self.num_heads, len(query)
        d_k, d_v = W_q.shape[1] // h, W_o.shape[0] // h
        for name, X, width in ("K", K, d_k), ("V", V, d_v):
            if X.ndim != 4 or X.shape[:2] != (B, h) or X.shape[3] != width:
                raise ValueError(
                    f"query {query.shape} and {name} {X.shape}: "
                    f"expected {name} ({B}, {h}, S, {width})"
                )
        return query, K, V


class MultiHeadAttention(MemoryAttention, MemoryProjection):
    """output = merge(attention(split(query W_q), split(key W_k), split(value W_v))) W_o.

    W_q, W_k (d_model, h d_k), W_v (d_model, h d_v), W_o (h d_v, d_model), each a Linear, with or
    without biases. d_k and d_v are d_model / num_heads by default, and otherwise free. dropout: the
    rate on the attention weights. Initial weights: see Linear.

    Source: Vaswani et al. 2017, 3.2.2. Errors: ValueError if num_heads does not divide d_model and
    d_k or d_v is None.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_k: int | None = None,
        d_v: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        rng: np.random.Generator | int | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        rng = construction_rng(rng)
        d_k, d_v = head_widths(d_model, num_heads, d_k, d_v)
        self.num_heads = num_heads
        self.W_q = Linear(d_model, num_heads * d_k, bias, rng=rng, dtype=dtype)
        self.W_k = Linear(d_model, num_heads * d_k, bias, rng=rng, dtype=dtype)
        self.W_v = Linear(d_model, num_heads * d_v, bias, rng=rng, dtype=dtype)
        self.W_o = Linear(num_heads * d_v, d_model, bias, rng=rng, dtype=dtype)
        self.attention = ScaledDotProductAttention(dropout)

    def forward(  # type: ignore[override]
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        mask: ArrayLike | None = None,
        rng: np.random.Generator | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Array, MultiHeadAttentionContext]:
        """query (B, T, d_model), key and value (B, S, d_model) -> output (B, T, d_model).

        mask: bool, True = may attend, or float, added to the scores; (T, S) or 4 dimensions that
        broadcast to (B, h, T, S). rng: applies dropout.
        cache: keys and values of earlier positions, which stand before the S new ones, and to which
        these are added; the mask is then (T, cache.length + S). Backward knows nothing of earlier
        positions, and refuses their gradients.

        Errors: ValueError for shapes that do not fit, batches that would only broadcast among them.
        """
        W_q = self.W_q.W.value
        query = as_sequences("query", query, len(W_q), W_q.dtype)
        key, value = self._check_project(key, value)
        if len(query) != len(key):
            raise ValueError(f"query {query.shape} and key {key.shape}: expected one batch")
        S = key.shape[1] + (0 if cache is None else cache.length)
        mask = as_mask("mask", mask, (len(query), self.num_heads, query.shape[1], S))
        dropout_rng(rng)
        # 1. keys and values
        (K, V), project = self._project(key, value)
        if cache is not None:
            K, V = cache.append(K, V)
        # 2. the query attends to them
        output, attend = self._attend(query, K, V, mask, rng)
        return output, MultiHeadAttentionContext(project, attend)

    def backward(  # type: ignore[override]
        self, ctx: MultiHeadAttentionContext, dy: ArrayLike
    ) -> tuple[Array, Array, Array]:
        """dy (B, T, d_model) -> dquery (B, T, d_model), dkey, dvalue (B, S, d_model).

        Where one array is query, key and value at once (self-attention), its gradient is their sum.
        """
        self.refuse_cached(ctx)
        # 2.
        dquery, dK, dV = self.attend_backward(ctx.attend, dy)
        # 1.
        dkey, dvalue = self.project_backward(ctx.project, dK, dV)
        return dquery, dkey, dvalue

    def refuse_cached(self, ctx: MultiHeadAttentionContext) -> None:
        """Raise a ValueError if forward had keys of earlier positions, before anything is added."""
        T, past = ctx.project.W_k.x.shape[1], ctx.attend.attention.k.shape[2]
        if past != T:
            raise ValueError(f"forward read {T} positions, and {past - T} more from a cache, of "
                             "which backward knows nothing")


def split_heads(x: Array, num_heads: int) -> Array:
    """(B, T, h d) -> (B, h, T, d); its own inverse, and so its backward, is merge_heads."""
    B, T, width = x.shape
    return x.reshape(B, T, num_heads, width // num_heads).swapaxes(1, 2)


def merge_heads(x: Array) -> Array:
    """(B, h, T, d) -> (B, T, h d), the heads of one position side by side."""
    B, h, T, d = x.shape
    return x.swapaxes(1, 2).reshape(B, T, h * d)


def head_widths(
    d_model: int, num_heads: int, d_k: int | None, d_v: int | None
) -> tuple[int, int]:
    """d_k and d_v, each d_model / num_heads if it is None."""
    positive_int("d_model", d_model), positive_int("num_heads", num_heads)
    if (d_k is None or d_v is None) and d_model % num_heads:
        raise ValueError(
            f"d_model {d_model} is not divisible by num_heads {num_heads}: give d_k and d_v"
        )
    d_k = d_model // num_heads if d_k is None else positive_int("d_k", d_k)
    d_v = d_model // num_heads if d_v is None else positive_int("d_v", d_v)
    return d_k, d_v
