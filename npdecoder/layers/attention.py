"""ScaledDotProductAttention: context = softmax(q k^T / sqrt(d_k)) v."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from npdecoder.core import Array, Layer, as_array, as_gradient, fraction
from npdecoder.layers.dropout import Dropout, DropoutContext
from npdecoder.layers.softmax import Softmax, SoftmaxContext
from npdecoder.masks import as_mask
from npdecoder.sums import empty_heads, matmul_heads, over, parts, transposed, watched

MANY = 5000  # scores of which the quick way to mask pays
PART = 1 << 18  # scores that are taken at once, where they are many


class AttentionContext(NamedTuple):
    q: Array  # (..., T, d_k)
    k: Array  # (..., S, d_k)
    v: Array  # (..., S, d_v)
    A: Array  # (..., T, S), the weights
    A_dropped: Array  # (..., T, S), the weights after dropout
    softmax: SoftmaxContext
    dropout: DropoutContext


class ScaledDotProductAttention(Layer):
    """context = A v, A = softmax(S), S = q k^T / sqrt(d_k), with dropout on the weights A.

    Source: Vaswani et al. 2017, eq. 1. The leading axes (B, h) are those of q, k and v alike, and
    nothing crosses them. A query that may attend to nothing has weights, context and gradients of
    exactly zero. Limit: NaN or inf in the value of a masked key does spread (0 * NaN is NaN).
    """

    def __init__(self, dropout: float = 0.0) -> None:
        self.softmax = Softmax()
        self.dropout = Dropout(fraction("dropout", dropout))

    def forward(
        self,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        mask: ArrayLike | None = None,
        rng: np.random.Generator | None = None,
    ) -> tuple[Array, AttentionContext]:
        """q (..., T, d_k), k (..., S, d_k), v (..., S, d_v) -> context (..., T, d_v).

        mask: bool, True = may attend, or float, added to the scores; of shape (T, S), or of as many
        dimensions as the scores (..., T, S).

        Errors: ValueError for shapes that do not fit, also where they would only broadcast;
        TypeError for unequal dtypes and for a mask of integers.
        """
        q, k, v = check_qkv(q, k, v)
        mask = as_mask("mask", mask, (*q.shape[:-1], k.shape[-2]))
        d_k = q.shape[-1]

        # 1. the score of each query with each key
        S = (q / math.sqrt(d_k)) @ transposed(k, q.shape[-2])
        # 2. what may not be attended to
        S_masked = apply_mask(S, mask)
        # 3. weights, each row a distribution over the keys
        if self._may_part(S_masked):
            A, softmax = self._softmax_in_parts(S_masked)
        else:
            A, softmax = self.softmax.forward(S_masked)
        # 4. dropout
        A_dropped, dropout = self.dropout.forward(A, rng)
        # 5. the weighted sum of the values
        context = matmul_heads(A_dropped, v)
        return context, AttentionContext(q, k, v, A, A_dropped, softmax, dropout)

    def backward(self, ctx: AttentionContext, dy: ArrayLike) -> tuple[Array, Array, Array]:
        """dy (..., T, d_v), the gradient of the context -> dq, dk, dv, shaped as q, k, v.

        Derivation, for one head (ts: query t, key s):
            5. context_tc = sum_s A_dropped_ts v_sc:  dA_dropped_ts = sum_c dy_tc v_sc,
                                                      dv_sc = sum_t A_dropped_ts dy_tc
            4. A_dropped = A keep / (1 - p):   dA = dA_dropped keep / (1 - p)
            3. A = softmax(S), row by row:     dS_ts = A_ts (dA_ts - sum_s' dA_ts' A_ts')
            2. a masked S_ts is -inf whatever q and k are, and A_ts = 0 makes dS_ts = 0; a mask that
               is added is a constant
            1. S_ts = sum_i q_ti k_si / sqrt(d_k):  dq_ti = sum_s dS_ts k_si / sqrt(d_k),
                                                    dk_si = sum_t dS_ts q_ti / sqrt(d_k)
        In NumPy:
            dv = A_dropped.swapaxes(-1, -2) @ dy
            dA = self.dropout.backward(dropout, dy @ v.swapaxes(-1, -2))
            dS = A * (dA - (dA * A).sum(axis=-1, keepdims=True))
            dq = dS @ k / math.sqrt(q.shape[-1])
            dk = dS.swapaxes(-1, -2) @ q / math.sqrt(q.shape[-1])
        """
        q, k, v, _, A_dropped, softmax, dropout = ctx
        d_k = q.shape[-1]
        dy = as_gradient("dy", dy, (*q.shape[:-1], v.shape[-1]), q.dtype)
        many = A_dropped.size > max(q.size, k.size, v.size) and self._may_part(A_dropped)
        if many and dy.ndim > 2:
            return self._backward_in_parts(ctx, dy)

        # 5. context = A_dropped @ v
        dA_dropped = dy @ transposed(v, dy.shape[-2])
        dv = matmul_heads(A_dropped.swapaxes(-1, -2), dy)
        # 4. A_dropped = dropout(A)
        dA = self.dropout.backward(dropout, dA_dropped)
        # 3. A = softmax(S_masked), and 2. S_masked = mask(S): dS is 0 where S was masked
        dS = self.softmax.backward(softmax, dA)
        # 1. S = q @ k.T / sqrt(d_k)
        dq = matmul_heads(dS, k)
        dq /= math.sqrt(d_k)
        dk = matmul_heads(dS.swapaxes(-1, -2), q)
        dk /= math.sqrt(d_k)
        return dq, dk, dv

    def _may_part(self, scores: Array) -> bool:
        """Whether they are many, nobody looks on, and softmax and dropout are those from here."""
        return (
            scores.size > PART and type(self.softmax) is Softmax and type(self.dropout) is Dropout
            and not watched()
        )

    def _softmax_in_parts(self, S_masked: Array) -> tuple[Array, SoftmaxContext]:
        """softmax.forward of one part of the rows after the other, in the place of the scores.

        What is on the way to A is then as small as a part is, and stays in the cache.
        """
        rows = S_masked.reshape(-1, S_masked.shape[-1])
        for part in parts(len(rows), PART // rows.shape[-1]):
            rows[part], _ = self.softmax.forward(rows[part])
        A = rows.reshape(S_masked.shape)
        return A, SoftmaxContext(A)

    def _backward_in_parts(self, ctx: AttentionContext, dy: Array) -> tuple[Array, Array, Array]:
        """backward of one part of the first axis after the other, which nothing crosses.

        dA and dS are then as small as a part is, where each was as large as all of A.
        """
        backward = ScaledDotProductAttention.backward  # not that of a subclass, which called it
        if len(dy) == 1:
            dq, dk, dv = backward(self, _part(ctx, 0), dy[0])
            return dq[None], dk[None], dv[None]
        q, k, v, A, *_ = ctx
        dq, dk, dv = (empty_heads(x.shape, x.dtype) for x in (q, k, v))
        for part in parts(len(dy), PART // A[0].size):
            dq[part], dk[part], dv[part] = backward(self, _part(ctx, part), dy[part])
        return dq, dk, dv


def _part(ctx: AttentionContext, part: int | slice) -> AttentionContext:
    q, k, v, A, A_dropped = (array[part] for array in ctx[:5])
    (y,), (keep, *_) = ctx[5:]
    dropout = DropoutContext(None if keep is None else keep[part], A.shape, A.dtype)
    return AttentionContext(q, k, v, A, A_dropped, SoftmaxContext(y[part]), dropout)


def check_qkv(q: ArrayLike, k: ArrayLike, v: ArrayLike) -> tuple[Array, Array, Array]:
    q, k, v = as_array("q", q), as_array("k", k), as_array("v", v)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}, expected one dtype")
    problem = ""
    if min(q.ndim, k.ndim, v.ndim) < 2 or not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        problem = "expected the same leading axes (B, h) in all three"
    elif q.shape[-1] != k.shape[-1] or q.shape[-1] == 0:
        problem = "query and key need the same width d_k > 0"
    elif k.shape[-2] != v.shape[-2]:
        problem = "key and value need the same length S"
    if problem:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape}: {problem}")
    return q, k, v


def apply_mask(S: Array, mask: Array | None) -> Array:
    """The masked scores, which may take the place of S."""
    if mask is None:
        return S
    if mask.dtype.kind == "b":
        if S.size > MANY and mask.size < S.size and np.isfinite(S.max()) and np.isfinite(S.min()):
            # adding is twice as fast as np.where, and the same where nothing is inf or NaN
            bias = np.where(mask, S.dtype.type(0), S.dtype.type(-np.inf))
            return np.add(S, bias, out=over(S))
        return np.where(mask, S, -np.inf).astype(S.dtype, copy=False)
    with np.errstate(over="ignore"):  # a bias below all numbers of the dtype blocks like -inf
        S_masked: Array = np.add(S, mask.astype(S.dtype, copy=False), out=over(S))
    return S_masked
