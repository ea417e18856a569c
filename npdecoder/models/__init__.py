"""The models: a config and the Transformer (encoder-decoder)."""

from npdecoder.models.config import TransformerConfig
from npdecoder.models.transformer import Transformer

__all__ = ["Transformer", "TransformerConfig"]
