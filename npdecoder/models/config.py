"""The sizes and options of a model, checked, and storable as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from npdecoder.blocks.feed_forward import ACTIVATIONS
from npdecoder.blocks.multi_head_attention import head_widths
from npdecoder.core import flag, fraction, integer, non_negative, one_of, positive_int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What all models share. Frozen dataclasses: dataclasses.asdict gives plain values.

    d_model, num_heads, d_ff, d_k, d_v: sizes; None for d_ff is 4 d_model, for d_k and d_v
        d_model / num_heads
    norm: "pre" or "post"; final_norm (None: only for "pre"), norm_bias, norm_eps: of the LayerNorms
    attention_bias, feed_forward_bias, output_bias: whether these Linears have a b
    activation: "relu", "gelu" (erf form) or "gelu_tanh"
    dropout: the rate inside the feed-forward and before each residual sum
    attention_dropout, position_dropout: on the attention weights, and on embedding + position;
        None: the same as dropout
    pad_id: the id of padding, which nothing attends to; None: no padding anywhere
    max_len: the longest sequence
    positions: "sinusoidal" or "learned"
    scale_embeddings: whether embeddings are multiplied by sqrt(d_model)

    Errors: ValueError or TypeError that names the field.
    """

    d_model: int = 512
    num_heads: int = 8
    d_ff: int | None = None
    d_k: int | None = None
    d_v: int | None = None
    norm: str = "pre"
    final_norm: bool | None = None
    norm_bias: bool = True
    norm_eps: float = 1e-5
    attention_bias: bool = False
    feed_forward_bias: bool = True
    output_bias: bool = True
    activation: str = "relu"
    dropout: float = 0.0
    attention_dropout: float | None = None
    position_dropout: float | None = None
    pad_id: int | None = None
    max_len: int = 512
    positions: str = "sinusoidal"
    scale_embeddings: bool = True

    def __post_init__(self) -> None:
        for f in fields(self):  # plain Python values: a NumPy number is no JSON
            value = getattr(self, f.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, f.name, value.item())
            if isinstance(f.default, bool):
                flag(f.name, value)
        if self.final_norm is not None and not isinstance(self.final_norm, bool):
            raise TypeError(f"final_norm is {self.final_norm!r}, expected True, False or None")
        head_widths(self.d_model, self.num_heads, self.d_k, self.d_v)
        if self.d_ff is not None:
            positive_int("d_ff", self.d_ff)
        positive_int("max_len", self.max_len)
        non_negative("norm_eps", self.norm_eps)
        one_of("norm", self.norm, ("pre", "post"))
        one_of("activation", self.activation, ACTIVATIONS)
        one_of("positions", self.positions, ("sinusoidal", "learned"))
        for name in ("dropout", "attention_dropout", "position_dropout"):
            if name == "dropout" or getattr(self, name) is not None:
                fraction(name, getattr(self, name))
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"d_model is {self.d_model}: sinusoidal positions need an even number")

    def stack_options(self) -> dict[str, Any]:
        """The fields that an Encoder and a Decoder take, as keywords."""
        sizes = ("d_model", "num_heads", "d_ff", "d_k", "d_v")
        norms = ("norm", "final_norm", "norm_bias", "norm_eps")
        others = ("attention_bias", "feed_forward_bias", "activation")
        rates = ("dropout", "attention_dropout")
        return {name: getattr(self, name) for name in (*sizes, *norms, *others, *rates)}

    def _check_pad_id(self, vocab_size: int) -> None:
        if self.pad_id is not None and integer("pad_id", self.pad_id, 0) >= vocab_size:
            raise ValueError(
                f"pad_id is {self.pad_id}, expected an id in [0, {vocab_size}), or None"
            )


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """Of an encoder-decoder Transformer; the other fields are those of ModelConfig.

    source_vocab_size, target_vocab_size: ids are in [0, size)
    num_encoder_layers, num_decoder_layers
    cross_attention: "per_layer", or "shared": one projection of the memory for all layers
    tie_embeddings: which of the three tables are one Parameter: "none", "target_output" (the output
        layer uses the target embedding's), "source_target", or "all" three
    """

    source_vocab_size: int = field(kw_only=False)
    target_vocab_size: int = field(kw_only=False)
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    cross_attention: str = "per_layer"
    tie_embeddings: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {name: getattr(self, name) for name in ("source_vocab_size", "target_vocab_size")}
        layers = ("num_encoder_layers", "num_decoder_layers")
        for name in (*sizes, *layers):
            positive_int(name, getattr(self, name))
        if isinstance(self.cross_attention, str) and self.cross_attention == "none":
            raise ValueError("cross_attention is 'none', but an encoder-decoder needs it")
        one_of("cross_attention", self.cross_attention, ("per_layer", "shared"))
        ties = ("none", "target_output", "source_target", "all")
        tie = one_of("tie_embeddings", self.tie_embeddings, ties)
        if tie in ("source_target", "all") and len(set(sizes.values())) > 1:
            raise ValueError(f"tie_embeddings is {tie!r}, but the vocabularies differ: {sizes}")
        self._check_pad_id(min(sizes.values()))


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(ModelConfig):
    """Of a decoder-only language model; the other fields are those of ModelConfig.

    vocab_size: ids are in [0, vocab_size)
    num_layers
    tie_embeddings: "none", or "target_output": the output layer uses the embedding's table
    """

    vocab_size: int = field(kw_only=False)
    num_layers: int = 6
    tie_embeddings: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_int("vocab_size", self.vocab_size)
        positive_int("num_layers", self.num_layers)
        one_of("tie_embeddings", self.tie_embeddings, ("none", "target_output"))
        self._check_pad_id(self.vocab_size)
