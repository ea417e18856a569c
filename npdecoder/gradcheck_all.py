"""gradcheck of every layer, block and model, with sizes, options and weights drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from npdecoder import blocks, layers
from npdecoder.core import Array, Layer
from npdecoder.gradcheck import GradcheckReport, gradcheck
from npdecoder.layers.tiled_attention import TiledAttention
from npdecoder.masks import causal_mask, padding_mask
from npdecoder.models import LanguageModel, LanguageModelConfig, Transformer, TransformerConfig
from npdecoder.models.token_model import TokenModel


class Checked(NamedTuple):
    name: str
    options: str
    report: GradcheckReport


def gradcheck_all(seed: int = 0) -> Iterator[Checked]:
    """Check everything, one at a time, in float64."""
    for name, case in CASES.items():
        draw = Draw(np.random.default_rng([seed, *name.encode()]))
        layer, inputs, keywords = case(draw)
        draw.weights(layer)
        mode = "directional" if isinstance(layer, TokenModel) else "full"
        report = gradcheck(layer, *inputs, mode=mode, seed=seed, **keywords)
        yield Checked(name, draw.options(), report)


class Draw:
    """Sizes, options and arrays from one generator; remembers the options to show them."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.chosen: dict[str, Any] = {}
        # distinct primes: no wrong transpose fits. d is not 2: a LayerNorm of two numbers gives
        # nearly always (-1, 1), and leaves gradients that rounding hides
        self.d = int(rng.choice([3, 5, 7]))
        self.B, self.T, self.S = (int(p) for p in rng.permutation([2, 3, 5, 7]) if p != self.d)

    def option(self, name: str, *choices: Any) -> Any:
        choice = choices[int(self.rng.integers(len(choices)))]
        self.chosen[name] = choice
        return choice

    def options(self) -> str:
        return " ".join(f"{name}={choice}" for name, choice in self.chosen.items())

    def array(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape)

    def ids(self, size: int, *shape: int) -> Array:
        return self.rng.integers(0, size, shape)

    def mask(self, *shape: int) -> Array:
        """Booleans, and among them a query that may attend to nothing."""
        mask = self.rng.random(shape) < 0.7
        mask[..., :1, :] &= self.rng.random() < 0.5
        return mask

    def weights(self, layer: Layer) -> None:
        """Every parameter away from its start: gamma = 1 or beta = 0 would hide mistakes."""
        for parameter in layer.parameters():
            parameter.value += 0.3 * self.rng.standard_normal(parameter.shape)

    def layer_options(self) -> dict[str, Any]:
        return {
            "d_ff": self.option("d_ff", 3, 5, 11),
            "d_k": self.option("d_k", 2, 3),
            "d_v": self.option("d_v", 4, 5),
            "norm": self.option("norm", "pre", "post"),
            "norm_bias": self.option("norm_bias", True, False),
            "attention_bias": self.option("attention_bias", True, False),
            "feed_forward_bias": self.option("feed_forward_bias", True, False),
            "activation": self.option("activation", "relu", "gelu", "gelu_tanh"),
            "dropout": self.option("dropout", 0.0, 0.3),
            "rng": self.rng,
            "dtype": np.float64,
        }


Case = tuple[Layer, tuple[Any, ...], dict[str, Any]]
F64: dict[str, Any] = {"dtype": np.float64}


def _linear(r: Draw) -> Case:
    layer = layers.Linear(r.d, r.S, r.option("bias", True, False), rng=r.rng, **F64)
    return layer, (r.array(r.B, r.T, r.d),), {}


def _embedding(r: Draw) -> Case:
    layer = layers.Embedding(r.S, r.d, r.option("scale", True, False), rng=r.rng, **F64)
    return layer, (r.ids(r.S, r.B, r.T),), {}


def _unembedding(r: Draw) -> Case:
    embedding = layers.Embedding(r.S, r.d, rng=r.rng, **F64)
    layer = layers.Unembedding(embedding, r.option("bias", True, False))
    return layer, (r.array(r.B, r.T, r.d),), {}


def _sinusoidal(r: Draw) -> Case:
    layer = layers.SinusoidalPositions(2 * r.d, 11)
    return layer, (r.array(r.B, r.T, 2 * r.d),), {"positions": r.ids(11, r.B, r.T)}


def _learned(r: Draw) -> Case:
    layer = layers.LearnedPositions(11, r.d, rng=r.rng, **F64)
    return layer, (r.array(r.B, r.T, r.d),), {"positions": r.ids(11, r.B, r.T)}


def _softmax(r: Draw) -> Case:
    return layers.Softmax(), (r.array(r.B, r.T, r.d),), {}


def _layer_norm(r: Draw) -> Case:
    layer = layers.LayerNorm(r.d, bias=r.option("bias", True, False), **F64)
    return layer, (r.array(r.B, r.T, r.d),), {}


def _relu(r: Draw) -> Case:
    return layers.ReLU(), (r.array(r.B, r.T, r.d),), {}


def _gelu(r: Draw) -> Case:
    layer = layers.GELU(r.option("approximate", "none", "tanh"))
    return layer, (r.array(r.B, r.T, r.d),), {}


def _dropout(r: Draw) -> Case:
    layer = layers.Dropout(r.option("p", 0.0, 0.3, 1.0))
    return layer, (r.array(r.B, r.T, r.d),), {"rng": np.random.default_rng(0)}


def _attention(r: Draw) -> Case:
    return _attention_case(r, layers.ScaledDotProductAttention(r.option("dropout", 0.0, 0.3)))


def _tiled_attention(r: Draw) -> Case:
    dropout, causal = r.option("dropout", 0.0, 0.3), r.option("causal", False, True)
    return _attention_case(r, TiledAttention(dropout, causal, tile=2))


def _attention_case(r: Draw, layer: Layer) -> Case:
    q, k, v = r.array(r.B, 2, r.T, r.d), r.array(r.B, 2, r.S, r.d), r.array(r.B, 2, r.S, 4)
    mask = r.mask(r.B, 1, r.T, r.S)
    return layer, (q, k, v), {"mask": mask, "rng": np.random.default_rng(0)}


def _cross_entropy(r: Draw) -> Case:
    layer = layers.CrossEntropy(
        r.option("ignore_index", None, 0), r.option("label_smoothing", 0.0, 0.1)
    )
    return layer, (r.array(r.B, r.T, 11), r.ids(11, r.B, r.T)), {}


def _multi_head_attention(r: Draw) -> Case:
    d_k, d_v = r.option("d_k", 2, 3), r.option("d_v", 4, 5)
    bias, dropout = r.option("bias", True, False), r.option("dropout", 0.0, 0.3)
    layer = blocks.MultiHeadAttention(r.d, 2, d_k, d_v, bias, dropout, rng=r.rng, **F64)
    inputs = r.array(r.B, r.T, r.d), r.array(r.B, r.S, r.d), r.array(r.B, r.S, r.d)
    return layer, inputs, {"mask": r.mask(r.B, 1, r.T, r.S), "rng": np.random.default_rng(0)}


def _memory_projection(r: Draw) -> Case:
    layer = blocks.MemoryProjection(r.d, 2, 3, 4, r.option("bias", True, False), rng=r.rng, **F64)
    return layer, (r.array(r.B, r.S, r.d),), {}


def _memory_attention(r: Draw) -> Case:
    layer = blocks.MemoryAttention(r.d, 2, 3, 4, r.option("bias", True, False), rng=r.rng, **F64)
    inputs = r.array(r.B, r.T, r.d), r.array(r.B, 2, r.S, 3), r.array(r.B, 2, r.S, 4)
    return layer, inputs, {"mask": r.mask(r.T, r.S)}


def _feed_forward(r: Draw) -> Case:
    activation = r.option("activation", "relu", "gelu", "gelu_tanh")
    dropout = r.option("dropout", 0.0, 0.3)
    layer = blocks.FeedForward(r.d, 11, activation, dropout=dropout, rng=r.rng, **F64)
    return layer, (r.array(r.B, r.T, r.d),), {"rng": np.random.default_rng(0)}


def _encoder_layer(r: Draw) -> Case:
    layer = blocks.EncoderLayer(r.d, 2, **r.layer_options())
    keywords = {"mask": r.mask(r.B, 1, 1, r.T), "rng": np.random.default_rng(0)}
    return layer, (r.array(r.B, r.T, r.d),), keywords


def _encoder(r: Draw) -> Case:
    layer = blocks.Encoder(2, r.d, 2, **r.layer_options())
    keywords = {"mask": r.mask(r.B, 1, 1, r.T), "rng": np.random.default_rng(0)}
    return layer, (r.array(r.B, r.T, r.d),), keywords


def _decoder_layer(r: Draw) -> Case:
    cross = r.option("cross_attention", "per_layer", "shared", "none")
    options = r.layer_options()
    layer = blocks.DecoderLayer(r.d, 2, cross_attention=cross, **options)
    memory: Any = {
        "per_layer": r.array(r.B, r.S, r.d),
        "shared": (r.array(r.B, 2, r.S, options["d_k"]), r.array(r.B, 2, r.S, options["d_v"])),
        "none": None,
    }[cross]
    return layer, (r.array(r.B, r.T, r.d), memory), _decoder_masks(r, cross)


def _decoder(r: Draw) -> Case:
    cross = r.option("cross_attention", "per_layer", "shared", "none")
    layer = blocks.Decoder(2, r.d, 2, cross_attention=cross, **r.layer_options())
    memory = None if cross == "none" else r.array(r.B, r.S, r.d)
    return layer, (r.array(r.B, r.T, r.d), memory), _decoder_masks(r, cross)


def _decoder_masks(r: Draw, cross: str) -> dict[str, Any]:
    padding = padding_mask(r.ids(3, r.B, r.S), 0)
    return {
        "target_mask": causal_mask(r.T),
        "memory_mask": None if cross == "none" else padding,
        "rng": np.random.default_rng(0),
    }


def _transformer(r: Draw) -> Case:
    options = r.layer_options()
    rng, dtype = options.pop("rng"), options.pop("dtype")
    config = TransformerConfig(
        11,
        11,
        d_model=2 * r.d,
        num_heads=2,
        num_encoder_layers=2,
        num_decoder_layers=2,
        pad_id=0,
        max_len=11,
        cross_attention=r.option("cross_attention", "per_layer", "shared"),
        positions=r.option("positions", "sinusoidal", "learned"),
        tie_embeddings=r.option("tie_embeddings", "none", "target_output", "source_target", "all"),
        **options,
    )
    inputs = r.ids(11, r.B, r.S), r.ids(11, r.B, r.T)
    return Transformer(config, rng, dtype=dtype), inputs, {"rng": np.random.default_rng(0)}


def _language_model(r: Draw) -> Case:
    options = r.layer_options()
    rng, dtype = options.pop("rng"), options.pop("dtype")
    config = LanguageModelConfig(
        11,
        d_model=2 * r.d,
        num_heads=2,
        num_layers=2,
        pad_id=r.option("pad_id", None, 0),
        max_len=11,
        positions=r.option("positions", "sinusoidal", "learned"),
        tie_embeddings=r.option("tie_embeddings", "none", "target_output"),
        **options,
    )
    model = LanguageModel(config, rng, dtype=dtype)
    return model, (r.ids(11, r.B, r.T),), {"rng": np.random.default_rng(0)}


CASES: dict[str, Callable[[Draw], Case]] = {
    "Linear": _linear,
    "Embedding": _embedding,
    "Unembedding": _unembedding,
    "SinusoidalPositions": _sinusoidal,
    "LearnedPositions": _learned,
    "Softmax": _softmax,
    "LayerNorm": _layer_norm,
    "ReLU": _relu,
    "GELU": _gelu,
    "Dropout": _dropout,
    "ScaledDotProductAttention": _attention,
    "TiledAttention": _tiled_attention,
    "CrossEntropy": _cross_entropy,
    "MultiHeadAttention": _multi_head_attention,
    "MemoryProjection": _memory_projection,
    "MemoryAttention": _memory_attention,
    "FeedForward": _feed_forward,
    "EncoderLayer": _encoder_layer,
    "Encoder": _encoder,
    "DecoderLayer": _decoder_layer,
    "Decoder": _decoder,
    "Transformer": _transformer,
    "LanguageModel": _language_model,
}
