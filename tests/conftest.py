import gc
from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


def pytest_collection_finish() -> None:
    """What was imported stays: looking for garbage in it takes a quarter second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Six real ranks, shared by all tests."""
    pool = Ranks(6, tmp_path_factory.mktemp("rendezvous"))
    yield pool
    pool.close()
