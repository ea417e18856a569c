"""One training step against PyTorch, from teaching sizes to width 512, and nanoGPT's CPU recipe.

    pip install '.[bench]'
    python examples/benchmarks/training_step.py [--rows 1 2 ...] [--rounds N]
    python examples/benchmarks/training_step.py --products

A step is forward, backward (to every parameter, to x and to memory) and SGD, of a decoder stack
(float32, Pre-LN, ReLU, biases, cross-attention in each layer, causal mask, no dropout, final norm)
with the same weights in both: here Decoder, there torch.nn.TransformerDecoder, eager. The last row
is a whole update of a language model: loss, clipping and AdamW too.

Both are given two cores, in turns: 0.1 s of one, 0.1 s of the other. Between turns there is a
pause, in which the threads of the other go to sleep (they wait by spinning, and would take the
cores), and the first two steps of a turn are not counted. The ratio (below 1: faster than PyTorch)
is the median of those of neighbouring turns, since the speed of a shared machine drifts. The share
of the peak is the arithmetic of the matrix products of a step a second, against that of large
products alone.

--products compares the products themselves, by NumPy's BLAS and by PyTorch's: what half a batch
meets in a feed-forward layer, on one core, again and again, so that all of it is in the cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from npdecoder import (
    SGD,
    AdamW,
    CrossEntropy,
    Decoder,
    LanguageModel,
    LanguageModelConfig,
    causal_mask,
    decay_groups,
    torch_state_dict,
)
from npdecoder.replicas import Replicas, choose_threads, forward_backward
from npdecoder.text import Batch
from npdecoder.training import train_step

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

THREADS = 2
Step = Callable[[], object]


class Row(NamedTuple):
    layers: int
    d_model: int
    heads: int
    d_ff: int
    B: int
    T: int
    to_reach: float
    aim: float

    def __str__(self) -> str:
        return (f"{self.layers:6} {self.d_model:7} {self.heads:5} {self.d_ff:4} {self.B:2} "
                f"{self.T:3}")


LADDER = (
    Row(1, 4, 2, 16, 1, 3, 0.25, 0.20),
    Row(2, 32, 4, 128, 8, 16, 0.48, 0.40),
    Row(2, 64, 4, 256, 16, 32, 0.95, 0.80),
    Row(2, 128, 8, 512, 16, 64, 0.97, 0.80),
    Row(2, 256, 8, 1024, 16, 64, 1.03, 0.90),
    Row(2, 512, 8, 2048, 8, 64, 1.12, 1.00),
    Row(2, 512, 8, 2048, 4, 256, 1.12, 1.00),
)
RECIPE = LanguageModelConfig(
    65, d_model=128, num_heads=4, num_layers=4, norm_bias=False, feed_forward_bias=False,
    activation="gelu", positions="learned", max_len=64, tie_embeddings="target_output",
    output_bias=False, scale_embeddings=False,
)  # fmt: skip
RECIPE_BATCH, RECIPE_REACH, RECIPE_AIM = 12, 1.15, 1.00


def stack_step(row: Row, open_replicas: ExitStack) -> tuple[Step, Decoder, tuple[np.ndarray, ...]]:
    """The step here; the model and (x, memory, dy)."""
    rng = np.random.default_rng(0)
    model = Decoder(
        row.layers, row.d_model, row.heads, row.d_ff, attention_bias=True, rng=rng
    )
    shape = (row.B, row.T, row.d_model)
    x, memory, dy = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))
    mask = causal_mask(row.T)
    optimizer = SGD(model.parameters(), 1e-6)
    threads = min(choose_threads(model, row.B, row.T), THREADS)
    replicas = open_replicas.enter_context(Replicas(model, threads))
    shares = [
        ((x, memory), {"target_mask": mask}, dy)
        for x, memory, dy in zip(*(np.array_split(a, threads) for a in (x, memory, dy)))
    ]

    def step() -> list[Any]:
        gradients = replicas.run(forward_backward, shares)  # .grad is set: no zero_grad
        optimizer.step()
        return gradients

    return step, model, (x, memory, dy)


def torch_stack_step(row: Row, model: Decoder, arrays: Sequence[np.ndarray]) -> Step:
    layer = torch.nn.TransformerDecoderLayer(
        row.d_model, row.heads, row.d_ff, dropout=0.0, batch_first=True, norm_first=True
    )
    twin = torch.nn.TransformerDecoder(layer, row.layers, torch.nn.LayerNorm(row.d_model))
    twin.load_state_dict({k: torch.tensor(v) for k, v in torch_state_dict(model).items()})
    x, memory, dy = (torch.tensor(array) for array in arrays)
    x.requires_grad_(), memory.requires_grad_()
    mask = torch.nn.Transformer.generate_square_subsequent_mask(row.T)
    optimizer = torch.optim.SGD(twin.parameters(), 1e-6)

    def step() -> None:
        optimizer.zero_grad()
        x.grad = memory.grad = None
        y = twin(x, memory, tgt_mask=mask, tgt_is_causal=True)
        y.backward(dy)
        optimizer.step()

    return step


def recipe_step(open_replicas: ExitStack) -> tuple[Step, LanguageModel, Batch]:
    model = LanguageModel(RECIPE)
    groups = decay_groups(model.parameters(), 0.1)
    optimizer = AdamW(groups, 1e-4, betas=(0.9, 0.99))
    ids = np.random.default_rng(0).integers(0, 65, (RECIPE_BATCH, RECIPE.max_len + 1))
    batch = Batch((ids[:, :-1],), ids[:, 1:])
    criterion = CrossEntropy()
    threads = min(choose_threads(model, *ids[:, 1:].shape), THREADS)
    replicas = open_replicas.enter_context(Replicas(model, threads))

    def step() -> object:
        return train_step(replicas, criterion, optimizer, batch, max_norm=1.0)

    return step, model, batch


def torch_recipe_step(batch: Batch) -> Step:
    from torch.nn import functional as F

    c = RECIPE

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            d = c.d_model
            self.norm1, self.norm2 = (torch.nn.LayerNorm(d, bias=False) for _ in range(2))
            self.W_qkv = torch.nn.Linear(d, 3 * d, bias=False)
            self.W_o = torch.nn.Linear(d, d, bias=False)
            self.linear1 = torch.nn.Linear(d, 4 * d, bias=False)
            self.linear2 = torch.nn.Linear(4 * d, d, bias=False)

        def forward(self, x: Any) -> Any:
            B, T, d = x.shape
            q, k, v = (
                part.view(B, T, c.num_heads, d // c.num_heads).transpose(1, 2)
                for part in self.W_qkv(self.norm1(x)).split(d, dim=2)
            )
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.W_o(context.transpose(1, 2).reshape(B, T, d))
            return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))

    class GPT(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(c.vocab_size, c.d_model)
            self.positions = torch.nn.Embedding(c.max_len, c.d_model)
            self.blocks = torch.nn.ModuleList(Block() for _ in range(c.num_layers))
            self.norm = torch.nn.LayerNorm(c.d_model, bias=False)
            torch.nn.init.normal_(self.embedding.weight, std=0.02)

        def forward(self, ids: Any) -> Any:
            x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.norm(x) @ self.embedding.weight.T

    twin = GPT()
    assert sum(p.numel() for p in twin.parameters()) == 804_096
    groups = [
        {"params": [p for p in twin.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in twin.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.99))
    ids, targets = torch.tensor(batch.inputs[0]), torch.tensor(batch.targets)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = twin(ids)
        loss = F.cross_entropy(logits.view(-1, c.vocab_size), targets.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def stack_flops(row: Row) -> float:
    """Of the matrix products of a step: forward, and twice that backward."""
    N, d = row.B * row.T, row.d_model
    weights = row.layers * (8 * d * d + 2 * d * row.d_ff)
    attention = row.layers * 2 * (2 * row.T * d)
    return 3 * 2 * N * (weights + attention)


def recipe_flops() -> float:
    c = RECIPE
    N, d = RECIPE_BATCH * c.max_len, c.d_model
    weights = c.num_layers * (4 * d * d + 8 * d * d) + c.vocab_size * d
    return 3 * 2 * N * (weights + c.num_layers * 2 * c.max_len * d)


def seconds_of(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def peak() -> float:
    """Operations a second of products (1024, 1024) @ (1024, 1024) on all BLAS threads."""
    a = np.ones((1024, 1024), np.float32)
    times = [seconds_of(lambda: a @ a) for _ in range(30)]
    return 2 * 1024**3 / statistics.median(times[5:])


def in_turns(steps: Sequence[Step], rounds: int) -> list[list[float]]:
    """For each step the median seconds of each of its turns; a turn takes 0.1 s, or 3 steps."""
    counts = []
    for step in steps:
        step(), step()
        counts.append(int(min(max(0.1 / seconds_of(step), 3), 200)))
    medians: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, count, found in zip(steps, counts, medians):
            time.sleep(0.1)
            step(), step()
            found.append(statistics.median(seconds_of(step) for _ in range(count)))
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description="One training step against PyTorch.")
    parser.add_argument("--rows", type=int, nargs="*", default=range(1, 9), help="default: all")
    parser.add_argument("--products", action="store_true", help="products alone; needs PyTorch")
    parser.add_argument("--rounds", type=int, default=25, help="turns of each (default: 25)")
    args = parser.parse_args()
    if torch is None and args.products:
        parser.error("--products needs PyTorch")
    if torch is None:
        print("PyTorch is not installed: times alone", file=sys.stderr)
    else:
        torch.set_num_threads(THREADS)
        if args.products:
            print_products()
            return
    top = peak()
    print(f"NumPy {np.__version__}{kernels()}, PyTorch {torch.__version__ if torch else 'none'}; "
          f"matrix products alone: {top / 1e9:.0f} GFLOP/s\n")
    print("layers d_model heads d_ff  B   T      here  PyTorch  ratio  reach   aim  of peak "
          "(PyTorch)")
    for n in args.rows:
        with ExitStack() as open_replicas:
            print_row(n, args.rounds, top, open_replicas)


def kernels() -> str:
    """For which processor NumPy's BLAS computes, if it tells."""
    if pinned := os.environ.get("OPENBLAS_CORETYPE"):
        print(f"OPENBLAS_CORETYPE={pinned} is set: OpenBLAS may do better with what it chooses "
              "itself", file=sys.stderr)
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return ""
    libraries = [library for library in threadpool_info() if "numpy" in library["filepath"]]
    return "".join(f" ({library['internal_api']} {library['version']} for "
                   f"{library.get('architecture', 'any processor')})" for library in libraries)


def print_products() -> None:
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)
    torch.set_num_threads(1)
    print("GFLOP/s of one core, NumPy's BLAS / PyTorch's\n")
    print("rows  d_model  d_ff        x W      dy W^T      x^T dy")
    rng = np.random.default_rng(0)
    sizes = [(row.B * row.T // 2, row.d_model, row.d_ff) for row in LADDER[2:]]
    sizes.append((RECIPE_BATCH * RECIPE.max_len // 2, RECIPE.d_model, 4 * RECIPE.d_model))
    for N, d, d_ff in dict.fromkeys(sizes):
        shapes = (N, d), (d, d_ff), (N, d_ff)
        arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
        steps = products(*arrays) + products(*map(torch.tensor, arrays))
        times: list[list[float]] = [[] for _ in steps]
        for _ in range(60):
            for step, found in zip(steps, times):
                step()
                found.append(seconds_of(step))
        rates = [2 * N * d * d_ff / statistics.median(found) / 1e9 for found in times]
        print(f"{N:4} {d:8} {d_ff:5}",
              *(f"{here:5.0f} / {there:3.0f}" for here, there in zip(rates[:3], rates[3:])))


def products(x: Any, W: Any, dy: Any) -> list[Step]:
    return [lambda: x @ W, lambda: dy @ W.T, lambda: x.T @ dy]


def print_row(n: int, rounds: int, top: float, open_replicas: ExitStack) -> None:
    if n <= len(LADDER):
        row = LADDER[n - 1]
        label, flops, reach, aim = str(row), stack_flops(row), row.to_reach, row.aim
        here, model, arrays = stack_step(row, open_replicas)
        steps = [here] if torch is None else [here, torch_stack_step(row, model, arrays)]
    else:
        label, flops = "nanoGPT recipe, one update", recipe_flops()
        reach, aim = RECIPE_REACH, RECIPE_AIM
        here, _, batch = recipe_step(open_replicas)
        steps = [here] if torch is None else [here, torch_recipe_step(batch)]
    turns = in_turns(steps, rounds)
    seconds = [statistics.median(found) for found in turns]
    ratio = "     -"
    if torch is not None:
        ratio = f"{statistics.median(here / there for here, there in zip(*turns)):6.2f}"
    cells = [f"{1000 * s:7.2f}" for s in seconds] + ["      -"] * (2 - len(seconds))
    shares = [f"{100 * flops / s / top:4.0f} %" for s in seconds]
    print(f"{label:32} {cells[0]} ms {cells[1]} {ratio}  {reach:5.2f}  {aim:4.2f}  "
          f"{shares[0]}  {shares[1] if len(shares) > 1 else '':>7}", flush=True)


if __name__ == "__main__":
    main()
