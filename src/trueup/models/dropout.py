"""Monte-Carlo dropout: several passes with active dropout, and the uncertainty of their samples.

`mc_dropout` returns samples (passes, n, K). Entropy, mutual information and variance of samples keep torch's graph.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from trueup._core.arrays import as_logits
from trueup._core.types import Array
from trueup.convert import ClassAxis
from trueup.models._tensors import match_kind, to_tensor, upcast_half
from trueup.models.batches import Arguments, arguments_of, logits_of
from trueup.models.freezing import frozen, unwrap

Seed: TypeAlias = int | Sequence[int] | np.random.Generator
Network = TypeVar("Network", bound=nn.Module)

MEMORY = 2**25  # bytes of repeated input that go through a network at once; activations take a multiple
VARIANCE_FLOOR = 1e-6  # added to a predicted variance, which stays positive
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # layers that dropout may be inserted before
Halves: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]
HALVES = (("trunk", "head"), ("forward_features", "forward_head"))  # ours, and timm's

_divided: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()
_traced: WeakKeyDictionary[nn.Module, tuple[Any, Halves | None]] = WeakKeyDictionary()


def mc_dropout(model: nn.Module, inputs: Any, passes: int = 10, *, seed: Seed = 0, memory: int = MEMORY) -> Tensor:
    """Run a network several times with active dropout layers, and return the samples.

    Everything else stays in evaluation mode, such as batch-norm. No gradients are kept, and the network and all global
    random states do not change. The layers before the first active dropout run once, if they can be separated.

    Parameters
    ----------
    model
        A network with dropout.
    inputs
        A tensor whose rows are the samples, a tuple of arguments, or a mapping of keywords.
    passes
        Number of passes.
    seed
        Seed or generator. A generator draws new masks for each batch:
        ``torch.cat([mc_dropout(net, x, seed=rng) for x, y in loader], dim=1)``.
    memory
        Bytes of repeated input that run as one batch. With 0 the passes run one by one, with other masks.

    Returns
    -------
    Tensor
        Samples, shape (passes, n, …).

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(4, 100), nn.Dropout(0.5), nn.Linear(100, 3)).eval()
    >>> samples = mc_dropout(net, torch.ones(7, 4), passes=5)
    >>> samples.shape, len(samples.unique(dim=0)), net[1].training
    (torch.Size([5, 7, 3]), 5, False)

    References
    ----------
    Gal & Ghahramani (2016), Dropout as a Bayesian approximation, arXiv:1506.02142.
    """
    if passes < 1:
        raise ValueError(f"passes must be at least 1, got {passes}")
    model = unwrap(model)
    if not has_dropout(model):
        layers = [module for module in model.modules() if dropout_probability(module) is not None]
        fact = f"{len(layers)} with p = 0" if layers else "none"
        raise ValueError(f"model must have a dropout layer with p above 0, got {fact}; insert_dropout adds one")
    with dropout_enabled(model):
        start = seed_rng(int(np.random.default_rng(seed).integers(2**63)))
        samples = sample_passes(model, model, arguments_of(inputs), passes, memory)
        if samples.numel() and rng_state().equal(start):
            raise ValueError("model must use its dropout layers, got a pass that reached none of them")
    return samples


def insert_dropout(model: Network, p: float, *, layers: int | Sequence[str] = 1, in_place: bool = False) -> Network:
    """Copy a network, with dropout before its final layers; the names of all weights stay.

    Parameters
    ----------
    model
        The network.
    p
        Probability of dropout, between 0 and 1.
    layers
        Number of final linear and convolutional layers, in the order of their creation, or their names.
    in_place
        Whether to change the network itself instead of a copy.

    Returns
    -------
    Module
        The network with dropout.

    Examples
    --------
    >>> net = insert_dropout(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)), 0.3)
    >>> net[2].dropout, list(net.state_dict())
    (Dropout(p=0.3, inplace=False), ['0.weight', '0.bias', '2.weight', '2.bias'])
    """
    model = model if in_place else copy.deepcopy(model)
    # Attention uses the weights of its linear layers (a subclass) without calling them.
    inner = NonDynamicallyQuantizableLinear
    there = [n for n, module in model.named_modules() if isinstance(module, WEIGHTED) and not isinstance(module, inner)]
    chosen = there[-layers:] if isinstance(layers, int) else [layers] if isinstance(layers, str) else list(layers)
    if not 0 < p < 1:
        raise ValueError(f"p must lie between 0 and 1, got {p}")
    if not there:
        raise ValueError(f"model must have a linear or convolutional layer, got none in {type(model).__name__}")
    if not chosen or not {*chosen} <= {*there} or (isinstance(layers, int) and not 0 < layers <= len(there)):
        raise ValueError(f"layers must be one or more of {', '.join(there)}, or their number, got {layers!r}")
    for layer in map(model.get_submodule, chosen):
        if not hasattr(layer, "dropout"):
            layer.register_forward_pre_hook(_drop)
        layer.dropout = nn.Dropout(p).train(layer.training)
    return model


def predictive_entropy(samples: Array, *, class_axis: ClassAxis = None) -> Array:
    """Compute the entropy of the mean prediction in nats: H(p̄) with p̄ the mean over passes of softmax(z_s).

    Parameters
    ----------
    samples
        Logits of several passes, shape (passes, n, classes), or with more dimensions; see `class_axis`.
    class_axis
        Position of the classes of tokens or pixels: "last" for (passes, n, …, K), "first" for (passes, n, K, …).

    Returns
    -------
    array
        Entropy of each sample, shape (n,) or (n, …).

    Examples
    --------
    >>> samples = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]])
    >>> f"{predictive_entropy(samples).item():.4f}"
    '0.6931'
    """
    return match_kind(entropy_of(mean_log_probs(_check_samples(samples, class_axis))), samples)


def mutual_information(samples: Array, *, class_axis: ClassAxis = None) -> Array:
    """Compute the mutual information of prediction and weights in nats: H(p̄) − mean over passes of H(p_s).

    Parameters
    ----------
    samples
        Logits of several passes, shape (passes, n, classes), or with more dimensions; see `class_axis`.
    class_axis
        Position of the classes of tokens or pixels: "last" for (passes, n, …, K), "first" for (passes, n, K, …).

    Returns
    -------
    array
        Mutual information of each sample, shape (n,) or (n, …); 0 if all passes agree.

    Examples
    --------
    >>> samples = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]])
    >>> f"{mutual_information(samples).item():.4f}"
    '0.3278'

    References
    ----------
    Houlsby et al. (2011), Bayesian active learning for classification and preference learning, arXiv:1112.5745.
    """
    log_probs = _check_samples(samples, class_axis)
    return match_kind((entropy_of(mean_log_probs(log_probs)) - entropy_of(log_probs).mean(dim=0)).clamp(min=0), samples)


def probability_variance(samples: Array, *, class_axis: ClassAxis = None) -> Array:
    """Compute the variance of the probabilities between passes: Σ_k mean over passes of (p_sk − p̄_k)².

    Parameters
    ----------
    samples
        Logits of several passes, shape (passes, n, classes), or with more dimensions; see `class_axis`.
    class_axis
        Position of the classes of tokens or pixels: "last" for (passes, n, …, K), "first" for (passes, n, K, …).

    Returns
    -------
    array
        Variance of each sample, shape (n,) or (n, …).

    Examples
    --------
    >>> samples = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]])
    >>> f"{probability_variance(samples).item():.4f}"
    '0.2900'
    """
    return match_kind(_check_samples(samples, class_axis).exp().var(dim=0, correction=0).sum(dim=-1), samples)


class Moments(NamedTuple):
    """Moments of the mixture of all passes: the mean, the variance between passes and the mean variance within."""

    mean: Any
    """Mean over the passes, shape (n,) or (n, targets)."""
    between: Any
    """Variance of the predicted means between passes."""
    within: Any
    """Mean over the passes of the predicted variance; 0 without a variance head."""

    @property
    def variance(self) -> Any:
        """The predictive variance: between passes (the network's uncertainty) plus within (noise in the data)."""
        return self.between + self.within


def moments(samples: Array, *, variance_head: bool = False) -> Moments:
    """Compute mean and variance of a regression: μ̄ = mean μ_s, variance mean (μ_s − μ̄)² + mean σ_s².

    Parameters
    ----------
    samples
        Outputs of several passes, shape (passes, n) or (passes, n, targets).
    variance_head
        Whether samples are (passes, n, 2·targets): the means, then v with σ² = ln(1 + eᵛ) + 1e-6.

    Returns
    -------
    Moments
        Mean and variances, shape (n,) for one target, else (n, targets).

    Examples
    --------
    >>> mixture = moments(torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]]), variance_head=True)
    >>> [f"{part.item():.4f}" for part in (*mixture, mixture.variance)]
    ['2.0000', '1.0000', '0.6931', '1.6931']

    References
    ----------
    Lakshminarayanan et al. (2017), Simple and scalable predictive uncertainty estimation using deep ensembles,
    arXiv:1612.01474.
    """
    x = to_tensor(samples)
    x = x[:, :, None] if x.ndim == 2 and not variance_head else x
    if x.ndim != 3 or not len(x) or not x.is_floating_point() or (variance_head and x.shape[2] % 2):
        wish = "(passes, n, 2·targets)" if variance_head else "(passes, n) or (passes, n, targets)"
        raise ValueError(f"samples must be real of shape {wish}, got {x.dtype}, {tuple(x.shape)}")
    means, *raw = (part.squeeze(2) for part in upcast_half(x).chunk(2 if variance_head else 1, dim=2))
    within = (functional.softplus(raw[0]) + VARIANCE_FLOOR).mean(dim=0) if raw else torch.zeros_like(means[0])
    return Moments(*(match_kind(part, samples) for part in (means.mean(dim=0), means.var(dim=0, correction=0), within)))


def mean_log_probs(log_probs: Tensor) -> Tensor:
    """Compute ln p̄ from log-probabilities (passes, …), exactly also for probabilities of 0."""
    return log_probs.logsumexp(dim=0) - math.log(len(log_probs))


def entropy_of(log_probs: Tensor) -> Tensor:
    """Compute −Σ_k p_k ln p_k over the final dimension."""
    return -(log_probs.exp() * log_probs).sum(dim=-1)


def log_probs_of(samples: Tensor, class_axis: ClassAxis) -> Tensor:
    """Compute log-probabilities (passes, n, …, K) of samples of logits, keeping their graph."""
    if samples.ndim < 3 or not len(samples) or not samples.is_floating_point():
        fact = f"{samples.dtype}, {tuple(samples.shape)}"
        raise ValueError(f"samples must be real of shape (passes, n, K) with at least one pass, got {fact}")
    if class_axis not in ("first", "last") and not (class_axis is None and samples.ndim == 3):
        shapes = '"first" (passes, n, K, …) or "last" (passes, n, …, K)'
        raise ValueError(f"class_axis must be {shapes} for samples {tuple(samples.shape)}, got {class_axis!r}")
    return upcast_half(samples.movedim(2, -1) if class_axis == "first" else samples).log_softmax(dim=-1)


def _check_samples(samples: Any, class_axis: ClassAxis) -> Tensor:
    log_probs = log_probs_of(to_tensor(samples), class_axis)
    as_logits(log_probs.flatten(end_dim=-2), "samples")
    return log_probs


def _drop(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (layer.dropout(args[0]), *args[1:])  # type: ignore[operator]


def has_dropout(model: nn.Module) -> bool:
    """Return whether a network has a dropout layer with a probability above 0."""
    return any(map(dropout_probability, model.modules()))


def dropout_probability(module: nn.Module) -> float | None:
    """Return the probability of a layer with dropout (also attention and recurrence); None for other layers."""
    if isinstance(module, _DropoutNd):
        return module.p
    return module.dropout if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else None


@contextmanager
def dropout_enabled(model: nn.Module) -> Iterator[None]:
    """Freeze a network with its dropout layers active."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with frozen(model), torch.no_grad():
        try:
            torch.backends.mha.set_fastpath_enabled(False)  # it ignores dropout layers
            for module in model.modules():
                module.training = bool(dropout_probability(module))
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


def _is_divided(model: nn.Module, whole: Callable[..., Any], halves: Halves, inputs: Arguments) -> bool:
    """Test once, on one row, whether head(trunk(·)) is the whole network and its trunk is deterministic.

    In an unknown network these names may mean anything, and a subclass may do more in its forward.
    """
    (args, kwargs), (trunk, head) = inputs, halves
    # A trunk may have other argument names, and be random in training only.
    known, form = _divided.setdefault(model, {}), (model.training, len(args), *kwargs)
    if form in known:
        return known[form]
    training, modes = model.training, [(module, module.training) for module in model.modules()]
    with dropout_enabled(model):
        if _is_rows(inputs):  # away from 0, where different networks may agree
            row = args[0][:1]
            args = (row + torch.randn_like(row) if row.is_floating_point() else row.clone(),)
        seed_rng(0)
        expected = logits_of(whole(*args, **kwargs))
        start = seed_rng(0)
        try:
            features = trunk(*args, **kwargs)
            steady = rng_state().equal(start)
            output = logits_of(head(features))
            if steady and training:  # a trunk may be random in training only
                for module, mode in modes:
                    module.training = mode
                start = seed_rng(0)
                trunk(*inputs[0], **kwargs)
                steady = rng_state().equal(start)
        except Exception:
            steady, output = False, expected
    same = output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-4, atol=1e-5)
    return known.setdefault(form, steady and same and output.numel() > 0)


def _halves(model: nn.Module) -> Halves | None:
    named: Any = ([getattr(model, name, None) for name in names] for names in HALVES)
    if (pair := next((pair for pair in named if all(map(callable, pair))), None)) is not None:
        return pair
    state = [(id(module), module.training, dropout_probability(module)) for module in model.modules()]
    if model not in _traced or _traced[model][0] != state:
        _divided.pop(model, None)
        _traced[model] = state, _trace_halves(model)
    return _traced[model][1]


def _trace_halves(model: nn.Module) -> Halves | None:
    """Split a traceable network before its first active dropout, if one tensor enters the rest of the network."""
    try:
        with torch.random.fork_rng(devices=[]):  # a constant that the network draws would move the global state
            traced = fx.symbolic_trace(model)
    except Exception:  # control flow that depends on values cannot be traced
        return None
    tail: dict[fx.Node, None] = {}
    for node in traced.graph.nodes:
        is_module = node.op == "call_module"
        drops = has_dropout(traced.get_submodule(str(node.target))) if is_module else "dropout" in str(node.target)
        if drops or any(source in tail for source in node.all_input_nodes):
            tail[node] = None
    entering = list(dict.fromkeys(s for node in tail for s in node.all_input_nodes if s not in tail))
    front = [node for node in traced.graph.nodes if node not in tail]
    if len(entering) != 1 or entering[0].op == "placeholder":
        return None

    def trunk(*args: Any) -> Any:
        run = fx.Interpreter(traced, garbage_collect_values=False)
        run.args_iter = iter(args)
        for node in front:
            run.env[node] = run.run_node(node)
        return run.env[entering[0]]

    def head(features: Any) -> Any:
        return fx.Interpreter(traced).run(initial_env={**dict.fromkeys(front), entering[0]: features})

    return trunk, head


def _is_rows(inputs: Arguments) -> bool:
    args, kwargs = inputs
    return len(args) == 1 and not kwargs and isinstance(args[0], Tensor)


def sample_passes(
    model: nn.Module, whole: Callable[..., Any], inputs: Arguments, passes: int, memory: int | None
) -> Tensor:
    """Compute outputs (passes, n, …) of `whole`, the model's call, or of its head only, in the current mode."""
    args, kwargs = inputs
    halves = _halves(model)
    if halves is not None and _is_divided(model, whole, halves, inputs):
        start = rng_state()
        features = halves[0](*args, **kwargs)
        if rng_state().equal(start):
            whole, args, kwargs = halves[1], (features,), {}
        else:  # it has changed since the test
            _divided.pop(model)
    if not _is_rows((args, kwargs)):
        return torch.stack([logits_of(whole(*args, **kwargs)) for _ in range(passes)])
    x: Tensor = args[0]
    at_once = passes if memory is None else min(passes, max(1, memory // max(1, x.nbytes)))
    samples = []
    for first in range(0, passes, at_once):
        now = min(at_once, passes - first)
        output = logits_of(whole(x.repeat(now, *(1 for _ in x.shape[1:]))))  # a copy, for dropout in place
        if len(output) != now * len(x):
            raise ValueError(f"the model's output must have a row for each input, got {len(output)} for {now * len(x)}")
        samples.append(output.reshape(now, len(x), *output.shape[1:]))
    return torch.cat(samples)


def rng_state() -> Tensor:
    """Return the global random states, which change with every draw."""
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return torch.cat([torch.get_rng_state(), *on_cuda])


def seed_rng(seed: int) -> Tensor:
    """Seed the global random states and return them."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    return rng_state()
