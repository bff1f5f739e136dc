"""Error feedback: what the hop between nodes rounded off is added to the next step's sums, before they are
encoded. So an error is not lost but late, and errors of many steps do not add up.

    sums     = node slice + kept
    sent     = encode(sums)
    kept'    = (1 - AVERAGE) * kept + AVERAGE * (sums - decode(sent))

`kept` is a moving average (as in LoCo), in 8 bits, of the shape of the node slice [N, S]. It is in the space
that the hop encodes in: rotated, if gradients are. With AVERAGE = 1 a single step has 1.4 times the error
that it has without feedback, with 0.5 1.15 times, and sums over many steps are almost as exact as with 1
(benchmarks/feedback.py).

[Note: Reset]
Kept errors belong to the gradients of one model, codec and layout. They start at zero, and again after a
state-dict load into the model, after `set_config` with another codec of gradients, and where an error is not
finite (an overflow that loss scaling skips must not come back in the next step). `ZeroPP.state_dict` saves
them, `ZeroPP.load_state_dict` restores them.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from .layout import ErrorCodecs, HopCodec
from .wire import empty_outside_inference

logger = logging.getLogger("zeropp")

AVERAGE = 0.5


class Feedback:
    """Kept errors of one unit, chunk by chunk."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.kept: dict[int, Tensor] = {}
        """Encoded [N, E], by chunk."""

    @property
    def nbytes(self) -> int:
        return sum(kept.numel() for kept in self.kept.values())

    def add_to(self, chunk: int, sums: Tensor, codecs: ErrorCodecs) -> None:
        """sums [N, S] fp32 += kept."""
        kept = self._kept_for(chunk, sums, codecs.kept)
        if kept is not None:
            codecs.kept.decode_sum(kept.unsqueeze(0), sums, 1.0, accumulate=True)

    def keep(self, chunk: int, sums: Tensor, sent: Tensor, codecs: ErrorCodecs) -> None:
        """Keep what `sent`, the encoded sums, has lost of them. Overwrites sums."""
        codecs.sent.decode_sum(sent.unsqueeze(0), sums, -1.0, accumulate=True)
        kept = self._kept_for(chunk, sums, codecs.kept)
        if AVERAGE < 1:
            sums *= AVERAGE
            if kept is not None:
                codecs.kept.decode_sum(kept.unsqueeze(0), sums, 1 - AVERAGE, accumulate=True)
        torch.nan_to_num_(sums, 0.0, 0.0, 0.0)  # [Note: Reset]
        if kept is None:
            rows, row_bytes = sums.shape[0], codecs.kept.row_bytes
            kept = empty_outside_inference(rows * row_bytes, sums.device).view(rows, row_bytes)
            self.kept[chunk] = kept
        codecs.kept.encode(sums, kept)

    def copies(self) -> dict[int, Tensor]:
        return {chunk: kept.clone() for chunk, kept in self.kept.items()}

    def reset(self) -> None:
        self.kept.clear()

    def _kept_for(self, chunk: int, sums: Tensor, codec: HopCodec) -> Tensor | None:
        """Errors of the chunk, on the device of its sums: `map_location` may have put them elsewhere."""
        kept = self.kept.pop(chunk, None)
        shape = (sums.shape[0], codec.row_bytes)
        if kept is None:
            return None
        if kept.shape != shape:
            logger.warning(
                "zeropp: unit %s: kept errors of shape %s do not fit gradients that need %s, and start at "
                "zero; the layout of its gradients changed, or they were saved with another model or Config",
                *(self.unit, tuple(kept.shape), shape),
            )
            return None
        self.kept[chunk] = kept.to(sums.device)
        return self.kept[chunk]
