"""Exercise 7. Multi-head self-attention

The forward is given. Write the backward.

    x                (B, T, d_model)
    W_q, W_k         (d_model, h d_k)     parameters; h heads side by side
    W_v              (d_model, h d_v)     a parameter
    W_o              (h d_v, d_model)     a parameter: mixes what the heads have found
    Q, K             (B, h, T, d_k)
    V                (B, h, T, d_v)
    mask             (T, T)               True where a position may attend to another
    A                (B, h, T, T)         the weights of each head
    merged           (B, T, h d_v)
    y                (B, T, d_model)

backward(ctx, dy) is handed dy = dLoss/dy, shaped as y. It shall

    return dx = dLoss/dx, shaped as x;
    add to the .grad of self.W_q, self.W_k, self.W_v and self.W_o.

ctx is (x, Q, K, V, A, merged).

On paper first: undo the steps from 5 to 1. Steps 2 to 4 are exercise 6, with one more axis in
front. split and merge only move numbers about: the backward of each is the other. x is used three
times in step 1, so its gradient has three parts.

When you have it:  npdecoder exercise check 07_multi_head_attention.py
"""

import numpy as np

from npdecoder import Layer, Parameter, softmax


def split(x, h):
    """(B, T, h d) -> (B, h, T, d)"""
    B, T, width = x.shape
    return x.reshape(B, T, h, width // h).swapaxes(1, 2)


def merge(x):
    """(B, h, T, d) -> (B, T, h d)"""
    B, h, T, d = x.shape
    return x.swapaxes(1, 2).reshape(B, T, h * d)


class MultiHeadAttention(Layer):
    def __init__(self, d_model, num_heads, d_k, d_v, rng=0):
        rng = np.random.default_rng(rng)
        self.num_heads = h = num_heads
        self.W_q = Parameter(rng.normal(0.0, d_model**-0.5, (d_model, h * d_k)))
        self.W_k = Parameter(rng.normal(0.0, d_model**-0.5, (d_model, h * d_k)))
        self.W_v = Parameter(rng.normal(0.0, d_model**-0.5, (d_model, h * d_v)))
        self.W_o = Parameter(rng.normal(0.0, (h * d_v) ** -0.5, (h * d_v, d_model)))

    def forward(self, x, mask):
        # 1. queries, keys and values, head by head
        Q = split(x @ self.W_q.value, self.num_heads)
        K = split(x @ self.W_k.value, self.num_heads)
        V = split(x @ self.W_v.value, self.num_heads)
        # 2. the scores
        S = np.where(mask, Q @ K.swapaxes(-1, -2) / np.sqrt(Q.shape[-1]), -np.inf)
        # 3. the weights
        A = softmax(S)
        # 4. the weighted sums of the values, the heads side by side
        merged = merge(A @ V)
        # 5. mixed
        y = merged @ self.W_o.value
        return y, (x, Q, K, V, A, merged)

    def backward(self, ctx, dy):
        # x, Q, K, V, A, merged = ctx
        raise NotImplementedError("your turn")
