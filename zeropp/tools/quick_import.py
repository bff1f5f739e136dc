"""Faster imports of large packages, such as torch, for commands."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from types import ModuleType


def import_quickly(name: str) -> ModuleType:
    """Import a module, and exclude its objects from garbage collection.

    Modules live until the process ends. torch's modules have a million objects: scanning them takes a third
    of the import's time, and a quarter second of every later collection.
    """
    if name in sys.modules:  # `gc.freeze` would then exclude objects of other code
        return sys.modules[name]
    was_on = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
