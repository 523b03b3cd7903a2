"""The Trainer of transformers on all cores: a small Llama learns to count, tokens weighed exactly.

pip install 'paceline[huggingface]'
paceline run examples/hf_trainer.py
"""

import os
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from paceline.integrations.huggingface import SharesTrainer

WORDS, BATCH = 32, 32
IGNORED = -100


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """n, n + 1, n + 2, ... in sentences of different lengths."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        length = 4 + number % 9
        words = (number * 7 + torch.arange(length)) % WORDS
        return {"input_ids": words, "labels": words}


def padded(sentences: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    words = [each["input_ids"] for each in sentences]
    return {
        "input_ids": pad(words, batch_first=True),
        "attention_mask": pad([torch.ones_like(each) for each in words], batch_first=True),
        "labels": pad(words, batch_first=True, padding_value=IGNORED),
    }


def main() -> None:
    set_seed(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_attention_heads=4, **shape))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            # transformers counts per rank; the global batch is BATCH, however many there are.
            per_device_train_batch_size=BATCH // ranks,
            num_train_epochs=6,
            learning_rate=0.01,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = SharesTrainer(
            model=model, args=arguments, train_dataset=Counting(), data_collator=padded
        )
        trainer.train()
    if trainer.is_world_process_zero():
        model.eval()
        start = torch.tensor([[5, 6, 7]])
        found = model.generate(start, max_new_tokens=5, do_sample=False, pad_token_id=0)
        print(f"{ranks} ranks: after 5, 6, 7 come {found[0, 3:].tolist()}")


if __name__ == "__main__":
    main()
