"""One file for each rank: written and read back under many layouts, and against files and loaders of others."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlmca.layouts import LayoutError, ModelLayout, Topology
from rlmca.layouts.rows import Spec
from rlmca.transfer.convert.base import ConvertError
from rlmca.transfer.convert.rank_files import RankFilesTarget, rank_folder, rank_folders
from rlmca.transfer.convert.rank_source import RankFilesSource
from tests.helpers.convert import MemorySource, random_tensors, same_bits, values_of, write
from tests.helpers.models import FAMILIES, MIXTURES, SMALL
from tests.helpers.shards import numbered, shards_of

FIXTURES = Path(__file__).parents[1] / "fixtures"
KINDS: dict[str, dict[str, Any]] = {
    **{name: {} for name in (*FAMILIES, *MIXTURES)},
    "mixtral_tied": {"tie_word_embeddings": True},
    "llama_biases": {"attention_bias": True, "mlp_bias": True},
}
LAYERS = 4


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    """The config of a tiny model of four layers."""
    name = kind if kind in (*FAMILIES, *MIXTURES) else kind.rsplit("_", 1)[0]
    config_class, _, own = {**FAMILIES, **MIXTURES}[name]
    wanted = {**SMALL, **own, "num_hidden_layers": LAYERS, "num_key_value_heads": 4, **KINDS[kind], **changes}
    return config_class(**wanted).to_dict()


def written(config: dict[str, Any], topology: Topology, folder: Path, spec: Spec = "te", values: dict[str, Tensor] | None = None) -> Path:
    layout = ModelLayout(config, spec)
    source = MemorySource(layout, random_tensors(layout, torch.bfloat16) if values is None else values)
    return write(source, RankFilesTarget(layout, topology, {name: held.dtype for name, held in source.tensors.items()}), folder)


def files_of(folder: Path) -> dict[str, dict[str, Any]]:
    """{name of a rank's folder: what plain torch reads there}."""
    return {file.parent.name: torch.load(file, weights_only=True) for file in sorted(folder.glob("*/mp_rank_*/model_optim_rng.pt"))}


PIPELINES: list[tuple[int, tuple[int, ...] | None]] = [
    (1, None), (2, None), (4, None), (2, (1, 3)), (2, (0, 4)), (2, (1, 1, 1, 1)), (4, (0, 1, 1, 2)), (2, (2, 0, 1, 1)),
    (4, (1, 0, 1, 0, 1, 0, 1, 0)),
]  # fmt: skip
EXPERTS: list[tuple[int, int | None]] = [(1, None), (2, None), (8, 1), (4, None), (2, 1), (4, 2)]


def topologies(kind: str, chance: random.Random) -> Iterator[Topology]:
    """More than 30 for each family: every pipeline with every tensor split, experts in turn; then random ones."""
    mixture = bool(ModelLayout(config_of(kind)).megatron.num_experts)
    experts = itertools.cycle(EXPERTS if mixture else [(1, None)])
    multiples = itertools.cycle((1, 16, 5))
    made = [Topology(tp, pp, next(multiples), chunks, *next(experts)) for tp in (1, 2, 4) for pp, chunks in PIPELINES]
    for _ in range(12):
        pp, vpp = chance.choice([1, 2, 3, 4]), chance.choice([1, 2])
        cuts = sorted(chance.choices(range(LAYERS + 1), k=pp * vpp - 1)) if pp > 1 else []
        chunks = tuple(b - a for a, b in itertools.pairwise([0, *cuts, LAYERS]))
        ep, etp = (chance.choice([1, 2, 4, 8]), chance.choice([None, 1, 2])) if mixture else (1, None)
        made.append(Topology(chance.choice([1, 2, 4]), pp, chance.choice([1, 3, 64]), chunks, ep, etp))
    for topology in made:
        try:
            rank_folders(topology)
        except ConvertError:  # ranks without names of their own, see below
            topology = Topology(topology.tp, topology.pp, topology.vocab_multiple, topology.chunks, topology.ep)
        yield topology


def round_trip(config: dict[str, Any], topology: Topology, spec: Spec, folder: Path) -> None:
    layout = ModelLayout(config, spec)
    values = random_tensors(layout, torch.bfloat16)
    written(config, topology, folder, spec, values)
    (folder / "config.json").write_text(json.dumps(config))
    for file in folder.glob("*/*/model_optim_rng.pt"):
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
    for name, state in files_of(folder).items():
        assert state["checkpoint_version"] == 3.0 and state["iteration"] == 0
        assert state.keys() - {"checkpoint_version", "iteration"} == (
            {"model"} if topology.vpp == 1 else {f"model{k}" for k in range(topology.vpp)}
        )
        assert name in rank_folders(topology)
    source = RankFilesSource(folder)
    there = source.topology
    assert (there.tp, there.pp, there.vpp, there.ep) == (topology.tp, topology.pp, topology.vpp, topology.ep)
    assert there.chunk_layers(LAYERS) == topology.chunk_layers(LAYERS)
    assert layout.padded_vocab(there) == layout.padded_vocab(topology)
    if layout.megatron.num_experts:
        assert there.expert_tp == topology.expert_tp
    assert source.format == "ranks" and source.path == folder and source.layout.hf_tensors() == layout.hf_tensors()
    same_bits(values_of(source), values, topology)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trips(kind: str, tmp_path: Path, whole: bool, request: pytest.FixtureRequest) -> None:
    seed = int(request.config.getoption("--test-seed"))
    print(f"seed {seed}")
    config = config_of(kind)
    made = list(topologies(kind, random.Random(seed)))
    assert len(made) >= 30
    for number, topology in enumerate(made if whole else made[len(kind) % 3 :: 3]):
        spec: Spec = ("te", "local")[number % 2]
        folder = tmp_path / str(number)
        round_trip(config, topology, spec, folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize("topology", [Topology(), Topology(2, 1, 16), Topology(1, 2), Topology(2, 2, 5)], ids=str)
@pytest.mark.parametrize("kind", [*FAMILIES, "llama_biases"])
def test_files_hold_what_plain_slicing_gives(kind: str, topology: Topology, tmp_path: Path) -> None:
    config = config_of(kind)
    layout = ModelLayout(config)
    arrays = numbered(layout.hf_tensors())
    written(config, topology, tmp_path, "local", {name: torch.from_numpy(array).float() for name, array in arrays.items()})
    want = shards_of(config, arrays, tp=topology.tp, pp=topology.pp, multiple=topology.vocab_multiple)
    files = files_of(tmp_path)
    assert len(files) == len(want)
    for coord in topology.coords():
        have = files[rank_folder(topology, coord)]["model"]
        assert have.keys() == want[coord.tp, coord.pp].keys()
        for name, array in want[coord.tp, coord.pp].items():
            assert torch.equal(have[name], torch.from_numpy(array).float()), name


@pytest.mark.parametrize(
    "to", [Topology(), Topology(4, 2, 8, (1, 3)), Topology(1, 2, chunks=(1, 1, 1, 1), ep=4), Topology(4, ep=2, etp=1)], ids=str
)
def test_from_one_layout_to_another(to: Topology, tmp_path: Path) -> None:
    config = config_of("qwen3_moe")
    values = random_tensors(ModelLayout(config), torch.bfloat16)
    source = RankFilesSource(written(config, Topology(2, 2, ep=2), tmp_path / "one", "te", values), config)
    layout = ModelLayout(config, "local")
    write(source, RankFilesTarget(layout, to, {name: held.dtype for name, held in source.tensors.items()}), tmp_path / "two")
    written(config, to, tmp_path / "straight", "local", values)
    have, want = files_of(tmp_path / "two"), files_of(tmp_path / "straight")
    assert have.keys() == want.keys()
    for name in want:
        for key in want[name].keys() - {"checkpoint_version", "iteration"}:
            same_bits(have[name][key], want[name][key], (name, key))


def test_two_sizes_of_one_family_in_one_process(tmp_path: Path) -> None:
    sizes = {"small": config_of("qwen2"), "large": config_of("qwen2", hidden_size=64, intermediate_size=96)}
    held = {name: random_tensors(ModelLayout(config), torch.bfloat16) for name, config in sizes.items()}
    folders = {name: written(config, Topology(2, 2), tmp_path / name, "te", held[name]) for name, config in sizes.items()}
    sources = {name: RankFilesSource(folders[name], config) for name, config in sizes.items()}
    for name in sizes:
        same_bits(values_of(sources[name]), held[name])


def test_types_and_iterations(tmp_path: Path) -> None:
    """Another type than the source's, an iteration with a number, and files without checksums."""
    config = config_of("deepseek_v3")
    layout = ModelLayout(config, "te")
    values = {name: torch.randn(value.shape) for name, value in random_tensors(layout, torch.float32).items()}
    kinds = {name: "F32" if name in layout.hf_buffers() else "BF16" for name in values}
    target = RankFilesTarget(layout, Topology(2, ep=4), kinds, iteration=20)
    folder = write(MemorySource(layout, values), target, tmp_path / "out", sums=False)
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "20"
    state = torch.load(folder / "iter_0000020" / "mp_rank_01_003" / "model_optim_rng.pt", weights_only=True)
    bias = "decoder.layers.1.mlp.router.expert_bias"
    assert state["iteration"] == 20 and state["model"][bias].dtype == torch.float32
    assert {value.dtype for name, value in state["model"].items() if not name.endswith("expert_bias")} == {torch.bfloat16}
    want = {name: value if kinds[name] == "F32" else value.bfloat16() for name, value in values.items()}
    same_bits(values_of(RankFilesSource(folder, config)), want)


def test_tensors_of_one_parameter_have_one_type() -> None:
    layout = ModelLayout(config_of("qwen2"))
    kinds = dict.fromkeys(layout.hf_tensors(), "BF16") | {"model.layers.0.self_attn.k_proj.bias": "F32"}
    words = r"\.q_proj.bias is BF16 and model.layers.0.self_attn.k_proj.bias is F32, .* parts of decoder.layers.0.self_attention"
    with pytest.raises(ConvertError, match=words):
        RankFilesTarget(layout, Topology(), kinds)


def megatron_ranks(tp: int, etp: int, ep: int) -> dict[tuple[int, int], set[int]]:
    """{(tensor-parallel rank, expert-parallel rank): expert-tensor ranks} over a stage, by Megatron's order of ranks."""
    found: dict[tuple[int, int], set[int]] = {}
    for rank in range(tp * etp * ep):  # a common multiple of both periods
        found.setdefault((rank % tp, rank // etp % ep), set()).add(rank % etp)
    return found


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("etp", [1, 2, 3, 4])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_names_tell_ranks_apart_or_are_refused(tp: int, etp: int, ep: int) -> None:
    ranks, topology = megatron_ranks(tp, etp, ep), Topology(tp, ep=ep, etp=etp)
    if any(len(parts) > 1 for parts in ranks.values()):
        with pytest.raises(ConvertError, match=f"expert_tensor_parallel_size {etp} beside tensor_model_parallel_size {tp}: .* torch_dist"):
            rank_folders(topology)
        assert tp % etp
        return
    want = {f"mp_rank_{t:02d}" + (f"_{e:03d}" if ep > 1 else ""): parts for (t, e), parts in ranks.items()}
    assert {name: {topology.expert_place(coord)[0]} for name, coord in rank_folders(topology).items()} == want


def test_a_model_without_experts_has_no_split_of_them(tmp_path: Path) -> None:
    config = config_of("llama")
    assert RankFilesSource(written(config, Topology(2, etp=4), tmp_path), config).topology.expert_tp == 2


def test_neither_megatron_nor_transformers_is_imported(tmp_path: Path) -> None:
    config = config_of("qwen2")
    folder = written(config, Topology(2), tmp_path)
    code = (
        "import sys, rlmca.transfer.convert.rank_files\n"
        "from rlmca.transfer.convert.rank_source import RankFilesSource\n"
        f"print(len(RankFilesSource({str(folder)!r}, {config!r}).tensors))\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('megatron', 'transformers')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.split("\n")[:2] == [str(len(ModelLayout(config).hf_tensors())), "[]"], done.stdout + done.stderr


@pytest.mark.parametrize("chunks", [None, (2, 2), (1, 1, 1, 1), (2, 0, 0, 2)])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_a1_a_tied_head_is_on_the_last_chunk_alone(pp: int, chunks: tuple[int, ...] | None, tied: bool, tmp_path: Path) -> None:
    chunks = None if pp == 1 or (chunks and len(chunks) % pp) else chunks
    config = config_of("llama", hidden_size=8, num_attention_heads=4, intermediate_size=8, vocab_size=32, tie_word_embeddings=tied)
    values = random_tensors(ModelLayout(config), torch.float32)
    folder, topology = written(config, Topology(1, pp, chunks=chunks), tmp_path, "te", values), Topology(1, pp, chunks=chunks)
    heads = {
        (state["name"], key): state[key]["output_layer.weight"]
        for state in ({**file, "name": name} for name, file in files_of(folder).items())
        for key in state
        if key.startswith("model") and "output_layer.weight" in state[key]
    }
    last = (f"mp_rank_00_{pp - 1:03d}" if pp > 1 else "mp_rank_00", "model" if topology.vpp == 1 else f"model{topology.vpp - 1}")
    assert heads.keys() == (set() if tied and pp == 1 else {last})
    for head in heads.values():
        same_bits({"head": head}, {"head": values["model.embed_tokens.weight" if tied else "lm_head.weight"]})
    back = values_of(RankFilesSource(folder, config))
    assert ("lm_head.weight" in back) is not tied
    same_bits(back, values)


def test_a2_layers_of_unequal_stages_keep_their_numbers(tmp_path: Path) -> None:
    config = config_of("llama", num_hidden_layers=14, hidden_size=8, intermediate_size=8)
    values = random_tensors(ModelLayout(config), torch.float32)
    topology = Topology(1, 4, chunks=(2, 2, 2, 1, 2, 2, 2, 1))
    folder = written(config, topology, tmp_path / "ranks", "local", values)
    norms = {
        (name, key): sorted(n for n in state[key] if n.endswith("input_layernorm.weight"))
        for name, state in files_of(folder).items()
        for key in ("model0", "model1")
    }
    ids = [[2, 2], [2, 2], [2, 2], [1, 1]]
    assert [[len(norms[f"mp_rank_00_{stage:03d}", f"model{chunk}"]) for chunk in (0, 1)] for stage in range(4)] == ids
    assert all(names == [f"decoder.layers.{k}.input_layernorm.weight" for k in range(len(names))] for names in norms.values())
    files = files_of(folder)
    want = [[[0, 1], [7, 8]], [[2, 3], [9, 10]], [[4, 5], [11, 12]], [[6], [13]]]
    for stage, chunk in itertools.product(range(4), (0, 1)):
        for local, layer in enumerate(want[stage][chunk]):
            have = files[f"mp_rank_00_{stage:03d}"][f"model{chunk}"][f"decoder.layers.{local}.input_layernorm.weight"]
            same_bits({"norm": have}, {"norm": values[f"model.layers.{layer}.input_layernorm.weight"]})
    same_bits(values_of(RankFilesSource(folder, config)), values)
    for layers, chunks in ((48, (11, 13)), (30, None)):
        wrong = ModelLayout(config_of("llama", num_hidden_layers=layers))
        with pytest.raises(LayoutError, match="hold 24 layers, the model has 48" if chunks else "30 layers do not split evenly over 4"):
            RankFilesTarget(wrong, Topology(pp=2 if chunks else 4, chunks=chunks), dict.fromkeys(wrong.hf_tensors(), "F32"))


@pytest.mark.parametrize("tied", [True, False])
def test_a4_padding_of_the_vocabulary_stays_in_the_files(tied: bool, tmp_path: Path) -> None:
    config = config_of("llama", vocab_size=1000, tie_word_embeddings=tied)
    values = random_tensors(ModelLayout(config), torch.float32)
    folder = written(config, Topology(4, vocab_multiple=128), tmp_path, "te", values)
    shards = [state["model"] for state in files_of(folder).values()]
    for key, name in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        *([] if tied else [("output_layer.weight", "lm_head.weight")]),
    ):
        assert [tuple(shard[key].shape) for shard in shards] == [(256, 32)] * 4
        whole = torch.cat([shard[key] for shard in shards])
        same_bits({name: whole[:1000]}, {name: values[name]})
        assert not whole[1000:].any()
    for shard in folder.glob("*/mp_rank_03/model_optim_rng.pt"):  # trained padding must not come out either
        state = torch.load(shard, weights_only=True)
        state["model"]["embedding.word_embeddings.weight"][232:] = 7
        torch.save(state, shard)
    back = values_of(RankFilesSource(folder, config))
    assert back["model.embed_tokens.weight"].shape == (1000, 32)
    same_bits(back, values)


def test_a5_biases_are_fused_one_group_of_kv_heads_after_the_other(tmp_path: Path) -> None:
    config = config_of("qwen2", num_key_value_heads=2, hidden_size=8)
    values = random_tensors(ModelLayout(config), torch.float32)
    for x, start in (("q", 0), ("k", 100), ("v", 200)):
        name = f"model.layers.0.self_attn.{x}_proj.bias"
        values[name] = start + torch.arange(values[name].numel(), dtype=torch.float32)
    whole = [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    bias = "decoder.layers.0.self_attention.linear_qkv.bias"
    for tp in (1, 2):
        folder = written(config, Topology(tp), tmp_path / str(tp), "te", values)
        assert [n for state in files_of(folder).values() for n in state["model"][bias].tolist()] == whole
        same_bits(values_of(RankFilesSource(folder, config)), values)
    llama = written(config_of("llama"), Topology(2), tmp_path / "llama")
    assert not [name for state in files_of(llama).values() for name in state["model"] if re.search("bias$", name)]
    wide = ModelLayout(config_of("qwen2", num_attention_heads=8, num_key_value_heads=2, hidden_size=32))
    assert wide.hf_tensors()["model.layers.0.self_attn.q_proj.weight"] == (32, 32)
    with pytest.raises(LayoutError, match="tensor_model_parallel_size is 8, but num_key_value_heads is 2"):
        RankFilesTarget(wide, Topology(8), dict.fromkeys(wide.hf_tensors(), "F32"))


def test_both_forms_of_experts_make_the_same_files(tmp_path: Path) -> None:
    config = config_of("qwen3_moe")
    single, stacked = ModelLayout(config), ModelLayout(config, form="stacked")
    values = random_tensors(single, torch.bfloat16)
    joined = {}
    for name, shape in stacked.hf_tensors().items():
        if name in values:
            joined[name] = values[name]
        else:
            parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            base = name.rpartition(".")[0]
            joined[name] = torch.stack([torch.cat([values[f"{base}.{e}.{part}.weight"] for part in parts]) for e in range(shape[0])])
    folders = {}
    for layout, held in ((single, values), (stacked, joined)):
        folders[layout.form] = tmp_path / layout.form
        write(MemorySource(layout, held), RankFilesTarget(layout, Topology(2, 2, ep=2), dict.fromkeys(held, "BF16")), folders[layout.form])
    one, two = (files_of(folder) for folder in folders.values())
    for name in one:
        same_bits(one[name]["model"], two[name]["model"], name)
