"""What `npdecoder trace` shows: one forward and one backward pass, and the words of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npdecoder.core import as_ids
from npdecoder.layers import CrossEntropy
from npdecoder.models import Transformer, TransformerConfig
from npdecoder.page import Tokens
from npdecoder.text import Vocabulary, tokenize
from npdecoder.trace import Trace
from npdecoder.translator import Translator

WORKED_EXAMPLE = Path(__file__).with_name("worked_example.json")
LARGEST = 1600  # tokens times width: more makes a page that no browser likes


class Traced(NamedTuple):
    title: str
    trace: Trace
    tokens: Tokens
    loss: float


def worked_example_model() -> Transformer:
    """d_model 4, 2 heads, d_ff 16, one layer each, Post-LN, vocabulary 10, in float64; its weights
    are short numbers that fit on paper.
    """
    config = TransformerConfig(
        source_vocab_size=10,
        target_vocab_size=10,
        d_model=4,
        num_heads=2,
        d_ff=16,
        num_encoder_layers=1,
        num_decoder_layers=1,
        norm="post",
        attention_bias=True,
        scale_embeddings=False,
        max_len=10,
    )
    model = Transformer(config, dtype=np.float64)
    for name, numbers in json.loads(WORKED_EXAMPLE.read_text("utf-8")).items():
        dict(model.named_parameters())[name].value = np.array(numbers)
    return model


def worked_example(ids: tuple[Sequence[int], Sequence[int]] | None = None) -> Traced:
    """"I love you" -> "我 爱 你": [2, 5, 3] and <s> 我 爱 = [1, 7, 4] to 我 爱 你 = [7, 4, 6].

    ids: other source and target ids, below 10.
    """
    model = worked_example_model()
    words = {1: "<s>", 7: "我", 4: "爱", 6: "你"}
    vocabulary = [words.get(i, str(i)) for i in range(10)]
    source, target = ids or ([2, 5, 3], [7, 4, 6])
    source_words = {2: "I", 5: "love", 3: "you"}
    names = [source_words.get(i, str(i)) for i in source]
    title = " ".join(names) + " → " + " ".join(vocabulary[i] for i in _ids("target", target, 10))
    return _run(title, model, source, [1, *target[:-1]], target, names, vocabulary)


def sentence_pair(source: str, target: str, seed: int = 0) -> Traced:
    """A pair of sentences, read by a new model of their words, as small as the worked example."""
    sources, targets = (Vocabulary.build([tokenize(text)]) for text in (source, target))
    config = TransformerConfig(
        len(sources), len(targets), d_model=4, num_heads=2, d_ff=16, num_encoder_layers=1,
        num_decoder_layers=1, pad_id=0, max_len=128,
    )  # fmt: skip
    model = Transformer(config, seed, dtype=np.float64)
    return translated(Translator(model, sources, targets), source, target)


def translated(translator: Translator, source: str, target: str) -> Traced:
    """A pair of sentences, read by a trained model (in float64), teacher forcing the target."""
    model = copy.deepcopy(translator.model).astype(np.float64)
    (pair,) = translator.encode_pairs([(source, target)])
    if not (pair[0] and pair[1]):
        raise ValueError("a sentence has no words")
    (source_ids, target_ids), targets = translator.batch([pair])
    vocabulary = translator.target_vocabulary.tokens
    names = [translator.source_vocabulary.tokens[i] for i in source_ids[0]]
    return _run(f"{source} → {target}", model, source_ids[0], target_ids[0], targets[0], names,
                vocabulary)


def _ids(name: str, ids: Any, size: int) -> list[int]:
    if not len(ids):
        raise ValueError(f"{name} is empty, expected at least one id")
    found: list[int] = as_ids(name, ids, size).tolist()
    return found


def _run(
    title: str,
    model: Transformer,
    source: Any,
    target_input: Any,
    targets: Any,
    names: list[str],
    vocabulary: Sequence[str],
) -> Traced:
    source = _ids("source", source, model.config.source_vocab_size)
    targets = _ids("target", targets, model.config.target_vocab_size)
    size = max(len(source), len(targets)) * model.config.d_model
    if size > LARGEST:
        raise ValueError(f"{max(len(source), len(targets))} tokens of width {model.config.d_model} "
                         "are more than a page can show: take shorter sentences or a smaller model")
    criterion = CrossEntropy()
    with Trace(model, criterion=criterion) as trace:
        logits, ctx = model.forward([source], [list(map(int, target_input))])
        loss, loss_ctx = criterion.forward(logits, [targets])
        model.backward(ctx, criterion.backward(loss_ctx))
    words = [[vocabulary[i] for i in ids] for ids in (target_input, targets)]
    tokens = Tokens(names, words[0], vocabulary, words[1])
    return Traced(title, trace, tokens, float(loss))
