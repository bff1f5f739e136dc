"""The two collectives, their wire and their ledger. Knows nothing of FSDP2 but how it calls a comm."""

from .all_gather import AllGather
from .chunks import Piece
from .column_groups import Weight
from .ledger import Ledger, Traffic
from .node_shard import NodeShard
from .reduce_scatter import ReduceScatter
from .stale_weights import Alarm, StaleWeightsError
from .wire import Scratch, Wire

__all__ = [
    "Alarm",
    "AllGather",
    "Ledger",
    "NodeShard",
    "Piece",
    "ReduceScatter",
    "Scratch",
    "StaleWeightsError",
    "Traffic",
    "Weight",
    "Wire",
]
