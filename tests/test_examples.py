"""The suite's hypothesis profiles: the same in CI and locally, and without deadlines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import SUITE, SUITE_EXAMPLES, THOROUGH, THOROUGH_EXAMPLES, examples

ROOT = Path(__file__).parents[1]
SHOW = """
import sys
from hypothesis import settings
import tests.examples
settings.load_profile(sys.argv[1])
print(settings.default)
"""


def show(profile: str, ci: dict[str, str]) -> str:
    """Return all settings of a profile, from a process with or without the variables of a CI service."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "GITHUB_ACTIONS")}
    command = [sys.executable, "-c", SHOW, profile]
    return subprocess.run(
        command, env=environment | ci, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True
    ).stdout


@pytest.mark.parametrize("profile", [SUITE, THOROUGH])
def test_a_profile_is_the_same_with_and_without_ci(profile: str) -> None:
    plain = show(profile, {})
    assert plain == show(profile, {"CI": "true"})
    assert "deadline=None" in plain


def test_a_profile_of_the_suite_is_in_use() -> None:
    assert settings.get_current_profile_name() in (SUITE, THOROUGH)
    for name in (SUITE, THOROUGH):
        profile = settings.get_profile(name)
        assert profile.deadline is None
        assert HealthCheck.too_slow in profile.suppress_health_check
        assert profile.print_blob
        assert profile.derandomize == (name == SUITE)


def test_thorough_multiplies_the_examples_of_every_test() -> None:
    current = settings.get_current_profile_name()
    try:
        settings.load_profile(SUITE)
        assert (settings().max_examples, examples(8).max_examples) == (SUITE_EXAMPLES, 8)
        settings.load_profile(THOROUGH)
        more = THOROUGH_EXAMPLES // SUITE_EXAMPLES
        assert (settings().max_examples, examples(8).max_examples) == (THOROUGH_EXAMPLES, 8 * more)
    finally:
        settings.load_profile(current)
