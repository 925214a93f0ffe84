"""Dataclasses from what a file says: every key, type and range is checked, and the message names the one that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from edgexpert.core.errors import UserError

T = TypeVar("T")

KINDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a table"}


@dataclass(frozen=True)
class Range:
    """What a number may be; beside its type, as in ``Annotated[int, Range(1, 64)]``.

    Attributes:
        low, high: the smallest and the largest; above ``low`` alone where it is not ``closed``.
    """

    low: float
    high: float
    closed: bool = True

    def __contains__(self, value: float) -> bool:
        return (self.low <= value if self.closed else self.low < value) and value <= self.high  # False for NaN

    def __str__(self) -> str:
        return f"from {self.low:g} to {self.high:g}" if self.closed else f"above {self.low:g} and at most {self.high:g}"


def checked(cls: type[T], values: Any, what: str, where: str = "") -> T:
    """An instance of a dataclass from a mapping of its fields, such as TOML and JSON give.

    Fields may be numbers (with a `Range`), texts, truth values, `Literal`, lists and tuples, dictionaries, None, and dataclasses.

    Args:
        what: names the file in messages, as in "the device mine.toml".
        where: the keys that lead to it, as in "dram.".

    Raises:
        UserError: names the key that is unknown, missing, of another type or out of its range.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"the key {where[:-1]} of {what} must be a table" if where else f"there are no keys in {what}")
    hints = get_type_hints(cls, include_extras=True)
    known = [field for field in fields(cls) if field.init]  # type: ignore[arg-type]  # a dataclass
    names = [field.name for field in known]
    for key in values:
        if key not in names:
            near = get_close_matches(str(key), names, n=1)
            raise UserError(f"there is an unknown key {where}{str(key)[:60]} in {what}; "
                            + (f"did you mean {near[0]}" if near else f"known are {', '.join(names)}"))
    for field in known:
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"the key {where}{field.name} of {what} is missing; add it")
    return cls(**{key: _value(hints[key], value, what, where + key) for key, value in values.items()})


def require(name: str, value: float, allowed: Range) -> None:
    """Raises UserError where the number ``value`` of the option ``name`` is out of its range, or not finite."""
    if value not in allowed:
        raise UserError(f"`{name}` must be {allowed}, not {_shown(value)}")


def _value(hint: Any, value: Any, what: str, key: str) -> Any:
    """The value as its type says, or a `UserError`."""
    allowed: Range | None = None
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        allowed = next((extra for extra in extras if isinstance(extra, Range)), None)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        return _value(next(argument for argument in arguments if argument is not NoneType), value, what, key)
    if origin is Literal:
        if not any(value is one or (type(value) is type(one) and value == one) for one in arguments):
            raise _wrong(key, what, f"one of {', '.join(map(str, arguments))}", value)
        return value
    if origin in (list, tuple):
        if not isinstance(value, list) or (origin is tuple and not value):
            kind = "tables, each under [[" + key + "]]" if is_dataclass(arguments[0]) else "values"
            raise _wrong(key, what, f"a list of {kind}", value)
        return origin(_value(arguments[0], item, what, f"{key}[{place}]") for place, item in enumerate(value))
    if origin is dict and isinstance(value, dict) and arguments[1] is not Any:
        return {name: _value(arguments[1], item, what, f"{key}[{str(name)[:60]}]") for name, item in value.items()}
    if is_dataclass(hint):
        return checked(hint, value, what, f"{key}.")  # type: ignore[arg-type]  # a class
    kind = origin or hint
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = number and (kind is float or isinstance(value, int)) if kind in (int, float) else isinstance(value, kind)
    if not fits:
        raise _wrong(key, what, KINDS[kind], value)
    if allowed is not None and value not in allowed:
        raise _wrong(key, what, str(allowed), value)
    return value


def _wrong(key: str, what: str, wanted: str, value: Any) -> UserError:
    return UserError(f"the key {key} of {what} must be {wanted}, not {_shown(value)}")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python writes
        return "so large a number"
    return text if len(text) <= 60 else f"{text[:57]}..."
