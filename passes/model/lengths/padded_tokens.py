"""What is known of the tokens of a padded sequence in a value."""

from __future__ import annotations

from ...graph.sequence_tokens import Tokens


class Unproved(Exception):
    """A call may read the padding, as far as anybody knows."""


# What a value has: nothing of the sequence, its tokens, or that for each of several
# results.
Found = Tokens | None | tuple[Tokens | None, ...]
