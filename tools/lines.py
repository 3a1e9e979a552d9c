"""Lines of the product per concern, each with a ceiling that only falls.

    $ tools/lines
    concern                               lines   ceiling  files
    attention: calls, spec, strategies    6,105     6,105     46
    ...
    $ tools/lines --lower      # after a reduction: ceilings become today's lines

A file belongs to the concern with the longest of the paths below that it starts with.
`tools/lines.json` holds the ceilings. A concern above its ceiling fails the run, and so
does one that has fallen more than `SLACK` lines below it: the ceiling follows. By hand
a ceiling may be raised only by what another falls: the sum never rises, which is held
against the version of the file before, as git has it.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
CEILINGS = Path(__file__).with_suffix(".json")
SLACK = 25  # lines of a concern that may be removed without lowering its ceiling
UNITS = ("cpcompile", "passes", "tests")

CONCERNS = {
    "the graph of the whole sequence": """
        passes/whole passes/graph/local_notes.py cpcompile/compile/capture.py
        cpcompile/frontend/tokens_per_rank.py cpcompile/ops/latent_steps.py
        cpcompile/ops/window_convolution.py
        cpcompile/ops/dtensor/whole_composite.py cpcompile/ops/shared_mixers.py
        cpcompile/ops/by_rows.py
        cpcompile/ops/listed_gradients.py cpcompile/geometry/divided_lengths.py""",
    "attention: calls, spec, strategies, geometry": """
        cpcompile/geometry cpcompile/ops/__init__.py cpcompile/ops/attention_spec.py
        cpcompile/ops/plain_attention.py cpcompile/ops/row_numbers.py
        cpcompile/ops/step cpcompile/ops/strategies cpcompile/ops/comm
        cpcompile/ops/traced_nodes.py cpcompile/ops/dtensor/dtensor_sdpa.py
        passes/model/attention passes/graph/attention_calls.py
        passes/graph/cp_attention.py passes/local/expand_ring.py
        passes/model/__init__.py passes/local/__init__.py""",
    "score functions": """
        cpcompile/kernels/score cpcompile/ops/step/score_mod.py
        passes/model/patterns/decompose_flex_attention.py
        passes/model/patterns/score_programs.py""",
    "masks": """
        passes/model/masks cpcompile/geometry/mask
        cpcompile/ops/step/row_mask.py cpcompile/ops/step/rows_under_mask.py
        cpcompile/ops/step/position_bias.py cpcompile/ops/dtensor/mask_placements.py
        cpcompile/ops/strategies/ring_masks.py""",
    "kernels": "cpcompile/kernels",
    "written attention": "passes/model/patterns",
    "mixers": """
        cpcompile/ops/mixers cpcompile/ops/comm/passed_states.py
        cpcompile/ops/comm/dim_exchange.py cpcompile/ops/dtensor/mixer_rule.py
        passes/model/mixers passes/placement/scan passes/graph/mixer_calls.py
        passes/joint/record_mixers.py cpcompile/cost/mixer
        passes/model/normalize/fold_scans.py cpcompile/torch_patches/kept_mixers.py""",
    "sharding and placement": """
        passes/model/tokens passes/placement cpcompile/ops/tile_sums.py
        cpcompile/ops/comm/communic cpcompile/ops/comm/relayout.py""",
    "moved tokens, windows, halos, convolutions": """
        cpcompile/ops/comm/moved_tokens.py cpcompile/ops/comm/token_runs.py
        passes/placement/token_
        cpcompile/frontend/image_rows.py
        passes/model/tokens/convolutions.py""",
    "one form: spelling, mutation, transforms": """
        passes/model/mutation passes/model/normalize passes/graph/calls.py
        passes/graph/constant_arguments.py
        passes/graph/effects.py passes/graph/transforms.py""",
    "one program for many lengths": """
        passes/model/masks/any_length cpcompile/frontend/symbolic_sizes.py
        cpcompile/frontend/changing_floats.py cpcompile/geometry/lengths.py""",
    "experts": "passes/model/moe passes/graph/dispatch_calls.py",
    "latents": """
        passes/model/latents cpcompile/cost/latent""",
    "layouts": """
        passes/model/layouts cpcompile/geometry/layout.py
        cpcompile/ranks/layout_marks.py cpcompile/cost/relayout_cost.py""",
    "flow": "passes/flow",
    "graph helpers": "passes/graph passes/pipeline.py passes/__init__.py",
    "tiles and saving": """
        passes/joint cpcompile/torch_patches/saved_values.py
        cpcompile/ops/dtensor/shares.py""",
    "folding": """
        passes/local/folding cpcompile/compile/compile_folded.py
        passes/local/send_in_buckets.py""",
    "compile": "cpcompile/compile cpcompile/backend.py",
    "frontend": "cpcompile/frontend cpcompile/options.py",
    "ranks": "cpcompile/ranks cpcompile/frontend/rank_consistency",
    "shard, batches, caches": """
        cpcompile/ranks/local_batches.py cpcompile/ranks/sharded_cache.py
        cpcompile/ranks/shardings.py cpcompile/ranks/same_rows.py""",
    "DTensor rules": "cpcompile/ops/dtensor",
    "patches to torch, private names": "cpcompile/torch_p",
    "cost model, choice, plan": """
        cpcompile/cost cpcompile/apps/cli/cli_plan.py
        cpcompile/apps/cli/plan_arguments.py cpcompile/apps/cli/presets.py
        cpcompile/apps/cli/fit_command.py""",
    "calibration": "cpcompile/apps/calibration",
    "account, explain, warnings": "cpcompile/reporting cpcompile/accounting",
    "check": "cpcompile/apps/checking",
    "verify": """
        cpcompile/apps/verification cpcompile/apps/cli/cli_model.py""",
    "pictures": "cpcompile/reporting/drawing",
    "trace": "cpcompile/reporting/step_trace",
    "command line": "cpcompile/apps cpcompile/__main__.py",
    "messages, settings": """
        cpcompile/__init__.py cpcompile/config.py cpcompile/settings.py
        cpcompile/errors.py cpcompile/refusals.py cpcompile/logs.py
        cpcompile/progress.py""",
    "tests": "tests/",
}


def concern_of(path: str) -> str:
    """Return the concern with the longest path that `path` starts with.

    Raises KeyError for a file of no concern.
    """
    found = max(
        (
            (len(prefix), concern)
            for concern, prefixes in CONCERNS.items()
            for prefix in prefixes.split()
            if path.startswith(prefix)
        ),
        default=None,
    )
    if found is None:
        raise KeyError(f"{path} belongs to no concern of tools/lines.py")
    return found[1]


def count(root: Path) -> tuple[Counter[str], Counter[str]]:
    """Count lines and files per concern in the Python files below `root`."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in _python_files(root):
        concern = concern_of(path.relative_to(root).as_posix())
        lines[concern] += path.read_bytes().count(b"\n")
        files[concern] += 1
    return lines, files


def _python_files(root: Path) -> Iterable[Path]:
    linked = root / "cpcompile" / "passes"  # the link to passes/
    for unit in UNITS:
        for path in sorted((root / unit).rglob("*.py")):
            if linked not in path.parents:
                yield path


def complaints(lines: Mapping[str, int], ceilings: dict[str, int]) -> list[str]:
    """Say which concerns are above their ceiling, or too far below it."""
    said = []
    for concern in CONCERNS:
        now, ceiling = lines.get(concern, 0), ceilings.get(concern, 0)
        if now > ceiling:
            said.append(
                f"{concern}: {now:,} lines, the ceiling is {ceiling:,}: remove as many "
                "as were added, or lower the ceiling of another concern by as many"
            )
        elif now < ceiling - SLACK:
            said.append(
                f"{concern}: {now:,} lines, the ceiling is still {ceiling:,}: "
                "`tools/lines --lower`"
            )
    return said


def product(counts: Mapping[str, int]) -> int:
    """Return the lines of cpcompile and passes."""
    return sum(n for concern, n in counts.items() if concern != "tests")


def raised(before: dict[str, int], now: dict[str, int]) -> list[str]:
    """Say which sums of ceilings have risen: of the product, or of tests."""
    sums = [
        ("cpcompile and passes", product(before), product(now)),
        ("tests", before.get("tests", 0), now.get("tests", 0)),
    ]
    return [
        f"{what}: the ceiling was {old:,} and is {new:,}; it may only fall"
        for what, old, new in sums
        if new > old
    ]


def _ceilings_before() -> dict[str, int] | None:
    """Return the ceilings one commit back; None where git has no such version."""
    asked = ["git", "log", "-2", "--format=%H", "--", CEILINGS.name]
    said = subprocess.run(asked, cwd=CEILINGS.parent, capture_output=True, text=True)
    commits = said.stdout.split() if said.returncode == 0 else []
    if len(commits) < 2:
        return None
    shown = ["git", "show", f"{commits[1]}:./{CEILINGS.name}"]
    text = subprocess.check_output(shown, cwd=CEILINGS.parent, text=True)
    return dict(json.loads(text))


def lower(lines: Counter[str], ceilings: dict[str, int]) -> dict[str, int]:
    """Return ceilings that are today's lines where these are fewer."""
    return {x: min(lines[x], ceilings.get(x, lines[x])) for x in CONCERNS}


def main() -> int:
    """Print the table; return 1 where a ceiling does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lower", action="store_true", help="lower the ceilings")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    arguments = parser.parse_args()
    lines, files = count(arguments.root)
    ceilings: dict[str, int] = (
        json.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}
    )
    if arguments.lower:
        ceilings = lower(lines, ceilings)
        CEILINGS.write_text(json.dumps(ceilings, indent=1) + "\n")
    print(f"{'concern':46}{'lines':>8}{'ceiling':>9}{'files':>7}")
    for concern in CONCERNS:
        ceiling = ceilings.get(concern, 0)
        print(f"{concern:46}{lines[concern]:8,}{ceiling:9,}{files[concern]:7}")
    print(f"{'cpcompile and passes':46}{product(lines):8,}{product(ceilings):9,}")
    said = complaints(lines, ceilings)
    if (before := _ceilings_before()) is not None:
        said += raised(before, ceilings)
    print("".join(f"{x}\n" for x in said), end="", file=sys.stderr)
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
