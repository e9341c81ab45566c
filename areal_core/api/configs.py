"""The configuration of a run. One class per section of the YAML; ``areal config schema`` prints them all.

Fields stand in this order: required, common, rare, internal.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs

from areal_core.api.alloc import Backend, parse_backend
from areal_core.api.io_struct import GenerationHyperparameters
from areal_core.config.fields import PluginSlot, option
from areal_core.errors import ConfigError

DType = Literal["float32", "bfloat16", "float16"]


def _plugin_options() -> Any:
    return option(factory=dict, help="Validated options of the plugins named in this section.", internal=True)


# ------------------------------------------------------------------------------------------------- train engines


@attrs.define(kw_only=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    type: Literal["adamw", "sgd", "muon"] = option("adamw", "Optimizer.")
    lr: float = option(1e-5, "Peak learning rate.", ge=0)
    weight_decay: float = option(0.01, "Decoupled weight decay; not applied to biases and norms.", ge=0)
    beta1: float = option(0.9, "Decay of the first moment.", ge=0, lt=1)
    beta2: float = option(0.95, "Decay of the second moment.", ge=0, lt=1)
    eps: float = option(1e-8, "Added to the denominator.", gt=0)
    momentum: float | None = option(None, "Of sgd (null: 0) and muon (null: 0.95).", ge=0, lt=1)
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = option(
        "constant", "Shape after the warm-up; wsd is warm-up, stable, decay."
    )
    warmup_steps: int = option(0, "Steps of linear warm-up; step 1 runs at lr / warmup_steps.", ge=0)
    warmup_steps_proportion: float = option(0.0, "Warm-up as a share of all steps, if warmup_steps is 0.", ge=0, le=1)
    decay_steps_proportion: float = option(0.1, "wsd: the last share of all steps, in which lr falls.", ge=0, le=1)
    min_lr_ratio: float = option(0.0, "Floor of the schedule as a share of lr.", ge=0, le=1)
    gradient_clipping: float = option(1.0, "Largest gradient norm; 0 does not clip.", ge=0)
    max_skipped: int | None = option(
        10, "Steps in a row skipped for a gradient that is not finite that stop the run; null: none do.", ge=1
    )
    state_dtype: Literal["float32", "bfloat16"] | None = option(
        None, "Type of adamw's two moments; null: that of the parameters."
    )
    rounding: Literal["none", "kahan", "stochastic"] = option(
        "none", "How adamw stores bfloat16: to nearest, with a compensation of what was lost, or up or down by chance."
    )


@attrs.define(kw_only=True)
class LoRAConfig:
    """Low-rank adapters, by peft."""

    rank: int = option(8, "Rank.", ge=1)
    alpha: float = option(16.0, "Scale: the update counts alpha / rank.", gt=0)
    dropout: float = option(0.0, "Dropout on the adapter's input.", ge=0, lt=1)
    target_modules: list[str] = option(factory=lambda: ["all-linear"], help="Module names, or ['all-linear'].")
    modules_to_save: list[str] = option(factory=list, help="Modules trained in full beside the adapters.")


@attrs.define(kw_only=True)
class MicroBatchConfig:
    """How a shard of a batch is split so that it fits into memory."""

    max_tokens_per_mb: int | None = option(
        None, "Most tokens in one micro-batch (a longer sequence stands alone); None: the whole shard at once.", ge=1
    )
    attention_cost: float = option(
        0.0,
        "Weight of the square of a length, beside the length itself, when sequences are spread over ranks. 0: tokens; "
        "1 / (12 * hidden size) counts the work of attention, which pays for long sequences.",
        ge=0,
    )


@attrs.define(kw_only=True)
class WeightUpdateConfig:
    """How new weights reach the inference engine."""

    type: Literal["auto", "memory", "disk", "distributed", "lora"] = option(
        "auto", "auto: memory for an engine in this process, else disk."
    )
    weight_chunk_mb: int = option(256, "Size of one broadcast bucket in MiB.", ge=1)


@attrs.define(kw_only=True)
class TrainEngineConfig:
    """One trained (or frozen) model."""

    PLUGIN_SLOT: ClassVar[PluginSlot] = PluginSlot("areal_train_engines", "backend")

    path: str = option(help="Hugging Face folder (or hub id) of the model.")
    backend: str = option("fsdp:d1", "Train engine and mesh, e.g. fsdp:d4t2.")
    init_from_scratch: bool = option(False, "Initialise randomly from the folder's config.json.")
    dtype: DType = option("bfloat16", "Type of computation.")
    optimizer: OptimizerConfig | None = option(None, "Leave out for a model that is not trained.")
    mb_spec: MicroBatchConfig = option(factory=MicroBatchConfig, help="Micro-batches.")
    lora: LoRAConfig | None = option(None, "Train low-rank adapters instead of all weights.")
    gradient_checkpointing: Literal["none", "full", "selective"] | bool = option(
        "none", "Recompute activations in the backward pass: of every layer (full, or true), or as the engine selects."
    )
    weight_update: WeightUpdateConfig = option(factory=WeightUpdateConfig, help="Way to the inference engine.")
    param_dtype: DType = option("float32", "Type of the stored parameters.")
    quantization: Literal["int8_weight_only", "float8_weight_only"] | None = option(
        None, "Store the weights of a model that is not trained (ref) in 8 bits."
    )
    offload: bool = option(
        False, "Keep the model and its optimizer in host memory while other models, or the sampler, are at work."
    )
    attn_impl: str = option("auto", "auto: varlen attention of the engine; else a transformers implementation name.")
    trust_remote_code: bool = option(False, "Run code that comes with the model folder.")
    temperature: float = option(1.0, "Set from gconfig.temperature.", gt=0, internal=True)
    plugin_options: dict[str, Any] = _plugin_options()

    @property
    def parsed_backend(self) -> Backend:
        return parse_backend(self.backend)

    @property
    def recomputation(self) -> Literal["none", "full", "selective"]:
        """``gradient_checkpointing`` with true and false written out."""
        value = self.gradient_checkpointing
        if isinstance(value, bool):
            return "full" if value else "none"
        return value

    @property
    def options(self) -> Any:
        """The selected plugin's own options: an instance of its config class, or None."""
        return self.plugin_options.get(self.parsed_backend.name)


@attrs.define(kw_only=True)
class NormConfig:
    """Normalisation of rewards or advantages.

    ``group`` is the samples of one prompt, ``batch`` all of a step.
    """

    mean_level: Literal["batch", "group"] | None = option("batch", "What the mean is taken over; null: not subtracted.")
    mean_leave1out: bool = option(False, "Leave the sample itself out of its mean (RLOO).")
    std_level: Literal["batch", "group"] | None = option(
        "batch", "What the deviation is taken over; null: no division."
    )
    std_unbiased: bool = option(True, "Divide by n - 1 in the variance.")
    eps: float = option(1e-5, "Added to the deviation.", ge=0)


@attrs.define(kw_only=True)
class ImportanceConfig:
    """Importance weight of the trainer's policy over the sampler's, within bounds.

    It corrects for samples of older weights and for a sampler whose numbers differ from the trainer's.
    """

    level: Literal["token", "sequence"] = option("token", "What one ratio belongs to.")
    mode: Literal["clamp", "mask"] = option(
        "clamp", "Beyond a bound: take the bound (truncated importance sampling), or drop token or sequence (masked)."
    )
    lower: float | None = option(None, "Least weight; null: no bound.", ge=0)
    upper: float | None = option(2.0, "Largest weight; null: no bound.", gt=0)
    sequence_ratio: Literal["geometric", "product"] = option(
        "geometric", "Ratio of a sequence: geometric mean of its tokens' ratios, or their product (level: sequence)."
    )


@attrs.define(kw_only=True)
class PPOActorConfig(TrainEngineConfig):
    """The policy, and the options of the PPO / GRPO family."""

    eps_clip: float = option(0.2, "Clip range of the ratio, below 1 (and above, unless eps_clip_higher).", gt=0, lt=1)
    eps_clip_higher: float | None = option(None, "Clip range above 1 (DAPO's clip-higher).", gt=0)
    c_clip: float | None = option(None, "Dual clip: lower bound factor for negative advantages.", gt=1)
    kl_ctl: float = option(0.0, "Weight of the KL to the reference model; needs `ref` or LoRA.", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = option("k3", "Estimator of that KL.")
    kl_in_reward: bool = option(False, "Subtract the KL (k1) from the token rewards instead of adding it to the loss.")
    reward_norm: NormConfig | None = option(
        factory=lambda: NormConfig(mean_level="group", std_level="group"), help="Normalisation of the rewards."
    )
    adv_norm: NormConfig | None = option(None, "Normalisation of the advantages over trained tokens.")
    discount: float = option(1.0, "Gamma.", ge=0, le=1)
    gae_lambda: float = option(1.0, "Lambda of GAE; below 1 needs a critic.", ge=0, le=1)
    loss_agg: Literal["token_mean", "seq_mean", "seq_sum_const"] = option(
        "token_mean", "token_mean: over all tokens; seq_mean: mean of each sequence's mean; seq_sum_const: Dr.GRPO."
    )
    loss_agg_const: float | None = option(
        None, "Divisor of loss_agg seq_sum_const, e.g. ${gconfig.max_new_tokens}.", gt=0
    )
    ppo_n_minibatches: int = option(1, "Optimizer steps per batch.", ge=1)
    use_decoupled_loss: bool = option(False, "Decoupled PPO: clip around recomputed proximal log-probs (AReaL, eq. 5).")
    behave_imp_weight_cap: float | None = option(
        None,
        "Drop tokens whose proximal / behaviour ratio exceeds this (decoupled loss); the same as "
        "`importance: {mode: mask, upper: CAP}`.",
        gt=0,
    )
    importance: ImportanceConfig | None = option(
        None, "Bounds on the proximal / behaviour ratio; turns the decoupled loss on."
    )
    prox_logp: Literal["recompute", "rollout", "loglinear"] = option(
        "recompute",
        "Proximal log-probs of the decoupled loss: by a forward pass, the sampler's own, or between the sampler's and "
        "the current ones by version.",
    )
    entropy_coef: float = option(0.0, "Weight of an entropy bonus.", ge=0)
    report_entropy: bool = option(True, "Report the entropy of the policy, with a little more work per token.")
    reward_scaling: float = option(1.0, "Rewards are (r + bias) * scaling, then clipped.")
    reward_bias: float = option(0.0, "See reward_scaling.")
    reward_clip: float = option(20.0, "Bound on the scaled reward.", gt=0)
    skip_zero_advantage: bool = option(
        True,
        "Leave sequences whose advantages are all 0 out of the forward pass when they add nothing to the loss. "
        "A step in which all are 0 is skipped: no momentum, no weight decay.",
    )

    @property
    def is_decoupled(self) -> bool:
        """Whether the ratio is taken to the proximal policy, and corrected for the sampler by a weight."""
        return self.use_decoupled_loss or self.importance is not None

    @property
    def recomputes_prox_logprobs(self) -> bool:
        """Whether the decoupled loss reads log-probs of a forward pass before the first update."""
        return self.is_decoupled and self.prox_logp == "recompute"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL to the reference is a term of the loss, not of the rewards."""
        return self.kl_ctl > 0 and not self.kl_in_reward


@attrs.define(kw_only=True)
class PPOCriticConfig(TrainEngineConfig):
    """The value model of PPO."""

    value_eps_clip: float = option(0.2, "Clip range of the value against its old value.", gt=0)
    value_loss_coef: float = option(0.5, "Weight of the value loss.", gt=0)
    ppo_n_minibatches: int = option(1, "Optimizer steps per batch.", ge=1)


# ------------------------------------------------------------------------------------------------------- rollout


@attrs.define(kw_only=True)
class InferenceEngineConfig:
    """The inference engine and the rollout controller."""

    PLUGIN_SLOT: ClassVar[PluginSlot] = PluginSlot("areal_inference_engines", "backend")

    backend: str = option("local", "Inference engine and mesh, e.g. vllm:d4t2.")
    max_head_offpolicyness: int = option(
        0,
        "Staleness bound: most versions between a trajectory's start and the step that trains on it. 0: synchronous.",
        ge=0,
    )
    max_concurrent_rollouts: int | None = option(
        None, "Most episodes that run at once, those of an evaluation apart; None: no bound of its own.", ge=1
    )
    dtype: DType | None = option(None, "Type of computation; None: the actor's.")
    addresses: list[str] = option(factory=list, help="host:port of servers that somebody else runs.")
    episode_timeout: float = option(3600.0, "Seconds until a hung episode is cancelled.", gt=0)
    max_retries: int = option(2, "How often a failing episode is tried again.", ge=0)
    max_failure_rate: float = option(
        0.5, "Share of failed episodes of the last 100 (or a batch) that stops the run.", gt=0, le=1
    )
    request_timeout: float = option(3600.0, "Seconds until a request to the engine fails.", gt=0)
    setup_timeout: float = option(300.0, "Seconds until a server must be ready.", gt=0)
    weight_update_keep_kv: bool = option(
        False, "Keep the KV cache of running requests over a weight update instead of recomputing it."
    )
    trust_remote_code: bool = option(False, "Run code that comes with the model folder.")
    log_dir: Path | None = option(None, "Folder for logs of servers: the run's logs/.", internal=True)
    plugin_options: dict[str, Any] = _plugin_options()

    @property
    def parsed_backend(self) -> Backend:
        return parse_backend(self.backend, key="rollout.backend")

    @property
    def options(self) -> Any:
        """The selected plugin's own options: an instance of its config class, or None."""
        return self.plugin_options.get(self.parsed_backend.name)


@attrs.define(kw_only=True)
class AgentConfig:
    """How an agent (a workflow with `async def run(self, data, **kwargs)`) is played and trained on."""

    turn_discount: float = option(
        1.0, "A completion's return is its reward + this * the next one's return.", ge=0, le=1
    )
    export: Literal["concat", "individual"] = option(
        "concat", "concat: one trajectory per chat, every turn trained in it; individual: one per completion."
    )
    max_completions: int | None = option(
        128, "Most completions in one episode; an agent that goes on is rejected. null: no bound.", ge=1
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "none"] = option(
        "auto", "How the model writes tool calls. auto: by the chat template; none: they stay text."
    )
    sampling_conflicts: Literal["refuse", "ignore"] = option(
        "refuse",
        "A request of training that sets another temperature, top_p, ...: refuse it, or sample as gconfig says.",
    )


@attrs.define(kw_only=True)
class WorkflowConfig:
    """What one episode is."""

    PLUGIN_SLOT: ClassVar[PluginSlot] = PluginSlot("areal_workflows", "name")

    name: str = option("rlvr", "Workflow or agent; a registered name, or package.module:Class.")
    agent: AgentConfig = option(factory=AgentConfig, help="For agents only.")
    plugin_options: dict[str, Any] = _plugin_options()


def _is_finite(instance: Any, attribute: attrs.Attribute[Any], value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"must be a finite number, got {value!r}")


@attrs.define(kw_only=True)
class RewardConfig:
    """How a completion is scored."""

    PLUGIN_SLOT: ClassVar[PluginSlot] = PluginSlot("areal_rewards", "name")

    name: str = option(help="Reward; a registered name, or package.module:function.")
    weight: float = option(1.0, "What a value of it counts; may be negative.", validator=_is_finite)
    timeout: float = option(15.0, "Seconds for one call.", gt=0)
    max_workers: int = option(1, "Processes that compute rewards.", ge=1)
    on_error: Literal["reject", "zero", "raise"] = option(
        "reject", "A reward that raises, hangs or returns no finite number: reject the episode, count it as 0, or stop."
    )
    plugin_options: dict[str, Any] = _plugin_options()


@attrs.define(kw_only=True)
class AlgorithmConfig:
    """Which algorithm makes the loss."""

    PLUGIN_SLOT: ClassVar[PluginSlot] = PluginSlot("areal_algorithms", "name")

    name: str = option("grpo", "Algorithm.")
    plugin_options: dict[str, Any] = _plugin_options()


@attrs.define(kw_only=True)
class DatasetConfig:
    """One split of a dataset."""

    PLUGIN_SLOT: ClassVar[PluginSlot] = PluginSlot("areal_datasets", "name")

    name: str = option(help="Dataset; a registered name, or package.module:function.")
    path: str | None = option(None, "Hub id, folder or file; None: the plugin's default.")
    split: str = option("train", "Split.")
    batch_size: int = option(32, "Rows (prompts) per step.", ge=1)
    shuffle: bool = option(True, "Shuffle each epoch, by the run's seed.")
    max_length: int | None = option(None, "Rows longer than this many tokens are dropped.", ge=1)
    limit: int | None = option(None, "Use only the first rows.", ge=1)
    plugin_options: dict[str, Any] = _plugin_options()


# ----------------------------------------------------------------------------------------------------------- run


def _is_folder_below(instance: Any, attribute: attrs.Attribute[Any], value: str) -> None:
    """A name that leaves run.root, or is run.root itself, would mix the files of several runs."""
    path = Path(value)
    if path.is_absolute() or not path.parts or ".." in path.parts:
        raise ValueError(f"must name a folder below run.root, got {value!r}")


@attrs.define(kw_only=True)
class RunConfig:
    """Where the run lives."""

    name: str = option("run", "Name of the run; its directory is root/name.", validator=_is_folder_below)
    root: Path = option(Path("runs"), "Folder of all runs.")

    @property
    def path(self) -> Path:
        return self.root / self.name


@attrs.define(kw_only=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    freq_steps: int | None = option(None, "Save every so many steps.", ge=1)
    freq_secs: float | None = option(None, "Save when so many seconds have passed.", gt=0)
    async_save: bool = option(
        False, "Copy the training state and write it while the next steps run; costs host memory of its size."
    )
    keep_last: int = option(1, "Resumable checkpoints to keep, newest first.", ge=1)
    keep_best: int = option(1, "Weights to keep (Hugging Face layout) by the metric below.", ge=0)
    metric: str | None = option(None, "Metric that ranks weights; null: eval/reward (rl) or eval/loss (others).")
    mode: Literal["max", "min"] | None = option(
        None, "Whether more of it is better; null: max for rewards, accuracies and margins, else min."
    )
    save_final: bool = option(True, "Export the final weights to weights/final.")


@attrs.define(kw_only=True)
class EvaluationConfig:
    """When to evaluate on the held-out split."""

    freq_steps: int | None = option(None, "Evaluate every so many steps.", ge=1)
    at_start: bool = option(False, "Evaluate before the first step.")
    at_end: bool = option(True, "Evaluate after the last step.")
    limit: int | None = option(None, "Use only the first rows.", ge=1)


@attrs.define(kw_only=True)
class TrackerConfig:
    """One tracker."""

    PLUGIN_SLOT: ClassVar[PluginSlot] = PluginSlot("areal_trackers", "name")

    name: str = option(help="Tracker, e.g. tensorboard.")
    plugin_options: dict[str, Any] = _plugin_options()


@attrs.define(kw_only=True)
class BaseTrainerConfig:
    """What every trainer's configuration has."""

    seed: int = option(1, "Seed of everything random.", ge=0, le=2**63 - 1)
    total_train_epochs: int = option(1, "Passes over the training data.", ge=1)
    total_train_steps: int | None = option(None, "Stop after so many steps, whatever the epochs.", ge=1)
    run: RunConfig = option(factory=RunConfig, help="Name and place of the run.")
    tokenizer_path: str | None = option(None, "Folder of the tokenizer; None: the actor's.")
    checkpoint: CheckpointConfig = option(factory=CheckpointConfig, help="Saving.")
    evaluation: EvaluationConfig = option(factory=EvaluationConfig, help="Held-out evaluation.")
    trackers: list[TrackerConfig] = option(factory=list, help="Metrics also go there.")
    num_threads: int | None = option(None, "CPU threads of torch per process; None: torch decides.", ge=1)


#: Built-in workflows that ask for a reward. Others may score by themselves, as many agents do.
_SCORED_WORKFLOWS = ("rlvr", "multi_turn", "vision_rlvr")


@attrs.define(kw_only=True)
class RLConfig(BaseTrainerConfig):
    """`trainer: rl`: generate, score, update."""

    trainer: Literal["rl"] = option("rl", "This trainer.")
    actor: PPOActorConfig = option(help="The policy.")
    train_dataset: DatasetConfig = option(help="Prompts to train on.")
    reward: RewardConfig | None = option(
        None, "Scores a completion. This or `rewards` is required, but for a workflow that scores by itself."
    )
    rewards: dict[str, RewardConfig] = option(
        factory=dict,
        help="Several rewards by a label of your choice; what counts is the sum of weight * value.",
        labels=True,
    )
    valid_dataset: DatasetConfig | None = option(None, "Held-out prompts.")
    rollout: InferenceEngineConfig = option(factory=InferenceEngineConfig, help="Generation.")
    gconfig: GenerationHyperparameters = option(factory=GenerationHyperparameters, help="Sampling.")
    workflow: WorkflowConfig = option(factory=WorkflowConfig, help="What one episode is.")
    algorithm: AlgorithmConfig = option(factory=AlgorithmConfig, help="Makes the loss.")
    ref: TrainEngineConfig | None = option(
        None, "Reference model of the KL; with `actor.lora` it may be left out: then it is the actor without adapters."
    )
    critic: PPOCriticConfig | None = option(None, "Value model of PPO.")
    eval_gconfig: GenerationHyperparameters | None = option(None, "Sampling in evaluation; None: greedy, one sample.")

    @property
    def reward_sections(self) -> dict[str, RewardConfig]:
        """The rewards by the key of their section: ``reward`` alone, or ``rewards.LABEL`` for each; empty for none.

        Raises:
            ConfigError: if both are given, or neither and the workflow is one that needs a reward.
        """
        if self.reward is not None and self.rewards:
            raise ConfigError(
                "both `reward` and `rewards` are given. Give one: `rewards` names several, `reward` is a single one.",
                key="rewards",
            )
        if self.reward is not None:
            return {"reward": self.reward}
        if not self.rewards and self.workflow.name.partition("@")[0] in _SCORED_WORKFLOWS:
            raise ConfigError(
                "is required: `reward: {name: ...}`, or `rewards: {LABEL: {name: ...}, ...}` for several.", key="reward"
            )
        return {f"rewards.{label}": section for label, section in self.rewards.items()}


@attrs.define(kw_only=True)
class SFTConfig(BaseTrainerConfig):
    """`trainer: sft`: supervised fine-tuning on demonstrations."""

    trainer: Literal["sft"] = option("sft", "This trainer.")
    actor: TrainEngineConfig = option(help="The model.")
    train_dataset: DatasetConfig = option(help="Demonstrations.")
    valid_dataset: DatasetConfig | None = option(None, "Held-out demonstrations (loss is measured).")
    train_on_prompt: bool = option(False, "Learn the prompt's tokens too.")
