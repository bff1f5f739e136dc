from __future__ import annotations

import pytest
from torch.distributed import ReduceOp

from zeropp.comm.reduction import is_last_operation, scale_of


def test_fsdp2_divides_only_after_plain_sums() -> None:
    assert is_last_operation(ReduceOp.AVG)
    assert is_last_operation(ReduceOp.PREMUL_SUM(0.5))
    assert not is_last_operation(ReduceOp.SUM)


def test_other_operations_are_refused() -> None:
    with pytest.raises(ValueError, match="FSDP2 uses AVG, SUM or PREMUL_SUM"):
        scale_of(ReduceOp.MAX, 4)
