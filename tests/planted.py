"""Mistakes planted in layers, blocks, models and layers written from scratch, each with the
beginning of the hint that gradcheck should give first."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from helpers import randomise

from npdecoder import (
    GELU,
    CrossEntropy,
    Decoder,
    DecoderLayer,
    Dropout,
    Embedding,
    EncoderLayer,
    Layer,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    Parameter,
    ScaledDotProductAttention,
    Softmax,
    Unembedding,
)
from npdecoder.blocks import MemoryProjection, Residual
from npdecoder.core import add_rows

WIDE = {"dtype": np.float64}


class Sizes(NamedTuple):
    """Primes. No two of B, T, S and d are equal, nor of B and h, nor of the others."""

    B: int
    T: int
    S: int
    d: int
    h: int
    d_k: int
    d_v: int
    d_ff: int
    V: int


def draw_sizes(rng):
    """Small ones where the arrays are large."""
    B, h = (int(p) for p in rng.permutation([2, 3]))
    d = 5 if B == 3 else int(rng.choice([3, 5]))
    T, S = (int(p) for p in rng.permutation([p for p in (2, 3, 5, 7) if p not in (B, d)]))
    d_k, d_v, d_ff, V = (int(p) for p in rng.permutation([11, 13, 17, 19]))
    return Sizes(B, T, S, d, h, d_k, d_v, d_ff, V)


class Mistake(NamedTuple):
    """build(rng, sizes) -> (layer, inputs, keywords); the first hint begins with one of expected.

    letters: what a constant factor is a power of, any of them.
    """

    name: str
    build: Callable[..., tuple[Any, tuple, dict]]
    expected: tuple[str, ...]
    letters: tuple[str, ...] = ()


MISTAKES: list[Mistake] = []


def plant(name, expected, letters=()):
    """Decorator: the function, named in plain words, into the table."""
    expected = (expected,) if isinstance(expected, str) else expected
    letters = (letters,) if isinstance(letters, str) else letters

    def add(build):
        MISTAKES.append(Mistake(name, build, expected, letters))
        return build

    return add


def become(part, cls):
    """part, with the methods of cls: the mistake in a layer that is already part of a block."""
    assert issubclass(cls, type(part))
    part.__class__ = cls
    return part


def normal(rng, *shape):
    return rng.standard_normal(shape)


def some(rng, *shape):
    """Booleans, in each row of the last axis True twice, and False if there are more than two."""
    keep = rng.random(shape) < 0.6
    keep[..., 0], keep[..., -2:] = False, True
    return keep


# Linear


@plant("Linear: the weight's gradient is dy.T x for x.T dy", "transposed")
def _(rng, s):
    class Mistaken(Linear):
        def backward(self, ctx, dy):
            d = dy.shape[-1]
            self.b.grad += dy.reshape(-1, d).sum(axis=0)
            self.W.grad += dy.reshape(-1, d).T @ ctx.x.reshape(-1, d)
            return dy @ self.W.value.T

    return randomise(Mistaken(s.d, s.d, **WIDE), rng), (normal(rng, s.B, s.T, s.d),), {}


@plant("Linear: dx = dy W for dy W.T", ("transposed",))
def _(rng, s):
    class Mistaken(Linear):
        def backward(self, ctx, dy):
            super().backward(ctx, dy)
            return dy @ self.W.value

    return randomise(Mistaken(s.d, s.d, **WIDE), rng), (normal(rng, s.B, s.T, s.d),), {}


@plant("Linear: the bias's gradient is a mean over the batch", "constant factor", "B")
def _(rng, s):
    class Mistaken(Linear):
        def backward(self, ctx, dy):
            before = self.b.grad.copy()
            dx = super().backward(ctx, dy)
            self.b.grad = before + dy.mean(axis=0).sum(axis=0)
            return dx

    return randomise(Mistaken(s.d, s.d_ff, **WIDE), rng), (normal(rng, s.B, s.T, s.d),), {}


@plant("Linear: both parameter gradients divided by all rows", "constant factor", ("N", "B T"))
def _(rng, s):
    class Mistaken(Linear):
        def backward(self, ctx, dy):
            rows = dy.reshape(-1, dy.shape[-1])
            self.b.grad += rows.mean(axis=0)
            self.W.grad += ctx.x.reshape(len(rows), -1).T @ rows / len(rows)
            return dy @ self.W.value.T

    return randomise(Mistaken(s.d, s.d_ff, **WIDE), rng), (normal(rng, s.B, s.T, s.d),), {}


@plant("Linear: W.grad = for W.grad +=", "overwritten")
def _(rng, s):
    class Mistaken(Linear):
        def backward(self, ctx, dy):
            rows = dy.reshape(-1, dy.shape[-1])
            self.W.grad = ctx.x.reshape(len(rows), -1).T @ rows
            self.b.grad += rows.sum(axis=0)
            return dy @ self.W.value.T

    return randomise(Mistaken(s.d, s.d_ff, **WIDE), rng), (normal(rng, s.B, s.T, s.d),), {}


@plant("Linear: no gradient of the bias", "zero everywhere")
def _(rng, s):
    class Mistaken(Linear):
        def backward(self, ctx, dy):
            rows = dy.reshape(-1, dy.shape[-1])
            self.W.grad += ctx.x.reshape(len(rows), -1).T @ rows
            return dy @ self.W.value.T

    return randomise(Mistaken(s.d, s.d_ff, **WIDE), rng), (normal(rng, s.B, s.T, s.d),), {}


# Embedding and positions


@plant("Embedding: scaled by sqrt(d_model) in forward alone", "constant factor", "sqrt(d_model)")
def _(rng, s):
    class Mistaken(Embedding):
        def backward(self, ctx, dy):
            add_rows(self.W.grad, ctx.ids.reshape(-1), dy.reshape(-1, dy.shape[-1]))
            return ()

    layer = randomise(Mistaken(s.V, s.d, scale=True, **WIDE), rng)
    return layer, (rng.integers(0, s.V, (s.B, s.T)),), {}


@plant("Embedding: W.grad[ids] += loses repeated ids", ("left out of a sum", "term missing"))
def _(rng, s):
    class Mistaken(Embedding):
        def backward(self, ctx, dy):
            self.W.grad[ctx.ids] += self.scale * dy
            return ()

    layer = randomise(Mistaken(s.V, s.d, **WIDE), rng)
    return layer, (rng.integers(0, 3, (s.B, s.T)),), {}


# Softmax and activations


@plant("Softmax: divided by the batch", "constant factor", "B")
def _(rng, s):
    class Mistaken(Softmax):
        def backward(self, ctx, dy):
            return super().backward(ctx, dy) / len(dy)

    return Mistaken(), (normal(rng, s.B, s.T, s.d),), {}


@plant("Softmax: dy y (1 - y), the diagonal alone", "term missing")
def _(rng, s):
    class Mistaken(Softmax):
        def backward(self, ctx, dy):
            return dy * ctx.y * (1 - ctx.y)

    return Mistaken(), (normal(rng, s.B, s.T, s.d),), {}


@plant("GELU: the product rule's second term left out", "term missing")
def _(rng, s):
    class Mistaken(GELU):
        def backward(self, ctx, dy):
            return dy * ctx.Phi

    return Mistaken(), (normal(rng, s.B, s.T, s.d),), {}


# LayerNorm


@plant("LayerNorm: gamma outside the sums", "gamma left out")
def _(rng, s):
    class Mistaken(LayerNorm):
        def backward(self, ctx, dy):
            x_hat, rstd = ctx
            super().backward(ctx, dy)
            sums = dy.mean(-1, keepdims=True) + x_hat * (dy * x_hat).mean(-1, keepdims=True)
            return self.gamma.value * rstd * (dy - sums)

    return randomise(Mistaken(s.d, 0.1, **WIDE), rng), (normal(rng, s.B, s.T, s.d),), {}


@plant("LayerNorm: dy for dy gamma", "gamma left out")
def _(rng, s):
    class Mistaken(LayerNorm):
        def backward(self, ctx, dy):
            super().backward(ctx, dy)
            x_hat, rstd = ctx
            dxc = rstd * (dy - x_hat * (dy * x_hat).mean(-1, keepdims=True))
            return dxc - dxc.mean(-1, keepdims=True)

    return randomise(Mistaken(s.d, 0.1, **WIDE), rng), (normal(rng, s.B, s.T, s.d),), {}


@plant("LayerNorm: dbeta = dgamma", "wrong tensor")
def _(rng, s):
    class Mistaken(LayerNorm):
        def backward(self, ctx, dy):
            before = self.beta.grad.copy()
            dx = super().backward(ctx, dy)
            self.beta.grad = before + (dy * ctx.x_hat).sum(axis=(0, 1))
            return dx

    return randomise(Mistaken(s.d, 0.1, **WIDE), rng), (normal(rng, s.B, s.T, s.d),), {}


@plant("LayerNorm: the spread taken for a constant", "term missing")
def _(rng, s):
    class Mistaken(LayerNorm):
        def backward(self, ctx, dy):
            super().backward(ctx, dy)
            dxc = dy * self.gamma.value * ctx.rstd
            return dxc - dxc.mean(-1, keepdims=True)

    return randomise(Mistaken(s.d, 0.1, **WIDE), rng), (normal(rng, s.B, s.T, s.d),), {}


@plant("LayerNorm: sums for means over the row", "sum where mean was taken")
def _(rng, s):
    class Mistaken(LayerNorm):
        def backward(self, ctx, dy):
            super().backward(ctx, dy)
            x_hat, rstd = ctx
            dx_hat = dy * self.gamma.value
            dxc = rstd * (dx_hat - x_hat * (dx_hat * x_hat).sum(-1, keepdims=True))
            return dxc - dxc.sum(-1, keepdims=True)

    return randomise(Mistaken(s.d, 0.1, **WIDE), rng), (normal(rng, s.B, s.T, s.d),), {}


# Dropout and the loss


@plant("Dropout: kept entries not divided by 1 - p in backward", "constant factor")
def _(rng, s):
    class Mistaken(Dropout):
        def backward(self, ctx, dy):
            return dy * ctx.keep

    return Mistaken(0.3), (normal(rng, s.B, s.T, s.d),), {"rng": np.random.default_rng(0)}


@plant("Dropout: dropped entries get a gradient", "only masked positions wrong")
def _(rng, s):
    class Mistaken(Dropout):
        def backward(self, ctx, dy):
            return dy / (1 - self.p)

    return Mistaken(0.3), (normal(rng, s.B, s.T, s.d),), {"rng": np.random.default_rng(0)}


def loss(mistaken, rng, s, ignore=True):
    layer = mistaken(-1 if ignore else None, 0.1)
    targets = rng.integers(0, s.d, (s.B, s.T))
    if ignore:
        targets[rng.random(targets.shape) < 0.3] = -1
        targets[0, :2] = -1, 0
    return layer, (normal(rng, s.B, s.T, s.d), targets), {}


@plant("CrossEntropy: a factor T too large", "constant factor", "T")
def _(rng, s):
    class Mistaken(CrossEntropy):
        def backward(self, ctx, dloss=1.0):
            return super().backward(ctx, dloss) * ctx.targets.shape[1]

    return loss(Mistaken, rng, s)


@plant(
    "CrossEntropy: the gradient of the sum, for the mean over all targets",
    ("constant factor", "sum where mean was taken"),
    ("N", "B T"),
)
def _(rng, s):
    class Mistaken(CrossEntropy):
        def backward(self, ctx, dloss=1.0):
            return super().backward(ctx, dloss) * ctx.count

    return loss(Mistaken, rng, s, ignore=False)


@plant("CrossEntropy: the mean over ignored targets too", "constant factor", "N")
def _(rng, s):
    class Mistaken(CrossEntropy):
        def backward(self, ctx, dloss=1.0):
            return super().backward(ctx._replace(count=ctx.targets.size), dloss)

    return loss(Mistaken, rng, s)


@plant("CrossEntropy: ignored targets get a gradient", "only masked positions wrong")
def _(rng, s):
    class Mistaken(CrossEntropy):
        def backward(self, ctx, dloss=1.0):
            return super().backward(ctx._replace(counted=np.ones_like(ctx.counted)), dloss)

    return loss(Mistaken, rng, s)


@plant("CrossEntropy: onehot - p for p - onehot", "sign flipped")
def _(rng, s):
    class Mistaken(CrossEntropy):
        def backward(self, ctx, dloss=1.0):
            return -super().backward(ctx, dloss)

    return loss(Mistaken, rng, s)


# Scaled dot-product attention


def heads(rng, s, d_v=None):
    """q, k, v and a mask."""
    q, k = normal(rng, s.B, s.h, s.T, s.d_k), normal(rng, s.B, s.h, s.S, s.d_k)
    return (q, k, normal(rng, s.B, s.h, s.S, d_v or 2)), {"mask": some(rng, s.B, 1, s.T, s.S)}


@plant("attention: the scale 1/sqrt(d_k) forgotten in backward", "constant factor", "sqrt(d_k)")
def _(rng, s):
    class Mistaken(ScaledDotProductAttention):
        def backward(self, ctx, dy):
            dq, dk, dv = super().backward(ctx, dy)
            return dq * math.sqrt(ctx.q.shape[-1]), dk * math.sqrt(ctx.q.shape[-1]), dv

    return Mistaken(), *heads(rng, s)


@plant("attention: scaled by d_model for d_k in backward", "constant factor", "sqrt(h)")
def _(rng, s):
    class Mistaken(ScaledDotProductAttention):
        def backward(self, ctx, dy):
            dq, dk, dv = super().backward(ctx, dy)
            return dq / math.sqrt(ctx.q.shape[1]), dk / math.sqrt(ctx.q.shape[1]), dv

    return Mistaken(), *heads(rng, s)


@plant("attention: dk and dv returned in the other's place", "swapped")
def _(rng, s):
    class Mistaken(ScaledDotProductAttention):
        def backward(self, ctx, dy):
            dq, dk, dv = super().backward(ctx, dy)
            return dq, dv, dk

    return Mistaken(), *heads(rng, s, d_v=s.d_k)


# Multi-head attention


def multi_head(mistaken, rng, s):
    layer = randomise(mistaken(s.d, s.h, s.d_k, 2, **WIDE), rng)
    inputs = normal(rng, s.B, s.T, s.d), normal(rng, s.B, s.S, s.d), normal(rng, s.B, s.S, s.d)
    return layer, inputs, {"mask": some(rng, s.B, 1, s.T, s.S)}


@plant("multi-head attention: dkey and dvalue in the other's place", "swapped")
def _(rng, s):
    class Mistaken(MultiHeadAttention):
        def backward(self, ctx, dy):
            dquery, dkey, dvalue = super().backward(ctx, dy)
            return dquery, dvalue, dkey

    return multi_head(Mistaken, rng, s)


@plant("multi-head attention: the loop over heads stops one early", "only one head wrong")
def _(rng, s):
    class Mistaken(MultiHeadAttention):
        def attend_backward(self, ctx, dy):
            B, T, _ = dy.shape
            dcontext = self.W_o.backward(ctx.W_o, dy).reshape(B, T, self.num_heads, -1)
            dQ, dK, dV = self.attention.backward(ctx.attention, dcontext.swapaxes(1, 2))
            dQ = dQ.copy()
            dQ[:, -1] = 0
            dquery = self.W_q.backward(ctx.W_q, dQ.swapaxes(1, 2).reshape(B, T, -1))
            return dquery, dK, dV

    return multi_head(Mistaken, rng, s)


@plant("multi-head attention: heads split by a reshape alone in backward", ("wiring", "transposed"))
def _(rng, s):
    class Mistaken(MultiHeadAttention):
        def attend_backward(self, ctx, dy):
            B, h, T, _ = ctx.attention.q.shape
            dcontext = self.W_o.backward(ctx.W_o, dy).reshape(B, h, T, -1)
            dQ, dK, dV = self.attention.backward(ctx.attention, dcontext)
            dquery = self.W_q.backward(ctx.W_q, dQ.swapaxes(1, 2).reshape(B, T, -1))
            return dquery, dK, dV

    return multi_head(Mistaken, rng, s)


@plant("memory projection: the value's use of the memory forgotten", "left out of a sum")
def _(rng, s):
    class Mistaken(MemoryProjection):
        def backward(self, ctx, dy):
            return self.project_backward(ctx, *dy)[0]

    layer = randomise(Mistaken(s.d, s.h, s.d_k, 4, **WIDE), rng)
    return layer, (normal(rng, s.B, s.S, s.d),), {}


# Residual paths in an encoder layer


class SkipDropped(Residual):
    def leave_backward(self, ctx, dy):
        dx, ds = super().leave_backward(ctx, dy)
        return 0 * dx, ds


class SkipDoubled(Residual):
    def leave_backward(self, ctx, dy):
        dx, ds = super().leave_backward(ctx, dy)
        return 2 * dx, ds


class SkipThroughTheNorm(Residual):
    """As if y were norm(x) + sublayer(norm(x))."""

    def leave_backward(self, ctx, dy):
        dx, ds = super().leave_backward(ctx, dy)
        self.skip = dx
        return 0 * dx, ds

    def enter_backward(self, ctx, dh):
        return super().enter_backward(ctx, dh + self.skip)


def encoder_layer(rng, s, place="pre", dropout=0.0, cls=EncoderLayer):
    layer = cls(s.d, s.h, 7, d_k=2, d_v=3, norm=place, norm_eps=0.1, dropout=dropout, **WIDE)
    keywords = {"mask": some(rng, s.B, 1, 1, s.T)}
    if dropout:
        keywords["rng"] = np.random.default_rng(0)
    return randomise(layer, rng), (normal(rng, s.B, s.T, s.d),), keywords


def skip(name, cls, expected, which, place):
    @plant(f"encoder layer, {place}: {name} of the {which}", expected)
    def _(rng, s):
        layer, inputs, keywords = encoder_layer(rng, s, place)
        become({"attention": layer.residual1, "feed-forward": layer.residual2}[which], cls)
        return layer, inputs, keywords


skip("no gradient along the skip", SkipDropped, "residual path missing", "attention", "pre")
skip("no gradient along the skip", SkipDropped, "residual path missing", "feed-forward", "post")
skip("the skip's gradient added twice", SkipDoubled, "residual path doubled", "attention", "pre")
skip("the skip's gradient added twice", SkipDoubled, "residual path doubled", "attention", "post")
skip(
    "the skip's gradient sent through the norm",
    SkipThroughTheNorm,
    ("residual path missing", "wiring"),
    "feed-forward",
    "pre",
)


@plant("encoder layer: the query's gradient alone of the self-attention", "left out of a sum")
def _(rng, s):
    class Mistaken(EncoderLayer):
        def backward(self, ctx, dy):
            dx1, ds2 = self.residual2.leave_backward(ctx.leave2, dy)
            dh2 = self.feed_forward.backward(ctx.feed_forward, ds2)
            dx1 = dx1 + self.residual2.enter_backward(ctx.enter2, dh2)
            dx, ds1 = self.residual1.leave_backward(ctx.leave1, dx1)
            dquery, _, _ = self.self_attention.backward(ctx.self_attention, ds1)
            return dx + self.residual1.enter_backward(ctx.enter1, dquery)

    return encoder_layer(rng, s, cls=Mistaken)


class RememberingDropout(Layer):
    """Keeps its mask on itself instead of in ctx."""

    def __init__(self, p):
        self.p = p

    def forward(self, x, rng=None):
        self.scale = (rng.random(x.shape) >= self.p) / (1 - self.p)
        return x * self.scale, None

    def backward(self, ctx, dy):
        return dy * self.scale


@plant("encoder layer: one dropout that remembers its mask in two places", "wiring")
def _(rng, s):
    layer, inputs, keywords = encoder_layer(rng, s, dropout=0.4)
    layer.residual1.dropout = layer.residual2.dropout = RememberingDropout(0.4)
    return layer, inputs, keywords


# Decoder


def decoder_layer(cls, rng, s, S=None):
    layer = cls(s.d, s.h, 7, d_k=2, d_v=3, norm_eps=0.1, **WIDE)
    keywords = {
        "target_mask": np.tri(s.T, dtype=bool),
        "memory_mask": some(rng, s.B, 1, 1, S or s.S),
    }
    inputs = normal(rng, s.B, s.T, s.d), normal(rng, s.B, S or s.S, s.d)
    return randomise(layer, rng), inputs, keywords


@plant("decoder layer: (dmemory, dx) for (dx, dmemory)", "swapped")
def _(rng, s):
    class Mistaken(DecoderLayer):
        def backward(self, ctx, dy):
            return super().backward(ctx, dy)[::-1]

    return decoder_layer(Mistaken, rng, s, S=s.T)


@plant("decoder layer: of the memory's two uses only the key's", "left out of a sum")
def _(rng, s):
    class Mistaken(DecoderLayer):
        def _cross_backward(self, ctx, dx2):
            dx1, ds2 = self.residual2.leave_backward(ctx.leave, dx2)
            dh2, dkey, _ = self.cross_attention.backward(ctx.attention, ds2)
            return dx1 + self.residual2.enter_backward(ctx.enter, dh2), dkey

    return decoder_layer(Mistaken, rng, s)


@plant("decoder: the memory's gradient is that of the first layer alone", "left out of a sum")
def _(rng, s):
    class Mistaken(Decoder):
        def backward(self, ctx, dy):
            dx = self.norm.backward(ctx.norm, dy)
            for layer, layer_ctx in zip(self.layers[::-1], ctx.layers[::-1]):
                dx, dmemory = layer.backward(layer_ctx, dx)
            return dx, dmemory

    layer = Mistaken(2, s.d, s.h, 3, d_k=2, d_v=2, norm_eps=0.1, **WIDE)
    inputs = normal(rng, s.B, s.T, s.d), normal(rng, s.B, s.S, s.d)
    return randomise(layer, rng), inputs, {"target_mask": np.tri(s.T, dtype=bool)}


# Tied embeddings


class HeadGradientDropped(Unembedding):
    def backward(self, ctx, dy):
        before = self.W.grad.copy()
        dx = super().backward(ctx, dy)
        self.W.grad = before
        return dx


class LookupGradientDropped(Embedding):
    def backward(self, ctx, dy):
        return ()


class TiedPair(Layer):
    def __init__(self, V, d):
        self.embedding = Embedding(V, d, scale=True, **WIDE)
        self.output = Unembedding(self.embedding)

    def forward(self, ids):
        x, embedding = self.embedding.forward(ids)
        logits, output = self.output.forward(np.tanh(x))
        return logits, (embedding, output)

    def backward(self, ctx, dy):
        dx = self.output.backward(ctx[1], dy) * (1 - ctx[1].x ** 2)
        return self.embedding.backward(ctx[0], dx)


@plant("tied pair: the output's gradient dropped", "tied use missing")
def _(rng, s):
    layer = randomise(TiedPair(s.V, s.d), rng)
    become(layer.output, HeadGradientDropped)
    return layer, (rng.integers(0, s.V, (s.B, s.T)),), {}


@plant("tied pair: the look-up's gradient dropped", "tied use missing")
def _(rng, s):
    layer = randomise(TiedPair(s.V, s.d), rng)
    become(layer.embedding, LookupGradientDropped)
    return layer, (rng.integers(0, s.V, (s.B, s.T)),), {}


# Written from scratch


class LeakyReLU:
    """Positive slope 1, negative 0.1; nothing of either at 0 in backward."""

    def forward(self, x):
        return np.where(x > 0, x, 0.1 * x), x

    def backward(self, x, dy):
        return dy * ((x > 0) + 0.1 * (x < 0))


@plant("own leaky ReLU: slope 0 at 0, between 0.1 and 1", "kink")
def _(rng, s):
    x = normal(rng, s.B, s.T, s.d)
    x[rng.random(x.shape) < 0.2] = 0.0
    return LeakyReLU(), (x,), {}


class ResidualMLP:
    """y = x + relu(x W1 + b1) W2 + b2 with plain arrays inside."""

    skip = 1.0

    def __init__(self, rng, d, d_ff):
        self.W1 = Parameter(rng.standard_normal((d, d_ff)) / d**0.5)
        self.b1 = Parameter(rng.standard_normal(d_ff))
        self.W2 = Parameter(rng.standard_normal((d_ff, d)) / d_ff**0.5)
        self.b2 = Parameter(rng.standard_normal(d))

    def forward(self, x):
        hidden = x @ self.W1.value + self.b1.value
        active = np.maximum(hidden, 0)
        return x + active @ self.W2.value + self.b2.value, (x, hidden, active)

    def backward(self, ctx, dy):
        x, hidden, active = ctx
        self.b2.grad += dy.sum(axis=(0, 1))
        self.W2.grad += np.einsum("btf,btd->fd", active, dy)
        dhidden = dy @ self.W2.value.T * (hidden > 0)
        self.b1.grad += dhidden.sum(axis=(0, 1))
        self.W1.grad += np.einsum("btd,btf->df", x, dhidden)
        return self.skip * dy + dhidden @ self.W1.value.T


@plant("own residual MLP: dx without dy", "residual path missing")
def _(rng, s):
    layer = ResidualMLP(rng, s.d, s.d_ff)
    layer.skip = 0.0
    return layer, (normal(rng, s.B, s.T, s.d),), {}


@plant("own residual MLP: dy added twice", "residual path doubled")
def _(rng, s):
    layer = ResidualMLP(rng, s.d, s.d_ff)
    layer.skip = 2.0
    return layer, (normal(rng, s.B, s.T, s.d),), {}
