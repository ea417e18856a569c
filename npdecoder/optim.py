"""Optimizers, learning rate schedules and gradient clipping.

One update of training, n = 1, 2, 3, ...:

    optimizer.zero_grad()
    loss, ctx = ...                          # forward and backward fill parameter.grad
    norm = clip_grad_norm(optimizer.parameters(), max_norm)
    optimizer.lr = schedule(n)               # n = optimizer.steps + 1
    optimizer.step()                         # changes parameter.value in place
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from npdecoder.core import (
    Array,
    Parameter,
    as_stored_floats,
    flat_blocks,
    for_each,
    integer,
    mapping_of,
    non_negative,
    positive_int,
    real,
)

FLAT = 200_000  # numbers of a small model
BLOCK = 65536  # numbers that an update takes at once: they stay in a core's cache until it is made

Parameters = Parameter | Iterable[Parameter | Mapping[str, Any]]
Schedule = Callable[[int], float]


class Group(NamedTuple):
    """Parameters with common options. Their learning rate is optimizer.lr * lr_scale."""

    parameters: tuple[Parameter, ...]
    lr_scale: float
    options: dict[str, float]


class Optimizer:
    """Base class: parameter groups, the learning rate, and the state that a resumed run needs.

    A subclass writes the rule for one parameter (see SGD, which is all there is to one):

        new_state(parameter, options) -> state   the arrays to remember of a parameter, at the start
        update(parameter, state, options, lr)    one update of parameter.value and state, in place

    parameters: an iterable of Parameter, such as layer.parameters(), or of groups, which are dicts
        {"params": [...], "lr": ..., ...} whose options stand before those of the constructor.
        A Parameter that a group lists twice is updated once. A Parameter whose gradient is zero is
        updated like any other: weight decay and momentum move it.
    lr: the base learning rate, which may be set before each step. A group with its own "lr" keeps
        its ratio to the base: SGD([{"params": p}, {"params": q, "lr": 0.2}], lr=0.1) always
        updates q with 2 * optimizer.lr.
    options: numbers by name; each may be given to a group too.

    Attributes: lr, groups, and steps (how many updates were made).

    Errors: TypeError for anything that is not a Parameter, and for a set, which has no order to
    number them by. ValueError for no parameters, a Parameter in two groups, an unknown option, an
    option that is negative or not finite, and a group's lr where the base lr is 0 (no ratio).
    """

    def __init__(self, parameters: Parameters, lr: float, **options: float) -> None:
        self.lr = lr
        self.steps = 0
        defaults = {name: non_negative(name, value) for name, value in options.items()}
        items = _listed("parameters", parameters)
        if items and all(isinstance(item, Mapping) for item in items):
            self.groups = [self._group(f"group {i}", g, defaults) for i, g in enumerate(items)]
        else:
            self.groups = [self._group("the optimizer", {"params": items}, defaults)]
        if len({id(p) for p in self.parameters()}) < len(self.parameters()):
            raise ValueError("a Parameter is in two groups, expected each in one")
        by_number = (type(self).update, type(self).new_state) in FLAT_RULES
        self._flat: list[_Flat | None] = []
        self._states: list[dict[str, Array]] = []
        for group in self.groups:
            flat = _Flat(group, self.new_state) if by_number and _fits_flat(group) else None
            self._flat.append(flat)
            if flat is not None:
                self._states += flat.states
            else:
                self._states += [self.new_state(p, group.options) for p in group.parameters]

    def _group(self, where: str, given: Mapping[str, Any], defaults: dict[str, float]) -> Group:
        known = ("params", "lr", *defaults)
        for name in given:
            if name not in known:
                raise ValueError(f"{where} has the unknown option {name!r}, known: "
                                 + ", ".join(known))
        parameters = _distinct(f"params of {where}", given.get("params", ()))
        if not parameters:
            raise ValueError(f"{where} has no parameters")
        own = {name: non_negative(f"{name} of {where}", given[name])
               for name in known[1:] if name in given}
        if "lr" in own and self.lr == 0.0:
            raise ValueError(f"{where} has lr {own['lr']} but the base lr is 0.0, expected a "
                             "positive base lr, to which the group's lr keeps its ratio")
        lr_scale = own.pop("lr") / self.lr if "lr" in own else 1.0
        options = {**defaults, **own}
        self.check_options(where, options)
        return Group(tuple(parameters), lr_scale, options)

    @property
    def lr(self) -> float:
        return self._lr

    @lr.setter
    def lr(self, new: float) -> None:
        self._lr = non_negative("lr", new)

    def parameters(self) -> list[Parameter]:
        """The distinct parameters of all groups, in the order that the state dict numbers them."""
        return [parameter for group in self.groups for parameter in group.parameters]

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.zero_grad()

    def step(self) -> None:
        """One update of every parameter, from its .grad, which stays as it is."""
        self.steps += 1
        updates: list[tuple[Parameter, dict[str, Array], dict[str, float], float]] = []
        flats = [flat if flat is not None and flat.holds(group.parameters) else None
                  for group, flat in zip(self.groups, self._flat, strict=True)]
        states = self._current_states() if None in flats else []
        first = 0
        for group, flat in zip(self.groups, flats):
            after, lr = first + len(group.parameters), self.lr * group.lr_scale
            if flat is not None:
                updates.append((flat.whole, flat.state, group.options, lr))
            else:
                updates += [(parameter, state, group.options, lr) for parameter, state
                            in zip(group.parameters, states[first:after], strict=True)]
            first = after
        for_each([update[0] for update in updates], lambda n: self.update(*updates[n]))

    def new_state(self, parameter: Parameter, options: Mapping[str, float]) -> dict[str, Array]:
        """The arrays by name, in the parameter's dtype, that update will get as its state."""
        raise NotImplementedError(f"{type(self).__name__} does not define new_state")

    def check_options(self, where: str, options: Mapping[str, float]) -> None:
        """Raise a ValueError for options that no group may have, besides negative ones."""

    def update(
        self,
        parameter: Parameter,
        state: dict[str, Array],
        options: Mapping[str, float],
        lr: float,
    ) -> None:
        """Update parameter.value and the arrays of state in place; large models by several threads.

        The parameter may be one of all numbers of a group, where SGD and Adam are as they are here.
        options and lr are Python floats, which leave float32 computations in float32.
        self.steps counts this update: it is 1 in the first.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define update")

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, by name: Python numbers, and copies of arrays.

            lr, steps
            group.0.lr_scale, group.0.momentum, ...    the options of each group
            momentum.0, momentum.1, ...                the arrays, numbered like self.parameters()

        Numbers survive JSON and arrays survive np.savez bit by bit; np.savez(path, **state) takes
        it as a whole, and load_state_dict the file that np.load opens.
        """
        return {
            name: value.copy() if isinstance(value, np.ndarray) else value
            for name, value in self._entries()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of an optimizer with parameters and groups like these.

        The run continues bit by bit as the saved one: options are restored as well (as in PyTorch).
        All or nothing: everything is checked before anything is changed. Float arrays of another
        width are converted to the parameter's dtype.

        Errors: ValueError that lists every name that is missing, unexpected, misshapen or unusable.
        Arrays that only one of the two needs are such names: momentum 0 cannot load momentum 0.9.
        """
        state = mapping_of("state", state)
        entries = dict(self._entries())
        problems = [f"missing {name}" for name in entries if name not in state]
        problems += [f"unexpected {name}" for name in state if name not in entries]
        new: dict[str, Any] = {}
        for name, old in entries.items():
            if name in state:
                try:
                    new[name] = _converted_like(old, name, state[name])
                except (TypeError, ValueError) as error:
                    problems.append(str(error))
        for i, group in enumerate(self.groups):
            options = {name: new.get(f"group.{i}.{name}", 0.0) for name in group.options}
            try:
                self.check_options(f"group {i}", options)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError(
                f"state dict does not fit {type(self).__name__}: " + "; ".join(problems)
            )

        self.lr, self.steps = new["lr"], new["steps"]
        for i, group in enumerate(self.groups):
            options = {name: new[f"group.{i}.{name}"] for name in group.options}
            self.groups[i] = Group(group.parameters, new[f"group.{i}.lr_scale"], options)
        for i, arrays in enumerate(self._states):
            for name, array in arrays.items():
                array[...] = new[f"{name}.{i}"]

    def _entries(self) -> Iterator[tuple[str, Any]]:
        yield "lr", self.lr
        yield "steps", self.steps
        for i, group in enumerate(self.groups):
            yield f"group.{i}.lr_scale", group.lr_scale
            for name, option in group.options.items():
                yield f"group.{i}.{name}", option
        for i, arrays in enumerate(self._current_states()):
            for name, array in arrays.items():
                yield f"{name}.{i}", array

    def _current_states(self) -> list[dict[str, Array]]:
        """The states, after layer.astype too: each in the dtype that its parameter has now."""
        for parameter, arrays in zip(self.parameters(), self._states):
            for name, array in arrays.items():
                arrays[name] = array.astype(parameter.dtype, copy=False)
        return self._states


class _Flat:
    """A group's parameters side by side in one array, so that one update is that of all.

    For what is small: NumPy takes as long to begin an operation as for a thousand numbers.

    whole: a Parameter of all values and gradients; state: of whole; states: of each parameter.
    """

    def __init__(self, group: Group, new_state: Callable[..., dict[str, Array]]) -> None:
        self.parameters = group.parameters
        size = sum(parameter.size for parameter in group.parameters)
        dtype = group.parameters[0].dtype
        # No arrays: a view of a part then holds on to the part, which is not moved again.
        self.values: Any = bytearray(size * dtype.itemsize)
        self.grads: Any = bytearray(size * dtype.itemsize)
        self.whole = Parameter.of_arrays(
            np.ndarray(size, dtype, self.values), np.ndarray(size, dtype, self.grads)
        )
        self.whole.zero_grad()
        self.state = new_state(self.whole, group.options)
        values, grads = self._parts(self.values, group), self._parts(self.grads, group)
        for parameter in group.parameters:
            parameter.move_value(next(values))
            parameter.move_grad(next(grads))
        parts = {name: self._parts(array, group) for name, array in self.state.items()}
        self.states = [{name: next(parts[name]) for name in parts} for _ in group.parameters]

    @staticmethod
    def _parts(whole: bytearray | Array, group: Group) -> Iterator[Array]:
        """The views of a whole that belong to the parameters."""
        start = 0
        for parameter in group.parameters:
            yield np.ndarray(parameter.shape, parameter.dtype, whole, start)
            start += parameter.value.nbytes

    def holds(self, parameters: tuple[Parameter, ...]) -> bool:
        """False if one never moved, or has moved on, or if they are no longer all of the group."""
        if parameters != self.parameters:
            return False
        for parameter in parameters:
            value = parameter.value
            if value.base is not self.values or parameter.grad.base is not self.grads:
                return False
            if not value.flags.writeable:
                return False
        return True


def _fits_flat(group: Group) -> bool:
    one_dtype = len({parameter.dtype for parameter in group.parameters}) == 1
    return one_dtype and sum(parameter.size for parameter in group.parameters) <= FLAT


class SGD(Optimizer):
    """Stochastic gradient descent with momentum and weight decay.

        g     = grad + weight_decay * value    of Loss + weight_decay / 2 * sum(value ** 2)
        v     = momentum * v + g               v = 0 before the first update
        value = value - lr * v

    Momentum is that of Sutskever, Martens, Dahl and Hinton 2013, "On the importance of
    initialization and momentum in deep learning", eqs. 1 and 2, in PyTorch's form. The paper has lr
    inside: v = momentum * v - lr * g, value = value + v. The two are equal while lr is constant;
    when lr changes, here the new lr applies to the past gradients in v too.

    v has the shape and dtype of value and is there only if momentum > 0; it is momentum.i in the
    state dict. Parameters and errors: see Optimizer.
    """

    def __init__(
        self, parameters: Parameters, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, lr, momentum=momentum, weight_decay=weight_decay)

    def new_state(self, parameter: Parameter, options: Mapping[str, float]) -> dict[str, Array]:
        return {"momentum": np.zeros_like(parameter.value)} if options["momentum"] > 0.0 else {}

    def update(
        self,
        parameter: Parameter,
        state: dict[str, Array],
        options: Mapping[str, float],
        lr: float,
    ) -> None:
        momentum, weight_decay = options["momentum"], options["weight_decay"]
        for value, g, *v_before in flat_blocks(
            BLOCK, parameter.value, parameter.grad, *state.values()
        ):
            if weight_decay > 0.0:
                g = g + weight_decay * value
            v = g
            if v_before:
                v = v_before[0]
                v *= momentum
                v += g
            value -= lr * v


class Adam(Optimizer):
    """Adam: each number's step is scaled by the recent size of its gradient.

        g     = grad + weight_decay * value
        m     = beta1 * m + (1 - beta1) * g           m = 0 and v = 0 before the first update
        v     = beta2 * v + (1 - beta2) * g ** 2
        m_hat = m / (1 - beta1 ** n)                  n = 1, 2, ... counts the updates: m and v
        v_hat = v / (1 - beta2 ** n)                  begin at 0, and this undoes their bias
        value = value - lr * m_hat / (sqrt(v_hat) + eps)

    Source: Kingma and Ba 2015, "Adam: a method for stochastic optimization", algorithm 1.

    betas: (beta1, beta2), each in [0, 1); in a group too. A group may also have its own eps and
    weight_decay. m and v have the shape and dtype of value; they are m.i and v.i in the state dict,
    beta1 and beta2 are options there. Parameters and errors: see Optimizer. Limit: with eps = 0 a
    number whose gradients were all 0 becomes NaN, with NumPy's RuntimeWarning.
    """

    decoupled = False

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        beta1, beta2 = _betas(betas)
        if not isinstance(parameters, Parameter):
            parameters = [
                _split_betas(item) if isinstance(item, Mapping) else item
                for item in _listed("parameters", parameters)
            ]
        super().__init__(
            parameters, lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay
        )

    def check_options(self, where: str, options: Mapping[str, float]) -> None:
        for name in ("beta1", "beta2"):
            if not options[name] < 1.0:
                raise ValueError(f"{name} of {where} is {options[name]}, expected a number in "
                                 "[0, 1)")

    def new_state(self, parameter: Parameter, options: Mapping[str, float]) -> dict[str, Array]:
        return {"m": np.zeros_like(parameter.value), "v": np.zeros_like(parameter.value)}

    def update(
        self,
        parameter: Parameter,
        state: dict[str, Array],
        options: Mapping[str, float],
        lr: float,
    ) -> None:
        beta1, beta2, weight_decay = options["beta1"], options["beta2"], options["weight_decay"]
        correction1, correction2 = 1.0 - beta1**self.steps, math.sqrt(1.0 - beta2**self.steps)
        arrays = parameter.value, parameter.grad, state["m"], state["v"]
        for value, g, m, v in flat_blocks(BLOCK, *arrays):
            if weight_decay > 0.0:
                if self.decoupled:
                    value *= 1.0 - lr * weight_decay
                else:
                    g = g + weight_decay * value
            # `step`, at last what value changes by, is the one array for all that is on the way
            step = np.asarray(g - m)
            step *= 1.0 - beta1
            m += step
            np.square(g, out=step)
            step *= 1.0 - beta2
            v *= beta2
            v += step
            # sqrt(v_hat) + eps, times the root of v's correction, which m_hat is then multiplied by
            np.sqrt(v, out=step)
            step += options["eps"] * correction2
            np.divide(m, step, out=step)
            step *= lr * correction2 / correction1
            value -= step


class AdamW(Adam):
    """Adam with weight decay that is decoupled from the gradient:

        value = value - lr * weight_decay * value     then Adam's update with g = grad

    so that decay is not divided by sqrt(v_hat): every number decays at the same rate.

    Source: Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2, in
    PyTorch's form, in which lr scales the decay too. weight_decay is 0.01 by default. To decay the
    matrices alone, as is usual for Transformers: decay_groups(parameters, weight_decay).
    """

    decoupled = True

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, lr, betas, eps, weight_decay)


# that treat each number by itself, so that all numbers of a group may be one Parameter
FLAT_RULES = ((SGD.update, SGD.new_state), (Adam.update, Adam.new_state))


def decay_groups(parameters: Iterable[Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: matrices with this weight_decay; biases and norms with none."""
    distinct = _distinct("parameters", parameters)
    matrices = [p for p in distinct if p.value.ndim >= 2]
    others = [p for p in distinct if p.value.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _betas(betas: Any) -> tuple[float, float]:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas is {betas!r}, expected a pair (beta1, beta2)")
    return betas[0], betas[1]


def _split_betas(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group with beta1 and beta2 in place of betas."""
    group = dict(group)
    if "betas" in group:
        group["beta1"], group["beta2"] = _betas(group.pop("betas"))
    return group


# Schedules: each returns a function from n, the number of an update counted from 1, to the learning
# rate of that update, a Python float. n < 1 is a ValueError, an n that is no integer a TypeError.


def constant_schedule(lr: float, warmup: int = 0) -> Schedule:
    """lr, after a linear warm-up.

        n <= warmup:  lr * n / warmup
        n >  warmup:  lr

    Errors: ValueError for an lr that is negative or not finite, or a negative warmup.
    """
    lr = non_negative("lr", lr)
    warmup = integer("warmup", warmup, 0)

    def schedule(n: int) -> float:
        n = positive_int("n", n)
        return lr * (n / warmup) if n <= warmup else lr

    return schedule


def linear_schedule(lr: float, total: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """A linear warm-up to lr, then a line down to final.

        n <= warmup:  lr * n / warmup
        n <  total:   final + (lr - final) * (1 - t)
        n >= total:   final                     with t = (n - warmup) / (total - warmup)

    With warmup = total, update n = total ends the warm-up and gets lr; those after it get final.

    Errors: ValueError for total < 1, for warmup < 0 or > total, and for an lr or final that is
    negative or not finite.
    """
    return _warmup_and_decay(lr, total, warmup, final, lambda t: 1.0 - t)


def cosine_schedule(lr: float, total: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """A linear warm-up to lr, then half a cosine down to final.

        n <= warmup:  lr * n / warmup
        n <  total:   final + (lr - final) * (1 + cos(pi * t)) / 2
        n >= total:   final                     with t = (n - warmup) / (total - warmup)

    The cosine is eq. 5 of Loshchilov and Hutter 2017, "SGDR", without restarts.
    warmup = total, and errors: see linear_schedule.
    """
    return _warmup_and_decay(
        lr, total, warmup, final, lambda t: (1.0 + math.cos(math.pi * t)) / 2.0
    )


def noam_schedule(d_model: int, warmup: int, factor: float = 1.0) -> Schedule:
    """Vaswani et al. 2017, eq. 3: up in a line for n <= warmup, then down as 1 / sqrt(n).

        factor * d_model ** -0.5 * min(n ** -0.5, n * warmup ** -1.5)

    warmup = 0 leaves n ** -0.5 alone.

    Errors: ValueError for d_model < 1, warmup < 0, and a factor that is negative or not finite.
    """
    scale: float = non_negative("factor", factor) * positive_int("d_model", d_model) ** -0.5
    warmup = integer("warmup", warmup, 0)

    def schedule(n: int) -> float:
        n = positive_int("n", n)
        decay: float = n**-0.5
        return scale * (min(decay, n * warmup**-1.5) if warmup > 0 else decay)

    return schedule


def _warmup_and_decay(
    lr: float, total: int, warmup: int, final: float, decay: Callable[[float], float]
) -> Schedule:
    """decay falls from decay(0) = 1 to decay(1) = 0."""
    lr, final = non_negative("lr", lr), non_negative("final", final)
    total, warmup = positive_int("total", total), integer("warmup", warmup, 0)
    if warmup > total:
        raise ValueError(f"warmup is {warmup}, expected at most total, which is {total}")

    def schedule(n: int) -> float:
        n = positive_int("n", n)
        if n <= warmup:
            return lr * (n / warmup)
        if n >= total:
            return final
        return final + (lr - final) * decay((n - warmup) / (total - warmup))

    return schedule


def clip_grad_norm(parameters: Parameter | Iterable[Parameter], max_norm: float) -> float:
    """Scale all gradients together so that their norm is at most max_norm; return the norm before.

        norm = sqrt(sum of grad ** 2 over all numbers of all parameters)        in float64
        grad = grad * max_norm / norm                                           if norm > max_norm

    (Pascanu, Mikolov and Bengio 2013, algorithm 1. PyTorch divides by norm + 1e-6.)
    One Parameter or an iterable; a Parameter listed twice counts once, none at all have norm 0.
    max_norm = inf only measures.
    A norm that is NaN or infinite changes nothing, with a RuntimeWarning, and is returned.

    Errors: TypeError for anything that is not a Parameter; ValueError for max_norm <= 0 or NaN.
    """
    norm = clip_if_finite(parameters, max_norm)
    if not math.isfinite(norm):
        warnings.warn(
            f"the gradient norm is {norm}: the gradients were left unclipped",
            RuntimeWarning,
            stacklevel=2,
        )
    return norm


def clip_if_finite(parameters: Parameter | Iterable[Parameter], max_norm: float) -> float:
    """clip_grad_norm for callers that look at the norm themselves: without the warning."""
    max_norm = real("max_norm", max_norm)
    if not max_norm > 0.0:
        raise ValueError(f"max_norm is {max_norm}, expected a number > 0")
    distinct = _distinct("parameters", parameters)
    norm = _norm([parameter.grad for parameter in distinct])
    if math.isfinite(norm) and norm > max_norm:
        for parameter in distinct:
            parameter.grad *= max_norm / norm
    return norm


def _norm(arrays: list[Array]) -> float:
    """sqrt(sum of squares) in float64."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        total = sum(
            float(np.dot(x, x))  # of so few numbers in one thread: those of BLAS spin afterwards
            for array in arrays
            for (block,) in flat_blocks(8192, array)
            # a copy: of float64 too, since some BLAS sums by where in memory an array begins
            for x in (block.astype(np.float64).reshape(-1),)
        )
    if 1e-200 < total < 1e200:
        return math.sqrt(total)
    return _scaled_norm(arrays)  # squares that are lost, or beyond float64


def _scaled_norm(arrays: list[Array]) -> float:
    """The same of numbers scaled by a power of two, so that no square overflows."""
    with np.errstate(over="ignore", under="ignore"):
        largest = np.max([np.max(np.abs(array), initial=0.0) for array in arrays], initial=0.0)
        exponent = math.frexp(largest)[1]  # largest = m * 2 ** exponent, 0.5 <= m < 1
        scaled = (np.ldexp(array.astype(np.float64), -exponent) for array in arrays)
        total = sum(float(np.sum(np.square(x))) for x in scaled)
        return float(np.ldexp(math.sqrt(total), exponent))


# Checks of arguments.


def _listed(name: str, parameters: Any) -> list[Any]:
    """The items of an iterable that has an order; a Parameter alone is a list of one."""
    if isinstance(parameters, Parameter):
        return [parameters]
    if not isinstance(parameters, Iterable) or isinstance(parameters, (set, frozenset)):
        raise TypeError(
            f"{name} is a {type(parameters).__name__}, expected a list of Parameter: "
            "pass layer.parameters()"
        )
    return list(parameters)


def _distinct(name: str, parameters: Any) -> list[Parameter]:
    """The parameters in order, each Parameter once."""
    items = _listed(name, parameters)
    for item in items:
        if not isinstance(item, Parameter):
            raise TypeError(
                f"{name} holds a {type(item).__name__}, expected Parameter only: "
                "pass layer.parameters()"
            )
    return list({id(item): item for item in items}.values())


def _converted_like(old: Any, name: str, new: Any) -> Any:
    """The state dict entry new as a number, or as an array in the dtype, that old is."""
    array = np.asarray(new)
    if array.shape != np.shape(old):
        raise ValueError(f"misshapen {name}: expected {np.shape(old)}, got {array.shape}")
    if not isinstance(old, np.ndarray):
        if isinstance(old, int) and array.dtype.kind not in "iu":
            raise TypeError(f"{name} is {new!r}, expected an integer")
        number = non_negative(name, array.item())
        return int(number) if isinstance(old, int) else number
    return as_stored_floats(name, array, old.dtype)
