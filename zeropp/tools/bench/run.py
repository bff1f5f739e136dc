"""The benchmark: all strategies on the same cluster, in the same processes, interleaved and repeated.

[Note: Order]
1. Calibrate: measure compute and the baseline at one micro-batch, until the link rate gives the regime's
   share of communication.
2. Losses: train with each strategy for a while on unlimited links. Nothing is timed.
3. Rounds: for each number of micro-batches and each strategy, build a new model, warm up on unlimited links,
   shape the links, let `apply(model, "auto")` choose if the strategy is "auto", and measure some steps.
   Strategies take turns, so other load on the machine affects all of them. Compute alone has a turn after
   every few strategies. The first round also reads memory, and the last one also profiles a step.
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
"""Share of communication in the baseline's step at one micro-batch, by regime."""
SHARE_TOLERANCE = 0.02
CALIBRATION_ROUNDS = 5
WARM_UP_MICRO_BATCHES = 2
STEPS_OF_A_CELL = 4
"""Number of measured steps at one micro-batch. Steps with more micro-batches are fewer, at least one."""
STRATEGIES_BETWEEN_COMPUTE = 6
STEPS_OF_A_CHOICE = 30
"""Approximate number of steps that `apply(model, "auto")` takes to choose."""

OnProgress = Callable[[str, float], None]
"""Called with a description of the current work and the share of work that is done."""


@dataclass(frozen=True)
class BenchSettings:
    """Options of a benchmark."""

    nodes: int = 2
    ranks_per_node: int = 2
    regime: Regime = "paper"
    """Share of communication in the step of the 16-bit baseline, which sets the link rate: paper 70%,
    slow 90%, fast 30%."""
    link: str | None = None
    """Link rate, instead of a regime."""
    delay: str = "0ms"
    """One-way delay of messages between nodes."""
    loss: str = "0%"
    """Share of packets between nodes that are lost."""
    micro_batches: tuple[int, ...] = (1, 4, 8)
    """Micro-batches per optimizer step. Each number has its own table."""
    strategies: tuple[str, ...] = tuple(strategy.name for strategy in STRATEGIES)
    """Names of strategies (zeropp/tools/strategies.py). Each is a line of every table."""
    rounds: int = 3
    """Number of turns of each strategy."""
    loss_steps: int = 40
    """Number of steps of the runs that compare losses. 0: no such runs."""
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
    settings: BenchSettings, on_progress: OnProgress, on_results: Callable[[Results], None] | None = None
) -> Results:
    """Run the benchmark, which takes minutes.

    Args:
        settings: options of the benchmark.
        on_progress: called before and after each piece of work.
        on_results: called with the results so far, after each turn of all strategies.
    """
    shape = (settings.nodes, settings.ranks_per_node)
    with Cluster(*shape, UNLIMITED, settings.delay, settings.loss) as cluster, Ranks(cluster) as ranks:
        bench = _Bench(settings, cluster, ranks, on_progress)
        bench.calibrate()
        bench.measure_losses()
        bench.measure_steps(on_results or (lambda _: None))
    return bench.results


class _Bench:
    """A benchmark that is running."""

    def __init__(
        self, settings: BenchSettings, cluster: Cluster, ranks: Ranks, on_progress: OnProgress
    ) -> None:
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
        """Find the link rate. See [Note: Order]."""
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
                f"{open_seconds * 1e3:.0f} ms on unlimited links, of which {compute_seconds * 1e3:.0f} ms "
                f"are compute, so communication is more than {share:.0%} at any link rate; raise "
                f"workload.batch, which is {self.settings.workload.batch}"
            )
        other_seconds = 0.0  # neither compute nor time on the wire; does not depend on the link rate
        for _ in range(CALIBRATION_ROUNDS):
            wanted_seconds = compute_seconds / (1 - share)
            line_seconds = max(wanted_seconds - compute_seconds - other_seconds, 0.02 * wanted_seconds)
            self.results.link_bit_s = round(bits / line_seconds)
            self._build(find_strategy(BASELINE), self._link(), 1)
            seconds = _median_seconds(self.ranks.take_steps(4, 1))
            compute_seconds = self._compute_seconds()  # again, because the machine's speed changes
            self._advance(f"finding the link rate for {share:.0%} communication", 8)
            if abs(1 - compute_seconds / seconds - share) < SHARE_TOLERANCE / 2:
                break
            other_seconds = seconds - compute_seconds - line_seconds

    def _compute_seconds(self) -> float:
        self._build(COMPUTE, UNLIMITED, 1)
        return _median_seconds(self.ranks.take_steps(8, 1))

    def measure_losses(self) -> None:
        """Train with each strategy on unlimited links, for its losses."""
        steps = self.settings.loss_steps
        if steps == 0:
            return
        other_seed = replace(self.settings.workload, seed=self.settings.workload.seed + 1)
        for strategy in self._strategies():
            self._advance(f"loss of {strategy.title}", 0)
            self._try(strategy, partial(self._measure_losses, strategy, self.settings.workload))
            self._advance("", steps)
        self._advance("loss of the baseline with another seed", 0)
        self._build(find_strategy(BASELINE), UNLIMITED, 0, other_seed)
        self.results.other_seed_losses = _mean_losses(self.ranks.take_steps(steps, 1))
        self._advance("", steps)

    def _measure_losses(self, strategy: Strategy, workload: Workload) -> None:
        self._build(strategy, UNLIMITED, 0, workload)
        self.results.losses[strategy.name] = _mean_losses(self.ranks.take_steps(self.settings.loss_steps, 1))

    def measure_steps(self, on_results: Callable[[Results], None]) -> None:
        """Run the timed rounds."""
        for number in range(self.settings.rounds):
            for micro_batches in self.settings.micro_batches:
                for strategy in _with_compute(self._strategies()):
                    where = f"round {number + 1} of {self.settings.rounds}, {micro_batches} micro-batches"
                    self._advance(f"{where}: {strategy.title}", 0)
                    self._try(strategy, partial(self._measure_steps, strategy, micro_batches, number))
                    self._advance("", self._cell_work(strategy, micro_batches))
                self.results.seconds = time.monotonic() - self._started
                on_results(self.results)

    def _measure_steps(self, strategy: Strategy, micro_batches: int, number: int) -> None:
        self._build(strategy, self._link(), micro_batches)
        chosen = [self.ranks.choose(micro_batches)[0].name] if strategy.is_auto else []
        count = _fewer(STEPS_OF_A_CELL, micro_batches)
        stolen_before, started = _stolen_seconds(), time.monotonic()
        runs = self.ranks.take_steps(count, micro_batches)
        cores = len(os.sched_getaffinity(0))
        stolen = (_stolen_seconds() - stolen_before) / (time.monotonic() - started) / cores
        step_ms = [1e3 * max(run.seconds[step] for run in runs) for step in range(count)]
        if strategy is COMPUTE:
            self.results.compute_ms.setdefault(micro_batches, []).extend(step_ms)
            return
        cell = self._cell(strategy, micro_batches)
        cell.step_ms += step_ms
        cell.stolen.append(stolen)
        cell.chosen += chosen
        cell.cores_ms = 1e3 * sum(run.cpu_seconds for run in runs) / count / cores
        self._count_bytes(cell, runs)
        if number == 0:
            self._read_memory(cell)
        if number == self.settings.rounds - 1:
            self._profile(cell)

    def _cell(self, strategy: Strategy, micro_batches: int) -> Cell:
        cell = self.results.cell(strategy.name, micro_batches)
        if cell is None:
            cell = Cell(strategy.name, micro_batches)
            self.results.cells.append(cell)
        return cell

    def _count_bytes(self, cell: Cell, runs: list[Steps]) -> None:
        count = len(runs[0].seconds)
        leaders = runs[:: self.settings.ranks_per_node]  # interface counters are per node
        cell.sent_bytes = sum(run.tx_bytes for run in leaders) / len(leaders) / count
        cell.busiest_bytes = max(max(run.tx_bytes, run.rx_bytes) for run in leaders) / count
        ledgers = [run.ledger_bytes for run in runs if run.ledger_bytes is not None]
        if ledgers:
            cell.ledger_bytes = sum(ledgers) / len(leaders) / count
            cell.bytes_shares = _phase_shares(runs)

    def _read_memory(self, cell: Cell) -> None:
        memory = self.ranks.read_memory()
        cell.peak_bytes = max(rank.peak_bytes for rank in memory)
        cell.model_state_bytes = max(rank.model_state_bytes for rank in memory)
        cell.communication_bytes = max(rank.communication_bytes for rank in memory)

    def _profile(self, cell: Cell) -> None:
        profiles = [step.parts_ms for step in self.ranks.profile_step(cell.micro_batches)]
        cell.parts_ms = {part: sum(ms[part] for ms in profiles) / len(profiles) for part in PARTS}

    def _build(
        self, strategy: Strategy, link: str, warm_up_micro_batches: int, workload: Workload | None = None
    ) -> int:
        """Build a new model and warm it up on unlimited links. Then shape the links.

        Returns the number of the model's parameters.
        """
        self._set_links(UNLIMITED)
        built = self.ranks.build(strategy, workload or self.settings.workload)
        if strategy.engine == "deepspeed" and warm_up_micro_batches:  # their number is then fixed
            self.ranks.take_steps(1, warm_up_micro_batches)
        elif warm_up_micro_batches:  # two in all, so that a step of several accumulates gradients
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
        """Return the strategies that can run on this cluster and have not failed. Note the others."""
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
        turns = list(_with_compute(strategies))
        cells = sum(self._cell_work(s, k) for s in turns for k in self.settings.micro_batches)
        return 50 + (1 + len(strategies)) * self.settings.loss_steps + cells * self.settings.rounds

    @staticmethod
    def _cell_work(strategy: Strategy, micro_batches: int) -> float:
        """Estimate the duration of a cell. A micro-batch on unlimited links takes 1, and the baseline's on
        shaped links takes 3."""
        slowness = {COMPUTE.name: 1, "fsdp2": 6, BASELINE: 3}.get(strategy.name, 2)
        measured = slowness * micro_batches * _fewer(STEPS_OF_A_CELL, micro_batches)
        chooses = 3 * STEPS_OF_A_CHOICE * micro_batches if strategy.is_auto else 0
        return 3 + WARM_UP_MICRO_BATCHES + chooses + measured

    def _advance(self, what: str, work: float) -> None:
        self._done += work
        self._on_progress(what, min(1.0, self._done / self._total))


def _with_compute(strategies: Sequence[Strategy]) -> Iterator[Strategy]:
    """Yield the strategies, with compute between them: all limits depend on it, and the machine's speed
    changes."""
    for number, strategy in enumerate(strategies):
        if number % STRATEGIES_BETWEEN_COMPUTE == 0:
            yield COMPUTE
        yield strategy


def _fewer(steps: int, micro_batches: int) -> int:
    return max(1, steps // micro_batches)


def _stolen_seconds() -> float:
    """Return the core time that the host of a virtual machine took for others: "steal" in /proc/stat."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def _median_seconds(runs: Sequence[Steps]) -> float:
    """Return the median of the steps. Each step counts on the rank where it took longest."""
    steps = sorted(max(values) for values in zip(*(run.seconds for run in runs), strict=True))
    return float(steps[len(steps) // 2])


def _phase_shares(runs: Sequence[Steps]) -> list[float]:
    """Return the share of each phase of a step in the bytes of all ranks."""
    sent = [sum(same) for same in zip(*(run.phase_bytes for run in runs), strict=True)]
    return [phase / sum(sent) for phase in sent] if sum(sent) else []


def _mean_losses(runs: Sequence[Steps]) -> list[float]:
    """Return the loss of each step, mean over all ranks."""
    return [sum(values) / len(values) for values in zip(*(run.losses for run in runs), strict=True)]
