"""Regression networks: their forecasts over a loader, and a recalibrated network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from trueup._core.errors import InputError
from trueup._core.progress import track
from trueup._core.registry import FORECAST_METHODS
from trueup.calibrators.forecasts import Recalibrator
from trueup.io.forecasts import ForecastTable
from trueup.models._tensors import upcast_half
from trueup.models._value_module import as_module
from trueup.models.batches import Device, UnpackBatch, batches, errors_name_batch, replace_entry, unpacked
from trueup.models.calibrated import ModelWrapper, device_of
from trueup.models.freezing import frozen, unwrap

ReadForecast: TypeAlias = Callable[[Any], tuple[Tensor, Tensor]]
"""Function from a network's output to its means and standard deviations."""


class Recalibrated(ModelWrapper):
    """A regression network followed by a recalibrator, with the network's signature.

    The network returns a pair (mean, std), a mapping with `mean` and `std`, or a `torch.distributions.Normal`; the
    output has the same form. The network is shared, not copied, and its other attributes are available.

    Parameters
    ----------
    model
        The network.
    recalibrator
        The recalibrator.
    forecast
        Function from any other output to the pair, which is then the output of this module.

    Examples
    --------
    >>> from trueup.calibrators.forecasts import VarianceScaling
    >>> class Net(nn.Module):
    ...     def forward(self, x):
    ...         return x, torch.ones_like(x)
    >>> Recalibrated(Net(), VarianceScaling(2.0))(torch.tensor([3.0]))
    (tensor([3.]), tensor([2.]))
    """

    def __init__(self, model: nn.Module, recalibrator: Recalibrator, *, forecast: ReadForecast | None = None) -> None:
        super().__init__()
        for name, module, kind in (("model", model, nn.Module), ("recalibrator", recalibrator, Recalibrator)):
            if not isinstance(module, kind):
                raise InputError(name, f"be of the class {kind.__name__}", type(module).__name__)
        self.model = model
        self.recalibrator = as_module(recalibrator)
        self.forecast = forecast
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network and recalibrate its means and standard deviations."""
        output = self.model(*args, **kwargs)
        pair = self.recalibrator(*_read(output, self.forecast))
        return pair if self.forecast is not None else _replace(output, *pair)


def collect_forecasts(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    forecast: ReadForecast | None = None,
    device: Device | None = None,
    progress: bool = True,
    unpack: UnpackBatch | None = None,
) -> ForecastTable:
    """Collect the forecasts of a regression network on every batch of a loader; the network does not change.

    Parameters
    ----------
    model
        The network.
    loader
        Batches as in `collect`, with numbers as targets.
    forecast
        Function from a network's output to means and standard deviations; see `Recalibrated`.
    device
        Device of the inputs; by default that of the model.
    progress
        Whether to show progress.
    unpack
        Function from a batch to (inputs, labels), for batches of another form.

    Returns
    -------
    ForecastTable
        Unpacks as (mean, std, targets).

    Examples
    --------
    >>> x, y = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.0])
    >>> class Net(nn.Module):
    ...     def forward(self, x):
    ...         return x, torch.ones_like(x)
    >>> mean, std, targets = collect_forecasts(Net(), [(x, y)])
    >>> mean, targets
    (array([1., 2.]), array([1.5, 1. ]))
    """
    model = unwrap(model)
    device = device_of(model) if device is None else device
    parts: list[tuple[Tensor, ...]] = []
    with frozen(model), torch.no_grad():
        steps = unpacked(track(loader, label="collecting forecasts", enabled=progress), unpack=unpack)
        for number, (args, kwargs, y) in enumerate(batches(steps, device=device, numbers=True)):
            output = model(*args, **kwargs)
            with errors_name_batch(number):
                parts.append(tuple(_vector(x, len(y)) for x in (*_read(output, forecast), y)))
    if not parts:
        raise ValueError("loader must give at least one batch, got none; an iterator can be read only once")
    mean, std, targets = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
    return ForecastTable(mean, std, targets)


def recalibrate(
    model: nn.Module,
    loader: Iterable[Any],
    method: str | Callable[..., Recalibrator] = "variance",
    *,
    forecast: ReadForecast | None = None,
    device: Device | None = None,
    progress: bool = True,
    unpack: UnpackBatch | None = None,
) -> Recalibrated:
    """Fit a recalibration to the forecasts of a network over a loader, and put it after the network.

    Parameters
    ----------
    model
        The network.
    loader
        Batches as in `collect`, with numbers as targets.
    method
        Name in `FORECAST_METHODS`, or a function of means, standard deviations and targets.
    forecast
        Function from a network's output to means and standard deviations; see `Recalibrated`.
    device
        Device of the inputs; by default that of the model.
    progress
        Whether to show progress.
    unpack
        Function from a batch to (inputs, labels), for batches of another form.

    Returns
    -------
    Recalibrated
        The network with the recalibrator.
    """
    fit = FORECAST_METHODS[method] if isinstance(method, str) else method
    table = collect_forecasts(model, loader, forecast=forecast, device=device, progress=progress, unpack=unpack)
    recalibrated = Recalibrated(model, fit(*table), forecast=forecast)
    recalibrated.recalibrator.to(device_of(model))
    return recalibrated


def _vector(x: Tensor, n: int) -> Tensor:
    flat = x[:, 0] if x.ndim == 2 and x.shape[1] == 1 else x
    if tuple(flat.shape) != (n,):
        raise ValueError(f"mean and std must have a number for each of the {n} targets, got shape {tuple(x.shape)}")
    return upcast_half(flat).to("cpu", torch.float64, copy=True)


def _read(output: Any, forecast: ReadForecast | None) -> tuple[Tensor, Tensor]:
    if forecast is not None:
        return forecast(output)
    if isinstance(output, Mapping) and {"mean", "std"} <= set(output):
        return output["mean"], output["std"]
    if isinstance(output, torch.distributions.Normal):
        return output.mean, output.stddev
    if isinstance(output, tuple | list) and len(output) >= 2 and all(isinstance(x, Tensor) for x in output[:2]):
        return output[0], output[1]
    got = f"keys {', '.join(map(str, output))}" if isinstance(output, Mapping) else type(output).__name__
    requirement = "be a pair (mean, std), a mapping with mean and std, or a torch.distributions.Normal"
    raise InputError("the model's output", requirement, got, "for any other output pass forecast=")


def _replace(output: Any, mean: Tensor, std: Tensor) -> Any:
    if isinstance(output, torch.distributions.Normal):
        return torch.distributions.Normal(mean, std, validate_args=False)
    first, second = ("mean", "std") if isinstance(output, Mapping) else (0, 1)
    return replace_entry(replace_entry(output, first, mean), second, std)
