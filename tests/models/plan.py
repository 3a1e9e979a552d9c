"""Which settings a case is run with, by the tool and by the tests."""

from __future__ import annotations

from tests.models.case import Case
from tests.models.setting import Mode, Setting
from tests.models.zoo import FAMILIES

TRAIN = Setting()
EVAL = Setting(mode=Mode.EVAL)
CALLS = Setting(mode=Mode.CALLS)
UNNAMED = Setting(annotated=False)
STRATEGIES = (
    Setting(layout="contiguous"),
    Setting(strategy="ring"),
    Setting(strategy="ring", layout="contiguous"),
    Setting(strategy="all_gather", layout="contiguous"),
    Setting(strategy="ulysses"),
)
FOUR_RANKS = (
    Setting(world=4),
    Setting(world=4, mode=Mode.EVAL),
    Setting(world=4, strategy="ring"),
    Setting(world=4, strategy="ring", layout="contiguous"),
    Setting(world=4, strategy="all_gather"),
    Setting(world=4, strategy="ulysses", layout="contiguous"),
)

# Hybrids force both kinds on 2 ranks.
MIXERS = (
    Setting(mixers="exchange"),
    Setting(mixers="states"),
    Setting(world=4, mixers="exchange"),
    Setting(world=4, mixers="states"),
)
HYBRIDS = (
    Setting(strategy="ring", mixers="exchange"),
    Setting(strategy="ulysses", mixers="states"),
    *MIXERS[2:],
)

# Inductor, the default of users, compiles a training step of every case but for some
# mixers, and of some a forward too.
COMPILED = Setting(inner="inductor")
COMPILED_MIXERS = (
    *("mamba2/default", "jamba/default", "qwen3_5/default", "kimi_linear/default"),
    *("lfm2/default", "recurrent_gemma/default"),
)
COMPILED_EVAL = ("llama/default", "bert/default", "vit/classes")

# Shapes that have misled compilers: fewer tokens than ranks, as many sequences as
# tokens, a single sequence.
ODD_SHAPES = (
    Setting(world=4, length=3),
    Setting(length=8, batch=8),
    Setting(length=38, batch=4),
)
ODD = ("llama/default", "gpt2/default", "bert/default", "nn_encoder/default")
EIGHT_RANKS = (
    Setting(world=8),
    Setting(world=8, strategy="ulysses"),
    Setting(world=8, length=5),
)
ON_EIGHT = ("small_gpt/default", "llama/default")


def settings(case: Case, quick: bool = False) -> list[Setting]:
    """All settings of a case; `quick`: one step and one forward."""
    found = [TRAIN, EVAL]
    if quick:
        return found
    if case.mixers:
        found += [*(HYBRIDS if case.attention else MIXERS), CALLS, UNNAMED]
        return found + [COMPILED] * (case.name in COMPILED_MIXERS)
    found += [CALLS, UNNAMED, *STRATEGIES, *FOUR_RANKS]
    found += [Setting(length=length) for length in case.lengths[1:]]
    if case.name in ODD:
        found += ODD_SHAPES
    if case.name in ON_EIGHT:
        found += EIGHT_RANKS
    found.append(COMPILED)
    if case.name in COMPILED_EVAL:
        found.append(Setting(inner="inductor", mode=Mode.EVAL))
    return found


def fast_half() -> list[tuple[str, Setting]]:
    """What every change is tested with: every second case, trained or evaluated."""
    chosen = [case.name for cases in FAMILIES.values() for case in cases[::2]]
    return [(name, (TRAIN, EVAL)[n % 2]) for n, name in enumerate(chosen)]
