"""Train on scikit-learn's digits with Lightning, and log the calibration of each epoch.

pip install 'trueup[torchmetrics,sklearn]' lightning
"""

import logging

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trueup.integrations.torchmetrics import ECE, NLL, CalibrationTable


class Digits(lightning.LightningModule):
    """A two-layer network that memorises its digits."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.ece, self.nll = ECE(), NLL()  # Lightning moves, resets and synchronises them, as any metric of a module
        self.table = CalibrationTable(10)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """Return the cross-entropy."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        """Add the batch to the epoch's tallies."""
        images, labels = batch
        logits = self.network(images)
        self.ece(logits, labels)
        self.nll(logits, labels)
        self.log_dict({"ece": self.ece, "nll": self.nll}, on_step=False, on_epoch=True)

    def test_step(self, batch: list[torch.Tensor], number: int) -> None:
        """Add the batch to the table."""
        images, labels = batch
        self.table.update(self.network(images), labels)

    def on_test_epoch_end(self) -> None:
        """Log the table after the last batch."""
        self.log_dict({f"test_{name}": value.float() for name, value in self.table.compute().items()})
        self.table.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def loaders(seed: int = 0) -> tuple[DataLoader, DataLoader]:
    """Split the digits: 300 for training, the others for validation."""
    images, labels = (torch.tensor(a) for a in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    rows = TensorDataset(images.float()[order] / 16, labels[order])
    train, val = (torch.utils.data.Subset(rows, range(*ends)) for ends in ((0, 300), (300, len(rows))))
    return DataLoader(train, batch_size=100), DataLoader(val, batch_size=500)


class Printed(lightning.Callback):
    """Print the logged metrics of each validation."""

    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Print one line per validation epoch."""
        logged = trainer.callback_metrics
        print(f"epoch {trainer.current_epoch + 1:3d}   nll {logged['nll']:.3f}   ece {logged['ece']:.3f}")


def main(epochs: int = 40) -> None:
    """Print a line every ten epochs, then the table."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    train, val = loaders()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[Printed()],
        check_val_every_n_epoch=10,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    model = Digits()
    trainer.fit(model, train, val)
    (table,) = trainer.test(model, val, verbose=False)
    print("\nThe table after the last epoch:")
    print("\n".join(f"{name.removeprefix('test_'):16s} {value:.4f}" for name, value in table.items()))


if __name__ == "__main__":
    main()
