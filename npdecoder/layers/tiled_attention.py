"""TiledAttention: scaled dot-product attention in memory O(T + S), one tile of scores at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from npdecoder.core import Array, Layer, as_gradient, dropout_rng, flag, fraction, positive_int
from npdecoder.layers.attention import apply_mask, check_qkv
from npdecoder.layers.dropout import Dropout, DropoutContext
from npdecoder.masks import as_mask

ALL = slice(None)


class TiledAttentionContext(NamedTuple):
    q: Array  # (..., T, d_k)
    k: Array  # (..., S, d_k)
    v: Array  # (..., S, d_v)
    context: Array  # (..., T, d_v)
    m: Array  # (..., T, 1), max_s S_ts, or the lowest finite number where nothing is visible
    Z: Array  # (..., T, 1), sum_s exp(S_ts - m_t), or 1 where nothing is visible
    mask: Array | None  # of the shape it was given in
    seed: int | None  # the dropout of each tile is drawn from it; None where nothing was dropped


class TiledAttention(Layer):
    """ScaledDotProductAttention for long sequences: no array in it is as large as (T, S).

    The scores are computed in tiles of a few queries by a few keys, for all leading axes (B, h) at
    once, and each tile is used up before the next is made. So memory grows with T + S, that of
    ScaledDotProductAttention with T S: for 16,384 positions and 4 heads of width 16, in float32,
    forward and backward take 20 MB, where a single array (4, T, T) has 4 GB. The numbers are the
    same but for rounding. The price: backward computes the scores a second time, and ctx has no
    weights A to look at. Use it for long sequences; below some 100 positions the other is quicker.

    causal: query t sees the keys s <= t + S - T, as with causal_mask(T, S), which is never made.
    Tiles of which no query sees a key are left out: where T = S, half of all.
    tile: how many queries, and keys, a tile has at most. Larger tiles do not fit the caches.
    dropout: on the weights, drawn tile by tile, and in backward again. The same state of rng gives
    the same mask, but neither the one of ScaledDotProductAttention nor that of another tile size.

    Source: Milakov and Gimelshein 2018 (the running sum); Rabe and Staats 2021; Dao et al. 2022,
    FlashAttention, algorithms 1 and 2 and appendix B. A query that may attend to nothing has a
    context and gradients of exactly zero. Limit: NaN or inf in the value of a masked key may
    spread.
    """

    def __init__(self, dropout: float = 0.0, causal: bool = False, tile: int = 128) -> None:
        self.dropout = Dropout(fraction("dropout", dropout))
        self.causal = flag("causal", causal)
        self.tile = positive_int("tile", tile)

    def forward(
        self,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        mask: ArrayLike | None = None,
        rng: np.random.Generator | None = None,
    ) -> tuple[Array, TiledAttentionContext]:
        """q (..., T, d_k), k (..., S, d_k), v (..., S, d_v) -> context (..., T, d_v).

        mask: bool, True = may attend, or float, added to the scores; of shape (T, S), or of as many
        dimensions as the scores (..., T, S). A padding mask (B, 1, 1, S) stays as small as it is.
        rng: applies dropout; one integer is drawn from it.

        Errors: ValueError for shapes that do not fit, also where they would only broadcast;
        TypeError for unequal dtypes, for a mask of integers, and for an rng that is no Generator.
        """
        q, k, v = check_qkv(q, k, v)
        mask = as_mask("mask", mask, (*q.shape[:-1], k.shape[-2]))
        rng = dropout_rng(rng)
        seed = None if rng is None or self.dropout.p == 0.0 else int(rng.integers(2**63))

        # over the tiles so far: the maximum of each query, and its sums relative to that
        m = np.full((*q.shape[:-1], 1), np.finfo(q.dtype).min, q.dtype)
        Z = np.zeros_like(m)
        context = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
        for i, j in self._tiles(q, k):
            m_i, Z_i, context_i = m[..., i, :], Z[..., i, :], context[..., i, :]
            # 1. and 2. scores, and what may not be attended to
            S_ij = self._scores(q, k, mask, i, j)
            # 3. weights, not yet divided by Z; older sums shrink to what the new maximum makes them
            m_new = np.maximum(m_i, S_ij.max(axis=-1, keepdims=True))
            e_ij, shrink = _exp(S_ij, m_new), _exp(m_i, m_new)
            Z_i[...] = Z_i * shrink + e_ij.sum(axis=-1, keepdims=True)
            # 4. dropout
            e_dropped_ij, _ = self._drop(e_ij, seed, i, j)
            # 5. the weighted sum of the values
            context_i[...] = context_i * shrink + e_dropped_ij @ v[..., j, :]
            m_i[...] = m_new
        Z += Z == 0  # where nothing is visible: 0 / 1 for 0 / 0
        context /= Z
        return context, TiledAttentionContext(q, k, v, context, m, Z, mask, seed)

    def backward(self, ctx: TiledAttentionContext, dy: ArrayLike) -> tuple[Array, Array, Array]:
        """dy (..., T, d_v), the gradient of the context -> dq, dk, dv, shaped as q, k, v.

        Derivation, for one head (ts: query t, key s). Forward, in one piece: A_ts = e_ts / Z_t with
        e_ts = exp(S_ts - m_t) and Z_t = sum_s e_ts. In a tile the sums are those of the keys so
        far, relative to their maximum m; with a larger one, m', each exp(S - m') is
        exp(S - m) exp(m - m'), and so are the sums of them. m cancels, so it is a constant.
            5. context_tc = sum_s A_dropped_ts v_sc:  dA_dropped_ts = sum_c dy_tc v_sc,
                                                      dv_sc = sum_t A_dropped_ts dy_tc
            4. A_dropped = A keep / (1 - p):   dA = dA_dropped keep / (1 - p)
            3. A = softmax(S), row by row:     dS_ts = A_ts (dA_ts - D_t), D_t = sum_s dA_ts A_ts.
               That sum is over all keys, and a tile has a few. But by 4 and 5 it is known before:
               D_t = sum_s dA_dropped_ts keep_ts / (1 - p) A_ts = sum_s dA_dropped_ts A_dropped_ts
                   = sum_c dy_tc sum_s A_dropped_ts v_sc = sum_c dy_tc context_tc
            2. a masked S_ts is -inf whatever q and k are, and A_ts = 0 makes dS_ts = 0; a mask that
               is added is a constant
            1. S_ts = sum_i q_ti k_si / sqrt(d_k):  dq_ti = sum_s dS_ts k_si / sqrt(d_k),
                                                    dk_si = sum_t dS_ts q_ti / sqrt(d_k)
        All that a tile needs is its own S_ij, computed again, and rows of D, m and Z; what it finds
        is added up: dq over the tiles of keys, dk and dv over the tiles of queries.
        In NumPy:
            A = np.exp(self._scores(q, k, mask) - m) / Z
            A_dropped = np.zeros_like(A)
            for ij in self._tiles(q, k):
                A_dropped[(..., *ij)], _ = self._drop(A[(..., *ij)], seed, *ij)
            D = (dy * context).sum(axis=-1, keepdims=True)
            dS = A_dropped * (dy @ v.swapaxes(-1, -2)) - A * D
            dq = dS @ k / math.sqrt(q.shape[-1])
            dk = dS.swapaxes(-1, -2) @ q / math.sqrt(q.shape[-1])
            dv = A_dropped.swapaxes(-1, -2) @ dy
        """
        q, k, v, context, m, Z, mask, seed = ctx
        d_k = q.shape[-1]
        dy = as_gradient("dy", dy, context.shape, q.dtype)

        D = (dy * context).sum(axis=-1, keepdims=True)
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for i, j in self._tiles(q, k):
            q_i, k_j, v_j, dy_i = q[..., i, :], k[..., j, :], v[..., j, :], dy[..., i, :]
            # the weights of this tile, again
            S_ij = self._scores(q, k, mask, i, j)
            with np.errstate(under="ignore"):
                A_ij = _exp(S_ij, m[..., i, :]) / Z[..., i, :]
            A_dropped_ij, dropout = self._drop(A_ij, seed, i, j)

            # 5. context_i += A_dropped_ij @ v_j
            dA_dropped_ij = dy_i @ v_j.swapaxes(-1, -2)
            dv[..., j, :] += A_dropped_ij.swapaxes(-1, -2) @ dy_i
            # 4. A_dropped_ij = dropout(A_ij)
            dA_ij = self.dropout.backward(dropout, dA_dropped_ij)
            # 3. A = softmax(S_masked), and 2. S_masked = mask(S): dS is 0 where S was masked
            dS_ij = A_ij * (dA_ij - D[..., i, :])
            # 1. S_ij = q_i @ k_j.T / sqrt(d_k)
            dq[..., i, :] += dS_ij @ k_j / math.sqrt(d_k)
            dk[..., j, :] += dS_ij.swapaxes(-1, -2) @ q_i / math.sqrt(d_k)
        return dq, dk, dv

    def _tiles(self, q: Array, k: Array) -> Iterator[tuple[slice, slice]]:
        """The queries i and the keys j of each tile, but for the tiles that causal hides."""
        T, S = q.shape[-2], k.shape[-2]
        for t in range(0, T, self.tile):
            i = slice(t, min(t + self.tile, T))
            visible = min(i.stop + S - T, S) if self.causal else S  # to the last query of i
            for s in range(0, visible, self.tile):
                yield i, slice(s, min(s + self.tile, S))

    def _scores(
        self, q: Array, k: Array, mask: Array | None, i: slice = ALL, j: slice = ALL
    ) -> Array:
        """Steps 1 and 2 for the queries i and the keys j."""
        T, S = q.shape[-2], k.shape[-2]
        # 1. the score of each query with each key
        S_ij = (q[..., i, :] / math.sqrt(q.shape[-1])) @ k[..., j, :].swapaxes(-1, -2)
        # 2. what may not be attended to; a mask of one row or column is that of all
        if mask is not None:
            rows, columns = (x if n > 1 else ALL for x, n in zip((i, j), mask.shape[-2:]))
            S_ij = apply_mask(S_ij, mask[..., rows, columns])
        if self.causal:
            visible = np.arange(S)[j] <= np.arange(T)[i, None] + S - T
            S_ij = S_ij if visible.all() else apply_mask(S_ij, visible)
        return S_ij

    def _drop(
        self, A_ij: Array, seed: int | None, i: slice, j: slice
    ) -> tuple[Array, DropoutContext]:
        """Step 4, from a generator of the tile's own: drawn again, it is the same."""
        if seed is None:
            return self.dropout.forward(A_ij)
        bits = np.random.PCG64([seed, i.start, j.start])
        return self.dropout.forward(A_ij, np.random.Generator(bits))


def _exp(x: Array, m: Array) -> Array:
    """exp(x - m)."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        y: Array = x - m
        np.exp(y, out=y)
    return y
