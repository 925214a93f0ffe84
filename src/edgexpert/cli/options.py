"""The options that commands share, defined once: each command receives them as one `Options` object."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from edgexpert.cli.completion import (
    DEVICES,
    DTYPES,
    KERNELS,
    POLICIES,
    complete_draft,
    complete_model,
    complete_policy,
    one_of,
)
from edgexpert.core.errors import UserError

if TYPE_CHECKING:
    from edgexpert.policy import Policy
    from edgexpert.runtime.engine import Engine, Tree
    from edgexpert.speculation.draft import TreeShape
    from edgexpert.speculation.sampling import SamplingParams

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="NAME", show_default=False, autocompletion=one_of(*DTYPES),
                 help="float32, bfloat16, float16, or auto (the checkpoint's own). "
                      "[default: a packed checkpoint as it is, any other in float32]"),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu or cuda.", autocompletion=one_of(*DEVICES))]
DraftName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, none, ngram, or the folder or Hub name of an EAGLE-3 draft or of a smaller causal model.",
        autocompletion=complete_draft,
    ),
]
MODEL_HELP = "A bundled name, a folder, or a Hub name."


def _setting(help: str) -> Any:
    return typer.Option(help=f"{help} [default: as the policy says]", show_default=False)


def _sampling(help: str, default: str) -> Any:
    return typer.Option(help=f"{help} [default: as the checkpoint says, else {default}]", show_default=False)


def _tree(help: str) -> Any:
    return typer.Option(help=f"{help} [default: as --speculation says]", show_default=False)


@dataclass(frozen=True)
class Options:
    """What to run, under which policy, and how to pick tokens. A policy setting of None is left to the policy."""

    model: Annotated[str, typer.Option(metavar="NAME", help=MODEL_HELP, autocompletion=complete_model)] = "stories"
    draft: DraftName = "auto"
    dtype: Dtype = None
    device: Device = "cpu"
    encoder: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Folder or Hub name of a BERT-like encoder for prompt-wise expert reuse. "
                                          "[default: the bundled MiniLM]", show_default=False),
    ] = None

    threads: Annotated[
        int | None, typer.Option(help="Threads that compute. [default: one for each processor]", show_default=False)
    ] = None

    kernels: Annotated[
        str | None,
        typer.Option(metavar="NAME", envvar="EDGEXPERT_KERNELS", show_default=False, show_envvar=False,
                     help=f"Native kernels for packed weights: {', '.join(KERNELS)}. [default: auto, or $EDGEXPERT_KERNELS]",
                     autocompletion=one_of(*KERNELS)),
    ] = None

    policy: Annotated[
        str, typer.Option(metavar="NAME", help=f"{', '.join(POLICIES[:-1])} or {POLICIES[-1]}.", autocompletion=complete_policy)
    ] = "exact"
    coarse_pruning: Annotated[bool | None, _setting("Skip experts that only unlikely candidates want.")] = None
    fine_pruning: Annotated[bool | None, _setting("Skip channels that matter little to a token.")] = None
    prompt_wise_expert_reuse: Annotated[bool | None, _setting("Unimportant prompt tokens reuse loaded experts.")] = None
    depth_aware_coalescing: Annotated[bool | None, _setting("Candidates of one depth share channels.")] = None
    computational_calibration: Annotated[bool | None, _setting("Compute on every loaded channel.")] = None
    k_min: Annotated[int | None, _setting("Experts that a minor prompt token may choose among.")] = None
    n_min: Annotated[int | None, _setting("Experts that a minor prompt token gets.")] = None
    k_tri: Annotated[int | None, _setting("Experts that a trivial prompt token may choose among.")] = None
    n_tri: Annotated[int | None, _setting("Experts that a trivial prompt token gets.")] = None
    theta1: Annotated[float | None, _setting("Weight from which a prompt token is major.")] = None
    theta2: Annotated[float | None, _setting("Weight from which a prompt token is minor, not trivial.")] = None
    selection_ratio: Annotated[float | None, _setting("Share of its score that a coalesced channel must reach.")] = None
    keep_channels: Annotated[float | None, _setting("Share of a token's importance that fine pruning keeps.")] = None
    keep_mass: Annotated[float | None, _setting("Share of the path probability that coarse pruning keeps.")] = None
    importance: Annotated[str | None, _setting("How prompt attention becomes a weight: mean, max or quantile.")] = None
    token_weight: Annotated[str | None, _setting("How coalescing weighs candidates: routing, path or attention.")] = None

    max_new_tokens: Annotated[int, typer.Option(help="Tokens to produce at most.")] = 128
    temperature: Annotated[float | None, _sampling("0 picks the likeliest token.", "0")] = None
    top_k: Annotated[int | None, _sampling("Sample from the k likeliest tokens; 0 for all.", "0")] = None
    top_p: Annotated[float | None, _sampling("Sample from the likeliest tokens with this share of the probability.", "1")] = None
    repetition_penalty: Annotated[float | None, _sampling("Above 1 makes tokens of the text so far less likely.", "1")] = None
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None

    speculation: Annotated[
        str, typer.Option(metavar="auto|off|SIZE", help="Candidates in a tree: as the engine chooses, none, or so many.",
                          autocompletion=one_of("auto", "off"))
    ] = "auto"
    tree_size: Annotated[int | None, _tree("Candidates in a tree, its root not counted; 0 for none.")] = None
    tree_depth: Annotated[int | None, _tree("Longest path of candidates.")] = None
    tree_top_k: Annotated[int | None, _tree("Children of a candidate at most; 1 gives a chain.")] = None

    def load(self) -> Engine:
        """The engine that these options ask for. What can be checked without the model is checked first."""
        policy, _, _ = self.policy_named(self.policy), self.sampling, self.tree
        if self.kernels is not None:
            if self.kernels not in KERNELS:
                raise UserError(f"unknown `kernels` {self.kernels}; choose one of {', '.join(KERNELS)}")
            os.environ["EDGEXPERT_KERNELS"] = self.kernels
        import edgexpert

        return edgexpert.load(
            self.model, draft=self.draft, policy=policy, dtype=self.dtype, device=self.device, encoder=self.encoder,
            threads=self.threads,
        )

    def policy_named(self, name: str) -> Policy:
        """A policy by name, with the switches and hyperparameters of the command line."""
        from edgexpert import policy

        values = {field.name: getattr(self, field.name, None) for field in fields(policy.Techniques) if field.name != "name"}
        given = {setting: value for setting, value in values.items() if value is not None}
        return policy.with_settings(policy.policy_named(name), given)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling options that were given; the checkpoint decides the others."""
        from edgexpert.speculation.sampling import SamplingParams

        values = {field.name: getattr(self, field.name, None) for field in fields(SamplingParams)}
        given = {name: value for name, value in values.items() if value is not None}
        if self.stop is not None:
            given["stop"] = tuple(self.stop)
        SamplingParams(**given)  # checks them before anything is loaded
        return given

    def params(self, engine: Engine) -> SamplingParams:
        """How to pick tokens: as the options say, else the checkpoint."""
        return replace(engine.sampling, **self.sampling)

    @property
    def tree(self) -> Tree:
        """The shape of token trees, or ``auto``; tree options that are given win over --speculation."""
        given = (self.tree_size, self.tree_depth, self.tree_top_k)
        return "auto" if self.speculation == "auto" and given == (None, None, None) else self.fixed_tree

    @property
    def fixed_tree(self) -> TreeShape:
        """One shape for all trees, for commands that compare runs: where `tree` says ``auto``, the largest that may be chosen."""
        from edgexpert.speculation.draft import TreeShape

        if self.speculation not in ("auto", "off") and not self.speculation.isdecimal():
            raise UserError(f"--speculation must be auto, off or a number of candidates, not {self.speculation}")
        size = {"auto": None, "off": 0}.get(self.speculation, self.speculation)
        given = {"size": size if self.tree_size is None else self.tree_size, "depth": self.tree_depth, "top_k": self.tree_top_k}
        return TreeShape(**{name: int(value) for name, value in given.items() if value is not None})


def shared_options(without: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command every field of `Options` as an option, except those ``without``; it receives them as ``options``."""
    hints = get_type_hints(Options, include_extras=True)
    shared = {field.name: field.default for field in fields(Options) if field.name not in without}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own_hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=own_hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "options"
        ]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
            for name, default in shared.items()
        ]

        def run(**values: Any) -> None:
            command(options=Options(**{name: values.pop(name) for name in shared}), **values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*added, *own)}
        run.__signature__ = inspect.Signature([*added, *own])  # type: ignore[attr-defined]
        return run

    return decorate
