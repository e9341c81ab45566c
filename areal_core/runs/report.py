"""``report.html``: one offline page with a run's curves, its rollouts, its configuration and its environment."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from areal_core.errors import BadInputError
from areal_core.runs.charts import arrange_charts
from areal_core.runs.files import atomic_write
from areal_core.runs.headline import format_number, format_seconds, headline
from areal_core.runs.jsonlines import to_json_value
from areal_core.runs.listing import RunSummary, is_run_directory, read_config, read_json, summarize
from areal_core.runs.metrics import read_metrics
from areal_core.runs.rollout_sample import sample_rollouts

REPORT_FILE = "report.html"
#: Room for the page itself beside its data.
_PAGE_BYTES = 64 * 2**10


def escape_json(value: Any) -> str:
    """JSON that is safe inside ``<script>``: no text of a completion can end the element or open a comment."""
    text = json.dumps(to_json_value(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A lone surrogate (half a character at a cut) has no UTF-8 form.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _flatten(value: Any, key: str = "") -> list[list[str]]:
    if isinstance(value, dict) and value:
        rows: list[list[str]] = []
        for name, inner in value.items():
            rows += _flatten(inner, f"{key}.{name}" if key else str(name))
        return rows
    if value is None or isinstance(value, bool | list | dict):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = str(value)
    return [[key, text]]


def _environment_rows(environment: dict[str, Any]) -> list[list[str]]:
    rows = []
    for key, value in environment.items():
        if key == "earlier":
            if value:
                rows.append(["resumed", f"{len(value)} time{'s' if len(value) > 1 else ''}"])
        elif key == "command" and isinstance(value, list):
            rows.append([key, " ".join(map(str, value))])
        elif value not in (None, [], {}):
            rows += _flatten(value, key if key not in ("versions", "environment") else "")
    return rows


def _tiles(summary: RunSummary, rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    tiles = [{"label": "Steps", "value": str(summary.step), "note": ""}]
    heads = [(int(row["step"]), headline(row)) for row in rows]

    def change(label: str, title: str) -> None:
        seen = [(step, head[label]) for step, head in heads if label in head]
        if not seen:
            return
        (_, first), (_, last) = seen[0], seen[-1]
        note = f"from {format_number(first)}" if len(seen) > 1 else ""
        tiles.append({"label": title, "value": format_number(last), "note": note})

    change("reward", "Train reward")
    change("eval", "Held-out reward")
    if summary.best is not None:
        metric, step, value = summary.best
        tiles.append({"label": f"Best {metric}", "value": format_number(value), "note": f"at step {step}"})
    change("loss", "Loss")
    change("eval loss", "Held-out loss")
    speeds = sorted(head["tok/s"] for _, head in heads if "tok/s" in head)
    if speeds:
        tiles.append(
            {"label": "Throughput", "value": f"{format_number(speeds[len(speeds) // 2])} tok/s", "note": "median"}
        )
    seconds = sum(row["time/step_s"] for row in rows if isinstance(row.get("time/step_s"), int | float))
    if seconds:
        tiles.append({"label": "Time in steps", "value": format_seconds(seconds), "note": ""})
    return tiles


def build_report(run_path: Path | str, *, max_bytes: int = 3_000_000, groups_per_step: int = 4) -> Path:
    """Write ``report.html`` of a run that is finished or still going on.

    Args:
        run_path: the run directory.
        max_bytes: most bytes of the page; older and further rollouts are left out to keep it.
        groups_per_step: most prompts per step and split.

    Returns:
        the page's path.

    Raises:
        BadInputError: if this is no run directory, its metrics are damaged, or it cannot be written.
    """
    run_path = Path(run_path)
    if not is_run_directory(run_path):
        raise BadInputError(f"{run_path}: not a run directory: it has no config.yaml with metrics.jsonl or state.json.")
    rows = read_metrics(run_path)
    summary = summarize(run_path, rows)
    try:
        environment = read_json(run_path / "environment.json")
    except (OSError, ValueError):
        environment = {}
    data = {
        "trainer": summary.trainer,
        "charts": arrange_charts(rows),
        "config": _flatten(read_config(run_path)),
        "environment": _environment_rows(environment),
    }
    fixed = escape_json(data)
    room = max_bytes - len(fixed.encode()) - _PAGE_BYTES
    rollouts = sample_rollouts(run_path, max_bytes=max(0, room), groups_per_step=groups_per_step)
    page = _render(
        name=summary.name,
        trainer=summary.trainer,
        status=summary.status,
        error=summary.error,
        tiles=_tiles(summary, rows),
        created=time.strftime("%Y-%m-%d %H:%M"),
        started=time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.started)) if summary.started else "",
        path=str(run_path),
        data=fixed,
        rollouts=escape_json(rollouts),
    )
    target = run_path / REPORT_FILE
    try:
        with atomic_write(target, "wb") as out:
            out.write(page.encode("utf-8", errors="replace"))
    except OSError as error:
        raise BadInputError(f"{target}: cannot write the report: {error.strerror or error}") from error
    return target


def _render(**values: Any) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("areal_core.runs", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(**values)
