"""Stores between a rank and the real one, for tests of what happens while they hide or delay something."""

import threading
import time

import torch.distributed as dist


class Between(dist.Store):
    """Does as the store behind it."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store

    def set(self, key, value):
        self.store.set(key, value)

    def get(self, key):
        return self.store.get(key)

    def add(self, key, value):
        return self.store.add(key, value)

    def deleteKey(self, key):
        return self.store.delete_key(key)

    def check(self, keys):
        return self.store.check(keys)


class Slow(Between):
    """A store that takes ``seconds`` to answer."""

    seconds = 0.0

    def check(self, keys):
        time.sleep(self.seconds)
        return super().check(keys)


class HidesLinks(Between):
    """A store that hides what other ranks tell to connect, until this rank has given up.

    Attributes:
        hidden: Set when this rank has asked.
        found: Set when it would have found what another one has told.
        given_up: Set when this rank says so.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store)
        self.own: set[str] = set()
        self.hidden, self.found, self.given_up = (threading.Event() for _ in range(3))

    def set(self, key, value):
        self.own.add(key)
        super().set(key, value)

    def add(self, key, value):
        if "fastcoll/link" in key and value > 1:
            self.given_up.set()
        return super().add(key, value)

    def check(self, keys):
        found = super().check(keys)
        others = [key for key in keys if key not in self.own]
        if self.given_up.is_set() or not any("fastcoll/link" in key for key in others):
            return found
        self.hidden.set()
        if found:
            self.found.set()
        return False
