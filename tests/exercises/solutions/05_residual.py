"""Exercise 5. The residual path: two sublayers, each added to what goes past it

    x1 = x  + tanh(x  @ W1)
    y  = x1 + tanh(x1 @ W2)

The forward is given. Write the backward.

    x, x1, y  (B, T, d)
    W1, W2    (d, d)       parameters

backward(ctx, dy) is handed dy = dLoss/dy, shaped as y. It shall

    return dx = dLoss/dx, shaped as x;
    add dLoss/dW1 to self.W1.grad, and dLoss/dW2 to self.W2.grad.

ctx is (x, s1, x1, s2).

On paper first: draw the forward as a graph with an arrow for every use of a value. From x two
arrows leave, and from x1 two. Where a value goes two ways, its gradient is the sum of what comes
back along both. Which gradient does the first sublayer get, dy or another? (The derivative of
tanh(a) is 1 - tanh(a)^2, and tanh(a) is what forward has called s1 and s2.)

When you have it:  npdecoder exercise check 05_residual.py
"""

import numpy as np

from npdecoder import Layer, Parameter


class Residual(Layer):
    def __init__(self, d, rng=0):
        rng = np.random.default_rng(rng)
        self.W1 = Parameter(rng.normal(0.0, d**-0.5, (d, d)))
        self.W2 = Parameter(rng.normal(0.0, d**-0.5, (d, d)))

    def forward(self, x):
        # 1. the first sublayer
        s1 = np.tanh(x @ self.W1.value)
        # 2. and the path past it
        x1 = x + s1
        # 3. the second
        s2 = np.tanh(x1 @ self.W2.value)
        # 4. and the path past that
        y = x1 + s2
        return y, (x, s1, x1, s2)

    def backward(self, ctx, dy):
        x, s1, x1, s2 = ctx
        d = x.shape[-1]
        # 4. y = x1 + s2, and 3. s2 = tanh(x1 @ W2)
        da2 = dy * (1 - s2 * s2)
        self.W2.grad += x1.reshape(-1, d).T @ da2.reshape(-1, d)
        dx1 = dy + da2 @ self.W2.value.T
        # 2. x1 = x + s1, and 1. s1 = tanh(x @ W1)
        da1 = dx1 * (1 - s1 * s1)
        self.W1.grad += x.reshape(-1, d).T @ da1.reshape(-1, d)
        return dx1 + da1 @ self.W1.value.T
