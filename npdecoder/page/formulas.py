"""The formula of each layer, forward and backward, as MathML."""

from __future__ import annotations

import re
from html import escape

# One line a formula, in the letters of the layer files; see math() for the notation.
FORMULAS: dict[str, tuple[list[str], list[str]]] = {
    "Linear": (
        ["y = x W + b"],
        ["dx = dy W^T", "dW = x^T dy", "db = sum_{n} dy_n"],
    ),
    "Embedding": (
        ["y_{bt} = s W_{ids_{bt}} , s = 1 | sqrt{d_model}"],
        ["dW_i = s sum_{ids_{bt} = i} dy_{bt}"],
    ),
    "Unembedding": (
        ["logits = x W^T + b"],
        ["dx = dlogits W", "dW = dlogits^T x", "db = sum_{n} dlogits_n"],
    ),
    "SinusoidalPositions": (
        ["y_t = x_t + P_t", "P_{t,2i} = sin frac{t}{10000^{2i/d_model}} , "
         "P_{t,2i+1} = cos frac{t}{10000^{2i/d_model}}"],
        ["dx = dy"],
    ),
    "LearnedPositions": (
        ["y_t = x_t + P_t"],
        ["dx = dy", "dP_t = sum_{b} dy_{bt}"],
    ),
    "Softmax": (
        ["y_i = frac{e^{x_i}}{sum_{j} e^{x_j}}"],
        ["dx_i = y_i ( dy_i - sum_{j} dy_j y_j )"],
    ),
    "LayerNorm": (
        ["x_hat = frac{x - mu}{sqrt{sigma^2 + eps}} , rstd = frac{1}{sqrt{sigma^2 + eps}}",
         "y = gamma x_hat + beta"],
        ["g = gamma dy", "dx = rstd ( g - mean(g) - x_hat mean(g x_hat) )",
         "dgamma = sum_{n} dy_n x_hat_n , dbeta = sum_{n} dy_n"],
    ),
    "ReLU": (["y = max(x, 0)"], ["dx = dy [ x > 0 ]"]),
    "GELU": (["y = x Phi(x)"], ["dx = dy ( Phi(x) + x phi(x) )"]),
    "Dropout": (
        ["y = x keep / ( 1 - p )"],
        ["dx = dy keep / ( 1 - p )"],
    ),
    "ScaledDotProductAttention": (
        ["S = frac{q k^T}{sqrt{d_k}}", "A = softmax(S)", "context = A v"],
        ["dv = A^T dy", "dA = dy v^T", "dS_{ts} = A_{ts} ( dA_{ts} - sum_{r} dA_{tr} A_{tr} )",
         "dq = frac{dS k}{sqrt{d_k}} , dk = frac{dS^T q}{sqrt{d_k}}"],
    ),
    "CrossEntropy": (
        ["loss = - frac{1}{N} sum_{n} log p_{n,target_n} , p = softmax(logits)"],
        ["dlogits = frac{p - onehot}{N}"],
    ),
    "MultiHeadAttention": (
        ["Q = query W_q , K = key W_k , V = value W_v",
         "output = concat_h attention(Q_h, K_h, V_h) W_o"],
        ["dcontext = dy W_o^T", "dquery = dQ W_q^T , dkey = dK W_k^T , dvalue = dV W_v^T"],
    ),
    "FeedForward": (
        ["y = f(x W_1 + b_1) W_2 + b_2"],
        ["dx = ( ( dy W_2^T ) f'(x W_1 + b_1) ) W_1^T"],
    ),
    "Residual": (
        ["y = x + s"],
        ["dx = dy + dx_sublayer , ds = dy"],
    ),
    "EncoderLayer": (
        ["x_1 = x + attention(x) , y = x_1 + f(x_1)"],
        ["dx_1 = dy + dx_f , dx = dx_1 + dx_attention"],
    ),
    "DecoderLayer": (
        ["x_1 = x + self(x) , x_2 = x_1 + cross(x_1, memory) , y = x_2 + f(x_2)"],
        ["dx_2 = dy + dx_f , dx_1 = dx_2 + dx_cross , dx = dx_1 + dx_self"],
    ),
    "Encoder": (["memory = L_n ... L_2 L_1(x)"], ["dx = dL_1 dL_2 ... dL_n(dmemory)"]),
    "Decoder": (
        ["y = L_n ... L_2 L_1(x, memory)"],
        ["dx = dL_1 dL_2 ... dL_n(dy) , dmemory = sum_{l} dmemory_l"],
    ),
    "Transformer": (
        ["memory = encoder(source)", "logits = output(decoder(target, memory))"],
        ["dlogits -> dmemory -> dsource"],
    ),
    "LanguageModel": (["logits = output(decoder(ids))"], ["dlogits -> dx"]),
}
FORMULAS["MemoryAttention"] = FORMULAS["MultiHeadAttention"]
FORMULAS["MemoryProjection"] = (
    ["K = memory W_k , V = memory W_v"],
    ["dmemory = dK W_k^T + dV W_v^T"],
)

GREEK = {"gamma": "γ", "beta": "β", "mu": "μ", "sigma": "σ", "eps": "ε", "Phi": "Φ", "phi": "φ",
         "dgamma": "dγ", "dbeta": "dβ"}  # fmt: skip
TOKEN = re.compile(
    r"[A-Za-z]+(?:_hat|_model|_sublayer|_attention|_self|_cross)?'?|\d+|->|\.\.\.|\S"
)


def math(text: str) -> str:
    """A formula as MathML: names, numbers and signs; _ and ^ bind an atom or {a group}; frac{a}{b},
    sqrt{a}, sum_{i}; x_hat has a hat, and a name after d keeps it.
    """
    tokens = TOKEN.findall(text)
    row, _ = _row(tokens)
    return f'<math display="block">{row}</math>'


def _row(tokens: list[str], end: str | None = None) -> tuple[str, list[str]]:
    parts: list[str] = []
    while tokens and tokens[0] != end:
        part, tokens = _scripted(tokens)
        if parts and not (part.startswith("<mo") or parts[-1].startswith("<mo")):
            parts.append('<mspace width="0.25em"/>')  # a product of two letters
        parts.append(part)
    if end is not None:
        if not tokens:
            raise ValueError(f"a formula lacks {end!r}")
        tokens = tokens[1:]
    return f"<mrow>{''.join(parts)}</mrow>", tokens


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
    if token.endswith("_hat"):
        return f"<mover><mi>{token[:-4]}</mi><mo>^</mo></mover>", tokens
    if "_" in token and len(token) > 1:
        name, script = token.split("_")
        return f"<msub><mi>{name}</mi><mi>{script}</mi></msub>", tokens
    if token[0].isalpha():
        return f"<mi>{GREEK.get(token, token)}</mi>", tokens
    if token.isdigit():
        return f"<mn>{token}</mn>", tokens
    signs = {"->": "→", "-": "−", "...": "…", ",": ",&#8195;"}
    return f"<mo>{signs.get(token, escape(token))}</mo>", tokens
