"""The passes for the joint graph of the whole sequence, before its trace and on it.

Each tuple is for one kind of graph, as in pipeline.py: Dynamo's graph, from which
AOTAutograd traces forward and backward of the whole sequence, and what it traces.
"""

from __future__ import annotations

from .graph.context import Context
from .graph.graph_pass import GraphPass
from .model.attention.choose_strategy import choose_strategy
from .model.attention.find_attention import find_attention
from .model.attention.insert_attention import insert_attention
from .model.latents.find_latents import find_latents
from .model.masks.rewrite_masks import rewrite_masks
from .model.mixers.exchange_mixers import exchange_mixers
from .model.mixers.find_windows import find_windows
from .model.mixers.split_pairs_by_rows import split_pairs_by_rows
from .model.moe.fold_moe_dispatch import fold_moe_dispatch
from .model.normalize.cut_before_products import cut_before_products
from .model.normalize.fold_kv_repeat import fold_kv_repeat
from .model.normalize.fold_scans import fold_scans
from .model.normalize.pad_convolutions import pad_convolutions
from .pipeline import MODEL
from .whole.ask_policies import ask_policies
from .whole.begin_tokens import begin_tokens
from .whole.keep_calls import keep_calls
from .whole.keep_convolutions import keep_convolutions
from .whole.keep_products import keep_products
from .whole.keep_rows import keep_rows
from .whole.leave_for_later import leave_for_later
from .whole.localise import WholeProgram, localise
from .whole.refuse_attention import refuse_attention
from .whole.row_programs import keep_programs

CAPTURED: tuple[GraphPass[Context], ...] = (
    *MODEL[: MODEL.index(cut_before_products)],  # in their form masks are read
    find_attention,
    find_windows,
    fold_kv_repeat,
    rewrite_masks,
    fold_moe_dispatch,
    find_latents,
    choose_strategy,
    insert_attention,
    refuse_attention,  # what is left over shared tokens
    ask_policies,
    pad_convolutions,
    fold_scans,
    split_pairs_by_rows,
    exchange_mixers,
    begin_tokens,
    leave_for_later,
    keep_programs,
    keep_calls,  # last: it writes what the others mark
)

WHOLE: tuple[GraphPass[WholeProgram], ...] = (
    keep_convolutions,  # before localise: pads and cuts would each be a message
    keep_rows,  # before keep_products: it reads what rows are views of
    keep_products,  # before localise: shards are not flattened
    localise,
)
