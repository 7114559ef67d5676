"""The verb that trains a network: train."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trueup.cli import options as o
from trueup.cli import resolve as made
from trueup.cli.errors import print_stderr, silence_warnings
from trueup.cli.output import plain, print_json, print_remarks, print_table
from trueup.core.formatting import format_number

TRAIN = "trueup.training.loop:train"
DATA = "trueup.training.data:load_data"


def train(
    folder: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the results go.")],
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="NAME", help=o.help_of("Data set; `trueup datasets` lists them", DATA, "name")),
    ] = None,
    network: o.Network = "cnn",
    loss: o.Loss = "cross_entropy",
    epochs: Annotated[int, typer.Option("--epochs", metavar="N", help="Times through the training part.")] = 20,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", metavar="N", help=o.help_of("Rows a step", TRAIN, "batch_size"))
    ] = None,
    optimiser: Annotated[
        str | None, typer.Option("--optimiser", metavar="sgd|adamw", help=o.help_of("Optimiser", TRAIN, "optimiser"))
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", metavar="X", help=o.help_of("Learning rate", TRAIN, "lr"))] = None,
    weight_decay: Annotated[
        float | None, typer.Option("--weight-decay", metavar="X", help=o.help_of("Weight decay", TRAIN, "weight_decay"))
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            metavar="constant|cosine|steps",
            help=o.help_of("How the learning rate falls", TRAIN, "schedule"),
        ),
    ] = None,
    milestones: Annotated[
        list[float] | None,
        typer.Option(
            "--milestones",
            metavar="SHARE",
            help="Share of the epochs where the steps fall tenfold; may be repeated.",
        ),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option("--patience", metavar="N", help="Stop when the validation loss has not fallen for N epochs."),
    ] = None,
    augment: Annotated[bool, typer.Option("--augment", help="Mirror and shift the training images.")] = False,
    data_dir: o.DataFolder = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help=o.help_of("Seed", TRAIN, "seed"))] = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Train a network, look at its calibration after each epoch, and keep its logits for `report` and `fit`.

    The folder gets weights.safetensors, history.json, run.json, val.npz and test.npz. A run that was stopped goes on
    where its last epoch ended when the same command is given again.
    """
    from trueup.io.atomic import atomic_write, require_writable_folder
    from trueup.registry import LOSSES, NETWORKS

    o.known("network", NETWORKS, network)
    o.known("loss", LOSSES, loss)
    require_writable_folder(folder)
    from safetensors.torch import save_file

    from trueup.io.predictions import Predictions, save
    from trueup.training.augment import flip_and_crop
    from trueup.training.data import DATASETS, load_data
    from trueup.training.loop import train as trained_by
    from trueup.training.run_settings import with_current_names

    if data is not None:
        o.known("data set", DATASETS, data)
    rows = load_data(**o.given(name=data, data_dir=data_dir, seed=seed))
    model, told = made.network_for(rows, network, seed or 0)
    options = o.given(
        batch_size=batch_size,
        optimiser=optimiser,
        lr=lr,
        weight_decay=weight_decay,
        schedule=schedule,
        milestones=milestones,
        patience=patience,
        seed=seed,
    )
    run = {
        "data": rows.name,
        "loss": loss,
        "epochs": epochs,
        "augment": augment,
        "seed": seed,
        **told,
        "train": options,
    }
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        begun = made.run_in(folder)
        begun["train"] = with_current_names(begun.get("train", {}))
        if begun != plain({"schema": begun["schema"], **run}):
            raise ValueError(f"{checkpoint} is of another run; remove it, or choose another folder")
        if not quiet:
            print_stderr(f"going on from {checkpoint}")
    made.write_json(folder / made.RUN, run)
    with silence_warnings(quiet):
        done = trained_by(
            model, rows, LOSSES[loss](), epochs, **options, augment=flip_and_crop if augment else None,
            checkpoint=checkpoint, progress=not quiet,
        )  # fmt: skip
    with atomic_write(folder / made.WEIGHTS) as (draft,):
        save_file({name: tensor.cpu().contiguous() for name, tensor in done.model.state_dict().items()}, draft)
    history = [asdict(epoch) for epoch in done.history.epochs]
    made.write_json(folder / "history.json", {"epochs": history})
    for name, half in (("val", done.val), ("test", done.test)):
        if isinstance(half, Predictions):
            save(folder / f"{name}.npz", half)
    checkpoint.unlink(missing_ok=True)
    if as_json:
        print_json("train", output=folder, run=run, history=history)
        return
    if quiet:
        return
    head = ("loss", "train_accuracy", "accuracy", "nll", "ece", "test_ece", "optimal_ece")
    print_table(
        [["epoch", *(name.replace("_", " ") for name in head)]]
        + [[str(epoch["number"]), *(format_number(epoch[name]) for name in head)] for epoch in history]
    )
    print_remarks(f"Written: {folder}", f"Now: trueup report {folder}/val.npz {folder}/test.npz -o report.html")


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(
        rich_help_panel="Networks",
        epilog=o.examples(
            "trueup train --data digits --network cnn --epochs 20 -o run",
            "trueup train --data cifar10 --network resnet20 --loss focal --epochs 160 --augment -o focal",
        ),
    )(train)
