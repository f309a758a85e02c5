"""The command chat on a tiny model: token by token what `generate` writes, its commands, long conversations, pipes."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlmca.config import Environment, RunConfig, make_config
from rlmca.rollout.base import SamplingParams
from rlmca.rollout.decode import TextStream
from rlmca.rollout.local import LocalEngine
from rlmca.rollout.seeds import reply_seed
from rlmca.run.chat import HELP, Refused, Talk, run_chat
from rlmca.run.commands import CommandError, run_generate
from rlmca.run.source import Source, open_source, sampling_params
from tests.helpers.models import save_model
from tests.helpers.tokenizers import CHATML, STRICT, THINKING, tiny_tokenizer

QUESTION = "What is 3 + 4 ?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    tokenizer = tiny_tokenizer()
    save_model("qwen3_tied", path / "model", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(path / "model")
    (path / "rows.json").write_text(json.dumps([{"instruction": QUESTION, "output": "7"}]))
    (path / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> LocalEngine:
    return LocalEngine(folder / "model")


def config(folder: Path, command: str = "chat", **changes: Any) -> RunConfig:
    values = {"model_name_or_path": str(folder / "model"), "max_new_tokens": 12, "use_cpu": True}
    return make_config({**values, **changes}, env=Environment(), command=command)


def talk(folder: Path, engine: LocalEngine, template: str = CHATML, *, limit: int | None = None, **changes: Any) -> Talk:
    cfg = config(folder, **changes)
    tokenizer = tiny_tokenizer(template)
    from rlmca.data import ChatTemplate

    source = Source(folder / "model", tokenizer, ChatTemplate(tokenizer, None, True, cfg.data.default_system))
    return Talk(engine, source, sampling_params(cfg, source, greedy=False), name=None, seed=cfg.train.seed, limit=limit)


def prompt_of(t: Talk, question: str) -> str:
    return t.source.tokenizer.decode(t._fitting(question)[1])


def chat(folder: Path, lines: str, **changes: Any) -> tuple[str, str]:
    """(what a pipe gets, what stands on standard error)."""
    out, notes = io.StringIO(), io.StringIO()
    run_chat(config(folder, **changes), lines=io.StringIO(lines), out=out, console=Console(file=notes, width=200))
    return out.getvalue(), notes.getvalue()


@pytest.mark.parametrize("do_sample", (False, True))
def test_a_reply_is_the_one_that_generate_writes(folder: Path, tmp_path: Path, do_sample: bool) -> None:
    cfg = config(folder, "generate", dataset="rows", dataset_dir=str(folder), output_dir=str(tmp_path), do_sample=do_sample)
    (row,) = map(json.loads, run_generate(cfg, console=Console(file=io.StringIO())).read_text().splitlines())
    out, _ = chat(folder, QUESTION + "\n", do_sample=do_sample)
    assert out == row["predict"] + "\n"


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_streamed_ids_are_those_of_generate(engine: LocalEngine, temperature: float) -> None:
    from rlmca.rollout.base import Request

    ids, seeds = [3, 50, 20, 7], [reply_seed(1, 0, 0, k) for k in range(3)]
    first = engine.generate([Request(ids, seeds)], SamplingParams(temperature, max_new_tokens=9))[0]
    stops = (first[0].ids[4],)
    params = SamplingParams(temperature, max_new_tokens=9, stop_ids=stops)
    whole = engine.generate([Request(ids, seeds)], params)[0]
    assert [list(engine.stream(ids, seed, params)) for seed in seeds] == [reply.ids for reply in whole]
    assert whole[0].finish == "stop" and whole[0].ids[-1] in stops


def test_characters_come_whole_and_nothing_is_lost() -> None:
    tokenizer = tiny_tokenizer()
    for text in ("naïve — 東京 🙂🙂 x", "", " a", "🙂"):
        stream, ids = TextStream(tokenizer), tokenizer.encode(text, add_special_tokens=False)
        pieces = [stream.add(token) for token in ids]
        assert "".join(pieces) == text and stream.rest() == "" and not any("\ufffd" in piece for piece in pieces)
    stream, ids = TextStream(tokenizer), tokenizer.encode("ab🙂", add_special_tokens=False)[:-1]  # cut within a character
    assert "".join([*map(stream.add, ids), stream.rest()]) == tokenizer.decode(ids) == "ab\ufffd"


def test_the_conversation_is_rendered_whole(folder: Path, engine: LocalEngine) -> None:
    t = talk(folder, engine, default_system="Be brief.")
    replies = ["".join(t.ask(question)) for question in ("one", "two")]
    want = "<|im_start|>system\nBe brief.<|im_end|>\n"
    for question, reply in zip(("one", "two"), replies, strict=True):
        want += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>\n"
    assert prompt_of(t, "three") == want + "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    t.set_system("")
    assert not prompt_of(t, "three").startswith("<|im_start|>system")


def test_a_long_conversation_forgets_its_oldest_turns(folder: Path, engine: LocalEngine) -> None:
    t = talk(folder, engine, limit=90, max_new_tokens=6)
    for number in range(12):
        "".join(t.ask(f"question {number}"))
    kept = [question for question, _ in t.turns]
    assert 1 < len(kept) < 12 and kept == [f"question {n}" for n in range(12 - len(kept), 12)]
    before = list(t.turns)
    with pytest.raises(Refused, match="the question alone has .* tokens, and 90 fit"):
        next(t.ask("x" * 100))
    assert t.turns == before
    out, notes = chat(folder, "one\ntwo\n" + "y" * 300 + "\n", max_prompt_len=30)
    assert "its oldest 1 turns are forgotten" in notes and "the question alone has" in notes and out.count("\n") >= 2


def test_a_reply_that_is_stopped_stays_as_far_as_it_came(folder: Path, engine: LocalEngine) -> None:
    t = talk(folder, engine)
    with contextlib.closing(t.ask("one")) as pieces:
        first = next(pieces)
    assert t.turns == [("one", first)]
    assert next(t.ask("two"))


def test_thinking_is_switched_where_the_template_has_it(folder: Path, engine: LocalEngine) -> None:
    t = talk(folder, engine, THINKING)
    assert t.set_thinking(False) is None and prompt_of(t, "a").endswith("<think>\n\n</think>\n\n")
    assert t.set_thinking(True) is None and prompt_of(t, "a").endswith("assistant\n")
    assert "no switch" in str(talk(folder, engine).set_thinking(False))
    t = talk(folder, engine, THINKING)
    t.turns = [("a", "<think>\nhm\n</think>\n\nb")]
    t.set_thinking(False)
    assert "hm" not in prompt_of(t, "c")


def test_a_template_that_takes_no_system_message_says_so(folder: Path, engine: LocalEngine) -> None:
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    t = talk(folder, engine, refusing)
    with pytest.raises(Refused, match="no system role"):
        t.set_system("Be brief.")
    assert "".join(t.ask("a")) and len(t.turns) == 1
    assert "You are helpful." in prompt_of(talk(folder, engine, STRICT), "a")


def test_commands_of_a_pipe(folder: Path) -> None:
    script = f"/help\n\n/system Be brief.\n/think off\n/think maybe\n/nosuch\n{QUESTION}\n/clear\n//help\n/system\n/quit\nnever read\n"
    out, notes = chat(folder, script, do_sample=False)
    for words in (HELP.splitlines()[0], "system message: Be brief.", "no switch for thinking", "write /think on", "/nosuch: unknown",
                  "the conversation is forgotten", "no system message"):  # fmt: skip
        assert words in notes
    alone, _ = chat(folder, f"/system Be brief.\n{QUESTION}\n", do_sample=False)
    slash, _ = chat(folder, "/system Be brief.\n//help\n", do_sample=False)
    assert out == alone + slash


def test_what_leaves_no_room_for_a_question_is_said_before_the_model_is_loaded(folder: Path) -> None:
    with pytest.raises(CommandError, match="max_new_tokens: 99999 leaves nothing of the model's max_position_embeddings"):
        chat(folder, "a\n", max_new_tokens=99999)
    cfg = config(folder, dataset="rows", rewards="exact")
    assert [note.split()[0] for note in cfg.notes] == ["dataset", "rewards"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ctrl_c_stops_a_reply_and_not_the_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter([KeyboardInterrupt, "one", "two", EOFError])

    def answer(_: str) -> str:
        line = next(asked)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", answer)
    stream, count = LocalEngine.stream, [0]

    def interrupted(self: LocalEngine, *arguments: Any) -> Any:
        count[0] += 1
        for place, token in enumerate(stream(self, *arguments)):
            if count[0] == 1 and place == 3:
                raise KeyboardInterrupt
            yield token

    monkeypatch.setattr(LocalEngine, "stream", interrupted)
    out, notes = io.StringIO(), io.StringIO()
    run_chat(config(folder), lines=Terminal(), out=out, console=Console(file=notes, width=200))
    assert count == [2] and "stopped" in notes.getvalue() and "/quit or Ctrl-D leaves" in notes.getvalue()
    assert next(asked, None) is None
    assert open_source(config(folder)).tokenizer.eos_token not in out.getvalue()


def test_the_command_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from rlmca.cli.main import main

    (tmp_path / "chat.yaml").write_text(f"model_name_or_path: {folder}/model\nmax_new_tokens: 12\nuse_cpu: true\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n"))
    assert main(["chat", str(tmp_path / "chat.yaml"), "do_sample=false"]) == 0
    assert capfd.readouterr().out == chat(folder, QUESTION + "\n", do_sample=False)[0]
