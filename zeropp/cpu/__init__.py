"""Overlap on a CPU with gloo, where no streams exist: threads, early gathers, late gradients."""
