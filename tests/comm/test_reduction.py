from __future__ import annotations

import pytest
from torch.distributed import ReduceOp

from zeropp.comm.reduction import scale_of


def test_other_operations_are_refused() -> None:
    with pytest.raises(ValueError, match="FSDP2 uses AVG, SUM or PREMUL_SUM"):
        scale_of(ReduceOp.MAX, 4)
