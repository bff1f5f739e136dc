"""Hypothesis profiles: how many examples a property gets, and which.

Hypothesis has a default profile with a deadline of 200 ms and random examples. On a CI service it loads
another one. The profile `suite` replaces both and is the same everywhere. `thorough` has 20 times as many
examples, at random: `pytest --hypothesis-profile thorough`.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

SUITE, THOROUGH = "suite", "thorough"
SUITE_EXAMPLES, THOROUGH_EXAMPLES = 50, 1000

settings.register_profile(
    SUITE,
    parent=settings.get_profile("default"),  # not the profile for CI
    max_examples=SUITE_EXAMPLES,
    derandomize=True,  # no test fails by chance
    deadline=None,  # a busy machine exceeds this limit and that of too_slow
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile(
    THOROUGH, parent=settings.get_profile(SUITE), max_examples=THOROUGH_EXAMPLES, derandomize=False
)


def examples(count: int) -> settings:
    """For a property with expensive examples: `count` of them in `suite`, and 20 times as many in `thorough`.

    >>> examples(10).max_examples == 10 * settings().max_examples // SUITE_EXAMPLES
    True
    """
    return settings(max_examples=max(1, count * settings().max_examples // SUITE_EXAMPLES))
