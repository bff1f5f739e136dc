collect_ignore = ["titan.py"]
"""Imported on ranks only, and not for doctests: torch warns in it of what pytest makes an error."""
