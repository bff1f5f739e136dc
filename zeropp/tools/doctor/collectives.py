"""Checks of every hop, with messages that encode their sender, receiver and round.

The checks detect a hop that returns too early. In each round a different rank is late. The receive buffer is
full of poison before the hop, and the send buffer is poisoned and freed as soon as the hop returns. So a
missing wait on the receiver or on the sender delivers poison.
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
from ...comm.execution import Inline, Transfer, run_to_end
from ...cpu.comm_threads import comm_thread
from ...process_groups import world
from ...topology import Hop
from .check import Check, CheckResult, Session

Pattern = Literal["all_gather", "all_to_all"]
PATTERNS: tuple[Pattern, ...] = ("all_gather", "all_to_all")
ROUNDS = 24
WORDS = (5, 1021, 100_003)
"""Words per message, in turns: smaller and larger than the buffers of the backends."""
LATE_SECONDS = 0.003
POISON = -1
HEADER = 3
"""Words at the start of a message: its sender, receiver and round."""
EVERYONE = -2
"""Receiver in the messages of an all-gather."""


def checks() -> Iterator[Check]:
    here = partial(Check, "collectives")
    for name in ("in-node", "across", "flat"):
        does = f"{ROUNDS} all-gathers and all-to-alls of known words, each with a different late rank"
        yield here(f"hop {name}", does, partial(_one_hop, name))
    does = f"{ROUNDS} all-gathers and all-to-alls at the same time, in two threads or streams, on every hop"
    yield here("both directions at once", does, _both_directions)
    yield here("sums", "sums of known numbers by FSDP2's reduce-scatter and by the 16-bit ring", _sums)


def _one_hop(name: str, session: Session) -> CheckResult:
    hops = {hop.name: hop for hop in session.topology.hops()} | {"flat": session.topology.flat_hop()}
    if name not in hops:
        why = "all ranks are on one node" if name == "across" else "every node has one rank"
        return CheckResult("not run", f"no such hop: {why}", "run it on two or more nodes")
    carriers = [Carrier(session, hops[name], pattern) for pattern in PATTERNS]
    for number in range(ROUNDS):
        for carrier in carriers:
            carrier.carry(number)
    return _judge(carriers)


def _both_directions(session: Session) -> CheckResult:
    """Run both directions concurrently, as in training: on a CPU in two threads, on other devices on two
    streams. Each direction has its own process groups."""
    device = session.world.device
    names = ("_gather_lane", "_reduce_lane")
    gathers, reductions = (session.topology.hops(name, own_groups=True) for name in names)
    pairs = [
        (Carrier(session, first, "all_gather"), Carrier(session, second, "all_to_all"))
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


def _judge(carriers: list[Carrier]) -> CheckResult:
    for carrier in carriers:
        if error := carrier.find_error():
            return CheckResult(
                "fault", error, "do not train with it; Config.off() uses FSDP2's own collectives"
            )
    received = sum(carrier.words for carrier in carriers) * 4
    return CheckResult("ok", f"each rank received {received / 1e6:,.0f} MB, every word correct")


class Carrier:
    """Sends messages through one hop, by one pattern."""

    def __init__(self, session: Session, hop: Hop, pattern: Pattern) -> None:
        topology = session.topology
        self._wire = Wire("doctor", topology, Ledger(), Scratch())
        self._hop, self._pattern, self._device = hop, pattern, session.world.device
        self._rank = session.world.rank
        groups = {"in-node": topology.nodes, "across": topology.rails, "flat": (range(topology.size),)}
        (positions,) = (group for group in groups[hop.name] if topology.rank in group)
        self._members = [topology.ranks[position] for position in positions]
        """Global ranks in the order of the hop, from the layout instead of from the group under test."""
        self._me = self._members.index(self._rank)
        self.words = 0
        self._received: list[tuple[int, Tensor, Tensor]] = []
        """Number, count of wrong words, and received headers of each round. The tensors stay on the device,
        so that the host does not wait before the end."""

    def carry(self, number: int) -> None:
        """Run one round: all members send, receive and check."""
        size, words = len(self._members), WORDS[number % len(WORDS)]
        if number % size == self._me:
            time.sleep(LATE_SECONDS)
        out = torch.full((size, words), POISON, dtype=torch.int32, device=self._device)
        sent = out
        if self._pattern == "all_gather":
            out[self._me] = self._message(self._rank, EVERYONE, number, words)
            run_to_end(self._wire.all_gather(self._hop, world(), out))
        else:
            sent = torch.stack([self._message(self._rank, peer, number, words) for peer in self._members])
            run_to_end(self._wire.all_to_all(self._hop, world(), sent, out))
        to = EVERYONE if self._pattern == "all_gather" else self._rank
        expected = torch.stack([self._message(peer, to, number, words) for peer in self._members])
        self._received.append((number, (out != expected).sum(), out[:, :HEADER].clone()))
        self.words += (size - 1) * words
        sent.fill_(POISON)

    def _message(self, sender: int, receiver: int, number: int, words: int) -> Tensor:
        """Return words that are unique to the sender, receiver and round."""
        step = 1 + sender + 7919 * (receiver + 3) + 104_729 * number
        message = torch.arange(words, dtype=torch.int32, device=self._device) * step
        message[:HEADER] = torch.tensor([sender, receiver, number], dtype=torch.int32, device=self._device)
        return message

    def find_error(self) -> str | None:
        """Describe the first round with a wrong word, if there is one."""
        to = EVERYONE if self._pattern == "all_gather" else self._rank
        for number, wrong, headers in self._received:
            if not int(wrong):
                continue
            name = f"{self._pattern} {self._hop.name}, round {number}"
            for peer, header in zip(self._members, headers.tolist(), strict=True):
                if header == [POISON] * HEADER:
                    return f"{name}: no data of rank {peer} when the hop returned: a missing wait"
                if header != [peer, to, number]:
                    sender, receiver, sent = header
                    whose = "" if receiver in (EVERYONE, self._rank) else f" for rank {receiver}"
                    when = "" if sent == number else f" in round {sent}"
                    return f"{name}: data of rank {sender}{whose}{when} instead of data of rank {peer}"
            return f"{name}: {int(wrong)} wrong words after correct headers"
        return None


def _sums(session: Session) -> CheckResult:
    """Reduce ones and zeros. Their sums are exact in any order, in bf16 too, up to 256 ranks."""
    size, rank, device = session.world.size, session.world.rank, session.world.device
    wire, hop = Wire("doctor", session.topology, Ledger(), Scratch()), session.topology.flat_hop()
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
            run(((columns + ranks + rank + number) % 2).float(), out)  # one row per owner, [W, words]
            expected = ((columns + rank + ranks + number) % 2).sum(0)
            if count := int((out[0] != expected).sum()):
                wrong.append(f"{name}, round {number}: {count} of {len(columns)} sums are wrong")
    if wrong:  # after the last round, because the other ranks run all rounds
        return CheckResult("fault", wrong[0], "do not train on this cluster: the fault is in the backend")
    return CheckResult("ok", f"{len(reduce) * ROUNDS} reductions are exact")
