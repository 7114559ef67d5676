"""The verb that trains a network: train."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from trueup._core.errors import silence_warnings
from trueup._core.formatting import format_number
from trueup._core.registry import LOSSES
from trueup.cli import options as o
from trueup.cli.output import print_json, print_remarks, print_stderr, print_table, to_json
from trueup.cli.resolve import RUN
from trueup_studies.cli import run_folder
from trueup_studies.registry import NETWORKS


@dataclass(frozen=True)
class Task:
    """Network, loss and data set."""

    data: str | None = o.option("NAME", "Data set; `trueup datasets` lists them (default digits).")
    network: str = o.option("NAME", "Network; `trueup networks` lists them.", default="cnn", complete=NETWORKS)
    loss: str = o.option("NAME", "Loss; `trueup losses` lists them.", default="cross_entropy", complete=LOSSES)
    epochs: int = o.option("N", "Number of epochs.", default=20)
    augment: bool = o.switch("Flip and shift the training images at random.")
    data_dir: Path | None = o.option("FOLDER", "Folder of the data sets (default $TRUEUP_DATA).")


@dataclass(frozen=True)
class Training:
    """Options of `trueup_studies.training.train`."""

    batch_size: int | None = o.option("N", "Rows in a batch (default 128).")
    optimiser: str | None = o.option("sgd|adamw", "Optimiser (default sgd).")
    lr: float | None = o.option("X", "Learning rate (default 0.1).")
    weight_decay: float | None = o.option("X", "Weight decay (default 0.0001).")
    schedule: str | None = o.option("constant|cosine|steps", "Schedule of the learning rate (default cosine).")
    milestones: list[float] | None = o.option(
        "SHARE", "Share of the epochs after which `steps` divides the learning rate by ten; may be repeated."
    )
    patience: int | None = o.option(
        "N", "Stop if the validation loss, or the metric of --stop-on, has not fallen for N epochs."
    )
    stop_on: str | None = o.option(
        "nll|refinement",
        "Keep the weights of the epoch with the lowest validation loss, raw or after temperature scaling.",
    )
    seed: int | None = o.option("N", "Random seed (default 0).")


def train(
    folder: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the results.")],
    *,
    task: Task,
    training: Training,
    output: o.Output,
) -> None:
    """Train a network, measure its calibration after each epoch, and save its logits for `report` and `fit`.

    The folder gets weights.safetensors, history.json, run.json, val.npz and test.npz. If a run was stopped, the same
    command resumes it after its last epoch.

      $ trueup train --data digits --network cnn --epochs 20 -o run
      $ trueup train --data cifar10 --network resnet20 --loss focal --epochs 160 --augment -o focal
    """
    from trueup.io.atomic import atomic_write, require_writable_folder

    o.require_name("network", NETWORKS, task.network)
    o.require_name("loss", LOSSES, task.loss)
    require_writable_folder(folder)
    from safetensors.torch import save_file

    from trueup.io.load_save import save
    from trueup.io.predictions import Predictions
    from trueup_studies.networks import build_network, network_options
    from trueup_studies.training.augment import flip_and_crop
    from trueup_studies.training.data import DATASETS, load_data
    from trueup_studies.training.loop import check_options
    from trueup_studies.training.loop import train as train_network
    from trueup_studies.training.run_settings import with_current_names

    if task.data is not None:
        o.require_name("data set", DATASETS, task.data)
    dataset = load_data(**o.drop_unset(name=task.data, data_dir=task.data_dir, seed=training.seed))
    dataset = replace(dataset, augment=flip_and_crop if task.augment else None)
    if dataset.kind not in ("image", "text"):
        raise ValueError(f"train needs labelled images or texts, got {dataset.name}, which is {dataset.kind}")
    network_keywords = network_options(task.network, dataset, seed=training.seed or 0)
    model = build_network(task.network, network_keywords, normalisation=dataset.normalisation)
    options = o.set_options(training)
    criterion = LOSSES[task.loss]()
    check_options(dataset, criterion, task.epochs, **options)
    run = {
        "data": dataset.name,
        "loss": task.loss,
        "epochs": task.epochs,
        "augment": task.augment,
        "seed": training.seed,
        "network": task.network,
        "options": network_keywords,
        "normalisation": dataset.normalisation,
        "train": options,
    }
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        started = run_folder.read_run(folder)
        started.pop("epoch", None)  # the run was killed as it ended
        started["train"] = with_current_names(started.get("train", {}))
        if started != to_json({"schema": started["schema"], **run}):
            raise ValueError(f"{checkpoint} is of another run; remove it, or choose another folder")
        if not output.quiet:
            print_stderr(f"resuming from {checkpoint}")
    run_folder.write_json(folder / RUN, run)
    with silence_warnings(enabled=output.quiet):
        trained = train_network(
            model, dataset, criterion, task.epochs, checkpoint=checkpoint, progress=not output.quiet, **options
        )
    with atomic_write(folder / run_folder.WEIGHTS) as (draft,):
        save_file({name: tensor.cpu().contiguous() for name, tensor in trained.model.state_dict().items()}, draft)
    history = [asdict(epoch) for epoch in trained.history.epochs]
    run["epoch"] = trained.epoch
    run_folder.write_json(folder / RUN, run)
    run_folder.write_json(folder / "history.json", {"epoch": trained.epoch, "epochs": history})
    for name, half in (("val", trained.val), ("test", trained.test)):
        if isinstance(half, Predictions):
            save(half, folder / f"{name}.npz")
    checkpoint.unlink(missing_ok=True)
    if output.as_json:
        print_json("train", output=folder, run=run, history=history)
        return
    if output.quiet:
        return
    extra = ("refinement",) if training.stop_on == "refinement" else ()
    head = ("loss", "train_accuracy", "accuracy", "nll", *extra, "ece", "test_ece", "optimal_ece")
    print_table(
        [["epoch", *(name.replace("_", " ") for name in head)]]
        + [[str(epoch["number"]), *(format_number(epoch[name]) for name in head)] for epoch in history]
    )
    lowest = "NLL" if training.stop_on == "nll" else training.stop_on
    kept = f"Kept the weights of epoch {trained.epoch} of {len(history)} (lowest {lowest} on the validation half)"
    print_remarks(
        "" if training.stop_on is None else kept,
        f"Written: {folder}",
        f"Now: trueup report {folder}/val.npz {folder}/test.npz -o report.html",
    )


register = o.commands("Networks", train)
