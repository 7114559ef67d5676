"""Good files for every reader, to be broken."""

import sqlite3
import warnings

import fuzz_readers as readers
import fuzz_sets
import numpy as np


def good(folder):
    """One good file, or more, for each reader: name → (path, reader)."""
    import torch

    import trueup
    from trueup import save
    from trueup.calibrators import IsotonicQuantiles, VarianceScaling
    from trueup.monitor import Monitor, MonitorSizes

    rng = np.random.default_rng(0)
    logits = rng.normal(size=(24, 3))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    found = {
        **{"pairs": [], "parquet": [], "headers": [], "clamped": [], "store": [], "web": [], "monitors": []},
        **{"cli": [], "shards": [], **fuzz_sets.good(folder)},
    }

    def path(name):
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        return place

    for suffix in (".npz", ".npy", ".csv", ".safetensors"):
        trueup.save((logits, labels), path(f"pair{suffix}"))
        found["pairs"].append((path(f"pair{suffix}"), readers.read_pair))
    np.savez_compressed(path("packed.npz"), logits=logits.astype(np.float32), labels=labels.astype(np.uint8))
    found["pairs"].append((path("packed.npz"), readers.read_pair))

    import pyarrow as pa
    import pyarrow.parquet as pq

    trueup.save((logits, labels), path("lists.parquet"))
    table = pa.table({**{f"logit_{k}": logits[:, k] for k in range(3)}, "label": labels, "name": ["cat"] * 24})
    pq.write_table(table, path("columns.parquet"), row_group_size=10, compression="zstd")
    found["parquet"] += [(path("lists.parquet"), readers.read_pair), (path("columns.parquet"), readers.read_pair)]

    for name, method in (
        ("temperature", "temperature"),
        ("chain", "vector"),
        ("bins", "histogram"),
        ("spline", "spline"),
    ):
        calibrator = trueup.METHODS[method](logits, labels)
        save(calibrator, path(f"{name}.safetensors"), n_classes=3, summary={"fitted to": [1, (2.5, None)]})
        found["headers"].append((path(f"{name}.safetensors"), readers.read_calibrator))
    save(VarianceScaling(1.7), path("scale.safetensors"), summary={"a": [1]})
    save(IsotonicQuantiles([-1.0, 0.0, 2.0], [0.2, 0.5, 0.9]), path("quantiles.safetensors"))
    found["headers"] += [(path(f"{name}.safetensors"), readers.read_recalibrator) for name in ("scale", "quantiles")]
    monitor = Monitor(3, sizes=MonitorSizes(bins=5, window=20, block=10))
    monitor.update(logits, labels)
    save(monitor, path("monitor.safetensors"))
    found["headers"].append((path("monitor.safetensors"), readers.read_monitor))

    from trueup.clamping import Objective, clamp

    pairs = [(torch.from_numpy(logits).float(), torch.from_numpy(labels))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(clamp(torch.nn.Identity(), pairs, objective=Objective(penalty=0.01)), path("clamped.safetensors"))
    found["clamped"].append((path("clamped.safetensors"), readers.read_clamped))

    from trueup_studies.grid import Cell
    from trueup_studies.store import Store

    store = Store(path("results.sqlite"))
    for seed in range(20):
        store.finish(Cell("demo", 1, {"seed": seed}), [{"ece": seed / 100, "name": "x" * 40}], seconds=1.0)
    store.fail(Cell("demo", 1, {"seed": 99}), "it broke", seconds=1.0)
    with sqlite3.connect(store.path) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    found["store"].append((store.path, readers.read_store))

    for suffix in (".npz", ".parquet"):
        shards = path(f"shards{suffix[1:]}/0{suffix}").parent
        for i in range(3):
            trueup.save((logits, labels), shards / f"{i}{suffix}")
        found["shards"].append((shards / f"1{suffix}", readers.read_shards))
    for name in ("pair.npz", "pair.csv", "pair.safetensors", "lists.parquet", "both.npy"):
        if name == "both.npy":
            path(name).write_bytes(path("pair.npy").read_bytes() + path("pair.labels.npy").read_bytes())
        found["web"].append((path(name), readers.read_upload))
    for name in ("pair.npz", "pair.csv", "lists.parquet"):
        found["monitors"].append((path(name), readers.read_replay))
    save(Monitor(3, sizes=MonitorSizes(block=10)), path("watch.safetensors"))
    found["monitors"].append((path("watch.safetensors"), readers.read_restored))
    trueup.save((logits, labels), path("beside.npz"))
    for name in ("pair.npz", "packed.npz", "pair.csv", "temperature.safetensors", "monitor.safetensors"):
        found["cli"].append((path(name), readers.read_cli))
    return found
