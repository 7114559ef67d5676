"""The verb that trains a network: train."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trueup.cli import options as o
from trueup.cli import resolve
from trueup.cli.output import print_json, print_remarks, print_stderr, print_table, to_json
from trueup.core.errors import silence_warnings
from trueup.core.formatting import format_number


def train(
    folder: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the results.")],
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="NAME", help="Data set; `trueup datasets` lists them (default digits)."),
    ] = None,
    network: o.Network = "cnn",
    loss: o.Loss = "cross_entropy",
    epochs: Annotated[int, typer.Option("--epochs", metavar="N", help="Number of epochs.")] = 20,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", metavar="N", help="Rows in a batch (default 128).")
    ] = None,
    optimiser: Annotated[
        str | None, typer.Option("--optimiser", metavar="sgd|adamw", help="Optimiser (default sgd).")
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", metavar="X", help="Learning rate (default 0.1).")] = None,
    weight_decay: Annotated[
        float | None, typer.Option("--weight-decay", metavar="X", help="Weight decay (default 0.0001).")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule", metavar="constant|cosine|steps", help="Schedule of the learning rate (default cosine)."
        ),
    ] = None,
    milestones: Annotated[
        list[float] | None,
        typer.Option(
            "--milestones",
            metavar="SHARE",
            help="Share of the epochs after which `steps` divides the learning rate by ten; may be repeated.",
        ),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            "--patience",
            metavar="N",
            help="Stop if the validation loss, or what --stop-on looks at, has not fallen for N epochs.",
        ),
    ] = None,
    stop_on: Annotated[
        str | None,
        typer.Option(
            "--stop-on",
            metavar="nll|refinement",
            help="Keep the weights of the best epoch by validation loss, as it is or after a temperature.",
        ),
    ] = None,
    augment: Annotated[bool, typer.Option("--augment", help="Flip and shift the training images at random.")] = False,
    data_dir: o.DataFolder = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Random seed (default 0).")] = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Train a network, measure its calibration after each epoch, and save its logits for `report` and `fit`.

    The folder gets weights.safetensors, history.json, run.json, val.npz and test.npz. If a run was stopped, the same
    command resumes it after its last epoch.
    """
    from trueup.io.atomic import atomic_write, require_writable_folder
    from trueup.registry import LOSSES, NETWORKS

    o.require_name("network", NETWORKS, network)
    o.require_name("loss", LOSSES, loss)
    require_writable_folder(folder)
    from safetensors.torch import save_file

    from trueup.io.load_save import save
    from trueup.io.predictions import Predictions
    from trueup.models.networks import build_network, network_options
    from trueup.training.augment import flip_and_crop
    from trueup.training.data import DATASETS, load_data
    from trueup.training.loop import check_options
    from trueup.training.loop import train as train_network
    from trueup.training.run_settings import with_current_names

    if data is not None:
        o.require_name("data set", DATASETS, data)
    dataset = load_data(**o.drop_unset(name=data, data_dir=data_dir, seed=seed))
    if dataset.kind not in ("image", "text"):
        raise ValueError(f"train takes images or texts of several classes, got {dataset.name}, which is {dataset.kind}")
    network_keywords = network_options(network, dataset, seed=seed or 0)
    model = build_network(network, network_keywords, normalisation=dataset.normalisation)
    options = o.drop_unset(
        batch_size=batch_size, optimiser=optimiser, lr=lr, weight_decay=weight_decay, schedule=schedule,
        milestones=milestones, patience=patience, stop_on=stop_on, seed=seed,
    )  # fmt: skip
    criterion = LOSSES[loss]()
    check_options(dataset, criterion, epochs, **options)
    run = {
        "data": dataset.name,
        "loss": loss,
        "epochs": epochs,
        "augment": augment,
        "seed": seed,
        "network": network,
        "options": network_keywords,
        "normalisation": dataset.normalisation,
        "train": options,
    }
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        started = resolve.read_run(folder)
        started.pop("epoch", None)  # of a run that was killed as it ended
        started["train"] = with_current_names(started.get("train", {}))
        if started != to_json({"schema": started["schema"], **run}):
            raise ValueError(f"{checkpoint} is of another run; remove it, or choose another folder")
        if not quiet:
            print_stderr(f"resuming from {checkpoint}")
    resolve.write_json(folder / resolve.RUN, run)
    with silence_warnings(enabled=quiet):
        trained = train_network(
            model, dataset, criterion, epochs, **options, augment=flip_and_crop if augment else None,
            checkpoint=checkpoint, progress=not quiet,
        )  # fmt: skip
    with atomic_write(folder / resolve.WEIGHTS) as (draft,):
        save_file({name: tensor.cpu().contiguous() for name, tensor in trained.model.state_dict().items()}, draft)
    history = [asdict(epoch) for epoch in trained.history.epochs]
    run["epoch"] = trained.epoch
    resolve.write_json(folder / resolve.RUN, run)
    resolve.write_json(folder / "history.json", {"epoch": trained.epoch, "epochs": history})
    for name, half in (("val", trained.val), ("test", trained.test)):
        if isinstance(half, Predictions):
            save(folder / f"{name}.npz", half)
    checkpoint.unlink(missing_ok=True)
    if as_json:
        print_json("train", output=folder, run=run, history=history)
        return
    if quiet:
        return
    extra = ("refinement",) if stop_on == "refinement" else ()
    head = ("loss", "train_accuracy", "accuracy", "nll", *extra, "ece", "test_ece", "optimal_ece")
    print_table(
        [["epoch", *(name.replace("_", " ") for name in head)]]
        + [[str(epoch["number"]), *(format_number(epoch[name]) for name in head)] for epoch in history]
    )
    least = "NLL" if stop_on == "nll" else stop_on
    kept = f"Kept the weights of epoch {trained.epoch} of {len(history)} (least {least} on the validation half)"
    print_remarks(
        "" if stop_on is None else kept,
        f"Written: {folder}",
        f"Now: trueup report {folder}/val.npz {folder}/test.npz -o report.html",
    )


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    o.add_command(
        app,
        train,
        "Networks",
        "trueup train --data digits --network cnn --epochs 20 -o run",
        "trueup train --data cifar10 --network resnet20 --loss focal --epochs 160 --augment -o focal",
    )
