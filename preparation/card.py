"""The README.md of a token dataset: a dataset card as the Hugging Face hub reads it."""

from pathlib import Path

from basics.text import escaped
from preparation.journal import Origin, Progress, Request
from preparation.progress_display import left_out
from tokens.tokenizer import TOKENIZER_FILE, end_of_text_of, file_beside

SIZES = [(10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"),
         (10**7, "1M<n<10M"), (10**8, "10M<n<100M"), (10**9, "100M<n<1B"),
         (10**10, "1B<n<10B"), (10**11, "10B<n<100B"), (10**12, "100B<n<1T")]

CARD = """---
{front_matter}
---

# {name}, tokenised

{num_documents:,} documents of {source}, as token ids: {num_tokens:,} tokens of the
tokenizer `{tokenizer}`{of_text}.

| file | documents | tokens | bytes |
|---|---|---|---|
{rows}

Each file holds one vector `tokens` of 16-bit unsigned integers{layout}. Counts, tokenizer and
source are also in the metadata of the files.

## How to load it

```python
from safetensors import safe_open

with safe_open("train.safetensors", framework="numpy") as file:
    tokens = file.get_slice("tokens")[0:1024]  # reads only these
```

`ddp_train.py` trains on it if `dataset` in `train.json` is the name of this directory or of this
repository.
{notes}"""

LAYOUT = """: the documents in the order of the
source, the first ones in `train.safetensors`, with an end-of-text token (id {end_of_text}) after
each. Documents are tokenised as plain text: no text in them becomes a special token"""

IMPORTED = ", copied unchanged from files that held tokens"


def write_card(dataset_dir: Path, origin: Origin, request: Request, progress: Progress) -> None:
    """Write README.md next to the token files, which must be complete."""
    from huggingface_hub import DatasetCardData  # slow to import

    num_documents, num_tokens = progress.num_documents, progress.num_tokens
    file, tokenizer = file_beside(dataset_dir, request.tokenizer), request.tokenizer
    is_imported = progress.train.num_text_bytes is None
    card_data = DatasetCardData(
        license=origin.licence, language=origin.languages, task_categories=["text-generation"],
        size_categories=[size_category(num_documents)], pretty_name=f"{origin.title}, tokenised",
        source_datasets=[origin.hub_name or "original"],
        tags=["tokens"] if file else ["tokens", tokenizer],
    )
    rows = "\n".join(
        f"| `{split}.safetensors` | {progress.of(split).num_documents:,} |"
        f" {progress.of(split).num_tokens:,} |"
        f" {(dataset_dir / f'{split}.safetensors').stat().st_size:,} |"
        for split in ("train", "validation")
    )
    revision = f" (revision {request.revision})" if request.revision else ""
    card = CARD.format(
        front_matter=card_data.to_yaml(), name=escaped(origin.title), num_documents=num_documents,
        source=escaped(request.source + revision), num_tokens=num_tokens,
        tokenizer=TOKENIZER_FILE if file else tokenizer, rows=rows,
        of_text="" if is_imported else f" for {progress.num_bytes:,} bytes of text"
                f" ({progress.num_characters / num_tokens:.2f} characters per\ntoken)",
        layout=IMPORTED if is_imported else LAYOUT.format(
            end_of_text=end_of_text_of(tokenizer, file)),
        notes=_notes(origin, progress),
    )
    (dataset_dir / "README.md").write_text(card, encoding="utf-8")


def token_metadata(request: Request, progress: Progress) -> dict[str, str]:
    """Return the metadata of the token files, besides their counts."""
    metadata = {"tokenizer": request.tokenizer, "source": request.source[:400],
                "revision": request.revision[:100]}
    if progress.num_bad_files:
        metadata["num_bad_files"] = str(progress.num_bad_files)
    return metadata


def size_category(num_documents: int) -> str:
    """Return the hub's name for a range of dataset sizes, in examples."""
    return next((name for limit, name in SIZES if num_documents < limit), "n>1T")


def _notes(origin: Origin, progress: Progress) -> str:
    notes = ""
    if origin.hub_name is None:
        notes += ("\nBefore you publish this dataset, set the licence and the language above to"
                  " those of the source.\n")
    if progress.num_bad_files:
        notes += f"\nFiles {escaped(left_out(progress))}.\n"
    return notes
