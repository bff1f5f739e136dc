"""Codecs for the wire. Knows nothing of distributed code."""

from .codec import QUANTIZABLE_DTYPES, Codec, Segment, make_codec
from .formats import BlockFormat, CastFormat

__all__ = ["QUANTIZABLE_DTYPES", "BlockFormat", "CastFormat", "Codec", "Segment", "make_codec"]
