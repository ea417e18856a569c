"""A model trained here runs in PyTorch, and one trained there runs here, with equal logits.

    pip install . torch
    python examples/pytorch_both_ways.py

The PyTorch model is one as its users write it: embeddings, torch.nn.Transformer and a Linear, under
names of their own. NAMES says which is which; nothing else has to be told.
"""

import math
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

from npdecoder import SGD, CrossEntropy, Transformer, TransformerConfig
from npdecoder.interop import load_torch_state_dict, read_torch_file, torch_state_dict

VOCAB, D, HEADS, D_FF, LAYERS, MAX_LEN, PAD, BOS = 12, 16, 2, 32, 2, 10, 0, 1
STEPS = 40

CONFIG = TransformerConfig(
    VOCAB, VOCAB, d_model=D, num_heads=HEADS, d_ff=D_FF, num_encoder_layers=LAYERS,
    num_decoder_layers=LAYERS, max_len=MAX_LEN, pad_id=PAD,
    norm="pre",           # norm_first=True
    final_norm=True,      # torch.nn.Transformer always has norms after its last layers
    attention_bias=True,  # and biases everywhere
)
NAMES = {
    "source_embedding": "src_emb",
    "target_embedding": "tgt_emb",
    "encoder": "transformer.encoder",
    "decoder": "transformer.decoder",
    "output": "generator",
}


class TorchModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.src_emb = nn.Embedding(VOCAB, D)
        self.tgt_emb = nn.Embedding(VOCAB, D)
        self.transformer = nn.Transformer(
            D, HEADS, LAYERS, LAYERS, D_FF, dropout=0.0, batch_first=True, norm_first=True)
        self.generator = nn.Linear(D, VOCAB)
        # 0 .. MAX_LEN - 1 in sines and cosines; not persistent: it is no part of the state dict
        angle = torch.arange(MAX_LEN)[:, None] / 10000.0 ** (torch.arange(0, D, 2) / D)
        table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
        self.register_buffer("positions", table, persistent=False)

    def forward(self, source_ids, target_ids):
        T = target_ids.shape[1]
        return self.generator(self.transformer(
            self.embed(self.src_emb, source_ids), self.embed(self.tgt_emb, target_ids),
            tgt_mask=torch.ones(T, T, dtype=torch.bool).triu(1),  # True = may not attend, there
            src_key_padding_mask=source_ids == PAD, memory_key_padding_mask=source_ids == PAD))

    def embed(self, embedding, ids):
        return math.sqrt(D) * embedding(ids) + self.positions[:ids.shape[1]]


def batch(rng, size=16):
    """The task: say the source backwards. Sources have several lengths, padded on the right."""
    lengths = rng.integers(2, MAX_LEN, size)
    source = np.zeros((size, MAX_LEN - 1), np.int64)
    targets = source.copy()
    for row, length in enumerate(lengths):
        source[row, :length] = rng.integers(2, VOCAB, length)
        targets[row, :length] = source[row, :length][::-1]
    target_ids = np.concatenate([np.full((size, 1), BOS), targets[:, :-1]], axis=1)
    return source, target_ids, targets


def train_here(model, rng):
    criterion, optimizer = CrossEntropy(PAD), SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        source_ids, target_ids, targets = batch(rng)
        optimizer.zero_grad()
        logits, ctx = model.forward(source_ids, target_ids)
        loss, loss_ctx = criterion.forward(logits, targets)
        model.backward(ctx, criterion.backward(loss_ctx))
        optimizer.step()
        losses.append(float(loss))
    return losses


def train_there(model, rng):
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        source_ids, target_ids, targets = map(torch.from_numpy, batch(rng))
        optimizer.zero_grad()
        loss = criterion(model(source_ids, target_ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def difference(ours, theirs, rng):
    """The largest difference of logits, relative to the largest logit; on what is not padding."""
    source_ids, target_ids, targets = batch(rng, 64)
    here = ours(source_ids, target_ids)
    with torch.no_grad():
        there = theirs(torch.from_numpy(source_ids), torch.from_numpy(target_ids)).numpy()
    here, there = here[targets != PAD], there[targets != PAD]
    return np.abs(here - there).max() / np.abs(there).max()


def both_ways(dtype, torch_dtype, tolerance):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    torch.set_default_dtype(torch_dtype)
    print(f"{np.dtype(dtype)}, logits must agree to {tolerance:g}")

    # trained here, run there
    ours, theirs = Transformer(CONFIG, rng=1, dtype=dtype), TorchModel()
    untrained = difference(ours, theirs, rng)
    losses = train_here(ours, rng)
    state = {name: torch.from_numpy(a) for name, a in torch_state_dict(ours, NAMES).items()}
    theirs.load_state_dict(state)
    there = difference(ours, theirs, rng)
    report("trained here, run in PyTorch", losses, there)

    # trained there, saved by torch.save, run here
    ours, theirs = Transformer(CONFIG, rng=2, dtype=dtype), TorchModel()
    losses = train_there(theirs, rng)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(theirs.state_dict(), path)
        load_torch_state_dict(ours, read_torch_file(path), NAMES)
    here = difference(ours, theirs, rng)
    report("trained in PyTorch, run here", losses, here)
    print(f"  before any weights were exchanged:                          {untrained:.1e}")
    return max(here, there) < tolerance < untrained


def report(what, losses, difference):
    print(f"  {what}, loss {losses[0]:.2f} -> {losses[-1]:.2f}: difference {difference:.1e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="enable_nested_tensor")
    results = [both_ways(np.float32, torch.float32, 1e-5),
               both_ways(np.float64, torch.float64, 1e-10)]
    if not all(results):
        raise SystemExit("the logits differ")
    print("equal, both ways")
