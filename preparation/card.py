"""What is said of a dataset: the progress, a summary, and its README.md, a card for the hub."""

import time
from pathlib import Path

from tqdm import tqdm

from basics.errors import one_line, print_error
from basics.text import counted, escaped
from preparation.journal import PART_FILE, Origin, Progress, Request
from tokens.tokenizer import TOKENIZER_FILE, end_of_text_of, file_beside

SIZES = [  # as the hub names them
    (10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"), (10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"),
    (10**11, "10B<n<100B"), (10**12, "100B<n<1T")]
DONE = "{n_fmt}{unit} of {total_fmt}{unit}"
BAR = "{percentage:3.0f}%|{bar}| " + DONE + " [{elapsed}<{remaining}{postfix}]"
LINE = DONE + "{postfix}, {remaining} left"
LINE_INTERVAL = 30  # seconds between plain lines

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


class ProgressDisplay:
    """A bar on a terminal; elsewhere a plain line every LINE_INTERVAL seconds.

    Args:
        total: bytes or documents, `first` of them by an earlier launch, with `num_tokens`.
    """

    def __init__(self, total: int, first: int, num_tokens: int, *, unit: str) -> None:
        self._unit, self._first, self._first_tokens = {
            "unit": unit, "unit_scale": unit == "B"}, first, num_tokens
        self._bar = tqdm(total=total, initial=first, disable=None, bar_format=BAR,
                         dynamic_ncols=True, **self._unit)
        self._started = self._last_line = time.monotonic()
        self.close = self._bar.close

    def show(self, done: int, num_tokens: int) -> None:
        """Update the bar, or print a line if it is time."""
        now = time.monotonic()
        rate = (num_tokens - self._first_tokens) / max(now - self._started, 1e-3)
        text = f"{num_tokens / 1e6:,.0f} M tokens, {rate / 1e6:.2f} M tokens/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(done - self._bar.n)
        if self._bar.disable and now - self._last_line > LINE_INTERVAL:
            self._last_line = now
            print_error(tqdm.format_meter(
                done, self._bar.total, now - self._started, bar_format=LINE, postfix=text,
                initial=self._first, **self._unit))


def write_card(dataset_dir: Path, origin: Origin, request: Request, progress: Progress) -> None:
    """Write README.md next to the token files, which must be complete."""
    from huggingface_hub import DatasetCardData  # slow to import

    total, tokenizer = progress.total, request.tokenizer
    file = file_beside(dataset_dir, tokenizer)
    card_data = DatasetCardData(
        license=origin.licence, language=origin.languages, task_categories=["text-generation"],
        size_categories=[next((name for limit, name in SIZES if total.num_documents < limit),
                              "n>1T")],
        pretty_name=f"{origin.title}, tokenised", source_datasets=[origin.hub_name or "original"],
        tags=["tokens"] if file else ["tokens", tokenizer],
    )
    rows = [f"| `{split}.safetensors` | {count.num_documents:,} | {count.num_tokens:,} |"
            f" {(dataset_dir / f'{split}.safetensors').stat().st_size:,} |"
            for split, count in (("train", progress.train), ("validation", progress.validation))]
    revision = f" (revision {request.revision})" if request.revision else ""
    of_text, layout, notes = "", IMPORTED, ""
    if total.num_text_bytes is not None:
        of_text = (f" for {total.num_text_bytes:,} bytes of text"
                   f" ({progress.num_characters / total.num_tokens:.2f} characters per\ntoken)")
        layout = LAYOUT.format(end_of_text=end_of_text_of(tokenizer, file))
    if origin.hub_name is None:
        notes += ("\nBefore you publish this dataset, set the licence and the language above to"
                  " those of the source.\n")
    if progress.num_bad_files:
        notes += f"\nFiles {escaped(left_out(progress))}.\n"
    card = CARD.format(
        front_matter=card_data.to_yaml(), name=escaped(origin.title), rows="\n".join(rows),
        num_documents=total.num_documents, source=escaped(request.source + revision),
        num_tokens=total.num_tokens, tokenizer=TOKENIZER_FILE if file else tokenizer,
        of_text=of_text, layout=layout, notes=notes)
    (dataset_dir / "README.md").write_text(card, encoding="utf-8")


def token_metadata(request: Request, progress: Progress) -> dict[str, str]:
    """Return the metadata of the token files, besides their counts."""
    metadata = {"tokenizer": request.tokenizer, "source": request.source[:400],
                "revision": request.revision[:100]}
    if progress.num_bad_files:
        metadata["num_bad_files"] = str(progress.num_bad_files)
    return metadata


def left_out(progress: Progress) -> str:
    """Name the files that could not be read."""
    more = progress.num_bad_files - len(progress.bad_files)
    return (f"left out because they could not be read: {progress.num_bad_files:,}"
            f" ({', '.join(map(one_line, progress.bad_files))}"
            f"{f' and {more:,} more' * bool(more)})")


def summary(output_dir: Path, progress: Progress) -> str:
    """Describe the finished dataset in a few lines."""
    total = progress.total
    lines = [f"{counted(total.num_documents, 'document')}, {total.num_tokens:,} tokens"]
    if total.num_text_bytes:  # unknown for imported tokens
        lines[0] += (f", {total.num_text_bytes:,} bytes of text,"
                     f" {progress.num_characters / total.num_tokens:.2f} characters per token")
    if progress.num_empty:
        lines.append(f"documents without text: {progress.num_empty:,}")
    if (output_dir / PART_FILE).exists():
        lines.append(f"{output_dir}: a part; when all are ready, join them with prepare_dataset.py"
                     " --join PART... OUTPUT")
    else:
        for split, count in (("train", progress.train), ("validation", progress.validation)):
            path = output_dir / f"{split}.safetensors"
            lines.append(f"{path}: {counted(count.num_documents, 'document')},"
                         f" {count.num_tokens:,} tokens, {path.stat().st_size:,} bytes")
    if progress.num_bad_files:
        lines.append(f"files {left_out(progress)}")
    return "\n".join(lines)
