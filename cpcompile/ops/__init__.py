"""The cp:: operators; importing this package registers them and their DTensor rules."""

from cpcompile.ops.attention import dtensor_sdpa, flops
from cpcompile.ops.attention.all_gather_attention import (
    all_gather_attention,
    all_gather_attention_backward,
)
from cpcompile.ops.attention.hybrid_attention import hybrid_attention
from cpcompile.ops.attention.local_attention import (
    local_attention,
    local_attention_backward,
)
from cpcompile.ops.attention.ring_attention import (
    ring_attention,
    ring_attention_backward,
)
from cpcompile.ops.attention.split_kv_attention import split_kv_attention
from cpcompile.ops.attention.token_runs import move_runs
from cpcompile.ops.attention.ulysses_attention import ulysses_attention
from cpcompile.ops.comm.gradient_bucket import gradient_bucket
from cpcompile.ops.comm.halo_exchange import halo_exchange
from cpcompile.ops.comm.head_exchange import ulysses_gather, ulysses_scatter
from cpcompile.ops.comm.relayout import relayout
from cpcompile.ops.comm.ring_exchange import ring_shift, ring_wait
from cpcompile.ops.dtensor import dtensor_rules
from cpcompile.ops.row_numbers import row_numbers
from cpcompile.ops.steps.attention_step import attention_step
from cpcompile.ops.steps.attention_step_backward import (
    attention_step_backward,
    attention_step_dkdv,
    attention_step_dq,
)
from cpcompile.ops.tile_sums import add_product_, behind
from cpcompile.torch_patches import dtensor_cat

flops.register()
dtensor_rules.register()
dtensor_sdpa.register()
dtensor_cat.register()

__all__ = [
    "add_product_",
    "all_gather_attention",
    "all_gather_attention_backward",
    "attention_step",
    "attention_step_backward",
    "attention_step_dkdv",
    "attention_step_dq",
    "behind",
    "gradient_bucket",
    "halo_exchange",
    "hybrid_attention",
    "local_attention",
    "local_attention_backward",
    "move_runs",
    "relayout",
    "ring_attention",
    "ring_attention_backward",
    "ring_shift",
    "ring_wait",
    "row_numbers",
    "split_kv_attention",
    "ulysses_attention",
    "ulysses_gather",
    "ulysses_scatter",
]
