"""What nodes keep when a pass on AOTAutograd's graph writes others in their place."""

# Where the call stands in the model, forward and backward, and what the partitioner is
# told of it: regions of a checkpoint, and what is saved.
NOTES = (
    *("stack_trace", "nn_module_stack", "fwd_nn_module_stack"),
    *("source_fn_stack", "fwd_source_fn_stack", "seq_nr", "custom"),
    *("recompute", "ac_graph_id", "partitioner_tag"),
)
