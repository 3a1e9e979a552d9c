"""Attention calls, from found to unrolled."""
