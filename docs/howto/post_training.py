"""Post-train small models of transformers, on dp x cp ranks.

    torchrun --nproc-per-node 1 docs/howto/post_training.py dpo
    torchrun --nproc-per-node 2 docs/howto/post_training.py dpo --cp 2
    torchrun --nproc-per-node 4 docs/howto/post_training.py grpo --dp 2 --cp 2

Methods: dpo, grpo, shared (GRPO whose completions share one prompt), reward, distil,
lora, packed. Losses and gradient norms are those of one process.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

VOCABULARY, PAD, LAYERS = 211, 0, 2
ROWS = 4  # pairs or completions of a batch
LONGEST = 64  # tokens of a completion


def new_model(seed=0, kind=LlamaForCausalLM, more_layers=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS + more_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        pad_token_id=PAD,
        num_labels=1,
    )
    return kind(config).double()


def frozen(model):
    return model.eval().requires_grad_(False)


def log_probs(model, ids, mask):
    """Of each token but the first, [B, S - 1]."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)


class DPO(nn.Module):
    """Of pairs [B, 2, S]: a chosen and a rejected text."""

    def __init__(self, beta=0.1):
        super().__init__()
        self.policy, self.reference = new_model(), frozen(new_model(seed=1))
        self.beta = beta

    def forward(self, ids, mask, completion):
        ids, mask, completion = (x.flatten(0, 1) for x in (ids, mask, completion))
        policy = (log_probs(self.policy, ids, mask) * completion[:, 1:]).sum(1)
        with torch.no_grad():
            reference = log_probs(self.reference, ids, mask)
            reference = (reference * completion[:, 1:]).sum(1)
        chosen, rejected = (policy - reference).unflatten(0, (-1, 2)).unbind(1)
        return -F.logsigmoid(self.beta * (chosen - rejected)).mean()


def clipped(log_p, old, advantages, clip=0.2):
    """Return the loss of GRPO for each token."""
    ratio = (log_p - old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


class GRPO(nn.Module):
    """Of completions [B, S], each behind the prompt."""

    def __init__(self, beta=0.04):
        super().__init__()
        self.policy, self.reference = new_model(), frozen(new_model(seed=1))
        self.beta = beta

    def forward(self, ids, mask, completion, old, advantages):
        log_p = log_probs(self.policy, ids, mask)
        with torch.no_grad():
            difference = log_probs(self.reference, ids, mask) - log_p
        loss = clipped(log_p, old[:, 1:], advantages[:, None])
        loss = loss + self.beta * (difference.exp() - difference - 1)
        return (loss * completion[:, 1:]).sum() / (len(ids) * LONGEST)


class SharedPrompt(nn.Module):
    """GRPO of one row: the prompt, then all completions, which do not see each other.

    group: 0 for the prompt, then the number of the completion. labels: the next token.
    """

    def __init__(self, beta=0.04):
        super().__init__()
        self.policy, self.reference = new_model(), frozen(new_model(seed=1))
        self.beta = beta

    def forward(self, ids, group, position_ids, labels, old, advantages, count):
        place = torch.arange(ids.shape[1], device=ids.device)
        seen = (group[:, :, None] == group[:, None, :]) | (group == 0)[:, None, :]
        seen = (seen & (place[:, None] >= place))[:, None]

        def scored(model):
            inputs = {"attention_mask": seen, "position_ids": position_ids}
            log_p = model(input_ids=ids, **inputs).logits.log_softmax(-1)
            return log_p.gather(2, labels.clamp(min=0)[..., None]).squeeze(2)

        log_p = scored(self.policy)
        with torch.no_grad():
            difference = scored(self.reference) - log_p
        loss = clipped(log_p, old, advantages)
        loss = loss + self.beta * (difference.exp() - difference - 1)
        return (loss * (labels != -100)).sum() / count


class Reward(nn.Module):
    """Of pairs [B, 2, S]: a score at the last token of each text."""

    def __init__(self):
        super().__init__()
        self.model = new_model(kind=LlamaForSequenceClassification)

    def forward(self, ids, mask):
        scores = self.model(ids.flatten(0, 1), attention_mask=mask.flatten(0, 1)).logits
        chosen, rejected = scores.view(-1, 2).unbind(1)
        return -F.logsigmoid(chosen - rejected).mean()


class Distillation(nn.Module):
    """The divergence from the most likely words of a teacher."""

    def __init__(self, words=8):
        super().__init__()
        self.student, self.words = new_model(), words
        self.teacher = frozen(new_model(seed=1, more_layers=1))

    def forward(self, ids, mask):
        with torch.no_grad():
            logits = self.teacher(input_ids=ids, attention_mask=mask).logits
            top, words = logits.topk(self.words, -1)
        log_p = self.student(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
        top = top.log_softmax(-1)
        divergence = (top.exp() * (top - log_p.gather(-1, words))).sum(-1)
        return (divergence * mask).sum() / mask.sum()


class NextToken(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, labels, **inputs):
        logits = self.model(**inputs).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def with_adapters():
    """LoRA under gradient checkpointing, for which peft hooks the embedding."""
    from peft import LoraConfig, get_peft_model  # not needed for other methods

    model = new_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(model, lora).double()
    generator = torch.Generator().manual_seed(3)
    for name, x in model.named_parameters():
        if "lora_B" in name:  # which begin as 0, and would hide the gradients of A
            nn.init.normal_(x, generator=generator)
    return NextToken(model)


def texts(rows, tokens, generator):
    """Ids and masks [rows, tokens] of texts of several lengths, padded on the right."""
    lengths = torch.randint(tokens // 2, tokens + 1, (rows,), generator=generator)
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    ids = torch.randint(2, VOCABULARY, (rows, tokens), generator=generator)
    return ids * mask, mask


def pairs(tokens, generator):
    ids, mask = (x.view(ROWS, 2, -1) for x in texts(2 * ROWS, tokens, generator))
    return {"ids": ids, "mask": mask}


def preferences(tokens, generator):
    batch = pairs(tokens, generator)
    after_prompt = torch.arange(tokens) >= tokens // 4
    return batch | {"completion": batch["mask"] * after_prompt}


def completions(tokens, generator):
    """Return rows whose first quarter is the prompt."""
    ids, mask = texts(ROWS, tokens, generator)
    prompt = tokens // 4
    ids[:, :prompt] = ids[0, :prompt]
    old = -5 - torch.rand(ROWS, tokens, generator=generator).double()
    advantages = torch.randn(ROWS, generator=generator).double()
    completion = mask * (torch.arange(tokens) >= prompt)
    names = ("ids", "mask", "completion", "old", "advantages")
    return dict(zip(names, (ids, mask, completion, old, advantages), strict=True))


def shared_row(tokens, generator):
    """Return the same completions behind one prompt.

    Each begins with the last token of the prompt, which predicts its first one.
    """
    batch, prompt = completions(tokens, generator), tokens // 4
    first = batch["ids"][0, : prompt - 1]
    nothing = torch.zeros(prompt - 1)
    parts = [
        (first, nothing, torch.arange(prompt - 1), nothing - 100, nothing, nothing)
    ]
    for row in range(ROWS):
        length = int(batch["mask"][row].sum())
        ids = batch["ids"][row, prompt - 1 : length]
        labels = F.pad(ids[1:], (0, 1), value=-100)
        old = F.pad(batch["old"][row, prompt:length], (0, 1))
        advantages = batch["advantages"][row].expand(len(ids))
        positions, group = (
            torch.arange(prompt - 1, length),
            torch.full_like(ids, row + 1),
        )
        parts.append((ids, group, positions, labels, old, advantages))
    names = ("ids", "group", "position_ids", "labels", "old", "advantages")
    joined = {
        n: torch.cat(x)[None]
        for n, x in zip(names, zip(*parts, strict=True), strict=True)
    }
    whole = {n: joined[n].long() for n in names[:4]} | {n: joined[n] for n in names[4:]}
    return whole | {"count": torch.tensor(ROWS * LONGEST)}


def prompts(tokens, generator):
    ids, mask = texts(ROWS, tokens, generator)
    return {"ids": ids, "mask": mask}


def instructions(tokens, generator):
    ids, mask = texts(ROWS, tokens, generator)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : tokens // 4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed(tokens, generator):
    """Texts in one row, without padding; positions begin anew with each."""
    ids, mask = texts(ROWS, tokens // 2, generator)
    rows = [{"input_ids": x[y > 0].tolist()} for x, y in zip(ids, mask, strict=True)]
    return dict(DataCollatorWithFlattening()(rows))


METHODS = {
    "dpo": (DPO, preferences),
    "grpo": (GRPO, completions),
    "shared": (SharedPrompt, shared_row),
    "reward": (Reward, pairs),
    "distil": (Distillation, prompts),
    "lora": (with_adapters, instructions),
    "packed": (lambda: NextToken(new_model()), packed),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--inner", default="inductor")
    args = parser.parse_args()
    make, batch_of = METHODS[args.method]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (args.dp, args.cp)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "cp"))
    step = model = make().to(device)
    if args.dp * args.cp > 1:
        step.compile(backend="cp", options={"mesh": mesh, "inner": args.inner})
        step = DistributedDataParallel(model)
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for number in range(args.steps):
        batch = batch_of(args.tokens, generator)
        if args.dp > 1:  # all rows of a sequence's ranks are the same
            rank = mesh.get_local_rank("dp")
            batch = {name: x.chunk(args.dp)[rank] for name, x in batch.items()}
        loss = step(**{name: x.to(device) for name, x in batch.items()})
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, 1e9)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if int(os.environ["RANK"]) == 0:
            print(f"step {number}: loss {mean:.12f}, norm {norm:.12f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
