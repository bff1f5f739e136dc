import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="module", autouse=True)
def _import_framework(request: pytest.FixtureRequest, ranks: Ranks) -> None:
    """Ranks start with what a file of tests imports: a framework takes some seconds."""
    ranks.import_first(request.module.__name__)
