"""Results of a benchmark, with round numbers."""

from __future__ import annotations

from zeropp.tools.bench.results import Cell, Results
from zeropp.tools.bench.workload import Workload

MIB = 2**20


def sample_results() -> Results:
    """Return results for 1M parameters on 80 Mbit/s links. One byte per parameter takes 100 ms, and so does
    compute."""
    results = Results(
        nodes=2,
        ranks_per_node=2,
        workload=Workload(),
        parameters=1_000_000,
        regime="paper",
        wanted_share=0.7,
        link_bit_s=80_000_000,
        delay="0ms",
        loss="0%",
        versions={"zeropp": "0", "torch": "0"},
        compute_ms={1: [90.0, 100.0, 110.0], 8: [800.0]},
        losses={"wire16": [5.0, 4.0, 3.0, 2.0], "default": [5.0, 4.0, 3.0, 2.01]},
        other_seed_losses=[5.0, 4.0, 3.0, 2.1],
        failed={"deepspeed": "DeepSpeed is not installed"},
    )
    for micro_batches in (1, 8):
        for strategy, step_ms, per_parameter, peak in (
            ("wire16", 700.0, 5.0, 300),
            ("hsdp", 350.0, 2.0, 500),
            ("default", 200.0 * micro_batches, 0.77, 400),
        ):
            cell = Cell(strategy, micro_batches, [0.9 * step_ms, step_ms, 1.1 * step_ms])
            cell.sent_bytes = cell.busiest_bytes = per_parameter * 1e6
            cell.ledger_bytes = None if strategy == "hsdp" else per_parameter * 1e6
            cell.parts_ms, cell.cores_ms = {"encode": 10.0, "compute": 100.0}, 60.0
            cell.peak_bytes, cell.model_state_bytes, cell.communication_bytes = peak * MIB, 50 * MIB, MIB
            results.cells.append(cell)
    return results
