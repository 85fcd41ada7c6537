import pytest
import torch

from moe_routing import OperationRules, code_api_names, tool_call_names
from moe_routing.operations import snake_case

APPWORLD_TRAJECTORY = [
    ("print(apis.api_docs.show_app_descriptions())", ("read",)),
    (
        "# first find out how apis.spotify.delete_playlist() works, then decide\n"
        "print(apis.api_docs.show_api_doc(app_name='spotify', api_name='delete_playlist'))",
        ("read",),
    ),
    (
        "passwords = apis.supervisor.show_account_passwords()\n"
        "password = next(p['password'] for p in passwords if p['account_name'] == 'spotify')\n"
        "token = apis.spotify.login(username='ann@example.com', password=password)['access_token']",
        ("read",),
    ),
    (
        "def every_page(api, **kwargs):\n"
        "    page, result = 0, []\n"
        "    while items := api(page_index=page, **kwargs):\n"
        "        result += items\n"
        "        page += 1\n"
        "    return result\n"
        "songs = every_page(apis.spotify.show_song_library, access_token=token)",
        ("read",),
    ),
    (
        "for song in songs:\n"
        "    if song['rating'] < 3:\n"
        "        apis.spotify.remove_song_from_library(song_id=song['song_id'], access_token=token)\n"
        "    else:\n"
        "        apis.spotify.like_song(song_id=song['song_id'], access_token=token)",
        ("delete", "update"),
    ),
    (
        "spotify = apis.spotify\n"
        "playlist = spotify.create_playlist(title='Best of', access_token=token)\n"
        "[spotify.add_song_to_playlist(playlist_id=playlist['playlist_id'], song_id=s, access_token=t) for s in top]",
        ("create",),
    ),
    (
        "apis.phone.send_text_message(phone_number=n, message='apis.phone.delete_text_message()')\n"
        "apis.venmo.deny_payment_request(payment_request_id=3, access_token=token)",
        ("create", "update"),
    ),
    ("notes = apis.simple_note.search_notes(query='x'\napis.simple_note.delete_note(note_id=1)", ("delete", "read")),
    ("while True:\n    break  # nothing to call", ()),
    (None, ()),
    ("", ()),
    ("I will call apis.todoist.update_task now.\n```python\napis.todoist.show_tasks(token)\n```\nand wait", ("read",)),
    ("apis.todoist.complete_task(task_id=3)", ()),
    ("apis.supervisor.complete_task(answer=42)", ("complete",)),
]


@pytest.mark.parametrize(("code", "expected"), APPWORLD_TRAJECTORY)
def test_appworld_turns(code, expected):
    assert OperationRules.appworld()(code) == expected


TOOL_CALL_TRAJECTORY = [
    (
        '<think>I could <tool_call>{"name": "gmail_delete_email"}</tool_call> but first I look.</think>\n'
        '<tool_call>\n{"name": "gmail_find_email", "arguments": {"query": "invoice"}}\n</tool_call>',
        ("read",),
    ),
    (
        '<tool_call>{"name": "pipefy_list_deleted_cards", "arguments": {}}</tool_call>'
        '<tool_call>{"name": "Pipefy.createCard", "arguments": {"title": "</tool_call><tool_call>{}"}}</tool_call>',
        ("create", "read"),
    ),
    ('<tool_call>[{"name": "update_row"}, {"name": "slack-send-message"}]</tool_call>', ("create", "update")),
    ('<tool_call>{"name": "a_get"}{"name": "b_remove"}</tool_call>', ("delete", "read")),
    ({"name": "get_update_history", "arguments": {}}, ("read",)),
    ([{"type": "function", "function": {"name": "cancel_order", "arguments": "{}"}}], ("update",)),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "finishTask"}}]}, ("complete",)),
    ('{"tool_name": "calendar__create_event", "parameters": {}}', ("create",)),
    ('[{"name": "search"}, {"name": "delete_search_filter"}]', ("delete", "read")),
    (
        "<think>a plan</think><tool_call>\n<function=delete_row>\n<parameter=note>\n<tool_call><function=get_row>\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=send_mail>\n</function>\n</tool_call>",
        ("create", "delete"),
    ),
    ("<tool_call><function=get_a></function><function=delete_b></function></tool_call>", ("delete", "read")),
    ("<think><tool_call><function=delete_b></function></tool_call></think>none", ()),
    (
        "<tool_call><function=send_a><parameter=s><think></parameter></function></tool_call>"
        "<tool_call><function=get_b></function></tool_call>",
        ("create", "read"),
    ),
    ("<tool_call><function=get_a><parameter=cut off", ("read",)),
    ('<tool_call>{"name": </tool_call>', ()),
    ("<tool_call>{}</tool_call>", ()),
    ("All done, nothing to call.", ()),
    (None, ()),
    ([], ()),
    ({"name": "weather"}, ()),
    ({"name": "getter_of_things"}, ()),
]


@pytest.mark.parametrize(("turn", "expected"), TOOL_CALL_TRAJECTORY)
def test_tool_call_turns(turn, expected):
    assert OperationRules.tool_calls()(turn) == expected


def test_labels_of_a_long_trajectory_are_one_row_a_turn_and_deterministic():
    rules = OperationRules.appworld()
    turns = [code for code, _ in APPWORLD_TRAJECTORY] * 20
    labels = rules.labels(turns)
    assert rules.operations == ("complete", "create", "delete", "read", "update")
    assert labels.shape == (20 * len(APPWORLD_TRAJECTORY), 5)
    assert torch.equal(labels, OperationRules.appworld().labels(turns))
    for row, (_, expected) in zip(labels, APPWORLD_TRAJECTORY):
        assert tuple(op for op, on in zip(rules.operations, row.tolist()) if on) == expected
    assert rules.labels([]).shape == (0, 5)


def test_names_that_no_rule_knows_are_listed():
    rules = OperationRules.appworld()
    assert rules.unmatched("apis.todoist.complete_task(1); apis.a.frobnicate(); apis.a.show_b()") == (
        "a.frobnicate",
        "todoist.complete_task",
    )


def test_own_rules_may_give_a_name_several_operations():
    rules = OperationRules({"mail": "^gmail", "write": ["send", "save"], "never": "^$"})
    assert rules({"name": "gmail_send_email"}) == ("mail", "write")


@pytest.mark.parametrize(
    ("patterns", "message"), [({}, "names no operation"), ({"read": "("}, "operation 'read' has an invalid pattern")]
)
def test_rule_sets_that_cannot_work_are_errors(patterns, message):
    with pytest.raises(ValueError, match=message):
        OperationRules(patterns)


def test_code_names_follow_assignments_until_they_are_overwritten():
    code = "a = apis.mail\nsend = a.send\nsend('x')\na = 3\na.delete_all()\nother.apis.mail.purge()\nb.apis = 1"
    assert code_api_names(code) == ["mail.send"]


@pytest.mark.parametrize(
    "code",
    [
        "mail: object = apis.mail\nmail.send()",
        "if (mail := apis.mail):\n    mail.send()",
        "(send := apis.mail.send)('x')",
        "(mail := apis.mail).send()",
        "(mail := apis.mail)\nmail.send()",
        "if (mail := [apis.mail.send()]):\n    mail.delete()",
        "files, mail = apis.files, apis.mail\nmail.send()",
        "(a, mail), b = (1, apis.mail), 2\nmail.send()",
        "[a, *rest, mail] = [1, 2, 3, apis.mail]\nmail.send()",
        "a = mail = apis.mail\nmail.send()",
    ],
)
def test_code_names_follow_every_kind_of_assignment(code):
    assert code_api_names(code) == ["mail.send"]


@pytest.mark.parametrize(
    "code",
    [
        "mail: object\nmail.send()",
        "mail = apis.mail\nmail: object = 3\nmail.send()",
        "mail = apis.mail\n(mail := 3)\nmail.send()",
        "mail = apis.mail\nmail, a = 3, 4\nmail.send()",
        "mail = apis.mail\nmail, a = others()\nmail.send()",
        "a, mail = apis.mail\nmail.send()",
        "a, mail = apis.mail, 3\nmail.send()",
    ],
)
def test_code_names_end_with_every_kind_of_assignment(code):
    assert code_api_names(code) == []


def test_code_that_does_not_parse_is_searched_outside_strings_and_comments():
    code = (
        "if x\n  apis.a.get('apis.b.no()') # apis.c.no()\n"
        "'''apis.d.no()'''\n  await apis . e . put (1)\n  print(apis.f.g)"
    )
    assert code_api_names(code) == ["a.get", "e.put"]


@pytest.mark.parametrize(
    "code", ["'" * 7 + "apis.a.b(", "(" * 5000, "\0apis.a.get()", "x = '\\", '"""apis.a.b()', "```python\napis.a.get()"]
)
def test_hostile_code_never_raises(code):
    assert all(isinstance(name, str) for name in code_api_names(code))


@pytest.mark.parametrize("inside", ["apis.a.get()", "apis.a.get", "f(apis.a.get)"])
def test_nested_assignments_are_read_once_each(inside):
    assert code_api_names("(b := " * 60 + inside + ")" * 60) == ["a.get"]


def test_code_too_deep_to_walk_is_searched_instead():
    assert code_api_names("apis.a.get()" + " + 1" * 20_000) == ["a.get"]
    assert code_api_names("x = '\\d'; apis.a.get()") == ["a.get"]


def test_very_long_names_are_matched_in_linear_time():
    assert OperationRules.tool_calls()({"name": "a_" * 20_000 + "get"}) == ("read",)
    assert OperationRules.appworld()("apis." + "a_" * 20_000 + ".x_get()") == ("read",)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "<tool_call>" * 500, '{"name": ["x"]}', '{"name": null}', "{" * 999, "NaN"]
)
def test_hostile_calls_never_raise(text):
    assert tool_call_names(text) == []


def test_calls_that_never_end_are_read_in_linear_time():
    assert tool_call_names("<tool_call><function=a>" * 100_000) == ["a"]


def test_other_types_are_errors():
    for reader in (code_api_names, tool_call_names):
        with pytest.raises(TypeError, match="must be text"):
            reader(3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Gmail.sendEmail", "gmail.send_email"),
        ("HTTPGet", "http_get"),
        ("a__b", "a_b"),
        ("a-b/c d", "a_b_c_d"),
        ("getV2Items", "get_v2_items"),
    ],
)
def test_snake_case(name, expected):
    assert snake_case(name) == expected
