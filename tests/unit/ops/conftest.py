"""Meshes that exchange nothing."""

from tests.golden.meshes import mesh_2d as mesh  # noqa: F401  (a fixture)
