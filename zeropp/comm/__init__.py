"""The two collectives, their wire and their ledger. Knows nothing of FSDP2 but how it calls a comm."""

from .all_gather import AllGather
from .ledger import Ledger, Traffic
from .node_shard import NodeShard, StaleWeightsError, raise_if_stale
from .reduce_scatter import ReduceScatter
from .wire import Scratch, Wire

__all__ = [
    "AllGather",
    "Ledger",
    "NodeShard",
    "ReduceScatter",
    "Scratch",
    "StaleWeightsError",
    "Traffic",
    "Wire",
    "raise_if_stale",
]
