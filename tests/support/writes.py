"""Random programs of views, writes through them, and reads."""

import random

import torch

VIEWS = (
    lambda x: x[:, 1:],
    lambda x: x[:, ::2],
    lambda x: x[0:1],
    lambda x: x[..., :2],
    lambda x: x.transpose(0, 1),
    lambda x: x.narrow(1, 0, 2),
    lambda x: x.unsqueeze(1).squeeze(1),
    lambda x: x.chunk(2, -1)[1],
    lambda x: x.view(x.shape),
    lambda x: x.double() if x.dtype == torch.float64 else x.float(),  # x itself
    lambda x: x.contiguous(),
    lambda x: x * 1.5,
)
WRITES = (
    lambda x: x.mul_(0.5),
    lambda x: x.add_(1.0),
    lambda x: x.copy_(x.detach().cos()),
    lambda x: x.__setitem__((slice(None), 0), 3.0),
    lambda x: x[:, 1:].neg_(),
    lambda x: x.masked_fill_(x > 1, 0.25),
)


def program(seed: int, steps: int):
    """A random program: views, writes, and reads in between."""
    draw = random.Random(seed)
    choices = [
        (draw.random(), draw.randrange(99), draw.randrange(99)) for _ in range(steps)
    ]

    def run(x):
        tensors = [x * 2, x.sin()]
        read = []
        for kind, which, what in choices:
            tensor = tensors[which % len(tensors)]
            if min(tensor.shape) < 2:
                tensor = tensors[0]
            if kind < 0.45:
                tensors.append(VIEWS[what % len(VIEWS)](tensor))
            elif kind < 0.85:
                result = WRITES[what % len(WRITES)](tensor)
                if result is not None and what % 3 == 0:
                    tensors.append(result)
            else:
                read.append(tensor.sum() * (what + 1))
        return [*read, *(t.square().sum() for t in tensors), *tensors]

    return run
