"""Train a small Llama with TRL's DPOTrainer or GRPOTrainer, on dp x cp ranks.

    torchrun --nproc-per-node 1 docs/howto/post_training_trl.py dpo
    torchrun --nproc-per-node 4 docs/howto/post_training_trl.py dpo --dp 2 --cp 2
    torchrun --nproc-per-node 2 docs/howto/post_training_trl.py grpo --cp 2

Losses and gradient norms are those of one process.
"""

import argparse
import functools
import os
import tempfile
import types

import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Subset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl.trainer import dpo_trainer, grpo_trainer
from trl.trainer.utils import FusedCausalLMOutput, RepeatSampler

import cpcompile as cp

WORDS = [f"w{i}" for i in range(62)] + ["<pad>", "<end>"]


def head_of_torch(model, temperature=1.0, outputs=("log_probs",), options=None, **_):
    """Score labels as TRL's fused head does, by calls of torch that are compiled.

    Without labels to score, as in generation, the model stays what it is.
    """
    forward = model.forward

    def score(labels, **inputs):
        logits = forward(**inputs, use_cache=False).logits[:, :-1].float() / temperature
        labels = labels[:, 1:]
        log_p = logits.log_softmax(-1)
        picked = log_p.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        values = {"log_probs": picked}
        if "entropy" in outputs:
            values["entropy"] = -(log_p.exp() * log_p).sum(-1)
        if "mean_logits" in outputs:
            values["mean_logits"] = logits.detach().mean(-1)
        if "is_top1" in outputs:
            values["is_top1"] = logits.argmax(-1) == labels
        return {name: x.masked_fill(labels == -100, 0) for name, x in values.items()}

    if options is not None:
        score = torch.compile(score, backend="cp", options=options)

    @functools.wraps(type(model).forward)
    def new_forward(self, *args, fused_lm_head=False, labels=None, **inputs):
        if not fused_lm_head:
            return forward(*args, labels=labels, **inputs)
        inputs.pop("use_cache", None)
        return FusedCausalLMOutput(**score(labels, **inputs))

    model.forward = types.MethodType(new_forward, model)


class SameRows:
    """Gives the ranks of one sequence the same rows; `mesh` is None on one process."""

    mesh = None

    def get_train_dataloader(self):
        args, collate = self.args, self.data_collator
        size, dataset, sampler = self.batches(self.train_dataset)
        loader = DataLoader(dataset, size, sampler=sampler, collate_fn=collate)
        # The rows are shared out, which accelerate does for one process.
        return prepare_data_loader(
            loader, args.device, num_processes=1, process_index=0, put_on_device=True
        )


class CPDPOTrainer(SameRows, DPOTrainer):
    def batches(self, rows):
        sampler = cp.same_rows(rows, self.mesh, seed=self.args.seed)
        return self._train_batch_size, rows, sampler


class CPGRPOTrainer(SameRows, GRPOTrainer):
    def batches(self, prompts):
        """All completions of a prompt are of one rank, and of those that share it."""
        prompts = Subset(prompts, list(cp.same_rows(prompts, self.mesh, shuffle=False)))
        size = self._train_batch_size * self.args.steps_per_generation
        sampler = RepeatSampler(
            prompts,
            mini_repeat_count=self.num_generations,
            batch_size=size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            seed=self.args.seed,
        )
        return size, prompts, sampler


def new_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=62,
        eos_token_id=63,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def new_tokenizer():
    """One token per word, so that nothing has to be downloaded."""
    model = WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")
    words = Tokenizer(model)
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>"
    )


def new_rows(*names):
    """Rows of some words, of different lengths."""
    generator = torch.Generator().manual_seed(1)

    def text():
        length = int(torch.randint(9, 20, (1,), generator=generator))
        words = torch.randint(62, (length,), generator=generator)
        return "".join(f" w{i}" for i in words.tolist())

    return Dataset.from_list([{name: text() for name in names} for _ in range(16)])


def reward(completion_ids, **_):
    """Prefers words of small numbers."""
    return [1 - sum(ids) / (62 * len(ids)) for ids in completion_ids]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=["dpo", "grpo"])
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--inner", default="inductor")
    args = parser.parse_args()

    config = {"dpo": DPOConfig, "grpo": GRPOConfig}[args.method]
    more = {"max_length": 48, "pad_to_multiple_of": 48}
    if args.method == "grpo":
        more = {"num_generations": 4, "max_completion_length": 16}
        more |= {"pad_to_multiple_of": 16, "num_iterations": 2}
    training = config(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=8 // args.dp,
        max_steps=args.steps,
        save_strategy="no",
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        **more,
    )  # which makes the process group, if there are several ranks
    mesh, options = None, None
    if args.dp * args.cp > 1:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        shape = (args.dp, args.cp)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "cp"))
        options = {"mesh": mesh, "inner": args.inner}
    head = functools.partial(head_of_torch, options=options)
    dpo_trainer.add_fused_lm_head = grpo_trainer.add_fused_lm_head = head
    SameRows.mesh = mesh
    common = {"args": training, "processing_class": new_tokenizer()}
    if args.method == "dpo":
        rows = new_rows("prompt", "chosen", "rejected")
        trainer = CPDPOTrainer(new_model(), new_model(), train_dataset=rows, **common)
    else:
        rows = new_rows("prompt")
        trainer = CPGRPOTrainer(new_model(), reward, train_dataset=rows, **common)
    # Ranks of one sequence sample the same tokens.
    torch.manual_seed(training.seed + (mesh.get_local_rank("dp") if mesh else 0))
    trainer.train()
    if os.environ.get("RANK", "0") == "0":
        for entry in trainer.state.log_history:
            if "loss" in entry:
                norm = entry["grad_norm"]
                print(f"step {entry['step']}: {entry['loss']:.6f} {norm:.6f}")


if __name__ == "__main__":
    main()
