"""Exercise 3. LayerNorm: y = gamma * x_hat + beta, x_hat = (x - mean(x)) / sqrt(var(x) + eps)

The forward is given. Write the backward.

    x      (B, T, d)    mean and variance are those of a row, the d numbers of one position
    gamma  (d,)         a parameter
    beta   (d,)         a parameter
    y      (B, T, d)

backward(ctx, dy) is handed dy = dLoss/dy, shaped as y. It shall

    return dx = dLoss/dx, shaped as x;
    add dLoss/dgamma to self.gamma.grad, and dLoss/dbeta to self.beta.grad.

ctx is (x_hat, rstd).

On paper first: undo the four steps of forward from the last to the first. x goes into x_hat by
three ways, straight, through the mean and through rstd, so that dx is a sum of three terms. Two of
them are means over the row. Ask of each mean: of dy, or of the gradient of x_hat? These are the
same only while gamma is 1, as it is in a new layer: so never test with a new layer alone.

When you have it:  npdecoder exercise check 03_layer_norm.py
"""

import numpy as np

from npdecoder import Layer, Parameter


class LayerNorm(Layer):
    def __init__(self, d, eps=1e-5):
        self.eps = eps
        self.gamma = Parameter(np.ones(d))
        self.beta = Parameter(np.zeros(d))

    def forward(self, x):
        # 1. centre
        xc = x - x.mean(axis=-1, keepdims=True)
        # 2. one over the standard deviation
        var = (xc * xc).mean(axis=-1, keepdims=True)
        rstd = 1.0 / np.sqrt(var + self.eps)
        # 3. normalise
        x_hat = xc * rstd
        # 4. scale and shift
        y = self.gamma.value * x_hat + self.beta.value
        return y, (x_hat, rstd)

    def backward(self, ctx, dy):
        x_hat, rstd = ctx
        # 4. y = gamma * x_hat + beta
        self.beta.grad += dy.sum(axis=(0, 1))
        self.gamma.grad += (dy * x_hat).sum(axis=(0, 1))
        dx_hat = dy * self.gamma.value
        # 3. x_hat = xc * rstd, and 2. rstd = 1 / sqrt(mean(xc * xc) + eps)
        dxc = rstd * (dx_hat - x_hat * (dx_hat * x_hat).mean(axis=-1, keepdims=True))
        # 1. xc = x - mean(x)
        return dxc - dxc.mean(axis=-1, keepdims=True)
