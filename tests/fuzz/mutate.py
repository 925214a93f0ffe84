"""Mutations of small valid files: bytes, JSON values, lines of TOML. The same random numbers give the same mutation."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**63, 10**30, 0.5, -0.5, 1e-300, 1e300, float("nan"),
    float("inf"), "", "x", "1", "../x", "\0", "ü" * 300, [], [1], [[]], {}, {"x": 1}, [0] * 50, "float32", "silu",
]
TOML_VALUES = ["0", "-1", "1", "2", "1e300", "nan", "inf", "-inf", "true", '""', '"x"', "[]", "{}", "[1, 2]", "1.5",
               "9223372036854775807", "100000000000000000000", "1979-05-27", '"edgexpert"', "3", "100", "1000000"]


def bytes_of(data: bytes, random: Random, within: int | None = None) -> bytes:
    """Flips, cuts, repeats or overwrites some bytes, among the first ``within``."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        end = min(within or len(changed), len(changed))
        if not end:
            break
        place, length = random.randrange(end), random.choice((1, 1, 2, 4, 8, 64))
        kind = random.randrange(6)
        if kind == 0:
            changed[place] ^= 1 << random.randrange(8)
        elif kind == 1:
            changed[place] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            changed[place : place + length] = random.randbytes(length)
        elif kind == 3:
            del changed[place : place + length]
        elif kind == 4:
            changed[place:place] = changed[place : place + length]
        else:
            changed[place : place + 8] = random.choice((0, 1, 2**31, 2**32, 2**63 - 1, 2**64 - 1)).to_bytes(8, "little")
    return bytes(changed[: random.randrange(len(changed))]) if random.random() < 0.05 else bytes(changed)


def json_of(data: bytes, random: Random) -> bytes:
    """Changes a few values of a JSON text, or now and then its bytes."""
    if random.random() < 0.1:
        return bytes_of(data, random)
    value = copy.deepcopy(json.loads(data))
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        value = _changed(value, random)
    return json.dumps(value).encode()


def _changed(value: Any, random: Random) -> Any:
    places = list(_places(value))
    if not places:
        return random.choice(VALUES)
    parent, key = random.choice(places)
    kind = random.random()
    if kind < 0.15:
        del parent[key]
    elif kind < 0.2:
        other_parent, other = random.choice(places)
        if other in (other_parent if isinstance(other_parent, dict) else range(len(other_parent))):
            parent[key] = copy.deepcopy(other_parent[other])
    elif kind < 0.35 and isinstance(parent[key], int):
        parent[key] += random.choice((-1, 1, 2, 64))
    else:
        parent[key] = copy.deepcopy(random.choice(VALUES))
    return value


def _places(value: Any) -> Any:
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _places(value[key])


def toml_of(data: bytes, random: Random) -> bytes:
    """Changes, drops or repeats some lines."""
    if random.random() < 0.1:
        return bytes_of(data, random)
    lines = data.decode().splitlines()
    for _ in range(random.choice((1, 1, 2, 3))):
        number = random.randrange(len(lines))
        key, sign, _ = lines[number].partition("=")
        kind = random.random()
        if kind < 0.15:
            del lines[number]
        elif kind < 0.25:
            lines.insert(random.randrange(len(lines) + 1), lines[number])
        elif sign:
            lines[number] = f"{key}= {random.choice(TOML_VALUES)}"
    return "\n".join(lines).encode()


def safetensors_of(data: bytes, random: Random) -> bytes:
    """Changes the header's JSON, with a length that is right, or the first bytes of the file."""
    length = int.from_bytes(data[:8], "little")
    if random.random() < 0.3:
        return bytes_of(data, random, within=8 + length)
    header = json_of(data[8 : 8 + length], random)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]
