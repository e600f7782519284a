"""Programs that mean harm. Each must end within its limits, learn nothing and change nothing outside."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lockstep.judging.sandbox import LocalSandbox, ProgramLimits
from lockstep.judging.sandbox.cgroup import KERNEL_MB

MARK = "86399.731"


def test_a_fork_bomb_is_stopped_by_the_limit_on_processes(sandbox):
    result = sandbox.run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", wall_s=1.0)
    assert result.status in ("timeout", "processes", "memory")
    assert sandbox.run("print('still here')").stdout == "still here\n"
    counted = "import os, time\nn = 0\ntry:\n    while os.fork(): n += 1\n    time.sleep(9)\nexcept OSError: print(n)"
    assert int(sandbox.run(counted).stdout) <= sandbox.limits.num_processes


def test_threads_count_as_processes(sandbox):
    program = "import threading, time\nfor i in range(1000): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    result = sandbox.run(program)
    assert result.status in ("error", "memory")
    assert "can't start new thread" in result.stderr or "MemoryError" in result.stderr


def test_a_zombie_storm_is_stopped(sandbox):
    result = sandbox.run("import os\nwhile True:\n    if os.fork() == 0: os._exit(0)")
    assert result.status == "error"
    assert "BlockingIOError" in result.stderr


def test_an_endless_loop_ends_at_the_wall_time(sandbox):
    began = time.monotonic()
    result = sandbox.run("while True: pass", wall_s=0.5)
    assert (result.status, result.exit_code) == ("timeout", None)
    assert 0.5 <= result.seconds < 4
    assert time.monotonic() - began < 5


def test_cpu_time_is_limited_for_a_program_that_computes_in_many_threads(sandbox):
    # hashing releases the interpreter lock: two threads use two seconds a second
    program = (
        "import hashlib, threading, resource\n"
        "assert resource.getrlimit(resource.RLIMIT_CPU) == (1, 1)\n"
        "def work():\n    while True: hashlib.sha256(bytes(10**6)).digest()\n"
        "threads = [threading.Thread(target=work) for _ in range(2)]\n[t.start() for t in threads]"
    )
    assert sandbox.run(program, wall_s=1.0).status in ("killed", "timeout")


@pytest.mark.parametrize(
    "program",
    [
        "hold = []\nwhile True: hold.append(bytearray(10**6))",
        "import mmap\nhold = []\nwhile True:\n    m = mmap.mmap(-1, 10**7)\n    m.write(bytes(10**7))\n    hold.append(m)",
        "x = 'a'\nwhile True: x += x",
    ],
)
def test_memory_of_one_process_is_limited(sandbox, program):
    assert sandbox.run(program).status in ("memory", "error")  # mmap says OSError


UNSEEN = """
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
for i in range(60):
    place = libc.mmap(None, 32 << 20, 3, 0x21, -1, 0)
    if place == 2**64 - 1: raise MemoryError
    ctypes.memset(place, 1, 32 << 20)
    libc.munmap(place + 4096, (32 << 20) - 4096)  # the pages stay: the first one is still mapped
time.sleep(60)
"""
DEVICE = """
import mmap, os, time
zero = os.open('/dev/zero', os.O_RDWR)
for i in range(20):
    if os.fork() == 0:
        hold = []
        for j in range(20):
            try: hold.append(mmap.mmap(zero, 8 << 20))
            except OSError: os._exit(1)  # the parent says so: their tracebacks would mix
            hold[-1].write(bytes(8 << 20))
            hold[-1].madvise(mmap.MADV_DONTNEED)
        time.sleep(60)
    elif os.waitpid(-1, os.WNOHANG)[0]: raise MemoryError
time.sleep(1)
if os.waitpid(-1, os.WNOHANG)[0]: raise MemoryError
time.sleep(60)
"""
SOCKETS = """
import os, socket, time
for i in range(20):
    if os.fork() == 0:
        hold = []
        for j in range(25):
            hold += socket.socketpair()
            hold[-1].setblocking(False)
            hold[-1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 23)
            try:
                while True: hold[-1].send(bytes(65536))
            except OSError: pass
        time.sleep(60)
time.sleep(60)
"""


@pytest.fixture(params=["control group", "watched"])
def bounded(request, sandbox):
    """The sandbox as the machine lets it be, and as it is without control groups."""
    if request.param == "control group":
        yield sandbox
        return
    with LocalSandbox(limits=sandbox.limits) as made:
        made.groups = None
        yield made


@pytest.mark.parametrize("program", [UNSEEN, DEVICE, SOCKETS], ids=["unmapped pages", "device", "sockets"])
def test_memory_that_no_process_shows_is_limited(bounded, program):
    before = _shared_memory()
    result = bounded.run(program, wall_s=20)
    assert result.status == "memory", result
    assert _shared_memory() - before < 1 << 30  # nothing stays


def _shared_memory():
    """Bytes of the machine's memory that belong to no process: what such programs would leave."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(lines[name].split()[0]) << 10 for name in ("Shmem", "SUnreclaim"))


def test_a_control_group_bounds_the_whole_tree_and_is_gone_afterwards(sandbox):
    if sandbox.groups is None:
        pytest.skip("this machine lets us make no control groups")
    seen, done = [0], threading.Event()

    def watch():
        while not done.is_set():
            for folder in sandbox.groups.folder.glob(f"lockstep-sandbox-{os.getpid()}-*"):
                # The most that was ever used stays to be read a little longer than what is used.
                for name in ("memory.max_usage_in_bytes", "memory.usage_in_bytes", "memory.peak", "memory.current"):
                    with suppress(OSError, ValueError):
                        seen.append(int((folder / name).read_text()))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert sandbox.run(UNSEEN, wall_s=20).status == "memory"
    finally:
        done.set()
        watcher.join()
    limits = sandbox.limits
    assert 200 << 20 < max(seen) <= (limits.memory_mb + limits.scratch_mb + KERNEL_MB) << 20
    assert not list(sandbox.groups.folder.glob(f"lockstep-sandbox-{os.getpid()}-*"))


@pytest.mark.parametrize("kind", ["bytearray(60 * 10**6)", "mmap.mmap(-1, 60 * 10**6, flags=mmap.MAP_PRIVATE)"])
def test_memory_of_many_small_processes_is_limited(sandbox, kind):
    program = (
        f"import mmap, os, time\nfor i in range(20):\n    if os.fork() == 0:\n        x = {kind}\n"
        "        for at in range(0, 60 * 10**6, 4096): x[at] = 1\n        time.sleep(60)\ntime.sleep(60)"
    )
    assert sandbox.run(program, wall_s=20).status == "memory"


def test_a_shared_page_counts_once(sandbox):
    program = "import os, time\nx = b'1' * 10**8\nfor i in range(6):\n    if os.fork() == 0: time.sleep(0.5); os._exit(0)\ntime.sleep(0.6)"
    assert sandbox.run(program).status == "ok"


def test_memory_that_belongs_to_no_process_is_refused(sandbox):
    program = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "try: os.memfd_create('x')\nexcept PermissionError: print('refused')\n"
        "print('refused' if libc.shmget(0, 1000, 0o1600) == -1 and ctypes.get_errno() == 1 else 'given')"
    )
    assert sandbox.run(program).stdout == "refused\nrefused\n"


def test_the_disk_cannot_be_filled(sandbox):
    program = (
        "import os\nfor folder in ('/tmp', '/dev/shm', '/dev', '/', '/var/tmp', '/run'):\n"
        "    total = 0\n    try:\n        for i in range(100):\n            with open(f'{folder}/{i}', 'wb') as file:\n"
        "                for _ in range(10): total += file.write(bytes(10**6)); file.flush()\n"
        "    except OSError: pass\n    print(folder, total)"
    )
    written = dict(line.split() for line in sandbox.run(program, wall_s=10).stdout.splitlines())
    assert 10e6 < int(written.pop("/tmp")) <= 17e6
    assert set(written.values()) == {"0"}


def test_one_file_cannot_be_larger_than_the_scratch_folder(sandbox):
    result = sandbox.run("import os\nwith open('big', 'wb') as file: file.truncate(10**9)")
    assert result.status in ("error", "killed")


def test_empty_files_are_counted(sandbox):
    assert sandbox.run("for i in range(10**7): open(f'/tmp/{i}', 'w').close()", wall_s=20).status == "files"


def test_a_gigabyte_of_output_is_cut_and_fills_nothing(sandbox):
    before = psutil.Process().memory_info().rss
    for stream in ("stdout", "stderr"):
        result = sandbox.run(f"import sys\nfor i in range(1000): sys.{stream}.write('x' * 10**6)")
        assert result.status == "output"
        assert getattr(result, stream) == "x" * sandbox.limits.output_bytes + "\n[cut: output limit]"
    assert psutil.Process().memory_info().rss - before < 50e6


def test_nothing_of_the_parents_environment_is_seen(sandbox, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_SECRET", MARK)
    program = (
        "import glob, os\nprint(dict(os.environ))\nfor path in glob.glob('/proc/*/[ce][mn][dv]*'): print(path, open(path).read())"
    )
    result = sandbox.run(program)
    assert result.status == "ok"
    assert "/proc/1/environ" in result.stdout
    assert MARK not in result.stdout
    assert "LOCKSTEP" not in result.stdout


def test_no_file_of_the_parent_is_seen(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(MARK)
    secret.chmod(0o644)
    home = Path.home()
    repo = Path(__file__).parents[3]
    hidden = [
        str(path)
        for path in (secret, repo, home / ".ssh", home / ".bashrc", "/etc/passwd", "/etc/hosts", "/var", "/home", "/opt", "/mnt")
    ]
    program = (
        f"import os\nfor path in {hidden!r}:\n"
        "    print(os.path.exists(path), path)\n"
        "print(os.listdir('/etc'), os.listdir('/tmp'), [p for p in os.listdir('/proc') if p.isdigit()])\n"
    )
    *paths, last = sandbox.run(program).stdout.splitlines()
    assert len(paths) == 10
    assert not [line for line in paths if line.startswith("True")]
    assert last == "['ld.so.cache'] [] ['1']"


def test_only_the_three_standard_files_are_open(sandbox):
    assert sandbox.run("import os\nprint(sorted(os.listdir('/proc/self/fd')))").stdout == "['0', '1', '2', '3']\n"  # 3: the listing


def test_no_network_is_reached(sandbox):
    name = f"\0lockstep-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()
        tcp.settimeout(0.1)
        unix.settimeout(0.1)
        program = (
            f"import socket\naddresses = [(2, ('127.0.0.1', {tcp.getsockname()[1]})), (2, ('10.0.0.1', 80)), (2, ('1.1.1.1', 53))]\n"
            f"for family, address in addresses + [(1, {name!r}), (10, ('::1', 80))]:\n"
            "    with socket.socket(family) as s:\n        s.settimeout(1)\n"
            "        try: s.connect(address); print('connected', address)\n        except OSError as error: print('no')\n"
            "for family in (16, 17, 38, 40):\n"  # netlink, packet, alg, vsock
            "    try: socket.socket(family, 1); print('socket', family)\n    except PermissionError: print('no')\n"
        )
        assert sandbox.run(program).stdout == "no\n" * 9
        for server in (tcp, unix):
            with pytest.raises(TimeoutError):
                server.accept()


def test_the_parent_cannot_be_killed(sandbox):
    program = (
        "import os, signal\n"
        f"for pid in (1, os.getppid() or -1, -1, {os.getpid()}, {os.getppid()}):\n"
        "    try: os.kill(pid, 9)\n    except (ProcessLookupError, PermissionError): pass\n"
        "print('alive')\nos.killpg(0, 15)"
    )
    assert sandbox.run(program).stdout == "alive\n"
    assert sandbox.run("print(1)").stdout == "1\n"


def test_a_daemon_does_not_outlive_its_program(sandbox):
    program = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.closerange(0, 64)\n        os.execv('/usr/bin/sleep', ['sleep', '{MARK}'])\n    os._exit(0)\n"
        "time.sleep(0.2)\nprint('bye')"
    )
    assert sandbox.run(program).stdout == "bye\n"
    assert not _with_argument(MARK)
    assert sandbox.run(program.replace("print('bye')", "time.sleep(60)"), wall_s=0.5).status == "timeout"
    assert not _with_argument(MARK)


def test_a_sandbox_dies_with_the_process_that_made_it(sandbox):
    program = f"import os; os.execv('/usr/bin/sleep', ['sleep', '{MARK}'])"
    code = f"from lockstep.judging.sandbox import LocalSandbox\nLocalSandbox().run({program!r})"
    maker = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3])
    _wait_for(lambda: _with_argument(MARK))
    maker.kill()
    maker.wait()
    _wait_for(lambda: not _with_argument(MARK))


def _wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _with_argument(argument):
    return [process.pid for process in psutil.process_iter(["cmdline"]) if argument in (process.info["cmdline"] or [])]


def test_nothing_can_be_traced_or_gain_rights(sandbox):
    program = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if os.fork():\n    print(libc.ptrace(0, 0, 0, 0), libc.unshare(0x10000000), libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0))\n"
        "    print(libc.setuid(0), libc.ptrace(16, 2, 0, 0), os.wait() and '')\n"
        "    status = open('/proc/self/status').read()\n"
        "    shown = ('CapPrm', 'CapBnd', 'NoNewPrivs', 'Uid', 'Seccomp:')\n"
        "    print([line.split()[1] for line in status.splitlines() if line.startswith(shown)])\n"
    )
    assert sandbox.run(program).stdout.splitlines() == [
        "-1 -1 -1",
        "-1 -1 ",
        "['65534', '0000000000000000', '0000000000000000', '1', '2']",
    ]


def test_nothing_outside_the_scratch_folder_can_be_written(sandbox):
    program = (
        "import os, sys\n"
        "targets = ['/x', '/usr/x', '/dev/x', '/proc/sys/kernel/core_pattern', '/proc/sys/kernel/hostname', '/proc/sysrq-trigger']\n"
        "targets += [sys.executable, os.__file__]\n"
        "for i, target in enumerate(targets):\n"
        "    os.symlink(target, f'/tmp/link{i}')\n"
        "    for path in (target, f'/tmp/link{i}', f'/tmp/../{target}', f'/proc/self/root{target}'):\n"
        "        try: os.close(os.open(path, os.O_WRONLY | os.O_CREAT)); print('written', path)\n        except OSError: pass\n"
        "for action in (lambda: os.rename('/usr', '/tmp/usr'), lambda: os.chmod('/usr/bin', 0o777), lambda: os.unlink(sys.executable)):\n"
        "    try: action(); print('done')\n    except OSError: pass\n"
        "open('/tmp/mine', 'w').write('ok'); print(open('mine').read())"
    )
    assert sandbox.run(program).stdout == "ok\n"


def test_programs_do_not_see_each_others_scratch_folder(sandbox):
    sandbox.run("open('/tmp/left', 'w').write('x')")
    assert sandbox.run("import os\nprint(os.listdir('/tmp'))").stdout == "[]\n"


def test_a_program_that_closes_its_streams_is_still_watched(sandbox):
    assert sandbox.run("import os\nos.close(0); os.close(1); os.close(2)\nwhile True: pass", wall_s=0.3).status == "timeout"
    assert sandbox.run("import os\nos.close(1); os.close(2); os._exit(0)").status == "ok"


def test_a_program_that_never_reads_its_input_does_not_block(sandbox):
    assert sandbox.run("print('done')", stdin="x" * 10**7).stdout == "done\n"


def test_limits_hold_for_all_of_many_hostile_programs_at_once():
    hostile = [
        "while True: pass",
        "import os\nwhile True: os.fork()",
        "x = []\nwhile True: x.append(bytearray(10**6))",
        "while True: print('x' * 1000)",
    ]
    with LocalSandbox(max_concurrent=4, limits=ProgramLimits(wall_s=0.5, memory_mb=128)) as sandbox:
        with ThreadPoolExecutor(8) as threads:
            statuses = list(threads.map(lambda program: sandbox.run(program).status, hostile * 2))
        assert "ok" not in statuses
        sandbox.check()
