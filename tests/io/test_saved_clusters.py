import numpy as np
import pytest

import trueup
from optional import torch
from trueup.io import load_table


@pytest.mark.parametrize("suffix", ["npz", "csv", "jsonl", "parquet", "safetensors"])
def test_the_clusters_that_collect_found_are_in_the_file(suffix, tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(6, 1, 2, 2), torch.randint(0, 3, (6, 2, 2))
    table = trueup.collect(
        torch.nn.Conv2d(1, 3, 1), [(x[:4], y[:4]), (x[4:], y[4:])], class_axis="first", progress=False
    )
    path = tmp_path / f"pixels.{suffix}"
    trueup.save(table, path)
    np.testing.assert_array_equal(trueup.load(path).labels, table.labels)
    read = load_table(path, clusters="sample")
    np.testing.assert_array_equal(np.asarray(read.clusters).astype(int), np.asarray(table.clusters))
    assert trueup.evaluate(*read, **read.options()).clusters == 6
