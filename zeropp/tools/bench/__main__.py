"""A rank of the benchmark: python -m zeropp.tools.bench SOCKET, started by torchrun."""

import sys

from ..quick_import import import_quickly

import_quickly("zeropp.tools.bench.rank_process").main(sys.argv[1])
