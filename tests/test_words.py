"""Docstrings read well without the name that they describe, and pages keep the rules of plain English.

`python tests/test_words.py docs/page.md ...` prints what each of these pages breaks.
"""

import ast
import re
import statistics
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDERS = [
    "compress",
    "kernels",
    "ddp_core/averaging",
    "ddp_core/buckets",
    "ddp_core/engine",
    "ddp_core/measure",
    "ddp_core/memory",
    "ddp_core/overlap",
    "ddp_core/reducer",
    "ddp_core/torch_compat",
    "ddp_core/transport",
    "hooks",
    "experiments",
]  # those that keep the rule
REFUSED = ["Among", "As", "How", "It", "Of", "So", "That", "Those", "What", "Where", "Whether", "Which", "Who"]

HOW_TO = [
    "bench",
    "choosing",
    "compare",
    "compressor-programs",
    "ddp",
    "frameworks",
    "fsdp",
    "gpus-without-nvlink",
    "launchers",
    "local-steps",
    "netlab",
    "overlap",
    "should-i-compress",
    "step-timeline",
    "sweep",
    "thrown-away-gradients",
    "training-script",
    "two-hosts",
    "watch",
    "writing-a-compressor",
]
EXPLANATIONS = [
    "alternatives",
    "collectives",
    "concepts",
    "conformance",
    "emulation",
    "error-feedback",
    "how-advise-works",
    "kernels",
    "local-steps-explained",
    "promises",
]
NOT_A_PAGE = ["index"]  # a table of contents
MEASUREMENTS = [
    "docs/benchmarks/*.md",
    "docs/benchmarks/*/README.md",
    "docs/results/README.md",
    "docs/results/ddp.md",
    "docs/results/p3.md",
    "docs/results/advise/README.md",
    "docs/results/demo-bytes/README.md",
    "docs/results/loss/README.md",
    "docs/results/papers/README.md",
]  # the other pages of results are written by sweeps
LONGEST, MEDIAN = 30, 15  # words in a sentence
PAGE, BEFORE_A_BLOCK = (
    1500,
    100,
)  # words on a page (a how-to page's tables count), and before a how-to page's first block
HEADING = 9  # words in a heading

FENCE = re.compile(r"^(?P<fence>```|:::|~~~).*?^(?P=fence)$\n?", re.MULTILINE | re.DOTALL)
RUNNABLE = re.compile(r"^```(python|console)?\n(?!\s*$)", re.MULTILINE)
UNIT = r"(?:bytes?|seconds?|ms|s|[kMG]i?B|bits?|numbers?|times|rounds?)"
FORBIDDEN = {
    r"\b(?:specifications?|specs?|schemes?)\b": "compressor",
    r"\bmethods?\b": "compressor",
    r"\bwires?\b": "network",
    r"\b(?:slow|slower|slowest|fast|faster) (?:lines?|links?)\b": "network",
    r"\b(?:over|on|across|than) the (?:line|link)\b": "network",
    r"\b(?:machines?|nodes?|workers?)\b": "host, rank or site",
    r"\b(?:held|holds?|holding) back\b": "residual",
    r"\bow(?:es?|ed|ing)\b": "residual",
    r"\b(?:held-out|eval(?:uation)?) loss(?:es)?\b": "validation loss",
    r"\b(?:dense|densely)\b": "uncompressed",
    r"\bplain\b": "uncompressed",
    r"\b(?:sent|sends?|goes?|go|travels?) (?:out )?as (?:they are|it is)\b": "uncompressed",
    rf"\btimes (?:as|fewer|less|more|slower|faster|{UNIT})\b": "speed-up 1.3x, 30x fewer bytes",
    r"\bas (?:fast|slow|much|many|long) as without\b|\bas without\b": "like a run without",
    r"\b(?:who|that|which) comes? late\b": "straggler, slow rank",
    r"\bwhat is (?:taken|sent|meant|left|needed|kept|held|new|said)\b": "a noun",
    r"\b(?:who|whoever) (?:waits?|sends?|comes?|needs?|has|wants?)\b": "a rank, or you",
    r"\bthose (?:that|which|who)\b": "a noun",
    r"\bsync(?:ed|s)\b": "synchronized",
    r"\bways? out\b": "workaround, fix",
    r"\b(?:tells?|told|telling)\b": "shows, reports, prints, says",
    r"\bat that moment\b": "then",
    r"\bso many\b": "a number",
    r"\b(?:goes|go|going) on\b": "continues",
    rf"\b{UNIT} an? (?:rank|step|parameter|host|element|gradient|site|round|bucket)\b": "per",
}
ALLOWED = re.compile(
    r"DataLoader workers?|virtual machines?|machine learning|dense layers?|dense DDP|plain (?:DDP|SGD|text|English)|"
    r"(?:Python|class|three|two|same) methods?|methods? of (?:the|a) (?:class|handle|module)|over and over|"
    r"Ray(?:'s)? workers?|worker pods?|SLURM(?:'s)? nodes?|multi-node",
    re.IGNORECASE,
)  # where the word means something else
HEADLESS = re.compile(r"^(?:Who|Whoever|Whose|What|Whether|Those|That which)\b")
GOOD_HEADINGS = {"What you should see", "What ran where"}


def headless(source):
    """The docstrings of a module, its classes and its functions whose first word leaves out what they describe."""
    nodes = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    )
    documented = ((getattr(node, "name", "the module"), ast.get_docstring(node) or "") for node in nodes)
    return [(name, text.partition("\n")[0]) for name, text in documented if text and text.split()[0] in REFUSED]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    found = {file.relative_to(ROOT): headless(file.read_text()) for file in sorted((ROOT / folder).rglob("*.py"))}
    assert {file: each for file, each in found.items() if each} == {}


@pytest.mark.parametrize("text", ["Whether it fits.", "Of this rank.", "What is sent."])
def test_a_headless_docstring_is_found(text):
    assert headless(f'class A:\n    def f():\n        """{text}"""\n') == [("f", text)]
    assert headless(f'"""{text}"""\n') == [("the module", text)]
    assert headless('def f():\n    """Return True if it fits, as it is."""\n') == []


def readable(text):
    """A page without blocks, pictures, comments and links' targets. "code" stands for a code span."""
    text = FENCE.sub("\n\n", text)
    text = re.sub(r"<!--.*?-->|!\[[^]]*\]\([^)]*\)|\$[^$\n]+\$", "", text, flags=re.DOTALL)
    text = re.sub(r"``[^`]+``|`[^`]+`", "code", text)
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)


def sentences(text):
    """The words of each sentence of a page's prose: of paragraphs and of items, not of tables and headings."""
    text = re.sub(r"^(\||#).*$", "", readable(text), flags=re.MULTILINE)
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?:])[*)\"]*\s+", " ".join(paragraph.split())):
            if re.search(r"\w", sentence):
                yield sentence


def words(sentence):
    return re.findall(r"\w[\w'./-]*", sentence)


def headings(text):
    """The headings of a page that are not quoted messages."""
    return [
        heading for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE) if heading[0] not in '`"'
    ]


def of_sentences(text):
    """What is wrong with the length and the beginning of sentences."""
    found = list(sentences(text))
    lengths = [len(words(sentence)) for sentence in found]
    yield from (f"{n} words: {each}" for n, each in zip(lengths, found, strict=True) if n > LONGEST)
    if found and statistics.median(lengths) > MEDIAN:
        yield f"the median sentence has {statistics.median(lengths)} words"
    yield from (f"no subject: {each}" for each in found if HEADLESS.match(each) and not each.endswith("?"))


def of_words(text):
    """The forbidden words of prose, tables and headings."""
    text = ALLOWED.sub("", " ".join(readable(text).split()))
    for pattern, instead in FORBIDDEN.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            yield f"{match[0]!r}, say {instead}: {text[max(0, match.start() - 40) : match.end() + 30]}"
    if re.search(r"\blocal steps\b", text, re.IGNORECASE) and not re.search("local SGD|DiLoCo", text):
        yield "local steps without the name local SGD or DiLoCo"


def of_headings(text):
    """What is wrong with a page's title and its headings."""
    found = headings(text)
    for heading in found:
        if len(words(heading)) > HEADING:
            yield f"a long heading: {heading}"
        if HEADLESS.match(heading) and not heading.endswith("?") and heading not in GOOD_HEADINGS:
            yield f"nobody searches for this heading: {heading}"
    yield from (f"a heading twice: {heading}" for heading in set(found) if found.count(heading) > 1)


def of_size(name, text):
    """What is wrong with the size of a how-to or explanation page, and where its first block stands."""
    prose = text if name in EXPLANATIONS else re.sub(r"^\|[-| :]*$|\|", " ", text, flags=re.MULTILINE)
    length = sum(map(len, map(words, sentences(prose))))
    if name in HOW_TO + EXPLANATIONS and length > PAGE:
        yield f"{length} words: split the page"
    if name in HOW_TO:
        title = headings(text)[0]
        if re.match(r"\w+ing\b", title):
            yield f"nobody searches for this title: {title}"
        block = RUNNABLE.search(text)
        before = sum(map(len, map(words, sentences(text[: block.start()])))) if block else None
        if before is None or before > BEFORE_A_BLOCK:
            yield f"no runnable block after {BEFORE_A_BLOCK} words, but after {before}"


def broken(name, text):
    """All rules that a page breaks, a line each."""
    return [*of_sentences(text), *of_words(text), *of_headings(text), *of_size(name, text)]


def pages():
    """{path in the tree: text} of README and of the other pages that people write."""
    found = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    found += (page for each in ("docs/*.md", *MEASUREMENTS) for page in sorted(ROOT.glob(each)))
    texts = {
        page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in found if page.stem not in NOT_A_PAGE
    }
    return {page: text for page, text in texts.items() if "<!-- generated" not in text[:500]}


@pytest.mark.parametrize("page", sorted(pages()))
def test_a_page_is_in_plain_english(page):
    name = Path(page).stem if page.count("/") == 1 else page  # measurements may be long
    assert broken(name, pages()[page]) == []


def of_study(node):
    """The title, source and notes of a study, and the captions and labels of its pictures."""
    if isinstance(node, list):
        for each in node:
            yield from of_study(each)
    elif isinstance(node, dict):
        for key, each in node.items():
            found = {name: [each] for name in ("title", "source", "notes", "caption")}
            found["labels"] = each.values() if key == "labels" else []
            yield from found.get(key) or of_study(each)


@pytest.mark.parametrize(
    "study", sorted((ROOT / "experiments/configs/studies").glob("*.yaml")), ids=lambda file: file.stem
)
def test_the_texts_of_a_study_are_in_plain_english(study):
    texts = list(of_study(yaml.safe_load(study.read_text("utf-8"))))
    assert len(texts) > 1
    assert [
        rule for text in texts for rule in (*of_sentences(text + "."), *of_words(text)) if "median" not in rule
    ] == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("word " * 31 + ".", "31 words"),
        ("word " * 16 + ".", "median"),
        ("What is heavy goes last.", "no subject"),
        ("The log tells you.", "say shows"),
        ("| a | the method |\n", "say compressor"),
        ("It sends 4 bytes a step.", "say per"),
        ("# What it does\n", "nobody searches"),
        ("# A title of which nobody ever knows where it may end\n", "long heading"),
        ("## Same\n\n## Same\n", "twice"),
    ],
)
def test_a_broken_rule_is_found(text, rule):
    assert any(rule in line for line in broken("any", text))


def test_a_how_to_page_shows_a_block_soon_and_ends_soon():
    late = "# Do it\n\n" + "One two three. " * 34 + "\n\n```\nrun it\n```\n"
    assert broken("watch", late) == ["no runnable block after 100 words, but after 102"]
    assert broken("watch", late.replace("One two three. ", "", 1)) == []
    assert broken("watch", "# Doing it\n\n```python\n```\n")[0].startswith("nobody searches")
    assert broken("concepts", "# Long\n\n" + "One two three. " * 501) == ["1503 words: split the page"]


def test_code_and_quoted_commands_may_use_any_word():
    assert (
        broken("any", "Pass `--nodes 2`, `method`.\n\n```\nthe wire tells\n```\n\nDataLoader workers need memory.")
        == []
    )


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        print(f"{file}:", *broken(file.stem, file.read_text("utf-8")) or ["in plain English"], sep="\n  ")
