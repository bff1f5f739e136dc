"""Batches of tokens: each rank reads its own part of one global, shuffled order of samples.

[Note: Global order]
The training text is cut into samples of `sequence` tokens (and one more, the last target). Epoch e visits all
of them in an order made from the seed and e; epochs follow each other. That is one endless list of samples,
the same for any number of ranks. A batch takes the next world * batch of it, and rank r the r-th part. So
the position in the list is all there is to save: a run that goes on from it, on any number of ranks, loses
and repeats nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .data_order import Shuffle
from .data_sources import Stream, open_documents


@dataclass(frozen=True)
class DataConfig:
    """What to read."""

    source: str = "stdlib"
    """"stdlib": the sources of Python's standard library. Or a text file, or a folder of them: bytes are the
    tokens. Or a .npy file of token ids, or a folder of them. Or "hf:" and a folder that a Hugging Face
    dataset was saved to, with a column `input_ids` or `text`."""
    validation_fraction: float = 0.05
    """The last part of the text is kept for evaluation and never trained on."""
    vocab_size: int | None = None
    """For data that are token ids: they are below this, which every batch is checked for. None: all of the
    data are read at the start, for the largest."""

    def __post_init__(self) -> None:
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(
                f"DataConfig.validation_fraction is {self.validation_fraction}; expected more than 0 and "
                "less than 1"
            )
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"DataConfig.vocab_size is {self.vocab_size}; expected at least 1, or None")


class Loader:
    """Endless batches for training, and fixed ones for evaluation. [Note: Global order]"""

    def __init__(
        self, config: DataConfig, *, rank: int, world: int, sequence: int, batch: int, seed: int
    ) -> None:
        if not 0 <= rank < world or sequence < 1 or batch < 1:
            raise ValueError(
                f"rank {rank} of {world}, sequence {sequence}, batch {batch}; expected a rank below the "
                "world size and positive sizes"
            )
        documents = open_documents(config.source)
        if documents.is_text and config.vocab_size is not None:
            raise ValueError(
                f"DataConfig.vocab_size is {config.vocab_size}, but {config.source!r} is text, whose tokens "
                "are its bytes; leave it out"
            )
        self._stream = Stream(documents)
        self._split = int(len(self._stream) * (1 - config.validation_fraction))
        self._rank, self._world = rank, world
        self._sequence, self._batch, self._seed = sequence, batch, seed
        self._consumed = 0  # samples of the global order
        held_out = len(self._stream) - self._split
        if min(self._split, held_out) <= sequence:
            raise ValueError(
                f"{config.source!r} has {self._split} tokens for training and {held_out} for validation; "
                f"each must be more than the sequence of {sequence}: give more text, a shorter sequence or "
                "another validation_fraction"
            )
        self.samples = (self._split - 1) // sequence
        """Sequences that all ranks together read in one epoch."""
        self.vocab_size = 256 if documents.is_text else config.vocab_size or self._stream.largest() + 1
        """Token ids are below this."""

    def next(self) -> tuple[Tensor, Tensor]:
        """This rank's next tokens and targets, int64 [batch, sequence] each."""
        first = self._consumed + self._rank * self._batch
        self._consumed += self._world * self._batch
        return self._rows([self.start(n) for n in range(first, first + self._batch)])

    def start(self, n: int) -> int:
        """Where the n-th sample of the global order begins in the stream."""
        epoch, place = divmod(n, self.samples)
        return Shuffle(self.samples, f"seed {self._seed}, epoch {epoch}")[place] * self._sequence

    def validation(self, batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Fixed batches of held-out text: all ranks' samples together are spread evenly over it."""
        last = len(self._stream) - self._sequence - 1
        starts = np.linspace(self._split, last, batches * self._world * self._batch).astype(int)
        for part in starts.reshape(batches, self._world, self._batch)[:, self._rank]:
            yield self._rows(part.tolist())

    def state_dict(self) -> dict[str, int]:
        """Where the run is; the same on every rank."""
        return {"consumed": self._consumed} | self._identity()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from `state_dict()` of a loader of the same data, on any number of ranks and with any batch
        size."""
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(
                    f"the saved run read data with {name} {state[name]}, this one has {name} {value}; go on "
                    "with the same data, or start anew"
                )
        self._consumed = state["consumed"]

    def _identity(self) -> dict[str, int]:
        """What the global order is made from."""
        return {"seed": self._seed, "sequence": self._sequence, "training_tokens": self._split}

    def _rows(self, starts: list[int]) -> tuple[Tensor, Tensor]:
        rows = np.stack([self._stream.read(start, start + self._sequence + 1) for start in starts])
        strange = rows[(rows < 0) | (rows >= self.vocab_size)]
        if len(strange):
            raise ValueError(
                f"the data has token id {strange[0]}; expected 0 to {self.vocab_size - 1}: correct the data, "
                "or DataConfig.vocab_size"
            )
        tokens = torch.from_numpy(rows)  # [batch, sequence + 1]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def open_data(config: DataConfig, *, rank: int, world: int, sequence: int, batch: int, seed: int) -> Loader:
    """A loader for one rank of `world`.

    >>> loader = open_data(DataConfig("stdlib"), rank=0, world=2, sequence=16, batch=4, seed=0)
    >>> tokens, targets = loader.next()
    >>> tokens.shape, bool((tokens[:, 1:] == targets[:, :-1]).all())
    (torch.Size([4, 16]), True)
    >>> loader.state_dict()["consumed"]
    8
    """
    return Loader(config, rank=rank, world=world, sequence=sequence, batch=batch, seed=seed)
