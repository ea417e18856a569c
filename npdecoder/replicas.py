"""Replicas: a batch cut into shares, one a process, each through the whole forward and backward.

Cutting the batch saves more than BLAS saves by cutting each product: all that is between the
products is cut too. Processes rather than Python's threads, which wait for each other between any
two calls of NumPy. The weights and the gradients are in memory that the processes share.
"""

from __future__ import annotations

import copy
import math
import mmap
import os
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np

try:
    import fcntl
except ImportError:  # on Windows, where one process has to do
    fcntl = None  # type: ignore[assignment]

from npdecoder.core import Array, Layer, Parameter, for_each, num_cores, positive_int

BOX = 1 << 26  # bytes
SMALL = 1 << 14  # bytes of an array that is not worth its place there
ALIGNED = 64  # bytes: each array begins at a multiple, as SIMD likes it

ENVIRONMENT = {
    # BLAS, whichever it is, keeps to one thread
    **{f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL", "BLIS")},
    "VECLIB_MAXIMUM_THREADS": "1",
    # glibc gives freed arrays back to the system, which clears each page before it gives it again:
    # a fifth of a step. It shall keep what one step frees for the next.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 26),
}

# A garbage collection need not look at what was imported.
SERVE = "import gc; from npdecoder.replicas import serve; gc.freeze(); serve()"


class Replicas:
    """A model, and a replica of it in each of `threads` processes; threads=1 starts none.

    Each process keeps to one thread; this one too while a with statement runs it alone, if
    threadpoolctl is installed. They end with close(), at the end of a with statement, or with
    this process, however that ends.

    Errors: ValueError for a model that another process cannot make anew, such as one of a class
    that is defined in __main__; OSError where the system does not let processes share memory.
    Limit: only values of Parameters follow the model; what else is in it is as it was at the start.
    """

    def __init__(self, model: Layer, threads: int = 1) -> None:
        self.model = model
        self.threads = positive_int("threads", threads)
        self._workers: list[_Worker] = []
        self._values: list[Array] = []
        self._warned: dict[Any, Any] = {}  # as __warningregistry__ of a module
        self._blas: Any = None
        self._parameters = model.parameters()
        if threads == 1:
            return
        if os.name != "posix":
            raise OSError("several processes need shared memory as POSIX has it: use threads=1")
        if getattr(sys, "frozen", False) or not sys.executable:
            raise OSError("there is no Python to start another process with: use threads=1")
        places = _places(self._parameters)
        # the model with its places where its parameters are
        try:
            plan = _dumps((
                copy.deepcopy(model, {id(p): x for p, x in zip(self._parameters, places)}), places
            ))
        except Exception as error:  # of many types
            raise self._cannot_be_made_anew(error) from error
        size = _size(places)
        with _memory_file() as file:
            # of what nobody writes to, such as most of a box, nothing is really there
            file.truncate(size + threads * (size + 2 * BOX))
            memory = mmap.mmap(file.fileno(), 0)
            self._values = [place.view(memory, 0) for place in places]
            for n, parameter in enumerate(self._parameters):
                parameter.move_value(self._values[n])  # else it is copied for each run
            weakref.finalize(self, _end, self._workers)
            with self._closed_on_error():
                for number in range(threads):
                    block = size + number * (size + 2 * BOX)
                    gradients = [place.view(memory, block) for place in places]
                    boxes = block + size
                    self._workers.append(_Worker(file.fileno(), memory, block, boxes, gradients))
                for n, parameter in enumerate(self._parameters):  # no name for a grad: see close
                    parameter.move_grad(self._workers[0].gradients[n])  # to add the others to it
                for worker in self._workers:
                    worker.send(plan)
                try:
                    errors = [worker.receive()[0] for worker in self._workers]
                except RuntimeError as error:
                    raise OSError(f"a process ended when it began: {error}") from None
                for unmade in filter(None, errors):
                    raise self._cannot_be_made_anew(unmade)

    def _cannot_be_made_anew(self, error: object) -> ValueError:
        name = type(self.model).__name__
        return ValueError(f"{name} cannot be made anew in another process: {error}")

    def run(
        self, work: Callable[..., Any], shares: Sequence[tuple[Any, ...]], add: bool = False
    ) -> list[Any]:
        """[work(model, *share) for each share], one a process; the gradients of all together.

        work: a function of a module, which calls forward and backward of the model it is given.
        shares: at most as many as threads. Afterwards parameter.grad of the model is the sum of
        what the shares added, in their order, and, if add, of what it was before. An error in a
        share is raised when all have ended; the gradients are then of no use.
        """
        self._check_number(shares)
        if not add:
            for parameter in self._parameters:
                parameter.forget_grad()
        if not self._workers:
            return [work(self.model, *shares[0])]
        messages = self._messages(work, shares)
        # the first process is about to write where the sum of those before may be
        before = [[p.grad.copy()] if p.is_written else [] for p in self._parameters]
        for parameter in self._parameters:
            parameter.forget_grad()
        answers = self._exchange(messages)
        workers = self._workers
        for_each(self._parameters, lambda n: self._parameters[n].add_grads(
            before[n] + [w.gradients[n] for w, (_, written) in zip(workers, answers) if written[n]]
        ))
        return [result for result, _ in answers]

    def map(self, work: Callable[..., Any], shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """run for work that neither reads nor writes gradients: each stays as it is."""
        self._check_number(shares)
        if not self._workers:
            return [work(self.model, *shares[0])]
        return [result for result, _ in self._exchange(self._messages(work, shares))]

    def _check_number(self, shares: Sequence[tuple[Any, ...]]) -> None:
        if not 0 < len(shares) <= self.threads:
            raise ValueError(f"there are {len(shares)} shares, expected 1 to {self.threads}")

    def _messages(self, work: Callable[..., Any], shares: Sequence[tuple[Any, ...]]) -> list[bytes]:
        """One for each share, to a process that sees the values that the model has now."""
        for n, parameter in enumerate(self._parameters):  # no name for a value: see close
            if (dtype := self._values[n].dtype) != parameter.dtype:
                raise ValueError(f"the model has now {parameter.dtype}, its replicas {dtype}")
            if parameter.value is not self._values[n]:
                np.copyto(self._values[n], parameter.value)
        # all are pickled before the first is sent: then an error leaves nobody waiting
        return [worker.pickled((work, share, np.geterr()))
                for worker, share in zip(self._workers, shares)]

    def _exchange(self, messages: Sequence[bytes]) -> list[Any]:
        """What the processes answer: pairs (result, whether each gradient was written)."""
        workers = self._workers[: len(messages)]
        with self._closed_on_error():
            for worker, message in zip(workers, messages):
                worker.send(message)
            received = [worker.receive() for worker in workers]
        answers = [answer for answer, _ in received]
        for message, category, filename, line in (note for _, notes in received for note in notes):
            warnings.warn_explicit(message, category, filename, line, registry=self._warned)
        for error in (answer for answer in answers if isinstance(answer, BaseException)):
            raise error
        return answers

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """After Ctrl-C in the middle nobody knows which answers are still to come."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes; what is run later is run in this one."""
        _end(self._workers)
        self.threads = 1
        # back from the shared memory, which a process forked later would share too
        if self._values:
            self._values.clear()
            for parameter in self._parameters:
                parameter.move_value(np.empty_like(parameter.value))
                parameter.move_grad(np.empty_like(parameter.value))
        if self._blas is not None:
            self._blas.restore_original_limits()
            self._blas = None

    def __enter__(self) -> Replicas:
        # One thread where there is one process: BLAS cuts even products that are too small for it.
        # Where processes cannot be had, it had better cut the large ones.
        if self.threads == 1 and os.name == "posix":
            # an optional extra, which fails at paths that the locale cannot write
            with suppress(ImportError, OSError, UnicodeError):
                from threadpoolctl import threadpool_limits

                self._blas = threadpool_limits(1, "blas")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def forward_backward(
    model: Layer, inputs: tuple[Any, ...], options: dict[str, Any], dy: Array
) -> Any:
    """What model.backward(ctx, dy) returns after forward(*inputs, **options): work for a run."""
    _, ctx = model.forward(*inputs, **options)
    return model.backward(ctx, dy)


def choose_threads(model: Layer, batch_size: int, length: int) -> int:
    """With how many threads a step on batch_size sequences of `length` tokens is quickest.

    One for each core, if each has at least 256 tokens, and a step of one takes some 5 ms or more.
    """
    tokens = batch_size * length
    if os.name != "posix" or tokens * model.num_parameters() < 3e7:
        return 1
    return max(1, min(num_cores(), batch_size, tokens // 256))


class _Place(NamedTuple):
    """Where a parameter's array is in a block of the shared memory."""

    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def view(self, memory: mmap.mmap, block: int) -> Array:
        return np.ndarray(self.shape, self.dtype, memory, block + self.offset)


def _places(parameters: Iterable[Parameter]) -> list[_Place]:
    places, offset = [], 0
    for parameter in parameters:
        places.append(_Place(offset, parameter.shape, parameter.dtype))
        offset += -(-parameter.value.nbytes // ALIGNED) * ALIGNED
    return places


def _size(places: Sequence[_Place]) -> int:
    """Bytes of a block: one value, or one gradient, for each parameter."""
    ends = (place.offset + math.prod(place.shape) * place.dtype.itemsize for place in places)
    return -(-max(ends, default=1) // ALIGNED) * ALIGNED


def _with_parameters(
    plan: Layer, places: Sequence[_Place], memory: mmap.mmap, block: int
) -> Layer:
    """The model that the plan is of: values in the first block of the memory, gradients in this."""
    return copy.deepcopy(plan, {
        id(place): Parameter.of_arrays(place.view(memory, 0), place.view(memory, block))
        for place in places
    })


class _InBox(NamedTuple):
    """What a message has in the place of an array that is in the box."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class _Box:
    """A part of the shared memory, for the large arrays of one message; the others go by pipe."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self.memory, self.start = memory, start
        self.filled = 0

    def put(self, message: Any) -> Any:
        """The message, with large arrays that are in tuples, lists and dicts put into the box."""
        self.filled = 0
        return self._walk(message, np.ndarray, self._put_array)

    def _put_array(self, array: Array) -> Any:
        start = self.filled
        if array.nbytes < SMALL or start + array.nbytes > BOX or array.dtype.hasobject:
            return array
        self.filled += -(-array.nbytes // ALIGNED) * ALIGNED
        place = _InBox(start, array.shape, array.dtype)
        self._array(place)[...] = array
        return place

    def take(self, message: Any, copy: bool) -> Any:
        """The message as it was. copy: its arrays are to outlive the next one."""

        def take_array(place: _InBox) -> Array:
            array = self._array(place)
            return array.copy() if copy else array

        return self._walk(message, _InBox, take_array)

    def _array(self, place: _InBox) -> Array:
        start = self.start + place.start
        return np.ndarray(place.shape, place.dtype, self.memory, start)

    def _walk(self, thing: Any, wanted: type, change: Callable[[Any], Any]) -> Any:
        if type(thing) is wanted:
            return change(thing)
        if type(thing) in (tuple, list):
            return type(thing)(self._walk(item, wanted, change) for item in thing)
        if type(thing) is dict:
            return {key: self._walk(item, wanted, change) for key, item in thing.items()}
        return thing


def _memory_file() -> Any:
    """A file without a name, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(_not_standard(os.memfd_create("npdecoder")), "w+b")
    return tempfile.TemporaryFile()


def _not_standard(fd: int) -> int:
    """The same file as fd, above 2: where stdin is closed, fd may have its number."""
    if fd > 2:
        return fd
    above = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return above


def _pipe() -> tuple[Connection, Connection]:
    read, write = map(_not_standard, os.pipe())
    return Connection(read, writable=False), Connection(write, readable=False)


def _end(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().close()


class _Worker:
    """A process with a replica. gradients: where it writes them, in shared memory."""

    def __init__(
        self, file: int, memory: mmap.mmap, block: int, boxes: int, gradients: list[Array]
    ) -> None:
        self.gradients = gradients
        self.requests, self.answers = _Box(memory, boxes), _Box(memory, boxes + BOX)
        # Before the first import: not what is in the current folder, and just as here. In ASCII,
        # whatever the locale.
        paths = [path for path in sys.path if isinstance(path, str)]
        code = f"import sys; sys.path[:] = {paths!a}; "
        their_requests, self.to_there = _pipe()
        self.from_there, their_answers = _pipe()
        with their_requests, their_answers:
            fds = their_requests.fileno(), their_answers.fileno(), file
            self.process = subprocess.Popen(
                [sys.executable, "-c", code + SERVE,
                 *map(str, (*fds, block, boxes))],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,  # Ctrl-C is for this process alone
            )  # fmt: skip

    def pickled(self, message: Any) -> bytes:
        return _dumps(self.requests.put(message))

    def send(self, message: Any) -> None:
        with suppress(BrokenPipeError):  # receive will tell
            self.to_there.send_bytes(message)

    def receive(self) -> Any:
        """What came back."""
        try:
            return self.answers.take(self.from_there.recv(), copy=True)
        except (EOFError, OSError):  # OSError: in the middle of an answer
            raise RuntimeError("a process that trains along has ended") from None

    def close(self) -> None:
        self.process.kill()  # it may be at work, and has nothing to lose
        self.gradients.clear()
        self.to_there.close()
        self.from_there.close()
        self.process.wait()


def _dumps(message: Any) -> bytes:
    return bytes(ForkingPickler.dumps(message))  # not its view of a buffer, which outlives it


def _pickled(answer: Any, notes: list[Any]) -> Any:
    """Both pickled; an answer that cannot be, or not read again, is replaced by an error."""
    try:
        message = _dumps((answer, notes))
        if isinstance(answer, BaseException):
            ForkingPickler.loads(message)
        return message
    except Exception as error:
        what = f"{type(answer).__name__}: {answer}" if isinstance(answer, Exception) else "a result"
        return _dumps((RuntimeError(f"{what} (not to be pickled: {error})"), []))


def serve() -> None:
    """The other side: a replica that works on what comes, until the connection is closed."""
    requests, answers, file, block, boxes = map(int, sys.argv[1:])
    to_here, from_here = Connection(requests), Connection(answers)
    memory = mmap.mmap(file, 0)
    if hasattr(os, "SCHED_BATCH"):
        # being woken does not interrupt who wakes it, and has others to wake: 2 ms of a step
        with suppress(OSError):  # not everywhere, and not from every policy
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    request_box, answer_box = _Box(memory, boxes), _Box(memory, boxes + BOX)
    model: Any = None
    parameters: list[Parameter] = []
    while True:
        try:
            message = to_here.recv()
        except (EOFError, ConnectionResetError):
            return
        except Exception as error:  # of a class that cannot be imported here
            message = error
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answer: Any = None
            try:
                if isinstance(message, Exception):
                    raise message
                if model is None:
                    plan, places = message
                    model = _with_parameters(plan, places, memory, block)
                    parameters = model.parameters()
                else:
                    work, share, errors = request_box.take(message, copy=False)
                    for parameter in parameters:
                        parameter.forget_grad()
                    with np.errstate(**errors):
                        result = work(model, *share)
                    answer = result, [parameter.is_written for parameter in parameters]
            except Exception as error:
                answer = error
        notes = [(str(w.message), w.category, w.filename, w.lineno) for w in caught]
        try:
            from_here.send_bytes(_pickled(answer_box.put(answer), notes))
        except BrokenPipeError:  # nobody is there any more
            return
        message = share = result = answer = None  # what memory they hold is free for the next
