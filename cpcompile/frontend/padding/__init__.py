"""Run lengths that the ranks do not divide in programs for multiples of the ranks."""
