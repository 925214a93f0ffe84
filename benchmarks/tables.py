"""Writes the tables of README.md and docs/ from the result files, so that no figure is typed by hand.

    python benchmarks/tables.py [--check]

A table stands between ``<!-- table: KIND FILE -->`` and ``<!-- /table -->``: KIND is a function below, FILE lies in
benchmarks/results/. ``--check`` writes nothing, names the pages whose tables differ from their files, and exits with 1.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from common import RESULTS, ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
MARK = re.compile(r"(<!-- table: (\w+) ([\w.-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)

SHAPES = {"granite-1b-a400m": "Granite-1B-A400M", "olmoe-1b-7b": "OLMoE-1B-7B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}
MEASURES = {
    "decode": "plain decoding, a token", "decode after 512": "plain decoding after 512 tokens, a token",
    "prefill 64": "prefill of 64 tokens", "prefill 512": "prefill of 512 tokens",
    "verify 64": "verify stage of 64 candidates after 512 tokens",
}
TECHNIQUES = {
    "exact": "nothing approximated", "pruned": "coarse pruning of experts, fine pruning of channels",
    "reuse": "prompt-wise expert reuse", "coalesced": "depth-aware channel coalescing", "edgexpert": "computational calibration",
}
IN_THE_PAPER = {"pruned": "Baseline", "reuse": "EdgeXpert_PR", "coalesced": "EdgeXpert_DC", "edgexpert": "EdgeXpert_ALL"}


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def origin(about: dict[str, Any]) -> str:
    """Where figures come from, for the line below a table."""
    return (f"\n`{about['command']}`, commit {about['commit']}, {about['date']}; {about['processor']}, "
            f"{about['kernels']} kernels, {about['threads']} threads.\n")


def llama_cpp(found: dict[str, Any]) -> str:
    rows = [[SHAPES[row["shape"]], MEASURES[row["measure"]], str(row["threads"]), f"{row['ours_ms']:.1f} ms",
             f"{row['llama_cpp_ms']:.1f} ms", f"{row['ratio']:.2f}", f"{row['target']:g}"] for row in found["rows"]]
    table = markdown(["shape", "measure", "threads", "EdgeXpert", "llama.cpp", "times as fast", "target"], rows)
    return table + origin(found["about"])


def kernels(found: dict[str, Any]) -> str:
    rows = [[row["measure"], f"{row['value']:.1f} {row['unit']}", f"{row['ratio']:.2f}", row["target"] or "",
             "" if not row["target"] else "met" if row["met"] else "missed"] for row in found["rows"]]
    return markdown(["measure", "value", "ratio", "target", ""], rows) + origin(found["about"])


def speculation(found: dict[str, Any]) -> str:
    """A row for each tree; how many times as fast as plain decoding, and in brackets the bytes of a token against its."""
    shapes = list(dict.fromkeys(row["shape"] for row in found["rows"]))
    by_case = {(row["shape"], row["policy"], row["size"]): row for row in found["rows"]}
    policies = list(dict.fromkeys(row["policy"] for row in found["rows"] if row["size"]))
    rows = []
    for size in dict.fromkeys(row["size"] for row in found["rows"] if row["size"]):
        acceptance = [f"{by_case[shapes[0], policy, size]['acceptance_length']:.2f}" for policy in policies]
        cases = [by_case[shape, policy, size] for shape in shapes for policy in policies]
        rows.append([str(size), *acceptance, *(f"{case['faster']:.2f} ({case['bytes']:.2f})" for case in cases)])
    columns = ["candidates", *(f"acceptance length, `{policy}`" for policy in policies),
               *(f"{SHAPES[shape]}, `{policy}`" for shape in shapes for policy in policies)]
    return markdown(columns, rows) + origin(found["about"])


def techniques(found: dict[str, Any]) -> str:
    exact, rows = found["policies"]["exact"], []
    for name, row in found["policies"].items():
        def against(key: str, digits: int = 0, row: dict[str, float] = row) -> str:
            return "" if row is exact else f" ({100 * (row[key] / exact[key] - 1):+.{digits}f} %)"

        rows.append([
            f"`{name}`", TECHNIQUES[name], IN_THE_PAPER.get(name, ""),
            f"{row['decode_expert_kb_per_token'] / 1e3:.1f} MB{against('decode_expert_kb_per_token')}",
            f"{row['prefill_expert_mb']:.1f} MB{against('prefill_expert_mb')}", f"{row['acceptance_length']:.2f}",
            f"{row['perplexity']:.2f}{against('perplexity', 1)}", f"{row['tokens_per_s']:.0f}",
        ])
    about = found["about"]
    table = markdown(["`--policy`", "adds", "in the paper", "expert bytes per token, decode", "expert bytes, prefill",
                      "acceptance length", "perplexity", "tokens/s"], rows)
    facts = (f"\n{about['model']}, draft {about['draft']}, {about['texts']} held-out texts, prompts of {about['prompt_tokens']} "
             f"and continuations of {about['new_tokens']} tokens, trees of {about['tree']['size']} candidates; plain decoding "
             f"reads {about['plain_decoding_expert_kb_per_token'] / 1e3:.1f} MB of expert weights a token.\n")
    return table + facts + origin(about)


KINDS: dict[str, Callable[[dict[str, Any]], str]] = {f.__name__: f for f in (llama_cpp, kernels, speculation, techniques)}


def rendered(page: str) -> str:
    """The page with every table as its result file says."""
    def table(mark: re.Match[str]) -> str:
        found = json.loads((RESULTS / mark[3]).read_text(encoding="utf-8"))
        return f"{mark[1]}\n{KINDS[mark[2]](found)}\n{mark[4]}"

    return MARK.sub(table, page)


def main() -> None:
    stale = [page for page in PAGES if rendered(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]
    if "--check" in sys.argv:
        print("\n".join(f"{page.relative_to(ROOT)}: a table is not that of its result file" for page in stale))
        raise SystemExit(bool(stale))
    for page in stale:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
