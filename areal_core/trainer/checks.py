"""What can be found wrong with a configuration before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.api.configs import BaseTrainerConfig, RLConfig, TrainEngineConfig
from areal_core.api.distill_config import DistillConfig
from areal_core.api.preference_configs import DPOConfig, RWConfig
from areal_core.api.supports import MAX_SUPPORT
from areal_core.errors import ConfigError
from areal_core.trainer.loading import build_algorithm

if TYPE_CHECKING:
    from areal_core.api.algorithm_api import Algorithm
    from areal_core.plugins.manager import PluginManager

#: The options of ``gconfig`` that leave tokens out, and where they do not.
_TRUNCATIONS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def check_config(config: BaseTrainerConfig, world_size: int, manager: PluginManager) -> None:
    """Every check of a configuration across its fields, before a run has a directory.

    Raises:
        ConfigError: naming the key and what would be right.
        PluginError: if a plugin that it names cannot be used.
    """
    check_run(config, world_size)
    if isinstance(config, RLConfig):
        check_rl(config, build_algorithm(config, manager), manager)


def check_run(config: BaseTrainerConfig, world_size: int) -> None:
    """Cross-field checks of any trainer.

    Raises:
        ConfigError: naming the key and what would be right.
    """
    for key, engine in _train_engines(config):
        engine.parsed_backend.parallel.check_world_size(world_size, key=f"{key}.backend")
        if engine.quantization is not None and engine.optimizer is not None:
            raise ConfigError(
                "weights in 8 bits cannot be trained. Set it for a model without `optimizer`, such as ref.",
                key=f"{key}.quantization",
            )
        folder = Path(engine.path)
        looks_local = engine.path.startswith((".", "/", "~")) or len(folder.parts) > 2
        if looks_local and not (folder / "config.json").is_file():
            stage = " If another run is to write it, run that one first." if "weights" in folder.parts else ""
            raise ConfigError(
                f"no model at {engine.path!r} (a folder with config.json and safetensors, or a hub id).{stage}",
                key=f"{key}.path",
            )
    actor = getattr(config, "actor", None)
    if isinstance(actor, TrainEngineConfig) and actor.optimizer is None:
        raise ConfigError("is missing; write e.g. `optimizer: {lr: 1e-6}`.", key="actor.optimizer")
    evaluation = config.evaluation
    if (evaluation.freq_steps or evaluation.at_start) and getattr(config, "valid_dataset", None) is None:
        raise ConfigError("is missing, but `evaluation` asks for a held-out split.", key="valid_dataset")
    if isinstance(config, DPOConfig):
        _check_dpo(config)
    if isinstance(config, DistillConfig):
        _check_distill(config)
    if isinstance(config, RWConfig):
        lora = config.actor.lora
        if lora is not None and "score" not in lora.modules_to_save:
            raise ConfigError(
                "must name `score`: the scalar head starts random, and is trained in full beside the adapters.",
                key="actor.lora.modules_to_save",
            )


def _check_dpo(config: DPOConfig) -> None:
    if config.ref is None and config.actor.lora is None:
        raise ConfigError(
            "is missing: give the model to stay near to, e.g. `ref: {path: " + config.actor.path + "}`, or train "
            "adapters (`actor.lora`), without which the actor is its own reference.",
            key="ref",
        )
    if config.ref is not None and config.ref.optimizer is not None:
        raise ConfigError("a reference is not trained; leave its optimizer out.", key="ref.optimizer")
    if config.actor.init_from_scratch or (config.ref is not None and config.ref.init_from_scratch):
        raise ConfigError(
            "dpo goes on from a trained model; train one first with `trainer: sft`.",
            key="actor.init_from_scratch" if config.actor.init_from_scratch else "ref.init_from_scratch",
        )
    if config.loss == "ipo" and config.label_smoothing:
        raise ConfigError("belongs to `loss: sigmoid`; with ipo use 0.", key="label_smoothing")


def _check_distill(config: DistillConfig) -> None:
    if config.teacher.optimizer is not None:
        raise ConfigError("a teacher is not trained; leave its optimizer out.", key="teacher.optimizer")
    for key, model in (("actor", config.actor), ("teacher", config.teacher)):
        if model.init_from_scratch:
            raise ConfigError(
                "distill needs models that already write text; train them first with `trainer: sft`.",
                key=f"{key}.init_from_scratch",
            )
    meshes = [model.parsed_backend.parallel for model in (config.actor, config.teacher)]
    if meshes[0] != meshes[1]:
        raise ConfigError(
            f"is on the mesh {meshes[1]}, but the actor on {meshes[0]}. Logits of the same tokens are compared, so use "
            "the actor's mesh.",
            key="teacher.backend",
        )
    if config.gconfig.is_greedy:
        raise ConfigError(
            "training needs samples, but decoding is greedy. Set gconfig.temperature > 0.", key="gconfig.temperature"
        )


def check_rl(config: RLConfig, algorithm: Algorithm, manager: PluginManager) -> None:
    """Cross-field checks of `trainer: rl`. Imports the engines where sampling truncates."""
    gconfig = config.gconfig
    if config.actor.init_from_scratch:
        raise ConfigError(
            "rl starts from a model that already writes text; train one first with `trainer: sft`.",
            key="actor.init_from_scratch",
        )
    if gconfig.is_greedy:
        raise ConfigError(
            "training needs samples, but decoding is greedy. Set gconfig.temperature > 0.", key="gconfig.temperature"
        )
    _check_truncation(config, manager)
    if gconfig.frequency_penalty != 0:
        raise ConfigError(
            "the trainer cannot reproduce a penalised distribution. Use 0 (eval_gconfig may penalise).",
            key="gconfig.frequency_penalty",
        )
    for key, section in (("gconfig", gconfig), ("eval_gconfig", config.eval_gconfig)):
        if section is not None and section.seed is not None and (section is gconfig or section.n_samples > 1):
            raise ConfigError(
                "is the seed of every request, so all samples of a prompt would be the same. Leave it out: requests "
                "get seeds of their own, derived from `seed`, and the run repeats all the same.",
                key=f"{key}.seed",
            )
    batch = config.train_dataset.batch_size * gconfig.n_samples
    for key, minibatches in (
        ("actor.ppo_n_minibatches", config.actor.ppo_n_minibatches),
        ("critic.ppo_n_minibatches", config.critic.ppo_n_minibatches if config.critic else 1),
    ):
        if batch % minibatches:
            raise ConfigError(
                f"{minibatches} does not divide the {batch} samples of a step "
                f"(train_dataset.batch_size {config.train_dataset.batch_size} x gconfig.n_samples "
                f"{gconfig.n_samples}).",
                key=key,
            )
    # Without its adapters the actor is its own reference.
    has_ref = config.ref is not None or config.actor.lora is not None
    algorithm.check(group_size=gconfig.n_samples, has_ref=has_ref, has_critic=config.critic is not None)


def _check_truncation(config: RLConfig, manager: PluginManager) -> None:
    """Where training truncates, both sides must take the log-prob over what was kept, and that must be bounded."""
    gconfig = config.gconfig
    used = [name for name, off in _TRUNCATIONS.items() if getattr(gconfig, name) != off]
    if not used:
        return
    key, value, off = f"gconfig.{used[0]}", getattr(gconfig, used[0]), _TRUNCATIONS[used[0]]
    name = config.rollout.parsed_backend.name
    engine = manager.load("areal_inference_engines", name, key="rollout.backend")
    if not getattr(engine, "returns_supports", False):
        raise ConfigError(
            f"is {value}, but the engine {name!r} returns raw log-probs and does not say which tokens truncation kept, "
            f"so that the ratio would be biased. Use {off}, or an engine that does, such as `rollout.backend: local` "
            f"with gconfig.top_k up to {MAX_SUPPORT} (eval_gconfig may truncate).",
            key=key,
        )
    models = {"actor": config.actor} if config.ref is None else {"actor": config.actor, "ref": config.ref}
    for model, section in models.items():
        name = section.parsed_backend.name
        if not getattr(manager.load("areal_train_engines", name, key=f"{model}.backend"), "takes_supports", False):
            raise ConfigError(
                f"is {value}, but the train engine {name!r} cannot take log-probs over the tokens that truncation "
                f"kept, and the ratio would be biased. Use {off}, or `{model}.backend: fsdp` (eval_gconfig may "
                "truncate).",
                key=key,
            )
    if gconfig.top_k == 0:
        raise ConfigError(
            f"is {value}, without gconfig.top_k: the trainer takes log-probs over the tokens that were kept, whose "
            f"number needs a bound. Set gconfig.top_k too, to at most {MAX_SUPPORT}, or use {off} (eval_gconfig may "
            "truncate).",
            key=key,
        )
    if gconfig.top_k > MAX_SUPPORT:
        raise ConfigError(
            f"is {gconfig.top_k}, but training keeps at most {MAX_SUPPORT} tokens. Use 1 to {MAX_SUPPORT}, or 0 for no "
            "bound (eval_gconfig may truncate).",
            key="gconfig.top_k",
        )


def _train_engines(config: BaseTrainerConfig) -> Iterator[tuple[str, TrainEngineConfig]]:
    for key in ("actor", "ref", "critic", "teacher"):
        engine = getattr(config, key, None)
        if isinstance(engine, TrainEngineConfig):
            yield key, engine
