"""npdecoder: a Transformer in plain NumPy, its backward pass written by hand and proven."""

from npdecoder.blocks import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    FeedForward,
    MemoryAttention,
    MemoryProjection,
    MultiHeadAttention,
)
from npdecoder.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from npdecoder.core import Layer, Parameter
from npdecoder.decoding import (
    Hypothesis,
    beam_search,
    generate,
    greedy_decode,
    next_token_probabilities,
    sample,
)
from npdecoder.decoding_state import DecodingState
from npdecoder.files import load_weights, save_weights
from npdecoder.gradcheck import gradcheck
from npdecoder.interop import load_torch_state_dict, read_torch_file, torch_state_dict
from npdecoder.layers import (
    GELU,
    CrossEntropy,
    Dropout,
    Embedding,
    LayerNorm,
    LearnedPositions,
    Linear,
    ReLU,
    ScaledDotProductAttention,
    SinusoidalPositions,
    Softmax,
    Unembedding,
    log_softmax,
    softmax,
)
from npdecoder.layers.tiled_attention import TiledAttention
from npdecoder.masks import causal_mask, padding_mask, target_mask
from npdecoder.models import LanguageModel, LanguageModelConfig, Transformer, TransformerConfig
from npdecoder.optim import (
    SGD,
    Adam,
    AdamW,
    clip_grad_norm,
    constant_schedule,
    cosine_schedule,
    decay_groups,
    linear_schedule,
    noam_schedule,
)
from npdecoder.trace import Trace

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022  (grouped as the README explains them)
    # core
    "Parameter",
    "Layer",
    # masks
    "causal_mask",
    "padding_mask",
    "target_mask",
    # layers
    "Linear",
    "Embedding",
    "Unembedding",
    "SinusoidalPositions",
    "LearnedPositions",
    "Softmax",
    "softmax",
    "log_softmax",
    "LayerNorm",
    "ReLU",
    "GELU",
    "Dropout",
    "ScaledDotProductAttention",
    "TiledAttention",
    "CrossEntropy",
    # blocks
    "MultiHeadAttention",
    "MemoryProjection",
    "MemoryAttention",
    "FeedForward",
    "EncoderLayer",
    "Encoder",
    "DecoderLayer",
    "Decoder",
    # models
    "TransformerConfig",
    "Transformer",
    "LanguageModelConfig",
    "LanguageModel",
    # proof
    "gradcheck",
    "Trace",
    # training
    "SGD",
    "Adam",
    "AdamW",
    "decay_groups",
    "clip_grad_norm",
    "constant_schedule",
    "linear_schedule",
    "cosine_schedule",
    "noam_schedule",
    # decoding
    "greedy_decode",
    "sample",
    "generate",
    "beam_search",
    "Hypothesis",
    "next_token_probabilities",
    "DecodingState",
    # files
    "save_weights",
    "load_weights",
    "save_checkpoint",
    "load_checkpoint",
    "Checkpoint",
    # PyTorch
    "load_torch_state_dict",
    "torch_state_dict",
    "read_torch_file",
]
