"""The cp:: operators; importing this package registers them and their DTensor rules."""

from . import dtensor_cat, dtensor_rules, dtensor_sdpa
from .all_gather_attention import all_gather_attention, all_gather_attention_backward
from .ring_attention import ring_attention, ring_attention_backward

dtensor_rules.register()
dtensor_sdpa.register()
dtensor_cat.register()

__all__ = [
    "all_gather_attention",
    "all_gather_attention_backward",
    "ring_attention",
    "ring_attention_backward",
]
