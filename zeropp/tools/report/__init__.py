"""Results for people: tables for the terminal, and a report in one HTML file."""

from .bench_page import render_bench
from .bench_tables import bench_tables

__all__ = ["bench_tables", "render_bench"]
