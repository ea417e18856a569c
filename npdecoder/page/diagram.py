"""The model as a drawing: a box for each part, bottom to top, encoder left, decoder right."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

WIDTH, BOX, GAP, COLUMN = 150, 26, 8, 190


def diagram(names: Mapping[str, Any]) -> str:
    """SVG: every box has data-layer, the names of the parts it stands for."""
    columns = []
    if "encoder" in names:
        encoder = [("source_embedding", "embedding"), ("source_positions", "+ positions")]
        columns.append(("encoder", encoder + _stack("encoder", names)))
    decoder = [("target_embedding" if "encoder" in names else "embedding", "embedding")]
    decoder += [("target_positions" if "encoder" in names else "positions", "+ positions")]
    decoder += _stack("decoder", names)
    decoder += [("output", "output")]
    if "criterion" in names:
        decoder += [("criterion", "cross-entropy")]
    columns.append(("decoder", decoder))

    # of a layer by itself there is nothing to draw
    columns = [
        (title, [box for box in boxes if box[0].split()[0] in names]) for title, boxes in columns
    ]
    columns = [(title, boxes) for title, boxes in columns if boxes]
    if not columns:
        return ""
    tallest = max(len(boxes) for _, boxes in columns)
    height = tallest * (BOX + GAP) + 30
    parts, tops = [], {}
    for i, (title, boxes) in enumerate(columns):
        x = i * COLUMN + 5
        parts.append(f'<text class="title" x="{x + WIDTH / 2}" y="{height - 4}">{title}</text>')
        for j, (layer, label) in enumerate(boxes):
            y = height - 20 - (j + 1) * (BOX + GAP)
            tops[layer] = x, y
            if j:
                parts.append(f'<path d="M{x + WIDTH / 2} {y + BOX + GAP} v-{GAP}" class="wire"/>')
            parts.append(
                f'<g class="box" tabindex="0" role="button" data-layer="{escape(layer)}">'
                f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{BOX}" rx="5"/>'
                f'<text x="{x + WIDTH / 2}" y="{y + BOX / 2 + 4}">{escape(label)}</text></g>'
            )
    if len(columns) == 2:
        x, y = tops[columns[0][1][-1][0]]
        for layer, (x2, y2) in tops.items():
            if layer.endswith("cross_attention"):
                middle = x + WIDTH + (COLUMN - WIDTH) / 2
                parts.append(f'<path class="wire memory" d="M{x + WIDTH} {y + BOX / 2} H{middle} '
                             f'V{y2 + BOX / 2} H{x2}"/>')
    width = len(columns) * COLUMN - (COLUMN - WIDTH) + 10
    return (f'<svg viewBox="0 0 {width} {height}" role="group" aria-label="the parts of the model">'
            + "".join(parts) + "</svg>")


def _stack(stack: str, names: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The boxes of an encoder or a decoder, from the bottom to the top."""
    boxes = []
    if f"{stack}.memory_projection" in names:
        boxes.append((f"{stack}.memory_projection", "memory K, V"))
    layer = 0
    while f"{stack}.layers.{layer}" in names:
        start = f"{stack}.layers.{layer}"
        post = names[f"{start}.residual1"].place == "post"
        parts = ["self_attention", "cross_attention", "feed_forward"]
        present = [part for part in parts if f"{start}.{part}" in names]
        for i, part in enumerate(present, start=1):
            label = part.replace("_", "-")
            norm = (f"{start}.norm{i}", "norm")
            if post:  # the norm is called by the residual, in the same box
                add = (f"{start}.residual{i} {start}.norm{i}", "add & norm")
                boxes += [(f"{start}.{part}", label), add]
            else:
                add = (f"{start}.residual{i}", "add")
                boxes += [norm, (f"{start}.{part}", label), add]
        layer += 1
    if f"{stack}.norm" in names:
        boxes.append((f"{stack}.norm", "final norm"))
    return boxes
