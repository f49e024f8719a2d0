"""What the prefix tree and its checkpoints promise, as lists that are searched from end to end.

Every block is an object of its own, a lock is the list of blocks that it keeps, and nothing is
counted: it is looked for. Knows nothing of runs, of page groups or of how the fast ones do it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Block:
    """The tokens of one block behind those of its parent. used_at: when a lock that kept it was
    let go of last. is_hidden: whether it was cut off, so that its parent leads to it no more."""

    seed: bytes
    parent: Block | None
    tokens: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    used_at: int = 0
    is_hidden: bool = False

    def path(self) -> list[Block]:
        """From the first block of its prompt to itself."""
        return [*(self.parent.path() if self.parent else []), self]


@dataclass(eq=False)
class Lock:
    """What one reader keeps: a seed and the blocks of a path, maybe none."""

    seed: bytes
    blocks: list[Block]


@dataclass(eq=False)
class SlowCheckpoint:
    """path: the blocks that it lies behind. least: of its tokens, how many it serves for too.
    number: by which the fast one knows it."""

    seed: bytes
    path: list[Block]
    tokens: tuple[int, ...]
    least: int
    number: int
    users: int = 0


@dataclass
class SlowPrefixes:
    """blocks: all that hold pages. checkpoints: least recently used first."""

    block_tokens: int
    blocks: list[Block] = field(default_factory=list)
    locks: list[Lock] = field(default_factory=list)
    checkpoints: list[SlowCheckpoint] = field(default_factory=list)
    clock: int = 0

    # ---- blocks ----------------------------------------------------------------------------------

    def cut(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """The whole blocks of a prompt."""
        size = self.block_tokens
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) // size * size, size)]

    def find(self, seed: bytes, tokens: list[int]) -> list[Block]:
        """The blocks of a prompt that are there."""
        found: list[Block] = []
        for part in self.cut(tokens):
            child = self._child(seed, found[-1] if found else None, part)
            if child is None:
                break
            found.append(child)
        return found

    def _child(self, seed: bytes, parent: Block | None, part: tuple[int, ...]) -> Block | None:
        for one in self.blocks:
            is_it = (one.seed, one.tokens) == (seed, part) and one.parent is parent
            if is_it and not one.is_hidden:
                return one
        return None

    def lock(self, seed: bytes, blocks: list[Block]) -> Lock:
        lock = Lock(seed, list(blocks))
        self.locks.append(lock)
        return lock

    def unlock(self, lock: Lock) -> None:
        self.locks.remove(lock)
        self.clock += 1
        for block in lock.blocks:
            block.used_at = self.clock

    def locked(self) -> list[Block]:
        return [one for one in self.blocks if any(one in lock.blocks for lock in self.locks)]

    def extend(
        self, lock: Lock, tokens: list[int], pages: list[tuple[tuple[int, ...], ...]]
    ) -> set[int]:
        """Blocks behind those of a lock; the indices of those that were there."""
        twice: set[int] = set()
        parts = self.cut(tokens)
        for index in range(len(lock.blocks), len(parts)):
            parent = lock.blocks[-1] if lock.blocks else None
            block = self._child(lock.seed, parent, parts[index])
            if block is not None:
                twice.add(index)
            else:
                block = Block(lock.seed, parent, parts[index], pages[index])
                self.blocks.append(block)
            lock.blocks.append(block)
        return twice

    def cut_off(self, lock: Lock, count: int) -> None:
        """The blocks of a lock behind so many, and with them all below."""
        if count < len(lock.blocks):
            lock.blocks[count].is_hidden = True

    def leaves(self) -> list[Block]:
        """Idle blocks that nothing lies behind."""
        parents = {id(one.parent) for one in self.blocks if not one.is_hidden}
        locked = self.locked()
        return [one for one in self.blocks if id(one) not in parents and one not in locked]

    def evict(self, taken: list[tuple[tuple[int, ...], ...]]) -> None:
        """The fast one has taken these pages. Each block of them must have been least recently used
        when it went; of equals, any may be."""
        left = list(taken)
        while left:
            leaves = self.leaves()
            oldest = min(leaf.used_at for leaf in leaves)
            for leaf in leaves:
                if leaf.used_at == oldest and leaf.pages in left:
                    break
            else:
                raise AssertionError(f"{left} went before {[leaf.pages for leaf in leaves]}")
            left.remove(leaf.pages)
            self.blocks.remove(leaf)
            self.checkpoints = [one for one in self.checkpoints if leaf not in one.path]

    # ---- checkpoints -----------------------------------------------------------------------------

    def best(
        self, seed: bytes, tokens: list[int], token_max: int
    ) -> tuple[list[SlowCheckpoint], int]:
        """Those that a prompt can go on from after the most tokens, and after how many."""
        found = self.find(seed, tokens)
        counts: dict[int, list[SlowCheckpoint]] = {0: []}
        for one in self.checkpoints:
            count = min(len(one.tokens), token_max)
            is_on_path = one.seed == seed and one.path == found[: len(one.path)]
            is_equal = tuple(tokens[:count]) == one.tokens[:count]
            if is_on_path and is_equal and count >= one.least:
                counts.setdefault(count, []).append(one)
        return counts[max(counts)], max(counts)

    def idle(self) -> list[SlowCheckpoint]:
        """Least recently used first."""
        return [one for one in self.checkpoints if not one.users]

    def touch(self, checkpoint: SlowCheckpoint) -> None:
        self.checkpoints.remove(checkpoint)
        self.checkpoints.append(checkpoint)
