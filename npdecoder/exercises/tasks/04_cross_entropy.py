"""Exercise 4. Cross-entropy: the mean over the targets of -log softmax(logits)[target]

The forward is given. Write the backward.

    logits   (B, T, V)    a score for each of V words, at each position
    targets  (B, T)       the word that is right; a target of ignore_index does not count
    loss     a number:    -1/N sum of log_p[b, t, target], over the N targets that count

backward(ctx, dloss) is handed dloss, a number (1 if the loss is the end of all). It shall

    return dlogits, shaped as logits. The targets are integers and have no gradient.

ctx is (log_p, chosen, counted, N): the logarithms of the probabilities (B, T, V); the targets
(B, T), with 0 in place of ignore_index; True where a target counts (B, T); and how many do.

On paper first: one position, V = 3, target 0. loss = log(e^x0 + e^x1 + e^x2) - x0. Three
derivatives: what do the last two have in common, and what does the first have besides? Then: what
is the gradient of a position whose target is ignored, and which number is everything divided by?

When you have it:  npdecoder exercise check 04_cross_entropy.py
"""

import numpy as np

from npdecoder import Layer


class CrossEntropy(Layer):
    def __init__(self, ignore_index):
        self.ignore_index = ignore_index

    def forward(self, logits, targets):
        # 1. log-probabilities
        below = logits - logits.max(axis=-1, keepdims=True)
        log_p = below - np.log(np.exp(below).sum(axis=-1, keepdims=True))
        # 2. that of the right word at each position
        counted = targets != self.ignore_index
        chosen = np.where(counted, targets, 0)
        log_p_chosen = np.take_along_axis(log_p, chosen[..., None], axis=-1)[..., 0]
        # 3. the mean over those that count
        N = counted.sum()
        loss = -log_p_chosen[counted].sum() / N
        return loss, (log_p, chosen, counted, N)

    def backward(self, ctx, dloss):
        # log_p, chosen, counted, N = ctx
        raise NotImplementedError("your turn")
