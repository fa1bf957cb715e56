import json
import os

from huggingface_hub import ModelCard

from checkpointing import find_checkpoint
from lab.publish.model_card import Request, declared_of, model_card
from processes.run_lock import write_heartbeat
from run_config import load_run
from tests.support.lab_cli import error_line, publish, succeeded
from tests.support.markdown import HOSTILE, active_parts
from trainer.models import load_model

CHARTS = {"loss-chart.png", "grad-norm-chart.png", "learning-rate-chart.png"}


def card_of(workplace, **train):
    """Return the card of a run that says that it was trained with these settings."""
    path = workplace.runs_dir / "tiny/summary.json"
    summary = json.loads(path.read_text())
    summary["train"] |= train
    path.write_text(json.dumps(summary))
    return model_card(load_model("tiny", runs_dir=workplace.runs_dir),
                      Request("tiny", datasets_dir=workplace.datasets_dir))


def words_of(card):
    return " ".join(card.split())


def test_the_card_has_all_results(trained, tmp_path):
    run_dir, output = trained.runs_dir / "tiny", tmp_path / "export"
    checkpoint = find_checkpoint(run_dir / "checkpoints", "best")
    measured = {"checkpoint": checkpoint.name, "global_step": checkpoint.meta.global_step,
                "dataset": "tiny", "split": "validation", "start_token": 16, "num_tokens": 320}
    (run_dir / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [
        measured | {"loss": 9.5}, measured | {"loss": 5.25, "perplexity": 190.5},
        measured | {"checkpoint": "another", "loss": 1.0}, {"junk": 1},
        measured | {"split": "train", "loss": 0.5},  # of tokens trained on
        measured | {"dataset": None, "benchmark": "blimp", "split": "train", "accuracy": 0.5,
                    "questions_from": "nyu-mll/blimp"},
        measured | {"dataset": None, "benchmark": "blimp", "split": None, "accuracy": 0.25,
                    "questions_from": "own|.jsonl"}]) + '{"half')
    succeeded(publish(trained, "tiny", "--output", str(output), "--license", "apache-2.0"))
    card = ModelCard.load(output / "README.md")
    facts = card.data.to_dict()
    assert facts["license"] == "apache-2.0" and facts["library_name"] == "transformers"
    results = {found.metric_name: found.metric_value for found in card.data.eval_results}
    assert results == {
        "validation loss during training (nats per token)": checkpoint.loss,
        "loss (nats per token), 320 tokens from token 16": 5.25,
        "perplexity, 320 tokens from token 16": 190.5,
        "accuracy": 0.5, "accuracy, questions of own|.jsonl": 0.25,
    }
    splits = {found.metric_name: found.dataset_split for found in card.data.eval_results}
    assert splits["accuracy"] == "train" and splits["accuracy, questions of own|.jsonl"] is None
    for wanted in (f"{checkpoint.meta.tokens:,} tokens of `tiny`", "14,976 parameters",
                   f"step | {checkpoint.meta.global_step + 1} of 10", "| US$ | ",
                   '"learning_rate": 0.01', "![Training and validation loss](loss-chart.png)",
                   "| global batch | 2 x 1 x 1 sequences of 16 tokens |", "| 5.250000 |"):
        assert wanted in card.text, wanted


def test_no_path_of_the_machine_is_in_a_card(trained, monkeypatch):
    card = card_of(trained, init_from=str(trained.root / "secret-place/gpt2-weights"))
    assert 'pipeline("text-generation", model=".")' in card
    assert "trained from the weights of `gpt2-weights` on" in words_of(card)
    assert '"init_from": "gpt2-weights"' in card
    assert str(trained.root) not in card and "secret-place" not in card
    # A relative path of the place of training, also when the command is given elsewhere.
    (trained.root / "exports/mine").mkdir(parents=True)
    (trained.root / "elsewhere").mkdir()
    for place in (trained.root, trained.root / "elsewhere"):
        monkeypatch.chdir(place)
        card = card_of(trained, init_from="exports/mine")
        assert '"init_from": "mine"' in card and "exports/" not in card
    assert "from the weights of `someone/gpt` on" in words_of(card_of(trained,
                                                                      init_from="someone/gpt"))
    assert "trained from scratch on" in words_of(card_of(trained, init_from=None))


CARD_OF_MINE = "---\nlicense: cc-by-4.0\nlanguage:\n- de\n- pt-BR\n---\n"


def test_licence_and_languages_are_those_of_the_dataset(tmp_path):
    for name in ("gpjt/fineweb-gpt2-tokens", "gpjt/fineweb-edu-gpt2-tokens",
                 "HuggingFaceFW/fineweb"):
        assert declared_of(name, tmp_path) == ("odc-by", ["en"])
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine/README.md"
    for card, *wanted in (
            (CARD_OF_MINE, "cc-by-4.0", ["de", "pt-BR"]),
            (CARD_OF_MINE.replace("cc-by-4.0", "unknown"), None, []),  # nobody has filled it in
            (CARD_OF_MINE.replace("cc-by-4.0", "'a: b'"), None, []),
            (CARD_OF_MINE.replace("de\n", "'<b>'\n"), "cc-by-4.0", []),
            ("---\nlicense: mit\nlanguage: nl\n---\n", "mit", ["nl"]),
            ("---\nlicense: mit\n---\n", "mit", []),
            ("---\nlicense: [\n---\n", None, []), ("no front matter", None, []),
            ("---\nlicense: [mit, gpl]\nlanguage: 7\n---\n", None, [])):
        path.write_text(card)
        assert declared_of("mine", tmp_path) == tuple(wanted), card
    (tmp_path / "README.md").write_text(CARD_OF_MINE)
    path.unlink()
    path.symlink_to(tmp_path / "README.md")
    for name in ("..", "../mine/..", ".", "", str(tmp_path), "mine", "nix", "fineweb", "fineweb2",
                 "fineweb-gpt2-tokens", "someone/fineweb"):
        assert declared_of(name, tmp_path) == (None, [])


def test_a_run_has_the_licence_of_its_dataset_only_if_trained_from_scratch(trained):
    (trained.datasets_dir / "tiny/README.md").write_text(CARD_OF_MINE)
    for start, licence in ((None, "cc-by-4.0"), ("someone/gpt", None)):
        data = ModelCard(card_of(trained, init_from=start)).data
        assert (data.license, data.language) == (licence, ["de", "pt-BR"])


def test_licence_and_languages_can_be_named(trained):
    for option, value in (("--license", "My Licence"), ("--license", "mit\ntags: x"),
                          ("--license", ""), ("--language", "English"), ("--language", "e\x1b")):
        assert option in error_line(publish(trained, "tiny", option, value))
    export_dir = trained.runs_dir / "tiny/export"
    assert not export_dir.exists()
    succeeded(publish(trained, "tiny", "--license", "mit", "--language", "de", "--language",
                      "pt-BR"))
    card = ModelCard.load(export_dir / "README.md")
    assert (card.data.license, card.data.language) == ("mit", ["de", "pt-BR"])


def test_what_was_written_into_a_card_stays_there(trained):
    succeeded(publish(trained, "tiny", "--gguf"))
    export_dir = trained.runs_dir / "tiny/export"
    path = export_dir / "README.md"
    own = "\n## Limits\n\nIt knows nothing.\n\n## GGUF\n\nMy words.\n"
    path.write_text(path.read_text() + own)
    with_own = path.read_text()
    for options, has_files in ((["--gguf"], True), ([], False), (["--gguf"], True)):
        succeeded(publish(trained, str(export_dir), *options))
        text = path.read_text()
        assert own in text and ("model-F16.gguf" in text) is has_files
        assert text.count("## GGUF") == 1 + has_files
        if options and text.index("model-F16.gguf") < text.index("## Limits"):
            assert text == with_own


def test_a_card_describes_the_training_not_a_later_config(trained):
    path = trained.runs_dir / "tiny/train.json"
    path.write_text(path.read_text().replace('"tiny"', '"other"').replace("0.01", "0.123"))
    card = card_of(trained)
    assert "tokens of `tiny`" in card and '"learning_rate": 0.01' in card and "other" not in card


def test_damaged_and_hostile_records_never_break_a_card(trained):
    run_dir = trained.runs_dir / "tiny"
    target = load_model("tiny", runs_dir=trained.runs_dir)
    evaluations = [
        '"loss": 1.5, "num_tokens": "x"', '"loss": 1.5, "num_tokens": 3, "start_token": null',
        '"loss": "x"', '"loss": NaN', '"loss": 1.5, "dataset": ["a"]',
        '"loss": 1.5, "dataset": "a|b\\nc", "split": {"a": 1}',
        f'"loss": 1.5, "dataset": {json.dumps(HOSTILE)}',
        f'"accuracy": 0.5, "benchmark": {json.dumps(HOSTILE)}']
    (run_dir / "evaluations.jsonl").write_text("".join(
        f'{{"checkpoint": "{target.checkpoint.name}", "global_step": 1, {text}}}\n'
        for text in evaluations))
    for summary in (
            '{"batch": {"x": 1}}', '{"batch": [1]}', '{"machine": "x"}', "junk", None,
            '{"tokens_per_second": "x"}', '{"train": {"dataset": "a|b\\nc"}}',
            json.dumps({"train": {"dataset": HOSTILE}}),
            json.dumps({"train": {"dataset": "tiny", "init_from": HOSTILE}}),
            json.dumps({"machine": dict.fromkeys(("device", "torch"), HOSTILE)})):
        (run_dir / "summary.json").unlink(missing_ok=True)
        if summary is not None:
            (run_dir / "summary.json").write_text(summary)
        card = model_card(target, Request("tiny"))
        ModelCard(card)  # parses its front matter
        rows = [line for line in card.splitlines() if line.startswith("|")]
        assert all(line.replace("\\|", "").count("|") == 3 for line in rows)
        assert active_parts(card) <= CHARTS


def test_the_card_says_that_training_goes_on(trained):
    run = load_run(trained.runs_dir, "tiny")
    finished = json.loads(run.summary_path.read_text())
    for status, has_heartbeat, goes_on in (("running", False, False), ("running", True, True),
                                           ("finished", True, False)):
        summary = finished if status == "finished" else {}
        run.summary_path.write_text(json.dumps(summary | {"status": status}))
        for path in (run.summary_path, run.metrics_path):
            os.utime(path, (0, 0))
        if has_heartbeat:
            write_heartbeat(run.heartbeat_path, phase="training", step=7)
        target = load_model("tiny", runs_dir=trained.runs_dir)
        says = ("of `tiny` so far: these are the weights after step"
                f" {target.checkpoint.meta.global_step + 1}; training goes on. It is")
        assert (says in words_of(model_card(target, Request("tiny")))) == goes_on
