from collections.abc import Iterator

import pytest

from tests.ranks import Ranks

from . import device


@pytest.fixture(scope="session")
def streamed_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four ranks of their own: the device, once loaded, is there for good."""
    if reason := device.why_not():
        pytest.skip(reason)
    device.build()
    pool = Ranks(4, tmp_path_factory.mktemp("streamed"), backend=device.BACKEND, prepare=device.load)
    yield pool
    pool.close()
