"""The managers of a step's resources, by type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from enum import Enum
from typing import Any


class ResourceManagerType(Enum):
    KV_CACHE_MANAGER = "KV_CACHE_MANAGER"
    DRAFT_KV_CACHE_MANAGER = "DRAFT_KV_CACHE_MANAGER"
    SEQ_SLOT_MANAGER = "SEQ_SLOT_MANAGER"
    SPEC_RESOURCE_MANAGER = "SPEC_RESOURCE_MANAGER"


class BaseResourceManager(ABC):
    """What the executor asks of every manager."""

    @abstractmethod
    def get_max_resource_count(self) -> int: ...

    @abstractmethod
    def get_needed_resource_to_completion(self, request: Any) -> int: ...

    def prepare_resources(self, scheduled_batch: Any) -> None: ...  # noqa: B027

    def update_resources(self, scheduled_batch: Any) -> None: ...  # noqa: B027

    def free_resources(self, request: Any) -> None: ...  # noqa: B027


class ResourceManager:
    """All of them, in the order of their turns; the KV cache's is last."""

    def __init__(self, resource_managers):
        self.resource_managers: OrderedDict[ResourceManagerType, Any] = OrderedDict(resource_managers)

    def get_resource_manager(self, name):
        return self.resource_managers.get(name)

    def prepare_resources(self, scheduled_batch: Any) -> None:
        for manager in self._present():
            manager.prepare_resources(scheduled_batch)

    def update_resources(self, scheduled_batch: Any) -> None:
        for manager in self._present():
            manager.update_resources(scheduled_batch)

    def free_resources(self, request: Any) -> None:
        for manager in self._present():
            manager.free_resources(request)

    def _present(self) -> list[Any]:
        return [manager for manager in self.resource_managers.values() if manager is not None]
