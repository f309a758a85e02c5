"""`rlmca-cli pairs REPLIES OUT`: a ranking set for stage dpo out of scored replies."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rlmca.cli import show

HELP = {
    "min_margin": "the scores of a pair differ by at least this much (default 0: by anything)",
    "max_length_ratio": "the longer reply is at most so many times as long as the shorter",
    "min_length": "shortest reply in tokens (default 1)",
    "max_length": "longest reply in tokens",
    "min_chosen_score": "lowest score of a chosen reply",
    "max_rejected_score": "highest score of a rejected reply",
    "pairs_per_prompt": "most pairs of a prompt (default 1: the best and the worst reply)",
}


def pairs_command(arguments: Sequence[str]) -> int:
    """Run the command; the exit status (0 done, 1 refused)."""
    parser = argparse.ArgumentParser(
        prog="rlmca-cli pairs",
        allow_abbrev=False,
        description="Of the replies to each prompt a better and a worse one, as a ranking set with its entry in dataset_info.json.",
    )
    parser.add_argument("replies", type=Path, metavar="REPLIES", help="eval_predictions.jsonl of rlmca-cli eval")
    parser.add_argument("out", type=Path, metavar="OUT", help="the .jsonl file to write")
    parser.add_argument("--name", help="name of the set in dataset_info.json (default: OUT without .jsonl)")
    for name, text in HELP.items():
        kind = int if name in ("min_length", "max_length", "pairs_per_prompt") else float
        parser.add_argument(f"--{name}", type=kind, help=text, default=argparse.SUPPRESS)
    parser.add_argument("--keep_truncated", action="store_true", help="replies that ran into the length limit may be rejected ones")
    options = vars(parser.parse_args(list(arguments)))

    # imported here: a mistake in the command line is said in a moment
    from rlmca.data.best_worst import PairRules, pairs_of_rows, write_ranking_set
    from rlmca.data.errors import DataError
    from rlmca.observe.jsonl import read_lines

    try:
        if options["out"].suffix != ".jsonl":
            raise DataError(f"{options['out']}: name a .jsonl file")
        rules = PairRules(**{f.name: options[f.name] for f in dataclasses.fields(PairRules) if f.name in options})
        rows, without = pairs_of_rows(read_lines(options["replies"]), rules)
        name = options["name"] or options["out"].stem
        info = write_ranking_set(options["out"], rows, name)
    except (ValueError, OSError) as error:
        show.message(f"pairs: {error}")
        return 1
    print(f"{options['out']}: {len(rows)} pairs, set {name!r} of {info}")
    for reason, count in without.most_common():
        print(f"  {count} prompts without a pair: {reason}")
    return 0
