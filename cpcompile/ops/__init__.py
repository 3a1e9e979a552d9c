"""The cp:: operators; importing this package registers them and their DTensor rules."""

from . import dtensor_cat, dtensor_rules, dtensor_sdpa, flops, masked_dtensor_rules
from .all_gather_attention import all_gather_attention, all_gather_attention_backward
from .attention_step import attention_step
from .attention_step_backward import (
    attention_step_backward,
    attention_step_dkdv,
    attention_step_dq,
)
from .head_exchange import ulysses_gather, ulysses_scatter
from .hybrid_attention import hybrid_attention
from .masked_all_gather_attention import (
    masked_all_gather_attention,
    masked_all_gather_attention_backward,
)
from .masked_attention import masked_attention, masked_attention_backward
from .masked_ring_attention import (
    masked_ring_attention,
    masked_ring_attention_backward,
)
from .masked_ulysses_attention import masked_ulysses_attention
from .relayout import relayout
from .ring_attention import ring_attention, ring_attention_backward
from .ring_exchange import ring_shift, ring_wait
from .ulysses_attention import ulysses_attention

flops.register()
dtensor_rules.register()
masked_dtensor_rules.register()
dtensor_sdpa.register()
dtensor_cat.register()

__all__ = [
    "all_gather_attention",
    "all_gather_attention_backward",
    "attention_step",
    "attention_step_backward",
    "attention_step_dkdv",
    "attention_step_dq",
    "hybrid_attention",
    "masked_all_gather_attention",
    "masked_all_gather_attention_backward",
    "masked_attention",
    "masked_attention_backward",
    "masked_ring_attention",
    "masked_ring_attention_backward",
    "masked_ulysses_attention",
    "relayout",
    "ring_attention",
    "ring_attention_backward",
    "ring_shift",
    "ring_wait",
    "ulysses_attention",
    "ulysses_gather",
    "ulysses_scatter",
]
