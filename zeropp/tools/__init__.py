"""The commands and their helpers. The library does not import this package, except `ZeroPP.report` for its
page."""
