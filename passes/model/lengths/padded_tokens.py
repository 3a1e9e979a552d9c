"""Knowledge of the tokens of a padded sequence in a value."""

from __future__ import annotations

from ...graph.sequence_tokens import Tokens


class Unproved(Exception):
    """A call may read the padding, as far as is known."""


# Of a value: None if it has no tokens of the sequence, its tokens, or one of these for
# each of several results.
Found = Tokens | None | tuple[Tokens | None, ...]
