"""`python -m zeropp`: the same as the command `zeropp`."""

import sys

from .tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
