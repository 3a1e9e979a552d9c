"""Options and settings in one dict, for tests that run a program in several ways."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from cpcompile import config
from cpcompile.settings import setting_names


def split(
    choices: Mapping[str, Any],
) -> tuple[dict[str, Any], AbstractContextManager[None]]:
    """The options among `choices`, and what sets the settings among them.

    A program keeps the settings under which its first call compiles it, so that the
    call has to be made under them.
    """
    names = setting_names()
    options = {name: x for name, x in choices.items() if name not in names}
    return options, config.patch({k: x for k, x in choices.items() if k in names})
