"""Run the command `cpcompile`, for `python -m cpcompile`."""

import sys

from cpcompile.apps.cli.main import main

if __name__ == "__main__":  # processes that calibrate starts import this again
    sys.exit(main())
