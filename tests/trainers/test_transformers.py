"""averaging.integrations.transformers in a real Trainer, with a model of random weights."""

import copy
import json
from collections.abc import Callable
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.lr_scheduler import ConstantLR, LinearLR
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from averaging import ConfigError, DecentralizedAverager, LocalSGD, PeerConfig
from averaging.integrations.transformers import AveragingCallback, divisor_of
from tests.support.training import Run
from tests.trainers import page
from tests.trainers.partner import RUN_ID, Noted, founder, going_on, train

pytestmark = pytest.mark.integrations


def model_of(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            **{"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2},
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            bos_token_id=None,
            eos_token_id=None,
            loss_type="ForCausalLM",
            tie_word_embeddings=False,
        )
    )


def data_of(samples: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    words = torch.randint(11, (samples, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in words]


def arguments_of(folder: Path | str, **options: Any) -> TrainingArguments:
    usual: dict[str, Any] = {"per_device_train_batch_size": 4, "use_cpu": True}
    quiet = {"disable_tqdm": True, "save_strategy": "no", "report_to": "none"}
    return TrainingArguments(str(folder), **(usual | quiet | options))


def averager_of(trainer: Trainer, **options: Any) -> DecentralizedAverager:
    usual: dict[str, Any] = {"run_id": RUN_ID, "strategy": LocalSGD(4)}
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01)
    return DecentralizedAverager(optimizer, model=trainer.model, **(usual | options))


def page_peer(number: int, endpoints: SimpleQueue[str]) -> None:
    model = model_of(number)
    arguments = arguments_of("runs", max_steps=page.STEPS)
    names = {"Trainer": Trainer, "arguments": arguments, "data": data_of(40, number), "model": model}
    page.run_as_one_of_two(page.TRAINER, number, endpoints, names)


def rank(number: int, ports: SimpleQueue[str]) -> None:
    page.as_rank(number, ports)
    trainer = Trainer(model_of(), arguments_of("runs"), train_dataset=data_of(4))
    with averager_of(trainer) as opt:
        try:
            AveragingCallback(opt).attach(trainer)
        except ConfigError as error:
            page.tell_error(error)
    torch.distributed.destroy_process_group()


def test_a_newcomer_ends_with_the_run_and_its_last_checkpoint_has_the_weights_of_all(run: Run, tmp_path: Path) -> None:
    options = {"max_steps": 13, "logging_steps": 2, "save_strategy": "steps", "save_steps": 100}
    trainer = Trainer(model_of(), arguments_of(tmp_path, **options, report_to="tensorboard"), train_dataset=data_of(80))
    first = founder(run, trainer.model, 5)
    with averager_of(trainer, join=[first.endpoint], group_size=2, group_wait=30.0) as opt:
        AveragingCallback(opt, wait_for=9).attach(trainer)  # a newcomer does not wait
        with going_on(run, 8) as told:
            trainer.train()
        assert opt.local_step == 13
    assert told == ["all 2 peers hold the same weights"]
    assert trainer.state.global_step == 9  # newcomers take over the last turn's state, of step 4
    saved = load_file(tmp_path / "checkpoint-9" / "model.safetensors")
    for name, parameter in run.models[0].named_parameters():
        torch.testing.assert_close(saved[name], parameter, rtol=0, atol=0)
    state = json.loads((tmp_path / "checkpoint-9" / "trainer_state.json").read_text())
    logs = [entry for entry in state["log_history"] if "loss" in entry]
    assert [entry["averaging/local_step"] for entry in logs] == [6, 8, 10, 12]
    assert [entry["averaging/peers"] for entry in logs] == [2, 2, 2, 2]
    (folder,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert [event.value for event in events.Scalars("train/averaging/local_step")] == [6, 8, 10, 12]


def test_samples_are_counted_and_the_averagers_schedule_is_followed_until_the_global_steps_are_made(
    tmp_path: Path,
) -> None:
    options = {"max_steps": 100, "gradient_accumulation_steps": 2, "logging_steps": 1}
    trainer = Trainer(model_of(), arguments_of(tmp_path, **options), train_dataset=data_of(21))
    strategy = Noted(10 * 8)
    with averager_of(trainer, strategy=strategy, scheduler=partial(LinearLR, total_iters=4)) as opt:
        AveragingCallback(opt, global_steps=3).attach(trainer)
        trainer.train()
        assert opt.global_step == 3
    # 21 samples are 5 batches of 4 and one of 1; each has 8 tokens.
    assert strategy.told == [8 * 8, 8 * 8, 5 * 8, 8 * 8, 8 * 8, 5 * 8]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["averaging/global_step"] for entry in logs] == [0, 1, 1, 2, 2, 3]
    rates = [0.01 * (1 / 3 + 2 / 3 * before / 4) for before in (0, 0, 1, 1, 2, 2)]
    assert [entry["learning_rate"] for entry in logs] == pytest.approx(rates)


def test_the_trainers_schedule_free_optimizer_is_switched_and_its_evaluation_weights_are_saved(
    run: Run, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 100, "eval_strategy": "steps", "eval_steps": 3}
    arguments = arguments_of(tmp_path, **saving, max_steps=13, optim="schedule_free_adamw", learning_rate=0.01)
    trainer = Trainer(model_of(), arguments, train_dataset=data_of(80), eval_dataset=data_of(8))
    kind, arguments_of_kind = Trainer.get_optimizer_cls_and_kwargs(arguments)
    make = partial(kind, **arguments_of_kind)
    first = run.add(LocalSGD(4), make, copy.deepcopy(trainer.model), run_id=RUN_ID, group_size=2)
    first.train()
    train(run, 0, 5)
    optimizer = make(trainer.model.parameters())
    peer = PeerConfig(run_id=RUN_ID, join=[first.endpoint], group_size=2, group_wait=30.0)
    with DecentralizedAverager(optimizer, model=trainer.model, strategy=LocalSGD(4), config=peer) as opt:
        AveragingCallback(opt).attach(trainer)
        with going_on(run, 8) as told:
            trainer.train()
        assert opt.local_step == 13
        assert opt.param_groups[0]["k"] == 13
        assert not opt.param_groups[0]["train_mode"]
    assert told == ["all 2 peers hold the same weights"]
    saved = load_file(tmp_path / "checkpoint-9" / "model.safetensors")
    for name, parameter in run.models[0].named_parameters():
        torch.testing.assert_close(saved[name], parameter, rtol=0, atol=0)
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated[-1])


class Plain(torch.nn.Module):
    """A language model that takes the mean over its tokens itself, so the Trainer does not count them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Embedding(11, 4), torch.nn.Linear(4, 11))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss at the labels that are not -100."""
        return {"loss": torch.nn.functional.cross_entropy(self.net(input_ids).flatten(0, 1), labels.flatten())}


def mean_of_tokens(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None) -> torch.Tensor:
    """A loss of the user's own, over all positions."""
    total = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert num_items_in_batch is not None
    return total / num_items_in_batch


def padded_data() -> list[dict[str, torch.Tensor]]:
    """Sequences of which 8, 3, 2 and 6 positions are no padding."""
    data = data_of(4)
    for row, length in zip(data, (8, 3, 2, 6), strict=True):
        row["labels"] = row["labels"].clone()
        row["labels"][length:] = -100
    return data


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("make", "smoothing", "loss"),
    [(model_of, 0.0, None), (model_of, 0.1, None), (model_of, 0.0, mean_of_tokens), (Plain, 0.0, None)],
    ids=["model", "smoothed", "own loss", "model that divides"],
)
def test_steps_with_unequal_tokens_make_the_global_step_of_one_process_with_the_joined_batch(
    make: Callable[[], torch.nn.Module], smoothing: float, loss: Any, batch: int, tmp_path: Path
) -> None:
    """In steps of one or two sequences, which are accumulated batches if the Trainer counts their tokens."""

    def trainer_of(model: torch.nn.Module, samples: int, accumulated: int, steps: int, **more: Any) -> Trainer:
        sizes = {"per_device_train_batch_size": samples, "gradient_accumulation_steps": accumulated}
        usual = {"max_steps": steps, "max_grad_norm": 0, "label_smoothing_factor": smoothing}
        arguments = arguments_of(tmp_path, **sizes, **usual)
        return Trainer(model, arguments, train_dataset=padded_data(), compute_loss_func=loss, **more)

    alone = make()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    trainer_of(alone, 4, 1, 1, optimizers=(plain, ConstantLR(plain, factor=1))).train()

    model = make()
    trainer = trainer_of(model, 1, batch, 4) if make is model_of else trainer_of(model, batch, 1, 4)
    strategy = Noted(8 + 3 + 2 + 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DecentralizedAverager(optimizer, model=model, run_id=RUN_ID, strategy=strategy) as opt:
        AveragingCallback(opt, global_steps=1).attach(trainer)
        trainer.train()
    assert len(strategy.told) == 4 // batch
    assert sum(samples or 0 for samples in strategy.told) == 8 + 3 + 2 + 6
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_function_says_what_the_loss_of_a_batch_is_divided_by(tmp_path: Path) -> None:
    arguments = arguments_of(tmp_path, max_steps=2, gradient_accumulation_steps=2, per_device_train_batch_size=1)
    trainer = Trainer(model_of(), arguments, train_dataset=data_of(4))
    strategy = Noted(10)
    with averager_of(trainer, strategy=strategy) as opt:
        AveragingCallback(opt, batch_size=lambda batch: 3 * len(batch["labels"])).attach(trainer)
        trainer.train()
    assert strategy.told == [6, 6]


def note_batch_size(told: list[int], _: object, arguments: Any, options: dict[str, Any]) -> None:
    told.append(options["batch_size"])


def test_weights_by_samples_are_tokens_and_other_strategies_count_samples(tmp_path: Path) -> None:
    for weight, counted in (("samples", 4 * 8), (1.0, 4)):
        told: list[int] = []
        trainer = Trainer(model_of(), arguments_of(tmp_path, max_steps=2), train_dataset=data_of(8))
        with averager_of(trainer, weight=weight) as opt:
            AveragingCallback(opt).attach(trainer)
            opt.register_step_post_hook(partial(note_batch_size, told))
            trainer.train()
        assert told == [counted, counted]


@pytest.mark.parametrize(
    ("batches", "items", "parts", "expected"),
    [
        ([{}], 5, 1, 5),
        ([{}], torch.tensor([[5], [5]]), 2, 10),  # half of them at each of two GPUs
        ([{"labels": torch.tensor([[1, -100], [-100, 3]])}, {"labels": torch.tensor([[1, 2]])}], None, 1, 4),
        ([{"labels": torch.tensor([1, 2, 3])}], None, 1, None),
        ([{"labels": torch.ones(2, 3)}], None, 1, None),
        ([(torch.ones(2, 3),)], None, 1, None),
    ],
)
def test_what_a_loss_is_divided_by(batches: list[Any], items: Any, parts: int, expected: int | None) -> None:
    assert divisor_of(batches, items, parts) == expected


def test_a_checkpoint_is_resumed_by_who_is_first_and_refused_to_a_newcomer(run: Run, tmp_path: Path) -> None:
    arguments = arguments_of(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    for resumed in (False, True):
        trainer = Trainer(model_of(), arguments, train_dataset=data_of(40))
        with averager_of(trainer) as opt:
            AveragingCallback(opt).attach(trainer)
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resumed else None)
            assert opt.local_step == 4
    first = founder(run, model_of(), 5)
    trainer = Trainer(model_of(), arguments, train_dataset=data_of(40))
    with averager_of(trainer, join=[first.endpoint]) as opt:
        AveragingCallback(opt).attach(trainer)
        with pytest.raises(ConfigError, match="joined a run in progress .* train without the checkpoint"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def attached(trainer: Trainer, opt: DecentralizedAverager, model: Any = None) -> AveragingCallback:
    trainer.model = trainer.model if model is None else model
    callback = AveragingCallback(opt)
    callback.attach(trainer)
    return callback


@pytest.mark.parametrize(
    ("do", "told"),
    [
        (
            lambda t, opt: attached(t, opt, model=t.model.double()),
            "has been moved in memory.* create the Trainer first, because it moves the model, then the averager",
        ),
        (
            lambda t, opt: attached(t, opt, model=model_of()),
            "parameters that are not in the trainer's model: create the Trainer first",
        ),
        (lambda t, opt: (t.add_callback(AveragingCallback(opt)), t.train()), r"call attach\(trainer\) instead"),
        (
            lambda t, opt: (t.create_optimizer(), attached(t, opt)),
            r"has an optimizer or a scheduler already; remove optimizers=, pass the scheduler to",
        ),
        (
            lambda t, opt: attached(Trainer(args=t.args, model_init=lambda: model_of()), opt),
            "model_init when it trains; pass the model instead",
        ),
        (lambda _, opt: AveragingCallback(opt, global_steps=10), r"LocalSGD\(.*\) has no global steps; omit global_"),
    ],
)
def test_what_cannot_work_is_said_with_its_remedy(do: Callable[[Any, Any], object], told: str, tmp_path: Path) -> None:
    trainer = Trainer(model_of(), arguments_of(tmp_path, max_steps=1), train_dataset=data_of(4))
    with averager_of(trainer) as opt, pytest.raises(ConfigError, match=told):
        do(trainer, opt)
