from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from zeropp.tools.quick_import import import_quickly

PROGRAM = """
import gc
from zeropp.tools.quick_import import import_quickly

searches = []
gc.callbacks.append(lambda phase, found: searches.append(phase))
assert import_quickly("decimal").Decimal(1) == 1
assert import_quickly("tyro").cli
assert searches == [], "it was looked for garbage"
before = gc.get_freeze_count()
kept = [[] for _ in range(100_000)]
assert searches != [], "it is never looked for garbage again"
assert gc.get_freeze_count() == before > 10_000
"""


def test_garbage_is_looked_for_afterwards_and_not_in_modules() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        import_quickly("json")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_after_an_error_it_is_on_again() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_quickly("zeropp.nowhere")
    assert gc.isenabled()
