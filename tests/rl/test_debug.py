"""debug_mode prints what was sampled: thoughts, markup, other scripts, long and invalid replies."""

from __future__ import annotations

import io

from rich.console import Console

from rlmca.rl.debug import LONGEST, print_samples
from rlmca.types import Sample


def sample(reply: str, reward: float | None, group: int = 0, finish: str = "stop") -> Sample:
    row = {"messages": [{"role": "system", "content": "[bold]be[/bold]"}, {"role": "user", "content": "东京?"}]}
    return Sample([1], [2], [0.0], [0], finish, reply=reply, row=row, group=group, reward=reward, reward_parts={"[red]exact": reward})  # type: ignore[arg-type]


def printed(samples: list[Sample]) -> str:
    out = io.StringIO()
    print_samples(samples, 3, console=Console(file=out, width=5000, color_system=None))
    return out.getvalue()


def test_everything_stands_as_it_is() -> None:
    text = printed(
        [sample("<think>\nhm [/]\n</think>\n[red]7[/red] 🙂 \x1b[31m", 1.0), sample("", None, finish="length"), sample("other", 0.0, 1)]
    )
    for words in (
        "step 3: system: [bold]be[/bold]",
        "东京?",
        "<think>",
        "hm [/]",
        "[red]7[/red] 🙂 \\x1b[31m",
        "[red]exact invalid",
        "length",
        "[red]exact 1",
    ):
        assert words in text, words
    assert "other" not in text and "\x1b" not in text
    assert printed([]) == ""


def test_long_replies_are_cut_with_a_note() -> None:
    text = printed([sample("a" * 5000 + "z", 1.0)])
    assert f"[... {5001 - LONGEST} characters left out ...]" in text and text.count("a") < LONGEST + 100 and "z" in text
