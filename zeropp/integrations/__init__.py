"""Integrations with training frameworks, as thin layers over the public API. Each module needs its framework.
docs/frameworks.md has a minimal script for each."""
