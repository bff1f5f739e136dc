"""Memory of one rank, by what it is for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank at the moment of a step when their sum is largest."""

    shards: int
    """The rank's part of the weights, as the optimizer keeps them."""
    optimizer_state: int
    gradients: int
    """The rank's part of the gradients, as the optimizer reads them."""
    node_shards: int
    """What zeropp keeps so that later gathers stay inside the node (hpZ)."""
    gathered: int
    """Full weights, and full gradients, of the units that FSDP2 works on."""
    communication: int
    """Buffers of the hops, and gradients that wait for the hop across nodes."""
    activations: int
    """What forward saved for backward, and the intermediate results of the moment."""

    @property
    def peak(self) -> int:
        return (
            self.shards
            + self.optimizer_state
            + self.gradients
            + self.node_shards
            + self.gathered
            + self.communication
            + self.activations
        )
