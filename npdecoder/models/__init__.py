"""The models and their configs: Transformer (encoder-decoder), LanguageModel (decoder-only)."""

from npdecoder.models.config import LanguageModelConfig, TransformerConfig
from npdecoder.models.language_model import LanguageModel
from npdecoder.models.transformer import Transformer

__all__ = ["LanguageModel", "LanguageModelConfig", "Transformer", "TransformerConfig"]
