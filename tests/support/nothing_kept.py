"""Settings of all processes that run tests, each of which imports this.

No test finds the program of another: one may replace functions that are called while a
graph is traced, of which the key of a kept program knows nothing. The tests of
tests/cpu/compiled/test_warm_start.py switch that on.

Mistakes of ours that have a fallback are raised, Note [Refusals and mistakes].

Dynamo times the guards of each graph, and empties the caches of the processor first.
That takes a thirtieth of a second, slows down all other processes, and nobody reads it.
The garbage collector runs less often: it took a twentieth of the time of all tests.
"""

import gc

import torch._dynamo.guards
import torch._functorch.config as functorch_config

from cpcompile import refusals

functorch_config.enable_autograd_cache = False
refusals.raises_mistakes = True
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
gc.set_threshold(50_000, 20, 20)
