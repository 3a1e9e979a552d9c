"""Makes the functions that predict costs, which the processes of ranks then have.

sympy takes 0.05 to 0.2 s for each, and a rank needs a dozen to choose a strategy. This
module is imported once, in the process that the ranks are forked from.
"""

import itertools

from cpcompile.cost.choose import choose
from cpcompile.hardware.profile import load_profile
from cpcompile.plans import Direction, Layout, Workload

for causal, direction in itertools.product(
    (True, False), (Direction.FORWARD, Direction.BOTH)
):
    choose(
        Workload(
            batch=1,
            heads=4,
            kv_heads=4,
            q_len=64,
            kv_len=64,
            head_dim=8,
            value_dim=8,
            bytes_per_element=4,
            causal=causal,
            masked=not causal,
            direction=direction,
            ranks=4,
        ),
        load_profile("cpu"),
        layouts=tuple(Layout),
        runnable=True,
    )
