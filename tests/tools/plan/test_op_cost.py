from __future__ import annotations

import torch

from zeropp.tools.plan.op_cost import WorkCounter


def test_products_count_flops_and_the_rest_counts_bytes() -> None:
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    with WorkCounter() as work:
        a @ b
    assert (work.flops, work.bytes_touched) == (2 * 3 * 4 * 5, 0)
    with WorkCounter() as work:
        a.add(1.0)
    assert (work.flops, work.bytes_touched) == (0, 2 * 48)


def test_views_and_new_memory_touch_nothing() -> None:
    a = torch.ones(3, 4)
    with WorkCounter() as work:
        a.view(4, 3)
        torch.empty(100)
    assert (work.flops, work.bytes_touched) == (0, 0)


def test_a_lookup_touches_the_rows_that_it_takes() -> None:
    table, tokens = torch.ones(1000, 4), torch.tensor([1, 2, 3])
    with WorkCounter() as work:
        torch.nn.functional.embedding(tokens, table)
    assert work.bytes_touched == 2 * 3 * 4 * 4
