"""Layouts of a unit's buffers, one for gathers and one for reductions: the chunks of a buffer, and the codec
of each chunk on each hop.

A layout follows from Config, hops, the number of elements and their dtype. So it is built once, and every
call uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from ..config import INTEGERS, CodecName, Config
from ..quant import QUANTIZABLE_DTYPES, Codec, make_codec
from ..quant.codec import Operation
from ..topology import Hop, HopName
from .chunks import ChunkPolicy, Columns, Piece, column_chunks, row_segments
from .column_groups import ColumnGroup
from .ledger import KEPT_ERRORS, NODE_SHARD, Ledger, WorkKey
from .profiler_labels import Collective
from .wire import Wire

MAX_LAYOUTS = 32
"""Layouts that a comm stores: one for each set of parameters with gradients."""


class HopCodec(Codec):
    """The codec of one chunk on one hop. It counts its work in the ledger."""

    def __init__(
        self, ledger: Ledger, unit: str, collective: Collective, hop: str, name: str, codec: Codec
    ) -> None:
        super().__init__(codec.parts)
        self.name = name
        """Name of the codec in `Config`."""
        self._ledger = ledger
        # Built here: every call of the hot path would pay for a new key.
        self._keys = {
            operation: WorkKey(unit, collective, hop, operation, name) for operation in get_args(Operation)
        }

    def count(self, operation: Operation, rows: Tensor) -> None:
        self._ledger.record_work(self._keys[operation], rows.shape[:-1].numel() * self.numel)


@dataclass(frozen=True)
class DecodeTarget:
    """Where one part of a gathered row is decoded to."""

    at: slice
    """Bytes of the part in the row."""
    columns: slice
    """Columns of the part in the buffer."""
    codec: HopCodec
    """Codec of the part."""


@dataclass(frozen=True)
class GatherChunk:
    """A chunk of a column group: some columns of its packed shard [S], for the shards of all ranks."""

    number: int
    at: slice
    """Columns of the chunk in the packed shard."""
    sent: HopCodec
    """Codec of the first hop, and of the node shard."""
    received: HopCodec
    """Codec of the last hop, for whole rows."""
    places: tuple[DecodeTarget, ...]
    """Where rows of the last hop are decoded to: one target per stretch."""
    kept: HopCodec
    """The codec of `sent`, counted as work on the node shard. Used with weights="delta-int4" only."""
    difference: HopCodec | None
    """Codec of differences on the first hop; None if the chunk never sends differences."""

    @property
    def encodes_for_node(self) -> bool:
        """Whether the last hop has another codec than the node shard."""
        return self.received.name != self.sent.name


@dataclass(frozen=True)
class HopPlan:
    """One hop of a chunk of gradients."""

    hop: Hop
    on_wire: HopCodec
    in_sums: HopCodec
    """Codec of the same bytes that does not undo the rotation: [Note: Rotated space] in reduction.py."""
    shape: tuple[int, int, int]
    """Shape of the sent and of the received buffer: members of the hop, rows per member, bytes per row."""

    @property
    def is_integer(self) -> bool:
        return self.on_wire.name in INTEGERS


@dataclass(frozen=True)
class ErrorCodecs:
    """Codecs of error feedback; see error_feedback.py."""

    kept: HopCodec
    """Codec of stored errors: 8 bits, in the same blocks as the sent sums."""
    sent: HopCodec
    """Codec of the sent sums: decoding them gives the new error."""


@dataclass(frozen=True)
class ReduceChunk:
    """A chunk of the gradients of one unit: some columns of [W, S]."""

    number: int
    columns: Columns
    legs: tuple[HopPlan, ...]
    """Hops in the order in which they run."""
    errors: ErrorCodecs | None
    """None without error feedback."""


class ReduceLayouts:
    """Layouts of one comm, one for each combination of arguments. Built at first use."""

    def __init__(
        self, build: Callable[[torch.dtype, tuple[Piece, ...], bool], tuple[ReduceChunk, ...]]
    ) -> None:
        self._build = build
        self._built: dict[tuple[torch.dtype, tuple[Piece, ...], bool], tuple[ReduceChunk, ...]] = {}

    def of(self, dtype: torch.dtype, pieces: tuple[Piece, ...], at_once: bool) -> tuple[ReduceChunk, ...]:
        """Return the chunks of a buffer; see `reduce_chunks`."""
        key = dtype, pieces, at_once
        chunks = self._built.get(key)
        if chunks is None:
            if len(self._built) >= MAX_LAYOUTS:  # bounds memory if the set of gradients differs in every step
                self._built.clear()
            chunks = self._built[key] = self._build(*key)
        return chunks


def gather_chunks(
    wire: Wire, hops: tuple[Hop, ...], config: Config, columns: ColumnGroup, first_number: int = 0
) -> tuple[GatherChunk, ...]:
    """Return the chunks of a column group, numbered from `first_number` on."""
    dtype = columns.dtype
    takes_differences = config.weights == "delta-int4" and hops[0].name == "across" and is_float(dtype)
    kept_name = kept_codec_name(hops, config, dtype)
    received_name = kept_name
    if takes_differences and len(hops) == 2 and config.delta_in_node != "bf16":
        received_name = config.delta_in_node
    # With one hop, the node shard is decoded, and not received bytes: those are only added to it.
    received_on = NODE_SHARD if takes_differences and len(hops) == 1 else hops[-1].name
    on_hop = partial(HopCodec, wire.ledger, wire.unit, "all_gather")
    pieces = [Piece(length) for length in columns.lengths] or [Piece(columns.numel)]
    segments = row_segments(pieces, config.block_size, edges=columns.edges)
    cut = column_chunks(_cut_of(wire, hops, config), segments)
    chunks = []
    for number, part in enumerate(cut, first_number):
        kept = make_codec(kept_name, dtype, part.segments)
        received, difference = kept, None
        if received_name != kept_name:
            received = make_codec(received_name, dtype, part.segments)
        if takes_differences:
            codec = make_codec("int4", torch.float32, part.segments)
            difference = on_hop(hops[0].name, "int4", codec)
        # A chunk may span several stretches, and each is in other columns of the buffer.
        places = []
        for stretch in columns.stretches:
            first, last = max(stretch.at.start, part.at.start), min(stretch.at.stop, part.at.stop)
            if first < last:
                alone, at = received.part(first - part.at.start, last - part.at.start)
                place = on_hop(received_on, received_name, alone)
                places.append(DecodeTarget(at, stretch.columns_of(first, last), place))
        chunks.append(
            GatherChunk(
                number,
                part.at,
                sent=on_hop(hops[0].name, kept_name, kept),
                received=on_hop(received_on, received_name, received),
                places=tuple(places),
                kept=on_hop(NODE_SHARD, kept_name, kept),
                difference=difference,
            )
        )
    return tuple(chunks)


def same_fields(config: Config, other: Config, names: Sequence[str]) -> bool:
    """Whether two Configs have equal values in these fields."""
    return all(getattr(config, name) == getattr(other, name) for name in names)


def is_float(dtype: torch.dtype) -> bool:
    """Whether a codec can encode the dtype. False for integers and for the raw bytes of mixed dtypes."""
    return dtype in QUANTIZABLE_DTYPES


def kept_codec_name(hops: tuple[Hop, ...], config: Config, dtype: torch.dtype) -> CodecName:
    """Return the codec of the node shard; without a node shard, of the only hop."""
    if not is_float(dtype):
        return "none"
    if config.weights != "delta-int4":
        return config.weights
    if hops[0].name != "across":  # one node: no hop sends differences
        return config.delta_in_node
    return "none" if dtype == torch.float16 else "bf16"  # fp16 is not encoded: bf16 is less precise


def reduce_chunks(
    wire: Wire,
    hops: tuple[Hop, ...],
    config: Config,
    names: Mapping[HopName, CodecName],
    dtype: torch.dtype,
    pieces: tuple[Piece, ...],
    at_once: bool,
) -> tuple[ReduceChunk, ...]:
    """Return the chunks of gradients [W, S] of these pieces.

    Args:
        at_once: the last hop encodes rows in `dtype`, not sums in fp32.
    """
    last = len(hops) - 1
    # Noise follows from an element's position in its parameter, so with noise each parameter has a segment.
    has_noise = config.rounding == "stochastic" or config.gradients_pending == "bf16"
    segments = row_segments(pieces, config.block_size, merge=not has_noise)
    chunks = []
    for number, columns in enumerate(column_chunks(_cut_of(wire, hops, config), segments)):
        codecs = [
            make_codec(
                names[hop.name],
                dtype if at_once or position < last else torch.float32,
                columns.segments,
                config.rotates,
                config.rounding == "stochastic",
            )
            for position, hop in enumerate(hops)
        ]
        in_sums = codecs if last == 0 else in_one_space(*codecs)
        on_hop = partial(HopCodec, wire.ledger, wire.unit, "reduce_scatter")
        legs, rows = [], wire.topology.size  # each hop leaves 1 / hop.size of the rows
        for hop, codec, inside in zip(hops, codecs, in_sums, strict=True):
            on_wire, in_sum = (on_hop(hop.name, names[hop.name], c) for c in (codec, inside))
            legs.append(HopPlan(hop, on_wire, in_sum, (hop.size, rows // hop.size, on_wire.row_bytes)))
            rows //= hop.size
        errors = None
        if config.error_feedback and hops[-1].name == "across":
            eight_bits = make_codec("int8", torch.float32, columns.segments)
            errors = ErrorCodecs(
                kept=on_hop(KEPT_ERRORS, "int8", eight_bits),
                sent=on_hop(KEPT_ERRORS, names[hops[-1].name], in_sums[-1]),
            )
        chunks.append(ReduceChunk(number, columns, tuple(legs), errors))
    return tuple(chunks)


def _cut_of(wire: Wire, hops: tuple[Hop, ...], config: Config) -> ChunkPolicy:
    """Return how rows of a unit are cut; a flat route on gloo is cut as on other backends."""
    return ChunkPolicy.of(config.chunks, on_gloo=wire.on_gloo and hops[0].name != "flat")


def in_one_space(arrived: Codec, sent: Codec) -> list[Codec]:
    """The codecs of two hops for the sums between them; see [Note: Rotated space] in reduce_scatter.py."""
    if arrived.rotates and sent.rotates:
        return [arrived.unrotated, sent.unrotated]
    return [arrived, sent]
