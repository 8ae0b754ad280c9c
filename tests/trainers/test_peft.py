"""averaging.integrations.peft with the real peft and a small model of transformers with random weights."""

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from schedulefree import AdamWScheduleFree
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from averaging import ConfigError, DecentralizedAverager, StateError, WeightPublisher
from averaging.errors import RoundError
from averaging.integrations.lora_layers import check_base
from averaging.integrations.peft import LoRAAveraging
from examples import adapters
from tests.support.training import Run

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
]

ROOT = Path(__file__).parents[2]
WORDS = torch.arange(64).view(4, 16)


def base_of(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**(sizes | heads | options)))


def adapted(rank: int = 2, base: Any = None, **options: Any) -> PeftModel:
    given = {"lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]} | options
    return get_peft_model(base_of() if base is None else base, LoraConfig(r=rank, **given))


class Peers(Run):
    """Peers with an adapter of the same base, each trained in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.strategies: list[LoRAAveraging] = []
        self.before: dict[int, dict[str, torch.Tensor]] = {}

    def tune(self, model: PeftModel | None = None, **options: Any) -> DecentralizedAverager:
        model = adapted() if model is None else model
        number, every = len(self.models), options.pop("sync_every", 3)
        strategy = LoRAAveraging(model, every, rank=options.pop("rank", None))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        defaults: dict[str, Any] = {"run_id": "tune", "group_size": 3, "group_wait": 30.0}
        defaults["join"] = [self.averagers[0].endpoint] if self.averagers else []
        if (services := options.pop("services", None)) is not None:
            options["services"] = services(strategy)
        opt = DecentralizedAverager(optimizer, model=model, strategy=strategy, **(defaults | options))
        measure = strategy._round.measure

        def note() -> None:
            self.before[number] = matrices(strategy)
            measure()

        strategy._round.measure = note  # type: ignore[method-assign]
        self.models.append(model)
        self.strategies.append(strategy)
        self.averagers.append(opt)
        return opt

    def train(self, number: int, steps: int, seed: int = 0) -> None:
        for step in range(steps):
            generator = torch.Generator().manual_seed(1000 * seed + 100 * number + step)
            words = torch.randint(64, (4, 16), generator=generator)
            self.averagers[number].zero_grad()
            self.models[number](input_ids=words, labels=words).loss.backward()
            self.averagers[number].step()

    def round(self, seed: int = 0) -> None:
        self.each(lambda number: self.train(number, 3, seed))


def matrices(strategy: LoRAAveraging) -> dict[str, torch.Tensor]:
    """The matrix that each adapted layer multiplies with, in float64, and the other trained parameters."""
    found = {}
    for correction in strategy._corrections:
        layer = correction.layer
        found[layer.name] = layer.base.double() + layer.scaling * (
            layer.b.detach().double() @ layer.a.detach().double()
        )
        found[layer.name] = found[layer.name] + correction.matrix().double()
    for name, parameter in strategy._model.named_parameters():
        if parameter.requires_grad and "lora_" not in name:
            found[name] = parameter.detach().double().clone()
    return found


def assert_mean(peers: Peers, weights: list[float]) -> None:
    """The model of each peer is the mean of those before the round."""
    for strategy in peers.strategies:
        for name, matrix in matrices(strategy).items():
            mean = sum(weight * peers.before[number][name] for number, weight in enumerate(weights)) / sum(weights)
            assert (matrix - mean).abs().max() < 1e-6, name  # 1e-5 is promised


def logits_of(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=WORDS).logits
    model.train()
    return logits


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


def test_each_round_gives_the_weighted_mean_of_the_models(peers: Peers) -> None:
    weights = [1.0, 2.0, 3.5]
    for weight in weights:
        peers.tune(weight=weight)
    start = matrices(peers.strategies[0])
    peers.meet()
    for number in range(3):
        peers.round(number)
        receipts = [opt.last_receipt for opt in peers.averagers]
        assert all(receipt is not None and receipt.averaged and len(receipt.members) == 3 for receipt in receipts)
        assert_mean(peers, weights)
        some = peers.strategies[0]._corrections[0]
        rest_of_some = matrices(peers.strategies[0])[some.layer.name] - start[some.layer.name] - some.layer.product()
        assert rest_of_some.abs().max() > 1e-6  # or the means of the factors alone would do
    newcomer = peers.tune()
    assert (newcomer.global_step, newcomer.local_step) == (3, 9)
    assert torch.equal(logits_of(peers.models[3]), logits_of(peers.models[0]))
    moments = [opt.state[opt.param_groups[0]["params"][0]]["exp_avg"] for opt in peers.averagers]
    assert any(torch.equal(moments[3], donor) for donor in moments[:3])
    assert not torch.equal(moments[0], moments[1])
    finishes = peers.each(lambda number: peers.averagers[number].finish(60.0))
    assert all(finish.alike for finish in finishes), finishes
    assert torch.equal(logits_of(peers.models[3]), logits_of(peers.models[0]))


def test_peers_of_different_ranks_are_padded_and_train_their_own(peers: Peers) -> None:
    for rank in (1, 4, 2):
        peers.tune(adapted(rank), rank=4)
    model: Any = peers.models[0]
    assert model.peft_config["default"].r == 4
    assert torch.equal(logits_of(peers.models[0]), logits_of(base_of()))  # B is 0 at the start
    peers.meet()
    for seed in range(2):
        peers.round(seed)
        assert_mean(peers, [1.0, 1.0, 1.0])
    assert torch.equal(logits_of(peers.models[0]), logits_of(peers.models[1]))
    layer = peers.strategies[0]._layers[0]
    padding = layer.a[1:].detach().clone(), layer.b[:, 1:].detach().clone(), layer.a[:1].detach().clone()
    peers.train(0, 1)
    assert torch.equal(padding[0], layer.a[1:])
    assert torch.equal(padding[1], layer.b[:, 1:])
    assert not torch.equal(padding[2], layer.a[:1])


def test_padding_leaves_the_function_of_a_trained_adapter_as_it_is() -> None:
    for options in ({}, {"use_rslora": True}):
        model = adapted(2, **options)
        with torch.no_grad():
            for layer in LoRAAveraging(model, 3)._layers:
                layer.b.normal_()
        before = logits_of(model)
        strategy = LoRAAveraging(model, 3, rank=5)
        torch.testing.assert_close(logits_of(model), before)
        assert {layer.rank for layer in strategy._layers} == {5}
        assert {layer.scaling for layer in strategy._layers} == {8 / 5 if not options else 8 / 5**0.5}


@pytest.mark.parametrize("options", [{"use_rslora": True}, {"bias": "lora_only"}, {"modules_to_save": ["lm_head"]}])
def test_scaling_biases_and_saved_modules_are_averaged(peers: Peers, options: dict[str, Any]) -> None:
    for _ in range(2):
        peers.tune(adapted(2, base_of(attention_bias=True), **options))
    peers.meet()
    peers.round()
    assert_mean(peers, [1.0, 1.0])
    assert torch.equal(logits_of(peers.models[0]), logits_of(peers.models[1]))


def test_the_transposed_weights_of_gpt2_and_adapters_in_bfloat16_are_exact(peers: Peers) -> None:
    for _ in range(2):
        torch.manual_seed(0)
        base = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
        base.to(torch.bfloat16)
        model = get_peft_model(
            base, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True), autocast_adapter_dtype=False
        )
        assert next(p for p in model.parameters() if p.requires_grad).dtype is torch.bfloat16
        peers.tune(model)
    peers.meet()
    for seed in range(2):
        peers.round(seed)
        assert_mean(peers, [1.0, 1.0])
    assert torch.equal(logits_of(peers.models[0]), logits_of(peers.models[1]))
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    view = peers.strategies[0].merged_view().state_dict()
    plain.load_state_dict(view)
    torch.testing.assert_close(logits_of(plain), logits_of(peers.models[0]).float(), rtol=0.05, atol=0.05)


def test_a_failed_round_changes_nothing_and_the_next_one_has_all_steps(peers: Peers) -> None:
    for _ in range(2):
        peers.tune()
    peers.meet()
    peers.round()
    strategy = peers.strategies[1]
    take, kept = strategy._round.take_slot, {name: t.clone() for name, t in strategy._kept().items()}

    def fail(slot: int) -> None:
        raise RuntimeError("no slot")

    strategy._round.take_slot = fail  # type: ignore[method-assign]
    step_before = [opt.global_step for opt in peers.averagers]
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(peers.train, 0, 3, 1)
        with pytest.raises(RuntimeError, match="no slot"):
            peers.train(1, 3, 1)
        other.result(100.0)
    assert [opt.global_step for opt in peers.averagers] == step_before
    receipt = peers.averagers[0].last_receipt
    assert receipt is not None
    assert not receipt.averaged
    assert all(torch.equal(kept[name], tensor) for name, tensor in strategy._kept().items())
    strategy._round.take_slot = take  # type: ignore[method-assign]
    peers.each(lambda number: peers.train(number, 3, 2))
    assert_mean(peers, [1.0, 1.0])


def test_a_peer_whose_rounds_fail_says_so(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        peers.tune(group_wait=0.3)
    peers.meet()
    peers.train(0, 10)
    assert "makes no step of the run" in caplog.text
    assert "its last round failed: " in caplog.text


def test_local_steps_whose_last_round_fails_are_counted(peers: Peers) -> None:
    def fail(slot: int) -> None:
        raise RoundError("no slot")

    for _ in range(2):
        peers.tune()
    peers.meet()
    peers.round()
    peers.each(lambda number: peers.train(number, 2, 1))
    for strategy in peers.strategies:
        strategy._round.take_slot = fail  # type: ignore[method-assign]
    finishes = peers.each(lambda number: peers.averagers[number].finish(5.0))
    assert [finish.dropped for finish in finishes] == [2, 2]


def test_a_peer_that_missed_a_round_takes_over_the_others_and_keeps_its_steps(peers: Peers) -> None:
    for _ in range(3):
        peers.tune(group_wait=1.0)
    peers.meet()
    peers.round()
    peers.train(2, 1, 5)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: peers.train(number, 3, 1), range(2)))
    assert peers.averagers[0].global_step == 2
    peers.wait_for_progress(2, 2, of=2)
    late, other = peers.strategies[2], peers.strategies[0]
    name, (parameter, anchor) = next(iter(late._anchors.items()))
    local = parameter.detach() - anchor
    assert local.abs().max() > 0
    peers.averagers[2].param_groups[0]["lr"] = 0.0
    peers.train(2, 1, 6)
    assert peers.averagers[2].global_step == 2
    torch.testing.assert_close(parameter.detach(), anchor + local)
    assert torch.equal(anchor, other._anchors[name][1])
    assert all(torch.equal(tensor, other._kept()[name]) for name, tensor in late._kept().items())


def test_a_checkpoint_holds_the_rest(peers: Peers, tmp_path: Path) -> None:
    for _ in range(2):
        peers.tune()
    peers.meet()
    peers.round()
    torch.save(
        {"model": peers.models[0].state_dict(), "averager": peers.averagers[0].state_dict()}, tmp_path / "state.pt"
    )
    logits = logits_of(peers.models[0])
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    again = Peers()
    try:
        opt = again.tune(run_id="another")
        again.models[0].load_state_dict(saved["model"])
        opt.load_state_dict(saved["averager"])
        assert opt.global_step == 1
        assert torch.equal(logits_of(again.models[0]), logits)
        newcomer = again.tune(run_id="another")
        assert newcomer.global_step == 1
        assert torch.equal(logits_of(again.models[1]), logits)
    finally:
        again.close()


def test_the_adapter_is_written_with_its_correction_and_merges(
    peers: Peers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        peers.tune(adapted(2, modules_to_save=["lm_head"]))
    peers.meet()
    peers.round()
    peers.strategies[0].save_adapter(tmp_path / "low")  # factors
    logits = logits_of(peers.models[0])
    plain = PeftModel.from_pretrained(base_of(), tmp_path / "low")
    torch.testing.assert_close(logits_of(plain), logits)
    for seed in range(3):
        peers.round(seed)
    assert any(correction.dense is not None for correction in peers.strategies[0]._corrections)
    peers.strategies[0].save_adapter(tmp_path / "dense")
    logits = logits_of(peers.models[0])
    plain = PeftModel.from_pretrained(base_of(), tmp_path / "dense")
    torch.testing.assert_close(logits_of(plain), logits)
    torch.testing.assert_close(logits_of(plain.merge_and_unload()), logits)
    with caplog.at_level(logging.WARNING):
        peers.strategies[0]._model.save_pretrained(tmp_path / "bare")
    assert "without its correction" in caplog.text
    peers.close()
    merged = peers.strategies[0].merge()
    torch.testing.assert_close(logits_of(merged), logits)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(LlamaForCausalLM.from_pretrained(tmp_path / "merged")), logits)


def test_another_base_is_named_at_the_start(peers: Peers) -> None:
    peers.tune()
    changed = base_of()
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(StateError, match=r"'model.layers.1.mlp.up_proj.weight' has other values \(1 of 21 differ\)"):
        peers.tune(adapted(2, changed))


DIFFERENCES: dict[str, tuple[Callable[[], tuple[PeftModel, dict[str, Any]]], str]] = {
    "dtype": (
        lambda: (adapted(2, base_of().to(torch.bfloat16)), {}),
        r"'model.embed_tokens.weight' is float32 \[64, 32\] there, and bfloat16 \[64, 32\] here \(21 of 21",
    ),
    "layers": (lambda: (adapted(2, base_of(num_hidden_layers=1)), {}), "another base model: 9 frozen tensors"),
    "rank": (lambda: (adapted(3, lora_alpha=12), {}), r"rank 2 in layer .* this peer's 3; .*LoRAAveraging\(rank=3\)"),
    "alpha": (lambda: (adapted(2, lora_alpha=16), {}), "counts 4 times in layer .* this peer's 8 times"),
    "targets": (lambda: (adapted(2, target_modules=["v_proj"]), {}), "'model.layers.0.mlp.down_proj' is only there"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_differences_are_named(what: str) -> None:
    make, message = DIFFERENCES[what]
    model, options = make()
    theirs = LoRAAveraging(adapted(), 3)._description
    with pytest.raises(StateError, match=message):
        check_base(LoRAAveraging(model, 3, **options)._description, theirs)


def merged() -> PeftModel:
    model = adapted()
    model.merge_adapter()
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: adapted(2, use_dora=True), {}, r"layers.0.self_attn.q_proj' is Dora, which is not"),
        (lambda: get_peft_model(base_of(), IA3Config(target_modules=["q_proj"], feedforward_modules=[])), {}, "is IA3"),
        (lambda: adapted(2, target_modules=["embed_tokens"]), {}, "layer.Embedding; only linear layers"),
        (merged, {}, "is merged"),
        (base_of, {}, "must be a PeftModel"),
        (adapted, {"rank": 1}, "has rank 2; rank must be at least that"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(
    make: Callable[[], PeftModel], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LoRAAveraging(make(), **({"sync_every": 3} | options))


def test_options_of_the_averager_that_are_not_exact_are_refused(peers: Peers) -> None:
    with pytest.raises(ConfigError, match="aggregation='median' of factors"):
        peers.tune(aggregation="median")
    with pytest.raises(ConfigError, match="averages A and B apart"):
        peers.tune().average_now()
    model = adapted()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(ConfigError, match="give the averager model=model"):
        DecentralizedAverager(optimizer, strategy=LoRAAveraging(model, 3), run_id="tune")
    with pytest.raises(ConfigError, match="make the optimizer after"):
        DecentralizedAverager(optimizer, model=model, strategy=LoRAAveraging(model, 3, rank=4), run_id="tune")
    model = adapted()
    strategy = LoRAAveraging(model, 3)
    schedule_free = AdamWScheduleFree([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with pytest.raises(ConfigError, match="AdamWScheduleFree has training and evaluation weights"):
        DecentralizedAverager(schedule_free, model=model, strategy=strategy, run_id="tune")


def test_two_processes_of_unequal_rank_end_with_the_same_model(tmp_path: Path) -> None:
    def start(number: int, *more: str) -> subprocess.Popen[str]:
        options = [f"--own-rank={2 + number}", f"--text={number}", f"--output={tmp_path / str(number)}"]
        command = [sys.executable, "-m", "examples.adapters", "--steps=45", "--wait-for=2", *options, *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)

    first = start(0)
    try:
        assert first.stdout is not None
        endpoint = next(line.split()[-1] for line in first.stdout if "--join" in line)
        second = start(1, "--join", endpoint)
        try:
            texts = [process.communicate(timeout=100)[0] for process in (first, second)]
        finally:
            second.kill()
    finally:
        first.kill()
    assert first.returncode == second.returncode == 0, texts
    assert all("Done: all 2 peers hold the same weights" in text for text in texts), texts
    assert all(text.count("averaged with 1 other") == 3 for text in texts)  # the last one is that of finish()
    models = [LlamaForCausalLM.from_pretrained(tmp_path / str(number) / "merged") for number in range(2)]
    assert torch.equal(logits_of(models[0]), logits_of(models[1]))
    plain = PeftModel.from_pretrained(adapters.base_of(0), tmp_path / "1" / "adapter")
    torch.testing.assert_close(logits_of(plain), logits_of(models[0]))


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to/adapters.md").read_text(), re.DOTALL)
    assert 'join=["a.example:4222"]' in code
    monkeypatch.chdir(tmp_path)
    names = {"base": base_of(), "batches": [{"input_ids": WORDS, "labels": WORDS}] * 2}
    exec(code.replace('join=["a.example:4222"]', "join=[]"), names)
    plain = PeftModel.from_pretrained(base_of(), tmp_path / "adapter")
    torch.testing.assert_close(logits_of(plain), logits_of(names["model"]))


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"bias": "lora_only"}])
def test_a_publisher_hands_on_the_merged_model(peers: Peers, options: dict[str, Any]) -> None:
    for _ in range(2):
        peers.tune(adapted(2, base_of(attention_bias=True), **options))
    peers.meet()
    peers.round()
    publisher = WeightPublisher(peers.strategies[0].merged_view())
    publisher.publish_now(version=1)
    plain = base_of(attention_bias=True)
    plain.load_state_dict(peers.strategies[0].merged_view().state_dict())
    torch.testing.assert_close(logits_of(plain), logits_of(peers.models[0]))
    peers.round(1)
    publisher.publish_now(version=2)
    assert publisher.version == 2


def test_a_peer_with_another_base_that_never_downloaded_a_state_is_named_in_the_round(peers: Peers) -> None:
    changed = base_of()
    with torch.no_grad():
        changed.model.norm.weight[0] += 1
    for base in (base_of(), changed):
        peers.tune(adapted(2, base), share_state=False)
    ids = [peers.strategies[number].history.origin.id for number in range(2)]
    assert ids[0] == ids[1]  # without a state that anybody shares there is no origin that differs
    peers.round()
    receipts = [opt.last_receipt for opt in peers.averagers]
    assert all(receipt is not None and not receipt.averaged for receipt in receipts)
    assert any("has another base or adapter than this peer" in str(receipt) for receipt in receipts)
