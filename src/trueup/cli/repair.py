"""The verb of input repair: repair."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from trueup._core.errors import InputError, silence_warnings
from trueup.cli import options as o
from trueup.cli import resolve
from trueup.cli.clamp import NetworkData, compare_networks
from trueup.cli.output import print_json, print_remarks, print_scores, require_output


@dataclass(frozen=True)
class Search:
    """Which repairs are tried."""

    parts: list[str] | None = o.option(
        "NAME", "Repair only this: input, batch_norm or head; may be repeated.", "--part"
    )
    maps: list[str] | None = o.option(
        "NAME",
        "Try only this family of input maps, such as affine, gamma, colour or kernel; may be repeated. "
        "A name that is none lists them all.",
        "--map",
    )
    method: str | None = o.option("METHOD", "Method to try after the temperature, such as auto.", "--method", "-m")
    mean: str | None = o.option("X,X,X", "Mean by which `inputs` were made of pixels, one per channel.")
    std: str | None = o.option("X,X,X", "Standard deviation by which they were.")
    no_crop: bool = o.switch("The network was trained without shifting images about, so do not either.")
    budget: float | None = o.option("N", "Forward passes after which no input map is begun (default 70.0).")


@dataclass(frozen=True)
class Unlabelled:
    """Repair without labels."""

    no_labels: bool = o.switch(
        "Do not use the labels, but the network as its own teacher; the file may then have none."
    )
    temperature: float | None = o.option("X", "Without labels: the temperature fitted at home (default 1.0).")
    entropy: bool = o.switch("Without labels: also lower the entropy of the predictions.")
    reference: Path | None = o.option("FILE", "Without labels: inputs of home, .npz, to see what moved.")
    labelled: Path | None = o.option("FILE", "Without labels: a few labelled samples, .npz, that choose what is kept.")


@dataclass(frozen=True)
class Drawings:
    """Files that show the repair."""

    figure: Path | None = o.option("FILE", "Draw the steps that were tried: .png, .pdf or .svg.")
    strip: Path | None = o.option("FILE", "Draw some images before and after the map: .png, .pdf or .svg.")
    page: Path | None = o.option("FILE", "Write a page of verdict, images and steps, .html.")


def repair(
    out: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="File of the map and what else changed, .safetensors."),
    ],
    *,
    source: NetworkData,
    search: Search,
    unlabelled: Unlabelled,
    drawings: Drawings,
    output: o.Output,
) -> None:
    """Repair a trained network under a new camera: an input map, batch-norm statistics, the last layer, a temperature.

    The weights on disk do not change. The fit is to the validation part of the data, and the table shows its test part.
    The network takes images as pixels in [0, 1]. A .npz file has val_images, val_labels, test_images and test_labels,
    or images and labels, which are halved at random; `inputs` instead of `images` go to the network as they are, and
    --mean and --std say how they were made of pixels.
    In Python, trueup.load(FILE, model=network) puts what was written around the same network.
    """
    require_output(out, ".safetensors", reads=source.files)
    for drawing in (drawings.figure, drawings.strip):
        if drawing is not None:
            require_output(drawing, ".png", ".pdf", ".svg")
    if drawings.page is not None:
        require_output(drawings.page, ".html")
    no_labels = unlabelled.no_labels
    for name, value in o.set_options(unlabelled).items():
        if value is not False and not no_labels:
            raise InputError(o.flag_of(unlabelled, name), "come with --no-labels", "labels that are used")
    if search.method is not None and no_labels:
        raise InputError("--method", "be left out with --no-labels", search.method, "a method is fitted to labels")
    if drawings.figure is not None and no_labels:
        why = "there is no held-out loss to draw"
        raise InputError("--figure", "be left out with --no-labels", str(drawings.figure), why)
    resolve.require_data(source.model, source.data)
    if not no_labels and source.data is not None and resolve.lacks_labels(Path(source.data)):
        raise InputError("--data", "have labels, or come with --no-labels", source.data)
    network, loaders, data = source.load(labels=not no_labels)
    from torch.utils.data import DataLoader

    from trueup import adaptation
    from trueup.io.load_save import save

    options = o.set_options(search, "parts", "maps", "budget") | o.set_options(source, "device")
    options |= o.set_options(unlabelled, "temperature", "entropy") if no_labels else {}
    if search.no_crop:
        options["augment"] = None
    normalise = _normalisation(loaders[0], data, search.mean, search.std)
    arguments = o.set_options(source, "seed") | o.drop_unset(method=search.method, normalise=normalise)
    for name, load in (("reference", resolve.load_inputs), ("labelled", resolve.load_labelled)):
        if (file := getattr(unlabelled, name)) is None:
            continue
        if data.lower().endswith(".npz"):
            kinds = [resolve.inputs_of(Path(path)) for path in (data, file)]
            if kinds[0] != kinds[1]:
                raise InputError(f"--{name}", f"have {kinds[0]}, as {data} has", kinds[1])
        arguments[name] = DataLoader(load(file), batch_size=source.batch_size)
    if drawings.strip is not None:
        _require_images(loaders[0])
    with silence_warnings(enabled=output.quiet):
        arguments |= {"progress": not output.quiet}
        if no_labels:
            adapted = adaptation.AdaptOptions(**options)
            repaired = adaptation.adapt(network, loaders[0], **arguments, options=adapted)
        else:
            repaired = adaptation.repair(network, loaders[0], **arguments, options=adaptation.RepairOptions(**options))
        save(repaired, out)
        tested = len(loaders) > 1  # where there are no labels, nothing can be scored
        scores = compare_networks(network, {"repair": repaired}, loaders, not output.quiet) if tested else None
        _draw(drawings, repaired, next(iter(loaders[0]))[0], scores, title=f"Repair of {source.model}", file=out.name)
    record = repaired.repair_record
    if output.as_json:
        print_json(
            "repair", model=source.model, data=data, output=out, verdict=record.verdict, record=asdict(record),
            scores=None if scores is None else scores.to_dict(),
        )  # fmt: skip
        return
    if output.quiet:
        return
    if scores is not None:
        print_scores(scores)
    notes = tuple(f"{note[:1].upper()}{note[1:]}." for note in record.notes)
    cost = f"T = {record.temperature:.4f}; it took as long as {record.equivalents:.0f} forward passes."
    drawn = tuple(f"Written: {file}" for file in o.set_options(drawings).values())
    print_remarks(f"Was there anything to repair? {record.verdict}", *notes, cost, *drawn, f"Written: {out}")


def _draw(drawings: Drawings, repaired: Any, images: Any, scores: Any, **labels: str) -> None:
    from trueup.adaptation.report import report_repair, save_inputs, save_steps

    if drawings.figure is not None:
        save_steps(repaired.repair_record, drawings.figure)
    if drawings.strip is not None:
        save_inputs(repaired, images, drawings.strip)
    if drawings.page is not None:
        report_repair(repaired, images=images, scores=scores, **labels).save(drawings.page)


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


EXAMPLES = (
    "trueup repair mymodels:resnet --weights resnet.safetensors --data new_camera.npz -o repaired.safetensors",
    "trueup repair mymodels:resnet --data new_camera.npz --no-labels --temperature 1.7 -o repaired.safetensors",
    "trueup repair mymodels:resnet --data inputs.npz --mean 0.49,0.48,0.45 --std 0.2,0.2,0.2 -o r.safetensors",
    "trueup repair run --data new_camera.npz --page repair.html -o repaired.safetensors",
)
register = o.commands((repair, "Networks", EXAMPLES))
