"""How much memory a training step takes: against the length of texts, and against the vocabulary.

    python examples/benchmarks/memory.py

A decoder-only stack (float32, Pre-LN, GELU, width 64, 2 layers of 4 heads, batch 1) goes forward
and backward: once with the plain attention, which keeps the weights (h, T, T) of each layer, and
once with TiledAttention, which never has more than a tile of them. Then one attention layer alone,
of 4 heads of width 16, up to the lengths that only the tiled one can do; and the cross-entropy of
512 rows, forward and backward, the logits included, which is three arrays of their size.

The peaks are those of tracemalloc, which NumPy tells of each array, beyond what was there before
(weights and inputs, but for the logits). They hardly depend on the machine. The ratio is to the row
before: in the end twice the length takes twice the memory if tiled, and four times if not.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable

import numpy as np

from npdecoder import CrossEntropy, Decoder, ScaledDotProductAttention, TiledAttention, causal_mask

D_MODEL, HEADS, LAYERS = 64, 4, 2
LENGTHS = (256, 512, 1024, 2048, 4096)
LONGER = (8192, 16384)  # of one layer, tiled
VOCABULARIES = (1000, 10_000, 50_257)
ROWS = 512


def peak(step: Callable[[], object]) -> int:
    """The most bytes allocated at one time in step, beyond those before."""
    tracemalloc.start()
    step()
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def stack_peak(T: int, tiled: bool) -> int:
    """Of forward, loss and backward; the loss is half the sum of squares."""
    model = Decoder(LAYERS, D_MODEL, HEADS, cross_attention="none", activation="gelu", rng=0)
    mask = None if tiled else causal_mask(T)
    if tiled:
        for layer in model.layers:
            layer.self_attention.attention = TiledAttention(causal=True)
    x = np.random.default_rng(0).standard_normal((1, T, D_MODEL), dtype=np.float32)

    def step() -> float:
        y, ctx = model.forward(x, target_mask=mask)
        model.backward(ctx, y)
        return 0.5 * float(np.vdot(y, y))

    return peak(step)


def attention_peak(T: int, tiled: bool) -> int:
    attention = TiledAttention(causal=True) if tiled else ScaledDotProductAttention()
    shape = (1, HEADS, T, D_MODEL // HEADS)
    rng = np.random.default_rng(0)
    q, k, v, dy = (rng.standard_normal(shape, dtype=np.float32) for _ in range(4))
    mask = None if tiled else causal_mask(T)

    def step() -> object:
        _, ctx = attention.forward(q, k, v, mask)
        return attention.backward(ctx, dy)

    return peak(step)


def cross_entropy_peak(V: int) -> int:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((ROWS, V), dtype=np.float32)
    targets = rng.integers(0, V, ROWS)
    criterion = CrossEntropy()

    def step() -> object:
        _, ctx = criterion.forward(logits, targets)
        return criterion.backward(ctx)

    return logits.nbytes + peak(step)


def show(what: str, sizes: Iterable[int], peak_of: Callable[[int], int]) -> None:
    """A row for each size: megabytes, and the ratio to the row before."""
    before = None
    for size in sizes:
        found = peak_of(size)
        ratio = "" if before is None else f"{found / before:5.1f}"
        print(f"{what:36} {size:7,} {found / 1e6:9.1f} {ratio:>6}", flush=True)
        before = found


def main() -> None:
    print(f"{'peak of a step':36} {'T or V':>7} {'MB':>9} {'ratio':>6}")
    show("2 layers, plain attention", LENGTHS, lambda T: stack_peak(T, tiled=False))
    show("2 layers, tiled attention", LENGTHS, lambda T: stack_peak(T, tiled=True))
    show("one attention, plain", LENGTHS, lambda T: attention_peak(T, tiled=False))
    show("one attention, tiled", LENGTHS + LONGER, lambda T: attention_peak(T, tiled=True))
    show(f"cross-entropy of {ROWS} rows", VOCABULARIES, cross_entropy_peak)


if __name__ == "__main__":
    main()
