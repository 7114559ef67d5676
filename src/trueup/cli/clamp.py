"""The verb of Neural Clamping: clamp."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trueup.cli import options as o
from trueup.cli import resolve
from trueup.cli.evaluate import print_scores
from trueup.cli.output import print_json, print_remarks, require_output
from trueup.core.errors import silence_warnings

BATCH_SIZE = 128


def clamp(
    model: o.Model,
    out: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="File of the shift and the temperature, .safetensors."),
    ],
    data: o.Data = None,
    weights: o.Weights = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="NAME", help="How to fit (default subspace).")
    ] = None,
    loss: Annotated[
        str | None, typer.Option("--loss", metavar="ce|focal", help="Loss to minimise (default ce).")
    ] = None,
    gamma: Annotated[
        list[float] | None,
        typer.Option(
            "--gamma", metavar="X", help="γ of the focal loss; may be repeated, then the γ of the least ECE is chosen."
        ),
    ] = None,
    penalty: Annotated[
        str | None,
        typer.Option("--penalty", metavar="X|auto|R1|R2", help="Weight of the penalty on the shift (default auto)."),
    ] = None,
    input_map: Annotated[
        str | None,
        typer.Option("--input-map", metavar="shift|affine", help="Map of the inputs (default shift)."),
    ] = None,
    box: Annotated[
        tuple[float, float] | None,
        typer.Option("--box", metavar="LOW HIGH", help="Range that shifted inputs are clipped to."),
    ] = None,
    batch_size: o.BatchSize = BATCH_SIZE,
    device: o.Device = None,
    data_dir: o.DataFolder = None,
    seed: o.Seed = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Neural Clamping: fit a shift of the input and a temperature to a trained network, whose weights do not change.

    The fit is to the validation part of the data, and the table shows its test part. The network takes images as
    pixels in [0, 1]. A .npz file has val_images, val_labels, test_images and test_labels, or images and labels, which
    are halved at random; `inputs` instead of `images` go to the network as they are.
    """
    require_output(out, ".safetensors", reads=(weights, Path(data) if data else None))
    resolve.require_data(model, data)
    network, loaders, data = resolve.load_network_and_data(
        model, data, weights, device=device, folder=data_dir, seed=seed, batch_size=batch_size
    )
    from trueup import clamping

    if recipe is not None:
        o.require_name("recipe", clamping.RECIPES, recipe)
    options = o.drop_unset(
        recipe=recipe, loss=loss, gamma=gamma and (gamma[0] if len(gamma) == 1 else gamma),
        penalty=_number_or_name(penalty), input_map=input_map, box=box, device=device, seed=seed,
    )  # fmt: skip
    with silence_warnings(enabled=quiet):
        clamped = clamping.clamp(network, loaders[0], **options, progress=not quiet)
        clamping.save_clamped(clamped, out)
        scores = compare_networks(network, {"clamping": clamped}, loaders, not quiet)
    record = clamped.fit_record
    if as_json:
        print_json(
            "clamp", model=model, data=data, output=out, verdict=record.verdict, record=asdict(record),
            scores=scores.to_dict(),
        )  # fmt: skip
        return
    if quiet:
        return
    print_scores(scores)
    verdict = f"Did the input map earn its place? {record.verdict}"
    print_remarks(verdict, f"T = {record.temperature:.4f}, ‖δ‖ = {record.delta_norm:.4f}", f"Written: {out}")


def compare_networks(network: Any, others: dict[str, Any], loaders: list[Any], progress: bool) -> Any:
    """Scores of a network on the test part: raw, with a temperature, and those of networks made of it."""
    from trueup.io.predictions import Predictions
    from trueup.metrics.table import compare
    from trueup.models.calibrated import collect
    from trueup.registry import METHODS

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


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command(
        rich_help_panel="Networks",
        epilog=o.format_examples(
            "trueup clamp mymodels:resnet --weights resnet.safetensors --data cifar10 -o clamped.safetensors",
            "trueup clamp mymodels:resnet --data images.npz --box 0 1 -o clamped.safetensors",
            "trueup clamp run -o run/clamped.safetensors",
        ),
    )(clamp)
