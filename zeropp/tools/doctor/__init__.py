"""Checks of zeropp on a cluster, and measurements of its speed: one file per part."""
