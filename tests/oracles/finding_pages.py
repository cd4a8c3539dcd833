"""What each page of ``docs/findings`` says of the code: how the finding is found, and what it looks like in the output.

The planted scripts of the tests are run, and what Mezzo says of each is written into the page of its finding::

    PYTHONPATH=tests python tests/oracles/finding_pages.py            # all pages, and the index
    PYTHONPATH=tests python tests/oracles/finding_pages.py A108 A602  # these; a new page is begun

``test_finding_pages.py`` compares the pages with it.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence

from mezzo.observe.audit.findings import MIN_SHARE, MUCH_CAST, RULES
from mezzo.observe.lint.misuse_log import ENOUGH, MISUSES
from mezzo.observe.lint.stored_formats import COMPARED
from mezzo.records import Finding
from mezzo.report.pages import finding_section
from mezzo.report.sections import FactTable
from paths import ROOT

PAGES = ROOT / "docs" / "findings"
WIDTH = 110

_WIDE = (
    "`mezzo audit` records the format that each matrix product and convolution of the audited steps ran "
    "in. Those in FP32 or wider are grouped by cause; "
)
_LEAST = f" The finding is reported if it covers at least {MIN_SHARE:.0%} of the step's product FLOPs."
_EVERY = " It is reported whatever its share."
_SHAPES = (
    "`mezzo audit` checks the dimensions, strides and addresses of each product's operands by NVIDIA's "
    "rule: rows begin at multiples of 16 bytes. "
)
_CALLS = (
    "Mezzo records the script's calls to GradScaler, optimizers and schedulers, and whether a gradient "
    "was changed since its backward pass. No values are read. "
)
_FIRST = " Gradients are followed in the first 64 updates."
_GRAPH = (
    "Mezzo reads the last operations of the loss's graph: what it was multiplied and divided by, and "
    "whether it is a mean. "
)
_INSPECTED = (
    "Mezzo looks at the forward pass of the second step, which it counts, or of the steps that `mezzo audit` records, and at operations "
    "that the script or a library calls itself. Code inside `torch.compile` is not seen, nor what runs once before the training. "
)

_COMPARED = ", ".join(map(str, COMPARED))
_SAMPLED = (
    f"Up to 256 numbers of a tensor, of up to 64 weights, are copied before updates {_COMPARED} and before each next one, and are "
    "read at the end of the run: no step waits for them. "
)

HOW = {
    "A101": _WIDE + "here no product of the step ran below 32 bits, and autocast was on around none of them." + _LEAST,
    "A102": _WIDE + "here no autocast was on around them, though other products ran in 16 bits." + _LEAST,
    "A103": _WIDE + "here autocast was on when the module began, and off at the product." + _LEAST,
    "A104": _WIDE + "here autocast was on, and the policy's list or autocast's keeps the operation in FP32." + _LEAST,
    "A105": _WIDE + "here an operand had become FP32 by meeting FP32 values." + _LEAST,
    "A106": _WIDE + "here autocast was on, and the operation was called with `out=`." + _LEAST,
    "A107": _WIDE + "here the operands were FP64." + _EVERY,
    "A108": _WIDE
    + "here none ran below 32 bits, and an autocast of the script was open around them, switched off."
    + _LEAST,
    "A201": _SHAPES
    + "Here an innermost dimension, the channels of a convolution or the width of a head is not a multiple of 8. Up to 4 channels "
    "of a convolution without groups mean an image and do not count. "
    "Products in FP32 are listed in the table of shapes, but are not a finding." + _LEAST,
    "A202": _SHAPES
    + "Here the dimensions are multiples of 8, but an address or the distance between two rows is not a multiple of 16 bytes."
    + _LEAST,
    "A203": (
        "`mezzo audit` reads the strides of each 16-bit convolution's input and weight: here neither is channels-last. If one were, "
        "torch would use that layout for the whole convolution."
    )
    + _LEAST,
    "A204": (
        "`mezzo audit` counts the products in FP32 on a CUDA device of compute capability 8.0 or higher." + _LEAST
    ),
    "A205": (
        "`mezzo audit` reads the strides of each 16-bit convolution's input and weight: here the weight is channels-last and the input "
        "is not. The copy is counted as read and written, in the forward pass and for the gradient of the weight. The finding is "
        f"reported if that is at least {MIN_SHARE:.0%} of the step's bytes."
    ),
    "A301": (
        "`mezzo audit` follows each cast value: here it was cast back, and every operation that read it in between would have run in "
        "the first format as well."
    )
    + _EVERY,
    "A302": (
        "`mezzo audit` records the memory that each cast reads: here the same parameter was cast to the same format "
        "twice in one forward pass of a module. Parameters that share a storage are counted separately."
    )
    + _EVERY,
    "A303": (
        f"`mezzo audit` adds up the bytes that casts read and write: here they are {MUCH_CAST:.0%} or more of the bytes of all "
        "operations. The modules that the finding names account for half of them."
    ),
    "A304": (
        "`mezzo audit` compares the formats that an operation reads with its result's. Half of the result's "
        f"bytes count; the finding is reported if they are at least {MIN_SHARE:.0%} of the step's bytes."
    ),
    "A305": (
        "`mezzo audit` adds up the FP32 operands of `layer_norm`, `group_norm` and `rms_norm` kernels of the forward pass, each storage "
        "once: the kernels keep them for the backward pass. Those that activation checkpointing drops do not count. Half of these bytes "
        f"count; the finding is reported if they are at least {MIN_SHARE:.0%} of the step's bytes."
    ),
    "A401": "`mezzo audit` records the operations of `optimizer.step()`: here one wrote into a 16-bit parameter."
    + _EVERY,
    "A402": (
        "`mezzo audit` compares each operation of the forward pass with the portable op lists: here an operation that they "
        "keep in FP32 read a 16-bit operand and returned a 16-bit result. Operations with an FP32 result do not count: CUDA's "
        "autocast computes many in FP32 from 16-bit operands. Nor do `cross_entropy`, which the lists leave in its operand's format, "
        "`interpolate`, whose kernels add only a few values, in FP32, and norms in BF16, whose kernels add up in FP32."
    )
    + _EVERY,
    "A501": "`mezzo audit` reads the names of the kernels from torch's profiler, on CUDA only." + _LEAST,
    "A601": _CALLS + "Here gradients that `scale()` multiplied were clipped before `unscale_`." + _FIRST,
    "A602": _CALLS + "Here a norm of gradients that `scale()` multiplied was computed before `unscale_`." + _FIRST,
    "A603": _CALLS + "Here `optimizer.step()` found gradients that `scale()` had multiplied." + _FIRST,
    "A604": _CALLS + "Here `scaler.step` found gradients of a loss that this scaler had not multiplied." + _FIRST,
    "A605": _CALLS + "The order of the scaler's calls is checked to the end of the run.",
    "A606": _CALLS
    + "Here `update()` was called while scaled gradients waited for their step. The calls are checked to the end.",
    "A607": _GRAPH
    + "Here it was divided twice by k, the number of backward passes before the update (a half counts only if it is written as a division)."
    + _FIRST,
    "A608": _GRAPH
    + f"Here {ENOUGH} windows in a row had several backward passes from one line, each of a mean over a batch and without any factor."
    + _FIRST,
    "A609": "Mezzo walks the graphs of the first two losses that nothing multiplied: here a node has FP16 gradients.",
    "A610": _CALLS
    + "Here a scheduler stepped, although the scaler had skipped every update since its last step. The calls are checked to the end. A "
    "rate that the script writes into `param_groups` is not followed.",
    "A611": (
        f"Mezzo records the order of `backward()`, `scheduler.step()` and `optimizer.step()`: here {ENOUGH} "
        "updates had that order, or the scheduler's first two steps came from one line."
    ),
    "A612": (
        "Mezzo inspects the copies of `AveragedModel`, and the script's own arithmetic on weights "
        "between an update and the next forward pass, in the first updates."
    ),
    "A613": (
        "Mezzo inspects the buffers of modules in training mode after the first two updates: formats, names, "
        "and whether the buffers changed."
    ),
    "A614": _CALLS
    + "Here gradients were cleared after a backward pass and no other backward pass followed, in more than half of the optimizer's steps."
    + _FIRST,
    "A615": "Mezzo records the formats of the script's autocast regions and whether its scaler is on.",
    "A616": _CALLS + "Here `unscale_` or `step` of a scaler found FP16 parameters with gradients.",
    "A617": (
        "Mezzo looks at the dictionaries that the script passes to `torch.save`, `pickle.dump` or `torch.distributed.checkpoint`: here one "
        "has the keys of an optimizer's state, after a step of a GradScaler whose `state_dict()` was not called until the end of the run."
    ),
    "A618": _CALLS
    + "Here `unscale_` or `step` of a scaler found gradients that its call for another optimizer had divided, with no backward pass and no "
    "`update()` between." + _FIRST,
    "A619": (
        "Mezzo records calls of `AveragedModel.update_parameters`, and the script's own arithmetic on weights between an update and the "
        "next forward pass: here all updates since the last move were skipped. The first call of `AveragedModel` is a copy and does not "
        "count."
    )
    + _FIRST,
    "A620": _INSPECTED
    + "Here a number, or a tensor of one number, was a bound of `clamp`, or was added, and the format of the result holds 0, 1 or -1 in "
    "its place. Functions of torch count, too: the default `eps` of `F.normalize` and `F.cosine_similarity` is 0 in FP16.",
    "A621": _INSPECTED
    + "Here 32- or 64-bit integers were cast to 16 bits, or added to 16-bit numbers or multiplied by them, and one of them changed; "
    "or `arange` or `linspace` counted in 16 bits to where its format's numbers are farther apart than its steps. Integers that only "
    "divide do not count: a quotient is rounded as much in any case.",
    "A622": (
        "Mezzo reads the formats of an optimizer's state after its first update, and the decay of its second moment (`exp_avg_sq`, "
        "`square_avg`, `exp_inf`, `v`). In FP16 it is always reported; in BF16 if one minus the decay is below half a unit in the last "
        "place of every number, which is 2^-9 of it: decays above 0.998. "
        "Adagrad's sum is reported in both."
    ),
    "A623": _INSPECTED
    + "Here `sin`, `cos` or `polar` read angles that all are 16-bit numbers, whatever format they were stored in, or products of "
    "untrained numbers that a cast to 16 bits rounded; and the largest lies where neighbouring numbers are at least half a radian apart: "
    "from 64 in BF16 and from 512 in FP16.",
    "A624": _GRAPH
    + "Here an update had fewer backward passes than one before it, which were divided by their number, and each loss was divided by that "
    "number, too. A division of the gradients, or of a sum of losses, is not followed." + _FIRST,
    "A625": _INSPECTED
    + "Here numbers that are not negative were added in place to a 16-bit tensor from an earlier step that nothing multiplied or "
    "overwrote, or a quarter of a 16-bit `cumsum`'s addends did not change it.",
    "A626": (
        "Mezzo observes torch's reentrant checkpointing while gradients are on: here no argument of the checkpointed function required "
        "a gradient, and a module that it called has weights that do."
    )
    + _FIRST,
    "A627": (
        "Mezzo reads the formats of an optimizer's state after its first update: here a tensor of a weight's shape has 16 bits and the "
        "weight is FP32, or a count of steps has 16 bits. State with scales of its own, as 8-bit optimizers keep it, does not count."
    ),
    "A628": (
        f"Mezzo reads the formats of an optimizer's state before updates {_COMPARED}, and before each next one; and what "
        "`load_state_dict` was given, and what it left when the next update began."
    ),
    "A629": _SAMPLED
    + "Here every FP32 number that two updates or more had changed was a BF16 or FP16 number: its last 16 or 13 bits were 0. In results "
    "of FP32 arithmetic that happens once in 65,536 or 8,192 numbers. Zeros and powers of two do not count, nor the first update, which "
    "copies a gradient into the state of some optimizers. After `load_state_dict` it is reported if all tensors of a name are so.",
    "A630": (
        "Mezzo records the 16-bit formats that the script asks `torch.autocast`, `TrainingArguments`, `Accelerator`, Lightning's `Trainer` "
        "and FSDP for, and the formats of all results in the forward pass of the second step, or of the steps that `mezzo audit` records: "
        "here products ran, and no result had the format. Scripts that compile code are not checked, nor regions that other steps enter."
    ),
    "A631": (
        "Mezzo observes `all_reduce`, `reduce` and `reduce_scatter_single` of `torch.distributed` during backward passes and between them "
        "and the update: here a 16-bit tensor had the shape of an FP32 weight, or was a flat buffer beside FP32 weights. What DDP reduces "
        "without a hook, and what `redistribute` of a DTensor reduces, is not seen."
    )
    + _FIRST,
    "A632": (
        "Mezzo observes torch's clipping, and in some updates the script's own calls between a backward pass and the update: here "
        "gradients in 16 bits were clipped by their norm, or a norm of gradients was computed in 16 bits or cast to them."
    ),
    "A633": _SAMPLED
    + "Here, in two updates or more, three quarters or more of a 16-bit weight's sampled numbers with a gradient stayed the same. Biases "
    "alone do not count: before a norm, their gradients are noise. For an optimizer that is not torch's, all numbers have to stay, and its "
    "state may hold nothing like a master weight: it may round at random. Weight decay is reported if the optimizer multiplies 16-bit "
    "weights by a number so close to 1 that none can change.",
    "A634": (
        "Mezzo follows the loss back through the products that end its graph: here are two products of GradScalers, or one "
        "beside a factor that is the scale itself or a power of two from 128 on. `mezzo.Session` refuses a scaled loss. A factor that is a "
        "size of the model's input does not count, nor do gradients that the script changes before the update."
    )
    + _FIRST,
    "A635": "After an optimizer's first update, Mezzo reads the settings of `torch.optim.Adafactor`: here `eps` begins with `None`, and "
    "weights of its group are in 16 bits. How large gradients are is not read. Adafactor of other libraries has an `eps` of its own.",
}


def shown(finding: Finding) -> str:
    """Return a finding as the terminal shows it, without the places in the planted script."""
    section = finding_section(finding)
    facts = [fact for block in section.blocks if isinstance(block, FactTable) for fact in block.rows]
    parts = [f"{section.code}  {section.title}  ({section.weight})"]
    for word, text in [(fact.what, fact.value) for fact in facts if fact.what not in ("lines", "page")]:
        parts += textwrap.wrap(text, WIDTH, initial_indent=f"  {word:7}", subsequent_indent=" " * 9)
    return textwrap.indent("\n".join(parts), "    ")


def sections(finding: Finding) -> str:
    """Return the two sections of a finding's page."""
    how = "\n".join(textwrap.wrap(HOW[finding.code], 160, break_long_words=False, break_on_hyphens=False))
    return f"## How it is found\n\n{how}\n\n## In the output\n\n{shown(finding)}\n"


def planted(code: str) -> Finding:
    """Return what Mezzo finds in the planted script of a code."""
    if code.startswith("A6"):
        from observe.lint.test_lint import PLANTED, linted

        name = next((name for name, planted in PLANTED.items() if planted.code == code), "")
        assert name, f"no line of tests/scripts/lint_planted.py ends with # {code}"
        found: Sequence[Finding] = linted("lint_planted", "as-is", name)
    elif code in _ON_CUDA:
        found = _ON_CUDA[code]()
    else:
        from helpers_audit import audited
        from observe.audit.test_audit_findings import CASES

        found = audited("audit_cases", code, "planted", policy=CASES[code][0]).findings
    finding = next((finding for finding in found if finding.code == code), None)
    assert finding is not None, f"Mezzo does not find {code} in its planted script, but {[f.code for f in found]}"
    return finding


def _on_cuda(**facts: object) -> Callable[[], list[Finding]]:
    def find() -> list[Finding]:
        from mezzo.observe.audit.findings import AuditedSteps, findings
        from observe.audit.test_audit_findings import one_product

        form = str(facts["form"])
        more = {name: value for name, value in facts.items() if name != "form"}
        return findings(
            AuditedSteps(operations=one_product(1024, form=form), wide=[], trips=[], **{"products": [], **more})
        )

    return find


def _slow_product() -> list[Finding]:
    from observe.audit.test_audit_findings import product

    return _on_cuda(form="bf16", products=[product(on_tensor_cores=False, kernels=["ampere_sgemm_128x64_tn"])])()


_ON_CUDA: dict[str, Callable[[], list[Finding]]] = {
    "A204": _on_cuda(form="fp32", device_type="cuda", capability=(8, 0)),
    "A501": _slow_product,
}
"""Findings that only a GPU shows: of a product as a GPU would report it."""


def main(codes: Sequence[str]) -> None:
    """Write the two sections into the pages of ``codes``, before the section on the fix; begin a page that does not exist."""
    for code in codes or HOW:
        page = PAGES / f"{code}.md"
        text = page.read_text(encoding="utf-8") if page.exists() else NEW_PAGE.format(code=code, title=_titles()[code])
        before, _, fix = text.partition("## Fix\n")
        before = before.partition("## How it is found\n")[0]
        page.write_text(f"{before}{sections(planted(code))}\n## Fix\n{fix}", encoding="utf-8")
    index = PAGES / "README.md"
    before, head, rest = index.read_text(encoding="utf-8").partition("| code | finding |\n|---|---|\n")
    after = rest[rest.index("\n\n") :]
    rows = "\n".join(f"| [{code}]({code}.md) | {title} |" for code, title in _titles().items())
    index.write_text(f"{before}{head}{rows}{after}", encoding="utf-8")


NEW_PAGE = """# {code}: {title}

## Cause

## What it costs

## Example

## Fix
"""


def _titles() -> dict[str, str]:
    return {finding.code: finding.title for finding in [*RULES, *MISUSES]}


if __name__ == "__main__":
    main(sys.argv[1:])
