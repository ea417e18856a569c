"""The calculus: one operation a file, forward and backward side by side."""

from npdecoder.layers.activations import GELU, ReLU, erf
from npdecoder.layers.attention import ScaledDotProductAttention
from npdecoder.layers.cross_entropy import CrossEntropy
from npdecoder.layers.dropout import Dropout
from npdecoder.layers.embedding import Embedding, Unembedding
from npdecoder.layers.layer_norm import LayerNorm
from npdecoder.layers.linear import Linear
from npdecoder.layers.positions import LearnedPositions, SinusoidalPositions
from npdecoder.layers.softmax import Softmax, log_softmax, softmax

__all__ = [
    "GELU",
    "CrossEntropy",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "ReLU",
    "ScaledDotProductAttention",
    "SinusoidalPositions",
    "Softmax",
    "Unembedding",
    "erf",
    "log_softmax",
    "softmax",
]
