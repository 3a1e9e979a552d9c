"""A score_mod as functions of Triton, which the step templates call on a tile.

    mul = torch.ops.aten.mul.Tensor(abs_1, index)     of ops/step/score_mod.py
      ->
    v7 = v3 * v6                                      of the kernel

Each call of aten becomes one line. What the function captures is read from VALUES by
index, clamped to the tensor, because tiles also have rows and keys that do not exist. A
score_mod with a call that score_expressions.py has no expression for stays with matrix
products. So does the backward, if what is captured has a gradient: the text sums it
over whole tiles, by calls that a tile of a kernel does not have, and programs that run
side by side would add to the same numbers in an order of chance.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from cpcompile.kernels.score_expressions import (
    NoExpression,
    Number,
    converted,
    integer,
    kind_of,
    pointwise,
)

_INDEX = ("b", "h", "q_idx", "kv_idx")
_TANH = '''
@triton.jit
def score_tanh(x):
    """With an error of about 2^-23; in the range of exp2 for every x."""
    e = tl.math.exp2(tl.abs(x) * -2.885390081777927)  # exp(-2 |x|)
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -t, t)
'''
_LOG1P = '''
@triton.jit
def score_log1p(x):
    """Also of small x; what 1 + x loses is divided out."""
    u = 1.0 + x
    exact = (u == 1.0) | (u == float("inf"))
    return tl.where(exact, x, tl.log(u) * x / tl.where(exact, 1.0, u - 1.0))
'''
_EXPM1 = '''
@triton.jit
def score_expm1(x):
    """Also of small x; what exp loses is divided out."""
    u = tl.exp(x)
    plain = (tl.abs(x) > 0.5) | (u == 1.0)
    near = (u - 1.0) * x / tl.where(plain, 1.0, tl.log(u))
    return tl.where(u == 1.0, x, tl.where(plain, u - 1.0, near))
'''
_HELPERS = {"score_log1p": _LOG1P, "score_expm1": _EXPM1}


@dataclass(frozen=True)
class _Captured:
    """A contiguous part of the captured values: where it begins, and its shape."""

    first: int
    shape: tuple[int, ...]
    kind: str = "float"


@cache
def triton_functions(text: str, first_head: int = 0, last_head: int = 0) -> str | None:
    """Write definitions of score_mod and score_slope for the text of a function.

    score_mod(VALUES, score, b, h, q_idx, kv_idx) gives the new scores. score_slope
    takes `grad` in addition, and gives the gradient of the old scores. Both results are
    in float32 and of the shape of `score`. None if some call has no expression.
    first_head, last_head: the number that head 0 has for the function, and the largest
    number, 0 if head 0 has its own.
    """
    functions = {
        x.name: x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)
    }
    head = f"tl.minimum(h + {first_head}, {last_head})" if last_head else "h"
    try:
        forward = _function("score_mod", functions["forward"], head)
        backward = _function("score_slope", functions["backward"], head)
    except NoExpression:
        return None
    both = f"{forward}\n\n{backward}"
    helpers = [_TANH, *(text for name, text in _HELPERS.items() if name in both)]
    return "\n\n".join([*helpers, both])


def _function(name: str, definition: ast.FunctionDef, head: str) -> str:
    names = ["score", *_INDEX, *(["grad"] if name == "score_slope" else [])]
    values, *arguments = [x.arg for x in definition.args.args]
    assert len(arguments) == len(names), f"{name} takes {arguments}"
    calls, result = _calls(definition)
    values_by_name: dict[str, Any] = {values: _Captured(0, (1, 1, 1 << 62))}
    for own, argument in zip(names, arguments, strict=True):
        text = head if own == "h" else own
        kind = "int" if own in _INDEX else "float"
        values_by_name[argument] = Number(text, kind)
    lines: list[str] = []
    for target in _needed(calls, result):
        value = _value(calls[target], values_by_name)
        if isinstance(value, Number) and not value.is_integer:
            lines.append(f"    v{len(lines)} = {value.text}")
            value = Number(f"v{len(lines) - 1}", value.kind)
        values_by_name[target] = value
    last = values_by_name[result]
    if not isinstance(last, Number):
        raise NoExpression
    lines.append(f"    return {last.numeric} + tl.zeros_like(score)")
    head = f"@triton.jit\ndef {name}(VALUES, {', '.join(names)}):\n"
    return head + "\n".join(lines) + "\n"


def _calls(definition: ast.FunctionDef) -> tuple[dict[str, ast.Call], str]:
    """Return the calls by the names of their results, and the first name returned."""
    calls: dict[str, ast.Call] = {}
    for line in definition.body:
        match line:
            case ast.Assign([ast.Name(target)], ast.Call() as call):
                calls[target] = call
            case ast.Return(ast.Name(result)) | ast.Return(
                ast.Tuple([ast.Name(result), *_])
            ):
                return calls, result
            case ast.Assign([*_], ast.Constant(None)):
                pass  # a name that is read no more
            case _:
                raise NoExpression
    raise NoExpression


def _needed(calls: dict[str, ast.Call], result: str) -> list[str]:
    """List what the result depends on, in order, without sizes of expanded ones."""
    needed = {result}
    for target in reversed(calls):
        if target in needed:
            call = calls[target]
            read = call.args[:1] if _name(call) in ("expand", "zeros_like") else [call]
            for x in read:
                needed |= {y.id for y in ast.walk(x) if isinstance(y, ast.Name)}
    return [target for target in calls if target in needed]


def _name(call: ast.Call) -> str:
    """Return "mul" for torch.ops.aten.mul.Tensor."""
    parts = ast.unparse(call.func).split(".")
    if parts[:3] != ["torch", "ops", "aten"] or len(parts) != 5:
        raise NoExpression
    return parts[3]


def _argument(node: ast.expr, values: dict[str, Any]) -> Any:
    match node:
        case ast.Name("inf" | "nan" as name):
            return Number(f'float("{name}")', "float")
        case ast.Name(name):
            if name not in values:
                raise NoExpression
            return values[name]
        case ast.Constant(None):
            return None
        case ast.Constant(bool(x) | str(x)):
            return x
        case ast.Constant(int(x) | float(x)):
            return Number(repr(x), "int" if isinstance(x, int) else "float")
        case ast.UnaryOp(ast.USub(), operand):
            x = _argument(operand, values)
            if isinstance(x, Number):
                return Number(f"-{x.text}", x.kind)
        case ast.List(elements):
            return [_argument(x, values) for x in elements]
        case ast.Attribute(ast.Name("torch"), name):
            return name
        case ast.Call():
            return None  # a device
    raise NoExpression


def _value(call: ast.Call, values: dict[str, Any]) -> Any:
    name = _name(call)
    if name == "expand":
        return _argument(call.args[0], values)
    args = [_argument(x, values) for x in call.args]
    options = {
        str(x.arg): _argument(x.value, values)
        for x in call.keywords
        if x.arg not in ("device", "layout", "pin_memory", "memory_format")
    }
    if args and isinstance(args[0], _Captured):
        return _of_captured(name, args[0], args[1:], options)
    numbers = [x for x in args if isinstance(x, Number)]
    if name == "_to_copy" or name in ("scalar_tensor", "full"):
        return converted(numbers[0], options)
    of_no_dims = name == "new_zeros" and numbers[0].kind == "float" and args[1] == []
    if (name == "zeros_like" or of_no_dims) and not options:
        return Number("tl.zeros_like(score)", "float")
    plain = len(numbers) == len(args) and not options.keys() - {"rounding_mode"}
    if not plain and (name != "clamp" or options):
        raise NoExpression
    return pointwise(name, args, options)


def _of_captured(
    name: str, x: _Captured, rest: Sequence[Any], options: dict[str, Any]
) -> Any:
    if name == "index" and len(rest) == 1:
        return _read(x, rest[0])
    integers = [integer(y) for y in rest if isinstance(y, Number)]
    if name in ("detach", "alias", "clone"):
        return x
    if name == "_to_copy":
        return _Captured(x.first, x.shape, kind_of(options))
    if name == "view":
        shape = tuple(integer(y) for y in rest[0])
        return _Captured(x.first, shape, x.kind)
    if name == "select" and integers[0] == 0:
        inner = x.shape[1:]
        at = integers[1] % x.shape[0]
        return _Captured(x.first + (at and at * math.prod(inner)), inner, x.kind)
    if (
        name == "slice"
        and len(integers) == 3
        and integers[0] == 0
        and len(x.shape) == 1
    ):
        start, stop = integers[1:]
        return _Captured(x.first + start, (stop - start,), x.kind)
    raise NoExpression


def _read(x: _Captured, index: Sequence[Any]) -> Number:
    """Read an element; negative numbers count from the end."""
    if len(index) != len(x.shape) or not math.prod(x.shape):
        raise NoExpression
    place = str(x.first)
    for dim, (at, size) in enumerate(zip(index, x.shape, strict=True)):
        if not isinstance(at, Number) or at.kind != "int":
            raise NoExpression
        entry = f"tl.where({at.text} < 0, {at.text} + {size}, {at.text})"
        entry = f"tl.minimum(tl.maximum({entry}, 0), {size - 1})"
        place += f" + {math.prod(x.shape[dim + 1 :])} * {entry}"
    types = {"float": "tl.float32", "int": "tl.int64"}
    read = f"tl.load(VALUES + ({place}))"
    if x.kind == "bool":
        return Number(f"{read} != 0", "bool")
    return Number(f"{read}.to({types[x.kind]})", x.kind)
