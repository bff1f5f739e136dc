"""Commands, and all that serves only them. Nothing in the library imports this package."""
