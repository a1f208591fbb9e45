"""Lists as trees of pages, cut where the content says so.

Items are cut into leaf pages after an item whose name (or inline encoding) has certain bits clear, page names into index pages
in the same way, level upon level, until a level has no sealed page; each level is at most an eighth of the one below, so that
ends. What is left open at the end of each level stands in the list root. Where a page ends depends only on the items from its
start on, so a page of an earlier list is a page of this one wherever this one comes to its first item at a page's start: after
an edit the cut falls in step again within a page or so, and the rest of the list is found again by comparing fingerprints.

So an append writes at most ``1 item + 1 leaf page + 1 index page a level + 1 list root``, with ``log8(n) - 1`` levels or fewer (and
once, when a list grows out of its inline form, its ten items or fewer). An edit elsewhere writes its items, the page it is in, at
times the next one or two, the index pages above those, and the list root; a window that slides is an append and an edit.

``Lists.tree`` looks for such pages first in the list that stood here before (the loop at its start is all that an append needs),
then in every list of the base and of the warm packs. Only what the base reaches is ever left out of a save.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from safepoint.codec.nodes import (
    BIG,
    ITEM_MIN,
    PAGE_BITS,
    PAGE_MAX,
    PAGE_MIN,
    Item,
    Node,
    Page,
    Tree,
    Upper,
    _encode,
    all_names,
    array_head,
    cuts,
    dump,
    item_level,
    make,
    page_names,
    plain,
    ref_code,
    tail_names,
)
from safepoint.codec.registry import Registry
from safepoint.codec.values import MAX_DEPTH, encode
from safepoint.errors import RefusedType
from safepoint.model import Obj

_VALUE: Final = b"v"


class Lists:
    """The list part of one pack: what was made, and what of the base is in use again. All other types are the subclass's."""

    def __init__(self, registry: Registry, owned: Callable[[], list[Tree]], warm: Callable[[], list[Tree]]) -> None:
        self.registry = registry
        self.new: dict[bytes, Obj] = {}
        # For each list of the base that was looked at: how many pages were taken from its start, and which after them.
        self.taken: dict[int, tuple[Tree, int, set[int]]] = {}
        self._pool: tuple[list[Tree], list[Tree]] | None = None
        self._sources = owned, warm
        self.room = MAX_DEPTH
        """How many containers may nest in a value where the pack is now; see ``chunks`` on depth."""

    def encode(self, value: Any, path: str, *, more: int = 0) -> bytes:
        return encode(value, self.registry, path=path, depth=self.room + more)

    @property
    def pool(self) -> tuple[list[Tree], list[Tree]]:
        """The lists of the base, and those of the warm packs, at the top and in opened dicts."""
        if self._pool is None:
            self._pool = self._sources[0](), self._sources[1]()
        return self._pool

    def split(self, value: Any, path: str, level: int) -> Node | None:
        """Place a dict or list whose encoding is above ``BIG``; None if it is to be kept whole."""
        raise NotImplementedError

    def add(self, refs: bytes, data: bytes) -> Obj:
        obj = make(refs, data)
        self.new[obj.name] = obj
        return obj

    def tree(self, values: list[Any], base: Tree | None, floor: int, path: str, level: int) -> Tree | None:
        """Place a list; None if its encoding is not above ``floor`` (then the caller keeps it whole)."""
        mark = len(self.new)
        cut = _Cut(self, values[:], path, item_level(level))
        if base is not None and base.level != cut.level:
            base = None
        inner = int(level > 1)
        self.room -= inner
        tree = cut.tree(base, floor)
        self.room += inner
        if tree is None:
            while len(self.new) > mark:
                self.new.popitem()
        return tree

    def known(self) -> Iterator[bytes]:
        """Names that the base's lists reach, as far as this pack may have made them again."""
        for tree, prefix, taken in self.taken.values():
            yield tree.name
            yield from tail_names(tree.tail)
            for level in tree.uppers:
                for upper in level:
                    yield upper.obj.name
            for i in range(prefix, len(tree.leaves)):
                if i not in taken:
                    yield from page_names(tree.leaves[i])


class _Cut:
    """One list while it is cut."""

    __slots__ = ("level", "out", "path", "pool", "xs")

    def __init__(self, out: Lists, xs: list[Any], path: str, level: int) -> None:
        self.out = out
        self.xs = xs
        self.path = path
        self.level = level  # of the items
        self.pool: tuple[list[Tree], list[Tree]] = ([], [])

    def tree(self, base: Tree | None, floor: int) -> Tree | None:
        xs = self.xs
        # Far down, items may be split less far than above: their pages can only come from the same place.
        self.pool = self.out.pool if self.level == item_level(0) else ([base] if base is not None else [], [])
        if base is None:
            base = self._like()
        leaves, pos = self._prefix(base) if base is not None else ([], 0)
        prefix = len(leaves)
        if base is not None:
            self.out.taken[id(base)] = (base, prefix, set())
        tail = self._rest(pos, leaves, base)

        n = len(xs)
        size = len(array_head(n)) + sum([p.size for p in leaves]) + sum([i.size for i in tail])
        if size <= floor:
            return None
        uppers, opened = self._levels(leaves, prefix if base is not None else 0, base)
        refs: list[bytes] = []
        for level in opened:
            refs += level
        code = self._codes(tail, refs)
        head = _encode((n, size, [len(level) for level in opened]))
        # The head is an array of three, and the items are its fourth element.
        data = b"r\x94" + head[1:] + code
        joined = b"".join(refs)
        if base is not None and base.root.data == data and base.root.refs == joined:
            root = base.root
        else:
            root = self.out.add(joined, data)
        return Tree(root, n, size, tuple(leaves), uppers, tuple(tail), self.level)

    def _prefix(self, base: Tree) -> tuple[list[Page], int]:
        """The pages of ``base`` that this list begins with, and where they end. All that an append costs, but for a little."""
        xs = self.xs
        leaves: list[Page] = []
        pos = 0
        for page in base.leaves:
            end = pos + page.n
            if page.mark is not None:
                part = xs[pos:end]  # has a name, because marshal flags what is referred to more than once, as it was in `_seal`
                if dump(part) != page.mark:
                    break
                leaves.append(page)
            else:
                same = self._same_page(page, pos)
                if same is None:
                    break
                leaves.append(same)
            pos = end
        return leaves, pos

    def _rest(self, pos: int, leaves: list[Page], base: Tree | None) -> list[Item]:
        """Cut what follows the unchanged prefix, appending to ``leaves``; return the open tail."""
        at, i = base, len(leaves)  # the page (or, past the last page, the tail) that is likely to come next
        xs = self.xs
        taken = self.out.taken
        n = len(xs)
        while pos < n:
            hints: Sequence[Item] = ()
            if at is not None and i == len(at.leaves) and id(at) in taken:
                hints = at.tail
            first = self._same_item(hints[0], pos) if hints else None
            if first is None:
                # At the end of the earlier list this is an append; to look for it elsewhere would cost each of them.
                hit = self._find(pos, at, i) if at is None or i != len(at.leaves) else None
                if hit is not None:
                    at, i, page = hit
                    leaves.append(page)
                    pos += page.n
                    if id(at) in taken:
                        taken[id(at)][2].add(i)
                    i += 1
                    continue
                if at is not None and i < len(at.leaves) and id(at) in taken:
                    hints = at.leaves[i].items
            items: list[Item] = []
            sealed = False
            for j in range(min(PAGE_MAX, n - pos)):
                item = first if j == 0 else self._same_item(hints[j], pos + j) if j < len(hints) else None
                if item is None:
                    item = self._item(pos + j)
                items.append(item)
                if item.cut and j + 1 >= PAGE_MIN:
                    sealed = True
                    break
            if not sealed and len(items) < PAGE_MAX:
                return items
            page = self._seal(items, xs[pos : pos + len(items)], None)
            leaves.append(page)
            pos += page.n
            i += 1
            if at is not None and i <= len(at.leaves) and (known := at.names.get(page.obj.name)) is not None:
                i = known + 1
        return []

    def _levels(
        self, leaves: list[Page], same: int, base: Tree | None
    ) -> tuple[tuple[tuple[Upper, ...], ...], list[list[bytes]]]:
        """The sealed index pages of each level, and what is open on each level, highest first."""
        uppers: list[tuple[Upper, ...]] = []
        opened: list[list[bytes]] = []
        below: Sequence[Page | Upper] = leaves
        while True:
            level: list[Upper] = []
            start = 0
            for upper in base.uppers[len(uppers)] if base is not None and len(uppers) < len(base.uppers) else ():
                if start + upper.width > same:
                    break
                level.append(upper)
                start += upper.width
            same = len(level)
            for pos in range(start + 1, len(below) + 1):
                width = pos - start
                if width < PAGE_MIN or (below[pos - 1].obj.name[0] & PAGE_BITS and width < PAGE_MAX):
                    continue
                group = below[start:pos]
                n = sum([p.n for p in group])
                size = sum([p.size for p in group])
                obj = self.out.add(b"".join([p.obj.name for p in group]), b"i" + _encode((len(uppers) + 1, n, size)))
                level.append(Upper(obj, width, n, size))
                start = pos
            opened.append([p.obj.name for p in below[start:]])
            if not level:
                return tuple(uppers), opened[::-1]
            uppers.append(tuple(level))
            below = level

    # Finding pages again ---------------------------------------------------------------------------------------------

    def _like(self) -> Tree | None:
        """A list of the base that begins like this one: a call that is given the whole history stands at another place."""
        if not self.xs:
            return None
        for tree in self.pool[0]:
            if tree.leaves:
                if self._match(tree.leaves[0], 0) is not None:
                    return tree
            elif tree.tail and self._same_item(tree.tail[0], 0) is not None:
                return tree
        return None

    def _find(self, pos: int, at: Tree | None, i: int) -> tuple[Tree, int, Page] | None:
        """The page of an earlier list that these items begin with: the next in line, else by its first item."""
        owned, warm = self.pool
        if at is not None and i < len(at.leaves) and (page := self._match(at.leaves[i], pos)) is not None:
            return self._take(at, i, page, pos)
        trees = [t for t in (*owned, *warm) if t.leaves]
        if not trees:
            return None
        # Pages that came from a store have encodings for marks, the others marshal's bytes where that is possible.
        mark = dump(self.xs[pos])
        keys = [hash(mark)] if mark is not None else []
        code = self.out.encode(self.xs[pos], f"{self.path}[{pos}]")
        keys.append(hash(_VALUE + code if len(code) > ITEM_MIN else code))
        for tree in trees:
            for key in keys:
                k = tree.heads.get(key)
                if k is not None and (page := self._match(tree.leaves[k], pos)) is not None:
                    return self._take(tree, k, page, pos)
        return None

    def _take(self, tree: Tree, i: int, page: Page, pos: int) -> tuple[Tree, int, Page] | None:
        if id(tree) in self.out.taken:
            return tree, i, page
        if any(tree is t for t in self.pool[0]):
            self.out.taken[id(tree)] = (tree, 0, set())
            return tree, i, page
        # From a warm pack: what it wrote may be gone from the store, so all of it is sent again, under names that are known.
        values = self.xs[pos : pos + page.n]
        if page.mark is None or page.below:
            items = [self._item(pos + j) for j in range(page.n)]
            if b"".join([item.name for item in items if item.name is not None]) != page.obj.refs:
                return None
        else:
            fresh: list[Obj] = []
            refs = page.obj.refs
            for j, x in enumerate(values):
                code = self.out.encode(x, f"{self.path}[{pos + j}]")
                if len(code) > ITEM_MIN:
                    k = 16 * len(fresh)
                    fresh.append(Obj(refs[k : k + 16], b"", _VALUE + code))
            if dump(values) != page.mark:
                return None  # changed meanwhile by another thread: what was encoded need not be what the names say
            self.out.new.update([(o.name, o) for o in fresh])
        self.out.new[page.obj.name] = page.obj
        return tree, i, page

    def _match(self, page: Page, pos: int) -> Page | None:
        if page.mark is None:
            return self._same_page(page, pos)
        return page if dump(self.xs[pos : pos + page.n]) == page.mark else None

    def _same_page(self, page: Page, pos: int) -> Page | None:
        """A page without a mark of its own, compared item by item; with one, if it can have one now."""
        values = self.xs[pos : pos + page.n]
        if len(values) < page.n:
            return None
        if page.code is not None:
            mark = dump(values)
            try:
                if self.out.encode(values, "") != page.code():
                    return None
            except RefusedType:
                return None  # Item by item it will be refused with its path, or fit: with the list around it, it nests deeper.
            if mark is None or not plain(values):
                return page
            return Page(page.obj, page.n, page.size, mark, (), page.below, hash(dump(values[0])))
        items: list[Item] = []
        for i, old in enumerate(page.items, pos):
            item = self._same_item(old, i)
            if item is None:
                return None
            items.append(item)
        return self._seal(items, values, page)

    def _same_item(self, old: Item, i: int) -> Item | None:
        """``old``, perhaps with a better mark, if it stands for the i-th value."""
        x = self.xs[i]
        mark = dump(x)
        if old.by_marshal:
            return old if mark == old.mark else None
        if old.mark is None:
            return None
        code = self.out.encode(x, f"{self.path}[{i}]")
        if (code if old.name is None else _VALUE + code) != old.mark:
            return None
        if mark is not None and plain(x):
            return Item(old.name, old.code, old.size, mark, True, old.cut, old.below)
        return old

    # Making ----------------------------------------------------------------------------------------------------------

    def _item(self, i: int) -> Item:
        x = self.xs[i]
        path = f"{self.path}[{i}]"
        mark = dump(x)
        code = self.out.encode(x, path)
        by_marshal = mark is not None and plain(x)
        size = len(code)
        if size <= ITEM_MIN:
            return Item(None, code, size, mark if by_marshal else code, by_marshal, not zlib.crc32(code) & PAGE_BITS)
        if size > BIG and (type(x) is dict or type(x) is list):
            node = self.out.split(x, path, self.level)
            if node is not None:
                name, *below = all_names(node)
                return Item(name, b"", size, mark if by_marshal else _VALUE + code, by_marshal, cuts(name), tuple(below))
        obj = self.out.add(b"", _VALUE + code)
        return Item(obj.name, b"", size, mark if by_marshal else obj.data, by_marshal, cuts(obj.name))

    def _seal(self, items: list[Item], values: list[Any], old: Page | None) -> Page:
        size = sum([i.size for i in items])
        if old is None:
            refs: list[bytes] = []
            code = self._codes(items, refs)
            obj = self.out.add(b"".join(refs), b"l\x92" + _encode(size) + code)
        else:
            obj = old.obj
        mark = None
        if all(i.by_marshal for i in items):
            mark = dump(values)
            # The items' marks are older than this one. If they still hold, nothing has changed between the two.
            if any(dump(x) != i.mark for x, i in zip(values, items, strict=True)):
                mark = None
        below = tuple([name for i in items for name in i.below])
        return Page(obj, len(items), size, mark, () if mark is not None else tuple(items), below, hash(items[0].mark))

    @staticmethod
    def _codes(items: Sequence[Item], refs: list[bytes]) -> bytes:
        parts = [array_head(len(items))]
        for item in items:
            if item.name is None:
                parts.append(item.code)
            else:
                parts.append(ref_code(len(refs)))
                refs.append(item.name)
        return b"".join(parts)
