"""Mistakes found in other libraries, planted here one by one: gradcheck must see each of them, on
inputs on which it passes the layer as it is."""

import math

import numpy as np
import pytest
from helpers import assert_close, parameter_gradients, plain_attention, randomise

from npdecoder import (
    CrossEntropy,
    Decoder,
    DecoderLayer,
    Embedding,
    EncoderLayer,
    FeedForward,
    Layer,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    ScaledDotProductAttention,
    Softmax,
    Unembedding,
    gradcheck,
    softmax,
)
from npdecoder.blocks import MemoryProjection, Residual
from npdecoder.core import add_rows
from npdecoder.layers.layer_norm import LayerNormContext

WIDE = {"dtype": np.float64}


def normal(*shape):
    return np.random.default_rng(shape).standard_normal(shape)


# LayerNorm


class GammaOutsideTheSums(LayerNorm):
    def backward(self, ctx, dy):
        x_hat, rstd = ctx
        super().backward(ctx, dy)
        sums = dy.mean(-1, keepdims=True) + x_hat * (dy * x_hat).mean(-1, keepdims=True)
        return self.gamma.value * rstd * (dy - sums)


class BetaGetsGammasGradient(LayerNorm):
    def backward(self, ctx, dy):
        self.beta.grad += (dy * ctx.x_hat).sum(axis=(0, 1)) - dy.sum(axis=(0, 1))
        return super().backward(ctx, dy)


class SpreadWithoutGradient(LayerNorm):
    """rstd taken for a constant."""

    def backward(self, ctx, dy):
        super().backward(ctx, dy)
        dx_hat = dy * self.gamma.value
        return ctx.rstd * (dx_hat - dx_hat.mean(-1, keepdims=True))


class GammaOfOneItem(LayerNorm):
    """Its sums over the sequence, but not over the batch."""

    def backward(self, ctx, dy):
        self.gamma.grad -= (dy * ctx.x_hat)[1:].sum(axis=(0, 1))
        return super().backward(ctx, dy)


class StandardDeviationPlusEps(LayerNorm):
    """The forward of (x - mean) / (std + eps), with the backward of sqrt(var + eps)."""

    def forward(self, x):
        centred = x - x.mean(-1, keepdims=True)
        rstd = 1 / (x.std(-1, ddof=1, keepdims=True) + self.eps)
        x_hat = centred * rstd
        return self.gamma.value * x_hat + self.beta.value, LayerNormContext(x_hat, rstd)


# Softmax and attention


class DividedByTheBatch(Softmax):
    def backward(self, ctx, dy):
        return super().backward(ctx, dy) / len(dy)


class WithoutTheSum(Softmax):
    def backward(self, ctx, dy):
        return dy * ctx.y * (1 - ctx.y)


class ScaledByTheWrongWidth(ScaledDotProductAttention):
    def backward(self, ctx, dy):
        dq, dk, dv = super().backward(ctx, dy)
        wrong = math.sqrt(ctx.q.shape[-1] / (ctx.q.shape[-1] * ctx.q.shape[1]))
        return dq * wrong, dk * wrong, dv


class ScaleForgotten(ScaledDotProductAttention):
    def backward(self, ctx, dy):
        dq, dk, dv = super().backward(ctx, dy)
        return dq * math.sqrt(ctx.q.shape[-1]), dk, dv


class WeightsWithoutDropout(ScaledDotProductAttention):
    """dv from the weights as they were before dropout."""

    def backward(self, ctx, dy):
        dq, dk, _ = super().backward(ctx, dy)
        return dq, dk, ctx.A.swapaxes(-1, -2) @ dy


class MaskedScoresGetGradients(ScaledDotProductAttention):
    """A mask of -1e9 in forward, none in backward."""

    def backward(self, ctx, dy):
        A = softmax(ctx.q @ ctx.k.swapaxes(-1, -2) / math.sqrt(ctx.q.shape[-1]))
        return super().backward(ctx._replace(softmax=ctx.softmax._replace(y=A)), dy)


class KeyAndValueSwapped(MultiHeadAttention):
    def backward(self, ctx, dy):
        dquery, dkey, dvalue = super().backward(ctx, dy)
        return dquery, dvalue, dkey


class HeadsMergedWithoutTranspose(MultiHeadAttention):
    """dcontext in the order of a reshape alone."""

    def attend_backward(self, ctx, dy):
        B, h, T, _ = ctx.attention.q.shape
        dcontext = self.W_o.backward(ctx.W_o, dy).reshape(B, h, T, -1)
        dQ, dK, dV = self.attention.backward(ctx.attention, dcontext)
        dquery = self.W_q.backward(ctx.W_q, dQ.swapaxes(1, 2).reshape(B, T, -1))
        return dquery, dK, dV


class OneUseOfTheMemory(MemoryProjection):
    def backward(self, ctx, dy):
        return self.project_backward(ctx, *dy)[0]


# Residual paths, on which the skip belongs beside the sublayer


class SkipDropped(Residual):
    def leave_backward(self, ctx, dy):
        dx, ds = super().leave_backward(ctx, dy)
        return 0 * dx, ds


class SkipThroughTheNorm(Residual):
    """As if y were norm(x) + sublayer(norm(x))."""

    def leave_backward(self, ctx, dy):
        dx, ds = super().leave_backward(ctx, dy)
        self.skip = dx
        return 0 * dx, ds

    def enter_backward(self, ctx, dh):
        return super().enter_backward(ctx, dh + self.skip)


class SkipDropsOut(Residual):
    def leave_backward(self, ctx, dy):
        _, ds = super().leave_backward(ctx, dy)
        return ds, ds


def with_residual(residual_class, place, dropout=0.0):
    def make():
        layer = EncoderLayer(6, 2, 7, norm=place, dropout=dropout, **WIDE)
        layer.residual1 = residual_class(layer.norm1, place, dropout)
        layer.residual2 = residual_class(layer.norm2, place, dropout)
        return layer

    return make


class RememberingDropout(Layer):
    """Keeps its mask on itself instead of in ctx."""

    def __init__(self, p):
        self.p = p

    def forward(self, x, rng=None):
        self.scale = (rng.random(x.shape) >= self.p) / (1 - self.p)
        return x * self.scale, None

    def backward(self, ctx, dy):
        return dy * self.scale


def with_one_dropout():
    layer = EncoderLayer(6, 2, 7, **WIDE)
    layer.residual1.dropout = layer.residual2.dropout = RememberingDropout(0.5)
    return layer


# Decoder


class MemoryAndInputSwapped(DecoderLayer):
    def backward(self, ctx, dy):
        return super().backward(ctx, dy)[::-1]


class MemoryUsedOnce(DecoderLayer):
    """The memory is key and value, but only the key's gradient comes back."""

    def _cross_backward(self, ctx, dx2):
        dx1, ds2 = self.residual2.leave_backward(ctx.leave, dx2)
        dh2, dkey, _ = self.cross_attention.backward(ctx.attention, ds2)
        return dx1 + self.residual2.enter_backward(ctx.enter, dh2), dkey


class SelfAttentionQueryOnly(EncoderLayer):
    def backward(self, ctx, dy):
        dx1, ds2 = self.residual2.leave_backward(ctx.leave2, dy)
        dh2 = self.feed_forward.backward(ctx.feed_forward, ds2)
        dx1 = dx1 + self.residual2.enter_backward(ctx.enter2, dh2)
        dx, ds1 = self.residual1.leave_backward(ctx.leave1, dx1)
        dquery, _, _ = self.self_attention.backward(ctx.self_attention, ds1)
        return dx + self.residual1.enter_backward(ctx.enter1, dquery)


class MemoryOfTheLastLayer(Decoder):
    """The gradient of the memory is that of one layer, not their sum."""

    def backward(self, ctx, dy):
        dx = self.norm.backward(ctx.norm, dy)
        for layer, layer_ctx in zip(self.layers[::-1], ctx.layers[::-1]):
            dx, dmemory = layer.backward(layer_ctx, dx)
        return dx, dmemory


# Loss, embedding, and what is tied


class PerPosition(CrossEntropy):
    """A factor T too large: the mean over the batch of sums over the sequence, in backward."""

    def backward(self, ctx, dloss=1.0):
        return super().backward(ctx, dloss) * ctx.targets.shape[1]


class SummedGradient(CrossEntropy):
    def backward(self, ctx, dloss=1.0):
        return super().backward(ctx, dloss) * ctx.count


class MeanOverIgnored(CrossEntropy):
    def backward(self, ctx, dloss=1.0):
        return super().backward(ctx._replace(count=ctx.targets.size), dloss)


class GradientOfIgnored(CrossEntropy):
    def backward(self, ctx, dloss=1.0):
        return super().backward(ctx._replace(counted=np.ones_like(ctx.counted)), dloss)


class RepeatsLost(Embedding):
    def backward(self, ctx, dy):
        self.W.grad[ctx.ids.reshape(-1)] += (self.scale * dy).reshape(-1, dy.shape[-1])
        return ()


class ScaleLost(Embedding):
    def backward(self, ctx, dy):
        add_rows(self.W.grad, ctx.ids.reshape(-1), dy.reshape(-1, dy.shape[-1]))
        return ()


class HeadGradientDropped(Unembedding):
    def backward(self, ctx, dy):
        before = self.W.grad.copy()
        dx = super().backward(ctx, dy)
        self.W.grad = before
        return dx


class TiedPair(Layer):
    def __init__(self, output_class=Unembedding):
        self.embedding = Embedding(5, 3, scale=True, **WIDE)
        self.output = output_class(self.embedding)

    def forward(self, ids):
        x, embedding = self.embedding.forward(ids)
        logits, output = self.output.forward(x)
        return logits, (embedding, output)

    def backward(self, ctx, dy):
        return self.embedding.backward(ctx[0], self.output.backward(ctx[1], dy))


class GradientOverwritten(Linear):
    def backward(self, ctx, dy):
        self.zero_grad()
        return super().backward(ctx, dy)


IDS = np.array([[1, 1, 3], [1, 0, 1]])
TARGETS = np.array([[1, -1, 3], [1, -1, 1], [4, 2, -1], [0, 0, 0], [-1, 3, 3]])
QKV = normal(3, 2, 5, 4), normal(3, 2, 7, 4), normal(3, 2, 7, 6)
KEEP = np.random.default_rng(0).random((3, 1, 5, 7)) < 0.6
DROPOUT = {"rng": 0}

# mistake: its layer, the layer as it is, the inputs and keywords
MISTAKES = [
    *(
        (mistake(7, 0.1, **WIDE), LayerNorm(7, 0.1, **WIDE), (normal(3, 5, 7),), {})
        for mistake in (
            GammaOutsideTheSums,
            BetaGetsGammasGradient,
            SpreadWithoutGradient,
            GammaOfOneItem,
            StandardDeviationPlusEps,
        )
    ),
    (DividedByTheBatch(), Softmax(), (normal(3, 5),), {}),
    (WithoutTheSum(), Softmax(), (normal(3, 5),), {}),
    (ScaledByTheWrongWidth(), ScaledDotProductAttention(), QKV, {}),
    (ScaleForgotten(), ScaledDotProductAttention(), QKV, {}),
    (WeightsWithoutDropout(0.5), ScaledDotProductAttention(0.5), QKV, DROPOUT),
    (MaskedScoresGetGradients(), ScaledDotProductAttention(), QKV, {"mask": KEEP}),
    *(
        (mistake(6, 2, 3, 4, **WIDE), MultiHeadAttention(6, 2, 3, 4, **WIDE),
         (normal(3, 5, 6), normal(3, 7, 6), normal(3, 7, 6) + 0.5), {})
        for mistake in (KeyAndValueSwapped, HeadsMergedWithoutTranspose)
    ),
    (OneUseOfTheMemory(6, 2, **WIDE), MemoryProjection(6, 2, **WIDE), (normal(3, 5, 6),), {}),
    *(
        (make(), EncoderLayer(6, 2, 7, norm=place, dropout=p, **WIDE), (normal(3, 5, 6),), keywords)
        for make, place, p, keywords in [
            (with_residual(SkipDropped, "pre"), "pre", 0.0, {}),
            (with_residual(SkipDropped, "post"), "post", 0.0, {}),
            (with_residual(SkipThroughTheNorm, "pre"), "pre", 0.0, {}),
            (with_residual(SkipDropsOut, "pre", 0.5), "pre", 0.5, DROPOUT),
            (with_residual(SkipDropsOut, "post", 0.5), "post", 0.5, DROPOUT),
            (with_one_dropout, "pre", 0.5, DROPOUT),
            (lambda: SelfAttentionQueryOnly(6, 2, 7, **WIDE), "pre", 0.0, {}),
        ]
    ),
    *(
        (mistake(6, 2, 7, **WIDE), DecoderLayer(6, 2, 7, **WIDE),
         (normal(3, 5, 6), normal(3, S, 6)), {})
        for mistake, S in [(MemoryAndInputSwapped, 7), (MemoryAndInputSwapped, 5),
                           (MemoryUsedOnce, 7)]
    ),
    (MemoryOfTheLastLayer(2, 6, 2, 7, **WIDE), Decoder(2, 6, 2, 7, **WIDE),
     (normal(3, 5, 6), normal(3, 7, 6)), {}),
    *(
        (mistake(-1, 0.1), CrossEntropy(-1, 0.1), (normal(5, 3, 5), TARGETS), {})
        for mistake in (PerPosition, SummedGradient, MeanOverIgnored, GradientOfIgnored)
    ),
    (RepeatsLost(4, 3, scale=True, **WIDE), Embedding(4, 3, scale=True, **WIDE), (IDS,), {}),
    (ScaleLost(4, 3, scale=True, **WIDE), Embedding(4, 3, scale=True, **WIDE), (IDS,), {}),
    (TiedPair(HeadGradientDropped), TiedPair(), (IDS,), {}),
    (GradientOverwritten(3, 5, **WIDE), Linear(3, 5, **WIDE), (normal(2, 3),), {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mistaken", "right", "inputs", "keywords"), MISTAKES, ids=lambda value: type(value).__name__
)
def test_gradcheck_sees_it(mistaken, right, inputs, keywords):
    mode = "full" if right.num_parameters() < 200 else "directional"
    for layer in mistaken, right:
        randomise(layer, np.random.default_rng(0))
    report = gradcheck(right, *inputs, mode=mode, **keywords)
    assert report.ok, f"\n{report}"
    report = gradcheck(mistaken, *inputs, mode=mode, **keywords)
    assert not report.ok, f"\n{report}"


# Wrong in forward and backward alike, so that a finite difference agrees: only a test against a
# definition sees these.


class ScaledByTheModel(ScaledDotProductAttention):
    """A factor 1/sqrt(h d_k) for 1/sqrt(d_k), in forward and backward."""

    def forward(self, q, k, v, mask=None, rng=None):
        return super().forward(q / math.sqrt(q.shape[1]), k, v, mask, rng)

    def backward(self, ctx, dy):
        dq, dk, dv = super().backward(ctx, dy)
        return dq / math.sqrt(ctx.q.shape[1]), dk, dv


def test_a_consistent_wrong_scale_is_seen_by_the_definition_alone():
    layer = randomise(MultiHeadAttention(6, 2, **WIDE), np.random.default_rng(0))
    query, memory = normal(3, 5, 6), normal(3, 7, 6)
    assert_close(layer(query, memory, memory), plain_attention(layer, query, memory))
    layer.attention = ScaledByTheModel()
    assert gradcheck(layer, query, memory, memory).ok
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(layer(query, memory, memory), plain_attention(layer, query, memory))


class CrossedSources(DecoderLayer):
    """Q and K from the memory, V from the decoder: a shape error, unless S = T hides it."""

    def _cross_forward(self, x1, memory, mask, rng):
        h2, enter = self.residual2.enter(x1)
        s2, attention = self.cross_attention.forward(memory, memory, h2, mask, rng)
        return self.residual2.leave(x1, s2, rng)[0], (enter, attention)


def test_crossed_sources_cannot_run_where_S_differs_from_T():
    layer = CrossedSources(6, 2, **WIDE)
    layer.forward(normal(3, 5, 6), normal(3, 5, 6))
    with pytest.raises(ValueError, match=r"key .* and value"):
        layer.forward(normal(3, 5, 6), normal(3, 7, 6))


def test_weak_inputs_hide_what_these_see():
    """At gamma = 1 the gradient without gamma in its sums is right: hence random gammas."""
    assert gradcheck(GammaOutsideTheSums(7, **WIDE), normal(3, 5, 7)).ok


def test_a_tied_gradient_is_not_doubled():
    pair = randomise(TiedPair(), np.random.default_rng(0))
    logits, ctx = pair.forward(IDS)
    pair.backward(ctx, np.ones_like(logits))
    assert list(parameter_gradients(pair)) == ["embedding.W"]
    assert pair.num_parameters() == pair.embedding.W.size


def test_one_dropout_in_three_places():
    """The same instance may be used again and again: the masks are in the contexts."""
    layer = FeedForward(6, 7, dropout=0.5, **WIDE)
    encoder = EncoderLayer(6, 2, 7, dropout=0.5, **WIDE)
    encoder.feed_forward = layer
    encoder.residual1.dropout = encoder.residual2.dropout = layer.dropout
    randomise(encoder, np.random.default_rng(0))
    assert gradcheck(encoder, normal(3, 5, 6), rng=0).ok
