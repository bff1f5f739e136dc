"""Results for people: tables for the terminal, and a report in one HTML file."""

from .html import render_html
from .tables import bench_tables

__all__ = ["bench_tables", "render_html"]
