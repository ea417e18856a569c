"""What a stack of decoder layers remembers of the positions it has read, for decoding.

A causal layer's keys and values of a position depend on that position and those before it: what
comes later changes nothing. So they are kept, and each new position is projected alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from npdecoder.core import Array

Rows = NDArray[np.intp]


class KeyValueCache:
    """The keys K (B, h, S, d_k) and values V (B, h, S, d_v) of one layer's S positions so far."""

    def __init__(self) -> None:
        self.length = 0
        self._K: Array | None = None  # (B, h, capacity, d_k), filled up to length
        self._V: Array | None = None

    def append(self, K: Array, V: Array) -> tuple[Array, Array]:
        """K (B, h, T, d_k), V (B, h, T, d_v) of T new positions -> those of all S + T, as views.

        Errors: ValueError for another number of items than before.
        """
        if self._K is not None and len(self._K) != len(K):
            raise ValueError(f"a batch of {len(K)} items, but the cache holds {len(self._K)}")
        end = self.length + K.shape[2]
        self._K, self._V = self._with_room(self._K, K, end), self._with_room(self._V, V, end)
        self._K[:, :, self.length : end] = K
        self._V[:, :, self.length : end] = V
        self.length = end
        return self._K[:, :, :end], self._V[:, :, :end]

    def select(self, rows: Rows) -> None:
        """Item i becomes a copy of what was item rows[i]."""
        if self._K is not None and self._V is not None:
            self._K, self._V = self._K[rows], self._V[rows]

    def _with_room(self, old: Array | None, new: Array, end: int) -> Array:
        """The array old if it has room for `end` positions, else a copy that has twice the room."""
        if old is not None and old.shape[2] >= end:
            return old
        B, h, _, d = new.shape
        # doubling: n positions are copied fewer than 2 n times in all, however they came
        room = np.empty((B, h, max(2 * self.length, end), d), new.dtype)
        if old is not None:
            room[:, :, : self.length] = old[:, :, : self.length]
        return room


class DecoderState:
    """A Decoder's caches, one a layer, and its memory's keys and values, one pair a layer.

    memory: None for a layer without cross-attention; one and the same pair (K, V) for all layers
    if they share it.
    """

    def __init__(self, memory: Sequence[tuple[Array, Array] | None]) -> None:
        self.memory = list(memory)
        self.caches = [KeyValueCache() for _ in self.memory]

    @property
    def length(self) -> int:
        """How many positions have been read.

        Errors: ValueError if a call was interrupted between two layers, which no longer agree.
        """
        lengths = {cache.length for cache in self.caches}
        if len(lengths) > 1:
            raise ValueError("the state was left half extended by an error: make a new one")
        return lengths.pop()

    def select(self, rows: Rows, memory: bool = True) -> None:
        """Item i becomes a copy of what was item rows[i]: to drop, repeat or reorder items.

        memory: whether the memory's keys and values move too (not, where they would be the same).
        """
        for cache in self.caches:
            cache.select(rows)
        if not memory:
            return
        chosen: dict[int, tuple[Array, Array]] = {}  # a shared pair is copied once
        for i, pair in enumerate(self.memory):
            if pair is not None:
                if id(pair) not in chosen:
                    chosen[id(pair)] = pair[0][rows], pair[1][rows]
                self.memory[i] = chosen[id(pair)]
