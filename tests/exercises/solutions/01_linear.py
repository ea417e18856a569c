"""Exercise 1. Linear: y = x @ W + b

The forward is given. Write the backward.

    x  (B, T, d_in)     B sequences of T positions, d_in numbers at each
    W  (d_in, d_out)    a parameter
    b  (d_out,)         a parameter, the same at every position
    y  (B, T, d_out)

backward(ctx, dy) is handed dy = dLoss/dy, shaped as y. It shall

    return dx = dLoss/dx, shaped as x;
    add dLoss/dW to self.W.grad, and dLoss/db to self.b.grad. Add, with +=: others do so too.

On paper first: take B = 1, T = 2, d_in = 2, d_out = 1 and write both numbers of y in full. In which
of them does W[0, 0] stand, and what is it multiplied by? And b[0]? That is what their gradients
are sums of. The shapes then leave little choice of what to transpose.

When you have it:  npdecoder exercise check 01_linear.py
"""

import numpy as np

from npdecoder import Layer, Parameter


class Linear(Layer):
    def __init__(self, d_in, d_out, rng=0):
        rng = np.random.default_rng(rng)
        self.W = Parameter(rng.normal(0.0, d_in**-0.5, (d_in, d_out)))
        self.b = Parameter(np.zeros(d_out))

    def forward(self, x):
        # 1. every position times the same matrix
        xW = x @ self.W.value
        # 2. and the same bias
        y = xW + self.b.value
        return y, x  # the second is ctx: what backward will be handed

    def backward(self, ctx, dy):
        x = ctx
        # 2. y = xW + b
        self.b.grad += dy.sum(axis=(0, 1))
        # 1. xW = x @ W
        self.W.grad += x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
        return dy @ self.W.value.T
