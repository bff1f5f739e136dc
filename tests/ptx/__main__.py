"""Random cases of the GPU kernels, compiled for three targets, in the interpreter of PTX.

python -m tests.ptx --cases 1000 --seed 1
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .cases import make_case, run_case
from .driver import TARGETS, ptx_devices


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Return the number of cases that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="of the first case; the others follow")
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    failures = 0
    start = time.monotonic()
    with ptx_devices(*arguments.targets) as driver:
        for number in range(arguments.cases):
            target = arguments.targets[number % len(arguments.targets)]
            case = make_case(arguments.seed + number, target)
            counts[f"{case.operation} {target}"] += 1
            try:
                run_case(case, driver)
            except Exception as error:
                failures += 1
                _say(f"{case}\n    {type(error).__name__}: {error}")
            if (number + 1) % 50 == 0 or number + 1 == arguments.cases:
                kernels = len({run.kernel for run in driver.runs})
                minutes = (time.monotonic() - start) / 60
                _say(f"{number + 1} cases, {kernels} kernels, {failures} failed, {minutes:.0f} minutes")
    for name, count in sorted(counts.items()):
        _say(f"{count:5} {name}")
    return failures


if __name__ == "__main__":
    sys.exit(min(main(), 1))
