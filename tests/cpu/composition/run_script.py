"""Runs a script of docs/howto, which imports transformers, beside any torchvision."""

import runpy
import sys

from tests.models.torchvision_schemas import define_schemas

if __name__ == "__main__":
    define_schemas()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
