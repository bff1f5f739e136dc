"""DeepSpeed's ZeRO-3 as a strategy of the benchmark, if installed (pip install 'zeropp[deepspeed]').

On a CPU only hpZ of DeepSpeed's ZeRO++ runs: qwZ and qgZ need CUDA kernels. Weights and gradients are sent in
fp32, because DeepSpeed sends the compute dtype and 16-bit products are slow on most CPUs. The fair comparison
is FSDP2 as it comes.

[Note: The same work]
Some of DeepSpeed's defaults change the amount of work, so they are set to FSDP2's behaviour. Gradients are
not clipped (the default clips to a norm of 1). Every layer is resharded after use (the default keeps up to
10^9 parameters, which is all of a small model; backward then sends nothing, and hpZ has nothing to save).
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
import torch.distributed as dist

from ..models.loading import parameter_count
from ..strategies import Strategy
from .workload import Data, Workload, loss_of


class DeepSpeedTraining:
    """A model that DeepSpeed trains. See `BenchTraining`."""

    def __init__(self, strategy: Strategy, workload: Workload, ranks_per_node: int) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed  # type: ignore[import-not-found]  # optional: see Strategy.why_not

        # Otherwise DeepSpeed compiles an extension for inference, which takes minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # Each strategy has new process groups, and DeepSpeed caches those of its last model.
        deepspeed.comm.comm.cdb = None
        importlib.reload(deepspeed.utils.groups)
        deepspeed.init_distributed("gloo", verbose=False)
        torch.manual_seed(workload.seed)
        model = workload.build_model()
        self._parameters = parameter_count(model)
        self._workload, self._micro_batches = workload, 0
        self._settings = {
            "train_micro_batch_size_per_gpu": workload.batch,
            "zero_optimization": {
                "stage": 3,
                "zero_hpz_partition_size": ranks_per_node if strategy.deepspeed_hpz else 1,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
            },
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        self._optimizer = workload.make_optimizer(model)
        self._initialize, self._model, self.engine = deepspeed.initialize, model, None
        self.data = Data(workload, dist.get_rank())
        self.phase_bytes: list[int] = []  # its limit needs none, because it does not overlap on a CPU

    def step(self, micro_batches: int) -> float:
        engine = self._engine(micro_batches)
        total = 0.0
        for _ in range(micro_batches):
            tokens, targets = self.data.next()
            loss = loss_of(engine(tokens), targets)
            engine.backward(loss)  # divides by the number of micro-batches
            engine.step()  # does nothing before the last one
            total += loss.item() / micro_batches
        return total

    def _engine(self, micro_batches: int) -> Any:
        """Create the engine in the first step, because DeepSpeed needs the number of micro-batches."""
        if self.engine is None:
            settings = self._settings | {"gradient_accumulation_steps": micro_batches}
            self.engine, *_ = self._initialize(model=self._model, optimizer=self._optimizer, config=settings)
            self._micro_batches = micro_batches
        if micro_batches != self._micro_batches:
            raise ValueError(
                f"a step has {micro_batches} micro-batches; expected {self._micro_batches}, as in the first "
                "step; build the model again for another number"
            )
        return self.engine

    def parameters(self) -> int:
        return self._parameters

    def model_state_bytes(self) -> int:
        """Return the bytes of a rank's shard of fp32 weights, gradients and two moments."""
        return 16 * self._parameters // dist.get_world_size()

    def communication_bytes(self) -> int:
        return 0

    def ledger_bytes(self) -> int | None:
        return None
