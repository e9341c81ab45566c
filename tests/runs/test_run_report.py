from __future__ import annotations

import html
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import BadInputError
from areal_core.runs.charts import MAX_POINTS, arrange_charts
from areal_core.runs.report import build_report, escape_json
from areal_core.runs.rollout_sample import MAX_STEPS, sample_rollouts
from areal_core.runs.run_dir import RunDirectory

Open = Callable[..., RunDirectory]

HOSTILE = [
    "</script><script>document.documentElement.dataset.pwned = 1</script>",
    '<img src=x onerror="document.documentElement.dataset.pwned = 1">',
    "<!--<script>",
    "'\"`]}>;{{ 7 * 7 }} \u2028 \u0000",
]
CHROMIUM = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def write_run(run: RunDirectory, trajectory: Callable[..., Any], tokenizer: Any, steps: int = 6) -> Path:
    run.trajectories.tokenizer = tokenizer
    for step in range(1, steps + 1):
        for group in range(3):
            for sample in range(4):
                text = HOSTILE[group] if sample == 0 else f"answer {step}-{group}-{sample}"
                run.trajectories.write(
                    step, trajectory(f"Q{group} of step {step}", text, group_id=f"g{group}", reward=float(sample % 2))
                )
        metrics = {"rollout/reward": step / 10, "train/loss": -step, "train/entropy": 1 / step, "odd/metric": step}
        metrics |= {"train/tokens": 100.0, "time/step_s": 0.5}
        if step % 3 == 0:
            run.trajectories.write(step, trajectory("held out", "x", group_id="e"), split="eval")
            metrics["eval/reward"] = step / 9
        run.log_metrics(step, metrics)
    run.set_status("finished")
    run.close()
    return build_report(run.path)


@pytest.fixture
def report(open_run: Open, trajectory: Callable[..., Any], tokenizer: Any) -> Path:
    return write_run(open_run(), trajectory, tokenizer)


def embedded(page: Path) -> tuple[Any, Any]:
    found = re.findall(r'<script type="application/json" id="[\w-]+">(.*?)</script>', page.read_text("utf-8"), re.S)
    return json.loads(found[0]), json.loads(found[1])


# ------------------------------------------------------------------------------------------------- without a browser


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_report_when_written_then_it_refers_to_nothing_outside_itself(report: Path) -> None:
    text = report.read_text("utf-8")
    parser = Tags()
    parser.feed(text)

    for tag, attributes in parser.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "@import" not in text and "url(http" not in text
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}


def test_report_when_completions_are_hostile_then_the_page_has_only_its_own_scripts(report: Path) -> None:
    parser = Tags()
    parser.feed(report.read_text("utf-8"))

    assert [attributes.get("id") for tag, attributes in parser.tags if tag == "script"] == [
        None,
        "data",
        "rollout-data",
        None,
    ]
    _, rollouts = embedded(report)
    assert {s["completion"] for g in rollouts["groups"] for s in g["samples"]} >= set(HOSTILE[:3])


@pytest.mark.parametrize("text", [*HOSTILE, "&lt;", "\u2029", "plain"])
def test_escape_json_when_parsed_then_the_text_is_unchanged(text: str) -> None:
    escaped = escape_json({"k": text})

    assert json.loads(escaped) == {"k": text}
    assert not set("<>&\u2028\u2029") & set(escaped)


def test_escape_json_when_half_a_character_then_it_can_be_written() -> None:
    assert json.loads(escape_json("\ud83d").encode())


def test_report_when_the_name_and_error_are_hostile_then_they_are_escaped(
    open_run: Open, trajectory: Callable[..., Any], tmp_path: Path
) -> None:
    run = open_run(path=tmp_path / "<b>name")
    run.set_status("failed", "<script>alert(1)</script>")
    run.close()

    text = build_report(run.path).read_text()

    assert "<script>alert" not in text and "<b>name" not in text
    assert html.escape("<script>alert(1)</script>") in text


def test_report_when_there_is_too_much_then_it_keeps_its_size_and_the_first_and_last_step(
    open_run: Open, trajectory: Callable[..., Any], tokenizer: Any
) -> None:
    run = open_run()
    run.trajectories.tokenizer = tokenizer
    for step in range(1, 41):
        for group in range(4):
            run.trajectories.write(step, trajectory("Q" * 200, "<&é" * 1000, group_id=f"{group}"))
        run.log_metrics(step, {"rollout/reward": 0.5})
    run.close()

    page = build_report(run.path, max_bytes=300_000)

    _, rollouts = embedded(page)
    steps = [group["step"] for group in rollouts["groups"]]
    assert page.stat().st_size <= 300_000
    assert steps[0] == 1 and steps[-1] == 40 and len(set(steps)) > 2
    assert (rollouts["total"], rollouts["shown"]) == (160, len(steps))


def test_report_when_a_text_is_very_long_then_it_is_cut(open_run: Open, trajectory: Callable[..., Any]) -> None:
    run = open_run()
    run.trajectories.write(1, trajectory("Q", "x"), prompt="q", completion="y" * 100_000)
    run.log_metrics(1, {})
    run.close()

    _, rollouts = embedded(build_report(run.path))

    text = rollouts["groups"][0]["samples"][0]["completion"]
    assert text.startswith("y" * 12_000 + "\n[... 88000 more")


def test_sample_when_there_are_many_steps_then_they_are_thinned_evenly(
    open_run: Open, trajectory: Callable[..., Any]
) -> None:
    run = open_run()
    for step in range(1, 501):
        run.trajectories.write(step, trajectory(group_id="a"))
    run.close()

    sample = sample_rollouts(run.path, max_bytes=10**7, groups_per_step=2)

    steps = [group["step"] for group in sample["groups"]]
    assert MAX_STEPS // 2 < len(steps) <= MAX_STEPS + 2
    assert steps[0] == 1 and steps[-1] == 500
    assert len({b - a for a, b in itertools.pairwise(steps[:-1])}) == 1


def test_sample_when_a_step_has_many_groups_then_all_samples_of_the_chosen_stay_together(
    open_run: Open, trajectory: Callable[..., Any]
) -> None:
    run = open_run()
    for sample in range(3):
        for group in range(10):
            run.trajectories.write(1, trajectory(group_id=f"{group}", reward=float(sample)))
    run.close()

    sample = sample_rollouts(run.path, max_bytes=10**7, groups_per_step=4)

    assert len(sample["groups"]) == 4
    assert all(sorted(s["reward"] for s in g["samples"]) == [0.0, 1.0, 2.0] for g in sample["groups"])


def test_charts_when_a_run_is_long_then_points_are_means_of_equal_stretches() -> None:
    n = 4 * MAX_POINTS
    rows = [{"step": step, "train/loss": float(step), "x": None} for step in range(1, n + 1)]

    charts = arrange_charts(rows)

    (chart,) = charts["charts"]
    (name, axis, values) = chart["series"][0]
    assert (chart["title"], name) == ("Loss", "train/loss")
    assert len(values) == MAX_POINTS
    assert charts["axes"][axis][:2] == [4, 8] and values[:2] == [2.5, 6.5]


def test_charts_when_rewards_are_named_then_each_has_a_curve_and_errors_show() -> None:
    rows = [
        {
            "step": step,
            "rollout/reward": 0.5,
            "rollout/reward_std": 0.1,
            "rollout/reward/format": 1.0,
            "rollout/reward_std/format": 0.2,
            "eval/reward/format": 0.9,
            "eval/reward/calls": 8.0,
            "reward/format/errors/nan": 2.0,
            "reward/format/calls": 8.0,
            "eval/reward/errors/none": 1.0,
        }
        for step in (1, 2)
    ]

    charts = {chart["title"]: [name for name, *_ in chart["series"]] for chart in arrange_charts(rows)["charts"]}

    assert charts["Reward"] == ["rollout/reward"]
    assert charts["Named rewards"] == ["rollout/reward/format", "eval/reward/format"]
    assert charts["Reward spread"] == ["rollout/reward_std", "rollout/reward_std/format"]
    assert charts["Reward errors"] == ["reward/format/errors/nan", "eval/reward/errors/none"]


def test_sample_when_an_episode_gave_nothing_then_it_stands_with_its_group_and_says_why(
    open_run: Open, trajectory: Callable[..., Any]
) -> None:
    run = open_run()
    run.trajectories.write(1, trajectory(group_id="0-3", rewards={"a": 0.5}), prompt="2+2=", uid="0-3")
    run.trajectories.write(
        1, None, outcome="rejected", uid="0-3", reason="reward_nan", error="RewardError: reward 'a' returned NaN"
    )
    run.close()

    (group,) = sample_rollouts(run.path, max_bytes=100_000, groups_per_step=4)["groups"]

    assert (group["group"], group["prompt"]) == ("0-3", "2+2=")
    accepted, rejected = group["samples"]
    assert accepted["rewards"] == {"a": 0.5}
    assert (rejected["outcome"], rejected["reason"], rejected["reward"]) == ("rejected", "reward_nan", None)
    assert rejected["error"] == "RewardError: reward 'a' returned NaN"


def test_charts_when_a_metric_is_unknown_then_it_still_has_a_chart(report: Path) -> None:
    data, _ = embedded(report)

    titles = {chart["title"]: chart["main"] for chart in data["charts"]["charts"]}
    assert titles["Reward"] and titles["Throughput"] and titles["odd/metric"] is False
    throughput = next(chart for chart in data["charts"]["charts"] if chart["title"] == "Throughput")
    assert set(throughput["series"][0][2]) == {200.0}


def test_report_when_not_a_run_then_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="not a run directory"):
        build_report(tmp_path)


def test_report_when_nothing_is_recorded_yet_then_it_is_written(open_run: Open) -> None:
    page = build_report(open_run().path)

    data, rollouts = embedded(page)
    assert data["charts"]["charts"] == [] and rollouts["groups"] == []


# ----------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture
def dump_dom(tmp_path: Path) -> Callable[..., str]:
    """The page's DOM after its scripts ran, and ``script`` (a user's clicks) after them."""

    def dump(page: Path, script: str = "", *, edit: Callable[[str], str] = lambda text: text) -> str:
        text = edit(page.read_text("utf-8")).replace("</body>", f"<script>{script}</script></body>")
        copy = tmp_path / "page.html"
        copy.write_text(text, "utf-8")
        assert CHROMIUM is not None
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--window-size=1300,1200",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=2000",
            "--dump-dom",
        ]
        # A session of its own, so that a browser that hangs in a script takes its helper processes along.
        browser = subprocess.Popen(
            [CHROMIUM, *flags, copy.as_uri()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            dom, messages = browser.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.communicate()
            raise
        assert browser.returncode == 0, messages[-2000:]
        return dom

    return dump


def root_of(dom: str) -> str:
    match = re.search(r"<html[^>]*>", dom)
    assert match is not None
    return match[0]


def body_without_scripts(dom: str) -> str:
    return re.sub(r"<script.*?</script>", "", dom, flags=re.S)


@needs_chromium
def test_page_when_opened_then_curves_and_rollouts_are_drawn_and_nothing_runs_that_should_not(
    report: Path, dump_dom: Callable[..., str]
) -> None:
    dom = dump_dom(report)

    assert 'data-ready="true"' in root_of(dom) and "data-error" not in root_of(dom)
    assert "data-pwned" not in root_of(dom)
    body = body_without_scripts(dom)
    for series in ("rollout/reward", "eval/reward", "train/loss", "train/entropy", "trained tokens per second"):
        path = re.search(rf'<path class="curve" d="([^"]*)"[^>]*data-series="{series}"', body)
        assert path is not None, series
        assert path[1].startswith("M") and "NaN" not in path[1]
        assert path[1].count("L") == (1 if series == "eval/reward" else 5)
    assert body.count('class="group"') == 20
    # The newest prompt is open: the held-out one of step 6.
    assert body.count('class="sample"') == 1 and ">held out<" in body
    assert "20 of 20 prompts, all 74 trajectories" in body
    assert "actor" in body and "optimizer.lr" in body and "python" in body


@needs_chromium
def test_page_when_the_user_filters_and_shades_then_it_shows_that(report: Path, dump_dom: Callable[..., str]) -> None:
    dom = dump_dom(
        report,
        """
        const set = (id, value) => {
          const control = document.getElementById(id);
          control.value = value;
          control.dispatchEvent(new Event("input"));
        };
        set("f-step", "4"); set("f-split", "train"); set("f-text", "onerror");
        document.getElementById("shade").click();
        set("smoothing", "0.8");
        document.getElementById("more-metrics").open = true;
        const svg = document.querySelector(".chart svg"), box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 10, clientY: box.top + 20 }));
        set("config-filter", "optimizer");
        """,
    )

    body = body_without_scripts(dom)
    assert "data-error" not in root_of(dom) and "data-pwned" not in root_of(dom)
    assert body.count('class="group"') == 1 and "1 of 20 prompts" in body
    assert "Q1 of step 4" in body and "step 4 · train" in body
    assert body.count('class="tok"') == len(HOSTILE[1]) + 3 * len("answer 4-1-1")
    assert 'title="log-prob -0.25, p = 0.779"' in body
    assert body.count('class="raw"') > 0
    assert re.search(r'data-chart="odd/metric".*?class="curve"', body, re.S)
    tooltip = body[body.index('id="tooltip"') :]
    assert "step 6" in tooltip and "0.6" in tooltip and "0.667" in tooltip
    assert "optimizer.lr" in body and "n_samples" not in body


@needs_chromium
def test_page_when_its_script_fails_then_the_page_says_so(report: Path, dump_dom: Callable[..., str]) -> None:
    dom = dump_dom(report, edit=lambda text: text.replace('"axes":', '"axles":'))

    assert "data-error" in root_of(dom) and "data-ready" not in root_of(dom)
    assert "This page could not be drawn" in body_without_scripts(dom)


@needs_chromium
def test_page_when_the_run_is_empty_then_it_says_that(open_run: Open, dump_dom: Callable[..., str]) -> None:
    dom = dump_dom(build_report(open_run().path))

    assert "data-error" not in root_of(dom) and 'data-ready="true"' in root_of(dom)
    body = body_without_scripts(dom)
    assert "No metrics yet." in body and "No trajectories recorded." in body


def test_report_when_episodes_were_under_way_at_the_end_leaves_them_out(
    open_run: Open, trajectory: Callable[..., Any]
) -> None:
    run = open_run()
    run.trajectories.write(1, trajectory("Q", "used"))
    run.trajectories.write(2, trajectory("Q", "unused"), outcome="cancelled")
    run.trajectories.write(1, None, outcome="failed", uid="0-1")
    run.close()

    sample = sample_rollouts(run.path, max_bytes=10**7, groups_per_step=4)

    assert sample["total"] == sample["shown"] == 2
    assert [group["step"] for group in sample["groups"]] == [1, 1]
