"""GRPO written by hand in plain PyTorch on a Transformers model: the yardstick of `bench demo`.

It does the demo's arithmetic with nothing around it: exact match as reward, each prompt prefilled once for its group,
group-standardised advantages, groups without signal left out, clipped ratio to the sampling log-probs, entropy bonus,
token mean, AdamW, several mini-batches per rollout.

Shape legend: P prompts of a step, G replies to each, B = P*G rows (fewer in an update), T prompt tokens (left-padded),
K reply tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PlainOptions:
    """The demo's hyper-parameters, under the names of the YAML keys where there is one."""

    rollout_batch_size: int = 128
    num_generations: int = 8
    num_mini_batches: int = 2
    max_new_tokens: int = 6
    temperature: float = 1.0
    learning_rate: float = 5e-4
    clip_ratio: float = 0.2
    entropy_coef: float = 0.02
    advantage_eps: float = 1e-6
    max_grad_norm: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class Rollout:
    """A step's replies. `mask_BK` is true up to and including the stop token; `logp_BK` is at the sampling temperature."""

    prompt_PT: Tensor
    prompt_mask_PT: Tensor
    reply_BK: Tensor
    mask_BK: Tensor
    logp_BK: Tensor


@dataclass(frozen=True)
class StepReport:
    """What a step cost and brought: seconds all in, replies, their tokens, mean reward, share of replies in the update."""

    seconds: float
    samples: int
    reply_tokens: int
    reward: float
    used_share: float


class PlainGrpo:
    """A model, an optimizer and a pool of (prompt ids, answer); `step()` is one rollout with its updates."""

    def __init__(self, model: Any, tokenizer: Any, pool: Sequence[tuple[list[int], str]], options: PlainOptions) -> None:
        self.model, self.tokenizer, self.pool, self.options = model, tokenizer, pool, options
        self.random = torch.Generator().manual_seed(options.seed)
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=options.learning_rate,
            betas=(options.adam_beta1, options.adam_beta2),
            weight_decay=0.0,
            fused=True,
        )

    def step(self) -> StepReport:
        """Sample, score, update."""
        start = time.perf_counter()
        options = self.options
        chosen = torch.randperm(len(self.pool), generator=self.random)[: options.rollout_batch_size].tolist()
        rollout = self.generate([self.pool[i][0] for i in chosen])
        texts = self.texts(rollout)
        answers = [self.pool[i][1] for i in chosen for _ in range(options.num_generations)]
        reward_B = torch.tensor([float(text == answer) for text, answer in zip(texts, answers, strict=True)])
        advantage_B = group_advantages(reward_B, options.num_generations, options.advantage_eps)
        used_N = advantage_B.nonzero()[:, 0]
        used_N = used_N[torch.randperm(len(used_N), generator=self.random)]
        if len(used_N):
            for rows_N in used_N.chunk(options.num_mini_batches):
                self.update(rollout, advantage_B, rows_N)
        return StepReport(
            seconds=time.perf_counter() - start,
            samples=len(answers),
            reply_tokens=int(rollout.mask_BK.sum()),
            reward=float(reward_B.mean()),
            used_share=len(used_N) / len(answers),
        )

    @torch.no_grad()
    def generate(self, prompts: Sequence[list[int]]) -> Rollout:
        """`num_generations` replies to each prompt, up to `max_new_tokens` long; every prompt runs through the model once."""
        from transformers.cache_utils import DynamicCache

        options, G, stop = self.options, self.options.num_generations, self.tokenizer.eos_token_id
        self.model.eval()
        prompt_PT, prompt_mask_PT = pad_left(prompts, self.tokenizer.pad_token_id)
        position_PT = positions(prompt_mask_PT)
        cache = DynamicCache(config=self.model.config)
        out = self.model(
            prompt_PT,
            attention_mask=prompt_mask_PT,
            position_ids=position_PT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.batch_repeat_interleave(G)
        logits_BV = out.logits[:, -1].float().repeat_interleave(G, 0)
        attention = prompt_mask_PT.repeat_interleave(G, 0)
        position_B1 = position_PT[:, -1:].repeat_interleave(G, 0)
        running_B = torch.ones(len(logits_BV), dtype=torch.bool)
        tokens: list[Tensor] = []
        masks: list[Tensor] = []
        logps: list[Tensor] = []
        while True:
            logp_BV = F.log_softmax(logits_BV / options.temperature, dim=-1)
            token_B1 = torch.multinomial(logp_BV.exp(), 1, generator=self.random)
            tokens.append(token_B1[:, 0])
            masks.append(running_B)
            logps.append(logp_BV.gather(1, token_B1)[:, 0])
            running_B = running_B & (token_B1[:, 0] != stop)
            if len(tokens) == options.max_new_tokens or not running_B.any():
                break
            attention = F.pad(attention, (0, 1), value=1)
            position_B1 = position_B1 + 1
            out = self.model(token_B1, attention_mask=attention, position_ids=position_B1, past_key_values=cache, use_cache=True)
            logits_BV = out.logits[:, -1].float()
        return Rollout(prompt_PT, prompt_mask_PT, torch.stack(tokens, 1), torch.stack(masks, 1), torch.stack(logps, 1))

    def texts(self, rollout: Rollout) -> list[str | None]:
        """Text of each finished reply, stripped; None where the stop token never came."""
        stop = self.tokenizer.eos_token_id
        rows = rollout.reply_BK.tolist()
        return [self.tokenizer.decode(row[: row.index(stop)]).strip() if stop in row else None for row in rows]

    def update(self, rollout: Rollout, advantage_B: Tensor, rows_N: Tensor) -> float:
        """One optimizer step on the chosen rows; the loss before the step."""
        options, K = self.options, rollout.reply_BK.shape[1]
        self.model.train()
        prompt_N = rows_N // options.num_generations
        reply_NK, mask_NK = rollout.reply_BK[rows_N], rollout.mask_BK[rows_N]
        ids = torch.cat([rollout.prompt_PT[prompt_N], reply_NK], 1)
        attention = torch.cat([rollout.prompt_mask_PT[prompt_N], mask_NK.long()], 1)
        out = self.model(ids, attention_mask=attention, position_ids=positions(attention), use_cache=False, logits_to_keep=K + 1)
        logp_NKV = F.log_softmax(out.logits[:, :-1].float() / options.temperature, dim=-1)
        logp_NK = logp_NKV.gather(2, reply_NK[..., None])[..., 0]
        entropy_NK = -(logp_NKV.exp() * logp_NKV).sum(-1)
        ratio_NK = (logp_NK - rollout.logp_BK[rows_N]).exp()
        advantage_N1 = advantage_B[rows_N][:, None]
        clipped_NK = ratio_NK.clamp(1 - options.clip_ratio, 1 + options.clip_ratio)
        gain_NK = torch.minimum(ratio_NK * advantage_N1, clipped_NK * advantage_N1)
        objective_NK = gain_NK + options.entropy_coef * entropy_NK
        loss = -objective_NK[mask_NK].mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.max_grad_norm)
        self.optimizer.step()
        return float(loss.detach())


def group_advantages(reward_B: Tensor, group: int, eps: float) -> Tensor:
    """[B] rewards of consecutive groups to (r - mean) / (std + eps), std of a sample; exactly 0 where all replies score alike."""
    reward_PG = reward_B.view(-1, group)
    centred_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    alike_P1 = (reward_PG == reward_PG[:, :1]).all(1, keepdim=True)
    return (centred_PG / (reward_PG.std(1, keepdim=True) + eps)).masked_fill(alike_P1, 0.0).view(-1)


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """(ids [P, T], mask [P, T] of int64) with the rows pushed to the right edge."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def positions(mask: Tensor) -> Tensor:
    """Position of each token among the real ones of its row; 0 in the padding before them."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def load(model_folder: Path, data_file: Path, options: PlainOptions) -> PlainGrpo:
    """The loop on an HF folder and a file of alpaca rows with `answer`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa")
    pool = []
    for row in json.loads(data_file.read_text(encoding="utf-8")):
        messages = [{"role": "user", "content": row["instruction"]}]
        pool.append((tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False), row["answer"]))
    return PlainGrpo(model, tokenizer, pool, options)


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m rlmca.bench.plain_loop --model DIR --data FILE --steps N --out FILE`: one JSON line a step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    for field in fields(PlainOptions):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args(argv))
    loop = load(given["model"], given["data"], PlainOptions(**{field.name: given[field.name] for field in fields(PlainOptions)}))
    given["out"].parent.mkdir(parents=True, exist_ok=True)
    with given["out"].open("w", encoding="utf-8") as out:
        for _ in range(given["steps"]):
            print(json.dumps(asdict(loop.step())), file=out, flush=True)


if __name__ == "__main__":
    main()
