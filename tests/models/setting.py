"""How a case is run: what is called, on how many ranks, with which options."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Mode(Enum):
    """What is called.

    TRAIN: one step: all results and every gradient.
    EVAL: a forward without gradients, in eval mode.
    BOTH: TRAIN, and then a forward in eval mode, with one compiled model.
    CALLS: two steps whose gradients add up, the second one on other values, masks and
        (where the model can) another length, and then a forward in eval mode; all with
        one compiled model.
    """

    TRAIN = "train"
    EVAL = "eval"
    BOTH = "both"
    CALLS = "calls"


@dataclass(frozen=True)
class Setting:
    """One way to run a case.

    length: None is the case's first one.
    annotated: whether options["shard"] names the inputs that have a sequence.
    strategy: of attention. mixers: of what mixes tokens by other means.
    double: whether ranks compute in float64, too, where nothing but rounding differs.
    """

    world: int = 2
    mode: Mode = Mode.TRAIN
    length: int | None = None
    batch: int | None = None
    strategy: str = "auto"
    layout: str = "auto"
    inner: str = "aot_eager"
    annotated: bool = True
    strict: bool = True
    mixers: str = "auto"
    double: bool = False

    def options(self) -> dict[str, Any]:
        """Options of the backend, but for mesh and shard."""
        return {
            "strategy": f"{self.strategy}, {self.mixers}",
            "layout": self.layout,
            "inner": self.inner,
            "strict": self.strict,
        }

    def as_json(self) -> dict[str, Any]:
        """Only what differs from the default, so that records are short."""
        plain = asdict(Setting())
        fields = {k: v for k, v in asdict(self).items() if v != plain[k]}
        return fields | ({"mode": self.mode.value} if "mode" in fields else {})

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Setting:
        """The setting of a record."""
        mode = Mode(fields.get("mode", Mode.TRAIN.value))
        return cls(**fields | {"mode": mode})

    def __str__(self) -> str:
        """ "2 ranks, train, ring"."""
        words = [f"{self.world} ranks", self.mode.value]
        words += [] if self.length is None else [f"{self.length} tokens"]
        words += [] if self.batch is None else [f"batch {self.batch}"]
        words += [x for x in (self.strategy, self.layout) if x != "auto"]
        words += [] if self.mixers == "auto" else [f"mixers by {self.mixers}"]
        words += [] if self.inner == "aot_eager" else [self.inner]
        words += [] if self.annotated else ["nothing named"]
        words += [] if self.strict else ["not strict"]
        words += ["float64"] if self.double else []
        return ", ".join(words)
