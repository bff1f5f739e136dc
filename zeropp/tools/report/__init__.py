"""Reports of results: tables for the terminal, and pages of one HTML file."""

from .bench_page import render_bench
from .bench_tables import bench_tables

__all__ = ["bench_tables", "render_bench"]
