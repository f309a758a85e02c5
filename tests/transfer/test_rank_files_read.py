"""Files for each rank that others wrote or load: mcore_adapter's, Megatron's modules, plain slicing; and damaged ones."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlmca.layouts import ModelLayout, Topology
from rlmca.transfer.convert.base import ConvertError
from rlmca.transfer.convert.rank_files import RankFilesTarget
from rlmca.transfer.convert.rank_source import RankFilesSource
from tests.helpers.convert import MemorySource, bits, random_tensors, same_bits, values_of, write
from tests.helpers.engine import Layout, make_engine
from tests.helpers.models import save_model
from tests.helpers.ranks import rank_pool
from tests.helpers.transfer import layout_of, stored
from tests.transfer.test_rank_files import FIXTURES, LAYERS, config_of, written

FILE = "model_optim_rng.pt"
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def adapter_qwen2(tmp_path: Path) -> Path:
    """mcore_adapter's folder as it wrote it."""
    folder = tmp_path / "tp2_pp2"
    for rank in ("00_000", "00_001", "01_000", "01_001"):
        place = folder / "iter_0000001" / f"mp_rank_{rank}"
        place.mkdir(parents=True)
        shutil.copy(FIXTURES / "mcore_adapter_qwen2" / f"mp_rank_{rank}.pt", place / FILE)
    shutil.copy(FIXTURES / "mcore_adapter_qwen2" / "mca_config.json", folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    return folder


def same_as_hf(source: RankFilesSource, hf: Path) -> None:
    want = stored(hf)
    assert list(source.tensors) == list(layout_of(hf).hf_tensors()) and source.layout.spec == "te"
    same_bits(values_of(source), {name: want[name] for name in source.tensors})
    assert source.tensors.keys() == want.keys()


def test_what_mcore_adapter_wrote_gives_the_hf_tensors(adapter_qwen2: Path) -> None:
    hf = FIXTURES / "mcore_adapter_qwen2" / "hf"
    for folder in (adapter_qwen2, adapter_qwen2 / "iter_0000001"):
        source = RankFilesSource(folder)
        assert (source.topology.tp, source.topology.pp, source.path) == (2, 2, adapter_qwen2)
        same_as_hf(source, hf)
    (adapter_qwen2 / "mca_config.json").unlink()  # as Megatron-LM leaves it
    with pytest.raises(ConvertError, match="has no config.json; write --hf_config"):
        RankFilesSource(adapter_qwen2)
    for given in (hf, hf / "config.json", json.loads((hf / "config.json").read_text())):
        source = RankFilesSource(adapter_qwen2, given)
        assert source.path == (adapter_qwen2 if isinstance(given, dict) else hf)
        same_as_hf(source, hf)
    bare = shutil.copytree(adapter_qwen2 / "iter_0000001", adapter_qwen2.parent / "bare")
    source = RankFilesSource(bare, json.loads((hf / "config.json").read_text()))
    assert source.path == bare
    same_as_hf(source, hf)
    shutil.copy(hf / "config.json", adapter_qwen2)
    same_as_hf(RankFilesSource(adapter_qwen2), hf)


@pytest.mark.parametrize("declared", [True, False])
def test_what_it_wrote_of_experts_that_are_split_twice_too(declared: bool, tmp_path: Path) -> None:
    """Experts over two groups of ranks, and each over the two of its group; one by one, beside Transformer Engine's names."""
    root = FIXTURES / "mcore_adapter_qwen3_moe"
    folder = shutil.copytree(root / "tp2_ep2", tmp_path / "tp2_ep2")
    if not declared:
        (folder / "mca_config.json").unlink()
        shutil.copy(root / "hf" / "config.json", folder)
    source = RankFilesSource(folder)
    assert (source.topology.tp, source.topology.pp, source.topology.ep, source.topology.etp) == (2, 1, 2, 2)
    same_as_hf(source, root / "hf")
    place = next(part for part in source.parts("model.layers.0.mlp.experts.3.up_proj.weight"))
    assert "_001/" in str(place.slot.path) and "local_experts" in str(torch.load(place.slot.path, weights_only=True)["model"].keys())


def megatron_folder_name() -> str:
    """As get_checkpoint_name of Megatron-LM's megatron/training/checkpointing.py names this rank's folder."""
    from megatron.core import parallel_state as mpu

    name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    if mpu.get_expert_model_parallel_world_size() > 1:
        name += f"_{mpu.get_expert_model_parallel_rank():03d}"
    return name


def differences_on_rank(hf: Path, ranks: Path, layout: Layout) -> list[str]:
    """What is wrong with this rank's file for the modules of an engine that loaded the Hugging Face folder."""
    engine = make_engine(hf, layout, trainable=False)
    state = torch.load(ranks / "release" / megatron_folder_name() / FILE, weights_only=True)
    wrong = []
    for number, chunk in enumerate(engine.chunks):
        file = state["model" if len(engine.chunks) == 1 else f"model{number}"]
        want = {name: value.clone() for name, value in chunk.state_dict().items() if torch.is_tensor(value)}
        wrong += sorted(file.keys() ^ want.keys())
        wrong += [name for name in want if name in file and not torch.equal(bits(file[name]), bits(want[name]))]
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
        chunk.load_state_dict(file, strict=True)
        wrong += [f"{name} loaded" for name, value in chunk.state_dict().items() if name in want and not torch.equal(value, want[name])]
    return wrong


@pytest.mark.parametrize(
    ("family", "layout", "topology"),
    [
        ("qwen3_tied", Layout("chunks", pp=2, vpp=2), Topology(pp=2, chunks=(1, 1, 1, 1))),
        ("qwen3_moe", Layout("whole experts", tp=2, ep=2, etp=1), Topology(tp=2, ep=2, etp=1)),
        ("deepseek_v3", Layout("experts", dp=2, ep=2), Topology(ep=2)),
    ],
    ids=["qwen3_tied", "qwen3_moe", "deepseek_v3"],
)
@pytest.mark.serial
def test_the_engines_modules_load_the_files_strictly(family: str, layout: Layout, topology: Topology, tmp_path: Path) -> None:
    hf = save_model(family, tmp_path / "hf", num_hidden_layers=LAYERS)
    model = layout_of(hf)
    source = MemorySource(model, {name: stored(hf)[name] for name in model.hf_tensors()})
    write(source, RankFilesTarget(model, topology, {name: held.dtype for name, held in source.tensors.items()}), tmp_path / "ranks")
    assert rank_pool(2).run(differences_on_rank, hf, tmp_path / "ranks", layout) == [[], []]


def plain_logits(hf: Path, ranks: Path, topology: Topology, ids_BT: Tensor) -> Tensor:
    """What a GPTModel of megatron-core computes that loaded this rank's file, over the whole vocabulary. Dense models alone: without
    Transformer Engine its own router of experts does not run."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from rlmca.parallel import megatron

    megatron.start(tp=2, rank=int(os.environ["RANK"]), world_size=2)
    layout = layout_of(hf)
    kwargs = dict(layout.megatron.config)
    kwargs["activation_func"] = getattr(torch.nn.functional, kwargs["activation_func"])
    config = TransformerConfig(**kwargs, tensor_model_parallel_size=2, use_cpu_initialization=True)
    spec = get_gpt_layer_local_spec(config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    sizes = {**layout.megatron.model, "vocab_size": layout.padded_vocab(topology)}
    model = GPTModel(config=config, transformer_layer_spec=spec, parallel_output=False, **sizes).eval()
    model.load_state_dict(torch.load(ranks / "release" / megatron_folder_name() / FILE, weights_only=True)["model"], strict=True)
    length = ids_BT.shape[1]
    with torch.no_grad():
        return model(ids_BT, torch.arange(length)[None], torch.ones(length, length).tril().logical_not()[None, None])


@pytest.mark.parametrize("family", ["qwen3_tied", "llama", "qwen2"])
@pytest.mark.serial
def test_megatrons_own_model_computes_the_logits_of_the_source(family: str, tmp_path: Path) -> None:
    hf, topology = save_model(family, tmp_path / "hf"), Topology(2, vocab_multiple=16)
    model = layout_of(hf)
    source = MemorySource(model, {name: stored(hf)[name] for name in model.hf_tensors()})
    kinds = {name: held.dtype for name, held in source.tensors.items()}
    write(source, RankFilesTarget(source.layout, topology, kinds), tmp_path / "ranks")
    ids_BT = torch.arange(1, 20)[None]
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(hf).eval()(ids_BT).logits
    for have in rank_pool(2).run(plain_logits, hf, tmp_path / "ranks", topology, ids_BT):
        assert have.shape == (1, 19, 96)
        torch.testing.assert_close(have[..., :67], want, rtol=0, atol=4e-6)
        assert not have[..., 67:].any()


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model on two by two ranks."""
    folder = tmp_path_factory.mktemp("tied")
    written(config_of("qwen3_tied"), Topology(2, 2), folder)
    (folder / "config.json").write_text(json.dumps(config_of("qwen3_tied")))
    return folder


def changed(folder: Path, out: Path, rank: str, change: Change) -> Path:
    """A copy in which `change` was made to what a rank's file holds."""
    shutil.copytree(folder, out)
    (file,) = out.glob(f"*/mp_rank_{rank}/{FILE}")
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)
    return out


def flip(name: str) -> Change:
    """One bit of one element."""

    def change(state: dict[str, Any]) -> None:
        bits(state["model"][name])[-1] ^= 1

    return change


NORM, HEAD, DOWN = "decoder.layers.0.self_attention.q_layernorm.weight", "output_layer.weight", "decoder.layers.1.mlp.linear_fc2.weight"
SLICED = "decoder.layers.1.self_attention.linear_proj.weight"


def put(name: str, value: Callable[[Tensor], Tensor]) -> Change:
    """Another tensor in place of the one that is there."""
    return lambda state: state["model"].update({name: value(state["model"][name])})


def without_layer(number: int) -> Change:
    return lambda state: [state["model"].pop(name) for name in list(state["model"]) if f".layers.{number}." in name]


FAULTS: list[tuple[str, Change, list[str]]] = [
    ("01_001", lambda s: s["model"].pop(NORM), [f"mp_rank_01_001 lacks {NORM}"]),
    ("00_001", lambda s: s["model"].update(extra=torch.zeros(2)), ["mp_rank_00_001 has extra, which the model has not"]),
    ("00_000", put(DOWN, lambda t: t[:, 1:].clone()), [f"mp_rank_00_000: {DOWN} has shape (32, 23)", "(32, 24)"]),
    ("01_000", flip(NORM), ["must be copies of each other and differ", "mp_rank_00_000/", "mp_rank_01_000/", f"{NORM} in"]),
    ("01_001", flip(HEAD), []),  # the last row is padding, which trains as it likes
    ("00_001", flip(HEAD), ["must be copies", "word_embeddings.weight in", "mp_rank_00_000/", f"{HEAD} in", "mp_rank_00_001/"]),
    ("01_000", put(DOWN, Tensor.float), ["model.layers.1.mlp.down_proj.weight", "types: BF16 in", "F32 in"]),
    ("01_000", lambda s: s.update(model1=s.pop("model")), ["hold model and model1"]),
    ("01_000", lambda s: s.pop("model"), ["mp_rank_01_000 lacks embedding", "more"]),
    ("00_000", lambda s: s["model"].pop(DOWN), ["mp_rank_00_000 lacks"]),
    ("00_000", without_layer(1), ["mp_rank_00_000 lacks decoder.layers.1."]),
    ("00_000", put(DOWN, lambda t: torch.zeros(24, 32).bfloat16().t()), ["cannot be read", "strides (1, 32)", ".contiguous()"]),
    ("00_000", put(DOWN, Tensor.int), ["its type is int32"]),
    ("00_000", put(SLICED, lambda t: torch.cat([t * 0, t, t * 0], 1)[:, t.shape[1] : 2 * t.shape[1]]), []),  # as mcore_adapter saves
]


@pytest.mark.parametrize(("rank", "change", "words"), FAULTS, ids=map(str, range(len(FAULTS))))
def test_a_fault_is_named_before_anything_is_written(tied: Path, rank: str, change: Change, words: list[str], tmp_path: Path) -> None:
    folder = changed(tied, tmp_path / "copy", rank, change)
    if not words:
        same_bits(values_of(RankFilesSource(folder)), values_of(RankFilesSource(tied)))
        return
    with pytest.raises(ConvertError) as caught:
        RankFilesSource(folder)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_differing_copies_are_read_when_nobody_asks(tied: Path, tmp_path: Path) -> None:
    folder = changed(tied, tmp_path / "copy", "01_000", flip(NORM))
    same_bits(values_of(RankFilesSource(folder, check_copies=False)), values_of(RankFilesSource(tied)))


def test_missing_and_cut_files_are_named(tied: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tied, tmp_path / "one")
    shutil.rmtree(folder / "release" / "mp_rank_01_000")
    with pytest.raises(ConvertError, match="mp_rank_01_000 is missing"):
        RankFilesSource(folder)
    folder = shutil.copytree(tied, tmp_path / "two")
    (folder / "release" / "mp_rank_01_000" / FILE).unlink()
    with pytest.raises(ConvertError, match=f"no {FILE} in mp_rank_01_000"):
        RankFilesSource(folder)
    folder = shutil.copytree(tied, tmp_path / "three")
    file = folder / "release" / "mp_rank_01_001" / FILE
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(ConvertError, match=f"mp_rank_01_001/{FILE}: .*whole"):
        RankFilesSource(folder)


def test_files_that_no_rank_of_the_layout_would_write(tmp_path: Path) -> None:
    """Two tensor-parallel ranks that are two groups of experts: the first holds none of the second's."""
    config = config_of("qwen3_moe")
    folder = written(config, Topology(2, ep=2, etp=1), tmp_path / "ranks")
    assert sorted(place.name for place in (folder / "release").iterdir()) == ["mp_rank_00_000", "mp_rank_01_001"]
    assert RankFilesSource(folder, config).topology.etp == 1
    shutil.copytree(folder / "release" / "mp_rank_00_000", folder / "release" / "mp_rank_00_001")
    with pytest.raises(ConvertError, match="tensor-parallel rank 0, stage 0, expert-parallel rank 1 is one too many for Topology"):
        RankFilesSource(folder, config)


def test_a_layer_that_all_ranks_lack_is_counted(tied: Path, tmp_path: Path) -> None:
    folder = changed(tied, tmp_path / "one", "00_000", without_layer(1))
    folder = changed(folder, tmp_path / "two", "01_000", without_layer(1))
    with pytest.raises(ConvertError, match=r"hold \[1, 2\] layers: 3, and config.json says 4"):
        RankFilesSource(folder)


def test_trackers(tied: Path, tmp_path: Path) -> None:
    folder, want = shutil.copytree(tied, tmp_path / "run"), values_of(RankFilesSource(tied))
    tracker = folder / "latest_checkpointed_iteration.txt"
    (folder / "release").rename(folder / "iter_0000300")
    with pytest.raises(ConvertError, match="names release, which is not there; there is iter_0000300"):
        RankFilesSource(folder)
    tracker.write_text("three")
    with pytest.raises(ConvertError, match="says 'three'; it must be the number of an iteration, or release"):
        RankFilesSource(folder)
    shutil.copytree(folder / "iter_0000300", folder / "iter_0000200")
    tracker.write_text("300\n")
    same_bits(values_of(RankFilesSource(folder)), want)
    same_bits(values_of(RankFilesSource(folder / "iter_0000200")), want)
    tracker.unlink()
    with pytest.raises(ConvertError, match=r"2 of them \(iter_0000200, iter_0000300\); name the folder"):
        RankFilesSource(folder)
    shutil.rmtree(folder / "iter_0000200")
    same_bits(values_of(RankFilesSource(folder)), want)
    shutil.rmtree(folder / "iter_0000300")
    with pytest.raises(ConvertError, match=r"no iter_\* or release folder"):
        RankFilesSource(folder)
    with pytest.raises(ConvertError, match="is not a folder"):
        RankFilesSource(folder / "nothing")


def test_what_a_declaration_says_must_be_there(adapter_qwen2: Path) -> None:
    config = json.loads((adapter_qwen2 / "mca_config.json").read_text())
    for changes, words in [
        ({"pipeline_model_parallel_size": 3}, "mp_rank_00_002 is missing"),
        ({"tensor_model_parallel_size": 1}, "says tensor_model_parallel_size 1, the files in .* are those of 2"),
        ({"virtual_pipeline_model_parallel_size": 2}, "says virtual_pipeline_model_parallel_size 2, .* those of 1"),
    ]:
        (adapter_qwen2 / "mca_config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ValueError, match=words):
            RankFilesSource(adapter_qwen2)


def test_what_surrounds_the_weights_is_passed_over(tied: Path, tmp_path: Path) -> None:
    """Optimizer, random states, arguments of a class that nobody imports, extra states, and what wraps a model."""
    folder, touched = tmp_path / "copy", tmp_path / "touched"

    class Touch:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(touched),)

    def change(state: dict[str, Any]) -> None:
        model = {f"module.module.{name}": value for name, value in state.pop("model").items()}
        model["module.module.decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(5, dtype=torch.uint8)
        model["module.module.decoder.layers.0.mlp.linear_fc2._extra_state"] = None
        state |= {
            "model": model,
            "args": argparse.Namespace(hidden_size=32, what=Touch()),
            "optimizer": {"state": {0: {"exp_avg": torch.zeros(3, 4).t()}}},
            "rng_state": [{"torch_rng_state": torch.get_rng_state()}],
        }

    shutil.copytree(tied, folder)
    for file in folder.glob(f"*/*/{FILE}"):
        state = torch.load(file, weights_only=True)
        change(state)
        torch.save(state, file)
    same_bits(values_of(RankFilesSource(folder)), values_of(RankFilesSource(tied)))
    assert not touched.exists()


def test_parameters_may_share_one_buffer(tied: Path, tmp_path: Path) -> None:
    """As in a distributed optimizer's model, whose parameters are views of one flat buffer."""

    def change(state: dict[str, Any]) -> None:
        model: dict[str, Tensor] = state["model"]
        flat = torch.cat([torch.ones(7).bfloat16(), *(value.flatten() for value in model.values())])
        at = 7
        for name, value in model.items():
            state["model"][name] = flat[at : at + value.numel()].view(value.shape)
            at += value.numel()

    folder = changed(tied, tmp_path / "copy", "01_000", change)
    same_bits(values_of(RankFilesSource(folder)), values_of(RankFilesSource(tied)))


def test_stages_without_layers_may_lack_their_chunks(tmp_path: Path) -> None:
    """Newer versions of Megatron-LM write nothing for a chunk that holds nothing."""
    config, topology = config_of("llama"), Topology(pp=2, chunks=(2, 0, 0, 2))
    folder = written(config, topology, tmp_path / "ranks")
    want = values_of(RankFilesSource(folder, config))
    for file in folder.glob(f"*/*/{FILE}"):
        state = torch.load(file, weights_only=True)
        torch.save({key: value for key, value in state.items() if value != {}}, file)
    source = RankFilesSource(folder, config)
    assert source.topology.chunks == (2, 0, 0, 2)
    same_bits(values_of(source), want)


def test_the_model_may_be_another_size(tied: Path) -> None:
    wrong = config_of("qwen3_tied", hidden_size=40)
    with pytest.raises(ConvertError, match=r"has shape \(32,\), config.json says \(40,\)"):
        RankFilesSource(tied, wrong)
    layout = ModelLayout(config_of("qwen3_tied"))
    assert random_tensors(layout, torch.bfloat16).keys() == RankFilesSource(tied).tensors.keys()
