"""No test finds the program of another: imported by all processes that run tests.

A test may replace functions that are called while a graph is traced, of which the key
of a kept program knows nothing. Those of tests/cpu/compiled/test_warm_start.py switch
it on.
"""

import torch._functorch.config as functorch_config

functorch_config.enable_autograd_cache = False
