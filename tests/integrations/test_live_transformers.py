"""Tiny random networks of transformers: collect, fit, wrap, evaluate, save, load, pipelines, generate, Trainer."""

import copy
import logging
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import trueup
from trueup import calibrate, collect
from trueup.calibrators import Temperature, Vector
from trueup.integrations.transformers import TrainerMetrics, from_pretrained, pipeline, save_pretrained
from trueup.models import Calibrated

transformers = pytest.importorskip("transformers")

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *["good", "bad", "film", "the", "a", "was", "not", "very", "dull", "fun"],
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join(WORDS))
    return transformers.BertTokenizer(str(path))


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def make_bert():
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_labels=3, initializer_range=0.6,
    )  # fmt: skip
    return seeded(lambda: transformers.BertForSequenceClassification(config)).eval()


@pytest.fixture
def bert():
    return make_bert()


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS[5:], size=rng.integers(2, 6))) for _ in range(120)]


@pytest.fixture(scope="module")
def rows(texts, tokenizer):
    encoded = tokenizer(texts, padding=True)
    plain = [{name: values[i] for name, values in encoded.items()} for i in range(len(texts))]
    with torch.no_grad():
        logits = make_bert()(**{name: torch.tensor(values) for name, values in encoded.items()}).logits.numpy()
    labels = (logits / 3 + np.random.default_rng(1).gumbel(size=logits.shape)).argmax(axis=1)  # three times too sure
    return [{**row, "labels": int(label)} for row, label in zip(plain, labels, strict=True)]


def loader(rows):
    return DataLoader(rows, batch_size=50, collate_fn=transformers.default_data_collator)


def test_a_classifier_from_collecting_to_its_folder_and_back(bert, rows, texts, tokenizer, tmp_path):
    logits, labels = collect(bert, loader(rows))
    assert logits.shape == (120, 3)
    calibrated = calibrate(bert, loader(rows))
    after = collect(calibrated, loader(rows))
    torch.testing.assert_close(after.logits, calibrated.after(logits))
    assert trueup.evaluate(*after)["nll"].value < trueup.evaluate(logits, labels)["nll"].value
    calibrated.save_pretrained(tmp_path / "net", summary={"rows": 120})
    assert {"calibrator.safetensors", "config.json", "model.safetensors"} <= {
        file.name for file in (tmp_path / "net").iterdir()
    }
    loaded = from_pretrained(tmp_path / "net")
    assert isinstance(loaded, Calibrated)
    torch.testing.assert_close(collect(loaded, loader(rows)).logits, after.logits, rtol=0, atol=0)
    assert from_pretrained(tmp_path / "net", bert).model is bert
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "net")
    torch.testing.assert_close(collect(plain, loader(rows)).logits, logits)
    scores = pipeline("text-classification", loaded, tokenizer=tokenizer, top_k=None)(texts[:2])
    wanted = torch.softmax(after.logits[:2], dim=1)
    for found, row in zip(scores, wanted, strict=True):
        by_label = {entry["label"]: entry["score"] for entry in found}
        assert [by_label[f"LABEL_{k}"] for k in range(3)] == pytest.approx(row.tolist(), abs=1e-6)
    tokenizer.save_pretrained(tmp_path / "net")
    for folder in (tmp_path / "net", str(tmp_path / "net")):
        by_folder = pipeline("text-classification", folder, top_k=None)
        assert isinstance(by_folder.model, Calibrated)
        assert by_folder(texts[:2]) == scores


def test_a_pipeline_of_its_own_takes_it_too_and_ours_says_nothing_wrong(bert, tokenizer, texts, caplog):
    calibrated = Calibrated(bert, after=Vector([0.5, 2.0, 1.0], [0.1, 0.0, -0.3]))
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        ours = pipeline("text-classification", calibrated, tokenizer=tokenizer)
        assert "not supported" not in caplog.text
        theirs = transformers.pipeline("text-classification", model=calibrated, tokenizer=tokenizer)
        assert ours(texts[0]) == theirs(texts[0])
    finally:
        library.removeHandler(caplog.handler)


def test_outputs_keep_their_type_and_the_rest_of_them(bert, tokenizer, texts):
    inputs = tokenizer(texts[:4], return_tensors="pt", padding=True)
    calibrated = Calibrated(bert, after=Temperature(2.0))
    with torch.no_grad():
        raw, out = (net(**inputs, output_hidden_states=True) for net in (bert, calibrated))
        pair = calibrated(**inputs, return_dict=False)
    assert type(out) is type(raw)
    assert list(out) == list(raw) == ["logits", "hidden_states"]
    torch.testing.assert_close(out.logits, raw.logits / 2)
    assert out["logits"] is out.logits is out[0]
    torch.testing.assert_close(out.hidden_states, raw.hidden_states)
    torch.testing.assert_close(pair[0], out.logits)


def test_what_the_network_has_is_had_through_it(bert, tokenizer, texts):
    calibrated = Calibrated(bert, after=Temperature(2.0))
    assert calibrated.config is bert.config
    assert (calibrated.device, calibrated.dtype) == (bert.device, bert.dtype)
    assert calibrated.num_labels == 3
    assert calibrated.get_input_embeddings() is bert.get_input_embeddings()
    assert "config" in dir(calibrated)
    assert not hasattr(calibrated, "no_such_thing")
    with pytest.raises(AttributeError, match="'BertForSequenceClassification' object has no attribute 'no_such_thing'"):
        _ = calibrated.no_such_thing
    with pytest.raises(AttributeError, match="omit the calibrator"):
        _ = calibrated.push_to_hub
    assert set(calibrated.state_dict()) == {f"model.{k}" for k in bert.state_dict()} | {"calibrator.temperature"}
    inputs = tokenizer(texts[:2], return_tensors="pt", padding=True)
    for again in (copy.deepcopy(calibrated), pickle.loads(pickle.dumps(calibrated)), copy.copy(calibrated)):
        with torch.no_grad():
            torch.testing.assert_close(again(**inputs).logits, calibrated(**inputs).logits)
        assert again.config.num_labels == 3
    with pytest.raises(AttributeError):
        _ = object.__new__(Calibrated).config  # as while it is unpickled


def test_only_a_calibrator_can_be_saved_beside_a_network(bert, tmp_path):
    with pytest.raises(ValueError, match="model must have a calibrator"):
        Calibrated(bert).save_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match="model must have no map before the network"):
        save_pretrained(Calibrated(bert, torch.nn.Identity(), Temperature(1.5)), tmp_path / "a")
    with pytest.raises(ValueError, match="3 classes|classes of the fit"):
        save_pretrained(Calibrated(bert, after=Vector([1.0, 1.0], [0.0, 0.0])), tmp_path / "a")
    assert not (tmp_path / "a" / "config.json").exists()


def training_arguments(folder, **options):
    return transformers.TrainingArguments(
        str(folder), num_train_epochs=2, eval_strategy="epoch", save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, per_device_eval_batch_size=16, logging_strategy="no", seed=0, **options,
    )  # fmt: skip


@pytest.mark.parametrize("by_batch", [False, True])
def test_the_trainer_logs_calibration(bert, rows, tmp_path, by_batch, capsys):
    arguments = training_arguments(tmp_path, batch_eval_metrics=by_batch)
    trainer = transformers.Trainer(
        bert, arguments, train_dataset=rows[:64], eval_dataset=rows[64:], compute_metrics=TrainerMetrics()
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_ece" in entry]
    assert len(logged) == 2
    logits, labels = collect(bert, loader(rows[64:]))
    for metric in ("ece", "nll", "brier"):
        expected = getattr(trueup.metrics, metric)(logits, labels)
        assert logged[-1][f"eval_{metric}"] == pytest.approx(expected, abs=1e-5)


@pytest.fixture
def gpt2():
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=24, bos_token_id=2, eos_token_id=3,
        pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    return seeded(lambda: transformers.GPT2LMHeadModel(config)).eval()


def language_rows(model, n=40, length=8):
    """Texts that the model itself wrote at three times its temperature, of several lengths."""
    rng, rows = np.random.default_rng(0), []
    ids = torch.from_numpy(rng.integers(5, len(WORDS), size=(n, 1)))
    for _ in range(length - 1):
        with torch.no_grad():
            logits = model(ids).logits[:, -1].numpy()
        ids = torch.cat([ids, torch.from_numpy((logits / 3 + rng.gumbel(size=logits.shape)).argmax(1))[:, None]], dim=1)
    for row in ids:
        labels, end = row.clone(), int(rng.integers(4, length + 1))
        labels[end:] = -100
        rows.append({"input_ids": row, "attention_mask": (labels >= 0).long(), "labels": labels})
    return rows


def test_a_language_model_from_collecting_to_generating(gpt2, tmp_path):
    rows = language_rows(gpt2)
    table = collect(gpt2, DataLoader(rows, batch_size=16), class_axis="last", shifted=True)
    n = sum(int((row["labels"][1:] >= 0).sum()) for row in rows)
    assert table.logits.shape == (n, len(WORDS))
    with torch.no_grad():
        first = gpt2(rows[0]["input_ids"][None]).logits[0]
    kept = rows[0]["labels"][1:] >= 0
    torch.testing.assert_close(table.logits[: int(kept.sum())], first[:-1][kept], rtol=1e-4, atol=1e-5)
    assert len(set(table.clusters)) == len(rows)
    options = {"class_axis": "last", "shifted": True}
    calibrated = calibrate(gpt2, DataLoader(rows, batch_size=16), **options)
    assert float(calibrated.after.temperature) == pytest.approx(3, rel=0.25)
    before, after = (
        trueup.evaluate(*collect(net, DataLoader(rows, batch_size=16), **options)) for net in (gpt2, calibrated)
    )
    assert after["ece"].value < before["ece"].value / 2
    calibrated.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert loaded.class_axis == "last"
    ids = rows[0]["input_ids"][None, :3]
    asked = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    asked |= {"output_logits": True, "attention_mask": torch.ones_like(ids)}
    found, plain = (net.generate(ids, **asked) for net in (loaded, gpt2))
    torch.testing.assert_close(found.sequences, plain.sequences)  # greedy, so a temperature changes nothing
    for a, b in zip(found.logits, plain.logits, strict=True):
        torch.testing.assert_close(a, b / float(loaded.after.temperature), rtol=1e-4, atol=1e-5)
    assert not gpt2._forward_hooks  # the network is as it was
    assert not loaded.model._forward_hooks


def test_generate_sees_a_map_of_the_embedded_tokens(gpt2):
    class Shift(torch.nn.Module):
        def forward(self, x):
            return x + 0.5

    ids = torch.tensor([[6, 7, 8]])
    clamped = Calibrated(gpt2, before=Shift(), after=Temperature(2.0), class_axis="last")
    with torch.no_grad():
        wanted = clamped(ids, attention_mask=torch.ones_like(ids)).logits[:, -1]
    asked = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    found = clamped.generate(ids, **asked, return_dict_in_generate=True, output_logits=True)
    torch.testing.assert_close(found.logits[0], wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError):  # and nothing stays behind where it fails
        clamped.generate(ids, max_new_tokens=-5)
    assert not gpt2._forward_hooks
    assert not gpt2._forward_pre_hooks
    assert not gpt2.get_input_embeddings()._forward_hooks
    with pytest.raises(ValueError, match='shifted must come with class_axis="last"'):
        collect(gpt2, [], shifted=True)
