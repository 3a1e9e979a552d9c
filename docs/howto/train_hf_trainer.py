"""Train a small Llama with transformers' Trainer, on dp x cp ranks.

    torchrun --nproc-per-node 1 docs/howto/train_hf_trainer.py
    torchrun --nproc-per-node 4 docs/howto/train_hf_trainer.py --dp 2 --cp 2

Losses are those of one process, also where rows have different numbers of labels.
--resume continues from the last checkpoint in --out, --evaluate evaluates every second
step.
"""

import argparse
import os

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import cpcompile as cp


class CPTrainer(Trainer):
    """The Trainer, whose loaders give the ranks of one sequence the same rows."""

    mesh = None

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        return self.same_rows(loader, self.args.train_batch_size, shuffle=True)

    def get_eval_dataloader(self, eval_dataset=None):
        loader = super().get_eval_dataloader(eval_dataset)
        return self.same_rows(loader, self.args.eval_batch_size, shuffle=False)

    def evaluation_loop(self, *args, **kwargs):
        self.gather_function = self.gather_rows
        return super().evaluation_loop(*args, **kwargs)

    def gather_rows(self, results):
        """Gather the results for each row once, in the order of the dataset."""
        results = self.accelerator.gather(results)
        if self.mesh is None:
            return results

        def once(x):  # of the first of those ranks that share a sequence
            x = x.unflatten(0, (*self.mesh.shape, -1))[:, 0]
            return x.transpose(0, 1).flatten(0, 1)

        return recursively_apply(once, results)

    def same_rows(self, loader, batch_size, shuffle):
        seed, collate = self.args.seed, loader.collate_fn
        sampler = cp.same_rows(loader.dataset, self.mesh, shuffle=shuffle, seed=seed)
        loader = DataLoader(
            loader.dataset, batch_size, sampler=sampler, collate_fn=collate
        )
        # The sampler has shared the rows out, which accelerate does for one process.
        return prepare_data_loader(
            loader,
            self.args.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
        )


def new_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def new_rows(count, tokens):
    """Make rows of a prompt, which has no labels, and an answer, which may be empty."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(64, (count, tokens), generator=generator)
    labels = rows.clone()
    for number, row in enumerate(labels):
        row[: 16 * number % (tokens + 1)] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(rows, labels, strict=True)]


def metrics(found):
    """Count rows, labels, and tokens that are predicted."""
    labels, logits = found.label_ids[:, 1:], found.predictions[:, :-1]
    right = (logits.argmax(-1) == labels) & (labels != -100)
    counts = {
        "rows": len(labels),
        "labels": (labels != -100).sum(),
        "right": right.sum(),
    }
    return {name: int(count) for name, count in counts.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--out", default="out")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    args = parser.parse_args()

    training = TrainingArguments(
        output_dir=args.out,
        per_device_train_batch_size=4 // args.dp,
        per_device_eval_batch_size=4 // args.dp,
        gradient_accumulation_steps=2,
        max_steps=args.steps,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        eval_strategy="steps" if args.evaluate else "no",
        eval_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )  # which makes the process group, if there are several ranks
    model = new_model()
    mesh = None
    if args.dp * args.cp > 1:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        shape = (args.dp, args.cp)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "cp"))
        model.compile(backend="cp", options={"mesh": mesh, "inner": args.inner})
    CPTrainer.mesh = mesh
    trainer = CPTrainer(
        model=model,
        args=training,
        train_dataset=new_rows(32, args.tokens),
        eval_dataset=new_rows(8, args.tokens - 11),
        compute_metrics=metrics,
    )
    trainer.train(resume_from_checkpoint=args.resume)
    if os.environ.get("RANK", "0") == "0":
        for entry in trainer.state.log_history:
            if "loss" in entry:
                norm = entry["grad_norm"]
                print(f"step {entry['step']}: {entry['loss']:.6f} {norm:.6f}")
            elif "eval_loss" in entry:
                counts = [entry[f"eval_{x}"] for x in ("rows", "labels", "right")]
                print(f"evaluation {entry['step']}: {entry['eval_loss']:.6f}", *counts)


if __name__ == "__main__":
    main()
