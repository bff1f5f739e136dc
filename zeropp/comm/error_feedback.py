"""Error feedback: the rounding error of the hop between nodes is added to the next step's sums before they
are encoded. So an error is corrected one step later, and errors of many steps do not add up.

    sums     = node slice + kept
    sent     = encode(sums)
    kept'    = (1 - AVERAGE) * kept + AVERAGE * (sums - decode(sent))

`kept` holds the stored errors: a moving average (as in LoCo), in 8 bits, in the shape of the node slice
[N, S]. They are in the space of the sums: rotated if gradients are ([Note: Rotated space] in reduction.py).
With AVERAGE = 1, the error of a single step is 1.4 times the error without feedback. With 0.5 it is 1.15
times, and sums over many steps are almost as exact as with 1 (benchmarks/feedback.py).

[Note: Reset]
Stored errors belong to the gradients of one model, codec and layout. They start at zero. They are zero again
after a state-dict load into the model, after `set_config` with another codec of gradients, and where an error
is not finite (an overflow that loss scaling skips must not come back in the next step). `ZeroPP.state_dict`
saves them, and `ZeroPP.load_state_dict` restores them.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from .layout import ErrorCodecs, HopCodec
from .wire import empty_outside_inference

logger = logging.getLogger("zeropp")

AVERAGE = 0.5
"""Weight of the newest error in the moving average."""


class Feedback:
    """Stored errors of one unit, one buffer per chunk."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.kept: dict[int, Tensor] = {}
        """Encoded errors [N, E] by number of the chunk."""

    @property
    def nbytes(self) -> int:
        """Bytes of all stored errors."""
        return sum(kept.numel() for kept in self.kept.values())

    def add_to(self, chunk: int, sums: Tensor, codecs: ErrorCodecs) -> None:
        """Add the stored errors to sums [N, S] in fp32."""
        kept = self._kept_for(chunk, sums, codecs.kept)
        if kept is not None:
            codecs.kept.decode_sum(kept.unsqueeze(0), sums, 1.0, accumulate=True)

    def keep(self, chunk: int, sums: Tensor, sent: Tensor, codecs: ErrorCodecs) -> None:
        """Store the errors of `sent`, the encoded sums. Overwrites sums."""
        codecs.sent.decode_sum(sent.unsqueeze(0), sums, -1.0, accumulate=True)  # sums is the error now
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
        """Return copies of the stored errors, for a checkpoint."""
        return {chunk: kept.clone() for chunk, kept in self.kept.items()}

    def reset(self) -> None:
        """Start at zero; see [Note: Reset]."""
        self.kept.clear()

    def _kept_for(self, chunk: int, sums: Tensor, codec: HopCodec) -> Tensor | None:
        """Return the stored errors of the chunk; None if there are none, or if they do not fit."""
        kept = self.kept.pop(chunk, None)  # stored again below if they fit
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
        self.kept[chunk] = kept.to(sums.device)  # a load with `map_location` puts them on any device
        return self.kept[chunk]
