"""The system calls that a sandboxed program is refused, as the filter that bubblewrap installs.

Namespaces and limits do most of the work. The filter closes what they leave open: memory that belongs to no process and so is not counted
(memfd, System V shared memory, message queues, pages given to a pipe; without a control group also shared memory without a file),
address families that ignore network namespaces (vsock reaches the host of a virtual machine), looking into other processes, and parts
of the kernel that no program under test needs.

The filter is classic BPF over `struct seccomp_data` {int nr; u32 arch; u64 instruction_pointer; u64 args[6]}.
"""

import errno
import struct

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> AUDIT_ARCH_*, column in the tables below."""

_TABLE = """
    vmsplice 278 75, memfd_create 319 279, memfd_secret 447 447, shmget 29 194, msgget 68 186, semget 64 190, mq_open 240 180,
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, pidfd_getfd 438 438, kcmp 312 272, keyctl 250 219,
    add_key 248 217, request_key 249 218, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425,
    unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, open_tree 428 428, move_mount 429 429,
    fsopen 430 430, fsmount 432 432, mount_setattr 442 442, name_to_handle_at 303 264, open_by_handle_at 304 265,
    init_module 175 105, finit_module 313 273, kexec_load 246 104, syslog 103 116, quotactl 179 60
"""
"""System call, and its number in each column."""
_REFUSED = {name: tuple(map(int, numbers)) for name, *numbers in map(str.split, _TABLE.split(","))}
_SOCKET = (41, 198)
_MMAP = (9, 222)
_SHARED_ANONYMOUS = 0x21  # MAP_SHARED | MAP_ANONYMOUS
_FAMILIES = (1, 2, 10)  # unix, IPv4, IPv6: all three end at the network namespace
_X32 = 0x40000000  # the second table of system calls on x86_64

_LOAD = 0x20
_AND = 0x54
_EQUAL = 0x15
_AT_LEAST = 0x35
_RETURN = 0x06
_NR = 0
_ARCH = 4
_FIRST_ARGUMENT = 16
_FOURTH_ARGUMENT = 40
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_REFUSE = 0x00050000 | errno.EPERM


def machines() -> list[str]:
    """The machines (as `platform.machine()` names them) that there is a filter for."""
    return list(_ARCHITECTURES)


def filter_program(machine: str, allow_shared_memory: bool) -> bytes:
    """The filter, as an array of `struct sock_filter` {u16 code; u8 jump_true; u8 jump_false; u32 k}.

    Without `allow_shared_memory`, mmap of shared memory without a file is refused: a page of it that no process maps any more, while
    the rest is mapped, is counted nowhere.
    """
    arch, column = _ARCHITECTURES[machine]
    refused = [numbers[column] for numbers in _REFUSED.values()]
    # (code, k, target if true, target if false); a target is None for the next line, the lines to skip, or the action to end with.
    shared_memory: list[tuple[int, int, int | None, int | None]] = [
        (_EQUAL, _MMAP[column], None, 3),
        (_LOAD, _FOURTH_ARGUMENT, None, None),
        (_AND, _SHARED_ANONYMOUS, None, None),
        (_EQUAL, _SHARED_ANONYMOUS, _REFUSE, _ALLOW),
    ]
    lines: list[tuple[int, int, int | None, int | None]] = [
        (_LOAD, _ARCH, None, None),
        (_EQUAL, arch, None, _KILL),
        (_LOAD, _NR, None, None),
        (_AT_LEAST, _X32, _REFUSE, None),
        *((_EQUAL, number, _REFUSE, None) for number in refused),
        *([] if allow_shared_memory else shared_memory),
        (_EQUAL, _SOCKET[column], None, _ALLOW),
        (_LOAD, _FIRST_ARGUMENT, None, None),
        *((_EQUAL, family, _ALLOW, None) for family in _FAMILIES),
    ]
    ends = [_REFUSE, _ALLOW, _KILL]  # what falls through is a socket of another family

    def jump(here: int, target: int | None) -> int:
        return target or 0 if target in (None, 3) else len(lines) + ends.index(target) - here - 1

    code = [(kind, jump(i, true), jump(i, false), k) for i, (kind, k, true, false) in enumerate(lines)]
    code += [(_RETURN, 0, 0, action) for action in ends]
    return b"".join(struct.pack("=HBBI", *line) for line in code)
