"""The verb of input repair: repair."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trueup.cli import options as o
from trueup.cli import resolve
from trueup.cli.clamp import BATCH_SIZE, compare_networks
from trueup.cli.evaluate import print_scores
from trueup.cli.output import print_json, print_remarks, require_output
from trueup.core.errors import InputError, silence_warnings


def repair(
    model: o.Model,
    out: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="File of the map and what else changed, .safetensors."),
    ],
    data: o.Data = None,
    weights: o.Weights = None,
    part: Annotated[
        list[str] | None,
        typer.Option("--part", metavar="NAME", help="Repair only this: input, batch_norm or head; may be repeated."),
    ] = None,
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="NAME",
            help="Try only this family of input maps, such as affine, gamma, colour or kernel; may be repeated. "
            "A name that is none lists them all.",
        ),
    ] = None,
    no_labels: Annotated[
        bool,
        typer.Option(
            "--no-labels",
            help="Do not use the labels, but the network as its own teacher; the file may then have none.",
        ),
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", metavar="X", help="Without labels: the temperature fitted at home (default 1.0)."
        ),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", metavar="FILE", help="Draw the ladder: .png, .pdf or .svg.")
    ] = None,
    strip: Annotated[
        Path | None,
        typer.Option("--strip", metavar="FILE", help="Draw some images before and after the map: .png, .pdf or .svg."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--page", metavar="FILE", help="Write a page of verdict, images and ladder, .html."),
    ] = None,
    entropy: Annotated[
        bool, typer.Option("--entropy", help="Without labels: also lower the entropy of the answers.")
    ] = False,
    last: Annotated[
        str | None,
        typer.Option("--last", metavar="METHOD", help="Method to try after the temperature, such as auto."),
    ] = None,
    batch_size: o.BatchSize = BATCH_SIZE,
    device: o.Device = None,
    data_dir: o.DataFolder = None,
    seed: o.Seed = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Repair a trained network under a new camera: an input map, batch-norm statistics, the last layer, a temperature.

    The weights on disk do not change. The fit is to the validation part of the data, and the table shows its test part.
    The network takes images as pixels in [0, 1]. A .npz file has val_images, val_labels, test_images and test_labels,
    or images and labels, which are halved at random; `inputs` instead of `images` go to the network as they are.
    In Python, trueup.load_repaired(network, FILE) puts what was written around the same network.
    """
    require_output(out, ".safetensors", reads=(weights, Path(data) if data else None))
    for drawing in (figure, strip):
        if drawing is not None:
            require_output(drawing, ".png", ".pdf", ".svg")
    if page is not None:
        require_output(page, ".html")
    for option, given in (("--temperature", temperature is not None), ("--entropy", entropy)):
        if given and not no_labels:
            raise InputError(option, "come with --no-labels", "labels that are used")
    if figure is not None and no_labels:
        raise InputError("--figure", "be left out with --no-labels", str(figure), "there is no held-out loss to draw")
    resolve.require_data(model, data)
    network, loaders, data = resolve.load_network_and_data(
        model, data, weights, device=device, folder=data_dir, seed=seed, batch_size=batch_size, labels=not no_labels
    )
    from trueup import clamping

    options = o.drop_unset(
        parts=part, maps=maps, temperature=temperature, entropy=entropy or None, last=last, device=device, seed=seed
    )
    if strip is not None:
        _require_images(loaders[0])
    if no_labels:
        options["labels"] = None
    with silence_warnings(enabled=quiet):
        repaired = clamping.repair(network, loaders[0], normalise=_pixels(loaders[0]), **options, progress=not quiet)
        clamping.save_repaired(repaired, out)
        if figure is not None:
            from trueup.report.repair_figures import save_ladder

            save_ladder(repaired.repair_record, figure)
        if strip is not None:
            from trueup.report.repair_figures import save_inputs

            save_inputs(repaired, next(iter(loaders[0]))[0], strip)
        tested = len(loaders) > 1  # where there are no labels, nothing can be scored
        scores = compare_networks(network, {"repair": repaired}, loaders, not quiet) if tested else None
        if page is not None:
            from trueup.report.repair_page import report_repair

            images, title = next(iter(loaders[0]))[0], f"Repair of {model}"
            report_repair(repaired, images=images, scores=scores, title=title).save(page)
    record = repaired.repair_record
    if as_json:
        print_json(
            "repair", model=model, data=data, output=out, verdict=record.verdict, record=asdict(record),
            scores=None if scores is None else scores.to_dict(),
        )  # fmt: skip
        return
    if quiet:
        return
    if scores is not None:
        print_scores(scores)
    notes = tuple(f"{note[:1].upper()}{note[1:]}." for note in record.notes)
    cost = f"T = {record.temperature:.4f}; it took as long as {record.equivalents:.0f} forward passes."
    drawn = tuple(f"Written: {file}" for file in (figure, strip, page) if file is not None)
    print_remarks(f"Was there anything to repair? {record.verdict}", *notes, cost, *drawn, f"Written: {out}")


def _pixels(loader: Any) -> Any:
    """Images come as pixels in [0, 1]; of other inputs the range is not known."""
    from torch import nn

    first = next(iter(loader), None)
    return nn.Identity() if first is not None and first[0].ndim == 4 else None


def _require_images(loader: Any) -> None:
    first = next(iter(loader), None)
    if first is None or first[0].ndim != 4:
        raise InputError("--strip", "be left out where inputs are no images", "inputs of another shape")


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command(
        rich_help_panel="Networks",
        epilog=o.format_examples(
            "trueup repair mymodels:resnet --weights resnet.safetensors --data new_camera.npz -o repaired.safetensors",
            "trueup repair mymodels:resnet --data new_camera.npz --no-labels --temperature 1.7 -o repaired.safetensors",
            "trueup repair run --data new_camera.npz --page repair.html -o repaired.safetensors",
        ),
    )(repair)
