"""The eight systems that the three articles describe, each at its own sizes.

Every system is built, run forward and backward on random data, and shown as two tables: the shapes
of what goes in and comes out, gradients included, and the parameters part by part.

    python examples/architectures.py                  all of them, in less than half a minute
    python examples/architectures.py --system S3      one

Letters: B sentences in a batch, S source positions, T target positions, V words of a vocabulary.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from npdecoder import (
    CrossEntropy,
    Decoder,
    DecoderLayer,
    Embedding,
    Encoder,
    LanguageModel,
    LanguageModelConfig,
    Layer,
    SinusoidalPositions,
    Transformer,
    TransformerConfig,
    causal_mask,
    padding_mask,
    softmax,
    target_mask,
)
from npdecoder.console import left, prepare, right, shown, table, width

PAGE = 96  # columns of running text

PRE_LN_SIZES = {"d_model": 768, "num_heads": 12, "d_ff": 3072}  # S1, S3, S8: the prose of article 1
PART_6_SIZES = {"d_model": 512, "num_heads": 8, "d_ff": 2048}  # S6, S7: article 3
WALKTHROUGH_SIZES = {"d_model": 4, "num_heads": 2, "d_ff": 16}  # S4, S5: article 2
VOCABULARY, MAX_LEN = 500, 1000  # S2: the program of article 1


# What is told about a system. Only numbers are kept: the models are too large to keep them all.


class Part(NamedTuple):
    """The parameters of one part of a model, such as the self-attention of all its layers."""

    name: str
    layers: int  # how many layers have it; 0 where it stands outside the layers
    count: int  # numbers in all layers together
    biases: int  # how many of these are b of a Linear (the beta of a norm is none)
    gradient_norm: float


class Report(NamedTuple):
    name: str
    title: str
    sizes: list[str]
    shapes: list[tuple[str, str, str]]  # symbol, shape, what it is
    parts: list[Part]
    without_gradient: list[str]  # parameters whose gradient is zero, but for rounding
    finite: bool  # whether every number of every gradient is
    notes: list[str]

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)


def part_of(name: str) -> str:
    """The part that a parameter belongs to: decoder.layers.3.self_attention.W_q.W and the like."""
    pieces = name.split(".")
    if "layers" in pieces:
        stack, inside = pieces[0], pieces[pieces.index("layers") + 2]
        inside = "norms" if inside.startswith("norm") else inside
    elif pieces[0] in ("encoder", "decoder"):
        stack, inside = pieces[0], pieces[1]
        inside = {"norm": "final norm", "memory_projection": "shared K, V projection"}[inside]
    else:
        return pieces[0].replace("_", " ")
    inside = {"self_attention": "self-attention", "cross_attention": "cross-attention"}.get(
        inside, inside.replace("feed_forward", "feed-forward")
    )
    return f"{stack} {inside}"


def parts_of(model: dict[str, Layer]) -> tuple[list[Part], list[str], bool]:
    """Counts and gradients by part, the parameters without a gradient, and whether all is finite.

    model: the layers that are used together, by name; a Parameter in two of them counts once.
    """
    named, seen = [], set()
    for prefix, layer in model.items():
        for name, parameter in layer.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                named.append((f"{prefix}.{name}".lstrip("."), parameter))
    rows: dict[str, list[Any]] = {}
    largest = {}
    for name, parameter in named:
        g = parameter.grad.reshape(-1)
        largest[name] = max(float(g.max()), -float(g.min()))  # NaN comes out as NaN
        sizes, biases, squares = rows.setdefault(part_of(name), [{}, 0, 0.0])
        pieces = name.split(".")
        layer = pieces[pieces.index("layers") + 1] if "layers" in pieces else None
        sizes[layer] = sizes.get(layer, 0) + parameter.size
        biases += parameter.size * name.endswith(".b")
        rows[part_of(name)] = [sizes, biases, squares + float(g @ g)]
    parts = [
        Part(name, len(sizes.keys() - {None}), sum(sizes.values()), biases, squares**0.5)
        for name, (sizes, biases, squares) in rows.items()
    ]
    top = max(largest.values())
    without = [name for name, size in largest.items() if size <= 1e-6 * top]
    finite = all(np.isfinite(part.gradient_norm) for part in parts)
    return parts, without, finite


def shape(array: Any) -> str:
    return "(" + ", ".join(map(str, np.shape(array))) + ")"


def normal(rng: np.random.Generator, *sizes: int) -> np.ndarray:
    return rng.standard_normal(sizes, dtype=np.float32)


def same_shapes(*pairs: tuple[Any, Any]) -> None:
    """Every gradient has the shape of what it is the gradient of."""
    for x, dx in pairs:
        if np.shape(x) != np.shape(dx):
            raise RuntimeError(f"a gradient {np.shape(dx)} of an array {np.shape(x)}")


# The systems


def pre_ln_decoder(rng: np.random.Generator) -> Report:
    B, T, S = 2, 10, 12
    decoder = Decoder(
        12, **PRE_LN_SIZES, norm="pre", final_norm=False, activation="gelu",
        cross_attention="shared", rng=rng,
    )
    x, memory, dy = normal(rng, B, T, 768), normal(rng, B, S, 768), normal(rng, B, T, 768)
    y, ctx = decoder.forward(x, memory, causal_mask(T))
    dx, dmemory = decoder.backward(ctx, dy)
    same_shapes((x, dx), (memory, dmemory))
    first, last = (layer.cross.attention.attention for layer in (ctx.layers[0], ctx.layers[-1]))
    if first.k is not last.k or first.v is not last.v:
        raise RuntimeError("the layers read different keys or values of the memory")
    return Report(
        "S1",
        "Pre-LN decoder stack, one projection of the memory for all layers",
        [
            "d_model 768, 12 heads of 64, d_ff 3072, 12 layers, GELU; attention without biases,",
            "feed-forward with; no final norm. The article names no lengths: B 2, T 10, S 12.",
        ],
        [
            ("x", shape(x), "target vectors (embedding + position)"),
            ("memory", shape(memory), "what an encoder gave"),
            ("K, V", shape(first.k), "(B, heads, S, 64): one pair, read by all 12 layers"),
            ("y", shape(y), "output; the loss is sum(y * dy) with random dy"),
            ("dx", shape(dx), "gradient of x"),
            ("dmemory", shape(dmemory), "gradient of the memory: dK, dV summed over 12 layers"),
        ],
        *parts_of({"decoder": decoder}),
        [
            "The article says that the decoder does not learn W_K and W_V of the memory. Someone "
            "must: here the Decoder owns the one pair; its gradient is the sum over the layers.",
        ],
    )


def pre_ln_transformer(rng: np.random.Generator) -> Report:
    # Not the model Transformer but its pieces, put together as the article's program does.
    sizes = {"d_model": 512, "num_heads": 8, "norm": "pre", "final_norm": True, "dropout": 0.1}
    embedding = Embedding(VOCABULARY, 512, scale=True, rng=rng)
    positions = SinusoidalPositions(512, MAX_LEN)
    encoder, decoder = Encoder(6, **sizes, rng=rng), Decoder(6, **sizes, rng=rng)
    x_ids, y_ids = rng.integers(0, VOCABULARY, (2, 4)), rng.integers(0, VOCABULARY, (2, 4))
    dy = normal(rng, 2, 4, 512)

    # forward: dropout happens because rng is given; none on the positions
    x_embedded, x_embedding = embedding.forward(x_ids)
    x, x_positions = positions.forward(x_embedded)
    memory, encoder_ctx = encoder.forward(x, rng=rng)
    y_embedded, y_embedding = embedding.forward(y_ids)
    y, y_positions = positions.forward(y_embedded)
    output, decoder_ctx = decoder.forward(y, memory, causal_mask(4), rng=rng)
    # backward: the same calls in reverse
    dy_in, dmemory = decoder.backward(decoder_ctx, dy)
    embedding.backward(y_embedding, positions.backward(y_positions, dy_in))
    dx_in = encoder.backward(encoder_ctx, dmemory)
    embedding.backward(x_embedding, positions.backward(x_positions, dx_in))
    same_shapes((x, dx_in), (y, dy_in), (memory, dmemory))
    return Report(
        "S2",
        "Pre-LN encoder and decoder, each layer with its own cross-attention K, V",
        [
            "d_model 512, 8 heads of 64, d_ff 2048, 6 + 6 layers, "
            f"vocabulary {VOCABULARY}, max_len {MAX_LEN}, ReLU, dropout 0.1;",
            "no attention biases, final norms, one embedding for source and target * sqrt(512).",
        ],
        [
            ("x, y ids", f"{shape(x_ids)}, {shape(y_ids)}", "source and target"),
            ("x, y", shape(x), "embedding * sqrt(512) + position, of both"),
            ("memory", shape(memory), "the encoder's output"),
            ("output", shape(output), "the decoder's; the loss is sum(output * dy), dy random"),
            ("dx, dy", shape(dx_in), "gradients of x and y"),
            ("dmemory", shape(dmemory), "gradient of the memory: a sum over 6 layers"),
            ("dW", shape(embedding.W.grad), "of the one embedding: from source and target"),
        ],
        *parts_of({"embedding": embedding, "encoder": encoder, "decoder": decoder}),
        [
            "The article's program gives the decoder no mask, so that each position sees the words "
            "it is to predict. Here it gets the causal mask.",
            "Its stacks are deep copies of one layer, so that all six begin with equal weights. "
            "Here each layer is drawn by itself.",
            "It ends at the decoder: there is no output layer, and none is counted.",
        ],
    )


def language_model(rng: np.random.Generator) -> Report:
    B, T = 2, 10
    config = LanguageModelConfig(
        VOCABULARY, **PRE_LN_SIZES, num_layers=12, norm="pre", activation="gelu",
        max_len=MAX_LEN, scale_embeddings=False, tie_embeddings="target_output", output_bias=False,
    )
    model, criterion = LanguageModel(config, rng), CrossEntropy()
    text = rng.integers(0, VOCABULARY, (B, T + 1))
    ids, targets = text[:, :-1], text[:, 1:]
    logits, ctx = model.forward(ids)
    loss, loss_ctx = criterion.forward(logits, targets)
    dlogits = criterion.backward(loss_ctx)
    model.backward(ctx, dlogits)
    same_shapes((logits, dlogits))
    return Report(
        "S3",
        "Decoder-only language model (GPT-like): the stack of S1 without cross-attention",
        [
            "d_model 768, 12 heads of 64, d_ff 3072, 12 layers, GELU, final norm; the output layer",
            "is the embedding, tied. The article names no vocabulary for it: "
            f"{VOCABULARY}, as in its program.",
        ],
        [
            ("ids", shape(ids), "a text"),
            ("targets", shape(targets), "the same text, one word on"),
            ("logits", shape(logits), "(B, T, V)"),
            ("loss", f"{loss:.4f}", f"cross-entropy; even odds would give ln {VOCABULARY} = "
                                    f"{np.log(VOCABULARY):.4f}"),
            ("dlogits", shape(dlogits), "(p - onehot) / (B T)"),
            ("dW", shape(model.embedding.W.grad), "of the embedding: from input and output"),
        ],
        *parts_of({"": model}),
        ["A layer has two sublayers and two norms: the second is the feed-forward's. There is no "
         "memory, and backward returns no gradient of one."],
    )


def walkthrough(rng: np.random.Generator) -> Report:
    return post_ln_transformer("S4", WALKTHROUGH_SIZES, rng, [
        "Its code puts the length first, (3, 1, 4), in front of an attention that takes the batch "
        "first: every word of its encoder attends to itself alone, and its decoder stops at the "
        "mask (3, 3), which spreads scores of (3, 2, 1, 1) to (3, 2, 3, 3). Here it is (1, 3, 4).",
        "Its mask helper makes 0 and -inf, but its attention hides what is 0, which is the past. "
        "Here True = may attend.",
    ])


def walkthrough_at_text_sizes(rng: np.random.Generator) -> Report:
    sizes = {"d_model": 512, "num_heads": 2, "d_ff": 2048}
    return post_ln_transformer("S4 wide", sizes, rng, [
        "The text of the same article has 512 -> 2048 -> ReLU -> dropout -> 512 for the "
        "feed-forward; what it does not name (heads, layers, vocabulary) is as in the small one.",
    ])


def post_ln_transformer(
    name: str, sizes: dict[str, int], rng: np.random.Generator, notes: list[str]
) -> Report:
    config = walkthrough_config(sizes, dropout=0.1)
    model, criterion = Transformer(config, rng), CrossEntropy()
    source, words = rng.integers(0, 10, (2, 3)), rng.integers(0, 10, (2, 4))
    target, targets = words[:, :-1], words[:, 1:]
    logits, ctx = model.forward(source, target, rng=rng)
    loss, loss_ctx = criterion.forward(logits, targets)
    dlogits = criterion.backward(loss_ctx)
    dmemory = model.decode_backward(ctx.decode, dlogits)
    model.encode_backward(ctx.encode, dmemory)
    same_shapes((logits, dlogits))
    return Report(
        name,
        "Post-LN encoder-decoder with teacher forcing"
        + (", at the sizes of the article's text" if "wide" in name else ""),
        [
            f"d_model {sizes['d_model']}, {sizes['num_heads']} heads of "
            f"{sizes['d_model'] // sizes['num_heads']}, d_ff {sizes['d_ff']}, 1 + 1 layers, "
            "vocabularies 10 and 10, max_len 5000, ReLU;",
            "biases everywhere; two embeddings, not scaled; dropout 0.1, on the positions too, but "
            "not on",
            "the attention weights.",
        ],
        [
            ("source ids", shape(source), "(B, S)"),
            ("target ids", shape(target), "(B, T): the targets, shifted right"),
            ("memory", shape(dmemory), "the encoder's output"),
            ("logits", shape(logits), "(B, T, V)"),
            ("loss", f"{loss:.4f}", "mean cross-entropy"),
            ("dlogits", shape(dlogits), "(p - onehot) / (B T)"),
            ("dmemory", shape(dmemory), "what the decoder sends back to the encoder"),
        ],
        *parts_of({"": model}),
        notes,
    )


def walkthrough_config(sizes: dict[str, int], dropout: float) -> TransformerConfig:
    return TransformerConfig(
        10, 10, **sizes, num_encoder_layers=1, num_decoder_layers=1, norm="post",
        attention_bias=True, scale_embeddings=False, max_len=5000,
        dropout=dropout, attention_dropout=0.0,
    )


def i_love_you(rng: np.random.Generator) -> Report:
    model, criterion = Transformer(walkthrough_config(WALKTHROUGH_SIZES, 0.0), rng), CrossEntropy()
    source, target, targets = [[2, 5, 3]], [[1, 7, 4]], [[7, 4, 6]]
    logits, ctx = model.forward(source, target)
    loss, loss_ctx = criterion.forward(logits, targets)
    dlogits = criterion.backward(loss_ctx)
    model.backward(ctx, dlogits)
    A = ctx.decode.decoder.layers[0].self_attention.attend.attention.A
    return Report(
        "S5",
        'The worked example of the same model: "I love you" -> "我 爱 你"',
        ["S4 without dropout, one sentence: d_model 4, 2 heads of 2, d_ff 16, vocabulary 10."],
        [
            ("source ids", shape(source), "I love you = [2, 5, 3]"),
            ("target ids", shape(target), "<s> 我 爱 = [1, 7, 4]"),
            ("targets", shape(targets), "我 爱 你 = [7, 4, 6] (6 is ours: the article has no id)"),
            ("A", shape(A), "weights of the masked self-attention: (B, heads, T, T)"),
            ("logits", shape(logits), "(B, T, V)"),
            ("loss", f"{loss:.4f}", "mean cross-entropy"),
            ("dlogits", shape(dlogits), "(p - onehot) / 3"),
        ],
        *parts_of({"": model}),
        ["examples/worked_example.py prints every number of it, forward and backward."],
    )


def part_6_decoder(rng: np.random.Generator) -> Report:
    B, S, T = 4, 12, 10
    decoder = Decoder(6, **PART_6_SIZES, norm="post", final_norm=True, dropout=0.1, rng=rng)
    x, memory, dy = normal(rng, B, T, 512), normal(rng, B, S, 512), normal(rng, B, T, 512)
    # The article marks what is hidden (True = blocked); npdecoder what is seen, so the masks are
    # inverted and combined with "and" where the article has "or".
    source_keep = np.ones((B, 1, 1, S), bool)
    source_keep[0, :, :, -3:] = False  # the end of the first sentence
    target_real = np.ones((B, 1, 1, T), bool)
    target_real[0, :, :, -1:] = False
    target_keep = target_real & causal_mask(T)
    y, ctx = decoder.forward(x, memory, target_keep, source_keep, rng)
    dx, dmemory = decoder.backward(ctx, dy)
    same_shapes((x, dx), (memory, dmemory))
    hidden = float(np.abs(dmemory[0, -3:]).max())
    if hidden:
        raise RuntimeError(f"masked memory has a gradient of {hidden}")
    biased = DecoderLayer(**PART_6_SIZES, attention_bias=True, rng=0).num_parameters()
    plain = decoder.layers[0].num_parameters()
    return Report(
        "S6",
        "Post-LN decoder stack with a final norm; look-ahead and padding masks",
        ["B 4, S 12, T 10, d_model 512, 8 heads of 64, d_ff 2048, 6 layers, ReLU, dropout 0.1."],
        [
            ("x", shape(x), "target vectors"),
            ("memory", shape(memory), "what an encoder gave"),
            ("target mask", shape(target_keep), "look-ahead and padding: one padded position"),
            ("memory mask", shape(source_keep), "padding: the last 3 positions of sentence 1"),
            ("y", shape(y), "output; the loss is sum(y * dy) with random dy"),
            ("dx", shape(dx), "gradient of x"),
            ("dmemory", shape(dmemory), "gradient of the memory; exactly 0 at the 3 masked places"),
        ],
        *parts_of({"decoder": decoder}),
        [
            "The article does not show its attention. Without attention biases, as here, a layer "
            f"has {plain:,} parameters; with them {biased:,}.",
            "Its test gives one instance of each sublayer to all six blocks, so that they share "
            "one block's weights (only the norms are their own). Here each layer has its own.",
        ],
    )


def part_6_transformer(rng: np.random.Generator) -> Report:
    B, S, T, pad = 4, 12, 10, 0
    config = TransformerConfig(
        VOCABULARY, VOCABULARY, **PART_6_SIZES, num_encoder_layers=6, num_decoder_layers=6,
        norm="post", final_norm=True, dropout=0.1, pad_id=pad,
    )
    model, criterion = Transformer(config, rng), CrossEntropy(ignore_index=pad)
    source, words = rng.integers(1, VOCABULARY, (B, S)), rng.integers(1, VOCABULARY, (B, T + 1))
    source[0, -3:] = pad
    words[0, -1:] = pad
    target, targets = words[:, :-1], words[:, 1:]
    logits, ctx = model.forward(source, target, rng=rng)
    p = softmax(logits)
    loss, loss_ctx = criterion.forward(logits, targets)
    dlogits = criterion.backward(loss_ctx)
    dmemory = model.decode_backward(ctx.decode, dlogits)
    model.encode_backward(ctx.encode, dmemory)
    same_shapes((logits, dlogits))
    return Report(
        "S7",
        "The whole Transformer: two embeddings, encoder, decoder, generator",
        [
            "The sizes of S6, with 6 + 6 layers. The article names no vocabulary: "
            f"{VOCABULARY} and {VOCABULARY}; 0 is padding.",
        ],
        [
            ("source ids", shape(source), "sentence 1 ends in 3 paddings"),
            ("target ids", shape(target), "the targets, shifted right"),
            ("source mask", shape(padding_mask(source, pad)), "made by the model, from the ids"),
            ("target mask", shape(target_mask(target, pad)), "so is this: causal and padding"),
            ("memory", shape(dmemory), "the encoder's output"),
            ("logits", shape(logits), "the generator's linear layer"),
            ("p", shape(p), "softmax(logits): the next word's; rows sum to "
                            f"{p.sum(axis=-1).min():.4f}"),
            ("loss", f"{loss:.4f}", f"over the {loss_ctx.count} targets that are no padding"),
            ("dlogits", shape(dlogits), "(p - onehot) / count, 0 at padding"),
            ("dmemory", shape(dmemory), "what the decoder sends back to the encoder"),
        ],
        *parts_of({"": model}),
        ["The generator of the article ends in a softmax. Here the model gives logits, because the "
         "cross-entropy takes them: its gradient is p - onehot, with no division."],
    )


def counts_and_norms(rng: np.random.Generator) -> Report:
    """S8, on the stack of S1 without feed-forward biases: so does the article count."""
    B, T, S = 2, 10, 12
    x, memory, dy = normal(rng, B, T, 768), normal(rng, B, S, 768), normal(rng, B, T, 768)
    decoder = Decoder(
        12, **PRE_LN_SIZES, norm="pre", final_norm=False, activation="gelu",
        cross_attention="shared", feed_forward_bias=False, rng=rng,
    )
    y, ctx = decoder.forward(x, memory, causal_mask(T))
    dx, dmemory = decoder.backward(ctx, dy)
    same_shapes((x, dx), (memory, dmemory))
    del ctx
    layer = decoder.layers[0]
    one, twelve = layer.num_parameters(), sum(n.num_parameters() for n in decoder.layers)
    whole = decoder.num_parameters()
    shared = decoder.memory_projection.num_parameters()
    options = {"cross_attention": "shared", "activation": "gelu", "rng": 0}
    biased = DecoderLayer(**PRE_LN_SIZES, **options).num_parameters()
    per_layer = DecoderLayer(**PRE_LN_SIZES, activation="gelu", rng=0).num_parameters()

    def count(*parts: Layer) -> str:
        return f"{sum(part.num_parameters() for part in parts):,}"

    counted = [
        ["the article's count", "its formula", "it says", "here"],
        ["self-attention", "4 x 768 x 768", "2.36M", count(layer.self_attention)],
        ["cross-attention, W_q and W_o", "2 x 768 x 768", "1.18M", count(layer.cross_attention)],
        ["feed-forward", "2 x 768 x 3072", "4.72M", count(layer.feed_forward)],
        ["norms", "3 x 2 x 768", "4.6K", count(layer.norm1, layer.norm2, layer.norm3)],
        ["a layer", "", "8.26M", f"{one:,}"],
        ["twelve layers", "x 12", "99M", f"{twelve:,}"],
    ]
    ours = [
        ["what it leaves out", "numbers", "a layer", "the stack"],
        ["nothing: as above", "", f"{one:,}", f"{twelve:,}"],
        ["b_1 and b_2 of its feed-forward", f"12 x {biased - one:,}", f"{biased:,}",
         f"{12 * biased:,}"],
        ["W_K and W_V of the memory", f"{shared:,}", f"{one:,}", f"{whole:,}"],
        ["both: all of S1", f"{12 * (biased - one) + shared:,}", f"{biased:,}",
         f"{12 * biased + shared:,}"],
        ["b_1, b_2, W_K and W_V in each layer", f"12 x {per_layer - one:,}", f"{per_layer:,}",
         f"{12 * per_layer:,}"],
    ]
    by_layer = {norm: gradient_norms(norm) for norm in ("pre", "post")}
    ratios = {norm: norms[0] / norms[-1] for norm, norms in by_layer.items()}
    gradients = [
        ["gradient norm of layer", *map(str, range(1, 13))],
        *([f"{norm.capitalize()}-LN", *(f"{n:.0f}" for n in by_layer[norm])]
          for norm in ("pre", "post")),
    ]
    return Report(
        "S8",
        "The article's parameter counts, and Pre-LN beside Post-LN",
        ["The stack of S1, built as the article counts: no biases in the feed-forward."],
        [
            ("x", shape(x), "target vectors"),
            ("memory", shape(memory), "what an encoder gave"),
            ("y", shape(y), "output; the loss is sum(y * dy) with random dy"),
            ("dx", shape(dx), "gradient of x"),
            ("dmemory", shape(dmemory), "gradient of the memory"),
        ],
        *parts_of({"decoder": decoder}),
        [
            aligned(counted, 2),
            "The formula of its feed-forward has the biases b_1 and b_2, its count has not: they "
            "are 3072 + 768. W_K and W_V of the memory it assigns to the encoder; they are there "
            "once, in the stack and in no layer. Counted both ways:",
            aligned(ours, 1),
            "Pre-LN against Post-LN, before any training, on the same data and from the same "
            "weights, at a quarter of the width (d_model 192, d_ff 768):",
            aligned(gradients, 1),
            "Pre-LN leaves the skip path alone, and the gradient gathers on its way back: the "
            f"first layer's is {ratios['pre']:.1f} times the last's. In Post-LN it goes through "
            f"three norms in each layer, and the first layer's is {ratios['post']:.1f} times the "
            "last's. At twelve layers, with these initial weights, neither vanishes; what a "
            "warm-up does shows only in training.",
        ],
    )


def gradient_norms(norm: str) -> list[float]:
    """The norm of each layer's gradient in the stack of S1, at a quarter of its width."""
    rng = np.random.default_rng(8)
    decoder = Decoder(
        12, 192, 12, 768, norm=norm, final_norm=False, activation="gelu",
        cross_attention="shared", rng=rng,
    )
    x, memory, dy = normal(rng, 2, 10, 192), normal(rng, 2, 12, 192), normal(rng, 2, 10, 192)
    _, ctx = decoder.forward(x, memory, causal_mask(10))
    decoder.backward(ctx, dy)
    return [
        sum(float(np.vdot(p.grad, p.grad)) for p in layer.parameters()) ** 0.5
        for layer in decoder.layers
    ]


SYSTEMS: dict[str, list[Callable[[np.random.Generator], Report]]] = {
    "S1": [pre_ln_decoder],
    "S2": [pre_ln_transformer],
    "S3": [language_model],
    "S4": [walkthrough, walkthrough_at_text_sizes],
    "S5": [i_love_you],
    "S6": [part_6_decoder],
    "S7": [part_6_transformer],
    "S8": [counts_and_norms],
}


def build(system: str, seed: int = 0) -> list[Report]:
    """Build a system, run it forward and backward, and tell what came out."""
    reports = []
    for make in SYSTEMS[system]:
        reports.append(make(np.random.default_rng(seed)))
        gc.collect()  # a model and its gradients may be 800 MB: free them before the next
    return reports


# The page


def aligned(rows: list[list[str]], text_columns: int) -> str:
    """A table with the first columns on the left and numbers on the right."""
    rows = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(width, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            (left if i < text_columns else right)(cell, n)
            for i, (cell, n) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )


def indented(text: str, prefix: str = "  ") -> str:
    return textwrap.indent(text, prefix)


def show(report: Report) -> None:
    print(f"{report.name}  {shown(report.title)}")
    print("-" * (len(report.name) + 2 + width(shown(report.title))))
    for line in report.sizes:
        print(f"  {line}")
    print()
    print(indented(table([["array", "shape", ""], *report.shapes])))
    print()
    rows = [["parameters", "one layer", "layers", "all", "of these b", "gradient norm"]]
    for part in report.parts:
        one = f"{part.count // part.layers:,}" if part.layers else ""
        layers = f"x {part.layers}" if part.layers else ""
        rows.append([
            part.name, one, layers, f"{part.count:,}",
            f"{part.biases:,}" if part.biases else "", f"{part.gradient_norm:.3g}",
        ])
    total = sum(part.biases for part in report.parts)
    norm = sum(part.gradient_norm**2 for part in report.parts) ** 0.5
    rows.append(["total", "", "", f"{report.count:,}", f"{total:,}" if total else "",
                 f"{norm:.3g}"])
    print(indented(aligned(rows, 1)))
    print()
    print(indented(gradients_sentence(report)))
    for note in report.notes:
        if "\n" in note:
            print("\n" + indented(note) + "\n")
        else:
            print(textwrap.fill(note, PAGE, initial_indent="  - ", subsequent_indent="    "))
    print()


def gradients_sentence(report: Report) -> str:
    finite = "Every gradient is finite" if report.finite else "NOT EVERY GRADIENT IS FINITE"
    if not report.without_gradient:
        return f"{finite}, and no parameter is without one."
    keys = [name for name in report.without_gradient if name.endswith("W_k.b")]
    rest = [name for name in report.without_gradient if name not in keys]
    sentence = f"{finite}."
    if keys:
        sentence += (
            f" Zero but for rounding: W_k.b, in {len(keys)} places. A bias of the keys adds the\n"
            "same number to all scores of a query, and softmax does not see it."
        )
    if rest:
        sentence += f"\nZERO: {', '.join(rest)}"
    return sentence


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Build the articles' systems S1 to S8 at their own sizes, run each forward and "
        "backward on random data, and print shapes and parameter counts.",
        epilog="S1 Pre-LN decoder stack with shared memory keys and values; S2 Pre-LN "
        "encoder-decoder; S3 decoder-only language model; S4 Post-LN encoder-decoder; S5 its "
        "worked example; S6 Post-LN decoder stack with masks; S7 the whole Transformer; S8 "
        "parameter counts, and Pre-LN beside Post-LN. All of them need about 1.5 GB of memory.",
    )
    parser.add_argument(
        "--system", choices=["all", *SYSTEMS], default="all", help="which one (default: all)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights and the data (default: 0)"
    )
    options = parser.parse_args(arguments)
    prepare(sys.stdout)

    print("THE SYSTEMS OF THE THREE ARTICLES: built, run forward and backward, and counted")
    print("float32; all data random; B batch, S source length, T target length, V vocabulary;")
    print("b: the bias of a linear layer (gamma and beta of the norms are counted, but are no b)\n")
    names = list(SYSTEMS) if options.system == "all" else [options.system]
    summary = [["", "system", "parameters", "seconds"]]
    for name in names:
        started = time.perf_counter()
        reports = build(name, options.seed)
        seconds = (time.perf_counter() - started) / len(reports)
        for report in reports:
            show(report)
            summary.append([report.name, report.title, f"{report.count:,}", f"{seconds:.1f}"])
    if len(names) > 1:
        print(aligned(summary, 2))
    return 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # | less, which was left: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
