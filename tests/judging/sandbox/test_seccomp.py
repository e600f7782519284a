from __future__ import annotations

import struct

import pytest

from lockstep.judging.sandbox import seccomp

ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decide(program, number, arch, argument=0, fourth=0):
    """The kernel's reading of the filter, one instruction after the other."""
    data = struct.pack("=iIQ6Q", number, arch, 0, argument, 0, 0, fourth, 0, 0)
    code = list(struct.iter_unpack("=HBBI", program))
    at, register = 0, 0
    while True:
        kind, true, false, k = code[at]
        if kind == 0x06:
            return k
        if kind == 0x20:
            register = struct.unpack_from("=I", data, k)[0]
            at += 1
        elif kind == 0x54:
            register &= k
            at += 1
        else:
            holds = {0x15: register == k, 0x35: register >= k}[kind]
            at += 1 + (true if holds else false)


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
@pytest.mark.parametrize("allow_shared_memory", [True, False])
def test_exactly_the_listed_calls_and_families_are_refused(machine, column, allow_shared_memory):
    program = seccomp.filter_program(machine, allow_shared_memory)
    refused = {numbers[column] for numbers in seccomp._REFUSED.values()}
    socket = seccomp._SOCKET[column]
    for number in range(600):
        if number != socket:
            assert decide(program, number, ARCH[machine]) == (REFUSE if number in refused else ALLOW), number
    for family in range(50):
        assert decide(program, socket, ARCH[machine], family) == (ALLOW if family in (1, 2, 10) else REFUSE), family
    for flags in range(64):  # MAP_SHARED is 1, MAP_ANONYMOUS 0x20
        refused = flags & 0x21 == 0x21 and not allow_shared_memory
        assert decide(program, seccomp._MMAP[column], ARCH[machine], 7, flags) == (REFUSE if refused else ALLOW), flags


def test_other_tables_of_system_calls_are_closed():
    program = seccomp.filter_program("x86_64", allow_shared_memory=True)
    assert decide(program, 0, 0x40000003) == KILL  # 32-bit calls
    assert decide(program, 0x40000000, ARCH["x86_64"]) == REFUSE  # x32
    assert decide(program, 0, ARCH["aarch64"]) == KILL


def test_the_columns_of_the_table_have_no_number_twice():
    for column in (0, 1):
        numbers = [pair[column] for pair in seccomp._REFUSED.values()]
        assert len(set(numbers)) == len(numbers)
