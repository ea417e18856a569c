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
    Encoder,
    EncoderLayer,
    FeedForward,
    LanguageModel,
    LanguageModelConfig,
    Layer,
    LayerNorm,
    LearnedPositions,
    Linear,
    MultiHeadAttention,
    Parameter,
    ReLU,
    ScaledDotProductAttention,
    Softmax,
    Transformer,
    TransformerConfig,
    Unembedding,
)
from npdecoder.blocks import MemoryProjection, Residual
from npdecoder.core import add_rows
from npdecoder.layers import softmax

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


@plant("Embedding: W.grad[ids] += loses repeated ids", "overwritten")
def _(rng, s):
    class Mistaken(Embedding):
        def backward(self, ctx, dy):
            self.W.grad[ctx.ids] += self.scale * dy
            return ()

    layer = randomise(Mistaken(s.V, s.d, **WIDE), rng)
    return layer, (rng.integers(0, 3, (s.B, s.T)),), {}


def learned_positions(mistaken, rng, s, max_len):
    layer = randomise(mistaken(max_len, s.d, **WIDE), rng)
    positions = rng.integers(0, max_len, (s.B, s.T))
    return layer, (normal(rng, s.B, s.T, s.d),), {"positions": positions}


@plant("LearnedPositions: P.grad = for P.grad +=", "overwritten")
def _(rng, s):
    class Mistaken(LearnedPositions):
        def backward(self, ctx, dy):
            self.P.grad = np.zeros_like(self.P.grad)
            return super().backward(ctx, dy)

    return learned_positions(Mistaken, rng, s, s.V)


@plant("LearnedPositions: the rows' gradient is a mean over the batch", "constant factor", "B")
def _(rng, s):
    class Mistaken(LearnedPositions):
        def backward(self, ctx, dy):
            self.P.grad[: dy.shape[1]] += dy.mean(axis=0)
            return dy

    return randomise(Mistaken(s.V, s.d, **WIDE), rng), (normal(rng, s.B, s.T, s.d),), {}


@plant("LearnedPositions: the table's gradient is dy.T onehot for onehot.T dy", "transposed")
def _(rng, s):
    class Mistaken(LearnedPositions):
        def backward(self, ctx, dy):
            onehot = ctx.positions[..., None] == np.arange(len(self.P.grad))
            self.P.grad += np.einsum("btd,btp->dp", dy, onehot)
            return dy

    return learned_positions(Mistaken, rng, s, s.d)


@plant(
    "LearnedPositions: P.grad[positions] += loses repeated positions",
    "overwritten",
)
def _(rng, s):
    class Mistaken(LearnedPositions):
        def backward(self, ctx, dy):
            self.P.grad[ctx.positions] += dy
            return dy

    return learned_positions(Mistaken, rng, s, 3)


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


@plant("ReLU: dy everywhere", "only masked positions wrong")
def _(rng, s):
    class Mistaken(ReLU):
        def backward(self, ctx, dy):
            return dy

    return Mistaken(), (normal(rng, s.B, s.T, s.d),), {}


@plant("ReLU: dy y for dy (y > 0)", "wrong tensor")
def _(rng, s):
    class Mistaken(ReLU):
        def backward(self, ctx, dy):
            return dy * ctx.y

    return Mistaken(), (normal(rng, s.B, s.T, s.d),), {}


@plant("ReLU: -dy where y > 0", "sign flipped")
def _(rng, s):
    class Mistaken(ReLU):
        def backward(self, ctx, dy):
            return np.where(ctx.y > 0, -dy, 0.0)

    return Mistaken(), (normal(rng, s.B, s.T, s.d),), {}


@plant("feed-forward: past the activation in backward", "wiring")
def _(rng, s):
    class Mistaken(FeedForward):
        def backward(self, ctx, dy):
            return self.linear1.backward(ctx.linear1, self.linear2.backward(ctx.linear2, dy))

    layer = randomise(Mistaken(s.d, s.d_ff, **WIDE), rng)
    return layer, (normal(rng, s.B, s.T, s.d),), {}


@plant("feed-forward: linear1 before linear2 in backward", "wiring")
def _(rng, s):
    class Mistaken(FeedForward):
        def backward(self, ctx, dy):
            dactive = self.linear1.backward(ctx.linear1, dy)
            dhidden = self.activation.backward(ctx.activation, dactive)
            return self.linear2.backward(ctx.linear2, dhidden)

    layer = randomise(Mistaken(s.d, s.d, "gelu", **WIDE), rng)
    return layer, (normal(rng, s.B, s.T, s.d),), {}


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


@plant("multi-head attention: the first head's keys count twice", "only one head wrong")
def _(rng, s):
    class Mistaken(MultiHeadAttention):
        def project_backward(self, ctx, dK, dV):
            dK = dK.copy()
            dK[:, 0] *= 2
            return super().project_backward(ctx, dK, dV)

    return multi_head(Mistaken, rng, s)


@plant("multi-head attention: the last head's values have the other sign", "only one head wrong")
def _(rng, s):
    class Mistaken(MultiHeadAttention):
        def project_backward(self, ctx, dK, dV):
            dV = dV.copy()
            dV[:, -1] *= -1
            return super().project_backward(ctx, dK, dV)

    return multi_head(Mistaken, rng, s)


@plant("multi-head attention: no gradient of the first head's rows of W_o", "only one head wrong")
def _(rng, s):
    class Mistaken(MultiHeadAttention):
        def attend_backward(self, ctx, dy):
            rows = slice(self.W_o.W.shape[0] // self.num_heads)
            before = self.W_o.W.grad[rows].copy()
            returned = super().attend_backward(ctx, dy)
            self.W_o.W.grad[rows] = before
            return returned

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


class SkipPastTheNorm(Residual):
    """In Post-LN, as if y were x + norm(sublayer(x))."""

    def leave_backward(self, ctx, dy):
        _, ds = super().leave_backward(ctx, dy)
        return dy, ds


class OverwritingLinear(Linear):
    def backward(self, ctx, dy):
        self.W.grad = np.zeros_like(self.W.grad)
        return super().backward(ctx, dy)


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
skip("no gradient along the skip", SkipDropped, "residual path missing", "attention", "post")
skip(
    "the skip's gradient added twice", SkipDoubled, "residual path doubled", "feed-forward", "post"
)
skip("the skip's gradient sent past the norm", SkipPastTheNorm, "wiring", "attention", "post")
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


@plant("encoder layer, post: gamma left out in its first norm", ("gamma left out", "in a part"))
def _(rng, s):
    class Mistaken(LayerNorm):
        def backward(self, ctx, dy):
            super().backward(ctx, dy)
            x_hat, rstd = ctx
            dxc = rstd * (dy - x_hat * (dy * x_hat).mean(-1, keepdims=True))
            return dxc - dxc.mean(-1, keepdims=True)

    layer, inputs, keywords = encoder_layer(rng, s, "post")
    become(layer.norm1, Mistaken)
    return layer, inputs, keywords


@plant("encoder layer, post: W.grad = in the first Linear of the feed-forward", "overwritten")
def _(rng, s):
    layer, inputs, keywords = encoder_layer(rng, s, "post")
    become(layer.feed_forward.linear1, OverwritingLinear)
    return layer, inputs, keywords


def encoder(rng, s, cls=Encoder, **options):
    layer = cls(2, s.d, 1, 3, d_k=2, d_v=2, norm_bias=False, norm_eps=0.1, **options, **WIDE)
    T = min(s.T, s.S)  # a stack is dear
    return randomise(layer, rng), (normal(rng, s.B, T, s.d),), {"mask": some(rng, s.B, 1, 1, T)}


@plant("encoder: the loop over layers stops one early", ("zero everywhere", "wiring"))
def _(rng, s):
    class Mistaken(Encoder):
        def backward(self, ctx, dy):
            dx = self.norm.backward(ctx.norm, dy)
            for layer, layer_ctx in zip(self.layers[:0:-1], ctx.layers[:0:-1]):
                dx = layer.backward(layer_ctx, dx)
            return dx

    return encoder(rng, s, Mistaken)


@plant("encoder, post: the contexts in the order of forward", "wiring")
def _(rng, s):
    class Mistaken(Encoder):
        def backward(self, ctx, dy):
            dx = dy
            for layer, layer_ctx in zip(self.layers[::-1], ctx.layers):
                dx = layer.backward(layer_ctx, dx)
            return dx

    return encoder(rng, s, Mistaken, norm="post")


@plant("encoder: W.grad = in a layer that stands in two places", "overwritten")
def _(rng, s):
    layer, inputs, keywords = encoder(rng, s)
    layer.layers[1] = layer.layers[0]
    become(layer.layers[0].self_attention.W_v, OverwritingLinear)
    return layer, inputs, keywords


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


@plant("decoder layer: of the memory's two uses only the value's", "left out of a sum")
def _(rng, s):
    class Mistaken(DecoderLayer):
        def _cross_backward(self, ctx, dx2):
            dx1, ds2 = self.residual2.leave_backward(ctx.leave, dx2)
            dh2, _, dvalue = self.cross_attention.backward(ctx.attention, ds2)
            return dx1 + self.residual2.enter_backward(ctx.enter, dh2), dvalue

    return decoder_layer(Mistaken, rng, s)


@plant("decoder layer: no gradient along the skip of the cross-attention", "residual path missing")
def _(rng, s):
    layer, inputs, keywords = decoder_layer(DecoderLayer, rng, s)
    become(layer.residual2, SkipDropped)
    return layer, inputs, keywords


@plant("decoder layer: W.grad = in the values of the cross-attention", "overwritten")
def _(rng, s):
    layer, inputs, keywords = decoder_layer(DecoderLayer, rng, s)
    become(layer.cross_attention.W_v, OverwritingLinear)
    return layer, inputs, keywords


def sharing_layer(cls, rng, s):
    """Its memory is the pair (K, V)."""
    sizes = {"d_k": 2, "d_v": 2, "norm_eps": 0.1}
    layer = cls(s.d, s.h, 7, cross_attention="shared", **sizes, **WIDE)
    memory = normal(rng, s.B, s.h, s.S, 2), normal(rng, s.B, s.h, s.S, 2)
    keywords = {"target_mask": np.tri(s.T, dtype=bool)}
    return randomise(layer, rng), (normal(rng, s.B, s.T, s.d), memory), keywords


@plant("decoder layer, shared memory: (dx, dV, dK) for (dx, dK, dV)", "swapped")
def _(rng, s):
    class Mistaken(DecoderLayer):
        def backward(self, ctx, dy):
            dx, dK, dV = super().backward(ctx, dy)
            return dx, dV, dK

    return sharing_layer(Mistaken, rng, s)


@plant("decoder layer, shared memory: no gradient of the keys", "zero everywhere")
def _(rng, s):
    class Mistaken(DecoderLayer):
        def backward(self, ctx, dy):
            dx, dK, dV = super().backward(ctx, dy)
            return dx, 0 * dK, dV

    return sharing_layer(Mistaken, rng, s)


class SharingDecoder(Decoder):
    """memory_gradients: what the projection gets of the layers' [dK, dV], the last layer first."""

    def backward(self, ctx, dy):
        dx = self.norm.backward(ctx.norm, dy)
        pairs = []
        for layer, layer_ctx in zip(self.layers[::-1], ctx.layers[::-1]):
            dx, *pair = layer.backward(layer_ctx, dx)
            pairs.append(pair)
        return dx, self.memory_projection.backward(ctx.project, self.memory_gradients(pairs))

    def memory_gradients(self, pairs):
        return tuple(map(sum, zip(*pairs)))


def sharing_decoder(cls, rng, s):
    options = {"cross_attention": "shared", "norm_bias": False, "norm_eps": 0.1}
    layer = cls(2, s.d, 1, 3, d_k=2, d_v=2, **options, **WIDE)
    inputs = normal(rng, s.B, s.T, s.d), normal(rng, s.B, s.S, s.d)
    return randomise(layer, rng), inputs, {"target_mask": np.tri(s.T, dtype=bool)}


@plant("decoder, shared memory: dK and dV of the last layer lost", "left out of a sum")
def _(rng, s):
    class Mistaken(SharingDecoder):
        def memory_gradients(self, pairs):
            return tuple(pairs[-1])

    return sharing_decoder(Mistaken, rng, s)


@plant("decoder, shared memory: (dV, dK) for (dK, dV) into the projection", "swapped")
def _(rng, s):
    class Mistaken(SharingDecoder):
        def memory_gradients(self, pairs):
            return super().memory_gradients(pairs)[::-1]

    return sharing_decoder(Mistaken, rng, s)


@plant("decoder, shared memory: dK and dV are means over the layers", "constant factor")
def _(rng, s):
    class Mistaken(SharingDecoder):
        def memory_gradients(self, pairs):
            return tuple(total / len(pairs) for total in super().memory_gradients(pairs))

    return sharing_decoder(Mistaken, rng, s)


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


# Models

MODEL_SIZES = {"d_ff": 3, "d_k": 2, "d_v": 2, "norm_eps": 0.1, "positions": "learned"}


def language_model(rng, s, tie="target_output"):
    sizes = {"d_model": s.d, "num_heads": s.h, "num_layers": 1, "max_len": s.T, **MODEL_SIZES}
    model = LanguageModel(LanguageModelConfig(11, tie_embeddings=tie, **sizes), **WIDE)
    return randomise(model, rng), (rng.integers(0, 11, (s.B, s.T)),), {}


@plant("language model: the output's gradient of the tied table dropped", "tied use missing")
def _(rng, s):
    model, inputs, keywords = language_model(rng, s)
    become(model.output, HeadGradientDropped)
    return model, inputs, keywords


@plant("language model: the look-up's gradient of the tied table dropped", "tied use missing")
def _(rng, s):
    model, inputs, keywords = language_model(rng, s)
    become(model.embedding, LookupGradientDropped)
    return model, inputs, keywords


@plant("language model: embeddings scaled in forward alone", "constant factor", "sqrt(d_model)")
def _(rng, s):
    class Mistaken(Embedding):
        def backward(self, ctx, dy):
            add_rows(self.W.grad, ctx.ids.reshape(-1), dy.reshape(-1, dy.shape[-1]))
            return ()

    model, inputs, keywords = language_model(rng, s, tie="none")
    become(model.embedding, Mistaken)
    return model, inputs, keywords


@plant("transformer: of one table's three uses the source's look-up dropped", "tied use missing")
def _(rng, s):
    class Mistaken(Transformer):
        def encode_backward(self, ctx, dmemory):
            dx = self.encoder.backward(ctx.encoder, dmemory)
            self.source_positions.backward(ctx.embed.positions, dx)
            return ()

    sizes = {"d_model": s.d, "num_heads": 1, "max_len": max(s.T, s.S), **MODEL_SIZES}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    model = Mistaken(TransformerConfig(11, 11, tie_embeddings="all", **layers, **sizes), **WIDE)
    ids = rng.integers(0, 11, (s.B, s.S)), rng.integers(0, 11, (s.B, s.T))
    return randomise(model, rng), ids, {}


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


@plant("own residual MLP: the weights' gradients in the other's place", "swapped")
def _(rng, s):
    class Mistaken(ResidualMLP):
        def backward(self, ctx, dy):
            W1, W2 = self.W1.grad.copy(), self.W2.grad.copy()
            dx = super().backward(ctx, dy)
            dW1, dW2 = self.W1.grad - W1, self.W2.grad - W2
            self.W1.grad, self.W2.grad = W1 + dW2, W2 + dW1
            return dx

    return Mistaken(rng, s.d, s.d), (normal(rng, s.B, s.T, s.d),), {}


@plant("own residual MLP: b1.grad = for b1.grad +=", "overwritten")
def _(rng, s):
    class Mistaken(ResidualMLP):
        def backward(self, ctx, dy):
            self.b1.grad = np.zeros_like(self.b1.grad)
            return super().backward(ctx, dy)

    return Mistaken(rng, s.d, s.d_ff), (normal(rng, s.B, s.T, s.d),), {}


class OwnAttention:
    """One head of causal self-attention, with plain arrays inside."""

    def __init__(self, rng, d, d_k):
        self.W_q, self.W_k, self.W_v = (Parameter(normal(rng, d, d_k) / d**0.5) for _ in range(3))
        self.W_o = Parameter(normal(rng, d_k, d) / d_k**0.5)
        self.scale = d_k**-0.5

    def forward(self, x):
        q, k, v = x @ self.W_q.value, x @ self.W_k.value, x @ self.W_v.value
        scores = q @ k.swapaxes(1, 2) * self.scale
        A = softmax(np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf))
        return A @ v @ self.W_o.value, (x, q, k, v, A)

    def backward(self, ctx, dy):
        x, q, k, v, A = ctx
        self.W_o.grad += np.einsum("bti,btj->ij", A @ v, dy)
        dcontext = dy @ self.W_o.value.T
        dA = dcontext @ v.swapaxes(1, 2)
        dS = self.softmax_backward(A, dA)
        dq = dS @ k * self.scale
        dk = self.key_backward(dS, q)
        dv = A.swapaxes(1, 2) @ dcontext
        dx = np.zeros_like(x)
        for W, dprojected in ((self.W_q, dq), (self.W_k, dk), (self.W_v, dv)):
            W.grad += np.einsum("bti,btj->ij", x, dprojected)
            dx += dprojected @ W.value.T
        return dx

    def softmax_backward(self, A, dA):
        return A * (dA - (A * dA).sum(-1, keepdims=True))

    def key_backward(self, dS, q):
        return dS.swapaxes(1, 2) @ q * self.scale


@plant("own attention: the scale forgotten in dk", "constant factor", "sqrt(d_k)")
def _(rng, s):
    class Mistaken(OwnAttention):
        def key_backward(self, dS, q):
            return dS.swapaxes(1, 2) @ q

    return Mistaken(rng, s.d, s.d_k), (normal(rng, s.B, s.T, s.d),), {}


@plant("own attention: dk = dS q for dS.T q", "transposed")
def _(rng, s):
    class Mistaken(OwnAttention):
        def key_backward(self, dS, q):
            return dS @ q * self.scale

    return Mistaken(rng, s.d, s.d_k), (normal(rng, s.B, s.T, s.d),), {}


@plant("own attention: the softmax's sum left out", "term missing")
def _(rng, s):
    class Mistaken(OwnAttention):
        def softmax_backward(self, A, dA):
            return A * dA

    return Mistaken(rng, s.d, s.d_k), (normal(rng, s.B, s.T, s.d),), {}


class OwnMaskedAttention:
    """Masked scores are -1e-9, where -1e9 was meant: a constant all the same."""

    def forward(self, q, k, v, mask):
        A = softmax(np.where(mask, q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5, -1e-9))
        return A @ v, (q, k, v, mask, A)

    def backward(self, ctx, dy):
        q, k, v, mask, A = ctx
        dA = dy @ v.swapaxes(1, 2)
        dS = self.mask_backward(mask, A * (dA - (A * dA).sum(-1, keepdims=True)))
        dS = dS / q.shape[-1] ** 0.5
        return dS @ k, dS.swapaxes(1, 2) @ q, A.swapaxes(1, 2) @ dy

    def mask_backward(self, mask, dS):
        return np.where(mask, dS, 0.0)


def own_masked_attention(rng, s, cls=OwnMaskedAttention):
    q, k = normal(rng, s.B, s.T, s.d_k), normal(rng, s.B, s.S, s.d_k)
    padding = rng.random((s.B, 1, s.S)) < 0.6
    padding[..., 0], padding[..., -1] = False, True
    return cls(), (q, k, normal(rng, s.B, s.S, s.d_v)), {"mask": padding}


@plant("own masked attention: masked scores get a gradient", "only masked positions wrong")
def _(rng, s):
    class Mistaken(OwnMaskedAttention):
        def mask_backward(self, mask, dS):
            return dS

    return own_masked_attention(rng, s, Mistaken)


class OwnMultiHeadAttention:
    """Self-attention, head by head; head i has the columns i d_k .. (i + 1) d_k."""

    def __init__(self, rng, d, num_heads, d_k):
        self.num_heads = num_heads
        width = num_heads * d_k
        self.Wq, self.Wk, self.Wv = (Parameter(normal(rng, d, width) / d**0.5) for _ in range(3))
        self.Wo = Parameter(normal(rng, width, d) / width**0.5)

    def forward(self, x):
        y, heads = 0, []
        for i in range(self.num_heads):
            at = self.columns(i)
            q, k, v = (x @ W.value[:, at] for W in (self.Wq, self.Wk, self.Wv))
            A = softmax(q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5)
            y = y + A @ v @ self.Wo.value[at]
            heads.append((q, k, v, A))
        return y, (x, heads)

    def backward(self, ctx, dy):
        x, heads = ctx
        dx = np.zeros_like(x)
        for i in self.loop():
            at = self.columns(i)
            q, k, v, A = heads[i]
            self.Wo.grad[at] += np.einsum("bti,btj->ij", A @ v, dy)
            dcontext = dy @ self.Wo.value[at].T
            dA = dcontext @ v.swapaxes(1, 2)
            dS = A * (dA - (A * dA).sum(-1, keepdims=True)) / q.shape[-1] ** 0.5
            gradients = dS @ k, dS.swapaxes(1, 2) @ q, A.swapaxes(1, 2) @ dcontext
            for W, dprojected in zip((self.Wq, self.Wk, self.Wv), gradients):
                W.grad[:, at] += np.einsum("bti,btj->ij", x, dprojected)
                dx += dprojected @ W.value[:, at].T
        return dx

    def loop(self):
        return range(self.num_heads)

    def columns(self, i):
        width = len(self.Wo.value) // self.num_heads
        return slice(i * width, (i + 1) * width)


@plant("own multi-head attention: the loop begins with the second head", "only one head wrong")
def _(rng, s):
    class Mistaken(OwnMultiHeadAttention):
        def loop(self):
            return range(1, self.num_heads)

    return Mistaken(rng, s.d, s.h, 7), (normal(rng, s.B, s.T, s.d),), {}


class OwnTied:
    """logits = tanh(W[ids]) W.T, with one table for both."""

    def __init__(self, rng, V, d):
        self.W = Parameter(normal(rng, V, d))

    def forward(self, ids):
        hidden = np.tanh(self.W.value[ids])
        return hidden @ self.W.value.T, (ids, hidden)

    def backward(self, ctx, dy):
        ids, hidden = ctx
        dx = dy @ self.W.value * (1 - hidden**2)
        self.output_backward(hidden, dy)
        self.look_up_backward(ids, dx)
        return ()

    def output_backward(self, hidden, dy):
        self.W.grad += np.einsum("btv,btd->vd", dy, hidden)

    def look_up_backward(self, ids, dx):
        np.add.at(self.W.grad, ids, dx)


@plant("own tied embeddings: the output's use forgotten", "tied use missing")
def _(rng, s):
    class Mistaken(OwnTied):
        def output_backward(self, hidden, dy):
            pass

    return Mistaken(rng, s.V, s.d), (rng.integers(0, s.V, (s.B, s.T)),), {}


@plant("own tied embeddings: the look-up's use forgotten", "tied use missing")
def _(rng, s):
    class Mistaken(OwnTied):
        def look_up_backward(self, ids, dx):
            pass

    return Mistaken(rng, s.V, s.d), (rng.integers(0, s.V, (s.B, s.T)),), {}


@plant(
    "own tied embeddings: W.grad[ids] += loses repeated ids",
    "overwritten",
)
def _(rng, s):
    class Mistaken(OwnTied):
        def look_up_backward(self, ids, dx):
            self.W.grad[ids] += dx

    return Mistaken(rng, s.V, s.d), (rng.integers(0, 3, (s.B, s.T)),), {}


class OwnLayerNorm:
    """Of a student who calls gamma and beta gain and bias."""

    def __init__(self, rng, d):
        self.gain, self.bias = Parameter(1 + 0.5 * normal(rng, d)), Parameter(normal(rng, d))

    def forward(self, x):
        centred = x - x.mean(-1, keepdims=True)
        std = np.sqrt((centred**2).mean(-1, keepdims=True) + 0.1)
        x_hat = centred / std
        return self.gain.value * x_hat + self.bias.value, (x_hat, std)

    def backward(self, ctx, dy):
        x_hat, std = ctx
        self.gain.grad += (dy * x_hat).sum(axis=(0, 1))
        self.bias.grad += dy.sum(axis=(0, 1))
        return self.normalise_backward(x_hat, std, dy)

    def normalise_backward(self, x_hat, std, dy):
        g = dy * self.gain.value
        return (g - g.mean(-1, keepdims=True) - x_hat * (g * x_hat).mean(-1, keepdims=True)) / std


@plant("own LayerNorm: the gain left out of dx", "gamma left out")
def _(rng, s):
    class Mistaken(OwnLayerNorm):
        def normalise_backward(self, x_hat, std, dy):
            means = dy.mean(-1, keepdims=True) + x_hat * (dy * x_hat).mean(-1, keepdims=True)
            return (dy - means) / std

    return Mistaken(rng, s.d), (normal(rng, s.B, s.T, s.d),), {}


@plant("own LayerNorm: sums for means over the row", "sum where mean was taken")
def _(rng, s):
    class Mistaken(OwnLayerNorm):
        def normalise_backward(self, x_hat, std, dy):
            g = dy * self.gain.value
            return (g - g.sum(-1, keepdims=True) - x_hat * (g * x_hat).sum(-1, keepdims=True)) / std

    return Mistaken(rng, s.d), (normal(rng, s.B, s.T, s.d),), {}


class OwnCrossEntropy:
    """The mean over the targets that are not negative."""

    def forward(self, logits, targets):
        p = softmax(logits)
        counted = targets >= 0
        p_target = np.take_along_axis(p, np.maximum(targets, 0)[..., None], -1)[..., 0]
        return -np.log(p_target)[counted].mean(), (p, targets, counted)

    def backward(self, ctx, dloss=1.0):
        p, targets, counted = ctx
        return dloss * (p - self.onehot(p, targets)) * counted[..., None] / counted.sum()

    def onehot(self, p, targets):
        return targets[..., None] == np.arange(p.shape[-1])


def own_loss(rng, s, cls=OwnCrossEntropy, ignore=False):
    targets = rng.integers(0, s.d, (s.B, s.T))
    if ignore:
        targets[0, :2] = -1, 0
    return cls(), (normal(rng, s.B, s.T, s.d), targets), {}


@plant(
    "own cross-entropy: the sum's gradient for the mean's",
    ("constant factor", "sum where mean was taken"),
    ("N", "B T"),
)
def _(rng, s):
    class Mistaken(OwnCrossEntropy):
        def backward(self, ctx, dloss=1.0):
            p, targets, _ = ctx
            return dloss * (p - self.onehot(p, targets))

    return own_loss(rng, s, Mistaken)


@plant("own cross-entropy: divided by the sequences for the targets", "constant factor", "T")
def _(rng, s):
    class Mistaken(OwnCrossEntropy):
        def backward(self, ctx, dloss=1.0):
            p, targets, _ = ctx
            return dloss * (p - self.onehot(p, targets)) / len(p)

    return own_loss(rng, s, Mistaken)


@plant("own cross-entropy: ignored targets get a gradient", "only masked positions wrong")
def _(rng, s):
    class Mistaken(OwnCrossEntropy):
        def backward(self, ctx, dloss=1.0):
            p, targets, counted = ctx
            return dloss * (p - self.onehot(p, targets)) / counted.sum()

    return own_loss(rng, s, Mistaken, ignore=True)


@plant("own cross-entropy: p for p - onehot", "term missing")
def _(rng, s):
    class Mistaken(OwnCrossEntropy):
        def onehot(self, p, targets):
            return 0.0

    return own_loss(rng, s, Mistaken)


class OwnSummary:
    """Every position of x plus the mean of the memory."""

    def forward(self, x, memory):
        return x + memory.mean(axis=1, keepdims=True), memory.shape

    def backward(self, shape, dy):
        dmean = dy.sum(axis=1, keepdims=True)
        return dy, np.broadcast_to(dmean / shape[1], shape)


@plant(
    "own mean of the memory: not divided by its length in backward",
    ("constant factor", "sum where mean was taken"),
    "S",
)
def _(rng, s):
    class Mistaken(OwnSummary):
        def backward(self, shape, dy):
            return dy, np.broadcast_to(dy.sum(axis=1, keepdims=True), shape)

    return Mistaken(), (normal(rng, s.B, s.T, s.d), normal(rng, s.B, s.S, s.d)), {}
