"""FeedForward: y = linear2(dropout(activation(linear1(x)))), each position by itself."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from npdecoder.core import Array, Layer, construction_rng, fraction, one_of, positive_int
from npdecoder.layers.activations import GELU, GELUContext, ReLU, ReLUContext
from npdecoder.layers.dropout import Dropout, DropoutContext
from npdecoder.layers.linear import Linear, LinearContext

ACTIVATIONS = ("relu", "gelu", "gelu_tanh")


class FeedForwardContext(NamedTuple):
    linear1: LinearContext
    activation: ReLUContext | GELUContext
    dropout: DropoutContext
    linear2: LinearContext


class FeedForward(Layer):
    """y = linear2(dropout(activation(linear1(x)))): d_model -> d_ff -> d_model.

    d_ff is 4 d_model by default; activation is "relu", "gelu" (the erf form) or "gelu_tanh".

    Source: Vaswani et al. 2017, 3.3, eq. 2; dropout between the two as in the articles. Initial
    weights: see Linear.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        activation: str = "relu",
        bias: bool = True,
        dropout: float = 0.0,
        *,
        rng: np.random.Generator | int | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        rng = construction_rng(rng)
        positive_int("d_model", d_model)
        d_ff = 4 * d_model if d_ff is None else positive_int("d_ff", d_ff)
        self.linear1 = Linear(d_model, d_ff, bias, rng=rng, dtype=dtype)
        self.activation: ReLU | GELU
        if one_of("activation", activation, ACTIVATIONS) == "relu":
            self.activation = ReLU()
        else:
            self.activation = GELU("tanh" if activation == "gelu_tanh" else "none")
        self.dropout = Dropout(fraction("dropout", dropout))
        self.linear2 = Linear(d_ff, d_model, bias, rng=rng, dtype=dtype)

    def forward(
        self, x: ArrayLike, rng: np.random.Generator | None = None
    ) -> tuple[Array, FeedForwardContext]:
        """x (..., d_model) -> y (..., d_model)."""
        # 1.
        hidden, linear1 = self.linear1.forward(x)
        # 2.
        active, activation = self.activation.forward(hidden)
        # 3.
        dropped, dropout = self.dropout.forward(active, rng)
        # 4.
        y, linear2 = self.linear2.forward(dropped)
        return y, FeedForwardContext(linear1, activation, dropout, linear2)

    def backward(self, ctx: FeedForwardContext, dy: ArrayLike) -> Array:
        """dy (..., d_model) -> dx (..., d_model): the same calls, in reverse."""
        # 4. 3. 2. 1.
        ddropped = self.linear2.backward(ctx.linear2, dy)
        dactive = self.dropout.backward(ctx.dropout, ddropped)
        dhidden = self.activation.backward(ctx.activation, dactive)  # type: ignore[arg-type]
        return self.linear1.backward(ctx.linear1, dhidden)
