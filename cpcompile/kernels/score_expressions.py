"""Pointwise calls of aten as expressions of Triton, for score_functions.py.

A kind is "float" (float32), "int" or "bool". What is not in the tables has none.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARISONS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "eq": "==", "ne": "!="}
_LOGIC = {
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
    "logical_and": "&",
    "logical_or": "|",
    "logical_xor": "^",
}
_OF_FLOAT = {  # {0} is in float32
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "expm1": "score_expm1({0})",
    "log": "tl.log({0})",
    "log1p": "score_log1p({0})",
    "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "1.0 / tl.sqrt({0})",
    "reciprocal": "1.0 / {0}",
    "floor": "tl.floor({0})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "tanh": "score_tanh({0})",
    "erf": "tl.erf({0})",
}
_POWERS = {
    0.5: "tl.sqrt({0})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    4.0: "({0} * {0}) * ({0} * {0})",
    -1.0: "1.0 / {0}",
    -0.5: "1.0 / tl.sqrt({0})",
}
_INTEGER_POWERS = (1.0, 2.0, 3.0, 4.0)
_SAME = ("detach", "alias", "clone", "lift_fresh_copy")
_DTYPES = {
    "float32": "float",
    "int64": "int",
    "int32": "int",
    "bool": "bool",
}


class NoExpression(Exception):
    """A call or an argument that has no expression in the tables."""


@dataclass(frozen=True)
class Number:
    """An expression of the kernel; kind: "float", "int" or "bool"."""

    text: str
    kind: str

    @property
    def numeric(self) -> str:
        """Expression as a number, not as a truth value."""
        return f"({self.text}).to(tl.int32)" if self.kind == "bool" else self.text

    @property
    def real(self) -> str:
        """Expression in float32; literals stay literals."""
        if self.is_integer:
            return repr(float(int(self.text)))
        return self.text if self.kind == "float" else f"({self.text}).to(tl.float32)"

    @property
    def is_integer(self) -> bool:
        """Tell whether it is a written-out integer, without dtype in a kernel."""
        return self.kind == "int" and _is_literal(self)


def pointwise(name: str, args: list[Any], options: dict[str, Any]) -> Number:
    x = args[0]
    if name in _SAME and len(args) == 1:
        return x  # type: ignore[no-any-return]  # a Number
    if name in _OF_FLOAT:
        return Number(_OF_FLOAT[name].format(f"({x.real})"), "float")
    if name in ("neg", "abs", "sgn", "sign", "relu", "logical_not", "bitwise_not"):
        return _unary(name, x)
    if name == "clamp":
        return _clamped(x, *args[1:])
    if name == "where":
        kind = "float" if "float" in (args[1].kind, args[2].kind) else args[1].kind
        if args[1].kind != args[2].kind and kind != "float":
            raise NoExpression
        return Number(f"tl.where({x.text}, {args[1].text}, {args[2].text})", kind)
    if name == "threshold_backward":  # of relu
        grad, x, limit = args
        return Number(f"tl.where({x.text} <= {limit.text}, 0.0, {grad.text})", "float")
    if len(args) != 2:
        raise NoExpression
    y = args[1]
    kind = "float" if "float" in (x.kind, y.kind) else "int"
    if name == "copy" and x.kind == y.kind:
        return y  # type: ignore[no-any-return]  # a Number
    if name in _COMPARISONS:
        return Number(f"({x.numeric} {_COMPARISONS[name]} {y.numeric})", "bool")
    if name in _LOGIC and x.kind == y.kind == "bool":
        return Number(f"({x.text} {_LOGIC[name]} {y.text})", "bool")
    if name in ("maximum", "minimum"):
        both = (x.real, y.real) if kind == "float" else (x.numeric, y.numeric)
        propagate = ", tl.PropagateNan.ALL" if kind == "float" else ""
        return Number(f"tl.{name}({both[0]}, {both[1]}{propagate})", kind)
    if name == "pow":
        to = float(ast.literal_eval(y.text)) if _is_literal(y) else 0.0
        whole = x.kind == y.kind == "int" and to in _INTEGER_POWERS
        if to not in _POWERS or not (x.kind == "float" or whole):
            raise NoExpression
        return Number(_POWERS[to].format(f"({x.text})"), x.kind)
    if name == "tanh_backward":
        return Number(f"{x.text} * (1.0 - {y.text} * {y.text})", "float")
    if name == "sigmoid_backward":
        return Number(f"{x.text} * {y.text} * (1.0 - {y.text})", "float")
    if name in ("remainder", "floor_divide") or options == {"rounding_mode": "floor"}:
        return _divided(name, x, y)
    if options or name not in (*_ARITHMETIC, "rsub"):
        raise NoExpression
    if name == "rsub":
        return Number(f"({y.numeric} - {x.numeric})", kind)
    kind = "float" if name == "div" else kind
    both = (x.real, y.real) if name == "div" else (x.numeric, y.numeric)
    return Number(f"({both[0]} {_ARITHMETIC[name]} {both[1]})", kind)


def _unary(name: str, x: Number) -> Number:
    if name == "neg":
        return Number(f"-({x.numeric})", x.kind)
    if name == "abs":
        return Number(f"tl.abs({x.numeric})", x.kind)
    if name == "relu":
        return Number(f"tl.where({x.text} < 0, 0, {x.text})", x.kind)
    if name in ("sgn", "sign"):
        sign = f"tl.where({x.text} < 0, -1.0, 0.0)"
        return Number(f"tl.where({x.text} > 0, 1.0, {sign})", "float")
    if x.kind != "bool":
        raise NoExpression
    return Number(f"({x.text} == 0)", "bool")


def _clamped(x: Number, low: Any = None, high: Any = None) -> Number:
    for limit, sign in ((low, "<"), (high, ">")):
        if limit is not None:
            if x.kind == "int" and limit.kind == "float":
                raise NoExpression
            text = f"tl.where({x.text} {sign} {limit.text}, {limit.text}, {x.text})"
            x = Number(text, x.kind)
    return x


def _divided(name: str, x: Number, y: Number) -> Number:
    """Divide an integer by a positive one as Python does, or take the remainder."""
    if x.kind != "int" or y.kind != "int" or not _is_literal(y) or integer(y) <= 0:
        raise NoExpression
    rest = f"((({x.text}) % {y.text} + {y.text}) % {y.text})"
    if name == "remainder":
        return Number(rest, "int")
    return Number(f"((({x.text}) - {rest}) // {y.text})", "int")


def converted(x: Number, options: dict[str, Any]) -> Number:
    kind = kind_of(options)
    if kind == x.kind or _is_literal(x):
        return Number(x.text, kind) if kind == x.kind else _literal(x, kind)
    if kind == "bool":
        return Number(f"({x.text} != 0)", kind)
    return Number(
        f"({x.text}).to({'tl.float32' if kind == 'float' else 'tl.int64'})", kind
    )


def _literal(x: Number, kind: str) -> Number:
    if kind != "float" or x.kind != "int":
        raise NoExpression
    return Number(repr(float(integer(x))), "float")


def kind_of(options: dict[str, Any]) -> str:
    name = options.get("dtype")
    if name not in _DTYPES:
        raise NoExpression
    return _DTYPES[name]


def _is_literal(x: Number) -> bool:
    return x.text.lstrip("-").replace(".", "", 1).replace("e-", "", 1).isdigit()


def integer(x: Any) -> int:
    if not isinstance(x, Number) or x.kind != "int" or not _is_literal(x):
        raise NoExpression
    return int(x.text)
