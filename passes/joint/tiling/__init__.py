"""Run what is large and token-wise tile by tile."""
