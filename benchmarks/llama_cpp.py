"""Packed checkpoints against llama.cpp Q4_0: the same shapes, random weights, the same threads, runs that take turns.

    python benchmarks/llama_cpp.py --work FOLDER [--shapes granite-1b-a400m,olmoe-1b-7b] [--threads 2,1] [--json FILE]

FOLDER holds what is made once: llama.cpp, built from the source package of llama-cpp-python, and the models (5 GB for
each of both).
Speed only: the weights are random, on both sides with the share of common experts that `conversion.sources.dummy` gives.

Everything is measured with the first number of threads, decoding alone with the others. Ours is measured without a policy
(exact); a verify stage gives the logits of all its tokens, llama.cpp's of the last alone.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig

from common import about, packed_model, save
from edgexpert.conversion.sources.dummy import NIBBLE_PAIRS, STD, STD_OF_CODES, dummy_config, random_embedding
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.kernels import native
from edgexpert.model.host import HostedModel
from edgexpert.model.loading import load_model

PACKAGE = "llama-cpp-python"
CONTEXT = 512  # tokens before a verify stage
TARGETS = {"decode": 1.5, "decode after 512": 1.5, "prefill 64": 3.0, "prefill 512": 3.0, "verify 64": 3.0}


def build_llama_bench(work: Path) -> Path:
    """Downloads and builds llama.cpp once; returns its llama-bench."""
    found = sorted(work.glob("llama_cpp_python-*/vendor/llama.cpp/build/bin/llama-bench"))
    if found:
        return found[-1]
    download = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", PACKAGE, "-d", str(work)]
    subprocess.run([sys.executable, "-m", "pip", *download], check=True)
    archive = sorted(work.glob("llama_cpp_python-*.tar.gz"))[-1]
    with tarfile.open(archive) as file:
        file.extractall(work, filter="data")
    source = work / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=OFF"]
    subprocess.run(["cmake", "-S", source, "-B", source / "build", *options], check=True)
    subprocess.run(["cmake", "--build", source / "build", "--target", "llama-bench", "--parallel"], check=True)
    return source / "build" / "bin" / "llama-bench"


def write_gguf(config: PreTrainedConfig, path: Path) -> None:
    """A model of random Q4_0 weights in llama.cpp's naming."""
    granite = config.model_type == "granitemoe"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    hidden, inner, layers, vocab = config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size
    experts = config.num_local_experts if granite else config.num_experts
    dim = hidden // heads
    writer = GGUFWriter(path, "granitemoe" if granite else "olmoe")
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(dim)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(vocab)
    if granite:
        writer.add_logit_scale(config.logits_scaling)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
    random, Q4_0 = np.random.Generator(np.random.SFC64(0)), GGMLQuantizationType.Q4_0

    def quantised(name: str, *shape: int) -> None:
        blocks = NIBBLE_PAIRS[random.integers(0, 256, (int(np.prod(shape)) // 32, 18), dtype=np.uint8)]
        blocks[:, :2] = np.frombuffer(np.float16(STD / STD_OF_CODES[4]).tobytes(), dtype=np.uint8)
        writer.add_tensor(name, blocks.reshape(*shape[:-1], shape[-1] // 32 * 18), raw_dtype=Q4_0)

    def floats(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32) * STD + (len(shape) == 1))

    embedding = random_embedding(vocab, hidden, torch.Generator().manual_seed(0)).numpy()
    writer.add_tensor("token_embd.weight", quantize(embedding, Q4_0), raw_dtype=Q4_0)
    floats("output_norm.weight", hidden)
    if not granite:
        quantised("output.weight", vocab, hidden)
    for layer in range(layers):
        block = f"blk.{layer}"
        floats(f"{block}.attn_norm.weight", hidden)
        floats(f"{block}.ffn_norm.weight", hidden)
        for name, outputs in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim), ("output", hidden)):
            quantised(f"{block}.attn_{name}.weight", outputs, hidden)
        if not granite:
            floats(f"{block}.attn_q_norm.weight", heads * dim)
            floats(f"{block}.attn_k_norm.weight", kv_heads * dim)
        floats(f"{block}.ffn_gate_inp.weight", experts, hidden)
        quantised(f"{block}.ffn_gate_exps.weight", experts, inner, hidden)
        quantised(f"{block}.ffn_up_exps.weight", experts, inner, hidden)
        quantised(f"{block}.ffn_down_exps.weight", experts, hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def models_of(shape: str, work: Path) -> tuple[Path, Path]:
    """A packed checkpoint and a GGUF file of random weights in one shape, made once."""
    gguf = work / f"{shape}.gguf"
    if not gguf.exists():
        unfinished = gguf.with_suffix(".unfinished")
        write_gguf(dummy_config(shape), unfinished)
        unfinished.rename(gguf)
    return packed_model(shape, work), gguf


class Ours:
    """Milliseconds of what is compared, on a packed checkpoint."""

    def __init__(self, packed: Path, decode_tokens: int) -> None:
        self.host = HostedModel(load_model(str(packed)).model)
        self.decode_tokens = decode_tokens
        self.random = torch.Generator().manual_seed(0)

    def _tokens(self, count: int) -> torch.Tensor:
        return torch.randint(0, self.host.config.vocab_size, (count,), generator=self.random)

    def decode(self, context: int = 1) -> float:
        cache = self.host.new_cache(self.decode_tokens + context)
        self.host.run(Stage.prefill(self._tokens(context)), cache)
        tokens, start = self._tokens(self.decode_tokens).tolist(), time.perf_counter()
        for token in tokens:
            self.host.run(Stage.verify(TokenTree.of_root(token), cache.length), cache)
        return (time.perf_counter() - start) / self.decode_tokens * 1e3

    def prefill(self, count: int) -> float:
        tokens, cache, start = self._tokens(count), self.host.new_cache(count), time.perf_counter()
        self.host.run(Stage.prefill(tokens), cache)
        return (time.perf_counter() - start) * 1e3

    def verify(self, count: int) -> float:
        """A tree of ``count`` tokens: every node but the root has a random earlier parent."""
        cache = self.host.new_cache(CONTEXT + count)
        self.host.run(Stage.prefill(self._tokens(CONTEXT)), cache)
        parents = [-1, *(int(torch.randint(0, node, (1,), generator=self.random)) for node in range(1, count))]
        tree = TokenTree(self._tokens(count), torch.tensor(parents), torch.zeros(count))
        start = time.perf_counter()
        self.host.run(Stage.verify(tree, CONTEXT), cache)
        return (time.perf_counter() - start) * 1e3


class Theirs:
    """The same of llama.cpp, by llama-bench."""

    def __init__(self, bench: Path, gguf: Path, threads: int, decode_tokens: int) -> None:
        self.command = [str(bench), "-m", str(gguf), "-t", str(threads), "-r", "1", "-o", "json"]
        self.decode_tokens = decode_tokens

    def _run(self, *options: str) -> dict[str, Any]:
        result = subprocess.run([*self.command, *options], check=True, capture_output=True, text=True)
        row: dict[str, Any] = json.loads(result.stdout)[-1]
        return row

    def decode(self, context: int = 0) -> float:
        return 1e3 / self._run("-p", "0", "-n", str(self.decode_tokens), "-d", str(context))["avg_ts"]

    def prefill(self, count: int) -> float:
        return count * 1e3 / self._run("-p", str(count), "-n", "0")["avg_ts"]

    def verify(self, count: int) -> float:
        return count * 1e3 / self._run("-p", str(count), "-n", "0", "-d", str(CONTEXT))["avg_ts"]


def main(
    work: Annotated[Path, typer.Option(metavar="FOLDER", help="Where llama.cpp and the models are made once.")],
    shapes: str = "granite-1b-a400m,olmoe-1b-7b",
    threads: str = "2,1",
    repetitions: int = 5,
    decode_tokens: int = 64,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write figures and machine here.")] = None,
) -> None:
    """Compare packed checkpoints with llama.cpp."""
    work.mkdir(parents=True, exist_ok=True)
    bench = build_llama_bench(work)
    counts = [int(count) for count in threads.split(",")]
    rows = []
    for shape in shapes.split(","):
        packed, gguf = models_of(shape, work)
        ours = Ours(packed, decode_tokens)
        for count in counts:
            native.set_threads(count)
            theirs = Theirs(bench, gguf, count, decode_tokens)
            measures: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
                "decode": (ours.decode, theirs.decode),
                "decode after 512": (lambda o=ours: o.decode(CONTEXT), lambda t=theirs: t.decode(CONTEXT)),
                "prefill 64": (lambda o=ours: o.prefill(64), lambda t=theirs: t.prefill(64)),
                "prefill 512": (lambda o=ours: o.prefill(512), lambda t=theirs: t.prefill(512)),
                "verify 64": (lambda o=ours: o.verify(64), lambda t=theirs: t.verify(64)),
            }
            for name in measures if count == counts[0] else ["decode"]:
                our_run, their_run = measures[name]
                times = []
                for _ in range(repetitions):
                    our_run()  # as llama-bench does before it measures
                    times.append((our_run(), their_run()))
                mine, peer = (statistics.median(column) for column in zip(*times, strict=True))
                rows.append({"shape": shape, "measure": name, "threads": count, "ours_ms": mine, "llama_cpp_ms": peer,
                             "ratio": peer / mine, "target": TARGETS[name], "runs": times})
        del ours
        if json_file is not None:
            save(json_file, {"about": about(peer=bench.parents[4].name, weights="random"), "rows": rows})
    table = Table("shape", "measure", "threads", "ours", "llama.cpp Q4_0", "ratio", "target")
    for row in rows:
        times = (f"{row[whose]:.1f} ms" for whose in ("ours_ms", "llama_cpp_ms"))
        table.add_row(row["shape"], row["measure"], str(row["threads"]), *times, f"{row['ratio']:.2f}", f">= {row['target']}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
