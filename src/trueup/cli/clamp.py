"""The verb that repairs a live network: clamp."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trueup.cli import options as o
from trueup.cli import resolve as made
from trueup.cli.errors import silence_warnings
from trueup.cli.evaluate import print_scores
from trueup.cli.files import output
from trueup.cli.output import print_json, print_remarks

CLAMP = "trueup.clamping.fit:clamp"
TRAIN = "trueup.training.loop:train"


def clamp(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="package.module:make_model, or a folder that `trueup train` wrote.")
    ],
    out: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The shift and temperature, .safetensors.")
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="NAME|FILE",
            help="A data set, or a .npz of images or inputs, and labels (default train's).",
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="FILE", help="The network's weights, .safetensors or .pt.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="NAME", help=o.help_of("How to fit", CLAMP, "recipe"))
    ] = None,
    loss: Annotated[
        str | None, typer.Option("--loss", metavar="ce|focal", help=o.help_of("What to minimise", CLAMP, "loss"))
    ] = None,
    gamma: Annotated[
        list[float] | None,
        typer.Option("--gamma", metavar="X", help="Focal γ; of several the one of least ECE is kept."),
    ] = None,
    penalty: Annotated[
        str | None,
        typer.Option(
            "--penalty", metavar="X|auto|R1|R2", help=o.help_of("Weight of the penalty on the shift", CLAMP, "penalty")
        ),
    ] = None,
    input_map: Annotated[
        str | None,
        typer.Option(
            "--input-map", metavar="shift|affine", help=o.help_of("What is done to inputs", CLAMP, "input_map")
        ),
    ] = None,
    box: Annotated[
        tuple[float, float] | None, typer.Option("--box", metavar="LOW HIGH", help="The range shifted inputs stay in.")
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size", metavar="N", help=o.help_of("Rows at a time", TRAIN, "batch_size"), show_default=False
        ),
    ] = 0,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="Where the network runs, such as cuda.")
    ] = None,
    data_dir: o.DataFolder = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help=o.help_of("Seed", CLAMP, "seed"))] = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Neural Clamping: fit a shift of the input and a temperature to a trained network, which stays as it is.

    The validation part of the data is fitted to, and the table is of its test part. The network takes images as
    pixels in [0, 1]. A .npz file has val_images, val_labels, test_images and test_labels, or images and labels, which
    are halved at random; `inputs` instead of `images` go to the network as they are.
    """
    output(out, ".safetensors", reads=(weights, Path(data) if data else None))
    reading = Path(model) / made.RUN
    if data is None and not reading.is_file():
        raise ValueError("--data must name a data set or a .npz file")
    network = made.model_at(model)
    if weights is not None:
        network = made.with_weights(network, weights)
    run: dict[str, Any] = made.run_in(Path(model)) if data is None else {"data": data, "seed": seed}
    parts = made.val_and_test(run["data"], data_dir, run["seed"] or 0)
    from trueup.clamping import RECIPES, save_clamped
    from trueup.clamping import clamp as clamped_by

    if recipe is not None:
        o.known("recipe", RECIPES, recipe)
    options = o.given(
        recipe=recipe, loss=loss, gamma=gamma and (gamma[0] if len(gamma) == 1 else gamma),
        penalty=_number_or_name(penalty), input_map=input_map, box=box, device=device, seed=seed,
    )  # fmt: skip
    network = network if device is None else network.to(device)
    loaders = [_loader(part, batch_size) for part in parts]
    with silence_warnings(quiet):
        clamped = clamped_by(network, loaders[0], **options, progress=not quiet)
        save_clamped(clamped, out)
        scores = _before_and_after(network, clamped, loaders, not quiet)
    record = clamped.fit_record
    if as_json:
        print_json(
            "clamp", model=model, data=run["data"], output=out, verdict=record.verdict, record=asdict(record),
            scores=scores.to_dict(),
        )  # fmt: skip
        return
    if quiet:
        return
    print_scores(scores)
    earned = f"Did the input map earn its place? {record.verdict}"
    print_remarks(earned, f"T = {record.temperature:.4f}, ‖δ‖ = {record.delta_norm:.4f}", f"Written: {out}")


def _before_and_after(network: Any, clamped: Any, loaders: list[Any], progress: bool) -> Any:
    from trueup.io.predictions import Predictions
    from trueup.metrics.table import compare
    from trueup.models.calibrated import collect
    from trueup.registry import METHODS

    val, test = (collect(network, loader, progress=progress) for loader in loaders)
    temperature = METHODS["temperature"](*val)
    after = collect(clamped, loaders[1], progress=progress)
    alone = Predictions(temperature(test.logits), test.labels)
    shown = ("accuracy", "nll", "brier", "ece", "aece", "sce", "confidence")
    return compare({"raw": test, "temperature": alone, "clamping": after}, metrics=shown)


def _loader(part: Any, batch_size: int) -> Any:
    import inspect

    from torch.utils.data import DataLoader

    from trueup.training.loop import train

    return DataLoader(part, batch_size=batch_size or inspect.signature(train).parameters["batch_size"].default)


def _number_or_name(text: str | None) -> Any:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(
        rich_help_panel="Networks",
        epilog=o.examples(
            "trueup clamp mymodels:resnet --weights resnet.safetensors --data cifar10 -o clamped.safetensors",
            "trueup clamp mymodels:resnet --data images.npz --box 0 1 -o clamped.safetensors",
            "trueup clamp run -o run/clamped.safetensors",
        ),
    )(clamp)
