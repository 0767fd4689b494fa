"""A store that keeps two hosts from connecting, for tests of what happens meanwhile."""

import threading

import torch.distributed as dist


class HidesLinks(dist.Store):
    """A store that hides what other ranks tell to connect, until this rank has given up.

    Attributes:
        hidden: Set when this rank has asked.
        found: Set when it would have found what another one has told.
        given_up: Set when this rank takes back what it has told.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store
        self.own: set[str] = set()
        self.hidden, self.found, self.given_up = (threading.Event() for _ in range(3))

    def set(self, key, value):
        self.own.add(key)
        self.store.set(key, value)

    def get(self, key):
        return self.store.get(key)

    def add(self, key, value):
        return self.store.add(key, value)

    def deleteKey(self, key):
        if "fastcoll/link" in key:
            self.given_up.set()
        return self.store.delete_key(key)

    def check(self, keys):
        found = self.store.check(keys)
        if self.given_up.is_set() or not any(
            "fastcoll/link" in key for key in keys if key not in self.own
        ):
            return found
        self.hidden.set()
        if found:
            self.found.set()
        return False
