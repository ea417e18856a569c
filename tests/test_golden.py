"""Outputs and gradients against PyTorch's, which make_golden.py wrote to golden/*.npz in float64.

make_golden.py says what the arrays are. Here each file is named beside the layer that must give the
same: every output, every input's gradient and every parameter's gradient, to 1e-10; and the
optimizers' values after every step, to 1e-12.
"""

from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from npdecoder import (
    GELU,
    CrossEntropy,
    Decoder,
    DecoderLayer,
    Embedding,
    Encoder,
    EncoderLayer,
    LayerNorm,
    LearnedPositions,
    Linear,
    MultiHeadAttention,
    ReLU,
    ScaledDotProductAttention,
    SinusoidalPositions,
    Softmax,
    Transformer,
    TransformerConfig,
    Unembedding,
    log_softmax,
    softmax,
)
from npdecoder.core import Layer, Parameter
from npdecoder.interop import load_torch_state_dict
from npdecoder.optim import SGD, Adam, AdamW

FOLDER = Path(__file__).with_name("golden")
PAD = 2
SIZES = (6, 2, 8)  # d_model, num_heads, d_ff
PRE_GELU = {"norm": "pre", "activation": "gelu", "attention_bias": True}
POST_RELU = {"norm": "post", "activation": "relu", "attention_bias": True}
PRE = {"norm": "pre", "attention_bias": True}
POST = {"norm": "post", "attention_bias": True, "final_norm": False}
NO_BIASES = {"activation": "gelu_tanh", "norm_eps": 0.3, "norm_bias": False,
             "attention_bias": False, "feed_forward_bias": False}


class Tied(Layer):
    """Ids to logits with one table, to a loss."""

    def __init__(self):
        self.embedding = Embedding(11, 6)
        self.output = Unembedding(self.embedding, bias=True)
        self.loss = CrossEntropy(ignore_index=PAD)

    def forward(self, ids, targets):
        x, embedding = self.embedding.forward(ids)
        logits, output = self.output.forward(x)
        loss, ctx = self.loss.forward(logits, targets)
        return loss, (embedding, output, ctx)

    def backward(self, ctx, dloss):
        embedding, output, loss = ctx
        dlogits = self.loss.backward(loss, dloss)
        return self.embedding.backward(embedding, self.output.backward(output, dlogits))


class EncoderDecoder(Layer):
    """What torch.nn.Transformer is; it always ends with norms."""

    def __init__(self, norm, activation):
        options = {"norm": norm, "activation": activation, "attention_bias": True}
        self.encoder = Encoder(2, *SIZES, final_norm=True, **options)
        self.decoder = Decoder(2, *SIZES, final_norm=True, **options)

    def forward(self, source, target, source_mask, target_mask):
        memory, encoder = self.encoder.forward(source, source_mask)
        y, decoder = self.decoder.forward(target, memory, target_mask, source_mask)
        return y, (encoder, decoder)

    def backward(self, ctx, dy):
        encoder, decoder = ctx
        dtarget, dmemory = self.decoder.backward(decoder, dy)
        return self.encoder.backward(encoder, dmemory), dtarget


NN_TRANSFORMERS = {
    f"nn_transformer_{norm}_{activation}": partial(EncoderDecoder, norm, activation)
    for norm in ("post", "pre") for activation in ("relu", "gelu")
}

LAYERS = {
    "linear": lambda: Linear(5, 7),
    "linear_no_bias": lambda: Linear(5, 7, bias=False),
    "embedding": lambda: Embedding(11, 6),
    "embedding_scaled": lambda: Embedding(11, 6, scale=True),
    "tied_embedding": Tied,
    "sinusoidal_positions": lambda: SinusoidalPositions(6, 23),
    "sinusoidal_positions_far": lambda: SinusoidalPositions(6, 5000),
    "learned_positions": lambda: LearnedPositions(9, 6),
    "layer_norm_rank2": lambda: LayerNorm(5),
    "layer_norm_rank4": lambda: LayerNorm(5),
    "layer_norm_eps": lambda: LayerNorm(5, eps=0.3),
    "layer_norm_no_bias": lambda: LayerNorm(5, bias=False),
    "softmax": Softmax,
    "relu": ReLU,
    "gelu_none": lambda: GELU("none"),
    "gelu_tanh": lambda: GELU("tanh"),
    "cross_entropy_mean": CrossEntropy,
    "cross_entropy_ignore_minus_100": lambda: CrossEntropy(-100),
    "cross_entropy_ignore_class": lambda: CrossEntropy(4),
    "cross_entropy_smoothing": lambda: CrossEntropy(label_smoothing=0.15),
    "cross_entropy_smoothing_ignore_minus_100": lambda: CrossEntropy(-100, 0.15),
    "cross_entropy_smoothing_ignore_class": lambda: CrossEntropy(4, 0.15),
    "attention_bool_mask": ScaledDotProductAttention,
    "attention_bool_mask_2d": ScaledDotProductAttention,
    "attention_float_mask": ScaledDotProductAttention,
    "attention_float_mask_inf": ScaledDotProductAttention,
    "attention_scale": ScaledDotProductAttention,
    "multi_head_self_causal": lambda: MultiHeadAttention(6, 2, bias=True),
    "multi_head_cross_padding": lambda: MultiHeadAttention(6, 2, bias=True),
    "multi_head_no_bias": lambda: MultiHeadAttention(6, 2),
    "multi_head_bool_mask": lambda: MultiHeadAttention(6, 2, bias=True),
    "multi_head_float_mask": lambda: MultiHeadAttention(6, 2, bias=True),
    "encoder_layer_pre_gelu": lambda: EncoderLayer(*SIZES, **PRE_GELU),
    "encoder_layer_post_relu": lambda: EncoderLayer(*SIZES, **POST_RELU),
    "encoder_layer_no_biases": lambda: EncoderLayer(*SIZES, **NO_BIASES),
    "encoder_layer_causal": lambda: EncoderLayer(*SIZES, **PRE),
    "encoder_pre_final_norm": lambda: Encoder(2, *SIZES, **PRE),
    "encoder_post_no_final_norm": lambda: Encoder(2, *SIZES, **POST),
    "decoder_layer_pre_gelu": lambda: DecoderLayer(*SIZES, **PRE_GELU),
    "decoder_layer_post_relu": lambda: DecoderLayer(*SIZES, **POST_RELU),
    "decoder_layer_no_biases": lambda: DecoderLayer(*SIZES, **NO_BIASES),
    "decoder_layer_no_masks": lambda: DecoderLayer(*SIZES, **PRE),
    "decoder_pre_final_norm": lambda: Decoder(2, *SIZES, **PRE),
    "decoder_post_no_final_norm": lambda: Decoder(2, *SIZES, **POST),
    **NN_TRANSFORMERS,
}

FUNCTIONS = {  # no layer, and so no backward
    "log_softmax": log_softmax,
    "softmax_axis": lambda x: softmax(x, axis=1),
}

# vocabulary sizes, layers of encoder and decoder, other options
TRANSFORMERS = {
    "transformer_pre_sinusoidal": (17, 13, 1, 2, {
        "norm": "pre", "activation": "relu", "positions": "sinusoidal", "scale_embeddings": True,
        "final_norm": True, "tie_embeddings": "none",
    }),
    "transformer_post_learned_tied_output": (17, 13, 2, 1, {
        "norm": "post", "activation": "gelu", "positions": "learned", "scale_embeddings": False,
        "final_norm": False, "tie_embeddings": "target_output", "max_len": 9,
    }),
    "transformer_post_all_tied_inner_padding": (13, 13, 1, 1, {
        "norm": "post", "activation": "relu", "positions": "sinusoidal", "scale_embeddings": True,
        "final_norm": True, "tie_embeddings": "all",
    }),
}

OPTIMIZERS = {"adam": Adam, "adamw": AdamW}


def load(name):
    """The arrays of a file, read-only, and among them those whose names start with param/."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        golden = {key: file[key] for key in file.files}
    for array in golden.values():
        array.setflags(write=False)
    return golden, part(golden, "param/")


def part(golden, prefix):
    return {k.removeprefix(prefix): a for k, a in golden.items() if k.startswith(prefix)}


def build(make, params):
    layer = make().astype(np.float64)
    layer.load_state_dict({name: array[0] for name, array in params.items()})
    return layer


def build_transformer(name):
    source_size, target_size, num_encoder_layers, num_decoder_layers, options = TRANSFORMERS[name]
    d_model, num_heads, d_ff = SIZES
    config = TransformerConfig(
        source_size, target_size, d_model=d_model, num_heads=num_heads, d_ff=d_ff,
        num_encoder_layers=num_encoder_layers, num_decoder_layers=num_decoder_layers, pad_id=PAD,
        cross_attention="per_layer", attention_bias=True, output_bias=True, **options,
    )
    golden, params = load(name)
    return build(lambda: Transformer(config), params), golden, params


def assert_same(actual, expected, what):
    assert np.shape(actual) == expected.shape, what
    assert np.asarray(actual).dtype == np.float64, what
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-10, err_msg=what)


def assert_parameters(layer, params, which, index):
    """Every parameter's value or grad (which) is the golden one, which stands at this index."""
    actual = dict(layer.named_parameters())
    assert actual.keys() == params.keys()
    for name, parameter in actual.items():
        assert_same(getattr(parameter, which), params[name][index], f"{name}.{which}")


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    golden, params = load(name)
    layer = build(LAYERS[name], params)

    y, ctx = layer.forward(**part(golden, "in/"))
    assert_same(y, golden["y"], "y")

    grads = layer.backward(ctx, golden["dy"])
    grads = grads if isinstance(grads, tuple) else (grads,)
    expected = part(golden, "din/")  # in the order of forward's arguments
    assert len(grads) == len(expected)
    for key, grad in zip(expected, grads):
        assert_same(grad, expected[key], f"d{key}")
    assert_parameters(layer, params, "grad", 1)


@pytest.mark.parametrize("name", NN_TRANSFORMERS)
def test_one_step_of_sgd(name):
    golden, params = load(name)
    layer = build(LAYERS[name], params)
    _, ctx = layer.forward(**part(golden, "in/"))
    layer.backward(ctx, golden["dy"])
    SGD(layer.parameters(), *golden["sgd"].tolist()).step()
    assert_parameters(layer, params, "value", 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    golden, _ = load(name)
    assert_same(FUNCTIONS[name](golden["in/x"]), golden["y"], "y")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformer(name):
    model, golden, params = build_transformer(name)
    ids = part(golden, "in/")
    logits, ctx = model.forward(**ids)
    real = ids["target_ids"] != PAD  # logits at padding mean nothing
    assert_same(logits[real], golden["logits"][real], "logits")

    cross_entropy = CrossEntropy(PAD)
    loss, loss_ctx = cross_entropy.forward(logits, golden["targets"])
    assert_same(loss, golden["losses"][0], "loss")

    assert model.backward(ctx, cross_entropy.backward(loss_ctx)) == ()
    assert_parameters(model, params, "grad", 1)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_steps_of_sgd(name):
    model, golden, params = build_transformer(name)
    lr, momentum, weight_decay = golden["sgd"].tolist()
    optimizer = SGD(model.parameters(), lr, momentum, weight_decay)
    cross_entropy = CrossEntropy(PAD)
    for expected in golden["losses"]:
        optimizer.zero_grad()
        logits, ctx = model.forward(**part(golden, "in/"))
        loss, loss_ctx = cross_entropy.forward(logits, golden["targets"])
        assert_same(loss, expected, "loss")
        model.backward(ctx, cross_entropy.backward(loss_ctx))
        optimizer.step()
    assert_parameters(model, params, "value", 2)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_twenty_training_losses(norm):
    golden, _ = load("training")
    d_model, num_heads, d_ff = SIZES
    model = Transformer(TransformerConfig(
        17, 13, d_model=d_model, num_heads=num_heads, d_ff=d_ff, num_encoder_layers=2,
        num_decoder_layers=2, norm=norm, final_norm=True, attention_bias=True, pad_id=PAD,
    )).astype(np.float64)
    names = {name: f"transformer.{name}" for name in ("encoder", "decoder")}
    load_torch_state_dict(model, part(golden, "state/"), names)

    optimizer = SGD(model.parameters(), *golden["sgd"].tolist())
    cross_entropy = CrossEntropy(PAD)
    batches = cycle(zip(golden["source_ids"], golden["target_ids"], golden["targets"]))
    losses = []
    for _, (source_ids, target_ids, targets) in zip(range(20), batches):
        optimizer.zero_grad()
        logits, ctx = model.forward(source_ids, target_ids)
        loss, loss_ctx = cross_entropy.forward(logits, targets)
        model.backward(ctx, cross_entropy.backward(loss_ctx))
        optimizer.step()
        losses.append(loss)
    assert_same(losses, golden[f"losses_{norm}"], "losses")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_of_an_optimizer(name):
    """Every value after every step, to 1e-12."""
    golden, _ = load(name)
    grads, values = part(golden, "grad/"), part(golden, "value/")
    parameters = {i: Parameter(value[0].copy()) for i, value in values.items()}
    groups = [
        {"params": p, "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        for p, (lr, *betas, eps, weight_decay) in zip(
            parameters.values(), golden["options"].tolist()
        )
    ]
    optimizer = OPTIMIZERS[name](groups, lr=0.01)
    for step, factor in enumerate(golden["factors"]):
        for i, parameter in parameters.items():
            parameter.grad = grads[i][step]
        optimizer.lr = 0.01 * factor
        optimizer.step()
        for i, parameter in parameters.items():
            expected = values[i][step + 1]
            np.testing.assert_allclose(
                parameter.value, expected, rtol=1e-12, atol=1e-12, err_msg=f"{i}, step {step + 1}"
            )
    assert optimizer.steps == 20


def test_every_case_has_a_file_and_every_file_is_used():
    cases = [*LAYERS, *FUNCTIONS, *TRANSFORMERS, "training", *OPTIMIZERS]
    assert sorted(cases) == sorted(file.stem for file in FOLDER.glob("*.npz"))
