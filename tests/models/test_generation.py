"""Generation: the prompt is read by all ranks, and what follows token by token."""

import copy

import pytest
import torch

from tests.cpu.attention_cases import sequence_mesh
from tests.models.case import random_ids
from tests.models.families.decoders import model
from tests.models.torchvision_schemas import define_schemas
from tests.support.bounds import Deviation, check, deviation

PROMPT, NEW = 37, 4


def generate(compiled: str) -> tuple[list, list, Deviation]:
    """Tokens of compiled and of plain generation, and how far the first logits are."""
    torch._dynamo.reset()
    define_schemas()
    torch.manual_seed(0)
    plain = model("llama").eval()
    parallel = copy.deepcopy(plain)
    ids = random_ids(PROMPT)
    mesh = sequence_mesh(torch.distributed.get_world_size())
    options = {"mesh": mesh, "inner": "aot_eager", "shard": {"input_ids": 1}}
    step = torch.compile(parallel.forward, backend="cp", options=options)
    with torch.inference_mode():
        logits = step(input_ids=ids, use_cache=True)
        rough = plain(input_ids=ids, use_cache=True).logits
        exact = copy.deepcopy(plain).double()(input_ids=ids, use_cache=True).logits
        found = deviation("logits", logits.logits, exact, rough)
        if compiled == "prompt":  # each rank decodes by itself, from the whole cache
            tokens, cache = [ids], logits.past_key_values
            following = logits.logits[:, -1:].argmax(-1)
            for _ in range(NEW):
                tokens.append(following)
                next_ = parallel(input_ids=following, past_key_values=cache)
                following, cache = next_.logits.argmax(-1), next_.past_key_values
            got = torch.cat(tokens, 1)
        else:
            parallel.forward = step
            got = parallel.generate(ids, max_new_tokens=NEW, do_sample=False)
        reference = plain.generate(ids, max_new_tokens=NEW, do_sample=False)
    return got.tolist(), reference.tolist(), found


@pytest.mark.parametrize("compiled", ["prompt", "everything"])
def test_generated_tokens_are_those_of_one_process(pools, compiled):
    for got, reference, found in pools[2].run(generate, compiled, timeout=150):
        assert got == reference
        check([found])
