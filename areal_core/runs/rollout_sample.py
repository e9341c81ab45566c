"""A bounded, even sample of a run's trajectories for its report."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from areal_core.runs.jsonlines import to_json_value
from areal_core.runs.trajectories import iter_trajectories, read_vocabulary

#: Longer texts and token lists are cut in the page; the files hold all of it.
MAX_CHARS = 12_000
MAX_TOKENS = 1_500
MAX_SAMPLES = 16
#: Steps of one split that are considered; between one and two times as many are held in memory.
MAX_STEPS = 64


def _priority(step: int, split: str, group: str) -> str:
    # A hash: the choice depends on neither the order of the lines nor the rewards, and is the same in every report.
    return hashlib.blake2b(f"{step}/{split}/{group}".encode(), digest_size=8).hexdigest()


def _bit_reversed(index: int, bits: int) -> int:
    return int(f"{index:0{bits}b}"[::-1], 2) if bits else 0


def _cut(text: Any) -> str:
    text = text if isinstance(text, str) else ""
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}\n[... {len(text) - MAX_CHARS} more characters]"


def _sample(line: dict[str, Any]) -> dict[str, Any]:
    """One trajectory as the page needs it; ``t`` token ids after the prompt, ``m`` mask, ``p`` log-probs x 100."""
    sample: dict[str, Any] = {
        "completion": _cut(line.get("completion")),
        "outcome": str(line.get("outcome", "")),
        "reward": line.get("reward"),
        "stop": str(line.get("stop_reason", "")),
        "turns": line.get("n_turns"),
    }
    rewards = line.get("rewards")
    if isinstance(rewards, dict) and rewards:
        sample["rewards"] = rewards
    if line.get("reason"):
        sample["reason"] = str(line["reason"])
    if line.get("error"):
        sample["error"] = _cut(str(line["error"]))
    ids, start = line.get("input_ids"), line.get("prompt_len")
    if isinstance(ids, list) and isinstance(start, int):
        sample["tokens"] = len(ids) - start
        mask = [value for value, count in line.get("loss_mask", []) for _ in range(count)][start:]
        sample["t"] = ids[start : start + MAX_TOKENS]
        sample["m"] = mask[:MAX_TOKENS]
        trained = sum(sample["m"])
        sample["p"] = [None if value is None else round(100 * value) for value in line.get("logprobs", [])[:trained]]
        versions = [value for value, _ in line.get("versions", []) if value >= 0]
        if versions:
            sample["versions"] = [min(versions), max(versions)]
    return sample


class _Groups:
    """The groups of one split, thinned while they are read: memory is bounded however long the run was."""

    def __init__(self, split: str, groups_per_step: int) -> None:
        self.split, self.groups_per_step = split, groups_per_step
        self.steps: dict[int, dict[str, dict[str, Any]]] = {}
        self._order: dict[int, int] = {}
        self._stride = 1

    def add(self, step: int, group: str, line: dict[str, Any]) -> None:
        """Keep the trajectory if its step and group are among the chosen."""
        if step not in self._order:
            self._order[step] = len(self._order)
            self._thin(newest=step)
            self.steps[step] = {}
        groups = self.steps.get(step)
        if groups is None:
            return
        if group not in groups:
            priority = _priority(step, self.split, group)
            if len(groups) >= self.groups_per_step:
                last = max(groups, key=lambda name: groups[name]["priority"])
                if groups[last]["priority"] < priority:
                    return
                del groups[last]
            groups[group] = {"priority": priority, "prompt": "", "samples": []}
        chosen = groups[group]
        if len(chosen["samples"]) < MAX_SAMPLES:
            chosen["prompt"] = chosen["prompt"] or _cut(line.get("prompt"))
            chosen["samples"].append(_sample(line))

    def _thin(self, newest: int) -> None:
        while self._order[newest] // self._stride > MAX_STEPS:
            self._stride *= 2
        self.steps = {step: groups for step, groups in self.steps.items() if self._order[step] % self._stride == 0}


def sample_rollouts(run_path: Path, *, max_bytes: int, groups_per_step: int) -> dict[str, Any]:
    """Groups of samples, evenly over the steps.

    Returns:
        ``groups``: ``{step, split, group, prompt, samples}`` by step; ``vocabulary``: token id -> text, of the ids that
        occur; ``total`` and ``shown``: numbers of trajectories.
    """
    folder = run_path / "trajectories"
    splits: dict[str, _Groups] = {}
    total = 0
    for line in iter_trajectories(folder) if folder.is_dir() else ():
        if line.get("outcome") == "cancelled":
            continue  # What was under way when a run ended: no step trained on it.
        total += 1
        step, split = line.get("step"), str(line.get("split", "train"))
        if not isinstance(step, int):
            continue
        if split not in splits:
            splits[split] = _Groups(split, groups_per_step)
        splits[split].add(step, str(line.get("group_id") or line.get("uid") or f"#{total}"), line)
    chosen = {(step, split): groups for split, found in splits.items() for step, groups in found.steps.items()}
    vocabulary = read_vocabulary(folder) if folder.is_dir() else {}
    return {**_fit(chosen, vocabulary, max_bytes), "total": total}


def _fit(
    chosen: dict[tuple[int, str], dict[str, dict[str, Any]]], vocabulary: dict[int, str], max_bytes: int
) -> dict[str, Any]:
    """As many groups as fit: first one of every step, in an order that halves the gaps between steps each time."""
    steps = sorted({step for step, _ in chosen})
    bits = max(1, (len(steps) - 1).bit_length())
    position = {step: _bit_reversed(index, bits) for index, step in enumerate(steps)}
    # The last step is what a reader looks at first, beside the first one.
    if steps:
        position[steps[-1]] = 0
    candidates = [
        (rank, position[step], step, split, name, groups[name])
        for (step, split), groups in chosen.items()
        for rank, name in enumerate(sorted(groups, key=lambda name: groups[name]["priority"]))
    ]
    candidates.sort(key=lambda candidate: candidate[:5])
    kept: list[dict[str, Any]] = []
    used: set[int] = set()
    size = shown = 0
    for _, _, step, split, name, found in candidates:
        samples = found["samples"]
        group = {"step": step, "split": split, "group": name, "prompt": found["prompt"], "samples": samples}
        ids = {token_id for sample in samples for token_id in sample.get("t", ())} - used
        texts = {token_id: vocabulary[token_id] for token_id in ids if token_id in vocabulary}
        # Six bytes for each of <, > and & after escaping; the estimate must not be below the real size.
        text = json.dumps(to_json_value([group, texts]), ensure_ascii=False, separators=(",", ":"))
        cost = len(text.encode("utf-8", errors="replace")) + 5 * sum(text.count(c) for c in "<>&")
        if size + cost > max_bytes:
            continue
        size += cost
        shown += len(samples)
        used |= ids
        kept.append(group)
    kept.sort(key=lambda group: (group["step"], group["split"], group["group"]))
    return {"groups": kept, "vocabulary": {i: vocabulary[i] for i in sorted(used) if i in vocabulary}, "shown": shown}
