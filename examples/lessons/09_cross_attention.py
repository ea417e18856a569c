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
# # Lesson 9. Cross-attention, and two ways to get its keys and values
#
# **You need to know:** lessons 5 (`05_residual_path.py`) and 8 (`08_heads.py`).
#
# **You will be able to:** send a gradient from the decoder to the encoder, add it up over the
# layers of a stack, and do the same where all layers share one projection of the memory.
#
# **Time:** about 60 minutes with the exercises on paper.
#
# The code is in `npdecoder/blocks/multi_head_attention.py` (project, attend) and
# `npdecoder/blocks/decoder.py`.

# %%
from functools import partial

import numpy as np

from npdecoder import (
    Decoder,
    Layer,
    MemoryAttention,
    MemoryProjection,
    MultiHeadAttention,
    Parameter,
    causal_mask,
    gradcheck,
)
from npdecoder.blocks.multi_head_attention import merge_heads, split_heads

assert_allclose = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)
B, T, S, d, h, num_layers = 4, 5, 7, 6, 2, 2  # T targets, S sources
F64 = {"dtype": np.float64}


# %% [markdown]
# ## The decoder asks, the encoder answers
#
# In cross-attention the queries come from the decoder's x (B, T, d), keys and values from the
# encoder's output, the **memory** (B, S, d). For one layer:
#
#     project:   K = split(memory W_k)      V = split(memory W_v)
#     attend:    s = merge(attention(split(x W_q), K, V)) W_o
#
# and on the residual path y = x + s. Attend's backward gives dQ, dK and dV (lesson 6). dQ goes home
# to the decoder, dK and dV go to the encoder. The memory was used twice, as keys and as values:
#
#     dx      = dy + merge(dQ) W_q^T
#     dmemory = merge(dK) W_k^T + merge(dV) W_v^T
#
# In the stack below there are two such layers, each with its own W_k and W_v, as in the original
# Transformer: **per layer**. All of them read the same memory, so its gradient is a sum again:
#
#     dmemory = sum over layers of dmemory_layer

# %%
class PerLayer(Layer):
    def __init__(self, rng):
        self.layers = [MultiHeadAttention(d, h, rng=rng, **F64) for _ in range(num_layers)]

    def forward(self, x, memory):
        contexts = []
        for attention in self.layers:
            s, ctx = attention.forward(x, memory, memory)
            x = x + s
            contexts.append(ctx)
        return x, contexts

    def backward(self, contexts, dy):
        dx, dmemory = dy, 0.0
        for attention, ctx in zip(reversed(self.layers), reversed(contexts)):
            dquery, dkey, dvalue = attention.backward(ctx, dx)
            dx = dx + dquery
            dmemory = dmemory + dkey + dvalue
        return dx, dmemory


rng = np.random.default_rng(0)
x, memory, dy = (rng.standard_normal(shape) for shape in [(B, T, d), (B, S, d), (B, T, d)])
per_layer = PerLayer(rng)
report = gradcheck(per_layer, x, memory)
print(report)
assert report.ok

# one layer by the formulas above
attention = per_layer.layers[0]
W_q, W_k, W_v, W_o = (
    linear.W.value for linear in (attention.W_q, attention.W_k, attention.W_v, attention.W_o)
)
s, ctx = attention.forward(x, memory, memory)
Q, K, V = split_heads(x @ W_q, h), split_heads(memory @ W_k, h), split_heads(memory @ W_v, h)
context, inner = attention.attention.forward(Q, K, V)
assert_allclose(merge_heads(context) @ W_o, s)

dQ, dK, dV = attention.attention.backward(inner, split_heads(dy @ W_o.T, h))
dquery, dkey, dvalue = attention.backward(ctx, dy)
assert_allclose(merge_heads(dQ) @ W_q.T, dquery)
assert_allclose(merge_heads(dK) @ W_k.T + merge_heads(dV) @ W_v.T, dkey + dvalue)


# %% [markdown]
# ## Shared keys and values
#
# There is another way: project the memory **once**, and let every layer attend to the same K and V.
# A layer then owns only W_q and W_o. It saves weights (exercise 2), and when translating it saves
# the projections of all layers but one.
#
# Back: every layer returns a dK and a dV. K and V were used by all layers, so
#
#     dK = sum over layers of dK_layer            dV = sum over layers of dV_layer
#
# and these go through the one projection, once:
#
#     dmemory = merge(dK) W_k^T + merge(dV) W_v^T
#     dW_k    = memory^T merge(dK)                dW_v = memory^T merge(dV)

# %%
def rows_product(x, dy):
    """x^T dy over all rows of all sentences."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


class Shared(Layer):
    def __init__(self, W_k, W_v, rng):
        self.W_k, self.W_v = Parameter(W_k), Parameter(W_v)
        self.layers = [MemoryAttention(d, h, rng=rng, **F64) for _ in range(num_layers)]

    def forward(self, x, memory):
        K = split_heads(memory @ self.W_k.value, h)
        V = split_heads(memory @ self.W_v.value, h)
        contexts = []
        for attention in self.layers:
            s, ctx = attention.forward(x, K, V)
            x = x + s
            contexts.append(ctx)
        return x, (memory, contexts)

    def attend_backward(self, contexts, dy):
        """dx, and dK and dV of every layer."""
        dx, of_layers = dy, []
        for attention, ctx in zip(reversed(self.layers), reversed(contexts)):
            dquery, dK, dV = attention.backward(ctx, dx)
            dx = dx + dquery
            of_layers.append((dK, dV))
        return dx, of_layers

    def backward(self, ctx, dy):
        memory, contexts = ctx
        dx, of_layers = self.attend_backward(contexts, dy)
        dK = sum(dK for dK, _ in of_layers)
        dV = sum(dV for _, dV in of_layers)
        self.W_k.grad += rows_product(memory, merge_heads(dK))
        self.W_v.grad += rows_product(memory, merge_heads(dV))
        dmemory = merge_heads(dK) @ self.W_k.value.T + merge_heads(dV) @ self.W_v.value.T
        return dx, dmemory


projection = MemoryProjection(d, h, rng=rng, **F64)
shared = Shared(projection.W_k.W.value, projection.W_v.W.value, rng)
report = gradcheck(shared, x, memory)
print(report)
assert report.ok

# %% [markdown]
# Is going back once the same as going back for every layer and adding up? Yes: the projection's
# backward is linear in (dK, dV). It multiplies by matrices and adds, and a sum may be taken before
# a product or after it. Below npdecoder's `MemoryProjection` does it for every layer.

# %%
y, ctx = shared.forward(x, memory)
dx, dmemory = shared.backward(ctx, dy)
(K, V), project_ctx = projection.forward(memory)
assert_allclose(K, split_heads(memory @ shared.W_k.value, h))
assert_allclose(V, split_heads(memory @ shared.W_v.value, h))

one_by_one = 0.0
for dK_dV in shared.attend_backward(ctx[1], dy)[1]:
    one_by_one = one_by_one + projection.backward(project_ctx, dK_dV)
assert_allclose(one_by_one, dmemory)
assert_allclose(projection.W_k.W.grad, shared.W_k.grad)
assert_allclose(projection.W_v.W.grad, shared.W_v.grad)

# %% [markdown]
# ## In the whole decoder
#
# `npdecoder.Decoder` has both ways as an option. Here its backward is done by hand, layer by layer:
# a layer of `cross_attention="shared"` takes the pair (K, V) as its memory and returns dx, dK, dV.

# %%
decoder = Decoder(num_layers, d, h, 11, cross_attention="shared", rng=rng, **F64)
mask = causal_mask(T)
y, ctx = decoder.forward(x, memory, mask)
dx, dmemory = decoder.backward(ctx, dy)
gradients = {name: parameter.grad.copy() for name, parameter in decoder.named_parameters()}

decoder.zero_grad()
hand_dx, dK, dV = decoder.norm.backward(ctx.norm, dy), 0.0, 0.0
for layer, layer_ctx in zip(reversed(decoder.layers), reversed(ctx.layers)):
    hand_dx, dK_layer, dV_layer = layer.backward(layer_ctx, hand_dx)
    dK, dV = dK + dK_layer, dV + dV_layer
hand_dmemory = decoder.memory_projection.backward(ctx.project, (dK, dV))
assert_allclose(hand_dx, dx)
assert_allclose(hand_dmemory, dmemory)
for name, parameter in decoder.named_parameters():
    assert_allclose(parameter.grad, gradients[name])
assert gradcheck(decoder, x, memory, target_mask=mask, mode="directional").ok

# %% [markdown]
# ## To do on paper
#
# 1. d = 1, one head, one memory token m = 3, and w_k = 2, w_v = 5 shared by two layers. The layers
#    return dV = 1 and dV = 4. What are their dK, without any computing? Find dmemory and dw_v.
#    And dmemory if it were per layer, with w_v = 5 in the first and 7 in the second?
# 2. d_model = 768, 12 layers, d_k = d_v = d_model / h, no biases. How many weights do all W_k and
#    W_v of the cross-attentions have, per layer and shared?
# 3. A backward returns (dmemory, dx) instead of (dx, dmemory). When is that seen by shapes alone?
#    What sees it always?

# %%
small = MemoryProjection(1, 1, **F64)
small.W_k.W.value, small.W_v.W.value = [[2.0]], [[5.0]]
(K, V), project_ctx = small.forward([[[3.0]]])
one = MemoryAttention(1, 1, rng=0, **F64)
_, dK, _ = one.backward(one.forward([[[0.7]]], K, V)[1], [[[1.0]]])
dV = np.array([[[[1.0 + 4.0]]]])
dmemory, dw_v = small.backward(project_ctx, (dK, dV)), small.W_v.W.grad
print("1. dK", dK.ravel(), "(the weight of a single key is always 1), dmemory", dmemory.ravel(),
      "dw_v", dw_v.ravel(), "and per layer dmemory = 1 * 5 + 4 * 7 = 33")
assert_allclose(dK, 0.0)
assert_allclose(dmemory, (1 + 4) * 5)
assert_allclose(dw_v, 3 * (1 + 4))
first = small.backward(project_ctx, (dK, np.array([[[[1.0]]]])))
small.W_v.W.value = [[7.0]]
assert_allclose(first + small.backward(project_ctx, (dK, np.array([[[[4.0]]]]))), 33.0)

count = MemoryProjection(768, 12, rng=0).num_parameters()
per_layer, shared = 12 * count, count
print(f"2. {per_layer:,} per layer, {shared:,} shared")
assert per_layer == 14_155_776
assert shared == 2 * 768**2 == 1_179_648


class Swapped(PerLayer):
    def backward(self, contexts, dy):
        dx, dmemory = super().backward(contexts, dy)
        return dmemory, dx


swapped, square = Swapped(rng), memory[:, :T]
got, _ = swapped.backward(swapped.forward(x, memory)[1], dy)
print(f"3. T = {T}, S = {S}: a gradient {got.shape} for x {x.shape}; at T = S only by numbers")
assert got.shape != x.shape
assert swapped.backward(swapped.forward(x, square)[1], dy)[0].shape == x.shape
assert not gradcheck(swapped, x, square, mode="directional").ok
