"""Exercise 6. Attention with one head: y = A v, A = softmax(q k^T / sqrt(d_k))

The forward is given. Write the backward.

    q     (B, T, d_k)    T queries
    k     (B, S, d_k)    S keys; S is not T in general
    v     (B, S, d_v)    their values; d_v is not d_k in general
    mask  (B, T, S)      True where a query may attend to a key
    A     (B, T, S)      the weights, every row with the sum 1
    y     (B, T, d_v)

backward(ctx, dy) is handed dy = dLoss/dy, shaped as y. It shall

    return dq, dk, dv, in this order, shaped as q, k, v. The mask has no gradient.

ctx is (q, k, v, A).

On paper first: undo the steps from 4 to 1. y = A v is a product of two matrices, as in exercise 1,
but here both have a gradient. Step 3 is exercise 2: take your own. Of step 2: what is A where the
mask is False, and what does that make of the gradient of S there? Beside each product write the
shapes; there is one way only to multiply so that they fit. Do not forget the 1/sqrt(d_k).

softmax is given: beside what you know it gives zeros to a query that may attend to nothing.
x.swapaxes(-1, -2) is the transpose of each matrix of a batch.

When you have it:  npdecoder exercise check 06_attention.py
"""

import numpy as np

from npdecoder import Layer, softmax


class Attention(Layer):
    def forward(self, q, k, v, mask):
        # 1. the score of each query with each key
        S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        # 2. minus infinity where a query may not attend
        S_masked = np.where(mask, S, -np.inf)
        # 3. the weights
        A = softmax(S_masked)
        # 4. the weighted sum of the values
        y = A @ v
        return y, (q, k, v, A)

    def backward(self, ctx, dy):
        # q, k, v, A = ctx
        raise NotImplementedError("your turn")
