"""Deadlines for worker groups that tests make themselves: long enough for a loaded machine."""

TIMEOUTS = {"timeout_s": 300.0, "start_timeout_s": 120.0}
