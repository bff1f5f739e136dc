from collections.abc import Iterator

import pytest

from tests.ranks import Ranks
from tests.streamed import device


@pytest.fixture(scope="session")
def streamed_ranks(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four ranks of their own: the device, once loaded, is there for good."""
    if reason := device.why_not():
        pytest.skip(reason)
    device.build()
    folder = tmp_path_factory.mktemp("streamed")
    pool = Ranks(4, folder, backend=device.BACKEND, prepare=device.load, templates_of=ranks)
    yield pool
    pool.close()
