"""The names of the images that tests give to our charts, which have no default for them."""

from collections.abc import Sequence
from pathlib import Path

_FOLDER = Path(__file__).parent


def with_images(arguments: Sequence[str | Path]) -> list[str | Path]:
    """Return helm's arguments. If they name one of our charts, its images come first, so that every other
    value goes before them.
    """
    for n, argument in enumerate(arguments):
        values = _FOLDER / f"{Path(argument).name}.yaml"
        if values.exists() and (Path(argument) / "Chart.yaml").exists():
            return [*arguments[: n + 1], "--values", values, *arguments[n + 1 :]]
    return [*arguments]
