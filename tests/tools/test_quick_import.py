from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from zeropp.tools.quick_import import import_quickly

PROGRAM = """
import gc
from zeropp.tools.quick_import import import_quickly

collections = []
gc.callbacks.append(lambda phase, found: collections.append(phase))
assert import_quickly("decimal").Decimal(1) == 1
assert import_quickly("tyro").cli
assert collections == [], "an import ran the garbage collector"
before = gc.get_freeze_count()
kept = [[] for _ in range(100_000)]
assert collections != [], "the garbage collector never runs again"
assert gc.get_freeze_count() == before > 10_000
"""


def test_collections_run_afterwards_and_skip_the_modules() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        import_quickly("json")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_is_on_after_an_error() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_quickly("zeropp.nowhere")
    assert gc.isenabled()
