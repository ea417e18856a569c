"""Exercise 8. Shared memory: all layers attend to one pair of keys and values

In an encoder-decoder, every layer of the decoder attends to the encoder's output, the memory. Here
the memory is projected to keys and values once, and all layers use this one pair:

    K = memory W_k,  V = memory W_v
    x <- x + softmax(x W_q K^T / sqrt(d_k)) V W_o        in each layer, with its own W_q and W_o

The forward is given. Write the backward.

    x       (B, T, d_model)
    memory  (B, S, d_model)
    mask    (B, 1, S)                      True where a position of the memory is no padding
    W_k     (d_model, d_k), one            K  (B, S, d_k)
    W_v     (d_model, d_v), one            V  (B, S, d_v)
    W_q     (d_model, d_k), a list         Q  (B, T, d_k) of each layer
    W_o     (d_v, d_model), a list         C  (B, T, d_v) of each layer
    y       (B, T, d_model)

backward(ctx, dy) is handed dy = dLoss/dy, shaped as y. It shall

    return dx, dmemory, in this order, shaped as x and memory;
    add to the .grad of self.W_k, self.W_v, and of every parameter in self.W_q and self.W_o.

ctx is (memory, K, V, layers), and layers is a list of (x, Q, A, C), one a layer, where x is what
went into that layer.

On paper first: draw it for two layers. How many arrows leave K? How many leave memory? And how many
leave the x of a layer? A gradient is a sum of as many parts. The layers are undone from the last to
the first; the projection of the memory is undone once, at the very end. Why not in each layer?

When you have it:  npdecoder exercise check 08_shared_memory.py
"""

import numpy as np

from npdecoder import Layer, Parameter, softmax


class SharedMemory(Layer):
    def __init__(self, num_layers, d_model, d_k, d_v, rng=0):
        rng = np.random.default_rng(rng)

        def matrix(d_in, d_out):
            return Parameter(rng.normal(0.0, d_in**-0.5, (d_in, d_out)))

        self.W_k = matrix(d_model, d_k)
        self.W_v = matrix(d_model, d_v)
        self.W_q = [matrix(d_model, d_k) for _ in range(num_layers)]
        self.W_o = [matrix(d_v, d_model) for _ in range(num_layers)]

    def forward(self, x, memory, mask):
        # 1. the memory's keys and values, once
        K = memory @ self.W_k.value
        V = memory @ self.W_v.value
        layers = []
        for W_q, W_o in zip(self.W_q, self.W_o):
            # 2. the weights
            Q = x @ W_q.value
            S = np.where(mask, Q @ K.swapaxes(-1, -2) / np.sqrt(Q.shape[-1]), -np.inf)
            A = softmax(S)
            # 3. the weighted sum of the values
            C = A @ V
            layers.append((x, Q, A, C))
            # 4. added to what goes past
            x = x + C @ W_o.value
        return x, (memory, K, V, layers)

    def backward(self, ctx, dy):
        # memory, K, V, layers = ctx
        raise NotImplementedError("your turn")
