"""Verbs that list what can be trained: networks, datasets."""

from __future__ import annotations

from trueup.cli import options as o
from trueup.cli.listing import print_registry


def networks(as_json: o.Json = False) -> None:
    """List the networks that `train` can make, with their options and defaults.

    $ trueup networks
    $ trueup networks --json
    """
    from trueup_studies.registry import NETWORKS

    print_registry("networks", NETWORKS, as_json)


def datasets(as_json: o.Json = False) -> None:
    """List the data sets that `train`, `clamp` and `repair` know by name.

    $ trueup datasets
    $ trueup datasets --json
    """
    from trueup_studies.training.data import DATASETS

    print_registry("datasets", DATASETS, as_json)


register = o.commands("Look up", networks, datasets)
