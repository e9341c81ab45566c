"""The dataset `gsm8k`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core import BadInputError
from areal_gsm8k.config import GSM8KConfig

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

HUB_ID = "openai/gsm8k"
_COLUMNS = ("question", "answer")
_LOCAL_SUFFIXES = (".jsonl", ".parquet")
_CALCULATOR = re.compile(r"<<[^<>]*>>")


def get_gsm8k_dataset(
    path: str | None,
    split: str,
    *,
    kind: str,
    tokenizer: Any = None,
    max_length: int | None = None,
    **options: Any,
) -> Dataset:
    """Load one split.

    Args:
        path: a hub id (None: ``openai/gsm8k``), a ``.jsonl`` or ``.parquet`` file, or a folder that holds
            ``{split}.jsonl``, ``{split}.parquet`` or ``{split}-*.parquet``, perhaps in a sub-folder named as the
            subset. The columns ``question`` and ``answer`` are read.
        split: ``train`` or ``test``. A path to a single file is that split.
        kind: ``rl`` gives ``messages`` (the question); ``sft`` gives ``messages`` that end with the reference
            solution. Both give ``answer``, the reference solution with its ``#### N`` line.
        tokenizer: counts tokens for ``max_length``, by its chat template.
        max_length: rows with more tokens (prompt; prompt and solution for SFT) are dropped.
        options: fields of :class:`GSM8KConfig`.

    Raises:
        BadInputError: if a file, a column or a value is missing, or no row is left.
    """
    from datasets import Dataset

    if kind not in ("rl", "sft"):
        raise BadInputError(f"dataset 'gsm8k' has the forms rl and sft, not {kind!r}")
    config = GSM8KConfig(**options)
    source, columns = _read_columns(path or HUB_ID, split, config.subset)
    messages = []
    for number, (question, answer) in enumerate(zip(columns["question"], columns["answer"], strict=True), start=1):
        if not isinstance(question, str) or not isinstance(answer, str):
            raise BadInputError(
                f"{source}, row {number}: question and answer must be text, got {question!r} and {answer!r}"
            )
        prompt = f"{question}\n{config.instruction}" if config.instruction else question
        chat = [{"role": "user", "content": prompt}]
        if kind == "sft":
            solution = _CALCULATOR.sub("", answer) if config.strip_calculator else answer
            chat.append({"role": "assistant", "content": solution})
        messages.append(chat)
    if not messages:
        raise BadInputError(f"{source} has no rows")
    dataset = Dataset.from_dict({"messages": messages, "answer": columns["answer"]})
    if max_length is None:
        return dataset
    lengths = _count_tokens(messages, tokenizer, generation_prompt=kind == "rl")
    kept = [index for index, length in enumerate(lengths) if length <= max_length]
    if not kept:
        raise BadInputError(
            f"{source}: none of the {len(lengths)} rows has at most max_length={max_length} tokens "
            f"(the shortest has {min(lengths)}). Raise max_length."
        )
    return dataset.select(kept)


def _read_columns(path: str, split: str, subset: str) -> tuple[str, dict[str, list[Any]]]:
    local = Path(path).expanduser()
    if local.exists():
        files = [local] if local.is_file() else _files_of_split(local, split, subset)
        table = _read_files(files)
        source, names = ", ".join(map(str, files)), table.column_names
    elif path.startswith((".", "/", "~")) or local.suffix in _LOCAL_SUFFIXES:
        raise BadInputError(f"dataset 'gsm8k': no such file or folder: {path}")
    else:
        table = _load_from_hub(path, split, subset)
        source, names = f"{path} ({subset}, {split})", table.column_names
    missing = [name for name in _COLUMNS if name not in names]
    if missing:
        raise BadInputError(
            f"{source} has no column {' or '.join(map(repr, missing))}. It needs the columns 'question' and 'answer'; "
            f"it has {', '.join(map(repr, names)) or 'none'}."
        )
    return source, {name: table.column(name).to_pylist() for name in _COLUMNS}


def _files_of_split(folder: Path, split: str, subset: str) -> list[Path]:
    for place in (folder, folder / subset):
        for pattern in (f"{split}.jsonl", f"{split}.parquet", f"{split}-*.parquet"):
            if found := sorted(place.glob(pattern)):
                return found
    present = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
    raise BadInputError(
        f"dataset 'gsm8k': {folder} holds no split {split!r}: looked for {split}.jsonl, {split}.parquet and "
        f"{split}-*.parquet, there and in {subset}/. It holds {present}."
    )


def _read_files(files: list[Path]) -> pa.Table:
    # pyarrow rather than load_dataset: the latter copies every local file into a cache in the home directory.
    import pyarrow as pa
    import pyarrow.json
    import pyarrow.parquet

    tables = []
    for file in files:
        if file.suffix not in _LOCAL_SUFFIXES:
            raise BadInputError(f"dataset 'gsm8k': {file} is neither a .jsonl nor a .parquet file")
        if file.stat().st_size == 0:
            raise BadInputError(f"{file} has no rows")
        read = pyarrow.json.read_json if file.suffix == ".jsonl" else pyarrow.parquet.read_table
        try:
            tables.append(read(file))
        except (pa.ArrowException, OSError) as error:
            raise BadInputError(f"{file} cannot be read as {file.suffix[1:]}: {error}") from error
    return pa.concat_tables(tables, promote_options="default")


def _load_from_hub(path: str, split: str, subset: str) -> pa.Table:
    from datasets import load_dataset

    try:
        return load_dataset(path, subset, split=split).data.table
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"dataset 'gsm8k': cannot load {path} ({subset}, {split}) from the hub: {error}. Without network, give "
            "a local folder that holds train.jsonl and test.jsonl as path."
        ) from error


def _count_tokens(messages: list[list[dict[str, str]]], tokenizer: Any, *, generation_prompt: bool) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise BadInputError("dataset 'gsm8k': max_length needs a tokenizer with a chat template to count tokens")
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=generation_prompt, return_dict=False)
    return [len(ids) for ids in encoded]
