"""The command chat: a conversation with a model, token by token; from a terminal, or one question a line from a pipe."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from rlmca.config import RunConfig
from rlmca.data import ChatTemplate
from rlmca.data.errors import BadRow
from rlmca.data.formats import Conversation
from rlmca.rollout.base import RolloutEngine, RolloutError, SamplingParams
from rlmca.rollout.decode import TextStream
from rlmca.rollout.seeds import reply_seed
from rlmca.run.commands import CommandError, open_engine
from rlmca.run.source import Source, context_limit, open_source, sampling_params

HELP = """/system TEXT     system message from now on; without TEXT: none
/think on|off    thinking of models that have the switch
/clear           forget the conversation
/quit            leave, as Ctrl-D does; Ctrl-C stops a reply
//TEXT           a question that begins with /"""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal might obey instead of show."""


class Refused(ValueError):
    """A question or a command that cannot be carried out; the conversation stays as it was."""


class Talk:
    """A conversation: the turns so far, how they are rendered, who answers.

    `limit` is the most tokens of a prompt (None: no bound): beyond it the oldest turns are left out.
    """

    def __init__(self, engine: RolloutEngine, source: Source, params: SamplingParams, *, name: str | None, seed: int, limit: int | None):
        self.engine, self.source, self.params, self.limit = engine, source, params, limit
        self.template, self._name, self._seed = source.template, name, seed
        self.turns: list[tuple[str, str]] = []
        self.asked = 0
        """Questions so far, also those that are forgotten: the same question again has another seed."""

    def ask(self, question: str) -> Iterator[str]:
        """The reply in pieces of whole characters. What has come of it stays in the conversation, however it ends.

        Refused when the question does not fit; RolloutError when the engine fails.
        """
        self.turns, ids = self._fitting(question)
        seed = reply_seed(self._seed, -1, self.asked, 0)
        self.asked += 1
        text = TextStream(self.source.tokenizer)
        said = ""
        try:
            with contextlib.closing(self.engine.stream(ids, seed, self.params)) as tokens:  # type: ignore[type-var]
                for token in tokens:
                    piece = "" if token in self.params.stop_ids else text.add(token)
                    said += piece
                    if piece:
                        yield piece
            rest = text.rest()
            said += rest
            if rest:
                yield rest
        finally:
            if said:
                self.turns.append((question, said))

    def set_system(self, text: str) -> None:
        """Another system message from now on; the empty text: none. Refused when the template takes none."""
        before, self.template = self.template, self._template(self.template.enable_thinking, text or None)
        try:
            self._render(self.turns, "a")
        except Refused:
            self.template = before
            raise

    def set_thinking(self, on: bool) -> str | None:
        """Switches thinking; what there is to say when that changes nothing."""
        if "enable_thinking" not in self.template.source:
            return "the chat template of this model has no switch for thinking: this changes nothing"
        template = self._template(on, self.template.default_system)
        if template.enable_thinking != on:
            return f"template {self._name} leaves thinking {'on' if template.enable_thinking else 'off'}: this changes nothing"
        self.template = template
        return None

    def _template(self, thinking: bool | None, system: str | None) -> ChatTemplate:
        return ChatTemplate(self.source.tokenizer, self._name, thinking, system)

    def _fitting(self, question: str) -> tuple[list[tuple[str, str]], list[int]]:
        """The newest turns that fit before the question, and the prompt's ids."""
        for first in range(len(self.turns) + 1):
            ids = self._render(self.turns[first:], question)
            if self.limit is None or len(ids) <= self.limit:
                return self.turns[first:], ids
        raise Refused(f"the question alone has {len(ids)} tokens, and {self.limit} fit beside max_new_tokens {self.params.max_new_tokens}")

    def _render(self, turns: list[tuple[str, str]], question: str) -> list[int]:
        messages: list[dict[str, Any]] = []
        for asked, answered in turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        messages.append({"role": "user", "content": question})
        (ids,) = self.template.encode_prompts([Conversation("chat", 0, messages, None, None, {})])
        if isinstance(ids, BadRow):
            raise Refused(ids.reason)
        return ids


def run_chat(cfg: RunConfig, *, lines: TextIO | None = None, out: TextIO | None = None, console: Console | None = None) -> dict[str, Any]:
    """Answers the lines of `lines` (standard input) on `out` until there are no more or /quit comes; notes go to standard error."""
    lines, out = lines or sys.stdin, out or sys.stdout
    console = console or Console(stderr=True)
    source = open_source(cfg)
    params = sampling_params(cfg, source, greedy=not cfg.generation.do_sample)
    limit = _prompt_limit(cfg, source)
    with contextlib.closing(open_engine(cfg, source)) as engine:
        talk = Talk(engine, source, params, name=cfg.model.template, seed=cfg.train.seed, limit=limit)
        chat = _Chat(talk, lines, out, console)
        try:
            chat.run()
        except BrokenPipeError:  # whoever read the answers has enough
            if out is sys.stdout:
                os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    return {}


def _prompt_limit(cfg: RunConfig, source: Source) -> int | None:
    """Most tokens of a prompt: what the model leaves beside the reply, and `max_prompt_len` where the file sets it."""
    limit, what = context_limit(cfg, source)
    most = cfg.generation.max_new_tokens
    if limit is not None and most >= limit:
        raise CommandError(f"max_new_tokens: {most} leaves nothing of {what} {limit} for a question: lower it")
    own = cfg.generation.max_prompt_len if "max_prompt_len" in cfg.given else None
    return min((n for n in (None if limit is None else limit - most, own) if n is not None), default=None)


@dataclasses.dataclass
class _Chat:
    """Reads lines, obeys commands, prints replies."""

    talk: Talk
    lines: TextIO
    out: TextIO
    console: Console

    def __post_init__(self) -> None:
        self.live = self.lines.isatty()
        """Somebody sits in front of it: there is a prompt, and Ctrl-C stops no more than a reply."""
        if self.live:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (arrow keys and history in input())
        for stream in (self.lines, self.out):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(encoding="utf-8", errors="replace")

    def run(self) -> None:
        if self.live:
            self.note("/help lists the commands; Ctrl-C stops a reply, Ctrl-D leaves")
        while (line := self._read()) is not None:
            line = line.strip()
            if not line:
                continue
            if line.startswith("/") and not line.startswith("//"):
                if line in ("/quit", "/exit"):
                    return
                self._obey(*line.split(maxsplit=1))
            else:
                self._answer(line.removeprefix("/") if line.startswith("//") else line)

    def note(self, text: str) -> None:
        self.console.print(Text(text, style="dim"), soft_wrap=True)

    def _read(self) -> str | None:
        if not self.live:
            return self.lines.readline() or None
        while True:
            try:
                return input("> ")
            except EOFError:
                self.out.write("\n")
                return None
            except KeyboardInterrupt:
                self.out.write("\n")
                self.note("/quit or Ctrl-D leaves")

    def _answer(self, question: str) -> None:
        try:
            turns = len(self.talk.turns)
            for number, piece in enumerate(self.talk.ask(question)):
                if number == 0 and len(self.talk.turns) < turns:
                    self.note(f"the conversation is too long: its oldest {turns - len(self.talk.turns)} turns are forgotten")
                self.out.write(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", piece) if self.live else piece)
                self.out.flush()
            self.out.write("\n")
        except Refused as error:
            self.note(str(error))
        except KeyboardInterrupt:
            self.out.write("\n")
            if not self.live:
                raise
            self.note("stopped")
        except RolloutError as error:
            self.out.write("\n")
            if not self.live:
                raise
            self.note(str(error))
        self.out.flush()

    def _obey(self, command: str, text: str = "") -> None:
        if command == "/help":
            self.note(HELP)
        elif command == "/clear":
            self.talk.turns = []
            self.note("the conversation is forgotten")
        elif command == "/system":
            try:
                self.talk.set_system(text)
                self.note(f"system message: {text}" if text else "no system message")
            except Refused as error:
                self.note(str(error))
        elif command == "/think" and text in ("on", "off"):
            self.note(self.talk.set_thinking(text == "on") or f"thinking {text}")
        elif command == "/think":
            self.note("write /think on or /think off")
        else:
            self.note(f"{command}: unknown command; /help lists them, // begins a question with /")
