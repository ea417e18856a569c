"""Kill a training again and again, at random moments, and see that nothing is lost.

    python tests/kill_training.py --kills 100

A training that saves after every update is killed (SIGKILL: it gets no chance to tidy up), its file
is loaded, and it goes on from there until it is killed again. In the end its weights, moments and
generators must be, bit for bit, those of a training that nobody disturbed.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from npdecoder import Checkpoint, load_checkpoint

OPTIONS = shlex.split(
    "--d-model 64 --num-heads 2 --num-layers 2 --context 8 --batch-size 2 --dropout 0.1 "
    "--warmup 5 --save-every 1 --validate-every 1000000"
)


def training(folder: Path, out: str, steps: int, resume: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "npdecoder", "train-lm", "text.txt", "--out", out]
    command += [*OPTIONS, "--steps", str(steps), *(["--resume"] if resume else [])]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    package = Path(__file__).resolve().parents[1]
    environment["PYTHONPATH"] = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)


def stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def kill_somewhere(process: subprocess.Popen[bytes], path: Path, rng: random.Random) -> bool:
    """Kill it at a random moment after its first save; whether it was still running."""
    before = stamp(path)
    while stamp(path) == before and process.poll() is None:
        time.sleep(0.0005)
    time.sleep(rng.uniform(0.0, 0.25))
    process.kill()
    return process.wait() != 0


def values(checkpoint: Checkpoint) -> dict[str, Any]:
    """All that must agree, as arrays and plain values."""
    found: dict[str, Any] = {f"model.{k}": v for k, v in checkpoint.model.state_dict().items()}
    found |= {f"optimizer.{k}": v for k, v in checkpoint.optimizer.state_dict().items()}
    found |= {"step": checkpoint.step, "loss": checkpoint.extra["training"]["loss"]}
    place = checkpoint.extra["training"]["batches"]
    found |= {"taken": place["taken"], "place": place["rng"].bit_generator.state}
    return {**found, "dropout": checkpoint.rng.bit_generator.state if checkpoint.rng else None}


def unequal(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    names = a.keys() | b.keys()
    return sorted(name for name in names if not np.array_equal(a.get(name), b.get(name)))


def run(kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Counts of what happened; AssertionError where something was lost."""
    rng, steps = random.Random(seed), 60 + 30 * kills
    (folder / "text.txt").write_text("".join(rng.choices("abcdefgh \n", k=3000)), "utf-8")
    assert training(folder, "whole.npz", steps, False).wait() == 0
    path, killed, inside, last, resume = folder / "killed.npz", 0, 0, 0, False
    while killed < kills:
        process = training(folder, path.name, steps, resume)
        if not kill_somewhere(process, path, rng):
            break  # it came to its end
        killed += 1
        inside += any(name.endswith(".part") for name in os.listdir(folder))
        step = load_checkpoint(path).step  # an error here is a file that was lost
        assert step >= last, f"the file went back from update {last} to {step}"
        last, resume = step, True
    if last < steps:
        assert training(folder, path.name, steps, resume).wait() == 0
    names = unequal(values(load_checkpoint(folder / "whole.npz")), values(load_checkpoint(path)))
    assert not names, f"differ from the run that nobody disturbed: {names}"
    leftovers = [name for name in os.listdir(folder) if name.endswith(".part")]
    assert not leftovers, f"left behind: {leftovers}"
    return {"kills": killed, "inside a save": inside, "updates": steps, "killed up to": last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = run(args.kills, args.seed, Path(folder))
    for what, count in counts.items():
        print(f"{what:14} {count}")
    assert counts["kills"] == args.kills
    assert counts["inside a save"] > 0.2 * args.kills
    print("the file loaded after every kill, and the end is that of the undisturbed training")


if __name__ == "__main__":
    main()
