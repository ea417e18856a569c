"""Exercise 9. Tied embeddings: one table W reads the words and scores them

    x = sqrt(d) W[ids],  h = tanh(x U),  logits = h W^T

The forward is given. Write the backward.

    ids     (B, T)       integers from 0 to V - 1; a word may come several times, or never
    W       (V, d)       a parameter, in two places: its rows are the words
    U       (d, d)       a parameter
    x, h    (B, T, d)
    logits  (B, T, V)

backward(ctx, dy) is handed dy = dLoss/dlogits, shaped as logits. It shall

    return (), the empty tuple: ids are integers and have no gradient;
    add to self.W.grad, for both places, and to self.U.grad.

ctx is (ids, x, h).

On paper first: V = 3, ids = [[1, 1]]. Which rows of W does the look-up touch, and how often? Which
does the product with W^T touch? So which rows of W have a gradient? Beware of W.grad[ids] += ...:
NumPy reads all of the left side first, so that of several additions to one row a single one
remains. np.add.at(W.grad, ids, rows) adds them all.

When you have it:  npdecoder exercise check 09_tied_embeddings.py
"""

import numpy as np

from npdecoder import Layer, Parameter


class TiedEmbeddings(Layer):
    def __init__(self, vocab_size, d, rng=0):
        rng = np.random.default_rng(rng)
        self.W = Parameter(rng.normal(0.0, d**-0.5, (vocab_size, d)))
        self.U = Parameter(rng.normal(0.0, d**-0.5, (d, d)))

    def forward(self, ids):
        # 1. look up
        rows = self.W.value[ids]
        # 2. scale
        x = np.sqrt(rows.shape[-1]) * rows
        # 3. something in between, in place of a whole model
        h = np.tanh(x @ self.U.value)
        # 4. the score of every word: its row of W times h
        logits = h @ self.W.value.T
        return logits, (ids, x, h)

    def backward(self, ctx, dy):
        # ids, x, h = ctx
        raise NotImplementedError("your turn")
