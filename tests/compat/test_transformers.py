"""Hugging Face's Trainer with Mezzo's steps: small real runs against a session's or exact values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
from helpers_trainers import assert_same, forgotten, linear, network
from mezzo.errors import SessionError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState  # noqa: E402

from mezzo.compat.transformers import MezzoTrainer, MezzoTrainerMixin  # noqa: E402

OVERFLOWS = "fp16:init_scale=1048576"
SIZE = 8


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    with forgotten():
        yield


class Regression(nn.Module):
    """A model as Hugging Face has them: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[Tensor] = []
        self.kinds: list[torch.dtype] = []

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.net(inputs)
        self.kinds.append(found.dtype)
        loss = F.mse_loss(found.float(), labels.float())
        self.losses.append(loss.detach())
        return {"loss": loss, "logits": found}


class Linear(nn.Module):
    """Weights of 0.5: the gradient of the mean output is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layer(inputs).mean()}


def examples(count: int, *, same: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SIZE if same else count * SIZE, 6, generator=generator)
    labels = torch.randn(len(inputs), 2, generator=generator)
    return [{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)] * (count if same else 1)


def constants(*values: float) -> list[dict[str, Tensor]]:
    """Return a batch of each value."""
    rows = [{"inputs": torch.full((4,), float(v)), "labels": torch.zeros(1)} for v in values]
    return [row for row in rows for _ in range(SIZE)]


def arguments(folder: Path, **settings: Any) -> Any:
    fixed: dict[str, Any] = {
        "per_device_train_batch_size": SIZE,
        "num_train_epochs": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
    }
    return transformers.TrainingArguments(str(folder), **{**fixed, **settings})


def trainer(folder: Path, policy: str, model: nn.Module, data: list[Any], **settings: Any) -> Any:
    made = MezzoTrainer(model=model, args=arguments(folder, **settings), train_dataset=data, policy=policy)
    made.remove_callback(transformers.PrinterCallback)
    return made


def logged(made: Any, name: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


@pytest.mark.parametrize("policy", ["fp32", OVERFLOWS, "fp16-master"])
def test_it_trains_as_a_session_does(policy: str, tmp_path: Path) -> None:
    model, own = Regression(), Regression()
    made = trainer(tmp_path, policy, model, examples(12))
    made.train()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    session = mezzo.Session(own, optimizer, policy=policy)
    data = examples(12)
    for start in range(0, len(data), SIZE):
        batch = {key: torch.stack([e[key] for e in data[start : start + SIZE]]) for key in ("inputs", "labels")}
        with session.autocast():
            loss = own(**batch)["loss"]
        session.step(loss)
    assert_same(model.losses, own.losses)
    assert_same(model.parameters(), own.parameters())
    found = made.record().steps.num_skipped, made.accelerator.driven.session.loss_scale
    assert found == (session.skipped, session.loss_scale)
    assert made.record().framework == f"torch {torch.__version__} in transformers {transformers.__version__}"
    if policy.endswith("-master"):
        assert {p.dtype for p in model.parameters()} == {mezzo.Policy.parse(policy).storage.dtype}
        masters = made.accelerator.driven.state_dict()["masters"][0]
        assert list(masters) == [name for name, _ in own.named_parameters()]
        assert_same(masters.values(), optimizer.param_groups[0]["params"])
        assert {p.dtype for g in made.optimizer.param_groups for p in g["params"]} == {torch.float32}


def test_the_schedule_waits_on_a_skip(tmp_path: Path) -> None:
    model = Regression()
    made = trainer(tmp_path, OVERFLOWS, model, examples(10, same=True), lr_scheduler_type="linear")
    made.train()
    skipped = made.record().steps.num_skipped
    assert skipped > 2
    expected = [0.1] * (skipped + 1) + [0.1 * (10 - k) / 10 for k in range(1, 10 - skipped)]
    assert logged(made, "learning_rate") == pytest.approx(expected[:10])
    assert_same(model.losses[: skipped + 1], [model.losses[0]] * (skipped + 1))


@pytest.mark.parametrize("policy", ["fp16:init_scale=256", "fp16-master:init_scale=256"])
def test_max_grad_norm_clips_true_gradients(policy: str, tmp_path: Path) -> None:
    model = Linear()
    made = trainer(tmp_path, policy, model, constants(2), learning_rate=1.0, max_grad_norm=1.0)
    made.train()
    assert logged(made, "grad_norm") == [4.0]
    assert model.layer.weight.tolist()[0] == pytest.approx([0.0] * 4, abs=2**-20)


@pytest.mark.parametrize("policy", ["fp16:init_scale=256", "fp16-master:init_scale=256"])
def test_a_short_last_window_is_averaged_over_its_micro_batches(policy: str, tmp_path: Path) -> None:
    model, data = Linear(), constants(1, 2, 3, 2, 1, 3)
    made = trainer(tmp_path, policy, model, data, learning_rate=1.0, gradient_accumulation_steps=4)
    made.train()
    assert model.layer.weight.tolist() == [[0.5 - 2 - 2] * 4]
    assert len(made.record().steps) == 2


@pytest.mark.parametrize("policy", [OVERFLOWS, "fp16-master"])
def test_it_resumes_from_a_checkpoint(policy: str, tmp_path: Path) -> None:
    whole, second = Regression(), Regression()
    settings = {"save_strategy": "steps", "save_steps": 6, "optim": "adamw_torch", "learning_rate": 0.01}
    straight = trainer(tmp_path, policy, whole, examples(10), **settings)
    straight.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    resumed = trainer(tmp_path / "again", policy, second, examples(10), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert_same(second.losses, whole.losses[6:])
    assert_same(second.parameters(), whole.parameters())
    assert resumed.accelerator.driven.session.loss_scale == straight.accelerator.driven.session.loss_scale


def language_model() -> nn.Module:
    """Return a GPT-2 of a few thousand weights; the embedding of words is also the output layer."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 8}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    made: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off))
    return made


@pytest.mark.parametrize(("policy", "unit"), [("fp16:fp32_modules=*.mlp", 2**-11), ("bf16-master", 2**-8)])
def test_a_language_model_trains_as_in_fp32(policy: str, unit: float, tmp_path: Path) -> None:
    words = torch.randint(0, 32, (8 * SIZE, 8), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in words]
    settings = {"optim": "adamw_torch", "learning_rate": 0.01, "max_grad_norm": 1.0, "gradient_accumulation_steps": 2}
    losses = {}
    for name in ("fp32", policy):
        AcceleratorState._reset_state(reset_partial_state=True)
        made = trainer(tmp_path, name, language_model(), data, **settings)
        made.train()
        losses[name] = made.record().steps.loss
        assert made.record().steps.skipped == [False] * 4
    assert losses[policy] == pytest.approx(losses["fp32"], rel=8 * unit)
    assert losses[policy] != losses["fp32"]
    assert made.model.transformer.wte.weight is made.model.lm_head.weight


class OwnLoss(transformers.Trainer):  # type: ignore[misc,name-defined]
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * 2


class MezzoOwnLoss(MezzoTrainerMixin, OwnLoss):
    pass


def test_a_trainer_of_ones_own_accepts_the_mixin(tmp_path: Path) -> None:
    model = Linear()
    args = arguments(tmp_path, learning_rate=1.0)
    made = MezzoOwnLoss(model=model, args=args, train_dataset=constants(1), policy="fp16:init_scale=256")
    made.remove_callback(transformers.PrinterCallback)
    made.train()
    assert model.layer.weight.tolist() == [[-1.5] * 4]


def test_evaluation_runs_under_the_policy(tmp_path: Path) -> None:
    model = Regression()
    made = trainer(tmp_path, "fp16", model, examples(1))
    found = made.evaluate(examples(1))
    assert model.kinds[0] is torch.float16
    assert found["eval_loss"] == pytest.approx(float(model.losses[0]))


def test_mixed_precision_of_the_trainers_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SessionError, match=r"TrainingArguments\(bf16=True\) together with policy='fp16'; allowed: one of the two"
    ):
        trainer(tmp_path, "fp16", Linear(), [], bf16=True)


# --- the model's face ------------------------------------------------------------------------------------------------------------


def tokens(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"input_ids": 12, "labels": 8}
    return [{k: torch.randint(3, 64, (n,), generator=generator) for k, n in sizes.items()} for _ in range(count)]


def translator() -> Any:
    torch.manual_seed(0)
    small = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in SIDES.items()}
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = transformers.BartConfig(vocab_size=64, d_model=32, max_position_embeddings=64, **small, **ids)
    return transformers.BartForConditionalGeneration(config)


SIDES = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}


class Translating(MezzoTrainerMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc,name-defined]
    pass


def translating(folder: Path, **settings: Any) -> Any:
    kept = vars(arguments(folder, logging_steps=1)).items()
    known = transformers.Seq2SeqTrainingArguments.__dataclass_fields__
    own = {k: v for k, v in kept if k in known and not k.startswith("_") and known[k].init}
    return transformers.Seq2SeqTrainingArguments(
        **{**own, "predict_with_generate": True, "generation_max_length": 8, **settings}
    )


@pytest.mark.parametrize("policy", ["fp16", "bf16-master"])
def test_columns_and_generation_are_those_of_the_model(policy: str, tmp_path: Path) -> None:
    model = translator()
    theirs = transformers.Seq2SeqTrainer(model=translator(), args=translating(tmp_path))
    theirs._set_signature_columns_if_needed()
    made = Translating(model=model, args=translating(tmp_path), train_dataset=tokens(16), policy=policy)
    made.remove_callback(transformers.PrinterCallback)
    made.train()
    made._set_signature_columns_if_needed()
    assert made._signature_columns == theirs._signature_columns
    assert "input_ids" in made._signature_columns
    assert made.model_accepts_loss_kwargs == theirs.model_accepts_loss_kwargs
    found = made.predict(tokens(4)).predictions
    reference = translator()
    reference.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    plain = transformers.Seq2SeqTrainer(model=reference, args=translating(tmp_path))
    assert (found == plain.predict(tokens(4)).predictions).all()
    again = transformers.Seq2SeqTrainer(model=model, args=translating(tmp_path))  # Trainer's own, on what was trained
    assert again.evaluate(tokens(4))["eval_loss"] == pytest.approx(plain.evaluate(tokens(4))["eval_loss"], rel=1e-2)


def test_the_loss_of_a_short_window_is_the_mean_of_its_micro_batches(tmp_path: Path) -> None:
    model = Linear()
    settings = {"gradient_accumulation_steps": 4, "learning_rate": 0.0, "max_grad_norm": 1e6}
    made = trainer(tmp_path, "fp16:init_scale=256", model, constants(1, 2, 3, 2, 1, 3), **settings)
    made.train()
    assert made.record().steps.loss == [4.0, 4.0]
