"""Train a small Llama with TRL's SFTTrainer, on dp x cp ranks.

    torchrun --nproc-per-node 1 docs/howto/train_trl.py
    torchrun --nproc-per-node 4 docs/howto/train_trl.py --dp 2 --cp 2

Losses are those of one process.
"""

import argparse
import os
import tempfile

import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import cpcompile as cp

WORDS = [f"w{i}" for i in range(62)] + ["<pad>", "<end>"]


class CPTrainer(SFTTrainer):
    """The trainer, whose loaders give the ranks of one sequence the same rows."""

    mesh = None

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        return self.same_rows(loader, self.args.train_batch_size, shuffle=True)

    def get_eval_dataloader(self, eval_dataset=None):
        loader = super().get_eval_dataloader(eval_dataset)
        return self.same_rows(loader, self.args.eval_batch_size, shuffle=False)

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
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        pad_token_id=62,
        eos_token_id=63,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def new_tokenizer():
    """One token per word, so that nothing has to be downloaded."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>"
    )


def new_rows(tokens):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(62, (32, tokens), generator=generator)
    return Dataset.from_list([{"input_ids": row} for row in rows.tolist()])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--inner", default="inductor")
    args = parser.parse_args()

    training = SFTConfig(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=4 // args.dp,
        max_steps=args.steps,
        max_length=args.tokens,
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
        train_dataset=new_rows(args.tokens),
        processing_class=new_tokenizer(),
    )
    trainer.train()
    if os.environ.get("RANK", "0") == "0":
        for entry in trainer.state.log_history:
            if "loss" in entry:
                norm = entry["grad_norm"]
                print(f"step {entry['step']}: {entry['loss']:.6f} {norm:.6f}")


if __name__ == "__main__":
    main()
