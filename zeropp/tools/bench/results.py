"""Results of a benchmark: numbers per strategy and number of micro-batches, and conclusions from them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..._text import count, parameters
from ..atomic_files import write_file
from ..lab.link_properties import format_rate
from ..strategies import BASELINE, DEFAULT, NOT_RUN, STRATEGIES, Strategy, find_strategy
from .workload import Workload

NOTABLE_STEAL = 0.02
"""Share of the cores' time above which `verdicts` mentions that the host has taken it."""
COMPUTE_SHARES = (1 / 3, 2 / 3)
"""Shares of forward and backward in compute: one and two matrix products per weight. They are not measured,
because the time of a phase depends on waits for cores, if ranks share cores."""
EXPECTED = "a JSON file from `zeropp lab bench`"
TITLES = {strategy.name: strategy.title for strategy in STRATEGIES}


@dataclass
class Cell:
    """One strategy at one number of micro-batches. Bytes are per optimizer step."""

    strategy: str
    micro_batches: int
    step_ms: list[float] = field(default_factory=list)
    """Every measured step of all rounds."""
    sent_bytes: float = 0.0
    """Bytes that a node has sent, from the interface counters, mean over nodes."""
    busiest_bytes: float = 0.0
    """Bytes of the link direction with the most traffic."""
    ledger_bytes: float | None = None
    """Bytes that a node has sent, from the ledgers. None: no ledger."""
    bytes_shares: list[float] = field(default_factory=list)
    """Share of `ledger_bytes` in each phase: forward and backward of each micro-batch, optimizer."""
    cores_ms: float = 0.0
    """CPU time of all ranks, divided by the number of cores. No step can be shorter."""
    stolen: list[float] = field(default_factory=list)
    """Share of the cores' time that the host of a virtual machine took for others, in each round."""
    parts_ms: dict[str, float] = field(default_factory=dict)
    """Time of each part of one profiled step, mean over ranks."""
    peak_bytes: int = 0
    """Peak of a rank's resident memory, minus the memory before the model was built."""
    model_state_bytes: int = 0
    """The part of the peak that is weights, gradients and optimizer state, between steps."""
    communication_bytes: int = 0
    """The part of the peak that is node shards and buffers of zeropp."""
    chosen: list[str] = field(default_factory=list)
    """Choice of `apply(model, "auto")`, in each round."""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def spread(self) -> float:
        """Half the interquartile range of the steps, relative to the median."""
        if len(self.step_ms) < 4:
            return (max(self.step_ms) - min(self.step_ms)) / 2 / self.median_ms
        low, _, high = statistics.quantiles(self.step_ms, n=4)
        return (high - low) / 2 / self.median_ms


@dataclass
class Results:
    """Results of a whole run. `save` and `load` use JSON."""

    nodes: int
    ranks_per_node: int
    workload: Workload
    parameters: int
    regime: str
    wanted_share: float | None
    """Share of communication in the baseline's step that the regime aims at. None: the link was given."""
    link_bit_s: int
    delay: str
    loss: str
    versions: dict[str, str]
    compute_ms: dict[int, list[float]] = field(default_factory=dict)
    """Times of steps that send nothing, by number of micro-batches."""
    cells: list[Cell] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Loss of every step of a longer run of each strategy, mean over ranks. All have the same data."""
    other_seed_losses: list[float] = field(default_factory=list)
    """The same for the baseline with other data and weights, as a measure of noise."""
    failed: dict[str, str] = field(default_factory=dict)
    """Strategies that could not run, with the reason."""
    seconds: float = 0.0
    """Duration of the benchmark."""

    def cell(self, strategy: str, micro_batches: int) -> Cell | None:
        wanted = (strategy, micro_batches)
        return next((cell for cell in self.cells if (cell.strategy, cell.micro_batches) == wanted), None)

    def measured(self, micro_batches: int) -> list[tuple[Strategy, Cell]]:
        """Return the strategies that have a cell, in the order of all tables."""
        cells = [(strategy, self.cell(strategy.name, micro_batches)) for strategy in STRATEGIES]
        return [(strategy, cell) for strategy, cell in cells if cell is not None]

    def micro_batches(self) -> list[int]:
        return sorted({cell.micro_batches for cell in self.cells})

    def compute_median_ms(self, micro_batches: int) -> float:
        return statistics.median(self.compute_ms[micro_batches])

    def limit_ms(self, cell: Cell) -> float:
        """Return a lower bound of a step: compute, and the busiest link's bytes at line rate.

        Strategies that overlap hide communication behind compute, as far as `_phase_limit_ms` allows. A
        phase hides only its own communication: a forward gathers weights after the optimizer's step, and a
        backward reduces gradients before it. CPU time is a limit, too, because encoding and sending use the
        same cores.
        """
        compute_ms = self.compute_median_ms(cell.micro_batches)
        wire_ms = cell.busiest_bytes * 8e3 / self.link_bit_s
        if not find_strategy(cell.strategy).overlaps:
            return max(compute_ms + wire_ms, cell.cores_ms)
        computed = [share / cell.micro_batches for share in COMPUTE_SHARES] * cell.micro_batches
        if sent := cell.bytes_shares:
            phases = zip([*computed, 0.0], sent, strict=True)  # the optimizer's compute is negligible
        else:  # an old file, without bytes per phase
            phases = zip([1.0], [1.0], strict=True)
        phases_ms = (self._phase_limit_ms(compute_ms * compute, wire_ms * wire) for compute, wire in phases)
        return max(sum(phases_ms), cell.cores_ms)

    def _phase_limit_ms(self, compute_ms: float, wire_ms: float) -> float:
        """Return a lower bound of a phase with overlap.

        In forward, compute starts when the weights of the root and of the first block have arrived, and the
        last block computes after all weights have. Backward is the mirror image: it starts with the last
        block, and ends with the gradients of the first block and of the root.
        """
        first_wire_ms = self.workload.first_and_last_share * wire_ms
        last_compute_ms = compute_ms / self.workload.layers if wire_ms else 0.0
        return max(first_wire_ms + compute_ms, wire_ms + last_compute_ms)

    def speedup(self, cell: Cell) -> float | None:
        """Return the throughput relative to the baseline, or None without a baseline."""
        baseline = self.cell(BASELINE, cell.micro_batches)
        return baseline.median_ms / cell.median_ms if baseline else None

    def share(self, micro_batches: int) -> float | None:
        """Return the share of the baseline's step that is not compute, or None without a baseline."""
        baseline = self.cell(BASELINE, micro_batches)
        return 1 - self.compute_median_ms(micro_batches) / baseline.median_ms if baseline else None

    def final_loss(self, strategy: str) -> float | None:
        """Return the mean loss of the last quarter of the strategy's longer run."""
        return _tail_mean(self.losses[strategy]) if strategy in self.losses else None

    def loss_noise(self) -> float | None:
        """Return the difference between the baseline's final losses with two seeds."""
        baseline = self.final_loss(BASELINE)
        if baseline is None or not self.other_seed_losses:
            return None
        return abs(baseline - _tail_mean(self.other_seed_losses))

    def describe(self) -> str:
        """Return one line about the cluster, the model and the links."""
        return (
            f"{count(self.nodes, 'node')} x {count(self.ranks_per_node, 'rank')}, "
            f"{parameters(self.parameters)} parameters, links {format_rate(self.link_bit_s)} "
            f"({self.regime}{self._describe_share()})"
        )

    def _describe_share(self) -> str:
        share = self.share(min(self.micro_batches()))
        if share is None:
            return ""
        if share <= 0:  # steps without communication took longer than steps with it
            return ": the baseline's communication is lost in noise; more --rounds may show it"
        return f": {share:.0%} of the baseline's step is communication"

    def save(self, path: Path) -> None:
        write_file(path, json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file that `save` has written."""
        try:
            return cls._from_dict(json.loads(path.read_text()))
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}); expected {EXPECTED}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not {EXPECTED} ({error}); name one") from None

    @classmethod
    def _from_dict(cls, raw: dict[str, Any]) -> Results:
        raw["workload"] = Workload(**raw["workload"])
        for cell in raw["cells"]:
            if "row" in cell:  # the name of the key in old files
                cell["strategy"] = cell.pop("row")
        raw["cells"] = [Cell(**cell) for cell in raw["cells"]]
        raw["compute_ms"] = {int(key): value for key, value in raw.get("compute_ms", {}).items()}
        raw.pop("compute_shares", None)  # measured in old files
        return cls(**raw)


def verdicts(results: Results) -> list[str]:
    """Return sentences that help a reader decide against us: where other strategies win, how noisy the
    numbers are, and what did not run."""
    sentences = []
    for micro_batches in results.micro_batches():
        sentences += _compare(results, micro_batches)
    not_run = {TITLES[name]: why for name, why in results.failed.items()} | NOT_RUN
    return [
        *sentences,
        *_compare_losses(results),
        *(
            f"{TITLES[cell.strategy]}: chose {', '.join(cell.chosen)} ({cell.micro_batches} per step)"
            for cell in results.cells
            if cell.chosen
        ),
        *_mention_steal(results),
        *(f"not run: {title}: {why}" for title, why in not_run.items()),
    ]


def _compare(results: Results, micro_batches: int) -> list[str]:
    """List the strategies that are faster than our default, and those that need less memory."""
    ours = results.cell(DEFAULT, micro_batches)
    if ours is None:
        return []
    measured = [cell for _, cell in results.measured(micro_batches) if cell.step_ms]
    faster = [cell for cell in measured if cell.median_ms < ours.median_ms]
    smaller = [cell for cell in measured if cell.peak_bytes < 0.95 * ours.peak_bytes]
    speeds = [(cell.median_ms, cell, f"{ours.median_ms / cell.median_ms:.2f}x") for cell in faster]
    sizes = [(cell.peak_bytes, cell, _mib(cell.peak_bytes)) for cell in smaller]
    where = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    return [
        f"{where}: faster than our default: {_ranking(speeds)}",
        f"{where}: smaller at its peak than our default ({_mib(ours.peak_bytes)}): {_ranking(sizes)}",
    ]


def _ranking(entries: Sequence[tuple[float, Cell, str]]) -> str:
    """List strategies in the order of a number, each with a text."""
    ordered = sorted(entries, key=lambda entry: entry[0])
    return ", ".join(f"{TITLES[cell.strategy]} ({text})" for _, cell, text in ordered) or "none"


def _compare_losses(results: Results) -> list[str]:
    default, baseline = results.final_loss(DEFAULT), results.final_loss(BASELINE)
    noise = results.loss_noise()
    if default is None or baseline is None or noise is None:
        return []
    return [
        f"loss: our default's differs from the baseline's by {default - baseline:+.4f}; another seed changes "
        f"the baseline's by {noise:.4f}"
    ]


def _mention_steal(results: Results) -> list[str]:
    """Mention the time that the host of a virtual machine took for others, if it is notable."""
    stolen = [(statistics.mean(cell.stolen), TITLES[cell.strategy]) for cell in results.cells if cell.stolen]
    most, title = max(stolen, default=(0.0, ""))
    if most <= NOTABLE_STEAL:
        return []
    median = statistics.median(share for share, _ in stolen)
    return [
        f"not a quiet machine: its host gave others up to {most:.0%} of its cores' time (while {title} was "
        f"measured), and {median:.0%} in the median, which makes compute slower"
    ]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def _tail_mean(losses: list[float]) -> float:
    return statistics.mean(losses[-max(1, len(losses) // 4) :])
