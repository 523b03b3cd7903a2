"""A script with the Trainer of transformers: SHARES (as 3,1) OUT [--accumulate N] [--tokens]."""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
from problem import data, net
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from paceline.backends import register_mpi
from paceline.integrations.huggingface import SharesTrainer


class Regression(nn.Module):
    """A model that gives a loss, the mean over its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.net(inputs)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


def sentences() -> list[dict[str, Any]]:
    """Of different lengths: a mean of means is not their mean."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for _ in range(70):
        length = int(torch.randint(3, 12, (), generator=generator))
        words = torch.randint(0, 50, (12,), generator=generator)
        labels = torch.where(torch.arange(12) < length, words, -100)
        found.append({"input_ids": words, "labels": labels})
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shares", type=lambda text: [float(word) for word in text.split(",")])
    parser.add_argument("out")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--tokens", action="store_true")
    parser.add_argument("--backend", help="mpi4py, under mpiexec")
    options = parser.parse_args()
    if options.backend:
        register_mpi()
        torch.distributed.init_process_group(options.backend)
    torch.manual_seed(5)
    if options.tokens:
        config = LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
        model: nn.Module = LlamaForCausalLM(config)
        samples: Any = sentences()
    else:
        model = Regression()
        samples = [{"inputs": each, "labels": target} for each, target in data()]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=16 // int(os.environ.get("WORLD_SIZE", "1")),
            gradient_accumulation_steps=options.accumulate,
            num_train_epochs=2,
            learning_rate=0.05,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=3,
        )
        trainer = SharesTrainer(
            model=model, args=settings, train_dataset=samples, shares=options.shares
        )
        trainer.train()
    if trainer.is_world_process_zero():
        torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), options.out)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
