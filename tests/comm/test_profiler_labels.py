from __future__ import annotations

import pytest

from zeropp.comm.profiler_labels import Label


@pytest.mark.parametrize("unit", ["(root)", "blocks.0", "a, b", "x) (y"])
@pytest.mark.parametrize("part", ["across", "in-node", "recode"])
def test_what_is_written_is_read(part: str, unit: str) -> None:
    label = Label("reduce_scatter", part, unit)
    assert Label.read(str(label)) == label


@pytest.mark.parametrize("text", ["aten::mm", "zeropp::", "zeropp::all_reduce.across (a)"])
def test_other_labels_are_not_read(text: str) -> None:
    assert Label.read(text) is None
