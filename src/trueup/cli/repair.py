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
    reference: Annotated[
        Path | None,
        typer.Option("--reference", metavar="FILE", help="Without labels: inputs of home, .npz, to see what moved."),
    ] = None,
    labelled: Annotated[
        Path | None,
        typer.Option(
            "--labelled", metavar="FILE", help="Without labels: a few labelled samples, .npz, that choose what is kept."
        ),
    ] = None,
    entropy: Annotated[
        bool, typer.Option("--entropy", help="Without labels: also lower the entropy of the answers.")
    ] = False,
    last: Annotated[
        str | None,
        typer.Option("--last", metavar="METHOD", help="Method to try after the temperature, such as auto."),
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option("--mean", metavar="X,X,X", help="Mean by which `inputs` were made of pixels, one a channel."),
    ] = None,
    std: Annotated[
        str | None, typer.Option("--std", metavar="X,X,X", help="Standard deviation by which they were.")
    ] = None,
    no_crop: Annotated[
        bool,
        typer.Option("--no-crop", help="The network was trained without shifting images about, so do not either."),
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="N", help="Forward passes after which no input map is begun (default 70.0)."),
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
    or images and labels, which are halved at random; `inputs` instead of `images` go to the network as they are, and
    --mean and --std say how they were made of pixels.
    In Python, trueup.load_repaired(network, FILE) puts what was written around the same network.
    """
    require_output(out, ".safetensors", reads=(weights, Path(data) if data else None))
    for drawing in (figure, strip):
        if drawing is not None:
            require_output(drawing, ".png", ".pdf", ".svg")
    if page is not None:
        require_output(page, ".html")
    others = {"--temperature": temperature, "--entropy": entropy or None, "--reference": reference}
    for option, given in {**others, "--labelled": labelled}.items():
        if given is not None and not no_labels:
            raise InputError(option, "come with --no-labels", "labels that are used")
    if figure is not None and no_labels:
        raise InputError("--figure", "be left out with --no-labels", str(figure), "there is no held-out loss to draw")
    resolve.require_data(model, data)
    if not no_labels and data is not None and resolve.lacks_labels(Path(data)):
        raise InputError("--data", "have labels, or come with --no-labels", data)
    network, loaders, data = resolve.load_network_and_data(
        model, data, weights, device=device, folder=data_dir, seed=seed, batch_size=batch_size, labels=not no_labels
    )
    from torch.utils.data import DataLoader

    from trueup import clamping

    options = o.drop_unset(
        parts=part, maps=maps, temperature=temperature, entropy=entropy or None, last=last, device=device, seed=seed,
        budget=budget, normalise=_normalisation(loaders[0], data, mean, std),
    )  # fmt: skip
    if no_crop:
        options["augment"] = None
    for option, file in (("--reference", reference), ("--labelled", labelled)):
        if file is not None and data.lower().endswith(".npz"):
            kinds = [resolve.inputs_of(Path(path)) for path in (data, file)]
            if kinds[0] != kinds[1]:
                raise InputError(option, f"have {kinds[0]}, as {data} has", kinds[1])
    if reference is not None:
        options["reference"] = DataLoader(resolve.load_inputs(reference), batch_size=batch_size)
    if labelled is not None:
        options["labelled"] = DataLoader(resolve.load_labelled(labelled), batch_size=batch_size)
    if strip is not None:
        _require_images(loaders[0])
    if no_labels:
        options["labels"] = None
    with silence_warnings(enabled=quiet):
        repaired = clamping.repair(network, loaders[0], **options, progress=not quiet)
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
            report_repair(repaired, images=images, scores=scores, title=title, file=out.name).save(page)
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


def _normalisation(loader: Any, data: str, mean: str | None, std: str | None) -> Any:
    """How pixels in [0, 1] became what the network takes: images are pixels; of inputs the user may say it."""
    from torch import nn

    as_they_are = Path(data).suffix.lower() == ".npz" and resolve.inputs_of(Path(data)) == "inputs"
    if mean is None and std is None:
        first = next(iter(loader), None)
        return nn.Identity() if first is not None and first[0].ndim == 4 and not as_they_are else None
    if not as_they_are:
        raise InputError("--mean", "be left out where the network takes images as pixels in [0, 1]", str(mean or std))
    if mean is None or std is None:
        raise InputError("--mean", "come with --std", "one of them")
    return _numbers("--mean", mean), _numbers("--std", std)


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise InputError(option, "be numbers with commas between them, such as 0.49,0.48,0.45", repr(text)) from None


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
            "trueup repair mymodels:resnet --data inputs.npz --mean 0.49,0.48,0.45 --std 0.2,0.2,0.2 -o r.safetensors",
            "trueup repair run --data new_camera.npz --page repair.html -o repaired.safetensors",
        ),
    )(repair)
