"""python -m tests.tools.lab FOLDER RUN...: see steps.py."""

from zeropp.tools.quick_import import import_quickly

import_quickly("tests.tools.lab.steps").main()
