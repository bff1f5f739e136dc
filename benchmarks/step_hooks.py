"""Cost of zeropp's hooks on optimizer steps, also with one optimizer per parameter, as in
optimizer-in-backward.

    python benchmarks/step_hooks.py

Prints the time of all steps of a model with zeropp, relative to the same steps without zeropp, from one run.
One process simulates rank 0 of four with torch's fake process group, which sends nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeropp


def make_model(units: int, parameters: int) -> nn.Module:
    model = nn.ModuleList(
        nn.ParameterList(torch.randn(1024) for _ in range(parameters // units)) for _ in range(units)
    )
    for unit in model:
        fully_shard(unit)
    return model


def seconds(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    start = time.perf_counter()
    for optimizer in optimizers:
        optimizer.step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--units", type=int, default=40)
    parser.add_argument("--parameters", type=int, default=480)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    models = [make_model(args.units, args.parameters) for _ in range(2)]
    zpp = zeropp.apply(models[0], zeropp.Config(node_size=2))
    rows = {}
    for name, per_parameter in (("one for each parameter", True), ("one for all", False)):
        best = [float("inf"), float("inf")]
        made = []
        for model in models:
            params = list(model.parameters())
            for p in params:
                p.grad = torch.zeros_like(p)
            groups = [[p] for p in params] if per_parameter else [params]
            made.append([torch.optim.SGD(group, lr=1e-3) for group in groups])
        for _ in range(args.repeats):  # hooks are global, so `remove` precedes steps of the plain model
            best[0] = min(best[0], seconds(made[0]))
            zpp.remove()
            best[1] = min(best[1], seconds(made[1]))
            zpp = zeropp.apply(models[0], zeropp.Config(node_size=2))
            seconds(made[0])  # the first step of a new handle fills its tables
        rows[name] = best
    print(f"{args.units} units, {args.parameters} parameters, torch {torch.__version__}")
    for name, (ours, plain) in rows.items():
        times = f"{ours * 1e3:.2f} ms, without zeropp {plain * 1e3:.2f} ms"
        print(f"optimizers: {name}: {times}, {ours / plain:.2f}x")


if __name__ == "__main__":
    main()
