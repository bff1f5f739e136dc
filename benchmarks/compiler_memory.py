"""Memory of the kernels' compiler in a rank's peak memory on a CPU.

    torchrun --standalone --nproc-per-node 4 benchmarks/compiler_memory.py

Trains two linear layers with plain FSDP2 and then, in the same processes, with zeropp's default. The output
is for the rank with the largest peak. Set NUMBA_CACHE_DIR to an empty folder, so that one rank compiles.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import zeropp
from zeropp.tools.peak_memory import PeakMemory

STEPS = 3
MIB = 2**20


def main() -> None:
    dist.init_process_group("gloo")
    for title, config in {"plain FSDP2": zeropp.Config.off(), "zeropp, after it": zeropp.Config()}.items():
        memory = PeakMemory()
        communication_bytes = train(config)
        peak = torch.tensor(float(memory.bytes))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            ours = f"zeropp uses {communication_bytes / MIB:.2f} MiB of it"
            print(f"{title}: {peak / MIB:.0f} MiB more than at the start, {ours}")
    dist.destroy_process_group()


def train(config: zeropp.Config) -> int:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    zpp = zeropp.apply(model, replace(config, node_size=2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return zpp.communication_bytes


if __name__ == "__main__":
    main()
