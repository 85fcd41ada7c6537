"""Tool spaces of any size: candidate sets of exactly K tools, with random or hard distractors."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rewards.schema import ToolSet
from rewards.trajectories import Trajectory

Tool = Mapping[str, Any]
Embed = Callable[[Sequence[str]], Sequence[Sequence[float]]]


class ToolPool:
    """The tools of a whole data set, one a name; distractors are drawn from it.

    Args:
        tools: OpenAI-style tool schemas. Of several with one name the first is kept.
        embed: maps texts to vectors of one length (`rewards.adapters.embedding.MiniLM`, or your own). It is asked once
            for the pool. None: only random distractors.

    Raises:
        ToolSchemaError: one of the tools is not one.
        ValueError: `embed` gave another number of vectors than it got texts, or one that is not finite.

    Example:
        >>> pool = ToolPool([{"name": "add"}, {"name": "subtract"}, {"name": "add", "description": "another"}])
        >>> pool.names
        ('add', 'subtract')

    Reference: SLCA appendix C.6, the global tool pool.
    """

    def __init__(self, tools: Iterable[Tool], embed: Embed | None = None) -> None:
        found: dict[str, Tool] = {}
        for tool in tools:
            found.setdefault(tool_name(tool), tool)
        self.names, self.tools = tuple(found), tuple(ToolSet(found.values()))
        self._embed = embed
        self._vectors: Any = _unit(embed, [_text(tool) for tool in self.tools]) if embed and self.tools else None

    def random(self, excluded: frozenset[str], count: int, draw: random.Random) -> list[Tool]:
        """`count` tools, uniformly without replacement, whose names are not excluded."""
        free = [tool for name, tool in zip(self.names, self.tools) if name not in excluded]
        return draw.sample(free, count) if count <= len(free) else _too_few(count, len(free))

    def hard(self, gold: Sequence[Tool], excluded: frozenset[str], count: int) -> list[Tool]:
        """The `count` tools most like any gold tool (cosine of embeddings), whose names are not excluded."""
        if self._embed is None:
            raise ValueError("embed: hard distractors need an embedding function")
        free = [index for index, name in enumerate(self.names) if name not in excluded]
        if count > len(free):
            _too_few(count, len(free))
        if not count:
            return []
        similarity = (self._vectors[free] @ _unit(self._embed, [_text(tool) for tool in gold]).T).max(axis=1)
        order = sorted(range(len(free)), key=lambda place: (-similarity[place], self.names[free[place]]))
        return [self.tools[free[place]] for place in order[:count]]


def random_candidates(row: Trajectory, pool: ToolPool, k: int, seed: int = 0) -> Trajectory:
    """The row with exactly K tools: its own, and distractors drawn uniformly from the pool.

        |A| < K: A and K - |A| tools of the pool;  |A| > K: the gold tools and K - |G| others of A;  K = 0: A unchanged

    Args:
        row: a task with its tools A and its gold calls, whose tools G are always kept.
        pool: where distractors come from; tools with the name of one of the row's are never drawn.
        k: number of tools, or 0.
        seed: with the row's id it decides the draw and the order, so a row's set does not depend on other rows.

    Returns:
        The row with its candidate set, in random order.

    Raises:
        ValueError: K is negative or smaller than the number of gold tools, the pool has too few tools, gold is unknown,
            or a gold tool is not among the row's.

    Example:
        >>> from rewards import as_gold
        >>> row = Trajectory((), ({"name": "add"},), as_gold([[{"name": "add", "arguments": {}}]]), id="r1")
        >>> pool = ToolPool([{"name": "add"}, {"name": "subtract"}, {"name": "divide"}])
        >>> sorted(tool["name"] for tool in random_candidates(row, pool, 2).tools)
        ['add', 'subtract']

    Reference: SLCA appendix C.6; the order of tools and the seed are ours.
    """
    draw = random.Random(json.dumps([seed, row.id, row.source, k]))
    names, count = _room(row, k)
    extra = pool.random(names, count, draw) if count > 0 else []
    return _candidates(row, extra, k, draw)


def hard_candidates(row: Trajectory, pool: ToolPool, k: int, seed: int = 0) -> Trajectory:
    """The row with exactly K tools: its own, and the pool's tools that are most like the gold ones.

    Likeness is the cosine of the embeddings of name and description; for several gold tools, the largest. A row whose
    gold is empty has its distractors mined for all of its tools. Where K is smaller than the number of the row's tools,
    this is `random_candidates`.

    Args:
        row: a task with its tools and its gold calls.
        pool: made with `embed`.
        k: number of tools, or 0 for the row as it is.
        seed: decides the order.

    Returns:
        The row with its candidate set, in random order.

    Raises:
        ValueError: as in `random_candidates`; or the pool was made without `embed`.

    Example:
        >>> from rewards import as_gold
        >>> embed = lambda texts: [[text.count("e"), 1.0] for text in texts]
        >>> row = Trajectory((), ({"name": "see"},), as_gold([[{"name": "see", "arguments": {}}]]), id="r1")
        >>> pool = ToolPool([{"name": "run"}, {"name": "feel"}, {"name": "jump"}], embed)
        >>> sorted(tool["name"] for tool in hard_candidates(row, pool, 2).tools)
        ['feel', 'see']

    Reference: SLCA appendix C.6.
    """
    draw = random.Random(json.dumps([seed, row.id, row.source, k]))
    names, count = _room(row, k)
    gold = _gold_names(row)
    wanted = [tool for tool in row.tools if tool_name(tool) in gold] or list(row.tools)
    extra = pool.hard(wanted, names, count) if count > 0 and wanted else []
    return _candidates(row, extra, k, draw)


@dataclass
class WithinContext:
    """Passes on the rows that fit the context, and counts those that do not.

    Args:
        rows: rows with their candidate sets.
        limit: most tokens of messages and tools together.
        count_tokens: tokens of a row as your template writes it, for instance
            `lambda row: len(tokenizer.apply_chat_template(list(row.messages), tools=list(row.tools)))`.

    Attributes:
        kept: number of rows passed on so far.
        skipped: ids of the rows left out so far.

    Example:
        >>> rows = WithinContext([Trajectory((), id="a"), Trajectory((), id="bb")], 1, lambda row: len(row.id))
        >>> [row.id for row in rows], rows.kept, rows.skipped
        (['a'], 1, ['bb'])

    Reference: SLCA appendix C.6, the skip policy.
    """

    rows: Iterable[Trajectory]
    limit: int
    count_tokens: Callable[[Trajectory], int]
    kept: int = field(default=0, init=False)
    skipped: list[str] = field(default_factory=list, init=False)

    def __iter__(self) -> Iterator[Trajectory]:
        self.kept, self.skipped = 0, []
        for row in self.rows:
            if self.count_tokens(row) > self.limit:
                self.skipped.append(row.id or row.source)
                continue
            self.kept += 1
            yield row


def tool_name(tool: Tool) -> str:
    """The name of a tool, with or without the outer `{"type": "function"}`."""
    return str(ToolSet([tool]) and tool.get("function", tool)["name"])


def _text(tool: Tool) -> str:
    """What is embedded: name and description."""
    function = tool.get("function", tool)
    return f"{function['name']} {function.get('description') or ''}".strip()


def _unit(embed: Embed, texts: Sequence[str]) -> Any:
    import numpy

    vectors = numpy.asarray(embed(texts), dtype=numpy.float64)
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise ValueError(f"embed: expected {len(texts)} vectors of one length, got shape {vectors.shape}")
    if not numpy.isfinite(vectors).all():
        raise ValueError("embed: a vector holds NaN or infinity, which is like nothing")
    length = numpy.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / numpy.where(length > 0, length, 1.0)


def _gold_names(row: Trajectory) -> frozenset[str]:
    if row.gold is None:
        raise ValueError(f"{row.id or row.source}: gold: unknown, so no tool can be told from a distractor")
    return frozenset(call.name for call in row.gold.flat)


def _room(row: Trajectory, k: int) -> tuple[frozenset[str], int]:
    """The names of the row's tools, and how many more there is room for."""
    where = row.id or row.source
    names, gold = frozenset(map(tool_name, row.tools)), _gold_names(row)
    if k < 0 or 0 < k < len(gold):
        raise ValueError(f"{where}: k: expected 0 or at least {len(gold)}, the number of gold tools, got {k}")
    if gold - names:
        raise ValueError(f"{where}: tools: the gold tool {min(gold - names)!r} is not among them")
    return names, k - len(names)


def _candidates(row: Trajectory, extra: Sequence[Tool], k: int, draw: random.Random) -> Trajectory:
    if not k:
        return row
    own = list({tool_name(tool): tool for tool in row.tools}.values())
    gold = _gold_names(row)
    kept = [tool for tool in own if tool_name(tool) in gold]
    others = [tool for tool in own if tool_name(tool) not in gold]
    chosen = kept + draw.sample(others, min(len(others), k - len(kept))) + list(extra)
    if len(chosen) != k:
        raise ValueError(f"{row.id or row.source}: tools: empty, so nothing tells which distractors are hard")
    return replace(row, tools=tuple(draw.sample(chosen, k)))


def _too_few(count: int, free: int) -> Any:
    raise ValueError(f"pool: {count} distractors wanted, {free} tools are free")
