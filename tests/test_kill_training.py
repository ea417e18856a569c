"""A short form of tests/kill_training.py."""

from __future__ import annotations

from pathlib import Path

from kill_training import run


def test_a_training_killed_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    counts = run(kills=3, seed=1, folder=tmp_path)
    assert counts["kills"] == 3
