"""Entry point of a benchmark rank: torchrun runs python -m zeropp.tools.bench SOCKET."""

import sys

from ..quick_import import import_quickly

import_quickly("zeropp.tools.bench.rank_process").main(sys.argv[1])
