"""The sizes and options of a model, checked, and storable as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from npdecoder.blocks.feed_forward import ACTIVATIONS
from npdecoder.blocks.multi_head_attention import head_widths
from npdecoder.core import fraction, one_of, positive_int

TIE_EMBEDDINGS = ("none", "target_output", "source_target", "all")


@dataclass(frozen=True)
class TransformerConfig:
    """Of an encoder-decoder Transformer. A frozen dataclass: dataclasses.asdict gives plain values.

    source_vocab_size, target_vocab_size: ids are in [0, size)
    d_model, num_heads, num_encoder_layers, num_decoder_layers, d_ff, d_k, d_v: sizes; None for
        d_ff is 4 d_model, for d_k and d_v d_model / num_heads
    norm: "pre" or "post"; final_norm (None: only for "pre"), norm_bias, norm_eps: of the LayerNorms
    attention_bias, feed_forward_bias, output_bias: whether these Linears have a b
    activation: "relu", "gelu" (erf form) or "gelu_tanh"
    cross_attention: "per_layer", or "shared": one projection of the memory for all layers
    dropout: the rate inside the feed-forward and before each residual sum
    attention_dropout, position_dropout: on the attention weights, and on embedding + position;
        None: the same as dropout
    pad_id: the id of padding, which nothing attends to; None: no padding anywhere
    max_len: the longest sequence
    positions: "sinusoidal" or "learned"
    scale_embeddings: whether embeddings are multiplied by sqrt(d_model)
    tie_embeddings: which of the three tables are one Parameter: "none", "target_output" (the output
        layer uses the target embedding's), "source_target", or "all" three

    Errors: ValueError or TypeError that names the field.
    """

    source_vocab_size: int
    target_vocab_size: int
    d_model: int = 512
    num_heads: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
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
    cross_attention: str = "per_layer"
    dropout: float = 0.0
    attention_dropout: float | None = None
    position_dropout: float | None = None
    pad_id: int | None = None
    max_len: int = 512
    positions: str = "sinusoidal"
    scale_embeddings: bool = True
    tie_embeddings: str = "none"

    def __post_init__(self) -> None:
        for name in (
            "source_vocab_size",
            "target_vocab_size",
            "num_encoder_layers",
            "num_decoder_layers",
            "max_len",
        ):
            positive_int(name, getattr(self, name))
        head_widths(self.d_model, self.num_heads, self.d_k, self.d_v)
        if self.d_ff is not None:
            positive_int("d_ff", self.d_ff)
        one_of("norm", self.norm, ("pre", "post"))
        one_of("activation", self.activation, ACTIVATIONS)
        if self.cross_attention == "none":
            raise ValueError("cross_attention is 'none', but an encoder-decoder needs it")
        one_of("cross_attention", self.cross_attention, ("per_layer", "shared"))
        one_of("positions", self.positions, ("sinusoidal", "learned"))
        one_of("tie_embeddings", self.tie_embeddings, TIE_EMBEDDINGS)
        for name in ("dropout", "attention_dropout", "position_dropout"):
            if getattr(self, name) is not None:
                fraction(name, getattr(self, name))
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"d_model is {self.d_model}: sinusoidal positions need an even number")
        if self.tie_embeddings in ("source_target", "all") and (
            self.source_vocab_size != self.target_vocab_size
        ):
            raise ValueError(
                f"tie_embeddings is {self.tie_embeddings!r}, but source_vocab_size is "
                f"{self.source_vocab_size} and target_vocab_size {self.target_vocab_size}"
            )
        smaller = min(self.source_vocab_size, self.target_vocab_size)
        if self.pad_id is not None and not 0 <= self.pad_id < smaller:
            raise ValueError(f"pad_id is {self.pad_id}, expected an id in [0, {smaller}), or None")
