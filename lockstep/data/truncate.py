"""What is cut off a row that is too long."""

from lockstep.errors import ConfigError

TRUNCATIONS = ("error", "left", "right", "middle")


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """At most `limit` of the ids: "left" cuts the start off, "right" the end, "middle" keeps both ends (the end has
    the odd one).
    """
    if side not in TRUNCATIONS[1:]:
        raise ConfigError(f"truncation side must be one of {TRUNCATIONS[1:]}, not {side!r}")
    num_cut = len(ids) - limit
    if num_cut <= 0:
        return ids
    head = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return ids[:head] + ids[head + num_cut :]
