"""`areal data`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from areal_core.cli import console

if TYPE_CHECKING:
    from areal_core.api.configs import DatasetConfig

#: Rows whose tokens are counted for the statistics.
_MOST_COUNTED = 1000

_EPILOG = """
Examples:

  areal data preview run.yaml --section valid_dataset

  areal data preview --name gsm8k --path data/gsm8k --split test --tokenizer models/smollm2
"""


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Look at datasets.", no_args_is_help=True)
    group.callback()(lambda: None)

    @group.command("preview", short_help="Show the first rows of a dataset as training sees them.", epilog=_EPILOG)
    def preview(
        config: Annotated[Path | None, typer.Argument(help="YAML file of a run.", metavar="[CONFIG]")] = None,
        overrides: Annotated[
            list[str] | None, typer.Argument(help="Values that replace the file's.", metavar="[KEY=VALUE]...")
        ] = None,
        section: Annotated[str, typer.Option(help="Section of CONFIG: train_dataset or valid_dataset.")] = (
            "train_dataset"
        ),
        name: Annotated[
            str | None, typer.Option(help="Dataset, instead of a CONFIG: registered, or package.module:function.")
        ] = None,
        path: Annotated[str | None, typer.Option(help="Hub id, folder or file.")] = None,
        split: Annotated[str | None, typer.Option(help="Split; without a CONFIG: train.")] = None,
        kind: Annotated[str | None, typer.Option(help="Form of the rows: rl, sft, rw or dpo.")] = None,
        tokenizer: Annotated[
            str | None, typer.Option(help="Folder of a tokenizer, to count tokens.", metavar="DIR")
        ] = None,
        option: Annotated[
            list[str] | None,
            typer.Option(help="An option of the dataset, as under train_dataset.NAME. Repeatable.", metavar="K=V"),
        ] = None,
        rows: Annotated[int, typer.Option("-n", "--rows", help="Rows to show.", min=0)] = 3,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Show the first rows of a dataset as training sees them, and how many tokens they have."""
        found = _load(config, overrides or [], section, name, path, split, kind, tokenizer, option or [])
        result = _describe(*found, rows)
        if as_json:
            console.print_json(result)
        else:
            _print(result)

    app.add_typer(group, name="data")


def _load(
    config_path: Path | None,
    overrides: list[str],
    section: str,
    name: str | None,
    path: str | None,
    split: str | None,
    kind: str | None,
    tokenizer_path: str | None,
    options: list[str],
) -> tuple[DatasetConfig, str, Any, Sequence[dict[str, Any]]]:
    """The section, the form of its rows, the tokenizer (or None), and the rows."""
    import attrs

    from areal_core.api.configs import DatasetConfig
    from areal_core.cli.sections import plugin_section
    from areal_core.errors import BadInputError
    from areal_core.plugins import get_plugin_manager
    from areal_core.trainer.loading import load_dataset, load_tokenizer

    if (config_path is None) == (name is None):
        raise BadInputError("data preview: give either a CONFIG or --name, e.g. `areal data preview --name gsm8k`.")
    if kind not in (None, "rl", "sft", "rw", "dpo"):
        raise BadInputError(f"--kind: must be one of rl, sft, rw, dpo; got {kind!r}")
    manager = get_plugin_manager()
    tokenizer = load_tokenizer(tokenizer_path, key="--tokenizer") if tokenizer_path is not None else None
    if name is not None:
        values = {"name": name, "path": path, "split": split or "train"}
        dataset = plugin_section(DatasetConfig, values, name, options, manager)
        form: str = kind or "rl"
        section = "--name"
    else:
        from areal_core.api.load import load_run_config

        assert config_path is not None
        if options:
            raise BadInputError(f"--option: goes with --name. With a CONFIG write {section}.NAME.KEY=VALUE.")
        loaded = load_run_config(config_path, overrides, manager)
        if section not in ("train_dataset", "valid_dataset"):
            raise BadInputError(f"--section: must be train_dataset or valid_dataset; got {section!r}")
        chosen: DatasetConfig | None = getattr(loaded, section)
        if chosen is None:
            raise BadInputError(f"{config_path}: has no section {section}. Add it, or preview train_dataset.")
        dataset = attrs.evolve(chosen, path=path or chosen.path, split=split or chosen.split)
        form = kind or ("rl" if loaded.trainer == "distill" else loaded.trainer)
        if tokenizer is None:
            tokenizer = _tokenizer_of(loaded, required=dataset.max_length is not None)
    literal: Literal["rl", "sft", "rw", "dpo"] = form  # type: ignore[assignment]
    return dataset, form, tokenizer, load_dataset(dataset, literal, tokenizer, manager, key=section)


def _tokenizer_of(config: Any, *, required: bool) -> Any:
    """The run's tokenizer; without it rows can still be shown, unless they are to be filtered by length."""
    from areal_core.errors import BadInputError
    from areal_core.trainer.loading import load_tokenizer

    try:
        return load_tokenizer(
            config.tokenizer_path or config.actor.path, trust_remote_code=config.actor.trust_remote_code
        )
    except BadInputError as error:
        if required:
            raise
        console.warning(f"tokens are not counted: {error}")
        return None


def _count(row: dict[str, Any], form: str, tokenizer: Any) -> int | None:
    """Tokens of the prompt (rl) or of the whole example."""
    ids = row.get("input_ids")
    if ids is not None:
        return len(ids)
    chats = [row[key] for key in ("messages", "chosen") if isinstance(row.get(key), list)]
    if not chats or tokenizer is None:
        return None
    # In rl a workflow knows the tools, not the row.
    options = {"add_generation_prompt": True} if form == "rl" else {"tools": row.get("tools") or None}
    return len(tokenizer.apply_chat_template(chats[0], return_dict=False, **options))


def _describe(
    dataset: DatasetConfig, form: str, tokenizer: Any, rows: Sequence[dict[str, Any]], shown: int
) -> dict[str, Any]:
    from areal_core.errors import BadInputError

    first = [_without_pixels(dict(rows[index])) for index in range(min(shown, len(rows)))]
    result: dict[str, Any] = {
        "dataset": dataset.name,
        "path": dataset.path,
        "split": dataset.split,
        "kind": form,
        "rows": len(rows),
        "columns": list(rows[0]) if len(rows) else [],
        "tokens": None,
    }
    try:
        counts = [_count(rows[index], form, tokenizer) for index in range(min(len(rows), _MOST_COUNTED))]
    except ValueError as error:
        raise BadInputError(
            f"the tokenizer cannot format messages: {str(error).splitlines()[0]} "
            "Set its chat_template, or use a tokenizer that has one."
        ) from error
    known = sorted(count for count in counts if count is not None)
    if known:
        result["tokens"] = {
            "min": known[0],
            "median": known[len(known) // 2],
            "max": known[-1],
            "of_rows": len(known),
        }
    result["preview"] = [{"row": row, "tokens": counts[index]} for index, row in enumerate(first)]
    return result


def _print(result: dict[str, Any]) -> None:
    where = f" from {result['path']}" if result["path"] else ""
    console.stdout(f"{result['dataset']}{where}, split {result['split']}, as {result['kind']}: {result['rows']} rows")
    console.stdout(f"columns: {', '.join(result['columns'])}")
    if result["tokens"]:
        tokens = result["tokens"]
        rows = "all" if tokens["of_rows"] == result["rows"] else f"the first {tokens['of_rows']}"
        what = "prompt tokens" if result["kind"] == "rl" else "tokens"
        console.stdout(f"{what} of {rows} rows: {tokens['min']} to {tokens['max']}, median {tokens['median']}")
    for index, item in enumerate(result["preview"]):
        tokens_text = f" ({item['tokens']} tokens)" if item["tokens"] is not None else ""
        console.stdout(f"\n--- row {index}{tokens_text}")
        for column, value in item["row"].items():
            if _is_chat(value):
                for message in value:
                    console.stdout(f"{column} [{message['role']}]: {_said(message)}")
            else:
                console.stdout(f"{column}: {_short(value)}")


def _said(message: dict[str, Any]) -> str:
    """What a message says, and the tools that it calls."""
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    calls = [f"-> {function.get('name')}({function.get('arguments')})" for function in functions]
    return " ".join([str(message["content"]) if message.get("content") else "", *calls]).strip()


def _without_pixels(value: Any) -> Any:
    """A row with its images as sizes, in text."""
    if isinstance(value, dict):
        return {name: _without_pixels(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_pixels(part) for part in value]
    if isinstance(value, (bytes, bytearray)):
        return f"<{len(value):,} bytes>"
    if hasattr(value, "mode") and hasattr(value, "size"):  # a PIL image
        return f"<image of {value.size[0]} x {value.size[1]} pixels>"
    shape = getattr(value, "shape", ())
    return f"<array {' x '.join(map(str, shape))}>" if len(shape) > 1 else value


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _short(value: Any, limit: int = 400) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text)} characters)"
