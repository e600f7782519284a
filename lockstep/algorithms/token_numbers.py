"""Random order without a state: a number that depends on a row's key and a position, and on nothing else."""

from torch import Tensor

from lockstep.algorithms.rows import Rows

_STEP = -7046029254386353131  # 2^64 / golden ratio, as a signed 64-bit number
_FACTORS = ((30, -4658895280553007687), (27, -7723592293110705685))


def token_numbers(row_keys: Tensor, rows: Rows) -> Tensor:
    """A 64-bit number [M] per token of the rows with these keys [B] int64, evenly spread.

    It is the same however the rows are batched, ordered or padded. The mixing is SplitMix64's (Steele, Lea, Flood 2014).
    """
    return _mix(rows.spread(_mix(row_keys * _STEP + 1)) ^ (rows.positions * _STEP + 1))


def _mix(x: Tensor) -> Tensor:
    for bits, factor in _FACTORS:
        x = (x ^ _shift(x, bits)) * factor
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Right shift that fills with zeros; torch's fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
