import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.checkpoint.lock import FolderLock
from lockstep.errors import ResourceError

HOLD = "import sys; from lockstep.checkpoint.lock import FolderLock; lock = FolderLock(__import__('pathlib').Path(sys.argv[1])); "


def test_a_second_run_in_this_process_is_refused_until_the_first_is_closed(tmp_path):
    first = FolderLock(tmp_path / "run")
    with pytest.raises(ResourceError, match=rf"in this process \({os.getpid()}\)"):
        FolderLock(tmp_path / "run")
    other = FolderLock(tmp_path / "other")
    first.release()
    first.release()
    FolderLock(tmp_path / "run").release()
    other.release()


def test_a_run_of_another_process_is_named_and_a_killed_one_stands_in_nobodys_way(tmp_path):
    # The child of the holder outlives it, as processes of rewards may.
    code = HOLD + "import subprocess; c = subprocess.Popen(['sleep', '60'], close_fds=False); print(c.pid, flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(ResourceError, match=rf"\(host {socket.gethostname()}, pid {holder.pid}\).*default_local_dir"):
            FolderLock(tmp_path)
        holder.kill()
        holder.wait()
        FolderLock(tmp_path).release()
    finally:
        holder.kill()
        os.kill(child, 9)


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"the run's folder .*file/run cannot be written: Not a directory.*default_local_dir"):
        FolderLock(tmp_path / "file" / "run")
    with pytest.raises(ResourceError, match=r"/proc/run cannot be written"):
        FolderLock(Path("/proc/run"))
