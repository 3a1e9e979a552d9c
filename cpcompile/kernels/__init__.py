"""Triton kernels of one ring attention step, for Inductor and for eager calls."""
