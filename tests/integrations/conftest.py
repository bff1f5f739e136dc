import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="module", autouse=True)
def _import_framework(request: pytest.FixtureRequest, ranks: Ranks) -> None:
    """Import the test module before the ranks fork: a framework takes seconds to import."""
    ranks.import_first(request.module.__name__)
