"""Symbols for the tokens that the ranks have, so that one program serves many lengths.

    l_tokens_ [2, s0], divided by 4 ranks  ->  l_tokens_ [2, 4 c], cp_tokens = c
    l_tokens_ [2, s0], not divided         ->  l_tokens_ [2, 4 c - m], cp_tokens = c,
                                               cp_missing = m

Note [Tokens per rank]
Ranks have c = ceil(S / N) tokens each, and the last one misses m < N of them. With
these two for symbols all local sizes are polynomials: a size of S // N is equal to
others only by rules of the division, which sympy does not know. What is asked of sizes
follows from the ranges of both, 0 < m < N < c, so that it makes no guards, which could
differ on the ranks. Programs with m > 0 are others than those without, where nothing is
padded in messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

# Private, in torch 2.13 and 2.15: what Dynamo makes guards on sizes of.
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, TrackedFake

from cpcompile.frontend.symbolic_sizes import mark_fixed
from cpcompile.geometry.divided_lengths import lower_limit
from cpcompile.geometry.lengths import (
    LengthNotSymbolic,
    expected,
    is_same,
    is_symbol,
    require,
    upper_limit,
)
from cpcompile.passes.graph.context import Context, GraphInput, InputKind
from cpcompile.passes.graph.nodes import fake_value
from cpcompile.torch_private.dynamo import Source


@dataclass(frozen=True)
class _Computed(Source):
    """The source of a size that is computed of another one; formula: "{} // 2"."""

    base: Source
    formula: str

    @cached_property
    def guard_source(self) -> Any:
        return self.base.guard_source

    @property
    def _name_template(self) -> str:
        return f"({self.formula.format(self.base.name)})"


@dataclass(frozen=True)
class TokensPerRank:
    """How many tokens the ranks have, of a length that is a symbol.

    place, dim: of an input that has the length. formulas: by name of a new input.
    """

    length: torch.SymInt
    ranks: int
    place: int
    dim: int
    formulas: dict[str, str]

    @classmethod
    def of(cls, graph: fx.Graph, length: torch.SymInt, ranks: int) -> TokensPerRank:
        """Find an input with the length. Raises: LengthNotSymbolic if there is none."""
        formulas = {"cp_tokens": f"-(-{{0}} // {ranks})"}
        if expected(length) % ranks and ranks > 2:  # of two ranks one token is missing
            formulas["cp_missing"] = f"-{{0}} % {ranks}"
        for place, node in enumerate(graph.find_nodes(op="placeholder")):
            value = fake_value(node)
            for dim, n in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if is_symbol(n) and is_same(n, length):
                    return cls(length, ranks, place, dim, formulas)
        raise LengthNotSymbolic("no input has the length")

    def write(self, graph: fx.Graph, ctx: Context) -> list[int]:
        """Write the length as tokens of the ranks, which become inputs of the graph.

        Returns: the values of these inputs in this call.

        Raises: LengthNotSymbolic for a length that is computed from others.
        """
        per_rank, *missing = (_symbol(self.length, x) for x in self.formulas.values())
        is_uneven = bool(expected(self.length) % self.ranks)
        # The limits of the length, or torch does not replace it by other symbols.
        least = lower_limit(self.length) // self.ranks + 1 + is_uneven
        require(per_rank >= max(least, self.ranks + 1 if is_uneven else 2))
        require(per_rank <= upper_limit(self.length) // self.ranks)
        for m in missing:
            require(m >= 1)
            require(m < self.ranks)
        fewer = sum(missing) if missing else int(is_uneven)
        require(self.length == self.ranks * per_rank - fewer)
        after = graph.find_nodes(op="placeholder")[-1]
        for name, n in zip(self.formulas, (per_rank, *missing), strict=True):
            with graph.inserting_after(after):
                after = graph.placeholder(name)
            after.meta["example_value"] = n
            mark_fixed(after)
            ctx.inputs[after] = GraphInput(InputKind.PLAIN)
        return self._values(expected(self.length))

    def around(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the graph's inputs that computes the new ones."""

        def run(*args: Any) -> Any:
            return program(*args, *self._values(args[self.place].shape[self.dim]))

        return run

    def _values(self, length: int) -> list[int]:
        return [eval(x.format(length)) for x in self.formulas.values()]


def _symbol(length: torch.SymInt, formula: str) -> torch.SymInt:
    environment, symbol = length.node.shape_env, length.node._expr
    assert isinstance(environment, ShapeEnv)
    if not symbol.is_Symbol or environment.tracked_fakes is None:
        raise LengthNotSymbolic("the length is computed from others")
    source = _Computed(environment.var_to_sources[symbol][0], formula)
    value = eval(formula.format(expected(length)))
    new = environment.create_symbol(
        value,
        source,
        dynamic_dim=DimDynamic.DYNAMIC,
        positive=None,  # so that guards narrow its range
        do_not_specialize_zero_one=True,
    )
    result = environment.create_symintnode(new, hint=value, source=source)
    if not isinstance(result, torch.SymInt):
        raise LengthNotSymbolic("the number of tokens of a rank is fixed")
    environment.tracked_fakes.append(TrackedFake(result, source, None))
    return result
