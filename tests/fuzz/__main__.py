"""`python -m tests.fuzz`: random programs until one fails, or the time is over. Run it in the repository."""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.programs import as_script, generate
from tests.fuzz.search import find_failure, pool_of_ranks, shrunk
from zeropp.tools.amx import cap_onednn

BATCH = 8


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to search")
    parser.add_argument("--seed", type=int, default=1, help="the first program's; the next has the next")
    parser.add_argument("--go-on", action="store_true", help="after a failure, too")
    options = parser.parse_args()
    cap_onednn()
    end, seed, actions, failures = time.monotonic() + options.seconds, options.seed, 0, 0
    with pool_of_ranks() as pool:
        while time.monotonic() < end and (options.go_on or not failures):
            programs = {generate(number): number for number in range(seed, seed + BATCH)}
            found = find_failure(pool, list(programs))
            if found is not None:
                failures += 1
                number = programs[found[0]]
                sys.stdout.write(f"\nseed {number} fails, and is shrunk: {found[1].reason}\n")
                sys.stdout.flush()
                program, why = shrunk(pool, *found)
                sys.stdout.write(f"\nseed {number}: {why}\n\n{as_script(program, number)}\n")
                seed = number + 1
            else:
                seed += BATCH
                actions += sum(len(program.actions) for program in programs)
            count = seed - options.seed
            sys.stdout.write(f"{count} programs, {actions} actions, {failures} failures\n")
            sys.stdout.flush()
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
