"""The loops of decoding on a CPU in fp32, compiled by numba.

torch's kernels are made for large tensors: of a decoding step of a small model, attention over one query per row takes
most, and reading the keys at a tenth of the memory's speed. The loops here are written so that LLVM turns them into
vector instructions: constant head size, eight keys at a time, sums in an array on the stack, which nothing can alias.

Arrays are C-contiguous float32 unless said. Numba keeps the machine code beside this file, or in the user's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_F = np.float32
_ZERO, _HALF, _ONE, _LOWEST = _F(0), _F(0.5), _F(1), _F(-3.4e38)
#: All of fast-math but "there are no infinities and NaNs": broken weights must be seen.
_FAST = {"contract", "nsz", "arcp", "reassoc", "afn"}
_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": _FAST}
#: Keys ahead of the ones in use that are asked of the memory.
_AHEAD = 32
#: Weights of the vocabulary are summed by blocks of this many, to be searched in two steps.
_BLOCK = 128

# exp(x) = 2^n exp(r), r in [-ln 2 / 2, ln 2 / 2]: the minimax polynomial of the Cephes library (expf), 2 ulp.
_LOG2E, _LN2_HIGH, _LN2_LOW = _F(1.44269504088896341), _F(0.693359375), _F(-2.12194440e-4)
_P0, _P1, _P2 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
_P3, _P4, _P5 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)
_UNDERFLOW, _LARGEST = _F(-87.0), _F(3.4028235e38)


@intrinsic
def _float_of_bits(typing: Any, bits: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), emit


@intrinsic(prefer_literal=True)
def _stack(typing: Any, size: Any) -> Any:
    """Pointer to ``size`` (a constant) floats on the stack."""
    count = size.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.ArrayType(ir.FloatType(), count))
        return builder.bitcast(memory, ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(size), emit


@intrinsic
def _prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of ``array[index]``; it may lie outside."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        where = builder.bitcast(builder.gep(data, [args[1]]), pointer)
        builder.call(function, [where, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


@njit(inline="always", **_OPTIONS)
def _exp(given: Any) -> Any:
    """For numbers up to 0; gives 0 below -87."""
    x = max(given, _UNDERFLOW)
    n = np.floor(x * _LOG2E + _HALF)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    found = (p * r * r + r + _ONE) * _float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return _ZERO if given < _UNDERFLOW else found


@njit(**_OPTIONS)
def _softmax(scores: Any) -> None:
    """In place over ``[n]``."""
    largest = _LOWEST
    for t in range(len(scores)):
        largest = max(largest, scores[t])
    total = _ZERO
    for t in range(len(scores)):
        weight = _exp(scores[t] - largest)
        scores[t] = weight
        total += weight
    scale = _ONE / total
    for t in range(len(scores)):
        scores[t] *= scale


#: Most query heads to a key head.
MAX_GROUP = 16


@njit(**_OPTIONS)
def store(
    key: Any, key_stride: int, value: Any, value_stride: int, keys: Any, values: Any, rows: Any, positions: Any
) -> None:
    """Copy new keys and values into the cache; the arguments are those of ``attention``."""
    size = keys.shape[3]
    for n in range(len(rows)):
        for h in range(keys.shape[1]):
            k, v = keys[rows[n], h, positions[n]], values[rows[n], h, positions[n]]
            at, where = n * key_stride + h * size, n * value_stride + h * size
            for d in range(size):
                k[d] = key[at + d]
            for d in range(size):
                v[d] = value[where + d]


@cache
def attention(head_dim: int) -> Callable[..., None]:
    """Compiled for heads of this size.

    Args:
        query, query_stride: flat; the heads of token ``n`` follow each other from ``n * query_stride`` on.
        keys, values: the cache ``[rows, kv_heads, capacity, head_dim]``.
        rows: int64 ``[N]``, the row of each token.
        positions: int64 ``[N]``; a token attends to its row's keys up to its position, its own included.
        first, last: the tokens to do.
        scale: of the scores.
        window: tokens that are seen, the own one included.
        scores: scratch ``[group, capacity]``, for the ``group`` (at most ``MAX_GROUP``) query heads of a key head.
        out: ``[N, heads, head_dim]``.
    """
    size, stack_size = head_dim, MAX_GROUP * head_dim

    @njit(**_OPTIONS)
    def attend(
        query: Any,
        query_stride: int,
        keys: Any,
        values: Any,
        rows: Any,
        positions: Any,
        first: int,
        last: int,
        scale: Any,
        window: int,
        scores: Any,
        out: Any,
    ) -> None:
        group = len(scores)
        width = group * size
        for n in range(first, last):
            stop = positions[n] + 1
            start = max(0, stop - window)
            for h in range(keys.shape[1]):
                all_keys, all_values = keys[rows[n], h], values[rows[n], h]
                at = n * query_stride + h * width
                q = query[at : at + width]
                t = start
                while t + 8 <= stop:
                    k0, k1, k2, k3 = all_keys[t], all_keys[t + 1], all_keys[t + 2], all_keys[t + 3]
                    k4, k5, k6, k7 = all_keys[t + 4], all_keys[t + 5], all_keys[t + 6], all_keys[t + 7]
                    for line in range(0, 8 * size, 16):
                        _prefetch(k0, _AHEAD * size + line)
                    for g in range(group):
                        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = _ZERO
                        for d in range(size):
                            x = q[g * size + d]
                            a0 += x * k0[d]
                            a1 += x * k1[d]
                            a2 += x * k2[d]
                            a3 += x * k3[d]
                            a4 += x * k4[d]
                            a5 += x * k5[d]
                            a6 += x * k6[d]
                            a7 += x * k7[d]
                        row = scores[g]
                        row[t], row[t + 1], row[t + 2], row[t + 3] = a0 * scale, a1 * scale, a2 * scale, a3 * scale
                        row[t + 4], row[t + 5], row[t + 6], row[t + 7] = a4 * scale, a5 * scale, a6 * scale, a7 * scale
                    t += 8
                for left in range(t, stop):
                    k0 = all_keys[left]
                    for g in range(group):
                        a0 = _ZERO
                        for d in range(size):
                            a0 += q[g * size + d] * k0[d]
                        scores[g, left] = a0 * scale
                for g in range(group):
                    _softmax(scores[g, start:stop])
                total = carray(_stack(stack_size), (stack_size,))
                for d in range(width):
                    total[d] = _ZERO
                t = start
                while t + 8 <= stop:
                    v0, v1, v2, v3 = all_values[t], all_values[t + 1], all_values[t + 2], all_values[t + 3]
                    v4, v5, v6, v7 = all_values[t + 4], all_values[t + 5], all_values[t + 6], all_values[t + 7]
                    for line in range(0, 8 * size, 16):
                        _prefetch(v0, _AHEAD * size + line)
                    for g in range(group):
                        row = scores[g]
                        w0, w1, w2, w3 = row[t], row[t + 1], row[t + 2], row[t + 3]
                        w4, w5, w6, w7 = row[t + 4], row[t + 5], row[t + 6], row[t + 7]
                        for d in range(size):
                            total[g * size + d] += (
                                w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
                                + w4 * v4[d] + w5 * v5[d] + w6 * v6[d] + w7 * v7[d]
                            )  # fmt: skip
                    t += 8
                for left in range(t, stop):
                    v0 = all_values[left]
                    for g in range(group):
                        w0 = scores[g, left]
                        for d in range(size):
                            total[g * size + d] += w0 * v0[d]
                for g in range(group):
                    mixed = out[n, h * group + g]
                    for d in range(size):
                        mixed[d] = total[g * size + d]

    return attend


@njit(**_OPTIONS)
def rms_norm(hidden: Any, weight: Any, eps: Any, out: Any) -> None:
    """``weight * x / sqrt(mean(x^2) + eps)`` for each row of ``[N, size]``."""
    size = len(weight)
    for n in range(len(hidden)):
        x, y = hidden[n], out[n]
        total = _ZERO
        for d in range(size):
            total += x[d] * x[d]
        scale = _ONE / np.sqrt(total / _F(size) + eps)
        for d in range(size):
            y[d] = x[d] * scale * weight[d]


@njit(**_OPTIONS)
def silu_mul(gate_up: Any, out: Any) -> None:
    """``silu(gate) * up``; ``[N, 2 * size]``, the gate first, to ``[N, size]``."""
    size = out.shape[1]
    for n in range(len(out)):
        gate, up, y = gate_up[n, :size], gate_up[n, size:], out[n]
        for d in range(size):
            small = _exp(-abs(gate[d]))
            y[d] = gate[d] * up[d] * (_ONE if gate[d] >= _ZERO else small) / (_ONE + small)


@njit(**_OPTIONS)
def rotate(qkv: Any, weight: Any, eps: Any, rope: Any, positions: Any, out: Any) -> None:
    """Norm (if ``weight`` has rows) and rotary embedding of queries and keys.

    Args:
        qkv: ``[N, heads, head_dim]``; the heads of the values behind those of ``out`` are left alone.
        weight: of the norm ``[heads of out, head_dim]``, or ``[0, head_dim]`` for none.
        eps: of the norm.
        rope: ``[positions, 2 * head_dim]``: cosines, minus the sines of the lower half, the sines of the upper.
        positions: int64 ``[N]``.
        out: ``[N, heads, head_dim]``.
    """
    size = out.shape[2]
    half = size // 2
    for n in range(len(out)):
        turn = rope[positions[n]]
        cos_low, cos_high = turn[:half], turn[half:size]
        sin_low, sin_high = turn[size : size + half], turn[size + half :]
        for h in range(out.shape[1]):
            x, y = qkv[n, h], out[n, h]
            low, high = x[:half], x[half:]
            if len(weight):
                total = _ZERO
                for d in range(size):
                    total += x[d] * x[d]
                scale = _ONE / np.sqrt(total / _F(size) + eps)
                w = weight[h]
                for d in range(half):
                    a, b = low[d] * scale * w[d], high[d] * scale * w[half + d]
                    y[d] = a * cos_low[d] + b * sin_low[d]
                    y[half + d] = b * cos_high[d] + a * sin_high[d]
            else:
                for d in range(half):
                    y[d] = low[d] * cos_low[d] + high[d] * sin_low[d]
                    y[half + d] = high[d] * cos_high[d] + low[d] * sin_high[d]


@njit(inline="always", **_OPTIONS)
def _scrambled(bits: Any) -> Any:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@njit(**_OPTIONS)
def uniform(starts: Any, positions: Any, out: Any) -> None:
    """As ``sampling.uniform``, to float64 ``[B]``."""
    for b in range(len(out)):
        place = _scrambled((np.uint64(positions[b]) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
        out[b] = np.float64(_scrambled(starts[b] + place) >> np.uint64(11)) * 2.0**-53


@njit(**_OPTIONS)
def sample(logits: Any, temperature: Any, greedy: Any, uniforms: Any, weights: Any, tokens: Any, logprobs: Any) -> None:
    """Draw a token per row from softmax(logits / temperature), or take the likeliest where ``greedy``.

    Args:
        logits: ``[B, V]``.
        temperature: ``[B]``.
        greedy: bool ``[B]``.
        uniforms: float64 ``[B]``, in [0, 1).
        weights: scratch ``[V]``.
        tokens: int64 ``[B]``, written.
        logprobs: ``[B]``, written; NaN for a row with a logit that is NaN or +infinity, or with none above -infinity.
    """
    vocab = logits.shape[1]
    sums = np.empty((vocab + _BLOCK - 1) // _BLOCK, dtype=np.float64)
    for b in range(len(logits)):
        x = logits[b]
        scale = _ONE / temperature[b]
        largest, broken = _LOWEST, 0
        for v in range(vocab):
            largest = max(largest, x[v])
            broken += 0 if x[v] <= _LARGEST else 1
        total = 0.0
        for block in range(len(sums)):
            part, chunk = weights[block * _BLOCK : (block + 1) * _BLOCK], x[block * _BLOCK : (block + 1) * _BLOCK]
            some = _ZERO
            for v in range(len(part)):
                weight = _exp((chunk[v] - largest) * scale)
                part[v] = weight
                some += weight
            sums[block] = some
            total += sums[block]
        token = 0
        if greedy[b]:
            while token < vocab - 1 and x[token] != largest:
                token += 1
        else:
            goal = uniforms[b] * total
            block = 0
            while block < len(sums) - 1 and goal >= sums[block]:
                goal -= sums[block]
                block += 1
            token = block * _BLOCK
            last = min(vocab, token + _BLOCK) - 1
            found = token
            # Rounding may leave a rest behind the last weight; the token is then the last one that has any.
            while token <= last:
                if weights[token] > _ZERO:
                    found = token
                    if goal < weights[token]:
                        break
                goal -= weights[token]
                token += 1
            token = found
        tokens[b] = token
        logprobs[b] = _F(np.nan) if broken or total == 0 else _F((x[token] - largest) * scale - np.log(total))
