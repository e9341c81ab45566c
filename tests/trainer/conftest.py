"""A tiny model of the arithmetic task, and configurations that train it in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and config.json, no weights."""
    from areal_arithmetic.model import write_model_folder

    folder = tmp_path_factory.mktemp("model") / "base"
    write_model_folder(folder, hidden=32, layers=2, heads=2, overwrite=False)
    return folder


@pytest.fixture(scope="session")
def tiny_model(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with random weights: enough to roll out, score and update."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base_model)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base_model).save_pretrained(folder)
    return folder


@pytest.fixture
def rl_plain(tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    """Two groups of four a step; the reward depends on the completion, so that groups have variance."""
    return {
        "trainer": "rl",
        "seed": 3,
        "total_train_steps": 3,
        "num_threads": 1,
        "run": {"root": str(tmp_path / "runs"), "name": "rl"},
        "actor": {
            "path": str(tiny_model),
            "dtype": "float32",
            "optimizer": {"lr": 1e-3, "warmup_steps": 2, "weight_decay": 0.0},
        },
        "rollout": {"backend": "local"},
        "gconfig": {"n_samples": 4, "max_new_tokens": 8},
        "reward": {"name": "trainer_rewards:digits_reward_fn"},
        "train_dataset": {"name": "arithmetic", "batch_size": 2, "arithmetic": {"size": 16}},
        "valid_dataset": {"name": "arithmetic", "split": "test", "arithmetic": {"size": 6}},
        "evaluation": {"at_end": False},
        "checkpoint": {"keep_best": 0, "save_final": False},
    }


@pytest.fixture
def sft_plain(base_model: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "trainer": "sft",
        "seed": 3,
        "total_train_steps": 4,
        "num_threads": 1,
        "run": {"root": str(tmp_path / "runs"), "name": "sft"},
        "actor": {
            "path": str(base_model),
            "init_from_scratch": True,
            "dtype": "float32",
            "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
        },
        "train_dataset": {"name": "arithmetic", "batch_size": 8, "arithmetic": {"size": 64}},
        "valid_dataset": {"name": "arithmetic", "split": "test", "batch_size": 3, "arithmetic": {"size": 7}},
        "evaluation": {"at_start": True, "at_end": True},
        "checkpoint": {"keep_best": 0},
    }
