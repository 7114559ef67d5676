import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from trueup import losses, metrics
from trueup.models import mc_dropout
from trueup_studies import STUDIES, Options, Store, cost, run
from trueup_studies.claims import judge_claims
from trueup_studies.papers.clue import clue_study as clue
from trueup_studies.papers.clue import clue_tables
from trueup_studies.papers.clue import mc_dropout as mc
from trueup_studies.tables import Column, paired_differences

STUDY = STUDIES["clue"]
SMALL = ("plain", "gaussian", "batch_0.5", "group_0.5", "group_0.5_head")


@pytest.fixture
def quick(monkeypatch):
    """One epoch each: the figures mean nothing."""
    small = {name: {**how, "epochs": 1} for name, how in clue.HOW.items()}
    small["digits"]["network"] = {"width": 2, "dropout": 0.3}
    small["descriptions"]["network"] = {"width": 8, "heads": 1, "layers": 1, "dropout": 0.1}
    monkeypatch.setattr(clue, "HOW", small)
    monkeypatch.setattr(clue, "SHIFTED", 20)
    monkeypatch.setattr(clue, "PASSES", 2)


def settings(data, method, **more):
    return {"data": data, **clue.HOW[data], "passes": [2, 3], "method": method, "seed": 0, **more}


def test_the_default_study_in_small(tmp_path, quick):
    options = Options(seeds=2, methods=SMALL)
    store = Store(tmp_path / "results.sqlite")
    ran = run(STUDY, store, options=options, progress=False)
    assert (ran.failed, ran.finished) == ({}, 2 * (3 + 5 + 3))
    rows = store.rows(STUDY.cells(options))
    tables = STUDY.tables(rows, options)
    kinds = ["classification", "language", "regression"]
    named = [name for kind in kinds for name in (kind, f"{kind}-differences", f"{kind}-levels")]
    assert list(tables) == [*named, "shift", "ood", "overhead"]
    assert list(tables["regression"].groups["diabetes"]) == [
        "squared error", "Gaussian NLL, variance head", "CLUE batch, α 0.5", "CLUE group, α 0.5",
        "CLUE group, α 0.5, variance head",
    ]  # fmt: skip
    assert list(tables["shift"].groups) == [f"digits, severity {severity}" for severity in (0, 1, 3, 5)]
    assert {group.split(", ")[1] for group in tables["ood"].groups} == {"noise", "inverted", "pixels in disorder"}
    levels = tables["classification-levels"].groups["digits"]
    assert list(levels) == ["CLUE group, α 0.5 − batch"]
    drawn = STUDY.figures(rows, options)
    assert list(drawn) == [
        "alignment-digits", "shift-digits-ece", "shift-digits-nll", "alignment-diabetes", "alignment-descriptions",
    ]  # fmt: skip
    cost = tables["overhead"].groups["digits"]
    assert cost["cross-entropy"]["ratio"].mean == 1 < cost["CLUE batch, α 0.5"]["ratio"].mean < 5


def test_work_is_deterministic_and_keeps_the_random_state(quick):
    state = torch.get_rng_state()
    one = clue.work(settings("descriptions", "group_0.9"))
    assert torch.get_rng_state().equal(state)
    torch.manual_seed(7)
    two = clue.work(settings("descriptions", "group_0.9"))
    assert one == two
    assert clue.work(settings("descriptions", "group_0.5")) != one


def test_figures_are_those_of_the_mean_of_the_passes(quick):
    data = mc.load_data_set("digits", None, 0)
    _, val, test = mc.normalised_tensors(data)
    network = mc.make_network(data, {"width": 2, "dropout": 0.3}, 0).eval()
    val = (val[0], network(val[0]).argmax(dim=1).add(torch.arange(len(val[0])) % 3 == 0) % 10)  # mostly right
    test = (test[0][:100], test[1][:100])
    said = mc.forecast([network], test, "image", 4)
    rng = np.random.default_rng(0)
    probs = mc_dropout(network, test[0], 4, seed=rng).double().softmax(dim=2).mean(dim=0)
    torch.testing.assert_close(said.prediction.exp(), probs, rtol=1e-5, atol=1e-7)
    found = mc.figures(said, mc.forecast([network], val, "image", 4))
    assert found["ece"] == pytest.approx(metrics.ece(probs.log(), test[1]), abs=1e-6)
    error = -probs[torch.arange(100), test[1]].log().numpy()
    unsure = stats.entropy(probs.numpy(), axis=1)
    assert found["gap"] == pytest.approx(abs(error.mean() - unsure.mean()), abs=1e-5)
    order = np.argsort(unsure)
    parts = [abs((error - unsure)[order[i : i + 10]].mean()) for i in range(0, 100, 10)]
    assert found["alignment"] == pytest.approx(np.mean(parts), abs=1e-5)
    assert found["correlation"] == pytest.approx(np.corrcoef(unsure, error)[0, 1], abs=1e-4)


def test_figures_of_numbers_by_hand():
    mean, variance, truth = (torch.tensor(x, dtype=torch.float64) for x in ([0.0, 0.0], [1.0, 4.0], [1.0, 4.0]))
    found = mc.figures(mc.Forecast(mean, variance, truth), mc.Forecast(mean, variance, truth))
    assert found["gap"] == pytest.approx(8.5 - 2.5)
    assert found["alignment"] == pytest.approx((0 + 12) / 2)
    assert found["rmse"] == pytest.approx(math.sqrt(8.5))
    assert found["nll"] == pytest.approx((2 * math.log(2 * math.pi) / 2 + math.log(2) + 0.5 + 2) / 2)
    assert found["nll_after"] < found["nll"]  # s² = (1 + 4)/2 instead of 1


def test_the_choice_is_made_on_validation_unless_for_an_oracle():
    def row(method, seed, val, test):
        return {"method": method, "seed": seed, "val_nll": val, "nll": test}

    rows = [row("batch_0.5", s, 0.2, 0.9) for s in (0, 1)] + [row("group_0.9", s, 0.3, 0.1) for s in (0, 1)]
    rows += [row("sample_0.5", 0, 0.0, 0.0)]  # not of every seed
    rows += [row("batch_0.9_head", 0, 0.4, 0.4)]
    assert clue_tables.choose_clue(rows) == "batch_0.5"
    assert clue_tables.choose_clue(rows, oracle=True) == "group_0.9"
    assert clue_tables.choose_clue(rows, head=True) == "batch_0.9_head"
    assert clue_tables.choose_clue([]) is None
    unknown = [{**row, "val_nll": math.nan} if row["method"] == "batch_0.5" else row for row in rows]
    assert clue_tables.choose_clue(unknown) == "group_0.9"


def test_paired_differences_are_seed_by_seed():
    rng = np.random.default_rng(0)
    base = 10 * rng.normal(size=6)
    gaps = np.array([0.1, 0.2, 0.15, 0.12, 0.3, 0.22])
    rows = [{"method": "a", "seed": s, "nll": base[s] + gaps[s]} for s in range(6)]
    rows += [{"method": "b", "seed": s, "nll": base[s]} for s in reversed(range(5))]  # the sixth has no partner
    entry = paired_differences(rows, "a", "b", [Column("nll", scale=10)])["nll"]
    assert (entry.count, entry.mark) == (5, "higher")
    assert entry.mean == pytest.approx(10 * gaps[:5].mean())
    assert entry.std == pytest.approx(10 * gaps[:5].std(ddof=1))
    noise = [{"method": m, "seed": s, "nll": rng.normal()} for m in "ab" for s in range(4)]
    a, b = ([row["nll"] for row in noise if row["method"] == m] for m in "ab")
    told = stats.ttest_rel(a, b).pvalue < 0.05
    assert bool(paired_differences(noise, "a", "b", [Column("nll")])["nll"].mark) == told
    assert paired_differences(rows, "a", "c", [Column("nll")]) == {}


def test_foreign_images():
    images = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    found = clue.foreign(images, "cifar10", 0)
    assert list(found) == ["noise", "inverted", "pixels in disorder", "digits"]
    disorder = found["pixels in disorder"]
    assert disorder.flatten(2).sort(dim=2).values.equal(images.flatten(2).sort(dim=2).values)
    assert not disorder.equal(images)
    pixels = {tuple(p) for p in images[0].flatten(1).T.tolist()}
    assert pixels == {tuple(p) for p in disorder[0].flatten(1).T.tolist()}  # colours stay together
    assert found["digits"].shape[1:] == (3, 8, 8)
    assert list(clue.foreign(images[:, :1], "digits", 0)) == ["noise", "inverted", "pixels in disorder"]


def test_what_may_be_asked_for():
    def sets(**options):
        return list(dict.fromkeys(cell.settings["data"] for cell in STUDY.cells(Options(seeds=1, **options))))

    assert sets() == ["digits", "diabetes", "descriptions"]
    assert sets(data="digits") == ["digits"]
    assert (
        sets(data="uci")
        == sets(preset="uci")
        == [f"uci_{n}" for n in ("boston", "concrete", "energy", "wine", "yacht")]
    )
    assert sets(data_dir="/nowhere")[:4] == ["fashion_mnist", "trec", "sst5", "tinyshakespeare"]
    assert len(STUDY.cells(Options())) == 5 * (15 + 21 + 15)
    with pytest.raises(ValueError, match="data must be one of digits, .*, got 'x'"):
        STUDY.cells(Options(data="x"))
    with pytest.raises(ValueError, match="preset must be one of digits, .*, got 'x'"):
        STUDY.cells(Options(preset="x"))
    with pytest.raises(ValueError, match="methods must be among plain, .*, got 'x'"):
        STUDY.cells(Options(methods=("x",)))


def test_parts_of_the_small_data_sets_share_nothing():
    data = mc.load_data_set("descriptions", None, 3)
    sizes = [len(part) for part in (data.train, data.val, data.test)]
    assert sum(sizes) == len(mc.description()) // (mc.WINDOW + 1)
    x, y = mc.stack_samples(data.train)
    assert x[:, 1:].equal(y[:, :-1])
    again = mc.load_data_set("descriptions", None, 4)
    assert mc.stack_samples(again.test)[0].equal(mc.stack_samples(data.test)[0])
    assert not mc.stack_samples(again.val)[0].equal(mc.stack_samples(data.val)[0])
    table = mc.load_data_set("diabetes", None, 0)
    x, y = mc.stack_samples(table.train)
    assert (len(table.train), len(table.val), len(table.test)) == (266, 88, 88)
    assert STUDY.resplit_ratio({"data": "diabetes"}) == pytest.approx(88 / (266 + 88), rel=0.01)
    other = mc.load_data_set("diabetes", None, 1)
    assert not mc.stack_samples(other.test)[0].equal(mc.stack_samples(table.test)[0])
    assert STUDY.resplit_ratio({"data": "descriptions"}) == 0
    assert x.mean(dim=0).abs().max() < 1e-5
    assert abs(float(y.std(correction=0)) - 1) < 1e-5


def test_an_ensemble_of_the_same_compute_costs_at_most_as_much_as_clue(monkeypatch):
    trained = []

    def watched(network, part, loss, task, *, seed, epochs, **how):
        trained.append((seed, epochs))
        return network.eval()

    monkeypatch.setattr(mc, "train_network", watched)
    wanted = settings("diabetes", "ensemble_shared", epochs=8)
    [row] = clue.work(wanted)
    assert trained == [(1000 * member, 3) for member in range(5)]  # a step of CLUE costs two plain ones here, nearly
    [plain], [ours] = (clue.work({**wanted, "method": method}) for method in ("plain", "batch_0.5"))
    assert row["operations"] == plain["operations"] * 15 / 8
    assert 0.9 * ours["operations"] <= row["operations"] <= ours["operations"]
    assert row["nll"] != plain["nll"]
    for epochs in range(1, 100):
        members, each = clue_tables.share_epochs(epochs)
        assert 0.9 * epochs <= members * each <= epochs
        assert members <= clue_tables.MEMBERS
    texts = {claim.text for claim in STUDY.claims()}
    assert "lower ECE than an ensemble of CLUE's compute" in texts


@pytest.mark.parametrize("kept", ["batch_0.5", "batch_0.5_head"])
def test_a_variance_head_is_compared_with_a_variance_head(kept):
    """Where one of the two CLUEs was not run, the other does not stand in for it."""
    nlls = {"plain": 0.5, "gaussian": 0.3, "batch_0.5": 0.1, "batch_0.5_head": 0.2}
    rows = [
        {"part": "figures", "data": "diabetes", "method": method, "seed": s, "rmse": 1.0, "coverage": 0.9}
        | {"nll": nll + 0.001 * s * nll, "val_nll": nll, "operations": 1.0}
        for method, nll in nlls.items()
        if method in ("plain", "gaussian", kept)
        for s in range(3)
    ]
    found = {r.claim.text: r for r in judge_claims(STUDY.claims(), rows, Options()).results}
    texts = [text for text in found if "regression: lower NLL" in text]
    head = kept.endswith("_head")
    assert texts == [
        "regression: lower NLL than the Gaussian likelihood with a variance head (both have one)"
        if head
        else "regression: lower NLL than squared error with Monte-Carlo dropout"
    ]
    assert found[texts[0]].mean == pytest.approx((0.1 if head else 0.4) * 1.001)
    assert any("overhead" in text for text in found) != head


def test_avuc_comes_in_after_a_warmup_with_a_threshold_of_its_own():
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(50, 4, generator=generator), torch.randint(4, (50,), generator=generator)) for _ in "ab"]
    warmed = mc.WarmedAvUC(2)
    for z, y in batches:
        assert float(warmed(z, y)) == pytest.approx(float(F.cross_entropy(z, y)), rel=1e-6)
    z, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    threshold = losses.entropy_threshold(z, y)
    assert float(warmed(*batches[0])) == pytest.approx(float(losses.AvUC(threshold=threshold)(*batches[0])), rel=1e-6)
    assert warmed.threshold == pytest.approx(threshold, rel=1e-6)
    tokens = mc.WarmedAvUC(1)  # of characters the classes are in the middle
    tokens(z.reshape(4, 25, 4).movedim(-1, 1), y.reshape(4, 25))
    tokens(z, y)
    assert tokens.threshold == pytest.approx(threshold, rel=1e-6)
    certain = mc.WarmedAvUC(1)
    for _ in range(2):
        assert certain(10 * F.one_hot(y, 4).float(), y).isfinite()  # no row is wrong
    assert certain.threshold == 1.0
    [cell] = STUDY.cells(Options(data="digits", seeds=1, methods=("avuc",)))
    assert cell.settings["warmup"] == clue.WARMUP


@pytest.mark.parametrize(
    ("data", "methods"),
    [("digits", ["batch_0.5"]), ("diabetes", ["plain", "ensemble", "ensemble_shared", "gaussian", "batch_0.5_head"]),
     ("descriptions", ["avuc"])],
)  # fmt: skip
def test_a_study_costs_what_its_cells_count(data, methods, quick):
    for method in methods:
        [cell] = STUDY.cells(Options(data=data, seeds=1, methods=(method,)))
        part = mc.load_data_set(data, None, 0)
        size = cost.SIZES[data]
        assert tuple(map(len, (part.train, part.val, part.test))) == (size.train, size.val, size.test)
        assert part.train[0][0].shape == size.shape
        found, unknown = clue.flops([{**cell.settings, "epochs": 1000}])
        none, _ = clue.flops([{**cell.settings, "epochs": 0}])
        [row] = [row for row in clue.work({**cell.settings, **cell.local}) if row["part"] == "figures"]
        step = row["operations"] * size.train / cell.settings["batch"]
        assert unknown == []
        # A first layer needs no slope of its input, a variance head has an output more, and torch does not count
        # attention on the CPU.
        assert 0.98 * step < (found - none) / 1000 < (2 if data == "descriptions" else 1.35) * step


def test_passes_are_done_where_the_networks_are(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "cpu", None)  # nobody brings a network back
    data = mc.load_data_set("diabetes", None, 0)
    train, *_ = mc.normalised_tensors(data)
    network = mc.make_network(data, {"hidden": [4], "dropout": 0.1}, 0)
    how = {"seed": 0, "device": "cpu", "epochs": 1, "batch_size": 64, "lr": 0.01}
    mc.train_network(network, train, mc.make_loss("tabular"), mc.make_task("tabular"), **how)
    seen = []

    def passes(network, inputs, count, *, seed):
        seen.append(inputs.device.type)
        return torch.zeros(count, len(inputs))

    monkeypatch.setattr(mc, "mc_dropout", passes)
    found = mc.sample([network, torch.nn.Linear(10, 1, device="meta")], train[0][:3], 5)
    assert (seen, found.device.type, found.shape) == (["cpu", "meta"], "cpu", (4, 3))


def test_a_table_says_where_no_temperature_is_best():
    figures = {"accuracy": 1.0, "nll": 0.1, "ece": 0.1, "uce": 0.1, "nll_after": 0.1, "ece_after": 0.0, "val_nll": 0.1}
    aligned = {"gap": 0.1, "alignment": 0.1, "correlation": 0.5, "auroc": 0.9, "operations": 1.0}
    rows = [
        {"part": "figures", "data": "digits", "method": "plain", "seed": seed, "warning": "", **figures, **aligned}
        for seed in range(3)
    ]
    assert not any("no temperature" in note for note in STUDY.tables(rows, Options())["classification"].notes)
    rows[1]["warning"] = "temperature stopped at its bound, 2.56e-06: every label has its row's largest logit"
    [note] = [note for note in STUDY.tables(rows, Options())["classification"].notes if "no temperature" in note]
    assert note.startswith("cross-entropy, 1 of 3 runs: ")
