"""Policies of other packages: entry points of the group ``edgexpert.policies``, see docs/extending.md."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from edgexpert.core.errors import UserError
from edgexpert.policy.protocol import Policy

GROUP = "edgexpert.policies"


def plugin_names() -> list[str]:
    """The policies that installed packages offer. None of them is imported."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def plugin_named(name: str) -> Policy:
    """The policy that an installed package offers under a name of `plugin_names`.

    Raises:
        UserError: it cannot be had, or two packages offer one; names the packages.
    """
    entry, *others = entry_points(group=GROUP, name=name)
    if others:
        packages = " and ".join(sorted(_package(each) for each in (entry, *others)))
        raise UserError(f"the packages {packages} both offer a policy {name!r}; remove one of them")
    try:
        found = entry.load()
        policy = found() if isinstance(found, type) else found
    except Exception as error:  # whatever goes wrong in it
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"the policy {name!r} of package {_package(entry)} cannot be loaded ({reason}); mend or remove that "
                        "package") from error
    if not isinstance(policy, Policy) or policy.name != name:
        what = f"is named {policy.name!r}" if isinstance(policy, Policy) else "is no edgexpert.policy.Policy"
        raise UserError(f"the policy {name!r} of package {_package(entry)} {what}; mend or remove that package")
    return policy


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
