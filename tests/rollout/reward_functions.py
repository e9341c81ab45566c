"""Rewards that misbehave, importable by a worker process."""

import os
import signal
import sys
import time

import numpy as np


class TensorLike:
    """As a tensor does, converts to a float, but is none."""

    def __float__(self):
        return 1.0


def length_reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
    return len(completions)


def strict_reward_fn(prompt, completions, prompt_ids, completion_ids, answer):
    return float(completions == answer)


def scaled_reward_fn(prompt, completions, prompt_ids, completion_ids, scale=1.0, **data):
    return scale * len(completions)


async def async_reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
    if completions == "hang":
        import asyncio

        await asyncio.Event().wait()
    return misbehave_reward_fn(prompt, completions, prompt_ids, completion_ids, **data)


def misbehave_reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
    match completions:
        case "raise":
            raise ValueError("no such answer")
        case "hang":
            while True:
                time.sleep(60)
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(5)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "torch loaded":
            return float("torch" in sys.modules)
        case "pid":
            return os.getpid()
        case "none":
            return None
        case "nan":
            return float("nan")
        case "inf":
            return float("-inf")
        case "huge int":
            return 10**400
        case "huge float":
            return 1e300
        case "bool":
            return True
        case "str":
            return "1.0"
        case "list":
            return [1.0]
        case "wrong length":
            return [1.0, 0.0]
        case "empty":
            return []
        case "torch tensor":
            import torch

            return torch.tensor(1.0)
        case "tensor":
            return TensorLike()
        case "array":
            return np.array(1.0)
        case "numpy float":
            return np.float32(0.5)
        case "numpy int":
            return np.int64(2)
        case "slow":
            time.sleep(0.25)
        case "stdout":
            sys.stdout.write("noise\n")
            sys.stdout.flush()
    return 1.0
