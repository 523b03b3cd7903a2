"""The first process of every emulated host, and how others talk to it.

The agent is what init and sshd are on a real machine: process 1 of the host's
own namespaces, parent of everything that runs there. It serves a Unix socket;
a request carries the file descriptors that the new process is to have, so no
byte of output passes through the agent. When it dies, the kernel kills the
whole host and takes its interfaces away.

Run by path with the standard library alone (`python -I -S agent.py CONFIG`),
so that a host starts in milliseconds: import nothing of Paceline here.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import sys
from typing import Any

MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 0x1000, 0x4000, 1 << 18, 2, 4
PR_SET_CHILD_SUBREAPER = 36
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
# Checksums and segmentation are left to the far end, so that a relay moves 64 KB at a time.
TUN_OFFLOADS = 0x01 | 0x02 | 0x04
MOST_DESCRIPTORS = 200


def send(connection: socket.socket, message: dict[str, Any], descriptors: list[int]) -> None:
    """Send one JSON line, and file descriptors with it."""
    data = json.dumps(message).encode() + b"\n"
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    sent = connection.sendmsg([data], ancillary if descriptors else [])
    if sent < len(data):
        connection.sendall(data[sent:])


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive one JSON line and its descriptors; None when the other side has gone, or raves.

    Each side sends its next message only when the last was answered, or closes,
    so nothing is ever read beyond the end of the line.
    """
    data, descriptors = b"", []
    while not data.endswith(b"\n"):
        try:
            chunk, more, _, _ = socket.recv_fds(connection, 65536, MOST_DESCRIPTORS)
        except ConnectionError:
            chunk, more = b"", []
        descriptors += more
        if not chunk:
            return None, descriptors
        data += chunk
    # Two answers may arrive together (started, ended): keep them in order for the caller.
    first, _, rest = data.partition(b"\n")
    try:
        message: dict[str, Any] = json.loads(first)
        if rest:
            message["then"] = [json.loads(line) for line in rest.splitlines()]
    except (ValueError, TypeError, RecursionError):
        return None, descriptors
    return (message, descriptors) if isinstance(message, dict) else (None, descriptors)


def call(path: str, message: dict[str, Any], descriptors: list[int] | None = None) -> socket.socket:
    """Connect to an agent and send it a request; the answer is yours to receive."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        send(connection, message, descriptors or [])
    except BaseException:
        connection.close()
        raise
    return connection


class Agent:
    """Starts processes on its host and tells their callers how they ended."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.selector = selectors.DefaultSelector()
        self.callers: dict[int, socket.socket] = {}
        self.hang_up: set[int] = set()

    def set_up(self) -> None:
        """Become the host: its name, its view of files, its listening socket."""
        if self.config["namespaces"]:
            socket.sethostname(self.config["hostname"])
            _arrange_mounts(self.config["bind"])
            _quiet_interfaces()
            _plain_congestion_control()
        else:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Bound under another name first: the real one appears only when it answers.
        self.listener.bind(self.config["socket"] + "~")
        self.listener.listen(128)
        os.rename(self.config["socket"] + "~", self.config["socket"])  # noqa: PTH104
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.selector.register(self.wake_read, selectors.EVENT_READ, self.reap)

    def serve(self) -> None:
        while True:
            for key, _ in self.selector.select():
                key.data(key.fileobj)

    def accept(self, _: Any) -> None:
        connection, _address = self.listener.accept()
        connection.settimeout(10)
        try:
            message, descriptors = receive(connection)
        except OSError:
            connection.close()
            return
        try:
            if message is None or not self.answer(connection, message, descriptors):
                connection.close()
        except OSError as error:
            with contextlib.suppress(OSError):
                send(connection, {"error": error.strerror, "errno": error.errno}, [])
            connection.close()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def answer(self, connection: socket.socket, message: dict[str, Any], files: list[int]) -> bool:
        """Do what is asked; True when the connection stays open."""
        kind = message["do"]
        if kind == "start":
            pid = self.start(message, files)
            self.callers[pid] = connection
            if message.get("hang_up"):
                self.hang_up.add(pid)
            send(connection, {"pid": pid}, [])
            self.selector.register(
                connection, selectors.EVENT_READ, lambda _: self.listen(connection, pid)
            )
            return True
        if kind == "signal":
            send(connection, {"count": self.signal_all(message["number"], message["match"])}, [])
        elif kind == "tap":
            tap = _open_tap(message["interface"])
            send(connection, {}, [tap])
            os.close(tap)
        else:
            send(connection, {"error": f"unknown request {kind!r}"}, [])
        return False

    def start(self, message: dict[str, Any], files: list[int]) -> int:
        """Fork and execute; raises OSError when the program cannot be executed."""
        failure_read, failure_write = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                self._execute(message, files)
            except OSError as error:
                os.write(failure_write, struct.pack("i", error.errno or errno.EIO))
            finally:
                os._exit(127)
        os.close(failure_write)
        failure = os.read(failure_read, 4)
        os.close(failure_read)
        if failure:
            number: int = struct.unpack("i", failure)[0]
            raise OSError(number, f"{message['argv'][0]}: {os.strerror(number)}")
        return pid

    def _execute(self, message: dict[str, Any], files: list[int]) -> None:
        os.setsid()
        if not message.get("outside"):
            for path in self.config["cgroups"]:
                with open(path, "w") as group:  # noqa: PTH123
                    group.write("0")
            if self.config["cores"]:
                os.sched_setaffinity(0, self.config["cores"])
        # Away from the low numbers first, so that none is overwritten before it is used.
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 500) for descriptor in files]
        for number, descriptor in enumerate(high):
            os.dup2(descriptor, number)
        signal.set_wakeup_fd(-1)
        for each in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_DFL)
        # Python ignores these two, and ignored signals stay ignored across exec.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        environment = self.config["environment"] if message["env"] is None else message["env"]
        os.chdir(message["cwd"] or environment.get("HOME", "/"))
        os.environ["PATH"] = environment.get("PATH", os.defpath)
        os.execvpe(message["argv"][0], message["argv"], environment)

    def listen(self, connection: socket.socket, pid: int) -> None:
        """A caller asks for a signal to its process, or has gone."""
        if self.callers.get(pid) is not connection:
            return  # the process ended, and was reaped, in the same turn
        try:
            message, descriptors = receive(connection)
        except OSError:
            message, descriptors = None, []
        for descriptor in descriptors:
            os.close(descriptor)
        requests = [] if message is None else [message, *message.get("then", [])]
        if message is None:
            self.selector.unregister(connection)
            connection.close()
            if self.callers.pop(pid, None) is not None and pid in self.hang_up:
                requests = [{"number": signal.SIGHUP}]
        for request in requests:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, request["number"])

    def reap(self, _: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_read, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            connection = self.callers.pop(pid, None)
            self.hang_up.discard(pid)
            if connection is not None:
                self.selector.unregister(connection)
                with contextlib.suppress(OSError):
                    send(connection, {"exit": os.waitstatus_to_exitcode(status)}, [])
                connection.close()

    def signal_all(self, number: int, match: str | None) -> int:
        """Signal every process of the host, or those whose command line has `match`."""
        count = 0
        for pid in self._processes():
            if match is None or match in _command_line(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                    count += 1
        return count

    def _processes(self) -> list[int]:
        own = os.getpid()
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208
        if self.config["namespaces"]:
            return [pid for pid in pids if pid != own]
        parents = {pid: _parent(pid) for pid in pids}
        family, size = {own}, 0
        while len(family) > size:
            size = len(family)
            family |= {pid for pid, parent in parents.items() if parent in family}
        return sorted(family - {own})


def _command_line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return file.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None):
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind or 'bind'} on {target}: {os.strerror(number)}")


def _arrange_mounts(bind: dict[str, str]) -> None:
    """Give the host its own /etc/hosts, /proc, /sys and /dev/shm, seen by no one else."""
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    for target, source in bind.items():
        if os.path.exists(target):  # noqa: PTH110
            _mount(source, target, "", MS_BIND)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    if os.path.isdir("/dev/shm"):  # noqa: PTH112
        _mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV)
    # /sys/class/net shows the interfaces of the namespace that mounted it. The control groups
    # are mounted below /sys: hold them by a descriptor over the change.
    groups = os.open("/sys/fs/cgroup", os.O_PATH | os.O_CLOEXEC)
    try:
        _mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV)
        _mount(f"/proc/self/fd/{groups}", "/sys/fs/cgroup", "", MS_BIND | MS_REC)
    finally:
        os.close(groups)


def _quiet_interfaces() -> None:
    """No IPv6 on interfaces still to come: its announcements would blur the byte counters."""
    setting = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
    with contextlib.suppress(OSError), open(setting, "w") as file:  # noqa: PTH123
        file.write("1")


def _plain_congestion_control() -> None:
    """TCP as most hosts have it, whatever this machine uses.

    With bbr a link of known rate is not one: it slows down for 0.2 s every 10 s on purpose, and
    takes an exchange that pauses for a slower link. The kernel may keep cubic to itself; reno is
    for everyone, and differs from it only after losses.
    """
    for name in ("cubic", "reno"):
        setting = "/proc/sys/net/ipv4/tcp_congestion_control"
        with contextlib.suppress(OSError), open(setting, "w") as file:  # noqa: PTH123
            file.write(name)
            file.flush()
            return


def _open_tap(interface: str) -> int:
    """An Ethernet interface whose other end is a file descriptor."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    request = struct.pack("16sH22x", interface.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR)
    fcntl.ioctl(tap, TUNSETIFF, request)
    fcntl.ioctl(tap, TUNSETOFFLOAD, TUN_OFFLOADS)
    return tap


def serve(config_path: str) -> None:
    """Be the agent that the JSON file describes."""
    with open(config_path) as file:  # noqa: PTH123
        config = json.load(file)
    agent = Agent(config)
    try:
        agent.set_up()
    except OSError as error:
        with open(config["socket"] + ".error~", "w") as file:  # noqa: PTH123
            file.write(error.strerror or str(error))
        os.rename(config["socket"] + ".error~", config["socket"] + ".error")  # noqa: PTH104
        sys.exit(1)
    agent.serve()


if __name__ == "__main__":
    serve(sys.argv[1])
