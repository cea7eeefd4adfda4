"""Attention layers of public diffusion transformers, for benchmarks and `xstage bench --model`.

Shapes are facts of the published models: their configuration files and papers.
"""

from __future__ import annotations

import dataclasses

from .planner.attention import even_split
from .planner.attention_choice import AttentionProblem


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """One self-attention layer of a model at one resolution.

    Attributes
    ----------
    heads, head_dim, layers : int
        Of the model; all layers are alike.
    rows : int
        Tokens of image or video.
    text_rows : int
        Text tokens that take part in the same attention (joint); 0 where text has a
        cross-attention of its own.
    what : str
        Resolution and frames.
    """

    heads: int
    head_dim: int
    layers: int
    rows: int
    text_rows: int
    what: str

    @property
    def total_rows(self) -> int:
        """Rows of q, k and v in all."""
        return self.rows + self.text_rows

    def problem(self, world: int, *, proxy_world: int | None = None) -> AttentionProblem:
        """The layer on a group of ranks.

        Parameters
        ----------
        world : int
            Ranks that run it.
        proxy_world : int, optional
            Give a rank the head count that it would have among so many ranks, e.g. 8 on a machine
            of 2: the compute load of one GPU among 8, though half of the rows stay at home here
            and one eighth there.
        """
        shares = even_split(self.heads, proxy_world or world)[:world]
        return AttentionProblem(
            heads=sum(shares),
            kv_heads=sum(shares),
            head_dim=self.head_dim,
            rows=even_split(self.total_rows, world),
            heads_per_rank=shares,
        )


MODELS: dict[str, ModelShape] = {
    "wan2.1-1.3b-480p": ModelShape(12, 128, 30, 32_760, 0, "832 x 480, 81 frames"),
    "wan2.2-480p": ModelShape(40, 128, 40, 32_760, 0, "832 x 480, 81 frames"),
    "wan2.2-720p": ModelShape(40, 128, 40, 75_600, 0, "1280 x 720, 81 frames"),
    "wan2.2-ti2v-5b": ModelShape(24, 128, 30, 27_280, 0, "1280 x 704, 121 frames"),
    "hunyuan": ModelShape(24, 128, 60, 118_800, 256, "1280 x 720, 129 frames"),
    "hunyuan-540p": ModelShape(24, 128, 60, 67_320, 256, "960 x 544, 129 frames"),
    "flux": ModelShape(24, 128, 57, 4_096, 512, "1024 x 1024"),
    "flux-2048": ModelShape(24, 128, 57, 16_384, 512, "2048 x 2048"),
    "flux.2": ModelShape(48, 128, 56, 4_096, 512, "1024 x 1024"),
    "qwen-image": ModelShape(24, 128, 60, 6_889, 111, "1328 x 1328"),
    "cogvideox": ModelShape(48, 64, 42, 17_550, 226, "720 x 480, 49 frames"),
    "cogvideox-2b": ModelShape(30, 64, 30, 17_550, 226, "720 x 480, 49 frames"),
    "sd3.5-large": ModelShape(38, 64, 38, 4_096, 333, "1024 x 1024"),
    "sd3-medium": ModelShape(24, 64, 24, 4_096, 333, "1024 x 1024"),
    "mochi": ModelShape(24, 128, 48, 44_520, 256, "848 x 480, 163 frames"),
}


def shape(name: str) -> ModelShape:
    """A model's layer by name.

    Raises
    ------
    KeyError
        Lists the names.
    """
    if name not in MODELS:
        raise KeyError(f"xstage: model: expected one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]
