"""A real fit of Lightning on two processes: what the callback logs is of all validation rows."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest
import torch

from two_ranks import run_two_ranks

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")


def train(rank, folder):
    """One rank of the fit; leaves what was logged and the weights that it was logged of."""
    import logging
    import warnings

    warnings.simplefilter("ignore")  # Lightning's advice on workers and loggers
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import lightning.pytorch as lightning
    from test_lightning import X, Y, loader, module_of
    from torch.utils.data import DataLoader, TensorDataset

    from trueup.integrations.lightning import lightning_callback

    port = folder / "port"
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            (folder / "draft").write_text(str(free.getsockname()[1]))
        (folder / "draft").rename(port)
    while not port.exists():
        time.sleep(0.05)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port.read_text(), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank)}
    torch.manual_seed(0)
    module = module_of(lightning, lambda z, y: {"logits": z, "labels": y})
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", callbacks=[lightning_callback()], logger=False,
        num_sanity_val_steps=0, enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(X[:40], Y[:40]), batch_size=10), loader(slice(40, 90)))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = {name: value.detach().clone() for name, value in module.network.state_dict().items()}
    torch.save({"logged": logged, "weights": weights, "ranks": trainer.world_size}, folder / f"{rank}.pt")


def test_two_processes_log_the_figures_of_all_rows(tmp_path):
    from test_lightning import X, Y, expected

    first, second = run_two_ranks(__file__, tmp_path)
    assert first["ranks"] == second["ranks"] == 2
    assert first["logged"] == second["logged"]
    network = torch.nn.Linear(4, 3)
    network.load_state_dict(first["weights"])
    with torch.no_grad():
        wanted = expected(network(X[40:]), Y[40:])
    assert first["logged"] == pytest.approx({f"val_{name}": value for name, value in wanted.items()}, abs=1e-6)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    train(int(sys.argv[1]), Path(sys.argv[2]))
