"""What a recorder sees inside a script: masters, numbers that are read, layouts, several models."""

from __future__ import annotations

import torch
from torch import nn

from helpers_predict import kept_bytes
from mezzo.measure.predict.script.recorder import RecordingComplete, ScriptRecorder
from mezzo.measure.predict.script.tapes import TapeRequest


def _train(watch: ScriptRecorder, *, channels_last: bool = False, second: bool = False) -> None:
    with watch.watching():
        try:
            model: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm(6), nn.Flatten(), nn.Linear(288, 10))
            head = nn.Linear(10, 4) if second else nn.Identity()
            if channels_last:
                model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            trained = [*model.parameters(), *(head.parameters() if second else ())]
            optimizer = torch.optim.AdamW(trained)
            for _ in range(5):
                optimizer.zero_grad()
                loss = (head(model(torch.randn(2, 3, 8, 8))) if second else model(torch.randn(2, 3, 8, 8))).sum()
                if loss > 3:
                    raise AssertionError("a condition on a traced tensor is false")
                loss.backward()
                optimizer.step()
        except RecordingComplete:
            return
    raise AssertionError("not stopped")


CONV, NORM, LINEAR, HEAD = 3 * 8 * 9 + 8, 12, 288 * 10 + 10, 44


def test_masters_keep_32_bits_and_the_model_has_16() -> None:
    watch = ScriptRecorder(TapeRequest(script=__file__, arguments=(), policy="fp16-master"))
    _train(watch)
    tape = watch.tape
    found = kept_bytes(tape)
    assert found["parameters"] == 2 * (CONV + LINEAR) + 4 * NORM
    assert found["optimizer"] == 4 * (CONV + LINEAR) + 8 * (CONV + LINEAR + NORM)
    products = {op.format for op in tape.operations if op.flops}
    assert products == {"fp16"}


def test_the_lines_that_read_numbers_are_kept() -> None:
    watch = ScriptRecorder(TapeRequest(script=__file__, arguments=(), policy="fp32"))
    _train(watch)
    assert [line.split(":")[0] for line in watch.read_at] == ["test_script_recorder.py"]


def test_the_layout_is_that_of_the_script() -> None:
    for channels_last in (False, True):
        watch = ScriptRecorder(TapeRequest(script=__file__, arguments=(), policy="fp32"))
        _train(watch, channels_last=channels_last)
        assert watch.channels_last == channels_last


def test_a_second_model_of_the_step_is_allocated() -> None:
    watch = ScriptRecorder(TapeRequest(script=__file__, arguments=(), policy="fp32"))
    _train(watch, second=True)
    found = kept_bytes(watch.tape)
    assert found["parameters"] == 4 * (CONV + NORM + LINEAR + HEAD)
