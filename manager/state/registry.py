"""The registered functions that return and load the parts of a replica's state.

Each pair of functions has a key, which can be registered once. Before the first load function runs, the keys of the
received state are compared with the registered keys, so a mismatch changes nothing. Load functions run in the order of
registration: a scheduler may rely on its loaded optimizer. The registry uses no lock; callers hold the state lock.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import torch
from torch.optim import Optimizer

from ft_transport.state.collectives import refusing_collectives
from manager.errors import RegistryError
from manager.state.data_order import LoaderOrder
from manager.state.optimizer_states import exact_loading, parameters_of

T = TypeVar("T")

Scope = Literal["replicated", "local"]
_SCOPES = ("replicated", "local")
_ORDER: Final = "the order of the arguments is key, load_state_dict, state_dict"
_MAX_LISTED: Final = 5
_NUM_GUARDED_CALLS: Final = 2
"""Number of calls of a state function in which collectives are refused; each such call takes longer.

Two, because at the first call an optimizer may not have stepped yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """One registered pair of functions.

    Attributes:
        key: Name of this part of the state; unique in the registry.
        load_state_dict: Function that loads a state which ``state_dict`` returned on a peer or in an earlier run.
        state_dict: Function that returns the present state. Every snapshot calls it.
        scope: ``replicated`` if the state is equal on every replica, ``local`` if each replica has its own.
        on_training_thread: Whether only the training thread may call the functions.
        is_stable: Whether the tensors of the state change only inside write sections of the state lock.
    """

    key: str
    load_state_dict: Callable[[Any], object]
    state_dict: Callable[[], object]
    scope: Scope
    on_training_thread: bool
    is_stable: bool = False

    @property
    def holder(self) -> object:
        """The object of which ``load_state_dict`` is a method; ``None`` for a plain function."""
        return getattr(self.load_state_dict, "__self__", None)


class StateRegistry:
    """The state functions of one replica.

    Any thread may call the methods, but registration is not synchronized with them: register before training starts.
    The registry keeps the functions, and so their objects, alive.
    """

    def __init__(self) -> None:
        self._entries: dict[str, StateEntry] = {}
        self._num_calls: dict[str, int] = {}
        self._calling: set[int] = set()
        self.num_changes = 0
        """Number of registrations and replacements."""
        self.loaders = LoaderOrder()
        """Checks the positions of registered data loaders."""

    def register(
        self,
        key: str,
        load_state_dict: Callable[[Any], object],
        state_dict: Callable[[], object],
        *,
        scope: Scope = "replicated",
        on_training_thread: bool = False,
        is_stable: bool = False,
    ) -> None:
        """Register one pair of functions. The arguments are in torchft's order.

        Args:
            key: Name of the part of the state. It must not be empty or registered already.
            load_state_dict: See `StateEntry`. The function's result is ignored.
            state_dict: See `StateEntry`.
            scope: See `StateEntry`.
            on_training_thread: See `StateEntry`.
            is_stable: See `StateEntry`.

        Raises:
            RegistryError: The key is empty or registered already, the scope is unknown, or the functions do not accept
                the arguments of a call (they may be swapped).
            TypeError: The key is no str, or one of the functions is not callable.
        """
        if not isinstance(key, str):
            raise TypeError(f"expected a str as key of a registered state, got {key!r} ({type(key).__name__})")
        if not key:
            raise RegistryError("expected a non-empty key for a registered state, got ''", keys=(key,))
        if scope not in _SCOPES:
            raise RegistryError(f"expected scope 'replicated' or 'local' for state {key!r}, got {scope!r}", keys=(key,))
        for role, function in (("load_state_dict", load_state_dict), ("state_dict", state_dict)):
            if not callable(function):
                raise TypeError(f"expected a callable as {role} of state {key!r}, got {type(function).__name__}")
        _check_signatures(key, load_state_dict, state_dict)
        entry = StateEntry(
            key=key,
            load_state_dict=load_state_dict,
            state_dict=state_dict,
            scope=scope,
            on_training_thread=on_training_thread,
            is_stable=is_stable,
        )
        taken = self._entries.setdefault(key, entry)
        if taken is not entry:
            raise RegistryError(
                f"expected a new key, got {key!r}, which is registered already as {taken.scope} state", keys=(key,)
            )
        self.num_changes += 1
        self.loaders.registered(key, entry.holder, is_replicated=scope == "replicated")

    def register_object(self, key: str, obj: object, **options: Any) -> None:
        """Register the two methods of a module, optimizer, scheduler, data loader or similar object.

        Args:
            key: As in `register`.
            obj: An object with ``state_dict()`` and ``load_state_dict(state)``.
            **options: As in `register`.

        Raises:
            RegistryError: The object is a model of FSDP1; also raised as in `register`.
            TypeError: The object lacks one of the two methods; also raised as in `register`.
        """
        _refuse_fsdp1(key, obj)
        methods = {name: getattr(obj, name, None) for name in ("load_state_dict", "state_dict")}
        lacking = [name for name, method in methods.items() if not callable(method)]
        if lacking:
            raise TypeError(
                f"expected an object with state_dict() and load_state_dict() under key {key!r}, got "
                f"{type(obj).__name__}, which has no {' and no '.join(lacking)}"
            )
        functions: dict[str, Any] = methods
        self.register(key, **functions, **options)

    def replace(self, key: str, state_dict: Callable[[], object], *, is_stable: bool) -> None:
        """Replace an entry's state function, e.g. by one that returns live tensors instead of copies.

        Raises:
            RegistryError: The key is not registered.
        """
        if key not in self._entries:
            raise RegistryError(f"expected a registered key to replace, got {key!r}", keys=(key,))
        self._entries[key] = dataclasses.replace(self._entries[key], state_dict=state_dict, is_stable=is_stable)
        self.num_changes += 1

    def entries(self, scope: Scope | None = None) -> tuple[StateEntry, ...]:
        """Return the entries of one scope, or of both scopes for ``None``, in the order of registration."""
        return tuple(entry for entry in self._entries.values() if scope is None or entry.scope == scope)

    def holders(self, kind: type[T], scope: Scope | None = "replicated") -> dict[str, T]:
        """Return the registered objects of class ``kind`` by key, in the order of registration."""
        return {entry.key: holder for entry in self.entries(scope) if isinstance(holder := entry.holder, kind)}

    def state_dict(self, scope: Scope = "replicated") -> dict[str, object]:
        """Call the state functions of one scope.

        The functions usually return live tensors. So the caller holds a read section of the state lock until it has
        copied the result.

        Returns:
            The functions' results, by key, in the order of registration.

        Raises:
            RegistryError: A function failed; its exception is the cause.
        """
        return {entry.key: self.call(entry) for entry in self.entries(scope)}

    def call(self, entry: StateEntry) -> object:
        """Call one state function; the caller holds the lock as for `state_dict`.

        The first calls refuse collectives in the function: a collective would wait for ranks that make no such call.

        Raises:
            RegistryError: The function failed; its exception is the cause.
        """
        try:
            num_calls = self._num_calls.get(entry.key, 0)
            is_known = num_calls >= _NUM_GUARDED_CALLS
            with nullcontext() if is_known else refusing_collectives():
                thread = threading.get_ident()
                try:
                    # Inside the ``try``, so that the ``finally`` runs even if a signal handler raises here.
                    self._calling.add(thread)
                    state = entry.state_dict()
                finally:
                    self._calling.discard(thread)
            self._num_calls[entry.key] = num_calls + 1
            return state
        except Exception as error:
            raise RegistryError(
                f"expected state_dict of {entry.key!r} to return its state, got {type(error).__name__}: {error}"
                f"{_swap_advice(error)}",
                keys=(entry.key,),
            ) from error

    def is_calling(self) -> bool:
        """Return whether the calling thread is inside a registered function.

        Functions of DCP step an optimizer to create its states. Such a step must not count as a training step.
        """
        return threading.get_ident() in self._calling

    def parameter_finder(self) -> Callable[[tuple[str | int, ...]], torch.Tensor | None]:
        """Return a function that finds, for an optimizer's state tensor, the parameter with the same sharding.

        Returns:
            A function of a path in a replica's state. For ``("user", key, "state", index, name)``, the function returns
            the parameter, even before the optimizer's first step. For other paths, it returns ``None``.
        """
        parameters = {key: parameters_of([each]) for key, each in self.holders(Optimizer).items()}

        def find(path: tuple[str | int, ...]) -> torch.Tensor | None:
            match path:
                case (_, str(key), "state", int(index), str()) if index < len(parameters.get(key, ())):
                    return parameters[key][index]
                case _:
                    return None

        return find

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of registered modules and optimizers; a parameter may appear several times."""
        for module in self.holders(torch.nn.Module, None).values():
            yield from module.parameters()
        yield from parameters_of(self.holders(Optimizer, None).values())

    def registered_keys(self, scope: Scope = "replicated") -> list[str]:
        """Return the registered keys of one scope, in the order of registration."""
        return [entry.key for entry in self.entries(scope)]

    def check_keys(self, keys: Collection[str], scope: Scope = "replicated", *, note: str = "") -> None:
        """Compare the keys of a received state with the registered keys.

        Args:
            keys: The received state's keys.
            scope: See `StateEntry`.
            note: Advice at the end of the error's message.

        Raises:
            RegistryError: The keys differ.
        """
        expected = self.registered_keys(scope)
        missing = tuple(key for key in expected if key not in keys)
        unexpected = tuple(key for key in keys if key not in expected)
        if missing or unexpected:
            raise RegistryError(
                f"expected {scope} state with exactly the keys {sorted(expected)}; missing: {list(missing)}, "
                f"unexpected: {list(unexpected)}; nothing was loaded{f'; {note}' if note else ''}",
                keys=missing + unexpected,
            )

    def load_state_dict(
        self,
        state: Mapping[str, object],
        scope: Scope = "replicated",
        *,
        optimizers: Collection[Optimizer] = (),
        only_shared: bool = False,
    ) -> None:
        """Pass each part of a received state to its load function. Optimizers load it bit for bit (`exact_loading`).

        The caller holds the state lock for writing. If a load function fails, the parts before it have been loaded, and
        the parts after it have not.

        Args:
            state: The result of `state_dict` on a replica with the same registrations.
            scope: Scope of the entries to load.
            optimizers: Optimizers that the user's own functions load, besides the registered optimizers.
            only_shared: Whether to load only the keys that ``state`` and the registry share. Otherwise the keys of
                ``state`` must be exactly the registered ones.

        Raises:
            RegistryError: The keys differ, and nothing has been loaded; or a load function failed. Then its exception
                is the cause, and the message lists the keys that were loaded before.
        """
        if not only_shared:
            self.check_keys(state, scope)
        entries = [entry for entry in self.entries(scope) if entry.key in state]
        loaded: list[str] = []
        for entry in entries:
            try:
                with exact_loading(entry.load_state_dict, optimizers):
                    self._load_entry(entry, state[entry.key])
            except Exception as error:
                raise RegistryError(
                    f"expected load_state_dict of {entry.key!r} to take the received state, got "
                    f"{type(error).__name__}: {error}{_swap_advice(error)}; loaded before it: {loaded}",
                    keys=(entry.key,),
                ) from error
            loaded.append(entry.key)

    def _load_entry(self, entry: StateEntry, part: object) -> None:
        thread = threading.get_ident()
        try:
            self._calling.add(thread)
            self.loaders.before_load(entry.key)
            entry.load_state_dict(part)
            self.loaders.after_load(entry.key)
        finally:
            self._calling.discard(thread)


def listed(texts: Sequence[str], separator: str = ", ") -> str:
    """Join the first few texts, and the number of further texts, for a message."""
    more = f" and {len(texts) - _MAX_LISTED} more" if len(texts) > _MAX_LISTED else ""
    return (separator.join(texts[:_MAX_LISTED]) or "none") + more


def _check_signatures(key: str, load_state_dict: Callable[[Any], object], state_dict: Callable[[], object]) -> None:
    """Raise ``RegistryError`` if a function's signature does not accept the arguments of the registry's calls."""
    if not (_takes(load_state_dict, None) and _takes(state_dict)):
        is_swapped = _takes(load_state_dict) and _takes(state_dict, None)
        raise RegistryError(
            f"expected a load_state_dict that takes a state, and a state_dict that takes nothing, for state {key!r}; "
            f"got {_shown(load_state_dict)} and {_shown(state_dict)}{', which look swapped' if is_swapped else ''}: "
            f"{_ORDER}",
            keys=(key,),
        )


def _signature_of(function: Callable[..., object]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _takes(function: Callable[..., object], *arguments: object) -> bool:
    """Return whether a function accepts these arguments; true for a function without a readable signature."""
    signature = _signature_of(function)
    try:
        return signature is None or bool(signature.bind(*arguments))
    except TypeError:
        return False


def _shown(function: Callable[..., object]) -> str:
    return f"{getattr(function, '__qualname__', type(function).__name__)}{_signature_of(function) or ''}"


def _swap_advice(error: Exception) -> str:
    """Return a hint that the two functions may be swapped, if the arguments made the call fail; else an empty str."""
    traceback = error.__traceback__
    is_refused_call = isinstance(error, TypeError) and traceback is not None and traceback.tb_next is None
    return f" ({_ORDER})" if is_refused_call else ""


def _refuse_fsdp1(key: str, obj: object) -> None:
    """Raise ``RegistryError`` for a model of FSDP1, whose state functions gather parameters from all ranks.

    An interrupted gather would leave the model broken.
    """
    for module in obj.modules() if isinstance(obj, torch.nn.Module) else ():
        group: Any = getattr(module, "process_group", None)
        if type(module).__name__ == "FullyShardedDataParallel" and group is not None and group.size() > 1:
            raise RegistryError(
                f"expected a model under {key!r} whose state one rank can return alone, got one of FSDP1 "
                "(FullyShardedDataParallel), which gathers parameters from all ranks for its state dict; use FSDP2 "
                "(fully_shard), or make FSDP1 with a device_mesh, call FSDP.set_state_dict_type(model, "
                "StateDictType.SHARDED_STATE_DICT), and save the state dict with a CheckpointStore on all ranks",
                keys=(key,),
            )
