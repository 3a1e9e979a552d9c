"""Hand on what several modules need of Inductor; slow to import."""

# Settings and decompositions; seen in 2.11 to 2.15.
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table

# What all dropouts of a graph draw from; seen in 2.13.
from torch._inductor.inductor_prims import seeds

# What compile_fx_inner returns; seen in 2.11 to 2.14.
from torch._inductor.output_code import CompiledFxGraph
