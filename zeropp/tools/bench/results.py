"""What a benchmark found: numbers per strategy and number of micro-batches, and what follows from them."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..._text import count, parameters
from ..atomic_files import write_file
from ..lab.link_properties import format_rate
from ..strategies import BASELINE, DEFAULT, NOT_RUN, STRATEGIES, Strategy, find_strategy
from .workload import Workload

STOLEN_IS_MUCH = 0.02
COMPUTE_SHARES = (1 / 3, 2 / 3)
"""Shares of forward and backward in computing: one matrix product of a weight, and two. Not measured: where
ranks share cores, the time of a phase says more about who waited for a core than about what was computed."""
EXPECTED = "a JSON file that `zeropp lab bench` wrote"


@dataclass
class Cell:
    """One strategy at one number of micro-batches. Bytes are per optimizer step."""

    strategy: str
    micro_batches: int
    step_ms: list[float] = field(default_factory=list)
    """Every measured step, of all rounds."""
    sent_bytes: float = 0.0
    """What a node sent, from the interface counters, mean over nodes."""
    busiest_bytes: float = 0.0
    """The most that one direction of one link carried."""
    ledger_bytes: float | None = None
    """What the ledger says that a node sent, ..."""
    bytes_shares: list[float] = field(default_factory=list)
    """... and how much of it in each phase: forward and backward of every micro-batch, optimizer."""
    cores_ms: float = 0.0
    """CPU time of all ranks, divided by the cores that they share: no step can be shorter."""
    stolen: list[float] = field(default_factory=list)
    """Share of all cores' time that a virtual machine's host gave to others meanwhile, in each round."""
    parts_ms: dict[str, float] = field(default_factory=dict)
    """Where the time of one profiled step went, mean over ranks."""
    peak_bytes: int = 0
    """Resident memory of a rank at its peak, above what it had before the model was built."""
    model_state_bytes: int = 0
    """What of the peak is weights, gradients and optimizer state, at rest."""
    communication_bytes: int = 0
    """What of the peak is node shards and buffers of zeropp."""
    chosen: list[str] = field(default_factory=list)
    """What a strategy that chooses its Config by itself has chosen, in each round."""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def spread(self) -> float:
        """Half the range of the middle half of the steps, relative to the median."""
        if len(self.step_ms) < 4:
            return (max(self.step_ms) - min(self.step_ms)) / 2 / self.median_ms
        low, _, high = statistics.quantiles(self.step_ms, n=4)
        return (high - low) / 2 / self.median_ms


@dataclass
class Results:
    """A whole run. `save` and `load` keep it as JSON."""

    nodes: int
    ranks_per_node: int
    workload: Workload
    parameters: int
    regime: str
    wanted_share: float | None
    """Share of the baseline's step that was to be communication; None: the link was given."""
    link_bit_s: int
    delay: str
    loss: str
    versions: dict[str, str]
    compute_ms: dict[int, list[float]] = field(default_factory=dict)
    """Steps that send nothing, by number of micro-batches."""
    cells: list[Cell] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Loss of every step of a longer run of each strategy, mean over ranks; all with the same data."""
    other_seed_losses: list[float] = field(default_factory=list)
    """The same for the baseline with other data and weights: how much a loss means."""
    failed: dict[str, str] = field(default_factory=dict)
    """Strategies that could not be run, and why."""
    seconds: float = 0.0

    def cell(self, strategy: str, micro_batches: int) -> Cell | None:
        wanted = (strategy, micro_batches)
        return next((cell for cell in self.cells if (cell.strategy, cell.micro_batches) == wanted), None)

    def measured(self, micro_batches: int) -> list[tuple[Strategy, Cell]]:
        """The strategies that have a cell, in the order of every table."""
        cells = [(strategy, self.cell(strategy.name, micro_batches)) for strategy in STRATEGIES]
        return [(strategy, cell) for strategy, cell in cells if cell is not None]

    def micro_batches(self) -> list[int]:
        return sorted({cell.micro_batches for cell in self.cells})

    def compute_median_ms(self, micro_batches: int) -> float:
        return statistics.median(self.compute_ms[micro_batches])

    def limit_ms(self, cell: Cell) -> float:
        """What no step can beat: compute, and the busiest link's bytes at line rate, one after the other, or
        beside each other as far as they can be: see `_phase_limit_ms`.

        A phase can hide only what is sent in it: weights that a forward needs come after the optimizer's
        step, and gradients before it. And what encodes and sends takes its time from the same cores.
        """
        compute_ms = self.compute_median_ms(cell.micro_batches)
        wire_ms = cell.busiest_bytes * 8e3 / self.link_bit_s
        if not find_strategy(cell.strategy).overlaps:
            return max(compute_ms + wire_ms, cell.cores_ms)
        computed = [share / cell.micro_batches for share in COMPUTE_SHARES] * cell.micro_batches
        if sent := cell.bytes_shares:
            phases = zip([*computed, 0.0], sent, strict=True)  # the optimizer computes next to nothing
        else:  # a file from before phases were told apart
            phases = zip([1.0], [1.0], strict=True)
        phases_ms = (self._phase_limit_ms(compute_ms * compute, wire_ms * wire) for compute, wire in phases)
        return max(sum(phases_ms), cell.cores_ms)

    def _phase_limit_ms(self, compute_ms: float, wire_ms: float) -> float:
        """In forward nothing computes before the weights of the root and of the first block are there, and
        the last block computes when all weights are. Backward is the same from the end: first the last
        block, and in the end the gradients of the first one and of the root."""
        first_wire_ms = self.workload.first_and_last_share * wire_ms
        last_compute_ms = compute_ms / self.workload.layers if wire_ms else 0.0
        return max(first_wire_ms + compute_ms, wire_ms + last_compute_ms)

    def speedup(self, cell: Cell) -> float | None:
        """Throughput relative to the baseline's."""
        baseline = self.cell(BASELINE, cell.micro_batches)
        return baseline.median_ms / cell.median_ms if baseline else None

    def share(self, micro_batches: int) -> float | None:
        """The share of the baseline's step that is not compute."""
        baseline = self.cell(BASELINE, micro_batches)
        return 1 - self.compute_median_ms(micro_batches) / baseline.median_ms if baseline else None

    def final_loss(self, strategy: str) -> float | None:
        """Mean of the last quarter of the strategy's longer run."""
        return _tail_mean(self.losses[strategy]) if strategy in self.losses else None

    def loss_noise(self) -> float | None:
        """Difference of the baseline's final loss with another seed."""
        baseline = self.final_loss(BASELINE)
        if baseline is None or not self.other_seed_losses:
            return None
        return abs(baseline - _tail_mean(self.other_seed_losses))

    def describe(self) -> str:
        """One line: what was run."""
        return (
            f"{count(self.nodes, 'node')} x {count(self.ranks_per_node, 'rank')}, "
            f"{parameters(self.parameters)} parameters, links {format_rate(self.link_bit_s)} "
            f"({self.regime}{self._describe_share()})"
        )

    def _describe_share(self) -> str:
        share = self.share(min(self.micro_batches()))
        if share is None:
            return ""
        if share <= 0:  # steps that send nothing took longer than those that send
            return ": the baseline's communication is lost in noise; more --rounds may find it"
        return f": {share:.0%} of the baseline's step is communication"

    def save(self, path: Path) -> None:
        write_file(path, json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what `save` wrote."""
        try:
            return cls._from_dict(json.loads(path.read_text()))
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}); expected {EXPECTED}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} holds something else ({error}); expected {EXPECTED}") from None

    @classmethod
    def _from_dict(cls, raw: dict[str, Any]) -> Results:
        raw["workload"] = Workload(**raw["workload"])
        for cell in raw["cells"]:
            if "row" in cell:  # a file from before strategies were called so
                cell["strategy"] = cell.pop("row")
        raw["cells"] = [Cell(**cell) for cell in raw["cells"]]
        raw["compute_ms"] = {int(key): value for key, value in raw.get("compute_ms", {}).items()}
        raw.pop("compute_shares", None)  # a file from when they were measured
        return cls(**raw)


def verdicts(results: Results) -> list[str]:
    """Where a rival of our default wins, and what was not run: what a reader needs to choose against us."""
    titles = {strategy.name: strategy.title for strategy in STRATEGIES}
    sentences = []
    for micro_batches in results.micro_batches():
        ours = results.cell(DEFAULT, micro_batches)
        if ours is None:
            continue
        rivals = [
            cell
            for cell in results.cells
            if cell.micro_batches == micro_batches and cell.strategy != DEFAULT and cell.step_ms
        ]
        faster = [cell for cell in rivals if cell.median_ms < ours.median_ms]
        smaller = [cell for cell in rivals if cell.peak_bytes < 0.95 * ours.peak_bytes]
        where = f"{micro_batches} micro-batch" + ("es" if micro_batches > 1 else "")
        said = ", ".join(
            f"{titles[c.strategy]} ({ours.median_ms / c.median_ms:.2f}x)"
            for c in sorted(faster, key=lambda c: c.median_ms)
        )
        sentences.append(f"{where}: faster than our default: {said or 'none'}")
        said = ", ".join(
            f"{titles[c.strategy]} ({c.peak_bytes / 2**20:.0f} MiB)"
            for c in sorted(smaller, key=lambda c: c.peak_bytes)
        )
        sentences.append(
            f"{where}: smaller at its peak than our default ({ours.peak_bytes / 2**20:.0f} MiB): "
            f"{said or 'none'}"
        )
    default, baseline, noise = (
        results.final_loss(DEFAULT),
        results.final_loss(BASELINE),
        results.loss_noise(),
    )
    if default is not None and baseline is not None and noise is not None:
        sentences.append(
            f"loss: our default's differs from the baseline's by {default - baseline:+.4f}; another seed "
            f"makes a difference of {noise:.4f}"
        )
    for cell in (cell for cell in results.cells if cell.chosen):
        said = f"chose {', '.join(cell.chosen)} ({cell.micro_batches} per step)"
        sentences.append(f"{titles[cell.strategy]}: {said}")
    stolen = [(statistics.mean(cell.stolen), titles[cell.strategy]) for cell in results.cells if cell.stolen]
    most, while_measuring = max(stolen, default=(0.0, ""))
    if most > STOLEN_IS_MUCH:
        sentences.append(
            f"not a quiet machine: its host gave others up to {most:.0%} of its cores' time (while "
            f"{while_measuring} was measured), and {statistics.median(share for share, _ in stolen):.0%} in "
            "the median; what computes took longer by it"
        )
    not_run = {titles[name]: why for name, why in results.failed.items()} | NOT_RUN
    sentences += [f"not run: {what}: {why}" for what, why in not_run.items()]
    return sentences


def _tail_mean(losses: list[float]) -> float:
    return statistics.mean(losses[-max(1, len(losses) // 4) :])
