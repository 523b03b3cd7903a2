"""What a trained model takes and what its answers mean; saved with every checkpoint. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """How a picture becomes an input: the centre square, scaled to `size`, normalised."""

    size: int
    """Height and width in pixels."""
    channels: int
    """1 for grey, 3 for colour."""
    mean: tuple[float, ...]
    """Per channel, of pixels from 0 to 1."""
    deviation: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One input of the model, and the names of what it tells apart."""

    shape: tuple[int, ...]
    """Of one sample, without the batch."""
    dtype: str = "float32"
    classes: tuple[str, ...] = ()
    """Empty where the data does not tell."""
    pictures: Pictures | None = None
    """None: the preprocessing is the user's own, and inputs come as the model takes them."""
    data: str = ""
    """The data set that it was trained on."""

    def label(self, number: int) -> str:
        """The name of a class; its number where it has none."""
        return self.classes[number] if number < len(self.classes) else str(number)
