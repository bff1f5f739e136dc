import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.examples import SUITE
from tests.ranks import Ranks
from zeropp.tools.amx import cap_onednn
from zeropp.tools.lab.enter_node import use_batch_scheduling

cap_onednn()  # in every process that tests start: the same bits with and without AMX, and no SIGILL
use_batch_scheduling()  # tests start ranks as a lab does: more than there are cores
settings.load_profile(SUITE)  # before --hypothesis-profile, which loads another one

LONG = (
    "test_device",  # builds the device of tests/streamed, for which the other worker would have to wait
    *("lab", "test_quickstart", "test_wheel", "streamed", "integrations", "plan", "bench", "train", "cli"),
)
"""Files and folders with the tests that take longest."""

collect_ignore = ["integrations/hugging_face.py", "integrations/titan.py"]
"""Imported on ranks only, and not for doctests: frameworks take seconds, in each worker, and warn."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long ones first, so that in the end no worker is alone with them."""

    def place(item: pytest.Item) -> int:
        names = (item.path.parent.name, item.path.stem)
        return min((LONG.index(name) for name in names if name in LONG), default=len(LONG))

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: looking for garbage in it takes a quarter second each time."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Six real ranks, shared by all tests."""
    pool = Ranks(6, tmp_path_factory.mktemp("rendezvous"))
    yield pool
    pool.close()
