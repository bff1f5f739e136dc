"""Pages of HTML and pictures of SVG that need nothing else: what reports are made of."""

from .charts import Bar, Chart, Line, Part, Phase, Span, Step, bars, lines, number, timelines
from .page import figure, figures, items, page, paragraph, table
from .palette import PART_COLORS, STRATEGY_COLORS, WORK_COLORS, colors_of

__all__ = [
    "PART_COLORS",
    "STRATEGY_COLORS",
    "WORK_COLORS",
    "Bar",
    "Chart",
    "Line",
    "Part",
    "Phase",
    "Span",
    "Step",
    "bars",
    "colors_of",
    "figure",
    "figures",
    "items",
    "lines",
    "number",
    "page",
    "paragraph",
    "table",
    "timelines",
]
