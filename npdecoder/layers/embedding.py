"""Embedding: ids to rows of W, and Unembedding: back to one logit an id on the same W."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from npdecoder.core import (
    Array,
    Layer,
    Parameter,
    add_rows,
    as_gradient,
    as_ids,
    as_input,
    construction_rng,
    flag,
    float_dtype,
    positive_int,
)
from npdecoder.sums import matmul_rows


class EmbeddingContext(NamedTuple):
    ids: NDArray[np.intp]  # (...)


class Embedding(Layer):
    """y = W[ids], times sqrt(d_model) if scale (Vaswani et al. 2017, 3.4).

    W (vocab_size, d_model) starts as N(0, 1 / d_model): rows of norm about 1.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        scale: bool = False,
        *,
        rng: np.random.Generator | int | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        shape = positive_int("vocab_size", vocab_size), positive_int("d_model", d_model)
        W = construction_rng(rng).normal(0.0, d_model**-0.5, shape)
        self.W = Parameter(W.astype(float_dtype("dtype", dtype)))
        self.scale = float(d_model) ** 0.5 if flag("scale", scale) else 1.0

    def forward(self, ids: ArrayLike) -> tuple[Array, EmbeddingContext]:
        """ids (...) of any integer dtype -> y (..., d_model).

        Errors: TypeError for ids that are not integers; IndexError for one outside [0, vocab_size).
        """
        W = self.W.value
        ids = as_ids("ids", ids, len(W))

        # 1. rows = W[ids], a copy
        y: Array = W[ids]
        # 2. y = scale * rows, in the same array
        y *= self.scale
        return y, EmbeddingContext(ids)

    def backward(self, ctx: EmbeddingContext, dy: ArrayLike) -> tuple[()]:
        """dy (..., d_model) -> (): ids have no gradient. Adds to W.grad.

        Derivation: y_n = scale W[ids_n]. A small change of W changes the loss by
        δL = sum_n dy_n . (scale δW[ids_n]). The change of row v stands there once for every n with
        ids_n = v, and the gradient of the row is what it is multiplied by: the sum over these n
        (with onehot[n, v] = 1 where ids_n = v, the look-up is the product onehot @ W). A row that
        no id names gets none; a padding id is an id like the others.
        In NumPy:
            onehot = (ids.reshape(-1, 1) == np.arange(len(W))).astype(W.dtype)
            dW = scale * onehot.T @ dy.reshape(-1, dy.shape[-1])
        """
        W = self.W.value
        d_model = W.shape[1]
        dy = as_gradient("dy", dy, (*ctx.ids.shape, d_model), W.dtype)

        # 2. y = scale * rows
        drows = self.scale * dy
        # 1. rows = W[ids]
        add_rows(self.W.grad, ctx.ids.reshape(-1), drows.reshape(-1, d_model))
        return ()


class UnembeddingContext(NamedTuple):
    x: Array  # (..., d_model)


class Unembedding(Layer):
    """logits = x @ W.T (+ b), with the embedding's own Parameter W (Press and Wolf 2017).

    W is one Parameter in two places: its gradient is the sum of what both add to it. The
    embedding's scale does not apply here. b (vocab_size,) starts as zeros.
    """

    def __init__(self, embedding: Embedding, bias: bool = False) -> None:
        if not isinstance(embedding, Embedding):
            raise TypeError(f"embedding is a {type(embedding).__name__}, expected an Embedding")
        self.W = embedding.W
        has_b = flag("bias", bias)
        self.b = Parameter(np.zeros(len(self.W.value), self.W.dtype)) if has_b else None

    def forward(self, x: ArrayLike) -> tuple[Array, UnembeddingContext]:
        """x (..., d_model) -> logits (..., vocab_size)."""
        W = self.W.value
        x = as_input("x", x, W.shape[1], W.dtype)

        # 1. xW = x @ W.T, the dot product of x with every row of W
        logits = matmul_rows(x, W.T)
        # 2. logits = xW + b, in the same array
        if self.b is not None:
            logits += self.b.value
        return logits, UnembeddingContext(x)

    def backward(self, ctx: UnembeddingContext, dy: ArrayLike) -> Array:
        """dy (..., vocab_size), the gradient of the logits -> dx (..., d_model).

        Adds to W.grad (beside what the embedding adds) and b.grad.

        Derivation: logits_nv = sum_i x_ni W_vi + b_v is Linear with W.T in the place of its W, so
        dx = dy @ (W.T).T, and the gradient of W.T is x.T @ dy, that of W its transpose.
        In NumPy:
            dx = dy @ W
            dW = dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])
            db = dy.reshape(-1, dy.shape[-1]).sum(axis=0)
        """
        W = self.W.value
        vocab_size, d_model = W.shape
        x = ctx.x
        dy = as_gradient("dy", dy, (*x.shape[:-1], vocab_size), W.dtype)
        x_rows, dy_rows = x.reshape(-1, d_model), dy.reshape(-1, vocab_size)

        # 2. logits = xW + b
        if self.b is not None:
            self.b.add_sum(dy_rows)
        # 1. xW = x @ W.T
        self.W.add_product(dy_rows.T, x_rows)
        dx = matmul_rows(dy, W)
        return dx
