"""Self-contained HTML pages and SVG charts for reports."""

from .charts import Bar, BarPart, Chart, Line, Phase, Span, Step, bars, lines, timelines
from .page import figure, figures, items, page, paragraph, table
from .palette import PART_COLORS, STRATEGY_COLORS, WORK_COLORS, colors_of

__all__ = [
    "PART_COLORS",
    "STRATEGY_COLORS",
    "WORK_COLORS",
    "Bar",
    "BarPart",
    "Chart",
    "Line",
    "Phase",
    "Span",
    "Step",
    "bars",
    "colors_of",
    "figure",
    "figures",
    "items",
    "lines",
    "page",
    "paragraph",
    "table",
    "timelines",
]
