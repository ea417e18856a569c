"""Parameters, optimizers, schedules, decoding, and the tools, with hostile arguments."""

import functools
import itertools
import math

import numpy as np
from helpers import BOS, EOS, KINDS, PAD, batch_of, decoding_model, logits_after, room
from hostile import (
    ANY,
    FRACTIONS,
    NUMBERS,
    SEEDS,
    SIZES,
    WORDS,
    bad_ids,
    bad_types,
    fuzz,
    plain,
    without,
)
from test_beam_search import reference as plain_beam_search

from npdecoder import (
    SGD,
    Adam,
    AdamW,
    DecodingState,
    EncoderLayer,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    Parameter,
    Trace,
    beam_search,
    clip_grad_norm,
    constant_schedule,
    cosine_schedule,
    decay_groups,
    generate,
    gradcheck,
    greedy_decode,
    linear_schedule,
    load_torch_state_dict,
    next_token_probabilities,
    noam_schedule,
    sample,
    torch_state_dict,
)

COUNTS_FROM_0 = without(SIZES, 0)

# Parameters and state dicts


@fuzz
def test_parameter(s):
    s.any_dtype()
    s.of_any_kind(sick=False)
    shape = s.shape()
    start = s.array(s.values(shape, s.dtype), s.dtype)

    def bad_arrays():
        return [*bad_types(start), (np.ones(shape, int), TypeError),
                (np.ones(shape, np.float16), TypeError)]  # fmt: skip

    s.give("value", start, bad_arrays)
    for name in ("new", "dvalue"):  # which are assigned: a wrong shape would broadcast
        s.give(name, s.array(s.values(shape, s.dtype), s.dtype),
               [(np.zeros((2, *shape)), ValueError), ([[1.0], [1.0, 2.0]], ValueError)],
               words="value" if name == "new" else "grad")  # fmt: skip

    def function(value, new, dvalue):
        parameter = Parameter(value)
        assert not parameter.has_grad
        assert np.array_equal(parameter.value, np.asarray(value))
        view = parameter.value
        parameter.value = new
        parameter.grad = dvalue
        parameter.grad += dvalue
        assert view is parameter.value
        assert parameter.has_grad == bool(np.any(parameter.grad))
        return {"value": parameter.value, "grad": parameter.grad}

    def expected(value, new, dvalue):
        return {"value": plain(new), "grad": 2.0 * plain(dvalue)}

    return s.call(function, expected)


@fuzz
def test_load_state_dict(s):
    """Arrays of any width and layout, and what is missing, unexpected or misshapen."""
    s.any_dtype()
    d, bias = s.size(2, 3), s.pick(True, False)
    layer = Linear(d, 5, bias, dtype=s.dtype)
    mapping = {name: s.array(s.values(p.shape, s.dtype), s.pick("float64", "float32", "float16"))
               for name, p in layer.named_parameters()}  # fmt: skip
    W = np.asarray(mapping["W"])

    def bad():
        return [({}, ValueError), ({**mapping, "V": W}, ValueError), (None, TypeError),
                ({**mapping, "W": W.T}, ValueError), ({**mapping, "W": W[:1, :1]}, ValueError),
                (list(mapping.items()), TypeError)]  # fmt: skip

    s.give("mapping", mapping, bad, words="mapping|state dict")
    wrong = [array for array, _ in bad_types(W)[:4]] + [W.astype(int), W > 0]
    s.spoil("mapping", [({**mapping, "W": array}, TypeError) for array in wrong], words="W")
    if s.dtype == np.float32:
        s.spoil("mapping", [({**mapping, "W": np.full(W.shape, 1e300)}, ValueError)], words="W")

    def function(mapping):
        before = layer.state_dict()
        try:
            assert not any(layer.load_state_dict(mapping))
        except Exception:
            assert all(np.array_equal(p.value, before[k]) for k, p in layer.named_parameters())
            raise
        return layer.state_dict()

    return s.call(function, lambda mapping: {k: plain(v, s.dtype) for k, v in mapping.items()})


def torch_layout(layer):
    """The state dict that PyTorch has, for the layers below."""
    def zeros(b, n):
        return np.zeros(n) if b is None else plain(b.value)

    if isinstance(layer, Linear):
        W = plain(layer.W.value)
        return {"weight": W.T, "bias": zeros(layer.b, W.shape[1])}
    if isinstance(layer, LayerNorm):
        gamma = plain(layer.gamma.value)
        return {"weight": gamma, "bias": zeros(layer.beta, len(gamma))}
    if isinstance(layer, MultiHeadAttention):
        parts = [torch_layout(part) for part in (layer.W_q, layer.W_k, layer.W_v)]
        state = {f"in_proj_{k}": np.concatenate([part[k] for part in parts]) for k in parts[0]}
        return state | {f"out_proj.{k}": v for k, v in torch_layout(layer.W_o).items()}
    names = {"self_attn": layer.self_attention, "linear1": layer.feed_forward.linear1,
             "linear2": layer.feed_forward.linear2, "norm1": layer.norm1, "norm2": layer.norm2}
    return {f"{name}.{k}": v for name, part in names.items() for k, v in torch_layout(part).items()}


@fuzz
def test_torch_state_dict(s):
    s.any_dtype()
    bias = s.pick(True, False)
    make = s.pick(
        lambda **o: Linear(3, 5, bias, **o), lambda **o: LayerNorm(5, bias=bias, dtype=o["dtype"]),
        lambda **o: MultiHeadAttention(6, 3, bias=bias, **o),
        lambda **o: EncoderLayer(4, 2, attention_bias=bias, **o),
    )  # fmt: skip
    layer = make(dtype=s.dtype, rng=1)
    for parameter in layer.parameters():
        parameter.value = s.rng.standard_normal(parameter.shape)
    right = torch_layout(layer)
    mapping = {name: s.array(array, s.dtype) for name, array in torch_state_dict(layer).items()}
    first, array = next(iter(mapping.items()))

    def bad():
        wrong = np.asarray(array)
        return [({}, ValueError), (None, TypeError), ({**mapping, "other": wrong}, ValueError),
                ({**mapping, first: wrong[..., :1]}, ValueError), ([1.0], TypeError),
                ({**mapping, first: wrong.astype(int)}, TypeError),
                ({**mapping, first: wrong.astype(str)}, TypeError),
                ({**mapping, first: None}, ANY)]  # fmt: skip

    s.give("mapping", mapping, bad, words=f"mapping|state dict|{first}")
    s.give("names", s.pick(None, {}), [({"bogus": "x"}, ValueError), ({"weight": 3}, TypeError),
                                       ({3: "x"}, ANY), ("names", ANY)])  # fmt: skip

    def function(mapping, names):
        other = make(dtype=s.dtype, rng=2)
        before = other.state_dict()
        try:
            load_torch_state_dict(other, mapping, names)
        except Exception:
            assert all(np.array_equal(p.value, before[k]) for k, p in other.named_parameters())
            raise
        return torch_state_dict(other)

    return s.call(function, lambda mapping, names: right)


# Optimizers


def sgd(p, g, state, n, lr, momentum, weight_decay):
    g = g + weight_decay * p
    state["momentum"] = momentum * state.get("momentum", 0.0) + g
    return p - lr * state["momentum"]


def adam(p, g, state, n, lr, betas, eps, weight_decay, decoupled=False):
    if decoupled:
        p = p - lr * weight_decay * p
    else:
        g = g + weight_decay * p
    state["m"] = betas[0] * state.get("m", 0.0) + (1.0 - betas[0]) * g
    state["v"] = betas[1] * state.get("v", 0.0) + (1.0 - betas[1]) * g * g
    m, v = state["m"] / (1.0 - betas[0] ** n), state["v"] / (1.0 - betas[1] ** n)
    return p - lr * m / (np.sqrt(v) + eps)


BETAS = [(0.9, TypeError), (None, TypeError), ((0.9,), TypeError), ((0.9, 0.9, 0.9), TypeError),
         ((1.0, 0.9), ValueError), ((0.9, math.nan), ValueError), ((-0.1, 0.9), ValueError),
         (("0.9", 0.9), TypeError), ((True, 0.9), TypeError), ((10**400, 0.9), ValueError)]


def optimizer_call(s, cls, rule):
    s.any_dtype()
    s.of_any_kind(sick=False)
    shapes = [s.shape(0, 2) for _ in range(s.pick(2, 1, 3))]
    if s.pick(*[False] * 15, True):
        shapes[0] = (70_001,)  # more than are updated at once
    arrays = [s.values(shape, s.dtype) for shape in shapes]
    parameters = [Parameter(array.astype(s.dtype)) for array in arrays]
    starts = [plain(p.value) for p in parameters]
    rounds = s.pick(2, 1, 4)
    grads = [[plain(s.values(p.shape, s.dtype), s.dtype) for p in parameters]
             for _ in range(rounds)]  # fmt: skip
    one, *others = parameters
    lr = s.give("lr", s.pick(0.1, 1e-3, 1, np.float32(0.5)), NUMBERS)
    later = s.give("later", s.pick(0.2, 0, 1e-3), NUMBERS, words="lr")
    own = {"weight_decay": s.give("weight_decay", s.pick(0.0, 0.1, 0.01), NUMBERS)}
    if cls is SGD:
        own["momentum"] = s.give("momentum", s.pick(0.0, 0.9, 1.5), NUMBERS)
    else:
        betas = s.pick((0.9, 0.999), (0, 0.5), [0.5, 0.0])
        own["betas"] = s.give("betas", betas, BETAS, words="betas|beta1|beta2")
        own["eps"] = s.give("eps", s.pick(1e-8, 1e-3, 1), NUMBERS)
    given = s.pick(parameters, parameters * 2, (p for p in parameters))
    group, lr_scale = own, 1.0  # of the first
    if others and s.pick(False, True):
        group, lr_scale = {**own, "weight_decay": 0.05}, 0.2 / float(lr)
        given = [{"params": [one, one], "lr": 0.2, "weight_decay": 0.05}, {"params": others}]
    words = "parameters|params|Parameter|group"
    array = np.zeros(2)
    s.give("parameters", given, [
        (None, TypeError), (set(parameters), TypeError), ([], ValueError), ([array], TypeError),
        ([parameters], TypeError), (array, TypeError), ("W", TypeError), (3, TypeError),
        ([one, {"params": [one]}], TypeError), ([{"params": [one]}] * 2, ValueError),
        ([{"params": [one], "bogus": 1}], ValueError), ([{"lr": 0.1}], ValueError),
        ([{"params": []}], ValueError), ([{"params": [array]}], TypeError),
        ([{"params": {one}}], TypeError), ([{"params": [one], "lr": -1}], ValueError),
        ([{"params": [one], "weight_decay": math.nan}], ValueError)], words=words)  # fmt: skip

    def function(parameters, lr, later, **options):
        optimizer = cls(parameters, lr, **options)
        listed = optimizer.parameters()
        for n, step in enumerate(grads, start=1):
            optimizer.zero_grad()
            for parameter, grad in zip(listed, step):
                parameter.grad = grad
            if n == 2:
                optimizer.lr = later
            optimizer.step()
        if len(grads) == 1:
            optimizer.lr = later
        assert optimizer.steps == len(grads)
        assert optimizer.lr == later
        state = {k: v for k, v in optimizer.state_dict().items() if isinstance(v, np.ndarray)}
        return {f"value {i}": p.value for i, p in enumerate(listed)} | state

    def updated(starts, lr, later):
        results, states = {}, {}
        for i, p in enumerate(starts):
            state = {}
            for n, step in enumerate(grads, start=1):
                rate = float(lr if n == 1 else later) * (lr_scale if i == 0 else 1.0)
                p = rule(p, step[i], state, n, rate, **(group if i == 0 else own))
            results[f"value {i}"] = p
            if cls is SGD and own["momentum"] == 0.0:
                state = {}
            states |= {f"{name}.{i}": array for name, array in state.items()}
        return results | states

    largest = max(np.abs(x).max(initial=0.0) for x in (*starts, *itertools.chain(*grads)))
    if s.kind == "tiny":  # subnormal numbers have few digits, and each update divides them by eps
        largest = float(np.finfo(s.dtype).tiny) / own.get("eps", 1.0) ** rounds
    # what a rounding at the start comes to: much where a small sum of large numbers divides
    eps = max(float(np.finfo(s.dtype).eps), np.finfo(np.float64).eps)
    right, moved = (updated([p * x for p in starts], lr, later) for x in (1.0, 1.0 + eps))
    change = max(np.abs(moved[name] - right[name]).max(initial=0.0) for name in right)
    return s.call(function, lambda parameters, lr, later, **options: updated(starts, lr, later),
                  max(largest, change / (100.0 * eps)))  # fmt: skip


@fuzz
def test_sgd(s):
    return optimizer_call(s, SGD, sgd)


@fuzz
def test_adam(s):
    return optimizer_call(s, Adam, adam)


@fuzz
def test_adamw(s):
    return optimizer_call(s, AdamW, functools.partial(adam, decoupled=True))


@fuzz
def test_state_of_an_optimizer(s):
    s.any_dtype()
    parameters = [Parameter(np.ones(shape, s.dtype)) for shape in ((2, 3), (5,))]
    state = Adam(parameters, 0.1).state_dict()
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            state[name] = s.array(np.abs(s.rng.standard_normal(value.shape)), s.dtype)
    state |= {"steps": s.pick(3, 0, np.int8(7)), "lr": s.pick(0.5, 0, np.float32(0.25)),
              "group.0.eps": s.pick(1e-3, np.array(0.5))}  # fmt: skip
    wrong = np.zeros(5, s.dtype)

    def bad():
        without_m = {name: value for name, value in state.items() if name != "m.1"}
        changes = [("m.1", wrong[:1]), ("m.1", wrong[None]), ("m.1", 0.0), ("m.1", wrong > 0),
                   ("m.1", wrong.astype(int)), ("m.1", wrong.astype(str)), ("m.1", None),
                   ("m.1", [[1.0], [1.0, 2.0]]), ("steps", 1.5), ("steps", -1), ("steps", None),
                   ("steps", "3"), ("lr", -1.0), ("lr", math.nan), ("lr", "1"), ("lr", None),
                   ("lr", [0.1]), ("group.0.beta1", 1.0), ("group.0.beta1", math.inf),
                   ("steps", 10**400), ("lr", 10**400)]  # fmt: skip
        return [({**state, name: value}, ValueError) for name, value in changes] + [
            ({}, ValueError), (without_m, ValueError), ({**state, "m.2": wrong}, ValueError),
            (None, TypeError), (list(state), ANY)]  # fmt: skip

    s.give("state", state, bad, words="state|state dict")

    def function(state):
        optimizer = Adam(parameters, 0.1)
        optimizer.load_state_dict(state)
        return optimizer.state_dict()

    def expected(state):
        right = {name: plain(value) for name, value in state.items()}
        numbers = {name: value.item() for name, value in right.items() if value.ndim == 0}
        return {**right, **numbers, "steps": int(state["steps"])}

    return s.call(function, expected)


@fuzz
def test_decay_groups(s):
    parameters = [Parameter(np.zeros(s.shape())) for _ in range(s.pick(3, 1, 2))]
    s.give("parameters", [*parameters, parameters[0]], [
        (None, TypeError), ({parameters[0]}, TypeError), ([np.zeros(2)], TypeError),
        (3, TypeError), ("W", TypeError)])  # fmt: skip
    s.give("weight_decay", s.pick(0.1, 0.0))

    def function(parameters, weight_decay):
        return [([id(p) for p in group["params"]], group["weight_decay"])
                for group in decay_groups(parameters, weight_decay)]  # fmt: skip

    def expected(parameters, weight_decay):
        distinct = parameters[:-1]
        groups = [([id(p) for p in distinct if p.value.ndim > 1], weight_decay),
                  ([id(p) for p in distinct if p.value.ndim < 2], 0.0)]  # fmt: skip
        return [group for group in groups if group[0]]

    return s.call(function, expected)


@fuzz
def test_clip_grad_norm(s):
    s.any_dtype()
    s.of_any_kind("huge", sick=False)
    parameters = [Parameter(np.zeros(s.shape(), s.dtype)) for _ in range(s.pick(2, 1, 3))]
    for parameter in parameters:
        parameter.grad = s.values(parameter.shape, s.dtype)
    listed, starts = parameters, [plain(p.grad) for p in parameters]
    s.give("parameters", s.pick([*parameters, parameters[0]], (p for p in parameters)), [
        (None, TypeError), (set(parameters), TypeError), ([np.zeros(2)], TypeError),
        (starts, TypeError), (3, TypeError)])  # fmt: skip
    s.give("max_norm", s.pick(1.0, 2, 1e-3, math.inf, np.float32(0.5), 1e-300), [
        (0, ValueError), (-1.0, ValueError), (math.nan, ValueError), (None, TypeError),
        ("1", TypeError), (True, TypeError), ([1.0], TypeError)])  # fmt: skip

    def function(parameters, max_norm):
        norm = clip_grad_norm(parameters, max_norm)
        return [norm], *[p.grad for p in listed]

    def expected(parameters, max_norm):
        largest = max((np.abs(g).max(initial=0.0) for g in starts), default=0.0) or 1.0
        norm = largest * math.sqrt(sum(float(((g / largest) ** 2).sum()) for g in starts))
        factor = float(max_norm) / norm if norm > max_norm else 1.0
        return [float(norm)], *[g * factor for g in starts]

    return s.call(function, expected)


# Schedules


def schedule_call(s, schedule, formula, **arguments):
    for name, (value, bad) in arguments.items():
        s.give(name, value, bad)
    updates = [s.pick(1, 2, 7, 10**6, np.int8(3), 10**18) for _ in range(3)]
    s.give("n", updates, [([n], errors) for n, errors in SIZES])

    def function(n, **options):
        chosen = schedule(**options)
        return [chosen(i) for i in n]

    def expected(n, **options):
        return [float(formula(int(i), **options)) for i in n]

    return s.call(function, expected)


def lr_and_warmup(s, most=10):
    return {"lr": (s.pick(0.1, 1, 0.0, 1e-300, np.float32(0.5)), NUMBERS),
            "warmup": (s.pick(*range(0, most + 1, 2)), COUNTS_FROM_0)}  # fmt: skip


@fuzz
def test_constant_schedule(s):
    def formula(n, lr, warmup):
        return float(lr) * n / warmup if n <= warmup else lr

    return schedule_call(s, constant_schedule, formula, **lr_and_warmup(s))


def decay_schedule_call(s, schedule, falling):
    total = s.pick(10, 3, 1, 10**6, np.int16(8))

    def formula(n, lr, total, warmup, final):
        lr, total = float(lr), int(total)
        if n <= warmup:
            return lr * n / warmup
        if n >= total:
            return final
        return final + (lr - final) * falling((n - warmup) / (total - warmup))

    s.spoil("warmup", [(total + 1, ValueError)])
    return schedule_call(s, schedule, formula, **lr_and_warmup(s, min(10, int(total))),
                         total=(total, SIZES), final=(s.pick(0.0, 0.01, 2.0), NUMBERS))


@fuzz
def test_linear_schedule(s):
    return decay_schedule_call(s, linear_schedule, lambda t: 1.0 - t)


@fuzz
def test_cosine_schedule(s):
    return decay_schedule_call(s, cosine_schedule, lambda t: 0.5 + 0.5 * math.cos(math.pi * t))


@fuzz
def test_noam_schedule(s):
    def formula(n, d_model, warmup, factor):
        rates = [1.0 / math.sqrt(n)] + ([n / (warmup * math.sqrt(warmup))] if warmup else [])
        return float(factor) / math.sqrt(d_model) * min(rates)

    return schedule_call(
        s, noam_schedule, formula, d_model=(s.pick(512, 1, np.int8(3)), SIZES),
        warmup=(s.pick(4000, 0, 1, 5), COUNTS_FROM_0), factor=(s.pick(1.0, 2, 0.0), NUMBERS),
    )  # fmt: skip


# Decoding


@functools.lru_cache
def model_of(kind, seed):
    return decoding_model(kind, seed)


def draw_model(s):
    kind = s.pick(*KINDS)
    model = model_of(kind, s.pick(*range(12)))
    bad = [(None, TypeError), (3, TypeError), (Linear(2, 3), TypeError), (type(model), TypeError)]
    s.give("model", model, bad)
    return kind, model


def draw_items(s, kind, model, longest=4):
    """Sources or prompts, padded on either side -> the items alone."""
    size = 11 if kind == "transformer" else 7
    items = [s.rng.integers(1, size, s.pick(2, 3, 1, longest)).tolist()
             for _ in range(s.pick(2, 1))]  # fmt: skip
    padded = batch_of(items, left=s.pick(False, True), extra=s.pick(0, 1, 3))
    ids = s.array(padded, s.pick("int64", "uint8", "int32", "uint64"))
    limit = model.config.max_len + 1
    bad = [(np.ones((2, limit), int), ValueError), (np.ones(3, int), ValueError),
           (np.ones((1, 2, 2), int), ValueError), (3, ValueError)]  # fmt: skip
    words = "ids|source_ids" if kind == "transformer" else "ids"
    s.give("ids", ids, lambda: [*bad_ids(ids, size), *bad], words=words)
    if kind != "transformer":
        s.spoil("ids", [(np.array([[3, 4], [PAD, PAD]]), ValueError)], words="prompt|ids")
        s.spoil("ids", [(np.zeros((2, 0), int), ValueError)], words="prompt|ids")
    special = [(-1, IndexError), (7, IndexError), (1.5, TypeError), ("2", TypeError),
               (True, TypeError), (10**30, ANY)]  # fmt: skip
    s.give("eos_id", s.pick(EOS, None), special)
    if kind == "transformer":
        s.give("bos_id", BOS, [(None, ValueError), *special])
    else:
        s.spoil("bos_id", [(BOS, ValueError)])
    s.give("max_new_tokens", s.pick(3, 1, 2, np.int8(4)), without(SIZES, None))
    return items


def limits(model, items, max_new_tokens):
    return [min(room(model, item), int(max_new_tokens)) for item in items]


def grow(model, item, limit, eos_id, choose):
    text = []
    while len(text) < limit:
        token = choose(logits_after(model, item, text))
        if token == eos_id:
            break
        text.append(token)
    return text


@fuzz
def test_greedy_decode(s):
    kind, model = draw_model(s)
    items = draw_items(s, kind, model)

    def expected(model, ids, eos_id, max_new_tokens, **_):
        return [grow(model, item, limit, eos_id, lambda logits: int(logits.argmax()))
                for item, limit in zip(items, limits(model, items, max_new_tokens))]  # fmt: skip

    return s.call(greedy_decode, expected)


def draw_sampling(s, V=7):
    """The options -> their values."""
    return {
        "temperature": s.give("temperature", s.pick(1.0, 0.5, 3, 0.0, 1e-3, 1e300), NUMBERS),
        "top_k": s.give("top_k", s.pick(None, 1, 3, V, 100), without(SIZES, None)),
        "top_p": s.give("top_p", s.pick(None, 1.0, 0, s.number(0.1, 0.9)),
                        without(FRACTIONS, None)),
        "min_p": s.give("min_p", s.pick(None, 0.0, 1.0, s.number(0.01, 0.9)),
                        without(FRACTIONS, None)),
    }  # fmt: skip


def probabilities(logits, temperature, top_k, top_p, min_p):
    """By sorting, and loops over the tokens that are left."""
    logits = [float(x) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    largest = logits[order[0]]
    if temperature == 0.0:
        kept = {order[0]: 1.0}
    else:
        kept = {i: math.exp((logits[i] - largest) / temperature) for i in order}
    if top_k is not None:
        kept = {i: kept[i] for i in list(kept)[:top_k]}
    if top_p is not None and top_p < 1.0:
        total, mass = sum(kept.values()), 0.0
        for count, i in enumerate(list(kept), start=1):
            mass += kept[i] / total
            if mass >= top_p - 1e-6:
                kept = {i: kept[i] for i in list(kept)[:count]}
                break
    if min_p is not None:
        kept = {i: weight for i, weight in kept.items() if weight >= min_p * (1.0 - 1e-6)}
    total = sum(kept.values())
    return np.array([kept.get(i, 0.0) / total for i in range(len(logits))])


@fuzz
def test_next_token_probabilities(s):
    V = s.size(5, 1, 2, 7)
    s.of_any_kind(sick=False)
    logits = s.values((V,), np.float64)
    if V > 2 and s.pick(False, True):
        logits[s.rng.integers(V)] = -math.inf
    dtype = s.pick("float64", "float32", "longdouble", "int64", "int16")
    if np.dtype(dtype).kind == "i":
        logits = np.nan_to_num(logits, neginf=-9.0)
    x = s.array(logits, dtype)
    high, low = np.full(V, math.nan), np.full(V, -math.inf)
    s.give("logits", x, lambda: [
        *bad_types(x), (np.zeros((1, V)), ValueError), (np.zeros(0), ValueError),
        (1.0, ValueError), (np.zeros(V, np.float16), TypeError), (np.ones(V, bool), TypeError)])
    s.spoil("logits", [(high, ValueError), (low, ValueError), (-low, ValueError)], words="logits?")
    draw_sampling(s, V)
    s.dtype = np.dtype(np.float64)

    def expected(logits, **options):
        return probabilities(np.asarray(logits).astype(np.float64), **options)

    return s.call(next_token_probabilities, expected)


def drawer(options, seed, item):
    """Token by token, by the numbers of the item's own generator."""
    rng = np.random.default_rng((int(seed), item))

    def draw(logits):
        p = probabilities(logits, **options)
        place, token = rng.random() * p.sum(), -1
        for token in np.flatnonzero(p):
            place -= p[token]
            if place < 0.0:
                break
        return int(token)

    return draw


@fuzz
def test_sample(s):
    kind, model = draw_model(s)
    items = draw_items(s, kind, model)
    options = draw_sampling(s)
    seed = s.give("seed", s.pick(0, 7, np.uint8(3), 2**70), without(SEEDS))

    def expected(model, ids, eos_id, max_new_tokens, **_):
        return [grow(model, item, limit, eos_id, drawer(options, seed, i))
                for i, (item, limit) in enumerate(
                    zip(items, limits(model, items, max_new_tokens)))]  # fmt: skip

    return s.call(sample, expected)


@fuzz
def test_generate(s):
    """Past the positions that the model has, too: it then reads the last ones."""
    model = model_of("language model", s.pick(*range(12)))
    s.give("model", model, [(None, TypeError), (model_of("transformer", 0), TypeError)])
    item = s.rng.integers(1, 7, s.pick(2, 1, 8, 12)).tolist()
    prompt = s.array(item, s.pick("int64", "uint8", "int32"))
    s.give("prompt", prompt, lambda: [
        *bad_ids(prompt, 7), ([], ValueError), (np.zeros((1, 2), int), ValueError),
        ([PAD, PAD], ValueError), (3, ValueError)])  # fmt: skip
    s.give("eos_id", s.pick(EOS, None), [(-1, IndexError), (7, IndexError), (1.5, TypeError)])
    s.give("max_new_tokens", s.pick(3, 1, np.int8(4)), without(SIZES, None))
    options = draw_sampling(s)
    seed = s.give("seed", s.pick(0, 7, 2**70), SEEDS)

    def function(**arguments):
        return list(itertools.islice(generate(**arguments), 20))

    def expected(model, prompt, eos_id, max_new_tokens, **_):
        choose, text, most = drawer(options, seed, 0), list(item), model.config.max_len
        for _ in range(int(max_new_tokens)):
            token = choose(model(np.array([text[-most:]]))[0, -1])
            if token == eos_id:
                break
            text.append(token)
        return text[len(item):]

    return s.call(function, expected)


@fuzz
def test_beam_search(s):
    kind, model = draw_model(s)
    items = draw_items(s, kind, model)
    n_best = s.give("n_best", s.pick(1, 2), SIZES)
    s.give("beam_size", s.pick(2, 3, np.int8(5)), SIZES)
    s.spoil("n_best", [(6, ValueError)])
    s.give("length_penalty", s.pick(1.0, 0, 0.6, -1, np.float32(2)), [
        (math.nan, ValueError), (math.inf, ValueError), (51, ValueError), (None, TypeError),
        ("1", TypeError), (True, TypeError), (10**400, ValueError), (1j, TypeError)])  # fmt: skip
    s.give("eos_id", EOS)

    def expected(model, ids, beam_size, length_penalty, max_new_tokens, **_):
        def search(item, limit):
            def next_log_p(text):
                logits = logits_after(model, item, text)
                shifted = logits - logits.max()
                return shifted - np.log(np.exp(shifted).sum())

            alpha = float(length_penalty)
            return plain_beam_search(next_log_p, limit, int(beam_size), alpha, n_best)

        return [search(item, n) for item, n in zip(items, limits(model, items, max_new_tokens))]

    return s.call(beam_search, expected)


@fuzz
def test_decoding_state(s):
    """Pieces of a text, and its rows in another order, against one pass over all of it."""
    kind, model = draw_model(s)
    B, V = s.pick(2, 1, 3), 7
    first, second = (s.rng.integers(1, V, (B, n)) for n in (s.pick(1, 3), s.pick(1, 2)))
    for name, ids in ("ids", first), ("more", second):
        x = s.array(ids, s.pick("int64", "uint8", "int32"))
        bad = [(np.ones((B, 10), int), ValueError), (np.ones((B, 0), int), ValueError),
               (np.ones(B, int), ValueError), (1, ValueError)]  # fmt: skip
        if name == "more" or kind == "transformer":
            bad.append((np.ones((B + 1, 2), int), ValueError))
        s.give(name, x, functools.partial(lambda x, bad: [*bad_ids(x, V), *bad], x, bad),
               words="ids|positions with those before")  # fmt: skip
    order = s.rng.integers(0, B, s.pick(2, 1, 0))
    rows = s.array(order, s.pick("int64", "uint8"))
    s.give("rows", rows, lambda: [*bad_ids(rows, B), (np.zeros((1, 1), int), ValueError),
                                  (0, ValueError)])  # fmt: skip
    sources = None
    if kind == "transformer":
        sources = s.rng.integers(1, 11, (B, 4))
        given = s.array(sources, "int64")
        s.give("source_ids", given, lambda: [
            *bad_ids(given, 11), (np.ones(3, int), ValueError),
            (np.ones((B, 2, 2), int), ValueError)])  # fmt: skip
    else:
        s.spoil("source_ids", [(np.ones((B, 2), int), ValueError)], words="source|prompt")

    def function(model, ids, more, rows, source_ids=None):
        state = DecodingState(model, source_ids)
        one = state.prompt(ids)
        two = state.extend(more)
        assert state.length == np.shape(ids)[1] + np.shape(more)[1]
        state.select(rows)
        return one, two, state.extend(np.ones((len(rows), 1), int))

    def logits(ids, rows=slice(None)):
        return (model(ids) if sources is None else model(sources[rows], ids))[:, -1]

    def expected(**_):
        both = np.hstack([first, second])
        more = np.hstack([both[order], np.ones((len(order), 1), int)])
        return logits(first), logits(both), logits(more, order)

    return s.call(function, expected)


# Proof and traces


@fuzz
def test_gradcheck(s):
    layer = Linear(2, 3, s.pick(True, False), rng=0, dtype=np.float64)
    s.give("layer", layer, [(None, ANY), (3, ANY)])
    s.any_dtype()
    s.dtype = np.dtype(np.float64) if s.dtype == np.float32 else s.dtype
    x = s.array(s.values((s.length(), 2), s.dtype), s.dtype)
    s.give("x", x, [(np.zeros((2, 2), np.float32), TypeError), (np.zeros((2, 2), int), TypeError),
                    (np.zeros((2, 5)), ValueError), (np.full((2, 2), "1"), TypeError),
                    (None, TypeError)])  # fmt: skip
    s.spoil("x", [(np.full((1, 2), math.nan), ValueError)], words="x|output")
    s.give("mode", s.pick("full", "directional"), WORDS)
    bad = [(0, ValueError), (-1.0, ValueError), (math.nan, ValueError), ("1", TypeError),
           (None, TypeError)]  # fmt: skip
    s.give("tolerance", s.pick(1e-6, 1e-3), bad)
    s.give("step", s.pick(1e-5, 1e-4), bad)
    s.give("seed", s.pick(0, 5), SEEDS)

    def function(layer, x, **options):
        report = gradcheck(layer, x, **options)
        return {"ok": report.ok, "rows": len(report.rows)}

    return s.call(function, lambda **_: {"ok": True, "rows": 2 + (layer.b is not None)})


@fuzz
def test_trace(s):
    """A trace changes nothing, and has the numbers by their names."""
    layer = EncoderLayer(4, 2, norm=s.pick("pre", "post"), rng=0, dtype=np.float64)
    s.give("model", layer)
    x = s.array(s.values((s.pick(2, 1, 0), s.length(), 4), s.dtype), "float64")
    s.give("x", x, lambda: [(np.zeros((2, 4)), ValueError), (None, TypeError)])
    s.give("name", s.pick("", "feed_forward.linear1"), [("linear1", KeyError), (3, KeyError)],
           words="linear1|3")  # fmt: skip
    y = layer(x)
    linear = layer.feed_forward.linear1

    def function(model, x, name):
        with Trace(model) as trace:
            out, _ = model.forward(x)
        found = trace[name]
        if name == "":
            assert np.array_equal(found["x"], np.asarray(x))
            return {"y": out, "in the trace": found["y"]}
        return {"y": out, "in the trace": found["y"] - linear(found["x"])}

    def expected(model, x, name):
        return {"y": y, "in the trace": np.zeros((*np.shape(x)[:-1], 16)) if name else y}

    return s.call(function, expected)


@fuzz
def test_astype(s):
    layer = Linear(s.size(), s.size(), rng=0, dtype=s.any_dtype())
    values = {name: plain(array) for name, array in layer.state_dict().items()}
    to = s.give("dtype", s.pick("float64", np.float32, np.longdouble, ">f8"), [
        (np.float16, TypeError), (int, TypeError), ("bogus", TypeError), (complex, TypeError),
        (object, TypeError), (3, TypeError)])  # fmt: skip
    s.dtype = np.dtype(to).newbyteorder("=")

    def function(dtype):
        assert layer.astype(dtype) is layer
        return layer.state_dict()

    return s.call(function, lambda dtype: {k: plain(v, s.dtype) for k, v in values.items()})
