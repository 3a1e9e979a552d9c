"""The cp:: operators; importing this package registers them and their DTensor rules."""

from cpcompile.ops.comm.dim_exchange import dim_exchange
from cpcompile.ops.comm.head_exchange import ulysses_gather, ulysses_scatter
from cpcompile.ops.comm.heads_in_groups import (
    gather_finish,
    gather_start,
    scatter_finish,
    scatter_start,
)
from cpcompile.ops.comm.moved_tokens import moved_tokens, moved_tokens_backward
from cpcompile.ops.comm.passed_states import passed_states, passed_states_backward
from cpcompile.ops.comm.relayout import relayout
from cpcompile.ops.comm.ring_exchange import ring_shift, ring_wait
from cpcompile.ops.comm.token_runs import gradient_bucket, move_runs
from cpcompile.ops.dtensor import dtensor_rules, dtensor_sdpa
from cpcompile.ops.mixers import mixer_work
from cpcompile.ops.mixers.mixer_operator import mixer, mixer_backward, mixer_recorded
from cpcompile.ops.row_numbers import expert_numbers, row_numbers
from cpcompile.ops.step import flop_formulas
from cpcompile.ops.step.attention_step import attention_step
from cpcompile.ops.step.attention_step_backward import attention_step_backward
from cpcompile.ops.strategies.all_gather_attention import (
    all_gather_attention,
    all_gather_attention_backward,
)
from cpcompile.ops.strategies.hybrid_attention import hybrid_attention
from cpcompile.ops.strategies.ring_attention import (
    ring_attention,
    ring_attention_backward,
)
from cpcompile.ops.strategies.split_kv_attention import split_kv_attention
from cpcompile.ops.strategies.ulysses_attention import (
    local_attention,
    local_attention_backward,
    ulysses_attention,
)
from cpcompile.ops.tile_sums import add_product_, after

flop_formulas.register()
mixer_work.register()
dtensor_rules.register()
dtensor_sdpa.register()

__all__ = [
    "add_product_",
    "after",
    "all_gather_attention",
    "all_gather_attention_backward",
    "attention_step",
    "attention_step_backward",
    "dim_exchange",
    "expert_numbers",
    "gather_finish",
    "gather_start",
    "gradient_bucket",
    "hybrid_attention",
    "local_attention",
    "local_attention_backward",
    "mixer",
    "mixer_backward",
    "mixer_recorded",
    "move_runs",
    "moved_tokens",
    "moved_tokens_backward",
    "passed_states",
    "passed_states_backward",
    "relayout",
    "ring_attention",
    "ring_attention_backward",
    "ring_shift",
    "ring_wait",
    "row_numbers",
    "scatter_finish",
    "scatter_start",
    "split_kv_attention",
    "ulysses_attention",
    "ulysses_gather",
    "ulysses_scatter",
]
