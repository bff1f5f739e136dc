"""A shuffled order that is computed, not stored: the n-th of `size` samples, for any n, in constant
memory."""

from __future__ import annotations

from hashlib import blake2b

ROUNDS = 4


class Shuffle:
    """A permutation of 0 .. size - 1, chosen by `key`.

    A Feistel network permutes the 2 * `bits`-bit numbers; one that lands outside of the range is sent
    through again until it lands inside ("cycle walking"), which permutes the range. Twice on average, four
    times at most.

    >>> order = Shuffle(5, "seed 0, epoch 0")
    >>> sorted(order[n] for n in range(5))
    [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._bits = max(1, ((size - 1).bit_length() + 1) // 2)  # of each half
        self._key = blake2b(key.encode(), digest_size=16).digest()

    def __getitem__(self, n: int) -> int:
        if not 0 <= n < self.size:
            raise IndexError(f"{n} is not in 0 .. {self.size - 1}")
        n = self._permute(n)
        while n >= self.size:
            n = self._permute(n)
        return n

    def _permute(self, n: int) -> int:
        mask = (1 << self._bits) - 1
        left, right = n >> self._bits, n & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (self._hash(turn, right) & mask)
        return left << self._bits | right

    def _hash(self, turn: int, value: int) -> int:
        message = bytes([turn]) + value.to_bytes(8, "little")
        return int.from_bytes(blake2b(message, digest_size=8, key=self._key).digest(), "little")
