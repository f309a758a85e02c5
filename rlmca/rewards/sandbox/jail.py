"""The process between us and a program of a stranger: `python -I -S jail.py FOLDER`. Standard library only.

FOLDER holds `plan.json` (see `run.Sandbox`), `stdin`, `stdout` and an empty folder `root`. Two ways, `plan["apart"]`:

- true: new user (unless root may do without), mount, process, network, IPC and host name spaces. The program sees a file
  system in memory with the interpreter and the system's libraries, read-only, and a small /work of its own; no
  network; no process but its own. Its first process dies last: the kernel ends the rest with it.
- false: limits and a separate user (when started by root) only; what it leaves behind is found by its ancestry and killed.

Prints one JSON line: {"status", "timed_out", "trouble"}: the exit status (128 + signal), or why it did not start.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 4096, 16384, 1 << 18, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY_NOSUID = 442, -100, 0x8000, 3
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
NOBODY = 65534

libc = ctypes.CDLL(None, use_errno=True)


def called(name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: "str | None", target: str, kind: "str | None", flags: int, data: str = "") -> None:
    text = [None if part is None else part.encode() for part in (source, target, kind)]
    called("mount", *text, ctypes.c_ulong(flags), data.encode())


def separate() -> bool:
    """Moves this process into new namespaces; true when it is root there by right, and must change its user itself."""
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        with contextlib.suppress(OSError):
            called("unshare", flags)
            return True
    called("unshare", flags | NEWUSER)
    # not as 0: starting a program as anybody else gives all capabilities up
    for name, line in (("setgroups", "deny"), ("uid_map", f"{uid or NOBODY} {uid} 1"), ("gid_map", f"{gid or NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    return False


def build_root(root: str, plan: dict) -> None:
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in [*plan["visible"], *DEVICES]:
        inside = root + path
        if os.path.lexists(inside) or not os.path.lexists(path):
            continue
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
            continue
        if os.path.isdir(path):
            os.mkdir(inside)
        else:
            os.close(os.open(inside, os.O_CREAT | os.O_WRONLY))
        mount(path, inside, None, MS_BIND | MS_REC)
    os.mkdir(f"{root}/work")
    for link in ("tmp", "dev/shm"):
        os.symlink("/work", f"{root}/{link}")
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY_NOSUID, 0, 0, 0)
    called("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, root.encode(), AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes))
    mount("tmpfs", f"{root}/work", "tmpfs", MS_NOSUID | MS_NODEV, f"size={plan['disk']},mode=777")
    os.chroot(root)  # which, unlike a move of the mount, also keeps the program from making user namespaces of its own


def threads_of(uid: int) -> int:
    """Threads of a user on this machine, which RLIMIT_NPROC counts."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
    return total


def start_program(plan: dict, work: str, uid: int, streams: "tuple[int, int]") -> None:
    """Becomes the program: files written, limits set, user changed. Returns only by an exception."""
    os.setsid()
    os.chdir(work)
    for name, text in plan["files"].items():
        with open(name, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    nowhere = os.open("/dev/null", os.O_WRONLY)
    for fd, at in (*zip(streams, (0, 1), strict=True), (nowhere, 2)):
        os.dup2(fd, at)
    limits = dict(plan["limits"])
    if not plan["apart"] and not uid:
        limits["NPROC"] += threads_of(os.getuid())
    for name, value in limits.items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    called("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.execve(plan["argv"][0], plan["argv"], {**plan["environment"], "HOME": work, "TMPDIR": work})


def exit_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def child(plan: dict, folder: str, uid: int, streams: "tuple[int, int]", trouble: int) -> int:
    """Runs the program in a process of its own; with namespaces, behind a first process that is theirs."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work = f"{folder}/work"
        if plan["apart"]:
            called("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            build_root(f"{folder}/root", plan)
            work = "/work"
            program = os.fork()
            if program:
                os.close(trouble)
                while True:
                    ended, status = os.wait()
                    if ended == program:
                        os._exit(exit_status(status))
        start_program(plan, work, uid, streams)
    except BaseException as error:
        os.write(trouble, f"{type(error).__name__}: {error}".encode()[:1000])
    os._exit(1)


def descendants() -> "list[int]":
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found, size = {os.getpid()}, 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return sorted(found - {os.getpid()})


def end_all() -> None:
    """Kills whatever descends from this process, which all orphans below it belong to, until nothing is left."""
    while left := descendants():
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def leave_with_parent(parent: int) -> None:
    called("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def run(folder: str) -> dict:
    with open(f"{folder}/plan.json", encoding="utf-8") as file:
        plan = json.load(file)
    leave_with_parent(plan["parent"])
    streams = (os.open(f"{folder}/stdin", os.O_RDONLY), os.open(f"{folder}/stdout", os.O_WRONLY | os.O_APPEND))
    if plan["apart"]:
        uid = plan["uid"] if separate() else 0
        leave_with_parent(plan["parent"])  # forgotten with the change of rights
    else:
        uid = plan["uid"] if os.geteuid() == 0 else 0
        called("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        called("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # else a program of the same user could write our report
        os.mkdir(f"{folder}/work")
        if uid:
            os.chmod(folder, 0o711)
            os.chmod(f"{folder}/work", 0o777)
    said, trouble = os.pipe()
    pid = child(plan, folder, uid, streams, trouble)
    os.close(trouble)
    watched = select.poll()
    watched.register(os.pidfd_open(pid), select.POLLIN)
    timed_out = not watched.poll(plan["seconds"] * 1000)
    if timed_out:
        os.kill(pid, signal.SIGKILL)
    status = exit_status(os.waitpid(pid, 0)[1])
    if not plan["apart"]:
        end_all()
    os.set_blocking(said, False)
    try:
        message = os.read(said, 1000).decode()
    except BlockingIOError:
        message = ""
    return {"status": status, "timed_out": timed_out, "trouble": message}


if __name__ == "__main__":
    try:
        report = run(sys.argv[1])
    except Exception as error:
        report = {"status": 1, "timed_out": False, "trouble": f"{type(error).__name__}: {error}"}
    print(json.dumps(report))
