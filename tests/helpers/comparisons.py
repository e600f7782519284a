"""A small comparison, made by hand."""

from lockstep.tools.compare.report import AlgorithmResult, Comparison, Excerpt, TokenPush


def make_comparison(token="t", name="mine", rows=4):
    """Three algorithms: grpo, `name`, and one whose gradient is zero."""

    def push(value):
        return TokenPush(0, 1, token, "before ", " after", value, 0.5, 1.0, 1.5)

    def result(name, norm, scale, effective):
        up, down = ([push(scale)], [push(-scale)]) if scale else ([], [])
        pushes = [scale * (-1) ** i / (1 + i) for i in range(rows)]
        return AlgorithmResult(name, {}, 0.1, norm, 0.25, 0.125, 0.0, 0.5, 1.0, effective, scale, up, down, pushes)

    return Comparison(
        source={
            "rows": rows, "prompts": 2, "tokens": 10, "step": 7, "model": "folder", "drift": 1e-3, "drift_algorithm": "grpo",
            "largest_log_ratio": 0.5,
        },
        results=[result("grpo", 1.234, 2.0, 0.5), result(name, 0.5, 1.0, 0.4), result("silent_one", 0.0, 0.0, None)],
        cosines=[[1.0, -0.75, None], [-0.75, 1.0, None], [None, None, None]],
        row_prompts=[str(i // 2) for i in range(rows)],
        row_scores=[float(i % 2) for i in range(rows)],
        excerpts=[Excerpt(0, "question " + token, 1.0, 3, [token, "b c"], [[2.0, -2.0], [0.1, 0.0], [0.0, 0.0]], True)],
        not_comparable=[("ppo", "it reads the column values")],
    )  # fmt: skip
