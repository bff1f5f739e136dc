"""Codecs for the wire. Knows nothing of distributed code."""

from .codec import QUANTIZABLE_DTYPES, BlockCodec, CastCodec, Codec, Segment, SegmentCodec, make_codec
from .formats import BlockFormat

__all__ = [
    "QUANTIZABLE_DTYPES",
    "BlockCodec",
    "BlockFormat",
    "CastCodec",
    "Codec",
    "Segment",
    "SegmentCodec",
    "make_codec",
]
