import json
from dataclasses import FrozenInstanceError, asdict, fields

import numpy as np
import pytest

from npdecoder import TransformerConfig


def test_a_config_is_plain_values():
    config = TransformerConfig(11, 13, d_model=6, num_heads=3, pad_id=0, dropout=0.1)
    stored = json.loads(json.dumps(asdict(config)))
    assert TransformerConfig(**stored) == config
    with pytest.raises(FrozenInstanceError):
        config.d_model = 7


def test_defaults_are_those_of_the_paper():
    config = TransformerConfig(11, 13)
    assert (config.d_model, config.num_heads) == (512, 8)
    assert config.num_encoder_layers == config.num_decoder_layers == 6
    assert config.pad_id is None
    assert config.attention_dropout is config.position_dropout is None


BAD = [
    ("source_vocab_size", 0, ValueError),
    ("target_vocab_size", -3, ValueError),
    ("target_vocab_size", 3.0, TypeError),
    ("d_model", 0, ValueError),
    ("d_model", "6", TypeError),
    ("num_heads", 0, ValueError),
    ("num_heads", 4, ValueError),
    ("num_encoder_layers", 0, ValueError),
    ("num_decoder_layers", True, TypeError),
    ("d_ff", 0, ValueError),
    ("d_ff", 2.5, TypeError),
    ("d_k", 0, ValueError),
    ("d_v", -1, ValueError),
    ("norm", "middle", ValueError),
    ("norm", None, ValueError),
    ("norm_eps", -1.0, ValueError),
    ("norm_eps", np.nan, ValueError),
    ("activation", "swish", ValueError),
    ("cross_attention", "none", ValueError),
    ("cross_attention", "both", ValueError),
    ("dropout", 1.5, ValueError),
    ("dropout", np.nan, ValueError),
    ("attention_dropout", -0.1, ValueError),
    ("position_dropout", 2, ValueError),
    ("pad_id", -1, ValueError),
    ("pad_id", 11, ValueError),
    ("pad_id", 1.5, TypeError),
    ("max_len", 0, ValueError),
    ("positions", "rotary", ValueError),
    ("tie_embeddings", "both", ValueError),
    ("tie_embeddings", True, ValueError),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD)
def test_every_field_is_checked(name, value, error):
    options = {"source_vocab_size": 11, "target_vocab_size": 13, "d_model": 6, "num_heads": 3}
    with pytest.raises(error, match=rf"\b{name}\b"):
        TransformerConfig(**{**options, name: value})


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("norm", ["pre", "post"]),
        ("activation", ["relu", "gelu", "gelu_tanh"]),
        ("cross_attention", ["per_layer", "shared"]),
        ("positions", ["sinusoidal", "learned"]),
        ("tie_embeddings", ["none", "target_output", "source_target", "all"]),
    ],
)
def test_an_unknown_word_lists_the_known_ones(name, known):
    expected = ", ".join(map(repr, known))
    with pytest.raises(ValueError, match=f"^{name} is 'nonsense', expected one of {expected}$"):
        TransformerConfig(11, 13, **{name: "nonsense"})


def test_fields_that_must_agree():
    with pytest.raises(ValueError, match=r"^d_model 7 is not divisible by num_heads 3"):
        TransformerConfig(11, 13, d_model=7, num_heads=3)
    with pytest.raises(ValueError, match=r"^d_model is 9: sinusoidal"):
        TransformerConfig(11, 13, d_model=9, num_heads=3)
    assert TransformerConfig(11, 13, d_model=9, num_heads=3, positions="learned").d_model == 9
    assert TransformerConfig(11, 13, d_model=8, num_heads=3, d_k=2, d_v=5).d_k == 2
    for tie in "source_target", "all":
        with pytest.raises(ValueError, match=r"^tie_embeddings is .*11.*13"):
            TransformerConfig(11, 13, tie_embeddings=tie)
        assert TransformerConfig(11, 11, tie_embeddings=tie).tie_embeddings == tie
    assert TransformerConfig(11, 13, tie_embeddings="target_output").output_bias


def test_every_field_that_can_be_wrong_is_tried():
    """Booleans take anything that is true or false; all other fields are in the list above."""
    tried = {name for name, _, _ in BAD}
    others = {field.name for field in fields(TransformerConfig)} - tried
    assert others == {
        "final_norm",
        "norm_bias",
        "attention_bias",
        "feed_forward_bias",
        "output_bias",
        "scale_embeddings",
    }


def test_numpy_numbers_become_plain_ones():
    config = TransformerConfig(
        np.int64(11), 13, d_model=np.int32(6), num_heads=3, dropout=np.float32(0.5),
        norm_bias=np.True_,
    )
    assert json.loads(json.dumps(asdict(config))) == asdict(config)
    assert type(config.d_model) is int
    assert config.norm_bias is True


@pytest.mark.parametrize("name", ["final_norm", "norm_bias", "attention_bias", "scale_embeddings"])
@pytest.mark.parametrize("value", ["no", 0, 1.0])
def test_switches_are_booleans(name, value):
    with pytest.raises(TypeError, match=name):
        TransformerConfig(11, 13, d_model=6, num_heads=3, **{name: value})
