"""Each formula of the page, evaluated on the arrays of a trace, gives the array of its name.

CHECKS holds, for each line of a class, what it says in NumPy, in terms of the arrays of the same
call; norm1(x) stands for what the layer norm1 made of this x within the call. A pair is the
definition of a name that is no array of the trace. WORDS are the lines that state no equation.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from npdecoder import (
    Decoder,
    Encoder,
    LanguageModel,
    LanguageModelConfig,
    MultiHeadAttention,
    Trace,
    Transformer,
    TransformerConfig,
)
from npdecoder.blocks import MemoryAttention, MemoryProjection, Residual
from npdecoder.blocks.multi_head_attention import merge_heads, split_heads
from npdecoder.layers import (
    CrossEntropy,
    Dropout,
    Embedding,
    LayerNorm,
    LearnedPositions,
    Linear,
    SinusoidalPositions,
    Unembedding,
)
from npdecoder.layers.activations import erf
from npdecoder.page.formulas import FORMULAS, formula_key
from npdecoder.trace import BACKWARD, Call

Check = str | tuple[str, str]

PROJECT: dict[str, Check] = {
    "keys = key W_k": "key @ layer.W_k.W.value",
    "keys = key W_k + b_k": "key @ layer.W_k.W.value + layer.W_k.b.value",
    "values = value W_v": "value @ layer.W_v.W.value",
    "values = value W_v + b_v": "value @ layer.W_v.W.value + layer.W_v.b.value",
    "keys = memory W_k": "memory @ layer.W_k.W.value",
    "keys = memory W_k + b_k": "memory @ layer.W_k.W.value + layer.W_k.b.value",
    "values = memory W_v": "memory @ layer.W_v.W.value",
    "values = memory W_v + b_v": "memory @ layer.W_v.W.value + layer.W_v.b.value",
    "K = split(keys)": "split(keys)",
    "V = split(values)": "split(values)",
    "dvalue = merge(dV) W_v^T": "merge(dV) @ layer.W_v.W.value.T",
    "dkey = merge(dK) W_k^T": "merge(dK) @ layer.W_k.W.value.T",
    "dmemory = dkey + dvalue": "dkey + dvalue",
}
ATTEND: dict[str, Check] = {
    "queries = query W_q": "query @ layer.W_q.W.value",
    "queries = query W_q + b_q": "query @ layer.W_q.W.value + layer.W_q.b.value",
    "Q = split(queries)": "split(queries)",
    "context = attention(Q, K, V)": "attention(Q, K, V)",
    "output = merge(context) W_o": "merge(context) @ layer.W_o.W.value",
    "output = merge(context) W_o + b_o": "merge(context) @ layer.W_o.W.value + layer.W_o.b.value",
    "dcontext = split(dy W_o^T)": "split(dy @ layer.W_o.W.value.T)",
    "(dQ, dK, dV) = attention.backward(dcontext)": "attention.backward(dcontext)",
    "dquery = merge(dQ) W_q^T": "merge(dQ) @ layer.W_q.W.value.T",
}
# these say the same in NumPy as on the page
SAME = {
    "EncoderLayer": (
        "h1 = norm1(x)", "h1 = x", "s1 = self_attention(h1, h1, h1)", "x1 = x + dropout(s1)",
        "x1 = norm1(x + dropout(s1))", "h2 = norm2(x1)", "h2 = x1", "s2 = feed_forward(h2)",
        "y = x1 + dropout(s2)", "y = norm2(x1 + dropout(s2))",
        "dx1_past = dy", "dx1_past = norm2.backward(dy)", "ds2 = dropout.backward(dx1_past)",
        "dh2 = feed_forward.backward(ds2)", "dx1 = dx1_past + norm2.backward(dh2)",
        "dx1 = dx1_past + dh2", "dx_past = dx1", "dx_past = norm1.backward(dx1)",
        "ds1 = dropout.backward(dx_past)",
        "(dquery, dkey, dvalue) = self_attention.backward(ds1)", "dh1 = dquery + dkey + dvalue",
        "dx = dx_past + norm1.backward(dh1)", "dx = dx_past + dh1",
    ),
    "DecoderLayer": (
        "h1 = norm1(x)", "h1 = x", "s1 = self_attention(h1, h1, h1)", "x1 = x + dropout(s1)",
        "x1 = norm1(x + dropout(s1))", "h2 = norm2(x1)", "h2 = x1",
        "s2 = cross_attention(h2, memory, memory)", "s2 = cross_attention(h2, K, V)",
        "x2 = x1 + dropout(s2)", "x2 = norm2(x1 + dropout(s2))", "x2 = x1", "h3 = norm3(x2)",
        "h3 = norm2(x2)", "h3 = x2", "s3 = feed_forward(h3)", "y = x2 + dropout(s3)",
        "y = norm3(x2 + dropout(s3))", "y = norm2(x2 + dropout(s3))",
        "dx2_past = dy", "dx2_past = norm3.backward(dy)", "dx2_past = norm2.backward(dy)",
        "ds3 = dropout.backward(dx2_past)", "dh3 = feed_forward.backward(ds3)",
        "dx2 = dx2_past + norm3.backward(dh3)", "dx2 = dx2_past + norm2.backward(dh3)",
        "dx2 = dx2_past + dh3", "dx1_past = dx2", "dx1_past = norm2.backward(dx2)",
        "ds2 = dropout.backward(dx1_past)", "(dh2, dkey', dvalue') = cross_attention.backward(ds2)",
        "(dh2, dK, dV) = cross_attention.backward(ds2)", "dmemory = dkey' + dvalue'",
        "dx1 = dx1_past + norm2.backward(dh2)", "dx1 = dx1_past + dh2", "dx1 = dx2",
        "dx_past = dx1", "dx_past = norm1.backward(dx1)", "ds1 = dropout.backward(dx_past)",
        "(dquery, dkey, dvalue) = self_attention.backward(ds1)", "dh1 = dquery + dkey + dvalue",
        "dx = dx_past + norm1.backward(dh1)", "dx = dx_past + dh1",
    ),
    "Residual": (
        "h = norm(x)", "h = x", "dx = norm.backward(dh)", "dx = dh", "s_dropped = dropout(s)",
        "total = x + s_dropped", "y = total", "y = norm(total)", "dtotal = dy",
        "dtotal = norm.backward(dy)", "dx = dtotal", "ds = dropout.backward(dtotal)",
    ),
    "FeedForward": (
        "hidden = linear1(x)", "active = activation(hidden)", "dropped = dropout(active)",
        "y = linear2(dropped)", "ddropped = linear2.backward(dy)",
        "dactive = dropout.backward(ddropped)", "dhidden = activation.backward(dactive)",
        "dx = linear1.backward(dhidden)",
    ),
    "Transformer": (
        "memory = encode(source_ids)", "logits = decode(target_ids, memory)",
        "dmemory = decode.backward(dy)", "x = embed(source_ids)", "memory = encoder(x)",
        "dx = encoder.backward(dmemory)", "x = embed(target_ids)", "y = decoder(x, memory)",
        "logits = output(y)", "dstack = output.backward(dy)",
        "(dx, dmemory) = decoder.backward(dstack)", "e = embedding(ids)", "e_p = positions(e)",
        "x = position_dropout(e_p)", "de_p = position_dropout.backward(dx)",
        "de = positions.backward(de_p)",
    ),
    "LanguageModel": (
        "x = embed(ids)", "y = decoder(x)", "logits = output(y)", "dstack = output.backward(dy)",
        "dx = decoder.backward(dstack)", "e = embedding(ids)", "e_p = positions(e)",
        "x = position_dropout(e_p)", "de_p = position_dropout.backward(dx)",
        "de = positions.backward(de_p)",
    ),
}  # fmt: skip
CHECKS: dict[str, dict[str, Check]] = {
    "Linear": {
        "y = x W": "x @ W",
        "y = x W + b": "x @ W + b",
        "dx = dy W^T": "dy @ W.T",
        "dW = x_rows^T dy_rows": "x_rows.T @ dy_rows",
        "db = sum_{n} dy_rows_n": "dy_rows.sum(axis=0)",
    },
    "Unembedding": {
        "logits = x W^T": "x @ W.T",
        "logits = x W^T + b": "x @ W.T + b",
        "dx = dy W": "dy @ W",
        "dW = dy_rows^T x_rows": "dy_rows.T @ x_rows",
        "db = sum_{n} dy_rows_n": "dy_rows.sum(axis=0)",
    },
    "LayerNorm": {
        "nearly = x - mean(x)": "x - mean(x)",
        "xc = nearly - mean(nearly)": "nearly - mean(nearly)",
        "var = mean(xc * xc)": "mean(xc * xc)",
        "rstd = frac{1}{sqrt{var + eps}}": "1 / np.sqrt(var + eps)",
        "x_hat = xc * rstd": "xc * rstd",
        "y = gamma * x_hat": "gamma * x_hat",
        "y = gamma * x_hat + beta": "gamma * x_hat + beta",
        "dx_hat = dy * gamma": "dy * gamma",
        "dxc = rstd * ( dx_hat - x_hat * mean(dx_hat * x_hat) )":
            "rstd * (dx_hat - x_hat * mean(dx_hat * x_hat))",
        "dx = dxc - mean(dxc)": "dxc - mean(dxc)",
        "dgamma = sum_{n} dy_n * x_hat_n": "rows(dy * x_hat).sum(axis=0)",
        "dbeta = sum_{n} dy_n": "rows(dy).sum(axis=0)",
    },
    "Embedding": {
        "scale = 1": ("scale", "1.0"),
        "scale = sqrt{d_model}": ("scale", "math.sqrt(W.shape[1])"),
        "y_n = scale W_{ids_n}": "scale * W[ids]",
        "drows = scale dy": "scale * dy",
        "dW_i = sum_{ids_n = i} drows_n": "[drows[ids == i].sum(axis=0) for i in range(len(W))]",
    },
    "SinusoidalPositions": {
        "P_{t,2i} = sin frac{t}{10000^{2i/d_model}}": ("P_even", "np.sin(angle(x))"),
        "P_{t,2i+1} = cos frac{t}{10000^{2i/d_model}}": ("P_odd", "np.cos(angle(x))"),
        "y_t = x_t + P_{positions_t}":
            "x + np.stack([P_even, P_odd], 2).reshape(99, -1)[positions]",
        "dx = dy": "dy",
    },
    "LearnedPositions": {
        "y_t = x_t + P_{positions_t}": "x + P[positions]",
        "dx = dy": "dy",
        "dP_i = sum_{positions_t = i} dy_t":
            "[dy[np.broadcast_to(positions, dy.shape[:2]) == i].sum(axis=0)"
            " for i in range(len(P))]",
    },
    "Softmax": {
        "e_i = exp(x_i - max(x))": "np.exp(x - visible_max(x))",
        "Z = sum_{i} e_i + [ sum_{i} e_i = 0 ]":
            "e.sum(axis=-1, keepdims=True) + (e.sum(axis=-1, keepdims=True) == 0)",
        "y_i = frac{e_i}{Z}": "e / Z",
        "dx_i = ( dy_i - sum_{j} dy_j y_j ) y_i":
            "(dy - (dy * y).sum(axis=-1, keepdims=True)) * y",
    },
    "ReLU": {"y = max(x, 0)": "np.maximum(x, 0)", "dx = dy * [ y > 0 ]": "dy * (y > 0)"},
    "GELU": {
        "Phi = frac{1}{2} ( 1 + erf(frac{x}{sqrt{2}}) )": "(1 + erf(x / math.sqrt(2))) / 2",
        "dPhi = frac{1}{sqrt{2 pi}} exp(- frac{x^2}{2})":
            "np.exp(-x**2 / 2) / math.sqrt(2 * math.pi)",
        "u = sqrt{frac{2}{pi}} ( x + 0.044715 x^3 )":
            ("u", "math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)"),
        "Phi = frac{1}{2} ( 1 + tanh(u) )": "(1 + np.tanh(u)) / 2",
        "dPhi = frac{1}{2} ( 1 - tanh(u)^2 ) * sqrt{frac{2}{pi}} ( 1 + 3 · 0.044715 x^2 )":
            "(1 - np.tanh(u) ** 2) / 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)",
        "y = x * Phi": "x * Phi",
        "slope = Phi + x * dPhi": "Phi + x * dPhi",
        "dx = dy * slope": "dy * slope",
    },
    "Dropout": {
        "y = x": "x",
        "dx = dy": "dy",
        "y = x * frac{keep}{1 - p}": "x * keep / (1 - p)",
        "dx = dy * frac{keep}{1 - p}": "dy * keep / (1 - p)",
    },
    "ScaledDotProductAttention": {
        "S = frac{q k^T}{sqrt{d_k}}": "np.einsum('...ti,...si->...ts', q, k) / np.sqrt(d_k)",
        "S_masked = mask(S)": "masked(S)",
        "A = softmax(S_masked)": "softmax(S_masked)",
        "A_dropped = dropout(A)": "dropout(A)",
        "context = A_dropped v": "A_dropped @ v",
        "dA_dropped = dy v^T": "np.einsum('...tc,...sc->...ts', dy, v)",
        "dv = A_dropped^T dy": "np.einsum('...ts,...tc->...sc', A_dropped, dy)",
        "dA = dropout.backward(dA_dropped)": "dropout.backward(dA_dropped)",
        "dS_{ts} = A_{ts} ( dA_{ts} - sum_{r} dA_{tr} A_{tr} )":
            "A * (dA - (dA * A).sum(axis=-1, keepdims=True))",
        "dq = frac{dS k}{sqrt{d_k}}": "dS @ k / np.sqrt(d_k)",
        "dk = frac{dS^T q}{sqrt{d_k}}": "np.einsum('...ts,...ti->...si', dS, q) / np.sqrt(d_k)",
    },
    "CrossEntropy": {
        "log_p = log softmax(logits)":
            "logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))",
        "log_p_target_n = log_p_{n,targets_n}":
            "(log_p * (targets[..., None] == np.arange(log_p.shape[-1]))).sum(axis=-1)",
        "mixed_n = ( 1 - e ) log_p_target_n + frac{e}{V} sum_{v} log_p_{n,v}":
            "(1 - e) * log_p_target + e / log_p.shape[-1] * log_p.sum(axis=-1)",
        "loss = - frac{1}{count} sum_{n} counted_n mixed_n":
            "-1 / counted.sum() * (counted * mixed).sum()",
        "p = exp(log_p)": ("p", "np.exp(log_p)"),
        "dlogits_{n,v} = frac{dloss}{count} counted_n "
        "( p_{n,v} - ( 1 - e ) [ v = targets_n ] - frac{e}{V} )":
            "dloss / counted.sum() * counted[..., None] * (p - (1 - e) * (targets[..., None]"
            " == np.arange(p.shape[-1])) - e / p.shape[-1])",
    },
    "MultiHeadAttention": PROJECT | ATTEND,
    "MemoryAttention": ATTEND,
    "MemoryProjection": PROJECT,
    "Encoder": {
        "x_0 = x": ("x_0", "x"),
        "x_l = layer_l(x_{l-1})": ("x_n", "through(x_0)"),
        "memory = norm(x_n)": "norm(x_n)",
        "memory = x_n": "x_n",
        "dx_n = norm.backward(dy)": ("dx_n", "norm.backward(dy)"),
        "dx_n = dy": ("dx_n", "dy"),
        "dx_{l-1} = layer_l.backward(dx_l)": ("dx_0", "back(dx_n)[0]"),
        "dx = dx_0": "dx_0",
    },
    "Decoder": {
        "(K, V) = memory_projection(memory)": ("K, V", "memory_projection(memory)"),
        "x_0 = x": ("x_0", "x"),
        "x_l = layer_l(x_{l-1})": ("x_n", "through(x_0)"),
        "x_l = layer_l(x_{l-1}, memory)": ("x_n", "through(x_0, memory)"),
        "x_l = layer_l(x_{l-1}, (K, V))": ("x_n", "through(x_0, K, V)"),
        "y = norm(x_n)": "norm(x_n)",
        "y = x_n": "x_n",
        "dx_n = norm.backward(dy)": ("dx_n", "norm.backward(dy)"),
        "dx_n = dy": ("dx_n", "dy"),
        "dx_{l-1} = layer_l.backward(dx_l)": ("dx_0", "back(dx_n)[0]"),
        "(dx_{l-1}, dmemory_l) = layer_l.backward(dx_l)": ("dx_0, dmemory_l", "back(dx_n)"),
        "(dx_{l-1}, dK_l, dV_l) = layer_l.backward(dx_l)": ("dx_0, dK_l, dV_l", "back(dx_n)"),
        "dx = dx_0": "dx_0",
        "dmemory = sum_{l} dmemory_l": "sum(dmemory_l)",
        "dK = sum_{l} dK_l": ("dK", "sum(dK_l)"),
        "dV = sum_{l} dV_l": ("dV", "sum(dV_l)"),
        "dmemory = memory_projection.backward(dK, dV)": "memory_projection.backward(dK, dV)",
    },
    **{
        cls: {line: line.split(" = ")[1].replace("'", "_prime") for line in lines}
        for cls, lines in SAME.items()
    },
}  # fmt: skip
WORDS = {
    "dmemory -> dW of source_embedding",
    "dx -> dP of source_positions",
    "dx -> dW of source_embedding",
    "dx -> dP of target_positions",
    "dx -> dW of target_embedding",
    "dx -> dP of positions",
    "dx -> dW of embedding",
    "de -> dW of embedding",
}

# What a call returns, in order: (class, method) or by the method alone
RETURNS: dict[Any, tuple[str, ...]] = {
    "forward": ("y",),
    "backward": ("dx",),
    "project": ("K", "V"),
    "project_backward": ("dkey", "dvalue"),
    "attend": ("output",),
    "attend_backward": ("dquery", "dK", "dV"),
    "enter": ("h",),
    "enter_backward": ("dx",),
    "leave": ("y",),
    "leave_backward": ("dx", "ds"),
    "encode": ("memory",),
    "decode": ("logits",),
    "decode_backward": ("dmemory",),
    "embed": ("x",),
    ("Unembedding", "forward"): ("logits",),
    ("CrossEntropy", "forward"): ("loss",),
    ("CrossEntropy", "backward"): ("dlogits",),
    ("ScaledDotProductAttention", "forward"): ("context",),
    ("ScaledDotProductAttention", "backward"): ("dq", "dk", "dv"),
    ("MultiHeadAttention", "forward"): ("output",),
    ("MultiHeadAttention", "backward"): ("dquery", "dkey", "dvalue"),
    ("MemoryAttention", "forward"): ("output",),
    ("MemoryAttention", "backward"): ("dquery", "dK", "dV"),
    ("MemoryProjection", "forward"): ("K", "V"),
    ("MemoryProjection", "backward"): ("dmemory",),
    ("Encoder", "forward"): ("memory",),
    ("Transformer", "forward"): ("logits",),
    ("LanguageModel", "forward"): ("logits",),
}


def names_of(line: str) -> list[str]:
    """The names left of the equals sign, without indices."""
    left = line.split(" = ")[0].strip("()").split(", ")
    if "{" in line.split(" = ")[0]:
        left = [line.split(" = ")[0]]
    return [re.sub(r"_\{.*\}$|_[nit]$", "", name).replace("'", "_prime") for name in left]


def flat(values: Any) -> list[Any]:
    return [v for value in values for v in (flat(value) if isinstance(value, tuple) else [value])]


def near(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and np.allclose(a, b, 1e-12, 1e-12)


class Part:
    """part(x): what one of these layers returned for x within the call; part.backward likewise."""

    def __init__(self, calls: list[Call], trace: Trace, layers: list[Any], method: str = ""):
        self.calls = [c for c in calls if any(trace.names[c.layer] is part for part in layers)]
        self.method, self.layers = method, layers

    def __getattr__(self, name: str) -> Any:  # W_q.W
        return getattr(self.layers[0], name)

    def __call__(self, *arguments: Any) -> Any:
        return self._find([c for c in self.calls if c.direction != BACKWARD], arguments)

    def backward(self, *arguments: Any) -> Any:
        return self._find([c for c in self.calls if c.direction == BACKWARD], arguments)

    def _find(self, calls: list[Call], arguments: Any) -> Any:
        arguments = flat(arguments)
        for c in calls:
            given = list(c.inputs.values())
            same = len(given) >= len(arguments) and all(map(near, given, arguments))
            if same and c.method.startswith(self.method):
                return c.outputs[0] if len(c.outputs) == 1 else tuple(c.outputs)
        raise AssertionError("no such call of the part was made")


class Room:
    """The names that the formulas of one call may use."""

    def __init__(self, trace: Trace, call: Call) -> None:
        self.layer = layer = trace.names[call.layer]
        self.call = call
        self.inside = within(trace, call)
        names: dict[str, Any] = {"layer": layer, "np": np, "math": math, "erf": erf}
        names |= {"mean": mean, "rows": rows}
        names |= {"visible_max": visible_max, "angle": angle, "merge": merge_heads}
        names |= {"masked": self.masked, "through": self.through, "back": self.back}
        names["split"] = lambda x: split_heads(x, layer.num_heads)
        self.trace = trace
        for name, value in vars(layer).items():
            if hasattr(value, "forward"):
                names[name] = self.part([value])
            elif isinstance(value, float):
                names[name] = value
        names |= {"P": getattr(layer, "P", None)}
        for name in ("W", "b", "gamma", "beta", "P"):
            if hasattr(getattr(layer, name, None), "grad"):
                names[name] = getattr(layer, name).value
        residuals = [getattr(layer, f"residual{i}", None) for i in (1, 2, 3)]
        if residuals[0] is not None:
            names["dropout"] = self.part([r.dropout for r in residuals if r is not None])
        nested = [c for c in self.inside if c.layer == call.layer]  # project, attend, embed ...
        for c in reversed(nested):
            names |= c.arrays()
        names |= call.arrays()
        for name in ("encode", "decode", "embed"):
            names[name] = Part(self.inside, trace, [layer], name)
        if call.method.startswith("embed"):
            found = [trace.names[c.layer] for c in self.inside]
            positions = (SinusoidalPositions, LearnedPositions)
            names["embedding"] = self.part([x for x in found if isinstance(x, Embedding)])
            names["positions"] = self.part([x for x in found if isinstance(x, positions)])
        if "q" in names:
            names["d_k"] = names["q"].shape[-1]
        self.names = names

    def part(self, layers: list[Any]) -> Part:
        return Part(self.inside, self.trace, layers)

    def masked(self, S: Any) -> Any:
        mask = self.call.inputs.get("mask")
        if mask is None:
            return S
        return np.where(mask, S, -np.inf) if mask.dtype == bool else S + mask

    def through(self, x: Any, *others: Any) -> Any:
        for layer in self.layer.layers:
            x = self.part([layer])(x, *others)
        return x

    def back(self, dx: Any) -> Any:
        others = []
        for layer in reversed(self.layer.layers):
            found = self.part([layer]).backward(dx)
            dx, *rest = found if isinstance(found, tuple) else (found,)
            others.append(rest)
        return (dx, *map(list, zip(*others)))

    def actual(self, name: str) -> list[Any]:
        """The arrays of this name: in the call, or in a part of it, and what was returned."""
        found = []
        for c in (self.call, *(c for c in self.inside if c.layer == self.call.layer)):
            if not found and name in c.arrays():
                found.append(c.arrays()[name])
        returned = self.returned()
        if name in returned:
            found.append(self.call.outputs[returned.index(name)])
        return found

    def returned(self) -> tuple[str, ...]:
        call = self.call
        if not call.outputs:
            return ()
        if call.cls in ("DecoderLayer", "Decoder") and call.direction == BACKWARD:
            return {1: ("dx",), 2: ("dx", "dmemory"), 3: ("dx", "dK", "dV")}[len(call.outputs)]
        return RETURNS.get((call.cls, call.method)) or RETURNS[call.method]


def within(trace: Trace, call: Call) -> list[Call]:
    """The calls inside a call: those that follow it and are deeper."""
    after = trace.calls[call.index + 1 :]
    return list(itertools.takewhile(lambda c: c.depth > call.depth, after))


def mean(x: Any) -> Any:
    return x.mean(axis=-1, keepdims=True)


def rows(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


def visible_max(x: Any) -> Any:
    top = x.max(axis=-1, keepdims=True)
    return np.where(np.isinf(top), 0, top)


def angle(x: Any) -> Any:
    d_model = x.shape[-1]
    i = np.arange(d_model // 2)
    return np.arange(99)[:, None] / 10000 ** (2 * i / d_model)


def check(trace: Trace, call: Call) -> int:
    """Check the lines of a call; how many arrays were compared."""
    room = Room(trace, call)
    lines = FORMULAS[formula_key(room.layer, call.method, call.arrays())]
    compared = set()
    for line in lines[call.direction == BACKWARD]:
        if line in WORDS:
            continue
        where = f"{call.index} {call.layer} {call.cls}.{call.method}: {line}"
        told = CHECKS[call.cls][line]
        if isinstance(told, tuple):
            names = told[0].split(", ")
            value = eval(told[1], room.names)
            room.names |= zip(names, value if len(names) > 1 else [value])
            assert not any(map(room.actual, names)), f"{where}: an array, not a definition"
            continue
        names = names_of(line)
        value = eval(told, room.names)
        for name, one in zip(names, value if len(names) > 1 else [value], strict=True):
            actual = room.actual(name)
            assert actual or name.endswith("_prime"), f"{where}: no array {name}"
            for array in actual:
                np.testing.assert_allclose(one, array, 1e-12, 1e-12, err_msg=where)
            room.names[name] = one
            compared.add(name)
    assert compared >= set(room.returned()), f"{call.cls}.{call.method} returns what no line gives"
    return len(compared)


def shaken(model: Any, rng: Any) -> Any:
    """The model with numbers other than 0 and 1 in its biases and norms."""
    for parameter in model.parameters():
        parameter.value = rng.normal(0.0, 0.5, parameter.value.shape)
    return model


def transformer(seed: int, **options: Any) -> Trace:
    rng = np.random.default_rng(seed)
    config = TransformerConfig(
        7, 7, d_model=6, num_heads=2, d_ff=5, num_encoder_layers=2, num_decoder_layers=2,
        pad_id=0, max_len=99, **options,
    )  # fmt: skip
    model = shaken(Transformer(config, seed, dtype=np.float64), rng)
    criterion = CrossEntropy(ignore_index=0, label_smoothing=0.1 * (seed % 2))
    source, target = np.array([[1, 2, 3, 0], [4, 5, 6, 1]]), np.array([[0, 2, 3], [4, 5, 0]])
    mask = rng.normal(size=(3, 3)) if seed % 2 else None
    with Trace(model, criterion=criterion) as trace:
        for _ in range(2):  # the second adds to gradients that are there
            logits, ctx = model.forward(source, target, None, mask, rng)
            _, loss_ctx = criterion.forward(logits, target)
            model.backward(ctx, criterion.backward(loss_ctx, 0.7))
    return trace


def language_model(seed: int, **options: Any) -> Trace:
    rng = np.random.default_rng(seed)
    config = LanguageModelConfig(7, d_model=6, num_heads=2, d_ff=5, num_layers=2, max_len=99,
                                 **options)  # fmt: skip
    model = shaken(LanguageModel(config, seed, dtype=np.float64), rng)
    with Trace(model) as trace:
        logits, ctx = model.forward(np.array([[1, 2, 3], [4, 5, 6]]))
        model.backward(ctx, rng.normal(size=logits.shape))
    return trace


def blocks(seed: int) -> Iterator[Trace]:
    """What the models do not call: parts by themselves, and stacks of other kinds."""
    rng = np.random.default_rng(seed)
    f64: Any = {"dtype": np.float64, "rng": rng}
    x, memory = rng.normal(size=(2, 3, 6)), rng.normal(size=(2, 4, 6))
    bias = bool(seed % 2)
    both = shaken(MultiHeadAttention(6, 2, d_k=4, bias=bias, **f64), rng)
    with Trace(both) as trace:
        (K, V), project = both.project(memory, memory)
        s, attend = both.attend(x, K, V)
        _, dK, dV = both.attend_backward(attend, s)
        both.project_backward(project, dK, dV)
    yield trace
    attention = shaken(MemoryAttention(6, 2, 4, bias=bias, **f64), rng)
    with Trace(attention) as trace:
        s, ctx = attention.forward(x, K, V)
        attention.backward(ctx, s)
    yield trace
    projection = shaken(MemoryProjection(6, 2, 4, bias=bias, **f64), rng)
    with Trace(projection) as trace:
        _, project = projection.project(memory, memory)
        projection.project_backward(project, dK, dV)
    yield trace
    norm = "post" if bias else "pre"
    options = {"norm": norm, "final_norm": bias, **f64}
    stacks = [Encoder(2, 6, 2, **options)]
    stacks += [Decoder(2, 6, 2, cross_attention=cross, **options)
               for cross in ("per_layer", "shared", "none")]
    for stack in stacks:
        shaken(stack, rng)
        crossing = isinstance(stack, Decoder) and stack.layers[0].cross_attention is not None
        with Trace(stack) as trace:
            y, ctx = stack.forward(x, *[memory] * crossing)
            stack.backward(ctx, y)
        yield trace


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return [
        transformer(0, norm="pre", activation="gelu"),
        transformer(1, norm="post", activation="gelu_tanh", dropout=0.3, attention_bias=True,
                    cross_attention="shared", positions="learned", tie_embeddings="all"),
        transformer(2, norm="pre", cross_attention="shared", attention_bias=True, dropout=0.3,
                    d_k=4, feed_forward_bias=False, scale_embeddings=False, norm_bias=False,
                    tie_embeddings="target_output", output_bias=False),
        transformer(3, norm="post", final_norm=True, attention_dropout=0.5, d_v=1),
        language_model(4, norm="pre", norm_bias=False),
        language_model(5, norm="post", positions="learned", tie_embeddings="target_output"),
        *blocks(0),
        *blocks(1),
    ]  # fmt: skip


def test_every_line_is_true_of_the_arrays_beside_it(traces: list[Trace]) -> None:
    assert sum(check(trace, call) for trace in traces for call in trace) > 3000


def test_every_call_has_formulas_and_every_formula_is_of_a_call(traces: list[Trace]) -> None:
    made = {formula_key(trace.names[call.layer], call.method, call.arrays()): call
            for trace in traces for call in trace}  # fmt: skip
    assert made.keys() == FORMULAS.keys()


def test_every_line_has_its_check_or_is_listed_as_words() -> None:
    checks = {(cls, line) for cls, lines in CHECKS.items() for line in lines}
    lines = {(key[0], line) for key, both in FORMULAS.items() for line in (*both[0], *both[1])}
    assert {line for _, line in lines - checks} == WORDS
    unused = {(cls, line) for cls, line in checks - lines if "memory W_" not in line}
    assert unused <= {("MultiHeadAttention", "dmemory = dkey + dvalue")}


def test_a_false_line_is_found(traces: list[Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    call = next(c for c in traces[1] if (c.cls, c.method) == ("Residual", "leave"))
    monkeypatch.setitem(CHECKS["Residual"], "y = norm(total)", "total")
    with pytest.raises(AssertionError, match=r"y = norm\(total\)"):
        check(traces[1], call)


@pytest.mark.parametrize(("layer", "method", "key"), [
    (Linear(2, 2, False), "backward", ("Linear", "forward", "")),
    (Unembedding(Embedding(3, 2)), "forward", ("Unembedding", "forward", "")),
    (Dropout(0.5), "forward", ("Dropout", "forward", "")),
    (Residual(LayerNorm(2), "post", 0.0), "leave_backward", ("Residual", "leave", "post")),
    (object(), "forward", ("object", "forward", "")),
])  # fmt: skip
def test_a_key_is_the_class_the_forward_method_and_the_kind(
    layer: Any, method: str, key: tuple[str, str, str]
) -> None:
    assert formula_key(layer, method) == key


def test_a_dropout_that_dropped_has_other_formulas_than_one_that_did_not() -> None:
    assert formula_key(Dropout(0.5), "backward", {"keep"}) == ("Dropout", "forward", "dropped")
