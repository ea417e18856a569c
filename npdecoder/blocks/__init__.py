"""The wiring: forward is calls of layers, backward the same calls in reverse, fan-out is a sum."""

from npdecoder.blocks.decoder import Decoder, DecoderLayer
from npdecoder.blocks.encoder import Encoder, EncoderLayer
from npdecoder.blocks.feed_forward import FeedForward
from npdecoder.blocks.multi_head_attention import (
    MemoryAttention,
    MemoryProjection,
    MultiHeadAttention,
)
from npdecoder.blocks.residual import Residual

__all__ = [
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "MemoryAttention",
    "MemoryProjection",
    "MultiHeadAttention",
    "Residual",
]
