"""SPOILERS. Copies of layers, each with one mistake, for `npdecoder exercise bug`.

The methods are those of npdecoder's own layers but for the mistake. Their source is shown to the
reader, so no comment and no name in them tells it; the classes' names do, and are not shown.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from npdecoder.blocks import DecoderLayer
from npdecoder.blocks.decoder import DecoderLayerContext
from npdecoder.core import Array
from npdecoder.layers import (
    CrossEntropy,
    Dropout,
    LayerNorm,
    ScaledDotProductAttention,
    Softmax,
    Unembedding,
)
from npdecoder.layers.attention import AttentionContext
from npdecoder.layers.cross_entropy import CrossEntropyContext
from npdecoder.layers.dropout import DropoutContext
from npdecoder.layers.embedding import UnembeddingContext
from npdecoder.layers.layer_norm import LayerNormContext
from npdecoder.layers.softmax import SoftmaxContext


class GammaOutside(LayerNorm):
    def backward(self, ctx: LayerNormContext, dy: ArrayLike) -> Array:
        x_hat, rstd = ctx
        gamma = self.gamma.value
        dy = np.asarray(dy, gamma.dtype)
        rows = (-1, len(gamma))

        # 4. y = gamma * x_hat + beta
        if self.beta is not None:
            self.beta.grad += dy.reshape(rows).sum(axis=0)
        self.gamma.grad += (dy * x_hat).reshape(rows).sum(axis=0)
        # 3. x_hat = xc * rstd, and 2. rstd = 1 / sqrt(mean(xc * xc) + eps)
        dxc = rstd * (dy - x_hat * np.mean(dy * x_hat, axis=-1, keepdims=True))
        # 1. xc = x - mean(x)
        dx: Array = gamma * (dxc - dxc.mean(axis=-1, keepdims=True))
        return dx


class SameForBeta(LayerNorm):
    def backward(self, ctx: LayerNormContext, dy: ArrayLike) -> Array:
        x_hat, rstd = ctx
        gamma = self.gamma.value
        dy = np.asarray(dy, gamma.dtype)
        rows = (-1, len(gamma))

        # 4. y = gamma * x_hat + beta
        dgamma = (dy * x_hat).reshape(rows).sum(axis=0)
        self.gamma.grad += dgamma
        if self.beta is not None:
            self.beta.grad += dgamma
        dx_hat = dy * gamma
        # 3. x_hat = xc * rstd, and 2. rstd = 1 / sqrt(mean(xc * xc) + eps)
        dxc = rstd * (dx_hat - x_hat * np.mean(dx_hat * x_hat, axis=-1, keepdims=True))
        # 1. xc = x - mean(x)
        dx: Array = dxc - dxc.mean(axis=-1, keepdims=True)
        return dx


class OverTheBatch(Softmax):
    def backward(self, ctx: SoftmaxContext, dy: ArrayLike) -> Array:
        y = ctx.y
        dy = np.asarray(dy, y.dtype)

        # 3. y = e / Z, 2. Z = sum(e) and 1. e = exp(x - max(x)), together
        dx: Array = y * (dy - (dy * y).sum(axis=-1, keepdims=True)) / len(y)
        return dx


class ScaledByTheModel(ScaledDotProductAttention):
    def backward(self, ctx: AttentionContext, dy: ArrayLike) -> tuple[Array, Array, Array]:
        q, k, v, _, A_dropped, softmax, dropout = ctx
        d_k = q.shape[1] * q.shape[-1]
        dy = np.asarray(dy, q.dtype)

        # 5. context = A_dropped @ v
        dA_dropped = dy @ v.swapaxes(-1, -2)
        dv = A_dropped.swapaxes(-1, -2) @ dy
        # 4. A_dropped = dropout(A)
        dA = self.dropout.backward(dropout, dA_dropped)
        # 3. A = softmax(S_masked), and 2. S_masked = mask(S): dS is 0 where S was masked
        dS = self.softmax.backward(softmax, dA)
        # 1. S = q @ k.T / sqrt(d_k)
        dq = dS @ k / math.sqrt(d_k)
        dk = dS.swapaxes(-1, -2) @ q / math.sqrt(d_k)
        return dq, dk, dv


class KeyForValue(ScaledDotProductAttention):
    def backward(self, ctx: AttentionContext, dy: ArrayLike) -> tuple[Array, Array, Array]:
        q, k, v, _, A_dropped, softmax, dropout = ctx
        d_k = q.shape[-1]
        dy = np.asarray(dy, q.dtype)

        # 5. context = A_dropped @ v
        dA_dropped = dy @ v.swapaxes(-1, -2)
        dv = A_dropped.swapaxes(-1, -2) @ dy
        # 4. A_dropped = dropout(A)
        dA = self.dropout.backward(dropout, dA_dropped)
        # 3. A = softmax(S_masked), and 2. S_masked = mask(S): dS is 0 where S was masked
        dS = self.softmax.backward(softmax, dA)
        # 1. S = q @ k.T / sqrt(d_k)
        dq = dS @ k / math.sqrt(d_k)
        dk = dS.swapaxes(-1, -2) @ q / math.sqrt(d_k)
        return dq, dv, dk


class SkipDropped(DecoderLayer):
    def backward(self, ctx: DecoderLayerContext, dy: ArrayLike) -> Array:
        # 2. feed-forward
        dx1_past, ds2 = self.residual2.leave_backward(ctx.leave_last, np.asarray(dy))
        dh2 = self.feed_forward.backward(ctx.feed_forward, ds2)
        dx1 = dx1_past + self.residual2.enter_backward(ctx.enter_last, dh2)
        # 1. self-attention
        _, ds1 = self.residual1.leave_backward(ctx.leave1, dx1)
        dquery, dkey, dvalue = self.self_attention.backward(ctx.self_attention, ds1)
        dh1 = dquery + dkey + dvalue
        dx = self.residual1.enter_backward(ctx.enter1, dh1)
        return dx


class SkipThroughTheNorm(DecoderLayer):
    def backward(self, ctx: DecoderLayerContext, dy: ArrayLike) -> Array:
        # 2. feed-forward
        dx1_past, ds2 = self.residual2.leave_backward(ctx.leave_last, np.asarray(dy))
        dh2 = self.feed_forward.backward(ctx.feed_forward, ds2)
        dx1 = self.residual2.enter_backward(ctx.enter_last, dx1_past + dh2)
        # 1. self-attention
        dx_past, ds1 = self.residual1.leave_backward(ctx.leave1, dx1)
        dquery, dkey, dvalue = self.self_attention.backward(ctx.self_attention, ds1)
        dh1 = dquery + dkey + dvalue
        dx = self.residual1.enter_backward(ctx.enter1, dx_past + dh1)
        return dx


class MaskOfTheLastCall(Dropout):
    def forward(
        self, x: ArrayLike, rng: np.random.Generator | None = None
    ) -> tuple[Array, DropoutContext]:
        x = np.asarray(x)
        if rng is None or self.p == 0.0:
            return x, DropoutContext(None, x.shape, x.dtype)

        # 1. draw
        self.keep = rng.random(x.shape, dtype=np.float32) >= self.p
        # 2. y = x / (1 - p) where kept
        y = self.keep * x / x.dtype.type(1.0 - self.p)
        return y, DropoutContext(self.keep, x.shape, x.dtype)

    def backward(self, ctx: DropoutContext, dy: ArrayLike) -> Array:
        dy = np.asarray(dy, ctx.x_dtype)
        if ctx.keep is None:
            return dy
        # 2. y = x / (1 - p) where kept
        dx: Array = self.keep * dy / dy.dtype.type(1.0 - self.p)
        return dx


class HeadForgotten(Unembedding):
    def backward(self, ctx: UnembeddingContext, dy: ArrayLike) -> Array:
        W = self.W.value
        x = ctx.x
        dy_rows = np.asarray(dy, W.dtype).reshape(-1, len(W))

        # 2. logits = xW + b
        if self.b is not None:
            self.b.grad += dy_rows.sum(axis=0)
        # 1. xW = x @ W.T
        dx: Array = (dy_rows @ W).reshape(x.shape)
        return dx


class OffByT(CrossEntropy):
    def backward(self, ctx: CrossEntropyContext, dloss: float = 1.0) -> Array:
        log_p, targets, counted, _ = ctx

        # 2. of the target, and 1. log-probabilities
        onehot = targets[..., None] == np.arange(log_p.shape[-1])
        dlogits = np.exp(log_p) - onehot
        # 3. the mean over the targets counted
        dlogits[~counted] = 0.0
        N = max(len(targets), 1)
        dlogits *= log_p.dtype.type(dloss / N)
        return dlogits


class MeanOverIgnored(CrossEntropy):
    def backward(self, ctx: CrossEntropyContext, dloss: float = 1.0) -> Array:
        log_p, targets, counted, _ = ctx

        # 2. of the target, and 1. log-probabilities
        onehot = targets[..., None] == np.arange(log_p.shape[-1])
        dlogits = np.exp(log_p) - onehot
        # 3. the mean over the targets counted
        dlogits[~counted] = 0.0
        N = max(counted.size, 1)
        dlogits *= log_p.dtype.type(dloss / N)
        return dlogits
