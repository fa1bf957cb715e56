"""Documents that Hugging Face's datasets reads: on the hub, in files of rows, saved to a disk.

It decides which files of a directory or repository are of a config and a split, and unpacks and
parses them: https://huggingface.co/docs/datasets/loading
"""

import contextlib
import glob
import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.compute
from pyarrow.types import is_dictionary, is_struct

from basics.entry_points import map_every_tensor
from basics.errors import MAX_CAUSE_LENGTH, UserError, one_line, print_error, status_of_place
from basics.text import counted
from preparation.cutting import LARGE_DOCUMENT, Cuts, Piece, cut_document
from preparation.hub import ask_hub, explain
from preparation.sources import (
    CHUNK_BYTES,
    MAX_READER_BYTES,
    TOO_LARGE,
    Chunk,
    Request,
    Source,
    SourceOptions,
    printable,
)
from preparation.text_files import PACKED, TextFile, TextFiles, data_suffix, recognised, text_files

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HUB_FILES = re.compile(
    r"hf://datasets/(?P<repository>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?/(?P<pattern>.+)"
)
WILDCARDS = frozenset("*?[")  # of patterns
MAX_LINE_BYTES = MAX_READER_BYTES // 8  # of JSON; parsing takes up to five times as much
HEAD_BYTES = 64  # of a file that cannot be read; they may tell why
ROWS = 250  # that are read at once
JSON_BYTES = 2**20  # that are parsed at once; blocks of 10 MB would be new memory each time
TEXT_TYPES = (
    pyarrow.types.is_string,
    pyarrow.types.is_large_string,
    pyarrow.types.is_string_view,
    pyarrow.types.is_null,
)


class Format(NamedTuple):
    """How `datasets` reads files of a suffix."""

    module: str
    options: dict[str, str] = {}
    may_be_text: bool = False  # a few such files among texts are texts too


DATA_SUFFIXES = {
    ".parquet": Format("parquet"),
    ".arrow": Format("arrow"),
    ".jsonl": Format("json"),
    ".ndjson": Format("json"),
    ".tar": Format("webdataset"),
    ".json": Format("json", may_be_text=True),
    ".csv": Format("csv", may_be_text=True),
    ".tsv": Format("csv", {"sep": "\t"}, may_be_text=True),
}


def is_saved_dataset(path: Path) -> bool:
    """Return whether a directory was written by `save_to_disk`."""
    of_one_split = {"state.json", "dataset_info.json"}  # other projects have a state.json too
    return (path / "dataset_dict.json").is_file() or all(
        (path / name).is_file() for name in of_one_split
    )


def hub_name_of(source: str) -> str:
    """Return the owner/name of a dataset on the hub; empty if SOURCE names another place.

    Raises: UserError: it is of the hub, but names no files of a dataset.
    """
    if source.startswith("hf://"):
        if found := HUB_FILES.fullmatch(source):
            return found["repository"]
        raise UserError(f"{source}: wanted hf://datasets/owner/name/pattern, or only owner/name")
    if not HUB_NAME.fullmatch(source):
        return ""
    is_file = data_suffix(source) in {*DATA_SUFFIXES, *PACKED, ".txt"}
    is_local = Path(source).exists() or Path(source).parent.is_dir()
    return "" if is_file or is_local else source


def hub_source(options: SourceOptions) -> Source:
    """Find a dataset on the hub, or some of its files (hf://datasets/owner/name/pattern).

    Raises: UserError: there is none for this user, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    repository = hub_name_of(options.source)
    found = HUB_FILES.fullmatch(options.source)
    in_source = unquote(found["revision"] or "") if found else ""
    revision = options.revision or in_source
    if in_source not in ("", revision):
        raise UserError(f"{options.source}: --revision {revision} is another one; name one of them")
    info = ask_hub(repository, lambda: HfApi().dataset_info(repository, revision=revision or None))
    card = info.card_data
    licences = _names(card and card.license) or ["unknown"]
    request = Request(
        source=options.label(),
        revision=info.sha or "",
        title=repository,
        licence=licences if len(licences) > 1 else licences[0],
        languages=_names(card and card.language),
        hub_name=repository,
        text_column=options.text_column,
        encoding=options.encoding,
        document_separator=options.document_separator,
    )
    return DatasetSource(request, options)


def _names(listed: Any) -> list[str]:
    """Return what a dataset's card lists under a key: a text, or several."""
    values = listed if isinstance(listed, list) else [listed]
    return [str(value) for value in values if value]


class DatasetSource(Source):
    """Rows of a dataset, each a document."""

    def __init__(
        self,
        request: Request,
        options: SourceOptions,
        root: Path | None = None,
        paths: Mapping[str, Path] | None = None,
        left_out: dict[str, str] | None = None,
    ) -> None:
        """`root` is a local directory, None of a dataset on the hub. Only `paths`, the files of
        the source by their names in it, are read, as far as `datasets` reads them."""
        super().__init__(request, left_out)
        self._options = options
        self._root = root
        self._paths = paths or {}
        self._read: Sequence[str] = ()  # the files of the split
        self._not_read: dict[str, str] = {}  # files of the source, and reasons
        self._rows: Any = None

    def chunks(self, position: Any, cuts: Cuts) -> Iterator[Chunk]:
        import datasets  # takes a second

        for library in (datasets, huggingface_hub):  # they print names as they are
            library.logging.set_verbosity(library.logging.CRITICAL)
        datasets.disable_progress_bars()
        with self._naming(), _without_torch_and_scipy():
            rows = self._open()
        if position is None and self._not_read:
            first = ", ".join(f"{name} ({why})" for name, why in list(self._not_read.items())[:3])
            line = f"leaving out {counted(len(self._not_read), 'file')}: {first}"
            advice = "a pattern of files as SOURCE takes others"
            print_error(one_line(f"{self._options.source}: {line}; {advice}"))
            yield Chunk(None, [], self._options.source, self._not_read)
        if rows is None:
            self.is_text = True
            files = [TextFile(name, name, CHUNK_BYTES + 1) for name in self._read]
            if self._root is not None:
                names = [name for name in self._paths if printable(name) not in self._not_read]
                files = text_files({name: self._paths[name] for name in names})
            yield from TextFiles(self.request, files, self._options).chunks(position, cuts)
            return
        with self._naming():
            if position:  # is the state, which `rows` tells only when it has begun
                rows.load_state_dict(position)
            else:
                position = rows.state_dict()
            self._rows = rows
            arrays: list[pyarrow.Array] = []
            for table in rows.iter(ROWS):
                arrays += self._column_in(table).chunks
                if sum(array.nbytes for array in arrays) >= CHUNK_BYTES:
                    yield Chunk(position, _pieces(arrays, cuts, self._place), self._place)
                    position = rows.state_dict()
                    arrays = []
            if arrays:
                yield Chunk(position, _pieces(arrays, cuts, self._place), self._place)

    @property
    def _place(self) -> str:
        """Name the file that is read."""
        number = _shard_number(self._rows.state_dict()) if self._rows is not None else 0
        return self._read[min(number, len(self._read) - 1)] if self._read else self._options.source

    def _open(self) -> Any:
        """Return the rows of the split as Arrow tables; None for files of text.

        Raises: UserError: there is no such split or column, or an option is not for these files.
        """
        import datasets

        options = self._options
        if self._root is not None and is_saved_dataset(self._root):
            saved: Any = datasets.load_from_disk(str(self._root.absolute()))
            has_splits = isinstance(saved, datasets.DatasetDict)
            for option in ("config", "encoding", *["split"] * (not has_splits)):
                if getattr(options, option):
                    raise UserError(
                        f"{options.source}: --{option} is not for this directory of save_to_disk"
                    )
            if has_splits:
                saved = saved[self._split(list(saved))]
            rows = saved.to_iterable_dataset()
        else:
            builder = self._builder()
            if builder.name == "json":
                _limit_lines()
            split = self._split([str(name) for name in builder.config.data_files or ()])
            self._read = builder.config.data_files[split]
            if self._root is not None:
                self._choose(builder, split)
            if builder.name == "text":
                return None
            if options.encoding and not hasattr(builder.config, "encoding"):
                raise UserError(f"{options.source}: --encoding is not for {builder.name} files")
            if options.encoding:
                builder.config.encoding = options.encoding
            if builder.name in ("json", "csv"):  # whose files would have to have the same columns
                builder._cast_table = partial(self._cast, builder, builder._cast_table)
            if builder.name == "csv":  # pandas takes NA, null, None and numbers for no text
                builder.config.keep_default_na = False
                builder.config.converters = {options.text_column: str}
            rows = builder.as_streaming_dataset(split=split)
            if builder.name == "json":  # the types are known, from the first 10 MB
                builder.config.chunksize = JSON_BYTES
            if hasattr(builder.config, "columns"):  # parquet: no other column, and a few rows
                builder.config.columns = [self._first_column(rows.column_names)]
                builder.config.batch_size = ROWS  # a row group can have a million
                map_every_tensor()  # each of the threads that decode keeps memory otherwise
                rows = builder.as_streaming_dataset(split=split)
        if options.document_separator:
            raise UserError(f"{options.source}: --document-separator is for text files")
        if rows.column_names is not None:
            rows = rows.select_columns([self._first_column(rows.column_names)])
        return rows.with_format("arrow")

    def _cast(
        self, builder: Any, cast: Callable[..., Any], table: pyarrow.Table, **options: Any
    ) -> pyarrow.Table:
        """Reduce rows to the column of text, before `datasets` casts them to those before."""
        names = builder.info.features or [self._first_column(table.column_names)]
        return cast(table.select([name for name in names if name in table.column_names]), **options)

    def _choose(self, builder: Any, split: str) -> None:
        """Take those files of a split that are of the source; note why others are not read.

        If `datasets` takes the source for files of text, they are all those that may be text.
        """
        assert self._root is not None
        data_files = builder.config.data_files
        splits = {file: each for each, files in data_files.items() for file in files}
        self._not_read = {}
        taken = set()
        for name in self._paths:
            file = str(self._root.resolve() / name)
            split_of_file = splits.get(file)
            found = DATA_SUFFIXES.get(data_suffix(name))
            reason = ""
            if builder.name == "text":
                if found and not found.may_be_text:
                    reason = "is a dataset among files of text"
            elif split_of_file is None:
                is_kind = found is not None and found.module == builder.name
                reason = "is of no split" if is_kind else f"is no {builder.name} file"
            elif split_of_file != split:
                reason = f"is of the split {split_of_file}"
            if not reason:
                taken.add(file)
            elif not name.startswith("README"):  # describes the dataset
                self._not_read[printable(name)] = reason
        data_files[split][:] = [file for file in data_files[split] if file in taken]

    def _builder(self) -> Any:
        import datasets

        options = self._options
        config = options.config or None
        if found := HUB_FILES.fullmatch(options.source):
            place = f"{found['repository']}@{self.request.revision}"
            return _builder_of_files([f"hf://datasets/{place}/{found['pattern']}"])
        if self._root is None:
            return datasets.load_dataset_builder(
                options.source, config, revision=self.request.revision
            )
        if Path(options.source).is_dir():
            if WILDCARDS & set(str(self._root.resolve())):
                raise UserError(
                    f"{options.source}: datasets takes '*', '?' and '[' in the path of a directory"
                    " for a pattern; rename it"
                )
            return datasets.load_dataset_builder(str(self._root.absolute()), config)
        if config:
            raise UserError(
                f"{options.source}: --config needs a directory, or a dataset on the hub"
            )
        rows = [name for name in self._paths if data_suffix(name) in DATA_SUFFIXES]
        return _builder_of_files([glob.escape(str(self._root.resolve() / name)) for name in rows])

    def _split(self, splits: list[str]) -> str:
        """Return the split to read: the one that is named, or train. Raises: UserError."""
        wanted = self._options.split or "train"
        if wanted not in splits:
            raise UserError(
                f"{self._options.source}: has no split {wanted}; choose one with --split:"
                f" {', '.join(map(str, splits))}"
            )
        return wanted

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Turn every error inside into one line that names the file. Raises: UserError."""
        try:
            yield
        except UserError:
            raise
        except MemoryError:
            raise UserError(f"{self._place}: {TOO_LARGE}") from None
        except Exception as error:
            if self._root is None and not isinstance(error, RuntimeError):
                raise explain(self._place, error) from None
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            reason = reason or type(error).__name__
            if isinstance(error, UnicodeDecodeError):
                reason += "; --encoding names another encoding"
            with contextlib.suppress(OSError), open(self._place, "rb") as file:
                reason = recognised(file.read(HEAD_BYTES), self._options.encoding) or reason
            raise UserError(
                f"{self._place}: cannot be read: {reason[:MAX_CAUSE_LENGTH]}",
                status_of_place(error),
            ) from None

    def _first_column(self, names: Sequence[str]) -> str:
        """Return the column that holds the text, or the struct with it. Raises: UserError."""
        wanted = self._options.text_column
        for name in (wanted, wanted.split(".")[0]):
            if name in names:
                return name
        raise UserError(
            f"{self._place}: has no column {wanted!r}; name one of its columns with"
            f" --text-column: {', '.join(names)[:80]}"
        )

    def _column_in(self, table: pyarrow.Table) -> pyarrow.ChunkedArray:
        """Return the column of text, or a field of it: b of a for a.b. Raises: UserError."""
        wanted = self._options.text_column
        name = self._first_column(table.column_names)
        column = table.column(name)
        for part in wanted.removeprefix(name).split(".")[1:]:
            names = [field.name for field in column.type] if is_struct(column.type) else []
            if part not in names:
                raise UserError(
                    f"{self._place}: has no column {wanted!r}; {name!r} has {', '.join(names)[:80]}"
                )
            column = pyarrow.compute.struct_field(column, part)
        kind = column.type.value_type if is_dictionary(column.type) else column.type
        if not any(is_text(kind) for is_text in TEXT_TYPES):
            raise UserError(
                f"{self._place}: column {wanted!r} is of type {str(kind)[:80]}; name a column of"
                " text with --text-column"
            )
        return column


@contextlib.contextmanager
def _without_torch_and_scipy() -> Iterator[None]:
    """Keep `datasets` from importing them to open a dataset: seconds and 200 MB."""
    import datasets

    is_available = datasets.config.TORCH_AVAILABLE
    datasets.config.TORCH_AVAILABLE = False
    has_scipy = "scipy" in sys.modules
    sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]  # importing it fails
    try:
        yield
    finally:
        datasets.config.TORCH_AVAILABLE = is_available
        if not has_scipy:
            del sys.modules["scipy"]


def _limit_lines() -> None:
    """Refuse lines of JSON whose parsing may need more memory than there is.

    The parser does not check whether it gets memory, so a signal would end this process.
    """
    reader: Any = importlib.import_module("datasets.packaged_modules.json.json")
    if not isinstance(reader.open, partial):  # is `datasets` own when a builder was made
        reader.open = partial(_open_limited, reader.open)


def _open_limited(opened: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    file = opened(*arguments, **options)
    readline = file.readline

    def read_line() -> bytes:
        line = readline(MAX_LINE_BYTES)
        if len(line) == MAX_LINE_BYTES:
            raise MemoryError
        return line

    file.readline = read_line
    return file


def _builder_of_files(files: list[str]) -> Any:
    """Return what `datasets` reads files with, all of them as the split train.

    Raises: UserError: they are of several kinds.
    """
    import datasets

    formats = {data_suffix(file): DATA_SUFFIXES.get(data_suffix(file)) for file in files}
    modules = {found.module if found else "text" for found in formats.values()}
    if len(modules) > 1:
        raise UserError(f"{files[0]}: files of {' and '.join(sorted(formats))}; name one kind")
    found = next(iter(formats.values())) or Format("text")
    return datasets.load_dataset_builder(found.module, data_files={"train": files}, **found.options)


def _shard_number(state: dict[str, Any]) -> int:
    """Return the number of the file that a stream reads, from 0."""
    while "shard_idx" not in state:
        state = state["examples_iterable"]
    return state["shard_idx"]


def _pieces(arrays: list[pyarrow.Array], cuts: Cuts, place: str) -> Iterator[Piece]:
    """Yield documents as they lie in memory: no Python object for each, or for a text of 100 MB."""
    for array in filter(len, arrays):
        texts = array.cast(pyarrow.large_string()).fill_null("")
        _, offsets, values = texts.buffers()
        bounds = np.frombuffer(offsets, np.int64, len(texts) + 1, 8 * texts.offset)
        data = memoryview(values or b"")
        if np.diff(bounds).max(initial=0) > LARGE_DOCUMENT:
            for start, end in itertools.pairwise(bounds.tolist()):
                yield from cut_document([data[start:end]], cuts, place)
            continue
        first = 0
        while first < len(texts):
            start = bounds[first]
            stop = int(np.searchsorted(bounds, start + CHUNK_BYTES, "right")) - 1
            stop = max(stop, first + 1)
            ends = bounds[first + 1 : stop + 1] - start
            yield Piece(bytes(data[start : bounds[stop]]), ends.tolist())
            first = stop
