"""How commands import what takes long: torch, and most of zeropp."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from types import ModuleType


def import_quickly(name: str) -> ModuleType:
    """Import a module, and never look for garbage in it.

    Modules stay until the process ends, and torch's are made of a million objects: to look through them again
    and again takes a third of the time of the import, and a quarter second of every later search.
    """
    if name in sys.modules:  # then whatever garbage there is may be somebody's
        return sys.modules[name]
    was_on = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
