import pytest

from tests.ranks import Ranks

collect_ignore = ["titan.py"]
"""Imported on ranks only, and not for doctests: torch warns in it of what pytest makes an error."""


@pytest.fixture(scope="module", autouse=True)
def _import_framework(request: pytest.FixtureRequest, ranks: Ranks) -> None:
    """Ranks start with what a file of tests imports: a framework takes some seconds."""
    ranks.import_first(request.module.__name__)
