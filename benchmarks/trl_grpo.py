"""TRL's side of the benchmark: GRPOTrainer on the quickstart's task. Writes a JSON file with times and rewards."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from areal_arithmetic.dataset import get_arithmetic_dataset
from areal_arithmetic.reward import arithmetic_reward_fn

PROMPTS, GROUP, MAX_NEW_TOKENS, HELD_OUT = 32, 8, 28, 300


class Timer(TrainerCallback):
    """Seconds of each step (generation, reward and update) and the logged mean reward."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.rewards: list[float] = []
        self.started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])


def score(completions: list[list[dict[str, str]]], answer: list[str], **columns: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [arithmetic_reward_fn("", text, [], [], answer=right) for text, right in zip(texts, answer, strict=True)]


@torch.inference_mode()
def evaluate(model: Any, tokenizer: Any) -> float:
    """Greedy accuracy on the quickstart's held-out questions."""
    model.eval()
    rows = get_arithmetic_dataset(None, "test", kind="rl", size=HELD_OUT)
    prompts = tokenizer.apply_chat_template(
        [row["messages"] for row in rows],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompts, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    texts = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = [
        arithmetic_reward_fn("", text, [], [], answer=row["answer"]) for text, row in zip(texts, rows, strict=True)
    ]
    return sum(rewards) / len(rewards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    rows = get_arithmetic_dataset(None, "train", kind="rl", seed=arguments.seed)
    dataset = Dataset.from_list([{"prompt": row["messages"], "answer": row["answer"]} for row in rows])
    timer = Timer()
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            seed=arguments.seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=MAX_NEW_TOKENS,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            beta=0.0,
            epsilon=0.2,
            loss_type="bnpo",
            scale_rewards="group",
            learning_rate=1e-4,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            weight_decay=0.0,
            adam_beta1=0.9,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            max_steps=arguments.steps,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=score,
            args=config,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[timer],
        )
        trainer.train()
    result = {"step_seconds": timer.seconds, "rewards": timer.rewards, "accuracy": evaluate(trainer.model, tokenizer)}
    arguments.output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
