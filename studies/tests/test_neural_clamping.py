import csv
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import wraps

import numpy as np
import pytest
import torch

from strategies import calibrated
from trueup import metrics
from trueup.calibrators import Temperature
from trueup.clamping.calibration_set import MEMORY, CalibrationSet
from trueup.models import collect, corrupt
from trueup.models.image_data import decode
from trueup_studies import STUDIES, Options, Store, compare_with_paper, cost, run, save_page, timm_networks
from trueup_studies import trained_networks as networks
from trueup_studies.ablation import clamp_with as clamp
from trueup_studies.networks import CNN, Normalise, resnet20, resnet110
from trueup_studies.papers.neural_clamping import clamping_presets
from trueup_studies.papers.neural_clamping import clamping_study as neural_clamping
from trueup_studies.papers.neural_clamping import clamping_tables as nc_tables
from trueup_studies.papers.neural_clamping.clamping_presets import PRESETS
from trueup_studies.papers.neural_clamping.clamping_tables import choose_gamma
from trueup_studies.papers.neural_clamping.gradient_steps import BY_STEPS, temperature_by_descent
from trueup_studies.run import execute
from trueup_studies.statistics import paired_interval
from trueup_studies.timm_networks import timm_network
from trueup_studies.trained_networks import RELEASED_CIFAR100, load_or_train, read_split
from trueup_studies.training.data import load_data
from trueup_studies.training.data.image_folder import DecodedPictures, squash
from trueup_studies.training.loop import _Run

IMAGENET_NETWORKS = [net["network"] for net in PRESETS["paper"].networks if net["data"] == "imagenet"]

STUDY = STUDIES["neural-clamping"]
HOW = {"options": {"width": 2}, "sizes": [300, 150, 150], "epochs": 2, "batch": 32, "rate": 0.05}
TINY = replace(
    clamping_presets.PRESETS["digits"],
    networks=[{"data": "digits", "network": "cnn", "how": HOW}],
    epochs=2,
    gammas=(0.0, 0.5, 1.0),
    penalties=(0.01,),
    searched_gammas=(0.25,),
)
CLAMPS = len(neural_clamping.CLAMPS) - 1  # digits are too small for the augmentation


@pytest.fixture(autouse=True)
def as_a_worker_has_it(tmp_path, monkeypatch):
    """One thread, and no network from before."""
    monkeypatch.setenv("TRUEUP_NETWORKS", str(tmp_path / "networks"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(clamping_presets.PRESETS, "digits", TINY)


def cell_of(options, **wanted):
    [cell] = [
        cell for cell in STUDY.cells(options) if all(cell.settings.get(name) == value for name, value in wanted.items())
    ]
    return cell


def settings_of(options, **wanted):
    cell = cell_of(options, **wanted)
    return {**cell.settings, **cell.local}


def test_the_whole_study_in_small(tmp_path, tiny):
    options = Options(seeds=2)
    store = Store(tmp_path / "results.sqlite")
    ran = run(STUDY, store, options=options)
    assert ran.failed == {}
    assert ran.finished == 2 * (len(neural_clamping.LOGITS) + CLAMPS + 2 * (3 + 1) + 2)
    assert len(list((tmp_path / "networks").glob("*.safetensors"))) == 2  # a network a run, whatever the cells
    rows = store.rows(STUDY.cells(options))
    tables = STUDY.tables(rows, options)
    assert list(tables) == ["methods", "bins", "efficient", "ablation", "gamma", "starts"]
    [members] = tables["methods"].groups.values()
    assert list(members)[:2] == ["Uncalibrated", "Temperature Scaling"]
    assert len(members) == len(neural_clamping.NAMES) - 2  # one epoch of it is only in the table of costs
    assert members["Neural Clamping (FL), λ by ECE too"]["ece"].count == 2
    for each in members.values():
        assert each["ece"].count == 2
        assert all(math.isfinite(each[name].mean) for name in ("accuracy", "entropy", "ece", "aece", "sce", "nll"))
    assert list(tables["ablation"].groups) == ["digits, cnn", "digits, cnn, sum form"]
    parts = tables["ablation"].groups["digits, cnn"]
    assert parts["Neural Clamping"]["ece"].mean == members["Neural Clamping (FL)"]["ece"].mean
    assert list(tables["gamma"].groups["digits, cnn"]) == ["0", "0.5", "1"]
    assert "2 runs, each with a new network and split" in tables["methods"].notes[0]
    save_page(STUDY, store, options, tmp_path / "page")
    with (tmp_path / "page" / "claims.csv").open(encoding="utf-8") as file:
        written = {line["claim"]: line for line in csv.DictReader(file)}
    for text, ratio in (
        ("lower ECE than the uncalibrated network", 150 / 450),
        ("the data-driven start ends lower", 0),
    ):
        [claim] = [claim for claim in STUDY.claims() if claim.text == text]
        values = claim.support(rows, options)["digits, cnn"]
        ends = paired_interval(np.array(values), resplit_ratio=ratio)
        assert [float(written[text][end]) for end in ("low", "high")] == pytest.approx(ends)
    figures = STUDY.figures(rows, options)
    assert {"gamma-digits-cnn", "starts-digits-cnn", "reliability-digits-cnn-nc_fl"} <= set(figures)
    figures["gamma-digits-cnn"].savefig(tmp_path / "gamma.svg")
    again = execute(STUDY.work, cell_of(options, exponent=0.5, seed=1, part="sweep", reduction="sum")).rows
    key = {"part": "sweep", "exponent": 0.5, "seed": 1, "reduction": "sum"}
    kept = [row for row in rows if key.items() <= row.items()]
    assert [row["nll"] for row in again] == [row["nll"] for row in kept]


def test_rows_are_what_the_library_says(tiny):
    options = Options(seeds=1)
    settings = settings_of(options, method="temperature")
    model, val, test = load_or_train(settings)
    given, asked = (collect(model, half, progress=False) for half in (val, test))
    [row] = neural_clamping.work(settings)
    after = Temperature.fit(*given)(asked.logits)
    assert row["nll"] == metrics.nll(after, asked.labels)
    assert row["ece_30"] == metrics.ece(after, asked.labels, bins=30)
    assert row["ece"] == row["ece_15"] == pytest.approx(row["reliability"]["ece"], rel=1e-6)
    assert (row["fit_rows"], row["test_rows"], row["cost"]) == (150, 150, 1)
    [row] = neural_clamping.work(settings_of(options, method="ours"))
    ours = clamp(model, val, progress=False)
    assert row["nll"] == metrics.nll(*collect(ours, test, progress=False))
    assert row["delta_norm"] == ours.fit_record.delta_norm


def test_the_exponent_is_chosen_on_the_calibration_images(monkeypatch):
    def rows(seed, **errors):
        base = {"data": "d", "network": "n", "how": {}, "seed": seed}
        return [
            {**base, "exponent": float(g), "method": method, "fit_ece": e, "ece": 0}
            for g, e in errors.items()
            for method in ("output only", "both")
        ]

    preset = replace(PRESETS["digits"], gammas=(0.0, 0.5, 1.0), penalties=(), searched_gammas=(0.5, 1.0))
    monkeypatch.setitem(PRESETS, "digits", preset)
    whole = rows(0, **{"0": 0.0, "0.5": 0.2, "1": 0.1}) + rows(1, **{"0.5": 0.1, "1": 0.1})
    found = choose_gamma(whole + rows(2, **{"0": 0.0, "0.5": 0.2}), Options())  # the third has not tried all
    assert [(row["seed"], row["exponent"], row["method"]) for row in found] == [
        (0, 1.0, "output only"),
        (0, 1.0, "both"),
        (1, 0.5, "output only"),
        (1, 0.5, "both"),
    ]
    unknown = rows(0, **{"0.5": math.nan, "1": 0.1})
    assert [row["exponent"] for row in choose_gamma(unknown, Options())] == [1.0, 1.0]
    assert choose_gamma(rows(0, **{"0.5": math.nan, "1": math.nan}), Options()) == []
    monkeypatch.setitem(PRESETS, "digits", replace(preset, gammas=(0.5,), penalties=(0.01,), searched_gammas=(0.5,)))
    of_rule = rows(0, **{"0.5": 0.2})
    searched = [{**row, "penalty": 0.01, "fit_ece": 0.1, "ece": 1} for row in of_rule]
    assert choose_gamma(of_rule + searched, Options()) == of_rule
    assert choose_gamma(of_rule, Options(), penalties=True) == []
    assert choose_gamma(of_rule + searched, Options(), penalties=True) == searched
    assert choose_gamma(of_rule + searched, Options(oracle=True), penalties=True) == of_rule


def test_the_default_grid_is_the_papers():
    cells = STUDY.cells()
    runs = 5
    forms = 2  # mean and sum
    assert len(cells) == runs * (len(neural_clamping.LOGITS) + CLAMPS + forms * (21 + 12) + 2)
    assert {cell.settings["network_seed"] for cell in cells} == set(range(runs))
    begun = [cell.settings for cell in cells if cell.settings["part"] == "starts"]
    assert {(s["network_seed"], s["draw"]) for s in begun} == {(0, 0)}
    assert {s["seed"] for s in begun} == set(range(runs))
    assert all(s["epochs"] == 100 for s in begun)


def test_what_is_asked_for_must_be_there(tmp_path):
    with pytest.raises(ValueError, match="methods must be among uncalibrated, .*, got 'x'"):
        STUDY.cells(Options(methods=("x",)))
    presets = "digits, cifar10, cifar10-5000, cifar10-shift, paper"
    with pytest.raises(ValueError, match=f"preset must be one of {presets}, or data of .*, got 'trec'"):
        STUDY.cells(Options(data="trec"))
    with pytest.raises(ValueError, match=r"nc_searched needs a preset that searches λ too"):
        STUDY.cells(Options(preset="cifar10-shift", methods=("nc_searched",)))
    with pytest.raises(ValueError, match="nc_code_augmented is for cifar10, cifar100, imagenet"):
        STUDY.cells(Options(methods=("temperature", "nc_code_augmented")))
    with pytest.raises(ValueError, match="data must be one of digits, got 'cifar10'"):
        STUDY.cells(Options(preset="digits", data="cifar10"))
    with pytest.raises(FileNotFoundError, match="cifar10_resnet20.th: no such file"):
        STUDY.cells(Options(preset="cifar10", data_dir=str(tmp_path)))


def test_temperature_by_steps_ends_short_and_gets_there():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(500, 4))
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    best, short, longer = Temperature.fit(2 * z, y), temperature_by_descent(2 * z, y), None
    assert 1 < float(short.temperature) < 0.9 * float(best.temperature)
    longer = temperature_by_descent(2 * z, y, steps=3000, lr=0.05)
    assert float(longer.temperature) == pytest.approx(float(best.temperature), rel=1e-4)


def drawn_images(n, classes, size=32, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, size, size, 3), dtype=np.uint8), np.arange(n) % classes


def test_published_weights_for_cifar10(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "weights").mkdir()
    images, labels = drawn_images(24, 10)
    np.savez(tmp_path / "images" / "cifar10_test.npz", images=images, labels=labels)
    val, test = np.arange(0, 24, 2), np.arange(1, 24, 2)
    np.savez(tmp_path / "images" / "cifar10_test_split.npz", val_index=val, test_index=test)
    network = resnet20(seed=3)
    torch.save({"state_dict": {f"module.{k}": v for k, v in network.state_dict().items()}}, tmp_path / "net.th")
    (tmp_path / "net.th").rename(tmp_path / "weights" / "cifar10_resnet20.th")
    (tmp_path / "weights" / "cifar10_resnet20.json").write_text('{"held_out": "test"}')
    asked = {"seeds": 2, "methods": ("uncalibrated", "closed", "nc_ce"), "network": "resnet20"}
    options = Options(data="cifar10", data_dir=str(tmp_path), **asked)
    cells = STUDY.cells(options)
    assert {cell.settings["network_seed"] for cell in cells} == {0}
    [row] = neural_clamping.work(settings_of(options, method="uncalibrated", seed=0))
    x = Normalise()(torch.from_numpy(images[test]).permute(0, 3, 1, 2).float() / 255)
    with torch.no_grad():
        assert row["nll"] == pytest.approx(metrics.nll(network.eval()(x), labels[test]), rel=1e-5)
    settings = settings_of(options, exponent=0.5, seed=1) | {"epochs": 1, "batch": 12, "val_rows": 8}
    rows = neural_clamping.work(settings)
    assert [row["method"] for row in rows][-1] == "both"
    assert {row["fit_rows"] for row in rows} == {8}
    with (tmp_path / "weights" / "cifar10_resnet20.th").open("ab") as file:
        file.write(b"0")
    with pytest.raises(ValueError, match="the file has changed since the study began"):
        neural_clamping.work(settings)


def cifar100_files(folder, train=20, test=4):
    place = folder / "cifar-100-binary"
    place.mkdir()
    for name, n in (("train", train), ("test", test)):
        images, labels = drawn_images(n, 100)
        rows = np.concatenate([np.zeros((n, 1)), labels[:, None], images.transpose(0, 3, 1, 2).reshape(n, -1)], axis=1)
        rows.astype(np.uint8).tofile(place / f"{name}.bin")


def imagenet_files(folder, count=4):
    """Without images to train on: published networks need none."""
    pillow = pytest.importorskip("PIL.Image")
    for name in ("n01440764", "n01443537"):
        place = folder / "val" / name
        place.mkdir(parents=True)
        for number, image in enumerate(drawn_images(count, 2, 48, seed=12)[0]):
            pillow.fromarray(image[:, : 40 + number]).save(place / f"{number}.png")


@pytest.fixture
def small_timm(monkeypatch):
    """A small network in the place of timm's, with the normalisation that timm's would name."""

    def made(name, classes=10, *, channels=3, dropout=0.0, pretrained=False, seed=0):
        network = CNN(classes, channels=channels, width=2, seed=seed)
        network.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
        return network

    monkeypatch.setattr("trueup_studies.timm_networks.timm_network", made)


@pytest.mark.parametrize("limit", [MEMORY, 0], ids=["kept", "streamed"])
def test_one_epoch_of_every_network_of_the_paper_on_files_of_the_right_format(limit, tmp_path, small_timm, monkeypatch):
    monkeypatch.setitem(CalibrationSet.read.__func__.__kwdefaults__, "limit", limit)
    cifar100_files(tmp_path)
    imagenet_files(tmp_path)
    blood = {f"{part}_{what}": drawn_images(n, 8, 28)[i] for part, n in (("train", 9), ("val", 6), ("test", 3))
             for i, what in enumerate(("images", "labels"))}  # fmt: skip
    np.savez(tmp_path / "bloodmnist.npz", **blood)
    orders = []
    read = CalibrationSet.shuffled_batches

    def watched(self, size, generator):
        assert self.kept == bool(limit)
        orders.append([])
        for batch in read(self, size, generator):
            orders[-1].append(batch.args[0].flatten(1).sum(dim=1).tolist())
            yield batch

    monkeypatch.setattr(CalibrationSet, "shuffled_batches", watched)
    options = Options(preset="paper", data_dir=str(tmp_path), seeds=1)
    for network, rows in (
        ("timm:resnet50", 6),
        ("resnet110", 2),
        ("wrn40x10", 2),
        *((name, 4) for name in IMAGENET_NETWORKS),
    ):
        settings = settings_of(options, network=network, exponent=1.0, part="sweep", penalty=None, reduction=None)
        assert (settings["epochs"], settings["batch"]) == (100, 512)
        how = {**settings["how"], "epochs": 1, "batch": 9} if network == "timm:resnet50" else {}
        pretrained = settings["how"] if settings["data"] == "imagenet" else how
        orders.clear()
        found = neural_clamping.work({**settings, "epochs": 1 if rows == 2 else 3, "batch": 3, "how": pretrained})
        assert {row["fit_rows"] for row in found} == {rows}
        assert [len(batch) for batch in orders[0]] == [3] * (rows // 3) + [rows % 3] * (rows % 3 > 0)
        epochs = [[x for batch in order for x in batch] for order in orders]
        assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1  # every image once in each epoch
        if rows > 2:
            assert len({tuple(epoch) for epoch in epochs}) > 1  # in another order


@pytest.mark.parametrize(("name", "data"), cost.TIMM_FLOPS)
def test_timm_has_the_networks_of_the_paper(name, data):
    pytest.importorskip("timm", reason="timm is not installed", exc_type=ImportError)
    size = cost.SIZES[data]
    network = timm_network(name.removeprefix("timm:"), size.classes).eval()
    with torch.no_grad():
        assert network(torch.zeros(2, *size.shape)).shape == (2, size.classes)
    config = network.pretrained_cfg
    assert len(config["mean"]) == len(config["std"]) == 3
    if data == "imagenet":
        assert config["num_classes"] == size.classes
        assert config["input_size"] == size.shape


def test_published_weights_for_other_classes_are_refused(tmp_path, small_timm, monkeypatch):
    imagenet_files(tmp_path)
    made = timm_networks.timm_network

    @wraps(made)
    def of_imagenet(*args, **options):
        network = made(*args, **options)
        network.pretrained_cfg["num_classes"] = 1000
        return network

    monkeypatch.setattr("trueup_studies.timm_networks.timm_network", of_imagenet)
    options = Options(data="imagenet", data_dir=str(tmp_path), seeds=1)
    settings = settings_of(options, network="timm:resnet101.tv_in1k", method="closed")
    wanted = r"imagenet must have 1,000 classes, as the published weights of timm:resnet101.tv_in1k have, got 2"
    with pytest.raises(ValueError, match=wanted):
        load_or_train(settings)


def test_batches_are_read_ahead_in_their_order():
    seen = []

    def batches():
        for i in range(4):
            seen.append(i)
            yield i

    ahead = networks.read_ahead(batches())
    assert next(ahead) == 0
    while len(seen) < 2:  # the next is read though nobody has asked for it
        time.sleep(0.01)
    assert list(ahead) == [1, 2, 3]

    def failing():
        yield 0
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(networks.read_ahead(failing()))


def test_a_pretrained_network_has_its_own_normalisation_and_pictures_are_decoded_once(tmp_path, small_timm):
    imagenet_files(tmp_path)
    options = Options(data="imagenet", data_dir=str(tmp_path), seeds=1)
    names = {cell.settings["network"] for cell in STUDY.cells(options)}
    assert names == {*IMAGENET_NETWORKS}
    settings = settings_of(options, network="timm:resnet101.tv_in1k", method="closed")
    [row] = neural_clamping.work(settings)
    assert (row["fit_rows"], row["test_rows"]) == (4, 4)
    _, val, test = load_or_train(settings)
    images, labels = next(iter(val))
    data = load_data("imagenet", tmp_path)
    pictures = torch.stack([squash(decode(data.val.files[i])) for i in range(4)])  # as the released code has them
    assert torch.allclose(images, (pictures - 0.5) / 0.25, atol=4 * 0.5 / 255 + 1e-6)  # whole bytes
    assert labels.tolist() == [data.val[i][1] for i in range(4)]
    assert val.ahead
    assert val.batch_size == test.batch_size == 27  # of so large pictures no more go into one graph
    for one, other in zip(val, replace(val, ahead=False), strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    decoded = sorted((tmp_path / "networks").glob("pictures-*.bin"))
    assert [path.stat().st_size for path in decoded] == [4 * 3 * 224 * 224] * 2
    for path in (tmp_path / "val").rglob("*.png"):
        path.write_bytes(path.read_bytes())  # the same files
    before = [path.stat().st_mtime_ns for path in decoded]
    one, two = (torch.cat([x for x, _ in load_or_train(settings).test]) for _ in range(2))
    assert torch.equal(one, two)
    assert [path.stat().st_mtime_ns for path in decoded] == before
    [(last, label)] = test.batches_of([[3]])
    assert torch.equal(last[0], one[3])
    assert label.tolist() == [data.test[3][1]]


def test_weights_are_never_calibrated_on_what_they_were_trained_on(tmp_path):
    cifar100_files(tmp_path)
    (tmp_path / "weights").mkdir()
    torch.save(resnet110(100).state_dict(), tmp_path / "weights" / "cifar100_resnet110.th")
    options = Options(preset="paper", data="cifar100", data_dir=str(tmp_path), seeds=1, network="resnet110")
    with pytest.raises(
        ValueError, match=r"resnet110.th: the training images .* unknown.*Write cifar100_resnet110.json"
    ) as e:
        STUDY.cells(options)
    written = json.loads(str(e.value).rpartition(" Neural Clamping: ")[2])  # the example for the released network
    assert (written["mean"], written["std"]) == ([0.4914, 0.4822, 0.4465], [0.2675, 0.2565, 0.2761])
    assert (written["held_out"], written["published"]) == ("last", True)
    side = tmp_path / "weights" / "cifar100_resnet110.json"
    side.write_text(json.dumps({"held_out": "val"}))
    with pytest.raises(ValueError, match=r"resnet110.json: held_out must be one of test, last for cifar100, got 'val'"):
        STUDY.cells(options)
    whole = (drawn_images(20, 100)[0].transpose(0, 3, 1, 2) / 255).astype(np.float32)
    test = (drawn_images(4, 100)[0].transpose(0, 3, 1, 2) / 255).astype(np.float32)
    keys = set()
    for held_out, images in (("last", whole[-2:]), ("test", test)):
        side.write_text(json.dumps({"held_out": held_out, "mean": [0, 0, 0], "std": [1, 1, 1]}))
        settings = settings_of(options, method="uncalibrated")
        keys.add(cell_of(options, method="uncalibrated").key)
        _, val, rest = load_or_train(settings)
        given = torch.cat([x for x, _ in val])
        if held_out == "test":
            given = torch.cat([given, *(x for x, _ in rest)])
        assert sorted(given.flatten(1).sum(1).tolist()) == pytest.approx(sorted(images.reshape(len(images), -1).sum(1)))
    assert len(keys) == 2  # another split is another cell
    [row] = neural_clamping.work(settings)
    note = STUDY.tables([{**settings, **row}], options)["methods"].notes[-1]
    assert "not the paper's weights" in note
    assert "half of the test images" in note
    side.write_text(json.dumps({"held_out": "last", "published": True}))
    with pytest.raises(ValueError, match=r"110.json: the paper's weights for cifar100 need mean and std, got none"):
        STUDY.cells(options)
    mean, std = RELEASED_CIFAR100
    side.write_text(json.dumps({"held_out": "last", "mean": mean, "std": std, "published": True}))
    settings = settings_of(options, method="uncalibrated")
    _, val, _ = load_or_train(settings)
    expected = (whole[-2:] - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    np.testing.assert_allclose(torch.cat([x for x, _ in val]).numpy(), expected, atol=1e-6)
    note = STUDY.tables([{**settings, **row}], options)["methods"].notes[-1]
    assert note.startswith("resnet110: the paper's weights, weights/cifar100_resnet110.th; calibrated on the last")
    side.write_text(json.dumps({"held_out": "last", "published": "yes"}))
    with pytest.raises(ValueError, match=r"resnet110.json: published must be true or false, got 'yes'"):
        STUDY.cells(options)


def test_what_is_trained_here_has_other_weights_than_the_papers(tmp_path):
    cifar100_files(tmp_path)
    options = Options(preset="paper", data="cifar100", data_dir=str(tmp_path), seeds=1, network="resnet110")
    settings = settings_of(options, method="uncalibrated")
    row = {**settings, **dict.fromkeys(("fit_rows", "test_rows", "ece"), 1)}
    assert STUDY.tables([row], options)["methods"].notes[-1] == ("resnet110: trained here, so not the paper's weights.")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"mean": [0.5, 0.5, 0.5]}, "std must have a positive number for each of 3 channels, got None"),
        ({"std": [1, 1, 1]}, "mean must have a finite number for each of 3 channels, got None"),
        ({"mean": [0, 0], "std": [1, 1, 1]}, r"mean must have a finite number for each of 3 channels, got \[0, 0\]"),
        ({"mean": 0.5, "std": 0.5}, "mean must have a finite number for each of 3 channels, got 0.5"),
        ({"mean": ["0", 0, 0], "std": [1, 1, 1]}, r"mean must have .*, got \['0', 0, 0\]"),
        ({"mean": [0, 0, 0], "std": [1, 0, 1]}, r"std must have a positive number .*, got \[1, 0, 1\]"),
        ({"mean": [0, 0, 0], "std": [1, True, 1]}, r"std must have .*, got \[1, True, 1\]"),
    ],
)
def test_a_normalisation_that_is_none_is_refused_by_the_name_of_its_file(tmp_path, said, message):
    (tmp_path / "network.json").write_text(json.dumps({"held_out": "test", **said}))
    with pytest.raises(ValueError, match=rf"network.json: {message}"):
        read_split(tmp_path / "network.th", "cifar10")


def test_other_weights_are_a_reason_to_differ_from_the_paper(tmp_path):
    options = Options(preset="paper", data="cifar100", data_dir=str(tmp_path), seeds=1, network="resnet110")
    settings = settings_of(options, method="uncalibrated")
    row = {**settings, **dict.fromkeys(("fit_rows", "test_rows", "ece"), 1)}
    file = {"weights": "weights/cifar100_resnet110.th", "digest": "x"}
    for how, words in (
        (settings["how"], "weights trained here instead of the paper's"),
        ({**file, "split": ["last", None]}, f"weights {file['weights']} instead of the paper's"),
        ({**file, "split": ["last", None, True]}, ""),
    ):
        rows = [{**row, "how": how}]
        numbers = compare_with_paper(STUDY.tables(rows, options), rows, "neural-clamping")
        numbers = [number for number in numbers if number.table == "table 2"]
        assert {number.settings for number in numbers if number.model == "ResNet-110"} == {words}
        others = {number.settings for number in numbers if number.model != "ResNet-110"}
        assert all(text.startswith("network resnet110 instead of ") for text in others)
        assert others


def test_a_fit_to_the_same_logits_is_done_once(tiny, monkeypatch):
    monkeypatch.setitem(clamping_presets.PRESETS, "digits", replace(TINY, retrained=False))
    monkeypatch.setattr(neural_clamping, "_fitted", {})
    calls = []
    measure = neural_clamping.measure
    monkeypatch.setattr(neural_clamping, "measure", lambda pair: calls.append(pair) or measure(pair))
    options = Options(seeds=2, methods=("temperature", "vector", "nc_short"))
    for method, count in (("temperature", 1), ("vector", 1), ("nc_short", 2)):
        calls.clear()
        one, other = (neural_clamping.work(settings_of(options, method=method, seed=seed)) for seed in (0, 1))
        assert len(calls) == count
        assert (one == other) == (count == 1)
    for seed in (0, 1):  # what is drawn anew is fitted anew
        neural_clamping.work({**settings_of(options, method="vector", seed=seed), "val_rows": 100})
    assert len(calls) == 4


def test_weights_of_timm_from_a_file_are_normalised_as_timm_says(tmp_path, small_timm):
    imagenet_files(tmp_path)
    (tmp_path / "weights").mkdir()
    name = "timm:resnet101.tv_in1k"
    network = CNN(2, channels=3, width=2, seed=5)
    torch.save(network.state_dict(), tmp_path / "weights" / "imagenet_timm-resnet101.tv_in1k.th")
    side = tmp_path / "weights" / "imagenet_timm-resnet101.tv_in1k.json"
    options = Options(preset="paper", data="imagenet", data_dir=str(tmp_path), seeds=1, network=name)
    picture = squash(decode(load_data("imagenet", tmp_path).val.files[0]))
    for said, mean, std in (({}, 0.5, 0.25), ({"mean": [0, 0, 0], "std": [1, 1, 1]}, 0.0, 1.0)):
        side.write_text(json.dumps({"held_out": "val", **said}))
        model, val, _ = load_or_train(settings_of(options, method="uncalibrated"))
        image = next(iter(val))[0][0]
        assert torch.allclose(image, (picture - mean) / std, atol=0.5 / 255 / std + 1e-6)
        assert torch.equal(next(model.parameters()), next(network.parameters()))
    side.write_text(json.dumps({"held_out": "test"}))  # half of the test images, which are decoded once too
    _, val, test = load_or_train(settings_of(options, method="uncalibrated"))
    assert (len(val), len(test)) == (2, 2)
    assert isinstance(val.part, DecodedPictures)


def test_the_released_code_has_its_own_batch():
    released = settings_of(Options(preset="paper", seeds=1, network="resnet110"), method="nc_code_augmented")
    assert neural_clamping.CLAMPS["nc_code_augmented"](released)["recipe"].keywords == {
        "epochs": 100, "batch_size": 1000, "augment": True, "cutout": 4,
    }  # fmt: skip
    small = settings_of(Options(seeds=1), method="nc_code")
    assert "code_batch" not in small  # its rows are kept
    assert neural_clamping.CLAMPS["nc_code"](small)["recipe"].keywords["batch_size"] == 140


def test_tables_and_figures_have_the_papers_numbers(tiny, monkeypatch):
    monkeypatch.setitem(PRESETS, "digits", replace(PRESETS["digits"], gammas=(0.0, 1.0)))
    options = Options(seeds=1)
    rows = []
    for wanted in ({"method": "uncalibrated"}, {"part": "sweep", "exponent": 1.0, "penalty": None, "reduction": None}):
        settings = settings_of(options, **wanted)
        rows += [{**settings, **row} for row in neural_clamping.work(settings)]
    titles = {name: table.title.partition(":")[0] for name, table in STUDY.tables(rows, options).items()}
    wanted = {"methods": "Tables 1–3", "bins": "Appendix D", "ablation": "Table 4", "gamma": "Figure 2"}
    assert titles == wanted
    drawn = STUDY.figures(rows, options)["gamma-digits-cnn"]
    assert drawn.axes[0].get_title(loc="left") == "Figure 2: digits, cnn"


@pytest.mark.parametrize(("data", "held_out"), [("digits", "last"), ("bloodmnist", "last"), ("imagenet", "last")])
def test_the_last_images_are_held_out_only_where_they_can_be_found(tmp_path, data, held_out):
    (tmp_path / "network.json").write_text(json.dumps({"held_out": held_out}))
    with pytest.raises(ValueError, match=rf"held_out must be one of test.* for {data}, got 'last'"):
        read_split(tmp_path / "network.th", data)


def test_a_table_says_how_many_runs_it_is_of(tiny):
    settings = settings_of(Options(seeds=1), method="uncalibrated")
    [row] = neural_clamping.work(settings)
    first = {**settings, **row}
    rows = [first, {**first, "seed": 1}, {**first, "method": "temperature"}]
    for given, words in ((rows[:1], "One run;"), (rows[:2], "of 2 runs,"), (rows, "of up to 2 runs,")):
        assert words in STUDY.tables(given, Options(seeds=2))["methods"].notes[0]


def test_a_network_goes_where_it_is_wanted(tiny):
    settings = settings_of(Options(seeds=1, device="cpu"), method="uncalibrated")
    assert settings["device"] == "cpu"
    assert (
        cell_of(Options(seeds=1), method="uncalibrated").key
        == cell_of(Options(seeds=1, device="cuda:1"), method="uncalibrated").key
    )  # the machine's, not the result's
    load_or_train(settings)
    model, _, _ = load_or_train({**settings, "device": "meta"})  # the one other device that is always there
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_network_is_trained_once_and_again_the_same(tmp_path):
    settings = {"data": "digits", "network": "cnn", "how": HOW, "network_seed": 0}
    one = load_or_train(settings)
    [kept] = (tmp_path / "networks").glob("*.safetensors")
    before = kept.stat().st_mtime_ns
    two = load_or_train(settings)
    assert kept.stat().st_mtime_ns == before
    other = load_or_train({**settings, "cache": str(tmp_path / "other")})
    for name, weight in one.model.state_dict().items():
        assert torch.equal(weight, two.model.state_dict()[name])
        assert torch.equal(weight, other.model.state_dict()[name])
    assert not torch.equal(next(one.model.parameters()), next(CNN(10, channels=1, width=2).parameters()))
    load_or_train({**settings, "network_seed": 1})
    assert len(list((tmp_path / "networks").glob("*.safetensors"))) == 2


def test_parts_share_no_image_and_a_box_holds_every_pixel():
    how = {"options": {"width": 2}, "sizes": [1000, 400, 397]}
    subject = load_or_train({"data": "digits", "network": "cnn", "how": how, "network_seed": 5})
    assert (len(subject.val), len(subject.test)) == (400, 397)
    assert not set(subject.val.part.indices) & set(subject.test.part.indices)
    low, high = subject.val.box
    pixels = torch.cat([images for images, _ in subject.val])
    assert (pixels >= low).all()
    assert (pixels <= high).all()
    assert float(high - low) == pytest.approx(1 / 0.3760, rel=1e-6)
    some = subject.val.sample(50, 0)
    assert len(some) == 50
    assert set(some.part.indices) != set(subject.val.sample(50, 1).part.indices)
    with pytest.raises(ValueError, match="sizes must add up to at most 1797 samples of digits"):
        load_or_train({"data": "digits", "network": "cnn", "how": {"sizes": [1000, 1000, 1]}, "network_seed": 0})


def test_shifted_images_are_of_the_same_network_and_in_rows_of_their_own(tiny, monkeypatch):
    settings = {"data": "digits", "network": "cnn", "how": HOW, "network_seed": 0}
    plain = load_or_train(settings)
    monkeypatch.setattr(networks, "train", lambda *args, **options: pytest.fail("it has been trained"))
    moved = load_or_train({**settings, "how": {**HOW, "shift": ["gaussian_noise", 4]}})
    assert all(torch.equal(*pair) for pair in zip(plain.model.parameters(), moved.model.parameters(), strict=True))
    for seed, (before, after) in enumerate(((plain.val, moved.val), (plain.test, moved.test))):
        images, labels = (torch.stack([torch.as_tensor(sample[i]) for sample in before.part]) for i in (0, 1))
        assert torch.equal(after.part.tensors[0], corrupt(images, "gaussian_noise", 4, seed=seed))
        assert torch.equal(after.part.tensors[1], labels)
    options = Options(seeds=1, methods=("uncalibrated", "nc_fl"))
    cells = [cell_of(options, method="uncalibrated"), cell_of(options, exponent=0.5), cell_of(options, exponent=1.0)]
    rows = []
    for shift in ({}, {"shift": ["gaussian_noise", 4]}):
        for cell in cells:
            own = {**cell.settings, "how": {**cell.settings["how"], **shift}}
            rows += [{**own, **row} for row in neural_clamping.work({**own, **cell.local})]
    lines = STUDY.tables(rows, options)["methods"].groups
    assert list(lines) == ["digits, cnn", "digits, gaussian_noise 4, cnn"]
    assert all(list(group) == ["Uncalibrated", "Neural Clamping (FL)"] for group in lines.values())
    [claim] = [claim for claim in STUDY.claims() if claim.text == "lower ECE than the uncalibrated network"]
    assert list(claim.support(rows, options)) == ["digits, cnn", "digits, gaussian_noise 4, cnn"]


def test_a_run_with_a_split_of_its_own_has_all_of_the_images_and_the_same_network(tiny, monkeypatch):
    monkeypatch.setitem(clamping_presets.PRESETS, "digits", replace(TINY, retrained=False, resplit=True))
    options = Options(seeds=2, methods=["uncalibrated"])
    first, other = (settings_of(options, seed=seed) for seed in (0, 1))
    assert "split" not in first
    assert other["split"] == 1
    assert first["network_seed"] == other["network_seed"]
    _, val, test = load_or_train(first)
    new = networks.resplit(val, test, 1)
    images = [torch.cat([x for half in pair for x, _ in half]).flatten(1) for pair in ((val, test), new)]
    assert [len(half) for half in new] == [len(val), len(test)]
    assert np.array_equal(*(np.unique(x.numpy(), axis=0) for x in images))
    assert not images[0].equal(images[1])
    assert len({half.name for half in (val, test, *new)}) == 4, "predictions are kept by name"
    [row] = neural_clamping.work(other)
    model = load_or_train(other).model
    assert row["nll"] == metrics.nll(*collect(model, new[1], progress=False))
    assert STUDY.resplit_ratio({**other, **row}) == len(test) / len(val)
    assert STUDY.resplit_ratio({**first, **row}) == 0


def test_of_those_who_want_the_same_network_one_trains_it(monkeypatch):
    calls = []

    def counted(*args, **options):
        calls.append(options["seed"])
        time.sleep(0.2)
        return networks.train.original(*args, **options)

    counted.original = networks.train
    monkeypatch.setattr(networks, "train", counted)
    settings = {"data": "digits", "network": "cnn", "how": HOW, "network_seed": 0}
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(load_or_train, [settings, settings])
    assert calls == [0]
    assert torch.equal(next(one.model.parameters()), next(two.model.parameters()))


def test_the_networks_of_the_default_come_with_the_package(monkeypatch):
    monkeypatch.setattr(networks, "train", lambda *args, **options: pytest.fail("nothing is to be trained"))
    cells = STUDY.cells(Options())
    settings = {networks.shipped_name(cell.settings): {**cell.settings, **cell.local} for cell in cells}
    assert len(settings) == 5
    for each in settings.values():
        model, _, test = load_or_train(each)
        assert metrics.accuracy(*collect(model, test, progress=False)) > 0.9
    anew = {cell.key for cell in STUDY.cells(Options(retrain=True))}
    assert anew.isdisjoint(cell.key for cell in cells)
    with pytest.raises(pytest.fail.Exception, match="nothing is to be trained"):
        load_or_train({**each, "how": {**each["how"], "retrain": True}})


def test_a_training_that_was_killed_goes_on_and_leaves_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("trueup_studies.trained_networks.LONG", 100)
    settings = {"data": "digits", "network": "cnn", "how": {**HOW, "epochs": 3}, "network_seed": 0}
    whole = load_or_train({**settings, "cache": str(tmp_path / "whole")}).model.state_dict()
    save, seen = _Run.save_checkpoint, []

    def killed(self, checkpoint, history):
        save(self, checkpoint, history)
        seen.append(len(history.epochs))
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(_Run, "save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        load_or_train(settings)
    assert len(list((tmp_path / "networks").glob("*.ckpt"))) == 1
    again = load_or_train(settings).model.state_dict()
    assert seen == [1, 2, 3]
    assert all(torch.equal(weight, whole[name]) for name, weight in again.items())
    assert not [path for folder in ("whole", "networks") for path in (tmp_path / folder).glob("*.ckpt")]


def test_the_sum_form_takes_steps_as_long_as_the_batch_is_large():
    """With one batch of all rows, lr and the sum form are n · lr and the mean form."""
    z, y = calibrated(200, 4, temperature=2.0)
    for name, fit in BY_STEPS.items():
        if name.endswith("_sum"):
            short, long = fit(z, y, steps=3, lr=1e-4), BY_STEPS[name.replace("_sum", "_steps")](z, y, steps=3, lr=0.02)
            np.testing.assert_allclose(short(z), long(z), rtol=1e-9, err_msg=name)


def test_rows_of_the_sum_form_are_methods_of_their_own():
    row = {"part": "sweep", "data": "digits", "network": "cnn", "how": {}, "seed": 0, "method": "both", "fit_ece": 0.1}
    rows = [
        {**row, "exponent": gamma, "ece": ece, **form}
        for gamma in clamping_presets.GAMMAS
        for form, ece in (({}, 0.05), ({"reduction": "sum"}, 0.02))
    ]
    scored = {r["method"]: r for r in nc_tables.scored_rows(rows, Options())}
    assert {name: r["ece"] for name, r in scored.items()} == {
        **{"nc_ce": 0.05, "nc_fl": 0.05, "nc_sum_ce": 0.02, "nc_sum_fl": 0.02}
    }
    assert {r["network"] for r in nc_tables.name_shifts(list(scored.values()))} == {"cnn"}
    assert {r["network"] for r in nc_tables.name_shifts(rows)} == {"cnn", "cnn, sum form"}
