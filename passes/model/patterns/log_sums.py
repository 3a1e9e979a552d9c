"""The log-sum-exp of scores that attention reads too.

    weights = softmax(scores, -1);  lse = logsumexp(scores, -1)

An operator that computes attention has its log-sum-exp, too. It serves only where it is
that of the scores themselves, and not of scores to which a number was added: that
changes no softmax, but it changes the log-sum-exp.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import torch.fx as fx

from ...graph.calls import canonical_call
from ...graph.nodes import fake_value
from .matched import AttentionPattern, Scores


def gives_log_sum(scores: Scores, sums: tuple[fx.Node, ...], dim: int) -> bool:
    """Tell whether the log-sum-exp that is read is the one that attention gives.

    What is added to a row changes no softmax, but the log-sum-exp. It is not given
    under a bias either: rows are shifted, Note [Rows of low numbers].
    """
    added = scores.shifted or any(t.kind == "add" or t.low for t in scores.terms)
    arguments = canonical_call(sums[0]).arguments
    over = (
        arguments["dim"] if isinstance(arguments["dim"], int) else arguments["dim"][0]
    )
    same = over % len(scores.shape) == dim % len(scores.shape)
    plain = not (added or scores.sinks or scores.regroupings or arguments["keepdim"])
    return plain and same and len(sums) == 1


def with_log_sum(attention: AttentionPattern, lse: fx.Node) -> AttentionPattern | None:
    """Add a log-sum-exp to the attention that gives it.

    None if it is not [B, H, tokens], or is read before the attention is there.
    """
    q, k, v = (x.value.shape for x in (attention.q, attention.k, attention.v))
    if len(q) != 4 or q[:2] != k[:2] or k[:2] != v[:2]:
        return None
    if (
        fake_value(lse).shape != q[:3]
        or attention.labels[:-1] != attention.q.labels[:-1]
    ):
        return None
    before = takewhile(
        lambda node: node is not attention.out, attention.out.graph.nodes
    )
    if not lse.users.keys().isdisjoint(before):
        return None
    return replace(attention, lse=lse)
