"""`lab tune`: fine-tune a model on instructions, and write its answers to held-out ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from basics.cli import ABOVE_0, DATASETS_DIR, PLACE, RUNS_DIR, FiniteRange
from basics.errors import UserError
from lab.instruct.instructions import book_entries, check_writable, load_entries


@click.command()
@click.argument("target_name", metavar="RUN")
@click.option(
    "--checkpoint",
    default="best",
    show_default=True,
    help="latest, best or the name of a checkpoint directory.",
)
@click.option(
    "--data",
    type=PLACE,
    metavar="FILE",
    help="JSON: a list of objects with instruction, input and output.  [default: the"
    ' 1,100 of "Build a Large Language Model (from Scratch)", downloaded once]',
)
@click.option(
    "--loss-on",
    type=click.Choice(["response", "all"]),
    default="response",
    show_default=True,
    help="response: compute the loss on the response only. all: on the prompt too, as the"
    " main code of the book's chapter 7 does. The two losses are not comparable.",
)
@click.option("--learning-rate", type=ABOVE_0, default=5e-5, show_default=True)
@click.option("--weight-decay", type=FiniteRange(min=0), default=0.1, show_default=True)
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True)
@click.option(
    "--max-epochs",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Stop after this many epochs, or when validation loss rises.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Maximum length of an answer.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**63 - 1),
    default=42,
    show_default=True,
    help="Seed of the order of the entries and of dropout.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Tune and answer so many times, each with the next seed: FILE, FILE-2 and so on, for the"
    " spread of the score. The first model is kept.",
)
@click.option(
    "--output",
    type=PLACE,
    metavar="FILE",
    help="Write the answers here.  [default: runs/RUN/instruction-answers.json; if RUN is"
    " not a run, NAME-answers.json in the current directory]",
)
@click.option(
    "--model-output",
    type=PLACE,
    metavar="DIR",
    help="Write the tuned model to this directory.  [default: runs/RUN/tuned; if RUN is"
    " not a run, NAME-tuned in the current directory]",
)
@RUNS_DIR
@DATASETS_DIR
def command(
    target_name: str,
    checkpoint: str,
    data: Path | None,
    repeats: int,
    output: Path | None,
    model_output: Path | None,
    runs_dir: Path,
    datasets_dir: Path,
    **options: Any,
) -> None:
    """Fine-tune RUN's model on instructions, and write its answers to a file for `lab judge`.

    RUN may also be a directory of GPT-2 weights, or a hub name such as openai-community/gpt2. The
    first 85% of the data are for training, the next 10% for the test, the rest for validation.
    Training stops when the validation loss rises; the weights of the best epoch then answer the
    test. They are written as a standard GPT-2 with a chat template and a model card: a directory
    that `lab generate`, `lab evaluate`, `lab publish` and transformers load.
    """
    from trainer.model_names import check_before_torch

    check_before_torch([target_name], runs_dir)
    # Imported here so that --help and a wrong name do not wait for torch.
    from lab.instruct.fine_tuning import TuneOptions, run
    from lab.publish.export import check_output
    from trainer.models import load_model

    target = load_model(target_name, runs_dir=runs_dir, checkpoint_name=checkpoint)
    base = Path(target_name).resolve()
    if target.run is not None:
        output = output or target.run.run_dir / "instruction-answers.json"
        model_output = model_output or target.run.run_dir / "tuned"
    else:
        output = output or Path(f"{base.name}-answers.json")
        model_output = model_output or Path(f"{base.name}-tuned")
    model_output = model_output.absolute()
    if target.run is None and base.is_dir() and base == model_output.resolve():
        raise UserError(
            f"{model_output}: is the model that is to be tuned, which would be"
            " replaced; name another directory with --model-output"
        )
    check_output(model_output, option="--model-output")
    outputs = [output, *(output.with_stem(f"{output.stem}-{n + 1}") for n in range(1, repeats))]
    for path in outputs:
        check_writable(path)
    entries = load_entries(data or book_entries(datasets_dir))
    first = TuneOptions(**options)
    if target.checkpoint:  # the same one each time, also of a run that still trains
        checkpoint = target.checkpoint.name
    run(target, entries, first, output, model_output)
    for number, path in enumerate(outputs[1:], start=1):
        target = load_model(target.name, runs_dir=runs_dir, checkpoint_name=checkpoint)
        run(target, entries, replace(first, seed=first.seed + number), path, None, number + 1)
