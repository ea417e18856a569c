# ---
# jupyter:
#   jupytext:
#     notebook_metadata_filter: -jupytext.text_representation
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lesson 8. Heads
#
# **You need to know:** lesson 6 (`06_attention.py`); lesson 7 (`07_masks.py`) for one test.
#
# **You will be able to:** split rows into heads and merge them, say why the reshape needs a
# transpose, and go back through a whole multi-head attention with its four matrices.
#
# **Time:** about 60 minutes with the exercises on paper.
#
# The block of this lesson is `npdecoder/blocks/multi_head_attention.py`.

# %%
from functools import partial

import numpy as np

from npdecoder import (
    Layer,
    MultiHeadAttention,
    Parameter,
    ScaledDotProductAttention,
    causal_mask,
    gradcheck,
)
from npdecoder.blocks.multi_head_attention import merge_heads, split_heads

assert_allclose = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)

# %% [markdown]
# ## Several small attentions side by side
#
# One attention gives each token one mean over the others. With h heads it gets h of them, each by
# its own measure of what fits: head i has its own W_q, W_k (d_model, d_k) and W_v (d_model, d_v),
# attends by itself, and the contexts of all heads, side by side in one row of h d_v numbers, go
# through one more matrix W_o (h d_v, d_model).
#
# The h matrices of W_q stand side by side in one, (d_model, h d_k): one product makes the queries
# of all heads, and columns i d_k to (i + 1) d_k are those of head i.
#
# ## Split and merge
#
# Attention wants the heads as a leading axis, (B, h, T, d), so that the same two products serve all
# heads. A row of h d numbers is cut into h pieces of d, and then the axes T and h change places:
#
#     split:   (B, T, h d)  reshape  (B, T, h, d)  swap axes 1 and 2  (B, h, T, d)
#     merge:   the same from right to left
#
# Below, token t has the numbers 10 t, 10 t + 1, and so on, so that you can see where they go.

# %%
B, T, h, d = 1, 3, 2, 2
x = 10.0 * np.arange(T)[None, :, None] + np.arange(h * d)
heads = x.reshape(B, T, h, d).swapaxes(1, 2)
print("x", x[0], "head 0", heads[0, 0], "head 1", heads[0, 1], sep="\n")
assert_allclose(heads[0, 0], [[0, 1], [10, 11], [20, 21]])
assert_allclose(heads[0, 1], [[2, 3], [12, 13], [22, 23]])
assert_allclose(split_heads(x, h), heads)
assert_allclose(heads.swapaxes(1, 2).reshape(B, T, h * d), x)
assert_allclose(merge_heads(heads), x)

# %% [markdown]
# Why not reshape to (B, h, T, d) at once? A reshape keeps the order of the numbers in memory, token
# after token. It fills the first head with the first half of them, the whole of token 0 and half of
# token 1: the "tokens" of that head are pieces of one token, and attention runs among them.

# %%
wrong = x.reshape(B, h, T, d)
print("reshaped at once, head 0", wrong[0, 0], sep="\n")
assert_allclose(wrong[0, 0], [[0, 1], [2, 3], [10, 11]])


# %% [markdown]
# ## Backward of moving numbers
#
# split only moves numbers. If entry a of y is entry b of x, then δy_a = δx_b, and dx_b = dy_a: the
# gradient goes back to where the number came from. So split's backward is merge, and merge's is
# split. That holds for the wrong reshape too, and gradcheck passes it: it computes a different
# function, with a right derivative. A test of causality (lesson 7) sees it.

# %%
class AttendInHeads(Layer):
    """x (B, T, h d): self-attention in every head, without projections."""

    split, merge = staticmethod(split_heads), staticmethod(merge_heads)
    attention = ScaledDotProductAttention()

    def forward(self, x):
        q = self.split(x, h)
        context, ctx = self.attention.forward(q, q, q, causal_mask(x.shape[1]))
        return self.merge(context), ctx

    def backward(self, ctx, dy):
        dq, dk, dv = self.attention.backward(ctx, self.split(dy, h))
        return self.merge(dq + dk + dv)


class WrongMerge(AttendInHeads):
    def forward(self, x):
        q = self.split(x, h)
        context, ctx = self.attention.forward(q, q, q, causal_mask(x.shape[1]))
        return context.reshape(x.shape), ctx

    def backward(self, ctx, dy):
        dq, dk, dv = self.attention.backward(ctx, dy.reshape(ctx.q.shape))
        return self.merge(dq + dk + dv)


def moves_earlier(layer):
    """How far the outputs of earlier tokens move when the last token does."""
    x = np.random.default_rng(2).standard_normal((3, 5, h * d))
    changed = x.copy()
    changed[:, -1] += 1.0
    return np.abs(layer(changed) - layer(x))[:, :-1].max()


x = np.random.default_rng(0).standard_normal((3, 5, h * d))
assert gradcheck(AttendInHeads(), x).ok
assert gradcheck(WrongMerge(), x).ok  # not seen
right, wrong = moves_earlier(AttendInHeads()), moves_earlier(WrongMerge())
print(f"earlier tokens move by {right:.2f}, and with the wrong merge by {wrong:.2f}")
assert right < 1e-12
assert wrong > 0.1  # seen


# %% [markdown]
# ## The whole multi-head attention
#
# Without any splitting, head by head, with W_q,i for the columns of head i and W_o,i for its rows:
#
#     q_i = query W_q,i      k_i = key W_k,i      v_i = value W_v,i
#     context_i = attention(q_i, k_i, v_i)
#     output = sum over i of context_i W_o,i          (one row times W_o, cut into pieces)
#
# Back, head by head. The output is a sum, so dy goes to every head as it is; query, key and value
# are used by every head, so their gradients are sums over the heads:
#
#     dcontext_i = dy W_o,i^T              dW_o,i = context_i^T dy
#     dq_i, dk_i, dv_i = attention backward of dcontext_i                      (lesson 6)
#     dquery = sum over i of dq_i W_q,i^T  dW_q,i = query^T dq_i
#     dkey   = sum over i of dk_i W_k,i^T  dW_k,i = key^T dk_i
#     dvalue = sum over i of dv_i W_v,i^T  dW_v,i = value^T dv_i
#
# d_k and d_v need not be d_model / h, though they mostly are. Below they are not, and no two of B,
# T, S, h, d_model, d_k and d_v are equal: a swapped pair of axes would show.

# %%
def rows_product(x, dy):
    """x^T dy over all rows of all sentences."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


class MyMultiHead(Layer):
    def __init__(self, W_q, W_k, W_v, W_o, h):
        self.W_q, self.W_k, self.W_v, self.W_o = map(Parameter, (W_q, W_k, W_v, W_o))
        self.attention, self.h = ScaledDotProductAttention(), h

    def head(self, i):
        """The columns of head i in W_q and W_k, and in W_v (which are its rows in W_o)."""
        d_k, d_v = self.W_q.shape[1] // self.h, self.W_v.shape[1] // self.h
        return slice(i * d_k, (i + 1) * d_k), slice(i * d_v, (i + 1) * d_v)

    def forward(self, query, key, value):
        output, heads = 0.0, []
        for i in range(self.h):
            of_k, of_v = self.head(i)
            q = query @ self.W_q.value[:, of_k]
            k = key @ self.W_k.value[:, of_k]
            v = value @ self.W_v.value[:, of_v]
            context, ctx = self.attention.forward(q, k, v)
            output = output + context @ self.W_o.value[of_v]
            heads.append((context, ctx))
        return output, (query, key, value, heads)

    def backward(self, ctx, dy):
        query, key, value, heads = ctx
        dquery, dkey, dvalue = np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)
        for i, (context, attention_ctx) in enumerate(heads):
            of_k, of_v = self.head(i)
            dcontext = dy @ self.W_o.value[of_v].T
            self.W_o.grad[of_v] += rows_product(context, dy)
            dq, dk, dv = self.attention.backward(attention_ctx, dcontext)
            dquery += dq @ self.W_q.value[:, of_k].T
            dkey += dk @ self.W_k.value[:, of_k].T
            dvalue += dv @ self.W_v.value[:, of_v].T
            self.W_q.grad[:, of_k] += rows_product(query, dq)
            self.W_k.grad[:, of_k] += rows_product(key, dk)
            self.W_v.grad[:, of_v] += rows_product(value, dv)
        return dquery, dkey, dvalue


rng = np.random.default_rng(0)
layer = MultiHeadAttention(5, num_heads=3, d_k=7, d_v=8, rng=rng, dtype=np.float64)
linears = layer.W_q, layer.W_k, layer.W_v, layer.W_o
mine = MyMultiHead(*(linear.W.value for linear in linears), h=3)
query, key, value = (rng.standard_normal(shape) for shape in [(2, 4, 5), (2, 6, 5), (2, 6, 5)])
report = gradcheck(mine, query, key, value)
print(report)
assert report.ok

output, ctx = layer.forward(query, key, value)
dy = rng.standard_normal(output.shape)
my_output, my_ctx = mine.forward(query, key, value)
assert_allclose(my_output, output)
for my_gradient, gradient in zip(mine.backward(my_ctx, dy), layer.backward(ctx, dy)):
    assert_allclose(my_gradient, gradient)
for parameter, linear in zip((mine.W_q, mine.W_k, mine.W_v, mine.W_o), linears):
    assert_allclose(parameter.grad, linear.W.grad)

# %% [markdown]
# ## To do on paper
#
# 1. One sentence of two tokens, [1, 2, 3, 4] and [5, 6, 7, 8], two heads. Split them. What does the
#    reshape at once make of them?
# 2. d_model = 512, h = 8, no biases. What is d_k, what is sqrt(d_k), and how many weights do W_q,
#    W_k, W_v and W_o have? How many would they have with h = 1?
# 3. Two heads start with the same weights in all four matrices (two equal halves each). Will
#    training ever tell them apart?

# %%
two = np.arange(1.0, 9.0).reshape(1, 2, 4)
print("1.", split_heads(two, 2)[0].tolist(), "at once:", two.reshape(1, 2, 2, 2)[0].tolist())
assert_allclose(split_heads(two, 2)[0], [[[1, 2], [5, 6]], [[3, 4], [7, 8]]])
assert_allclose(two.reshape(1, 2, 2, 2)[0], [[[1, 2], [3, 4]], [[5, 6], [7, 8]]])

counts = [MultiHeadAttention(512, heads, rng=0).num_parameters() for heads in (8, 1)]
print(f"2. d_k = {512 // 8}, root {(512 // 8) ** 0.5:.0f}, weights {counts[0]:,} and {counts[1]:,}")
assert counts == [4 * 512 * 512, 4 * 512 * 512]

W_k, W_v = rng.standard_normal((2, 5, 3))
twins = MyMultiHead(*(np.hstack([W, W]) for W in (W_k, W_k, W_v)), np.vstack([W_v.T, W_v.T]), h=2)
twins.backward(twins.forward(query, key, value)[1], dy)
print("3. never: equal halves get equal gradients. That is why weights start at random.")
for parameter in (twins.W_q, twins.W_k, twins.W_v):
    assert_allclose(parameter.grad[:, :3], parameter.grad[:, 3:])
assert_allclose(twins.W_o.grad[:3], twins.W_o.grad[3:])
