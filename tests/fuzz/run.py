"""The long run: random examples of every case, counted.

    python tests/fuzz/run.py --examples 100000 [--seed 1] [--only attention]

The examples are shared out among the cases. Exit status 1: there is a finding, of which the
smallest example found is printed, or fewer than half of the examples reached the comparison of
values.
"""

import argparse
import faulthandler
import importlib
import re
import secrets
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings

HERE = Path(__file__).resolve().parent
MODULES = ("layers", "models", "functions", "text", "files")
TOO_LONG = 300  # seconds that no example takes
TOO_LARGE = 8 * 2**30  # bytes that no example needs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100_000, help="of all cases together")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--only", default="", metavar="REGEX", help="cases of these names")
    args = parser.parse_args()

    sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    limit_memory()
    warnings.simplefilter("error")
    cases = [(name.removeprefix("test_"), case) for name, case in all_cases()
             if re.search(args.only, name)]  # fmt: skip
    each = -(-args.examples // len(cases))
    print(f"seed {args.seed}, {len(cases)} cases of {each} examples")
    print(f"{'case':46}{'examples':>10}{'compared':>10}{'refused':>10}")
    total, findings = Counter(), 0
    for i, (name, case) in enumerate(cases):
        counts, error = run(case, each, args.seed + i)
        show(name, counts)
        total.update(counts)
        if error is not None:
            findings += 1
            for one in getattr(error, "exceptions", [error]):
                print("".join(traceback.format_exception_only(one)).rstrip())
    show("all", total)
    if 2 * total["compared"] < total["examples"]:
        print("fewer than half of the examples reached the comparison of values")
        findings += 1
    print(f"{findings} cases with findings, seed {args.seed}")
    return 1 if findings else 0


def all_cases():
    for module in MODULES:
        for name, value in vars(importlib.import_module(f"test_fuzz_{module}")).items():
            if hasattr(value, "strategy"):
                yield name, value


def run(case, examples, number):
    """The counts, and the error that was raised, or None."""
    counts = Counter()

    def body(call):
        faulthandler.dump_traceback_later(TOO_LONG, exit=True)
        case.check(call, counts)

    long = settings(
        max_examples=examples, database=None, deadline=None, derandomize=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    try:
        seed(number)(long(given(call=case.strategy)(body)))()
    except Exception as error:
        return counts, error
    finally:
        faulthandler.cancel_dump_traceback_later()
    return counts, None


def show(name, counts):
    numbers = (counts["examples"], counts["compared"], counts["refused"])
    print(f"{name:46}" + "".join(f"{n:10}" for n in numbers), flush=True)


def limit_memory():
    """A huge allocation is then an error, and not the end of the machine."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (TOO_LARGE, hard))


if __name__ == "__main__":
    sys.exit(main())
