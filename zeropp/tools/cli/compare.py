"""`zeropp compare`: compare training runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from .options import read_options
from .output import show_comparison


@dataclass
class Options:
    """Compare losses and bytes of training runs in a table, and write a page with plots.

    zeropp compare runs/plain runs/zeropp
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or their metrics.jsonl files. The first run is the reference for the others."""
    html: Path = Path("compare.html")
    """File for the page."""


def main(arguments: list[str]) -> int:
    options = read_options(Options, arguments, "compare")
    if not options.runs:
        raise ValueError("no run is given; expected folders or metrics.jsonl files of zeropp train")
    show_comparison(options.runs, options.html)
    return 0
