"""SinusoidalPositions and LearnedPositions: y = x + P[positions]."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from npdecoder.core import (
    Array,
    Layer,
    Parameter,
    add_rows,
    as_gradient,
    as_ids,
    as_sequences,
    construction_rng,
    float_dtype,
    positive_int,
)


class SinusoidalContext(NamedTuple):
    x_shape: tuple[int, ...]  # (B, T, d_model)
    x_dtype: np.dtype[Any]


class SinusoidalPositions(Layer):
    """y = x + P, P[pos, 2i] = sin(pos / 10000^(2i/d_model)), P[pos, 2i+1] = cos(the same).

    Source: Vaswani et al. 2017, 3.5. No parameters: P (max_len, d_model) is a fixed table.

    Errors: ValueError for an odd d_model, of which a last sine would have no cosine.
    """

    def __init__(self, d_model: int, max_len: int) -> None:
        if positive_int("d_model", d_model) % 2:
            raise ValueError(f"d_model is {d_model}, expected an even number: sines pair cosines")
        # float64, whatever x is: an angle of thousands has no digits to spare
        angle = np.arange(positive_int("max_len", max_len))[:, None] / (
            10000.0 ** (np.arange(0, d_model, 2) / d_model)
        )
        self.P = np.empty((max_len, d_model))
        self.P[:, 0::2] = np.sin(angle)
        self.P[:, 1::2] = np.cos(angle)

    def forward(
        self, x: ArrayLike, positions: ArrayLike | None = None
    ) -> tuple[Array, SinusoidalContext]:
        """x (B, T, d_model), positions (T,) or (B, T), or None for 0 .. T-1 -> y (B, T, d_model).

        Errors: ValueError if a position reaches past max_len.
        """
        x = as_sequences("x", x, self.P.shape[1])
        positions = _positions(positions, x.shape, len(self.P))

        # 1. y = x + P[positions]
        y = x + self.P[positions].astype(x.dtype)
        return y, SinusoidalContext(x.shape, x.dtype)

    def backward(self, ctx: SinusoidalContext, dy: ArrayLike) -> Array:
        """dy (B, T, d_model) -> dx (B, T, d_model), which is dy itself.

        Derivation: y = x + a constant, so δL = sum dy δy = sum dy δx: x has the gradient dy.
        In NumPy:
            dx = dy
        """
        # 1. y = x + P[positions]
        return as_gradient("dy", dy, ctx.x_shape, ctx.x_dtype)


class LearnedContext(NamedTuple):
    positions: NDArray[np.intp]  # (T,) or (B, T)
    x_shape: tuple[int, ...]  # (B, T, d_model)


class LearnedPositions(Layer):
    """y = x + P[positions], with a learned row for each position (Gehring et al. 2017, 3.1).

    P (max_len, d_model) starts as N(0, 1 / d_model).
    """

    def __init__(
        self,
        max_len: int,
        d_model: int,
        *,
        rng: np.random.Generator | int | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        shape = positive_int("max_len", max_len), positive_int("d_model", d_model)
        P = construction_rng(rng).normal(0.0, d_model**-0.5, shape)
        self.P = Parameter(P.astype(float_dtype("dtype", dtype)))

    def forward(
        self, x: ArrayLike, positions: ArrayLike | None = None
    ) -> tuple[Array, LearnedContext]:
        """x (B, T, d_model), positions (T,) or (B, T), or None for 0 .. T-1 -> y (B, T, d_model).

        Errors: ValueError if a position reaches past max_len.
        """
        P = self.P.value
        x = as_sequences("x", x, P.shape[1], P.dtype)
        positions = _positions(positions, x.shape, len(P))

        # 1. y = x + P[positions]
        y: Array = x + P[positions]
        return y, LearnedContext(positions, x.shape)

    def backward(self, ctx: LearnedContext, dy: ArrayLike) -> Array:
        """dy (B, T, d_model) -> dx (B, T, d_model), which is dy itself; adds to P.grad.

        Derivation: y_bt = x_bt + P[positions_bt]. x_bt has the gradient dy_bt; row p of P stands at
        every (b, t) with positions_bt = p, and gets the sum of their dy_bt, as in an Embedding.
        In NumPy:
            dx = dy
            row = np.broadcast_to(positions, dy.shape[:-1]).reshape(-1, 1)
            dP = (row == np.arange(len(P))).astype(P.dtype).T @ dy.reshape(-1, dy.shape[-1])
        """
        P = self.P.value
        dy = as_gradient("dy", dy, ctx.x_shape, P.dtype)

        # 1. y = x + P[positions]
        rows = np.broadcast_to(ctx.positions, dy.shape[:-1]).reshape(-1)
        add_rows(self.P.grad, rows, dy.reshape(-1, P.shape[1]))
        return dy


def _positions(
    positions: ArrayLike | None, x_shape: tuple[int, ...], max_len: int
) -> NDArray[np.intp]:
    """The positions as (T,) or (B, T), each below max_len; 0 .. T-1 by default."""
    B, T, _ = x_shape
    if positions is None:
        if T > max_len:
            raise ValueError(f"x has {T} positions, more than max_len {max_len}")
        return np.arange(T)
    try:
        positions = as_ids("positions", positions, max_len)
    except IndexError as error:
        raise ValueError(f"{error}, below max_len") from None
    if positions.shape not in [(T,), (B, T)]:
        raise ValueError(f"positions has shape {positions.shape}, expected ({T},) or ({B}, {T})")
    return positions
