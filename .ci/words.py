"""The rules of plain English for pages, studies, docstrings and other texts. `make words` prints what breaks them."""

import ast
import re
import statistics
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
FOLDERS = ["compress", "kernels", "ddp_core", "hooks", "experiments", "gradwire"]
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
    "error-feedback",
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
    "docs/results/advise/*.md",
    "docs/results/demo-bytes/README.md",
    "docs/results/loss/*.md",
    "docs/results/papers/*.md",
]  # the other pages of results are written by sweeps
LONGEST, MEDIAN = 30, 15  # words in a sentence
PAGE, BEFORE_A_BLOCK = (
    1500,
    100,
)  # words on a page (a how-to page's tables count), and before a how-to page's first block
ALL_PAGES = 40_000  # words of README and docs/*.md together
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
FEW = 3  # words: a shorter text is a name or a label
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
CODE = re.compile(r"^\s*(?:<|[#.@]?[\w-]+ *\{|import |from |function |const )", re.MULTILINE)  # pages and scripts
VALUE = "code"  # stands for a value
GIVEN = re.compile(r"%[-.\d]*[a-z]|(?<!\w)--?[a-z][\w-]*")  # a value of a log line, or an option
WITHOUT_NOUN = re.compile(r"\bwhat\b", re.IGNORECASE)  # a clause in place of a noun
HEADLESS = re.compile(r"^(?:Who|Whoever|Whose|What|Whether|Those|That which)\b")
GOOD_HEADINGS = {"What you should see", "What ran where"}


def headless(source):
    """The docstrings of a module, its classes and its functions whose first word leaves out what they describe."""
    nodes = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    )
    documented = ((getattr(node, "name", "the module"), ast.get_docstring(node) or "") for node in nodes)
    return [(name, text.partition("\n")[0]) for name, text in documented if text and text.split()[0] in REFUSED]


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


def of_all_pages():
    """The number of words of README and docs/*.md without blocks of code, if it is too large."""
    found = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    count = sum(len(words(readable(page.read_text("utf-8")))) for page in found)
    if count > ALL_PAGES:
        yield f"README and docs/*.md: {count:,} words, at most {ALL_PAGES:,}: cut what several pages repeat"


def pages():
    """{path in the tree: text} of README and of the other pages that people write."""
    found = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    found += (page for each in ("docs/*.md", *MEASUREMENTS) for page in sorted(ROOT.glob(each)))
    texts = {
        page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in found if page.stem not in NOT_A_PAGE
    }
    return {page: text for page, text in texts.items() if "<!-- generated" not in text[:500]}


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


def written(node):
    """The text of an expression with "code" for values, and the parts that it is made of; None if it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value, [node]
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else VALUE for part in node.values]
        return "".join(parts), [node, *(part for part in node.values if isinstance(part, ast.Constant))]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = written(node.left), written(node.right)
        if left or right:
            (a, of_a), (b, of_b) = left or (VALUE, []), right or (VALUE, [])
            return a + b, [node, *of_a, *of_b]
    return None


def texts(source):
    """(line, text) of all texts of a source that people read: all but docstrings, names and code of other languages."""
    tree = ast.parse(source)
    known = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and ast.get_docstring(node)
    }
    for node in ast.walk(tree):  # an expression comes before its parts
        if id(node) in known or (found := written(node)) is None:
            continue
        text, parts = GIVEN.sub(VALUE, found[0]), found[1]
        known |= set(map(id, parts))
        if len(words(text)) >= FEW and not CODE.search(text):
            yield node.lineno, text


def of_text(text):
    """The rules that a text breaks. A text alone need not say what local steps are, as a page must."""
    yield from (rule for rule in of_words(text) if "local steps without" not in rule)
    yield from (f"no noun: {text}" for each in sentences(text) if WITHOUT_NOUN.search(each) and not each.endswith("?"))
    yield from (f"{len(words(each))} words: {each}" for each in sentences(text) if len(words(each)) > LONGEST)


def all_broken(file):
    """A line for each broken rule of a file."""
    return [f"{line}: {rule}" for line, text in texts(file.read_text("utf-8")) for rule in of_text(text)]


def of_studies():
    """The rules that the texts of each study break."""
    for study in sorted((ROOT / "experiments/configs/studies").glob("*.yaml")):
        for text in of_study(yaml.safe_load(study.read_text("utf-8"))):
            found = (*of_sentences(text + "."), *of_words(text))
            yield from (f"{study.name}: {rule}" for rule in found if "median" not in rule)


def of_code(file):
    """The rules that the docstrings, messages and help texts of a file break."""
    source = file.read_text("utf-8")
    yield from (f"{file.relative_to(ROOT)}: {name}: {line}" for name, line in headless(source))
    yield from (f"{file.relative_to(ROOT)}:{rule}" for rule in all_broken(file))


def main():
    """Print what breaks a rule; return the number of it."""
    found = [f"{page}: {rule}" for page, text in pages().items() for rule in broken(called(page), text)]
    found += [*of_all_pages(), *of_studies()]
    found += (rule for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")) for rule in of_code(file))
    print(*found or ["in plain English"], sep="\n")
    return len(found)


def called(page):
    """The name under which a page has rules of its own; measurements may be long."""
    return Path(page).stem if page.count("/") == 1 else page


if __name__ == "__main__":
    sys.exit(min(main(), 1))
