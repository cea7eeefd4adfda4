"""Scores of predictions against measurements, as numbers, table and picture. Pure."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from ._measure import STALL_FACTOR, STALL_US, Row
from .machine import MachineProfile

WANTED = {
    "MAE of the mean issue time": "0.5 us",
    "onset right": "95%",
    "R between held-out trains and the profile": "3%",
    "shadow, median relative error": "20%",
}


def law_scores(predicted: np.ndarray, measured: np.ndarray, T0: np.ndarray) -> Row:
    """MAE, bias, p95 of the absolute error (us), R^2, and onset as a classifier.

    A point is stalled beyond 1.25 T0 + 0.1 us, predicted and measured alike.
    """
    error = predicted - measured
    limit = STALL_FACTOR * T0 + STALL_US
    says, is_so = predicted > limit, measured > limit
    hits = float(np.sum(says & is_so))
    variance = float(np.sum((measured - measured.mean()) ** 2))
    return {
        "points": len(measured),
        "mae_us": float(np.mean(np.abs(error))),
        "bias_us": float(np.mean(error)),
        "p95_us": float(np.percentile(np.abs(error), 95)),
        "r2": 1.0 - float(np.sum(error**2)) / variance if variance > 0 else float("nan"),
        "onset_right": float(np.mean(says == is_so)),
        "onset_precision": hits / float(np.sum(says)) if says.any() else float("nan"),
        "onset_recall": hits / float(np.sum(is_so)) if is_so.any() else float("nan"),
    }


def _columns(rows: list[Row], law: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([row["predicted"][law] for row in rows]),
        np.array([row["measured"]["mean"] for row in rows]),
        np.array([row["T0_us"] for row in rows]),
    )


def rate_errors(rows: list[Row], profile: MachineProfile) -> np.ndarray:
    """Relative errors of R(K) on held-out trains that keep the link busy all the time."""
    errors = []
    for row in rows:
        if row["family"] not in ("train", "both") or row["gap_us"] > 0.65 * row["V_over_R_us"]:
            continue
        if row["measured"]["mean"] <= STALL_FACTOR * row["T0_us"] + STALL_US:
            continue
        mechanism = profile.mechanism(row["mechanism"])
        curve = mechanism.R_GBps
        if row["family"] == "both" and mechanism.R_both_GBps is not None:
            curve = mechanism.R_both_GBps
        errors.append(row["measured"]["R_GBps"] / float(curve(row["K"])) - 1.0)
    return np.array(errors)


def shadow_errors(shadows: list[Row]) -> dict[str, Row]:
    """Relative errors inside the shadow (measured beyond twice the base), by mechanism/probe."""
    result: dict[str, Row] = {}
    for key in sorted({f"{s['mechanism']}/{s['probe']}" for s in shadows}):
        some = [s for s in shadows if f"{s['mechanism']}/{s['probe']}" == key]
        inside = [s for s in some if s["measured_us"] > 2 * s["base_us"]]
        errors = [abs(s["predicted_us"] / s["measured_us"] - 1.0) for s in inside]
        both = [
            (s["predicted_us"] > 2 * s["base_us"]) == (s["measured_us"] > 2 * s["base_us"])
            for s in some
        ]
        result[key] = {
            "points": len(inside),
            "median": float(np.median(errors)) if errors else float("nan"),
            "p95": float(np.percentile(errors, 95)) if errors else float("nan"),
            "in_shadow_right": float(np.mean(both)),
        }
    return result


def score(rows: list[Row], shadows: list[Row], profile: MachineProfile) -> dict[str, Any]:
    """All scores: by family and law, by mechanism, of R, of the shadow, and the worst points."""
    laws = list(rows[0]["predicted"])
    families = sorted({row["family"] for row in rows})
    by_family = {
        family: {
            law: law_scores(*_columns([row for row in rows if row["family"] == family], law))
            for law in laws
        }
        for family in families
    }
    by_mechanism = {
        mechanism: law_scores(
            *_columns([row for row in rows if row["mechanism"] == mechanism], "ours")
        )
        for mechanism in sorted({row["mechanism"] for row in rows})
    }
    rates = rate_errors(rows, profile)
    worst = sorted(rows, key=lambda row: -abs(row["predicted"]["ours"] - row["measured"]["mean"]))[
        :12
    ]
    inside = [s for s in shadows if s["measured_us"] > 2 * s["base_us"]]
    shadow_all = [abs(s["predicted_us"] / s["measured_us"] - 1.0) for s in inside]
    return {
        "all": {law: law_scores(*_columns(rows, law)) for law in laws},
        "families": by_family,
        "mechanisms": by_mechanism,
        "rate": {
            "points": len(rates),
            "median": float(np.median(np.abs(rates))) if len(rates) else float("nan"),
            "p95": float(np.percentile(np.abs(rates), 95)) if len(rates) else float("nan"),
        },
        "shadow": shadow_errors(shadows),
        "shadow_all": {
            "points": len(inside),
            "median": float(np.median(shadow_all)) if shadow_all else float("nan"),
            "within_20_percent": (
                float(np.mean(np.array(shadow_all) <= 0.2)) if shadow_all else float("nan")
            ),
        },
        "worst": worst,
    }


def _law_rows(scores: dict[str, Row]) -> list[str]:
    lines = [
        "| law | points | MAE us | bias us | p95 us | R^2 | onset right | precision | recall |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for law, s in scores.items():
        lines.append(
            f"| {law} | {s['points']} | {s['mae_us']:.2f} | {s['bias_us']:+.2f} | "
            f"{s['p95_us']:.2f} | {s['r2']:.3f} | {s['onset_right']:.1%} | "
            f"{s['onset_precision']:.1%} | {s['onset_recall']:.1%} |"
        )
    return lines


def markdown(scores: dict[str, Any], profile: MachineProfile, families: dict[str, str]) -> str:
    """The report."""
    lines = [
        f"# Held-out validation on {profile.gpu.name} x {profile.world}",
        "",
        f"Profile `{profile.name}` of {profile.date}; predictions were written before measuring. "
        "Issue time is the mean over all bursts of all producers in a fixed time window.",
        "",
        "| wanted | asked for | found |",
        "|---|---|---|",
        f"| MAE of the mean issue time | 0.5 us | {scores['all']['ours']['mae_us']:.2f} us |",
        f"| onset right | 95% | {scores['all']['ours']['onset_right']:.1%} |",
        f"| R of held-out trains against the profile | 3% | median {scores['rate']['median']:.1%}, "
        f"95% of {scores['rate']['points']} points within {scores['rate']['p95']:.1%} |",
        f"| shadow, relative error | 20% | median {scores['shadow_all']['median']:.0%}, "
        f"{scores['shadow_all']['within_20_percent']:.0%} of "
        f"{scores['shadow_all']['points']} points within 20% |",
        "",
        "## All points",
        "",
        *_law_rows(scores["all"]),
    ]
    for family, text in families.items():
        if family in scores["families"]:
            lines += ["", f"## {text.capitalize()}", "", *_law_rows(scores["families"][family])]
    lines += ["", "## Our law by mechanism", "", *_law_rows(scores["mechanisms"])]
    lines += [
        "",
        "## Shadow",
        "",
        "| burst/operation | points in the shadow | median error | p95 | in or out of it right |",
        "|---|---|---|---|---|",
    ]
    for key, s in scores["shadow"].items():
        lines.append(
            f"| {key} | {s['points']} | {s['median']:.0%} | {s['p95']:.0%} | "
            f"{s['in_shadow_right']:.0%} |"
        )
    lines += [
        "",
        "## Where our law is worst",
        "",
        "| family | mechanism | K | KiB | gap us | predicted us | measured us |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in scores["worst"]:
        lines.append(
            f"| {row['family']} | {row['mechanism']} | {row['K']} | {row['B'] // 1024} | "
            f"{row['gap_us']:.1f} | {row['predicted']['ours']:.2f} | "
            f"{row['measured']['mean']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def picture(rows: list[Row], profile: MachineProfile, path: pathlib.Path) -> None:
    """Predicted against measured, one panel per law."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    laws = list(rows[0]["predicted"])
    figure, panels = pyplot.subplots(2, 3, figsize=(11, 7), dpi=110, sharex=True, sharey=True)
    for law, axes in zip(laws, panels.flat, strict=True):
        predicted, measured, _ = _columns(rows, law)
        aligned = np.array([row["family"] == "aligned" for row in rows])
        for mask, colour, label in (
            (~aligned, "tab:blue", "free running"),
            (aligned, "tab:red", "in step"),
        ):
            axes.plot(
                np.maximum(measured[mask], 0.05),
                np.maximum(predicted[mask], 0.05),
                ".",
                ms=4,
                color=colour,
                label=label,
            )
        axes.plot([0.05, 60], [0.05, 60], "k-", lw=0.6)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(f"{law}: MAE {np.mean(np.abs(predicted - measured)):.2f} us")
        axes.grid(alpha=0.3)
    panels[0, 0].legend()
    figure.supxlabel("measured issue time, us")
    figure.supylabel("predicted, us")
    figure.suptitle(f"Held-out points, {profile.gpu.name}")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
