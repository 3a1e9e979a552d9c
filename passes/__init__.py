"""The graph passes; imported as `cpcompile.passes`, in the order of pipeline.py."""
