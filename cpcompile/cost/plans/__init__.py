"""The decision per attention call.

`Workload` is what the cost model reads of a call; `Plan` is the answer. Both are plain
frozen data: passes, logs, the command line and explain print the same objects.
"""

from cpcompile.cost.plans.plan import TIE_FRACTION, Plan
from cpcompile.cost.plans.workload import (
    EAGER_STRATEGIES,
    NAMED_STRATEGIES,
    SEQUENCE_STRATEGIES,
    Candidate,
    Direction,
    Latents,
    RingWork,
    Strategy,
    Workload,
)

__all__ = [
    "EAGER_STRATEGIES",
    "NAMED_STRATEGIES",
    "SEQUENCE_STRATEGIES",
    "TIE_FRACTION",
    "Candidate",
    "Direction",
    "Latents",
    "Plan",
    "RingWork",
    "Strategy",
    "Workload",
]
