"""The methods of docs/howto/post_training.py: numbers, and what ranks exchange."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cpcompile import logs
from cpcompile.accounting.graph_account import Account, Purpose
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import warnings
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.models.torchvision_schemas import define_schemas
from tests.support.bounds import check, deviations, in_one_process, step

SCRIPT = Path(__file__).parents[3] / "docs/howto/post_training.py"
OF_MODELS = (Purpose.ATTENTION, Purpose.GRADIENT)
MOST_WORK = 1.1


def run(
    method: str,
    tokens: list[int],
    world: int,
    dtype: torch.dtype,
    change: str,
) -> None:
    """Compare one step for each number of tokens, and look at what was sent.

    change: "left" reverses all rows, so that they are padded on the left;
    "checkpoint" recomputes the layers of the trained model.
    """
    define_schemas()
    spec = importlib.util.spec_from_file_location("post_training", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    vars(script)["LAYERS"] = 1  # compiles in half the time
    torch._dynamo.reset()
    logs.warn_once.cache_clear()
    make, batch_of = script.METHODS[method]
    model = make()
    if change == "checkpoint":
        model.policy.gradient_checkpointing_enable({"use_reentrant": False})
    model.train().to(dtype)
    compiled = compiled_on(world, model)
    generator = torch.Generator().manual_seed(1)
    found, accounts, logits = [], [], []
    with warnings() as texts:
        for length in tokens:
            batch = batch_of(length, generator)
            if change == "left":
                batch = {name: x.flip(-1) for name, x in batch.items()}

            def one_step(call: Any, module: Any, batch: Any = batch) -> Any:
                kind = next(module.parameters()).dtype
                named = {n: _cast(x, kind) for n, x in batch.items()}
                return step(call, module, **named)

            values = in_one_process(lambda alone, f=one_step: f(alone, alone), model)
            with recording() as reports:
                got = one_step(compiled, model)
            found += deviations(got, *values)
            accounts += [x for report in reports for x in report.accounts]
            first = next(iter(batch.values()))
            words = first.numel() * script.VOCABULARY
            logits.append(words * dtype.itemsize // world)  # bytes of a rank's part
    check(found)
    assert texts == []
    assert accounts and Account(accounts).work().ratio <= MOST_WORK
    for account in accounts:
        for x in account.exchanges:
            assert x.purpose in OF_MODELS or x.bytes < min(logits) / 2, str(x)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


METHODS = ["dpo", "grpo", "shared", "reward", "distil", "lora", "packed"]


# From the second length on it is a symbol; the ranks divide some of them.
LENGTHS = [41, 54, 47]
CASES = [
    *((method, [48], 2, torch.float64, "") for method in METHODS),
    *((method, LENGTHS, n, torch.float64, "") for method in METHODS for n in (2, 3)),
    *((x, [48], 2, torch.float64, "left") for x in METHODS if x != "shared"),
    *((method, [48], 2, torch.float64, "checkpoint") for method in ("dpo", "grpo")),
    *((method, [48], 2, torch.bfloat16, "") for method in METHODS),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("method", "tokens", "world", "dtype", "change"), CASES, ids=str
)
@on_ranks("world", timeout=580)
def test_steps(method, tokens, world, dtype, change) -> None:
    run(method, tokens, world, dtype, change)
