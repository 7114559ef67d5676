"""What the Lightning callback logs equals the metrics of all validation rows at once."""

import logging
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trueup import metrics
from trueup.integrations.lightning import lightning_callback

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(90, 4, generator=GENERATOR)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 1).long()


def expected(logits, labels):
    return {name: getattr(metrics, name)(logits, labels) for name in ("ece", "nll", "brier")}


@pytest.fixture
def lightning():
    found = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return found


def module_of(lightning, returned):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = nn.Linear(4, 3)

        def training_step(self, batch, number):
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def validation_step(self, batch, number, dataloader_idx=0):
            return returned(self.network(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def fit(lightning, module, callbacks, val, epochs=2, sanity=0):
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        num_sanity_val_steps=sanity,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(X[:40], Y[:40]), batch_size=20), val)
    return trainer


def loader(rows):
    return DataLoader(TensorDataset(X[rows], Y[rows]), batch_size=16)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and loggers
@pytest.mark.parametrize(
    "returned",
    [
        lambda z, y: z,
        lambda z, y: {"loss": nn.functional.cross_entropy(z, y), "logits": z},
        lambda z, y: {"logits": z, "labels": y},
    ],
    ids=["logits", "mapping", "labels"],
)
def test_each_epoch_is_logged_as_if_the_validation_rows_came_at_once(lightning, returned):
    seen = []

    class Watch(lightning.Callback):
        def on_validation_end(self, trainer, module):
            with torch.no_grad():
                wanted = expected(module.network(X[40:]), Y[40:])
            seen.append(({k: float(v) for k, v in trainer.callback_metrics.items()}, wanted))

    fit(lightning, module_of(lightning, returned), [lightning_callback(), Watch()], loader(slice(40, 90)))
    assert len(seen) == 2
    assert seen[0][0] != seen[1][0]
    for logged, wanted in seen:
        assert logged == pytest.approx({f"val_{name}": value for name, value in wanted.items()}, abs=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_several_validation_sets_are_told_apart(lightning):
    module = module_of(lightning, lambda z, y: z)
    val = [loader(slice(40, 60)), loader(slice(60, 90))]
    trainer = fit(lightning, module, [lightning_callback(prefix="v/", bins=5)], val, epochs=1)
    for number, rows in enumerate((slice(40, 60), slice(60, 90))):
        with torch.no_grad():
            z = module.network(X[rows])
        logged = float(trainer.callback_metrics[f"v/ece/dataloader_idx_{number}"])
        assert logged == pytest.approx(metrics.ece(z, Y[rows], bins=5), abs=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_rows_of_the_sanity_check_do_not_count(lightning):
    module = module_of(lightning, lambda z, y: z)
    trainer = fit(lightning, module, [lightning_callback()], loader(slice(40, 90)), epochs=1, sanity=2)
    with torch.no_grad():
        wanted = metrics.nll(module.network(X[40:]), Y[40:])
    assert float(trainer.callback_metrics["val_nll"]) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("returned", "fact"),
    [
        (nn.functional.cross_entropy, "got Tensor"),
        (lambda z, y: {"loss": nn.functional.cross_entropy(z, y)}, "got keys loss"),
    ],
)
def test_a_step_that_returns_its_loss_alone_is_told_what_is_wanted(lightning, returned, fact):
    module = module_of(lightning, returned)
    with pytest.raises(ValueError, match=f"validation_step must return logits.*{fact}"):
        fit(lightning, module, [lightning_callback()], loader(slice(40, 90)), epochs=1)


def test_the_pair_may_be_had_in_another_way(lightning):
    callback = lightning_callback(pair=lambda outputs, batch: (outputs[1], batch["target"]))
    callback.on_validation_epoch_start(None, nn.Identity())
    z = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    callback.on_validation_batch_end(None, None, (None, z), {"target": torch.tensor([0, 0])}, 0)
    assert float(callback.values()["val_nll"]) == pytest.approx(metrics.nll(z, [0, 0]), abs=1e-6)


def test_a_callback_can_be_sent_to_another_process(lightning):
    again = pickle.loads(pickle.dumps(lightning_callback(prefix="held_", bins=7)))
    assert again.options == {"prefix": "held_", "bins": 7, "pair": None}
    assert isinstance(again, lightning.Callback)


def test_without_lightning_the_error_says_what_to_install(monkeypatch):
    from trueup.integrations import lightning as plugins

    plugins._callback_class.cache_clear()
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install lightning"):
        lightning_callback()
