"""Which tokens top-k, top-p and min-p kept, by the log-probs of the likeliest tokens that a server tells.

See ``areal_core.api.supports``: where the trainer asks for them, log-probs are taken over the kept tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from areal_core.api.io_struct import GenerationHyperparameters, ModelRequest
from areal_core.api.supports import MAX_SUPPORT
from areal_core.errors import BadInputError

#: vLLM's log-prob of a token that cannot be sampled is -9999.
_IMPOSSIBLE = -9000.0


def check(request: ModelRequest) -> None:
    """Whether the kept tokens can be told for a request that asks for them.

    Raises:
        BadInputError: naming the option.
    """
    gconfig = request.gconfig
    if not gconfig.has_bounded_support:
        raise BadInputError(
            f"return_supports: needs samples of a bounded number of tokens. Set gconfig.top_k to 1..{MAX_SUPPORT} "
            f"(it is {gconfig.top_k}), and a temperature above 0."
        )
    if gconfig.frequency_penalty != 0.0:
        raise BadInputError(
            f"gconfig.frequency_penalty is {gconfig.frequency_penalty:g}: with truncation (top_k {gconfig.top_k}) vLLM "
            "does not tell which tokens were kept. Use 0, or rollout.backend=local."
        )


def number_of_candidates(gconfig: GenerationHyperparameters, banned_ids: Collection[int], done: int) -> int:
    """How many of the likeliest tokens a server must tell."""
    banned = len(banned_ids) if done < gconfig.min_new_tokens else 0
    # One more, for a server that counts the sampled token among them.
    return gconfig.top_k + banned + 1


def kept(
    candidates: Mapping[int, float],
    token: int,
    gconfig: GenerationHyperparameters,
    banned: Collection[int] = (),
    *,
    truncated: bool = False,
) -> tuple[npt.NDArray[np.int32], float]:
    """The ids from which ``token`` was drawn, ascending, and its log-prob over them.

    Args:
        candidates: log-probs of the likeliest tokens, at the request's temperature.
        banned: ids that could not be drawn: stops before the minimum length.
        truncated: whether the log-probs are those after truncation, so that what is left out has none.
    """
    found = {i: v for i, v in candidates.items() if v > _IMPOSSIBLE and (i not in banned or i == token)}
    ids = np.fromiter(found, np.int32, len(found))
    logprobs = np.fromiter(found.values(), np.float64, len(found))
    order = np.argsort(-logprobs, kind="stable")[: gconfig.top_k]
    ids, logprobs = ids[order], logprobs[order]
    if gconfig.min_p > 0 and not truncated:
        likely = logprobs >= logprobs[0] + np.log(gconfig.min_p)
        ids, logprobs = ids[likely], logprobs[likely]
    if gconfig.top_p < 1 and not truncated:
        probs = np.exp(logprobs - logprobs[0])
        probs /= probs.sum()
        # As vLLM: the least likely whose sum does not exceed 1 - p are left out.
        tail = np.cumsum(probs[::-1])[::-1] > 1 - gconfig.top_p
        tail[0] = True
        ids, logprobs = ids[tail], logprobs[tail]
    if token not in ids:
        # At a bound, where the server's arithmetic and this one may differ in the last bit.
        ids, logprobs = np.append(ids, np.int32(token)), np.append(logprobs, candidates[token])
    peak = logprobs.max()
    logprob = candidates[token] - (peak + np.log(np.exp(logprobs - peak).sum()))
    return np.sort(ids), float(logprob)
