"""Random programs of what a training script may do, and the shortest part of one that still fails.

A program is a tuple of actions, each the name of a method of `Machine` and its arguments. A plan, such as
"abC", lists the blocks of one forward in their order. A capital letter also uses the block's spare parameter,
which has no gradient otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.configs import CONFIGS

Action = tuple[Any, ...]

BLOCKS = "abc"
PLANS = ("abc", "ABC", "aBc", "ab", "a", "c", "bc", "cb", "aa", "bab", "cCc", "abcabc")
APIS = ("cross", "follow", "fsdp2")
"""Who turns sync off: zeropp's method, FSDP2's with follow_no_sync(), FSDP2's alone."""
FLAT = ("off", "wire16", "flat integers")
NAMES = (*CONFIGS, *FLAT, "bf16 pending")
QUICK_OPTIMIZERS = ("sgd", "adamw-fused")
OPTIMIZERS = (*QUICK_OPTIMIZERS, "adamw-foreach", "adamw-loop", "rmsprop", "adagrad")


@dataclass(frozen=True)
class Program:
    """What all variants run. Its repr can be pasted into a script."""

    api: str
    start: str
    """Name of the first Config."""
    sends_unused: bool
    """FSDP2's `set_reduce_scatter_unused_params`."""
    actions: tuple[Action, ...]


def generate(seed: int, *, quick: bool = False) -> Program:
    """The program of a seed. quick: with the optimizers that DTensor knows soon."""
    rng = random.Random(seed)
    length = rng.randint(8, 16) if quick else rng.randint(8, 40)
    actions = tuple(_action(rng, quick) for _ in range(length))
    return Program(rng.choice(APIS), rng.choice(NAMES), rng.random() < 0.3, actions)


def _action(rng: random.Random, quick: bool) -> Action:
    plan, block = rng.choice(PLANS), rng.choice(BLOCKS)
    choices: list[tuple[int, Action]] = [
        (30, ("backward", plan)),
        (4, ("backward", plan, rng.choice(PLANS))),  # two forwards, one backward
        (16, ("step", rng.choice(("plain", "plain", "plain", "closure")))),
        (10, ("zero", rng.choice(("none", "zeros", "module", "halves")))),
        (8, ("sync", False)),
        (8, ("sync", True)),
        (6, ("evaluate", plan, rng.choice(("no_grad", "inference", "exact")))),
        (4, ("fail", plan, rng.choice(("forward", "backward")), rng.choice(("none", "zeros")))),
        (4, ("edit", block, rng.choice(("inplace", "copy", "data")))),
        (2, ("stale", block, plan)),
        (4, ("load", rng.choice(("own", "saved", block)))),
        (2, ("save",)),
        (6, ("resume",)),
        (5, ("set_config", rng.choice(NAMES))),
        (1, ("remove",)),
        (2, ("apply", rng.choice(NAMES))),
        (4, ("freeze", block, rng.choice(("all", "bias")))),
        (3, ("flush",)),
        (2, ("drop",)),
        (2, ("release",)),
        (2, ("invalidate",)),
        (3, ("unshard", block, rng.random() < 0.5)),
        (2, ("use_optimizer", rng.choice(QUICK_OPTIMIZERS if quick else OPTIMIZERS))),
        (2, ("clip",)),
        (1, ("look",)),
    ]
    weights, actions = zip(*choices, strict=True)
    chosen: Action = rng.choices(actions, weights)[0]
    return chosen


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The program without what it needs not to fail: slices of actions first, then parts of single ones."""
    size = max(1, len(program.actions) // 2)
    while size:
        start = 0
        while start < len(program.actions):
            rest = program.actions[:start] + program.actions[start + size :]
            if rest and fails(shorter := replace(program, actions=rest)):
                program = shorter
            else:
                start += size
        size //= 2
    for at in range(len(program.actions)):
        while (simpler := next(filter(fails, _simpler(program, at)), None)) is not None:
            program = simpler
    return program


def _simpler(program: Program, at: int) -> Iterator[Program]:
    """The same program with a shorter plan in one action, the shortest first."""
    before, action, after = program.actions[:at], program.actions[at], program.actions[at + 1 :]
    shorter: list[Action] = []
    if action[0] == "backward" and len(action) > 2:
        shorter.append(action[:2])
    if action[0] in ("backward", "evaluate", "fail"):
        plan = action[1]
        plans = {*plan, *(plan[:letter] + plan[letter + 1 :] for letter in range(len(plan)))} - {plan, ""}
        shorter += [(action[0], simpler, *action[2:]) for simpler in sorted(plans, key=lambda p: (len(p), p))]
    for simpler in shorter:
        yield replace(program, actions=(*before, simpler, *after))


def as_script(program: Program, seed: int | None = None) -> str:
    """What runs the program again: to be pasted into a shell, in the repository."""
    actions = "\n".join(f"    {action!r}," for action in program.actions)
    origin = "" if seed is None else f"  # shrunk from seed {seed}"
    return (
        "python -c \"$(cat <<'EOF'\n"
        "from tests.fuzz.programs import Program\n"
        "from tests.fuzz.search import replay\n\n"
        f"actions = ({origin}\n{actions}\n)\n"
        f"replay(Program({program.api!r}, {program.start!r}, {program.sends_unused!r}, actions))\n"
        "EOF\n"
        ')"\n'
    )
