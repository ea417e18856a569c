"""Write tests/torch_files/*.pt, which torch.save writes, for tests/test_interop.py to read.

    python tests/make_torch_files.py

It needs torch; the files there were made with torch 2.13.0 on a CPU. The tests read them without.

Files of a module hold {"state": its state dict, "in": its inputs by npdecoder's names, "y": its
output}, in float64 and with every parameter random, biases and norms too; masks are npdecoder's
(True = may attend). The others hold tensors of every kind that is read, in tensors_*.pt, and what
is refused, in refused_*.pt.
"""

import math
import sys
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import torch
from torch import nn, randn

FOLDER = Path(__file__).with_name("torch_files")
B, T, S = 2, 3, 5  # batch, target length, source length
D, H, D_FF = 4, 2, 7  # d_model, heads, feed-forward
V_SOURCE, V_TARGET, MAX_LEN, PAD = 11, 13, 9, 2

REAL_S = torch.arange(S) < torch.tensor([[3], [5]])  # (B, S), padding on the right
REAL_T = torch.arange(T) < torch.tensor([[3], [2]])  # (B, T)
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def save(name, value, **options):
    torch.save(value, FOLDER / f"{name}.pt", **options)


def record(name, module, inputs, function=None, **options):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * randn(parameter.shape))
    y = function(**inputs) if function else module(*inputs.values())
    save(name, {"state": module.state_dict(), "in": inputs, "y": y.detach()}, **options)


def keys(real):
    """(B, S) -> a mask of keys, (B, 1, 1, S)."""
    return real[:, None, None, :]


# Layers and blocks


def layers():
    record("linear", nn.Linear(5, 3), {"x": randn(2, 5)})
    record("layer_norm", nn.LayerNorm(5), {"x": randn(2, 5)})
    record("embedding", nn.Embedding(7, 5), {"ids": torch.tensor([[3, 0, 6]])})


def attention():
    kv = {"key": randn(B, S, D), "value": randn(B, S, D)}
    inputs = {"query": randn(B, T, D)} | kv | {"mask": keys(REAL_S)}
    for name, bias in ("attention", True), ("attention_no_bias", False):
        record_attention(name, nn.MultiheadAttention(D, H, bias=bias, batch_first=True), inputs)


def record_attention(name, module, inputs):
    record(name, module, inputs, lambda query, key, value, mask: module(
        query, key, value, key_padding_mask=~REAL_S)[0])


def block_options(norm, activation, **options):
    return {"d_model": D, "nhead": H, "dim_feedforward": D_FF, "dropout": 0.0,
            "activation": activation, "batch_first": True, "norm_first": norm == "pre", **options}


def encoder_layer(*args, **options):
    return nn.TransformerEncoderLayer(**block_options(*args, **options))


def decoder_layer(*args, **options):
    return nn.TransformerDecoderLayer(**block_options(*args, **options))


def record_encoder(name, module):
    record(name, module, {"x": randn(B, S, D), "mask": keys(REAL_S)},
           lambda x, mask: module(x, src_key_padding_mask=~REAL_S))


def record_decoder(name, module):
    masks = {"target_mask": keys(REAL_T) & CAUSAL, "memory_mask": keys(REAL_S)}
    record(name, module, {"x": randn(B, T, D), "memory": randn(B, S, D)} | masks,
           lambda x, memory, target_mask, memory_mask: module(
               x, memory, tgt_mask=~CAUSAL, tgt_key_padding_mask=~REAL_T,
               memory_key_padding_mask=~REAL_S))


def blocks():
    for options in ("pre", "relu"), ("post", "gelu"):
        norm = options[0]
        final = nn.LayerNorm(D) if norm == "pre" else None
        record_encoder(f"encoder_layer_{norm}", encoder_layer(*options))
        record_decoder(f"decoder_layer_{norm}", decoder_layer(*options))
        record_encoder(f"encoder_{norm}", nn.TransformerEncoder(
            encoder_layer(*options), 2, final, enable_nested_tensor=False))
        record_decoder(f"decoder_{norm}", nn.TransformerDecoder(decoder_layer(*options), 2, final))
    record_encoder("encoder_no_biases", nn.TransformerEncoder(
        encoder_layer("pre", "relu", bias=False), 1, nn.LayerNorm(D, bias=False),
        enable_nested_tensor=False))


# Models


def sinusoids(length):
    position = torch.arange(length).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, D, 2) * (-math.log(10000.0) / D))
    table = torch.zeros(length, D)
    table[:, 0::2] = torch.sin(position * div_term)
    table[:, 1::2] = torch.cos(position * div_term)
    return table


class Translator(nn.Module):
    """Embeddings, torch.nn.Transformer, and a Linear: as a user writes it, by names of his own."""

    def __init__(self, norm):
        super().__init__()
        self.src_emb = nn.Embedding(V_SOURCE, D)
        self.tgt_emb = nn.Embedding(V_TARGET, D)
        self.transformer = nn.Transformer(
            num_encoder_layers=1, num_decoder_layers=2, **block_options(norm, "relu"))
        self.generator = nn.Linear(D, V_TARGET)

    def forward(self, source_ids, target_ids):
        y = self.transformer(
            self.embed(self.src_emb, source_ids), self.embed(self.tgt_emb, target_ids),
            tgt_mask=~CAUSAL, src_key_padding_mask=source_ids == PAD,
            tgt_key_padding_mask=target_ids == PAD, memory_key_padding_mask=source_ids == PAD)
        return self.generator(y)

    def embed(self, embedding, ids):
        return math.sqrt(D) * embedding(ids) + sinusoids(ids.shape[1])


class TiedTranslator(Translator):
    """One table for source, target and output, and one of learned positions for both sides."""

    def __init__(self, norm):
        super().__init__(norm)
        self.pos = nn.Parameter(torch.empty(MAX_LEN, D))
        self.src_emb = self.tgt_emb
        self.generator = nn.Linear(D, V_TARGET, bias=False)
        self.generator.weight = self.tgt_emb.weight

    def embed(self, embedding, ids):
        return embedding(ids) + self.pos[:ids.shape[1]]


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V_TARGET, D)
        self.wpe = nn.Embedding(MAX_LEN, D)
        self.stack = nn.TransformerEncoder(
            encoder_layer("pre", "gelu"), 2, nn.LayerNorm(D), enable_nested_tensor=False)
        self.head = nn.Linear(D, V_TARGET)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        return self.head(self.stack(x, mask=~CAUSAL))


def models():
    source_ids = torch.randint(PAD + 1, V_SOURCE, (B, S)).masked_fill(~REAL_S, PAD)
    target_ids = torch.randint(PAD + 1, V_TARGET, (B, T)).masked_fill(~REAL_T, PAD)
    ids = {"source_ids": source_ids, "target_ids": target_ids}
    record("transformer_pre", Translator("pre"), ids)
    record("transformer_post", Translator("post"), ids)
    record("transformer_tied", TiedTranslator("post"), ids)
    record("language_model", LanguageModel(), {"ids": target_ids.clamp(min=PAD + 1)})


# Files of all kinds


def tensors():
    """Every tensor holds what tests/test_interop.py says under its name."""
    grid = torch.arange(24.0, dtype=torch.float32).reshape(4, 6)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.5, -2.0, 3e38])
    kinds = {
        str(dtype).removeprefix("torch."): torch.tensor([0, 1, 2, 100]).to(dtype)
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
            torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
            torch.uint16, torch.uint32, torch.uint64)
    }
    views = {
        "grid": grid,
        "transposed": grid.T,
        "strided": grid[1::2, ::3],
        "row": grid[2],
        "offset": grid[1:, 2:5],
        "shared": grid,
        "permuted": torch.arange(24, dtype=torch.int16).reshape(2, 3, 4).permute(2, 0, 1),
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
        "0-d": torch.tensor(2.5),
        "0-d view": grid[3, 5],
        "empty": torch.zeros(0),
        "no rows": torch.zeros(0, 3),
        "no columns": grid[:, 6:],
        "parameter": nn.Parameter(torch.tensor([1.0, 2.0])),
        "frozen": nn.Parameter(torch.tensor([3.0]), requires_grad=False),
        "special float32": special,
        "special float16": special.half(),
        "special bfloat16": special.bfloat16(),
        "我": torch.tensor([1.0]),
    }
    save("tensors", kinds | views)
    save("tensors_protocol_4", kinds | views, pickle_protocol=4)

    # what torch.save writes on a big-endian machine
    for key, x in (kinds | views).items():
        if key not in ("transposed", "strided", "row", "offset", "shared", "0-d view",
                       "no columns") and x.element_size() > 1:  # of grid, which is swapped once
            x.untyped_storage().byteswap(x.dtype)
    with mock.patch.object(sys, "byteorder", "big"):
        save("tensors_big_endian", kinds | views)

    save("checkpoint", {
        "model": nn.Linear(3, 2).state_dict(), "epoch": 3, "loss": 0.25, "done": False,
        "name": "run 1", "best": None, "shape": torch.Size([2, 3]), "sizes": [1, (2, 3)],
        "optimizer": optimizer_state(), "large": 2**70, "negative": -5, "empty": [{}, [], ()],
    })


def optimizer_state():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def refused():
    save("refused_legacy", OrderedDict(x=torch.ones(2)), _use_new_zipfile_serialization=False)
    save("refused_module", nn.Linear(2, 2))
    save("refused_tensor", torch.ones(2))
    save("refused_float8", {"x": torch.ones(2, dtype=torch.float8_e4m3fn)})
    save("refused_sparse", {"x": torch.eye(2).to_sparse()})
    save("refused_conjugate", {"x": torch.ones(2, dtype=torch.complex64).conj()})
    save("refused_dtype", {"dtype": torch.float32})
    save("refused_device", {"device": torch.device("cpu")})
    save("refused_storage", {"x": torch.ones(2).untyped_storage()})
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)),
                   FOLDER / "refused_torch_script.pt")
    # attention that has no counterpart
    save("refused_kdim", nn.MultiheadAttention(4, 2, kdim=3, vdim=5).state_dict())
    save("refused_bias_kv", nn.MultiheadAttention(4, 2, add_bias_kv=True).state_dict())


if __name__ == "__main__":
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.pt"):
        old.unlink()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    for group in layers, attention, blocks, models:
        group()
    torch.set_default_dtype(torch.float32)
    tensors()
    refused()
    files = list(FOLDER.glob("*.pt"))
    total = sum(file.stat().st_size for file in files)
    print(f"torch {torch.__version__}: {len(files)} files, {total / 1000:.0f} KB in {FOLDER.name}/")
