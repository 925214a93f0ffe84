"""`edgexpert convert`: a checkpoint in packed form, for the kernels that read only what a plan loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgexpert.cli.options import Json
from edgexpert.cli.show import print_json, print_line, print_pairs, readable_bytes
from edgexpert.core.errors import UserError

if TYPE_CHECKING:
    from edgexpert.conversion.convert import Advance
    from edgexpert.weights.manifest import Manifest

PACKING = ("dummy", "bits", "group_size", "method", "zero_point", "calibration", "keep")


def convert(
    context: typer.Context,
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC DST",
            help="The checkpoint (a bundled name, a folder, a Hub name) and the new folder; with --dummy the new folder alone.",
        ),
    ],
    dummy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", show_default=False,
            help="Random weights: granite-1b-a400m, olmoe-1b-7b, deepseek-v2-lite, qwen3-30b-a3b, or any config.json.",
        ),
    ] = None,
    bits: Annotated[int, typer.Option(help="Bits of the weights: 4, 8 or 16.")] = 4,
    group_size: Annotated[int, typer.Option(help="Input channels that share a row of scales.")] = 32,
    method: Annotated[str, typer.Option(help="rtn (round to nearest) or gptq.")] = "rtn",
    zero_point: Annotated[bool, typer.Option("--zero-point", help="Give every 4-bit group a zero point.")] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, show_default=False, help="Plain text for gptq to learn from."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART=BITS", show_default=False,
            help="Other bits for a part: experts, attention, shared_experts, lm_head; may be given several times.",
        ),
    ] = None,
    to: Annotated[
        Literal["packed", "compressed-tensors"], typer.Option(help="compressed-tensors: SRC is packed; write it for vLLM.")
    ] = "packed",
    json: Json = False,
) -> None:
    """Write a checkpoint in packed form. An interrupted conversion is continued by the same command."""
    if to == "compressed-tensors":
        sources = {name: context.get_parameter_source(name) for name in PACKING}
        given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
        if given:
            raise UserError(f"--{given[0].replace('_', '-')} says how to pack, and --to compressed-tensors keeps what is packed; "
                            "leave it out")
        write_back(paths, json)
        return
    from edgexpert.conversion.convert import convert as run
    from edgexpert.conversion.options import PackOptions, parse_keep
    from edgexpert.conversion.sources.dummy import DummySource, dummy_config
    from edgexpert.conversion.sources.opening import open_source

    options = PackOptions(bits, group_size, method, zero_point, parse_keep(keep or ()))  # type: ignore[arg-type]
    expected = 1 if dummy else 2
    if len(paths) != expected:
        raise UserError(f"give {'the new folder alone beside --dummy' if dummy else 'a checkpoint and a new folder'}")
    source = DummySource(dummy_config(dummy), dummy) if dummy else open_source(paths[0])
    destination = Path(paths[-1]).expanduser()
    with progress_bar("converting") as advance:
        manifest = run(source, destination, options, advance, calibration)
    if json:
        print_json(facts(destination, manifest))
    else:
        print_facts(destination, manifest)


def write_back(paths: list[str], json: bool) -> None:
    """A packed checkpoint as a compressed-tensors one."""
    from edgexpert.conversion.export import export

    if len(paths) != 2:
        raise UserError("give a packed checkpoint and a new folder")
    source, destination = (Path(path).expanduser() for path in paths)
    with progress_bar("writing") as advance:
        export(source, destination, advance)
    if json:
        sizes = {path.name: path.stat().st_size for path in sorted(destination.iterdir())}
        print_json({"folder": str(destination), "format": "compressed-tensors", "bytes": sizes})
    else:
        print_line(f"saved in {destination}")


@contextmanager
def progress_bar(title: str) -> Iterator[Advance]:
    """A bar on the error stream, with an estimate of the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def facts(folder: Path, manifest: Manifest) -> dict[str, object]:
    """What a packed checkpoint is, in figures."""
    errors = [error for layer in manifest.layers for part in layer.errors.values() for error in part]
    return {
        "folder": str(folder),
        "source": manifest.source,
        "dummy": manifest.dummy,
        "method": manifest.method,
        "bits": manifest.bits,
        "group_size": manifest.group_size,
        "zero_point": manifest.zero_point,
        "bytes": {name: file["bytes"] for name, file in manifest.files.items()},
        "relative_error_of_experts": sum(errors) / len(errors) if errors else None,
        "rtn_fallbacks": manifest.rtn_fallbacks,
    }


def print_facts(folder: Path, manifest: Manifest) -> None:
    known = facts(folder, manifest)
    error = known["relative_error_of_experts"]
    print_pairs(str(folder), {
        "source": f"{manifest.source['kind']} {manifest.source['name']}",
        "method": manifest.method,
        "bits": ", ".join(f"{part.replace('_', ' ')} {bits}" for part, bits in manifest.bits.items()),
        "groups": f"{manifest.group_size} channels{', with zero points' if manifest.zero_point else ''}",
        "bytes": readable_bytes(sum(file["bytes"] for file in manifest.files.values())),
        "relative error of experts": f"{error:.4f}" if error is not None else "none measured",
    })
    if manifest.dummy:
        print_line("note: a dummy; its weights are random, so it serves to measure speed and its text means nothing")
    if manifest.rtn_fallbacks:
        print_line(
            f"note: {len(manifest.rtn_fallbacks)} experts saw too few calibration tokens and were rounded to nearest: "
            + ", ".join(f"layer {f['layer']} expert {f['expert']} ({f['tokens']} tokens)" for f in manifest.rtn_fallbacks)
        )
