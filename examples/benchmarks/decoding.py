"""How much the cache of keys and values saves in decoding, and what a step costs as texts grow.

    python examples/benchmarks/decoding.py

A decoder-only model (float32, Pre-LN, GELU) of width 128 with 4 layers and 4 heads generates 256
tokens greedily, with the cache (greedy_decode) and without it (a full forward pass a token). Then
single steps are timed at positions 8 to 512. Medians; absolute times depend on the machine, the
ratios hardly do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from npdecoder import DecodingState, LanguageModel, LanguageModelConfig, greedy_decode

CONFIG = LanguageModelConfig(
    1000, d_model=128, num_heads=4, num_layers=4, activation="gelu", max_len=600
)
NEW_TOKENS = 256
POSITIONS = (8, 32, 128, 256, 512)


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def without_cache(model: LanguageModel, prompts: np.ndarray) -> None:
    ids = prompts
    for _ in range(NEW_TOKENS):
        ids = np.concatenate([ids, model(ids)[:, -1:].argmax(axis=-1)], axis=1)


def step_times(model: LanguageModel, batch_size: int, rounds: int = 7) -> dict[int, float]:
    """The median time of a step at each position, from 15 steps around it in each round."""
    times: dict[int, list[float]] = {position: [] for position in POSITIONS}
    ids = np.ones((batch_size, max(POSITIONS)), np.intp)
    for _ in range(rounds):
        for position in POSITIONS:
            state = DecodingState(model)
            state.prompt(ids[:, : position - 7])
            times[position].append(seconds(lambda state=state: state.extend(ids[:, :1]), 15))
    return {position: statistics.median(found) for position, found in times.items()}


def main() -> None:
    model = LanguageModel(CONFIG)
    print(f"{model.num_parameters():,} parameters, {NEW_TOKENS} new tokens\n")
    print("batch  tokens/s with cache  without  ratio")
    for batch_size in (1, 16):
        prompts = np.ones((batch_size, 1), np.intp)
        run = seconds(lambda p=prompts: greedy_decode(model, p, max_new_tokens=NEW_TOKENS), 3)
        full = seconds(lambda p=prompts: without_cache(model, p), 1)
        tokens = batch_size * NEW_TOKENS
        print(f"{batch_size:5}  {tokens / run:19,.0f}  {tokens / full:7,.0f}  {full / run:5.1f}")
    print("\nmilliseconds a step at position (and the ratio to the first)")
    print("batch" + "".join(f"{position:15}" for position in POSITIONS))
    for batch_size in (1, 16):
        times = step_times(model, batch_size)
        first = times[POSITIONS[0]]
        cells = [f"{1000 * t:8.2f} ({t / first:4.2f})" for t in times.values()]
        print(f"{batch_size:5}" + "".join(f"{cell:>15}" for cell in cells))


if __name__ == "__main__":
    main()
