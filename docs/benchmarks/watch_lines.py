"""Write the lines of `watch` that README, two-hosts and watch show, from two emulated hosts (Linux, root).

Each line is of one training by the script of docs/two-hosts.md. watch-lines-earlier.txt has those that pages showed before.

python docs/benchmarks/watch_lines.py docs/benchmarks/watch-lines.json
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from driver import about, parser_of, write_results

PAGE = Path(__file__).parents[1] / "two-hosts.md"
COMPRESSORS = "none", "bf16", "int8", "int4", "int4:error_feedback=true"
LAB = "--hosts", "2", "--rate", "1gbit"


def lines(compressor: str, script: Path) -> list[str]:
    """Return what `watch` prints in one training."""
    command = [sys.executable, "-m", "gradwire", "netlab", *LAB, "--", sys.executable, str(script)]
    given = {**os.environ, "GRADWIRE_COMPRESSOR": compressor, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True, timeout=300)
    return re.findall(r"step \d+ \| .*", done.stdout + done.stderr)


def main() -> None:
    """Run all compressors and write their lines."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[1])
        found = {compressor: lines(compressor, script) for compressor in COMPRESSORS}
    write_results(file, {**about(), "network": "netlab: 2 hosts at 1 Gbit/s", "lines": found})
    print("\n".join(line for each in found.values() for line in each))


if __name__ == "__main__":
    main()
