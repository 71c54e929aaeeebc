"""curves.png: loss over tokens, learning rate, throughput, drawn from metrics.jsonl."""

from pathlib import Path

from . import files


def draw_curves(rows: list[dict], path: Path, title: str) -> None:
    """Draw a run's metrics rows into ``path`` (PNG); nothing is written when there is nothing to draw."""
    from matplotlib.figure import Figure  # here, for a run that never draws should not pay a second of import

    def series(name: str) -> tuple[list[float], list[float]]:
        points = [(row["tokens"], row[name]) for row in rows if row.get(name) is not None and "tokens" in row]
        return [x for x, _ in points], [y for _, y in points]

    train, held_out = series("train/loss"), series("eval/loss")
    if not train[0] and not held_out[0]:
        return
    figure = Figure(figsize=(9, 7), layout="constrained")
    loss, rate, speed = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1])
    loss.plot(*train, color="tab:blue", alpha=0.6, linewidth=1, label="train")
    loss.plot(*held_out, color="tab:red", marker="o", markersize=4, label="validation")
    if held_out[1]:
        loss.annotate(
            f"{held_out[1][-1]:.3f}", (held_out[0][-1], held_out[1][-1]), (0, 8), textcoords="offset points", ha="right"
        )
    loss.set(ylabel="loss (nats per token)", title=title)
    loss.legend()
    rate.plot(*series("train/lr"), color="tab:green")
    rate.set(ylabel="learning rate", ylim=(0, None))
    speed.plot(*series("tokens_per_second"), color="tab:purple")
    speed.set(ylabel="tokens / s", xlabel="tokens", ylim=(0, None))
    for axes in (loss, rate, speed):
        axes.grid(alpha=0.3)
    with files.replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
