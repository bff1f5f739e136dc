"""Runs programs on real ranks, in every variant, and looks for a variant that differs from the others."""

from __future__ import annotations

import logging
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.machine import Entry, Machine, Variant
from tests.fuzz.programs import Program, shrink
from tests.ranks import RankError, Ranks
from zeropp.comm import AllGather, ReduceScatter

WORLD = 4
TIMEOUT = 600.0
"""Seconds for one program in all variants; what takes longer hangs."""
FAMILIES = (
    (
        Variant("exact", is_plain=True),
        Variant("exact"),
        Variant("exact", overlap=False, secondary=False, resumes=True),
    ),
    (
        Variant("lossy"),
        Variant("lossy", overlap=False),
        Variant("lossy", secondary=False, resumes=True),
    ),
)
EXACT, LOSSY = ALL = (0, 1)
PARTS = ("outcome", "weights and losses of forwards", "pending", "gradients", "weights")
"""The parts of an entry."""
BREAKABLE: dict[str, tuple[type, str]] = {
    "after_step": (AllGather, "after_step"),
    "drop_pending": (ReduceScatter, "drop_pending"),
}
"""Methods that a variant can lack, to show that the search finds it."""


class Failure(NamedTuple):
    """How a program fails."""

    reason: str
    families: tuple[int, ...] = ALL
    """Those to run again."""
    action: int | None = None
    """The number of the action that shows it, if it is known."""


def run_programs(
    programs: list[Program], broken: str = "", families: tuple[int, ...] = ALL
) -> list[Failure | None]:
    """For each program, on this rank: how it fails, or None. `broken`: what the second variants lack."""
    logging.getLogger("zeropp").setLevel(logging.ERROR)
    try:
        return [_failure_of(program, broken, families) for program in programs]
    finally:
        logging.getLogger("zeropp").setLevel(logging.NOTSET)


def _failure_of(program: Program, broken: str, families: tuple[int, ...]) -> Failure | None:
    """The first difference on this rank. All variants run first: other ranks may see no difference."""
    found: list[Failure] = []
    for which in families:
        first, *others = FAMILIES[which]
        expected = _trace(program, first)
        for variant in others:
            with _without(broken if variant is others[0] else ""):
                trace = _trace(program, variant)
            number, reason = _difference(program, (first, expected), (variant, trace))
            found += [Failure(reason, (which,), number)] if reason else []
    return found[0] if found else None


def _difference(
    program: Program, expected: tuple[Variant, list[Entry]], other: tuple[Variant, list[Entry]]
) -> tuple[int, str]:
    """The number of the first action that two variants show differently, and how; or no text."""
    for number, (theirs, mine) in enumerate(zip(expected[1], other[1], strict=True)):
        name = program.actions[number] if number < len(program.actions) else "close"
        for variant, entry in ((expected[0], theirs), (other[0], mine)):
            if entry[0] == "error":
                return number, f"action {number}, {name}, raises with {variant}:\n{entry[1]}"
        if mine[0] == "not used":  # what was saved: a warning has said so, and bits differ from here
            break
        for part, ours, plain in zip(PARTS, mine, theirs, strict=True):
            if ours != plain:
                return (
                    number,
                    f"after action {number}, {name}: {part}\n{other[0]}: {ours}\n{expected[0]}: {plain}",
                )
    return 0, ""


def _trace(program: Program, variant: Variant) -> list[Entry]:
    """What could be seen of each action. After an error nothing more is run."""
    entries: list[Entry] = []
    machine = Machine(program, variant)
    try:
        for action in program.actions:
            entries.append(machine.run(action))
        machine.close()
        entries.append(("closed", (), False, (), ()))
    except Exception:
        with suppress(Exception):
            machine.close()
        missing = len(program.actions) + 1 - len(entries)
        entries += [("error", traceback.format_exc())] * missing
    return entries


@contextmanager
def _without(name: str) -> Iterator[None]:
    if not name:
        yield
        return
    owner, method = BREAKABLE[name]
    original = getattr(owner, method)
    setattr(owner, method, lambda *args: None)
    try:
        yield
    finally:
        setattr(owner, method, original)


def find_failure(
    pool: Ranks, programs: list[Program], broken: str = "", families: tuple[int, ...] = ALL
) -> tuple[Program, Failure] | None:
    """The first program that fails, and how."""
    seconds = TIMEOUT * len(programs)
    try:
        outcomes = pool.run(run_programs, programs, broken, families, world=WORLD, timeout=seconds)
    except RankError as error:
        if len(programs) == 1:
            return programs[0], Failure(str(error), families)
        alone = (find_failure(pool, [program], broken, families) for program in programs)
        return next((found for found in alone if found is not None), None)
    for program, failures in zip(programs, zip(*outcomes, strict=True), strict=True):
        for rank, failure in enumerate(failures):
            if failure is not None:
                return program, failure._replace(reason=f"rank {rank}: {failure.reason}")
    return None


def shrunk(pool: Ranks, program: Program, failure: Failure, broken: str = "") -> tuple[Program, str]:
    """The smallest part of a program that still fails, and why it does."""

    def fails(part: Program) -> bool:
        return find_failure(pool, [part], broken, failure.families) is not None

    if failure.action is not None:  # what comes later has nothing to do with it
        program = replace(program, actions=program.actions[: failure.action + 1])
    small = shrink(program, fails)
    found = find_failure(pool, [small], broken)
    return (small, "it does not fail when it is run again") if found is None else (found[0], found[1].reason)


@contextmanager
def pool_of_ranks() -> Iterator[Ranks]:
    with tempfile.TemporaryDirectory() as folder:
        pool = Ranks(WORLD, Path(folder))
        try:
            yield pool
        finally:
            pool.close()


def replay(program: Program) -> None:
    """Run a program that was printed, and say how it ends."""
    with pool_of_ranks() as pool:
        found = find_failure(pool, [program])
    sys.stdout.write("it passes\n" if found is None else f"{found[1].reason}\n")
    sys.exit(found is not None)
