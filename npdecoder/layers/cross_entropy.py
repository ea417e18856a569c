"""CrossEntropy: the mean over the targets of -log softmax(logits)[target]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from npdecoder.core import Array, Layer, as_array, as_ids, fraction, integer, rectangular_ids
from npdecoder.layers.softmax import log_softmax


class CrossEntropyContext(NamedTuple):
    log_p: Array  # (..., V)
    targets: NDArray[np.intp]  # (...), 0 where ignored
    counted: NDArray[np.bool_]  # (...), False where ignored
    count: int  # type: ignore[assignment]  # how many targets are counted


class CrossEntropy(Layer):
    """loss = -1/N sum_n log_p[n, target_n], log_p = log_softmax(logits), N the targets counted.

    ignore_index: a target of this id is left out of the sum and of N; it may be negative.
    label_smoothing e: the target distribution is (1 - e) onehot + e / V over all V classes (Szegedy
    et al. 2016, section 7): loss = -1/N sum_n [(1 - e) log_p[n, target_n] + e mean_v log_p[n, v]].

    With no target to count the loss is 0.0 and its gradient zero.
    """

    def __init__(self, ignore_index: int | None = None, label_smoothing: float = 0.0) -> None:
        self.ignore_index = None if ignore_index is None else integer("ignore_index", ignore_index)
        self.label_smoothing = fraction("label_smoothing", label_smoothing)

    def forward(self, logits: ArrayLike, targets: ArrayLike) -> tuple[float, CrossEntropyContext]:
        """logits (..., V), targets (...) of any integer dtype -> loss, a float summed in float64.

        ctx.count is N. A gradient over several batches is the same as over all at once with
        dloss = count / total for each.

        Errors: ValueError for shapes that do not fit; TypeError for targets that are not integers;
        IndexError for a target outside [0, V) that is not ignore_index.
        """
        logits = as_array("logits", logits)
        targets, counted = self._check_targets(logits, targets)
        count = int(np.count_nonzero(counted))
        e = self.label_smoothing

        # 1. log-probabilities
        log_p = log_softmax(logits)
        # 2. of the target, mixed with the mean over all classes
        log_p_target = np.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
        mixed = log_p_target
        if e > 0.0:
            mixed = (1.0 - e) * log_p_target + e * log_p.mean(axis=-1)
        # 3. the mean over the targets counted
        wide = np.promote_types(logits.dtype, np.float64)
        loss = -mixed[counted].sum(dtype=wide) / max(count, 1)
        return loss + 0.0, CrossEntropyContext(log_p, targets, counted, count)

    def count(self, targets: ArrayLike) -> int:
        """How many of the targets the loss is the mean of: all but those of ignore_index."""
        array = np.asarray(targets)
        if self.ignore_index is None:
            return array.size
        return int(np.count_nonzero(array != self.ignore_index))

    def backward(self, ctx: CrossEntropyContext, dloss: float = 1.0) -> Array:
        """dloss, a number -> dlogits (..., V); integer targets have no gradient.

        Derivation, for one target t, L = -(1 - e) log_p_t - e/V sum_v log_p_v:
            3. each of the N counted targets has 1/N of the loss, an ignored one nothing
            2. ∂L/∂log_p_v = -(1 - e) 1[v = t] - e/V,  which sums to -1 over v
            1. log_p_v = x_v - log sum_j exp(x_j):  ∂log_p_v/∂x_j = 1[v = j] - p_j, so
               ∂L/∂x_j = sum_v ∂L/∂log_p_v (1[v = j] - p_j) = p_j - (1 - e) 1[j = t] - e/V
        In NumPy:
            onehot = targets[..., None] == np.arange(log_p.shape[-1])
            p, e = np.exp(log_p), label_smoothing
            dlogits = dloss / max(count, 1) * (p - (1 - e) * onehot - e / log_p.shape[-1])
            dlogits = np.where(counted[..., None], dlogits, 0.0)
        """
        if np.ndim(dloss) != 0:
            raise ValueError(f"dloss has shape {np.shape(dloss)}, expected a number")
        if np.asarray(dloss).dtype.kind not in "iuf":
            raise TypeError(f"dloss is {dloss!r}, expected a number")
        log_p, targets, counted, count = ctx
        V = log_p.shape[-1]
        e = self.label_smoothing

        # 3., 2. and 1.: p - (1 - e) onehot - e/V, in one array
        with np.errstate(under="ignore"):
            dlogits = np.exp(log_p, order="C")  # so that rows is a view, whatever log_p's layout
        rows = dlogits.reshape(-1, V)
        rows[np.arange(len(rows)), targets.reshape(-1)] -= 1.0 - e
        if e > 0.0:
            dlogits -= e / V
        dlogits *= log_p.dtype.type(dloss) / log_p.dtype.type(max(count, 1))
        dlogits[~counted] = 0.0
        return dlogits

    def _check_targets(
        self, logits: Array, targets: ArrayLike
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        raw = rectangular_ids("targets", targets)
        if logits.ndim < 1 or logits.shape[-1] == 0 or raw.shape != logits.shape[:-1]:
            raise ValueError(
                f"logits {logits.shape} and targets {raw.shape}: expected (..., V) and (...), V > 0"
            )
        counted = np.ones(raw.shape, np.bool_)
        if self.ignore_index is not None and raw.dtype.kind in "iu":
            counted = raw != self.ignore_index
            raw = np.where(counted, raw, raw.dtype.type(0))
        return as_ids("targets", raw, logits.shape[-1]), counted
