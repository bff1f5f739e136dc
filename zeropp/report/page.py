"""What every report shares: one HTML file that needs nothing else, with tables and plotly's figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..output_files import check_file

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2430; }
body { max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #dfe3ea; }
th:first-child, td:first-child { text-align: left; }
tr.ours td { font-weight: 600; color: #1c7a45; } tr.baseline td { font-weight: 600; }
p.note { color: #5b6575; }
"""
HEIGHT = 460
"""Pixels from the top of a figure to its bottom."""


def page(title: str, subject: str, sections: Sequence[str]) -> str:
    """A whole page; sections are HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(f'{title}: {subject}')}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{''.join(sections)}</body></html>"
    )


def table(lines: list[list[str]], class_of: Callable[[str], str] = lambda _: "") -> str:
    """A header and lines of text; `class_of` gives the style of a line by its first cell."""
    head = "".join(f"<th>{escape(column)}</th>" for column in lines[0])
    body = "".join(
        f'<tr class="{class_of(line[0])}">' + "".join(f"<td>{escape(text)}</td>" for text in line) + "</tr>"
        for line in lines[1:]
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Figures:
    """Turns figures into HTML; the first one brings plotly's script."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, figure: Any) -> str:
        self._count += 1
        text: str = figure.to_html(
            full_html=False, include_plotlyjs=self._count == 1, div_id=f"figure-{self._count}"
        )
        return text


def can_plot() -> bool:
    """Whether plotly is there; a demonstration does without."""
    return find_spec("plotly") is not None


def check_page(path: Path) -> None:
    """Raise unless a page can be made, and written there."""
    check_file(path)
    graph_objects()


def graph_objects() -> Any:
    """plotly, or an error that says how to get it."""
    try:
        import plotly.graph_objects as objects  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ValueError("the HTML report needs the package plotly: pip install 'zeropp[plots]'") from None
    return objects
