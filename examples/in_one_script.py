"""Everything in one script, as in a notebook: data, model, step and optimizer live in `__main__`.

python examples/in_one_script.py

Nothing is in a module that other processes could import, and no line asks for the script's name.
Paceline sends the objects to its processes, proves on a copy that several of them train the same
as one, and uses them where they are faster. What it tried stands in legs.jsonl.
"""

# %% Data: tones in noise. Which note is it, and how loud?

import json
import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import paceline

NOTES = [220.0 * 2 ** (step / 12) for step in range(12)]
RATE, LENGTH = 4000, 512


class Tones(Dataset):
    """Made as they are asked for; the same number is always the same tone."""

    def __init__(self, count, seed, noise=0.5):
        self.count, self.seed, self.noise = count, seed, noise

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed * 1_000_000 + index)
        note = int(torch.randint(len(NOTES), (), generator=generator))
        loudness, begin = 0.5 + torch.rand(2, generator=generator)
        seconds = begin + torch.arange(LENGTH) / RATE
        wave = loudness * torch.sin(2 * math.pi * NOTES[note] * seconds)
        wave = wave + self.noise * torch.randn(LENGTH, generator=generator)
        return {"wave": wave, "note": note, "loudness": loudness}


train_part, test_part = Tones(3000, seed=1), Tones(500, seed=2)


# %% Model: a few convolutions, a recurrent layer over what they find, and two heads.


class Listener(nn.Module):
    def __init__(self, channels=32):
        super().__init__()
        self.ear = nn.Sequential(
            nn.Conv1d(1, channels, 32, stride=8, padding=12), nn.ReLU(),
            nn.Conv1d(channels, channels, 4, stride=2, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.memory = nn.GRU(channels, 48, batch_first=True)
        self.note = nn.Linear(48, len(NOTES))
        self.loudness = nn.Linear(48, 1)

    def forward(self, wave):
        heard = self.ear(wave.unsqueeze(1)).transpose(1, 2)
        remembered, _ = self.memory(heard)
        summary = remembered.mean(dim=1)
        return self.note(summary), self.loudness(summary).squeeze(1)


# %% Step: two losses added up; what else is in the dict is reported.


def step(model, batch):
    notes, loudness = model(batch["wave"])
    of_note = functional.cross_entropy(notes, batch["note"])
    of_loudness = functional.mse_loss(loudness, batch["loudness"])
    return {
        "loss": of_note + of_loudness,
        "right": (notes.argmax(dim=1) == batch["note"]).float(),
        "off": (loudness - batch["loudness"]).abs(),
    }


# %% Optimizer: a function of one's own, and a schedule that knows how long the training is.

EPOCHS = 8


def optimizer(parameters, lr):
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)


# %% Training

work = paceline.Workload(
    model=Listener,
    data=(train_part, test_part),
    step=step,
    optimizer=optimizer,
    scheduler=scheduler,
    batch_size=50,
)
result = paceline.train(
    work, epochs=EPOCHS, monitor="right:max", settings={"optimizer.learning_rate": 0.003}
)

# %% What came of it

print(f"{result.summary['best_value']:.1%} of the notes are right")
for line in (result.run / "legs.jsonl").read_text().splitlines():
    leg = json.loads(line)
    print(f"{leg['updates']:5} updates with {leg['name']}, {leg['role']}: {leg['began']}")

listener = result.model("best")
item = test_part[0]
with torch.no_grad():
    notes, loudness = listener(item["wave"].unsqueeze(0))
heard, played = NOTES[int(notes.argmax())], NOTES[item["note"]]
print(f"heard {heard:.0f} Hz of loudness {float(loudness):.2f},", end=" ")
print(f"played {played:.0f} Hz of loudness {float(item['loudness']):.2f}")
