"""Page of `ZeroPP.report`: the bytes that one rank sent, per unit and hop, and the nodes."""

from __future__ import annotations

from collections.abc import Sequence

from ..._text import size
from ...comm.ledger import Ledger
from ...topology import Topology
from .charts import Bar, BarPart, Chart, bars
from .cluster import Carried, draw_cluster
from .page import figure, figures, page, paragraph, table
from .palette import OURS, PLAIN, WORK_COLORS

SENT = ("unit", "collective", "hop", "calls", "wire bytes", "across nodes")
TOTALS = ("unit", "across nodes", "16-bit FSDP2", "less by")
EXPLANATION = (
    "From the ledger of this rank, since its creation or last reset. Other ranks send equally many bytes, "
    "up to the padding of shards. Wire bytes: without packet headers. 16-bit FSDP2: bytes across nodes of "
    "the same calls in FSDP2 with a 16-bit wire."
)
SUBJECT = {"all_gather": "weights", "reduce_scatter": "gradients"}


def render_traffic(
    ledger: Ledger, topologies: Sequence[Topology | None], units: Sequence[dict[str, str]], rank: int
) -> str:
    """Return the page.

    Args:
        ledger: Ledger of this rank.
        topologies: Topology of each unit; None for a unit without zeropp. That with the most nodes is drawn.
        units: Rows of `summary()`, one for each unit.
        rank: Rank of this process.
    """
    sections = []
    known = [topology for topology in topologies if topology is not None]
    topology = max(known, key=lambda topology: len(topology.nodes), default=None)
    if topology is not None:
        sections.append(figures(cluster_chart(ledger, topology), totals_chart(ledger)))
        sections.append(figure(units_chart(ledger)))
    sections += [
        table(total_lines(ledger)),
        paragraph(f"Counted: {ledger.title}. {EXPLANATION}", "note"),
        "<h2>Every collective and hop</h2>",
        table(sent_lines(ledger)),
        "<h2>Formats of every unit</h2>",
        table([list(units[0]), *(list(unit.values()) for unit in units)]) if units else "",
    ]
    where = "" if topology is None else f" of {topology.size}, {topology.describe()}"
    return page(f"zeropp report, rank {rank}{where}", headline(ledger), sections)


def headline(ledger: Ledger) -> str:
    """Return the result in words."""
    sent, baseline = ledger.total(), ledger.baseline_total()
    if not sent.calls:
        return "Nothing was sent yet"
    if not baseline.across_bytes:
        return f"{sent.wire_bytes:,} bytes, none of them across nodes"
    if not sent.across_bytes:
        return f"Nothing across nodes, where 16-bit FSDP2 would have sent {size(baseline.across_bytes)}"
    ratio = baseline.across_bytes / sent.across_bytes
    words = f"{ratio:.3g}x fewer" if ratio >= 1 else f"{1 / ratio:.3g}x more"
    return (
        f"{words} bytes across nodes than FSDP2 with a 16-bit wire: {size(sent.across_bytes)} instead of "
        f"{size(baseline.across_bytes)} from this rank"
    )


def cluster_chart(ledger: Ledger, topology: Topology) -> Chart:
    nodes = [[topology.ranks[position] for position in node] for node in topology.nodes]
    title = f"Traffic of each link: {topology.describe()}"
    return draw_cluster(title, nodes, carried(ledger, across=False), carried(ledger, across=True))


def carried(ledger: Ledger, *, across: bool) -> Carried:
    """Return the bytes that this rank sent inside its node, or across nodes, for weights and gradients."""
    sent: dict[str, int] = {}
    for key, traffic in ledger.rows():
        share = traffic.across_bytes if across else traffic.wire_bytes - traffic.across_bytes
        subject = SUBJECT[key.collective]
        sent[subject] = sent.get(subject, 0) + share
    text = ", ".join(f"{subject} {size(share)}" for subject, share in sent.items() if share)
    return Carried(text or "nothing", sum(sent.values()))


def totals_chart(ledger: Ledger) -> Chart:
    sent, baseline = ledger.total().across_bytes, ledger.baseline_total().across_bytes
    rows = [
        Bar(
            "16-bit FSDP2, the same calls", size(baseline), (BarPart(baseline, PLAIN, f"{baseline:,} bytes"),)
        ),
        Bar("zeropp", size(sent), (BarPart(sent, OURS, f"{sent:,} bytes"),), stands_out=True),
    ]
    return bars("Across nodes, from this rank (bytes)", rows, "bytes")


def units_chart(ledger: Ledger) -> Chart:
    """Chart the bytes of every unit by kind of link."""
    colors = {"in-node link": WORK_COLORS["in-node link"], "across link": WORK_COLORS["across link"]}
    rows = []
    for unit in _units(ledger):
        sent = ledger.total(unit=unit)
        inside = sent.wire_bytes - sent.across_bytes
        parts = (
            BarPart(
                sent.across_bytes, colors["across link"], f"{unit}: {sent.across_bytes:,} bytes across nodes"
            ),
            BarPart(inside, colors["in-node link"], f"{unit}: {inside:,} bytes inside the node"),
        )
        rows.append(Bar(unit, size(sent.wire_bytes), parts))
    return bars("Sent by this rank, per unit (bytes)", rows, "bytes", colors)


def total_lines(ledger: Ledger) -> list[list[str]]:
    """Return a header, and the bytes of each unit against 16-bit FSDP2."""
    lines = [list(TOTALS)]
    for unit in [*_units(ledger), None]:
        sent = ledger.total(unit=unit).across_bytes
        baseline = ledger.baseline_total(unit=unit).across_bytes
        less = f"{baseline / sent:.2f}x" if sent and baseline else "-"
        lines.append([unit or "all", f"{sent:,}", f"{baseline:,}", less])
    return lines


def sent_lines(ledger: Ledger) -> list[list[str]]:
    """Return a header, and every row of the ledger."""
    return [list(SENT)] + [
        [*key, f"{traffic.calls:,}", f"{traffic.wire_bytes:,}", f"{traffic.across_bytes:,}"]
        for key, traffic in ledger.rows()
    ]


def _units(ledger: Ledger) -> list[str]:
    return list(dict.fromkeys(key.unit for key, _ in ledger.rows()))
