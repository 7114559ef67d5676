"""The verb of Neural Clamping: clamp."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from trueup._core.errors import silence_warnings
from trueup.cli import options as o
from trueup.cli import resolve
from trueup.cli.output import print_json, print_remarks, print_scores, require_output


@dataclass(frozen=True)
class NetworkData:
    """A live network and its data."""

    model: str = o.argument("MODEL", "package.module:make_model, or a folder that `trueup train` wrote.")
    data: str | None = o.option(
        "FILE|FOLDER",
        "A .npz file of images or inputs, and labels; or a folder of images, with one folder per class. With "
        "trueup-studies also the name of a data set (default: that of the `train` folder).",
    )
    weights: Path | None = o.option("FILE", "Weights of the network, .safetensors or .pt.")
    batch_size: int = o.option("N", "Rows in a batch.", default=128)
    device: str | None = o.option("NAME", "Device of the network, such as cuda.")
    data_dir: Path | None = o.option("FOLDER", "Folder of the data sets (default $TRUEUP_DATA).")
    seed: int | None = o.option("N", "Random seed (default 0).")

    @property
    def files(self) -> tuple[Path | None, ...]:
        """The files that are read, none of which may be written."""
        return self.weights, Path(self.data) if self.data else None

    def load(self, *, labels: bool = True) -> tuple[Any, list[Any], str]:
        """The network, loaders of the validation and test parts, and the name of the data."""
        resolve.require_data(self.model, self.data)
        options: dict[str, Any] = {"device": self.device, "folder": self.data_dir, "seed": self.seed}
        options |= {"batch_size": self.batch_size, "labels": labels}
        return resolve.load_network_and_data(self.model, self.data, self.weights, **options)


@dataclass(frozen=True)
class Recipe:
    """How the shift is fitted."""

    recipe: str | None = o.option("NAME", "How to fit (default subspace).")
    loss: str | None = o.option("ce|focal", "Loss to minimise (default ce).")
    gamma: list[float] | None = o.option(
        "X", "γ of the focal loss; may be repeated, then the γ of the least ECE is chosen."
    )
    penalty: str | None = o.option("X|auto|R1|R2", "Weight of the penalty on the shift (default auto).")
    input_map: str | None = o.option("shift|affine", "Map of the inputs (default shift).")
    box: tuple[float, float] | None = o.option("LOW HIGH", "Range that shifted inputs are clipped to.")


def clamp(
    out: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="File of the shift and the temperature, .safetensors."),
    ],
    *,
    source: NetworkData,
    recipe: Recipe,
    output: o.Output,
) -> None:
    """Neural Clamping: fit a shift of the input and a temperature to a trained network, whose weights do not change.

    The fit is to the validation part of the data, and the table shows its test part. The network takes images as
    pixels in [0, 1]. A .npz file has val_images, val_labels, test_images and test_labels, or images and labels, which
    are halved at random; `inputs` instead of `images` go to the network as they are.
    """
    require_output(out, ".safetensors", reads=source.files)
    network, loaders, data = source.load()
    from trueup import clamping
    from trueup.io.load_save import save

    if recipe.recipe is not None:
        o.require_name("recipe", clamping.RECIPES, recipe.recipe)
    gamma = recipe.gamma
    gamma_or_pool = gamma[0] if gamma and len(gamma) == 1 else gamma
    objective = o.drop_unset(loss=recipe.loss, gamma=gamma_or_pool, penalty=_number_or_name(recipe.penalty))
    options = o.set_options(recipe, "recipe") | o.set_options(source, "device", "seed")
    options["objective"] = clamping.Objective(**objective)
    options["input_map"] = clamping.MapOptions(**o.drop_unset(kind=recipe.input_map, box=recipe.box))
    with silence_warnings(enabled=output.quiet):
        clamped = clamping.clamp(network, loaders[0], **options, progress=not output.quiet)
        save(clamped, out)
        scores = compare_networks(network, {"clamping": clamped}, loaders, not output.quiet)
    record = clamped.fit_record
    if output.as_json:
        print_json(
            "clamp", model=source.model, data=data, output=out, verdict=record.verdict, record=asdict(record),
            scores=scores.to_dict(),
        )  # fmt: skip
        return
    if output.quiet:
        return
    print_scores(scores)
    verdict = f"Did the input map earn its place? {record.verdict}"
    print_remarks(verdict, f"T = {record.temperature:.4f}, ‖δ‖ = {record.delta_norm:.4f}", f"Written: {out}")


def compare_networks(network: Any, others: dict[str, Any], loaders: list[Any], progress: bool) -> Any:
    """Scores of a network on the test part: raw, with a temperature, and those of networks made of it."""
    from trueup._core.registry import METHODS
    from trueup.io.predictions import Predictions
    from trueup.metrics.table import compare
    from trueup.models.calibrated import collect

    val, test = (collect(network, loader, progress=progress) for loader in loaders)
    temperature = METHODS["temperature"](*val)
    after = {name: collect(other, loaders[1], progress=progress) for name, other in others.items()}
    scaled = Predictions(temperature(test.logits), test.labels)
    metrics = ("accuracy", "nll", "brier", "ece", "aece", "sce", "confidence")
    return compare({"raw": test, "temperature": scaled, **after}, metrics=metrics)


def _number_or_name(text: str | None) -> Any:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


EXAMPLES = (
    "trueup clamp mymodels:resnet --weights resnet.safetensors --data cifar10 -o clamped.safetensors",
    "trueup clamp mymodels:resnet --data images.npz --box 0 1 -o clamped.safetensors",
    "trueup clamp run -o run/clamped.safetensors",
)
register = o.commands((clamp, "Networks", EXAMPLES))
