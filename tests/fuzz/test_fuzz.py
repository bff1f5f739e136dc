"""A few hundred random actions, programs that failed once, and a broken library that the search must find.
`python -m tests.fuzz` searches for longer."""

from __future__ import annotations

import pytest

from tests.fuzz.programs import Action, Program, as_script, generate, shrink
from tests.fuzz.search import LOSSY, find_failure, shrunk
from tests.ranks import Ranks

SEEDS = range(1000, 1004)

FAILED_ONCE = {
    "the second reduction of a unit wrote into gradients that the first was still writing": Program(
        *("follow", "off", False),
        actions=(("sync", False), ("backward", "C"), ("sync", True), ("backward", "b", "cCc")),
    ),
    "follow_no_sync() while FSDP2's switch was off": Program(
        *("follow", "bf16 pending", False),
        actions=(("backward", "A"), ("sync", False), ("resume",), ("backward", "c")),
    ),
    "invalidate() raised the error of an early gather that it made void": Program(
        *("fsdp2", "delta", True),
        actions=(("backward", "abcabc"), ("stale", "a", "bc")),
    ),
    "a reduction of a failed backward wrote into gradients after zero_grad()": Program(
        *("cross", "off", False),
        actions=4 * (("fail", "ABC", "backward", "zeros"), ("step", "plain")),
    ),
    "a unit that was gathered early and not used had sent a difference": Program(
        *("cross", "four_bit", False),
        actions=(
            *(("backward", "abc"), ("step", "plain")),
            *(("backward", "a"), ("step", "plain"), ("evaluate", "abc", "no_grad")),
        ),
    ),
    "an older gradient of a frozen parameter was taken for a gradient that was read too early": Program(
        *("cross", "default", True),
        actions=(
            *(("freeze", "c", "bias"), ("backward", "abc"), ("step", "plain")),
            *(("freeze", "c", "all"), ("backward", "a")),
        ),
    ),
    "memory of stored errors was computed from the parameters of the last backward": Program(
        *("follow", "stochastic", False),
        actions=(("step", "closure"), ("set_config", "four_bit"), ("sync", False)),
    ),
    "weights that were gathered early for another forward were used without a check": Program(
        *("fsdp2", "default", False),
        actions=(("step", "closure"), ("evaluate", "a", "inference"), ("stale", "b", "aBc")),
    ),
    "a resume ended in the next gather, and was lost": Program(
        *("cross", "flat integers", True),
        actions=(
            *(("set_config", "delta"), ("freeze", "a", "bias"), ("step", "plain")),
            *(("evaluate", "a", "no_grad"), ("resume",), ("backward", "a")),
        ),
    ),
    "what is trained was asked for after a gather that nobody had used": Program(
        *("cross", "feedback", True),
        actions=(
            *(("step", "closure"), ("freeze", "c", "bias"), ("backward", "b")),
            *(("step", "plain"), ("backward", "aBc")),
        ),
    ),
    "a resumed handle had forgotten that it accumulates": Program(
        *("cross", "default", False),
        actions=(
            *(("sync", False), ("backward", "abc"), ("sync", True), ("backward", "abc")),
            *(("zero", "none"), ("resume",), ("backward", "abc")),
        ),
    ),
}


def test_programs_that_failed_once_pass(ranks: Ranks) -> None:
    found = find_failure(ranks, list(FAILED_ONCE.values()), families=(LOSSY,))
    assert found is None, f"{found[1].reason}\n{as_script(found[0])}"


def test_random_programs_show_the_same_in_every_variant(ranks: Ranks) -> None:
    found = find_failure(ranks, [generate(seed, quick=True) for seed in SEEDS])
    if found is not None:
        program, reason = shrunk(ranks, *found)
        pytest.fail(f"{reason}\n{as_script(program)}")


def test_what_is_broken_is_found_and_shrunk(ranks: Ranks) -> None:
    found = find_failure(ranks, [generate(8, quick=True)], "after_step")
    assert found is not None
    program, reason = shrunk(ranks, *found, broken="after_step")
    assert "Variant" in reason
    assert len(program.actions) <= 4
    assert find_failure(ranks, [program]) is None


def test_a_program_is_a_script_again() -> None:
    program = generate(7)
    assert generate(7) == program != generate(8)
    _, _, after = as_script(program).partition("actions = ")
    actions: tuple[Action, ...] = eval(after.partition("\nreplay")[0])
    assert actions == program.actions


def test_shrinking_leaves_what_is_needed() -> None:
    def fails(program: Program) -> bool:
        names = "".join(action[0] for action in program.actions)
        plans = [action[1] for action in program.actions if action[0] == "backward"]
        return "flush" in names.partition("sync")[2] and any("c" in plan for plan in plans)

    noise: list[Action] = [("clip",), ("step", "plain"), ("backward", "abC")]
    actions = (*noise, ("sync", False), *noise, ("backward", "abc", "ab"), *noise, ("flush",), *noise)
    small = shrink(Program("cross", "default", False, actions), fails)
    assert small.actions == (("sync", False), ("backward", "c"), ("flush",))
