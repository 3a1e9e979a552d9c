"""Turn the options of a call into the budget of what its forward saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cpcompile.errors import OptionError
from cpcompile.logs import warn_once
from cpcompile.options import Options
from cpcompile.settings import setting

from .save_by_budget import SavingBudget


def saving_of(
    options: Options,
    device_type: str,
    frame: str,
    all_gather_text: Callable[[str], Sequence[str]],
) -> SavingBudget | None:
    """Return the budget that was asked for; None if nothing was asked for.

    `all_gather_text` gives the texts of all ranks for the text of this rank.

    Raises: OptionError for offloading from a CPU.
    """
    budget, offload = options.activation_memory, setting("offload_activations")
    if offload and device_type == "cpu":
        raise OptionError(
            "cpcompile.config.offload_activations is True on a mesh of device type "
            "'cpu', where what is saved is in the memory of the host already; needed "
            "an accelerator, or False. options['activation_memory'] saves less"
        )
    if budget is None and not offload:
        return None
    return SavingBudget(budget, frame, all_gather_text, offload)


def warn_of_budget(saving: SavingBudget | None) -> None:
    """Warn if attention is computed again, and if a fraction cannot be met."""
    if saving is None:
        return
    for saved in saving.found:
        if saved.size > saved.budget:
            least = f"{saved.size / saved.fastest:.2f}"
            warn_once(
                f"{saving.frame}: options['activation_memory'] is {saving.given:g}, "
                f"and {least} is the least that can be saved for the backward "
                f"({saved.size / 2**20:.1f} MiB)"
            )
        if saved.attention:
            paths = saved.attention
            more = f", and {len(paths) - 3} more" if len(paths) > 3 else ""
            warn_once(
                f"{saving.frame}: the backward computes attention again, with its "
                f"messages, at {', '.join(paths[:3])}{more}: nothing else is left that "
                "options['activation_memory'] of "
                f"{saved.budget / 2**20:.1f} MiB could leave out"
            )
