"""What is put on a router while something is attached to it, so that compiled graphs see it and copies do not."""

import copy
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

Replace = Callable[[Any], Any]
Surround = Callable[..., Any]
Observe = Callable[[nn.Module, Any, Any], None]
Role = Literal["scores", "selection"]

# Scores first: a replayed selection is weighted from whatever the scores have become, in whichever order both came.
ROLES: tuple[Role, ...] = ("scores", "selection")
FULLGRAPH = (
    "moe_routing runs a router outside compiled graphs while something is attached to it; compile the model without "
    "fullgraph=True, or compile its experts only"
)


class Wiring:
    """Stands in for ``forward`` of one module while anything is attached to it; :func:`wire` gives it.

    The module never runs in a compiled graph: a graph does not see what is attached after it was compiled, and the
    gradient of a router's weights would reach them there without passing the logits that the graph returns.

    A copy of the module (``copy.deepcopy``, ``pickle``, ``torch.save``) is not attached. All of them ask the
    instance for its state, which is given out without what is kept here.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.surrounding: list[Surround] = []
        self.replacing: dict[Role, Replace] = {}
        self.observing: list[RemovableHandle] = []
        self.left = False
        self._replaced: Any = vars(module).get("forward")
        self._forward: Any = module.forward
        self._uncompiled = outside_graphs(self._run)
        vars(module).update({"forward": self, _KEY: self, "__getstate__": self._state})

    def surround(self, call: Surround) -> "Attached":
        """Run ``call(forward, *args, **kwargs)`` in place of ``forward(*args, **kwargs)``; the newest is outermost."""
        self.surrounding.append(call)
        return Attached(self, lambda: self.surrounding.remove(call))

    def replace(self, role: Role, change: Replace) -> "Attached":
        """Return ``change(output)``, which every hook on the module sees; one at a time for each role.

        Raises:
            RuntimeError: if the role is taken.
        """
        check_free(self.module, role)
        self.replacing[role] = change
        return Attached(self, lambda: self.replacing.pop(role))

    def observe(self, look: Observe) -> "Attached":
        """A forward hook that runs after those that are on the module by now."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if module is self.module:  # a replica of DataParallel shares the hooks
                look(module, args, output)

        handle = self.module.register_forward_hook(outside_graphs(hook))
        self.observing.append(handle)

        def remove() -> None:
            handle.remove()
            self.observing.remove(handle)

        return Attached(self, remove)

    def leave_if_empty(self) -> None:
        """Give the module its own forward back once nothing is attached."""
        if self.surrounding or self.replacing or self.observing or vars(self.module).get(_KEY) is not self:
            return
        self.left = True
        del vars(self.module)[_KEY], vars(self.module)["__getstate__"]
        if vars(self.module).get("forward") is not self:
            return  # inside a wrapper of another library it stays, and only passes on
        if self._replaced is None:
            del vars(self.module)["forward"]
        else:
            vars(self.module)["forward"] = self._replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs) if self.left else self._uncompiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """For a wrapper of another library that is copied with this in it: the module's own forward."""
        return copy.deepcopy(self._forward, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self._forward,)  # a function or method: the copy is what is copied

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = self._own
        for surround in self.surrounding:
            call = _bound(surround, call)
        return call(*args, **kwargs)

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        for role in ROLES:
            if role in self.replacing:
                output = self.replacing[role](output)
        return output

    def _state(self) -> Any:
        own: Any = getattr(type(self.module), "__getstate__", None)  # Python 3.10 has none on object
        state = vars(self.module) if own is None else own(self.module)
        if not isinstance(state, dict):
            return state
        bare = {name: value for name, value in state.items() if name not in (_KEY, "__getstate__")}
        if bare.get("forward") is self:
            del bare["forward"]
            bare |= {} if self._replaced is None else {"forward": self._replaced}
        ours = {handle.id for handle in self.observing}
        bare["_forward_hooks"] = OrderedDict((i, h) for i, h in bare["_forward_hooks"].items() if i not in ours)
        return bare


class Attached:
    """One thing attached to a module; ``remove`` takes it off, and with the last of them everything."""

    def __init__(self, wiring: Wiring, remove: Callable[[], Any]) -> None:
        self._wiring = wiring
        self._remove = remove

    def remove(self) -> None:
        """To be called once."""
        self._remove()
        self._wiring.leave_if_empty()


def wire(module: nn.Module) -> Wiring:
    """The wiring of a module, put on it if there is none.

    >>> import copy
    >>> layer, seen = nn.Identity(), []
    >>> attached = wire(layer).observe(lambda module, args, output: seen.append(output))
    >>> layer(1), copy.deepcopy(layer)(2), seen
    (1, 2, [1])
    >>> attached.remove()
    >>> layer(3), seen, "forward" in vars(layer)
    (3, [1], False)
    """
    found = vars(module).get(_KEY)
    return found if isinstance(found, Wiring) and found.module is module else Wiring(module)


def check_free(module: nn.Module, role: Role) -> None:
    """Raise ``RuntimeError`` if the role is taken on a module: one of the two would be undone without a word."""
    if role in getattr(vars(module).get(_KEY), "replacing", ()):
        raise RuntimeError(
            f"the {role} of {type(module).__name__} is replaced by another context already; leave that one first"
        )


def in_backward() -> bool:
    """Whether a backward pass calls this: a forward that runs there is the second run of a checkpointed one."""
    return torch._C._current_graph_task_id() != -1


def acts_here(thread: int) -> bool:
    """Whether what was entered in ``thread`` concerns the caller: that thread, or a backward pass, which has its own.

    >>> acts_here(threading.get_ident()), acts_here(-1)
    (True, False)
    """
    return threading.get_ident() == thread or in_backward()


def in_reentrant_checkpoint() -> bool:
    """Whether a reentrant checkpoint calls this for the first time, on something that wants a gradient."""
    if torch.is_grad_enabled():
        return False
    frame, checkpoint = sys._getframe(), CheckpointFunction.forward.__code__
    while frame.f_back is not None and frame.f_code is not checkpoint:
        frame = frame.f_back
    given = frame.f_locals["args"] if frame.f_code is checkpoint else ()
    return any(isinstance(value, Tensor) and value.requires_grad for value in given)


def outside_graphs(call: Any) -> Any:
    """``call``, run outside compiled graphs; ``fullgraph=True`` fails on it with the reason."""
    try:
        return torch.compiler.disable(call, reason=FULLGRAPH)  # type: ignore[no-untyped-call]
    except TypeError:  # PyTorch 2.6 takes no reason
        return torch.compiler.disable(call)  # type: ignore[no-untyped-call]


def _bound(surround: Surround, call: Any) -> Any:
    return lambda *args, **kwargs: surround(call, *args, **kwargs)


_KEY = "_moe_routing_wiring"
