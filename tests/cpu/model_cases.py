"""Models as users write them, and one training step of each on several ranks.

The reference is the same model in float64 in one process, and bounds are those of
Note [Derived bounds] with its float32 as the rough result. The scale of a gradient is
not below FLOOR of the largest one: that of a key bias is zero but for noise in any
precision.
"""

import copy

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_module

import cpcompile as cp
from cpcompile.apps.verification.bounds import FLOOR
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.models.families.small_gpt import SmallGPT
from tests.models.torchvision_schemas import define_schemas
from tests.support.bounds import check, deviation, largest, whole
from tests.support.settings import split

define_schemas()  # before models of transformers are imported
transformers.logging.set_verbosity_error()
VOCABULARY = 211


def small_gpt(**changes) -> torch.nn.Module:
    return SmallGPT(vocabulary=VOCABULARY, context=128, **changes)


def llama(**changes) -> torch.nn.Module:
    """Labels are shifted in the model; a key/value cache is made by default."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, num_hidden_layers=2, **changes)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> torch.nn.Module:
    """Tied weights, and a graph break in front of the loss."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **dropout)
    return transformers.GPT2LMHeadModel(config)


MODELS = {
    "small_gpt": (small_gpt, "tokens"),
    "checkpoint_one": (lambda: small_gpt(checkpointed=(1,)), "tokens"),
    "checkpoint_all": (lambda: small_gpt(checkpointed=(0, 1)), "tokens"),
    "llama": (llama, "input_ids"),
    "gpt2": (gpt2, "input_ids"),
}


def build(name: str, seq: int) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    make, ids_name = MODELS[name]
    model = make().train()
    tokens = torch.randint(0, VOCABULARY, (2, seq))
    labels = tokens.clone()
    labels[0, : seq // 3] = -100  # the ranks have unevenly many labels
    labels[1, -2:] = -100
    return model, {ids_name: tokens, "labels": labels}


def loss_and_logits(result) -> tuple[Tensor, Tensor]:
    if isinstance(result, tuple):
        return result[1], result[0]
    return result.loss, result.logits


def reference(name: str, seq: int, dtype: torch.dtype) -> dict[str, Tensor]:
    model, inputs = build(name, seq)
    model = model.to(dtype)
    loss, logits = loss_and_logits(model(**inputs))
    loss.backward()
    return results(model, loss, logits)


def results(model, loss: Tensor, logits: Tensor) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "logits": logits.detach()} | found


def run_model(name: str, seq: int, world: int, door: str, options: dict) -> dict:
    """One training step on every rank; gathered results and what was compiled.

    options: and settings.
    """
    torch._dynamo.reset()
    options, settings = split(options)
    mesh = sequence_mesh(world)
    model, inputs = build(name, seq)
    if door == "plain":
        options |= {"mesh": mesh, "shard": dict.fromkeys(inputs, 1)}
    else:
        inputs = {k: cp.shard(x, mesh, dim=1) for k, x in inputs.items()}
        if door == "distributed":
            tied = copy.deepcopy(model)
            model = distribute_module(model, mesh)
            tie_again(model, tied)
    step = torch.compile(model, backend="cp", options=options)
    with settings, recording() as reports:
        loss, logits = loss_and_logits(step(**inputs))
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    placements = {str(x.placements) for x in grads if isinstance(x, DTensor)}
    values = {n: whole(x) for n, x in results(model, loss, logits).items()}
    return {
        "values": values,
        "result_types": (type(loss).__name__, type(logits).__name__),
        "grad_types": {type(x).__name__ for x in grads},
        "grad_placements": placements,
        "rewritten": sum(c.plan is not None for r in reports for c in r.calls),
        "layouts": [c.plan.layout.value for r in reports for c in r.calls if c.plan],
        "relayouts": [(r.relayouts_left, r.relayouts_cancelled) for r in reports],
    }


def tie_again(model, original) -> None:
    """distribute_module unties weights; that is torch's doing, not ours."""
    names = {}
    for name, parameter in original.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


def check_model(name: str, seq: int, got: dict[str, Tensor], rank: int) -> None:
    exact = reference(name, seq, torch.float64)
    plain = reference(name, seq, torch.float32)
    assert got.keys() == exact.keys()
    gradients = exact.keys() - {"loss", "logits"}
    floor = FLOOR * max(largest(exact[n]) for n in gradients)
    found = []
    for n, x in exact.items():
        least = floor if n in gradients else 0.0
        found.append(deviation(f"{n} on rank {rank}", got[n], x, plain[n], least))
    check(found)
