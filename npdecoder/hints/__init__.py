"""Hints: what a gradient that failed its check looks like, each hint with its evidence.

gradcheck asks here when it has failed. What can be told from the two arrays of one tensor, what
backward returned and what the differences say, is told first; then what several tensors say
together; and where neither explains it, the layer's parts are looked at one by one: is one of them
wrong by itself, or where does the gradient that flows between them first go wrong?

The hints are sentences that begin with what they see:

    zero everywhere, sign flipped, constant factor, transposed, swapped, overwritten,
    residual path missing, residual path doubled, left out of a sum, added twice, wrong tensor,
    gamma left out, sum where mean was taken, term missing, tied use missing,
    only masked positions wrong, only one head wrong, only one place wrong, not finite,
    in a part, wiring, kink
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npdecoder.hints.facts import Facts, Tensor
from npdecoder.hints.parts import hints_of_parts
from npdecoder.hints.rules import known_rules, layer_norm, rows_of_a_table, tied
from npdecoder.hints.tensors import UNNAMED, alone, of_another, overwritten, residual, swapped

__all__ = ["Facts", "Tensor", "find_hints"]


def find_hints(
    facts: Facts, recheck: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
) -> list[str]:
    """The hints, the one that explains most first. recheck: gradcheck itself, for the parts."""
    failed = [tensor for tensor in facts.tensors if not tensor.ok]
    if not failed:
        return []
    if all(tensor.kinks for tensor in failed):
        return [f"kink: {_names(failed)} stands where a ReLU (or a maximum) has no slope. This is "
                "not an error of backward: move the input off it"]
    found: list[tuple[tuple[str, ...], str]] = [
        *overwritten(failed), *swapped(failed), *of_another(facts, failed)
    ]  # fmt: skip
    told = {name for names, _ in found for name in names}
    ways = (alone, residual, known_rules, layer_norm, rows_of_a_table, tied)
    for look in [way(facts) for way in ways]:
        for tensor in failed:
            if tensor.name not in told:
                hint = look(tensor)
                if hint is not None:
                    told.add(tensor.name)
                    found.append(((tensor.name,), hint))
    # a factor without a name explains little: it may be what a fault further on happens to do
    named = [item for item in found if not item[1].endswith(UNNAMED)]
    hints = _merged(named)
    if len(told) < len(failed) or len(named) < len(found):
        hints += hints_of_parts(facts, recheck)
    return hints + _merged([item for item in found if item not in named])


def _merged(found: list[tuple[tuple[str, ...], str]]) -> list[str]:
    """Equal hints become one that names all its tensors; more tensors come first."""
    tensors: dict[str, list[str]] = {}
    for names, hint in found:
        tensors.setdefault(hint, []).extend(names)
    ordered = sorted(tensors.items(), key=lambda item: -len(item[1]))
    return [f"{hint} ({', '.join(names)})" for hint, names in ordered]


def _names(tensors: list[Tensor]) -> str:
    return ", ".join(tensor.name for tensor in tensors)
