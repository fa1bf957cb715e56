from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoTokenizer

from basics import failpoints
from lab.publish import export
from lab.publish.dataset_facts import Declared, declared_of
from lab.publish.model_card import CardFacts, model_card
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.tuning import add_tunable_run, tune
from tests.support.upload_server import taking_uploads
from tests.support.workplace import Workplace
from trainer.models import load_model


@pytest.fixture
def tuned(workplace: Workplace) -> Path:
    """The directory of a tuned model."""
    add_tunable_run(workplace)
    succeeded(tune(workplace, "--max-epochs", "1", "--max-new-tokens", "1"))
    return workplace.runs_dir / "tiny/tuned"


def publish(workplace: Workplace, *arguments: str, **environment: str) -> Result:
    return run_lab("publish", *arguments, "--runs-dir", str(workplace.runs_dir),
                   **{"HF_TOKEN": "", **environment})


def trained_on(workplace: Workplace, *options: str, **train: object) -> ModelCard:
    """Return the card of a run that says that it was trained with these settings."""
    path = workplace.runs_dir / "tiny/summary.json"
    summary = json.loads(path.read_text())
    summary["train"] |= train
    path.write_text(json.dumps(summary))
    succeeded(publish(workplace, "tiny", *options))
    return ModelCard.load(workplace.runs_dir / "tiny/export/README.md")


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_no_path_of_the_machine_is_in_a_card(trained: Workplace) -> None:
    weights = trained.root / "secret-place/gpt2-weights"
    card = trained_on(trained, init_from=str(weights))
    assert 'pipeline("text-generation", model=".")' in card.text
    assert "the weights of `gpt2-weights` on" in " ".join(card.text.split())
    assert '"init_from": "gpt2-weights"' in card.text
    assert str(trained.root) not in card.content and "secret-place" not in card.content


@pytest.mark.parametrize(("train", "licence", "languages"), [
    ({"dataset": "gpjt/fineweb-gpt2-tokens"}, "odc-by", ["en"]),
    ({"dataset": "gpjt/fineweb-edu-gpt2-tokens"}, "odc-by", ["en"]),
    ({"dataset": "fineweb"}, None, None),  # may be anything
    ({"dataset": "fineweb-gpt2-tokens"}, None, None),
    ({"dataset": "HuggingFaceFW/fineweb"}, "odc-by", ["en"]),
    ({"dataset": "gpjt/fineweb-gpt2-tokens", "init_from": "someone/gpt"}, None, ["en"]),
    ({"dataset": "tiny"}, None, None),
    ({"dataset": "fineweb2"}, None, None),
    ({"dataset": "someone/fineweb"}, None, None),
])
def test_licence_and_language_follow_from_fineweb_only(
    trained: Workplace, train: dict[str, str], licence: str | None, languages: list[str] | None
) -> None:
    card = trained_on(trained, **train)
    assert (card.data.license, card.data.language) == (licence, languages)


CARD_OF_MINE = "---\nlicense: cc-by-4.0\nlanguage:\n- de\n- pt-BR\n---\n"


@pytest.mark.parametrize(("card", "licence", "languages"), [
    (CARD_OF_MINE, "cc-by-4.0", ["de", "pt-BR"]),
    (CARD_OF_MINE.replace("cc-by-4.0", "unknown"), None, None),  # nobody has filled it in
    (CARD_OF_MINE.replace("cc-by-4.0", "'a: b'"), None, None),
    (CARD_OF_MINE.replace("de\n", "'<b>'\n"), "cc-by-4.0", None),
    ("---\nlicense: mit\nlanguage: nl\n---\n", "mit", ["nl"]),
    ("---\nlicense: [\n---\n", None, None), ("no front matter", None, None),
    ("---\nlicense: [mit, gpl]\nlanguage: 7\n---\n", None, None),
])
def test_licence_and_languages_are_those_of_the_datasets_card(
    tmp_path: Path, card: str, licence: str | None, languages: list[str] | None
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/README.md").write_text(card)
    found = declared_of("mine", tmp_path)
    assert (found.licence, found.languages) == (licence, languages and tuple(languages))


def test_a_card_is_read_only_from_the_dataset_itself(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(CARD_OF_MINE)
    (tmp_path / "datasets/mine").mkdir(parents=True)
    (tmp_path / "datasets/mine/README.md").symlink_to(tmp_path / "README.md")
    for name in ("..", "../datasets/..", ".", "", str(tmp_path), "mine", "nix"):
        assert declared_of(name, tmp_path / "datasets") == Declared()


def test_a_run_has_the_licence_of_its_dataset_only_if_trained_from_scratch(
    trained: Workplace
) -> None:
    (trained.datasets_dir / "tiny/README.md").write_text(CARD_OF_MINE)
    options = ("--datasets-dir", str(trained.datasets_dir))
    card = trained_on(trained, *options)
    assert (card.data.license, card.data.language) == ("cc-by-4.0", ["de", "pt-BR"])
    card = trained_on(trained, *options, init_from="someone/gpt")
    assert (card.data.license, card.data.language) == (None, ["de", "pt-BR"])


def test_a_path_of_the_shape_of_a_hub_name_is_hidden(
    trained: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path of the place of training, also when the command is given elsewhere."""
    (trained.root / "exports/mine").mkdir(parents=True)
    (trained.root / "elsewhere").mkdir()
    for place in (trained.root, trained.root / "elsewhere"):
        monkeypatch.chdir(place)
        card = trained_on(trained, init_from="exports/mine")
        assert '"init_from": "mine"' in card.text and "exports/" not in card.content
    assert "`someone/gpt`" in trained_on(trained, init_from="someone/gpt").text


def test_what_was_written_into_a_card_stays_there(trained: Workplace) -> None:
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


def test_licence_and_languages_can_be_named(trained: Workplace) -> None:
    card = trained_on(trained, "--license", "mit", "--language", "de", "--language", "pt-BR",
                      dataset="gpjt/fineweb-gpt2-tokens")
    assert (card.data.license, card.data.language) == ("mit", ["de", "pt-BR"])


@pytest.mark.parametrize(("option", "value"), [
    ("--license", "My Licence"), ("--license", "mit\ntags: x"), ("--license", ""),
    ("--language", "English"), ("--language", "e\x1b"),
])
def test_a_licence_or_language_that_the_hub_refuses_is_an_error(
    trained: Workplace, option: str, value: str
) -> None:
    assert option in error_line(publish(trained, "tiny", option, value))
    assert not (trained.runs_dir / "tiny/export").exists()


def test_a_tuned_model_is_published_with_its_template_and_card(
    workplace: Workplace, tuned: Path, tmp_path: Path
) -> None:
    before, output = files_of(tuned), tmp_path / "export"
    result = publish(workplace, str(tuned), "--output", str(output), "--license", "cc-by-4.0")
    assert f"written to {output}" in succeeded(result).stdout and files_of(tuned) == before
    changed = {name for name, content in files_of(output).items() if content != before[name]}
    assert changed == {"README.md"} and files_of(output).keys() == before.keys()
    card, old = (ModelCard.load(place / "README.md") for place in (output, tuned))
    assert card.data.license == "cc-by-4.0" and card.text.split() == old.text.split()
    assert card.data.to_dict() == old.data.to_dict() | {"license": "cc-by-4.0"}
    assert AutoTokenizer.from_pretrained(output).chat_template
    assert str(tmp_path) not in card.content


def test_a_tuned_model_is_uploaded(workplace: Workplace, tuned: Path, tmp_path: Path) -> None:
    weights = load_file(tuned / "model.safetensors")
    with taking_uploads() as hub:
        for repository in ("someone/tuned", "someone/again"):
            succeeded(publish(workplace, str(tuned), repository, "--language", "en",
                              **hub.environment(tmp_path)))
            files = hub.files("model", repository)
            assert files == files_of(tuned)
            card = ModelCard(files["README.md"].decode())
            assert f'model="{repository}")' in card.text and card.data.language == ["en"]
            assert card.text.count("model=") == 1
    again = load_model(str(tuned), runs_dir=workplace.runs_dir).model.state_dict()
    assert len(again) and load_file(tuned / "model.safetensors").keys() == weights.keys()
    assert all((load_file(tuned / "model.safetensors")[name] == weights[name]).all()
               for name in weights)


def test_an_export_can_be_published_again(trained: Workplace, tmp_path: Path) -> None:
    succeeded(publish(trained, "tiny"))
    export = trained.runs_dir / "tiny/export"
    before = files_of(export)
    succeeded(publish(trained, str(export)))
    assert files_of(export) == before  # charts and evaluations too


def test_a_kill_while_a_tuned_model_is_replaced_loses_nothing(
    workplace: Workplace, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files_of(tuned)
    with monkeypatch.context() as patched:
        patched.setattr(export.shutil, "rmtree", lambda *_, **__: None)  # as if killed
        patched.setenv(failpoints.VARIABLE, "export.rename:raise")
        assert isinstance(publish(workplace, str(tuned)).exception, RuntimeError)
    assert not tuned.exists()
    succeeded(publish(workplace, str(tuned)))
    assert files_of(tuned) == before
    assert [path.name for path in tuned.parent.glob(".*")] == []


def test_directories_from_elsewhere_are_refused(workplace: Workplace, tuned: Path) -> None:
    (tuned / "README.md").write_text("Somebody else's model.")
    assert "not a plain name" in error_line(publish(workplace, str(tuned)))
    (tuned / "README.md").write_text("---\ntags: [ddp-train\n---\nx")
    assert "not a model card" in error_line(publish(workplace, str(tuned)))


def test_a_run_without_a_summary_has_a_card(trained: Workplace) -> None:
    (trained.runs_dir / "tiny/summary.json").unlink()
    target = load_model("tiny", runs_dir=trained.runs_dir)
    assert "tokens of `tiny`" in model_card(target, CardFacts("tiny", "."))
