"""Decoding: from a model's logits to sequences of ids.

    greedy_decode    the most probable token, again and again
    sample           a token drawn from the distribution, again and again
    generate         the same for one text, token by token as they come, however long
    beam_search      the best sequences that a search of limited width finds

All take a Transformer with the ids of its sources, or a LanguageModel with those of its prompts.
Every step reads the new tokens alone (DecodingState). Each item is decoded by itself: what it gets
does not depend on the others of its batch, to rounding: two tokens that are equally likely but for
the last digit may fall differently, since products of other sizes round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from npdecoder.core import (
    Array,
    as_array,
    as_ids,
    fraction,
    integer,
    non_negative,
    positive_int,
    real,
    rectangular,
)
from npdecoder.decoding_state import DecodingState
from npdecoder.layers.softmax import log_softmax
from npdecoder.models import LanguageModel, Transformer, TransformerConfig
from npdecoder.models.token_model import as_batch

Model = Transformer | LanguageModel


def greedy_decode(
    model: Model,
    ids: ArrayLike,
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    max_new_tokens: int | None = None,
) -> list[list[int]]:
    """ids (B, S) -> for each item the ids generated, without prompt, BOS and EOS.

    The most probable token is appended (among equals the lowest id) until it is EOS (eos_id None:
    there is none) or there are max_new_tokens; by default, and at most, as many as the model has
    positions for.

    ids: of a Transformer the source; it begins with bos_id. Of a LanguageModel the prompt, padded
    with the model's pad_id on either side.

    Errors: ValueError for NaN logits, an empty prompt, a Transformer without bos_id; TypeError or
    IndexError for bad ids, bos_id or eos_id.
    """

    def choose(items: NDArray[np.intp], logits: Array) -> NDArray[np.intp]:
        return np.asarray(logits.argmax(axis=-1))

    return _decode(model, ids, bos_id, eos_id, max_new_tokens, choose)


def sample(
    model: Model,
    ids: ArrayLike,
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """ids (B, S) -> for each item ids that were drawn, without prompt, BOS and EOS.

    temperature, top_k, top_p, min_p: as in next_token_probabilities. seed: item i draws from its
    own generator, np.random.default_rng((seed, i)), so that its text does not depend on its batch
    mates. The rest is as in greedy_decode.

    Errors: those of greedy_decode and next_token_probabilities.
    """
    sampler = Sampler(temperature, top_k, top_p, min_p)
    seed = integer("seed", seed, 0)
    generators: dict[int, np.random.Generator] = {}

    def choose(items: NDArray[np.intp], logits: Array) -> NDArray[np.intp]:
        chosen = []
        for i, row in zip(items.tolist(), logits):
            if i not in generators:
                generators[i] = np.random.default_rng((seed, i))
            chosen.append(sampler.draw(row, generators[i]))
        return np.array(chosen, np.intp)

    return _decode(model, ids, bos_id, eos_id, max_new_tokens, choose)


def generate(
    model: LanguageModel,
    prompt: ArrayLike,
    *,
    eos_id: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """prompt (T,) -> the ids that follow, one by one as they are drawn, without EOS.

    The text may become longer than the model has positions for: it then reads the last max_len
    tokens anew for each further one. max_new_tokens None: until EOS, or without end.
    Within max_len the ids are those of sample([prompt]) with this seed.

    Errors: those of sample.
    """
    if not isinstance(model, LanguageModel):
        raise TypeError(f"model is a {type(model).__name__}, expected a LanguageModel")
    sampler = Sampler(temperature, top_k, top_p, min_p)
    rng = np.random.default_rng((integer("seed", seed, 0), 0))
    text = as_ids("prompt", prompt, model.config.vocab_size)
    if text.ndim != 1:
        raise ValueError(f"prompt has shape {text.shape}, expected (T,)")
    if model.config.pad_id is not None:
        text = text[text != model.config.pad_id]
    if len(text) == 0:
        raise ValueError("prompt is empty: begin with at least one id, such as BOS")
    _check_special("eos_id", eos_id, model)
    limit = None if max_new_tokens is None else positive_int("max_new_tokens", max_new_tokens)
    return _generate(model, text.tolist(), eos_id, limit, sampler, rng)


def _generate(
    model: LanguageModel,
    text: list[int],
    eos_id: int | None,
    limit: int | None,
    sampler: Sampler,
    rng: np.random.Generator,
) -> Iterator[int]:
    max_len = model.config.max_len
    end = None if limit is None else len(text) + limit
    state = DecodingState(model)
    logits = state.prompt([text[-max_len:]])
    while True:
        token = sampler.draw(logits[0], rng)
        if token == eos_id:
            return
        yield token
        text.append(token)
        if len(text) == end:
            return
        if state.length < max_len:
            logits = state.extend([[token]])
        else:  # every token moves by one position: nothing of the state can be kept
            state = DecodingState(model)
            logits = state.prompt([text[-max_len:]])


class Hypothesis(NamedTuple):
    """One result of beam_search.

    ids: without prompt, BOS and EOS
    score: (sum of the log-probabilities of ids, and of EOS) / length ** length_penalty, where
        length counts ids, and EOS
    finished: whether EOS ended it; False if it was cut at its greatest length
    """

    ids: list[int]
    score: float
    finished: bool


def beam_search(
    model: Model,
    ids: ArrayLike,
    *,
    beam_size: int,
    bos_id: int | None = None,
    eos_id: int | None = None,
    max_new_tokens: int | None = None,
    length_penalty: float = 1.0,
    n_best: int = 1,
) -> list[list[Hypothesis]]:
    """ids (B, S) -> for each item its n_best hypotheses, the best first.

    Each step extends beam_size sequences by one token. A candidate that ends in EOS is finished,
    and the best others take its place. The search for an item ends when no sequence that is still
    open can come among the n_best any more, whatever follows: a total of log-probabilities only
    falls, so its score is at most what it would be at the next length or at the greatest (the
    better of the two, for any sign of length_penalty). beam_size 1 is greedy decoding, which ends
    with its first EOS. A beam of V ** max_new_tokens finds the best of all sequences.

    length_penalty: alpha in the score, see Hypothesis; 0 compares totals, more favours longer ones.
    Among equal scores the one found first comes first: lower ids. The rest is as in greedy_decode.

    Errors: those of greedy_decode; ValueError for n_best > beam_size, for a length_penalty beyond
    50, and for +inf among the logits.
    """
    beam_size, n_best = positive_int("beam_size", beam_size), positive_int("n_best", n_best)
    if n_best > beam_size:
        raise ValueError(f"n_best is {n_best}, expected at most beam_size, which is {beam_size}")
    alpha = _moderate("length_penalty", length_penalty)
    state, logits, limits = _begin(model, ids, bos_id, eos_id, max_new_tokens)

    found: list[list[Hypothesis]] = [[] for _ in limits]
    beams = [_Beam(item, item, [], 0.0) for item in range(len(limits))]
    while beams:
        log_p = _log_probabilities(logits, [beam.item for beam in beams])
        grown: list[_Beam] = []
        for item, group in groupby(range(len(beams)), key=lambda row: beams[row].item):
            rows = list(group)
            length = len(beams[rows[0]].ids) + 1
            totals = np.array([beams[row].total for row in rows])[:, None] + log_p[rows]
            alive: list[_Beam] = []
            # each row has one EOS: of the best 2 n candidates at least n go on
            for index in _largest(totals.ravel(), 2 * beam_size if beam_size > 1 else 1):
                total = float(totals.flat[index])
                row, token = rows[index // totals.shape[1]], int(index % totals.shape[1])
                if total == -np.inf:
                    break
                if token == eos_id:
                    score = total / length**alpha
                    found[item].append(Hypothesis(beams[row].ids, score, True))
                elif len(alive) < beam_size:
                    alive.append(_Beam(item, row, [*beams[row].ids, token], total))
            if length == limits[item]:
                found[item] += [Hypothesis(b.ids, b.total / length**alpha, False) for b in alive]
                alive = []
            found[item] = sorted(found[item], key=lambda h: -h.score)[:n_best]
            if alive and len(found[item]) == n_best:
                attainable = (alive[0].total / n**alpha for n in (length + 1, limits[item]))
                if found[item][-1].score >= max(attainable):
                    alive = []
            grown += alive
        beams = grown
        if beams:
            state.select([beam.row for beam in beams])
            logits = state.extend([beam.ids[-1:] for beam in beams])
    return found


class _Beam(NamedTuple):
    item: int
    row: int  # of the state, before its last token
    ids: list[int]
    total: float  # the sum of the log-probabilities of ids


def next_token_probabilities(
    logits: ArrayLike,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Array:
    """logits (V,) -> p (V,), float64: the distribution that sample draws from.

    In this order, each on the distribution that the one before left:
        temperature   softmax(logits / temperature); 0: all on the greatest logit
        top_k         the k greatest are kept; all, where k > V
        top_p         the smallest set of mass >= top_p is kept, at least one token
                      (Holtzman et al. 2020, "The curious case of neural text degeneration", 3.1)
        min_p         tokens of probability >= min_p times the greatest are kept
    Among equals the lowest ids are kept. Both comparisons allow for the rounding of the logits.

    Errors: ValueError for NaN or +inf among the logits, or nothing but -inf; for temperature < 0,
    top_k < 1, top_p or min_p outside [0, 1], and NaN.
    """
    array = rectangular("logits", logits)
    array = as_array("logits", array.astype(np.float64) if array.dtype.kind in "iu" else array)
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"logits has shape {array.shape}, expected (V,) with V >= 1")
    return Sampler(temperature, top_k, top_p, min_p).probabilities(array)


class Sampler:
    """The options of next_token_probabilities, checked once."""

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
    ) -> None:
        self.temperature = non_negative("temperature", temperature)
        self.top_k = None if top_k is None else positive_int("top_k", top_k)
        self.top_p = 1.0 if top_p is None else fraction("top_p", top_p)
        self.min_p = 0.0 if min_p is None else fraction("min_p", min_p)

    def probabilities(self, logits: Array) -> Array:
        rounding = 8.0 * float(np.finfo(logits.dtype).eps)
        logits = logits.astype(np.float64)
        largest = logits.max()
        if not np.isfinite(largest):
            raise ValueError(f"the largest logit is {largest}: there is no distribution")
        weights = np.zeros_like(logits)
        if self.temperature == 0.0:
            weights[logits.argmax()] = 1.0
            return weights
        # the tokens that are left, the likeliest first: sorting a large vocabulary takes time
        kept: Any = slice(None)
        if self.top_k is not None and self.top_k < len(logits):
            kept = _largest(logits, self.top_k)
        elif self.top_p < 1.0:
            kept = np.argsort(-logits, kind="stable")
        with np.errstate(over="ignore", under="ignore"):
            weights[kept] = np.exp((logits[kept] - largest) / self.temperature)
        if self.top_p < 1.0:
            mass = np.cumsum(weights[kept]) / weights.sum()
            weights[kept[np.searchsorted(mass, self.top_p - rounding) + 1 :]] = 0.0
        weights[weights < self.min_p * (1.0 - rounding)] = 0.0  # the greatest weight is 1
        p: Array = weights / weights.sum()
        return p

    def draw(self, logits: Array, rng: np.random.Generator) -> int:
        """One token, by one number of rng: the first whose cumulated probability exceeds it."""
        p = self.probabilities(logits)
        cumulated = np.cumsum(p)
        token = np.searchsorted(cumulated, rng.random() * cumulated[-1], side="right")
        return int(min(token, np.flatnonzero(p)[-1]))


def _decode(
    model: Model,
    ids: ArrayLike,
    bos_id: int | None,
    eos_id: int | None,
    max_new_tokens: int | None,
    choose: Callable[[NDArray[np.intp], Array], NDArray[np.intp]],
) -> list[list[int]]:
    """choose: items (n,) and their logits (n, V) -> the next token of each."""
    state, logits, limits = _begin(model, ids, bos_id, eos_id, max_new_tokens)
    outputs: list[list[int]] = [[] for _ in limits]
    items = np.arange(len(limits))  # of the rows of state
    while len(items):
        _refuse_nan(logits, items)
        tokens = choose(items, logits)
        going = []
        for row, (item, token) in enumerate(zip(items, tokens.tolist())):
            if token != eos_id:
                outputs[item].append(token)
                if len(outputs[item]) < limits[item]:
                    going.append(row)
        items, tokens = items[going], tokens[going]
        if len(going) < len(logits):
            state.select(np.array(going, np.intp))
        if going:
            logits = state.extend(tokens[:, None])
    return outputs


def _begin(
    model: Model, ids: ArrayLike, bos_id: int | None, eos_id: int | None, max_new_tokens: int | None
) -> tuple[DecodingState, Array, list[int]]:
    """The state after the prompts, the logits (B, V) of the first tokens, and each item's limit."""
    if not isinstance(model, (Transformer, LanguageModel)):
        raise TypeError(f"model is a {type(model).__name__}, expected a Transformer or a "
                        "LanguageModel")
    _check_special("eos_id", eos_id, model)
    limit = None if max_new_tokens is None else positive_int("max_new_tokens", max_new_tokens)
    if isinstance(model, Transformer):
        if bos_id is None:
            raise ValueError("bos_id is None, but a Transformer begins with it")
        _check_special("bos_id", bos_id, model)
        state = DecodingState(model, ids)
        prompts = np.full((state.batch_size or 0, 1), bos_id, np.intp)
        used = [1] * len(prompts)
    else:
        state = DecodingState(model)
        if bos_id is not None:
            raise ValueError("bos_id was given, but a LanguageModel begins with its prompt: "
                             "put BOS before it")
        prompts, used = _prompts(ids, model)
    logits = state.prompt(prompts)
    room = [model.config.max_len - count + 1 for count in used]  # the last token is never read
    return state, logits, [n if limit is None else min(n, limit) for n in room]


def _prompts(ids: ArrayLike, model: LanguageModel) -> tuple[NDArray[np.intp], list[int]]:
    """The prompts with their padding on the left, and how many tokens each has."""
    c = model.config
    prompts = as_batch("ids", ids, c.vocab_size, c)
    real = np.ones(prompts.shape, np.bool_) if c.pad_id is None else prompts != c.pad_id
    counts = real.sum(axis=1).tolist()
    if 0 in counts:
        raise ValueError(f"prompt {counts.index(0)} is empty: begin with at least one id, "
                         "such as BOS")
    longest = max(counts, default=1)
    aligned = np.full((len(prompts), longest), c.pad_id or 0, np.intp)
    for row, prompt, keep, count in zip(aligned, prompts, real, counts):
        row[longest - count :] = prompt[keep]
    return aligned, counts


def _check_special(name: str, value: int | None, model: Model) -> None:
    if value is not None:
        c = model.config
        size = c.target_vocab_size if isinstance(c, TransformerConfig) else c.vocab_size
        as_ids(name, integer(name, value), size)


def _refuse_nan(logits: Array, items: Sequence[int] | NDArray[np.intp]) -> None:
    wrong = np.isnan(logits).any(axis=-1)
    if wrong.any():
        raise ValueError(f"the logits of item {items[int(wrong.argmax())]} are NaN: "
                         "there is no best token")


def _log_probabilities(logits: Array, items: Sequence[int]) -> Array:
    _refuse_nan(logits, items)
    largest = logits.max(axis=-1)
    if not np.isfinite(largest).all():
        row = int((~np.isfinite(largest)).argmax())
        raise ValueError(f"the largest logit of item {items[row]} is {largest[row]}: "
                         "there is no distribution")
    return log_softmax(logits.astype(np.float64))


def _largest(values: Array, n: int) -> list[int]:
    """The indices of the n largest, the largest first, equals by index."""
    indices = np.arange(len(values))
    if n < len(values):  # partition finds the n-th largest without sorting all
        indices = np.flatnonzero(values >= np.partition(values, len(values) - n)[len(values) - n])
    order: list[int] = indices[np.argsort(-values[indices], kind="stable")][:n].tolist()
    return order


def _moderate(name: str, value: Any) -> float:
    """value as a float from -50 to 50: length ** value stays a number."""
    number = real(name, value)
    if not abs(number) <= 50.0:
        raise ValueError(f"{name} is {value}, expected a finite number from -50 to 50")
    return number
