import copy
import inspect
import io
import pickle
import random
import threading
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trueup import METHODS
from trueup._core import progress
from trueup.calibrators import Temperature, Vector
from trueup.integrations.onnx import TOLERANCE, check_export
from trueup.models import Calibrated, calibrate, collect
from trueup.models.batches import logits_of, tensors_in, with_logits
from trueup.models.calibrated import device_of, embedding_of, input_position

CLASSES, WIDTH, N = 4, 6, 50
X = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, CLASSES, (N,), generator=torch.Generator().manual_seed(1))
IDS = torch.randint(0, 20, (N, 5), generator=torch.Generator().manual_seed(2))


class Plus(nn.Module):
    """The plainest map before a network: x ↦ x + δ."""

    def __init__(self, delta):
        super().__init__()
        self.register_buffer("delta", torch.as_tensor(delta))

    def forward(self, x):
        return x + self.delta


def drawn(make):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make()


def network():
    return drawn(
        lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, CLASSES))
    )


class Speaks(nn.Module):
    """A network that says its logits in the way it is told to."""

    def __init__(self, say=lambda z: z):
        super().__init__()
        self.net = network()
        self.say = say

    def forward(self, x):
        return self.say(self.net(x))


class Scaled(nn.Module):
    """A network without a matrix product, which not every CPU has in half precision."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, CLASSES))

    def forward(self, x):
        return x[:, :CLASSES] * self.weight


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = drawn(lambda: nn.Embedding(20, 8))
        self.head = drawn(lambda: nn.Linear(8, CLASSES))

    def forward(self, input_ids, attention_mask=None):
        vectors = self.words(input_ids)
        if attention_mask is not None:
            vectors = vectors * attention_mask[..., None]
        return {"logits": self.head(vectors.mean(dim=1)), "hidden": vectors}


class Positions(Tokens):
    """Two embeddings, as in any transformer."""

    def __init__(self):
        super().__init__()
        self.places = drawn(lambda: nn.Embedding(5, 8))

    def forward(self, input_ids):
        return self.head((self.words(input_ids) + self.places.weight).mean(dim=1))


class Pretrained(Positions):
    def get_input_embeddings(self):
        return self.words


@dataclass
class Record:
    x: Tensor
    labels: Tensor


def loader(size=20):
    return DataLoader(TensorDataset(X, Y), batch_size=size)


def expected(model, *inputs, **keywords):
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        return model(*inputs, **keywords)


# collect


@pytest.mark.parametrize("size", [1, 20, 50])
def test_collect_gives_the_logits_of_evaluation_in_order(size):
    model = network().train()
    logits, labels = collect(model, loader(size))
    torch.testing.assert_close(logits, expected(model, X))
    assert torch.equal(labels, Y)
    assert labels.dtype == torch.int64
    assert not logits.requires_grad
    assert model.training


@pytest.mark.parametrize(
    "batch",
    [
        (X, Y),
        [X, Y],
        (X.numpy(), Y.numpy()),
        (X, Y.tolist()),
        {"x": X, "labels": Y},
        OrderedDict(target=Y, x=X),
        Record(X, Y),
    ],
    ids=["tuple", "list", "numpy", "list of labels", "dict", "OrderedDict", "dataclass"],
)
@pytest.mark.parametrize(
    "say",
    [
        lambda z: z,
        lambda z: (z, "hidden"),
        lambda z: [None, z],
        lambda z: {"logits": z},
        lambda z: SimpleNamespace(logits=z),
    ],
    ids=["tensor", "tuple", "list", "dict", "object"],
)
def test_any_batch_and_any_output(batch, say):
    model = Speaks(say)
    logits, labels = collect(model, [batch])
    assert torch.equal(logits, expected(model.net, X))
    assert torch.equal(labels, Y)


def test_several_arguments_and_arguments_that_are_dicts():
    class Two(nn.Module):
        def forward(self, left, extra, right=0.0):
            return left["a"] + extra + right

    logits, _ = collect(Two(), [({"a": torch.ones(2, 3)}, torch.ones(2, 3), [0, 1])])
    assert torch.equal(logits, torch.full((2, 3), 2.0))
    logits, _ = collect(Two(), [{"right": torch.ones(2, 3), "extra": 3.0, "left": {"a": 1.0}, "y": [0, 1]}])
    assert torch.equal(logits, torch.full((2, 3), 5.0))


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_half_precision_comes_out_in_single(dtype, kind):
    model = Scaled().to(dtype)
    logits, _ = collect(model, [(X.to(dtype), Y)])
    assert logits.dtype == kind
    assert torch.equal(logits, expected(model, X.to(dtype)).to(kind))
    assert next(model.parameters()).dtype == dtype


def test_no_graph_is_built():
    class Looking(nn.Module):
        def forward(self, x):
            assert not torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            return x

    collect(Looking(), [(X.clone().requires_grad_(), Y)])
    assert torch.is_grad_enabled()


def test_a_model_that_reuses_its_memory():
    class Reusing(nn.Module):
        def __init__(self):
            super().__init__()
            self.memory = torch.zeros(2, 3)

        def forward(self, x):
            return self.memory.copy_(x)

    x = torch.arange(12.0).reshape(4, 3)
    assert torch.equal(collect(Reusing(), [(x[:2], [0, 1]), (x[2:], [1, 2])]).logits, x)


def test_the_model_and_the_world_are_as_they_were():
    model = network().train()
    model[1].eval()
    model[0].weight.requires_grad = False
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shuffled = DataLoader(TensorDataset(X, Y), batch_size=9, shuffle=True)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    collect(model, shuffled)
    with pytest.raises(ValueError, match="batch 1: labels"):
        collect(model, [(X, Y), (X, Y + 9)])
    assert torch.equal(states[0], torch.get_rng_state())
    assert repr(states[1]) == repr(np.random.get_state())  # noqa: NPY002
    assert states[2] == random.getstate()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True, False, True, True, True]
    assert [p.requires_grad for p in model.parameters()] == [False] + [True] * 5


def test_ctrl_c_leaves_the_model_as_it_was():
    def impatient():
        yield X, Y
        raise KeyboardInterrupt

    model = network().train()
    with pytest.raises(KeyboardInterrupt):
        collect(model, impatient())
    assert all(module.training for module in model.modules())
    assert model[0].weight.requires_grad


class Cast(nn.Module):
    def forward(self, x):
        return x.long()


@pytest.mark.parametrize(
    ("model", "batches", "message"),
    [
        (network(), [], "loader must give at least one batch, got none"),
        (network(), iter([]), "an iterator can be read only once"),
        (network(), (X, Y), "batch 0: it must be a tuple or list .* got Tensor of shape"),
        (network(), [(X, Y), (X, Y[:9])], "batch 1: labels must have 50 entries, one for each row of logits, got 9"),
        (network(), [(X, Y), (X, Y + 1)], r"batch 1: labels must lie in 0\.\.3, got 1\.\.4"),
        (network(), [(X, Y), (X * float("nan"), Y)], "batch 1: logits must be finite, got nan"),
        (nn.Identity(), [(X, Y), (X[:, :5], Y)], "batch 1: logits must have 6 classes as before, got 5"),
        (nn.Flatten(0), [(X, Y)], r"batch 0: logits must have shape \(n, classes\), got \(300,\); a binary score"),
        (nn.Unflatten(1, (2, 3)), [(X, Y)], r"batch 0: logits must have shape .* tokens or pixels go through flatten"),
        (Cast(), [(X, Y)], "batch 0: logits must be floating point, got int64"),
        (Speaks(lambda z: {"out": z}), [(X, Y)], "batch 0: the model's output must be .* got dict with keys 'out'"),
        (nn.LazyLinear(3), [(X, Y)], "model must have all its shapes"),
    ],
)
def test_errors_say_what_was_wanted_and_where(model, batches, message):
    with pytest.raises(ValueError, match=message):
        collect(model, batches)


def test_an_error_of_the_model_is_the_models():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        collect(network(), [(X[:, :3], Y)])
    with pytest.raises(TypeError, match="unexpected keyword argument 'volume'"):
        collect(network(), [{"volume": X, "labels": Y}])


def test_batches_go_to_the_device_of_the_model_or_the_one_named():
    class Where(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("here", torch.zeros(1))
            self.seen = []

        def forward(self, x):
            self.seen.append(x.device.type)
            return torch.zeros(len(x), 3)

    model = Where()
    collect(model, [(X, Y % 3)])
    collect(model, [(X, Y % 3)], device="cpu")
    assert model.seen == ["cpu", "cpu"]
    assert device_of(nn.Identity()) == torch.device("cpu")
    assert device_of(Where().to("meta")) == torch.device("meta")
    assert device_of(nn.Sequential(nn.Linear(2, 2, device="meta"), Where())) == torch.device("meta")


def test_progress_is_told_and_can_be_switched_off(monkeypatch):
    asked = []

    def track(iterable, **options):
        asked.append(options)
        return progress.track(iterable, **options)

    monkeypatch.setattr("trueup.models.calibrated.track", track)
    collect(network(), loader())
    collect(network(), loader(), progress=False)
    assert [options["enabled"] for options in asked] == [True, False]


# Calibrated


def test_it_is_the_map_then_the_model_then_the_calibrator():
    model, delta = network().eval(), torch.linspace(-1, 1, WIDTH)
    z = Calibrated(model, Plus(delta), Temperature(2.0))(X)
    torch.testing.assert_close(z, model(X + delta) / 2)
    assert torch.equal(Calibrated(model)(X), model(X))
    torch.testing.assert_close(Calibrated(model, before=Plus(delta))(X), model(X + delta))
    torch.testing.assert_close(Calibrated(model, after=Temperature(3.0))(X), model(X) / 3)


def test_it_shares_the_model_and_forces_no_mode():
    model = network()
    model[1].eval()
    model[0].weight.requires_grad = False
    calibrated = Calibrated(model, Plus(0.0), Temperature(2.0))
    assert calibrated.model is model
    assert calibrated.training
    calibrated(X).sum().backward()
    assert [module.training for module in model] == [True, False, True, True, True]
    assert [p.requires_grad for p in model.parameters()] == [False] + [True] * 5
    assert model[4].weight.grad is not None
    assert not Calibrated(network().eval()).training
    calibrated.eval()
    assert not model.training
    calibrated.train()
    assert model[3].training


@pytest.mark.parametrize(
    "say",
    [
        lambda z: (z, "hidden"),
        lambda z: {"loss": 1.0, "logits": z},
        lambda z: SimpleNamespace(logits=z, hidden="hidden"),
    ],
)
def test_only_the_logits_are_replaced(say):
    model = Speaks(say).eval()
    result, raw = Calibrated(model, after=Temperature(2.0))(X), model(X)
    assert type(result) is type(raw)
    assert torch.equal(logits_of(result), logits_of(raw) / 2)
    assert repr(result) == repr(with_logits(raw, logits_of(raw) / 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_stay(dtype):
    model = Scaled().eval().to(dtype)
    before, after = Plus(torch.ones(WIDTH, dtype=torch.float64)), Temperature(2.0)
    z = Calibrated(model, before, after)(X.to(dtype))
    assert z.dtype == dtype
    assert torch.equal(z, after(model(X.to(dtype) + 1)))
    assert Calibrated(model, after=Plus(torch.ones(CLASSES, dtype=torch.float64)))(X.to(dtype)).dtype == dtype


class Many(nn.Module):
    """Says which of its inputs were shifted."""

    def forward(self, *args, **kwargs):
        flat = [t for _, t in tensors_in((args, kwargs))]
        return torch.stack([t.double().mean() for t in flat])[None]


ONE, INT, BOOL = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("args", "kwargs", "shifted"),
    [
        ((ONE,), {}, [1]),
        ((ONE, ONE), {}, [1, 0]),
        ((INT, ONE), {}, [0, 1]),
        (("text", BOOL, ONE), {}, [0, 1]),
        ((), {"x": ONE, "z": ONE}, [1, 0]),
        ((), {"ids": INT, "x": ONE}, [0, 1]),
        ((INT,), {"x": ONE}, [0, 1]),
        ((ONE,), {"x": ONE}, [1, 0]),
        (({"ids": INT, "image": ONE},), {}, [0, 1]),
        (([ONE, ONE], ONE), {}, [1, 0, 0]),
        ((INT,), {"attention_mask": ONE, "image": ONE}, [0, 0, 1]),
        ((), {"mask": ONE}, [1]),
    ],
)
def test_before_acts_on_the_first_floating_input(args, kwargs, shifted):
    calibrated = Calibrated(Many(), before=Plus(5.0))
    assert calibrated(*args, **kwargs)[0].tolist() == [1.0 + 5.0 * s for s in shifted]
    assert torch.equal(ONE, torch.ones(2, 3))


def test_a_dict_that_is_an_argument_stays_as_it_is():
    given = {"image": ONE}
    Calibrated(Many(), before=Plus(5.0))(given)
    assert given["image"] is ONE


def test_inputs_without_numbers():
    with pytest.raises(ValueError, match=r"must contain floating-point tensors for `before`, got str, mask=Tensor"):
        Calibrated(Many(), before=Plus(1.0))("text", mask=BOOL)
    with pytest.raises(ValueError, match="got nothing"):
        input_position(Many(), (), {})


@pytest.mark.parametrize("mask", [None, torch.ones(N, 5), torch.ones(N, 5, dtype=torch.int64)])
def test_tokens_are_shifted_at_their_embedding(mask):
    model, delta = Tokens().eval(), torch.linspace(-1, 1, 8)
    calibrated = Calibrated(model, Plus(delta), Temperature(2.0))
    expected = model.head((model.words(IDS) + delta).mean(dim=1)) / 2
    for result in (calibrated(IDS, mask), calibrated(input_ids=IDS, attention_mask=mask)):
        torch.testing.assert_close(result["logits"], expected)
        torch.testing.assert_close(result["hidden"], model.words(IDS) + delta)
    assert not model.words._forward_hooks
    assert not torch.equal(model(IDS)["logits"], expected)


def test_the_hook_is_gone_after_an_error_too():
    model = Tokens()
    with pytest.raises(IndexError):
        Calibrated(model, Plus(torch.ones(8)))(IDS + 1000)
    assert not model.words._forward_hooks


def test_threads_that_share_a_model_do_not_shift_each_others_tokens():
    model, inside, done = Tokens().eval(), threading.Event(), threading.Event()

    class Waiting(Plus):
        def forward(self, x):
            inside.set()
            assert done.wait(timeout=1200)
            return super().forward(x)

    result = []
    slow = threading.Thread(target=lambda: result.append(Calibrated(model, Waiting(torch.ones(8)))(IDS)["logits"]))
    slow.start()
    assert inside.wait(timeout=1200)
    plain, shifted = model(IDS)["logits"], Calibrated(model, Plus(torch.full((8,), 2.0)))(IDS)["logits"]
    done.set()
    slow.join()
    for delta, z in ((0.0, plain), (1.0, result[0]), (2.0, shifted)):
        torch.testing.assert_close(z, model.head((model.words(IDS) + delta).mean(dim=1)))


def test_which_embedding_is_meant():
    tokens, pretrained = Tokens(), Pretrained()
    assert embedding_of(tokens) is tokens.words
    assert embedding_of(pretrained) is pretrained.words
    assert embedding_of(nn.Sequential(OrderedDict(encoder=pretrained, other=nn.Embedding(3, 3)))) is pretrained.words
    assert embedding_of(Calibrated(Calibrated(tokens))) is tokens.words


def test_an_embedding_that_cannot_be_found_is_explained():
    wish = "inputs are integers, so the map acts on the output of its input embedding: model must have one"
    with pytest.raises(ValueError, match=f"{wish} nn.Embedding, got 2 of them: words, places; .*get_input_embeddings"):
        Calibrated(Positions(), Plus(torch.ones(8)))(IDS)
    with pytest.raises(ValueError, match=f"{wish} nn.Embedding, got none"):
        Calibrated(nn.Linear(5, 3), Plus(1.0))(IDS)


@pytest.mark.parametrize("answer", [NotImplementedError, None])
def test_a_base_class_may_promise_an_embedding_it_has_not(answer):
    class Base(Tokens):
        def get_input_embeddings(self):
            if answer:
                raise answer

    model = Base()
    assert embedding_of(model) is model.words


def test_an_embedding_that_the_model_goes_around_is_no_silent_success():
    class Around(Tokens):
        def forward(self, input_ids):
            return self.head(nn.functional.embedding(input_ids, self.words.weight).mean(dim=1))

    with pytest.raises(ValueError, match="but the model never called it"):
        Calibrated(Around(), Plus(torch.ones(8)))(IDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": network(), "after": Temperature}, "after must be an nn.Module, got the class Temperature"),
        ({"model": network(), "after": 2.0}, "after must be an nn.Module, got float"),
        ({"model": network(), "before": torch.ones(3)}, "before must be an nn.Module, got Tensor"),
        ({"model": None}, "model must be an nn.Module, got NoneType"),
        ({"model": abs}, "model must be an nn.Module, got builtin_function_or_method"),
    ],
)
def test_parts_that_are_no_modules(arguments, message):
    with pytest.raises(ValueError, match=message):
        Calibrated(**arguments)


def test_gradients_reach_the_input_and_the_map():
    model = network().eval()
    delta = torch.zeros(WIDTH, requires_grad=True)
    plus = Plus(0.0)
    del plus.delta
    plus.delta = delta
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(Calibrated(model, plus, Temperature(2.0))(x).square().sum(), delta)
    (gx,) = torch.autograd.grad((model(x) / 2).square().sum(), x)
    torch.testing.assert_close(g, gx.sum(dim=0))


# A calibrated network is just a network


def clamped():
    return Calibrated(network().eval(), Plus(torch.linspace(-1, 1, WIDTH)), Temperature(1.5))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
def test_copies(copied):
    one = clamped()
    other = copied(one)
    assert torch.equal(one(X), other(X))
    assert other.model is not one.model
    assert inspect.signature(other.forward) == inspect.signature(one.forward)
    with torch.no_grad():
        other.model[0].weight.zero_()
    assert not torch.equal(one(X), other(X))


def test_state_dict():
    one = clamped()
    state = one.state_dict()
    assert {"before.delta", "calibrator.temperature", "model.0.weight", "model.1.running_mean"} <= set(state)
    other = Calibrated(network().eval(), Plus(torch.zeros(WIDTH)), Temperature(1.0))
    assert not torch.equal(one(X), other(X))
    other.load_state_dict(state)
    assert torch.equal(one(X), other(X))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert set(torch.load(file, weights_only=True)) == set(state)


def test_its_signature_is_the_models():
    assert list(inspect.signature(Calibrated(Tokens()).forward).parameters) == ["input_ids", "attention_mask"]
    assert str(inspect.signature(clamped().forward)) == str(inspect.signature(nn.Sequential().forward))
    assert Calibrated.forward.__doc__


def test_it_can_be_wrapped_and_hooked():
    one = clamped()
    seen = []
    one.register_forward_hook(lambda module, inputs, output: seen.append(output))
    z = Calibrated(one, after=Temperature(2.0))(X)
    torch.testing.assert_close(z, seen[0] / 2)
    one.forward = lambda x: x  # as tools that patch modules do
    assert one(X) is X


def test_collecting_from_it():
    one = clamped()
    torch.testing.assert_close(collect(one, loader()).logits, one(X).detach())


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
def test_it_leaves_torch_as_any_network_does():
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"{name} is not installed: trueup[onnx]")
    ways = check_export(clamped(), X)
    assert set(ways) == {"torch.export", "ONNX"}
    for way, difference in ways.items():
        assert isinstance(difference, float), (way, difference)
        assert difference <= TOLERANCE


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_with_names(strict):
    one = clamped()
    program = torch.export.export(one, (X[:3],), dynamic_shapes={"input": {0: torch.export.Dim("rows")}}, strict=strict)
    for n in (1, 2, N):
        torch.testing.assert_close(program.module()(X[:n]), one(X[:n]))


def test_torch_export_of_tokens_and_dicts():
    one = Calibrated(Tokens().eval(), Plus(torch.ones(8)), Vector(torch.ones(CLASSES), torch.arange(4.0)))
    rows = {0: torch.export.Dim("rows")}
    program = torch.export.export(one, (IDS[:3],), dynamic_shapes=(rows,), strict=False)
    result = program.module()(IDS)
    torch.testing.assert_close(result["logits"], one(IDS)["logits"])
    assert not one.model.words._forward_hooks


# calibrate


def test_a_method_is_lifted_to_networks():
    model = network()
    calibrated = calibrate(model, loader(), "vector")
    assert calibrated.model is model
    assert calibrated.before is None
    expected = METHODS["vector"](*collect(model, loader()))
    np.testing.assert_array_equal(calibrated.after.weight, expected.weight)
    model.eval()
    torch.testing.assert_close(calibrated(X), expected(model(X)))


def test_options_of_a_lifted_method_go_to_collect(monkeypatch):
    asked = {}

    def collect(model, loader, **options):
        asked.update(options)
        return X[:, :4], Y

    monkeypatch.setattr("trueup.models.calibrated.collect", collect)
    calibrate(network(), loader(), "identity", device="cpu", progress=False)
    assert asked == {"device": "cpu", "progress": False}


def test_batch_norm_statistics_never_move():
    model = network().train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    for _ in range(3):
        calibrate(model, loader(), "identity")
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert int(model[1].num_batches_tracked) == 0


def test_a_calibrator_in_the_place_of_the_input_map_is_refused():
    with pytest.raises(
        ValueError, match="before must map the network's input, got the calibrator Temperature; .* after="
    ):
        Calibrated(nn.Identity(), Temperature(2.0))
