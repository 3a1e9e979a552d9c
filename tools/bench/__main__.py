"""Measure, or compute, the tables of docs/results.

    peers         attention alone on CPU ranks, and other packages
    step          whole training steps on CPU ranks, and other packages
    compile       the compile time of a small GPT, with cp and without
    layouts       causal rings in every layout: who is busy how long
    strategies    every strategy on CPU ranks, predicted and measured
    cost_model    the cost model against published measurements; nothing runs
    rank_check    what comparing the ranks costs in a step of the demo
    sharded_parameters  what cp.shard_parameters saves and costs
    overlap       what rings, gathers and gradients hide behind computation
    memory        what tiles save of the memory of a training step, and their cost
    head_groups   what an exchange of heads in groups saves of memory
    mixers        state-space models and delta rules, by every strategy
    lengths       what a stream of many lengths compiles, and costs per step
    aot           every step kernel, compiled for GPUs that need not be here

`tools/in_venv python -m tools.bench peers --help` shows the options of one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Imported when it is asked for: each needs other packages.
MODULES = {
    "peers": "tools.bench.peers.bench",
    "step": "tools.bench.step.bench",
    "compile": "tools.bench.compile",
    "layouts": "tools.bench.layouts.bench",
    "strategies": "tools.bench.strategies.bench",
    "cost_model": "tools.bench.cost_model",
    "rank_check": "tools.bench.rank_check",
    "sharded_parameters": "tools.bench.sharded_parameters",
    "overlap": "tools.bench.overlap",
    "memory": "tools.bench.memory",
    "head_groups": "tools.bench.head_groups",
    "mixers": "tools.bench.mixers",
    "lengths": "tools.bench.lengths",
    "aot": "tools.bench.aot",
}


def main(arguments: Sequence[str]) -> None:
    """Run the `main(parser, arguments)` of a module, which adds its options."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=MODULES)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="see NAME --help")
    given = parser.parse_args(arguments)
    module = importlib.import_module(MODULES[given.name])
    assert module.__doc__ is not None
    module.main(
        argparse.ArgumentParser(
            prog=f"{parser.prog} {given.name}",
            description=module.__doc__.splitlines()[0],
        ),
        given.options,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
