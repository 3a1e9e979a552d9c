"""Run one rank of bench.py: calibrate, then time every strategy of each shape.

Started once per rank, in the namespace it belongs to. Forward and backward of the
operators, eager, on local tensors. The first rank writes what was found as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cpcompile.ops  # noqa: F401  # registers torch.ops.cp
from cpcompile.apps.calibration import Effort, calibrate
from cpcompile.apps.calibration.stopwatch import Stopwatch
from cpcompile.cost.choose import choose
from cpcompile.cost.hardware.profile import NUMBERS, HardwareProfile
from cpcompile.cost.plans import Candidate, Direction, Strategy, Workload
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.geometry.layout import Layout
from cpcompile.ops.attention_spec import AttentionSpec

Shape = tuple[int, int, int, bool]  # tokens, key/value heads, head dim, causal
Pass = Callable[[Tensor, Tensor, Tensor], Tensor]

HEADS = 8
EFFORTS = {
    "full": Effort(18.0, 3.0, 1.5, 10.0, 3.0, 5.0, long=True),
    "links": Effort(6.0, 1.5, 1.0, 12.0, 1.0, 4.0, long=False),
    "quick": Effort(1.0, 0.3, 0.2, 0.5, 0.2, 0.3, long=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--init", required=True, help="tcp://address:port of rank 0")
    parser.add_argument("--effort", choices=EFFORTS, required=True)
    parser.add_argument("--shapes", required=True, help="JSON list of Shape")
    parser.add_argument("--seconds", type=float, required=True, help="for each shape")
    parser.add_argument("--budget", type=float, required=True, help="for all of it")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    start = time.monotonic()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=options.init,
        rank=options.rank,
        world_size=options.ranks,
    )
    profile = calibrate(dist.group.WORLD, torch.device("cpu"), EFFORTS[options.effort])
    _say(f"calibrated: {profile.about.get('fit_error_attention', '')}")
    watch = Stopwatch.of(dist.group.WORLD, torch.device("cpu"))
    groups = Groups.of(options.ranks)
    shapes = [tuple(shape) for shape in json.loads(options.shapes)]
    rows = []
    for shape in shapes:
        spent = torch.tensor([time.monotonic() - start])
        dist.broadcast(spent, 0)  # all ranks stop at the same shape
        if spent.item() > options.budget:
            _say(
                f"no time is left for {len(shapes) - len(rows)} of {len(shapes)} shapes"
            )
            break
        rows.append(time_shape(shape, watch, groups, profile, options.seconds))
    if options.rank == 0:
        numbers = {name: getattr(profile, name) for name in NUMBERS}
        record = {"profile": numbers, "about": dict(profile.about), "rows": rows}
        record["left_out"] = shapes[len(rows) :]
        options.result.write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Groups:
    """The groups of a hybrid of pairs; names are empty if there is none."""

    ranks: int
    neighbours: str  # of this rank: 2i and 2i + 1
    strided: str  # i and i + ranks / 2

    @classmethod
    def of(cls, ranks: int) -> Groups:
        if ranks < 4:
            return cls(ranks, "", "")
        size, rank = ranks // 2, dist.get_rank()
        near = [dist.new_group([2 * i, 2 * i + 1]) for i in range(size)]
        far = [dist.new_group(list(range(i, ranks, 2))) for i in range(2)]
        return cls(ranks, near[rank // 2].group_name, far[rank % 2].group_name)


def time_shape(
    shape: Shape,
    watch: Stopwatch,
    groups: Groups,
    profile: HardwareProfile,
    seconds: float,
) -> dict[str, Any]:
    """Return predicted and measured seconds of every strategy, and the choice."""
    tokens, kv_heads, dim, causal = shape
    ranks = groups.ranks
    workload = Workload(
        1, HEADS, kv_heads, tokens, tokens, dim, dim, 4, causal, Direction.BOTH, ranks
    )
    plan = choose(workload, profile, layouts=(Layout.CONTIGUOUS,))
    forms = [c for c in plan.candidates if c.excluded is None and operator(c, groups)]
    forms.sort(key=lambda c: c.label)  # equal on all ranks
    generator = torch.Generator().manual_seed(dist.get_rank())

    def make(heads: int) -> Tensor:
        return torch.randn(1, heads, tokens // ranks, dim, generator=generator)

    q, k, v = (make(n).requires_grad_() for n in (HEADS, kv_heads, kv_heads))
    grad, spec = make(HEADS), AttentionSpec(dim**-0.5, causal)
    rest = ([], [tokens, tokens], str(spec), watch.group.group_name)
    cases = [
        partial(_both, partial(operator(form, groups), rest), q, k, v, grad)
        for form in forms
    ]
    watch.foreign_loads.clear()
    times = watch.medians(cases, seconds)
    measured = {form.label: time for form, time in zip(forms, times, strict=True)}
    best = min(measured, key=measured.__getitem__)
    regret = measured[plan.chosen.label] / measured[best] - 1
    what = f"{HEADS}:{kv_heads} heads, dim {dim}, {'causal' if causal else 'full'}"
    chosen = plan.chosen.label
    _say(f"{tokens} tokens, {what}: {chosen}, best {best}, regret {regret:.1%}")
    return {
        "tokens": tokens,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "causal": causal,
        "measured": measured,
        "predicted": {form.label: form.seconds for form in forms},
        "chosen": chosen,
        "best": best,
        "regret": regret,
        "other_processes": statistics.median(watch.foreign_loads),
    }


def operator(form: Candidate, groups: Groups) -> Callable[..., Tensor] | None:
    """Return the strategy as (rest, q, k, v) -> out; None if it lacks its groups."""
    call = getattr(torch.ops.cp, STRATEGIES[form.strategy].operator)
    more: tuple[Any, ...] = ()
    if form.strategy is Strategy.HYBRID:
        if groups.ranks != 4:
            return None
        inner = form.degrees.inner == "ulysses"
        pair = groups.neighbours, groups.strided
        more = (*(pair if inner else pair[::-1]), inner)

    def attend(rest: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = call(q, k, v, *rest, *more)[0]
        return out

    return attend


def _both(forward: Pass, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(forward(q, k, v), (q, k, v), grad)


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
