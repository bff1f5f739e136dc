"""What `apply` says of an FSDP2 that is not as zeropp knows it, and of torch versions that are not tested."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

import zeropp
from tests.ranks import Ranks
from tests.training import make_net
from zeropp.fsdp2.versions import READER, TESTED, ReaderOf213

IS_213 = READER is ReaderOf213


def _refusals() -> dict[str, str]:
    """What `apply` says if FSDP2 is not as it was; afterwards, the model is still plain FSDP2's."""

    class Renamed(DefaultAllGather):
        def __call__(self, output: Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return None

    net, errors = make_net(), {}
    group = cast(Any, net)._get_fsdp_state()._fsdp_param_groups[0]
    collectives = sys.modules[DefaultAllGather.__module__]
    plain = (type(group._all_gather_comm), type(group._reduce_scatter_comm))
    changes: dict[str, AbstractContextManager[Any]] = {
        "method": _without(FSDPModule, "set_reduce_scatter_unused_params"),
        "class": _without(collectives, "DefaultReduceScatter"),
        "attribute": _without(group, "mesh_info"),
        "type": patch.object(group, "fsdp_params", {"0": group.fsdp_params[0]}),
        "call": patch.object(collectives, "DefaultAllGather", Renamed),
    }
    for name, changed in changes.items():
        with changed:
            try:
                zeropp.apply(net, zeropp.Config(node_size=1))
            except RuntimeError as error:
                errors[name] = str(error)
        assert plain == (type(group._all_gather_comm), type(group._reduce_scatter_comm))
    zeropp.apply(net, zeropp.Config(node_size=1))
    return errors


@contextmanager
def _without(owner: Any, name: str) -> Iterator[None]:
    kept = vars(owner)[name]
    delattr(owner, name)
    yield
    setattr(owner, name, kept)


def test_an_unknown_fsdp2_is_refused(ranks: Ranks) -> None:
    errors = ranks.run(_refusals, world=2)[0]
    for name, wrong in {
        "method": "FSDPModule.set_reduce_scatter_unused_params is missing",
        "class": "_fsdp_collectives.DefaultReduceScatter is missing",
        "attribute": "FSDPParamGroup.mesh_info is missing",
        "type": "FSDPParamGroup.fsdp_params is a dict, expected <class 'list'>",
        "call": "Renamed.__call__ has new parameters: args, kwargs, output",
    }.items():
        assert wrong in errors[name]
        assert f"torch {torch.__version__}" in errors[name]
        assert f"tested with torch {', '.join(TESTED)}" in errors[name]


ON_ANOTHER_VERSION = """
import sys
import torch
torch.__version__ = sys.argv[1]
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import zeropp
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
for _ in range(2):
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    zeropp.apply(model, zeropp.Config(node_size=2))
dist.destroy_process_group()
"""


def _apply_on(version: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ON_ANOTHER_VERSION, version]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_an_untested_version_is_warned_about_once_and_runs() -> None:
    untested = "2.12.9+old" if IS_213 else "2.99.1+new"
    done = _apply_on(untested)
    assert done.returncode == 0, done.stderr
    warning = f"zeropp is tested with torch {', '.join(TESTED)}, and this is {untested}"
    assert done.stderr.count(warning) == 1


@pytest.mark.skipif(not IS_213, reason="a new version is read as this one is")
def test_an_untested_version_without_what_is_read_is_refused() -> None:
    done = _apply_on("2.99.1+new")
    assert done.returncode == 1
    assert "torch 2.99.1+new: FSDPParamGroup._reduce_scatter_param_indices is missing" in done.stderr
