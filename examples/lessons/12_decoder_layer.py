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
# # Lesson 12. The whole decoder layer
#
# **You need to know:** lessons 1 to 9.
#
# **You will be able to:** put a decoder layer together from the parts of the other lessons, write
# its backward by reading its forward upwards, and prove it, weight by weight.
#
# **Time:** about 90 minutes with the exercises on paper.
#
# The block of this lesson is `DecoderLayer` in `npdecoder/blocks/decoder.py`.

# %%
import math
from functools import partial

import numpy as np

from npdecoder import DecoderLayer, Layer, Parameter, gradcheck, padding_mask, softmax, target_mask
from npdecoder.blocks.multi_head_attention import merge_heads, split_heads

assert_allclose = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)


# %% [markdown]
# ## The plan
#
# Three sublayers, each on a residual path, each with its norm before it (Pre-LN, lesson 5):
#
#     1.  x1 = x  + self_attention(norm1(x), target_mask)
#     2.  x2 = x1 + cross_attention(norm2(x1), memory, memory_mask)
#     3.  y  = x2 + feed_forward(norm3(x2))
#
# The weights lie in a dictionary, under the names that npdecoder gives them. First the parts; each
# has a forward that returns its output and what its backward will need.
#
# **Linear (lesson 1) and LayerNorm (lesson 4).**

# %%
class Parts(Layer):
    def __init__(self, weights, num_heads):
        self.weights = {name: Parameter(value) for name, value in weights.items()}
        self.h = num_heads

    def linear(self, name, x):
        y = x @ self.weights[f"{name}.W"].value
        return y + self.weights[f"{name}.b"].value if f"{name}.b" in self.weights else y

    def linear_backward(self, name, x, dy):
        rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        self.weights[f"{name}.W"].grad += rows.T @ drows
        if f"{name}.b" in self.weights:
            self.weights[f"{name}.b"].grad += drows.sum(axis=0)
        return dy @ self.weights[f"{name}.W"].value.T

    def norm(self, name, x):
        gamma, beta = (self.weights[f"{name}.{part}"].value for part in ("gamma", "beta"))
        xc = x - x.mean(axis=-1, keepdims=True)
        rstd = 1 / np.sqrt((xc * xc).mean(axis=-1, keepdims=True) + 1e-5)
        x_hat = xc * rstd
        return gamma * x_hat + beta, (x_hat, rstd)

    def norm_backward(self, name, ctx, dy):
        x_hat, rstd = ctx
        gamma, beta = (self.weights[f"{name}.{part}"] for part in ("gamma", "beta"))
        gamma.grad += (dy * x_hat).sum(axis=(0, 1))
        beta.grad += dy.sum(axis=(0, 1))
        dx_hat = dy * gamma.value
        m1 = dx_hat.mean(axis=-1, keepdims=True)
        m2 = (dx_hat * x_hat).mean(axis=-1, keepdims=True)
        return rstd * (dx_hat - m1 - x_hat * m2)


# %% [markdown]
# **Attention with heads and a mask (lessons 6, 7, 8, 9).** `memory` gives keys and values; in
# self-attention it is the same array as `query`. Its gradient is that of its two uses. The
# feed-forward network, with ReLU, follows; its derivative is 1 where hidden is above 0, else 0.

# %%
class Sublayers(Parts):
    def attention(self, name, query, memory, mask):
        q = split_heads(self.linear(f"{name}.W_q", query), self.h)
        k = split_heads(self.linear(f"{name}.W_k", memory), self.h)
        v = split_heads(self.linear(f"{name}.W_v", memory), self.h)
        S = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        A = softmax(np.where(mask, S, -np.inf))
        merged = merge_heads(A @ v)
        return self.linear(f"{name}.W_o", merged), (query, memory, q, k, v, A, merged)

    def attention_backward(self, name, ctx, ds):
        query, memory, q, k, v, A, merged = ctx
        root = math.sqrt(q.shape[-1])
        dcontext = split_heads(self.linear_backward(f"{name}.W_o", merged, ds), self.h)
        dA = dcontext @ v.swapaxes(-1, -2)
        dv = A.swapaxes(-1, -2) @ dcontext
        dS = A * (dA - (dA * A).sum(axis=-1, keepdims=True))
        dq = dS @ k / root
        dk = dS.swapaxes(-1, -2) @ q / root
        dquery = self.linear_backward(f"{name}.W_q", query, merge_heads(dq))
        dkey = self.linear_backward(f"{name}.W_k", memory, merge_heads(dk))
        dvalue = self.linear_backward(f"{name}.W_v", memory, merge_heads(dv))
        return dquery, dkey + dvalue

    def feed_forward(self, x):
        hidden = self.linear("feed_forward.linear1", x)
        active = np.maximum(hidden, 0)
        return self.linear("feed_forward.linear2", active), (x, active)

    def feed_forward_backward(self, ctx, ds):
        x, active = ctx
        dactive = self.linear_backward("feed_forward.linear2", active, ds)
        dhidden = dactive * (active > 0)
        return self.linear_backward("feed_forward.linear1", x, dhidden)


# %% [markdown]
# ## The layer
#
# forward is the plan, line by line. backward is the plan **read upwards**. Each of its three blocks
# knows two things: y = x2 + s3 sends dy both ways (so dx2 begins with dy), and what comes back from
# the norm is added. h1 is query, key and value at once, three uses; `attention_backward` has added
# two of them already.

# %%
class MyDecoderLayer(Sublayers):
    def forward(self, x, memory, target_mask, memory_mask):
        h1, norm1 = self.norm("norm1", x)
        s1, self_attention = self.attention("self_attention", h1, h1, target_mask)
        x1 = x + s1
        h2, norm2 = self.norm("norm2", x1)
        s2, cross_attention = self.attention("cross_attention", h2, memory, memory_mask)
        x2 = x1 + s2
        h3, norm3 = self.norm("norm3", x2)
        s3, feed_forward = self.feed_forward(h3)
        y = x2 + s3
        return y, (norm1, self_attention, norm2, cross_attention, norm3, feed_forward)

    def backward(self, ctx, dy):
        norm1, self_attention, norm2, cross_attention, norm3, feed_forward = ctx
        # 3. y = x2 + feed_forward(norm3(x2))
        dh3 = self.feed_forward_backward(feed_forward, dy)
        dx2 = dy + self.norm_backward("norm3", norm3, dh3)
        # 2. x2 = x1 + cross_attention(norm2(x1), memory)
        dh2, dmemory = self.attention_backward("cross_attention", cross_attention, dx2)
        dx1 = dx2 + self.norm_backward("norm2", norm2, dh2)
        # 1. x1 = x + self_attention(norm1(x))
        dquery, dkey_and_value = self.attention_backward("self_attention", self_attention, dx1)
        dx = dx1 + self.norm_backward("norm1", norm1, dquery + dkey_and_value)
        return dx, dmemory


# %% [markdown]
# ## The proof
#
# Everything that hides mistakes is avoided: no two sizes are equal (B 2, T 4, S 5, d_model 6,
# 3 heads of d_k 7 and d_v 8, d_ff 11), all weights are random, gamma and beta too, and both masks
# hide something. Then the output, both input gradients and all weight gradients must be those of
# npdecoder, and gradcheck must find the same by differences.

# %%
rng = np.random.default_rng(0)
sizes = {"d_model": 6, "num_heads": 3, "d_k": 7, "d_v": 8, "d_ff": 11, "dtype": np.float64}
layer = DecoderLayer(**sizes)
for parameter in layer.parameters():
    parameter.value = rng.standard_normal(parameter.shape)

x, memory, dy = (rng.standard_normal(shape) for shape in [(2, 4, 6), (2, 5, 6), (2, 4, 6)])
target_ids = [[1, 7, 4, 6], [1, 7, 4, 0]]  # <s> 我 爱 你, and <s> 我 爱 with padding
source_ids = [[2, 5, 3, 8, 9], [2, 5, 3, 0, 0]]
masks = {"target_mask": target_mask(target_ids, 0), "memory_mask": padding_mask(source_ids, 0)}

mine = MyDecoderLayer(layer.state_dict(), num_heads=3)
y, ctx = layer.forward(x, memory, **masks)
dx, dmemory = layer.backward(ctx, dy)
my_y, my_ctx = mine.forward(x, memory, **masks)
my_dx, my_dmemory = mine.backward(my_ctx, dy)

assert_allclose(my_y, y)
assert_allclose(my_dx, dx)
assert_allclose(my_dmemory, dmemory)
for name, parameter in layer.named_parameters():
    assert_allclose(mine.weights[name].grad, parameter.grad, err_msg=name)
assert_allclose(dmemory[1, 3:], 0.0)  # nobody sees the padding of the source

report = gradcheck(mine, x, memory, **masks)
print(report)
assert report.ok

# %% [markdown]
# A stack is this layer several times: the gradients go down through dx, and all dmemory add up
# (lesson 9). Below it stand the embeddings (lesson 10), above it the output and the loss (lesson
# 3), and beside it the encoder, whose layers are this one without step 2. That is all of a
# Transformer; `examples/worked_example.py` prints every number of one.
#
# ## To do on paper
#
# 1. How many numbers does a layer with d_model = 4, 2 heads, d_ff = 16 hold (attention without
#    biases, feed-forward and norms with them)? Does it depend on the number of heads?
# 2. dy is 0 but at target position 0. Which rows of dx and of dmemory can be other than 0 (causal
#    mask, no padding)? And if dy is 0 but at the last position?
# 3. Which lines of forward and backward change for Post-LN, where
#    x1 = norm1(x + self_attention(x)), and so on? Write one of the three blocks.

# %%
counts = [DecoderLayer(4, heads, 16, rng=0).num_parameters() for heads in (2, 1)]
print(f"1. 2 * 4 * 16 + (64 + 16 + 64 + 4) + 3 * 8 = {counts[0]}, whatever the number of heads")
assert counts == [2 * 4 * 4**2 + (4 * 16 + 16 + 16 * 4 + 4) + 3 * 2 * 4] * 2 == [300, 300]

for position, rows_of_x in (0, [0]), (3, [0, 1, 2, 3]):
    only = np.zeros((1, 4, 6))
    only[0, position] = dy[0, position]
    _, ctx = mine.forward(x[:1], memory[:1], np.tri(4, dtype=bool), np.ones((4, 5), bool))
    dx, dmemory = mine.backward(ctx, only)
    rows = [np.flatnonzero(gradient[0].any(axis=-1)).tolist() for gradient in (dx, dmemory)]
    print(f"2. dy at {position}: rows {rows[0]} of dx, rows {rows[1]} of dmemory")
    assert rows == [rows_of_x, [0, 1, 2, 3, 4]]


class PostLN(MyDecoderLayer):
    def forward(self, x, memory, target_mask, memory_mask):
        s1, self_attention = self.attention("self_attention", x, x, target_mask)
        x1, norm1 = self.norm("norm1", x + s1)
        s2, cross_attention = self.attention("cross_attention", x1, memory, memory_mask)
        x2, norm2 = self.norm("norm2", x1 + s2)
        s3, feed_forward = self.feed_forward(x2)
        y, norm3 = self.norm("norm3", x2 + s3)
        return y, (norm1, self_attention, norm2, cross_attention, norm3, feed_forward)

    def backward(self, ctx, dy):
        norm1, self_attention, norm2, cross_attention, norm3, feed_forward = ctx
        dr3 = self.norm_backward("norm3", norm3, dy)
        dx2 = dr3 + self.feed_forward_backward(feed_forward, dr3)
        dr2 = self.norm_backward("norm2", norm2, dx2)
        dquery, dmemory = self.attention_backward("cross_attention", cross_attention, dr2)
        dr1 = self.norm_backward("norm1", norm1, dr2 + dquery)
        return dr1 + sum(self.attention_backward("self_attention", self_attention, dr1)), dmemory


post = DecoderLayer(norm="post", **sizes)
post.load_state_dict(layer.state_dict())
y, ctx = post.forward(x, memory, **masks)
mine = PostLN(layer.state_dict(), num_heads=3)
my_y, my_ctx = mine.forward(x, memory, **masks)
assert_allclose(my_y, y)
for my_gradient, gradient in zip(mine.backward(my_ctx, dy), post.backward(ctx, dy)):
    assert_allclose(my_gradient, gradient)
print("3. every norm moves behind its sum, and dr = norm backward goes both ways: see PostLN")
