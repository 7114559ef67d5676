"""Verbs that wrap a trained network, whose weights stay as they are: clamp, repair."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

from trueup._core.errors import InputError
from trueup.cli import options as o
from trueup.cli import resolve
from trueup.cli.output import collect_warnings, print_json, print_remarks, print_scores, require_output


@dataclass(frozen=True)
class NetworkData:
    """The network and its data."""

    model: str = o.argument("MODEL", "package.module:make_model, or a folder that `trueup train` wrote.")
    data: str | None = o.option(
        "FILE|FOLDER",
        "A .npz file of images or inputs, and labels; or a folder of images, with one folder per class. With "
        "trueup-studies also the name of a data set (default: the data set of the `train` folder).",
    )
    weights: Path | None = o.option("FILE", "Weights of the network, .safetensors or .pt.")
    batch_size: int = o.option("N", "Batch size.", default=128)
    device: str | None = o.option("NAME", "Device of the network, such as cuda.")
    data_dir: Path | None = o.option("FOLDER", "Folder of the data sets (default $TRUEUP_DATA).")
    seed: int | None = o.option("N", "Random seed (default 0).")

    def require_output(self, path: Path) -> None:
        """Check that the file can be written and is not an input."""
        require_output(path, ".safetensors", reads=(self.weights, Path(self.data) if self.data else None))

    def load(self, *, labels: bool = True) -> tuple[Any, list[Any], str]:
        """Load the network, loaders of the validation and test parts of its data, and the name of the data.

        With `labels=False` a .npz file may lack labels; then there is one loader, of inputs alone.
        """
        if self.data is None and not resolve.is_run(self.model):
            raise ValueError("--data must name a .npz file, a folder of images, or a data set")
        from torch.utils.data import DataLoader

        if self.data is None:
            network, data, seed = resolve.load_run(self.model)
        else:
            network, data, seed = resolve.load_model(self.model), self.data, self.seed
        if self.weights is not None:
            network = resolve.load_weights(network, self.weights)
        parts: tuple[Any, ...]
        if not labels and resolve.lacks_labels(Path(data)):
            parts = (resolve.load_inputs(Path(data)),)
        else:
            parts = resolve.load_val_and_test(data, self.data_dir, seed or 0)
        loaders = [DataLoader(part, batch_size=self.batch_size) for part in parts]
        network.eval()  # some factories return a network in training mode
        return network if self.device is None else network.to(self.device), loaders, data


@dataclass(frozen=True)
class Recipe:
    """How the shift is fitted."""

    recipe: str | None = o.option("NAME", "How to fit (default subspace); `paper` and `code` as published.")
    loss: str | None = o.option("ce|focal", "Loss to minimise (default ce).")
    gamma: list[float] | None = o.option("X", "γ of the focal loss; of several, the one with the smallest ECE.")
    penalty: str | None = o.option("X|auto|R1|R2", "Weight of the penalty on the shift (default auto).")
    norm: str | None = o.option("l2sq|l2", "Norm of the penalty, squared or not (default l2sq).")
    input_map: str | None = o.option("shift|affine", "Map of the inputs (default shift).")
    start: str | None = o.option("zero|random|data", "Start of the shift (default: that of the recipe).")
    box: tuple[float, float] | None = o.option("LOW HIGH", "Clip shifted inputs to this range.")
    epochs: int | None = o.option("N", "Epochs of the recipes paper and code (default 100).")
    lr: float | None = o.option("X", "Learning rate of paper (default 0.001) and code (default 0.01).")
    reduction: str | None = o.option("mean|sum", "Loss of a batch in the recipe paper (default mean).")

    def function(self) -> Any:
        """Return the recipe with its options."""
        from trueup.clamping import RECIPES

        name = "subspace" if self.recipe is None else self.recipe
        o.require_name("recipe", RECIPES, name)
        steps = o.set_options(self, "epochs", "lr", "reduction")
        for option in steps:
            if option not in signature(RECIPES[name]).parameters:
                able = [other for other in RECIPES if option in signature(RECIPES[other]).parameters]
                raise InputError(f"--{option}", f"come with --recipe {' or '.join(able)}", f"the recipe {name}")
        return partial(RECIPES[name], **steps) if steps else name


@dataclass(frozen=True)
class Search:
    """The repairs to try."""

    parts: list[str] | None = o.option("NAME", "Repair only input, batch_norm or head; may be repeated.", "--part")
    maps: list[str] | None = o.option(
        "NAME",
        "Try only this family of input maps, such as affine, gamma, colour or kernel; may be repeated. "
        "An unknown name lists all families.",
        "--map",
    )
    method: str | None = o.option("METHOD", "Method to try after the temperature, such as auto.", "--method", "-m")
    mean: str | None = o.option("X,X,X", "Mean that was subtracted from pixels to make `inputs`, one per channel.")
    std: str | None = o.option("X,X,X", "Standard deviation by which they were then divided.")
    no_crop: bool = o.switch("Do not augment with shifted crops, for a network trained without them.")
    budget: float | None = o.option("N", "Stop trying input maps after this many forward passes (default 55.0).")


@dataclass(frozen=True)
class Unlabelled:
    """Repair without labels."""

    no_labels: bool = o.switch("Adapt without labels, with the network as its own teacher; the file may lack labels.")
    temperature: float | None = o.option("X", "Without labels: temperature fitted before the shift (default 1.0).")
    entropy: bool = o.switch("Without labels: also minimise the entropy of the predictions.")
    reference: Path | None = o.option("FILE", "Without labels: inputs from before the shift, .npz.")
    labelled: Path | None = o.option("FILE", "Without labels: a few labelled samples, .npz, to select repairs.")


@dataclass(frozen=True)
class Drawings:
    """Figures and a page on the repair."""

    figure: Path | None = o.option("FILE", "Draw the repairs that were tried: .png, .pdf or .svg.")
    strip: Path | None = o.option("FILE", "Draw some images before and after the map: .png, .pdf or .svg.")
    page: Path | None = o.option("FILE", "Write a page with the verdict, images and repairs, .html.")


def clamp(
    out: Annotated[Path, o.output_file("FILE", "File of the shift and the temperature, .safetensors.")],
    *,
    source: NetworkData,
    recipe: Recipe,
    output: o.Output,
) -> None:
    """Fit Neural Clamping, an input shift and a temperature, to a trained network; its weights do not change.

    The fit uses the validation part of the data, and the table the test part. The network takes images as pixels in
    [0, 1]. A .npz file has val_images, val_labels, test_images and test_labels, or images and labels, which are split
    in half at random. Arrays called `inputs` instead of `images` go to the network unchanged.

      $ trueup clamp mymodels:resnet --weights resnet.safetensors --data cifar10 -o clamped.safetensors
      $ trueup clamp mymodels:resnet --data images.npz --box 0 1 -o clamped.safetensors
      $ trueup clamp run -o run/clamped.safetensors
    """
    source.require_output(out)
    network, loaders, data = source.load()
    from trueup import clamping
    from trueup.io.load_save import save

    gamma, penalty = recipe.gamma, recipe.penalty
    with suppress(TypeError, ValueError):
        penalty = float(penalty)  # type: ignore[assignment, arg-type]
    gamma_or_pool = gamma[0] if gamma and len(gamma) == 1 else gamma
    objective = o.drop_unset(loss=recipe.loss, gamma=gamma_or_pool, penalty=penalty, norm=recipe.norm)
    input_map = o.drop_unset(kind=recipe.input_map, start=recipe.start, box=recipe.box)
    options = {"recipe": recipe.function()} | o.set_options(source, "device", "seed")
    options |= {"objective": clamping.Objective(**objective), "input_map": clamping.MapOptions(**input_map)}
    with collect_warnings(quiet=output.quiet):
        clamped = clamping.clamp(network, loaders[0], **options, progress=not output.quiet)
        save(clamped, out)
        scores = _compare(network, "clamping", clamped, loaders, not output.quiet)
    record, files = clamped.fit_record, {"model": source.model, "data": data, "output": out}
    verdict = f"Does the input map help? {record.verdict}"
    size = f"T = {record.temperature:.4f}, ‖δ‖ = {record.delta_norm:.4f}"
    _print_result("clamp", files, record, scores, output, verdict, size)


def repair(
    out: Annotated[Path, o.output_file("FILE", "File of the map and what else changed, .safetensors.")],
    *,
    source: NetworkData,
    search: Search,
    unlabelled: Unlabelled,
    drawings: Drawings,
    output: o.Output,
) -> None:
    """Repair a trained network under a new camera: an input map, batch-norm statistics, the last layer, a temperature.

    The weights on disk do not change. The fit uses the validation part of the data, and the table the test part. The
    network takes images as pixels in [0, 1]. A .npz file has val_images, val_labels, test_images and test_labels, or
    images and labels, which are split in half at random. Arrays called `inputs` instead of `images` go to the network
    unchanged; --mean and --std say how they were normalised. In Python, trueup.load(FILE, model=network) wraps the
    same network in the repair.

      $ trueup repair mymodels:resnet --weights resnet.safetensors --data new_camera.npz -o repaired.safetensors
      $ trueup repair mymodels:resnet --data new_camera.npz --no-labels --temperature 1.7 -o repaired.safetensors
      $ trueup repair mymodels:resnet --data inputs.npz --mean 0.49,0.48,0.45 --std 0.2,0.2,0.2 -o r.safetensors
      $ trueup repair run --data new_camera.npz --page repair.html -o repaired.safetensors
    """
    source.require_output(out)
    picture = (".png", ".pdf", ".svg")
    for path, suffixes in ((drawings.figure, picture), (drawings.strip, picture), (drawings.page, (".html",))):
        if path is not None:
            require_output(path, *suffixes)
    no_labels = unlabelled.no_labels
    for name, value in o.set_options(unlabelled).items():
        if value is not False and not no_labels:
            raise InputError(o.flag_of(unlabelled, name), "come with --no-labels", "labels that are used")
    if search.method is not None and no_labels:
        raise InputError("--method", "be left out with --no-labels", search.method, "a method is fitted to labels")
    if drawings.figure is not None and no_labels:
        why = "without labels there is no held-out loss to draw"
        raise InputError("--figure", "be left out with --no-labels", str(drawings.figure), why)
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
    images = next(iter(loaders[0]), [None])[0]
    are_images = images is not None and images.ndim == 4
    normalise = _normalisation(are_images, data, search.mean, search.std)
    arguments = o.set_options(source, "seed") | o.drop_unset(method=search.method, normalise=normalise)
    for name, load in (("reference", resolve.load_inputs), ("labelled", resolve.load_labelled)):
        if (file := getattr(unlabelled, name)) is None:
            continue
        if data.lower().endswith(".npz"):
            kinds = [resolve.inputs_of(Path(path)) for path in (data, file)]
            if kinds[0] != kinds[1]:
                raise InputError(f"--{name}", f"have {kinds[0]}, as {data} has", kinds[1])
        arguments[name] = DataLoader(load(file), batch_size=source.batch_size)
    if drawings.strip is not None and not are_images:
        raise InputError("--strip", "be left out if inputs are not images", "inputs of another shape")
    fit: Any = adaptation.adapt if no_labels else adaptation.repair
    settings: Any = adaptation.AdaptOptions if no_labels else adaptation.RepairOptions
    with collect_warnings(quiet=output.quiet):
        repaired = fit(network, loaders[0], **arguments, options=settings(**options), progress=not output.quiet)
        save(repaired, out)
        scores = _compare(network, "repair", repaired, loaders, not output.quiet)
        _draw(drawings, repaired, images, scores, title=f"Repair of {source.model}", file=out.name)
    record, files = repaired.repair_record, {"model": source.model, "data": data, "output": out}
    verdict = f"Was there anything to repair? {record.verdict}"
    notes = tuple(f"{note[:1].upper()}{note[1:]}." for note in record.notes)
    cost = f"T = {record.temperature:.4f}; the search cost {record.equivalents:.0f} forward passes over the data."
    drawn = tuple(f"Written: {file}" for file in o.set_options(drawings).values())
    _print_result("repair", files, record, scores, output, verdict, *notes, cost, *drawn)


def _compare(network: Any, name: str, other: Any, loaders: list[Any], progress: bool) -> Any:
    """Score the raw network, the network with a temperature, and the changed network on the test part.

    Return None without labels, where there is no test part.
    """
    from trueup._core.registry import METHODS
    from trueup.io.predictions import Predictions
    from trueup.metrics.table import compare
    from trueup.models.calibrated import collect

    if len(loaders) == 1:
        return None
    val, test = (collect(network, loader, progress=progress) for loader in loaders)
    scaled = Predictions(METHODS["temperature"](*val)(test.logits), test.labels)
    after = collect(other, loaders[1], progress=progress)
    metrics = ("accuracy", "nll", "brier", "ece", "aece", "sce", "confidence")
    return compare({"raw": test, "temperature": scaled, name: after}, metrics=metrics)


def _print_result(verb: str, files: dict[str, Any], record: Any, scores: Any, output: o.Output, *remarks: str) -> None:
    if output.as_json:
        table = None if scores is None else scores.to_dict()
        print_json(verb, **files, verdict=record.verdict, record=asdict(record), scores=table)
    elif not output.quiet:
        if scores is not None:
            print_scores(scores)
        print_remarks(*remarks, f"Written: {files['output']}")


def _draw(drawings: Drawings, repaired: Any, images: Any, scores: Any, **labels: str) -> None:
    from trueup.adaptation.report import report_repair, save_inputs, save_steps

    if drawings.figure is not None:
        save_steps(repaired.repair_record, drawings.figure)
    if drawings.strip is not None:
        save_inputs(repaired, images, drawings.strip)
    if drawings.page is not None:
        report_repair(repaired, images=images, scores=scores, **labels).save(drawings.page)


def _normalisation(are_images: bool, data: str, mean: str | None, std: str | None) -> Any:
    """Return the normalisation of the inputs: none for images, --mean and --std for `inputs`, None if unknown."""
    from torch import nn

    has_inputs = Path(data).suffix.lower() == ".npz" and resolve.inputs_of(Path(data)) == "inputs"
    if mean is None and std is None:
        return nn.Identity() if are_images and not has_inputs else None
    if not has_inputs:
        raise InputError("--mean", "be left out for images, which are pixels in [0, 1]", str(mean or std))
    if mean is None or std is None:
        raise InputError("--mean", "come with --std", "only one of them")
    return _numbers("--mean", mean), _numbers("--std", std)


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise InputError(option, "be numbers separated by commas, such as 0.49,0.48,0.45", repr(text)) from None


register = o.commands("Networks", clamp, repair)
