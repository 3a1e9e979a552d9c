"""One way to call one model: what the table of compatibility has a row for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

VOCABULARY = 211
BATCH = 2
SIZES = {  # of models of transformers
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@dataclass(frozen=True)
class Case:
    """A model with random weights, and inputs for it.

    name: "llama/padded": the model, and what is special about the call.
    library: who wrote the model.
    model: makes it, in training mode.
    inputs: keyword arguments of its forward, for a sequence length; random ones come
        from torch's generator.
    shard: the dimension of the sequence of those inputs that have one.
    lengths: sequence lengths that are tried; a model of images has only one.
    loss: the name of the loss among the results (see `named_tensors`); without one a
        weighted sum of all results is trained on.
    in_double: prepares a model for float64.
    always_labels: labels in eval mode too, of which a decoder gets its input.
    around: is entered while the model runs, here and on ranks.
    attention: whether there is softmax attention. mixers: whether tokens are mixed by
        other means, too.
    """

    name: str
    library: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    shard: dict[str, int] = field(default_factory=dict)
    lengths: tuple[int, ...] = (37, 64)
    loss: str = "loss"
    in_double: Callable[[Any], None] | None = None
    always_labels: bool = False
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    attention: bool = True
    mixers: bool = False

    def doubled(self, model: nn.Module) -> nn.Module:
        """Bring a model of the case to float64."""
        model = model.double()
        if self.in_double is not None:
            self.in_double(model)
        return model


def random_ids(length: int, batch: int = BATCH) -> Tensor:
    """Token ids [batch, length] that are no special tokens."""
    return torch.randint(5, VOCABULARY, (batch, length))


def uneven_labels(ids: Tensor) -> Tensor:
    """Labels of which the ranks have unevenly many: some are -100."""
    labels = ids.clone()
    labels[0, : ids.shape[1] // 3] = -100
    labels[1:, -2:] = -100
    return labels


def padding_mask(ids: Tensor, left: bool = True) -> Tensor:
    """1 for tokens, 0 for padding: right in the first row, left in the others.

    left: whether there is padding on the left; its queries see nothing at all.
    """
    length = ids.shape[1]
    mask = torch.ones_like(ids)
    mask[0, length - int(torch.randint(1, length // 3 + 2, ())) :] = 0
    hidden = int(torch.randint(1, length // 4 + 2, ()))
    mask[1:, : hidden if left else 0] = 0
    return mask


def packed_positions(ids: Tensor) -> Tensor:
    """Positions of two documents that follow each other in one row."""
    batch, length = ids.shape
    cut = int(torch.randint(1, length, ()))
    row = torch.cat([torch.arange(cut), torch.arange(length - cut)])
    return row.expand(batch, length).contiguous()


def without_dropout(config: Any) -> Any:
    """A configuration of transformers with every rate of dropout at 0."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            without_dropout(value)
    return config


def hub_model(config: str, head: str, sizes: dict[str, Any], **how: Any) -> nn.Module:
    """A model by the names of its classes in transformers, without dropout.

    head: may be a class that finds the one for a configuration. how: its arguments.
    """
    import transformers  # slow

    made = without_dropout(getattr(transformers, f"{config}Config")(**sizes))
    make = getattr(transformers, head)
    module: nn.Module = getattr(make, "from_config", make)(made, **how)
    return module.train()


def with_labels(length: int, name: str = "input_ids", **more: Any) -> dict[str, Any]:
    """Token ids, every one with a label, but for some."""
    ids = random_ids(length)
    return {name: ids, "labels": uneven_labels(ids), **more}


def with_padding(given: dict[str, Any], left: bool = True) -> dict[str, Any]:
    """The same in rows of different lengths."""
    return given | {"attention_mask": padding_mask(given["input_ids"], left)}
