"""Write tests/golden/*.npz: what PyTorch computes, for tests/test_golden.py to compare with.

    python tests/make_golden.py

It needs torch; the files there were made with torch 2.13.0 on a CPU. The tests read them without.
All is float64, and every parameter random: gamma, beta and biases too. The arrays of a file:

    in/NAME     an argument of npdecoder's forward; masks are npdecoder's (True = may attend)
    y           the output
    dy          the gradient of the output, random
    din/NAME    the gradient of in/NAME
    param/NAME  [value, gradient] of a parameter, by npdecoder's name and in its layout, and of
                nn_transformer_* [.., value after one step of SGD]
    sgd         [lr, momentum, weight decay] of that step

and of a file of a whole model, transformer_*:

    in/NAME     source_ids and target_ids
    targets, logits, losses, sgd     losses one a step
    param/NAME  [value, gradient, value after the steps]

and of training, the losses of a model around an nn.Transformer, without and with norm_first:

    source_ids, target_ids, targets  the batches, one after the other
    losses_post, losses_pre, sgd     losses one a step: a batch each, then the first again
    state/NAME  the start of both, as PyTorch's state dict

and of the optimizers adam and adamw, with three parameters, each a group with options of its own:

    options     a row a group: lr, beta1, beta2, eps, weight decay
    factors     what every lr is multiplied by, one a step
    grad/i      the gradients of parameter i, one a step, random
    value/i     its values, the first before all steps
"""

import math
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import nn, randn
from torch.nn import functional as F

FOLDER = Path(__file__).with_name("golden")
B, T, S = 3, 5, 7  # batch, target length, source length
D, H, D_FF = 6, 2, 8  # d_model, heads, feed-forward
PAD = 2
LR, MOMENTUM, WEIGHT_DECAY, STEPS = 0.1, 0.9, 0.03, 4
BATCHES, TRAINING_STEPS, TRAINING_LR = 3, 20, 0.03
OPTIMIZER_STEPS = 20

REAL_S = torch.arange(S) < torch.tensor([[4], [7], [2]])  # (B, S), padding on the right
REAL_T = torch.arange(T) < torch.tensor([[5], [2], [4]])  # (B, T)
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def record(name, function, inputs, module=None, dy=None, sgd=None):
    """Save function(*inputs), its gradients and those of the module (function, if it is one).

    sgd: options of a step, whose result is saved too
    """
    module = function if isinstance(function, nn.Module) else module
    if module is not None:
        randomise(module)
    leaves = {
        key: x.clone().requires_grad_(x.is_floating_point() and "mask" not in key)
        for key, x in inputs.items()
    }
    y = function(*leaves.values())
    dy = torch.randn_like(y) if dy is None else torch.as_tensor(dy)
    y.backward(dy)

    arrays = {f"in/{key}": x for key, x in inputs.items()} | {"y": y.detach(), "dy": dy}
    arrays |= {f"din/{key}": x.grad for key, x in leaves.items() if x.grad is not None}
    if module is not None:
        states = [ours(module), ours(module, grad=True)]
        if sgd is not None:
            torch.optim.SGD(module.parameters(), *sgd[:2], weight_decay=sgd[2]).step()
            states.append(ours(module))
            arrays["sgd"] = sgd
        arrays |= stacked(*states)
    save(name, arrays)


def save(name, arrays):
    np.savez_compressed(
        FOLDER / f"{name}.npz", **{key: np.asarray(value) for key, value in arrays.items()}
    )


def randomise(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * randn(parameter.shape))


def stacked(*states):
    return {f"param/{name}": np.stack([state[name] for state in states]) for name in states[0]}


# PyTorch's names and layout to npdecoder's

MODULES = {
    "self_attn": "self_attention",
    "multihead_attn": "cross_attention",
    "linear1": "feed_forward.linear1",
    "linear2": "feed_forward.linear2",
    "out_proj": "W_o",
}
LEAVES = {
    nn.LayerNorm: {"weight": "gamma", "bias": "beta"},
    nn.Embedding: {"weight": "W"},
}


def ours(module, grad=False):
    """The values or gradients of all parameters of a module; one that is shared is there once."""
    arrays = {}
    for name, parameter in module.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = type(module.get_submodule(path))
        path = [MODULES.get(part, part) for part in path.split(".") if part]
        array = (parameter.grad if grad else parameter).detach().numpy().copy()
        if leaf.startswith("in_proj"):  # the rows of q, k and v, one below the other
            parts = {f"W_{letter}": part.T for letter, part in zip("qkv", np.split(array, 3))}
            leaf = "W" if leaf == "in_proj_weight" else "b"
            arrays |= {".".join([*path, W, leaf]): part for W, part in parts.items()}
        elif issubclass(owner, nn.Linear):  # weight is (out, in), W is (in, out)
            arrays[".".join([*path, {"weight": "W", "bias": "b"}[leaf]])] = array.T
        else:
            arrays[".".join([*path, LEAVES.get(owner, {}).get(leaf, leaf)])] = array
    return arrays


# Layers


class LearnedPositions(nn.Module):
    def __init__(self, max_len):
        super().__init__()
        self.P = nn.Parameter(torch.empty(max_len, D))

    def forward(self, x, positions):
        return x + self.P[positions]


class Tied(nn.Module):
    """Ids to logits with one table, to a loss."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, D)
        self.output = nn.Linear(D, 11)
        self.output.weight = self.embedding.weight

    def forward(self, ids, targets):
        return cross_entropy(self.output(self.embedding(ids)), targets, ignore_index=PAD)


def cross_entropy(logits, targets, **options):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


def sinusoids(max_len, d_model):
    """The table as PyTorch's tutorials make it, but in float64."""
    position = torch.arange(max_len).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    table = torch.zeros(max_len, d_model)
    table[:, 0::2] = torch.sin(position * div_term)
    table[:, 1::2] = torch.cos(position * div_term)
    return table


def layers():
    record("linear", nn.Linear(5, 7), {"x": randn(2, 3, 5)})
    record("linear_no_bias", nn.Linear(5, 7, bias=False), {"x": randn(2, 3, 5)})

    # repeated ids, and padding at the end
    ids = torch.tensor([[5, 3, 5, 2, 2, 2, 2], [4, 9, 5, 3, 0, 10, 2]])
    targets = torch.tensor([[3, 5, 2, 2, 2, 2, 2], [9, 5, 3, 0, 10, 7, 2]])
    record("embedding", nn.Embedding(11, D), {"ids": ids})
    table = nn.Embedding(11, D)
    record("embedding_scaled", lambda ids: table(ids) * math.sqrt(D), {"ids": ids}, table)
    record("tied_embedding", Tied(), {"ids": ids, "targets": targets}, dy=0.7)

    x = randn(B, T, D)
    record("sinusoidal_positions", lambda x: x + sinusoids(23, D), {"x": randn(1, 23, D)})
    record("sinusoidal_positions_far", lambda x, positions: x + sinusoids(5000, D)[positions],
           {"x": x, "positions": torch.randint(5000, (B, T))})
    positions = torch.tensor([[0, 1, 2, 3, 8], [0, 0, 0, 1, 2], [4, 2, 4, 7, 4]])
    record("learned_positions", LearnedPositions(9), {"x": x, "positions": positions})

    for name, shape, options in (
        ("rank2", (7, 5), {}),
        ("rank4", (2, 3, 4, 5), {}),
        ("eps", (2, 7, 5), {"eps": 0.3}),
        ("no_bias", (2, 7, 5), {"bias": False}),
    ):
        mean, spread = randn(*shape[:-1], 1), torch.exp(randn(*shape[:-1], 1))
        x = mean + spread * randn(shape)
        record(f"layer_norm_{name}", nn.LayerNorm(5, **options), {"x": x})

    x = 3.0 * randn(2, 3, 5)
    record("softmax_axis", lambda x: F.softmax(x, 1), {"x": x})
    x[0, 1, [0, 3]] = x[1, 2, 1:] = -math.inf
    record("softmax", lambda x: F.softmax(x, -1), {"x": x})
    record("log_softmax", lambda x: F.log_softmax(x, -1), {"x": x})

    record("relu", F.relu, {"x": torch.cat([randn(2, 7), torch.zeros(2, 1)], 1)})
    x = torch.linspace(-12, 12, 121).reshape(11, 11)
    record("gelu_none", F.gelu, {"x": x})
    record("gelu_tanh", ACTIVATIONS["gelu_tanh"], {"x": x})

    targets = torch.tensor([[0, 4, 6], [4, 1, 4]])
    ignored = torch.tensor([[0, -100, 6], [-100, 1, 4]])
    for name, ids, options in (
        ("mean", targets, {}),
        ("ignore_minus_100", ignored, {"ignore_index": -100}),
        ("ignore_class", targets, {"ignore_index": 4}),
        ("smoothing", targets, {"label_smoothing": 0.15}),
        ("smoothing_ignore_minus_100", ignored, {"label_smoothing": 0.15, "ignore_index": -100}),
        ("smoothing_ignore_class", targets, {"label_smoothing": 0.15, "ignore_index": 4}),
    ):
        record(f"cross_entropy_{name}", partial(cross_entropy, **options),
               {"logits": 3.0 * randn(2, 3, 7), "targets": ids}, dy=-1.7)


# Attention


def some(*shape):
    """A boolean mask under which every query sees the first key, and some others."""
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    return mask


def keys(real):
    """(B, S) -> a mask of keys, (B, 1, 1, S)."""
    return real[:, None, None, :]


def attention():
    attend = F.scaled_dot_product_attention
    for name, (d_k, d_v), mask in (
        ("bool_mask", (6, 4), some(2, 3, T, S)),
        ("bool_mask_2d", (6, 4), some(T, S)),
        ("float_mask", (4, 6), 2.0 * randn(2, 3, T, S)),
        ("float_mask_inf", (4, 6), torch.zeros(T, S).masked_fill_(~some(T, S), -math.inf)),
    ):
        q, k, v = randn(2, 3, T, d_k), randn(2, 3, S, d_k), randn(2, 3, S, d_v)
        record(f"attention_{name}", attend, {"q": q, "k": k, "v": v, "mask": mask})
    q, k, v = randn(2, 3, T, 9), randn(2, 3, S, 9), randn(2, 3, S, 4)
    record("attention_scale", partial(attend, scale=1 / 3), {"q": q, "k": k, "v": v})

    x, kv = randn(B, T, D), {"key": randn(B, S, D), "value": randn(B, S, D)}
    visible, bias = some(B, H, T, S), 2.0 * randn(B, H, T, S)
    for name, inputs, masks in (
        ("self_causal", {"key": x, "value": x, "mask": CAUSAL}, {"attn_mask": ~CAUSAL}),
        ("cross_padding", kv | {"mask": keys(REAL_S)}, {"key_padding_mask": ~REAL_S}),
        ("no_bias", kv | {"mask": keys(REAL_S)}, {"key_padding_mask": ~REAL_S}),
        ("bool_mask", kv | {"mask": visible}, {"attn_mask": ~visible.flatten(0, 1)}),
        ("float_mask", kv | {"mask": bias}, {"attn_mask": bias.flatten(0, 1)}),
    ):
        module = nn.MultiheadAttention(D, H, bias=name != "no_bias", batch_first=True)
        function = partial(multi_head, module, masks)
        record(f"multi_head_{name}", function, {"query": x} | inputs, module)


def multi_head(module, masks, query, key, value, mask):
    return module(query, key, value, **masks)[0]


# Blocks


def encoder_layer(norm="pre", activation="relu", **options):
    return nn.TransformerEncoderLayer(D, H, D_FF, 0.0, ACTIVATIONS[activation],
                                      batch_first=True, norm_first=norm == "pre", **options)


def decoder_layer(norm="pre", activation="relu", **options):
    return nn.TransformerDecoderLayer(D, H, D_FF, 0.0, ACTIVATIONS[activation],
                                      batch_first=True, norm_first=norm == "pre", **options)


def encoder(num_layers, final_norm, *options):
    norm = nn.LayerNorm(D) if final_norm else None
    return nn.TransformerEncoder(encoder_layer(*options), num_layers, norm, False)


def decoder(num_layers, final_norm, *options):
    norm = nn.LayerNorm(D) if final_norm else None
    return nn.TransformerDecoder(decoder_layer(*options), num_layers, norm)


def record_encoder(name, module):
    """With padding."""
    record(name, lambda x, mask: module(x, src_key_padding_mask=~REAL_S),
           {"x": randn(B, S, D), "mask": keys(REAL_S)}, module)


def record_decoder(name, module):
    """Causal, with padding in target and source."""
    def function(x, memory, target_mask, memory_mask):
        return module(x, memory, tgt_mask=~CAUSAL, tgt_key_padding_mask=~REAL_T,
                      memory_key_padding_mask=~REAL_S)

    masks = {"target_mask": keys(REAL_T) & CAUSAL, "memory_mask": keys(REAL_S)}
    record(name, function, {"x": randn(B, T, D), "memory": randn(B, S, D)} | masks, module)


def blocks():
    for options in ("pre", "gelu"), ("post", "relu"):
        record_encoder(f"encoder_layer_{'_'.join(options)}", encoder_layer(*options))
        record_decoder(f"decoder_layer_{'_'.join(options)}", decoder_layer(*options))
    for norm, final_norm, end in ("pre", True, "final_norm"), ("post", False, "no_final_norm"):
        record_encoder(f"encoder_{norm}_{end}", encoder(2, final_norm, norm))
        record_decoder(f"decoder_{norm}_{end}", decoder(2, final_norm, norm))

    options = {"activation": "gelu_tanh", "bias": False, "layer_norm_eps": 0.3}
    record_encoder("encoder_layer_no_biases", encoder_layer(**options))
    record_decoder("decoder_layer_no_biases", decoder_layer(**options))
    module = encoder_layer()
    record("encoder_layer_causal", lambda x, mask: module(x, src_mask=~CAUSAL),
           {"x": randn(B, T, D), "mask": CAUSAL}, module)
    record("decoder_layer_no_masks", decoder_layer(),
           {"x": randn(B, T, D), "memory": randn(B, S, D)})


# Whole models


class Transformer(nn.Module):
    """positions: "sinusoidal", or how many to learn. tie: as in npdecoder's TransformerConfig."""

    def __init__(self, vocab_sizes, num_layers, final_norms, norm, activation, positions,
                 scale=False, tie="none"):
        super().__init__()
        (source_size, target_size), learned = vocab_sizes, positions != "sinusoidal"
        self.scale = math.sqrt(D) if scale else 1.0
        self.source_embedding = nn.Embedding(source_size, D)
        self.target_embedding = nn.Embedding(target_size, D)
        if tie == "all":
            self.target_embedding = self.source_embedding
        self.source_positions = LearnedPositions(positions) if learned else None
        self.target_positions = LearnedPositions(positions) if learned else None
        self.encoder = encoder(num_layers[0], final_norms, norm, activation)
        self.decoder = decoder(num_layers[1], final_norms, norm, activation)
        self.output = nn.Linear(D, target_size)
        if tie != "none":
            self.output.weight = self.target_embedding.weight

    def forward(self, source_ids, target_ids):
        source_pad, target_pad = source_ids == PAD, target_ids == PAD
        x = self.embed(source_ids, self.source_embedding, self.source_positions)
        memory = self.encoder(x, src_key_padding_mask=source_pad)
        x = self.embed(target_ids, self.target_embedding, self.target_positions)
        y = self.decoder(x, memory, tgt_mask=~CAUSAL, tgt_key_padding_mask=target_pad,
                         memory_key_padding_mask=source_pad)
        return self.output(y)

    def embed(self, ids, embedding, positions):
        """Positions count the tokens that are not padding: with padding on the right, 0 1 2 ..."""
        x, count = self.scale * embedding(ids), ((ids != PAD).cumsum(1) - 1).clamp(min=0)
        return x + sinusoids(S, D)[count] if positions is None else positions(x, count)


def padded_batch(vocab_sizes, shift=0):
    """Source ids (B, S) and target sentences (B, T + 1); the rows' lengths go round by shift."""
    real_s, real_t = REAL_S.roll(shift, 0), REAL_T.roll(shift, 0)
    source_ids = torch.randint(PAD + 1, vocab_sizes[0], (B, S)).masked_fill_(~real_s, PAD)
    sentences = torch.randint(PAD + 1, vocab_sizes[1], (B, T + 1))
    sentences[:, 1:].masked_fill_(~real_t, PAD)  # the longest fills its row
    return source_ids, sentences


def record_transformer(name, model, vocab_sizes):
    """One batch, padded on the right: forward, backward and steps of SGD.

    Causality alone hides padding on the right of the target. So one model has padding inside too.
    """
    randomise(model)
    source_ids, sentences = padded_batch(vocab_sizes)
    if "inner_padding" in name:
        source_ids[1, 3] = sentences[0, 2] = sentences[2, 1] = PAD
    target_ids, targets = sentences[:, :-1], sentences[:, 1:]

    before, losses = ours(model), []
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY)
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = model(source_ids, target_ids)
        loss = cross_entropy(logits, targets, ignore_index=PAD)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            first_logits, grads = logits.detach(), ours(model, grad=True)
        optimizer.step()

    arrays = {"in/source_ids": source_ids, "in/target_ids": target_ids, "targets": targets}
    arrays |= {"logits": first_logits, "losses": losses, "sgd": [LR, MOMENTUM, WEIGHT_DECAY]}
    save(name, arrays | stacked(before, grads, ours(model)))


def transformers():
    for name, vocab_sizes, *options in (
        ("pre_sinusoidal", (17, 13), (1, 2), True, "pre", "relu", "sinusoidal", True),
        ("post_learned_tied_output", (17, 13), (2, 1), False, "post", "gelu", 9, False,
         "target_output"),
        ("post_all_tied_inner_padding", (13, 13), (1, 1), True, "post", "relu", "sinusoidal", True,
         "all"),
    ):
        record_transformer(f"transformer_{name}", Transformer(vocab_sizes, *options), vocab_sizes)


# torch.nn.Transformer itself, whose encoder and decoder always end with a norm


def nn_transformer(norm, activation="relu"):
    return nn.Transformer(D, H, 2, 2, D_FF, 0.0, ACTIVATIONS[activation],
                          batch_first=True, norm_first=norm == "pre")


class Translator(nn.Module):
    """Embeddings, sinusoidal positions, nn.Transformer and a linear layer, as in the tutorials."""

    def __init__(self, vocab_sizes, norm):
        super().__init__()
        self.source_embedding = nn.Embedding(vocab_sizes[0], D)
        self.target_embedding = nn.Embedding(vocab_sizes[1], D)
        self.transformer = nn_transformer(norm)
        self.output = nn.Linear(D, vocab_sizes[1])

    def forward(self, source_ids, target_ids):
        source = math.sqrt(D) * self.source_embedding(source_ids) + sinusoids(S, D)
        target = math.sqrt(D) * self.target_embedding(target_ids) + sinusoids(T, D)
        real_s, real_t = source_ids != PAD, target_ids != PAD
        return self.output(self.transformer(source, target, **masks(real_s, real_t)))


def masks(real_s, real_t):
    return {"tgt_mask": ~CAUSAL, "src_key_padding_mask": ~real_s, "tgt_key_padding_mask": ~real_t,
            "memory_key_padding_mask": ~real_s}


def record_nn_transformer(name, module):
    """All masks at once; the output at padding has no gradient, as under a loss.

    Padding inside the target too, since causality alone hides that on the right.
    """
    real_t = REAL_T.clone()
    real_t[0, 2] = False

    def function(source, target, source_mask, target_mask):
        return module(source, target, **masks(REAL_S, real_t))

    inputs = {"source": randn(B, S, D), "target": randn(B, T, D)}
    inputs |= {"source_mask": keys(REAL_S), "target_mask": keys(real_t) & CAUSAL}
    record(name, function, inputs, module, randn(B, T, D) * real_t[..., None], [LR, MOMENTUM, 0.0])


def nn_transformers():
    for norm, activation in product(("post", "pre"), ("relu", "gelu")):
        record_nn_transformer(f"nn_transformer_{norm}_{activation}",
                              nn_transformer(norm, activation))


def training():
    """Post-LN and Pre-LN from one start: their parameters have the same names and shapes."""
    vocab_sizes = (17, 13)
    models = {norm: Translator(vocab_sizes, norm) for norm in ("post", "pre")}
    randomise(models["post"])
    state = {f"state/{name}": x.clone() for name, x in models["post"].state_dict().items()}
    models["pre"].load_state_dict(models["post"].state_dict())
    source_ids, sentences = map(
        torch.stack, zip(*(padded_batch(vocab_sizes, shift) for shift in range(BATCHES)))
    )
    target_ids, targets = sentences[..., :-1], sentences[..., 1:]

    arrays = {"source_ids": source_ids, "target_ids": target_ids, "targets": targets}
    arrays["sgd"] = [TRAINING_LR, MOMENTUM, 0.0]
    for norm, model in models.items():
        optimizer = torch.optim.SGD(model.parameters(), TRAINING_LR, MOMENTUM)
        losses = []
        for step in range(TRAINING_STEPS):
            batch = step % BATCHES
            optimizer.zero_grad()
            logits = model(source_ids[batch], target_ids[batch])
            loss = cross_entropy(logits, targets[batch], ignore_index=PAD)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        arrays[f"losses_{norm}"] = losses
    save("training", arrays | state)


def optimizers():
    """Steps from gradients that are given: large, of the size of eps, and of very unequal sizes."""
    shapes = (3, 4), (5,), (2, 3)
    options = [
        [0.01, 0.9, 0.999, 1e-8, 0.03],
        [0.02, 0.5, 0.9, 1e-3, 0.0],
        [0.005, 0.0, 0.99, 1e-5, 0.4],
    ]
    scales = [torch.tensor(3.0), torch.tensor(1e-3), torch.logspace(-6, 1, 6).reshape(2, 3)]
    factors = torch.linspace(1.0, 0.1, OPTIMIZER_STEPS)
    for name, optimizer_class in ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW):
        parameters = [nn.Parameter(randn(shape)) for shape in shapes]
        grads = [scale * randn(OPTIMIZER_STEPS, *p.shape) for scale, p in zip(scales, parameters)]
        values = [[p.detach().clone()] for p in parameters]
        optimizer = optimizer_class([
            {"params": [p], "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            for p, (lr, *betas, eps, weight_decay) in zip(parameters, options)
        ])
        for step, factor in enumerate(factors):
            for p, grad, group, (lr, *_) in zip(
                parameters, grads, optimizer.param_groups, options
            ):
                p.grad, group["lr"] = grad[step].clone(), lr * factor.item()
            optimizer.step()
            for p, seen in zip(parameters, values):
                seen.append(p.detach().clone())
        arrays = {f"grad/{i}": grad for i, grad in enumerate(grads)}
        arrays |= {f"value/{i}": torch.stack(seen) for i, seen in enumerate(values)}
        save(name, arrays | {"options": options, "factors": factors})


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.npz"):
        old.unlink()
    groups = (layers, attention, blocks, transformers, nn_transformers, training, optimizers)
    for seed, group in enumerate(groups):
        torch.manual_seed(seed)
        group()
    files = list(FOLDER.glob("*.npz"))
    total = sum(file.stat().st_size for file in files)
    print(f"torch {torch.__version__}: {len(files)} files, {total / 1000:.0f} KB in {FOLDER.name}/")
