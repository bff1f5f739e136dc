"""A rank of the benchmark: python -m zeropp.bench SOCKET, started by torchrun."""

import sys

from ..quick_import import import_quickly

import_quickly("zeropp.bench.rank_process").main(sys.argv[1])
