"""What `lockstep plan` prints: a row per stage, then what it comes to."""

from lockstep.planner import SAVE, SHARE, Contents, Device, Prediction, describe_chosen

GIB = 2**30
COLUMNS = {
    "weights": ("weights", "gathered"), "gradients": ("gradients",), "optimizer": ("moments",), "activations": ("activations",),
    "logits": ("logits",), "KV pool": ("cache",), "sync": ("copy",), "saving": ("saving",),
}  # fmt: skip
"""Column -> the last words of the parts that it adds up; the rollout's copy of the weights is what a sync writes."""


def columns(parts: Contents) -> dict[str, int]:
    """Column -> bytes."""
    found = dict.fromkeys(COLUMNS, 0)
    for name, size in parts.items():
        kind = "copy" if name == "rollout weights" else name.split()[-1]
        found[next(column for column, kinds in COLUMNS.items() if kind in kinds)] += size
    return found


def stages_table(found: Prediction) -> str:
    """Peak memory of one GPU, in GiB by part, and seconds, of each stage."""
    lines = [f"{'stage':16}{'peak GiB':>9}" + "".join(f"{name:>12}" for name in COLUMNS) + f"{'seconds':>10}"]
    for stage in dict.fromkeys([*found.seconds, *found.memory]):
        parts = found.memory.get(stage)
        sizes = [f"{size / GIB:.1f}" if size else "-" for size in columns(parts).values()] if parts else ["-"] * len(COLUMNS)
        seconds = f"{found.seconds[stage]:.2f}" if stage in found.seconds else "-"
        peak = f"{parts.total() / GIB:.1f}" if parts else "-"
        lines.append(f"{stage:16}{peak:>9}" + "".join(f"{size:>12}" for size in sizes) + f"{seconds:>10}")
    return "\n".join(line for line in lines if not line.endswith("-") or "old_log_prob" not in line)


def outcome(found: Prediction, device: Device, price: float | None, save_freq: int) -> list[str]:
    """What a step comes to, whether it fits, and what is decided for it."""
    speed = found.tokens / found.step_s
    line = f"a step: {found.step_s:.1f} s, {speed:,.0f} tokens/s ({speed / found.num_gpus:,.0f} per GPU)"
    if price is not None:
        cost = found.step_s / 3600 * found.num_gpus * price
        line += f", {cost:.4f} at {price:g} per GPU hour ({1000 * cost:.2f} for 1,000 steps)"
    lines = [line]
    if save_freq:
        lines.append(f"a save: the run waits {found.seconds[SAVE]:.1f} s, and is not counted in a step")
    stage = max(found.memory, key=lambda name: found.memory[name].total())
    lines.append(
        f"it fits: {found.peak / GIB:.1f} of {device.memory / GIB:.1f} GiB at the fullest ({stage}); plans fill {SHARE:.0%} and leave the "
        "rest to kernels, graphs and fragments"
    )
    for model, plan in found.plans.items():
        parts = [name for name, is_off in (("weights", plan.offload_weights), ("moments", plan.offload_moments)) if is_off]
        kept = f"{' and '.join(parts)} in host memory while idle" if parts else "on the GPU all the time"
        lines.append(f"  {model}: {kept}" + (f"; recomputed in the backward pass: {plan.recompute}" if plan.recompute else ""))
    lines += [f"  {chosen}" for chosen in (describe_chosen(found.chosen),) if chosen is not None]
    if found.host:
        lines.append(f"  host memory for what is offloaded: {found.host / GIB:.1f} GiB per GPU")
    return lines
