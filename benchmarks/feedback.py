"""Weights of the moving average in error feedback (`AVERAGE` in zeropp/comm/error_feedback.py).

    python benchmarks/feedback.py

Encodes 60 gradients as int4, one after the other, with and without feedback. Prints the relative error of
their sum, which feedback reduces, and that of a single step, which feedback increases. It is one process and
takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from zeropp.comm import Ledger
from zeropp.comm import error_feedback as feedback
from zeropp.comm.layout import ErrorCodecs, HopCodec
from zeropp.comm.ledger import KEPT_ERRORS
from zeropp.quant import Segment, make_codec

NUMEL, STEPS, BLOCK_SIZE = 1 << 15, 60, 128


@dataclass
class Options:
    """The comparison."""

    averages: tuple[float, ...] = (1.0, 0.5, 0.2)
    """Weights of the last error in the moving average."""


def all_gradients() -> dict[str, list[Tensor]]:
    """Return the gradients of all steps by kind: a constant mean plus noise."""
    torch.manual_seed(0)
    mean = torch.randn(1, NUMEL)
    heavy = torch.distributions.StudentT(torch.tensor(3.0))
    return {
        "steady: noise of 0.3 times the mean": [mean + 0.3 * torch.randn(1, NUMEL) for _ in range(STEPS)],
        "noisy: noise of 3 times the mean": [mean + 3 * torch.randn(1, NUMEL) for _ in range(STEPS)],
        "heavy: Student's t with 3 degrees": [mean + 3 * heavy.sample((1, NUMEL)) for _ in range(STEPS)],
    }


def errors(given: list[Tensor], average: float | None) -> tuple[float, float]:
    """Return the relative errors of the sum and of a step (mean over all). `average` None: without
    feedback."""
    row = [Segment(NUMEL, BLOCK_SIZE)]
    codec = make_codec("int4", torch.float32, row)
    counted = partial(HopCodec, Ledger(), "unit", "reduce_scatter", KEPT_ERRORS)
    codecs = ErrorCodecs(
        kept=counted("int8", make_codec("int8", torch.float32, row)),
        sent=counted("int4", codec),
    )
    kept = feedback.Feedback("benchmark")
    feedback.AVERAGE = average or 1.0
    total, single = torch.zeros(1, NUMEL), 0.0
    for gradient in given:
        sums, sent = gradient.clone(), torch.empty(1, codec.row_bytes, dtype=torch.uint8)
        if average is not None:
            kept.add_to(0, sums, codecs)
        codec.encode(sums, sent)
        decoded = torch.empty(1, NUMEL)
        codec.decode(sent, decoded)
        if average is not None:
            kept.keep(0, sums, sent, codecs)
        total += decoded
        single += relative(decoded, gradient) / STEPS
    return relative(total, torch.stack(given).sum(0)), single


def relative(actual: Tensor, exact: Tensor) -> float:
    return float((actual - exact).norm() / exact.norm())


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    table = Table("gradients", "feedback", "error of the sum", "error of a step", title="int4, block 128")
    for kind, given in all_gradients().items():
        for average in (None, *options.averages):
            of_sum, of_step = errors(given, average)
            table.add_row(kind, "-" if average is None else f"{average}", f"{of_sum:.4f}", f"{of_step:.4f}")
        table.add_section()
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
