from itertools import chain

import numpy as np
import pytest
from helpers import (
    MASKS,
    assert_close,
    assert_equal,
    assert_gradients,
    distinct_primes,
    draw_mask,
    dropout_places,
    few,
    layer_options,
    plain_attend,
    plain_attention,
    plain_heads,
    plain_layer,
    plain_norm,
    randomise,
    run,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import Decoder, DecoderLayer, causal_mask

masks = st.sampled_from(MASKS)
crosses = st.sampled_from(["per_layer", "shared", "none"])
final_norms = st.sampled_from([True, False, None])
CROSSES = ["per_layer", "shared", "none"]


def layer_memory(cross, rng, B, h, S, d_k, d_v, d_model=6):
    """What a DecoderLayer takes as its memory."""
    if cross == "none":
        return None
    if cross == "shared":
        return rng.standard_normal((B, h, S, d_k)), rng.standard_normal((B, h, S, d_v))
    return rng.standard_normal((B, S, d_model))


def draw_masks(cross, kinds, rng, B, h, T, S):
    target, memory = kinds
    return {
        "target_mask": draw_mask(target, rng, B, h, T, T),
        "memory_mask": draw_mask("none" if cross == "none" else memory, rng, B, h, T, S),
    }


@few(6)
@given(
    sizes=st.permutations([2, 3, 4, 5]),
    cross=crosses,
    options=layer_options,
    kinds=st.tuples(masks, masks),
    seed=seeds,
)
def test_gradients_of_a_layer(sizes, cross, options, kinds, seed):
    rng = np.random.default_rng(seed)
    B, T, S, d_v = sizes
    options |= {"d_k": 3, "d_v": d_v, "cross_attention": cross, "dtype": np.float64}
    layer = randomise(DecoderLayer(6, 2, 7, **options), rng)
    memory = layer_memory(cross, rng, B, 2, S, 3, d_v)
    keywords = draw_masks(cross, kinds, rng, B, 2, T, S)
    assert_gradients(layer, rng.standard_normal((B, T, 6)), memory, rng=rng, **keywords)


@few(15)
@given(
    sizes=distinct_primes(6),
    cross=crosses,
    options=layer_options,
    final_norm=final_norms,
    kinds=st.tuples(masks, masks),
    seed=seeds,
)
def test_gradients_of_a_stack(sizes, cross, options, final_norm, kinds, seed):
    rng = np.random.default_rng(seed)
    B, T, S, h, d_k, d_v = sizes
    options |= {"d_k": d_k, "d_v": d_v, "final_norm": final_norm, "dtype": np.float64}
    stack = randomise(Decoder(2, 6, h, 17, cross_attention=cross, **options), rng)
    x, memory = rng.standard_normal((B, T, 6)), rng.standard_normal((B, S, 6))
    keywords = draw_masks(cross, kinds, rng, B, h, T, S)
    memory = None if cross == "none" else memory
    assert_gradients(stack, x, memory, mode="directional", rng=rng, **keywords)


@given(
    sizes=distinct_primes(6),
    cross=crosses,
    options=layer_options,
    final_norm=final_norms,
    kinds=st.tuples(masks, masks),
    seed=seeds,
)
def test_equals_the_plain_functions(sizes, cross, options, final_norm, kinds, seed):
    """Queries come from the decoder, keys and values from the memory, each norm is at its place."""
    rng = np.random.default_rng(seed)
    B, T, S, h, d_k, d_v = sizes
    options |= {"d_k": d_k, "d_v": d_v, "final_norm": final_norm, "dtype": np.float64}
    stack = randomise(Decoder(2, 6, h, 17, cross_attention=cross, **options), rng)
    x, memory = rng.standard_normal((B, T, 6)), rng.standard_normal((B, S, 6))
    keywords = draw_masks(cross, kinds, rng, B, h, T, S)

    def cross_of(layer):
        if cross == "none":
            return None
        if cross == "per_layer":
            return lambda y: plain_attention(
                layer.cross_attention, y, memory, keywords["memory_mask"]
            )
        K = plain_heads(stack.memory_projection.W_k, memory, h)
        V = plain_heads(stack.memory_projection.W_v, memory, h)
        return lambda y: plain_attend(layer.cross_attention, y, K, V, keywords["memory_mask"])

    expected = x
    for layer in stack.layers:
        expected = plain_layer(
            layer, expected, options["norm"], keywords["target_mask"], cross_of(layer)
        )
    has_norm = options["norm"] == "pre" if final_norm is None else final_norm
    assert (stack.norm is not None) == has_norm
    if has_norm:
        expected = plain_norm(stack.norm, expected)
    found = stack(x, None if cross == "none" else memory, **keywords)
    assert_close(found, expected)


def draw_stack(cross="per_layer", norm="pre", layers=2, seed=0, **options):
    stack = Decoder(
        layers, 6, 2, d_k=4, d_v=5, cross_attention=cross, norm=norm, dtype=np.float64, **options
    )
    rng = np.random.default_rng(seed)
    x, memory = rng.standard_normal((3, 7, 6)), rng.standard_normal((3, 5, 6))
    return randomise(stack, rng), x, None if cross == "none" else memory, rng


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("cross", CROSSES)
def test_future_does_not_move_a_bit(cross, norm):
    stack, x, memory, rng = draw_stack(cross, norm)
    before = stack(x, memory, causal_mask(7))
    for t in range(1, 7):
        moved = x.copy()
        moved[:, t:] = 100 * rng.standard_normal(moved[:, t:].shape)
        after = stack(moved, memory, causal_mask(7))
        assert_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(axis=-1).all()


@pytest.mark.parametrize("cross", CROSSES)
def test_gradient_goes_to_the_past_only(cross):
    stack, x, memory, _ = draw_stack(cross)
    for t in range(7):
        dy = np.zeros_like(x)
        dy[:, t] = np.arange(6)
        _, returned, _ = run(stack, (x, memory), {"target_mask": causal_mask(7)}, dy)
        dx = returned if cross == "none" else returned[0]
        assert (dx[:, t + 1 :] == 0).all()
        assert (dx[:, : t + 1] != 0).any(axis=-1).all()


@pytest.mark.parametrize("cross", CROSSES)
def test_none_masks_nothing(cross):
    """Causality is a mask like another: without one every position sees every other."""
    stack, x, memory, _ = draw_stack(cross)
    before = stack(x, memory)
    x[:, 6] += np.arange(6)
    assert (stack(x, memory) != before).any(axis=-1).all()


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("cross", ["per_layer", "shared"])
def test_all_of_the_memory_is_seen_but_what_is_masked(cross, norm):
    stack, x, memory, _ = draw_stack(cross, norm)
    mask = np.ones((3, 1, 1, 5), bool)
    mask[0, ..., 3:] = False
    before = stack(x, memory, None, mask)
    for s in range(5):
        moved = memory.copy()
        moved[:, s] += 10 * np.arange(6)
        after = stack(x, moved, None, mask)
        assert (after[1:] != before[1:]).any(axis=-1).all()
        assert (after[0] != before[0]).any() == (s < 3)


@pytest.mark.parametrize("cross", ["per_layer", "shared"])
def test_masked_memory_gets_no_gradient(cross):
    stack, x, memory, rng = draw_stack(cross)
    mask = np.ones((3, 1, 1, 5), bool)
    mask[0, ..., 3:] = False
    _, (_, dmemory), _ = run(stack, (x, memory, None, mask), {}, rng.standard_normal(x.shape))
    assert (dmemory[0, 3:] == 0).all()
    assert (dmemory[0, :3] != 0).all()
    assert (dmemory[1:] != 0).all()


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("cross", CROSSES)
def test_nothing_visible_at_all(cross, norm):
    """Weights and contexts are zero: the stack goes on without attention, gradients are finite."""
    stack, x, memory, rng = draw_stack(cross, norm)
    nothing = np.zeros((1, 1), bool)
    with np.errstate(all="raise"):
        y, ctx = stack.forward(x, memory, nothing, None if cross == "none" else nothing)
        returned = stack.backward(ctx, rng.standard_normal(y.shape))
    for layer in ctx.layers:
        assert (layer.self_attention.attend.attention.A == 0).all()
        assert (layer.self_attention.attend.W_o.x == 0).all()
    for name, parameter in stack.named_parameters():
        assert np.isfinite(parameter.grad).all()
        if "attention.W" in name or "projection.W" in name:
            assert (parameter.grad == 0).all(), name
    if cross != "none":
        assert (returned[1] == 0).all()


def test_shared_memory_equals_layers_that_project_alike():
    """Shared keys and values are per-layer ones whose W_k and W_v are equal: same output, same
    gradients, and the projection's is the sum of theirs."""
    shared, x, memory, rng = draw_stack("shared")
    per_layer, *_ = draw_stack("per_layer")
    state = shared.state_dict()
    for name in list(state):
        if name.startswith("memory_projection."):
            array = state.pop(name)
            for i in range(2):
                state[name.replace("memory_projection", f"layers.{i}.cross_attention")] = array
    per_layer.load_state_dict(state)
    dy = rng.standard_normal(x.shape)
    keywords = {"target_mask": causal_mask(7), "memory_mask": rng.random((3, 1, 7, 5)) < 0.7}
    one = run(shared, (x, memory), keywords, dy)
    other = run(per_layer, (x, memory), keywords, dy)
    assert_close(one[:2], other[:2])
    for part in "W_k.W", "W_v.W":
        total = sum(other[2][f"layers.{i}.cross_attention.{part}"] for i in range(2))
        assert_close(one[2][f"memory_projection.{part}"], total)
    for name, grad in one[2].items():
        if name in other[2]:
            assert_close(grad, other[2][name])


@pytest.mark.parametrize("cross", ["per_layer", "shared"])
def test_gradient_of_the_memory_is_the_sum_over_the_layers(cross):
    stack, x, memory, rng = draw_stack(cross, layers=3)
    y, ctx = stack.forward(x, memory)
    dy = rng.standard_normal(y.shape)
    _, dmemory = stack.backward(ctx, dy)
    dx = stack.norm.backward(ctx.norm, dy)
    parts = []
    for layer, layer_ctx in zip(stack.layers[::-1], ctx.layers[::-1]):
        dx, *part = layer.backward(layer_ctx, dx)
        if cross == "shared":
            part = [stack.memory_projection.backward(ctx.project, tuple(part))]
        parts.append(part[0])
    assert_close(dmemory, sum(parts))


@pytest.mark.parametrize("cross", CROSSES)
def test_layers_start_with_weights_of_their_own(cross):
    stack = Decoder(3, 6, 2, attention_bias=True, cross_attention=cross, rng=0)
    matrices = [p.value for p in stack.parameters() if p.value.ndim == 2]
    assert len(matrices) == {"per_layer": 3 * 10, "shared": 3 * 8 + 2, "none": 3 * 6}[cross]
    for i, a in enumerate(matrices):
        assert not any(a.shape == b.shape and (a == b).all() for b in matrices[:i])
    arrays = [p.value for p in stack.parameters()]
    for i, a in enumerate(arrays):
        assert not any(np.shares_memory(a, b) for b in arrays[:i])


@pytest.mark.parametrize("cross", CROSSES)
def test_names(cross):
    names = [name for name, _ in Decoder(1, 6, 2, cross_attention=cross).named_parameters()]
    crossing = {"per_layer": "qkvo", "shared": "qo", "none": ""}[cross]
    expected = [f"memory_projection.W_{x}.W" for x in "kv" if cross == "shared"]
    expected += [f"layers.0.self_attention.W_{x}.W" for x in "qkvo"]
    expected += [f"layers.0.cross_attention.W_{x}.W" for x in crossing]
    expected += [f"layers.0.feed_forward.linear{n}.{p}" for n in (1, 2) for p in "Wb"]
    norms = range(1, 3 if cross == "none" else 4)
    expected += [f"layers.0.norm{n}.{p}" for n in norms for p in ("gamma", "beta")]
    assert names == [*expected, "norm.gamma", "norm.beta"]


def test_number_of_parameters_of_the_articles_layer():
    """8.26 M at d_model 768 and d_ff 3072, with keys and values of the memory shared."""
    layer = DecoderLayer(768, 12, 3072, cross_attention="shared", rng=0)
    norms = sum(p.size for n in (layer.norm1, layer.norm2, layer.norm3) for p in n.parameters())
    weights = 6 * 768 * 768 + 2 * 768 * 3072 + 3072 + 768
    assert layer.num_parameters() - norms == weights == 8_261_376
    assert norms == 6 * 768


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("cross", CROSSES)
def test_places_of_dropout(cross, norm):
    x, memory = np.ones((2, 3, 6)), None if cross == "none" else np.ones((2, 5, 6))

    def places(**options):
        stack = Decoder(1, 6, 2, cross_attention=cross, norm=norm, **options)
        _, ctx = stack.forward(x, memory, rng=np.random.default_rng(0))
        return {path.removeprefix("layers.0.") for path in dropout_places(ctx)}

    weights = {"self_attention.attend.attention.dropout"}
    others = {"leave1.dropout", "feed_forward.dropout", "leave_last.dropout"}
    if cross != "none":
        attend = "attend." if cross == "per_layer" else ""
        weights.add(f"cross.attention.{attend}attention.dropout")
        others.add("cross.leave.dropout")
    assert places() == set()
    assert places(attention_dropout=0.5) == weights
    assert places(dropout=0.5, attention_dropout=0.0) == others
    assert places(dropout=0.5) == weights | others


def test_every_dropout_draws_for_itself():
    _, ctx = Decoder(2, 6, 2, dropout=0.5).forward(
        np.ones((2, 7, 6)), np.ones((2, 7, 6)), rng=np.random.default_rng(0)
    )
    keeps = list(dropout_places(ctx).values())
    assert len(keeps) == 2 * 6
    for i, a in enumerate(keeps):
        assert not any(a.shape == b.shape and (a == b).all() for b in keeps[:i])


def test_norm_options_reach_every_norm():
    stack = Decoder(2, 6, 2, final_norm=True, norm="post", norm_eps=0.5, norm_bias=False)
    norms = chain(*([layer.norm1, layer.norm2, layer.norm3] for layer in stack.layers))
    assert all(n.eps == 0.5 and n.beta is None for n in [*norms, stack.norm])


@pytest.mark.parametrize("make", [DecoderLayer, lambda *a, **k: Decoder(2, *a, **k)])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cross_attention": "both"}, ValueError,
         "cross_attention is 'both', expected one of 'per_layer', 'shared', 'none'"),
        ({"norm": "middle"}, ValueError, "norm is 'middle', expected one of 'pre', 'post'"),
        ({"activation": "tanh"}, ValueError, "activation is 'tanh', expected one of 'relu'"),
        ({"dropout": 1.5}, ValueError, "dropout is 1.5"),
        ({"attention_dropout": np.nan}, ValueError, "attention_dropout is nan"),
        ({"norm_eps": np.nan}, ValueError, "(norm_)?eps is nan"),
        ({"num_heads": 4}, ValueError, "d_model 6 is not divisible by num_heads 4"),
        ({"d_ff": 0}, ValueError, "d_ff is 0"),
        ({"d_v": 0}, ValueError, "d_v is 0"),
    ],
)  # fmt: skip
def test_options_are_checked(make, options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make(**{"d_model": 6, "num_heads": 2, **options})


def test_the_number_of_layers_is_checked():
    for number, error in (0, ValueError), (2.0, TypeError):
        with pytest.raises(error, match=r"^num_layers is"):
            Decoder(number, 6, 2)


X, MEMORY = (2, 5, 6), (2, 7, 6)
BAD_INPUT = {
    "x without batch": ((5, 6), MEMORY, {}, r"^x has shape \(5, 6\)"),
    "x too wide": ((2, 5, 7), MEMORY, {}, r"^x has shape \(2, 5, 7\)"),
    "memory of 1 item": (X, (1, 7, 6), {}, r"memory.*\(1, 7, 6\)"),
    "x of 1 item": ((1, 5, 6), MEMORY, {}, r"memory.*\(2, 7, 6\)"),
    "memory too wide": (X, (2, 7, 5), {}, r"memory.*\(2, 7, 5\)"),
    "memory without batch": (X, (7, 6), {}, r"memory.*\(7, 6\)"),
    "no memory": (X, None, {}, r"^memory is None"),
    "target mask (B, T, T)": (X, MEMORY, {"target_mask": (2, 5, 5)}, r"target_mask.*\(2, 5, 5\)"),
    "target mask (T, S)": (X, MEMORY, {"target_mask": (5, 7)}, r"target_mask.*\(5, 7\)"),
    "target mask (T,)": (X, MEMORY, {"target_mask": (5,)}, r"target_mask.*\(5,\)"),
    "memory mask (h, T, S)": (X, MEMORY, {"memory_mask": (3, 5, 7)}, r"memory_mask.*\(3, 5, 7\)"),
    "memory mask (S, T)": (X, MEMORY, {"memory_mask": (7, 5)}, r"memory_mask.*\(7, 5\)"),
    "memory mask (S,)": (X, MEMORY, {"memory_mask": (7,)}, r"memory_mask.*\(7,\)"),
}


@pytest.mark.parametrize(
    "block",
    [
        DecoderLayer(6, 3, rng=0),
        Decoder(2, 6, 3, rng=0),
        Decoder(2, 6, 3, cross_attention="shared", rng=0),
    ],
)
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(block, case):
    x, memory, masks, message = BAD_INPUT[case]
    memory = None if memory is None else np.zeros(memory)
    masks = {name: np.ones(shape, bool) for name, shape in masks.items()}
    with pytest.raises(ValueError, match=message):
        block(np.zeros(x), memory, **masks)


@pytest.mark.parametrize("name", ["target_mask", "memory_mask"])
@pytest.mark.parametrize("cross", ["per_layer", "shared"])
def test_an_integer_mask_is_refused(cross, name):
    block = Decoder(1, 6, 3, cross_attention=cross)
    mask = np.ones((5, 5 if name == "target_mask" else 7), int)
    with pytest.raises(TypeError, match=rf"{name} has dtype .*astype\(bool\)"):
        block(np.zeros(X), np.zeros(MEMORY), **{name: mask})


def test_a_memory_that_is_not_used():
    for block in (
        DecoderLayer(6, 3, cross_attention="none"),
        Decoder(2, 6, 3, cross_attention="none"),
    ):
        with pytest.raises(ValueError, match=r"^memory .*was given"):
            block(np.zeros(X), np.zeros(MEMORY))
        with pytest.raises(ValueError, match=r"memory_mask was given"):
            block(np.zeros(X), memory_mask=np.ones((5, 7), bool))


@pytest.mark.parametrize(
    "memory",
    [
        np.zeros((2, 7, 6)),
        (np.zeros((2, 3, 7, 2)),),
        (np.zeros((2, 3, 7, 2)),) * 3,
        (np.zeros((2, 3, 7, 2)), np.zeros((1, 3, 7, 2))),
        (np.zeros((2, 3, 7, 2)), np.zeros((2, 3, 5, 2))),
        (np.zeros((2, 2, 7, 3)), np.zeros((2, 2, 7, 3))),
    ],
)
def test_a_memory_that_is_no_pair_of_keys_and_values(memory):
    layer = DecoderLayer(6, 3, cross_attention="shared")
    with pytest.raises(ValueError, match=r"^memory (is not the pair|\(K, V\) has shapes)"):
        layer(np.zeros(X), memory)


def test_dy_is_checked():
    for block in DecoderLayer(6, 2), Decoder(2, 6, 2, norm="post"):
        _, ctx = block.forward(np.ones((2, 3, 6)), np.ones((2, 5, 6)))
        for shape in (2, 3, 5), (1, 3, 6), (2, 1, 6), (3, 6), ():
            with pytest.raises(ValueError, match=r"dy has shape"):
                block.backward(ctx, np.zeros(shape))


@pytest.mark.parametrize("option", ["norm_bias", "attention_bias", "feed_forward_bias"])
@pytest.mark.parametrize("cross", ["per_layer", "shared", "none"])
def test_an_option_that_is_neither_true_nor_false_is_named(cross, option):
    for make in lambda **o: Decoder(1, 4, 2, **o), lambda **o: DecoderLayer(4, 2, **o):
        with pytest.raises(TypeError, match=f"^{option} is 1, expected True or False"):
            make(cross_attention=cross, **{option: 1})
