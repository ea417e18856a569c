"""Masks of attention: boolean, True = may attend, broadcast to the scores (B, h, T, S).

A float mask is added to the scores (0 and -inf, or a bias). An integer mask is refused: of 0 and 1
nobody can tell which means "may attend".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from npdecoder.core import Array, as_array, as_ids, integer, rectangular

BoolArray = NDArray[np.bool_]


def causal_mask(T: int, S: int | None = None) -> BoolArray:
    """(T, S): query t may attend to the keys up to its own position (Vaswani et al. 2017, 3.2.3).

    S is T by default. Where S differs, the last query is aligned with the last key (the bottom
    right corner), as it must be when the first S - T keys were computed before: query t sees the
    keys s <= t + S - T. With S < T the first T - S queries see nothing.
    """
    T = integer("T", T, 0)
    S = T if S is None else integer("S", S, 0)
    return np.tri(T, S, k=S - T, dtype=np.bool_)


def padding_mask(ids: ArrayLike, pad_id: int | None) -> BoolArray:
    """(B, 1, 1, S) from ids (B, S): no query may attend to a key that is padding.

    pad_id None: there is no padding. Errors: TypeError for ids that are not integers.
    """
    ids = _batch_of_ids(ids)
    real = np.ones(ids.shape, np.bool_)
    if pad_id is not None:
        real = ids != integer("pad_id", pad_id)
    return real[:, None, None, :]


def target_mask(ids: ArrayLike, pad_id: int | None) -> BoolArray:
    """(B, 1, T, T) from ids (B, T): the causal mask and the padding mask together."""
    keep = padding_mask(ids, pad_id)
    return keep & causal_mask(keep.shape[-1])


def combine_masks(first: Array | None, second: Array | None) -> Array | None:
    """The mask that allows what both allow: booleans are and-ed, float masks add up."""
    if first is None or second is None:
        return second if first is None else first
    if first.dtype.kind == "b" and second.dtype.kind == "b":
        return first & second
    return _as_bias(first) + _as_bias(second)


def as_mask(name: str, mask: ArrayLike | None, scores_shape: tuple[int, ...]) -> Array | None:
    """The mask as a boolean or float array that broadcasts to scores (..., T, S).

    It has 2 dimensions (T, S) or as many as the scores; others would be ambiguous: (B, T, S) would
    be taken for heads where B = h.

    Errors: TypeError for a mask of integers; ValueError for one that does not fit.
    """
    if mask is None:
        return None
    array = rectangular(name, mask)
    if array.dtype.kind == "b" and array.shape == scores_shape[-2:]:
        return array  # nearly always
    if array.dtype.kind in "iu":
        raise TypeError(
            f"{name} has dtype {array.dtype}, expected bool (True = may attend) or float (added to "
            f"the scores): convert with mask.astype(bool), or mask == 0 if 1 means blocked"
        )
    if array.dtype.kind not in "bf":
        raise TypeError(f"{name} has dtype {array.dtype}, expected bool or float")
    if array.dtype.kind != "b":
        array = as_array(name, array, np.promote_types(array.dtype, np.float32))
    if array.ndim not in (2, len(scores_shape)) or any(
        m not in (1, n) for m, n in zip(array.shape[::-1], scores_shape[::-1])
    ):
        four = f" or {len(scores_shape)} that broadcast to {scores_shape}" * (len(scores_shape) > 2)
        raise ValueError(
            f"{name} has shape {array.shape}, expected 2 dimensions {scores_shape[-2:]}{four}"
        )
    return array


def _batch_of_ids(ids: ArrayLike) -> NDArray[np.intp]:
    array = as_ids("ids", ids, np.iinfo(np.intp).max)
    if array.ndim != 2:
        raise ValueError(f"ids has shape {array.shape}, expected (B, T)")
    return array


def _as_bias(mask: Array) -> Array:
    if mask.dtype.kind != "b":
        return mask
    return np.where(mask, np.float32(0), np.float32(-np.inf))
