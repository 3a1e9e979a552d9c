"""What is decided per attention call.

`Workload` is what the cost model reads of a call; `Plan` is the answer. Both are plain
frozen data: passes, logs, the command line and explain print the same objects.
"""

from cpcompile.plans.plan import TIE_FRACTION, Plan
from cpcompile.plans.records import (
    SEQUENCE_STRATEGIES,
    Candidate,
    Degrees,
    Direction,
    Layout,
    RingWork,
    Strategy,
    Workload,
)

__all__ = [
    "SEQUENCE_STRATEGIES",
    "TIE_FRACTION",
    "Candidate",
    "Degrees",
    "Direction",
    "Layout",
    "Plan",
    "RingWork",
    "Strategy",
    "Workload",
]
