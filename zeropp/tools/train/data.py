"""Batches of tokens: each rank reads its own part of one global, shuffled order of samples.

[Note: Global order]
The training text is cut into samples of `sequence` tokens (plus one token, the last target). Epoch e visits
all samples in an order that depends on the seed and e. All epochs together are one endless list of samples,
the same for any number of ranks. A batch takes the next world * batch samples, and rank r takes the r-th part
of them. So the position in the list is the whole state: a run that resumes from it, on any number of ranks,
neither skips nor repeats a sample.
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
    """The training data."""

    source: str = "stdlib"
    """"stdlib": the source code of Python's standard library. Or a text file or a folder of text files, whose
    bytes are the tokens. Or a .npy file of token ids or a folder of such files. Or "hf:" and the folder of a
    saved Hugging Face dataset that has a column `input_ids` or `text`."""
    validation_fraction: float = 0.05
    """Fraction of the text, at its end, that is held out for evaluation."""
    vocab_size: int | None = None
    """Upper limit of token ids (exclusive), checked in every batch; for .npy files and `input_ids`. None:
    zeropp reads all data at the start to find the largest id."""

    def __post_init__(self) -> None:
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(
                f"DataConfig.validation_fraction is {self.validation_fraction}; expected more than 0 and "
                "less than 1"
            )
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"DataConfig.vocab_size is {self.vocab_size}; expected at least 1, or None")


class Loader:
    """Endless batches for training and fixed batches for evaluation. [Note: Global order]

    >>> loader = Loader(DataConfig("stdlib"), rank=0, world=2, sequence=16, batch=4, seed=0)
    >>> tokens, targets = loader.next()
    >>> tokens.shape, bool((tokens[:, 1:] == targets[:, :-1]).all())
    (torch.Size([4, 16]), True)
    >>> loader.state_dict()["consumed"]
    8
    """

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
                f"DataConfig.vocab_size is {config.vocab_size}, but {config.source!r} is text, whose bytes "
                "are the tokens; leave vocab_size out"
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
                f"each must be more than the sequence of {sequence}: use more text, a shorter sequence or "
                "another validation_fraction"
            )
        self.samples = (self._split - 1) // sequence
        """Samples in one epoch, over all ranks."""
        self.vocab_size = 256 if documents.is_text else config.vocab_size or self._stream.largest() + 1
        """Upper limit of token ids (exclusive)."""

    def next(self) -> tuple[Tensor, Tensor]:
        """Return this rank's next tokens and targets, int64 [batch, sequence] each."""
        first = self._consumed + self._rank * self._batch
        self._consumed += self._world * self._batch
        return self._rows([self.sample_start(n) for n in range(first, first + self._batch)])

    def sample_start(self, n: int) -> int:
        """Return the position in the stream at which the n-th sample of the global order starts."""
        epoch, index = divmod(n, self.samples)
        return Shuffle(self.samples, f"seed {self._seed}, epoch {epoch}")[index] * self._sequence

    def validation(self, batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield fixed batches of held-out text. The samples of all ranks are spread evenly over it."""
        last = len(self._stream) - self._sequence - 1
        starts = np.linspace(self._split, last, batches * self._world * self._batch).astype(int)
        for part in starts.reshape(batches, self._world, self._batch)[:, self._rank]:
            yield self._rows(part.tolist())

    def state_dict(self) -> dict[str, int]:
        """Return the position in the global order. It is the same on every rank."""
        return {"consumed": self._consumed} | self._identity()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from the `state_dict()` of a loader of the same data, with any world size and batch size."""
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(
                    f"the saved run has data with {name} {state[name]}, this run has {name} {value}; resume "
                    "with the same data, or start a new run"
                )
        self._consumed = state["consumed"]

    def _identity(self) -> dict[str, int]:
        """Return the values that determine the global order."""
        return {"seed": self._seed, "sequence": self._sequence, "training_tokens": self._split}

    def _rows(self, starts: list[int]) -> tuple[Tensor, Tensor]:
        rows = np.stack([self._stream.read(start, start + self._sequence + 1) for start in starts])
        invalid = rows[(rows < 0) | (rows >= self.vocab_size)]
        if len(invalid):
            raise ValueError(
                f"the data has token id {invalid[0]}; expected 0 to {self.vocab_size - 1}: correct the data "
                "or DataConfig.vocab_size"
            )
        tokens = torch.from_numpy(rows)  # [batch, sequence + 1]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
