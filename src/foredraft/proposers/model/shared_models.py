"""The draft models that are loaded. Each has one name, is shared by its proposers, and goes with the last one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import TypeVar, cast

from foredraft.proposers.model.drafter import DraftingModel
from foredraft.runtime.kv import KVCache

Model = TypeVar("Model", bound=DraftingModel)


class SharedModels:
    """Loaded models by name, which is also the name of their layer group. Models may be loaded on any thread."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._models: dict[str, DraftingModel] = {}
        self._uses: Counter[str] = Counter()
        self._loading = Lock()  # held for as long as a model loads
        self._counting = Lock()  # held for a moment only: whoever gives a model back never waits for a load

    def acquire(self, name: str, load: Callable[[], Model]) -> Model:
        """The model of this name, loaded if nobody uses it yet. Every use ends with `release`."""
        with self._loading:
            with self._counting:
                self._uses[name] += 1
                if name in self._models:
                    return cast(Model, self._models[name])
            try:
                model = load()
            except BaseException:
                self.release(name)
                raise
            with self._counting:
                self._models[name] = model
            return model

    def release(self, name: str) -> None:
        """End one use of a model; the last one frees its weights and its layer group."""
        with self._counting:
            self._uses[name] -= 1
            if not self._uses[name]:
                del self._uses[name]
                self._models.pop(name, None)
                self._kv.groups.pop(name, None)
