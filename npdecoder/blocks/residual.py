"""Residual: the path around a sublayer, before it (Pre-LN) or after it (Post-LN) a LayerNorm.

    pre:   y = x + dropout(sublayer(norm(x)))
    post:  y = norm(x + dropout(sublayer(x)))

A block calls the two halves around its sublayer:

    h = enter(x);  s = sublayer(h);  y = leave(x, s)

Sources: Vaswani et al. 2017, 3.1 (post); Xiong et al. 2020 (pre).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from npdecoder.core import Array, Layer, one_of
from npdecoder.layers.dropout import Dropout, DropoutContext
from npdecoder.layers.layer_norm import LayerNorm, LayerNormContext


class LeaveContext(NamedTuple):
    dropout: DropoutContext
    norm: LayerNormContext | None  # post


class Residual(Layer):
    """The two halves of the path, around the LayerNorm `norm`.

    place: "pre" or "post"; dropout: the rate on what the sublayer returns.
    """

    def __init__(self, norm: LayerNorm, place: str, dropout: float) -> None:
        self.norm = norm
        self.place = one_of("norm", place, ("pre", "post"))
        self.dropout = Dropout(dropout)

    def enter(self, x: Array) -> tuple[Array, LayerNormContext | None]:
        """x (B, T, d_model) -> h (B, T, d_model) for the sublayer: norm(x) if pre, x if post."""
        if self.place == "post":
            return x, None
        return self.norm.forward(x)

    def leave(
        self, x: Array, s: Array, rng: np.random.Generator | None
    ) -> tuple[Array, LeaveContext]:
        """x and the sublayer's s (B, T, d_model) -> y: x + dropout(s), and its norm if post."""
        # 1. dropout
        s_dropped, dropout = self.dropout.forward(s, rng)
        # 2. add
        total = x + s_dropped
        # 3. norm
        if self.place == "pre":
            return total, LeaveContext(dropout, None)
        y, norm = self.norm.forward(total)
        return y, LeaveContext(dropout, norm)

    def leave_backward(self, ctx: LeaveContext, dy: Array) -> tuple[Array, Array]:
        """dy (B, T, d_model) -> dx of the skip path, and ds.

        The sum of step 2 sends the same gradient both ways. In Post-LN the skip path too goes
        through the norm; in Pre-LN it reaches x untouched.
        """
        # 3. norm
        dtotal = dy if ctx.norm is None else self.norm.backward(ctx.norm, dy)
        # 2. total = x + s_dropped, and 1. s_dropped = dropout(s)
        return dtotal, self.dropout.backward(ctx.dropout, dtotal)

    def enter_backward(self, ctx: LayerNormContext | None, dh: Array) -> Array:
        """dh (B, T, d_model) -> dx of the path through the sublayer, to be added to the skip's."""
        return dh if ctx is None else self.norm.backward(ctx, dh)
