"""An embedded office: ten deterministic tools with type hints and docstrings, so TRL can make schemas of them.

`day` turns all answers of the office over. The tools answer for `TODAY`; supervised examples are drawn from
other days, so that a model has to read the tool's answer instead of remembering it.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

TODAY = 0
PEOPLE = (
    *("Ada", "Amir", "Bela", "Boris", "Carla", "Chen", "Dora", "Emil", "Femi", "Gina", "Hugo", "Ines"),
    *("Ivan", "Jana", "Kofi", "Lena", "Mila", "Nils", "Olga", "Omar", "Petra", "Quinn", "Rosa", "Sven"),
)
ITEMS = ("pens", "lamps", "desks", "mugs", "staplers", "screens", "cables", "chairs", "folders", "stamps")
ROOMS = ("Aspen", "Birch", "Cedar", "Elm", "Fir", "Hazel", "Larch", "Maple", "Oak", "Willow")
# tool: (its argument, what it looks up, the keys it knows)
LOOKUPS: dict[str, tuple[str, str, Sequence[str]]] = {
    "get_phone": ("person", "phone", PEOPLE),
    "get_desk": ("person", "desk", PEOPLE),
    "get_stock": ("item", "stock", ITEMS),
    "get_price": ("item", "price", ITEMS),
    "get_seats": ("room", "size", ROOMS),
}
# tool: (its argument, the role of the person it names, the keys it knows)
LINKS: dict[str, tuple[str, str, Sequence[str]]] = {
    "get_manager": ("person", "manager", PEOPLE),
    "get_owner": ("room", "owner", ROOMS),
}


def _hash(*parts: object) -> int:
    return zlib.crc32("/".join(map(str, parts)).encode())


def respond(name: str, arguments: Mapping[str, Any], day: int = TODAY) -> str:
    """Answer of one tool on one day.

    Args:
        name: the tool.
        arguments: its arguments by name.
        day: which day's office to look at.

    Returns:
        The tool's text: a two-digit number, a person, or a kind of thing.

    Raises:
        ValueError: no such tool, or a key the office does not know.
    """
    if name == "add":
        return str(int(arguments["a"]) + int(arguments["b"]))
    if name == "find":
        kinds = {"person": PEOPLE, "item": ITEMS, "room": ROOMS}
        return next((kind for kind, keys in kinds.items() if arguments["query"] in keys), "nothing")
    if name == "book_room":
        _known(arguments["room"], ROOMS)
        return str(10 + _hash(day, name, arguments["room"], arguments["hour"]) % 90)
    if name not in LOOKUPS and name not in LINKS:
        raise ValueError(f"unknown tool: {name}")
    argument, _, keys = LOOKUPS.get(name) or LINKS[name]
    key = _known(arguments[argument], keys)
    if name in LOOKUPS:
        return str(10 + _hash(day, name, key) % 90)
    others = [person for person in PEOPLE if person != key]
    return others[_hash(day, name, key) % len(others)]


def _known(key: str, keys: Sequence[str]) -> str:
    if key not in keys:
        raise ValueError(f"unknown: {key}")
    return key


def get_phone(person: str) -> str:
    """Phone of a person.

    Args:
        person: Name.
    """
    return respond("get_phone", {"person": person})


def get_desk(person: str) -> str:
    """Desk of a person.

    Args:
        person: Name.
    """
    return respond("get_desk", {"person": person})


def get_manager(person: str) -> str:
    """Manager of a person.

    Args:
        person: Name.
    """
    return respond("get_manager", {"person": person})


def get_stock(item: str) -> str:
    """Stock of an item.

    Args:
        item: Item.
    """
    return respond("get_stock", {"item": item})


def get_price(item: str) -> str:
    """Price of an item.

    Args:
        item: Item.
    """
    return respond("get_price", {"item": item})


def get_seats(room: str) -> str:
    """Seats in a room.

    Args:
        room: Room.
    """
    return respond("get_seats", {"room": room})


def get_owner(room: str) -> str:
    """Person who owns a room.

    Args:
        room: Room.
    """
    return respond("get_owner", {"room": room})


def book_room(room: str, hour: int) -> str:
    """Book a room and get a code.

    Args:
        room: Room.
        hour: Hour of the day.
    """
    return respond("book_room", {"room": room, "hour": hour})


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: First.
        b: Second.
    """
    return respond("add", {"a": a, "b": b})


def find(query: str) -> str:
    """Search the office directory.

    Args:
        query: Name.
    """
    return respond("find", {"query": query})


TOOLS: tuple[Callable[..., str], ...] = (
    *(get_phone, get_desk, get_manager, get_stock, get_price),
    *(get_seats, get_owner, book_room, add, find),
)


@cache
def schemas_json() -> str:
    """The tools' OpenAI-style schemas as one JSON text, as a dataset column holds them."""
    from transformers.utils import get_json_schema

    return json.dumps([get_json_schema(tool) for tool in TOOLS])
