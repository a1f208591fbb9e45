"""What the scripted model knows: rules over the text of a document.

There is no list of documents and no list of answers here. A rule reads what is written, so that a document that is changed,
added or taken away changes what is found. The driver uses the same rules to say which mails there must be in the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta

MONTHS = "January February March April May June July August September October November December".split()  # noqa: SIM905
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()  # noqa: SIM905

_DAY = rf"\d{{1,2}} (?:{'|'.join(MONTHS)}) \d{{4}}"
_EUR = r"EUR ([\d,]+\.\d\d)"

ACCOUNTS, SAFETY, OFFICE, SERVICE = (f"{who}@example.com" for who in ("accounts", "safety", "office", "service"))


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that somebody should be told, and the mail that tells it."""

    document: str
    kind: str
    to: str
    subject: str
    body: str
    cents: int = 0
    """The money it is about, for the ledger."""


def find(document: str, text: str, today: date) -> list[Finding]:
    """All that the rules find in a document, in the order of the rules."""
    found = []
    for rule in RULES:
        kind = rule.__name__.strip("_").replace("_", " ")
        try:
            said = list(rule(text, today))
        except ValueError as error:  # 31 June 2025
            kind, said = "impossible date", [(OFFICE, "Impossible date", f"A date cannot be right: {error}.", 0)]
        for to, subject, says, cents in said:
            body = f"{says}\n\nFound in {document} on {today.isoformat()}.\n"
            found.append(Finding(document, kind, to, subject, body, cents))
    return list(dict.fromkeys(found))  # said twice in a document, told once


_Said = Iterator[tuple[str, str, str, int]]
"""Receiver, subject, what to say, cents."""


def _units(text: str) -> list[str]:
    """Paragraphs and list items, each on one line: what belongs together in prose is not always on the same line."""
    units: list[str] = []
    for paragraph in text.split("\n\n"):
        for part in re.split(r"\n(?=- )", paragraph.strip()):
            units.append(" ".join(part.split()))  # noqa: PERF401
    return units


def _date(said: str) -> date:
    day, month, year = said.split()
    return date(int(year), MONTHS.index(month) + 1, int(day))


def _cents(said: str) -> int:
    return int(said.replace(",", "").replace(".", ""))


def _money(cents: int) -> str:
    return f"EUR {cents / 100:,.2f}"


def _overdue_invoice(text: str, today: date) -> _Said:
    for unit in _units(text):
        number = re.search(r"\b[Ii]nvoice ([A-Z]+-[\d-]*\d)", unit)
        due = re.search(rf"\b(?:due|payable)(?: on| by)? ({_DAY})", unit)
        paid = re.search(r"\b(?:paid|settled) on\b", unit)
        if number and due and not paid and _date(due[1]) < today:
            amount = re.search(_EUR, unit)
            cents = _cents(amount[1]) if amount else 0
            late = (today - _date(due[1])).days
            yield (
                ACCOUNTS,
                f"Invoice {number[1]} is overdue",
                f"Invoice {number[1]} over {_money(cents)} was due on {due[1]}, {late} days ago, and is not paid.",
                cents,
            )


def _expired_certificate(text: str, today: date) -> _Said:
    for unit in _units(text):
        if not re.search(r"certificat|approval", unit, re.IGNORECASE):
            continue
        for said in re.findall(rf"\b(?:valid until|expires on) ({_DAY})", unit):
            if _date(said) < today:
                what = unit.removeprefix("- ").split(": ")[0].split(".")[0]
                yield SAFETY, f"Certificate expired on {said}", f"{what}. By this document it ended on {said}.", 0


def _missing_check(text: str, _today: date) -> _Said:
    lists = dict(re.findall(r"^(Required checks|Checks done): (.+)$", text, re.MULTILINE))
    if len(lists) == 2:
        done = {c.strip() for c in lists["Checks done"].split(";")}
        for check in lists["Required checks"].split(";"):
            if check.strip() not in done:
                yield _check(text, check.strip())
    if re.search(r"\breleased for use\b", text):
        for check in re.findall(r"^\[ \] (.+)$", text, re.MULTILINE):
            yield _check(text, check)


def _check(text: str, check: str) -> tuple[str, str, str, int]:
    what = " ".join(text.split("\n\n", maxsplit=1)[0].splitlines()[:2])
    return SAFETY, f"Check left out: {check}", f"{what}: this check was left out: {check}.", 0


def _exceeded_limit(text: str, _today: date) -> _Said:
    for unit in re.split(r"\n", text):
        m = re.match(r"(.+?): measured ([\d.]+) (\w+).*?allowed at most ([\d.]+) \3", unit)
        if m and float(m[2]) > float(m[4]):
            yield SAFETY, f"Limit exceeded: {m[1]}", f"{m[1]} is {m[2]} {m[3]}; at most {m[4]} {m[3]} are allowed.", 0


def _wrong_weekday(text: str, _today: date) -> _Said:
    for weekday, said in re.findall(rf"\b({'|'.join(WEEKDAYS)}), ({_DAY})", text):
        right = WEEKDAYS[_date(said).weekday()]
        if right != weekday:
            yield OFFICE, f"Contradictory date: {weekday}, {said}", f"{said} was a {right} and no {weekday}.", 0


def _wrong_sum(text: str, _today: date) -> _Said:
    total = re.search(rf"^Total: {_EUR}$", text, re.MULTILINE)
    items = [_cents(a) for a in re.findall(rf"^- .+: {_EUR}$", text, re.MULTILINE)]
    if total and items and sum(items) != _cents(total[1]):
        off = _cents(total[1]) - sum(items)
        yield (
            ACCOUNTS,
            f"Items do not add up to {_money(_cents(total[1]))}",
            f"The total says {_money(_cents(total[1]))}, the items add up to {_money(sum(items))}.",
            abs(off),
        )


def _action_without_owner(text: str, _today: date) -> _Said:
    for number, action, owner in re.findall(r"^Action (\d+): (.+?)\.? Owner: (.+?)\.?$", text, re.MULTILINE):
        if re.match(r"(?:nobody|none|open)\b", owner):
            yield OFFICE, f"Nobody is in charge: {action}", f"Action {number} has no owner: {action}.", 0


def _late_answer(text: str, today: date) -> _Said:
    field = dict(re.findall(r"^(Ticket|Customer|Opened|Answer within|Status):? (.+)$", text, re.MULTILINE))
    if field.get("Status") == "open" and {"Ticket", "Opened", "Answer within"} <= field.keys():
        days = int(field["Answer within"].split()[0])
        last = _date(field["Opened"]) + timedelta(days=days)
        if last < today:
            yield (
                SERVICE,
                f"Ticket {field['Ticket']} is late",
                f"Ticket {field['Ticket']} of {field.get('Customer', 'a customer')} was to be answered by {last}.",
                0,
            )


def _notice_period(text: str, today: date) -> _Said:
    for unit in _units(text):
        for said in re.findall(rf"\bno later than ({_DAY})", unit):
            if timedelta(0) <= _date(said) - today <= timedelta(days=45):
                yield OFFICE, f"Decide by {said}", f"A right under this contract ends on {said}: {unit}", 0


RULES = (
    _overdue_invoice,
    _expired_certificate,
    _missing_check,
    _exceeded_limit,
    _wrong_weekday,
    _wrong_sum,
    _action_without_owner,
    _late_answer,
    _notice_period,
)
