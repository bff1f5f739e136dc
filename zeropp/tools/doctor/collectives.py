"""Every hop carries messages that say who sent them, to whom, and when, and the receiver checks each word.

A hop that returns too early shows: in each round another rank comes late, what is to be filled is full of
poison before, and what was sent is poisoned and freed as soon as the hop says that it is done. So a receiver
that did not wait sees poison, and so does one whose sender did not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import Ledger, Scratch, Wire
from ...comm.bf16_ring import RingReduction
from ...comm.chunks import ChunkPolicy
from ...comm.execution import Inline, Transfer
from ...cpu.comm_threads import comm_thread
from ...process_groups import world
from ...topology import Hop
from .check import Check, Finding, Visit

Pattern = Literal["all_gather", "all_to_all"]
PATTERNS: tuple[Pattern, ...] = ("all_gather", "all_to_all")
ROUNDS = 24
WORDS = (5, 1021, 100_003)
"""Sizes of the messages, in turns: less than any buffer on the way, and more."""
LATE_SECONDS = 0.003
POISON = -1
HEADER = 3
"""Words that say who sent it, to whom, and in which round."""
EVERYONE = -2
"""Receiver of what is gathered."""


def checks() -> Iterator[Check]:
    here = partial(Check, "collectives")
    for name in ("in-node", "across", "flat"):
        does = f"{ROUNDS} gathers and all-to-alls of known words, each with another rank late"
        yield here(f"hop {name}", does, partial(_one_hop, name))
    does = f"{ROUNDS} gathers beside {ROUNDS} all-to-alls, in lanes or streams of their own, on every hop"
    yield here("both directions at once", does, _both_directions)
    yield here("sums", "FSDP2's reduce-scatter and the 16-bit ring add up known numbers", _sums)


def _one_hop(name: str, visit: Visit) -> Finding:
    hops = {hop.name: hop for hop in visit.topology.hops()} | {"flat": visit.topology.flat_hop()}
    if name not in hops:
        why = "all ranks are on one node" if name == "across" else "every node has one rank"
        return Finding("not run", f"there is no such hop: {why}", "run it on two nodes or more")
    carriers = [Carrier(visit, hops[name], pattern) for pattern in PATTERNS]
    for number in range(ROUNDS):
        for carrier in carriers:
            carrier.carry(number)
    return _judge(carriers)


def _both_directions(visit: Visit) -> Finding:
    """Both directions at once, as in training: on a CPU in the threads of both lanes, elsewhere on two
    streams, each with groups of its own."""
    device = visit.world.device
    names = ("_gather_lane", "_reduce_lane")
    gathers, reductions = (visit.topology.hops(name, own_groups=True) for name in names)
    pairs = [
        (Carrier(visit, first, "all_gather"), Carrier(visit, second, "all_to_all"))
        for first, second in zip(gathers, reductions, strict=True)
    ]
    if device.type == "cpu":
        works = [
            comm_thread("gather").submit(CarryAll([pair[0] for pair in pairs])),
            comm_thread("reduce").submit(CarryAll([pair[1] for pair in pairs])),
        ]
        for work in works:
            work.wait()
    else:
        streams = [torch.Stream(device) for _ in names]
        for number in range(ROUNDS):
            for pair in pairs:
                for stream, carrier in zip(streams, pair, strict=True):
                    with stream:
                        carrier.carry(number)
        torch.accelerator.synchronize()
    return _judge([carrier for pair in pairs for carrier in pair])


class CarryAll(Transfer):
    """All rounds of some carriers, in turns."""

    unit = "doctor"

    def __init__(self, carriers: list[Carrier]) -> None:
        self._carriers = carriers

    def prepare(self, slot: int) -> None:
        """Carriers allocate their own buffers."""

    def steps(self) -> Generator[None]:
        for number in range(ROUNDS):
            for carrier in self._carriers:
                carrier.carry(number)
                yield


def _judge(carriers: list[Carrier]) -> Finding:
    for carrier in carriers:
        if wrong := carrier.find_wrong():
            return Finding("fault", wrong, "do not train with it; Config.off() is FSDP2's own collectives")
    carried = sum(carrier.words for carrier in carriers) * 4
    return Finding("ok", f"{carried / 1e6:,.0f} MB arrived at each rank, every word as it was sent")


class Carrier:
    """Carries messages through one hop, by one pattern."""

    def __init__(self, visit: Visit, hop: Hop, pattern: Pattern) -> None:
        topology = visit.topology
        self._wire = Wire("doctor", topology, Ledger(), Scratch())
        self._hop, self._pattern, self._device = hop, pattern, visit.world.device
        self._rank = visit.world.rank
        groups = {"in-node": topology.nodes, "across": topology.rails, "flat": (range(topology.size),)}
        (positions,) = (group for group in groups[hop.name] if topology.rank in group)
        self._members = [topology.ranks[position] for position in positions]
        """Global ranks by place in the hop: from the layout, and not from the group that is tested."""
        self._me = self._members.index(self._rank)
        self.words = 0
        self._seen: list[tuple[int, Tensor, Tensor]] = []
        """What each round has brought: its number, how many words are wrong, and the headers that arrived. On
        the device, so that nothing waits before the end."""

    def carry(self, number: int) -> None:
        """One round: all members send, all check."""
        size, words = len(self._members), WORDS[number % len(WORDS)]
        if number % size == self._me:
            time.sleep(LATE_SECONDS)
        out = torch.full((size, words), POISON, dtype=torch.int32, device=self._device)
        sent = out
        if self._pattern == "all_gather":
            out[self._me] = self._message(self._rank, EVERYONE, number, words)
            on_the_way = self._wire.all_gather(self._hop, world(), out)
        else:
            sent = torch.stack([self._message(self._rank, peer, number, words) for peer in self._members])
            on_the_way = self._wire.all_to_all(self._hop, world(), sent, out)
        for _ in on_the_way:
            pass
        to = EVERYONE if self._pattern == "all_gather" else self._rank
        expected = torch.stack([self._message(peer, to, number, words) for peer in self._members])
        self._seen.append((number, (out != expected).sum(), out[:, :HEADER].clone()))
        self.words += (size - 1) * words
        sent.fill_(POISON)

    def _message(self, sender: int, receiver: int, number: int, words: int) -> Tensor:
        """Words that no other sender, receiver or round has in this order."""
        step = 1 + sender + 7919 * (receiver + 3) + 104_729 * number
        message = torch.arange(words, dtype=torch.int32, device=self._device) * step
        message[:HEADER] = torch.tensor([sender, receiver, number], dtype=torch.int32, device=self._device)
        return message

    def find_wrong(self) -> str | None:
        """The first round in which something else arrived than was sent, in words."""
        to = EVERYONE if self._pattern == "all_gather" else self._rank
        for number, wrong, headers in self._seen:
            if not int(wrong):
                continue
            name = f"{self._pattern} {self._hop.name}, round {number}"
            for peer, header in zip(self._members, headers.tolist(), strict=True):
                if header == [POISON] * HEADER:
                    return f"{name}: nothing from rank {peer} when the hop said it was done: a missing wait"
                if header != [peer, to, number]:
                    sender, receiver, sent = header
                    whom = "" if receiver in (EVERYONE, self._rank) else f" for rank {receiver}"
                    when = "" if sent == number else f" in round {sent}"
                    return f"{name}: in the place of rank {peer} is what rank {sender} sent{whom}{when}"
            return f"{name}: {int(wrong)} words are not what was sent, though they begin so"
        return None


def _sums(visit: Visit) -> Finding:
    """Ones and zeros: any order of adding them up is exact, in bf16 too, up to 256 ranks."""
    size, rank, device = visit.world.size, visit.world.rank, visit.world.device
    wire, hop = Wire("doctor", visit.topology, Ledger(), Scratch()), visit.topology.flat_hop()
    reduce: dict[str, Callable[[Tensor, Tensor], object]] = {
        "FSDP2's reduce-scatter": lambda rows, out: dist.reduce_scatter_single(out.view(-1), rows.view(-1)),
        "the 16-bit ring": lambda rows, out: Inline().submit(
            RingReduction(
                wire, hop, rows, out, world(), dist.ReduceOp.SUM, factor=1.0, cut=ChunkPolicy(most=2)
            )
        ),
    }
    ranks = torch.arange(size, device=device).view(-1, 1)
    wrong = []
    for name, run in reduce.items():
        for number in range(ROUNDS):
            columns = torch.arange(WORDS[number % len(WORDS)], device=device)
            if number % size == rank:
                time.sleep(LATE_SECONDS)
            out = torch.full((1, len(columns)), float(POISON), device=device)
            run(((columns + ranks + rank + number) % 2).float(), out)  # of each owner, [W, words]
            expected = ((columns + rank + ranks + number) % 2).sum(0)
            if count := int((out[0] != expected).sum()):
                wrong.append(f"{name}, round {number}: {count} of {len(columns)} sums are wrong")
    if wrong:  # not before the last round: the others are still in it
        return Finding("fault", wrong[0], "do not train on this cluster: the backend is at fault")
    return Finding("ok", f"{len(reduce) * ROUNDS} reductions are exact")
