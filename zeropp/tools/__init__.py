"""The commands and their helpers. Of the library, only `ZeroPP.report` imports from this package."""
