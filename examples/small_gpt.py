"""A small GPT on the bytes of Python's own standard library, which every machine has.

python examples/small_gpt.py
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import paceline

CONTEXT, WIDTH, LAYERS = 64, 64, 2
MODULES = ("argparse", "ast", "dataclasses", "inspect", "pathlib", "statistics", "typing")


class Text(Dataset):
    """Pieces of CONTEXT bytes, each with the byte that follows every one of them."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join((folder / f"{name}.py").read_bytes() for name in modules)
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.bytes[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return {"bytes": piece[:-1], "next": piece[1:]}


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        hidden = self.bytes(text) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    outputs, following = model(batch["bytes"]).flatten(0, 1), batch["next"].flatten()
    return {
        "loss": functional.cross_entropy(outputs, following),
        "weight": following.numel(),
        "accuracy": (outputs.argmax(dim=1) == following).sum(),
    }


if __name__ == "__main__":
    result = paceline.train(
        paceline.Workload(
            model=GPT,
            data=(Text(MODULES), Text(("fractions",))),
            step=step,
            optimizer="adamw",
            batch_size=32,
            unit="bytes",
        ),
        epochs=2,
        monitor="loss:min",
    )
    model = result.model("best")
    text = b"def "
    for _ in range(80):
        seen = torch.tensor([list(text[-CONTEXT:])])
        text += bytes([int(model(seen)[0, -1].argmax())])
    print(text.decode(errors="replace"))
