"""Settings of all processes that run tests, each of which imports this.

No test finds the program of another: one may replace functions that are called while a
graph is traced, of which the key of a kept program knows nothing. The tests of
tests/cpu/compiled/test_warm_start.py switch that on.

Mistakes of ours that have a fallback are raised, Note [Refusals and mistakes].
"""

import torch._functorch.config as functorch_config

from cpcompile import refusals

functorch_config.enable_autograd_cache = False
refusals.raises_mistakes = True
