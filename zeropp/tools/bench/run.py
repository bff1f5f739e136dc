"""The benchmark: every strategy on the same cluster, in the same processes, interleaved and repeated.

[Note: Order]
1. Calibrate: compute and baseline, at one micro-batch, until the link rate gives the wanted share.
2. Learn: every strategy trains for a while with open links, for its loss; nothing is timed.
3. Rounds: for each number of micro-batches, for each strategy: build the model anew, warm up with open
   links, shape the links, let zeropp choose a Config where the strategy leaves it to it, measure some steps.
   Strategies take turns, so what the machine does meanwhile hits all of them. Compute alone takes its turn
   after every few strategies. The first round also reads memory, the last also profiles one step.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch

from ... import __version__
from ..lab import Cluster
from ..lab.link_properties import UNLIMITED, parse_rate_bit_s
from ..strategies import BASELINE, COMPUTE, STRATEGIES, Strategy, find_strategy
from .messages import Steps
from .profile import PARTS
from .ranks import Ranks, StrategyError
from .results import Cell, Results
from .workload import Workload

Regime = Literal["paper", "slow", "fast"]
SHARES: dict[str, float] = {"paper": 0.70, "slow": 0.90, "fast": 0.30}
"""How much of the baseline's step, at one micro-batch, is communication in each regime."""
SHARE_TOLERANCE = 0.02
CALIBRATION_ROUNDS = 5
WARM_UP_MICRO_BATCHES = 2
STEPS_OF_A_CELL = 4
"""How many are measured at one micro-batch; fewer with more of them, but one at least."""
STRATEGIES_BETWEEN_COMPUTE = 6
STEPS_OF_A_CHOICE = 30
"""How many `apply(model, "auto")` takes to choose, roughly."""

OnProgress = Callable[[str, float], None]
"""Called with what happens now and the share of the work that is done."""


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    nodes: int = 2
    ranks_per_node: int = 2
    regime: Regime = "paper"
    """Sets the link rate by the share of the 16-bit baseline's step that is communication: paper 70%,
    slow 90%, fast 30%."""
    link: str | None = None
    """A link rate, in the place of a regime."""
    delay: str = "0ms"
    """Time that a message takes from one node to another, one way."""
    loss: str = "0%"
    """How many of the packets between nodes are lost."""
    micro_batches: tuple[int, ...] = (1, 4, 8)
    """How many an optimizer step has; each number is a table of its own."""
    strategies: tuple[str, ...] = tuple(strategy.name for strategy in STRATEGIES)
    """Ways to train, by name (zeropp/tools/strategies.py); each is a line of every table."""
    rounds: int = 3
    """How often each strategy takes its turn."""
    loss_steps: int = 40
    """Steps of the run that losses are compared by; 0: none."""
    workload: Workload = field(default_factory=Workload)

    def __post_init__(self) -> None:
        if self.regime not in get_args(Regime):
            raise ValueError(f"regime is {self.regime!r}; expected one of {', '.join(SHARES)}")
        if self.nodes < 2:
            raise ValueError(f"nodes is {self.nodes}; expected two or more: one node sends nothing to others")
        if self.link is not None and parse_rate_bit_s(self.link) is None:
            raise ValueError("link is 'unlimited'; a benchmark needs a rate, for the limit of each strategy")
        if not self.micro_batches or any(count < 1 for count in self.micro_batches):
            raise ValueError(f"micro_batches is {self.micro_batches!r}; expected positive numbers")
        if self.rounds < 1 or self.loss_steps < 0:
            raise ValueError(f"rounds is {self.rounds}, loss_steps {self.loss_steps}; expected 1, 0 or more")
        for name in self.strategies:
            find_strategy(name)


def run_bench(
    settings: Settings, on_progress: OnProgress, on_results: Callable[[Results], None] | None = None
) -> Results:
    """Run it all. Takes minutes; `on_results` gets what there is whenever all strategies had their turn."""
    shape = (settings.nodes, settings.ranks_per_node)
    with Cluster(*shape, UNLIMITED, settings.delay, settings.loss) as cluster, Ranks(cluster) as ranks:
        bench = _Bench(settings, cluster, ranks, on_progress)
        bench.calibrate()
        bench.learn()
        bench.measure(on_results or (lambda _: None))
    return bench.results


class _Bench:
    def __init__(self, settings: Settings, cluster: Cluster, ranks: Ranks, on_progress: OnProgress) -> None:
        self.settings, self.cluster, self.ranks = settings, cluster, ranks
        self.results = Results(
            nodes=settings.nodes,
            ranks_per_node=settings.ranks_per_node,
            workload=settings.workload,
            parameters=0,
            regime="given" if settings.link else settings.regime,
            wanted_share=None if settings.link else SHARES[settings.regime],
            link_bit_s=parse_rate_bit_s(settings.link) or 0 if settings.link else 0,
            delay=settings.delay,
            loss=settings.loss,
            versions={"zeropp": __version__, "torch": torch.__version__, "python": platform.python_version()},
        )
        self._on_progress = on_progress
        self._started = time.monotonic()
        self._done, self._total = 0.0, self._count_work()

    def calibrate(self) -> None:
        """Find the link rate; see [Note: Order]."""
        self._advance("measuring compute and the baseline", 0)
        compute_seconds = self._compute_seconds()
        self.results.parameters = self._build(find_strategy(BASELINE), UNLIMITED, 1)
        self._advance("", 10)
        if self.settings.link is not None:
            self._advance("", 40)
            return
        share = SHARES[self.settings.regime]
        open_run = self.ranks.take_steps(4, 1)
        bits = 8 * max(run.tx_bytes for run in open_run) / 4
        open_seconds = _median_seconds(open_run)
        if open_seconds > compute_seconds / (1 - share) * (1 + SHARE_TOLERANCE):
            raise ValueError(
                f"regime {self.settings.regime!r} cannot be reached: the baseline's step takes "
                f"{open_seconds * 1e3:.0f} ms on open links and {compute_seconds * 1e3:.0f} ms of it is "
                f"compute, so more than {share:.0%} is communication at any rate; give each micro-batch more "
                f"to compute: workload.batch is {self.settings.workload.batch}"
            )
        other_seconds = 0.0  # neither compute nor line time; does not depend on the rate
        for _ in range(CALIBRATION_ROUNDS):
            wanted_seconds = compute_seconds / (1 - share)
            line_seconds = max(wanted_seconds - compute_seconds - other_seconds, 0.02 * wanted_seconds)
            self.results.link_bit_s = round(bits / line_seconds)
            self._build(find_strategy(BASELINE), self._link(), 1)
            seconds = _median_seconds(self.ranks.take_steps(4, 1))
            compute_seconds = self._compute_seconds()  # again: a machine is not as fast all the time
            self._advance(f"finding the link rate for {share:.0%} communication", 8)
            if abs(1 - compute_seconds / seconds - share) < SHARE_TOLERANCE / 2:
                break
            other_seconds = seconds - compute_seconds - line_seconds

    def _compute_seconds(self) -> float:
        self._build(COMPUTE, UNLIMITED, 1)
        return _median_seconds(self.ranks.take_steps(8, 1))

    def learn(self) -> None:
        """Losses of all strategies, on open links."""
        steps = self.settings.loss_steps
        if steps == 0:
            return
        other_seed = replace(self.settings.workload, seed=self.settings.workload.seed + 1)
        for strategy in self._strategies():
            self._advance(f"loss of {strategy.title}", 0)
            self._try(strategy, partial(self._learn, strategy, self.settings.workload))
            self._advance("", steps)
        self._advance("loss of the baseline with another seed", 0)
        self._build(find_strategy(BASELINE), UNLIMITED, 0, other_seed)
        self.results.other_seed_losses = _mean_losses(self.ranks.take_steps(steps, 1))
        self._advance("", steps)

    def _learn(self, strategy: Strategy, workload: Workload) -> None:
        self._build(strategy, UNLIMITED, 0, workload)
        self.results.losses[strategy.name] = _mean_losses(self.ranks.take_steps(self.settings.loss_steps, 1))

    def measure(self, on_results: Callable[[Results], None]) -> None:
        """The timed rounds."""
        for number in range(self.settings.rounds):
            for micro_batches in self.settings.micro_batches:
                for strategy in _turns(self._strategies()):
                    where = f"round {number + 1} of {self.settings.rounds}, {micro_batches} micro-batches"
                    self._advance(f"{where}: {strategy.title}", 0)
                    self._try(strategy, partial(self._measure, strategy, micro_batches, number))
                    self._advance("", self._cell_work(strategy, micro_batches))
                self.results.seconds = time.monotonic() - self._started
                on_results(self.results)

    def _measure(self, strategy: Strategy, micro_batches: int, number: int) -> None:
        self._build(strategy, self._link(), micro_batches)
        chosen = self.ranks.choose(micro_batches)[0].name if strategy.is_auto else None
        count = _fewer(STEPS_OF_A_CELL, micro_batches)
        stolen_before, started = _stolen_seconds(), time.monotonic()
        runs = self.ranks.take_steps(count, micro_batches)
        cores = len(os.sched_getaffinity(0))
        stolen = (_stolen_seconds() - stolen_before) / (time.monotonic() - started) / cores
        step_ms = [1e3 * max(run.seconds[step] for run in runs) for step in range(count)]
        if strategy is COMPUTE:
            self.results.compute_ms.setdefault(micro_batches, []).extend(step_ms)
            return
        cell = self.results.cell(strategy.name, micro_batches)
        if cell is None:
            cell = Cell(strategy.name, micro_batches)
            self.results.cells.append(cell)
        cell.step_ms += step_ms
        cell.stolen.append(stolen)
        cell.chosen += [] if chosen is None else [chosen]
        leaders = runs[:: self.settings.ranks_per_node]
        cell.sent_bytes = sum(run.tx_bytes for run in leaders) / len(leaders) / count
        cell.busiest_bytes = max(max(run.tx_bytes, run.rx_bytes) for run in leaders) / count
        ledgers = [run.ledger_bytes for run in runs if run.ledger_bytes is not None]
        if ledgers:
            cell.ledger_bytes = sum(ledgers) / len(leaders) / count
            cell.bytes_shares = _phase_shares(runs)
        cell.cores_ms = 1e3 * sum(run.cpu_seconds for run in runs) / count / cores
        if number == 0:
            memory = self.ranks.read_memory()
            cell.peak_bytes = max(rank.peak_bytes for rank in memory)
            cell.model_state_bytes = max(rank.model_state_bytes for rank in memory)
            cell.communication_bytes = max(rank.communication_bytes for rank in memory)
        if number == self.settings.rounds - 1:
            profiles = [step.parts_ms for step in self.ranks.profile_step(micro_batches)]
            cell.parts_ms = {part: sum(ms[part] for ms in profiles) / len(profiles) for part in PARTS}

    def _build(
        self, strategy: Strategy, link: str, warm_up_micro_batches: int, workload: Workload | None = None
    ) -> int:
        """A fresh model of the strategy, warmed up on open links; then shape them. Returns its parameters."""
        self._set_links(UNLIMITED)
        built = self.ranks.build(strategy, workload or self.settings.workload)
        if strategy.engine == "deepspeed" and warm_up_micro_batches:  # it cannot change their number later
            self.ranks.take_steps(1, warm_up_micro_batches)
        elif warm_up_micro_batches:  # two, so that one of several has met the accumulation
            several = min(warm_up_micro_batches, WARM_UP_MICRO_BATCHES)
            self.ranks.take_steps(WARM_UP_MICRO_BATCHES // several, several)
        self._set_links(link)
        return built[0].parameters

    def _try(self, strategy: Strategy, run: Callable[[], None]) -> None:
        if strategy.name in self.results.failed:
            return
        try:
            run()
        except StrategyError as error:
            self.results.failed[strategy.name] = str(error)

    def _set_links(self, link: str) -> None:
        self.cluster.set_link(link=link)

    def _link(self) -> str:
        return f"{self.results.link_bit_s}bit"

    def _strategies(self) -> list[Strategy]:
        """Those that make sense here and have not failed; the others are noted."""
        chosen = []
        for name in self.settings.strategies:
            strategy = find_strategy(name)
            why_not = strategy.why_not(self.settings.nodes, self.settings.ranks_per_node)
            if why_not is not None:
                self.results.failed[strategy.name] = why_not
            if strategy.name not in self.results.failed:
                chosen.append(strategy)
        return chosen

    def _count_work(self) -> float:
        strategies = [find_strategy(name) for name in self.settings.strategies]
        cells = sum(self._cell_work(s, k) for s in _turns(strategies) for k in self.settings.micro_batches)
        return 50 + (1 + len(strategies)) * self.settings.loss_steps + cells * self.settings.rounds

    @staticmethod
    def _cell_work(strategy: Strategy, micro_batches: int) -> float:
        """How long a cell takes, roughly, where a micro-batch on open links takes 1. On shaped links the
        baseline's takes 3."""
        slowness = {COMPUTE.name: 1, "fsdp2": 6, BASELINE: 3}.get(strategy.name, 2)
        measured = slowness * micro_batches * _fewer(STEPS_OF_A_CELL, micro_batches)
        chooses = 3 * STEPS_OF_A_CHOICE * micro_batches if strategy.is_auto else 0
        return 3 + WARM_UP_MICRO_BATCHES + chooses + measured

    def _advance(self, what: str, work: float) -> None:
        self._done += work
        self._on_progress(what, min(1.0, self._done / self._total))


def _turns(strategies: Sequence[Strategy]) -> Iterator[Strategy]:
    """The strategies, with compute now and then: all limits depend on it, and a machine changes its speed."""
    for number, strategy in enumerate(strategies):
        if number % STRATEGIES_BETWEEN_COMPUTE == 0:
            yield COMPUTE
        yield strategy


def _fewer(steps: int, micro_batches: int) -> int:
    return max(1, steps // micro_batches)


def _stolen_seconds() -> float:
    """What the host of a virtual machine has given to others of all cores, so far: "steal" in /proc/stat."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def _median_seconds(runs: Sequence[Steps]) -> float:
    """The median of some steps, each as long as on the rank where it took longest."""
    steps = sorted(max(values) for values in zip(*(run.seconds for run in runs), strict=True))
    return float(steps[len(steps) // 2])


def _phase_shares(runs: Sequence[Steps]) -> list[float]:
    """How much of what all ranks send is sent in each phase of a step."""
    sent = [sum(same) for same in zip(*(run.phase_bytes for run in runs), strict=True)]
    return [phase / sum(sent) for phase in sent] if sum(sent) else []


def _mean_losses(runs: Sequence[Steps]) -> list[float]:
    """The loss of each step, over all ranks."""
    return [sum(values) / len(values) for values in zip(*(run.losses for run in runs), strict=True)]
