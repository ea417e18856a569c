"""Plants mistakes in a copy of the package, one at a time, and runs the tests against each.

    python tests/mutants/run.py [-j PROCESSES] [--quick] [--named] [NAME ...]

NAME: mutants whose names contain it. --quick: a few of different kinds. The tests that should
catch a mutant are run first; where they pass, all ordinary tests (--named: no more). Prints which
test caught which mutant. Exit status 1: one survived, or could not be tried.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants import KINDS

import npdecoder

PACKAGE = Path(npdecoder.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
LONGEST = 1800  # seconds that no run of the tests takes
NOT_ORDINARY = ("mutants", "fuzz")

# Pytest loads this first. What the tests import is the copy. A failing example is left as it was
# drawn: to make it smaller takes longer than all else.
PLUGIN = """
import pathlib

import hypothesis
import npdecoder

root = pathlib.Path(__file__).resolve().parents[1] / "root"
assert pathlib.Path(npdecoder.__file__).resolve().parent == root / "npdecoder", npdecoder.__file__


def pytest_configure():
    phases = hypothesis.Phase.explicit, hypothesis.Phase.generate
    hypothesis.settings.register_profile("as drawn", hypothesis.settings(), phases=phases)
    hypothesis.settings.load_profile("as drawn")
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("-j", type=int, default=1, metavar="PROCESSES")
    parser.add_argument("--quick", action="store_true", help="a few of different kinds")
    parser.add_argument("--named", action="store_true", help="no tests but those named")
    args = parser.parse_args()

    chosen = [
        (kind, mutant) for kind, mutants in KINDS.items() for mutant in mutants
        if (mutant.quick or not args.quick)
        and (not args.names or any(name in mutant.name for name in args.names))
    ]  # fmt: skip
    if not chosen:
        parser.error("no mutant has such a name")
    start, survivors, last = time.monotonic(), 0, None
    with ThreadPoolExecutor(args.j) as pool:
        results = pool.map(lambda pair: try_mutant(pair[1], args.named), chosen)
        for (kind, mutant), (test, seconds) in zip(chosen, results):
            if kind != last:
                print(f"\n{kind}")
            last = kind
            print(f"  {mutant.name:66} {seconds:5.1f} s  {test or 'SURVIVED'}", flush=True)
            survivors += test is None
    print(f"\n{len(chosen)} mutants, {survivors} survived, {time.monotonic() - start:.0f} s")
    return 1 if survivors else 0


def try_mutant(mutant, named):
    """The test that caught it, or None, and the seconds it took."""
    start, test = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        root, plugins = Path(folder, "root"), Path(folder, "plugins")
        root.mkdir()
        plugins.mkdir()
        no_caches = shutil.ignore_patterns("__pycache__")
        # the whole repository, since some tests look for what is beside them
        for path in (PACKAGE, ROOT / "tests", ROOT / "examples"):
            shutil.copytree(path, root / path.name, ignore=no_caches)
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, root)
        plant(mutant, root / "npdecoder" / mutant.file)
        (plugins / "imports_the_copy.py").write_text(PLUGIN, "utf-8")
        file, *options = shlex.split(mutant.tests)
        test = first_failure(root, plugins, [f"tests/{file}", *options])
        if test is None and not named:
            ignored = [f"--ignore=tests/{name}" for name in NOT_ORDINARY]
            test = first_failure(root, plugins, ["tests", *ignored])
            test = test and f"{test} (not by {mutant.tests})"
    return test, time.monotonic() - start


def plant(mutant, path):
    source = path.read_text("utf-8")
    if source.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.old!r} is not once in {mutant.file}")
    path.write_text(source.replace(mutant.old, mutant.new), "utf-8")


def first_failure(root, plugins, arguments):
    """The first test that fails with the package in root, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--tb=no",
               "-p", "no:cacheprovider", "-p", "imports_the_copy"]  # fmt: skip
    paths = [str(root), str(plugins), os.environ.get("PYTHONPATH")]
    run = subprocess.run(
        [*command, *arguments],
        cwd=root,  # python -m puts it in front of PYTHONPATH
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)),
             "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=LONGEST,
    )  # fmt: skip
    if run.returncode == 0:
        return None
    found = re.search(r"^FAILED (?:.*/)?(\S+\.py::\S+)", run.stdout, re.MULTILINE)
    if run.returncode != 1 or found is None:  # not a failing test: nothing was tried
        raise SystemExit(f"pytest {' '.join(arguments)}\n{run.stdout[-3000:]}{run.stderr[-3000:]}")
    return found[1]


if __name__ == "__main__":
    sys.exit(main())
