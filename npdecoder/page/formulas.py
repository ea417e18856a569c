"""The formulas of each call, forward and backward, as MathML."""

from __future__ import annotations

import re
from collections.abc import Container
from html import escape
from typing import Any

Lines = list[str]
Key = tuple[str, str, str]


def formula_key(layer: Any, method: str, names: Container[str] = ()) -> Key:
    """The key in FORMULAS of a call of layer.method: class, forward method, kind of layer.

    method: one of a pair, such as enter and enter_backward, which have one key. names: those of the
    call's arrays (a Dropout that dropped has a `keep`). A layer without formulas has a key that is
    not in FORMULAS.
    """
    forward = "forward" if method == "backward" else method.removesuffix("_backward")
    return type(layer).__name__, forward, _kind(layer, names)


def _kind(layer: Any, names: Container[str]) -> str:
    def has(path: str) -> bool:
        return _attribute(layer, path) is not None

    cls = type(layer).__name__
    if cls in ("Linear", "Unembedding"):
        return "bias" if has("b") else ""
    if cls == "LayerNorm":
        return "bias" if has("beta") else ""
    if cls in ("MultiHeadAttention", "MemoryAttention", "MemoryProjection"):
        return "bias" if has("W_q.b") or has("W_k.b") else ""
    if cls == "Embedding":
        return "" if _attribute(layer, "scale") == 1.0 else "scaled"
    if cls == "GELU":
        return str(_attribute(layer, "approximate"))
    if cls == "Dropout":
        return "dropped" if "keep" in names else ""
    if cls == "Residual":
        return str(_attribute(layer, "place"))
    if cls == "EncoderLayer":
        return str(_attribute(layer, "residual1.place"))
    if cls == "DecoderLayer":
        cross = "shared" if not has("cross_attention.W_k") else "per_layer"
        cross = cross if has("cross_attention") else "none"
        return f"{_attribute(layer, 'residual1.place')} {cross}"
    if cls == "Encoder":
        return "norm" if has("norm") else ""
    if cls == "Decoder":
        layers = _attribute(layer, "layers") or ()
        crossing = any(_attribute(part, "cross_attention") is not None for part in layers)
        cross = "shared" if has("memory_projection") else "per_layer" if crossing else "none"
        return f"{cross} norm" if has("norm") else cross
    if cls in ("Transformer", "LanguageModel"):
        return "learned" if has("source_positions.P.grad") or has("positions.P.grad") else ""
    return ""


def _attribute(layer: Any, path: str) -> Any:
    for name in path.split("."):
        layer = getattr(layer, name, None)
    return layer


# One line a formula, in the letters of the layer files; see math() for the notation. By class,
# forward method and kind (formula_key): the lines of forward, and those of its backward.
FORMULAS: dict[Key, tuple[Lines, Lines]] = {}

for _bias in ("", "bias"):
    _b = " + b" if _bias else ""
    _db = ["db = sum_{n} dy_rows_n"] if _bias else []
    FORMULAS |= {
        ("Linear", "forward", _bias): (
            [f"y = x W{_b}"],
            ["dx = dy W^T", "dW = x_rows^T dy_rows", *_db],
        ),
        ("Unembedding", "forward", _bias): (
            [f"logits = x W^T{_b}"],
            ["dx = dy W", "dW = dy_rows^T x_rows", *_db],
        ),
        ("LayerNorm", "forward", _bias): (
            ["nearly = x - mean(x)", "xc = nearly - mean(nearly)", "var = mean(xc * xc)",
             "rstd = frac{1}{sqrt{var + eps}}", "x_hat = xc * rstd",
             "y = gamma * x_hat + beta" if _bias else "y = gamma * x_hat"],
            ["dx_hat = dy * gamma", "dxc = rstd * ( dx_hat - x_hat * mean(dx_hat * x_hat) )",
             "dx = dxc - mean(dxc)", "dgamma = sum_{n} dy_n * x_hat_n",
             *(["dbeta = sum_{n} dy_n"] if _bias else [])],
        ),
    }  # fmt: skip

for _kind_of_scale, _scale in ("", "scale = 1"), ("scaled", "scale = sqrt{d_model}"):
    FORMULAS["Embedding", "forward", _kind_of_scale] = (
        [_scale, "y_n = scale W_{ids_n}"],
        ["drows = scale dy", "dW_i = sum_{ids_n = i} drows_n"],
    )

FORMULAS |= {
    ("SinusoidalPositions", "forward", ""): (
        ["P_{t,2i} = sin frac{t}{10000^{2i/d_model}}",
         "P_{t,2i+1} = cos frac{t}{10000^{2i/d_model}}", "y_t = x_t + P_{positions_t}"],
        ["dx = dy"],
    ),
    ("LearnedPositions", "forward", ""): (
        ["y_t = x_t + P_{positions_t}"],
        ["dx = dy", "dP_i = sum_{positions_t = i} dy_t"],
    ),
    ("Softmax", "forward", ""): (
        ["e_i = exp(x_i - max(x))", "Z = sum_{i} e_i + [ sum_{i} e_i = 0 ]", "y_i = frac{e_i}{Z}"],
        ["dx_i = ( dy_i - sum_{j} dy_j y_j ) y_i"],
    ),
    ("ReLU", "forward", ""): (["y = max(x, 0)"], ["dx = dy * [ y > 0 ]"]),
    ("GELU", "forward", "none"): (
        ["Phi = frac{1}{2} ( 1 + erf(frac{x}{sqrt{2}}) )",
         "dPhi = frac{1}{sqrt{2 pi}} exp(- frac{x^2}{2})", "y = x * Phi",
         "slope = Phi + x * dPhi"],
        ["dx = dy * slope"],
    ),
    ("GELU", "forward", "tanh"): (
        ["u = sqrt{frac{2}{pi}} ( x + 0.044715 x^3 )", "Phi = frac{1}{2} ( 1 + tanh(u) )",
         "dPhi = frac{1}{2} ( 1 - tanh(u)^2 ) * sqrt{frac{2}{pi}} ( 1 + 3 · 0.044715 x^2 )",
         "y = x * Phi", "slope = Phi + x * dPhi"],
        ["dx = dy * slope"],
    ),
    ("Dropout", "forward", ""): (["y = x"], ["dx = dy"]),
    ("Dropout", "forward", "dropped"): (
        ["y = x * frac{keep}{1 - p}"],
        ["dx = dy * frac{keep}{1 - p}"],
    ),
    ("ScaledDotProductAttention", "forward", ""): (
        ["S = frac{q k^T}{sqrt{d_k}}", "S_masked = mask(S)", "A = softmax(S_masked)",
         "A_dropped = dropout(A)", "context = A_dropped v"],
        ["dA_dropped = dy v^T", "dv = A_dropped^T dy", "dA = dropout.backward(dA_dropped)",
         "dS_{ts} = A_{ts} ( dA_{ts} - sum_{r} dA_{tr} A_{tr} )",
         "dq = frac{dS k}{sqrt{d_k}}", "dk = frac{dS^T q}{sqrt{d_k}}"],
    ),
    ("CrossEntropy", "forward", ""): (
        ["log_p = log softmax(logits)", "log_p_target_n = log_p_{n,targets_n}",
         "mixed_n = ( 1 - e ) log_p_target_n + frac{e}{V} sum_{v} log_p_{n,v}",
         "loss = - frac{1}{count} sum_{n} counted_n mixed_n"],
        ["p = exp(log_p)",
         "dlogits_{n,v} = frac{dloss}{count} counted_n "
         "( p_{n,v} - ( 1 - e ) [ v = targets_n ] - frac{e}{V} )"],
    ),
    ("FeedForward", "forward", ""): (
        ["hidden = linear1(x)", "active = activation(hidden)", "dropped = dropout(active)",
         "y = linear2(dropped)"],
        ["ddropped = linear2.backward(dy)", "dactive = dropout.backward(ddropped)",
         "dhidden = activation.backward(dactive)", "dx = linear1.backward(dhidden)"],
    ),
}  # fmt: skip

for _bias in ("", "bias"):
    _b_q, _b_k, _b_v, _b_o = (f" + b_{_x}" if _bias else "" for _x in "qkvo")
    _project = (
        [f"keys = key W_k{_b_k}", f"values = value W_v{_b_v}", "K = split(keys)",
         "V = split(values)"],
        ["dvalue = merge(dV) W_v^T", "dkey = merge(dK) W_k^T"],
    )  # fmt: skip
    _attend = (
        [f"queries = query W_q{_b_q}", "Q = split(queries)", "context = attention(Q, K, V)",
         f"output = merge(context) W_o{_b_o}"],
        ["dcontext = split(dy W_o^T)", "(dQ, dK, dV) = attention.backward(dcontext)",
         "dquery = merge(dQ) W_q^T"],
    )  # fmt: skip
    FORMULAS |= {
        ("MultiHeadAttention", "forward", _bias): (
            [*_project[0], *_attend[0]],
            [*_attend[1], *_project[1]],
        ),
        ("MultiHeadAttention", "project", _bias): _project,
        ("MultiHeadAttention", "attend", _bias): _attend,
        ("MemoryAttention", "forward", _bias): _attend,
        ("MemoryAttention", "attend", _bias): _attend,
        ("MemoryProjection", "project", _bias): _project,
        ("MemoryProjection", "forward", _bias): (
            [f"keys = memory W_k{_b_k}", f"values = memory W_v{_b_v}", *_project[0][2:]],
            [*_project[1], "dmemory = dkey + dvalue"],
        ),
    }


def _around(
    place: str, norm: str, x: str, h: str, s: str, y: str, inside: tuple[Lines, Lines]
) -> tuple[Lines, Lines]:
    """The lines of one sublayer on its residual path, which those of `inside` take from h to s."""
    if place == "pre":
        forward = [f"{h} = {norm}({x})", *inside[0], f"{y} = {x} + dropout({s})"]
        past, through = f"d{x}_past = d{y}", f"{norm}.backward(d{h})"
    else:
        forward = [f"{h} = {x}", *inside[0], f"{y} = {norm}({x} + dropout({s}))"]
        past, through = f"d{x}_past = {norm}.backward(d{y})", f"d{h}"
    backward = [past, f"d{s} = dropout.backward(d{x}_past)", *inside[1],
                f"d{x} = d{x}_past + {through}"]  # fmt: skip
    return forward, backward


_self_attention = (
    ["s1 = self_attention(h1, h1, h1)"],
    ["(dquery, dkey, dvalue) = self_attention.backward(ds1)", "dh1 = dquery + dkey + dvalue"],
)
_cross_attention = {
    "per_layer": (  # with a prime: the names without are those of the self-attention
        ["s2 = cross_attention(h2, memory, memory)"],
        ["(dh2, dkey', dvalue') = cross_attention.backward(ds2)", "dmemory = dkey' + dvalue'"],
    ),
    "shared": (
        ["s2 = cross_attention(h2, K, V)"],
        ["(dh2, dK, dV) = cross_attention.backward(ds2)"],
    ),
}


def _feed_forward(i: int) -> tuple[Lines, Lines]:
    return [f"s{i} = feed_forward(h{i})"], [f"dh{i} = feed_forward.backward(ds{i})"]


for _place in ("pre", "post"):
    FORMULAS["Residual", "enter", _place] = (
        (["h = norm(x)"], ["dx = norm.backward(dh)"])
        if _place == "pre"
        else (["h = x"], ["dx = dh"])
    )
    _y, _dtotal = ("total", "dy") if _place == "pre" else ("norm(total)", "norm.backward(dy)")
    FORMULAS["Residual", "leave", _place] = (
        ["s_dropped = dropout(s)", "total = x + s_dropped", f"y = {_y}"],
        [f"dtotal = {_dtotal}", "dx = dtotal", "ds = dropout.backward(dtotal)"],
    )
    _one = _around(_place, "norm1", "x", "h1", "s1", "x1", _self_attention)
    _two = _around(_place, "norm2", "x1", "h2", "s2", "y", _feed_forward(2))
    FORMULAS["EncoderLayer", "forward", _place] = ([*_one[0], *_two[0]], [*_two[1], *_one[1]])
    for _cross, _inside in _cross_attention.items():
        _two = _around(_place, "norm2", "x1", "h2", "s2", "x2", _inside)
        _three = _around(_place, "norm3", "x2", "h3", "s3", "y", _feed_forward(3))
        FORMULAS["DecoderLayer", "forward", f"{_place} {_cross}"] = (
            [*_one[0], *_two[0], *_three[0]],
            [*_three[1], *_two[1], *_one[1]],
        )
    _last = _around(_place, "norm2", "x2", "h3", "s3", "y", _feed_forward(3))
    FORMULAS["DecoderLayer", "forward", f"{_place} none"] = (
        [*_one[0], "x2 = x1", *_last[0]],
        [*_last[1], "dx1 = dx2", *_one[1]],
    )

for _norm in ("", " norm"):
    _end, _dend = ("norm(x_n)", "norm.backward(dy)") if _norm else ("x_n", "dy")
    FORMULAS |= {
        ("Encoder", "forward", _norm.strip()): (
            ["x_0 = x", "x_l = layer_l(x_{l-1})", f"memory = {_end}"],
            [f"dx_n = {_dend}", "dx_{l-1} = layer_l.backward(dx_l)", "dx = dx_0"],
        ),
        ("Decoder", "forward", f"per_layer{_norm}"): (
            ["x_0 = x", "x_l = layer_l(x_{l-1}, memory)", f"y = {_end}"],
            [f"dx_n = {_dend}", "(dx_{l-1}, dmemory_l) = layer_l.backward(dx_l)", "dx = dx_0",
             "dmemory = sum_{l} dmemory_l"],
        ),
        ("Decoder", "forward", f"shared{_norm}"): (
            ["(K, V) = memory_projection(memory)", "x_0 = x", "x_l = layer_l(x_{l-1}, (K, V))",
             f"y = {_end}"],
            [f"dx_n = {_dend}", "(dx_{l-1}, dK_l, dV_l) = layer_l.backward(dx_l)", "dx = dx_0",
             "dK = sum_{l} dK_l", "dV = sum_{l} dV_l",
             "dmemory = memory_projection.backward(dK, dV)"],
        ),
        ("Decoder", "forward", f"none{_norm}"): (
            ["x_0 = x", "x_l = layer_l(x_{l-1})", f"y = {_end}"],
            [f"dx_n = {_dend}", "dx_{l-1} = layer_l.backward(dx_l)", "dx = dx_0"],
        ),
    }  # fmt: skip


def _embedded(kind: str, which: str) -> Lines:
    """Where the gradient of embedded ids goes: the ids themselves have none."""
    to_positions = [f"dx -> dP of {which}positions"] if kind == "learned" else []
    return [*to_positions, f"dx -> dW of {which}embedding"]


for _learned in ("", "learned"):
    _embed = (
        ["e = embedding(ids)", "e_p = positions(e)", "x = position_dropout(e_p)"],
        ["de_p = position_dropout.backward(dx)", "de = positions.backward(de_p)",
         "de -> dW of embedding"],
    )  # fmt: skip
    FORMULAS |= {
        ("Transformer", "forward", _learned): (
            ["memory = encode(source_ids)", "logits = decode(target_ids, memory)"],
            ["dmemory = decode.backward(dy)", "dmemory -> dW of source_embedding"],
        ),
        ("Transformer", "encode", _learned): (
            ["x = embed(source_ids)", "memory = encoder(x)"],
            ["dx = encoder.backward(dmemory)", *_embedded(_learned, "source_")],
        ),
        ("Transformer", "decode", _learned): (
            ["x = embed(target_ids)", "y = decoder(x, memory)", "logits = output(y)"],
            ["dstack = output.backward(dy)", "(dx, dmemory) = decoder.backward(dstack)",
             *_embedded(_learned, "target_")],
        ),
        ("LanguageModel", "forward", _learned): (
            ["x = embed(ids)", "y = decoder(x)", "logits = output(y)"],
            ["dstack = output.backward(dy)", "dx = decoder.backward(dstack)",
             *_embedded(_learned, "")],
        ),
        ("Transformer", "embed", _learned): _embed,
        ("LanguageModel", "embed", _learned): _embed,
    }  # fmt: skip


GREEK = {"gamma": "γ", "beta": "β", "eps": "ε", "pi": "π", "Phi": "Φ", "dPhi": "dΦ",
         "dgamma": "dγ", "dbeta": "dβ"}  # fmt: skip
SIGNS = {"->": "→", "-": "−", "*": "∘"}
LOWERED = ("dropped", "masked", "past", "model")  # A_dropped is shown as A with "dropped" below it
TOKEN = re.compile(
    r"->|[A-Za-z][\w.]*\(|log_p_target|log_p|[A-Za-z]+\d*(?:_[A-Za-z]{2,}\d*)*'?"
    r"|\d+(?:\.\d+)?|\S"
)


def math(text: str) -> str:
    """A formula as MathML: names, numbers and signs; _ and ^ bind an atom or {a group}; frac{a}{b},
    sqrt{a}, sum_{i}. Beside each other a and b are a product of matrices or numbers, a * b is one
    of entries. An index of two letters is a group (A_{ts}); A_dropped and x_hat are names. A name
    with a bracket right after it is a function.
    """
    tokens = TOKEN.findall(text)
    row, _ = _row(tokens)
    return f'<math display="block">{row}</math>'


def _row(tokens: list[str], end: str | None = None) -> tuple[str, list[str]]:
    parts: list[str] = []
    while tokens and tokens[0] != end:
        part, tokens = _scripted(tokens)
        if parts and _ends_factor(parts[-1]) and _begins_factor(part):
            parts.append('<mspace width="0.17em"/>')  # a product
        parts.append(part)
    if end is not None:
        if not tokens:
            raise ValueError(f"a formula lacks {end!r}")
        tokens = tokens[1:]
    return f"<mrow>{''.join(parts)}</mrow>", tokens


def _begins_factor(part: str) -> bool:
    return not part.startswith(("<mo>", "<mo ")) or part[:5] in ("<mo>(", "<mo>[")


def _ends_factor(part: str) -> bool:
    return not part.endswith("</mo>") or part[-6:] in (")</mo>", "]</mo>")


def _scripted(tokens: list[str]) -> tuple[str, list[str]]:
    base, tokens = _atom(tokens)
    under = over = None
    while tokens and tokens[0] in ("_", "^"):
        mark, (script, tokens) = tokens[0], _atom(tokens[1:])
        under, over = (script, over) if mark == "_" else (under, script)
    if under and over:
        return f"<msubsup>{base}{under}{over}</msubsup>", tokens
    if under:
        tag = "munder" if "∑" in base else "msub"
        return f"<{tag}>{base}{under}</{tag}>", tokens
    return (f"<msup>{base}{over}</msup>" if over else base), tokens


def _atom(tokens: list[str]) -> tuple[str, list[str]]:
    if not tokens or tokens[0] == "}":
        raise ValueError("a formula ends, or closes a group, where a letter is expected")
    token, tokens = tokens[0], tokens[1:]
    if token == "{":
        return _row(tokens, "}")
    if token == "sqrt":
        inner, tokens = _atom(tokens)
        return f"<msqrt>{inner}</msqrt>", tokens
    if token == "frac":
        above, tokens = _atom(tokens)
        below, tokens = _atom(tokens)
        return f"<mfrac>{above}{below}</mfrac>", tokens
    if token == "sum":
        return "<mo>∑</mo>", tokens
    if token == "of":
        return "<mtext>&#160;of&#160;</mtext>", tokens
    if token == ",":
        return '<mo separator="true" lspace="0" rspace="0.17em">,</mo>', tokens
    if token[0].isalpha():
        return _name(token), tokens
    if token[0].isdigit():
        return f"<mn>{token}</mn>", tokens
    return f"<mo>{SIGNS.get(token, escape(token))}</mo>", tokens


def _name(token: str) -> str:
    if token.endswith("("):
        name, dot, rest = token[:-1].partition(".")
        if name == "layer_l":  # the l-th
            return f"<msub><mi>layer</mi><mi>l</mi></msub>{_plain(dot + rest)}<mo>(</mo>"
        return f"{_plain(token[:-1])}<mo>(</mo>"
    name, _, script = token.rpartition("_")
    if script == "hat":
        d = "<mi>d</mi>" if len(name) > 1 else ""
        hat = f"<mover><mi>{name[-1]}</mi><mo>^</mo></mover>"
        return f"<mrow>{d}{hat}</mrow>" if d else hat
    if script in LOWERED and name:
        return f"<msub><mi>{name}</mi><mi>{script}</mi></msub>"
    return _plain(token)


def _plain(name: str) -> str:
    return f"<mi>{GREEK.get(name, name)}</mi>" if name else ""
