"""Names of files for ids: one to one under the rules of POSIX, Windows and macOS at once. Field case 68, the pure part."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.errors import SafepointError
from safepoint.model import check_id
from safepoint.stores import filenames
from tests.support.scale import scale


def _is_id(id: str) -> bool:
    try:
        check_id(id)
    except SafepointError:
        return False
    return True


ids = st.one_of(
    st.text(min_size=1, max_size=20),
    st.text(alphabet="aAbB%^~.: -_/\\\u0301éÉ", min_size=1, max_size=8),
    st.text(alphabet="kK\u212aſsßẞiIıİµμǆǅǄ가ㄱ\u1100\u1161\uac00ﬁfi²2", min_size=1, max_size=6),
    st.sampled_from(["con", "CON", "aux.txt", "com1", "lpt9 ", "nul.", "COM¹", "conin$", "clock$", "journal.jsonl", ".", ".."]),
    st.text(alphabet="x", min_size=100, max_size=512),
    st.builds(lambda c, n: c * n, st.characters(), st.integers(1, 512)),
).filter(_is_id)


def as_windows_sees_it(name: str) -> str:
    """The name under which Windows would keep it; raises for one that it would refuse or give to a device."""
    assert not re.search(r'[<>:"/\\|?*\x00-\x1f]', name), "a character that Windows refuses, or that names a stream"
    assert not name.endswith((".", " ")), "what Windows would cut off"
    stem = re.split(r"[. ]", name)[0].upper()
    devices = {"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$", *(f"{d}{n}" for d in ("COM", "LPT") for n in "0123456789¹²³")}
    assert stem not in devices, "a device"
    assert len(name.encode("utf-16-le")) <= 2 * 255
    return name.upper()


def as_a_mac_sees_it(name: str) -> str:
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())


def foldings(name: str) -> list[str]:
    folded = name.casefold()
    return [
        as_windows_sees_it(name),
        as_a_mac_sees_it(name),
        name.lower(),
        unicodedata.normalize("NFC", folded),
        unicodedata.normalize("NFKC", folded),
    ]


@given(ids)
def test_a_name_is_fit_for_every_system_and_leads_back(id: str) -> None:
    name = filenames.encode(id)
    assert name not in {"", ".", ".."}
    assert not name.startswith((".", "-", " "))
    assert "/" not in name
    assert "\0" not in name
    assert len(name.encode()) <= 120
    as_windows_sees_it(name)
    assert name.casefold() not in {filenames.JOURNAL, filenames.SPACES}
    if filenames.is_cut(name):
        assert len(id.encode()) > 40
        assert filenames.decode(name) is None
    else:
        assert filenames.decode(name) == id
        assert filenames.decode(unicodedata.normalize("NFD", name)) == id


@given(ids, ids)
def test_two_ids_have_two_names_also_where_letters_are_folded(a: str, b: str) -> None:
    if a != b:
        for x, y in zip(foldings(filenames.encode(a)), foldings(filenames.encode(b)), strict=True):
            assert x != y


@given(ids)
def test_ids_that_fold_alike_have_two_names(id: str) -> None:
    twins = {id.upper(), id.lower(), id.casefold(), id.title(), id.swapcase(), id + ".", id + " ", id.rstrip(". "), f" {id}"}
    twins |= {unicodedata.normalize(form, id) for form in ("NFC", "NFD", "NFKC", "NFKD")}
    for twin in twins - {id}:
        if _is_id(twin):
            for x, y in zip(foldings(filenames.encode(id)), foldings(filenames.encode(twin)), strict=True):
                assert x != y, twin


@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("task-1", "task-1"),
        ("main~2", "main~2"),
        ("Invoice 7", "^Invoice 7"),
        ("a:b", "a%3ab"),
        ("..", "%2e%2e"),
        ("con", "%63on"),
        ("x.", "x%2e"),
        ("日本", "日本"),
        ("user@example.org", "user@example.org"),
    ],
)
def test_names_can_be_read(id: str, name: str) -> None:
    assert filenames.encode(id) == name


@given(st.text(min_size=1, max_size=12))
def test_what_is_no_name_of_ours_is_none(name: str) -> None:
    id = filenames.decode(name)
    assert id is None or filenames.encode(id) == unicodedata.normalize("NFC", name)


@pytest.mark.scaled
def test_every_single_character() -> None:
    """No two of the whole of Unicode meet."""
    seen: dict[str, str] = {}
    for code in (*range(1, 0xD800), *range(0xE000, scale(0x10000, 0x110000))):
        c = chr(code)
        name = filenames.encode(f"x{c}x")
        if c.isalnum():
            for folded in {as_a_mac_sees_it(name), name.upper(), unicodedata.normalize("NFKC", name.casefold())}:
                assert seen.setdefault(folded, c) == c, (hex(code), hex(ord(seen[folded])))
